"""Programs that end during a save: the `with` block finishes it, or raises."""

from pathlib import Path

import forks
import numpy as np
import pytest

import flax_layoutmap as flm

pytestmark = pytest.mark.slow

PROGRAM = """
import resource, signal, sys
import jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 2)
import flax_layoutmap as flm

layout_map = flm.LayoutMap("data=2")
layout_map["w"] = ("data",)
# Large enough to be still under way when the next line runs.
noise = jax.random.normal(jax.random.key(0), 1 << 22)
with flm.checkpoint.Checkpointer(sys.argv[1], layout_map=layout_map) as checkpointer:
    checkpointer.save(0, layout_map.place({"w": noise}))
    if sys.argv[2] == "full disk":
        checkpointer.wait()
        # What is left of the disk: no file may become larger.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    checkpointer.save(1, layout_map.place({"w": noise + 1}))
    if sys.argv[2] == "sys.exit":
        sys.exit(3)
"""
# The end → its exit code, what it says, the steps that are there.
ENDS = {
    "end of the block": (0, "", [0, 1]),
    "sys.exit": (3, "", [0, 1]),
    "full disk": (1, "CheckpointError: cannot save step 1 to", [0]),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_program_ends(tmp_path: Path, end: str) -> None:
    code, phrase, steps = ENDS[end]
    args = ["-c", PROGRAM, str(tmp_path / "run"), end]
    done = forks.run(args, {}, timeout=60)
    assert (done.code, phrase in done.err) == (code, True), done.err
    layout_map = flm.LayoutMap("data=8")
    layout_map["w"] = ("data",)
    checkpointer = flm.checkpoint.Checkpointer(tmp_path / "run", layout_map=layout_map)
    assert checkpointer.steps == steps
    first, *later = (np.asarray(checkpointer.restore(step=s)["w"]) for s in steps)
    for restored in later:
        np.testing.assert_array_equal(restored, first + np.float32(1))
