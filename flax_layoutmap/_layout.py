"""TensorLayout: how the dims of one array lie on the axes of a mesh."""

import math
from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_layoutmap._errors import LayoutError, MeshError, RuleError, did_you_mean
from flax_layoutmap._mesh import DeviceMesh, as_mesh, same_grid

# One dim: not sharded, on one axis (or MATCH), on several axes, or (once) any number
# of dims.
Dim = None | str | tuple[str, ...] | EllipsisType

# DTensor's words for a dim that no axis shards, and for one that stays as it is.
UNSHARDED = "unsharded"
MATCH = "match"


class TensorLayout:
    """How the dims of an array lie on the axes of a mesh.

    Keras's `TensorLayout(axes, device_mesh)`, immutable and hashable, with two
    additions: one dim may lie on several axes, `(("data", "model"), None)`, and one
    `...` stands for any number of dims that are not sharded, `(..., None, "model")`.

    Args:
        axes: per dim `None` (not sharded), the name of a mesh axis, or a tuple of
            names; at most one `...`. `None` and `()` mean replicated, at any rank.
            A `PartitionSpec` keeps JAX's meaning: missing trailing dims are not
            sharded. A `NamedSharding` brings its mesh and memory kind. DTensor's two
            words are understood, unless the mesh has an axis of that very name:
            `TensorLayout.UNSHARDED` is None, and `TensorLayout.MATCH` keeps what the
            dim of an array has (for `relayout` and `distribute_tensor` only).
        device_mesh: the mesh; anything that `DeviceMesh` accepts; None to let a
            `LayoutMap` or a scope give it later.
        memory_kind: memory of the device, such as `"pinned_host"`; None: the default.

    Raises:
        RuleError: `axes` is not such a description, or names an axis that the mesh
            does not have, or one axis twice.

    Example:
        >>> import flax_layoutmap as flm
        >>> layout = flm.TensorLayout((None, "model"))
        >>> tuple(layout.spec())
        (None, 'model')
    """

    __module__ = "flax_layoutmap"
    __slots__ = ("axes", "device_mesh", "memory_kind", "_hash")
    UNSHARDED = UNSHARDED
    MATCH = MATCH
    axes: tuple[Dim, ...]
    device_mesh: DeviceMesh | None
    memory_kind: str | None

    def __init__(
        self,
        axes: Any,
        device_mesh: Any = None,
        *,
        memory_kind: str | None = None,
    ) -> None:
        mesh = as_mesh(device_mesh)
        if isinstance(axes, TensorLayout):
            mesh = mesh or axes.device_mesh
            memory_kind = memory_kind or axes.memory_kind
            dims = axes.axes
        elif isinstance(axes, NamedSharding):
            mesh = mesh or DeviceMesh(axes.mesh)
            memory_kind = memory_kind or _own_memory_kind(axes)
            dims = _dims(_spec_entries(axes.spec), axes, mesh)
        elif isinstance(axes, PartitionSpec):
            dims = _dims(_spec_entries(axes), axes, mesh)
        elif axes is None:
            dims = (...,)
        elif isinstance(axes, tuple | list):
            dims = _dims(tuple(axes), axes, mesh) or (...,)
        else:
            raise RuleError(_not_a_layout(axes))
        put = object.__setattr__
        put(self, "axes", _normal(dims))
        put(self, "device_mesh", mesh)
        put(self, "memory_kind", memory_kind)
        put(self, "_hash", hash((self.axes, mesh, memory_kind)))
        self._check_axes()

    def _check_axes(self) -> None:
        names = self.axis_names
        for position, name in enumerate(names):
            if name in names[:position]:
                raise RuleError(
                    f"the layout {self} uses the mesh axis {name!r} twice; each axis "
                    "may shard one dim only"
                )
            mesh = self.device_mesh
            if mesh is not None and name not in mesh.axis_names:
                raise RuleError(
                    f"the layout {self} names the axis {name!r}, but the mesh "
                    f"{str(mesh)!r} has no such axis"
                    f"{did_you_mean(name, mesh.axis_names)}"
                )

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The mesh axes in use, in the order of the dims."""
        match = self.has_match
        names: list[str] = []
        for dim in self.axes:
            if not (match and dim == MATCH):
                names.extend(dim_axes(dim))
        return tuple(names)

    @property
    def is_replicated(self) -> bool:
        """Whether no dim lies on a mesh axis (nor may lie on one, with MATCH)."""
        return not self.axis_names and not self.has_match

    @property
    def has_match(self) -> bool:
        """Whether a dim is `MATCH`, so that only an array can complete the layout."""
        mesh = self.device_mesh
        return MATCH in self.axes and (mesh is None or MATCH not in mesh.axis_names)

    @property
    def rank(self) -> int | None:
        """Number of dims, or None where a `...` leaves it open."""
        return None if ... in self.axes else len(self.axes)

    def on(self, device_mesh: Any) -> "TensorLayout":
        """The same axes on another mesh.

        Raises:
            RuleError: the mesh lacks an axis.
        """
        bare = TensorLayout(None, device_mesh).device_mesh
        if bare == self.device_mesh:
            return self
        dims = () if self.axes == (...,) else self.axes
        return TensorLayout(dims, bare, memory_kind=self.memory_kind)

    def matched(self, dims: Sequence[Sequence[str]]) -> "TensorLayout":
        """The layout with every `MATCH` replaced by what an array has there.

        Args:
            dims: per dim of the array, the names of the axes it lies on.

        Raises:
            LayoutError: the layout has another rank, or gives an axis that a kept dim
                lies on to another dim, or its mesh lacks that axis.
        """
        if not self.has_match:
            return self
        axes = self._written_out(len(dims))
        kept = [
            tuple(old) if dim == MATCH else dim
            for dim, old in zip(axes, dims, strict=True)
        ]
        try:
            return TensorLayout(kept, self.device_mesh, memory_kind=self.memory_kind)
        except RuleError as error:
            raise LayoutError(
                f"the layout {self} cannot keep the dims of an array on "
                f"{tuple(map(tuple, dims))}: {error}"
            ) from error

    def dims(self, ndim: int) -> tuple[tuple[str, ...], ...]:
        """Writes the layout out for `ndim` dims: per dim, the axes it lies on.

        Raises:
            LayoutError: the layout has another rank, or holds `MATCH`.
        """
        self._check_complete()
        return tuple(dim_axes(dim) for dim in self._written_out(ndim))

    def _check_complete(self) -> None:
        if self.has_match:
            raise LayoutError(
                f"the layout {self} keeps what a dim has (MATCH), which only relayout "
                "and distribute_tensor of a concrete array know; name the axes, or "
                "None, here"
            )

    def _written_out(self, ndim: int) -> tuple[Dim, ...]:
        """The axes without the `...`, for this many dims."""
        axes = self.axes
        if ... in axes:
            at, missing = axes.index(...), ndim - len(axes) + 1
            if missing < 0:
                raise LayoutError(
                    f"the layout {self} has {len(axes) - 1} dims, the array has {ndim}"
                )
            return (*axes[:at], *(None,) * missing, *axes[at + 1 :])
        if len(axes) != ndim:
            raise LayoutError(
                f"the layout {self} has {len(axes)} dims, the array has {ndim}"
            )
        return axes

    def spec(self, ndim: int | None = None) -> PartitionSpec:
        """The `PartitionSpec` in its normal form (no trailing None).

        Args:
            ndim: rank of the array; needed where a `...` stands before a sharded dim.

        Raises:
            LayoutError: the layout has another rank, or holds `MATCH`, or `ndim` is
                needed.
        """
        self._check_complete()
        if ndim is not None:
            return normal_spec(self.dims(ndim))
        axes = self.axes
        if ... in axes:
            at = axes.index(...)
            if any(dim_axes(dim) for dim in axes[at:]):
                raise LayoutError(
                    f"the layout {self} holds a '...' before a sharded dim; "
                    "pass the rank, .spec(ndim)"
                )
            axes = axes[:at]
        return normal_spec(tuple(dim_axes(dim) for dim in axes))

    def sharding(self, ndim: int | None = None) -> NamedSharding:
        """The `NamedSharding` on this layout's mesh.

        Args:
            ndim: rank of the array; needed where a `...` stands before a sharded dim.

        Raises:
            LayoutError: the layout has another rank, or holds `MATCH`.
            MeshError: the layout has no mesh.
        """
        if self.device_mesh is None:
            raise MeshError(
                f"the layout {self} has no mesh; give one, layout.on(mesh) or "
                "flm.TensorLayout(axes, mesh)"
            )
        return named_sharding(self.device_mesh, self.spec(ndim), self.memory_kind)

    @property
    def backend_layout(self) -> NamedSharding:
        """Keras's name for `sharding()`."""
        return self.sharding()

    def shard_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of one device's part of an array of this global shape.

        Raises:
            LayoutError: another rank, `MATCH`, or a dim that does not divide.
            MeshError: the layout has no mesh.
        """
        if self.device_mesh is None:
            raise MeshError(f"the layout {self} has no mesh, so no shard shape")
        sizes = self.device_mesh.axis_sizes
        result = []
        for dim, (size, names) in enumerate(
            zip(shape, self.dims(len(shape)), strict=True)
        ):
            parts = math.prod(sizes[name] for name in names)
            if size % parts:
                raise LayoutError(
                    f"shape {tuple(shape)}: {clash(dim, size, names, sizes)}"
                )
            result.append(size // parts)
        return tuple(result)

    def equivalent(self, other: "TensorLayout", ndim: int) -> bool:
        """Whether both shard an array of `ndim` dims alike, on grids with equal axes.

        Unlike `NamedSharding.is_equivalent_to` this also compares an abstract mesh
        with a concrete one: axis names, sizes and the normal form decide.
        """
        mine, yours = self.device_mesh, other.device_mesh
        if (mine is None) != (yours is None):
            return False
        if mine is not None and yours is not None and not same_grid(mine, yours):
            return False
        same_memory = self.memory_kind == other.memory_kind
        return same_memory and self.spec(ndim) == other.spec(ndim)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"TensorLayout is immutable: cannot set {name!r}")

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, TensorLayout)
            and self._hash == other._hash
            and self.axes == other.axes
            and self.device_mesh == other.device_mesh
            and self.memory_kind == other.memory_kind
        )

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        if self.axes == (...,):
            return "replicated"
        inner = ", ".join("..." if dim is ... else repr(dim) for dim in self.axes)
        return f"({inner},)" if len(self.axes) == 1 else f"({inner})"

    def __repr__(self) -> str:
        axes = "()" if self.axes == (...,) else str(self)
        mesh = "" if self.device_mesh is None else f", {self.device_mesh!r}"
        kind = "" if self.memory_kind is None else f", memory_kind={self.memory_kind!r}"
        return f"TensorLayout({axes}{mesh}{kind})"

    def __reduce__(self) -> tuple[Any, ...]:
        axes = () if self.axes == (...,) else self.axes
        return _rebuild, (axes, self.device_mesh, self.memory_kind)


def _rebuild(axes: Any, mesh: Any, memory_kind: str | None) -> TensorLayout:
    return TensorLayout(axes, mesh, memory_kind=memory_kind)


def named_sharding(
    mesh: DeviceMesh, spec: PartitionSpec, memory_kind: str | None = None
) -> NamedSharding:
    """Makes the JAX sharding for a spec in normal form."""
    return NamedSharding(mesh.jax_mesh, spec, memory_kind=memory_kind)


def clash(dim: int, size: int, names: Sequence[str], sizes: dict[str, int]) -> str:
    """Says which dim of which size does not divide by which axes."""
    if len(names) == 1:
        axes = f"mesh axis {names[0]!r} of size {sizes[names[0]]}"
    else:
        listed = " × ".join(f"{name!r} ({sizes[name]})" for name in names)
        axes = f"mesh axes {listed}, {math.prod(sizes[n] for n in names)} together"
    return f"dim {dim} of size {size} does not divide by {axes}"


def dim_axes(dim: Dim) -> tuple[str, ...]:
    """The mesh axes of one dim, as a tuple."""
    if dim is None or dim is ...:
        return ()
    return (dim,) if isinstance(dim, str) else dim


def normal_spec(dims: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """The one `PartitionSpec` for these dims: no trailing None, no 1-tuples.

    JAX tells `P("data")` from `P("data", None)`, so that a jitted function given
    both compiles twice; the normal form keeps equal layouts equal.
    """
    entries = [
        None if not names else names[0] if len(names) == 1 else names for names in dims
    ]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def _own_memory_kind(sharding: NamedSharding) -> str | None:
    """The memory kind, or None for the default, which JAX fills in by itself."""
    kind = sharding.memory_kind
    if kind is None or not isinstance(sharding.mesh, Mesh):
        return kind
    default = sharding.mesh.devices.flat[0].default_memory().kind
    return None if kind == default else kind


def _spec_entries(spec: PartitionSpec) -> tuple[Any, ...]:
    """A `PartitionSpec` as axes: missing trailing dims are not sharded."""
    if spec.unreduced or spec.reduced:
        raise RuleError(
            f"{spec!r} speaks of values that are not yet reduced, which a layout does "
            "not: say only how the dims are sharded"
        )
    return (*spec, ...)


def _dims(
    axes: tuple[Any, ...], given: Any, mesh: DeviceMesh | None
) -> tuple[Dim, ...]:
    if sum(dim is ... for dim in axes) > 1:
        raise RuleError(f"a layout may hold one '...', got {given!r}")
    dims: list[Dim] = []
    for dim in axes:
        if dim is PartitionSpec.UNCONSTRAINED:
            raise RuleError(
                f"{given!r} leaves a dim unconstrained; a layout says where every dim "
                "lies: use None for a dim that is not sharded"
            )
        if dim is None or dim is ... or isinstance(dim, str):
            axis = mesh is not None and dim in mesh.axis_names
            dims.append(None if dim == UNSHARDED and not axis else dim)
        elif isinstance(dim, tuple | list) and all(isinstance(n, str) for n in dim):
            dims.append(tuple(dim))
        else:
            raise RuleError(_not_a_layout(given))
    return tuple(dims)


def _normal(dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Unwraps 1-tuples, drops empty ones and None beside a '...'."""
    result: list[Dim] = []
    for dim in dims:
        if isinstance(dim, tuple) and len(dim) < 2:
            dim = dim[0] if dim else None
        result.append(dim)
    if not any(dim_axes(dim) for dim in result) and ... in result:
        # Only unsharded dims and a "...": replicated, if at least that many dims.
        return (...,)
    return tuple(result)


def _not_a_layout(value: Any) -> str:
    if isinstance(value, str):
        return (
            f"a layout cannot be a string, got {value!r}; write a tuple with one entry "
            f"per dim, such as ({value!r},) for a 1-D array or (None, {value!r})"
        )
    if isinstance(value, jax.Array):
        return "a layout cannot be an array; pass array.sharding"
    return (
        f"not a layout: {value!r}; use a tuple such as (None, 'model'), None for "
        "replicated, a PartitionSpec, a NamedSharding or a flm.TensorLayout"
    )
