"""`lint` and `check`: what is wrong with a layout, before it runs."""

import re
from collections.abc import Iterable
from typing import Any

from flax_layoutmap._core.errors import (
    ResolveError,
    RuleError,
    bullet_list,
    did_you_mean,
)
from flax_layoutmap._lint.groups import groups, suggested
from flax_layoutmap._lint.leaves import lint_leaves, lint_unfit
from flax_layoutmap._lint.matches import lint_matches, unused_numbers
from flax_layoutmap._lint.pairs import read_pairs
from flax_layoutmap._lint.rules import lint_rules
from flax_layoutmap._lint.siblings import swapped
from flax_layoutmap._lint.tile import tiles
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import rule_set_of
from flax_layoutmap._rules.issues import CODES, SEVERITIES, Issue, Severity, in_order
from flax_layoutmap._rules.rules import Matcher, Rule

# The largest leaves that are told of where too much is replicated.
_LARGEST = 5

_CODE = re.compile(r"LM\d+")


def lint(x: Any, *, tile: Any = None) -> tuple[Issue, ...]:
    """Finds what is wrong with rules, and with what they do to a model.

    `docs/lint.md` tells of each code. Nothing is compiled and no device is asked.

    Args:
        x: a `LayoutMap` or `RuleSet`, for what can be said without a model; a
            `Resolution` (`layout_map.resolve(model)`) for all there is to say, also
            one that does not fit (`ResolveError.resolution`); or `(pattern, layout)`
            pairs or a mapping, of which some may be no rules.
        tile: rows and columns below which a shard is padded by the hardware, such as
            `(8, 128)`, or `"tpu"`. None: a TPU's, where the mesh has TPUs.

    Returns:
        The findings, errors first. `flm.format_issues` makes text of them.

    Raises:
        RuleError: `x` is none of these.
        LayoutError: `tile` is none.

    Example:
        >>> import flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap("data=2,model=4")
        >>> layout_map["^/up/kernel"] = (None, "model")
        >>> print(flm.format_issues(flm.lint(layout_map)))
        LM006 error: rule 1 '^/up/kernel' → (None, 'model') can match no path
        (match='search'): no path begins with '/'
          fix: layout_map["up/kernel"] = (None, 'model')
          see: docs/lint.md#lm006
        1 error
    """
    if isinstance(x, Resolution):
        return in_order(_of_resolution(x, tile))
    if isinstance(x, dict | list | tuple):
        rules, issues = read_pairs(x)
        return in_order([*issues, *lint_rules(rules)])
    return in_order(lint_rules(rule_set_of(x, "lint(x)")))


def _of_resolution(resolution: Resolution, tile: Any) -> list[Issue]:
    unused = unused_numbers(resolution)
    idle = set(unused)
    # What only looks wrong is told of rules that do nothing here; LM111 and LM113 say
    # of the others what they really do.
    found = [
        issue
        for issue in lint_rules(resolution.rules)
        if issue.severity == "error"
        or issue.code not in ("LM006", "LM007", "LM010")
        or (issue.code != "LM007" and (issue.section, issue.rule_number) in idle)
    ]
    # Why a rule can match nothing tells more than that it does not.
    why = {
        (issue.section, issue.rule_number)
        for issue in found
        if issue.code in ("LM005", "LM006", "LM010")
    }
    found += lint_matches(resolution, unused, why)
    found += lint_unfit(resolution)
    if resolution.mesh is not None and resolution.mesh.size > 1:
        found += lint_leaves(resolution)
        found += tiles(resolution, tile)
        found += swapped(resolution)
    return found


def check(
    resolution: Resolution,
    *,
    max_replicated: float = 0.02,
    ignore: str | Iterable[str] = (),
    level: Severity = "error",
) -> Resolution:
    """Stops a program whose layout is wrong, before it compiles anything.

    Args:
        resolution: `layout_map.resolve(model)`.
        max_replicated: share (0 to 1) of the bytes that every device may hold in full;
            1 for data parallelism.
        ignore: codes (`"LM104"`), and patterns of paths (searched): findings about
            these leaves do not count, nor do their bytes.
        level: the lowest severity that counts.

    Returns:
        The Resolution.

    Raises:
        ResolveError: something counts; `.problems` has one text for each.
        RuleError: `ignore` has an unknown code, or a bad pattern; or `max_replicated`
            is no share.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("data=2,model=4"))
        >>> layout_map["kernel"] = (None, "model")
        >>> tree = {"kernel": jax.ShapeDtypeStruct((8, 16), "float32")}
        >>> flm.check(layout_map.resolve(tree), max_replicated=0.02).replicated_share
        0.0
    """
    if not isinstance(resolution, Resolution):
        raise RuleError(
            "check(resolution) needs a Resolution, got a "
            f"{type(resolution).__name__}; make one: layout_map.resolve(model)"
        )
    if level not in SEVERITIES:
        hint = did_you_mean(str(level), SEVERITIES)
        raise RuleError(f"level must be one of {SEVERITIES}, got {level!r}{hint}")
    found = problems(resolution, max_replicated, ignore, level)
    if found:
        count = "1 problem" if len(found) == 1 else f"{len(found)} problems"
        raise ResolveError(f"{count} in the layout:\n{bullet_list(found)}", found)
    return resolution


def problems(
    resolution: Resolution,
    max_replicated: float,
    ignore: str | Iterable[str],
    level: Severity,
) -> list[str]:
    """What `check` raises, as a list of texts.

    Raises:
        RuleError: `ignore` has an unknown code, or a bad pattern; or `max_replicated`
            is no share.
    """
    is_share = isinstance(max_replicated, int | float) and 0 <= max_replicated <= 1
    if not is_share:
        raise RuleError(f"max_replicated is a share, 0 to 1; got {max_replicated!r}")
    codes, spared = _ignored(ignore)
    counts = SEVERITIES[: SEVERITIES.index(level) + 1]
    found = [
        str(issue).replace("\n", "\n  ")
        for issue in lint(resolution)
        if issue.severity in counts and issue.code not in codes
        if issue.path is None or not is_spared(resolution, issue.path, spared)
    ]
    return found + _too_much_replicated(resolution, max_replicated, spared)


def _ignored(ignore: str | Iterable[str]) -> tuple[set[str], Matcher]:
    given = [ignore] if isinstance(ignore, str) else list(ignore)
    for text in given:
        if not isinstance(text, str):
            raise RuleError(f"ignore takes codes and patterns of paths, got {text!r}")
    codes = {text for text in given if _CODE.fullmatch(text)}
    for code in codes - set(CODES):
        raise RuleError(f"there is no code {code}{did_you_mean(code, CODES)}")
    patterns = [Rule(text, None) for text in given if text not in codes]
    return codes, Matcher(patterns, "search")


def is_spared(resolution: Resolution, path: str, spared: Matcher) -> bool:
    """Whether a pattern of `ignore` matches a leaf, as rules do: in any form."""
    at = resolution._positions().get(path)
    forms = (path,) if at is None else resolution._flat.forms(at)
    return bool(spared.matching_forms(forms))


def _too_much_replicated(
    resolution: Resolution, most: float, spared: Matcher
) -> list[str]:
    mesh, total = resolution.mesh, resolution.total_bytes
    if mesh is None or mesh.size == 1 or not total:
        return []
    found = [
        group
        for group in groups(resolution, lambda row: True)
        if group.row.shard_shape in (None, resolution.shapes[group.at])
        if not is_spared(resolution, group.path, spared)
    ]
    share = sum(group.bytes for group in found) / total
    if share <= most:
        return []
    largest = sorted(found, key=lambda group: -group.bytes)[:_LARGEST]
    lines = [
        f"{group.named(resolution)}: {group.bytes / total:.1%}, {group.row.reason}"
        for group in largest
        if group.bytes
    ]
    first = largest[0]
    fix = suggested(resolution, first.path, resolution.shapes[first.at])
    head = (
        f"replicated: every device of mesh {mesh} holds {share:.1%} of the bytes in "
        f"full, more than max_replicated={most:.1%}; the largest:"
    )
    return ["\n      ".join([head, *lines]) + f"\n    fix: {fix}"]
