"""Offloaded leaves: arguments in the memory of the host.

The user's function is traced as if all of its arguments were in the memory of the
device. Its program fetches offloaded leaves where they are used, and returns those that
the rules keep there to the host.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal
from jax.sharding import NamedSharding

from flax_layoutmap._step.memory import on_device, on_host
from flax_layoutmap._step.scans import scan_by_layer, scans_any, without_copies
from flax_layoutmap._step.slices import find_regions


@dataclasses.dataclass(frozen=True, slots=True)
class Transfers:
    """What of a traced function is offloaded.

    Attributes:
        inputs: position of each offloaded input of state → its sharding.
        outputs: positions of the offloaded outputs.
        chunk_bytes: leaves with more bytes on one device are fetched in slices, where
            they are scanned or updated; inf for whole leaves.
    """

    inputs: Mapping[int, NamedSharding]
    outputs: tuple[int, ...]
    chunk_bytes: float

    def evaluate(self, closed: ClosedJaxpr, values: Sequence[Any]) -> list[Any]:
        """The outputs for these inputs; XLA schedules the transfers of whole leaves.

        Those outputs that are inputs stay where they are.
        """
        fetched = list(map(on_device, values))
        rows = self._row_bytes(closed)
        if rows and not closed.effects:
            after = self._in_slices(closed, values, fetched, rows)
        else:
            # Not jaxpr_as_fun, after which debug_nans checks nothing (jax 0.10.2).
            after = eval_jaxpr(closed.jaxpr, closed.consts, *fetched)
        known = dict(zip(map(id, fetched), values, strict=True))
        for at in self.outputs:
            after[at] = on_host(known.get(id(after[at]), after[at]))
        return after

    def _row_bytes(self, closed: ClosedJaxpr) -> dict[int, int]:
        """Position of each leaf larger than a chunk → bytes of a row on one device."""
        found: dict[int, int] = {}
        for at, sharding in self.inputs.items():
            aval: Any = closed.in_avals[at]
            shard = sharding.shard_shape(aval.shape)
            size = math.prod(shard) * aval.dtype.itemsize
            rows = aval.shape[0] if len(shard) > 1 else 1
            if rows > 1 and shard[:1] == (rows,) and size > self.chunk_bytes:
                found[at] = size // rows
        return found

    def _in_slices(
        self,
        closed: ClosedJaxpr,
        values: Sequence[Any],
        fetched: Sequence[Any],
        row_bytes: Mapping[int, int],
    ) -> list[Any]:
        """The outputs, where large leaves are scanned and updated in slices."""
        jaxpr = without_copies(closed.jaxpr)
        rows = {jaxpr.invars[at]: size for at, size in row_bytes.items()}
        parts = find_regions(jaxpr, rows, self.outputs, self.chunk_bytes)
        host = {jaxpr.invars[at]: on_host(values[at]) for at in row_bytes}
        known: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        known.update(zip(jaxpr.invars, fetched, strict=True))
        wanted = {*_variables(jaxpr.outvars)}
        wanted.update(v for eqn in jaxpr.eqns for v in _variables(eqn.invars))

        def evaluate(eqns: Iterable[JaxprEqn]) -> None:
            for scans, part in itertools.groupby(eqns, lambda e: scans_any(e, host)):
                if scans:
                    for eqn in part:
                        after = scan_by_layer(eqn, known, host)
                        known.update(zip(eqn.outvars, after, strict=True))
                else:
                    evaluate_whole(list(part))

        def evaluate_whole(eqns: list[JaxprEqn]) -> None:
            read = {v for eqn in eqns for v in _variables(eqn.invars)}
            inputs = [v for v in known if v in read]
            outputs = [v for eqn in eqns for v in eqn.outvars if v in wanted]
            part = jaxpr.replace(
                constvars=[],
                invars=inputs,
                outvars=outputs,
                eqns=eqns,
                debug_info=jaxpr.debug_info.with_unknown_names(),
            )
            after = eval_jaxpr(part, [], *map(known.__getitem__, inputs))
            known.update(zip(outputs, after, strict=True))

        evaluate(parts.before)
        for region in parts.regions:
            known.update(region.run(known, host))
        evaluate(parts.after)
        return [v.val if isinstance(v, Literal) else known[v] for v in jaxpr.outvars]


def _variables(values: Iterable[Any]) -> list[Any]:
    return [v for v in values if not isinstance(v, Literal)]
