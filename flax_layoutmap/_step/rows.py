"""The arguments of a loss for `flm.accumulate`: the rows of its batch, PRNG keys."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from flax_layoutmap._core.errors import LayoutError, bullet_list
from flax_layoutmap._place.batch import has_rows
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._step.arguments import (
    Argument,
    Slot,
    first_four,
    leaves_with_owners,
    no_array,
    take_apart,
)
from flax_layoutmap._step.inputs import holds_parameters
from flax_layoutmap._tree.objects import is_object


def is_constant(value: Any) -> bool:
    """Whether an argument holds no array and no number: a config, a name, None."""
    return not is_object(value) and all(map(no_array, jax.tree.leaves(value)))


def arguments_of(
    slots: Iterable[tuple[Slot, Any]],
    differentiated: frozenset[str],
    batch: frozenset[str] | None,
    rules: RuleSet,
) -> list[Argument]:
    """The arguments, taken apart; those that the rules lay out are state.

    Raises:
        LayoutError: state is named as the batch.
    """
    found = []
    for slot, value in slots:
        is_state = slot.is_among(differentiated)
        one = take_apart(slot, value, is_state=is_state, is_donated=False)
        if slot.is_among(batch or frozenset()):
            if one.is_state:
                raise LayoutError(
                    f"accumulate(batch_argnames=…) names {slot.name!r}, which is "
                    "differentiated, or holds an NNX object or another state: its "
                    "arrays have no rows"
                )
        elif not one.is_state and holds_parameters(one, rules):
            one = one.as_state()
        found.append(one)
    return found


def rows_of(
    arguments: Sequence[Argument],
    batch: frozenset[str] | None,
    rules: RuleSet,
    steps: int,
) -> dict[int, Any]:
    """The arrays whose rows are split, by their position among all leaves.

    Without `batch`, those of the only argument that may be one.

    Raises:
        LayoutError: there are several; or rows differ, do not divide, or are missing.
    """
    every = list(leaves_with_owners(arguments))
    found = {
        at: (argument, index, x)
        for at, (argument, index, x) in enumerate(every)
        if not argument.is_state and has_rows(x)
        if batch is None or argument.slot.is_among(batch)
    }
    names = tuple(dict.fromkeys(argument.name for argument, *_ in found.values()))
    if batch is None and len(names) > 1:
        raise LayoutError(
            "accumulate splits the rows (dim 0) of the batch, and these arguments have "
            f"arrays with a dim: {first_four(names)}; name those of the batch, all "
            f"others are passed whole: flm.accumulate(loss_fn, steps={steps}, "
            f"batch_argnames={names})"
        )
    _check(list(found.values()), names, rules, steps)
    _check_keys(every, {len(x) for *_, x in found.values()})
    return {at: x for at, (*_, x) in found.items()}


def _check(
    found: Sequence[tuple[Argument, int, Any]],
    names: tuple[str, ...],
    rules: RuleSet,
    steps: int,
) -> None:
    """Raise LayoutError where rows differ, do not divide, or are missing."""
    if not found:
        raise LayoutError(
            "accumulate has no rows to split: the batch, an argument of the loss that "
            "is no state, has no array with a dim"
        )
    assert rules.mesh is not None
    parts = math.prod(rules.mesh.axis_sizes[axis] for axis in rules.batch)
    rows, *others = {len(x) for *_, x in found}
    if not others and not rows % (parts * steps):
        return
    shown = bullet_list(
        [f"{one.path(at)} {show_shape(x.shape)}" for one, at, x in found]
    )
    if others:
        raise LayoutError(
            "accumulate splits the rows (dim 0) of the batch, and these have different "
            f"numbers of them:\n{shown}\npass what has no rows, as parameters or "
            "weights of classes, in another argument, and name those with rows: "
            f"flm.accumulate(loss_fn, steps={steps}, batch_argnames={names})"
        )
    fitting = [n for n in range(1, rows // parts + 1) if not rows // parts % n]
    near = min(fitting, key=lambda n: (abs(n - steps), n), default=1)
    fix = "" if rows % parts else f"take steps={near}, or "
    raise LayoutError(
        f"accumulate(steps={steps}): {rows} rows do not divide by {steps} × {parts}, "
        f"the steps and the parts over the batch axes {rules.batch}:\n{shown}\n"
        f"{fix}pad it, batch, mask = flm.pad_batch(batch, {parts * steps}), and return "
        "(losses * mask).mean() / share from the loss, with share = mask.mean() "
        "computed outside of it: means over the mask of each micro-batch would weigh "
        "them alike"
    )


def _check_keys(every: Iterable[tuple[Argument, int, Any]], rows: set[int]) -> None:
    """Raise LayoutError for what may be an old-style PRNG key, or rows."""
    for argument, at, x in every:
        is_uint32 = getattr(x, "dtype", None) == jnp.uint32
        if is_uint32 and is_key(x, argument) and len(x) in rows:
            raise LayoutError(
                f"accumulate cannot tell whether {argument.path(at)} "
                f"{show_shape(x.shape)} uint32 holds rows of the batch or an old-style "
                "PRNG key: pass rows as int32, a key as jax.random.wrap_key_data(key)"
            )


def is_key(x: Any, argument: Argument) -> bool:
    """Whether an array is a PRNG key, or in data an old-style one."""
    is_typed = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return is_typed or bool(x.ndim and not argument.is_state and not has_rows(x))


def folded(x: Any, number: Any) -> Any:
    """A PRNG key, or an array of them, with the number of a micro-batch."""
    fold = jax.random.fold_in
    for _ in x.shape if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else ():
        fold = jax.vmap(fold, (0, None))
    return fold(x, number)
