"""The entries of a mapping: which tensors a leaf is made of.

An entry goes from the leaf to the tensor: `(path of the leaf, name of the tensor, steps
between them)`. A stacked leaf is one entry with many tensors, and a fused tensor is one
that several leaves name. The first entry that matches a path counts.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap._rules.records import Shape
from flax_layoutmap._tree.paths import unescape
from flax_layoutmap.checkpoint._lazy import Array
from flax_layoutmap.checkpoint._steps import (
    STEPS,
    Cast,
    Dequantize,
    Merge,
    filled,
    linear,
)

# Layers that are stacked in one leaf, and those of a list.
_STACKED, _NUMBERED = re.compile(r"\blayers/(?!\d)"), re.compile(r"\blayers/\d+/")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to make a leaf: names to try for its tensor, and the steps.

    `dtype` is what the tensors are cast to (None: not at all), and `dequantize` the
    step for those in float8 or MXFP4.
    """

    names: tuple[str, ...]
    steps: tuple[Any, ...] = ()
    dtype: Any = None
    dequantize: Dequantize | None = None

    def tensors(self, name: str, shape: Shape) -> dict[str, Shape]:
        """Name → shape of the tensors that make a leaf; ValueError if none do."""
        found: dict[str, Shape] = {}
        _collect(name, self.steps, shape, found)
        if self.dequantize is not None:
            for tensor, size in found.items():
                self.dequantize.scales(tensor, size)
        return found

    def leaf(
        self, name: str, shape: Shape, dtype: Any, opened: Callable[[str], Array]
    ) -> Array:
        """The leaf, of the tensors that `opened` returns."""
        return _made(name, self.steps, shape, dtype, opened)

    def with_linear(self, **dims: int) -> "Recipe":
        """The recipe with other arguments of `linear`."""
        is_linear = [getattr(step, "key", "")[:1] == ("linear",) for step in self.steps]
        pairs = zip(self.steps, is_linear, strict=True)
        steps = tuple(linear(**dims) if found else step for step, found in pairs)
        return dataclasses.replace(self, steps=steps)


def _collect(
    name: str, steps: Sequence[Any], shape: Shape, found: dict[str, Shape]
) -> None:
    if steps:
        for fields, inner in steps[-1].inputs(shape):
            _collect(filled(name, fields), steps[:-1], inner, found)
        return
    field = re.search(r"\{\w+\}", name)
    if field is not None:
        raise ValueError(
            f"no step fills in the {field[0]} of {name!r}; stack fills in {{layer}}, "
            "merge {part}"
        )
    if found.setdefault(name, shape) != shape:
        raise ValueError(f"{name!r} would need two shapes, {found[name]}, {shape}")


def _made(
    name: str, steps: Sequence[Any], shape: Shape, dtype: Any, opened: Any
) -> Array:
    if not steps:
        return opened(name)
    *before, last = steps
    parts = [
        _made(filled(name, fields), before, inner, dtype, opened)
        for fields, inner in last.inputs(shape)
    ]
    return last.forward(parts, shape, dtype)


class NameMapping:
    """The checked mapping of `restore_safetensors`; None stands for dotted paths."""

    def __init__(self, given: Sequence[Any] | None) -> None:
        self._entries: list[tuple[re.Pattern[str], Recipe]] | None = None
        self._ignored: list[re.Pattern[str]] = []
        if given is None:
            return
        if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
            raise CheckpointError(
                f"mapping={given!r} is not a list of entries (path of a leaf, name of "
                "a tensor, steps)"
            )
        self._entries = []
        for number, entry in enumerate(given):
            where = f"mapping[{number}]"
            pattern, recipe = _parsed(where, entry)
            if pattern is None:
                self._ignored += [_compiled(where, name) for name in recipe.names]
            else:
                self._entries.append((_compiled(where, pattern), recipe))

    def recipe(self, path: str, full_path: str) -> Recipe | None:
        """The recipe of a leaf, by the first entry that matches, or None.

        The entries are tried on the path within the model, then on the full path.
        """
        if self._entries is None:
            return Recipe((".".join(map(unescape, full_path.split("/"))),))
        for text in dict.fromkeys((path, full_path)):
            for pattern, recipe in self._entries:
                match = pattern.fullmatch(text)
                if match is None:
                    continue
                try:
                    names = tuple(match.expand(name) for name in recipe.names)
                except (re.error, IndexError) as error:
                    raise CheckpointError(
                        f"the entry {pattern.pattern!r} → {recipe.names}: {error}"
                    ) from error
                return dataclasses.replace(recipe, names=names)
        return None

    def unmatched(self, path: str) -> str:
        """The message that no entry matches a leaf."""
        numbered = _STACKED.sub("layers/0/", path)
        stacked = _NUMBERED.sub("layers/", path)
        for other, fix in ((numbered, "scanned=True"), (stacked, "scanned=False")):
            if other != path and self.recipe(other, other) is not None:
                return (
                    f"no entry of the mapping matches, but one would match {other}; "
                    f"pass {fix} to the function that makes the mapping"
                )
        return (
            "no entry of the mapping matches; add (path, name of the tensor), or leave "
            "it out with exclude="
        )

    def ignores(self, name: str) -> bool:
        """Whether an entry lists this tensor as unused."""
        return any(pattern.fullmatch(name) for pattern in self._ignored)


def _parsed(where: str, entry: Any) -> tuple[Any, Recipe]:
    """The pattern of an entry, and its names and steps."""
    if not isinstance(entry, tuple | list) or len(entry) not in (2, 3):
        raise CheckpointError(
            f"{where} is {entry!r}; an entry is (path of a leaf, name of a tensor) or "
            "(path, name, steps)"
        )
    pattern, names, steps = (*entry, ())[:3]
    several = (names,) if isinstance(names, str) else tuple(names)
    if not several or not all(isinstance(name, str) for name in several):
        raise CheckpointError(
            f"{where}: {names!r} is not the name of a tensor, nor several to try"
        )
    steps = tuple(steps) if isinstance(steps, tuple | list) else (steps,)
    kept: list[Any] = []
    dtype, dequantize = None, None
    for step in steps:
        if not isinstance(step, STEPS):
            raise CheckpointError(
                f"{where}: {step!r} is not a step; take transpose(), linear(), "
                "rearrange(…), unflatten(), stack(), merge(…), split(…), cast(…) or "
                "dequantize()"
            )
        if isinstance(step, Cast):
            dtype = step.dtype
        elif isinstance(step, Dequantize):
            dequantize = step
        else:
            kept.append(step)
        field = f"{{{step.field}}}" if isinstance(step, Merge) else ""
        if any(field not in name for name in several):
            raise CheckpointError(f"{where}: {several} have no {field} to fill in")
    return pattern, Recipe(several, tuple(kept), dtype, dequantize)


def _compiled(where: str, pattern: Any) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        raise CheckpointError(
            f"{where}: {pattern!r} is not a regular expression: {error}"
        ) from error
