"""Checks of what rules match in a model: nothing, too much, or less than siblings.

A check takes a `Model` and yields findings; the table in `lint` has their texts.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, get_args

from flax_layoutmap._core.errors import RuleError
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._lint.rules import (
    Finding,
    Numbered,
    is_for_fullmatch,
    nth,
    numbered,
)
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._rules.matching import (
    Match,
    Matcher,
    Rule,
    first_match,
    is_for_outputs,
)
from flax_layoutmap._rules.records import Decision, leaf_bytes, show_shape
from flax_layoutmap._show.remarks import nearest

NUMBER = re.compile(r"\d+")

# Looking for another spelling is slow: it is done for so many unused rules, among so
# many paths; for one only, where there are so many that they are for other models.
_HINTS, _MOST_PATHS, _MANY = 5, 2000, 40
# Above this likeness a path is what the pattern was meant for.
_SURELY_MEANT = 0.8
# Two neighbours within one name, or within one number.
_WITHIN = {"a-z": re.compile("[A-Za-z][a-z]"), "0-9": re.compile("[0-9][0-9]")}

# What a module calls its one matrix.
_WEIGHTS = {"kernel", "weight", "w", "value", "w_kernel"}
# By the names of layers, `gate`, `up`, `query` produce the features that `down` and
# `out` consume. So an axis should shard the out-dims of the first and the in-dims of
# the second; with the out-dims of both, the features are gathered in between.
_COLUMN = re.compile(
    r"(?:w_?)?(?:q|k|v|query|key|value|gate|up|q_proj|k_proj|v_proj|gate_proj|up_proj|"
    r"i|i_[01]|1|3|fc_?1|fc_in|c_fc|c_attn|in_proj|qkv|qkv_proj|gate_up_proj)(?:_\d+)?"
)
_ROW = re.compile(
    r"(?:w_?)?(?:o|out|output|down|o_proj|out_proj|down_proj|2|fc_?2|fc_out|c_proj)"
    r"(?:_\d+)?"
)

Dims = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A Resolution to check, with the options of `lint`."""

    resolution: Resolution
    tile: Any
    max_replicated: float | None
    is_ignored: Callable[[str], bool]  # of the path of a leaf

    @functools.cached_property
    def unused(self) -> list[Numbered]:
        """The rules that match no leaf."""
        unused = set(map(id, self.resolution.unused_rules))
        every = numbered(self.resolution.rules, "rules", "optimizer")
        return [one for one in every if id(one.rule) in unused]


@dataclasses.dataclass(slots=True)
class Group:
    """Leaves of one decision that are alike, with path and shape of the first of them.

    As text `layers/0/up/kernel (64,256) and 79 more alike`.
    """

    row: Decision
    path: str
    shape: tuple[int, ...]
    dtype: Any
    leaves: int = 0
    bytes: int = 0  # of the global arrays of all

    def __str__(self) -> str:
        more = f" and {self.leaves - 1} more alike" if self.leaves > 1 else ""
        return f"{self.path or 'the leaf'} {show_shape(self.shape)}{more}"

    @property
    def each(self) -> str:
        """`it`, or `all 80`."""
        return "it" if self.leaves == 1 else f"all {self.leaves}"


def groups(
    resolution: Resolution,
    wanted: Callable[[Decision], bool],
    role: str | None = None,
    *,
    by_path: bool = True,
) -> list[Group]:
    """The leaves of some decisions, those that are alike together.

    Without `by_path`, all leaves of one decision are alike.
    """
    found: dict[Any, Group] = {}
    for path, shape, dtype, row, own in zip(*resolution.columns(wanted), strict=True):
        if role is None or own == role:
            key = id(row), by_path and NUMBER.sub("0", path)
            group = found.get(key)
            if group is None:
                group = found[key] = Group(row, path, shape, dtype)
            group.leaves += 1
            group.bytes += leaf_bytes(shape, dtype)
    return list(found.values())


# ------------------------------------------------------------- what a rule matches


def unused(model: Model) -> Iterator[Finding]:
    """Rules that match nothing, the first of them with what they may have meant."""
    resolution, found = model.resolution, model.unused
    severity = "info" if resolution.rules.strict is False else None
    hints = _HINTS if len(found) <= _MANY else 1
    paths = _paths(resolution) if found else ()
    for at, one in enumerate(found):
        hint, fix = "", f"del {one.key}"
        if at < hints:
            hint, fix = _meant(one, resolution, paths)
        yield Finding("LM101", one, severity=severity, hint=hint, mend=fix)


def _paths(resolution: Resolution) -> list[str]:
    """The paths that the rules see, in all their forms; of equal layers, the first."""
    every = map(resolution._flat.forms, resolution._flat.representatives())
    some = [*itertools.islice(itertools.chain.from_iterable(every), _MOST_PATHS)]
    return sorted({NUMBER.sub("0", form): form for form in reversed(some)}.values())


def _meant(
    one: Numbered, resolution: Resolution, paths: Sequence[str]
) -> tuple[str, str]:
    """What the rule may have meant: the end of a message, and a fix."""
    match, pattern = resolution.rules.match, one.pattern

    def first(rule: Rule, mode: Match) -> str | None:
        matcher = Matcher((rule,), mode)
        return next((path for path in paths if matcher.matching(path)), None)

    def fits(other: str) -> bool:
        try:
            rule = Rule(other, None)
        except RuleError:
            return False
        return other != pattern and first(rule, match) is not None

    for mode in get_args(Match):
        found = first(one.rule, mode) if mode != match else None
        if found is not None:
            wide = next(filter(fits, _wider(pattern)), pattern)
            return (
                f" with match={match!r}; with match={mode!r} it would match {found!r}",
                f"{one.with_pattern(wide)}  # in place of {one.key}",
            )
    brackets = r"\\?\[\\?['\"]?|['\"]?\\?\]"
    for why, other in (
        ("paths have no 'params/'", re.sub(r"(?:\^|\\A)?params/", "", pattern)),
        ("a Variable's own 'value' is in no path", re.sub(r"/value\$?$", "", pattern)),
        ("the parts of a path are joined by '/'", pattern.replace(r"\.", "/")),
        ("paths are not bracketed", re.sub(brackets, "/", pattern)),
    ):
        other = re.sub("/+", "/", other).strip("/")
        if fits(other):
            return f": {why}", f"{one.with_pattern(other)}  # not {one.key}"
    near = nearest(pattern, resolution.parameter_paths())
    if near is None:
        return "", f"del {one.key}"
    if near.likeness < _SURELY_MEANT and not near.is_free:
        return near.hint, f"del {one.key}, or make it match"
    other = one.with_pattern(NUMBER.sub(r"\\d+", near.ending))
    return near.hint, f"{other}  # not {one.key}"


def _wider(pattern: str) -> Iterator[str]:
    """The pattern with `.*` at its ends, for `match` and `fullmatch`."""
    flags = re.match(r"(?:\(\?[aiLmsux]+\))?", pattern)
    assert flags is not None
    rest = pattern[flags.end() :]
    rest = f"({rest})" if "|" in rest else rest
    for before, after in ((".*", ""), ("", ".*"), (".*", ".*")):
        yield f"{flags[0]}{before}{rest}{after}"


def never_decides(model: Model) -> Iterator[Finding]:
    """Rules that match leaves, all of which others decide."""
    rules = model.resolution.rules
    decided, over = set(), {}
    for row in model.resolution._distinct.values():
        if row.reason not in ("rule", "exact key") or row.rule is None:
            decided.update(row.matched)  # what came first was no rule
            continue
        for at in row.matched:
            if rules.rules[at].layout == rules.rules[row.rule].layout:
                decided.add(at)
            else:
                over.setdefault(at, row.rule)
    where = "before" if rules.overlap == "first" else "behind"
    for at, winner in over.items():
        if at not in decided and not rules.rules[at].optional:
            words = {"winner": nth(rules, winner), "overlap": rules.overlap}
            yield Finding("LM111", nth(rules, at), where=where, **words)


def longer_paths(model: Model) -> Iterator[Finding]:
    """Rules written for fullmatch that match longer paths here."""
    resolution = model.resolution
    rules, flat = resolution.rules, resolution._flat
    if rules.match != "search":
        return
    decided = {
        row.rule for row in resolution._distinct.values() if row.reason == "rule"
    }
    whole = {
        at: Matcher((rules.rules[at],), "fullmatch")
        for at in decided
        if at is not None
        if is_for_fullmatch(rules.rules[at])
        if not is_for_outputs(rules.rules[at])
    }
    for at in flat.representatives() if whole else ():
        row = resolution._rows[at]
        if row.reason != "rule" or row.rule not in whole:
            continue
        if not whole[row.rule].matching_forms(flat.forms(at)):
            del whole[row.rule]
            one, path = nth(rules, row.rule), resolution.paths[at]
            words = {"example": path, "mend": one.with_pattern(f"{one.pattern}$")}
            yield Finding("LM010, model", one, path=path, leaves=1, **words)


# ------------------------------------------------------------- matches within a name


def inside_of_names(model: Model) -> Iterator[Finding]:
    """Rules that match some names as a whole and others in their middle."""
    resolution = model.resolution
    rules, match = resolution.rules.rules, resolution.rules.match
    if match == "fullmatch":
        return
    cutting = {at for at, rule in enumerate(rules) if _may_cut(rule)}
    # Of equal layers one will do, unless a pattern ends in a number.
    every = any(_ends_in(str.isdigit, rules[at].pattern) for at in cutting)
    some = range(len(resolution)) if every else resolution._flat.representatives()
    forms: dict[int, set[tuple[str, ...]]] = {}  # of the leaves that a rule decides
    for at in some if cutting else ():
        row = resolution._rows[at]
        if row.rule in cutting and row.reason in ("rule", "exact key"):
            forms.setdefault(row.rule, set()).add(resolution._flat.forms(at))
    for at, own in forms.items():
        rule, one = rules[at], nth(resolution.rules, at)
        found = sorted({_matched(rule, match, form) for form in own})
        kind = "0-9" if _ends_in(str.isdigit, rule.pattern) else "a-z"
        likely = [path for path in found if _cuts(rule, kind, match, path)]
        clean = _at_boundaries(rule, kind, match) if likely else None
        if clean is None:
            continue
        inside = [path for path in likely if not clean.matching(path)]
        if not inside or len(inside) == len(found):
            continue
        good = next(path for path in found if clean.matching(path))
        narrow = _narrower(rule, match, good, inside[0])
        mend = "write '/', '^' or '$' where a name begins or ends"
        yield Finding(
            "LM113",
            one,
            severity="warning" if kind == "0-9" else "info",
            path=inside[0],
            leaves=len(inside),
            good=good,
            what="number" if kind == "0-9" else "name",
            mend=one.with_pattern(narrow) if narrow else mend,
        )


def _may_cut(rule: Rule) -> bool:
    """Whether the pattern begins or ends with part of a name, and shards something."""
    if rule.optional:  # made for the names of several models
        return False
    ends = rule.pattern[:1].isalnum() or _ends_in(str.isalnum, rule.pattern)
    return ends and not rule.layout.is_replicated


def _ends_in(kind: Callable[[str], bool], pattern: str) -> bool:
    return kind(pattern[-1:]) and pattern[-2:-1] != "\\"


def _matched(rule: Rule, match: Match, own: tuple[str, ...]) -> str:
    """The form of a path that a rule matches; the whole one for its exact key."""
    matched = (form for form in own if first_match(rule, match, form) is not None)
    return next(matched, own[0])


def _cuts(rule: Rule, kind: str, match: Match, path: str) -> bool:
    """Whether the first match begins or ends within a name (or number)."""
    span = first_match(rule, match, path)
    begin, end = span or (0, len(path))  # decided by its exact key
    pairs = [path[end - 1 : end + 1] if end else ""]
    if match != "match":
        pairs.append(path[begin - 1 : begin + 1] if begin else "")
    return any(map(_WITHIN[kind].fullmatch, pairs))


def _at_boundaries(rule: Rule, kind: str, match: Match) -> Matcher | None:
    """The pattern where it neither begins nor ends within a name (or number)."""
    letters = "A-Za-z" if kind == "a-z" else kind
    before = "" if match == "match" else f"(?<![{letters}](?=[{kind}]))"
    behind = f"(?!(?<=[{letters}])[{kind}])"
    try:
        return Matcher((Rule(f"{before}(?:{rule.pattern}){behind}", None),), match)
    except RuleError:
        return None  # flags, which stand at the beginning only


def _narrower(rule: Rule, match: Match, good: str, bad: str) -> str | None:
    """The pattern with its ends anchored, so that it distinguishes the two paths."""
    inner = f"({rule.pattern})" if "|" in rule.pattern else rule.pattern
    for pattern in (f"(^|/){inner}", f"{inner}(/|$)", f"(^|/){inner}(/|$)"):
        matcher = Matcher((Rule(pattern, None),), match)
        if matcher.matching(good) and not matcher.matching(bad):
            return pattern
    return None


# ------------------------------------------------------------------------- siblings


class _Matrix(NamedTuple):
    """A sharded matrix of a layer."""

    at: int
    layer: str
    name: str
    shape: tuple[int, ...]
    dims: Dims
    rule: int
    stacked: int = 0  # leading dims that were left out


def swapped(model: Model) -> Iterator[Finding]:
    """Leaves whose axes shard other dims than those of their siblings."""
    resolution = model.resolution
    reported: set[int] = set()
    for together in _by_parent(resolution).values():
        siblings = _of_one_layer(together)
        column = [one for one in siblings if _COLUMN.fullmatch(one.layer)]
        pairs = itertools.chain(
            _odd_one(column, resolution.rules.batch),
            _gathered(siblings, column, resolution),
        )
        for own, other, dims, why in pairs:
            if own.rule in reported:
                continue
            if not divides(own.shape, dims, resolution.mesh):
                continue  # the layout may be as it is for that reason
            reported.add(own.rule)
            row, path = resolution._rows[own.at], resolution.paths[own.at]
            shape, dtype = resolution.shapes[own.at], resolution.dtypes[own.at]
            dims = (*row.dims[: own.stacked], *dims)
            yield Finding(
                "LM110",
                nth(resolution.rules, own.rule),
                Group(row, path, shape, dtype, 1, leaf_bytes(shape, dtype)),
                beside=resolution.paths[other.at],
                theirs=nth(resolution.rules, other.rule),
                why=why,
                axes=tuple(n[0] if len(n) == 1 else n or None for n in dims),
            )


def divides(shape: Sequence[int], dims: Dims, mesh: DeviceMesh | None) -> bool:
    """Whether each dim can be sharded over its axes."""
    assert mesh is not None
    return all(
        size % math.prod(mesh.axis_sizes[axis] for axis in axes) == 0
        for size, axes in zip(shape, dims, strict=True)
    )


def _by_parent(resolution: Resolution) -> dict[str, list[_Matrix]]:
    """Module → the sharded matrices of its layers, those of equal modules once."""
    found: dict[str, list[_Matrix]] = {}
    roles, paths = resolution._roles, resolution.paths
    for at in resolution._flat.representatives():
        row = resolution._rows[at]
        if row.rule is None or row.reason not in ("rule", "exact key"):
            continue
        if len(row.dims) < 2 or not any(row.dims) or roles[at] != "parameter":
            continue
        *parents, name = paths[at].split("/")
        layer = parents.pop() if name in _WEIGHTS and parents else name
        own = _Matrix(at, layer, name, resolution.shapes[at], row.dims, row.rule)
        found.setdefault("/".join(parents), []).append(own)
    return found


def _of_one_layer(siblings: Sequence[_Matrix]) -> list[_Matrix]:
    """Columns and rows, without leading dims that all have: layers, or experts."""
    rows = [one for one in siblings if _ROW.fullmatch(one.layer)]
    found = [one for one in siblings if one in rows or _COLUMN.fullmatch(one.layer)]
    # The in-dim of all columns is equal too, so a row has to have it as well.
    while rows and len(found) > 1:
        first = {(one.shape[0], one.dims[0]) for one in found}
        if len(first) > 1 or min(len(one.shape) for one in found) < 3:
            break
        found = [
            one._replace(
                shape=one.shape[1:], dims=one.dims[1:], stacked=one.stacked + 1
            )
            for one in found
        ]
    return found


def _odd_one(
    column: Sequence[_Matrix], batch: Sequence[str]
) -> Iterator[tuple[_Matrix, _Matrix, Dims, str]]:
    """The leaf whose dims are a permutation of its siblings', and one of these."""
    kinds: dict[Dims, list[_Matrix]] = {}
    for one in column:
        kinds.setdefault(one.dims, []).append(one)
    if len(kinds) != 2:
        return

    def likely(dims: Dims) -> tuple[bool, int]:
        """Features on the in-dims are odd; else what fewer have, and the later."""
        return any(axis not in batch for axis in dims[0]), -len(kinds[dims])

    odd, other = (kinds[dims][0] for dims in sorted(reversed(kinds), key=likely)[::-1])
    permuted = sorted(odd.dims) == sorted(other.dims)
    if permuted and odd.rule != other.rule and odd.name == other.name:
        yield odd, other, other.dims, "the same axes on other dims"


def _gathered(
    siblings: Sequence[_Matrix], column: Sequence[_Matrix], resolution: Resolution
) -> Iterator[tuple[_Matrix, _Matrix, Dims, str]]:
    """Rows that shard their out-dims by an axis that a column has on its own, too."""
    mesh, batch = resolution.mesh, resolution.rules.batch
    assert mesh is not None
    why = "both on their out-dims, so that the features are gathered in between"
    for own in siblings:
        if not _ROW.fullmatch(own.layer):
            continue
        for axis in own.dims[-1]:
            if axis in batch or mesh.axis_sizes[axis] == 1:
                continue
            have = [
                one
                for one in column
                if any(axis in dim for dim in one.dims) and _fit(one.shape, own.shape)
            ]
            # On the in-dims of a column: sharded for memory, not for the features.
            apart = [one for one in have if one.rule != own.rule]
            if apart and all(axis not in one.dims[0] for one in have):
                yield own, apart[0], (own.dims[-1], *own.dims[1:-1], own.dims[0]), why
                break


def _fit(one: tuple[int, ...], two: tuple[int, ...]) -> bool:
    """Whether matrix `two` may consume the features that `one` produces."""
    # Gate and up may be one matrix, and keys and values have fewer heads.
    features, taken = math.prod(one[1:]), math.prod(two[:-1])
    if not features or not taken or one[0] != two[-1]:
        return False
    return features % taken == 0 or taken % features == 0
