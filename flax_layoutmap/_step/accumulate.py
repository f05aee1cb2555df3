"""Gradients over micro-batches, reduced over the batch axes once for a step.

On Auto axes the compiler reduces the gradients of every micro-batch. Here the loop runs
in `jax.shard_map`, where the sums of a device are its own until the loop has ended.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from flax_layoutmap._core.errors import (
    LayoutError,
    StructureError,
    bullet_list,
    did_you_mean,
)
from flax_layoutmap._core.fetch import is_eager
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._place.batch import has_rows
from flax_layoutmap._place.place import distribute_tensor
from flax_layoutmap._resolve.resolve import resolve, rule_set_of
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._rules.scope import call_split_over, current_rules
from flax_layoutmap._step.arguments import (
    Argument,
    Slot,
    call_with,
    first_four,
    leaves_with_owners,
    names_of,
    no_array,
    signature_of,
    slots_of,
    spans,
    strong,
    take_apart,
)
from flax_layoutmap._step.refusals import named_parts
from flax_layoutmap._step.shardings import abstract
from flax_layoutmap._tree.graph import Graph
from flax_layoutmap._tree.objects import is_object
from flax_layoutmap._tree.paths import Roots

# Of some leaves of the arguments: position → value.
_Leaves = dict[int, Any]


def accumulate(
    loss_fn: Callable[..., Any],
    *,
    steps: int,
    argnums: Any = 0,
    has_aux: bool = False,
    axes: str | Iterable[str] | None = None,
    layout_map: Any = None,
) -> Callable[..., Any]:
    """`nnx.value_and_grad` over micro-batches, reduced over the batch axes once.

    For a function that `flm.jit` compiles. The rows of the batch are split into
    micro-batches, each with rows of every device; loss and gradients are the means over
    them. If the loss is a mean over rows, both are those of the whole batch.

    Split are the arrays in arguments that hold no state (rows are their dim 0).
    What is differentiated, NNX objects, scalars and constants are passed whole. A PRNG
    key, also one in an NNX object, is folded with the number of the micro-batch.

    Gradients are added up in float32 at least. They get the layouts of optimizer state:
    with `flm.presets.zero1`, the reduction leaves each device its part.

    What is averaged over the rows inside of the model (BatchNorm) is averaged over the
    rows of one device in one micro-batch. Changes of floating-point Variables (running
    statistics) and of the counts of random numbers are kept, the former as means over
    devices.

    Args:
        loss_fn: as for `nnx.value_and_grad`; it returns a scalar.
        steps: the number of micro-batches.
        argnums: what is differentiated, as for `nnx.value_and_grad`: positions, or
            `nnx.DiffState(0, filter)`. Of an NNX module, its `nnx.Param`s; a tree of
            arrays (the parameters of Linen) as a whole.
        has_aux: whether the loss returns something else, too. It is returned for each
            micro-batch of each device, along a new first dim.
        axes: the batch axes over which the sums are reduced once, after the last
            micro-batch. None: those over which no state is sharded; over the others
            parameters are gathered and gradients reduced in each micro-batch. `()`
            reduces in each micro-batch over all, which keeps only the part of the sums
            that a device has of optimizer state (ZeRO-2).
        layout_map: the rules; None takes those of the surrounding `flm.jit`.

    Returns:
        A function with the arguments of `loss_fn`, which returns what
        `nnx.value_and_grad(loss_fn, …)` does.

    Raises:
        LayoutError: the steps are no positive number, or axes no batch axes; or, when
            called: there are no rules, or the rows do not divide.
        StructureError: the loss adds or removes Variables, or changes integers.

    Example:
        >>> import jax.numpy as jnp, flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap("data=8")
        >>> layout_map["w"] = None
        >>> def loss_fn(params, batch):
        ...     return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean()
        >>> @flm.jit(layout_map=layout_map)
        ... def gradients(params, batch):
        ...     return flm.accumulate(loss_fn, steps=4)(params, batch)
        >>> batch = {"x": jnp.ones((64, 3)), "y": jnp.zeros(64)}
        >>> loss, grads = gradients({"w": jnp.ones(3)}, batch)
        >>> float(loss), grads["w"].tolist()
        (9.0, [6.0, 6.0, 6.0])

    Plain JAX: `jax.lax.scan` of `jax.value_and_grad` in a `jax.shard_map` over the data
    axes, and `jax.lax.psum` after it.
    """
    if not isinstance(steps, int | np.integer) or steps < 1:
        raise LayoutError(f"accumulate(steps=…) takes 1 or more, got {steps!r}")
    signature = signature_of(loss_fn)
    several = isinstance(argnums, Sequence)
    numbers = [getattr(n, "argnum", n) for n in (argnums if several else [argnums])]
    given = [names_of(signature, (), n, "argnums") for n in numbers]
    gradient = nnx.value_and_grad(loss_fn, argnums=argnums, has_aux=has_aux)

    @functools.wraps(loss_fn)
    def value_and_grad(*args: Any, **kwargs: Any) -> Any:
        rules = _rules(layout_map)
        slots = slots_of(signature.bind(*args, **kwargs))
        loop = _Loop(slots, given, rules, axes, int(steps))

        def one(values: Mapping[Slot, Any]) -> Any:
            pairs = [(slot, values[slot]) for slot, _ in slots]
            result, grads = call_with(gradient, signature, pairs)
            loss, aux = result if has_aux else (result, ())
            return loss, list(grads) if several else [grads], aux

        loss, grads, aux = loop.run(one)
        value = (loss, aux) if has_aux else loss
        return value, tuple(grads) if several else grads[0]

    return value_and_grad


def _rules(layout_map: Any) -> RuleSet:
    given = layout_map is not None
    rules = rule_set_of(layout_map, "accumulate") if given else current_rules()
    if rules is None or rules.mesh is None:
        raise LayoutError(
            "accumulate needs rules with a mesh, to know the axes of the batch: call "
            "it in a function of flm.jit(layout_map=…), or pass them, "
            "flm.accumulate(loss_fn, steps=…, layout_map=layout_map)"
        )
    return rules


def _chosen(axes: str | Iterable[str], rules: RuleSet) -> tuple[str, ...]:
    """Axes that the caller chose, in the order of the batch axes."""
    listed = [axes] if isinstance(axes, str) else list(axes)
    for axis in listed:
        if axis not in rules.batch:
            raise LayoutError(
                f"accumulate(axes=…) names {axis!r}, which is none of the batch axes "
                f"{rules.batch}{did_you_mean(axis, rules.batch)}"
            )
    return tuple(axis for axis in rules.batch if axis in listed)


def _is_constant(value: Any) -> bool:
    """Whether an argument holds no array and no number: a config, a name, None."""
    return not is_object(value) and all(map(no_array, jax.tree.leaves(value)))


class _Loop:
    """The loop over the micro-batches of one call.

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
        axes: str | Iterable[str] | None,
        steps: int,
    ) -> None:
        names = frozenset[str]().union(*argnums)
        self.constants = {slot: x for slot, x in slots if _is_constant(x)}
        self.arguments = [
            take_apart(slot, x, is_state=slot.is_among(names), is_donated=False)
            for slot, x in slots
            if slot not in self.constants
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
        chosen = self._unsharded() if axes is None else _chosen(axes, rules)
        # Eagerly, JAX has no shard_map over some of the axes of a mesh.
        self.axes = () if is_eager() else chosen

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
        call: Any = functools.partial(self._on_devices, one)
        if self.axes:
            assert self.rules.mesh is not None
            rows = PartitionSpec(self.axes)
            call = jax.shard_map(
                call,
                mesh=self.rules.mesh.jax_mesh,
                in_specs=(rows, PartitionSpec()),
                out_specs=(rows, PartitionSpec(), rows),
                axis_names=set(self.axes),
                check_vma=False,
            )
        sums, counts, aux = call(self.rows, self.whole)
        (loss, grads), averages = jax.tree.map(lambda x: x.mean(0), sums)
        changed = averages | counts
        for argument, span in zip(self.arguments, spans(self.arguments), strict=True):
            new = {at - span.start: x for at, x in changed.items() if at in span}
            if new:
                argument.write_back(new)
        return loss, self._laid_out(grads, in_loop=False), aux

    def _on_devices(self, one: Any, rows: _Leaves, whole: _Leaves) -> Any:
        """The loop, on the rows that a device has along the manual axes."""
        return call_split_over(self.axes, lambda: self._looped(one, rows, whole))

    def _looped(self, one: Any, rows: _Leaves, whole: _Leaves) -> Any:
        first = jax.lax.axis_index(self.axes) * self.steps if self.axes else 0
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
        own = jax.tree.map(lambda x: x[None], (means, averages))
        return own, counts, aux

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
            if after.leaves[number] is not old:
                changed[at] = strong(after.leaves[number])
                self._check_change(at, before.holders[number])
        return tuple(value), changed, aux

    def _check_change(self, at: int, holder: tuple[Any, int] | None) -> None:
        """Raise StructureError where devices would have different values."""
        leaf = self.owned[at][2]
        is_count = holder is not None and isinstance(holder[0], nnx.RngCount)
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
        found = []
        for (name, state), own in zip(self.differentiated, grads, strict=True):
            leaves, treedef = jax.tree.flatten(own)
            like = jax.tree.map(_shape, own)
            trees = {name: state, "gradients": optax.TraceState(like)}
            every = list(resolve(Roots(trees), self.rules))
            rows = every[len(every) - len(leaves) :]
            parameters = resolve(Roots({name: like}), self.rules)
            for at, (row, parameter) in enumerate(zip(rows, parameters, strict=True)):
                layout = row.layout
                if in_loop and not _is_finer(layout, parameter.layout, len(row.shape)):
                    layout = parameter.layout
                leaves[at] = distribute_tensor(leaves[at], layout)
            found.append(jax.tree.unflatten(treedef, leaves))
        return found


def _is_finer(layout: TensorLayout, than: TensorLayout, ndim: int) -> bool:
    """Whether each dim has the axes of the other layout, and possibly more."""
    pairs = zip(layout.dims(ndim), than.dims(ndim), strict=True)
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
