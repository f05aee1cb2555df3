"""`flm.pod.plan` by XLA's partitioner beside libtpu, on the steps of `_steps.py`.

    python benchmarks/plan.py                      a few minutes
    python benchmarks/plan.py --steps LSTM GRU
    python benchmarks/plan.py --default-options    as libtpu compiles them by default

For each step and each combination of mesh axes: the MiB that a device sends in a step,
from 64 KiB on, and the seconds of each plan. libtpu leaves gathers as they are (three
options) unless told otherwise. Prints Markdown. Needs libtpu:
pip install 'flax-layoutmap[tpu-aot]'.
"""

import argparse
import collections
import importlib.metadata
import statistics
from typing import Any

from _steps import STEPS

import flax_layoutmap as flm

# What sends less than this over some axes in a step is left out.
LEAST_BYTES = 64 * 1024
# By default libtpu makes loops of permutes of gathers beside matrix products.
PLAIN = {
    "xla_tpu_enable_windowed_einsum_for_all_gather": False,
    "xla_tpu_enable_windowed_einsum_for_reduce_scatter": False,
    "xla_tpu_enable_async_collective_fusion": False,
}


def sent(report: flm.pod.PodReport) -> dict[str, int]:
    """Bytes that a device sends in a step, by axes."""
    by_axes: collections.Counter[str] = collections.Counter()
    for collective in report.collectives:
        by_axes["+".join(collective.axes)] += collective.wire_bytes_per_step
    return dict(by_axes)


def measure(name: str, options: dict[str, Any]) -> tuple[list[float], list[str], str]:
    """The errors of a step, its rows of the table, and its row of seconds."""
    args, given = STEPS[name]().arguments()
    ours = flm.pod.plan(*args, **given, engine="partitioner")
    theirs = flm.pod.compile(*args, **given, compiler_options=options)
    assert not theirs.unread, theirs.unread
    first, second = sent(ours), sent(theirs)
    errors, rows = [], []
    for axes in sorted({*first, *second}):
        mine, exact = first.get(axes, 0), second.get(axes, 0)
        if max(mine, exact) < LEAST_BYTES:
            continue
        errors.append(abs(mine - exact) / max(exact, 1))
        off = f"{mine / exact - 1:+.1%}" if exact else "extra"
        label = "" if rows else name
        rows.append(
            f"| {label} | {axes} | {mine / 2**20:,.1f} | {exact / 2**20:,.1f} | {off} |"
        )
    seconds = f"| {name} | {ours.took_seconds:.1f} | {theirs.took_seconds:.1f} |"
    return errors, rows, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=[*STEPS])
    parser.add_argument("--default-options", action="store_true")
    chosen = parser.parse_args()
    names = ("jax", "flax", "libtpu")
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in names))
    options = {} if chosen.default_options else PLAIN
    measured = [measure(name, options) for name in chosen.steps]
    print("\n| step | axes | partitioner, MiB | libtpu, MiB | off |")
    print("|---|---|--:|--:|--:|")
    print("\n".join(row for _, rows, _ in measured for row in rows))
    print("\n| step | partitioner, s | libtpu, s |\n|---|--:|--:|")
    print("\n".join(seconds for _, _, seconds in measured))
    errors = [error for some, _, _ in measured for error in some]
    print(
        f"\n{len(errors)} figures: {sum(e <= 0.05 for e in errors)} within 5 %, "
        f"{sum(e <= 0.25 for e in errors)} within 25 %, median "
        f"{statistics.median(errors):.1%}"
    )


if __name__ == "__main__":
    main()
