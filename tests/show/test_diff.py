"""ResolutionDiff: what moved, and its cost."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flax_layoutmap as flm


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def tree(count: int = 4, **more: Any) -> dict[str, Any]:
    layers = {
        str(at): {"up": struct(64, 256), "norm": struct(64)} for at in range(count)
    }
    return {"embed": struct(256, 64), "layers": layers, **more}


def rules(mesh: str = "data=2,model=4", **changed: Any) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(flm.DeviceMesh.abstract(mesh), strict=False)
    layout_map["embed"] = ("model", None)
    layout_map["up"] = (None, "model")
    layout_map["norm"] = None
    for pattern, layout in changed.items():
        layout_map.replace(pattern, layout)
    return layout_map


def test_nothing_changed(mesh: flm.DeviceMesh) -> None:
    before = rules().resolve(tree())
    for same in (rules(), rules().on(mesh)):  # abstract, and with devices
        diff = before.diff(same.resolve(tree()))
        assert diff.is_empty and diff.changes == () and diff.unchanged == 9
        assert repr(diff) == "ResolutionDiff(no leaf changed)"
        assert diff.report().splitlines() == [
            "no difference: 9 leaves as before, on data=2,model=4",
            "parameters: 81.0 KiB per device",
        ]
        assert diff.received_bytes == (0,) * 8


def test_changed_rules() -> None:
    diff = rules().resolve(tree()).diff(rules(up=("model", None)).resolve(tree()))
    moved = diff.of("moved")
    assert [leaf.path for leaf in moved] == [f"layers/{at}/up" for at in range(4)]
    before, after = moved[0].before, moved[0].after
    assert before is not None and after is not None
    assert (before["spec"], after["spec"]) == ([None, "model"], ["model", None])
    # A quarter of what a device is to hold, it has: 64x256 floats over 4 devices.
    assert moved[0].received_bytes == 64 * 256 * 4 // 4 * 3 // 4
    assert moved[0].all_received_bytes == 8 * moved[0].received_bytes
    assert diff.received_bytes == (4 * moved[0].received_bytes,) * 8
    assert repr(diff) == "ResolutionDiff(4 moved, at most 48.0 KiB per device to send)"
    assert diff.report().splitlines() == [
        "rules:",
        "  - Rule('up', (None, 'model'))",
        "  + Rule('up', ('model', None))",
        "",
        "   path                 change                   to send",
        "─  ───────────────────  ──────────────────────  ────────",
        "→  layers/{0..3}/up ×4  P(-, model) → P(model)  48.0 KiB",
        "",
        "leaves: 4 moved, 5 as before",
        "parameters: 81.0 KiB per device",
        "to send: at most 48.0 KiB to one device, 384.0 KiB in all",
    ]


def test_another_mesh_and_a_longer_model() -> None:
    old = tree(12, gone=struct(4), head=struct(8, 8))
    new = tree(13, head=struct(8, 8, dtype=jnp.bfloat16))
    diff = rules().resolve(old).diff(rules("data=4,model=2").resolve(new))
    assert diff.mesh == ("data=2,model=4", "data=4,model=2")
    # Rows of 64 to rows of 128: some devices hold a half of theirs, others nothing.
    (embed,) = [leaf for leaf in diff.of("moved") if leaf.path == "embed"]
    assert embed.received_bytes == 128 * 64 * 4
    text = diff.report()
    assert "-  gone " in text and "f32[8,8] → bf16[8,8]" in text
    assert "f32[64,256] P(-, model)" in text
    assert "leaves: 2 added, 1 removed, 1 reshaped, 13 moved, 12 as before" in text
    assert "parameters: 211.3 KiB → 451.4 KiB (+113.7%) per device" in text


def test_options_and_sections() -> None:
    before, layout_map = rules().resolve(tree()), rules()
    layout_map.optimizer["up"] = ("data", None)
    layout_map.names["x"] = flm.TensorLayout((("data", "model"),))
    layout_map["new"] = flm.TensorLayout(("model", ...), memory_kind="pinned_host")
    layout_map = flm.LayoutMap.from_json({**layout_map.to_json(), "overlap": "last"})
    diff = before.diff(layout_map.resolve(tree()))
    assert diff.rules == (
        "- overlap = 'error'",
        "+ overlap = 'last'",
        "+ Rule('new', ('model', ...) in pinned_host)",
        "+ names Rule('x', (('data', 'model'),))",
        "+ optimizer Rule('up', ('data', None))",
    )
    assert not diff.changes and not diff.is_empty
    assert "leaves: 9 as before" in diff.report()


def test_optimizer_state_is_counted_by_itself() -> None:
    def trained(layout_map: flm.LayoutMap) -> flm.Resolution:
        params = {"up": struct(64, 256)}
        state = jax.eval_shape(optax.adam(1.0).init, params)
        return layout_map.resolve({"params": params, "opt_state": state})

    sharded, on_host = rules(), rules()
    sharded.optimizer["up"] = axes = ("data", "model")
    on_host.optimizer["up"] = flm.TensorLayout(axes, memory_kind="pinned_host")
    diff = trained(rules()).diff(trained(sharded))
    assert diff.bytes_per_device["parameter"] == (16 * 1024, 16 * 1024)
    assert diff.bytes_per_device["optimizer"] == (32 * 1024 + 4, 16 * 1024 + 4)
    # Each device keeps a half of what it has, so nothing has to be sent.
    assert not any(diff.received_bytes) and len(diff.of("moved")) == 2
    assert "to send: nothing; every device has all of its new shards" in diff.report()
    assert "optimizer state: 32.0 KiB → 16.0 KiB (-50.0%) per device" in diff.report()
    diff = trained(sharded).diff(trained(on_host))
    assert diff.host_bytes_per_device["optimizer"] == (0, 16 * 1024)
    # All of a shard goes to other memory.
    assert diff.changes[0].received_bytes == 8 * 1024
    text = diff.report()
    assert "P(data, model) → P(data, model) pinned_host" in text
    assert "optimizer state: 0 B → 16.0 KiB per device in host memory" in text


def test_without_a_mesh() -> None:
    layout_map = flm.LayoutMap(strict=False)
    layout_map["norm"] = None
    before = layout_map.resolve({"norm": struct(64)})
    assert before.diff(before).is_empty
    diff = before.diff(rules().resolve({"norm": struct(64)}))
    (norm,) = diff.of("moved")
    assert norm.received_bytes is None and diff.received_bytes == ()
    assert "mesh: no mesh → data=2,model=4" in diff.report()


def test_types_of_axes() -> None:
    explicit = flm.DeviceMesh.abstract("data=2,model=4", axis_types="explicit")
    diff = rules().resolve(tree()).diff(rules().on(explicit).resolve(tree()))
    types = ("(auto, auto)", "(explicit, explicit)")
    assert diff.mesh == tuple(f"data=2,model=4 {text}" for text in types)
    assert not diff.is_empty and not diff.changes


def held(arrays: list[jax.Array]) -> dict[Any, dict[Any, Any]]:
    """Device → number of an array → mask of the elements that it holds."""
    masks = {
        device: {at: np.zeros(array.shape, bool) for at, array in enumerate(arrays)}
        for device in jax.devices()
    }
    for number, array in enumerate(arrays):
        for shard in array.addressable_shards:
            masks[shard.device][number][shard.index] = True
    return masks


@pytest.mark.parametrize("order", ["same", "reversed", "fewer", "more"])
def test_devices_are_identified(mesh: flm.DeviceMesh, order: str) -> None:
    """Against the shards of real arrays, on meshes of the same and of other devices."""
    devices = list(mesh.devices.flat)
    chosen = {"same": devices, "reversed": devices[::-1]}.get(order, devices[2:6])
    shape = (2, len(chosen) // 2)
    other = flm.DeviceMesh(shape, ("data", "model"), devices=chosen)
    meshes = (other, mesh) if order == "more" else (mesh, other)
    before = rules().on(meshes[0]).resolve(tree(1))
    after = rules(embed=("data", "model")).on(meshes[1]).resolve(tree(1))
    arrays = [jnp.zeros(s.shape, s.dtype) for s in jax.tree.leaves(tree(1))]
    old, new = (
        held(list(map(jax.device_put, arrays, resolution.sharding_list())))
        for resolution in (before, after)
    )
    expected = tuple(
        sum(
            int((mask & ~old[device][number]).sum()) * 4
            for number, mask in new[device].items()
        )
        for device in meshes[1].devices.flat
    )
    assert before.diff(after).received_bytes == expected and any(expected)


def test_json() -> None:
    diff = rules().resolve(tree(1)).diff(rules(up=("model", None)).resolve(tree(2)))
    data = json.loads(diff.report("json"))
    assert data == json.loads(json.dumps(diff.to_json())) and data["schema"] == 1
    changes = {
        leaf["path"]: (leaf["change"], leaf["before"]) for leaf in data["changes"]
    }
    assert changes["layers/1/up"] == ("added", None)
    assert changes["layers/0/up"][1]["spec"] == [None, "model"]
