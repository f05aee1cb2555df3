"""Rule sets as JSON values and as TOML or JSON files (`docs/rule_files.md`)."""

import contextlib
import json
import os
import re
import reprlib
import secrets
import shutil
import tomllib
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
    check_option,
)

# Spellings of None, of any number of dims, and of a layout without axes.
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
    """Pattern and axes of a rule, its other options, and a mesh other than `mesh`."""
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
    """Read a rule set; without `mesh`, its mesh is the recorded one, abstract."""
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
    """Pattern and value of each rule, from a table or from a list as in `to_json`."""
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
            raise RuleError(f"{where}: the pattern {pattern!r} occurs twice")
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

    def read(where: str, make: Callable[..., Any], *args: Any) -> Any:
        try:
            return make(*args)
        except (LayoutError, TypeError) as error:
            problems.append(f"{where}: {error}")

    values = {name: value for name, (_, value) in options.items()}
    files = {name: file for name, (file, _) in options.items()}
    mesh = read(f"{files.get('mesh')}: mesh", mesh_from_json, values.get("mesh"))
    batch = read(f"{files.get('batch')}: batch", batch_axes, values.get("batch"), mesh)
    for name in OPTIONS:
        if name in values:
            read(files[name], check_option, name, values[name])
    rules: dict[str, Any] = {
        name: tuple(
            read(f"{where}: {name}, {pattern!r}", _rule, pattern, value, mesh)
            for pattern, (where, value) in section.items()
        )
        for name, section in sections.items()
    }
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise RuleError(f"{count} in {file}:\n{bullet_list(problems)}", problems)
    return RuleSet(**(values | {"mesh": mesh, "batch": batch} | rules))


def mesh_from_json(value: Any) -> DeviceMesh | None:
    """The abstract mesh for `"data=2,model=4"`, or for the values of `mesh_to_json`."""
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
        if key not in ENTRY_KEYS:  # TOML reads `up.kernel = …` as a table `up`
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


_SPELLING = '; write patterns in single quotes, and "-" for a dim that is not sharded'


def suffix_of(path: str) -> str:
    """`".toml"` or `".json"`; raises RuleError for anything else."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in (".toml", ".json"):
        raise RuleError(f"{path}: a rule file ends in .toml or .json, not {suffix!r}")
    return suffix


def read_rules(path: Any, *, mesh: Any = None) -> RuleSet:
    return rules_from_tables(_tables(os.fspath(path)), mesh)


def _tables(path: str, below: Sequence[str] = ()) -> list[tuple[str, Any]]:
    """The tables of all files that a file extends, in order, then its own."""
    real = os.path.realpath(path)
    if real in below:
        chain = " → ".join([*below[below.index(real) :], real])
        raise RuleError(f"{path}: extends itself: {chain}")
    table = _load(path)
    bases = table.pop("extends", []) if isinstance(table, dict) else []
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise RuleError(
            f"{path}: extends must be a file or a list of files, got {bases!r}"
        )
    tables: list[tuple[str, Any]] = []
    for base in bases:
        tables += _tables(os.path.join(os.path.dirname(path), base), [*below, real])
    return [*tables, (path, table)]


def _load(path: str) -> Any:
    suffix = suffix_of(path)
    try:
        with open(path, encoding="utf-8-sig") as file:
            if suffix == ".toml":
                return tomllib.loads(file.read())
            return json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        is_toml = isinstance(error, tomllib.TOMLDecodeError)
        raise RuleError(
            f"{path}: cannot be read as {suffix[1:].upper()}: {error}"
            f"{_SPELLING if is_toml else ''}"
        ) from error


def write_rules(rules: RuleSet, path: Any) -> None:
    """Write a rule file; see `LayoutMap.to_file`."""
    path = os.fspath(path)
    if suffix_of(path) == ".json":
        text = readable_json(rules_to_json(rules), indent=1) + "\n"
    else:
        text = to_toml(rules)
    try:
        write_whole(path, text.encode("utf-8"))
    except (OSError, UnicodeEncodeError) as error:
        raise RuleError(f"{path}: cannot be written: {error}") from error


def to_toml(rules: RuleSet) -> str:
    data = rules_to_json(rules)
    sections = {name: data.pop(name) for name in SECTIONS}
    mesh = str(rules.mesh or "")
    is_plain = re.fullmatch(r"([\w.-]+=\d+,?)+", mesh)
    if is_plain and {*data["mesh"]["axis_types"]} == {"auto"}:
        data["mesh"] = mesh
    if data["batch"] == [*batch_axes(None, rules.mesh)]:
        del data["batch"]
    entries = [entry for section in sections.values() for entry in section]
    if entries and all("optional" in entry for entry in entries):
        data["optional"] = True
        for entry in entries:
            del entry["optional"]
    lines = [f"{key} = {_toml(data[key])}" for key in data if data[key] is not None]
    for name, section in sections.items():
        lines += ["", f"[{name}]"] if section else []
        lines += [f"{_key(e.pop('pattern'))} = {_rule_value(e)}" for e in section]
    return "\n".join(lines) + "\n"


def _rule_value(entry: dict[str, Any]) -> str:
    axes = [NOTHING if dim is None else dim for dim in entry["axes"]]
    entry["axes"] = REPLICATED if axes == [ANY_DIMS] else axes
    return _toml(entry if len(entry) > 1 else entry["axes"])


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        pairs = ", ".join(f"{key} = {_toml(item)}" for key, item in value.items())
        return f"{{ {pairs} }}"
    return readable_json(value)


def _key(pattern: str) -> str:
    if "\\" in pattern and "'" not in pattern and pattern.isprintable():
        return f"'{pattern}'"
    return readable_json(pattern)


# Control characters that JSON keeps, and zero-width marks, some of which reverse text.
_HIDDEN = re.compile(r"[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")


def readable_json(value: Any, *, indent: int | None = None) -> str:
    """JSON that keeps letters of all languages and escapes invisible characters."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return _HIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def write_whole(path: str | os.PathLike[str], raw: bytes) -> None:
    """Write a file atomically, by renaming a temporary one; links are followed."""
    path = os.path.realpath(path)
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "xb") as file:
            file.write(raw)
        if os.path.exists(path):
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:  # an interrupt too must not leave the temporary file
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
