"""Benchmark the HTML page of a model: time to make, size, and browser latency.

    python benchmarks/draw.py

The models are the Llama-like training states of `_trees.py`, resolved on an abstract
mesh. Prints two Markdown tables, then the targets as PASS or FAIL: a page of 30,000
leaves in 2 s and 5 MB, and of 10,000 leaves every answer to a person in 0.1 s. Times
in Python are of the CPU (`time.thread_time`), the median of `--repeats`; times in the
browser are of the clock, from the event to the end of the script that it runs. Without
Playwright and a Chromium there is no second table.
"""

import argparse
import importlib.util
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")

import optax  # noqa: E402
from _trees import dict_tree, regex_rules  # noqa: E402

import flax_layoutmap as flm  # noqa: E402

SECONDS, MEGABYTES, ANSWER = 2.0, 5.0, 0.1
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
RULES = 10
ROUNDS = 5  # of the steps in the browser; their medians count

# What a person does, and the script that does it; `state` is kept between them.
STEPS = (
    ("optimizer", "document.querySelectorAll('#views button')[1]?.click()"),
    ("parameters", "document.querySelectorAll('#views button')[0].click()"),
    ("unfold", "document.getElementById('fold').click()"),
    ("open all", "document.getElementById('open-all').click()"),
    ("search", "type('mlp up')"),
    ("search more", "type('mlp up_proj 77')"),
    ("clear", "type('')"),
    ("last row", "press('scroll', 'End')"),
    ("next cell", "press('canvas', 'ArrowRight')"),
    ("point", "move(0.3, 0.4)"),
    ("theme", "document.getElementById('theme').click()"),
    ("fold", "document.getElementById('fold').click()"),
)
HELPERS = """
window.type = (text) => {
    const input = document.getElementById("search");
    input.value = text; input.dispatchEvent(new Event("input"));
};
window.press = (id, key) =>
    document.getElementById(id).dispatchEvent(new KeyboardEvent("keydown", {key}));
window.move = (x, y) => {
    const canvas = document.getElementById("canvas");
    const box = canvas.getBoundingClientRect();
    canvas.dispatchEvent(new MouseEvent("mousemove", {
        clientX: box.left + x * box.width, clientY: box.top + y * box.height,
        screenX: x, screenY: y, bubbles: true,
    }));
};
"""


def resolution(leaves: int) -> flm.Resolution:
    """A training state with about so many leaves."""
    tree = dict_tree(leaves)
    adam = optax.ScaleByAdamState(tree["step"], tree["mu"], tree["nu"])
    mesh = flm.DeviceMesh.abstract("data=16,model=16")
    rules = flm.LayoutMap.from_rules(regex_rules(RULES), mesh, overlap="first")
    return rules.resolve({"params": tree["params"], "opt_state": (adam,)})


def made(found: flm.Resolution, repeats: int) -> tuple[float, float, str]:
    """Seconds for the scene, for the page, and the page."""
    scenes, pages, page = [], [], ""
    for _ in range(repeats):
        start = time.thread_time()
        drawing = flm.draw.model(found)
        between = time.thread_time()
        page = drawing.html()
        pages.append(time.thread_time() - between)
        scenes.append(between - start)
    return statistics.median(scenes), statistics.median(pages), page


def browser_path() -> str | None:
    """The Chromium on this machine, if Playwright is there to drive it."""
    if importlib.util.find_spec("playwright") is None:
        return None
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def answers(browser: Any, path: Path) -> dict[str, float]:
    """Seconds that each step takes in the browser; first the page until it is ready."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    start = time.perf_counter()
    page.goto(path.as_uri())
    found = {"open": time.perf_counter() - start}
    page.evaluate(f"() => {{{HELPERS}}}")
    for name, code in STEPS:
        milliseconds = page.evaluate(
            f"""() => {{
                const start = performance.now();
                {code};
                document.body.getBoundingClientRect();
                return performance.now() - start;
            }}"""
        )
        found[name] = milliseconds / 1000
    page.close()
    return found


def show(header: list[str], rows: list[list[str]]) -> None:
    """Print a Markdown table."""
    rule = [":--", *["--:"] * (len(header) - 1)]
    for row in (header, rule, *rows):
        print(f"| {' | '.join(row)} |")
    print(flush=True)


def verdict(what: str, value: float, limit: float, unit: str) -> bool:
    """Print whether a target was reached."""
    word = "PASS" if value <= limit else "FAIL"
    print(f"- {word}: {what}: {value:.3g} {unit} of {limit:g} {unit} allowed")
    return value <= limit


def main() -> int:
    """Print the tables and the targets; 1 where one was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", type=int, default=[3000, 10000, 30000])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore", flm.LayoutWarning)
    rows, pages = [], {}
    results: dict[int, tuple[float, float]] = {}
    for size in options.sizes:
        found = resolution(size)
        scene, page, pages[size] = made(found, options.repeats)
        megabytes = len(pages[size].encode()) / 1e6
        results[size] = scene + page, megabytes
        cells = [f"{scene:.2f} s", f"{page:.2f} s", f"{megabytes:.2f} MB"]
        rows.append([f"{len(found):,}", *cells])
    show(["leaves", "scene", "page", "file"], rows)
    slowest = in_browser(pages)
    good = []
    if 30000 in results:
        seconds, megabytes = results[30000]
        good.append(verdict("30,000 leaves, to make", seconds, SECONDS, "s"))
        good.append(verdict("30,000 leaves, the file", megabytes, MEGABYTES, "MB"))
    if 10000 in slowest:
        name, seconds = slowest[10000]
        what = f"10,000 leaves, the slowest answer ({name})"
        good.append(verdict(what, seconds, ANSWER, "s"))
    return 0 if all(good) else 1


def in_browser(pages: dict[int, str]) -> dict[int, tuple[str, float]]:
    """Print the second table; return the slowest answer for each size."""
    path = browser_path()
    if path is None:
        print("no browser: needs Playwright and a Chromium\n")
        return {}
    from playwright.sync_api import sync_playwright

    measured: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as work, sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        for size, text in pages.items():
            file = Path(work) / f"{size}.html"
            file.write_text(text, encoding="utf-8")
            rounds = [answers(browser, file) for _ in range(ROUNDS)]
            measured[size] = {
                name: statistics.median(found[name] for found in rounds)
                for name in rounds[0]
            }
        browser.close()
    names = ["open", *(name for name, _ in STEPS)]
    show(
        ["step", *(f"{size:,}" for size in pages)],
        [
            [name, *(f"{1000 * measured[size][name]:.0f} ms" for size in pages)]
            for name in names
        ],
    )
    return {
        size: max(((name, found[name]) for name, _ in STEPS), key=lambda pair: pair[1])
        for size, found in measured.items()
    }


if __name__ == "__main__":
    sys.exit(main())
