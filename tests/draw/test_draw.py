"""Scenes (which device holds what, and sizes) and their renderers."""

import base64
import builtins
import dataclasses
import hashlib
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from helpers import run_python
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from pictures import MESH, draw, resolved, rules, struct, transformer

import flax_layoutmap as flm
from flax_layoutmap.draw import _forest, _scene
from flax_layoutmap.draw._scene import UNIT

P = PartitionSpec


# ------------------------------------------------------------------ arrays on meshes

MESHES = ["data=8", "data=2,model=4", "data=4,model=2", "a=2,b=2,c=2"]


def slices_of(drawing: Any) -> dict[int, str]:
    """Device id → the slice that the picture says it holds."""
    found = {}
    for box in drawing.scene.pictures[1].boxes:
        device, text = re.fullmatch(
            r"device (\d+) \(.*\) holds [A-Z]+ = (x.*)", box.detail
        ).groups()  # type: ignore[union-attr]
        found[int(device)] = text
    return found


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("shape", [(), (8,), (8, 16), (16, 8, 4), (2, 8, 2, 8)])
def test_every_device_is_drawn_with_what_it_holds(
    mesh: str, shape: tuple[int, ...]
) -> None:
    on = flm.DeviceMesh(mesh)
    values = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    names = on.axis_names
    layouts: list[Any] = [(None,) * len(shape)]
    for dim in range(len(shape)):
        layouts.append((*(None,) * dim, names[-1], *(None,) * (len(shape) - dim - 1)))
    if len(shape) > 1 and len(names) > 1:
        layouts.append((names[0], *(None,) * (len(shape) - 2), names[-1]))
    if shape and shape[0] % 8 == 0:
        layouts.append((names, *(None,) * (len(shape) - 1)))
    drawn = 0
    for axes in layouts:
        if any(
            size % flm.TensorLayout((axis,), on).num_shards(0)
            for size, axis in zip(shape, axes, strict=True)
        ):
            continue
        drawn += 1
        x = jax.device_put(values, flm.TensorLayout(axes, on).sharding(len(shape)))
        texts = slices_of(draw.array(x))
        for shard in x.addressable_shards:
            held = eval(texts[shard.device.id], {"x": values})
            np.testing.assert_array_equal(held, shard.data)
        assert len(texts) == 8
    assert drawn


def test_devices_in_another_order() -> None:
    devices = jax.devices()[::-1]
    mesh = flm.DeviceMesh((2, 4), ("data", "model"), devices)
    values = np.arange(8.0)
    x = jax.device_put(values, flm.TensorLayout(("model",), mesh).sharding())
    texts = slices_of(draw.array(x))
    for shard in x.addressable_shards:
        held = eval(texts[shard.device.id], {"x": values})
        np.testing.assert_array_equal(held, shard.data)
    first = draw.mesh(mesh).scene.pictures[0].boxes[0]
    assert first.lines == ("7",)


def test_all_ways_to_say_an_array(mesh: flm.DeviceMesh) -> None:
    layout = flm.TensorLayout((None, "model"), mesh)
    sharding = layout.sharding()
    x = jax.device_put(jnp.zeros((8, 16)), sharding)
    named = [
        draw.array(x),
        draw.array(jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=sharding)),
        draw.array(nnx.Param(x)),
        draw.array(rules(mesh).resolve({"up": {"kernel": x}})["up/kernel"]),
    ]
    assert len({drawing.scene for drawing in named}) == 1
    bare = [draw.array(layout, (8, 16)), draw.array(sharding, (8, 16))]
    assert bare[0] == bare[1]
    assert named[0].scene.title == (
        "array (8,16) float32 as P(-, model) on data=2,model=4"
    )
    assert bare[0].scene.title == "array (8,16) as P(-, model) on data=2,model=4"


def test_copies_have_one_letter_and_one_colour() -> None:
    scene = draw.array(flm.TensorLayout(("model", None), MESH), (8, 8)).scene
    array, devices = scene.pictures
    assert [box.lines for box in array.boxes] == [
        ("A", "on 0, 4"),
        ("B", "on 1, 5"),
        ("C", "on 2, 6"),
        ("D", "on 3, 7"),
    ]
    assert [box.lines[1] for box in devices.boxes] == list("ABCDABCD")
    for box in devices.boxes:
        assert box.colour == array.boxes[box.group].colour
    assert len({box.colour for box in array.boxes}) == 4
    assert scene.lines[0] == "4 slices, 2 devices each, copied along data"


def test_large_meshes_are_cut_short() -> None:
    mesh = flm.DeviceMesh.abstract("pod=32,data=32,model=32")
    scene = draw.array(flm.TensorLayout(("data", "model"), mesh), (64, 64)).scene
    array, devices = scene.pictures
    assert (len(array.grids), len(devices.grids)) == (1, 7)
    assert array.grids[0].rows[-3:] == ("26:28", "…", "62:64")
    assert devices.boxes[-1].lines[0] == str(32**3 - 1)
    assert all(len(row) == 16 for row in array.grids[0].boxes)


def test_boxes_do_not_overlap() -> None:
    mesh = flm.DeviceMesh.abstract("pod=3,data=4,model=16")
    layout = flm.TensorLayout(("pod", "data", None, "model"), mesh)
    for picture in draw.array(layout, (3, 4, 2, 16)).scene.pictures:
        taken: list[tuple[float, float, float, float]] = []
        for box in picture.boxes:
            right, bottom = box.left + box.width, box.top + box.height
            assert 0 <= box.left < right <= picture.width
            assert 0 <= box.top < bottom <= picture.height
            for left, top, r, b in taken:
                assert box.left >= r or right <= left or box.top >= b or bottom <= top
            taken.append((box.left, box.top, right, bottom))


def test_the_text_of_an_array() -> None:
    layout = flm.TensorLayout(("model", None), MESH)
    assert draw.array(layout, (256, 64)).text() == TEXT


TEXT = """\
array (256,64) as P(model) on data=2,model=4
4 slices, 2 devices each, copied along data
each device holds (64,64)

array, each slice with its devices    devices, each with its slice
                   dim 1                             model
dim 0 on model      0:64              data    0     1     2     3
               ┌───────────┐               ┌─────┬─────┬─────┬─────┐
          0:64 │ A on 0, 4 │             0 │ 0 A │ 1 B │ 2 C │ 3 D │
        64:128 │ B on 1, 5 │             1 │ 4 A │ 5 B │ 6 C │ 7 D │
       128:192 │ C on 2, 6 │               └─────┴─────┴─────┴─────┘
       192:256 │ D on 3, 7 │
               └───────────┘"""


def test_the_text_of_a_mesh() -> None:
    assert (
        draw.mesh("data=2,model=2").text()
        == """\
mesh data=2,model=2
4 devices, abstract

devices
       model
data   0   1
     ┌───┬───┐
   0 │ 0 │ 1 │
   1 │ 2 │ 3 │
     └───┴───┘"""
    )


@pytest.mark.parametrize("width", [56, 80, 120, 200])
def test_text_keeps_to_its_width(width: int) -> None:
    mesh = flm.DeviceMesh.abstract("pod=2,data=16,model=32")
    layout = flm.TensorLayout((None, "data", "model"), mesh)
    drawings = [
        draw.array(layout, (4, 4096, 8192)),
        draw.mesh(mesh),
        draw.model(resolved()),
    ]
    for drawing in drawings:
        assert max(map(len, drawing.text(width).splitlines())) <= width


# ------------------------------------------------------------------ whole models


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([Block(rngs) for _ in range(3)])
        self.adapted = nnx.List(
            [nnx.LoRALinear(8, 8, lora_rank=2, rngs=rngs) for _ in range(3)]
        )


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(4):
            x = nn.Dense(8)(x)
        return x


def odd() -> flm.Resolution:
    layout_map = flm.LayoutMap(MESH, indivisible="replicate")
    layout_map["w"] = ("model",)
    layout_map["b'"] = ("model",)
    return layout_map.resolve(
        {
            "a": {"w": struct(6)},
            "b'": struct(8),
            "c\n": struct(),
            "step": 3,
            "v": "text",
        }
    )


def linen() -> flm.Resolution:
    variables = jax.eval_shape(Mlp().init, jax.random.key(0), jnp.ones((1, 8)))
    return rules().resolve(variables)


def nnx_model() -> flm.Resolution:
    layout_map = rules()
    layout_map["adapted/.*kernel"] = (None, "model")
    return layout_map.resolve(lambda: Model(nnx.Rngs(0)))


def adafactor() -> flm.Resolution:
    params = transformer(3)
    state = jax.eval_shape(optax.adafactor(1e-3).init, params)
    return rules().resolve({"params": params, "opt_state": state})


def short() -> flm.Resolution:
    """Names that are parts of the words about them."""
    params = {name: {"b": struct(8, 8)} for name in ("b", "a", "follows", "because")}
    state = jax.eval_shape(optax.adam(1e-3).init, params)
    layout_map = flm.LayoutMap(MESH)
    layout_map["a/b"] = (None, "model")
    return layout_map.resolve({"params": params, "opt_state": state})


def quantised() -> flm.Resolution:
    """Kernels with scales that follow them."""
    block = {"up": {"kernel": struct(8, 16), "scale": struct(1, 16)}}
    layout_map = flm.LayoutMap(MESH)
    layout_map["up/kernel"] = (None, "model")
    return layout_map.resolve({"layers": {str(at): block for at in range(3)}})


MODELS = [quantised, resolved, odd, linen, nnx_model, adafactor, short]


def paths_of(forest: Any) -> list[str]:
    paths: list[str] = []
    for name, parent in zip(forest.names, forest.parents, strict=True):
        paths.append(f"{paths[parent]}/{name}" if parent > 0 else name)
    return paths


def spelled(pieces: Any, path: str) -> str:
    """What the script of the page makes of the pieces."""
    parts = path.split("/")

    def said(piece: str | int) -> str:
        if isinstance(piece, str) or piece == 0:
            return path if piece == 0 else str(piece)
        return "/".join(parts[-piece:] if piece > 0 else parts[:-piece])

    return "".join(map(said, pieces))


@pytest.mark.parametrize("make", MODELS)
def test_every_leaf_is_explained_as_the_resolution_does(make: Any) -> None:
    resolution = make()
    scene = draw.model(resolution).scene
    seen = []
    for view in scene.views:
        forest = view.flat or view.folded
        for path, kind in zip(paths_of(forest), forest.kinds, strict=True):
            if kind < 0:
                continue
            said, leaf = scene.kinds[kind], resolution[path]
            seen.append(path)
            assert spelled(said.explain, path) == resolution.explain(path)
            assert said.bytes_per_device == leaf.bytes_per_device
            assert (said.mark == "unmatched") == (path in resolution.unmatched)
    assert sorted(seen) == sorted(resolution.paths)


@pytest.mark.parametrize("make", MODELS)
def test_sums_are_those_of_the_resolution(make: Any) -> None:
    resolution = make()
    scene = draw.model(resolution).scene
    assert sum(view.bytes_per_device for view in scene.views) == (
        resolution.bytes_per_device
    )
    assert sum(view.leaves for view in scene.views) == len(resolution)
    for view in scene.views:
        for forest in filter(None, (view.folded, view.flat)):
            times = [1] * len(forest.names)
            leaves = held = 0
            for node in range(1, len(forest.names)):
                times[node] = times[forest.parents[node]] * forest.counts[node]
                if forest.kinds[node] >= 0:
                    leaves += times[node]
                    kind = scene.kinds[forest.kinds[node]]
                    held += times[node] * kind.bytes_per_device
            assert (leaves, held) == (view.leaves, view.bytes_per_device)
    bars = scene.bars.bars
    assert sum(size for bar in bars for _, size in bar.parts) == (
        resolution.bytes_per_device
    )
    assert sum(shade.bytes_per_device for shade in scene.shades) == (
        resolution.bytes_per_device
    )


def with_an_extra_leaf() -> flm.Resolution:
    params = transformer(6)
    params["layers"]["4"] = {**params["layers"]["4"], "extra": struct(8)}
    return rules().resolve(params)


def with_another_layout() -> flm.Resolution:
    layout_map = rules()
    layout_map["layers/2/norm/scale"] = ("model",)
    return layout_map.resolve(transformer(4))


def folds_in_folds() -> flm.Resolution:
    inner = {str(at): {"w": struct(8)} for at in range(3)}
    layout_map = rules()
    layout_map["w"] = None
    return layout_map.resolve({f"stage_{at}": {"blocks": inner} for at in range(4)})


def many_layers() -> flm.Resolution:
    return rules().resolve(transformer(300))


@pytest.mark.parametrize(
    ("make", "folded"),
    [
        (with_an_extra_leaf, {"layers/{0..3,5}/mlp/up/kernel": 5, "layers/4/extra": 1}),
        (
            with_another_layout,
            {"layers/{0,1,3}/norm/scale": 3, "layers/2/norm/scale": 1},
        ),
        (folds_in_folds, {"stage_{0..3}/blocks/{0..2}/w": 12}),
        (nnx_model, {"adapted/{0..2}/lora/lora_a": 3}),
        (many_layers, {"layers/{0..299}/norm/scale": 300}),
    ],
)
def test_layers_are_folded_where_they_are_alike(
    make: Any, folded: dict[str, int]
) -> None:
    scene = draw.model(make()).scene
    forest = scene.views[0].folded
    times = [1]
    for parent, count in list(zip(forest.parents, forest.counts, strict=True))[1:]:
        times.append(times[parent] * count)
    found = dict(zip(paths_of(forest), times, strict=True))
    assert folded.items() <= found.items()
    # The closest rule is slow to find, so it is not looked for in every layer.
    assert len(scene.kinds) < min(120, scene.views[0].leaves)


def test_an_optimizer_that_was_resolved_alone() -> None:
    params = transformer(2)
    state = jax.eval_shape(optax.adam(1e-3).init, params)
    both = rules().resolve({"params": params, "opt_state": state})
    drawn = draw.model(rules().resolve(params), both).scene
    assert [view.title for view in drawn.views] == ["Parameters", "Optimizer"]
    assert [view.leaves for view in drawn.views] == [12, 25]
    assert paths_of(drawn.views[0].folded)[1] == "embed/embedding"


Tree = st.recursive(
    st.integers(0, 1000),
    lambda inner: st.lists(inner, min_size=1, max_size=6),
    max_leaves=40,
)


def columns_of(tree: Any) -> tuple[list[int], list[int]]:
    parents, weights = [-1], [0]

    def add(node: Any, parent: int) -> None:
        at = len(parents)
        parents.append(parent)
        weights.append(node if isinstance(node, int) else 0)
        for child in [] if isinstance(node, int) else node:
            add(child, at)

    add(tree, 0)
    for at in range(len(parents) - 1, 0, -1):
        weights[parents[at]] += weights[at]
    return parents, weights


def check_areas(parents: list[int], weights: list[int], found: Any) -> None:
    """Areas are in proportion to weights, and everything is within its parent."""
    columns = np.array(found).reshape(-1, 4)
    left, top, right, bottom = columns.T
    assert columns.min() >= 0 and columns.max() <= UNIT
    areas = (right - left).astype(float) * (bottom - top)
    for node, parent in enumerate(parents):
        if parent < 0:
            continue
        # Whole numbers: each side is off by one at most.
        wanted = UNIT * UNIT * weights[node] / (weights[0] or 1)
        assert abs(areas[node] - wanted) <= 4.0 * UNIT + 4
        if weights[node]:
            assert left[node] >= left[parent] - 1 and right[node] <= right[parent] + 1
            assert top[node] >= top[parent] - 1 and bottom[node] <= bottom[parent] + 1


def likes_of(tree: Any) -> list[int]:
    """Equal numbers for equal subtrees."""
    known: dict[str, int] = {}
    likes = [-1]

    def add(node: Any) -> None:
        likes.append(known.setdefault(repr(node), len(known)))
        for child in [] if isinstance(node, int) else node:
            add(child)

    add(tree)
    return likes


@given(
    tree=Tree, times=st.integers(1, 9), aspect=st.floats(0.3, 4), known=st.booleans()
)
def test_areas_are_in_proportion(
    tree: Any, times: int, aspect: float, known: bool
) -> None:
    layers = [tree] * times
    parents, weights = columns_of(layers)
    likes = likes_of(layers) if known else [-1] * len(parents)
    check_areas(parents, weights, _forest.layout(parents, weights, likes, aspect))


def test_equal_layers_look_alike() -> None:
    layers = [[3, 2, [1, 1]]] * 16
    parents, weights = columns_of(layers)
    found = _forest.layout(parents, weights, likes_of(layers), 1.0)
    nodes = np.array(found).reshape(-1, 4)
    starts = [at for at, parent in enumerate(parents) if parent == 1]
    first = nodes[starts[0] : starts[1]]
    for start in starts:
        shift = np.tile(nodes[start, :2] - first[0, :2], 2)
        moved = nodes[start : start + len(first)] - shift
        np.testing.assert_allclose(moved, first, atol=1)


@given(weights=st.lists(st.integers(1, 1000), min_size=1, max_size=30))
def test_rectangles_cover_all_and_do_not_overlap(weights: list[int]) -> None:
    weights.sort(reverse=True)
    found = _forest.squarify(weights, (0.0, 0.0, 2.0, 1.0))
    areas = [(r - left) * (b - top) for left, top, r, b in found]
    np.testing.assert_allclose(areas, 2 * np.array(weights) / sum(weights), rtol=1e-6)
    for at, (left, top, right, bottom) in enumerate(found):
        for other_left, other_top, other_right, other_bottom in found[:at]:
            across = min(right, other_right) - max(left, other_left)
            down = min(bottom, other_bottom) - max(top, other_top)
            assert min(across, down) < 1e-9


def test_squares_are_preferred() -> None:
    found = _forest.squarify([1] * 16, (0.0, 0.0, 4.0, 4.0))
    assert {(r - left, b - top) for left, top, r, b in found} == {(1.0, 1.0)}


# ------------------------------------------------------------------ bars


def test_both_moments_are_taken_apart_alike() -> None:
    labels = [bar.label for bar in draw.model(resolved()).scene.bars.bars]
    mu = {label.split("/mu/")[1] for label in labels if "/mu/" in label}
    nu = {label.split("/nu/")[1] for label in labels if "/nu/" in label}
    assert mu == nu and mu
    assert len(labels) == len(set(labels)) <= 12


def test_before_and_after() -> None:
    before = rules("data=8,model=1").resolve(transformer(2))
    after = rules("data=1,model=8")
    after.replace("query/kernel", None)
    after.replace("out/kernel", None)
    drawing = draw.compare(before, after.resolve(transformer(2)), ("now", "then"))
    scene = drawing.scene
    assert (scene.total_before, scene.total) == (
        before.bytes_per_device,
        after.resolve(transformer(2)).bytes_per_device,
    )
    bars = {bar.label: bar for bar in scene.bars}
    up = bars["layers/*/mlp/up/kernel"]
    assert [size for _, size in up.before] == [2 * 64 * 256 * 4]
    assert [size for _, size in up.parts] == [2 * 64 * 256 * 4 // 8]
    assert scene.lines == (
        "now: 448.8 KiB per device on data=8,model=1",
        f"then: {(scene.total / 1024):.1f} KiB per device on data=1,model=8",
    )
    text = drawing.text(100)
    assert re.search(r"layers/\*/mlp/up/kernel +now .*KiB", text)


def test_modules_that_only_one_has() -> None:
    small, large = (
        rules().resolve(transformer(1)),
        rules().resolve({**transformer(1), "head": {"kernel": struct(64, 512)}}),
    )
    bars = {bar.label: bar for bar in draw.compare(small, large).scene.bars}
    assert bars["head/kernel"].before == () and bars["head/kernel"].parts


def test_the_bars_as_text() -> None:
    tree = {"up": {"kernel": struct(4, 8)}, "norm": struct(16)}
    text = draw.model(rules().resolve(tree)).text(60)
    assert (
        text
        == """\
Bytes per device by module
mesh data=2,model=4: 96 B per device of 192 B; 33.3% of the
  bytes replicated

norm       ░░░░░░░░░░░░░░░░░░░░░░░░░░░░░        64 B   66.7%
up/kernel  ██████████████                       32 B   33.3%

░░ replicated   ██ P(-, model)"""
    )


# ------------------------------------------------------------------ renderers

DRAWINGS = {
    "mesh": lambda: draw.mesh("data=2,model=4"),
    "array": lambda: draw.array(flm.TensorLayout(("model",), MESH), (8,)),
    "model": lambda: draw.model(resolved(3)),
    "compare": lambda: draw.compare(resolved(2), resolved(3)),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_scenes_are_plain(name: str) -> None:
    scene = DRAWINGS[name]().scene
    assert hash(scene) == hash(DRAWINGS[name]().scene)
    values = json.loads(json.dumps(dataclasses.asdict(scene)))

    def check(value: Any) -> None:
        if isinstance(value, dict | list):
            for inner in value.values() if isinstance(value, dict) else value:
                check(inner)
        else:
            assert value is None or type(value) in (str, int, float, bool)

    check(values)
    with pytest.raises(dataclasses.FrozenInstanceError):
        scene.title = "other"


@pytest.mark.parametrize("name", DRAWINGS)
def test_saved_by_suffix(name: str, tmp_path: Path) -> None:
    drawing = DRAWINGS[name]()
    for suffix in ("html", "txt", "json"):
        drawing.save(tmp_path / f"picture.{suffix}")
    assert (tmp_path / "picture.html").read_text("utf-8") == drawing.html()
    assert (tmp_path / "picture.txt").read_text("utf-8") == drawing.text() + "\n"
    assert json.loads((tmp_path / "picture.json").read_text("utf-8"))["title"]
    assert str(drawing) == drawing.text()
    assert repr(drawing) == f"Drawing({drawing.scene.title!r})"


@pytest.mark.parametrize("name", DRAWINGS)
def test_saved_as_png(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(
        "matplotlib", reason="matplotlib, the extra 'plot', is not installed."
    )
    # Other tests in this process may have loaded it: Keras does.
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    DRAWINGS[name]().save(str(tmp_path / "picture.png"))
    data = (tmp_path / "picture.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 5000
    assert "matplotlib.pyplot" not in sys.modules


def test_png_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(flm.LayoutError) as caught:
        DRAWINGS["mesh"]().save(tmp_path / "picture.png")
    assert str(caught.value) == (
        "a PNG is drawn by matplotlib, which is not installed; "
        "pip install 'flax-layoutmap[plot]', or save as .html or .txt"
    )


class Reader(HTMLParser):
    """Tags, their attributes, and the text of styles and scripts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inner: dict[str, list[str]] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.inner.setdefault(self.tags[-1][0] if self.tags else "", []).append(data)


@pytest.mark.parametrize("name", DRAWINGS)
def test_pages_allow_nothing_but_themselves(name: str) -> None:
    text = DRAWINGS[name]().html()
    read = Reader(text)
    (policy,) = [
        attributes["content"] or ""
        for tag, attributes in read.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for kind, pattern in (
        ("style", r"<style>(.*?)</style>"),
        ("script", r"<script>(.*?)</script>"),
    ):
        allowed = re.findall(rf"{kind}-src '(sha256-[^']+)'", policy)
        contents = re.findall(pattern, text, re.DOTALL)
        digests = [hashlib.sha256(content.encode()).digest() for content in contents]
        hashes = [f"sha256-{base64.b64encode(d).decode()}" for d in digests]
        assert hashes == allowed
    for _, attributes in read.tags:
        assert not {"src", "href", "style", "onclick", "srcset"} & attributes.keys()
    urls = set(re.findall(r"https?://[^\s\"'<>]+", text))
    assert urls <= {"http://www.w3.org/2000/svg"}


def test_notebooks(mesh: flm.DeviceMesh) -> None:
    assert "<svg" in DRAWINGS["array"]()._repr_html_()
    assert "<script" not in DRAWINGS["array"]()._repr_html_()
    resolution = resolved(3)
    assert resolution._repr_html_() == draw.model(resolution)._repr_html_()
    (frame,) = Reader(resolution._repr_html_()).tags
    assert frame[0] == "iframe" and frame[1]["sandbox"] == "allow-scripts"
    assert frame[1]["srcdoc"] == draw.model(resolution).html()
    assert flm.LayoutMap(mesh).resolve({})._repr_html_().startswith("<p>Resolution(0")


def test_notebooks_keep_the_folded_layers_of_a_large_model() -> None:
    large = resolved(1001, optimizer=False)
    page = draw.model(large).html()
    assert len(large._repr_html_()) < len(page) / 3


def test_a_large_page_is_small() -> None:
    """30,000 leaves fit in 5 MB; so 3,000 in a tenth of that."""
    assert len(draw.model(resolved(200)).html()) < 500_000


def test_in_a_terminal() -> None:
    from rich.console import Console

    def printed(**options: Any) -> str:
        console = Console(width=90, force_terminal=True, **options)
        with console.capture() as captured:
            console.print(DRAWINGS["array"]())
        return captured.get()

    coloured = printed(color_system="truecolor", legacy_windows=False)
    assert "\x1b[38;2;20;24;31;48;2;119;170;221m" in coloured
    plain = printed(color_system=None)
    assert "\x1b[38" not in plain
    strip = re.sub(r"\x1b\[[0-9;]*m", "", plain)
    wanted = DRAWINGS["array"]().text(90).splitlines()
    assert [line.rstrip() for line in strip.splitlines()] == wanted


def test_the_style_sheet_has_the_palette() -> None:
    css = (Path(flm.__file__).parent / "draw" / "page.css").read_text("utf-8")
    light = css.split('[data-theme="dark"]')[0]
    found = re.findall(r"--c(\d): (#\w{6})", light)
    assert [colour for _, colour in sorted(found)] == list(_scene.PALETTE)
    assert f"--neutral: {_scene.GREY}" in light and f"--on: {_scene.INK}" in light


def brightness(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    r, g, b = (
        p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
    )
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("colour", [*_scene.PALETTE, _scene.GREY])
def test_words_can_be_read_on_every_colour(colour: str) -> None:
    contrast = (brightness(colour) + 0.05) / (brightness(_scene.INK) + 0.05)
    assert contrast >= 7


def test_drawing_loads_no_plotting_and_starts_no_backend() -> None:
    code = """
import sys
import jax, flax_layoutmap as flm
mesh = flm.DeviceMesh.abstract("data=2,model=4")
layout_map = flm.LayoutMap(mesh)
layout_map["w"] = ("model",)
kernel = jax.ShapeDtypeStruct((8, 8), "float32")
page = flm.draw.model(layout_map.resolve({"w": jax.ShapeDtypeStruct((8,), "float32")}))
page.html(), page.text(), flm.draw.mesh(mesh)._repr_html_()
flm.draw.array(flm.TensorLayout(("model",), mesh), (8,)).html()
jax.config.update("jax_num_cpu_devices", 3)
print(len(jax.devices()), "matplotlib" in sys.modules)
"""
    assert run_python(code).split() == ["3", "False"]


# ------------------------------------------------------------------ mistakes

NOTHING = (
    "there is nothing to draw: the Resolution has no leaves; resolve a model: "
    "flm.draw.model(layout_map.resolve(model))"
)
MISTAKES: list[tuple[Any, type[Exception], str]] = [
    (
        lambda: draw.mesh(None),
        flm.errors.MeshError,
        'there is no mesh to draw; use flm.draw.mesh("data=2,model=4"), a '
        "flm.DeviceMesh or a jax.sharding.Mesh",
    ),
    (
        lambda: draw.array(flm.TensorLayout(("model",), MESH)),
        flm.LayoutError,
        "flm.draw.array of a layout or a sharding needs the shape of the array: "
        "flm.draw.array(layout, (256, 64))",
    ),
    (
        lambda: draw.array(flm.TensorLayout(("model",)), (8,)),
        flm.errors.MeshError,
        "the layout ('model',) has no mesh to draw it on; give it one: "
        'flm.draw.array(layout.on(flm.DeviceMesh.abstract("data=2,model=4")), shape)',
    ),
    (
        lambda: draw.array(P("model"), (8,)),
        flm.errors.MeshError,
        "the layout ('model', ...) has no mesh to draw it on; give it one: "
        'flm.draw.array(layout.on(flm.DeviceMesh.abstract("data=2,model=4")), shape)',
    ),
    (
        lambda: draw.array(np.ones(3)),
        flm.LayoutError,
        "flm.draw.array of a ndarray, which has no sharding; pass a "
        "jax.Array, a jax.ShapeDtypeStruct with a sharding, a leaf of a Resolution, or "
        "a layout and a shape",
    ),
    (
        lambda: draw.array(jnp.ones(3), (4,)),
        flm.LayoutError,
        "flm.draw.array was given the shape (4,), but the array has (3,); leave it out",
    ),
    (
        lambda: draw.array(flm.TensorLayout(("model",), MESH), (6,)),
        flm.LayoutError,
        "shape (6,): dim 0 of size 6 does not divide by mesh axis 'model' of size 4",
    ),
    (lambda: draw.model(rules().resolve({})), flm.LayoutError, NOTHING),
    (
        lambda: draw.compare(*[rules().resolve({})] * 2),
        flm.LayoutError,
        NOTHING,
    ),
    (
        lambda: draw.mesh("x=2").save("picture.gif"),
        flm.LayoutError,
        "a picture is saved as .html, .png, .txt or .json, got 'picture.gif'",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), MISTAKES)
def test_mistakes(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    assert str(caught.value) == message


def test_one_array_on_one_device() -> None:
    scene = draw.array(jnp.ones((2, 2))).scene
    assert scene.lines == (
        "replicated: each device holds (2,2), 16 B, which is all of it",
    )


def test_an_array_without_elements() -> None:
    layout = flm.TensorLayout(("model", None), MESH)
    texts = slices_of(draw.array(layout, (0, 4)))
    assert set(texts.values()) == {"x[0:0, :]"}


def test_sorted_by_index() -> None:
    names = ["1", "10", "2", "a", "b_10", "b_9"]
    root = _forest.grow([f"x/{name}" for name in names], [0] * 6)
    assert [node.name for node in root.children[0].children] == [
        "1",
        "2",
        "10",
        "a",
        "b_9",
        "b_10",
    ]


def test_sharding_of_jax_itself(mesh: flm.DeviceMesh) -> None:
    sharding = NamedSharding(mesh.jax_mesh, P(None, ("data", "model")))
    drawing = draw.array(sharding, (4, 16))
    assert "8 slices, 1 device each" in drawing.text()


# ------------------------------------------------------------ more specs than colours


def with_many_specs(count: int) -> flm.Resolution:
    layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("a=2,b=2,c=2"))
    axes = ["a", "b", "c", ("a", "b"), ("b", "a"), ("a", "c"), ("c", "a"), None]
    pairs = [
        (x, y) for x in axes for y in axes if x and (not y or set(x).isdisjoint(y))
    ]
    tree = {}
    for number, pair in enumerate(pairs[:count]):
        layout_map[f"w{number}$"] = pair
        tree[f"w{number}"] = struct(64, 64)
    return layout_map.resolve(tree)


def test_more_specs_than_colours_have_patterns() -> None:
    resolution = with_many_specs(12)
    drawing = draw.model(resolution)
    numbers = [shade.colour for shade in drawing.scene.shades]
    assert sorted(numbers) == list(range(12))
    looks = {(_scene.colour(n), _scene.hatch(n)) for n in numbers}
    assert len(looks) == 12
    assert [_scene.hatch(n) for n in (0, 7)] == [None, None]
    # Without colours, each has a character of its own.
    assert len({_scene.fill(n) for n in numbers}) == 12
    assert all(_scene.fill(n) in drawing.text() for n in numbers[:10])


def test_deep_trees_are_drawn() -> None:
    tree: Any = struct(8, 8)
    for level in range(800):
        tree = {f"m{level}": tree}
    layout_map = flm.LayoutMap(MESH)
    layout_map["m0$"] = ("data", "model")
    drawing = draw.model(layout_map.resolve({"one": tree, "two": struct(8, 8)}))
    (view,) = drawing.scene.views
    assert [len(name.split("/")) for name in view.folded.names] == [1, 801, 1]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none" / "mesh.txt"
    with pytest.raises(FileNotFoundError) as caught:
        draw.mesh("x=2").save(path)
    assert caught.value.filename == str(path)


def test_pictures_are_written_as_a_whole(tmp_path: Path) -> None:
    drawing = draw.mesh("x=2")
    target = tmp_path / "real.txt"
    target.write_text("old")
    target.chmod(0o640)
    (tmp_path / "link.txt").symlink_to(target)
    drawing.save(tmp_path / "link.txt")
    assert (tmp_path / "link.txt").is_symlink()
    assert target.read_text() == drawing.text() + "\n"
    assert target.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.txt", "real.txt"]
