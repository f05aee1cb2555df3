"""Tables of pattern → axes: lists as EasyLM and EasyDeL have them, and Keras's maps."""

import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from jax.sharding import PartitionSpec

from flax_layoutmap._core.errors import RuleError
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._rules.matching import MatchMode, Rule
from flax_layoutmap._rules.rules import Unmatched

# A pattern with none of these characters is a text, and may be a whole path.
_SPECIAL = re.compile(r"[\\.^$*+?{}\[\]|()]")

# Names of Keras and KerasHub → the names of the same in Flax, Tunix and `presets`.
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
    """The entries of a layout with other names of axes."""
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
    """Make a map of a list of partition rules.

    A pattern is searched in the path of a parameter, and the first that matches wins,
    as in EasyLM, EasyDeL, eformer and scalax. A `PartitionSpec` may name fewer dims
    than a parameter has. Optimizer state follows its parameters.

    Args:
        rules: (pattern, `PartitionSpec`) pairs; a spec may be a tuple or None.
        mesh: the mesh of the rules.
        axes: the names of the table → those of the mesh, `{"mp": "tensor"}`.
        unmatched: for parameters that no rule matches: `"error"`, as in EasyLM, or
            `"replicate"`.
        batch: as for `LayoutMap`.

    Raises:
        RuleError: an entry is not a rule; it is named by its number.

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
                # The earlier rule wins, also over a key that is a whole path.
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
    """Make a map of a `keras.distribution.LayoutMap`, such as one of KerasHub.

    It gives the same answers on the paths of the Keras model, and the same layouts on
    those of Flax where they differ by the usual names alone (`embeddings` is
    `embedding`, `transformer_layer.*` is `layers/3`, `query` is `q_proj` …).

    Args:
        layout_map: Keras's map, or a mapping of pattern to axes.
        mesh: the mesh of the rules; None takes the shape and the names of Keras's.
        match: how patterns are matched: None is `"fullmatch"`, as Keras ≥ 3.14 does,
            or `"search"` where an older Keras is loaded.
        axes: the names of the map's axes → those of the mesh.
        batch: as for `LayoutMap`.

    Raises:
        RuleError: an entry is not a rule; it is named by its key.

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
        # A key without special characters is a path, too, and wins over all patterns.
        keys = [_for_flax(key)] if _SPECIAL.search(key) else [key, _for_flax(key)]
        try:
            made.update(dict.fromkeys(keys, renamed(dims, axes or {})))
        except RuleError as error:
            raise RuleError(f"Keras's key {key!r} → {dims!r}: {error}") from error
    return made


def _keras_match() -> MatchMode:
    """How the Keras that is loaded matches: whole paths, from 3.14 on."""
    version = str(getattr(sys.modules.get("keras"), "__version__", "3.14"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    return "fullmatch" if numbers >= (3, 14) else "search"


def _for_flax(key: str) -> str:
    """The pattern with Flax's names as alternatives of Keras's.

    One with a class of characters, a named group or a look-behind keeps its names.
    """
    if "[" in key or "(?P" in key or "(?<" in key:
        return key
    return _KERAS_NAME.sub(lambda name: f"(?:{name[0]}|{_FLAX_NAMES[name[0]]})", key)
