"""Split the arguments of a function into arrays, and merge them again.

NNX objects are flattened as by `nnx.split`; everything else is a pytree.
"""

import dataclasses
import functools
import inspect
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
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.flatten import flatten, plain_tree
from flax_layoutmap._tree.graph import Graph
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


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """The structure of an argument: everything but its arrays.

    Attributes:
        outer: the structure; where there are NNX objects, these are leaves.
        nodes: per leaf of `outer`, the GraphDef of an NNX object or None, and the
            structure of the values in it. Empty if there are no objects.
        is_state: whether the rules lay it out.
        is_donated: whether its buffers may be reused.
        is_given: whether `in_shardings` has its layouts.
    """

    slot: Slot
    outer: Any
    nodes: tuple[tuple[Any, Any], ...]
    is_state: bool
    is_donated: bool
    is_given: bool = False

    def rebuild(self, leaves: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The argument with these leaves, and the NNX objects in it."""
        if not self.nodes:
            return self.outer.unflatten(leaves), []
        rest = iter(leaves)
        nodes: list[Any] = []
        objects: list[Any] = []
        for graphdef, treedef in self.nodes:
            node = treedef.unflatten([next(rest) for _ in range(treedef.num_leaves)])
            if graphdef is not None:
                with nnx.merge_context() as merging:
                    node = merging.unflatten(graphdef, node)
                objects.append(node)
            nodes.append(node)
        return self.outer.unflatten(nodes), objects

    def values(self, leaves: Sequence[Any]) -> list[Any]:
        """The values of all parts of its NNX objects."""
        rest = iter(leaves)
        values: list[Any] = []
        for graphdef, treedef in self.nodes:
            node = treedef.unflatten([next(rest) for _ in range(treedef.num_leaves)])
            values += [] if graphdef is None else node
        return values

    def in_objects(self) -> list[bool]:
        """Per leaf, whether it is in an NNX object."""
        if not self.nodes:
            return [False] * self.outer.num_leaves
        return [g is not None for g, t in self.nodes for _ in range(t.num_leaves)]


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument, taken apart.

    Attributes:
        value: as the caller passed it.
        objects: the outermost NNX objects in it.
        parts: the Variables in these, and the arrays in no Variable.
        raw: all leaves as the caller has them.
        leaves: all leaves as they are passed to the compiled function: Python numbers
            of a state are arrays, data is placed.
    """

    form: Form
    value: Any
    objects: Sequence[Any]
    parts: Sequence[Any]
    raw: Sequence[Any]
    leaves: Sequence[Any]

    @property
    def slot(self) -> Slot:
        return self.form.slot

    @property
    def name(self) -> str:
        return self.form.slot.name

    @property
    def is_state(self) -> bool:
        return self.form.is_state

    @property
    def is_donated(self) -> bool:
        return self.form.is_donated

    @property
    def has_objects(self) -> bool:
        """Whether NNX objects are inside, which are updated in place."""
        return bool(self.objects)

    @functools.cached_property
    def treedef(self) -> Any:
        """Structure of the plain tree, with an `nnx.State` for each NNX object."""
        if not self.form.nodes:
            return self.form.outer
        return jax.tree.structure(plain_tree(self.value))

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
        shardings = map(own_sharding, self.leaves)
        return tuple(sharding for sharding in shardings if sharding is not None)

    def key(self) -> Any:
        """The part of a program's cache key."""
        if self.is_state:  # no weak types, and the rules place it
            return self.form, tuple(map(_SHAPE, self.leaves))
        avals = tuple(map(_aval_key, self.leaves))
        if self.form.is_given:
            return self.form, avals
        return self.form, avals, tuple(map(_placement, self.leaves)), self.pins

    def as_state(self) -> "Argument":
        """The same, laid out by the rules."""
        form = dataclasses.replace(self.form, is_state=True)
        leaves = list(map(strong, self.raw))
        return dataclasses.replace(self, form=form, leaves=leaves)

    def with_leaves(self, leaves: Sequence[Any]) -> "Argument":
        """The same with other leaves for the program."""
        return dataclasses.replace(self, leaves=leaves)

    def plain(self, leaves: Sequence[Any] | None = None) -> Any:
        """The tree with an `nnx.State` for each NNX object."""
        return jax.tree.unflatten(
            self.treedef, self.leaves if leaves is None else leaves
        )

    def with_objects(self, objects: Iterator[Any]) -> Any:
        """The tree with the next of these NNX objects in place of its own."""
        return jax.tree.map(
            lambda node: next(objects) if is_object(node) else node,
            self.value,
            is_leaf=lambda node: is_object(node) or isinstance(node, nnx.State),
        )

    def owners(self) -> list[nnx.Variable[Any] | None]:
        """Per leaf, the Variable of an NNX object that holds it."""
        held = iter(Graph(self.objects).owners())
        return [next(held) if inside else None for inside in self.form.in_objects()]

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


def named_objects(arguments: Iterable[Argument]) -> list[tuple[str, Any]]:
    """The outermost NNX objects in arguments, with names for messages."""
    return [
        (f"{a.name} (object {at})" if len(a.objects) > 1 else a.name, node)
        for a in arguments
        for at, node in enumerate(a.objects, 1)
    ]


def spans(arguments: Iterable[Argument]) -> list[range]:
    """Per argument, the positions of its leaves among those of all arguments."""
    ranges: list[range] = []
    start = 0
    for argument in arguments:
        ranges.append(range(start, start + len(argument.leaves)))
        start = ranges[-1].stop
    return ranges


def leaves_with_owners(
    arguments: Iterable[Argument],
) -> Iterator[tuple[Argument, int, Any]]:
    """Each leaf of all arguments, with its argument and its position there."""
    for argument in arguments:
        for at, leaf in enumerate(argument.leaves):
            yield argument, at, leaf


def rebuilt(
    forms: Sequence[Form], leaves: Sequence[Any]
) -> tuple[dict[Slot, Any], list[list[Any]], list[int]]:
    """Arguments of these structures, and what of them is in NNX objects.

    That is, the outermost objects of each, and the positions of the leaves in them.
    """
    values: dict[Slot, Any] = {}
    objects: list[list[Any]] = []
    positions: list[int] = []
    start = 0
    for form in forms:
        in_objects = form.in_objects()
        end = start + len(in_objects)
        values[form.slot], nodes = form.rebuild(leaves[start:end])
        objects.append(nodes)
        positions += [start + at for at, inside in enumerate(in_objects) if inside]
        start = end
    return values, objects, positions


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
        raw, outer = jax.tree.flatten(value, is_leaf=stops)
        objects = list(filter(is_object, raw))
        nodes: list[tuple[Any, Any]] = []
        parts: list[Any] = []
        if objects:
            raw, nodes, parts = _split(raw)
        elif is_state:
            raw, outer = jax.tree.flatten(value)
    except (TypeError, ValueError):
        flatten(Roots({slot.name: value}))  # names the node that JAX refuses
        raise
    form = Form(slot, outer, tuple(nodes), is_state, is_donated, is_given)
    leaves = list(map(strong, raw)) if is_state else raw
    argument = Argument(form, value, objects, parts, raw, leaves)
    for at, leaf in enumerate(leaves):
        if not isinstance(leaf, jax.Array) and (problem := no_array(leaf)):
            raise LayoutError(
                f"{argument.path(at)} is neither an array nor a number, but the "
                f"{problem}: take it out of the argument, or name a whole (hashable) "
                "argument in static_argnames"
            )
    return argument


def _split(nodes: Iterable[Any]) -> tuple[list[Any], list[tuple[Any, Any]], list[Any]]:
    """The leaves of nodes, their structures, and the parts of the objects there."""
    leaves: list[Any] = []
    forms: list[tuple[Any, Any]] = []
    parts: list[Any] = []
    for node in nodes:
        if is_object(node):
            graph = Graph([node])
            leaves += graph.leaves
            parts += graph.parts
            forms.append((graph.graphdefs[0], graph.treedef))
        else:
            below, treedef = jax.tree.flatten(node)
            leaves += below
            forms.append((None, treedef))
    return leaves, forms, parts


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


_SHAPE = operator.attrgetter("shape", "dtype")


def _aval_key(leaf: Any) -> Any:
    if isinstance(leaf, _NUMBERS):
        return type(leaf)
    dtype = leaf.dtype
    if isinstance(leaf, np.ndarray | np.generic):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return leaf.shape, dtype, getattr(leaf, "weak_type", False)


def _placement(leaf: Any) -> Any:
    """Where data is; of a tracer its type, which may say so."""
    if isinstance(leaf, Tracer):
        return jax.typeof(leaf)
    return getattr(leaf, "sharding", None)


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
