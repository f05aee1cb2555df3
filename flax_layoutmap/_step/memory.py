"""Move arrays between the memory of the device and that of its host.

The user's function is traced as if all of its arguments were in the memory of the
device. Its program fetches whole leaves from the host, and returns those that the rules
keep there; XLA schedules the transfers.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr

from flax_layoutmap._core.layout import is_offloaded, own_memory_kind
from flax_layoutmap._step.arguments import Slot
from flax_layoutmap._tree.cells import cells_of, write_cells
from flax_layoutmap._tree.objects import is_object, objects_in


def is_on_host(sharding: Any) -> bool:
    """Whether a sharding is in another memory than that of the device."""
    return is_offloaded(own_memory_kind(sharding))


def type_on_device(leaf: Any) -> Any:
    """A leaf; or, if it is on the host, its type on the device."""
    own, space = jax.typeof(leaf), jax.memory.Space.Device
    return leaf if own.memory_space is space else own.update(memory_space=space)


def on_device(leaf: Any) -> Any:
    """An array in the memory of the device; anything else as it is."""
    space = jax.memory.Space
    return jax.device_put(leaf, space.Device) if _is_in(space.Host, leaf) else leaf


def on_host(leaf: Any) -> Any:
    """An array in the memory of the host; anything else as it is."""
    space = jax.memory.Space
    return jax.device_put(leaf, space.Host) if _is_in(space.Device, leaf) else leaf


def _is_in(space: Any, leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.typeof(leaf).memory_space is space


def evaluate(
    closed: ClosedJaxpr, values: Sequence[Any], outputs: Iterable[int]
) -> list[Any]:
    """Evaluate a traced function on the device; `outputs` go to the host.

    An output that is an input stays where it is.
    """
    fetched = list(map(on_device, values))
    # Not jaxpr_as_fun, after which debug_nans checks nothing.
    after = eval_jaxpr(closed.jaxpr, closed.consts, *fetched)
    known = dict(zip(map(id, fetched), values, strict=True))
    for at in outputs:
        after[at] = on_host(known.get(id(after[at]), after[at]))
    return after


def call_on_device(
    call: Callable[[Sequence[tuple[Slot, Any]]], Any],
    given: Sequence[tuple[Slot, Any]],
) -> Any:
    """Call a function, not compiled, on arguments in the memory of the device.

    NNX objects hold them meanwhile; what was on the host goes back there.
    """

    def moved(move: Callable[[Any], Any], tree: Any) -> Any:
        return jax.tree.map(move, tree, is_leaf=is_object)

    def holds_offloaded(value: Any) -> bool:
        leaves = jax.tree.leaves(value, is_leaf=is_object)
        return any(_is_in(jax.memory.Space.Host, leaf) for leaf in leaves)

    nodes = objects_in([value for _, value in given])
    cells = [cell for cell in cells_of(nodes) if holds_offloaded(cell.read())]
    write_cells({cell: moved(on_device, cell.read()) for cell in cells})
    try:
        return call([(slot, moved(on_device, value)) for slot, value in given])
    finally:
        write_cells({cell: moved(on_host, cell.read()) for cell in cells})
