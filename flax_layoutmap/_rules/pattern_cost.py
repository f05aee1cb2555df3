"""How long `re` may take to try a pattern on a path, found by reading the pattern.

`re` tries every way to match before it gives up. Where the number of ways doubles with
each character, as in `(a+)+`, a path of 40 characters takes days. Here each character
that it may try is counted, on the worst path that there could be: repetitions such as
`{60}` are written out, and where it has a choice, the next character is the one with
which most ways go on. What `re` knows to leave out is counted too: it never tries more.
"""

import functools
import re
from collections.abc import Iterator

from flax_layoutmap._rules.languages import Automaton
from flax_layoutmap._rules.pattern_tree import (
    ANY,
    WORD,
    Node,
    NotUnderstood,
    parse_more,
    shape_of,
)

# Steps of one pattern, and of all of a file, on a path of so many characters: a step
# is one character tried, and takes some nanoseconds.
MOST_STEPS = 300_000_000
MOST_STEPS_TOGETHER = 2_000_000_000
USUAL_PATH = 100
LONGEST_PATTERN = 2_000

# Those that take no more need not be counted to the last one.
_FEW_STEPS = MOST_STEPS // 100
_MOST_CHOICES = 100_000
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

# Without any of these there is one way to match, from each place.
_CHOOSES = re.compile(r"[*+?{|]")


def slow_because(pattern: str) -> str | None:
    """Why a pattern that compiles may take very long on some path; None if it cannot.

    "Cannot": at most `MOST_STEPS` steps on a path of `USUAL_PATH` characters, and a
    polynomial in the length of longer ones.
    """
    return _judged(pattern)[0]


def steps_of(pattern: str) -> int:
    """How many steps it takes at most, on a path of `USUAL_PATH` characters."""
    return _judged(pattern)[1]


@functools.lru_cache(maxsize=4096)
def _judged(pattern: str) -> tuple[str | None, int]:
    if len(pattern) > LONGEST_PATTERN:
        text = f"it is {len(pattern)} characters long, more than {LONGEST_PATTERN}"
        return text, 0
    if not _CHOOSES.search(pattern):
        return None, len(pattern) * USUAL_PATH
    shape, words = shape_of(pattern)
    if shape != pattern:
        why, steps = _counted(_like(shape, words))
        if why is None and 2 * steps <= _FEW_STEPS:
            return why, 2 * steps
    return _counted(pattern)


def _like(shape: str, words: list[str]) -> str:
    """What many patterns have in common, and takes at least half as many steps.

    Each word is as many dots as a power of two allows for: it is as soon behind, and
    where it could be read, they can.
    """
    lengths = [1 << len(word).bit_length() - 1 for word in words]
    return "".join(
        f"{between}{'.' * length}"
        for between, length in zip(shape.split(WORD), [*lengths, 0], strict=True)
    )


@functools.lru_cache(maxsize=1024)
def _counted(pattern: str) -> tuple[str | None, int]:
    try:
        tries = _Tries(parse_more(pattern))
    except NotUnderstood:
        return "it is too complicated to tell", 0
    except RecursionError:
        return "it is nested too deeply", 0
    if tries.turns:
        return "it repeats what may be empty", 0
    if tries.doubles():
        text = (
            "a repetition in it can read one text in several ways, so that each "
            "further character doubles the time"
        )
        return text, 0
    steps = tries.most_steps()
    if steps > MOST_STEPS:
        text = (
            f"more than {MOST_STEPS:.0e} steps on a path of {USUAL_PATH} characters: "
            "too many parts of it can read the same text"
        )
        return text, 0
    return None, steps


class _Tries(Automaton):
    """What `re` may go through with a pattern, from one place in a path.

    Attributes:
        turns: whether something can be repeated without reading a character.
        after: state behind a character → how often the next one is tried, and for each
            kind of it, as bits, the states behind that: how often each.
    """

    most_states = 4_000
    characters = ANY

    def __init__(self, node: Node) -> None:
        super().__init__(node, "fullmatch")
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

    def _build(self, node: Node, start: int) -> int:
        if node[0] != "aside":
            return super()._build(node, start)
        inside, end = self._state(), self._state()
        self._build(node[1], inside)  # it leads nowhere
        self.free[start] += [(inside, ""), (end, "")]
        return end

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

    def most_steps(self, length: int = USUAL_PATH) -> int:
        """The steps on a path of this length, at most; it stops at too many."""
        alone = {
            (place,): (tried, [_alone(counts) for _, counts in kinds])
            for place, (tried, kinds) in self.after.items()
        }
        steps = self._most_steps(alone, length)
        if steps <= _FEW_STEPS:
            return steps
        return self._most_steps(self._groups(), length)

    def _most_steps(self, groups: _Groups, length: int) -> int:
        total = 0
        worst = dict.fromkeys(groups, 0)
        for _ in range(length + 1):  # so many characters are left to read
            worst = {
                group: tried
                + max(
                    (sum(n * worst[to] for to, n in kind.items()) for kind in kinds),
                    default=0,
                )
                for group, (tried, kinds) in groups.items()
            }
            total += worst[self.first,]
            if total > MOST_STEPS:
                break
        return total

    def _groups(self) -> _Groups:
        """As `after`, of groups of states that read the same characters.

        In `.*encoder.*layers` the first `.*` goes on while a word is read behind it.
        Alone, each state would be given the character that is worst for it, as if a
        word could begin and end at every place. So `.*` and the words begun behind it
        are one group, up to the next repetition.
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
