"""Leaves that do not lie as they should, and mesh axes that do nothing."""

import math
import re
from collections.abc import Iterator
from typing import Any

from flax_layoutmap._lint.about import key_code, name_of
from flax_layoutmap._lint.groups import (
    Group,
    bytes_of_decisions,
    groups,
    suggested,
    total_of,
)
from flax_layoutmap._lint.rules import axis_users, named_axes
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._rules.issues import Issue
from flax_layoutmap._rules.languages import difference
from flax_layoutmap._rules.records import closest_rule, section_of
from flax_layoutmap._rules.rules import Rule
from flax_layoutmap._show.remarks import LARGE_SHARE, is_large
from flax_layoutmap._show.table import human_bytes
from flax_layoutmap._tree.paths import parameter_keys

# A rule that says None to less than this share of the bytes is taken at its word.
_LARGE_ON_PURPOSE = 0.1

_VOCABULARY = re.compile(r"embed|vocab|wte|lm_head|unembed|logits|output_proj", re.I)
_HEADS = re.compile(r"(?:^|[/_.])(?:k|v|kv|key|value|key_value|wk|wv)(?:[/_.]|$)", re.I)


def lint_leaves(resolution: Resolution) -> Iterator[Issue]:
    """Leaves and mesh axes: what is replicated, and why."""
    yield from _unmatched(resolution)
    yield from _indivisible(resolution)
    yield from _replicated(resolution)
    yield from _state(resolution)
    yield from _axes(resolution)


def lint_unfit(resolution: Resolution) -> Iterator[Issue]:
    """Leaves for which resolving raised; see `ResolveError.resolution`."""
    for group in groups(resolution, lambda row: row.problem is not None):
        clash, _, fix = (group.row.problem or "").rpartition("; ")
        yield Issue(
            "LM114",
            "error",
            f"{group.named(resolution)}: {clash or fix}",
            fix if clash else "change the rule, or the leaf",
            **group.where,
        )


def _unmatched(resolution: Resolution) -> Iterator[Issue]:
    rules = resolution.rules
    found = groups(
        resolution,
        lambda row: row.reason == "no rule" and row.problem is None,
        "parameter",
    )
    total = total_of(resolution) if found else 1
    if not rules.rules and found:
        size = sum(group.bytes for group in found)
        count = sum(group.leaves for group in found)
        leaves = "1 leaf is" if count == 1 else f"{count} leaves are"
        yield Issue(
            "LM102",
            "info",
            f"there are no rules: {leaves} replicated, {size / total:.1%} of the bytes",
            suggested(resolution, found[0].path, resolution.shapes[found[0].at]),
            path=found[0].path,
            leaves=count,
            bytes=size,
        )
        return
    for group in found:
        if not is_large(group.bytes, total, resolution.bytes_per_device or 1):
            continue
        held = group.bytes / (resolution.bytes_per_device or 1)
        share = f"{group.bytes / total:.1%} of the bytes"
        if group.bytes <= LARGE_SHARE * total:  # but much on each of many devices
            share += f", {held:.1%} of what each device holds"
        near = closest_rule(group.path, rules.rules)
        hint = f"; the closest is rule {near[0]} {near[1].pattern!r}" if near else ""
        yield Issue(
            "LM102",
            "warning",
            f"{group.named(resolution)}: matched by no rule, so that every device "
            f"holds {group.whole} in full ({share}){hint}",
            suggested(resolution, group.path, resolution.shapes[group.at]),
            **group.where,
        )


def _indivisible(resolution: Resolution) -> Iterator[Issue]:
    found = groups(resolution, lambda row: bool(row.fallback) and row.rule is not None)
    total = total_of(resolution) if found else 1
    for group in found:
        row, shape = group.row, resolution.shapes[group.at]
        assert row.rule is not None and row.mesh is not None
        rule = section_of(row, resolution.rules)[row.rule]
        if row.reason == "optimizer rule":
            continue  # about the dims of its parameter; the fallback says it all
        for dim, axes in enumerate(rule.layout.dims(len(shape))):
            if axes and not row.dims[dim]:
                yield _clash(resolution, group, rule, dim, axes, total)


def _clash(
    resolution: Resolution,
    group: Group,
    rule: Rule,
    dim: int,
    axes: tuple[str, ...],
    total: int,
) -> Issue:
    assert group.row.mesh is not None
    shape, sizes = resolution.shapes[group.at], group.row.mesh.axis_sizes
    size, ways = shape[dim], math.prod(sizes[axis] for axis in axes)
    listed = " × ".join(f"{axis!r} ({sizes[axis]})" for axis in axes)
    padded = -(-size // ways) * ways
    without = tuple(
        None if at == dim else names[0] if len(names) == 1 else names or None
        for at, names in enumerate(rule.layout.dims(len(shape)))
    )
    kept = without if any(without) else None
    own = f'layout_map["{"/".join(group.path.split("/")[-2:])}"] = {kept}'
    code, what, fix = "LM103", "", f"{own}, or a size of {padded}"
    if size < ways and _HEADS.search(group.path):
        code = "LM108"
        what = f"; there are fewer heads ({size}) than devices on it, so they cannot "
        what += "be split"
        fix = f"{own}  # in a rule in front of {rule.pattern!r}, or a smaller axis"
    elif size > ways and size == max(shape) and _VOCABULARY.search(group.path):
        code = "LM104"
        wide = -(-size // (128 * ways)) * 128 * ways
        what = f"; {padded - size} more rows would do, {padded}"
        fix = f"pad the vocabulary from {size} to {padded}, or to {wide} for tiles of "
        fix += "128 on each device"
    number = (group.row.rule or 0) + 1
    return Issue(
        code,
        "warning" if group.bytes >= LARGE_SHARE * total else "info",
        f"{group.named(resolution)}: {name_of('rules', number, rule)}: dim {dim} of "
        f"size {size} does not divide by {listed}, so it is replicated{what}",
        fix,
        pattern=rule.pattern,
        rule_number=number,
        **group.where,
    )


def _replicated(resolution: Resolution) -> Iterator[Issue]:
    rules = resolution.rules
    shards = any(not rule.layout.is_replicated for rule in rules.rules)
    sizes = bytes_of_decisions(resolution)
    total = sum(sizes.values()) or 1
    found = groups(
        resolution,
        lambda row: (
            row.reason in ("rule", "exact key", "flax metadata")
            and not any(row.dims)
            and sizes[id(row)] >= LARGE_SHARE * total
        ),
        "parameter",
    )
    for group in found:
        share = group.bytes / total
        if share < LARGE_SHARE or (group.row.fallback and group.row.rule is not None):
            continue
        named = group.named(resolution)
        fix = suggested(resolution, group.path, resolution.shapes[group.at])
        text = f"every device holds {group.whole} in full ({share:.1%} of the bytes)"
        if group.row.rule is None:
            lost = f": {group.row.fallback}" if group.row.fallback else ""
            if lost:
                message = f"{named}: its annotation shards nothing{lost}; {text}"
                yield Issue("LM105", "warning", message, fix, **group.where)
            continue
        rule, number = rules.rules[group.row.rule], group.row.rule + 1
        everything = difference(".*", "search", rule.pattern, rules.match) == ""
        if not rule.layout.is_replicated or not shards:
            continue
        if everything or share >= _LARGE_ON_PURPOSE:
            kind = "the catch-all " if everything else ""
            yield Issue(
                "LM105",
                "warning" if everything else "info",
                f"{named}: {kind}{name_of('rules', number, rule)} says so; {text}",
                fix,
                pattern=rule.pattern,
                rule_number=number,
                **group.where,
            )


def _state(resolution: Resolution) -> Iterator[Issue]:
    found = groups(
        resolution,
        lambda row: (
            row.reason in ("unknown optimizer state", "optimizer rule")
            and not any(row.dims)
            and not (row.fallback and row.rule is not None)
        ),
        "optimizer",
    )
    total = total_of(resolution) if found else 1
    sharded = set(_sharded(resolution)) if found else set()
    for group in found:
        row = group.row
        owned = row.owner in sharded if row.owner else bool(sharded)
        if group.bytes < LARGE_SHARE * total or not owned:
            continue
        of = f" of the sharded parameter {row.owner!r}" if row.owner else ""
        share = f"{group.bytes / total:.1%} of the bytes"
        text = f"every device holds {group.whole} in full ({share})"
        if row.rule is None:
            why = f" ({row.fallback})" if row.fallback else ""
            fix = "flm.resolve(state, layout_map, params=params, tx=tx)"
            message = f"is state of an unknown kind{why}"
            more: dict[str, Any] = {}
        else:
            rule = resolution.rules.optimizer[row.rule]
            message = f"{name_of('optimizer', row.rule + 1, rule)} replicates it"
            fix = (
                f"del {key_code('optimizer', rule.pattern)}  # it follows the parameter"
            )
            more = {"pattern": rule.pattern, "rule_number": row.rule + 1}
        yield Issue(
            "LM106",
            "warning",
            f"{group.named(resolution)}{of}: {message}; {text}",
            fix,
            section="optimizer",
            **group.where,
            **more,
        )


def _sharded(resolution: Resolution) -> Iterator[str]:
    """What optimizer state calls the parameters that some axis shards."""
    for at, key in parameter_keys(resolution._flat).items():
        if any(resolution._rows[at].dims):
            yield key


# ------------------------------------------------------------------- the mesh


def _axes(resolution: Resolution) -> Iterator[Issue]:
    rules, mesh = resolution.rules, resolution.mesh
    assert mesh is not None
    written = named_axes(rules)
    used = {a for row in resolution._distinct.values() for dim in row.dims for a in dim}
    used |= set(rules.batch) | named_axes(rules, ("activations", "names"))
    for axis, size in mesh.axis_sizes.items():
        if size == 1 and axis in written:
            users = axis_users(rules)[axis]
            first, more = name_of(*users[0]), len(users) - 1
            others, s = (f" and {more} more", "") if more else ("", "s")
            yield Issue(
                "LM107",
                "info",
                f"mesh axis {axis!r} has size 1, so that {first}{others} shard{s} "
                "nothing over it",
                f"layout_map.on(mesh), with a mesh whose {axis!r} is larger",
            )
        elif size > 1 and axis not in used and axis not in written and rules.rules:
            if rules.strict is not False and "parameter" in resolution._roles():
                yield Issue(
                    "LM112",
                    "warning",
                    f"mesh axis {axis!r} of size {size} shards nothing and is no batch "
                    f"axis, so that {size} devices do the same work on the same "
                    f"{human_bytes(resolution.bytes_per_device)}",
                    f"name {axis!r} in a rule, or in LayoutMap(mesh, "
                    f"batch={(*rules.batch, axis)})",
                )
