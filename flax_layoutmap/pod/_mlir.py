"""Shardings, meshes, types and locations in a module of MLIR, by jaxlib's bindings."""

import functools
import os
import re
import sysconfig
from collections.abc import Mapping, Sequence
from typing import Any

# Axis names in an attribute; `"x":(2)4` is the part of size 4 of an axis.
_AXIS = re.compile(r'"([^"]+)"(?::\((\d+)\)(\d+))?')

# An axis of the mesh, or a part of one, with its size in devices.
AxisRef = tuple[str, int]
# The axes of each dim of an array.
Dims = tuple[tuple[AxisRef, ...], ...]


def functions(module: Any) -> dict[str, Any]:
    """The functions of a module by name; the step itself is `main`."""
    found = {}
    for op in module.regions[0].blocks[0].operations:
        if op.operation.name == "func.func":
            found[str(op.attributes["sym_name"]).strip('"')] = op
    return found


def mesh_sizes(module: Any) -> dict[str, int]:
    """Axis name → size, of the mesh that the program was lowered for."""
    return mesh_of(module)[1]


def mesh_of(module: Any) -> tuple[str, dict[str, int]]:
    """Name and axes of the first mesh that has any."""
    found = meshes(module)
    return next((one for one in found if one[1]), found[-1] if found else ("mesh", {}))


def meshes(module: Any) -> list[tuple[str, dict[str, int]]]:
    """Name and axes of every mesh of a module."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    found = []
    for op in module.regions[0].blocks[0].operations:
        if op.operation.name == "sdy.mesh":
            name = ir.StringAttr(op.attributes["sym_name"]).value
            axes = map(sdy.MeshAxisAttr, sdy.MeshAttr(op.attributes["mesh"]).axes)
            found.append((name, {axis.name: axis.size for axis in axes}))
    return found


class Attributes:
    """Reads what is written on the operations of a program; equal attributes once."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """Knows nothing yet.

        Args:
            sizes: axis name → size, of the program's mesh.
        """
        self.sizes = sizes
        self._known: dict[Any, Any] = {}

    def of(self, attribute: Any) -> Dims:
        """The axes of each dim, from one sharding."""
        found = self._known.get(attribute)
        if found is None:
            from jaxlib.mlir.dialects import sdy

            dims = sdy.TensorShardingAttr(attribute).dimension_shardings
            found = tuple(
                tuple(self._axis(axis) for axis in sdy.DimensionShardingAttr(dim).axes)
                for dim in dims
            )
            self._known[attribute] = found
        return found

    def per_value(self, op: Any, where: str = "sdy.sharding") -> Sequence[Dims]:
        """The axes of each dim, of each result of an operation; none if not said.

        Args:
            op: the operation.
            where: the attribute; `in_shardings` is of operands.
        """
        if where not in op.attributes:
            return ()
        attribute = op.attributes[where]
        found = self._known.get(attribute)
        if found is None:
            from jaxlib.mlir.dialects import sdy

            per_value = sdy.TensorShardingPerValueAttr(attribute).shardings
            found = [self.of(sharding) for sharding in per_value]
            self._known[attribute] = found
        return found

    def location(self, op: Any) -> str:
        """Where an operation comes from, as MLIR writes it."""
        key = op.location.attr
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = str(op.location)
        return found

    def type_of(self, value: Any) -> tuple[tuple[int, ...], str]:
        """Shape and name of the element type, of a value."""
        kind = value.type
        found = self._known.get(kind)
        if found is None:
            found = (), str(kind)  # a token
            if hasattr(kind, "shape"):
                found = tuple(kind.shape), str(kind.element_type)
            self._known[kind] = found
        return found

    def axes_in(self, attribute: Any) -> tuple[AxisRef, ...]:
        """The axes that an attribute names, in its order."""
        found = self._known.get(attribute)
        if found is None:
            named = _AXIS.findall(str(attribute))
            found = tuple(
                (name, int(size) if size else self.sizes.get(name, 1))
                for name, _, size in named
            )
            self._known[attribute] = found
        return found

    def _axis(self, attribute: Any) -> AxisRef:
        from jaxlib.mlir.dialects import sdy

        axis = sdy.AxisRefAttr(attribute)
        part = axis.sub_axis_info
        if part is None:
            return axis.name, self.sizes.get(axis.name, 1)
        return axis.name, sdy.SubAxisInfoAttr(part).size


# `"Attention.__call__"("/home/me/model.py":36:8 to :20)`, the innermost frame first.
_FRAME = re.compile(r'"([^"]*)"\("([^"]+)":(\d+):\d+')
_NAME = re.compile(r'loc\("([^"]*)"')


@functools.cache
def _others() -> tuple[str, ...]:
    """Folders of code that is not the user's."""
    import flax
    import jax
    import jaxlib
    import optax

    modules = (flax, jax, jaxlib, optax)
    files = [module.__file__ or "" for module in modules]
    own = os.path.dirname(os.path.dirname(__file__))
    folders = [os.path.dirname(file) for file in files]
    return tuple(f"{folder}{os.sep}" for folder in (*folders, own)) + (
        sysconfig.get_paths()["stdlib"] + os.sep,
    )


@functools.lru_cache(maxsize=4096)
def source_line(location: str) -> str | None:
    """The user's line in a location of MLIR; the innermost one where none is his.

    >>> source_line('loc("jit(f)/dot"("Up.__call__"("/home/me/model.py":36:8 to :20)))')
    'model.py:36 Up.__call__'
    """
    frames = _FRAME.findall(location)
    if not frames:
        return None
    folders = _others()
    own = (frame for frame in frames if not frame[1].startswith(folders))
    name, file, line = next(own, frames[0])
    short = name.replace(".<locals>", "")
    return f"{os.path.basename(file)}:{line} {short}"


def operation_name(location: str) -> str:
    """The last part of the name that JAX gave an operation; `""` without one.

    >>> operation_name('loc("jit(step)/jvp()/dot_general"(...))')
    'dot_general'
    """
    found = _NAME.match(location)
    return found[1].rstrip(":").rpartition("/")[2] if found else ""
