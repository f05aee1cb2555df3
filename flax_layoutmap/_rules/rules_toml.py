"""Write rule sets to files: readable TOML, or JSON as `to_json` returns it."""

import importlib.util
import os
import re
from typing import Any

from flax_layoutmap._core.errors import RuleError, bullet_list
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._core.whole_file import readable_json, write_whole
from flax_layoutmap._rules.matching import Rule
from flax_layoutmap._rules.pattern_cost import slow_because, slow_together
from flax_layoutmap._rules.rules import OPTIONS, SECTIONS, RuleSet
from flax_layoutmap._rules.rules_file import (
    MOST_RULES,
    PATIENCE_SECONDS,
    Source,
    load,
    suffix_of,
)
from flax_layoutmap._rules.serialise import (
    ANY_DIMS,
    NOTHING,
    REPLICATED,
    mesh_to_json,
    rule_to_json,
    rules_to_json,
)

# Defaults that are not written; `match` and `overlap` always are.
_DEFAULTS = {"unmatched": "replicate", "indivisible": "error", "strict": None}
# What a mesh line cannot hold.
_UNPLAIN = re.compile(r"[=,]|^\s|\s$")
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def write_rules(rules: RuleSet, path: Any) -> None:
    """Write a file of rules; see `LayoutMap.to_file`."""
    path = os.fspath(path)
    kind = suffix_of(path)
    _check_that_it_reads(rules, path)
    if kind == ".json":
        text = readable_json(rules_to_json(rules), indent=1) + "\n"
        _refuse_to_flatten(path)
    elif os.path.exists(path):
        text = _rewritten(rules, path)
    else:
        text = to_toml(rules)
    try:
        raw = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RuleError(
            f"{path}: a pattern is not valid Unicode: {error.object!r}"
        ) from error
    try:
        write_whole(path, raw)
    except OSError as error:
        raise RuleError(f"{path}: cannot be written: {error.strerror}") from error


def _check_that_it_reads(rules: RuleSet, path: str) -> None:
    """Raise for rules that `read_rules` would refuse or read differently."""
    problems: list[str] = []
    for section in SECTIONS:
        for number, rule in enumerate(getattr(rules, section), start=1):
            where = f"{section}, rule {number} {rule.pattern!r}"
            slow = slow_because(rule.pattern)
            if slow is not None:
                problems.append(f"{where}: the pattern may take very long: {slow}")
            for axis in rule.layout.axis_names:
                if axis in (NOTHING, ANY_DIMS):
                    problems.append(f"{where}: an axis {axis!r} has a meaning in files")
    every = [rule.pattern for section in SECTIONS for rule in getattr(rules, section)]
    if len(every) > MOST_RULES:
        problems.append(f"more than {MOST_RULES} rules")
    if not problems:
        too_slow = slow_together(sorted(set(every)), PATIENCE_SECONDS)
        problems += [too_slow] if too_slow else []
    if problems:
        raise RuleError(
            f"{path}: these rules cannot be in a file:\n{bullet_list(problems)}"
        )


# ------------------------------------------------------------------- as values


def document_of(rules: RuleSet) -> dict[str, Any]:
    """What a file of these rules holds: plain values, in order."""
    document: dict[str, Any] = {"schema": 1}
    if rules.mesh is not None:
        document["mesh"] = _mesh_value(rules.mesh)
    usual = () if rules.mesh is None else rules.mesh.axis_names[:1]
    if rules.batch != usual:
        document["batch"] = list(rules.batch)
    for name in OPTIONS:
        value = getattr(rules, name)
        if name not in _DEFAULTS or value != _DEFAULTS[name]:
            document[name] = value
    sections = {name: getattr(rules, name) for name in SECTIONS}
    optional = all(rule.optional for own in sections.values() for rule in own)
    if optional and any(sections.values()):
        document["optional"] = True
    for name, own in sections.items():
        if own:
            document[name] = {
                rule.pattern: _rule_value(rule, rules.mesh, optional) for rule in own
            }
    return document


def _mesh_value(mesh: DeviceMesh) -> Any:
    data = mesh_to_json(mesh)
    assert data is not None
    if set(data["axis_types"]) == {"auto"}:
        names = mesh.axis_names
        if "".join(names).isprintable() and not any(map(_UNPLAIN.search, names)):
            return str(mesh)
    return data


def _rule_value(rule: Rule, mesh: DeviceMesh | None, all_optional: bool) -> Any:
    entry = rule_to_json(rule, mesh)
    del entry["pattern"]
    if all_optional:
        del entry["optional"]  # which the file says
    if entry["axes"] == [ANY_DIMS]:
        entry["axes"] = REPLICATED
    else:
        entry["axes"] = [NOTHING if dim is None else dim for dim in entry["axes"]]
    own = rule.layout.device_mesh
    if own is not None and "mesh" in entry:
        entry["mesh"] = _mesh_value(own)
    return entry if len(entry) > 1 else entry["axes"]


# --------------------------------------------------------------------- as text


def to_toml(rules: RuleSet) -> str:
    """A new file."""
    document = document_of(rules)
    lines = [
        f"{name} = {_toml(value)}"
        for name, value in document.items()
        if name not in SECTIONS
    ]
    for section in SECTIONS:
        if section in document:
            lines += ["", f"[{section}]"]
            lines += [
                f"{_quoted(pattern)} = {_toml(value)}"
                for pattern, value in document[section].items()
            ]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return _quoted(value, literal=False)
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    pairs = ", ".join(
        f"{key if _BARE.fullmatch(key) else _quoted(key)} = {_toml(own)}"
        for key, own in value.items()
    )
    return f"{{ {pairs} }}"


def _quoted(text: str, *, literal: bool = True) -> str:
    """A string of TOML; without escapes where that is possible and `literal`."""
    if literal and "\\" in text and "'" not in text and text.isprintable():
        return f"'{text}'"
    return readable_json(text)


def _refuse_to_flatten(path: str) -> Source | None:
    """The existing file; raises where it holds more than a RuleSet can."""
    if not os.path.exists(path):
        return None
    source = load(path)
    for key in ("extends", "variants"):
        if key in source.data:
            raise RuleError(
                f"{path}: holds {key!r}, which would be lost; write to another file, "
                "or edit this one by hand"
            )
    return source


def _rewritten(rules: RuleSet, path: str) -> str:
    """The text of a file that exists, changed only where the rules are others."""
    source = _refuse_to_flatten(path)
    assert source is not None
    wanted = document_of(rules)
    if source.data == wanted and _orders(source.data) == _orders(wanted):
        return source.text
    if "#" not in source.text:
        return to_toml(rules)
    if importlib.util.find_spec("tomlkit") is None:
        raise RuleError(
            f"{path}: to keep its comments needs tomlkit; run pip install "
            "'flax-layoutmap[toml]', or write to another file"
        )
    return _with_comments(source.text, wanted)


def _orders(document: dict[str, Any]) -> list[list[str]]:
    return [list(document.get(section, ())) for section in SECTIONS]


def _with_comments(text: str, wanted: dict[str, Any]) -> str:
    """The document with other values; comments stay with what they stand above."""
    import tomlkit

    old, new = tomlkit.parse(text), tomlkit.document()
    options = {k: v for k, v in wanted.items() if k not in SECTIONS}
    written = [key.key for key, _ in old.body if key and key.key not in SECTIONS]
    for key, item in old.body:
        if key is None:
            new.add(item)
        elif key.key in SECTIONS:
            if key.key in wanted:
                table = _table(item, wanted[key.key])
                new.append(key, table)
                # After append, which adds an empty line above a table.
                for part in ("indent", "comment_ws", "comment"):
                    setattr(table.trivia, part, getattr(item.trivia, part))
        elif key.key in wanted:
            value = wanted[key.key]
            new.append(key, item if item.unwrap() == value else _other(item, value))
        if key is not None and key.key == written[-1]:
            for name in (name for name in options if name not in written):
                new.append(name, tomlkit.value(_toml(options[name])))
    for section in SECTIONS:
        if section in wanted and section not in old:
            new.append(section, _table(None, wanted[section]))
    return tomlkit.dumps(new)


def _other(item: Any, value: Any) -> Any:
    """Another value with the comment that stands behind an old one."""
    import tomlkit

    new = tomlkit.value(_toml(value))
    new.trivia.comment_ws = item.trivia.comment_ws
    new.trivia.comment = item.trivia.comment
    return new


def _table(old: Any, wanted: dict[str, Any]) -> Any:
    """A section in the wanted order; comments above and beside entries come along."""
    import tomlkit

    above: dict[str, list[Any]] = {}
    items: dict[str, Any] = {}
    pending: list[Any] = []
    for key, item in old.value.body if old is not None else ():
        if key is None:
            pending.append(item)
        elif key.key in wanted:  # else its comments go to the next one
            above[key.key], items[key.key], pending = pending, (key, item), []
    table = tomlkit.table()
    for pattern, value in wanted.items():
        for item in above.get(pattern, ()):
            table.add(item)
        if pattern not in items:
            table.append(_key(pattern), tomlkit.value(_toml(value)))
            continue
        key, item = items[pattern]
        table.append(key, item if item.unwrap() == value else _other(item, value))
    for item in pending:
        table.add(item)
    return table


def _key(pattern: str) -> Any:
    """A key as `to_toml` writes it."""
    import tomlkit

    return next(iter(tomlkit.parse(f"{_quoted(pattern)} = 1").body))[0]
