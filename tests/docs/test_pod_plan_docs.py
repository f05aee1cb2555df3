"""The page about pod slices: its code runs, and prints what is shown."""

import re
from pathlib import Path
from typing import Any

import jax
import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "pod.md").read_text("utf-8")
BLOCKS = re.findall(r"```(python|text)\n(.*?)```", PAGE, re.DOTALL)
_TOOK = re.compile(r"took [\d.]+ s")


@pytest.mark.skipif(
    jax.__version_info__ < (0, 9),
    reason="With jax 0.8 the source of a collective is Flax's line, and the page shows "
    "that of the model, which later versions name.",
)
def test_it_prints_what_is_shown() -> None:
    printed: list[str] = []
    names: dict[str, Any] = {"print": lambda text: printed.append(str(text))}
    for language, code in BLOCKS:
        if language == "python":
            exec(compile(code, "pod.md", "exec"), names)
    shown = [text for language, text in BLOCKS if language == "text"]
    assert len(shown) == 2
    for text, own in zip(shown, printed, strict=True):
        wanted = [line.rstrip() for line in own.splitlines()]
        assert _TOOK.sub("took", text).splitlines() == [
            _TOOK.sub("took", line) for line in wanted
        ]
