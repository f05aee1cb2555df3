"""Start a program as several JAX processes that communicate over loopback.

The test calls `run(program, processes=2, devices=4)`; the program, a module of this
folder, calls `join()` before it touches a device and `answer(...)` with what it found.

What needs no processes of its own is a part: a module with a function `main(folder)`,
which returns its answer, and perhaps `prepare(folder)`, which the test's own process
calls before. The parts of all tests that were selected run in one start of processes,
which costs more than most parts; a test asks for its own with the fixture `job_part`.
"""

import dataclasses
import faulthandler
import importlib
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import forks

# A part that takes longer is ended; on a machine of its own none takes 20 s.
PART_SECONDS = 240.0

# When one process has failed, the others get this long to end with their own errors.
GRACE_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Ended:
    """How one process ended: its exit code, what it printed, and what it answered."""

    code: int
    out: str
    err: str
    answer: Any

    def __str__(self) -> str:
        return f"exit code {self.code}\n{self.out}{self.err}"


def run(
    program: str,
    *args: str,
    processes: int,
    devices: int,
    timeout: float = 240.0,
    check: bool = True,
    heartbeat: int = 20,
    during: Callable[[Sequence[forks.Process]], None] = lambda started: None,
) -> list[Ended]:
    """Runs a program of this folder as several processes, and waits for all.

    Those that are late are killed, which is an error; with `check` an exit code is one
    too. `heartbeat` is after how many seconds a process that is gone is missed;
    `during` is called with the processes once they are started, to send signals.
    """
    common = {
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "FLM_PROCESSES": str(processes),
        "FLM_COORDINATOR": f"127.0.0.1:{_free_port()}",
        "FLM_HEARTBEAT": str(heartbeat),
    }
    started: list[forks.Process] = []
    with tempfile.TemporaryDirectory() as folder:
        names = [f"{folder}/{number}" for number in range(processes)]
        try:
            for number, name in enumerate(names):
                more = {"FLM_PROCESS": str(number), "FLM_ANSWER": f"{name}.answer"}
                command = ["-m", f"multiprocess.{program}", *args]
                files = Path(f"{name}.out"), Path(f"{name}.err")
                started.append(forks.Process(command, common | more, *files, number))
            during(started)
            late = _wait(started, timeout)
        finally:
            for process in started:
                process.kill()
        codes = [process.wait() for process in started]
        ended = [*map(_ended, names, codes)]
    failed = [number for number, one in enumerate(ended) if one.code]
    if late or (check and failed):
        texts = [f"\n--- process {number}: {one}" for number, one in enumerate(ended)]
        raise AssertionError(f"failed: {failed}, killed: {late}" + "".join(texts))
    return ended


def _ended(name: str, code: int) -> Ended:
    def read(kind: str) -> str:
        path = Path(f"{name}.{kind}")
        return path.read_text(errors="replace") if path.exists() else ""

    return Ended(code, read("out"), read("err"), json.loads(read("answer") or "null"))


def _wait(started: Sequence[forks.Process], timeout: float) -> list[int]:
    """Waits; says which processes are late."""
    deadline = time.monotonic() + timeout
    while None in (codes := [process.poll() for process in started]):
        if any(codes):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > deadline:
            return [number for number, code in enumerate(codes) if code is None]
        time.sleep(0.05)
    return []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# -------------------------------------------------------------- parts of one start


@dataclasses.dataclass(frozen=True)
class Part:
    """One part, by the name of its module, of so many processes with eight devices.

    `wanted` are all parts that are to run in this start, and `base` is a folder that is
    the same in all workers of the tests.
    """

    name: str
    processes: int
    wanted: tuple[str, ...]
    base: Path

    @property
    def folder(self) -> Path:
        """What the part was given as its folder."""
        return self._started() / self.name

    @property
    def ended(self) -> list[Ended]:
        """How each process ended, with its answer and with the output of this part."""
        folder = self._started()
        ended = [_ended(f"{self.folder}-{at}", 0) for at in range(self.processes)]
        why = (folder / "why").read_text()
        assert all(one.answer is not None for one in ended), why + str(ended)
        # What fails after the last part has nobody else to tell of it.
        assert self.name != self.wanted[-1] or not why, why
        return ended

    def _started(self) -> Path:
        """The folder of the start, which one worker makes; the others wait."""
        import fcntl  # not everywhere

        folder = self.base / f"parts-{self.processes}"
        folder.mkdir(exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "why").exists():
                (folder / "why").write_text(self._run(folder))
        return folder

    def _run(self, folder: Path) -> str:
        """Runs all parts, up to one that fails; why it did."""
        for name in self.wanted:
            (folder / name).mkdir(exist_ok=True)
            module = importlib.import_module(f"multiprocess.{name}")
            if hasattr(module, "prepare"):
                module.prepare(folder / name)
        try:
            run(
                *("launch", str(folder), *self.wanted),
                processes=self.processes,
                devices=8 // self.processes,
                timeout=PART_SECONDS * len(self.wanted) + 60,
            )
        except AssertionError as error:
            return str(error)
        return ""


def _run_parts(folder: Path, *names: str) -> None:
    """Runs parts in this process, with files of their own for what they print."""
    process = join()
    sys.excepthook = _end_at_once
    for name in names:
        for stream, kind in ((sys.stdout, "out"), (sys.stderr, "err")):
            stream.flush()
            with (folder / f"{name}-{process}.{kind}").open("wb") as file:
                os.dup2(file.fileno(), stream.fileno())
        faulthandler.dump_traceback_later(PART_SECONDS, exit=True)
        found = importlib.import_module(f"multiprocess.{name}").main(folder / name)
        faulthandler.cancel_dump_traceback_later()
        (folder / f"{name}-{process}.answer").write_text(json.dumps(found))


def _end_at_once(*error: Any) -> None:
    """Without waiting for the others, which will not come to the end."""
    sys.__excepthook__(*error)
    sys.stderr.flush()
    os._exit(1)


# ----------------------------------------------------------- for the programs


def join(shutdown: int = 20) -> int:
    """Makes this process one of the job; returns its number.

    To be called before any device is touched. A process that has ended waits so many
    seconds for the others.
    """
    import jax

    import flax_layoutmap as flm

    number = int(os.environ["FLM_PROCESS"])
    flm.keras.initialize(
        os.environ["FLM_COORDINATOR"],
        int(os.environ["FLM_PROCESSES"]),
        number,
        initialization_timeout=60,
        heartbeat_timeout_seconds=int(os.environ["FLM_HEARTBEAT"]),
        shutdown_timeout_seconds=shutdown,
    )
    assert jax.process_index() == number
    return number


def answer(value: Any) -> None:
    """Gives a JSON value to the test that started this process."""
    # Not printed: the transport writes to standard output as it likes.
    Path(os.environ["FLM_ANSWER"]).write_text(json.dumps(value))


def said(call: Callable[[], Any]) -> str:
    """The error of a call: its type and message; or "fine"."""
    try:
        call()
    except (ValueError, OSError) as error:  # ours are ValueErrors
        return f"{type(error).__name__}: {error}"
    return "fine"


def holds(array: Any, host: Any, layout: Any) -> bool:
    """Whether an array has a layout, and each shard here the right part of `host`."""
    import jax
    import numpy as np

    sharding = layout.sharding(array.ndim)
    where = sharding.addressable_devices_indices_map(host.shape)
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    return (
        array.sharding == sharding
        and array.shape == host.shape
        and array.dtype == jax.dtypes.canonicalize_dtype(host.dtype)
        and set(shards) == set(where)
        and all(
            np.array_equal(np.asarray(shards[device]), host[index])
            for device, index in where.items()
        )
    )


def all_hold(ended: Sequence[Ended], count: int) -> None:
    """Asserts that every process answered with so many checks, and that all hold."""
    for process, one in enumerate(ended):
        checks = one.answer["checks"]
        wrong = [name for name, so in checks.items() if not so]
        assert not wrong, f"process {process}: {wrong}\n{one}"
        assert len(checks) == count


if __name__ == "__main__":
    _run_parts(Path(sys.argv[1]), *sys.argv[2:])
