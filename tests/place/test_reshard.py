"""Whole trees move between layouts and meshes, in chunks, with every value kept."""

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from shards import assert_lies, bare

import flax_layoutmap as flm
from flax_layoutmap._place import reshard as module

LAYOUTS = (
    (None, None, None),
    ("fsdp", None, None),
    (None, "fsdp", None),
    (None, None, "fsdp"),
    (None, ("fsdp", "tensor"), None),
    (None, "tensor", "fsdp"),
    ("tensor", None, "fsdp"),
)
DEVICES = jax.devices()
HALF = flm.DeviceMesh((2, 2), ("fsdp", "tensor"), devices=DEVICES[4:])


def places() -> list[flm.TensorLayout]:
    """Every layout on every mesh that has its axes, and on other devices."""
    meshes = [flm.DeviceMesh(f"fsdp={n},tensor={8 // n}") for n in (2, 4, 8)]
    turned = flm.DeviceMesh((2, 4), ("fsdp", "tensor"), devices=DEVICES[::-1])
    explicit = flm.DeviceMesh("fsdp=2,tensor=4", axis_types="explicit")
    others = [flm.TensorLayout(LAYOUTS[5], m) for m in (turned, HALF, explicit)]
    return [flm.TensorLayout(axes, m) for m in meshes for axes in LAYOUTS] + others


def assert_holds(array: Any, host: np.ndarray, layout: flm.TensorLayout) -> None:
    """The sharding is that of JAX's own function, and each device has its part."""
    assert array.sharding == layout.sharding(host.ndim)
    assert_lies(array, layout.dims(host.ndim), layout.device_mesh, host)  # type: ignore[arg-type]


def rules_for(layout: flm.TensorLayout) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(layout.device_mesh)
    layout_map["w"] = flm.TensorLayout(layout.axes)
    return layout_map


@pytest.mark.parametrize("max_bytes", [1 << 30, 1000])
@pytest.mark.parametrize("start", range(0, len(places()), 3))
def test_every_layout_to_every_other(start: int, max_bytes: int) -> None:
    before = places()[start]
    host = np.arange(8 * 8 * 24, dtype=np.float32).reshape(8, 8, 24)
    for after in places():
        tree = {"w": flm.distribute_tensor(host, before)}
        moved = flm.reshard(tree, rules_for(after), max_bytes=max_bytes)
        assert_holds(moved["w"], host, after)
        assert_holds(tree["w"], host, before)


@pytest.mark.parametrize("shape", [(16, 6, 40), (8, 8, 21), (7, 8, 8)])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_slices_of_uneven_size(shape: tuple[int, ...], dtype: str) -> None:
    """In the context of another mesh, under a transfer guard, and donated."""
    host = np.arange(np.prod(shape)).reshape(shape).astype(jnp.dtype(dtype))
    mesh = flm.DeviceMesh("fsdp=2,tensor=4")
    axes = [None, None, None]
    axes[[n % 4 for n in shape].index(0)] = "tensor"  # type: ignore[call-overload]
    before, after = flm.TensorLayout(axes, mesh), flm.TensorLayout((), mesh)
    for old, new in ((before, after), (after, before)):
        tree = {"w": flm.distribute_tensor(host, old)}
        rules = rules_for(new)
        with jax.set_mesh(bare(flm.DeviceMesh("a=8"))), jax.transfer_guard("disallow"):
            moved = flm.reshard(tree, rules, max_bytes=300, donate=True)
        assert_holds(moved["w"], host, new)
        assert tree["w"].is_deleted()


def test_no_device_holds_more_than_a_slice_between() -> None:
    """XLA replicates this array to move it; the slices bound what it replicates."""
    mesh = flm.DeviceMesh("data=2,fsdp=4")
    before = flm.TensorLayout((("data", "fsdp"), None), mesh)
    after = flm.TensorLayout((None, "fsdp"), mesh)
    x = flm.distribute_tensor(jnp.ones((512, 512)), before)
    sharding = after.sharding(2)
    whole = jax.jit(lambda x: x, out_shardings=sharding).lower(x).compile()
    temporary: Any = whole.memory_analysis()
    assert temporary.temp_size_in_bytes >= x.nbytes
    with mock.patch.object(module, "put", side_effect=module.put) as put:
        flm.reshard({"w": x}, rules_for(after), max_bytes=x.nbytes // 16)
    sizes = [call.args[0].nbytes for call in put.mock_calls]
    assert len(sizes) == 16 and max(sizes) == x.nbytes // 16


def test_what_is_not_cut_moves_whole() -> None:
    """PRNG keys, what is on one device or on the host, and what has its place."""
    before = flm.LayoutMap("fsdp=8", strict=False)
    before["x"] = ("fsdp",)
    held = flm.TensorLayout(("fsdp",), before.device_mesh, memory_kind="pinned_host")
    keys = jax.random.split(jax.random.key(0), 64)
    tree = {"keys": before.place(keys), "device": jnp.arange(64), "numpy": np.ones(64)}
    tree["host"] = flm.distribute_tensor(jnp.ones(64), held)
    tree["x"] = before.place({"x": jnp.ones(64)})["x"]
    with mock.patch.object(module, "put", side_effect=module.put) as put:
        moved = flm.reshard(tree, before, max_bytes=16)
    assert all(call.args[0].shape == (64,) for call in put.mock_calls)
    assert moved["x"] is tree["x"]
    assert (jax.random.key_data(moved["keys"]) == jax.random.key_data(keys)).all()
    for name in ("device", "numpy", "host"):
        np.testing.assert_array_equal(moved[name], tree[name])
        assert moved[name].sharding.memory_kind == "device"


@pytest.mark.parametrize("max_bytes", [1 << 30, 1000])
def test_donated_arrays_are_deleted_where_no_part_stays(max_bytes: int) -> None:
    """A part that stays is not copied, so that deleting it would lose it."""
    host = np.ones((64, 64), np.float32)
    after = flm.TensorLayout(("fsdp", None), flm.DeviceMesh("fsdp=2,tensor=4"))
    half = flm.TensorLayout((), flm.DeviceMesh((4,), ("x",), devices=DEVICES[:4]))
    for axes, mesh, to, is_deleted in (
        ((("fsdp", "tensor"), None), "fsdp=2,tensor=4", after, True),
        (("a", None), "a=2,b=4", after, False),  # the same places, under other names
        (None, "fsdp=8", after, True),
        (None, "fsdp=8", half, max_bytes == 1000),  # devices keep parts, or copies
    ):
        tree = {"w": flm.distribute_tensor(host, flm.TensorLayout(axes, mesh))}
        moved = flm.reshard(tree, rules_for(to), max_bytes=max_bytes, donate=True)
        assert_holds(moved["w"], host, to)
        assert tree["w"].is_deleted() == is_deleted


def test_chunks_have_at_most_their_bytes() -> None:
    layout_map = flm.LayoutMap("fsdp=8")
    layout_map["."] = None
    tree = {f"x{at}": jnp.ones(at % 7 + 1, "int8") for at in range(40)}
    with mock.patch.object(jax, "block_until_ready") as waited:
        flm.reshard(tree, layout_map, max_bytes=10)
    chunks = [[x.nbytes for x in call.args[0]] for call in waited.mock_calls]
    assert max(map(sum, chunks)) <= 10 and sum(map(len, chunks)) == 40
    for chunk, following in zip(chunks, chunks[1:], strict=False):
        assert sum(chunk) + following[0] > 10


def test_a_model_and_its_optimizer_move_in_place() -> None:
    train, serve = flm.LayoutMap("fsdp=8"), flm.LayoutMap("fsdp=2,tensor=4")
    train["kernel"], train["bias"] = ("fsdp", None), None
    serve["kernel"], serve["bias"] = ("fsdp", "tensor"), None
    model = flm.create(lambda: nnx.Linear(16, 32, rngs=nnx.Rngs(0)), train)
    optimizer = flm.create_optimizer(model, optax.adamw(1e-3), train, wrt=nnx.Param)
    host = np.asarray(model.kernel[...])
    tree = {"model": model, "optimizer": optimizer}
    moved = flm.reshard(tree, serve, donate=True)
    assert moved["model"] is model and moved["optimizer"] is optimizer
    layout = flm.TensorLayout(("fsdp", "tensor"), serve.device_mesh)
    assert_holds(model.kernel[...], host, layout)
    mu: Any = optimizer.opt_state[0].mu
    assert mu.kernel.sharding == layout.sharding(2)


def test_one_array_at_several_paths() -> None:
    """It is deleted once no leaf needs it."""
    layout_map = flm.LayoutMap("fsdp=4,tensor=2")
    layout_map["a|b"], layout_map["c"] = ("fsdp",), ("tensor",)
    host = np.arange(8.0, dtype=np.float32)
    stays = flm.distribute_tensor(
        host, flm.TensorLayout(("tensor",), layout_map.device_mesh)
    )
    for x, is_deleted in ((jax.device_put(host, DEVICES[0]), True), (stays, False)):
        tree = dict.fromkeys("abc", x)
        moved = flm.reshard(tree, layout_map, donate=True, max_bytes=1)
        assert moved["a"] is moved["b"] and x.is_deleted() == is_deleted
        for array in moved.values():
            np.testing.assert_array_equal(array, host)


def test_nothing_moves_where_something_cannot() -> None:
    layout_map = flm.LayoutMap("fsdp=8")
    layout_map["."] = ("fsdp",)
    a, gone = jnp.ones(8), jnp.ones(8)
    gone.delete()
    with jax.enable_x64(True):
        long = jnp.arange(8) + 2**40
    for last, text in (
        (gone, r"b \(8,\) was donated or deleted"),
        (jax.ShapeDtypeStruct((8,), "int8"), "reshard takes .*, but b is the abs"),
        (long, r"but b is int64, which .*enable_x64\(True\)"),
    ):
        with pytest.raises(flm.LayoutError, match=text):
            flm.reshard({"a": a, "b": last}, layout_map, donate=True)
        assert not a.is_deleted()
    with jax.enable_x64(True):
        moved = flm.reshard({"w": long}, layout_map, max_bytes=16)
        assert moved["w"].tolist() == list(range(2**40, 2**40 + 8))
    with pytest.raises(flm.LayoutError, match="traced: call reshard outside of jit"):
        jax.jit(lambda a: flm.reshard({"a": a}, layout_map))(a)


def test_an_interrupt_keeps_a_module_whole() -> None:
    train, serve = flm.LayoutMap("fsdp=8"), flm.LayoutMap("tensor=8")
    train["kernel"], train["bias"] = ("fsdp", None), ("fsdp",)
    serve["kernel"], serve["bias"] = (None, "tensor"), None
    model = flm.create(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), train)
    host, effects = np.asarray(model.kernel[...]), [mock.DEFAULT, KeyboardInterrupt]
    with (
        mock.patch.object(module, "put", wraps=module.put, side_effect=effects),
        pytest.raises(KeyboardInterrupt),
    ):
        flm.reshard(model, serve, donate=True, max_bytes=256)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(nnx.state(model)))
    flm.reshard(model, serve, donate=True)  # goes on with what is left
    layout = flm.TensorLayout((None, "tensor"), serve.device_mesh)
    assert_holds(model.kernel[...], host, layout)


def test_progress(capfd: pytest.CaptureFixture[str]) -> None:
    layout_map = flm.LayoutMap("fsdp=8", strict=False)
    flm.reshard({"w": jnp.ones(8)}, layout_map)
    assert capfd.readouterr().err == ""
    flm.reshard({"w": jnp.ones(8)}, layout_map, progress=True)
    assert "moving" in capfd.readouterr().err


@pytest.mark.parametrize("max_bytes", [0, -1, "1GB", 1e9])
def test_a_chunk_is_a_number_of_bytes(max_bytes: Any) -> None:
    """A negative one would copy no slice, and return zeros."""
    with pytest.raises(flm.LayoutError, match="a chunk is a number of bytes"):
        flm.reshard({"w": np.ones(8)}, flm.LayoutMap("data=8"), max_bytes=max_bytes)
