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
CASES = {{
    "other paths": lambda at: [
        (save, f"{{at}}/a/b/0", 0), (save, f"{{at}}/a/b/1", 1), (save, f"{{at}}/2", 2),
        (save, f"{{at}}/3", 3),
    ],
    "with loops": lambda at: [
        (loop, f"{{at}}/run"), (loop, f"{{at}}/other"), (save, f"{{at}}/0", 0),
        (save, f"{{at}}/1", 1), (restore, "source"), (restore, "source"),
    ],
}}

said = {{}}
for case, calls in CASES.items():
    said[case] = []
    for number in range({ROUNDS}):
        begin = threading.Barrier(len(calls("")))

        def run(function, *args):
            begin.wait()
            try:
                function(*args)
            except Exception as error:
                said[case].append(f"{{type(error).__name__}}: {{error}}")

        at = f"{{case}}/{{number}}"
        threads = [threading.Thread(target=run, args=call) for call in calls(at)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("threads")


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, list[str]]:
    """Case → the errors in its threads."""
    done = forks.run(["-c", PROGRAM, str(folder)], {}, timeout=LIMIT_SECONDS)
    assert done.code == 0, done.err
    return json.loads(done.out.splitlines()[-1])


def value_of(path: Path) -> int:
    """The number that a checkpoint is full of."""
    flm.checkpoint.verify(path)
    layout_map = flm.LayoutMap("data=8", strict=False)
    found: Any = flm.checkpoint.restore(path, layout_map=layout_map)
    step = int(found["step"])
    np.testing.assert_array_equal(found["w"], jnp.full((64, 8), float(step)))
    np.testing.assert_array_equal(found["b"], jnp.full(8, float(step)))
    return step


def test_to_other_paths(said: dict[str, list[str]], folder: Path) -> None:
    assert said["other paths"] == []
    for number in range(ROUNDS):
        at = folder / "other paths" / str(number)
        for value, name in enumerate(["a/b/0", "a/b/1", "2", "3"]):
            assert value_of(at / name) == value


def test_beside_loops_and_restores(said: dict[str, list[str]], folder: Path) -> None:
    assert said["with loops"] == []
    for number in range(ROUNDS):
        at = folder / "with loops" / str(number)
        for value, name in enumerate(["0", "1"]):
            assert value_of(at / name) == value
        for run in ("run", "other"):
            assert [value_of(at / run / str(step)) for step in range(4)] == [0, 1, 2, 3]
