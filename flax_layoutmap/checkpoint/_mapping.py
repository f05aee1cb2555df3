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
    Linear,
    Mxfp4,
    Stack,
    filled,
)

_FIELD = re.compile(r"\{\w+\}")
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
    dequantize: Dequantize | Mxfp4 | None = None

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

    def with_linear(self, shape: Shape) -> Iterable[tuple[str, "Recipe"]]:
        """The recipe with other arguments of `linear`, and how these are written."""
        for kind in ("outputs", "inputs"):
            for count in range(1, len(shape)):
                step = Linear(**{f"{kind[:-1]}_dims": count})
                steps = (step if isinstance(s, Linear) else s for s in self.steps)
                changed = dataclasses.replace(self, steps=tuple(steps))
                yield f"linear({kind}={count})", changed


def _collect(
    name: str, steps: Sequence[Any], shape: Shape, found: dict[str, Shape]
) -> None:
    if steps:
        for fields, inner in steps[-1].inputs(shape):
            _collect(filled(name, fields), steps[:-1], inner, found)
        return
    open_field = _FIELD.search(name)
    if open_field is not None:
        raise ValueError(
            f"no step fills in the {open_field[0]} of {name!r}; stack fills in "
            "{layer}, merge {part}"
        )
    if found.setdefault(name, shape) != shape:
        raise ValueError(f"{name!r} would need two shapes, {found[name]}, {shape}")


def _made(
    name: str,
    steps: Sequence[Any],
    shape: Shape,
    dtype: Any,
    opened: Callable[[str], Array],
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
            pattern, recipe = _parsed(f"mapping[{number}]", entry)
            if pattern is None:
                names = (_compiled(f"mapping[{number}]", n) for n in recipe.names)
                self._ignored += names
            else:
                self._entries.append((pattern, recipe))

    def recipe(self, path: str, full_path: str) -> Recipe | None:
        """The recipe of a leaf, by the first entry that matches, or None.

        The entries are tried on the path within the model, then on the full path.
        """
        if self._entries is None:
            parts = map(unescape, full_path.split("/"))
            return Recipe((".".join(parts),))
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


def _parsed(where: str, entry: Any) -> tuple[re.Pattern[str] | None, Recipe]:
    if not isinstance(entry, tuple | list) or len(entry) not in (2, 3):
        raise CheckpointError(
            f"{where} is {entry!r}; an entry is (path of a leaf, name of a tensor) or "
            "(path, name, steps)"
        )
    pattern, names, steps = (*entry, ())[:3]
    several = (names,) if isinstance(names, str) else names
    if (
        not isinstance(several, tuple | list)
        or not several
        or not all(isinstance(name, str) for name in several)
    ):
        raise CheckpointError(
            f"{where}: {names!r} is not the name of a tensor, nor several to try"
        )
    steps = tuple(steps) if isinstance(steps, tuple | list) else (steps,)
    recipe = Recipe(tuple(several))
    for step in steps:
        if not isinstance(step, STEPS):
            raise CheckpointError(
                f"{where}: {step!r} is not a step; take transpose(), linear(), "
                "rearrange(…), unflatten(), stack(), merge(…), split(…), cast(…) or "
                "dequantize()"
            )
        if isinstance(step, Stack) and any(
            f"{{{step.field}}}" not in n for n in several
        ):
            raise CheckpointError(
                f"{where}: {several} have no {{{step.field}}} for stack to fill in"
            )
        if isinstance(step, Cast):
            recipe = dataclasses.replace(recipe, dtype=step.dtype)
        elif isinstance(step, Dequantize | Mxfp4):
            recipe = dataclasses.replace(recipe, dequantize=step)
        else:
            recipe = dataclasses.replace(recipe, steps=(*recipe.steps, step))
    return None if pattern is None else _compiled(where, pattern), recipe


def _compiled(where: str, pattern: Any) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        raise CheckpointError(
            f"{where}: {pattern!r} is not a regular expression: {error}"
        ) from error
