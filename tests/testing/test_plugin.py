"""The pytest plug-in, which compares golden files of layouts, and writes them."""

import tomllib

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

def test_default(layout_golden):
    layout_golden(resolution(UP))
"""
FILES = [
    "golden/a.json",
    "golden/b.json",
    "layouts/test_suite/test_default.json",
    "layouts/test_suite/test_one_data=2_x_y.json",
]


@pytest.mark.slow
def test_the_flag_writes_what_the_fixture_compares(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("COLUMNS", "200")

    def run(suite: str, *flags: str) -> tuple[int, str]:
        """Exit status, and the output."""
        pytester.makepyfile(test_suite=suite)
        options = ["-q", "-p", "flax_layoutmap._pytest_plugin", *flags]
        done = pytester.runpytest_inprocess(*options)
        return int(done.ret), done.stdout.str()

    assert run(SUITE, "--update-layouts")[0] == 0
    written = sorted(pytester.path.rglob("*.json"))
    assert [str(path.relative_to(pytester.path)) for path in written] == FILES
    changed = SUITE.replace('UP = (None, "model")', 'UP = ("data", "model")')
    status, text = run(changed)
    assert status == 1 and "3 failed" in text
    assert "P(-, model) → P(data, model)" in text
    assert "run pytest with --update-layouts" in text
    assert run(changed, "--update-layouts")[0] == run(changed)[0] == 0


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
