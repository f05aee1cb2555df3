"""Training loops in several processes: preempted, resumed, killed; safetensors."""

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
from multiprocess import launch, trains
from multiprocess.safetensors_parts import tensors
from safetensors.numpy import load_file

import flax_layoutmap as flm

pytestmark = pytest.mark.multiprocess

Processes = Sequence[forks.Process]


def ask_to_end(there: Path) -> Callable[[Processes], None]:
    """Sends SIGTERM to process 1 once a file is there."""

    def send(started: Processes) -> None:
        deadline = time.monotonic() + 60
        while not there.exists() and not any(process.poll() for process in started):
            assert time.monotonic() < deadline, f"there is no {there.name}"
            time.sleep(0.02)
        started[1].send_signal(signal.SIGTERM)

    return send


def assert_values(checkpointer: Any, step: int) -> None:
    """A step holds what the loop had then, in the shards of this mesh."""
    found = checkpointer.restore(trains.create_fn, step)
    for path, value in trains.expected(step).items():
        np.testing.assert_array_equal(found[path], value)
    assert len(found["w"].addressable_shards) == 8
    assert found["w"].addressable_shards[0].data.shape == (1, trains.SHAPE[1])


def alone(folder: Path) -> Any:
    """A Checkpointer of this one process."""
    return flm.checkpoint.Checkpointer(folder / "run", layout_map=trains.rules())


@pytest.mark.parametrize(
    "job_part",
    ["trains-2", pytest.param("trains-4", marks=pytest.mark.slow)],
    indirect=True,
)
def test_several_processes_save_and_go_on(job_part: launch.Part) -> None:
    answers = [one.answer for one in job_part.ended]
    folder, processes = job_part.folder, range(job_part.processes)
    for process, (one, two) in enumerate(answers):
        assert (one["start"], one["saved"]) == (0, [0, 1, 2])
        assert (two["start"], two["saved"]) == (3, [3, 4])
        # Each process got its own part back.
        assert two["data"] == {"process": process, "batches": 5}
        assert two["steps"] == [2, 3, 4]
    with pytest.warns(flm.LayoutWarning, match="step 4 holds the state of data"):
        assert_values(alone(folder), 4)
    text = f"{job_part.processes} processes saved different states of data"
    with pytest.raises(flm.errors.CheckpointError, match=text):
        alone(folder).restore(trains.create_fn, data=trains.Position())
    states = [{"process": at, "batches": 5} for at in processes]
    assert alone(folder).data_states() == states


def test_sigterm_to_one_process_saves_the_same_step_in_both(tmp_path: Path) -> None:
    ended = launch.run(
        *("trains", str(tmp_path), "2000", "slow", "rarely", "no-data"),
        processes=2,
        devices=4,
        during=ask_to_end(tmp_path / "at_3"),
    )
    (step,) = {one.answer["saved"][-1] for one in ended}
    assert 3 < step < 1999
    for one in ended:
        assert one.answer["preempted"] and one.answer["saved"] == [0, step]
        assert one.answer["steps"] == [0, step]
    assert_values(alone(tmp_path), step)


# ---------------------------------------- one of four processes is killed

# JAX ends a job in which a process has not been heard of for this long.
HEARTBEAT_SECONDS = 10


# Phase → what the others say; in a step that is a note to the error of JAX's runtime.
SAID = {
    "step": "start all of them again; the latest step saved in",
    "save": "could not reach the other processes before saving",
}


@pytest.mark.slow
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


# ---------------------------------------- safetensors


@pytest.mark.parametrize(
    "job_part",
    [
        "safetensors_parts-2",
        pytest.param("safetensors_parts-4", marks=pytest.mark.slow),
    ],
    indirect=True,
)
def test_each_process_reads_its_shards_and_process_0_writes(
    job_part: launch.Part,
) -> None:
    for name in ("columns", "layers"):
        found: dict[str, np.ndarray] = {}
        for file in sorted((job_part.folder / name).glob("*.safetensors")):
            found |= load_file(file)
        assert len(list((job_part.folder / name).iterdir())) == 3
        assert found.keys() == {"h.0.w", "h.1.w"}
        for held, value in found.items():
            np.testing.assert_array_equal(value, tensors()[held])
    for number, process in enumerate(job_part.ended):
        said = process.answer["problems"]
        assert "ProcessError" in said["other rules"]
        assert "differs from process 0 in its leaves" in said["other rules"]
        assert "nowhere" in said["another place"]
        text = "No space left on device" if number == 0 else "process 0 failed"
        assert said["full"].startswith("CheckpointError: cannot save to")
        assert text in said["full"]
    assert not list((job_part.folder / "full").iterdir())
