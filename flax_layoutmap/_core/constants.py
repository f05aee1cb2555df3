"""Compare the constants of a traced function, such as static attributes, by value.

A hashable one is compared by Python's own hash and `==`. Any other (a list, a dict, a
dataclass) may change in place, so its contents are recorded and compared.
"""

import types
from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax import nnx

_NUMBERS = (bool, int, float, complex)
_BY_IDENTITY = (jax.Array, nnx.Pytree, nnx.Variable)
_STATIC = nnx.graph.Static


class Uncomparable(TypeError):
    """A constant can neither be hashed nor taken apart. `args`: the constant."""


def is_hashable(value: Any) -> bool:
    """Whether a value has a usable hash and `==`.

    A method counts as the object that it is bound to.
    """
    if type(value) is tuple:
        return all(map(is_hashable, value))
    if isinstance(value, types.MethodType):
        return is_hashable(value.__self__)
    if isinstance(value, _STATIC):
        return is_hashable(value.value)
    try:
        hash(value)
    except TypeError:
        return False
    if isinstance(value, nnx.GraphDef):
        return all(is_hashable(attribute) for _, attribute in value.attributes)
    return True


def comparable(value: Any) -> Any:
    """The value if it can be hashed, else `contents` of it."""
    return value if is_hashable(value) else contents(value)


def contents(value: Any) -> Any:
    """What a value holds, hashable: equal for values that hold the same.

    Parts that can be hashed are compared as Python does it, numbers with their types;
    arrays of JAX and NNX objects by identity; all else part by part, as `copy.copy`
    would copy it.

    Raises:
        Uncomparable: a part can be neither hashed nor copied.
    """
    return _Reader().read(value)


class _Same:
    """Equal to what holds the very same object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class _Reader:
    """Reads one value, which may refer to itself."""

    def __init__(self) -> None:
        # id → number, and the value, which keeps its id while it is read.
        self.seen: dict[int, tuple[int, Any]] = {}

    def read(self, value: Any) -> Any:
        kind = type(value)
        if kind is str or value is None:
            return value
        if kind in _NUMBERS:
            return kind, repr(value)
        if kind not in _CONTAINERS:
            if isinstance(value, _BY_IDENTITY):
                return _Same(value)
            if is_hashable(value):
                return kind, value
        if id(value) in self.seen:
            return kind, self.seen[id(value)][0]
        self.seen[id(value)] = len(self.seen), value
        return kind, tuple(map(self.read, _parts(value)))


def _parts(value: Any) -> Iterable[Any]:
    """The parts of a value; those that can change are its own, not copies."""
    take_apart = _CONTAINERS.get(type(value))
    if take_apart is not None:
        return take_apart(value)
    try:
        made = value.__reduce_ex__(4)
    except TypeError as error:
        raise Uncomparable(value) from error
    if isinstance(made, str):
        return (made,)
    # The items of lists and of dicts come as iterators.
    return [*made[:3], *(tuple(items or ()) for items in made[3:5])]


# Types that are taken apart here, and how: quickly, or as they cannot be copied.
_CONTAINERS: dict[type, Callable[[Any], Iterable[Any]]] = {
    tuple: iter,
    list: iter,
    set: iter,
    dict: lambda value: tuple(value.items()),
    types.MappingProxyType: lambda value: tuple(value.items()),
    types.MethodType: lambda value: (value.__func__, value.__self__),
    jax.tree_util.PyTreeDef: lambda value: (value.node_data(), *value.children()),
}
