"""Which leaves of a checkpoint to restore."""

import copy
import re
from collections.abc import Iterable
from typing import Any

from flax_layoutmap._core.errors import CheckpointError, closest
from flax_layoutmap._tree.paths import Flat


class Selection:
    """Which leaves to restore: those that `include` finds and `exclude` does not.

    A pattern finds a parameter, as a rule does, if it is in one of the forms of its
    path; anything else by its whole path, so that `^step$` is no step of an optimizer.

    Raises:
        CheckpointError: a pattern is no regular expression.
    """

    def __init__(self, include: Any, exclude: Any) -> None:
        self._include = _patterns("include", include)
        self._exclude = _patterns("exclude", exclude) or []
        self._forms: dict[str, tuple[str, ...]] = {}

    def among(self, flat: Flat) -> "Selection":
        """The same for the leaves of a tree, whose paths have forms."""
        known = copy.copy(self)
        known._forms = self._forms | forms_of_parameters(flat)
        return known

    @property
    def is_everything(self) -> bool:
        """Whether nothing is left out."""
        return self._include is None and not self._exclude

    def __contains__(self, path: str) -> bool:
        if self._include is not None:
            if not any(self._finds(pattern, path) for pattern in self._include):
                return False
        return not any(self._finds(pattern, path) for pattern in self._exclude)

    def _finds(self, pattern: re.Pattern[str], path: str) -> bool:
        return any(map(pattern.search, self._forms.get(path, (path,))))

    def useless(self, paths: Iterable[str]) -> list[str]:
        """A problem for each pattern of `include` that finds none of the paths."""
        paths = list(paths)
        return [
            f"include={pattern.pattern!r} finds no leaf; the closest paths are "
            f"{closest(pattern.pattern, paths[:2000], count=3) or paths[:3]}"
            for pattern in self._include or ()
            if not any(self._finds(pattern, path) for path in paths)
        ]


def forms_of_parameters(flat: Flat) -> dict[str, tuple[str, ...]]:
    """The path of each parameter below a prefix → its forms, as rules see them."""
    full = flat.full_paths()
    return {
        full[at]: section.forms(flat.paths[at])
        for section in flat.sections
        if section.role == "parameter" and section.prefix
        for at in range(section.start, section.stop)
    }


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
