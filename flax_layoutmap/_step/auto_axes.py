"""Call a module or an optimizer as on Auto axes, in a step on Explicit axes.

On Explicit axes layouts are part of the types of values, and JAX refuses an operation
whose result could lie in several ways; stock layers do not say which. A module whose
output has a rule therefore runs as by `jax.sharding.auto_axes`: what it reads (its
arguments, its Variables, its random keys) loses its Explicit axes, and what it changes
gets them back. Neither is an operation of the compiled program. An optimizer of optax
runs so, too, as its state may lie elsewhere than the parameters.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from flax_layoutmap._place.place import explicit_axes
from flax_layoutmap._tree.cells import cells_of, write_cells
from flax_layoutmap._tree.flax_internals import call_linen_lifted
from flax_layoutmap._tree.objects import is_object, objects_in


def has_explicit_axes() -> bool:
    """Whether the mesh in context has Explicit axes."""
    return bool(explicit_axes(jax.sharding.get_abstract_mesh()))


@contextlib.contextmanager
def on_auto_axes() -> Iterator[None]:
    """In the block, the Explicit axes of the mesh in context are Auto."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    types = dict.fromkeys(explicit_axes(mesh), AxisType.Auto)
    with jax.sharding.use_abstract_mesh(mesh.update_axis_types(types)):
        yield


class Crossing:
    """The values that went into a call on Auto axes, to bring them out again."""

    def __init__(self, is_leaf: Callable[[Any], bool] | None = is_object) -> None:
        self._is_leaf = is_leaf
        # By the id of a value inside: that value, and the one outside.
        self._entered: dict[int, tuple[Any, Any]] = {}

    def enter(self, tree: Any) -> Any:
        """A tree as the call reads it; leaves that are no arrays stay as they are."""
        with on_auto_axes():
            return jax.tree.map(self._enter, tree, is_leaf=self._is_leaf)

    def _enter(self, x: Any) -> Any:
        if not explicit_axes(_mesh_of(x)):
            return x
        inside = jax.sharding.reshard(x, PartitionSpec())
        self._entered[id(inside)] = inside, x
        return inside

    def knows(self, x: Any) -> bool:
        """Whether the call left a value as it was."""
        return id(x) in self._entered

    def leave(self, x: Any, was: Any = None) -> Any:
        """A value after the call: where `was` is, if it has that shape; or replicated.

        What the call left as it was is the value from before.
        """
        if id(x) in self._entered:
            return self._entered[id(x)][1]
        if not is_inside(x):
            return x
        is_like = explicit_axes(_mesh_of(was)) and was.shape == x.shape
        spec = jax.typeof(was).sharding.spec if is_like else PartitionSpec()
        return jax.sharding.reshard(x, spec)

    def leave_tree(self, tree: Any, was: Any) -> Any:
        """The same for a tree, and one from before, by the paths of their leaves."""
        before = dict(jax.tree.leaves_with_path(was, is_leaf=self._is_leaf))
        return jax.tree.map_with_path(
            lambda keys, x: self.leave(x, before.get(keys)), tree, is_leaf=self._is_leaf
        )


def is_inside(x: Any) -> bool:
    """Whether a value has the Auto axes of a call that is over."""
    mesh = _mesh_of(x)
    context: Any = jax.sharding.get_abstract_mesh()
    return bool(mesh.axis_names) and mesh.axis_types != context.axis_types


def _mesh_of(x: Any) -> Any:
    """The mesh in the type of an array, without axes for all else."""
    if is_object(x) or not isinstance(x, jax.Array):
        return jax.sharding.AbstractMesh((), ())
    return jax.typeof(x).sharding.mesh


# Lays out the output of a call, in the step.
_Finish = Callable[[Any, Crossing], Any]


def call_module(
    plain: Callable[..., Any],
    module: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    finish: _Finish,
) -> Any:
    """Call an NNX module on Auto axes.

    Meanwhile the module, and other NNX objects among the arguments, hold the values
    that it reads.
    """
    crossing = Crossing()
    given = [module, *objects_in((args, kwargs))]
    before = {cell: cell.read() for cell in cells_of(given)}
    try:
        write_cells({cell: crossing.enter(value) for cell, value in before.items()})
        args, kwargs = crossing.enter((tuple(args), dict(kwargs)))
        with on_auto_axes():
            output = plain(*args, **kwargs)
        after = {
            cell: crossing.leave_tree(cell.read(), before.get(cell))
            for cell in cells_of([*given, *objects_in(output)])
        }
        write_cells({**before, **after})
    except BaseException:  # an interrupt too leaves the values from before
        write_cells(before)
        raise
    return finish(output, crossing)


def call_linen(
    module: Any, args: Sequence[Any], kwargs: Mapping[str, Any], finish: _Finish
) -> Any:
    """Call a Linen module on Auto axes."""
    crossing = Crossing()

    def call(run: Callable[..., Any], variables: Any, keys: Any) -> tuple[Any, Any]:
        inside = crossing.enter((variables, keys))
        with on_auto_axes():
            output, changed = run(*inside)
        return output, crossing.leave_tree(changed, variables)

    args, kwargs = crossing.enter((tuple(args), dict(kwargs)))
    return finish(call_linen_lifted(call, module, args, kwargs), crossing)


def call_update(plain: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call the `update` of an optimizer of optax on Auto axes.

    Updates lie as the parameters (without them, as the gradients), and the state as
    before.
    """
    crossing = Crossing(is_leaf=None)  # Variables are trees of arrays
    given, named = crossing.enter((args, kwargs))
    with on_auto_axes():
        changed = plain(*given, **named)
    names = ("updates", "state", "params")
    was = dict(zip(names, args, strict=False)) | kwargs
    updates, params = was.get("updates"), was.get("params")
    like = updates if params is None else params
    updates, state = crossing.leave_tree(changed, (like, was.get("state")))
    # By path: what stands between the leaves may differ, such as the type of Variables.
    wanted = dict(jax.tree.leaves_with_path(like))
    updates = jax.tree.map_with_path(
        lambda keys, x: _laid_out_as(x, wanted.get(keys)), updates
    )
    return updates, state


def _laid_out_as(x: Any, like: Any) -> Any:
    """An update in the layout of its parameter: it may be the gradient, unchanged."""
    if not explicit_axes(_mesh_of(x)) or not explicit_axes(_mesh_of(like)):
        return x
    own, wanted = jax.typeof(x).sharding, jax.typeof(like).sharding
    return x if own == wanted else jax.sharding.reshard(x, wanted.spec)
