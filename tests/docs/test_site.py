"""The site that MkDocs makes of `docs`: no warning, no broken link, nothing that is
loaded from elsewhere; in a browser no error, and no page wider than its window."""

import contextlib
import functools
import html.parser
import http.server
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

import pytest
from browser import chromium, why_no_browser
from helpers import ROOT

REASON = why_no_browser()
needs_browser = pytest.mark.skipif(REASON is not None, reason=str(REASON))

DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("MkDocs is not installed: pip install 'flax-layoutmap[docs]'.")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Page(html.parser.HTMLParser):
    """The anchors of a page, the pages that it links, and the files that it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") != "canonical":
            self.loads.append(given.get("href", ""))
        elif "src" in given:
            self.loads.append(given["src"])


def pages_of(site: Path) -> dict[str, Page]:
    return {
        str(path.relative_to(site)): Page(path.read_text("utf-8"))
        for path in sorted(site.rglob("*.html"))
        if path.name != "404.html"  # whose links begin at the root of a server
    }


def broken(pages: dict[str, Page], site: Path) -> list[str]:
    """Links to files and anchors that are not there, and files from elsewhere."""
    found = []
    for name, page in pages.items():
        for link in page.links + page.loads:
            path, anchor = urldefrag(urljoin(name, link))
            path = unquote(path)
            if re.match(r"[a-z]+:", path):
                if link in page.loads and not path.startswith("data:"):
                    found.append(f"{name} loads {link}")
            elif not (site / path).exists() or (
                anchor and path in pages and unquote(anchor) not in pages[path].anchors
            ):
                found.append(f"{name}: {link}")
    return found


def test_no_link_is_broken(site: Path) -> None:
    pages = pages_of(site)
    assert len(pages) > 40 and sum(len(page.links) for page in pages.values()) > 1000
    assert broken(pages, site) == []


def test_control_broken_links_are_seen(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html"></a><a href="#here" id="there"></a><a href="#there"></a>'
        '<script src="https://example.org/x.js"></script>'
    )
    pages = pages_of(tmp_path)
    assert broken(pages, tmp_path) == [
        "a.html: b.html",
        "a.html: #here",
        "a.html loads https://example.org/x.js",
    ]


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of a folder."""
    handler = functools.partial(_Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


# The widths of the page, and of boxes of tables, that scroll sideways.
WIDE = """[document.scrollingElement, ...document.querySelectorAll(
    ".md-typeset__scrollwrap")].filter(box => box.scrollWidth > box.clientWidth)
    .map(box => box.scrollWidth)"""
TOGGLE = """document.querySelector(
    "[data-md-component=palette] label:not([hidden])")?.click()"""
# In place of the text of all pages, which each page would read anew.
NO_INDEX = {"config": {"lang": ["en"], "separator": " ", "fields": {}}, "docs": []}


def trouble(browser: Any, folder: Path, names: Collection[str]) -> list[str]:
    """What is wrong with pages in a browser, as wide as a desktop and as a phone, in
    light and dark colours."""
    found: list[str] = []
    with served(folder) as root:
        page = browser.new_page(reduced_motion="reduce")  # which takes less time
        page.route("**/search_index.json", lambda one: one.fulfill(json=NO_INDEX))
        page.on("console", lambda one: found.append(f"{page.url}: {one.text}"))
        page.on("pageerror", lambda one: found.append(f"{page.url}: {one}"))
        page.on(
            "request",
            lambda one: one.url.startswith((root, "data:")) or found.append(one.url),
        )
        for name in names:
            page.goto(root + name)
            for size, _ in itertools.product((DESKTOP, PHONE), ("light", "dark")):
                page.set_viewport_size(size)
                for width in page.evaluate(WIDE):
                    found.append(f"{name}: {width} wide at {size['width']}")
                page.evaluate(TOGGLE)
        page.close()
        return [text.replace(root, "") for text in found]


@needs_browser
def test_every_page_fits_its_window(site: Path, browser: Any) -> None:
    found = trouble(browser, site, pages_of(site))
    # Tables of many figures, which scroll in their boxes.
    assert [one for one in found if not re.match("benchmarks.* at 390", one)] == []


@needs_browser
def test_colours_and_search(site: Path, browser: Any) -> None:
    with served(site) as root:
        page = browser.new_page(color_scheme="dark")
        page.goto(root + "index.html?q=LM101")
        for scheme in ("slate", "default", "slate"):
            assert page.evaluate("document.body.dataset.mdColorScheme") == scheme
            page.evaluate(TOGGLE)
        page.wait_for_selector("a[href*='lint.html'][href$='#lm101']", state="attached")
        page.close()


@needs_browser
def test_control_the_browser_sees_trouble(tmp_path: Path, browser: Any) -> None:
    (tmp_path / "a.html").write_text(
        '<link rel="icon" href="data:,"><p style="width: 600px">wide'
        '<script>console.error("wrong"); oops()</script>'
    )
    found = trouble(browser, tmp_path, ["a.html"])
    assert [text for text in found if "wrong" in text]
    assert [text for text in found if "oops" in text]
    wide = [text for text in found if re.match(r"a.html: 6\d\d wide at 390", text)]
    assert len(wide) == 2  # in both colours
    assert len(found) == 4
