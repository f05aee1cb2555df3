"""Candidate layouts, the formula that ranks them, and their rules.

Each mesh axis has a job: it shards only the batch (parameters are copied along it), the
batch and parameters (FSDP), or dims of parameters (tensor and expert parallelism).
"""

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._suggest.classes import ALONE, ROWS, Arrays, StepDims
from flax_layoutmap.convert._compress import compress
from flax_layoutmap.pod._topologies import Generation

Axes = tuple[str, ...]
Spec = tuple[Axes, ...]  # the axes of each dim of an array


class Job(NamedTuple):
    """The job of a mesh axis."""

    name: str
    classes: frozenset[int] = frozenset()  # classes of dims that it shards


Jobs = Mapping[str, Job]  # axis → its job
_FSDP, _DATA = Job("data + parameters"), Job("data")
_MOST = 4  # most choices of classes for an axis
# A parameter is gathered twice and its gradient summed: about its bytes each time.
_GATHERS = 3
# A sum sends an activation twice; 4 of 7 products have a sum (gate and up share it).
_SUMS = 2 * 4 / 7
# Operations per parameter and token: 2 forward, 4 backward.
_FORWARD, _TRAINING = 2, 6


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A layout of the whole step."""

    name: str  # the jobs of the axes
    batch: Axes  # axes that shard the batch
    placed: Axes  # axes that shard classes of dims
    specs: tuple[Spec, ...]  # of the parameters
    outputs: tuple[Spec, ...]


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
        self.members: dict[int, set[int]] = {}  # class → positions of its parameters
        for position, arrays in enumerate(dims.parameters):
            for number in sorted({*arrays.classes} - {ALONE, ROWS}):
                self.members.setdefault(number, set()).add(position)
        # The class that most parameters have.
        self.model_dim = max(
            self.members, key=lambda n: len(self.members[n]), default=ALONE
        )

    def parts(self, axes: Iterable[str]) -> int:
        """The number of parts into which axes split an array."""
        return math.prod(self.sizes[axis] for axis in axes)

    def bundles(self) -> list[Job]:
        """Bundles of classes that an axis may shard together.

        Classes of a bundle share no parameters: heads, hidden units and the vocabulary
        are a bundle, as in Megatron.
        """
        parameters, members = self.dims.parameters, self.members
        others = {n: at for n, at in members.items() if n != self.model_dim}
        useful = [
            number
            for number, positions in others.items()
            # A dim of a single parameter and no output is only indexed (loop, lookup).
            if len(positions) > 1
            or any(number in output.classes for output in self.dims.outputs)
            # Skip parts of heads if the heads are a class.
            if not any(positions < wider for wider in others.values())
        ]
        useful.sort(key=lambda n: -sum(parameters[at].bytes for at in others[n]))
        useful += [self.model_dim] if self.model_dim != ALONE else []
        named: dict[frozenset[int], str] = {}
        for first in useful:
            bundle, taken = {first}, {*members[first]}
            for other in useful:
                if not taken & members[other]:
                    bundle, taken = bundle | {other}, taken | members[other]
            arrays = parameters[min(members[first])]
            path = "/".join(arrays.paths[0].split("/")[-2:])
            name = f"dim {arrays.classes.index(first)} of {path}"
            named.setdefault(frozenset(bundle), name)
        return [Job(name, bundle) for bundle, name in named.items()][:_MOST]

    def fully_sharded(self) -> list[Candidate]:
        """Each parameter over all axes, along the model dim or its longest dim."""
        jobs = dict.fromkeys(self.sizes, _FSDP)
        full, other = self._candidate(jobs), self._candidate(jobs, by_length=True)
        return [full, dataclasses.replace(other, name=f"{full.name}, longest dims")]

    def candidates(self) -> list[Candidate]:
        """Every layout except full sharding; only one if equal axes are exchanged."""
        alike: set[object] = set()
        different: dict[object, Candidate] = {}
        choices = [_FSDP, _DATA, *self.bundles()]
        for chosen in itertools.product(choices, repeat=len(self.sizes)):
            jobs = dict(zip(self.sizes, chosen, strict=True))
            kinds = [(a in self.between, self.sizes[a], jobs[a].name) for a in jobs]
            if (key := tuple(sorted(kinds))) not in alike:
                alike.add(key)
                candidate = self._candidate(jobs)
                different.setdefault((candidate.batch, candidate.specs), candidate)
        _, *others = different.values()
        flat = itertools.chain.from_iterable
        # Each axis must shard the batch or parameters.
        return [c for c in others if {*self.sizes} <= {*c.batch, *flat(flat(c.specs))}]

    def _candidate(self, jobs: Jobs, by_length: bool = False) -> Candidate:
        lengths, batch = self.dims.data.values(), ()
        placed = tuple(axis for axis, job in jobs.items() if job.classes)
        for axis in jobs:
            parts = self.parts((*batch, axis))
            if axis not in placed and lengths and not any(n % parts for n in lengths):
                batch = (*batch, axis)
        axes_of: dict[str, list[str]] = {}
        for axis, job in jobs.items():
            is_used = axis in batch or axis in placed
            axes_of.setdefault(job.name if is_used else "parameters", []).append(axis)
        name = ", ".join(f"{job} over {'+'.join(a)}" for job, a in axes_of.items())
        spec_of = functools.partial(self._spec, jobs, batch, by_length)
        specs = tuple(map(spec_of, self.dims.parameters))
        outputs = tuple(map(spec_of, self.dims.outputs))
        return Candidate(name, batch, placed, specs, outputs)

    def _spec(self, jobs: Jobs, batch: Axes, by_length: bool, arrays: Arrays) -> Spec:
        """The axes of each dim: first the axes of classes, then FSDP axes.

        FSDP axes go on dims without a class: if possible on the model dim (gradient
        sums then send the least), else on the longest dim, the last if equal.
        """
        shape, classes = arrays.shape, arrays.classes
        spec: list[Axes] = [()] * len(shape)

        def rank(dim: int) -> tuple[bool, bool, int, int]:
            is_free = all(jobs[axis] == _FSDP for axis in spec[dim])
            is_best = not by_length and classes[dim] == self.model_dim
            return is_free, is_best, shape[dim], dim

        for axis in sorted(jobs, key=lambda axis: not jobs[axis].classes):
            wanted = {ROWS} if axis in batch else jobs[axis].classes
            dims = [dim for dim, number in enumerate(classes) if number in wanted]
            is_parameter = arrays.section == "rules" and ROWS not in classes
            if is_parameter and jobs[axis] == _FSDP:
                dims = sorted(range(len(shape)), key=rank, reverse=True)
            for dim in dims if not arrays.is_small else ():
                if shape[dim] % self.parts((*spec[dim], axis)) == 0:
                    spec[dim] = (*spec[dim], axis)
                    break
        return tuple(spec)

    def device_bytes(self, candidate: Candidate) -> int:
        """Bytes of the state and, in training, of the gradients on one device."""
        total = 0
        for arrays, spec in zip(self.dims.parameters, candidate.specs, strict=True):
            size = arrays.bytes * (1 + self.dims.is_training) + arrays.state_bytes
            total += size // self.parts(itertools.chain(*spec))
        return total

    def seconds(self, candidate: Candidate, flops: float) -> float:
        """Estimated time of a step; the `flops` of all devices determine its tokens."""
        trains = self.dims.is_training
        each = [
            (arrays, math.prod(arrays.shape) * len(arrays.paths), spec)
            for arrays, spec in zip(self.dims.parameters, candidate.specs, strict=True)
            if arrays.bytes and ROWS not in arrays.classes
        ]
        total = max(sum(count for _, count, _ in each), 1)
        rows = self.parts(candidate.batch)
        tokens = flops / (_TRAINING if trains else _FORWARD) / total / rows
        work = seconds = 0.0
        for arrays, count, spec in each:
            axes = [axis for dim in spec for axis in dim]
            along = [axis for axis in axes if axis in candidate.placed]
            stored = [axis for axis in axes if axis not in along]
            copied = [axis for axis in candidate.batch if axis not in stored]
            local = arrays.bytes / self.parts(along)
            work += count / self.parts(along)
            seconds += self._sending(local * (_GATHERS if trains else 1), stored)
            seconds += self._sending(2 * local / self.parts(stored), copied) * trains
            for axis in along:
                sums = tokens * self._summed(arrays, spec, axis)
                seconds += self._sending(sums, [axis])
        read = self.device_bytes(candidate) / self.chip.hbm_bytes_per_second
        return seconds + max(flops * work / total / rows / self.chip.flops, read)

    def _summed(self, arrays: Arrays, spec: Spec, axis: str) -> float:
        """Bytes per token of the activations that are summed along an axis.

        For a matrix these are its bytes divided by the dims on the side of the axis;
        stacked layers count each.
        """
        dims = [*zip(spec, arrays.classes, arrays.shape, strict=True)]
        on_model = any(axis in axes and c == self.model_dim for axes, c, _ in dims)
        shared = {number for number, at in self.members.items() if len(at) > 1}
        inner = math.prod(
            size
            for axes, c, size in dims
            if (axes or c in shared) and (c == self.model_dim) == on_model
        )
        return _SUMS * arrays.bytes / inner / (1 if self.dims.is_training else 2)

    def _sending(self, size: float, axes: Sequence[str]) -> float:
        """Seconds to gather or reduce an array of `size` bytes over axes."""
        parts = self.parts(axes)
        if not {*axes}.isdisjoint(self.between):
            return size * (1 - 1 / parts) / (self.chip.dcn_bytes_per_second or math.inf)
        if parts == 1 or self.chip.link_bytes_per_second is None:
            return 0.0
        share = math.log(parts) / math.log(self.parts(self.sizes))
        links = 2 * max(1, round(share * self.chip.dims))
        return size * (1 - 1 / parts) / links / self.chip.link_bytes_per_second


# ------------------------------------------------------------------------- rules


def rules_of(dims: StepDims, candidate: Candidate, mesh: DeviceMesh) -> LayoutMap:
    """Make a few rules for a layout."""
    rules = LayoutMap(mesh, batch=candidate.batch)
    if not any(map(any, candidate.specs)):
        rules[".*"] = None
    else:
        patterns = compress(_specs_of_paths(dims, candidate))
        rules.update({p: _entries(spec) for p, spec in patterns.items() if spec != ()})
    modules: dict[str, Spec] = {}
    for output, spec in zip(dims.outputs, candidate.outputs, strict=True):
        if output.section == "names":
            rules.names[re.escape(output.paths[0])] = _entries(spec) or (...,)
        else:
            modules[output.paths[0]] = spec
    rules.activations.update(_activations(modules, candidate.batch))
    return rules


def _specs_of_paths(dims: StepDims, candidate: Candidate) -> dict[str, Spec]:
    """Path → spec; `()` for small parameters, which need no rule.

    Paths do not start with the name of the argument, which `flm.create` and optimizer
    state do not have, unless parameters with equal paths in two arguments differ.
    """
    specs: dict[str, Spec] = {
        path: () if arrays.is_small else spec
        for arrays, spec in zip(dims.parameters, candidate.specs, strict=True)
        for path in arrays.paths
    }
    inner = collections.defaultdict(set)
    for path, spec in specs.items():
        inner[path.partition("/")[2]].add(spec)
    inner[""] = set()  # the path of an argument that is a bare array
    return {
        end if len(inner[end := path.partition("/")[2]]) == 1 else path: spec
        for path, spec in specs.items()
    }


def _activations(modules: Mapping[str, Spec], batch: Axes) -> dict[str, Any]:
    """Pattern → layout of outputs: one pattern if only rows are split, or by layer."""
    if not modules or not batch:
        return {}
    if all(spec and spec[0] and not any(spec[1:]) for spec in modules.values()):
        return {".*": (batch, ...)}
    entries = {p: _entries(s) if _is_layer(p) else None for p, s in modules.items()}
    return {p: value for p, value in compress(entries).items() if value is not None}


def _is_layer(path: str) -> bool:
    is_inside = re.search(r"\d/", path) is not None
    return bool(path) and not is_inside and (path.count("/") < 2 or path[-1].isdigit())


def _entries(spec: Spec) -> Any:
    """The entries of a layout; None: replicated."""
    if not any(spec):
        return None
    return tuple(axes[0] if len(axes) == 1 else axes or None for axes in spec)
