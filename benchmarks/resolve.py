"""Benchmark rules → shardings against a lower bound and other libraries.

    python benchmarks/resolve.py --sizes 300 3000 --rules 10 100

Prints one Markdown table, then the targets as PASS or FAIL. All rows of one tree and
rule count are measured in turn, round after round, so that a busy machine slows all
of them alike; cells are medians of the CPU time of the thread. Garbage collection is
off inside the clock and Python's cache of compiled patterns is emptied before every
call, because rules are applied once per job. A value that is expected to take longer
than `--limit` is extrapolated from the largest smaller tree. On the smallest tree our
specs are first compared with those of the other libraries; a difference stops the run.
Of the `--kinds`, `digits` has rules of which a fifth distinguish digits (`fc1`, `fc2`),
and in `layers` every rule but the last names one tensor of one layer. A library that
cannot be imported affects only its own row. docs/benchmarks.md tells how to
install the other libraries and what each row does.
"""

import argparse
import datetime
import gc
import os
import platform
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import numpy as np  # noqa: E402
from _peers import MESH_AXES, MESH_SHAPE, PEERS, Call, Peer  # noqa: E402
from _report import (  # noqa: E402
    COLD,
    COLD_BUILD,
    FLOOR,
    KINDS,
    MODULE_FLOOR,
    REPEATED,
    RESOLVE,
    RESOLVE_AGAIN,
    UNFLATTEN,
    Cell,
    Key,
    Results,
    checks,
    table,
)
from _trees import Trees  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import flax_layoutmap as flm  # noqa: E402

CALIBRATION_SIZE = 300


@dataclass(frozen=True)
class Row:
    """One row: `prepare` runs outside the clock, what it returns inside."""

    name: str
    prepare: Callable[[], Call]
    regex_peer: bool = False


def mesh() -> Mesh:
    """The mesh of every row: 2 × 4 virtual CPU devices."""
    return Mesh(np.array(jax.devices()).reshape(MESH_SHAPE), MESH_AXES)


def layout_map(trees: Trees, count: int) -> flm.LayoutMap:
    """Our map of the rules; a new one each time, so that nothing is remembered."""
    return flm.LayoutMap.from_rules(trees.rules(count), mesh(), overlap="first")


def floor_row(trees: Trees) -> Row:
    """What no library can go below: walking the tree and naming its leaves."""
    if trees.kind == "module":
        return Row(MODULE_FLOOR, lambda: partial(nnx.state, trees.tree))
    return Row(FLOOR, lambda: partial(jax.tree_util.tree_flatten_with_path, trees.tree))


def our_rows(trees: Trees, count: int) -> list[Row]:
    """Our rows: tree in, tree of `NamedSharding` out; and `resolve` alone."""

    def cold() -> Call:
        return partial(layout_map(trees, count).shardings, trees.tree)

    def build() -> Call:
        return lambda: layout_map(trees, count).shardings(trees.tree)

    def repeated() -> Call:
        ours = layout_map(trees, count)
        ours.shardings(trees.twin)
        return partial(ours.shardings, trees.tree)

    def resolve() -> Call:
        return partial(layout_map(trees, count).resolve, trees.tree)

    def resolve_again() -> Call:
        ours = layout_map(trees, count)
        ours.resolve(trees.twin)
        return partial(ours.resolve, trees.tree)

    def unflatten() -> Call:
        made = layout_map(trees, count).shardings(trees.tree)
        leaves, treedef = jax.tree.flatten(made)
        return partial(jax.tree.unflatten, treedef, leaves)

    return [
        Row(COLD, cold),
        Row(COLD_BUILD, build),
        Row(REPEATED, repeated),
        Row(RESOLVE, resolve),
        Row(RESOLVE_AGAIN, resolve_again),
        Row(UNFLATTEN, unflatten),
    ]


def peer_rows(trees: Trees, count: int, failed: dict[str, str]) -> list[Row]:
    """The rows of the libraries that can be imported; the others go to `failed`."""
    rows = []
    for peer in PEERS:
        if trees.kind not in peer.kinds or peer.name in failed:
            continue
        try:
            peer.prepare(Trees(trees.kind, CALIBRATION_SIZE), count, mesh())
        except (ImportError, AttributeError) as error:
            failed[peer.name] = f"{type(error).__name__}: {error}"
        else:
            prepare = partial(peer.prepare, trees, count, mesh())
            rows.append(Row(peer.name, prepare, regex_peer=peer.regex))
    return rows


def cpu_seconds(row: Row) -> float:
    """CPU seconds of one call, cold."""
    call = row.prepare()
    re.purge()
    gc.collect()
    gc.freeze()  # the trees stay, so the next collection need not look at them
    start = time.thread_time()
    call()
    return time.thread_time() - start


def measure(rows: list[Row], repeats: int, budget: float) -> dict[str, list[float]]:
    """Times all rows in turn; a row that has spent its budget sits out."""
    samples: dict[str, list[float]] = {row.name: [] for row in rows}
    for turn in range(repeats):
        # Another row goes first in each round: what ran before leaves its mark.
        for row in (*rows[turn % len(rows) :], *rows[: turn % len(rows)]):
            spent = samples[row.name]
            if not spent or sum(spent) + spent[-1] <= budget:
                spent.append(cpu_seconds(row))
    return samples


def measure_tree(
    trees: Trees,
    count: int,
    results: Results,
    failed: dict[str, str],
    options: argparse.Namespace,
) -> None:
    """Fill the cells of one tree and rule count."""
    peers = peer_rows(trees, count, failed) if options.peers else []
    rows = [floor_row(trees), *our_rows(trees, count), *peers]
    # Ours are not linear in leaves where there are many rules, and always measured.
    predicted = {
        row.name: prediction(results, (trees.kind, row.name, count, trees.size))
        for row in peers
    }
    slow = [row for row in peers if predicted[row.name] > options.limit]
    # A millisecond needs more rounds than a second.
    rounds = options.repeats * min(5, max(1, 30_000 // trees.size))
    samples = measure([row for row in rows if row not in slow], rounds, options.limit)
    floor = statistics.median(samples[rows[0].name])
    for name, seconds in samples.items():
        key = (trees.kind, name, count, trees.size)
        results[key] = Cell(statistics.median(seconds), floor)
    for row in slow:
        key = (trees.kind, row.name, count, trees.size)
        results[key] = Cell(predicted[row.name], floor, estimated=True)


def prediction(results: Results, key: Key) -> float:
    """Seconds expected of a cell: linear in leaves from the largest smaller tree."""
    kind, name, count, size = key
    smaller = [
        (known[3], cell)
        for known, cell in results.items()
        if known[:3] == (kind, name, count) and known[3] < size
    ]
    if not smaller:
        return 0.0
    known_size, cell = max(smaller, key=lambda item: item[0])
    return cell.seconds * size / known_size


def check_same_specs(trees: Trees, count: int, failed: dict[str, str]) -> list[str]:
    """Compare our spec of every leaf with every other library's.

    Returns:
        The names of the libraries that were compared.

    Raises:
        RuntimeError: If a library's spec of some leaf differs from ours.
    """
    ours = specs(layout_map(trees, count).shardings(trees.tree))
    rows = peer_rows(trees, count, failed)
    for row in rows:
        theirs = specs(row.prepare()())
        differing = sum(a != b for a, b in zip(ours, theirs, strict=True))
        if differing:
            raise RuntimeError(
                f"{row.name}: {differing} of {len(ours)} specs differ from ours "
                f"({KINDS[trees.kind]}, {count} rules)"
            )
    return [row.name for row in rows]


def specs(tree: Any) -> list[tuple[Any, ...]]:
    """The specs of a tree of shardings or specs, without trailing ``None``."""
    found = []
    for leaf in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, PartitionSpec)):
        spec = leaf.spec if isinstance(leaf, NamedSharding) else leaf
        entries = tuple(spec)
        while entries and entries[-1] is None:
            entries = entries[:-1]
        found.append(entries)
    return found


def conditions(peers: Iterable[Peer]) -> str:
    """Date, machine and versions, in one line."""
    packages = ["jax", "flax", *(peer.package for peer in peers)]
    versions = []
    for package in dict.fromkeys(packages):
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{package} not installed")
    return (
        f"{datetime.date.today()}, {os.cpu_count()} CPU cores, Python "
        f"{platform.python_version()}, {', '.join(versions)}"
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[300, 3000, 30_000, 300_000]
    )
    parser.add_argument("--rules", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=["dict", "state", "module"]
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=5,
        help="rounds (default 5), times 5 for trees below 30,000 leaves",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=25.0,
        help="a peer's cell expected to take more seconds is extrapolated (≈)",
    )
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the benchmark; the exit status is 1 if a target was missed."""
    options = parse(arguments)
    gc.disable()
    # Most families match nothing, which our map warns of once per map.
    warnings.simplefilter("ignore", flm.LayoutWarning)
    results: Results = {}
    failed: dict[str, str] = {}
    sizes = sorted(set(options.sizes))
    # Slow cells are extrapolated from smaller trees, so there must be one.
    run_sizes = sorted({CALIBRATION_SIZE, *sizes})
    compared: dict[str, None] = {}
    for kind in options.kinds:
        for size in run_sizes:
            trees = Trees(kind, size)
            gc.unfreeze()
            for count in options.rules:
                if options.peers and size == CALIBRATION_SIZE:
                    names = check_same_specs(trees, count, failed)
                    compared.update(dict.fromkeys(names))
                print(f"{kind}, {size:,} leaves, {count:,} rules", file=sys.stderr)
                measure_tree(trees, count, results, failed, options)
    shown = {key: cell for key, cell in results.items() if key[3] in sizes}
    print(f"\n{conditions(PEERS if options.peers else ())}\n")
    print(table(shown, failed, sizes))
    if compared:
        print(
            f"\nSame specs as ours on the {CALIBRATION_SIZE}-leaf trees, leaf by leaf:"
        )
        print(", ".join(compared))
    regex = [peer.name for peer in PEERS if peer.regex]
    verdicts = [str(check) for check in checks(shown, regex)]
    print("\n" + "\n".join(verdicts))
    return int(any("FAIL" in verdict for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
