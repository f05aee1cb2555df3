"""Regular expressions whose time is bounded, whatever they are."""

import math
import re
from typing import Any

from flax_layoutmap._core.errors import CheckpointError

# Ways to take one path apart that may be tried; a few seconds.
_MOST_STEPS = 10**8


class Pattern:
    """A regular expression that is matched against whole texts.

    Before a text is tried, the ways in which the pattern could take it apart are
    counted, at most: each `*`, `+` or `{m,n}` can end at any character after the one
    before it, each `?` and `|` doubles them. Too many are refused instead of tried,
    since Python's `re` may go through all of them and cannot be interrupted.

    Args:
        pattern: the expression.
        owner: what it belongs to, for messages.

    Raises:
        CheckpointError: it is no regular expression, or repeats a group that has
            repetitions or alternatives in it.
    """

    def __init__(self, pattern: Any, owner: str) -> None:
        self._owner = owner
        if isinstance(pattern, re.Pattern):
            self._pattern = pattern
        else:
            try:
                self._pattern = re.compile(pattern)
            except (re.error, TypeError, RecursionError, OverflowError) as error:
                raise CheckpointError(
                    f"{owner}: {pattern!r} is no regular expression: {error}"
                ) from error
        if self._pattern.flags & re.VERBOSE:
            raise CheckpointError(
                f"{owner}: {self._pattern.pattern!r} has the flag x (verbose), with "
                "which its time cannot be bounded; write it without comments"
            )
        self._repeats, self._choices, nested = _counts(str(self._pattern.pattern))
        if nested is not None:
            raise CheckpointError(
                f"{owner}: {self._pattern.pattern!r} repeats {nested!r}, in which the "
                "number of characters is open, so that matching could take for ever; "
                "repeat single characters or classes, such as [^/]+"
            )

    def __str__(self) -> str:
        return repr(self._pattern.pattern)

    def fullmatch(self, text: str) -> re.Match[str] | None:
        """Matches the whole text.

        Raises:
            CheckpointError: it could take too long.
        """
        ways = self._choices * math.comb(len(text) + self._repeats, self._repeats)
        if ways > _MOST_STEPS:
            raise CheckpointError(
                f"{self._owner}: {self} could take the {len(text)} characters of "
                f"{text[:60]!r} apart in 10^{math.log10(ways):.0f} ways; use fewer "
                "repetitions"
            )
        return self._pattern.fullmatch(text)


_TOKEN = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?[^:=!<P)]*\)|\((?:\?(?:P<\w+>|P=\w+|<[=!]|[:=!]"
    r"|[a-zA-Z-]+:))?|\)|[*+?]|\{\d*,?\d*\}|\|",
    re.DOTALL,
)
_FIXED = re.compile(r"\{\d+\}")
_QUANTIFIERS = "*+?{"


def _counts(pattern: str) -> tuple[int, int, str | None]:
    """Repetitions, choices, and a repeated group with either of them inside, if any."""
    repeats, choices = 0, 1
    open_groups: list[tuple[int, int, int]] = []  # where one begins, the counts then
    closed: tuple[int, int, int] | None = None  # of the group that ended just here
    at, quantified = 0, False
    while at < len(pattern):
        token = _TOKEN.match(pattern, at)
        text = pattern[at] if token is None else token[0]
        is_quantifier = token is not None and text[0] in _QUANTIFIERS
        if is_quantifier and not quantified:
            if closed is not None and closed[1:] != (repeats, choices) and text != "?":
                return repeats, choices, pattern[closed[0] : at + len(text)]
            if text == "?":
                choices *= 2
            elif not _FIXED.fullmatch(text):
                repeats += 1
        elif text == "|":
            choices *= 2
        # A "?" or "+" right after a quantifier is part of it.
        quantified = is_quantifier and not quantified
        closed = None
        if text == ")":
            closed = open_groups.pop() if open_groups else None
        elif text[0] == "(" and text[-1] != ")":
            open_groups.append((at, repeats, choices))
        at += len(text)
    return repeats, choices, None
