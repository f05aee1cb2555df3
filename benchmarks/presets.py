"""Compare what a device sends in a train step by each preset and by published tables.

    python benchmarks/presets.py
    python benchmarks/presets.py --families llama qwen3

Each case of `_preset_cases/` is a model of two layers with published sizes, a step of
adamw on it in bfloat16, and a mesh. `flm.pod.plan` plans it, without devices, with the
preset, in the variant that `flm.presets.detect` takes and without one, and with each
published table: alone, with the residual stream split over the batch axes, and as the
source's code splits it; the least counts. Prints one Markdown table, then the targets
as PASS or FAIL.
"""

import argparse
import importlib
import math
import pkgutil
import sys
from typing import Any

import _preset_cases
import jax
import jax.numpy as jnp
import optax
from _preset_cases import Case
from flax import nnx

import flax_layoutmap as flm

RESIDUAL = r"(layers|blocks|h)/\d+"
CASES = [
    case
    for module in pkgutil.iter_modules(_preset_cases.__path__)
    for case in importlib.import_module(f"_preset_cases.{module.name}").CASES
]


def train_step(model: Any, optimizer: Any, tokens: Any) -> Any:
    def loss_of(model: Any) -> Any:
        logits = model(tokens[:, :-1]).astype(jnp.float32)
        wanted = tokens[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, wanted).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def squares_step(model: Any, optimizer: Any, inputs: Any) -> Any:
    """The same for a model of other data: the mean of the squares of its outputs."""

    def loss_of(model: Any) -> Any:
        return jnp.mean(model(*inputs).astype(jnp.float32) ** 2)

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def abstract_state(case: Case) -> Any:
    def make() -> Any:
        model = case.make(rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param)

    return nnx.eval_shape(make)


def batch_axes(mesh: flm.DeviceMesh) -> tuple[str, ...]:
    return tuple(axis for axis in ("fsdp", "expert") if axis in mesh.axis_names)


def of_table(
    table: dict[str, Any], residual: Any, tokens: Any, mesh: flm.DeviceMesh
) -> flm.LayoutMap:
    """The rules of a published table; what does not divide is replicated."""
    layout_map = flm.LayoutMap(
        mesh,
        batch=batch_axes(mesh),
        overlap="last",
        indivisible="replicate",
        strict=False,
    )
    for pattern, layout in table.items():
        layout_map[pattern] = layout
    if tokens is not None:
        layout_map.names["^by_expert$"] = (None, batch_axes(mesh), ...)
        layout_map.names["^experts$"] = tokens
    if residual is not None:
        layout_map.activations[RESIDUAL] = residual
    return layout_map


def sent(case: Case, layout_map: flm.LayoutMap) -> int:
    """Bytes that a device sends in a step."""
    mesh = layout_map.device_mesh
    assert mesh is not None
    batch = 2 * math.prod(mesh.axis_sizes[axis] for axis in batch_axes(mesh))
    data: Any = jax.ShapeDtypeStruct((batch, case.length + 1), jnp.int32)
    step = train_step
    if case.inputs is not None:
        data, step = case.inputs(batch), squares_step
    step = flm.jit(step, layout_map=layout_map)
    report = flm.pod.plan(step, *abstract_state(case), data, mesh=case.mesh)
    return report.wire_bytes()


def measured(case: Case) -> list[tuple[str, int]]:
    """Whose rules → bytes; the preset's first."""
    mesh = flm.DeviceMesh.abstract(case.mesh)
    rows = []
    for variant in dict.fromkeys((case.variant, None)):
        layout_map = flm.presets.load(case.family, mesh, variant=variant)
        name = "preset" if variant is None else f"preset, {variant}"
        rows.append((name, sent(case, layout_map)))
    for source, (table, residual) in case.tables.items():
        batch = batch_axes(mesh)
        choices = {None, (batch, None, None), residual}
        tokens = case.tokens.get(source)
        maps = [of_table(table, own, tokens, mesh) for own in choices]
        least = min(sent(case, layout_map) for layout_map in maps)
        rows.append((source, least))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    families = sorted({case.family for case in CASES})
    parser.add_argument("--families", nargs="+", choices=families, default=families)
    chosen = parser.parse_args()
    print("| model | mesh | rules | sent by a device, GiB | of the preset's |")
    print("|---|---|---|--:|--:|", flush=True)
    targets = []
    for case in CASES:
        if case.family not in chosen.families:
            continue
        (_, ours), *others = rows = measured(case)
        for at, (source, count) in enumerate(rows):
            first = ("", "") if at else (case.model, case.mesh)
            cells = [*first, source, f"{count / 2**30:.2f}", f"{count / ours:.2f}"]
            print("|", " | ".join(cells), "|", flush=True)
        least = min(count for name, count in others if not name.startswith("preset"))
        name = f"{case.family}, {case.model}, {case.mesh}"
        targets.append((name, ours / least))
    print()
    for name, share in targets:
        word = "PASS" if share <= 1 else "FAIL"
        print(f"- {word}: {name}: {share:.3f} of the best published table, at most 1")
    return 0 if all(share <= 1 for _, share in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
