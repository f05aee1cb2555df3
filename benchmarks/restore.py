"""Benchmark restoring a checkpoint against handwritten Orbax code.

    python benchmarks/restore.py --megabytes 512 --pairs 10

A checkpoint of arrays that are cut along their rows is restored onto eight devices, by
one process and by four, cut along rows and along columns. For memory, each run is a
process (or four) of its own. For the time against Orbax by hand, both run by turns in
one. The files are dropped from the page cache before every run. Prints a Markdown
table, then the targets as PASS or FAIL.
docs/benchmarks.md says more.
"""

import argparse
import datetime
import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

DEVICES, ARRAYS = 8, 16

HAND = "Orbax, shardings by hand"
REPLICATED = "replicated, then `device_put`"
NUMPY = "as NumPy arrays, then `device_put`"
OURS = "**restore**"
OURS_DIRECT = '**restore**, `"direct"`'
OURS_ALIGNED = '**restore**, `"aligned"`'
OURS_BROADCAST = '**restore**, `"broadcast"`'
OURS_LIMITED = "**restore**, `host_memory=`"
OURS_UNCHECKED = "**restore**, `verify=False`"
ALL = (
    *(HAND, REPLICATED, NUMPY, OURS, OURS_DIRECT),
    *(OURS_ALIGNED, OURS_BROADCAST, OURS_LIMITED, OURS_UNCHECKED),
)
# Target → how the arrays are to lie on a mesh of 2 × 4.
TARGETS = {
    "same axis": (("a", "b"), None),
    "other axis": (None, ("a", "b")),
    "one axis replicated": (None, "b"),
}

Cells = dict[tuple[str, str, int], list[dict[str, float]]]


# ------------------------------------------------------------------ inside one process


def started() -> None:
    """Make this process one of the job, before a device is touched."""
    import jax

    count = int(os.environ["BENCH_PROCESSES"])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES // count)
    if count > 1:
        jax.distributed.initialize(
            os.environ["BENCH_COORDINATOR"], count, int(os.environ["BENCH_PROCESS"])
        )


def sharding_of(spec: Any) -> Any:
    """A sharding on the mesh of all devices."""
    import jax
    import numpy as np

    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    return jax.sharding.NamedSharding(mesh, jax.P(*spec))


def save(path: str, megabytes: int) -> None:
    """Write random arrays, cut along their rows."""
    import jax
    import numpy as np

    import flax_layoutmap as flm

    side = int((megabytes * 2**20 / 4 / ARRAYS) ** 0.5) // 64 * 64
    rng = np.random.default_rng(0)
    sharding = sharding_of(TARGETS["same axis"])
    tree = {
        f"layer{at}": jax.device_put(rng.random((side, side), np.float32), sharding)
        for at in range(ARRAYS)
    }
    flm.checkpoint.save(path, tree)


def way(row: str, path: str, spec: Any) -> Callable[[], Any]:
    """What a row does."""
    import jax
    import numpy as np
    from orbax.checkpoint import v1

    import flax_layoutmap as flm

    sharding = sharding_of(spec)
    if row in (HAND, REPLICATED, NUMPY):
        shapes = v1.metadata(path).metadata  # a user knows the shapes of the model
        own = sharding_of(()) if row == REPLICATED else sharding
        target = {
            name: np.ndarray
            if row == NUMPY
            else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=own)
            for name, leaf in shapes.items()
        }

        def by_hand() -> Any:
            read = v1.load(path, target)
            if row != HAND:
                read = {k: jax.device_put(v, sharding) for k, v in read.items()}
            return read

        return by_hand
    layout_map = flm.LayoutMap(sharding.mesh)
    layout_map["layer"] = spec
    options: dict[str, Any] = {}
    if row != OURS:
        options["strategy"] = row.split('"')[1] if '"' in row else "auto"
    if row == OURS_UNCHECKED:
        options["verify"] = False
    if row == OURS_LIMITED:
        options["host_memory"] = 64 << 20
    return lambda: flm.checkpoint.restore(path, layout_map=layout_map, **options)


def resident() -> int:
    """Bytes of this process that are in memory now."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


class Peak:
    """The most memory that this process has while a block runs, beyond the start."""

    def __enter__(self) -> "Peak":
        self.start = self.most = resident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self.most = max(self.most, resident())

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.most = max(self.most, resident())

    @property
    def bytes(self) -> int:
        """Bytes beyond the start."""
        return self.most - self.start


def measure(row: str, path: str, target: str) -> dict[str, float]:
    """Run a row once on a small checkpoint, then once for the record."""
    import jax

    from flax_layoutmap.checkpoint._orbax import bytes_read

    jax.block_until_ready(way(row, f"{path}.small", TARGETS[target])())
    call = way(row, path, TARGETS[target])
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("start")
    before = bytes_read()
    with Peak() as peak:
        start = time.perf_counter()
        result = call()
        jax.block_until_ready(result)
        seconds = time.perf_counter() - start
    leaves = jax.tree.leaves(result)
    held = sum(s.data.nbytes for leaf in leaves for s in leaf.addressable_shards)
    parts = {
        (at, str(s.index)): s.data.nbytes
        for at, leaf in enumerate(leaves)
        for s in leaf.addressable_shards
    }
    total = sum(leaf.nbytes for leaf in leaves)
    return {
        "seconds": seconds,
        "read": bytes_read() - before,
        "needed": sum(parts.values()) / total * stored(path),
        "peak": peak.bytes,
        "held": held,
    }


def paired(path: str, target: str, pairs: int) -> list[tuple[float, float]]:
    """Seconds of Orbax by hand and of ours, by turns."""
    import jax
    from jax.experimental import multihost_utils

    calls = {row: way(row, path, TARGETS[target]) for row in (HAND, OURS)}
    for call in calls.values():
        jax.block_until_ready(call())
    found = []
    for pair in range(pairs):
        seconds = {}
        for row in (HAND, OURS) if pair % 2 else (OURS, HAND):
            if jax.process_index() == 0:
                forget(path)
            multihost_utils.sync_global_devices("next")
            start = time.perf_counter()
            jax.block_until_ready(calls[row]())
            seconds[row] = time.perf_counter() - start
        found.append((seconds[HAND], seconds[OURS]))
    return found


def stored(path: str) -> int:
    """Bytes of the arrays in the files."""
    return sum(file.stat().st_size for file in Path(path).glob("state/**/d/*"))


# ------------------------------------------------------------------------ the processes


def launched(processes: int, *args: str) -> list[Any]:
    """What each of several processes answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = []
    for number in range(processes):
        own = {
            "BENCH_PROCESSES": str(processes),
            "BENCH_PROCESS": str(number),
            "BENCH_COORDINATOR": f"127.0.0.1:{port}",
        }
        running.append(
            subprocess.Popen(
                [sys.executable, __file__, *args],
                env={**os.environ, **own},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    answers = []
    for process in running:
        out, err = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{args}: {err[-2000:]}")
        answers.append(json.loads(out.splitlines()[-1]))
    return answers


def forget(path: str) -> None:
    """Drop the files of a checkpoint from the page cache."""
    for file in Path(path).rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cell(row: str, path: str, target: str, processes: int) -> dict[str, float]:
    """One run of a row: the slowest process, and the worst ratios of all of them."""
    forget(path)
    found = launched(processes, "--row", row, "--path", path, "--target", target)
    return {
        "seconds": max(one["seconds"] for one in found),
        "read": max(one["read"] / one["needed"] for one in found),
        "bytes": sum(one["read"] for one in found),
        "peak": max(one["peak"] / one["held"] for one in found),
    }


def table(cells: Cells) -> str:
    """All cells as one Markdown table."""
    lines = [
        "| processes | target | row | seconds | bytes read ÷ needed | "
        "peak RSS ÷ bytes held | runs |",
        "|--:|---|---|--:|--:|--:|--:|",
    ]
    for (row, target, processes), runs in cells.items():
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        lines.append(
            f"| {processes} | {target} | {row} | {middle['seconds']:.2f} | "
            f"{middle['read']:.2f} | {middle['peak']:.2f} | {len(runs)} |"
        )
    return "\n".join(lines)


def verdict(text: str, value: float, limit: float) -> int:
    """Print one target; return 1 if it is missed."""
    missed = value > limit
    word = "FAIL" if missed else "PASS"
    print(f"- {word}: {text}: {value:.3g} (at most {limit:.3g})")
    return int(missed)


def targets(cells: Cells, pairs: dict[int, list[tuple[float, float]]]) -> int:
    """Print the targets over the cells; return how many are missed."""

    def median(row: str, target: str, processes: int, key: str) -> float:
        return statistics.median(run[key] for run in cells[row, target, processes])

    missed = 0
    for processes in (1, 4):
        ratios = [ours / hand for hand, ours in pairs[processes]]
        missed += verdict(
            f"{processes} processes, same axis: time of restore ÷ Orbax by hand, "
            f"median of {len(ratios)} pairs ({min(ratios):.2f} to {max(ratios):.2f})",
            statistics.median(ratios),
            1.10,
        )
        bytes_ = [median(row, "same axis", processes, "bytes") for row in (OURS, HAND)]
        text = f"{processes} processes, same axis: bytes read ÷ those of Orbax by hand"
        missed += verdict(text, bytes_[0] / bytes_[1], 1.001)
    for target in TARGETS:
        for processes in (1, 4):
            peaks = [median(row, target, processes, "peak") for row in (OURS, HAND)]
            text = f"{processes} processes, {target}: peak RSS ÷ that of Orbax by hand"
            missed += verdict(text, peaks[0] / peaks[1], 1.0)
    read = median(OURS, "other axis", 4, "read")
    return missed + verdict("4 processes, other axis: read ÷ needed", read, 1.05)


def planned(folder: str) -> int:
    """Times the metadata and the plan; returns how many targets are missed."""
    import numpy as np
    from orbax.checkpoint import v1

    import flax_layoutmap as flm

    missed = 0
    for count in (3_000, 10_000):
        path = f"{folder}/{count}"
        flm.checkpoint.save(
            path,
            {f"layer{at}": np.ones((1024, 16), np.int8) for at in range(count)},
        )
        times: dict[str, list[float]] = {"orbax": [], "inspect": [], "plan": []}
        layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("data=64,model=16"))
        layout_map["layer"] = ("data", "model")
        calls: dict[str, Callable[[], Any]] = {
            "orbax": lambda p=path: v1.metadata(p),
            "inspect": lambda p=path: flm.checkpoint.inspect(p),
            "plan": lambda p=path, m=layout_map: flm.checkpoint.plan(
                p, layout_map=m, devices_per_process=8
            ),
        }
        for _ in range(5):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
        middle = {name: statistics.median(found) for name, found in times.items()}
        print(
            f"- {count:,} leaves: metadata {middle['orbax']:.2f} s by Orbax, inspect "
            f"{middle['inspect']:.2f} s, plan {middle['plan']:.2f} s"
        )
        if count == 3_000:
            ratio = middle["inspect"] / middle["orbax"]
            missed += verdict("inspect ÷ Orbax's metadata, 3,000 leaves", ratio, 1.1)
        else:
            beyond = middle["plan"] - middle["orbax"]
            text = "seconds to plan 10,000 leaves × 1,024 devices, beyond the metadata"
            missed += verdict(text, beyond, 2.0)
    return missed


def main() -> int:
    """Print the tables and the targets; 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--runs", type=int, default=1)
    for name in ("--row", "--path", "--target", "--save"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--by-turns", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row or given.save or given.by_turns:
        started()
        if given.save:
            save(given.save, given.megabytes)
            save(f"{given.save}.small", 1)
        answer: Any = None
        if given.row:
            answer = measure(given.row, given.path, given.target)
        if given.by_turns:
            answer = paired(given.path, "same axis", given.pairs)
        print(json.dumps(answer))
        return 0
    print(f"{datetime.date.today()}, Python {platform.python_version()}, ", end="")
    names = ("jax", "orbax-checkpoint", "tensorstore")
    print(", ".join(f"{name} {metadata.version(name)}" for name in names), end="")
    print(f", {os.cpu_count()} cores; {given.megabytes} MiB\n")
    cells: Cells = {}
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/saved"
        launched(1, "--save", path, "--megabytes", str(given.megabytes))
        pairs: dict[int, list[tuple[float, float]]] = {}
        for processes in (1, 4):
            args = ("--pairs", str(given.pairs), "--path", path, "--by-turns")
            each = launched(processes, *args)
            pairs[processes] = [
                (max(p[0] for p in pair), max(p[1] for p in pair))
                for pair in zip(*each, strict=True)
            ]
            for target in TARGETS:
                for _ in range(given.runs):
                    for row in ALL:
                        one = cell(row, path, target, processes)
                        cells.setdefault((row, target, processes), []).append(one)
        print(table(cells), "\n")
        missed = targets(cells, pairs) + planned(folder)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
