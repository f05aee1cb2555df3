"""MeshLayout: the axes of one array's dims and their mesh; spec, sharding, checks."""

import math
from collections.abc import Sequence
from typing import Any, Self

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_layoutmap._core.axes import (
    Dim,
    clash,
    dim_axes,
    normal_dims,
    normal_spec,
    not_a_layout,
    read_dims,
    spec_entries,
)
from flax_layoutmap._core.dtensor_format import MATCH
from flax_layoutmap._core.errors import LayoutError, MeshError, RuleError, did_you_mean
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh, same_grid


class MeshLayout:
    """The part of `TensorLayout` that JAX needs; DTensor's members are added there."""

    __slots__ = ("axes", "device_mesh", "memory_kind", "_hash")
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
        if isinstance(axes, MeshLayout):
            mesh = mesh or axes.device_mesh
            memory_kind = memory_kind or axes.memory_kind
            dims = axes.axes
        elif isinstance(axes, NamedSharding):
            mesh = mesh or DeviceMesh(axes.mesh)
            memory_kind = memory_kind or _own_memory_kind(axes)
            dims = read_dims(spec_entries(axes.spec), axes, names_of(mesh))
        elif isinstance(axes, PartitionSpec):
            dims = read_dims(spec_entries(axes), axes, names_of(mesh))
        elif axes is None:
            dims = (...,)
        elif isinstance(axes, tuple | list):
            dims = read_dims(tuple(axes), axes, names_of(mesh)) or (...,)
        else:
            raise RuleError(not_a_layout(axes))
        self._fill(normal_dims(dims), mesh, memory_kind)
        self._check_axes()

    def _fill(
        self, axes: tuple[Dim, ...], mesh: DeviceMesh | None, memory_kind: str | None
    ) -> None:
        put = object.__setattr__
        put(self, "axes", axes)
        put(self, "device_mesh", mesh)
        put(self, "memory_kind", memory_kind)
        put(self, "_hash", hash((axes, mesh, memory_kind)))

    @classmethod
    def _exactly(
        cls,
        axes: tuple[Dim, ...],
        mesh: DeviceMesh | None,
        memory_kind: str | None = None,
    ) -> Self:
        """A layout of exactly these dims; none of them is rank 0, not any rank."""
        if axes:
            return cls(axes, mesh, memory_kind=memory_kind)
        layout = object.__new__(cls)
        layout._fill((), mesh, memory_kind)
        return layout

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
        return MATCH in self.axes and MATCH not in names_of(self.device_mesh)

    @property
    def rank(self) -> int | None:
        """Number of dims, or None where a `...` leaves it open."""
        return None if ... in self.axes else len(self.axes)

    def on(self, device_mesh: Any) -> Self:
        """The same axes on another mesh.

        Raises:
            RuleError: the mesh lacks an axis.
        """
        bare = as_mesh(device_mesh)
        if bare == self.device_mesh:
            return self
        return self._exactly(self.axes, bare, self.memory_kind)

    def matched(self, dims: Sequence[Sequence[str]]) -> Self:
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
            return type(self)(kept, self.device_mesh, memory_kind=self.memory_kind)
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
        """Keras's name for `sharding()`.

        Its spec has no `None` at its end, so `==` says that it is not a
        `NamedSharding(mesh, P("data", None))` of the same meaning, as Keras makes;
        `.is_equivalent_to(other, ndim)` says that it is.
        """
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

    def equivalent(self, other: "MeshLayout", ndim: int) -> bool:
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
            isinstance(other, MeshLayout)
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
        if not self.axes:
            return f"TensorLayout.replicated({self.device_mesh!r}, 0)"
        axes = "()" if self.axes == (...,) else str(self)
        mesh = "" if self.device_mesh is None else f", {self.device_mesh!r}"
        kind = "" if self.memory_kind is None else f", memory_kind={self.memory_kind!r}"
        return f"TensorLayout({axes}{mesh}{kind})"


def named_sharding(
    mesh: DeviceMesh, spec: PartitionSpec, memory_kind: str | None = None
) -> NamedSharding:
    """Makes the JAX sharding for a spec in normal form."""
    return NamedSharding(mesh.jax_mesh, spec, memory_kind=memory_kind)


def names_of(mesh: DeviceMesh | None) -> tuple[str, ...]:
    """The axes of a mesh that may be missing."""
    return () if mesh is None else mesh.axis_names


def _own_memory_kind(sharding: NamedSharding) -> str | None:
    """The memory kind, or None for the default, which JAX fills in by itself."""
    kind = sharding.memory_kind
    if kind is None or not isinstance(sharding.mesh, Mesh):
        return kind
    default = sharding.mesh.devices.flat[0].default_memory().kind
    return None if kind == default else kind
