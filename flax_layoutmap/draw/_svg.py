"""Pictures of boxes as SVG: nothing but shapes, so that any page can show them."""

import html
from collections.abc import Iterator

from flax_layoutmap.draw._palette import INK, colour
from flax_layoutmap.draw._scene import Box, GridScene, Label, Picture

_FONT = "system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif"

# For more boxes than these, words would be a wall of text.
_TOLD = 64


def fragment(scene: GridScene) -> str:
    """The pictures with their words, to stand in any page; no styles, no script."""
    told = [
        f"<li>{html.escape(box.detail)}</li>"
        for picture in scene.pictures
        for box in picture.boxes
    ]
    words = ""
    if len(told) <= _TOLD:
        words = (
            f"<details><summary>In words</summary><ul>{''.join(told)}</ul></details>"
        )
    lines = "".join(f"<p>{html.escape(line)}</p>" for line in scene.lines)
    drawn = "".join(map(svg, scene.pictures))
    return (
        f'<div class="flm"><h1>{html.escape(scene.title)}</h1>{lines}'
        f'<div class="pictures">{drawn}</div>{words}</div>'
    )


def svg(picture: Picture) -> str:
    """One picture."""
    width, height = picture.width + 4, picture.height + 4
    parts = "".join((*map(_box, picture.boxes), *map(_label, picture.labels)))
    return (
        f"<figure><figcaption>{html.escape(picture.title)}</figcaption><svg "
        f'xmlns="http://www.w3.org/2000/svg" viewBox="-2 -2 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="group" '
        f'aria-label="{html.escape(picture.title)}" font-family="{_FONT}" '
        f'fill="currentColor">{parts}</svg></figure>'
    )


def _box(box: Box) -> str:
    detail = html.escape(box.detail)
    return (
        f'<g role="img" aria-label="{detail}"><title>{detail}</title>'
        f'<rect x="{box.left:g}" y="{box.top:g}" width="{box.width:g}" '
        f'height="{box.height:g}" rx="4" fill="{colour(box.colour)}"/>'
        f"{''.join(_words(box))}</g>"
    )


def _words(box: Box) -> Iterator[str]:
    middle = box.left + box.width / 2
    top = box.top + box.height / 2 - 8 * (len(box.lines) - 1)
    for at, text in enumerate(box.lines):
        size, weight = (13.5, 600) if at == 0 else (11.5, 400)
        yield (
            f'<text x="{middle:g}" y="{top + 17 * at:g}" dy="0.35em" '
            f'text-anchor="middle" font-size="{size}" font-weight="{weight}" '
            f'fill="{INK}">{html.escape(text)}</text>'
        )


def _label(label: Label) -> str:
    weight = 600 if label.strong else 400
    return (
        f'<text x="{label.left:g}" y="{label.top:g}" dy="0.35em" font-size="12" '
        f'font-weight="{weight}" text-anchor="{label.anchor}">'
        f"{html.escape(label.text)}</text>"
    )
