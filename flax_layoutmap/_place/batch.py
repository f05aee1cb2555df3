"""Pad host batches, and make global arrays of them over the batch axes."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_layoutmap._core.axes import clash
from flax_layoutmap._core.errors import (
    LayoutError,
    MeshError,
    bullet_list,
    did_you_mean,
)
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._core.processes import Agreement, Parts, digest_of_values
from flax_layoutmap._place.place import need_devices, put
from flax_layoutmap._resolve.resolve import rule_set_of
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.flax_internals import is_nnx_object
from flax_layoutmap._tree.objects import NO_NUMBERS
from flax_layoutmap._tree.paths import join_keys

Rows = Literal["local", "global", "partial"]
Fill = Literal["repeat", "zeros"]

_NUMBERS = bool | int | float | complex


def distribute_batch(
    batch: Any, layout_map: Any, *, rows: Rows = "local", check: bool = True
) -> Any:
    """Make global arrays from a host batch, sharded over the `batch` axes.

    Dim 0 of every array, its rows, is split over the map's `batch` axes; other dims,
    also a sequence, are not. Scalars and PRNG keys are replicated: typed keys, and JAX
    arrays of `jax.random.PRNGKey`. Arrays with that sharding are returned as they are,
    other arrays on the mesh are moved. Nothing is donated. As with `jax.device_put`, do
    not write into a NumPy array afterwards: on CPU its memory may be shared.

    Args:
        batch: a tree of NumPy arrays, JAX arrays, numbers, or objects with
            `__array__`; all with the same number of rows. None stays None.
        layout_map: the rules, on a mesh of devices; only their `batch` axes matter.
        rows: which rows a process passes; in a single process, always all of them.

            - `"local"`: those of its own devices. A process with one half of the batch
              axes passes that half of the global batch. Processes with the same part,
              as replicas along other axes, pass the same rows, which is not checked.
            - `"global"`: all rows, the same in every process, as `flm.jit` takes a
              batch on the host.
            - `"partial"`: as `"local"`, but processes with the same part share the
              reading: each passes an equal share, in the order of their numbers, and
              the devices exchange them.

        check: with several processes, whether to compare structures, shapes and the
            values of scalars and keys first, so that a difference is an error in every
            process. It is a collective, and waits for the devices: pass False in a loop
            whose batches all have one shape (`flm.pad_batch`), and in threads that
            prefetch.

    Returns:
        The same tree of global `jax.Array`s, in JAX's dtypes.

    Raises:
        LayoutError: leaves that are not arrays, differ in their rows, or do not divide.
        MeshError: no mesh of devices, or one that `rows` does not fit.
        ProcessError: the processes disagree; raised in every process.

    Example:
        >>> import numpy as np, flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap(flm.DeviceMesh("data=2,model=4"))
        >>> batch = {"tokens": np.ones((8, 16), np.int32), "scale": 0.5}
        >>> batch = flm.distribute_batch(batch, layout_map)
        >>> [tuple(batch[name].sharding.spec) for name in ("tokens", "scale")]
        [('data',), ()]

    Plain JAX: `jax.device_put(batch, sharding)`, with several processes
    `jax.make_array_from_process_local_data(sharding, batch)`.
    """
    rules = rule_set_of(layout_map, "distribute_batch(batch, layout_map)")
    need_devices(rules, "distribute_batch")
    _check_choice("rows", rows, get_args(Rows))
    split = _split_on(rules, rows)
    with Agreement("distributing a batch", rules.mesh if check else None) as agreement:
        flat = _flatten(batch, "distribute_batch")
        _check_same_rows(flat, split)
        _check_divides(flat, rules, split, rows)
        if check and jax.process_count() > 1:
            # Compute here, not when called, so that other processes learn of an error.
            parts = _parts(flat, rules, split, rows)
            agreement.add(lambda: parts)
    return jax.tree.unflatten(flat.structure, _placed(flat.leaves, rules, split))


def pad_batch(
    batch: Any,
    multiple: Any = 1,
    *,
    size: int | None = None,
    fill: Fill = "repeat",
    rows: Rows = "local",
) -> tuple[Any, np.ndarray]:
    """Pad a host batch with rows until it divides; return the mask of real rows.

    Pad the last batch of an epoch to the `size` of the others, so that nothing is
    compiled for it. What is averaged over rows must use the mask (batch statistics
    inside a model, as in BatchNorm, include the added rows).

    Args:
        batch: a tree of arrays, all with the same number of rows (dim 0). Scalars and
            PRNG keys stay as they are.
        multiple: the number of rows becomes a multiple of this: a number, or a map, for
            the product of its `batch` axes' sizes (with several processes, the part of
            it that this process fills).
        size: the number of rows to reach; None: the next multiple.
        fill: the rows to add: `"repeat"` repeats the last row, so that values are
            valid; `"zeros"` works for a batch without rows too.
        rows: as for `flm.distribute_batch`, if `multiple` is a map.

    Returns:
        The batch, in NumPy arrays where rows were added, else as it was; and a mask,
        a bool array of shape (rows,), True for the rows of `batch`.

    Raises:
        LayoutError: leaves that are not arrays or differ in their rows, no leaf with
            rows, no row to repeat, or a `size` that is too small or does not divide.
        MeshError: a map without a mesh.

    Example:
        >>> import jax, numpy as np, flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap(flm.DeviceMesh("data=4,model=2"))
        >>> last = {"x": np.ones((6, 3), np.float32), "y": np.zeros(6, np.float32)}
        >>> batch, mask = flm.pad_batch(last, layout_map)
        >>> batch["x"].shape, mask.tolist()
        ((8, 3), [True, True, True, True, True, True, False, False])
        >>> def loss_of(weights, batch, mask):
        ...     errors = (batch["x"] @ weights - batch["y"]) ** 2
        ...     return errors.mean(where=mask)
        >>> batch, mask = flm.distribute_batch((batch, mask), layout_map)
        >>> float(jax.jit(loss_of)(np.ones(3, np.float32), batch, mask))
        9.0
    """
    _check_choice("fill", fill, get_args(Fill))
    _check_choice("rows", rows, get_args(Rows))
    multiple = _multiple_of(multiple, rows)
    flat = _flatten(batch, "pad_batch")
    _check_same_rows(flat, _WHOLE)
    counts = [len(leaf) for leaf in flat.leaves if has_rows(leaf)]
    if not counts:
        raise LayoutError(
            "pad_batch found no rows: the batch has no array with a dim, except for "
            "PRNG keys"
        )
    count = counts[0]
    wanted = math.ceil(count / multiple) * multiple if size is None else size
    if wanted < count or wanted % multiple:
        need = f"a multiple of {multiple} and at least {count}, the rows of the batch"
        raise LayoutError(
            f"pad_batch cannot reach size={size}: it must be {need}; for example "
            f"size={math.ceil(max(count, wanted) / multiple) * multiple}"
        )
    mask = np.arange(wanted) < count
    if wanted == count:
        return batch, mask
    if not count and fill == "repeat":
        raise LayoutError(
            "pad_batch has no last row to repeat, as the batch has 0 rows; use "
            'fill="zeros"'
        )
    leaves = [
        _padded(leaf, wanted - count, fill) if has_rows(leaf) else leaf
        for leaf in flat.leaves
    ]
    return jax.tree.unflatten(flat.structure, leaves), mask


# ------------------------------------------------------------- leaves and rows


def has_rows(leaf: Any) -> bool:
    """Whether dim 0 of a leaf is its rows: not for numbers, scalars and PRNG keys.

    A JAX array of two or four uint32 is an old-style key, of `jax.random.PRNGKey`; a
    NumPy array never is.
    """
    shape = getattr(leaf, "shape", ())
    if not shape or jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return False
    old_key = leaf.dtype == np.uint32 and shape in ((2,), (4,))
    return not (old_key and isinstance(leaf, jax.Array))


def leaf_sharding(leaf: Any, rules: RuleSet) -> NamedSharding:
    """The sharding of a leaf of a batch; divisibility is not checked."""
    return rows_sharding(rules.batch if has_rows(leaf) else (), rules.mesh)


@functools.lru_cache(maxsize=64)
def rows_sharding(axes: tuple[str, ...], mesh: DeviceMesh) -> NamedSharding:
    """Dim 0 over some axes; replicated without any."""
    return TensorLayout((axes, ...), mesh).sharding()


@dataclasses.dataclass(frozen=True)
class _Flat:
    """A flattened batch; leaves are arrays of NumPy or JAX, and Python numbers."""

    paths: tuple[str, ...]
    leaves: tuple[Any, ...]
    structure: Any

    def rows(self) -> list[tuple[str, Any]]:
        """Path and leaf of those that have rows."""
        pairs = zip(self.paths, self.leaves, strict=True)
        return [(path, leaf) for path, leaf in pairs if has_rows(leaf)]


def _flatten(batch: Any, what: str) -> _Flat:
    """Flatten a batch; raise LayoutError for leaves that are no data."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(
        batch, is_leaf=is_nnx_object
    )
    paths = tuple(join_keys(keys) or "the batch" for keys, _ in pairs)
    leaves = tuple(_as_array(leaf) for _, leaf in pairs)
    problems = [
        f"{path}: {trouble}"
        for path, leaf in zip(paths, leaves, strict=True)
        if (trouble := _trouble(leaf, what))
    ]
    if problems:
        raise LayoutError(
            f"{what} takes arrays and numbers on the host, but got\n"
            f"{bullet_list(problems)}\ntake these out of the batch; inside jit, use "
            "flm.distribute_tensor"
        )
    return _Flat(paths, leaves, structure)


def _as_array(leaf: Any) -> Any:
    """Arrays of other libraries, such as a data loader's, as NumPy arrays."""
    known = isinstance(leaf, jax.Array | np.ndarray | np.generic | _NUMBERS)
    if known or is_nnx_object(leaf) or not hasattr(type(leaf), "__array__"):
        return leaf
    return np.asarray(leaf)


def _trouble(leaf: Any, what: str) -> str:
    """Describe a leaf that cannot be part of a batch; empty if it can."""
    if isinstance(leaf, Tracer):
        return f"a traced value {show_shape(leaf.shape)}"
    if isinstance(leaf, np.ma.MaskedArray):
        return "a masked array, whose mask would be lost"
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in NO_NUMBERS:
        return f"a NumPy array of {leaf.dtype}"
    if what == "pad_batch" and _is_spread(leaf):
        return f"a global array {show_shape(leaf.shape)}; pad first, distribute then"
    if isinstance(leaf, jax.Array | np.ndarray | np.generic | _NUMBERS):
        return ""
    if isinstance(leaf, str | bytes):
        return f"the text {leaf[:40]!r}"
    return f"a {type(leaf).__name__}"


def _is_spread(leaf: Any) -> bool:
    """Whether an array is global already: it has shards in other processes."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


# --------------------------------------------- which rows of which process


@dataclasses.dataclass(frozen=True)
class Split:
    """How the rows that a process passes map to the global batch.

    The batch axes split the global batch into `parts`; this process fills `own` of
    them, together with `sharers` processes that each pass a share, in `order` of their
    rows.
    """

    parts: int
    own: int
    sharers: int = 1
    order: tuple[int, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether this process passes all rows."""
        return self.own == self.parts and self.sharers == 1

    @property
    def multiple(self) -> int:
        """What the number of rows that a process passes must divide by."""
        return self.own // math.gcd(self.own, self.sharers)

    def total(self, count: int) -> int:
        """Rows of the global batch where this process passes `count`."""
        return count * self.sharers * self.parts // self.own


_WHOLE = Split(1, 1)


def split_of(owners: np.ndarray, process: int, rows: Rows) -> Split:
    """Find which rows of a global batch a process passes.

    `owners` has the process of each device: one row per part of the batch, one column
    per copy of it.
    """
    parts = len(owners)
    if process not in owners:
        raise MeshError(
            f"process {process} has no device on the mesh of the rules, so no rows of "
            f"the batch: it belongs to the processes {np.unique(owners).tolist()}; use "
            "a mesh that all have devices on, or call distribute_batch in those only"
        )
    if rows == "global":
        return Split(parts, parts)
    held = {
        other: tuple(np.flatnonzero((owners == other).any(1)).tolist())
        for other in np.unique(owners).tolist()
    }
    for holders in owners.tolist():
        if len({held[other] for other in holders}) > 1:
            one, *others = sorted({*holders})
            other = next(p for p in others if held[p] != held[one])
            raise MeshError(
                f'rows="{rows}" needs processes that hold the same parts of the batch '
                f"or none in common, but of the {parts} parts process {one} holds "
                f"{_few(held[one])} and process {other} {_few(held[other])}; use "
                'another order of devices, or rows="global"'
            )
    own = held[process]
    if rows == "local":
        return Split(parts, len(own))
    order = sorted(held, key=lambda other: (held[other], other))
    groups = [[p for p in order if held[p] == mine] for mine in {*held.values()}]
    devices = np.unique(owners, return_counts=True)[1]
    apart = [p for p in order if held[p][-1] - held[p][0] >= len(held[p])]
    if apart or len({*map(len, groups)}) > 1 or len({*devices.tolist()}) > 1:
        raise MeshError(
            'rows="partial" needs processes with equally many devices, each with parts '
            f"of the batch side by side; process {process} has "
            f"{(owners == process).sum()} devices, with {_few(own)} of {parts} parts; "
            'use rows="local" or "global"'
        )
    sharers = len(held) * len(own) // parts
    return Split(parts, len(own), sharers, tuple(order) if sharers > 1 else ())


def _few(parts: Sequence[int]) -> str:
    more = ", …" if len(parts) > 8 else ""
    return f"[{', '.join(map(str, parts[:8]))}{more}]"


def _split_on(rules: RuleSet, rows: Rows) -> Split:
    mesh = rules.mesh
    assert mesh is not None
    TensorLayout((rules.batch, ...), mesh)  # raises where the mesh lacks an axis
    if mesh.is_abstract or jax.process_count() == 1:
        parts = math.prod(mesh.axis_sizes[axis] for axis in rules.batch)
        return Split(parts, parts)
    return _split_in_processes(mesh, rules.batch, rows)


@functools.lru_cache(maxsize=32)
def _split_in_processes(mesh: DeviceMesh, batch: tuple[str, ...], rows: Rows) -> Split:
    numbers = np.array([device.process_index for device in mesh.devices.flat])
    axes = [mesh.axis_names.index(axis) for axis in batch]
    rest = [axis for axis in range(len(mesh.shape)) if axis not in axes]
    parts = math.prod(mesh.shape[axis] for axis in axes)
    owners = numbers.reshape(mesh.shape).transpose(*axes, *rest).reshape(parts, -1)
    return split_of(owners, jax.process_index(), rows)


# ------------------------------------------------------------------- checks


def _check_choice(option: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        hint = did_you_mean(value, choices) if isinstance(value, str) else ""
        raise LayoutError(
            f"{option} must be one of {tuple(choices)}, got {value!r}{hint}"
        )


def _check_same_rows(flat: _Flat, split: Split) -> None:
    """Raise LayoutError where arrays of a batch differ in their rows."""
    counts: set[int] = set()
    shown: list[str] = []
    for path, leaf in flat.rows():
        count, note = leaf.shape[0], ", global already"
        if not _is_spread(leaf):
            total = split.total(count)
            note = "" if total == count else f", of {total} rows in all"
            count = total
        counts.add(count)
        shown.append(f"{path} {show_shape(leaf.shape)}{note}")
    if len(counts) > 1:
        raise LayoutError(
            "the arrays of a batch must have equally many rows (dim 0):\n"
            f"{bullet_list(shown)}\ndistribute arrays with other rows separately, or "
            "place them with flm.distribute_tensor"
        )


def clash_of_rows(count: int, rules: RuleSet, split: Split | None = None) -> str:
    """Say why `count` rows do not divide over the batch axes; empty if they do."""
    mesh = rules.mesh
    assert mesh is not None
    parts = math.prod(mesh.axis_sizes[axis] for axis in rules.batch)
    if split is None or split.is_whole:
        if count % parts:
            return clash(0, count, rules.batch, mesh.axis_sizes)
    elif count % split.multiple:
        axes = ", ".join(f"{axis!r} ({mesh.axis_sizes[axis]})" for axis in rules.batch)
        return (
            f"dim 0 of size {count} does not divide by {split.multiple}, for this "
            f"process fills {split.own} of the {parts} parts over the mesh axes {axes}"
        )
    return ""


def _check_divides(flat: _Flat, rules: RuleSet, split: Split, rows: Rows) -> None:
    problems = [
        f"{path} {show_shape(leaf.shape)}: {trouble}"
        for path, leaf in flat.rows()
        if (
            trouble := clash_of_rows(
                len(leaf), rules, None if _is_spread(leaf) else split
            )
        )
    ]
    if problems:
        alone = rows == "local" or jax.process_count() == 1
        more = "" if alone else f', rows="{rows}"'
        raise LayoutError(
            f"the batch does not divide over the batch axes {rules.batch}:\n"
            f"{bullet_list(problems)}\npad it, batch, mask = "
            f"flm.pad_batch(batch, layout_map{more}), or drop the rest"
        )


def _parts(flat: _Flat, rules: RuleSet, split: Split, rows: Rows) -> Parts:
    """What must be the same in every process; see `Agreement`."""
    shapes, same = [], []
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        shape = np.shape(leaf)
        if not has_rows(leaf):
            same.append(leaf)
        elif not _is_spread(leaf):
            shape = (split.total(shape[0]), *shape[1:])
            if rows == "global":
                # The first row only: comparing a large batch would take too long.
                same.append(np.asarray(leaf)[:1])
        dtype = getattr(leaf, "dtype", type(leaf).__name__)
        shapes.append(f"{path} {show_shape(shape)} {dtype}")
    return {
        "batch structure": str(flat.structure),
        "global batch shapes": shapes,
        "batch axes": repr(rules.batch),
        "option rows": rows,
        "batch values": digest_of_values(same),
    }


# ------------------------------------------------------------------ the work


def _placed(leaves: Sequence[Any], rules: RuleSet, split: Split) -> list[Any]:
    shardings = [leaf_sharding(leaf, rules) for leaf in leaves]
    if jax.process_count() == 1:
        # In one go: many small transfers take longer.
        return jax.device_put(list(leaves), shardings)
    placed: list[Any] = []
    for leaf, sharding in zip(leaves, shardings, strict=True):
        is_part = not split.is_whole and has_rows(leaf) and not _is_spread(leaf)
        made = _from_process(leaf, rules, split) if is_part else put(leaf, sharding)
        placed.append(made)
    return placed


def _from_process(leaf: Any, rules: RuleSet, split: Split) -> jax.Array:
    """A global array of which each process has some rows."""
    host, sharding = np.asarray(leaf), leaf_sharding(leaf, rules)
    shape = (split.total(len(host)), *host.shape[1:])
    if split.sharers == 1:
        return jax.make_array_from_process_local_data(sharding, host, shape)
    assert rules.mesh is not None
    grid = _by_process(rules.mesh, split.order)
    divides = len(host) % grid.shape["device"] == 0
    start = PartitionSpec(grid.axis_names if divides else "process")
    return put(
        jax.make_array_from_process_local_data(NamedSharding(grid, start), host, shape),
        sharding,
    )


def _by_process(mesh: DeviceMesh, order: Sequence[int]) -> Mesh:
    """The devices of a mesh, one row per process."""
    devices = list(mesh.devices.flat)
    grid = [[d for d in devices if d.process_index == process] for process in order]
    return Mesh(np.array(grid, dtype=object), ("process", "device"))


def _multiple_of(multiple: Any, rows: Rows) -> int:
    """What the number of rows must divide by, from a number or a map."""
    if isinstance(multiple, int | np.integer) and not isinstance(multiple, bool):
        if multiple < 1:
            raise LayoutError(f"multiple must be 1 or more, got {multiple}")
        return int(multiple)
    rules = rule_set_of(multiple, "pad_batch(batch, multiple), without a number,")
    if rules.mesh is None:
        need_devices(rules, "pad_batch")
    return _split_on(rules, rows).multiple


def _padded(leaf: Any, missing: int, fill: Fill) -> np.ndarray:
    host = np.asarray(leaf)
    result = np.empty((len(host) + missing, *host.shape[1:]), host.dtype)
    result[: len(host)] = host
    result[len(host) :] = host[-1] if fill == "repeat" else np.zeros((), host.dtype)
    return result
