"""Tables of columns of plain values, and the lines below them."""

from typing import Any

import pytest
from rich.cells import cell_len

from flax_layoutmap._show.table import (
    Grid,
    Line,
    as_markdown,
    cut,
    cut_path,
    human_bytes,
    human_share,
    markdown_list,
    markdown_table,
    text_table,
)
from flax_layoutmap._show.terminal import wrapped

HEADER = ("name", "bytes")
ROWS = [("a", "1"), ("long|er", "100")]


def test_text() -> None:
    assert text_table(HEADER, ROWS, (False, True)).splitlines() == [
        "name     bytes",
        "───────  ─────",
        "a            1",
        "long|er    100",
    ]
    assert text_table(HEADER, [], (False, True)).splitlines() == [
        "name  bytes",
        "────  ─────",
    ]
    table = text_table(("a", "b"), [("long", ""), ("", "x")], (False, False))
    assert table.splitlines()[2] == "long"  # no trailing blanks


def test_text_in_characters_of_two_cells() -> None:
    rows = [("模型", "1"), ("bbbb", "10")]
    lines = text_table(HEADER, rows, (False, True)).splitlines()
    assert lines[2:] == ["模型      1", "bbbb     10"]
    assert cell_len(cut("日本語モデル" * 3, 9)) <= 9
    assert cell_len(cut_path("模型/模型/模型/模型", 9)) <= 9


def test_headings_span_the_columns() -> None:
    lines = (Line(("a much longer heading",), "heading"), Line(("  x", "1")))
    grid = Grid(("name", "n"), (False, True), lines)
    assert grid.text().splitlines() == [
        "name  n",
        "────  ─",
        "a much longer heading",
        "  x   1",
    ]
    assert grid.width() == 7


def test_markdown() -> None:
    grid = Grid(HEADER, (False, True), tuple(map(Line, ROWS)))
    assert markdown_table(grid, ()).splitlines() == [
        "| name | bytes |",
        "| :-- | --: |",
        "| a | 1 |",
        r"| long\|er | 100 |",
    ]


def test_markdown_makes_no_headings_of_paths() -> None:
    lines = ["leaves:", "  # a/b-c", "  - d", "e -> f"]
    assert markdown_list(lines).splitlines() == [
        "- leaves:",
        r"  - \# a/b-c",
        r"  - \- d",
        "- e -> f",
    ]


def test_markdown_keeps_stars_and_underscores() -> None:
    cells = ("a_b", "1 .*`", "")
    grid = Grid(("path", "rule", "spec"), (False,) * 3, (Line(cells),))
    assert as_markdown(grid, ["x: .* _p_ a_b <b>", "  below"]).splitlines() == [
        "| path | rule | spec |",
        "| :-- | :-- | :-- |",
        "| `a_b` | `` 1 .*` `` |  |",
        "",
        r"- x: .\* \_p\_ a_b \<b>",
        "  - below",
    ]


@pytest.mark.parametrize(
    ("call", "value", "text"),
    [
        (human_bytes, 0, "0 B"),
        (human_bytes, 1023, "1023 B"),
        (human_bytes, 1024, "1.0 KiB"),
        (human_bytes, 1536, "1.5 KiB"),
        (human_bytes, 3 * 2**30, "3.0 GiB"),
        (human_bytes, 2**60, "1024.0 PiB"),
        (human_share, 0, "0.0%"),
        (human_share, 1e-9, "<0.1%"),
        (human_share, 0.0005, "0.1%"),
        (human_share, 0.125, "12.5%"),
        (human_share, 1, "100.0%"),
    ],
)
def test_numbers_for_people(call: Any, value: float, text: str) -> None:
    assert call(value) == text


@pytest.mark.parametrize("width", range(1, 40))
def test_what_is_cut_keeps_its_width_and_its_end(width: int) -> None:
    text = "4 attention/(query|key|value)/kernel"
    short = cut(text, width)
    assert len(short) == min(width, len(text))
    assert width < 9 or short.endswith("kernel"[-(width // 2) :])


@pytest.mark.parametrize(
    ("width", "short"),
    [
        (46, "opt_state/0/mu/layers/7/attention/query/kernel"),
        (45, "opt_state/…/layers/7/attention/query/kernel"),
        (24, "opt_state/…/query/kernel"),
        (23, "…/query/kernel"),
        (8, "…/kernel"),
        (4, "…nel"),
    ],
)
def test_a_path_is_never_cut_at_its_end(width: int, short: str) -> None:
    path = "opt_state/0/mu/layers/7/attention/query/kernel"
    found = cut_path(path, width)
    assert found == short and len(found) <= width


def test_lines_are_wrapped() -> None:
    assert wrapped(["  a " + "bb " * 10, "c"], 20) == [
        "  a bb bb bb bb bb",
        "    bb bb bb bb bb",
        "c",
    ]
    assert wrapped(["a " + "long-word/" * 5], 20) == ["a", "  " + "long-word/" * 5]
    assert wrapped(["a " * 50], None) == ["a " * 50]
