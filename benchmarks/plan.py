"""Benchmark time and memory of `flm.pod.plan` by model size and mesh size.

    python benchmarks/plan.py
    python benchmarks/plan.py --models 1B 8B --meshes 16 6144
    python benchmarks/plan.py --models 8B 70B --meshes 256 6144 --compile 600

Each model of `examples/pod_plan.py` is planned on each mesh in a process of its own.
Prints one Markdown table, then the targets as PASS or FAIL. Seconds are those of a
clock, as XLA's partitioner runs in another process; `plan` is everything from the step
to the report, `other rules` is `report.with_layout`, which neither traces nor lowers.
`engine` is `estimate` where a plan cannot be scaled from two smaller meshes. With
`--compile` (and libtpu: pip install 'flax-layoutmap[tpu-aot]') each row is compiled,
too; the number is a time limit in seconds.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MESHES = {
    16: "data=1,fsdp=4,tensor=4",
    256: "data=1,fsdp=32,tensor=8",
    6144: "data=3,fsdp=256,tensor=8",
    18432: "data=9,fsdp=256,tensor=8",
}
# The largest slice has 6,144 chips.
SLICES: dict[int, dict[str, Any]] = {
    16: {"topology": "v5e:4x4"},
    256: {"topology": "v6e:16x16"},
    6144: {"topology": "v5p:16x16x24"},
    18432: {"topology": "v5p:16x16x24", "slices": 3},
}
MODELS = ("1B", "8B", "70B", "405B")
LENGTH = 4096
HEADER = (
    "model",
    "devices",
    "engine",
    "plan, s",
    "other rules, s",
    "process, MiB",
    "compile, s",
)


def measured(model_name: str, devices: int, limit: float) -> dict[str, Any]:
    """One plan, the same with other rules, and compiled; in this process."""
    sys.path.insert(0, str(ROOT / "examples"))
    import jax
    import jax.numpy as jnp
    import pod_plan

    import flax_layoutmap as flm

    sizes = dict(part.split("=") for part in MESHES[devices].split(","))
    batch = 2 * int(sizes["data"]) * int(sizes["fsdp"])
    tokens = jax.ShapeDtypeStruct((batch, LENGTH + 1), jnp.int32)
    model, optimizer = pod_plan.abstract_state(pod_plan.CONFIGS[model_name])
    step = (pod_plan.train_step, model, optimizer, tokens)
    start = time.perf_counter()
    report = flm.pod.plan(*step, mesh=MESHES[devices], **SLICES[devices])
    plan = time.perf_counter() - start
    again = []
    for _ in range(3):
        start = time.perf_counter()
        report.with_layout(pod_plan.RULES)
        again.append(time.perf_counter() - start)
    return {
        "model": model_name,
        "devices": devices,
        "engine": report.engine,
        "plan": plan,
        "again": statistics.median(again),
        "mebibytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "compile": compiled(step, devices, limit) if limit else "",
    }


def compiled(step: tuple[Any, ...], devices: int, limit: float) -> str:
    """Wall seconds of the compiler on so many chips, and what it said."""
    import flax_layoutmap as flm

    where = {"mesh": MESHES[devices], **SLICES[devices]}
    start = time.perf_counter()
    try:
        report = flm.pod.compile(*step, **where, timeout=limit)
    except flm.LayoutError as error:
        return str(error).partition(";")[0]
    said = "" if report.fits else " (does not fit)"
    return f"{time.perf_counter() - start:.1f}{said}"


def in_a_process(model: str, devices: int, limit: float) -> dict[str, Any]:
    """The same in a process of its own."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, __file__, "--one", model, str(devices), str(limit)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--meshes", nargs="+", type=int, default=[*MESHES])
    parser.add_argument("--compile", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        model, devices, limit = options.one
        print(json.dumps(measured(model, int(devices), float(limit))))
        return 0
    rows = [
        in_a_process(model, devices, options.compile)
        for model in options.models
        for devices in options.meshes
    ]
    print(f"| {' | '.join(HEADER)} |\n| :-- | {' | '.join(['--:'] * 6)} |")
    for row in rows:
        print(
            f"| {row['model']} | {row['devices']:,} | {row['engine']} | "
            f"{row['plan']:.2f} | {row['again']:.2f} | {row['mebibytes']:.0f} | "
            f"{row['compile']} |"
        )
    print()
    return 0 if all([*map(_check, _targets(rows))]) else 1


def _targets(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    plans = [row["plan"] for row in rows]
    slowest = max(rows, key=lambda row: row["plan"])
    least, most = min(plans), max(plans)
    again = max(row["again"] for row in rows)
    return [
        (
            f"every plan takes less than 5 s: at most {most:.2f} s "
            f"({slowest['model']}, {slowest['devices']:,} devices)",
            most < 5,
        ),
        (
            f"time does not grow with model or mesh: {most / least:.1f} times from "
            "the least to the most, of 3",
            most < 3 * least,
        ),
        (f"other rules take less than 0.1 s: at most {again:.2f} s", again < 0.1),
    ]


def _check(target: tuple[str, bool]) -> bool:
    text, is_met = target
    print(f"{'PASS' if is_met else 'FAIL'}  {text}")
    return is_met


if __name__ == "__main__":
    sys.exit(main())
