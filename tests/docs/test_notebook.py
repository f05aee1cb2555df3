"""The notebook runs, and what it shows is as a user of Jupyter would see it."""

import html
import os
import re
from typing import Any

import nbclient
import nbformat
import pytest
import quick
from helpers import ROOT

PATH = ROOT / "examples/tour.ipynb"
# In the kernel of the notebook, as another start of JAX would take its time.
BAR = """
from flax_layoutmap._show.terminal import shown_progress
with shown_progress("restoring <x>", 3 << 20, True):
    pass
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The last line of each cell → its outputs."""
    notebook = nbformat.read(PATH, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(BAR))
    folder = str(tmp_path_factory.mktemp("notebook"))
    environment = quick.for_subprocess(os.environ) | {"PYTHONPATH": str(ROOT)}
    client = nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": folder}}
    )
    client.execute(env=environment | {"JAX_PLATFORMS": "cpu"})
    return {
        cell.source.splitlines()[-1]: cell.outputs
        for cell in notebook.cells
        if cell.cell_type == "code"
    }


def pages(outputs: list[Any]) -> list[str]:
    return [one.data["text/html"] for one in outputs if "text/html" in one.data]


def words(page: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", page))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        ("flm.draw.mesh(mesh)", "8 devices, cpu"),
        ("resolution.show()", "parameters: 9 leaves, 448.5 KiB, 112.5 KiB per device"),
        ("flm.lint(renamed.resolve(make)).show()", "rule 4 'attention/query/kernel'"),
        ("resolution.diff(elsewhere.resolve(make)).show()", "leaves: 7 moved"),
        ("flm.draw.array(model.layers[0].up.kernel)", "4 slices, 2 devices each"),
        (
            "flm.pod.plan(train_step, model, optimizer, batch, **there).show()",
            "plan of train_step on mesh data=16,model=4 (v5e:8x8): 64 devices",
        ),
        (
            "flm.suggest(train_step, model, optimizer, batch, **there).show()",
            "suggestion for train_step on mesh data=16,model=4 (v5e:8x8): 64 devices",
        ),
    ],
)
def test_results_are_shown_as_pages(
    outputs: dict[str, list[Any]], cell: str, shown: str
) -> None:
    """One output for each, and not one for each line of a report; before it there may
    be the progress of long work, on a busy machine."""
    *progress, page = pages(outputs[cell])
    assert all(re.search(r"\d:\d\d:\d\d</span>", bar) for bar in progress)
    assert shown in words(page)


@pytest.mark.slow
def test_a_resolution_is_a_picture(outputs: dict[str, list[Any]]) -> None:
    (page,) = pages(outputs["resolution"])
    assert "<svg" in page and "layers/{0,1}" in words(page)


@pytest.mark.slow
def test_nothing_else_is_printed(outputs: dict[str, list[Any]]) -> None:
    """No warning."""
    streams = {
        cell: [one.text for one in found if one.output_type == "stream"]
        for cell, found in outputs.items()
    }
    printed = {cell: texts for cell, texts in streams.items() if texts}
    assert printed.keys() == {
        'print(resolution.explain("layers/0/up/kernel"))',
        "assert losses[-1] < losses[0]",
        "    pass",
    }
    assert "restoring <x>" in "".join(printed["    pass"])


def test_it_is_kept_without_outputs() -> None:
    """So that a change of it can be read, and none is out of date."""
    for cell in nbformat.read(PATH, as_version=4).cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None
