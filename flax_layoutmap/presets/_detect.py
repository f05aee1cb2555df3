"""Recognise the family of a model by the paths of its parameters."""

import dataclasses
import functools
import logging
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from flax_layoutmap._core.errors import ResolveError, RuleError, bullet_list
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import resolve
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._tree.paths import unescape
from flax_layoutmap.presets._load import AXES, load

_LOG = logging.getLogger("flax_layoutmap")

# A head that is not the embedding, in each spelling; in layers, `output` is no head.
_HEAD = (
    r"^(?!(.*[/.])?(layers?|blocks?|h)[/._])(.*[/.])?"
    r"(lm_head|output|unembed|logits_dense|reverse_embeddings)([/.]|$)"
)
_EMBEDDING = r"embed|wte|shared"


@dataclasses.dataclass(frozen=True)
class Recognition:
    """Which families a model may be of, and why it is of no other.

    Attributes:
        families: the families that fit, the one with the most features first.
        features: family that fits → what it was recognised by.
        rejected: any other family → the first reason against it.
        agree: whether all that fit give every leaf the same layout.
    """

    families: tuple[str, ...]
    features: Mapping[str, str]
    rejected: Mapping[str, str]
    agree: bool

    def __str__(self) -> str:
        fitting = [f"{name}: {self.features[name]}" for name in self.families]
        others = [f"not {name}: {reason}" for name, reason in self.rejected.items()]
        differ = [] if self.agree else ["the rules of these families differ"]
        return "\n".join(fitting + differ + others)


def recognise(
    model: Any, *, step: int | str | None = None, item: str | None = None
) -> Recognition:
    """Find the families whose preset has a rule for each large leaf of a model.

    Args:
        model: anything that `flm.resolve` takes, or the path of a checkpoint; only
            paths and shapes are read.
        step: of a directory of steps, as for `flm.checkpoint.inspect`.
        item: of a checkpoint that holds several trees.

    Raises:
        RuleError: `step` or `item` is given for what is no path.
        CheckpointError: there is no such checkpoint.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
        >>> kernel = {"kernel": jax.ShapeDtypeStruct((8, 8), "float32")}
        >>> flm.presets.recognise({name: kernel for name in names}).families[0]
        'llama'
    """
    model = _tree_of(model, step, item)
    mesh = DeviceMesh.abstract(dict.fromkeys(AXES, 1))
    features, rejected = dict[str, str](), dict[str, str]()
    layouts: dict[str, tuple[Any, ...]] = {}
    for name, known in _families().items():
        try:
            resolution, problem = resolve(model, load(name, mesh)), None
        except ResolveError as error:  # the rules are for arrays of other ranks
            if error.resolution is None:
                raise
            resolution, problem = error.resolution, error.problems[0]
        reason = _against(known, resolution, problem)
        if reason is None:
            features[name] = known["about"]
            variant, _ = _variant(name, model, mesh, None)
            if variant is not None:
                resolution = resolve(model, load(name, mesh, variant=variant))
            layouts[name] = tuple(leaf.layout for leaf in resolution)
        else:
            rejected[name] = reason
    order = sorted(features, key=lambda name: -len(_families()[name]["has"]))
    agree = len(set(layouts.values())) <= 1
    return Recognition(tuple(order), features, rejected, agree)


def detect(
    model: Any,
    mesh: Any,
    *,
    variant: str | None = None,
    axes: Mapping[str, str] | None = None,
    step: int | str | None = None,
    item: str | None = None,
) -> LayoutMap:
    """Return the preset of the family that a model is of, in the variant that fits.

    The family, its features, and the variant with the reason for or against it are
    logged (logger `flax_layoutmap`, level INFO). `flm.presets.recognise(model)` returns
    the features, with the reason against each other family.

    Args:
        model: as for `recognise`.
        mesh: as for `flm.presets.load`.
        variant: as for `flm.presets.load`; None chooses. `"untied"` is chosen if the
            head has a path of its own, `"whole_experts"` if the experts divide. A model
            that has the weights of a head, but uses its embedding, is not recognised
            as tied: load its preset by name.
        axes: as for `flm.presets.load`.
        step: as for `recognise`.
        item: as for `recognise`.

    Raises:
        RuleError: the model is of no known family, or of several whose presets differ.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
        >>> kernel = {"kernel": jax.ShapeDtypeStruct((8, 8), "float32")}
        >>> model = {name: kernel for name in names}
        >>> layout_map = flm.presets.detect(model, "fsdp=2,tensor=4")
        >>> layout_map["down_proj/kernel"].axes
        (Ellipsis, 'tensor', 'fsdp')
    """
    model = _tree_of(model, step, item)
    found = recognise(model)
    if not found.families:
        reasons = [f"{name}: {reason}" for name, reason in found.rejected.items()]
        raise RuleError(
            "the model is of no family that has a preset; for any model there is "
            f"flm.presets.fsdp(model, mesh):\n{bullet_list(reasons)}"
        )
    if not found.agree:
        fitting = [f"{name}: {found.features[name]}" for name in found.families]
        raise RuleError(
            "the paths fit several families whose rules differ; name one, such as "
            f"flm.presets.{found.families[0]}(mesh):\n{bullet_list(fitting)}"
        )
    family, *others = found.families
    also = f" (the same rules as {', '.join(others)})" if others else ""
    _LOG.info("preset %s%s: %s", family, also, found.features[family])
    if variant is None:
        variant, why = _variant(family, model, mesh, axes)
        if why is not None:
            _LOG.info("preset %s: %s", family, why)
    return load(family, mesh, variant=variant, axes=axes)


def _variant(
    family: str, model: Any, mesh: Any, axes: Mapping[str, str] | None
) -> tuple[str | None, str | None]:
    """The variant of a family for a model, and the reason for or against one."""
    name = _families()[family].get("variant")
    if name is None:
        return None, None
    plain = resolve(model, load(family, mesh, axes=axes))
    why = "no dim falls back"
    if name == "untied":
        heads = [_first(_HEAD, paths) for paths in _members(plain)]
        if not heads or None in heads:
            return None, "no head but the embedding" + " in each model" * (
                len(heads) > 1
            )
        why = f"{heads[0]} is a head of its own"
    other = resolve(model, load(family, mesh, variant=name, axes=axes))
    known = {leaf.path for leaf in plain.fallbacks}
    for leaf in other.fallbacks:
        if leaf.path not in known:
            return None, f"not the variant {name}: {leaf.path}: {leaf.fallback}"
    if all(leaf.layout == plain[leaf.path].layout for leaf in other):
        return None, f"the variant {name} is the same on this mesh"
    return name, f"the variant {name}: {why}"


def _members(resolution: Resolution) -> list[list[str]]:
    """The paths of the parameters of each model in a tree that has an embedding."""
    flat = resolution._flat
    members = [
        [
            flat.paths[at]
            for at in range(section.start, section.stop)
            if resolution.leaf(at).role == "parameter"
        ]
        for section in flat.sections
    ]
    return [paths for paths in members if _first(_EMBEDDING, paths)]


def _tree_of(model: Any, step: int | str | None, item: str | None) -> Any:
    """The model; for a checkpoint its parameters, of which only metadata is read."""
    if not isinstance(model, str | os.PathLike):
        if step is not None or item is not None:
            raise RuleError(
                "step= and item= are for the path of a checkpoint; leave them out"
            )
        return model
    from flax_layoutmap import checkpoint

    tree: dict[str, Any] = {}
    for leaf in checkpoint.inspect(model, step=step, item=item).leaves:
        if leaf.role == "parameter":
            *above, last = map(unescape, leaf.path.split("/"))
            node = tree
            for part in above:
                node = node.setdefault(part, {})
            node[last] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return tree


@functools.cache
def _families() -> dict[str, dict[str, Any]]:
    path = Path(__file__).parent / "_families.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _against(
    known: Mapping[str, Any], resolution: Resolution, problem: str | None
) -> str | None:
    """The first reason why a model is not of a family; None if it is.

    `problem` is that of a leaf which does not fit the rule that matches it.
    """
    paths = [leaf.path for leaf in resolution if leaf.role == "parameter"]
    for pattern in known["has"]:
        if _first(pattern, paths) is None:
            return f"no path matches {pattern!r}"
    for pattern in known.get("lacks", ()):
        path = _first(pattern, paths)
        if path is not None:
            return f"{path} matches {pattern!r}"
    for one, dim, other, other_dim in known.get("equal", ()):
        sizes = _size(one, dim, resolution), _size(other, other_dim, resolution)
        if None not in sizes and sizes[0] != sizes[1]:
            return (
                f"dim {dim} of {one!r} has size {sizes[0]}, dim {other_dim} of "
                f"{other!r} {sizes[1]}"
            )
    if problem is not None:
        return problem
    unmatched = set(resolution.unmatched)
    for leaf in resolution:
        if leaf.path in unmatched and len(leaf.shape) > 1:
            return f"no rule for {leaf.path} {show_shape(leaf.shape)}"
    return None


def _size(pattern: str, dim: int, resolution: Resolution) -> int | None:
    """The size of a dim of the first matching leaf of two dims or more."""
    for leaf in resolution:
        if len(leaf.shape) >= 2 and re.search(pattern, leaf.path):
            return leaf.shape[dim]
    return None


def _first(pattern: str, paths: Sequence[str]) -> str | None:
    return next((path for path in paths if re.search(pattern, path)), None)
