"""Save a checkpoint on one mesh; inspect, plan and restore it on other meshes.

A small model and its AdamW state are trained for one step on data=2,model=4 and saved.
The checkpoint is inspected and restored on meshes of other shapes and device counts,
with the saved rules and with others. The exit status is 1 if a restored array is not
bit for bit the saved one.
"""

import os
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import flax_layoutmap as flm

WIDTH = 256


class Mlp(nnx.Module):
    """Three layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(self.norm(nnx.relu(self.up(x))))


def make() -> dict:
    model = Mlp(nnx.Rngs(0))
    return {"model": model, "optimizer": nnx.Optimizer(model, TX, wrt=nnx.Param)}


TX = optax.adamw(1e-3)


def rules_on(mesh: flm.DeviceMesh) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh)
    layout_map["up/kernel"] = ("data", "model")
    layout_map["down/kernel"] = ("model", "data")
    layout_map["up/bias|norm"] = ("model",)
    layout_map["down/bias"] = None  # replicated, on purpose
    return layout_map


def same_values(one: dict, other: dict) -> bool:
    """Whether two trainings hold the same bits, wherever they lie."""
    pairs = zip(
        jax.tree.leaves(nnx.state(one)), jax.tree.leaves(nnx.state(other)), strict=True
    )
    return all(np.array_equal(a, b) for a, b in pairs)


def main() -> int:
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", 8)
    count = jax.device_count()
    ways = 4 if count % 4 == 0 else 1
    here = rules_on(flm.DeviceMesh(f"data=-1,model={ways}"))

    training = flm.create(make, here)

    @flm.jit(layout_map=here)
    def step(model: Mlp, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return loss

    step(*training.values(), jnp.ones((8, WIDTH)))

    right = True
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step-1"
        flm.checkpoint.save(path, training, layout_map=here)
        print("What the checkpoint holds\n")
        print(flm.checkpoint.inspect(path))

        print(f"\n{flm.checkpoint.verify(path)}")
        other = flm.DeviceMesh(f"data={ways},model=-1")
        print("\nWhat a restore of the model alone, on another mesh, will read\n")
        alone = {"mesh": other, "include": "^model/"}
        print(flm.checkpoint.plan(path, **alone))

        for name, mesh in (
            ("the other mesh", other),
            ("one device", flm.DeviceMesh("data=1,model=1", devices=jax.devices()[:1])),
        ):
            # No rules: those that it was saved with.
            restored = flm.checkpoint.restore(path, make, mesh=mesh, verify=True)
            same = same_values(training, restored)
            spec = restored["model"].up.kernel.get_value().sharding.spec
            print(
                f"\nrestored on {name}, {mesh!r}: up/kernel is {tuple(spec)}, ", end=""
            )
            print("the values are the same" if same else "THE VALUES DIFFER")
            right &= same

        weights = flm.checkpoint.restore(
            path, layout_map=here, include="^model/", dtype=jnp.bfloat16
        )
        kernel = weights["model"]["up"]["kernel"]
        print(f"\nwithout the model, as asked for: {kernel.dtype}")

        wrong = rules_on(flm.DeviceMesh(f"data=-1,model={ways}"))
        wrong.replace("down/kernel", ("model", "data", None))
        try:
            flm.checkpoint.restore(path, make, layout_map=wrong)
        except flm.errors.CheckpointError as error:
            print(f"\nand with a rule that does not fit:\n{error}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
