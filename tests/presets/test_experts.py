"""Which dims are sharded over which axis, in families with experts."""

import importlib
import re
from typing import Any

import pytest
from shapes import all_axes, nested, struct

import flax_layoutmap as flm

MESH = "fsdp=2,expert=2,tensor=2"
F, T, E, BOTH = "fsdp", "tensor", "expert", ("fsdp", "expert")

# Family, spelling, what a path ends with (a pattern), and the axes of each dim.
LAYOUTS: list[tuple[str, str, str, tuple[Any, ...]]] = [
    ("mixtral", "hugging face", r".experts.\d+.w1.weight", (T, BOTH)),
    ("mixtral", "hugging face", r".experts.\d+.w3.weight", (T, BOTH)),
    ("mixtral", "hugging face", r".experts.\d+.w2.weight", (BOTH, T)),
    ("mixtral", "hugging face", ".gate.weight", (None, BOTH)),
    ("mixtral", "hugging face, fused", ".experts.gate_up_proj", (E, T, F)),
    ("mixtral", "hugging face, fused", ".experts.down_proj", (E, F, T)),
    ("mixtral", "easydel", "/experts/w1/kernel", (E, F, T)),
    ("mixtral", "easydel", "/experts/w2/kernel", (E, T, F)),
    ("mixtral", "easydel", "/gate/kernel", (BOTH, None)),
    ("mixtral", "easydel, stacked", "/gate/kernel", (None, BOTH, None)),
    ("mixtral", "flax, stacked", "/experts/down/kernel", (None, E, T, F)),
    ("qwen3_moe", "hugging face", r".experts.\d+.gate_proj.weight", (T, BOTH)),
    ("qwen3_moe", "hugging face", r".experts.\d+.down_proj.weight", (BOTH, T)),
    ("qwen3_moe", "hugging face, a dense layer", ".mlp.down_proj.weight", (BOTH, T)),
    ("qwen3_moe", "easydel, a dense layer", "/mlp/gate_proj/kernel", (BOTH, T)),
    ("qwen3_moe", "easydel, a dense layer", "/mlp/gate/kernel", (BOTH, None)),
    ("qwen3_moe", "tunix", "/mlp/gate_proj", (E, F, T)),
    ("qwen3_moe", "tunix", "/mlp/down_proj", (E, T, F)),
    ("qwen3_moe", "tunix", "/attn/q_norm/w", (None,)),
    ("deepseek_v3", "hugging face", ".q_a_proj.weight", (None, BOTH)),
    ("deepseek_v3", "hugging face", ".kv_a_proj_with_mqa.weight", (None, BOTH)),
    ("deepseek_v3", "hugging face", ".q_b_proj.weight", (T, BOTH)),
    ("deepseek_v3", "hugging face", ".kv_b_proj.weight", (T, BOTH)),
    ("deepseek_v3", "hugging face", ".shared_experts.up_proj.weight", (T, BOTH)),
    ("deepseek_v3", "hugging face, V2 Lite", ".q_proj.weight", (T, BOTH)),
    ("deepseek_v3", "hugging face, float8", ".kv_b_proj.weight_scale_inv", (T, BOTH)),
    (
        "deepseek_v3",
        "hugging face, float8",
        ".kv_a_proj_with_mqa.weight_scale_inv",
        (None, BOTH),
    ),
    ("deepseek_v3", "hugging face, float8", ".o_proj.weight_scale_inv", (BOTH, T)),
    ("deepseek_v3", "hugging face, float8", ".eh_proj.weight", (T, BOTH)),
    ("deepseek_v3", "hugging face, float8", ".shared_head.head.weight", (T, BOTH)),
    ("deepseek_v3", "easydel", "/q_b_proj/kernel", (BOTH, T)),
    ("deepseek_v3", "easydel", "/shared_experts/down_proj/kernel", (T, BOTH)),
    ("deepseek_v3", "flax", "/kv_b_proj/kernel", (BOTH, T, None)),
    ("deepseek_v3", "flax", "/o_proj/kernel", (T, None, BOTH)),
    ("deepseek_v3", "flax, stacked", "/q_b_proj/kernel", (None, BOTH, T, None)),
    ("gpt_oss", "hugging face", ".experts.gate_up_proj", (E, F, T)),
    ("gpt_oss", "hugging face", ".experts.gate_up_proj_bias", (E, T)),
    ("gpt_oss", "hugging face", ".experts.down_proj", (E, T, F)),
    ("gpt_oss", "hugging face", ".experts.down_proj_bias", (E, None)),
    ("gpt_oss", "hugging face", ".self_attn.q_proj.bias", (T,)),
    ("gpt_oss", "hugging face", ".self_attn.o_proj.bias", (None,)),
    ("gpt_oss", "hugging face", ".self_attn.sinks", (T,)),
    (
        "gpt_oss",
        "hugging face, MXFP4",
        ".experts.gate_up_proj_blocks",
        (E, (T, F), None, None),
    ),
    (
        "gpt_oss",
        "hugging face, MXFP4",
        ".experts.down_proj_scales",
        (E, (F, T), None),
    ),
    ("gpt_oss", "easydel", "/experts/up_proj/bias", (E, T)),
    ("gpt_oss", "easydel", "/experts/down_proj/bias", (E, None)),
    ("gpt_oss", "flax, stacked", "/experts/gate/bias", (None, E, T)),
    ("gpt_oss", "flax, stacked", "/attention/sinks", (None, T)),
]


@pytest.mark.parametrize(
    ("family", "spelling", "end", "axes"),
    LAYOUTS,
    ids=[f"{family}-{spelling}-{end}" for family, spelling, end, _ in LAYOUTS],
)
def test_layouts(family: str, spelling: str, end: str, axes: tuple[Any, ...]) -> None:
    shapes = importlib.import_module(f"presets.models.{family}").SPELLINGS[spelling]
    layout_map = flm.presets.load(family, flm.DeviceMesh.abstract(MESH))
    tree = nested({path: struct(*shape) for path, shape in shapes.items()})
    found = {
        dims
        for path, dims in all_axes(layout_map.resolve(tree)).items()
        if re.search(f"{end}$", path)
    }
    assert found == {axes}


def test_blocks_of_published_gpt_oss_are_sharded_over_all_axes() -> None:
    layout_map = flm.presets.load(
        "gpt_oss", flm.DeviceMesh.abstract("fsdp=4,expert=4,tensor=4")
    )
    stem = "model.layers.0.mlp.experts"
    blocks, scales = (32, 2880, 90, 16), (32, 2880, 90)
    resolution = layout_map.resolve(
        {
            f"{stem}.down_proj_blocks": struct(*blocks, dtype="uint8"),
            f"{stem}.down_proj_scales": struct(*scales, dtype="uint8"),
            f"{stem}.gate_up_proj_blocks": struct(32, 5760, 90, 16, dtype="uint8"),
        }
    )
    assert not resolution.fallbacks
    assert resolution.bytes_per_device * 64 == resolution.total_bytes


def test_a_scale_that_its_axis_would_cut_is_replicated_and_reported() -> None:
    layout_map = flm.presets.load("deepseek_v3", flm.DeviceMesh.abstract("fsdp=32"))
    path = "model.layers.0.self_attn.q_b_proj.weight_scale_inv"
    resolution = layout_map.resolve({path: struct(192, 12)})  # of (24576, 1536)
    assert all_axes(resolution)[path] == (None, None)
    assert path in str(resolution.fallbacks)
