"""Distillation: a wide frozen teacher, sharded over "model", and a small student.

The teacher is an argument of the step that nothing updates: `flm.jit` neither donates
nor returns its Variables. It may be restored from a checkpoint instead.
"""

import os

import jax
import numpy as np
import optax
from flax import nnx

import flax_layoutmap as flm

BATCH, SIZE = 64, 16


class Mlp(nnx.Module):
    """Two layers."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(SIZE, width, rngs=rngs)
        self.down = nnx.Linear(width, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(x)))


def make() -> dict:
    student = Mlp(32, rngs=nnx.Rngs(1))
    return {
        "teacher": Mlp(256, rngs=nnx.Rngs(0)),
        "student": student,
        "optimizer": nnx.Optimizer(student, optax.adam(1e-2), wrt=nnx.Param),
    }


def rules_on(mesh: flm.DeviceMesh) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh)
    layout_map["teacher/up/kernel"] = (None, "model")
    layout_map["teacher/down/kernel"] = ("model", None)
    layout_map["student"] = None  # and its optimizer state follows
    layout_map["bias"] = None
    return layout_map


def train_step(teacher: Mlp, student: Mlp, optimizer: nnx.Optimizer, x: jax.Array):
    wanted = nnx.softmax(teacher(x))

    def loss_of(student: Mlp) -> jax.Array:
        return optax.softmax_cross_entropy(student(x), wanted).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(student)
    optimizer.update(student, gradients)
    return loss


def main() -> None:
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", 8)
    ways = 2 if jax.device_count() % 2 == 0 else 1
    layout_map = rules_on(flm.DeviceMesh(f"data=-1,model={ways}"))
    models = flm.create(make, layout_map)
    layout_map.resolve(models).show()

    donated = ("student", "optimizer")
    step = flm.jit(train_step, layout_map=layout_map, donate_argnames=donated)
    before = models["teacher"].up.kernel[...]
    random = np.random.default_rng(0)
    for at in range(101):
        x = random.normal(size=(BATCH, SIZE)).astype(np.float32)
        loss = step(**models, x=x)
        if at % 25 == 0:
            print(f"step {at}: loss {float(loss):.3f}")
    assert models["teacher"].up.kernel[...] is before
    print(f"the teacher is untouched: {before.sharding.spec}")


if __name__ == "__main__":
    main()
