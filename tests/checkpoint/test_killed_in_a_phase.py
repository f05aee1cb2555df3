"""One of four processes is killed in each phase: the others end with the reason.

What was saved before is whole, and is restored by one process.
"""

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from multiprocess import launch

import flax_layoutmap as flm

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

# JAX ends a job in which a process has not been heard of for this long.
HEARTBEAT_SECONDS = 10


# Phase → what the others say; in a step that is a note to the error of JAX's runtime.
SAID = {
    "step": "start all of them again; the latest step saved in",
    "save": "could not reach the other processes before saving",
}


@pytest.mark.parametrize("phase", SAID)
def test_killed_in(phase: str, tmp_path: Path) -> None:
    ended = launch.run(
        "phases",
        str(tmp_path),
        phase,
        processes=4,
        devices=2,
        timeout=90,  # none of them had to be killed
        check=False,
        heartbeat=HEARTBEAT_SECONDS,
    )
    assert ended[2].code == -signal.SIGKILL
    for process in (0, 1, 3):
        one = ended[process]
        assert one.code != 0
        if one.answer is None:  # JAX itself ended the process, with its own words
            assert "coordination" in one.err.lower(), str(one)
        else:
            assert SAID[phase] in one.answer, str(one)
    layout_map = flm.LayoutMap("data=2,model=4", strict=False)
    layout_map["kernel"] = (None, "model")
    run = flm.checkpoint.Checkpointer(tmp_path, layout_map=layout_map)
    assert run.steps == [1]
    restored: Any = run.restore()
    assert np.isfinite(np.asarray(restored["model"]["kernel"])).all()
