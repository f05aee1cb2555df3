"""DTensor's text and protos of meshes and layouts, read and written.

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

_TYPES = ("UNKNOWN", "STATIC", "PARTED", "SINGLE_DEVICE")  # of a LayoutProto
_XLA = "use_xla_spmd"

# ---------------------------------------------------------------------- words


def dim_of(word: str) -> None | str | tuple[str, ...]:
    """The dim that a word stands for."""
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
    """Make a `MeshProto` of the names and sizes of its axes and other fields."""
    axes = [{"name": name, "size": size} for name, size in dims]
    return _classes()["MeshProto"](mesh_dimensions=axes, **fields)


def layout_proto(words: Sequence[str], mesh: Any) -> Any:
    """Make a `LayoutProto`."""
    specs = [{"sharding_spec": word} for word in words]
    return _classes()["LayoutProto"](
        sharding_specs=specs, mesh_config=mesh, type=_TYPES.index("STATIC")
    )


def read_mesh_proto(proto: Any) -> Any:
    """Check a `MeshProto`, ours, TensorFlow's or its bytes; returns one of ours."""
    mesh = _parsed("MeshProto", proto, MeshError)
    if mesh.single_device:
        raise MeshError(
            f"the mesh is the single device {mesh.single_device!r}, without axes; use "
            'flm.DeviceMesh.from_dtensor([device], [("x", 1)])'
        )
    if not mesh.mesh_dimensions:
        raise MeshError("the proto is damaged: its mesh has no axes")
    return _checked(mesh)


def read_layout_proto(proto: Any) -> Any:
    """Check a `LayoutProto`, ours, TensorFlow's or its bytes; returns one of ours."""
    layout = _parsed("LayoutProto", proto, LayoutError)
    # Before TensorFlow 2.21 there was no type: 0.
    if layout.type > 1:
        kind = dict(enumerate(_TYPES)).get(layout.type, layout.type)
        raise LayoutError(
            f"a layout of type {kind} has no meaning here; only STATIC ones are read"
        )
    words = words_in(layout)
    if not layout.HasField("mesh_config") or "" in words:
        missing = "a dim is without its word" if "" in words else "it has no mesh"
        raise LayoutError(f"the layout's proto is damaged: {missing}")
    read_mesh_proto(layout.mesh_config)
    return layout


def words_in(layout: Any) -> list[str]:
    """The words of the dims in a `LayoutProto`."""
    return [spec.sharding_spec for spec in layout.sharding_specs]


def _parsed(name: str, proto: Any, error: type[LayoutError]) -> Any:
    """A message of our own class, of the same bytes."""
    from google.protobuf.message import DecodeError, Message

    if isinstance(proto, Message) and proto.DESCRIPTOR.name == name:
        proto = proto.SerializeToString()
    if not isinstance(proto, bytes):
        raise error(f"not a {name}: {proto!r}")
    try:
        return _classes()[name].FromString(proto)
    except DecodeError as cause:
        text = f"these {len(proto)} bytes are not a {name}, or not all of it"
        raise error(text) from cause


def _checked(mesh: Any) -> Any:
    """The same `MeshProto`; raises MeshError where its parts contradict each other."""
    sizes = [dim.size for dim in mesh.mesh_dimensions]
    ids, local_ids = list(mesh.global_device_ids), list(mesh.local_device_ids)
    places, local = math.prod(sizes), len(mesh.local_devices)
    if any(size < 1 for size in sizes) or len(ids) != places:
        clash = f"there are {len(ids)} global ids for {places} places"
    elif ids != [*range(ids[0], ids[0] + places)]:
        clash = "the global ids do not go up by one"
    elif len(local_ids) != local:
        clash = f"there are {len(local_ids)} local ids for {local} local devices"
    elif len({*local_ids} & {*ids}) != local:
        clash = "the local ids are not different ones of the global ids"
    elif len(mesh.global_devices) not in (0, places):
        count = len(mesh.global_devices)
        clash = f"there are {count} global devices for {places} places"
    else:
        return mesh
    raise MeshError(f"cannot read the mesh {_grid(mesh)!r}: {clash}")


# ----------------------------------------------------------------------- text


def mesh_text(mesh: Any) -> str:
    """Write `name|x=3,y=2|global ids|local ids|local devices[|global devices][|…]`."""
    for name in (mesh.name, *(dim.name for dim in mesh.mesh_dimensions)):
        if any(character in "|,= " for character in name):
            raise MeshError(
                f"DTensor's text cannot hold the name {name!r} (one of '|', ',', '=' "
                "or a space is in it); use as_proto()"
            )
    lists = [mesh.global_device_ids, mesh.local_device_ids, mesh.local_devices]
    lists += [mesh.global_devices] if mesh.global_devices else []
    parts = [mesh.name, _grid(mesh), *(",".join(map(str, values)) for values in lists)]
    return "|".join(parts + ([_XLA] if mesh.use_xla_spmd else []))


def _grid(mesh: Any) -> str:
    return ",".join(f"{dim.name}={dim.size}" for dim in mesh.mesh_dimensions)


def read_mesh_text(text: str) -> Any:
    """Read what `mesh_text` wrote, and DTensor's short form `name|x=2|*CPU`."""
    parts = text.split("|")
    use_xla_spmd = len(parts) > 5 and parts[-1] == _XLA
    if use_xla_spmd:
        parts.pop()
    short = len(parts) == 3 and parts[2].startswith("*")
    if not short and len(parts) not in (5, 6):
        raise MeshError(
            f"cannot read the mesh {text!r}: it has {len(parts)} parts between bars, "
            "not name|x=3,y=2|global ids|local ids|local devices[|global devices]"
        )
    name, grid, *lists = parts
    pairs = (entry.partition("=") for entry in _listed(grid))
    dims = [(axis, _number(size, text)) for axis, _, size in pairs]
    if short:
        numbers = [*map(str, range(math.prod(size for _, size in dims)))]
        start = f"/job:localhost/task:0/device:{lists[0][1:]}"
        devices = ",".join(f"{start}:{number}" for number in numbers)
        lists = [",".join(numbers), ",".join(numbers), devices]
    ids, local_ids, local, *rest = map(_listed, lists)
    return _checked(
        mesh_proto(
            dims,
            global_device_ids=[_number(word, text) for word in ids],
            local_device_ids=[_number(word, text) for word in local_ids],
            local_devices=local,
            global_devices=rest[0] if rest else (),
            name=name,
            use_xla_spmd=use_xla_spmd,
        )
    )


def _listed(part: str) -> list[str]:
    return part.split(",") if part else []


def _number(word: str, text: str) -> int:
    try:
        return int(word)
    except ValueError as error:
        raise MeshError(
            f"cannot read the mesh {text!r}: {word!r} is not a whole number"
        ) from error


def layout_text(layout: Any) -> str:
    """Write `sharding_specs:x,unsharded, mesh:…`: a comma after each word."""
    words = "".join(f"{word}," for word in words_in(layout))
    return f"sharding_specs:{words} mesh:{mesh_text(layout.mesh_config)}"


def read_layout_text(text: str) -> Any:
    """Read what `layout_text` wrote, as a `LayoutProto`."""
    parts = re.fullmatch(r"sharding_specs:([^ ]*) mesh:([^ ]*)", text)
    if parts is None:
        raise LayoutError(
            f'cannot read the layout {text!r}; it must be "sharding_specs:x,unsharded, '
            'mesh:" and the text of a mesh'
        )
    words, mesh = parts.groups()
    *listed, last = words.split(",")
    problem = ""
    if last:
        fix = f"write {words + ','!r}"
        problem = f"there is no comma after its last dim, {last!r}; {fix}"
    elif "" in listed:
        problem = f"the word of dim {listed.index('')} is empty; write {UNSHARDED!r}"
    if problem:
        raise LayoutError(f"cannot read the layout {text!r}: {problem}")
    return layout_proto(listed, read_mesh_text(mesh))
