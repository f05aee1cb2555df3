"""The site that MkDocs makes of `docs`: no warning, no broken link, nothing that is
loaded from elsewhere."""

import html.parser
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

import pytest
from helpers import ROOT


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
