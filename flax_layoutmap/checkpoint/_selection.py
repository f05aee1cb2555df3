"""Which leaves of a checkpoint to restore."""

import re
from collections.abc import Iterable
from typing import Any

from flax_layoutmap._errors import CheckpointError, closest


class Selection:
    """Which leaves to restore: those that `include` finds and `exclude` does not.

    Raises:
        CheckpointError: a pattern is no regular expression.
    """

    def __init__(self, include: Any, exclude: Any) -> None:
        self._include = _patterns("include", include)
        self._exclude = _patterns("exclude", exclude) or []

    @property
    def is_everything(self) -> bool:
        """Whether nothing is left out."""
        return self._include is None and not self._exclude

    def __contains__(self, path: str) -> bool:
        if self._include is not None:
            if not any(pattern.search(path) for pattern in self._include):
                return False
        return not any(pattern.search(path) for pattern in self._exclude)

    def useless(self, paths: Iterable[str]) -> list[str]:
        """A problem for each pattern of `include` that finds none of the paths."""
        paths = list(paths)
        return [
            f"include={pattern.pattern!r} finds no leaf; the closest paths are "
            f"{closest(pattern.pattern, paths[:2000], count=3) or paths[:3]}"
            for pattern in self._include or ()
            if not any(pattern.search(path) for path in paths)
        ]


def _patterns(name: str, given: Any) -> list[re.Pattern[str]] | None:
    if given is None:
        return None
    several = [given] if isinstance(given, str | re.Pattern) else list(given)
    try:
        return [re.compile(pattern) for pattern in several]
    except (re.error, TypeError) as error:
        raise CheckpointError(
            f"{name}={given!r} is neither a regular expression nor a list of some: "
            f"{error}"
        ) from error
