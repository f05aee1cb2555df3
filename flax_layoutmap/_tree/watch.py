"""Keys for constants of NNX objects: static attributes and metadata.

What can be hashed is compared by its own `==`. Lists, dicts, dataclasses and the like,
which may change in place, are compared by what they hold.
"""

import io
import pickle
import types
from typing import Any

import jax
from flax import nnx

_BY_IDENTITY = (jax.Array, nnx.Pytree, nnx.Variable)


class Uncomparable(TypeError):
    """What cannot be compared: a constant, in `args`, or a call as a whole."""


def is_hashable(value: Any) -> bool:
    """Whether a value has a usable hash."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def contents(value: Any) -> Any:
    """A hashable description of a value: equal for values that hold the same.

    Hashable parts are compared by `==` and type; JAX arrays and NNX objects by
    identity; everything else by the parts that `pickle` finds.

    Raises:
        Uncomparable: a part can be neither hashed nor pickled.
    """
    text = io.BytesIO()
    reader = _Reader(text, protocol=4)
    try:
        reader.dump(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise Uncomparable(reader.last) from error
    return text.getvalue(), tuple(reader.parts)


class _Reader(pickle.Pickler):
    """Writes the structure of a value; its hashable parts are collected in `parts`."""

    last: Any = None

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.parts: list[Any] = []

    def persistent_id(self, value: Any) -> int | None:
        if isinstance(value, _BY_IDENTITY):
            # Equal to another method of the very same object, which it keeps alive.
            self.parts.append(types.MethodType(id, value))
        elif type(value) is not tuple and is_hashable(value):
            self.parts.append((type(value), value))
        else:
            self.last = value
            return None
        return len(self.parts)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, jax.tree_util.PyTreeDef):
            return list, ((value.node_data(), value.children()),)
        if isinstance(value, types.MappingProxyType):
            return dict, (dict(value),)
        return NotImplemented
