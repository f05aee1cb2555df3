"""Checksums of arrays that several processes hold, in memory and of a checkpoint.

A part (see `launch`); the test finds the checksums in one process too.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

import flax_layoutmap as flm
from flax_layoutmap._core.checksums import checksums

MESH = "data=2,model=4"


def tree(spec: str) -> dict[str, Any]:
    """Arrays in different layouts, and values of the host."""
    mesh = flm.DeviceMesh(spec)
    rules = flm.LayoutMap(mesh, strict=False)
    rules["rows"] = (mesh.axis_names[0], None)
    rules["columns"] = (None, mesh.axis_names[-1])
    rng = np.random.default_rng(0)
    arrays = {
        "rows": rng.normal(size=(64, 24)).astype(np.float32),
        "columns": rng.normal(size=(24, 72)).astype(jnp.bfloat16),
        "everywhere": rng.normal(size=(3, 5)).astype(np.float16),
        "key": jax.random.split(jax.random.key(3), 4),
    }
    return {**rules.place(arrays), "host": np.arange(5.0), "step": 7, "name": "a"}


def flip(path: Path) -> None:
    """Flips a bit in the largest file of the process with the second half of `rows`.

    Others have files with nothing but an index, of which not every bit is read.
    """
    process = jax.process_count() // 2
    files = path.glob(f"state/ocdbt.process_{process}/d/*")
    file = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def restored(path: Path, spec: str) -> str:
    """What a restore says that asks for nothing but layouts."""
    rules = flm.LayoutMap(flm.DeviceMesh(spec), strict=False)
    rules["rows|columns"] = (None, rules.device_mesh.axis_names[-1])  # pyright: ignore
    try:
        flm.checkpoint.restore(path, layout_map=rules)
    except flm.errors.CheckpointError as caught:
        return str(caught)
    return ""


def main(folder: Path) -> dict[str, Any]:
    path = folder / "a"
    flm.checkpoint.save(path, tree(MESH))
    verified = flm.checkpoint.verify(path)
    intact = [restored(path, spec) for spec in (MESH, "x=8")]
    if jax.process_index() == 0:
        flip(path)
    multihost_utils.sync_global_devices("flipped")
    return {
        "checksums": checksums(tree(MESH)),
        "other mesh": checksums(tree("x=8")),
        "verified": verified,
        "intact": intact,
        "flipped": [restored(path, spec) for spec in (MESH, "x=8")],
    }
