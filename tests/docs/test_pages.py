"""README and the pages of `docs`: code runs and prints what is shown, names and links
exist, and tables are those of the library."""

import ast
import contextlib
import functools
import io
import json
import operator
import re
import subprocess
import sys
import tempfile
import tomllib
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
import without_meaning
from flax import linen as nn
from flax import nnx
from helpers import ROOT, run_python

import flax_layoutmap as flm
from flax_layoutmap._lint.lint import CODES
from flax_layoutmap._rules import files as _files
from flax_layoutmap.pod._topologies import GENERATIONS

DOCS = ROOT / "docs"
FILES = {"README": ROOT / "README.md"} | {
    str(path.relative_to(DOCS).with_suffix("")): path
    for path in sorted(DOCS.rglob("*.md"))
}
PAGES = {name: path.read_text("utf-8") for name, path in FILES.items()}
# README runs in a process of its own, below.
RUN = [name for name, text in PAGES.items() if "```python" in text and name != "README"]

BLOCK = re.compile(
    r'```(python|text|toml|json)(?: title="(\S+)")?\n(.*?)^```',
    re.DOTALL | re.MULTILINE,
)
# What a page takes as imported, for brevity.
IMPORTED = {"coming_from": {"flm": flm, "nnx": nnx, "nn": nn, "jax": jax, "jnp": jnp}}


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return [text for kind, _, text in BLOCK.findall(PAGES[page]) if kind == language]


class Ran(NamedTuple):
    """What the code of a page did.

    Attributes:
        names: what it defined.
        values: of each block, the value of its last line if that is an expression.
        printed: what it printed.
        folder: where it wrote its files.
    """

    names: dict[str, Any]
    values: list[Any]
    printed: str
    folder: Path


@functools.cache
def ran(page: str) -> Ran:
    """Runs the code of a page from top to bottom, in a new folder with its files."""
    folder = Path(tempfile.mkdtemp())
    done = Ran(dict(IMPORTED.get(page, {})), [], "", folder)
    with (
        warnings.catch_warnings(),
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        warnings.simplefilter("ignore", flm.LayoutWarning)
        for kind, name, text in BLOCK.findall(PAGES[page]):
            if name:
                (folder / name).write_text(text, "utf-8")
            elif kind == "python":
                done.values.append(value_of(text, page, done.names))
    return done._replace(printed=printed.getvalue())


def value_of(code: str, page: str, names: dict[str, Any]) -> Any:
    """Runs one block; its value, if its last line has one."""
    *lines, last = ast.parse(code).body
    if not isinstance(last, ast.Expr):
        lines, last = [*lines, last], None
    exec(compile(ast.Module(lines, []), f"{page}.md", "exec"), names)
    if last is not None:
        return eval(compile(ast.Expression(last.value), f"{page}.md", "eval"), names)


def comparable(text: str) -> list[str]:
    """Lines without what differs between runs, or versions of JAX."""
    text = re.sub(r"took [\d.]+ s", "took", text.replace("PartitionSpec(", "P("))
    return [line.rstrip() for line in text.splitlines()]


@pytest.mark.parametrize("page", RUN)
def test_the_code_prints_what_is_shown(page: str) -> None:
    printed, shown = ran(page).printed, blocks(page, "text")
    assert ran(page).values
    if shown:
        assert comparable("".join(shown)) == comparable(printed)


@pytest.mark.parametrize("page", PAGES)
def test_names_and_links_exist(page: str) -> None:
    text = PAGES[page]
    for name in set(re.findall(r"\bflm((?:\.\w+)+)", text)):
        operator.attrgetter(name.strip("."))(flm)
    for file, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]+))?\)", text):
        if file.startswith("http"):
            continue
        target = (FILES[page].parent / file).resolve() if file else FILES[page]
        assert target.exists(), file
        if anchor:
            heads = re.findall(r"^#+ (.*)", target.read_text("utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in heads]
            assert anchor in slugs, f"{file}#{anchor}"


@pytest.mark.parametrize("page", RUN)
def test_the_code_runs_alone_and_again(page: str) -> None:
    """It makes the devices that it needs, and what it saves may be there already."""
    code = "\n".join(blocks(page, "python"))
    on_devices = re.search(r'(LayoutMap|DeviceMesh)\("\w+=|from_file\(.*mesh="', code)
    if on_devices and page not in IMPORTED:
        assert 'jax.config.update("jax_num_cpu_devices", 8)' in code
    for call in re.findall(r'\.save(?:_safetensors)?\("[^.]*?".*?\)$', code, re.M):
        assert "overwrite=True" in call


# ------------------------------------------------------------------------ README


@pytest.mark.slow
def test_the_quick_start_runs_and_prints_what_is_shown(tmp_path: Path) -> None:
    code = "\n".join(blocks("README", "python"))
    assert code.count("/tmp/flax_layoutmap_quick_start") == 1
    code = code.replace("/tmp/flax_layoutmap_quick_start", str(tmp_path / "checkpoint"))
    more = """
import numpy as np
up = model.layers[0].up.kernel
assert up.sharding.mesh.shape == {"data": 4, "model": 2}, "restored in place"
restored = weights["model"]["layers"]["0"]["up"]["kernel"]
np.testing.assert_array_equal(restored, up[...])
assert tuple(restored.sharding.spec) == (None, "model")
assert weights["optimizer"]["step"] == 3
"""
    assert run_python(code + more) == "".join(blocks("README", "text"))


def test_the_readme_is_short() -> None:
    assert len(PAGES["README"].split()) <= 1200


# ------------------------------------------------------------------- coming from


def test_members_of_dtensor_exist() -> None:
    """Those of DTensor's tables for which the page says "the same"."""
    table = PAGES["coming_from"].split("## DTensor")[1]
    layout, mesh = table.split("| `Mesh([")
    checked = 0
    for owner, part in ((flm.TensorLayout, layout), (flm.DeviceMesh, mesh)):
        part = part.split("| `relayout(")[0]
        for line in part.splitlines():
            cells = [cell.strip() for cell in line.split("|")]
            if len(cells) < 4 or not cells[2].startswith("the same"):
                continue
            for name in re.findall(r"(?:^|[^\w])\.(\w+)", cells[1]):
                assert hasattr(owner, name), name
                checked += 1
    assert checked > 25


def test_what_has_no_meaning_here_has_a_reason() -> None:
    tables = {
        name: value for name, value in vars(without_meaning).items() if name.isupper()
    }
    assert len(tables) == 6
    for name, table in tables.items():
        for behaviour, reason in table.items():
            assert behaviour and len(reason.split()) > 1, (name, behaviour)


# ------------------------------------------------------------------------ errors


def test_each_kind_of_error_has_a_section() -> None:
    kinds = {name for name in vars(flm.errors) if name[0].isupper()}
    sections = re.findall(r"^## (\w+)$", PAGES["errors"], re.MULTILINE)
    linked = re.findall(r"^\| \[(\w+)\]\(#", PAGES["errors"], re.MULTILINE)
    assert sections == linked and set(sections) == kinds


def test_a_release_has_whole_addresses(tmp_path: Path) -> None:
    for name in ("README.md", "pyproject.toml"):
        tmp_path.joinpath(name).write_bytes(ROOT.joinpath(name).read_bytes())
    command = [sys.executable, ROOT / ".ci" / "addresses", "owner/name", "v0.1.0"]
    subprocess.run(command, cwd=tmp_path, check=True)
    readme = tmp_path.joinpath("README.md").read_text("utf-8")
    links = re.findall(r"\]\(([^)]*)\)", readme)
    assert len(links) > 30 and all(one.startswith(("https://", "#")) for one in links)
    assert (
        "](https://github.com/owner/name/raw/v0.1.0/docs/pictures/model.svg)" in readme
    )
    project = tomllib.loads(tmp_path.joinpath("pyproject.toml").read_text("utf-8"))
    assert project["project"]["urls"]["Documentation"] == "https://owner.github.io/name"


# ------------------------------------------------------------------- checkpoints


def test_what_is_restored_lies_as_asked() -> None:
    done = ran("checkpoints")
    shape = done.names["training"]["model"].kernel.sharding.mesh.shape
    assert shape == {"data": 2, "model": 4}
    weights, halves = (done.names[name]["model"] for name in ("weights", "halves"))
    assert weights["kernel"].sharding.mesh == done.names["other"].jax_mesh
    assert halves["kernel"].dtype == jnp.bfloat16
    assert "P(data, model)" in done.printed and "are as saved" in done.printed


# -------------------------------------------------------------------------- lint

SECTIONS = re.findall(r"^### (LM\d+)\n", PAGES["lint"], re.MULTILINE)


def test_the_table_of_lint_is_that_of_the_code() -> None:
    row = re.compile(r"\| \[(LM\d+)\]\(#(lm\d+)\) \| ([\w, ]+) \| (.*?) \|")
    rows = row.findall(PAGES["lint"])
    assert {code: about for code, _, _, about in rows} == CODES
    assert all(anchor == code.lower() for code, anchor, _, _ in rows)
    assert SECTIONS == list(CODES)


@pytest.mark.parametrize("code", CODES)
def test_the_examples_of_lint(code: str) -> None:
    """Each section has one that provokes its issue, and one without."""
    values = ran("lint").values[1:]
    assert len(values) == 2 * len(SECTIONS)
    at = 2 * SECTIONS.index(code)
    provoked, mended = ([i.code for i in found] for found in values[at : at + 2])
    assert code in provoked and code not in mended


# ---------------------------------------------------------------------- pictures

SHOWN = set(re.findall(r"pictures/([\w.]+)\)", "".join(PAGES.values())))


def test_every_picture_is_made_by_the_script(tmp_path: Path) -> None:
    script = DOCS / "make_pictures.py"
    subprocess.run([sys.executable, script, tmp_path], check=True)
    made = {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()}
    there = (DOCS / "pictures").iterdir()
    assert made == {path.name: path.read_text("utf-8") for path in there}
    assert made.keys() == SHOWN


# ------------------------------------------------------------------------- slices


def test_the_table_of_generations_is_that_of_the_library() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (\d) \| ([\d,]+) \| .* \| ([\d.]+) GiB",
        PAGES["pod"],
        re.MULTILINE,
    )
    assert rows == [
        (
            name,
            str(entry.devices_per_chip),
            f"{entry.max_chips:,}",
            f"{entry.hbm_limit_bytes / 2**30:.2f}",
        )
        for name, entry in GENERATIONS.items()
    ]


# ------------------------------------------------------------------------ reports


def test_the_keys_of_reports_are_those_of_the_tables() -> None:
    page, done = PAGES["report"], ran("report")
    assert (done.folder / "layouts" / "decoder.json").is_file()
    tables: list[list[str]] = []  # the keys in the first column of each
    for line in page.splitlines():
        if line.startswith("| key |"):
            tables.append([])
        elif tables and (match := re.match(r"\| `(\w+)` \|", line)):
            tables[-1].append(match[1])
    report, leaf, diff = tables
    resolution = done.names["resolution"]
    data = json.loads(resolution.report("json"))
    assert report == list(data) and leaf == list(data["leaves"][0])
    totals = (
        "`leaves`, `total_bytes`, `bytes_per_device`, `replicated_bytes`, "
        "`host_bytes_per_device`"
    )
    assert re.findall(r"\w+", totals) == list(data["totals"]["parameter"])
    assert totals in page
    found = json.loads(resolution.diff(done.names["after"]).report("json"))
    assert diff == list(found)
    change = found["changes"][0]
    for key in change:
        assert f"`{key}`" in page.split("## The difference")[1]
    assert set(change["after"]) == set(leaf)


# --------------------------------------------------------------------- rule files


def test_the_files_of_rules_are_read() -> None:
    done = ran("rule_files")
    assert len(done.values) == 3
    assert "lm_head/kernel" in flm.LayoutMap.from_file(done.folder / "written.toml")


def test_every_key_of_rule_files_is_on_the_page() -> None:
    page = PAGES["rule_files"]
    for key in {*_files.FILE_KEYS, "extends"}:
        assert re.search(rf"`\[?{key}\b|\b{key}\b.* = ", page), key
    for key in _files.ENTRY_KEYS:
        assert f"{key} = " in page
