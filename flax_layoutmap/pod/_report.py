"""PodReport: the result of a plan, with assertions for tests."""

import dataclasses
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flax_layoutmap._core.errors import LayoutError, bullet_list, did_you_mean
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._rules.files import mesh_to_json
from flax_layoutmap._show.table import human_bytes
from flax_layoutmap._show.terminal import Shown
from flax_layoutmap.pod import _report_text
from flax_layoutmap.pod._report_text import (
    KINDS,
    Collective,
    Engine,
    Kind,
    Memory,
)
from flax_layoutmap.pod._topologies import Topology

if TYPE_CHECKING:
    from rich.text import Text

# `expect` ignores collectives that send fewer bytes than this in a step, such as the
# mean of a loss or the norm of gradients.
_SMALL = 64 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class PodReport(Shown):
    """The collectives, memory and fit of a step on a mesh.

    Made by `flm.pod.plan` and `flm.pod.compile`.

    Attributes:
        engine: the source of the figures, `"libtpu"` or `"partitioner"` (XLA's).
        step: name of the step.
        mesh: the mesh, without devices.
        topology: the slices of the mesh, or None.
        fits: whether it fits according to libtpu; from the partitioner, False if the
            arguments alone are too large, else None.
        memory: bytes on one device.
        collectives: in the order of the program.
        flops_per_device: operations of the matrix products of a step, on one device.
        flops_total: the same for the whole step, before it is partitioned.
        compute_seconds: the minimum time for them; None without a topology.
        seconds_bound: axes (`"fsdp"`, `"data (DCN)"`) → minimum time of their
            collectives from bandwidth alone: no latency, no overlap.
        unread: part of the program that could not be read → number of occurrences.
        warnings: messages to read.
        paths: paths of all leaves of the arguments.
        took_seconds: wall-clock seconds of the plan.
    """

    __module__ = "flax_layoutmap.pod"
    engine: Engine
    step: str
    mesh: DeviceMesh
    topology: Topology | None = None
    fits: bool | None = None
    memory: Memory = dataclasses.field(default_factory=Memory)
    collectives: tuple[Collective, ...] = ()
    flops_per_device: int = 0
    flops_total: int = 0
    compute_seconds: float | None = None
    seconds_bound: Mapping[str, float] = dataclasses.field(default_factory=dict)
    unread: Mapping[str, int] = dataclasses.field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    paths: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    took_seconds: float = dataclasses.field(default=0.0, compare=False)

    # ------------------------------------------------------------------- output

    def _lines(self, width: int | None) -> "Iterable[Text]":
        return _report_text.lines(self, width)

    def __str__(self) -> str:
        return self.report()

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values, schema 2."""
        fields = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("mesh", "topology")
        }
        topology = None if self.topology is None else str(self.topology)
        plain = json.loads(json.dumps(fields, default=dataclasses.asdict))
        plain["memory"]["at_rest_bytes"] = self.memory.at_rest_bytes
        plain["memory"]["headroom_bytes"] = self.memory.headroom_bytes
        mesh = mesh_to_json(self.mesh)
        return {"schema": 2, "mesh": mesh, "topology": topology, **plain}

    def __repr__(self) -> str:
        sent = human_bytes(self.wire_bytes())
        return (
            f"<PodReport by {self.engine}: {self.step} on {self.mesh}, "
            f"{len(self.collectives)} collectives, {sent} sent per device>"
        )

    # ---------------------------------------------------------------- questions

    def wire_bytes(self, axis: str | None = None, kind: Kind | None = None) -> int:
        """Return the bytes that one device sends in a step.

        Args:
            axis: count only this mesh axis.
            kind: count only collectives of this kind.
        """
        self._check(axis, kind)
        return sum(
            collective.wire_bytes_per_step
            for collective in self.collectives
            if (axis is None or axis in collective.axes)
            and kind in (None, collective.kind)
        )

    def expect(
        self,
        *,
        axis: str,
        kinds: Collection[Kind] | Kind,
        small_bytes: int = _SMALL,
        allow_unread: bool = False,
    ) -> None:
        """Assert that exactly these kinds of collectives run over an axis.

        Collectives with unknown axes count for every axis.

        Args:
            axis: a mesh axis.
            kinds: for example `{"all-reduce"}`; `set()` for none.
            small_bytes: ignore collectives of the same kind and axes that together send
                less than this in a step.
            allow_unread: pass even if parts of the program could not be read.

        Raises:
            AssertionError: other kinds run over the axis, or an expected kind does not;
                or `report.unread` is not empty.
        """
        wanted = {kinds} if isinstance(kinds, str) else set(kinds)
        for kind in (None, *wanted):
            self._check(axis, kind)
        over = [each for each in self.collectives if _may_be_over(each, axis)]
        large = _large(over, small_bytes)
        other = [each for each in large if each.kind not in wanted]
        missing = sorted(wanted - {each.kind for each in large if axis in each.axes})
        lines = _report_text.lines_of(other)
        lines += [f"{kind}: expected, and none runs over it" for kind in missing]
        if lines:
            raise AssertionError(
                f"over axis {axis!r} of mesh {self.mesh} {self.step} was expected to "
                f"run {', '.join(sorted(wanted)) or 'no collectives'}:\n"
                f"{bullet_list(lines)}"
            )
        self._check_all_read(allow_unread)

    def forbid(
        self,
        *,
        path: str | None = None,
        kind: Kind | None = None,
        axis: str | None = None,
        small_bytes: int = 0,
        allow_unread: bool = False,
    ) -> None:
        """Assert that no collective matches.

        Collectives with unknown axes count for every axis.

        Args:
            path: regex, searched in the path of the leaf that is moved.
            kind: for example `"all-gather"`.
            axis: a mesh axis.
            small_bytes: as for `expect`.
            allow_unread: as for `expect`.

        Raises:
            AssertionError: a collective matches, or `report.unread` is not empty.
            LayoutError: no leaf matches the path, so the check would always pass.
        """
        given = {"path": path, "kind": kind, "axis": axis}
        what = ", ".join(f"{key}={value!r}" for key, value in given.items() if value)
        if not what:
            raise LayoutError(
                'forbid what? pass path="embed", kind="all-gather" or axis="tensor"'
            )
        self._check(axis, kind)
        pattern = None if path is None else self._pattern(path)
        some = [
            each
            for each in self.collectives
            if (axis is None or _may_be_over(each, axis))
            and kind in (None, each.kind)
            and (pattern is None or any(map(pattern.search, each.paths)))
        ]
        large = _large(some, small_bytes)
        if large:
            raise AssertionError(
                f"{self.step} on mesh {self.mesh} was to have no collective with "
                f"{what}:\n{bullet_list(_report_text.lines_of(large))}"
            )
        self._check_all_read(allow_unread)

    def compare(self, other: "PodReport") -> str:
        """Return a table that compares this report with another."""
        return _report_text.comparison(self, other)

    # ------------------------------------------------------------------- checks

    def _check(self, axis: str | None, kind: str | None) -> None:
        """Raise LayoutError for an axis or a kind that does not exist."""
        names: Sequence[str] = self.mesh.axis_names
        if axis is not None and axis not in names:
            raise LayoutError(
                f"the mesh {self.mesh} has no axis {axis!r}{did_you_mean(axis, names)}"
            )
        if kind is not None and kind not in KINDS:
            raise LayoutError(
                f"there is no collective {kind!r}{did_you_mean(kind, KINDS)}; the "
                f"kinds are {', '.join(KINDS)}"
            )

    def _pattern(self, path: str) -> re.Pattern[str]:
        """Compile a pattern of paths; raises LayoutError if it matches no argument."""
        try:
            pattern = re.compile(path)
        except re.error as error:
            raise LayoutError(
                f"path={path!r} is not a regular expression: {error}"
            ) from error
        if self.paths and not any(map(pattern.search, self.paths)):
            parts = {part for leaf in self.paths for part in (leaf, *leaf.split("/"))}
            raise LayoutError(
                f"no argument of {self.step} matches path={path!r}"
                f"{did_you_mean(path, parts)}; the check would always pass"
            )
        return pattern

    def _check_all_read(self, allow_unread: bool) -> None:
        """Raise AssertionError if a part of the program was not read."""
        if self.unread and not allow_unread:
            parts = [f"{part} ({times})" for part, times in self.unread.items()]
            raise AssertionError(
                f"no violation found in {self.step} on mesh {self.mesh}, but parts of "
                f"the program could not be read:\n{bullet_list(parts)}\n"
                "pass allow_unread=True to ignore them"
            )


def _may_be_over(collective: Collective, axis: str) -> bool:
    """Whether a collective may run over an axis: its axes may be unknown."""
    return not collective.axes or axis in collective.axes


def _large(some: Iterable[Collective], small_bytes: int) -> list[Collective]:
    """Collectives whose kind and axes send at least `small_bytes` in a step."""
    some = list(some)
    sums = _report_text.sums_by(some, lambda each: (each.kind, each.axes))
    return [each for each in some if sums[each.kind, each.axes][2] >= small_bytes]
