"""A path for each rule of a section, and which rules match a path: quick for many.

Most questions about two patterns are answered by one path that the first matches and
the second does not. Automata are for what is left.
"""

import functools
from collections.abc import Iterable, Sequence

import numpy as np

from flax_layoutmap._rules.languages import sample, witness
from flax_layoutmap._rules.pattern_tree import Node, NotUnderstood, parse
from flax_layoutmap._rules.rules import Match, Rule, first_match

# Rules are found by so many bytes that every match of theirs holds.
_GRAM = 4
_HASH_BITS = 16
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

    def of(self, at: int) -> tuple[str | None, Sequence[int]]:
        """A path that a rule decides, or at least matches, and what may match it too.

        The path is `""` where there is none, and None where that is not known.
        """
        path, is_sure = self._samples[at]
        if path:
            likely = self._or_its_key(path, self._likely[at])
            if at in likely and (is_sure or self.is_asked(at, path)):
                return path, likely
        path = witness(self.rules[at].pattern, self.mode)
        return path, self.likely(path) if path else ()

    @functools.cached_property
    def _samples(self) -> list[tuple[str | None, bool]]:
        """A guess for each rule, and whether it is sure."""
        return [sample(rule.pattern, self.mode) for rule in self.rules]

    @functools.cached_property
    def _likely(self) -> Sequence[Sequence[int]]:
        """For each guess the rules that may match it."""
        return self._texts.likely([path or "" for path, _ in self._samples])

    @functools.cached_property
    def _texts(self) -> "_Texts":
        many = len(self.rules) > _FEW
        return _Texts([_texts_of(rule) if many else () for rule in self.rules])

    def likely(self, path: str) -> Sequence[int]:
        """Positions of rules that may match a path; those that do are among them.

        An exact key wins alone.
        """
        return self._or_its_key(path, self._texts.likely([path])[0])

    def _or_its_key(self, path: str, likely: Sequence[int]) -> Sequence[int]:
        if path in self._exact:
            return (self._exact[path],)
        own = self._optional.get(path)
        return likely if own is None else sorted({*likely, own})

    def is_asked(self, at: int, path: str) -> bool:
        """Whether a rule, of those that may match a path, does, or is its key."""
        rule = self.rules[at]
        return rule.pattern == path or first_match(rule, self.mode, path) is not None

    def matching(self, path: str) -> tuple[int, ...]:
        """Positions of the rules whose patterns match a path."""
        return self.among(path, self._texts.likely([path])[0])

    def among(self, path: str, positions: Sequence[int]) -> tuple[int, ...]:
        """The same, of some of them."""
        rules, mode = self.rules, self.mode
        return tuple(
            [at for at in positions if first_match(rules[at], mode, path) is not None]
        )


def _texts_of(rule: Rule) -> Sequence[str]:
    """Texts of which each match holds one; none where that is not known."""
    texts = rule.view.texts
    if texts or "|" not in rule.pattern:
        return texts[:1]
    try:
        return _one_of_these(parse(rule.pattern))
    except (NotUnderstood, RecursionError):
        return ()


def _one_of_these(node: Node) -> Sequence[str]:
    if node[0] == "text":
        return (node[1],)
    if node[0] == "cat":
        found = [some for some in map(_one_of_these, node[1]) if some]
        return max(found, key=lambda texts: min(map(len, texts)), default=())
    if node[0] == "alt":
        branches = [_one_of_these(branch) for branch in node[1]]
        return [text for some in branches for text in some] if all(branches) else ()
    return ()


class _Texts:
    """Texts, and which of them a path may hold: each is known by its rarest bytes.

    Args:
        texts: for each position some, of which a path holds one; none: any path may do.
    """

    def __init__(self, texts: Sequence[Sequence[str]]) -> None:
        self._known: dict[int, list[int]] = {}
        self._has_key = np.zeros(1 << _HASH_BITS, bool)
        self._anywhere: Sequence[int] = range(len(texts))
        positions = np.repeat(np.arange(len(texts)), [len(some) for some in texts])
        grams, owners = _grams([text for some in texts for text in some])
        if not len(grams):
            return
        counts = np.bincount(_hashed(grams))[_hashed(grams)]
        starts = np.flatnonzero(np.diff(owners, prepend=-1))
        ranked = counts * len(grams) + np.arange(len(grams))
        rarest = grams[np.minimum.reduceat(ranked, starts) % len(grams)]
        with_key = positions[owners[starts]].tolist()
        for at, key in zip(with_key, rarest.tolist(), strict=True):
            self._known.setdefault(key, []).append(at)
        self._has_key[_hashed(rarest)] = True
        keys = np.bincount(with_key, minlength=len(texts)).tolist()
        self._anywhere = [
            at
            for at, (some, count) in enumerate(zip(texts, keys, strict=True))
            if not some or count < len(some)  # one of them is too short
        ]

    def likely(self, paths: Sequence[str]) -> list[Sequence[int]]:
        """For each path the positions, ascending, of all texts that it may hold."""
        found: list[Sequence[int]] = [self._anywhere] * len(paths)
        if not self._known:
            return found
        grams, owners = _grams(paths)
        hits = self._has_key[_hashed(grams)]
        # Each once: a text may be the same few bytes again and again.
        pairs = np.unique(owners[hits].astype(np.uint64) << 32 | grams[hits])
        more: dict[int, set[int]] = {}
        for path, gram in zip(
            (pairs >> 32).tolist(), (pairs & 0xFFFFFFFF).tolist(), strict=True
        ):
            if gram in self._known:
                more.setdefault(path, set(self._anywhere)).update(self._known[gram])
        for path, positions in more.items():
            found[path] = sorted(positions)
        return found


def _hashed(grams: np.ndarray) -> np.ndarray:
    """A number of few bits for each, such as most others do not have."""
    return (grams * np.uint32(0x9E3779B1)) >> np.uint32(32 - _HASH_BITS)


def _grams(texts: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
    """All runs of four bytes within texts, as numbers, and the text of each."""
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    joined = b"\0".join([*encoded, b""])
    count = max(0, len(joined) - _GRAM + 1)
    grams = np.ndarray((count,), np.uint32, joined, strides=(1,))
    owners = np.repeat(np.arange(len(encoded)), [len(text) + 1 for text in encoded])
    # None that ends in the byte between two texts, or goes beyond it.
    within = owners[:count] == owners[_GRAM - 1 :][:count]
    within &= np.frombuffer(joined, np.uint8)[_GRAM - 1 :][:count] != 0
    return grams[within], owners[:count][within]
