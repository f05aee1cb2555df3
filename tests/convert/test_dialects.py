"""Tables of other libraries: each leaf gets what the library itself says."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from convert import tables
from jax.sharding import PartitionSpec as P
from presets.models import (
    deepseek_v3,
    gemma,
    gpt_oss,
    llama,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
)
from shapes import nested, struct

import flax_layoutmap as flm
from flax_layoutmap.convert._tp_plan import STYLES
from flax_layoutmap.errors import RuleError

MESHES = {
    "mp": "fsdp=2,mp=4",
    "tp": "fsdp=2,sp=1,tp=4",
    "model": "batch=2,model=4",
    "tensor": "tensor=4,expert=2",
}


def mesh(kind: str) -> flm.DeviceMesh:
    return flm.DeviceMesh.abstract(MESHES[kind])


def dims_of(spec: Any, ndim: int) -> tuple[tuple[str, ...], ...]:
    """The axes of each dim of a spec, a tuple or None."""
    dims = [(dim,) if isinstance(dim, str) else tuple(dim or ()) for dim in spec or ()]
    return (*dims, *[()] * (ndim - len(dims)))


def resolved(layout_map: flm.LayoutMap, shapes: dict[str, Any]) -> flm.Resolution:
    tree = nested({path: struct(*shape) for path, shape in shapes.items()})
    return layout_map.resolve(tree)


LINEN = llama.SPELLINGS["linen"]


def linen(weights: dict[str, Any]) -> dict[str, Any]:
    """Weights of transformers as the leaves of Flax: kernels are (in, out)."""
    found = {}
    for name, shape in weights.items():
        stem, _, leaf = name.replace(".", "/").rpartition("/")
        is_kernel = leaf == "weight" and len(shape) > 1 and "embed" not in stem
        found[f"{stem}/{'kernel' if is_kernel else leaf}"] = (
            shape[::-1] if is_kernel else shape
        )
    return found


LISTS = {
    "EasyLM": (tables.EASYLM, tables.searched, tables.easylm_llama(), "mp"),
    "scalax": (tables.SCALAX, tables.searched, LINEN, "tp"),
    "EasyDeL": (
        tables.EASYDEL,
        tables.searched,
        LINEN,
        "tp",
    ),
    "Hugging Face": (tables.GPT_NEO, tables.windows, tables.gpt_neo(), "mp"),
}


@pytest.mark.parametrize("name", LISTS)
def test_each_leaf_gets_what_the_library_says(name: str) -> None:
    rules, library, shapes, kind = LISTS[name]
    layout_map = flm.convert.from_partition_rules(rules, mesh(kind))
    for leaf in resolved(layout_map, shapes):
        wanted = dims_of(library(rules, leaf.path, leaf.shape), len(leaf.shape))
        assert leaf.layout.dims(len(leaf.shape)) == wanted, leaf.path


@pytest.mark.parametrize("name", LISTS)
def test_there_and_back_and_there(name: str) -> None:
    rules, _, shapes, kind = LISTS[name]
    there = flm.convert.from_partition_rules(rules, mesh(kind))
    back = flm.convert.to_partition_rules(there)
    again = flm.convert.from_partition_rules(back, mesh(kind))
    assert again == there
    for leaf in resolved(there, shapes):
        spec = tables.searched(back, leaf.path, leaf.shape)
        assert dims_of(spec, len(leaf.shape)) == leaf.layout.dims(len(leaf.shape))


def test_an_earlier_rule_wins_over_the_name_of_a_whole_path() -> None:
    rules = [("kernel", P("fsdp")), ("up/kernel", P(None, "mp"))]
    layout_map = flm.convert.from_partition_rules(rules, mesh("mp"))
    leaf = resolved(layout_map, {"up/kernel": (8, 8)})["up/kernel"]
    assert leaf.layout.dims(2) == (("fsdp",), ())


def test_axes_are_renamed() -> None:
    rules = [("kernel", P(("fsdp", "sp"), "mp"))]
    layout_map = flm.convert.from_partition_rules(
        rules, mesh("tp"), axes={"mp": "tp"}, batch=("fsdp",)
    )
    leaf = resolved(layout_map, {"up/kernel": (8, 8)})["up/kernel"]
    assert leaf.layout.dims(2) == (("fsdp", "sp"), ("tp",))
    assert layout_map.freeze().batch == ("fsdp",)


@pytest.mark.parametrize("overlap", ["error", "first", "last"])
@pytest.mark.parametrize("match", ["search", "match", "fullmatch"])
def test_exported_lists_give_what_the_map_gives(match: Any, overlap: Any) -> None:
    layout_map = flm.LayoutMap(mesh("mp"), match=match, overlap=overlap)
    layout_map["a/up/.*"] = ("fsdp", ...)
    layout_map["a/up/kernel"] = (None, "mp")  # as an exact key it wins
    layout_map[".*down/.*"] = ("mp",)
    if overlap != "error":
        layout_map["a/.*"] = None
    shapes = {"a/up/kernel": (8, 8), "a/up/bias": (8,), "b/down/x": (8,), "c": (4, 4)}
    rules = flm.convert.to_partition_rules(layout_map)
    for leaf in resolved(layout_map, shapes):
        spec = tables.searched(rules, leaf.path, leaf.shape)
        assert dims_of(spec, len(leaf.shape)) == leaf.layout.dims(len(leaf.shape))


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ([("a", P(), "b")], r"partition rule 1 is no \(pattern, PartitionSpec\) pair"),
        ([("a", P()), ("(b", P())], r"partition rule 2: the pattern '\(b' is not a"),
        ([("a", P("mp", "mp"))], "partition rule 1: .*twice"),
        ([("a", P("model"))], "rule 'a': .*names the axis 'model', but"),
        ([(("a", "b|c"), P())], r"in 'b\|c' the last choice .* write '\(b\|c\)'"),
        ([(3, P())], "a pattern is a string or a tuple of strings, got 3"),
    ],
)
def test_an_entry_that_is_no_rule_is_named(rules: Any, text: str) -> None:
    with pytest.raises(RuleError, match=text):
        flm.convert.from_partition_rules(rules, mesh("mp"))


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (flm.Rule("up", (..., "mp")), "has '...' before other dims"),
        (flm.Rule("up", ("mp",), rank="skip"), 'has rank="skip"'),
        (
            flm.Rule("up", flm.TensorLayout(("mp",), memory_kind="pinned_host")),
            "has the memory kind 'pinned_host'",
        ),
        (
            flm.Rule("up", flm.TensorLayout(("x",), flm.DeviceMesh.abstract("x=2"))),
            "is on a mesh of its own, 'x=2'",
        ),
    ],
)
@pytest.mark.parametrize(
    "export", [flm.convert.to_partition_rules, flm.convert.to_keras]
)
def test_a_rule_that_cannot_be_said_is_named(
    rule: flm.Rule, text: str, export: Any
) -> None:
    layout_map = flm.LayoutMap(mesh("mp"))
    layout_map.add(rule)
    with pytest.raises(RuleError, match=f"rule 'up' → .*{text}, which .* cannot say"):
        export(layout_map)


@pytest.mark.parametrize(
    "export", [flm.convert.to_partition_rules, flm.convert.to_keras]
)
def test_rules_for_optimizer_state_are_refused(export: Any) -> None:
    layout_map = flm.LayoutMap(mesh("mp"))
    layout_map.optimizer["up"] = ("mp",)
    with pytest.raises(RuleError, match="the rule 'up' is for optimizer state"):
        export(layout_map)


# ---------------------------------------------------------------------------- Keras

KERAS = {
    "llama": (tables.KERAS_LLAMA, tables.keras_llama()),
    "gemma": (tables.KERAS_GEMMA, tables.keras_gemma()),
}


@pytest.mark.parametrize("name", KERAS)
@pytest.mark.parametrize("flax", [False, True])
def test_keras_maps_on_paths_of_keras_and_of_flax(name: str, flax: bool) -> None:
    table, model = KERAS[name]
    layout_map = flm.convert.from_keras(table, mesh("model"))
    for path, (shape, other) in model.items():
        wanted = tables.in_keras(table, path)
        leaf = resolved(layout_map, {other if flax else path: shape})
        found = next(iter(leaf))
        assert found.layout.dims(len(shape)) == dims_of(wanted, len(shape)), path


@pytest.mark.parametrize("name", KERAS)
def test_keras_there_and_back_and_there(name: str) -> None:
    table, model = KERAS[name]
    there = flm.convert.from_keras(table, mesh("model"))
    back = flm.convert.to_keras(there)
    again = flm.convert.from_keras(back, mesh("model"))
    for path in model:
        assert tables.in_keras(back, path) == tables.in_keras(table, path), path
        assert again[path] == there[path]


def test_older_keras_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"kernel": ("batch", None)}
    assert flm.convert.from_keras(table, mesh("model"))["dense/kernel"] is None
    monkeypatch.setitem(sys.modules, "keras", SimpleNamespace(__version__="3.13.2"))
    found = flm.convert.from_keras(table, mesh("model"))["dense/kernel"]
    assert found is not None and found.axes == ("batch", None)


def test_a_map_of_keras_brings_its_mesh() -> None:
    class Map(dict[str, Any]):
        device_mesh = SimpleNamespace(shape=(2, 4), axis_names=["x", "y"])

    own = Map(kernel=SimpleNamespace(axes=["x", None]))
    found = flm.convert.from_keras(own, axes={})
    assert str(found.device_mesh) == "x=2,y=4"
    layout = found["kernel"]
    assert layout is not None and layout.axes == ("x", None)


def test_a_key_of_keras_that_is_no_rule_is_named() -> None:
    with pytest.raises(RuleError, match=r"Keras's key 'a' → \('model', 'model'\)"):
        flm.convert.from_keras({"a": ("model", "model")}, mesh("model"))


def test_what_keras_has_no_layout_for() -> None:
    layout_map = flm.LayoutMap(mesh("model"))
    layout_map["a"] = (("batch", "model"),)
    with pytest.raises(RuleError, match="rule 'a' → .*several axes on a dim"):
        flm.convert.to_keras(layout_map)
    with pytest.raises(RuleError, match="this map has overlap='last'"):
        flm.convert.to_keras(flm.LayoutMap(overlap="last"))


# ------------------------------------------------------------------------- tp_plan

PLANS = json.loads((Path(__file__).parents[1] / "golden/tp_plans.json").read_text())


def dim_in_transformers(plan: dict[str, str], name: str, ndim: int) -> int | None:
    """The dim of a weight that transformers 5.24 splits; None: replicated."""
    base = name.removeprefix("model.")
    generic = re.sub(r"\.\d+(\.|$)", r".*\1", base)
    owner, _, last = generic.rpartition(".")
    style = plan.get(generic, plan.get(owner))
    if style is None and owner == "embed_tokens":
        style = "embedding_rowwise"
    if style in ("colwise", "colwise_gather_output", "packed_colwise"):
        return max(ndim - 2, 0)
    if style in ("rowwise", "packed_rowwise", "rowwise_split_input"):
        return None if last == "bias" else ndim - 1
    return {"embedding_rowwise": 0, "embedding_colwise": 1, "grouped_gemm": 0}.get(
        style or ""
    )


# Family → the plan of its name, and its weights.
WEIGHTS: dict[str, dict[str, Any]] = {
    "llama": llama.SPELLINGS["hugging face"],
    "qwen3": qwen3.SPELLINGS["hugging face"],
    "gemma3": gemma.SPELLINGS["hugging face, 3"],
    "qwen3_moe": qwen3_moe.SPELLINGS["hugging face, fused"],
    "mixtral": mixtral.SPELLINGS["hugging face, fused"],
    "deepseek_v3": deepseek_v3.SPELLINGS["hugging face, fused"],
    "gpt_oss": gpt_oss.SPELLINGS["hugging face"],
}


@pytest.mark.parametrize("family", WEIGHTS)
def test_plans_on_the_weights_of_their_family(family: str) -> None:
    plan = PLANS[family]["tp"]
    on = flm.DeviceMesh.abstract("tensor=2")
    layout_map = flm.convert.from_tp_plan(plan, on)
    sharded = 0
    for leaf in resolved(layout_map, WEIGHTS[family]):
        ndim = len(leaf.shape)
        dim = dim_in_transformers(plan, leaf.path, ndim)
        wanted = tuple(("tensor",) if at == dim else () for at in range(ndim))
        assert leaf.layout.dims(ndim) == wanted, leaf.path
        sharded += dim is not None
    assert sharded >= (2 if family == "gpt_oss" else 10)


def test_plans_on_the_kernels_of_flax() -> None:
    """The same dims, transposed."""
    layout_map = flm.convert.from_tp_plan(PLANS["llama"]["tp"], mesh("tensor"))
    weights = qwen2.SPELLINGS["hugging face"]
    torch = resolved(layout_map, weights)
    flax = {leaf.path: leaf for leaf in resolved(layout_map, linen(weights))}
    for leaf in torch:
        stem = leaf.path.replace(".", "/").removesuffix("/weight")
        dims = leaf.layout.dims(len(leaf.shape))
        if f"{stem}/kernel" in flax:
            assert flax[f"{stem}/kernel"].layout.dims(2) == dims[::-1], stem


def test_experts() -> None:
    plan = {
        "layers.*.mlp.experts": "moe_tp_experts",
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        "layers.*.mlp.experts.down_proj": "rowwise",
        "layers.*.self_attn.sinks": "colwise",
    }
    shapes = {
        "model.layers.0.mlp.experts.gate_up_proj": (8, 32, 16),
        "model.layers.0.mlp.experts.down_proj": (8, 16, 16),
        "model.layers.0.mlp.experts.other": (8, 16, 16),
        "model.layers.0.self_attn.sinks": (8,),
    }

    class Config:
        base_model_tp_plan = plan
        base_model_ep_plan = {
            "layers.*.mlp.experts": "ep_dispatch_experts",
            "layers.*.mlp.experts.gate_up_proj": "grouped_gemm",
            "layers.*.mlp.experts.down_proj": "grouped_gemm",
        }

    def dims(given: Any, on: flm.DeviceMesh) -> list[Any]:
        found = resolved(flm.convert.from_tp_plan(given, on), shapes)
        return [found[path].layout.dims(len(shape)) for path, shape in shapes.items()]

    t, e, no = ("tensor",), ("expert",), ()
    by_tensor = [(no, t, no), (no, no, t), (no, no, no), (t,)]
    assert dims(plan, mesh("tensor")) == by_tensor
    assert dims(Config(), flm.DeviceMesh.abstract("tensor=4")) == by_tensor
    by_expert = [(e, no, no), (e, no, no), (no, no, no), (t,)]
    assert dims(Config(), mesh("tensor")) == by_expert


@pytest.mark.parametrize("family", PLANS)
def test_every_published_plan_can_be_read(family: str) -> None:
    for plan in PLANS[family].values():
        assert set(plan.values()) <= STYLES.keys()
        assert bool(flm.convert.from_tp_plan(plan, mesh("tensor"))) is bool(plan)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"a": "colwize"}, "'a' has the style 'colwize', .* did you mean 'colwise'?"),
        ({"a.w*": "colwise"}, "the key 'a.w\\*' is no name of a module"),
        ({"a..b": "colwise"}, "the key 'a..b' is no name of a module"),
        (3, "int is no mapping of module to style and has no base_model_tp_plan"),
    ],
)
def test_a_plan_that_cannot_be_read(plan: Any, text: str) -> None:
    with pytest.raises(RuleError, match=text):
        flm.convert.from_tp_plan(plan, mesh("tensor"))


def test_a_plan_there_and_back() -> None:
    plan = PLANS["llama"]["tp"]
    weights = {
        name: struct(*shape) for name, shape in qwen2.SPELLINGS["hugging face"].items()
    }
    layout_map = flm.convert.from_tp_plan(plan, mesh("tensor"))
    back = flm.convert.to_tp_plan(layout_map, weights)
    on_base = {key.removeprefix("model."): style for key, style in back.items()}
    expected = {
        key: "colwise" if style == "colwise_gather_output" else style
        for key, style in plan.items()
    }
    assert on_base == expected | {"embed_tokens": "embedding_rowwise"}
    again = flm.convert.from_tp_plan(back, mesh("tensor"))
    there = [leaf.layout for leaf in layout_map.resolve(weights)]
    assert [leaf.layout for leaf in again.resolve(weights)] == there


@pytest.mark.parametrize("dim", [0, 1])
def test_a_layout_that_no_style_does_is_named(dim: int) -> None:
    axes = tuple("tensor" if at == dim else None for at in range(4))
    layout_map = flm.LayoutMap.from_rules({"w": axes}, mesh("tensor"))
    with pytest.raises(RuleError, match=r"x\.w \(8,8,8,8\) has .* which no style"):
        flm.convert.to_tp_plan(layout_map, {"x.w": struct(8, 8, 8, 8)})


def test_layers_and_biases_that_disagree_are_named() -> None:
    layout_map = flm.LayoutMap(mesh("tensor"))
    layout_map["0.up.weight"] = ("tensor", None)
    layout_map["1.up.weight"] = (None, "tensor")
    weights = {f"layers.{n}.up.weight": struct(8, 8) for n in range(2)}
    with pytest.raises(RuleError, match="layers.1.up.weight is rowwise and layers.0"):
        flm.convert.to_tp_plan(layout_map, weights)
    weights = {"layers.0.up.weight": struct(8, 8), "layers.0.up.bias": struct(8)}
    with pytest.raises(RuleError, match="up.bias .* is replicated, but its weight is"):
        flm.convert.to_tp_plan(layout_map, weights)


def test_entries_that_disagree_are_named() -> None:
    plan = {"layers.*.up": "colwise", "layers.0.up": "rowwise"}
    with pytest.raises(
        RuleError, match="'layers.0.up' is 'rowwise' and 'layers.\\*.up'"
    ):
        flm.convert.from_tp_plan(plan, mesh("tensor"))


@pytest.mark.parametrize("plan", [{3: "colwise"}, {"a": ["colwise"]}])
def test_entries_of_other_types_are_named(plan: Any) -> None:
    with pytest.raises(RuleError, match="the key 3 is|'a' has the style"):
        flm.convert.from_tp_plan(plan, mesh("tensor"))


def test_a_replicated_embedding_and_experts_there_and_back() -> None:
    weights = {
        "model.embed_tokens.weight": struct(32, 8),
        "model.layers.0.mlp.experts.up": struct(4, 8, 8),
    }
    layout_map = flm.LayoutMap(mesh("tensor"))
    layout_map["experts"] = ("expert", None, None)
    plan = flm.convert.to_tp_plan(layout_map, weights)
    assert plan == {
        "model.embed_tokens": "replicate",
        "model.layers.*.mlp.experts.up": "grouped_gemm",
    }
    again = flm.convert.from_tp_plan(plan, mesh("tensor")).resolve(weights)
    assert [leaf.layout for leaf in again] == [
        leaf.layout for leaf in layout_map.resolve(weights)
    ]


def test_an_exact_key_of_keras_wins_there_and_back() -> None:
    table = {"d1/kernel": ("batch", None), ".*kernel": (None, "model")}
    there = flm.convert.from_keras(table, mesh("model"))
    back = flm.convert.to_keras(there)
    for path in ("d1/kernel", "d2/kernel"):
        layout = there[path]
        assert layout is not None and layout.axes == tables.in_keras(table, path)
        assert tables.in_keras(back, path) == layout.axes
    searched = flm.LayoutMap(mesh("model"))
    searched["a/up/kernel"] = ("model", None)
    searched["up/kernel"] = (None, "model")
    assert searched["a/up/kernel"] is not None
    found = tables.in_keras(flm.convert.to_keras(searched), "a/up/kernel")
    assert found == ("model", None)


@pytest.mark.parametrize("key", ["(?<!query)/kernel", "(?P<key>a)/kernel", "[key]/w"])
def test_groups_and_classes_of_keras_keep_their_names(key: str) -> None:
    assert list(flm.convert.from_keras({key: ("model",)}, mesh("model"))) == [key]


def test_flags_within_a_pattern_are_refused() -> None:
    layout_map = flm.LayoutMap(mesh("model"), match="match")
    layout_map["(?i)KERNEL"] = ("model",)
    for export in (flm.convert.to_keras, flm.convert.to_partition_rules):
        with pytest.raises(RuleError, match="begins with flags"):
            export(layout_map)


def test_a_pattern_of_a_part_stays_in_its_part() -> None:
    rules = [(("mlp", ".*", "kernel"), P("mp"))]
    layout_map = flm.convert.from_partition_rules(rules, mesh("mp"))
    assert layout_map["mlp/a/kernel"] is not None
    assert layout_map["mlp/a/b/kernel"] is None
    with pytest.raises(RuleError, match="refers to a group"):
        flm.convert.from_partition_rules([((r"(a|b)_\1",), P())], mesh("mp"))
