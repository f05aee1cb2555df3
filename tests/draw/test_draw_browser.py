"""The pages of `flm.draw`, opened in a real browser."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pictures import MESH, chromium, resolved, struct, why_no_browser

import flax_layoutmap as flm
from flax_layoutmap._show.table import human_bytes

REASON = why_no_browser()
if REASON is not None:
    pytest.skip(REASON, allow_module_level=True)
# Pages do not depend on the versions of JAX and Flax; one run of them is enough.
pytestmark = pytest.mark.slow

WIDTHS = [320, 360, 560, 800, 1100, 1600]


@dataclasses.dataclass
class Opened:
    """A page, and what happened on it that should not."""

    page: Any
    troubles: list[str]
    asked: list[str]

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.inner_text()

    def all(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_inner_texts()

    def explained(self) -> str:
        return self.page.locator("#explain pre").text_content()

    def active(self) -> str:
        """Path of the row that is selected in the table."""
        row = self.page.locator(".row[aria-selected=true] .path")
        return row.get_attribute("title") if row.count() else ""

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def view(self, name: str) -> None:
        self.page.locator("#views button", has_text=name).click()


@pytest.fixture(scope="module")  # its event loop is in the way of other modules' tests
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Opens drawings; in the end, no page may have complained or asked the network."""
    opened: list[Opened] = []

    def show(drawing: Any, *, width: int = 1200, theme: str = "light") -> Opened:
        path = tmp_path / f"page{len(opened)}.html"
        path.write_text(drawing if isinstance(drawing, str) else drawing.html())
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=theme
        )
        page = context.new_page()
        page.set_default_timeout(20_000)
        made = Opened(page, [], [])
        page.on("console", lambda message: made.troubles.append(message.text))
        page.on("pageerror", lambda error: made.troubles.append(str(error)))
        page.on("dialog", lambda dialog: made.troubles.append(dialog.message))
        page.on("request", lambda request: made.asked.append(request.url))
        page.goto(path.as_uri())
        opened.append(made)
        return made

    yield show
    for at, made in enumerate(opened):
        assert made.troubles == []
        assert made.asked == [(tmp_path / f"page{at}.html").as_uri()]
        made.page.context.close()


@pytest.fixture(scope="session")
def resolution() -> flm.Resolution:
    return resolved()


def flat(opened: Opened) -> None:
    """Every leaf by itself, and all modules open."""
    opened.page.locator("#fold").click()
    opened.page.locator("#open-all").click()


def test_it_opens(show: Any, resolution: flm.Resolution) -> None:
    opened = show(flm.draw.model(resolution))
    assert opened.text("h1") == "Layouts on mesh data=2,model=4"
    facts = dict(zip(opened.all("dt"), opened.all("dd"), strict=True))
    assert facts["leaves"] == str(resolution.totals("parameter").leaves) == "62"
    assert facts["mesh"] == "data=2,model=4 8 devices"
    sums, remarks = resolution.totals("parameter"), resolution.remarks(fold=True)
    assert facts["per device"] == human_bytes(sums.bytes_per_device)
    assert facts["in all"] == human_bytes(sums.total_bytes)
    assert opened.all(".row.leaf .path b")[0] == "embed/embedding"
    # Twelve equal layers are one.
    assert "layers/{0..11}" in opened.all(".row.module .path b")
    assert opened.all(".times") == ["×12"]
    assert opened.text("#remarks summary") == f"{len(remarks)} remarks"


def test_the_table_says_what_the_resolution_says(
    show: Any, resolution: flm.Resolution
) -> None:
    opened = show(flm.draw.model(resolved(2)))
    flat(opened)
    small = resolved(2)
    leaves = [leaf for leaf in small if leaf.role == "parameter"]
    rows = opened.page.locator(".row.leaf")
    assert rows.count() == len(leaves)
    for at in range(rows.count()):
        row = rows.nth(at)
        leaf = small[row.locator(".path").get_attribute("title")]
        row.hover()
        assert opened.explained() == small.explain(leaf.path)
        shape = row.locator(".shape").inner_text()
        assert shape == str(leaf.shape).replace(" ", "")
        if leaf.rule is not None:
            number, pattern = row.locator(".rule").inner_text().split(" ", 1)
            assert (int(number), pattern) == (leaf.rule_number, leaf.rule.pattern)


def test_keyboard_focus_explains_too(show: Any) -> None:
    small = resolved(2)
    opened = show(flm.draw.model(small))
    flat(opened)
    opened.page.locator("#scroll").focus()
    opened.press("Home")
    seen = set()
    for _ in range(opened.page.locator(".row").count()):
        path = opened.active()
        if path in small:
            assert opened.explained() == small.explain(path)
            seen.add(path)
        opened.press("ArrowDown")
    assert seen == {leaf.path for leaf in small if leaf.role == "parameter"}


def test_optimizer_state_follows_its_parameters(
    show: Any, resolution: flm.Resolution
) -> None:
    opened = show(flm.draw.model(resolution))
    opened.view("Optimizer")
    flat(opened)
    opened.page.locator("#search").fill("mu layers/7/ up/kernel")
    opened.page.locator(".row.leaf").hover()
    path = "opt_state/0/mu/layers/7/mlp/up/kernel"
    assert opened.explained() == resolution.explain(path)
    assert "follows layers/7/mlp/up/kernel" in opened.explained()


def test_what_follows_a_kernel_beside_it(show: Any) -> None:
    layer = {"kernel": struct(8, 16), "lora": {"lora_a": struct(8, 2)}}
    layer["lora"]["lora_b"] = struct(2, 16)
    layout_map = flm.LayoutMap(MESH)
    layout_map["kernel"] = (None, "model")
    small = layout_map.resolve({str(at): layer for at in range(3)})
    opened = show(flm.draw.model(small))
    flat(opened)
    opened.page.locator("#search").fill("2/lora lora_b")
    opened.page.locator(".row.leaf").hover()
    assert opened.explained() == small.explain("2/lora/lora_b")
    assert "from the layout of 2/kernel" in opened.explained()


def test_a_switch_between_parameters_and_optimizer(
    show: Any, resolution: flm.Resolution
) -> None:
    opened = show(flm.draw.model(resolution))
    before = opened.page.locator("#canvas").screenshot()
    opened.view("Optimizer")
    facts = dict(zip(opened.all("dt"), opened.all("dd"), strict=True))
    assert facts["leaves"] == str(resolution.totals("optimizer").leaves)
    assert opened.page.locator("#canvas").screenshot() != before
    pressed = opened.page.locator("#views [aria-pressed=true]")
    assert pressed.all_inner_texts() == ["Optimizer"]


def test_search(show: Any, resolution: flm.Resolution) -> None:
    opened = show(flm.draw.model(resolution))
    assert opened.text("#count") == "62 leaves"
    opened.press("/")
    opened.page.keyboard.type("MLP up")
    # The folded row stands for twelve leaves.
    assert opened.text("#count") == "12 of 62 leaves"
    assert opened.all(".row.leaf .path b") == ["up/kernel"]
    opened.page.locator("#search").fill("replicated")
    assert opened.text("#count") == "13 of 62 leaves"
    opened.page.locator("#search").fill("no such thing")
    assert opened.text("#spacer") == "Nothing matches."
    opened.page.locator("#search").fill("")
    assert opened.text("#count") == "62 leaves"


def test_a_spec_alone(show: Any, resolution: flm.Resolution) -> None:
    opened = show(flm.draw.model(resolution))
    opened.page.locator(".chip", has_text="P(-, model)").click()
    assert set(opened.all(".row.leaf .spec")) == {"P(-, model)"}
    assert opened.text("#count") == "24 of 62 leaves"
    focused = opened.page.evaluate(
        "document.activeElement.getAttribute('aria-pressed')"
    )
    assert focused == "true"
    opened.press("Enter")
    assert opened.text("#count") == "62 leaves"
    opened.page.locator(".chip", has_text="no rule").click()
    assert opened.text("#count") == "13 of 62 leaves"


def test_fold(show: Any, resolution: flm.Resolution) -> None:
    opened = show(flm.draw.model(resolution))
    layers = opened.page.locator(".row.module", has_text="layers/{0..11}")
    assert layers.get_attribute("aria-expanded") == "true"
    many = opened.page.locator(".row").count()
    layers.click()
    assert layers.get_attribute("aria-expanded") == "false"
    assert opened.page.locator(".row").count() < many
    layers.click()
    assert opened.page.locator(".row").count() == many
    opened.page.locator("#close-all").click()
    assert opened.all(".row .path b") == ["params"]
    opened.page.locator("#fold").click()
    opened.page.locator("#open-all").click()
    names = opened.all(".row .path b")
    # In the order of the layers, not of their names.
    assert [name for name in names if name.isdecimal()][:3] == ["0", "1", "2"]
    assert opened.page.locator("#fold").get_attribute("aria-pressed") == "false"


def test_the_keys_of_the_table(show: Any, resolution: flm.Resolution) -> None:
    opened = show(flm.draw.model(resolution))
    opened.page.locator("#scroll").focus()
    assert opened.active() == "params"
    opened.press("ArrowDown")
    assert opened.active() == "params/embed/embedding"
    opened.press("ArrowDown", "ArrowLeft")
    layers = opened.page.locator(".row.module", has_text="layers/{0..11}")
    assert layers.get_attribute("aria-expanded") == "false"
    opened.press("ArrowRight")
    assert layers.get_attribute("aria-expanded") == "true"
    opened.press("ArrowRight")
    assert opened.active() == "params/layers/{0..11}/attention"
    opened.press("ArrowLeft", "ArrowLeft")
    assert opened.active() == "params/layers/{0..11}"
    opened.press("End")
    assert opened.active() == "params/norm/scale"
    opened.press("Home", "Enter")
    assert opened.page.locator(".row").count() == 1
    target = opened.page.locator("#scroll").get_attribute("aria-activedescendant")
    assert opened.page.locator(f"#{target}").get_attribute("aria-level") == "1"


def middle(opened: Opened, drawing: Any, path: str) -> tuple[float, float]:
    """Where on the screen the rectangle of a leaf is, from the numbers of the scene."""
    forest = drawing.scene.views[0].folded
    for node, kind in enumerate(forest.kinds):
        names, at = [], node
        while at > 0:
            names.insert(0, forest.names[at])
            at = forest.parents[at]
        if kind >= 0 and "/".join(names) == path:
            left, top, right, bottom = forest.wide[4 * node : 4 * node + 4]
            box = opened.page.locator("#canvas").bounding_box()
            x = box["x"] + box["width"] * (left + right) / 2 / 65535
            return x, box["y"] + box["height"] * (top + bottom) / 2 / 65535
    raise AssertionError(path)


def test_the_map_explains_what_is_under_the_pointer(
    show: Any, resolution: flm.Resolution
) -> None:
    drawing = flm.draw.model(resolution)
    opened = show(drawing)
    opened.page.mouse.move(*middle(opened, drawing, "params/embed/embedding"))
    assert opened.explained() == resolution.explain("params/embed/embedding")
    down = "params/layers/{0..11}/mlp/down/kernel"
    opened.page.mouse.click(*middle(opened, drawing, down))
    assert "12 leaves alike, 192.0 KiB per device" in opened.text("#explain")
    wanted = resolution.explain("params/layers/0/mlp/down/kernel")
    assert opened.explained() == wanted.replace("layers/0/", "layers/{0..11}/")
    assert opened.active() == down
    # It stays when the pointer leaves.
    opened.page.mouse.move(2, 2)
    assert opened.explained().startswith(down)


def test_the_keys_of_the_map(show: Any, resolution: flm.Resolution) -> None:
    drawing = flm.draw.model(resolution)
    opened = show(drawing)
    opened.page.locator("#canvas").focus()
    opened.press("Home")
    first = opened.active()
    assert first in (
        "params/layers/{0..11}/mlp/down/kernel",
        "params/layers/{0..11}/mlp/up/kernel",
    )
    opened.press("ArrowRight", "ArrowRight", "ArrowDown")
    assert opened.active() != first
    opened.press("Home", "Enter", "Enter")
    assert opened.all("#crumbs .mono") == ["all", "params", "layers/{0..11}"]
    opened.press("Escape")
    assert opened.all("#crumbs .mono") == ["all", "params"]
    opened.page.locator("#crumbs button").click()
    assert opened.all("#crumbs .mono") == ["all"]


def test_everything_is_reached_by_tab(show: Any, resolution: flm.Resolution) -> None:
    opened = show(flm.draw.model(resolution))
    reached = []
    for _ in range(22):
        opened.press("Tab")
        reached.append(
            opened.page.evaluate(
                "document.activeElement.id || document.activeElement.className"
            )
        )
    wanted = {"fold", "theme", "canvas", "search", "open-all", "close-all", "scroll"}
    assert wanted | {"chip"} <= set(reached)


@pytest.mark.parametrize("width", WIDTHS)
def test_no_width_scrolls_sideways(
    show: Any, resolution: flm.Resolution, width: int
) -> None:
    opened = show(flm.draw.model(resolution), width=width)
    for step in ("", "#fold", "#open-all"):
        if step:
            opened.page.locator(step).click()
        wide = opened.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, step
    # Nothing sticks out where it would be cut off.
    cut = opened.page.evaluate(
        """[...document.querySelectorAll("main *")].filter((element) => {
            const box = element.getBoundingClientRect();
            return box.width && box.right > innerWidth + 0.5;
        }).map((element) => element.className || element.tagName)"""
    )
    assert cut == []


CONTRAST = """(selectors) => {
    const pen = Object.assign(document.createElement("canvas"), {width: 1, height: 1})
        .getContext("2d", {willReadFrequently: true});
    const styled = (element) => getComputedStyle(element);
    const rgb = (colour, under) => {
        pen.fillStyle = under; pen.fillRect(0, 0, 1, 1);
        pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1);
        return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const light = (parts) => {
        const linear = (part) =>
            (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
        const [r, g, b] = parts.map((part) => linear(part / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const paper = (element) => {
        const chain = [];
        for (let at = element; at; at = at.parentElement) chain.unshift(at);
        let below = "rgb(255,255,255)";
        for (const at of chain) {
            below = `rgb(${rgb(styled(at).backgroundColor, below)})`;
        }
        return below;
    };
    return selectors.map((selector) => {
        const element = document.querySelector(selector), below = paper(element);
        const ink = rgb(styled(element).color, below);
        const pair = [light(ink), light(rgb(below, below))];
        return [selector, (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05)];
    });
}"""

WORDS = [
    "h1", ".lead", "dt", "dd", "dd small", ".chip .mono", ".chip span:last-child",
    ".chip .warn", "#views [aria-pressed=true]", "#views [aria-pressed=false]", "#fold",
    ".crumbs span", "#explain p", "#explain h2", "#count", "#search", ".heads .path",
    ".row .path b", ".row .twist", ".row .times", ".row.leaf .shape", ".bytes span",
    ".row .rule.warn", "summary", "footer", "kbd",
]  # fmt: skip


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_words_can_be_read(show: Any, resolution: flm.Resolution, theme: str) -> None:
    opened = show(flm.draw.model(resolution), theme=theme)
    found = opened.page.evaluate(CONTRAST, WORDS)
    assert [pair for pair in found if pair[1] < 4.5] == []
    colours = opened.page.evaluate(
        """[0, 1, 2, 3, 4, 5, 6, 7, "neutral"].map((name) => {
            const box = document.body.appendChild(document.createElement("p"));
            const known = name === "neutral" ? "--neutral" : `--c${name}`;
            box.id = `probe${name}`;
            box.style.background = `var(${known})`; box.style.color = "var(--on)";
            return `#probe${name}`;
        })"""
    )
    found = opened.page.evaluate(CONTRAST, colours)
    assert len(found) == 9
    assert [pair for pair in found if pair[1] < 4.5] == []


def test_dark_and_light(show: Any, resolution: flm.Resolution) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    opened = show(flm.draw.model(resolution), theme="dark")
    dark = opened.page.evaluate(background)
    drawn = opened.page.locator("#canvas").screenshot()
    assert opened.text("#theme") == "Light"
    opened.page.locator("#theme").click()
    light = opened.page.evaluate(background)
    assert (dark, light) == ("rgb(20, 23, 28)", "rgb(255, 255, 255)")
    assert opened.page.locator("#canvas").screenshot() != drawn
    # What a person chose stays when the system changes.
    opened.page.emulate_media(color_scheme="light")
    opened.page.emulate_media(color_scheme="dark")
    assert opened.page.evaluate(background) == light
    follows = show(flm.draw.model(resolution), theme="light")
    follows.page.emulate_media(color_scheme="dark")
    for _ in range(100):  # `wait_for_function` evaluates text, which the page forbids
        if follows.page.evaluate(background) == dark:
            break
        follows.page.wait_for_timeout(50)
    assert follows.page.evaluate(background) == dark


HOSTILE = [
    "</script><script>window.hacked = 1</script>",
    '"><img src=x onerror="window.hacked = 1">',
    "<!--<script>",
    "{{data}}",
    "]]>&lt;b&gt;\u2028\u2029\u0000",
    "${hacked}`'\\",
    "__proto__",
    "\u202eright to left",
    "ключ 鍵 🔑",
    "",
]


def test_hostile_paths_are_words(show: Any) -> None:
    layout_map = flm.LayoutMap(MESH)
    layout_map["</script><script>window.hacked = 2</script>"] = ("model",)
    layout_map["<b>bold</b>"] = ("data",)
    tree = {name: {"w": struct(8), "v": struct(16)} for name in HOSTILE}
    small = layout_map.resolve(tree)
    opened = show(flm.draw.model(small))
    opened.page.locator("#open-all").click()
    assert opened.page.evaluate("window.hacked") is None
    assert opened.page.locator("img, script:not([type])").count() == 1
    assert opened.page.locator(".row.leaf").count() == len(small)
    rows = opened.page.locator(".row.leaf")
    for at in range(rows.count()):
        path = rows.nth(at).locator(".path").get_attribute("title")
        rows.nth(at).hover()
        # HTML has no NUL; everything else is as it is.
        assert opened.explained() == small.explain(path)
    opened.page.locator("#search").fill("onerror")
    assert opened.page.locator(".row.leaf").count() == 2


def test_a_model_of_ten_thousand_leaves(show: Any) -> None:
    opened = show(flm.draw.model(resolved(2000, optimizer=False)))
    assert opened.text("#count") == "10,002 leaves"
    opened.page.locator("#fold").click()
    opened.page.locator("#open-all").click()
    # Only the rows that can be seen are there.
    assert 10 < opened.page.locator(".row").count() < 60
    opened.page.locator("#search").fill("layers/1234/ up")
    assert opened.text("#count") == "1 of 10,002 leaves"
    assert opened.all(".row.leaf .path b") == ["up/kernel"]
    opened.page.locator("#search").fill("")
    opened.page.locator("#scroll").focus()
    opened.press("End")
    assert opened.active() == "params/norm/scale"
    assert opened.all(".row .path b")[-1] == "norm/scale"


def test_more_specs_than_colours_have_patterns(show: Any) -> None:
    layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("a=2,b=2,c=2"))
    axes = [(x, y) for x in "abc" for y in ("abc".replace(x, "") + " ")]
    tree = {}
    for number, (first, second) in enumerate(axes):
        layout_map[f"w{number}$"] = (first, None if second == " " else second)
        tree[f"w{number}"] = struct(64, 64)
    opened = show(flm.draw.model(layout_map.resolve(tree)))
    swatches = opened.page.locator("#legend .swatch")
    looks = {
        swatches.nth(at).evaluate(
            "e => { const s = getComputedStyle(e);"
            " return s.backgroundColor + s.backgroundImage; }"
        )
        for at in range(len(axes))
    }
    assert len(axes) == len(looks) == 9
    # And in the map: the first and the ninth differ in some point.
    same = opened.page.evaluate(
        """() => {
          const canvas = document.getElementById("canvas"), seen = new Set();
          const pen = canvas.getContext("2d");
          const all = pen.getImageData(0, 0, canvas.width, canvas.height).data;
          for (let at = 0; at < all.length; at += 4)
            seen.add(all.slice(at, at + 3).join());
          return seen.size;
        }"""
    )
    assert same > 9


def test_leaves_without_bytes(show: Any) -> None:
    drawing = flm.draw.model(flm.LayoutMap(MESH).resolve({"w": struct(0, 8)}))
    opened = show(drawing)
    assert opened.text("#count") == "1 leaf"
    opened.page.locator("#canvas").focus()
    opened.press("ArrowRight", "Enter", "Escape", "Home")


def test_no_mesh_and_one_array(show: Any) -> None:
    opened = show(flm.draw.model(flm.LayoutMap().resolve(struct(8, 8))))
    assert opened.text("h1") == "Layouts on no mesh"
    assert opened.all(".row .path b") == ["(the array)"]


@pytest.mark.parametrize("width", [360, 1200])
def test_the_page_of_an_array(show: Any, width: int) -> None:
    layout = flm.TensorLayout(("data", None, "model"), MESH)
    opened = show(flm.draw.array(layout, (4, 4, 8)), width=width)
    assert opened.text("h1").startswith("array (4,4,8) as P(data, -, model)")
    assert opened.page.locator("svg rect").count() == 16
    wide = opened.page.evaluate("document.documentElement.scrollWidth")
    assert wide <= width
    opened.page.locator("summary").click()
    assert "A = x[0:2, :, 0:2], held by device 0" in opened.all("li")


def test_labels_do_not_leave_their_picture(show: Any) -> None:
    names = ("a_rather_long_axis_name", "model")
    mesh = flm.DeviceMesh.abstract((2, 4), names)
    layout = flm.TensorLayout(names, mesh)
    opened = show(flm.draw.array(layout, (1_000_000, 400_000)))
    cut = opened.page.evaluate(
        """[...document.querySelectorAll("svg")].flatMap((svg) => {
            const frame = svg.getBoundingClientRect();
            return [...svg.querySelectorAll("text")].filter((text) => {
                const box = text.getBoundingClientRect();
                return box.left < frame.left - 1 || box.right > frame.right + 1;
            }).map((text) => text.textContent);
        })"""
    )
    assert cut == []


def test_a_notebook_shows_the_page_in_a_frame(
    browser: Any, resolution: flm.Resolution, tmp_path: Path
) -> None:
    troubles: list[str] = []
    page = browser.new_page()
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    notebook = f"<!doctype html><body>{resolution._repr_html_()}</body>"
    path = tmp_path / "notebook.html"
    path.write_text(notebook)
    page.goto(path.as_uri())
    frame = page.frame_locator("iframe")
    frame.locator("h1", has_text="Layouts on mesh data=2,model=4").wait_for()
    frame.locator("#search").fill("embed")
    assert frame.locator("#count").inner_text() == "1 of 62 leaves"
    assert troubles == []
    page.close()


def test_control_the_checks_see_trouble(show: Any, browser: Any) -> None:
    """That a page with an error, a request and a wide element would be found out."""
    text = flm.draw.model(resolved(1)).html()
    broken = text.replace('"use strict";', '"use strict"; undefinedName();')
    opened = show(broken)
    # The script is not the one whose hash is allowed.
    assert "Content Security Policy" in opened.troubles[0]
    opened.troubles.clear()
    asks = text.replace("</main>", '<img src="https://example.invalid/x.png"></main>')
    opened = show(asks)
    assert opened.asked.pop() == "https://example.invalid/x.png"
    assert "Content Security Policy" in opened.troubles[0]
    opened.troubles.clear()
