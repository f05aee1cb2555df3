"""Write `saved_at_1e0675b.zip`: a checkpoint as the library saved it at that commit.

    git worktree add /tmp/then 1e0675b
    PYTHONPATH=/tmp/then python tests/golden/make_checkpoint.py

`tests/checkpoint/test_checkpoint_saved.py` restores it with the code of today.
"""

import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import flax_layoutmap as flm

FILE = Path(__file__).with_name("saved_at_1e0675b.zip")


class Net(nnx.Module):
    """Layers in a list, half precision, batch statistics, random state, a layout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(8, 16, rngs=rngs, param_dtype=jnp.bfloat16)
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(3)])
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        layout = flm.TensorLayout(["model", None])
        self.marked = nnx.Param(jnp.zeros((8, 2)), layout=layout)


class Dense(nn.Module):
    """Parameters that their names lay out."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        init = nn.with_partitioning(nn.initializers.ones, (None, "model"))
        return x @ self.param("kernel", init, (8, 8))


def make() -> dict[str, Any]:
    """The tree, with the values of its initializers."""
    net = Net(nnx.Rngs(0))
    params = Dense().init(jax.random.key(0), jnp.ones((1, 8)))["params"]
    tx = optax.chain(optax.clip(1.0), optax.adafactor(1e-2, min_dim_size_to_factor=4))
    return {
        "model": net,
        "optimizer": nnx.Optimizer(net, optax.adamw(1e-3), wrt=nnx.Param),
        "linen": TrainState.create(apply_fn=None, params=params, tx=tx),
        "keys": {
            "one": jax.random.key(7),
            "three": jax.random.split(jax.random.key(8), 3),
        },
        "arrays": {
            "w": jnp.zeros((8, 4)),
            "whole": jnp.zeros((3, 5), jnp.int8),
            "empty": jnp.zeros((0, 4)),
        },
    }


def numbers() -> dict[str, Any]:
    """Values that are not on a device."""
    return {
        "step": 3,
        "rate": 0.5,
        "flag": True,
        "z": 1 + 2j,
        "name": "päth/x",
        "host": np.arange(3, dtype=np.int8),
    }


def rules() -> flm.LayoutMap:
    """Rules for the tree, on 2 × 4 devices."""
    layout_map = flm.LayoutMap("data=2,model=4", strict=False)
    layout_map["kernel"] = (None, "model")
    layout_map["^w$"] = ("data", None)
    layout_map["arrays/w$"] = ("data", None)
    return layout_map


def value_of(path: str, leaf: Any) -> Any:
    """The value of a leaf, which its path tells: the same with every version of JAX."""
    seed = zlib.crc32(path.encode())
    if isinstance(leaf, int):
        return int(value_of(path, np.int32(leaf)))
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = jnp.arange(2 * leaf.size, dtype=jnp.uint32) + jnp.uint32(seed)
        return jax.random.wrap_key_data(data.reshape(*leaf.shape, 2))
    numbers = (np.arange(leaf.size) * 7 + seed) % 101 - 50
    floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    scaled = numbers / 8 if floating else numbers % 100
    return scaled.reshape(leaf.shape).astype(leaf.dtype)


def main() -> None:
    """Write the file; needs the code of that commit, whose private names these are."""
    from flax_layoutmap._place.place import with_leaves
    from flax_layoutmap._tree.flatten import flatten

    jax.config.update("jax_num_cpu_devices", 8)
    tree = make()
    flat = flatten(tree)
    pairs = zip(flat.full_paths(), flat.leaves, strict=True)
    tree = with_leaves(tree, [value_of(path, leaf) for path, leaf in pairs])
    tree = rules().place(tree)
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder, "saved")
        tree["numbers"] = numbers()
        flm.checkpoint.save(saved, tree, layout_map=rules())
        with zipfile.ZipFile(FILE, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in sorted(filter(Path.is_file, saved.rglob("*"))):
                archive.write(file, file.relative_to(saved))


if __name__ == "__main__":
    main()
