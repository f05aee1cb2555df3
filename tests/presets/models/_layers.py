"""What the families of encoders and of diffusion share, as `transformers` names it."""

import re

from presets.models.llama import Shapes

LAYERS, D, HEADS, HIDDEN = 2, 64, 8, 256
PATCH, PATCHES, CLASSES, VOCAB, LENGTH = 2, 4, 8, 256, 8


def dense(name: str, fan_in: int, fan_out: int, bias: bool = True) -> Shapes:
    """A linear layer, (out, in)."""
    found: Shapes = {f"{name}.weight": (fan_out, fan_in)}
    return found | {f"{name}.bias": (fan_out,)} if bias else found


def conv(
    name: str, channels: int, features: int, *sizes: int, bias: bool = True
) -> Shapes:
    """A convolution, (out, in, height, width)."""
    found: Shapes = {f"{name}.weight": (features, channels, *sizes)}
    return found | {f"{name}.bias": (features,)} if bias else found


def norm(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def heads(name: str, d: int = D) -> Shapes:
    """Flax's `MultiHeadAttention`: heads are a dim of their own."""
    found: Shapes = {}
    for role in ("query", "key", "value"):
        found[f"{name}/{role}/kernel"] = (d, HEADS, d // HEADS)
        found[f"{name}/{role}/bias"] = (HEADS, d // HEADS)
    out = {f"{name}/out/kernel": (HEADS, d // HEADS, d), f"{name}/out/bias": (d,)}
    return found | out


def flax(weights: Shapes) -> Shapes:
    """The same as modules of Flax, whose kernels are (in, out) or (h, w, in, out)."""
    found: Shapes = {}
    for name, shape in weights.items():
        stem, _, leaf = name.replace(".", "/").rpartition("/")
        if leaf != "weight":
            path = f"{stem}/{leaf}" if stem else leaf
        elif re.search(
            r"(token|position)_embedding$|embed_\w+$|embedding_table$", stem
        ):
            path = f"{stem}/embedding"
        elif len(shape) > 1:
            path, shape = f"{stem}/kernel", (*shape[2:], shape[1], shape[0])
        else:
            path = f"{stem}/scale"
        found[path] = shape
    return found


def stacked(shapes: Shapes, number: str, name: str = "") -> Shapes:
    r"""The same with the layers `number`, such as `blocks/(\d+)/`, along dim 0.

    Args:
        shapes: path → shape.
        number: matches the beginning of a layer's paths, with its number as a group.
        name: the beginning of the paths of all layers.
    """
    found: Shapes = {}
    for path, shape in shapes.items():
        layer = re.search(number, path)
        if layer is None:
            found[path] = shape
        else:
            found[path.replace(layer.group(), name)] = (LAYERS, *shape)
    return found
