"""The loop over micro-batches of `flm.accumulate`.

On Auto axes the compiler reduces the gradients of every micro-batch. Here the loop runs
for each device of the batch axes by itself, so that its sums stay its own until the
loop has ended.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from flax_layoutmap._core.axes import dim_axes
from flax_layoutmap._core.fetch import is_eager
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._place.place import distribute_tensor, explicit_axes
from flax_layoutmap._place.relayout import relayout
from flax_layoutmap._resolve.resolve import resolve
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._rules.scope import call_split_over
from flax_layoutmap._step.arguments import (
    Argument,
    Slot,
    leaves_with_owners,
    rebuilt,
    spans,
)
from flax_layoutmap._step.changes import Changes, check_keys
from flax_layoutmap._step.rows import folded, is_key
from flax_layoutmap._step.shardings import abstract
from flax_layoutmap._tree.paths import Roots

# Of some leaves of the arguments: position → value.
_Leaves = dict[int, Any]
# Loss, gradients and the rest of a micro-batch, from the arguments.
_Gradient = Callable[[Mapping[Slot, Any]], tuple[Any, list[Any], Any]]


class MicroBatches:
    """The micro-batches of one call.

    Attributes:
        arguments: those that hold arrays.
        rows: the leaves that are split.
        whole: all other arrays; `keys` are the positions of PRNG keys among them.
        states: the name of each argument with state, and its abstract tree.
        wrt: the names of those that are differentiated.
        axes: those over which each device runs a loop of its own.
    """

    def __init__(
        self,
        arguments: Sequence[Argument],
        rows: _Leaves,
        wrt: Sequence[str],
        rules: RuleSet,
        axes: tuple[str, ...] | None,
        steps: int,
    ) -> None:
        """Without `axes`, take the batch axes over which no state is sharded."""
        self.arguments, self.rows, self.wrt = arguments, rows, wrt
        assert rules.mesh is not None
        self.rules, self.mesh, self.steps = rules, rules.mesh, steps
        self.owned = list(leaves_with_owners(arguments))
        self.whole: _Leaves = {
            at: x
            for at, (_, _, x) in enumerate(self.owned)
            if at not in rows and hasattr(x, "shape")  # not a number of Python
        }
        self.keys = [at for at, x in self.whole.items() if is_key(x, self.owned[at][0])]
        self.states = {
            one.name: one.plain([abstract(leaf, None) for leaf in one.leaves])
            for one in arguments
            if one.is_state
        }
        if axes is None:
            found = resolve(Roots(self.states), rules)
            used = {axis for leaf in found for axis in leaf.layout.axis_names}
            axes = tuple(axis for axis in rules.batch if axis not in used)
        # Eagerly, JAX has no shard_map over some of the axes of a mesh.
        self.axes = () if is_eager() else axes

    def run(self, gradient: _Gradient) -> tuple[Any, list[Any], Any]:
        """Loss, gradients and the rest; writes what changed into NNX objects."""
        loop = functools.partial(call_split_over, self.axes, self._loop, gradient)
        if self.axes:
            count = math.prod(self.mesh.axis_sizes[axis] for axis in self.axes)
            layout = TensorLayout((self.axes,), self.mesh)
            device = distribute_tensor(jnp.arange(count), layout)
            rows = {at: self._by_device(x, count) for at, x in self.rows.items()}
            whole = jax.tree.map(self._gathered, self.whole)
            means, counts, aux = self._on_devices(loop)(device, rows, whole)
            means = jax.tree.map(lambda x: x.mean(0), means)
            aux = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), aux)
        else:
            means, counts, aux = loop(0, self.rows, self.whole)
        loss, grads, numbers = means
        loss, grads = self._laid_out((loss, grads), in_loop=False)
        changed = numbers | counts
        for argument, span in zip(self.arguments, spans(self.arguments), strict=True):
            new = {at - span.start: x for at, x in changed.items() if at in span}
            if new:
                argument.write_back(new)
        return loss, grads, aux

    def _by_device(self, x: Any, count: int) -> Any:
        """The rows along each device of the axes, in a new first dim."""
        rest = tuple(axis for axis in self.rules.batch if axis not in self.axes)
        kept = (TensorLayout.MATCH,) * (x.ndim - 1)
        layout = TensorLayout((self.axes, rest, *kept), self.mesh)
        parts = x.reshape(count, len(x) // count, *x.shape[1:])
        return relayout(parts, layout, gradient="output")

    def _gathered(self, x: Any) -> Any:
        """The array, whole along the axes of the loops: Explicit axes require it."""
        dims = [dim_axes(entry) for entry in jax.typeof(x).sharding.spec]
        if {*self.axes}.isdisjoint(itertools.chain.from_iterable(dims)):
            return x
        layout = TensorLayout(dims, self.mesh)
        return call_split_over(self.axes, distribute_tensor, x, layout)

    def _on_devices(self, loop: Any) -> Callable[..., Any]:
        """The loop of each device, over dim 0 of devices and rows.

        In `shard_map`; but by `vmap` beside Auto axes that are not of the batch, as
        `tensor`: XLA's partitioner aborts where a `shard_map` over some axes gathers
        from a dim that is sharded over others (jax 0.10.2, the loss of a vocabulary).
        """
        axes = {axis for axis, size in self.mesh.axis_sizes.items() if size > 1}
        if axes - {*self.rules.batch} - explicit_axes(self.mesh):
            dims: Any = {"in_axes": (0, 0, None), "out_axes": (0, None, 0)}
            return jax.vmap(loop, **dims, spmd_axis_name=self.axes)

        def local(device: Any, rows: _Leaves, whole: _Leaves) -> Any:
            device, rows = jax.tree.map(lambda x: x[0], (device, rows))
            means, counts, aux = loop(device, rows, whole)
            means, aux = jax.tree.map(lambda x: x[None], (means, aux))
            return means, counts, aux

        over, whole = PartitionSpec(self.axes), PartitionSpec()
        return jax.shard_map(
            local,
            mesh=self.mesh.jax_mesh,
            in_specs=(over, over, whole),
            out_specs=(over, whole, over),
            axis_names=set(self.axes),
            check_vma=False,
        )

    def _loop(
        self, gradient: _Gradient, device: Any, rows: _Leaves, whole: _Leaves
    ) -> Any:
        """Means of loss, gradients and changed numbers; changed counts; the rest."""
        once = functools.partial(self._once, gradient)
        rows = {at: _micro_batches(x, self.steps) for at, x in rows.items()}
        like = {**whole, **{at: x[0] for at, x in rows.items()}}
        closed, shapes = jax.make_jaxpr(once, return_shape=True)(like)
        results = jax.tree.structure(shapes)
        *_, keys, _ = jax.tree.unflatten(results, closed.jaxpr.outvars)
        check_keys(self.arguments, keys, closed.jaxpr)
        loss, grads, numbers, counts, *_ = shapes

        def micro_batch(carry: Any, xs: Any) -> Any:
            (sums, numbers, counts), (number, rows) = carry, xs
            values = {**whole, **numbers, **counts, **rows}
            for at in self.keys:
                values[at] = folded(values[at], device * self.steps + number)
            flat = jaxpr_as_fun(closed)(*jax.tree.leaves(values))
            loss, grads, numbers, counts, _, aux = jax.tree.unflatten(results, flat)
            sums = jax.tree.map(lambda x, y: x + y.astype(x.dtype), sums, (loss, grads))
            return (self._laid_out(sums, in_loop=True), numbers, counts), aux

        zeros = jax.tree.map(_zeros, (loss, grads))
        before = ({at: whole[at] for at in own} for own in (numbers, counts))
        start = self._laid_out(zeros, in_loop=True), *before
        numbered = jnp.arange(self.steps), rows
        (sums, numbers, counts), aux = jax.lax.scan(micro_batch, start, numbered)
        loss, grads = jax.tree.map(
            lambda x, like: (x / self.steps).astype(like.dtype), sums, (loss, grads)
        )
        return (loss, grads, numbers), counts, aux

    def _once(self, gradient: _Gradient, values: _Leaves) -> Any:
        """A micro-batch: loss, gradients, changed leaves by kind, the rest."""
        leaves = [values.get(at, x) for at, (_, _, x) in enumerate(self.owned)]
        given, objects, positions = rebuilt(self.arguments, leaves)
        changes = Changes(self.arguments, objects, positions)
        loss, grads, aux = gradient(given)
        numbers, counts, keys = changes.by_kind(may_differ=bool(self.axes))
        return loss, grads, numbers, counts, keys, aux

    def _laid_out(self, sums: Any, *, in_loop: bool) -> tuple[Any, list[Any]]:
        """Loss and gradients, these in the layouts of optimizer state.

        In the loop, in those of the parameters where the former are no finer: a part of
        a layer is summed there, and moved to another device once, after the loop.
        """
        loss, grads = sums
        found = []
        for name, own in zip(self.wrt, grads, strict=True):
            leaves, treedef = jax.tree.flatten(own)
            like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), own)
            trees = {name: self.states[name], "gradients": optax.TraceState(like)}
            rows = list(resolve(Roots(trees), self.rules))[-len(leaves) :]
            parameters = resolve(Roots({name: like}), self.rules)
            for at, (row, parameter) in enumerate(zip(rows, parameters, strict=False)):
                dims, least = (x.layout.dims(len(x.shape)) for x in (row, parameter))
                pairs = zip(dims, least, strict=True)
                if in_loop and any(axes[: len(part)] != part for axes, part in pairs):
                    dims = least
                # Without its memory kind: a gradient stays on the device.
                leaves[at] = distribute_tensor(
                    leaves[at], TensorLayout(dims, self.mesh)
                )
            found.append(jax.tree.unflatten(treedef, leaves))
        return loss, found


def _zeros(x: Any) -> Any:
    return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))


def _micro_batches(x: Any, steps: int) -> Any:
    """Rows along a new first dim, each with some of every device: nothing is moved."""
    return jnp.moveaxis(x.reshape(x.shape[0] // steps, steps, *x.shape[1:]), 1, 0)
