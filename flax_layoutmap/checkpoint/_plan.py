"""What a restore will read, and everything that is wrong with it, before it reads."""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from flax_layoutmap._errors import CheckpointError, ResolveError, closest
from flax_layoutmap._records import show_shape
from flax_layoutmap._resolution import Resolution
from flax_layoutmap._resolve import resolve, resolve_with_origins
from flax_layoutmap._rules import RuleSet
from flax_layoutmap.checkpoint import _orbax, _record
from flax_layoutmap.checkpoint._leaves import Leaf, leaf_of, result_of
from flax_layoutmap.checkpoint._selection import Selection

# Names that look alike are looked for this often; after that it would take too long.
_HINTS = 50


@dataclasses.dataclass(frozen=True)
class Stored:
    """A checkpoint, as far as its metadata tells.

    Attributes:
        where: its path.
        record: what flax_layoutmap wrote into it.
        leaves: path → leaf, in the order of the tree that was saved.
        held: path → Orbax's own metadata, for the leaves that Orbax holds.
    """

    where: str
    record: _record.Record
    leaves: dict[str, Leaf]
    held: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """One leaf to restore.

    Attributes:
        stored: the leaf in the checkpoint.
        result: the leaf to make of it.
        sharding: where it goes; None for a Python value or a NumPy array.
    """

    stored: Leaf
    result: Leaf
    sharding: Any


def open_checkpoint(where: str) -> Stored:
    """Reads the metadata of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged or of another kind.
    """
    held, custom = _orbax.read_metadata(where)
    record = _record.from_json(custom.get(_record.KEY), where)
    leaves: dict[str, Leaf] = {}
    for path in record.paths:
        metadata = held.get(path)
        if (metadata is None) != record.is_empty(path):
            raise CheckpointError(
                f"the checkpoint {where} is damaged: Orbax has "
                f"{'no' if metadata is None else 'an unexpected'} leaf {path!r}"
            )
        try:
            leaves[path] = record.leaf(path, metadata)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint {where}: leaf {path!r} cannot be read: {error}"
            ) from error
    extra = sorted(set(held) - set(leaves))
    if extra:
        raise CheckpointError(
            f"the checkpoint {where} is damaged: Orbax holds leaves that its metadata "
            f"does not list, such as {extra[0]!r}"
        )
    return Stored(where, record, leaves, held)


@dataclasses.dataclass
class Plan:
    """What to read, and what is wrong.

    Attributes:
        reads: path → leaf to restore.
        problems: one text each; nothing is read unless this is empty.
        resolution: what the rules say; None without rules, or if they do not fit.
    """

    reads: dict[str, Read] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    resolution: Resolution | None = None


def plan_without_target(
    stored: Stored, rules: RuleSet | None, selection: Selection, dtype: Any
) -> Plan:
    """Plans to restore what the checkpoint holds, laid out by the rules.

    Raises:
        CheckpointError: there are no rules.
    """
    if rules is None:
        mesh = stored.record.mesh
        saved = f" (it was saved on a mesh {mesh})" if mesh else ""
        raise CheckpointError(
            f"cannot restore {stored.where} without layouts: pass layout_map=, on the "
            f"mesh to restore to{saved}, or a target that has shardings"
        )
    plan = Plan(problems=selection.useless(stored.leaves))
    selected = [path for path in stored.leaves if path in selection]
    _resolve_stored(plan, stored, rules, selection, selected)
    shardings = _shardings(plan.resolution)
    for path in selected:
        leaf = stored.leaves[path]
        _add(plan, leaf, None, shardings.get(path), dtype)
    return plan


def plan_for_target(
    stored: Stored,
    target: Mapping[str, Any],
    tree: Any,
    rules: RuleSet | None,
    selection: Selection,
    dtype: Any,
) -> Plan:
    """Plans to restore the leaves of a target, joined with the checkpoint by path.

    Args:
        stored: the checkpoint.
        target: path → leaf of the target, concrete or abstract.
        tree: the target, as it can be resolved.
        rules: the rules; None takes each leaf's own sharding.
        selection: which leaves to restore; the others keep the target's value.
        dtype: the `dtype` argument of `restore`.
    """
    plan = Plan(problems=selection.useless([*stored.leaves, *target]))
    shardings: Mapping[str, Any] = {}
    if rules is not None:
        _resolve_target(plan, stored, tree, rules)
        shardings = _shardings(plan.resolution)
    selected = [path for path in target if path in selection]
    missing = [path for path in selected if path not in stored.leaves]
    extra = [path for path in stored.leaves if path in selection]
    extra = [path for path in extra if path not in target]
    for path, value in target.items():
        if path not in selection:
            if isinstance(value, jax.ShapeDtypeStruct):
                name = f"{path} {show_shape(value.shape)}"
                plan.problems.append(
                    f"{name}: include or exclude leaves it out, and the target is "
                    "abstract, so there is no value to keep; give a concrete target"
                )
            continue
        if path not in stored.leaves:
            continue
        leaf = leaf_of(path, value)
        if leaf is None:
            kind = type(value).__qualname__
            plan.problems.append(f"{path}: the {kind} in the target is no array")
            continue
        sharding = shardings.get(path)
        if rules is None:
            sharding, problem = _own_sharding(leaf, value)
            if problem is not None:
                plan.problems.append(f"{leaf.name}: {problem}")
                continue
        _add(plan, stored.leaves[path], leaf, sharding, dtype)
    plan.problems += _absent(missing, extra, target, stored)
    return plan


# ------------------------------------------------------------------- details


def _add(
    plan: Plan, stored: Leaf, target: Leaf | None, sharding: Any, dtype: Any
) -> None:
    result = result_of(stored, target, dtype)
    if isinstance(result, str):
        plan.problems.append(f"{stored.name}: {result}")
        return
    if sharding is None and target is not None and target.is_numpy:
        result = dataclasses.replace(result, is_numpy=True)
    if result.is_python or result.is_numpy:
        sharding = None
    plan.reads[stored.path] = Read(stored, result, sharding)


def _own_sharding(leaf: Leaf, value: Any) -> tuple[Any, str | None]:
    """The sharding that a leaf of the target has, or what is wrong with it."""
    if leaf.is_python or leaf.is_numpy:
        return None, None
    sharding = value.sharding
    if sharding is None:
        return None, "the target has no sharding for it; pass layout_map="
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        return None, "the target's sharding has no devices; pass layout_map="
    try:
        sharding.shard_shape(leaf.shape)
    except ValueError as error:
        return None, f"the target's sharding does not fit it: {error}"
    return sharding, None


def _shardings(resolution: Resolution | None) -> dict[str, NamedSharding]:
    if resolution is None:
        return {}
    return dict(zip(resolution.paths, resolution.sharding_list(), strict=True))


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
    stored: Stored,
) -> list[str]:
    """Problems for the leaves that only one side has."""
    moved = _moved(list(target), list(stored.leaves)) if missing else None
    if moved is not None:
        return [moved]
    problems = []
    for number, path in enumerate(missing):
        near = closest(path, extra) if number < _HINTS else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        name = f"{path} {show_shape(np.shape(target[path]))}"
        problems.append(f"{name}: is in the target, not in the checkpoint{hint}")
    tops = Counter(path.split("/")[0] for path in stored.leaves)
    for top, paths in _by_top(extra).items():
        if len(paths) == tops[top] > 1:
            names = [f"{top}/ ({tops[top]} leaves)"]
            patterns = [f"^{re.escape(top)}/"]
        else:
            names = [stored.leaves[path].name for path in paths]
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


def orbax_target(read: Read, held: Any) -> Any:
    """What Orbax is to be asked for, to make a leaf."""
    stored, result = read.stored, read.result
    if stored.kind in ("int", "float", "string"):
        return held
    if read.sharding is None or stored.is_python:
        return np.ndarray
    dtype = held.dtype if stored.kind == "key" else result.dtype
    return jax.ShapeDtypeStruct(held.shape, dtype, sharding=read.sharding)
