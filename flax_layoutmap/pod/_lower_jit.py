"""Lower a `jax.jit` step, with the arguments sharded by the rules."""

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._step.arguments import (
    Argument,
    Slot,
    call_with,
    slots_of,
    take_apart,
)
from flax_layoutmap._step.inputs import holds_parameters
from flax_layoutmap._step.shardings import abstract
from flax_layoutmap._step.trace import mesh_context
from flax_layoutmap.pod._layouts import Layouts
from flax_layoutmap.pod._lowered import (
    Lowered,
    constants_of,
    kept_by,
    leaves_of,
    lower,
    notes_of,
)
from flax_layoutmap.pod._pairs import Results, comes_back, look_at, pairs_of


def lower_jitted(
    step: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rules: RuleSet | None,
    platform: str,
) -> Lowered:
    """Lower a `jax.jit` function, with its arguments sharded by the rules."""
    signature = inspect.signature(step)
    slots = slots_of(signature.bind(*args, **kwargs))
    # What holds something else is static: nothing to lay out.
    every = [
        take_apart(slot, value, is_state=False, is_donated=False)
        for slot, value in slots
        if all(map(_is_array_or_number, jax.tree.leaves(value)))
    ]

    def trace() -> Any:
        own = {one.slot: one for one in every}
        values = [
            (slot, own[slot].plain() if slot in own else value) for slot, value in slots
        ]
        leaves = [leaf for one in every for leaf in one.leaves]
        with contextlib.nullcontext() if rules is None else mesh_context(rules, leaves):
            return call_with(step.trace, signature, values)

    if rules is not None:
        for at, one in enumerate(every):
            if not one.is_state and holds_parameters(one, rules):
                every[at] = one.as_state()
        if not any(one.is_state for one in every) and len(every) > 1:
            every = _with_state(every, _donated(trace()))
        every = _laid_out(every, rules)
    traced = trace()
    lowered = lower(traced, platform, getattr(step, "__name__", "the step"))
    donated = _donated(lowered)
    taken = _taken(every, len(donated))
    kept = kept_by(lowered, [one.slot.parameter for one in taken])
    place = {leaf: at for at, leaf in enumerate(kept)}
    count = sum(len(one.leaves) for one in taken)
    results = look_at(traced, range(count), lowered.out_info, 0, taken)
    if rules is None:
        taken = _with_state(taken, donated, results)
    shapes = jax.tree.leaves(lowered.out_info)
    found, gradients = pairs_of(results, taken, shapes, {})
    return Lowered(
        getattr(step, "__name__", "the step"),
        lowered,
        leaves_of(taken, kept, [donated[at] for at in kept]),
        {result: place[leaf] for result, leaf in found.items() if leaf in place},
        kept,
        Layouts(taken),
        constants_of(traced),
        {} if rules is None else _specs(taken, kept),
        () if rules is None else notes_of(taken, rules),
        gradients,
    )


def _donated(step: Any) -> list[bool]:
    """Of each leaf that a traced or lowered step takes, whether it is given away."""
    return [info.donated for info in jax.tree.leaves(step.args_info)]


def _taken(arguments: Sequence[Argument], count: int) -> list[Argument]:
    """The arguments with so many leaves that a step takes."""
    if sum(len(one.leaves) for one in arguments) > count:
        # Numbers that are static; only jax.jit knows which.
        return [one for one in arguments if any(map(_is_array, one.raw))]
    return list(arguments)


def _with_state(
    arguments: Sequence[Argument],
    donated: Sequence[bool],
    results: Results | None = None,
) -> list[Argument]:
    """Without rules, donated arguments and those that come back changed are state.

    Args:
        arguments: the arguments.
        donated: of each leaf that the step takes, whether it is given away.
        results: its results; None where the rules lay out data over the batch axes, so
            that containers alone are looked at, and only what is given away.
    """
    start = 0
    state: set[Slot] = set()
    for one in _taken(arguments, len(donated)):
        own = range(start, start + len(one.leaves))
        start = own.stop
        found = any(donated[at] for at in own)
        if results is None:
            found = found and one.is_container
        else:
            found = found or comes_back(results, one, own)
        if found and not one.is_state:
            state.add(one.slot)
    return [one.as_state() if one.slot in state else one for one in arguments]


def _specs(arguments: Sequence[Argument], kept: Sequence[int]) -> dict[int, Any]:
    """Position of each argument of a program → the spec that its leaf was given."""
    leaves = [leaf for one in arguments for leaf in one.leaves]
    found = {
        at: getattr(leaves[leaf], "sharding", None) for at, leaf in enumerate(kept)
    }
    return {at: one.spec for at, one in found.items() if one is not None}


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype")


def _is_array_or_number(leaf: Any) -> bool:
    return _is_array(leaf) or isinstance(leaf, bool | int | float | complex)


def _laid_out(arguments: Sequence[Argument], rules: RuleSet) -> list[Argument]:
    """Arguments whose leaves have the shardings of the rules."""
    shardings = iter(Layouts(arguments).under(rules))
    return [
        one.with_leaves([abstract(leaf, next(shardings)) for leaf in one.leaves])
        for one in arguments
    ]
