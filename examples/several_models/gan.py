"""A GAN: a generator and a critic under one set of rules, each with its optimizer.

Rules tell the two apart by the names that they have in the dict of `make`, which are
those of the step's arguments.
"""

import os

import jax
import numpy as np
import optax
from flax import nnx

import flax_layoutmap as flm

BATCH, NOISE, WIDTH = 64, 16, 64


class Mlp(nnx.Module):
    """Two layers."""

    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(inputs, WIDTH, rngs=rngs)
        self.down = nnx.Linear(WIDTH, outputs, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.leaky_relu(self.up(x)))


def make() -> dict:
    generator = Mlp(NOISE, 2, rngs=nnx.Rngs(0))
    critic = Mlp(2, 1, rngs=nnx.Rngs(1))
    tx = optax.adam(1e-3)
    return {
        "generator": generator,
        "critic": critic,
        "generator_optimizer": nnx.Optimizer(generator, tx, wrt=nnx.Param),
        "critic_optimizer": nnx.Optimizer(critic, tx, wrt=nnx.Param),
    }


def rules_on(mesh: flm.DeviceMesh) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh)
    layout_map["generator/up/kernel"] = (None, "model")
    layout_map["generator/down/kernel"] = ("model", None)
    layout_map["critic/up/kernel"] = (None, "data")  # FSDP
    layout_map["critic/down/kernel"] = ("data", None)
    layout_map["bias"] = None
    return layout_map


def critic_loss(critic: Mlp, generator: Mlp, real: jax.Array, noise: jax.Array):
    of_real = optax.sigmoid_binary_cross_entropy(critic(real), 1.0)
    of_fake = optax.sigmoid_binary_cross_entropy(critic(generator(noise)), 0.0)
    return (of_real + of_fake).mean()


def generator_loss(generator: Mlp, critic: Mlp, noise: jax.Array):
    return optax.sigmoid_binary_cross_entropy(critic(generator(noise)), 1.0).mean()


def train_step(generator, critic, generator_optimizer, critic_optimizer, real, noise):
    loss, gradients = nnx.value_and_grad(critic_loss)(critic, generator, real, noise)
    critic_optimizer.update(critic, gradients)
    gradients = nnx.grad(generator_loss)(generator, critic, noise)
    generator_optimizer.update(generator, gradients)
    return loss


def main() -> None:
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", 8)
    ways = 2 if jax.device_count() % 2 == 0 else 1
    layout_map = rules_on(flm.DeviceMesh(f"data=-1,model={ways}"))
    models = flm.create(make, layout_map)  # all four, sharded from birth
    layout_map.resolve(models).show()

    step = flm.jit(train_step, layout_map=layout_map, donate_argnames=tuple(models))
    random = np.random.default_rng(0)
    for at in range(201):
        angle = random.uniform(0, 2 * np.pi, BATCH)
        real = np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
        noise = random.normal(size=(BATCH, NOISE)).astype(np.float32)
        loss = step(**models, real=real, noise=noise)
        if at % 50 == 0:
            print(f"step {at}: loss of the critic {float(loss):.3f}")
    moment = models["critic_optimizer"].opt_state[0].mu
    print(f"generator {models['generator'].up.kernel.sharding.spec}")
    print(f"critic {models['critic'].up.kernel.sharding.spec}, as its moments")
    assert moment.up.kernel.sharding == models["critic"].up.kernel.sharding


if __name__ == "__main__":
    main()
