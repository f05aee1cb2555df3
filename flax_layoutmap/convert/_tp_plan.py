"""Tensor-parallel plans of Hugging Face's transformers: module → style."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from flax_layoutmap._core.errors import RuleError, did_you_mean
from flax_layoutmap._core.mesh import as_mesh
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._rules.matching import Rule
from flax_layoutmap.convert._tables import renamed

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
_STYLES = {name: dims for dims, names in _LAYOUTS.items() for name in names.split()}
# Names that are joined by ".", and "*" by itself, the number of a layer.
_KEY = re.compile(r"(\*|[^.*]+)(\.(\*|[^.*]+))*")


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
        >>> plan = {"layers.*.mlp.down_proj": "rowwise"}
        >>> layout_map = flm.convert.from_tp_plan(plan, "tensor=8")
        >>> layout_map["model/layers/3/mlp/down_proj/kernel"].axes
        ('tensor', Ellipsis)
    """
    target = as_mesh(mesh)
    has_experts = target is not None and expert_axis in target.axis_names
    entries = dict(plan) if isinstance(plan, Mapping) else _plan_of(plan, has_experts)
    for key, style in entries.items():
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise RuleError(
                f"tp_plan: the key {key!r} is not the name of a module: parts are "
                "joined by '.', and '*' is a part by itself, the number of a layer"
            )
        if str(style) not in _STYLES:
            raise RuleError(
                f"tp_plan: {key!r} has the style {style!r}, which is not known here"
                f"{did_you_mean(str(style), _STYLES)}; there are {', '.join(_STYLES)}"
            )
    if entries and not any(key.split(".")[-1] == "embed_tokens" for key in entries):
        entries["embed_tokens"] = "embedding_rowwise"
    made: list[Rule] = []
    # The name of a parameter is longer than that of its module; a number tells more
    # than `*`.
    for key in sorted(entries, key=lambda key: (-key.count("."), key.count("*"))):
        layouts = renamed(_STYLES[str(entries[key])], {"t": axis, "e": expert_axis})
        made += _rules(key, *layouts)
    return LayoutMap.from_rules(made, target, overlap="first", batch=batch)


def _plan_of(config: Any, has_experts: bool) -> dict[str, Any]:
    """The plan for tensors; where experts have an axis, with theirs instead."""
    tensors = getattr(config, "base_model_tp_plan", None) or {}
    experts = (has_experts and getattr(config, "base_model_ep_plan", None)) or {}
    if not tensors and not experts:
        raise RuleError(
            f"tp_plan: {type(config).__name__} is not a mapping of module to style and "
            "has no base_model_tp_plan"
        )
    below = tuple(f"{key}." for key in experts)
    return {key: tensors[key] for key in tensors if not key.startswith(below)} | experts


def _rules(key: str, weight: Any, kernel: Any, bias: Any) -> Iterator[Rule]:
    """The rules of an entry: for a parameter of this name, and for a module's."""
    parts = [r"\d+" if part == "*" else re.escape(part) for part in key.split(".")]
    name = f"(^|[./]){'[./]'.join(parts)}"
    if weight is not None:
        yield Rule(f"{name}[./]kernel$", kernel, optional=True)
        yield Rule(f"{name}[./]bias$", bias, optional=True)
    yield Rule(rf"{name}([./]\w+)?$", weight, rank="skip", optional=True)
    if bias is not None:
        yield Rule(f"{name}$", bias, rank="skip", optional=True)
