"""The leaves of a tree as columns, without the arrays; and metadata about layouts."""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import jax
from flax import linen, nnx
from flax.core.meta import AxisMetadata
from flax.core.spmd import get_logical_axis_rules
from flax.linen import spmd as linen_spmd
from jax.sharding import NamedSharding, PartitionSpec

from flax_layoutmap._core.errors import RuleError
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._rules.records import Shape
from flax_layoutmap._tree.flatten import plain_tree
from flax_layoutmap._tree.flax_internals import metadata_of
from flax_layoutmap._tree.paths import Flat, Section, parameter_keys

# For each dim of a leaf: which dim of its parameter or kernel it is, or None.
Dims = tuple[int | None, ...]
# The kernels that a LoRA matrix may belong to: position, and the dims that it has.
Kernels = Sequence[tuple[int, Dims]]
# One entry per dim: names of mesh axes, or of Flax's logical axes.
Names = tuple[tuple[str, ...], ...]
Kind = Literal["nnx", "linen", "mesh"]


class Origin(NamedTuple):
    """The parameter that a leaf of optimizer state was made from.

    Attributes:
        owner: key of the parameter (see `parameter_keys`), or None.
        dims: the dims of the parameter that the leaf has; None if unknown.
        why: why the parameter, or the dims, are unknown.
        others: other parameters that may equally be the owner.
    """

    owner: str | None
    dims: Dims | None
    why: str = ""
    others: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Leaves:
    """The leaves of a tree before rules are applied, as columns.

    Attributes:
        flat: their paths, and a `Mark` for each annotation.
        dtypes: None for a leaf that is not an array.
        others: position → leaf, for leaves that are not arrays.
        live: position → the current layout of an array of optimizer state.
        given: position → the layout of a parameter, which the rules do not change.
        state: the optimizer state alone, if its parameters were given separately: the
            parameters are then the first leaves, and not part of the tree itself.
        origins: position of a leaf of optimizer state → its parameter.
        adapters: position of a LoRA matrix → its kernels.
        plain: position → the path that a leaf had before LoRA was added.
    """

    flat: Flat
    shapes: Sequence[Shape]
    dtypes: Sequence[Any]
    treedef: Any
    others: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    live: Mapping[int, TensorLayout] = dataclasses.field(default_factory=dict)
    given: Mapping[int, TensorLayout] = dataclasses.field(default_factory=dict)
    state: Flat | None = None
    origins: Mapping[int, Origin] = dataclasses.field(default_factory=dict)
    adapters: Mapping[int, Kernels] = dataclasses.field(default_factory=dict)
    plain: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @property
    def start(self) -> int:
        """Position of the first leaf of the tree itself."""
        return 0 if self.state is None else len(self.shapes) - len(self.state.paths)

    @functools.cached_property
    def owners(self) -> Mapping[str, int]:
        """Key → position of each parameter."""
        return {key: at for at, key in parameter_keys(self.flat).items()}


def leaves_of(flat: Flat, tree: Any) -> Leaves:
    """Read the columns of a flattened tree."""
    shapes, dtypes, others = columns_of(flat.leaves)
    treedef = jax.tree.structure(plain_tree(tree) if flat.has_objects else tree)
    live = {
        at: TensorLayout(flat.leaves[at].sharding)
        for start, stop, _, role in flat.sections
        for at in (range(start, stop) if role == "optimizer" else ())
        if isinstance(getattr(flat.leaves[at], "sharding", None), NamedSharding)
    }
    marks = {at: mark_of(box) for at, box in flat.annotations.items()}
    bare = dataclasses.replace(flat, leaves=(), annotations=marks, nodes={})
    return Leaves(bare, shapes, dtypes, treedef, others, live)


def leaves_beside(params: Leaves, flat: Flat, tree: Any) -> Leaves:
    """The leaves of optimizer state, after those of its parameters."""
    start, paths = len(params.shapes), flat.full_paths()

    def joined(first: Mapping[int, Any], second: Mapping[int, Any]) -> dict[int, Any]:
        return {**first, **{at + start: entry for at, entry in second.items()}}

    def section(start: int) -> list[Section]:
        whole = Section(start, start + len(paths), "", "optimizer")
        return [whole] if paths else []

    state = leaves_of(dataclasses.replace(flat, paths=paths, sections=section(0)), tree)
    both = dataclasses.replace(
        params.flat,
        paths=[*params.flat.paths, *paths],
        sections=[*params.flat.sections, *section(start)],
        annotations=joined(params.flat.annotations, state.flat.annotations),
        fixed=params.flat.fixed | {at + start for at in flat.fixed},
        others=joined(params.flat.others, flat.others),
    )
    return dataclasses.replace(
        state,
        flat=both,
        shapes=[*params.shapes, *state.shapes],
        dtypes=[*params.dtypes, *state.dtypes],
        live=joined(params.live, state.live),
        state=state.flat,
    )


_SHAPE, _DTYPE = operator.attrgetter("shape"), operator.attrgetter("dtype")


def columns_of(leaves: Sequence[Any]) -> tuple[list[Shape], list[Any], dict[int, Any]]:
    """Shape and dtype of each leaf, and the leaves that are not arrays."""
    with contextlib.suppress(AttributeError):  # one is not an array
        columns = list(map(_SHAPE, leaves)), list(map(_DTYPE, leaves)), {}
        if set(map(type, columns[0])) <= {tuple}:
            return columns
    pairs = list(map(_shape_and_dtype, leaves))
    others = {at: leaves[at] for at, (_, dtype) in enumerate(pairs) if dtype is None}
    return [shape for shape, _ in pairs], [dtype for _, dtype in pairs], others


def _shape_and_dtype(leaf: Any) -> tuple[Shape, Any]:
    shape = getattr(leaf, "shape", None)
    if isinstance(shape, tuple) and hasattr(leaf, "dtype"):
        return shape, leaf.dtype
    is_number = isinstance(leaf, bool | int | float | complex)
    return (), jax.dtypes.result_type(leaf) if is_number else None


# ----------------------------------------------------------------------- metadata


class Mark(NamedTuple):
    """The layout metadata of one Variable or box.

    Attributes:
        layout: the explicit layout, which wins over every rule.
        problem: why the explicit layout is invalid.
        names: Flax's axis names.
        rules: the Variable's own logical rules: (name, mesh axes) pairs.
        kind: how names become mesh axes: `"nnx"` (a rule renames them), `"linen"` (only
            a rule makes them mesh axes), `"mesh"` (they are mesh axes).
    """

    layout: TensorLayout | None = None
    problem: str | None = None
    names: Names | None = None
    rules: tuple[tuple[str, Any], ...] = ()
    kind: Kind = "mesh"


def variable_metadata(box: Any) -> Any:
    """The metadata of a Variable, also in a box of `nnx.bridge`; None for others."""
    if isinstance(box, nnx.bridge.NNXMeta):
        return box.metadata
    return metadata_of(box) if isinstance(box, nnx.Variable) else None


def mark_of(box: Any, key: str = "out_sharding") -> Mark:
    """Read the mark of an NNX Variable (its metadata `key`) or a box.

    A `Mark` (from a checkpoint) is returned unchanged.
    """
    if isinstance(box, Mark):
        return box
    metadata = variable_metadata(box)
    if metadata is None:
        kind: Kind = "mesh" if isinstance(box, AxisMetadata) else "nnx"
        if isinstance(box, linen_spmd.LogicallyPartitioned):
            kind = "linen"
        names, rules = getattr(box, "names", None), getattr(box, "rules", None)
        return Mark(names=_names(names), rules=_rules(rules), kind=kind)
    layout, problem = _explicit(metadata.get("layout"))
    names = metadata.get(key)
    if names is None:  # an empty tuple means replicated
        names = metadata.get("sharding_names")
    rules = _rules(metadata.get("sharding_rules"))
    return Mark(layout, problem, _names(names), rules, "nnx")


def mesh_axes(mark: Mark) -> tuple[Names, tuple[str, ...]]:
    """The mesh axes of each dim after Flax's logical rules, and names without a rule.

    Raises:
        RuleError: Linen cannot map the names to mesh axes.
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
    """The layout, or its problem; None for metadata `layout` of another type."""
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
    # None, or UNCONSTRAINED, which leaves the choice to the compiler.
    return tuple(entry) if isinstance(entry, tuple | list) else ()


def _rules(rules: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (name, tuple(axes) if isinstance(axes, list) else axes)
        for name, axes in rules or ()
    )
