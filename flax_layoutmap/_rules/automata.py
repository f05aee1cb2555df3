"""Patterns as automata, to find what a regular expression can match over all paths.

They decide whether a pattern can match any path, and whether it matches every path
that another one matches. Where a pattern is not understood, or the search takes too
long, the result is None, never a guess.
"""

import functools
from collections.abc import Iterator
from typing import Literal

from flax_layoutmap._rules.patterns import (
    ANY,
    CHARACTERS,
    PLACE,
    Node,
    NotUnderstood,
    read,
)

Mode = Literal["search", "match", "fullmatch"]

_ALL = (1 << len(CHARACTERS)) - 1
_SLASH = 1 << PLACE["/"]
# The order in which characters are chosen for an example.
_PREFERRED = [*"xkernalbiup0123456789_-.", *CHARACTERS]

# Sets of states visited by one search, and characters of an example.
_MOST_STEPS = 4_000
_LONGEST = 10_000


class Automaton:
    """The states of one pattern for one match mode.

    `steps`: state → (characters, next state) or None. `free`: state → (next state,
    where), without reading; where is `""`, `"start"` or `"end"`. `settled` has, as
    bits, the states after which the path matches, whatever follows.
    """

    most_states = 400
    characters = _ALL

    def __init__(self, node: Node, mode: Mode) -> None:
        self.steps: list[tuple[int, int] | None] = []
        self.free: list[list[tuple[int, str]]] = []
        self.first = self._state()
        begin = self._loop(self.first) if mode == "search" else self.first
        end = self._build(node, begin)
        self.last = end if mode == "fullmatch" else self._loop(end)
        self.settled = 0 if mode == "fullmatch" else 1 << self.last
        self._closed: dict[int, int] = {}
        self._read: dict[tuple[int, int], int] = {}

    def _state(self) -> int:
        if len(self.steps) >= self.most_states:
            raise NotUnderstood
        self.steps.append(None)
        self.free.append([])
        return len(self.steps) - 1

    def _loop(self, start: int) -> int:
        """A state behind `start` that reads anything, and what comes after it."""
        return self._build(("rep", ("set", ANY), 0, None), start)

    def _build(self, node: Node, start: int) -> int:
        """Add the states of a node behind `start`; the state at its end."""
        kind = node[0]
        if kind == "text":
            for char in node[1]:
                known = char.isascii() and char in PLACE
                mask = 1 << PLACE[char] if known else ANY
                start = self._build(("set", mask), start)
            return start
        if kind == "set":
            begin, end = self._state(), self._state()
            self.free[start].append((begin, ""))
            self.steps[begin] = (node[1] & self.characters, end)
            return end
        if kind in ("start", "end"):
            end = self._state()
            self.free[start].append((end, kind))
            return end
        if kind == "cat":
            for part in node[1]:
                start = self._build(part, start)
            return start
        if kind == "behind":
            return start
        end = self._state()
        if kind == "alt":
            for branch in node[1]:
                self.free[self._build(branch, start)].append((end, ""))
            return end
        if kind == "ahead":
            inside = self._state()
            self._build(node[1], inside)  # it leads nowhere
            self.free[start] += [(inside, ""), (end, "")]
            return end
        _, inner, least, most = node
        if max(least, most or 0) > self.most_states:
            raise NotUnderstood  # repeating an empty node needs no states
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

    @functools.cached_property
    def _ending(self) -> int:
        """All states from which nothing need be read before a path may end."""
        return sum(
            1 << state
            for state in range(len(self.free))
            if self._opened(state, ("", "end")) >> self.last & 1
        )

    def _opened(self, state: int, where: tuple[str, ...] = ("",)) -> int:
        """All states that one leads to without reading a character."""
        found, queue = 1 << state, [state]
        while queue:
            for after, place in self.free[queue.pop()]:
                if place in where and not found >> after & 1:
                    found |= 1 << after
                    queue.append(after)
        return found

    def start(self) -> int:
        """The states before the first character."""
        return self._opened(self.first, ("", "start"))

    def read(self, states: int, char: int) -> int:
        """The states after one more character (a mask of one class)."""
        key = states, char  # looked up for each pair that a state is in
        known = self._read.get(key)
        if known is None:
            known = 0
            for state in _bits(states):
                step = self.steps[state]
                if step is not None and step[0] & char:
                    if step[1] not in self._closed:
                        self._closed[step[1]] = self._opened(step[1])
                    known |= self._closed[step[1]]
            self._read[key] = known
        return known

    def accepts(self, states: int) -> bool:
        """Whether a path may end here (no path is empty)."""
        return bool(states & self._ending)

    @property
    def masks(self) -> set[int]:
        """The sets of characters that it distinguishes."""
        return {step[0] for step in self.steps if step is not None}


@functools.lru_cache(maxsize=4096)
def automaton(pattern: str, mode: Mode) -> Automaton | None:
    """The automaton of a pattern that compiles; None if it is not understood."""
    try:
        tree = read(pattern)
        return Automaton(tree.root, mode) if tree.is_exact else None
    except NotUnderstood:
        return None


def witness(pattern: str, mode: Mode) -> str | None:
    """A short path that the pattern matches; `""` if there is none.

    None where the pattern is not understood, or the search takes too long.
    """
    own = automaton(pattern, mode)
    return None if own is None else _shortest(own, _NOTHING)


@functools.lru_cache(maxsize=4096)
def difference(pattern: str, mode: Mode, other: str, other_mode: Mode) -> str | None:
    """A short path that only `pattern` matches, not `other`; `""` if there is none.

    None where one is not understood, or the search takes too long.
    """
    own, beside = automaton(pattern, mode), automaton(other, other_mode)
    return None if own is None or beside is None else _shortest(own, beside)


# Matches no path.
_NOTHING = Automaton(("set", 0), "fullmatch")


def _shortest(own: Automaton, other: Automaton) -> str | None:
    """The shortest path that `own` matches and `other` does not; `""`: there is none.

    A path consists of non-empty parts, joined by single slashes.
    """
    if other.start() & other.settled:
        return ""
    classes = _classes(own.masks | other.masks)
    begin = own.start(), other.start(), False
    seen: set[tuple[int, int, bool]] = {begin}
    queue: list[tuple[tuple[int, int, bool], str]] = [(begin, "")]
    for (mine, theirs, in_part), text in queue:
        for mask, char in classes:
            if char == "/" and not in_part:
                continue
            after, beside = own.read(mine, mask), other.read(theirs, mask)
            place = after, beside, char != "/"
            if not after or beside & other.settled or place in seen:
                continue
            if len(seen) > _MOST_STEPS:
                return None
            if char != "/" and own.accepts(after) and not other.accepts(beside):
                return text + char
            seen.add(place)
            queue.append((place, text + char))
    return ""


def _classes(masks: set[int]) -> list[tuple[int, str]]:
    """Classes of characters that no mask distinguishes, with a sample of each."""
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
    char = next((char for char in _PREFERRED if mask & 1 << PLACE[char]), "/")
    if not mask & 1 << PLACE[char]:
        raise NotUnderstood  # no character, or none that paths have
    return char


def _bits(states: int) -> Iterator[int]:
    while states:
        low = states & -states
        yield low.bit_length() - 1
        states ^= low


# ------------------------------------------------------------ without an automaton


def sample(pattern: str, mode: Mode) -> str | None:
    """A path that the pattern probably matches, from its tree; None: none is found.

    Where possible it is not the pattern itself, which an exact key would match alone.
    """
    try:
        tree = read(pattern)
        text = _written(tree.root) if tree.is_exact else ""
    except NotUnderstood:
        return None
    if mode == "search" and (text.startswith("/") or text == pattern):
        text = f"x/{text.removeprefix('/')}"
    if mode != "fullmatch" and (text.endswith("/") or text == pattern):
        text += "x"
    return text if all(text.split("/")) else None


def _written(node: Node) -> str:
    """A text that a node matches: the first branch, and the fewest repetitions."""
    kind = node[0]
    if kind == "text":
        return node[1]
    if kind == "set":
        return _one_of(node[1])
    if kind == "cat":
        return "".join([_written(part) for part in node[1]])
    if kind == "alt":
        return _written(node[1][0])
    if kind == "rep":
        # `x*` mostly stands for an x that is there.
        times, once = max(node[2], node[3] is None), _written(node[1])
        if len(once) * times > _LONGEST:
            raise NotUnderstood
        return once * times
    return ""


def is_literal(pattern: str) -> bool:
    """Whether a pattern matches just where its own text occurs."""
    try:
        return read(pattern).root == ("text", pattern)
    except NotUnderstood:
        return False
