"""Presets for any model: FSDP by shapes, and ZeRO-1 over the rules of another map."""

from typing import Any

import jax
import optax
import pytest
from shapes import nested, struct

import flax_layoutmap as flm
from flax_layoutmap.errors import MeshError, RuleError

abstract = flm.DeviceMesh.abstract


def params(layers: int = 3) -> dict[str, Any]:
    leaves = {"embed/embedding": struct(256, 64), "odd/kernel": struct(255, 257)}
    for n in range(layers):
        leaves[f"layers/{n}/up/kernel"] = struct(64, 256)
        leaves[f"layers/{n}/norm/scale"] = struct(64)
    return nested(leaves)


def dims(layout_map: flm.LayoutMap, tree: Any, **options: Any) -> dict[str, Any]:
    resolution = layout_map.resolve(tree, **options)
    return {leaf.path: leaf.layout.dims(len(leaf.shape)) for leaf in resolution}


def test_the_largest_dim_that_divides() -> None:
    layout_map = flm.presets.fsdp(params(), abstract("data=2,fsdp=8"), min_size=4096)
    found, f, no = dims(layout_map, params()), ("fsdp",), ()
    assert found["embed/embedding"] == (f, no)
    assert found["layers/2/up/kernel"] == (no, f)
    assert found["layers/2/norm/scale"] == (no,)  # smaller
    assert found["odd/kernel"] == (no, no)  # divides nowhere
    assert len(layout_map) <= 4
    assert not layout_map.resolve(params()).unmatched


def test_leaves_of_one_element_are_replicated_without_complaint() -> None:
    tree: Any = {"logit_scale": struct(1), "t": struct(1, 1), "b": struct()}
    tree["kernel"] = struct(64, 256)
    layout_map = flm.presets.fsdp(tree, abstract("data=2,fsdp=8"), min_size=0)
    resolution = layout_map.resolve(tree, strict=True)
    assert not resolution.fallbacks and not list(flm.lint(resolution))
    for path in ("logit_scale", "t", "b"):
        assert resolution[path].layout.is_replicated


@pytest.mark.parametrize(
    ("mesh", "options", "batch"),
    [
        ("data=2,fsdp=4", {}, ("data", "fsdp")),
        ("data=8", {}, ("data",)),
        ("x=8", {}, ("x",)),
        ("replica=2,shard=4", {"axis": "shard"}, ("shard",)),
        ("replica=2,shard=4", {"axis": "shard", "batch": ("replica", "shard")}, None),
    ],
)
def test_the_axes_of_the_batch(mesh: str, options: Any, batch: Any) -> None:
    layout_map = flm.presets.fsdp(params(), abstract(mesh), **options)
    assert layout_map.freeze().batch == (batch or options["batch"])


def test_optimizer_state_follows() -> None:
    tx = optax.adamw(1e-3)
    tree = {"params": params(), "opt_state": jax.eval_shape(tx.init, params())}
    layout_map = flm.presets.fsdp(tree, abstract("fsdp=8"), min_size=4096)
    assert not layout_map.optimizer
    found = dims(layout_map, tree, tx=tx)
    assert found["opt_state/0/mu/layers/0/up/kernel"] == ((), ("fsdp",))


def test_weights_by_names_with_dots_have_few_rules() -> None:
    weights = {
        f"model.layers.{n}.mlp.{name}.weight": struct(*shape)
        for n in range(12)
        for name, shape in (("up", (256, 64)), ("down", (64, 256)))
    }
    layout_map = flm.presets.fsdp(weights, abstract("fsdp=8"), min_size=4096)
    assert len(layout_map) == 2 and all(r"\d+" in key for key in layout_map)


def test_an_axis_that_is_not_there() -> None:
    with pytest.raises(RuleError, match="no axis 'fsdp'.*axis='a'"):
        flm.presets.fsdp(params(), abstract("a=2,b=4"))


@pytest.mark.parametrize(
    ("layout", "state"),
    [
        (("fsdp", "tensor"), (("fsdp", "data"), ("tensor",))),
        ((None, "tensor"), (("data",), ("tensor",))),
        ((("tensor", "fsdp"), None), (("tensor", "fsdp", "data"), ())),
        (("tensor", "fsdp"), (("tensor",), ("fsdp", "data"))),
    ],
)
def test_zero1_shards_the_state_alone(layout: Any, state: Any) -> None:
    layout_map = flm.LayoutMap(abstract("data=2,fsdp=2,tensor=2"))
    layout_map["kernel"] = layout
    tx = optax.adamw(1e-3)
    tree = {"params": {"kernel": struct(16, 16)}}
    tree["opt_state"] = jax.eval_shape(tx.init, tree["params"])
    zero1 = flm.presets.zero1(layout_map)
    found = dims(zero1, tree, tx=tx)
    assert found["params/kernel"] == flm.TensorLayout(layout).dims(2)
    assert found["opt_state/0/mu/kernel"] == found["opt_state/0/nu/kernel"] == state


def test_zero1_refuses() -> None:
    with pytest.raises(MeshError, match="the map has no mesh"):
        flm.presets.zero1(flm.LayoutMap())
    layout_map = flm.LayoutMap(abstract("data=2"))
    with pytest.raises(RuleError, match="no axis 'dat'"):
        flm.presets.zero1(layout_map, axis="dat")
    layout_map["kernel"] = ("data", None)
    with pytest.raises(RuleError, match="shards parameters over 'data' already"):
        flm.presets.zero1(layout_map)
    layout_map = flm.LayoutMap(abstract("data=2"))
    layout_map.optimizer["kernel"] = None
    with pytest.raises(RuleError, match="has rules for optimizer state already"):
        flm.presets.zero1(layout_map)
