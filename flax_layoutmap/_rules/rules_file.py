"""Rule files, TOML or JSON; `docs/rule_files.md` describes the format."""

import json
import os
import re
import tomllib
from collections.abc import Sequence
from typing import Any

from flax_layoutmap._core.errors import RuleError
from flax_layoutmap._core.whole_file import readable_json, write_whole
from flax_layoutmap._rules.rules import SECTIONS, RuleSet, batch_axes
from flax_layoutmap._rules.serialise import (
    ANY_DIMS,
    NOTHING,
    REPLICATED,
    rules_from_tables,
    rules_to_json,
)

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
