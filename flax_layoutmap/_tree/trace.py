"""Trace a constructor once: its abstract result, and the program that computes it.

The trace runs without any mesh in context and with Flax's eager sharding off, so that
a constructor that was written for one device, or annotated for another mesh, gives
the same program. Nothing is allocated.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from flax.errors import ImmutableVariableError, TraceContextError
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr

from flax_layoutmap._core.errors import StructureError
from flax_layoutmap._core.jax_internals import tracers_without_sharding
from flax_layoutmap._tree.flax_internals import (
    forget_eager_flag,
    is_nnx_object,
    nnx_split,
    nnx_state,
    no_mesh,
    objects_of,
    restore_eager_flag,
    variables_of,
    was_made_elsewhere,
    without_eager_sharding,
)
from flax_layoutmap._tree.graph import update
from flax_layoutmap._tree.objects import (
    adopt,
    arrays_as_data,
    has_mixed_keys,
    is_object,
    originals_of,
    reference_error,
    refuse_references,
    refuse_traced,
    unfit,
)

_TRACING: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "flax_layoutmap_tracing", default=False
)


# What a function raises in a trace if it reads values.
_READS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


class ReadsValues(StructureError):
    """A function cannot be traced, as it reads values."""


def is_tracing_constructor() -> bool:
    """Whether a constructor is traced here."""
    return _TRACING.get()


@contextlib.contextmanager
def _tracing() -> Iterator[None]:
    """The contexts that a constructor is traced in.

    `jax.disable_jit` and leak checks are off: the objects that a constructor makes keep
    traced values until they get arrays.
    """
    token = _TRACING.set(True)
    try:
        with no_mesh(), without_eager_sharding(), tracers_without_sharding():
            with jax.disable_jit(False), jax.check_tracer_leaks(False):
                yield
    finally:
        _TRACING.reset(token)


@dataclasses.dataclass(frozen=True)
class Traced:
    """One trace of a constructor.

    `abstract` is the result with `nnx.State` for each NNX object and
    `jax.ShapeDtypeStruct` for each array; other leaves (a string, say) are kept.
    `closed` is the program: inputs → leaves of the result, then the new state of the
    inputs.
    """

    abstract: Any
    closed: ClosedJaxpr
    inputs: tuple[Any, ...]
    _slots: tuple[int | None, ...]
    _treedef: Any
    _graphdefs: tuple[Any, ...]
    _graph_treedef: Any
    _input_nodes: Any
    _originals: list[Any]

    @property
    def made(self) -> int:
        """How many outputs of the program are leaves of the result."""
        return sum(slot is not None for slot in self._slots)

    @property
    def updates(self) -> int:
        """How many are the new state of NNX arguments: they come after the leaves."""
        return len(self.closed.jaxpr.outvars) - self.made

    def values_of(self, leaves: Sequence[Any]) -> list[Any]:
        """Of one entry per leaf of `abstract`, those of the computed leaves."""
        return [
            leaf
            for leaf, slot in zip(leaves, self._slots, strict=True)
            if slot is not None
        ]

    def leaves_of(self, values: Sequence[Any]) -> list[Any]:
        """Leaves in the order of `abstract`, from those that were computed."""
        old = jax.tree.leaves(self.abstract)
        return [
            leaf if slot is None else values[slot]
            for leaf, slot in zip(old, self._slots, strict=True)
        ]

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """The constructor's own result, from leaves in the order of `abstract`.

        Its objects are those that the constructor made; a second call returns copies.
        """
        plain = jax.tree.unflatten(self._treedef, leaves)
        outer = self._graph_treedef.flatten_up_to(plain)
        nodes = [
            part if graphdef is None else nnx.merge(graphdef, part)
            for graphdef, part in zip(self._graphdefs, outer, strict=True)
        ]
        originals = self._originals.copy()
        self._originals.clear()  # what is made must not be kept alive
        if originals:
            nodes = [
                node if graphdef is None else adopt(own, node)
                for graphdef, own, node in zip(
                    self._graphdefs, originals, nodes, strict=True
                )
            ]
        return jax.tree.unflatten(self._graph_treedef, nodes)

    def update_inputs(self, values: Sequence[Any]) -> None:
        """Write the new state of NNX arguments (an `Rngs` that counted) back."""
        if self._input_nodes is not None:
            nodes, treedef = self._input_nodes
            for node, state in zip(nodes, treedef.unflatten(values), strict=True):
                # Values only: the metadata of the trace must not reach the caller.
                own = jax.tree.structure(nnx_state(node))
                update(node, jax.tree.unflatten(own, jax.tree.leaves(state)))


def trace(
    make: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    keep_inputs: bool = True,
    own_objects: bool = False,
) -> Traced:
    """Trace `make(*args, **kwargs)` once, abstractly.

    Arrays among the arguments (`jax.ShapeDtypeStruct` too) and NNX objects are inputs;
    everything else is static. With `own_objects`, a result must not hold an object that
    is neither made by `make` nor an argument; otherwise it gets a copy of it.

    Raises StructureError if objects share a Variable, if `make` changes an object that
    is not an argument or the structure of one that is, or if a static attribute of the
    result keeps a value of the trace.
    """
    given = _Inputs.of(args, kwargs or {})
    for node in given.nodes:
        refuse_references(node)
    eager = nnx.using_eager_sharding()
    seen: dict[str, Any] = {}

    def program(*values: Any) -> list[Any]:
        new_args, new_kwargs, merged = given.rebuild(values)
        kept = merged if keep_inputs else []
        for node in merged:
            forget_eager_flag(node)
        before = [nnx_split(node)[0] for node in kept]
        result = make(*new_args, **new_kwargs)
        own = [node for node in _leaves_of(result) if is_object(node)]
        for node in own:
            arrays_as_data(node, Tracer)
            refuse_traced(node)
        after, seen["after"] = jax.tree.flatten(_states_after(kept, before))
        if own_objects:
            _refuse_others(own)
        for node in own:
            restore_eager_flag(node, eager)
        leaves, seen["treedef"] = jax.tree.flatten(_describe(result, seen))
        seen["leaves"] = leaves
        return [*(leaf for leaf in leaves if _is_value(leaf)), *after]

    with _tracing():
        try:
            closed, shapes = jax.make_jaxpr(program, return_shape=True)(
                *[_shape_of(value) for value in given.values]
            )
        except TraceContextError as error:
            raise StructureError(
                "the function changes an NNX object from outside of it, such as an "
                "nnx.Rngs that counts: make that object inside, or pass it as an "
                f"argument ({error})"
            ) from error
        except ImmutableVariableError as error:
            raise reference_error("hijax") from error
        except _READS_VALUES as error:
            raise ReadsValues(
                "the function reads the value of an array, and there is none while "
                f"it is traced: {str(error).splitlines()[0]}\nflm.create(make, "
                "layout_map) and layout_map_scope trace what makes a model: make it "
                "outside of them, and move it: layout_map.place(make())"
            ) from error
    numbers = iter(range(len(shapes)))
    order = tuple(next(numbers) if _is_value(leaf) else None for leaf in seen["leaves"])
    abstract = [
        leaf if slot is None else shapes[slot]
        for leaf, slot in zip(seen["leaves"], order, strict=True)
    ]
    return Traced(
        abstract=jax.tree.unflatten(seen["treedef"], abstract),
        closed=closed,
        inputs=tuple(given.values),
        _slots=order,
        _treedef=seen["treedef"],
        _graphdefs=seen["graphdefs"],
        _graph_treedef=seen["graph_treedef"],
        _input_nodes=(given.nodes, seen["after"])
        if given.nodes and keep_inputs
        else None,
        _originals=seen["originals"],
    )


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """Arguments, taken apart.

    `slots` are the leaves of the arguments (NNX objects, arrays, static values),
    `nodes` the NNX objects, each once, and `values` the arrays in them and then the
    others.
    """

    slots: list[Any]
    treedef: Any
    nodes: list[Any]
    graphdefs: list[Any]
    values: list[Any]
    values_def: Any

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "_Inputs":
        """Take the arguments of a call apart."""
        slots, treedef = jax.tree.flatten(
            (tuple(args), dict(kwargs)),
            is_leaf=lambda node: is_nnx_object(node) or has_mixed_keys(node),
        )
        nodes = list({id(slot): slot for slot in slots if is_nnx_object(slot)}.values())
        _refuse_shared(nodes, "arguments", "pass")
        split = [nnx_split(node) for node in nodes]
        arrays = [slot for slot in slots if _is_array(slot)]
        values, values_def = jax.tree.flatten(([state for _, state in split], arrays))
        graphdefs = [graphdef for graphdef, _ in split]
        return cls(slots, treedef, nodes, graphdefs, values, values_def)

    def rebuild(self, values: Sequence[Any]) -> tuple[Any, Any, list[Any]]:
        """Arguments, keyword arguments and NNX objects with other values in them."""
        states, arrays = self.values_def.unflatten(values)
        merged = [
            nnx.merge(graphdef, state)
            for graphdef, state in zip(self.graphdefs, states, strict=True)
        ]
        node_of = dict(zip(map(id, self.nodes), merged, strict=True))
        next_array = iter(arrays)
        args, kwargs = self.treedef.unflatten(
            node_of[id(slot)]
            if is_nnx_object(slot)
            else next(next_array)
            if _is_array(slot)
            else slot
            for slot in self.slots
        )
        return args, kwargs, merged


def _states_after(nodes: Sequence[Any], before: Sequence[Any]) -> list[Any]:
    """The states of the arguments after the function has run."""
    states = []
    for node, old in zip(nodes, before, strict=True):
        graphdef, state = nnx_split(node)
        if graphdef != old:
            raise StructureError(
                f"the function changes the structure of its argument, a "
                f"{type(node).__name__}, not only its values: change it outside, or "
                "return it"
            )
        states.append(state)
    return states


def _refuse_others(nodes: Sequence[Any]) -> None:
    """Raise where a result holds what was there before; in the trace."""
    for part in (part for node in nodes for part in objects_of(node)):
        if was_made_elsewhere(part):
            raise StructureError(
                f"the constructor keeps a {type(part).__name__} that was there before: "
                "pass it as an argument, or make the whole model with flm.create(make, "
                "layout_map)"
            )


def _leaves_of(result: Any) -> list[Any]:
    try:
        return jax.tree.leaves(result, is_leaf=is_object)
    except (TypeError, ValueError) as error:
        raise StructureError(
            f"JAX cannot flatten what the function returns: {error}; a dict needs keys "
            "of one type"
        ) from error


def _describe(result: Any, seen: dict[str, Any]) -> Any:
    """Split the NNX objects of a result; keep their GraphDefs in `seen`."""
    nodes, treedef = jax.tree.flatten(result, is_leaf=is_nnx_object)
    _refuse_shared([node for node in nodes if is_nnx_object(node)], "result", "return")
    graphdefs, plain = [], []
    seen["originals"] = [
        originals_of(node) if is_nnx_object(node) else None for node in nodes
    ]
    for node in nodes:
        graphdef, state = nnx_split(node) if is_nnx_object(node) else (None, node)
        graphdefs.append(graphdef)
        plain.append(state)
    seen["graphdefs"], seen["graph_treedef"] = tuple(graphdefs), treedef
    return jax.tree.unflatten(treedef, plain)


def _refuse_shared(nodes: Sequence[Any], of_what: str, verb: str) -> None:
    """Raise where objects share a Variable: split apart, each would have a copy."""
    owners: dict[int, int] = {}
    for number, node in enumerate(nodes):
        for variable in variables_of(node):
            first = owners.setdefault(id(variable), number)
            if first != number:
                raise StructureError(
                    f"two objects of the {of_what}, a {type(nodes[first]).__name__} "
                    f"and a {type(node).__name__}, share a {type(variable).__name__}: "
                    f"{verb} one object that holds both, so that they stay shared"
                )


def _is_array(value: Any) -> bool:
    # An nnx.Rngs has every attribute: a stream.
    if is_nnx_object(value):
        return False
    return hasattr(value, "shape") and hasattr(value, "dtype") and not unfit(value)


def _is_value(leaf: Any) -> bool:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return False  # the function has traced something itself
    is_number = isinstance(leaf, bool | int | float | complex) and not unfit(leaf)
    return is_number or _is_array(leaf)


def _shape_of(value: Any) -> Any:
    if isinstance(value, Tracer):
        return value
    return jax.ShapeDtypeStruct(value.shape, value.dtype)
