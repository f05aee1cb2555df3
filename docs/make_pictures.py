"""Makes the pictures of the documentation, in docs/pictures.

    pip install -e '.[test]'
    python docs/make_pictures.py

Needs matplotlib, and for the pages Playwright and a Chromium (Debian's
chromium-headless-shell will do); without these two, the pages are left as they are.
The model is a Llama of 8 billion parameters with the state of Adam, as shapes alone, on
a mesh of 256 devices that nobody needs to have.
"""

import argparse
import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import flax_layoutmap as flm

FOLDER = Path(__file__).parent / "pictures"

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")

# Name, width and height of the window in points, colour scheme.
WINDOWS: tuple[tuple[str, int, int, Any], ...] = (
    ("page", 1280, 860, "light"),
    ("page_dark", 1280, 860, "dark"),
    ("page_phone", 390, 844, "light"),
)


def llama() -> dict[str, Any]:
    """The shapes of the model."""

    def kernel(*shape: int) -> dict[str, Any]:
        return {"kernel": jax.ShapeDtypeStruct(shape, jnp.bfloat16)}

    def scale() -> dict[str, Any]:
        return {"scale": jax.ShapeDtypeStruct((4096,), jnp.bfloat16)}

    layer = {
        "self_attn": {
            "q_proj": kernel(4096, 4096),
            "k_proj": kernel(4096, 1024),
            "v_proj": kernel(4096, 1024),
            "o_proj": kernel(4096, 4096),
        },
        "mlp": {
            "gate_proj": kernel(4096, 14336),
            "up_proj": kernel(4096, 14336),
            "down_proj": kernel(14336, 4096),
        },
        "input_layernorm": scale(),
        "post_attention_layernorm": scale(),
    }
    embedding = jax.ShapeDtypeStruct((128256, 4096), jnp.bfloat16)
    return {
        "embed_tokens": {"embedding": embedding},
        "layers": {str(at): layer for at in range(32)},
        "norm": scale(),
        "lm_head": kernel(4096, 128256),
    }


def layout_map(mesh: str) -> flm.LayoutMap:
    """Tensor parallel on `model`, sharded over `data` too."""
    rules = flm.LayoutMap(flm.DeviceMesh.abstract(mesh))
    rules["embed_tokens/embedding"] = ("model", "data")
    rules["(q|k|v)_proj/kernel"] = ("data", "model")
    rules["o_proj/kernel"] = ("model", "data")
    rules["(gate|up)_proj/kernel"] = ("data", "model")
    rules["down_proj/kernel"] = ("model", "data")
    rules["lm_head/kernel"] = ("data", "model")
    rules["(norm|layernorm)/scale"] = None
    return rules


def training(mesh: str) -> flm.Resolution:
    """The layouts of the model and of its optimizer's state."""
    params = llama()
    state = jax.eval_shape(optax.adam(1e-4).init, params)
    return layout_map(mesh).resolve({"params": params, "opt_state": state})


def plots(folder: Path) -> None:
    """What matplotlib draws."""
    mesh = flm.DeviceMesh.abstract("data=2,model=4")
    layout = flm.TensorLayout(("model", None), mesh)
    flm.draw.array(layout, (256, 64)).save(folder / "array.png")
    pod = flm.DeviceMesh.abstract("pod=2,data=4,model=4")
    both = flm.TensorLayout(("data", "model"), pod)
    flm.draw.array(both, (4096, 14336)).save(folder / "array_on_three_axes.png")
    flm.draw.model(training("data=16,model=16")).save(folder / "bars.png")
    on_model_only = layout_map("data=16,model=16")
    on_model_only.replace("(gate|up)_proj/kernel", (None, "model"))
    on_model_only.replace("down_proj/kernel", ("model", None))
    before = on_model_only.resolve(llama())
    after = layout_map("data=16,model=16").resolve(llama())
    names = ("tensor parallel", "with FSDP")
    flm.draw.compare(before, after, names).save(folder / "compare.png")


def pages(folder: Path) -> bool:
    """What a browser shows of the page; False where there is none."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None or importlib.util.find_spec("playwright") is None:
        return False
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as work, sync_playwright() as playwright:
        page_path = Path(work) / "page.html"
        flm.draw.model(training("data=16,model=16")).save(page_path)
        flags = ["--no-sandbox", "--disable-background-networking"]
        chromium = playwright.chromium.launch(executable_path=browser, args=flags)
        for name, width, height, scheme in WINDOWS:
            page = chromium.new_page(
                viewport={"width": width, "height": height},
                color_scheme=scheme,
                device_scale_factor=1.5,
            )
            page.goto(page_path.as_uri())
            row = page.locator(".row.leaf", has_text="up_proj/kernel")
            row.click()
            page.evaluate("scrollTo(0, 0); document.activeElement.blur()")
            page.mouse.move(2, 2)
            page.screenshot(path=folder / f"{name}.png")
        chromium.close()
    return True


def main() -> None:
    """Makes all pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    plots(folder)
    if not pages(folder):
        print("no browser here: the pictures of the page are left as they are")
    for path in sorted(folder.glob("*.png")):
        print(path.name, f"{path.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
