"""State in host memory against state on the device: time of a step, and memory.

    python benchmarks/offload.py
    python benchmarks/offload.py --topology v5e:2x2

A stack of scanned layers is trained with AdamW, and predicts, on four virtual devices
of the CPU, the ways in turn. There host and device memory are one, so the times show
what calls and copies cost there, and nothing about the link to an accelerator. With
`--topology` the TPU compiler says what each program allocates in the memory of a device
(libtpu: pip install 'flax-layoutmap[tpu-aot]'), for layers that are four times as wide:
it keeps smaller arrays in the fast memory of the chip. Prints one Markdown table.
"""

import argparse
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import flax_layoutmap as flm

LAYERS, MESH = 8, "data=1,model=4"
WIDTH, WIDTH_ON_TPU = 1024, 4096
HOST = "pinned_host"
# Name: memory of the optimizer, memory of the parameters, whether in chunks.
WAYS = {
    "all on the device": (None, None, False),
    "optimizer on the host": (HOST, None, False),
    "optimizer on the host, chunks": (HOST, None, True),
    "all on the host": (HOST, HOST, False),
    "all on the host, chunks": (HOST, HOST, True),
}


class Block(nnx.Module):
    """A residual block of two matrices."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.down(nnx.relu(self.up(x)))


class Stack(nnx.Module):
    """Blocks with stacked parameters."""

    def __init__(self, width: int) -> None:
        make = nnx.vmap(lambda rngs: Block(width, rngs))
        self.layers = nnx.split_rngs(splits=LAYERS)(make)(nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        call = nnx.scan(
            lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry
        )
        return call(self.layers, x)


def train(model: Any, optimizer: Any, x: Any) -> Any:
    """A step of training."""
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def predict(model: Any, x: Any) -> Any:
    """The output of the model."""
    return model(x)


def rules(way: str, mesh: Any) -> flm.LayoutMap:
    """The rules of a way."""
    layout_map = flm.LayoutMap(mesh, batch="data")
    optimizer, parameters, _ = WAYS[way]
    for name, layout in (
        ("up/kernel", (None, None, "model")),
        ("down/kernel", (None, "model", None)),
    ):
        layout_map[name] = flm.TensorLayout(layout, memory_kind=parameters)
        layout_map.optimizer[name] = flm.TensorLayout(layout, memory_kind=optimizer)
    return layout_map


def jitted(way: str, layout_map: Any, width: int) -> tuple[Any, Any]:
    """The step and the prediction; a chunk has a matrix of each moment."""
    chunk = 2 * width * width if WAYS[way][2] else None
    options = {"layout_map": layout_map, "offload_chunk_bytes": chunk}
    step = flm.jit(train, donate_argnames=("model", "optimizer"), **options)
    return step, flm.jit(predict, **options)


def calls(way: str, x: Any) -> tuple[Any, Any]:
    """One call of the step, and of the prediction."""
    layout_map = rules(way, MESH)
    model = flm.create(lambda: Stack(WIDTH), layout_map)
    optimizer = flm.create_optimizer(model, optax.adamw(1e-3), layout_map=layout_map)
    step, forward = jitted(way, layout_map, WIDTH)
    return lambda: step(model, optimizer, x), lambda: forward(model, x)


def seconds(repeats: int, rows: int) -> dict[str, list[float]]:
    """Medians for each way, of the step and the prediction."""
    x = np.ones((rows, WIDTH), np.float32)
    made = {way: calls(way, x) for way in WAYS}
    found: dict[str, list[list[float]]] = {way: [[], []] for way in WAYS}
    for turn in range(repeats + 1):
        for way, both in made.items():
            for call, times in zip(both, found[way], strict=True):
                start = time.perf_counter()
                jax.block_until_ready(call())
                if turn:  # the first compiles
                    times.append(time.perf_counter() - start)
    return {way: list(map(statistics.median, times)) for way, times in found.items()}


def peaks(way: str, topology: str, rows: int) -> list[float]:
    """MiB on a device, of the step and the prediction."""
    model = nnx.eval_shape(lambda: Stack(WIDTH_ON_TPU))
    optimizer = nnx.eval_shape(
        lambda: nnx.Optimizer(Stack(WIDTH_ON_TPU), optax.adamw(1e-3), wrt=nnx.Param)
    )
    x = jax.ShapeDtypeStruct((rows, WIDTH_ON_TPU), jnp.float32)
    step, forward = jitted(way, rules(way, None), WIDTH_ON_TPU)
    reports = [
        flm.pod.compile(fun, *args, mesh=MESH, topology=topology)
        for fun, args in ((step, (model, optimizer, x)), (forward, (model, x)))
    ]
    return [(report.memory.peak_bytes or 0) / 2**20 for report in reports]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--rows", type=int, default=64, help="in the batch")
    parser.add_argument("--topology", help="of TPUs, such as v5e:2x2")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    header = ["way", "step, CPU", "prediction, CPU"]
    if options.topology:
        header += [f"step, MiB of {options.topology}", "prediction, MiB"]
    print(f"| {' | '.join(header)} |\n|---|{'--:|' * (len(header) - 1)}")
    times = seconds(options.repeats, options.rows)
    floors = times["all on the device"]
    for way in WAYS:
        cells = [
            f"{own * 1e3:.1f} ms ({own / floor:.2f}×)"
            for own, floor in zip(times[way], floors, strict=True)
        ]
        if options.topology:
            found = peaks(way, options.topology, options.rows)
            cells += [f"{mebibytes:.1f}" for mebibytes in found]
        print(f"| {way} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
