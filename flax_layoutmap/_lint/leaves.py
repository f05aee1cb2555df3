"""Checks of the leaves of a model: replicated, padded, or unfit for their rule.

Each function takes a `Model` and yields findings; the table in `lint` has their texts.
"""

import dataclasses
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
    groups,
)
from flax_layoutmap._lint.rules import axis_users
from flax_layoutmap._rules.automata import difference
from flax_layoutmap._rules.matching import Rule
from flax_layoutmap._rules.records import (
    closest_rule,
    leaf_bytes,
    show_shape,
)
from flax_layoutmap._show.remarks import LARGE_SHARE, is_large
from flax_layoutmap._show.table import human_bytes
from flax_layoutmap._tree.paths import parameter_keys

# A rule None for less than this share of the bytes is taken to be on purpose.
_LARGE_ON_PURPOSE = 0.1

_VOCABULARY = re.compile(r"embed|vocab|wte|lm_head|unembed|logits|output_proj", re.I)
_HEADS = re.compile(r"(?:^|[/_.])(?:k|v|kv|key|value|key_value|wk|wv)(?:[/_.]|$)", re.I)

# A TPU's registers hold 8 rows of 128 lanes of 4 bytes; smaller types pack more rows.
# https://docs.jax.dev/en/latest/pallas/tpu/details.html
_TPU_ROWS, _TPU_LANES = 8, 128
# Padding below this factor is what the array has without sharding, or next to nothing.
_WORSE = 1.25

# Leaves that are listed where too much is replicated.
_LARGEST = 5


def unfit(model: Model) -> Iterator[Finding]:
    """Leaves for which resolving raised; see `ResolveError.resolution`."""
    for leaf in groups(model.resolution, lambda row: row.problem is not None):
        clash, _, fix = (leaf.row.problem or "").rpartition("; ")
        mend = fix if clash else "change the rule, or the leaf"
        yield Finding("LM114", leaf=leaf, clash=clash or fix, mend=mend)


def unmatched(model: Model) -> Iterator[Finding]:
    """Large parameters that no rule matches."""
    rules, total = model.resolution.rules.rules, model.total
    held = model.resolution.bytes_per_device or 1
    found = groups(
        model.resolution,
        lambda row: row.reason == "no rule" and row.problem is None,
        "parameter",
    )
    if not rules and found:
        size, leaves = sum(g.bytes for g in found), sum(g.leaves for g in found)
        every = dataclasses.replace(found[0], leaves=leaves, bytes=size)
        are = "1 leaf is" if leaves == 1 else f"{leaves} leaves are"
        mend = model.suggested(every)
        yield Finding(
            "LM102, no rules", leaf=every, are=are, share=size / total, mend=mend
        )
        return
    for leaf in found:
        if not is_large(leaf.bytes, total, held):
            continue
        share = f"{leaf.bytes / total:.1%} of the bytes"
        if leaf.bytes <= LARGE_SHARE * total:  # but much on each of many devices
            share += f", {leaf.bytes / held:.1%} of what each device holds"
        near = closest_rule(leaf.path, rules)
        hint = f"; the closest is rule {near[0]} {near[1].pattern!r}" if near else ""
        mend = model.suggested(leaf)
        yield Finding("LM102", leaf=leaf, share=share, hint=hint, mend=mend)


def indivisible(model: Model) -> Iterator[Finding]:
    """Dims that do not divide by their axes."""
    for leaf in groups(
        model.resolution, lambda row: bool(row.fallback) and row.rule is not None
    ):
        if leaf.row.reason == "optimizer rule":
            continue  # about the dims of its parameter; the fallback covers it
        one = model.rule_of(leaf.row)
        assert one is not None
        severity = "warning" if leaf.bytes >= LARGE_SHARE * model.total else "info"
        for dim, axes in enumerate(one.rule.layout.dims(len(leaf.shape))):
            if axes and not leaf.row.dims[dim]:
                code, words = _clash(leaf, one.rule, dim, axes)
                yield Finding(code, one, leaf, severity=severity, **words)


def _clash(
    leaf: Group, rule: Rule, dim: int, axes: tuple[str, ...]
) -> tuple[str, dict[str, Any]]:
    assert leaf.row.mesh is not None
    shape, sizes = leaf.shape, leaf.row.mesh.axis_sizes
    size, ways = shape[dim], math.prod(sizes[axis] for axis in axes)
    padded, tiled = -(-size // ways) * ways, 128 * ways
    without = tuple(
        None if at == dim else names[0] if len(names) == 1 else names or None
        for at, names in enumerate(rule.layout.dims(len(shape)))
    )
    key = "/".join(leaf.path.split("/")[-2:])
    words = {
        "dim": dim,
        "size": size,
        "listed": " × ".join(f"{axis!r} ({sizes[axis]})" for axis in axes),
        "own": f'layout_map["{key}"] = {without if any(without) else None}',
        "padded": padded,
        "more": padded - size,
        "wide": -(-size // tiled) * tiled,
    }
    if size < ways and _HEADS.search(leaf.path):
        return "LM108", words
    if size > ways and size == max(shape) and _VOCABULARY.search(leaf.path):
        return "LM104", words
    return "LM103", words


def replicated(model: Model) -> Iterator[Finding]:
    """Large parameters that a rule or an annotation replicates."""
    rules, large = model.resolution.rules, LARGE_SHARE * model.total
    shards = any(not rule.layout.is_replicated for rule in rules.rules)
    for leaf in groups(
        model.resolution,
        lambda row: (
            row.reason in ("rule", "exact key", "flax metadata")
            and not any(row.dims)
            and model.sizes[id(row)] >= large
        ),
        "parameter",
    ):
        share, why, one = (
            leaf.bytes / model.total,
            leaf.row.fallback,
            model.rule_of(leaf.row),
        )
        if share < LARGE_SHARE or (one is None) != bool(why):
            continue  # a rule that does not divide is LM103; its absence, LM102
        mend = model.suggested(leaf)
        if one is None:
            code = "LM105, annotation"
        elif not one.rule.layout.is_replicated or not shards:
            continue
        elif difference(".*", "search", one.pattern, rules.match) == "":
            code = "LM105"
        elif share >= _LARGE_ON_PURPOSE:
            code = "LM105, on purpose"
        else:
            continue
        yield Finding(code, one, leaf, share=share, why=why, mend=mend)


def replicated_state(model: Model) -> Iterator[Finding]:
    """Optimizer state that is replicated, of sharded parameters."""
    found = groups(
        model.resolution,
        lambda row: (
            row.reason in ("unknown optimizer state", "optimizer rule")
            and not any(row.dims)
            and not (row.fallback and row.rule is not None)
        ),
        "optimizer",
    )
    if not found:
        return
    rows, keys = model.resolution._rows, parameter_keys(model.resolution._flat)
    sharded = {key for at, key in keys.items() if any(rows[at].dims)}
    for leaf in found:
        row, share = leaf.row, leaf.bytes / model.total
        owned = row.owner in sharded if row.owner else bool(sharded)
        if share < LARGE_SHARE or not owned:
            continue
        yield Finding(
            "LM106, unknown" if row.rule is None else "LM106",
            model.rule_of(row),
            leaf,
            section="optimizer",
            of=f" of the sharded parameter {row.owner!r}" if row.owner else "",
            why=f" ({row.fallback})" if row.fallback else "",
            share=share,
        )


def too_much_replicated(model: Model) -> Iterator[Finding]:
    """More bytes in full on every device than are allowed."""
    most = model.max_replicated
    if most is None:
        return
    found = [
        leaf
        for leaf in groups(model.resolution, lambda row: True)
        if leaf.row.shard_shape in (None, leaf.shape)
        if not model.is_spared(leaf.path)
    ]
    share = sum(leaf.bytes for leaf in found) / model.total
    if share > most:
        largest = sorted(found, key=lambda leaf: -leaf.bytes)[:_LARGEST]
        lines = [
            f"\n    {leaf}: {leaf.bytes / model.total:.1%}, {leaf.row.reason}"
            for leaf in largest
            if leaf.bytes
        ]
        yield Finding(
            "LM115",
            mesh=model.resolution.mesh,
            share=share,
            most=most,
            lines="".join(lines),
            mend=model.suggested(largest[0]),
        )


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
            yield Finding("LM107", axis=axis, who=who)
        elif size > 1 and axis not in used and tells:
            if "parameter" in resolution._roles():
                held = human_bytes(resolution.bytes_per_device)
                batch = (*rules.batch, axis)
                yield Finding("LM112", axis=axis, size=size, batch=batch, held=held)


def padded(model: Model) -> Iterator[Finding]:
    """Leaves that sharding cuts below the tile, so that memory goes into padding."""
    resolution, tile = model.resolution, _tile(model)
    if tile is None:
        return
    found: dict[int, list[int]] = {}
    for at, row in enumerate(resolution._rows):
        if any(row.dims) and len(row.dims) > 1:
            found.setdefault(id(row), []).append(at)
    for positions in found.values():
        at = positions[0]
        row, dtype = resolution._rows[at], resolution.dtypes[at]
        shape, count = resolution.shapes[at], len(positions)
        rows, columns = tile
        if model.tile in (None, "tpu"):
            rows *= max(1, 4 // int(getattr(dtype, "itemsize", 4) or 4))
        shard = row.shard_shape or shape
        factor = _padding(shard, rows, columns)
        wasted = leaf_bytes(shard, dtype) * count * (factor - 1)
        if factor < _WORSE * _padding(shape, rows, columns):
            continue
        if wasted < LARGE_SHARE * (resolution.bytes_per_device or 1):
            continue
        size = sum(leaf_bytes(shape, resolution.dtypes[p]) for p in positions)
        one = model.rule_of(row)
        yield Finding(
            "LM109",
            one,
            Group(row, at, resolution.paths[at], shape, count, size),
            shard=show_shape(shard),
            because=f" ({one.kind} {one.number} {one.pattern!r})" if one else "",
            rows=rows,
            columns=columns,
            factor=factor,
            wasted=human_bytes(wasted),
        )


def _tile(model: Model) -> tuple[int, int] | None:
    """Rows and columns of the tile for types of 4 bytes; None where there is none.

    Raises:
        LayoutError: `tile` is none.
    """
    tile, mesh = model.tile, model.resolution.mesh
    if tile is None:
        assert mesh is not None
        device: Any = None if mesh.is_abstract else mesh.devices.flat[0]
        tile = "tpu" if device is not None and device.platform == "tpu" else None
    if tile is None or tile == "tpu":
        return tile and (_TPU_ROWS, _TPU_LANES)
    if (
        isinstance(tile, tuple)
        and len(tile) == 2
        and all(isinstance(size, int) and size > 0 for size in tile)
    ):
        return tile
    raise LayoutError(
        f'tile must be (rows, columns), such as (8, 128), or "tpu", got {tile!r}'
    )


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
