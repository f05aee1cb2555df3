"""Detect the preset of a model: its rules cover every matrix."""

import logging
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from flax_layoutmap._core.errors import ResolveError, RuleError
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._resolve.resolve import resolve
from flax_layoutmap._rules.records import Shape, show_shape
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.paths import unescape
from flax_layoutmap.convert._compress import INDEX
from flax_layoutmap.presets._load import AXES, families, load, names

_LOG = logging.getLogger("flax_layoutmap")

# A head that is not the embedding, in each spelling; in layers, `output` is not a head.
_HEAD = (
    r"^(?!(.*[/.])?(layers?|blocks?|h)[/._])(.*[/.])?"
    r"(lm_head|output|unembed|logits_dense|reverse_embeddings)([/.]|$)"
)
# Fewer rules than these for the matrices of a model do not tell its family.
_LEAST_RULES = 4


def detect(
    model: Any,
    mesh: Any,
    *,
    variant: str | None = None,
    axes: Mapping[str, str] | None = None,
    step: int | str | None = None,
) -> LayoutMap:
    """Return the preset whose rules cover every matrix of a model.

    Its name and variant are logged (logger `flax_layoutmap`, level INFO).

    Args:
        model: anything that `flm.resolve` takes, or the path of a checkpoint; only
            paths and shapes are read.
        mesh: as for `flm.presets.load`.
        variant: as for `flm.presets.load`; None chooses `"untied"` if each embedding
            has a head beside it, `"whole_experts"` if the experts divide.
        axes: as for `flm.presets.load`.
        step: of a directory of steps, as for `flm.checkpoint.inspect`.

    Raises:
        RuleError: no preset covers the model; the nearest is named. Or `step` is given
            for a model.
        CheckpointError: there is no such checkpoint.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
        >>> kernel = {"kernel": jax.ShapeDtypeStruct((8, 8), "float32")}
        >>> model = {name: kernel for name in names}
        >>> layout_map = flm.presets.detect(model, "fsdp=2,tensor=4")
        >>> layout_map["down_proj/kernel"].axes
        (Ellipsis, 'tensor', 'fsdp')
    """
    parameters = _parameters(model, step)
    name = family_of(parameters)
    variant = variant or _variant_of(name, parameters, mesh, axes)
    _LOG.info("preset %s%s", name, f", variant {variant}" if variant else "")
    return load(name, mesh, variant=variant, axes=axes)


def family_of(model: Any, *, step: int | str | None = None) -> str:
    """Return the name of the preset that `detect` takes for a model.

    Of families with the same rules it is the first one: `"llama"` for Qwen 3, too. All
    arguments and errors are as for `detect`.
    """
    parameters = _parameters(model, step)
    mesh = DeviceMesh.abstract(dict.fromkeys(AXES, 1))
    fits = {name: _fit(name, parameters, mesh) for name in names()}
    best = max(fits, key=lambda name: (-len(fits[name][0]), fits[name][1]))
    problems, _ = fits[best]
    if not problems:
        return best
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    raise RuleError(
        "No preset matches this model. flm.presets.fsdp(model, mesh) works for any "
        f"model. The nearest is flm.presets.{best}(mesh): {problems[0]}{more}"
    )


def _fit(
    name: str, parameters: Any, mesh: DeviceMesh
) -> tuple[list[str], tuple[int, ...]]:
    """Why a preset does not fit a model; and how well it does, if several fit."""
    layout_map, sign = load(name, mesh), families()["signs"].get(name)
    try:
        resolution, problems = resolve(parameters, layout_map), []
    except ResolveError as error:  # the rules are for arrays of other ranks
        if error.resolution is None:
            raise
        resolution, problems = error.resolution, list(error.problems)
    unmatched, model_dims = set(resolution.unmatched), set[int]()
    matrices = [leaf for leaf in resolution if len(leaf.shape) > 1]
    for leaf in matrices:
        if leaf.path in unmatched:
            problems.append(f"no rule for {leaf.path} {show_shape(leaf.shape)}")
        dims = zip(leaf.shape, leaf.layout.dims(len(leaf.shape)), strict=True)
        model_dims |= {size for size, axes in dims if "fsdp" in axes}
    if sign is not None and not any(re.search(sign, leaf.path) for leaf in resolution):
        problems.append(f"no path matches {sign!r}")
    count = len({leaf.rule_number for leaf in matrices} - {None})
    if count < _LEAST_RULES:
        few = f"only {count} of the at least {_LEAST_RULES} kinds of matrices"
        problems.append(f"it has rules for {few} that tell a family")
    rules = {leaf.rule_number for leaf in resolution} - {None}
    # Of two orders of dims, that by which `fsdp` shards dims of one size, the model's.
    score = (sign is not None, len(rules), -len(model_dims), -len(layout_map))
    return problems, score


def _variant_of(
    name: str, parameters: Any, mesh: Any, axes: Mapping[str, str] | None
) -> str | None:
    """The variant for a model: none if it changes nothing, or if dims fall back."""
    variant = families()["variants"].get(name)
    if variant is None:
        return None
    plain = resolve(parameters, load(name, mesh, axes=axes))
    other = resolve(parameters, load(name, mesh, variant=variant, axes=axes))
    changed = [leaf for leaf in other if leaf.layout != plain[leaf.path].layout]
    fallen = {leaf.path for leaf in plain.fallbacks}
    if not changed or any(leaf.path not in fallen for leaf in other.fallbacks):
        return None
    heads = [leaf for leaf in plain if re.search(_HEAD, leaf.path)]
    return None if variant == "untied" and len(heads) < len(changed) else variant


def _parameters(model: Any, step: int | str | None) -> dict[str, Any]:
    """The shapes of a model's parameters; of those alike in many layers, a few."""
    if isinstance(model, str | os.PathLike):
        from flax_layoutmap import checkpoint

        leaves: Iterable[Any] = checkpoint.inspect(model, step=step).leaves
    elif step is None:
        leaves = resolve(model, RuleSet(strict=False))
    else:
        raise RuleError("step= is for the path of a checkpoint alone")
    tree: dict[str, Any] = {}
    kinds = set[tuple[str, Shape]]()
    for leaf in leaves:
        # Numbers below 4 may be part of a name (`wi_0`).
        name = INDEX.sub(lambda n: n[0] if int(n[0]) < 4 else "n", leaf.path)
        kind = name, tuple(leaf.shape)
        if leaf.role == "parameter" and kind not in kinds:
            kinds.add(kind)
            *parents, last = map(unescape, leaf.path.split("/"))
            node = tree
            for part in parents:
                node = node.setdefault(part, {})
            node[last] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return tree
