"""Split the arguments of a function into arrays, and merge them again.

NNX objects are split into GraphDef and State; everything else is a pytree.
"""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding

from flax_layoutmap._core.errors import (
    LayoutError,
    did_you_mean,
)
from flax_layoutmap._core.fetch import own_sharding
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.flax_internals import (
    nnx_split,
)
from flax_layoutmap._tree.graph import holders_of, update
from flax_layoutmap._tree.objects import is_object
from flax_layoutmap._tree.paths import Roots, is_optax_state, is_train_state

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_NUMBERS = bool | int | float | complex

# ------------------------------------------------------------------- signatures


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """The place of an argument in a signature.

    `name` is that of options and messages (`batch`, `args[0]`, or a keyword of
    `**kwargs`), `parameter` the parameter (`args`), `key` the position or keyword
    within a variadic one.
    """

    name: str
    parameter: str
    key: int | str | None = None

    def is_among(self, names: frozenset[str]) -> bool:
        """Whether an option with these names refers to this argument."""
        return self.name in names or self.parameter in names


def signature_of(fun: Any) -> inspect.Signature:
    """The signature of a function; LayoutError if there is none."""
    try:
        return inspect.signature(fun)
    except (TypeError, ValueError) as error:
        raise LayoutError(
            f"jit needs a Python function, got {fun!r}; wrap what is callable in one: "
            "lambda x: …"
        ) from error


def slots_of(bound: inspect.BoundArguments) -> list[tuple[Slot, Any]]:
    """The arguments one by one, also those in `*args` and `**kwargs`."""
    found: list[tuple[Slot, Any]] = []
    parameters = bound.signature.parameters
    for name, value in bound.arguments.items():
        kind = parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            found.extend(
                (Slot(f"{name}[{at}]", name, at), part) for at, part in enumerate(value)
            )
        elif kind is inspect.Parameter.VAR_KEYWORD:
            for key, part in value.items():
                taken = key in parameters
                found.append((Slot(f"{name}/{key}" if taken else key, name, key), part))
        else:
            found.append((Slot(name, name), value))
    return found


def call_with(
    fun: Any, signature: inspect.Signature, values: Iterable[tuple[Slot, Any]]
) -> Any:
    """Call `fun` with the values in their slots; the inverse of `slots_of`."""
    arguments: dict[str, Any] = {}
    for slot, value in values:
        if slot.key is None:
            arguments[slot.parameter] = value
        elif isinstance(slot.key, int):
            arguments[slot.parameter] = (*arguments.get(slot.parameter, ()), value)
        else:
            arguments.setdefault(slot.parameter, {})[slot.key] = value
    ordered = {
        name: arguments[name] for name in signature.parameters if name in arguments
    }
    bound = inspect.BoundArguments(signature, ordered)  # type: ignore[arg-type]
    return fun(*bound.args, **bound.kwargs)


def positional_names(signature: inspect.Signature) -> list[str]:
    """The parameters that can be given by position, in order."""
    return [
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind not in (*_VARIADIC, inspect.Parameter.KEYWORD_ONLY)
    ]


def names_of(
    signature: inspect.Signature,
    names: str | Iterable[str],
    numbers: int | Iterable[int],
    option: str,
) -> frozenset[str]:
    """The arguments that an option of jit names, by name and by position.

    Raises:
        LayoutError: there is no such argument.
    """
    parameters = signature.parameters
    listed = [names] if isinstance(names, str) else list(names)
    positional = positional_names(signature)
    rest = [n for n, p in parameters.items() if p.kind is _VARIADIC[0]]
    open_names = any(p.kind is _VARIADIC[1] for p in parameters.values())
    for number in [numbers] if isinstance(numbers, int) else numbers:
        if -len(positional) <= number < len(positional):
            listed.append(positional[number])
        elif rest and number >= 0:
            listed.append(f"{rest[0]}[{number - len(positional)}]")
        else:
            raise LayoutError(
                f"{option.replace('names', 'nums')} names argument number {number}, "
                f"but the function has {list(parameters)}"
            )
    for name in listed:
        if name.partition("[")[0] not in parameters and not open_names:
            raise LayoutError(
                f"{option} names the argument {name!r}, but the function has "
                f"{list(parameters)}{did_you_mean(name, parameters)}"
            )
    return frozenset(listed)


# -------------------------------------------------------------------- arguments


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument, taken apart.

    Attributes:
        value: as the caller passed it.
        outer: the structure with NNX objects (and States) as leaves.
        nodes: the leaves of `outer`.
        graphdefs: GraphDef of each node, None for other nodes than NNX objects.
        raw: all leaves as the caller has them.
        leaves: all leaves as the program gets them: Python numbers of a state are
            arrays, data is placed.
        treedef: structure of the plain tree, with an `nnx.State` for each NNX object.
        is_state: whether the rules lay it out.
        is_donated: whether its buffers may be reused.
    """

    slot: Slot
    value: Any
    outer: Any
    nodes: Sequence[Any]
    graphdefs: tuple[Any, ...]
    raw: Sequence[Any]
    leaves: Sequence[Any]
    treedef: Any
    is_state: bool
    is_donated: bool

    @property
    def name(self) -> str:
        """The name of its slot."""
        return self.slot.name

    @property
    def has_objects(self) -> bool:
        """Whether NNX objects are inside, which are updated in place."""
        return any(graphdef is not None for graphdef in self.graphdefs)

    @property
    def is_container(self) -> bool:
        """Whether it is a tree, not a single array."""
        return not jax.tree_util.treedef_is_leaf(self.treedef)

    @functools.cached_property
    def pins(self) -> tuple[NamedSharding, ...]:
        """The shardings of a container of data that the caller put on a mesh.

        A result of the same structure keeps them. Empty for other arguments.
        """
        if self.is_state or not self.raw or not self.is_container:
            return ()
        if not all(map(is_on_mesh, self.raw)):
            return ()
        own = map(own_sharding, self.leaves)
        return tuple(sharding for sharding in own if sharding is not None)

    def key(self) -> Any:
        """The part of a program's cache key."""
        # State is placed by the rules, so its current sharding does not matter.
        avals = tuple(_aval_key(leaf, not self.is_state) for leaf in self.leaves)
        return self.slot, self.outer, self.graphdefs, self.treedef, avals, self.pins

    def as_state(self) -> "Argument":
        """The same, laid out by the rules."""
        leaves = list(map(strong, self.raw))
        return dataclasses.replace(self, is_state=True, leaves=leaves)

    def with_leaves(self, leaves: Sequence[Any]) -> "Argument":
        """The same with other leaves for the program."""
        return dataclasses.replace(self, leaves=leaves)

    def plain(self, leaves: Sequence[Any] | None = None) -> Any:
        """The tree with an `nnx.State` for each NNX object."""
        return jax.tree.unflatten(
            self.treedef, self.leaves if leaves is None else leaves
        )

    def parts(self, leaves: Sequence[Any]) -> list[Any]:
        """One part of the plain tree for each node."""
        return self.outer.flatten_up_to(self.plain(leaves))

    def rebuild(self, leaves: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The argument with new leaves, and the NNX objects in it."""
        merged = [
            part if graphdef is None else nnx.merge(graphdef, part)
            for graphdef, part in zip(self.graphdefs, self.parts(leaves), strict=True)
        ]
        return jax.tree.unflatten(self.outer, merged), self._of_objects(merged)

    @property
    def objects(self) -> list[Any]:
        """The outermost NNX objects in it."""
        return self._of_objects(self.nodes)

    def _of_objects(self, entries: Iterable[Any]) -> list[Any]:
        """The entries of NNX objects, from one entry per node."""
        has_graph = (graphdef is not None for graphdef in self.graphdefs)
        return list(itertools.compress(entries, has_graph))

    def holders(self) -> list[tuple[Any, int] | None]:
        """Per leaf, the Variable of an NNX object that it is in, as `holders_of`."""
        found: list[tuple[Any, int] | None] = []
        for node, graphdef in zip(self.nodes, self.graphdefs, strict=True):
            if graphdef is None:
                found += [None] * len(jax.tree.leaves(node))
            else:
                found += holders_of(nnx_split(node)[1])
        return found

    def pure_leaves(self) -> list[bool]:
        """Per leaf: whether it is outside of every NNX object."""
        parts = zip(self.graphdefs, self.parts(range(len(self.leaves))), strict=True)
        return [graphdef is None for graphdef, p in parts for _ in jax.tree.leaves(p)]

    def with_objects(self, nodes: Iterator[Any]) -> Any:
        """The tree with the next of these NNX objects in place of its own."""
        pairs = zip(self.nodes, self.graphdefs, strict=True)
        entries = [node if made is None else next(nodes) for node, made in pairs]
        return jax.tree.unflatten(self.outer, entries)

    def write_back(self, new: Mapping[int, Any]) -> None:
        """Give the caller's own NNX objects new leaves, by position."""
        parts = [
            node if graphdef is None else nnx_split(node)[1]
            for node, graphdef in zip(self.nodes, self.graphdefs, strict=True)
        ]
        leaves = jax.tree.leaves(jax.tree.unflatten(self.outer, parts))
        for at, leaf in new.items():
            leaves[at] = leaf
        for node, part in zip(
            self.objects, self._of_objects(self.parts(leaves)), strict=True
        ):
            update(node, part)

    def path(self, at: int) -> str:
        """Path of a leaf, with the name of the argument first."""
        return flatten(Roots({self.name: self.value})).full_paths()[at]


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of the function, taken apart.

    Attributes:
        slots: all arguments, in the order of the signature.
        static: those that are compile-time constants.
        arguments: the others.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    rules: RuleSet | None
    slots: Sequence[tuple[Slot, Any]]
    static: Mapping[Slot, Any]
    arguments: Sequence[Argument]

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of the rules."""
        return None if self.rules is None else self.rules.mesh

    @property
    def leaves(self) -> list[Any]:
        """The leaves of all arguments."""
        return [leaf for argument in self.arguments for leaf in argument.leaves]


def spans(arguments: Iterable[Argument]) -> list[range]:
    """Per argument, the positions of its leaves among those of all arguments."""
    found: list[range] = []
    start = 0
    for argument in arguments:
        found.append(range(start, start + len(argument.leaves)))
        start = found[-1].stop
    return found


def named_objects(
    arguments: Sequence[Argument], objects: Sequence[Sequence[Any]] | None = None
) -> list[tuple[str, Any]]:
    """Each outermost NNX object, or its copy in `objects`, with the argument's name."""
    found = []
    for argument, own in zip(
        arguments, objects or [one.objects for one in arguments], strict=True
    ):
        several = len(own) > 1
        for at, node in enumerate(own, 1):
            found.append((argument.name + f" (object {at})" * several, node))
    return found


def leaves_with_owners(
    arguments: Iterable[Argument],
) -> Iterator[tuple[Argument, int, Any]]:
    """Each leaf of all arguments, with its argument and its position there."""
    for argument in arguments:
        for at, leaf in enumerate(argument.leaves):
            yield argument, at, leaf


def rebuilt(
    arguments: Sequence[Argument], leaves: Sequence[Any]
) -> tuple[dict[Slot, Any], list[list[Any]], list[int]]:
    """The arguments with new leaves, and what of them is in NNX objects.

    That is, the outermost objects of each, and the positions of the leaves in them.
    """
    values: dict[Slot, Any] = {}
    objects: list[list[Any]] = []
    positions: list[int] = []
    for argument, span in zip(arguments, spans(arguments), strict=True):
        own = leaves[span.start : span.stop]
        values[argument.slot], found = argument.rebuild(own)
        objects.append(found)
        is_pure = zip(span, argument.pure_leaves(), strict=True)
        positions += [at for at, pure in is_pure if not pure]
    return values, objects, positions


def take_apart(slot: Slot, value: Any, *, is_state: bool, is_donated: bool) -> Argument:
    """Take an argument apart.

    It is state if `is_state`, or if it holds an NNX object, an `nnx.State`, a
    TrainState or an optax state.

    Raises:
        LayoutError: a leaf is neither an array nor a number.
        StructureError: JAX cannot flatten the argument.
    """

    def stops(node: Any) -> bool:
        nonlocal is_state
        stop = is_object(node) or isinstance(node, nnx.State)
        is_state = is_state or stop or is_train_state(node) or is_optax_state(node)
        return stop

    try:
        nodes, outer = jax.tree.flatten(value, is_leaf=stops)
    except (TypeError, ValueError):
        flatten(Roots({slot.name: value}))  # names the node that JAX refuses
        raise
    split = [nnx_split(node) if is_object(node) else (None, node) for node in nodes]
    graphdefs, parts = zip(*split, strict=True) if split else ((), ())
    raw, treedef = jax.tree.flatten(jax.tree.unflatten(outer, parts))
    leaves = list(map(strong, raw)) if is_state else raw
    argument = Argument(
        slot,
        value,
        outer,
        nodes,
        graphdefs,
        raw,
        leaves,
        treedef,
        is_state,
        is_donated,
    )
    for at, leaf in enumerate(leaves):
        if problem := no_array(leaf):
            raise LayoutError(
                f"{argument.path(at)} is neither an array nor a number, but the "
                f"{problem}: take it out of the argument, or name a whole (hashable) "
                "argument in static_argnames"
            )
    return argument


def is_on_mesh(leaf: Any) -> bool:
    """Whether a leaf is an array that was put on a mesh."""
    if own_sharding(leaf) is None or isinstance(leaf, Tracer):
        return False
    return bool(getattr(leaf, "committed", True))


def no_array(leaf: Any) -> str:
    """A description of a leaf that is neither an array nor a number; else ''."""
    if isinstance(leaf, np.ndarray | np.generic):
        return f"array of {leaf.dtype}" if leaf.dtype.kind in "OSUMm" else ""
    if hasattr(leaf, "dtype") or isinstance(leaf, _NUMBERS):
        return ""
    return f"{type(leaf).__name__} {leaf!r}"


def strong(leaf: Any) -> Any:
    """A number in a state as an array, so that the next call has the same types.

    Also removes JAX's weak type, which the results of a step would not have.
    """
    if isinstance(leaf, _NUMBERS):
        return np.asarray(leaf, jax.dtypes.result_type(leaf))
    if getattr(leaf, "weak_type", False):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        return jax.lax.convert_element_type(leaf, leaf.dtype)
    return leaf


def _aval_key(leaf: Any, with_sharding: bool) -> Any:
    if isinstance(leaf, Tracer):
        return jax.typeof(leaf)
    if isinstance(leaf, _NUMBERS):
        return type(leaf)
    dtype = leaf.dtype
    if isinstance(leaf, np.ndarray | np.generic):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    weak = getattr(leaf, "weak_type", False)
    if not with_sharding:
        return leaf.shape, dtype, weak
    sharding = getattr(leaf, "sharding", None)
    explicit = isinstance(sharding, NamedSharding) and any(
        kind is AxisType.Explicit for kind in sharding.mesh.axis_types
    )
    space = jax.typeof(leaf).memory_space
    return leaf.shape, dtype, weak, space, sharding if explicit else None


def shape_key(leaves: Iterable[Any]) -> tuple[Any, ...]:
    """The shapes of leaves, to compare."""
    return tuple(tuple(np.shape(leaf)) for leaf in leaves)


def static_key(values: Mapping[Slot, Any]) -> tuple[Any, ...]:
    """The static arguments as part of a key; LayoutError if one cannot be hashed."""
    for slot, value in values.items():
        try:
            hash(value)
        except TypeError as error:
            raise LayoutError(
                f"the static argument {slot.name!r} cannot be hashed: {value!r}; make "
                "it a tuple or a frozen dataclass, or take it out of static_argnames"
            ) from error
    # 1, 1.0 and True are equal, but give different programs.
    return tuple((slot, type(value), value) for slot, value in values.items())


def first_four(names: Sequence[str]) -> str:
    """The first four names, and how many more there are."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
