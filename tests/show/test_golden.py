"""Golden files of layouts, and the pytest plug-in that writes them."""

import itertools
import json
import re
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import ROOT
from hypothesis import given
from hypothesis import strategies as st

import flax_layoutmap as flm
from flax_layoutmap.testing import compare as assert_golden
from flax_layoutmap.testing import dump as write_golden

pytest_plugins = "pytester"

# What is to be reviewed, as `dump` is to write it: read it when it changes.
LAYOUTS = Path(__file__).parents[1] / "layouts"


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def tree() -> dict[str, Any]:
    params = {
        f"layers_{at}": {"up": struct(8, 16), "b": struct(16)} for at in range(11)
    }
    state = jax.eval_shape(optax.adam(1.0).init, {"layers_0": params["layers_0"]})
    return {"params": params, "opt_state": state, "name": "text"}


def rules(up: Any = (None, "model"), mesh: str = "data=2,model=4") -> flm.LayoutMap:
    layout_map = flm.LayoutMap(flm.DeviceMesh.abstract(mesh), indivisible="replicate")
    layout_map["up"] = up
    layout_map["layers_3/b"] = None
    layout_map.activations["mlp"] = ("data", ...)
    return layout_map


def test_the_file_can_be_reviewed(tmp_path: Path) -> None:
    small = {"layers": {"10": {"up": struct(8, 16)}, "2": {"up": struct(8, 6)}}}
    path = tmp_path / "new" / "folder" / "layouts.json"
    write_golden(rules().resolve(small), path)
    assert path.read_text("utf-8") == (LAYOUTS / "small.json").read_text("utf-8")


def test_what_was_written_is_accepted_and_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "layouts.json"
    write_golden(rules().resolve(tree()), path)
    first = path.read_bytes()
    assert_golden(rules().resolve(tree()), path)
    assert_golden(rules().resolve(tree()), str(path))
    # The order of a dict, and other objects of the same rules, make no difference.
    turned = dict(reversed(tree().items()))
    assert_golden(rules().resolve(turned), path)
    write_golden(rules().resolve(turned), path)
    assert path.read_bytes() == first
    lines = [line for line in first.decode().splitlines() if '{"path"' in line]
    assert len(lines) == len(rules().resolve(tree()))


KEYS = st.text(st.characters(), min_size=1, max_size=6)


@given(
    st.dictionaries(KEYS, st.dictionaries(KEYS, st.sampled_from([(8, 8), (4,), ()]))),
    st.sampled_from([None, ("data",), ("model", ...), (("model", "data"), ...)]),
)
def test_any_names_can_be_written_and_read(
    shapes: dict[str, dict[str, tuple[int, ...]]], layout: Any
) -> None:
    tree = {
        name: {key: struct(*shape) for key, shape in inner.items()}
        for name, inner in shapes.items()
    }
    layout_map = flm.LayoutMap(
        flm.DeviceMesh.abstract("data=2,model=2"), indivisible="replicate"
    )
    layout_map["."] = flm.Rule(".", layout, rank="skip") if layout else None
    resolution = layout_map.resolve(tree)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "layouts.json")
        write_golden(resolution, path)
        text = path.read_bytes().decode("utf-8", "surrogatepass")
        assert text.count('\n    {"path": ') == len(resolution)
        assert_golden(layout_map.resolve(tree), path)
        # Read and compared leaf by leaf, and not as a text.
        path.write_bytes(path.read_bytes() + b" ")
        assert_golden(layout_map.resolve(tree), path)


def test_formatting_is_no_difference(tmp_path: Path) -> None:
    path = tmp_path / "layouts.json"
    path.write_text(json.dumps(rules().resolve(tree()).to_json()), encoding="utf-8")
    assert_golden(rules().resolve(tree()), path)


def test_a_difference_is_reported_with_its_cost_and_how_to_accept_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "layouts.json"
    write_golden(rules().resolve(tree()), path)
    with pytest.raises(AssertionError) as caught:
        assert_golden(rules(("model", None)).resolve(tree()), path)
    text = str(caught.value)
    assert text.startswith(f"the layouts are not those in {str(path)!r}:\n\nrules:\n")
    assert "layers_{0..10}/up ×11" in text and "P(-, model) → P(model)" in text
    assert "to send: at most " in text
    assert text.endswith(
        "to accept this, run pytest with --update-layouts (fixture layout_golden), or "
        f"call flm.testing.dump(resolution, {str(path)!r})"
    )
    assert max(map(len, text.split("\n\n")[2].splitlines())) <= 100


@pytest.mark.parametrize(
    "now",
    [
        rules(mesh="data=4,model=2"),
        rules(flm.TensorLayout((None, "model"), memory_kind="pinned_host")),
        flm.LayoutMap.from_json({**rules().to_json(), "overlap": "first"}),
    ],
)
def test_other_differences(tmp_path: Path, now: flm.LayoutMap) -> None:
    path = tmp_path / "layouts.json"
    write_golden(rules().resolve(tree()), path)
    with pytest.raises(AssertionError, match="the layouts are not those in"):
        assert_golden(now.resolve(tree()), path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="there is no file of layouts"):
        assert_golden(rules().resolve(tree()), tmp_path / "none.json")


NOT_GOLDEN = {
    "{": "Expecting property name",
    "[" * 100_000: "is no file of layouts",
    "[]": "layouts of schema 'list' cannot be read",
    '{"schema": 2}': "layouts of schema 2 cannot be read; this is schema 1",
    '{"schema": 1}': "the layouts are damaged: KeyError('rules')",
}
DAMAGED = [{"leaves": None}, {"leaves": [{}]}, {"leaves": [3]}, {"rules": {}}]
DAMAGED_LEAVES = [{"path": 3}, {"dtype": [3]}, {"spec": []}, {"spec": [["x"], None]}]


def damaged() -> Iterator[tuple[str, str]]:
    """Texts of files, and what is said of them."""
    yield from NOT_GOLDEN.items()
    data = rules().resolve(tree()).to_json()
    for damage in DAMAGED:
        yield json.dumps({**data, **damage}), "the layouts are damaged"
    at = next(at for at, leaf in enumerate(data["leaves"]) if leaf["shape"])
    for damage in DAMAGED_LEAVES:
        leaves = [*data["leaves"]]
        leaves[at] = {**leaves[at], **damage}
        yield json.dumps({**data, "leaves": leaves}), "the layouts are damaged"


@pytest.mark.parametrize(("text", "reason"), list(damaged()), ids=itertools.count())
def test_a_file_that_is_not_golden(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "layouts.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(flm.LayoutError, match=re.escape(repr(str(path)))) as caught:
        assert_golden(rules().resolve(tree()), path)
    assert reason in str(caught.value)


def test_a_folder_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(flm.LayoutError, match="cannot be read"):
        assert_golden(rules().resolve(tree()), tmp_path)


# ------------------------------------------------------------------- the plug-in

SUITE = """
import jax
import pytest
import flax_layoutmap as flm

def resolution(up):
    layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("data=2,model=4"))
    layout_map["up"] = up
    return layout_map.resolve({"up": jax.ShapeDtypeStruct((8, 8), "float32")})

UP = (None, "model")

@pytest.mark.parametrize("mesh", ["data=2/x y", "b"])
def test_one(layout_golden, mesh):
    layout_golden(resolution(UP))

def test_named(layout_golden):
    layout_golden(resolution(UP), "golden/a.json")
    layout_golden(resolution(None), "golden/b.json")

def test_twice(layout_golden):
    layout_golden(resolution(UP))
    with pytest.raises(ValueError, match="is called twice in one test"):
        layout_golden(resolution(None))
"""
FILES = [
    "golden/a.json",
    "golden/b.json",
    "layouts/test_suite/test_one_b.json",
    "layouts/test_suite/test_one_data=2_x_y.json",
    "layouts/test_suite/test_twice.json",
]


@pytest.mark.slow
def test_the_flag_writes_what_the_fixture_compares(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("COLUMNS", "200")

    def run(suite: str, *flags: str) -> tuple[int, list[str], str]:
        """Exit status, the files that it says it wrote, and its output."""
        pytester.makepyfile(test_suite=suite)
        options = ["-q", "-p", "flax_layoutmap._pytest_plugin", *flags]
        done = pytester.runpytest_inprocess(*options)
        text = done.stdout.str()
        written = re.findall("^layouts written: (.*)$", text, re.M)
        return (
            int(done.ret),
            [str(Path(p).relative_to(pytester.path)) for p in written],
            text,
        )

    assert run(SUITE, "--update-layouts")[:2] == (0, FILES)
    changed = SUITE.replace('UP = (None, "model")', 'UP = ("data", "model")')
    status, written, text = run(changed)
    assert (status, written) == (1, []) and "4 failed" in text
    assert "P(-, model) → P(data, model)" in text
    assert "run pytest with --update-layouts" in text
    # What is as it was is not written again.
    rest = [name for name in FILES if name != "golden/b.json"]
    assert run(changed, "--update-layouts")[:2] == (0, rest)
    assert run(changed)[:2] == (0, [])


def test_a_run_that_does_not_use_it_imports_nothing(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of ours but the plug-in and the façade, and no JAX."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyfile("""
import sys

def test_it():
    ours = {name for name in sys.modules if name.startswith("flax_layoutmap")}
    assert ours == {"flax_layoutmap", "flax_layoutmap._pytest_plugin"}
    assert not {"jax", "flax", "numpy", "rich"} & sys.modules.keys()
""")
    done = pytester.runpytest_subprocess("-p", "flax_layoutmap._pytest_plugin")
    done.assert_outcomes(passed=1)


def test_the_plug_in_is_registered() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    plugins = {"flax_layoutmap": "flax_layoutmap._pytest_plugin"}
    assert project["entry-points"]["pytest11"] == plugins
