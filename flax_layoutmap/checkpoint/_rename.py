"""Other names for the leaves of a checkpoint."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from flax_layoutmap._core.errors import CheckpointError, closest

# What a pattern may take, in seconds, on all paths together.
PATIENCE_SECONDS = 10.0

# At most two quantifiers and no repeated group: such a pattern takes the square of the
# length of a path, at worst.
_HARMLESS_QUANTIFIERS = 2
_QUANTIFIER = re.compile(r"(?<!\\)(?:\\\\)*(?:[*+?]|\{\d*,?\d*\})")
_REPEATED_GROUP = re.compile(r"\)(?:[*+?]|\{)")

# Runs in a process of its own, which can be stopped; `re` cannot.
_CHILD = """
import json, re, sys
given = json.load(sys.stdin)
rules = [(re.compile(pattern), template) for pattern, template in given["rules"]]
found = []
for path in given["paths"]:
    for at, (pattern, template) in enumerate(rules):
        new, count = pattern.subn(template, path, count=1)
        if count:
            found.append([at, new])
            break
    else:
        found.append(None)
json.dump(found, sys.stdout)
"""

Rename = Sequence[tuple[str, str]]


def checked_rename(given: Any) -> Rename:
    """The pairs of pattern and template that `rename=` holds.

    Raises:
        CheckpointError: it holds something else, or what `re` refuses.
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
    return [(str(pattern), template) for pattern, template in pairs]


def _check_template(pattern: re.Pattern[str], template: str) -> None:
    """Raises what `re` raises for a template with groups that a pattern lacks."""
    groups = "".join(f"(?P<{name}>)" for name in pattern.groupindex)
    more = "()" * (pattern.groups - len(pattern.groupindex))
    re.sub(groups + more, template, "", count=1)


def renamed(paths: Sequence[str], rules: Rename) -> list[str]:
    r"""The new name of each path: the first pattern that is found in it, replaced.

    Args:
        paths: the paths.
        rules: pairs such as `(r"^params/(.*)", r"\1")`.

    Raises:
        CheckpointError: two leaves get one name, a pattern is found in no path, or
            takes too long.
    """
    if not rules:
        return list(paths)
    found = _apply(paths, rules)
    used = {one[0] for one in found if one is not None}
    for at, (pattern, _) in enumerate(rules):
        if at not in used:
            near = closest(pattern, list(paths)[:2000], count=3) or list(paths)[:3]
            raise CheckpointError(
                f"rename={pattern!r} finds no leaf that an earlier pattern left; the "
                f"closest paths are {near}"
            )
    names: dict[str, str] = {}
    for path, one in zip(paths, found, strict=True):
        new = path if one is None else one[1]
        if new in names:
            raise CheckpointError(
                f"rename gives {names[new]} and {path} the same name {new!r}"
            )
        if not new or new.startswith("/") or new.endswith("/") or "//" in new:
            raise CheckpointError(
                f"rename gives {path} the name {new!r}, which is no path"
            )
        names[new] = path
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


def _apply(paths: Sequence[str], rules: Rename) -> list[Any]:
    if all(_is_harmless(pattern) for pattern, _ in rules):
        compiled = [(re.compile(pattern), template) for pattern, template in rules]
        return [_first(path, compiled) for path in paths]
    text = json.dumps({"paths": list(paths), "rules": list(rules)})
    try:
        ended = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            input=text,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        slow = [pattern for pattern, _ in rules if not _is_harmless(pattern)]
        raise CheckpointError(
            f"rename={slow} took more than {PATIENCE_SECONDS:.0f} s: a repeated group "
            "that holds a repetition tries every way to split a path; write it without "
            "one inside of the other"
        ) from error
    return json.loads(ended.stdout)


def _first(
    path: str, rules: Sequence[tuple[re.Pattern[str], str]]
) -> tuple[int, str] | None:
    for at, (pattern, template) in enumerate(rules):
        new, count = pattern.subn(template, path, count=1)
        if count:
            return at, new
    return None


def _is_harmless(pattern: str) -> bool:
    few = len(_QUANTIFIER.findall(pattern)) <= _HARMLESS_QUANTIFIERS
    return few and not _REPEATED_GROUP.search(pattern)
