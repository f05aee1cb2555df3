"""The page about checkpoints: its code runs, in one go."""

import re
from pathlib import Path

import pytest
from helpers import run_python

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text("utf-8")


@pytest.mark.slow
def test_the_code_of_the_page_runs() -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    printed = run_python(
        code
        + """
assert training["model"].kernel.sharding.mesh.shape == {"data": 2, "model": 4}
assert weights["model"]["kernel"].sharding.mesh == other.jax_mesh
assert halves["model"]["kernel"].dtype == jnp.bfloat16
"""
    )
    assert "P(data, model)" in printed and "are as saved" in printed
