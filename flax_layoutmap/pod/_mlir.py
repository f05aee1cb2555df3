"""Read arrays, shardings, meshes and locations from MLIR with jaxlib's bindings."""

import dataclasses
import functools
import math
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


# `bf16`, `ui4`, `f8E4M3FN` of MLIR; `u4`, `f8e4m3fn` of HLO.
_ELEMENT = re.compile(r"(bf|f|ui?|s?i|s)(\d+)(e\w+)?")
_KINDS = {"bf": "bfloat", "f": "float", "u": "uint", "ui": "uint"}
_ELEMENTS = {
    "i1": ("bool", 8),
    "pred": ("bool", 8),
    "ui1": ("uint1", 8),
    "complex<f32>": ("complex64", 64),
    "complex<f64>": ("complex128", 128),
    "c64": ("complex64", 64),
    "c128": ("complex128", 128),
}


@functools.cache
def element_type(name: str) -> tuple[str, int] | None:
    """NumPy's name and the bits of an element type of MLIR or HLO.

    >>> element_type("f8E4M3FN"), element_type("s4"), element_type("token")
    (('float8_e4m3fn', 8), ('int4', 4), None)
    """
    found = _ELEMENT.fullmatch(name.lower())
    if name in _ELEMENTS or found is None:
        return _ELEMENTS.get(name)
    kind, bits, form = found.groups()
    return f"{_KINDS.get(kind, 'int')}{bits}{'_' * bool(form)}{form or ''}", int(bits)


@dataclasses.dataclass(frozen=True)
class Array:
    """An array and its sharding."""

    shape: tuple[int, ...]  # global
    element: str  # MLIR's name of the element type
    dims: Dims

    @functools.cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of one device's part."""
        if not any(self.dims):
            return self.shape
        cut = zip(self.shape, self.dims, strict=True)
        return tuple(-(-size // parts(axes)) for size, axes in cut)

    @functools.cached_property
    def local_bytes(self) -> int:
        """Bytes of one device's part."""
        return bytes_of(self.local_shape, self.element)


def parts(axes: Sequence[AxisRef]) -> int:
    """The number of parts that axes shard a dim into."""
    return math.prod(size for _, size in axes)


def bytes_of(shape: tuple[int, ...], element: str) -> int:
    """Bytes of an array; an unknown type counts as four bytes."""
    _, bits = element_type(element) or ("", 32)
    return -(-math.prod(shape) * bits // 8)


def dtype_name(element: str) -> str:
    """NumPy's name of an element type; MLIR's if it is unknown."""
    name, _ = element_type(element) or (element, 0)
    return name


def spec_text(dims: Dims) -> str:
    """`P(data, -)`, or `replicated`."""
    if not any(dims):
        return "replicated"
    entries = ["+".join(name for name, _ in axes) or "-" for axes in dims]
    while entries[-1] == "-":
        entries.pop()
    return f"P({', '.join(entries)})"


def maker_of(value: Any) -> Any:
    """The operation whose result a value is; None for an argument of a block."""
    return getattr(value.owner, "operation", None)


def is_shared(result: Any) -> bool:
    """Whether a value is used more than once."""
    uses = iter(result.uses)
    next(uses, None)
    return next(uses, None) is not None


def functions(module: Any) -> dict[str, Any]:
    """The functions of a module by name; the step itself is `main`."""
    found = {}
    for op in module.regions[0].blocks[0].operations:
        if op.operation.name == "func.func":
            found[str(op.attributes["sym_name"]).strip('"')] = op
    return found


def mesh_of(module: Any) -> tuple[str, dict[str, int]]:
    """Name and axes of the mesh of a program: the first that has axes."""
    found = meshes(module)
    return next((one for one in found if one[1]), found[-1] if found else ("mesh", {}))


def meshes(module: Any) -> list[tuple[str, dict[str, int]]]:
    """Name and axes of every mesh of a module."""
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import sdy

    found = []
    for op in module.regions[0].blocks[0].operations:
        if op.operation.name == "sdy.mesh":
            name = ir.StringAttr(op.attributes["sym_name"]).value
            axes = map(sdy.MeshAxisAttr, sdy.MeshAttr(op.attributes["mesh"]).axes)
            found.append((name, {axis.name: axis.size for axis in axes}))
    return found


class Attributes:
    """A reader of the attributes of operations, which parses equal ones once."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """`sizes`: axis name → size, of the program's mesh."""
        self.sizes = sizes
        self.of = functools.cache(self._of)
        self.axes_in = functools.cache(self._axes_in)
        self._of_each = functools.cache(self._of_values)
        self._type = functools.cache(_type)
        self._array = functools.cache(self._array_of)
        self._text = functools.cache(str)

    def per_value(self, op: Any, where: str = "sdy.sharding") -> Sequence[Dims]:
        """The axes of each dim, of each result, or operand with `in_shardings`."""
        return self._of_each(op.attributes[where]) if where in op.attributes else ()

    def dims(self, op: Any, result: Any) -> Dims | None:
        """The axes of each dim of a result of an operation; None for replicated."""
        if "out_sharding" in op.attributes:  # a collective of Shardy's
            return self.of(op.attributes["out_sharding"])
        where = "sdy.sharding"
        if op.name == "sdy.manual_computation":
            where = "out_shardings"
        given = self.per_value(op, where)
        if not given:
            return None
        return given[list(op.results).index(result) if len(given) > 1 else 0]

    def array(self, value: Any, dims: Dims | None) -> Array:
        """A value with the axes of each dim; None is replicated."""
        return self._array(value.type, dims)

    def _array_of(self, kind: Any, dims: Dims | None) -> Array:
        shape, element = self._type(kind)
        if dims is None or len(dims) != len(shape):
            dims = ((),) * len(shape)
        return Array(shape, element, dims)

    def location(self, op: Any) -> str:
        """Where an operation comes from, as MLIR writes it."""
        return self._text(op.location.attr)

    def type_of(self, value: Any) -> tuple[tuple[int, ...], str]:
        """Shape and name of the element type, of a value."""
        return self._type(value.type)

    def _of(self, attribute: Any) -> Dims:
        """The axes of each dim, from one sharding."""
        from jax.extend.mlir.dialects import sdy

        dims = sdy.TensorShardingAttr(attribute).dimension_shardings
        return tuple(map(self.axes_in, dims))

    def _of_values(self, attribute: Any) -> Sequence[Dims]:
        from jax.extend.mlir.dialects import sdy

        return [*map(self.of, sdy.TensorShardingPerValueAttr(attribute).shardings)]

    def _axes_in(self, attribute: Any) -> tuple[AxisRef, ...]:
        """The axes that an attribute names, in its order."""
        return tuple(
            (name, int(size) if size else self.sizes.get(name, 1))
            for name, _, size in _AXIS.findall(str(attribute))
        )


def _type(kind: Any) -> tuple[tuple[int, ...], str]:
    """Shape and name of the element type; of a token its own name."""
    if hasattr(kind, "shape"):
        return tuple(kind.shape), str(kind.element_type)
    return (), str(kind)


# `"Attention.__call__"("/home/me/model.py":36:8 to :20)`, the innermost frame first.
_FRAME = re.compile(r'"([^"]*)"\("([^"]+)":(\d+):\d+')
_NAME = re.compile(r'loc\("([^"]*)"')


@functools.cache
def _others() -> tuple[str, ...]:
    """Folders of the libraries whose frames are skipped."""
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
    """The innermost frame of the user in a location of MLIR, else the innermost.

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
