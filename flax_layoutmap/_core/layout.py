"""TensorLayout: how the dims of an array are sharded over the axes of a mesh."""

import dataclasses
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_layoutmap._core import dtensor_format
from flax_layoutmap._core.axes import (
    Dim,
    dim_axes,
    divides,
    normal_spec,
    not_a_layout,
    read_dims,
    shard_offsets,
    spec_entries,
)
from flax_layoutmap._core.dtensor_format import MATCH, UNSHARDED
from flax_layoutmap._core.errors import LayoutError, MeshError, RuleError, did_you_mean
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh, mesh_from_proto, same_places


@dataclasses.dataclass(frozen=True, slots=True, init=False, repr=False)
class TensorLayout:
    """How the dims of an array are sharded over the axes of a mesh.

    Keras's `TensorLayout(axes, device_mesh)`, immutable and hashable, with the members
    of DTensor's `Layout`. Members that need the rank raise LayoutError for a layout
    that contains `...`, and for `()`, which is replicated at any rank
    (`TensorLayout.replicated(mesh, 0)` has rank 0).

    Args:
        axes: per dim `None` (not sharded), the name of a mesh axis, or a tuple of
            names; one `...` stands for any number of unsharded dims. `None`, `()` and
            `(..., None)` mean the same: replicated, at any rank. A `PartitionSpec`
            keeps JAX's meaning: missing trailing dims are not sharded. A
            `NamedSharding` sets mesh and memory kind too. `TensorLayout.MATCH` keeps
            the axes of an array's dim (for `relayout` and `distribute_tensor` only).
        device_mesh: the mesh; anything that `DeviceMesh` accepts; None to let a
            `LayoutMap` or a scope set it later.
        memory_kind: kind of memory, such as `"pinned_host"`; None for the default.
        mesh: DTensor's name for `device_mesh`.

    Example:
        >>> import flax_layoutmap as flm
        >>> layout = flm.TensorLayout((None, "model"))
        >>> tuple(layout.spec())
        (None, 'model')
    """

    __module__ = "flax_layoutmap"
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
        mesh: Any = None,
    ) -> None:
        if mesh is not None and device_mesh is not None:
            raise MeshError(
                "TensorLayout was given device_mesh= and mesh=, which are the same: "
                "leave one out"
            )
        on = as_mesh(device_mesh if mesh is None else mesh)
        if isinstance(axes, NamedSharding):
            on = on or DeviceMesh(axes.mesh)
            memory_kind = memory_kind or own_memory_kind(axes)
            axes = axes.spec
        if isinstance(axes, TensorLayout):
            on = on or axes.device_mesh
            memory_kind = memory_kind or axes.memory_kind
            dims = axes.axes
        elif isinstance(axes, PartitionSpec):
            dims = read_dims(spec_entries(axes), axes)
        elif axes is None:
            dims = (...,)
        elif isinstance(axes, tuple | list):
            dims = read_dims(tuple(axes), axes) or (...,)
        else:
            raise RuleError(not_a_layout(axes))
        self._fill(dims, on, memory_kind)

    @classmethod
    def _exactly(
        cls,
        axes: tuple[Dim, ...],
        mesh: DeviceMesh | None,
        memory_kind: str | None = None,
    ) -> Self:
        """A layout with exactly these dims: `()` has rank 0, not any rank."""
        layout = object.__new__(cls)
        layout._fill(axes, mesh, memory_kind)
        return layout

    def _fill(
        self, axes: tuple[Dim, ...], mesh: DeviceMesh | None, memory_kind: str | None
    ) -> None:
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "device_mesh", mesh)
        object.__setattr__(self, "memory_kind", memory_kind)
        names = self.axis_names
        for position, name in enumerate(names):
            if name in names[:position]:
                raise RuleError(
                    f"the layout {self} uses the mesh axis {name!r} twice; each axis "
                    "may shard one dim only"
                )
            if mesh is not None and name not in mesh.axis_names:
                raise RuleError(
                    f"the layout {self} names the axis {name!r}, but the mesh "
                    f"{str(mesh)!r} has no such axis"
                    f"{did_you_mean(name, mesh.axis_names)}"
                )

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The mesh axes in use, in the order of the dims."""
        names = [name for dim in self.axes for name in dim_axes(dim)]
        return tuple(name for name in names if name != MATCH)

    @property
    def is_replicated(self) -> bool:
        """Whether no dim is sharded, or may be because of `MATCH`."""
        return not self.axis_names and not self.has_match

    @property
    def has_match(self) -> bool:
        """Whether a dim is `MATCH`, which takes its axes from an array."""
        return MATCH in self.axes

    @property
    def rank(self) -> int | None:
        """Number of dims, or None if the layout contains `...`."""
        return None if ... in self.axes else len(self.axes)

    def on(self, device_mesh: Any) -> Self:
        """Return the same axes on another mesh."""
        mesh = as_mesh(device_mesh)
        same = mesh == self.device_mesh
        return self if same else self._exactly(self.axes, mesh, self.memory_kind)

    def on_host(self) -> Self:
        """Return the same layout in host memory, `memory_kind="pinned_host"`."""
        return self._exactly(self.axes, self.device_mesh, "pinned_host")

    def matched(self, dims: Sequence[Sequence[str]]) -> Self:
        """Return the layout with each `MATCH` replaced by the axes of its dim."""
        if not self.has_match:
            return self
        axes = self._written_out(len(dims))
        kept = [
            tuple(old) if dim == MATCH else dim
            for dim, old in zip(axes, dims, strict=True)
        ]
        return type(self)(kept, self.device_mesh, memory_kind=self.memory_kind)

    def dims(self, ndim: int) -> tuple[tuple[str, ...], ...]:
        """Return the mesh axes of each of `ndim` dims."""
        self._check_complete()
        return tuple(dim_axes(dim) for dim in self._written_out(ndim))

    def _some_mesh(self) -> DeviceMesh:
        if self.device_mesh is None:
            raise MeshError(
                f"the layout {self} has no mesh, which this needs; give one, "
                "layout.on(mesh) or flm.TensorLayout(axes, mesh)"
            )
        return self.device_mesh

    def _check_complete(self) -> None:
        if self.has_match:
            raise LayoutError(
                f"the layout {self} has a MATCH dim, which only relayout and "
                "distribute_tensor support; name the mesh axes, or None, instead"
            )

    def _written_out(self, ndim: int) -> tuple[Dim, ...]:
        """The axes of this many dims, with the `...` expanded."""
        axes = self.axes
        count = len(axes) - (... in axes)
        if ndim < count or (ndim > count and ... not in axes):
            raise LayoutError(
                f"the layout {self} has {count} dims, the array has {ndim}"
            )
        if ... not in axes:
            return axes
        start = axes.index(...)
        return (*axes[:start], *(None,) * (ndim - count), *axes[start + 1 :])

    def spec(self, ndim: int | None = None) -> PartitionSpec:
        """Return the `PartitionSpec`, without trailing None.

        `ndim` is needed if a `...` precedes a sharded dim.
        """
        if ndim is None:
            axes = self.axes
            ndim = len(axes) - (... in axes)
            if ... in axes and any(map(dim_axes, axes[axes.index(...) :])):
                raise LayoutError(
                    f"the layout {self} holds a '...' before a sharded dim; "
                    "pass the rank, .spec(ndim)"
                )
        return normal_spec(self.dims(ndim))

    def sharding(self, ndim: int | None = None) -> NamedSharding:
        """Return the `NamedSharding` on this layout's mesh; see `spec`."""
        return named_sharding(self._some_mesh(), self.spec(ndim), self.memory_kind)

    @property
    def backend_layout(self) -> NamedSharding:
        """Keras's name for `sharding()`; its spec has no trailing None."""
        return self.sharding()

    def shard_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shard shape of an array of this global shape."""
        sizes, dims = self._some_mesh().axis_sizes, self.dims(len(shape))
        if problem := divides(shape, dims, sizes):
            raise LayoutError(f"shape {tuple(shape)}: {problem}")
        return tuple(map(operator.floordiv, shape, _parts(dims, sizes)))

    def equivalent(self, other: "TensorLayout", ndim: int) -> bool:
        """Return whether both place an array of `ndim` dims the same way.

        An abstract mesh is equivalent to any mesh with the same axes.
        """
        mine, yours = self.device_mesh, other.device_mesh
        same_mesh = mine is yours or bool(mine and yours and same_places(mine, yours))
        same_memory = self.memory_kind == other.memory_kind
        return same_mesh and same_memory and self.spec(ndim) == other.spec(ndim)

    # ----------------------------------------------- the members of DTensor's Layout

    @property
    def mesh(self) -> DeviceMesh | None:
        """DTensor's name for `device_mesh`."""
        return self.device_mesh

    @property
    def sharding_specs(self) -> list[str]:
        """DTensor's word for each dim: an axis, `"unsharded"`, `"match"` or `"x+y"`."""
        return list(map(dtensor_format.word_of, self._every_dim()))

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of shards along each dim, as documented for DTensor."""
        return tuple(_parts(self._every_dim_axes(), self._some_mesh().axis_sizes))

    def num_shards(self, idx: int) -> int:
        """Return the number of shards along a dim, which may be negative."""
        return self.shape[self._position(idx)]

    def is_fully_replicated(self) -> bool:
        """Return whether each device holds the whole array; axes may have size 1."""
        self._check_complete()
        return all(self._some_mesh().axis_sizes[n] == 1 for n in self.axis_names)

    def is_batch_parallel(self) -> bool:
        """Return whether dim 0, and no other, is sharded."""
        first, *rest = self._every_dim_axes() or ((),)
        return bool(first) and not any(rest)

    def offset_to_shard(self) -> list[tuple[int, ...]]:
        """Return the shard index of each device of the mesh, in row-major order."""
        dims, mesh = self._every_dim_axes(), self._some_mesh()
        numbers = [[mesh.axis_names.index(name) for name in names] for names in dims]
        return [tuple(offset) for offset in shard_offsets(mesh.shape, numbers).tolist()]

    def offset_tuple_to_global_index(self, offset_tuple: Sequence[int]) -> int:
        """Return the number of the shard at these offsets, in row-major order."""
        grid, offset = self.shape, tuple(offset_tuple)
        try:
            # NumPy has no index into an array of rank 0.
            return int(np.ravel_multi_index((0, *offset), (1, *grid)))
        except (TypeError, ValueError) as error:
            raise LayoutError(
                f"the layout {self} has {grid} shards along its dims, so none at "
                f"{offset}"
            ) from error

    def global_shape_from_local_shape(
        self, local_shape: Sequence[int]
    ) -> tuple[int, ...]:
        """Return the global shape of an array with this shard shape."""
        sizes, dims = self._some_mesh().axis_sizes, self.dims(len(local_shape))
        return tuple(map(operator.mul, local_shape, _parts(dims, sizes)))

    def local_shape_from_global_shape(
        self, global_shape: Sequence[int]
    ) -> tuple[int, ...]:
        """DTensor's name for `shard_shape`; an indivisible dim is an error here."""
        return self.shard_shape(global_shape)

    def delete(self, dims: int | np.integer | Sequence[int]) -> Self:
        """Return the layout without a dim, or without several."""
        gone = {self._position(dim) for dim in np.atleast_1d(dims).tolist()}
        kept = [d for number, d in enumerate(self._every_dim()) if number not in gone]
        return self._exactly(tuple(kept), self.device_mesh, self.memory_kind)

    @classmethod
    def replicated(cls, mesh: Any, rank: int) -> Self:
        """Make a replicated layout of this rank."""
        if not isinstance(rank, int | np.integer) or rank < 0:
            raise LayoutError(f"the rank must be 0 or more, got {rank!r}")
        return cls._exactly((None,) * int(rank), as_mesh(mesh))

    @classmethod
    def batch_sharded(
        cls, mesh: Any, batch_dim: str | tuple[str, ...], rank: int, axis: int = 0
    ) -> Self:
        """Make a layout of this rank with dim number `axis` on the axis `batch_dim`."""
        replicated = cls.replicated(mesh, rank)
        dims: list[Any] = [None] * replicated._position(axis) + [batch_dim]
        return cls((*dims, *replicated.axes[len(dims) :]), replicated.mesh)

    @classmethod
    def inner_sharded(
        cls, mesh: Any, inner_dim: str | tuple[str, ...], rank: int
    ) -> Self:
        """Make a layout of this rank with the last dim on the axis `inner_dim`."""
        return cls.batch_sharded(mesh, inner_dim, rank, axis=-1)

    def as_proto(self) -> Any:
        """Return a message with the bytes of TensorFlow's `LayoutProto`.

        A dim on several axes is written `x+y`, which DTensor cannot read.
        """
        if self.memory_kind is not None:
            raise LayoutError(
                f"DTensor has no word for the memory kind {self.memory_kind!r} of the "
                f"layout {self._axes_text()}; pickle it, or write it without"
            )
        return dtensor_format.layout_proto(self.sharding_specs, self.mesh_proto())

    @classmethod
    def from_proto(cls, proto: Any) -> Self:
        """Read a `LayoutProto`, from here or TensorFlow, or its bytes.

        The mesh is abstract unless all devices are listed and present; its axes are
        Auto.
        """
        proto = dtensor_format.read_layout_proto(proto)
        dims = tuple(map(dtensor_format.dim_of, dtensor_format.words_in(proto)))
        return cls._exactly(dims, mesh_from_proto(proto.mesh_config))

    def mesh_proto(self) -> Any:
        """Return the mesh as a `MeshProto`."""
        return self._some_mesh().as_proto()

    def serialized_string(self) -> bytes:
        """Return the bytes of `as_proto()`, the same for equal layouts in a process."""
        return self.as_proto().SerializeToString(deterministic=True)

    @classmethod
    def from_str(cls, proto_str: bytes) -> Self:
        """Read the bytes of `serialized_string`, from here or TensorFlow."""
        return cls.from_proto(proto_str)

    def to_string(self) -> str:
        """Return the text of DTensor's `Layout.to_string`; see `as_proto`."""
        return dtensor_format.layout_text(self.as_proto())

    @classmethod
    def from_string(cls, text: str) -> Self:
        """Read the text of `to_string`, from here or TensorFlow; see `from_proto`."""
        return cls.from_proto(dtensor_format.read_layout_text(text))

    def _every_dim(self) -> tuple[Dim, ...]:
        if ... in self.axes:
            raise LayoutError(
                f"the layout {self} leaves the rank open, and this needs it; write "
                "every dim, or use flm.TensorLayout.replicated(mesh, rank)"
            )
        return self.axes

    def _every_dim_axes(self) -> tuple[tuple[str, ...], ...]:
        return self.dims(len(self._every_dim()))

    def _position(self, dim: Any) -> int:
        """The dim counted from 0; `dim` may count from the end."""
        rank = len(self._every_dim())
        try:
            return range(rank)[dim]
        except (IndexError, TypeError) as error:
            among = f"dims {-rank} to {rank - 1}" if rank else "no dims"
            text = f"the layout {self} has {among}, got dim {dim!r}"
            raise LayoutError(text) from error

    # ------------------------------------------------------------ Python's protocols

    def __str__(self) -> str:
        text = "replicated" if self.axes == (...,) else self._axes_text()
        return f"{text} in {self.memory_kind}" if self.memory_kind else text

    def _axes_text(self) -> str:
        inner = ", ".join("..." if dim is ... else repr(dim) for dim in self.axes)
        return f"({inner},)" if len(self.axes) == 1 else f"({inner})"

    def __repr__(self) -> str:
        if not self.axes:
            return f"TensorLayout.replicated({self.device_mesh!r}, 0)"
        axes = "()" if self.axes == (...,) else self._axes_text()
        mesh = "" if self.device_mesh is None else f", {self.device_mesh!r}"
        kind = "" if self.memory_kind is None else f", memory_kind={self.memory_kind!r}"
        return f"TensorLayout({axes}{mesh}{kind})"


def _parts(dims: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> Iterator[int]:
    """Number of shards along each dim."""
    return (math.prod(sizes[name] for name in names) for names in dims)


def named_sharding(
    mesh: DeviceMesh, spec: PartitionSpec, memory_kind: str | None = None
) -> NamedSharding:
    """Make the JAX sharding for a spec in normal form."""
    return NamedSharding(mesh.jax_mesh, spec, memory_kind=memory_kind)


def is_offloaded(memory_kind: str | None) -> bool:
    """Whether this kind of memory is not that of the device."""
    return memory_kind not in (None, "device")


def own_memory_kind(sharding: Any) -> str | None:
    """The memory kind of a sharding, or None for the default, which JAX fills in."""
    kind = getattr(sharding, "memory_kind", None)
    if kind is None or not isinstance(getattr(sharding, "mesh", None), Mesh):
        return kind
    default = sharding.mesh.devices.flat[0].default_memory().kind
    return None if kind == default else kind


def memory_kinds(device: Any) -> list[str]:
    """The kinds of memory that a device has; empty if it does not say."""
    try:
        return [memory.kind for memory in device.addressable_memories()]
    except jax.errors.JaxRuntimeError:  # a topology without devices
        return []
