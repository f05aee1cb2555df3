"""Compare `flm.pod.plan` and `flm.pod.compile` with the executable on many steps.

    python benchmarks/pod_steps.py                  plan and compile, a few minutes
    python benchmarks/pod_steps.py --whole          the executable too, half an hour
    python benchmarks/pod_steps.py --steps LSTM GRU

For each step of `_steps.py` and each mesh axis: what a device sends in a step, by the
plan, by the compiler's final program, which `flm.pod.compile` waits for, and with
`--whole` by the finished executable. Prints Markdown tables, then the targets as PASS
or FAIL. The compiler leaves gathers as they are (three options of `pod_compile.py`).
Needs libtpu: pip install 'flax-layoutmap[tpu-aot]'.
"""

import argparse
import collections
import importlib.metadata
import sys
import time
from typing import Any

from _steps import STEPS
from pod_compile import PLAIN

import flax_layoutmap as flm

# What sends less than this over an axis in a step is left out.
LEAST_BYTES = 64 * 1024


def sent(report: Any) -> dict[str, int]:
    """Bytes that a device sends in a step, by axes."""
    found: collections.Counter[str] = collections.Counter()
    for one in report.collectives:
        found["+".join(one.axes)] += one.wire_bytes_per_step
    return dict(found)


def measured(name: str, whole: bool) -> dict[str, Any]:
    """A step by all who have something to say on it; seconds and bytes by axes."""
    args, given = STEPS[name]().arguments()
    row: dict[str, Any] = {"name": name}
    compiled = given | {"compiler_options": PLAIN}
    calls = {
        "plan": lambda: flm.pod.plan(*args, **given),
        "compile": lambda: flm.pod.compile(*args, **compiled),
    }
    if whole:
        calls["executable"] = lambda: flm.pod.compile(
            *args, **compiled, exact_memory=True
        )
    for who, call in calls.items():
        start = time.perf_counter()
        report = call()
        row[who] = sent(report)
        row[f"{who} seconds"] = time.perf_counter() - start
        row[f"{who} unread"] = sum(report.unrecognised.values())
    return row


def apart(ours: int, theirs: int) -> float:
    return abs(ours - theirs) / max(theirs, 1)


def show(rows: list[dict[str, Any]], whole: bool) -> bool:
    """The tables and the targets; whether all of these hold."""
    last = "executable" if whole else "compile"
    mebibytes = "{:,.1f}".format
    print("| step | axes | plan, MiB | compile | plan is |" + " executable |" * whole)
    print("|---|---|--:|--:|--:|" + "--:|" * whole)
    near = count = silent = 0
    same = True
    for row in rows:
        axes = [
            axis
            for axis in sorted({*row["plan"], *row[last]})
            if max(row["plan"].get(axis, 0), row[last].get(axis, 0)) >= LEAST_BYTES
        ]
        for axis in axes:
            ours, theirs = row["plan"].get(axis, 0), row["compile"].get(axis, 0)
            is_near = apart(ours, theirs) <= 0.05
            near, count = near + is_near, count + 1
            silent += not is_near and not row["plan unread"]
            difference = f"{ours / theirs - 1:+.1%}" if theirs else "extra"
            cells = [row["name"] if axis == axes[0] else "", axis]
            cells += [mebibytes(ours / 2**20), mebibytes(theirs / 2**20), difference]
            if whole:
                executed = row["executable"].get(axis, 0)
                same = same and executed == theirs
                cells.append(mebibytes(executed / 2**20))
            print("|", " | ".join(cells), "|")
    print("\n| step | plan, s | compile, s |" + " executable, s |" * whole)
    print("|---|--:|--:|" + "--:|" * whole)
    for row in rows:
        who = ["plan", "compile", *(["executable"] if whole else [])]
        seconds = [f"{row[f'{one} seconds']:.1f}" for one in who]
        print("|", " | ".join([row["name"], *seconds]), "|")
    targets = {
        f"plan: 90 % of the axes within 5 % ({near} of {count})": near >= 0.9 * count,
        f"plan: none of the others in silence ({silent} are)": not silent,
        "compile: nothing unread": not any(row["compile unread"] for row in rows),
    }
    if whole:
        targets["compile: what the executable has, to the byte"] = same
    print()
    for target, holds in targets.items():
        print(f"- {'PASS' if holds else 'FAIL'}: {target}")
    return all(targets.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=[*STEPS])
    parser.add_argument("--whole", action="store_true", help="whole compiles, too")
    chosen = parser.parse_args()
    names = ("jax", "flax", "libtpu")
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in names))
    rows = []
    for name in chosen.steps:
        rows.append(measured(name, chosen.whole))
        print(f"{name}: done", file=sys.stderr)
    print()
    return 0 if show(rows, chosen.whole) else 1


if __name__ == "__main__":
    sys.exit(main())
