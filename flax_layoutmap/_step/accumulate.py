"""Gradients over micro-batches, reduced over the batch axes once for a step.

On Auto axes the compiler reduces the gradients of every micro-batch. Here a loop runs
for each part of the batch by itself, by `jax.vmap` with `spmd_axis_name`, so that its
sums stay on its devices until the loop has ended.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

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
_Values = dict[str, Any]


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
    the layouts of optimizer state.

    In the loop a device sees its own rows: docs/training.md says what that means for
    PRNG keys, BatchNorm, changes of Variables, and layouts in the model.

    Args:
        loss_fn: as for `nnx.value_and_grad`; it returns a scalar.
        steps: the number of micro-batches.
        argnums: what is differentiated, as for `nnx.value_and_grad`: positions, or
            `nnx.DiffState(0, filter)`. Of an NNX module, its `nnx.Param`s; a tree of
            arrays (the parameters of Linen) as a whole.
        batch_argnames: the arguments whose arrays are split along their rows (dim 0).
            None: the only argument that has arrays with a dim, and is neither
            differentiated nor holds an NNX object.
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

        def on_arguments(arguments: Mapping[str, Any]) -> Any:
            pairs = [(slot, arguments[slot.name]) for slot, _ in slots]
            result, grads = call_with(gradient, pairs)
            return *(result if has_aux else (result, ())), grads

        loss, grads, aux = _run(
            on_arguments,
            given={slot.name: value for slot, value in slots},
            wrt=[s.name for own in wrt for s, _ in slots if s.is_among(own)],
            batch=[slot.name for slot, _ in slots if slot.is_among(batch)],
            rules=rules,
            steps=int(steps),
            once=reduce == "once",
        )
        value = (loss, aux) if has_aux else loss
        return value, grads if several else grads[0]

    return value_and_grad


def _run(
    gradient: Callable[..., Any],
    *,
    given: _Values,
    wrt: Sequence[str],
    batch: Sequence[str],
    rules: RuleSet,
    steps: int,
    once: bool,
) -> Any:
    """Loss, gradients and the rest; writes what changed into NNX objects.

    `given` are the arguments by name, `wrt` the names of those that are differentiated,
    and `batch` of those with rows, or none.
    """
    values, variables, pure = _pure(gradient, given)
    states = {path.partition("/")[0] for path in (*wrt, *variables)}
    rows, keys = _rows_and_keys(values, states, batch, rules, steps)
    whole = {
        path: value
        for path, value in values.items()
        if path not in rows and all(hasattr(x, "shape") for x in jax.tree.leaves(value))
    }
    axes: tuple[str, ...] = ()
    if once and not is_eager():
        leaves = resolve(Roots({name: given[name] for name in states}), rules)
        used = {axis for leaf in leaves for axis in leaf.layout.axis_names}
        axes = tuple(x for x in rules.batch if x not in {*used, *split_axes()})
    layouts = functools.partial(_layouts, {name: given[name] for name in wrt}, rules)
    loop = functools.partial(_loop, pure, keys, steps, layouts)
    if axes:
        loss, grads, floats, counts, aux = _by_parts(loop, axes, rules, rows, whole)
    else:
        loss, grads, floats, counts, aux = loop(0, rows, whole)
    for path, value in (floats | counts).items():
        variables[path].set_raw_value(value)
    return loss, jax.tree.map(distribute_tensor, grads, layouts(grads)), aux


def _pure(gradient: Any, given: _Values) -> tuple[_Values, _Values, Any]:
    """What is in the arguments, their Variables, and the gradient by values.

    It gives loss, gradients, changed floats, other changed values and the rest. Keys
    that Flax returns as it has read them, or that the loss reseeds, stay.
    """
    graphdef, state = nnx_split(given)
    treedef, values = jax.tree.structure(state), _values_of(state)
    variables = {
        join_keys(map(DictKey, path)): part
        for path, part in nnx.iter_graph(given, graph=True)
        if _is_variable(part)
    }

    def pure(arrays: _Values) -> Any:
        before = {**values, **arrays}
        state = jax.tree.unflatten(treedef, jax.tree.leaves([*before.values()]))
        arguments = nnx.merge(graphdef, state)
        loss, aux, grads = gradient(arguments)
        new_graphdef, state = nnx_split(arguments)
        after = _values_of(state)
        if new_graphdef != graphdef:
            differing = first_four(sorted(before.keys() ^ after.keys()))
            raise StructureError(
                "accumulate: the loss changes the structure or static attributes of "
                f"its arguments{differing and f' ({differing})'}; a loop has one "
                "structure: return such a value, with has_aux=True"
            )
        floats: _Values = {}
        counts: _Values = {}
        for path, variable in variables.items():
            pairs = zip(*map(jax.tree.leaves, (before[path], after[path])), strict=True)
            new = [x for old, x in pairs if x is not old]
            if new and not isinstance(variable, nnx.RngKey):
                is_float = all(jnp.issubdtype(x.dtype, jnp.inexact) for x in new)
                (floats if is_float else counts)[path] = after[path]
        return loss, grads, floats, counts, aux

    return values, variables, pure


def _rows_and_keys(
    values: _Values,
    states: set[str],
    batch: Sequence[str],
    rules: RuleSet,
    steps: int,
) -> tuple[_Values, list[str]]:
    """The arrays that are split, and the paths of the PRNG keys among the others."""
    assert rules.mesh is not None
    names = [path.partition("/")[0] for path in values]
    pairs = list(zip(names, values.items(), strict=True))
    data = sorted({n for n, (_, x) in pairs if has_rows(x)} - states)
    batch = batch or data[: len(data) == 1]
    if not batch or not {*batch} <= {*data}:
        raise LayoutError(
            "accumulate splits the rows (dim 0) of the batch: name the arguments "
            f"with rows, flm.accumulate(loss_fn, steps={steps}, "
            "batch_argnames=…); those with arrays that have a dim, and are neither "
            f"differentiated nor in an NNX object, are {data}"
        )
    typed = [path for _, (path, x) in pairs if _is_typed_key(x)]
    arrays = {p: (n, x) for n, (p, x) in pairs if p not in typed and np.ndim(x)}
    rows = {path: x for path, (name, x) in arrays.items() if name in batch}
    old = [p for p, (n, x) in arrays.items() if not has_rows(x) and n not in states]
    axes = tuple(axis for axis in rules.batch if axis not in split_axes())
    parts = math.prod(map(rules.mesh.dim_size, axes))
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
    return rows, [*typed, *(path for path in old if path not in rows)]


def _by_parts(
    loop: Any, axes: tuple[str, ...], rules: RuleSet, rows: _Values, whole: _Values
) -> Any:
    """A loop for each part of the batch along axes, and the means over them."""
    mesh: Any = rules.mesh
    count = math.prod(map(mesh.dim_size, axes))
    rest = tuple(axis for axis in rules.batch if axis not in axes)

    def by_part(x: Any) -> Any:
        layout = TensorLayout((axes, rest, *[TensorLayout.MATCH] * (x.ndim - 1)), mesh)
        parts = x.reshape(count, len(x) // count, *x.shape[1:])
        return relayout(parts, layout, gradient="output")

    number = distribute_tensor(jnp.arange(count), TensorLayout((axes,), mesh))
    *means, counts, aux = jax.vmap(
        functools.partial(call_split_over, axes, loop),
        in_axes=(0, 0, None),
        out_axes=(0, 0, 0, None, 0),  # counts must not depend on the rows
        spmd_axis_name=axes,
    )(number, jax.tree.map(by_part, rows), whole)
    aux = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), aux)
    return *jax.tree.map(lambda x: x.mean(0), means), counts, aux


def _loop(
    pure: Any,
    keys: Sequence[str],
    steps: int,
    layouts: Any,
    part: Any,
    rows: _Values,
    whole: _Values,
) -> Any:
    """Means of loss, gradients and changed floats; changed counts; the rest."""
    once: Any = jax.jit(pure, inline=True)  # traced once for both calls
    # Each micro-batch has rows of every device: nothing is moved.
    rows = {
        path: jnp.moveaxis(x.reshape(len(x) // steps, steps, *x.shape[1:]), 1, 0)
        for path, x in rows.items()
    }
    like = {**whole, **{path: x[0] for path, x in rows.items()}}
    loss, grads, floats, counts, _ = jax.eval_shape(once, like)
    places = layouts(grads, in_loop=True)

    def micro_batch(carry: Any, xs: Any) -> Any:
        (sums, changing), (number, rows) = carry, xs
        values = {**whole, **changing, **rows}
        for path in keys:
            values[path] = _folded(values[path], part * steps + number)
        loss, grads, floats, counts, aux = once(values)
        return (plus(sums, (loss, grads)), floats | counts), aux

    def plus(sums: Any, more: Any) -> Any:
        loss, grads = jax.tree.map(lambda x, y: x + y.astype(x.dtype), sums, more)
        return loss, jax.tree.map(distribute_tensor, grads, places)

    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)),
        (loss, grads),
    )
    start = plus(zeros, zeros), {path: whole[path] for path in floats | counts}
    (sums, new), aux = jax.lax.scan(micro_batch, start, (jnp.arange(steps), rows))
    means = jax.tree.map(
        lambda x, like: (x / steps).astype(like.dtype), sums, (loss, grads)
    )
    return *means, *({path: new[path] for path in own} for own in (floats, counts)), aux


def _layouts(
    given: _Values, rules: RuleSet, grads: tuple[Any, ...], *, in_loop: bool = False
) -> Any:
    """For each gradient the layout of optimizer state.

    Inside the loop gradients keep the parameters' layout, where that of optimizer
    state is not finer; they move to the optimizer's layout once, after the loop.
    """
    layouts = []
    for (name, tree), own in zip(given.items(), grads, strict=True):
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), own)
        parameters = [*resolve(Roots({name: like}), rules)]
        trees = {name: tree, "gradients": optax.TraceState(like)}
        states = [*resolve(Roots(trees), rules)][-len(parameters) :]
        for pair in zip(states, parameters, strict=True):
            dims, least = (x.layout.dims(len(x.shape)) for x in pair)
            shared = zip(dims, least, strict=True)
            if in_loop and any(axes[: len(part)] != part for axes, part in shared):
                dims = least
            # Without its memory kind: a gradient stays on the device.
            layouts.append(TensorLayout(dims, rules.mesh))
    return jax.tree.unflatten(jax.tree.structure(grads), layouts)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _values_of(state: Any) -> _Values:
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
