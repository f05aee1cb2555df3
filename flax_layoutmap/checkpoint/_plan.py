"""Plan a restore from Orbax: join the metadata of a checkpoint by path."""

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flax_layoutmap._core.errors import CheckpointError, ResolveError, meant
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import resolve, resolve_with_origins
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap.checkpoint._join import Held, Plan, Target, join, opened
from flax_layoutmap.checkpoint._leaves import (
    Leaf,
    key_data_shape,
    key_leaf,
    leaf_of,
    problem_list,
)
from flax_layoutmap.checkpoint._options import Options
from flax_layoutmap.checkpoint._stored import Stored

# Similar names are searched for this many leaves; beyond that it would take too long.
_HINTS = 50

# Of the PRNGs that JAX has.
_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")


def plan_restore(stored: Stored, options: Options) -> Plan:
    """Join the leaves of a checkpoint with those of the target, by path.

    Raises:
        CheckpointError: there are no layouts, or a function is a part of the target.
    """
    rules = options.rules
    if rules is None and options.mesh is not None:
        rules = stored.record.rule_set(options.mesh)
        if rules is None:
            raise CheckpointError(
                f"{stored.where} was saved without rules, so mesh= is not enough; pass "
                "layout_map="
            )
    options = options.among(stored.record.flat)
    if options.target is None:
        return _without_target(stored, rules, options)
    target = opened(options.target)
    return _with_target(stored, target, rules, options.among(target.flat))


def _without_target(stored: Stored, rules: RuleSet | None, options: Options) -> Plan:
    """Plan to restore what the checkpoint holds, laid out by the rules."""
    if rules is None:
        raise CheckpointError(
            f"cannot restore {stored.where} without layouts: {_layouts_of(stored)}"
        )
    selection, leaves = options.selection, stored.leaves
    ignored = tuple(path for path in leaves if path not in selection)

    def resolve_saved() -> Resolution:
        try:
            return stored.record.resolve(leaves, rules)
        except ResolveError:
            if selection.is_everything:
                raise
        # Rules may fail to fit just the leaves that are left out.
        selected = [path for path in leaves if path in selection]
        return stored.record.resolve(leaves, rules, selected)

    held = Held(leaves, ignored=ignored)
    return join(held, None, rules, resolve_saved, options)


def _layouts_of(stored: Stored) -> str:
    """The ways to place leaves without a target, for the message."""
    record, saved = stored.record, ""
    if record.mesh:
        sizes = ",".join(f"{name}={n}" for name, n in record.mesh.axis_sizes.items())
        saved = f" (it was saved on a mesh {sizes})"
    if record.rules is not None:
        return (
            f"pass mesh= for the rules that it was saved with{saved}, or layout_map= "
            "with others, or a target that has shardings"
        )
    return (
        f"pass layout_map=, on the mesh to restore to{saved}, or a target that has "
        "shardings"
    )


def _with_target(
    stored: Stored, target: Target, rules: RuleSet | None, options: Options
) -> Plan:
    """Plan to restore the leaves of a target."""
    wanted, selection = target.leaves, options.selection
    functions = [
        f"{path}: a function must be the whole target (it returns the tree)"
        for path, leaf in wanted.items()
        if callable(leaf) and path in selection
    ]
    if functions:
        raise problem_list(f"cannot restore {stored.where}", functions)
    leaves = _as_in_target(stored, wanted)
    missing = [path for path in wanted if path in selection and path not in leaves]
    extra = [path for path in leaves if path not in wanted]
    is_ignored = options.unexpected == "ignore"
    unexpected = [path for path in extra if path in selection and not is_ignored]
    ignored = [path for path in extra if path not in selection or is_ignored]
    absent: dict[str, str] = {}
    if options.missing != "error":
        absent = dict.fromkeys(missing, "it is not in the checkpoint")
        missing = []
    problems = _one_sided(missing, unexpected, wanted, leaves)
    held = Held(leaves, absent, ignored=tuple(ignored), problems=tuple(problems))
    resolve_target = functools.partial(_resolved, stored, target.tree, rules)
    return join(held, target, rules, resolve_target, options)


def _resolved(stored: Stored, tree: Any, rules: Any) -> Resolution:
    """Resolve the target, with the origins in the checkpoint for unknown optimizers.

    (A State of one, or one that a traced function makes.)
    """
    resolution = resolve(tree, rules)
    if any(leaf.reason == "unknown optimizer state" for leaf in resolution):
        origins = stored.record.origins
        other = resolve_with_origins(tree, resolution.rules, origins)
        if len(other.unmatched) < len(resolution.unmatched):
            return other
    return resolution


def _as_in_target(stored: Stored, target: Mapping[str, Any]) -> dict[str, Leaf]:
    """The leaves of the checkpoint, by their names in the target.

    In a checkpoint without a record, a parameter that is called `value` looks like the
    content of a Variable.
    """
    if stored.is_ours:
        return stored.leaves
    found: dict[str, Leaf] = {}
    for path, leaf in stored.leaves.items():
        is_value = leaf.path == f"{path}/value"
        is_free = leaf.path in target and leaf.path not in stored.leaves
        name = leaf.path if is_value and is_free and path not in target else path
        found[name] = _as_keys(leaf, target[name]) if name in target else leaf
    return found


def _as_keys(stored: Leaf, value: Any) -> Leaf:
    """The uint32 data of PRNG keys as keys, where the target has keys."""
    target = leaf_of("", value)
    if target is None or target.kind != "key" or stored.dtype != np.uint32:
        return stored
    for name in _IMPLEMENTATIONS:
        keys = key_leaf(stored.path, target.shape, name)
        if keys.dtype == target.dtype:
            data = key_data_shape(name)
            return keys if stored.shape == (*target.shape, *data) else stored
    return stored


# ------------------------------------------------- leaves that only one side has


def _one_sided(
    missing: Sequence[str],
    extra: Sequence[str],
    target: Mapping[str, Any],
    leaves: Mapping[str, Leaf],
) -> list[str]:
    """Problems for the leaves that only one side has."""
    moved = _moved(list(target), list(leaves)) if missing else None
    if moved is not None:
        return [moved]
    problems = []
    for number, path in enumerate(missing):
        near = meant(path, extra) if number < _HINTS else None
        hint = ""
        if near is not None:
            rename = {f"^{re.escape(near)}$": path}
            hint = f"; did you mean {near!r}? then pass rename={rename}"
        name = f"{path} {show_shape(np.shape(target[path]))}"
        problems.append(f"{name}: is in the target, not in the checkpoint{hint}")
    tops = Counter(path.split("/")[0] for path in leaves)
    groups: dict[str, list[str]] = {}
    for path in extra:
        groups.setdefault(path.split("/")[0], []).append(path)
    for top, paths in groups.items():
        if len(paths) == tops[top] > 1:
            names = {f"{top}/ ({tops[top]} leaves)": f"^{re.escape(top)}/"}
        else:
            names = {
                f"{path} {show_shape(leaves[path].shape)}": f"^{re.escape(path)}$"
                for path in paths
            }
        problems += [
            f"{name}: is in the checkpoint, not in the target; to leave it out: "
            f"exclude={pattern!r}"
            for name, pattern in names.items()
        ]
    return problems


def _moved(target: list[str], stored: list[str]) -> str | None:
    """The problem that one tree is the other below a key, a common mistake; or None."""
    prefix = _prefix(target, stored)
    if prefix is not None:
        key = prefix.removesuffix("/")
        return (
            f"the checkpoint has the target's paths below {prefix!r}: pass "
            f"target={{{key!r}: target}}, include={f'^{re.escape(prefix)}'!r}"
        )
    prefix = _prefix(stored, target)
    if prefix is not None:
        key = prefix.removesuffix("/")
        return (
            f"the target has the checkpoint's paths below {prefix!r}: pass "
            f"target=target[{key!r}]"
        )
    return None


def _prefix(inner: list[str], outer: list[str]) -> str | None:
    """The key (no path of several) below which `outer` has all of `inner`."""
    known = set(outer)
    for path in outer:
        prefix = path.removesuffix(inner[0]) if inner else ""
        if prefix != path and prefix.count("/") == 1 and prefix.endswith("/"):
            if all(f"{prefix}{other}" in known for other in inner):
                return prefix
    return None
