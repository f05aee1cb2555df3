"""presets.detect: the preset whose rules cover every matrix of a model."""

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from presets.spellings import SPELLINGS, shape_of, tree_of
from presets.test_presets import CASES, WITH_EXPERTS
from shapes import nested, struct

import flax_layoutmap as flm
from flax_layoutmap.errors import RuleError

MESH = flm.DeviceMesh.abstract("fsdp=2,tensor=4")
HEAD = r"(^|[/.])(lm_head|output|logits_dense|reverse_embeddings)([/.]|$)"
LLAMA = SPELLINGS["llama", "tunix"]
TIED = {path: dims for path, dims in LLAMA.items() if "lm_head" not in path}


@pytest.mark.parametrize("name", CASES)
def test_each_spelling_gets_the_rules_of_its_family(name: str) -> None:
    family, spelling = CASES[name]
    variant = None
    has_head = any(re.search(HEAD, path) for path in spelling)
    if family in ("llama", "qwen2", "t5") and has_head:
        variant = "untied"
    if name in WITH_EXPERTS:
        variant = "whole_experts"
    tree = tree_of(spelling)
    wanted = flm.presets.load(family, MESH, variant=variant).resolve(tree)
    found = flm.presets.detect(tree, MESH).resolve(tree)
    assert [leaf.layout for leaf in found] == [leaf.layout for leaf in wanted]


@pytest.mark.parametrize(
    ("spelling", "mesh", "variant"),
    [
        (LLAMA, "fsdp=2,tensor=4", "untied"),
        (TIED, "fsdp=2,tensor=4", None),
        (LLAMA, "fsdp=4,tensor=32", None),  # the model's dim has not so many parts
        (SPELLINGS["mixtral", "flax"], "fsdp=2,tensor=4", "whole_experts"),
        (SPELLINGS["mixtral", "flax"], "fsdp=4", None),  # which changes nothing
        (SPELLINGS["mixtral", "flax"], "expert=4,tensor=4", None),  # of 8 experts
    ],
)
def test_the_variant_is_chosen_by_the_model_and_logged(
    spelling: Any, mesh: str, variant: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    target, tree = flm.DeviceMesh.abstract(mesh), tree_of(spelling)
    with caplog.at_level(logging.INFO, logger="flax_layoutmap"):
        found = flm.presets.detect(tree, target)
    name = flm.presets.family_of(tree)
    assert found == flm.presets.load(name, target, variant=variant)
    text = f", variant {variant}" if variant else ""
    assert caplog.messages == [f"preset {name}{text}"]


def test_a_variant_that_is_given_is_taken() -> None:
    found = flm.presets.detect(tree_of(TIED), MESH, variant="untied")
    assert found == flm.presets.load("llama", MESH, variant="untied")


def test_an_output_in_a_layer_is_not_a_head() -> None:
    spelling = TIED | {"layers/0/self_attn/output/kernel": ("f", "t")}
    assert flm.presets.detect(tree_of(spelling), MESH) == flm.presets.llama(MESH)


def test_of_several_models_each_has_a_head() -> None:
    """Else no embedding is untied: that of a tied one would send much more."""
    untied, tied = tree_of(LLAMA), tree_of(TIED)
    both = flm.presets.detect({"policy": untied, "reference": tied}, MESH)
    assert both == flm.presets.llama(MESH)
    both = flm.presets.detect({"policy": untied, "reference": untied}, MESH)
    assert both == flm.presets.load("llama", MESH, variant="untied")


@pytest.mark.parametrize(
    ("spelling", "text"),
    [
        (
            LLAMA | {"layers/0/adapter/mixer/kernel": ("f", "f")},
            "llama(mesh): no rule for layers/0/adapter/mixer/kernel (64,64)",
        ),
        (
            SPELLINGS["vit", "hugging face"] | {"vit.pooler.mixer.weight": ("f", "t")},
            "vit(mesh): no rule for vit.pooler.mixer.weight (64,128)",
        ),
        # DeepSeek V3.2 selects what to attend to.
        (
            SPELLINGS["deepseek_v3", "hugging face, float8"]
            | {
                f"model.layers.0.self_attn.indexer.{name}.weight": ("t", "f")
                for name in ("wq_b", "wk_b")
            },
            "no rule for model.layers.0.self_attn.indexer.wk_b.weight (128,64), and 1 "
            "more",
        ),
        # Two linear layers do not make a family.
        (
            {"up/kernel": ("f", "t"), "down/kernel": ("t", "f")},
            "(mesh): it has rules for only 2 of the at least 4 kinds of matrices",
        ),
    ],
)
def test_a_model_of_no_family_is_told_the_nearest(spelling: Any, text: str) -> None:
    with pytest.raises(RuleError) as caught:
        flm.presets.detect(tree_of(spelling), MESH)
    message = str(caught.value)
    assert message.startswith(
        "No preset matches this model. flm.presets.fsdp(model, mesh) works for any "
        "model. The nearest is flm.presets."
    )
    assert text in message


def test_layers_that_differ_are_all_looked_at() -> None:
    layers = {
        path.replace("/0/", f"/{n}/"): LLAMA[path] for path in LLAMA for n in range(9)
    }
    assert flm.presets.family_of(tree_of(layers)) == "llama"
    odd = layers | {"layers/8/mixer/kernel": ("f", "t")}
    with pytest.raises(RuleError, match="no rule for layers/8/mixer/kernel"):
        flm.presets.family_of(tree_of(odd))


def test_a_pipeline_of_two_families_is_of_none() -> None:
    tree = {
        family: tree_of(SPELLINGS[family, name])
        for family, name in (("unet", "diffusers"), ("dit", "sd3"))
    }
    with pytest.raises(RuleError, match="No preset matches"):
        flm.presets.detect(tree, MESH)


def test_optimizer_state_does_not_tell_a_family() -> None:
    """A TrainState has each path again, below `opt_state`."""
    params = tree_of(LLAMA)
    tree: Any = {"params": params, "opt_state": {"mu": params, "nu": params}}
    assert flm.presets.family_of(tree) == "llama"


@pytest.mark.parametrize("inside", ["", "model/"])
def test_a_checkpoint(tmp_path: Path, inside: str) -> None:
    """Of its parameters alone: the rest of a run is not a reason against a family."""
    params = {f"{inside}{path}": np.zeros(shape_of(LLAMA[path])) for path in LLAMA}
    flm.checkpoint.save(tmp_path / "run", nested(params | {"opt_state/count": 3}))
    assert flm.presets.family_of(tmp_path / "run") == "llama"
    with pytest.raises(RuleError, match="the path of a checkpoint"):
        flm.presets.detect({"kernel": struct(8, 8)}, MESH, step=3)
