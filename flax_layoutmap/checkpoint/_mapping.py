"""The entries of a mapping: which tensors a leaf is made of.

An entry goes from the leaf to the tensor: `(path of the leaf, name of the tensor, what
to do with it)`. This is the direction of lookup: each leaf must have an
entry, a stacked leaf is one entry with many tensors, and a fused tensor is one that
several leaves name. Paths and patterns are those of layout maps.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap._rules.pattern_cost import QUICKER, USUAL_PATH, slow_because
from flax_layoutmap._rules.records import Shape
from flax_layoutmap._tree.paths import unescape
from flax_layoutmap.checkpoint._leaves import is_floating
from flax_layoutmap.checkpoint._mapping_blocks import Block, whole
from flax_layoutmap.checkpoint._mapping_steps import (
    MXFP4_BLOCK,
    STEPS,
    Cast,
    Dequantize,
    Mxfp4,
    Stack,
    Step,
)

_FIELD = re.compile(r"\{\w+\}")
# Layers that are stacked in one leaf, and those of a list.
_STACKED, _NUMBERED = re.compile(r"\blayers/(?!\d)"), re.compile(r"\blayers/\d+/")


class Scaled(NamedTuple):
    """The scales of a tensor: their name and shape, and the step that needs them."""

    name: str
    shape: Shape
    step: Dequantize | Mxfp4


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to make a leaf of tensors.

    `shapes` has the required shape of each tensor, `dtype` what they are cast to (None:
    not at all), and `dequantize` the step for those in float8 or MXFP4.
    """

    blocks: tuple[Block, ...]
    shapes: dict[str, Shape]
    dtype: Any = None
    dequantize: Dequantize | Mxfp4 | None = None

    def scales(self, tensor: str, dtype: Any) -> Scaled | None:
        """The scales of a tensor that is stored in a dtype; None without any."""
        step, shape = self.dequantize, self.shapes[tensor]
        if isinstance(step, Mxfp4):
            return Scaled(step.scales_name(tensor), step.scales_shape(shape), step)
        if step is None or dtype.itemsize > 1 or not is_floating(dtype):
            return None
        return Scaled(tensor + step.suffix, step.scales_shape(shape), step)

    def stored(self, tensor: str, dtype: Any) -> dict[str, Shape]:
        """Name → shape in the files, of a tensor in this dtype and of its scales."""
        scaled = self.scales(tensor, dtype)
        if scaled is None:
            return {tensor: self.shapes[tensor]}
        is_packed = isinstance(scaled.step, Mxfp4)
        shape = (*scaled.shape, MXFP4_BLOCK // 2) if is_packed else self.shapes[tensor]
        return {tensor: shape, scaled.name: scaled.shape}

    @property
    def order(self) -> tuple[int, ...]:
        """The dims of the leaf in file order, outermost first."""
        if not self.blocks:
            return ()
        dims = self.blocks[0].dims
        steps = [max((s for _, s in dim), default=math.inf) for dim in dims]
        return tuple(sorted(range(len(dims)), key=lambda dim: -steps[dim]))


@dataclasses.dataclass(frozen=True)
class Source:
    """Names of the tensor, of which the first that exists is used, and the steps."""

    names: tuple[str, ...]
    steps: tuple[Step, ...] = ()

    def recipes(self, shape: Shape) -> list[Recipe]:
        """The recipe for each name; a ValueError if the steps cannot make the shape."""
        dtype, dequantize = None, None
        for step in self.steps:
            dtype = step.dtype if isinstance(step, Cast) else dtype
            dequantize = step if isinstance(step, Dequantize | Mxfp4) else dequantize
        found = []
        for name in self.names:
            shapes: dict[str, Shape] = {}
            blocks = tuple(_blocks(name, self.steps, shape, shapes))
            if dequantize is not None:
                for own in shapes.values():
                    dequantize.scales_shape(own)  # raises for those that have none
            if isinstance(dequantize, Dequantize):
                _check_matrices(blocks, shapes)
            found.append(Recipe(blocks, shapes, dtype, dequantize))
        return found


def _check_matrices(blocks: Iterable[Block], shapes: Mapping[str, Shape]) -> None:
    """Raise ValueError where a dim of the leaf runs over both dims of a tensor."""
    for block in blocks:
        columns = shapes[block.tensor][1]
        factors = (factor for dim in block.dims for factor in dim)
        if any(step % columns and size * step > columns for size, step in factors):
            raise ValueError(
                "dequantize needs the rows and the columns of a tensor in dims of "
                "their own"
            )


def _blocks(
    name: str, steps: tuple[Step, ...], shape: Shape, shapes: dict[str, Shape]
) -> Iterable[Block]:
    """The blocks of a leaf; adds the shapes of its tensors to `shapes`."""
    if not steps:
        open_field = _FIELD.search(name)
        if open_field is not None:
            raise ValueError(
                f"no step fills in the {open_field[0]} of {name!r}; stack fills in "
                "{layer}, merge {part}"
            )
        if shapes.setdefault(name, shape) != shape:
            raise ValueError(f"{name!r} would need two shapes, {shapes[name]}, {shape}")
        yield whole(name, shape)
        return
    *before, last = steps
    for at, (fields, inner) in enumerate(last.inputs(shape)):
        filled = name
        for field, value in fields.items():
            if f"{{{field}}}" not in name:
                raise ValueError(
                    f"{name!r} has no {{{field}}} to tell the tensors apart"
                )
            filled = filled.replace(f"{{{field}}}", value)
        for block in _blocks(filled, tuple(before), inner, shapes):
            yield from last.place(block, at, shape)


# -------------------------------------------------------------------- the entries


class Pattern:
    """A regular expression matched against whole texts, with bounded time.

    Backtracking of `re` cannot be interrupted, so a pattern that could take too many
    steps is refused, as in a rule file. `owner` names it in messages.
    """

    def __init__(self, pattern: Any, owner: str) -> None:
        self._owner = owner
        try:
            self._pattern = re.compile(pattern)
        except (re.error, TypeError, RecursionError, OverflowError) as error:
            raise CheckpointError(
                f"{owner}: {pattern!r} is no regular expression: {error}"
            ) from error
        if self._pattern.flags & re.VERBOSE:
            raise CheckpointError(
                f"{owner}: {self} has the flag x (verbose), with which its time cannot "
                "be bounded; write it without comments"
            )
        self._check(USUAL_PATH)

    def __str__(self) -> str:
        return repr(self._pattern.pattern)

    def fullmatch(self, text: str) -> re.Match[str] | None:
        """Match the whole text."""
        if len(text) > USUAL_PATH:
            self._check(1 << len(text).bit_length())
        return self._pattern.fullmatch(text)

    def _check(self, length: int) -> None:
        """Raise if a text of this length could take too long."""
        pattern = str(self._pattern.pattern)
        if self._pattern.flags & re.IGNORECASE and "(?i" not in pattern:
            pattern = f"(?i:{pattern})"  # compiled with a flag that it does not name
        slow = slow_because(pattern, length)
        if slow is not None:
            raise CheckpointError(
                f"{self._owner}: matching {self} could take very long: {slow}; "
                f"{QUICKER}"
            )


@dataclasses.dataclass(frozen=True)
class _Entry:
    pattern: Pattern | None
    names: tuple[str, ...]
    steps: tuple[Step, ...]


class NameMapping:
    """The checked mapping of `restore_safetensors`; None stands for dotted paths."""

    def __init__(self, given: Sequence[Any] | None) -> None:
        self._entries: list[_Entry] | None = None
        self._ignored: list[Pattern] = []
        if given is None:
            return
        if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
            raise CheckpointError(
                f"mapping={given!r} is no list of entries (path of a leaf, name of a "
                "tensor, steps)"
            )
        self._entries = []
        for number, entry in enumerate(given):
            found = _entry(number, entry)
            if found.pattern is None:
                self._ignored += [
                    Pattern(name, f"mapping[{number}]") for name in found.names
                ]
            else:
                self._entries.append(found)

    def source(self, path: str, full_path: str) -> Source | None:
        """The source of a leaf, by the first entry that matches, or None.

        The entries are tried on the path within the model, then on the full path.
        """
        if self._entries is None:
            return Source((".".join(unescape(part) for part in full_path.split("/")),))
        for text in dict.fromkeys((path, full_path)):
            for entry in self._entries:
                assert entry.pattern is not None
                match = entry.pattern.fullmatch(text)
                if match is None:
                    continue
                try:
                    names = tuple(match.expand(name) for name in entry.names)
                except (re.error, IndexError) as error:
                    raise CheckpointError(
                        f"the entry {entry.pattern} → {entry.names}: {error}"
                    ) from error
                return Source(names, entry.steps)
        return None

    def unmatched(self, path: str) -> str:
        """The message that no entry matches a leaf."""
        numbered = _STACKED.sub("layers/0/", path)
        stacked = _NUMBERED.sub("layers/", path)
        for other, fix in ((numbered, "scanned=True"), (stacked, "scanned=False")):
            if other != path and self.source(other, other) is not None:
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


def _entry(number: int, entry: Any) -> _Entry:
    """Check one entry."""
    if not isinstance(entry, tuple | list) or len(entry) not in (2, 3):
        raise CheckpointError(
            f"mapping[{number}] is {entry!r}; an entry is (path of a leaf, name of a "
            "tensor) or (path, name, steps)"
        )
    pattern, names, *rest = entry
    several = (names,) if isinstance(names, str) else tuple(names)
    if not several or not all(isinstance(name, str) for name in several):
        raise CheckpointError(
            f"mapping[{number}]: {names!r} is no name of a tensor, nor several to try"
        )
    steps = rest[0] if rest else ()
    steps = tuple(steps) if isinstance(steps, tuple | list) else (steps,)
    for step in steps:
        if not isinstance(step, STEPS):
            raise CheckpointError(
                f"mapping[{number}]: {step!r} is no step; take transpose(), linear(), "
                "rearrange(…), unflatten(), stack(), merge(…), split(…), cast(…) or "
                "dequantize()"
            )
    if pattern is None:
        return _Entry(None, several, ())
    fields = {step.field for step in steps if isinstance(step, Stack)}
    for field in fields:
        if any(f"{{{field}}}" not in name for name in several):
            raise CheckpointError(
                f"mapping[{number}]: {several} have no {{{field}}} for stack to fill in"
            )
    return _Entry(Pattern(pattern, f"mapping[{number}]"), several, steps)
