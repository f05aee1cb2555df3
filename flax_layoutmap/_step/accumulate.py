"""Gradients over micro-batches, reduced over the batch axes once for a step."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx

from flax_layoutmap._core.errors import LayoutError, did_you_mean
from flax_layoutmap._resolve.resolve import rule_set_of
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._rules.scope import current_rules, split_axes
from flax_layoutmap._step.arguments import (
    Slot,
    call_with,
    names_of,
    signature_of,
    slots_of,
)
from flax_layoutmap._step.micro_batches import MicroBatches
from flax_layoutmap._step.rows import arguments_of, is_constant, rows_of


def accumulate(
    loss_fn: Callable[..., Any],
    *,
    steps: int,
    argnums: Any = 0,
    batch_argnames: str | Iterable[str] | None = None,
    has_aux: bool = False,
    axes: str | Iterable[str] | None = None,
    layout_map: Any = None,
) -> Callable[..., Any]:
    """`nnx.value_and_grad` over micro-batches, reduced over the batch axes once.

    For a function that `flm.jit` compiles. The rows of the batch are split into
    micro-batches, each with rows of every device; loss and gradients are the means over
    them. If the loss is a mean over rows, both are those of the whole batch; if it is a
    sum, both are that sum divided by the number of micro-batches on all devices.

    All other arguments are passed whole. A typed PRNG key, also one in an NNX object
    or in the batch, is folded with the number of the micro-batch.

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
        batch_argnames: the arguments whose arrays are split along their rows (dim 0).
            None: the only argument with rows, besides what is differentiated, NNX
            objects, and containers in which a rule shards a leaf.
        has_aux: whether the loss returns something else, too. It is returned for each
            micro-batch of each device, along a new first dim.
        axes: the batch axes over which the sums are reduced once, after the last
            micro-batch. None: those over which no state is sharded; over the others
            parameters are gathered and gradients reduced in each micro-batch. All batch
            axes: state is gathered once and gradients are reduced once, for which a
            device holds both whole. `()` reduces in each micro-batch over all, which
            keeps only the part of the sums that a device has of optimizer state
            (ZeRO-2).
        layout_map: the rules; None takes those of the surrounding `flm.jit`.

    Returns:
        A function with the arguments of `loss_fn`, which returns what
        `nnx.value_and_grad(loss_fn, …)` does.

    Raises:
        LayoutError: the steps are no positive number, or axes no batch axes; or, when
            called: there are no rules, several arguments may be the batch, or its rows
            do not divide.
        StructureError: the loss adds or removes Variables, or changes integers or the
            keys of `nnx.Rngs`.

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

    Plain JAX: `jax.lax.scan` of `jax.value_and_grad` in a `jax.shard_map` over the data
    axes, and `mean` of what comes out.
    """
    is_number = isinstance(steps, int | np.integer) and not isinstance(steps, bool)
    if not is_number or steps < 1:
        raise LayoutError(f"accumulate(steps=…) takes 1 or more, got {steps!r}")
    signature = signature_of(loss_fn)
    several = isinstance(argnums, Sequence)
    numbers = [getattr(n, "argnum", n) for n in (argnums if several else [argnums])]
    given = [names_of(signature, (), n, "argnums") for n in numbers]
    batch = batch_argnames
    if batch is not None:
        batch = names_of(signature, batch, (), "batch_argnames")
    gradient = nnx.value_and_grad(loss_fn, argnums=argnums, has_aux=has_aux)

    @functools.wraps(loss_fn)
    def value_and_grad(*args: Any, **kwargs: Any) -> Any:
        rules = _rules(layout_map)
        chosen = None if axes is None else _chosen(axes, rules)
        slots = slots_of(signature.bind(*args, **kwargs))
        constants = {slot: x for slot, x in slots if is_constant(x)}
        rest = [(slot, x) for slot, x in slots if slot not in constants]
        arguments = arguments_of(rest, frozenset().union(*given), batch, rules)
        rows = rows_of(arguments, batch, rules, int(steps))
        wrt = [slot.name for own in given for slot, _ in rest if slot.is_among(own)]
        loop = MicroBatches(arguments, rows, wrt, rules, chosen, int(steps))

        def one(values: Mapping[Slot, Any]) -> Any:
            values = {**constants, **values}
            pairs = [(slot, values[slot]) for slot, _ in slots]
            result, grads = call_with(gradient, signature, pairs)
            loss, aux = result if has_aux else (result, ())
            return loss, list(grads) if several else [grads], aux

        loss, grads, aux = loop.run(one)
        value = (loss, aux) if has_aux else loss
        return value, tuple(grads) if several else grads[0]

    return value_and_grad


def _rules(layout_map: Any) -> RuleSet:
    if outer := split_axes():
        raise LayoutError(
            "accumulate is called in the loss of another accumulate, which has split "
            f"the rows over {outer}: take one, with the product of their steps"
        )
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
