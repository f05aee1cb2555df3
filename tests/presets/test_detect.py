"""presets.recognise and presets.detect on the dense families."""

import importlib
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from presets.test_dense import FAMILIES, HEAD, MESH, spellings, tree_of
from shapes import nested

import flax_layoutmap as flm


def spelled(family: str, name: str) -> dict[str, tuple[int, ...]]:
    return importlib.import_module(f"presets.models.{family}").SPELLINGS[name]


@pytest.mark.parametrize(("family", "shapes"), spellings(*FAMILIES))
def test_each_spelling_is_of_its_family(
    family: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    """Or of one whose rules give every leaf the same layout."""
    tree = tree_of(shapes)
    found = flm.presets.detect(tree, MESH).resolve(tree)
    has_variant = family in ("llama", "qwen2", "qwen3", "t5")
    is_untied = has_variant and any(re.search(HEAD, path) for path in shapes)
    variant = "untied" if is_untied else None
    wanted = flm.presets.load(family, MESH, variant=variant).resolve(tree)
    assert [leaf.layout for leaf in found] == [leaf.layout for leaf in wanted]


# The names of Llama tell neither Mistral nor Gemma 1 from it.
@pytest.mark.parametrize(
    ("family", "shapes"), spellings(*(name for name in FAMILIES if name != "mistral"))
)
def test_families_of_other_rules_do_not_fit(
    family: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    found = flm.presets.recognise(tree_of(shapes))
    assert found.agree
    if family in ("llama", "gemma") and "llama" in found.families:
        assert {*found.families} <= {"llama", "mistral"}
    else:
        assert found.families == (family,)
    assert set(found.rejected) == {*flm.presets.names()} - {*found.families}


@pytest.mark.parametrize(
    ("family", "spelling", "mesh", "variant", "why"),
    [
        (
            "llama",
            "tunix",
            "fsdp=2,tensor=4",
            "untied",
            "lm_head/w is a head of its own",
        ),
        ("llama", "tunix, tied", "fsdp=2,tensor=4", None, "no head but the embedding"),
        (
            "llama",
            "flax",
            "fsdp=16,tensor=8",
            None,
            "untied: embed/embedding: rule ",
        ),
        ("mixtral", "flax", "fsdp=2,tensor=4", "whole_experts", "no dim falls back"),
        ("mixtral", "flax", "fsdp=4", None, "is the same on this mesh"),
        (
            "mixtral",
            "flax",
            "expert=4,tensor=4",
            None,
            "dim 0 of size 8 does not divide by mesh axes 'expert' (4) × 'tensor' (4)",
        ),
    ],
)
def test_the_variant_is_chosen_by_the_model_and_the_reason_is_logged(
    family: str,
    spelling: str,
    mesh: str,
    variant: str | None,
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = flm.DeviceMesh.abstract(mesh)
    with caplog.at_level(logging.INFO, logger="flax_layoutmap"):
        found = flm.presets.detect(tree_of(spelled(family, spelling)), target)
    assert found == flm.presets.load(family, target, variant=variant)
    first, second = caplog.messages
    assert first.startswith(f"preset {family}")
    assert second.startswith(f"preset {family}: ") and why in second


def test_an_output_in_a_layer_is_no_head() -> None:
    shapes = spelled("llama", "flax")
    shapes = {
        path: shape for path, shape in shapes.items() if not re.search(HEAD, path)
    }
    shapes["layers/0/self_attn/output/kernel"] = (8, 8)
    tied = flm.presets.detect(tree_of(shapes), MESH)
    assert tied == flm.presets.load("llama", MESH)


def test_of_several_models_each_has_a_head_of_its_own() -> None:
    """One of each is refused: the layouts of an untied one cost the other much."""
    untied = {"params": tree_of(spelled("llama", "tunix"))}
    tied = {"params": tree_of(spelled("llama", "tunix, tied"))}
    alone = flm.presets.detect({"policy": untied}, MESH)
    assert alone == flm.presets.load("llama", MESH, variant="untied")
    with pytest.raises(flm.errors.RuleError, match="several families whose rules diff"):
        flm.presets.detect({"policy": untied, "reference": tied}, MESH)
    both = flm.presets.detect({"policy": tied, "reference": tied}, MESH)
    assert both == flm.presets.load("llama", MESH)


def test_what_was_recognised_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    tree = tree_of(spelled("llama", "tunix"))
    with caplog.at_level(logging.INFO, logger="flax_layoutmap"):
        flm.presets.detect(tree, MESH)
    assert caplog.messages == [
        "preset llama (the same rules as mistral): gated feed-forward layers, no "
        "biases, no norms of queries and keys",
        "preset llama: the variant untied: lm_head/w is a head of its own",
    ]


def test_a_variant_that_is_given_is_taken() -> None:
    tree = tree_of(spelled("llama", "tunix, tied"))
    found = flm.presets.detect(tree, MESH, variant="untied")
    assert found == flm.presets.load("llama", MESH, variant="untied")


def test_a_model_of_no_family() -> None:
    tree = tree_of({"encoder/conv/kernel": (3, 3, 8, 16), "head/kernel": (16, 8)})
    with pytest.raises(flm.errors.RuleError) as caught:
        flm.presets.detect(tree, MESH)
    message = str(caught.value)
    assert message.startswith(
        "the model is of no family that has a preset; for any model there is "
        "flm.presets.fsdp(model, mesh):\n"
    )
    for family in flm.presets.names():
        assert f"- {family}: no path matches " in message


def test_a_step_of_what_is_no_checkpoint() -> None:
    tree = tree_of(spelled("llama", "flax"))
    with pytest.raises(flm.errors.RuleError, match="the path of a checkpoint"):
        flm.presets.recognise(tree, step=3)
    with pytest.raises(flm.errors.RuleError, match="the path of a checkpoint"):
        flm.presets.detect(tree, MESH, item="params")


def test_a_layer_that_no_rule_is_for() -> None:
    tree = tree_of(
        spelled("llama", "flax") | {"layers/0/adapter/mixer/kernel": (64, 64)}
    )
    found = flm.presets.recognise(tree)
    assert not found.families
    assert (
        found.rejected["llama"] == "no rule for layers/0/adapter/mixer/kernel (64,64)"
    )
    assert "not llama: no rule for layers/0/adapter/mixer/kernel" in str(found)


def test_a_model_that_fits_several_families_with_other_rules() -> None:
    """Of as many hidden units as dims of the model, nothing says which is which."""
    shapes = {
        path: tuple(64 if dim == 96 else int(dim) for dim in shape)
        for path, shape in spelled("gemma", "gemma, 2").items()
    }
    tree = tree_of(shapes)
    with pytest.raises(flm.errors.RuleError) as caught:
        flm.presets.detect(tree, MESH)
    message = str(caught.value)
    assert message.startswith(
        "the paths fit several families whose rules differ; name one, such as "
        "flm.presets.gemma1(mesh):\n"
    )
    assert "- gemma: " in message and "- gemma1: gate and up are (2, model" in message


def test_sizes_tell_what_paths_do_not() -> None:
    transposed = flm.presets.recognise(tree_of(spelled("gpt2_transposed", "linen")))
    assert transposed.families == ("gpt2_transposed",)
    assert transposed.rejected["gpt2"] == (
        "dim -2 of 'c_attn[/.](kernel|weight)$' has size 384, dim -1 of "
        "'wpe[/.](embedding|weight)$' 128"
    )


def test_optimizer_state_is_no_feature_of_a_family() -> None:
    """A TrainState has each path again, below `opt_state`."""
    shapes = spelled("llama", "linen")
    tree: Any = {
        "params": tree_of(shapes),
        "opt_state": {"mu": tree_of(shapes), "nu": tree_of(shapes)},
    }
    assert flm.presets.recognise(tree).families == ("llama", "mistral")


@pytest.mark.parametrize("inside", ["", "model/"])
def test_a_checkpoint(tmp_path: Path, inside: str) -> None:
    """Of its parameters alone: the rest of a run is no reason against a family."""
    shapes = spelled("llama", "flax, stacked")
    params = {inside + path: np.zeros(shape) for path, shape in shapes.items()}
    flm.checkpoint.save(tmp_path / "run", nested(params | {"opt_state/count": 3}))
    assert flm.presets.recognise(tmp_path / "run").families[0] == "llama"
