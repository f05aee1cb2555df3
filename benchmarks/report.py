"""Benchmark reports, diffs and golden files of a resolved model.

    python benchmarks/report.py --leaves 3000 30000

The model is a decoder with a list of layers and AdamW's state, resolved on an abstract
mesh of 256 devices; resolving is not in the figures, and neither is importing rich.
All rows are measured in turn, round after round; a cell is the median of the CPU time
of the thread, with the garbage collector off. Prints one Markdown table, then the
targets as PASS or FAIL: a report of 3,000 leaves in 0.3 s, of 300,000 in 2 s.
"""

import argparse
import gc
import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from rich.console import Console  # noqa: E402

import flax_layoutmap as flm  # noqa: E402

# Leaves → seconds that the report may take.
TARGETS = {3000: 0.3, 300_000: 2.0}
# The rows that this is asked of.
TEXTS = (
    "`report()`",
    "`report(width=80)`",
    "`report(fold=False)`",
    "`report(fold=False, width=80)`",
)
KERNELS = ("query", "key", "value", "out", "gate", "up", "down")


def tree(leaves: int) -> dict[str, Any]:
    """Parameters and AdamW's state, of about so many leaves."""
    count = max(leaves // (3 * (len(KERNELS) + 2)), 1)

    def layer() -> dict[str, Any]:
        kernels = {
            name: {"kernel": jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)}
            for name in KERNELS
        }
        norms = {
            name: {"scale": jax.ShapeDtypeStruct((8192,), jnp.float32)}
            for name in ("norm1", "norm2")
        }
        return {**kernels, **norms}

    params = {"layers": {str(at): layer() for at in range(count)}}
    state = jax.eval_shape(optax.adamw(1e-3).init, params)
    return {"params": params, "opt_state": state}


def rules(mesh: str) -> flm.LayoutMap:
    """Rules for it; another mesh lays every kernel out otherwise."""
    layout_map = flm.LayoutMap(flm.DeviceMesh.abstract(mesh), strict=False)
    layout_map["(query|key|value|gate|up)/kernel"] = (None, "model")
    layout_map["(out|down)/kernel"] = ("model", None)
    return layout_map


def calls(leaves: int, folder: Path) -> tuple[int, dict[str, Callable[[], object]]]:
    """What is measured, on one tree."""
    made = tree(leaves)
    resolution = rules("data=16,model=16").resolve(made)
    other = rules("data=8,model=32").resolve(made)
    alike = rules("data=16,model=16").resolve(tree(leaves))
    path = folder / f"{leaves}.json"
    flm.testing.dump(resolution, path)

    def show() -> None:
        Console(file=io.StringIO(), width=100, force_terminal=True).print(resolution)

    return len(resolution), {
        "`report()`": lambda: resolution.report(),
        "`report(width=80)`": lambda: resolution.report(width=80),
        "`report(fold=False)`": lambda: resolution.report(fold=False),
        "`report(fold=False, width=80)`": lambda: resolution.report(
            fold=False, width=80
        ),
        '`report("markdown")`': lambda: resolution.report("markdown"),
        '`report("json")`': lambda: resolution.report("json"),
        "rich, 100 columns, in colour": show,
        "`diff`, another mesh": lambda: resolution.diff(other),
        "`diff(...).report()`": lambda: resolution.diff(other).report(),
        "`testing.dump`": lambda: flm.testing.dump(resolution, path),
        "`testing.compare`": lambda: flm.testing.compare(alike, path),
    }


def measure(rows: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median CPU seconds of each row."""
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for call in rows.values():
        call()
    for _ in range(rounds):
        for name, call in rows.items():
            gc.collect()
            gc.disable()
            start = time.thread_time()
            call()
            seconds[name].append(time.thread_time() - start)
            gc.enable()
    return {name: statistics.median(found) for name, found in seconds.items()}


def main() -> int:
    """Print the table; the exit status is 1 where the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, nargs="+", default=[300, 3000, 30000])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    columns: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for wanted in options.leaves:
            leaves, rows = calls(wanted, Path(folder))
            columns[leaves] = measure(rows, options.rounds)
    load = os.getloadavg()[0]
    print(f"jax {jax.__version__}, load {load:.1f}; CPU seconds, median\n")
    print("| what | " + " | ".join(f"{leaves:,} leaves" for leaves in columns) + " |")
    print("|---|" + "--:|" * len(columns))
    for name in next(iter(columns.values())):
        cells = (f"{column[name]:.4f}" for column in columns.values())
        print(f"| {name} | {' | '.join(cells)} |")
    missed = False
    for wanted, allowed in TARGETS.items():
        near = [leaves for leaves in columns if 0.95 < leaves / wanted < 1.05]
        for leaves in near:
            slowest = max(TEXTS, key=columns[leaves].__getitem__)
            seconds = columns[leaves][slowest]
            missed = missed or seconds > allowed
            print(
                f"\n- {'FAIL' if seconds > allowed else 'PASS'}: the report of "
                f"{leaves:,} leaves takes up to {seconds:.3f} s ({slowest}) of "
                f"{allowed} s allowed"
            )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
