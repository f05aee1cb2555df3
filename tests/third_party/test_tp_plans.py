"""Tensor-parallel plans: rules shard models as `transformers` itself does."""

from collections.abc import Iterator
from typing import Any

import pytest
from shapes import struct

import flax_layoutmap as flm

torch: Any = pytest.importorskip("torch", reason="The package torch is not installed.")
hf: Any = pytest.importorskip(
    "transformers", reason="The package transformers is not installed."
)
tensor: Any = pytest.importorskip(
    "transformers.distributed.tensor_parallel",
    reason="The installed transformers is older than 5.20: it has no such module.",
)
expert: Any = pytest.importorskip(
    "transformers.distributed.expert_parallel",
    reason="The installed transformers is older than 5.20: it has no such module.",
)

SIZES = dict(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=8,
    pad_token_id=0,
)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=8)
LATENT = dict(
    n_routed_experts=4,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_rope_head_dim=4,
    qk_nope_head_dim=4,
    v_head_dim=8,
)
# Family → its sizes, and how many leaves of how many its plan shards.
FAMILIES: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "Llama": ({"attention_bias": True, "mlp_bias": True}, (26, 35)),
    "Qwen2": ({}, (22, 27)),
    "Qwen3": ({}, (16, 25)),
    "Mistral": ({}, (16, 21)),
    "Phi3": ({}, (10, 15)),
    "Qwen3Moe": (EXPERTS | {"num_experts": 4, "decoder_sparse_step": 1}, (14, 25)),
    "Mixtral": ({"num_local_experts": 4, "num_experts_per_tok": 2}, (14, 21)),
    "DeepseekV2": (EXPERTS | LATENT, (16, 30)),
    "DeepseekV3": (EXPERTS | LATENT, (10, 30)),
    "GptOss": ({"num_local_experts": 4, "num_experts_per_tok": 2}, (2, 37)),
}


@pytest.fixture(scope="module")
def meshes() -> Iterator[dict[str, Any]]:
    """Axis → a mesh of one process: placements do not depend on its size."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    make = torch.distributed.device_mesh.init_device_mesh
    yield {
        axis: make("cpu", (1,), mesh_dim_names=(axis,)) for axis in ("tensor", "expert")
    }
    torch.distributed.destroy_process_group()


def sharded_by_transformers(
    family: str, meshes: dict[str, Any], *, experts: bool = False
) -> Any:
    config = getattr(hf, f"{family}Config")(**SIZES, **FAMILIES[family][0])
    with torch.device("meta"):
        model = getattr(hf, f"{family}ForCausalLM")(config)
    asked = hf.distributed.DistributedConfig(tp_size=2, ep_size=2 if experts else 1)
    by_tensor, by_expert, _ = model._resolve_parallel_plans(asked)
    tensor.apply_tensor_parallelism(model, meshes["tensor"], by_tensor)
    return expert.apply_expert_parallelism(
        model, meshes["expert"], meshes["tensor"], by_expert
    )


def assert_same(model: Any, plan: Any, *, head: bool, axes: str) -> None:
    """Rules made of a plan give each parameter the layout that it has in torch."""
    parameters = dict(model.named_parameters())
    weights = {name: struct(*leaf.shape) for name, leaf in parameters.items()}
    layout_map = flm.convert.from_tp_plan(plan, flm.DeviceMesh.abstract(axes))
    for leaf in layout_map.resolve(weights):
        if head or not leaf.path.startswith("lm_head"):
            found = leaf.layout.dims(len(leaf.shape))
            assert found == dims_of(parameters[leaf.path]), leaf.path


def dims_of(parameter: Any) -> tuple[tuple[str, ...], ...]:
    """The axes of each dim of a parameter of torch."""
    dims: list[tuple[str, ...]] = [()] * parameter.ndim
    for place in getattr(parameter, "placements", ()):
        if hasattr(place, "dim"):
            dims[place.dim] = parameter.device_mesh.mesh_dim_names
    return tuple(dims)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_parameter_is_sharded_as_by_transformers(
    family: str, meshes: dict[str, Any]
) -> None:
    model = sharded_by_transformers(family, meshes)
    sharded = [any(dims_of(leaf)) for leaf in model.parameters()]
    assert (sum(sharded), len(sharded)) == FAMILIES[family][1]
    assert_same(model, model.tp_plan, head=True, axes="tensor=2")
    # A configuration has no plan for the head.
    assert_same(model, model.config, head=False, axes="tensor=2")


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral", "DeepseekV3", "GptOss"])
def test_experts_are_sharded_as_by_transformers(
    family: str, meshes: dict[str, Any]
) -> None:
    model = sharded_by_transformers(family, meshes, experts=True)
    assert any(("expert",) in dims_of(leaf) for leaf in model.parameters())
    assert_same(model, model.config, head=False, axes="tensor=2,expert=2")
