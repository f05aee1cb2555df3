"""Which parameter, and which of its dims, each leaf of an optimizer state came from.

`tx.init` is traced once, abstractly, on a made-up mesh whose axes all have size 1 and
are named by dim number. JAX's sharding-in-types then writes on every state leaf the
parameter dims it was made from: an Adafactor row statistic of a square kernel says
`d0`, the column statistic `d1`. Size-1 axes divide everything, so no shape can fail.
State that is made of bare shapes carries no sharding: it is traced once more, over
parameters whose dims all have different sizes.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.flax_internals import no_mesh, without_eager_sharding
from flax_layoutmap._tree.paths import Flat

Shape = tuple[int, ...]
# Per dim of a state leaf: the dim of its parameter, or None.
Dims = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Where one leaf of an optimizer state came from.

    Attributes:
        owner: path of the parameter, or None.
        dims: per dim of the leaf, the dim of the parameter it came from, or None;
            None where that could not be found out.
        how: in words, for reports.
        others: other parameters that it may as well belong to.
    """

    owner: str | None
    dims: Dims | None
    how: str
    others: tuple[str, ...] = ()


def tagged_dims(
    init: Callable[[Any], Any], params: Any
) -> dict[str, tuple[Shape, Dims | None]]:
    """Traces `init(params)`: path of each state leaf → its shape and parameter dims.

    Args:
        init: `tx.init` of an optax transformation.
        params: the parameters; arrays or `jax.ShapeDtypeStruct`s in any tree.

    Returns:
        The dims are None, or None everywhere, where neither trace tells them; shapes
        must then do.
    """
    shapes = jax.tree.map(_shape_of, params)
    with without_eager_sharding():
        # Raises what the user's own mistakes raise.
        plain = flatten(jax.eval_shape(init, shapes))
        dims = _dims_by_sharding(init, shapes, plain)
        untold = [
            at
            for at, (leaf, told) in enumerate(zip(plain.leaves, dims, strict=True))
            if leaf.size > 1 and (told is None or not _tells(told))
        ]
        if untold:
            by_size = _dims_by_size(init, shapes, plain)
            for at in untold:
                dims[at] = by_size[at] or dims[at]
    return {
        path: (tuple(leaf.shape), told)
        for path, leaf, told in zip(plain.full_paths(), plain.leaves, dims, strict=True)
    }


def _dims_by_sharding(
    init: Callable[[Any], Any], shapes: Any, plain: Flat
) -> list[Dims | None]:
    """Traces on a mesh whose axes are the dim numbers; one entry per leaf of `plain`.

    All None where the trace is impossible: an `init` that contracts parameters, such
    as `p @ p.T`.
    """
    ndim = max((leaf.ndim for leaf in jax.tree.leaves(shapes)), default=0) or 1
    names = tuple(f"d{number}" for number in range(ndim))
    mesh = AbstractMesh((1,) * ndim, names, axis_types=(AxisType.Explicit,) * ndim)

    def tag(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec(*names[: leaf.ndim]))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    with no_mesh(), jax.sharding.use_abstract_mesh(mesh):
        leaves = _try_init(init, jax.tree.map(tag, shapes), plain)
    if leaves is None:
        return [None] * len(plain.leaves)
    dims: list[Dims | None] = []
    for leaf in leaves:
        spec = tuple(leaf.sharding.spec) if leaf.sharding is not None else ()
        padded = spec + (None,) * (leaf.ndim - len(spec))
        dims.append(tuple(_dim_number(entry) for entry in padded))
    return dims


def _dims_by_size(
    init: Callable[[Any], Any], shapes: Any, plain: Flat
) -> list[Dims | None]:
    """Traces over parameters whose dims all have different sizes, and reads the sizes.

    For state made of bare shapes, `jnp.zeros(p.shape[:-1])`, which carry no sharding
    (Adafactor up to optax 0.2.6, sm3, GaLore). Equal dims become different in one
    order or the other: an `init` that compares them may do something else in one.
    """
    dims, misled = _read_sizes(init, shapes, 1, plain)
    if misled:
        other, still = _read_sizes(init, shapes, -1, plain)
        for at in misled - still:
            dims[at] = other[at]
    return dims


def _read_sizes(
    init: Callable[[Any], Any], shapes: Any, order: int, plain: Flat
) -> tuple[list[Dims | None], set[int]]:
    """Dims of each leaf by its sizes, and the leaves for which these say nothing.

    Every dim has either the size that it has over `shapes`, or that of a dim of its
    parameter in both. Where one does not, the other sizes led `init` elsewhere, and no
    leaf of that parameter says anything.
    """
    params = jax.tree.map(functools.partial(_all_different, order=order), shapes)
    dims: list[Dims | None] = [None] * len(plain.leaves)
    leaves = _try_init(init, params, plain)
    if leaves is None:
        return dims, set(range(len(dims)))
    old, new = _shapes_by_path(shapes), _shapes_by_path(params)
    owners = [owner_of(path, new) for path in plain.full_paths()]
    misled: set[str] = set()
    for at, owner in enumerate(owners):
        if owner is None:
            continue
        before, after = tuple(plain.leaves[at].shape), tuple(leaves[at].shape)
        try:
            told = tuple(
                _dim_of(*sizes, old[owner], new[owner])
                for sizes in zip(before, after, strict=True)
            )
        except ValueError:
            misled.add(owner)
            continue
        known = [dim for dim in told if dim is not None]
        if known and len(set(known)) == len(known):
            dims[at] = told
    lost = {at for at, owner in enumerate(owners) if owner in misled}
    return [None if at in lost else own for at, own in enumerate(dims)], lost


def _dim_of(before: int, after: int, old: Shape, new: Shape) -> int | None:
    """The dim of a parameter that has both sizes, before and after; None for none.

    Raises:
        ValueError: the size changed and not as any dim did.
    """
    sizes = list(zip(old, new, strict=True))
    if before != after or (before, after) in sizes:
        return sizes.index((before, after))
    return None


def _shapes_by_path(params: Any) -> dict[str, Shape]:
    flat = flatten(params)
    return {
        path: tuple(leaf.shape)
        for path, leaf in zip(flat.full_paths(), flat.leaves, strict=True)
    }


def _try_init(init: Callable[[Any], Any], params: Any, plain: Flat) -> Any:
    """Leaves of `init(params)`; None where it fails or has another structure."""
    try:
        made = flatten(jax.eval_shape(init, params))
    except Exception as error:
        if not is_refusal(error):
            raise
        return None
    return made.leaves if made.full_paths() == plain.full_paths() else None


def is_refusal(error: Exception) -> bool:
    """Whether `init` cannot be traced so; a true mistake failed the plain trace."""
    # JAX has no public name for ShardingTypeError, which derives from Exception.
    return isinstance(error, _REFUSALS) or type(error).__name__ == "ShardingTypeError"


_REFUSALS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    TypeError,
    ValueError,
)


def _all_different(leaf: jax.ShapeDtypeStruct, order: int) -> jax.ShapeDtypeStruct:
    """The leaf with equal dims made different by the smallest increases.

    Their order is kept and none is 1, the size of placeholders. Ties are broken by
    position, as a stable sort does, (256, 256) → (256, 257), or with order -1 the
    other way.
    """
    sizes, last = list(leaf.shape), 1
    for dim in sorted(range(leaf.ndim), key=lambda dim: (leaf.shape[dim], order * dim)):
        last = sizes[dim] = max(leaf.shape[dim], last + 1)
    return jax.ShapeDtypeStruct(tuple(sizes), leaf.dtype)


def _tells(dims: Dims) -> bool:
    return any(dim is not None for dim in dims)


def origins(
    paths: Sequence[str],
    shapes: Sequence[Shape],
    owners: Mapping[str, Shape],
    tags: Mapping[str, tuple[Shape, Dims | None]],
) -> list[Origin]:
    """Finds the origin of each leaf of an optimizer state.

    Args:
        paths: paths of the state leaves, within the state.
        shapes: their shapes.
        owners: path → shape of every parameter.
        tags: what `tagged_dims` found, by path within the optax state; may be empty.
    """
    known = Owners(dict(owners), {path: path for path in owners})
    return best_origins(dict(zip(paths, shapes, strict=True)), [known], tags)


# A prefix is looked for among so many candidates.
_MOST_PREFIXES = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Owners:
    """Parameters by the paths that an optimizer may know them under.

    Attributes:
        shapes: path → shape.
        keys: path → the key of `parameter_keys`.
    """

    shapes: dict[str, Shape]
    keys: dict[str, str]

    def merged(self, other: "Owners") -> "Owners":
        """Both; where they disagree, the other's."""
        return Owners(self.shapes | other.shapes, self.keys | other.keys)

    def below(self, prefix: str) -> "Owners":
        """Those below a prefix, without it."""
        return Owners(paths_below(prefix, self.shapes), paths_below(prefix, self.keys))


def paths_below(prefix: str, paths: Mapping[str, Any]) -> dict[str, Any]:
    """The entries whose paths start with a prefix, without it."""
    start = len(prefix)
    return {
        path[start:]: value for path, value in paths.items() if path.startswith(prefix)
    }


def best_origins(
    state: Mapping[str, Shape], groups: Sequence[Owners], tags: Mapping[str, Any]
) -> list[Origin]:
    """The origins under that view of the parameters which explains most of a state.

    Where several views explain as much, the other owners are named, too.
    """
    best: list[list[Origin]] = []
    best_score = 0
    for owners in _views(state, groups):
        found = _origins(state, owners.shapes, tags)
        score = sum(origin.dims is not None for origin in found)
        if score < best_score:
            continue
        if score > best_score:
            best, best_score = [], score
        best.append(
            [
                dataclasses.replace(o, owner=owners.keys[o.owner]) if o.owner else o
                for o in found
            ]
        )
    first, *more = best
    return [
        dataclasses.replace(origin, others=_others(origin, same_leaf))
        for origin, *same_leaf in zip(first, *more, strict=True)
    ]


def _others(origin: Origin, same_leaf: Sequence[Origin]) -> tuple[str, ...]:
    """Owners other than the first, each once."""
    names = dict.fromkeys(o.owner for o in same_leaf if o.owner is not None)
    return tuple(name for name in names if name != origin.owner)


def _views(state: Mapping[str, Shape], groups: Sequence[Owners]) -> Iterator[Owners]:
    """Ways to see the parameters: all of them; with one model (of several that have
    the same paths) first; below a prefix that the optimizer did not know."""
    every = Owners({}, {})
    for group in reversed(groups):
        every = every.merged(group)
    yield every
    if len(every.shapes) < sum(len(group.shapes) for group in groups):
        for group in groups:
            yield every.merged(group)
    for prefix in prefixes(state, every.shapes):
        yield every.merged(every.below(prefix))


def prefixes(state: Mapping[str, Shape], owners: Mapping[str, Any]) -> list[str]:
    """Prefixes of parameter paths without which they would be parts of a state path.

    A tree `{"model": {"params": …}, "opt_state": tx.init(params)}` has them.
    """
    orphans = (p for p, shape in state.items() if shape and not owner_of(p, owners))
    found: set[str] = set()
    # The first ones may be of no parameter (a random key), so some more are asked.
    for orphan in itertools.islice(orphans, _MOST_PREFIXES):
        whole = orphan.split("/")
        for owner in owners:
            parts = owner.split("/")
            # The last part may be an index behind the path of the parameter (sm3).
            same = max(_common_ending(parts, whole), _common_ending(parts, whole[:-1]))
            for count in range(1, min(same, len(parts) - 1) + 1):
                found.add("/".join(parts[:-count]) + "/")
        if found:
            break
    # The prefix of a whole tree of parameters is shorter than that of a part.
    return sorted(found, key=lambda prefix: (len(prefix), prefix))[:_MOST_PREFIXES]


def _common_ending(first: Sequence[str], second: Sequence[str]) -> int:
    """How many of the last parts are the same."""
    same = 0
    for one, other in zip(reversed(first), reversed(second), strict=False):
        if one != other:
            break
        same += 1
    return same


def _origins(
    state: Mapping[str, Shape],
    owners: Mapping[str, Shape],
    tags: Mapping[str, tuple[Shape, Dims | None]],
) -> list[Origin]:
    """The origins where the optimizer knew its parameters by these paths."""
    result = []
    for path, shape in state.items():
        owner = owner_of(path, owners)
        tag_shape, tag = tags.get(path.removeprefix("opt_state/"), (None, None))
        result.append(
            _origin(shape, owner, owners, tag if tag_shape == shape else None)
        )
    return result


def owner_of(path: str, owners: Mapping[str, Any]) -> str | None:
    """The parameter whose path is the longest run of parts of a state path.

    A run at the end wins over one in the middle (sm3 adds an index behind it).
    """
    stop = len(path)
    while stop > 0:
        start = 0
        while True:
            candidate = path[start:stop]
            if candidate in owners:
                return candidate
            slash = path.find("/", start, stop)
            if slash < 0:
                break
            start = slash + 1
        stop = path.rfind("/", 0, stop)
    # A parameter that is the whole tree has the empty path.
    return "" if len(owners) == 1 and "" in owners else None


def _origin(
    shape: Shape, owner: str | None, owners: Mapping[str, Shape], tag: Dims | None
) -> Origin:
    if not shape:
        return Origin(owner, (), "scalar")
    if owner is None:
        return Origin(None, None, "belongs to no parameter")
    of = owners[owner]
    if tag is not None and _tells(tag):
        if all(
            dim is None or (dim < len(of) and of[dim] == size)
            for dim, size in zip(tag, shape, strict=True)
        ):
            return Origin(owner, tag, "dims traced")
    if shape == of:
        return Origin(owner, tuple(range(len(of))), "same shape")
    extra = len(shape) - len(of)
    if extra > 0 and shape[extra:] == of:
        dims = (None,) * extra + tuple(range(len(of)))
        return Origin(owner, dims, "leading dims added")
    dims = _only_subsequence(shape, of)
    if dims is not None:
        return Origin(owner, dims, "dims left out")
    if math.prod(shape) <= 1:
        return Origin(owner, (None,) * len(shape), "placeholder")
    return Origin(owner, None, f"no known relation to the parameter's shape {of}")


def _only_subsequence(shape: Shape, of: Shape) -> Dims | None:
    """Dims of `of` that make `shape` in order, if there is exactly one choice."""
    found: list[Dims] = [()]
    for size in shape:
        found = [
            (*dims, dim)
            for dims in found
            for dim in range((dims[-1] or 0) + 1 if dims else 0, len(of))
            if of[dim] == size
        ]
    return found[0] if len(found) == 1 else None


def _shape_of(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
        return leaf
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return jax.eval_shape(lambda: jax.numpy.asarray(leaf))


def _dim_number(entry: Any) -> int | None:
    """`'d3'` → 3; None, and the rare dim made of several, → None."""
    return int(entry[1:]) if isinstance(entry, str) else None
