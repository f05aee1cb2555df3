"""What stands for a value in a `layout_map_scope`, until the block ends."""

from typing import Any, Literal, NoReturn

import jax
import numpy as np

from flax_layoutmap._core.errors import StructureError


class NoValueYet(StructureError, AttributeError):
    """A StructureError for which `hasattr` is false."""


class Fate:
    """What has become of the values of one block.

    Attributes:
        block: whether it runs, has made its values, or has failed.
    """

    def __init__(self) -> None:
        self.block: Literal["open", "ended", "failed"] = "open"


class _NoSharding(jax.sharding.Sharding):
    """The sharding of a value that is not there: any question about it is refused.

    `jnp.zeros_like` needs no value, only a shape; but it asks where the value lies,
    and so does `jax.jit`. Without this the one would make a full copy in silence.
    """

    def __init__(self, of: "AfterTheScope") -> None:
        self._of = of

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") or name == "_of":
            return super().__getattribute__(name)
        raise StructureError(self._of.why_not())

    def __repr__(self) -> str:
        return "the sharding of a value that exists only after its layout_map_scope"


class AfterTheScope(jax.ShapeDtypeStruct):
    """A value that is made when the block ends: its shape and dtype.

    Whatever would need the value raises StructureError, and says what to do.

    Attributes:
        fate: what has become of the values of its block.
    """

    __hash__ = object.__hash__

    def __init__(self, shape: Any, dtype: Any, fate: Fate) -> None:
        super().__init__(shape, dtype)
        self.fate = fate

    @property
    def sharding(self) -> Any:
        """Something that is no sharding, and refuses to be asked."""
        return _NoSharding(self)

    @property
    def __jax_array__(self) -> Any:
        # A method would do for `jnp.asarray`; where JAX only looks whether there is
        # one, it has another error of its own.
        raise StructureError(self.why_not())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, jax.Array | np.ndarray | np.generic | int | float):
            raise StructureError(self.why_not())  # it would be one of each element
        return self is other

    def __repr__(self) -> str:
        return f"AfterTheScope(shape={tuple(self.shape)}, dtype={self.dtype.name})"

    __str__ = __repr__

    def __getattr__(self, name: str) -> Any:
        # Asked only for what is not there: methods of arrays, such as `mean`. What the
        # base class has is not there while it is set.
        if is_of_arrays(name) and not hasattr(jax.ShapeDtypeStruct, name):
            raise NoValueYet(self.why_not())
        raise AttributeError(f"a value of a layout_map_scope has no {name!r}")

    def why_not(self) -> str:
        """Why there is no value, and what to do."""
        shape = tuple(self.shape)
        if self.fate.block == "open":
            return (
                f"a value {shape} of a model that is made in a layout_map_scope exists "
                "only after the block: compute with it, write into it and copy it "
                "there (variable.set_value(array) replaces it in the block too)"
            )
        if self.fate.block == "failed":
            return (
                f"this value {shape} was never made, because the layout_map_scope "
                "block failed: make the model again"
            )
        return (
            f"this value {shape} was never made: it is that of a copy (nnx.clone, "
            "nnx.state) or of a part that was in no model when the layout_map_scope "
            "block ended, so copy and take out parts after the block"
        )


# `jax.Array` does not name all that arrays have.
_OF_ARRAYS = (
    "devices",
    "block_until_ready",
    "is_deleted",
    "delete",
    "copy_to_host_async",
    "on_device_size",
)


def is_of_arrays(name: str) -> bool:
    """Whether arrays have an attribute of this name."""
    return (hasattr(jax.Array, name) and not name.startswith("_")) or name in _OF_ARRAYS


def _refuse(self: AfterTheScope, *args: Any, **kwargs: Any) -> NoReturn:
    raise StructureError(self.why_not())


_BINARY = "add sub mul matmul truediv floordiv mod divmod pow and or xor lshift rshift"
_REFUSED = [
    *(prefix + name for name in _BINARY.split() for prefix in ("", "r")),
    *"lt le gt ge neg pos abs invert round".split(),
    *"getitem setitem delitem iter reversed contains len".split(),
    *"bool int float complex index trunc floor ceil format".split(),
    *"array array_ufunc copy deepcopy reduce_ex".split(),
    *"dlpack dlpack_device buffer".split(),
]
for _name in _REFUSED:
    setattr(AfterTheScope, f"__{_name}__", _refuse)
