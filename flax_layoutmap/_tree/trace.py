"""Trace a constructor once: its abstract result, and the program that computes it.

The trace runs without any mesh in context and with Flax's eager sharding off, so that
a constructor that was written for one device, or annotated for another mesh, gives
the same program. Nothing is allocated.
"""

import contextlib
import contextvars
import dataclasses
import itertools
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
    is_nnx_object,
    is_object,
    nnx_split,
    nnx_state,
    no_mesh,
    objects_of,
    restore_eager_flag,
    variables_of,
    was_made_here,
)
from flax_layoutmap._tree.graph import Names, names_of_shared
from flax_layoutmap._tree.objects import (
    adopt,
    has_mixed_keys,
    originals_of,
    reference_error,
    refuse_references,
    settle_constants,
    unfit,
)

_TRACING: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "flax_layoutmap_tracing", default=False
)


# Raised in a trace by a function that reads values.
_READS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def is_tracing_constructor() -> bool:
    return _TRACING.get()


@contextlib.contextmanager
def _tracing() -> Iterator[None]:
    # Leak checks are off: the objects keep traced values until they get arrays.
    token = _TRACING.set(True)
    try:
        with no_mesh(), nnx.use_eager_sharding(False), tracers_without_sharding():
            with jax.disable_jit(False), jax.check_tracer_leaks(False):
                yield
    finally:
        _TRACING.reset(token)


@dataclasses.dataclass(frozen=True)
class Traced:
    """One trace of a constructor.

    `abstract` is the result with `nnx.State` for each NNX object and
    `jax.ShapeDtypeStruct` for each array; other leaves (a string, for example) are
    kept. `names` has the paths of shared Variables. `closed` is the program: inputs →
    leaves of the result, then the new state of the inputs. `rebuild` makes the
    constructor's result from leaves in the order of `abstract`, in the objects that the
    constructor made; a second call returns copies.
    """

    abstract: Any
    names: Names
    closed: ClosedJaxpr
    inputs: tuple[Any, ...]
    rebuild: Callable[[Sequence[Any]], Any]
    _slots: tuple[int | None, ...]
    _input_nodes: Sequence[Any]
    _after: Any

    def values_of(self, leaves: Sequence[Any]) -> list[Any]:
        """Pick the entries of computed leaves, from one per leaf of `abstract`."""
        pairs = zip(leaves, self._slots, strict=True)
        return [leaf for leaf, slot in pairs if slot is not None]

    def leaves_of(self, values: Sequence[Any]) -> list[Any]:
        """All leaves in the order of `abstract`, given the computed ones."""
        pairs = zip(jax.tree.leaves(self.abstract), self._slots, strict=True)
        return [leaf if slot is None else values[slot] for leaf, slot in pairs]

    def update_inputs(self, values: Sequence[Any]) -> None:
        """Write back the new state of NNX arguments, such as an `Rngs` that counted."""
        states = self._after.unflatten(values)
        for node, state in zip(self._input_nodes, states, strict=True):
            # Values only: the metadata of the trace must not reach the caller.
            structure = jax.tree.structure(nnx_state(node))
            nnx.update(node, jax.tree.unflatten(structure, jax.tree.leaves(state)))


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
    everything else is static. If the result contains an object from outside that is
    not an argument, this raises with `own_objects`; otherwise the object is copied.
    """
    nodes, inputs, rebuilt_arguments = _taken_apart((tuple(args), dict(kwargs or {})))
    for node in nodes:
        refuse_references(node)
    eager = nnx.using_eager_sharding()
    results: list[tuple[list[Any], Any, Callable[..., Any], Names]] = []
    after: Any = None

    def program(*values: Any) -> list[Any]:
        nonlocal after
        (new_args, new_kwargs), merged = rebuilt_arguments(values)
        kept = merged if keep_inputs else []
        for node in merged:
            restore_eager_flag(node, False)
        before = [nnx_split(node)[0] for node in kept]
        result = make(*new_args, **new_kwargs)
        made = [x for x in jax.tree.leaves(result, is_leaf=is_object) if is_object(x)]
        for node in made:
            settle_constants(node)
        states, after = jax.tree.flatten(_states_after(kept, before))
        if own_objects:
            _refuse_others(made)
        for node in made:
            restore_eager_flag(node, eager)
        leaves, treedef, rebuilt = _split(result)
        results.append((leaves, treedef, rebuilt, names_of_shared(result)))
        return [*filter(_is_value, leaves), *states]

    with _tracing():
        try:
            closed, shapes = jax.make_jaxpr(program, return_shape=True)(
                *map(_shape_of, inputs)
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
            raise StructureError(
                "the function reads the value of an array, and there is none while "
                f"it is traced: {str(error).splitlines()[0]}\nflm.create(make, "
                "layout_map) and layout_map_scope trace what makes a model: make it "
                "outside of them, and move it: layout_map.place(make())"
            ) from error
    ((leaves, treedef, rebuild, names),) = results
    numbers = itertools.count()
    slots = tuple(next(numbers) if _is_value(leaf) else None for leaf in leaves)
    abstract = [
        leaf if slot is None else shapes[slot]
        for leaf, slot in zip(leaves, slots, strict=True)
    ]
    leaves.clear()  # these are traced values
    return Traced(
        abstract=jax.tree.unflatten(treedef, abstract),
        names=names,
        closed=closed,
        inputs=tuple(inputs),
        rebuild=rebuild,
        _slots=slots,
        _input_nodes=nodes if keep_inputs else (),
        _after=after,
    )


def _taken_apart(arguments: Any) -> tuple[list[Any], list[Any], Callable[..., Any]]:
    """The NNX objects in arguments, each once; all arrays; and a function.

    The function takes new arrays, and returns the arguments with these arrays, and the
    copies of the objects in them.
    """
    slots, treedef = jax.tree.flatten(
        arguments, is_leaf=lambda node: is_nnx_object(node) or has_mixed_keys(node)
    )
    nodes = list({id(slot): slot for slot in slots if is_nnx_object(slot)}.values())
    _refuse_shared(nodes, "arguments", "pass")
    split = [nnx_split(node) for node in nodes]
    arrays = {at: slot for at, slot in enumerate(slots) if _is_array(slot)}
    values, values_def = jax.tree.flatten(([state for _, state in split], arrays))

    def rebuild(values: Sequence[Any]) -> tuple[Any, list[Any]]:
        states, new = values_def.unflatten(values)
        merged = [nnx.merge(split[at][0], state) for at, state in enumerate(states)]
        copy_of = dict(zip(map(id, nodes), merged, strict=True))
        parts = (new.get(at, copy_of.get(id(x), x)) for at, x in enumerate(slots))
        return treedef.unflatten(parts), merged

    return nodes, values, rebuild


def _states_after(nodes: Sequence[Any], before: Sequence[Any]) -> list[Any]:
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
    for part in (part for node in nodes for part in objects_of(node)):
        if not was_made_here(part):
            raise StructureError(
                f"the constructor keeps a {type(part).__name__} that was made outside "
                "of it: pass it as an argument, or make the whole model with "
                "flm.create(make, layout_map)"
            )


def _split(result: Any) -> tuple[list[Any], Any, Callable[[Sequence[Any]], Any]]:
    """The leaves of a result, their treedef, and a function that rebuilds the result.

    The function takes new leaves. Its first call returns the same objects.
    """
    parts, graph_treedef = jax.tree.flatten(result, is_leaf=is_nnx_object)
    _refuse_shared(list(filter(is_nnx_object, parts)), "result", "return")
    split = [nnx_split(x) if is_nnx_object(x) else (None, x) for x in parts]
    graphdefs = [graphdef for graphdef, _ in split]
    originals: list[Any] = [
        originals_of(x) if is_nnx_object(x) else None for x in parts
    ]
    leaves, treedef = jax.tree.flatten(
        jax.tree.unflatten(graph_treedef, [state for _, state in split])
    )

    def rebuild(leaves: Sequence[Any]) -> Any:
        parts = graph_treedef.flatten_up_to(jax.tree.unflatten(treedef, leaves))
        for at, graphdef in enumerate(graphdefs):
            if graphdef is not None:
                parts[at] = nnx.merge(graphdef, parts[at])
                if originals:
                    parts[at] = adopt(originals[at], parts[at])
        originals.clear()  # do not keep the result alive
        return jax.tree.unflatten(graph_treedef, parts)

    return leaves, treedef, rebuild


def _refuse_shared(nodes: Sequence[Any], of_what: str, verb: str) -> None:
    """Raise if objects share a Variable: each would get a copy of it."""
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
        return False  # the function itself has traced something
    return isinstance(leaf, bool | int | float | complex) or _is_array(leaf)


def _shape_of(value: Any) -> Any:
    if isinstance(value, Tracer):
        return value
    return jax.ShapeDtypeStruct(value.shape, value.dtype)
