"""Programs that end during a save: the `with` block finishes it, or raises."""

import time
from pathlib import Path

import forks
import jax.numpy as jnp
import numpy as np
import pytest

import flax_layoutmap as flm

pytestmark = pytest.mark.slow

# Large enough to be still under way when the next line runs.
SIZE = 1 << 22

BEGIN = f"""
import os, resource, signal, sys, time
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
import flax_layoutmap as flm

layout_map = flm.LayoutMap("data=2")
layout_map["w"] = ("data",)
noise = np.random.default_rng(0).normal(size={SIZE}).astype(np.float32)

def save(checkpointer, step):
    state = layout_map.place({{"w": jnp.asarray(noise + step)}})
    checkpointer.save(step, state)

checkpointer = flm.checkpoint.Checkpointer(sys.argv[1], layout_map=layout_map)
"""

IN_BLOCK = """
with checkpointer:
    save(checkpointer, 0), save(checkpointer, 1)
    """

# The end → the program, its exit code, what it says, the steps that are there.
ENDS = {
    "end of the block": (IN_BLOCK, 0, "", [0, 1]),
    "sys.exit": (IN_BLOCK + "sys.exit(3)", 3, "", [0, 1]),
    "no block": ("save(checkpointer, 0), save(checkpointer, 1)", 0, "", [0, 1]),
    "full disk": (
        """
with checkpointer:
    save(checkpointer, 0)
    checkpointer.wait()
    # What is left of the disk: no file may become larger.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    save(checkpointer, 1)
""",
        1,
        "CheckpointError: cannot save step 1 to",
        [0],
    ),
}


@pytest.mark.parametrize("end", ENDS, ids=str)
def test_the_program_ends(tmp_path: Path, end: str) -> None:
    code, expected, phrase, steps = ENDS[end]
    began = time.monotonic()
    done = forks.run(["-c", BEGIN + code, str(tmp_path / "run")], {}, timeout=60)
    said = done.out + done.err
    assert (done.code, phrase in said) == (expected, True), said
    assert time.monotonic() - began < 60
    layout_map = flm.LayoutMap("data=8")
    layout_map["w"] = ("data",)
    checkpointer = flm.checkpoint.Checkpointer(tmp_path / "run", layout_map=layout_map)
    assert checkpointer.steps == steps
    noise = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)
    for step in steps:
        restored = checkpointer.restore(lambda: {"w": jnp.zeros(SIZE)}, step)
        np.testing.assert_array_equal(restored["w"], noise + np.float32(step))
