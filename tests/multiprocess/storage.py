"""Saves and restores where processes do not share storage.

A part (see `launch`). Each process has a directory of its own below the one path
`/proc/self/cwd`.
"""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint

import flax_layoutmap as flm
from multiprocess.launch import said

PROCESS = jax.process_index()
PROCESSES = jax.process_count()
DIFFERS = PROCESS == 1
HERE = "/proc/self/cwd"
MOST = 4


def prepare(folder: Path) -> None:
    """A checkpoint for each process, and two that Orbax saved."""
    for process in range(MOST):
        layout_map = flm.LayoutMap("x=8", strict=False)
        layout_map["w"] = ("x",)
        tree = {"w": np.arange(8.0, dtype=np.float32) + process}
        flm.checkpoint.save(
            folder / str(process), layout_map.place(tree), layout_map=layout_map
        )
    v1: Any = orbax.checkpoint.v1
    v1.save(folder / "plain", {"w": np.ones(8, np.float32)})
    random = np.random.default_rng(0).random(8192, np.float32)
    v1.save(folder / "large", {"w": random})


def fill(folder: Path) -> None:
    """What this process finds here: process 1 less, and some of it damaged."""
    shutil.copytree(folder / str(PROCESS), "saved")
    os.mkdir("steps")
    for step in (1,) if DIFFERS else (1, 2):
        shutil.copytree(folder / "plain", f"steps/{step}")
    shutil.copytree(folder / "large", "damaged")
    if DIFFERS:
        files = Path("damaged").rglob("d/*")
        largest = max(files, key=lambda file: file.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[5_000:15_000] = bytes(10_000)
        largest.write_bytes(content)


def main(folder: Path) -> dict[str, str]:
    """Case → what was said."""
    own = folder / f"home of {PROCESS}"
    own.mkdir()
    with contextlib.chdir(own):
        fill(folder)
        return cases(folder / "0")


def cases(same: Path) -> dict[str, str]:
    layout_map = flm.LayoutMap("x=-1", strict=False)
    layout_map["w"] = ("x",)
    tree = layout_map.place({"w": jnp.arange(8.0)})
    plain: Any = {"layout_map": layout_map, "progress": False}
    half = flm.DeviceMesh("x=4", devices=jax.devices()[:4])
    restore, save = flm.checkpoint.restore, flm.checkpoint.save
    return {
        "other steps": said(lambda: restore(f"{HERE}/steps", step="latest", **plain)),
        "only one verifies": said(lambda: restore(same, verify=DIFFERS, **plain)),
        "without devices": said(lambda: restore(same, layout_map=layout_map.on(half))),
        "damaged for process 1": said(lambda: restore(f"{HERE}/damaged", **plain)),
        "save": said(lambda: save(f"{HERE}/runs/a", tree)),
        "restore": said(lambda: restore(f"{HERE}/saved", **plain)),
    }
