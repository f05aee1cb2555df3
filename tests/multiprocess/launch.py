"""Start a program as several JAX processes that communicate over loopback.

The test calls `run(program, processes=2, devices=4)`; the program, a module of this
folder, calls `join()` before it touches a device and `answer(...)` with what it found.

What needs no processes of its own is a part: a module with a function `main(folder)`,
which returns its answer, and perhaps `prepare(folder)`, which the test's own process
calls before. The parts of all tests that were selected run in one start of processes;
a test asks for its own with the fixture `job_part`.
"""

import contextlib
import dataclasses
import importlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import forks

# A part that takes longer is ended; on a machine of its own none takes 20 s.
PART_SECONDS = 240.0

# When one process has failed, the others get this long to end with their own errors.
GRACE_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Ended:
    """How one process ended.

    Attributes:
        code: its exit code; negative where it was killed by a signal.
        out: what it printed.
        err: its standard error.
        answer: the value that the program gave to `answer`; None without one.
    """

    code: int
    out: str
    err: str
    answer: Any

    def __str__(self) -> str:
        return f"exit code {self.code}\n{self.out}{self.err}"


class LaunchError(AssertionError):
    """A process failed, or they did not end in time; holds what each one printed."""

    def __init__(self, why: str, ended: Sequence[Ended]) -> None:
        parts = [f"\n--- process {at}: {one}" for at, one in enumerate(ended)]
        super().__init__(why + "".join(parts))
        self.why = why
        self.ended = tuple(ended)


def run(
    program: str,
    *args: str,
    processes: int,
    devices: int,
    timeout: float = 240.0,
    check: bool = True,
    heartbeat: int = 20,
    during: Callable[[Sequence[forks.Process]], None] | None = None,
) -> list[Ended]:
    """Runs a program of this folder as several processes, and waits for all.

    Args:
        program: the name of its module.
        *args: arguments of the program, the same in every process.
        processes: how many.
        devices: virtual CPU devices of each.
        timeout: seconds until all that still run are killed.
        check: whether an exit code other than 0 is an error.
        heartbeat: seconds after which a process that is gone is missed.
        during: called with the processes once they are started, to send signals.

    Returns:
        One `Ended` per process, in order.

    Raises:
        LaunchError: a process failed (with `check`), or some had to be killed.
    """
    port = _free_port()
    common = {
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "FLM_PROCESSES": str(processes),
        "FLM_COORDINATOR": f"127.0.0.1:{port}",
        "FLM_HEARTBEAT": str(heartbeat),
    }
    with tempfile.TemporaryDirectory() as folder, _killed_at_the_end() as started:
        homes = [Path(folder, str(number)) for number in range(processes)]
        for number, home in enumerate(homes):
            home.mkdir()
            own = {"FLM_PROCESS": str(number), "FLM_ANSWER": str(home / "answer")}
            command = ["-m", f"multiprocess.{program}", *args]
            files = home / "out", home / "err"
            more = {**common, **own}
            started.append(forks.Process(command, more, *files, number))
        begin = time.monotonic()
        if during is not None:
            during(started)
        late = _wait(started, timeout)
        waited = time.monotonic() - begin
        ended = [
            _ended(process.wait(), home)
            for process, home in zip(started, homes, strict=True)
        ]
    if late:
        raise LaunchError(f"killed after {waited:.0f} s: processes {late}", ended)
    failed = [at for at, one in enumerate(ended) if one.code]
    if failed and check:
        raise LaunchError(f"failed: processes {failed}", ended)
    return ended


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a start of several processes, which is made where it is asked for.

    Attributes:
        name: of its module.
        processes: how many there are; they share eight devices.
        wanted: the names of all parts that are to run with as many processes.
        base: a folder that is the same in all workers of the tests.
    """

    name: str
    processes: int
    wanted: tuple[str, ...]
    base: Path

    @property
    def folder(self) -> Path:
        """What the part was given as its folder."""
        return Path(self._found()["folder"], self.name)

    @property
    def ended(self) -> list[Ended]:
        """How each process ended, with its answer and with the output of this part.

        Raises:
            LaunchError: this part failed in one of them.
        """
        found = self._found()
        ended = [Ended(**one) for one in found["ended"]]
        if found["why"]:
            raise LaunchError(f"part {self.name}: {found['why']}", ended)
        return ended

    def _found(self) -> dict[str, Any]:
        """Runs what no worker has run yet; the others wait for that one."""
        import fcntl  # not everywhere

        store = self.base / f"parts-{self.processes}.json"
        with store.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = json.loads(store.read_text()) if store.exists() else {}
            if self.name not in found:
                names = [name for name in self.wanted if name not in found]
                found |= run_parts(names, self.processes, self.base)
                store.write_text(json.dumps(found))
        return found[self.name]


def run_parts(names: Sequence[str], processes: int, base: Path) -> dict[str, Any]:
    """Runs parts in one start of processes; after one that fails the rest in another.

    Returns:
        Part → the folder, how each process ended, and why it failed, if it did.
    """
    found: dict[str, Any] = {}
    while left := [name for name in names if name not in found]:
        folder = Path(tempfile.mkdtemp(dir=base))
        for name in left:
            (folder / name).mkdir()
            module = importlib.import_module(f"multiprocess.{name}")
            if hasattr(module, "prepare"):
                module.prepare(folder / name)
        found |= _run_series(left, processes, folder)
    return found


def _run_series(names: Sequence[str], processes: int, folder: Path) -> dict[str, Any]:
    """Runs parts up to the first that fails."""
    limit = PART_SECONDS * len(names) + 60
    why = ""
    try:
        ended = run(
            *("series", str(folder), str(PART_SECONDS), *names),
            processes=processes,
            devices=8 // processes,
            timeout=limit,
        )
    except LaunchError as error:
        ended, why = error.ended, error.why
    found: dict[str, Any] = {}
    for name in names:
        own = [_ended_part(one, folder, name, at) for at, one in enumerate(ended)]
        done = all(one.answer is not None for one in own)
        # What fails after the last part has nobody else to tell of it.
        failed = why if not done or name == names[-1] else ""
        found[name] = {
            "folder": str(folder),
            "why": failed or ("" if done else "no answer"),
            "ended": [dataclasses.asdict(one) for one in own],
        }
        if not done:
            break
    return found


def _ended_part(whole: Ended, folder: Path, name: str, process: int) -> Ended:
    def read(kind: str) -> str:
        path = output(folder, name, process, kind)
        return path.read_text(errors="replace") if path.exists() else ""

    answer = read("answer")
    return Ended(
        whole.code,
        read("out"),
        # Before the first part there is output of the start.
        whole.err + read("err"),
        json.loads(answer) if answer else None,
    )


def output(folder: Path, name: str, process: int, kind: str) -> Path:
    """Where a process leaves what a part prints ("out", "err"), and its "answer"."""
    return folder / f"{name}-{process}.{kind}"


def join(shutdown: int = 20) -> int:
    """Makes this process one of the job; to be called before any device is touched.

    Args:
        shutdown: seconds that a process which has ended waits for the others.

    Returns:
        The number of this process.
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


def answer(value: Any) -> None:
    """Gives a JSON value to the test that started this process."""
    # Not printed: the transport writes to standard output as it likes.
    Path(os.environ["FLM_ANSWER"]).write_text(json.dumps(value))


def _ended(code: int, home: Path) -> Ended:
    answer = home / "answer"
    return Ended(
        code,
        (home / "out").read_text(errors="replace"),
        (home / "err").read_text(errors="replace"),
        json.loads(answer.read_text()) if answer.exists() else None,
    )


def _wait(started: Sequence[forks.Process], timeout: float) -> list[int]:
    """Waits; kills what is late, and says which processes that were."""
    deadline = time.monotonic() + timeout
    failed = False
    while None in (codes := [process.poll() for process in started]):
        if not failed and any(codes):
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > deadline:
            late = [at for at, code in enumerate(codes) if code is None]
            for at in late:
                started[at].kill()
            return late
        time.sleep(0.05)
    return []


@contextlib.contextmanager
def _killed_at_the_end() -> Iterator[list[forks.Process]]:
    """Collects processes; none outlives the block, whatever ends it."""
    started: list[forks.Process] = []
    try:
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
