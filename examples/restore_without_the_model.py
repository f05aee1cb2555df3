"""Restore a plain Orbax checkpoint sharded, without the code of its model.

A Linen TrainState is saved by plain Orbax from one device, as a `CheckpointManager`
does in many training scripts. Rules alone put its parameters onto eight devices; the
optimizer's state is not read. Ends with exit status 1 if a number differs, or if more
was read than the parameters take.
"""

import os
import sys
import tempfile
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState

import flax_layoutmap as flm


def train_elsewhere(folder: Path) -> dict:
    """What some other script did; returns its parameters, to compare with."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for at in range(4):
                x = nn.relu(nn.Dense(512, name=f"layer_{at}")(x))
            return nn.Dense(128, name="head")(x)

    net = Net()
    params = net.init(jax.random.key(0), jnp.ones((1, 512)))["params"]
    state = TrainState.create(apply_fn=net.apply, params=params, tx=optax.adam(1e-3))
    with ocp.CheckpointManager(folder) as manager:
        for step in (100, 200):
            manager.save(step, args=ocp.args.StandardSave(state))
    return params


def main() -> int:
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", 8)
    ways = 4 if jax.device_count() % 4 == 0 else 1
    layout_map = flm.LayoutMap(f"data=-1,model={ways}")
    layout_map[r"layer_\d/kernel"] = ("data", "model")
    layout_map["head/kernel"] = ("model", None)
    layout_map["bias"] = None

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        expected = train_elsewhere(folder)
        info = flm.checkpoint.inspect(folder)
        print(info)
        print(f"steps: {info.steps}\n")

        only_parameters = {
            "layout_map": layout_map,
            "step": "latest",
            "include": "^params/",
        }
        plan = flm.checkpoint.plan(folder, **only_parameters)
        print(plan)
        params = flm.checkpoint.restore(folder, **only_parameters)["params"]

    same = all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True)
    )
    total = sum(leaf.bytes for leaf in info.leaves)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    read = sum(plan.read.values())
    spec = params["layer_0"]["kernel"].sharding.spec
    print(f"\nlayer_0/kernel lies as {tuple(spec)}; values are {same and 'the same'}")
    print(f"read {read:,} bytes of {total:,}; the parameters are {held:,}")
    return 0 if same and read <= 1.05 * held else 1


if __name__ == "__main__":
    sys.exit(main())
