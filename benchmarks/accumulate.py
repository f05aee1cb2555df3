"""What gradient accumulation, ZeRO and Muon keep and send, by layouts.

    python benchmarks/accumulate.py
    python benchmarks/accumulate.py --topology v5e:2x4

A step of four micro-batches is planned with each layout (`flm.pod.plan`; no devices
are needed), or compiled for a topology (and libtpu: pip install
'flax-layoutmap[tpu-aot]'). Prints one Markdown table: MiB of a device, and
what it sends in a step, in how many collectives. Sums of gradients, which the loop
carries, are computed from the layouts; a plan has no peak. Then the target as PASS or
FAIL: with `accumulate`, no gradient is reduced more than once over axes without
parameters.
"""

import argparse
import collections
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import flax_layoutmap as flm

MODEL, HIDDEN, LAYERS, ROWS, STEPS = 1024, 4096, 8, 32768, 4
HEADER = (
    "layouts",
    "mesh",
    "parameters",
    "sums of gradients",
    "optimizer state",
    "peak",
    "sent",
)


class Block(nnx.Module):
    """A residual block of two matrices."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(MODEL, HIDDEN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, MODEL, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.down(nnx.relu(self.up(x)))


class Stack(nnx.Module):
    """Blocks with stacked parameters."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        make = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Block))
        self.layers = make(rngs)

    def __call__(self, x: Any) -> Any:
        call = nnx.scan(
            lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry
        )
        return call(self.layers, x)


def loss_fn(model: Any, batch: Any) -> Any:
    """The mean square error."""
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def by_layer(parameters: Any) -> Any:
    """Muon's dims of stacked matrices."""
    dims = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    return jax.tree.map(lambda _: dims, parameters)


ADAM = optax.adamw(1e-3)
MUON = optax.contrib.muon(1e-3, muon_weight_dimension_numbers=by_layer)


def rules(mesh: str, layout: Any, optimizer: Any = None) -> flm.LayoutMap:
    """Rules with one layout for all parameters, and one for their optimizer state."""
    axes = [axis for axis in ("data", "fsdp") if axis in mesh]
    layout_map = flm.LayoutMap(flm.DeviceMesh.abstract(mesh), batch=axes)
    layout_map["kernel"] = layout
    if optimizer is not None:
        layout_map.optimizer["kernel"] = optimizer
    layout_map.activations["layers"] = (axes, None)
    return layout_map


WHOLE, ROW = (None, None, None), (None, "data", None)
BOTH = (None, ("fsdp", "data"), None)
# Name, rules, optimizer, and the option `axes`.
CASES = (
    ("replicated, plain loop", rules("data=8", WHOLE), ADAM, ()),
    ("replicated", rules("data=8", WHOLE), ADAM, None),
    ("ZeRO-1", rules("data=8", WHOLE, ROW), ADAM, None),
    ("ZeRO-2: `axes=()`", rules("data=8", WHOLE, ROW), ADAM, ()),
    ("ZeRO-3", rules("data=8", ROW), ADAM, None),
    (
        "ZeRO-3 over fsdp, plain loop",
        rules("data=2,fsdp=4", (None, "fsdp", None), BOTH),
        ADAM,
        (),
    ),
    (
        "ZeRO-3 over fsdp, ZeRO-1 over data",
        rules("data=2,fsdp=4", (None, "fsdp", None), BOTH),
        ADAM,
        None,
    ),
    (
        'the same, gathered once: `axes=("data", "fsdp")`',
        rules("data=2,fsdp=4", (None, "fsdp", None), BOTH),
        ADAM,
        ("data", "fsdp"),
    ),
    ("Muon", rules("data=2,fsdp=4", (None, "fsdp", None)), MUON, None),
    (
        "Muon by layer",
        rules("data=2,fsdp=4", (None, "fsdp", None), ("fsdp", None, None)),
        MUON,
        None,
    ),
)


def report_of(case: Any, topology: str | None) -> Any:
    """The report of a step."""
    _, layout_map, tx, axes = case

    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        gradient = flm.accumulate(loss_fn, steps=STEPS, axes=axes)
        loss, gradients = gradient(model, batch)
        optimizer.update(model, gradients)
        return loss

    model = nnx.eval_shape(lambda: Stack(nnx.Rngs(0)))
    optimizer = nnx.eval_shape(
        lambda: nnx.Optimizer(Stack(nnx.Rngs(0)), tx, wrt=nnx.Param)
    )
    rows = jax.ShapeDtypeStruct((ROWS, MODEL), jnp.float32)
    options: Any = {"layout_map": layout_map, "donate_argnames": ("model", "optimizer")}
    if topology is None:
        return flm.pod.plan(
            train_step, model, optimizer, {"x": rows, "y": rows}, **options
        )
    return flm.pod.compile(
        train_step,
        model,
        optimizer,
        {"x": rows, "y": rows},
        topology=topology,
        mesh=str(layout_map.device_mesh),
        **options,
    )


def is_reduced_once(case: Any, report: Any) -> bool:
    """Whether what is over axes without parameters only is not in a loop."""
    _, layout_map, _, axes = case
    own = {*layout_map["kernel"].axis_names}.difference(axes or ())
    return axes == () or all(
        one.executions == 1 for one in report.collectives if not own & {*one.axes}
    )


def row_of(case: Any, report: Any) -> list[str]:
    """The cells of one row."""
    name, layout_map, _, axes = case
    at_rest = report.memory.at_rest
    own = layout_map.resolve(nnx.eval_shape(lambda: Stack(nnx.Rngs(0))))
    sums = own.bytes_per_device
    for axis in axes or ():
        if axis in layout_map["kernel"].axis_names:  # gathered before the loop
            sums *= layout_map.device_mesh.axis_sizes[axis]
    if axes == () and layout_map.optimizer:
        sums //= layout_map.device_mesh.axis_sizes["data"]
    sent = collections.defaultdict(lambda: [0, 0])
    for one in report.collectives:
        if one.wire_bytes >= 1024:  # not the loss
            cell = sent[" + ".join(one.axes), one.kind]
            cell[0] += one.wire_bytes_per_step
            cell[1] += one.executions
    cells = [
        f"{axes} {kind} {total / 2**20:,.0f} ({times})"
        for (axes, kind), (total, times) in sorted(sent.items())
    ]
    peak = report.memory.peak_bytes
    sizes = [at_rest["parameter"], sums, at_rest["optimizer"], peak]
    mesh = str(layout_map.device_mesh)
    shown = [f"{size / 2**20:,.0f}" if size else "" for size in sizes]
    return [name, mesh, *shown, "; ".join(cells)]


def main() -> None:
    """Plan or compile every case, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", help="compile for it, such as v5e:2x4")
    topology = parser.parse_args().topology
    warnings.simplefilter("ignore", flm.LayoutWarning)
    print("| " + " | ".join(HEADER) + " |")
    print("|---|---|--:|--:|--:|--:|---|")
    missed = []
    for case in CASES:
        report = report_of(case, topology)
        print("| " + " | ".join(row_of(case, report)) + " |", flush=True)
        if not is_reduced_once(case, report):
            missed.append(case[0])
    print(
        f"\n{'FAIL' if missed else 'PASS'}: one reduction {', '.join(missed)}".strip()
    )
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
