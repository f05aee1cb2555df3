"""The page on LoRA, quantised and annotated models: its code prints what it says."""

import re
from pathlib import Path

from helpers import run_python

PAGE = Path(__file__).parents[2] / "docs" / "adapted_models.md"


def test_the_page_prints_what_it_says() -> None:
    text = PAGE.read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    said = "".join(re.findall(r"```text\n(.*?)```", text, re.DOTALL))
    assert run_python(code).replace("PartitionSpec(", "P(") == said
