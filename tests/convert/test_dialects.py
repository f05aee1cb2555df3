"""Tables of other libraries: each leaf gets what the library itself says."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from convert import tables
from jax.sharding import PartitionSpec as P
from presets.spellings import SPELLINGS, shape_of
from shapes import nested, struct

import flax_layoutmap as flm
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


def resolved(layout_map: flm.LayoutMap, shapes: Mapping[str, Any]) -> flm.Resolution:
    tree = nested({path: struct(*shape) for path, shape in shapes.items()})
    return layout_map.resolve(tree)


def shapes_of(spelling: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[int, ...]]:
    return {path: shape_of(dims) for path, dims in spelling.items()}


LINEN = shapes_of(SPELLINGS["llama", "linen"])
EASYLM = shapes_of(SPELLINGS["llama", "easylm"])
# Library → its table, a model, and the mesh.
LISTS = {
    "EasyLM": (tables.EASYLM, EASYLM, "mp"),
    "scalax": (tables.SCALAX, LINEN, "tp"),
    "EasyDeL": (tables.EASYDEL, LINEN, "tp"),
}


@pytest.mark.parametrize("name", LISTS)
def test_each_leaf_gets_what_the_library_says(name: str) -> None:
    rules, shapes, kind = LISTS[name]
    layout_map = flm.convert.from_partition_rules(rules, mesh(kind))
    for leaf in resolved(layout_map, shapes):
        wanted = dims_of(tables.searched(rules, leaf.path), len(leaf.shape))
        assert leaf.layout.dims(len(leaf.shape)) == wanted, leaf.path


def test_a_tuple_is_for_parts_of_a_path_that_follow_each_other() -> None:
    """As in the GPT-Neo example of Hugging Face."""
    rules = [
        (("attention", "(q_proj|k_proj)", "kernel"), P(None, "mp")),
        ((r"ln_\d+", "scale"), None),
    ]
    layout_map = flm.convert.from_partition_rules(
        rules, mesh("mp"), unmatched="replicate"
    )
    paths = ["h/0/attention/q_proj/kernel", "attention/k_proj/kernel", "h/0/ln_1/scale"]
    others = [
        "self_attention/q_proj/kernel",
        "attention/q_proj/x/kernel",
        "ln_1/scales",
    ]
    shapes = dict.fromkeys([*paths, *others], (8, 8))
    resolution = resolved(layout_map, shapes)
    assert {*resolution.unmatched} == {*others}
    assert resolution[paths[1]].layout.dims(2) == ((), ("mp",))


def test_an_earlier_rule_wins_over_the_name_of_a_whole_path() -> None:
    rules = [("kernel", P("fsdp")), ("up/kernel", P(None, "mp"))]
    layout_map = flm.convert.from_partition_rules(rules, mesh("mp"))
    leaf = resolved(layout_map, {"up/kernel": (8, 8)})["up/kernel"]
    assert leaf.layout.dims(2) == (("fsdp",), ())


def test_axes_are_renamed() -> None:
    rules = [("kernel", P(("fsdp", "sp"), "mp")), ("bias", (..., "mp"))]
    names = {"mp": "tp"}
    layout_map = flm.convert.from_partition_rules(rules, mesh("tp"), axes=names)
    found = [rule.layout.axes for rule in layout_map.freeze().rules]
    assert found == [(("fsdp", "sp"), "tp", ...), (..., "tp")]


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ([("a", P(), "b")], r"partition rule 1 is not a \(pattern, PartitionSpec\)"),
        ([("a", P()), ("(b", P())], r"partition rule 2: the pattern '\(b' is not a"),
        ([("a", P("model"))], "rule 'a': .*names the axis 'model', but"),
        ([(("a", ".*"), P())], r"names and groups of names, got '\.\*'"),
        ([((r"(a|b)_\1",), P())], "names and groups of names"),
        ([(3, P())], "a pattern is a string or a tuple of strings, got 3"),
    ],
)
def test_an_entry_that_is_not_a_rule_is_named(rules: Any, text: str) -> None:
    with pytest.raises(RuleError, match=text):
        flm.convert.from_partition_rules(rules, mesh("mp"))


# ------------------------------------------------------------------------- tp_plan

PLANS = json.loads((Path(__file__).parents[1] / "golden/tp_plans.json").read_text())


def test_a_plan_on_weights_and_on_kernels() -> None:
    layout_map = flm.convert.from_tp_plan(PLANS["llama"]["tp"], mesh("tensor"))
    torch = resolved(layout_map, shapes_of(SPELLINGS["llama", "hugging face"]))
    flax = resolved(layout_map, LINEN)
    kernels = 0
    for leaf in torch:
        rows = re.search("[qkv]_proj|gate|up_proj|embed|lm_head", leaf.path)
        columns = re.search("o_proj|down_proj", leaf.path)
        dims = (("tensor",) if rows else (), ("tensor",) if columns else ())
        assert leaf.layout.dims(len(leaf.shape)) == dims[: len(leaf.shape)], leaf.path
        # The kernels of Flax are transposed.
        kernel = leaf.path.replace(".", "/").replace("/weight", "/kernel")
        if kernel in LINEN:
            assert flax[kernel].layout.dims(2) == dims[::-1], kernel
            kernels += 1
    assert kernels == 8


def test_experts() -> None:
    """Their own plan holds where the mesh has an axis for them."""

    class Config:
        base_model_tp_plan = {
            "layers.*.mlp.experts.up_proj": "packed_colwise",
            "layers.*.mlp.experts.down_proj": "rowwise",
            "layers.*.self_attn.sinks": "colwise",
        }
        base_model_ep_plan = {
            "layers.*.mlp.experts": "ep_dispatch_experts",
            "layers.*.mlp.experts.up_proj": "grouped_gemm",
            "layers.*.mlp.experts.down_proj": "grouped_gemm",
        }

    names = ("experts.up_proj", "experts.down_proj", "experts.other")
    shapes: dict[str, Any] = {
        f"model.layers.0.mlp.{name}": (8, 16, 16) for name in names
    }
    shapes["model.layers.0.self_attn.sinks"] = (8,)
    t, e, no = ("tensor",), ("expert",), ()
    for axes, wanted in (
        ("tensor=4", [(no, t, no), (no, no, t), (no, no, no), (t,)]),
        ("tensor=4,expert=2", [(e, no, no), (e, no, no), (no, no, no), (t,)]),
    ):
        layout_map = flm.convert.from_tp_plan(Config(), flm.DeviceMesh.abstract(axes))
        found = resolved(layout_map, shapes)
        assert [found[path].layout.dims(len(shapes[path])) for path in shapes] == wanted


def test_the_entry_of_a_layer_wins_over_that_of_all() -> None:
    plan = {"layers.*.up": "colwise", "layers.0.up": "rowwise"}
    layout_map = flm.convert.from_tp_plan(plan, mesh("tensor"))
    shapes = {f"layers.{n}.up.weight": (8, 8) for n in range(2)}
    first, second = resolved(layout_map, shapes)
    assert first.layout.dims(2) == ((), ("tensor",))
    assert second.layout.dims(2) == (("tensor",), ())


@pytest.mark.parametrize("family", PLANS)
def test_every_published_plan_can_be_read(family: str) -> None:
    for plan in PLANS[family].values():
        assert bool(flm.convert.from_tp_plan(plan, mesh("tensor"))) is bool(plan)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"a": "colwize"}, "'a' has the style 'colwize', .* did you mean 'colwise'?"),
        ({"a": ["colwise"]}, "'a' has the style"),
        ({"a.w*": "colwise"}, "the key 'a.w\\*' is not the name of a module"),
        ({"a..b": "colwise"}, "the key 'a..b' is not the name of a module"),
        ({3: "colwise"}, "the key 3 is not the name of a module"),
        (3, "int is not a mapping of module to style and has no base_model_tp_plan"),
    ],
)
def test_a_plan_that_cannot_be_read(plan: Any, text: str) -> None:
    with pytest.raises(RuleError, match=text):
        flm.convert.from_tp_plan(plan, mesh("tensor"))
