"""Few regular expressions that give each of many paths its layout."""

import re
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

# An index in a path: `layers/0`, `layers.0` of Hugging Face, `block_0`.
INDEX = re.compile(r"(?<=[/_.])\d+(?=[/.]|$)|(?<=[A-Za-z])\d+(?=/)|^\d+(?=[/.])")
_ANY_INDEX = r"\d+"

Value = TypeVar("Value", bound=Hashable)


class _Kind(NamedTuple):
    """Paths that differ in indices alone and have one value.

    Attributes:
        parts: the parts of their path, as regular expressions.
        paths: the paths.
        value: their value.
    """

    parts: tuple[str, ...]
    paths: tuple[str, ...]
    value: Hashable


class _Pattern(NamedTuple):
    """The last parts of a path, each with its alternatives, and the anchors needed."""

    parts: tuple[tuple[str, ...], ...]
    start: str
    end: str

    def __str__(self) -> str:
        texts = [
            own[0] if len(own) == 1 else f"({'|'.join(own)})" for own in self.parts
        ]
        return f"{self.start}{'/'.join(texts)}{self.end}"


def compress(values: Mapping[str, Value]) -> dict[str, Value]:
    """Find few patterns, to be searched in paths, that give each path its value.

    Each path is matched by patterns of its own value alone. A pattern is the shortest
    end of a path that tells it from those with other values, of two names where the
    path has them (`up/kernel`); indices become `\\d+`; patterns that differ in one part
    are merged (`(gate|up)/kernel`).

    Args:
        values: path → value.

    Returns:
        Pattern → value, in the order of the paths.

    >>> compress({"0/up/w": "a", "1/up/w": "a", "0/gate/w": "a", "0/out/w": "b"})
    {'(up|gate)/w': 'a', 'out/w': 'b'}
    """
    kinds = kinds_of(values)
    found: dict[Hashable, list[_Pattern]] = {}
    for value in dict.fromkeys(kind.value for kind in kinds):
        own = [kind for kind in kinds if kind.value == value]
        others = [kind for kind in kinds if kind.value != value]
        found[value] = _merged(_ends(own, others))
    chosen = {str(one): value for value, own in found.items() for one in own}
    return chosen  # pyright: ignore[reportReturnType]


def kinds_of(values: Mapping[str, Value]) -> list[_Kind]:
    """Group the paths that differ in indices alone."""
    groups: dict[str, dict[Hashable, list[str]]] = {}
    for path, value in values.items():
        own = groups.setdefault(INDEX.sub("0", path), {})
        own.setdefault(value, []).append(path)
    kinds = []
    for template, by_value in groups.items():
        for value, paths in by_value.items():
            if len(by_value) == 1:
                slots = [_ANY_INDEX] * len(INDEX.findall(template))
                kinds.append(_Kind(_spelled(template, slots), tuple(paths), value))
            else:
                kinds += [
                    _Kind(_spelled(path, INDEX.findall(path)), (path,), value)
                    for path in paths
                ]
    order = {path: at for at, path in enumerate(values)}
    return sorted(kinds, key=lambda kind: order[kind.paths[0]])


def _spelled(path: str, slots: Sequence[str]) -> tuple[str, ...]:
    """The parts of a path as regular expressions, with these texts for its indices."""
    texts = INDEX.split(path)
    pieces = [re.escape(texts[0])]
    for slot, text in zip(slots, texts[1:], strict=True):
        pieces += [slot, re.escape(text)]
    # `re.escape` leaves `/` as it is.
    return tuple("".join(pieces).replace(r"\-", "-").split("/"))


def _ends(kinds: Sequence[_Kind], others: Sequence[_Kind]) -> list[_Pattern]:
    """For each kind, the shortest pattern that matches none of the others."""
    found: list[_Pattern] = []
    for kind in kinds:
        if any(_is_end_of(one, kind) for one in found):
            continue
        found.append(_shortest(kind, others))
    return found


def _shortest(kind: _Kind, others: Sequence[_Kind]) -> _Pattern:
    count = len(kind.parts)
    named = [at for at, part in enumerate(kind.parts) if part != _ANY_INDEX]
    least = count - (named[-2] if len(named) > 1 else 0)
    for length in range(least, count + 1):
        parts = tuple((part,) for part in kind.parts[count - length :])
        starts = ("", "(^|/)") if length < count else ("", "(^|/)", "^")
        for start, end in ((s, e) for e in ("", "$") for s in starts):
            one = _Pattern(parts, start, end)
            text = str(one)
            if not any(_matches_some(text, other) for other in others):
                if start or _begins_a_part(text, kind.paths[0]):
                    return one
    return _Pattern(tuple((part,) for part in kind.parts), "^", "$")


def _is_end_of(one: _Pattern, kind: _Kind) -> bool:
    """Whether a pattern has the last parts of a path: with any anchors it matches."""
    strict = one._replace(start=one.start or "(^|/)", end="$")
    return all(re.search(str(strict), path) for path in kind.paths)


def _matches_some(pattern: str, kind: _Kind) -> bool:
    # What a pattern without digits matches, it matches whatever the indices are.
    has_digits = any(character.isdigit() for character in pattern)
    paths = kind.paths if has_digits else kind.paths[:1]
    return any(re.search(pattern, path) for path in paths)


def _begins_a_part(pattern: str, path: str) -> bool:
    found = re.search(pattern, path)
    return found is not None and (found.start() == 0 or path[found.start() - 1] == "/")


def _merged(patterns: Sequence[_Pattern]) -> list[_Pattern]:
    """Merge patterns that differ in one part alone, from the first part on."""
    merged = list(dict.fromkeys(patterns))
    for at in range(max((len(one.parts) for one in merged), default=0)):
        groups: dict[object, list[_Pattern]] = {}
        for one in merged:
            if at < len(one.parts):
                rest = (*one.parts[:at], (), *one.parts[at + 1 :])
                key: object = (rest, one.start == "^")
            else:
                key = one
            groups.setdefault(key, []).append(one)
        merged = [_union(own, at) for own in groups.values()]
    return merged


def _union(patterns: Sequence[_Pattern], at: int) -> _Pattern:
    first = patterns[0]
    if len(patterns) == 1:
        return first
    names = tuple(dict.fromkeys(name for one in patterns for name in one.parts[at]))
    parts = (*first.parts[:at], names, *first.parts[at + 1 :])
    # The anchors that one of them needs hold for all: each is the end of a path.
    start = max(one.start for one in patterns)
    end = max(one.end for one in patterns)
    if len(parts) == 1:  # names such as `w`, which are in many others
        start, end = start or "(^|/)", "$"
    return _Pattern(parts, start, end)
