"""Layout metadata of NNX Variables and Linen boxes."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, cast

from flax import linen, nnx
from flax.core.meta import AxisMetadata, Partitioned
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
        # The Variable's own rules come first; the first rule for a name counts.
        renamed = dict(reversed((*mark.rules, *get_logical_axis_rules())))
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


def is_bound(box: Any) -> bool:
    """Whether a Variable is annotated by a sharding on a mesh, not by names.

    Flax reads those when a Variable is made, and fails on them later.
    """
    if not isinstance(box, nnx.Variable):
        return False
    value = metadata_of(box).get("out_sharding")
    return isinstance(getattr(value, "sharding", value), NamedSharding)


def mesh_of_box(box: Any) -> Any:
    """The mesh that a Variable or box was annotated with, or None."""
    if isinstance(box, nnx.Variable):
        return metadata_of(box).get("mesh")
    return getattr(box, "mesh", None)


def settled_names(
    mark: Mark, dims: Sequence[tuple[str, ...]], axes: Sequence[str]
) -> tuple[tuple[Any, ...], tuple[tuple[str, None], ...]]:
    """Axis names for the layout of a leaf, and rules for those that are no mesh axes.

    The name of a dim that stands for no mesh axis is kept, with a rule to that effect:
    `nnx.scan` looks for the name that it gave the dim of the layers.

    Args:
        mark: the annotation of the leaf.
        dims: the mesh axes of each dim.
        axes: all axes of the mesh.
    """
    try:
        were = mesh_axes(mark)[0]
    except RuleError:
        were = ()
    names: list[Any] = []
    for dim, own in enumerate(dims):
        name = own[0] if len(own) == 1 else own or None
        if name is None and dim < len(were) and not set(were[dim]) & set(axes):
            name = (mark.names or ())[dim][:1] or None
            name = None if name is None or name[0] in names else name[0]
        names.append(name)
    kept = {name for name in names if isinstance(name, str)} - set(axes)
    return tuple(names), tuple((name, None) for name in sorted(kept))


def reannotated(
    box: Any, names: tuple[Any, ...], rules: tuple[tuple[str, None], ...], mesh: Any
) -> Any:
    """A Variable, changed in place, or a new Linen box, with other names.

    Args:
        box: the Variable or box.
        names: one entry per dim.
        rules: which of the names are no mesh axes.
        mesh: the mesh that the names are on, or None to leave that to the context.
    """
    if isinstance(box, nnx.Variable):
        metadata = metadata_of(box)
        if metadata.get("out_sharding") is not None:
            box.set_metadata("out_sharding", names)
        if rules or metadata.get("sharding_rules"):
            box.set_metadata("sharding_rules", rules or None)
        if mesh is not None:
            box.set_metadata("mesh", mesh)
        return box
    kept = {name for name, _ in rules}
    axes: Any = tuple(None if name in kept else name for name in names)
    kind: Any = SettledBox if kept else Partitioned
    return kind(box.value, names=axes, mesh=mesh)


class SettledBox(Partitioned[Any]):
    """A Linen box that names mesh axes alone.

    `nn.scan` takes the dim of the layers from it, whatever name it gave that dim.
    """

    def add_axis(self, index: int, params: dict[Any, Any]) -> "SettledBox":
        """The box of stacked layers."""
        names: list[Any] = list(self.names)
        names += [None] * (index - len(names))
        names.insert(index, None)
        return self.replace(names=tuple(names))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "SettledBox":
        """The box of one layer."""
        names = list(self.names)
        del names[index]
        return self.replace(names=tuple(names))


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
