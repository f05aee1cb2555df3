"""What a restore will read, and everything that is wrong with it, before it reads."""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from flax_layoutmap._core.errors import CheckpointError, ResolveError, meant
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import resolve, resolve_with_origins
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap.checkpoint._leaves import (
    Leaf,
    key_data_shape,
    key_leaf,
    leaf_of,
    result_of,
)
from flax_layoutmap.checkpoint._options import Options
from flax_layoutmap.checkpoint._selection import Selection
from flax_layoutmap.checkpoint._stored import Stored
from flax_layoutmap.checkpoint._target import own_sharding, shardings_by_path

# Names that look alike are looked for this often; after that it would take too long.
_HINTS = 50

# Of the PRNGs that JAX has.
_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """One leaf to restore.

    Attributes:
        stored: the leaf in the checkpoint, with its path there.
        result: the leaf to make of it.
        sharding: where it goes; None for a Python value or a NumPy array.
        exactly: whether a number has to be the same after a conversion.
    """

    stored: Leaf
    result: Leaf
    sharding: Any
    exactly: bool = True


@dataclasses.dataclass
class Plan:
    """What to read, and what is wrong.

    Attributes:
        reads: path → leaf to restore.
        problems: one text each; nothing is read unless this is empty.
        resolution: what the rules say; None without rules, or if they do not fit.
        kept: paths of the target that keep its values.
        made: path of a leaf that the target makes itself → its sharding.
        ignored: paths of the checkpoint that nothing is done about.
    """

    reads: dict[str, Read] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    resolution: Resolution | None = None
    kept: list[str] = dataclasses.field(default_factory=list)
    made: dict[str, Any] = dataclasses.field(default_factory=dict)
    ignored: list[str] = dataclasses.field(default_factory=list)


def plan_without_target(
    stored: Stored, rules: RuleSet | None, options: Options
) -> Plan:
    """Plans to restore what the checkpoint holds, laid out by the rules.

    Raises:
        CheckpointError: there are no rules.
    """
    if rules is None:
        raise CheckpointError(
            f"cannot restore {stored.where} without layouts: {_layouts_of(stored)}"
        )
    selection = options.selection
    plan = Plan(problems=selection.useless(stored.leaves))
    selected = [path for path in stored.leaves if path in selection]
    _resolve_stored(plan, stored, rules, selection, selected)
    shardings = shardings_by_path(plan.resolution)
    for path in selected:
        _add(plan, path, stored.leaves[path], None, shardings.get(path), options)
    plan.ignored = [path for path in stored.leaves if path not in selection]
    return plan


def _layouts_of(stored: Stored) -> str:
    """How to say where leaves go, without a target."""
    record = stored.record
    saved = f" (it was saved on {_axes_of(record.mesh)})" if record.mesh else ""
    if record.rules is not None:
        return (
            f"pass mesh= for the rules that it was saved with{saved}, or layout_map= "
            "with others, or a target that has shardings"
        )
    return (
        f"pass layout_map=, on the mesh to restore to{saved}, or a target that has "
        "shardings"
    )


def _axes_of(mesh: DeviceMesh) -> str:
    sizes = ",".join(f"{name}={size}" for name, size in mesh.axis_sizes.items())
    return f"a mesh {sizes}"


def plan_for_target(
    stored: Stored,
    target: Mapping[str, Any],
    tree: Any,
    rules: RuleSet | None,
    options: Options,
    can_make: bool,
) -> Plan:
    """Plans to restore the leaves of a target, joined with the checkpoint by path.

    Args:
        stored: the checkpoint.
        target: path → leaf of the target, concrete or abstract.
        tree: the target, as it can be resolved.
        rules: the rules; None takes each leaf's own sharding.
        options: what else was asked for.
        can_make: whether the target is a function, which can make leaves.
    """
    selection = options.selection
    leaves = _as_in_target(stored, target)
    plan = Plan(problems=selection.useless([*leaves, *target]))
    shardings: Mapping[str, Any] = {}
    if rules is not None:
        _resolve_target(plan, stored, tree, rules)
        shardings = shardings_by_path(plan.resolution)
    missing = []
    for path, value in target.items():
        if path not in selection:
            _keep(plan, path, value, "include or exclude leaves it out")
        elif path not in leaves:
            missing.append(path)
        else:
            _join(plan, path, leaves[path], value, shardings.get(path), rules, options)
    extra = [path for path in leaves if path not in target]
    wanted = [path for path in extra if path in selection]
    plan.ignored = [path for path in extra if path not in selection]
    if options.missing == "keep":
        for path in missing:
            _keep(plan, path, target[path], "it is not in the checkpoint")
        missing = []
    elif options.missing == "init" and missing:
        _make(plan, missing, target, shardings, can_make)
        missing = []
    if options.unexpected == "ignore":
        plan.ignored, wanted = extra, []
    plan.problems += _absent(missing, wanted, target, leaves)
    return plan


def _as_in_target(stored: Stored, target: Mapping[str, Any]) -> dict[str, Leaf]:
    """The leaves of the checkpoint, by the names that the target has for them.

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


def _keep(plan: Plan, path: str, value: Any, why: str) -> None:
    """Notes a leaf that keeps the value that the target has."""
    if isinstance(value, jax.ShapeDtypeStruct):
        plan.problems.append(
            f"{path} {show_shape(value.shape)}: {why}, and the target is abstract, so "
            "there is no value to keep; give a concrete target"
        )
    plan.kept.append(path)


def _make(
    plan: Plan,
    missing: Sequence[str],
    target: Mapping[str, Any],
    shardings: Mapping[str, Any],
    can_make: bool,
) -> None:
    """Notes the leaves that the target itself makes."""
    for path in missing:
        name = f"{path} {show_shape(np.shape(target[path]))}"
        if not can_make:
            plan.problems.append(
                f'{name}: is not in the checkpoint, and missing="init" needs a '
                "function as target, which makes it: lambda: Model(rngs=nnx.Rngs(0))"
            )
        elif path not in shardings and not plan.problems:
            plan.problems.append(
                f'{name}: is not in the checkpoint, and missing="init" needs '
                "layout_map= to say where it goes"
            )
        plan.made[path] = shardings.get(path)


def _join(
    plan: Plan,
    path: str,
    stored: Leaf,
    value: Any,
    sharding: Any,
    rules: RuleSet | None,
    options: Options,
) -> None:
    """Notes a leaf that both sides have."""
    leaf = leaf_of(path, value)
    if leaf is None:
        kind = type(value).__qualname__
        plan.problems.append(f"{path}: the {kind} in the target is no array")
        return
    if rules is None:
        sharding, problem = own_sharding(leaf, value)
        if problem is not None:
            plan.problems.append(f"{leaf.name}: {problem}")
            return
    _add(plan, path, stored, leaf, sharding, options)


# ------------------------------------------------------------------- details


def _add(
    plan: Plan,
    path: str,
    stored: Leaf,
    target: Leaf | None,
    sharding: Any,
    options: Options,
) -> None:
    dtype = options.dtypes.of(path)
    result = result_of(stored, target, dtype)
    if isinstance(result, str):
        plan.problems.append(f"{stored.name}: {result}")
        return
    if sharding is None and target is not None and target.is_numpy:
        result = dataclasses.replace(result, is_numpy=True)
    if result.is_python or result.is_numpy:
        sharding = None
    plan.reads[path] = Read(stored, result, sharding, exactly=dtype is None)


def _as_keys(stored: Leaf, value: Any) -> Leaf:
    """Numbers that Orbax noted of PRNG keys, as the keys that the target has there."""
    target = leaf_of("", value)
    if target is None or target.kind != "key" or stored.dtype != np.uint32:
        return stored
    for name in _IMPLEMENTATIONS:
        keys = key_leaf(stored.path, target.shape, name)
        if keys.dtype == target.dtype:
            data = key_data_shape(name)
            return keys if stored.shape == (*target.shape, *data) else stored
    return stored


def _resolve_stored(
    plan: Plan,
    stored: Stored,
    rules: RuleSet,
    selection: Selection,
    selected: Sequence[str],
) -> None:
    """Resolves the tree that was saved; of a selection, no more than it needs."""
    try:
        plan.resolution = stored.record.resolve(stored.leaves, rules)
        return
    except ResolveError as error:
        if selection.is_everything:
            plan.problems += error.problems or [str(error)]
            return
    # Rules may fail to fit just the leaves that are left out.
    try:
        plan.resolution = stored.record.resolve(stored.leaves, rules, selected)
    except ResolveError as error:
        plan.problems += error.problems or [str(error)]


def _resolve_target(plan: Plan, stored: Stored, tree: Any, rules: RuleSet) -> None:
    """Resolves the target; the checkpoint knows what an optimizer without tx does not.

    (A State of one, or one that a traced function makes.)
    """
    try:
        resolution = resolve(tree, rules)
        if any(leaf.reason == "unknown optimizer state" for leaf in resolution):
            origins = stored.record.origins
            other = resolve_with_origins(tree, resolution.rules, origins)
            if len(other.unmatched) < len(resolution.unmatched):
                resolution = other
        plan.resolution = resolution
    except ResolveError as error:
        plan.problems += error.problems or [str(error)]


def _absent(
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
    for top, paths in _by_top(extra).items():
        if len(paths) == tops[top] > 1:
            names = [f"{top}/ ({tops[top]} leaves)"]
            patterns = [f"^{re.escape(top)}/"]
        else:
            names = [f"{path} {show_shape(leaves[path].shape)}" for path in paths]
            patterns = [f"^{re.escape(path)}$" for path in paths]
        problems += [
            f"{name}: is in the checkpoint, not in the target; to leave it out: "
            f"exclude={pattern!r}"
            for name, pattern in zip(names, patterns, strict=True)
        ]
    return problems


def _by_top(paths: Sequence[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(path.split("/")[0], []).append(path)
    return groups


def _moved(target: list[str], stored: list[str]) -> str | None:
    """Whether one tree is the other under a key: the usual mistake."""
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
