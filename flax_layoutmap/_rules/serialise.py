"""Rule sets as plain values, schema 1: what `to_json` returns and rule files hold."""

import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flax_layoutmap._core.errors import (
    LayoutError,
    RuleError,
    bullet_list,
    did_you_mean,
)
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._rules.matching import Rule
from flax_layoutmap._rules.rules import (
    OPTIONS,
    SECTIONS,
    RuleSet,
    batch_axes,
    check_options,
)

# What stands for None, for any number of dims, and for a layout without axes.
NOTHING, ANY_DIMS, REPLICATED = "-", "...", "replicated"

FILE_KEYS = {"schema", "optional", "mesh", "batch", *OPTIONS, *SECTIONS}
ENTRY_KEYS = {"axes", "rank", "optional", "memory_kind", "mesh"}


def rules_to_json(rules: RuleSet) -> dict[str, Any]:
    """A rule set as JSON values; `rules_from_json` reads them back."""
    data: dict[str, Any] = {"schema": 1, "mesh": mesh_to_json(rules.mesh)}
    data["batch"] = list(rules.batch)
    for name in OPTIONS:
        data[name] = getattr(rules, name)
    for name in SECTIONS:
        data[name] = [rule_to_json(rule, rules.mesh) for rule in getattr(rules, name)]
    return data


def mesh_to_json(mesh: DeviceMesh | None) -> dict[str, Any] | None:
    """Axis names, sizes and types of a mesh; its devices are not recorded."""
    if mesh is None:
        return None
    return {
        "axis_names": list(mesh.axis_names),
        "shape": list(mesh.shape),
        "axis_types": [kind.name.lower() for kind in mesh.axis_types],
    }


def rule_to_json(rule: Rule, mesh: DeviceMesh | None) -> dict[str, Any]:
    """A rule of rules on a mesh: pattern, axes, and the options that are set."""
    layout = rule.layout
    axes = [
        ANY_DIMS if dim is ... else list(dim) if isinstance(dim, tuple) else dim
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


def rules_from_json(data: Any, *, mesh: Any = None) -> RuleSet:
    """Read a rule set; without `mesh`, on the recorded one, abstract."""
    return rules_from_tables([("the rules", data)], mesh)


def rules_from_tables(tables: Sequence[tuple[str, Any]], mesh: Any = None) -> RuleSet:
    """Merge tables, each with the name of its file, into one rule set.

    Values of later tables win. A pattern that exists keeps its place; a new one goes
    where it wins: in front with `overlap="first"`, else behind.
    """
    options: dict[str, tuple[str, Any]] = {}
    sections: dict[str, dict[str, tuple[str, Any]]] = {name: {} for name in SECTIONS}
    for file, table in tables:
        _check_table(file, table)
        for name in ("mesh", "batch", *OPTIONS):
            if name in table:
                options[name] = file, table[name]
        in_front = "overlap" in options and options["overlap"][1] == "first"
        for name in SECTIONS:
            old, new = sections[name], dict[str, tuple[str, Any]]()
            for pattern, value in _entries(f"{file}: {name}", table, name):
                if value is not False:
                    (old if pattern in old else new)[pattern] = file, value
                elif old.pop(pattern, None) is None:
                    near = did_you_mean(pattern, old)
                    raise RuleError(f"{file}: no rule {pattern!r} to drop{near}")
            sections[name] = {**new, **old} if in_front else {**old, **new}
    rules = _rule_set(tables[-1][0], options, sections)
    try:
        return rules if mesh is None else rules.on(mesh)
    except RuleError as error:
        raise RuleError(f"{tables[-1][0]}: {error}") from error


def _check_table(file: str, table: Any) -> None:
    if not isinstance(table, dict):
        raise RuleError(f"{file}: expected a table, got {reprlib.repr(table)}")
    schema = table.get("schema")
    if schema != 1 or schema is True:
        fix = "; write schema = 1 in the first line" if schema is None else ""
        raise RuleError(f"{file}: schema must be 1, got {schema!r}{fix}")
    for key in table:
        if key not in FILE_KEYS:
            near = did_you_mean(key, sorted(FILE_KEYS))
            raise RuleError(f"{file}: unknown key {key!r}{near}")


def _entries(
    where: str, table: Mapping[str, Any], section: str
) -> Iterator[tuple[str, Any]]:
    """Pattern and value of each rule: of a table, or of a list as `to_json` has it."""
    given, patterns = table.get(section, {}), set[str]()
    if not isinstance(given, dict | list):
        raise RuleError(
            f"{where}: expected a table of patterns, got {reprlib.repr(given)}"
        )
    for entry in given.items() if isinstance(given, dict) else given:
        pattern, value = entry if isinstance(entry, tuple) else (None, None)
        if isinstance(entry, dict):
            value = {**entry}
            pattern = value.pop("pattern", None)
        if not isinstance(pattern, str):
            raise RuleError(f"{where}: an entry has no pattern: {reprlib.repr(entry)}")
        if pattern in patterns:
            raise RuleError(f"{where}: the pattern {pattern!r} is there twice")
        patterns.add(pattern)
        if value is not False:
            value = value if isinstance(value, dict) else {"axes": value}
            value = {"optional": table.get("optional", False), **value}
        yield pattern, value


def _rule_set(
    file: str,
    options: Mapping[str, tuple[str, Any]],
    sections: Mapping[str, Mapping[str, tuple[str, Any]]],
) -> RuleSet:
    problems: list[str] = []

    def made(where: str, make: Callable[..., Any], *args: Any) -> Any:
        try:
            return make(*args)
        except (LayoutError, TypeError) as error:
            problems.append(f"{where}: {error}")

    given, mesh, batch = {**options}, None, None
    if "mesh" in given:
        where, value = given.pop("mesh")
        mesh = made(f"{where}: mesh", mesh_from_json, value)
    if "batch" in given:
        where, value = given.pop("batch")
        batch = made(f"{where}: batch", batch_axes, value, mesh)
    values = {name: value for name, (_, value) in given.items()}
    for name, (where, value) in given.items():
        made(where, lambda name=name, value=value: check_options(**{name: value}))
    rules: dict[str, Any] = {
        name: tuple(
            made(f"{where}: {name}, {pattern!r}", _rule, pattern, value, mesh)
            for pattern, (where, value) in section.items()
        )
        for name, section in sections.items()
    }
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise RuleError(f"{count} in {file}:\n{bullet_list(problems)}")
    batch = batch_axes(None, mesh) if batch is None else batch
    return RuleSet(mesh=mesh, batch=batch, **values, **rules)


def mesh_from_json(value: Any) -> DeviceMesh | None:
    """The abstract mesh of `"data=2,model=4"`, or of what `mesh_to_json` returns."""
    if value is None or isinstance(value, str):
        return None if value is None else DeviceMesh.abstract(value)
    if not isinstance(value, dict) or not {"axis_names", "shape"} <= {*value}:
        raise RuleError(
            'write it as "data=2,model=4", or with axis_names, shape and axis_types; '
            f"got {reprlib.repr(value)}"
        )
    types = value.get("axis_types", "auto")
    return DeviceMesh.abstract(value["shape"], value["axis_names"], axis_types=types)


def _rule(pattern: str, value: Mapping[str, Any], mesh: DeviceMesh | None) -> Rule:
    for key in value:
        if key not in ENTRY_KEYS:  # to TOML, `up.kernel = …` is a table `up`
            near = did_you_mean(key, sorted(ENTRY_KEYS))
            near = near or "; a pattern with a '.' in it needs quotes"
            raise RuleError(f"unknown key {key!r}{near}")
    if "axes" not in value:
        raise RuleError('it has no axes; write axes = ["-", "model"]')
    memory_kind = value.get("memory_kind")
    if not isinstance(memory_kind, str | None):
        raise RuleError(f"memory_kind must be a name, got {reprlib.repr(memory_kind)}")
    axes, own_mesh = _axes(value["axes"]), mesh_from_json(value.get("mesh"))
    layout = TensorLayout(axes, own_mesh or mesh, memory_kind=memory_kind)
    rank = value.get("rank", "error")
    return Rule(pattern, layout, rank=rank, optional=value["optional"])


def _axes(value: Any) -> Any:
    if value == REPLICATED:
        return None
    if not isinstance(value, list):
        wanted = f'a list such as ["-", "model"], or "{REPLICATED}"'
        raise RuleError(f"axes must be {wanted}, got {reprlib.repr(value)}")
    words = {NOTHING: None, ANY_DIMS: ...}
    return [words.get(dim, dim) if isinstance(dim, str) else dim for dim in value]
