"""Find the cheapest candidate by moves: of the batch, of classes, of single groups.

The start is full sharding: the batch over all axes that it divides by, and all
parameters over all axes. A move counts if it gains; one of a single group if it gains
2 %, since prices are not more exact than that.
"""

import bisect
import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator

from flax_layoutmap._suggest.candidate import Candidate
from flax_layoutmap._suggest.moves import (
    fully_sharded,
    in_group,
    on_class,
    starts,
    storages,
)
from flax_layoutmap._suggest.price import Pricer
from flax_layoutmap._suggest.problem import Problem

# The least gain of a move, and of one that is about a single group, as shares.
_GAIN, _SINGLE = 1e-3, 0.02
# How far the rules may be from the layout that no rules can say.
_CLOSE = 5e-3
# A second choice may cost so many times the best.
_NEAR = 1.5

# The candidates that a change of one leads to.
Move = Callable[[Candidate], Iterable[Candidate]]


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One step of a search: what was tried, and the price of a step of training.

    `tried` and `took_seconds` count from the start of the search.
    """

    what: str
    seconds: float
    tried: int
    took_seconds: float = dataclasses.field(compare=False)


class Stopped(Exception):
    """The time of a search is over."""


@dataclasses.dataclass(slots=True)
class Search:
    """A search, and the best that it has found so far."""

    problem: Problem
    price: Pricer
    limit_bytes: int
    is_over: Callable[[], bool] = lambda: False
    best: Candidate = dataclasses.field(init=False)
    # Each candidate that a move has led to.
    tried: dict[Candidate, None] = dataclasses.field(default_factory=dict)
    trail: list[Step] = dataclasses.field(default_factory=list)
    is_complete: bool = True  # until the time is over, or Ctrl-C
    start: float = dataclasses.field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.best = fully_sharded(self.problem)

    # -------------------------------------------------------------------- prices

    def excess(self, candidate: Candidate) -> int:
        """Bytes above the limit."""
        return max(0, self.price.peak_bytes(candidate) - self.limit_bytes)

    def is_better(self, new: Candidate, old: Candidate, gain: float = 0.0) -> bool:
        """Whether a candidate is worth a move."""
        if self.is_over():
            raise Stopped
        seconds, before = self.price.of(new).seconds, self.price.of(old).seconds
        over = self.excess(old)
        if over:
            less = self.excess(new)
            return less < over * (1 - gain) or (less == over and seconds < before)
        return seconds < before * (1 - gain) and not self.excess(new)

    def note(self, what: str) -> None:
        seconds = self.price.of(self.best).seconds
        took = time.perf_counter() - self.start
        self.trail.append(Step(what, seconds, self.price.count, took))

    # -------------------------------------------------------------------- search

    def run(self) -> None:
        """Search until nothing is better, or until the time is over."""
        with self.until_over():
            self.note("full sharding")
            storage, batches, *classes = self.class_moves()
            self.improve([storage, batches, *classes], _GAIN)
            self.note("batch and classes")
            for start in self.second():
                self.improve([storage, *classes], _GAIN, start)
                self.note("another batch")
            self.improve(self.single_moves(), _SINGLE)
            if self.excess(self.best):  # the least memory may be near the start
                start = fully_sharded(self.problem)
                self.improve(self.single_moves(), _SINGLE, start)
            self.note("single parameters")
        self.best = self.with_rules(self.best)
        self.note("rules for activations")

    @contextlib.contextmanager
    def until_over(self) -> Iterator[None]:
        """End a block when the time is over, or with Ctrl-C."""
        try:
            yield
        except (Stopped, KeyboardInterrupt):
            self.is_complete = False

    def improve(
        self, moves: Iterable[Move], gain: float, start: Candidate | None = None
    ) -> None:
        """Take the best result of each move, in rounds until none gains enough.

        From the best so far, or from another start.
        """
        moves, current, before = [*moves], start or self.best, None
        while current != before:
            before = current
            for move in moves:
                least = gain
                for new in move(current):
                    if new != current and self.is_better(new, current, least):
                        current, least = new, 0.0
                        if self.is_better(new, self.best):
                            self.best = new
                    self.tried[new] = None

    def second(self) -> list[Candidate]:
        """The cheapest with other axes for the batch, if it costs little more."""
        most = self.price.of(self.best).seconds * _NEAR
        others = sorted(self.tried, key=lambda one: self.price.of(one).seconds)
        near = (
            one
            for one in others
            if one.batch != self.best.batch
            and self.price.of(one).seconds < most
            and not self.excess(one)
        )
        return [*itertools.islice(near, 1)]

    def class_moves(self) -> list[Move]:
        """Other axes of storage, of the batch, and of each class."""
        problem = self.problem
        # Of the two orders of classes, the one that is better for one set of axes.
        batch = problem.batches[min(1, len(problem.batches) - 1)]
        first, last = (next(starts(problem, batch, one)) for one in (False, True))
        most_last = not self.is_better(first, last)
        every = [
            one for own in problem.batches for one in starts(problem, own, most_last)
        ]
        return [
            functools.partial(storages, problem),
            lambda _: every,
            *(
                functools.partial(on_class, problem, number)
                for number in range(len(problem.classes))
            ),
        ]

    def single_moves(self) -> Iterator[Move]:
        """Other dims of a single group, if its share of the links is enough to gain."""
        groups = self.problem.groups
        cost, total = self.price.of(self.best), sum(group.bytes for group in groups)
        for number, group in enumerate(groups):
            if cost.link_seconds * group.bytes / total >= _SINGLE * cost.seconds:
                yield functools.partial(in_group, self.problem, number)

    # --------------------------------------------------------------------- rules

    def ruled_as_best(self, other: Candidate) -> Candidate:
        """A candidate with rules for the outputs that the best has them for.

        Or for all, or for few, whichever is the cheapest.
        """
        if dataclasses.replace(self.best, fixed=None) == other:
            return self.best
        named, others = self._outputs()
        fixed = self.best.fixed, frozenset(named), frozenset([*named, *others])
        return min(
            (dataclasses.replace(other, fixed=one) for one in fixed), key=self._key
        )

    def with_rules(self, best: Candidate) -> Candidate:
        """Few activation rules that give what the open layouts gave.

        If none do, what rules for all outputs give. Once the time is over, the best so
        far, or rules for all.
        """
        named, others = self._outputs()

        def ruled(outputs: Iterable[int]) -> Candidate:
            return dataclasses.replace(best, fixed=frozenset([*named, *outputs]))

        every, needed = ruled(others), list[int]()
        wanted = 0, self.price.of(best).seconds * (1 + _CLOSE)
        with self.until_over():
            if self._key(ruled(())) > wanted:
                excess, seconds = min(self._key(ruled(())), self._key(every))
                wanted = max(wanted, (excess, seconds * (1 + _GAIN)))
            while self._key(ruled(needed)) > wanted:
                # The output without which those before it are not enough.
                prefixes = [ruled([*needed, *others[:at]]) for at in range(len(others))]
                last = bisect.bisect_left(
                    prefixes, True, key=lambda one: self._is_enough(one, wanted)
                )
                needed.append(others[last - 1])
                del others[last - 1 :]
            return ruled(needed)
        return min(ruled(needed), every, key=self._key)

    def _outputs(self) -> tuple[list[int], list[int]]:
        """The outputs that have a name, and the others, those of large parts first."""
        points = self.problem.points
        named = [at for at, point in enumerate(points) if point.section == "names"]
        return named, sorted({*range(len(points))} - {*named}, key=self._depth)

    def _is_enough(self, candidate: Candidate, wanted: tuple[int, float]) -> bool:
        if self.is_over():
            raise Stopped
        return self._key(candidate) <= wanted

    def _key(self, candidate: Candidate) -> tuple[int, float]:
        return self.excess(candidate), self.price.of(candidate).seconds

    def _depth(self, at: int) -> tuple[int, int]:
        point = self.problem.points[at]
        return point.paths[0].count("/"), -len(point.constraints)
