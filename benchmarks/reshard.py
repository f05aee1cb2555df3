"""Benchmark `flm.reshard`: peak memory and time, against `jax.device_put`.

    python benchmarks/reshard.py --mebibytes 64 --leaves 4 --chunk 8

Eight virtual devices of the CPU, so that the memory of the process is that of all
devices. Each cell is a process of its own. The peak is above what was held before the
move, so the source is not in it; a device holds its target shards and the temporaries
of a chunk. Prints a Markdown table, then the targets as PASS or FAIL.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

MOVES = {
    "data+fsdp → fsdp, other dim": (
        ("data=2,fsdp=4", (("data", "fsdp"), None)),
        ("data=2,fsdp=4", (None, "fsdp")),
    ),
    "fsdp → fsdp × tensor": (
        ("fsdp=8", ("fsdp", None)),
        ("fsdp=4,tensor=2", ("fsdp", "tensor")),
    ),
    "fsdp × tensor → fsdp, another mesh": (
        ("fsdp=2,tensor=2,data=2", ("fsdp", "tensor")),
        ("fsdp=8", ("fsdp", None)),
    ),
}
WAYS = ("jax.device_put", "reshard", "reshard, verify=False")
_STATUS = Path("/proc/self/statm")


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(_STATUS.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak(threading.Thread):
    """The highest resident memory while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes, self._ended = 0, threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.001):
            self.bytes = max(self.bytes, resident())

    def end(self) -> int:
        self._ended.set()
        self.join()
        return self.bytes


def measure(move: str, way: str, mebibytes: int, leaves: int, chunk: int) -> None:
    """Print the result of one cell as JSON; in a process of its own."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    import jax.numpy as jnp

    import flax_layoutmap as flm

    maps = []
    for mesh, axes in MOVES[move]:
        layout_map = flm.LayoutMap(mesh)
        layout_map["kernel"] = axes
        maps.append(layout_map)
    columns = mebibytes * 2**20 // 4 // 2048

    def made(rows: int) -> Any:
        tree = {
            f"kernel_{at}": jnp.full((rows, columns), at, "float32")
            for at in range(leaves)
        }
        return maps[0].place(tree)

    def moved(tree: Any) -> Any:
        if way == "jax.device_put":
            tree = jax.device_put(tree, maps[1].shardings(tree))
        else:
            tree = flm.reshard(
                tree, maps[1], max_bytes=chunk * 2**20, verify=way == "reshard"
            )
        return jax.block_until_ready(tree)

    moved(made(64))  # loads the compiler
    tree = jax.block_until_ready(made(2048))
    before, peak = resident(), Peak()
    peak.start()
    new = moved(tree)
    top = peak.end() - before
    start = time.perf_counter()
    moved(tree)  # compiled before
    seconds = time.perf_counter() - start
    target = sum(
        shard.data.nbytes for leaf in new.values() for shard in leaf.addressable_shards
    )
    print(json.dumps({"seconds": seconds, "peak": top, "target": target}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=64, help="of a leaf")
    parser.add_argument("--leaves", type=int, default=4)
    parser.add_argument("--chunk", type=int, default=8, help="mebibytes")
    parser.add_argument("--cell", nargs=2, metavar=("MOVE", "WAY"))
    options = parser.parse_args()
    sizes = (options.mebibytes, options.leaves, options.chunk)
    if options.cell:
        move, way = options.cell
        measure(move, way, *sizes)
        return 0
    print("| move | way | seconds | peak above source + target, MiB | bound |")
    print("|---|---|--:|--:|--:|")
    failed = []
    for move in MOVES:
        for way in WAYS:
            arguments = [sys.executable, __file__, *sys.argv[1:], "--cell", move, way]
            ran = subprocess.run(arguments, capture_output=True, text=True, check=True)
            cell = json.loads(ran.stdout.splitlines()[-1])
            above = (cell["peak"] - cell["target"]) / 2**20
            # The temporaries of a chunk: its slice, gathered, on each of 8 devices.
            bound = 8 * options.chunk if way != "jax.device_put" else None
            print(
                f"| {move} | {way} | {cell['seconds']:.2f} | {above:.0f} "
                f"| {'' if bound is None else bound} |",
                flush=True,
            )
            if bound is not None and above > bound:
                failed.append(f"{move}, {way}: {above:.0f} MiB")
    print(f"\n{'FAIL' if failed else 'PASS'} peak ≤ source + target + a chunk on each")
    for line in failed:
        print(f"  {line}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
