"""Tables of other libraries: each leaf gets what the library itself says."""

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from convert.tables import LISTS, MP, TP, dims_of, resolved, searched, shapes_of
from jax.sharding import PartitionSpec as P

import flax_layoutmap as flm
from flax_layoutmap.errors import ResolveError, RuleError


@pytest.mark.parametrize("name", LISTS)
def test_each_leaf_gets_what_the_library_says(name: str) -> None:
    rules, shapes, mesh = LISTS[name]
    layout_map = flm.convert.from_partition_rules(rules, mesh)
    for leaf in resolved(layout_map, shapes):
        wanted = dims_of(searched(rules, leaf.path), len(leaf.shape))
        assert leaf.layout.dims(len(leaf.shape)) == wanted, leaf.path


def test_an_earlier_rule_wins_over_the_name_of_a_whole_path() -> None:
    rules = [("kernel", P("fsdp")), ("up/kernel", P(None, "mp"))]
    layout_map = flm.convert.from_partition_rules(rules, MP)
    leaf = resolved(layout_map, {"up/kernel": (8, 8)})["up/kernel"]
    assert leaf.layout.dims(2) == (("fsdp",), ())


def test_axes_are_renamed() -> None:
    rules = [("kernel", P(("fsdp", "sp"), "mp")), ("bias", (..., "mp"))]
    names = {"mp": "tp"}
    layout_map = flm.convert.from_partition_rules(rules, TP, axes=names)
    found = [rule.layout.axes for rule in layout_map.freeze().rules]
    assert found == [(("fsdp", "sp"), "tp", ...), (..., "tp")]


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ([("a", P(), "b")], r"rule 1 is not a \(pattern, PartitionSpec\) pair, \('a"),
        ([("a", P()), ("(b", P())], "partition rule 2 .*: the pattern '\\(b' is not a"),
        ([("a", P("model"))], "rule 'a': .*names the axis 'model', but"),
        ([(("a", "b"), P())], r"rule 1 .*a pattern must be a string, got \('a', 'b'\)"),
    ],
)
def test_an_entry_that_is_not_a_rule_is_named(rules: Any, text: str) -> None:
    with pytest.raises(RuleError, match=text):
        flm.convert.from_partition_rules(rules, MP)


# --------------------------------------------------------------------------- Keras

KERAS = flm.DeviceMesh.abstract("batch=2,model=4")
INPUTS = "transformer_layer.*self_attention.*(query|key|value).kernel"
# KerasHub's `llama_backbone.py` (71453d0).
TABLE: dict[str, Any] = {
    "token_embedding/embeddings": ("model", "batch"),
    INPUTS: ("model", "batch", None),
    "transformer_layer.*attention_output.kernel": ("model", None, "batch"),
    "transformer_layer.*feedforward_intermediate_dense.kernel": ("batch", "model"),
    "transformer_layer.*feedforward_gate_dense.kernel": ("batch", "model"),
    "transformer_layer.*feedforward_output_dense.kernel": ("model", "batch"),
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
}


def in_keras(table: dict[str, Any], path: str) -> Any:
    """Keras ≥ 3.14: the one pattern that matches all of the path."""
    keys = [x for x in table if re.fullmatch(x, path)]
    assert len(keys) <= 1
    return table[keys[0]] if keys else None


@pytest.mark.parametrize("flax", [False, True])
def test_a_map_on_paths_of_keras_and_of_flax(flax: bool) -> None:
    layout_map = flm.convert.from_keras(TABLE, KERAS)
    shapes = shapes_of("llama", "keras hub")
    sharded = 0
    for path, shape in shapes.items():
        wanted = dims_of(in_keras(TABLE, path), len(shape))
        for theirs, name in (IN_FLAX if flax else {}).items():
            path = path.replace(theirs, name)
        (leaf,) = resolved(layout_map, {path: shape})
        assert leaf.layout.dims(len(shape)) == wanted, path
        sharded += any(wanted)
    assert sharded == 8


def test_the_key_of_a_whole_path_wins_and_others_must_agree() -> None:
    table = {"d1/kernel": ("batch", None), ".*kernel": (None, "model"), "d2/.*": None}
    made = flm.convert.from_keras(table, KERAS)
    layout = made["d1/kernel"]
    assert layout is not None and layout.axes == ("batch", None)
    with pytest.raises(ResolveError, match="d2/kernel .*rule 3 .*, rule 4 'd2/"):
        resolved(made, {"d2/kernel": (8, 8)})


def test_older_keras_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"kernel": ("batch", None)}
    monkeypatch.setitem(sys.modules, "keras", None)
    assert flm.convert.from_keras(table, KERAS)["dense/kernel"] is None
    monkeypatch.setitem(sys.modules, "keras", SimpleNamespace(__version__="3.13.2"))
    layout = flm.convert.from_keras(table, KERAS)["dense/kernel"]
    assert layout is not None and layout.axes == ("batch", None)


def test_a_map_brings_its_mesh() -> None:
    class Map(dict[str, Any]):
        device_mesh = SimpleNamespace(shape=(2, 4), axis_names=["x", "y"])

    made = flm.convert.from_keras(Map(kernel=SimpleNamespace(axes=["x", None])))
    assert str(made.device_mesh) == "x=2,y=4"
    layout = made["kernel"]
    assert layout is not None and layout.axes == ("x", None)


def test_a_key_that_is_not_a_rule_is_named() -> None:
    with pytest.raises(RuleError, match=r"Keras's key 'a' → \('model', 'model'\)"):
        flm.convert.from_keras({"a": ("model", "model")}, KERAS)


@pytest.mark.parametrize("key", ["(?<!query)/kernel", "(?P<key>a)/kernel", "[key]/w"])
def test_groups_and_classes_keep_their_names(key: str) -> None:
    assert list(flm.convert.from_keras({key: ("model",)}, KERAS)) == [key]
