"""Scenes as PNG, drawn by matplotlib (`pip install flax-layoutmap[plot]`)."""

import io
from typing import TYPE_CHECKING, Any

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._show.table import human_bytes
from flax_layoutmap.draw._scene import (
    INK,
    NEUTRAL,
    BarScene,
    GridScene,
    ModelScene,
    Picture,
    Scene,
    colour,
    hatch,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_POINTS = 72.0  # points of a scene per inch of paper
_DOTS = 160  # dots per inch of the PNG
_QUIET = "#565e6c"
_HATCH = "#a8adb5"
_DARK_HATCH = "#4a505a"
_COLUMNS = 4  # of the legend
_WIDE = 1000.0  # pictures are drawn one above the other from here, in points


def png(scene: Scene) -> bytes:
    """The content of the file.

    Raises:
        LayoutError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LayoutError(
            "a PNG is drawn by matplotlib, which is not installed; "
            "pip install 'flax-layoutmap[plot]', or save as .html or .txt"
        ) from error
    figure = Figure()  # of no window, and without matplotlib's global state
    if isinstance(scene, GridScene):
        _draw_grids(figure, scene)
    else:
        _draw_bars(figure, scene.bars if isinstance(scene, ModelScene) else scene)
    made = io.BytesIO()
    figure.savefig(made, format="png", dpi=_DOTS, facecolor="white")
    return made.getvalue()


def _draw_grids(figure: "Figure", scene: GridScene) -> None:
    between, margin, head = 48.0, 18.0, 34.0 + 16.0 * len(scene.lines)
    widths = [picture.width for picture in scene.pictures]
    heights = [picture.height + 24 for picture in scene.pictures]
    stacked = sum(widths) > _WIDE
    gaps = between * (len(widths) - 1)
    inner = max(widths) if stacked else sum(widths) + gaps
    width = max(inner, 7.4 * len(scene.title)) + 2 * margin
    height = (sum(heights) + gaps / 2 if stacked else max(heights)) + head + margin
    figure.set_size_inches(width / _POINTS, height / _POINTS)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    _write(axes, margin, 22, scene.title, size=12.5, weight="bold", ha="left")
    for at, line in enumerate(scene.lines):
        _write(axes, margin, 42 + 16 * at, line, size=10, color=_QUIET, ha="left")
    left, top = margin, head
    for picture in scene.pictures:
        _write(axes, left, top + 12, picture.title, color=_QUIET, ha="left")
        _picture(axes, picture, left, top + 24)
        if stacked:
            top += picture.height + 24 + between / 2
        else:
            left += picture.width + between


def _picture(axes: "Axes", picture: Picture, left: float, top: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    for box in picture.boxes:
        axes.add_patch(
            FancyBboxPatch(
                (left + box.left, top + box.top),
                box.width,
                box.height,
                boxstyle="round,pad=0,rounding_size=4",
                linewidth=0,
                facecolor=colour(box.colour),
            )
        )
        x, y = left + box.left + box.width / 2, top + box.top + box.height / 2
        y -= 8 * (len(box.lines) - 1)
        for at, text in enumerate(box.lines):
            bold = "bold" if at == 0 else "normal"
            size = 11 if at == 0 else 9
            _write(axes, x, y + 17 * at, text, size=size, weight=bold)
    anchors = {"start": "left", "middle": "center", "end": "right"}
    for label in picture.labels:
        bold = "bold" if label.strong else "normal"
        ha = anchors[label.anchor]
        _write(axes, left + label.left, top + label.top, label.text, weight=bold, ha=ha)


def _write(axes: "Axes", x: float, y: float, text: str, **more: Any) -> None:
    options = {"size": 9.5, "color": INK, "ha": "center", "va": "center", **more}
    # A `$` in a path does not start a formula.
    axes.text(x, y, text, parse_math=False, **options)


def _draw_bars(figure: "Figure", scene: BarScene) -> None:
    rows = max(1, len(scene.bars))
    head = 0.5 + 0.22 * len(scene.lines)
    foot = 0.35 + 0.27 * -(-len(scene.shades) // _COLUMNS)
    inner = rows * (0.62 if len(scene.names) > 1 else 0.40)
    height = head + inner + foot
    figure.set_size_inches(9.0, height)
    longest = max((len(bar.label) for bar in scene.bars), default=0)
    left = min(0.45, 0.03 + 0.0088 * longest)
    # Room for the label at the end of the longest bar.
    names = max(map(len, scene.names)) + 2 if len(scene.names) > 1 else 0
    right = 0.86 - 0.0098 * names
    axes = figure.add_axes((left, foot / height, right - left, inner / height))
    axes.set_xlim(0, _bars(axes, scene) or 1)
    axes.set_ylim(rows - 0.5, -0.5)
    labels = [bar.label for bar in scene.bars]
    places = range(len(labels))
    axes.set_yticks(places, labels, family="monospace", size=9, parse_math=False)
    axes.set_xticks([])
    axes.tick_params(length=0)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color("#b4b8bf")
    _bar_words(figure, scene, height)


def _bars(axes: "Axes", scene: BarScene) -> int:
    """Draw the bars; return the longest."""
    several = len(scene.names) > 1
    shifts = (-0.2, 0.2) if several else (0.0,)
    longest = 0
    for at, bar in enumerate(scene.bars):
        for (name, parts, _), shift in zip(scene.rows(bar), shifts, strict=True):
            total = sum(size for _, size in parts)
            longest = max(longest, total)
            _stack(axes, scene, parts, at + shift, 0.34 if several else 0.62)
            axes.annotate(
                human_bytes(total) + (f"  {name}" if several else ""),
                (total, at + shift),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                size=9,
                color=_QUIET if shift < 0 else INK,
                parse_math=False,
            )
    return longest


def _edge(number: int) -> str:
    return _HATCH if number == NEUTRAL else _DARK_HATCH


def _stack(
    axes: "Axes", scene: BarScene, parts: Any, at: float, thickness: float
) -> None:
    start = 0
    for shade, size in parts:
        number = scene.shades[shade].colour
        axes.barh(
            at,
            size,
            thickness,
            left=start,
            color=colour(number),
            # Hatching has the colour of the edge.
            edgecolor=_edge(number) if hatch(number) else "white",
            linewidth=0 if hatch(number) else 0.8,
            hatch=hatch(number),
        )
        start += size


def _bar_words(figure: "Figure", scene: BarScene, height: float) -> None:
    from matplotlib.patches import Patch

    words: dict[str, Any] = {"va": "center", "parse_math": False}
    y, title = 1 - 0.28 / height, scene.title
    figure.text(0.03, y, title, size=13, weight="bold", color=INK, **words)
    for at, line in enumerate(scene.lines):
        y = 1 - (0.54 + 0.22 * at) / height
        figure.text(0.03, y, line, size=10, color=_QUIET, **words)
    handles = [
        Patch(
            facecolor=colour(shade.colour),
            edgecolor=_edge(shade.colour),
            linewidth=0,
            hatch=hatch(shade.colour),
            label=shade.text,
        )
        for shade in scene.shades
    ]
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.02, 0.06 / height),
        ncols=_COLUMNS,
        frameon=False,
        fontsize=9.5,
        handlelength=1.2,
    )
