"""Upper bound of the steps that `re` takes to try a pattern on a path.

`re` tries every way to match before it fails. Where the number of ways doubles with
each character, as in `(a+)+`, a path of 40 characters takes days. Here each character
that it may try is counted, on the worst possible path: repetitions such as `{60}` are
expanded, and at each choice the next character is the one that most ways can read.
Optimizations of `re` are not considered, so it never tries more.
"""

import functools
import math
import re
import time
from collections.abc import Iterable, Iterator

import numpy as np

from flax_layoutmap._rules.automata import Automaton
from flax_layoutmap._rules.patterns import ANY, Node, NotUnderstood, is_plain, read

# The limits of one pattern, and of all in a file, on a path of USUAL_PATH characters. A
# step is one character tried, and takes some nanoseconds.
MOST_STEPS = 300_000_000
MOST_STEPS_TOGETHER = 2_000_000_000
USUAL_PATH = 100
LONGEST_PATTERN = 2_000

# Patterns with no more steps than this need no exact count.
_FEW_STEPS = MOST_STEPS // 100
_MOST_CHOICES = 100_000
_MOST_NODES = 1_000
_WORDS = re.compile(r"[^\W_]\w*|(?:_|\W)+")
# States that are counted as one group, and groups.
_MOST_BEGUN = 4
_MOST_GROUPS = 500

# Characters, as bits, and the states behind one of them: how often each.
_Kind = tuple[int, dict[int, int]]
# States that read the same characters; how often a character is tried there, and for
# each kind of it the groups behind it: how often each.
_Group = tuple[int, ...]
_Groups = dict[_Group, tuple[int, list[dict[_Group, int]]]]

QUICKER = (
    "write it so that the next character tells how it goes on: ([^/]+/)* in place of "
    "(.*/)*, a{0,9} in place of (a?){9}, [^/]+ in place of .*; drop .* at the ends"
)


def slow_because(pattern: str, length: int = USUAL_PATH) -> str | None:
    """Why a pattern that compiles may take very long on some path; None if it cannot.

    It cannot if it takes at most `MOST_STEPS` steps on a path of this length, and a
    polynomial number of steps in the length of longer ones.
    """
    if len(pattern) > LONGEST_PATTERN:
        return f"it is {len(pattern)} characters long, more than {LONGEST_PATTERN}"
    try:
        root = read(pattern).root
    except NotUnderstood as error:
        return str(error)
    most = _at_most(root, length)
    if most is not None and most <= MOST_STEPS:
        return None
    return _counted(root, length)[0]


def slow_together(patterns: Iterable[str], seconds: float) -> str | None:
    """Why all patterns together may take too long, and which take the most; or None.

    None of them is slow alone. Counting stops after some seconds of CPU time.
    """
    deadline = time.thread_time() + seconds
    steps = dict.fromkeys(patterns, MOST_STEPS)
    for pattern in steps:
        most = _at_most(read(pattern).root, USUAL_PATH)
        steps[pattern] = MOST_STEPS if most is None else most
    total = sum(steps.values())
    for pattern in sorted(steps, key=lambda pattern: -steps[pattern]):
        if total <= MOST_STEPS_TOGETHER:
            return None
        if time.thread_time() > deadline:
            return (
                "to count the steps of all patterns takes more than "
                f"{seconds:.0f} s of CPU time"
            )
        counted = _steps(read(pattern).root)
        total += counted - steps[pattern]
        steps[pattern] = counted
    if total <= MOST_STEPS_TOGETHER:
        return None
    worst = sorted(steps, key=lambda pattern: -steps[pattern])[:5]
    return (
        f"together the patterns may take {total:.1e} steps on a path of {USUAL_PATH} "
        f"characters, more than {MOST_STEPS_TOGETHER:.0e}; the slowest are {worst}: "
        'write [^/]+ in place of ".*", and drop ".*" at the ends'
    )


@functools.lru_cache(maxsize=1024)
def _counted(root: Node, length: int) -> tuple[str | None, int]:
    """Why it is slow, or how many steps it takes."""
    try:
        tries = _Tries(root)
    except NotUnderstood as error:
        return str(error), 0
    if tries.turns:
        return "it repeats what may be empty", 0
    if tries.doubles():
        text = (
            "a repetition in it can read one text in several ways, so that each "
            "further character doubles the time"
        )
        return text, 0
    steps = tries.most_steps(length)
    if steps > MOST_STEPS:
        text = (
            f"more than {MOST_STEPS:.0e} steps on a path of {length} characters: "
            "too many parts of it can read the same text"
        )
        return text, 0
    return None, steps


def _steps(root: Node) -> int:
    """At most how many steps it takes; patterns that differ in words share one count.

    They take no more than twice the steps of their common form, in which each word is
    as many dots as the next lower power of two.
    """
    why, steps = _counted(_dotted(root), USUAL_PATH)
    if why is None and 2 * steps <= _FEW_STEPS:
        return 2 * steps
    return _counted(root, USUAL_PATH)[1]


def _dots(text: str) -> Node:
    if not text[0].isalnum():
        return ("text", text)
    count = 1 << len(text).bit_length() - 1
    return ("rep", ("set", ANY), count, count)


def _dotted(node: Node) -> Node:
    if node[0] == "text":
        return ("cat", tuple(map(_dots, _WORDS.findall(node[1]))))
    if node[0] in ("cat", "alt"):
        return (node[0], tuple(map(_dotted, node[1])))
    if node[0] in ("rep", "ahead"):
        return (node[0], _dotted(node[1]), *node[2:])
    return node


# ------------------------------------------------------------------- a quick bound


def _at_most(root: Node, length: int) -> int | None:
    """A bound without an automaton: most patterns are far below the limit.

    None for a repetition of something that has choices itself.
    """
    try:
        bound = _Bound(length)
        bound.add(1, *bound.go(root, 1, 0))
    except NotUnderstood:
        return None
    return bound.steps


class _Bound:
    """Counts characters that are tried, as if each choice was between all that follows.

    After `n` repetitions of one character, the rest is tried once for each way to end
    them in order, `comb(length + n, n)`, and from each start of a search.
    """

    def __init__(self, length: int) -> None:
        self.length, self.steps, self.nodes = length, 0, 0

    def add(self, characters: int, ways: int, loops: int) -> None:
        places = math.comb(self.length + 1 + loops, loops + 1)
        self.steps += characters * ways * places

    def go(self, node: Node, ways: int, loops: int) -> tuple[int, int]:
        """Add a node; in how many ways, and behind how many loops, it is left."""
        kind = node[0]
        self.nodes += 1
        if self.nodes > _MOST_NODES:
            raise NotUnderstood
        if kind in ("text", "set"):
            self.add(len(node[1]) if kind == "text" else 1, ways, loops)
        elif kind == "cat":
            for part in node[1]:
                ways, loops = self.go(part, ways, loops)
        elif kind == "alt":
            ends = [self.go(part, ways, loops) for part in node[1]]
            return sum(way for way, _ in ends), max(loop for _, loop in ends)
        elif kind == "ahead":
            self.add(1, *self.go(node[1], ways, loops))
        elif kind == "rep":
            _, inner, least, most = node
            return self.repeated(inner, least, most, ways, loops)
        return ways, loops

    def repeated(
        self, inner: Node, least: int, most: int | None, ways: int, loops: int
    ) -> tuple[int, int]:
        if most is None:
            if not is_plain(inner):
                raise NotUnderstood  # it has several ways to match, or may be empty
            return self.go(inner, ways, loops + 1)
        left = 0
        for count in range(most):
            left += ways if count >= least else 0
            ways, loops = self.go(inner, ways, loops)
        return left + ways, loops


class _Tries(Automaton):
    """What `re` may try with a pattern, from one place in a path.

    `turns`: whether something can be repeated without reading a character. `after`:
    state after a character → how often the next one is tried, and for each kind of it,
    as bits, the next states and how often each.
    """

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        order = self._in_order()
        self.turns = len(order) < len(self.free)
        self.after: dict[int, tuple[int, list[_Kind]]] = {}
        if self.turns:
            return
        places = {self.first, *(step[1] for step in self.steps if step is not None)}
        ways: dict[int, dict[int, int]] = {}
        tried: dict[int, int] = {}
        choices = 0
        for state in order:  # those behind come first
            tried[state] = sum(tried[after] for after, _ in self.free[state]) or 1
            ways[state] = {} if self.steps[state] is None else {state: 1}
            for after, _ in self.free[state]:
                for reader, count in ways[after].items():
                    ways[state][reader] = ways[state].get(reader, 0) + count
            choices += len(ways[state])
            if choices > _MOST_CHOICES:
                raise NotUnderstood
            if state in places:
                self.after[state] = tried[state], list(self._kinds(ways[state]))

    def _in_order(self) -> list[int]:
        """The states, each behind those that it leads to without a character."""
        waits = [len(edges) for edges in self.free]
        before: list[list[int]] = [[] for _ in self.free]
        for state, edges in enumerate(self.free):
            for after, _ in edges:
                before[after].append(state)
        order = [state for state, count in enumerate(waits) if not count]
        for after in order:
            for state in before[after]:
                waits[state] -= 1
                if not waits[state]:
                    order.append(state)
        return order

    def _kinds(self, ways: dict[int, int]) -> Iterator[_Kind]:
        """For each kind of character: the states behind it, and how often each."""
        steps = [(self.steps[state] or (0, 0), count) for state, count in ways.items()]
        kinds = {ANY}
        for mask in {mask for (mask, _), _ in steps}:
            kinds = {part for own in kinds for part in (own & mask, own & ~mask)} - {0}
        for kind in kinds:
            own = [(after, count) for (mask, after), count in steps if mask & kind]
            yield kind, dict(own)

    def doubles(self) -> bool:
        """Whether a character can lead from a place back to it in several ways."""
        reach = self._reach()
        return any(
            sum(count for after, count in kind.items() if reach[after] >> place & 1) > 1
            for place, (_, kinds) in self.after.items()
            for _, kind in kinds
        )

    def _reach(self) -> dict[int, int]:
        """The places that each one leads to, itself too, as bits."""
        reach = {place: 1 << place for place in self.after}
        changed = True
        while changed:
            changed = False
            for place in sorted(reach, reverse=True):
                found = reach[place]
                for _, kind in self.after[place][1]:
                    for after in kind:
                        found |= reach[after]
                changed = changed or found != reach[place]
                reach[place] = found
        return reach

    def most_steps(self, length: int) -> int:
        """The steps on a path of this length, at most; it stops at too many."""
        groups = self._groups()
        number = {group: at for at, group in enumerate(groups)}
        tried = np.array([tried for tried, _ in groups.values()], float)
        # All kinds in a row, and in each the groups behind it: their numbers, how
        # often each, and where a kind begins, and where a group's kinds.
        behind, often, kind_starts, group_starts = [], list[int](), [], []
        for _, kinds in groups.values():
            group_starts.append(len(kind_starts))
            for kind in kinds or [{}]:
                kind_starts.append(len(behind))
                behind += [*(number[group] for group in kind), 0]
                often += [*kind.values(), 0]
        counts, total = np.array(often, float), 0.0
        worst = np.zeros(len(groups))
        for _ in range(length + 1):  # so many characters are left to read
            ways = np.add.reduceat(counts * worst[behind], kind_starts)
            worst = tried + np.maximum.reduceat(ways, group_starts)
            total += worst[number[self.first,]]
            if total > MOST_STEPS:
                return MOST_STEPS + 1
        return int(total)

    def _groups(self) -> _Groups:
        """As `after`, for groups of states that read the same characters.

        In `.*encoder.*layers` the first `.*` goes on while a word is read behind it.
        Counted alone, each state would get its own worst character, as if a word could
        begin and end everywhere. So `.*` and the words begun after it are one group, up
        to the next repetition.
        """
        groups: _Groups = {}
        waiting: list[_Group] = [(self.first,)]
        while waiting:
            group = waiting.pop()
            if group in groups:
                continue
            joint: list[_Kind] = [(ANY, {})]
            for place in group:
                joint = [
                    (mask & own, _added(counts, kind))
                    for mask, counts in joint
                    for own, kind in self.after[place][1]
                    if mask & own
                ]
            full = len(groups) > _MOST_GROUPS
            kinds = [self._grouped(group[0], counts, full) for _, counts in joint]
            groups[group] = sum(self.after[place][0] for place in group), kinds
            waiting.extend(other for kind in kinds for other in kind)
        return groups

    def _grouped(
        self, head: int, counts: dict[int, int], full: bool
    ) -> dict[_Group, int]:
        """Groups a repetition that goes on with what is begun; others are alone."""
        alone = _alone(counts)
        if full or counts.get(head) != 1:
            return alone
        begun = [
            at for at, count in counts.items() if count == 1 and not self._loops(at)
        ]
        if not 0 < len(begun) <= _MOST_BEGUN:
            return alone
        for at in (head, *begun):
            del alone[at,]
        return {**alone, (head, *sorted(begun)): 1}

    def _loops(self, place: int) -> bool:
        return any(place in kind for _, kind in self.after[place][1])


def _alone(counts: dict[int, int]) -> dict[_Group, int]:
    """Each state as a group of its own."""
    return {(place,): count for place, count in counts.items()}


def _added(first: dict[int, int], second: dict[int, int]) -> dict[int, int]:
    return first | {at: count + first.get(at, 0) for at, count in second.items()}
