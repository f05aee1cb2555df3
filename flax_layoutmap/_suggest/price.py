"""The price of a candidate: time on the links, time of products, reads, and memory.

The collectives and products are those that `flm.pod.plan` estimates for other rules
(Shardy's passes, and the same reader).
"""

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence

from flax_layoutmap._core.topologies import GENERATIONS, Topology
from flax_layoutmap._suggest.candidate import Candidate
from flax_layoutmap._suggest.memory import peak_bytes
from flax_layoutmap._suggest.problem import Problem
from flax_layoutmap.pod._estimate import collectives_of
from flax_layoutmap.pod._placement import memory_of, seconds_bound
from flax_layoutmap.pod._records import Collective
from flax_layoutmap.pod._report import PodReport
from flax_layoutmap.pod._shardy import read

# What is assumed without a topology.
ASSUMED = GENERATIONS["v5p"]
# Both directions of a ring of links.
_LINKS = 2
# Of each collective, whatever its size.
_SECONDS_EACH = 2e-6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a step costs on one device; an attribute of a `Suggestion`.

    Attributes:
        link_seconds: the least time of the collectives, by the bandwidth of the links.
        compute_seconds: the least time of the matrix products.
        memory_seconds: the least time to read the arguments, and what the collectives
            work on, from memory.
        collectives: how many run in a step.
        sent_bytes: mesh axes (`"fsdp"`, `"data+fsdp"`) → bytes sent in a step.
        at_rest: role of the arguments (`"parameter"`, `"optimizer"`, `"data"`,
            `"other"`) → bytes.
        peak_bytes: an estimate of the most that is in use: the arguments, gradients,
            and activations that are kept; None where it was not computed.
    """

    link_seconds: float
    compute_seconds: float
    memory_seconds: float
    collectives: int
    sent_bytes: Mapping[str, int]
    at_rest: Mapping[str, int]
    peak_bytes: int | None = None

    @property
    def seconds(self) -> float:
        """The time on the links, and that of products or of reads, whichever is more.

        And 2 µs for each collective.
        """
        waits = self.collectives * _SECONDS_EACH
        work = max(self.compute_seconds, self.memory_seconds)
        return self.link_seconds + work + waits

    @property
    def total_sent_bytes(self) -> int:
        """Bytes sent in a step over all axes."""
        return sum(self.sent_bytes.values())

    @property
    def at_rest_bytes(self) -> int:
        """Bytes of all arguments."""
        return sum(self.at_rest.values())


def cost_of(
    collectives: Sequence[Collective],
    flops: int,
    at_rest: Mapping[str, int],
    sizes: Mapping[str, int],
    topology: Topology | None,
) -> Cost:
    """The cost of collectives and products."""
    sent: collections.Counter[str] = collections.Counter()
    for one in collectives:
        sent["+".join(one.axes) or "?"] += one.wire_bytes_per_step
    moved = sum(one.bytes * one.executions for one in collectives)
    read_bytes = sum(at_rest.values()) + moved
    chip = ASSUMED if topology is None else topology.generation
    if topology is None:
        assert ASSUMED.link_bytes_per_second is not None
        links = sum(sent.values()) / (_LINKS * ASSUMED.link_bytes_per_second)
    else:
        links = sum(seconds_bound(collectives, sizes, topology).values())
    return Cost(
        link_seconds=links,
        compute_seconds=flops / chip.flops,
        memory_seconds=read_bytes / chip.hbm_bytes_per_second,
        collectives=sum(one.executions for one in collectives),
        sent_bytes=dict(sent),
        at_rest=dict(at_rest),
    )


def cost_of_report(report: PodReport) -> Cost:
    """The cost of a plan or an estimate."""
    return cost_of(
        report.collectives,
        report.flops_per_device,
        report.memory.at_rest,
        report.mesh.axis_sizes,
        report.topology,
    )


class Pricer:
    """Prices the candidates of a problem, each once."""

    def __init__(self, problem: Problem, topology: Topology | None) -> None:
        self.problem = problem
        self.topology = topology
        self.count = 0
        self.of = functools.cache(self._of)
        self.peak_bytes = functools.cache(self._peak_bytes)
        # Memory is mostly asked for right after the price.
        self.lay_out = functools.lru_cache(maxsize=1)(problem.lay_out)

    def _of(self, candidate: Candidate) -> Cost:
        problem, self.count = self.problem, self.count + 1
        lowered, sizes = problem.lowered, problem.mesh.axis_sizes
        module = self.lay_out(candidate)
        attributes, on_tpus = problem.prepared.attributes, self.topology is not None
        found = read(module, attributes, lowered.state(), for_tpus=on_tpus)
        collectives = collectives_of(found, lowered, sizes, self.topology)
        at_rest = memory_of(found.arguments, lowered.leaves, None).at_rest
        return cost_of(collectives, found.flops, at_rest, sizes, self.topology)

    def _peak_bytes(self, candidate: Candidate) -> int:
        module = self.lay_out(candidate)
        at_rest = self.of(candidate).at_rest_bytes
        return at_rest + peak_bytes(module, self.problem.prepared.attributes)

    def with_peak(self, candidate: Candidate) -> Cost:
        """The cost with the peak of memory."""
        peak = self.peak_bytes(candidate)
        return dataclasses.replace(self.of(candidate), peak_bytes=peak)
