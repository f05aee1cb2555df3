"""Time and memory of `flm.pod.plan` against the sizes of model and mesh.

    python benchmarks/plan.py
    python benchmarks/plan.py --models 1B 8B --meshes 16 6144

Each model of `examples/pod_plan.py` is planned on each mesh in a process of its own.
Prints one Markdown table, then the targets as PASS or FAIL. CPU seconds count, so that
a busy machine changes little; `plan` is everything from the step to the report, `other
rules` is `report.with_layout`, which neither traces nor lowers.
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
MODELS = ("1B", "8B", "70B", "405B")
LENGTH = 4096
HEADER = (
    "model",
    "devices",
    "plan, s",
    "other rules, s",
    "process, MiB",
)


def measured(model_name: str, devices: int) -> dict[str, Any]:
    """One plan, and the same with other rules; in this process."""
    sys.path.insert(0, str(ROOT / "examples"))
    import jax
    import jax.numpy as jnp
    import pod_plan

    import flax_layoutmap as flm

    sizes = dict(part.split("=") for part in MESHES[devices].split(","))
    batch = 2 * int(sizes["data"]) * int(sizes["fsdp"])
    tokens = jax.ShapeDtypeStruct((batch, LENGTH + 1), jnp.int32)
    model, optimizer = pod_plan.abstract_state(pod_plan.CONFIGS[model_name])
    start = time.process_time()
    report = flm.pod.plan(
        pod_plan.train_step, model, optimizer, tokens, mesh=MESHES[devices]
    )
    plan = time.process_time() - start
    again = []
    for _ in range(3):
        start = time.process_time()
        report.with_layout(pod_plan.RULES)
        again.append(time.process_time() - start)
    return {
        "model": model_name,
        "devices": devices,
        "plan": plan,
        "again": statistics.median(again),
        "mebibytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def in_a_process(model: str, devices: int) -> dict[str, Any]:
    """The same in a process of its own."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, __file__, "--one", model, str(devices)],
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
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(options.one[0], int(options.one[1]))))
        return 0
    rows = [in_a_process(model, n) for model in options.models for n in options.meshes]
    print(f"| {' | '.join(HEADER)} |\n| :-- | {' | '.join(['--:'] * 4)} |")
    for row in rows:
        print(
            f"| {row['model']} | {row['devices']:,} | {row['plan']:.2f} | "
            f"{row['again']:.2f} | {row['mebibytes']:.0f} |"
        )
    print()
    return 0 if all(map(_check, _targets(rows))) else 1


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
