"""Read rule sets from TOML or JSON files, schema 1.

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
from typing import Any, NamedTuple

from flax_layoutmap._core.errors import (
    LayoutError,
    RuleError,
    bullet_list,
    did_you_mean,
)
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh
from flax_layoutmap._rules.matching import Rule
from flax_layoutmap._rules.pattern_cost import slow_together
from flax_layoutmap._rules.rules import OPTIONS, SECTIONS, RuleSet, check_options
from flax_layoutmap._rules.serialise import mesh_of, rule_of, short

MOST_BYTES = 1 << 20
MOST_RULES = 10_000
MOST_FILES = 16
MOST_DOTS = 32  # in a line
# CPU time for checking the patterns of a file and what it extends: not wall-clock time,
# so that a busy machine reads the same files.
PATIENCE_SECONDS = 10.0

_COMMON = {"mesh", "batch", *OPTIONS, *SECTIONS}
SUFFIXES = (".toml", ".json")
_FILE_KEYS = {"schema", "extends", "optional", "variants", *_COMMON}
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


class _Entry(NamedTuple):
    """One value as written, and where."""

    value: Any
    source: Source
    name: str

    @property
    def where(self) -> str:
        return self.source.line(self.name)


def suffix_of(path: str) -> str:
    """`".toml"` or `".json"`; raises RuleError for anything else."""
    kind = os.path.splitext(path)[1].lower()
    if kind not in SUFFIXES:
        raise RuleError(
            f"{path}: a file of rules ends in .toml or .json, this one in {kind!r}"
        )
    return kind


def load(path: str) -> Source:
    """Read and parse one file of limited size."""
    kind = suffix_of(path)
    if os.path.exists(path) and not os.path.isfile(path):
        raise RuleError(f"{path}: is no file")  # reading a pipe might not end
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
        fix = _fix_of_line(str(error), raw) if kind == ".toml" else ""
        raise RuleError(f"{path}: is no {kind[1:].upper()}: {error}{fix}") from error
    if not isinstance(data, dict):
        raise RuleError(f"{path}: holds a {type(data).__name__}, not a table")
    return Source(path, text, data)


def _fix_of_line(error: str, raw: bytes) -> str:
    """What a line that tomllib cannot read should be: quotes, or "-" for None."""
    place = re.search(r"at line (\d+)", error)
    line = raw.split(b"\n")[int(place[1]) - 1].decode() if place else ""
    key, _, value = line.partition(" = " if " = " in line else "=")
    key = key.strip()
    if value and not re.fullmatch(r"""[\w.-]+|'.*'|"[^\\]*\"""", key):
        pattern = key.strip("\"'")
        return f"; write the pattern in single quotes: '{pattern}' = …"
    return '; a dim that is not sharded is "-", not None' if "None" in value else ""


def _check_dots(text: str) -> None:
    """tomllib takes quadratic time, or more, in the parts of a dotted key."""
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


# ---------------------------------------------------------------------- reading


def read_rules(
    path: Any, *, mesh: Any = None, variant: str | None = None, within: Any = None
) -> RuleSet:
    """Read a file of rules; see `LayoutMap.from_file`."""
    path = os.fspath(path)
    folder = os.path.dirname(path) if within is None else os.fspath(within)
    reading = _Reading(os.path.realpath(folder or os.curdir))
    reading.gather(path)
    target = as_mesh(mesh)
    if target is None:
        target = reading.own_mesh(variant)
    for name in reading.chosen(target, variant, path):
        for source, data in reading.variants[name]:
            reading.merge(source, data)
    rules = reading.built(target, moved=mesh is not None)
    if rules is None:
        problems = reading.problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise RuleError(f"{count} in {path}:\n{bullet_list(problems)}")
    return rules


class _Reading:
    """The merged content of a file and those that it extends, and its problems.

    All files must be in `folder`. `options`, and per section the patterns in order, map
    to the value that wins; `variants` has the tables of each variant with their files.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.options: dict[str, _Entry] = {}
        self.sections: dict[str, dict[str, _Entry]] = {name: {} for name in SECTIONS}
        self.variants: dict[str, list[tuple[Source, dict[str, Any]]]] = {}
        self.problems: list[str] = []
        self._files = 0

    def gather(self, path: str, above: Sequence[str] = ()) -> None:
        """Read a file after those that it extends."""
        real = os.path.realpath(path)
        if real in above:
            chain = " → ".join([*above[above.index(real) :], real])
            raise RuleError(f"{path}: extends itself: {chain}")
        self._files += 1
        if self._files > MOST_FILES:
            raise RuleError(f"{path}: more than {MOST_FILES} files extend each other")
        source = load(path)
        given = source.data.get("schema")
        if given != 1 or given is True:
            raise RuleError(
                f"{path}: rules of schema {given!r} cannot be read; this is schema 1"
                + ("; write schema = 1 in the first line" if given is None else "")
            )
        self._check_keys(source, source.data, _FILE_KEYS, "")
        for base in self._bases(source):
            self.gather(self._beside(source, base), [*above, real])
        self.merge(source, source.data)
        variants = source.data.get("variants", {})
        if not isinstance(variants, dict):
            self._problem(source, "variants", "variants must be tables")
            return
        for name, data in variants.items():
            if not isinstance(data, dict):
                self._problem(source, name, f"the variant {name!r} is no table")
                continue
            self._check_keys(source, data, _VARIANT_KEYS, f" in variant {name!r}")
            self.variants.setdefault(name, []).append((source, data))

    def _problem(self, source: Source, name: str, text: str) -> None:
        """Record a problem, with the line where this name stands."""
        self.problems.append(f"{source.line(name)}: {text}")

    def _bases(self, source: Source) -> list[str]:
        """The files that a file extends."""
        given = source.data.get("extends", [])
        bases = [given] if isinstance(given, str) else given
        if isinstance(bases, list) and all(isinstance(base, str) for base in bases):
            return bases
        text = f"extends must be a file or a list of files, got {given!r}"
        self._problem(source, "extends", text)
        return []

    def _beside(self, source: Source, base: str) -> str:
        """The path of a file that another one extends; it has to be in the folder."""
        path = os.path.join(os.path.dirname(source.path), base)
        where = f"{source.line('extends')}: extends {base!r}"
        if not Path(os.path.realpath(path)).is_relative_to(self.folder):
            raise RuleError(
                f"{where}, which is not in {self.folder}: put it there, or pass a "
                "folder that holds both files, LayoutMap.from_file(path, within=folder)"
            )
        if base.endswith(SUFFIXES) and not os.path.exists(path):
            raise RuleError(f"{where}, but there is no {path}")
        return path

    def _check_keys(
        self, source: Source, data: Mapping[str, Any], known: set[str], place: str
    ) -> None:
        for key in data:
            if key not in known:
                near = did_you_mean(key, sorted(known))
                self._problem(source, key, f"unknown key {key!r}{place}{near}")

    def merge(self, source: Source, data: Mapping[str, Any]) -> None:
        """Merge a table; its values win over earlier ones.

        An existing pattern keeps its place; a new one goes where it wins: in front with
        `overlap="first"`, else behind.
        """
        for name in ("mesh", "batch", *OPTIONS):
            if name in data:
                self.options[name] = _Entry(data[name], source, name)
        overlap = self.options.get("overlap")
        in_front = overlap is not None and overlap.value == "first"
        for name in SECTIONS:
            known, new = self.sections[name], dict[str, _Entry]()
            given = set[str]()
            for entry in self._entries(source, data, name):
                pattern = entry.name
                if pattern in given:
                    text = f"the pattern {pattern!r} is there twice"
                    self._problem(source, pattern, text)
                elif entry.value is False:
                    if known.pop(pattern, None) is None:
                        near = did_you_mean(pattern, known)
                        text = f"there is no rule {pattern!r} to drop{near}"
                        self._problem(source, pattern, text)
                else:
                    (known if pattern in known else new)[pattern] = entry
                given.add(pattern)
            self.sections[name] = {**new, **known} if in_front else {**known, **new}
            if sum(map(len, self.sections.values())) > MOST_RULES:
                raise RuleError(f"{source.path}: more than {MOST_RULES} rules")

    def _entries(
        self, source: Source, data: Mapping[str, Any], section: str
    ) -> Iterator[_Entry]:
        """The rules of a section; a table, or a list as `to_json` has it."""
        given = data.get(section, {})
        if isinstance(given, dict):
            for pattern, value in given.items():
                yield _Entry(value, source, pattern)
            return
        if not isinstance(given, list):
            text = f"{section} must be a table of patterns, got {short(given)}"
            self._problem(source, section, text)
            return
        for number, entry in enumerate(given, start=1):
            if isinstance(entry, dict) and isinstance(entry.get("pattern"), str):
                value = {key: entry[key] for key in entry if key != "pattern"}
                yield _Entry(value, source, entry["pattern"])
            else:
                self.problems.append(
                    f"{source.path}: {section}, entry {number}: it needs a pattern and "
                    f"axes, got {short(entry)}"
                )

    def own_mesh(self, variant: str | None) -> DeviceMesh | None:
        """The mesh of the files, or of the variant that was asked for."""
        entry = self.options.get("mesh")
        for source, data in self.variants.get(variant or "", ()):
            if "mesh" in data:
                entry = _Entry(data["mesh"], source, "mesh")
        if entry is None:
            return None
        return self._caught(entry, "mesh", lambda: mesh_of(entry.value))

    def chosen(
        self, mesh: DeviceMesh | None, variant: str | None, path: str
    ) -> list[str]:
        """The variants that apply: those for the mesh's axes, then the named one."""
        chosen = []
        for name, parts in self.variants.items():
            for source, data in parts:
                axes = data.get("mesh_axes")
                if axes is None or name == variant or name in chosen:
                    continue
                if not _are_names(axes):
                    text = f"mesh_axes must be a list of axis names, got {short(axes)}"
                    self._problem(source, "mesh_axes", text)
                elif mesh is not None and set(axes) <= set(mesh.axis_names):
                    chosen.append(name)
        if variant is not None:
            if variant not in self.variants:
                known = ", ".join(map(repr, self.variants)) or "none"
                raise RuleError(
                    f"{path}: there is no variant {variant!r}"
                    f"{did_you_mean(variant, self.variants)}; it has {known}"
                )
            chosen.append(variant)
        return chosen

    def built(self, mesh: DeviceMesh | None, *, moved: bool) -> RuleSet | None:
        """The rule set, or None if there are problems; `moved`: on another mesh."""
        deadline = time.thread_time() + PATIENCE_SECONDS
        sections: dict[str, list[Rule]] = {name: [] for name in SECTIONS}
        for name, entries in self.sections.items():
            for pattern, entry in entries.items():
                if time.thread_time() > deadline:
                    raise RuleError(
                        f"{entry.where}: to check the patterns up to here took more "
                        f"than {PATIENCE_SECONDS:.0f} s of CPU time; write simpler ones"
                    )
                optional = entry.source.data.get("optional", False)
                make = functools.partial(
                    rule_of, pattern, entry.value, mesh, moved, optional
                )
                rule = self._caught(entry, f"{name}, {pattern!r}", make)
                if rule is not None:
                    sections[name].append(rule)
        given = {name: self.options[name] for name in OPTIONS if name in self.options}
        options: Any = {name: entry.value for name, entry in given.items()}
        for name, entry in given.items():
            check = functools.partial(check_options, **{name: entry.value})
            self._caught(entry, name, check)
        batch = self._batch(mesh, moved)
        if not self.problems:
            patterns = {rule.pattern for made in sections.values() for rule in made}
            too_slow = slow_together(sorted(patterns), PATIENCE_SECONDS)
            self.problems += [too_slow] if too_slow else []
        if self.problems:
            return None
        made: Any = {name: tuple(rules) for name, rules in sections.items()}
        return RuleSet(mesh=mesh, batch=batch, **options, **made)

    def _batch(self, mesh: DeviceMesh | None, moved: bool) -> tuple[str, ...]:
        entry = self.options.get("batch")
        first = () if mesh is None else mesh.axis_names[:1]
        if entry is None:
            return first
        make = functools.partial(_batch_axes, entry.value, mesh, moved)
        return self._caught(entry, "batch", make) or ()

    def _caught(self, entry: _Entry, what: str, make: Callable[[], Any]) -> Any:
        """The result of `make`; None, with a problem recorded, if it raises."""
        try:
            return make()
        except (LayoutError, TypeError, KeyError) as error:
            text = f"{error!r}" if isinstance(error, KeyError) else str(error)
            self.problems.append(f"{entry.where}: {what}: {text}")
            return None


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _batch_axes(value: Any, mesh: DeviceMesh | None, moved: bool) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else value
    if not _are_names(given):
        raise RuleError(f"batch must be a list of axis names, got {short(given)}")
    if mesh is None:
        return tuple(given)
    known = tuple(axis for axis in given if axis in mesh.axis_names)
    if moved:  # as `RuleSet.on` does
        return known or (mesh.axis_names[:1] if given else ())
    for axis in given:
        if axis not in mesh.axis_names:
            raise RuleError(
                f"the mesh {str(mesh)!r} has no axis {axis!r}"
                f"{did_you_mean(axis, mesh.axis_names)}"
            )
    return known
