"""Compare rules that `flm.suggest` finds with presets and hand-written rules.

    python benchmarks/suggest.py
    python benchmarks/suggest.py --only 8B ViT

Decoders of `examples/pod_plan.py`, scanned, on meshes of one, two and three axes,
against the rules of that example; models of `_preset_cases/`, which are not scanned,
against their preset; each against `presets.fsdp`, too. The search knows no names. A
cost is the time on the links and that of the matrix products, by `flm.pod.plan`, that
is XLA's partitioner; the estimate is what the search itself used. `with their memory`
is the estimate of a search whose limit is the peak of the other rules. Prints one
Markdown table, then the targets as PASS or MISS. Needs no devices.
"""

import argparse
import dataclasses
import math
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import jax
import jax.numpy as jnp
import pod_plan
import presets as preset_cases
from _preset_cases import Case

import flax_layoutmap as flm
from flax_layoutmap._suggest.price import cost_of_report

HEADER = (
    "model",
    "mesh",
    "classes, s",
    "whole search, s",
    "with plans, s",
    "tried",
    "suggested, ms",
    "theirs, ms",
    "fsdp, ms",
    "of theirs",
    "with their memory",
    "sent, of fsdp",
    "at rest, of fsdp",
    "plan/estimate",
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A step, and the rules that it is compared with."""

    kind: str
    model: str
    mesh: str
    topology: str
    step: Any
    args: tuple[Any, ...]
    theirs: Any


def decoders() -> list[Row]:
    rows = []
    for name, topology, meshes, batch, length in (
        (
            "1B",
            "v5e:4x4",
            ("fsdp=16", "fsdp=4,tensor=4", "data=2,fsdp=2,tensor=4"),
            16,
            2048,
        ),
        (
            "8B",
            "v5p:4x4x4",
            ("fsdp=64", "fsdp=16,tensor=4", "data=2,fsdp=8,tensor=4"),
            64,
            4096,
        ),
        (
            "70B",
            "v5p:4x4x4",
            ("fsdp=64", "fsdp=16,tensor=4", "data=2,fsdp=8,tensor=4"),
            64,
            4096,
        ),
    ):
        tokens = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
        state = pod_plan.abstract_state(pod_plan.CONFIGS[name])
        step = pod_plan.train_step.__wrapped__
        for mesh in meshes:
            rules = on_axes(pod_plan.RULES, flm.DeviceMesh.abstract(mesh))
            rows.append(
                Row("decoder", name, mesh, topology, step, (*state, tokens), rules)
            )
    return rows


def on_axes(rules: flm.LayoutMap, mesh: flm.DeviceMesh) -> flm.LayoutMap:
    """The rules without the axes that a mesh does not have."""

    def there(axes: Any) -> Any:
        found = tuple(
            one
            if one is ...
            else tuple(
                a
                for a in ([one] if isinstance(one, str) else one or ())
                if a in mesh.axis_names
            )
            or None
            for one in axes
        )
        return found

    batch = [axis for axis in rules.freeze().batch if axis in mesh.axis_names]
    made = flm.LayoutMap(mesh, batch=batch)
    for pattern, layout in rules.items():
        made[pattern] = there(layout.axes)
    for pattern, layout in rules.names.items():
        made.names[pattern] = there(layout.axes)
    return made


# Model of `_preset_cases/` → kind, the mesh, and the topology.
CASES = {
    "Llama 3 8B": ("decoder, unscanned", "fsdp=16,tensor=4", "v5p:4x4x4"),
    "ViT-L/16": ("ViT", "fsdp=16", "v5e:4x4"),
    "CLIP L/14": ("encoder", "fsdp=16,tensor=4", "v5p:4x4x4"),
    "Whisper large-v2": ("encoder", "fsdp=16,tensor=4", "v5p:4x4x4"),
    "Mixtral 8x7B": ("experts", "fsdp=8,expert=8", "v5p:4x4x4"),
}


def cases() -> list[Row]:
    rows, seen = [], set()
    for case in preset_cases.CASES:
        if case.model in CASES and case.model not in seen:
            seen.add(case.model)
            rows.append(_of_case(case))
    return rows


def _of_case(case: Case) -> Row:
    kind, mesh, topology = CASES[case.model]
    own = flm.DeviceMesh.abstract(mesh)
    batch = 2 * math.prod(own.shape)
    data: Any = jax.ShapeDtypeStruct((batch, case.length + 1), jnp.int32)
    step = preset_cases.train_step
    if case.inputs is not None:
        data, step = case.inputs(batch), preset_cases.squares_step
    state = preset_cases.abstract_state(case)
    theirs = flm.presets.load(case.family, own, variant=case.variant)
    return Row(kind, case.model, mesh, topology, step, (*state, data), theirs)


def fsdp_of(row: Row) -> flm.LayoutMap:
    """`presets.fsdp`, with the layouts that the model asks for by name."""
    mesh = flm.DeviceMesh.abstract(row.mesh)
    axis = "fsdp" if "fsdp" in mesh.axis_names else mesh.axis_names[0]
    fsdp = flm.presets.fsdp(row.args[0], mesh, axis=axis)
    for name in pod_plan.RULES.names:
        batch = fsdp.freeze().batch
        fsdp.names[name] = (batch, ...)
    if row.kind == "experts":
        fsdp.names["by_expert|experts"] = (...,)
    return fsdp


def measured(row: Row) -> dict[str, Any]:
    def planned(layout_map: Any) -> Any:
        step = flm.jit(row.step, layout_map=layout_map)
        return flm.pod.plan(step, *row.args, mesh=row.mesh, topology=row.topology)

    given = {"mesh": row.mesh, "topology": row.topology}
    start, cpu = time.perf_counter(), time.process_time()
    searched = flm.suggest(row.step, *row.args, **given, check=False)
    search = time.perf_counter() - start, time.process_time() - cpu
    today = {"layout_map": row.theirs, "check": False}
    compared = flm.suggest(row.step, *row.args, **given, **today, limit_seconds=0)
    limit = compared.choices["today"].cost.peak_bytes
    limited = flm.suggest(row.step, *row.args, **given, **today, hbm=limit)
    start = time.perf_counter()
    found = flm.suggest(row.step, *row.args, **given)
    whole = time.perf_counter() - start
    reports = {
        "ours": found.plan,
        "theirs": planned(row.theirs),
        "fsdp": planned(fsdp_of(row)),
    }
    costs = {name: cost_of_report(report) for name, report in reports.items()}
    return {
        "row": row,
        "search": search,
        "whole": whole,
        "found": found,
        "searched": searched,
        "limited": limited,
        "costs": costs,
        "fits": found.fits,
    }


def before_singles(found: flm.Suggestion) -> float:
    """Seconds of the search until single parameters are tried, without lowering."""
    steps = [one for one in found.trail if one.what.startswith("batch over")]
    return steps[-1].took_seconds


def show(done: dict[str, Any]) -> None:
    row, costs, found = done["row"], done["costs"], done["found"]
    limited = done["limited"]
    ours, theirs, fsdp = costs["ours"], costs["theirs"], costs["fsdp"]
    sent = found.choices["suggested"].estimate.total_sent_bytes
    cells = [
        row.model,
        row.mesh,
        f"{before_singles(done['searched']):.1f}",
        f"{done['search'][0]:.1f} ({done['search'][1]:.1f} CPU)",
        f"{done['whole']:.1f}",
        str(found.trail[-1].tried),
        *(f"{one.seconds * 1e3:.2f}" for one in (ours, theirs, fsdp)),
        f"{ours.seconds / theirs.seconds:.3f}",
        f"{limited.cost.seconds / limited.choices['today'].cost.seconds:.3f}",
        f"{ours.total_sent_bytes / max(fsdp.total_sent_bytes, 1):.2f}",
        f"{ours.at_rest_bytes / fsdp.at_rest_bytes:.2f}",
        f"{ours.total_sent_bytes / max(sent, 1):.3f}",
    ]
    print("|", " | ".join(cells), "|", flush=True)


# Kind → the most that suggested rules may cost, as a share of theirs, and seconds.
TARGETS = {
    "decoder": (1.0, 5.0),
    "decoder, unscanned": (1.02, 10.0),
    "ViT": (1.02, 10.0),
    "encoder": (1.02, 10.0),
    "experts": (1.0, 30.0),
}


def targets(every: list[dict[str, Any]]) -> bool:
    met = True
    for done in every:
        row, costs = done["row"], done["costs"]
        share, seconds = TARGETS[row.kind]
        own = costs["ours"].seconds / costs["theirs"].seconds
        sent = costs["ours"].total_sent_bytes
        name = f"{row.model}, {row.mesh}"
        classes, refined = before_singles(done["searched"]), done["search"][0]
        limited = done["limited"]
        with_theirs = limited.cost.seconds / limited.choices["today"].cost.seconds
        checks = {
            f"cost {own:.3f} of theirs, at most {share}": own <= share + 5e-4,
            f"with their memory {with_theirs:.3f}, at most {share}": limited.fits
            and with_theirs <= share + 5e-4,
            f"classes in {classes:.1f} s, at most {seconds:.0f}": classes <= seconds,
            f"refined in {refined:.1f} s, at most {3 * seconds:.0f}": refined
            <= 3 * seconds,
            "no more bytes sent than presets.fsdp": sent
            <= costs["fsdp"].total_sent_bytes * 1.0005,
        }
        for text, holds in checks.items():
            print(f"- {'PASS' if holds else 'MISS'}: {name}: {text}")
            met = met and holds
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    rows = [*decoders(), *cases()]
    names = sorted({row.model for row in rows})
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    chosen = parser.parse_args()
    print(f"| {' | '.join(HEADER)} |")
    print(f"|---|---|{'--:|' * (len(HEADER) - 2)}", flush=True)
    every = []
    for row in rows:
        if row.model in chosen.only:
            every.append(measured(row))
            show(every[-1])
    print()
    return 0 if targets(every) else 1


if __name__ == "__main__":
    sys.exit(main())
