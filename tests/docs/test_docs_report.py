"""The page about reports: its code runs, prints what is shown, and its tables hold."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "report.md").read_text("utf-8")
BLOCKS = re.findall(r"```(python|text)\n(.*?)```", PAGE, re.DOTALL)


def tables() -> list[list[str]]:
    """The keys in the first column of each table."""
    found: list[list[str]] = []
    for line in PAGE.splitlines():
        if line.startswith("| key |"):
            found.append([])
        elif found and (match := re.match(r"\| `(\w+)` \|", line)):
            found[-1].append(match[1])
    return found


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the code of the page has defined, and what it printed."""
    folder = tmp_path_factory.mktemp("page")
    printed: list[str] = []
    names: dict[str, Any] = {"print": printed.append}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for language, code in BLOCKS:
            if language == "python":
                exec(compile(code, "report.md", "exec"), names)
    return {**names, "printed": printed, "folder": folder}


def test_it_prints_what_is_shown(names: dict[str, Any]) -> None:
    shown = [text for language, text in BLOCKS if language == "text"]
    assert [f"{text}\n" for text in names["printed"]] == shown


def test_the_file_is_there(names: dict[str, Any]) -> None:
    assert (names["folder"] / "layouts" / "decoder.json").is_file()


def test_the_keys_are_those_of_the_tables(names: dict[str, Any]) -> None:
    report, leaf, diff = tables()
    resolution = names["resolution"]
    data = json.loads(resolution.report("json"))
    assert report == list(data) and leaf == list(data["leaves"][0])
    totals = "`leaves`, `total_bytes`, `bytes_per_device`, `replicated_bytes`"
    assert re.findall(r"\w+", totals) == list(data["totals"]["parameter"])
    assert totals in PAGE
    found = json.loads(resolution.diff(names["after"]).report("json"))
    assert diff == list(found)
    change = found["changes"][0]
    for key in change:
        assert f"`{key}`" in PAGE.split("## The difference")[1]
    assert set(change["after"]) == set(leaf) - {"rule", "note", "mesh"}
