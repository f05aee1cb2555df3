"""Presets of dense families: which axis each dim is on, in each spelling."""

import importlib
import re
from collections.abc import Mapping
from typing import Any

import pytest
from shapes import axes_of, nested, struct

import flax_layoutmap as flm

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma1")
FAMILIES += ("gpt2", "gpt2_transposed", "t5")
MESH = flm.DeviceMesh.abstract("fsdp=2,tensor=4")
# What `tests/presets/models` calls the dims.
AXES = {"d": "fsdp"} | dict.fromkeys(["V", "H", "K", "Hs", "Ks", "f", "ddd"], "tensor")

HEAD = r"(^|[/.])(lm_head|output|logits_dense|reverse_embeddings)([/.]|$)"


def tree_of(shapes: Mapping[str, tuple[int, ...]]) -> Any:
    return nested({path: struct(*shape) for path, shape in shapes.items()})


def spellings(*families: str) -> list[Any]:
    found = []
    for family in families:
        module = importlib.import_module(f"presets.models.{family}")
        for name, shapes in module.SPELLINGS.items():
            found.append(pytest.param(family, shapes, id=f"{family}-{name}"))
    return found


def expected(family: str, path: str, names: list[str]) -> tuple[Any, ...]:
    """The axes of a leaf, by the names of its dims."""
    real = [name for name in names if name != "L"]
    if real in (["d"], ["s"]) or any(name in ("P", "B", "one") for name in real):
        return (None,) * len(names)
    is_embedding = "V" in names and re.search(HEAD, path) is None
    if family == "mistral" and is_embedding:  # whose head is never the embedding
        return tuple({"d": ("tensor", "fsdp")}.get(name) for name in names)
    if "gpt2" in family and "V" in names:  # of 50257 rows
        return tuple({"d": ("fsdp", "tensor")}.get(name) for name in names)
    if real == ["d", "d"]:  # GPT-2's projection of the heads
        wanted = ("fsdp", "tensor") if "transposed" in family else ("tensor", "fsdp")
        return (None,) * (len(names) - 2) + wanted
    return tuple(AXES.get(name) for name in names)


@pytest.mark.parametrize(("family", "shapes"), spellings(*FAMILIES))
def test_each_dim_is_on_the_axis_of_its_meaning(
    family: str, shapes: dict[str, tuple[Any, ...]]
) -> None:
    resolution = flm.presets.load(family, MESH).resolve(tree_of(shapes))
    for leaf in resolution:
        path = leaf.path
        names = [dim.name for dim in shapes[path]]
        assert axes_of(leaf) == expected(family, path, names), path


def test_fewer_heads_of_keys_than_the_axis_has_devices() -> None:
    mesh = flm.DeviceMesh.abstract("fsdp=2,tensor=8")
    spelled = importlib.import_module("presets.models.llama").SPELLINGS
    tree = tree_of(spelled["tunix"])  # with 4 heads of keys
    resolution = flm.presets.load("llama", mesh).resolve(tree)
    assert sorted(leaf.path for leaf in resolution.fallbacks) == sorted(
        f"layers/{n}/attn/{name}_proj/w" for n in range(2) for name in "kv"
    )
    for leaf in resolution.fallbacks:
        assert axes_of(leaf) == ("fsdp", None, None)
        assert leaf.fallback == (
            "rule 6 '(^|/)(query|key|value|[qkv]_proj|w[qkv])/(kernel|w)$' → "
            "('fsdp', 'tensor', ...): dim 1 of size 4 does not divide by mesh axis "
            "'tensor' of size 8, so that dim is replicated"
        )
    assert axes_of(resolution["layers/0/attn/q_proj/w"]) == ("fsdp", "tensor", None)
    shown = resolution.explain("layers/0/attn/k_proj/w")
    assert "dim 1 of size 4 does not divide by mesh axis 'tensor' of size 8" in shown
    # With heads side by side the kernel divides.
    flat = tree_of(spelled["linen"])
    assert not flm.presets.load("llama", mesh).resolve(flat).fallbacks


@pytest.mark.parametrize("spelling", ["tunix", "gemma", "keras hub"])
def test_gemma_with_one_head_of_keys(spelling: str) -> None:
    module = importlib.import_module("presets.models.gemma")
    resolution = flm.presets.load("gemma", MESH).resolve(
        tree_of(module.ONE_KEY_HEAD[spelling])
    )
    fallen = {leaf.path: leaf for leaf in resolution.fallbacks}
    is_for_keys = ("kv_einsum", "/key/", "/value/")
    assert fallen.keys() == {
        leaf.path
        for leaf in resolution
        if any(name in leaf.path for name in is_for_keys)
    }
    for leaf in fallen.values():
        assert axes_of(leaf)[-3:] == (None, "fsdp", None)
        assert "of size 1 does not divide by mesh axis 'tensor'" in str(leaf.fallback)


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ("fsdp=8", ("fsdp", None)),
        ("data=2,tensor=4", (None, "tensor")),
        ("fsdp=2,expert=2,tensor=2", (("fsdp", "expert"), "tensor")),
        ("data=8", (None, None)),
    ],
)
def test_the_axes_of_the_mesh_decide(axes: str, expected: tuple[Any, ...]) -> None:
    shapes = importlib.import_module("presets.models.llama").SPELLINGS["flax"]
    mesh = flm.DeviceMesh.abstract(axes)
    resolution = flm.presets.load("llama", mesh).resolve(tree_of(shapes))
    assert axes_of(resolution["layers/0/mlp/up/kernel"]) == expected


def test_a_rule_of_ones_own_wins() -> None:
    layout_map = flm.presets.load("gpt2", MESH)
    layout_map["wte/embedding"] = ("tensor", "fsdp")  # rows padded to 50304
    shapes = importlib.import_module("presets.models.gpt2").SPELLINGS["flax"]
    shapes = shapes | {"wte/embedding": (512, 128)}
    leaf = layout_map.resolve(tree_of(shapes))["wte/embedding"]
    assert axes_of(leaf) == ("tensor", "fsdp")


@pytest.mark.parametrize(
    ("family", "shapes"), spellings("llama", "qwen2", "qwen3", "t5")
)
def test_a_head_of_its_own(family: str, shapes: dict[str, tuple[Any, ...]]) -> None:
    """The variant has the embedding by the model's dim, and is that of Mistral."""
    plain = flm.presets.load(family, MESH).resolve(tree_of(shapes))
    untied = flm.presets.load(family, MESH, variant="untied").resolve(tree_of(shapes))
    changed = {leaf for leaf in untied if leaf.layout != plain[leaf.path].layout}
    assert {leaf.path for leaf in changed} == {
        path
        for path, shape in shapes.items()
        if "V" in [dim.name for dim in shape] and re.search(HEAD, path) is None
    }
    assert {axes_of(leaf) for leaf in changed} == {(None, ("tensor", "fsdp"))}
    if family == "llama":
        mistral = flm.presets.load("mistral", MESH).resolve(tree_of(shapes))
        assert [leaf.layout for leaf in mistral] == [leaf.layout for leaf in untied]


@pytest.mark.parametrize("family", ["llama", "gemma", "t5"])
def test_which_outputs_are_the_residual_stream(family: str) -> None:
    rules = flm.presets.load(family, MESH).freeze()
    (pattern,) = (
        rule.pattern for rule in rules.activations if "layers|blocks" in rule.pattern
    )

    def matched(path: str) -> bool:
        return re.search(f"(?:{pattern})\\Z", path) is not None

    for path in ("layers/3", "layers", "layers/0/0", "h/11", "layer_0", "layers_7"):
        assert matched(path) and matched(f"model/{path}"), path
        assert matched(f"language_model/decoder/{path}"), path
    # A feed-forward layer may be an `nnx.Sequential`, whose children are `layers`.
    for path in ("layers/0/mlp/layers/0", "layers/0/mlp", "mlp/layer_norm", "mesh/7"):
        assert not matched(path), path


def test_a_variant_that_does_not_exist() -> None:
    with pytest.raises(flm.errors.RuleError, match=r"did you mean 'untied'\?"):
        flm.presets.load("llama", MESH, variant="untide")


def test_numbered_layers_of_a_decoder_are_not_stacked() -> None:
    """Paths close to those of MaxText's stacked layers."""
    layer = "decoder/layers/0/self_attention"
    shapes = {f"{layer}/query/kernel": (64, 128), f"{layer}/out/kernel": (128, 64)}
    shapes |= {"decoder/layers/self_attention/key/kernel": (2, 64, 128)}
    resolution = flm.presets.load("llama", MESH).resolve(tree_of(shapes))
    assert axes_of(resolution[f"{layer}/query/kernel"]) == ("fsdp", "tensor")
    assert axes_of(resolution[f"{layer}/out/kernel"]) == ("tensor", "fsdp")
    key = resolution["decoder/layers/self_attention/key/kernel"]
    assert axes_of(key) == (None, "fsdp", "tensor")  # along dim 0, as by Linen
