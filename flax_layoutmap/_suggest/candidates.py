"""The layouts that are considered, and the formula that ranks them.

Each axis of the mesh has one job: the batch alone (parameters are copied along it), the
batch and parameters (FSDP), or dims of parameters (tensor and expert parallelism).
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from flax_layoutmap._core.topologies import Generation
from flax_layoutmap._suggest.classes import ALONE, ROWS, Group, Output, StepDims

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

    def __init__(
        self, dims: StepDims, sizes: Mapping[str, int], chip: Generation, slices: int
    ) -> None:
        self.dims = dims
        self.sizes = {axis: size for axis, size in sizes.items() if size > 1}
        self.chip = chip
        self.between: list[str] = []  # the axes that go over the slices
        for axis in self.sizes:
            if self.parts(self.between) < slices:
                self.between.append(axis)
        self.groups_of = {
            number: {at for at, g in enumerate(dims.groups) if number in g.classes}
            for group in dims.groups
            for number in group.classes
            if number not in (ALONE, ROWS)
        }
        # The class of most parameters.
        self.model_dim = max(
            self.groups_of, key=lambda c: len(self.groups_of[c]), default=ALONE
        )

    def is_shared(self, number: int) -> bool:
        """Whether a class has dims of several groups."""
        return len(self.groups_of.get(number, ())) > 1

    def parts(self, axes: Iterable[str]) -> int:
        """The number of parts that axes cut an array into."""
        return math.prod(self.sizes[axis] for axis in axes)

    # ------------------------------------------------------------------ candidates

    def bundles(self) -> dict[str, set[int]]:
        """Name → classes that an axis may shard at a time: no two of one parameter.

        A class with all others that share no parameter with it: heads, hidden units
        and the vocabulary are one bundle, as in Megatron.
        """
        groups = self.dims.groups
        others = {c: own for c, own in self.groups_of.items() if c != self.model_dim}
        useful = [
            number
            for number, own in others.items()
            # A dim of one parameter and no output is indexed, by a loop or a lookup.
            if self.is_shared(number)
            or any(number in output.classes for output in self.dims.outputs)
            # Parts of heads, where the heads themselves are a class.
            if not any(own < theirs for theirs in others.values())
        ]
        useful.sort(key=lambda c: -sum(groups[at].bytes for at in others[c]))
        useful += [self.model_dim] if self.model_dim != ALONE else []
        named: dict[frozenset[int], str] = {}
        for first in useful:
            some, taken = {first}, {*self.groups_of[first]}
            for other in useful:
                if not taken & self.groups_of[other]:
                    some, taken = some | {other}, taken | self.groups_of[other]
            group = groups[min(self.groups_of[first])]
            path = "/".join(group.paths[0].split("/")[-2:])
            name = f"dim {group.classes.index(first)} of {path}"
            named.setdefault(frozenset(some), name)
        return {name: {*some} for some, name in [*named.items()][:_MOST]}

    def fully_sharded(self) -> list[Candidate]:
        """Each parameter over all axes, along the model dim, and along its longest."""
        jobs = dict.fromkeys(self.sizes, _FSDP)
        by_length = self._candidate(jobs, {}, by_length=True)
        full = self._candidate(jobs, {})
        name = f"{by_length.name}, longest dims"
        other = dataclasses.replace(by_length, name=name)
        return [full] if by_length == full else [full, other]

    def candidates(self) -> list[Candidate]:
        """Every layout but full sharding, once.

        Axes of equal sizes are alike, within slices and between them: of layouts that
        exchange them one is returned.
        """
        bundles = self.bundles()
        jobs = [_FSDP, _DATA, *bundles]
        made: dict[object, Candidate] = {}
        for chosen in itertools.product(jobs, repeat=len(self.sizes)):
            of_axis = dict(zip(self.sizes, chosen, strict=True))
            alike = tuple(
                sorted(
                    (axis in self.between, self.sizes[axis], job)
                    for axis, job in of_axis.items()
                )
            )
            if alike not in made:
                made[alike] = self._candidate(of_axis, bundles)
        different: dict[object, Candidate] = {}
        for one in made.values():
            different.setdefault((one.batch, one.specs), one)
        _, *others = different.values()
        return [one for one in others if _axes_of(one) >= {*self.sizes}]

    def _candidate(
        self,
        jobs: Mapping[str, str],
        bundles: Mapping[str, set[int]],
        by_length: bool = False,
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
        for group in self.dims.groups:
            spec = self._placed(group, batch, placed)
            if group.is_small:
                spec = ((),) * len(spec)
            elif ROWS not in group.classes:
                for axis in stored:
                    spec = self._stored(group, spec, axis, stored, by_length)
            specs.append(spec)
        outputs = [self._placed(output, batch, placed) for output in self.dims.outputs]
        name = ", ".join(f"{job} over {'+'.join(own)}" for job, own in axes_of.items())
        return Candidate(name, batch, tuple(placed), tuple(specs), tuple(outputs))

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
        array: Group | Output,
        batch: tuple[str, ...],
        placed: Mapping[str, set[int]],
    ) -> Spec:
        """The axes of the batch and of classes on the dims that have them."""
        spec: list[tuple[str, ...]] = []
        for size, number in zip(array.shape, array.classes, strict=True):
            axes = [axis for axis, classes in placed.items() if number in classes]
            wanted = batch if number == ROWS else axes
            used = {axis for dim in spec for axis in dim}  # an axis shards one dim
            spec.append(self._divisible([a for a in wanted if a not in used], [size]))
        return tuple(spec)

    def _stored(
        self,
        group: Group,
        spec: Spec,
        axis: str,
        stored: Sequence[str],
        by_length: bool,
    ) -> Spec:
        """The spec with one more axis that stores parameters.

        On a dim without a class; if possible the model dim (the sums of gradients then
        send the least), else the longest, of equal ones the last.
        """
        shape = group.shape

        def rank(dim: int) -> tuple[bool, bool, int, int]:
            is_free = set(spec[dim]) <= set(stored)
            is_best = not by_length and group.classes[dim] == self.model_dim
            return is_free, is_best, shape[dim], dim

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
            math.prod(g.shape) * len(g.paths) * (ROWS not in g.classes)
            for g in self.dims.groups
        ]
        total = max(sum(counts), 1)
        rows = self.parts(candidate.batch)
        tokens = flops / (_TRAINING if trains else _FORWARD) / total / rows
        work = seconds = 0.0
        each = zip(self.dims.groups, counts, candidate.specs, strict=True)
        for group, count, spec in each:
            if not count:
                continue
            axes = [axis for dim in spec for axis in dim]
            along = [axis for axis in axes if axis in candidate.placed]
            stored = [axis for axis in axes if axis not in along]
            copied = [axis for axis in candidate.batch if axis not in stored]
            local = group.bytes / self.parts(along)
            work += count / self.parts(along)
            seconds += self._sending(local * (_GATHERS if trains else 1), stored)
            seconds += self._sending(2 * local / self.parts(stored), copied) * trains
            for axis in along:
                sums = tokens * self._summed(group, spec, axis)
                seconds += self._sending(sums, [axis])
        read = self.device_bytes(candidate) / self.chip.hbm_bytes_per_second
        return seconds + max(flops * work / total / rows / self.chip.flops, read)

    def _summed(self, group: Group, spec: Spec, axis: str) -> float:
        """Bytes for a token of the activations that are summed along an axis.

        Those of a matrix, divided by its dims on the side of the axis: by the hidden
        units, or by the model dim. Stacked layers count for themselves.
        """
        dims = [*zip(spec, group.classes, group.shape, strict=True)]
        on_model = any(axis in axes and c == self.model_dim for axes, c, _ in dims)
        inner = math.prod(
            size
            for axes, c, size in dims
            if (axes or self.is_shared(c)) and (c == self.model_dim) == on_model
        )
        return _SUMS * group.bytes / inner / (1 if self.dims.is_training else 2)

    def _sending(self, size: float, axes: Sequence[str]) -> float:
        """Seconds to gather or to reduce an array of some bytes over axes."""
        parts = self.parts(axes)
        if not {*axes}.isdisjoint(self.between):
            return size * (1 - 1 / parts) / (self.chip.dcn_bytes_per_second or math.inf)
        if parts == 1 or self.chip.link_bytes_per_second is None:
            return 0.0
        share = math.log(parts) / math.log(self.parts(self.sizes))
        links = 2 * max(1, round(share * self.chip.dims))
        return size * (1 - 1 / parts) / links / self.chip.link_bytes_per_second


def _axes_of(candidate: Candidate) -> set[str]:
    """The axes that shard parameters or the batch."""
    specs = (*candidate.specs, (candidate.batch,))
    return {axis for spec in specs for axes in spec for axis in axes}
