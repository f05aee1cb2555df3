"""Layout maps of Keras and KerasHub."""

import re
import sys
from collections.abc import Mapping
from typing import Any

from flax_layoutmap._core.errors import RuleError
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._rules.matching import Match
from flax_layoutmap.convert._partition_rules import SPECIAL

# Names of Keras and KerasHub → the names of the same in Flax, Tunix and `presets`.
_FLAX_NAMES = {
    "embeddings": ("embedding", "input_embedding"),
    "gamma": ("scale",),
    "beta": ("bias",),
    "moving_mean": ("mean",),
    "moving_variance": ("var",),
    "kernel": ("w",),
    "token_embedding": ("embedder", "embed"),
    "transformer_layer": ("layers",),
    "decoder_block": ("layers",),
    "self_attention": ("attention", "attn"),
    "attention": ("attn",),
    "query": ("q_proj", "q_einsum"),
    "key": ("k_proj",),
    "value": ("v_proj",),
    "attention_output": ("out", "o_proj", "attn_vec_einsum"),
    "feedforward_gate_dense": ("gate", "gate_proj"),
    "feedforward_intermediate_dense": ("up", "up_proj"),
    "feedforward_output_dense": ("down", "down_proj"),
    "ffw_gating": ("gate", "gate_proj"),
    "ffw_gating_2": ("up", "up_proj"),
    "ffw_linear": ("down", "down_proj"),
}
_WORD = re.compile(r"(?<![A-Za-z0-9_\\])[A-Za-z][A-Za-z0-9_]*(?![A-Za-z0-9_])")
# The first version that matches whole paths.
_FULLMATCH = (3, 14)


def from_keras(
    layout_map: Any,
    mesh: Any = None,
    *,
    match: Match | None = None,
    axes: Mapping[str, str] | None = None,
    batch: Any = None,
) -> LayoutMap:
    """Make a map of a `keras.distribution.LayoutMap`, such as one of KerasHub.

    It gives the same answers on the paths of the Keras model, and the same layouts on
    those of Flax where they differ by the usual names alone (`embeddings` is
    `embedding`, `gamma` is `scale`, `transformer_layer.*` is `layers/3`, `query` is
    `q_proj` …). What it does not match in a Flax model is reported, as always.

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
        >>> keras = {
        ...     "transformer_layer.*attention_output.kernel": ("model", None, "batch")}
        >>> mesh = flm.DeviceMesh.abstract("batch=2,model=4")
        >>> layout_map = flm.convert.from_keras(keras, mesh)
        >>> layout_map["transformer_layer_3/attention_output/kernel"].axes
        ('model', None, 'batch')
        >>> layout_map["layers/3/attn/o_proj/w"].axes
        ('model', None, 'batch')
    """
    keras_mesh = getattr(layout_map, "device_mesh", None)
    if mesh is None and keras_mesh is not None:
        mesh = DeviceMesh.abstract(
            tuple(keras_mesh.shape), tuple(keras_mesh.axis_names)
        )
    made = LayoutMap(mesh, match=match or _keras_match(), batch=batch)
    for key in layout_map:
        value = layout_map[key]
        dims = getattr(value, "axes", value)
        # A key without special characters is a path, too, and wins over all patterns.
        keys = [_for_flax(key)] if SPECIAL.search(key) else [key, _for_flax(key)]
        try:
            renamed = dims and tuple((axes or {}).get(dim, dim) for dim in dims)
            for pattern in dict.fromkeys(keys):
                made[pattern] = renamed
        except (RuleError, TypeError) as error:
            raise RuleError(f"Keras's key {key!r} → {dims!r}: {error}") from error
    return made


def _keras_match() -> Match:
    """How the Keras that is loaded matches; the newest where there is none."""
    version = str(getattr(sys.modules.get("keras"), "__version__", "3.14"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    return "fullmatch" if numbers >= _FULLMATCH else "search"


def _for_flax(key: str) -> str:
    """The pattern with Flax's names as alternatives of Keras's.

    One with a class of characters, a named group or a look-behind keeps its names.
    """
    if "[" in key or "(?P" in key or "(?<" in key:
        return key

    def named(word: re.Match[str]) -> str:
        names = _FLAX_NAMES.get(word[0])
        return word[0] if names is None else f"(?:{'|'.join((word[0], *names))})"

    return _WORD.sub(named, key)
