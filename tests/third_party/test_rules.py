"""Rules of other libraries, on their own models where they have some."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import pytest
from convert.tables import LISTS, MP, dims_of, resolved
from jax.sharding import PartitionSpec as P
from shapes import nested, struct

import flax_layoutmap as flm
from flax_layoutmap.errors import ResolveError

MESH = flm.DeviceMesh((2, 4), ("batch", "model"))
SIZES = dict(vocabulary_size=64, num_layers=2, hidden_dim=16, intermediate_dim=32)
HEADS = dict(num_query_heads=4, num_key_value_heads=4)
EXPERTS = dict(moe_intermediate_dim=8, num_experts=4, top_k=2)
# Backbone of KerasHub → its sizes, and how many of its variables the map shards.
BACKBONES: dict[str, tuple[dict[str, Any], int]] = {
    "LlamaBackbone": ({}, 15),
    "Llama3Backbone": ({}, 15),
    "GemmaBackbone": ({"head_dim": 8}, 15),
    "QwenBackbone": ({}, 15),
    "Qwen3MoeBackbone": (EXPERTS | {"head_dim": 8}, 11),
}


def keras_map(keras: Any, rules: Mapping[str, Any]) -> Any:
    devices = keras.distribution.list_devices()
    layout_map = keras.distribution.LayoutMap(
        keras.distribution.DeviceMesh(MESH.shape, list(MESH.axis_names), devices)
    )
    layout_map.update(rules)
    return layout_map


def as_arrays(
    keras: Any, layout_map: Any, make: Callable[[], Any]
) -> dict[str, jax.Array]:
    """Path → the array of each variable of a model that Keras makes with a map."""
    by = keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    with by.scope():
        model = make()
    return {variable.path: variable.value for variable in model.variables}


def assert_same(layout_map: flm.LayoutMap, arrays: Mapping[str, jax.Array]) -> None:
    """The layouts of leaves are those of arrays with the same paths, one by one."""
    shapes = {path: array.shape for path, array in arrays.items()}
    for leaf in resolved(layout_map, shapes):
        ndim = len(leaf.shape)
        sharding = leaf.layout.on(MESH).sharding(ndim)
        wanted = arrays[leaf.path].sharding
        assert sharding.is_equivalent_to(wanted, ndim), leaf.path


@pytest.mark.parametrize("name", BACKBONES)
def test_backbones_of_keras_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras", reason="The package keras is not installed.")
    hub = pytest.importorskip(
        "keras_hub.models", reason="The package keras-hub is not installed."
    )
    sizes, count = BACKBONES[name]
    kind = getattr(hub, name)
    layout_map = kind.get_layout_map(keras_map(keras, {}).device_mesh)

    def model() -> Any:
        return kind(**SIZES, **HEADS, **sizes)

    arrays = as_arrays(keras, layout_map, model)
    sharded = [path for path in arrays if not arrays[path].is_fully_replicated]
    assert len(sharded) == count
    assert_same(flm.convert.from_keras(layout_map), arrays)


@pytest.mark.parametrize("name", ["EasyLM", "scalax", "EasyDeL"])
def test_specs_of_eformer(name: str) -> None:
    eformer: Any = pytest.importorskip(
        "eformer.escale", reason="The package eformer is not installed."
    )
    rules, shapes, mesh = LISTS[name]
    layout_map = flm.convert.from_partition_rules(rules, mesh)
    for path, shape in shapes.items():
        tree = nested({path: struct(*shape)})
        leaf = next(iter(resolved(layout_map, {path: shape})))
        found = eformer.match_partition_rules(rules, tree)
        for part in path.split("/"):
            found = found[part]
        assert leaf.layout.dims(len(shape)) == dims_of(found, len(shape)), path


def test_a_spec_that_eformer_cuts_is_refused() -> None:
    eformer: Any = pytest.importorskip(
        "eformer.escale", reason="The package eformer is not installed."
    )
    rules = [("up", P("fsdp", "mp"))]
    assert eformer.match_partition_rules(rules, {"up": struct(8)}) == {"up": P("fsdp")}
    layout_map = flm.convert.from_partition_rules(rules, MP)
    with pytest.raises(ResolveError, match=r"up \(8,\): rule 1 'up'"):
        resolved(layout_map, {"up": (8,)})
