"""What of a planned step is worth a look before it runs."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from flax_layoutmap._layout import dim_axes
from flax_layoutmap._mesh import DeviceMesh
from flax_layoutmap._records import show_shape, show_spec
from flax_layoutmap._table import human_bytes
from flax_layoutmap._topologies import Topology
from flax_layoutmap.pod._hlo import wire_bytes
from flax_layoutmap.pod._lowered import Lowered
from flax_layoutmap.pod._placed import placed
from flax_layoutmap.pod._sources import source_line
from flax_layoutmap.pod._spread import Spread
from flax_layoutmap.pod._values import bytes_of, dtype_name, parts, spec_text

# Arrays in a closure below this are tables of constants.
_CLOSED_OVER = 1 << 20
# So many equal layers one after the other are slow to compile.
_DEEP = 12
# State below this is not worth donating.
_UNDONATED = 1 << 20
# Of what is sent for an array in a step, no more than this is worth no warning.
_LITTLE = 1 << 16

# `layers/3/`, `layers_3/` and `Dense_3/` of Linen, `block3/`; `weights/3` of a list.
_INDEX = re.compile(r"(?<=[A-Za-z_./-])\d+(?=/|$)")


def warnings_of(
    found: Spread, lowered: Lowered, mesh: DeviceMesh, topology: Topology | None = None
) -> Iterator[str]:
    """One text per finding.

    Args:
        found: what was read from the program.
        lowered: the program.
        mesh: the mesh.
        topology: where it is to be made; None where that is not known.
    """
    yield from lowered.notes
    if topology is not None:
        trouble = placed(mesh.axis_names, mesh.shape, topology).trouble
        if trouble:
            yield trouble
    yield from _unsharded(found, mesh)
    yield from _overruled(found, lowered)
    yield from _closed_over(lowered)
    yield from _undonated(found, lowered)
    yield from _summed_whole(found, lowered)
    yield from _moved_per_round(found, lowered)
    if found.branching:
        count = found.branching
        which = "a conditional" if count == 1 else f"{count} conditionals"
        yield f"each device takes one branch of {which}; all branches are counted"
    layers = _layers(found, lowered)
    if layers > _DEEP:
        yield (
            f"{layers} layers stand one after the other in the program, "
            f"{found.operations} operations: with nnx.scan the compiler takes a half "
            "to a quarter of the time, and a fifth of the memory"
        )


def _unsharded(found: Spread, mesh: DeviceMesh) -> Iterator[str]:
    values = found.arguments
    if mesh.size == 1 or not values or found.collectives:
        return
    if not any(parts(axes) > 1 for value in values for axes in value.dims):
        yield (
            f"no argument is sharded over {mesh}, so that every device does the whole "
            "step; pass layout_map=layout_map, or arguments with shardings"
        )


def _overruled(found: Spread, lowered: Lowered) -> Iterator[str]:
    """Where in_shardings of jax.jit say another layout than the rules."""
    gone = []
    for at, spec in lowered.wanted.items():
        value = found.arguments[at]
        entries = [dim_axes(entry) for entry in spec]
        entries += [()] * (len(value.dims) - len(entries))
        wanted = [[a for a in axes if found.sizes.get(a, 1) > 1] for axes in entries]
        own = [[name for name, size in axes if size > 1] for axes in value.dims]
        if own != wanted:
            where = lowered.leaves[at].path, spec_text(value.dims), show_spec(spec)
            gone.append(where)
    if gone:
        path, own, spec = gone[0]
        yield (
            f"{lowered.name} has in_shardings of its own, which count here and not the "
            f"rules: {_leaves(gone)}, such as {path}, which is {own}, and {spec} by "
            "the rules; a call would refuse arrays that lie by the rules"
        )


def _closed_over(lowered: Lowered) -> Iterator[str]:
    large = [one for one in lowered.constants if one[1] >= _CLOSED_OVER]
    if large:
        shapes = ", ".join(show_shape(shape) for shape, _ in large[:4])
        size = human_bytes(sum(size for _, size in large))
        arrays = "1 array" if len(large) == 1 else f"{len(large)} arrays"
        yield (
            f"{lowered.name} closes over {arrays} ({shapes}; {size}): constants of the "
            "program, which every device holds in full; pass them as arguments"
        )


def _undonated(found: Spread, lowered: Lowered) -> Iterator[str]:
    kept = [
        at
        for at in lowered.updates.values()
        if not lowered.leaves[at].is_donated and lowered.leaves[at].role != "data"
    ]
    size = sum(found.arguments[at].local_bytes for at in kept)
    if size >= _UNDONATED:
        yield (
            f"{_leaves(kept)} of state, such as {lowered.leaves[kept[0]].path}, "
            f"{'is' if len(kept) == 1 else 'are'} not donated: old and new are held at "
            f"the same time, {human_bytes(size)} more per device; use donate_argnames"
        )


def _summed_whole(found: Spread, lowered: Lowered) -> Iterator[str]:
    """Gradients that are all-reduced where a reduce-scatter would do."""
    more: dict[str, int] = {}
    for one in found.collectives:
        if one.is_whole and one.into is None and one.leaf is not None:
            size, count = bytes_of(one.shape, one.element), parts(one.axes)
            path = lowered.leaves[one.leaf].path
            sent = wire_bytes("reduce-scatter", size, count) * one.executions
            more[path] = more.get(path, 0) + sent
    paths = sorted(path for path, sent in more.items() if sent >= _LITTLE)
    if paths:
        shown = ", ".join(paths[:6]) + (", …" if len(paths) > 6 else "")
        count = "1 gradient" if len(paths) == 1 else f"{len(paths)} gradients"
        them = "it" if len(paths) == 1 else "them"
        yield (
            f"the TPU compiler sums {count} whole on every device (if it makes no loop "
            f"of permutes of {them}, which flm.pod.compile shows), which sends "
            f"{human_bytes(sum(more.values()))} more in a step than reduce-scatters "
            f"would: {shown}; it scatters a sum along its lanes in parts of 512 bytes "
            "(256 elements of bfloat16) only, not across a dim of one element, not "
            "over all devices of a square or cubic slice, and few rows not always over "
            "256: shard another dim, or over fewer devices"
        )


def _moved_per_round(found: Spread, lowered: Lowered) -> Iterator[str]:
    """Arrays of which a loop takes slices along a dim that is sharded."""
    names: dict[str, int] = {}
    wanted: tuple[str, str] | None = None
    for one in found.per_round:
        value = one.value
        if value.local_bytes * one.rounds >= _LITTLE:
            kind = f"{dtype_name(value.element)} array"
            name = kind if value.leaf is None else lowered.leaves[value.leaf].path
            line = source_line(one.location)
            place = f"{name} {show_shape(value.shape)} {spec_text(value.dims)}"
            names[f"{place} at {line}" if line else place] = one.rounds
            axis = next(axes for axes in value.dims if axes)[0][0]
            layout = f'(None, "{axis}"' + ", None" * (len(value.shape) - 2) + ")"
            wanted = wanted or (layout, axis)
    if wanted is not None:
        shown = "; ".join([*names][:4]) + ("; …" if len(names) > 4 else "")
        rounds = max(names.values())
        yield (
            f"each round of a loop takes a slice along a sharded dim ({rounds:,} "
            "rounds), for which the whole array is gathered in every round, or moved "
            "to another layout, in which the rounds then work: "
            f"{shown}; make that dim whole before the loop, such as "
            f"flm.distribute_tensor(x, {wanted[0]}) in a step of flm.jit, or in one of "
            f'jax.jit jax.lax.with_sharding_constraint(x, P(None, "{wanted[1]}"))'
        )


def _leaves(some: Sequence[object]) -> str:
    return "1 leaf" if len(some) == 1 else f"{len(some)} leaves"


def _layers(found: Spread, lowered: Lowered) -> int:
    """How many equal layers the parameters are numbered by."""
    indices: dict[Any, set[str]] = {}
    for leaf, value in zip(lowered.leaves, found.arguments, strict=True):
        if leaf.role == "parameter":
            for index in _INDEX.finditer(leaf.path):
                place = leaf.path[: index.start()] + leaf.path[index.end() :]
                indices.setdefault((place, value.shape), set()).add(index[0])
    return max(map(len, indices.values()), default=0)
