"""Logical axis rules of Flax and MaxText, on a model that names its axes."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from flax import linen

from flax_layoutmap._core.errors import (
    MeshError,
    RuleError,
    bullet_list,
    did_you_mean,
    warn,
)
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import resolve
from flax_layoutmap._rules.records import ResolvedLeaf, show_shape
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap.convert._shardings import rules_for


def from_logical(
    rules: Iterable[tuple[str, Any]],
    model: Any,
    mesh: Any = None,
    *,
    batch: Any = None,
) -> LayoutMap:
    """Make the rules that say by paths what logical axis rules say of a model.

    The model's own annotations are read as Flax reads them: for Linen, the first row of
    a name whose mesh axes are free; for NNX, the last row. Dims whose name no rule has
    are replicated, with a `LayoutWarning`; the rule `(name, None)` replicates them
    without one.

    Args:
        rules: (logical axis, mesh axis, axes or None) pairs.
        model: a model whose parameters name their logical axes: Linen variables with
            their boxes, an NNX module, or a function that makes one of them.
        mesh: the mesh of the rules; None takes that of `jax.set_mesh`.
        batch: as for `LayoutMap`.

    Raises:
        RuleError: a logical rule names an axis that the mesh does not have, or no rules
            by paths give these layouts.
        ResolveError: dims do not divide by their axes.
    """
    if mesh is None and jax.sharding.get_abstract_mesh().axis_names:
        mesh = jax.sharding.get_abstract_mesh()
    target = as_mesh(mesh)
    if target is None:
        raise MeshError("from_logical(rules, model, mesh) needs a mesh")
    rules = tuple(rules)
    for number, entry in enumerate(rules, start=1):
        _check_row(number, entry, target)
    with linen.logical_axis_rules(rules):
        resolution = resolve(model, RuleSet(mesh=target, strict=False))
    leaves = list(resolution)
    if not any(leaf.reason == "flax metadata" for leaf in leaves):
        raise RuleError(
            "no parameter of the model names its logical axes: pass the model with its "
            "annotations (Linen's boxes, NNX's out_sharding)"
        )
    _warn_of_unknown_names(resolution, target, [name for name, _ in rules])
    wanted = {leaf.path: leaf.layout for leaf in leaves}
    return rules_for(leaves, wanted, target, lambda made: resolve(model, made), batch)


def _check_row(number: int, entry: Any, mesh: DeviceMesh) -> None:
    """Raise RuleError for what is not a logical rule on a mesh."""
    try:
        name, row = entry
        axes = (row,) if isinstance(row, str) else tuple(row or ())
    except (TypeError, ValueError) as error:
        raise RuleError(
            f"logical rule {number} is not a (name, mesh axes) pair: {entry!r}"
        ) from error
    for axis in axes:
        if axis not in mesh.axis_names:
            raise RuleError(
                f"logical rule {number}, {name!r} → {row!r}: the mesh {str(mesh)!r} "
                f"has no axis {axis!r}{did_you_mean(axis, mesh.axis_names)}"
            )


def _warn_of_unknown_names(
    resolution: Resolution, mesh: DeviceMesh, ruled: Sequence[str]
) -> None:
    """Warn of names of axes in the model that no logical rule has."""
    unknown: dict[str, ResolvedLeaf] = {}
    for at, leaf in enumerate(resolution):
        if leaf.reason == "flax metadata":
            mark = resolution._flat.annotations[at]
            known = {*ruled, *(name for name, _ in mark.rules)}
            if mark.kind != "linen":  # Flax takes other names for axes of the mesh
                known |= set(mesh.axis_names)
            for name in {name for dim in mark.names or () for name in dim} - known:
                unknown.setdefault(name, leaf)
    if unknown:
        lines = [
            f"{name!r}, first of {leaf.path} {show_shape(leaf.shape)}"
            f"{did_you_mean(name, ruled)}"
            for name, leaf in sorted(unknown.items())
        ]
        warn(
            "no logical rule has these names of axes, so that their dims are "
            f"replicated; add a rule for each, such as ({min(unknown)!r}, None):\n"
            f"{bullet_list(lines)}"
        )
