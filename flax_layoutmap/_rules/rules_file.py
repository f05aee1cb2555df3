"""Rule sets from files that people write: TOML or JSON, schema 1.

`docs/rule_files.md` describes the format. A file is data: nothing in it is run, and
what reading and matching it may cost is bounded.
"""

import dataclasses
import functools
import json
import os
import re
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flax_layoutmap._core.errors import (
    LayoutError,
    RuleError,
    bullet_list,
    did_you_mean,
)
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh
from flax_layoutmap._rules.rules import RuleSet, check_options
from flax_layoutmap._rules.rules_values import mesh_of, rule_of, short, slow_together

SECTIONS = ("rules", "activations", "names", "optimizer")
OPTIONS = ("match", "overlap", "unmatched", "indivisible", "strict")

MOST_BYTES = 1 << 20
MOST_RULES = 10_000
MOST_FILES = 16
MOST_DOTS = 32  # in a line
# For all patterns of a file and what it extends, to be judged.
PATIENCE_SECONDS = 10.0

_COMMON = {"mesh", "batch", *OPTIONS, *SECTIONS}
_SUFFIXES = (".toml", ".json")
_FILE_KEYS = {"schema", "extends", "variants", *_COMMON}
_VARIANT_KEYS = {"mesh_axes", *_COMMON}


@dataclasses.dataclass
class Source:
    """A file: its name, its text for line numbers, and what it holds."""

    path: str
    text: str
    data: dict[str, Any]

    @functools.cached_property
    def lines(self) -> dict[str, int]:
        """Key or pattern → the line where it stands first."""
        found: dict[str, int] = {}
        for number, line in enumerate(self.text.splitlines(), start=1):
            for key in _KEY.finditer(line):
                name = key["plain"] or key["literal"]
                if name is None:
                    name = _unquoted(key["quoted"] or "")
                found.setdefault(name, number)
                if key["plain"]:
                    found.setdefault(name.partition(".")[0], number)
        return found

    def line(self, name: str) -> str:
        """`rules.toml:12`, where a name stands; the file alone if it is not found."""
        number = self.lines.get(name)
        return self.path if number is None else f"{self.path}:{number}"


# What stands before `=` or `:`, in `[…]`, or as the pattern of an entry.
_QUOTED = r'"(?P<quoted>(?:[^"\\]|\\.)*)"|\'(?P<literal>[^\']*)\''
_KEY = re.compile(
    rf'^[\s{{,\[]*(?:"pattern"\s*:\s*)?(?:{_QUOTED}|(?P<plain>[\w.-]+))(?=\s*[=:,}}\]])'
)


def _unquoted(text: str) -> str:
    try:
        return json.loads(f'"{text}"')
    except ValueError:
        return text  # an escape of TOML alone


@dataclasses.dataclass(slots=True)
class _Entry:
    """One value as written, and where."""

    value: Any
    source: Source
    name: str

    @property
    def where(self) -> str:
        return self.source.line(self.name)


@dataclasses.dataclass(slots=True)
class _Document:
    """What files say together."""

    options: dict[str, _Entry] = dataclasses.field(default_factory=dict)
    sections: dict[str, dict[str, _Entry]] = dataclasses.field(
        default_factory=lambda: {name: {} for name in SECTIONS}
    )
    variants: dict[str, list[tuple[Source, dict[str, Any]]]] = dataclasses.field(
        default_factory=dict
    )


def read_rules(
    path: Any, *, mesh: Any = None, variant: str | None = None, within: Any = None
) -> RuleSet:
    """Reads a file of rules; see `LayoutMap.from_file`."""
    document, problems = _Document(), list[str]()
    path = os.fspath(path)
    folder = os.path.dirname(path) if within is None else os.fspath(within)
    folder = os.path.realpath(folder or os.curdir)
    _gather(path, document, problems, [], [], folder)
    target = as_mesh(mesh)
    if target is None:
        target = _mesh_of(document, problems, variant)
    for name in _chosen(document, target, variant, problems, path):
        for source, data in document.variants[name]:
            _merge(source, data, document, problems)
    rules = _built(document, target, mesh is not None, problems)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise RuleError(f"{count} in {path}:\n{bullet_list(problems)}")
    assert rules is not None
    return rules


# ------------------------------------------------------------------------ files


def load(path: str) -> Source:
    """Reads and parses one file.

    Raises:
        RuleError: it is no file of rules, too large, or damaged.
    """
    kind = os.path.splitext(path)[1].lower()
    if kind not in _SUFFIXES:
        raise RuleError(
            f"{path}: a file of rules ends in .toml or .json, this one in {kind!r}"
        )
    if os.path.exists(path) and not os.path.isfile(path):
        raise RuleError(f"{path}: is no file")  # reading a pipe would never end
    try:
        with open(path, "rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise RuleError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > MOST_BYTES:
        raise RuleError(f"{path}: larger than {MOST_BYTES} bytes")
    try:
        text = raw.decode("utf-8-sig")
        if kind == ".toml":
            _check_dots(text)
        data = (
            tomllib.loads(text)
            if kind == ".toml"
            else json.loads(text, object_pairs_hook=_no_key_twice)
        )
    except RecursionError as error:
        raise RuleError(f"{path}: nested too deeply") from error
    except ValueError as error:
        raise RuleError(f"{path}: is no {kind[1:].upper()}: {error}") from error
    if not isinstance(data, dict):
        raise RuleError(f"{path}: holds a {type(data).__name__}, not a table")
    return Source(path, text, data)


def _check_dots(text: str) -> None:
    """tomllib takes the square of the parts of a dotted key, or more."""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.count(".") > MOST_DOTS:
            raise ValueError(f"line {number} has more than {MOST_DOTS} dots")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def _gather(
    path: str,
    document: _Document,
    problems: list[str],
    above: Sequence[str],
    seen: list[str],
    folder: str,
) -> None:
    """Reads a file after those that it extends, which have to be in a folder."""
    real = os.path.realpath(path)
    if real in above:
        chain = " → ".join([*above[above.index(real) :], real])
        raise RuleError(f"{path}: extends itself: {chain}")
    seen.append(real)
    if len(seen) > MOST_FILES:
        raise RuleError(f"{path}: more than {MOST_FILES} files extend each other")
    source = load(path)
    if source.data.get("schema") != 1 or source.data["schema"] is True:
        given = source.data.get("schema")
        raise RuleError(
            f"{path}: rules of schema {given!r} cannot be read; this is schema 1"
            + ("; write schema = 1 in the first line" if given is None else "")
        )
    _check_keys(source, source.data, _FILE_KEYS, "", problems)
    extends = source.data.get("extends", [])
    bases = [extends] if isinstance(extends, str) else extends
    if not isinstance(bases, list) or not all(isinstance(b, str) for b in bases):
        problems.append(
            f"{source.line('extends')}: extends must be a file or a list of files, got "
            f"{extends!r}"
        )
        bases = []
    for base in bases:
        beside = os.path.join(os.path.dirname(path), base)
        if not Path(os.path.realpath(beside)).is_relative_to(folder):
            raise RuleError(
                f"{source.line('extends')}: extends {base!r}, which is not in "
                f"{folder}: put it there, or pass a folder that holds both files, "
                "LayoutMap.from_file(path, within=folder)"
            )
        if base.endswith(_SUFFIXES) and not os.path.exists(beside):
            raise RuleError(
                f"{source.line('extends')}: extends {base!r}, but there is no {beside}"
            )
        _gather(beside, document, problems, [*above, real], seen, folder)
    _merge(source, source.data, document, problems)
    variants = source.data.get("variants", {})
    if not isinstance(variants, dict):
        problems.append(f"{source.line('variants')}: variants must be tables")
        return
    for name, data in variants.items():
        if not isinstance(data, dict):
            problems.append(f"{source.line(name)}: the variant {name!r} is no table")
            continue
        place = f" in variant {name!r}"
        _check_keys(source, data, _VARIANT_KEYS, place, problems)
        document.variants.setdefault(name, []).append((source, data))


def _check_keys(
    source: Source,
    data: Mapping[str, Any],
    known: set[str],
    place: str,
    problems: list[str],
) -> None:
    for key in data:
        if key not in known:
            problems.append(
                f"{source.line(key)}: unknown key {key!r}{place}"
                f"{did_you_mean(key, sorted(known))}"
            )


# ---------------------------------------------------------------------- merging


def _merge(
    source: Source, data: Mapping[str, Any], document: _Document, problems: list[str]
) -> None:
    """What this says wins over what was said before.

    A pattern that is there keeps its place; a new one goes where it wins: in front
    with `overlap="first"`, else behind.
    """
    for name in ("mesh", "batch", *OPTIONS):
        if name in data:
            document.options[name] = _Entry(data[name], source, name)
    overlap = document.options.get("overlap")
    in_front = overlap is not None and overlap.value == "first"
    for name in SECTIONS:
        known, new = document.sections[name], dict[str, _Entry]()
        given = set[str]()
        for pattern, value in _entries(source, data, name, problems):
            entry = _Entry(value, source, pattern)
            if pattern in given:
                problems.append(
                    f"{entry.where}: the pattern {pattern!r} is there twice"
                )
            elif value is False:
                if known.pop(pattern, None) is None:
                    near = did_you_mean(pattern, known)
                    problems.append(
                        f"{entry.where}: there is no rule {pattern!r} to drop{near}"
                    )
            else:
                (known if pattern in known else new)[pattern] = entry
            given.add(pattern)
        merged = {**new, **known} if in_front else {**known, **new}
        document.sections[name] = merged
        if sum(map(len, document.sections.values())) > MOST_RULES:
            raise RuleError(f"{source.path}: more than {MOST_RULES} rules")


def _entries(
    source: Source, data: Mapping[str, Any], section: str, problems: list[str]
) -> Iterator[tuple[str, Any]]:
    """Pattern and value of each rule; a table, or a list as `to_json` has it."""
    given = data.get(section, {})
    if isinstance(given, dict):
        yield from given.items()
    elif isinstance(given, list):
        for number, entry in enumerate(given, start=1):
            if not isinstance(entry, dict) or not isinstance(entry.get("pattern"), str):
                problems.append(
                    f"{source.path}: {section}, entry {number}: it needs a pattern and "
                    f"axes, got {short(entry)}"
                )
                continue
            value = {key: entry[key] for key in entry if key != "pattern"}
            yield entry["pattern"], value
    else:
        problems.append(
            f"{source.line(section)}: {section} must be a table of patterns, got "
            f"{short(given)}"
        )


def _chosen(
    document: _Document,
    mesh: DeviceMesh | None,
    variant: str | None,
    problems: list[str],
    path: str,
) -> list[str]:
    """The variants that apply: those for the axes of the mesh, then the named one."""
    chosen = []
    for name, parts in document.variants.items():
        for source, data in parts:
            axes = data.get("mesh_axes")
            if axes is None or name == variant or name in chosen:
                continue
            if not isinstance(axes, list) or not all(isinstance(a, str) for a in axes):
                problems.append(
                    f"{source.line('mesh_axes')}: mesh_axes must be a list of axis "
                    f"names, got {short(axes)}"
                )
            elif mesh is not None and set(axes) <= set(mesh.axis_names):
                chosen.append(name)
    if variant is not None:
        if variant not in document.variants:
            known = ", ".join(map(repr, document.variants)) or "none"
            raise RuleError(
                f"{path}: there is no variant {variant!r}"
                f"{did_you_mean(variant, document.variants)}; it has {known}"
            )
        chosen.append(variant)
    return chosen


# --------------------------------------------------------------------- building


def _mesh_of(
    document: _Document, problems: list[str], variant: str | None = None
) -> DeviceMesh | None:
    """The mesh of the files, or of the variant that was asked for."""
    entry = document.options.get("mesh")
    for source, data in document.variants.get(variant or "", ()):
        if "mesh" in data:
            entry = _Entry(data["mesh"], source, "mesh")
    if entry is None:
        return None
    made = _caught(entry.where, "mesh", problems, lambda: mesh_of(entry.value))
    return made if isinstance(made, DeviceMesh) else None


def _built(
    document: _Document, mesh: DeviceMesh | None, moved: bool, problems: list[str]
) -> RuleSet | None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    sections: dict[str, Any] = {}
    for name in SECTIONS:
        made = []
        for pattern, entry in document.sections[name].items():
            if time.monotonic() > deadline:
                raise RuleError(
                    f"{entry.where}: to judge the patterns up to here took more than "
                    f"{PATIENCE_SECONDS:.0f} s; write simpler ones"
                )
            made.append(
                _caught(
                    entry.where,
                    f"{name}, {pattern!r}",
                    problems,
                    lambda p=pattern, e=entry: rule_of(p, e.value, mesh, moved),
                )
            )
        sections[name] = tuple(made)
    options: dict[str, Any] = {}
    for name in OPTIONS:
        option = document.options.get(name)
        if option is not None:
            options[name] = option.value
            given = {name: option.value}
            _caught(option.where, name, problems, lambda g=given: check_options(**g))
    entry = document.options.get("batch")
    where = "" if entry is None else entry.where
    batch = _caught(where, "batch", problems, lambda: _batch(document, mesh, moved))
    if problems:
        return None
    too_slow = slow_together(sections)
    if too_slow is not None:
        problems.append(too_slow)
        return None
    return RuleSet(mesh=mesh, batch=batch, **options, **sections)


def _caught(where: str, what: str, problems: list[str], make: Callable[[], Any]) -> Any:
    """What `make` makes; None, with a problem noted, where it refuses."""
    try:
        return make()
    except (LayoutError, TypeError, KeyError) as error:
        text = f"{error!r}" if isinstance(error, KeyError) else str(error)
        problems.append(f"{where}: {what}: {text}")
        return None


def _batch(
    document: _Document, mesh: DeviceMesh | None, moved: bool
) -> tuple[str, ...]:
    entry = document.options.get("batch")
    first = () if mesh is None else mesh.axis_names[:1]
    if entry is None:
        return first
    given = [entry.value] if isinstance(entry.value, str) else entry.value
    if not isinstance(given, list) or not all(isinstance(a, str) for a in given):
        raise RuleError(f"batch must be a list of axis names, got {short(given)}")
    if mesh is None:
        return tuple(given)
    known = tuple(axis for axis in given if axis in mesh.axis_names)
    if moved:  # as `RuleSet.on` does
        return known or (first if given else ())
    for axis in given:
        if axis not in mesh.axis_names:
            raise RuleError(
                f"the mesh {str(mesh)!r} has no axis {axis!r}"
                f"{did_you_mean(axis, mesh.axis_names)}"
            )
    return known
