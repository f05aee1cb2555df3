"""Explain why a leaf has its layout; write the lines that processes compare."""

from typing import Any

from flax_layoutmap._core.errors import visible
from flax_layoutmap._rules.records import (
    Decision,
    ResolvedLeaf,
    Shape,
    because,
    closest_rule,
    layout_of,
    section_of,
    show_shape,
    show_spec,
)
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._rules.serialise import rules_to_json
from flax_layoutmap._show.table import human_bytes


def explain(leaf: ResolvedLeaf, row: Decision, rules: RuleSet) -> str:
    """Explain in a few lines why a leaf got its layout, or none.

    Args:
        leaf: the leaf.
        row: its decision.
        rules: the rules.
    """
    lines = [f"{leaf.path} {show_shape(leaf.shape)} {leaf.dtype}: {layout_of(row)}"]
    note = f": {row.note}" if row.note else ""
    lines.append(f"  because: {because(row, rules)}{note}")
    section = section_of(row, rules)
    for other in row.matched:
        rule = section[other]
        text = f"rule {other + 1} {rule.pattern!r} → {rule.layout}"
        if row.rule is None:
            lines.append(f"  {text} matches its path, but does not apply")
        elif other != row.rule:
            same = rule.layout == section[row.rule].layout
            effect = "which agrees" if same else "overridden"
            lines.append(f"  also matched by {text}, {effect}")
    if row.fallback:
        lines.append(f"  fallback: {row.fallback}")
    if row.reason == "no rule":
        lines.append(f"  {_near_miss(leaf.path, rules)}")
    if row.shard_shape is not None:
        per_device = human_bytes(leaf.bytes_per_device)
        lines.append(f"  each device holds {show_shape(row.shard_shape)}, {per_device}")
    return "\n".join(map(visible, lines))


def _near_miss(path: str, rules: RuleSet) -> str:
    if not rules.rules:
        return "there are no rules"
    near = closest_rule(path, rules.rules)
    if near is None:
        return f"{path!r} is matched by no rule, and none comes close"
    number, rule = near
    return f"{path!r} is matched by no rule; rule {number} {rule.pattern!r} is closest"


def rule_lines(rules: RuleSet) -> dict[str, list[str]]:
    """The lines by which processes compare their rules, and their meshes."""
    values = rules_to_json(rules)
    # The mesh is a part of its own, so that a difference is reported once.
    del values["mesh"]
    mesh = "no mesh" if rules.mesh is None else f"{rules.mesh} {rules.mesh.axis_types}"
    lines = []
    for name, value in values.items():
        if isinstance(value, list):
            lines += [f"{name} {at}: {v}" for at, v in enumerate(value, start=1)]
        else:
            lines.append(f"{name}: {value}")
    return {"rules": lines, "mesh": [mesh]}


def leaf_line(path: str, shape: Shape, dtype: Any, row: Decision) -> str:
    """The line by which processes compare the decision about a leaf."""
    kind = f", {row.memory_kind}" if row.memory_kind else ""
    return f"{path} {show_shape(shape)} {dtype}, {show_spec(row.spec)}{kind}"
