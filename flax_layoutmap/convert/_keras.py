"""Layout maps of Keras and KerasHub."""

import re
import sys
from collections.abc import Mapping
from typing import Any

from flax_layoutmap._core.errors import RuleError
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._resolve.resolve import rule_set_of
from flax_layoutmap._rules.matching import Match
from flax_layoutmap.convert._partition_rules import (
    SPECIAL,
    hides_patterns,
    plain_dims,
    refuse_flags,
    refuse_optimizer_rules,
)

# Names of Keras and KerasHub → the names of the same in Flax, Tunix and `presets`.
FLAX_NAMES = {
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
        RuleError: an entry is no rule; it is named by its key.

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
    if mesh is None:
        own = getattr(layout_map, "device_mesh", None)
        if own is not None:
            mesh = DeviceMesh.abstract(tuple(own.shape), tuple(own.axis_names))
    made = LayoutMap(mesh, match=match or _keras_match(), batch=batch)
    names = axes or {}
    for key in layout_map:
        value = layout_map[key]
        dims = getattr(value, "axes", value)
        try:
            renamed = dims and tuple(names.get(dim, dim) for dim in dims)
            is_text = not SPECIAL.search(key)
            if is_text:  # wins over all patterns, as the path itself
                made[key] = renamed
            if not is_text or _for_flax(key) != key:
                made[_for_flax(key)] = renamed
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
    return _WORD.sub(
        lambda found: (
            f"(?:{'|'.join((found[0], *FLAX_NAMES[found[0]]))})"
            if found[0] in FLAX_NAMES
            else found[0]
        ),
        key,
    )


def to_keras(layout_map: Any) -> dict[str, tuple[str | None, ...]]:
    """Return the parameter rules as a mapping for `keras.distribution.LayoutMap`.

    Patterns match whole paths, as in Keras ≥ 3.14. Activation rules and named layouts
    are left out. The names of parameters stay as they are: Keras's own models have
    others (`embeddings`, `gamma`).

    Args:
        layout_map: a `LayoutMap` or `RuleSet`.

    Raises:
        RuleError: a rule cannot be said there: it is for optimizer state, uses `...`
            before other dims, several axes on a dim, `rank="skip"` or a memory kind; or
            rules may overlap (`overlap` is not `"error"`). For one model, shardings can
            be converted: `from_shardings(layout_map.abstract(model))`.

    Example:
        >>> import flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap()
        >>> layout_map["up/kernel"] = (None, "model")
        >>> flm.convert.to_keras(layout_map)
        {'.*(?:up/kernel).*': (None, 'model')}
    """
    rules = rule_set_of(layout_map, "to_keras(layout_map)")
    refuse_optimizer_rules(rules)
    if rules.overlap != "error":
        raise RuleError(
            f"Keras refuses several rules for one path, and this map has "
            f"overlap={rules.overlap!r}; for one model, convert its shardings: "
            "flm.convert.from_shardings(layout_map.abstract(model))"
        )
    # Activation rules and named layouts are not for parameters, and are left out.
    found: dict[str, tuple[str | None, ...]] = {}
    around = {
        "search": (".*(?:", ").*"),
        "match": ("(?:", ").*"),
        "fullmatch": ("", ""),
    }
    before, after = around[rules.match]
    for rule in rules.rules:
        dims = plain_dims(rule, rules, "Keras")
        if any(isinstance(dim, tuple) for dim in dims):
            raise RuleError(
                f"rule {rule.pattern!r} → {rule.layout} has several axes on a dim, "
                "which Keras has no layout for"
            )
        if before:
            refuse_flags(rule)
        if hides_patterns(rule, [other for other in rules.rules if other is not rule]):
            found[rule.pattern] = dims  # as an exact key it wins in Keras, too
        found[f"{before}{rule.pattern}{after}"] = dims
    return found
