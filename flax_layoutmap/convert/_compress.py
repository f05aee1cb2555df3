"""Find a few regular expressions that give each of many paths its layout."""

import itertools
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

# An index in a path: `layers/0`, `layers.0` (Hugging Face), `block_0`.
INDEX = re.compile(r"(?<=[/_.])\d+(?=[/.]|$)|(?<=[A-Za-z])\d+(?=/)|^\d+(?=[/.])")

Value = TypeVar("Value", bound=Hashable)


class _Kind(NamedTuple):
    """Paths that differ only in indices and have the same value."""

    parts: tuple[str, ...]  # as regular expressions
    paths: tuple[str, ...]
    value: Hashable


class _Pattern(NamedTuple):
    """The last parts of a path, each with alternatives, and the anchors needed."""

    parts: tuple[tuple[str, ...], ...]
    start: str
    end: str

    def __str__(self) -> str:
        texts = [x[0] if len(x) == 1 else f"({'|'.join(x)})" for x in self.parts]
        return f"{self.start}{'/'.join(texts)}{self.end}"


def compress(values: Mapping[str, Value]) -> dict[str, Value]:
    """Find a few patterns, to be searched in paths, that give each path its value.

    Each path is only matched by patterns of its value. A pattern is the shortest end of
    a path that distinguishes it from paths with other values, with at least two names
    if the path has two (`up/kernel`). Indices become `\\d+`. Patterns that differ in a
    single part are merged (`(gate|up)/kernel`).

    >>> compress({"0/up/w": "a", "1/up/w": "a", "0/gate/w": "a", "0/out/w": "b"})
    {'(up|gate)/w': 'a', 'out/w': 'b'}
    """
    kinds = kinds_of(values)
    chosen: dict[str, Any] = {}
    for value in dict.fromkeys(kind.value for kind in kinds):
        others = [kind for kind in kinds if kind.value != value]
        ends: list[_Pattern] = []
        for kind in kinds:
            if kind.value == value and not any(_ends_with(kind, x) for x in ends):
                ends.append(_shortest(kind, others))
        chosen |= dict.fromkeys(map(str, _merged(ends)), value)
    return chosen


def kinds_of(values: Mapping[str, Value]) -> list[_Kind]:
    """Group the paths that differ only in indices, in the order of the paths."""
    templates = {path: INDEX.sub("0", path) for path in values}
    values_of: dict[str, set[Hashable]] = {}
    for path, value in values.items():
        values_of.setdefault(templates[path], set()).add(value)
    groups: dict[tuple[str, bool, Value], list[str]] = {}
    for path, value in values.items():
        are_alike = len(values_of[templates[path]]) == 1
        text = templates[path] if are_alike else path
        groups.setdefault((text, are_alike, value), []).append(path)
    kinds = []
    for (text, are_alike, value), paths in groups.items():
        slots = [r"\d+" if are_alike else index for index in INDEX.findall(text)]
        names = [re.escape(name).replace(r"\-", "-") for name in INDEX.split(text)]
        pieces = itertools.zip_longest(names, slots, fillvalue="")
        parts = "".join(itertools.chain(*pieces)).split("/")
        kinds.append(_Kind(tuple(parts), tuple(paths), value))
    return kinds


def _shortest(kind: _Kind, others: Sequence[_Kind]) -> _Pattern:
    """The shortest end of a kind's path that does not match the others."""
    count = len(kind.parts)
    named = [at for at, part in enumerate(kind.parts) if part != r"\d+"]
    for length in range(count - (named[-2] if len(named) > 1 else 0), count + 1):
        parts = tuple((part,) for part in kind.parts[count - length :])
        starts = ("", "(^|/)") if length < count else ("", "(^|/)", "^")
        for end, start in itertools.product(("", "$"), starts):
            pattern = _Pattern(parts, start, end)
            is_apart = not any(_matches_some(str(pattern), other) for other in others)
            if is_apart and (start or re.search(f"(^|/){pattern}", kind.paths[0])):
                return pattern
    return _Pattern(tuple((part,) for part in kind.parts), "^", "$")


def _ends_with(kind: _Kind, pattern: _Pattern) -> bool:
    """Whether a pattern is the end of a kind's paths: it matches with any anchors."""
    strict = pattern._replace(start=pattern.start or "(^|/)", end="$")
    return all(re.search(str(strict), path) for path in kind.paths)


def _matches_some(pattern: str, kind: _Kind) -> bool:
    # Whether a pattern without digits matches does not depend on the indices.
    has_digits = any(character.isdigit() for character in pattern)
    paths = kind.paths if has_digits else kind.paths[:1]
    return any(re.search(pattern, path) for path in paths)


def _merged(patterns: Sequence[_Pattern]) -> list[_Pattern]:
    """Merge patterns that differ in a single part, from the first part on."""
    merged = list(dict.fromkeys(patterns))
    for at in range(max((len(pattern.parts) for pattern in merged), default=0)):
        groups: dict[object, list[_Pattern]] = {}
        for pattern in merged:
            key: object = pattern
            if at < len(pattern.parts):
                rest = (pattern.parts[:at], pattern.parts[at + 1 :])
                key = (rest, pattern.start == "^")
            groups.setdefault(key, []).append(pattern)
        merged = [_union(group, at) for group in groups.values()]
    return merged


def _union(patterns: Sequence[_Pattern], at: int) -> _Pattern:
    first = patterns[0]
    if len(patterns) == 1:
        return first
    names = tuple(dict.fromkeys(name for x in patterns for name in x.parts[at]))
    parts = (*first.parts[:at], names, *first.parts[at + 1 :])
    # An anchor that any pattern needs is right for all: each is the end of a path.
    start = max(pattern.start for pattern in patterns)
    end = max(pattern.end for pattern in patterns)
    if len(parts) == 1:  # names such as `w`, which many names contain
        start, end = start or "(^|/)", "$"
    return _Pattern(parts, start, end)
