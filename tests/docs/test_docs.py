"""The page for those who come from elsewhere: its names exist, its code runs."""

import re
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import without_meaning
from flax import linen as nn
from flax import nnx

import flax_layoutmap as flm

PAGE = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text("utf-8")
NAMES = sorted(set(re.findall(r"\bflm((?:\.\w+)+)", PAGE)))


def test_there_are_names() -> None:
    assert len(NAMES) > 25


@pytest.mark.parametrize("name", NAMES)
def test_a_name_exists(name: str) -> None:
    found: Any = flm
    for part in name.strip(".").split("."):
        found = getattr(found, part)


def test_members_exist() -> None:
    """Those of DTensor's tables for which the page says "the same"."""
    table = PAGE.split("## DTensor")[1]
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


def test_the_code_of_the_page_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {"flm": flm, "nnx": nnx, "nn": nn, "jax": jax, "jnp": jnp}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", flm.LayoutWarning)
        exec(compile(code, "coming_from.md", "exec"), names)


def test_what_has_no_meaning_here_has_a_reason() -> None:
    tables = {
        name: value for name, value in vars(without_meaning).items() if name.isupper()
    }
    assert len(tables) == 6
    for name, table in tables.items():
        for behaviour, reason in table.items():
            assert behaviour and len(reason.split()) > 1, (name, behaviour)
