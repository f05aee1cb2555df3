"""Pad host batches, and make global arrays from them."""

import functools
import math
import reprlib
from typing import Any, Literal, NamedTuple, get_args

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from flax_layoutmap._core.axes import divides
from flax_layoutmap._core.errors import LayoutError, MeshError, bullet_list
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

Rows = Literal["local", "global"]

_DATA = jax.Array | np.ndarray | np.generic | bool | int | float | complex

# Path and leaf: a NumPy or JAX array, or a Python number.
_Leaves = list[tuple[str, Any]]


class _Share(NamedTuple):
    """How many of the parts of a global batch a process passes."""

    passed: int
    parts: int

    def total(self, leaf: Any) -> int:
        """Rows of the global array when this process passes `leaf`."""
        return len(leaf) if _is_global(leaf) else len(leaf) * self.parts // self.passed


def distribute_batch(
    batch: Any, layout_map: Any, *, rows: Rows = "local", check: bool = True
) -> Any:
    """Make global arrays from a host batch, sharded over the `batch` axes.

    Dim 0 of every array, its rows, is split over the map's `batch` axes. Scalars and
    PRNG keys are replicated. As with `jax.device_put`, do not write into a NumPy array
    afterwards: on CPU its memory may be shared.

    Args:
        batch: a tree of NumPy arrays, JAX arrays, numbers, or objects with
            `__array__`; all with the same number of rows. None stays None.
        layout_map: the rules, on a mesh of devices; only their `batch` axes matter.
        rows: which rows each process passes: `"local"`, only the rows for its devices
            (processes with the same part must pass the same rows, which is not
            checked); or `"global"`, all rows, the same in every process.
        check: whether several processes first compare structures, shapes and the
            values of scalars and keys, and all raise if they differ. This waits for
            all processes and for the devices: pass False in a loop whose batches have
            the same shape, and in threads that prefetch.

    Returns:
        The same tree of global `jax.Array`s, in JAX's dtypes.

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
    share = _share_on(rules, rows)
    with Agreement("distributing a batch", rules.mesh if check else None) as agreement:
        leaves, structure = _flatten(batch, "distribute_batch")
        _check_divides(_row_count(leaves, share) or 0, rules, rows, share)
        agreement.add(lambda: _compared(leaves, structure, rules, rows, share))
    arrays = [leaf for _, leaf in leaves]
    shardings = [
        rows_sharding(rules.batch if has_rows(leaf) else (), rules.mesh)
        for leaf in arrays
    ]
    if jax.process_count() == 1:
        # A single call is faster than many small transfers.
        placed = jax.device_put(arrays, shardings)
    else:
        placed = [
            jax.make_array_from_process_local_data(
                sharding, np.asarray(leaf), (share.total(leaf), *leaf.shape[1:])
            )
            if share.passed < share.parts and has_rows(leaf) and not _is_global(leaf)
            else put(leaf, sharding)
            for leaf, sharding in zip(arrays, shardings, strict=True)
        ]
    return jax.tree.unflatten(structure, placed)


def pad_batch(
    batch: Any, multiple: Any = 1, *, size: int | None = None, rows: Rows = "local"
) -> tuple[Any, np.ndarray]:
    """Pad a host batch until its rows divide; return the mask of real rows.

    The last row is repeated (zeros are added to a batch with 0 rows). Pad the last
    batch of an epoch to the `size` of the others to avoid another compilation. Averages
    over rows must use the mask; BatchNorm includes the added rows.

    Args:
        batch: as for `flm.distribute_batch`; scalars and PRNG keys stay as they are.
        multiple: the number of rows is padded to a multiple of this number; or a map:
            of the number of parts along its `batch` axes that this process fills.
        size: the number of rows after padding; None: the next multiple.
        rows: as for `flm.distribute_batch`; only used if `multiple` is a map.

    Returns:
        The batch, as NumPy arrays if rows were added and unchanged otherwise; and a
        mask, a bool array of shape (rows,) that is True for the rows of `batch`.

    Example:
        >>> import numpy as np, flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap(flm.DeviceMesh("data=4,model=2"))
        >>> last = {"x": np.ones((6, 3), np.float32), "y": np.zeros(6, np.float32)}
        >>> batch, mask = flm.pad_batch(last, layout_map)
        >>> batch["x"].shape, mask.tolist()
        ((8, 3), [True, True, True, True, True, True, False, False])
    """
    multiple = _multiple_of(multiple, rows)
    leaves, structure = _flatten(batch, "pad_batch")
    count = _row_count(leaves, _Share(1, 1))
    if count is None:
        raise LayoutError(
            "pad_batch found no rows: the batch has no array with a dim, except for "
            "PRNG keys"
        )
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

    def padded(leaf: Any) -> Any:
        if not has_rows(leaf):
            return leaf
        host = np.asarray(leaf)
        added = np.zeros((wanted - count, *host.shape[1:]), host.dtype)
        added[:] = host[-1] if count else 0
        return np.concatenate([host, added])

    return jax.tree.unflatten(structure, [padded(leaf) for _, leaf in leaves]), mask


def _multiple_of(multiple: Any, rows: Rows) -> int:
    if isinstance(multiple, int | np.integer):
        if multiple < 1:
            raise LayoutError(f"multiple must be 1 or more, got {multiple}")
        return int(multiple)
    rules = rule_set_of(multiple, "pad_batch(batch, multiple), without a number,")
    if rules.mesh is None:
        need_devices(rules, "pad_batch")
    return _share_on(rules, rows).passed


# ------------------------------------------------------------- leaves and rows


def has_rows(leaf: Any) -> bool:
    """Whether dim 0 of a leaf is its rows: not for numbers, scalars and PRNG keys.

    A JAX array of two or four uint32 is taken for an old-style key, as made by
    `jax.random.PRNGKey`; a NumPy array is not.
    """
    shape = getattr(leaf, "shape", ())
    if not shape or jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return False
    old_key = leaf.dtype == np.uint32 and shape in ((2,), (4,))
    return not (old_key and isinstance(leaf, jax.Array))


@functools.lru_cache(maxsize=64)
def rows_sharding(axes: tuple[str, ...], mesh: DeviceMesh | None) -> NamedSharding:
    """Shard dim 0 over the axes; replicate if there are none."""
    return TensorLayout((axes, ...), mesh).sharding()


def _flatten(batch: Any, what: str) -> tuple[_Leaves, Any]:
    """The leaves and structure of a batch; raises for leaves that are not data."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(
        batch, is_leaf=is_nnx_object
    )
    leaves, problems = [], []
    for keys, leaf in pairs:
        path = join_keys(keys) or "the batch"
        if not isinstance(leaf, _DATA) and not is_nnx_object(leaf):
            # For example, an array of a data loader or of another library.
            leaf = np.asarray(leaf) if hasattr(type(leaf), "__array__") else leaf
        if problem := _why_not_data(leaf, what):
            problems.append(f"{path}: {problem}")
        leaves.append((path, leaf))
    if problems:
        raise LayoutError(
            f"{what} takes arrays and numbers on the host, but got\n"
            f"{bullet_list(problems)}\ntake these out of the batch; inside jit, use "
            "flm.distribute_tensor"
        )
    return leaves, structure


def _why_not_data(leaf: Any, what: str) -> str:
    """Why a leaf cannot be part of a batch; empty if it can."""
    if isinstance(leaf, Tracer):
        return f"a traced value {show_shape(leaf.shape)}"
    if isinstance(leaf, np.ma.MaskedArray):
        return "a masked array, whose mask would be lost"
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in NO_NUMBERS:
        return f"a NumPy array of {leaf.dtype}"
    if what == "pad_batch" and _is_global(leaf):
        return f"a global array {show_shape(leaf.shape)}; pad first, distribute then"
    return "" if isinstance(leaf, _DATA) else f"a {type(leaf).__name__}"


def _is_global(leaf: Any) -> bool:
    """Whether an array has shards in other processes."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


# --------------------------------------------- which rows of which process


def _share_on(rules: RuleSet, rows: Rows) -> _Share:
    if rows not in get_args(Rows):
        raise LayoutError(f"rows must be one of {get_args(Rows)}, got {rows!r}")
    assert rules.mesh is not None
    return _share(rules.mesh, rules.batch, rows)


@functools.lru_cache(maxsize=32)
def _share(mesh: DeviceMesh, batch: tuple[str, ...], rows: Rows) -> _Share:
    sharding = rows_sharding(batch, mesh)  # raises where the mesh lacks an axis
    parts = math.prod(mesh.axis_sizes[axis] for axis in batch)
    if mesh.is_abstract:
        return _Share(parts, parts)
    held: dict[int, set[int]] = {}
    for device, (index,) in sharding.devices_indices_map((parts,)).items():
        held.setdefault(device.process_index, set()).update(range(parts)[index])
    process = jax.process_index()
    if process not in held:
        raise MeshError(
            f"process {process} has no device on the mesh of the rules; use a mesh "
            "over all processes, or call distribute_batch only in the processes "
            f"{sorted(held)}"
        )
    if rows == "global":
        return _Share(parts, parts)
    if sum(map(len, {*map(frozenset, held.values())})) != parts:
        shown = {number: sorted(parts) for number, parts in sorted(held.items())}
        raise MeshError(
            'rows="local" needs processes that hold the same parts of the batch or '
            f"none in common, but they hold {reprlib.repr(shown)}; use another order "
            'of devices, or rows="global"'
        )
    return _Share(len(held[process]), parts)


# ------------------------------------------------------------------- checks


def _row_count(leaves: _Leaves, share: _Share) -> int | None:
    """Rows that this process passes; raises LayoutError if the arrays differ."""
    totals: dict[int, int] = {}
    shown: list[str] = []
    for path, leaf in leaves:
        if has_rows(leaf):
            total = share.total(leaf)
            note = "" if total == len(leaf) else f", of {total} rows in all"
            note = ", global already" if _is_global(leaf) else note
            totals[total] = total * share.passed // share.parts
            shown.append(f"{path} {show_shape(leaf.shape)}{note}")
    if len(totals) > 1:
        raise LayoutError(
            "the arrays of a batch must have equally many rows (dim 0):\n"
            f"{bullet_list(shown)}\ndistribute arrays with other rows separately, or "
            "place them with flm.distribute_tensor"
        )
    return next(iter(totals.values()), None)


def clash_of_rows(count: int, rules: RuleSet) -> str | None:
    """Explain why `count` rows do not divide over the batch axes; None if they do."""
    assert rules.mesh is not None
    return divides((count,), (rules.batch,), rules.mesh.axis_sizes)


def _check_divides(count: int, rules: RuleSet, rows: Rows, share: _Share) -> None:
    if count % share.passed == 0:
        return
    problem = clash_of_rows(count, rules)
    if share.passed < share.parts:
        problem = (
            f"dim 0 of size {count} is not divisible by {share.passed}, as this "
            f"process fills {share.passed} of the {share.parts} parts"
        )
    more = "" if rows == "local" or jax.process_count() == 1 else f', rows="{rows}"'
    raise LayoutError(
        f"the batch does not divide over the batch axes {rules.batch}: {problem}; pad "
        f"it, batch, mask = flm.pad_batch(batch, layout_map{more}), or drop the rest"
    )


def _compared(
    leaves: _Leaves, structure: Any, rules: RuleSet, rows: Rows, share: _Share
) -> Parts:
    """Values that must be the same in every process; see `Agreement`."""
    shapes, same = [], []
    for path, leaf in leaves:
        shape = np.shape(leaf)
        if has_rows(leaf):
            shape = (share.total(leaf), *shape[1:])
            if rows == "global" and not _is_global(leaf):
                # The first row only: comparing a large batch would take too long.
                same.append(np.asarray(leaf)[:1])
        else:
            same.append(leaf)
        dtype = getattr(leaf, "dtype", type(leaf).__name__)
        shapes.append(f"{path} {show_shape(shape)} {dtype}")
    return {
        "batch structure": str(structure),
        "global batch shapes": shapes,
        "batch axes": repr(rules.batch),
        "option rows": rows,
        "batch values": digest_of_values(same),
    }
