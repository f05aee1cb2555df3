"""What a loss changes in the NNX objects of its arguments, for `flm.accumulate`."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Jaxpr

from flax_layoutmap._core.errors import StructureError
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._step.arguments import (
    Argument,
    first_four,
    leaves_with_owners,
    strong,
)
from flax_layoutmap._step.refusals import named_parts
from flax_layoutmap._tree.graph import Graph
from flax_layoutmap._tree.jaxprs import inner_jaxprs

# Of some leaves of the arguments: position → value.
_Leaves = dict[int, Any]


class Changes:
    """The changes in NNX objects since this was made; they are those of `rebuilt`."""

    def __init__(
        self,
        arguments: Sequence[Argument],
        objects: Sequence[Sequence[Any]],
        positions: Sequence[int],
    ) -> None:
        """Note what is there."""
        self._arguments, self._positions = arguments, positions
        self._named = [
            (argument.name, node)
            for argument, own in zip(arguments, objects, strict=True)
            for node in own
        ]
        self._paths = {path for path, _ in named_parts(self._named)}
        self._before = self._graph()

    def _graph(self) -> Graph:
        return Graph([node for _, node in self._named])

    def by_kind(self, *, may_differ: bool) -> tuple[_Leaves, _Leaves, _Leaves]:
        """The changed floating-point leaves, other leaves, and keys of random numbers.

        Raises:
            StructureError: the structure, or a dtype, has changed; or, if devices may
                differ, integers that do not count random numbers.
        """
        before, after = self._before, self._graph()
        if not after.is_like(before):
            now = {path for path, _ in named_parts(self._named)}
            differing = sorted(self._paths ^ now)
            raise StructureError(
                "accumulate: the loss changes the structure of its arguments"
                f"{': ' * bool(differing)}{first_four(differing)}; a loop has one "
                "structure: return such a value, with has_aux=True"
            )
        numbers: _Leaves = {}
        counts: _Leaves = {}
        keys: _Leaves = {}
        for at, old, new, holder in zip(
            self._positions, before.leaves, after.leaves, before.holders, strict=True
        ):
            owner, _ = holder or (None, 0)
            if new is old:
                continue
            if new.dtype != old.dtype:
                raise StructureError(
                    f"accumulate: the loss changes {_path(self._arguments, at)} from "
                    f"{old.dtype} to {new.dtype}, and a loop has one dtype: write what "
                    f"it has, x.astype({str(old.dtype)!r})"
                )
            if isinstance(owner, nnx.RngKey):
                keys[at] = new
            elif jnp.issubdtype(new.dtype, jnp.inexact):
                numbers[at] = strong(new)
            elif isinstance(owner, nnx.RngCount) or not may_differ:
                counts[at] = strong(new)
            else:
                raise StructureError(
                    f"accumulate: the loss changes {_path(self._arguments, at)} "
                    f"{show_shape(new.shape)} {new.dtype}, of which each device would "
                    "have another value: return what changes, with has_aux=True, or "
                    "reduce in each micro-batch, axes=()"
                )
        return numbers, counts, keys


def check_keys(
    arguments: Sequence[Argument], keys: Mapping[int, Any], jaxpr: Jaxpr
) -> None:
    """Raise StructureError where the loss makes a key, which would be lost.

    `keys` are those that it changes: position → variable of its jaxpr. Flax's
    transformations return keys, too, which its layers only read.
    """
    calls = (eqn for eqn in jaxpr.eqns if inner_jaxprs(eqn))
    returned = {*jaxpr.invars, *(var for eqn in calls for var in eqn.outvars)}
    new = [_path(arguments, at) for at, var in keys.items() if var not in returned]
    if new:
        raise StructureError(
            f"accumulate: the loss changes {first_four(new)}, a key that each "
            "micro-batch folds with its number: call nnx.reseed before accumulate"
        )


def _path(arguments: Sequence[Argument], at: int) -> str:
    argument, index, _ = list(leaves_with_owners(arguments))[at]
    return argument.path(index)
