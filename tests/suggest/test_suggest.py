"""flm.suggest: rules for a step on a mesh."""

import json
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import needs_libtpu

import flax_layoutmap as flm

MESH = "data=4,tensor=2"
WIDE = "data=16,tensor=4"
EXPLICIT = flm.DeviceMesh.abstract("data=8", axis_types="explicit")
FULL = "data + parameters over data+tensor"


def mlp_step(params: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        return jnp.square(jnp.tanh(x @ params["up"]) @ params["down"]).mean()

    return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params))


def mlp(dim: int = 2048, up: str = "up", down: str = "down") -> dict[str, Any]:
    shapes = {up: (dim, 4 * dim), down: (4 * dim, dim)}
    return {n: jax.ShapeDtypeStruct(s, jnp.bfloat16) for n, s in shapes.items()}


def rows(count: int, dim: int = 2048) -> Any:
    return jax.ShapeDtypeStruct((count, dim), jnp.bfloat16)


def layer_step(layer: Any, x: Any) -> Any:
    """Attention with heads in `a` and `b`, and hidden units in `c`, `d` and `e`."""

    def loss(w: Any) -> Any:
        query, key, value = jnp.einsum("bsd,dthk->tbshk", x, w["a"])
        mixed = jax.nn.dot_product_attention(query, key, value)
        y = x + jnp.einsum("bshk,hkd->bsd", mixed, w["b"])
        y = y + (jax.nn.silu(y @ w["c"]) * (y @ w["d"])) @ w["e"]
        return jnp.square(y).mean()

    return jax.tree.map(jnp.subtract, layer, jax.grad(loss)(layer))


@pytest.fixture(scope="module")
def wide() -> flm.Suggestion:
    """A layer on 64 devices, which are too small for a copy."""
    shapes = {"a": (4096, 3, 32, 128), "b": (32, 128, 4096), "e": (16384, 4096)}
    shapes |= dict.fromkeys("cd", (4096, 16384))
    layer = {n: jax.ShapeDtypeStruct(s, jnp.bfloat16) for n, s in shapes.items()}
    x = jax.ShapeDtypeStruct((64, 1024, 4096), jnp.bfloat16)
    return flm.suggest(layer_step, layer, x, mesh=WIDE, hbm=900 << 20)


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.wide = nnx.Linear(64, 256, rngs=rngs)
        self.narrow = nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.narrow(nnx.silu(self.wide(x)))


def make() -> tuple[Mlp, nnx.Optimizer]:
    model = Mlp(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def train_step(model: Mlp, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(lambda m: jnp.square(m(x)).mean())(model)
    optimizer.update(model, gradients)
    return loss


# ------------------------------------------------------------------------- layouts


def test_what_is_tried(wide: flm.Suggestion) -> None:
    names = [choice.name for choice in wide.tried]
    assert FULL in names and "data over data+tensor" not in names
    assert len(set(names)) == len(names) <= 8
    seconds = [choice.seconds for choice in wide.tried if choice.fits]
    assert np.all(np.diff(seconds) >= -1e-3 * seconds[0])
    assert wide.fits and wide.plan.memory.at_rest_bytes <= 900 << 20


def test_dims_that_belong_together_are_found_without_names(
    wide: flm.Suggestion,
) -> None:
    """Megatron's: the heads of `a` and `b`, the hidden units of `c`, `d` and `e`."""
    ndims = {"a": 4, "b": 3, "c": 2, "d": 2, "e": 2}
    split = []
    for choice in wide.tried:
        layouts = [(choice.layout_map[name], ndim) for name, ndim in ndims.items()]
        specs = [layout.dims(ndim) for layout, ndim in layouts if layout is not None]
        split.append([dim.index(("tensor",)) for dim in specs if ("tensor",) in dim])
    assert [2, 0, 1, 1, 0] in split


def test_a_small_model_is_copied_and_a_large_one_is_not() -> None:
    options: Any = {"mesh": "fsdp=8", "donate_argnames": "params"}
    copied = flm.suggest(mlp_step, mlp(), rows(1 << 15), **options)
    assert copied.tried[0].name == "data over fsdp"
    assert "every device keeps a copy, " in copied.why and "pass hbm=" in copied.why
    stored = flm.suggest(mlp_step, mlp(), rows(1 << 15), **options, hbm=64 << 20)
    assert stored.fits and stored.plan.memory.at_rest_bytes <= 64 << 20
    few: Any = {**options, "hbm": np.int64(1024)}
    nothing = flm.suggest(mlp_step, mlp(), rows(1 << 15), **few)
    assert not nothing.fits and nothing.why.startswith("nothing that was tried fits")


def test_rules_given_are_tried_too() -> None:
    options: Any = {"mesh": "data=2,model=4", "donate_argnames": "params"}
    worst = flm.LayoutMap("data=2,model=4", batch="data")
    worst[".*"] = ("model", None)
    given = flm.suggest(mlp_step, mlp(), rows(1 << 15), **options, layout_map=worst)
    assert "the rules given" in [choice.name for choice in given.tried[1:]]
    (rules,) = [c.layout_map for c in given.tried if c.name == "the rules given"]
    assert [layout.axes for layout in rules.values()] == [("model", None)]


def test_an_axis_shards_one_dim_of_an_array() -> None:
    """Rows are the first dim of one `square`, and the second of the other."""

    def step(params: Any, x: Any) -> Any:
        y = flm.distribute_tensor(jnp.tanh(x @ params["w"]), "square")
        return flm.distribute_tensor(y.T, "square") * params["w"]

    params = {"w": jnp.ones((64, 64)), "unused": jnp.ones(32)}
    found = flm.suggest(step, params, jnp.ones((64, 64)), mesh="data=8")
    names = [[*choice.layout_map.names.values()] for choice in found.tried]
    assert ("data", None) in [layout.axes for (layout,) in names]


def test_a_batch_that_does_not_divide_by_all_axes() -> None:
    params = {"up": jnp.ones((16, 64)), "down": jnp.ones((64, 16))}
    options: Any = {"mesh": MESH, "donate_argnames": "params"}
    found = flm.suggest(mlp_step, params, jnp.ones((4, 16)), **options)
    for choice in found.tried:
        assert choice.layout_map.freeze().batch in ((), ("data",), ("tensor",))
    odd = flm.suggest(mlp_step, params, jnp.ones((3, 16)), **options)
    assert "parameters over data+tensor" in [choice.name for choice in odd.tried]
    note = "not split: data of 3 rows, which no axis divides; pad it"
    assert note in odd.notes and "not split" not in str(found.notes)
    rules = [choice.layout_map.freeze() for choice in odd.tried]
    assert all(one not in rules[:n] for n, one in enumerate(rules))


def test_a_cache_is_split_by_rows_and_other_dims() -> None:
    def decode(weights: Any, cache: Any, x: Any) -> Any:
        query = jnp.einsum("bd,dhk->bhk", x, weights["query"])
        scores = jnp.einsum("bhk,bshk->bhs", query, cache["keys"])
        mixed = jnp.einsum("bhs,bshk->bhk", jax.nn.softmax(scores), cache["keys"])
        return jnp.einsum("bhk,hkd->bd", mixed, weights["out"])

    weights = {"query": jnp.ones((512, 8, 64)), "out": jnp.ones((8, 64, 512))}
    cache = {"keys": jax.ShapeDtypeStruct((16, 512, 8, 64), jnp.float32)}
    own: Any = {"mesh": MESH, "donate_argnames": "cache"}
    found = flm.suggest(decode, weights, cache, jnp.ones((16, 512)), **own)
    layouts = [choice.layout_map["keys"] for choice in found.tried]
    specs = [layout.dims(4) for layout in layouts if layout is not None]
    assert any(spec[0] and spec[2] + spec[3] and not spec[1] for spec in specs)


def test_a_step_runs_with_the_rules() -> None:
    x = jnp.ones((32, 64))
    found = flm.suggest(train_step, *nnx.eval_shape(make), x, mesh=MESH)
    for choice in found.tried[:1]:
        layout_map = choice.layout_map.on(flm.DeviceMesh(MESH))
        assert bool(layout_map.activations) == bool(layout_map.freeze().batch)
        model, optimizer = flm.create(make, layout_map=layout_map)
        step = flm.jit(train_step, layout_map=layout_map)
        assert step(model, optimizer, x) > step(model, optimizer, x) > 0
        held = dict.fromkeys(jax.devices(), 0)
        for leaf in jax.tree.leaves((nnx.state(model), nnx.state(optimizer))):
            for shard in leaf.addressable_shards:
                held[shard.device] += shard.data.nbytes
        state = choice.plan.memory.at_rest_bytes - choice.plan.memory.at_rest["data"]
        assert max(held.values()) == state


# ------------------------------------------------------------------ report, errors


def test_the_report(wide: flm.Suggestion) -> None:
    text = str(wide)
    assert text.startswith(f"suggestion for layer_step on mesh {WIDE}: 64 devices")
    assert wide.why.split(",")[0] in text and FULL in text and ": 900.0 MiB per" in text
    assert "to sum activations over tensor takes less time than to gather" in wide.why
    code = text.partition("\n# on")[2].partition("\n")[2].partition("\n\n")[0]
    assert "'" not in code
    made: dict[str, Any] = {"flm": flm}
    exec(code, made)
    assert made["layout_map"].freeze() == wide.layout_map.freeze()
    data = json.loads(json.dumps(wide.to_json()))
    assert [one["name"] for one in data["tried"]] == [one.name for one in wide.tried]
    first = data["tried"][0]
    assert data["fits"] and first["rules"] == wide.layout_map.to_json()
    assert first["plan"] == wide.plan.to_json()
    assert "a step" in repr(wide)
    assert str(pickle.loads(pickle.dumps(wide))) == text


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"hbm": "16GB"}, "hbm='16GB' is not a number of bytes"),
        ({"slices": 2}, "^not a topology: None"),
        ({"mesh": "data=1"}, "needs auto axes and several devices"),
        ({"mesh": EXPLICIT}, "needs auto axes and several devices"),
        ({}, "no state to lay out; its data: x; name the state: donate_argnames="),
    ],
)
def test_options_that_are_refused(options: Any, error: str) -> None:
    with pytest.raises(flm.errors.LayoutError, match=error):
        flm.suggest(lambda x: jnp.sin(x), rows(8), **{"mesh": "data=8", **options})


@pytest.mark.parametrize(
    ("engine", "error"),
    [("x", "^there is no engine 'x'"), ("libtpu", '^engine="libtpu" needs the slice')],
)
def test_an_error_of_all_layouts_is_raised_once(engine: Any, error: str) -> None:
    params = {"up": jnp.ones((16, 64)), "down": jnp.ones((64, 16))}
    with pytest.raises(flm.errors.LayoutError, match=error):
        flm.suggest(mlp_step, params, jnp.ones((8, 16)), mesh=MESH, engine=engine)


@needs_libtpu
def test_libtpu_tells_the_peak() -> None:
    options: Any = {"mesh": "fsdp=4", "topology": "v5e:2x2", "engine": "libtpu"}
    found = flm.suggest(
        mlp_step, mlp(), rows(4096), **options, donate_argnames="params"
    )
    for choice in found.tried:
        peak = choice.plan.memory.peak_bytes
        assert peak is not None and peak > choice.plan.memory.at_rest_bytes
        assert choice.held_bytes == peak
