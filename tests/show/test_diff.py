"""ResolutionDiff: what moved, and its cost."""

import json
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flax_layoutmap as flm

MIB = 1024 * 1024


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


def test_nothing_changed() -> None:
    one = rules().resolve(tree())
    found = one.diff(rules().resolve(tree()))
    assert found.is_empty and found.changes == () and found.unchanged == 9
    assert repr(found) == "ResolutionDiff(no leaf changed)"
    assert found.report().splitlines() == [
        "no difference: 9 leaves as before, on data=2,model=4",
        "parameters: 81.0 KiB per device",
    ]
    assert found.received_bytes == (0,) * 8


def test_rules_changed() -> None:
    found = rules().resolve(tree()).diff(rules(up=("model", None)).resolve(tree()))
    assert not found.is_empty
    assert found.rules == ("- 2 'up' → (None, 'model')", "+ 2 'up' → ('model', None)")
    assert [one.path for one in found.of("moved")] == [
        f"layers/{at}/up" for at in range(4)
    ]
    one = found.changes[0]
    assert one.before is not None and one.after is not None
    assert (one.before.spec, one.after.spec) == ("P(-, model)", "P(model)")
    # A quarter of what a device is to hold, it has: 64x256 floats over 4 devices.
    assert one.received_bytes == 64 * 256 * 4 // 4 * 3 // 4
    assert one.all_received_bytes == 8 * one.received_bytes
    assert found.received_bytes == (4 * one.received_bytes,) * 8
    assert repr(found) == "ResolutionDiff(4 moved, at most 48.0 KiB per device to send)"


def test_the_report_of_changed_rules() -> None:
    found = rules().resolve(tree()).diff(rules(up=("model", None)).resolve(tree()))
    assert found.report().splitlines() == [
        "rules:",
        "  - 2 'up' → (None, 'model')",
        "  + 2 'up' → ('model', None)",
        "",
        "change  path                 array        spec                    "
        "shard               bytes/device   to send",
        "──────  ───────────────────  ───────────  ──────────────────────  "
        "──────────────────  ────────────  ────────",
        "moved   layers/{0..3}/up ×4  f32[64,256]  P(-, model) → P(model)  "
        "[64,64] → [16,256]      64.0 KiB  48.0 KiB",
        "",
        "leaves: 4 moved, 5 as before",
        "parameters: 81.0 KiB per device",
        "to send: at most 48.0 KiB to one device, 384.0 KiB in all",
        "assumed: device n of the one mesh is device n of the other, row by row; a "
        "device keeps the overlap of its old and its new shard, a new one holds "
        "nothing; added and reshaped leaves are not counted",
    ]


def test_a_narrow_report() -> None:
    found = rules().resolve(tree(12)).diff(rules("data=4,model=2").resolve(tree(13)))
    assert found.report(width=64).splitlines()[:10] == [
        "mesh: data=2,model=4 → data=4,model=2",
        "",
        "   path    change                            to send",
        "─  ──────  ──────────────────────────────  ─────────",
        "→  embed   P(model) [64,64] → [128,64]      32.0 KiB",
        "layers/{0..11}/ ×12",
        "→    up    P(-, model) [64,64] → [64,128]  384.0 KiB",
        "layers/12/",
        "+    norm  f32[64] replicated",
        "+    up    f32[64,256] P(-, model)",
    ]


def test_a_mesh_changed() -> None:
    found = rules().resolve(tree()).diff(rules("data=4,model=2").resolve(tree()))
    assert found.mesh == ("data=2,model=4", "data=4,model=2")
    assert not found.rules and len(found.of("moved")) == 5 and found.unchanged == 4
    (embed,) = [one for one in found.changes if one.path == "embed"]
    assert embed.before is not None and embed.after is not None
    assert embed.before.spec == embed.after.spec == "P(model)"
    # Rows of 64 to rows of 128: devices (0,0) and (1,3) hold a half of theirs.
    assert embed.received_bytes == 128 * 64 * 4
    assert found.bytes_per_device["parameter"] == (81 * 1024, 161 * 1024)


def test_more_devices() -> None:
    """What is replicated has to reach the new ones."""

    def on(mesh: str) -> flm.Resolution:
        return rules(mesh).resolve({"norm": struct(64)})

    more = on("data=1,model=2").diff(on("data=2,model=2"))
    (norm,) = more.of("moved")
    assert (norm.received_bytes, norm.all_received_bytes) == (256, 512)
    assert more.received_bytes == (0, 0, 256, 256)
    assert on("data=2,model=2").diff(on("data=1,model=2")).changes == ()


def test_a_model_changed() -> None:
    before = rules().resolve(tree(2, head=struct(8, 8), gone=struct(4)))
    after = rules().resolve(tree(3, head=struct(8, 16)))
    found = before.diff(after)
    assert [(one.change, one.path) for one in found.changes] == [
        ("removed", "gone"),
        ("reshaped", "head"),
        ("added", "layers/2/norm"),
        ("added", "layers/2/up"),
    ]
    assert found.changes[0].after is None and found.changes[2].before is None
    # Nothing of it is data that moves.
    assert not any(found.received_bytes)
    assert "reshaped  head" in found.report()
    assert "f32[8,8] → f32[8,16]" in found.report()
    other = rules().resolve(tree(2, head=struct(8, 8, dtype=jnp.bfloat16)))
    assert "f32[8,8] → bf16[8,8]" in before.diff(other).report()


def test_another_rule_that_places_alike() -> None:
    before = rules().resolve(tree())
    layout_map = rules()
    del layout_map["norm"]
    found = before.diff(layout_map.resolve(tree()))
    assert {one.change for one in found.changes} == {"decided"}
    assert len(found.changes) == 4 and not found.is_empty
    assert "'norm' → no rule" in found.report()
    text = "leaves: 4 with the same layout for another reason, 5 as before"
    assert text in found.report()


def test_options_and_sections() -> None:
    before, layout_map = rules().resolve(tree()), rules()
    layout_map.optimizer["up"] = ("data", None)
    layout_map.names["x"] = flm.TensorLayout((("data", "model"),))
    layout_map["new"] = flm.TensorLayout(("model", ...), memory_kind="pinned_host")
    layout_map = flm.LayoutMap.from_json({**layout_map.to_json(), "overlap": "last"})
    found = before.diff(layout_map.resolve(tree()))
    assert found.rules == (
        "- overlap = 'error'",
        "+ overlap = 'last'",
        "+ 4 'new' → ('model', ...) in pinned_host",
        "+ names 1 'x' → (('data', 'model'),)",
        "+ optimizer 1 'up' → ('data', None)",
    )
    assert not found.changes and not found.is_empty
    assert "leaves: 9 as before" in found.report()


def test_optimizer_state_is_counted_by_itself() -> None:
    def trained(layout_map: flm.LayoutMap) -> flm.Resolution:
        params = {"up": struct(64, 256)}
        state = jax.eval_shape(optax.adam(1.0).init, params)
        return layout_map.resolve({"params": params, "opt_state": state})

    layout_map = rules()
    layout_map.optimizer["up"] = ("data", "model")
    found = trained(rules()).diff(trained(layout_map))
    assert found.bytes_per_device["parameter"] == (16 * 1024, 16 * 1024)
    assert found.bytes_per_device["optimizer"] == (32 * 1024 + 4, 16 * 1024 + 4)
    # Each device keeps a half of what it has, so nothing has to be sent.
    assert not any(found.received_bytes) and len(found.of("moved")) == 2
    assert "to send: nothing; every device has all of its new shards" in found.report()
    assert "optimizer state: 32.0 KiB → 16.0 KiB (-50.0%) per device" in found.report()


def test_memory_kinds() -> None:
    moved = flm.TensorLayout((None, "model"), memory_kind="pinned_host")
    found = rules().resolve(tree(1)).diff(rules(up=moved).resolve(tree(1)))
    (one,) = found.changes
    assert one.received_bytes == 16 * 1024  # all of the shard goes to other memory
    assert "P(-, model) → P(-, model) pinned_host" in found.report()


def test_without_a_mesh() -> None:
    layout_map = flm.LayoutMap(strict=False)
    layout_map["norm"] = None
    before = layout_map.resolve({"norm": struct(64)})
    assert before.diff(before).is_empty
    found = before.diff(rules().resolve({"norm": struct(64)}))
    (one,) = found.changes
    assert (one.change, one.received_bytes, found.received_bytes) == ("moved", None, ())
    assert "mesh: no mesh → data=2,model=4" in found.report()
    assert "assumed: without a mesh before and after, nothing is counted" in (
        found.report()
    )


def test_types_of_axes() -> None:
    explicit = flm.DeviceMesh.abstract("data=2,model=4", axis_types="explicit")
    found = rules().resolve(tree()).diff(rules().on(explicit).resolve(tree()))
    assert found.mesh == (
        "data=2,model=4 (auto, auto)",
        "data=2,model=4 (explicit, explicit)",
    )
    assert not found.is_empty and not found.changes


def placed_bytes(arrays: list[jax.Array]) -> dict[Any, dict[Any, Any]]:
    held: dict[Any, dict[Any, Any]] = {}
    for name, array in enumerate(arrays):
        for shard in array.addressable_shards:
            mask = np.zeros(array.shape, bool)
            mask[shard.index] = True
            held.setdefault(shard.device, {})[name] = mask
    return held


@pytest.mark.parametrize("order", ["same", "reversed", "fewer"])
def test_devices_are_identified(mesh: flm.DeviceMesh, order: str) -> None:
    """Against the shards of real arrays, on meshes of the same and of other devices."""
    devices = list(mesh.devices.flat)
    chosen = {"same": devices, "reversed": devices[::-1], "fewer": devices[2:6]}[order]
    size = len(chosen) // 2
    other = flm.DeviceMesh((2, size), ("data", "model"), devices=chosen)
    before = rules().on(mesh).resolve(tree(1))
    after = rules(embed=("data", "model")).on(other).resolve(tree(1))
    found = before.diff(after)

    arrays = [jnp.zeros(s.shape, s.dtype) for s in jax.tree.leaves(tree(1))]
    old, new = (
        placed_bytes(
            [
                jax.device_put(array, sharding)
                for array, sharding in zip(arrays, some.sharding_list(), strict=True)
            ]
        )
        for some in (before, after)
    )
    expected = [
        sum(
            int((mask & ~old[device][name]).sum()) * 4
            for name, mask in new[device].items()
        )
        for device in other.devices.flat
    ]
    assert list(found.received_bytes) == expected and any(expected)
    assert found.assumption.startswith("devices are identified by their ids; ")


def test_a_concrete_mesh_and_an_abstract_one(mesh: flm.DeviceMesh) -> None:
    found = rules().resolve(tree()).diff(rules().on(mesh).resolve(tree()))
    assert found.is_empty


def test_json() -> None:
    found = rules().resolve(tree(1)).diff(rules(up=("model", None)).resolve(tree(2)))
    data = json.loads(found.report("json"))
    assert data == json.loads(json.dumps(found.to_json()))
    assert data["schema"] == 1 and data["is_empty"] is False
    assert data["mesh"] == {"before": "data=2,model=4", "after": "data=2,model=4"}
    assert [one["change"] for one in data["changes"]] == ["moved", "added", "added"]
    first = data["changes"][0]
    assert first["before"]["spec"] == [None, "model"]
    assert first["after"]["spec"] == ["model", None]
    assert (first["received_bytes"], first["all_received_bytes"]) == (12288, 98304)
    assert data["changes"][1]["before"] is None
    assert data["bytes_per_device"]["parameter"] == {"before": 33024, "after": 49664}
    assert data["received_bytes"] == [12288] * 8 and data["unchanged"] == 2


def test_markdown() -> None:
    before = rules().resolve(tree())
    after = rules("data=4,model=2", up=("model", None)).resolve(tree())
    lines = before.diff(after).report("markdown").splitlines()
    assert lines[:8] == [
        "- mesh: data=2,model=4 → data=4,model=2",
        "",
        "```diff",
        "- 2 'up' → (None, 'model')",
        "+ 2 'up' → ('model', None)",
        "```",
        "",
        "| change | path | array | spec | shard | bytes/device | to send |",
    ]
    assert (
        "| moved | `embed` | f32[256,64] | `P(model)` | [64,64] → [128,64] |"
        in (lines[9]) + lines[10]
    )
    assert lines[-3].startswith("- parameters: ")
    assert before.diff(before).report("markdown").startswith("- no difference: ")


@pytest.mark.parametrize("width", [64, 80, 120, 200])
@pytest.mark.parametrize("fold", [True, False])
def test_no_line_is_too_long(width: int, fold: bool) -> None:
    before = rules().resolve(tree(12, old=struct(3, 4), head=struct(8, 8)))
    after = rules("data=4,model=2", up=("model", None), norm=("data",))
    layout_map = after.resolve(tree(13, head=struct(8, 16)))
    text = before.diff(layout_map).report(fold=fold, width=width)
    assert [line for line in text.splitlines() if len(line) > width] == []
    assert "layers/" in text and "norm" in text


def test_what_is_long_is_cut() -> None:
    name = "a_very_long_name_of_an_axis"
    before = flm.LayoutMap(flm.DeviceMesh.abstract({name: 2, "b" + name: 2}))
    after = flm.LayoutMap(flm.DeviceMesh.abstract({name: 2, "b" + name: 2}))
    before["w"], after["w"] = (name, "b" + name), ("b" + name, name)
    shape = {"a_long_folder": {"a_longer_folder": {"w": struct(8, 8)}}}
    text = before.resolve(shape).diff(after.resolve(shape)).report(width=80)
    assert [line for line in text.splitlines()[4:8] if len(line) > 80] == []


def test_it_is_a_value() -> None:
    found = rules().resolve(tree()).diff(rules(up=("model", None)).resolve(tree()))
    with pytest.raises(AttributeError):
        found.unchanged = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert pickle.loads(pickle.dumps(found)) == found


def test_a_pod_is_counted_at_once() -> None:
    layout_map = rules("data=64,model=64")
    other = rules("data=64,model=64", up=("data", "model"), embed=None)
    found = layout_map.resolve(tree(80)).diff(other.resolve(tree(80)))
    assert len(found.received_bytes) == 4096
    assert sum(found.received_bytes) == sum(
        one.all_received_bytes or 0 for one in found.changes
    )
    assert max(found.received_bytes) == 256 * 64 * 4 * 63 // 64
