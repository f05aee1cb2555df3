"""Private names of Flax that this package uses (0.12.8 to 0.12.12).

- `Variable._raw_value`, `_var_metadata` and `_trace_state`: the slots of a Variable,
  read and written without a call of Python for each Variable in every step.
- `Pytree._pytree__nodes`: which attributes of an object are data.
- `Pytree._pytree__state`: not part of the graph, and renewed by `nnx.jit`; its
  `trace_state` is the level of tracing at which an object was made.
- the metaclass of `nnx.Pytree`, whose `__call__` makes every NNX object: replaced
  inside of a `layout_map_scope`.
- the prefix `_pytree__` of attributes that loops over an `nnx.Dict` or an `nnx.List`
  leave out: the name of a note on a module has it.
- `__call__` of the classes of NNX modules: wrapped while functions with activation
  rules are traced, as NNX has no hook like `linen.intercept_methods`.

Every `graph=True` lists shared Variables once, as the default may change.
`tests/tree/test_flax_internals.py` fails when one of these names moves.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from flax_layoutmap._core.jax_internals import patched

_SLOTS = ("_raw_value", "_trace_state", "_var_metadata")

# For plain Variables (`is_plain_variable`) of this level of tracing.
read_value = vars(nnx.Variable)["_raw_value"].__get__
read_metadata = vars(nnx.Variable)["_var_metadata"].__get__
write_value = vars(nnx.Variable)["_raw_value"].__set__


def metadata_of(variable: nnx.Variable[Any]) -> dict[str, Any]:
    """The metadata of a Variable; do not change it."""
    try:
        return variable._var_metadata
    except AttributeError:  # a class for `hijax=True`
        return variable.get_metadata()


def is_plain_variable(variable: nnx.Variable[Any]) -> bool:
    metadata = metadata_of(variable)
    return not (metadata.get("hijax") or metadata.get("ref"))


def is_bookkeeping(name: Any) -> bool:
    """Whether an attribute of an NNX object is NNX's own."""
    return isinstance(name, str) and name.startswith("_pytree__")


def attributes_of(node: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The data and the static attributes of an NNX object, without its bookkeeping."""
    data: dict[str, Any] = {}
    static: dict[str, Any] = {}
    for name, value in vars(node).items():
        if not is_bookkeeping(name):
            (data if node._pytree__nodes.get(name) else static)[name] = value
    return data, static


def constants_of(node: Any) -> dict[str, Any]:
    """The static attributes of an NNX object; the metadata of a Variable."""
    return (
        metadata_of(node) if isinstance(node, nnx.Variable) else attributes_of(node)[1]
    )


def was_made_here(node: Any) -> bool:
    """Whether an NNX object or a Variable was made at this level of tracing."""
    if isinstance(node, nnx.Variable):
        return bool(node._trace_state.is_valid())
    return bool(node._pytree__state.trace_state.is_valid())


def replace_content(variable: nnx.Variable[Any], other: nnx.Variable[Any]) -> None:
    """Give a Variable the content of another, including its level of tracing."""
    for name in _SLOTS:
        object.__setattr__(variable, name, getattr(other, name))


def is_nnx_object(node: Any) -> bool:
    """Whether a node is an object of the NNX graph: Module, Optimizer, Rngs, …"""
    return _is_nnx_type(type(node))


@functools.lru_cache(maxsize=1024)
def _is_nnx_type(kind: type) -> bool:
    return issubclass(kind, nnx.Pytree)  # slow: its metaclass is in Python


def is_object(node: Any) -> bool:
    return is_nnx_object(node) or isinstance(node, nnx.Variable)


def nnx_state(node: Any, *filters: Any) -> Any:
    """`nnx.state` that lists every shared Variable once."""
    return nnx.state(node, *filters, graph=True)


def nnx_split(node: Any) -> tuple[Any, Any]:
    """`nnx.split` that lists every shared Variable once: GraphDef and State."""
    graphdef, state = nnx.split(node, graph=True)
    return graphdef, state


def variables_of(node: Any) -> list[nnx.Variable[Any]]:
    """The Variables of a graph, each once, in the order of the graph."""
    return [part for part in objects_of(node) if isinstance(part, nnx.Variable)]


def children_of(node: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """The objects and Variables that an NNX object holds, each with its key path."""
    if isinstance(node, nnx.Variable):
        return []
    data, _ = attributes_of(node)
    nodes, _ = jax.tree_util.tree_flatten_with_path(data, is_leaf=is_object)
    return [(keys, child) for keys, child in nodes if is_object(child)]


def objects_of(node: Any) -> list[Any]:
    """The objects and Variables of a graph, each once, in the order of the graph."""
    return [value for _, value in named_objects_of(node)]


def named_objects_of(node: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Like `objects_of`, but each with its path."""
    parts = nnx.iter_graph(node, graph=True)
    return [(path, part) for path, part in parts if is_object(part)]


def restore_eager_flag(node: Any, flag: bool) -> None:
    """Set the eager-sharding flag of Variables that were made without it."""
    for variable in variables_of(node):
        if metadata_of(variable).get("eager_sharding", flag) != flag:
            variable.set_metadata("eager_sharding", flag)


# The class whose `__call__` makes every NNX object.
METACLASS = type(nnx.Pytree)


@contextlib.contextmanager
def no_mesh() -> Iterator[None]:
    """Run without a mesh in context, even inside `jit`, `eval_shape` or a mesh."""
    empty = jax.sharding.AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(empty):
        yield


# ------------------------------------------------------------- calls of modules


_NOTE = "_pytree__flax_layoutmap"


def note_of(module: Any) -> Any:
    return vars(module).get(_NOTE)


def set_note(module: Any, note: Any) -> None:
    """Put a hashable note on an NNX module and its later copies; None removes it.

    It works at any level of tracing, and bypasses the class's own `__setattr__`.
    """
    if note is None:
        vars(module).pop(_NOTE, None)
    else:
        vars(module)[_NOTE] = note


@contextlib.contextmanager
def intercept_calls(wrap: Callable[[type, Any], Any]) -> Iterator[None]:
    """Replace `__call__` of every class of NNX modules by `wrap(class, __call__)`.

    This affects all threads. As for `patched`, `wrap` must not depend on the block.
    """
    with contextlib.ExitStack() as stack:
        for owner in _with_subclasses(nnx.Module):
            if "__call__" in vars(owner):
                own_wrap = functools.partial(wrap, owner)
                stack.enter_context(patched(owner, "__call__", own_wrap))
        yield


def _with_subclasses(cls: type) -> set[type]:
    return {cls}.union(*map(_with_subclasses, cls.__subclasses__()))
