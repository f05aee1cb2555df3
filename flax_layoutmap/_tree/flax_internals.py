"""Private or moved names of Flax that this package uses (0.12.8 and 0.12.12).

- `Variable._var_metadata`, `_raw_value`: slots, read and written without a call of
  Python for each of hundreds of Variables in every step. Fallback: the public getters
  and setters.
- `Variable._raw_value`, `_var_metadata` and `_trace_state` are all that a Variable
  holds, and are copied where it takes the place of another. Fallback: if there are
  others, the kept Variable is not found, and is a copy.
- `Pytree._pytree__nodes`: which attributes of an object are data.
- `Pytree._pytree__state`: no part of the graph, and renewed by `nnx.jit`; its
  `trace_state` is the level of tracing at which an object was made. Without it, what a
  constructor makes in a trace is a copy of its `self`.
- the metaclass of `nnx.Pytree`, whose `__call__` makes every NNX object, and
  `linen.Module.__post_init__`: replaced inside of a `layout_map_scope`. Fallback:
  `flm.create`, which the error names.
- the prefix `_pytree__` of attributes that loops over an `nnx.Dict` or an `nnx.List`
  leave out: a note on a module has it. Fallback: a name of its own, which they show.
- `__call__` of the classes of NNX modules: wrapped while functions with activation
  rules are traced, as NNX has no hook like `linen.intercept_methods`. Plain Python.
- `graph=True` of `nnx.state`, `nnx.split` and `nnx.iter_graph`: shared Variables once,
  as the default may change.

`tests/tree/test_flax_internals.py` fails when one of them moves.
"""

import contextlib
import functools
import gc
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from flax import nnx

from flax_layoutmap._core.errors import StructureError
from flax_layoutmap._core.patches import patched

# The slots of a Variable, and whether the Flax in use has no others.
_HELD_BY_VARIABLES = ("_raw_value", "_trace_state", "_var_metadata")
_VARIABLES_ARE_KNOWN = _HELD_BY_VARIABLES == tuple(
    sorted(
        name
        for kind in nnx.Variable.__mro__
        for name in vars(kind).get("__slots__", ())
        if not name.startswith("__")
    )
)


def metadata_of(variable: nnx.Variable[Any]) -> dict[str, Any]:
    """The metadata of a Variable; to be read only."""
    try:
        return variable._var_metadata
    except AttributeError:
        return variable.get_metadata()


def _slot(name: str) -> Any:
    """The slot of a Variable, as C reads and writes it; None if it is none."""
    slot = vars(nnx.Variable).get(name)
    return slot if isinstance(slot, types.MemberDescriptorType) else None


_value, _metadata = _slot("_raw_value"), _slot("_var_metadata")

# Only for Variables of this level of tracing that are plain (`is_plain_variable`).
read_value = nnx.Variable.get_raw_value if _value is None else _value.__get__
write_value = nnx.Variable.set_raw_value if _value is None else _value.__set__
read_metadata = metadata_of if _metadata is None else _metadata.__get__


def reader_of(variables: Sequence[Any]) -> Callable[[], tuple[list[Any], list[Any]]]:
    """A function that reads what plain Variables hold, and their metadata.

    From the garbage collector's list of what objects refer to, one call for all.
    """

    def one_by_one() -> tuple[list[Any], list[Any]]:
        return [*map(read_value, variables)], [*map(read_metadata, variables)]

    def at_once() -> tuple[list[Any], list[Any]]:
        held = gc.get_referents(*variables)
        return held[places[0]], held[places[1]]

    held = gc.get_referents(*variables)
    width = len(held) // (len(variables) or 1)
    columns = [slice(at, None, width) for at in range(width)]
    places = [
        column
        for wanted in one_by_one()
        for column in columns
        if [*map(id, held[column])] == [*map(id, wanted)]
    ]
    return at_once if len(places) == 2 else one_by_one


def is_plain_variable(variable: nnx.Variable[Any]) -> bool:
    """Whether a Variable holds its value itself, not in a reference to it."""
    metadata = metadata_of(variable)
    return not (metadata.get("hijax") or metadata.get("ref"))


def is_bookkeeping(name: Any) -> bool:
    """Whether an attribute of an NNX object is NNX's own."""
    return isinstance(name, str) and name.startswith("_pytree__")


def attributes_of(node: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The data and the static attributes of an NNX object; None if it does not tell.

    NNX's own bookkeeping, which changes with them, is left out.
    """
    if not getattr(node, "_pytree__is_pytree", False):
        return None
    is_data = getattr(node, "_pytree__nodes", None)
    if is_data is None:
        return None
    data: dict[str, Any] = {}
    static: dict[str, Any] = {}
    for name, value in vars(node).items():
        if not is_bookkeeping(name):
            (data if is_data.get(name) else static)[name] = value
    return data, static


def constants_of(node: Any) -> dict[str, Any]:
    """The static attributes of an NNX object; the metadata of a Variable."""
    if isinstance(node, nnx.Variable):
        return metadata_of(node)
    attributes = attributes_of(node)
    return {} if attributes is None else attributes[1]


def _level_of(node: Any) -> Any:
    """The level of tracing that an NNX object or a Variable belongs to."""
    if isinstance(node, nnx.Variable):
        return node._trace_state if _VARIABLES_ARE_KNOWN else None
    return getattr(vars(node).get("_pytree__state"), "trace_state", None)


def was_made_here(node: Any) -> bool:
    """Whether an object was made at this level of tracing; False if unknown."""
    level = _level_of(node)
    return level is not None and bool(level.is_valid())


def was_made_elsewhere(node: Any) -> bool:
    """Whether an object was made at another level of tracing; False if unknown."""
    level = _level_of(node)
    return level is not None and not level.is_valid()


def replace_content(variable: nnx.Variable[Any], other: nnx.Variable[Any]) -> None:
    """Give a Variable all that another one holds, its level of tracing too."""
    for name in _HELD_BY_VARIABLES:
        object.__setattr__(variable, name, getattr(other, name))


def is_nnx_object(node: Any) -> bool:
    """Whether a node is an object of the NNX graph: Module, Optimizer, Rngs, …"""
    return _is_nnx_type(type(node))


@functools.lru_cache(maxsize=1024)
def _is_nnx_type(kind: type) -> bool:
    return issubclass(kind, nnx.Pytree)  # slow, as its metaclass is in Python


def nnx_state(node: Any, *filters: Any) -> Any:
    """`nnx.state` with every shared Variable once."""
    return nnx.state(node, *filters, graph=True)


def nnx_split(node: Any) -> tuple[Any, Any]:
    """`nnx.split` with every shared Variable once: GraphDef and State."""
    graphdef, state = nnx.split(node, graph=True)
    return graphdef, state


def variables_of(node: Any) -> list[nnx.Variable[Any]]:
    """The Variables of a graph, each once, in the order of the graph."""
    return [
        value
        for _, value in nnx.iter_graph(node, graph=True)
        if isinstance(value, nnx.Variable)
    ]


def children_of(node: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """The objects and Variables that an NNX object holds, each with its key path."""
    if isinstance(node, nnx.Variable):
        return []
    attributes = attributes_of(node)
    data = (
        dict(nnx.iter_children(node, graph=True)) if not attributes else attributes[0]
    )
    nodes, _ = jax.tree_util.tree_flatten_with_path(data, is_leaf=_is_graph_node)
    return [(keys, child) for keys, child in nodes if _is_graph_node(child)]


def _is_graph_node(node: Any) -> bool:
    return is_nnx_object(node) or isinstance(node, nnx.Variable)


def objects_of(node: Any) -> list[Any]:
    """The objects and Variables of a graph, each once, in the order of the graph."""
    return [value for _, value in named_objects_of(node)]


def named_objects_of(node: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """The same, each with its path."""
    return [
        (path, value)
        for path, value in nnx.iter_graph(node, graph=True)
        if isinstance(value, nnx.Variable) or is_nnx_object(value)
    ]


@contextlib.contextmanager
def without_eager_sharding() -> Iterator[None]:
    """In the block, constructors record `out_sharding` but shard nothing."""
    with nnx.use_eager_sharding(False):
        yield


def restore_eager_flag(node: Any, flag: bool) -> None:
    """Set the eager-sharding flag of Variables made under `without_eager_sharding`."""
    for variable in variables_of(node):
        if metadata_of(variable).get("eager_sharding", flag) != flag:
            variable.set_metadata("eager_sharding", flag)


def forget_eager_flag(node: Any) -> None:
    """Turn off the eager-sharding flag of Variables, as there is no mesh."""
    for variable in variables_of(node):
        if metadata_of(variable).get("eager_sharding"):
            variable.set_metadata("eager_sharding", False)


def metaclass_of_objects() -> type:
    """The class whose `__call__` makes every NNX object."""
    meta = type(nnx.Pytree)
    if "__call__" in vars(meta) and meta is not type:
        return meta
    raise StructureError(
        "layout_map_scope cannot see the constructors of this version of flax: use "
        "flm.create(lambda: Model(...), layout_map)"
    )


@contextlib.contextmanager
def no_mesh() -> Iterator[None]:
    """No mesh in context, also inside `jit`, `eval_shape` and any mesh context."""
    empty = jax.sharding.AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(empty):
        yield


# ------------------------------------------------------------- calls of modules


def _note_name() -> str:
    probe = nnx.Dict(a=1)
    vars(probe)["_pytree__probe"] = None
    return "_pytree__flax_layoutmap" if list(probe) == ["a"] else "_flax_layoutmap"


_NOTE = _note_name()


def note_of(module: Any) -> Any:
    """The note on an NNX module, or None."""
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

    In all threads; as for `patched`, `wrap` must not depend on the block.
    """
    with contextlib.ExitStack() as stack:
        for owner in _with_subclasses(nnx.Module):
            if "__call__" in vars(owner):
                own_wrap = functools.partial(wrap, owner)
                stack.enter_context(patched(owner, "__call__", own_wrap))
        yield


def _with_subclasses(cls: type) -> set[type]:
    below = {own for child in cls.__subclasses__() for own in _with_subclasses(child)}
    return below | {cls}
