"""Presets of families with experts: which axis each dim is on, in each spelling."""

import importlib
import re
from typing import Any

import pytest
from shapes import all_axes, axes_of, nested, struct

import flax_layoutmap as flm

FAMILIES = ("deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe")
MESH = flm.DeviceMesh.abstract("fsdp=2,expert=2,tensor=2")
BOTH = ("fsdp", "expert")
# What `tests/presets/models` calls the dims: heads, hidden units, the vocabulary.
ON_TENSOR = {"V", "H", "K", "Hs", "Ks", "H(s+p)", "H2s", "f", "2f", "F"}
SPELLINGS = [
    (family, spelling)
    for family in FAMILIES
    for spelling in importlib.import_module(f"presets.models.{family}").SPELLINGS
]


def shapes_of(family: str, spelling: str) -> dict[str, tuple[Any, ...]]:
    return importlib.import_module(f"presets.models.{family}").SPELLINGS[spelling]


def resolved(
    family: str,
    shapes: dict[str, tuple[Any, ...]],
    mesh: Any = MESH,
    variant: str | None = None,
) -> Any:
    tree = nested({path: struct(*shape) for path, shape in shapes.items()})
    return flm.presets.load(family, mesh, variant=variant).resolve(tree)


def expected(path: str, names: list[str]) -> tuple[Any, ...]:
    """The axes of a leaf, by the names of its dims."""
    real = set(names) - {"L"}
    if re.search("blocks|scales", path):
        out = ("tensor", "fsdp") if "gate_up" in path else ("fsdp", "tensor")
        return ("expert", out, *(None,) * (len(names) - 2))
    if real == {"E"} or len(real) == 1 and not real & ON_TENSOR:
        return (None,) * len(names)  # norms, biases of the router and of outputs
    if real == {"E", "d"}:  # the router, or a bias of experts
        is_router = re.search("router|gate[./](weight|kernel)|gate_dense/", path)
        if path.endswith("mlp/gate/kernel"):  # what a gate is called, too
            return tuple({"d": BOTH, "E": "tensor"}.get(name) for name in names)
        own = {"d": BOTH} if is_router else {"E": "expert"}
    elif "E" in real:
        own = {"E": "expert", "d": "fsdp", "f": "tensor", "2f": "tensor"}
    elif "2d" in real:  # of the embedding and the last layer, to the model
        own = {"d": "tensor", "2d": BOTH}
    else:
        own = dict.fromkeys(ON_TENSOR, "tensor") | {"d": BOTH}
        if not {"d"} & real:  # up from a low rank
            own |= {"q": BOTH, "r": BOTH}
    return tuple(own.get(name) for name in names)


@pytest.mark.parametrize(("family", "spelling"), SPELLINGS)
def test_each_dim_is_on_the_axis_of_its_meaning(family: str, spelling: str) -> None:
    shapes = shapes_of(family, spelling)
    found = all_axes(resolved(family, shapes))
    wanted = {
        path: expected(path, [dim.name for dim in shape])
        for path, shape in shapes.items()
        if not path.endswith("_scale_inv")
    }
    assert {path: found[path] for path in wanted} == wanted


@pytest.mark.parametrize(("family", "spelling"), SPELLINGS)
def test_whole_experts(family: str, spelling: str) -> None:
    """The variant: of the leaves of all experts, their number and the model's dim."""
    shapes = shapes_of(family, spelling)
    found = all_axes(resolved(family, shapes, variant="whole_experts"))
    before = all_axes(resolved(family, shapes))
    changed = {path for path in found if found[path] != before[path]}
    assert changed == {path for path, axes in before.items() if "expert" in axes}
    for path in changed:
        names = [dim.name for dim in shapes[path]]
        own: dict[str, Any] = {"E": ("expert", "tensor"), "d": "fsdp"}
        if set(names) - {"L"} == {"E", "d"}:
            del own["d"]  # a bias
        if re.search("blocks|scales", path):
            own = {"E": ("expert", "tensor"), names[1]: "fsdp"}
        assert found[path] == tuple(own.get(name) for name in names), path


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_the_scales_of_float8_weights_lie_as_their_weights(family: str) -> None:
    shapes = shapes_of(family, "hugging face, float8")
    found = all_axes(resolved(family, shapes))
    scales = [path for path in found if path.endswith("_scale_inv")]
    assert len(scales) > 40
    for path in scales:
        assert found[path] == found[path.removesuffix("_scale_inv")], path


def test_a_scale_that_its_axis_would_cut_is_replicated_and_reported() -> None:
    mesh = flm.DeviceMesh.abstract("fsdp=32")
    path = "model.layers.0.self_attn.q_b_proj.weight_scale_inv"
    shapes = {path: (192, 12)}  # of (24576, 1536)
    resolution = resolved("deepseek_v3", shapes, mesh)
    assert axes_of(resolution[path]) == (None, None)
    (leaf,) = resolution.fallbacks
    assert "dim 1 of size 12 does not divide by mesh axis 'fsdp'" in str(leaf.fallback)


def test_blocks_of_published_gpt_oss_are_sharded_over_all_axes() -> None:
    mesh = flm.DeviceMesh.abstract("fsdp=4,expert=4,tensor=4")
    stem = "model.layers.0.mlp.experts"
    shapes = {
        f"{stem}.down_proj_blocks": (32, 2880, 90, 16),
        f"{stem}.down_proj_scales": (32, 2880, 90),
        f"{stem}.gate_up_proj_blocks": (32, 5760, 90, 16),
        f"{stem}.gate_up_proj_scales": (32, 5760, 90),
    }
    resolution = resolved("gpt_oss", shapes, mesh)
    assert not resolution.fallbacks
    assert resolution.bytes_per_device * 64 == resolution.total_bytes


@pytest.mark.parametrize(
    ("axes", "gate", "query"),
    [
        ("fsdp=8", (None, "fsdp", None), ("fsdp", None, None)),
        ("tensor=4", (None, None, "tensor"), (None, "tensor", None)),
        ("expert=8", ("expert", None, None), ("expert", None, None)),
        ("data=2,expert=4", ("expert", None, None), ("expert", None, None)),
    ],
)
def test_the_axes_of_the_mesh_decide(axes: str, gate: Any, query: Any) -> None:
    shapes = shapes_of("mixtral", "flax")
    resolution = resolved("mixtral", shapes, flm.DeviceMesh.abstract(axes))
    assert axes_of(resolution["layers/0/mlp/experts/gate/kernel"]) == gate
    assert axes_of(resolution["layers/0/attention/query/kernel"]) == query


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_the_gate_of_a_dense_layer_is_no_router(family: str) -> None:
    path = "layers/0/mlp/gate/kernel"
    leaf = resolved(family, {path: (64, 384)})[path]
    assert axes_of(leaf) == (BOTH, "tensor")


def test_fewer_experts_than_the_axis_has_devices() -> None:
    mesh = flm.DeviceMesh.abstract("expert=16,tensor=2")
    shapes = {"layers/0/mlp/experts/up/kernel": (8, 64, 96)}
    resolution = resolved("mixtral", shapes, mesh)
    (leaf,) = resolution.fallbacks
    assert axes_of(leaf) == (None, None, "tensor")
    assert "dim 0 of size 8 does not divide by mesh axis 'expert'" in str(leaf.fallback)


def test_layouts_of_tokens_on_their_way_to_experts() -> None:
    names = flm.presets.load("mixtral", "data=2,fsdp=2,expert=2").names
    before, there = names["by_expert"], names["experts"]
    assert before is not None and there is not None
    assert before.axes == (None, ("data", "fsdp", "expert"), ...)
    assert there.axes == ("expert", ("data", "fsdp"), ...)
