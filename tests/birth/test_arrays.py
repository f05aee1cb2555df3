"""Arrays created in their shards: the bits of one jit, one program for each kind."""

import gc
import logging
import math
import re
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
from hypothesis import settings
from hypothesis import strategies as st
from shards import assert_lies

import flax_layoutmap as flm
from flax_layoutmap._birth import arrays as _arrays
from flax_layoutmap._birth import programs as _programs

pytestmark = pytest.mark.optimised

INITIALISERS: dict[str, Callable[..., Any]] = {
    name: getattr(nnx.initializers, name)()
    for name in (
        "delta_orthogonal",
        "glorot_normal",
        "glorot_uniform",
        "he_normal",
        "he_uniform",
        "kaiming_normal",
        "kaiming_uniform",
        "lecun_normal",
        "lecun_uniform",
        "normal",
        "ones_init",
        "orthogonal",
        "truncated_normal",
        "uniform",
        "xavier_normal",
        "xavier_uniform",
        "zeros_init",
    )
}
INITIALISERS["constant"] = nnx.initializers.constant(0.5)
INITIALISERS["variance_scaling"] = nnx.initializers.variance_scaling(
    2.0, "fan_out", "truncated_normal"
)
QR = {"orthogonal", "delta_orthogonal"}  # all others are element by element


def rules(mesh: flm.DeviceMesh) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh, strict=False, indivisible="replicate")
    layout_map.add(flm.Rule(".", ("data", "model"), rank="skip"))
    return layout_map


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many leaves each program that was run made; none is compiled before."""
    seen: list[int] = []

    def run(step: Any, *args: Any) -> list[Any]:
        results = _programs.run(step, *args)
        if step.names:
            seen.append(len(results))
        return results

    monkeypatch.setattr(_arrays, "run", run)
    monkeypatch.setattr(_programs, "_PROGRAMS", type(_programs._PROGRAMS)())
    return seen


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_no_initialiser_is_left_out() -> None:
    for module in (nnx.initializers, jax.nn.initializers):
        names = {n for n in dir(module) if n.islower() and not n.startswith("_")}
        # Two that are functions of a shape themselves, and an alias of a module.
        assert names - {"ones", "zeros", "tp"} <= set(INITIALISERS)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_bits_of_jit(mesh: flm.DeviceMesh, impl: Any, dtype: Any) -> None:
    """With and without shardings; element by element, what all but QR are."""

    def make() -> dict[str, Any]:
        keys = jax.random.split(jax.random.key(0, impl=impl), len(INITIALISERS))
        shapes = {"delta_orthogonal": (3, 8, 16)}
        return {
            name: init(key, shapes.get(name, (8, 16)), dtype)
            for (name, init), key in zip(INITIALISERS.items(), keys, strict=True)
            if dtype == jnp.float32 or name not in QR  # which has no bfloat16
        }

    layout_map = rules(mesh)
    shardings = layout_map.shardings(make)
    made = flm.create(make, layout_map)
    whole = jax.jit(make, out_shardings=shardings)()
    plain = jax.jit(make)()
    assert bits(made) == bits(whole)
    for name in made:
        if name in QR:
            np.testing.assert_allclose(made[name], plain[name], atol=1e-5)
        else:
            assert bits(made[name]) == bits(plain[name]), name
            assert_lies(made[name], (("data",), ("model",)), mesh)


MESHES = ({"data": 2, "model": 4}, {"x": 8}, {"a": 2, "b": 2, "c": 2})


@st.composite
def layouts(draw: Any) -> tuple[dict[str, int], list[Any]]:
    """A mesh, and for each of two dims the axes that it is split over."""
    axes = draw(st.sampled_from(MESHES))
    owner = {name: draw(st.sampled_from((None, 0, 1))) for name in axes}
    return axes, [tuple(name for name in axes if owner[name] == dim) for dim in (0, 1)]


@pytest.mark.slow
@settings(max_examples=12, deadline=None, derandomize=True)
@hypothesis.given(
    name=st.sampled_from(sorted(set(INITIALISERS) - QR)),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    impl=st.sampled_from(["threefry2x32", "rbg", "unsafe_rbg"]),
    layout=layouts(),
    shape=st.tuples(st.sampled_from((8, 24)), st.sampled_from((8, 40))),
    seed=st.integers(0, 2**31),
)
def test_the_bits_of_jit_in_any_layout(
    name: str, dtype: str, impl: str, layout: Any, shape: Any, seed: int
) -> None:
    axes, dims = layout
    grid = flm.DeviceMesh(tuple(axes.values()), tuple(axes))
    layout_map = flm.LayoutMap(grid, strict=False)
    layout_map["w"] = tuple(dims)

    def make() -> dict[str, Any]:
        key = jax.random.key(seed, impl=impl)
        return {"w": INITIALISERS[name](key, shape, jnp.dtype(dtype))}

    made = flm.create(make, layout_map)["w"]
    assert_lies(made, dims, grid)
    shardings = layout_map.shardings(make)
    assert bits(made) == bits(jax.jit(make, out_shardings=shardings)())
    assert bits(made) == bits(jax.jit(make)())


def reducing() -> dict[str, Any]:
    """Arrays of which each element is computed from many."""
    keys = jax.random.split(jax.random.key(0), 4)
    first, second, third, fourth = (jax.random.normal(key, (64, 64)) for key in keys)
    fifth = jax.random.normal(jax.random.key(1), (64, 64))
    return {
        "normed": first / jnp.linalg.norm(first),
        "centred": second - second.mean(0),
        "product": third @ third.T @ third,
        "quantised": jnp.round(fifth @ fifth.T * 1e6).astype(jnp.int32),
        "plain": fourth,
    }


def with_qr() -> dict[str, Any]:
    return reducing() | {
        "orthogonal": nnx.initializers.orthogonal()(jax.random.key(5), (64, 64))
    }


@pytest.mark.slow
def test_exact_values_of_what_reduces(
    mesh: flm.DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "flax_layoutmap._birth"):
        exact = flm.create(with_qr, rules(mesh), exact=True)
        told = caplog.messages[:]
        caplog.clear()
        close = flm.create(with_qr, rules(mesh))
    assert sorted(told) == [
        f"initialized replicated, then sliced (exact=True): ['{name}']"
        for name in (
            *("centred", "normed", "orthogonal", "plain", "product", "quantised"),
        )
    ]
    # QR is no sum of shards: it is done whole in any case, and named.
    assert "initialized replicated, then sliced (qr): ['orthogonal']" in (
        caplog.messages
    )
    plain = jax.jit(reducing)() | {
        # Beside QR, XLA itself rounds a mean otherwise.
        "orthogonal": jax.jit(lambda: with_qr()["orthogonal"])()
    }
    assert bits(exact) == bits(plain)
    for name, leaf in close.items():
        assert_lies(leaf, (("data",), ("model",)), mesh)
        assert_lies(exact[name], (("data",), ("model",)), mesh)
        scale = np.abs(plain[name]).max()
        np.testing.assert_allclose(leaf, plain[name], rtol=1e-5, atol=1e-5 * scale)
    # The control: without it the bits are others here.
    for name in ("product", "quantised"):
        assert bits(close[name]) != bits(plain[name])


def not_in_parts() -> dict[str, Any]:
    """Of these, XLA computes the last one alone in parts."""
    first, *others = jax.random.split(jax.random.key(0), 3)
    return {
        "permuted": jax.random.permutation(first, 4096),
        "summed": jnp.cumsum(jax.random.normal(others[0], (4096,))),
        "plain": jax.random.normal(others[1], (4096,)),
    }


def test_what_is_not_made_in_parts_is_named(
    mesh: flm.DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    layout_map = flm.LayoutMap(mesh)
    layout_map[".*"] = (("data", "model"),)
    with caplog.at_level(logging.INFO, "flax_layoutmap._birth"):
        made = flm.create(not_in_parts, layout_map)
    pattern = r"(\S+) KiB of temporary memory .*, more than whole arrays take: (.*)"
    told = [re.fullmatch(pattern, message) for message in caplog.messages]
    assert sorted(found[2] for found in told if found) == ["['permuted']", "['summed']"]
    assert all(float(found[1]) > 16 for found in told if found)  # 4,096 × 4 bytes
    for name, leaf in made.items():
        assert {shard.data.size for shard in leaf.addressable_shards} == {512}, name
    del made["summed"]  # sums of parts may round otherwise
    assert bits(made) == bits({n: jax.jit(not_in_parts)()[n] for n in made})


@pytest.fixture
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_arrays, "_TOLD", set())


@pytest.mark.usefixtures("nothing_told")
def test_keys_that_may_depend_on_shardings_are_told_of_once(
    mesh: flm.DeviceMesh, recwarn: pytest.WarningsRecorder
) -> None:
    def make(key: Any) -> Any:
        return {"w": jax.random.normal(key, (8, 16))}

    rbg = jax.random.key(0, impl="rbg")
    whole = flm.LayoutMap(mesh, strict=False)
    flm.create(make, whole, rbg)  # replicated: no sharding that it could depend on
    flm.create(make, rules(mesh), jax.random.key(0))
    flm.create(lambda key: {"key": key, "w": jnp.ones((8, 16))}, rules(mesh), rbg)
    assert [str(w.message) for w in recwarn] == []
    with pytest.warns(flm.LayoutWarning, match="keys of this model are key<rbg>") as w:
        flm.create(make, rules(mesh), rbg)
    assert w[0].filename == __file__
    flm.create(make, rules(mesh), rbg)
    assert [str(w.message) for w in recwarn] == []


@pytest.mark.usefixtures("nothing_told")
def test_bits_that_each_device_computes_whole_are_told_of_once(
    mesh: flm.DeviceMesh, recwarn: pytest.WarningsRecorder, programs: list[int]
) -> None:
    def make() -> Any:
        return {"w": jax.random.normal(jax.random.key(0), (8, 16))}

    layout_map = rules(mesh)
    with jax.threefry_partitionable(False):
        with pytest.warns(flm.LayoutWarning, match="jax_threefry_partitionable is off"):
            made = flm.create(make, layout_map)
        flm.create(make, layout_map)
        assert bits(made) == bits(jax.jit(make)())
    other = flm.create(make, layout_map)
    assert [str(w.message) for w in recwarn] == []
    assert bits(other) != bits(made)  # no program of the other kind was used


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the programs are given."""
    seen: list[Any] = []

    plain = _programs._moved

    def moved(value: Any, place: Any) -> Any:
        seen.append(plain(value, place))
        return seen[-1]

    monkeypatch.setattr(_programs, "_moved", moved)
    return seen


def test_large_values_of_the_host_go_to_their_shards(
    mesh: flm.DeviceMesh, given: list[Any]
) -> None:
    """`jax.jit` would give each device the whole table."""
    table = np.arange(128.0, dtype=np.float32).reshape(8, 16)

    def make(x: Any) -> dict[str, Any]:
        return {
            "own": jnp.asarray(table) * 2 + 1,
            "given": jnp.sqrt(x).astype(jnp.bfloat16),
            "turned": x.T.reshape(8, 16) * 2,
            "summed": x - x.sum(),
        }

    explicit = flm.DeviceMesh((2, 4), ("data", "model"), axis_types="explicit")
    for kind in (mesh, explicit):
        given.clear()
        made = flm.create(make, rules(kind), jnp.asarray(table))
        assert bits(made) == bits(jax.jit(make)(table))
        laid = [x for x in given if len(x.sharding.device_set) == 8]
        assert len(given) == 4 and len(laid) == 2
        for x in laid:
            assert_lies(x, (("data",), ("model",)), mesh)


@pytest.mark.slow
def test_calls_do_not_tie_arrays_together(
    mesh: flm.DeviceMesh, programs: list[int]
) -> None:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(16)(nn.relu(nn.Dense(32)(x)))

    class Model(nn.Module):
        wrap: Callable[..., Any]

        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(3):
                x = self.wrap(Block)()(x)
            return x

    x = jnp.ones((2, 16))
    for wrap in (nn.remat, nn.jit, lambda block: block):
        init = Model(wrap).init
        made = flm.create(init, rules(mesh), jax.random.key(0), x)
        assert set(programs) == {1}
        shardings = jax.tree.map(lambda leaf: leaf.sharding, made)
        jitted = jax.jit(init, out_shardings=shardings)
        assert bits(made) == bits(jitted(jax.random.key(0), x))
    # Kernels and biases of two shapes, and how keys are folded in.
    assert len(_programs._PROGRAMS) <= 12 < len(programs)


def test_a_function_that_is_one_call(mesh: flm.DeviceMesh, programs: list[int]) -> None:
    @jax.jit
    def layer(key: Any, x: Any) -> Any:
        w = jax.random.normal(key, (8, 16))
        return {"w": w, "copy": x + 1, "same": x, "number": jnp.float32(1)}

    @jax.jit
    def make(key: Any, x: Any) -> Any:
        return [layer(one, x * 2) for one in jax.random.split(key, 3)]

    x = jnp.arange(128.0).reshape(8, 16)
    made = flm.create(make, rules(mesh), jax.random.key(0), x)
    assert bits(made) == bits(make(jax.random.key(0), x))
    assert max(programs) < 9  # not all in one


def stack(layers: int) -> Callable[[], Any]:
    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up = nnx.Linear(8, 16, rngs=rngs)
            self.down = nnx.Linear(16, 8, rngs=rngs)
            # A new function for each layer, with the same contents.
            self.own = nnx.Param(
                jax.jit(lambda k: jax.random.normal(k, (8, 8)))(rngs())
            )
            self.drop = nnx.Dropout(0.5, rngs=rngs)

    return lambda: nnx.List([Layer(nnx.Rngs(at)) for at in range(layers)])


def test_equal_layers_share_their_programs(
    mesh: flm.DeviceMesh, programs: list[int]
) -> None:
    layout_map = rules(mesh)
    flm.create(stack(1), layout_map)
    few = len(_programs._PROGRAMS)
    runs = len(programs)
    model = flm.create(stack(4), layout_map)
    assert len(programs) > 4 * runs  # each is run for each layer
    # The seeds of the layers are constants of the constructor.
    assert few <= len(_programs._PROGRAMS) <= few + 3
    plain = jax.jit(lambda: nnx.split(stack(4)())[1])()
    made = [leaf for leaf in jax.tree.leaves(nnx.state(model))]
    for one, other in zip(made, jax.tree.leaves(plain), strict=True):
        if not jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            assert bits(one) == bits(other)


def test_programs_are_shared_whatever_mesh_is_in_context(
    mesh: flm.DeviceMesh, programs: list[int]
) -> None:
    made = flm.create(stack(1), rules(mesh))
    few = len(_programs._PROGRAMS)
    assert isinstance(mesh.jax_mesh, jax.sharding.Mesh)
    with jax.set_mesh(mesh.jax_mesh):
        again = flm.create(stack(1), rules(mesh))
    assert len(_programs._PROGRAMS) == few
    kernels = [one[0].up.kernel.get_value() for one in (made, again)]
    assert bits(kernels[0]) == bits(kernels[1])


def test_counters_of_keys_need_no_program(
    mesh: flm.DeviceMesh, programs: list[int]
) -> None:
    def make() -> dict[str, Any]:
        most = np.uint32(2**32 - 1)
        rngs = nnx.Rngs(0)
        keys = [rngs(), rngs(), rngs(), jax.random.fold_in(rngs(), most)]
        count = jnp.full((), most, jnp.uint32) + np.uint32(3)
        small = jnp.full((4,), 100, jnp.int8) + np.int8(100)
        return {
            "w": [jax.random.normal(key, (8, 16)) for key in keys],
            "count": [count, small, small * np.int8(3)],
            "rngs": rngs.default.count[...],
        }

    made = flm.create(make, rules(mesh))
    assert bits(made) == bits(jax.jit(make)())
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(made))
    assert_lies(made["count"][1], ((),), mesh, np.full(4, -56, np.int8))
    # Of a seed, of a number and a key (given or counted), and the normals.
    assert len(_programs._PROGRAMS) == 3


def test_what_differs_has_its_own_program(
    mesh: flm.DeviceMesh, programs: list[int]
) -> None:
    def make() -> dict[str, Any]:
        return {
            "zero": jnp.full((8, 16), 0.0),
            "minus": jnp.full((8, 16), -0.0),
            "one": jnp.full((8, 16), 1.0),
            "again": jnp.full((8, 16), 1.0),
            "whole": jnp.full((8, 16), 1),
            "wide": jnp.full((8, 32), 1.0),
        }

    made = flm.create(make, rules(mesh))
    assert len(programs) == 6 and len(_programs._PROGRAMS) == 5
    assert bits(made) == bits(make())
    assert np.signbit(np.asarray(made["minus"])).all()


def test_what_xla_folds_is_folded(mesh: flm.DeviceMesh) -> None:
    """With an input in place of a constant, `exp` and `sin` round otherwise."""

    def sinusoids(length: int, channels: int) -> Any:
        step = math.log(10_000) / (channels // 2 - 1)
        scales = jnp.exp(-step * jnp.arange(channels // 2))
        angles = jnp.arange(length)[:, None] * scales[None]
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)

    def make() -> dict[str, Any]:
        order = jnp.arange(4)  # whole numbers for keys, and as an output
        key = jax.random.fold_in(jax.random.key(0), order[2] + 1)
        return {
            "positions": sinusoids(16, 16),
            "w": jax.random.normal(key, (8, 16)) * order[1],
            "order": order,
            "last": order[3],
        }

    plain = jax.jit(make)()
    whole = flm.LayoutMap(mesh, strict=False)
    assert bits(flm.create(make, whole)) == bits(plain)
    # The control: one operation after the other gives other bits.
    assert bits(make()["positions"]) != bits(plain["positions"])
    # In shards, nothing is folded: by jit neither. Unless the bits are asked for.
    layout_map = rules(mesh)
    shardings = layout_map.shardings(make)
    split = jax.jit(make, out_shardings=shardings)()
    assert bits(flm.create(make, layout_map)) == bits(split) != bits(plain)
    assert bits(flm.create(make, layout_map, exact=True)) == bits(plain)


def test_leaves_with_a_common_origin_are_computed_together(
    mesh: flm.DeviceMesh, programs: list[int]
) -> None:
    def make() -> dict[str, Any]:
        whole = jax.random.normal(jax.random.key(0), (8, 32))
        return {
            "left": whole[:, :16] * 2,
            "right": whole[:, 16:],
            "alone": jax.random.normal(jax.random.key(1), (8, 16)),
        }

    made = flm.create(make, rules(mesh))
    assert sorted(programs)[-2:] == [1, 2]
    assert bits(made) == bits(jax.jit(make)())


def test_one_value_in_two_places(mesh: flm.DeviceMesh) -> None:
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["first"] = ("data", None)
    layout_map["second"] = (None, "model")

    def make(x: Any) -> dict[str, Any]:
        value = jax.random.normal(jax.random.key(0), (8, 16))
        return {"first": value, "second": value, "given": x}

    x = jnp.arange(100)
    made = flm.create(make, layout_map, x)
    assert_lies(made["first"], (("data",), ()), mesh)
    assert_lies(made["second"], ((), ("model",)), mesh)
    assert_lies(made["given"], ((),), mesh, np.arange(100, dtype=np.int32))
    np.testing.assert_array_equal(made["first"], made["second"])


def test_what_has_effects_is_one_program(
    mesh: flm.DeviceMesh,
    programs: list[int],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def make() -> dict[str, Any]:
        made = {name: jnp.full((8, 16), 2.0) for name in "abc"}
        jax.debug.print("sum {}", made["a"].sum())
        return made

    with caplog.at_level(logging.DEBUG, "flax_layoutmap._birth"):
        made = flm.create(make, rules(mesh))
        jax.effects_barrier()
    assert programs == [3]
    assert "one program for 3 arrays: effects" in caplog.text
    assert "sum 256.0" in capfd.readouterr().out
    assert_lies(made["b"], (("data",), ("model",)), mesh)


def test_inside_of_a_trace_it_is_one_program(
    mesh: flm.DeviceMesh, programs: list[int]
) -> None:
    layout_map = rules(mesh)

    def total() -> Any:
        model = flm.create(lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0)), layout_map)
        return model.kernel[...].sum()

    inside = jax.jit(total)()
    assert len(programs) == 1
    np.testing.assert_allclose(inside, total(), rtol=1e-6)


@pytest.mark.parametrize("tx", [optax.adamw(1e-3), optax.adafactor(1e-3)])
def test_optimizer_state(
    mesh: flm.DeviceMesh, programs: list[int], tx: optax.GradientTransformation
) -> None:
    model = flm.create(stack(3), rules(mesh))
    programs.clear()
    _programs._PROGRAMS.clear()
    optimizer = flm.create_optimizer(model, tx)
    assert len(_programs._PROGRAMS) < len(programs) / 2
    plain = nnx.Optimizer(stack(3)(), tx, wrt=nnx.Param)
    for one, other in zip(
        jax.tree.leaves(nnx.state(optimizer)),
        jax.tree.leaves(nnx.state(plain)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)
        assert len(one.sharding.device_set) == 8


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many programs were compiled at a time; none is there before."""
    seen: list[int] = []
    plain = _programs._compile

    def compile_(calls: Any) -> Any:
        seen.append(len(calls))
        return plain(calls)

    monkeypatch.setattr(_programs, "_compile", compile_)
    monkeypatch.setattr(_programs, "_PROGRAMS", type(_programs._PROGRAMS)())
    return seen


def test_all_programs_are_compiled_at_once_and_kept(
    mesh: flm.DeviceMesh, compiled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> dict[str, Any]:
        return {f"w{n}": jnp.full((8, 16), float(n)) for n in range(6)}

    flm.create(make, rules(mesh))
    flm.create(make, rules(mesh))
    assert compiled == [6, 0]
    compiled.clear()
    flm.create(stack(2), rules(mesh))
    assert len(compiled) == 1  # keys, and what is made of them
    # More than are kept: what this call needs is not thrown away before it runs.
    monkeypatch.setattr(_programs, "_KEPT", 3)
    compiled.clear()
    flm.create(make, rules(mesh))
    assert sum(compiled) <= 6 and len(_programs._PROGRAMS) == 3


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


def test_programs_keep_no_arrays(mesh: flm.DeviceMesh, programs: list[int]) -> None:
    watched, made, counts = [], [], []
    for _ in range(2):
        constant = jnp.full((8, 16), 3.0)
        inner = jax.jit(lambda x, c=constant: jax.jit(lambda y: y + c)(x) * 2)
        watched.append(weakref.ref(constant))

        def make(inner: Any = inner) -> dict[str, Any]:
            return {"w": inner(jax.random.normal(jax.random.key(0), (8, 16)))}

        made.append(flm.create(make, rules(mesh)))
        counts.append(len(_programs._PROGRAMS))
        assert bits(made[-1]) == bits(jax.jit(make)())
        del constant, inner, make
    assert counts[0] == counts[1]  # with a constant of its own, the same one
    jax.clear_caches()
    gc.collect()
    assert [ref() for ref in watched] == [None, None]


@pytest.mark.parametrize("raw", [False, True])
def test_many_keys_tie_nothing_together(
    mesh: flm.DeviceMesh, programs: list[int], raw: bool
) -> None:
    def make() -> dict[str, Any]:
        key = jax.random.PRNGKey(0) if raw else jax.random.key(0)
        keys = jax.random.split(key, 100)
        return {f"w{n}": jax.random.normal(keys[n], (8, 16)) for n in range(4)}

    made = flm.create(make, rules(mesh))
    assert set(programs) == {1}
    assert bits(made) == bits(jax.jit(make)())


def test_an_argument_on_one_device_goes_to_its_shards(
    mesh: flm.DeviceMesh, given: list[Any]
) -> None:
    x = jax.device_put(jnp.arange(128.0).reshape(8, 16), jax.devices()[1])
    made = flm.create(lambda x: {"w": x * 2}, rules(mesh), x)
    assert_lies(made["w"], (("data",), ("model",)), mesh, np.asarray(x) * 2)
    assert_lies(given[0], (("data",), ("model",)), mesh)
