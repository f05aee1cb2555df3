"""`flm.pod.plan` and the library's arithmetic beside the TPU compiler.

    python benchmarks/pod_compile.py --rows rows.jsonl
    python benchmarks/pod_compile.py --models 1B --options plain
    python benchmarks/pod_compile.py --rows rows.jsonl --report-only

The decoders of `examples/pod_plan.py`, and one with experts, are planned and compiled
for TPU slices that are not there, each in a process of its own with a time limit. With
`plain` options the compiler leaves collectives as they are, instead of turning gathers
into loops of permutes. Needs libtpu: pip install 'flax-layoutmap[tpu-aot]'. Prints
Markdown tables, then the targets as PASS or FAIL; `--rows` keeps each case as it is
done, and what is in that file is not run again.
"""

import argparse
import collections
import dataclasses
import importlib.metadata
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import _pod_compile_report as report_of

ROOT = Path(__file__).parents[1]
PLAIN = {
    "xla_tpu_enable_windowed_einsum_for_all_gather": False,
    "xla_tpu_enable_windowed_einsum_for_reduce_scatter": False,
    "xla_tpu_enable_async_collective_fusion": False,
}
OPTIONS: dict[str, dict[str, Any]] = {"plain": PLAIN, "default": {}}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on slices.

    Attributes:
        model: a model of the example, or `"experts"`.
        topology: name of a slice.
        slices: how many of it.
        mesh: as `flm.pod.plan` takes it.
        batch: sequences in a step.
        length: tokens in a sequence.
    """

    model: str
    topology: str
    slices: int
    mesh: str
    batch: int
    length: int


ONE = "data=1,fsdp={},tensor={}"
CASES = [
    Case("1B", "v5e:4x4", 1, ONE.format(4, 4), 16, 2048),
    Case("8B", "v5p:4x4x4", 1, ONE.format(16, 4), 64, 4096),
    Case("8B", "v5e:16x16", 1, ONE.format(32, 8), 256, 4096),
    Case("70B", "v5p:4x4x4", 1, ONE.format(16, 4), 64, 4096),
    Case("70B", "v5p:16x16x24", 1, "data=3,fsdp=256,tensor=8", 1536, 4096),
    Case("70B", "v6e:16x16", 1, ONE.format(32, 8), 128, 4096),
    Case("70B", "tpu7x:4x4x4", 1, ONE.format(16, 8), 128, 4096),
    Case("8B", "v5e:16x16", 2, "data=2,fsdp=32,tensor=8", 512, 4096),
    Case("70B", "v6e:16x16", 2, "data=2,fsdp=32,tensor=8", 256, 4096),
    Case("8B", "v5e:4x4", 1, ONE.format(4, 4), 16, 2048),
    Case("70B", "v5e:4x4", 1, ONE.format(4, 4), 16, 2048),
    Case("70B", "v5e:16x16", 1, ONE.format(32, 8), 256, 4096),
    Case("70B", "v6e:16x16", 1, ONE.format(32, 8), 256, 4096),
    Case("experts", "v5e:4x4", 1, "fsdp=2,expert=4,tensor=2", 64, 2048),
]


def measured(case: Case, options: str, limit: float) -> dict[str, Any]:
    """One case in this process: planned, then compiled."""
    sys.path.insert(0, str(ROOT / "examples"))
    import jax
    import jax.numpy as jnp
    import pod_plan

    import flax_layoutmap as flm

    module: Any = pod_plan
    if case.model == "experts":
        import _experts

        module, config = _experts, _experts.CONFIG
    else:
        config = pod_plan.CONFIGS[case.model]
    tokens = jax.ShapeDtypeStruct((case.batch, case.length + 1), jnp.int32)
    step = (module.train_step, *module.abstract_state(config), tokens)
    where = {"mesh": case.mesh, "topology": case.topology, "slices": case.slices}
    start = time.process_time()
    planned = flm.pod.plan(*step, **where)
    row: dict[str, Any] = {"plan": _said(planned, time.process_time() - start)}
    start = time.perf_counter()
    try:
        compiled = flm.pod.compile(
            *step, **where, timeout=limit, compiler_options=OPTIONS[options]
        )
    except flm.LayoutError as error:
        row["error"] = str(error)
        return row
    row["compile"] = _said(compiled, time.perf_counter() - start)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    row["compiler_cpu"] = used.ru_utime + used.ru_stime
    row["compiler_mebibytes"] = used.ru_maxrss / 1024
    return row


def _said(report: Any, seconds: float) -> dict[str, Any]:
    """What of a report goes into the tables."""
    axes: dict[str, dict[str, list[int]]] = {}
    groups: dict[str, dict[str, dict[str, int]]] = {}
    for one in report.collectives:
        name = "+".join(axis for axis in report.mesh.axis_names if axis in one.axes)
        kinds = axes.setdefault(name, {})
        counts = kinds.setdefault(one.kind, [0, 0])
        counts[0] += one.executions
        counts[1] += one.wire_bytes_per_step
    for path, name, kind, sent in _by_path(report):
        if path.startswith("model/"):
            groups.setdefault(path, {}).setdefault(name, {})[kind] = sent
    memory = report.memory
    return {
        "seconds": seconds,
        "arguments": memory.at_rest_bytes + memory.padding_bytes,
        "at_rest": memory.at_rest_bytes,
        "temporary": memory.temporary_bytes,
        "peak": memory.peak_bytes,
        "limit": memory.limit_bytes,
        "fits": report.fits,
        "axes": axes,
        "dcn": sum(
            one.wire_bytes_per_step for one in report.collectives if one.over_dcn
        ),
        "groups": groups,
        "unrecognised": dict(report.unrecognised),
        "warnings": list(report.warnings),
    }


def _by_path(report: Any) -> list[tuple[str, str, str, int]]:
    """Path, axes, kind, and bytes that a device sends for it in a step.

    What is sent for several parameters at once counts for each in equal parts.
    """
    sent: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for one in report.collectives:
        name = "+".join(axis for axis in report.mesh.axis_names if axis in one.axes)
        paths = (one.path or "", *one.joined)
        for path in paths:
            sent[path, name, one.kind] += one.wire_bytes_per_step // len(paths)
    return [(*key, size) for key, size in sent.items()]


def in_a_process(case: Case, options: str, limit: float) -> dict[str, Any]:
    """The same in a process of its own, which is given up after the limit."""
    path = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(path),
    }
    asked = json.dumps([dataclasses.asdict(case), options, limit])
    row: dict[str, Any] = {"case": dataclasses.asdict(case), "options": options}
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--one", asked],
            env=environment,
            capture_output=True,
            text=True,
            # The plan, and the end of a compile that is given up, come on top.
            timeout=limit + 60,
        )
    except subprocess.TimeoutExpired:
        return {**row, "error": f"gave no answer in {limit + 60:g} seconds"}
    if done.returncode:
        return {**row, "error": done.stderr[-2000:]}
    return {**row, **json.loads(done.stdout.splitlines()[-1])}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    models = list(dict.fromkeys(case.model for case in CASES))
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    parser.add_argument("--options", nargs="+", choices=OPTIONS, default=[*OPTIONS])
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each")
    parser.add_argument("--rows", type=Path, help="a file that keeps what is done")
    parser.add_argument("--report-only", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        fields, options, limit = json.loads(chosen.one)
        print(json.dumps(measured(Case(**fields), options, limit)))
        return 0
    rows: list[dict[str, Any]] = []
    if chosen.rows and chosen.rows.exists():
        rows = [json.loads(line) for line in chosen.rows.read_text().splitlines()]
    done = {json.dumps([row["case"], row["options"]]) for row in rows}
    wanted = [
        (case, options)
        for options in chosen.options
        for case in CASES
        if case.model in chosen.models and not chosen.report_only
    ]
    for case, options in wanted:
        if json.dumps([dataclasses.asdict(case), options]) in done:
            continue
        row = in_a_process(case, options, chosen.limit)
        rows.append(row)
        if chosen.rows:
            with chosen.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        print(f"{report_of.name_of(row)}, {options}: done", file=sys.stderr)
    names = ("jax", "flax", "libtpu")
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in names))
    return report_of.show(rows)


if __name__ == "__main__":
    sys.exit(main())
