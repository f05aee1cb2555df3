"""What can be said about rules without a model: patterns and axes that cannot work."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flax_layoutmap._core.errors import closest
from flax_layoutmap._lint.about import about, axes_code, key_code, name_of
from flax_layoutmap._lint.examples import Examples
from flax_layoutmap._lint.patterns import lint_patterns
from flax_layoutmap._rules.issues import Issue
from flax_layoutmap._rules.languages import difference
from flax_layoutmap._rules.pattern_cost import QUICKER, slow_because
from flax_layoutmap._rules.rules import Rule, RuleSet

SECTIONS = ("rules", "activations", "names", "optimizer")


def lint_rules(rules: RuleSet) -> tuple[Issue, ...]:
    """The findings about a rule set alone; found once, and kept with it."""
    kept = rules.__dict__.get("_findings")
    if kept is None:
        kept = tuple(_findings(rules))
        object.__setattr__(rules, "_findings", kept)
    return kept


def _findings(rules: RuleSet) -> Iterator[Issue]:
    yield from _axes(rules)
    for section in SECTIONS:
        for number, rule in enumerate(getattr(rules, section), start=1):
            slow = slow_because(rule.pattern)
            if slow is not None:
                yield about(
                    "LM011",
                    "warning",
                    section,
                    number,
                    rule,
                    f" may take very long to try: {slow}",
                    QUICKER,
                )
    parameters = Examples(rules.rules, rules.match)
    state = Examples(rules.optimizer, rules.match)
    yield from lint_patterns(rules, "rules", parameters)
    yield from lint_patterns(rules, "optimizer", state)
    yield from _ranks_of_state(rules, parameters, state)


# ----------------------------------------------------------------------- axes


def _axes(rules: RuleSet) -> Iterator[Issue]:
    if rules.mesh is None:
        yield from _misspelt(axis_users(rules))
        return
    known = rules.mesh.axis_names
    named = named_axes(rules)
    users = {} if named.issubset(known) else axis_users(rules)
    text = f"the mesh {str(rules.mesh)!r} has no axis"
    for axis, found in users.items():
        if axis in known:
            continue
        near = (closest(axis, known) or known)[0]
        for section, number, rule in found:
            own = rule.layout.device_mesh
            if own is None or own == rules.mesh:
                key = key_code(section, rule.pattern)
                axes = str(rule.layout).replace(repr(axis), repr(near))
                fix = f"{key} = {axes}"
                yield about(
                    "LM003", "error", section, number, rule, f": {text} {axis!r}", fix
                )
    for axis in rules.batch:
        if axis not in known:
            near = (closest(axis, known) or known)[0]
            yield Issue("LM003", "error", f"batch: {text} {axis!r}", f'batch="{near}"')


def named_axes(rules: RuleSet, sections: Sequence[str] = SECTIONS) -> set[str]:
    """The mesh axes that rules name."""
    distinct = {
        (rule.layout.axes, id(rule.layout.device_mesh)): rule.layout
        for section in sections
        for rule in getattr(rules, section)
    }
    return {axis for layout in distinct.values() for axis in layout.axis_names}


def axis_users(rules: RuleSet) -> dict[str, list[tuple[str, int, Rule]]]:
    """Mesh axis → the rules that name it, each with its section and number."""
    users: dict[str, list[tuple[str, int, Rule]]] = {}
    names: dict[Any, tuple[str, ...]] = {}  # layouts are few, beside rules
    for section in SECTIONS:
        for number, rule in enumerate(getattr(rules, section), start=1):
            layout = rule.layout
            key = layout.axes, id(layout.device_mesh)
            if key not in names:
                names[key] = layout.axis_names
            for axis in names[key]:
                users.setdefault(axis, []).append((section, number, rule))
    return users


def _misspelt(users: Mapping[str, Sequence[tuple[str, int, Rule]]]) -> Iterator[Issue]:
    """An axis of one rule that is almost the axis of several others."""
    for axis, found in users.items():
        if len(found) > 1 or len(axis) < 4:
            continue
        for other, more in users.items():
            alike = difflib.SequenceMatcher(None, axis, other).ratio()
            same_word = re.sub(r"\d", "", axis) == re.sub(r"\d", "", other)
            if len(more) > 1 and alike >= 0.8 and not same_word:
                section, number, rule = found[0]
                axes = str(rule.layout).replace(repr(axis), repr(other))
                yield about(
                    "LM004",
                    "warning",
                    section,
                    number,
                    rule,
                    f" is the only one with the axis {axis!r}; {len(more)} others have "
                    f"{other!r}",
                    f"{key_code(section, rule.pattern)} = {axes}",
                )


# ----------------------------------------------------------- rules for state


def _ranks_of_state(
    rules: RuleSet, parameters: Examples, state: Examples
) -> Iterator[Issue]:
    """Optimizer rules are about the dims of the parameter, as its own rule is."""
    told: set[int] = set()
    ranks = {rule.layout.rank for rule in rules.optimizer} - {None}
    for own_at, own in enumerate(rules.rules):
        if own.layout.rank is None or own.rank == "skip" or not ranks:
            continue
        path, likely = parameters.of(own_at)
        if not path or own_at not in likely or not parameters.is_asked(own_at, path):
            continue
        for at in state.matching(path):
            rule = rules.optimizer[at]
            if at in told or rule.rank == "skip":
                continue
            if rule.layout.rank in (None, own.layout.rank):
                continue
            if difference(own.pattern, rules.match, rule.pattern, rules.match) == "":
                told.add(at)
                yield about(
                    "LM009",
                    "error",
                    "optimizer",
                    at + 1,
                    rule,
                    f" is for parameters of {rule.layout.rank} dims, and matches all "
                    f"of {name_of('rules', own_at + 1, own)}, of {own.layout.rank}",
                    f"layout_map.optimizer.add(flm.Rule({rule.pattern!r}, "
                    f'{axes_code(rule)}, rank="skip"))',
                )
