"""The exceptions and warnings of flax_layoutmap, and helpers for their messages."""

import contextlib
import difflib
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any


class LayoutError(ValueError):
    """Base class of every error that flax_layoutmap raises for a user's mistake.

    Attributes:
        problems: one text per problem of a tree; empty for a single problem.
    """

    __module__ = "flax_layoutmap"

    def __init__(self, message: str = "", problems: Sequence[str] = ()) -> None:
        super().__init__(visible(message, "\n"))
        self.problems = tuple(visible(text, "\n") for text in problems)


class RuleError(LayoutError):
    """A rule is invalid: a bad regex, a bad value, a duplicate key."""

    __module__ = "flax_layoutmap.errors"


class MeshError(LayoutError):
    """A mesh cannot be made, is missing, or has no devices where some are needed."""

    __module__ = "flax_layoutmap.errors"


class ResolveError(LayoutError):
    """Rules do not fit a tree. One error lists every problem of the tree.

    Attributes:
        problems: one text per problem, each starting with the path of its leaf.
        resolution: the Resolution, for `flm.lint`, with the leaves that do not fit
            replicated. None if no tree was resolved, and after unpickling.
    """

    __module__ = "flax_layoutmap.errors"

    def __init__(
        self, message: str, problems: Sequence[str] = (), resolution: Any = None
    ) -> None:
        super().__init__(message, problems)
        self.resolution = resolution

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.problems)


class StructureError(LayoutError):
    """A tree cannot be given unique paths, or does not fit another tree."""

    __module__ = "flax_layoutmap.errors"


class CheckpointError(LayoutError):
    """A checkpoint cannot be written, read, or used with the given target."""

    __module__ = "flax_layoutmap.errors"


class ProcessError(LayoutError):
    """The processes of one job disagree, or do not connect."""

    __module__ = "flax_layoutmap.errors"


class LayoutWarning(UserWarning):
    """A rule is unused, a leaf matches no rule, or a fallback was taken."""

    __module__ = "flax_layoutmap"


def visible(text: str, keep: str = "") -> str:
    """Escape control characters and characters without a glyph, except those in `keep`.

    Names may come from an untrusted checkpoint or rule file.

    >>> print(visible("up" + chr(27) + "[2J"))
    up\\x1b[2J
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in keep else repr(letter)[1:-1]
        for letter in text
    )


def closest(name: str, choices: Iterable[str], *, count: int = 1) -> list[str]:
    """Return at most `count` of `choices` that look like `name`, best first."""
    return difflib.get_close_matches(name, list(choices), n=count, cutoff=0.4)


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"`, or an empty string when nothing is close."""
    # In a short name, a few letters are a large fraction.
    cutoff = 0.6 if len(name) > 4 else 0.7
    near = difflib.get_close_matches(name, list(choices), 1, cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def warn(text: str) -> None:
    """Issue a LayoutWarning that points at the user's line, not at one of ours."""
    # Context managers of this package are called by contextlib.
    ours = (os.path.dirname(os.path.dirname(__file__)), contextlib.__file__)
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        frame, level = frame.f_back, level + 1
    warnings.warn(visible(text, "\n"), LayoutWarning, stacklevel=level)


def bullet_list(problems: Sequence[str], *, limit: int = 50) -> str:
    """Join problems into indented lines, and say how many more there are."""
    lines = [f"  - {text}" for text in problems[:limit]]
    if len(problems) > limit:
        lines.append(f"  … and {len(problems) - limit} more (see .problems)")
    return "\n".join(lines)
