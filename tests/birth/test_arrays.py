"""Arrays created in their shards: the bits of one jit, one program for each kind."""

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from hypothesis import settings
from hypothesis import strategies as st
from shards import assert_lies, grid, plain

import flax_layoutmap as flm

pytestmark = pytest.mark.optimised

# Those that take arguments are given some; `ones` and `zeros` are initialisers already.
ARGUMENTS: dict[str, Any] = {
    "constant": (0.5,),
    "variance_scaling": (2.0, "fan_out", "truncated_normal"),
}
INITIALISERS: dict[str, Callable[..., Any]] = {
    name: getattr(nnx.initializers, name)(*ARGUMENTS.get(name, ()))
    for name in dir(nnx.initializers)
    if name.islower() and not name.startswith("_")
    if name not in ("ones", "zeros", "tp")  # an alias of a module
}
ADAM = optax.adam(1e-3)
QR = {"orthogonal", "delta_orthogonal"}  # all others are element by element
BOTH = (("data",), ("model",))


def rules(mesh: flm.DeviceMesh) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh, strict=False, indivisible="replicate")
    layout_map.add(flm.Rule(".", ("data", "model"), rank="skip"))
    return layout_map


def bits(tree: Any) -> list[bytes]:
    return [plain(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def assert_as_jit(make: Callable[..., Any], mesh: flm.DeviceMesh, *args: Any) -> Any:
    """`create` gives the bits and the layouts of a jit of the whole; return them."""
    layout_map = rules(mesh)
    made = flm.create(make, layout_map, *args)
    auto = rules(flm.DeviceMesh(mesh, axis_types="auto"))
    shardings = auto.shardings(lambda: make(*args))
    assert bits(made) == bits(jax.jit(make, out_shardings=shardings)(*args))
    for leaf, wanted in zip(
        jax.tree.leaves(made), jax.tree.leaves(shardings), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim)
    return made


MESHES = ({"data": 2, "model": 4}, {"x": 8}, {"a": 2, "b": 2, "c": 2})


@st.composite
def layouts(draw: Any) -> tuple[dict[str, int], list[Any]]:
    """A mesh, and for each of two dims the axes that it is split over."""
    axes = draw(st.sampled_from(MESHES))
    owner = {name: draw(st.sampled_from((None, 0, 1))) for name in axes}
    return axes, [tuple(name for name in axes if owner[name] == dim) for dim in (0, 1)]


@pytest.mark.slow
@settings(max_examples=20, deadline=None, derandomize=True)
@hypothesis.given(
    name=st.sampled_from(sorted(INITIALISERS)),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    impl=st.sampled_from(["threefry2x32", "rbg", "unsafe_rbg"]),
    layout=layouts(),
    shape=st.tuples(st.sampled_from((8, 24)), st.sampled_from((8, 40))),
    seed=st.integers(0, 2**31),
)
def test_the_bits_of_jit(
    name: str, dtype: str, impl: str, layout: Any, shape: Any, seed: int
) -> None:
    axes, dims = layout
    dtype = "float32" if name in QR else dtype  # which has no bfloat16
    if name == "delta_orthogonal":
        shape, dims = (3, 8, shape[1]), [(), *dims]
    grid = flm.DeviceMesh(tuple(axes.values()), tuple(axes))
    layout_map = flm.LayoutMap(grid, strict=False)
    layout_map["w"] = tuple(dims)

    def make() -> dict[str, Any]:
        key = jax.random.key(seed, impl=impl)
        return {"w": INITIALISERS[name](key, shape, jnp.dtype(dtype))}

    made = flm.create(make, layout_map)["w"]
    assert_lies(made, tuple(dims), grid)
    shardings = layout_map.shardings(make)
    assert bits(made) == bits(jax.jit(make, out_shardings=shardings)())
    if name in QR:
        np.testing.assert_allclose(made, jax.jit(make)()["w"], atol=1e-5)
    else:
        assert bits(made) == bits(jax.jit(make)())


# ------------------------------------------------- constructors of every structure


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(16)(nn.relu(nn.Dense(32)(x)))


class Blocks(nn.Module):
    wrap: Callable[..., Any]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(3):
            x = self.wrap(Block)()(x)
        return x


@jax.jit
def one_call(key: Any, x: Any) -> Any:
    """Calls in calls; an input, a number and a part of another output as outputs."""

    @jax.jit
    def layer(key: Any, x: Any) -> Any:
        w = jax.random.normal(key, (8, 16))
        return {"w": w, "copy": x + 1, "same": x, "number": jnp.float32(1), "w0": w[0]}

    return [layer(key, x * 2) for key in jax.random.split(key, 3)]


def raw_keys(key: Any, x: Any) -> Any:
    keys = jax.random.split(jax.random.PRNGKey(0), 100)
    return {f"w{n}": jax.random.normal(keys[n], (8, 16)) for n in range(4)}


def counters(key: Any, x: Any) -> Any:
    rngs = nnx.Rngs(0)
    keys = [rngs(), rngs(), jax.random.fold_in(rngs(), np.uint32(2**32 - 1))]
    small = jnp.full((4,), 100, jnp.int8) + np.int8(100)
    return {
        "w": [jax.random.normal(key, (8, 16)) for key in keys],
        "small": [small, small * np.int8(3), jnp.uint32(2**32 - 1) + jnp.uint32(3)],
        "count": rngs.default.count[...],
        "keys": keys,
        "many": jax.random.split(key, 8),
        "permuted": jax.random.permutation(key, 64),
    }


def table(key: Any, x: Any) -> Any:
    """With inputs in place of the constants, `exp` and `sin` round otherwise."""
    scales = jnp.exp(-math.log(10_000) / 7 * jnp.arange(8))
    angles = jnp.arange(16)[:, None] * scales[None]
    order = jnp.arange(4)  # whole numbers for keys, and as an output
    key = jax.random.fold_in(jax.random.key(0), order[2] + 1)
    return {
        "sines": jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1),
        "w": jax.random.normal(key, (8, 16)) * order[1],
        "order": order,
    }


def looped(key: Any, x: Any) -> Any:
    def layer(carry: Any, key: Any) -> Any:
        return carry + 1, {"w": jax.random.normal(key, (8, 16)), "at": carry}

    return jax.lax.scan(layer, 0, jax.random.split(key, 3))


def train_state(key: Any, x: Any) -> TrainState:
    variables: Any = Blocks(nn.remat).init(key, x)
    return TrainState.create(apply_fn=None, params=variables["params"], tx=ADAM)


def of_kinds(key: Any, x: Any) -> Any:
    kinds = jnp.float16, complex, bool, jnp.int8
    made = {str(dtype): jnp.full((8, 16), 0.5, dtype) for dtype in kinds}
    return {**made, "rbg": jax.random.key(3, impl="rbg")}


MAKERS: dict[str, Callable[..., Any]] = {
    "train state": train_state,
    "kinds": of_kinds,
    "remat": Blocks(nn.remat).init,
    "jit": Blocks(nn.jit).init,
    "one call": one_call,
    "raw keys": raw_keys,
    "counters": counters,
    "table": table,
    "scan": looped,
    "svd": lambda key, x: jnp.linalg.svd(jax.random.normal(key, (8, 8))),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "auto") for name in MAKERS), ("train state", "explicit")],
)
def test_a_constructor_of_any_structure(name: str, kind: str) -> None:
    key, x = jax.random.key(0), jnp.arange(128.0).reshape(8, 16)
    made = assert_as_jit(MAKERS[name], grid(kind), key, x)
    if name == "train state":  # of the batch only the shape matters
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        again = flm.create(MAKERS[name], rules(grid(kind)), key, shape)
        assert bits(again) == bits(made)


def test_what_has_effects(
    mesh: flm.DeviceMesh, capfd: pytest.CaptureFixture[str]
) -> None:
    def make() -> dict[str, Any]:
        made = {name: jnp.full((8, 16), 2.0) for name in "abc"}
        jax.debug.print("sum {}", made["a"].sum())
        return made

    made = flm.create(make, rules(mesh))
    jax.effects_barrier()
    assert capfd.readouterr().out.splitlines() == ["sum 256.0"]
    assert_lies(made["b"], BOTH, mesh)


def test_x64_for_this_thread_alone(mesh: flm.DeviceMesh) -> None:
    """Several programs are compiled by threads that do not have the setting."""

    def make() -> Any:
        keys = jax.random.split(jax.random.key(0))
        return [jax.random.normal(keys[at], (8, 512 + at), "float64") for at in (0, 1)]

    layout_map = flm.LayoutMap(mesh)
    layout_map[".*"] = ("data", None)
    with jax.enable_x64(True):
        made, expected = flm.create(make, layout_map), jax.jit(make)()
        for array, same in zip(made, expected, strict=True):
            assert array.dtype == np.float64
            np.testing.assert_array_equal(array, same)


# --------------------------------------------------- which programs there are


def stack(layers: int) -> Callable[[], Any]:
    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up = nnx.Linear(8, 24, rngs=rngs)
            self.down = nnx.Linear(24, 8, rngs=rngs)
            # A new function for each layer, with the same contents.
            self.own = nnx.Param(
                jax.jit(lambda k: jax.random.normal(k, (8, 8)))(rngs())
            )
            self.drop = nnx.Dropout(0.5, rngs=rngs)

    return lambda: nnx.List([Layer(nnx.Rngs(at)) for at in range(layers)])


def test_equal_layers_share_their_programs(
    mesh: flm.DeviceMesh, compilations: list[str]
) -> None:
    layout_map = rules(mesh)
    flm.create(stack(1), layout_map)
    first = len(compilations)
    assert first
    model = flm.create(stack(6), layout_map)
    assert len(compilations) == first
    whole = jax.jit(lambda: nnx.split(stack(6)())[1])()
    assert bits(nnx.state(model)) == bits(whole)


def test_a_program_is_that_of_its_settings(mesh: flm.DeviceMesh) -> None:
    def make() -> Any:
        with jax.threefry_partitionable(False):
            old = jax.random.normal(jax.random.key(0), (8, 16))
        return {"old": old, "new": jax.random.normal(jax.random.key(0), (8, 16))}

    made = assert_as_jit(make, mesh)
    assert bits(made["old"]) != bits(made["new"])


def test_a_program_is_that_of_its_constants(mesh: flm.DeviceMesh) -> None:
    """Two texts are equal, and the arrays that their loops close over are not."""

    def make(constant: Any) -> Any:
        def layer(carry: Any, key: Any) -> Any:
            return carry * jax.random.normal(key, (8, 16)) + constant, None

        keys = jax.random.split(jax.random.key(0), 2)
        return {"w": jax.lax.scan(layer, jnp.ones((8, 16)), keys)[0]}

    for number in (3.0, 4.0, 3.0):
        constant = jnp.full((8, 16), number)
        made = flm.create(lambda c=constant: make(c), rules(mesh))
        np.testing.assert_allclose(made["w"], make(constant)["w"], rtol=1e-4, atol=1e-5)


def test_programs_keep_no_arrays(mesh: flm.DeviceMesh, compilations: list[str]) -> None:
    watched, counts = [], []
    for number in (3.0, 4.0):
        constant = jnp.full((8, 16), number)
        inner = jax.jit(lambda x, c=constant: jax.jit(lambda y: y + c)(x) * 2)
        watched.append(weakref.ref(constant))

        def make(inner: Any = inner) -> dict[str, Any]:
            return {"w": inner(jax.random.normal(jax.random.key(0), (8, 16)))}

        before = len(compilations)
        made = flm.create(make, rules(mesh))
        counts.append(len(compilations) - before)
        assert bits(made) == bits(jax.jit(make)())
        del constant, inner, make, made
    assert counts[0] > counts[1] == 0  # with a constant of its own, the same one
    jax.clear_caches()
    gc.collect()
    assert [ref() for ref in watched] == [None, None]
