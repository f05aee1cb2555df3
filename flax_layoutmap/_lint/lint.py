"""`lint`: find mistakes in a layout before it runs; the table of all checks.

A check is a function in `rules`, `matches`, `leaves` or `model_dim`, a row of `TABLE`,
and a section of `docs/lint.md`.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol, overload

from flax_layoutmap._core.errors import (
    ResolveError,
    RuleError,
    bullet_list,
    did_you_mean,
    page_of,
    visible,
)
from flax_layoutmap._lint import leaves, matches, model_dim, rules
from flax_layoutmap._lint.matches import Model
from flax_layoutmap._lint.rules import Finding
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import rule_set_of
from flax_layoutmap._rules.matching import Matcher, Rule
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._show.table import human_bytes
from flax_layoutmap._show.terminal import (
    NOTEBOOK_WIDTH,
    as_html,
    coloured_lines,
    wrapped,
)

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


@dataclasses.dataclass(frozen=True, slots=True)
class LintIssue:
    """One finding of `flm.lint`.

    Attributes:
        code: `"LM101"`; see `docs/lint.md`.
        severity: `"error"` (it cannot work), `"warning"` (it is most likely not what is
            wanted), `"info"` (good to know).
        message: which leaf, which rule, what clashes.
        fix: what to do, as code where there is code for it.
        path: path of the first leaf concerned, or None.
        pattern: the pattern of the rule, or None.
        rule_number: the rule's number within its section, from 1, or None.
        section: `"rules"`, `"activations"`, `"names"` or `"optimizer"`.
        leaves: number of leaves concerned.
        bytes: bytes of their global arrays.
        step_bytes: bytes that each device sends less in a step with the fix, with
            `lint(step=)`; None where that is not known, or not less.
        url: its section in the documentation.
    """

    code: str
    severity: Severity
    message: str
    fix: str
    path: str | None = None
    pattern: str | None = None
    rule_number: int | None = None
    section: str = "rules"
    leaves: int = 0
    bytes: int = 0
    step_bytes: int | None = None
    url: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", page_of("lint", self.code.lower()))

    def __str__(self) -> str:
        text = f"{self.code} {self.severity}: {self.message}\n  fix: {self.fix}"
        return visible(text, "\n")


class LintReport(Sequence[LintIssue]):
    """The issues that `flm.lint` found, a sequence that prints as a report.

    Errors come first; within a severity by code, and the largest first. It is equal to
    a list or tuple of the same issues, and false where there are none.

    Example:
        >>> import flax_layoutmap as flm
        >>> flm.lint({"up/kernel": (None, "model")})
        no findings
    """

    __slots__ = ("_issues",)

    def __init__(self, issues: Iterable[LintIssue] = ()) -> None:
        ranks = {severity: rank for rank, severity in enumerate(SEVERITIES)}
        self._issues = tuple(
            sorted(issues, key=lambda one: (ranks[one.severity], one.code, -one.bytes))
        )

    @overload
    def __getitem__(self, at: int) -> LintIssue: ...
    @overload
    def __getitem__(self, at: slice) -> "LintReport": ...
    def __getitem__(self, at: int | slice) -> "LintIssue | LintReport":
        found = self._issues[at]
        return found if isinstance(found, LintIssue) else LintReport(found)

    def __len__(self) -> int:
        return len(self._issues)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LintReport | list | tuple):
            return NotImplemented
        return self._issues == tuple(other)

    def __hash__(self) -> int:
        return hash(self._issues)

    def __str__(self) -> str:
        if not self._issues:
            return "no findings"
        lines = [f"{issue}\n  see: {issue.url}" for issue in self._issues]
        counts = []
        for severity in SEVERITIES:
            count = sum(issue.severity == severity for issue in self._issues)
            if count:
                counts.append(f"{count} {severity if count == 1 else f'{severity}s'}")
        return "\n".join([*lines, ", ".join(counts)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        lines = wrapped(str(self).splitlines(), NOTEBOOK_WIDTH)
        return as_html(coloured_lines(lines, ()))

    def problems(self, level: Severity = "error") -> list[str]:
        """The text of each issue that counts.

        Args:
            level: the lowest severity that counts.

        Raises:
            RuleError: `level` is no severity.
        """
        if level not in SEVERITIES:
            hint = did_you_mean(str(level), SEVERITIES)
            raise RuleError(f"level must be one of {SEVERITIES}, got {level!r}{hint}")
        counted = SEVERITIES[: SEVERITIES.index(level) + 1]
        found = [issue for issue in self if issue.severity in counted]
        return [str(issue).replace("\n", "\n  ") for issue in found]

    def raise_if_any(self, level: Severity = "error") -> None:
        """Raise a LayoutError if an issue counts, before anything is compiled.

        Args:
            level: the lowest severity that counts.

        Raises:
            ResolveError: there are issues that count; `.problems` has their texts.
            RuleError: `level` is no severity.

        Example:
            >>> import jax, flax_layoutmap as flm
            >>> layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("data=2,model=4"))
            >>> layout_map["kernel"] = (None, "model")
            >>> tree = {"kernel": jax.ShapeDtypeStruct((8, 16), "float32")}
            >>> flm.lint(layout_map.resolve(tree), max_replicated=0.02).raise_if_any()
        """
        texts = self.problems(level)
        if texts:
            count = "1 problem" if len(texts) == 1 else f"{len(texts)} problems"
            raise ResolveError(f"{count} in the layout:\n{bullet_list(texts)}", texts)


class Plan(Protocol):
    """What `flm.pod.plan` returns."""

    def wire_bytes(self) -> int: ...


class Check(NamedTuple):
    """A row of the table."""

    code: str  # and a name, for the second row of one code
    severity: Severity  # unless the finding has another one
    # What the check takes: `Rules`; a `Model`; a `Model` on several devices.
    needs: Literal["rules", "model", "devices"]
    check: Callable[..., Iterator[Finding]]  # of this row, and of others, too
    about: str  # as in `docs/lint.md`, once for each code
    text: str  # which leaf, which rule, what clashes; with the words of a finding
    fix: str = "{mend}"  # code, where there is code for it


_LONGER = (
    "{rule} begins with '.*', as for match='fullmatch', but with match='search' it "
    "also matches {example!r}"
)
_DEAD = "{rule} can match no path (match={match!r}): {why}"
_NOT_DIVISIBLE = (
    "{leaf}: {rule}: dim {dim} of size {size} does not divide by {listed}, so it is "
    "replicated"
)
_IN_FULL = "every device holds {leaf.each} in full ({share:.1%} of the bytes)"

# fmt: off
TABLE = (
    Check("LM001", "error", "rules", rules.invalid,
        "a pattern is no regular expression",
        "{rule}",
        "escape it: {escaped!r}"),
    Check("LM002", "error", "rules", rules.invalid,
        "an invalid layout, or a pattern given twice",
        "{rule}",
        'write (pattern, axes) with one entry per dim, such as (None, "model")'),
    Check("LM003", "error", "rules", rules.unknown_axes,
        "an axis that the mesh does not have",
        "{rule}: the mesh {mesh!r} has no axis {axis!r}",
        "{rule.key} = {axes}"),
    Check("LM003, batch", "error", "rules", rules.unknown_axes, "",
        "batch: the mesh {mesh!r} has no axis {axis!r}",
        'batch="{near}"'),
    Check("LM004", "warning", "rules", rules.misspelt_axes,
        "an axis that looks misspelt",
        "{rule} is the only one with the axis {axis!r}; {count} others have {other!r}",
        "{rule.key} = {axes}"),
    Check("LM005", "error", "rules", rules.dead_patterns,
        "a pattern that no path can match",
        _DEAD),
    Check("LM006", "error", "rules", rules.dead_patterns,
        "an anchor that holds in no path",
        _DEAD),
    Check("LM007", "warning", "rules", rules.overridden,
        "a rule that another one always overrides",
        "{rule} decides nothing{but}: {other} matches every path that it matches, and "
        "wins (overlap={overlap!r})",
        "put {rule.pattern!r} {where} {other.pattern!r}"),
    Check("LM008", "error", "rules", rules.overridden,
        "two rules that always clash",
        "{rule} clashes with {other}, which matches every path that it matches",
        'make {other.pattern!r} narrower, or use overlap="first" with the narrow '
        "rule in front"),
    Check("LM009", "error", "rules", rules.overridden,
        "two rules for the same paths, for arrays of another rank",
        "{rule} is for arrays of {ranks[0]} dims, but {other}, which matches every "
        "path that it matches, is for {ranks[1]}",
        "del {other.key}; layout_map.add(flm.Rule({other.pattern!r}, "
        '{other.axes}, rank="skip"))'),
    Check("LM009, state", "error", "rules", rules.ranks_of_state, "",
        "{rule} is for parameters of {ranks[0]} dims, and matches all of {own}, of "
        "{ranks[1]}",
        "layout_map.optimizer.add(flm.Rule({rule.pattern!r}, {rule.axes}, "
        'rank="skip"))'),
    Check("LM010", "warning", "rules", rules.for_another_match,
        "a pattern that was written for another way of matching",
        "{rule} is written for match='search': with match={match!r} it begins where "
        "the path begins, and no path begins with '/'",
        "{mend}  # in place of {rule.key}"),
    Check("LM010, search", "info", "rules", rules.for_another_match, "",
        _LONGER, "{mend}  # if paths are to end there"),
    Check("LM010, model", "info", "model", matches.longer_paths, "",
        _LONGER, "{mend}  # if paths are to end there"),
    Check("LM011", "warning", "rules", rules.slow_patterns,
        "a pattern that may take very long",
        "{rule} may take very long to try: {slow}"),
    Check("LM101", "warning", "model", matches.unused,
        "a rule that matches no leaf",
        "{rule} matches no leaf{hint}"),
    Check("LM102", "warning", "devices", leaves.unmatched,
        "large leaves that no rule matches",
        "{leaf}: matched by no rule, so that every device holds {leaf.each} in full "
        "({share}){hint}"),
    Check("LM102, no rules", "info", "devices", leaves.unmatched, "",
        "there are no rules: {are} replicated, {share:.1%} of the bytes"),
    Check("LM103", "warning", "devices", leaves.indivisible,
        "a dim that does not divide by its axes",
        _NOT_DIVISIBLE,
        "{own}, or a size of {padded}"),
    Check("LM104", "warning", "devices", leaves.indivisible,
        "a vocabulary that does not divide by its axes",
        _NOT_DIVISIBLE + "; {more} more rows would do, {padded}",
        "pad the vocabulary from {size} to {padded}, or to {wide} for tiles of 128 on "
        "each device"),
    Check("LM105", "warning", "devices", leaves.replicated,
        "large leaves that are replicated",
        "{leaf}: replicated by the catch-all {rule}; " + _IN_FULL),
    Check("LM105, on purpose", "info", "devices", leaves.replicated, "",
        "{leaf}: replicated by {rule}; " + _IN_FULL),
    Check("LM105, annotation", "warning", "devices", leaves.replicated, "",
        "{leaf}: its annotation shards nothing: {why}; " + _IN_FULL),
    Check("LM106", "warning", "devices", leaves.replicated_state,
        "optimizer state that is replicated, of sharded parameters",
        "{leaf}{of}: {rule} replicates it; " + _IN_FULL,
        "del {rule.key}  # it follows the parameter"),
    Check("LM106, unknown", "warning", "devices", leaves.replicated_state, "",
        "{leaf}{of}: optimizer state of an unknown kind{why}; " + _IN_FULL,
        "flm.resolve(state, layout_map, params=params, tx=tx)"),
    Check("LM107", "info", "devices", leaves.mesh_axes,
        "an axis of size 1",
        "mesh axis {axis!r} has size 1, so that {who} nothing over it",
        "layout_map.on(mesh), with a mesh whose {axis!r} is larger"),
    Check("LM108", "warning", "devices", leaves.indivisible,
        "fewer heads than the axis has devices",
        _NOT_DIVISIBLE + "; there are fewer heads ({size}) than devices on it, so they "
        "cannot be split",
        "{own}  # in a rule in front of {rule.pattern!r}, or a smaller axis"),
    Check("LM109", "warning", "devices", leaves.padded,
        "shards below the tile of the hardware",
        "{leaf}: each shard {shard}{because} is padded to tiles of {rows} × {columns}, "
        "{factor:.1f} times its size: {wasted} of padding per device",
        "shard another dim, or over fewer devices, so that two dims of a shard are "
        "multiples of {rows} and {columns}"),
    Check("LM110", "warning", "devices", model_dim.by_model_dim,
        "a layout that looks swapped",
        "{leaf}: {rule} looks swapped beside {beside!r}, {theirs}: {why}",
        "layout_map.replace({rule.quoted}, {axes})"),
    Check("LM111", "warning", "model", matches.never_decides,
        "a rule that decides no leaf that it matches",
        "{rule} decides no leaf: all that it matches are decided by others, such as "
        "{winner} (overlap={overlap!r})",
        "put {rule.pattern!r} {where} {winner.pattern!r}, or del {rule.key}"),
    Check("LM112", "warning", "devices", leaves.mesh_axes,
        "a mesh axis that shards nothing",
        "mesh axis {axis!r} of size {size} shards nothing and is no batch axis, so "
        "that {size} devices do the same work on the same {held}",
        "name {axis!r} in a rule, or in LayoutMap(mesh, batch={batch})"),
    Check("LM113", "info", "model", matches.inside_of_names,
        "a pattern that matches inside of a name",
        "{rule} matches {good!r}, and {path!r} too, in the middle of a {what}"),
    Check("LM114", "error", "model", leaves.unfit,
        "a leaf that does not fit the rules",
        "{leaf}: {clash}"),
    Check("LM115", "error", "devices", leaves.too_much_replicated,
        "more is replicated than is allowed",
        "every device of mesh {mesh} holds {share:.1%} of the bytes in full, more than "
        "max_replicated={most:.1%}; the largest:{lines}"),
    Check("LM116", "warning", "devices", model_dim.by_model_dim,
        "an axis of parameters that the batch does not lie on",
        "mesh axis {axis!r} of size {size} shards the model dim of {leaf}, as for "
        "FSDP, but neither the batch, {own}, nor activations, so that its {size} "
        "devices get the same part of each batch",
        "LayoutMap(mesh, batch={batch}){too}"),
)
# fmt: on
_ROWS = {row.code: row for row in TABLE}
# Code → what it is about. `docs/lint.md` has a section for each.
CODES = {row.code: row.about for row in TABLE if row.about}


def lint(
    x: Any,
    *,
    tile: Any = None,
    max_replicated: float | None = None,
    ignore: str | Iterable[str] = (),
    step: Callable[[RuleSet], Plan] | None = None,
) -> LintReport:
    """Find mistakes in rules, and in what they do to a model.

    `docs/lint.md` describes each code. Nothing is compiled (but for `step`) and no
    device is used.

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
        step: a function of rules that plans a step with them, `lambda rules:
            flm.pod.plan(train_step, *args, layout_map=rules)`, with a Resolution.
            What LM110 and LM116 find, between dims of layers, then has its cost: the
            difference to a plan with the fix, `"costs 19.3 GiB per device and step"`.

    Returns:
        The findings, errors first. `print` shows them, and
        `.raise_if_any(level="error")` stops a program.

    Raises:
        RuleError: `x` is none of these; `ignore` has an unknown code, or a bad
            pattern; `max_replicated` is no share; or it or `step` needs a Resolution.
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
            text = f"max_replicated is a share, 0 to 1; got {max_replicated!r}"
            raise RuleError(text)
        if max_replicated is not None and x.mesh is None:
            text = "max_replicated needs a mesh; give one: resolution.on(mesh)"
            raise RuleError(text)
        is_ignored = functools.partial(ignored.is_about, x)
        found = _of_model(Model(x, tile, max_replicated, is_ignored))
        sent = step and functools.cache(functools.partial(_bytes_sent, step))
        return LintReport(
            issue if sent is None else _with_cost(issue, x.rules, mended, sent)
            for issue, mended in found
            if issue.code not in ignored.codes
            if issue.path is None or not is_ignored(issue.path)
        )
    for name, given in (("max_replicated", max_replicated), ("step", step)):
        if given is not None:
            raise RuleError(
                f"{name} needs a Resolution, got a {type(x).__name__}; make one: "
                "layout_map.resolve(model)"
            )
    if isinstance(x, dict | list | tuple):
        found = (issue for issue, _ in _run("rules", rules.read_pairs(x)))
    else:
        found = _of_rules(rule_set_of(x, "lint(x)"))
    return LintReport(issue for issue in found if issue.code not in ignored.codes)


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1


@functools.lru_cache(maxsize=32)
def _of_rules(rule_set: RuleSet) -> tuple[LintIssue, ...]:
    """The issues of rules alone, kept for other models and meshes."""
    return tuple(issue for issue, _ in _run("rules", rules.Rules(rule_set)))


def _bytes_sent(step: Callable[[RuleSet], Plan], rules: RuleSet) -> int:
    """Bytes that each device sends in a step, by its plan."""
    plan = step(rules)
    if not callable(getattr(plan, "wire_bytes", None)):
        raise RuleError(
            f"step must return a plan, but returned a {type(plan).__name__}: "
            "step=lambda rules: flm.pod.plan(train_step, *args, layout_map=rules)"
        )
    return plan.wire_bytes()


def _with_cost(
    issue: LintIssue,
    rules: RuleSet,
    mended: RuleSet | None,
    sent: Callable[[RuleSet], int],
) -> LintIssue:
    """The issue with the bytes that a step sends for it."""
    more = 0 if mended is None else sent(rules) - sent(mended)
    if more <= 0:
        return issue
    text = f"{issue.message}; costs {human_bytes(more)} per device and step"
    return dataclasses.replace(issue, message=text, step_bytes=more)


def _of_model(model: Model) -> Iterator[tuple[LintIssue, RuleSet | None]]:
    """The issues, and for those that have a cost the rules that were mended."""
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
    yield from ((issue, None) for issue in found)
    # LM101 adds nothing to the reason why a rule can match nothing.
    why = {
        (issue.section, issue.rule_number)
        for issue in found
        if issue.code in ("LM005", "LM006", "LM010")
    }
    for issue, mended in _run("model", model):
        if issue.code != "LM101" or (issue.section, issue.rule_number) not in why:
            yield issue, mended
    if resolution.mesh is not None and resolution.mesh.size > 1:
        yield from _run("devices", model)


def _run(needs: str, subject: Any) -> Iterator[tuple[LintIssue, RuleSet | None]]:
    """The issues that the checks with these needs find, with the rules mended."""
    for check in dict.fromkeys(row.check for row in TABLE if row.needs == needs):
        for finding in check(subject):
            yield _issue(finding), finding.words.get("mended")


def _issue(finding: Finding) -> LintIssue:
    """Fill the texts of the finding's row."""
    row, rule, leaf = _ROWS[finding.row], finding.rule, finding.leaf
    words = {"severity": None, "path": None, "leaves": 0, "section": "rules"}
    words |= {"rule": rule, "leaf": leaf, **finding.words}
    return LintIssue(
        row.code[:5],
        words["severity"] or row.severity,
        row.text.format(**words),
        row.fix.format(**words),
        path=leaf.path if leaf else words["path"],
        pattern=rule.pattern if rule else None,
        rule_number=rule.number if rule else None,
        section=rule.section if rule else words["section"],
        leaves=leaf.leaves if leaf else words["leaves"],
        bytes=leaf.bytes if leaf else 0,
    )


class Ignored:
    """The codes and the patterns of paths in `ignore=`."""

    def __init__(self, ignore: str | Iterable[str]) -> None:
        given = [ignore] if isinstance(ignore, str) else list(ignore)
        for text in given:
            if not isinstance(text, str):
                wrong = f"ignore takes codes and patterns of paths, got {text!r}"
                raise RuleError(wrong)
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
