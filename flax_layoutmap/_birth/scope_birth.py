"""Constructors traced in a `layout_map_scope`, and placeholders for their values."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from flax_layoutmap._birth.slices import arrays_of
from flax_layoutmap._core.errors import StructureError
from flax_layoutmap._core.mesh import spread
from flax_layoutmap._tree.flax_internals import is_nnx_object, nnx_state, objects_of
from flax_layoutmap._tree.objects import objects_in
from flax_layoutmap._tree.trace import is_of_arrays, trace


class NoValueYet(StructureError, AttributeError):
    """A StructureError for which `hasattr` is false."""


@dataclasses.dataclass(eq=False)
class BlockState:
    """The state of a `layout_map_scope` block, for its placeholders."""

    stage: Literal["open", "ending", "ended", "failed"] = "open"


class _NoSharding(jax.sharding.Sharding):
    """The sharding of a placeholder: reading anything from it raises StructureError.

    `jax.eval_shape` takes the sharding of an argument along without reading it.
    `jnp.zeros_like`, which needs no value and would make a full copy, and `jax.jit`
    read it.
    """

    def __init__(self, of: "AfterTheScope") -> None:
        self._of = of

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") or name == "_of":
            return super().__getattribute__(name)
        raise StructureError(self._of.why_not())

    def __repr__(self) -> str:
        return "the sharding of a value of a layout_map_scope"


class AfterTheScope(jax.ShapeDtypeStruct):
    """The placeholder of a value that is made when its block ends: shape and dtype.

    Whatever needs the value raises StructureError with a fix.
    """

    __hash__ = object.__hash__

    def __init__(self, shape: Any, dtype: Any, block: BlockState) -> None:
        super().__init__(shape, dtype)
        self.block = block

    @property
    def sharding(self) -> Any:
        """None while the block ends and its values are planned; else unreadable."""
        return None if self.block.stage == "ending" else _NoSharding(self)

    # A property, as JAX checks whether it exists.
    @property
    def __jax_array__(self) -> Any:
        raise StructureError(self.why_not())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, jax.Array | np.ndarray | np.generic | int | float):
            raise StructureError(self.why_not())  # it would be one of each element
        return self is other

    def __repr__(self) -> str:
        return f"AfterTheScope(shape={tuple(self.shape)}, dtype={self.dtype.name})"

    __str__ = __repr__

    def __getattr__(self, name: str) -> Any:
        # Called for missing attributes: methods of arrays, such as `mean`. Those of the
        # base class are missing while it is being set up.
        if is_of_arrays(name) and not hasattr(jax.ShapeDtypeStruct, name):
            raise NoValueYet(self.why_not())
        raise AttributeError(f"a value of a layout_map_scope has no {name!r}")

    def why_not(self) -> str:
        """Why there is no value, and the fix."""
        shape = tuple(self.shape)
        if self.block.stage == "open":
            return (
                f"a value {shape} of a model that is made in a layout_map_scope exists "
                "only after the block: compute with it, write into it and copy it "
                "there (variable.set_value(array) replaces it in the block too), or "
                "make the model with flm.create(make, layout_map)"
            )
        if self.block.stage == "failed":
            return (
                f"this value {shape} was never made, because the layout_map_scope "
                "block failed: make the model again"
            )
        return (
            f"this value {shape} was never made: it is that of a copy (nnx.clone, "
            "nnx.state) or of a part that was in no model when the layout_map_scope "
            "block ended, so copy and take out parts after the block"
        )


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


class Together(nnx.Pytree):
    """A new object and the arguments that it may hold, as one graph."""

    def __init__(self, made: Any, inputs: Sequence[Any]) -> None:
        self.made = nnx.data(made)
        self.inputs = nnx.data(list(inputs))


class Birth:
    """A traced constructor, and the placeholders (`leaves`) of its results."""

    def __init__(self, make: Callable[..., Any], args: Any, kw: Any, block: BlockState):
        def both(*args: Any, **kw: Any) -> Any:
            return Together(make(*args, **kw), objects_in((args, kw)))

        traced = self.traced = trace(both, args, kw, own_objects=True)
        shapes = traced.values_of(jax.tree.leaves(traced.abstract))
        self.leaves = [AfterTheScope(leaf.shape, leaf.dtype, block) for leaf in shapes]

    def objects(self) -> Together | None:
        """The new object and the arguments, with placeholders.

        None if they do not hold all of them: a dict of arrays that is no Variable, as
        in `nnx.WeightNorm`, is not data for Flax while it has shapes.
        """
        together = self.traced.rebuild(self.traced.leaves_of(self.leaves))
        seen = set(map(id, jax.tree.leaves(nnx_state(together))))
        return together if all(id(leaf) in seen for leaf in self.leaves) else None

    def at_once(self, mesh: Mesh) -> Together:
        """The new object and the arguments, with their values, sharded over a mesh."""
        wanted = [spread(leaf.shape, mesh) for leaf in self.leaves]
        made, _ = arrays_of(self.traced, wanted)
        return self.traced.rebuild(self.traced.leaves_of(made))

    def settle(self, together: Together, nodes: Sequence[Any]) -> Any:
        """The new object; its arguments advance, as if the constructor had run.

        `together` is from `objects` or `at_once`; `nodes` are the NNX objects among the
        arguments.
        """
        if nodes:
            _, inputs = arrays_of(self.traced, [None] * self.traced.made)
            self.traced.update_inputs(inputs)
            _replace(together.made, together.inputs, nodes)
        return together.made

    def make(
        self,
        shardings: Mapping[int, Any],
        values: Mapping[int, Any] | None = None,
    ) -> dict[int, Any]:
        """Id of a placeholder → its array, for those that have a sharding.

        All mappings are by the id of a placeholder: shardings, names for the log, and
        values of arguments that were placeholders.
        """
        wanted = [shardings.get(id(leaf)) for leaf in self.leaves]
        traced = self.traced
        if values:
            inputs = tuple(values.get(id(x), x) for x in traced.inputs)
            traced = dataclasses.replace(traced, inputs=inputs)
        made, _ = arrays_of(traced, wanted)
        leaves = (leaf for leaf in self.leaves if id(leaf) in shardings)
        return {id(leaf): value for leaf, value in zip(leaves, made, strict=True)}


def _replace(module: Any, copies: Sequence[Any], originals: Sequence[Any]) -> None:
    """Put the arguments themselves where a module holds their copies."""
    own: dict[int, Any] = {}
    for copy, original in zip(copies, originals, strict=True):
        parts = zip(objects_of(copy), objects_of(original), strict=True)
        own.update({id(part): whole for part, whole in parts})
    for node in objects_of(module):
        if id(node) in own or not is_nnx_object(node):
            continue
        for name, value in vars(node).items():
            if id(value) in own:
                vars(node)[name] = own[id(value)]
