"""Columns of plain values as text, Markdown or nothing but lines; knows no rules."""

from collections.abc import Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def text_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]
) -> str:
    """Aligns columns with two spaces between them and a line below the header."""
    widths = _widths(header, rows)
    lines = [_line(header, widths, right)]
    lines.append("  ".join("─" * width for width in widths))
    lines.extend(_line(row, widths, right) for row in rows)
    return "\n".join(lines)


def markdown_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]
) -> str:
    """The same as a Markdown table; `|` in a cell is escaped."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    rule = ["--:" if flag else ":--" for flag in right]
    return "\n".join(f"| {' | '.join(row)} |" for row in [list(header), rule, *cells])


def human_bytes(count: int | float) -> str:
    """`1536` → `'1.5 KiB'`."""
    value, power = float(count), 0
    while value >= 1024 and power < len(_UNITS) - 1:
        value, power = value / 1024, power + 1
    return f"{value:.{min(power, 1)}f} {_UNITS[power]}"


def _widths(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(row[at]) for row in [header, *rows]) for at in range(len(header))]


def _line(row: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    cells = [
        cell.rjust(width) if flag else cell.ljust(width)
        for cell, width, flag in zip(row, widths, right, strict=True)
    ]
    return "  ".join(cells).rstrip()
