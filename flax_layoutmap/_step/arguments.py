"""Split the arguments of a function into arrays, and merge them again.

NNX objects are flattened as by `nnx.split`; everything else is a pytree.
"""

import dataclasses
import functools
import inspect
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding

from flax_layoutmap._core.errors import LayoutError, did_you_mean
from flax_layoutmap._core.fetch import own_sharding
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.flatten import flatten, plain_tree
from flax_layoutmap._tree.graph import Graph, update
from flax_layoutmap._tree.objects import is_object
from flax_layoutmap._tree.paths import Flat, Roots, is_optax_state, is_train_state

# Kinds of parameters.
_ARGS, _KWARGS = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
_EITHER = inspect.Parameter.POSITIONAL_OR_KEYWORD
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, _EITHER)
_BY_KEYWORD = (inspect.Parameter.KEYWORD_ONLY, _EITHER)

# Numbers of Python, which JAX takes as leaves.
NUMBERS = bool | int | float | complex

# ------------------------------------------------------------------- signatures


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """An argument in a call.

    `name` is that of options and messages (`batch`, `args[0]`, or a keyword of
    `**kwargs`), `parameter` the parameter (`args`), `key` the position or the keyword
    by which it is passed.
    """

    name: str
    parameter: str
    key: int | str

    def is_among(self, names: frozenset[str]) -> bool:
        """Whether an option with these names refers to this argument."""
        return self.name in names or self.parameter in names


def slots_of(bound: inspect.BoundArguments) -> list[tuple[Slot, Any]]:
    """The arguments one by one, also those in `*args` and `**kwargs`."""
    parameters = bound.signature.parameters
    names = positional_names(bound.signature)
    slots: list[tuple[Slot, Any]] = []
    for at, value in enumerate(bound.args):
        rest, number = _variadic(parameters, _ARGS), at - len(names)
        name = names[at] if number < 0 else f"{rest}[{number}]"
        slots.append((Slot(name, name if number < 0 else rest, at), value))
    for key, value in bound.kwargs.items():
        name, parameter = key, key
        if key not in parameters or parameters[key].kind not in _BY_KEYWORD:
            parameter = _variadic(parameters, _KWARGS)
            name = f"{parameter}/{key}" if key in parameters else key
        slots.append((Slot(name, parameter, key), value))
    return slots


def call_with(fun: Any, values: Iterable[tuple[Slot, Any]]) -> Any:
    """Call `fun` with the values in their slots; the inverse of `slots_of`."""
    by_key = {slot.key: value for slot, value in values}
    args = [value for key, value in by_key.items() if isinstance(key, int)]
    return fun(*args, **{k: v for k, v in by_key.items() if isinstance(k, str)})


def positional_names(signature: inspect.Signature) -> list[str]:
    """The parameters that can be given by position, in order."""
    return [n for n, p in signature.parameters.items() if p.kind in _BY_POSITION]


def _variadic(parameters: Mapping[str, inspect.Parameter], kind: Any) -> str:
    """The name of `*args` or `**kwargs`; empty if there is none."""
    return next((name for name, p in parameters.items() if p.kind is kind), "")


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
    positional, rest = positional_names(signature), _variadic(parameters, _ARGS)
    for number in [numbers] if isinstance(numbers, int) else numbers:
        if -len(positional) <= number < len(positional):
            listed.append(positional[number])
        elif rest and number >= 0:
            listed.append(f"{rest}[{number - len(positional)}]")
        else:
            raise LayoutError(
                f"{option.replace('names', 'nums')} names argument number {number}, "
                f"but the function has {list(parameters)}"
            )
    for name in [] if _variadic(parameters, _KWARGS) else listed:
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


@dataclasses.dataclass(frozen=True)
class Form:
    """The structure of an argument: everything but its arrays.

    Attributes:
        outer: the structure, with a `Taken` for each NNX object.
        graphdefs: those of the objects.
        is_state: whether the rules lay it out.
        is_donated: whether its buffers may be reused.
        is_given: whether `in_shardings` has its layouts.
        in_objects: per leaf, whether it is in an NNX object.
    """

    slot: Slot
    outer: Any
    graphdefs: tuple[Any, ...]
    is_state: bool
    is_donated: bool
    is_given: bool
    in_objects: tuple[bool, ...] = dataclasses.field(compare=False)

    def rebuild(self, leaves: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The argument with these leaves, and the NNX objects in it."""
        graphdefs, objects = iter(self.graphdefs), list[Any]()

        def merged(node: Any) -> Any:
            if not isinstance(node, Taken):
                return node
            with nnx.merge_context() as merging:
                objects.append(merging.unflatten(next(graphdefs), [*node.values]))
            return objects[-1]

        tree = self.outer.unflatten(leaves)
        if self.graphdefs:
            tree = jax.tree.map(merged, tree, is_leaf=lambda x: isinstance(x, Taken))
        return tree, objects


@dataclasses.dataclass(frozen=True)
class Argument(Form):
    """One argument, taken apart.

    Attributes:
        value: as the caller passed it.
        objects: the outermost NNX objects in it, which are updated in place.
        parts: the Variables in these, and the arrays in no Variable.
        raw: all leaves as the caller has them.
        leaves: all leaves as they are passed to the compiled function: Python numbers
            of a state are arrays, data is placed.
    """

    value: Any
    objects: Sequence[Any]
    parts: Sequence[Any]
    raw: Sequence[Any]
    leaves: Sequence[Any]

    @property
    def form(self) -> Form:
        fields = dataclasses.fields(Form)
        return Form(*(getattr(self, field.name) for field in fields))

    @property
    def name(self) -> str:
        return self.slot.name

    @functools.cached_property
    def treedef(self) -> Any:
        """Structure of the plain tree, with an `nnx.State` for each NNX object."""
        if not self.objects:
            return self.outer
        return jax.tree.structure(plain_tree(self.value))

    @property
    def is_container(self) -> bool:
        """Whether it is a tree, not a single array."""
        return not jax.tree_util.treedef_is_leaf(self.treedef)

    @functools.cached_property
    def pins(self) -> tuple[NamedSharding | None, ...]:
        """The shardings of a container of data that the caller put on a mesh.

        A result of the same structure keeps them. Empty for other arguments.
        """
        is_pinned = not self.is_state and self.is_container
        if not is_pinned or not all(map(is_on_mesh, self.raw)):
            return ()
        return tuple(map(own_sharding, self.leaves))

    def key(self) -> Any:
        """The part of a program's cache key."""
        if self.is_state:  # no weak types, and the rules place it
            return self.form, tuple(map(_SHAPE, self.leaves))
        leaves = [_data_key(leaf, self.is_given) for leaf in self.leaves]
        return self.form, tuple(leaves), self.pins

    def as_state(self) -> "Argument":
        """The same, laid out by the rules."""
        leaves = list(map(strong, self.raw))
        return dataclasses.replace(self, is_state=True, leaves=leaves)

    def plain(self, leaves: Sequence[Any] | None = None) -> Any:
        """The tree with an `nnx.State` for each NNX object."""
        return self.treedef.unflatten(self.leaves if leaves is None else leaves)

    def with_objects(self, objects: Iterator[Any]) -> Any:
        """The tree with the next of these NNX objects in place of its own."""
        return jax.tree.map(
            lambda node: next(objects) if is_object(node) else node,
            self.value,
            is_leaf=lambda node: is_object(node) or isinstance(node, nnx.State),
        )

    def write(self, leaves: Sequence[Any]) -> None:
        """Write leaves that were placed for a program into the objects."""
        if self.objects and not all(map(operator.is_, self.raw, leaves)):
            jax.tree.map(
                lambda node, new: update(node, new) if is_object(node) else None,
                self.value,
                self.plain(leaves),
                is_leaf=is_object,
            )

    def owners(self) -> list[nnx.Variable[Any] | None]:
        """Per leaf, the Variable of an NNX object that holds it."""
        held = iter(Graph(self.objects).owners())
        return [next(held) if inside else None for inside in self.in_objects]

    @functools.cached_property
    def flat(self) -> Flat:
        """Its leaves with their paths; raises StructureError if these are none."""
        return flatten(Roots({self.name: self.value}))

    def path(self, at: int) -> str:
        """Path of a leaf, with the name of the argument first."""
        return self.flat.full_paths()[at]

    def label(self, at: int) -> str:
        """Path and shape of a leaf, for messages."""
        return f"{self.path(at)} {show_shape(np.shape(self.leaves[at]))}"


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of the function, taken apart.

    Attributes:
        slots: all arguments, in the order of the signature.
        static: those that are compile-time constants.
        arguments: the others.
        leaves: the leaves of these.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    rules: RuleSet | None
    slots: Sequence[tuple[Slot, Any]]
    static: Mapping[Slot, Any]
    arguments: Sequence[Argument]
    leaves: Sequence[Any]

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of the rules."""
        return None if self.rules is None else self.rules.mesh

    @property
    def objects(self) -> list[Any]:
        """The outermost NNX objects in the arguments."""
        return [node for argument in self.arguments for node in argument.objects]

    @property
    def parts(self) -> list[Any]:
        """The parts of these."""
        return [part for argument in self.arguments for part in argument.parts]

    def owner(self, at: int) -> tuple[Argument, int]:
        """The argument that has this one of all leaves, and its position there."""
        pairs = zip(self.arguments, spans(self.arguments), strict=True)
        return next((x, at - span.start) for x, span in pairs if at in span)


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


def rebuilt(
    forms: Sequence[Form], leaves: Sequence[Any]
) -> tuple[dict[Slot, Any], list[list[Any]], list[int]]:
    """Arguments of these structures, and what of them is in NNX objects.

    That is, the outermost objects of each, and the positions of the leaves in them.
    """
    rest = iter(leaves)
    made = [f.rebuild(list(itertools.islice(rest, len(f.in_objects)))) for f in forms]
    flags = itertools.chain.from_iterable(form.in_objects for form in forms)
    return (
        {form.slot: value for form, (value, _) in zip(forms, made, strict=True)},
        [objects for _, objects in made],
        [at for at, inside in enumerate(flags) if inside],
    )


def take_apart(
    slot: Slot,
    value: Any,
    *,
    is_state: bool,
    is_donated: bool,
    is_given: bool = False,
) -> Argument:
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
        graphs = {at: Graph([x]) for at, x in enumerate(nodes) if is_object(x)}
        taken = {at: Taken(graph.values) for at, graph in graphs.items()}
        inner = [taken.get(at, node) for at, node in enumerate(nodes)]
        raw, outer = jax.tree.flatten(outer.unflatten(inner) if graphs else value)
    except (TypeError, ValueError):
        flatten(Roots({slot.name: value}))  # names the node that JAX refuses
        raise
    counts = [len(jax.tree.leaves(node)) for node in inner] if graphs else [len(raw)]
    inside = [at in graphs for at, count in enumerate(counts) for _ in range(count)]
    defs = tuple(graph.graphdefs[0] for graph in graphs.values())
    leaves = list(map(strong, raw)) if is_state else raw
    argument = Argument(
        *(slot, outer, defs, is_state, is_donated, is_given, tuple(inside)),
        value=value,
        objects=[nodes[at] for at in graphs],
        parts=[part for graph in graphs.values() for part in graph.parts],
        raw=raw,
        leaves=leaves,
    )
    for at, leaf in enumerate(leaves):
        if not isinstance(leaf, jax.Array) and (problem := no_array(leaf)):
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


_SHAPE = operator.attrgetter("shape", "dtype")


def _data_key(leaf: Any, is_given: bool) -> Any:
    """What a leaf of data is to a program, and where it is unless that is given."""
    if isinstance(leaf, NUMBERS):
        return type(leaf)
    dtype, place = leaf.dtype, getattr(leaf, "sharding", None)
    if isinstance(leaf, np.ndarray | np.generic):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    elif isinstance(leaf, Tracer):  # whose type may say so
        place = jax.typeof(leaf)
    weak = getattr(leaf, "weak_type", False)
    return leaf.shape, dtype, weak, None if is_given else place


def shape_key(leaves: Iterable[Any]) -> tuple[Any, ...]:
    """The shapes of leaves, to compare."""
    return tuple(tuple(np.shape(leaf)) for leaf in leaves)


def first_four(names: Sequence[str]) -> str:
    """The first four names, and how many more there are."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
