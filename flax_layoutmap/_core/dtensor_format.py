"""DTensor's text, bytes and protos, to and from plain records.

The formats are those of TensorFlow's `tensorflow/dtensor/proto/layout.proto` and of
`Layout.to_string()` and `Mesh.to_string()`, checked against TensorFlow 2.21. One
extension: a dim on several mesh axes is written `x+y`.
"""

import functools
import math
from collections.abc import Collection, Sequence
from types import EllipsisType
from typing import Any, NamedTuple

from flax_layoutmap._core.errors import LayoutError, MeshError

# DTensor's words for a dim that no axis shards, and for one that stays as it is.
UNSHARDED = "unsharded"
MATCH = "match"

_STATIC = 1  # LayoutProto.LayoutType; older protos do not have the field.
_XLA = "use_xla_spmd"


class MeshRecord(NamedTuple):
    """What DTensor writes of a mesh."""

    dims: tuple[tuple[str, int], ...]  # name and size of each axis
    global_ids: tuple[int, ...]  # numbers of the places, row-major
    local_ids: tuple[int, ...] = ()  # those of this process
    local_devices: tuple[str, ...] = ()  # one for each of `local_ids`
    global_devices: tuple[str, ...] = ()  # of all processes, or empty
    name: str = ""
    use_xla_spmd: bool = False  # whether XLA, not DTensor, partitions


class LayoutRecord(NamedTuple):
    """What DTensor writes of a layout: a word for each dim, and the mesh."""

    words: tuple[str, ...]
    mesh: MeshRecord


# ---------------------------------------------------------------------- words


def word_of(dim: None | str | tuple[str, ...] | EllipsisType) -> str:
    """DTensor's word for one dim; several axes are joined by `+`."""
    assert dim is not ...
    if dim is None:
        return UNSHARDED
    return dim if isinstance(dim, str) else "+".join(dim)


def dim_of(
    word: str, names: Collection[str], strict: bool = False
) -> None | str | tuple[str, ...]:
    """The dim that a word stands for, on a mesh with these axes."""
    if word == UNSHARDED:
        return None
    if word == MATCH and MATCH in names:
        raise LayoutError(
            f"the word {MATCH!r} has two meanings on a mesh with an axis {MATCH!r}; "
            "use another name for the axis"
        )
    if word in names or "+" not in word:
        return word
    if strict:
        raise LayoutError(
            f"the dim {word!r} is on several mesh axes, which DTensor cannot read; "
            "leave out strict=True"
        )
    return tuple(word.split("+"))


def words_of(dims: Sequence[Any], names: Collection[str]) -> tuple[str, ...]:
    """DTensor's words for the dims of a layout."""
    words = tuple(map(word_of, dims))
    for word, dim in zip(words, dims, strict=True):
        if dim_of(word, names) != dim:
            raise LayoutError(
                f"DTensor's word {word!r} would not be read back as the dim {dim!r}; "
                "use other names for the mesh axes"
            )
    return words


# ----------------------------------------------------------------------- text


def mesh_to_text(mesh: MeshRecord) -> str:
    """Write `name|x=3,y=2|global ids|local ids|local devices[|global devices][|…]`."""
    parts = [
        mesh.name,
        ",".join(f"{name}={size}" for name, size in mesh.dims),
        ",".join(map(str, mesh.global_ids)),
        ",".join(map(str, mesh.local_ids)),
        ",".join(mesh.local_devices),
    ]
    if mesh.global_devices:
        parts.append(",".join(mesh.global_devices))
    if mesh.use_xla_spmd:
        parts.append(_XLA)
    for name in (mesh.name, *(name for name, _ in mesh.dims)):
        if any(character in "|,= " for character in name):
            raise MeshError(
                f"DTensor's text cannot hold the name {name!r} (one of '|', ',', '=' "
                "or a space is in it); use as_proto()"
            )
    return "|".join(parts)


def mesh_from_text(text: str) -> MeshRecord:
    """Read what `mesh_to_text` wrote, and DTensor's short form `name|x=2|*CPU`."""
    parts = text.split("|")
    use_xla_spmd = len(parts) > 5 and parts[-1] == _XLA
    if use_xla_spmd:
        parts.pop()
    if len(parts) == 3 and parts[2].startswith("*"):
        return _generated(parts, text)
    if len(parts) not in (5, 6):
        raise MeshError(
            f"cannot read the mesh {text!r}: it has {len(parts)} parts between bars, "
            "not name|x=3,y=2|global ids|local ids|local devices[|global devices]"
        )
    name, dims, global_ids, local_ids, local_devices, *rest = parts
    return _checked(
        MeshRecord(
            _dims_in(dims, text),
            _ids_in(global_ids, text),
            _ids_in(local_ids, text),
            _listed(local_devices),
            _listed(rest[0]) if rest else (),
            name,
            use_xla_spmd,
        )
    )


def _generated(parts: list[str], text: str) -> MeshRecord:
    """The devices 0, 1, … of one kind."""
    dims = _dims_in(parts[1], text)
    ids = tuple(range(math.prod(size for _, size in dims)))
    start = f"/job:localhost/task:0/device:{parts[2][1:]}"
    return _checked(
        MeshRecord(dims, ids, ids, tuple(f"{start}:{at}" for at in ids), name=parts[0])
    )


def _listed(part: str) -> tuple[str, ...]:
    return tuple(part.split(",")) if part else ()


def _dims_in(part: str, text: str) -> tuple[tuple[str, int], ...]:
    pairs = (entry.partition("=") for entry in _listed(part))
    return tuple((name, _number(size, text)) for name, _, size in pairs)


def _ids_in(part: str, text: str) -> tuple[int, ...]:
    return tuple(_number(entry, text) for entry in _listed(part))


def _number(word: str, text: str) -> int:
    try:
        return int(word)
    except ValueError as error:
        raise MeshError(
            f"cannot read the mesh {text!r}: {word!r} is no whole number"
        ) from error


def _checked(mesh: MeshRecord) -> MeshRecord:
    """The same record; raises MeshError where its parts contradict each other."""
    places = math.prod(size for _, size in mesh.dims)
    first = mesh.global_ids[0] if mesh.global_ids else 0
    listed = mesh.global_devices
    if any(size < 1 for _, size in mesh.dims) or len(mesh.global_ids) != places:
        clash = f"there are {len(mesh.global_ids)} global ids for {places} places"
    elif mesh.global_ids != tuple(range(first, first + places)):
        clash = "the global ids do not go up by one"
    elif len(mesh.local_ids) != len(mesh.local_devices):
        clash = (
            f"there are {len(mesh.local_ids)} local ids for "
            f"{len(mesh.local_devices)} local devices"
        )
    elif len(set(mesh.local_ids) & set(mesh.global_ids)) != len(mesh.local_ids):
        clash = "the local ids are not different ones of the global ids"
    elif listed and len(listed) != places:
        clash = f"there are {len(listed)} global devices for {places} places"
    else:
        return mesh
    grid = ",".join(f"{name}={size}" for name, size in mesh.dims)
    raise MeshError(f"cannot read the mesh {grid!r}: {clash}")


def layout_to_text(layout: LayoutRecord) -> str:
    """Write `sharding_specs:x,unsharded, mesh:…`: a comma after each word."""
    words = "".join(f"{word}," for word in layout.words)
    return f"sharding_specs:{words} mesh:{mesh_to_text(layout.mesh)}"


def layout_from_text(text: str) -> LayoutRecord:
    """Read what `layout_to_text` wrote."""
    head, _, tail = text.partition(" ")
    named = head.startswith("sharding_specs:") and tail.startswith("mesh:")
    if not named or " " in tail:
        raise LayoutError(
            f"cannot read the layout {text!r}; it must be "
            '"sharding_specs:x,unsharded, mesh:" and the text of a mesh'
        )
    words = head.removeprefix("sharding_specs:")
    if words and not words.endswith(","):
        raise LayoutError(
            f"cannot read the layout {text!r}: there is no comma after its last dim, "
            f"{words.rpartition(',')[2]!r}; write {words + ','!r}"
        )
    listed = tuple(words.split(",")[:-1])
    if "" in listed:
        raise LayoutError(
            f"cannot read the layout {text!r}: the word of dim {listed.index('')} is "
            f"empty; write {UNSHARDED!r}"
        )
    return LayoutRecord(listed, mesh_from_text(tail.removeprefix("mesh:")))


# --------------------------------------------------------------------- protos

# The messages of TensorFlow's file, as a FileDescriptorProto in text format.
_FILE = """
name: "tensorflow/dtensor/proto/layout.proto"
package: "tensorflow.dtensor"
syntax: "proto3"
message_type {
  name: "ShardingSpec"
  field { name: "sharding_spec" number: 2 type: TYPE_STRING label: LABEL_OPTIONAL }
}
message_type {
  name: "MeshDimensionProto"
  field { name: "name" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
  field { name: "size" number: 2 type: TYPE_INT64 label: LABEL_OPTIONAL }
}
message_type {
  name: "MeshProto"
  field { name: "mesh_dimensions" number: 1 type: TYPE_MESSAGE label: LABEL_REPEATED
    type_name: ".tensorflow.dtensor.MeshDimensionProto" }
  field { name: "global_device_ids" number: 2 type: TYPE_INT64 label: LABEL_REPEATED }
  field { name: "name" number: 3 type: TYPE_STRING label: LABEL_OPTIONAL }
  field { name: "local_device_ids" number: 4 type: TYPE_INT64 label: LABEL_REPEATED }
  field { name: "local_devices" number: 5 type: TYPE_STRING label: LABEL_REPEATED }
  field { name: "global_devices" number: 6 type: TYPE_STRING label: LABEL_REPEATED }
  field { name: "use_xla_spmd" number: 7 type: TYPE_BOOL label: LABEL_OPTIONAL }
  field { name: "single_device" number: 8 type: TYPE_STRING label: LABEL_OPTIONAL }
}
message_type {
  name: "LayoutProto"
  field { name: "sharding_specs" number: 1 type: TYPE_MESSAGE label: LABEL_REPEATED
    type_name: ".tensorflow.dtensor.ShardingSpec" }
  field { name: "mesh_config" number: 2 type: TYPE_MESSAGE label: LABEL_OPTIONAL
    type_name: ".tensorflow.dtensor.MeshProto" }
  field { name: "type" number: 3 type: TYPE_ENUM label: LABEL_OPTIONAL
    type_name: ".tensorflow.dtensor.LayoutProto.LayoutType" }
  enum_type {
    name: "LayoutType"
    value { name: "UNKNOWN" number: 0 }
    value { name: "STATIC" number: 1 }
    value { name: "PARTED" number: 2 }
    value { name: "SINGLE_DEVICE" number: 3 }
  }
}
"""


@functools.cache
def _messages() -> dict[str, Any]:
    """Message name → class, in a pool of its own, apart from TensorFlow's."""
    from google.protobuf import (
        descriptor_pb2,
        descriptor_pool,
        message_factory,
        text_format,
    )

    file = text_format.Parse(_FILE, descriptor_pb2.FileDescriptorProto())
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    find = pool.FindMessageTypeByName
    return {
        message.name: message_factory.GetMessageClass(
            find(f"{file.package}.{message.name}")
        )
        for message in file.message_type
    }


def mesh_to_proto(mesh: MeshRecord) -> Any:
    """Make a `MeshProto`."""
    return _messages()["MeshProto"](
        mesh_dimensions=[{"name": name, "size": size} for name, size in mesh.dims],
        global_device_ids=mesh.global_ids,
        local_device_ids=mesh.local_ids,
        local_devices=mesh.local_devices,
        global_devices=mesh.global_devices,
        name=mesh.name,
        use_xla_spmd=mesh.use_xla_spmd,
    )


def mesh_from_proto(proto: Any) -> MeshRecord:
    """Read a `MeshProto`, ours, TensorFlow's or its bytes."""
    read = _parsed("MeshProto", proto, MeshError)
    if read.single_device:
        raise MeshError(
            f"the mesh is the single device {read.single_device!r}, without axes; use "
            'flm.DeviceMesh.from_dtensor([device], [("x", 1)])'
        )
    if not read.mesh_dimensions:
        raise MeshError("the proto is damaged: its mesh has no axes")
    return _checked(
        MeshRecord(
            tuple((dim.name, dim.size) for dim in read.mesh_dimensions),
            tuple(read.global_device_ids),
            tuple(read.local_device_ids),
            tuple(read.local_devices),
            tuple(read.global_devices),
            read.name,
            read.use_xla_spmd,
        )
    )


def layout_to_proto(layout: LayoutRecord) -> Any:
    """Make a `LayoutProto`."""
    return _messages()["LayoutProto"](
        sharding_specs=[{"sharding_spec": word} for word in layout.words],
        mesh_config=mesh_to_proto(layout.mesh),
        type=_STATIC,
    )


def layout_from_proto(proto: Any) -> LayoutRecord:
    """Read a `LayoutProto`, ours, TensorFlow's or its bytes."""
    read = _parsed("LayoutProto", proto, LayoutError)
    if read.type > _STATIC:
        types = read.DESCRIPTOR.enum_types_by_name["LayoutType"].values_by_number
        kind = types[read.type].name if read.type in types else read.type
        raise LayoutError(
            f"a layout of type {kind} has no meaning here; only STATIC ones are read"
        )
    words = tuple(spec.sharding_spec for spec in read.sharding_specs)
    if not read.HasField("mesh_config") or "" in words:
        missing = "a dim is without its word" if "" in words else "it has no mesh"
        raise LayoutError(f"the layout's proto is damaged: {missing}")
    return LayoutRecord(words, mesh_from_proto(read.mesh_config))


def _parsed(name: str, proto: Any, error: type[LayoutError]) -> Any:
    """A message of our own class, of the same bytes."""
    from google.protobuf.message import DecodeError, Message

    message = _messages()[name]()
    if isinstance(proto, type(message)):
        return proto
    if isinstance(proto, Message) and proto.DESCRIPTOR.name == name:
        proto = proto.SerializeToString()
    if not isinstance(proto, bytes):
        raise error(f"not a {name}: {proto!r}")
    try:
        message.ParseFromString(proto)
    except DecodeError as cause:
        raise error(
            f"these {len(proto)} bytes are no {name}, or not all of it"
        ) from cause
    return message
