"""Gradients over micro-batches, reduced over the batch axes once for a step.

On Auto axes the compiler reduces the gradients of every micro-batch. Here a loop runs
for each part of the batch by itself, by `jax.vmap` with `spmd_axis_name`, so that its
sums stay on its devices until the loop has ended.
"""

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
from jax.tree_util import DictKey

from flax_layoutmap._core.errors import LayoutError, StructureError, bullet_list
from flax_layoutmap._core.fetch import is_eager
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._place.batch import has_rows
from flax_layoutmap._place.place import distribute_tensor
from flax_layoutmap._place.relayout import relayout
from flax_layoutmap._resolve.resolve import resolve, rule_set_of
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._rules.scope import call_split_over, current_rules, split_axes
from flax_layoutmap._step.arguments import (
    call_with,
    first_four,
    names_of,
    slots_of,
)
from flax_layoutmap._tree.flax_internals import nnx_split
from flax_layoutmap._tree.paths import Roots, join_keys

# Arrays, and values of Variables, by path.
_Values = Mapping[str, Any]


def accumulate(
    loss_fn: Callable[..., Any],
    *,
    steps: int,
    argnums: Any = 0,
    batch_argnames: str | Iterable[str] | None = None,
    has_aux: bool = False,
    reduce: Literal["once", "each"] = "once",
    layout_map: Any = None,
) -> Callable[..., Any]:
    """`nnx.value_and_grad` over micro-batches, reduced over the batch axes once.

    For a function that `flm.jit` compiles. The rows of the batch are split into
    micro-batches, each with rows of every device; all other arguments are passed whole.
    Loss and gradients are the means over micro-batches: those of the whole batch, if
    the loss is a mean over rows. Gradients are added up in float32 at least, and get
    the layouts of optimizer state. In the loop a device sees its own rows: what that
    means for PRNG keys, BatchNorm, Variables and layouts is in docs/training.md.

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
        layout_map: the rules; None takes those of the surrounding `flm.jit`.

    Returns:
        A function with the arguments of `loss_fn`, which returns what
        `nnx.value_and_grad(loss_fn, …)` does.

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
    signature = inspect.signature(loss_fn)
    several = isinstance(argnums, Sequence)
    numbers = tuple(argnums) if several else (argnums,)
    wrt = [names_of(signature, (), getattr(n, "argnum", n), "argnums") for n in numbers]
    batch = names_of(signature, batch_argnames or (), (), "batch_argnames")
    gradient = nnx.value_and_grad(loss_fn, argnums=numbers, has_aux=has_aux)

    @functools.wraps(loss_fn)
    def value_and_grad(*args: Any, **kwargs: Any) -> Any:
        rules = current_rules()
        if layout_map is not None:
            rules = rule_set_of(layout_map, "accumulate")
        if rules is None or rules.mesh is None:
            raise LayoutError(
                "accumulate needs rules with a mesh, to know the axes of the batch: "
                "call it in a function of flm.jit(layout_map=…), or pass them, "
                "flm.accumulate(loss_fn, steps=…, layout_map=layout_map)"
            )
        slots = slots_of(signature.bind(*args, **kwargs))

        def on_arguments(arguments: _Values) -> Any:
            pairs = [(slot, arguments[slot.name]) for slot, _ in slots]
            result, grads = call_with(gradient, pairs)
            return *(result if has_aux else (result, ())), grads

        given = {slot.name: value for slot, value in slots}
        trained = [s.name for own in wrt for s, _ in slots if s.is_among(own)]
        run = _Run(on_arguments, given, trained, rules, int(steps))
        named = [slot.name for slot, _ in slots if slot.is_among(batch)]
        loss, grads, aux = run.result(run.rows(named), once=reduce == "once")
        return (loss, aux) if has_aux else loss, grads if several else grads[0]

    return value_and_grad


class _Run:
    """One call: its arrays by path, the gradient as a function of these, and the loop.

    `states` are the names of arguments with parameters or Variables.
    """

    def __init__(
        self, gradient: Any, given: _Values, trained: Any, rules: RuleSet, steps: int
    ) -> None:
        self.gradient, self.given, self.trained = gradient, given, trained
        self.rules, self.mesh, self.steps = rules, cast("Any", rules.mesh), steps
        self.graphdef, state = nnx_split(given)
        self.treedef, self.values = jax.tree.structure(state), _values_of(state)
        self.variables = {
            join_keys(map(DictKey, path)): part
            for path, part in nnx.iter_graph(given, graph=True)
            if _is_variable(part)
        }
        self.names = {path: path.partition("/")[0] for path in self.values}
        self.states = {*trained, *(self.names[path] for path in self.variables)}
        # Traced once for both calls.
        self.once: Any = jax.jit(self.pure, inline=True)

    def pure(self, arrays: _Values) -> Any:
        """Loss, gradients, changed floats, other changed values, and the rest.

        Keys that Flax returns as it has read them, or that the loss reseeds, stay.
        """
        before = {**self.values, **arrays}
        state = jax.tree.unflatten(self.treedef, jax.tree.leaves([*before.values()]))
        arguments = nnx.merge(self.graphdef, state)
        loss, aux, grads = self.gradient(arguments)
        graphdef, state = nnx_split(arguments)
        after = _values_of(state)
        if graphdef != self.graphdef:
            differing = first_four(sorted(before.keys() ^ after.keys()))
            raise StructureError(
                "accumulate: the loss changes the structure or static attributes of "
                f"its arguments{differing and f' ({differing})'}; a loop has one "
                "structure: return such a value, with has_aux=True"
            )
        changed: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        for path, variable in self.variables.items():
            pairs = zip(*map(jax.tree.leaves, (before[path], after[path])), strict=True)
            new = [x for old, x in pairs if x is not old]
            if new and not isinstance(variable, nnx.RngKey):
                is_float = all(jnp.issubdtype(x.dtype, jnp.inexact) for x in new)
                changed[not is_float][path] = after[path]
        return loss, grads, *changed, aux

    def is_key(self, path: str) -> bool:
        """Whether an array is a PRNG key: in a state, none of old style."""
        x = self.values[path]
        is_old = self.names[path] not in self.states and np.ndim(x) and not has_rows(x)
        return _is_typed_key(x) or bool(is_old)

    def rows(self, named: Sequence[str]) -> _Values:
        """The arrays that are split, of the arguments that are named or the only one.

        Raises:
            LayoutError: there are several, or the rows do not divide.
        """
        with_rows = {self.names[path] for path, x in self.values.items() if has_rows(x)}
        data = sorted(with_rows - self.states)
        batch, steps = named or data[: len(data) == 1], self.steps
        if not batch or not {*batch} <= {*data}:
            raise LayoutError(
                "accumulate splits the rows (dim 0) of the batch: name the arguments "
                f"with rows, flm.accumulate(loss_fn, steps={steps}, "
                "batch_argnames=…); those with arrays that have a dim, and are neither "
                f"differentiated nor in an NNX object, are {data}"
            )
        rows = {
            path: x
            for path, x in self.values.items()
            if self.names[path] in batch and np.ndim(x) and not _is_typed_key(x)
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

    def result(self, rows: _Values, *, once: bool) -> Any:
        """Loss, gradients and the rest; writes what changed into NNX objects."""
        whole = {
            path: value
            for path, value in self.values.items()
            if path not in rows
            and all(hasattr(x, "shape") for x in jax.tree.leaves(value))
        }
        axes: tuple[str, ...] = ()
        if once and not is_eager():
            trees = {name: self.given[name] for name in self.states}
            leaves = resolve(Roots(trees), self.rules)
            used = {axis for leaf in leaves for axis in leaf.layout.axis_names}
            axes = tuple(x for x in self.rules.batch if x not in {*used, *split_axes()})
        run = functools.partial(*((self.by_parts, axes) if axes else (self.loop, 0)))
        loss, grads, floats, counts, aux = run(rows, whole)
        for path, value in (floats | counts).items():
            self.variables[path].set_raw_value(value)
        return loss, jax.tree.map(distribute_tensor, grads, self.layouts(grads)), aux

    def by_parts(self, axes: tuple[str, ...], rows: _Values, whole: _Values) -> Any:
        """A loop for each part of the batch along axes, and the means over them."""
        mesh, count = self.mesh, math.prod(map(self.mesh.dim_size, axes))
        rest = tuple(axis for axis in self.rules.batch if axis not in axes)

        def by_part(x: Any) -> Any:
            dims = (axes, rest, *[TensorLayout.MATCH] * (x.ndim - 1))
            parts = x.reshape(count, len(x) // count, *x.shape[1:])
            return relayout(parts, TensorLayout(dims, mesh), gradient="output")

        number = distribute_tensor(jnp.arange(count), TensorLayout((axes,), mesh))
        *means, counts, aux = jax.vmap(
            functools.partial(call_split_over, axes, self.loop),
            in_axes=(0, 0, None),
            out_axes=(0, 0, 0, None, 0),  # counts must not depend on the rows
            spmd_axis_name=axes,
        )(number, jax.tree.map(by_part, rows), whole)
        aux = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), aux)
        return *jax.tree.map(lambda x: x.mean(0), means), counts, aux

    def loop(self, part: Any, rows: _Values, whole: _Values) -> Any:
        """Means of loss, gradients and changed floats; changed counts; the rest."""
        steps = self.steps
        # Each micro-batch has rows of every device: nothing is moved.
        rows = {
            path: jnp.moveaxis(x.reshape(len(x) // steps, steps, *x.shape[1:]), 1, 0)
            for path, x in rows.items()
        }
        like = {**whole, **{path: x[0] for path, x in rows.items()}}
        loss, grads, floats, counts, _ = jax.eval_shape(self.once, like)
        layouts = self.layouts(grads, in_loop=True)

        def micro_batch(carry: Any, xs: Any) -> Any:
            (sums, changing), (number, rows) = carry, xs
            values = {**whole, **changing, **rows}
            for path in filter(self.is_key, whole):
                values[path] = _folded(values[path], part * steps + number)
            loss, grads, floats, counts, aux = self.once(values)
            return (plus(sums, (loss, grads)), floats | counts), aux

        def plus(sums: Any, more: Any) -> Any:
            loss, grads = jax.tree.map(lambda x, y: x + y.astype(x.dtype), sums, more)
            return loss, jax.tree.map(distribute_tensor, grads, layouts)

        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)),
            (loss, grads),
        )
        start = plus(zeros, zeros), {path: whole[path] for path in floats | counts}
        (sums, new), aux = jax.lax.scan(micro_batch, start, (jnp.arange(steps), rows))
        means = jax.tree.map(
            lambda x, like: (x / steps).astype(like.dtype), sums, (loss, grads)
        )
        changed = ({path: new[path] for path in own} for own in (floats, counts))
        return *means, *changed, aux

    def layouts(self, grads: tuple[Any, ...], *, in_loop: bool = False) -> Any:
        """For each gradient the layout of optimizer state.

        Inside the loop gradients keep the parameters' layout, where that of optimizer
        state is not finer; they move to the optimizer's layout once, after the loop.
        """
        layouts = []
        for name, own in zip(self.trained, grads, strict=True):
            like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), own)
            parameters = [*resolve(Roots({name: like}), self.rules)]
            trees = {name: self.given[name], "gradients": optax.TraceState(like)}
            states = [*resolve(Roots(trees), self.rules)][-len(parameters) :]
            for pair in zip(states, parameters, strict=True):
                dims, least = (x.layout.dims(len(x.shape)) for x in pair)
                shared = zip(dims, least, strict=True)
                if in_loop and any(axes[: len(part)] != part for axes, part in shared):
                    dims = least
                # Without its memory kind: a gradient stays on the device.
                layouts.append(TensorLayout(dims, self.mesh))
        return jax.tree.unflatten(jax.tree.structure(grads), layouts)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _values_of(state: Any) -> dict[str, Any]:
    pairs = jax.tree.leaves_with_path(state, is_leaf=_is_variable)
    raw = nnx.Variable.get_raw_value
    return {join_keys(keys): raw(x) if _is_variable(x) else x for keys, x in pairs}


def _is_typed_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _folded(x: Any, number: Any) -> Any:
    """A PRNG key, or an array of them, with the number of a micro-batch."""
    fold = jax.random.fold_in
    for _ in x.shape if _is_typed_key(x) else ():
        fold = jax.vmap(fold, (0, None))
    return fold(x, number)
