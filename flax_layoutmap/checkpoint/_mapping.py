"""The entries of a mapping, and the tables that `mappings` makes them of.

An entry goes from the leaf to the tensor: `(path of the leaf, name of the tensor, steps
between them)`. A stacked leaf is one entry with many tensors, and a fused tensor is one
that several leaves name. The first entry that matches a path counts.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap._rules.records import Shape, show_shape
from flax_layoutmap._tree.paths import Leaf, unescape
from flax_layoutmap.checkpoint._leaves import compiled
from flax_layoutmap.checkpoint._safetensors import Array, assembled, nothing
from flax_layoutmap.checkpoint._steps import (
    Step,
    dequantize,
    is_scaled,
    linear,
    split,
    stack,
    transpose,
    unflatten,
)

UNMATCHED = (
    "no entry of the mapping matches (scanned=True is for stacked layers); add (path, "
    "name of the tensor), or leave it out with exclude="
)


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


@dataclasses.dataclass(frozen=True)
class Made:
    """A tensor to save, or a part of one, and the paths of the leaves that make it."""

    name: str
    dtype: Any
    values: Array
    paths: str

    @property
    def shape(self) -> Shape:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {show_shape(self.shape)} of {self.paths}"


class Draft:
    """Undoes the steps of leaves, those before a split once all parts are there."""

    def __init__(self) -> None:
        self.tensors: dict[str, Made] = {}
        self.problems: list[str] = []
        # Tensor, steps up to the split → place in the whole, part, the steps.
        self._parts: dict[Any, list[tuple[Any, Made, Sequence[Step]]]] = {}

    def add(self, made: Made, steps: Sequence[Step]) -> None:
        """Undo steps, up to a split."""
        splits = [(at, step.place) for at, step in enumerate(steps) if step.place]
        at, place_of = splits[-1] if splits else (-1, None)
        for name, values in undone(made.name, steps[at + 1 :], made.values):
            part = dataclasses.replace(made, name=name, values=values)
            if place_of is not None:
                key = (name, tuple(step.key for step in steps[:at]))
                place = place_of(values.shape)
                self._parts.setdefault(key, []).append((place, part, steps[:at]))
            elif (other := self.tensors.setdefault(name, part)) is not part:
                self.problems.append(
                    f"{other.paths}, {made.paths}: would both write the tensor "
                    f"{name!r}; give one of the leaves another name, or leave it out "
                    "with exclude="
                )

    def assemble(self) -> None:
        """Assemble all parts, those with the most steps before them first."""
        while self._parts:
            parts = self._parts.pop(max(self._parts, key=lambda key: len(key[1])))
            (shape, axis, _), first, before = parts[0]
            paths = ", ".join(dict.fromkeys(part.paths for _, part, _ in parts))
            covered = [n for place, _, _ in parts for n in range(shape[axis])[place[2]]]
            kinds = {(*place[:2], part.dtype) for place, part, _ in parts}
            if len(kinds) > 1 or sorted(covered) != [*range(shape[axis])]:
                self.problems.append(
                    f"{paths}: do not make the tensor {first.name!r} "
                    f"{show_shape(shape)}, each element once and in one dtype; the "
                    "mapping lacks a leaf, or has a part twice"
                )
                continue
            chosen = [(place[2], part.values) for place, part, _ in parts]
            values = assembled(shape, axis, chosen, first.dtype)
            self.add(dataclasses.replace(first, values=values, paths=paths), before)


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
                self._ignored += [compiled(where, name) for name in recipe.names]
            else:
                self._entries.append((compiled(where, pattern), recipe))

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

    def ignores(self, name: str) -> bool:
        return any(pattern.fullmatch(name) for pattern in self._ignored)


def _parsed(where: str, entry: Any) -> tuple[Any, Recipe]:
    is_entry = isinstance(entry, tuple | list) and len(entry) in (2, 3)
    pattern, names, steps = (*entry, ())[:3] if is_entry else (None, (), ())
    names = (names,) if isinstance(names, str) else names
    is_entry = is_entry and isinstance(names, tuple | list)
    if not is_entry or not names or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"{where} is {entry!r}; an entry is (path of a leaf, name of a tensor) or "
            "(path, name, steps), where several names are tried in turn"
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
    # Products with scales come before the other steps.
    steps = sorted(steps, key=lambda step: not is_scaled(step))
    return pattern, Recipe(tuple(names), tuple(steps))


# ------------------------------------------------------------------ tables of families

# A line of a table is `kind, path of the module, name of its tensors`; `_KINDS` has the
# leaves of a kind (those that a model lacks, such as a bias, do nothing). A line with
# `[several,choices]` stands for as many lines, `^` for each prefix of the family, and
# `a|b` for names to try in turn. After a line `at PATH NAME`, paths and names are below
# these, and a `#` in them is the number of a layer; a number at the end of that line is
# the first layer of a stack. `ignore PATTERN` is for tensors that no leaf needs.

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
    # Experts, (experts, in, out): a tensor for each; as they are.
    "experts": [("/kernel", ".weight", (linear(), stack(0, field="expert")))],
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
    # Gate and up of experts, which alternate in one tensor.
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
