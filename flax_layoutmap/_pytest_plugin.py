"""The pytest plug-in: the fixture `layout_golden` and the flag `--update-layouts`.

pytest loads it in every run where the package is installed, so it imports neither this
package nor JAX before the fixture is called.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_WRITTEN = "layouts written"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag."""
    parser.getgroup("flax_layoutmap").addoption(
        "--update-layouts",
        action="store_true",
        help="write the files that layout_golden compares with, where they differ",
    )


@pytest.fixture
def layout_golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Compare a Resolution with a file beside the test, or write it.

    `layout_golden(resolution)` fails where the layouts are not those of
    `layouts/<test file>/<test>.json`; a path, relative to the folder of the test file,
    may be given instead. With `--update-layouts` the file is written.
    """
    calls = 0

    def check(resolution: Any, path: str | Path | None = None) -> None:
        from flax_layoutmap.testing import assert_golden, write_golden

        nonlocal calls
        calls += 1
        if path is None:
            if calls > 1:
                raise ValueError(
                    "layout_golden is called twice in one test: name the file of each "
                    'call, such as layout_golden(resolution, "layouts/pod.json")'
                )
            name = re.sub(r"[^\w.=,-]+", "_", request.node.name).strip("_")
            path = Path("layouts", request.path.stem, f"{name}.json")
        path = request.path.parent / path
        if not request.config.getoption("--update-layouts"):
            assert_golden(resolution, path)
            return
        before = path.read_bytes() if path.exists() else None
        write_golden(resolution, path)
        if path.read_bytes() != before:
            request.node.user_properties.append((_WRITTEN, str(path)))

    return check


def pytest_terminal_summary(terminalreporter: "pytest.TerminalReporter") -> None:
    """List the files that were written, also by tests of other processes."""
    written = {
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == _WRITTEN
    }
    for path in sorted(written):
        terminalreporter.write_line(f"{_WRITTEN}: {path}")
