"""Merge the collectives of a partitioned program as XLA does on every accelerator.

The partitioner makes a collective for each operation that needs one. What XLA changes
afterwards is done here: equal operations become one; a sum of all-reduces becomes one
all-reduce of a sum; an all-reduce of which every device keeps its slice becomes a
reduce-scatter. The compiler for TPUs also sums after a loop what each iteration only
accumulates, moves and sums in bfloat16 what it multiplies in bfloat16, and repeats a
gather for a use that is far from the first (found with libtpu 0.0.42, on 2026-11-24).
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from flax_layoutmap.pod._hlo_groups import groups_of
from flax_layoutmap.pod._hlo_text import Array, Instruction, Line, Module, split

# Whether a sum becomes a reduce-scatter: the shape of a device's part, the dim that is
# sharded, bytes of an element, the number of devices, and JAX's name of the operation.
Scatters = Callable[[tuple[int, ...], int, int, int, str], bool]
Changes = dict[Line, list[Instruction]]

_FAR = 100
_COLLECTIVE = re.compile(r" (?:all-reduce|all-gather|all-to-all|collective-permute)\(")
_PASSED = frozenset(("convert", "reshape", "transpose", "copy", "bitcast"))
_TURNED = frozenset(("transpose", "reverse", "copy", "bitcast", "reshape"))
_SLICES = frozenset(("slice", "dynamic-slice"))
# Each element of their results is one of an operand.
_PICKED = frozenset(("concatenate", "pad", "select", "maximum", "minimum"))
_SUMS = frozenset(("add", "subtract"))
_COPIES_OF_ONE = _TURNED | _SLICES | {"convert", "broadcast"}
_MOVES = frozenset(("all-gather", "all-to-all", "collective-permute"))
# Two of these in sequence, over different axes, become one over both.
_AT_ONCE = frozenset(("all-gather", "all-reduce"))
_PRODUCTS = frozenset(("dot", "convolution"))
# Equal operations of these kinds are not merged.
_APART = frozenset(("parameter", "send", "recv", "infeed", "outfeed", "custom-call"))
_TAKEN = "get-tuple-element"
_METADATA = re.compile(r", metadata=\{[^{}]*\}")
_UNLIKE = re.compile(
    rf", channel_id=\d+|{_METADATA.pattern}|, frontend_attributes=\{{[^{{}}]*\}}"
)
_APPLIED = re.compile(r"to_apply=%([\w.\-]+)")
_BODY = re.compile(r"\bbody=%([\w.\-]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_NAME = re.compile(r'op_name="([^"]*)"')
_GROUPS = re.compile(r"replica_groups=.*?(?=, [a-z_]+=)")


def merge(
    text: str, scatters: Scatters | None = None, *, for_tpus: bool = False
) -> Module:
    """Merge the collectives of a partitioned program; only `read_program` can read it.

    `scatters` says which sums become a reduce-scatter; None is for all that can.
    """
    module = split(text)
    if for_tpus:
        module = module.changed(_sums_after_loops(module))
    changes: Changes = {}
    for own in module.computations.values():
        if any(_COLLECTIVE.search(line.text) for line in own):
            changes |= _Merged(module, own).changes(scatters, for_tpus)
    return module.changed(changes)


def _copied(one: Instruction, of: str) -> Instruction:
    """A copy in the place of an instruction, through which values can be followed."""
    metadata = _METADATA.search(one.attributes)
    attributes = metadata[0] if metadata else ""
    return dataclasses.replace(
        one, opcode="copy", operands=(of,), attributes=attributes
    )


def _adds(module: Module, one: Instruction) -> bool:
    """Whether an all-reduce is a sum, and not a maximum or another reduction."""
    found = _APPLIED.search(one.attributes)
    root = None if found is None else module.root(found[1])
    return root is not None and root.opcode == "add"


def _read(lines: Sequence[Line]) -> list[Instruction]:
    return [line.instruction for line in lines if line.instruction is not None]


class _Merged:
    """The collectives of one computation, merged."""

    def __init__(self, module: Module, lines: list[Line]) -> None:
        self.module = module
        self.partitions = module.partitions or 1
        self.own = {one.name: one for one in _read(lines)}
        self.lines = {line.name: line for line in lines}
        # A name → that of an equal operation before it.
        self.same: dict[str, str] = {}
        self._heights: dict[str, int] | None = None
        # The computation of a reduction → its body without names.
        self.done_by: dict[str, str] = {}
        # A gather or sum that was merged from several → its groups.
        self.together_in: dict[str, np.ndarray] = {}
        self.users: dict[str, list[Instruction]] = collections.defaultdict(list)

    def changes(self, scatters: Scatters | None, for_tpus: bool) -> Changes:
        """The lines that change → their new instructions."""
        made: dict[str, list[Instruction]] = {}

        def copy(name: str, of: str) -> None:
            made[name] = [_copied(self.own[name], of)]

        self.find_equal()
        for name, first in self.same.items():
            if _COLLECTIVE.search(self.lines[name].text):
                copy(name, first)
        for one in self.own.values():
            for operand in one.operands:
                self.users[self.same.get(operand, operand)].append(one)
        joined = self.joined()
        for name in joined:
            copy(name, self.own[name].operands[0])
        for one in self.own.values():
            is_sum, is_move = one.opcode == "all-reduce", one.opcode in _MOVES
            if one.name in self.same or one.name in joined or not (is_sum or is_move):
                continue
            if is_move and self.is_uniform(one.operands[0]):
                copy(one.name, one.operands[0])
                continue
            before = self.together(one) if for_tpus else None
            if is_sum and before is None and self.is_scattered(one, scatters):
                scattered = dataclasses.replace(one, opcode="all-reduce-scatter")
                made[one.name] = [scattered]
            elif for_tpus:
                if before is not None:
                    copy(before.name, before.operands[0])
                made[one.name] = self.moved(one)
        return {self.lines[name]: own for name, own in made.items()}

    def moved(self, one: Instruction) -> list[Instruction]:
        """A collective in the dtype, over the groups and as often as on TPUs."""
        kind, attributes = one.type, one.attributes
        if isinstance(kind, Array) and kind.dtype == "float32":
            if self.is_multiplied(one):
                kind = dataclasses.replace(
                    kind, dtype="bfloat16", bytes=kind.bytes // 2
                )
        if one.name in self.together_in:
            rows = self.together_in[one.name].tolist()
            written = ",".join(f"{{{','.join(map(str, row))}}}" for row in rows)
            groups = f"replica_groups={{{written}}}"
            attributes = _GROUPS.sub(groups, attributes, count=1)
        made = dataclasses.replace(one, type=kind, attributes=attributes)
        again = dataclasses.replace(made, name=f"{one.name}.again", root=False)
        more = self.gathers(one) - 1 if one.opcode == "all-gather" else 0
        return [made, *[again] * more]

    def together(self, one: Instruction) -> Instruction | None:
        """The collective before one that is merged with it, over the axes of both."""
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
        return before

    # ------------------------------------------------------------ equal operations

    def find_equal(self) -> None:
        first: dict[object, str] = {}
        for one in self.own.values():
            if one.opcode in _APART or "rng" in one.opcode:
                continue
            operands = tuple(self.same.get(name, name) for name in one.operands)
            if one.opcode == "all-gather":
                kind = one.type if isinstance(one.type, Array) else Array("", (), 0)
                operands = tuple(map(self.source, operands))
                key = (operands, kind.dtype, kind.bytes, self.groups(one))
                equal = first.setdefault(key, one.name)
                if equal != one.name:
                    self.same[one.name] = equal
                continue
            # Constants and the like have no operands: their text tells them apart.
            written = "" if operands else _unnamed(self.lines[one.name].text)
            rest = _APPLIED.sub(self._applied, _unnamed(one.attributes))
            key = (one.opcode, operands, one.type, rest, written)
            equal = first.setdefault(key, one.name)
            if equal != one.name and not one.root:
                self.same[one.name] = equal

    def source(self, name: str) -> str:
        """The value that another is a transpose or reshape of."""
        one = self.own.get(name)
        while one is not None and one.opcode in _TURNED and one.operands:
            name = self.same.get(one.operands[0], one.operands[0])
            one = self.own.get(name)
        return name

    def is_uniform(self, name: str) -> bool:
        """Whether a value is a scalar constant, which is the same on all devices."""
        one = self.own.get(name)
        while one is not None and one.opcode in _COPIES_OF_ONE:
            one = self.own.get(one.operands[0])
        return one is not None and one.opcode == "constant" and _shape(one) == ()

    def _applied(self, found: re.Match[str]) -> str:
        """The body of a reduction's computation: equal ones have many names."""
        if found[1] not in self.done_by:
            self.done_by[found[1]] = self._body(found[1])
        return self.done_by[found[1]]

    def _body(self, computation: str) -> str:
        """The text of a computation without names."""
        places: dict[str, int] = {}
        body: list[object] = []
        for at, line in enumerate(self.module.computations.get(computation, ())):
            one = line.instruction
            if one is None:
                return computation
            places[one.name] = at
            operands = tuple(places.get(name, name) for name in one.operands)
            rest = one.attributes if operands else line.text
            body.append((one.opcode, operands, one.type, _unnamed(rest), one.root))
        return str(body)

    # ------------------------------------------------------------------------ sums

    def joined(self) -> set[str]:
        """All-reduces that are merged into another, to whose result they are added."""
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
            if one.opcode == "all-reduce" and parts == 1 and _adds(self.module, one):
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

    def is_scattered(self, one: Instruction, scatters: Scatters | None) -> bool:
        """Whether every device keeps a slice of an all-reduce alone."""
        first = self.slice_of(one.name) if len(one.operands) == 1 else None
        groups = groups_of(one.attributes, self.partitions)
        if first is None or groups is None or not isinstance(one.type, Array):
            return False
        members, part = groups.shape[1], _shape(first)
        whole = _shape(self.own[first.operands[0]])
        cut = [dim for dim, size in enumerate(part) if size < whole[dim]]
        count = math.prod(one.type.shape)
        if members < 2 or len(cut) != 1 or math.prod(part) * members != count:
            return False
        if scatters is None:
            return True
        name = _NAME.search(one.attributes)
        item = one.type.bytes // count
        return scatters(part, cut[0], item, members, name[1] if name else "")

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

    # ------------------------------------------------------------------ gathers

    def heights(self) -> dict[str, int]:
        """The length of the path from each operation to the end, over its users."""
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
        """How often a gather runs: again for each use that is far from the others."""
        if self._heights is None:
            self._heights = self.heights()
        near, count = math.inf, 0
        for user in self.users[one.name]:
            height = self._heights.get(user.name, 0)
            if count and near > height + 1 + _FAR:
                count += 1
            else:
                near, count = min(near, height), max(count, 1)
        return max(count, 1)

    def is_multiplied(self, one: Instruction) -> bool:
        """Whether a value is only used in products of default precision."""
        todo, found = [one.name], False
        while todo:
            for user in self.users[todo.pop()]:
                if user.opcode in _PRODUCTS and "operand_precision" not in (
                    user.attributes
                ):
                    found = True
                elif user.opcode == "convert" and (
                    isinstance(user.type, Array) and user.type.dtype == "bfloat16"
                ):
                    found = True
                elif user.opcode in _MOVES | _TURNED | _SLICES | _PICKED:
                    todo.append(user.name)
                else:
                    return False
        return found


def _unnamed(text: str) -> str:
    """The text of an operation without its name and number, for comparison."""
    return _UNLIKE.sub("", text.partition(" = ")[2] if " = " in text[:200] else text)


def _shape(one: Instruction) -> tuple[int, ...]:
    return one.type.shape if isinstance(one.type, Array) else (-1,)


# ------------------------------------------------------------------- after a loop


def _sums_after_loops(module: Module) -> Changes:
    """Move sums that a loop only accumulates behind the loop.

    These are gradients of microbatches. A sum in nested loops is moved out of one.
    """
    changes: Changes = {}
    for lines in module.computations.values():
        for line in lines:
            loop = line.instruction if " while(" in line.text else None
            body = None if loop is None else _BODY.search(loop.attributes)
            if loop is None or body is None:
                continue
            takers = _takers(loop.name, lines)
            for index, one in _added_up(module, body[1]):
                if takers is None or index not in takers:
                    continue
                inside = module.by_name[body[1], one.name]
                changes[inside] = [_copied(one, one.operands[0])]
                for taker in takers[index]:
                    own = taker.instruction
                    assert own is not None
                    part = dataclasses.replace(own, name=f"{own.name}.part", root=False)
                    whole = dataclasses.replace(
                        one, name=own.name, operands=(part.name,), root=own.root
                    )
                    changes[taker] = [part, dataclasses.replace(whole, type=own.type)]
    return changes


def _takers(loop: str, lines: list[Line]) -> dict[int, list[Line]] | None:
    """The lines that take each element of a loop's result; None for other uses."""
    takers: dict[int, list[Line]] = collections.defaultdict(list)
    for line in lines:
        if f"%{loop})" in line.text or f"%{loop}," in line.text:
            index = _INDEX.search(line.text)
            if f" {_TAKEN}(" not in line.text or index is None:
                return None
            takers[int(index[1])].append(line)
    return takers


def _added_up(module: Module, body: str) -> Iterator[tuple[int, Instruction]]:
    """The sums that a loop's body only accumulates, with the index of the result."""
    lines = module.computations.get(body, [])
    if not any(" all-reduce(" in line.text for line in lines):
        return
    users: dict[str, list[Instruction]] = collections.defaultdict(list)
    taken: dict[int, list[str]] = collections.defaultdict(list)
    own = _read(lines)
    given = {one.name for one in own if one.opcode == "parameter"}
    for one in own:
        for operand in one.operands:
            users[operand].append(one)
        index = _INDEX.search(one.attributes)
        if one.opcode == _TAKEN and one.operands[0] in given and index is not None:
            taken[int(index[1])].append(one.name)
    for one in own:
        if one.opcode != "all-reduce" or len(one.operands) != 1:
            continue
        name = one.name
        while len(users[name]) == 1 and users[name][0].opcode in _PASSED:
            name = users[name][0].name
        made = users[name][0] if len(users[name]) == 1 else one
        ends = users[made.name]
        if made.opcode != "add" or not _adds(module, one):
            continue
        if len(ends) != 1 or not ends[0].root or ends[0].opcode != "tuple":
            continue
        index = ends[0].operands.index(made.name)
        before = [each for each in made.operands if each != name]
        if taken[index] == before and len(before) == 1 and users[before[0]] == [made]:
            yield index, one
