"""Convert rules to and from plain values, schema 1: JSON and rule files."""

import difflib
from typing import Any, get_args

from flax_layoutmap._core.errors import LayoutError, RuleError, did_you_mean
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh
from flax_layoutmap._rules.matching import RankPolicy, Rule
from flax_layoutmap._rules.pattern_cost import QUICKER, slow_because
from flax_layoutmap._rules.rules import OPTIONS, SECTIONS, RuleSet

_KEYS = {"schema", "mesh", "batch", *SECTIONS, *OPTIONS}


def rules_to_json(rules: RuleSet) -> dict[str, Any]:
    """Write a rule set as JSON values; `rules_from_json` reads them back."""
    data: dict[str, Any] = {"schema": 1, "mesh": mesh_to_json(rules.mesh)}
    data["batch"] = list(rules.batch)
    for name in OPTIONS:
        data[name] = getattr(rules, name)
    for name in SECTIONS:
        data[name] = [rule_to_json(rule, rules.mesh) for rule in getattr(rules, name)]
    return data


def rules_from_json(data: Any, *, mesh: Any = None) -> RuleSet:
    """Read a rule set; without `mesh`, on the recorded one, abstract."""
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
            for name in SECTIONS
        }
        options: dict[str, Any] = {name: data[name] for name in OPTIONS}
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
    """Make the recorded mesh, abstract."""
    if data is None:
        return None
    return DeviceMesh.abstract(
        data["shape"], data["axis_names"], axis_types=data["axis_types"]
    )


def rule_to_json(rule: Rule, mesh: DeviceMesh | None) -> dict[str, Any]:
    """A rule of rules on a mesh: pattern, axes, and what else is not usual."""
    layout = rule.layout
    axes = [
        "..." if dim is ... else list(dim) if isinstance(dim, tuple) else dim
        for dim in layout.axes
    ]
    entry: dict[str, Any] = {"pattern": rule.pattern, "axes": axes}
    if rule.rank != "error":
        entry["rank"] = rule.rank
    if rule.optional:
        entry["optional"] = True
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
    return Rule(
        entry["pattern"],
        layout,
        rank=entry.get("rank", "error"),
        optional=entry.get("optional", False),
    )


# -------------------------------------------------------- values in rule files

# What stands for None, for any number of dims, and for a layout without axes.
NOTHING, ANY_DIMS, REPLICATED = "-", "...", "replicated"

_ENTRY_KEYS = {"axes", "rank", "optional", "memory_kind", "mesh"}


def mesh_of(value: Any) -> DeviceMesh | None:
    """The mesh of a file: `"data=2,model=4"`, or what `mesh_to_json` returns."""
    if value is None or isinstance(value, str):
        return None if value is None else DeviceMesh.abstract(value)
    if not isinstance(value, dict) or set(value) - {
        "axis_names",
        "shape",
        "axis_types",
    }:
        raise RuleError(f'write it as "data=2,model=4", got {short(value)}')
    if not {"axis_names", "shape"} <= set(value):
        raise RuleError(f"it needs axis_names and shape, got {short(value)}")
    return mesh_from_json({"axis_types": "auto", **value})


def rule_of(
    pattern: str,
    value: Any,
    mesh: DeviceMesh | None,
    moved: bool,
    optional: bool = False,
) -> Rule:
    """The rule of a pattern and its value in a file: axes, or a table with options.

    `mesh` is the mesh of the rules, `moved` whether it replaces the file's, `optional`
    what the file says of its rules. Raises RuleError for an invalid rule, and a pattern
    that may take very long.
    """
    given = value if isinstance(value, dict) else {"axes": value}
    for key in given:
        if key not in _ENTRY_KEYS:
            near = difflib.get_close_matches(key, sorted(_ENTRY_KEYS), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else _QUOTES
            raise RuleError(f"unknown key {key!r}{hint}")
    if "axes" not in given:
        raise RuleError('it has no axes; write axes = ["-", "model"]')
    rank = given.get("rank", "error")
    if rank not in get_args(RankPolicy):
        raise RuleError(
            f'rank must be "error" or "skip", got {short(rank)}'
            f"{did_you_mean(str(rank), get_args(RankPolicy))}"
        )
    kind = given.get("memory_kind")
    if not isinstance(kind, str | None):
        raise RuleError(f"memory_kind must be a name, got {short(kind)}")
    own = mesh_of(given["mesh"]) if "mesh" in given and not moved else mesh
    layout = TensorLayout(axes_of(given["axes"]), own, memory_kind=kind)
    optional = given.get("optional", optional)
    rule = Rule(pattern, layout, rank=rank, optional=optional)
    slow = slow_because(pattern)
    if slow is not None:
        raise RuleError(f"the pattern may take very long to try: {slow}; {QUICKER}")
    return rule


# `up.kernel = …` is a table `up` to TOML.
_QUOTES = "; a pattern with a '.' in it needs quotes"


def axes_of(value: Any) -> Any:
    """The axes of a layout: `"-"` is None, `"..."` any number of dims."""
    if value == REPLICATED:
        return None
    if not isinstance(value, list):
        raise RuleError(
            f'axes must be a list such as ["-", "model"], or "replicated", got '
            f"{short(value)}"
        )
    dims: list[Any] = []
    for dim in value:
        if isinstance(dim, list) and all(isinstance(axis, str) for axis in dim):
            dims.append(tuple(dim))
        elif dim is None or dim == NOTHING:
            dims.append(None)
        elif isinstance(dim, str):
            dims.append(... if dim == ANY_DIMS else dim)
        else:
            raise RuleError(
                f"a dim is an axis, a list of axes, {NOTHING!r} (not sharded) or "
                f"{ANY_DIMS!r} (any number of dims), got {short(dim)}"
            )
    return tuple(dims)


def short(value: Any) -> str:
    """A value as it is shown in a message."""
    text = repr(value)
    return text if len(text) < 80 else f"{text[:76]} …"
