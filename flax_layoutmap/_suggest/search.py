"""Find the cheapest candidate: axes of the batch, then classes, then single groups.

The start is full sharding: the batch and all parameters over all axes. Axes are then
taken from the batch and placed on classes of dims. Only a gain counts, and a layout of
a single group counts from a gain of 2 % on, since prices are not more exact than that.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator

from flax_layoutmap._suggest.candidate import Candidate
from flax_layoutmap._suggest.moves import (
    exchanged,
    fully_sharded,
    not_stored,
    single,
    stored,
    switched,
    with_classes,
)
from flax_layoutmap._suggest.price import Pricer
from flax_layoutmap._suggest.problem import Problem

# The least gain of a move, and of one that is about a single group, as shares.
_GAIN, _SINGLE = 1e-3, 0.02
# How far the rules may be from the layout that no rules can say.
_CLOSE = 5e-3
_MANY = 1 << 60
# A set of axes for the batch whose start costs so many times the best is left.
_HOPELESS = 1.25

# A change of a candidate.
Move = Callable[[Candidate], Candidate]


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
    limit_bytes: int | None
    is_over: Callable[[], bool] = lambda: False
    best: Candidate | None = None
    others: list[Candidate] = dataclasses.field(default_factory=list)
    trail: list[Step] = dataclasses.field(default_factory=list)
    is_complete: bool = False
    start: float = dataclasses.field(default_factory=time.perf_counter)

    # -------------------------------------------------------------------- prices

    def excess(self, candidate: Candidate) -> int:
        """Bytes above the limit."""
        if self.limit_bytes is None:
            return 0
        if self.price.of(candidate).at_rest_bytes > self.limit_bytes:
            return self.price.of(candidate).at_rest_bytes - self.limit_bytes + _MANY
        return max(0, self.price.peak_bytes(candidate) - self.limit_bytes)

    def is_better(self, new: Candidate, old: Candidate, gain: float = _GAIN) -> bool:
        """Whether a candidate is worth a move."""
        if self.is_over():
            raise Stopped
        seconds, before = self.price.of(new).seconds, self.price.of(old).seconds
        over = self.excess(old)
        if over:
            less = self.excess(new)
            return less < over * (1 - gain) or (less == over and seconds < before)
        return seconds < before * (1 - gain) and not self.excess(new)

    def improved(
        self,
        start: Candidate,
        moves: Callable[[Candidate], Iterable[Move]],
        gain: float = _GAIN,
    ) -> Candidate:
        """Take every move that is better, in rounds until one has none."""
        current, again = start, True
        while again:
            again = False
            for move in moves(start):
                new = move(current)
                if new != current and self.is_better(new, current, gain):
                    current, again = new, True
                    self.note_if_best(current)
        return current

    def note_if_best(self, candidate: Candidate) -> None:
        if self.best is None or self.is_better(candidate, self.best, 0.0):
            self.best = candidate

    def note(self, what: str, candidate: Candidate) -> None:
        seconds = self.price.of(candidate).seconds
        took = time.perf_counter() - self.start
        self.trail.append(Step(what, seconds, self.price.count, took))

    # -------------------------------------------------------------------- search

    def run(self) -> None:
        """Search until nothing is better, or until the time is over."""
        problem = self.problem
        start = fully_sharded(problem)
        self.best = start
        self.note("full sharding", start)
        try:
            current, *self.others = self.order(
                dict.fromkeys([start, *self.over_batches()])
            )
            current = self.improved(current, self.single_moves, _SINGLE)
            self.note("single parameters", current)
            self.best = current
            self.is_complete = True
        except (Stopped, KeyboardInterrupt):
            pass
        self.best = self.with_rules(self.best)
        self.note("rules for activations", self.best)

    def rivals(self) -> list[Candidate]:
        """What XLA's partitioner may find better: the second best, full sharding."""
        assert self.best is not None
        most = self.price.of(self.best).seconds * _HOPELESS
        near = [one for one in self.others if self.price.of(one).seconds < most]
        start = fully_sharded(self.problem)
        found = dict.fromkeys(map(self.with_rules, (*near[:1], start)))
        return [one for one in found if one != self.best]

    def over_batches(self) -> list[Candidate]:
        """The best candidate of each set of axes for the batch, the best set first.

        Of the sets with one axis less, those are tried that leave the best one of the
        last size, until they gain nothing.
        """
        problem, found = self.problem, dict[tuple[str, ...], Candidate]()
        size, last = max(map(len, problem.batches)), None
        while size >= 0:
            for batch in problem.batches:
                if len(batch) == size and (last is None or set(batch) < set(last)):
                    found[batch] = self.on_batch(batch)
            own = [one for one in found.values() if len(one.batch) == size]
            ordered = self.order(found.values())
            if last is not None and (not own or ordered[0] not in own):
                break
            last = self.order(own)[0].batch if own else last
            size -= 1
        return self.order(found.values())

    def order(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        return sorted(
            candidates,
            key=lambda one: (self.excess(one), self.price.of(one).seconds, one.batch),
        )

    def on_batch(self, batch: tuple[str, ...]) -> Candidate:
        """The best placement of the axes that are not the batch's."""
        current = min(self._starts(batch), key=self._key)
        assert self.best is not None
        most = self.price.of(self.best).seconds * _HOPELESS
        is_hopeless = self.price.of(current).seconds > most
        if self.excess(self.best) or not is_hopeless:
            self.note_if_best(current)
            current = self.improved(current, self.class_moves)
        self.note(f"batch over {'+'.join(batch) or 'no axis'}", current)
        return current

    def _starts(self, batch: tuple[str, ...]) -> Iterator[Candidate]:
        """Classes in either order, with parameters stored over the batch and not."""
        problem = self.problem
        for most_last in (True, False):
            current = fully_sharded(problem, batch)
            for axis in problem.sizes:
                if axis not in batch:
                    current = with_classes(problem, current, axis, most_last)
            yield current
            for axis in batch:
                current = not_stored(problem, current, axis)
            yield current

    def class_moves(self, start: Candidate) -> Iterator[Move]:
        """Place an axis on a class or take it away; store parameters over an axis."""
        problem = self.problem
        for axis in problem.sizes:
            if axis not in start.batch:
                for number in range(len(problem.classes)):
                    yield functools.partial(switched, problem, axis, number)
            for number, choices in problem.exchanges.items():
                for own in choices if axis in start.batch else ():
                    yield functools.partial(exchanged, problem, axis, number, own)
            yield functools.partial(stored, problem, axis=axis)
            yield functools.partial(not_stored, problem, axis=axis)

    def single_moves(self, start: Candidate) -> Iterator[Move]:
        """Other places of one axis in a single group, if that can gain enough."""
        cost, groups = self.price.of(start), self.problem.groups
        total = sum(group.bytes for group in groups)
        for number, group in enumerate(groups):
            if 2 * cost.link_seconds * group.bytes / total < _SINGLE * cost.seconds:
                continue
            for axis in self.problem.sizes:
                for dim in (None, *group.dims):
                    yield functools.partial(single, self.problem, number, axis, dim)

    def with_rules(self, best: Candidate) -> Candidate:
        """Few activation rules that give what the open layouts gave."""
        points = range(len(self.problem.points))
        named = {at for at in points if self.problem.points[at].section == "names"}
        wanted = self.price.of(best).seconds * (1 + _CLOSE)
        current = dataclasses.replace(best, fixed=frozenset(named))
        others = sorted(set(points) - named, key=self._depth)
        while self.price.of(current).seconds > wanted or self.excess(current):
            fixed = current.fixed or frozenset()
            choices = [
                dataclasses.replace(current, fixed=fixed | {at})
                for at in others
                if at not in fixed
            ]
            better = None
            for one in choices:
                if self.price.of(one).seconds <= wanted and not self.excess(one):
                    better = one
                    break
                if better is None or self._key(one) < self._key(better):
                    better = one
            if better is None or self._key(better) >= self._key(current):
                break
            current = better
        return current

    def _key(self, candidate: Candidate) -> tuple[int, float]:
        return self.excess(candidate), self.price.of(candidate).seconds

    def _depth(self, at: int) -> tuple[int, int]:
        point = self.problem.points[at]
        return point.paths[0].count("/"), -len(point.constraints)
