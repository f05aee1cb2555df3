"""Load a Hugging Face checkpoint (Llama) into shards by rules.

    python examples/load_hugging_face.py            # makes a small one first; seconds
    python examples/load_hugging_face.py --checkpoint path/to/Llama-3.2-1B

It runs on all accelerators that JAX finds, else on 8 virtual CPU devices, and needs no
network. It prints the sharding of each array and how many bytes the files have,
and shows that the sharded model computes what one device does.
"""

import argparse
import dataclasses
import json
import math
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import flax_layoutmap as flm
from flax_layoutmap.checkpoint import mappings


@dataclasses.dataclass(frozen=True)
class Config:
    """What `config.json` says, by the names it has there."""

    vocab_size: int = 1024
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False


def layout_map_for(mesh: flm.DeviceMesh) -> flm.LayoutMap:
    """Every layout of the model; the model below names no mesh axis."""
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["embed/embedding"] = ("model", "data")
    layout_map["attention/(query|key|value)/kernel"] = ("data", "model", None)
    layout_map["attention/out/kernel"] = ("model", None, "data")
    layout_map["(gate|up)/kernel"] = ("data", "model")
    layout_map["down/kernel"] = ("model", "data")
    layout_map["lm_head/kernel"] = ("data", "model")
    layout_map["norm/scale"] = None  # replicated, on purpose
    return layout_map


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotary positions, the first half of each head against the second."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[1])[:, None, None] * frequencies
    (a, b), sin, cos = jnp.split(x, 2, axis=-1), jnp.sin(angles), jnp.cos(angles)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned.astype(x.dtype)


class Attention(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        linear = partial(nnx.LinearGeneral, use_bias=False, rngs=rngs)
        dim, heads = config.hidden_size, config.num_attention_heads
        self.query = linear(dim, (heads, config.head_dim))
        self.key = linear(dim, (config.num_key_value_heads, config.head_dim))
        self.value = linear(dim, (config.num_key_value_heads, config.head_dim))
        self.out = linear((heads, config.head_dim), dim, axis=(-2, -1))
        self.theta = config.rope_theta

    def __call__(self, x: jax.Array) -> jax.Array:
        query = rotate(self.query(x), self.theta)
        key, value = rotate(self.key(x), self.theta), self.value(x)
        return self.out(jax.nn.dot_product_attention(query, key, value, is_causal=True))


class Block(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        dim, hidden = config.hidden_size, config.intermediate_size
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        norm = partial(nnx.RMSNorm, dim, epsilon=config.rms_norm_eps, rngs=rngs)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention = Attention(config, rngs=rngs)
        self.gate, self.up = linear(dim, hidden), linear(dim, hidden)
        self.down = linear(hidden, dim)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        y = self.mlp_norm(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Llama(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        dim, vocabulary = config.hidden_size, config.vocab_size
        self.embed = nnx.Embed(vocabulary, dim, rngs=rngs)
        blocks = range(config.num_hidden_layers)
        self.layers = nnx.List(Block(config, rngs=rngs) for _ in blocks)
        self.norm = nnx.RMSNorm(dim, epsilon=config.rms_norm_eps, rngs=rngs)
        if not config.tie_word_embeddings:
            self.lm_head = nnx.Linear(dim, vocabulary, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        x = self.norm(x)
        return self.lm_head(x) if hasattr(self, "lm_head") else self.embed.attend(x)


def read_config(folder: Path) -> Config:
    """The part of `config.json` that the model above knows."""
    found = json.loads((folder / "config.json").read_text())
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        print(f"Rotary positions are scaled ({rope}), which this model leaves out.")
    known = {field.name for field in dataclasses.fields(Config)}
    given = {name: found[name] for name in known & found.keys()}
    heads = found["num_attention_heads"]
    given.setdefault("num_key_value_heads", heads)
    given["head_dim"] = found.get("head_dim") or found["hidden_size"] // heads
    given["rope_theta"] = rope.get("rope_theta", found.get("rope_theta", 10_000.0))
    return Config(**given)


def make_checkpoint(folder: Path) -> Llama:
    """Write a small model with random weights, as Hugging Face would; return it."""
    config = Config()
    model = Llama(config, rngs=nnx.Rngs(0))
    text = json.dumps({"model_type": "llama", **dataclasses.asdict(config)}, indent=2)
    flm.checkpoint.save_safetensors(
        folder, model, mapping=mappings.llama(), max_file_bytes=5e6
    )
    (folder / "config.json").write_text(text)
    print(f"Made {sorted(file.name for file in folder.iterdir())}")
    return model


def load(folder: Path, config: Config, layout_map: flm.LayoutMap, dtype: Any) -> Llama:
    """The model, each process having read its own shards."""
    began = time.perf_counter()
    model = flm.checkpoint.restore_safetensors(
        folder,
        lambda: Llama(config, rngs=nnx.Rngs(0)),
        layout_map=layout_map,
        mapping=mappings.llama(tied=config.tie_word_embeddings),
        dtype=dtype,
    )
    seconds = time.perf_counter() - began
    files = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    print(
        f"{layout_map.device_mesh}: loaded {files:,} bytes of files in {seconds:.2f} s"
    )
    return model


def show(model: Llama) -> None:
    """Print where each array lies."""
    for keys, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        value = leaf.get_value()
        spec = tuple(value.sharding.spec)
        part = value.sharding.shard_shape(value.shape)
        path = "/".join(map(str, keys))
        print(f"  {path:<34} {value.shape!s:<16} {spec!s:<26} {part} per device")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Load a checkpoint by rules.")
    parser.add_argument("--checkpoint", help="a directory with config.json")
    parser.add_argument("--mesh", help="such as data=2,model=-1")
    parser.add_argument("--dtype", default="float32", help="of the loaded arrays")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="of the logits")
    return parser.parse_args()


def main() -> int:
    options = read_options()
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", 8)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.checkpoint or temporary)
        whole = make_checkpoint(folder) if options.checkpoint is None else None
        config = read_config(folder)
        ways = math.gcd(jax.device_count(), config.num_key_value_heads)
        mesh = flm.DeviceMesh(options.mesh or f"data=-1,model={ways}")
        layout_map = layout_map_for(mesh)
        model = load(folder, config, layout_map, options.dtype)
        show(model)
        if whole is None:
            one = flm.DeviceMesh("data=1,model=1", devices=jax.devices()[:1])
            whole = load(folder, config, layout_map.on(one), options.dtype)
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=(2, 32))
    forward = nnx.jit(lambda model, tokens: model(tokens))
    logits, expected = forward(model, tokens), forward(whole, tokens)
    difference = float(np.abs(np.asarray(logits) - np.asarray(expected)).max())
    equal = difference <= options.tolerance  # False for NaN, too
    print(
        f"Largest difference of the logits to those on one device: {difference:.1e}, "
        f"{'within' if equal else 'MORE THAN'} the tolerance {options.tolerance}."
    )
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
