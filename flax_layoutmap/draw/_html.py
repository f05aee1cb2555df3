"""Scenes as HTML: one file that holds everything and asks nothing of the network."""

import base64
import hashlib
import html
import json
import sys
from array import array
from collections.abc import Sequence
from importlib import resources
from typing import Any

from flax_layoutmap.draw._scene import Forest, ModelScene

# In a notebook the page is shown in a frame of this height, in points.
_FRAME = 860


def model_page(scene: ModelScene) -> str:
    """The page of a whole model."""
    script = _file("page.js")
    more = {
        "script": script,
        "script_hash": _hash(script),
        "data": script_json(model_data(scene)),
    }
    return page("page", scene.title, more)


def framed(text: str) -> str:
    """A page in a frame of its own, for notebooks: their styles do not meet."""
    return (
        f'<iframe sandbox="allow-scripts" srcdoc="{html.escape(text)}" '
        f'width="100%" height="{_FRAME}" style="border:0" '
        'title="flax_layoutmap"></iframe>'
    )


def page(name: str, title: str, more: dict[str, str]) -> str:
    """A page from its template.

    Styles and scripts are allowed by their hashes, and nothing else is: a path that
    holds markup cannot run, and no address can be asked.

    Args:
        name: of the template and its style sheet.
        title: plain text.
        more: what else stands in the template, as HTML.
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


def script_json(data: Any) -> str:
    """JSON that can stand in a `<script>`: no tag or comment can end it."""
    text = json.dumps(data, separators=(",", ":"))
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def model_data(scene: ModelScene) -> dict[str, Any]:
    """What the script of the page reads; columns of numbers are packed."""
    words: dict[str, int] = {}
    return {
        "mesh": scene.mesh,
        "devices": scene.devices,
        "shades": [[shade.text, shade.colour] for shade in scene.shades],
        "kinds": [
            [
                kind.shape,
                kind.dtype,
                kind.shade,
                kind.rule,
                kind.shard,
                kind.total_bytes,
                kind.bytes_per_device,
                kind.mark,
                kind.explain,
                kind.outline,
            ]
            for kind in scene.kinds
        ],
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
    """Whole numbers as base64 of 2 or 4 bytes each, which the first letter tells."""
    is_small = max(values) <= 0xFFFF
    packed = array("H" if is_small else "I", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return f"{packed.itemsize}{base64.b64encode(packed.tobytes()).decode()}"


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _file(name: str) -> str:
    return resources.files("flax_layoutmap.draw").joinpath(name).read_text("utf-8")
