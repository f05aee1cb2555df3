"""Regular expressions with bounded matching time."""

import re
from typing import Any

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap._rules.pattern_cost import QUICKER, USUAL_PATH, slow_because


class Pattern:
    """A regular expression that is matched against whole texts.

    Python's `re` may go through all ways to take a text apart, and cannot be
    interrupted. So a pattern with too many of them is refused, as in a file of rules.

    Args:
        pattern: the expression.
        owner: what it belongs to, for messages.

    Raises:
        CheckpointError: it is no regular expression, or may take very long.
    """

    def __init__(self, pattern: Any, owner: str) -> None:
        self._owner = owner
        try:
            self._pattern = re.compile(pattern)
        except (re.error, TypeError, RecursionError, OverflowError) as error:
            raise CheckpointError(
                f"{owner}: {pattern!r} is no regular expression: {error}"
            ) from error
        if self._pattern.flags & re.VERBOSE:
            raise CheckpointError(
                f"{owner}: {self} has the flag x (verbose), with which its time cannot "
                "be bounded; write it without comments"
            )
        self._check(USUAL_PATH)

    def __str__(self) -> str:
        return repr(self._pattern.pattern)

    def fullmatch(self, text: str) -> re.Match[str] | None:
        """Match the whole text.

        Raises:
            CheckpointError: it could take too long.
        """
        if len(text) > USUAL_PATH:
            self._check(1 << len(text).bit_length())
        return self._pattern.fullmatch(text)

    def _check(self, length: int) -> None:
        """Raise where a text of this length may take too long."""
        pattern = str(self._pattern.pattern)
        if self._pattern.flags & re.IGNORECASE and "(?i" not in pattern:
            pattern = f"(?i:{pattern})"  # compiled with a flag that it does not name
        slow = slow_because(pattern, length)
        if slow is not None:
            raise CheckpointError(
                f"{self._owner}: matching {self} could take for ever: {slow}; {QUICKER}"
            )
