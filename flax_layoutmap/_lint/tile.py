"""Shards that are smaller than what the hardware computes with at once."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._rules.issues import Issue
from flax_layoutmap._rules.records import Decision, leaf_bytes, show_shape
from flax_layoutmap._show.remarks import LARGE_SHARE
from flax_layoutmap._show.table import human_bytes

Tile = tuple[int, int]

# A TPU's registers hold 8 rows of 128 lanes of 4 bytes; smaller types pack more rows.
# https://docs.jax.dev/en/latest/pallas/tpu/details.html
_TPU_ROWS, _TPU_LANES = 8, 128

# Padding below this factor is what the array has without sharding, or next to nothing.
_WORSE = 1.25


def tiles(resolution: Resolution, tile: Any) -> Iterator[Issue]:
    """Leaves that sharding cuts below the tile, so that memory goes into padding.

    Args:
        resolution: on a mesh.
        tile: rows and columns; `"tpu"`; or None: a TPU's where the mesh has TPUs.

    Raises:
        LayoutError: `tile` is none of these.
    """
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
        row, dtype, shape = (
            resolution._rows[at],
            resolution.dtypes[at],
            resolution.shapes[at],
        )
        size = int(getattr(dtype, "itemsize", 4) or 4)
        own = _tpu(size) if tile in (None, "tpu") else tile
        shard = row.shard_shape or shape
        held = leaf_bytes(shard, dtype) * len(positions)
        factor = padding(shard, own)
        if factor < _WORSE * padding(shape, own):
            continue
        if held * (factor - 1) < LARGE_SHARE * total:
            continue
        yield _issue(resolution, row, positions, own, factor, held)


def _issue(
    resolution: Resolution,
    row: Decision,
    positions: list[int],
    tile: Tile,
    factor: float,
    held: int,
) -> Issue:
    at = positions[0]
    path, shape = resolution.paths[at], resolution.shapes[at]
    shard = row.shard_shape or shape
    more = f" and {len(positions) - 1} more alike" if len(positions) > 1 else ""
    rule = None if row.rule is None else resolution.leaf(at).rule
    because = f" (rule {(row.rule or 0) + 1} {rule.pattern!r})" if rule else ""
    return Issue(
        "LM109",
        "warning",
        f"{path} {show_shape(shape)}{more}: each shard {show_shape(shard)}{because} is "
        f"padded to tiles of {tile[0]} × {tile[1]}, {factor:.1f} times its size: "
        f"{human_bytes(held * (factor - 1))} of padding per device",
        "shard another dim, or over fewer devices, so that two dims of a shard are "
        f"multiples of {tile[0]} and {tile[1]}",
        path=path,
        pattern=rule.pattern if rule else None,
        rule_number=row.rule + 1 if rule and row.rule is not None else None,
        leaves=len(positions),
        bytes=sum(
            leaf_bytes(resolution.shapes[p], resolution.dtypes[p]) for p in positions
        ),
    )


def padding(shape: tuple[int, ...], tile: Tile) -> float:
    """Padded elements per element.

    The compiler chooses which two dims it lays out in tiles; the best ones are taken.
    """
    if not all(shape):
        return 1.0
    return min(
        math.prod(-(-n // t) * t / n for n, t in zip(pair, tile, strict=True))
        for pair in itertools.permutations(shape, 2)
    )


def _tpu(itemsize: int) -> Tile:
    return _TPU_ROWS * max(1, 4 // itemsize), _TPU_LANES


def _has_tpus(resolution: Resolution) -> bool:
    mesh = resolution.mesh
    if mesh is None or mesh.is_abstract:
        return False
    device: Any = mesh.devices.flat[0]
    return device.platform == "tpu"
