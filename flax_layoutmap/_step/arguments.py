"""The arguments of a function, taken apart into arrays and put together again.

NNX objects are split into GraphDef and State; everything else is a pytree.
"""

import dataclasses
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding

from flax_layoutmap._core.constants import Uncomparable, comparable
from flax_layoutmap._core.errors import (
    LayoutError,
    StructureError,
    did_you_mean,
)
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.flax_internals import (
    constants_of,
    is_nnx_object,
    is_plain_variable,
    named_objects_of,
    nnx_split,
)
from flax_layoutmap._tree.graph import holders_of, update
from flax_layoutmap._tree.paths import Roots, is_optax_state, is_train_state

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_NUMBERS = bool | int | float | complex


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """Where an argument stands in a signature.

    Attributes:
        name: as options and messages call it: `batch`, `args[0]`; a keyword in
            `**kwargs` has its own name.
        parameter: the parameter, `args` for `args[0]`.
        key: position or keyword within a variadic parameter, else None.
    """

    name: str
    parameter: str
    key: int | str | None = None


def signature_of(fun: Any) -> inspect.Signature:
    """The signature of a function.

    Raises:
        LayoutError: it is no function, or one that does not tell.
    """
    try:
        return inspect.signature(fun)
    except (TypeError, ValueError) as error:
        raise LayoutError(
            f"jit needs a Python function, got {fun!r}; wrap what is callable in one: "
            "lambda x: …"
        ) from error


def slots_of(bound: inspect.BoundArguments) -> list[tuple[Slot, Any]]:
    """The arguments one by one, those in `*args` and `**kwargs` too."""
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
    """Calls `fun` with the values in their slots; the inverse of `slots_of`."""
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
    """The arguments that an option of jit means, by name and by position.

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


@dataclasses.dataclass(slots=True)
class Argument:
    """One argument, taken apart.

    Attributes:
        slot: where it stands.
        value: as the caller gave it.
        outer: the structure with NNX objects (and States) as leaves.
        nodes: the leaves of `outer`.
        graphdefs: GraphDef of each node, None for what is no NNX object.
        raw: all leaves as they are.
        leaves: all leaves; Python numbers of a state are arrays here.
        treedef: structure of the plain tree, `nnx.State` for each NNX object.
        is_state: whether the rules lay it out.
        is_donated: whether its buffers may be reused.
        pins: of a container of data that is on the mesh, where its leaves are; a result
            of the same structure stays there.
    """

    slot: Slot
    value: Any
    outer: Any
    nodes: list[Any]
    graphdefs: tuple[Any, ...]
    raw: list[Any]
    leaves: list[Any]
    treedef: Any
    is_state: bool
    is_donated: bool
    pins: tuple[NamedSharding, ...] = ()

    @property
    def name(self) -> str:
        """The name of its slot."""
        return self.slot.name

    @property
    def has_objects(self) -> bool:
        """Whether NNX objects are inside, which are updated in place."""
        return any(graphdef is not None for graphdef in self.graphdefs)

    def key(self) -> Any:
        """What a compiled program depends on; equal keys share one."""
        # State is put where the rules say, so it does not matter where it is.
        avals = tuple(_aval_key(leaf, not self.is_state) for leaf in self.leaves)
        return self.slot, self.outer, self.graphdefs, self.treedef, avals, self.pins

    @property
    def is_container(self) -> bool:
        """Whether it is a tree, not a single array."""
        return not jax.tree_util.treedef_is_leaf(self.treedef)

    def make_state(self) -> None:
        """Says that the rules lay it out."""
        self.is_state = True
        self.leaves = [strong(leaf) for leaf in self.raw]

    def plain(self, leaves: Sequence[Any] | None = None) -> Any:
        """The tree with `nnx.State` for each NNX object."""
        return jax.tree.unflatten(
            self.treedef, self.leaves if leaves is None else leaves
        )

    def parts(self, leaves: Sequence[Any]) -> list[Any]:
        """One part of the plain tree for each node."""
        return self.outer.flatten_up_to(self.plain(leaves))

    def rebuild(self, leaves: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The argument again, from leaves; and its nodes."""
        merged = [
            part if graphdef is None else nnx.merge(graphdef, part)
            for graphdef, part in zip(self.graphdefs, self.parts(leaves), strict=True)
        ]
        return jax.tree.unflatten(self.outer, merged), merged

    @property
    def objects(self) -> list[Any]:
        """The outermost NNX objects in it."""
        return self.among_objects(self.nodes)

    def among_objects(self, entries: Iterable[Any]) -> list[Any]:
        """Of entries that go with the nodes, those of NNX objects."""
        pairs = zip(entries, self.graphdefs, strict=True)
        return [entry for entry, graphdef in pairs if graphdef is not None]

    def holders(self) -> list[tuple[Any, int] | None]:
        """Per leaf, the Variable of an NNX object that it is in, as `holders_of`."""
        found: list[tuple[Any, int] | None] = []
        for node, graphdef in zip(self.nodes, self.graphdefs, strict=True):
            if graphdef is None:
                found += [None] * len(jax.tree.leaves(node))
            else:
                found += holders_of(nnx_split(node)[1])
        return found

    def with_objects(self, nodes: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The argument with other NNX objects, off a list; and the rest of the list."""
        rest = list(nodes)
        entries = [
            node if graphdef is None else rest.pop(0)
            for node, graphdef in zip(self.nodes, self.graphdefs, strict=True)
        ]
        return jax.tree.unflatten(self.outer, entries), rest

    def write_back(self, new: Mapping[int, Any]) -> None:
        """Gives the caller's own NNX objects new leaves, by position."""
        parts = [
            node if graphdef is None else nnx_split(node)[1]
            for node, graphdef in zip(self.nodes, self.graphdefs, strict=True)
        ]
        leaves = jax.tree.leaves(jax.tree.unflatten(self.outer, parts))
        for at, leaf in new.items():
            leaves[at] = leaf
        for node, part in zip(
            self.objects, self.among_objects(self.parts(leaves)), strict=True
        ):
            update(node, part)

    def pure_leaves(self) -> list[bool]:
        """Per leaf: whether it is outside of every NNX object."""
        pure: list[bool] = []
        for graphdef, part in zip(
            self.graphdefs, self.parts(range(len(self.leaves))), strict=True
        ):
            pure.extend([graphdef is None] * len(jax.tree.leaves(part)))
        return pure

    def path(self, at: int) -> str:
        """Path of a leaf, with the name of the argument first."""
        return flatten(Roots({self.name: self.value})).full_paths()[at]


def take_apart(slot: Slot, value: Any, *, is_state: bool, is_donated: bool) -> Argument:
    """Takes an argument apart.

    It is state if it is said to be, or holds an NNX object, an `nnx.State`, a
    TrainState or an optax state.

    Raises:
        LayoutError: a leaf is neither an array nor a number.
        StructureError: the argument is no tree to JAX.
    """

    def stops(node: Any) -> bool:
        nonlocal is_state
        stop = _is_object(node) or isinstance(node, nnx.State)
        is_state = is_state or stop or is_train_state(node) or is_optax_state(node)
        return stop

    try:
        nodes, outer = jax.tree.flatten(value, is_leaf=stops)
    except (TypeError, ValueError):
        flatten(Roots({slot.name: value}))  # says where and why
        raise
    split = [nnx_split(node) if _is_object(node) else (None, node) for node in nodes]
    parts = [part for _, part in split]
    raw, treedef = jax.tree.flatten(jax.tree.unflatten(outer, parts))
    leaves = [strong(leaf) for leaf in raw] if is_state else list(raw)
    argument = Argument(
        slot,
        value,
        outer,
        nodes,
        tuple(graphdef for graphdef, _ in split),
        raw,
        leaves,
        treedef,
        is_state,
        is_donated,
    )
    _check_leaves(argument)
    return argument


def _is_object(node: Any) -> bool:
    return is_nnx_object(node) or isinstance(node, nnx.Variable)


def _check_leaves(argument: Argument) -> None:
    for at, leaf in enumerate(argument.leaves):
        problem = no_array(leaf)
        if problem:
            raise LayoutError(
                f"{argument.path(at)} is neither an array nor a number, but the "
                f"{problem}: take it out of the argument, or name a whole (hashable) "
                "argument in static_argnames"
            )


def no_array(leaf: Any) -> str:
    """What a leaf is, if it is neither an array that JAX takes nor a number; or ''."""
    if isinstance(leaf, np.ndarray | np.generic):
        return f"array of {leaf.dtype}" if leaf.dtype.kind in "OSUMm" else ""
    if hasattr(leaf, "dtype") or isinstance(leaf, _NUMBERS):
        return ""
    return f"{type(leaf).__name__} {leaf!r}"


def strong(leaf: Any) -> Any:
    """A number in a state as an array, so that the next call looks the same.

    Also takes off JAX's weak type, which the results of a step would not have.
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
    sharding = getattr(leaf, "sharding", None) if with_sharding else None
    explicit = isinstance(sharding, NamedSharding) and any(
        kind is AxisType.Explicit for kind in sharding.mesh.axis_types
    )
    weak = getattr(leaf, "weak_type", False)
    return leaf.shape, dtype, weak, sharding if explicit else None


def check_not_shared(arguments: Sequence[Argument]) -> None:
    """Raises StructureError where two NNX objects share a Variable.

    They would come apart, as each is rebuilt on its own.
    """
    seen: set[int] = set()
    count = 0
    for argument in arguments:
        if argument.has_objects:
            seen.update(map(id, argument.raw))
            count += len(argument.raw)
    # A shared Variable shows as a leaf that comes twice; this is much less work.
    if len(seen) < count:
        check_apart(arguments, [a.objects for a in arguments], nnx.Variable)


def check_plain(arguments: Sequence[Argument]) -> None:
    """Raises StructureError where a Variable holds no value, but a reference to one."""
    for argument in arguments:
        for node in argument.objects:
            for path, part in named_objects_of(node):
                if isinstance(part, nnx.Variable) and not is_plain_variable(part):
                    where = "/".join((argument.name, *map(str, path)))
                    raise StructureError(
                        f"{where} is a {type(part).__name__} with ref or hijax, which "
                        "changes in place by itself: make it without, or use nnx.jit"
                    )


def refuse_integers(arguments: Sequence[Argument], name: str, cause: Exception) -> None:
    """Raises StructureError where JAX was asked for gradients of integers.

    Args:
        arguments: in which Params, and leaves of other states, are looked at.
        name: the function's name.
        cause: what JAX has raised.
    """
    if "requires real- or complex-valued inputs" not in str(cause):
        return
    found = [
        f"{argument.path(at)} {tuple(np.shape(leaf))} {leaf.dtype}"
        for argument in arguments
        if argument.is_state
        for at, (leaf, holder) in enumerate(
            zip(argument.leaves, argument.holders(), strict=True)
        )
        if (holder is None or isinstance(holder[0], nnx.Param))
        and not jax.numpy.issubdtype(leaf.dtype, np.inexact)
    ]
    if found:
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        raise StructureError(
            f"{name} differentiates what is no real or complex number: "
            f"{', '.join(found[:4])}{more}; keep it in an nnx.Variable that is no "
            "nnx.Param, or out of the tree that is differentiated"
        ) from cause


def refuse_constants(arguments: Sequence[Argument], cause: Exception) -> None:
    """Raises StructureError for a constant in NNX objects that cannot be compared."""
    for argument in arguments:
        for node in argument.objects:
            for path, part in named_objects_of(node):
                for name, value in constants_of(part).items():
                    try:
                        comparable(value)
                    except Uncomparable as error:
                        where = "/".join((argument.name, *map(str, path), name))
                        kind = type(error.args[0]).__name__
                        raise StructureError(
                            f"{where} is or holds a {kind}, which Python can neither "
                            "hash nor copy, so no call could tell whether it changed: "
                            f"give {kind} a __hash__, or keep it outside of the model"
                        ) from cause


def check_apart(
    arguments: Sequence[Argument], nodes: Sequence[Sequence[Any]], kinds: Any
) -> None:
    """Raises StructureError where NNX objects have a part in common.

    Args:
        arguments: the arguments.
        nodes: of each, its NNX objects, or what the function made of them.
        kinds: types of the parts that count.
    """
    owners: dict[int, tuple[int, str]] = {}
    number = 0
    for argument, own in zip(arguments, nodes, strict=True):
        for at, node in enumerate(own):
            here = argument.name + (f" (object {at + 1})" if len(own) > 1 else "")
            number += 1
            for path, part in named_objects_of(node):
                if not isinstance(part, kinds):
                    continue
                full = "/".join((here, *map(str, path)))
                first, other = owners.setdefault(id(part), (number, full))
                if first != number:
                    raise StructureError(
                        f"{other} and {full} are one {type(part).__name__}: pass one "
                        "object that holds both, so that they stay shared"
                    )


def shape_key(leaves: Iterable[Any]) -> tuple[Any, ...]:
    """The shapes of leaves, to compare."""
    return tuple(tuple(np.shape(leaf)) for leaf in leaves)


def static_key(values: Mapping[Slot, Any]) -> tuple[Any, ...]:
    """The static arguments as part of a key.

    Raises:
        LayoutError: one cannot be hashed.
    """
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
