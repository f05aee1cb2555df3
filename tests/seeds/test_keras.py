"""LayoutMap and related classes compared with the real Keras (results in `golden/`).

`golden/make_keras.py` says how the results were made. Where ours differ it
is deliberate, and one of the tables here has the reason.
"""

import functools
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from shards import bare
from vectors import GOLDEN, Difference, Vector, check, refused

import flax_layoutmap as flm

TESTS = Path(__file__).parents[1]


def load(name: str) -> list[Vector]:
    """What Keras answered."""
    text = (GOLDEN / f"keras_{name}.json").read_text(encoding="utf-8")
    return json.loads(text)


def itself(vector: Vector) -> Vector:
    return vector


def mesh_in(vector: Vector) -> flm.DeviceMesh:
    return flm.DeviceMesh(*vector["mesh"])


def filled(rules: Any, mesh: Any = "data=2,model=4", **options: Any) -> flm.LayoutMap:
    """A map of the rules of a vector, with Keras's meaning of a match."""
    layout_map = flm.LayoutMap(mesh, **{"match": "fullmatch", **options})
    for key, axes in rules:
        layout_map[key] = tuple(axes)
    return layout_map


def axes_of(layout: flm.TensorLayout) -> list[Any]:
    """As Keras has them: no dims are written without a `...`."""
    return [axis for axis in layout.axes if axis is not ...]


def indices(array: Any) -> list[Any]:
    """Per device, by its id: start and end of its part in each dim."""
    shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
    return [ends_of(shard.index, array.shape) for shard in shards]


def ends_of(index: Any, shape: Any) -> list[list[int]]:
    return [
        list(part.indices(size)[:2]) for part, size in zip(index, shape, strict=True)
    ]


def indices_of(sharding: Any, shape: Any) -> list[Any]:
    """The same of an array that was not made."""
    found = sharding.devices_indices_map(tuple(shape)).items()
    ordered = sorted(found, key=lambda item: item[0].id)
    return [ends_of(index, shape) for _, index in ordered]


# ------------------------------------------------------------------------- lookups


def look_up(layout_map: flm.LayoutMap, path: str) -> Any:
    """Axes, "none" where no rule matches, None where rules with other layouts do."""
    try:
        found = layout_map[path]
    except flm.errors.RuleError as error:
        assert repr(path) in str(error)
        return None
    return "none" if found is None else axes_of(found)


def lookup_answers(layout_map: flm.LayoutMap, vector: Vector) -> Any:
    return {path: look_up(layout_map, path) for path in vector["answers"]}


def agreeing(vector: Vector) -> dict[str, Any]:
    """Paths that Keras refuses since several keys match them, all with one layout."""
    axes = dict(vector["rules"])
    return {
        path: axes[keys[0]]
        for path, keys in vector["hits"].items()
        if all(axes[key] == axes[keys[0]] for key in keys)
    }


LOOKUP_DIFFERENCES = {
    "answers:agreeing": Difference(
        "rules that say the same are no conflict",
        lambda vector: bool(agreeing(vector)),
        lambda vector: {**vector["answers"], **agreeing(vector)},
    )
}


@pytest.mark.parametrize("mode", ["fullmatch", "search", "match"])
def test_lookups(mode: str) -> None:
    """Keras of today, Keras 3.0 to 3.13, and tf-keras, where the first rule wins."""
    vectors = [vector for vector in load("lookup") if vector["mode"] == mode]
    assert sum(len(vector["answers"]) for vector in vectors) > 1_000
    overlap = "first" if mode == "match" else "error"

    def make(vector: Vector) -> flm.LayoutMap:
        return filled(vector["rules"], match=mode, overlap=overlap)

    differences = {} if mode == "match" else LOOKUP_DIFFERENCES
    check(vectors, make, {"answers": lookup_answers}, differences)


@pytest.mark.parametrize("with_mesh", [False, True])
def test_the_documented_example(with_mesh: bool, mesh: flm.DeviceMesh) -> None:
    """Line for line, as the pages of Keras 3.0 to 3.13 have it."""
    layout_map = flm.LayoutMap(device_mesh=mesh if with_mesh else None)
    layout_map["dense.*kernel"] = (None, "model")
    layout_map["dense.*bias"] = ("model",)
    layout_map["conv2d.*kernel"] = (None, None, None, "model")
    layout_map["conv2d.*bias"] = ("model",)

    layout_1 = layout_map["dense_1.kernel"]
    layout_2 = layout_map["dense_1.bias"]
    layout_3 = layout_map["dense_2.kernel"]
    layout_4 = layout_map["dense_2.bias"]
    layout_5 = layout_map["my_model/conv2d_123/kernel"]
    layout_6 = layout_map["my_model/conv2d_123/bias"]
    layout_7 = layout_map["my_model/conv3d_1/kernel"]
    layout_8 = layout_map["my_model/conv3d_1/bias"]

    device_mesh = mesh if with_mesh else None
    layout_1d = flm.TensorLayout(("model",), device_mesh)
    layout_2d = flm.TensorLayout((None, "model"), device_mesh)
    layout_4d = flm.TensorLayout((None, None, None, "model"), device_mesh)
    assert layout_1 == layout_3 == layout_2d
    assert layout_2 == layout_4 == layout_6 == layout_1d
    assert layout_5 == layout_4d
    assert layout_7 is None
    assert layout_8 is None
    assert layout_map.device_mesh is device_mesh


def test_the_documented_example_of_today(mesh: flm.DeviceMesh) -> None:
    """With `.*` before each key, since a match is one of the whole path now."""
    rules = {"dense.*kernel": (None, "model"), "dense.*bias": ("model",)}
    layout_map = flm.LayoutMap(mesh, match="fullmatch")
    for key, axes in rules.items():
        layout_map[f".*{key}"] = axes
    asked = ["dense_1.kernel", "my_model/dense_1/bias", "my_model/conv3d_1/kernel"]
    assert [look_up(layout_map, path) for path in asked] == [
        [None, "model"],
        ["model"],
        "none",
    ]
    # The older keys say the same in the older meaning, and nothing in today's.
    assert look_up(filled(rules.items(), match="search"), asked[1]) == ["model"]
    assert look_up(filled(rules.items()), asked[1]) == "none"


# ------------------------------------------------------------- the surface of a dict


def operate(layout_map: flm.LayoutMap, op: str, *arguments: Any) -> Any:
    """What an operation gives, as `make_keras.py` writes it."""

    def shown(value: Any) -> Any:
        if value is None:
            return "none"
        return axes_of(value) if isinstance(value, flm.TensorLayout) else value

    calls: dict[str, Callable[..., Any]] = {
        "set": lambda key, axes: layout_map.__setitem__(key, tuple(axes)) or "done",
        "update": lambda pairs: (
            layout_map.update({key: tuple(axes) for key, axes in pairs}) or "done"
        ),
        "setdefault": lambda key, axes: layout_map.setdefault(key, tuple(axes)),
        "del": lambda key: layout_map.__delitem__(key) or "done",
        "pop": layout_map.pop,
        "get": layout_map.get,
        "item": lambda key: layout_map[key],
        "in": lambda key: key in layout_map,
        "len": lambda: len(layout_map),
        "iter": lambda: list(layout_map),
        "keys": lambda: list(layout_map.keys()),
        "values": lambda: [axes_of(value) for value in layout_map.values()],
        "items": lambda: [[key, axes_of(value)] for key, value in layout_map.items()],
        "popitem": lambda: (lambda item: [item[0], axes_of(item[1])])(
            layout_map.popitem()
        ),
        "clear": lambda: layout_map.clear() or "done",
    }
    try:
        return shown(calls[op](*arguments))
    except KeyError:
        return "KeyError"
    except flm.LayoutError:
        return "ValueError"


def steps(layout_map: flm.LayoutMap, vector: Vector) -> Any:
    return [[call, operate(layout_map, *call)] for call, _ in vector["steps"]]


def first_call(vector: Vector) -> list[Any]:
    return vector["steps"][0][0]


def called(*names: str, present: bool | None = None, more: int | None = None) -> Any:
    """Whether a vector is one call of these, of a key that is there (or is not)."""

    def where(vector: Vector) -> bool:
        name, *arguments = first_call(vector)
        if len(vector["steps"]) > 1 or name not in names:
            return False
        if more is not None and len(arguments) != 1 + more:
            return False
        keys = [key for key, _ in vector["rules"]]
        return present is None or (arguments[0] in keys) is present

    return where


def answering(value: Any) -> Any:
    return lambda vector: [[first_call(vector), value]]


# `in`, `get`, `pop`, `setdefault` and `popitem` of a dict, where Keras has none of it.
SURFACE_DIFFERENCES = {
    "steps:in": Difference(
        "`in` is literal; Keras's is always True, as a miss raises no KeyError",
        called("in", present=False),
        answering(False),
    ),
    "steps:get": Difference(
        "a miss gives the default; Keras gives None",
        lambda vector: (
            called("get", more=1)(vector) and vector["steps"][0][1] == "none"
        ),
        answering(7),
    ),
    "steps:pop": Difference(
        "pop of a key that is not there gives the default; Keras raises KeyError",
        called("pop", present=False, more=1),
        answering(7),
    ),
    "steps:setdefault": Difference(
        "setdefault sets a key that is not there; Keras never does",
        called("setdefault", present=False),
        answering(["data"]),
    ),
    "after:setdefault": Difference(
        "setdefault sets a key that is not there; Keras never does",
        called("setdefault", present=False),
        lambda vector: [*(key for key, _ in vector["rules"]), first_call(vector)[1]],
    ),
    "steps:popitem": Difference(
        "popitem takes the last rule, as a dict's; Keras's takes the first",
        lambda vector: called("popitem")(vector) and bool(vector["rules"]),
        lambda vector: [[["popitem"], vector["rules"][-1]]],
    ),
    "after:popitem": Difference(
        "popitem takes the last rule, as a dict's; Keras's takes the first",
        lambda vector: called("popitem")(vector) and bool(vector["rules"]),
        lambda vector: [key for key, _ in vector["rules"][:-1]],
    ),
}


def test_operations() -> None:
    check(
        load("operations"),
        lambda vector: filled(vector["rules"]),
        {"steps": steps, "after": lambda layout_map, vector: list(layout_map)},
        SURFACE_DIFFERENCES,
    )


def values_to_insert(mesh: flm.DeviceMesh) -> dict[str, Any]:
    other = flm.DeviceMesh((8,), ("model",))
    spec = jax.sharding.PartitionSpec(None, "model")
    return {
        "tuple": (None, "model"),
        "empty tuple": (),
        "list": [None, "model"],
        "layout": flm.TensorLayout((None, "model")),
        "layout on its mesh": flm.TensorLayout((None, "model"), mesh),
        "layout on another mesh": flm.TensorLayout((None, "model"), other),
        "spec": spec,
        "sharding": jax.sharding.NamedSharding(mesh.backend_mesh, spec),  # type: ignore[arg-type]
        "text": "model",
        "none": None,
        "number": 3,
        "unknown axis": (None, "x"),
        "layout of an unknown axis": lambda: flm.TensorLayout(("x",)),
        "two axes on a dim": (("data", "model"), None),
        "an axis twice": ("model", "model"),
    }


def insertion(mesh: flm.DeviceMesh) -> Callable[[Any, Vector], Any]:
    def answer(_: Any, vector: Vector) -> Any:
        value = values_to_insert(mesh)[vector["kind"]]
        value = value() if callable(value) else value
        layout_map = flm.LayoutMap(mesh if vector["on"] == "mesh" else None)
        before = getattr(value, "device_mesh", None)
        axes = None
        try:
            layout_map["a"] = value
            axes = repr(tuple(axes_of(layout_map.values()[0])))
        except flm.errors.RuleError as error:
            assert not len(layout_map), error
        layout = layout_map.get("a")
        has_mesh = layout is not None and layout.device_mesh is not None
        changed = getattr(value, "device_mesh", None) is not before
        return [axes, len(layout_map), has_mesh, changed]

    return answer


def on(name: str, *kinds: str) -> Callable[[Vector], bool]:
    return lambda vector: vector["on"] == name and vector["kind"] in kinds


TWO = ("(None, 'model')", 1)
INSERTION_DIFFERENCES = {
    "outcome:list": Difference(
        "a list is as good as a tuple, as Keras's page says",
        lambda vector: vector["kind"] in ("list", "spec"),
        lambda vector: [*TWO, vector["on"] == "mesh", False],
    ),
    "outcome:sharding": Difference(
        "a NamedSharding is a layout, with its mesh",
        lambda vector: vector["kind"] == "sharding",
        lambda _: [*TWO, True, False],
    ),
    "outcome:none": Difference(
        "None says replicated",
        lambda vector: vector["kind"] == "none",
        lambda vector: ["()", 1, vector["on"] == "mesh", False],
    ),
    "outcome:the caller's layout": Difference(
        "the mesh is not written into the caller's object",
        on("mesh", "layout"),
        lambda _: [*TWO, True, False],
    ),
    "outcome:the caller's wrong layout": Difference(
        "the mesh is not written into the caller's object",
        on("mesh", "layout of an unknown axis"),
        lambda _: [None, 0, False, False],
    ),
    "outcome:two axes": Difference(
        "a dim may lie on two axes",
        on("mesh", "two axes on a dim"),
        lambda _: ["(('data', 'model'), None)", 1, True, False],
    ),
    "outcome:twice": Difference(
        "an axis may shard one dim only; Keras notices when an array is made",
        lambda vector: vector["kind"] == "an axis twice",
        lambda _: [None, 0, False, False],
    ),
}


def test_insertions(mesh: flm.DeviceMesh) -> None:
    """What a map takes; and it never changes the layout that it was given."""
    vectors = [
        {**v, "outcome": [v["axes"], v["after"], v["has_mesh"], v["changed"]]}
        for v in load("insertions")
    ]
    check(vectors, itself, {"outcome": insertion(mesh)}, INSERTION_DIFFERENCES)


def test_bad_patterns_are_refused_at_once() -> None:
    """Keras stores them, and then raises `re.error` at every lookup."""
    vectors = load("bad_keys")
    poisoned = [v["key"] for v in vectors if v["lookup"] is None]
    assert len(poisoned) == 8 and all(v["stored"] == "done" for v in vectors)
    for vector in vectors:
        layout_map = flm.LayoutMap("data=2,model=4")
        if vector["key"] in poisoned:
            with pytest.raises(
                flm.errors.RuleError, match="is not a regular expression"
            ):
                layout_map[vector["key"]] = ("model",)
        else:
            layout_map[vector["key"]] = ("model",)
        assert layout_map["other"] is None


# ------------------------------------------------------- DeviceMesh and TensorLayout


def mesh_answer(member: Callable[[flm.DeviceMesh], Any]) -> Any:
    def answer(_: Any, vector: Vector) -> Any:
        shape, names, devices = vector["arguments"]
        try:
            made = flm.DeviceMesh(shape, names, devices=devices)
        except flm.errors.MeshError:
            return member(None) if member is is_made else None  # type: ignore[arg-type]
        return member(made)

    return answer


def is_made(mesh: flm.DeviceMesh | None) -> bool:
    return mesh is not None


def ids_of(mesh: flm.DeviceMesh) -> Any:
    return np.vectorize(lambda device: device.id)(mesh.devices).tolist()


def is_auto(mesh: flm.DeviceMesh) -> bool:
    return set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def mesh_given(shape: Any, names: Any, devices: Any = None) -> Any:
    return lambda vector: vector["arguments"] == [shape, names, devices]


def in_every(names: str, where: Any, ours: dict[str, Any], reason: str) -> Any:
    """One difference in several members."""
    key = names.split(":")[0]
    return {
        f"{member}:{key}": Difference(reason, where, lambda _, value=value: value)
        for member, value in ours.items()
    }


MADE = {"made": True, "auto": True}
GRID = [[0, 1, 2, 3], [4, 5, 6, 7]]
GONE = {"made": False, "shape": None, "axis_names": None}
MESH_DIFFERENCES: dict[str, Difference] = {
    **in_every(
        "-1",
        mesh_given([-1], ["a"]),
        {**MADE, "shape": [8], "axis_names": ["a"], "ids": [*range(8)]},
        "one size may be computed",
    ),
    **in_every(
        "2, -1",
        mesh_given([2, -1], ["a", "b"]),
        {**MADE, "shape": [2, 4], "axis_names": ["a", "b"], "ids": GRID},
        "one size may be computed",
    ),
    **in_every(
        "number",
        mesh_given(8, ["a"]),
        {**MADE, "shape": [8], "axis_names": ["a"], "ids": [*range(8)]},
        "one size needs no brackets; Keras raises TypeError",
    ),
    **in_every(
        "letters",
        mesh_given([2, 4], "ab"),
        GONE,
        "a text is no list of names; Keras takes its letters, and fails later",
    ),
    **in_every(
        "DTensor's spelling",
        mesh_given([2], ["a"], ["CPU:1", "cpu:0"]),
        {"ids": [1, 0], "auto": True},
        "DTensor writes the platform in capitals; Keras fails later",
    ),
}
for _arguments, _reason in (
    (([8], "a"), "a text is no list of names"),
    (([2, 4], ["a", "a"]), "axis names differ"),
    (([2], ["a"], ["cpu:0", "cpu:0"]), "a device is in a mesh once"),
):
    MESH_DIFFERENCES |= in_every(
        _reason, mesh_given(*_arguments), {**GONE, "ids": None, "auto": None}, _reason
    )
for _names in (["cpu:99", "cpu:1"], ["gpu:0", "gpu:1"], ["nonsense", "cpu:0"]):
    MESH_DIFFERENCES |= in_every(
        str(_names),
        mesh_given([2], ["a"], _names),
        GONE,
        "devices that are not there are told at once; Keras fails later",
    )


def test_meshes() -> None:
    members = {
        "made": mesh_answer(is_made),
        "shape": mesh_answer(lambda mesh: list(mesh.shape)),
        "axis_names": mesh_answer(lambda mesh: list(mesh.axis_names)),
        "ids": mesh_answer(ids_of),
        "auto": mesh_answer(is_auto),
    }
    vectors = load("meshes")
    assert sum(vector["made"] for vector in vectors) > 20
    check(vectors, itself, members, MESH_DIFFERENCES)


def given_axes(vector: Vector) -> Any:
    axes = vector["axes"]
    if not isinstance(axes, list):
        return axes
    return tuple(tuple(axis) if isinstance(axis, list) else axis for axis in axes)


def layout_in(vector: Vector) -> flm.TensorLayout:
    return flm.TensorLayout(given_axes(vector))


def spec_of(vector: Vector, mesh: flm.DeviceMesh) -> Any:
    """The spec with all its dims: Keras writes the trailing None out."""
    layout = layout_in(vector).on(mesh)
    backend = layout.backend_layout
    assert backend.mesh == mesh.backend_mesh
    entries = tuple(backend.spec)
    return [*entries, *[None] * (len(axes_of(layout)) - len(entries))]


def test_a_backend_layout_is_spelled_short(mesh: flm.DeviceMesh) -> None:
    """So that equal layouts are equal; JAX tells the spelling of Keras apart."""
    short = flm.TensorLayout(("data", None), mesh).backend_layout
    long = NamedSharding(bare(mesh), PartitionSpec("data", None))
    assert short == flm.TensorLayout(long).backend_layout
    assert short != long and short.is_equivalent_to(long, 2)


def some_axis_twice(vector: Vector) -> bool:
    axes = given_axes(vector)
    if not isinstance(axes, tuple):
        return False
    flat = [
        name for axis in axes for name in (axis if type(axis) is tuple else (axis,))
    ]
    named = [name for name in flat if name is not None]
    return len(set(named)) != len(named)


def a_pair_of_axes(vector: Vector) -> bool:
    axes = given_axes(vector)
    pairs = isinstance(axes, tuple) and any(type(axis) is tuple for axis in axes)
    return pairs and not some_axis_twice(vector) and "x" not in axes


def single_axis_in_brackets(vector: Vector) -> Any:
    """`("data",)` for one dim is `"data"`."""
    return [
        axis[0] if isinstance(axis, list) and len(axis) == 1 else axis
        for axis in vector["axes"]
    ]


def a_text(vector: Vector) -> bool:
    return isinstance(vector["axes"], str)


REASONS = {
    "twice": "an axis may shard one dim only; Keras notices when an array is made",
    "text": "a text is one name, not letters; the message says ('model',)",
    "none": "None says replicated",
    "pairs": "a dim may lie on several axes",
}
LAYOUT_DIFFERENCES: dict[str, Difference] = {
    "without_mesh:twice": Difference(REASONS["twice"], some_axis_twice, refused),
    "without_mesh:text": Difference(REASONS["text"], a_text, refused),
    "without_mesh:none": Difference(
        REASONS["none"], lambda vector: vector["axes"] is None, lambda _: []
    ),
    "without_mesh:brackets": Difference(
        "one axis in brackets is that axis",
        lambda vector: vector["axes"] == [["data"]],
        single_axis_in_brackets,
    ),
}
for _member in ("with_mesh", "late_mesh", "spec"):
    LAYOUT_DIFFERENCES |= {
        f"{_member}:none": Difference(
            REASONS["none"], lambda vector: vector["axes"] is None, lambda _: []
        ),
        f"{_member}:pairs": Difference(
            REASONS["pairs"], a_pair_of_axes, single_axis_in_brackets
        ),
        f"{_member}:empty text": Difference(
            REASONS["text"], lambda vector: vector["axes"] == "", refused
        ),
    }
    if _member != "spec":
        LAYOUT_DIFFERENCES[f"{_member}:twice"] = Difference(
            REASONS["twice"],
            lambda vector: some_axis_twice(vector) and vector["with_mesh"] is not None,
            refused,
        )


def test_layouts(mesh: flm.DeviceMesh) -> None:
    members = {
        "without_mesh": lambda _, v: axes_of(layout_in(v)),
        "with_mesh": lambda _, v: axes_of(flm.TensorLayout(given_axes(v), mesh)),
        "late_mesh": lambda _, v: axes_of(layout_in(v).on(mesh)),
        "spec": lambda _, v: spec_of(v, mesh),
        "backend_without_mesh": lambda _, v: layout_in(v).backend_layout,
    }
    check(load("layouts"), itself, members, LAYOUT_DIFFERENCES)


# ---------------------------------------------------------------- distribute_tensor


def tensor_layout(vector: Vector) -> flm.TensorLayout:
    return flm.TensorLayout(tuple(vector["axes"]), mesh_in(vector))


def value_of(vector: Vector) -> np.ndarray:
    shape = vector["shape"]
    return np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)


def distributed(how: str) -> Any:
    def answer(layout: flm.TensorLayout, vector: Vector) -> Any:
        put = functools.partial(flm.distribute_tensor, layout=layout)
        value = value_of(vector)
        placed = jax.jit(put)(value) if how == "jit" else put(value)
        np.testing.assert_array_equal(placed, value)
        return indices(placed)

    return answer


def of_lower_rank(vector: Vector) -> bool:
    return 0 < len(vector["axes"]) < len(vector["shape"])


def indivisible(vector: Vector) -> bool:
    """In Keras an error outside of jit; inside, no error and another layout."""
    ranks_agree = len(vector["axes"]) == len(vector["shape"])
    return ranks_agree and vector["eager"] is None and vector["jit"] is not None


EVERY_DIM = "a layout names every dim; Keras takes it as one of the first dims"
TENSOR_DIFFERENCES = {
    **{
        f"{how}:lower rank": Difference(
            EVERY_DIM,
            lambda vector, how=how: of_lower_rank(vector) and vector[how] is not None,
            refused,
        )
        for how in ("eager", "jit")
    },
    "jit:indivisible": Difference(
        "inside of jit too; Keras drops the layout in silence", indivisible, refused
    ),
}


def test_tensors() -> None:
    vectors = load("tensors")
    # An array without elements has no layout inside of jit that could be asked for.
    for vector in vectors:
        if 0 in vector["shape"]:
            del vector["jit"]
    members = {"eager": distributed("eager"), "jit": distributed("jit")}
    check(vectors, tensor_layout, members, TENSOR_DIFFERENCES)


def distributed_value(mesh: flm.DeviceMesh, how: str) -> Any:
    layout = flm.TensorLayout(("data", "model"), mesh)
    ones = np.ones((4, 4), np.float32)
    kinds: dict[str, tuple[Any, Any]] = {
        "numpy": (ones, layout),
        "a pair": ((ones, ones), layout),
        "none": (None, layout),
        "no layout": (ones, None),
        "a tuple": (ones, ("data", "model")),
        "a spec": (ones, jax.sharding.PartitionSpec("data")),
        "a layout without mesh": (ones, flm.TensorLayout(("data", "model"))),
        "a sharding": (ones, layout.backend_layout),
    }

    def answer(_: Any, vector: Vector) -> Any:
        value, given = kinds[vector["kind"]]
        put = functools.partial(flm.distribute_tensor, layout=given)
        placed = jax.jit(put)(value) if how == "jit" else put(value)
        return [indices(leaf) for leaf in jax.tree.leaves(placed)]

    return answer


VALUE_DIFFERENCES = {
    "jit:a pair": Difference(
        "a tree inside of jit too; Keras lays out nothing of it, in silence",
        lambda vector: vector["kind"] == "a pair",
        lambda vector: vector["eager"],
    ),
    "eager:no layout": Difference(
        "None says replicated, on a mesh that is not there; Keras moves nothing",
        lambda vector: vector["kind"] == "no layout",
        refused,
    ),
}


def test_values(mesh: flm.DeviceMesh) -> None:
    members = {how: distributed_value(mesh, how) for how in ("eager", "jit")}
    check(load("values"), itself, members, VALUE_DIFFERENCES)


# ---------------------------------------------------------------------------- models


def tree_of(vector: Vector) -> dict[str, Any]:
    """A tree with the paths and shapes of the variables of Keras's model."""
    tree: dict[str, Any] = {}
    for path, shape, *_ in vector["variables"]:
        *parents, name = path.split("/")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[name] = jax.ShapeDtypeStruct(tuple(shape), "float32")
    return tree


def resolution_of(vector: Vector) -> flm.Resolution:
    layout_map = filled(vector["rules"], mesh_in(vector), strict=False)
    return layout_map.resolve(tree_of(vector))


def built_vectors() -> Iterator[Vector]:
    for vector in load("models"):
        if vector["variables"]:
            yield vector


def with_prefix_rules(vector: Vector) -> bool:
    """Whether a rule of lower rank hits a variable, which Keras takes as a prefix."""
    ranks = {path: len(shape) for path, shape, *_ in vector["variables"]}
    layout_map = filled(vector["rules"], mesh_in(vector))
    found = {path: layout_map[path] for path in ranks}
    return any(
        layout is not None and layout.rank is not None and layout.rank < ranks[path]
        for path, layout in found.items()
    )


def variable_layouts(_: Any, vector: Vector) -> Any:
    resolution = resolution_of(vector)
    answers = []
    for path, shape, *_ in vector["variables"]:
        layout = resolution[path].layout
        dims = [axes[0] if axes else None for axes in layout.dims(len(shape))]
        held = indices_of(layout.sharding(len(shape)), shape)
        answers.append([path, shape, dims, held])
    return answers


MODEL_DIFFERENCES = {
    "variables:prefix": Difference(EVERY_DIM, with_prefix_rules, refused)
}


def test_variables_of_models() -> None:
    """What each device holds of each variable of a real Keras model."""
    vectors = [*built_vectors()]
    assert sum(len(vector["variables"]) for vector in vectors) > 250
    check(vectors, itself, {"variables": variable_layouts}, MODEL_DIFFERENCES)


def test_models_that_keras_cannot_build() -> None:
    """Rules that do not divide: here one error that names all, before anything."""
    refused_by_keras = [v for v in load("models") if not v["variables"]]
    built = {v["model"]: v for v in load("models") if v["variables"]}
    assert refused_by_keras
    for vector in refused_by_keras:
        shapes = {**vector, "variables": built[vector["model"]]["variables"]}
        with pytest.raises(
            flm.errors.ResolveError, match="does not divide by mesh axis"
        ):
            resolution_of(shapes)


OPTIMIZERS: dict[str, tuple[Any, dict[str, str]]] = {
    "adam": (optax.adam(0.1), {"momentums": "mu", "velocities": "nu"}),
    "sgd momentum": (optax.sgd(0.1, momentum=0.9), {"momentums": "trace"}),
    "lion": (optax.lion(0.1), {"momentums": "mu"}),
}


def trained_tree(vector: Vector) -> dict[str, Any]:
    trained = vector["slots"]["adam"]["momentums"]
    return tree_of({"variables": [v for v in vector["variables"] if v[0] in trained]})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slots_follow_their_variables(name: str) -> None:
    """The optimizer's state of a real Keras model, and optax's of the same tree."""
    tx, fields = OPTIMIZERS[name]
    compared = 0
    for vector in built_vectors():
        if with_prefix_rules(vector):
            continue
        tree, mesh = trained_tree(vector), mesh_in(vector)
        layout_map = filled(vector["rules"], mesh, strict=False)
        state = jax.eval_shape(tx.init, tree)
        found = layout_map.resolve(state, params=tree, tx=tx)
        for slot, own in fields.items():
            for path, axes in vector["slots"][name][slot].items():
                end = f"/{own}/{path}"
                (leaf,) = [leaf for leaf in found if leaf.path.endswith(end)]
                dims = leaf.layout.dims(len(axes))
                assert [d[0] if d else None for d in dims] == axes, (path, axes)
                compared += any(axes)
    assert compared > 50


# ------------------------------------------------------------------------------ data


def placed_batch(_: Any, vector: Vector) -> Any:
    layout_map = flm.LayoutMap(mesh_in(vector), batch=vector["batch"])
    rows = np.zeros(vector["shape"], np.float32)
    return indices(flm.distribute_batch(rows, layout_map))


DATA_DIFFERENCES = {
    "placed:scalars": Difference(
        "a scalar of a batch is replicated; Keras raises IndexError",
        lambda vector: not vector["shape"] and vector["batch"] != "x",
        lambda _: [[]] * 8,
    )
}


def test_batches() -> None:
    """`get_data_layout` and the placing of a batch."""
    check(load("data"), itself, {"placed": placed_batch}, DATA_DIFFERENCES)


# --------------------------------------------------------------------------- outputs


class Two(nnx.Module):
    """The two layers of the vectors."""

    d1: Any
    d2: Any

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.d1 = nnx.Linear(8, 16, rngs=rngs)
        self.d2 = nnx.Linear(8, 4, rngs=rngs)


def outputs_of(vector: Vector, run: Callable[[Any, Any], Any]) -> Any:
    layout_map = filled(vector["rules"], strict=False)
    model = layout_map.place(Two(nnx.Rngs(0)))
    return [indices(out) for out in run(model, layout_map)]


def eager_outputs(_: Any, vector: Vector) -> Any:
    def run(model: Two, layout_map: flm.LayoutMap) -> Any:
        x = np.ones((8, 8), np.float32)
        with flm.activation_scope(layout_map, model):
            return model.d1(x), model.d2(x)

    return outputs_of(vector, run)


def output_rules(*rules: Any) -> Callable[[Vector], bool]:
    return lambda vector: vector["rules"] == [[key, list(axes)] for key, axes in rules]


def with_output(at: int, shape: tuple[int, int], rows: int) -> Callable[[Vector], Any]:
    """The outputs with another one at a place: its rows over so many parts of data."""
    part, per = shape[0] // rows, 8 // rows
    held = [
        [[n // per * part, n // per * part + part], [0, shape[1]]] for n in range(8)
    ]

    def ours(vector: Vector) -> Any:
        return [
            held if at == number else own
            for number, own in enumerate(vector["outputs"])
        ]

    return ours


OUTPUT_DIFFERENCES = {
    "outputs:other spellings": Difference(
        "a rule for outputs is one whose key ends in output",
        output_rules(("d1/output", ("data", "model")), (".*outpu.", ("data", None))),
        with_output(1, (8, 4), 1),
    ),
    "outputs:lower rank": Difference(
        EVERY_DIM, output_rules(("d1/output", ("data",))), refused
    ),
    "outputs:weights": Difference(
        "a layout names every dim of a kernel; Keras lays out the output by it, too",
        output_rules((".*d1.*", ("model",))),
        refused,
    ),
    "outputs:agreeing": Difference(
        "rules that say the same are no conflict",
        output_rules(("d[12]/output", ("data", None)), ("d[2]/output", ("data", None))),
        lambda _: [
            with_output(0, (8, 16), 2)({"outputs": [0]})[0],
            with_output(0, (8, 4), 2)({"outputs": [0]})[0],
        ],
    ),
}


def test_outputs() -> None:
    """Keys of the map that end in `output` lay out what layers return."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(load("outputs"), itself, {"outputs": eager_outputs}, OUTPUT_DIFFERENCES)


@pytest.mark.parametrize("key", ["d1/output", "d1.output$", ".*output", r".*/output"])
def test_spellings_of_output(key: str, mesh: flm.DeviceMesh) -> None:
    """In flm.jit, too; and none of them is told as a rule that matches nothing."""
    layout_map = flm.LayoutMap(mesh, match="fullmatch", batch=())
    layout_map[key] = (None, ("data", "model"))
    layout_map[".*(kernel|bias)"] = None
    model = layout_map.place(Two(nnx.Rngs(0)))
    step = flm.jit(lambda model, x: model.d1(x), layout_map=layout_map)
    with warnings.catch_warnings():
        warnings.simplefilter("error", flm.LayoutWarning)
        out = step(model, np.ones((8, 8), np.float32))
    assert indices(out)[1] == [[0, 8], [2, 4]]


# --------------------------------------------------------------------------- devices


def test_devices() -> None:
    members = {
        "list": lambda _, vector: flm.keras.list_devices(vector["type"]),
        "count": lambda _, vector: flm.keras.get_device_count(vector["type"]),
    }
    check(load("devices"), itself, members, {})


# ------------------------------------------------------- what Keras's other parts do


def test_data_parallel(mesh: flm.DeviceMesh) -> None:
    """A map without rules: all is replicated, rows are split over the first axis.

    On a mesh of two axes Keras means to warn, and raises TypeError.
    """
    for grid in (mesh, flm.DeviceMesh(f"batch={flm.keras.get_device_count()}")):
        layout_map = flm.LayoutMap(grid, strict=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            flm.create(lambda: Two(nnx.Rngs(0)), layout_map)
            model = layout_map.place(Two(nnx.Rngs(0)))
            flm.jit(lambda m: m.d1.kernel.sum(), layout_map=layout_map)(model)
        rows = flm.distribute_batch(np.arange(16.0).reshape(8, 2), layout_map)
        assert all(part == [[0, 8], [0, 16]] for part in indices(model.d1.kernel[...]))
        ways = grid.shape[0]
        assert len({str(part) for part in indices(rows)}) == ways
        assert indices(rows)[0] == [[0, 8 // ways], [0, 2]]


def test_the_summary_of_tf_keras() -> None:
    """Its own numbers: 220 replicated, 600 over both axes, 30 over one."""
    layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("data=2,model=2"))
    layout_map["both"] = ("data", "model")
    layout_map["one"] = ("model",)
    shapes = {"both": (20, 30), "one": (30,), "rest": (220,)}
    tree = {k: jax.ShapeDtypeStruct(v, "float32") for k, v in shapes.items()}
    resolution = layout_map.resolve(tree)
    per_device = resolution.bytes_per_device
    assert per_device == 4 * (220 + 600 // 4 + 30 // 2) == 1540  # 1.50 KB
    assert round(4 * (220 + 600 + 30) / per_device, 2) == 2.21
    assert "1.5 KiB per device" in resolution.report()
