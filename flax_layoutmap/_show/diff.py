"""Compare two Resolutions: changes, the bytes that devices receive, a report."""

import dataclasses
import difflib
import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from flax_layoutmap._core.axes import Placement, dim_axes, normal_spec, received
from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._rules.files import mesh_from_json, readable_json, rules_from_json
from flax_layoutmap._rules.records import show_spec
from flax_layoutmap._rules.rules import OPTIONS, SECTIONS, RuleSet
from flax_layoutmap._show.report import ROLES, array_text
from flax_layoutmap._show.table import Grid, fitted, fold, human_bytes, natural_key
from flax_layoutmap._show.terminal import Shown, coloured_grid, coloured_lines, wrapped

if TYPE_CHECKING:
    from rich.text import Text

Change = Literal["added", "removed", "reshaped", "moved"]
_SIGNS = {"added": "+", "removed": "-", "reshaped": "~", "moved": "→"}


@dataclasses.dataclass(frozen=True, slots=True)
class LeafChange:
    """One leaf that differs between two Resolutions.

    Attributes:
        path: path of the leaf.
        change: `"added"`, `"removed"`, `"reshaped"` (another shape or dtype) or
            `"moved"` (another layout).
        before: the leaf before, as in the JSON of the report; None if it was added.
        after: the leaf after; None if it was removed.
        text: the change as text, for example `P(-, model) → P(model)`.
        received_bytes: the most bytes that a device receives if the leaf moved; 0 for
            other changes, None without a mesh.
        all_received_bytes: the same, summed over the devices.
    """

    path: str
    change: Change
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    text: str
    received_bytes: int | None = 0
    all_received_bytes: int | None = 0


@dataclasses.dataclass(frozen=True)
class ResolutionDiff(Shown):
    """The changes between two Resolutions, and their cost; see `Resolution.diff`.

    Attributes:
        mesh: the mesh before and after, as text.
        rules: rules and options that differ: `"- …"` before, `"+ …"` after.
        changes: the leaves that differ, sorted by path.
        unchanged: the number of leaves that do not differ.
        bytes_per_device: role → bytes in device memory before and after, per device.
        host_bytes_per_device: the same in host memory.
        received_bytes: for each device of the new mesh (row-major), the bytes that it
            receives for the leaves that moved; empty without a mesh.
        axes: names of the mesh axes, with the axes of the old mesh first.
    """

    mesh: tuple[str, str]
    rules: tuple[str, ...]
    changes: tuple[LeafChange, ...]
    unchanged: int
    bytes_per_device: Mapping[str, tuple[int, int]]
    host_bytes_per_device: Mapping[str, tuple[int, int]]
    received_bytes: tuple[int, ...]
    axes: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Whether mesh, rules and all leaves are the same."""
        return not self.changes and not self.rules and self.mesh[0] == self.mesh[1]

    def of(self, change: Change) -> tuple[LeafChange, ...]:
        """The changes of one kind, such as `"moved"`."""
        return tuple(leaf for leaf in self.changes if leaf.change == change)

    def to_json(self) -> dict[str, Any]:
        """The differences as plain JSON values, schema 1."""
        return {"schema": 1, "is_empty": self.is_empty, **dataclasses.asdict(self)}

    def _lines(self, width: int | None) -> "Iterator[Text]":
        above, below = list[str](), list(self._totals())
        if self.mesh[0] != self.mesh[1]:
            above.append(f"mesh: {self.mesh[0]} → {self.mesh[1]}")
        if self.rules:
            above += ["rules:", *(f"  {line}" for line in self.rules)]
        if self.changes:
            above, below = [*above, ""] if above else [], ["", *below]
        yield from coloured_lines(wrapped(above, width), self.axes)
        if self.changes:
            yield from coloured_grid(_grid(self.changes, width), self.axes)
        yield from coloured_lines(wrapped(below, width), self.axes)

    def _counts(self) -> list[str]:
        kinds = [leaf.change for leaf in self.changes]
        return [f"{kinds.count(kind)} {kind}" for kind in _SIGNS if kind in kinds]

    def _totals(self) -> Iterator[str]:
        if self.is_empty:
            yield f"no difference: {self.unchanged} leaves as before, on {self.mesh[0]}"
        else:
            same = [f"{self.unchanged} as before"] if self.unchanged else []
            yield "leaves: " + ", ".join(self._counts() + same)
        device, host = self.bytes_per_device, self.host_bytes_per_device
        for role, name in ROLES.items():
            for where, sums in (("", device), (" in host memory", host)):
                if any(sums[role]):
                    yield f"{name}: {_growth(*sums[role])} per device{where}"
        if self.received_bytes and any(leaf.change == "moved" for leaf in self.changes):
            most, total = max(self.received_bytes), sum(self.received_bytes)
            yield (
                f"to send: at most {human_bytes(most)} to one device, "
                f"{human_bytes(total)} in all"
                if total
                else "to send: nothing; every device has all of its new shards"
            )

    def __repr__(self) -> str:
        most = max(self.received_bytes, default=0)
        cost = f", at most {human_bytes(most)} per device to send" if most else ""
        return f"ResolutionDiff({', '.join(self._counts()) or 'no leaf changed'}{cost})"


def _growth(before: int, after: int) -> str:
    share = f" ({(after - before) / before:+.1%})" if before else ""
    text = f"{human_bytes(before)} → {human_bytes(after)}{share}"
    return human_bytes(before) if before == after else text


def _grid(changes: Sequence[LeafChange], width: int | None) -> Grid:
    """A row for each changed leaf, or for several with the same change."""
    keys = [(leaf.change, leaf.text, leaf.received_bytes) for leaf in changes]
    folds = fold([leaf.path for leaf in changes], keys)
    rows = [(changes[fold.members[0]], len(fold.members)) for fold in folds]
    columns = {
        "": [_SIGNS[leaf.change] for leaf, _ in rows],
        "path": [fold.cell for fold in folds],
        "change": [leaf.text for leaf, _ in rows],
        "to send": [_to_send(leaf, count) for leaf, count in rows],
    }
    return fitted(columns, [leaf.change for leaf, _ in rows], width)


def _to_send(leaf: LeafChange, count: int) -> str:
    if leaf.change != "moved":
        return ""
    most = leaf.received_bytes
    return "?" if most is None else human_bytes(count * most)


# ------------------------------------------- reading and writing what is compared


class Record(NamedTuple):
    """A leaf of a Resolution: its JSON, and the values to compare."""

    leaf: Mapping[str, Any]
    array: str  # shape and dtype: `f32[8,16]`
    spec: str  # `P(-, model)`
    shard: str  # `[8,4]`, or `-` without a mesh
    itemsize: int  # bytes of an element
    placement: Placement | None  # None without a mesh


class Snapshot(NamedTuple):
    """Everything that a Resolution decided."""

    rules: RuleSet
    mesh: DeviceMesh | None  # of the rules or, if they have none, of a leaf
    records: Mapping[str, Record]  # by path
    totals: Mapping[str, Mapping[str, int]]  # sums of bytes by role


def snapshot_of(data: Any) -> Snapshot:
    """Read the output of `Resolution.to_json` or `golden_text`."""
    schema = data.get("schema") if isinstance(data, dict) else type(data).__name__
    if schema != 1:
        raise LayoutError(
            f"layouts of schema {schema!r} cannot be read; this version reads schema "
            '1, as written by resolution.report("json") and flm.testing.write_golden'
        )
    try:
        rules = rules_from_json(data["rules"])
        meshes = [mesh_from_json(leaf.get("mesh")) for leaf in data["leaves"]]
        records = {
            leaf["path"]: _record(leaf, mesh or rules.mesh)
            for leaf, mesh in zip(data["leaves"], meshes, strict=True)
        }
        totals = {role: data["totals"][role] for role in ROLES}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise LayoutError(f"the layouts are damaged: {error!r}") from error
    mesh = next((mesh for mesh in (rules.mesh, *meshes) if mesh is not None), None)
    return Snapshot(rules, mesh, records, totals)


def _record(leaf: Mapping[str, Any], mesh: DeviceMesh | None) -> Record:
    path, shape, shard = leaf["path"], tuple(leaf["shape"]), leaf.get("shard_shape")
    dims = [tuple(a) if isinstance(a, list) else dim_axes(a) for a in leaf["spec"]]
    if not isinstance(path, str) or len(dims) != len(shape):
        raise ValueError(f"{path!r} of shape {shape} has a spec of {len(dims)} dims")
    placement = None
    if mesh is not None:
        places = tuple(tuple(map(mesh.axis_names.index, axes)) for axes in dims)
        placement = Placement(mesh.shape, places)
    elements = math.prod(map(operator.index, shard or ()))
    return Record(
        leaf,
        array_text(shape, leaf.get("dtype") or "-"),
        show_spec(normal_spec(dims), leaf.get("memory_kind")),
        "-" if shard is None else array_text(tuple(shard), ""),
        operator.index(leaf["bytes_per_device"]) // (elements or 1),
        placement,
    )


def golden_text(data: Mapping[str, Any]) -> str:
    """The output of `Resolution.to_json` as text for review: sorted, a line per leaf.

    Rule numbers are left out, as they change with every rule that is inserted.
    """
    leaves = [
        {k: v for k, v in leaf.items() if v is not None and k not in ("rule", "note")}
        for leaf in sorted(data["leaves"], key=lambda leaf: natural_key(leaf["path"]))
    ]
    kept = {key: data[key] for key in ("schema", "rules", "totals")}
    return f"{_outline({**kept, 'leaves': leaves})}\n"


def _outline(value: Any, indent: str = "\n") -> str:
    below = f"{indent}  "
    if isinstance(value, list) and value and isinstance(value[0], dict):
        lines = ",".join(below + readable_json(entry) for entry in value)
        return f"[{lines}{indent}]"
    if isinstance(value, dict) and value and len(below) < 7:
        lines = ",".join(
            f"{below}{readable_json(key)}: {_outline(entry, below)}"
            for key, entry in value.items()
        )
        return f"{{{lines}{indent}}}"
    return readable_json(value)


# ------------------------------------------------------------------- the comparison


def difference(
    before: Snapshot,
    after: Snapshot,
    on: tuple[DeviceMesh | None, DeviceMesh | None] = (None, None),
) -> ResolutionDiff:
    """Compare two Resolutions; `on` has their meshes with devices."""
    same = _same_devices(*on)
    # Cached, as many leaves have equal placements.
    elements = functools.cache(functools.partial(received, same=same))
    paths = sorted({**before.records, **after.records}, key=natural_key)
    meshes = [mesh for mesh in (before.mesh, after.mesh) if mesh is not None]
    total = np.zeros(meshes[1].size if len(meshes) == 2 else 0, np.int64)
    changes = []
    for path in paths:
        pair = before.records.get(path), after.records.get(path)
        each = _received_bytes(*pair, elements)
        change = _change_of(*pair, each)
        if change is None:
            continue
        most, in_all = (None, None) if change == "moved" else (0, 0)
        if each is not None:
            # A leaf may be on a larger mesh than the rules.
            total = np.pad(total, (0, max(len(each) - len(total), 0)))
            total[: len(each)] += each
            most, in_all = int(each.max()), int(each.sum())
        old, new = (record and record.leaf for record in pair)
        changes.append(
            LeafChange(path, change, old, new, _text(change, *pair), most, in_all)
        )
    return ResolutionDiff(
        mesh=(_mesh(before.mesh, after.mesh), _mesh(after.mesh, before.mesh)),
        rules=tuple(_rule_changes(before.rules, after.rules)),
        changes=tuple(changes),
        unchanged=len(paths) - len(changes),
        bytes_per_device=_held(before, after, "bytes_per_device"),
        host_bytes_per_device=_held(before, after, "host_bytes_per_device"),
        received_bytes=tuple(total.tolist()),
        axes=tuple(dict.fromkeys(name for mesh in meshes for name in mesh.axis_names)),
    )


def _same_devices(
    before: DeviceMesh | None, after: DeviceMesh | None
) -> list[int] | None:
    """For each device after, its number before (-1: new), as for `received`."""
    if before is None or after is None or before.is_abstract or after.is_abstract:
        return None
    numbers = {device: number for number, device in enumerate(before.devices.flat)}
    return [numbers.get(device, -1) for device in after.devices.flat]


def _received_bytes(
    old: Record | None, new: Record | None, elements: Callable[..., np.ndarray]
) -> np.ndarray | None:
    if old is None or new is None or old.array != new.array:
        return None
    if old.placement is None or new.placement is None:
        return None
    if old.leaf.get("memory_kind") != new.leaf.get("memory_kind"):
        size = new.leaf["bytes_per_device"]
        return np.full(math.prod(new.placement.mesh_shape), size)
    shape = tuple(new.leaf["shape"])
    return elements(shape, old.placement, new.placement) * new.itemsize


def _change_of(
    old: Record | None, new: Record | None, each: np.ndarray | None
) -> Change | None:
    if old is None or new is None:
        return "removed" if new is None else "added"
    if old.array != new.array:
        return "reshaped"
    is_same = (old.spec, old.shard) == (new.spec, new.shard)
    return None if is_same and (each is None or not each.any()) else "moved"


def _text(change: Change, *pair: Record | None) -> str:
    records = [record for record in pair if record is not None]
    arrays, specs, shards = (
        " → ".join(dict.fromkeys(texts))
        for texts in zip(*((r.array, r.spec, r.shard) for r in records), strict=True)
    )
    if change == "moved":
        return specs if " → " in specs else f"{specs} {shards}"
    return arrays if change == "reshaped" else f"{arrays} {specs}"


def _held(before: Snapshot, after: Snapshot, sums: str) -> dict[str, tuple[int, int]]:
    pairs = {role: (before.totals[role], after.totals[role]) for role in ROLES}
    return {role: (first[sums], last[sums]) for role, (first, last) in pairs.items()}


def _mesh(mesh: DeviceMesh | None, other: DeviceMesh | None) -> str:
    """The mesh, with its axis types if the other differs only in them."""
    if mesh is None or other is None or str(mesh) != str(other):
        return "no mesh" if mesh is None else str(mesh)
    if mesh.axis_types == other.axis_types:
        return str(mesh)
    return f"{mesh} ({', '.join(kind.name.lower() for kind in mesh.axis_types)})"


def rule_lines(rules: RuleSet) -> list[str]:
    """Options and rules as lines to compare, without the mesh of the rules."""
    lines = [f"{name} = {getattr(rules, name)!r}" for name in ("batch", *OPTIONS)]
    for section in SECTIONS:
        kind = "" if section == "rules" else f"{section} "
        for rule in getattr(rules, section):
            mesh = rule.layout.device_mesh
            where = "" if mesh in (None, rules.mesh) else f" on {mesh}"
            lines.append(f"{kind}{rule}{where}")
    return lines


def _rule_changes(before: RuleSet, after: RuleSet) -> Iterator[str]:
    pair = rule_lines(before), rule_lines(after)
    for line in difflib.unified_diff(*pair, n=0, lineterm=""):
        if not line.startswith(("---", "+++", "@@")):
            yield f"{line[0]} {line[1:]}"
