"""Offloaded leaves: state that the rules keep in the memory of the host.

The user's function is traced as if all of its state were in the memory of the device.
Its program fetches offloaded leaves where they are used, and returns them to the host.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding

from flax_layoutmap._core.layout import is_offloaded, own_memory_kind


def is_on_host(sharding: Any) -> bool:
    """Whether a sharding is in another memory than that of the device."""
    return is_offloaded(own_memory_kind(sharding))


def in_device_memory(sharding: Any) -> Any:
    """The sharding in the memory of the device."""
    if not is_on_host(sharding):
        return sharding
    return NamedSharding(sharding.mesh, sharding.spec)


@dataclasses.dataclass(frozen=True, slots=True)
class Transfers:
    """The inputs and outputs of a traced function that are offloaded, by position."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def evaluate(self, closed: ClosedJaxpr, values: Sequence[Any]) -> list[Any]:
        """The outputs for these inputs; XLA schedules the transfers of the leaves.

        Those outputs that are inputs stay where they are. `out_shardings` of the
        program move the others to the host.
        """
        fetched = list(values)
        for at in self.inputs:
            fetched[at] = jax.device_put(values[at], jax.memory.Space.Device)
        # Not jaxpr_as_fun, after which debug_nans checks nothing (jax 0.10.2).
        after = eval_jaxpr(closed.jaxpr, closed.consts, *fetched)
        known = {id(fetched[at]): values[at] for at in self.inputs}
        for at in self.outputs:
            after[at] = known.get(id(after[at]), after[at])
        return after
