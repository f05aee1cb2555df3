"""Tensor-parallel plans of Hugging Face's transformers."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from convert.tables import LINEN, resolved, shapes_of

import flax_layoutmap as flm
from flax_layoutmap.errors import RuleError

MESH = flm.DeviceMesh.abstract("tensor=4,expert=2")
PLANS = json.loads((Path(__file__).parents[1] / "golden/tp_plans.json").read_text())


def test_a_plan_on_weights_and_on_kernels() -> None:
    layout_map = flm.convert.from_tp_plan(PLANS["llama"]["tp"], MESH)
    torch = resolved(layout_map, shapes_of("llama", "hugging face"))
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

    experts = "layers.*.mlp.experts"
    up, down = f"{experts}.up_proj", f"{experts}.down_proj"
    tensors = {up: "packed_colwise", down: "rowwise", "layers.*.sinks": "colwise"}
    grouped = {up: "grouped_gemm", down: "grouped_gemm", experts: "ep_dispatch_experts"}
    config = SimpleNamespace(base_model_tp_plan=tensors, base_model_ep_plan=grouped)
    paths = [x.replace("*", "0") for x in (up, down, f"{experts}.other")]
    shapes: dict[str, Any] = dict.fromkeys(paths, (8, 16, 16))
    shapes["model.layers.0.sinks"] = (8,)
    t, e, no = ("tensor",), ("expert",), ()
    for axes, wanted in (
        ("tensor=4", [(no, t, no), (no, no, t), (no, no, no), (t,)]),
        ("tensor=4,expert=2", [(e, no, no), (e, no, no), (no, no, no), (t,)]),
    ):
        layout_map = flm.convert.from_tp_plan(config, flm.DeviceMesh.abstract(axes))
        found = resolved(layout_map, shapes)
        assert [found[path].layout.dims(len(shapes[path])) for path in shapes] == wanted


def test_the_entry_of_a_layer_wins_over_that_of_all() -> None:
    plan = {"layers.*.up": "colwise", "layers.0.up": "rowwise"}
    layout_map = flm.convert.from_tp_plan(plan, MESH)
    shapes = {f"layers.{n}.up.weight": (8, 8) for n in range(2)}
    first, second = resolved(layout_map, shapes)
    assert first.layout.dims(2) == ((), ("tensor",))
    assert second.layout.dims(2) == (("tensor",), ())


@pytest.mark.parametrize("family", PLANS)
def test_every_published_plan_can_be_read(family: str) -> None:
    for plan in PLANS[family].values():
        assert bool(flm.convert.from_tp_plan(plan, MESH)) is bool(plan)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"a": "colwize"}, "'a' has the style 'colwize', .* did you mean 'colwise'?"),
        ({"a": ["colwise"]}, "'a' has the style"),
        ({"a.w*": "colwise"}, "the key 'a.w\\*' is not the name of a module"),
        ({3: "colwise"}, "the key 3 is not the name of a module"),
        (3, "int is not a mapping of module to style and has no base_model_tp_plan"),
    ],
)
def test_a_plan_that_cannot_be_read(plan: Any, text: str) -> None:
    with pytest.raises(RuleError, match=text):
        flm.convert.from_tp_plan(plan, MESH)
