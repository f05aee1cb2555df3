"""Models to draw, and a browser that opens the pages."""

import contextlib
import functools
import importlib.util
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import flax_layoutmap as flm

# A Drawing holds one of several kinds of scenes; the tests know which.
draw: Any = flm.draw

MESH = flm.DeviceMesh.abstract("data=2,model=4")

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


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def transformer(layers: int) -> dict[str, Any]:
    """The shapes of a small language model."""
    block = {
        "attention": {
            "query": {"kernel": struct(64, 4, 16)},
            "out": {"kernel": struct(4, 16, 64)},
        },
        "mlp": {"up": {"kernel": struct(64, 256)}, "down": {"kernel": struct(256, 64)}},
        "norm": {"scale": struct(64)},
    }
    return {
        "embed": {"embedding": struct(512, 64)},
        "layers": {str(at): block for at in range(layers)},
        "norm": {"scale": struct(64)},
    }


def rules(mesh: Any = MESH) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh)
    layout_map["embed/embedding"] = ("model", None)
    layout_map["up/kernel"] = (None, "model")
    layout_map["down/kernel"] = ("model", None)
    layout_map["query/kernel"] = (None, "model", None)
    layout_map["out/kernel"] = ("model", None, None)
    layout_map["nothing/has/this"] = ("data",)
    return layout_map


@functools.cache
def resolved(layers: int = 12, *, optimizer: bool = True) -> flm.Resolution:
    """A model, with the state of Adam."""
    params = transformer(layers)
    tree = {"params": params}
    if optimizer:
        tree["opt_state"] = jax.eval_shape(optax.adam(1e-3).init, params)
    return rules().resolve(tree)
