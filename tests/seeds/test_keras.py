"""LayoutMap and related classes compared with the real Keras (results in `golden/`).

`golden/make_keras.py` says how the results were made. Where ours differ it
is deliberate, and a table or a comment here has the reason.
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
from vectors import GOLDEN, Vector, differing

import flax_layoutmap as flm

TESTS = Path(__file__).parents[1]


def load(name: str) -> list[Vector]:
    """What Keras answered."""
    text = (GOLDEN / f"keras_{name}.json").read_text(encoding="utf-8")
    return json.loads(text)


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


def agreeing(vector: Vector) -> dict[str, Any]:
    """Paths that Keras refuses since several keys match them, all with one layout."""
    axes = dict(vector["rules"])
    return {
        path: axes[keys[0]]
        for path, keys in vector["hits"].items()
        if all(axes[key] == axes[keys[0]] for key in keys)
    }


@pytest.mark.parametrize("mode", ["fullmatch", "search", "match"])
def test_lookups(mode: str) -> None:
    """Keras of today, Keras 3.0 to 3.13, and tf-keras, where the first rule wins.

    Rules that say the same are no conflict here.
    """
    vectors = [vector for vector in load("lookup") if vector["mode"] == mode]
    assert sum(len(vector["answers"]) for vector in vectors) > 1_000
    overlap = "first" if mode == "match" else "error"

    def answers_to(_: Any, vector: Vector) -> Any:
        layout_map = filled(vector["rules"], match=mode, overlap=overlap)
        return {path: look_up(layout_map, path) for path in vector["answers"]}

    answers = [*differing(vectors, {"answers": answers_to})]
    assert bool(answers) is (mode != "match")
    for vector, _, answer in answers:
        assert answer == vector["answers"] | agreeing(vector)


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


# ------------------------------------------------------------- the surface of a dict


def operate(layout_map: Any, op: str, *arguments: Any) -> Any:
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
        "popitem": lambda: [*map(shown, layout_map.popitem())],
        "clear": lambda: layout_map.clear() or "done",
    }
    try:
        return shown(calls[op](*arguments))
    except KeyError:
        return "KeyError"
    except flm.LayoutError:
        return "ValueError"


def steps(layout_map: Any, vector: Vector) -> Any:
    return [[call, operate(layout_map, *call)] for call, _ in vector["steps"]]


def test_operations() -> None:
    """As in Keras, or as in a dict where Keras's map behaves otherwise.

    There `in` is always True, `get` and `pop` have no default, `setdefault` never sets,
    and `popitem` takes the first rule.
    """
    members = {
        "steps": lambda _, vector: steps(filled(vector["rules"]), vector),
        "after": lambda _, vector: (
            lambda layout_map: steps(layout_map, vector) and list(layout_map)
        )(filled(vector["rules"])),
    }
    met = set()
    for vector, member, answer in differing(load("operations"), members):
        plain = {key: axes for key, axes in vector["rules"]}
        ((call, result),) = json.loads(json.dumps(steps(plain, vector)))
        wanted = {"steps": [[call, result]], "after": list(plain)}
        assert answer == wanted[member], vector
        met.add(call[0])
    assert met == {"in", "get", "pop", "setdefault", "popitem"}


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


def insertion(mesh: flm.DeviceMesh, vector: Vector) -> Any:
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


def our_insertions(on_mesh: bool) -> dict[str, list[Any]]:
    """Kind of a value → axes, count, whether it has a mesh and whether it changed."""
    good, bad = ["(None, 'model')", 1, on_mesh, False], [None, 0, False, False]
    return {
        "list": good,  # as good as a tuple, as Keras's page says
        "spec": good,
        "sharding": ["(None, 'model')", 1, True, False],  # a layout with its mesh
        "none": ["()", 1, on_mesh, False],  # replicated
        "layout": good,  # the mesh is not written into the caller's object
        "layout of an unknown axis": bad,
        "two axes on a dim": ["(('data', 'model'), None)", 1, on_mesh, False],
        "an axis twice": bad,  # Keras notices when an array is made
    }


def test_insertions(mesh: flm.DeviceMesh) -> None:
    """What a map takes; and it never changes the layout that it was given."""
    vectors = [
        {**v, "outcome": [v["axes"], v["after"], v["has_mesh"], v["changed"]]}
        for v in load("insertions")
    ]
    members = {"outcome": lambda _, vector: insertion(mesh, vector)}
    met = set()
    for vector, _, answer in differing(vectors, members):
        assert answer == our_insertions(vector["on"] == "mesh")[vector["kind"]], vector
        met.add(vector["kind"])
    assert met == {*our_insertions(True)}


def test_bad_patterns_are_refused_at_once() -> None:
    """Keras stores them, and then raises `re.error` at every lookup."""
    vectors = load("bad_keys")
    assert {v["stored"] for v in vectors} == {"done"}
    layout_map = flm.LayoutMap("data=2,model=4")
    for vector in vectors:
        if vector["lookup"] is not None:
            layout_map[vector["key"]] = ("model",)
            continue
        with pytest.raises(flm.errors.RuleError, match="not a regular expression"):
            layout_map[vector["key"]] = ("model",)
    assert layout_map["other"] is None and len(layout_map) == len(vectors) - 8


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


GRID = [[0, 1, 2, 3], [4, 5, 6, 7]]
MADE = {"made": True, "auto": True}
EIGHT = {**MADE, "shape": [8], "axis_names": ["a"], "ids": [*range(8)]}
GONE = {"made": False, "shape": None, "axis_names": None}
NOTHING = {**GONE, "ids": None, "auto": None}
# Arguments, what we answer to some members, and why.
OUR_MESHES: list[tuple[list[Any], dict[str, Any], str]] = [
    ([[-1], ["a"], None], EIGHT, "one size may be computed"),
    (
        [[2, -1], ["a", "b"], None],
        {**MADE, "shape": [2, 4], "axis_names": ["a", "b"], "ids": GRID},
        "one size may be computed",
    ),
    ([8, ["a"], None], EIGHT, "one size needs no brackets; Keras raises TypeError"),
    ([[2, 4], "ab", None], GONE, "a text is not a list of names; Keras fails later"),
    ([[8], "a", None], NOTHING, "a text is not a list of names"),
    (
        [[2], ["a"], ["CPU:1", "cpu:0"]],
        {"ids": [1, 0], "auto": True},
        "DTensor writes the platform in capitals; Keras fails later",
    ),
    ([[2, 4], ["a", "a"], None], NOTHING, "axis names differ"),
    ([[2], ["a"], ["cpu:0", "cpu:0"]], NOTHING, "a device is in a mesh once"),
    *(
        ([[2], ["a"], names], GONE, "devices that are not there; Keras fails later")
        for names in (["cpu:99", "cpu:1"], ["gpu:0", "gpu:1"], ["nonsense", "cpu:0"])
    ),
]


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
    answers: list[tuple[Any, dict[str, Any]]] = [(a, {}) for a, _, _ in OUR_MESHES]
    for vector, member, answer in differing(vectors, members):
        (ours,) = [ours for a, ours in answers if a == vector["arguments"]]
        ours[member] = answer
    assert answers == [(arguments, ours) for arguments, ours, _ in OUR_MESHES]


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


def our_axes(vector: Vector) -> Any:
    """What is deliberately another layout here than in Keras, and None for an error."""
    axes = vector["axes"]
    if axes is None:
        return []  # replicated
    if isinstance(axes, str):
        return None  # one name, not letters; the message says ("model",)
    names = [name for axis in axes for name in (axis if type(axis) is list else [axis])]
    if any(names.count(name) > 1 for name in names if name is not None):
        return None  # an axis may shard one dim only; Keras notices it later
    return [axis[0] if type(axis) is list and len(axis) == 1 else axis for axis in axes]


def test_layouts(mesh: flm.DeviceMesh) -> None:
    members = {
        "without_mesh": lambda _, v: axes_of(layout_in(v)),
        "with_mesh": lambda _, v: axes_of(flm.TensorLayout(given_axes(v), mesh)),
        "late_mesh": lambda _, v: axes_of(layout_in(v).on(mesh)),
        "spec": lambda _, v: spec_of(v, mesh),
        "backend_without_mesh": lambda _, v: layout_in(v).backend_layout,
    }
    count = 0
    for vector, member, answer in differing(load("layouts"), members):
        assert answer == our_axes(vector), (vector, member)
        count += 1
    assert count == 79


# ---------------------------------------------------------------- distribute_tensor


def distributed(vector: Vector, how: str) -> Any:
    shape = vector["shape"]
    value = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    layout = flm.TensorLayout(tuple(vector["axes"]), mesh_in(vector))
    put = functools.partial(flm.distribute_tensor, layout=layout)
    placed = jax.jit(put)(value) if how == "jit" else put(value)
    np.testing.assert_array_equal(placed, value)
    return indices(placed)


def test_tensors() -> None:
    """A layout names every dim, where Keras takes it for the first dims.

    Inside of jit Keras drops a layout that does not divide in silence.
    """
    vectors = load("tensors")
    # An array without elements has no layout inside of jit that could be asked for.
    for vector in vectors:
        if 0 in vector["shape"]:
            del vector["jit"]
    members: dict[str, Any] = {
        "eager": lambda _, vector: distributed(vector, "eager"),
        "jit": lambda _, vector: distributed(vector, "jit"),
    }
    met = set()
    for vector, member, answer in differing(vectors, members):
        is_shorter = 0 < len(vector["axes"]) < len(vector["shape"])
        assert answer is None and (is_shorter or vector["eager"] is None), vector
        met.add((member, is_shorter))
    assert met == {("eager", True), ("jit", True), ("jit", False)}


def distributed_value(mesh: flm.DeviceMesh, kind: str, how: str) -> Any:
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
    value, given = kinds[kind]
    put = functools.partial(flm.distribute_tensor, layout=given)
    placed = jax.jit(put)(value) if how == "jit" else put(value)
    return [indices(leaf) for leaf in jax.tree.leaves(placed)]


def test_values(mesh: flm.DeviceMesh) -> None:
    members: dict[str, Any] = {
        "eager": lambda _, vector: distributed_value(mesh, vector["kind"], "eager"),
        "jit": lambda _, vector: distributed_value(mesh, vector["kind"], "jit"),
    }
    answers = {
        (member, vector["kind"]): answer == vector["eager"]
        for vector, member, answer in differing(load("values"), members)
    }
    # Keras lays out nothing of a tree inside of jit, and moves nothing without a
    # layout; None says replicated here, on a mesh that is not there.
    assert answers == {("jit", "a pair"): True, ("eager", "no layout"): False}


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


def test_variables_of_models() -> None:
    """What each device holds of each variable of a real Keras model."""
    vectors = [*built_vectors()]
    assert sum(len(vector["variables"]) for vector in vectors) > 250
    answers = [*differing(vectors, {"variables": variable_layouts})]
    # A layout names every dim; Keras takes it as one of the first dims.
    assert all(answer is None and with_prefix_rules(v) for v, _, answer in answers)
    assert len(answers) == sum(map(with_prefix_rules, vectors)) > 0


def test_models_that_keras_cannot_build() -> None:
    """Rules that do not divide: here one error that names all, before anything."""
    refused_by_keras = [v for v in load("models") if not v["variables"]]
    built = {v["model"]: v for v in load("models") if v["variables"]}
    assert refused_by_keras
    for vector in refused_by_keras:
        shapes = {**vector, "variables": built[vector["model"]]["variables"]}
        with pytest.raises(
            flm.errors.ResolveError, match="is not divisible by mesh axis"
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


def test_batches() -> None:
    """`get_data_layout` and the placing of a batch."""
    for vector, _, answer in differing(load("data"), {"placed": placed_batch}):
        assert vector["shape"] == []  # replicated; Keras raises IndexError
        assert answer == [[]] * 8


# --------------------------------------------------------------------------- outputs


class Two(nnx.Module):
    """The two layers of the vectors."""

    d1: Any
    d2: Any

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.d1 = nnx.Linear(8, 16, rngs=rngs)
        self.d2 = nnx.Linear(8, 4, rngs=rngs)


def eager_outputs(_: Any, vector: Vector) -> Any:
    layout_map = filled(vector["rules"], strict=False)
    model = layout_map.place(Two(nnx.Rngs(0)))
    x = np.ones((8, 8), np.float32)
    with flm.activation_scope(layout_map, model):
        return [indices(out) for out in (model.d1(x), model.d2(x))]


ROWS = ("data", None)
# Rules → the layouts of both outputs, where Keras answers otherwise; None: an error.
OUR_OUTPUTS: list[tuple[dict[str, Any], tuple[Any, Any] | None]] = [
    # A rule for outputs is one whose key ends in output.
    ({"d1/output": ("data", "model"), ".*outpu.": ROWS}, (("data", "model"), ())),
    # Rules that say the same are no conflict.
    ({"d[12]/output": ROWS, "d[2]/output": ROWS}, (ROWS, ROWS)),
    # A layout names every dim, also of a kernel; Keras lays out the output by it too.
    ({"d1/output": ("data",)}, None),
    ({".*d1.*": ("model",)}, None),
]


def test_outputs(mesh: flm.DeviceMesh) -> None:
    """Keys of the map that end in `output` lay out what layers return."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answers = [*differing(load("outputs"), {"outputs": eager_outputs})]
    assert len(answers) == len(OUR_OUTPUTS)
    for vector, _, answer in answers:
        rules = {key: tuple(axes) for key, axes in vector["rules"]}
        (layouts,) = [layouts for known, layouts in OUR_OUTPUTS if known == rules]
        assert answer == (
            layouts
            and [
                indices_of(flm.TensorLayout(axes, mesh).sharding(2), shape)
                for axes, shape in zip(layouts, [(8, 16), (8, 4)], strict=True)
            ]
        )


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
    assert not [*differing(load("devices"), members)]


# ------------------------------------------------------- what Keras's other parts do


def test_data_parallel(mesh: flm.DeviceMesh) -> None:
    """A map without rules: all is replicated, rows are split over the first axis.

    On a mesh of two axes Keras means to warn, and raises TypeError.
    """
    for grid in (mesh, flm.DeviceMesh("batch=8")):
        layout_map = flm.LayoutMap(grid, strict=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = flm.create(lambda: Two(nnx.Rngs(0)), layout_map)
        assert indices(model.d1.kernel[...]) == [[[0, 8], [0, 16]]] * 8
        rows = flm.distribute_batch(np.arange(16.0).reshape(8, 2), layout_map)
        assert len({str(part) for part in indices(rows)}) == grid.shape[0]


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
