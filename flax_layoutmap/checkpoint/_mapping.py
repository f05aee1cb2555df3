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
from typing import Any

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap._rules.records import Shape
from flax_layoutmap._tree.paths import unescape
from flax_layoutmap.checkpoint._mapping_blocks import Block, whole
from flax_layoutmap.checkpoint._mapping_patterns import Pattern
from flax_layoutmap.checkpoint._mapping_steps import STEPS, Cast, Stack, Step

_FIELD = re.compile(r"\{\w+\}")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a leaf is made of tensors.

    Attributes:
        blocks: the position of each element.
        shapes: name of each tensor → the shape that it must have.
        dtype: what the tensors are cast to; None to take them as they are.
    """

    blocks: tuple[Block, ...]
    shapes: dict[str, Shape]
    dtype: Any = None

    @property
    def order(self) -> tuple[int, ...]:
        """The dims of the leaf in the order of the file, outermost first."""
        if not self.blocks:
            return ()
        dims = self.blocks[0].dims
        steps = [max((s for _, s in dim), default=math.inf) for dim in dims]
        return tuple(sorted(range(len(dims)), key=lambda dim: -steps[dim]))


@dataclasses.dataclass(frozen=True)
class Source:
    """An entry of a mapping, for one leaf.

    Attributes:
        names: names of the tensor, of which the first is used that is there.
        steps: what to do with it.
    """

    names: tuple[str, ...]
    steps: tuple[Step, ...] = ()

    def recipes(self, shape: Shape) -> list[Recipe]:
        """How to make a leaf of this shape, for each name.

        Raises:
            ValueError: the steps do not make such a shape.
        """
        cast = [step.dtype for step in self.steps if isinstance(step, Cast)]
        found = []
        for name in self.names:
            shapes: dict[str, Shape] = {}
            blocks = tuple(_blocks(name, self.steps, shape, shapes))
            found.append(Recipe(blocks, shapes, cast[-1] if cast else None))
        return found


def _blocks(
    name: str, steps: tuple[Step, ...], shape: Shape, shapes: dict[str, Shape]
) -> Iterable[Block]:
    """The blocks of a leaf; fills in `shapes`, the shapes of its tensors."""
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
                    f"{name!r} has no {{{field}}}, by which the tensors differ"
                )
            filled = filled.replace(f"{{{field}}}", value)
        for block in _blocks(filled, tuple(before), inner, shapes):
            yield from last.place(block, at, shape)


# -------------------------------------------------------------------- the entries


@dataclasses.dataclass(frozen=True)
class _Entry:
    pattern: Pattern | None
    names: tuple[str, ...]
    steps: tuple[Step, ...]


class NameMapping:
    """The entries of a mapping, checked.

    Args:
        given: `(pattern, name)` or `(pattern, name, steps)` each; see
            `restore_safetensors`. None: the path with dots is the name.

    Raises:
        CheckpointError: an entry is none.
    """

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
        """The source of a leaf, by the first entry that matches.

        Args:
            path: its path, as rules see it.
            full_path: its path in the whole tree.

        Raises:
            CheckpointError: the entry's name refers to a group that there is not.
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

    def ignores(self, name: str) -> bool:
        """Whether an entry says that no leaf needs this tensor."""
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
                "rearrange(…), unflatten(), stack(), merge(…), split(…) or cast(…)"
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
