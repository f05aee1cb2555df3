"""Checkpoints and safetensors, against handwritten code.

    python benchmarks/checkpoint.py --megabytes 512 --runs 3
    python benchmarks/checkpoint.py --training --megabytes 512 --runs 7

Square arrays of float32, cut along their rows by one process, are saved, and restored
onto a mesh of 2 × 4 devices by one process and by four: cut along the same dim and
along the other one. Each run is a process (or four) of its own, which has done the same
with small arrays before; the files are dropped from the page cache first. Prints a
Markdown table of medians: the slowest process, the bytes that it reads with system
calls ÷ those of its shards, and its peak of memory beyond the start ÷ its shards.

With `--training`, an NNX model with its Adam state, of 62 small leaves and of 332 that
hold the megabytes, is saved and restored in one process, in turns with what one writes
by hand: `ocp.StandardCheckpointer` and `nnx.update`.
"""

import argparse
import datetime
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1

import flax_layoutmap as flm

DEVICES, ARRAYS = 8, 16
LAYOUTS = {"rows": (("a", "b"), None), "columns": (None, ("a", "b"))}
Call = Callable[[], Any]

# ------------------------------------------------------------------ inside one process


def sharding_of(layout: str) -> NamedSharding:
    """A sharding on the mesh of all devices."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), (jax.sharding.AxisType.Auto,) * 2)
    return NamedSharding(mesh, PartitionSpec(*LAYOUTS[layout]))


def arrays(megabytes: int) -> dict[str, jax.Array]:
    """Random arrays, cut along their rows."""
    side = int((megabytes * 2**20 / 4 / ARRAYS) ** 0.5) // 64 * 64
    rng = np.random.default_rng(0)
    return {
        f"layer{number}": jax.device_put(
            rng.random((side, side), np.float32), sharding_of("rows")
        )
        for number in range(ARRAYS)
    }


def rules(layout: str) -> flm.LayoutMap:
    """Rules with one layout for all arrays."""
    layout_map = flm.LayoutMap(sharding_of(layout).mesh)
    layout_map["layer"] = LAYOUTS[layout]
    return layout_map


def shapes(path: str, layout: str) -> dict[str, Any]:
    """What a user knows of a model: its shapes, and shardings written by hand."""
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding_of(layout))
        for name, leaf in v1.metadata(path).metadata.items()
    }


def orbax_save(path: str, layout: str, tree: Any) -> Call:
    return lambda: v1.save(f"{path}.out", tree, overwrite=True)


def save(path: str, layout: str, tree: Any) -> Call:
    return lambda: flm.checkpoint.save(f"{path}.out", tree, overwrite=True)


def orbax_restore(path: str, layout: str, _: Any) -> Call:
    target = shapes(path, layout)
    return lambda: v1.load(path, target)


def replicated(path: str, layout: str, _: Any) -> Call:
    """What is written where shardings are not: every process reads everything."""
    target = dict.fromkeys(shapes(path, layout), np.ndarray)
    return lambda: jax.device_put(v1.load(path, target), sharding_of(layout))


def restore(path: str, layout: str, _: Any) -> Call:
    layout_map = rules(layout)
    return lambda: flm.checkpoint.restore(path, layout_map=layout_map)


def unverified(path: str, layout: str, _: Any) -> Call:
    layout_map = rules(layout)
    return lambda: flm.checkpoint.restore(path, layout_map=layout_map, verify=False)


def load_file(path: str, layout: str, _: Any) -> Call:
    from safetensors.numpy import load_file

    file = f"{path}.st/model.safetensors"
    return lambda: jax.device_put(load_file(file), sharding_of(layout))


def slices(path: str, layout: str, _: Any) -> Call:
    """Each shard as a slice of the file."""
    from safetensors import safe_open

    sharding = sharding_of(layout)

    def load() -> Any:
        with safe_open(f"{path}.st/model.safetensors", "np") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}
            return [
                jax.make_array_from_callback(
                    tuple(part.get_shape()), sharding, part.__getitem__
                )
                for part in parts.values()
            ]

    return load


def restore_safetensors(path: str, layout: str, _: Any) -> Call:
    layout_map, target = rules(layout), shapes(path, layout)
    mapping = [("(.*)", r"\1")]
    return lambda: flm.checkpoint.restore_safetensors(
        f"{path}.st", target, layout_map=layout_map, mapping=mapping
    )


Prepare = Callable[[str, str, Any], Call]
ROWS: dict[str, Prepare] = {
    "Orbax, `save`": orbax_save,
    "**save**": save,
    "Orbax, shardings by hand": orbax_restore,
    "Orbax, as NumPy arrays, then `device_put`": replicated,
    "**restore**": restore,
    "**restore**, `verify=False`": unverified,
    "`safetensors.numpy.load_file`, `device_put`": load_file,
    "`safe_open`, `get_slice`, `make_array_from_callback`": slices,
    "**restore_safetensors**": restore_safetensors,
}
ORBAX_ROWS = list(ROWS)[2:6]
TABLE = [  # processes, layout, rows
    (1, "rows", list(ROWS)),
    (1, "columns", list(ROWS)[2:]),
    (4, "rows", ORBAX_ROWS),
    (4, "columns", ORBAX_ROWS),
]


def join_job() -> None:
    """Make this process one of the job, before a device is touched."""
    count = int(os.environ["BENCH_PROCESSES"])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES // count)
    if count > 1:
        address, number = os.environ["BENCH_ADDRESS"], os.environ["BENCH_PROCESS"]
        jax.distributed.initialize(address, count, int(number))


def write(path: str, megabytes: int) -> None:
    """A checkpoint and a safetensors file of the same arrays."""
    from safetensors.numpy import save_file

    tree = arrays(megabytes)
    flm.checkpoint.save(path, tree)
    os.mkdir(f"{path}.st")
    as_numpy = {name: np.asarray(array) for name, array in tree.items()}
    save_file(as_numpy, f"{path}.st/model.safetensors")


def field_of(file: str, name: str) -> int:
    """A number in a file of /proc/self."""
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    return int(next(x for x in lines if x.startswith(f"{name}:")).split()[1])


def measure(row: str, path: str, layout: str, megabytes: int) -> dict[str, float]:
    """Run a row once on small arrays, then once for the record."""
    tree = arrays(megabytes) if "save" in row else None
    small = arrays(1) if "save" in row else None
    jax.block_until_ready(ROWS[row](f"{path}.small", layout, small)())
    call = ROWS[row](path, layout, tree)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("start")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    read, resident = field_of("io", "rchar"), field_of("status", "VmRSS")
    start = time.perf_counter()
    result = jax.block_until_ready(call())
    seconds = time.perf_counter() - start
    grown = (field_of("status", "VmHWM") - resident) * 1024
    shards = [
        shard
        for leaf in jax.tree.leaves(tree or result)
        for shard in leaf.addressable_shards
    ]
    held = sum(shard.data.nbytes for shard in shards)
    read = field_of("io", "rchar") - read
    return {"seconds": seconds, "read": read / held, "peak": grown / held}


# ------------------------------------------------------------------------ training


class Model(nnx.Module):
    """Square layers."""

    def __init__(self, layers: int, width: int) -> None:
        rngs = nnx.Rngs(0)
        made = (nnx.Linear(width, width, rngs=rngs) for _ in range(layers))
        self.layers = nnx.List(made)


def turns(folder: str, layers: int, width: int) -> dict[str, Call]:
    """Name → what to time, each on its own checkpoint of one training state."""
    layout_map = flm.LayoutMap("data=2,model=4")
    layout_map["kernel"] = ("data", "model")
    layout_map["bias"] = None

    def make() -> dict[str, Any]:
        model = Model(layers, width)
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        return {"model": model, "optimizer": optimizer}

    objects = flm.create(make, layout_map)
    checkpointer = ocp.StandardCheckpointer()
    ours: dict[str, Any] = {"layout_map": layout_map}

    def state() -> Any:
        return {name: nnx.state(node) for name, node in objects.items()}

    def save_by_hand() -> None:
        checkpointer.save(f"{folder}/hand", state(), force=True)
        checkpointer.wait_until_finished()

    def restore_by_hand() -> Any:
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state())
        restored = checkpointer.restore(f"{folder}/hand", abstract)
        for name, node in objects.items():
            nnx.update(node, restored[name])
        return restored

    return {
        "save: `StandardCheckpointer`": save_by_hand,
        "save: **save**": lambda: flm.checkpoint.save(
            f"{folder}/ours", objects, overwrite=True, **ours
        ),
        "restore: `StandardCheckpointer`": restore_by_hand,
        "restore: **restore**": lambda: flm.checkpoint.restore(
            f"{folder}/ours", objects, **ours
        ),
        "restore: **restore**, `verify=False`": lambda: flm.checkpoint.restore(
            f"{folder}/ours", objects, verify=False, **ours
        ),
    }


def print_training(megabytes: int, runs: int) -> None:
    """Print medians of wall and CPU time, and what they are of those by hand."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    print("| leaves | what | ms | ÷ by hand | CPU ms | ÷ by hand |")
    print("|--:|---|--:|--:|--:|--:|")
    wide = int((megabytes * 2**20 / 4 / 3 / 55) ** 0.5) // 8 * 8
    for layers, width in ((10, 64), (55, wide)):
        with tempfile.TemporaryDirectory() as folder:
            calls = turns(folder, layers, width)
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
            for _ in range(runs + 1):
                for name, call in calls.items():
                    start, busy = time.perf_counter(), time.process_time()
                    jax.block_until_ready(jax.tree.leaves(call()))
                    wall = time.perf_counter() - start
                    times[name].append((wall, time.process_time() - busy))
        hand: dict[str, tuple[float, float]] = {}
        for name, several in times.items():
            wall = statistics.median(wall for wall, _ in several[1:]) * 1e3
            busy = statistics.median(busy for _, busy in several[1:]) * 1e3
            by_hand = hand.setdefault(name.partition(": ")[0], (wall, busy))
            print(f"| {layers * 6 + 2} | {name} | {wall:.0f} ", end="")
            print(f"| {wall / by_hand[0]:.2f} | {busy:.0f} | {busy / by_hand[1]:.2f} |")


# ------------------------------------------------------------------------ the processes


def launch(processes: int, *args: str) -> list[dict[str, float]]:
    """What each of several processes answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    shared = {"BENCH_PROCESSES": str(processes), "BENCH_ADDRESS": address}
    running = [
        subprocess.Popen(
            [sys.executable, __file__, *args],
            env={**os.environ, **shared, "BENCH_PROCESS": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(processes)
    ]
    answers = []
    for process in running:
        out, err = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{args}: {err[-2000:]}")
        answers.append(json.loads(out.splitlines()[-1]))
    return answers


def forget(folder: str) -> None:
    """Drop files from the page cache."""
    for file in filter(Path.is_file, Path(folder).rglob("*")):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def print_rows(folder: str, megabytes: str, runs: int) -> None:
    """Print the rows of the table."""
    for processes, layout, rows in TABLE:
        cells: dict[str, list[dict[str, float]]] = {row: [] for row in rows}
        for _ in range(runs):
            for row in rows:
                forget(folder)
                args = ["--row", row, "--path", f"{folder}/saved"]
                args += ["--layout", layout, "--megabytes", megabytes]
                answers = launch(processes, *args)
                worst = {key: max(a[key] for a in answers) for key in answers[0]}
                cells[row].append(worst)
        for row, found in cells.items():
            seconds, read, peak = (
                statistics.median(cell[key] for cell in found) for key in found[0]
            )
            shown = f"{read:.2f}" if "save" not in row else ""
            print(f"| {processes} | {layout} | {row} ", end="")
            print(f"| {seconds:.2f} | {shown} | {peak:.2f} |")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--training", action="store_true")
    for name in ("--row", "--path", "--layout"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.path:
        join_job()
        if given.row:
            answer = measure(given.row, given.path, given.layout, given.megabytes)
        else:
            write(given.path, given.megabytes)
            answer = write(f"{given.path}.small", 1)
        print(json.dumps(answer))
        return
    if given.training:
        print_training(given.megabytes, given.runs)
        return
    names = ("jax", "orbax-checkpoint", "tensorstore", "safetensors")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    print(f"{datetime.date.today()}, Python {platform.python_version()}, {versions}; ")
    print(f"{given.megabytes} MiB, medians of {given.runs}\n")
    print("| processes | cut along | row | seconds | read ÷ shards | peak ÷ shards |")
    print("|--:|---|---|--:|--:|--:|")
    megabytes = str(given.megabytes)
    with tempfile.TemporaryDirectory() as folder:
        launch(1, "--path", f"{folder}/saved", "--megabytes", megabytes)
        print_rows(folder, megabytes, given.runs)


if __name__ == "__main__":
    main()
