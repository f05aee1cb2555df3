"""Write `dtensor_*.json`: the results of TensorFlow's own DTensor, for the tests.

Run by hand, where TensorFlow is installed; the tests themselves need only the files:

    python tests/golden/make_dtensor.py

Each line of a file is one vector. A result of null: the original raised. Calls that end
the process in TensorFlow 2.21 (`num_shards` out of range, `batch_sharded` with a
negative axis or rank 0, a mesh text with an axis without `=`) are not made.
`serialized_string` and `mesh_proto` are the bytes of `as_proto`.
"""

import importlib
import itertools
import json
import os
import pickle
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
sys.path.insert(0, str(Path(__file__).parents[2]))

from flax_layoutmap._core import dtensor_format as ours

# Not by `import`: the project is checked where there is no TensorFlow.
tf: Any = importlib.import_module("tensorflow")
layout_pb2: Any = importlib.import_module("tensorflow.dtensor.proto.layout_pb2")
dtensor: Any = tf.experimental.dtensor

HERE = Path(__file__).parent
U, MATCH = dtensor.UNSHARDED, dtensor.MATCH
Dims = list[tuple[str, int]]
Vector = dict[str, Any]

CHOSEN_MESHES: list[Dims] = [
    [("x", 3), ("y", 2)],
    [("x", 1)],
    [("x", 8)],
    [("x", 2), ("y", 4)],
    [("x", 4), ("y", 2)],
    [("x", 1), ("y", 4)],
    [("x", 4), ("y", 1)],
    [("x", 1), ("y", 1)],
    [("a", 2), ("b", 2), ("c", 2)],
    [("a", 1), ("b", 2), ("c", 3)],
    [("a", 2), ("b", 4), ("c", 2)],
    [("batch", 2), ("model", 3), ("z", 4)],
]


def attempt(call: Callable[[], Any]) -> Any:
    """The result, or None where the original raises."""
    try:
        return call()
    except Exception:  # Of any kind: TensorFlow raises eight different ones here.
        return None


def mesh_of(dims: Dims, name: str = "") -> Any:
    count = int(np.prod([size for _, size in dims]))
    devices = [f"CPU:{at}" for at in range(count)]
    return dtensor.create_mesh(dims, mesh_name=name, devices=devices)


def hex_of(message: Any) -> str:
    return message.SerializeToString(deterministic=True).hex()


def mesh_vector(dims: Dims, name: str = "") -> Vector:
    mesh = mesh_of(dims, name)
    size = mesh.size
    places = mesh.unravel_index()
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    return {
        "dims": dims,
        "name": name,
        "text": mesh.to_string(),
        "proto": hex_of(mesh.as_proto()),
        "dim_names": list(mesh.dim_names),
        "shape": list(mesh.shape()),
        "size": size,
        "strides": list(mesh.strides),
        "coords": [mesh.coords(at).numpy().tolist() for at in range(size + 2)],
        "unravel": [list(places[at].values()) for at in range(size)],
        "local_ids": list(mesh.local_device_ids()),
        "locations": [list(at.values()) for at in mesh.local_device_locations()],
        "contains": [name for name in "abcxyz" if mesh.contains_dim(name)],
        "sizes": [mesh.dim_size(name) for name in mesh.dim_names],
        "unknown_dim_size": attempt(lambda: mesh.dim_size("unknown")),
        "device_type": mesh.device_type(),
    }


def short(text: str, mesh: str) -> str:
    """The text with that of the mesh at its end cut off."""
    assert text.endswith(mesh)
    return text.removesuffix(mesh)


def layout_vector(dims: Dims, specs: list[str]) -> Vector:
    mesh = mesh_of(dims)
    layout = dtensor.Layout(specs, mesh)
    rank, text = layout.rank, layout.to_string()
    bytes_of_mesh = hex_of(mesh.as_proto())
    proto = hex_of(layout.as_proto())
    assert proto.count(bytes_of_mesh) == 1
    assert (
        dtensor.Layout.from_string(text) == layout == pickle.loads(pickle.dumps(layout))
    )
    assert dtensor.Layout.from_proto(layout.as_proto()) == layout
    check_together(layout)
    offsets = attempt(layout.offset_to_shard)
    vector: Vector = {
        "dims": dims,
        "specs": specs,
        "rank": rank,
        "shape": list(layout.shape),
        "text": short(text, mesh.to_string()),
        "proto": proto.replace(bytes_of_mesh, "{mesh}"),
        "num_shards": [layout.num_shards(dim) for dim in range(rank)],
        "offsets": offsets,
        "indices": offsets
        and [layout.offset_tuple_to_global_index(o) for o in offsets],
        "fully_replicated": layout.is_fully_replicated(),
        "batch_parallel": layout.is_batch_parallel(),
        "delete": [
            [gone, list(layout.delete(gone).sharding_specs)]
            for gone in (*range(rank), list(range(rank)), list(range(0, rank, 2)))
        ],
    }
    if MATCH not in specs:
        local = [(3, 1, 5, 2)[dim] for dim in range(rank)]
        whole = list(layout.global_shape_from_local_shape(local))
        uneven = [size + 1 for size in whole]
        vector["local_to_global"] = [local, whole]
        vector["global_to_local"] = [
            [shape, list(layout.local_shape_from_global_shape(shape))]
            for shape in (whole, uneven)
        ]
    return vector


def check_together(layout: Any) -> None:
    """Each side reads the other's messages, both in one process."""
    text, proto = layout.to_string(), layout.as_proto()
    read = ours.read_layout_text(text)
    assert ours.read_layout_proto(proto) == read and ours.layout_text(read) == text
    written = read.SerializeToString()
    assert layout_pb2.LayoutProto.FromString(written) == proto
    again = dtensor.Layout.from_proto(layout_pb2.LayoutProto.FromString(written))
    assert again == layout


def some_layouts(random_: random.Random) -> Iterable[Vector]:
    for dims in CHOSEN_MESHES:
        names = [name for name, _ in dims]
        for rank in (0, 1, 2):
            for specs in itertools.product([U, *names], repeat=rank):
                used = [spec for spec in specs if spec != U]
                if len(set(used)) == len(used):
                    yield layout_vector(dims, list(specs))
    for specs in ([MATCH], [MATCH, U], ["x", MATCH], [MATCH, "y"]):
        yield layout_vector(CHOSEN_MESHES[0], specs)
    for _ in range(160):
        dims = random_mesh(random_)
        rank = random_.choice((2, 3, 3, 4, 4))
        specs = [name for name, _ in dims if random_.random() < 0.7][:rank]
        specs += [U] * (rank - len(specs))
        random_.shuffle(specs)
        yield layout_vector(dims, specs)


def random_mesh(random_: random.Random) -> Dims:
    while True:
        names = random_.sample(["a", "b", "data", "model", "x_1", "Y"], 3)
        dims = [(n, random_.randint(1, 6)) for n in names[: random_.randint(1, 3)]]
        if np.prod([size for _, size in dims]) <= 24:
            return dims


def some_refusals() -> Iterable[Vector]:
    """What the constructors say to wrong and to right values."""
    dims = CHOSEN_MESHES[0]
    mesh = mesh_of(dims)
    for specs in (
        ["x", "x"],
        ["z"],
        ["x", "z"],
        [U, ""],
        ["x", "y"],
        ["x+y"],
        [MATCH, "y", MATCH],
    ):
        made = attempt(lambda specs=specs: dtensor.Layout(specs, mesh))
        yield {"dims": dims, "specs": specs, "made": made and made.sharding_specs}


def some_factories() -> Iterable[Vector]:
    for dims in (*CHOSEN_MESHES[:2], CHOSEN_MESHES[9]):
        mesh = mesh_of(dims)
        calls: list[tuple[str, list[Any]]] = [
            ("replicated", [rank]) for rank in range(5)
        ]
        for name in [*(name for name, _ in dims), "unknown"]:
            for rank in range(1, 5):
                calls += [("inner_sharded", [name, rank])]
                calls += [("batch_sharded", [name, rank])]
                calls += [("batch_sharded", [name, rank, a]) for a in range(rank)]
        for method, arguments in calls:
            maker = getattr(dtensor.Layout, method)
            made = attempt(lambda: maker(mesh, *arguments))  # noqa: B023
            yield {
                "dims": dims,
                "method": method,
                "arguments": arguments,
                "specs": made and list(made.sharding_specs),
            }


def some_texts() -> Iterable[Vector]:
    long = "/job:localhost/replica:0/task:0/device"
    two = f"{long}:TPU:0,{long}:TPU:1"
    meshes = [
        f"|x=2|0,1|0,1|{two}",
        f"nm|x=2|0,1|0,1|{two}",
        f"|x=2|4,5|4,5|{two}",
        f"|x=1,y=2|0,1|1|{long}:TPU:1|{two}",
        f"|x=2|0,1|0,1|{two}|use_xla_spmd",
        f"|x=2|0,1|0,1|{two}|{two}|use_xla_spmd",
        f"|x=2|0,1|||{two}",
        "|x=2|0,1||",
        "nm|x=2,y=2|*TPU",
        "|x=3|*CPU",
        "",
        "EMPTY",
        "|x=2",
        "|x=2|0,1",
        "|x=2|0,1|0,1",
        f"|x=2|0,1|0,1|{two}|{two}|use_xla_spmd|more",
        f"|x=3|0,1|0,1|{two}",
        f"|x=-2|0,1|0,1|{two}",
        f"|x=a|0,1|0,1|{two}",
        f"|x=2|0,b|0,1|{two}",
        f"|x=2|1,0|0,1|{two}",
        f"|x=2|0,1|0|{two}",
        f"|x=2|0,1|0,7|{two}",
    ]
    for text in meshes:
        made = attempt(lambda text=text: dtensor.Mesh.from_string(text))
        yield {
            "kind": "mesh",
            "text": text,
            "again": made and made.to_string(),
            "proto": made and hex_of(made.as_proto()),
        }
    mesh = mesh_of([("x", 2), ("y", 2)]).to_string()
    layouts = [
        f"sharding_specs:x,y, mesh:{mesh}",
        f"sharding_specs: mesh:{mesh}",
        f"sharding_specs:unsharded, mesh:{mesh}",
        f"sharding_specs:match,y, mesh:{mesh}",
        f"sharding_specs:batch,x, mesh:{mesh.replace('y=', 'batch=')}",
        f"sharding_specs:unsharded,unsharded, mesh:{mesh}",
        f"sharding_specs:x,unsharded mesh:{mesh}",
        f"sharding_specs:x mesh:{mesh}",
        f"sharding_specs:x,,y, mesh:{mesh}",
        f"sharding_specs:z, mesh:{mesh}",
        f"sharding_specs:x,x, mesh:{mesh}",
        f"sharding_specs:x+y, mesh:{mesh}",
        f"sharding_specs:x, mesh:{mesh} ",
        f"sharding_specs:x,  mesh:{mesh}",
        "sharding_specs:x, mesh:EMPTY",
        "sharding_specs:x,",
        f"mesh:{mesh}",
        "",
        f"parted:x,unsharded, mesh:{mesh}",
        f"maximal:true, mesh:{long}:CPU:0",
    ]
    for text in layouts:
        made = attempt(lambda text=text: dtensor.Layout.from_string(text))
        again = made and made.to_string()
        # The same bytes as in the generation before 2.21, which has no field `type`.
        older = None
        if made is not None:
            proto: Any = layout_pb2.LayoutProto.FromString(
                made.as_proto().SerializeToString()
            )
            proto.ClearField("type")
            older = hex_of(proto)
        yield {"kind": "layout", "text": text, "again": again, "older": older}


def some_components() -> Iterable[Vector]:
    """What each device of a mesh holds of `arange(n).reshape(shape)`."""
    cases: list[tuple[Dims, list[str], list[int]]] = [
        ([("x", 3), ("y", 2)], ["x", U], [3, 2]),  # The page's own table.
        ([("x", 3), ("y", 2)], ["x", "y"], [3, 4]),
        ([("x", 3), ("y", 2)], ["y", "x"], [2, 6]),
        ([("x", 3), ("y", 2)], [U, "y"], [3, 2]),
        ([("x", 3), ("y", 2)], [U, U], [3, 2]),
        ([("x", 6)], [U], [6]),
        ([("x", 6)], ["x"], [6]),
        ([("x", 2), ("y", 4)], ["y", U, "x"], [4, 3, 2]),
        ([("a", 2), ("b", 2), ("c", 2)], ["a", "c"], [2, 4]),
        ([("a", 2), ("b", 2), ("c", 2)], ["c", "b", "a"], [2, 2, 2]),
        ([("a", 2), ("b", 1), ("c", 3)], ["b", "c"], [4, 3]),
        ([("x", 2), ("y", 2)], [], []),
    ]
    for dims, specs, shape in cases:
        values = np.arange(int(np.prod(shape))).reshape(shape)
        layout = dtensor.Layout(specs, mesh_of(dims))
        placed = dtensor.relayout(tf.constant(values), layout)
        held = [part.numpy().tolist() for part in dtensor.unpack(placed)]
        yield {"dims": dims, "specs": specs, "shape": shape, "components": held}


def write(name: str, vectors: Iterable[Vector]) -> None:
    lines = [json.dumps(vector, separators=(",", ":")) for vector in vectors]
    text = "[\n" + ",\n".join(lines) + "\n]\n"
    (HERE / f"dtensor_{name}.json").write_text(text, encoding="utf-8")
    print(f"dtensor_{name}.json: {len(lines)} vectors, {len(text) >> 10} KiB")


def main() -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    virtual = [tf.config.LogicalDeviceConfiguration()] * 32
    tf.config.set_logical_device_configuration(cpu, virtual)
    random_ = random.Random(0)
    named = [mesh_vector([("x", 2)], "host"), mesh_vector([("x", 1), ("y", 3)], "m")]
    drawn = [mesh_vector(random_mesh(random_)) for _ in range(12)]
    write("meshes", [*map(mesh_vector, CHOSEN_MESHES), *named, *drawn])
    write("layouts", some_layouts(random_))
    write("refusals", some_refusals())
    write("factories", some_factories())
    write("texts", some_texts())
    write("components", some_components())


if __name__ == "__main__":
    main()
