"""Columns of plain values as tables."""

import pytest

from flax_layoutmap._table import human_bytes, markdown_table, text_table

HEADER = ("name", "bytes")
ROWS = [("a", "1"), ("long|er", "100")]


def test_text() -> None:
    assert text_table(HEADER, ROWS, (False, True)).splitlines() == [
        "name     bytes",
        "───────  ─────",
        "a            1",
        "long|er    100",
    ]


def test_text_has_no_trailing_blanks() -> None:
    table = text_table(("a", "b"), [("long", ""), ("", "x")], (False, False))
    assert table.splitlines()[2] == "long"


def test_markdown() -> None:
    assert markdown_table(HEADER, ROWS, (False, True)).splitlines() == [
        "| name | bytes |",
        "| :-- | --: |",
        "| a | 1 |",
        r"| long\|er | 100 |",
    ]


def test_no_rows() -> None:
    assert text_table(HEADER, [], (False, True)).splitlines() == [
        "name  bytes",
        "────  ─────",
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (3 * 2**30, "3.0 GiB"),
        (2**60, "1024.0 PiB"),
    ],
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text
