"""Rule files, TOML or JSON; `docs/rule_files.md` describes the format."""

import json
import os
import re
import tomllib
from collections.abc import Sequence
from typing import Any

from flax_layoutmap._core.errors import RuleError
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._core.whole_file import readable_json, write_whole
from flax_layoutmap._rules.matching import Rule
from flax_layoutmap._rules.rules import OPTIONS, SECTIONS, RuleSet
from flax_layoutmap._rules.serialise import (
    ANY_DIMS,
    NOTHING,
    REPLICATED,
    mesh_to_json,
    rule_to_json,
    rules_from_tables,
    rules_to_json,
)

_SUFFIXES = (".toml", ".json")
_SPELLING = '; write patterns in single quotes, and "-" for a dim that is not sharded'


def suffix_of(path: str) -> str:
    """`".toml"` or `".json"`; raises RuleError for anything else."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in _SUFFIXES:
        raise RuleError(f"{path}: a rule file ends in .toml or .json, not {suffix!r}")
    return suffix


# ---------------------------------------------------------------------- reading


def read_rules(path: Any, *, mesh: Any = None) -> RuleSet:
    """Read a rule file; see `LayoutMap.from_file`."""
    return rules_from_tables(_tables(os.fspath(path)), mesh)


def _tables(path: str, below: Sequence[str] = ()) -> list[tuple[str, Any]]:
    """The tables of a file: of those that it extends, in order, then its own."""
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


# ---------------------------------------------------------------------- writing


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
    """The text of a TOML file of these rules."""
    every = [rule for name in SECTIONS for rule in getattr(rules, name)]
    head: dict[str, Any] = {"schema": 1}
    if rules.mesh is not None:
        head["mesh"] = _mesh_value(rules.mesh)
    if rules.batch != (() if rules.mesh is None else rules.mesh.axis_names[:1]):
        head["batch"] = list(rules.batch)
    options = {name: getattr(rules, name) for name in OPTIONS}
    head |= {name: value for name, value in options.items() if value is not None}
    if every and all(rule.optional for rule in every):
        head["optional"] = True
    lines = [f"{name} = {_toml(value)}" for name, value in head.items()]
    for section in SECTIONS:
        if getattr(rules, section):
            lines += ["", f"[{section}]"]
        for rule in getattr(rules, section):
            value = _rule_value(rule, rules.mesh, "optional" in head)
            lines.append(f"{_key(rule.pattern)} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _mesh_value(mesh: DeviceMesh) -> Any:
    is_plain = all(re.fullmatch(r"[\w.-]+", name) for name in mesh.axis_names)
    data = mesh_to_json(mesh)
    assert data is not None
    return str(mesh) if is_plain and set(data["axis_types"]) == {"auto"} else data


def _rule_value(rule: Rule, mesh: DeviceMesh | None, all_optional: bool) -> Any:
    entry = rule_to_json(rule, mesh)
    del entry["pattern"]
    if all_optional:
        del entry["optional"]  # which the file says
    axes = [NOTHING if dim is None else dim for dim in entry["axes"]]
    entry["axes"] = REPLICATED if axes == [ANY_DIMS] else axes
    return entry if len(entry) > 1 else entry["axes"]


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        pairs = ", ".join(f"{key} = {_toml(item)}" for key, item in value.items())
        return f"{{ {pairs} }}"
    return readable_json(value)


def _key(pattern: str) -> str:
    """A pattern as a key; without escapes where that is possible."""
    if "\\" in pattern and "'" not in pattern and pattern.isprintable():
        return f"'{pattern}'"
    return readable_json(pattern)
