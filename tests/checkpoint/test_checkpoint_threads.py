"""Threads that save and restore concurrently: complete saves, and no deadlock."""

from pathlib import Path

import forks
import pytest

pytestmark = pytest.mark.slow

# In a process of its own, which is ended when it takes too long.
PROGRAM = """
import sys
from concurrent.futures import ThreadPoolExecutor
import jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 4)
import flax_layoutmap as flm

layout_map = flm.LayoutMap("data=4")
layout_map["w"] = ("data", None)

def tree(value):
    return layout_map.place({"w": jnp.full((64, 8), float(value)), "step": value})

def check(path, value):
    found = flm.checkpoint.restore(path, layout_map=layout_map)
    assert found["step"] == value and (found["w"] == value).all()

def run(number):
    path = f"{sys.argv[1]}/{number}"
    if number % 3:
        flm.checkpoint.save(path, tree(number), layout_map=layout_map)
        return check(path, number)
    with flm.checkpoint.Checkpointer(path, layout_map=layout_map) as checkpointer:
        for step in range(3):
            checkpointer.save(step, tree(step))
    for step in range(3):
        check(f"{path}/{step}", step)

with ThreadPoolExecutor(6) as pool:
    print(len(list(pool.map(run, range(24)))))
"""


def test_saves_beside_loops_and_restores(tmp_path: Path) -> None:
    done = forks.run(["-c", PROGRAM, str(tmp_path)], {}, timeout=120)
    assert done.code == 0 and done.out.splitlines()[-1] == "24", done.err
