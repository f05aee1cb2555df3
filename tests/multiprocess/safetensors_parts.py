"""Each process reads the bytes of its own shards; process 0 writes the whole tree.

A part (see `launch`); `in/` is a checkpoint whose tensors are those of `tensors`, and
`scaled/` one of those of `scaled_tensors`.
"""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

import flax_layoutmap as flm
from flax_layoutmap.checkpoint import _safetensors_read, mappings

ROWS, COLUMNS = 64, 32


def tensors() -> dict[str, np.ndarray]:
    """What the checkpoint holds."""
    rng = np.random.default_rng(0)
    shape = (ROWS, COLUMNS)
    return {f"h.{at}.w": rng.normal(size=shape).astype(np.float32) for at in range(2)}


def scaled_tensors() -> dict[str, np.ndarray]:
    """A float8 matrix with the scales of its blocks, and experts in MXFP4."""
    rng = np.random.default_rng(0)
    return {
        "w": rng.normal(size=(2 * 128, 3 * 128)).astype(jnp.float8_e4m3fn),
        "w_scale_inv": rng.random((2, 3), np.float32),
        "e_blocks": rng.integers(0, 256, (2, 8, 3, 16), np.uint8),
        "e_scales": rng.integers(100, 150, (2, 8, 3), np.uint8),
    }


def prepare(folder: Path) -> None:
    (folder / "in").mkdir()
    save_file(tensors(), folder / "in" / "model.safetensors")
    (folder / "scaled").mkdir()
    save_file(scaled_tensors(), folder / "scaled" / "model.safetensors")


def main(folder: Path) -> dict[str, Any]:
    # Of two processes each has one row of the mesh, of four half a row.
    mesh = flm.DeviceMesh("data=2,model=4")
    arrays = tensors()
    plain = [("a", "h.0.w"), ("b", "h.1.w")]
    turned = [(path, name, mappings.linear()) for path, name in plain]
    stacked = [("s", "h.{layer}.w", mappings.stack(0))]
    a, b = arrays["h.0.w"], arrays["h.1.w"]
    cases: dict[str, tuple[Any, tuple[Any, ...], dict[str, np.ndarray]]] = {
        "rows": (plain, ("data", "model"), {"a": a, "b": b}),
        "columns": (plain, ("model", "data"), {"a": a, "b": b}),
        "transposed rows": (turned, ("model", "data"), {"a": a.T, "b": b.T}),
        "transposed columns": (turned, ("data", "model"), {"a": a.T, "b": b.T}),
        "layers": (stacked, ("data", "model", None), {"s": np.stack([a, b])}),
        "replicated": (plain, (None, None), {"a": a, "b": b}),
    }
    found: dict[str, Any] = {"read": {}, "planned": {}}
    restored: Any = None
    for gap in (0, 32 << 10):
        for name, (mapping, axes, wanted) in cases.items():
            read: list[tuple[int, int]] = []
            layout_map = flm.LayoutMap(mesh)
            layout_map["."] = axes
            target = {
                path: jax.ShapeDtypeStruct(value.shape, value.dtype)
                for path, value in wanted.items()
            }
            with mock.patch.object(_safetensors_read, "GAP_BYTES", gap):
                restored = flm.checkpoint.restore_safetensors(
                    folder / "in",
                    target,
                    layout_map=layout_map,
                    mapping=mapping,
                    progress=lambda *counts, read=read: read.append(counts),
                )
            for path, value in wanted.items():
                for shard in restored[path].addressable_shards:
                    np.testing.assert_array_equal(shard.data, value[shard.index])
            found["read"][f"{name}, {gap}"] = read[-1][0]
            found["planned"][f"{name}, {gap}"] = read[-1][1]
            if name in ("transposed columns", "layers"):
                out = folder / f"{name} {gap}"
                flm.checkpoint.save_safetensors(
                    out, restored, mapping=mapping, max_file_bytes=9000
                )
    found["scaled"] = scaled(folder, mesh)
    found["problems"] = problems(folder, mesh, restored)
    return found


def scaled(folder: Path, mesh: flm.DeviceMesh) -> dict[str, int]:
    """Bytes read of tensors with scales, of which each row of the mesh has a half."""
    held = scaled_tensors()
    weight, scales = held["w"].T, held["w_scale_inv"].T
    each = np.repeat(np.repeat(scales, 128, 0), 128, 1)
    blocks = held["e_blocks"]
    numbers = np.stack([blocks & 15, blocks >> 4], -1).view(jnp.float4_e2m1fn)
    numbers = numbers.reshape(2, 8, 3, 32).astype(np.float32)
    numbers = np.ldexp(numbers, held["e_scales"][..., None].astype(np.int32) - 127)
    turned = mappings.linear()
    kept = [("kernel", "w", turned), ("kernel_scale", "w_scale_inv", turned)]
    float8 = [("kernel", "w", (mappings.dequantize(), turned))]
    mxfp4 = [("kernel", "e_blocks", mappings.dequantize("mxfp4"))]
    product = (weight.astype(np.float32) * each).astype(jnp.bfloat16)
    experts = numbers.reshape(2, 8, 96).astype(jnp.bfloat16)
    cases: dict[str, tuple[Any, tuple[Any, ...], dict[str, np.ndarray]]] = {
        "kept": (kept, (None, "data"), {"kernel": weight, "kernel_scale": scales}),
        "float8": (float8, (None, "data"), {"kernel": product}),
        "MXFP4": (mxfp4, ("data", None, None), {"kernel": experts}),
    }
    found = {}
    for name, (mapping, axes, wanted) in cases.items():
        read: list[tuple[int, int]] = []
        layout_map = flm.LayoutMap(mesh)
        layout_map["."] = axes
        restored = flm.checkpoint.restore_safetensors(
            folder / "scaled",
            {
                path: jax.ShapeDtypeStruct(value.shape, value.dtype)
                for path, value in wanted.items()
            },
            layout_map=layout_map,
            mapping=mapping,
            unexpected="ignore",
            progress=lambda *counts, read=read: read.append(counts),
        )
        for path, value in wanted.items():
            for shard in restored[path].addressable_shards:
                own = value[shard.index]
                assert 2 * own.size == value.size
                np.testing.assert_array_equal(shard.data, own, strict=True)
        assert read[-1][0] == read[-1][1]
        found[name] = read[-1][0]
    return found


def problems(folder: Path, mesh: flm.DeviceMesh, tree: Any) -> dict[str, str]:
    """What goes wrong in one process only: 1, and at last 0."""
    process, said = jax.process_index(), {}
    layout_map = flm.LayoutMap(mesh)
    layout_map["."] = ("data", None) if process == 1 else (None, "data")
    try:
        flm.checkpoint.restore_safetensors(folder / "in", layout_map=layout_map)
    except flm.LayoutError as error:
        said["other rules"] = f"{type(error).__name__}: {error}"
    layout_map = flm.LayoutMap(mesh, strict=False)
    try:
        place = folder / ("nowhere" if process == 1 else "in")
        flm.checkpoint.restore_safetensors(place, layout_map=layout_map)
    except flm.LayoutError as error:
        said["another place"] = f"{type(error).__name__}: {error}"

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    try:
        with mock.patch.object(os, "fsync", os.fsync if process else full):
            flm.checkpoint.save_safetensors(folder / "full", tree)
    except flm.LayoutError as error:
        said["full"] = f"{type(error).__name__}: {error}"
    return said
