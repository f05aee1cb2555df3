"""Two processes that do not see the same storage: a save, and a restore.

Each process has a directory of its own below the one path `/proc/self/cwd`.

`python -m multiprocess.storage FOLDER`, with a checkpoint for each process in it.
"""

import os
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import flax_layoutmap as flm
from multiprocess import launch

PROCESS = launch.join()
HERE = "/proc/self/cwd"
FOLDER = sys.argv[1]
own = os.path.join(FOLDER, f"home of {PROCESS}")
os.mkdir(own)
os.chdir(own)
shutil.copytree(os.path.join(FOLDER, str(PROCESS)), "saved")
layout_map = flm.LayoutMap("x=-1", strict=False)
layout_map["w"] = ("x",)
tree = layout_map.place({"w": jnp.arange(8.0)})


def said(function: object, *args: object, **options: object) -> str:
    assert callable(function)
    try:
        function(*args, **options)
    except flm.LayoutError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


os.mkdir("steps")
for step in (1, 2) if PROCESS == 0 else (1,):
    shutil.copytree(os.path.join(FOLDER, "plain"), f"steps/{step}")
same = os.path.join(FOLDER, "0")
shutil.copytree(os.path.join(FOLDER, "large"), "damaged")
if PROCESS == 1:
    largest = max(Path("damaged").rglob("d/*"), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[5_000:15_000] = bytes(10_000)
    largest.write_bytes(content)
half = flm.DeviceMesh("x=4", devices=jax.devices()[:4])
plain = {"layout_map": layout_map, "progress": False}

launch.answer(
    {
        "other steps": said(
            flm.checkpoint.restore, f"{HERE}/steps", step="latest", **plain
        ),
        "other limits": said(
            flm.checkpoint.restore, same, host_memory=1000 * (1 + PROCESS), **plain
        ),
        "other strategies": said(
            flm.checkpoint.restore,
            same,
            strategy=("aligned", "direct")[PROCESS],
            **plain,
        ),
        "only one verifies": said(
            flm.checkpoint.restore, same, verify=PROCESS == 1, **plain
        ),
        "a mesh without devices of process 1": said(
            flm.checkpoint.restore, same, layout_map=layout_map.on(half)
        ),
        "damaged for process 1": said(
            flm.checkpoint.restore, f"{HERE}/damaged", **plain
        ),
        "save": said(
            flm.checkpoint.save, f"{HERE}/runs/a", tree, layout_map=layout_map
        ),
        "another path": said(
            flm.checkpoint.save, f"{HERE}/{PROCESS}", tree, layout_map=layout_map
        ),
        "restore": said(flm.checkpoint.restore, f"{HERE}/saved", layout_map=layout_map),
    }
)
