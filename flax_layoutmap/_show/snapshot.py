"""What a Resolution decided, as JSON of schema 1: to compare, and for review."""

import dataclasses
import math
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._core.grid import Placement
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._core.whole_file import readable_json
from flax_layoutmap._rules.records import Decision, Shape, show_shape, show_spec
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._rules.serialise import (
    mesh_from_json,
    rules_from_json,
    rules_to_json,
)
from flax_layoutmap._show.report import array_text
from flax_layoutmap._tree.paths import natural_key


class Record(NamedTuple):
    """A leaf of a Resolution, as the report's JSON, and as it is compared."""

    leaf: Mapping[str, Any]
    array: str  # shape and dtype: `f32[8,16]`
    spec: str  # `P(-, model)`
    shard: str  # `[8,4]`, or `-` without a mesh
    itemsize: int  # bytes of an element
    placement: Placement | None  # None without a mesh


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that a Resolution decided."""

    rules: RuleSet
    mesh: DeviceMesh | None  # of the rules or, where they have none, of a leaf
    records: Mapping[str, Record]  # by path, sorted
    # Ids of the devices, row by row; None for an abstract mesh or a file.
    devices: tuple[Any, ...] | None = None


def snapshot_of(data: Any, devices: tuple[Any, ...] | None = None) -> Snapshot:
    """Read what `Resolution.to_json` or `golden_text` wrote.

    Raises:
        LayoutError: it is of another schema, or damaged.
    """
    if not isinstance(data, dict) or data.get("schema") != 1:
        schema = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise LayoutError(
            f"layouts of schema {schema!r} cannot be read; this is schema 1, what "
            'resolution.report("json") and flm.testing.write_golden write'
        )
    try:
        rules = rules_from_json(data["rules"])
        leaves = sorted(data["leaves"], key=lambda leaf: natural_key(leaf["path"]))
        records = {leaf["path"]: _record(leaf, rules.mesh) for leaf in leaves}
        meshes = [rules.mesh, *(_own_mesh(leaf) for leaf in leaves)]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise LayoutError(f"the layouts are damaged: {error!r}") from error
    mesh = next((mesh for mesh in meshes if mesh is not None), None)
    return Snapshot(rules, mesh, records, devices)


def _record(leaf: Mapping[str, Any], mesh: DeviceMesh | None) -> Record:
    dims = [
        () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
        for axes in leaf["spec"]
    ]
    if len(dims) != len(leaf["shape"]):
        raise ValueError(f"{leaf['path']!r} has a spec of {len(dims)} dims")
    entries = ["+".join(axes) or "-" for axes in dims]
    while entries and entries[-1] == "-":
        entries.pop()
    spec = f"P({', '.join(entries)})" if entries else "replicated"
    if leaf.get("memory_kind"):
        spec += f" {leaf['memory_kind']}"
    placement, mesh = None, _own_mesh(leaf) or mesh
    if mesh is not None:
        places = tuple(tuple(map(mesh.axis_names.index, axes)) for axes in dims)
        placement = Placement(mesh.shape, places)
    array = array_text(tuple(leaf["shape"]), leaf.get("dtype") or "-")
    shape, size = leaf.get("shard_shape"), operator.index(leaf["bytes_per_device"])
    shard = "-" if shape is None else f"[{','.join(map(str, shape))}]"
    itemsize = size // (math.prod(map(operator.index, shape or ())) or 1)
    return Record(leaf, array, spec, shard, itemsize, placement)


def _own_mesh(leaf: Mapping[str, Any]) -> DeviceMesh | None:
    return mesh_from_json(leaf.get("mesh"))


def golden_text(data: Mapping[str, Any]) -> str:
    """What `Resolution.to_json` gives as JSON for review: sorted, one line per leaf.

    The numbers of rules, which change with any rule before them, are left out.
    """
    leaves = [
        {key: value for key, value in leaf.items() if value is not None}
        for leaf in sorted(data["leaves"], key=lambda leaf: natural_key(leaf["path"]))
    ]
    for leaf in leaves:
        leaf.pop("rule", None)
        leaf.pop("note", None)
    kept = {key: data[key] for key in ("schema", "rules", "totals")}
    return f"{_outline({**kept, 'leaves': leaves})}\n"


def _outline(value: Any, indent: str = "\n") -> str:
    """JSON with a line for each leaf, rule and option."""
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


# ------------------------------------------------------- lines that processes compare


def rule_lines(rules: RuleSet) -> dict[str, list[str]]:
    """The lines by which processes compare their rules, and their meshes."""
    values = rules_to_json(rules)
    # The mesh is a part of its own, so that a difference is reported once.
    del values["mesh"]
    mesh = "no mesh" if rules.mesh is None else f"{rules.mesh} {rules.mesh.axis_types}"
    lines = []
    for name, value in values.items():
        if isinstance(value, list):
            lines += [f"{name} {at}: {v}" for at, v in enumerate(value, start=1)]
        else:
            lines.append(f"{name}: {value}")
    return {"rules": lines, "mesh": [mesh]}


def leaf_line(path: str, shape: Shape, dtype: Any, row: Decision) -> str:
    """The line by which processes compare the decision about a leaf."""
    kind = f", {row.memory_kind}" if row.memory_kind else ""
    return f"{path} {show_shape(shape)} {dtype}, {show_spec(row.spec)}{kind}"
