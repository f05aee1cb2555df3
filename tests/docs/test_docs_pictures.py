"""The page about pictures: its code runs, its pictures exist, and can be made again."""

import contextlib
import importlib.util
import io
import os
import re
import struct
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "pictures.md").read_text("utf-8")


def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    printed = io.StringIO()
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "pictures.md", "exec"), {})
    finally:
        os.chdir(here)
    for shown in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL):
        assert shown in printed.getvalue()
    assert (tmp_path / "model.html").stat().st_size > 10_000
    assert "layers/*/up/kernel" in (tmp_path / "model.txt").read_text("utf-8")


def size_of(path: Path) -> tuple[int, int]:
    """Width and height of a PNG."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    return struct.unpack(">II", data[16:24])


SHOWN = re.findall(r"pictures/(\w+\.png)", PAGE)


@pytest.mark.parametrize("name", SHOWN)
def test_a_picture_exists(name: str) -> None:
    width, height = size_of(DOCS / "pictures" / name)
    assert min(width, height) > 400
    assert (DOCS / "pictures" / name).stat().st_size < 400_000


def make_pictures() -> Any:
    """The script, as a module."""
    found = importlib.util.spec_from_file_location("make", DOCS / "make_pictures.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_every_picture_is_made_by_the_script(tmp_path: Path) -> None:
    pytest.importorskip(
        "matplotlib", reason="matplotlib, the extra 'plot', is not installed."
    )
    script = make_pictures()
    script.plots(tmp_path)
    made = {path.name for path in tmp_path.glob("*.png")}
    windows = {f"{name}.png" for name, *_ in script.WINDOWS}
    there = {path.name for path in (DOCS / "pictures").glob("*.png")}
    assert made | windows == there >= set(SHOWN)
    for name in made:
        # Not the very bytes: fonts differ from machine to machine.
        again, committed = size_of(tmp_path / name), size_of(DOCS / "pictures" / name)
        assert again == committed, name
