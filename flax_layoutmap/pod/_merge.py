"""Collectives of a partitioned program, merged as XLA does it on every accelerator.

The partitioner makes a collective for each operation that needs one. What the compiler
does with these afterwards is little, and is done here to the text: equal operations
become one; a sum of all-reduces is one all-reduce of a sum; an all-reduce of which
every device keeps its slice is a reduce-scatter; and what TPUs multiply in bfloat16
they move and sum in bfloat16.
"""

import collections
import math
import re
from collections.abc import Callable, Iterator

import numpy as np

from flax_layoutmap.pod._after_loops import sum_after_loops
from flax_layoutmap.pod._hlo_groups import groups_of
from flax_layoutmap.pod._hlo_text import (
    Array,
    Instruction,
    Line,
    Module,
    read_line,
    split,
)

# Whether a sum is made by a reduce-scatter: a device's part, the dim that is cut, bytes
# of an element, how many devices sum, and what the sum is of, as JAX names it.
Scatters = Callable[[tuple[int, ...], int, int, int, str], bool]

FAR = 100
_PASSED = frozenset(("convert", "reshape", "transpose", "copy", "bitcast"))
_TURNED = frozenset(("transpose", "reverse", "copy", "bitcast", "reshape"))
_SLICES = frozenset(("slice", "dynamic-slice"))
# Of these, each element of the result is one that was given.
_PICKED = frozenset(("concatenate", "pad", "select", "maximum", "minimum"))
_SUMS = frozenset(("add", "subtract"))
_COPIES_OF_ONE = _TURNED | _SLICES | {"convert", "broadcast"}
_MOVES = frozenset(("all-gather", "all-to-all", "collective-permute"))
# One after the other, over several axes, these are one over all of them.
_AT_ONCE = frozenset(("all-gather", "all-reduce"))
_PRODUCTS = frozenset(("dot", "convolution"))
# Two of these are two, though they look the same.
_APART = frozenset(("parameter", "send", "recv", "infeed", "outfeed", "custom-call"))
_UNLIKE = re.compile(
    r", (?:channel_id=\d+|metadata=\{[^{}]*\}|frontend_attributes=\{[^{}]*\})"
)
_APPLIED = re.compile(r"to_apply=%([\w.\-]+)")
_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")
_NAME = re.compile(r'op_name="([^"]*)"')
_GROUPS = re.compile(r"replica_groups=.*?(?=, [a-z_]+=)")


def merge(
    text: str, scatters: Scatters | None = None, *, for_tpus: bool = False
) -> str:
    """The program with fewer collectives, for the reader of programs alone.

    Args:
        text: a program as the partitioner gives it.
        scatters: which sums are made by a reduce-scatter; None for all that can be.
        for_tpus: whether the rules of the compiler for TPUs hold: matrix products take
            bfloat16, and a gather is made again for a use that is far from the first.
    """
    if for_tpus:
        text = sum_after_loops(text)
    module = split(text)
    lines = text.splitlines()
    found = _PARTITIONS.search(module.header)
    partitions = int(found[1]) if found else 1
    for own in module.computations.values():
        if any(_COLLECTIVE.search(line.text) for line in own):
            for number, line in _Merged(module, own, partitions).lines(
                scatters, for_tpus
            ):
                lines[number] = line
    return "\n".join((*lines, ""))


_COLLECTIVE = re.compile(r" (?:all-reduce|all-gather|all-to-all|collective-permute)\(")


class _Merged:
    """One computation: what its collectives become."""

    def __init__(self, module: Module, lines: list[Line], partitions: int) -> None:
        self.module = module
        self.partitions = partitions
        self.own: dict[str, Instruction] = {}
        self.at: dict[str, Line] = {}
        for line in lines:
            read = read_line(line.text)
            if read is not None:
                self.own[read.name] = read
                self.at[read.name] = line
        # A name → that of an equal operation before it.
        self.same: dict[str, str] = {}
        self._heights: dict[str, int] | None = None
        # A computation that is applied → what it does.
        self.done_by: dict[str, str] = {}
        # A gather or sum that is made of several → the groups of it.
        self.together_in: dict[str, np.ndarray] = {}
        self.users: dict[str, list[Instruction]] = collections.defaultdict(list)

    def lines(
        self, scatters: Scatters | None, for_tpus: bool
    ) -> Iterator[tuple[int, str]]:
        """Numbers of the lines that change, and what they become."""
        self.find_equal()
        for name, first in self.same.items():
            if _COLLECTIVE.search(self.at[name].text):
                yield self.copied(name, first)
        for one in self.own.values():
            for operand in one.operands:
                self.users[self.same.get(operand, operand)].append(one)
        joined = self.joined()
        for name in joined:
            yield self.copied(name, self.own[name].operands[0])
        for one in self.own.values():
            if one.name in self.same or one.name in joined:
                continue
            if one.opcode in _MOVES and self.is_uniform(one.operands[0]):
                yield self.copied(one.name, one.operands[0])
            elif one.opcode == "all-reduce":
                whole = for_tpus and self.together(one) is not None
                scattered = [] if whole else [*self.scattered(one, scatters)]
                yield from scattered
                if for_tpus and not scattered:
                    yield from self.moved(one)
            elif one.opcode in _MOVES and for_tpus:
                yield from self.moved(one)

    def moved(self, one: Instruction) -> Iterator[tuple[int, str]]:
        """What the compiler for TPUs makes of an operation that moves an array."""
        line, text = self.at[one.name], self.at[one.name].text
        if _is_wide(one) and self.is_multiplied(one):
            text = text.replace("= f32[", "= bf16[", 1)
        together = self.together(one)
        if together is not None:
            before, groups = together
            yield self.copied(before.name, before.operands[0])
            text = _GROUPS.sub(groups, text, count=1)
        if one.opcode == "all-gather":
            again = text.replace(f"%{one.name} ", f"%{one.name}.again ", 1)
            text = "\n".join([text] + [again] * (self.gathers(one) - 1))
        yield line.number, text

    def together(self, one: Instruction) -> tuple[Instruction, str] | None:
        """What is made with the one before it, and the groups; None where two are."""
        before = self.own.get(self.same.get(one.operands[0], one.operands[0]))
        if before is None or before.opcode != one.opcode or one.opcode not in _AT_ONCE:
            return None
        inner = self.together_in.get(before.name)
        if inner is None:
            inner = groups_of(before.attributes, self.partitions)
        outer = groups_of(one.attributes, self.partitions)
        if len(self.users[before.name]) != 1 or inner is None or outer is None:
            return None
        group_of = {member: group for group in inner.tolist() for member in group}
        rows = {
            tuple(sorted({each for member in row for each in group_of[member]}))
            for row in outer.tolist()
        }
        members = inner.shape[1] * outer.shape[1]
        if any(len(row) != members for row in rows):
            return None  # over the same devices once more
        self.together_in[one.name] = np.array(sorted(rows))
        written = ",".join(f"{{{','.join(map(str, row))}}}" for row in sorted(rows))
        return before, f"replica_groups={{{written}}}"

    def copied(self, name: str, of: str) -> tuple[int, str]:
        """A line that moves nothing, so that values can be followed through it."""
        line = self.at[name]
        head, _, rest = line.text.partition(f" {self.own[name].opcode}(")
        found = re.search(r", metadata=\{[^{}]*\}", rest)
        return line.number, f"{head} copy(%{of}){found[0] if found else ''}"

    # ------------------------------------------------------------ equal operations

    def find_equal(self) -> None:
        first: dict[object, str] = {}
        for one in self.own.values():
            if one.opcode in _APART or "rng" in one.opcode:
                continue
            operands = tuple(self.same.get(name, name) for name in one.operands)
            if one.opcode == "all-gather":
                operands = tuple(map(self.source, operands))
                key = (operands, _bytes(one), self.groups(one))
                equal = first.setdefault(key, one.name)
                if equal != one.name:
                    self.same[one.name] = equal
                continue
            # Constants and the like have no operands, and say what they are in a line.
            written = _said(self.at[one.name].text) if not operands else ""
            rest = _APPLIED.sub(self._applied, _said(one.attributes))
            key = (one.opcode, operands, one.type, rest, written)
            equal = first.setdefault(key, one.name)
            if equal != one.name and not one.root:
                self.same[one.name] = equal

    def source(self, name: str) -> str:
        """The value of which another is a transpose or the like."""
        one = self.own.get(name)
        while one is not None and one.opcode in _TURNED and one.operands:
            name = self.same.get(one.operands[0], one.operands[0])
            one = self.own.get(name)
        return name

    def is_uniform(self, name: str) -> bool:
        """Whether a value is one constant everywhere: nobody need send it.

        Other scalars may differ from device to device in a shard_map.
        """
        one = self.own.get(name)
        while one is not None and one.opcode in _COPIES_OF_ONE:
            one = self.own.get(one.operands[0])
        return (
            one is not None and one.opcode == "constant" and self.shape(one.name) == ()
        )

    def _applied(self, found: re.Match[str]) -> str:
        """A computation of a reduction by what it does: it has many names."""
        if found[1] not in self.done_by:
            self.done_by[found[1]] = self._body(found[1])
        return self.done_by[found[1]]

    def _body(self, computation: str) -> str:
        """What a computation does, without the names in it."""
        places: dict[str, int] = {}
        said: list[object] = []
        for at, line in enumerate(self.module.computations.get(computation, ())):
            one = read_line(line.text)
            if one is None:
                return computation
            places[one.name] = at
            operands = tuple(places.get(name, name) for name in one.operands)
            rest = one.attributes if operands else line.text
            said.append((one.opcode, operands, one.type, _said(rest), one.root))
        return str(said)

    def adds(self, one: Instruction) -> bool:
        """Whether an all-reduce is a sum, and not a maximum or another reduction."""
        found = _APPLIED.search(one.attributes)
        root = None if found is None else self.module.root(found[1])
        if found is None or root is None:
            return False
        made = self.module.instruction(found[1], root)
        return made is not None and made.opcode == "add"

    # ------------------------------------------------------------------------ sums

    def joined(self) -> set[str]:
        """All-reduces that are part of another, whose operand they are added to."""
        # A value → the all-reduces that it is the sum of, and how it is sliced.
        sums: dict[str, tuple[list[Instruction], object]] = {}
        joined: set[str] = set()
        for one in self.own.values():
            if one.name in self.same:
                continue
            operands = [self.same.get(name, name) for name in one.operands]
            before = [sums.get(name) for name in operands]
            parts = 1 if one.opcode == "dynamic-slice" else len(operands)
            alone = all(len(self.users[name]) == 1 for name in operands[:parts])
            if one.opcode == "all-reduce" and parts == 1 and self.adds(one):
                sums[one.name] = [one], None
            elif not operands or not alone or before[0] is None:
                continue
            elif one.opcode in _PASSED:
                sums[one.name] = before[0]
            elif one.opcode == "dynamic-slice" and before[0][1] is None:
                sums[one.name] = before[0][0], (one.type, *operands[1:])
            elif one.opcode in _SUMS and before[1] is not None:
                (first, sliced), (second, other) = before[0], before[1]
                if self.groups(first[0]) == self.groups(second[0]) and sliced == other:
                    sums[one.name] = first + second, sliced
                    joined.update(each.name for each in second)
        return joined

    def groups(self, one: Instruction) -> object:
        found = groups_of(one.attributes, self.partitions)
        return one.attributes if found is None else found.tobytes()

    def scattered(
        self, one: Instruction, scatters: Scatters | None
    ) -> Iterator[tuple[int, str]]:
        """A reduce-scatter, where every device keeps a slice of an all-reduce alone."""
        first = self.slice_of(one.name) if len(one.operands) == 1 else None
        groups = groups_of(one.attributes, self.partitions)
        if first is None or groups is None or not isinstance(one.type, Array):
            return
        members = groups.shape[1]
        whole, part = self.shape(first.operands[0]), self.shape(first.name)
        cut = [dim for dim, size in enumerate(part) if size < whole[dim]]
        count = math.prod(one.type.shape)
        if members < 2 or len(cut) != 1 or math.prod(part) * members != count:
            return
        found = _NAME.search(one.attributes)
        name = found[1] if found else ""
        item = one.type.bytes // count
        if scatters is not None:
            if not scatters(tuple(part), cut[0], item, members, name):
                return
        line = self.at[one.name]
        yield line.number, line.text.replace(" all-reduce(", " all-reduce-scatter(", 1)

    def slice_of(self, name: str) -> Instruction | None:
        """The first slice of a value of which only slices are used; else None."""
        todo, seen, first = [name], {name}, None
        for value in todo:
            if not self.users[value]:
                return None
            for user in self.users[value]:
                if user.opcode == "dynamic-slice" and user.operands[0] == value:
                    first = first or user
                elif user.opcode not in _PASSED and user.opcode not in _SUMS:
                    return None
                elif user.name not in seen:
                    seen.add(user.name)
                    todo.append(user.name)
        return first

    def shape(self, name: str) -> tuple[int, ...]:
        kind = self.own[name].type
        return kind.shape if isinstance(kind, Array) else (-1,)

    def heights(self) -> dict[str, int]:
        """How far each operation is above the end, by its users."""
        heights: dict[str, int] = {}
        for name in reversed(self.own):
            if name in self.same:
                continue
            height = 0
            for user in sorted(heights.get(one.name, 0) for one in self.users[name]):
                height = max(height, user) + 1
            heights[name] = height
        return heights

    def gathers(self, one: Instruction) -> int:
        if self._heights is None:
            self._heights = self.heights()
        heights = self._heights
        near, count = math.inf, 0
        for user in self.users[one.name]:
            height = heights.get(user.name, 0)
            if near <= height + 1 + FAR or not count:
                near = min(near, height)
                count = max(count, 1)
            else:
                count += 1
        return max(count, 1)

    # ------------------------------------------------------------------- precision

    def is_multiplied(self, one: Instruction) -> bool:
        """Whether a value is used in products of no more precision alone."""
        todo, found = [one.name], False
        while todo:
            for user in self.users[todo.pop()]:
                if user.opcode in _PRODUCTS and "operand_precision" not in (
                    user.attributes
                ):
                    found = True
                elif user.opcode == "convert" and _dtype(user) == "bfloat16":
                    found = True
                elif user.opcode in _MOVES | _TURNED | _SLICES | _PICKED:
                    todo.append(user.name)
                else:
                    return False
        return found


def _said(text: str) -> str:
    """What tells an operation from others, without its number and its name."""
    return _UNLIKE.sub("", text.partition(" = ")[2] if " = " in text[:200] else text)


def _bytes(one: Instruction) -> tuple[str, int]:
    kind = one.type
    return (kind.dtype, kind.bytes) if isinstance(kind, Array) else ("", 0)


def _is_wide(one: Instruction) -> bool:
    return _dtype(one) == "float32"


def _dtype(one: Instruction) -> str:
    return one.type.dtype if isinstance(one.type, Array) else ""
