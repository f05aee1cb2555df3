"""Families with experts are recognised by their paths, each as itself alone."""

import importlib

import pytest
from presets.models import Shapes, deepseek_v3, gpt_oss, mixtral, qwen3_moe
from shapes import nested, struct

import flax_layoutmap as flm

FAMILIES = ["deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe"]
SPELLINGS = [
    (family, spelling)
    for family in FAMILIES
    for spelling in importlib.import_module(f"presets.models.{family}").SPELLINGS
]


def recognised(shapes: Shapes) -> flm.presets.Recognition:
    return flm.presets.recognise(nested({p: struct(*s) for p, s in shapes.items()}))


@pytest.mark.parametrize(("family", "spelling"), SPELLINGS)
def test_each_is_recognised_as_its_family_alone(family: str, spelling: str) -> None:
    module = importlib.import_module(f"presets.models.{family}")
    found = recognised(module.SPELLINGS[spelling])
    assert found.families == (family,), str(found)


def with_shared_experts() -> Shapes:
    """Qwen 2 with experts: one of them sees all tokens."""
    found = mixtral.SPELLINGS["hugging face, fused"]
    return found | {"model.layers.0.mlp.shared_expert.gate_proj.weight": (8, 8)}


def with_an_indexer() -> Shapes:
    """DeepSeek V3.2 selects what to attend to."""
    name = "model.layers.0.self_attn.indexer.wq_b.weight"
    return deepseek_v3.SPELLINGS["hugging face"] | {name: (64, 16)}


def without_router_bias() -> Shapes:
    """MiMo V2 has sinks, too, but other experts."""
    found = qwen3_moe.SPELLINGS["hugging face"]
    return found | {"model.layers.0.self_attn.sinks": (8,)}


def with_biases() -> Shapes:
    """PhiMoE has the experts of Mixtral, and biases."""
    found = mixtral.SPELLINGS["hugging face"]
    return found | {"model.layers.0.self_attn.q_proj.bias": (128,)}


@pytest.mark.parametrize(
    "shapes",
    [with_shared_experts(), with_an_indexer(), without_router_bias(), with_biases()],
    ids=["qwen2_moe", "deepseek_v32", "mimo_v2", "phimoe"],
)
def test_other_models_with_experts_are_none_of_them(shapes: Shapes) -> None:
    found = recognised(shapes)
    assert not found.families, str(found)


def test_detect_says_why_it_is_of_no_family() -> None:
    tree = nested({p: struct(*s) for p, s in with_an_indexer().items()})
    with pytest.raises(flm.errors.RuleError) as raised:
        flm.presets.detect(tree, flm.DeviceMesh.abstract("fsdp=4"))
    assert "deepseek_v3: model.layers.0.self_attn.indexer" in str(raised.value)


def test_detect_gives_the_preset() -> None:
    tree = nested({p: struct(*s) for p, s in gpt_oss.SPELLINGS["hugging face"].items()})
    mesh = flm.DeviceMesh.abstract("fsdp=2,expert=2,tensor=2")
    wanted = flm.presets.load("gpt_oss", mesh, variant="whole_experts")
    assert flm.presets.detect(tree, mesh) == wanted


def test_a_rule_of_a_family_for_another_rank_is_a_reason_against_it() -> None:
    weights = mixtral.SPELLINGS["easydel"]
    path = "model/layers/0/self_attn/sinks/attn/q"
    found = recognised(weights | {path: (8, 8)})
    assert found.rejected["mixtral"].startswith(f"{path} (8,8): rule ")
    assert "has 3 dims, the leaf has 2" in found.rejected["mixtral"]
