"""What a collective is for: the leaf that it moves or sums, the line it comes from."""

import collections
import dataclasses
import functools
import re
from collections.abc import Collection, Mapping, Sequence

from flax_layoutmap.pod._hlo_frames import Frames
from flax_layoutmap.pod._hlo_origin import Call, origin
from flax_layoutmap.pod._hlo_results import results_of
from flax_layoutmap.pod._hlo_text import Instruction, Module

_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


class Whence:
    """Paths and lines of the collectives of one program."""

    def __init__(
        self,
        module: Module,
        text: str,
        paths: Sequence[str],
        results: Mapping[int, str],
        parameters: Collection[int],
    ) -> None:
        self.module = module
        self.frames = Frames(text)
        self.paths = paths
        self.results = results
        self.summed = results_of(module, list(results), parameters)

    def __call__(
        self, home: str, own: Instruction, calls: Sequence[Call]
    ) -> tuple[list[tuple[str, ...]], str | None]:
        """The leaf that each operand is, or those that it becomes; and the line."""
        paths: list[tuple[str, ...]] = []
        attributes = [own.attributes]
        to = self.summed.get((home, own.name), {})
        for place, operand in enumerate(own.operands or ("",)):
            one = dataclasses.replace(own, operands=(operand,))
            came = origin(self.module, home, one, calls)
            attributes += came.attributes
            at = came.argument
            if at is None and len(own.operands) == 1:
                name = _OP_NAME.search(own.attributes)
                at = None if name is None else self.arguments.get(name[1])
            if at is not None and at < len(self.paths):
                paths.append((self.paths[at],))
            else:
                into = [self.results[result] for result in to.get(place, ())]
                paths.append(tuple(dict.fromkeys(into)))
        found = (self.frames.source(text) for text in attributes)
        return paths, next((source for source in found if source is not None), None)

    @functools.cached_property
    def arguments(self) -> dict[str, int]:
        """What the program calls an argument → its position, where one has the name."""
        found: dict[str, list[int]] = collections.defaultdict(list)
        entry = self.module.entry or ""
        for line in self.module.computations.get(entry, []):
            number = self.module.parameter_number(entry, line.name or "")
            name = _OP_NAME.search(line.text)
            if number is not None and name is not None:
                found[name[1]].append(number)
        return {name: at[0] for name, at in found.items() if len(at) == 1}
