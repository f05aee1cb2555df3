"""Each process reads its own shards; process 0 writes the whole tree.

A part (see `launch`); `in/` is a checkpoint whose tensors are those of `tensors`.
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
from flax_layoutmap.checkpoint import mappings
from multiprocess.launch import said


def tensors() -> dict[str, np.ndarray]:
    """What the checkpoint holds: two layers, and a float8 matrix with its scales."""
    rng = np.random.default_rng(0)
    return {
        **{
            f"h.{at}.w": rng.normal(size=(64, 32)).astype(np.float32) for at in range(2)
        },
        "w": rng.normal(size=(2 * 128, 3 * 128)).astype(jnp.float8_e4m3fn),
        "w_scale_inv": rng.random((2, 3), np.float32),
    }


def prepare(folder: Path) -> None:
    (folder / "in").mkdir()
    save_file(tensors(), folder / "in" / "model.safetensors")


def main(folder: Path) -> dict[str, Any]:
    # Of two processes each has one row of the mesh, of four half a row.
    mesh = flm.DeviceMesh("data=2,model=4")
    arrays = tensors()
    both = np.stack([arrays["h.0.w"], arrays["h.1.w"]])
    each = np.repeat(np.repeat(arrays["w_scale_inv"], 128, 0), 128, 1)
    product = (arrays["w"].astype(np.float32) * each).astype(jnp.bfloat16)
    turned, stacked = mappings.linear(), mappings.stack(0)
    cases: dict[str, tuple[Any, tuple[Any, ...], np.ndarray]] = {
        "columns": (
            ("h.{layer}.w", (turned, stacked)),
            *((None, "data", "model"), both.transpose(0, 2, 1)),
        ),
        "float8": (("w", (mappings.dequantize(), turned)), (None, "data"), product.T),
        "layers": (("h.{layer}.w", stacked), ("data", "model", None), both),
    }
    restored: Any = None
    for name, (entry, axes, wanted) in cases.items():
        layout_map = flm.LayoutMap(mesh)
        layout_map["."] = axes
        restored = flm.checkpoint.restore_safetensors(
            folder / "in",
            {"x": jax.ShapeDtypeStruct(wanted.shape, wanted.dtype)},
            layout_map=layout_map,
            mapping=[("x", *entry)],
            unexpected="ignore",
        )
        for shard in restored["x"].addressable_shards:
            np.testing.assert_array_equal(shard.data, wanted[shard.index])
        if "{layer}" in entry[0]:
            flm.checkpoint.save_safetensors(
                folder / name, restored, mapping=[("x", *entry)], max_file_bytes=9000
            )
    return {"problems": problems(folder, mesh, restored)}


def problems(folder: Path, mesh: flm.DeviceMesh, tree: Any) -> dict[str, str]:
    """What goes wrong in one process only: 1, and at last 0."""
    process, restore = jax.process_index(), flm.checkpoint.restore_safetensors
    plain, other = (flm.LayoutMap(mesh, strict=False) for _ in range(2))
    other["h"] = ("data", None) if process == 1 else (None, "data")
    place = folder / ("nowhere" if process == 1 else "in")
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    with mock.patch.object(os, "fsync", os.fsync if process else full):
        saved = said(lambda: flm.checkpoint.save_safetensors(folder / "full", tree))
    return {
        "other rules": said(lambda: restore(folder / "in", layout_map=other)),
        "another place": said(lambda: restore(place, layout_map=plain)),
        "full": saved,
    }
