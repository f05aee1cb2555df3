"""Programs that end during a save finish it or raise; no save is lost silently."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import forks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick

import flax_layoutmap as flm

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

# Large enough to be still under way when the next line runs.
SIZE = 1 << 22

BEGIN = f"""
import asyncio, os, resource, signal, sys, threading, time
# A job in the background of a shell is started with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
import flax_layoutmap as flm

layout_map = flm.LayoutMap("data=2")
layout_map["w"] = ("data",)
noise = np.random.default_rng(0).normal(size={SIZE}).astype(np.float32)

def tree(value):
    return layout_map.place({{"w": jnp.asarray(noise + value)}})

def opened(**options):
    return flm.checkpoint.Checkpointer(sys.argv[1], layout_map=layout_map, **options)

def pending(checkpointer, step):
    assert checkpointer.steps != [*range(step + 1)], "the save was too fast to test"
"""


class Ended(NamedTuple):
    code: int
    text: str
    seconds: float


def start(code: str, directory: Path, *before: str) -> "subprocess.Popen[str]":
    environment = quick.for_subprocess(os.environ)
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [
            *(*before, sys.executable, "-X", "faulthandler"),
            *("-c", BEGIN + code, str(directory)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def run(code: str, directory: Path) -> Ended:
    began = time.monotonic()
    done = forks.run(["-c", BEGIN + code, str(directory)], {}, timeout=60)
    return Ended(done.code, done.out + done.err, time.monotonic() - began)


def assert_complete(directory: Path, steps: list[int]) -> None:
    """The steps are there, and hold the values that they were saved with."""
    layout_map = flm.LayoutMap(flm.DeviceMesh("data=4", devices=jax.devices()[:4]))
    layout_map["w"] = ("data",)
    noise = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)
    with flm.checkpoint.Checkpointer(directory, layout_map=layout_map) as checkpointer:
        assert checkpointer.steps == steps
        for step in steps:
            target = {"w": jax.ShapeDtypeStruct((SIZE,), jnp.float32)}
            found = checkpointer.restore(target, step)
            np.testing.assert_array_equal(found["w"], noise + np.float32(step))


# name → (the program, its exit code, what it says)
ENDS = {
    "the end of the block": (
        """
with opened() as checkpointer:
    for step in range(2):
        checkpointer.save(step, tree(step))
    pending(checkpointer, 1)
""",
        0,
        "",
    ),
    "an exception": (
        """
with opened() as checkpointer:
    for step in range(2):
        checkpointer.save(step, tree(step))
    pending(checkpointer, 1)
    raise KeyError("mine")
""",
        1,
        "KeyError: 'mine'",
    ),
    "sys.exit": (
        """
with opened() as checkpointer:
    for step in range(2):
        checkpointer.save(step, tree(step))
    sys.exit(3)
""",
        3,
        "",
    ),
    "control-C": (
        """
with opened() as checkpointer:
    for step in range(2):
        checkpointer.save(step, tree(step))
    os.kill(os.getpid(), signal.SIGINT)
    while True:  # not a pause: it could begin after the signal
        time.sleep(0.05)
""",
        -signal.SIGINT,
        "KeyboardInterrupt",
    ),
    "no block and no close": (
        """
checkpointer = opened()
for step in range(2):
    checkpointer.save(step, tree(step))
""",
        0,
        "",
    ),
    "a cancelled task": (
        """
async def main():
    with opened() as checkpointer:
        for step in range(2):
            checkpointer.save(step, tree(step))
        await asyncio.Event().wait()

try:
    asyncio.run(asyncio.wait_for(main(), 0.1))
except TimeoutError:
    print("cancelled")
""",
        0,
        "cancelled",
    ),
    "SIGTERM that no step is saved for": (
        """
with opened(every=1) as checkpointer:
    for step in range(2):
        checkpointer.save(step, tree(step))
    os.kill(os.getpid(), signal.SIGTERM)
""",
        -signal.SIGTERM,
        "",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS, ids=str)
def test_the_save_under_way_is_finished(tmp_path: Path, end: str) -> None:
    code, expected, phrase = ENDS[end]
    ended = run(code, tmp_path / "run")
    assert (ended.code, phrase in ended.text) == (expected, True), ended.text
    assert_complete(tmp_path / "run", [0, 1])


# Nobody leaves the block: the save is finished, or the exit code says that it is lost.
ABANDONED = {
    "a generator that is kept": """
def loop():
    with opened() as checkpointer:
        for step in range(3):
            checkpointer.save(step, tree(step))
            yield step

kept = loop()
next(kept), next(kept)
""",
    "a block that is entered by hand": """
checkpointer = opened().__enter__()
for step in range(2):
    checkpointer.save(step, tree(step))
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ABANDONED, ids=str)
def test_a_save_that_nobody_waits_for_is_not_lost_quietly(
    tmp_path: Path, how: str
) -> None:
    ended = run(ABANDONED[how], tmp_path / "run")
    # Plain Orbax hangs for five minutes here, and exits with 0.
    assert ended.seconds < 60
    if ended.code == 0:
        assert_complete(tmp_path / "run", [0, 1])
        return
    assert ended.code == 1
    assert "flax_layoutmap: the save of step 1 to" in ended.text
    assert "is lost, as the program ended before it was complete" in ended.text
    assert_complete(tmp_path / "run", [0])


# Python waits for the workers of executors before it says that the main thread ended.
STUCK = """
import threading
from concurrent.futures import ThreadPoolExecutor
from flax_layoutmap.checkpoint import _step_writer

_step_writer._LAST_SECONDS = 0.5
future = ThreadPoolExecutor(1).submit(threading.Event().wait)
_step_writer._Pending("the save of step 7", future).start()
"""


def test_a_save_that_holds_up_the_end_of_the_program(tmp_path: Path) -> None:
    ended = run(STUCK, tmp_path / "run")
    assert ended.code == 1 and "the save of step 7 is lost" in ended.text
    assert ended.seconds < 60


DISK_FULL = """
with opened() as checkpointer:
    checkpointer.save(0, tree(0))
    checkpointer.wait()
    # What is left of the disk: no file may become larger.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    checkpointer.save(1, tree(1))
    print("it returned")
"""


def test_a_full_disk(tmp_path: Path) -> None:
    ended = run(DISK_FULL, tmp_path / "run")
    assert ended.code == 1 and "it returned" in ended.text
    assert "CheckpointError: the save of step 1 to" in ended.text, ended.text
    assert "File too large" in ended.text.rsplit("CheckpointError: ", 1)[1]
    assert ended.seconds < 60
    assert_complete(tmp_path / "run", [0])


# A step takes 16 MiB, and there is room for one and a half.
REALLY_FULL = """
import subprocess
folder = os.path.dirname(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", folder], check=True)

def refused(call):
    try:
        call()
    except flm.errors.CheckpointError as error:
        print(type(error).__name__, error)

with opened(keep=1) as checkpointer:
    checkpointer.save(0, tree(0))
    checkpointer.wait()
    for step in (1, 2):
        checkpointer.save(step, tree(step))
        refused(checkpointer.wait)
    print("steps", checkpointer.steps, sorted(os.listdir(sys.argv[1])))
flm.checkpoint.verify(sys.argv[1] + "/0")
refused(lambda: flm.checkpoint.save(folder + "/alone", tree(3), layout_map=layout_map))
subprocess.run(["mount", "-o", "remount,size=80m", folder], check=True)
flm.checkpoint.save(folder + "/alone", tree(3), layout_map=layout_map)
with opened(keep=1) as checkpointer:
    checkpointer.save(3, tree(3))
print("now", sorted(os.listdir(folder)), checkpointer.steps)
"""


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    own = ["unshare", "--mount"]  # what is mounted there is gone with the process
    trial = [*own, "mount", "-t", "tmpfs", "none", str(tmp_path)]
    can = shutil.which("unshare") and shutil.which("mount")
    if not can or subprocess.run(trial, capture_output=True).returncode:
        pytest.skip("Only root, on Linux, can mount a small disk.")
    with start(REALLY_FULL, tmp_path / "run", *own) as process:
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 0, text
    said = [line for line in text.splitlines() if line.startswith("Checkpoint")]
    assert len(said) == 3
    assert all("No space left on device" in line for line in said)
    assert "the save of step 2 to" in said[1] and "cannot save to" in said[2]
    # What the failed save of step 1 left made room for that of step 2.
    left = "['.flax_layoutmap.lock', '0', '2.orbax-checkpoint-tmp']"
    assert f"steps [0] {left}" in text, text
    assert "now ['alone', 'run'] [3]" in text, text


SIGTERM = """
with opened(every=10**6) as checkpointer:
    state, step = tree(0), 0
    while step < 10**4:
        step += 1
        saved = checkpointer.save(step, {"w": state["w"] + step})
        print("step", step, saved, flush=True)
        if checkpointer.reached_preemption:
            break
        threading.Event().wait(0.05)
print("steps", checkpointer.steps)
"""


def test_sigterm_from_outside(tmp_path: Path) -> None:
    with start(SIGTERM, tmp_path / "run") as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step 3 "):
                process.send_signal(signal.SIGTERM)
    assert process.returncode == 0, lines
    *_, saved, steps = lines
    step = int(saved.split()[1])
    assert saved == f"step {step} True\n" and 3 < step < 50
    assert steps == f"steps [{step}]\n"
    assert_complete(tmp_path / "run", [step])


LOCK = """
with opened() as checkpointer:
    checkpointer.save(0, tree(0))
    checkpointer.wait()
    print("saved", flush=True)
    while True:  # not a pause: it could begin after the signal
        time.sleep(0.05)
"""


def test_two_programs_on_one_directory(tmp_path: Path) -> None:
    layout_map = flm.LayoutMap("data=8")
    layout_map["w"] = ("data",)
    state = layout_map.place({"w": jnp.zeros(SIZE)})
    with start(LOCK, tmp_path / "run") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "saved\n"
        with flm.checkpoint.Checkpointer(
            tmp_path / "run", layout_map=layout_map
        ) as checkpointer:
            owner = f"is being saved to by process {process.pid} on "
            with pytest.raises(flm.errors.CheckpointError, match=owner):
                checkpointer.save(1, state)
            assert checkpointer.restore(step=0)["w"].shape == (SIZE,)
            process.kill()
            process.wait()
            # However it ended, the directory is free again.
            assert checkpointer.save(1, state)
    assert checkpointer.steps == [0, 1]
