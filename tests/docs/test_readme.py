"""What the README says is so: its code runs, and its output is what is printed."""

import re
from pathlib import Path

import pytest
from helpers import run_python

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.slow
def test_the_quick_start_runs_and_prints_the_report(tmp_path: Path) -> None:
    code = "\n".join(blocks("python"))
    assert code.count("/tmp/flax_layoutmap_quick_start") == 1
    code = code.replace("/tmp/flax_layoutmap_quick_start", str(tmp_path / "checkpoint"))
    more = """
import numpy as np
assert model is state["model"], "a concrete module is restored in place"
assert model.layers[0].up.kernel.sharding.mesh.shape == {"data": 4, "model": 2}
assert state["step"] == 2
restored = weights["model"]["layers"]["0"]["up"]["kernel"]
np.testing.assert_array_equal(restored, model.layers[0].up.kernel[...])
assert tuple(restored.sharding.spec) == (None, "model")
"""
    printed = run_python(code + more)
    report, error, explanation = blocks("text")
    assert printed.strip() == report.strip()


def test_the_error_and_the_explanation_are_those_that_are_given() -> None:
    code = "\n".join(blocks("python")[:2])
    more = """
resolution = layout_map.resolve(make)
print("=====")
try:
    layout_map.on("data=1,model=8").resolve(make)
except flm.LayoutError as error:
    print(f"{type(error).__module__}.{type(error).__name__}: {error}")
print("=====")
print(resolution.explain("layers/0/norm/scale"))
"""
    _, error, explanation = run_python(code + more).split("=====\n")
    assert error.strip() == blocks("text")[1].strip()
    assert explanation.strip() == blocks("text")[2].strip()


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+)\)", README))
def test_links_lead_to_files(link: str) -> None:
    assert (Path(__file__).parents[2] / link).exists()
