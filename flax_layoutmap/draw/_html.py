"""Scenes as self-contained HTML.

A mesh or an array is drawn as SVG, in any page; a whole model is a page with a script.
"""

import base64
import hashlib
import html
import json
import operator
import sys
from array import array
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

from flax_layoutmap.draw._scene import (
    INK,
    Box,
    Forest,
    GridScene,
    Label,
    ModelScene,
    Picture,
    colour,
)

# Height of the frame in a notebook, in points.
_FRAME = 860

_FONT = "system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif"

# The fields of a kind that the script reads, in its order.
_COLUMNS = operator.attrgetter(
    *("shape", "dtype", "shade", "rule", "shard"),
    *("total_bytes", "bytes_per_device", "mark", "explain", "outline"),
)

# The most boxes that are described in words.
_DESCRIBED = 64


# ------------------------------------------------------------------------- pages


def grid_page(title: str, body: str) -> str:
    """A page without a script around some HTML."""
    return _page("grid", title, {"body": body})


def model_page(scene: ModelScene) -> str:
    """The page of a whole model."""
    script = _file("page.js")
    more = {
        "script": script,
        "script_hash": _hash(script),
        "data": _script_json(_model_data(scene)),
    }
    return _page("page", scene.title, more)


def framed(text: str) -> str:
    """A page in a frame, for notebooks, so that their styles are separate."""
    return (
        f'<iframe sandbox="allow-scripts" srcdoc="{html.escape(text)}" '
        f'width="100%" height="{_FRAME}" style="border:0" '
        'title="flax_layoutmap"></iframe>'
    )


def _page(name: str, title: str, more: dict[str, str]) -> str:
    """A page from the template and style sheet `name`; `more` is HTML.

    Styles and scripts are allowed by their hashes, and nothing else is: a path that
    holds markup cannot run, and no address can be requested.
    """
    style = _file(f"{name}.css")
    parts = {
        **more,
        "title": html.escape(title),
        "style": style,
        "style_hash": _hash(style),
    }
    first, *pieces = _file(f"{name}.html").split("{{")
    text = [first]
    for piece in pieces:
        key, _, rest = piece.partition("}}")
        text += [parts[key], rest]
    return "".join(text)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _file(name: str) -> str:
    return resources.files("flax_layoutmap.draw").joinpath(name).read_text("utf-8")


# ----------------------------------------------- what the script of a model reads


def _script_json(data: Any) -> str:
    """JSON that can stand in a `<script>`: no tag or comment can end it."""
    text = json.dumps(data, separators=(",", ":"))
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _model_data(scene: ModelScene) -> dict[str, Any]:
    words: dict[str, int] = {}
    return {
        "mesh": scene.mesh,
        "devices": scene.devices,
        "shades": [[shade.text, shade.colour] for shade in scene.shades],
        "kinds": list(map(_COLUMNS, scene.kinds)),
        "views": [
            {
                "title": view.title,
                "leaves": view.leaves,
                "total": view.total_bytes,
                "per_device": view.bytes_per_device,
                "replicated": view.replicated_bytes,
                "folded": _packed(view.folded, words),
                "flat": None if view.flat is None else _packed(view.flat, words),
            }
            for view in scene.views
        ],
        "words": list(words),
        "remarks": scene.remarks,
    }


def _packed(forest: Forest, words: dict[str, int]) -> dict[str, str]:
    return {
        "names": _numbers([words.setdefault(n, len(words)) for n in forest.names]),
        "parents": _numbers([0, *forest.parents[1:]]),
        "kinds": _numbers([kind + 1 for kind in forest.kinds]),
        "counts": _numbers(forest.counts),
        "wide": _numbers(forest.wide),
        "tall": _numbers(forest.tall),
    }


def _numbers(values: Sequence[int]) -> str:
    """Integers as base64 of 2 or 4 bytes each, as the first letter tells."""
    is_small = max(values) <= 0xFFFF
    packed = array("H" if is_small else "I", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return f"{packed.itemsize}{base64.b64encode(packed.tobytes()).decode()}"


# --------------------------------------------------------- meshes and arrays as SVG


def fragment(scene: GridScene) -> str:
    """The pictures with their words, to stand in any page; no styles, no script."""
    described = [
        f"<li>{html.escape(box.detail)}</li>"
        for picture in scene.pictures
        for box in picture.boxes
    ]
    words = ""
    if len(described) <= _DESCRIBED:
        listed = f"<ul>{''.join(described)}</ul>"
        words = f"<details><summary>In words</summary>{listed}</details>"
    lines = "".join(f"<p>{html.escape(line)}</p>" for line in scene.lines)
    drawn = "".join(map(_svg, scene.pictures))
    return (
        f'<div class="flm"><h1>{html.escape(scene.title)}</h1>{lines}'
        f'<div class="pictures">{drawn}</div>{words}</div>'
    )


def _svg(picture: Picture) -> str:
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
