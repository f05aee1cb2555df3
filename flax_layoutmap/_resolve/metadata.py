"""Read the layout metadata of NNX Variables and Linen boxes."""

import dataclasses
from typing import Any, Literal, cast

from flax import linen, nnx
from flax.core.meta import AxisMetadata
from flax.core.spmd import get_logical_axis_rules
from flax.linen import spmd as linen_spmd
from jax.sharding import NamedSharding, PartitionSpec

from flax_layoutmap._core.errors import RuleError
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._tree.flax_internals import metadata_of

# One entry per dim: names of mesh axes, or of Flax's logical axes.
Names = tuple[tuple[str, ...], ...]
Kind = Literal["nnx", "linen", "mesh"]


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """The layout metadata of one Variable or box.

    Attributes:
        layout: the explicit layout, whose axes win over every rule, or None.
        problem: why the explicit layout is invalid, or None.
        names: Flax's axis names, or None.
        rules: the logical rules that it brings: (name, mesh axes) pairs.
        kind: how names become mesh axes: `"nnx"` (a rule renames them), `"linen"` (only
            a rule makes them mesh axes), `"mesh"` (they are mesh axes).
    """

    layout: TensorLayout | None = None
    problem: str | None = None
    names: Names | None = None
    rules: tuple[tuple[str, Any], ...] = ()
    kind: Kind = "mesh"


def mark_of(box: Any) -> Mark:
    """Read the mark of an NNX Variable or a Linen box."""
    if not isinstance(box, nnx.Variable):
        kind: Kind = "mesh" if isinstance(box, AxisMetadata) else "nnx"
        if isinstance(box, linen_spmd.LogicallyPartitioned):
            kind = "linen"
        return Mark(
            names=_names(getattr(box, "names", None)),
            rules=_rules(getattr(box, "rules", None)),
            kind=kind,
        )
    metadata = metadata_of(box)
    layout, problem = _explicit(metadata.get("layout"))
    names = metadata.get("out_sharding")
    if names is None:  # an empty tuple means replicated
        names = metadata.get("sharding_names")
    return Mark(
        layout=layout,
        problem=problem,
        names=_names(names),
        rules=_rules(metadata.get("sharding_rules")),
        kind="nnx",
    )


def mesh_axes(mark: Mark) -> tuple[Names, tuple[str, ...]]:
    """The mesh axes of a mark with names, after Flax's logical rules in context.

    Returns:
        The axes of each dim, and the logical names that no rule speaks of.

    Raises:
        RuleError: Linen cannot make mesh axes of the names.
    """
    names = mark.names or ()
    if mark.kind == "mesh":
        return names, ()
    if mark.kind == "nnx":
        # The last rule for a name counts, as in Flax; the Variable's own come last.
        renamed = dict((*get_logical_axis_rules(), *mark.rules))
        axes = [
            _entry(renamed.get(dim[0], dim) if len(dim) == 1 else dim) for dim in names
        ]
        return tuple(axes), ()
    rules = mark.rules or tuple(linen.get_logical_axis_rules())
    bare = [dim[0] if len(dim) == 1 else dim or None for dim in names]
    try:
        spec: Any = linen_spmd.logical_to_mesh_axes(cast(Any, bare), rules)
    except ValueError as error:
        raise RuleError(str(error)) from error
    known = {name for name, _ in rules}
    lost = [dim[0] for dim in names if len(dim) == 1 and dim[0] not in known]
    return tuple(_entry(entry) for entry in spec), tuple(lost)


def _explicit(value: Any) -> tuple[TensorLayout | None, str | None]:
    """The metadata `layout`; other things may go by that name too."""
    if not isinstance(
        value, TensorLayout | tuple | list | PartitionSpec | NamedSharding
    ):
        return None, None
    try:
        return TensorLayout(value), None
    except RuleError as error:
        return None, str(error)


def _names(value: Any) -> Names | None:
    value = getattr(value, "sharding", value)  # a jax.experimental Format has one
    value = getattr(value, "spec", value)
    if not isinstance(value, tuple | list | PartitionSpec):
        return None
    return tuple(_entry(entry) for entry in value)


def _entry(entry: Any) -> tuple[str, ...]:
    if isinstance(entry, str):
        return (entry,)
    # None, and UNCONSTRAINED, which leaves the choice to others.
    return tuple(entry) if isinstance(entry, tuple | list) else ()


def _rules(rules: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (name, tuple(axes) if isinstance(axes, list) else axes)
        for name, axes in rules or ()
    )
