"""A path for each rule of a section, and which rules match a path: quick for many.

Most questions about two patterns are answered by one path that the first matches and
the second does not. Automata are for what is left.
"""

import collections
import itertools
from collections.abc import Sequence

from flax_layoutmap._languages import sample, witness
from flax_layoutmap._rules import Match, Rule, first_match

# Rules are found by so many characters that every match of theirs holds.
_GRAM = 4
# So many are tried one by one.
_FEW = 32


class Examples:
    """The rules of one section, by the paths that they match.

    Attributes:
        rules: the rules.
        mode: how their patterns meet a path.
    """

    def __init__(self, rules: Sequence[Rule], mode: Match) -> None:
        self.rules = rules
        self.mode: Match = mode
        self._exact = {r.pattern: at for at, r in enumerate(rules) if r.rank == "error"}
        self._optional = {
            r.pattern: at for at, r in enumerate(rules) if r.rank == "skip"
        }
        self._by_gram: dict[str, list[int]] = {}
        self._others: list[int] = []
        many = len(rules) > _FEW
        grams = [_grams(next(iter(r.view.texts), "")) if many else [] for r in rules]
        counts = collections.Counter(itertools.chain.from_iterable(grams))
        for at, own in enumerate(grams):
            if own:
                rarest = min(own, key=counts.__getitem__)
                self._by_gram.setdefault(rarest, []).append(at)
            else:
                self._others.append(at)

    def of(self, at: int) -> tuple[str | None, Sequence[int]]:
        """A path that a rule decides, or at least matches, and what matches that path.

        The path is `""` where there is none, and None where that is not known.
        """
        pattern = self.rules[at].pattern
        path = sample(pattern, self.mode)
        met = self.deciding(path) if path else ()
        if at not in met:  # a guess that failed
            path = witness(pattern, self.mode)
            met = self.deciding(path) if path else ()
        return path, met

    def deciding(self, path: str) -> Sequence[int]:
        """Positions of the rules that a path is asked of: an exact key wins alone."""
        if path in self._exact:
            return (self._exact[path],)
        found = self.matching(path)
        own = self._optional.get(path)
        return found if own is None else tuple(sorted({*found, own}))

    def matching(self, path: str) -> tuple[int, ...]:
        """Positions of the rules whose patterns match a path."""
        likely, known = self._others, self._by_gram
        found = [known[gram] for gram in _grams(path) if gram in known] if known else ()
        if found:
            likely = sorted({*likely, *itertools.chain.from_iterable(found)})
        return self.among(path, likely)

    def among(self, path: str, positions: Sequence[int]) -> tuple[int, ...]:
        """The same, of some of them."""
        rules, mode = self.rules, self.mode
        return tuple(
            at for at in positions if first_match(rules[at], mode, path) is not None
        )


def _grams(text: str) -> list[str]:
    return [text[at : at + _GRAM] for at in range(len(text) - _GRAM + 1)]
