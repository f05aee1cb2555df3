"""A constructor traced once: what it would make, and how to make it.

The trace runs without any mesh in context and with Flax's eager sharding off, so that
a constructor that was written for one device, or annotated for another mesh, gives
the same program. Nothing is allocated.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from flax_layoutmap._errors import StructureError
from flax_layoutmap._flax_internals import (
    forget_eager_flag,
    is_nnx_object,
    nnx_split,
    no_mesh,
    restore_eager_flag,
    variables_of,
    without_eager_sharding,
)


@dataclasses.dataclass(frozen=True)
class Traced:
    """One trace of a constructor.

    Attributes:
        abstract: the result with `nnx.State` for each NNX object and
            `jax.ShapeDtypeStruct` for each array; leaves that are no arrays (a
            string, say) are kept.
    """

    abstract: Any
    _closed: ClosedJaxpr
    _inputs: tuple[Any, ...]
    _slots: tuple[int | None, ...]
    _treedef: Any
    _graphdefs: tuple[Any, ...]
    _graph_treedef: Any
    _input_nodes: Any

    @property
    def consts(self) -> list[Any]:
        """Arrays that the program reads: inputs, and what it closed over."""
        return [*self._closed.consts, *self._inputs]

    def run(self, consts: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The program: `consts` → leaves of the result, new state of the inputs.

        To be called under `jax.jit`, so that the values are born in their shards.
        """
        count = len(self._closed.consts)
        closed = ClosedJaxpr(self._closed.jaxpr, list(consts[:count]))
        with no_mesh():
            values = jaxpr_as_fun(closed)(*consts[count:])
        made = sum(slot is not None for slot in self._slots)
        return list(values[:made]), list(values[made:])

    def values_of(self, leaves: Sequence[Any]) -> list[Any]:
        """Of one entry per leaf of `abstract`, those of the computed leaves."""
        return [
            leaf
            for leaf, slot in zip(leaves, self._slots, strict=True)
            if slot is not None
        ]

    def leaves_of(self, values: Sequence[Any]) -> list[Any]:
        """Leaves in the order of `abstract`, from the values that `run` gave."""
        old = jax.tree.leaves(self.abstract)
        return [
            leaf if slot is None else values[slot]
            for leaf, slot in zip(old, self._slots, strict=True)
        ]

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """The constructor's own result, from leaves in the order of `abstract`."""
        plain = jax.tree.unflatten(self._treedef, leaves)
        outer = self._graph_treedef.flatten_up_to(plain)
        nodes = [
            part if graphdef is None else _merge(graphdef, part)
            for graphdef, part in zip(self._graphdefs, outer, strict=True)
        ]
        return jax.tree.unflatten(self._graph_treedef, nodes)

    def update_inputs(self, values: Sequence[Any]) -> None:
        """Writes the new state of NNX arguments (an `Rngs` that counted) back."""
        if self._input_nodes is not None:
            from flax import nnx

            nodes, treedef = self._input_nodes
            for node, state in zip(nodes, treedef.unflatten(values), strict=True):
                nnx.update(node, state)


def _merge(graphdef: Any, state: Any) -> Any:
    from flax import nnx

    node = nnx.merge(graphdef, state)
    restore_eager_flag(node)
    return node


def trace(
    make: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    keep_inputs: bool = True,
) -> Traced:
    """Traces `make(*args, **kwargs)` once, abstractly.

    Args:
        make: a function that returns a module, a tree of arrays, or a tree of both.
        args: its arguments. Arrays (`jax.ShapeDtypeStruct` too, where the values do
            not matter) and NNX objects are inputs; everything else is static.
        kwargs: its keyword arguments, likewise.
        keep_inputs: whether the new state of NNX arguments is wanted.

    Raises:
        StructureError: two objects of the result share a Variable.
    """
    from flax import nnx

    given = (tuple(args), dict(kwargs or {}))
    slots, slots_def = jax.tree.flatten(given, is_leaf=is_nnx_object)
    nodes = [slot for slot in slots if is_nnx_object(slot)]
    graphdefs, states = [], []
    for node in nodes:
        graphdef, state = nnx_split(node)
        graphdefs.append(graphdef)
        states.append(state)
    arrays = [slot for slot in slots if _is_array(slot)]
    inputs, inputs_def = jax.tree.flatten((states, arrays))
    seen: dict[str, Any] = {}

    def program(*values: Any) -> list[Any]:
        new_states, new_arrays = inputs_def.unflatten(values)
        merged = [
            nnx.merge(graphdef, state)
            for graphdef, state in zip(graphdefs, new_states, strict=True)
        ]
        next_node, next_array = iter(merged), iter(new_arrays)
        filled = [
            next(next_node)
            if is_nnx_object(slot)
            else next(next_array)
            if _is_array(slot)
            else slot
            for slot in slots
        ]
        new_args, new_kwargs = slots_def.unflatten(filled)
        for node in merged:
            forget_eager_flag(node)
        result = make(*new_args, **new_kwargs)
        plain = _describe(result, seen)
        leaves, seen["treedef"] = jax.tree.flatten(plain)
        seen["leaves"] = leaves
        out = [leaf for leaf in leaves if _is_value(leaf)]
        kept = merged if keep_inputs else []
        after, seen["after"] = jax.tree.flatten([nnx_split(node)[1] for node in kept])
        return [*out, *after]

    with no_mesh(), without_eager_sharding():
        closed, shapes = jax.make_jaxpr(program, return_shape=True)(
            *[_shape_of(value) for value in inputs]
        )
    numbers = iter(range(len(shapes)))
    order = tuple(next(numbers) if _is_value(leaf) else None for leaf in seen["leaves"])
    abstract = [
        leaf if slot is None else shapes[slot]
        for leaf, slot in zip(seen["leaves"], order, strict=True)
    ]
    return Traced(
        abstract=jax.tree.unflatten(seen["treedef"], abstract),
        _closed=closed,
        _inputs=tuple(inputs),
        _slots=order,
        _treedef=seen["treedef"],
        _graphdefs=seen["graphdefs"],
        _graph_treedef=seen["graph_treedef"],
        _input_nodes=(nodes, seen["after"]) if nodes and keep_inputs else None,
    )


def _describe(result: Any, seen: dict[str, Any]) -> Any:
    """Splits the NNX objects of a result; keeps their GraphDefs in `seen`."""
    nodes, treedef = jax.tree.flatten(result, is_leaf=is_nnx_object)
    owners: dict[int, int] = {}
    graphdefs, plain = [], []
    for number, node in enumerate(nodes):
        if not is_nnx_object(node):
            graphdefs.append(None)
            plain.append(node)
            continue
        for variable in variables_of(node):
            if owners.setdefault(id(variable), number) != number:
                raise StructureError(
                    f"two objects of the result ({type(node).__name__} is one) share a "
                    f"{type(variable).__name__}: return one object that holds both, so "
                    "that they stay shared"
                )
        graphdef, state = nnx_split(node)
        graphdefs.append(graphdef)
        plain.append(state)
    seen["graphdefs"], seen["graph_treedef"] = tuple(graphdefs), treedef
    return jax.tree.unflatten(treedef, plain)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_value(leaf: Any) -> bool:
    return _is_array(leaf) or isinstance(leaf, bool | int | float | complex)


def _shape_of(value: Any) -> Any:
    if isinstance(value, Tracer):
        return value
    return jax.ShapeDtypeStruct(value.shape, value.dtype)
