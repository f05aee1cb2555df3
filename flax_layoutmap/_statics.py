"""What of an NNX object cannot leave a trace: values in static attributes, for one.

Flax decides what is data when an attribute is set. A traced array is no `jax.Array` for
some versions of it (0.12.8 with jax 0.10.2), so that a table `self.t = jnp.ones(3)`
becomes static, and the tracer stays in the model.
"""

import dataclasses
import functools
import types
from collections.abc import Iterable
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer

from flax_layoutmap._errors import StructureError
from flax_layoutmap._flax_internals import (
    attributes_of,
    is_nnx_object,
    is_plain_variable,
    metadata_of,
    objects_of,
    variables_of,
    was_made_here,
)
from flax_layoutmap._parts import is_object

# What converts Variables, by its name of flax 0.12.5 on, and before.
WITH_VARS = "with_vars" if hasattr(nnx, "with_vars") else "vars_as"


def arrays_as_data(node: Any, kind: type) -> None:
    """Makes static attributes data where an array would be.

    Args:
        node: an NNX object, which is searched as a whole.
        kind: what stands for an array.
    """
    for owner in objects_of(node):
        for name, value in _statics(owner).items():
            if isinstance(value, kind):
                # The class's own __setattr__ may do more than to set.
                nnx.Pytree.__setattr__(owner, name, nnx.data(value))


def refuse_traced(node: Any) -> None:
    """Raises where an NNX object is tied to the trace that it was made in.

    Where a static attribute leads to a value of the trace: a function that holds one
    would go on with it. And where a Variable is a reference.

    Raises:
        StructureError: the first such attribute or Variable.
    """
    made = objects_of(node)
    own = {id(part) for part in made if isinstance(part, nnx.Variable)}
    # These become the result themselves.
    seen = {id(part) for part in made if is_nnx_object(part) and was_made_here(part)}
    refuse_references(node)
    for owner in made:
        for name, value in _statics(owner).items():
            if not _leads_to_traced(value, own, seen):
                continue
            where = f"{type(owner).__name__}.{name}"
            if callable(value):
                raise StructureError(
                    f"{where} is a function that holds a value, or a Variable, as it "
                    "was while the constructor was traced: let it hold its module, or "
                    "set it after the model is made"
                )
            raise StructureError(
                f"{where} is a static {type(value).__name__} with an array in it: set "
                "it as nnx.data(...), or keep the array in an nnx.Variable"
            )


def refuse_references(node: Any) -> None:
    """Raises where a Variable of an NNX object is a reference to its value."""
    for variable in variables_of(node):
        if not is_plain_variable(variable):
            kind = "hijax" if metadata_of(variable).get("hijax") else "ref"
            raise StructureError(
                f"a Variable with {kind}=True is a reference, which cannot be made in "
                "shards: make the model without it, and convert it then: "
                f"nnx.{WITH_VARS}(model, {kind}=True)"
            )


def _statics(owner: Any) -> dict[str, Any]:
    found = attributes_of(owner) if is_nnx_object(owner) else None
    return {} if found is None else found[1]


def _leads_to_traced(value: Any, own: set[int], seen: set[int]) -> bool:
    stack = [value]
    while stack:
        part = stack.pop()
        if id(part) in own or isinstance(part, Tracer):
            return True
        if id(part) in seen:
            continue
        seen.add(id(part))
        if is_object(part):
            values = [v.get_raw_value() for v in variables_of(part)]
            if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(values)):
                return True
        else:
            stack += _parts(part)
    return False


def _parts(value: Any) -> Iterable[Any]:
    """What a function or a container holds; of other things, nothing is known."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, tuple | list | set | frozenset):
        return value
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, types.FunctionType):
        return [*_closure(value), *(value.__defaults__ or ())]
    if isinstance(value, type):
        return ()
    if dataclasses.is_dataclass(value):
        return getattr(value, "__dict__", {}).values()
    # What jax.jit, nnx.jit and functools.wraps have made of a function.
    wrapped = getattr(value, "__wrapped__", None) if callable(value) else None
    return () if wrapped is None else (wrapped,)


def _closure(function: types.FunctionType) -> list[Any]:
    cells: list[Any] = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # not set yet
            continue
    return cells
