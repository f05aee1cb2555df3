"""Kill training at random moments and check that no saved step is lost.

    python benchmarks/soak.py --rounds 20

Each round starts 1, 2 or 4 processes that train a tiny model and save every step,
kills one of them with SIGKILL at a random moment (and the others a little later, as a
scheduler does), and checks in a process of its own: the latest step is at least the
last one that was reported as saved; it restores on another mesh, and its checksums are
right; every number is the one that training gives. The next round goes on from there
with another number of processes, which check what they restored as well. Prints a
Markdown table; the exit code is 1 if anything was lost.
"""

import argparse
import dataclasses
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

DEVICES = 8
SHAPE = (64, 8192)
# Processes → the mesh that they train on.
MESHES = {1: "data=8,model=1", 2: "data=4,model=2", 4: "data=2,model=4"}
# Never the same as in training.
LOOK_MESH = "data=1,model=8"
NEVER = 10**9


# ------------------------------------------------------------- what is trained


def rules(mesh: str) -> Any:
    """The rules on a mesh over the devices of all processes."""
    import flax_layoutmap as flm

    layout_map = flm.LayoutMap(flm.DeviceMesh(mesh))
    layout_map["w"] = ("data", "model")
    layout_map["v"] = ("model", "data")
    return layout_map


def create_fn() -> dict[str, Any]:
    """The state before the first step."""
    import jax.numpy as jnp

    table = jnp.arange(SHAPE[0] * SHAPE[1], dtype=jnp.float32).reshape(SHAPE)
    return {"w": table, "v": jnp.zeros(SHAPE), "count": jnp.zeros((), jnp.int32)}


def train_step(state: dict[str, Any]) -> dict[str, Any]:
    """One step."""
    count = state["count"]
    return {"w": state["w"] + 1, "v": (state["v"] + count) % 4096, "count": count + 1}


def wrong_leaves(state: dict[str, Any], step: int) -> list[str]:
    """Which leaves do not hold what they do after a step, as far as they are here."""
    import numpy as np

    count = step + 1
    table = np.arange(SHAPE[0] * SHAPE[1], dtype=np.float32).reshape(SHAPE)
    total = np.float32(count * (count - 1) // 2 % 4096)
    values = {
        "w": table + np.float32(count),
        "v": np.full(SHAPE, total),
        "count": np.asarray(count, np.int32),
    }
    return [
        path
        for path, value in values.items()
        for shard in state[path].addressable_shards
        if not np.array_equal(np.asarray(shard.data), value[shard.index])
    ]


class Batches:
    """Data whose state is the number of batches that were taken."""

    taken = 0

    def get_state(self) -> int:
        return self.taken

    def set_state(self, state: int) -> None:
        self.taken = state


def work(folder: str, process: int, processes: int, address: str, steps: int) -> int:
    """Train and save; record each step that was reported as saved."""
    import jax

    import flax_layoutmap as flm

    if processes > 1:
        flm.keras.initialize(
            address, processes, process, initialization_timeout=60,
            heartbeat_timeout_seconds=10,
        )  # fmt: skip
    layout_map, batches = rules(MESHES[processes]), Batches()
    jitted = flm.jit(train_step, layout_map=layout_map, donate_argnames=("state",))
    reports = Path(folder, f"reports_{process}")
    with flm.checkpoint.Checkpointer(
        Path(folder, "run"), layout_map=layout_map, keep=3
    ) as checkpointer:
        state, start = checkpointer.restore_or_init(create_fn, data=batches)
        if start and (wrong_leaves(state, start - 1) or batches.taken != start):
            print(f"step {start - 1} is wrong: {wrong_leaves(state, start - 1)}")
            return 9
        Path(folder, f"alive_{process}").touch()
        pause = random.Random(process)
        for step in range(start, min(start + steps, NEVER)):
            state = jitted(state)
            batches.taken += 1
            checkpointer.save(step, state, data=batches)
            if step > start:
                reports.write_text(f"{step - 1}\n")  # save has waited for it
            if jax.process_count() == 1:
                time.sleep(pause.random() * 0.05)
    reports.write_text(f"{checkpointer.latest}\n")
    return 0


def look(folder: str) -> int:
    """Print the latest step, and say whether it is what it should be."""
    import flax_layoutmap as flm

    batches = Batches()
    checkpointer = flm.checkpoint.Checkpointer(
        Path(folder, "run"), layout_map=rules(LOOK_MESH)
    )
    state, start = checkpointer.restore_or_init(create_fn, data=batches, verify=True)
    wrong = wrong_leaves(state, start - 1) if start else []
    if start and batches.taken != start:
        wrong.append("data")
    print(f"latest {start - 1} {','.join(wrong) or 'right'}")
    return 0


# ----------------------------------------------------------------- the rounds


@dataclasses.dataclass(frozen=True)
class Round:
    """What one round showed."""

    processes: int
    killed: int
    seconds: float
    reported: int
    latest: int
    verdict: str
    unfinished: int

    @property
    def is_good(self) -> bool:
        """Whether nothing was lost, and all is right."""
        return self.verdict == "right" and self.latest >= self.reported


def start(folder: str, devices: int, *words: object) -> "subprocess.Popen[str]":
    """Start this file again, as a worker."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    environment.pop("XLA_FLAGS", None)
    # Without processes to talk to there is no transport to choose.
    if devices == DEVICES:
        del environment["JAX_CPU_COLLECTIVES_IMPLEMENTATION"]
    return subprocess.Popen(
        [sys.executable, __file__, "--folder", folder, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def start_all(folder: str, processes: int, steps: int) -> Any:
    """Start the processes of one job."""
    for old in Path(folder).glob("*_[0-9]"):
        old.unlink()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    return [
        start(folder, DEVICES // processes, "--work", at, processes, address, steps)
        for at in range(processes)
    ]


def kill_round(folder: str, processes: int, choose: random.Random) -> tuple[int, float]:
    """One job that is killed; which process was, and when."""
    started = start_all(folder, processes, NEVER)
    killed = choose.randrange(processes)
    try:
        deadline = time.monotonic() + 180
        # One in five is killed before it has restored anything.
        early = choose.random() < 0.2
        alive = [Path(folder, f"alive_{at}") for at in range(processes)]
        while not early and not all(one.exists() for one in alive):
            ended = [one for one in started if one.poll() is not None]
            if ended or time.monotonic() > deadline:
                texts = [one.communicate()[0] for one in ended]
                raise RuntimeError("\n".join(texts) or "they do not begin")
            time.sleep(0.01)
        seconds = choose.random() * (6.0 if early else 4.0)
        time.sleep(seconds)
        started[killed].send_signal(signal.SIGKILL)
        time.sleep(choose.random())
    finally:
        for one in started:
            one.kill()
        for one in started:
            one.communicate()
    return killed, seconds if not early else -seconds


def reported(folder: str) -> int:
    """The last step that any process was told is saved; -1 without one."""
    texts = [path.read_text() for path in Path(folder).glob("reports_*")]
    # Killed while it wrote, a process leaves an empty file.
    return max((int(text) for text in texts if text.endswith("\n")), default=-1)


def looked(folder: str) -> tuple[int, str]:
    """The latest step, and whether it is right, as another process sees it."""
    with start(folder, DEVICES, "--look") as process:
        text, _ = process.communicate(timeout=180)
    line = next((x for x in text.splitlines() if x.startswith("latest ")), "")
    if not line:
        return -1, text.strip().splitlines()[-1] if text.strip() else "no word"
    _, latest, verdict = line.split(" ", 2)
    return int(latest), verdict


def run_round(folder: str, processes: int, choose: random.Random, known: int) -> Round:
    """Start, kill, check; `known` is a step that was there before."""
    killed, seconds = kill_round(folder, processes, choose)
    unfinished = len(list(Path(folder, "run").glob("*orbax-checkpoint-tmp*")))
    latest, verdict = looked(folder)
    told = max(known, reported(folder))
    return Round(processes, killed, seconds, told, latest, verdict, unfinished)


def finish(folder: str) -> list[int]:
    """A last job that nobody kills; the exit codes."""
    started = start_all(folder, 2, 3)
    for one in started:
        one.communicate(timeout=180)
    return [one.returncode for one in started]


def main() -> int:
    """Print the table; 1 if anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    for name in ("--folder", "--work"):
        nargs = 4 if name == "--work" else None
        parser.add_argument(name, nargs=nargs, help=argparse.SUPPRESS)
    parser.add_argument("--look", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        process, processes, address, steps = given.work
        return work(given.folder, int(process), int(processes), address, int(steps))
    if given.look:
        return look(given.folder)

    choose, rounds, before, known = random.Random(given.seed), [], 0, -1
    print(
        "| round | processes | killed | at | reported | latest | values | left over |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.rounds):
            before = choose.choice([count for count in MESHES if count != before])
            done = run_round(folder, before, choose, known)
            rounds.append(done)
            known = max(known, done.reported, done.latest)
            when = (
                f"{done.seconds:.2f} s of training"
                if done.seconds > 0
                else f"{-done.seconds:.2f} s after its start"
            )
            print(
                f"| {number + 1} | {done.processes} | {done.killed} | {when} | "
                f"{done.reported} | {done.latest} | {done.verdict} | "
                f"{done.unfinished} |",
                flush=True,
            )
        codes = finish(folder)
        latest, verdict = looked(folder)
    good = sum(done.is_good for done in rounds)
    print(
        f"\n{good} of {len(rounds)} rounds lost nothing; at the end step {latest} is "
        f"{verdict}, exit codes {codes}"
    )
    return 0 if good == len(rounds) and verdict == "right" and not any(codes) else 1


if __name__ == "__main__":
    sys.exit(main())
