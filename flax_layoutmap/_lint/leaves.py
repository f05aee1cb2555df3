"""Checks of the leaves of a model: what is replicated, padded or does not fit, and why.

Each function takes a Resolution and yields findings, the largest leaves among them.
"""

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._lint.findings import (
    Finding,
    Group,
    Model,
    Numbered,
    bytes_of_decisions,
    groups,
    suggested,
)
from flax_layoutmap._lint.rules import axis_users
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._rules.automata import difference
from flax_layoutmap._rules.matching import Rule
from flax_layoutmap._rules.records import (
    Decision,
    closest_rule,
    leaf_bytes,
    section_of,
    show_shape,
)
from flax_layoutmap._show.report import LARGE_SHARE, is_large
from flax_layoutmap._show.table import human_bytes
from flax_layoutmap._tree.paths import parameter_keys

# A rule that says None to less than this share of the bytes is taken at its word.
_LARGE_ON_PURPOSE = 0.1

_VOCABULARY = re.compile(r"embed|vocab|wte|lm_head|unembed|logits|output_proj", re.I)
_HEADS = re.compile(r"(?:^|[/_.])(?:k|v|kv|key|value|key_value|wk|wv)(?:[/_.]|$)", re.I)

# A TPU's registers hold 8 rows of 128 lanes of 4 bytes; smaller types pack more rows.
# https://docs.jax.dev/en/latest/pallas/tpu/details.html
_TPU_ROWS, _TPU_LANES = 8, 128
# Padding below this factor is what the array has without sharding, or next to nothing.
_WORSE = 1.25

# The largest leaves that are told of where too much is replicated.
_LARGEST = 5


def unfit(model: Model) -> Iterator[Finding]:
    """Leaves for which resolving raised; see `ResolveError.resolution`."""
    resolution = model.resolution
    for group in groups(resolution, lambda row: row.problem is not None):
        clash, _, fix = (group.row.problem or "").rpartition("; ")
        words = {"clash": clash or fix, "mend": fix}
        if not clash:
            words["mend"] = "change the rule, or the leaf"
        yield Finding("LM114", None, group, words=words)


def _total(resolution: Resolution) -> int:
    """Bytes of all leaves; 1 where there are none."""
    return sum(bytes_of_decisions(resolution).values()) or 1


def _rule_of(row: Decision, resolution: Resolution) -> Numbered | None:
    """The rule that decided."""
    if row.rule is None:
        return None
    section = "optimizer" if row.reason == "optimizer rule" else "rules"
    return Numbered(section, row.rule + 1, section_of(row, resolution.rules)[row.rule])


def _mend(resolution: Resolution, group: Group) -> str:
    return suggested(resolution, group.path, group.shape)


def unmatched(model: Model) -> Iterator[Finding]:
    """Large parameters that no rule matches."""
    resolution = model.resolution
    rules = resolution.rules.rules
    found = groups(
        resolution,
        lambda row: row.reason == "no rule" and row.problem is None,
        "parameter",
    )
    total = _total(resolution) if found else 1
    if not rules and found:
        first = found[0]
        leaves, size = sum(g.leaves for g in found), sum(g.bytes for g in found)
        every = Group(first.row, first.at, first.path, first.shape, leaves, size)
        are = "1 leaf is" if leaves == 1 else f"{leaves} leaves are"
        words = {"are": are, "share": size / total, "mend": _mend(resolution, first)}
        yield Finding("LM102, no rules", None, every, words=words)
        return
    held = resolution.bytes_per_device or 1
    for group in found:
        if not is_large(group.bytes, total, held):
            continue
        share = f"{group.bytes / total:.1%} of the bytes"
        if group.bytes <= LARGE_SHARE * total:  # but much on each of many devices
            share += f", {group.bytes / held:.1%} of what each device holds"
        near = closest_rule(group.path, rules)
        hint = f"; the closest is rule {near[0]} {near[1].pattern!r}" if near else ""
        words = {"share": share, "hint": hint, "mend": _mend(resolution, group)}
        yield Finding("LM102", None, group, words=words)


def indivisible(model: Model) -> Iterator[Finding]:
    """Dims that do not divide by their axes."""
    resolution = model.resolution
    found = groups(resolution, lambda row: bool(row.fallback) and row.rule is not None)
    total = _total(resolution) if found else 1
    for group in found:
        row = group.row
        if row.reason == "optimizer rule":
            continue  # about the dims of its parameter; the fallback says it all
        one = _rule_of(row, resolution)
        assert one is not None
        severity = "warning" if group.bytes >= LARGE_SHARE * total else "info"
        for dim, axes in enumerate(one.rule.layout.dims(len(group.shape))):
            if axes and not row.dims[dim]:
                code, words = _clash(group, one.rule, dim, axes)
                yield Finding(code, one, group, severity, words=words)


def _clash(
    group: Group, rule: Rule, dim: int, axes: tuple[str, ...]
) -> tuple[str, dict[str, Any]]:
    assert group.row.mesh is not None
    shape, sizes = group.shape, group.row.mesh.axis_sizes
    size, ways = shape[dim], math.prod(sizes[axis] for axis in axes)
    padded, tiled = -(-size // ways) * ways, 128 * ways
    without = tuple(
        None if at == dim else names[0] if len(names) == 1 else names or None
        for at, names in enumerate(rule.layout.dims(len(shape)))
    )
    key = "/".join(group.path.split("/")[-2:])
    words = {
        "dim": dim,
        "size": size,
        "listed": " × ".join(f"{axis!r} ({sizes[axis]})" for axis in axes),
        "own": f'layout_map["{key}"] = {without if any(without) else None}',
        "padded": padded,
        "more": padded - size,
        "wide": -(-size // tiled) * tiled,
    }
    if size < ways and _HEADS.search(group.path):
        return "LM108", words
    if size > ways and size == max(shape) and _VOCABULARY.search(group.path):
        return "LM104", words
    return "LM103", words


def replicated(model: Model) -> Iterator[Finding]:
    """Large parameters that a rule or an annotation replicates."""
    resolution = model.resolution
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
        row, share = group.row, group.bytes / total
        if share < LARGE_SHARE or (row.fallback and row.rule is not None):
            continue
        words = {"share": share, "mend": _mend(resolution, group), "why": row.fallback}
        one = _rule_of(row, resolution)
        if one is None:
            if row.fallback:
                yield Finding("LM105, annotation", None, group, words=words)
            continue
        rule = one.rule
        everything = difference(".*", "search", rule.pattern, rules.match) == ""
        if not rule.layout.is_replicated or not shards:
            continue
        if everything or share >= _LARGE_ON_PURPOSE:
            code = "LM105" if everything else "LM105, on purpose"
            yield Finding(code, one, group, words=words)


def replicated_state(model: Model) -> Iterator[Finding]:
    """Optimizer state that is replicated, of sharded parameters."""
    resolution = model.resolution
    found = groups(
        resolution,
        lambda row: (
            row.reason in ("unknown optimizer state", "optimizer rule")
            and not any(row.dims)
            and not (row.fallback and row.rule is not None)
        ),
        "optimizer",
    )
    if not found:
        return
    total, rows = _total(resolution), resolution._rows
    keys = parameter_keys(resolution._flat).items()
    sharded = {key for at, key in keys if any(rows[at].dims)}
    for group in found:
        row = group.row
        owned = row.owner in sharded if row.owner else bool(sharded)
        if group.bytes < LARGE_SHARE * total or not owned:
            continue
        of = f" of the sharded parameter {row.owner!r}" if row.owner else ""
        words: dict[str, Any] = {"of": of, "share": group.bytes / total}
        words["why"] = f" ({row.fallback})" if row.fallback else ""
        code = "LM106, unknown" if row.rule is None else "LM106"
        one = _rule_of(row, resolution)
        yield Finding(code, one, group, section="optimizer", words=words)


def too_much_replicated(model: Model) -> Iterator[Finding]:
    """More bytes in full on every device than are allowed."""
    resolution, most = model.resolution, model.max_replicated
    if most is None:
        return
    total = resolution.total_bytes
    found = [
        group
        for group in groups(resolution, lambda row: True)
        if group.row.shard_shape in (None, group.shape)
        if not model.is_spared(group.path)
    ]
    share = sum(group.bytes for group in found) / (total or 1)
    if share <= most:
        return
    largest = sorted(found, key=lambda group: -group.bytes)[:_LARGEST]
    lines = [
        f"\n    {group}: {group.bytes / total:.1%}, {group.row.reason}"
        for group in largest
        if group.bytes
    ]
    words = {"mesh": resolution.mesh, "share": share, "most": most}
    words |= {"lines": "".join(lines), "mend": _mend(resolution, largest[0])}
    yield Finding("LM115", words=words)


# -------------------------------------------------------------- the mesh, the hardware


def mesh_axes(model: Model) -> Iterator[Finding]:
    """Mesh axes that shard nothing, or have one device."""
    resolution = model.resolution
    rules, mesh = resolution.rules, resolution.mesh
    assert mesh is not None
    users = axis_users(rules)
    used = {a for row in resolution._distinct.values() for dim in row.dims for a in dim}
    used |= {*rules.batch, *users}
    tells = rules.rules and rules.strict is not False
    for axis, size in mesh.axis_sizes.items():
        if size == 1 and axis in users:
            first, more = users[axis][0], len(users[axis]) - 1
            who = f"{first} and {more} more shard" if more else f"{first} shards"
            yield Finding("LM107", words={"axis": axis, "who": who})
        elif size > 1 and axis not in used and tells:
            if "parameter" in resolution._roles():
                words = {"axis": axis, "size": size, "batch": (*rules.batch, axis)}
                words["held"] = human_bytes(resolution.bytes_per_device)
                yield Finding("LM112", words=words)


def padded(model: Model) -> Iterator[Finding]:
    """Leaves that sharding cuts below the tile, so that memory goes into padding."""
    resolution, tile = model.resolution, model.tile
    if tile is None and not _has_tpus(resolution):
        return
    if tile not in (None, "tpu") and not (
        isinstance(tile, tuple)
        and len(tile) == 2
        and all(isinstance(size, int) and size > 0 for size in tile)
    ):
        raise LayoutError(
            f'tile must be (rows, columns), such as (8, 128), or "tpu", got {tile!r}'
        )
    found: dict[int, list[int]] = {}
    for at, row in enumerate(resolution._rows):
        if any(row.dims) and len(row.dims) > 1:
            found.setdefault(id(row), []).append(at)
    total = resolution.bytes_per_device or 1
    for positions in found.values():
        at = positions[0]
        row, dtype = resolution._rows[at], resolution.dtypes[at]
        shape, count = resolution.shapes[at], len(positions)
        packed = max(1, 4 // int(getattr(dtype, "itemsize", 4) or 4))
        rows, columns = (
            tile if tile not in (None, "tpu") else (_TPU_ROWS * packed, _TPU_LANES)
        )
        shard = row.shard_shape or shape
        held = leaf_bytes(shard, dtype) * count
        factor = _padding(shard, rows, columns)
        wasted = held * (factor - 1)
        if factor < _WORSE * _padding(shape, rows, columns):
            continue
        if wasted < LARGE_SHARE * total:
            continue
        size = sum(leaf_bytes(shape, resolution.dtypes[p]) for p in positions)
        group = Group(row, at, resolution.paths[at], shape, count, size)
        one = _rule_of(row, resolution)
        because = f" (rule {one.number} {one.rule.pattern!r})" if one else ""
        words = {"shard": show_shape(shard), "because": because, "rows": rows}
        words |= {"columns": columns, "factor": factor, "wasted": human_bytes(wasted)}
        yield Finding("LM109", one, group, words=words)


def _padding(shape: tuple[int, ...], rows: int, columns: int) -> float:
    """Padded elements per element.

    The compiler chooses which two dims it lays out in tiles; the best ones are taken.
    """
    if not all(shape):
        return 1.0
    return min(
        math.prod(
            -(-n // t) * t / n for n, t in zip(pair, (rows, columns), strict=True)
        )
        for pair in itertools.permutations(shape, 2)
    )


def _has_tpus(resolution: Resolution) -> bool:
    mesh = resolution.mesh
    if mesh is None or mesh.is_abstract:
        return False
    device: Any = mesh.devices.flat[0]
    return device.platform == "tpu"
