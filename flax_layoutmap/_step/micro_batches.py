"""The loop over micro-batches of `flm.accumulate`.

On Auto axes the compiler reduces the gradients of every micro-batch. Here the loop runs
for each device of the batch axes by itself, so that its sums stay its own until the
loop has ended.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from flax_layoutmap._core.errors import LayoutError, StructureError, bullet_list
from flax_layoutmap._core.fetch import is_eager
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._place.batch import has_rows
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
    no_array,
    spans,
    strong,
    take_apart,
)
from flax_layoutmap._step.inputs import holds_parameters
from flax_layoutmap._step.refusals import named_parts
from flax_layoutmap._step.shardings import abstract
from flax_layoutmap._tree.graph import Graph
from flax_layoutmap._tree.objects import is_object
from flax_layoutmap._tree.paths import Roots

# Of some leaves of the arguments: position → value.
_Leaves = dict[int, Any]
# Per dim, the mesh axes that shard it.
_Dims = tuple[tuple[str, ...], ...]


def _is_constant(value: Any) -> bool:
    """Whether an argument holds no array and no number: a config, a name, None."""
    return not is_object(value) and all(map(no_array, jax.tree.leaves(value)))


class MicroBatches:
    """The micro-batches of one call.

    Attributes:
        arguments: those that hold arrays.
        rows: the leaves that are split.
        whole: all other arrays.
        states: the name of each argument with state, and its abstract tree.
        differentiated: the same for each of `argnums`, as pairs.
        axes: those that are manual in the loop.
    """

    def __init__(
        self,
        slots: Sequence[tuple[Slot, Any]],
        argnums: Sequence[frozenset[str]],
        rules: RuleSet,
        axes: tuple[str, ...] | None,
        steps: int,
    ) -> None:
        """Take the arguments apart; without `axes`, find them."""
        names = frozenset[str]().union(*argnums)
        self.constants = {slot: x for slot, x in slots if _is_constant(x)}
        arguments = (
            take_apart(slot, x, is_state=slot.is_among(names), is_donated=False)
            for slot, x in slots
            if slot not in self.constants
        )
        self.arguments = [
            one if one.is_state or not holds_parameters(one, rules) else one.as_state()
            for one in arguments
        ]
        self.rules, self.steps = rules, steps
        self.owned = list(leaves_with_owners(self.arguments))
        self.rows: _Leaves = {}
        self.whole: _Leaves = {}
        for at, (argument, _, leaf) in enumerate(self.owned):
            if hasattr(leaf, "shape"):  # numbers of Python stay constants
                is_split = not argument.is_state and has_rows(leaf)
                (self.rows if is_split else self.whole)[at] = leaf
        # Also the old-style keys of a batch.
        self.keys = {
            at
            for at, x in self.whole.items()
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            or (x.ndim and not self.owned[at][0].is_state)
        }
        self._check_rows()
        self.states = {a.name: _abstract(a) for a in self.arguments if a.is_state}
        self.differentiated = [
            (argument.name, self.states[argument.name])
            for own in argnums
            for argument in self.arguments
            if argument.slot.is_among(own)
        ]
        self.axes = self._unsharded() if axes is None else axes
        if is_eager():  # where JAX has no shard_map over some of the axes of a mesh
            self.axes = ()

    def _check_rows(self) -> None:
        """Raise LayoutError where rows differ, do not divide, or are missing."""
        mesh, batch = self.rules.mesh, self.rules.batch
        assert mesh is not None
        parts = math.prod(mesh.axis_sizes[axis] for axis in batch)
        counts = sorted({len(x) for x in self.rows.values()})
        if len(counts) == 1 and not counts[0] % (parts * self.steps):
            return
        if not counts:
            raise LayoutError(
                "accumulate has no rows to split: no argument without state is an "
                "array with a dim"
            )
        shown = bullet_list(
            [f"{self._path(at)} {show_shape(x.shape)}" for at, x in self.rows.items()]
        )
        if len(counts) > 1:
            raise LayoutError(
                "accumulate splits the rows (dim 0) of the batch, and these have "
                f"different numbers of them:\n{shown}\npass an array without rows in a "
                "closure: flm.accumulate(lambda model, batch: loss_fn(model, batch, "
                "weights), steps=…)"
            )
        rows, per_part = counts[0], counts[0] // parts
        fitting = [n for n in range(1, per_part + 1) if not per_part % n]
        near = min(fitting, key=lambda n: (abs(n - self.steps), n), default=1)
        fix = "" if rows % parts or not rows else f"take steps={near}, or "
        raise LayoutError(
            f"accumulate(steps={self.steps}): {rows} rows do not divide by "
            f"{self.steps} × {parts}, the steps and the parts over the batch axes "
            f"{batch}:\n{shown}\n{fix}pad it, batch, mask = flm.pad_batch(batch, "
            f"{parts * self.steps}), and use the mask in the loss"
        )

    def _path(self, at: int) -> str:
        argument, index, _ = self.owned[at]
        return argument.path(index)

    def _unsharded(self) -> tuple[str, ...]:
        """The batch axes over which no state is sharded."""
        found = resolve(Roots(self.states), self.rules)
        used = {axis for leaf in found for axis in leaf.layout.axis_names}
        return tuple(axis for axis in self.rules.batch if axis not in used)

    def run(self, one: Callable[[Mapping[Slot, Any]], Any]) -> Any:
        """Loss, gradients and the rest; writes what changed into NNX objects."""
        call = functools.partial(self._on_devices, one)
        if self.axes:
            mesh = self.rules.mesh
            assert mesh is not None
            count = math.prod(mesh.axis_sizes[axis] for axis in self.axes)
            device = distribute_tensor(
                jnp.arange(count), TensorLayout((self.axes,), mesh)
            )
            rows = {at: self._by_device(x, count) for at, x in self.rows.items()}
            sums, counts, aux = self._mapped(call)(device, rows, self.whole)
            aux = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), aux)
            sums = jax.tree.map(lambda x: x.mean(0), sums)
        else:
            sums, counts, aux = call(0, self.rows, self.whole)
        (loss, grads), averages = sums
        changed = averages | counts
        for argument, span in zip(self.arguments, spans(self.arguments), strict=True):
            new = {at - span.start: x for at, x in changed.items() if at in span}
            if new:
                argument.write_back(new)
        return loss, self._laid_out(grads, in_loop=False), aux

    def _mapped(self, call: Any) -> Any:
        """The function over dim 0 of devices and rows.

        In `shard_map`; but by `vmap` beside Auto axes that are not of the batch, as
        `tensor`: XLA's partitioner aborts where a `shard_map` over some axes gathers
        from a dim that is sharded over others (jax 0.10.2, the loss of a vocabulary).
        """
        mesh = self.rules.mesh
        assert mesh is not None
        others = {axis for axis, size in mesh.axis_sizes.items() if size > 1}
        if others - {*self.rules.batch} - explicit_axes(mesh):
            axes: Any = {"in_axes": (0, 0, None), "out_axes": (0, None, 0)}
            return jax.vmap(call, **axes, spmd_axis_name=self.axes)

        def local(device: Any, rows: _Leaves, whole: _Leaves) -> Any:
            device, rows = jax.tree.map(lambda x: x[0], (device, rows))
            sums, counts, aux = call(device, rows, whole)
            sums, aux = jax.tree.map(lambda x: x[None], (sums, aux))
            return sums, counts, aux

        over, whole = PartitionSpec(self.axes), PartitionSpec()
        return jax.shard_map(
            local,
            mesh=mesh.jax_mesh,
            in_specs=(over, over, whole),
            out_specs=(over, whole, over),
            axis_names=set(self.axes),
            check_vma=False,
        )

    def _by_device(self, x: Any, count: int) -> Any:
        """The rows along each device of the axes, in a new first dim."""
        rest = tuple(axis for axis in self.rules.batch if axis not in self.axes)
        kept = (TensorLayout.MATCH,) * (x.ndim - 1)
        layout = TensorLayout((self.axes, rest, *kept), self.rules.mesh)
        parts = x.reshape(count, len(x) // count, *x.shape[1:])
        return relayout(parts, layout, gradient="output")

    def _on_devices(self, one: Any, device: Any, rows: _Leaves, whole: _Leaves) -> Any:
        """The loop, on the rows that a device has along the manual axes."""
        return call_split_over(
            self.axes, lambda: self._looped(one, device, rows, whole)
        )

    def _looped(self, one: Any, device: Any, rows: _Leaves, whole: _Leaves) -> Any:
        first = device * self.steps
        rows = {at: _micro_batches(x, self.steps) for at, x in rows.items()}
        like = {**whole, **{at: x[0] for at, x in rows.items()}}
        once = functools.partial(self._once, one)
        closed, shapes = jax.make_jaxpr(once, return_shape=True)(like)
        results = jax.tree.structure(shapes)
        (loss, grads), changing, _ = shapes

        def micro_batch(carry: Any, xs: Any) -> Any:
            (sums, changed), (number, rows) = carry, xs
            values = {**whole, **changed, **rows}
            for at in self.keys:
                values[at] = _folded(values[at], first + number)
            leaves = [values[at] for at in sorted(values)]
            new, changed, aux = jax.tree.unflatten(
                results, jaxpr_as_fun(closed)(*leaves)
            )
            loss, grads = jax.tree.map(lambda x, y: x + y.astype(x.dtype), sums, new)
            grads = self._laid_out(grads, in_loop=True)
            return ((loss, grads), changed), aux

        zeros = jax.tree.map(_zeros, grads)
        zeros = _zeros(loss), self._laid_out(zeros, in_loop=True)
        start = zeros, {at: whole[at] for at in changing}
        numbered = jnp.arange(self.steps), rows
        (sums, changed), aux = jax.lax.scan(micro_batch, start, numbered)
        averages = {
            at: x for at, x in changed.items() if jnp.issubdtype(x.dtype, jnp.inexact)
        }
        counts = {at: x for at, x in changed.items() if at not in averages}
        means = jax.tree.map(lambda x: x / self.steps, sums)
        means = jax.tree.map(lambda x, like: x.astype(like.dtype), means, shapes[0])
        return (means, averages), counts, aux

    def _once(self, one: Any, values: _Leaves) -> Any:
        """Loss and gradients of a micro-batch, the leaves it changed, and the rest."""
        leaves = [values.get(at, x) for at, (_, _, x) in enumerate(self.owned)]
        given, named, positions = dict(self.constants), [], []
        for argument, span in zip(self.arguments, spans(self.arguments), strict=True):
            own = leaves[span.start : span.stop]
            given[argument.slot], objects = argument.rebuild(own)
            named += [(argument.name, node) for node in objects]
            is_pure = zip(span, argument.pure_leaves(), strict=True)
            positions += [at for at, pure in is_pure if not pure]
        known = dict(named_parts(named))
        before = Graph([node for _, node in named])
        *value, aux = one(given)
        after = Graph([node for _, node in named])
        if not after.is_like(before):
            differing = sorted(known.keys() ^ dict(named_parts(named)).keys())
            raise StructureError(
                "accumulate: the loss changes the structure of its arguments"
                f"{': ' * bool(differing)}{first_four(differing)}; a loop has one "
                "structure: return such a value, with has_aux=True"
            )
        changed: _Leaves = {}
        for number, (at, old) in enumerate(zip(positions, before.leaves, strict=True)):
            owner, _ = before.holders[number] or (None, 0)
            # Flax's transformations also return the keys, which its layers only read.
            if after.leaves[number] is not old and not isinstance(owner, nnx.RngKey):
                changed[at] = strong(after.leaves[number])
                self._check_change(at, is_count=isinstance(owner, nnx.RngCount))
        return tuple(value), changed, aux

    def _check_change(self, at: int, *, is_count: bool) -> None:
        """Raise StructureError where devices would have different values."""
        leaf = self.owned[at][2]
        if self.axes and not is_count and not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise StructureError(
                f"accumulate: the loss changes {self._path(at)} "
                f"{show_shape(leaf.shape)} {leaf.dtype}, of which each device would "
                "have another value: return what changes, with has_aux=True, or reduce "
                "in each micro-batch, axes=()"
            )

    def _laid_out(self, grads: Sequence[Any], *, in_loop: bool) -> list[Any]:
        """Gradients in the layouts that optimizer state has for their parameters.

        In the loop, those of the parameters where the former are no finer: a part of a
        layer is summed there, and moved to another device once, after the loop.
        """
        found, mesh = [], self.rules.mesh
        for (name, state), own in zip(self.differentiated, grads, strict=True):
            leaves, treedef = jax.tree.flatten(own)
            like = jax.tree.map(_shape, own)
            trees = {name: state, "gradients": optax.TraceState(like)}
            every = list(resolve(Roots(trees), self.rules))
            rows = every[len(every) - len(leaves) :]
            parameters = resolve(Roots({name: like}), self.rules)
            for at, (row, parameter) in enumerate(zip(rows, parameters, strict=True)):
                dims = row.layout.dims(len(row.shape))
                least = parameter.layout.dims(len(row.shape))
                if in_loop and not _is_finer(dims, least):
                    dims = least
                # Without its memory kind: a gradient stays on the device.
                leaves[at] = distribute_tensor(leaves[at], TensorLayout(dims, mesh))
            found.append(jax.tree.unflatten(treedef, leaves))
        return found


def _is_finer(dims: _Dims, than: _Dims) -> bool:
    """Whether each dim has the axes of the other layout, and possibly more."""
    pairs = zip(dims, than, strict=True)
    return all(own[: len(other)] == other for own, other in pairs)


def _abstract(argument: Argument) -> Any:
    return argument.plain([abstract(leaf, None) for leaf in argument.leaves])


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _zeros(x: Any) -> Any:
    return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))


def _micro_batches(x: Any, steps: int) -> Any:
    """Rows along a new first dim, each with some of every device: nothing is moved."""
    return jnp.moveaxis(x.reshape(x.shape[0] // steps, steps, *x.shape[1:]), 1, 0)


def _folded(x: Any, number: Any) -> Any:
    """A PRNG key, or an array of them, with the number of a micro-batch."""
    fold = jax.random.fold_in
    for _ in x.shape if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else ():
        fold = jax.vmap(fold, (0, None))
    return fold(x, number)
