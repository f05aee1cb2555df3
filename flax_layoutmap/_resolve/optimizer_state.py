"""Find the parameter that each leaf of optimizer state was made from, and its dims.

The path tells the parameter: a state repeats the paths of the parameters that `tx.init`
was given. If several models have such paths, shapes distinguish them, then the position
and the name of the optimizer. A trace of `tx.init` tells which dims of the parameter a
leaf has (see `traced_dims`); if it does not, shapes do.
"""

import dataclasses
import functools
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from flax_layoutmap._core.jax_internals import is_sharding_type_error
from flax_layoutmap._resolve.kernels import find_adapters
from flax_layoutmap._resolve.leaves import Dims, Leaves, Origin
from flax_layoutmap._rules.records import Shape
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.flax_internals import is_nnx_object, nnx_state, no_mesh
from flax_layoutmap._tree.paths import (
    Flat,
    Leaf,
    Section,
    is_optimizer,
    is_train_state,
    unescape,
)

# Path of a leaf of state → its shape and dims.
Traced = Mapping[str, tuple[Shape, Dims]]
# Name → place (the part of the path before the name) → position of the parameter.
Named = Mapping[str, Mapping[str, int]]

# If more parameters share an ending, it is a coincidence, as with `kernel`.
_MOST_PLACES = 8


def find_origins(
    leaves: Leaves, nodes: Mapping[str, Any], trees: Sequence[Any], tx: Any = None
) -> Leaves:
    """Add the origins, from paths, shapes and the optimizer alone.

    `nodes` has the optimizers and TrainStates (see `Flat`), `trees` the modules and the
    trees of parameters that these may have been given. `tx` is the transformation; None
    takes the node's.
    """
    origins: dict[int, Origin] = {}
    sections = [s for s in leaves.flat.sections if s.role == "optimizer"]
    if sections:
        search = _Search(leaves, nodes, trees, tx)
        for section in sections:
            positions = range(section.start, section.stop)
            origins |= zip(positions, search.origins_in(section), strict=True)
    return with_origins(leaves, origins)


def with_origins(leaves: Leaves, origins: Mapping[int, Origin]) -> Leaves:
    """Add known origins (for example from a checkpoint), and LoRA matrices."""
    adapters, plain = find_adapters(leaves)
    return dataclasses.replace(leaves, origins=origins, adapters=adapters, plain=plain)


def models_in(flat: Flat, tree: Any) -> list[Any]:
    """The NNX objects in a tree that the optimizers in it may be for."""
    nodes = jax.tree.leaves(tree, is_leaf=is_nnx_object) if flat.nodes else []
    return [x for x in nodes if is_nnx_object(x) and not is_optimizer(x)]


class _Search:
    """Finds parameters by the names that an optimizer may know them by."""

    def __init__(
        self, leaves: Leaves, nodes: Mapping[str, Any], trees: Sequence[Any], tx: Any
    ) -> None:
        self.leaves, self.nodes, self.models, self.tx = leaves, nodes, trees, tx
        self.keys = {at: key for key, at in leaves.owners.items()}
        self.prefixes = {section.prefix for section in leaves.flat.sections}

    @functools.cached_property
    def whole(self) -> Named:
        """Parameters by their paths within a model, or within a tree around it."""
        return self._by_name(lambda leaf: leaf.prefix)

    @functools.cached_property
    def endings(self) -> Named:
        """Parameters by all endings of paths, for optimizers of a part of a model."""
        return self._by_name(lambda leaf: leaf.full_path)

    def _by_name(self, removable: Callable[[Leaf], str]) -> Named:
        """Parameters by whole path, and by path without removable leading parts."""
        named: dict[str, dict[str, int]] = {}
        for at in self.keys:
            leaf = self.leaves.flat.records[at]
            parts = removable(leaf).count("/") + 1
            for path in leaf.names():
                name = path
                for _ in range(parts):
                    named.setdefault(name, {})[path.removesuffix(name)] = at
                    name = name.partition("/")[2]
        return named

    def places(self, path: str, shape: Shape) -> Mapping[str, int]:
        """The parameters whose name is in a path of optimizer state, by place."""
        name = longest_run(path, self.whole)
        if name is not None:
            return self.whole[name]
        # The state may have one more part: sm3 appends the number of a dim.
        name = longest_run(path, self.endings, behind=1) if shape else None
        places = {} if name is None else self.endings[name]
        return places if len(places) <= _MOST_PLACES else {}

    def origins_in(self, section: Section) -> Iterator[Origin]:
        """The origins of one optimizer's state.

        Of several models, this takes the one whose shapes fit most of the state.
        """
        span = slice(section.start, section.stop)
        shapes, of = self.leaves.shapes[span], self.leaves.shapes
        places = list(map(self.places, self.leaves.flat.paths[span], shapes))
        fitting = Counter(
            place
            for shape, owners in zip(shapes, places, strict=True)
            for place, at in owners.items()
            if possible_dims(shape, of[at])
        )
        ranks = {
            place: (
                fitting[place],
                place in self.prefixes,
                _nearness(section.prefix, place),
            )
            for place in dict.fromkeys(itertools.chain(*places))
        }
        best = max(ranks, key=ranks.__getitem__, default="")
        dims = self.traced(section, best)
        for shape, owners, told in zip(shapes, places, dims, strict=True):
            rank = max(map(ranks.__getitem__, owners), default=None)
            nearest = [at for place, at in owners.items() if ranks[place] == rank]
            keys = dict.fromkeys(self.keys[at] for at in nearest)
            yield _origin(shape, [*keys], of[nearest[0]] if keys else (), told)

    def traced(self, section: Section, place: str) -> list[Dims | None]:
        """The dims of each leaf of an optimizer's state, from a trace of the optimizer.

        `place` is that of its parameters. An optimizer may refuse a tree; if it refuses
        all trees that were given separately, that is an error.
        """
        span = slice(section.start, section.stop)
        paths, shapes = self.leaves.flat.full_paths()[span], self.leaves.shapes[span]
        node = self.nodes.get(section.prefix)
        tx = getattr(node, "tx", None) if self.tx is None else self.tx
        best: list[Dims | None] = [None] * len(shapes)
        errors: list[Exception] = []
        if tx is None:
            return best
        trees = [*self.trees(node, place)]
        for tree in trees:
            try:
                traced = traced_dims(tx.init, tree)
            except _REFUSALS as error:
                errors.append(error)
                continue
            dims = [_told(traced, *leaf) for leaf in zip(paths, shapes, strict=True)]
            best = min(best, dims, key=lambda dims: dims.count(None))
            if best.count(None) <= 1:  # an nnx.Optimizer adds its `step`
                break
        if self.leaves.state is not None and errors and len(errors) == len(trees):
            raise errors[0]
        return best

    def trees(self, node: Any, place: str) -> Iterator[Any]:
        """Trees of parameters that a state may have been made from.

        `node` is the optimizer or TrainState that holds the state. The trees that exist
        come first, as a transformation may depend on their types.
        """
        leaves, full = self.leaves, self.leaves.flat.full_paths()
        if is_train_state(node):
            yield node.params
        for tree in self.models:
            if not is_nnx_object(tree):
                yield tree
            elif hasattr(node, "wrt"):
                yield nnx_state(tree, node.wrt)
        root: dict[str, Any] = {}
        for at in self.keys:
            if full[at].startswith(place) and leaves.dtypes[at] is not None:
                *parents, last = map(unescape, full[at].removeprefix(place).split("/"))
                inner = root
                for part in parents:
                    inner = inner.setdefault(part, {})
                inner[last] = jax.ShapeDtypeStruct(leaves.shapes[at], leaves.dtypes[at])
        yield root


def longest_run(
    path: str, names: Mapping[str, Any], behind: int | None = None
) -> str | None:
    """The longest name that is a run of parts of a path; the last of equal length.

    `behind` limits the number of parts that follow it.
    """
    parts = path.split("/")
    for length in range(len(parts), 0, -1):
        last = len(parts) - length
        first = 0 if behind is None else max(last - behind, 0)
        for start in range(last, first - 1, -1):
            name = "/".join(parts[start : start + length])
            if name in names:
                return name
    # A parameter that is the whole tree has the empty path.
    return "" if len(names) == 1 and "" in names else None


def _nearness(prefix: str, place: str) -> tuple[int, bool]:
    """How near the place of a model is to an optimizer, among models that are alike.

    An optimizer is beside its model, in a container with no other model, or its name
    contains the model's: `generator_optimizer`.
    """
    optimizer, model = prefix.split("/"), place.split("/")
    same = len(os.path.commonprefix([optimizer, model]))
    name = optimizer[same] if same < len(optimizer) else ""
    return same, any(part and part in name for part in model[same:])


def _origin(
    shape: Shape, owners: Sequence[str], owner_shape: Shape, traced: Dims | None
) -> Origin:
    """The origin of a leaf; `owner_shape` is the shape of its first owner."""
    if not owners:
        return Origin(None, None if shape else (), "belongs to no parameter")
    choices = possible_dims(shape, owner_shape)
    dims = choices[0] if len(choices) == 1 else None
    if traced is not None and _fits(traced, shape, owner_shape):
        dims = traced
    why = f"no known relation to the parameter's shape {owner_shape}"
    return Origin(owners[0], dims, why, tuple(owners[1:]))


def _fits(dims: Dims, shape: Shape, owner_shape: Shape) -> bool:
    """Whether the traced dims say anything, and agree with the shapes."""
    return any(dim is not None for dim in dims) and all(
        dim is None or (dim < len(owner_shape) and owner_shape[dim] == size)
        for dim, size in zip(dims, shape, strict=True)
    )


def possible_dims(shape: Shape, owner_shape: Shape) -> list[Dims]:
    """The dims of a parameter that a leaf of state may have, by their sizes."""
    extra, every = len(shape) - len(owner_shape), range(len(owner_shape))
    choices: list[Dims]
    if extra >= 0:  # like the parameter, or several copies of it
        is_like = shape[extra:] == owner_shape
        choices = [(None,) * extra + tuple(every)] if is_like else []
    else:
        subsets = itertools.combinations(every, len(shape))
        choices = [x for x in subsets if tuple(owner_shape[dim] for dim in x) == shape]
    if len(choices) != 1 and math.prod(shape) <= 1:  # a placeholder
        return [(None,) * len(shape)]
    return choices


# --------------------------------------------------------------------- by a trace

_REFUSALS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    TypeError,
    ValueError,
)


def traced_dims(init: Callable[[Any], Any], params: Any) -> Traced:
    """Trace `init(params)` for the dims of its parameter that each leaf has.

    It is traced on a made-up mesh whose axes have size 1 and are named by dim number.
    JAX's sharding-in-types then writes on every leaf of the state which dims it was
    made from: an Adafactor row statistic of a square kernel says `0`, the column
    statistic `1`. A leaf made from a bare shape, `jnp.zeros(p.shape[:-1])`, says
    nothing, and neither does an `init` that contracts its parameters (`p @ p.T`).
    """
    shapes = jax.tree.map(_struct_of, params)
    ndim = max((leaf.ndim for leaf in jax.tree.leaves(shapes)), default=0) or 1
    names = tuple(map(str, range(ndim)))
    mesh = AbstractMesh((1,) * ndim, names, axis_types=(AxisType.Explicit,) * ndim)

    def tagged(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec(*names[: leaf.ndim]))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    with nnx.use_eager_sharding(False):
        try:
            with no_mesh(), jax.sharding.use_abstract_mesh(mesh):
                state = jax.eval_shape(init, jax.tree.map(tagged, shapes))
        except Exception as error:
            if not (isinstance(error, _REFUSALS) or is_sharding_type_error(error)):
                raise
            jax.eval_shape(init, shapes)  # raises if `init` itself is wrong
            return {}
    flat = flatten(state)
    dims = map(_dims_of, flat.leaves)
    return dict(zip(flat.full_paths(), dims, strict=True))


def _struct_of(leaf: Any) -> Any:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return jax.eval_shape(lambda: jax.numpy.asarray(leaf))


def _dims_of(leaf: jax.ShapeDtypeStruct) -> tuple[Shape, Dims]:
    spec = () if leaf.sharding is None else tuple(leaf.sharding.spec)
    padded = spec + (None,) * (leaf.ndim - len(spec))
    # A dim that was made from several is none of them.
    return leaf.shape, tuple(int(x) if isinstance(x, str) else None for x in padded)


def _told(traced: Traced, path: str, shape: Shape) -> Dims | None:
    """The dims of a leaf; its state may be in another, or in an nnx.Optimizer."""
    while path and path not in traced:
        path = path.partition("/")[2]
    traced_shape, dims = traced.get(path, (None, None))
    return dims if traced_shape == shape else None
