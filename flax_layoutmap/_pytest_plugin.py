"""The pytest plug-in: the fixture `layout_golden` and the flag `--update-layouts`.

pytest loads it in every run where the package is installed, so it imports neither this
package nor JAX before the fixture is called.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("flax_layoutmap").addoption(
        "--update-layouts",
        action="store_true",
        help="write the files that layout_golden compares with",
    )


@pytest.fixture
def layout_golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Compare a Resolution with a golden file next to the test, or write it.

    `layout_golden(resolution)` fails if the layouts differ from
    `layouts/<test file>/<test>.json`. For several calls in a test, pass paths,
    relative to the folder of the test file. `--update-layouts` writes the file.
    """

    def check(resolution: Any, path: str | Path | None = None) -> None:
        from flax_layoutmap.testing import assert_golden, write_golden

        if path is None:
            name = re.sub(r"[^\w.=,-]+", "_", request.node.name).strip("_")
            path = Path("layouts", request.path.stem, f"{name}.json")
        path = request.path.parent / path
        write = request.config.getoption("--update-layouts")
        (write_golden if write else assert_golden)(resolution, path)

    return check
