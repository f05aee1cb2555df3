"""Rename the leaves of a checkpoint."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from flax_layoutmap._core.errors import CheckpointError, closest
from flax_layoutmap._rules.pattern_cost import QUICKER, slow_because

Rename = Sequence[tuple[str, str]]


def checked_rename(given: Any) -> Rename:
    """The pairs of pattern and template that `rename=` holds.

    Raises:
        CheckpointError: it holds something else, what `re` refuses, or a pattern that
            may take very long on some path.
    """
    if given is None:
        return ()
    pairs = list(given.items()) if isinstance(given, Mapping) else list(given)
    for pair in pairs:
        try:
            if not isinstance(pair, list | tuple):
                raise TypeError(f"it is a {type(pair).__name__}")
            pattern, template = pair
            _check_template(re.compile(pattern), template)
        except (re.error, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(
                f"rename={pair!r} is no pair of a regular expression and what takes "
                rf"its place (with \1 for a group): {error}"
            ) from error
        slow = slow_because(str(pattern))
        if slow is not None:
            raise CheckpointError(
                f"rename={pattern!r} may take very long: {slow}; {QUICKER}"
            )
    return tuple((str(pattern), template) for pattern, template in pairs)


def _check_template(pattern: re.Pattern[str], template: str) -> None:
    """Raise what `re` raises for a template with groups that a pattern lacks."""
    groups = "".join(f"(?P<{name}>)" for name in pattern.groupindex)
    more = "()" * (pattern.groups - len(pattern.groupindex))
    re.sub(groups + more, template, "", count=1)


def renamed(paths: Sequence[str], rules: Rename) -> list[str]:
    r"""The new name of each path: the first pattern that is found in it, replaced.

    Args:
        paths: the paths.
        rules: pairs such as `(r"^params/(.*)", r"\1")`.

    Raises:
        CheckpointError: two leaves get one name, a name is no path, or a pattern is
            found in no path.
    """
    names: dict[str, str] = {}  # new name → path
    used: set[str] = set()
    for path in paths:
        new = path
        for pattern, template in rules:
            new, count = re.subn(pattern, template, path, count=1)
            if count:
                used.add(pattern)
                break
        if new in names:
            raise CheckpointError(
                f"rename gives {names[new]} and {path} the same name {new!r}"
            )
        if not new or new.startswith("/") or new.endswith("/") or "//" in new:
            raise CheckpointError(
                f"rename gives {path} the name {new!r}, which is no path"
            )
        names[new] = path
    for pattern, _ in rules:
        if pattern not in used:
            near = closest(pattern, list(paths)[:2000], count=3) or list(paths)[:3]
            raise CheckpointError(
                f"rename={pattern!r} finds no leaf that an earlier pattern left; the "
                f"closest paths are {near}"
            )
    for new, path in names.items():
        parent = new.rpartition("/")[0]
        while parent:
            if parent in names:
                raise CheckpointError(
                    f"rename gives {names[parent]} the name {parent!r}, below which "
                    f"{path} has {new!r}; a leaf has nothing below it"
                )
            parent = parent.rpartition("/")[0]
    return list(names)
