"""The report: folded, fitted to a width, in colour, as Markdown and as JSON."""

import io
import json
import os
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from helpers import ROOT
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import flax_layoutmap as flm
from flax_layoutmap._show import resolved_table as _resolved_table
from flax_layoutmap._show.diff import ResolutionDiff

Tree = dict[str, Any]


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def layer(dim: int = 64) -> Tree:
    attention = {name: {"kernel": struct(dim, 4, 16)} for name in ("query", "key")}
    return {
        "attention": attention,
        "up": {"kernel": struct(dim, 4 * dim, dtype=jnp.bfloat16)},
        "norm": {"scale": struct(dim)},
    }


def decoder(count: int = 80) -> Tree:
    """The tree of a decoder with a list of layers."""
    return {
        "embed": struct(256, 64),
        "layers": {str(at): layer() for at in range(count)},
    }


def linen(count: int = 12) -> Tree:
    layers = {f"layers_{at}": layer() for at in range(count)}
    return {"params": {"embed": struct(256, 64), **layers}}


def trained(tx: optax.GradientTransformation) -> Tree:
    params = linen()["params"]
    return {"params": params, "opt_state": jax.eval_shape(tx.init, params)}


def rules(**options: Any) -> flm.LayoutMap:
    mesh = flm.DeviceMesh.abstract("data=2,model=4")
    layout_map = flm.LayoutMap(mesh, **options)
    layout_map["embed"] = ("model", None)
    layout_map["up/kernel"] = (None, "model")
    layout_map["attention/(query|key|value)/kernel"] = (None, "model", None)
    return layout_map


TREES: dict[str, Any] = {
    "list": decoder(),
    "list of two": decoder(2),
    "linen": linen(),
    "adamw": trained(optax.adamw(1e-3)),
    "adafactor": trained(optax.adafactor(1e-3)),
    "stacked": {"layers": {"up": {"kernel": struct(64, 256)}}},
    "nothing": {},
}


def test_repeated_layers_share_a_row() -> None:
    lines = rules().resolve({"layers": decoder()["layers"]}).report().splitlines()
    cells = [re.split(r"  +", line) for line in lines]
    assert cells[2:6] == [
        [
            f"layers/{{0..79}}/attention/{name}/kernel ×80",
            "(64,4,16)",
            "float32",
            "P(-, model)",
            "3 attention/(query|key|value)/kernel",
            "(64,1,16)",
            "320.0 KiB",
        ]
        for name in ("key", "query")
    ] + [
        [
            "layers/{0..79}/norm/scale ×80",
            "(64,)",
            "float32",
            "replicated",
            "- no rule",
            "(64,)",
            "20.0 KiB",
        ],
        [
            "layers/{0..79}/up/kernel ×80",
            "(64,256)",
            "bfloat16",
            "P(-, model)",
            "2 up/kernel",
            "(64,64)",
            "640.0 KiB",
        ],
    ]
    assert lines[6:] == [
        "",
        "×80: 80 leaves that are alike, with the sum of their bytes",
        "parameters: 320 leaves, 5.0 MiB, 1.3 MiB per device",
        "mesh data=2,model=4: 1.3 MiB per device of 5.0 MiB; 0.4% of the bytes "
        "replicated",
        "unused: rule 1 'embed' matches no leaf",
        "unmatched: layers/{0..79}/norm/scale ×80 (64,) is matched by no rule, so "
        "every device holds each in full (0.4% of the bytes)",
    ]


def test_a_narrow_report() -> None:
    lines = rules().resolve(decoder()).report(width=70).splitlines()
    assert lines == [
        "path                      array         spec         rule  per device",
        "────────────────────────  ────────────  ───────────  ────  ──────────",
        "embed                     f32[256,64]   P(model)     1       16.0 KiB",
        "layers/{0..79}/ ×80",
        "  attention/key/kernel    f32[64,4,16]  P(-, model)  3      320.0 KiB",
        "  attention/query/kernel  f32[64,4,16]  P(-, model)  3      320.0 KiB",
        "  norm/scale              f32[64]       replicated   none    20.0 KiB",
        "  up/kernel               bf16[64,256]  P(-, model)  2      640.0 KiB",
        "",
        "rule 1: embed",
        "rule 2: up/kernel",
        "rule 3: attention/(query|key|value)/kernel",
        "×80: 80 leaves that are alike, with the sum of their bytes",
        "parameters: 321 leaves, 5.1 MiB, 1.3 MiB per device",
        "mesh data=2,model=4: 1.3 MiB per device of 5.1 MiB; 0.4% of the bytes",
        "  replicated",
        "unmatched: layers/{0..79}/norm/scale ×80 (64,) is matched by no rule,",
        "  so every device holds each in full (0.4% of the bytes)",
    ]


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("width", [60, 80, 100, 120, 140, 200])
@pytest.mark.parametrize("fold", [True, False])
def test_no_line_is_too_long_and_no_end_of_a_path_is_cut(
    name: str, width: int, fold: bool
) -> None:
    resolution = rules(strict=False).resolve(TREES[name])
    text = resolution.report(fold=fold, width=width)
    assert [line for line in text.splitlines() if len(line) > width] == []
    table = text.split("\n\n")[0].splitlines()[2:]
    rows = [re.split(r"  +", line.lstrip())[0] for line in table]
    ends = {path.split("/")[-1] for path in resolution.paths}
    assert ends <= {row.split(" ×")[0].split("/")[-1] for row in rows}


@pytest.mark.parametrize("name", TREES)
def test_folding_loses_no_leaf_and_no_byte(name: str) -> None:
    resolution = rules().resolve(TREES[name])
    folded = resolution.report().split("\n\n")[0].splitlines()[2:]
    counts = [re.search(r" ×(\d+) ", line) for line in folded]
    assert sum(int(found[1]) if found else 1 for found in counts) == len(resolution)
    below = resolution.report().split("\n\n")[-1].splitlines()
    apart = resolution.report(fold=False).split("\n\n")[-1].splitlines()
    told = re.compile("parameters|optimizer state|other|mesh")
    assert list(filter(told.match, below)) == list(filter(told.match, apart))


def test_a_report_makes_no_object_for_each_leaf(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which is most of what it takes where there are many."""
    resolution = rules(strict=False).resolve(trained(optax.adamw(1e-3)))
    expected = [resolution.report(), resolution.report(fold=False, width=80)]
    sums = [resolution.totals(role) for role in ("parameter", "optimizer", "other")]
    monkeypatch.setattr(_resolved_table, "ResolvedLeaf", None)
    again = rules(strict=False).resolve(trained(optax.adamw(1e-3)))
    assert [again.report(), again.report(fold=False, width=80)] == expected
    assert sum(some.leaves for some in sums) == len(again)
    with pytest.raises(TypeError):
        again.leaf(0)  # control


def test_leaves_that_are_unlike_are_not_folded() -> None:
    tree: Tree = {"layers": {str(at): {"w": struct(8, 8)} for at in range(12)}}
    tree["layers"]["3"]["w"] = struct(8, 16)  # another shape
    tree["layers"]["5"]["w"] = struct(8, 8, dtype=jnp.bfloat16)
    tree["layers"]["8"]["w"] = struct(8, 6)  # another fallback
    layout_map = flm.LayoutMap(
        flm.DeviceMesh.abstract("data=2,model=4"), indivisible="replicate"
    )
    layout_map["w"] = (None, "model")
    layout_map["layers/7/w"] = ("data", None)  # another rule, by its exact key
    table = layout_map.resolve(tree).report().split("\n\n")[0]
    assert [line.split("  ")[0] for line in table.splitlines()[2:]] == [
        "layers/{0..2,4,6,9..11}/w ×8",
        "layers/3/w",
        "layers/5/w",
        "layers/7/w",
        "layers/8/w",
    ]


def test_roles_are_not_mixed() -> None:
    tree = trained(optax.adamw(1e-3))
    lines = rules().resolve(tree).report().splitlines()
    assert [line.split("  ")[0] for line in lines if "up/kernel ×12" in line] == [
        "opt_state/0/mu/layers_{0..11}/up/kernel ×12",
        "opt_state/0/nu/layers_{0..11}/up/kernel ×12",
        "params/layers_{0..11}/up/kernel ×12",
    ]
    (follows,) = [line for line in lines if "mu/layers_{0..11}/up" in line]
    assert " follows layers_{0..11}/up/kernel " in follows


def test_rules_that_are_cut_are_listed_below() -> None:
    layout_map = rules()
    layout_map.optimizer["a_long_name_of_a_module/up/kernel"] = ("data", "model")
    params = {"a_long_name_of_a_module": layer()}
    tree = {
        "params": params,
        "opt_state": jax.eval_shape(optax.sgd(1, 0.9).init, params),
    }
    text = layout_map.resolve(tree).report(width=60)
    assert " opt 1 " in text and " 2 " in text
    assert text.split("\n\n")[1].splitlines()[:3] == [
        "rule 2: up/kernel",
        "rule 3: attention/(query|key|value)/kernel",
        "optimizer rule 1: a_long_name_of_a_module/up/kernel",
    ]
    # Where there is room, the number and the end of the pattern stay.
    assert "optimizer 1 …" in layout_map.resolve(tree).report(width=120)


def test_bytes_in_host_memory_are_no_bytes_of_the_device() -> None:
    mesh = flm.DeviceMesh.abstract("fsdp=4")
    params = {"w": jax.ShapeDtypeStruct((16, 64), jnp.float32)}
    state = jax.eval_shape(optax.adam(1.0).init, params)
    tree = {"params": params, "opt_state": state}
    layout_map = flm.LayoutMap(mesh)
    layout_map["w"] = ("fsdp", None)
    on_device = layout_map.resolve(tree)
    layout_map.optimizer["w"] = flm.TensorLayout(
        ("fsdp", None), memory_kind="pinned_host"
    )
    resolution = layout_map.resolve(tree)
    sums = resolution.totals("optimizer")
    assert (sums.bytes_per_device, sums.host_bytes_per_device) == (4, 2048)
    assert resolution.bytes_per_device == 1024 + 4
    assert resolution.host_bytes_per_device == 2048
    text = resolution.report()
    lines = text.splitlines()
    assert (
        "optimizer state: 3 leaves, 8.0 KiB, 4 B per device and 2.0 KiB per device in "
        "host memory; <0.1% replicated" in lines
    )
    assert lines[-1].startswith(
        "mesh fsdp=4: 1.0 KiB per device and 2.0 KiB per device in host memory of "
        "12.0 KiB; "
    )
    assert "1.0 KiB and 2.0 KiB in host memory of 12.0 KiB" in repr(resolution)
    data = resolution.to_json()
    assert data["totals"]["optimizer"]["host_bytes_per_device"] == 2048
    assert "1.0 KiB in pinned_host" in resolution.explain("opt_state/0/mu/w")
    diff = on_device.diff(resolution)
    assert diff.bytes_per_device["optimizer"] == (2052, 4)
    assert diff.host_bytes_per_device["optimizer"] == (0, 2048)
    lines = diff.report().splitlines()
    assert "optimizer state: 2.0 KiB → 4 B (-99.8%) per device" in lines
    assert "optimizer state: 0 B → 2.0 KiB per device in host memory" in lines


def test_memory_kinds_and_other_meshes_are_shown() -> None:
    layout_map = rules()
    layout_map["w"] = flm.TensorLayout(("model",), memory_kind="pinned_host")
    resolution = layout_map.resolve({"w": struct(8)})
    assert " P(model) pinned_host " in resolution.report()
    (leaf,) = resolution.to_json()["leaves"]
    assert (leaf["mesh"], leaf["memory_kind"]) == (None, "pinned_host")
    layout_map = flm.LayoutMap()
    layout_map["v"] = flm.TensorLayout(("x",), flm.DeviceMesh.abstract("x=2"))
    resolution = layout_map.resolve({"v": struct(8)})
    assert " P(x) on x=2 " in resolution.report()
    (leaf,) = resolution.to_json()["leaves"]
    assert leaf["mesh"] == {"axis_names": ["x"], "shape": [2], "axis_types": ["auto"]}
    assert leaf["memory_kind"] is None


def test_equal_remarks_are_merged() -> None:
    tree = {
        "layers": {str(at): {name: struct(64) for name in "abcd"} for at in range(3)}
    }
    resolution = rules(strict=False).resolve({**tree, "embed": struct(256, 64)})
    below = resolution.report().split("\n\n")[1].splitlines()
    assert below[-5:] == [
        "unmatched: every device holds in full what is matched by no rule: 12 leaves, "
        "4.5% of the bytes",
        "  layers/{0..2}/a ×3 (64,), 1.1%",
        "  layers/{0..2}/b ×3 (64,), 1.1%",
        "  layers/{0..2}/c ×3 (64,), 1.1%",
        "  layers/{0..2}/d ×3 (64,), 1.1%",
    ]
    # One line for each where nothing is folded, and in `remarks`.
    assert len(resolution.remarks()) == 2 + 12
    assert resolution.remarks()[2:] == [
        f"unmatched: layers/{at}/{name} (64,) is matched by no rule, so every device "
        "holds it in full (0.4% of the bytes)"
        for at in range(3)
        for name in "abcd"
    ]
    assert (
        resolution.remarks()[2:] == (resolution.report(fold=False).splitlines()[-12:])
    )


def test_fallbacks_are_folded() -> None:
    layout_map = rules(indivisible="replicate")
    tree = {str(at): {"up": {"kernel": struct(8, 6)}} for at in range(3)}
    assert layout_map.resolve(tree).remarks(fold=True)[-1] == (
        "fallback: {0..2}/up/kernel ×3: rule 2 'up/kernel' → (None, 'model'): dim 1 of "
        "size 6 does not divide by mesh axis 'model' of size 4, so that dim is "
        "replicated"
    )


def test_replicated_bytes_by_role() -> None:
    layout_map = rules()
    layout_map.optimizer["embed"] = None
    tree = {
        "params": {"embed": struct(256, 64)},
        "opt_state": jax.eval_shape(optax.sgd(1, 0.9).init, {"embed": struct(256, 64)}),
    }
    lines = layout_map.resolve(tree).report().split("\n\n")[1].splitlines()
    assert lines[:3] == [
        "parameters: 1 leaf, 64.0 KiB, 16.0 KiB per device; 0.0% replicated",
        "optimizer state: 1 leaf, 64.0 KiB, 64.0 KiB per device; 100.0% replicated",
        "mesh data=2,model=4: 80.0 KiB per device of 128.0 KiB; 50.0% of the bytes "
        "replicated",
    ]


def test_json_is_never_folded() -> None:
    resolution = rules().resolve(decoder(3))
    assert resolution.report("json", fold=True) == resolution.report("json", fold=False)
    data = json.loads(resolution.report("json"))
    assert [leaf["path"] for leaf in data["leaves"]] == list(resolution.paths)


NAMES = st.sampled_from(["a", "layers_0", "layers_1", "0", "1", "2", "a\n", "x" * 30])


@given(
    st.lists(st.lists(NAMES, min_size=1, max_size=5), min_size=1, max_size=12),
    st.integers(1, 200),
    st.booleans(),
)
def test_any_tree_fits_any_width(
    paths: list[list[str]], width: int, fold: bool
) -> None:
    tree: Tree = {}
    for *folders, name in paths:
        inner = tree
        for folder in folders:
            inner = inner.setdefault(f"{folder}/", {})
        inner[name] = struct(8, 8)
    resolution = rules(strict=False).resolve(tree)
    table, below = resolution.report(fold=fold, width=width).split("\n\n")
    assert printed(resolution, width, color_system=None).split()
    # From here on all columns but the path have their room.
    wide = max(width, 20)
    longest = max(map(len, re.split(r"[\s]", below)))
    assert all(len(line) <= max(wide, longest + 2) for line in below.splitlines())
    for line in table.splitlines()[2:]:
        assert line == line.rstrip() and line.isprintable()


# ------------------------------------------------------------------ on a terminal


def printed(value: Any, width: int = 80, **options: Any) -> str:
    """What rich prints of a value."""
    file = io.StringIO()
    Console(file=file, width=width, **options).print(value)
    return file.getvalue()


def difference() -> ResolutionDiff:
    """Of two meshes, with leaves that were added."""
    after = rules(strict=False).on(flm.DeviceMesh.abstract("data=4,model=2"))
    return rules(strict=False).resolve(decoder(12)).diff(after.resolve(decoder(13)))


@pytest.mark.parametrize("name", [*TREES, "difference"])
@pytest.mark.parametrize("width", [80, 200])
def test_rich_prints_the_text(name: str, width: int) -> None:
    value = difference()
    if name in TREES:
        value = rules(strict=False).resolve(TREES[name])
    text = printed(value, width, color_system=None)
    assert text == f"{value.report(width=width)}\n"
    colours = printed(value, width, force_terminal=True, color_system="standard")
    assert colours != text and re.sub(r"\x1b\[[\d;]*m", "", colours) == text


def ansi(text: str) -> dict[str, str]:
    """Each coloured piece of a text and its codes."""
    found = re.findall(r"\x1b\[([\d;]+)m([^\x1b]+)", text)
    return {word: code for code, word in found}


def test_each_mesh_axis_has_its_colour_everywhere() -> None:
    layout_map = rules()
    layout_map["w"] = ("data", "model")
    layout_map["v"] = (("model", "data"), None)
    resolution = layout_map.resolve({"w": struct(8, 12), "v": struct(16, 20)})
    text = printed(resolution, 200, force_terminal=True, color_system="standard")
    found = ansi(text)
    # In the table, and in bold in the lines below it.
    assert found["data"] in ("36", "1;36") and found["model"] in ("35", "1;35")
    # Sizes of sharded dims have the colour of their axis, those of others none.
    assert (found["8"], found["12"], found["16"]) == ("36", "35", "35")
    assert "20" not in found


def test_what_deserves_a_look_is_red() -> None:
    layout_map = rules(strict=False)
    text = printed(
        layout_map.resolve({"v": struct(8)}),
        200,
        force_terminal=True,
        color_system="standard",
    )
    found = ansi(text)
    assert found["- no rule"] == "31"
    assert found["unmatched"] == found["unused"] == "1;31"


@pytest.mark.parametrize("variable", ["NO_COLOR", "TERM"])
def test_no_colour_where_none_is_wanted(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "dumb" if variable == "TERM" else "1")
    text = printed(rules().resolve(decoder(2)), force_terminal=True)
    assert not ansi(text).get("model", "").startswith(("35", "36"))


@pytest.mark.parametrize("make", [difference, lambda: rules().resolve(decoder())])
def test_show_fits_a_terminal_and_leaves_nothing_out_elsewhere(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = make()

    def shown(**options: Any) -> str:
        file = io.StringIO()
        assert value.show(file, **options) is None
        return file.getvalue()

    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    assert shown() == f"{value.report()}\n"
    assert shown(fold=False) == f"{value.report(fold=False)}\n"
    monkeypatch.setenv("COLUMNS", "90")
    assert shown() == f"{value.report(width=90)}\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in shown()
    assert re.sub(r"\x1b\[[\d;]*m", "", shown()) == f"{value.report(width=90)}\n"


def test_a_pipe_gets_no_colours() -> None:
    code = """
import jax, flax_layoutmap as flm
layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("data=2,model=4"))
layout_map["w"] = (None, "model")
layout_map.resolve({"w": jax.ShapeDtypeStruct((8, 8), "float32")}).show()
"""
    gone = ("COLUMNS", "FORCE_COLOR", "NO_COLOR")
    kept = {key: value for key, value in os.environ.items() if key not in gone}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=True,
        env={**kept, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"},
    )
    assert b"\x1b" not in done.stdout and b"P(-, model)" in done.stdout


def test_a_model_with_a_list_of_layers() -> None:
    """From NNX itself: integer keys, not strings."""

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(12)])

    resolution = rules(strict=False).resolve(lambda: Model(nnx.Rngs(0)))
    rows = [line.split("  ")[0] for line in resolution.report().splitlines()[2:4]]
    assert rows == ["layers/{0..11}/bias ×12", "layers/{0..11}/kernel ×12"]
