"""Spellings of what the families with experts share.

Dims besides those of `_decoders`: `E` experts, `2f` gate and up side by side.
"""

import re

from presets.models import Shapes
from presets.models._decoders import HIDDEN, SIZES, Table
from presets.models._decoders import shapes as dense_shapes

EXPERTS = 8
_FEED_FORWARD = re.compile(r"mlp[./](gate|up|down|w[io])|feedforward_\w+_dense|/w_\w+$")


def attention(table: Table, attn: str = "") -> Table:
    """A spelling without its feed-forward layers.

    Args:
        table: a spelling of dense decoders.
        attn: the module of attention, where the spelling has none.
    """
    inside = re.compile(r"(layers/\{n\})/([qkvo]|[qk]_gamma)$")
    return {
        inside.sub(rf"\1/{attn}/\2", path) if attn else path: dims
        for path, dims in table.items()
        if not _FEED_FORWARD.search(path)
    }


def shapes(table: Table, **sizes: int) -> Shapes:
    """The shapes of a spelling; `{e}` in a path is the number of an expert."""
    each = {
        path.replace("{e}", str(number)): dims
        for path, dims in table.items()
        for number in range(EXPERTS if "{e}" in path else 1)
    }
    return dense_shapes(each, **{"E": EXPERTS, "2f": 2 * HIDDEN} | sizes)


def float8(table: Table, **sizes: int) -> Shapes:
    """Hugging Face's files of float8 weights: a scale for each block of 128 × 128.

    All dims are 128 times as large, so that there are as many blocks as numbers in the
    sizes. The head and `eh_proj` are not quantised.
    """
    dims = {name: 128 * size for name, size in (SIZES | sizes).items() if name != "L"}
    scaled = re.compile(r"(?<!eh)_proj(_with_mqa)?\.weight$")
    return shapes(table, **dims) | {
        f"{name}_scale_inv": shape
        for name, shape in shapes(table, **sizes).items()
        if scaled.search(name)
    }


def each_of(template: str, dims: dict[str, str]) -> Table:
    """The leaves of a module: a path with `*` for the names → their dims."""
    return {template.replace("*", name): own for name, own in dims.items()}


def in_files(prefix: str) -> Table:
    """Gate, up and down of one expert or layer in Hugging Face's files, (out, in)."""
    names = {"gate_proj": "f d", "up_proj": "f d", "down_proj": "d f"}
    return each_of(f"{prefix}.*.weight", names)


def fused(prefix: str) -> Table:
    """The experts of a layer as modules of `transformers` 5: (experts, out, in)."""
    return {f"{prefix}.gate_up_proj": "E 2f d", f"{prefix}.down_proj": "E d f"}


def stacks(template: str, gate: str, up: str, down: str) -> Table:
    """The experts of a layer in JAX: a path with `*` for the names of the arrays."""
    return each_of(template, {gate: "E d f", up: "E d f", down: "E f d"})


# The feed-forward layer of Flax's own names.
FLAX_EXPERTS = stacks("layers/{n}/mlp/experts/*/kernel", "gate", "up", "down") | {
    "layers/{n}/mlp/router/kernel": "d E"
}
