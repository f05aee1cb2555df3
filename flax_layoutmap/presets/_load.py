"""Load a preset: the rule file of a model family, on the axes that a mesh has."""

import dataclasses
import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flax_layoutmap._core.errors import MeshError, RuleError, did_you_mean
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._rules.matching import Rule
from flax_layoutmap._rules.rules import SECTIONS, RuleSet
from flax_layoutmap._rules.rules_file import read_rules

# The axes that the files name: what is sharded over each of them.
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
    does not divide is replicated and reported. A rule that is added later wins.

    Args:
        name: one of `flm.presets.names()`.
        mesh: anything that `DeviceMesh` accepts; its axes are among `data` and `fsdp`
            (the batch), `fsdp` (parameters), `tensor`, `expert` and `context`.
        variant: `"untied"`, of Llama, Qwen and T5 models whose head is not their
            embedding; or `"whole_experts"`, of families whose experts divide by
            `expert` × `tensor`. `flm.presets.detect` chooses by the model.
        axes: the mesh's own names for these, `{"tensor": "model"}`.

    Raises:
        RuleError: there is no such family or variant, or the mesh has other axes.

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
    """The rules without a mesh."""
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
    """Axis of a preset → its name on the mesh, for those that the mesh has."""
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
    # A name that is given for an axis is not that of another one by default.
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
    """Rules on a mesh: axes are renamed, and left out where the mesh has none."""

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
