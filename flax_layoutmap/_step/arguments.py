"""Take the arguments of a call apart into arrays, and put them together again.

NNX objects are flattened as by `nnx.split`, all of a call at once, so that they may
share modules; everything else is a pytree.
"""

import dataclasses
import functools
import inspect
import itertools
import operator
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from flax_layoutmap._core.errors import LayoutError, did_you_mean
from flax_layoutmap._core.fetch import own_sharding
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.flatten import flatten, plain_tree
from flax_layoutmap._tree.flax_internals import is_object
from flax_layoutmap._tree.graph import Graph
from flax_layoutmap._tree.paths import Flat, Roots, is_optax_state, is_train_state

# Kinds of parameters.
_ARGS, _KWARGS = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD

# Numbers of Python, which JAX takes as leaves.
NUMBERS = bool | int | float | complex

# ------------------------------------------------------------------- signatures


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """An argument in a call."""

    name: str  # in options and messages: `batch`, `args[0]`, a keyword of `**kwargs`
    parameter: str  # `args`
    key: int | str  # the position or the keyword by which it is passed

    def is_among(self, names: Container[str]) -> bool:
        return self.name in names or self.parameter in names


def slots_of(bound: inspect.BoundArguments) -> list[tuple[Slot, Any]]:
    """The arguments one by one, also those in `*args` and `**kwargs`."""
    slots: list[tuple[Slot, Any]] = []
    parameters, count = bound.signature.parameters, len(bound.args)
    for name, value in bound.arguments.items():
        kind, at = parameters[name].kind, len(slots)
        if kind is _KWARGS:
            for key, part in value.items():
                shown = f"{name}/{key}" if key in parameters else key
                slots.append((Slot(shown, name, key), part))
        elif kind is _ARGS:
            each = [Slot(f"{name}[{n}]", name, at + n) for n in range(len(value))]
            slots += zip(each, value, strict=True)
        else:
            slots.append((Slot(name, name, at if at < count else name), value))
    return slots


def call_with(fun: Any, values: Iterable[tuple[Slot, Any]]) -> Any:
    """Call `fun` with the values in their slots; the inverse of `slots_of`."""
    by_key = {slot.key: value for slot, value in values}
    args = [value for key, value in by_key.items() if isinstance(key, int)]
    return fun(*args, **{k: v for k, v in by_key.items() if isinstance(k, str)})


def names_of(
    signature: inspect.Signature,
    names: str | Iterable[str],
    numbers: int | Iterable[int],
    option: str,
) -> frozenset[str]:
    """The arguments that an option of jit names, by name and by position."""
    parameters = signature.parameters
    kinds = {p.kind: name for name, p in parameters.items()}
    keyword = _ARGS, _KWARGS, inspect.Parameter.KEYWORD_ONLY
    positional = [name for name, p in parameters.items() if p.kind not in keyword]
    listed = [names] if isinstance(names, str) else list(names)
    for number in [numbers] if isinstance(numbers, int) else numbers:
        beyond = number - len(positional)
        if beyond >= 0 and _ARGS in kinds:
            listed.append(f"{kinds[_ARGS]}[{beyond}]")
        elif -len(positional) <= number < len(positional):
            listed.append(positional[number])
        else:
            raise LayoutError(
                f"{option.replace('names', 'nums')} names argument number {number}, "
                f"but the function has {list(parameters)}"
            )
    for name in [] if _KWARGS in kinds else listed:
        if name.partition("[")[0] not in parameters:
            raise LayoutError(
                f"{option} names the argument {name!r}, but the function has "
                f"{list(parameters)}{did_you_mean(name, parameters)}"
            )
    return frozenset(listed)


# -------------------------------------------------------------------- arguments


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Taken:
    """The values of the Variables of an NNX object, in its place in an argument."""

    values: Sequence[Any]


def _is_taken(node: Any) -> bool:
    return isinstance(node, Taken)


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument, taken apart."""

    slot: Slot
    outer: Any  # its structure, with a `Taken` for each NNX object
    graphdefs: Sequence[Any]  # the structures of these
    is_state: bool  # the rules lay it out
    is_donated: bool
    given: Any  # the entry of `in_shardings`, which overrides the rules
    value: Any  # as the caller passed it
    objects: Sequence[Any]  # the outermost NNX objects, which are updated in place
    raw: Sequence[Any]  # all leaves as the caller has them
    # As they are passed on: numbers of a state are arrays, data is placed.
    leaves: Sequence[Any]

    @property
    def name(self) -> str:
        return self.slot.name

    @property
    def structure(self) -> tuple[Any, Sequence[Any]]:
        return self.outer, self.graphdefs

    @functools.cached_property
    def in_objects(self) -> list[bool]:
        """Per leaf, whether it is in an NNX object."""
        numbers = self.outer.unflatten(range(self.outer.num_leaves))
        nodes = jax.tree.leaves(numbers, is_leaf=_is_taken)
        return [_is_taken(node) for node in nodes for _ in jax.tree.leaves(node)]

    @functools.cached_property
    def treedef(self) -> Any:
        """Structure of the plain tree, with an `nnx.State` for each NNX object."""
        return (
            jax.tree.structure(plain_tree(self.value)) if self.objects else self.outer
        )

    def plain(self, leaves: Sequence[Any]) -> Any:
        return self.treedef.unflatten(leaves)

    @property
    def shapes(self) -> tuple[str, Any, Any]:
        return self.name, self.treedef, shape_key(self.leaves)

    @property
    def is_container(self) -> bool:
        return not jax.tree_util.treedef_is_leaf(self.treedef)

    def key(self, rules: RuleSet | None) -> Any:
        """What a program depends on: structure, and shapes and places of leaves.

        The rules place state, which has no weak types.
        """
        structure = self.slot, self.outer, *self.graphdefs
        if not self.is_state:
            return *structure, *(_data_key(x, self.given is None) for x in self.leaves)
        places = [own_sharding(x) for x in self.leaves] if rules is None else []
        return *structure, *map(_SHAPE, self.leaves), *places

    def as_state(self) -> "Argument":
        leaves = list(map(strong, self.raw))
        return dataclasses.replace(self, is_state=True, leaves=leaves)

    def owners(self) -> list[nnx.Variable[Any] | None]:
        """Per leaf, the Variable of an NNX object that holds it, or one like it."""
        if not self.objects:
            return [None] * len(self.leaves)
        kind = nnx.Variable
        tree = plain_tree(self.value)
        nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
        pairs = [(node if isinstance(node, kind) else None, node) for node in nodes]
        return [owner for owner, node in pairs for _ in jax.tree.leaves(node)]

    @functools.cached_property
    def flat(self) -> Flat:
        """Its leaves with their paths, or a StructureError."""
        return flatten(Roots({self.name: self.value}))

    def path(self, at: int) -> str:
        """Path of a leaf, with the name of the argument first."""
        return self.flat.records[at].full_path

    def label(self, at: int) -> str:
        return f"{self.path(at)} {show_shape(np.shape(self.leaves[at]))}"


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of the function: all arguments by slot, and those with leaves apart."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    rules: RuleSet | None
    slots: Sequence[tuple[Slot, Any]]
    static: Mapping[Slot, Any]
    arguments: Sequence[Argument]
    graph: Graph

    @property
    def mesh(self) -> DeviceMesh | None:
        return None if self.rules is None else self.rules.mesh

    @functools.cached_property
    def leaves(self) -> list[Any]:
        return [leaf for argument in self.arguments for leaf in argument.leaves]

    @functools.cached_property
    def table(self) -> list[tuple[Argument, int]]:
        """Per leaf, the argument that has it, and its position there."""
        return [(a, at) for a in self.arguments for at in range(len(a.leaves))]


def named_objects(arguments: Iterable[Argument]) -> list[tuple[str, Any]]:
    """The outermost NNX objects in arguments, with names for messages."""
    return [
        (f"{a.name} (object {at})" if len(a.objects) > 1 else a.name, node)
        for a in arguments
        for at, node in enumerate(a.objects, 1)
    ]


def spans(arguments: Iterable[Argument]) -> list[range]:
    """Per argument, the positions of its leaves among those of all arguments."""
    ends = [0, *itertools.accumulate(len(argument.leaves) for argument in arguments)]
    return list(itertools.starmap(range, itertools.pairwise(ends)))


def put_together(
    structures: Iterable[tuple[Any, Sequence[Any]]], leaves: Iterable[Any]
) -> tuple[list[Any], list[Any]]:
    """Trees of the structures of arguments, and the NNX objects in them."""
    rest, objects = iter(leaves), list[Any]()
    with nnx.merge_context() as merging:

        def merged(node: Any, graphdefs: Iterator[Any]) -> Any:
            if _is_taken(node):
                node = merging.unflatten(next(graphdefs), [*node.values])
                objects.append(node)
            return node

        values = []
        for outer, graphdefs in structures:
            tree = outer.unflatten(itertools.islice(rest, outer.num_leaves))
            if graphdefs:
                merge = functools.partial(merged, graphdefs=iter(graphdefs))
                tree = jax.tree.map(merge, tree, is_leaf=_is_taken)
            values.append(tree)
    return values, objects


def write(graph: Graph, leaves: Sequence[Any], besides: Container[int] = ()) -> None:
    """Write the leaves of a graph into its Variables, but those of these numbers.

    Arrays in no Variable, which may be in a tuple, are placed in each call.
    """
    if all(map(operator.is_, leaves, graph.leaves)):
        return
    values = graph.treedef.unflatten(leaves)
    for at, (part, value) in enumerate(zip(graph.parts, values, strict=True)):
        if isinstance(part, nnx.Variable) and at not in besides:
            part.set_raw_value(value)


def take_apart(
    slots: Iterable[tuple[Slot, Any]],
    donated: frozenset[str] = frozenset(),
    in_shardings: Mapping[str, Any] | None = None,
) -> tuple[list[Argument], Graph]:
    """Take arguments apart; the options are names of arguments.

    An argument is state if it is donated, or holds an NNX object, an `nnx.State`, a
    TrainState or an optax state.
    """
    flat = [(slot, value, *_nodes_of(slot, value)) for slot, value in slots]
    graph = Graph([node for *_, nodes in flat for node in nodes if is_object(node)])
    graphdefs, values = iter(graph.graphdefs), iter(graph.values)
    arguments, by_hand = [], in_shardings or {}
    for slot, value, outer, is_state, nodes in flat:
        defs, objects = [], []
        for at, node in enumerate(nodes):
            if is_object(node):
                objects.append(node)
                defs.append(next(graphdefs))
                nodes[at] = Taken([*itertools.islice(values, defs[-1].num_leaves)])
        raw, outer = jax.tree.flatten(outer.unflatten(nodes) if objects else value)
        is_donated = slot.is_among(donated)
        given = by_hand.get(slot.name, by_hand.get(slot.parameter))
        options = slot, outer, defs, is_state or is_donated, is_donated, given
        arguments.append(_checked(Argument(*options, value, objects, raw, raw)))
    return arguments, graph


def _nodes_of(slot: Slot, value: Any) -> tuple[Any, bool, list[Any]]:
    """Structure above NNX objects and States, whether it is state, and the nodes."""
    is_state = False

    def stops(node: Any) -> bool:
        nonlocal is_state
        stop = is_object(node) or isinstance(node, nnx.State)
        is_state = is_state or stop or is_train_state(node) or is_optax_state(node)
        return stop

    try:
        nodes, outer = jax.tree.flatten(value, is_leaf=stops)
        return outer, is_state, nodes
    except (TypeError, ValueError):
        flatten(Roots({slot.name: value}))  # names the node that JAX refuses
        raise


def _checked(argument: Argument) -> Argument:
    """The argument, whose leaves are arrays or numbers; in a state, without numbers."""
    raw = argument.raw
    try:
        if not any(map(_WEAK, raw)):
            return argument
    except AttributeError:
        pass  # not only arrays of JAX
    for at, leaf in enumerate(raw):
        if not isinstance(leaf, jax.Array) and (problem := no_array(leaf)):
            raise LayoutError(
                f"{argument.path(at)} is neither an array nor a number, but the "
                f"{problem}: take it out of the argument, or name a whole (hashable) "
                "argument in static_argnames"
            )
    return argument.as_state() if argument.is_state else argument


_WEAK = operator.attrgetter("weak_type")
_SHAPE = operator.attrgetter("shape", "dtype")


def _data_key(leaf: Any, is_placed: bool) -> Any:
    """What a leaf of data is to a program, and where it is if nothing else says so."""
    if isinstance(leaf, NUMBERS):
        return type(leaf)
    dtype, place = leaf.dtype, getattr(leaf, "sharding", None)
    if isinstance(leaf, np.ndarray | np.generic):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    elif isinstance(leaf, Tracer):  # whose type may say so
        place = jax.typeof(leaf)
    weak = getattr(leaf, "weak_type", False)
    return leaf.shape, dtype, weak, place if is_placed else None


def no_array(leaf: Any) -> str:
    """Describes a leaf that is neither an array nor a number."""
    if isinstance(leaf, np.ndarray | np.generic):
        return f"array of {leaf.dtype}" if leaf.dtype.kind in "OSUMm" else ""
    if hasattr(leaf, "dtype") or isinstance(leaf, NUMBERS):
        return ""
    return f"{type(leaf).__name__} {leaf!r}"


def strong(leaf: Any) -> Any:
    """A number in a state as an array, so that the next call has the same types.

    Also removes JAX's weak type, which the results of a step would not have.
    """
    if isinstance(leaf, NUMBERS):
        return np.asarray(leaf, jax.dtypes.result_type(leaf))
    if getattr(leaf, "weak_type", False):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update(weak_type=False)
        return jax.lax.convert_element_type(leaf, leaf.dtype)
    return leaf


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array of JAX, with values."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)


def shape_key(leaves: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(tuple(np.shape(leaf)) for leaf in leaves)


def first_four(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
