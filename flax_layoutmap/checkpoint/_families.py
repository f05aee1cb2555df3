"""Reads the tables of `mappings`: modules, their tensors, and the steps between them.

A line of a table is `kind, path of the module, name of its tensors`; `_KINDS` has the
leaves of a kind (those that a model lacks, such as a bias, do nothing). A line with
`[several,choices]` stands for as many lines, `^` for each prefix of the family, and
`a|b` for names to try in turn. After a line `at PATH NAME`, paths and names are below
these, and a `#` in them is the number of a layer; a number at the end of that line is
the first layer of a stack. `ignore PATTERN` is for tensors that no leaf needs.
"""

import re
from collections.abc import Iterator
from typing import Any

from flax_layoutmap.checkpoint._steps import (
    dequantize,
    linear,
    split,
    stack,
    transpose,
    unflatten,
)

Entry = tuple[Any, ...]

# Kind → end of the path, end of the name, steps.
_BIAS = ("/bias", ".bias", ())
_KINDS: dict[str, list[tuple[str, str, tuple[Any, ...]]]] = {
    "leaf": [("", "", ())],
    "embed": [("/embedding", ".weight", ())],
    "norm": [("/scale", ".weight", ()), _BIAS],
    "head": [("/kernel", ".weight", (linear(),))],
    "router": [("/kernel", ".weight", (linear(),)), _BIAS],
    "dense": [("/kernel", ".weight", (linear(),)), _BIAS],
    # Heads may be dims of their own.
    "heads": [("/kernel", ".weight", (linear(),)), ("/bias", ".bias", (unflatten(),))],
    "out": [("/kernel", ".weight", (linear(outputs=1),)), _BIAS],
    # Kernels that are (in, out) in the file, too.
    "plain": [("/kernel", ".weight", ()), _BIAS],
    "plain_out": [("/kernel", ".weight", (transpose(), linear(outputs=1))), _BIAS],
    "conv1d": [("/kernel", ".weight", (transpose(2, 1, 0),)), _BIAS],
    "conv2d": [("/kernel", ".weight", (transpose(2, 3, 1, 0),)), _BIAS],
    # Experts, (experts, in, out): a tensor for each; (experts, out, in); as they are.
    "experts": [("/kernel", ".weight", (linear(), stack(0, field="expert")))],
    "turned": [("/kernel", "", (transpose(0, 2, 1),))],
    "flat": [("/kernel", "", ()), ("/bias", "_bias", ())],
    "mxfp4": [
        ("/kernel", "_blocks", (dequantize("mxfp4"), transpose(0, 2, 1))),
        ("/bias", "_bias", ()),
    ],
}
for at in range(3):
    # A third of GPT-2's attention.
    _KINDS[f"third{at}"] = [
        ("/kernel", ".weight", (split(1, at, 3), transpose(), linear())),
        ("/bias", ".bias", (split(0, at, 3), unflatten())),
    ]
for at in range(2):
    # Gate and up of experts in one tensor: one after the other, or alternating.
    _KINDS[f"half{at}"] = [("/kernel", "", (split(1, at, 2), transpose(0, 2, 1)))]
    for kind in ("flat", "mxfp4"):
        (leaf, name, steps), (bias, bias_name, _) = _KINDS[kind]
        _KINDS[f"{kind}{at}"] = [
            (leaf, name, (*steps, split(2, at, 2, alternating=True))),
            (bias, bias_name, (split(1, at, 2, alternating=True),)),
        ]


def entries(
    table: str,
    scanned: bool,
    prefixes: tuple[str, ...] = ("model.",),
    float8: bool = False,
) -> list[Entry]:
    """The entries of a table; `scanned`: layers are stacked along dim 0.

    `float8`: kernels of the layers are multiplied by their scales, where they have any.
    """
    made: list[Entry] = []
    path, name, stacked = "", "", stack()
    for kind, *words in _lines(table):
        if kind == "ignore":
            made.append((None, *words))
        elif kind == "at":
            path, name, *start = f"{words[0]}/", f"{words[1]}.", *words[2:]
            stacked = stack(start=int(*start))
        else:
            for leaf, tensor, steps in _KINDS[kind]:
                if float8 and leaf == "/kernel" and kind not in ("head", "router"):
                    steps = (dequantize(), *steps)
                names = _names(name + words[1], tensor, prefixes)
                made.append(
                    _entry(path + words[0] + leaf, names, steps, scanned and stacked)
                )
    return made


def _names(text: str, tensor: str, prefixes: tuple[str, ...]) -> list[str]:
    return [
        f"{name.replace('^', prefix)}{tensor}"
        for name in text.split("|")
        for prefix in (prefixes if "^" in name else ("",))
    ]


def _entry(path: str, names: list[str], steps: tuple[Any, ...], stacked: Any) -> Entry:
    """An entry with the numbers of layers, which are groups of the path or a stack."""
    number = r"\1"
    if stacked and "#" in path:
        path, number, steps = path.replace("/#", ""), "{layer}", (*steps, stacked)
    names = [name.replace("#", number) for name in names]
    return path.replace("#", r"(\d+)"), tuple(names), steps


def _lines(table: str) -> Iterator[list[str]]:
    """The words of each line, for each of its choices."""
    for line in filter(str.strip, table.splitlines()):
        choices = [part.split(",") for part in re.findall(r"\[([\w,]+)\]", line)]
        for chosen in zip(*choices, strict=True) if choices else [()]:
            words = iter(chosen)
            yield re.sub(r"\[[\w,]+\]", lambda _, it=words: next(it), line).split()
