"""Actor–critic: two heads on one shared encoder, which appears once in the tree.

The encoder is a member of both models, so its Variables are tied: they have one path,
`agent/actor/encoder/…`, and one layout. Two optimizers update their own parts: one the
actor with the encoder, one the head of the critic.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import flax_layoutmap as flm

BATCH, SIZE, WIDTH, ACTIONS = 64, 8, 64, 4


class Head(nnx.Module):
    """A linear layer on an encoder."""

    def __init__(self, encoder: nnx.Module, outputs: int, *, rngs: nnx.Rngs) -> None:
        self.encoder = encoder
        self.out = nnx.Linear(WIDTH, outputs, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.tanh(self.encoder(x)))


class Agent(nnx.Module):
    """The actor and the critic, and an encoder that both have."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        encoder = nnx.Linear(SIZE, WIDTH, rngs=rngs)
        self.actor = Head(encoder, ACTIONS, rngs=rngs)
        self.critic = Head(encoder, 1, rngs=rngs)


def make() -> dict:
    agent = Agent(nnx.Rngs(0))
    actor, critic = optax.adam(3e-3), optax.adam(3e-3)
    return {
        "agent": agent,
        "actor_optimizer": nnx.Optimizer(agent.actor, actor, wrt=nnx.Param),
        "critic_optimizer": nnx.Optimizer(agent.critic.out, critic, wrt=nnx.Param),
    }


def rules_on(mesh: flm.DeviceMesh) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh)
    layout_map["encoder/kernel"] = (None, "model")
    layout_map["actor/out/kernel"] = ("model", None)
    layout_map["critic/out/kernel"] = ("data", None)
    layout_map["bias"] = None
    return layout_map


def train_step(agent, actor_optimizer, critic_optimizer, x, action, reward):
    def loss_of(agent: Agent):
        value = agent.critic(x)[:, 0]
        advantage = jax.lax.stop_gradient(reward - value)
        logits = agent.actor(x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, action)
        return (losses * advantage).mean() + ((reward - value) ** 2).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(agent)
    actor_optimizer.update(agent.actor, gradients["actor"])
    critic_optimizer.update(agent.critic.out, gradients["critic"]["out"])
    return loss


def main() -> None:
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", 8)
    ways = 2 if jax.device_count() % 2 == 0 else 1
    layout_map = rules_on(flm.DeviceMesh(f"data=-1,model={ways}"))
    models = flm.create(make, layout_map)
    agent = models["agent"]
    layout_map.resolve(models).show()

    @flm.jit(layout_map=layout_map)
    def act(agent: Agent, x: jax.Array, key: jax.Array) -> jax.Array:
        return jax.random.categorical(key, agent.actor(x))

    step = flm.jit(train_step, layout_map=layout_map, donate_argnames=tuple(models))
    random = np.random.default_rng(0)
    for at in range(301):
        x = random.normal(size=(BATCH, SIZE)).astype(np.float32)
        action = np.asarray(act(agent, x, jax.random.key(at)))
        reward = (action == x[:, :ACTIONS].argmax(axis=1)).astype(np.float32)
        step(**models, x=x, action=action, reward=reward)
        if at % 100 == 0:
            print(f"step {at}: mean reward {reward.mean():.2f}")
    assert agent.actor.encoder is agent.critic.encoder
    print(f"encoder {agent.actor.encoder.kernel.sharding.spec}, in both heads")
    assert jnp.isfinite(agent.critic.out.kernel[...]).all()


if __name__ == "__main__":
    main()
