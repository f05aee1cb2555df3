"""The page about lint: its codes are those of lint, its examples do what it says."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import flax_layoutmap as flm
from flax_layoutmap._lint.lint import CODES

PAGE = (Path(__file__).parents[2] / "docs" / "lint.md").read_text("utf-8")
FENCE = re.compile(r"```python\n(.*?)```", re.DOTALL)
SECTIONS = dict(re.findall(r"### (LM\d+)\n(.*?)(?=\n##|\Z)", PAGE, re.DOTALL))


def run(code: str, names: dict[str, Any]) -> Any:
    """Runs code; the value of its last line."""
    *lines, last = ast.parse(code).body
    assert isinstance(last, ast.Expr)
    exec(compile(ast.Module(lines, []), "lint.md", "exec"), names)
    return eval(compile(ast.Expression(last.value), "lint.md", "eval"), names)


@pytest.fixture(scope="module")
def codes_found() -> dict[str, list[list[str]]]:
    """Code → what each example of its section finds; later ones go on from earlier."""
    first, *_ = FENCE.findall(PAGE)
    names: dict[str, Any] = {}
    run(first, names)
    found = {}
    for code, text in SECTIONS.items():
        results = [run(example, names) for example in FENCE.findall(text)]
        found[code] = [[issue.code for issue in result] for result in results]
    return found


def test_the_table_is_that_of_the_code() -> None:
    rows = re.findall(r"\| \[(LM\d+)\]\(#(lm\d+)\) \| ([\w, ]+) \| (.*?) \|", PAGE)
    assert {code: about for code, _, _, about in rows} == CODES
    assert all(anchor == code.lower() for code, anchor, _, _ in rows)
    assert list(SECTIONS) == list(CODES)


@pytest.mark.parametrize("code", CODES)
def test_the_examples(code: str, codes_found: dict[str, list[list[str]]]) -> None:
    provoked, mended = codes_found[code]
    assert code in provoked and code not in mended


def test_every_name_exists() -> None:
    for name in set(re.findall(r"\bflm((?:\.\w+)+)", PAGE)):
        found: Any = flm
        for part in name.strip(".").split("."):
            found = getattr(found, part)
