"""Two processes that do not see the same storage: a save, and a restore.

Each process has a directory of its own below the one path `/proc/self/cwd`.

`python -m multiprocess.storage FOLDER`, with a checkpoint for each process in it.
"""

import os
import shutil
import sys

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


launch.answer(
    {
        "save": said(
            flm.checkpoint.save, f"{HERE}/runs/a", tree, layout_map=layout_map
        ),
        "another path": said(
            flm.checkpoint.save, f"{HERE}/{PROCESS}", tree, layout_map=layout_map
        ),
        "restore": said(flm.checkpoint.restore, f"{HERE}/saved", layout_map=layout_map),
    }
)
