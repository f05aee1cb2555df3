"""The layouts that are considered, and the formula that ranks them.

Each axis of the mesh has one job: the batch alone (parameters are copied along it), the
batch and parameters (FSDP), or dims of parameters (tensor and expert parallelism).
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from flax_layoutmap._core.topologies import Generation
from flax_layoutmap._suggest.classes import Class, StepDims, groups_in

# The axes of each dim of an array.
Spec = tuple[tuple[str, ...], ...]

_FSDP, _DATA = "data + parameters", "data"
# The most choices of dims for an axis.
_MOST = 4
# A parameter is gathered forward and backward, and its gradient summed, for about its
# bytes each.
_GATHERS = 3
# The sum of an activation sends twice its bytes; about 4 of 7 products have one of
# their own, as gate and up share theirs.
_SUMS = 2 * 4 / 7
# Operations for a parameter and a token: 2 forward, 4 backward.
_FORWARD, _TRAINING = 2, 6


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """One layout of everything."""

    name: str  # what each axis does
    batch: tuple[str, ...]  # the axes that shard the batch
    placed: tuple[str, ...]  # those that shard classes of dims
    specs: tuple[Spec, ...]  # of each group of parameters
    outputs: tuple[Spec, ...]  # of each output


class Layouts:
    """The layouts of a step on a mesh."""

    def __init__(self, dims: StepDims, sizes: Mapping[str, int], chip: Generation):
        self.dims = dims
        self.sizes = {axis: size for axis, size in sizes.items() if size > 1}
        self.chip = chip
        # The class of most parameters.
        self.model_dim: Class = max(
            dims.classes, key=lambda nodes: len(groups_in(nodes)), default=frozenset()
        )
        shared = [nodes for nodes in dims.classes if len(groups_in(nodes)) > 1]
        self.shared: Class = frozenset().union(*shared)

    def parts(self, axes: Iterable[str]) -> int:
        """The number of parts that axes cut an array into."""
        return math.prod(self.sizes[axis] for axis in axes)

    # ------------------------------------------------------------------ candidates

    def bundles(self) -> dict[str, Class]:
        """Name → dims that an axis may shard at a time: no two of one parameter.

        A class with all others that share no parameter with it: heads, hidden units
        and the vocabulary are one bundle, as in Megatron.
        """
        others = [nodes for nodes in self.dims.classes if nodes != self.model_dim]
        useful = [
            nodes
            for nodes in others
            # A dim of one parameter and no output is indexed, by a loop or a lookup.
            if nodes & self.shared or any(kind == "output" for kind, *_ in nodes)
            # Parts of heads, where the heads themselves are a class.
            if not any(groups_in(nodes) < groups_in(other) for other in others)
        ]
        useful += [self.model_dim] if self.model_dim else []
        named: dict[Class, str] = {}
        for first in useful:
            nodes = first
            for other in useful:
                if not groups_in(nodes) & groups_in(other):
                    nodes |= other
            number, dim = min((n, dim) for kind, n, dim in first if kind == "group")
            path = self.dims.groups[number].paths[0].split("/")
            named.setdefault(nodes, f"dim {dim} of {'/'.join(path[-2:])}")
        return {name: nodes for nodes, name in [*named.items()][:_MOST]}

    def candidates(self) -> list[Candidate]:
        """Full sharding first, then every other layout once.

        Axes of equal sizes are alike: of layouts that exchange them one is returned.
        """
        bundles = self.bundles()
        jobs = [_FSDP, _DATA, *bundles]
        made: dict[object, Candidate] = {}
        for chosen in itertools.product(jobs, repeat=len(self.sizes)):
            alike = tuple(sorted(zip(self.sizes.values(), chosen, strict=True)))
            if alike not in made:
                of_axis = dict(zip(self.sizes, chosen, strict=True))
                made[alike] = self._candidate(of_axis, bundles)
        different: dict[object, Candidate] = {}
        for one in made.values():
            different.setdefault((one.batch, one.specs), one)
        full, *others = different.values()
        return [full, *(one for one in others if _axes_of(one) >= {*self.sizes})]

    def _candidate(
        self, jobs: Mapping[str, str], bundles: Mapping[str, Class]
    ) -> Candidate:
        placed = {axis: bundles[job] for axis, job in jobs.items() if job in bundles}
        wanted = [axis for axis in jobs if axis not in placed]
        batch = self._divisible(wanted, self.dims.data.values())
        stored = [axis for axis in wanted if jobs[axis] == _FSDP]
        axes_of: dict[str, list[str]] = {}
        for axis, job in jobs.items():
            is_batch = axis in batch or axis in placed
            axes_of.setdefault(job if is_batch else "parameters", []).append(axis)
        specs = []
        for number, group in enumerate(self.dims.groups):
            spec = self._placed("group", number, group.shape, batch, placed)
            if group.is_small:
                spec = ((),) * len(spec)
            elif not self._has_rows(number):
                for axis in stored:
                    spec = self._stored(number, spec, axis, stored)
            specs.append(spec)
        outputs = [
            self._placed("output", number, shape, batch, placed)
            for number, shape in enumerate(self.dims.outputs.values())
        ]
        name = ", ".join(f"{job} over {'+'.join(own)}" for job, own in axes_of.items())
        return Candidate(name, batch, tuple(placed), tuple(specs), tuple(outputs))

    def _has_rows(self, number: int) -> bool:
        """Whether parameters have a dim of the batch, such as a cache."""
        dims = range(len(self.dims.groups[number].shape))
        return any(("group", number, dim) in self.dims.batch for dim in dims)

    def _divisible(
        self, axes: Iterable[str], lengths: Iterable[int]
    ) -> tuple[str, ...]:
        """The axes, from the first on, that dims can be split over together."""
        some: tuple[str, ...] = ()
        for axis in axes:
            parts = self.parts((*some, axis))
            if lengths and not any(length % parts for length in lengths):
                some = (*some, axis)
        return some

    def _placed(
        self,
        kind: str,
        number: int,
        shape: Sequence[int],
        batch: tuple[str, ...],
        placed: Mapping[str, Class],
    ) -> Spec:
        """The axes of the batch and of classes on the dims that have them."""
        classes = [(axis, self.dims.batch) for axis in batch] + [*placed.items()]
        return tuple(
            self._divisible(
                [axis for axis, nodes in classes if (kind, number, dim) in nodes],
                [length],
            )
            for dim, length in enumerate(shape)
        )

    def _stored(
        self, number: int, spec: Spec, axis: str, stored: Sequence[str]
    ) -> Spec:
        """The spec with one more axis that stores parameters.

        On a dim without a class; if possible the model dim (the sums of gradients then
        send the least), else the longest, of equal ones the last.
        """
        shape = self.dims.groups[number].shape

        def rank(dim: int) -> tuple[bool, bool, int, int]:
            is_model_dim = ("group", number, dim) in self.model_dim
            return set(spec[dim]) <= set(stored), is_model_dim, shape[dim], dim

        for dim in sorted(range(len(spec)), key=rank, reverse=True):
            axes = (*spec[dim], axis)
            if shape[dim] % self.parts(axes) == 0:
                return (*spec[:dim], axes, *spec[dim + 1 :])
        return spec

    # ------------------------------------------------------------ bytes and seconds

    def device_bytes(self, candidate: Candidate) -> int:
        """Bytes of the state and, in training, of the gradients on one device."""
        total = self.dims.other_bytes
        for group, spec in zip(self.dims.groups, candidate.specs, strict=True):
            size = group.bytes * (1 + self.dims.is_training) + group.state_bytes
            total += size // self.parts(itertools.chain(*spec))
        return total

    def seconds(self, candidate: Candidate, flops: float) -> float:
        """About how long a step takes: its collectives, and its products or one read.

        `flops` are those of all devices. They tell how many tokens there are, and so
        the bytes of activations.
        """
        trains = self.dims.is_training
        counts = [
            0 if self._has_rows(number) else math.prod(group.shape) * len(group.paths)
            for number, group in enumerate(self.dims.groups)
        ]
        total = max(sum(counts), 1)
        rows = self.parts(candidate.batch)
        tokens = flops / (_TRAINING if trains else _FORWARD) / total / rows
        work = seconds = 0.0
        for number, spec in enumerate(candidate.specs):
            if not counts[number]:
                continue
            axes = [axis for dim in spec for axis in dim]
            along = [axis for axis in axes if axis in candidate.placed]
            stored = [axis for axis in axes if axis not in along]
            copied = [axis for axis in candidate.batch if axis not in stored]
            local = self.dims.groups[number].bytes / self.parts(along)
            work += counts[number] / self.parts(along)
            seconds += self._sending(local * (_GATHERS if trains else 1), stored)
            seconds += self._sending(2 * local / self.parts(stored), copied) * trains
            for axis in along:
                sums = tokens * self._summed(number, spec, axis)
                seconds += self._sending(sums, [axis])
        read = self.device_bytes(candidate) / self.chip.hbm_bytes_per_second
        return seconds + max(flops * work / total / rows / self.chip.flops, read)

    def _summed(self, number: int, spec: Spec, axis: str) -> float:
        """Bytes for a token of the activations that are summed along an axis.

        Those of a matrix, divided by its dims on the side of the axis: by the hidden
        units, or by the model dim. Stacked layers count for themselves.
        """
        group = self.dims.groups[number]
        dims = [
            (axes, ("group", number, dim), group.shape[dim])
            for dim, axes in enumerate(spec)
        ]
        on_model = any(axis in axes and n in self.model_dim for axes, n, _ in dims)
        inner = math.prod(
            size
            for axes, node, size in dims
            if (axes or node in self.shared) and (node in self.model_dim) == on_model
        )
        return _SUMS * group.bytes / inner / (1 if self.dims.is_training else 2)

    def _sending(self, size: float, axes: Sequence[str]) -> float:
        """Seconds to gather or to reduce an array of some bytes over axes."""
        parts = self.parts(axes)
        if parts == 1 or self.chip.link_bytes_per_second is None:
            return 0.0
        share = math.log(parts) / math.log(self.parts(self.sizes))
        links = 2 * max(1, round(share * self.chip.dims))
        return size * (1 - 1 / parts) / links / self.chip.link_bytes_per_second


def _axes_of(candidate: Candidate) -> set[str]:
    """The axes that shard parameters or the batch."""
    specs = (*candidate.specs, (candidate.batch,))
    return {axis for spec in specs for axes in spec for axis in axes}
