"""Other libraries themselves shard their models, and converted rules say the same."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import pytest
from convert import tables
from convert.test_dialects import LISTS, MESHES, resolved
from jax.sharding import PartitionSpec as P
from shapes import nested, struct

import flax_layoutmap as flm
from flax_layoutmap.errors import ResolveError

MESH = flm.DeviceMesh((2, 4), ("batch", "model"))
Shardings = Mapping[str, Any]

# ---------------------------------------------------------------------------- Keras

TABLE: dict[str, Any] = tables.KERAS_LLAMA | {
    "transformer_layer_0/norm/gamma": ("model",),  # a whole path
    ".*norm/(beta|moving_mean)": ("batch",),
}
# Parts of Keras's paths → the same in Flax.
IN_FLAX = {
    "token_embedding/embeddings": "embedder/embedding",
    "transformer_layer_": "layers/",
    "self_attention/": "attn/",
    "query": "q_proj",
    "key/": "k_proj/",
    "value": "v_proj",
    "attention_output": "o_proj",
    "feedforward_gate_dense": "mlp/gate_proj",
    "feedforward_intermediate_dense": "mlp/up_proj",
    "feedforward_output_dense": "mlp/down_proj",
    "gamma": "scale",
    "beta": "bias",
    "moving_mean": "mean",
}


@pytest.fixture(scope="module")
def keras(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "jax")
        patch.setenv("KERAS_HOME", str(tmp_path_factory.mktemp("keras")))
        return pytest.importorskip("keras", reason="Keras is not installed.")


def keras_map(keras: Any, rules: Mapping[str, Any]) -> Any:
    devices = keras.distribution.list_devices()
    layout_map = keras.distribution.LayoutMap(
        keras.distribution.DeviceMesh(MESH.shape, list(MESH.axis_names), devices)
    )
    layout_map.update(rules)
    return layout_map


def keras_model(keras: Any) -> Any:
    """A model with the names of KerasHub's Llama."""
    layers = keras.layers
    x = tokens = keras.Input((4,), dtype="int32")
    x = layers.Embedding(32, 8, name="token_embedding")(x)
    for n in range(2):
        x = block(keras, f"transformer_layer_{n}")(x)
    return keras.Model(tokens, layers.LayerNormalization(name="final_norm")(x))


def block(keras: Any, name: str) -> Any:
    layers = keras.layers

    class Block(layers.Layer):
        def __init__(self) -> None:
            super().__init__(name=name)
            self.norm = layers.BatchNormalization(name="norm")
            self.attention = layers.MultiHeadAttention(8, 4, name="self_attention")
            self.gate = layers.Dense(16, name="feedforward_gate_dense")
            self.up = layers.Dense(16, name="feedforward_intermediate_dense")
            self.down = layers.Dense(8, name="feedforward_output_dense")

        def call(self, x: Any) -> Any:
            x = self.norm(x)
            x = x + self.attention(x, x)
            return x + self.down(self.gate(x) * self.up(x))

    return Block()


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
        own, ndim = leaf.layout.on(MESH).sharding(len(leaf.shape)), len(leaf.shape)
        wanted = arrays[leaf.path].sharding
        assert own.is_equivalent_to(wanted, ndim), (leaf.path, own, wanted)


def test_variables_of_keras(keras: Any) -> None:
    layout_map = keras_map(keras, TABLE)
    arrays = as_arrays(keras, layout_map, lambda: keras_model(keras))
    sharded = [path for path in arrays if not arrays[path].is_fully_replicated]
    assert (len(arrays), len(sharded)) == (39, 21)
    assert_same(flm.convert.from_keras(layout_map), arrays)
    in_flax = {}
    for path, array in arrays.items():
        for own, other in IN_FLAX.items():
            path = path.replace(own, other)
        in_flax[path] = array
    # Rules for one leaf by its path are for one model.
    kept = [path for path in in_flax if path != "layers/0/norm/scale"]
    assert_same(
        flm.convert.from_keras(layout_map), {path: in_flax[path] for path in kept}
    )


def test_keras_with_an_exported_map(keras: Any) -> None:
    there = flm.convert.from_keras(keras_map(keras, TABLE), MESH)
    back = keras_map(keras, flm.convert.to_keras(there))
    arrays = as_arrays(keras, back, lambda: keras_model(keras))
    assert_same(there, arrays)
    assert_same(flm.convert.from_keras(keras_map(keras, TABLE)), arrays)


@pytest.mark.parametrize("match", ["search", "match", "fullmatch"])
def test_keras_with_a_map_of_ours(keras: Any, match: Any) -> None:
    layout_map = flm.LayoutMap(MESH, match=match)
    layout_map["transformer_layer_[01]/.*(gate|intermediate)_dense/kernel"] = (
        None,
        "model",
    )
    layout_map[".*bias.?"] = None
    layout_map["token_embedding/embeddings"] = ("model", "batch")
    exported = keras_map(keras, flm.convert.to_keras(layout_map))
    arrays = as_arrays(keras, exported, lambda: keras_model(keras))
    sharded = [path for path in arrays if not arrays[path].is_fully_replicated]
    assert len(sharded) == 5
    assert_same(layout_map, arrays)


def test_both_refuse_rules_that_disagree(keras: Any) -> None:
    rules = {".*kernel": (None, "model"), "dense/.*": ("model", None)}
    layout_map = keras_map(keras, rules)
    with pytest.raises(ValueError, match="matches multiple layout"):
        layout_map["dense/kernel"]
    converted = flm.convert.from_keras(layout_map)
    with pytest.raises(ResolveError, match="dense/kernel .*rule 1 .*, rule 2 'dense/"):
        resolved(converted, {"dense/kernel": (8, 8)})


# --------------------------------------------------------------------------- scalax


@pytest.fixture(scope="module")
def scalax() -> Any:
    return pytest.importorskip("scalax.sharding", reason="scalax is not installed.")


def as_scalax_shards(
    scalax: Any, rules: Iterable[Any], shapes: Mapping[str, Any], mesh: flm.DeviceMesh
) -> Shardings:
    helper = scalax.MeshShardingHelper(mesh.shape, mesh.axis_names)
    tree = nested({path: struct(*shape) for path, shape in shapes.items()})
    found = helper.match_sharding_rule(scalax.TreePathShardingRule(*rules), tree)
    return {
        "/".join(key.key for key in path): sharding
        for path, sharding in jax.tree_util.tree_leaves_with_path(found)
    }


@pytest.mark.parametrize("name", ["EasyLM", "scalax", "EasyDeL"])
def test_leaves_that_scalax_shards(scalax: Any, name: str) -> None:
    rules, _, shapes, kind = LISTS[name]
    grid = flm.DeviceMesh.abstract(MESHES[kind])
    mesh = flm.DeviceMesh(grid.shape, grid.axis_names)
    layout_map = flm.convert.from_partition_rules(rules, mesh)
    there = as_scalax_shards(scalax, rules, shapes, mesh)
    back = flm.convert.to_partition_rules(layout_map)
    again = as_scalax_shards(scalax, back, shapes, mesh)
    found = list(resolved(layout_map, shapes))
    assert len(found) == len(there) == len(again) == len(shapes)
    assert any(leaf.layout.axis_names for leaf in found)
    for leaf in found:
        ndim = len(leaf.shape)
        own = leaf.layout.sharding(ndim)
        assert own.is_equivalent_to(there[leaf.path], ndim), leaf.path
        assert own.is_equivalent_to(again[leaf.path], ndim), leaf.path


def test_a_leaf_of_one_element_is_refused_where_scalax_replicates_it(
    scalax: Any,
) -> None:
    mesh = flm.DeviceMesh((2, 4), ("fsdp", "mp"))
    rules, shapes = [("up", P("mp"))], {"up": (1,), "down": (1,)}
    specs = as_scalax_shards(scalax, rules, shapes, mesh)
    assert all(sharding.spec == P() for sharding in specs.values())
    layout_map = flm.convert.from_partition_rules(rules, mesh)
    with pytest.raises(ResolveError) as refused:
        resolved(layout_map, shapes)
    down, up = refused.value.problems
    assert down.startswith("down (1,): no rule matches it")
    assert up.startswith("up (1,): rule 1 'up'")
