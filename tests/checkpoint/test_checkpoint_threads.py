"""Threads that save and restore concurrently: complete saves, and no deadlock.

They run in a process of their own, which is ended when it takes too long.
"""

import json
from pathlib import Path
from typing import Any

import forks
import jax.numpy as jnp
import numpy as np
import pytest

import flax_layoutmap as flm

pytestmark = pytest.mark.slow

ROUNDS, LIMIT_SECONDS = 5, 120

PROGRAM = f"""
import json, sys, threading
import jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 4)
import flax_layoutmap as flm

layout_map = flm.LayoutMap("data=4")
layout_map["w"] = ("data", None)
layout_map["b"] = None
top = sys.argv[1]

def tree(value):
    return layout_map.place({{
        "w": jnp.full((64, 8), float(value)), "b": jnp.full(8, float(value)),
        "step": value,
    }})

def save(name, value, **options):
    flm.checkpoint.save(f"{{top}}/{{name}}", tree(value), **options)

def loop(name):
    directory = f"{{top}}/{{name}}"
    with flm.checkpoint.Checkpointer(directory, layout_map=layout_map) as checkpointer:
        for step in range(4):
            checkpointer.save(step, tree(step))

def restore(name):
    found = flm.checkpoint.restore(f"{{top}}/{{name}}", layout_map=layout_map)
    assert (found["w"] == found["step"]).all()

save("source", 3)
CALLS = [
    (loop, "run"), (loop, "other"), (save, "a/b/0", 0), (save, "1", 1),
    (restore, "../source"), (restore, "../source"),
]
said = []
for number in range({ROUNDS}):
    begin = threading.Barrier(len(CALLS))

    def run(function, name, *args):
        begin.wait()
        try:
            function(f"{{number}}/{{name}}", *args)
        except Exception as error:
            said.append(f"{{type(error).__name__}}: {{error}}")

    threads = [threading.Thread(target=run, args=call) for call in CALLS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(json.dumps(said))
"""


def value_of(path: Path) -> int:
    """The number that a checkpoint is full of."""
    flm.checkpoint.verify(path)
    layout_map = flm.LayoutMap("data=8", strict=False)
    found: Any = flm.checkpoint.restore(path, layout_map=layout_map)
    step = int(found["step"])
    np.testing.assert_array_equal(found["w"], jnp.full((64, 8), float(step)))
    np.testing.assert_array_equal(found["b"], jnp.full(8, float(step)))
    return step


def test_saves_beside_loops_and_restores(tmp_path: Path) -> None:
    done = forks.run(["-c", PROGRAM, str(tmp_path)], {}, timeout=LIMIT_SECONDS)
    assert done.code == 0, done.err
    assert json.loads(done.out.splitlines()[-1]) == []
    for number in range(ROUNDS):
        at = tmp_path / str(number)
        for value, name in enumerate(["a/b/0", "1"]):
            assert value_of(at / name) == value
        for run in ("run", "other"):
            assert [value_of(at / run / str(step)) for step in range(4)] == [0, 1, 2, 3]
