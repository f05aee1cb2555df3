"""Rule sets as plain JSON values, schema 1."""

from typing import Any

from flax_layoutmap._core.errors import LayoutError, RuleError
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh
from flax_layoutmap._rules.rules import Rule, RuleSet

_SECTIONS = ("rules", "activations", "names", "optimizer")
_OPTIONS = ("match", "overlap", "unmatched", "indivisible", "strict")
_KEYS = {"schema", "mesh", "batch", *_SECTIONS, *_OPTIONS}


def rules_to_json(rules: RuleSet) -> dict[str, Any]:
    """Writes a rule set as JSON values; `rules_from_json` reads them back."""
    data: dict[str, Any] = {"schema": 1, "mesh": mesh_to_json(rules.mesh)}
    data["batch"] = list(rules.batch)
    for name in _OPTIONS:
        data[name] = getattr(rules, name)
    for name in _SECTIONS:
        data[name] = [_rule_to_json(rule, rules.mesh) for rule in getattr(rules, name)]
    return data


def rules_from_json(data: Any, *, mesh: Any = None) -> RuleSet:
    """Reads a rule set.

    Args:
        data: what `rules_to_json` wrote.
        mesh: the mesh to put the rules on; None takes the recorded one, abstract.

    Raises:
        RuleError: unknown schema, missing or unknown keys, values that are no rules.
    """
    if not isinstance(data, dict) or data.get("schema") != 1:
        schema = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise RuleError(f"rules of schema {schema!r} cannot be read; this is schema 1")
    unknown = set(data) - _KEYS
    missing = _KEYS - set(data)
    if unknown or missing:
        raise RuleError(
            f"the rules have unknown keys {sorted(unknown)} or lack {sorted(missing)}"
        )
    try:
        recorded = mesh_from_json(data["mesh"])
        sections: dict[str, Any] = {
            name: tuple(_rule_from_json(entry, recorded) for entry in data[name])
            for name in _SECTIONS
        }
        options: dict[str, Any] = {name: data[name] for name in _OPTIONS}
        batch = tuple(data["batch"])
        if isinstance(data["batch"], str) or not all(isinstance(a, str) for a in batch):
            raise TypeError(f"batch must be a list of names, got {data['batch']!r}")
        read = RuleSet(mesh=recorded, batch=batch, **options, **sections)
    except (TypeError, KeyError, AttributeError) as error:
        raise RuleError(f"the rules are damaged: {error!r}") from error
    except LayoutError as error:
        raise RuleError(f"the rules cannot be read: {error}") from error
    return read if mesh is None else read.on(as_mesh(mesh))


def mesh_to_json(mesh: DeviceMesh | None) -> dict[str, Any] | None:
    """Axis names, sizes and types of a mesh; its devices are not recorded."""
    if mesh is None:
        return None
    return {
        "axis_names": list(mesh.axis_names),
        "shape": list(mesh.shape),
        "axis_types": [kind.name.lower() for kind in mesh.axis_types],
    }


def mesh_from_json(data: dict[str, Any] | None) -> DeviceMesh | None:
    """Makes the recorded mesh, abstract."""
    if data is None:
        return None
    return DeviceMesh.abstract(
        data["shape"], data["axis_names"], axis_types=data["axis_types"]
    )


def _rule_to_json(rule: Rule, mesh: DeviceMesh | None) -> dict[str, Any]:
    layout = rule.layout
    axes = [
        "..." if dim is ... else list(dim) if isinstance(dim, tuple) else dim
        for dim in layout.axes
    ]
    entry: dict[str, Any] = {"pattern": rule.pattern, "axes": axes}
    if rule.rank != "error":
        entry["rank"] = rule.rank
    if layout.memory_kind is not None:
        entry["memory_kind"] = layout.memory_kind
    if layout.device_mesh is not None and layout.device_mesh != mesh:
        entry["mesh"] = mesh_to_json(layout.device_mesh)
    return entry


def _rule_from_json(entry: dict[str, Any], mesh: DeviceMesh | None) -> Rule:
    axes = [
        ... if dim == "..." else tuple(dim) if isinstance(dim, list) else dim
        for dim in entry["axes"]
    ]
    own = mesh_from_json(entry["mesh"]) if "mesh" in entry else mesh
    layout = TensorLayout(axes, own, memory_kind=entry.get("memory_kind"))
    return Rule(entry["pattern"], layout, rank=entry.get("rank", "error"))
