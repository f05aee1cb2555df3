"""Compare the prices of `flm.suggest` with XLA's partitioner and the TPU compiler.

    python benchmarks/suggest_compile.py
    python benchmarks/suggest_compile.py --only 1B ViT-L/16 --options default

For steps of `suggest.py`, up to five rule sets: what is suggested, the runner-up,
full sharding, hand-written ones or those of the preset (`today`), and `presets.fsdp`
on a mesh of one axis of all devices; where two are equal, those that are suggested with
the memory of the hand-written ones. Of each, what a device sends in a step, and the
cost that orders them, by the estimate that the search uses, by `flm.pod.plan`, and by
`flm.pod.compile`. With `plain` options the compiler leaves gathers as they are
(`pod_compile.py`). Prints a Markdown table, then the targets as PASS or MISS. Needs
libtpu: pip install 'flax-layoutmap[tpu-aot]'.
"""

import argparse
import importlib.metadata
import itertools
import sys
from typing import Any

from pod_compile import OPTIONS
from suggest import Row, cases, decoders, fsdp_over_all

import flax_layoutmap as flm
from flax_layoutmap._suggest.price import Cost, cost_of_report

STEPS = [
    ("1B", "fsdp=4,tensor=4"),
    ("8B", "fsdp=16,tensor=4"),
    ("Llama 3 8B", "fsdp=16,tensor=4"),
    ("ViT-L/16", "fsdp=16"),
    ("Whisper large-v2", "fsdp=16,tensor=4"),
    ("Mixtral 8x7B", "fsdp=8,expert=8"),
]
HEADER = "step|rules|estimate, MiB|plan|compile|estimate is|estimate, ms|plan|compile"
# Estimates of all bytes may be so far off; costs that are closer have no order.
FAR, TIE = 0.1, 0.01


def rule_sets(row: Row) -> dict[str, flm.LayoutMap]:
    """Up to five different ones."""
    given: dict[str, Any] = {"mesh": row.mesh, "topology": row.topology, "check": False}
    found = flm.suggest(row.step, *row.args, **given, layout_map=row.theirs)
    limit = found.choices["today"].cost.peak_bytes
    limited = flm.suggest(row.step, *row.args, **given, hbm=limit)
    sets = {name: choice.layout_map for name, choice in found.choices.items()}
    sets |= {"fsdp": fsdp_over_all(row), "with today's memory": limited.layout_map}
    different: dict[str, flm.LayoutMap] = {}
    for name, one in sets.items():
        if one not in different.values():
            different[name] = one
    return dict(itertools.islice(different.items(), 5))


def priced(row: Row, rules: flm.LayoutMap, options: Any) -> dict[str, Cost]:
    """The cost by each engine."""
    step = flm.jit(row.step, layout_map=rules)
    given: dict[str, Any] = {"mesh": rules.device_mesh, "topology": row.topology}
    planned = flm.pod.plan(step, *row.args, **given)
    compiled = flm.pod.compile(step, *row.args, **given, compiler_options=options)
    assert compiled.fits, f"{row.model}: {compiled.warnings[0]}"
    reports = {
        "estimate": planned.with_layout(rules.freeze().on(planned.mesh)),
        "plan": planned,
        "compile": compiled,
    }
    return {who: cost_of_report(report) for who, report in reports.items()}


def apart(ours: float, theirs: float) -> float:
    return ours / theirs - 1 if theirs else 0.0


def swapped(costs: dict[str, dict[str, Cost]], who: str) -> list[str]:
    """Pairs of rule sets whose order by the compiler is not that of an engine."""
    found = []
    for one, other in itertools.combinations(costs, 2):
        shares = [
            apart(costs[one][engine].seconds, costs[other][engine].seconds)
            for engine in (who, "compile")
        ]
        if all(abs(share) > TIE for share in shares) and shares[0] * shares[1] < 0:
            found.append(f"{one} and {other}")
    return found


def show(row: Row, costs: dict[str, dict[str, Cost]]) -> None:
    for name, own in costs.items():
        sent = [one.total_sent_bytes for one in own.values()]
        cells = [f"{row.model}, {row.mesh}" if name == next(iter(costs)) else "", name]
        cells += [f"{size / 2**20:,.1f}" for size in sent]
        cells += [f"{apart(sent[0], sent[-1]):+.1%}"]
        cells += [f"{one.seconds * 1e3:.2f}" for one in own.values()]
        print("|", " | ".join(cells), "|", flush=True)


def targets(every: list[tuple[Row, dict[str, dict[str, Cost]]]]) -> bool:
    met = True
    for row, costs in every:
        far = [
            name
            for name, own in costs.items()
            if abs(
                apart(own["estimate"].total_sent_bytes, own["compile"].total_sent_bytes)
            )
            > FAR
        ]
        checks = {
            f"bytes within {FAR:.0%} of the compiler's": far,
            "the order by the estimate is the compiler's": swapped(costs, "estimate"),
            "the order by the plan is the compiler's": swapped(costs, "plan"),
        }
        for text, missed in checks.items():
            ends = f": not {', '.join(missed)}" if missed else ""
            print(f"- {'MISS' if missed else 'PASS'}: {row.model}: {text}{ends}")
            met = met and not missed
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [model for model, _ in STEPS]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--options", choices=OPTIONS, default="plain")
    chosen = parser.parse_args()
    versions = ("jax", "flax", "libtpu")
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in versions))
    columns = HEADER.split("|")
    print(f"\n| {' | '.join(columns)} |\n|---|---|{'--:|' * (len(columns) - 2)}")
    every = []
    for row in [*decoders(), *cases()]:
        if (row.model, row.mesh) in STEPS and row.model in chosen.only:
            options = OPTIONS[chosen.options]
            sets = rule_sets(row)
            costs = {name: priced(row, one, options) for name, one in sets.items()}
            show(row, costs)
            every.append((row, costs))
    print()
    return 0 if targets(every) else 1


if __name__ == "__main__":
    sys.exit(main())
