"""Whole trees move between layouts and meshes, in chunks, with every value kept."""

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import flax_layoutmap as flm
from flax_layoutmap._core import checksums
from flax_layoutmap._place import reshard as module
from flax_layoutmap._place import slices

MESHES = ("fsdp=2,tensor=4", "fsdp=4,tensor=2", "fsdp=8")
LAYOUTS = (
    (None, None, None),
    ("fsdp", None, None),
    (None, "fsdp", None),
    (None, None, "fsdp"),
    (None, ("fsdp", "tensor"), None),
    (None, "tensor", "fsdp"),
    ("tensor", None, "fsdp"),
)


def places() -> list[flm.TensorLayout]:
    """Every layout on every mesh that has its axes, and on other devices."""
    found = []
    for text in MESHES:
        mesh = flm.DeviceMesh(text)
        for axes in LAYOUTS:
            if "tensor" in text or "tensor" not in str(axes):
                found.append(flm.TensorLayout(axes, mesh))
    devices = jax.devices()
    turned = flm.DeviceMesh((2, 4), ("fsdp", "tensor"), devices=devices[::-1])
    half = flm.DeviceMesh((2, 2), ("fsdp", "tensor"), devices=devices[4:])
    explicit = flm.DeviceMesh("fsdp=2,tensor=4", axis_types="explicit")
    axes = (None, "tensor", "fsdp")
    return [*found, *(flm.TensorLayout(axes, m) for m in (turned, half, explicit))]


def holds(array: jax.Array, host: np.ndarray, layout: flm.TensorLayout) -> bool:
    """Whether every device has its part of `host`, in a layout."""
    return array.sharding == layout.sharding(host.ndim) and all(
        np.array_equal(np.asarray(shard.data), host[shard.index])
        for shard in array.addressable_shards
    )


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
        tree = {"w": flm.distribute_tensor(jnp.asarray(host), before)}
        moved = flm.reshard(tree, rules_for(after), max_bytes=max_bytes)
        assert holds(moved["w"], host, after), after
        assert holds(tree["w"], host, before), "the source was changed"


@pytest.mark.parametrize("shape", [(16, 6, 40), (8, 8, 21), (7, 8, 8)])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_slices_of_uneven_size(shape: tuple[int, ...], dtype: str) -> None:
    host = np.arange(np.prod(shape)).reshape(shape).astype(jnp.dtype(dtype))
    mesh = flm.DeviceMesh("fsdp=2,tensor=4")
    fits = [n % 4 == 0 for n in shape]
    at = fits.index(True)
    axes: list[Any] = [None, None, None]
    axes[at] = "tensor"
    before, after = flm.TensorLayout(axes, mesh), flm.TensorLayout((), mesh)
    for one, other in ((before, after), (after, before)):
        tree = {"w": flm.distribute_tensor(jnp.asarray(host), one)}
        moved = flm.reshard(tree, rules_for(other), max_bytes=300, donate=True)
        assert holds(moved["w"], host, other)
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
    sizes: list[int] = []

    def seen(value: Any, *args: Any, **kw: Any) -> Any:
        sizes.append(value.nbytes)
        return put(value, *args, **kw)

    put = slices.put
    with mock.patch.object(slices, "put", seen):
        flm.reshard({"w": x}, rules_for(after), max_bytes=x.nbytes // 16)
    assert temporary.temp_size_in_bytes >= x.nbytes
    assert len(sizes) == 16 and max(sizes) == x.nbytes // 16


def test_slices_of_an_array_on_one_device() -> None:
    after = flm.TensorLayout(("fsdp", None), flm.DeviceMesh("fsdp=8"))
    host = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    for device in (None, jax.devices()[3]):  # uncommitted, and committed
        tree = {"w": jax.device_put(host, device)}
        with mock.patch.object(slices, "put", side_effect=slices.put) as put:
            moved = flm.reshard(tree, rules_for(after), max_bytes=2048, donate=True)
        assert holds(moved["w"], host, after) and tree["w"].is_deleted()
        assert len(put.mock_calls) == 8


def test_what_slices_would_change_moves_whole() -> None:
    """Weak types and PRNG keys."""
    before = flm.LayoutMap("fsdp=8")
    before["x"] = ("fsdp",)
    half = flm.DeviceMesh((4,), ("fsdp",), devices=jax.devices()[4:])
    weak = jax.jit(lambda: jax.lax.broadcast(1.0, (64,)))()
    keys = jax.random.split(jax.random.key(0), 64)
    tree = before.place({"x": weak, "keys": keys})
    moved = flm.reshard(tree, before.on(half), max_bytes=16)
    assert weak.weak_type and moved["x"].weak_type and moved["x"].sum() == 64
    assert (jax.random.key_data(moved["keys"]) == jax.random.key_data(keys)).all()


def test_slices_in_the_context_of_another_mesh() -> None:
    """As in a program that calls `jax.set_mesh` with its mesh of training."""
    train, serve = flm.LayoutMap("fsdp=8"), flm.LayoutMap("fsdp=2,tensor=4")
    train["w"], serve["w"] = ("fsdp", None), (None, "tensor")
    host = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    tree = train.place({"w": host})
    assert train.device_mesh is not None
    mesh: Any = train.device_mesh.jax_mesh
    with jax.set_mesh(mesh), jax.transfer_guard("disallow"):
        moved = flm.reshard(tree, serve, max_bytes=1000, donate=True)
    assert holds(
        moved["w"], host, flm.TensorLayout((None, "tensor"), serve.device_mesh)
    )
    assert tree["w"].is_deleted()


def test_slices_of_a_part_that_stays_are_copies() -> None:
    """Whose source is deleted, too; what no device has to get is not copied."""
    mesh = flm.DeviceMesh("fsdp=2,tensor=4")
    after = flm.TensorLayout(("fsdp", None), mesh)
    for layout, is_copied in (
        (flm.TensorLayout((("fsdp", "tensor"), None), mesh), True),
        (flm.TensorLayout(("all", None), flm.DeviceMesh("all=8")), True),
        (flm.TensorLayout(("a", None), flm.DeviceMesh("a=2,b=4")), False),
    ):
        tree = {"w": flm.distribute_tensor(jnp.ones((64, 64)), layout)}
        moved = flm.reshard(tree, rules_for(after), max_bytes=1000, donate=True)
        assert holds(moved["w"], np.ones((64, 64), np.float32), after)
        assert tree["w"].is_deleted() == is_copied
    replicated = flm.TensorLayout((), flm.DeviceMesh("all=8"))
    half = flm.DeviceMesh((4,), ("x",), devices=jax.devices()[:4])
    tree = {"w": flm.distribute_tensor(jnp.ones((64, 64)), replicated)}
    flm.reshard(
        tree, rules_for(flm.TensorLayout((), half)), max_bytes=1000, donate=True
    )
    assert tree["w"].is_deleted()  # devices keep their parts, in copies


def test_a_source_on_the_host_is_deleted() -> None:
    layout_map = flm.LayoutMap("fsdp=8")
    layout_map["w"] = ("fsdp",)
    held = flm.TensorLayout(
        ("fsdp",), layout_map.device_mesh, memory_kind="pinned_host"
    )
    tree = {"w": flm.distribute_tensor(jnp.ones(8), held)}
    moved = flm.reshard(tree, layout_map, donate=True)
    assert tree["w"].is_deleted() and moved["w"].sum() == 8


def test_chunks_have_at_most_their_bytes() -> None:
    layout_map = flm.LayoutMap("fsdp=8")
    layout_map["."] = None
    tree = {f"x{at}": jnp.ones(at % 7 + 1, "int8") for at in range(40)}
    chunks: list[list[int]] = []

    def seen(chunk: Any, *args: Any) -> Any:
        chunks.append([move.bytes for move in chunk])
        return moved(chunk, *args)

    moved = module._moved
    with mock.patch.object(module, "_moved", seen):
        flm.reshard(tree, layout_map, max_bytes=10)
    assert max(map(sum, chunks)) <= 10
    assert all(
        sum(one) + other[0] > 10 for one, other in zip(chunks, chunks[1:], strict=False)
    )
    assert sum(map(len, chunks)) == 40


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
    assert holds(model.kernel[...], host, layout)
    mu: Any = optimizer.opt_state[0].mu
    assert mu.kernel.sharding == layout.sharding(2)


def test_what_has_its_layout_is_not_moved() -> None:
    layout_map = flm.LayoutMap("fsdp=8")
    layout_map["w"], layout_map["v"] = ("fsdp", None), (None, "fsdp")
    tree = layout_map.place({"w": jnp.ones((8, 8)), "v": jnp.ones((8, 8)), "n": 3})
    moved = flm.reshard(tree, layout_map, donate=True)
    assert moved["w"] is tree["w"] and moved["v"] is tree["v"]
    assert not tree["w"].is_deleted()


def test_a_resolution_and_typed_keys() -> None:
    layout_map = flm.LayoutMap("fsdp=8")
    layout_map["w"] = ("fsdp", None)
    tree = {"w": jnp.arange(64.0).reshape(8, 8), "key": jax.random.key(3)}
    moved = flm.reshard(tree, flm.resolve(tree, layout_map))
    assert moved["w"].sharding.spec == jax.sharding.PartitionSpec("fsdp")
    assert jax.random.key_data(moved["key"]).tolist() == [0, 3]
    with pytest.raises(flm.LayoutError, match="this Resolution is of another tree"):
        flm.reshard({"w": tree["w"]}, flm.resolve(tree, layout_map))


def test_one_array_at_two_paths() -> None:
    layout_map = flm.LayoutMap("fsdp=8")
    layout_map["a|b"] = ("fsdp",)
    x = jax.device_put(jnp.ones(8), jax.devices()[0])
    moved = flm.reshard({"a": x, "b": x}, layout_map, donate=True)
    assert moved["a"] is moved["b"] and x.is_deleted()
    y = jax.device_put(jnp.ones(8), jax.devices()[0])
    layout_map["c"] = None
    with pytest.raises(flm.LayoutError, match=r"a \(8,\) is also at c, in another"):
        flm.reshard({"a": y, "c": y}, layout_map, donate=True)
    assert not y.is_deleted()
    flm.reshard({"a": y, "c": y}, layout_map)


def test_arrays_that_share_memory_are_not_donated() -> None:
    layout_map = flm.LayoutMap("fsdp=8")
    layout_map["a"], layout_map["b"] = ("fsdp",), None
    x = jax.device_put(jnp.ones(8), jax.devices()[0])
    y = layout_map.place({"b": x, "a": jnp.ones(8)})["b"]  # has the memory of x
    with pytest.raises(flm.LayoutError, match=r"a \(8,\) shares memory with b: use"):
        flm.reshard({"a": x, "b": y}, layout_map, donate=True)
    moved = flm.reshard({"a": x, "b": y}, layout_map)
    assert moved["b"] is y and y.sum() == 8


def test_nothing_moves_where_something_cannot() -> None:
    layout_map = flm.LayoutMap("fsdp=8", indivisible="error")
    layout_map["."] = ("fsdp",)
    gone = jnp.ones(8)
    gone.delete()
    tree = {"a": jnp.ones(8), "b": gone}
    with pytest.raises(flm.LayoutError, match=r"b \(8,\) was donated or deleted"):
        flm.reshard(tree, layout_map, donate=True)
    assert not tree["a"].is_deleted()
    placed = layout_map.place({"a": jnp.ones(8)})
    placed["a"].delete()
    with pytest.raises(flm.LayoutError, match=r"a \(8,\) was donated or deleted"):
        flm.reshard(placed, layout_map)
    with pytest.raises(flm.LayoutError, match=r"dim 0 of size 9"):
        flm.reshard({"a": jnp.ones(9)}, layout_map)
    with pytest.raises(flm.LayoutError, match="reshard moves arrays, but a is abs"):
        flm.reshard({"a": jax.ShapeDtypeStruct((8,), "int8")}, layout_map)
    with pytest.raises(flm.LayoutError, match="max_bytes=0: a chunk is a number"):
        flm.reshard(tree, layout_map, max_bytes=0)
    size: Any = "1GiB"
    with pytest.raises(flm.LayoutError, match="max_bytes='1GiB': a chunk is"):
        flm.reshard(tree, layout_map, max_bytes=size)
    with pytest.raises(flm.errors.MeshError, match="needs a mesh of devices"):
        flm.reshard(
            {"a": jnp.ones(8)}, layout_map.on(flm.DeviceMesh.abstract("fsdp=8"))
        )
    with pytest.raises(flm.LayoutError, match="traced: call reshard outside of jit"):
        jax.jit(lambda a: flm.reshard({"a": a}, layout_map))(jnp.ones(8))


def test_64_bits() -> None:
    """`jax.device_put` alone makes an array of them whose buffers are of 32 bits."""
    layout_map = flm.LayoutMap("fsdp=8")
    layout_map["w"] = ("fsdp",)
    with jax.enable_x64(True):
        tree = {"w": jnp.arange(8) + 2**40}
    with pytest.raises(flm.LayoutError, match=r"w \(8,\) is int64.*enable_x64\(True\)"):
        flm.reshard(tree, layout_map)
    with jax.enable_x64(True):
        moved = flm.reshard(tree, layout_map, max_bytes=16)
        assert moved["w"].tolist() == list(range(2**40, 2**40 + 8))


def test_a_leaf_that_changes_on_its_way_is_an_error() -> None:
    layout_map = flm.LayoutMap("fsdp=8")
    layout_map["w"] = ("fsdp",)

    def broken(x: Any, sharding: Any) -> Any:
        return jax.device_put(x.at[3].add(1), sharding)

    with (
        mock.patch.object(module, "put", broken),
        pytest.raises(flm.LayoutError, match="not equal to the originals: w;"),
    ):
        flm.reshard({"w": jnp.arange(8.0)}, layout_map)
    with mock.patch.object(module, "put", broken):  # verify=False reads nothing
        moved = flm.reshard({"w": jnp.arange(8.0)}, layout_map, verify=False)
    assert moved["w"][3] == 4


def test_an_interrupt_keeps_a_module_whole() -> None:
    train, serve = flm.LayoutMap("fsdp=8"), flm.LayoutMap("tensor=8")
    train["kernel"], train["bias"] = ("fsdp", None), ("fsdp",)
    serve["kernel"], serve["bias"] = (None, "tensor"), ("tensor",)
    model = flm.create(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), train)
    host = np.asarray(model.kernel[...])
    real, calls = module.put, []

    def interrupted(*args: Any, **kw: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **kw)

    with (
        mock.patch.object(module, "put", interrupted),
        pytest.raises(KeyboardInterrupt),
    ):
        flm.reshard(model, serve, donate=True, max_bytes=64)
    leaves = jax.tree.leaves(nnx.state(model))
    assert not any(leaf.is_deleted() for leaf in leaves)
    flm.reshard(model, serve, donate=True)  # goes on with what is left
    layout = flm.TensorLayout((None, "tensor"), serve.device_mesh)
    assert holds(model.kernel[...], host, layout)


def test_an_interrupt_while_arrays_are_deleted_keeps_a_module_whole() -> None:
    train, serve = flm.LayoutMap("fsdp=8"), flm.LayoutMap("tensor=8")
    train["kernel"], train["bias"] = ("fsdp", None), ("fsdp",)
    serve["kernel"], serve["bias"] = (None, "tensor"), None
    model = flm.create(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), train)
    real = module._delete

    def interrupted(*args: Any) -> None:
        real(*args)
        raise KeyboardInterrupt

    with (
        mock.patch.object(module, "_delete", interrupted),
        pytest.raises(KeyboardInterrupt),
    ):
        flm.reshard(model, serve, donate=True)
    leaves = jax.tree.leaves(nnx.state(model))
    assert not any(leaf.is_deleted() for leaf in leaves)


def test_progress(capfd: pytest.CaptureFixture[str]) -> None:
    layout_map = flm.LayoutMap("fsdp=8")
    layout_map["w"] = ("fsdp",)
    flm.reshard({"w": jnp.ones(8)}, layout_map)
    assert capfd.readouterr().err == ""
    flm.reshard({"w": jnp.ones(8)}, layout_map, progress=True)
    assert "moving" in capfd.readouterr().err


def test_checksums_are_those_of_checkpoints() -> None:
    """Equal before and after, on other devices, too."""
    one = flm.TensorLayout(("fsdp",), flm.DeviceMesh("fsdp=8"))
    x = flm.distribute_tensor(jnp.arange(16.0), one)
    alone = jax.device_put(x, jax.devices()[5])
    assert checksums.checksums({"x": x}) == checksums.checksums({"x": alone})
