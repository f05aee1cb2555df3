"""Imports between rooms go down the table, and use only public names of JAX and Flax.

The table is in CONTRIBUTING.md, and in `pyproject.toml` for import-linter: a new folder
is in neither, and fails. Files of one room import each other without cycles.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def lint_imports(folder: Path) -> tuple[int, str]:
    """What import-linter says of the package in a folder: exit status and text."""
    program = "from importlinter.cli import lint_imports_command as run; run()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, "--no-cache"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def test_imports_go_down_the_table() -> None:
    status, text = lint_imports(ROOT)
    assert status == 0, text
    assert "2 kept" in text


@pytest.mark.parametrize(
    ("file", "planted", "problem"),
    [
        (
            "_rules/planted.py",
            "def f():\n    from flax_layoutmap._resolve.resolve import resolve\n",
            "flax_layoutmap._rules is not allowed to import flax_layoutmap._resolve",
        ),
        (
            "_rules/planted.py",
            "import flax_layoutmap as flm\n",
            "flax_layoutmap._rules is not allowed to import flax_layoutmap.checkpoint",
        ),
        (
            "_rules/planted.py",
            "from .. import checkpoint\n",
            "flax_layoutmap._rules is not allowed to import flax_layoutmap.checkpoint",
        ),
        (
            "_place/planted.py",
            "from flax_layoutmap._lint import lint\n",
            "flax_layoutmap._place is not allowed to import flax_layoutmap._lint",
        ),
        (
            "_core/planted.py",
            "import flax_layoutmap._core.planted_too\n",
            "No cycles in a room BROKEN",
        ),
        ("utils.py", "", "utils"),
    ],
)
def test_control_violations_are_caught(
    file: str, planted: str, problem: str, tmp_path: Path
) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    package = shutil.copytree(ROOT / "flax_layoutmap", tmp_path / "flax_layoutmap")
    (package / file).write_text(planted)
    (package / "_core" / "planted_too.py").write_text(
        "from flax_layoutmap._core import planted\n" if "_core" in file else ""
    )
    status, text = lint_imports(tmp_path)
    assert status == 1
    assert problem in text


def test_contributing_has_the_same_table() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = settings["tool"]["importlinter"]["contracts"][0]
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", text, re.MULTILINE)
    written: dict[int, list[str]] = {}
    for layer, names in rows:
        written.setdefault(int(layer), []).extend(re.findall(r"`(\w+)`", names))
    layers = [sorted(names) for _, names in sorted(written.items(), reverse=True)]
    assert layers == [sorted(names.split(" | ")) for names in contract["layers"]]


def test_files_that_contributing_names_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[\w.]+/)+\w+\.(?:py|toml|md))`", text))
    named.discard("presets/NAME.toml")
    assert len(named) > 40
    folders = (ROOT, ROOT / "flax_layoutmap")
    missing = [n for n in named if not any((f / n).exists() for f in folders)]
    assert missing == []


def sources(folder: str) -> dict[str, str]:
    """The Python files below a folder: path → text."""
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != Path(__file__)
    }


# What `_core/jax_internals.py` lists, and what tests once read.
PRIVATE_NAMES_OF_JAX = {
    *("to_concrete_value", "unsafe_buffer_pointer", "parent_trace", "traced_for"),
    *("_trace", "_npartitions", "_value", "_eqns", "_consts", "_outvars"),
}


@pytest.mark.parametrize(
    "folder", ["flax_layoutmap", "tests", "examples", "benchmarks"]
)
def test_private_names_of_jax_are_in_one_file(folder: str) -> None:
    files = sources(folder)
    assert files
    assert [path for path, text in files.items() if re.search(r"\b_src\b", text)] == []
    files.pop("flax_layoutmap/_core/jax_internals.py", None)
    assert [
        f"{path}: {ast.unparse(node)}"
        for path, text in files.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE_NAMES_OF_JAX
    ] == []
