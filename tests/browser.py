"""A browser that opens pages."""

import contextlib
import importlib.util
import shutil
from collections.abc import Iterator
from typing import Any

BROWSERS = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
)

# As a page in a container without a network needs it: no sandbox of its own, and no
# update, sync or search that would ask for an address.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


def browser_path() -> str | None:
    """The Chromium on this machine."""
    found = (shutil.which(name) for name in BROWSERS)
    return next((path for path in found if path is not None), None)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A browser; its event loop is in the way of the tests of other modules."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path(), args=list(FLAGS)
        )
        yield browser
        browser.close()


def why_no_browser() -> str | None:
    """Why pages cannot be opened here, as a sentence; None where they can."""
    if importlib.util.find_spec("playwright") is None:
        return (
            "Playwright, which drives the browser, is not installed: "
            "pip install -e '.[test]'."
        )
    if browser_path() is None:
        return (
            "There is no Chromium on this machine: "
            "apt-get install chromium-headless-shell."
        )
    return None
