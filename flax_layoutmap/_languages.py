"""Which paths a regular expression can match at all: patterns read as automata.

For questions that no single path answers: can a pattern match any path, does it match
every path that another one matches, which path tells them apart. Patterns with
look-around, back-references, flags or word boundaries are not understood; then the
answer is None, never a guess.
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from flax_layoutmap._patterns import class_end

Mode = Literal["search", "match", "fullmatch"]

# Every set of characters is a bit mask over these; a pattern with others is not
# understood. The last two stand for the letters and digits of other scripts.
_CHARACTERS = [*map(chr, range(32, 127)), "é", "٣"]
_ALL = (1 << len(_CHARACTERS)) - 1
_SLASH = 1 << _CHARACTERS.index("/")
# A witness is written with the first of these that fits.
_PREFERRED = [*"xkernalbiup0123456789_-.", *_CHARACTERS]
_PLACE = {char: at for at, char in enumerate(_CHARACTERS)}

# States of an automaton; subsets visited by one search.
_MOST_STATES = 400
_MOST_STEPS = 4_000

_QUANTIFIER = re.compile(r"[*+?]|\{(\d*)(,?)(\d*)\}")
_LITERAL = re.compile(r"[\w/\-]*", re.ASCII)
_GROUP = re.compile(r"\((?:\?:|\?P<[A-Za-z_]\w*>)?(?!\?)")

# ("set", mask) | ("start",) | ("end",) | ("cat", nodes) | ("alt", nodes)
# | ("rep", node, least, most or None)
Node = tuple


class NotUnderstood(Exception):
    """The pattern has something that no automaton here does."""


@functools.lru_cache(maxsize=4096)
def parse(pattern: str) -> Node:
    """The pattern as a tree of nodes.

    Raises:
        NotUnderstood: it holds more than characters, classes, groups, alternatives,
            quantifiers and anchors.
    """
    node, at = _alternatives(pattern, 0)
    if at != len(pattern):
        raise NotUnderstood
    return node


def _alternatives(pattern: str, at: int) -> tuple[Node, int]:
    branches: list[Node] = []
    while True:
        branch, at = _sequence(pattern, at)
        branches.append(branch)
        if at == len(pattern) or pattern[at] == ")":
            return (branches[0] if len(branches) == 1 else ("alt", branches)), at
        at += 1  # the bar


def _sequence(pattern: str, at: int) -> tuple[Node, int]:
    nodes: list[Node] = []
    while at < len(pattern) and pattern[at] not in "|)":
        node, at = _atom(pattern, at)
        quantifier = _QUANTIFIER.match(pattern, at)
        if quantifier is not None:
            at = quantifier.end()
            if pattern.startswith("+", at):
                raise NotUnderstood  # possessive
            if pattern.startswith("?", at):
                at += 1  # lazy: the same paths, in another order
            node = ("rep", node, *_counts(quantifier))
        nodes.append(node)
    return ("cat", nodes), at


def _counts(quantifier: re.Match[str]) -> tuple[int, int | None]:
    plain = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(quantifier.group())
    if plain is not None:
        return plain
    least, comma, most = quantifier.groups()
    if not least and not most:
        raise NotUnderstood  # {} and {,}: plain text to some, a quantifier to others
    if not comma:
        return int(least), int(least)
    return int(least or 0), int(most) if most else None


def _atom(pattern: str, at: int) -> tuple[Node, int]:
    char = pattern[at]
    if char == "(":
        opened = _GROUP.match(pattern, at)
        if opened is None:
            raise NotUnderstood
        node, at = _alternatives(pattern, opened.end())
        return node, at + 1
    if char in "^$":
        return (("start",) if char == "^" else ("end",)), at + 1
    if char in "{}]" or (char == "[" and class_end(pattern, at) is None):
        raise NotUnderstood
    if char == "[":
        end = (class_end(pattern, at) or 0) + 1
        return ("set", _mask(pattern[at:end])), end
    if char != "\\":
        return ("set", _mask(char) if char == "." else _literal(char)), at + 1
    escape = pattern[at : at + 2]
    if escape in (r"\A", r"\Z"):
        return (("start",) if escape == r"\A" else ("end",)), at + 2
    if escape[1].isalnum() and escape[1] not in "dDwWsS":
        raise NotUnderstood
    known = _mask(escape) if escape[1].isalnum() else _literal(escape[1])
    return ("set", known), at + 2


def _literal(char: str) -> int:
    if char not in _CHARACTERS or not char.isascii():
        raise NotUnderstood
    return 1 << _PLACE[char]


@functools.lru_cache(maxsize=512)
def _mask(text: str) -> int:
    """The characters that `.`, a class or an escape stands for."""
    if not text.isascii() or re.search(r"\[\[|--|&&|~~|\|\|", text):
        raise NotUnderstood  # re may come to read these as sets of sets
    test = re.compile(text)
    return sum(1 << at for at, c in enumerate(_CHARACTERS) if test.fullmatch(c))


class Automaton:
    """The states of one pattern, under one way to meet a path.

    Attributes:
        steps: state → (characters, next state), or None.
        free: state → (next state, where: `""`, `"start"` or `"end"`), without reading.
        first: the first state.
        last: the accepting state.
    """

    def __init__(self, node: Node, mode: Mode) -> None:
        self.steps: list[tuple[int, int] | None] = []
        self.free: list[list[tuple[int, str]]] = []
        self.first = self._state()
        begin = self._loop(self.first) if mode == "search" else self.first
        end = self._build(node, begin)
        self.last = end if mode == "fullmatch" else self._loop(end)
        self._read: dict[tuple[int, int], int] = {}

    def _state(self) -> int:
        if len(self.steps) >= _MOST_STATES:
            raise NotUnderstood
        self.steps.append(None)
        self.free.append([])
        return len(self.steps) - 1

    def _loop(self, start: int) -> int:
        """A state behind `start` that reads anything, and what comes after it."""
        again, after = self._state(), self._state()
        self.free[start] += [(again, ""), (after, "")]
        back = self._state()
        self.steps[again] = (_ALL, back)
        self.free[back] += [(again, ""), (after, "")]
        return after

    def _build(self, node: Node, start: int) -> int:
        """Adds the states of a node behind `start`; the state at its end."""
        kind = node[0]
        if kind == "set":
            begin, end = self._state(), self._state()
            self.free[start].append((begin, ""))
            self.steps[begin] = (node[1], end)
            return end
        if kind in ("start", "end"):
            end = self._state()
            self.free[start].append((end, kind))
            return end
        if kind == "cat":
            for part in node[1]:
                start = self._build(part, start)
            return start
        end = self._state()
        if kind == "alt":
            for branch in node[1]:
                self.free[self._build(branch, start)].append((end, ""))
            return end
        _, inner, least, most = node
        for _ in range(least):
            start = self._build(inner, start)
        if most is None:
            again = self._state()
            self.free[start].append((again, ""))
            self.free[self._build(inner, again)].append((again, ""))
            start = again
        for _ in range((most or least) - least):
            self.free[start].append((end, ""))
            start = self._build(inner, start)
        self.free[start].append((end, ""))
        return end

    def opened(self, states: int, at_start: bool, at_end: bool) -> int:
        """All states that these lead to without reading a character."""
        found, queue = states, list(_bits(states))
        while queue:
            for after, where in self.free[queue.pop()]:
                allowed = where == "" or (at_start if where == "start" else at_end)
                if allowed and not found >> after & 1:
                    found |= 1 << after
                    queue.append(after)
        return found

    def start(self) -> int:
        """The states before the first character."""
        return self.opened(1 << self.first, True, False)

    def read(self, states: int, char: int) -> int:
        """The states after one more character (a mask of one class)."""
        key = states, char  # asked again for each pair that a state is in
        known = self._read.get(key)
        if known is None:
            after = 0
            for state in _bits(states):
                step = self.steps[state]
                if step is not None and step[0] & char:
                    after |= 1 << step[1]
            known = self._read[key] = self.opened(after, False, False)
        return known

    def accepts(self, states: int) -> bool:
        """Whether a path may end here (no path is empty)."""
        return bool(self.opened(states, False, True) >> self.last & 1)

    @property
    def masks(self) -> set[int]:
        """The sets of characters that it tells apart."""
        return {step[0] for step in self.steps if step is not None}


@functools.lru_cache(maxsize=4096)
def automaton(pattern: str, mode: Mode) -> Automaton | None:
    """The automaton of a pattern that compiles; None if it is not understood."""
    try:
        return Automaton(parse(pattern), mode)
    except (NotUnderstood, RecursionError):
        return None


def sample(pattern: str, mode: Mode) -> str | None:
    """A path that the pattern may well match: found at once, but not certain.

    It is not the pattern itself, so that no exact key answers for it. None where none
    is found: `witness` then knows.
    """
    text = pattern
    if not is_literal(pattern):
        try:
            text = _written(parse(pattern))
        except (NotUnderstood, RecursionError):
            return None
    if mode == "search" and (text.startswith("/") or text == pattern):
        text = f"x/{text.removeprefix('/')}"
    if mode != "fullmatch" and (text.endswith("/") or text == pattern):
        text += "x"
    is_path = text and "//" not in text and "/" not in (text[0], text[-1])
    return text if is_path else None


def is_literal(pattern: str) -> bool:
    """Whether a pattern is found just where its own text is."""
    return _LITERAL.fullmatch(pattern) is not None


def _written(node: Node) -> str:
    """A text that a node reads: the first branch, as often as it must."""
    kind = node[0]
    if kind == "set":
        return _one_of(node[1])
    if kind == "cat":
        return "".join(map(_written, node[1]))
    if kind == "alt":
        return _written(node[1][0])
    if kind == "rep":
        # Something that may be absent mostly stands for what is there.
        return _written(node[1]) * max(node[2], node[3] is None)
    return ""


def witness(pattern: str, mode: Mode) -> str | None:
    """A short path that the pattern matches; `""` if there is none.

    None where the pattern is not understood, or takes too long.
    """
    own = automaton(pattern, mode)
    return None if own is None else _shortest([own], lambda accepts: accepts[0])


def difference(pattern: str, mode: Mode, other: str, other_mode: Mode) -> str | None:
    """A short path that `pattern` matches and `other` does not; `""` if there is none.

    None where one is not understood, or it takes too long.
    """
    pair = automaton(pattern, mode), automaton(other, other_mode)
    if pair[0] is None or pair[1] is None:
        return None
    return _shortest([pair[0], pair[1]], lambda accepts: accepts[0] and not accepts[1])


def _shortest(
    automata: Sequence[Automaton], wanted: Callable[[list[bool]], bool]
) -> str | None:
    """The shortest path with which automata end as wanted; `""`: there is none.

    A path is parts that are not empty, joined by single slashes.
    """
    classes = _classes(set().union(*(own.masks for own in automata)))
    begin: tuple[tuple[int, ...], bool] = tuple(o.start() for o in automata), False
    seen: set[tuple[tuple[int, ...], bool]] = {begin}
    queue: list[tuple[tuple[tuple[int, ...], bool], str]] = [(begin, "")]
    for (states, in_part), text in queue:
        for mask, char in classes:
            if char == "/" and not in_part:
                continue
            after = tuple(
                own.read(state, mask)
                for own, state in zip(automata, states, strict=True)
            )
            place = (after, char != "/")
            if not after[0] or place in seen:
                continue
            if len(seen) > _MOST_STEPS:
                return None
            ends = [o.accepts(s) for o, s in zip(automata, after, strict=True)]
            if char != "/" and wanted(ends):
                return text + char
            seen.add(place)
            queue.append((place, text + char))
    return ""


def _classes(masks: set[int]) -> list[tuple[int, str]]:
    """Characters that no mask tells apart, each class with one to write it by."""
    classes = [_SLASH, _ALL & ~_SLASH]
    for mask in masks:
        split = [part for own in classes for part in (own & mask, own & ~mask)]
        classes = [part for part in split if part]
    # The largest first: the characters that no pattern names.
    classes.sort(key=int.bit_count, reverse=True)
    return [(own, _one_of(own)) for own in classes]


@functools.lru_cache(maxsize=512)
def _one_of(mask: int) -> str:
    """A character of a set to write it by."""
    return next((char for char in _PREFERRED if mask & 1 << _PLACE[char]), "/")


def _bits(states: int) -> Iterator[int]:
    while states:
        low = states & -states
        yield low.bit_length() - 1
        states ^= low
