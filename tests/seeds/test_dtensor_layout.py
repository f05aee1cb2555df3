"""TensorLayout as DTensor's `Layout`: its words, members, text and bytes."""

import math
import operator
import pickle
import re
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from vectors import (
    Difference,
    Vector,
    check,
    differing,
    load,
    mesh_of,
    or_refused,
    refused,
)

import flax_layoutmap as flm
from flax_layoutmap._core import dtensor_format

# ------------------------------------------------------------ UNSHARDED and MATCH

MATCH, UNSHARDED = flm.TensorLayout.MATCH, flm.TensorLayout.UNSHARDED


def test_unsharded_is_none(mesh: flm.DeviceMesh) -> None:
    assert (UNSHARDED, MATCH) == ("unsharded", "match")
    layout = flm.TensorLayout((UNSHARDED, "model"), mesh)
    assert layout == flm.TensorLayout((None, "model"), mesh)
    assert flm.TensorLayout([UNSHARDED]) == flm.TensorLayout([None])


def test_match_is_no_axis(mesh: flm.DeviceMesh) -> None:
    layout = flm.TensorLayout((MATCH, "model", MATCH), mesh)
    assert layout.axes == ("match", "model", "match")
    assert layout.axis_names == ("model",)
    assert layout.has_match and not flm.TensorLayout(("model",), mesh).has_match
    assert not flm.TensorLayout((MATCH, None), mesh).is_replicated
    assert layout.on(None).on(mesh) == layout


@pytest.mark.parametrize(
    ("axes", "dims", "expected"),
    [
        ((MATCH, "model"), [("data",), ()], ("data", "model")),
        ((MATCH, "model"), [(), ("data",)], (None, "model")),
        ((MATCH, None), [("data", "model"), ()], (("data", "model"), None)),
        ((..., MATCH), [(), ("data",), ("model",)], (None, None, "model")),
        ((MATCH, ...), [("data",)], ("data",)),
        ((MATCH, MATCH), [("model",), ("data",)], ("model", "data")),
    ],
)
def test_matched(axes: Any, dims: Any, expected: Any, mesh: flm.DeviceMesh) -> None:
    layout = flm.TensorLayout(axes, mesh, memory_kind="pinned_host")
    matched = layout.matched(dims)
    assert matched == flm.TensorLayout(expected, mesh, memory_kind="pinned_host")
    assert matched.matched([]) is matched  # Nothing is left to match.


def test_match_is_known_to_an_array_only(mesh: flm.DeviceMesh) -> None:
    layout = flm.TensorLayout((MATCH, "model"), mesh)
    for use in (layout.spec, layout.sharding, lambda: layout.shard_shape((8, 8))):
        with pytest.raises(flm.LayoutError, match="has a MATCH dim, which only"):
            use()
    with pytest.raises(flm.errors.RuleError, match="MATCH dim, which only relayout"):
        flm.LayoutMap(mesh)["kernel"] = (MATCH, "model")


# ------------------------------------------------------ against TensorFlow's answers


def layout_of(vector: Vector) -> flm.TensorLayout:
    mesh = mesh_of(vector)
    if not vector["specs"]:  # `()` would be any rank.
        return flm.TensorLayout.replicated(mesh, 0)
    return flm.TensorLayout(vector["specs"], mesh)


def proto_of(vector: Vector) -> Any:
    """What DTensor writes of a layout, also where there are too few devices."""
    ids = range(mesh_of(vector).size)
    mesh = dtensor_format.mesh_proto(
        vector["dims"],
        global_device_ids=ids,
        local_device_ids=ids,
        local_devices=[
            f"/job:localhost/replica:0/task:0/device:CPU:{at}" for at in ids
        ],
    )
    return dtensor_format.layout_proto(vector["specs"], mesh)


def per_shape(layout: flm.TensorLayout, vector: Vector) -> list[Any]:
    return [
        [shape, or_refused(lambda s=shape: layout.local_shape_from_global_shape(s))]
        for shape, _ in vector["global_to_local"]
    ]


def exact(vector: Vector) -> list[Any]:
    """Their local shapes, but for global shapes that do not divide."""
    counts = vector["num_shards"]
    return [
        [shape, None if any(map(operator.mod, shape, counts)) else local]
        for shape, local in vector["global_to_local"]
    ]


MEMBERS: dict[str, Any] = {
    "rank": lambda layout, _: layout.rank,
    "specs": lambda layout, _: layout.sharding_specs,
    "shape": lambda layout, _: layout.shape,
    "num_shards": lambda layout, v: [layout.num_shards(d) for d in range(v["rank"])],
    "offsets": lambda layout, _: layout.offset_to_shard(),
    "indices": lambda layout, _: [
        layout.offset_tuple_to_global_index(at) for at in layout.offset_to_shard()
    ],
    "fully_replicated": lambda layout, _: layout.is_fully_replicated(),
    "batch_parallel": lambda layout, _: layout.is_batch_parallel(),
    "delete": lambda layout, v: [
        [gone, layout.delete(gone).sharding_specs] for gone, _ in v["delete"]
    ],
    "local_to_global": lambda layout, v: [
        v["local_to_global"][0],
        layout.global_shape_from_local_shape(v["local_to_global"][0]),
    ],
    "global_to_local": per_shape,
}


def matches(vector: Vector) -> bool:
    return MATCH in vector["specs"]


UNKNOWN = "only an array knows what a MATCH dim lies on"
DIFFERENT = {
    "shape": Difference(
        "as documented: shards along each dim; 2.21 gives the shape of the mesh",
        where=lambda v: not matches(v) and v["shape"] != v["num_shards"],
        ours=lambda v: v["num_shards"],
    ),
    "fully_replicated": Difference(
        "as documented: an axis of size 1 shards nothing; 2.21 looks for names",
        where=lambda v: (
            not (matches(v) or v["fully_replicated"])
            and math.prod(v["num_shards"]) == 1
        ),
        ours=lambda v: True,
    ),
    "global_to_local": Difference(
        "a dim that does not divide; the original rounds down",
        where=lambda v: "global_to_local" in v and exact(v) != v["global_to_local"],
        ours=exact,
    ),
    "shape:match": Difference(UNKNOWN, matches, refused),
    "num_shards:match": Difference(UNKNOWN, matches, refused),
    "fully_replicated:match": Difference(UNKNOWN, matches, refused),
    "batch_parallel:match": Difference(UNKNOWN, matches, refused),
}


def test_members() -> None:
    vectors = load("layouts")
    assert len(vectors) > 300
    assert {vector["rank"] for vector in vectors} == {0, 1, 2, 3, 4}
    check(vectors, layout_of, MEMBERS, DIFFERENT)


def test_text_and_bytes() -> None:
    """Also of more devices than there are here."""
    for vector in load("layouts"):
        proto, layout = proto_of(vector), layout_of(vector)
        mesh = proto.mesh_config
        text = f"{vector['text']}{dtensor_format.mesh_text(mesh)}"
        written = vector["proto"].replace("{mesh}", mesh.SerializeToString().hex())
        assert proto.SerializeToString().hex() == written
        assert dtensor_format.layout_text(proto) == text
        assert flm.TensorLayout.from_string(text) == layout
        assert flm.TensorLayout.from_str(bytes.fromhex(written)) == layout
        if layout.mesh and not layout.mesh.is_abstract:
            assert layout.as_proto() == proto and layout.to_string() == text
            assert layout.serialized_string().hex() == written


def test_constructor() -> None:
    different = {
        "made": Difference(
            "2.21 takes the word MATCH for an axis that is used twice",
            where=lambda v: v["specs"].count(MATCH) == 2,
            ours=lambda v: v["specs"],
        )
    }
    made = {
        "made": lambda _, v: flm.TensorLayout(v["specs"], mesh_of(v)).sharding_specs
    }
    check(load("refusals"), lambda v: None, made, different)


def test_factories() -> None:
    def made(_: None, v: Vector) -> list[str]:
        factory = getattr(flm.TensorLayout, v["method"])
        return factory(mesh_of(v), *v["arguments"]).sharding_specs

    vectors = load("factories")
    assert len(vectors) > 150
    check(vectors, lambda v: None, {"specs": made}, {})


def test_texts() -> None:
    """As in TensorFlow, where a missing comma drops a dim without a word.

    There is nothing for a layout of its own compilers, nor for a device without axes;
    a dim on several axes is our extension.
    """
    members = {
        "again": lambda _, v: flm.TensorLayout.from_string(v["text"]).to_string()
    }
    vectors = [vector for vector in load("texts") if vector["kind"] == "layout"]
    answers = [*differing(vectors, members)]
    for vector, _, answer in answers:
        if answer is None:
            assert re.search("[^,: ] mesh:|^parted:|^maximal:", vector["text"])
        else:
            assert "x+y" in vector["text"] and answer == vector["text"]
    assert (len(vectors), len(answers)) == (20, 5)


def test_bytes_of_before_there_was_a_type() -> None:
    read = 0
    for vector in load("texts"):
        older = vector.get("older")
        if older and vector["text"].startswith("sharding_specs:"):
            layout = flm.TensorLayout.from_str(bytes.fromhex(older))
            assert layout.to_string() == vector["again"]
            read += 1
    assert read == 8


def test_components() -> None:
    """What each device holds of an array."""
    for vector in load("components"):
        layout, shape = layout_of(vector), vector["shape"]
        values = np.arange(math.prod(shape)).reshape(shape)
        array = jax.device_put(values, layout.sharding(len(shape)))
        parts = [part.tolist() for part in flm.dtensor.unpack(array)]
        assert parts == vector["components"], vector


# ---------------------------------------------------------------- one by one

SIX = flm.DeviceMesh.from_dtensor(
    ["CPU:0", "CPU:1", "CPU:2", "CPU:3", "CPU:4", "CPU:5"], [("x", 3), ("y", 2)]
)
ROWS = flm.TensorLayout(("x", UNSHARDED), SIX)


def test_rank_0_is_neither_one_dim_nor_any_rank() -> None:
    scalar = flm.TensorLayout.replicated(SIX, 0)
    one = flm.TensorLayout.replicated(SIX, 1)
    every = flm.TensorLayout((), SIX)
    assert (scalar.rank, one.rank, every.rank) == (0, 1, None)
    assert len({scalar, one, every}) == 3
    assert scalar.dims(0) == () and scalar.spec() == one.spec()
    with pytest.raises(flm.LayoutError, match="has 0 dims, the array has 1"):
        scalar.spec(1)
    assert ROWS.delete([0, 1]) == scalar == flm.TensorLayout(scalar)
    assert repr(scalar.on(None)) == "TensorLayout.replicated(None, 0)"
    assert scalar.on(None).on(SIX) == scalar == pickle.loads(pickle.dumps(scalar))
    assert pickle.loads(pickle.dumps(every)) == every
    assert scalar.on_host().on(None).memory_kind == "pinned_host"


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: ROWS.num_shards(2), "has dims -2 to 1, got dim 2"),
        (lambda: ROWS.delete([0, 7]), "has dims -2 to 1, got dim 7"),
        (lambda: ROWS.delete([0, 1]).delete(0), "has no dims, got dim 0"),
        (lambda: flm.TensorLayout.replicated(SIX, -1), "rank must be 0 or more, got"),
        (lambda: flm.TensorLayout.batch_sharded(SIX, "x", 0), "no dims, got dim 0"),
        (lambda: flm.TensorLayout.batch_sharded(SIX, "x", 2, 2), "-2 to 1, got dim 2"),
        (lambda: flm.TensorLayout.inner_sharded(SIX, "x", 0), "no dims, got dim -1"),
        (lambda: flm.TensorLayout.batch_sharded(SIX, "z", 2), "no such axis"),
        (lambda: ROWS.offset_tuple_to_global_index((0,)), "so none at (0,)"),
        (lambda: ROWS.offset_tuple_to_global_index((3, 0)), "so none at (3, 0)"),
        (lambda: ROWS.offset_tuple_to_global_index((-1, 0)), "so none at (-1, 0)"),
        (lambda: ROWS.local_shape_from_global_shape((5, 2)), "is not divisible"),
        (lambda: ROWS.local_shape_from_global_shape((6,)), "the array has 1"),
        (lambda: ROWS.global_shape_from_local_shape((1,)), "the array has 1"),
    ],
)
def test_out_of_bounds(use: Any, message: str) -> None:
    with pytest.raises(flm.LayoutError) as caught:
        use()
    assert message in str(caught.value)


def test_counting_from_the_end() -> None:
    layout = flm.TensorLayout(("x", None, "y"), SIX, memory_kind="pinned_host")
    for dims in (-1, 2, [2], (-1,), [2, -1], np.int64(2)):
        left = flm.TensorLayout(("x", None), SIX, memory_kind="pinned_host")
        assert layout.delete(dims) == left
    assert layout.delete([]) == layout
    plain = flm.TensorLayout.batch_sharded
    assert plain(SIX, "x", 3, -2) == plain(SIX, "x", 3, 1)
    assert flm.TensorLayout.inner_sharded(SIX, "y", 1) == flm.TensorLayout(("y",), SIX)


def test_what_needs_the_rank_or_a_mesh() -> None:
    def error_of(layout: flm.TensorLayout, name: str, *arguments: Any) -> str:
        with pytest.raises(flm.LayoutError) as caught:
            member = getattr(layout, name)
            member(*arguments)
        return str(caught.value)

    for axes in ((), (..., "x"), ("x", ...)):
        layout = flm.TensorLayout(axes, SIX)
        for name in ("shape", "is_batch_parallel", "offset_to_shard", "to_string"):
            assert "leaves the rank open, and this needs" in error_of(layout, name)
        assert "leaves the rank open" in error_of(layout, "delete", 0)
    layout = flm.TensorLayout(("x", None))
    for name in ("shape", "is_fully_replicated", "offset_to_shard", "mesh_proto"):
        assert "has no mesh, which this needs; give one" in error_of(layout, name)
    assert layout.mesh is None and layout.sharding_specs == ["x", "unsharded"]
    assert layout.is_batch_parallel()


def test_what_needs_no_rank() -> None:
    assert flm.TensorLayout((), SIX).is_fully_replicated()
    assert flm.TensorLayout(()).is_fully_replicated()
    assert not flm.TensorLayout((..., "x"), SIX).is_fully_replicated()
    one = flm.DeviceMesh.abstract("x=1,y=2")
    assert flm.TensorLayout(("x", ...), one).is_fully_replicated()
    layout = flm.TensorLayout(("x", ..., "y"), SIX)
    assert layout.global_shape_from_local_shape((1, 5, 1)) == (3, 5, 2)
    assert layout.mesh_proto() == SIX.as_proto()


# ------------------------------------------------------- several axes on one dim


def test_several_axes_are_an_extension() -> None:
    layout = flm.TensorLayout((("y", "x"), None), SIX)
    assert layout.sharding_specs == ["y+x", "unsharded"]
    assert layout.to_string().startswith("sharding_specs:y+x,unsharded, mesh:|x=3,y=2|")
    assert flm.TensorLayout.from_string(layout.to_string()) == layout
    assert flm.TensorLayout.from_str(layout.serialized_string()) == layout
    # y changes most slowly: device 1 is (x=0, y=1), so it holds the fourth of six.
    assert layout.offset_to_shard() == [(0, 0), (3, 0), (1, 0), (4, 0), (2, 0), (5, 0)]
    assert layout.num_shards(0) == 6


@hypothesis.given(st.data())
def test_every_layout_is_written_and_lies_as_in_jax(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(8,), (2, 4), (4, 2), (2, 2, 2), (1, 3, 2)]))
    names = data.draw(st.permutations(["a", "b", "c"]))[: len(shape)]
    devices = data.draw(st.permutations(jax.devices()))[: math.prod(shape)]
    mesh = flm.DeviceMesh(shape, names, devices)
    rank = data.draw(st.integers(0, 3))
    dims: list[tuple[str, ...]] = [()] * rank
    for name in data.draw(st.permutations(names)) if rank else ():
        if data.draw(st.booleans()):
            dims[data.draw(st.integers(0, rank - 1))] += (name,)
    layout = (
        flm.TensorLayout(dims, mesh) if dims else flm.TensorLayout.replicated(mesh, 0)
    )
    assert flm.TensorLayout.from_string(layout.to_string()) == layout
    assert flm.TensorLayout.from_str(layout.serialized_string()) == layout
    again = pickle.loads(pickle.dumps(layout))
    assert again == layout and hash(again) == hash(layout)
    assert again.device_mesh == mesh
    # One element per shard, so that an index in elements is that of the shard.
    lies = layout.sharding(rank).devices_indices_map(layout.shape)
    assert layout.offset_to_shard() == [
        tuple(
            index.indices(size)[0] for index, size in zip(at, layout.shape, strict=True)
        )
        for at in (lies[device] for device in mesh.devices.flat)
    ]
    indices = map(layout.offset_tuple_to_global_index, layout.offset_to_shard())
    assert set(indices) == set(range(math.prod(layout.shape)))


# ----------------------------------------------------------- damaged and foreign


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sharding_specs:x,unsharded mesh:M", "with a comma after each dim"),
        ("sharding_specs:x,,y, mesh:M", "cannot read the layout"),
        ("sharding_specs:x, mesh:M ", "cannot read the layout"),
        ("sharding_specs:x,", "cannot read the layout"),
        ("sharding_specs:z, mesh:M", "names the axis 'z'"),
        ("sharding_specs:x+x, mesh:M", "'x' twice"),
        ("sharding_specs:x+, mesh:M", "names the axis ''"),
        ("sharding_specs:x, mesh:|x=2|0,1", "cannot read the mesh"),
    ],
)
def test_damaged_text(text: str, message: str) -> None:
    with pytest.raises(flm.LayoutError, match=message):
        flm.TensorLayout.from_string(text.replace("M", SIX.to_string()))


def test_truncated_bytes() -> None:
    written = ROWS.serialized_string()
    read = []
    for end in range(len(written)):
        try:
            read.append(flm.TensorLayout.from_str(written[:end]))
        except flm.LayoutError:
            pass
    # Without the last two bytes, the type, they are those of an older TensorFlow.
    assert read == [ROWS]


def test_damaged_protos() -> None:
    for wrong in (b"\xff\xff", b"", "sharding_specs:", None, 3, SIX.as_proto()):
        with pytest.raises(flm.LayoutError):
            flm.TensorLayout.from_proto(wrong)
    damages: list[tuple[Any, str]] = [
        (lambda p: setattr(p, "type", 2), "a layout of type 2; only STATIC"),
        (lambda p: p.sharding_specs[1].Clear(), "the word of a dim, is missing"),
        (lambda p: p.ClearField("mesh_config"), "damaged: its mesh"),
        (lambda p: p.mesh_config.ClearField("mesh_dimensions"), "consecutive device"),
    ]
    for damage, message in damages:
        proto = ROWS.as_proto()
        damage(proto)
        with pytest.raises(flm.LayoutError, match=message):
            flm.TensorLayout.from_proto(proto)


def test_messages_of_another_class() -> None:
    """TensorFlow's own message has the name and the bytes, and another class."""
    ours = ROWS.as_proto()
    made = dtensor_format._classes.__wrapped__()["LayoutProto"]
    foreign = made.FromString(ours.SerializeToString())
    assert type(foreign) is not type(ours)
    assert foreign.DESCRIPTOR.full_name == "tensorflow.dtensor.LayoutProto"
    assert flm.TensorLayout.from_proto(foreign) == ROWS


def test_equality() -> None:
    again = flm.TensorLayout([("x",), ()], SIX)
    assert again == ROWS and hash(again) == hash(ROWS)
    assert again.serialized_string() == ROWS.serialized_string()
    planned = flm.DeviceMesh.abstract("x=3,y=2")
    assert ROWS != "sharding_specs:x,unsharded," and ROWS != ROWS.on(planned)


MEMBERS_OF_DTENSOR = """
    as_proto batch_sharded delete from_proto from_str from_string
    global_shape_from_local_shape inner_sharded is_batch_parallel is_fully_replicated
    local_shape_from_global_shape mesh mesh_proto num_shards offset_to_shard
    offset_tuple_to_global_index rank replicated serialized_string shape sharding_specs
    to_string
"""
MEMBERS_OF_OURS = """
    MATCH UNSHARDED axes axis_names backend_layout device_mesh dims equivalent has_match
    is_replicated matched memory_kind on on_host shard_shape sharding spec
"""


def test_golden_list_of_members() -> None:
    public = {name for name in dir(flm.TensorLayout) if not name.startswith("_")}
    assert public == {*MEMBERS_OF_DTENSOR.split(), *MEMBERS_OF_OURS.split()}
