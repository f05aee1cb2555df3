"""Compare `flm.pod.plan` and its memory arithmetic with the TPU compiler.

    python benchmarks/pod_compile.py --rows rows.jsonl
    python benchmarks/pod_compile.py --models 1B --options plain
    python benchmarks/pod_compile.py --rows rows.jsonl --report-only

The decoders of `examples/pod_plan.py` are planned and compiled ahead of time for TPU
slices, each in its own process with a time limit. With `plain` options the compiler
leaves collectives as they are, instead of turning gathers into loops of permutes.
Needs libtpu: pip install 'flax-layoutmap[tpu-aot]'. Prints Markdown tables, then the
targets as PASS or FAIL; `--rows` appends each finished case to a file, and cases in
that file are not run again.
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
        model: a model of the example.
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
]


def measured(case: Case, options: str, limit: float) -> dict[str, Any]:
    """One case in this process: planned, then compiled."""
    sys.path.insert(0, str(ROOT / "examples"))
    import jax
    import jax.numpy as jnp
    import pod_plan

    import flax_layoutmap as flm

    state = pod_plan.abstract_state(pod_plan.CONFIGS[case.model])
    tokens = jax.ShapeDtypeStruct((case.batch, case.length + 1), jnp.int32)
    step = (pod_plan.train_step, *state, tokens)
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
        "peak": memory.peak_bytes,
        "limit": memory.limit_bytes,
        "fits": report.fits,
        "axes": axes,
        "groups": groups,
        "unrecognised": dict(report.unrecognised),
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
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
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


# ------------------------------------------------------------- tables and targets

MIB, GIB = 2**20, 2**30
# Over some axes, what is less than this share of all traffic is in the noise of a loss.
LEAST = 0.001
# Of what is sent for a parameter; the compiler moves the odd rows of a tile by itself.
ODD = 0.05
# Parameters for which less is sent in a step are scales of norms.
SMALL = 64 * 1024


def name_of(row: dict[str, Any]) -> str:
    """`8B, 2 × v5e:16x16, fsdp=32 tensor=8, 512×4096, plain`."""
    case = row["case"]
    slices = f"{case['slices']} × " if case["slices"] > 1 else ""
    mesh = " ".join(part for part in case["mesh"].split(",") if not part.endswith("=1"))
    return (
        f"{case['model']}, {slices}{case['topology']}, {mesh}, "
        f"{case['batch']}×{case['length']}, {row['options']}"
    )


def show(rows: list[dict[str, Any]]) -> bool:
    """Print the tables and the targets; whether all of these hold."""
    answered = [row for row in rows if "compile" in row]
    columns = "case|compile, s|CPU s|arguments, GiB|compiler's|peak|limit|fits"
    print(f"\n| {' | '.join(columns.split('|'))} |\n|{'--|' * 8}")
    for row in answered:
        plan, done = row["plan"], row["compile"]
        sizes = (plan["arguments"], done["arguments"], done["peak"], done["limit"])
        cells = [name_of(row), f"{done['seconds']:.1f}", f"{row['compiler_cpu']:.0f}"]
        cells += [f"{size / GIB:.3f}" for size in sizes]
        print(f"| {' | '.join(cells)} | {'yes' if done['fits'] else 'no'} |")
    print("\nWhat a device sends in a step, MiB:")
    print("\n| case | axes | plan | compile | plan is |\n|--|--|--|--|--|")
    fit = [row for row in answered if row["compile"]["fits"]]
    for row in fit:
        for axes, ours, theirs in sent_of(row):
            mebibytes = f"{ours / MIB:,.0f} | {theirs / MIB:,.0f}"
            print(f"| {name_of(row)} | {axes} | {mebibytes} | {apart(ours, theirs)} |")
    print()
    plain = [row for row in fit if row["options"] == "plain"]
    targets = {
        "every case has an answer": [
            f"{name_of(row)}: {' '.join(row['error'].split())[-400:]}"
            for row in rows
            if "error" in row
        ],
        "arguments within 2 % of the compiler's": [
            name_of(row)
            for row in fit
            if far(row["plan"]["arguments"], row["compile"]["arguments"], 0.02)
        ],
        "nothing in the programs is unrecognised": [
            name_of(row) for row in answered if row["compile"]["unrecognised"]
        ],
        "plain options: bytes within 5 % over all axes": [
            f"{name_of(row)}, {axes}: {apart(ours, theirs)}"
            for row in plain
            for axes, ours, theirs in sent_of(row)
            if far(ours, theirs, 0.05)
        ],
        "the same axes for every parameter; with plain options, the same kinds": [
            f"{name_of(row)}, {path}" for row in fit for path in differing(row)
        ],
    }
    for text, missed in targets.items():
        print("\n      ".join([f"{'FAIL' if missed else 'PASS'}  {text}", *missed]))
    return not any(targets.values())


def sent_of(row: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Axes with bytes planned and compiled."""
    planned, compiled = (
        {
            axes: sum(sent for _, sent in kinds.values())
            for axes, kinds in row[who]["axes"].items()
        }
        for who in ("plan", "compile")
    )
    least = LEAST * sum(planned.values())
    found = []
    for axes in sorted({*planned, *compiled}):
        # Between slices a byte takes long.
        crosses = row["case"]["slices"] > 1 and "data" in axes.split("+")
        both = planned.get(axes, 0), compiled.get(axes, 0)
        if max(both) >= (MIB if crosses else least):
            found.append((axes, *both))
    return found


def far(ours: int, theirs: int, share: float) -> bool:
    return abs(ours - theirs) > share * theirs


def apart(ours: int, theirs: int) -> str:
    return f"{ours / theirs - 1:+.1%}" if theirs else "extra"


def differing(row: dict[str, Any]) -> list[str]:
    """Parameters that are moved otherwise than planned."""
    every = [row[who]["groups"] for who in ("plan", "compile")]
    return [
        path
        for path in sorted({*every[0], *every[1]})
        if max(total(groups.get(path, {})) for groups in every) >= SMALL
        and len({large(groups.get(path, {}), row["options"]) for groups in every}) > 1
    ]


def total(group: dict[str, dict[str, int]]) -> int:
    return sum(sum(kinds.values()) for kinds in group.values())


def large(group: dict[str, dict[str, int]], options: str) -> frozenset[Any]:
    """The axes, and the kinds that plain options leave, of more than the odd rows."""
    least = ODD * total(group)
    return frozenset(
        (axes, kind if options == "plain" else "")
        for axes, kinds in group.items()
        for kind, sent in kinds.items()
        if sent >= least
    )


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
        print(f"{name_of(row)}, {options}: done", file=sys.stderr)
    names = ("jax", "flax", "libtpu")
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in names))
    return 0 if show(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
