"""What a Resolution decided, as JSON of schema 1: to compare, and for review."""

import math
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

from flax_layoutmap._core.axes import Placement, dim_axes, normal_spec
from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._rules.files import mesh_from_json, readable_json, rules_from_json
from flax_layoutmap._rules.records import show_spec
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._show.fold import natural_key
from flax_layoutmap._show.report import array_text


class Record(NamedTuple):
    """A leaf of a Resolution, as the report's JSON, and as it is compared."""

    leaf: Mapping[str, Any]
    array: str  # shape and dtype: `f32[8,16]`
    spec: str  # `P(-, model)`
    shard: str  # `[8,4]`, or `-` without a mesh
    itemsize: int  # bytes of an element
    placement: Placement | None  # None without a mesh


class Snapshot(NamedTuple):
    """Everything that a Resolution decided."""

    rules: RuleSet
    mesh: DeviceMesh | None  # of the rules or, where they have none, of a leaf
    records: Mapping[str, Record]  # by path


def snapshot_of(data: Any) -> Snapshot:
    """Read what `Resolution.to_json` or `golden_text` wrote."""
    schema = data.get("schema") if isinstance(data, dict) else type(data).__name__
    if schema != 1:
        raise LayoutError(
            f"layouts of schema {schema!r} cannot be read; this is schema 1, what "
            'resolution.report("json") and flm.testing.write_golden write'
        )
    try:
        rules = rules_from_json(data["rules"])
        meshes = [mesh_from_json(leaf.get("mesh")) for leaf in data["leaves"]]
        records = {
            leaf["path"]: _record(leaf, mesh or rules.mesh)
            for leaf, mesh in zip(data["leaves"], meshes, strict=True)
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise LayoutError(f"the layouts are damaged: {error!r}") from error
    mesh = next((mesh for mesh in (rules.mesh, *meshes) if mesh is not None), None)
    return Snapshot(rules, mesh, records)


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
    """What `Resolution.to_json` gives as JSON for review: sorted, one line per leaf.

    The numbers of rules, which change with any rule before them, are left out.
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
