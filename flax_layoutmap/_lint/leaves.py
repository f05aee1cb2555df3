"""Checks of the leaves of a model: replicated, padded, or unfit for their rule.

A check takes a `Model` and yields findings; the table in `lint` has their texts.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._lint.matches import NUMBER, Group, Model, groups
from flax_layoutmap._lint.rules import Finding, Numbered, axis_users, nth
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._rules.automata import difference
from flax_layoutmap._rules.records import (
    Decision,
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


def _share(resolution: Resolution, size: int) -> float:
    """Share of the bytes of all leaves."""
    return size / (resolution.total_bytes or 1)


def _rule_of(row: Decision, resolution: Resolution) -> Numbered | None:
    """The rule that decided."""
    if row.rule is None:
        return None
    section = "optimizer" if row.reason == "optimizer rule" else "rules"
    return nth(resolution.rules, row.rule, section)


def unfit(model: Model) -> Iterator[Finding]:
    """Leaves for which resolving raised; see `ResolveError.resolution`."""
    for leaf in groups(model.resolution, lambda row: row.problem is not None):
        clash, _, fix = (leaf.row.problem or "").rpartition("; ")
        mend = fix if clash else "change the rule, or the leaf"
        yield Finding("LM114", leaf=leaf, clash=clash or fix, mend=mend)


def unmatched(model: Model) -> Iterator[Finding]:
    """Large parameters that no rule matches."""
    resolution = model.resolution
    rules, total = resolution.rules.rules, resolution.total_bytes
    held = resolution.bytes_per_device or 1
    found = groups(
        resolution,
        lambda row: row.reason == "no rule" and row.problem is None,
        "parameter",
    )
    if not rules and found:
        size, leaves = sum(one.bytes for one in found), sum(one.leaves for one in found)
        every = dataclasses.replace(found[0], leaves=leaves, bytes=size)
        are = "1 leaf is" if leaves == 1 else f"{leaves} leaves are"
        words = {"are": are, "share": _share(resolution, size)}
        mend = suggested(resolution, every.path, every.shape)
        yield Finding("LM102, no rules", leaf=every, mend=mend, **words)
        return
    for leaf in found:
        if not is_large(leaf.bytes, total, held):
            continue
        share = f"{_share(resolution, leaf.bytes):.1%} of the bytes"
        if leaf.bytes <= LARGE_SHARE * total:  # but much on each of many devices
            share += f", {leaf.bytes / held:.1%} of what each device holds"
        near = closest_rule(leaf.path, rules)
        hint = f"; the closest is rule {near[0]} {near[1].pattern!r}" if near else ""
        mend = suggested(resolution, leaf.path, leaf.shape)
        yield Finding("LM102", leaf=leaf, share=share, hint=hint, mend=mend)


def indivisible(model: Model) -> Iterator[Finding]:
    """Dims that do not divide by their axes."""
    resolution = model.resolution
    for leaf in groups(
        resolution, lambda row: bool(row.fallback) and row.rule is not None
    ):
        if leaf.row.reason == "optimizer rule":
            continue  # about the dims of its parameter; the fallback covers it
        one = _rule_of(leaf.row, resolution)
        assert one is not None
        large = _share(resolution, leaf.bytes) >= LARGE_SHARE
        for dim, axes in enumerate(one.rule.layout.dims(len(leaf.shape))):
            if axes and not leaf.row.dims[dim]:
                code, words = _clash(leaf, one, dim, axes)
                words["severity"] = "warning" if large else "info"
                yield Finding(code, one, leaf, **words)


def _clash(
    leaf: Group, one: Numbered, dim: int, axes: tuple[str, ...]
) -> tuple[str, dict[str, Any]]:
    """The code, and the words of its texts."""
    assert leaf.row.mesh is not None
    shape, sizes = leaf.shape, leaf.row.mesh.axis_sizes
    size, ways = shape[dim], math.prod(sizes[axis] for axis in axes)
    padded, tiled = -(-size // ways) * ways, 128 * ways
    without = tuple(
        None if at == dim else names[0] if len(names) == 1 else names or None
        for at, names in enumerate(one.rule.layout.dims(len(shape)))
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
    resolution = model.resolution
    rules = resolution.rules
    shards = any(not rule.layout.is_replicated for rule in rules.rules)
    for leaf in groups(
        resolution,
        lambda row: (
            row.reason in ("rule", "exact key", "flax metadata") and not any(row.dims)
        ),
        "parameter",
    ):
        share, why = _share(resolution, leaf.bytes), leaf.row.fallback
        one = _rule_of(leaf.row, resolution)
        if share < LARGE_SHARE or (one is None) != bool(why):
            continue  # a rule that does not divide is LM103; its absence, LM102
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
        mend = suggested(resolution, leaf.path, leaf.shape)
        yield Finding(code, one, leaf, share=share, why=why, mend=mend)


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
    rows, keys = resolution._rows, parameter_keys(resolution._flat)
    sharded = {key for at, key in keys.items() if any(rows[at].dims)}
    for leaf in found:
        row, share = leaf.row, _share(resolution, leaf.bytes)
        owned = row.owner in sharded if row.owner else bool(sharded)
        if share < LARGE_SHARE or not owned:
            continue
        yield Finding(
            "LM106, unknown" if row.rule is None else "LM106",
            _rule_of(row, resolution),
            leaf,
            section="optimizer",
            of=f" of the sharded parameter {row.owner!r}" if row.owner else "",
            why=f" ({row.fallback})" if row.fallback else "",
            share=share,
        )


def too_much_replicated(model: Model) -> Iterator[Finding]:
    """More bytes in full on every device than are allowed."""
    resolution, most = model.resolution, model.max_replicated
    if most is None:
        return
    found = [
        leaf
        for leaf in groups(resolution, lambda row: True)
        if leaf.row.shard_shape in (None, leaf.shape)
        if not model.is_ignored(leaf.path)
    ]
    share = _share(resolution, sum(leaf.bytes for leaf in found))
    if share > most:
        largest = sorted(found, key=lambda leaf: -leaf.bytes)[:_LARGEST]
        lines = [
            f"\n    {leaf}: {_share(resolution, leaf.bytes):.1%}, {leaf.row.reason}"
            for leaf in largest
            if leaf.bytes
        ]
        yield Finding(
            "LM115",
            mesh=resolution.mesh,
            share=share,
            most=most,
            lines="".join(lines),
            mend=suggested(resolution, largest[0].path, largest[0].shape),
        )


def suggested(resolution: Resolution, path: str, shape: tuple[int, ...]) -> str:
    """A rule for a leaf, as code: its largest dim that divides, on an axis."""
    parts = NUMBER.sub(r"\\d+", path).split("/")
    quote = "r" if "\\" in "/".join(parts[-2:]) else ""
    key = f'layout_map[{quote}"{"/".join(parts[-2:]) or ".*"}"]'
    sizes = {} if resolution.mesh is None else resolution.mesh.axis_sizes
    names = [n for n in sizes if sizes[n] > 1 and n not in resolution.rules.batch]
    for axis in names or [n for n in sizes if sizes[n] > 1]:
        fitting = [dim for dim, size in enumerate(shape) if size % sizes[axis] == 0]
        if fitting:
            best = max(fitting, key=lambda dim: (shape[dim], dim))
            axes = tuple(axis if dim == best else None for dim in range(len(shape)))
            return f"{key} = {axes}  # or None: replicated, on purpose"
    return f"{key} = None  # replicated, on purpose"


# -------------------------------------------------------------- the mesh, the hardware


def mesh_axes(model: Model) -> Iterator[Finding]:
    """Mesh axes that shard nothing, or have one device."""
    resolution = model.resolution
    rules, mesh = resolution.rules, resolution.mesh
    assert mesh is not None
    users = axis_users(rules)
    used = {a for row in resolution._distinct.values() for dim in row.dims for a in dim}
    used |= {*rules.batch, *users}
    has_parameters = "parameter" in resolution._roles
    for axis, size in mesh.axis_sizes.items():
        if size == 1 and axis in users:
            first, more = users[axis][0], len(users[axis]) - 1
            who = f"{first} and {more} more shard" if more else f"{first} shards"
            yield Finding("LM107", axis=axis, who=who)
        elif size == 1 or axis in used or rules.strict is False:
            continue
        elif rules.rules and has_parameters:
            held = human_bytes(resolution.bytes_per_device)
            batch = (*rules.batch, axis)
            yield Finding("LM112", axis=axis, size=size, batch=batch, held=held)


def padded(model: Model) -> Iterator[Finding]:
    """Leaves that sharding cuts below the tile, so that memory goes into padding."""
    resolution, tile = model.resolution, _tile(model)
    if tile is None:
        return
    for leaf in groups(
        resolution, lambda row: len(row.dims) > 1 and any(row.dims), by_path=False
    ):
        rows, columns = tile
        if model.tile in (None, "tpu"):
            rows *= max(1, 4 // leaf.dtype.itemsize)
        shard = leaf.row.shard_shape or leaf.shape
        factor = _padding(shard, rows, columns)
        if factor < _WORSE * _padding(leaf.shape, rows, columns):
            continue
        wasted = leaf_bytes(shard, leaf.dtype) * leaf.leaves * (factor - 1)
        if wasted < LARGE_SHARE * (resolution.bytes_per_device or 1):
            continue
        one = _rule_of(leaf.row, resolution)
        yield Finding(
            "LM109",
            one,
            leaf,
            shard=show_shape(shard),
            because=f" ({one.name})" if one else "",
            rows=rows,
            columns=columns,
            factor=factor,
            wasted=human_bytes(wasted),
        )


def _tile(model: Model) -> tuple[int, int] | None:
    """Rows and columns of the tile for types of 4 bytes; None where there is none.

    Raises:
        LayoutError: `tile` is invalid.
    """
    tile, mesh = model.tile, model.resolution.mesh
    if tile is None:
        assert mesh is not None
        is_tpu = not mesh.is_abstract and mesh.devices.flat[0].platform == "tpu"
        tile = "tpu" if is_tpu else None
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
    """Padded elements per element, for the two dims that XLA can tile best."""
    if not all(shape):
        return 1.0
    return min(
        math.prod(
            -(-n // t) * t / n for n, t in zip(pair, (rows, columns), strict=True)
        )
        for pair in itertools.permutations(shape, 2)
    )
