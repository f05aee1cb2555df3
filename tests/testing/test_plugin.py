"""The pytest plug-in, which compares golden files of layouts, and writes them."""

import re
import tomllib
from pathlib import Path

import pytest
from helpers import ROOT

pytest_plugins = "pytester"

SUITE = """
import jax
import pytest
import flax_layoutmap as flm

def resolution(up):
    layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("data=2,model=4"))
    layout_map["up"] = up
    return layout_map.resolve({"up": jax.ShapeDtypeStruct((8, 8), "float32")})

UP = (None, "model")

@pytest.mark.parametrize("mesh", ["data=2/x y"])
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
    assert (status, written) == (1, []) and "3 failed" in text
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
