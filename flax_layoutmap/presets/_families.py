"""Presets: the rules of model families, from files, on the axes of a mesh."""

import dataclasses
import functools
import logging
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from flax_layoutmap._core.errors import MeshError, ResolveError, RuleError, did_you_mean
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._resolve.resolve import resolve
from flax_layoutmap._rules.files import read_rules
from flax_layoutmap._rules.matching import Rule
from flax_layoutmap._rules.records import Shape, show_shape
from flax_layoutmap._rules.rules import SECTIONS, RuleSet
from flax_layoutmap._tree.paths import unescape
from flax_layoutmap.convert._compress import INDEX

# Axes in the rule files → what is sharded over them.
AXES = {
    "data": "the batch",
    "fsdp": "the batch, and the parameters",
    "tensor": "heads, hidden units and the vocabulary",
    "expert": "experts, and the batch outside of them",
    "context": "positions in a sequence",
}
_KNOWN = "they are " + ", ".join(f"{axis} ({what})" for axis, what in AXES.items())
_FOLDER = Path(__file__).parent


@functools.cache
def families() -> dict[str, dict[str, Any]]:
    """The tables of `_families.toml`."""
    return tomllib.loads((_FOLDER / "_families.toml").read_text(encoding="utf-8"))


@functools.cache
def names() -> tuple[str, ...]:
    """Return the names of the families, sorted."""
    files = (path.stem for path in _FOLDER.glob("[a-z]*.toml"))
    return tuple(sorted([*(f for f in files if "." not in f), *families()["aliases"]]))


def load(
    name: str,
    mesh: Any,
    *,
    variant: str | None = None,
    axes: Mapping[str, str] | None = None,
) -> LayoutMap:
    """Return the rules of a model family on a mesh.

    An axis that the mesh does not have is left out of every layout, so `fsdp` alone
    gives FSDP, `tensor` alone Megatron's layouts, and both together both. A dim that
    does not divide is replicated and reported. Rules that are added later win.

    Args:
        name: one of `flm.presets.names()`.
        mesh: anything that `DeviceMesh` accepts, with axes among `data` and `fsdp` (the
            batch), `fsdp` (parameters), `tensor`, `expert` and `context`.
        variant: `"untied"` for Llama, Qwen and T5 models whose head is not their
            embedding; `"whole_experts"` for models whose experts divide by
            `expert` × `tensor`. `flm.presets.detect` chooses it for a model.
        axes: preset axes → their names on the mesh, `{"tensor": "model"}`.

    Example:
        >>> import flax_layoutmap as flm
        >>> mesh = flm.DeviceMesh.abstract("data=2,fsdp=4,tensor=8")
        >>> layout_map = flm.presets.load("llama", mesh)
        >>> layout_map["layers/0/mlp/up_proj/kernel"].axes
        (Ellipsis, 'fsdp', 'tensor')
    """
    if name not in names():
        raise RuleError(
            f"there is no preset {name!r}{did_you_mean(str(name), names())}; there are "
            f"{', '.join(names())}"
        )
    target = as_mesh(mesh)
    if target is None:
        raise MeshError(f'presets.load({name!r}, mesh) needs a mesh, such as "fsdp=8"')
    file, *variants = families()["aliases"].get(name, [name])
    table = _table(file, variant or next(iter(variants), None))
    return LayoutMap.from_rule_set(_on_mesh(table, target, _names_on(target, axes)))


@functools.cache
def _table(name: str, variant: str | None) -> RuleSet:
    """The rules of a family, without a mesh."""
    if variant is None:
        return read_rules(_FOLDER / f"{name}.toml")
    file = _FOLDER / f"{name}.{variant}.toml"
    if not file.exists():
        known = [path.stem.split(".")[1] for path in _FOLDER.glob(f"{name}.*.toml")]
        raise RuleError(
            f"the preset {name!r} has no variant {variant!r}"
            f"{did_you_mean(variant, known)}; it has {', '.join(known) or 'none'}"
        )
    return read_rules(file)


def _names_on(mesh: DeviceMesh, axes: Mapping[str, str] | None) -> dict[str, str]:
    """Preset axis → its name on the mesh, for the axes that the mesh has."""
    given, axis_of = dict(axes or {}), dict[str, str]()
    for axis, name in given.items():
        if axis not in AXES:
            raise RuleError(f"axes: presets have no axis {axis!r}; {_KNOWN}")
        if name not in mesh.axis_names:
            raise RuleError(
                f"axes: the mesh {str(mesh)!r} has no axis {name!r} for {axis!r}"
                f"{did_you_mean(name, mesh.axis_names)}"
            )
        if axis_of.setdefault(name, axis) != axis:
            raise RuleError(
                f"axes: {name!r} is mapped to both {axis_of[name]!r} and {axis!r}"
            )
    # A name that was given to another axis is not the default for this axis.
    renamed = {axis: axis for axis in AXES if axis not in axis_of} | given
    for name in mesh.axis_names:
        if name not in renamed.values():
            raise RuleError(
                f"the mesh {str(mesh)!r} has the axis {name!r}, which presets do not "
                f"know{did_you_mean(name, AXES)}; {_KNOWN}; name yours with "
                f'axes={{"tensor": {name!r}}}'
            )
    return {axis: name for axis, name in renamed.items() if name in mesh.axis_names}


def _on_mesh(rules: RuleSet, mesh: DeviceMesh, names: Mapping[str, str]) -> RuleSet:
    """Put rules on a mesh: axes are renamed, or left out if the mesh lacks them."""

    def renamed(dim: Any) -> Any:
        if dim is None or dim is ...:
            return dim
        axes = (dim,) if isinstance(dim, str) else dim
        return tuple(names[axis] for axis in axes if axis in names) or None

    def moved(rule: Rule) -> Rule:
        return rule.with_layout(TensorLayout([*map(renamed, rule.layout.axes)], mesh))

    sections = {name: tuple(map(moved, getattr(rules, name))) for name in SECTIONS}
    batch = tuple(names[axis] for axis in rules.batch if axis in names)
    return dataclasses.replace(rules, mesh=mesh, batch=batch, **sections)


_LOG = logging.getLogger("flax_layoutmap")

# A head separate from the embedding; inside layers, `output` is not a head.
_HEAD = (
    r"^(?!(.*[/.])?(layers?|blocks?|h)[/._])(.*[/.])?"
    r"(lm_head|output|unembed|logits_dense|reverse_embeddings)([/.]|$)"
)
# Fewer rules than this for a model's matrices do not identify its family.
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
            has a separate head, and `"whole_experts"` if the experts divide.
        axes: as for `flm.presets.load`.
        step: for a directory of steps, as for `flm.checkpoint.inspect`.

    Raises:
        RuleError: no preset covers the model (the message has the closest), or `step`
            was given for a model.
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
    """Return the name of the preset that `detect` chooses for a model.

    If families have the same rules, the first is returned: `"llama"` also for Qwen 3.
    Arguments and errors are the same as for `detect`.
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
    """Why a preset does not fit a model; and a score, to compare several that fit."""
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
    # The right order of dims has `fsdp` on dims of a single size, the model's.
    score = (sign is not None, len(rules), -len(model_dims), -len(layout_map))
    return problems, score


def _variant_of(
    name: str, parameters: Any, mesh: Any, axes: Mapping[str, str] | None
) -> str | None:
    """The variant for a model; None if it changes nothing, or if dims fall back."""
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
    """The shapes of a model's parameters, with only a few of many equal layers."""
    if isinstance(model, str | os.PathLike):
        from flax_layoutmap import checkpoint

        leaves: Iterable[Any] = checkpoint.inspect(model, step=step).leaves
    elif step is None:
        leaves = resolve(model, RuleSet(strict=False))
    else:
        raise RuleError("step= needs the path of a checkpoint as model")
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
