"""Each preset on each spelling of its family: which mesh axes each dim is on."""

import re
from typing import Any

import pytest
from presets.spellings import SPELLINGS, Spelling, dims_on, stacked, tree_of
from shapes import axes_of, nested, struct

import flax_layoutmap as flm
from flax_layoutmap.errors import RuleError

CASES = {
    f"{family}-{name}": (family, table) for (family, name), table in SPELLINGS.items()
}
CASES |= {
    f"{family}-flax, stacked": (family, stacked(SPELLINGS[family, "flax"]))
    for family in ("llama", "mixtral", "gpt2")
}
MESHES = ("fsdp=4", "tensor=4", "data=2,fsdp=2,tensor=2", "fsdp=2,expert=2,tensor=2")
ALIASES = {
    "gemma1": ("gemma", "model_first"),
    "gpt2_transposed": ("gpt2", "transposed"),
    "mistral": ("llama", "untied"),
    "qwen2": ("llama", None),
    "qwen3": ("llama", None),
    "qwen3_moe": ("mixtral", None),
}
EMBEDDING = (
    r"(embed\w*|wte|shared)[/.](embeddings?|input_embedding|weight)$|^embedding$"
)

abstract = flm.DeviceMesh.abstract


def assert_lies(resolution: flm.Resolution, wanted: Spelling) -> None:
    """Each leaf has a rule, no dim falls back, and each is on the axes of the table."""
    assert not resolution.unmatched and not resolution.fallbacks
    assert {leaf.path for leaf in resolution} == wanted.keys()
    for leaf in resolution:
        dims = leaf.layout.dims(len(leaf.shape))
        assert dims == dims_on(resolution.mesh, wanted[leaf.path]), leaf.path


@pytest.mark.parametrize("name", CASES)
def test_each_dim_is_on_the_axes_of_its_meaning(name: str) -> None:
    family, spelling = CASES[name]
    for mesh in map(abstract, MESHES):
        resolution = flm.presets.load(family, mesh).resolve(tree_of(spelling))
        assert_lies(resolution, spelling)


@pytest.mark.parametrize("name", CASES)
def test_lint_finds_nothing(name: str) -> None:
    family, spelling = CASES[name]
    layout_map = flm.presets.load(family, abstract("fsdp=2,tensor=4"))
    assert not list(flm.lint(layout_map.resolve(tree_of(spelling))))


WITH_EXPERTS = [
    name
    for name, (_, spelling) in CASES.items()
    if any("e" in dims for dims in spelling.values())
]


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_whole_experts(name: str) -> None:
    """The variant: `expert` and `tensor` are both on the dim of the experts."""
    family, spelling = CASES[name]
    wanted = {
        path: tuple("et" if d == "e" else d.replace("t", "") or "-" for d in dims)
        if "e" in dims
        else dims
        for path, dims in spelling.items()
    }
    layout_map = flm.presets.load(family, abstract(MESHES[-1]), variant="whole_experts")
    assert_lies(layout_map.resolve(tree_of(spelling)), wanted)


@pytest.mark.parametrize(
    "name", [name for name in CASES if name.startswith(("llama", "t5"))]
)
def test_untied(name: str) -> None:
    """The variant: all axes of the embedding are on the model's dim."""
    family, spelling = CASES[name]
    wanted = {
        path: ("-", "tf") if re.search(EMBEDDING, path) and dims == ("t", "f") else dims
        for path, dims in spelling.items()
    }
    assert ("-", "tf") in wanted.values()
    layout_map = flm.presets.load(family, abstract(MESHES[-1]), variant="untied")
    assert_lies(layout_map.resolve(tree_of(spelling)), wanted)


def test_families_that_are_another_one() -> None:
    mesh = abstract("fsdp=2,tensor=4")
    assert {*ALIASES, *(family for family, _ in SPELLINGS)} == {*flm.presets.names()}
    for name, (family, variant) in ALIASES.items():
        layout_map = flm.presets.load(family, mesh, variant=variant)
        assert getattr(flm.presets, name)(mesh) == layout_map


@pytest.mark.parametrize(
    ("family", "path", "shape", "axes", "dim"),
    [
        # Fewer heads of keys than `tensor` has devices, and a single one.
        ("llama", "attn/k_proj/w", (64, 4, 16), ("fsdp", None, None), 1),
        ("gemma", "attn/kv_einsum/w", (2, 1, 64, 16), (None, None, "fsdp", None), 1),
        # Classes of ImageNet.
        ("vit", "classifier.weight", (21843, 64), (None, "fsdp"), 0),
        # Scales of blocks of a published size.
        ("deepseek_v3", "q_b_proj.weight_scale_inv", (192, 13), ("tensor", None), 1),
    ],
)
def test_a_dim_that_does_not_divide_is_replicated_and_explained(
    family: str, path: str, shape: tuple[int, ...], axes: Any, dim: int
) -> None:
    layout_map = flm.presets.load(family, abstract("fsdp=2,tensor=8"))
    resolution = layout_map.resolve(nested({path: struct(*shape)}))
    (leaf,) = resolution.fallbacks
    assert axes_of(leaf) == axes
    text = f"dim {dim} of size {shape[dim]} is not divisible by mesh axis "
    assert text in str(leaf.fallback) and text in resolution.explain(path)


def test_a_vocabulary_that_nothing_divides() -> None:
    """51,865 tokens of Whisper, and 50,257 of GPT-2."""
    for family, path in (("whisper", "embed_tokens.weight"), ("gpt2", "wte.weight")):
        layout_map = flm.presets.load(family, abstract("fsdp=2,tensor=4"))
        resolution = layout_map.resolve({f"model.{path}": struct(51865, 64)})
        assert not resolution.fallbacks and not list(flm.lint(resolution))
        assert {*resolution[f"model.{path}"].layout.axis_names} == {"fsdp", "tensor"}


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize(
    ("family", "path"),
    [("clip", "logit_scale"), ("siglip", "logit_bias"), ("siglip", "t")],
)
def test_scales_of_the_loss_are_replicated_without_complaint(
    family: str, path: str, shape: tuple[int, ...]
) -> None:
    layout_map = flm.presets.load(family, abstract("fsdp=2,tensor=4"))
    tree = {path: struct(*shape), "fc1": {"kernel": struct(64, 256)}}
    resolution = layout_map.resolve(tree, strict=True)
    assert resolution[path].layout.is_replicated
    assert not resolution.fallbacks and not list(flm.lint(resolution))


def test_a_rule_that_is_added_wins() -> None:
    layout_map = flm.presets.gpt2(abstract("fsdp=2,tensor=4"))
    layout_map["wte/embedding"] = ("tensor", "fsdp")  # rows padded to 50304
    leaf = layout_map.resolve({"wte": {"embedding": struct(512, 128)}})["wte/embedding"]
    assert axes_of(leaf) == ("tensor", "fsdp")


def test_the_residual_stream_is_what_layers_return() -> None:
    rules = flm.presets.llama(abstract("fsdp=8")).freeze()
    (pattern,) = (
        rule.pattern for rule in rules.activations if "layers|blocks" in rule.pattern
    )

    def matches(path: str) -> bool:
        return re.search(f"(?:{pattern})\\Z", path) is not None

    for path in ("layers/3", "layers", "layers/0/0", "h/11", "layer_0", "layers_7"):
        assert matches(path) and matches(f"language_model/decoder/{path}"), path
    # A feed-forward layer may be an `nnx.Sequential`, whose children are `layers`.
    for path in ("layers/0/mlp/layers/0", "layers/0/mlp", "mlp/layer_norm", "mesh/7"):
        assert not matches(path), path


def test_numbered_layers_of_a_decoder_are_not_stacked() -> None:
    """Paths close to those of MaxText's stacked layers."""
    layer = "decoder/layers/0/self_attention"
    shapes = {f"{layer}/query/kernel": (64, 128), f"{layer}/out/kernel": (128, 64)}
    shapes |= {"decoder/layers/self_attention/key/kernel": (2, 64, 128)}
    tree = nested({path: struct(*shape) for path, shape in shapes.items()})
    resolution = flm.presets.llama(abstract("fsdp=2,tensor=4")).resolve(tree)
    assert [axes_of(leaf) for leaf in resolution] == [
        ("tensor", "fsdp"),
        ("fsdp", "tensor"),
        (None, "fsdp", "tensor"),  # along dim 0, as by Linen
    ]


def test_axes_are_renamed() -> None:
    # A name that is given is not that of the axis called so.
    axes = {"fsdp": "data", "tensor": "model"}
    layout_map = flm.presets.llama(abstract("data=2,model=4"), axes=axes)
    assert layout_map.freeze().batch == ("data",)
    layout = layout_map["mlp/up/kernel"]
    assert layout is not None and layout.axes == (..., "data", "model")


@pytest.mark.parametrize(
    ("name", "mesh", "options", "text"),
    [
        ("lama", "fsdp=8", {}, "there is no preset 'lama'; did you mean 'llama'"),
        ("llama", "fsdp=8", {"variant": "untide"}, "did you mean 'untied'"),
        ("llama", "model=8", {}, "the axis 'model', .*axes={\"tensor\": 'model'}"),
        ("llama", "fsdp=8", {"axes": {"tensors": "fsdp"}}, "presets have no axis"),
        ("llama", "fsdp=8", {"axes": {"tensor": "x"}}, "no axis 'x' for 'tensor'"),
        (
            *("llama", "m=8", {"axes": {"tensor": "m", "data": "m"}}),
            "'m' is mapped to both 'tensor' and 'data'",
        ),
    ],
)
def test_a_wrong_name_is_named(name: str, mesh: str, options: Any, text: str) -> None:
    with pytest.raises(RuleError, match=text):
        flm.presets.load(name, abstract(mesh), **options)
