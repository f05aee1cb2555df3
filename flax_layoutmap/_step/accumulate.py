"""Gradients over micro-batches, reduced over the batch axes once for a step.

On Auto axes the compiler reduces the gradients of every micro-batch. Here a loop runs
for each part of the batch by itself, by `jax.vmap` with `spmd_axis_name`, so that its
sums stay on its devices until the loop has ended.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from flax_layoutmap._core.errors import LayoutError, StructureError, bullet_list
from flax_layoutmap._core.fetch import is_eager
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._place.batch import has_rows
from flax_layoutmap._place.place import distribute_tensor
from flax_layoutmap._resolve.resolve import resolve
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._rules.rules import (
    RuleSet,
    current_rules,
    split_axes,
    split_over,
)
from flax_layoutmap._step import arguments as taken
from flax_layoutmap._step.arguments import Slot
from flax_layoutmap._tree.graph import Graph
from flax_layoutmap._tree.paths import Roots

# Leaves of the arguments by path.
_Leaves = Mapping[str, Any]


def accumulate(
    loss_fn: Callable[..., Any],
    *,
    steps: int,
    argnums: Any = 0,
    batch_argnames: str | Iterable[str] | None = None,
    has_aux: bool = False,
    reduce: Literal["once", "each"] = "once",
) -> Callable[..., Any]:
    """`nnx.value_and_grad` over micro-batches, reduced over the batch axes once.

    For a function of `flm.jit`. The rows of the batch are split into micro-batches,
    each with rows of every device; all other arguments are passed whole. Loss and
    gradients are means over micro-batches: those of the whole batch, if the loss is a
    mean over rows. Gradients are added up in float32 at least, and get the layouts of
    optimizer state. In the loop a device sees its own rows: what that means for PRNG
    keys, BatchNorm, Variables and layouts is in docs/training.md.

    Args:
        loss_fn: as for `nnx.value_and_grad`; it returns a scalar.
        steps: the number of micro-batches.
        argnums: as for `nnx.value_and_grad`: positions, or `nnx.DiffState(0, filter)`.
        batch_argnames: the arguments whose arrays are split along their rows (dim 0).
            None: the only one that has arrays with a dim, and is neither differentiated
            nor holds an NNX object.
        has_aux: whether the loss returns something else, too. It is returned for each
            micro-batch of each device, along a new first dim.
        reduce: `"once"`: sums are reduced after the last micro-batch, over the batch
            axes over which no state is sharded, and over the others in each.
            `"each"`: over all axes in each micro-batch (ZeRO-2).

    Returns:
        A function that takes and returns what `nnx.value_and_grad(loss_fn, …)` does.

    Raises:
        LayoutError: an option has another value; or, when called: there are no rules,
            several arguments may be the batch, or its rows do not divide.
        StructureError: the loss changes the structure of NNX objects.

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
        >>> loss, grads = gradients(layout_map.place({"w": jnp.ones(3)}), batch)
        >>> float(loss), grads["w"].tolist()
        (9.0, [6.0, 6.0, 6.0])

    Plain JAX: `jax.lax.scan` of `jax.value_and_grad` in a `jax.vmap` over the parts of
    the batch, with `spmd_axis_name`, and `mean` of what comes out.
    """
    if not isinstance(steps, int | np.integer) or steps < 1:
        raise LayoutError(f"accumulate(steps=…) takes 1 or more, got {steps!r}")
    if reduce not in ("once", "each"):
        raise LayoutError(f"accumulate(reduce=…) is 'once' or 'each', got {reduce!r}")
    names = functools.partial(taken.names_of, signature := inspect.signature(loss_fn))
    several = isinstance(argnums, Sequence)
    numbers = tuple(argnums) if several else (argnums,)
    wrt = [names((), getattr(n, "argnum", n), "argnums") for n in numbers]
    batch = names(batch_argnames or (), (), "batch_argnames")
    gradient = nnx.value_and_grad(loss_fn, argnums=numbers, has_aux=has_aux)

    def loss_aux_and_grads(values: Iterable[tuple[Slot, Any]]) -> Any:
        result, grads = taken.call_with(gradient, values)
        return *(result if has_aux else (result, ())), grads

    @functools.wraps(loss_fn)
    def value_and_grad(*args: Any, **kwargs: Any) -> Any:
        rules = current_rules()
        if rules is None or rules.mesh is None:
            raise LayoutError(
                "accumulate needs rules with a mesh, to know the axes of the batch: "
                "call it in a function of flm.jit(layout_map=layout_map), or in "
                "flm.activation_scope(layout_map)"
            )
        slots = taken.slots_of(signature.bind(*args, **kwargs))
        trained = [s.name for each in wrt for s, _ in slots if s.is_among(each)]
        run = _Run(loss_aux_and_grads, slots, trained, rules, int(steps))
        rows = run.rows([slot.name for slot, _ in slots if slot.is_among(batch)])
        loss, grads, aux = run.result(rows, once=reduce == "once")
        return (loss, aux) if has_aux else loss, grads if several else grads[0]

    return value_and_grad


@dataclasses.dataclass
class _Run:
    """One call: its leaves by path, the gradient as a function of these, and loops."""

    gradient: Callable[..., Any]
    slots: Sequence[tuple[Slot, Any]]
    trained: Sequence[str]
    rules: RuleSet
    steps: int

    def __post_init__(self) -> None:
        self.mesh = cast("Any", self.rules.mesh)
        self.static = {slot: x for slot, x in self.slots if not _has_arrays(x)}
        pairs = [pair for pair in self.slots if pair[0] not in self.static]
        self.arguments, self.graph = taken.take_apart(pairs)
        table = [(a, n, a.path(n)) for a in self.arguments for n in range(len(a.raw))]
        self.leaves = {path: a.raw[n] for a, n, path in table}
        self.argument = {path: a.name for a, _, path in table}
        self.held = [path for a, n, path in table if a.in_objects[n]]
        # The arguments with parameters or Variables.
        self.states = {*self.trained, *(a.name for a in self.arguments if a.objects)}
        # Traced once for both calls.
        self.once: Any = jax.jit(self.pure, inline=True)

    def pure(self, leaves: _Leaves) -> Any:
        """Loss, gradients, changed values of Variables, and the rest.

        Keys that Flax returns as it has read them, or that the loss reseeds, stay.
        """
        leaves = {**self.leaves, **leaves}
        structures = [argument.structure for argument in self.arguments]
        values, objects = taken.put_together(structures, leaves.values())
        before, rest = Graph(objects), iter(values)
        slots = [slot for slot, _ in self.slots]
        static = [self.static[x] if x in self.static else next(rest) for x in slots]
        loss, aux, grads = self.gradient(zip(slots, static, strict=True))
        after = Graph(objects)
        if not after.is_like(before):
            raise StructureError(
                "accumulate: the loss changes the structure, shapes or static "
                "attributes of its arguments, and a loop has one structure: return "
                "such a value, with has_aux=True"
            )
        held = zip(self.held, before.leaves, after.leaves, after.owners(), strict=True)
        changed = {
            path: new
            for path, old, new, owner in held
            if new is not old and not isinstance(owner, nnx.RngKey | None)
        }
        return loss, grads, changed, aux

    def is_key(self, path: str) -> bool:
        """Whether an array is a PRNG key: in a state, none of old style."""
        x, is_data = self.leaves[path], self.argument[path] not in self.states
        return _is_typed_key(x) or bool(is_data and np.ndim(x) and not has_rows(x))

    def rows(self, named: Sequence[str]) -> _Leaves:
        """The leaves to split: of the arguments that are named, or the only one."""
        with_rows = [path for path, x in self.leaves.items() if has_rows(x)]
        data = sorted({self.argument[path] for path in with_rows} - self.states)
        batch, steps = named or data[: len(data) == 1], self.steps
        if not batch or not {*batch} <= {*data}:
            raise LayoutError(
                "accumulate splits the rows (dim 0) of the batch: name its arguments, "
                "batch_argnames=…, of those with arrays that have a dim, and are "
                f"neither differentiated nor in an NNX object: {data}"
            )
        rows = {
            path: x
            for path, x in self.leaves.items()
            if self.argument[path] in batch and np.ndim(x) and not _is_typed_key(x)
        }
        axes = tuple(axis for axis in self.rules.batch if axis not in split_axes())
        parts = math.prod(map(self.mesh.dim_size, axes))
        sizes = {len(x) for x in rows.values()}
        if len(sizes) > 1 or max(sizes) % (parts * steps):
            shown = [f"{path} {show_shape(x.shape)}" for path, x in rows.items()]
            raise LayoutError(
                f"accumulate(steps={steps}) splits rows (dim 0) into {steps} × "
                f"{parts} parts, the steps and the devices along {axes}; these "
                f"differ, or do not divide:\n{bullet_list(shown)}\n"
                "Pad the batch with flm.pad_batch and weight the loss by its mask; see "
                "docs/training.md#padding."
            )
        return rows

    def result(self, rows: _Leaves, *, once: bool) -> Any:
        """Loss, gradients and the rest; writes what changed into NNX objects."""
        arrays = {path: x for path, x in self.leaves.items() if hasattr(x, "shape")}
        whole = {path: x for path, x in arrays.items() if path not in rows}
        axes: tuple[str, ...] = ()
        if once and not is_eager():
            trees = {s.name: x for s, x in self.slots if s.name in self.states}
            leaves = resolve(Roots(trees), self.rules)
            used = {axis for leaf in leaves for axis in leaf.layout.axis_names}
            axes = tuple(x for x in self.rules.batch if x not in {*used, *split_axes()})
        means = self.by_parts(axes, rows, whole) if axes else self.loop(rows, whole)
        loss, grads, floats, counts, aux = means
        new = {**self.leaves, **floats, **counts}
        taken.write(self.graph, [new[path] for path in self.held])
        return loss, jax.tree.map(distribute_tensor, grads, self.layouts(grads)), aux

    def by_parts(self, axes: tuple[str, ...], rows: _Leaves, whole: _Leaves) -> Any:
        """A loop for each part of the batch along axes, and the means over them."""
        mesh, count = self.mesh, math.prod(map(self.mesh.dim_size, axes))
        rest = tuple(axis for axis in self.rules.batch if axis not in axes)

        def by_part(x: Any) -> Any:
            dims = (axes, rest, *[TensorLayout.MATCH] * (x.ndim - 1))
            parts = x.reshape(count, len(x) // count, *x.shape[1:])
            return distribute_tensor(parts, TensorLayout(dims, mesh))

        number = distribute_tensor(jnp.arange(count), TensorLayout((axes,), mesh))
        *means, counts, aux = jax.vmap(
            split_over(axes)(self.loop),
            in_axes=(0, None, 0),
            out_axes=(0, 0, 0, None, 0),  # counts must not depend on the rows
            spmd_axis_name=axes,
        )(jax.tree.map(by_part, rows), whole, number)
        aux = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), aux)
        return *jax.tree.map(lambda x: x.mean(0), means), counts, aux

    def loop(self, rows: _Leaves, whole: _Leaves, part: Any = None) -> Any:
        """Means of loss, gradients and changed floats; changed counts; the rest.

        In the loop of a part gradients keep the layout of parameters; they move to that
        of optimizer state once, after it.
        """
        steps, first = self.steps, 0 if part is None else part * self.steps

        def micro_batches(x: Any) -> Any:  # each has rows of every device
            return jnp.moveaxis(x.reshape(len(x) // steps, steps, *x.shape[1:]), 1, 0)

        def zeros_like(x: Any) -> Any:
            return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))

        def plus(sums: Any, more: Any) -> Any:
            loss, grads = jax.tree.map(lambda x, y: x + y.astype(x.dtype), sums, more)
            return loss, jax.tree.map(distribute_tensor, grads, layouts)

        def micro_batch(carry: Any, xs: Any) -> Any:
            (sums, changing), (number, rows) = carry, xs
            leaves = {**whole, **changing, **rows}
            for path in filter(self.is_key, whole):
                leaves[path] = _folded(leaves[path], first + number)
            loss, grads, changed, aux = self.once(leaves)
            return (plus(sums, (loss, grads)), changed), aux

        rows = jax.tree.map(micro_batches, rows)
        like = {**whole, **jax.tree.map(lambda x: x[0], rows)}
        *like, changed, _ = jax.eval_shape(self.once, like)
        layouts = self.layouts(like[1], of_state=part is None)
        zeros = jax.tree.map(zeros_like, (*like,))
        start = plus(zeros, zeros), {path: whole[path] for path in changed}
        (sums, new), aux = jax.lax.scan(micro_batch, start, (jnp.arange(steps), rows))
        means = jax.tree.map(lambda x, y: (x / steps).astype(y.dtype), sums, (*like,))
        counts = {path: x for path, x in new.items() if not _is_float(x)}
        floats = {path: x for path, x in new.items() if path not in counts}
        return *means, floats, counts, aux

    def layouts(self, grads: Sequence[Any], *, of_state: bool = True) -> Any:
        """For each gradient the layout of optimizer state, or of the parameter."""
        layouts, values = [], {slot.name: x for slot, x in self.slots}
        for name, grad in zip(self.trained, grads, strict=True):
            like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), grad)
            trees: Any = {name: like}
            if of_state:
                trees = {name: values[name], "gradients": optax.TraceState(like)}
            leaves = [*resolve(Roots(trees), self.rules)][-len(jax.tree.leaves(like)) :]
            # Without its memory kind: a gradient stays on the device.
            dims = [leaf.layout.dims(len(leaf.shape)) for leaf in leaves]
            layouts += [TensorLayout(each, self.mesh) for each in dims]
        return jax.tree.unflatten(jax.tree.structure(grads), layouts)


def _has_arrays(value: Any) -> bool:
    return any(hasattr(x, "dtype") for x in jax.tree.leaves(value))


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _is_typed_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _folded(x: Any, number: Any) -> Any:
    """A PRNG key, or an array of them, with the number of a micro-batch."""
    fold = jax.random.fold_in
    for _ in x.shape if _is_typed_key(x) else ():
        fold = jax.vmap(fold, (0, None))
    return fold(x, number)
