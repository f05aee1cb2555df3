"""The entries of a mapping: which tensors a leaf is made of.

An entry goes from the leaf to the tensor: `(path of the leaf, name of the tensor, steps
between them)`. A stacked leaf is one entry with many tensors, and a fused tensor is one
that several leaves name. The first entry that matches a path counts.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap._rules.records import Shape
from flax_layoutmap._tree.paths import Leaf, unescape
from flax_layoutmap.checkpoint._lazy import Array, nothing
from flax_layoutmap.checkpoint._steps import Step, is_scaled, linear


@dataclasses.dataclass(frozen=True)
class Recipe:
    names: tuple[str, ...]
    steps: tuple[Step, ...] = ()

    def shapes(self, name: str, shape: Shape) -> dict[str, Shape]:
        """Name → shape of the tensors that make a leaf; ValueError if none do."""
        shapes: dict[str, Shape] = {}
        for tensor, part in undone(name, self.steps, nothing(shape)):
            if field := re.search(r"\{\w+\}", tensor):
                raise ValueError(f"no step fills in the {field[0]} of {tensor!r}")
            if shapes.setdefault(tensor, part.shape) != part.shape:
                raise ValueError(f"{tensor!r} would need two shapes")
        return shapes

    def leaf(
        self, name: str, shape: Shape, dtype: Any, opened: Callable[[str], Array]
    ) -> Array:
        """The leaf, of the tensors that `opened` returns."""
        if not self.steps:
            return opened(name)
        *before, last = self.steps
        recipe = Recipe(self.names, tuple(before))
        parts = [
            recipe.leaf(tensor, part.shape, dtype, opened)
            for tensor, part in undone(name, [last], nothing(shape))
        ]
        return last.forward(parts, shape, dtype)

    def without_scales(self) -> "Recipe":
        """The recipe for tensors that are not in float8."""
        steps = (step for step in self.steps if step.key[0] != "float8")
        return Recipe(self.names, tuple(steps))

    def with_linear(self, **dims: int) -> "Recipe":
        steps = (linear(**dims) if s.key[0] == "linear" else s for s in self.steps)
        return Recipe(self.names, tuple(steps))


def undone(name: str, steps: Sequence[Step], leaf: Array) -> list[tuple[str, Array]]:
    """The names and values of what steps make a leaf of."""
    if not steps:
        return [(name, leaf)]
    *before, last = steps
    return [
        done
        for changed, part in last.back(leaf)
        for done in undone(changed(name), before, part)
    ]


class NameMapping:
    """The checked mapping of `restore_safetensors`; None stands for dotted paths."""

    def __init__(self, given: Sequence[Any] | None) -> None:
        self._is_given = given is not None
        self._entries: list[tuple[re.Pattern[str], Recipe]] = []
        self._ignored: list[re.Pattern[str]] = []
        for number, entry in enumerate(given or ()):
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
        if not self._is_given:
            return Recipe((".".join(map(unescape, full_path.split("/"))),))
        for text in dict.fromkeys((path, full_path)):
            for pattern, recipe in self._entries:
                if match := pattern.fullmatch(text):
                    try:
                        names = tuple(match.expand(name) for name in recipe.names)
                    except (re.error, IndexError) as error:
                        raise CheckpointError(
                            f"the entry {pattern.pattern!r} → {recipe.names}: {error}"
                        ) from error
                    return Recipe(names, recipe.steps)
        return None

    def recipe_of(self, leaf: Leaf) -> Recipe | None:
        """The recipe of a leaf, by the first of its names that has one."""
        names = zip((leaf.path, *leaf.others), leaf.names(), strict=True)
        recipes = (self.recipe(path, full_path) for path, full_path in names)
        return next((recipe for recipe in recipes if recipe is not None), None)

    def unmatched(self, path: str) -> str:
        for number, fix in (("/0", True), ("", False)):
            other = re.sub(r"\blayers(/\d+)?(?=/)", f"layers{number}", path)
            if other != path and self.recipe(other, other) is not None:
                return (
                    f"no entry of the mapping matches, but one would match {other}; "
                    f"pass scanned={fix} to the function that makes the mapping"
                )
        return (
            "no entry of the mapping matches; add (path, name of the tensor), or leave "
            "it out with exclude="
        )

    def ignores(self, name: str) -> bool:
        return any(pattern.fullmatch(name) for pattern in self._ignored)


def _parsed(where: str, entry: Any) -> tuple[Any, Recipe]:
    if not isinstance(entry, tuple | list) or len(entry) not in (2, 3):
        raise CheckpointError(
            f"{where} is {entry!r}; an entry is (path of a leaf, name of a tensor) or "
            "(path, name, steps)"
        )
    pattern, names, steps = (*entry, ())[:3]
    names = (names,) if isinstance(names, str) else tuple(names)
    if not names or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"{where}: {names!r} is not the name of a tensor, nor several to try"
        )
    steps = tuple(steps) if isinstance(steps, tuple | list) else (steps,)
    for step in steps:
        if not isinstance(step, Step):
            raise CheckpointError(
                f"{where}: {step!r} is not a step; take transpose(), linear(), "
                "unflatten(), stack(), merge(…), split(…) or dequantize()"
            )
        if step.field and any(f"{{{step.field}}}" not in name for name in names):
            raise CheckpointError(
                f"{where}: {names} have no {{{step.field}}} to fill in"
            )
    return pattern, Recipe(names, tuple(sorted(steps, key=lambda s: not is_scaled(s))))


def _compiled(where: str, pattern: Any) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise CheckpointError(
            f"{where}: {pattern!r} is not a regular expression: {error}"
        ) from error
