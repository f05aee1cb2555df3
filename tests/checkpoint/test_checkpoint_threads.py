"""Threads that save and restore concurrently: complete saves, and no deadlock.

They run in a process of their own, which is ended when it takes too long.
"""

from pathlib import Path

import forks
import pytest

pytestmark = pytest.mark.slow

ROUNDS, LIMIT_SECONDS = 5, 120

PROGRAM = f"""
import sys, threading
import jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 4)
import flax_layoutmap as flm

layout_map = flm.LayoutMap("data=4")
layout_map["w"] = ("data", None)

def tree(value):
    return layout_map.place({{"w": jnp.full((64, 8), float(value)), "step": value}})

def save(path, value):
    flm.checkpoint.save(path, tree(value), layout_map=layout_map)

def restore(path, value):
    found = flm.checkpoint.restore(path, layout_map=layout_map)
    assert found["step"] == value and (found["w"] == value).all()

def loop(path, steps):
    with flm.checkpoint.Checkpointer(path, layout_map=layout_map) as checkpointer:
        for step in range(steps):
            checkpointer.save(step, tree(step))
    for step in range(steps):
        restore(f"{{path}}/{{step}}", step)

top, done = sys.argv[1], []
save(f"{{top}}/source", 3)
for number in range({ROUNDS}):
    begin = threading.Barrier(5)
    at = f"{{top}}/{{number}}"

    def run(function, path, value):
        begin.wait()
        function(path, value)
        if function is save:
            restore(path, value)
        done.append(path)

    calls = [(loop, f"{{at}}/a", 4), (loop, f"{{at}}/b", 4), (save, f"{{at}}/c/0", 0)]
    calls += [(restore, f"{{top}}/source", 3)] * 2
    threads = [threading.Thread(target=run, args=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(len(done))
"""


def test_saves_beside_loops_and_restores(tmp_path: Path) -> None:
    done = forks.run(["-c", PROGRAM, str(tmp_path)], {}, timeout=LIMIT_SECONDS)
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1] == str(5 * ROUNDS), done.err
