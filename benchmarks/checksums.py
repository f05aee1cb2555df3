"""Benchmark checksums: throughput, and their share of a save and a restore.

    python benchmarks/checksums.py --mebibytes 256 --rounds 9

Eight virtual devices of the CPU. Every row of a table is measured in turn, round after
round, so that all of them see the same machine. Prints two Markdown tables, then the
target as PASS or FAIL.
"""

import argparse
import datetime
import hashlib
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import flax_layoutmap as flm  # noqa: E402
from flax_layoutmap._core import checksums as _checksums  # noqa: E402
from flax_layoutmap.checkpoint._read import verify  # noqa: E402

P = PartitionSpec
LAYOUTS: dict[str, Any] = {
    "by rows": P(("data", "model")),
    "by columns": P(None, ("data", "model")),
    "2-D": P("data", "model"),
    "replicated": P(),
}
DTYPES = ("float32", "bfloat16")
OURS = "**checksums** (NumPy, threads)"
PROGRAM = "program for accelerators"
SAVE_SHARE, RESTORE_SHARE = 0.05, 0.1

Timed = tuple[float, float]  # seconds by the clock, and of the CPU


def timed(call: Callable[[], object]) -> Timed:
    """How long a call takes."""
    start, used = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - start, time.process_time() - used


def in_turn(
    calls: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, list[Timed]]:
    """Measure each call in each round; every other round goes backwards."""
    found: dict[str, list[Timed]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in list(calls)[:: -1 if number % 2 else 1]:
            found[name].append(timed(calls[name]))
    return found


def medians(found: Sequence[Timed]) -> Timed:
    """Of the seconds by the clock, and of those of the CPU."""
    return (
        statistics.median(clock for clock, _ in found),
        statistics.median(cpu for _, cpu in found),
    )


def mesh() -> Mesh:
    """Two by four devices."""
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))


def matrix(mebibytes: int, dtype: str) -> np.ndarray:
    """Normal random numbers, in rows of 4,096."""
    rows = (mebibytes << 20) // 4096 // jnp.dtype(dtype).itemsize
    numbers = np.random.default_rng(0).standard_normal((rows, 4096), np.float32)
    return numbers.astype(dtype)


# ------------------------------------------------------------------ bytes per second


def on_devices(array: jax.Array) -> int:
    """The sum by the program for accelerators, here on virtual devices."""
    with jax.enable_x64(True):
        run = _checksums.program(array.sharding, array.shape, array.dtype)  # pyright: ignore[reportArgumentType]
        return int(np.sum(np.asarray(run(array))))


def ways(host: np.ndarray) -> dict[str, Callable[[], object]]:
    """Every way to sum an array, by its row of the table."""
    content: Any = host.reshape(-1).view(np.uint8)
    found: dict[str, Callable[[], object]] = {
        f"a NumPy array | {OURS}": lambda: _checksums.checksums({"x": host}),
        "a NumPy array | `zlib.crc32`": lambda: zlib.crc32(content),
        "a NumPy array | `hashlib.blake2b`": lambda: hashlib.blake2b(content),
    }
    for layout, spec in LAYOUTS.items():
        array = jax.device_put(host, NamedSharding(mesh(), spec))
        jax.block_until_ready(array)
        found[f"{layout} | {OURS}"] = lambda x=array: _checksums.checksums({"x": x})
        if layout != "replicated":  # eight times the work on the same cores
            found[f"{layout} | {PROGRAM}"] = lambda x=array: on_devices(x)
    return found


def speeds(mebibytes: int, rounds: int) -> str:
    """GB/s of every way, as a table."""
    lines = [
        "| dtype | layout | how | GB/s | GB per CPU second | first call |",
        "|---|---|---|--:|--:|--:|",
    ]
    for dtype in DTYPES:
        host = matrix(mebibytes, dtype)
        calls = ways(host)
        first = {name: timed(call)[0] for name, call in calls.items()}
        for name, found in in_turn(calls, rounds).items():
            clock, cpu = medians(found)
            lines.append(
                f"| {dtype} | {name} | {host.nbytes / clock / 1e9:.1f} | "
                f"{host.nbytes / cpu / 1e9:.1f} | {first[name] * 1e3:.0f} ms |"
            )
    return "\n".join(lines)


# --------------------------------------------- share of a save, and of a restore


def trees(mebibytes: int) -> dict[str, Any]:
    """What is saved."""
    rng = np.random.default_rng(1)
    large = {
        f"{mebibytes} MiB of {dtype}, 8 leaves": {
            f"large{at}": matrix(mebibytes // 8, dtype) for at in range(8)
        }
        for dtype in DTYPES
    }
    small = {f"small{at}": rng.standard_normal(1024, np.float32) for at in range(300)}
    return {**large, "300 leaves of 4 KiB": small}


def shares(mebibytes: int, rounds: int) -> tuple[str, list[tuple[float, float]]]:
    """What saves and restores take with and without checksums, and the shares."""
    lines = [
        "| tree | what | without | with | ratio of the pairs | checksums alone | "
        "share | share of CPU time |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    found = []
    for name, tree in trees(mebibytes).items():
        layout_map = flm.LayoutMap(flm.DeviceMesh("data=2,model=4"), strict=False)
        if "large0" in tree:
            layout_map["large"] = ("data", "model")
        placed = layout_map.place(tree)
        with tempfile.TemporaryDirectory() as folder:

            def save(on: bool, tree: Any = placed, rules: Any = layout_map) -> None:
                path = Path(folder, str(on))
                if path.exists():
                    shutil.rmtree(path)
                flm.checkpoint.save(path, tree, layout_map=rules, checksums=on)

            def restore(on: bool, rules: Any = layout_map) -> None:
                path = Path(folder, "True")
                tree = flm.checkpoint.restore(path, layout_map=rules, verify=on)
                jax.block_until_ready(tree)

            calls: dict[str, Callable[[], object]] = {
                "save, False": lambda: save(False),
                "save, True": lambda: save(True),
                "restore, False": lambda: restore(False),
                "restore, True": lambda: restore(True),
                "alone": lambda tree=placed: _checksums.checksums(tree),
                "verify": lambda: verify(Path(folder, "True")),
            }
            for call in calls.values():
                call()
            times = in_turn(calls, rounds)
        median = {row: medians(cells) for row, cells in times.items()}
        clocks = []
        for what in ("save", "restore"):
            without, on = f"{what}, False", f"{what}, True"
            pairs = zip(times[on], times[without], strict=True)
            ratio = statistics.median(a[0] / b[0] for a, b in pairs)
            clock, cpu = (median["alone"][at] / median[without][at] for at in (0, 1))
            clocks.append(clock)
            lines.append(
                f"| {name} | {what} | {median[without][0] * 1e3:.0f} ms | "
                f"{median[on][0] * 1e3:.0f} ms | {ratio:.2f} | "
                f"{median['alone'][0] * 1e3:.1f} ms | {clock:.1%} | {cpu:.1%} |"
            )
        found.append((clocks[0], clocks[1]))
        lines.append(f"| {name} | verify | | {median['verify'][0] * 1e3:.0f} ms |||||")
    return "\n".join(lines), found


def main() -> int:
    """Print the tables and the target; 1 if it is missed."""
    parser = argparse.ArgumentParser(description="What checksums cost.")
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    versions = ", ".join(
        f"{name} {metadata.version(name)}"
        for name in ("jax", "numpy", "orbax-checkpoint")
    )
    print(
        f"{datetime.date.today()}, Python {platform.python_version()}, {versions}, "
        f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}\n"
    )
    print(speeds(min(given.mebibytes, 64), given.rounds), flush=True)
    table, found = shares(given.mebibytes, given.rounds)
    print(f"\n{table}\n")
    missed = 0
    limits = {"save": SAVE_SHARE, "restore": RESTORE_SHARE}
    for (what, limit), each in zip(
        limits.items(), zip(*found, strict=True), strict=True
    ):
        worst = max(each)
        word = "PASS" if worst < limit else "FAIL"
        text = f"checksums take less than {limit:.0%} of a {what}"
        print(f"- {word}: {text}: {worst:.1%}")
        missed += worst >= limit
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
