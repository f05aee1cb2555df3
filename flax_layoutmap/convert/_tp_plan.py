"""Tensor-parallel plans of Hugging Face's transformers: module → style."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from flax_layoutmap._core.errors import RuleError, did_you_mean
from flax_layoutmap._core.mesh import as_mesh
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._rules.matching import Rule

# Style → the dims that it shards, "t" over the tensor axis, "e" over the experts: of
# torch's weights (out, in), of Flax's kernels (in, out), of biases; None: replicated.
# transformers 5.24, distributed/tensor_parallel.py and expert_parallel.py; where a
# style changes activations alone, its parameters are replicated.
_LAYOUTS: dict[tuple[Any, Any, Any], str] = {
    ((..., "t", None), (None, "t", ...), ("t",)): (
        "colwise colwise_gather_output colwise_rep local_colwise packed_colwise"
    ),
    ((..., "t"), ("t", ...), None): (
        "rowwise rowwise_split_input rowwise_rep local_rowwise packed_rowwise "
        "local_packed_rowwise"
    ),
    (("t", None), ("t", None), None): "embedding_rowwise",
    ((None, "t"), (None, "t"), None): "embedding_colwise",
    (("e", ...), ("e", ...), ("e", ...)): "grouped_gemm",
    (None, None, None): (
        "sequence_parallel replicated_with_grad_allreduce mla_kv_a_proj all_reduce "
        "replicate local local_params gather ep_router moe_tp_experts "
        "moe_identity_expert ep_dispatch_experts"
    ),
}
_STYLES = {
    style: layouts for layouts, styles in _LAYOUTS.items() for style in styles.split()
}


def from_tp_plan(
    plan: Any,
    mesh: Any = None,
    *,
    axis: str = "tensor",
    expert_axis: str = "expert",
    batch: Any = None,
) -> LayoutMap:
    r"""Make a map of a tensor-parallel plan of `transformers`.

    A key is the name of a module or of a parameter, in which `*` is the number of a
    layer. The rules are for the weights by their names in `transformers` (`….weight`,
    (out, in)), and for the same modules in Flax (`…/kernel`, (in, out)). The name of a
    parameter itself wins over that of its module; what no key names is replicated.

    As in `transformers` ≥ 5.21, an embedding `embed_tokens` that the plan does not name
    is sharded over its vocabulary. In an expert-parallel plan, `grouped_gemm` shards
    experts.

    Args:
        plan: module → style; or a configuration, of which `base_model_tp_plan` is
            taken, and `base_model_ep_plan` where the mesh has the axis for experts.
        mesh: the mesh of the rules.
        axis: the mesh axis that tensors are sharded over.
        expert_axis: the mesh axis that experts are sharded over.
        batch: as for `LayoutMap`.

    Raises:
        RuleError: a style does not exist, or a key is not a name; it is named.

    Example:
        >>> import flax_layoutmap as flm
        >>> plan = {"layers.*.mlp.up_proj": "colwise",
        ...         "layers.*.mlp.down_proj": "rowwise"}
        >>> mesh = flm.DeviceMesh.abstract("tensor=8")
        >>> layout_map = flm.convert.from_tp_plan(plan, mesh)
        >>> layout_map["model.layers.3.mlp.up_proj.weight"].axes
        (Ellipsis, 'tensor', None)
        >>> layout_map["model/layers/3/mlp/down_proj/kernel"].axes
        ('tensor', Ellipsis)
    """
    target = as_mesh(mesh)
    has_experts = target is not None and expert_axis in target.axis_names
    entries = _entries(plan, has_experts)
    made: list[Rule] = []
    # The name of a parameter is longer than that of its module; a number tells more
    # than `*`.
    for key in sorted(entries, key=lambda key: (-key.count("."), key.count("*"))):
        style = entries[key]
        if not isinstance(style, str) or style not in _STYLES:
            raise RuleError(
                f"tp_plan: {key!r} has the style {style!r}, which is not known here"
                f"{did_you_mean(str(style), _STYLES)}; there are {', '.join(_STYLES)}"
            )
        made += _rules(key, _STYLES[style], {"t": axis, "e": expert_axis})
    return LayoutMap.from_rules(made, target, overlap="first", batch=batch)


def _entries(plan: Any, has_experts: bool) -> dict[str, Any]:
    """Key → style, of the plans that apply."""
    entries = dict(plan) if isinstance(plan, Mapping) else _merged(plan, has_experts)
    for key in entries:
        parts = key.split(".") if isinstance(key, str) else [""]
        if not all(part == "*" or (part and "*" not in part) for part in parts):
            raise RuleError(
                f"tp_plan: the key {key!r} is not the name of a module: parts are "
                "joined by '.', and '*' is a part by itself, the number of a layer"
            )
    if entries and not any(key.split(".")[-1] == "embed_tokens" for key in entries):
        entries["embed_tokens"] = "embedding_rowwise"
    return entries


def _merged(config: Any, has_experts: bool) -> dict[str, Any]:
    """The plan for tensors; where experts have an axis, with theirs instead."""
    tensors = getattr(config, "base_model_tp_plan", None) or {}
    experts = getattr(config, "base_model_ep_plan", None) if has_experts else None
    if not tensors and not experts:
        raise RuleError(
            f"tp_plan: {type(config).__name__} is not a mapping of module to style and "
            "has no base_model_tp_plan"
        )
    experts = experts or {}
    below = tuple(f"{key}." for key in experts)
    kept = {key: tensors[key] for key in tensors if not key.startswith(below)}
    return kept | experts


def _rules(
    key: str, style: tuple[Any, Any, Any], axes: Mapping[str, str]
) -> Iterator[Rule]:
    """The rules of an entry: for a parameter of this name, and for a module's."""

    def named(layout: Any) -> Any:
        return layout and tuple(axes.get(dim, dim) for dim in layout)

    parts = [r"\d+" if part == "*" else re.escape(part) for part in key.split(".")]
    name = f"(^|[./]){'[./]'.join(parts)}"
    weight, kernel, bias = map(named, style)
    if weight is not None:
        yield Rule(f"{name}[./]kernel$", kernel, optional=True)
        yield Rule(f"{name}[./]bias$", bias, optional=True)
    yield Rule(rf"{name}([./]\w+)?$", weight, rank="skip", optional=True)
    if bias is not None:
        yield Rule(f"{name}$", bias, rank="skip", optional=True)
