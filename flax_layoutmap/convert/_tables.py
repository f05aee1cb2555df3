"""Convert partition rules (EasyLM), Keras's maps and tensor-parallel plans."""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jax.sharding import PartitionSpec

from flax_layoutmap._core.errors import RuleError, did_you_mean
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._rules.matching import MatchMode, Rule
from flax_layoutmap._rules.rules import Unmatched

# A pattern without any of these characters is literal, and may be a whole path.
_SPECIAL = re.compile(r"[\\.^$*+?{}\[\]|()]")

# Names in Keras and KerasHub → equivalent names in Flax, Tunix and `presets`.
_FLAX_NAMES = {
    "embeddings": "embedding|input_embedding",
    "gamma": "scale",
    "beta": "bias",
    "moving_mean": "mean",
    "moving_variance": "var",
    "kernel": "w",
    "token_embedding": "embedder|embed",
    "transformer_layer": "layers",
    "decoder_block": "layers",
    "self_attention": "attention|attn",
    "attention": "attn",
    "query": "q_proj|q_einsum",
    "key": "k_proj",
    "value": "v_proj",
    "attention_output": "out|o_proj|attn_vec_einsum",
    "feedforward_gate_dense": "gate|gate_proj",
    "feedforward_intermediate_dense": "up|up_proj",
    "feedforward_output_dense": "down|down_proj",
    "ffw_gating": "gate|gate_proj",
    "ffw_gating_2": "up|up_proj",
    "ffw_linear": "down|down_proj",
}
_KERAS_NAME = re.compile(
    rf"(?<![A-Za-z0-9_\\])({'|'.join(_FLAX_NAMES)})(?![A-Za-z0-9_])"
)


def renamed(dims: Any, axes: Mapping[str, str]) -> Any:
    """The entries of a layout with axes renamed."""
    if isinstance(dims, str):
        return axes.get(dims, dims)
    if isinstance(dims, PartitionSpec | tuple | list):
        return tuple(renamed(dim, axes) for dim in dims)
    return dims


def from_partition_rules(
    rules: Iterable[tuple[str, Any]],
    mesh: Any = None,
    *,
    axes: Mapping[str, str] | None = None,
    unmatched: Unmatched = "error",
    batch: Any = None,
) -> LayoutMap:
    """Make a map from a list of partition rules.

    Patterns are searched in the path of a parameter, and the first that matches wins,
    as in EasyLM, EasyDeL, eformer and scalax. A `PartitionSpec` may have fewer entries
    than the parameter has dims. Optimizer state follows its parameters.

    Args:
        rules: (pattern, `PartitionSpec`) pairs; a spec may be a tuple or None.
        mesh: the mesh of the rules.
        axes: axis names in the rules → names on the mesh, `{"mp": "tensor"}`.
        unmatched: for parameters that no rule matches: `"error"`, as in EasyLM, or
            `"replicate"`.
        batch: as for `LayoutMap`.

    Example:
        >>> import flax_layoutmap as flm
        >>> from jax.sharding import PartitionSpec as P
        >>> table = [("attention/(wq|wk|wv)/kernel", P("fsdp", "mp")), (".*", P())]
        >>> mesh = flm.DeviceMesh.abstract("fsdp=4,tensor=2")
        >>> flm.convert.from_partition_rules(table, mesh, axes={"mp": "tensor"})
        LayoutMap(DeviceMesh('fsdp=4,tensor=2', abstract)) {
          'attention/(wq|wk|wv)/kernel': ('fsdp', 'tensor', ...),
          '.*': replicated,
        }
    """
    made: list[Rule] = []
    for number, entry in enumerate(rules, start=1):
        try:
            pattern, spec = entry
            dims = renamed(spec, axes or {})
            if isinstance(dims, tuple) and ... not in dims:
                dims = PartitionSpec(*dims)
            rule = Rule(pattern, dims)
            is_text = not _SPECIAL.search(pattern)
            if is_text and any(re.search(earlier.pattern, pattern) for earlier in made):
                # As a pattern, not a key: the earlier rule wins also for this path.
                rule = Rule(f"(?:{pattern})", dims)
        except (TypeError, ValueError) as error:
            raise RuleError(
                f"partition rule {number} is not a (pattern, PartitionSpec) pair, "
                f"{entry!r}: {error}"
            ) from error
        made.append(rule)
    return LayoutMap.from_rules(
        made, mesh, overlap="first", unmatched=unmatched, batch=batch
    )


def from_keras(
    layout_map: Any,
    mesh: Any = None,
    *,
    match: MatchMode | None = None,
    axes: Mapping[str, str] | None = None,
    batch: Any = None,
) -> LayoutMap:
    """Make a map from a `keras.distribution.LayoutMap`, such as KerasHub's.

    Paths of the Keras model get the same layouts, and so do paths of a Flax model that
    differ only in the usual names (`embeddings` is `embedding`, `transformer_layer.*`
    is `layers/3`, `query` is `q_proj` …).

    Args:
        layout_map: Keras's map, or a mapping of pattern to axes.
        mesh: the mesh of the rules; None takes the shape and axis names of Keras's.
        match: how patterns are matched; None is `"fullmatch"`, as in Keras ≥ 3.14, or
            `"search"` if an older Keras is loaded.
        axes: axis names in the map → names on the mesh.
        batch: as for `LayoutMap`.

    Example:
        >>> import flax_layoutmap as flm
        >>> keras = {"transformer_layer.*attention_output.kernel": ("model", ...)}
        >>> layout_map = flm.convert.from_keras(keras, "data=2,model=4")
        >>> layout_map["layers/3/attn/o_proj/w"].axes
        ('model', Ellipsis)
    """
    theirs = getattr(layout_map, "device_mesh", None)
    if mesh is None and theirs is not None:
        mesh = DeviceMesh.abstract(tuple(theirs.shape), tuple(theirs.axis_names))
    made = LayoutMap(mesh, match=match or _keras_match(), batch=batch)
    for key in layout_map:
        dims = getattr(layout_map[key], "axes", layout_map[key])
        # A literal key is also a path, which wins over all patterns.
        keys = [_for_flax(key)] if _SPECIAL.search(key) else [key, _for_flax(key)]
        try:
            made.update(dict.fromkeys(keys, renamed(dims, axes or {})))
        except RuleError as error:
            raise RuleError(f"Keras's key {key!r} → {dims!r}: {error}") from error
    return made


def _keras_match() -> MatchMode:
    """How the loaded Keras matches: whole paths, since 3.14."""
    version = str(getattr(sys.modules.get("keras"), "__version__", "3.14"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    return "fullmatch" if numbers >= (3, 14) else "search"


def _for_flax(key: str) -> str:
    """The pattern with Flax's names as alternatives to Keras's.

    A pattern with a character class, a named group or a look-behind is unchanged.
    """
    if "[" in key or "(?P" in key or "(?<" in key:
        return key
    return _KERAS_NAME.sub(lambda name: f"(?:{name[0]}|{_FLAX_NAMES[name[0]]})", key)


# Layouts of torch weights (out, in), Flax kernels (in, out) and biases → their styles.
# "t" is the tensor axis, "e" the expert axis, None replicated. From transformers 5.24,
# distributed/tensor_parallel.py and expert_parallel.py; styles that only change
# activations replicate their parameters.
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
# Names joined by "."; "*" as a whole name is the number of a layer.
_KEY = re.compile(r"(\*|[^.*]+)(\.(\*|[^.*]+))*")


def from_tp_plan(
    plan: Any,
    mesh: Any = None,
    *,
    axis: str = "tensor",
    expert_axis: str = "expert",
    batch: Any = None,
) -> LayoutMap:
    r"""Make a map from a tensor-parallel plan of `transformers`.

    A key is the name of a module or a parameter, in which `*` is the number of a layer.
    The rules match weights by their names in `transformers` (`….weight`, (out, in)) and
    the same modules in Flax (`…/kernel`, (in, out)). The name of a parameter wins over
    the name of its module; parameters that no key names are replicated.

    As in `transformers` ≥ 5.21, an embedding `embed_tokens` that the plan does not name
    is sharded over its vocabulary. In an expert-parallel plan, `grouped_gemm` shards
    experts.

    Args:
        plan: module → style; or a configuration, to use its `base_model_tp_plan`, and
            its `base_model_ep_plan` if the mesh has the expert axis.
        mesh: the mesh of the rules.
        axis: the mesh axis that tensors are sharded over.
        expert_axis: the mesh axis that experts are sharded over.
        batch: as for `LayoutMap`.

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
    # More specific keys first: parameters before modules, numbers before `*`.
    for key in sorted(entries, key=lambda key: (-key.count("."), key.count("*"))):
        layouts = renamed(_STYLES[str(entries[key])], {"t": axis, "e": expert_axis})
        made += _rules(key, *layouts)
    return LayoutMap.from_rules(made, target, overlap="first", batch=batch)


def _plan_of(config: Any, has_experts: bool) -> dict[str, Any]:
    """The tensor-parallel plan, with expert-parallel entries if `has_experts`."""
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
    """The rules of an entry, for a parameter or the parameters of a module."""
    parts = [r"\d+" if part == "*" else re.escape(part) for part in key.split(".")]
    name = f"(^|[./]){'[./]'.join(parts)}"
    if weight is not None:
        yield Rule(f"{name}[./]kernel$", kernel, optional=True)
        yield Rule(f"{name}[./]bias$", bias, optional=True)
    yield Rule(rf"{name}([./]\w+)?$", weight, rank="skip", optional=True)
    if bias is not None:
        yield Rule(f"{name}$", bias, rank="skip", optional=True)
