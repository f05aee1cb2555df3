"""Lists of (pattern, PartitionSpec), as EasyLM, EasyDeL and scalax have them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from flax_layoutmap._core.errors import RuleError
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._resolve.resolve import rule_set_of
from flax_layoutmap._rules.matching import Rule
from flax_layoutmap._rules.rules import RuleSet, Unmatched

# A pattern with none of these characters is a text, and may be a whole path.
SPECIAL = re.compile(r"[\\.^$*+?{}\[\]|()]")


def from_partition_rules(
    rules: Iterable[tuple[Any, Any]],
    mesh: Any = None,
    *,
    axes: Mapping[str, str] | None = None,
    unmatched: Unmatched = "error",
    batch: Any = None,
) -> LayoutMap:
    """Make a map of a list of partition rules.

    A pattern is searched in the path of a parameter, and the first that matches wins,
    as in EasyLM, EasyDeL, eformer and scalax. A tuple of patterns is one for successive
    parts of a path, as in the Flax examples of Hugging Face. A `PartitionSpec` may name
    fewer dims than a parameter has.

    Optimizer state is not matched, as it is there: it follows its parameters.

    Args:
        rules: (pattern, `PartitionSpec`) pairs; a spec may be a tuple or None.
        mesh: the mesh of the rules.
        axes: the names of the table → those of the mesh, `{"mp": "tensor"}`.
        unmatched: for parameters that no rule matches: `"error"`, as in EasyLM, or
            `"replicate"`.
        batch: as for `LayoutMap`.

    Raises:
        RuleError: an entry is no rule; it is named by its number.

    Example:
        >>> import flax_layoutmap as flm
        >>> from jax.sharding import PartitionSpec as P
        >>> table = [("attention/(wq|wk|wv)/kernel", P("fsdp", "mp")), (".*", P())]
        >>> mesh = flm.DeviceMesh.abstract("fsdp=4,tensor=2")
        >>> flm.convert.from_partition_rules(table, mesh, axes={"mp": "tensor"})
        LayoutMap(DeviceMesh('fsdp=4,tensor=2', abstract)) {
          'attention/(wq|wk|wv)/kernel': ('fsdp', 'tensor', ...),
          '.*': replicated,
        }
    """
    made: list[Rule] = []
    for number, entry in enumerate(rules, start=1):
        if not isinstance(entry, tuple | list) or len(entry) != 2:
            raise RuleError(
                f"partition rule {number} is no (pattern, PartitionSpec) pair: "
                f"{entry!r}"
            )
        try:
            pattern = _pattern_of(entry[0])
            if any(re.search(rule.pattern, pattern) for rule in made):
                # An earlier rule wins there, also over a key that is a whole path.
                pattern = pattern if SPECIAL.search(pattern) else f"(?:{pattern})"
            made.append(Rule(pattern, _renamed(entry[1], axes or {})))
        except RuleError as error:
            raise RuleError(f"partition rule {number}: {error}") from error
    return LayoutMap.from_rules(
        made, mesh, overlap="first", unmatched=unmatched, batch=batch
    )


def _pattern_of(key: Any) -> str:
    """A pattern for paths; of a tuple, one for parts of a path that follow another."""
    if isinstance(key, str):
        return key
    if isinstance(key, tuple | list) and all(isinstance(own, str) for own in key):
        parts = [own if own.isidentifier() else f"(?:{_in_a_part(own)})" for own in key]
        for own in key:
            if re.search(r"\\\d", re.sub(r"\\d", "", own)):
                raise RuleError(f"{own!r} refers to a group, which a tuple cannot")
            if _has_open_choice(own):
                raise RuleError(
                    f"in {own!r} the last choice alone is matched up to the end of a "
                    f"part, which is rarely meant: write '({own})'"
                )
        return f"(?:^|/){'/'.join(parts)}(?:/|$)"
    raise RuleError(f"a pattern is a string or a tuple of strings, got {key!r}")


def _renamed(spec: Any, axes: Mapping[str, str]) -> Any:
    """A spec with the names of the mesh."""

    def own(dim: Any) -> Any:
        if isinstance(dim, str):
            return axes.get(dim, dim)
        return tuple(map(own, dim)) if isinstance(dim, tuple | list) else dim

    if isinstance(spec, PartitionSpec):
        return PartitionSpec(*map(own, spec))
    if isinstance(spec, tuple | list):
        return PartitionSpec(*map(own, spec)) if ... not in spec else own(tuple(spec))
    return spec


def to_partition_rules(layout_map: Any) -> list[tuple[str, PartitionSpec]]:
    """Return the parameter rules as a list in which the first match wins.

    For EasyLM's `match_partition_rules` and others that search a pattern in each path.
    Activation rules and named layouts have no place in such a list and are left out.

    Args:
        layout_map: a `LayoutMap` or `RuleSet`.

    Raises:
        RuleError: a rule has what no such list can say: `...` before another dim,
            `rank="skip"`, a memory kind, a mesh of its own; or it is for optimizer
            state. The rule is named. For one model,
            `flm.convert.from_shardings(layout_map.abstract(model))` has none of these.

    Example:
        >>> import flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap(overlap="last")
        >>> layout_map["kernel"] = (None, "tensor")
        >>> layout_map["down/kernel"] = ("tensor", None)
        >>> [(pattern, *spec) for pattern, spec in
        ...  flm.convert.to_partition_rules(layout_map)]
        [('down/kernel', 'tensor', None), ('kernel', None, 'tensor'), ('.*',)]
    """
    rules = rule_set_of(layout_map, "to_partition_rules(layout_map)")
    refuse_optimizer_rules(rules)
    ordered = rules.rules[::-1] if rules.overlap == "last" else rules.rules
    whole = [
        (f"^{rule.pattern}$", _spec_of(rule, rules))
        for at, rule in enumerate(ordered)
        if hides_patterns(rule, ordered[:at])
    ]
    found = [(_searched(rule, rules), _spec_of(rule, rules)) for rule in ordered]
    if rules.unmatched == "replicate" and ".*" not in dict(found):
        found.append((".*", PartitionSpec()))
    return whole + found


def _in_a_part(pattern: str) -> str:
    """The pattern with `.` for any character but `/`."""
    return re.sub(
        r"\\.|\[[^\]]*\]|\.",
        lambda found: "[^/]" if found[0] == "." else found[0],
        pattern,
    )


def _has_open_choice(pattern: str) -> bool:
    """Whether a pattern has a `|` outside of all groups."""
    found = re.sub(r"\\.|\[[^\]]*\]", "", pattern)
    while (inner := re.sub(r"\([^()]*\)", "", found)) != found:
        found = inner
    return "|" in found


def hides_patterns(rule: Rule, before: Sequence[Rule]) -> bool:
    """Whether, as the key of a whole path, a rule wins over others in front of it."""
    if SPECIAL.search(rule.pattern) or rule.rank == "skip":
        return False
    return any(
        other.layout != rule.layout and re.search(other.pattern, rule.pattern)
        for other in before
    )


def _searched(rule: Rule, rules: RuleSet) -> str:
    """The pattern that matches by search what the rule's matches."""
    if rules.match == "search":
        return rule.pattern
    refuse_flags(rule)
    return f"^(?:{rule.pattern})" + ("$" if rules.match == "fullmatch" else "")


def _spec_of(rule: Rule, rules: RuleSet) -> PartitionSpec:
    dims = plain_dims(rule, rules, "a PartitionSpec")
    return PartitionSpec(*dims)


def refuse_flags(rule: Rule) -> None:
    """Raise RuleError for flags, which must be in front of a whole pattern."""
    if re.match(r"\(\?[a-zA-Z]+\)", rule.pattern):
        raise RuleError(
            f"the pattern {rule.pattern!r} begins with flags, which cannot be within "
            "another pattern; write it without them"
        )


def refuse_optimizer_rules(rules: RuleSet) -> None:
    """Raise RuleError where there are rules for optimizer state."""
    if rules.optimizer:
        raise RuleError(
            f"the rule {rules.optimizer[0].pattern!r} is for optimizer state, which "
            "follows its parameters there: remove it before"
        )


def plain_dims(rule: Rule, rules: RuleSet, what: str) -> tuple[Any, ...]:
    """The axes of a rule from the first dim on; `...` may only end them.

    Raises:
        RuleError: the layout says more than that.
    """
    layout, dims = rule.layout, rule.layout.axes
    if dims and dims[-1] is ...:
        dims = dims[:-1]
    why = None
    if ... in dims:
        why = "has '...' before other dims"
    elif rule.rank == "skip":
        why = 'has rank="skip"'
    elif layout.memory_kind is not None:
        why = f"has the memory kind {layout.memory_kind!r}"
    elif layout.device_mesh is not None and layout.device_mesh != rules.mesh:
        why = f"is on a mesh of its own, {str(layout.device_mesh)!r}"
    if why is not None:
        raise RuleError(
            f"rule {rule.pattern!r} → {layout} {why}, which {what} cannot say; for one "
            "model, convert its shardings: "
            "flm.convert.from_shardings(layout_map.abstract(model))"
        )
    return tuple(dims)
