"""Read and write DTensor's text and protos of meshes and layouts.

The formats are those of TensorFlow's `tensorflow/dtensor/proto/layout.proto` and of
`Layout.to_string()` and `Mesh.to_string()`, checked against TensorFlow 2.21. One
extension: a dim on several mesh axes is written `x+y`.
"""

import functools
import math
import re
from collections.abc import Sequence
from typing import Any

from flax_layoutmap._core.errors import LayoutError, MeshError

# DTensor's words for a dim that no axis shards, and for one that stays as it is.
UNSHARDED = "unsharded"
MATCH = "match"

_STATIC = 1  # the type of a LayoutProto; others are "parted" or a single device
_XLA = "use_xla_spmd"

# ---------------------------------------------------------------------- words


def dim_of(word: str) -> None | str | tuple[str, ...]:
    if word == UNSHARDED:
        return None
    return tuple(word.split("+")) if "+" in word else word


def word_of(dim: Any) -> str:
    """DTensor's word for a dim; several axes are joined by `+`."""
    if dim is None:
        return UNSHARDED
    return dim if isinstance(dim, str) else "+".join(dim)


# --------------------------------------------------------------------- protos

# Message → number and name of its fields, with `*` for repeated ones and the type where
# it is not a string.
_MESSAGES = {
    "ShardingSpec": {2: "sharding_spec"},
    "MeshDimensionProto": {1: "name", 2: "size:int64"},
    "MeshProto": {
        1: "mesh_dimensions*:MeshDimensionProto",
        2: "global_device_ids*:int64",
        3: "name",
        4: "local_device_ids*:int64",
        5: "local_devices*",
        6: "global_devices*",
        7: "use_xla_spmd:bool",
        8: "single_device",
    },
    "LayoutProto": {
        1: "sharding_specs*:ShardingSpec",
        2: "mesh_config:MeshProto",
        3: "type:int32",
    },
}
_PACKAGE = "tensorflow.dtensor"


@functools.cache
def _classes() -> dict[str, Any]:
    """Message name → class, in a pool apart from TensorFlow's."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(
        name="tensorflow/dtensor/proto/layout", package=_PACKAGE, syntax="proto3"
    )
    for message, fields in _MESSAGES.items():
        made = file.message_type.add(name=message)
        for number, text in fields.items():
            name, _, kind = text.partition(":")
            field = made.field.add(name=name.rstrip("*"), number=number)
            field.label = field.LABEL_REPEATED if "*" in name else field.LABEL_OPTIONAL
            if kind in _MESSAGES:
                field.type_name = f".{_PACKAGE}.{kind}"
            field.type = {
                "": field.TYPE_STRING,
                "bool": field.TYPE_BOOL,
                "int32": field.TYPE_INT32,
                "int64": field.TYPE_INT64,
            }.get(kind, field.TYPE_MESSAGE)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    get = message_factory.GetMessageClass
    return {
        name: get(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }


def mesh_proto(dims: Sequence[tuple[str, int]], **fields: Any) -> Any:
    """Make a `MeshProto` from the names and sizes of its axes, and other fields."""
    axes = [{"name": name, "size": size} for name, size in dims]
    return _classes()["MeshProto"](mesh_dimensions=axes, **fields)


def layout_proto(words: Sequence[str], mesh: Any) -> Any:
    specs = [{"sharding_spec": word} for word in words]
    return _classes()["LayoutProto"](
        sharding_specs=specs, mesh_config=mesh, type=_STATIC
    )


def read_mesh_proto(proto: Any) -> Any:
    """Check a `MeshProto` (ours, TensorFlow's or bytes), and return it as ours."""
    return _checked(_parsed("MeshProto", proto, MeshError))


def read_layout_proto(proto: Any) -> Any:
    """Check a `LayoutProto` (ours, TensorFlow's or bytes), and return it as ours."""
    layout = _parsed("LayoutProto", proto, LayoutError)
    if layout.type not in (0, _STATIC):  # before TensorFlow 2.21 there was no type: 0
        raise LayoutError(
            f"cannot read a layout of type {layout.type}; only STATIC ({_STATIC}) is "
            "supported"
        )
    if not layout.HasField("mesh_config") or "" in words_in(layout):
        raise LayoutError(
            "the layout's proto is damaged: its mesh, or the word of a dim, is missing"
        )
    _checked(layout.mesh_config)
    return layout


def words_in(layout: Any) -> list[str]:
    """The words of the dims in a `LayoutProto`."""
    return [spec.sharding_spec for spec in layout.sharding_specs]


def _parsed(name: str, proto: Any, error: type[LayoutError]) -> Any:
    """Convert a message or its bytes to our class."""
    from google.protobuf.message import DecodeError, Message

    if isinstance(proto, Message) and proto.DESCRIPTOR.name == name:
        proto = proto.SerializeToString()
    if not isinstance(proto, bytes):
        raise error(f"not a {name}: {proto!r}")
    try:
        return _classes()[name].FromString(proto)
    except DecodeError as cause:
        text = f"these {len(proto)} bytes are not a {name}, or only part of one"
        raise error(text) from cause


def _checked(mesh: Any) -> Any:
    """The same `MeshProto`; raises MeshError where its parts contradict each other."""
    places = math.prod(dim.size for dim in mesh.mesh_dimensions)
    ids, local = list(mesh.global_device_ids), list(mesh.local_device_ids)
    if (
        places < 1
        or ids != [*range(min(ids, default=0), min(ids, default=0) + places)]
        or not len(local) == len({*local} & {*ids}) == len(mesh.local_devices)
        or len(mesh.global_devices) not in (0, places)
    ):
        raise MeshError(
            f"cannot read the mesh {_grid(mesh)!r}: it must have consecutive device "
            "ids, one for each place; a device for each local id; and a global device "
            "for each place, or none"
        )
    return mesh


# ----------------------------------------------------------------------- text


def mesh_text(mesh: Any) -> str:
    """Write `name|x=3,y=2|global ids|local ids|local devices[|global devices][|…]`."""
    for name in (mesh.name, *(dim.name for dim in mesh.mesh_dimensions)):
        if any(character in "|,= " for character in name):
            raise MeshError(
                f"DTensor's text cannot hold the name {name!r}, which contains '|', "
                "',', '=' or a space; use as_proto()"
            )
    lists = [mesh.global_device_ids, mesh.local_device_ids, mesh.local_devices]
    lists += [mesh.global_devices] if mesh.global_devices else []
    parts = [mesh.name, _grid(mesh), *(",".join(map(str, values)) for values in lists)]
    return "|".join(parts + ([_XLA] if mesh.use_xla_spmd else []))


def _grid(mesh: Any) -> str:
    return ",".join(f"{dim.name}={dim.size}" for dim in mesh.mesh_dimensions)


def read_mesh_text(text: str) -> Any:
    """Read what `mesh_text` wrote, and DTensor's short form `name|x=2|*CPU`."""
    try:
        name, grid, *lists = text.split("|")
        use_xla_spmd = lists[3:] != [] and lists[-1] == _XLA
        if use_xla_spmd:
            lists.pop()
        pairs = (entry.partition("=") for entry in _listed(grid))
        dims = [(axis, int(size)) for axis, _, size in pairs]
        if len(lists) == 1 and lists[0].startswith("*"):
            start = f"/job:localhost/task:0/device:{lists[0][1:]}:"
            numbers = [*map(str, range(math.prod(size for _, size in dims)))]
            devices = ",".join(start + number for number in numbers)
            lists = [",".join(numbers), ",".join(numbers), devices]
        ids, local_ids, local, *rest = map(_listed, lists)
        (devices,) = rest or [[]]
        mesh = mesh_proto(
            dims,
            global_device_ids=[*map(int, ids)],
            local_device_ids=[*map(int, local_ids)],
            local_devices=local,
            global_devices=devices,
            name=name,
            use_xla_spmd=use_xla_spmd,
        )
    except ValueError as error:
        raise MeshError(
            f"cannot read the mesh {text!r}: {error}; it must be "
            "name|x=3,y=2|global ids|local ids|local devices[|global devices]"
        ) from error
    return _checked(mesh)


def _listed(part: str) -> list[str]:
    return part.split(",") if part else []


def layout_text(layout: Any) -> str:
    """Write `sharding_specs:x,unsharded, mesh:…`: a comma after each word."""
    words = "".join(f"{word}," for word in words_in(layout))
    return f"sharding_specs:{words} mesh:{mesh_text(layout.mesh_config)}"


def read_layout_text(text: str) -> Any:
    """Read what `layout_text` wrote, as a `LayoutProto`."""
    parts = re.fullmatch(r"sharding_specs:((?:[^ ,]+,)*) mesh:([^ ]*)", text)
    if parts is None:
        raise LayoutError(
            f"cannot read the layout {text!r}; it must be 'sharding_specs:x,unsharded, "
            "mesh:', with a comma after each dim, and the text of a mesh"
        )
    words, mesh = parts.groups()
    return layout_proto(words.split(",")[:-1], read_mesh_text(mesh))
