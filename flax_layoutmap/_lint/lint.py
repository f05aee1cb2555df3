"""`lint`: find mistakes in a layout before it runs; one table of all checks."""

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from flax_layoutmap._core.errors import RuleError, did_you_mean
from flax_layoutmap._lint import leaves, matches, rules, siblings
from flax_layoutmap._lint.findings import Finding, Model
from flax_layoutmap._lint.report import LintIssue, LintReport, Severity
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import rule_set_of
from flax_layoutmap._rules.matching import Matcher, Rule
from flax_layoutmap._rules.rules import RuleSet

# Code → what it is about. `docs/lint.md` has a section for each.
CODES = {
    "LM001": "a pattern is no regular expression",
    "LM002": "a layout is none, or a rule is given twice",
    "LM003": "an axis that the mesh does not have",
    "LM004": "an axis that looks misspelt",
    "LM005": "a pattern that no path can match",
    "LM006": "an anchor that no path can meet",
    "LM007": "a rule that another one always overrides",
    "LM008": "two rules that always clash",
    "LM009": "two rules for the same paths, for arrays of another rank",
    "LM010": "a pattern that was written for another way of matching",
    "LM011": "a pattern that may take very long",
    "LM101": "a rule that matches no leaf",
    "LM102": "large leaves that no rule matches",
    "LM103": "a dim that does not divide by its axes",
    "LM104": "a vocabulary that does not divide by its axes",
    "LM105": "large leaves that are replicated",
    "LM106": "optimizer state that is replicated, of sharded parameters",
    "LM107": "an axis of size 1",
    "LM108": "fewer heads than the axis has devices",
    "LM109": "shards below the tile of the hardware",
    "LM110": "a layout that looks swapped",
    "LM111": "a rule that decides no leaf that it matches",
    "LM112": "a mesh axis that shards nothing",
    "LM113": "a pattern that matches inside of a name",
    "LM114": "a leaf that does not fit the rules",
    "LM115": "more is replicated than is allowed",
}


class Check(NamedTuple):
    """A row of the table.

    Attributes:
        code: the code, and what tells several rows of one code apart.
        severity: unless the finding says another one.
        check: yields the findings of this row; of others too, where they are found
            in one go.
        message: which leaf, which rule, what clashes; with the words of a finding.
        fix: what to do, as code where there is code for it.
    """

    code: str
    severity: Severity
    check: Callable[..., Iterator[Finding]]
    message: str
    fix: str


_NOT_DIVISIBLE = (
    "{leaf}: {rule}: dim {dim} of size {size} does not divide by {listed}, so it is "
    "replicated"
)
_IN_FULL = "every device holds {leaf.whole} in full ({share:.1%} of the bytes)"

# fmt: off
OF_RULES = (
    Check("LM001", "error", rules.no_rules,
        "{rule}",
        "escape it: {rule.escaped!r}"),
    Check("LM002", "error", rules.no_rules,
        "{rule}",
        'write (pattern, axes) with one entry per dim, such as (None, "model")'),
    Check("LM003", "error", rules.unknown_axes,
        "{rule}: the mesh {mesh!r} has no axis {axis!r}",
        "{rule.key} = {axes}"),
    Check("LM003, batch", "error", rules.unknown_axes,
        "batch: the mesh {mesh!r} has no axis {axis!r}",
        'batch="{near}"'),
    Check("LM004", "warning", rules.misspelt_axes,
        "{rule} is the only one with the axis {axis!r}; {count} others have {other!r}",
        "{rule.key} = {axes}"),
    Check("LM005", "error", rules.dead_patterns,
        "{rule} can match no path (match={match!r}): {why}",
        "{free} = {rule.axes}"),
    Check("LM006", "error", rules.dead_patterns,
        "{rule} can match no path (match={match!r}): {why}",
        "{free} = {rule.axes}"),
    Check("LM007", "warning", rules.overridden,
        "{rule} decides nothing{but}: {other} matches every path that it matches, and "
        "wins (overlap={overlap!r})",
        "put {rule.pattern!r} {where} {other.pattern!r}"),
    Check("LM008", "error", rules.overridden,
        "{rule} clashes with {other}, which matches every path that it matches",
        'make {other.pattern!r} narrower, or use overlap="first" with the narrow '
        "rule in front"),
    Check("LM009", "error", rules.overridden,
        "{rule} is for arrays of {ranks[0]} dims, but {other}, which matches every "
        "path that it matches, is for {ranks[1]}",
        "del {other.key}; layout_map.add(flm.Rule({other.pattern!r}, "
        '{other.axes}, rank="skip"))'),
    Check("LM009, state", "error", rules.ranks_of_state,
        "{rule} is for parameters of {ranks[0]} dims, and matches all of {own}, of "
        "{ranks[1]}",
        "layout_map.optimizer.add(flm.Rule({rule.pattern!r}, {rule.axes}, "
        'rank="skip"))'),
    Check("LM010", "warning", rules.for_another_match,
        "{rule} is written for match='search': with match={match!r} it begins where "
        "the path begins, and no path begins with '/'",
        "{free} = {rule.axes}  # in place of {rule.key}"),
    Check("LM010, search", "info", rules.for_another_match,
        "{rule} begins with '.*', which match='search' does not need: with "
        "match='fullmatch', for which such patterns are written, it would not match "
        "{longer!r}, as it does now",
        "{end} = {rule.axes}  # if the path is to end there"),
    Check("LM011", "warning", rules.slow_patterns,
        "{rule} may take very long to try: {slow}",
        "{quicker}"),
)
OF_MATCHES = (
    Check("LM010, model", "info", matches.goes_on,
        "{rule} begins with '.*', as for match='fullmatch', with which it would not "
        "match {path!r}; with match='search' it does",
        "{end} = {rule.axes}  # if paths are to end there"),
    Check("LM101", "warning", matches.unused,
        "{rule} matches no leaf{hint}",
        "{mend}"),
    Check("LM111", "warning", matches.never_decides,
        "{rule} decides no leaf: all that it matches are decided by others, such as "
        "{winner} (overlap={overlap!r})",
        "put {rule.pattern!r} {where} {winner.pattern!r}, or del {rule.key}"),
    Check("LM113", "info", matches.inside_of_names,
        "{rule} matches {good!r}, and {path!r} too, in the middle of a {what}",
        "{mend}"),
    Check("LM114", "error", leaves.unfit,
        "{leaf}: {clash}",
        "{mend}"),
)
OF_DEVICES = (
    Check("LM102", "warning", leaves.unmatched,
        "{leaf}: matched by no rule, so that every device holds {leaf.whole} in full "
        "({share}){hint}",
        "{mend}"),
    Check("LM102, no rules", "info", leaves.unmatched,
        "there are no rules: {are} replicated, {share:.1%} of the bytes",
        "{mend}"),
    Check("LM103", "warning", leaves.indivisible,
        _NOT_DIVISIBLE,
        "{own}, or a size of {padded}"),
    Check("LM104", "warning", leaves.indivisible,
        _NOT_DIVISIBLE + "; {more} more rows would do, {padded}",
        "pad the vocabulary from {size} to {padded}, or to {wide} for tiles of 128 on "
        "each device"),
    Check("LM105", "warning", leaves.replicated,
        "{leaf}: the catch-all {rule} says so; " + _IN_FULL,
        "{mend}"),
    Check("LM105, on purpose", "info", leaves.replicated,
        "{leaf}: {rule} says so; " + _IN_FULL,
        "{mend}"),
    Check("LM105, annotation", "warning", leaves.replicated,
        "{leaf}: its annotation shards nothing: {why}; " + _IN_FULL,
        "{mend}"),
    Check("LM106", "warning", leaves.replicated_state,
        "{leaf}{of}: {rule} replicates it; " + _IN_FULL,
        "del {rule.key}  # it follows the parameter"),
    Check("LM106, unknown", "warning", leaves.replicated_state,
        "{leaf}{of}: is state of an unknown kind{why}; " + _IN_FULL,
        "flm.resolve(state, layout_map, params=params, tx=tx)"),
    Check("LM107", "info", leaves.mesh_axes,
        "mesh axis {axis!r} has size 1, so that {who} nothing over it",
        "layout_map.on(mesh), with a mesh whose {axis!r} is larger"),
    Check("LM108", "warning", leaves.indivisible,
        _NOT_DIVISIBLE + "; there are fewer heads ({size}) than devices on it, so they "
        "cannot be split",
        "{own}  # in a rule in front of {rule.pattern!r}, or a smaller axis"),
    Check("LM109", "warning", leaves.padded,
        "{leaf}: each shard {shard}{because} is padded to tiles of {rows} × {columns}, "
        "{factor:.1f} times its size: {wasted} of padding per device",
        "shard another dim, or over fewer devices, so that two dims of a shard are "
        "multiples of {rows} and {columns}"),
    Check("LM110", "warning", siblings.swapped,
        "{path} {shape}: {rule} looks swapped beside {beside!r}, {theirs}: {why}",
        'layout_map.replace("{rule.pattern}", {axes})'),
    Check("LM112", "warning", leaves.mesh_axes,
        "mesh axis {axis!r} of size {size} shards nothing and is no batch axis, so "
        "that {size} devices do the same work on the same {held}",
        "name {axis!r} in a rule, or in LayoutMap(mesh, batch={batch})"),
    Check("LM115", "error", leaves.too_much_replicated,
        "every device of mesh {mesh} holds {share:.1%} of the bytes in full, more than "
        "max_replicated={most:.1%}; the largest:{lines}",
        "{mend}"),
)
# fmt: on
_ROWS = {row.code: row for row in (*OF_RULES, *OF_MATCHES, *OF_DEVICES)}


def lint(
    x: Any,
    *,
    tile: Any = None,
    max_replicated: float | None = None,
    ignore: str | Iterable[str] = (),
) -> LintReport:
    """Find mistakes in rules, and in what they do to a model.

    `docs/lint.md` describes each code. Nothing is compiled and no device is used.

    Args:
        x: a `LayoutMap` or `RuleSet`, for what can be said without a model; a
            `Resolution` (`layout_map.resolve(model)`) for all there is to say, also
            one that does not fit (`ResolveError.resolution`); or `(pattern, layout)`
            pairs or a mapping, of which some may be no rules.
        tile: rows and columns below which a shard is padded by the hardware, such as
            `(8, 128)`, or `"tpu"`. None: a TPU's, where the mesh has TPUs.
        max_replicated: share (0 to 1) of the bytes that every device may hold in full,
            with a Resolution; 1 for data parallelism. None: any.
        ignore: codes (`"LM104"`), and patterns of paths (searched): findings about
            these leaves do not count, nor do their bytes.

    Returns:
        The findings, errors first. `print` shows them, and
        `.raise_if_any(level="error")` stops a program.

    Raises:
        RuleError: `x` is none of these; `ignore` has an unknown code, or a bad
            pattern; or `max_replicated` is no share, or needs a Resolution.
        LayoutError: `tile` is none.

    Example:
        >>> import flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap("data=2,model=4")
        >>> layout_map["^/up/kernel"] = (None, "model")
        >>> print(flm.lint(layout_map))
        LM006 error: rule 1 '^/up/kernel' → (None, 'model') can match no path
        (match='search'): no path begins with '/'
          fix: layout_map["up/kernel"] = (None, 'model')
          see: docs/lint.md#lm006
        1 error
    """
    ignored = Ignored(ignore)
    if isinstance(x, Resolution):
        if max_replicated is not None and not _is_share(max_replicated):
            raise RuleError(
                f"max_replicated is a share, 0 to 1; got {max_replicated!r}"
            )
        spared = functools.partial(ignored.is_about, x)
        found = _of_model(Model(x, tile, max_replicated, spared))
        return LintReport(
            issue
            for issue in found
            if issue.code not in ignored.codes
            if issue.path is None or not spared(issue.path)
        )
    if max_replicated is not None:
        raise RuleError(
            f"max_replicated needs a Resolution, got a {type(x).__name__}; make one: "
            "layout_map.resolve(model)"
        )
    if isinstance(x, dict | list | tuple):
        found = _run(OF_RULES, rules.read_pairs(x))
    else:
        found = _of_rules(rule_set_of(x, "lint(x)"))
    return LintReport(issue for issue in found if issue.code not in ignored.codes)


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1


@functools.lru_cache(maxsize=32)
def _of_rules(rule_set: RuleSet) -> tuple[LintIssue, ...]:
    """The issues of rules alone, kept for other models and meshes."""
    return tuple(_run(OF_RULES, rules.Rules(rule_set)))


def _of_model(model: Model) -> Iterator[LintIssue]:
    resolution = model.resolution
    idle = {(one.section, one.number) for one in model.unused}
    # What may be wrong is reported of rules that match no leaf here; LM111 and LM113
    # report what the others really do.
    found = [
        issue
        for issue in _of_rules(resolution.rules)
        if issue.severity == "error"
        or issue.code not in ("LM006", "LM007", "LM010")
        or (issue.code != "LM007" and (issue.section, issue.rule_number) in idle)
    ]
    yield from found
    # LM101 adds nothing to the reason why a rule can match nothing.
    why = {
        (issue.section, issue.rule_number)
        for issue in found
        if issue.code in ("LM005", "LM006", "LM010")
    }
    for issue in _run(OF_MATCHES, model):
        if issue.code != "LM101" or (issue.section, issue.rule_number) not in why:
            yield issue
    if resolution.mesh is not None and resolution.mesh.size > 1:
        yield from _run(OF_DEVICES, model)


def _run(table: Iterable[Check], subject: Any) -> Iterator[LintIssue]:
    """The issues of the checks in a table."""
    for check in dict.fromkeys(row.check for row in table):
        yield from map(_issue, check(subject))


def _issue(finding: Finding) -> LintIssue:
    """The issue that a row of the table makes of a finding."""
    row, rule, leaf = _ROWS[finding.row], finding.rule, finding.leaf
    words = {"rule": rule, "leaf": leaf, "path": finding.path, **finding.words}
    return LintIssue(
        row.code[:5],
        finding.severity or row.severity,
        row.message.format(**words),
        row.fix.format(**words),
        path=leaf.path if leaf else finding.path,
        pattern=rule.pattern if rule else None,
        rule_number=rule.number if rule else None,
        section=rule.section if rule else finding.section,
        leaves=leaf.leaves if leaf else finding.leaves,
        bytes=leaf.bytes if leaf else 0,
    )


# ------------------------------------------------------------------ what is left out


class Ignored:
    """What `ignore=` names: codes, and patterns of paths.

    Raises:
        RuleError: a code that there is not, or a bad pattern.
    """

    def __init__(self, ignore: str | Iterable[str]) -> None:
        given = [ignore] if isinstance(ignore, str) else list(ignore)
        for text in given:
            if not isinstance(text, str):
                raise RuleError(
                    f"ignore takes codes and patterns of paths, got {text!r}"
                )
        self.codes = {text for text in given if re.fullmatch(r"LM\d+", text)}
        for code in self.codes - set(CODES):
            raise RuleError(f"there is no code {code}{did_you_mean(code, CODES)}")
        patterns = [Rule(text, None) for text in given if text not in self.codes]
        self._matcher = Matcher(patterns, "search")

    def is_about(self, resolution: Resolution, path: str) -> bool:
        """Whether a pattern matches a leaf, as rules do: in any form of its path."""
        at = resolution._positions().get(path)
        forms = (path,) if at is None else resolution._flat.forms(at)
        return bool(self._matcher.matching_forms(forms))
