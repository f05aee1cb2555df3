"""The report of a Resolution: folded, in any width, in colour."""

import io
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

import flax_layoutmap as flm

Tree = dict[str, Any]


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def layer() -> Tree:
    attention = {name: {"kernel": struct(64, 4, 16)} for name in ("query", "key")}
    return {
        "attention": attention,
        "up": {"kernel": struct(64, 256, dtype=jnp.bfloat16)},
        "norm": {"scale": struct(64)},
    }


def decoder(count: int = 80) -> Tree:
    """The tree of a decoder with a list of layers."""
    layers = {str(at): layer() for at in range(count)}
    return {"embed": struct(256, 64), "layers": layers}


def trained(tx: optax.GradientTransformation) -> Tree:
    layers = {f"layers_{at}": layer() for at in range(12)}
    params = {"embed": struct(256, 64), **layers}
    return {"params": params, "opt_state": jax.eval_shape(tx.init, params)}


def rules(**options: Any) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("data=2,model=4"), **options)
    layout_map["embed"] = ("model", None)
    layout_map["up/kernel"] = (None, "model")
    layout_map["attention/(query|key|value)/kernel"] = (None, "model", None)
    return layout_map


TREES: dict[str, Any] = {
    "list": decoder(),
    "adamw": trained(optax.adamw(1e-3)),
    "nothing": {},
}


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


def test_the_text() -> None:
    layout_map = rules()
    layout_map["down"] = None
    resolution = layout_map.resolve(decoder())
    assert resolution.report(width=70).splitlines() == [
        "path                                     spec         rule  per device",
        "───────────────────────────────────────  ───────────  ────  ──────────",
        "embed                                    P(model)     1       16.0 KiB",
        "layers/{0..79}/attention/key/kernel ×80  P(-, model)  3      320.0 KiB",
        "layers/…/attention/query/kernel ×80      P(-, model)  3      320.0 KiB",
        "layers/{0..79}/norm/scale ×80            replicated   none    20.0 KiB",
        "layers/{0..79}/up/kernel ×80             P(-, model)  2      640.0 KiB",
        "",
        "rule 1: embed",
        "rule 2: up/kernel",
        "rule 3: attention/(query|key|value)/kernel",
        "×80: 80 leaves that are alike, with the sum of their bytes",
        "parameters: 321 leaves, 5.1 MiB, 1.3 MiB per device",
        "mesh data=2,model=4: 1.3 MiB per device of 5.1 MiB; 0.4% of the bytes",
        "  replicated",
        "unused: rule 4 'down' matches no leaf",
        "unmatched: layers/{0..79}/norm/scale ×80 (64,) is matched by no rule,",
        "  so every device holds each in full (0.4% of the bytes)",
    ]
    # Where there is room, it has the arrays.
    line = "layers/{0..79}/up/kernel ×80               bf16[64,256]  P(-, model)  2"
    assert line in resolution.report(width=100)
    assert line in resolution.report()


def test_leaves_that_are_unlike_are_not_folded() -> None:
    tree = {f"w_{at}": struct(8, 8) for at in range(12)}
    tree["w_3"] = struct(8, 16)  # another shape
    tree["w_5"] = struct(8, 8, dtype=jnp.bfloat16)
    tree["w_8"] = struct(8, 6)  # another fallback
    layout_map = rules(indivisible="replicate", strict=False)
    layout_map["w"] = (None, "model")
    layout_map["w_7"] = ("data", None)  # another rule, by its exact key
    rows = layout_map.resolve(tree).report().split("\n\n")[0].splitlines()[2:]
    paths = [row.split("  ")[0] for row in rows]
    assert paths == ["w_{0..2,4,6,9..11} ×8", "w_3", "w_5", "w_7", "w_8"]


def test_optimizer_state_follows_or_has_its_own_rules() -> None:
    layout_map = rules()
    layout_map.optimizer["key/kernel"] = ("data", ..., "model")
    resolution = layout_map.resolve(TREES["adamw"])
    text = resolution.report()
    rows = [line for line in text.splitlines() if "up/kernel ×12" in line]
    assert [re.split("  +", row)[::3] for row in rows] == [
        ["opt_state/0/mu/layers_{0..11}/up/kernel ×12", "follows"],
        ["opt_state/0/nu/layers_{0..11}/up/kernel ×12", "follows"],
        ["params/layers_{0..11}/up/kernel ×12", "2"],
    ]
    assert re.search(r"/key/kernel ×12 .* P\(data, -, model\)  opt 1  ", text)
    assert "\noptimizer rule 1: key/kernel\n" in text


def test_bytes_in_host_memory_are_not_bytes_of_the_device() -> None:
    params = {"w": struct(16, 64)}
    state = jax.eval_shape(optax.adam(1.0).init, params)
    layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("fsdp=4"))
    layout_map["w"] = ("fsdp", None)
    layout_map.optimizer["w"] = flm.TensorLayout(
        ("fsdp", None), memory_kind="pinned_host"
    )
    resolution = layout_map.resolve({"params": params, "opt_state": state})
    sums = resolution.totals("optimizer")
    assert (sums.bytes_per_device, sums.host_bytes_per_device) == (4, 2048)
    text = resolution.report()
    assert " P(fsdp) pinned_host " in text
    assert (
        "optimizer state: 3 leaves, 8.0 KiB, 4 B per device and 2.0 KiB per device in "
        "host memory; <0.1% replicated" in text.splitlines()
    )
    assert "1.0 KiB and 2.0 KiB in host memory of 12.0 KiB" in repr(resolution)


def test_a_mesh_of_its_own_is_shown() -> None:
    layout_map = flm.LayoutMap()
    layout_map["v"] = flm.TensorLayout(("x",), flm.DeviceMesh.abstract("x=2"))
    resolution = layout_map.resolve({"v": struct(8)})
    assert " P(x) on x=2 " in resolution.report()
    (leaf,) = resolution.to_json()["leaves"]
    assert leaf["mesh"] == {"axis_names": ["x"], "shape": [2], "axis_types": ["auto"]}


NAMES = st.sampled_from(["a", "layers_0", "layers_1", "0", "1", "a\n", "模型"])


@given(
    st.lists(st.lists(NAMES, min_size=1, max_size=7), min_size=1, max_size=12),
    st.integers(1, 200),
)
def test_any_tree_fits_any_width(paths: list[list[str]], width: int) -> None:
    tree: Tree = {}
    for *folders, name in paths:
        inner = tree
        for folder in folders:
            inner = inner.setdefault(f"{folder}/", {})
        inner[name] = struct(8, 8)
    resolution = rules(strict=False).resolve(tree)
    text = resolution.report(width=width)
    table = text.split("\n\n")[0].splitlines()
    least = 16 + len("  replicated  none  per device")  # a path and the other columns
    for line in table:
        assert cell_len(line) <= max(width, least)
        assert line == line.rstrip() and line.isprintable()
    counts = [re.search(r" ×(\d+) ", line) for line in table[2:]]
    assert sum(int(found[1]) if found else 1 for found in counts) == len(resolution)
    # The ends of paths are never cut.
    rows = [re.split(r" ×|  ", line)[0] for line in table[2:]]
    ends = {path.split("/")[-1] for path in resolution.paths}
    shown = {row.split("/")[-1] for row in rows}
    assert ends <= shown | {end for end in ends if re.search("_?[01]$", end)}


# ------------------------------------------------------------------ on a terminal


def printed(value: Any, width: int = 80, **options: Any) -> str:
    """What rich prints of a value."""
    file = io.StringIO()
    Console(file=file, width=width, **options).print(value)
    return file.getvalue()


def other_mesh() -> Any:
    """The difference of two meshes, with leaves that were added."""
    after = rules(strict=False).on(flm.DeviceMesh.abstract("data=4,model=2"))
    return rules(strict=False).resolve(decoder(12)).diff(after.resolve(decoder(13)))


@pytest.mark.parametrize("name", [*TREES, "difference"])
def test_the_text_is_printed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As wide as a terminal, with colours; complete elsewhere."""
    value = other_mesh()
    if name in TREES:
        value = rules(strict=False).resolve(TREES[name])

    def shown() -> str:
        file = io.StringIO()
        assert value.show(file) is None
        return file.getvalue()

    for width in (80, 200):
        text = printed(value, width, color_system=None)
        assert text == f"{value.report(width=width)}\n"
    assert shown() == f"{value.report()}\n"
    monkeypatch.setenv("COLUMNS", "90")
    text = f"{value.report(width=90)}\n"
    assert shown() == text
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert shown() != text and re.sub(r"\x1b\[[\d;]*m", "", shown()) == text


def ansi(text: str) -> set[tuple[str, str]]:
    """Each coloured piece of a text, and its codes."""
    pieces = re.findall(r"\x1b\[([\d;]+)m([^\x1b]+)", text)
    return {(word, code) for code, word in pieces}


def test_each_mesh_axis_has_its_colour_and_warnings_are_red() -> None:
    layout_map = rules(strict=False)
    layout_map["w"] = (("model", "data"), None)
    tree = {"w": struct(16, 20), "model": {"data": struct(8)}}
    colours = {"force_terminal": True, "color_system": "standard"}
    pieces = ansi(printed(layout_map.resolve(tree), 200, **colours))
    # In specs, and in the line of the mesh; not in paths.
    assert {code for word, code in pieces if word == "data"} == {"36"}
    assert {code for word, code in pieces if word == "model"} == {"35"}
    red = [word for word, code in pieces if code == "31"]
    for words in ("unused: rule 1", "unmatched: ", " none "):
        assert any(words in word for word in red), words
