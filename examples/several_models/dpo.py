"""Direct preference optimization: a policy, and the frozen model that it began as.

The policy is sharded with its optimizer state (FSDP); the reference is sharded for
inference. Both have the same paths and shapes, so the optimizer has the name of its
model: `policy_optimizer`.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import flax_layoutmap as flm

BATCH, SEQ, VOCAB, DIM, BETA = 16, 12, 64, 32, 0.1


class LanguageModel(nnx.Module):
    """Logits of the next token, from the last two."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.up = nnx.Linear(2 * DIM, 4 * DIM, rngs=rngs)
        self.head = nnx.Linear(4 * DIM, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        last = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        return self.head(nnx.gelu(self.up(jnp.concatenate([x, last], axis=-1))))


def make() -> dict:
    policy = LanguageModel(rngs=nnx.Rngs(0))
    return {
        "policy": policy,
        "reference": LanguageModel(rngs=nnx.Rngs(0)),  # the same values
        "policy_optimizer": nnx.Optimizer(policy, optax.adamw(1e-2), wrt=nnx.Param),
    }


def rules_on(mesh: flm.DeviceMesh) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh)
    layout_map["policy/embed/embedding"] = ("data", None)
    layout_map["policy/(up|head)/kernel"] = ("data", "model")
    layout_map["reference/embed/embedding"] = (None, "model")
    layout_map["reference/(up|head)/kernel"] = (None, "model")
    layout_map["bias"] = None
    return layout_map


def log_probability(model: LanguageModel, tokens: jax.Array) -> jax.Array:
    """Of each sequence, (batch,)."""
    logits = model(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return -losses.sum(axis=-1)


def train_step(policy, reference, policy_optimizer, batch):
    chosen, rejected = batch["chosen"], batch["rejected"]
    margin = log_probability(reference, chosen) - log_probability(reference, rejected)

    def loss_of(policy: LanguageModel):
        own = log_probability(policy, chosen) - log_probability(policy, rejected)
        reward = BETA * (own - margin)
        return -nnx.log_sigmoid(reward).mean(), (reward > 0).mean()

    value_and_grad = nnx.value_and_grad(loss_of, has_aux=True)
    (loss, preferred), gradients = value_and_grad(policy)
    policy_optimizer.update(policy, gradients)
    return loss, preferred


def main() -> None:
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", 8)
    ways = 2 if jax.device_count() % 2 == 0 else 1
    layout_map = rules_on(flm.DeviceMesh(f"data=-1,model={ways}"))
    models = flm.create(make, layout_map)
    layout_map.resolve(models).show()

    donated = ("policy", "policy_optimizer")
    step = flm.jit(train_step, layout_map=layout_map, donate_argnames=donated)
    random = np.random.default_rng(0)
    start = random.integers(VOCAB, size=(BATCH, 1))
    batch = {  # what is preferred: to count up
        "chosen": (start + np.arange(SEQ)) % VOCAB,
        "rejected": random.integers(VOCAB, size=(BATCH, SEQ)),
    }
    for at in range(41):
        loss, preferred = step(**models, batch=batch)
        if at % 10 == 0:
            print(
                f"step {at}: loss {float(loss):.3f}, preferred {float(preferred):.0%}"
            )
    print(f"policy {models['policy'].up.kernel.sharding.spec}")
    print(f"reference {models['reference'].up.kernel.sharding.spec}")


if __name__ == "__main__":
    main()
