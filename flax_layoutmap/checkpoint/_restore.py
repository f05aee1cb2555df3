"""flm.checkpoint.restore."""

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from flax_layoutmap._errors import CheckpointError, MeshError
from flax_layoutmap._flatten import flatten
from flax_layoutmap._paths import unescape
from flax_layoutmap._place import put, settle_metadata
from flax_layoutmap._processes import Agreement
from flax_layoutmap._rules import RuleSet
from flax_layoutmap.checkpoint import _orbax
from flax_layoutmap.checkpoint._leaves import (
    TYPES,
    Leaf,
    fits_jax,
    is_floating,
    key_data_shape,
    mesh_of,
    problem_list,
)
from flax_layoutmap.checkpoint._plan import (
    Plan,
    Read,
    Stored,
    open_checkpoint,
    orbax_target,
    plan_for_target,
    plan_without_target,
)
from flax_layoutmap.checkpoint._record import rules_of
from flax_layoutmap.checkpoint._selection import Selection
from flax_layoutmap.checkpoint._target import opened


def restore(
    path: str | os.PathLike[str],
    target: Any = None,
    *,
    layout_map: Any = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    dtype: Any = None,
) -> Any:
    """Restores a checkpoint of `save`, each leaf straight into its shards.

    All is checked before an array byte is read; one error lists every problem. The
    mesh may have another shape, other axis names and another number of devices than
    the one it was saved on.

    Args:
        path: the checkpoint.
        target: what to restore into, joined with the checkpoint by path: modules,
            States, optimizers, TrainStates or any tree, concrete or abstract (holding
            `jax.ShapeDtypeStruct`s), or a function that makes one, which is only
            traced. None: everything in the checkpoint, as a nested dict.
        layout_map: the rules, on a mesh of devices. None: the shardings that the
            leaves of the target have.
        include: a regular expression, or several, searched in the full paths
            (`model/decoder/…`); only leaves that one of them finds are restored.
        exclude: likewise; leaves that one of them finds are not restored. Leaves of
            the target that are not restored keep their values; it must have some.
        dtype: a floating-point dtype for all floating-point arrays, or `"target"`
            for the target's. No other numbers are ever converted.

    Returns:
        The target's own type. Concrete NNX objects are updated in place, once all has
        been read; abstract ones come back as new objects; other trees are rebuilt.
        Python numbers come back as the target's kind: `3` for an `int`, an array for
        an array without dims. Without a target, a nested dict of arrays; Python numbers
        and strings as they were saved.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or it does not fit
            the target or the rules.
        MeshError: the rules have no mesh of devices.

    Plain JAX: `orbax.checkpoint.v1.load(path, layout_map.abstract(tree))`.
    """
    place = _orbax.absolute(path)
    rules = rules_of(layout_map)
    selection = Selection(include, exclude)
    dtype = _checked_dtype(dtype, target)
    _check_mesh(rules)
    with Agreement(f"restoring {place}", mesh_of(target, rules)) as agreement:
        stored = open_checkpoint(place)
        tree, rebuild = opened(target)
        flat = flatten(tree)
        leaves = dict(zip(flat.full_paths(), flat.leaves, strict=True))
        _check_functions(leaves, place, selection)
        if target is None:
            plan = plan_without_target(stored, rules, selection, dtype)
        else:
            plan = plan_for_target(stored, leaves, tree, rules, selection, dtype)
        if plan.problems:
            raise problem_list(f"cannot restore {place}", plan.problems)
        if plan.resolution is not None:
            plan.resolution.announce()
        agreement.add(lambda: {"leaves": str(list(plan.reads.values()))})
    values = _read(stored, plan, dtype)
    if target is None:
        return _orbax.nested(values, unescape)
    result = rebuild([*(leaves | values).values()])
    if plan.resolution is not None:
        result = settle_metadata(result, plan.resolution)
    return result


# --------------------------------------------------------------------- checks


def _checked_dtype(dtype: Any, target: Any) -> Any:
    if dtype is None:
        return None
    if isinstance(dtype, str) and dtype == "target":
        if target is None:
            raise CheckpointError(
                'dtype="target" needs a target; without one name the dtype itself'
            )
        return dtype
    try:
        wanted = np.dtype(dtype)
    except TypeError as error:
        raise CheckpointError(f"dtype={dtype!r} is no dtype: {error}") from error
    if not is_floating(wanted):
        raise CheckpointError(
            f"dtype={wanted} is not floating-point; only floating-point arrays are "
            "converted, and only to floating-point"
        )
    if not fits_jax(wanted):
        raise CheckpointError(f"dtype={wanted} needs jax_enable_x64")
    return wanted


def _check_mesh(rules: RuleSet | None) -> None:
    if rules is None or (rules.mesh is not None and not rules.mesh.is_abstract):
        return
    have = "no mesh" if rules.mesh is None else repr(rules.mesh)
    raise MeshError(
        f"restore needs a mesh of devices, the rules have {have}; use "
        "layout_map.on(flm.DeviceMesh(...))"
    )


def _check_functions(
    leaves: Mapping[str, Any], place: object, selection: Selection
) -> None:
    """Raises CheckpointError for functions that stand for a part of the target."""
    problems = [
        f"{path}: a function must be the whole target (it returns the tree)"
        for path, leaf in leaves.items()
        if callable(leaf) and path in selection
    ]
    if problems:
        raise problem_list(f"cannot restore {place}", problems)


# -------------------------------------------------------------------- reading


def _read(stored: Stored, plan: Plan, dtype: Any) -> dict[str, Any]:
    """Path → restored value of every leaf of the plan."""
    wanted = {
        path: orbax_target(plan.reads[path], held) if path in plan.reads else ...
        for path, held in stored.held.items()
    }
    values = _orbax.read_arrays(stored.where, wanted)
    made, problems = {}, []
    for path, read in plan.reads.items():
        value = _empty(read.stored) if read.stored.is_empty else values[path]
        try:
            made[path] = _as_wanted(read, value, exactly=dtype is None)
        except CheckpointError as error:
            problems.append(f"{read.stored.name}: {error}")
    if problems:
        raise problem_list(f"cannot restore {stored.where}", problems)
    return made


def _empty(leaf: Leaf) -> Any:
    """An array without elements, which Orbax does not store."""
    if leaf.implementation is None:
        return np.zeros(leaf.shape, leaf.dtype)
    data = key_data_shape(leaf.implementation)
    return np.zeros((*leaf.shape, *data), np.uint32)


def _as_wanted(read: Read, value: Any, exactly: bool) -> Any:
    """Makes the result of what Orbax read.

    Raises:
        CheckpointError: a number does not fit the dtype, or Orbax read something else
            than it was asked for.
    """
    result, sharding = read.result, read.sharding
    if result.kind == "key":
        return _checked(_keys(read, value), read)
    if result.is_python:
        value = value.item() if isinstance(value, np.ndarray) else value
        if not isinstance(value, TYPES[result.kind]):
            raise CheckpointError(f"Orbax read the {type(value).__name__} {value!r}")
        return value
    if isinstance(value, np.ndarray | bool | int | float | complex):
        value = _converted(np.asarray(value), result, exactly)
        if sharding is not None:
            value = put(value, sharding)
    return _checked(value, read)


def _converted(value: np.ndarray, result: Leaf, exactly: bool) -> np.ndarray:
    """A host array with the result's dtype."""
    new = value.astype(result.dtype)
    exactly = exactly or not is_floating(result.dtype)
    if exactly and not np.array_equal(new, value, equal_nan=is_floating(value.dtype)):
        raise CheckpointError(
            f"the number {value} of the checkpoint is not exact in {result.dtype}; "
            'dtype="target" rounds a float'
        )
    return new


def _keys(read: Read, value: Any) -> Any:
    """Typed PRNG keys; Orbax gives their numbers where it has lost their kind."""
    if isinstance(value, jax.Array) and value.dtype == read.stored.dtype:
        return value
    wrap = functools.partial(jax.random.wrap_key_data, impl=read.stored.implementation)
    return jax.jit(wrap, out_shardings=read.sharding)(value)


def _checked(value: Any, read: Read) -> Any:
    """Our own last look: nothing abstract, cut, cast or misplaced gets through."""
    result, sharding = read.result, read.sharding
    if isinstance(value, jax.Array):
        placed = sharding is not None
        placed = placed and value.sharding.is_equivalent_to(sharding, value.ndim)
    else:
        placed = isinstance(value, np.ndarray) and sharding is None
    right = placed and (value.shape, value.dtype) == (result.shape, result.dtype)
    if not right:
        found = getattr(value, "sharding", "no sharding")
        raise CheckpointError(
            f"Orbax read {type(value).__name__} {getattr(value, 'dtype', '')} "
            f"{getattr(value, 'shape', '')} with {found}, asked for {result} with "
            f"{sharding}"
        )
    return value
