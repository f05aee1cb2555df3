"""The page about compiling for slices: its code prints what is shown."""

import re
from pathlib import Path
from typing import Any

from flax_layoutmap._core.topologies import GENERATIONS

PAGE = (Path(__file__).parents[2] / "docs" / "pod_compile.md").read_text("utf-8")


def test_it_prints_what_is_shown() -> None:
    blocks = re.findall(r"```(python|text)\n(.*?)```", PAGE, re.DOTALL)
    printed: list[str] = []
    names: dict[str, Any] = {
        "print": lambda *values: printed.append(" ".join(map(str, values)))
    }
    for language, code in blocks:
        if language == "python":
            exec(compile(code, "pod_compile.md", "exec"), names)
    shown = [
        line for kind, text in blocks if kind == "text" for line in text.split("\n")
    ]
    assert printed == [line for line in shown if line]


def test_the_table_is_that_of_the_library() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (\d) \| ([\d,]+) \| .* \| ([\d.]+) GiB", PAGE, re.M
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
