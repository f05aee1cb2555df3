"""Meshes, arrays and models, as text, SVG and HTML."""

import collections
import html
import io
import itertools
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import flax_layoutmap as flm
from flax_layoutmap import draw

MESH = flm.DeviceMesh.abstract("data=2,model=4")


class Box(NamedTuple):
    """A rectangle of an SVG with its tooltip; a frame has no colour."""

    about: str
    colour: str | None
    is_warning: bool
    words: tuple[str, ...]
    left: float
    top: float
    width: float
    height: float


def boxes_of(drawing: draw.Drawing) -> list[Box]:
    name = "{http://www.w3.org/2000/svg}"
    boxes = []
    for group in ElementTree.fromstring(drawing.svg()).iter(f"{name}g"):
        about, rect = group.find(f"{name}title"), group.find(f"{name}rect")
        if about is not None and rect is not None:
            words = tuple(str(text.text) for text in group.iter(f"{name}text"))
            sides = (float(rect.attrib[side]) for side in ("x", "y", "width", "height"))
            look = rect.get("fill"), "stroke-dasharray" in rect.attrib
            boxes.append(Box(str(about.text), *look, words, *sides))
    return boxes


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def held_by_device(drawing: draw.Drawing, values: Any) -> dict[int, Any]:
    """Device id → what the picture says that it holds."""
    held = {}
    for box in boxes_of(drawing):
        said = re.fullmatch(r"device (\d+) \(.*\): \S+ = (x.*)", box.about)
        if said is not None:
            held[int(said[1])] = eval(said[2], {"x": values})
    return held


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("mesh_shape", [(8,), (2, 4), (2, 2, 2)])
@pytest.mark.parametrize("shape", [(), (8,), (8, 16), (16, 8, 4), (2, 8, 2, 8)])
def test_every_device_is_drawn_with_what_it_holds(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], order: int
) -> None:
    devices = jax.devices()[:8][::order]
    sizes = dict(zip("abc", mesh_shape, strict=False))
    mesh = flm.DeviceMesh(mesh_shape, tuple(sizes), devices)
    values = np.arange(int(np.prod(shape))).reshape(shape)
    axes = [*sizes, *[None] * len(shape)]
    for dims in set(itertools.permutations(axes, len(shape))):
        parts = [1 if axis is None else sizes[axis] for axis in dims]
        if any(size % count for size, count in zip(shape, parts, strict=True)):
            continue
        layout = flm.TensorLayout(dims, mesh)
        x = jax.device_put(values, layout.sharding(len(shape)))
        held = held_by_device(draw.array(x), values)
        assert held.keys() == {device.id for device in devices}
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(held[shard.device.id], shard.data)


def test_all_ways_to_say_an_array(mesh: flm.DeviceMesh) -> None:
    layout_map = flm.LayoutMap(mesh)
    layout_map["w"] = (None, "model")
    layout = flm.TensorLayout((None, "model"), mesh)
    sharding = layout.sharding()
    x = jax.device_put(jnp.zeros((8, 16)), sharding)
    abstract = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=sharding)
    leaf = layout_map.resolve({"w": x})["w"]
    named = [draw.array(each) for each in (x, abstract, nnx.Param(x), leaf)]
    assert {drawing.text() for drawing in named} == {draw.array(x).text()}
    bare = draw.array(layout, (8, 16))
    assert bare == draw.array(sharding, (8, 16)) and bare != named[0]
    assert repr(bare) == "Drawing('array (8,16) as P(-, model) on data=2,model=4')"


def test_copies_have_one_letter_and_one_colour() -> None:
    boxes = boxes_of(draw.array(flm.TensorLayout(("model", None), MESH), (256, 64)))
    assert boxes[0].about == "A = x[0:64, 0:64], on device 0, 4"
    assert boxes[-1].about == "device 7 (data=1, model=3): D = x[192:256, 0:64]"
    looks = {(re.findall("[A-D]", " ".join(b.words))[0], b.colour) for b in boxes}
    assert len(looks) == 4 and len({colour for _, colour in looks}) == 4
    replicated = draw.array(flm.TensorLayout((), MESH), (8,))
    assert "replicated: each device holds (8,), which is all of it" in str(replicated)
    assert {box.colour for box in boxes_of(replicated)} == {"#dddddd"}


def test_large_meshes_are_cut_short() -> None:
    drawing = draw.mesh("pod=32,data=32,model=32")
    assert drawing.text().startswith("mesh pod=32,data=32,model=32\n32,768 devices, ab")
    assert drawing.text().count("the first devices: pod") == 8
    shown = [int(box.words[0]) for box in boxes_of(drawing)]
    numbers = np.arange(32**3).reshape(32, 32, 32)[:8, :16, :16]
    assert shown == numbers.ravel().tolist()


def test_a_mesh_of_devices_has_their_ids() -> None:
    mesh = flm.DeviceMesh((8,), ("model",), jax.devices()[:8][::-1])
    for drawing in (draw.mesh(mesh), draw.mesh(mesh.jax_mesh)):
        assert [box.words for box in boxes_of(drawing)][:2] == [("7",), ("6",)]
    assert "8 devices, cpu" in draw.mesh("model=-1").text()
    assert "8 devices, abstract" in draw.mesh({"model": 8}).text()


def rules() -> flm.LayoutMap:
    layout_map = flm.LayoutMap(MESH, indivisible="replicate")
    layout_map["embed|down"] = ("model", None)
    layout_map["up"] = (None, "model")
    layout_map["norm"] = None
    layout_map["odd"] = ("model",)
    return layout_map


def training() -> flm.Resolution:
    mlp = {"up": struct(64, 256), "down": struct(256, 64)}
    block = {"query": struct(64, 64), "mlp": mlp, "norm": struct(8)}
    layers = {str(at): block for at in range(12)}
    params = {"embed": struct(512, 64), "layers": layers, "norm": struct(64)}
    state = jax.eval_shape(optax.adam(1e-3).init, params)
    return rules().resolve({"params": params, "opt_state": state})


def odd() -> flm.Resolution:
    tree = {"odd": struct(6), "b'": struct(8), "c\n": struct(), "": struct(4)}
    return rules().resolve({**tree, "step": 3, "large": struct(8, 64)})


def one_array_and_no_mesh() -> flm.Resolution:
    return flm.LayoutMap().resolve(struct(8, 8))


MODELS = [training, odd, one_array_and_no_mesh]


@pytest.mark.parametrize("make", MODELS)
def test_boxes_hold_all_bytes_and_explain_them(make: Any) -> None:
    resolution = make()
    drawn = 0
    for box in boxes_of(draw.model(resolution)):
        first, *lines = box.about.split("\n")
        if box.colour is None or not lines:  # a module, or a line of the legend
            continue
        many = re.search(r" ×(\d+): ", first)
        path = re.split(r" \(| is matched", lines[0])[0]
        drawn += int(many[1] if many else 1) * resolution[path].bytes_per_device
        assert box.is_warning == (path in resolution.unmatched)
        if not box.is_warning:
            assert lines == resolution.explain(path).splitlines()
    whole = resolution.bytes_per_device
    assert whole * 0.999 <= drawn <= whole  # what is too small to see is left out


@pytest.mark.parametrize("make", MODELS)
def test_bars_add_up(make: Any) -> None:
    bars = draw.model(make()).text(100).split("\n\n")[1].splitlines()
    shares = [float(bar.split()[-1].strip("<%")) for bar in bars if bar[0] != " "]
    assert sum(shares) == pytest.approx(100, abs=0.5)


@given(st.lists(st.integers(100, 999), min_size=1, max_size=12))
def test_areas_are_in_proportion_to_bytes(sizes: list[int]) -> None:
    tree = {f"odd{at}x": struct(8 * size) for at, size in enumerate(sizes)}
    drawn = boxes_of(draw.model(rules().resolve(tree)))
    boxes = [box for box in drawn if "\n" in box.about]
    whole, canvas = sum(sizes), 1000 * 560
    for box in boxes:
        size = int(re.findall(r"\((\d+),\)", box.about)[0]) // 8
        # There is a gap of a point around each, and figures are rounded.
        area = (box.width + 2) * (box.height + 2)
        rounding = 0.2 * (box.width + box.height + 4)
        assert area == pytest.approx(canvas * size / whole, abs=rounding)
    for box, other in itertools.combinations(boxes, 2):
        across = min(box.left + box.width, other.left + other.width)
        down = min(box.top + box.height, other.top + other.height)
        assert across <= max(box.left, other.left) or down <= max(box.top, other.top)


def test_colours_are_layouts() -> None:
    known = collections.defaultdict[Any, set[str]](set)
    for box in boxes_of(draw.model(training())):
        if box.colour is not None and len(box.words) == 3:
            known[box.colour, box.is_warning].add(box.words[1])
    layouts = {look: layout for look, (layout,) in known.items()}
    assert layouts.pop(("#dddddd", True)) == "no rule: replicated"
    assert layouts.pop(("#dddddd", False), "replicated") == "replicated"
    assert sorted(layouts.values()) == ["P(-, model)", "P(model)"]


def test_more_layouts_than_colours_share_one() -> None:
    axes = "abcdefghijkl"
    layout_map = flm.LayoutMap(flm.DeviceMesh.abstract(dict.fromkeys(axes, 2)))
    for axis in axes:
        layout_map[f"w{axis}"] = (axis,)
    tree = {f"w{axis}": struct(64) for axis in axes}
    drawn = boxes_of(draw.model(layout_map.resolve(tree)))
    colours = collections.Counter(box.colour for box in drawn if "\n" in box.about)
    assert sorted(colours.values()) == [1] * 8 + [4] and "#dddddd" not in colours


@pytest.mark.parametrize("width", [40, 80, 200])
def test_text_keeps_to_its_width(width: int) -> None:
    mesh = flm.DeviceMesh.abstract("pod=2,data=16,model=32")
    layout = flm.TensorLayout((None, "data", "model"), mesh)
    array = draw.array(layout, (4, 4096, 8192))
    for drawing in (array, draw.mesh(mesh), draw.model(training())):
        assert max(map(len, drawing.text(width).splitlines())) <= width


def test_a_terminal_shows_colours() -> None:
    file, plain = io.StringIO(), io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="truecolor")
    console.print(draw.array(flm.TensorLayout(("model",), MESH), (8,)))
    assert "\x1b[38;2;20;24;31;48;2;119;170;221m" in file.getvalue()  # ink on blue
    draw.mesh(MESH).show(plain)
    assert plain.getvalue().startswith("mesh data=2,model=4\n")


def test_a_page_is_whole_and_has_the_report(tmp_path: Path) -> None:
    resolution = training()
    drawing = draw.model(resolution)
    for name, content in (("a.svg", drawing.svg()), ("a.html", drawing.html())):
        drawing.save(tmp_path / name)
        assert (tmp_path / name).read_text("utf-8") == content
        assert "<script" not in content and "@import" not in content
        assert re.findall(r"\b(?:src|href|url)\b", content) == []
    page, cell = drawing.html(), resolution._repr_html_()
    for text in (page, cell):
        assert drawing.svg() in text
        assert resolution.report() in html.unescape(text)
    assert page.startswith("<!doctype html>") and page.endswith("</html>\n")
    assert "<html" not in cell


@pytest.mark.parametrize("name", ["</title><script>x", "<!-- &lt;{0}{{ ]]>\x00 鍵 🔑"])
def test_names_are_words(name: str) -> None:
    layout_map = flm.LayoutMap(flm.DeviceMesh.abstract((2,), (name,)))
    mesh = layout_map.device_mesh
    resolution = layout_map.resolve({name: {"v": struct(8), "w": struct(8, 8)}})
    model = draw.model(resolution)
    assert any(resolution.paths[0] in box.about for box in boxes_of(model))
    assert "<script" not in model.html()
    for drawing in (model, draw.mesh(mesh), draw.array(flm.TensorLayout((), mesh), ())):
        assert str(mesh) in drawing.text()
        assert str(mesh) in "".join(ElementTree.fromstring(drawing.svg()).itertext())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: draw.mesh(None), "there is no mesh to draw; use flm.draw.mesh("),
        (
            lambda: draw.array(flm.TensorLayout((), MESH)),
            "needs the shape of the array",
        ),
        (
            lambda: draw.array(flm.TensorLayout(("x",)), (8,)),
            "has no mesh to draw it on",
        ),
        (lambda: draw.array(np.zeros(8)), "of a ndarray that is not on a mesh; pass a"),
        (lambda: draw.array(struct(8)), "of a ShapeDtypeStruct that is not on a mesh"),
        (lambda: draw.model(rules().resolve({})), "there is nothing to draw: no"),
        (
            lambda: draw.model(lambda: {}),  # pyright: ignore
            "is not a Resolution; resolve a model: flm.draw.model(layout_map.resolve(",
        ),
        (lambda: draw.mesh(MESH).save("a.png"), "saved as .svg or .html, got 'a.png'"),
    ],
)
def test_messages(call: Any, message: str) -> None:
    with pytest.raises(flm.LayoutError, match=re.escape(message)):
        call()
