"""Tensor-parallel plans of Hugging Face's transformers: module → style."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from flax_layoutmap._core.errors import RuleError, did_you_mean
from flax_layoutmap._core.mesh import as_mesh
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._resolve.resolve import resolve
from flax_layoutmap._rules.matching import Rule
from flax_layoutmap._rules.records import ResolvedLeaf, show_shape

# Style → the dims that it shards, "t" over the tensor axis, "e" over the experts: of
# torch's weights (out, in), of Flax's kernels (in, out), of biases; None: replicated.
# transformers 5.24, distributed/tensor_parallel.py and expert_parallel.py; where a
# style changes activations alone, its parameters are replicated.
_COLUMN = ((..., "t", None), (None, "t", ...), ("t",))
_ROW = ((..., "t"), ("t", ...), None)
_WHOLE = (None, None, None)
STYLES: dict[str, tuple[Any, Any, Any]] = {
    "colwise": _COLUMN,
    "colwise_gather_output": _COLUMN,
    "colwise_rep": _COLUMN,
    "local_colwise": _COLUMN,
    "packed_colwise": _COLUMN,
    "rowwise": _ROW,
    "rowwise_split_input": _ROW,
    "rowwise_rep": _ROW,
    "local_rowwise": _ROW,
    "packed_rowwise": _ROW,
    "local_packed_rowwise": _ROW,
    "embedding_rowwise": (("t", None), ("t", None), None),
    "embedding_colwise": ((None, "t"), (None, "t"), None),
    "grouped_gemm": (("e", ...), ("e", ...), ("e", ...)),
    "sequence_parallel": _WHOLE,
    "replicated_with_grad_allreduce": _WHOLE,
    "mla_kv_a_proj": _WHOLE,
    "all_reduce": _WHOLE,
    "replicate": _WHOLE,
    "local": _WHOLE,
    "local_params": _WHOLE,
    "gather": _WHOLE,
    "ep_router": _WHOLE,
    "moe_tp_experts": _WHOLE,
    "moe_identity_expert": _WHOLE,
    "ep_dispatch_experts": _WHOLE,
}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")


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
        RuleError: a style does not exist, or a key is no name; it is named.

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
    names = () if target is None else target.axis_names
    entries = _entries(plan, has_experts=expert_axis in names)
    _check_keys(entries)
    made: list[Rule] = []
    # The name of a parameter is longer than that of its module.
    for key in sorted(entries, key=lambda key: -key.count(".")):
        style = entries[key]
        if not isinstance(style, str) or style not in STYLES:
            raise RuleError(
                f"tp_plan: {key!r} has the style {style!r}, which is not known here"
                f"{did_you_mean(str(style), STYLES)}; there are {', '.join(STYLES)}"
            )
        made += _rules(key, STYLES[style], {"t": axis, "e": expert_axis})
    return LayoutMap.from_rules(made, target, overlap="first", batch=batch)


def _entries(plan: Any, *, has_experts: bool) -> dict[str, str]:
    """Key → style, of the plans that apply."""
    if isinstance(plan, Mapping):
        entries = dict(plan)
    else:
        found = getattr(plan, "base_model_tp_plan", None)
        experts = getattr(plan, "base_model_ep_plan", None) if has_experts else None
        if not found and not experts:
            raise RuleError(
                f"tp_plan: {type(plan).__name__} is no mapping of module to style and "
                "has no base_model_tp_plan"
            )
        below = tuple(f"{key}." for key in experts or ())
        entries = {
            key: style
            for key, style in (found or {}).items()
            if key not in (experts or ()) and not key.startswith(below or ("\0",))
        } | dict(experts or {})
    if entries and not any(
        str(key).split(".")[-1] == "embed_tokens" for key in entries
    ):
        entries["embed_tokens"] = "embedding_rowwise"
    return entries


def _check_keys(entries: Mapping[Any, str]) -> None:
    """Raise RuleError for a key that is no name, and for two that disagree."""
    for key in entries:
        parts = key.split(".") if isinstance(key, str) else [""]
        if not all(part == "*" or (part and "*" not in part) for part in parts):
            raise RuleError(
                f"tp_plan: the key {key!r} is no name of a module: parts are joined by "
                "'.', and '*' is a part by itself, the number of a layer"
            )
    for key, style in entries.items():
        general = _NUMBER.sub("*", key)
        if entries.get(general, style) != style:
            raise RuleError(
                f"tp_plan: {key!r} is {style!r} and {general!r} is "
                f"{entries[general]!r}, and both name the same module: keep one"
            )


def _rules(
    key: str, style: tuple[Any, Any, Any], axes: Mapping[str, str]
) -> Iterator[Rule]:
    """The rules of an entry: for a parameter of this name, and for a module's."""
    parts = [r"\d+" if part == "*" else re.escape(part) for part in key.split(".")]
    name = "[./]".join(parts)
    name = f"(^|[./]){name}"
    weight, kernel, bias = (_named(layout, axes) for layout in style)
    if weight is not None:
        yield Rule(f"{name}[./]kernel$", kernel, optional=True)
        yield Rule(f"{name}[./]bias$", bias, optional=True)
    yield Rule(rf"{name}([./]\w+)?$", weight, rank="skip", optional=True)
    if bias is not None:
        yield Rule(f"{name}$", bias, rank="skip", optional=True)


def _named(layout: Any, axes: Mapping[str, str]) -> Any:
    if layout is None:
        return None
    return tuple(axes[dim] if isinstance(dim, str) else dim for dim in layout)


def to_tp_plan(
    layout_map: Any, model: Any, *, axis: str = "tensor", expert_axis: str = "expert"
) -> dict[str, str]:
    """Return the tensor-parallel plan of `transformers` for the weights of a model.

    Args:
        layout_map: a `LayoutMap` or `RuleSet`.
        model: the weights by their names in `transformers`, (out, in): a dict of arrays
            or `jax.ShapeDtypeStruct`s.
        axis: the mesh axis that is tensor-parallel; layouts over other axes (FSDP) have
            no place in a plan and are left out.
        expert_axis: the mesh axis that experts are sharded over (`grouped_gemm`).

    Returns:
        Name of a module, or of a parameter that is no `weight` or `bias`, with `*` for
        numbers → style.

    Raises:
        RuleError: a leaf is sharded as no style does it, or layers differ; it is named.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> weight = jax.ShapeDtypeStruct((64, 16), "float32")
        >>> weights = {f"model.layers.{n}.mlp.up_proj.weight": weight for n in range(2)}
        >>> layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("tensor=8"))
        >>> layout_map["up_proj"] = ("tensor", None)
        >>> flm.convert.to_tp_plan(layout_map, weights)
        {'model.layers.*.mlp.up_proj': 'colwise'}
    """
    found: dict[str, tuple[str | None, ResolvedLeaf]] = {}
    leaves = list(resolve(model, layout_map))
    for leaf in leaves:
        name = leaf.path.replace("/", ".")
        module, _, last = name.rpartition(".")
        if last == "bias":
            continue
        key = _NUMBER.sub("*", module if last == "weight" else name)
        style = _style_of(leaf, key, axis, expert_axis)
        known, other = found.setdefault(key, (style, leaf))
        if known != style:
            raise RuleError(
                f"tp_plan: {leaf.path} is {style or 'replicated'} and {other.path} is "
                f"{known or 'replicated'}, but both are {key!r} in a plan"
            )
    plan = {key: style for key, (style, _) in found.items() if style is not None}
    for leaf in leaves:
        module, _, last = leaf.path.replace("/", ".").rpartition(".")
        if last == "bias":
            _check_bias(leaf, plan.get(_NUMBER.sub("*", module)), axis)
    return plan


def _style_of(leaf: ResolvedLeaf, key: str, axis: str, expert_axis: str) -> str | None:
    count, dims = len(leaf.shape), leaf.layout.dims(len(leaf.shape))
    own = [at for at, dim in enumerate(dims) if axis in dim]
    experts = [at for at, dim in enumerate(dims) if expert_axis in dim]
    name = key.rpartition(".")[2]
    is_embedding = name in ("embed_tokens", "wte", "embedding")
    if not own and not experts:
        # Without an entry, transformers would shard it.
        return "replicate" if name == "embed_tokens" else None
    if not own and experts == [0] and count >= 3:
        return "grouped_gemm"
    if not experts and count <= 3 and own == [max(count - 2, 0)]:
        return "embedding_rowwise" if is_embedding else "colwise"
    if not experts and count <= 3 and own == [count - 1]:
        return "embedding_colwise" if is_embedding else "rowwise"
    raise RuleError(
        f"tp_plan: {leaf.path} {show_shape(leaf.shape)} has {leaf.layout}, which no "
        f"style does: over {axis!r} colwise shards the last dim but one and rowwise "
        f"the last, over {expert_axis!r} grouped_gemm shards the first"
    )


def _check_bias(leaf: ResolvedLeaf, style: str | None, axis: str) -> None:
    is_sharded = axis in leaf.layout.axis_names
    if is_sharded != (style == "colwise"):
        has = "sharded" if is_sharded else "replicated"
        raise RuleError(
            f"tp_plan: {leaf.path} {show_shape(leaf.shape)} is {has}, but its weight "
            f"is {style or 'replicated'}: a bias is sharded where its weight is colwise"
        )
