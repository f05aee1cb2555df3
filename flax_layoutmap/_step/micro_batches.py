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
from flax import nnx
from jax.extend.core import Jaxpr, jaxpr_as_fun
from jax.sharding import PartitionSpec

from flax_layoutmap._core.axes import dim_axes
from flax_layoutmap._core.errors import StructureError
from flax_layoutmap._core.fetch import is_eager
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._place.place import distribute_tensor, explicit_axes
from flax_layoutmap._place.relayout import relayout
from flax_layoutmap._resolve.resolve import resolve
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._rules.scope import call_split_over
from flax_layoutmap._step.arguments import (
    Argument,
    Slot,
    first_four,
    leaves_with_owners,
    rebuilt,
    spans,
    strong,
)
from flax_layoutmap._step.gradients import gradient_layouts
from flax_layoutmap._step.refusals import named_parts
from flax_layoutmap._step.rows import folded, is_key
from flax_layoutmap._step.shardings import abstract
from flax_layoutmap._tree.graph import Graph
from flax_layoutmap._tree.jaxprs import inner_jaxprs
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
        """An array that each device sees whole: on Explicit axes, shard_map asks."""
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
        self._check_keys(closed.jaxpr, results)
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
        """A micro-batch: loss, gradients, changed leaves, changed keys, the rest."""
        leaves = [values.get(at, x) for at, (_, _, x) in enumerate(self.owned)]
        given, objects, positions = rebuilt(self.arguments, leaves)
        named = [
            (argument.name, node)
            for argument, own in zip(self.arguments, objects, strict=True)
            for node in own
        ]
        known = dict(named_parts(named))
        before = Graph([node for _, node in named])
        loss, grads, aux = gradient(given)
        after = Graph([node for _, node in named])
        if not after.is_like(before):
            differing = sorted(known.keys() ^ dict(named_parts(named)).keys())
            raise StructureError(
                "accumulate: the loss changes the structure of its arguments"
                f"{': ' * bool(differing)}{first_four(differing)}; a loop has one "
                "structure: return such a value, with has_aux=True"
            )
        numbers: _Leaves = {}
        counts: _Leaves = {}
        keys: _Leaves = {}
        for at, old, new, holder in zip(
            positions, before.leaves, after.leaves, before.holders, strict=True
        ):
            owner, _ = holder or (None, 0)
            if new is old:
                continue
            if new.dtype != old.dtype:
                raise StructureError(
                    f"accumulate: the loss changes {self._path(at)} from {old.dtype} "
                    f"to {new.dtype}, and a loop has one dtype: write what it has, "
                    f"x.astype({str(old.dtype)!r})"
                )
            if isinstance(owner, nnx.RngKey):
                keys[at] = new
            elif jnp.issubdtype(new.dtype, jnp.inexact):
                numbers[at] = strong(new)
            elif isinstance(owner, nnx.RngCount) or not self.axes:
                counts[at] = strong(new)
            else:
                raise StructureError(
                    f"accumulate: the loss changes {self._path(at)} "
                    f"{show_shape(new.shape)} {new.dtype}, of which each device would "
                    "have another value: return what changes, with has_aux=True, or "
                    "reduce in each micro-batch, axes=()"
                )
        return loss, grads, numbers, counts, keys, aux

    def _check_keys(self, jaxpr: Jaxpr, results: Any) -> None:
        """Raise StructureError where the loss makes a key, which would be lost.

        Flax's transformations return keys, too, which its layers only read.
        """
        *_, keys, _ = jax.tree.unflatten(results, jaxpr.outvars)
        calls = (eqn for eqn in jaxpr.eqns if inner_jaxprs(eqn))
        returned = {*jaxpr.invars, *(var for eqn in calls for var in eqn.outvars)}
        if new := [self._path(at) for at, var in keys.items() if var not in returned]:
            raise StructureError(
                f"accumulate: the loss changes {first_four(new)}, a key that each "
                "micro-batch folds with its number: call nnx.reseed before accumulate"
            )

    def _path(self, at: int) -> str:
        argument, index, _ = self.owned[at]
        return argument.path(index)

    def _laid_out(self, sums: Any, *, in_loop: bool) -> tuple[Any, list[Any]]:
        """Loss and gradients, these in their layouts."""
        loss, grads = sums
        states = [(name, self.states[name]) for name in self.wrt]
        layouts = gradient_layouts(states, grads, self.rules, in_loop=in_loop)
        return loss, jax.tree.map(distribute_tensor, grads, layouts)


def _zeros(x: Any) -> Any:
    return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))


def _micro_batches(x: Any, steps: int) -> Any:
    """Rows along a new first dim, each with some of every device: nothing is moved."""
    return jnp.moveaxis(x.reshape(x.shape[0] // steps, steps, *x.shape[1:]), 1, 0)
