"""Suggested rules beside FSDP and hand-written rules.

    python benchmarks/suggest.py
    python benchmarks/suggest.py --only 8B "experts" --engine partitioner

Decoders of `_decoders.py`, scanned, on meshes of one, two and three axes, and the steps
of `_steps.py`, each against its hand-written rules, and against `presets.fsdp` on one
axis of all devices. A time is that of `flm.suggest`: collectives at the speed of the
links, products at the peak of the device; memory is the peak of a device, where libtpu
tells it (pip install 'flax-layoutmap[tpu-aot]'). With `--limit`, `flm.suggest` gets the
memory of the hand-written rules, and a hundredth, as `hbm=`. Needs no devices. Prints a
Markdown table; a row takes half a minute to a minute.
"""

import argparse
import dataclasses
import datetime
import math
import time
import warnings
from importlib import metadata
from typing import Any

import _decoders
import jax
import jax.numpy as jnp
from _steps import STEPS

import flax_layoutmap as flm

HEADER = "step|mesh|suggested|ms|FSDP, ms|theirs, ms|of FSDP|of theirs|GiB|theirs|s"
MESHES = {
    "v5e:4x4": ("fsdp=16", "fsdp=4,tensor=4", "data=2,fsdp=2,tensor=4"),
    "v5p:4x4x4": ("fsdp=64", "fsdp=16,tensor=4", "data=2,fsdp=8,tensor=4"),
}
# Model, topology, sequences in a batch, tokens in a sequence.
DECODERS = (
    ("1B", "v5e:4x4", 16, 2048),
    ("8B", "v5p:4x4x4", 64, 4096),
    ("70B", "v5p:4x4x4", 64, 4096),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A step, and the rules that it is compared with."""

    name: str
    step: Any
    args: tuple[Any, ...]
    state: tuple[str, ...]
    mesh: flm.DeviceMesh
    topology: str
    theirs: flm.LayoutMap


def rows() -> dict[str, Any]:
    """Name → what makes the row."""
    found: dict[str, Any] = {}
    for model, topology, batch, length in DECODERS:
        for mesh in MESHES[topology]:
            given = model, topology, mesh, batch, length
            found[f"{model}, {mesh}"] = lambda given=given: decoder(*given)
    for name in STEPS:
        found[name] = lambda name=name: small(name)
    return found


def decoder(model: str, topology: str, mesh: str, batch: int, length: int) -> Row:
    tokens = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
    state = _decoders.abstract_state(_decoders.CONFIGS[model])
    target = flm.DeviceMesh.abstract(mesh)
    theirs = on_axes(_decoders.RULES, target)
    args = (*state, tokens)
    names = ("model", "optimizer")
    return Row(model, _decoders.step, args, names, target, topology, theirs)


def small(name: str) -> Row:
    made = STEPS[name]()
    (step, *args), options = made.arguments()
    mesh = flm.DeviceMesh.abstract(options["mesh"])
    theirs = options["layout_map"].on(mesh)
    return Row(name, step, tuple(args), made.donated, mesh, options["topology"], theirs)


def on_axes(rules: flm.LayoutMap, mesh: flm.DeviceMesh) -> flm.LayoutMap:
    """The rules without the axes that a mesh does not have."""

    def there(layout: Any) -> Any:
        dims = [axes if isinstance(axes, tuple) else (axes,) for axes in layout.axes]
        return [tuple(axis for axis in dim if axis in mesh.axis_names) for dim in dims]

    batch = [axis for axis in ("data", "fsdp") if axis in mesh.axis_names]
    made = flm.LayoutMap(mesh, batch=batch)
    for pattern, layout in rules.items():
        made[pattern] = there(layout) if layout.axis_names else None
    for pattern, layout in rules.names.items():
        made.names[pattern] = there(layout)
    return made


def fsdp_over_all(row: Row) -> flm.LayoutMap:
    """`presets.fsdp` on a mesh of one axis of all devices."""
    mesh = flm.DeviceMesh.abstract(f"fsdp={math.prod(row.mesh.shape)}")
    rules = flm.presets.fsdp(row.args[0], mesh)
    for name in row.theirs.names:
        rules.names[name] = ("fsdp", ...)
    return rules


def suggested(row: Row, mesh: flm.DeviceMesh, rules: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return flm.suggest(
            row.step,
            *row.args,
            mesh=mesh,
            topology=row.topology,
            layout_map=rules,
            donate_argnames=row.state,
            **options,
        )


def measured(row: Row, engine: str | None, is_limited: bool) -> list[str]:
    """The cells of a row."""
    start = time.perf_counter()
    suggestion = suggested(row, row.mesh, row.theirs, engine=engine)
    took = time.perf_counter() - start
    given = {choice.name: choice for choice in suggestion.tried}
    theirs = given.get("the rules given")
    if is_limited and theirs is not None:
        hbm = round(theirs.held_bytes * 1.01)
        suggestion = suggested(row, row.mesh, row.theirs, engine=engine, hbm=hbm)
    rules = fsdp_over_all(row)
    ask = flm.pod.compile if engine == "libtpu" else flm.pod.plan
    try:
        plan = ask(
            row.step,
            *row.args,
            mesh=rules.device_mesh,
            topology=row.topology,
            layout_map=rules,
            donate_argnames=row.state,
        )
        fsdp = dataclasses.replace(suggestion.tried[0], layout_map=rules, plan=plan)
    except flm.errors.LayoutError:  # the batch is not divisible by all devices
        fsdp = None
    ours = suggestion.tried[0]
    return [
        row.name,
        str(row.mesh),
        ours.name,
        f"{ours.seconds * 1e3:.2f}",
        *(_time(other) for other in (fsdp, theirs)),
        *(_share(ours, other) for other in (fsdp, theirs)),
        *(_memory(other) for other in (ours, theirs)),
        f"{took:.0f}",
    ]


def _time(choice: Any) -> str:
    if choice is None:
        return ""
    return f"{choice.seconds * 1e3:.2f}{'' if choice.fits else ', too large'}"


def _share(ours: Any, other: Any) -> str:
    return "" if other is None else f"{ours.seconds / other.seconds:.2f}"


def _memory(choice: Any) -> str:
    return "" if choice is None else f"{choice.held_bytes / 2**30:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names")
    parser.add_argument("--engine", choices=("libtpu", "partitioner"))
    parser.add_argument("--limit", action="store_true")
    options = parser.parse_args()
    versions = ("jax", "flax", "flax-layoutmap")
    print(", ".join(f"{name} {metadata.version(name)}" for name in versions))
    print(f"{datetime.date.today()}\n")
    print(f"|{HEADER}|\n|---|---|---|{'--:|' * 8}", flush=True)
    for name, make in rows().items():
        if any(part in name for part in options.only):
            cells = measured(make(), options.engine, options.limit)
            print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
