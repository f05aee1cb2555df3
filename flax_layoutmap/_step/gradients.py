"""The layouts of gradients in `flm.accumulate`: those of optimizer state."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import optax

from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._resolve.resolve import resolve
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.paths import Roots


def gradient_layouts(
    states: Sequence[tuple[str, Any]],
    gradients: Iterable[Any],
    rules: RuleSet,
    *,
    in_loop: bool,
) -> list[Any]:
    """The layouts that optimizer state has for the parameters of gradients.

    In the loop over micro-batches, those of the parameters where the former are no
    finer: a part of a layer is summed there, and moved to another device once, after
    the loop. Without memory kinds: a gradient stays on the device.

    `states` are names and trees of arguments; each gradient is of all or some of one.
    """
    found = []
    for (name, state), own in zip(states, gradients, strict=True):
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), own)
        trees = {name: state, "gradients": optax.TraceState(like)}
        parameters = list(resolve(Roots({name: like}), rules))
        every = list(resolve(Roots(trees), rules))
        layouts = []
        for leaf, parameter in zip(
            every[len(every) - len(parameters) :], parameters, strict=True
        ):
            dims, least = (x.layout.dims(len(x.shape)) for x in (leaf, parameter))
            pairs = zip(dims, least, strict=True)
            if in_loop and any(axes[: len(part)] != part for axes, part in pairs):
                dims = least
            layouts.append(TensorLayout(dims, rules.mesh))
        found.append(jax.tree.unflatten(jax.tree.structure(like), layouts))
    return found
