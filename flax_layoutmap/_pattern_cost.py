"""How long a pattern may take on a path that it does not match, found by reading it.

`re` tries every way to match before it gives up. Where the number of ways doubles with
each character, as in `(a+)+`, a path of 40 characters takes days. What decides this
is how ambiguous the automaton of the pattern is (Weber and Seidl, "On the degree of
ambiguity of finite automata", 1991): a loop that can read one text in two ways is
exponential; loops in a row that can share one text make a polynomial.
"""

import functools
import itertools
import math
import re
from collections.abc import Iterator

from flax_layoutmap._pattern_tree import (
    PLACE,
    WORD,
    Node,
    NotUnderstood,
    parse,
    shape_of,
)

# Loops in a row that can share one text: the time grows with this power of the length.
MOST_DEGREE = 3
# Ways to match that do not grow with the length: `a?a?a?…` has twice as many with each.
MOST_CHOICES = 256
LONGEST_PATTERN = 2_000
USUAL_PATH = 100

_MOST_PLACES = 120
_MOST_EDGES = 200_000
_MOST_WALKS = 20_000

# Without any of these there is one way to match, from each place.
_CHOOSES = re.compile(r"[*+?{|]")

# Of patterns that no automaton here understands (look-around, back-references).
_QUANTIFIER = re.compile(r"(?<!\\)(?:\\\\)*(?:[*+?]|\{\d*,?\d*\})")
_GROUP_OPENING = re.compile(r"\(\?(?:[:=!]|<[=!]|P<\w+>|P=|[aiLmsux-]+[:)])")
_REPEATED_GROUP = re.compile(r"\)(?:[*+]|\{)")
_MOST_QUANTIFIERS = 4


def slow_because(pattern: str) -> str | None:
    """Why a pattern that compiles may take very long on some path; None if it cannot.

    "Cannot": at most `steps_of(pattern)` steps on a path of `USUAL_PATH` characters,
    and a polynomial of degree `MOST_DEGREE` + 2 in the length of longer ones.
    """
    return None if _is_quick(pattern) else _judged(pattern)[0]


def steps_of(pattern: str) -> int:
    """About how many steps it takes at most, on a path of `USUAL_PATH` characters."""
    _, degree, choices = _judged(pattern)
    # As many places where to begin, and where each of the loops may end.
    return choices * math.comb(USUAL_PATH, degree + 2)


def _is_quick(pattern: str) -> bool:
    """Whether it is, as most are: a few repetitions, none of them inside another."""
    if len(pattern) > LONGEST_PATTERN:
        return False
    if len(pattern) > _MOST_PLACES:
        return not _CHOOSES.search(pattern)
    # With any character for each word it has as many ways to match, or more.
    return _has_few_ways(shape_of(pattern)[0], ".") or _has_few_ways(pattern, WORD)


@functools.lru_cache(maxsize=1024)
def _has_few_ways(shape: str, word: str) -> bool:
    """Whether its repetitions are few and plain, and so is what else it may choose."""
    try:
        node = parse(shape.replace(WORD, word))
    except (NotUnderstood, RecursionError):
        return False
    loops = list(_loops(node))
    # A repetition that is read in one way cannot double, nor can several in a row.
    return (
        len(loops) <= MOST_DEGREE + 1
        and all(_is_plain(loop[1]) for loop in loops)
        and _choices(node) <= MOST_CHOICES
    )


@functools.lru_cache(maxsize=4096)
def _judged(pattern: str) -> tuple[str | None, int, int]:
    """Why it is slow, the degree of its loops, the ways to read what is no loop."""
    if len(pattern) > LONGEST_PATTERN:
        text = f"it is {len(pattern)} characters long, more than {LONGEST_PATTERN}"
        return text, 0, 1
    if not _CHOOSES.search(pattern):
        return None, -1, 1
    try:
        node = parse(pattern)
    except (NotUnderstood, RecursionError):
        return _by_its_looks(pattern)
    choices = _choices(node)
    if choices > MOST_CHOICES:
        return "it has many optional parts that can read the same text", 0, 1
    loops = list(_loops(node))
    if not loops or (len(loops) == 1 and _is_plain(loops[0][1])):
        return None, len(loops) - 1, choices
    try:
        places = _Places(node)
        if places.doubles():
            text = (
                "a repetition in it can read one text in several ways, so that each "
                "further character doubles the time"
            )
            return text, 0, 1
        degree = places.degree()
    except _TooMuch:
        return "it is too complicated to tell", 0, 1
    if degree > MOST_DEGREE:
        text = (
            f"it has {degree + 1} repetitions in a row that can read the same text; "
            f"up to {MOST_DEGREE + 1} are allowed"
        )
        return text, 0, 1
    return None, degree, choices


def _by_its_looks(pattern: str) -> tuple[str | None, int, int]:
    plain = _GROUP_OPENING.sub("(", pattern)
    count = len(_QUANTIFIER.findall(plain))
    text = None
    if _REPEATED_GROUP.search(plain):
        text = "it repeats a group, beside look-around or back-references"
    elif count > _MOST_QUANTIFIERS:
        text = (
            f"it has more than {_MOST_QUANTIFIERS} quantifiers, beside look-around or "
            "back-references"
        )
    return text, count - 1, 1


def _loops(node: Node) -> Iterator[Node]:
    """The repetitions of a node that may read more than one thing."""
    if node[0] == "rep":
        if node[3] is None or node[3] > 1:
            yield node
        yield from _loops(node[1])
    elif node[0] in ("cat", "alt"):
        for part in node[1]:
            yield from _loops(part)


def _is_plain(node: Node) -> bool:
    """Whether there is one way to read it."""
    if node[0] == "cat":
        return all(map(_is_plain, node[1]))
    return node[0] in ("text", "set", "start", "end")


def _first(node: Node) -> tuple[int, bool]:
    """Characters that a match may begin with, and whether it may be empty."""
    kind = node[0]
    if kind == "text":
        return 1 << PLACE[node[1][0]], False
    if kind == "set":
        return node[1], False
    if kind == "alt":
        found = [_first(part) for part in node[1]]
        return functools.reduce(int.__or__, (m for m, _ in found)), any(
            empty for _, empty in found
        )
    if kind == "rep":
        mask, empty = _first(node[1])
        return mask, empty or node[2] == 0
    if kind == "cat":
        mask = 0
        for part in node[1]:
            more, empty = _first(part)
            mask |= more
            if not empty:
                return mask, False
        return mask, True
    return 0, True  # an anchor


def _choices(node: Node) -> int:
    """Ways in which parts without loops may read one text: an upper bound."""
    kind = node[0]
    if kind == "cat":
        ways = 1
        for at, part in enumerate(node[1]):
            own = _choices(part)
            if part[0] == "rep" and part[2] == 0 and part[3] == 1:
                # Optional: no choice where what comes next begins otherwise.
                after, open_end = _first(("cat", node[1][at + 1 :]))
                if open_end or after & _first(part[1])[0]:
                    own *= 2
            ways *= own
        return ways
    if kind == "rep":
        return _choices(node[1])
    if kind != "alt":
        return 1
    firsts = [_first(part) for part in node[1]]
    clear = not any(empty for _, empty in firsts) and all(
        not a & b for (a, _), (b, _) in itertools.combinations(firsts, 2)
    )
    ways = [_choices(part) for part in node[1]]
    return max(ways) if clear else sum(ways)


class _TooMuch(Exception):
    """The analysis takes too long."""


class _Places:
    """The places of a pattern where a character is read, and which follow which.

    Attributes:
        masks: place → characters.
        after: place → {place that may be next: 1, or 2 if in several ways}.
    """

    def __init__(self, node: Node) -> None:
        self.masks: list[int] = []
        self._free: list[list[int]] = []
        self._reads: dict[int, int] = {}  # state → place
        self._behind: list[int] = []  # place → state
        self._edges = 0
        self._build(node, self._state())
        self.after = [self._next(state) for state in self._behind]

    def _state(self) -> int:
        self._free.append([])
        return len(self._free) - 1

    def _build(self, node: Node, start: int) -> int:
        kind = node[0]
        if kind == "cat":
            for part in node[1]:
                start = self._build(part, start)
            return start
        if kind == "text":
            for char in node[1]:
                start = self._build(("set", 1 << PLACE[char]), start)
            return start
        begin, end = self._state(), self._state()
        self._free[start].append(begin)
        if kind == "set":
            if len(self.masks) >= _MOST_PLACES:
                raise _TooMuch
            self._reads[begin] = len(self.masks)
            self.masks.append(node[1])
            self._behind.append(end)
        elif kind == "alt":
            for branch in node[1]:
                self._free[self._build(branch, begin)].append(end)
        elif kind == "rep":
            inner = self._build(node[1], begin)
            self._free[inner].append(end)
            if node[3] is None or node[3] > 1:
                self._free[inner].append(begin)
            if node[2] == 0:
                self._free[start].append(end)
        else:
            self._free[begin].append(end)
        return end

    def _next(self, state: int) -> dict[int, int]:
        """The places that may come after a state, and in how many ways (up to 2)."""
        ways: dict[int, int] = {}
        walks = 0
        stack = [(state, frozenset([state]))]
        while stack:
            at, been = stack.pop()
            walks += 1
            if walks > _MOST_WALKS:
                raise _TooMuch
            place = self._reads.get(at)
            if place is not None:
                ways[place] = min(2, ways.get(place, 0) + 1)
            for other in self._free[at]:
                if other not in been:
                    stack.append((other, been | {other}))
        return ways

    @functools.cached_property
    def group_of(self) -> dict[int, int]:
        """Place → number of the loop (strongly connected places) that it is in."""
        reach = self._reach
        return {
            place: min(
                o for o, more in enumerate(reach) if found >> o & more >> place & 1
            )
            for place, found in enumerate(reach)
            if found >> place & 1
        }

    @functools.cached_property
    def _reach(self) -> list[int]:
        """The places that each one leads to, as bits."""
        reach = [0] * len(self.masks)
        changed = True
        while changed:
            changed = False
            for place in reversed(range(len(reach))):
                found = reach[place]
                for other in self.after[place]:
                    found |= reach[other] | 1 << other
                changed = changed or found != reach[place]
                reach[place] = found
        return reach

    def _walk(
        self, start: tuple[int, ...], within: list[set[int]]
    ) -> set[tuple[int, ...]]:
        """Tuples of places that one text leads to from `start`, each kept `within`."""
        found, queue = set(), [start]
        while queue:
            places = queue.pop()
            if not functools.reduce(int.__and__, (self.masks[p] for p in places)):
                continue
            options = [
                [o for o in self.after[p] if o in allowed]
                for p, allowed in zip(places, within, strict=True)
            ]
            self._edges += math.prod(map(len, options))
            if self._edges > _MOST_EDGES:
                raise _TooMuch
            for after in itertools.product(*options):
                if after not in found:
                    found.add(after)
                    queue.append(after)
        return found

    def doubles(self) -> bool:
        """Whether a loop can read one text in two ways and be where it was."""
        for group in set(self.group_of.values()):
            inside = {p for p, g in self.group_of.items() if g == group}
            for place in inside:
                if any(
                    ways > 1 and other in inside
                    for other, ways in self.after[place].items()
                ):
                    return True
                for pair in self._walk((place, place), [inside, inside]):
                    if pair[0] != pair[1]:
                        if (place, place) in self._walk(pair, [inside, inside]):
                            return True
        return False

    def degree(self) -> int:
        """The longest chain of loops of which each can share a text with the next."""
        groups = sorted(set(self.group_of.values()))
        inside = {
            g: {p for p, own in self.group_of.items() if own == g} for g in groups
        }
        everything = set(range(len(self.masks)))
        shares = {
            (a, b)
            for a, b in itertools.permutations(groups, 2)
            if self._reach[a] >> b & 1
            if any(
                (p, q, q) in self._walk((p, p, q), [inside[a], everything, inside[b]])
                for p in inside[a]
                for q in inside[b]
            )
        }

        @functools.cache
        def longest(group: int) -> int:
            return max((1 + longest(b) for a, b in shares if a == group), default=0)

        return max(map(longest, groups), default=0)
