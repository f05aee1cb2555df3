"""Compare two Resolutions: the changes, and the bytes that devices receive."""

import difflib
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from flax_layoutmap._core.grid import Placement, received
from flax_layoutmap._show.diff import ROLES, ResolutionDiff
from flax_layoutmap._show.snapshot import (
    SECTIONS,
    LeafChange,
    LeafRecord,
    MeshShape,
    Snapshot,
    mesh_text,
    rule_text,
)
from flax_layoutmap._tree.paths import natural_key


def difference(before: Snapshot, after: Snapshot) -> ResolutionDiff:
    """Compare what two Resolutions decided."""
    paths = sorted({**before.leaves, **after.leaves}, key=natural_key)
    costs = _Costs(before, after)
    found = [
        _compare(path, before.leaves.get(path), after.leaves.get(path), costs)
        for path in paths
    ]
    changes = tuple(one for one in found if one is not None)
    axes = [mesh.axes for mesh in (before.mesh, after.mesh) if mesh is not None]
    return ResolutionDiff(
        mesh=(mesh_text(before.mesh, after.mesh), mesh_text(after.mesh, before.mesh)),
        rules=tuple(_rules(before.rules, after.rules)),
        changes=changes,
        unchanged=len(paths) - len(changes),
        bytes_per_device={
            role: (_held(before, role), _held(after, role)) for role in ROLES
        },
        received_bytes=costs.total(),
        assumption=costs.assumption,
        axes=tuple(dict.fromkeys(itertools.chain(*axes))),
    )


def _held(some: Snapshot, role: str) -> int:
    leaves = some.leaves.values()
    return sum(leaf.bytes_per_device for leaf in leaves if leaf.role == role)


def _compare(
    path: str, before: LeafRecord | None, after: LeafRecord | None, costs: "_Costs"
) -> LeafChange | None:
    if before is None:
        return LeafChange(path, "added", before, after)
    if after is None:
        return LeafChange(path, "removed", before, after)
    if (before.shape, before.dtype) != (after.shape, after.dtype):
        return LeafChange(path, "reshaped", before, after)
    each = costs.of(before, after)
    if each is None and _place(before) != _place(after):
        return LeafChange(path, "moved", before, after, None, None)
    if each is not None and (each.any() or _place(before) != _place(after)):
        costs.add(each)
        return LeafChange(
            path, "moved", before, after, int(each.max()), int(each.sum())
        )
    if _why(before) != _why(after):
        return LeafChange(path, "decided", before, after)
    return None


def _place(leaf: LeafRecord) -> tuple[Any, ...]:
    return leaf.dims, leaf.shard_shape, leaf.memory_kind


def _why(leaf: LeafRecord) -> tuple[Any, ...]:
    return leaf.role, leaf.reason, leaf.pattern, leaf.owner, leaf.fallback


class _Costs:
    """What each device has to be sent, leaf by leaf and in all."""

    def __init__(self, before: Snapshot, after: Snapshot) -> None:
        self.same: list[int] | None = None
        self.sum = np.zeros(0, np.int64)
        self.known: dict[Any, np.ndarray] = {}
        if before.mesh is None or after.mesh is None:
            self.assumption = "without a mesh before and after, nothing is counted"
            return
        self.sum = np.zeros(math.prod(after.mesh.shape), np.int64)
        if before.devices is not None and after.devices is not None:
            at = {device: n for n, device in enumerate(before.devices)}
            self.same = [at.get(device, -1) for device in after.devices]
            self.assumption = "devices are told apart by their ids"
        else:
            self.assumption = (
                "device n of the one mesh is device n of the other, row by row"
            )
        self.assumption += (
            "; a device keeps what its old and its new shard have in common, one that "
            "is new holds nothing; added and reshaped leaves are not counted"
        )

    def of(self, before: LeafRecord, after: LeafRecord) -> np.ndarray | None:
        """Bytes per device of the mesh after; None where there is a mesh missing."""
        old, new = before.mesh, after.mesh
        if old is None or new is None or after.shard_shape is None:
            return None
        shard = math.prod(after.shard_shape)
        itemsize = after.bytes_per_device // shard if shard else 0
        if before.memory_kind != after.memory_kind:
            return np.full(math.prod(new.shape), shard * itemsize)
        key = (before.shape, old, before.dims, new, after.dims)
        if key not in self.known:
            self.known[key] = received(
                before.shape,
                _placement(before.dims, old),
                _placement(after.dims, new),
                self.same,
            )
        return self.known[key] * itemsize

    def add(self, each: np.ndarray) -> None:
        """Add a leaf; one on a smaller mesh of its own is on the first devices."""
        if len(each) > len(self.sum):
            self.sum = np.pad(self.sum, (0, len(each) - len(self.sum)))
        self.sum[: len(each)] += each

    def total(self) -> tuple[int, ...]:
        """Bytes per device."""
        return tuple(self.sum.tolist())


def _placement(dims: tuple[tuple[str, ...], ...], mesh: MeshShape) -> Placement:
    axes = tuple(tuple(map(mesh.axes.index, names)) for names in dims)
    return Placement(mesh.shape, axes)


def _rules(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Options and rules that differ, as lines."""
    for name in sorted(before.keys() | after.keys()):
        if name in ("schema", "mesh", *SECTIONS):
            continue
        if before.get(name) != after.get(name):
            yield f"- {name} = {before.get(name)!r}"
            yield f"+ {name} = {after.get(name)!r}"
    for name in SECTIONS:
        section = "" if name == "rules" else f"{name} "
        old = [rule_text(entry) for entry in before[name]]
        new = [rule_text(entry) for entry in after[name]]
        matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
        for kind, a, b, c, d in matcher.get_opcodes():
            if kind != "equal":
                for at in range(a, b):
                    yield f"- {section}{at + 1} {old[at]}"
                for at in range(c, d):
                    yield f"+ {section}{at + 1} {new[at]}"
