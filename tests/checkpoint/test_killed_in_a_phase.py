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
    "creation": "could not reach the other processes before creating the model: one of",
    "step": "start all of them again; the latest step saved in",
    "save": "could not reach the other processes before saving",
    "restore": "could not reach the other processes before restoring",
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
            assert SAID[phase] in one.answer["text"], str(one)
    layout_map = flm.LayoutMap("data=2,model=4", strict=False)
    layout_map["kernel"] = (None, "model")
    assert flm.checkpoint.verify(tmp_path / "1") > 0
    restored: Any = flm.checkpoint.restore(tmp_path / "1", layout_map=layout_map)
    assert np.isfinite(np.asarray(restored["model"]["kernel"])).all()
    if phase != "restore":
        with pytest.raises(flm.errors.CheckpointError):
            flm.checkpoint.inspect(tmp_path / "2")
    else:
        assert flm.checkpoint.verify(tmp_path / "2") > 0
