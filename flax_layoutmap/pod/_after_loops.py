"""Sums that a loop only adds up, made once after the loop.

Where each turn of a loop sums an array over devices and adds it to one that is carried
along, such as the gradients of microbatches, the compiler for TPUs sums what the loop
has added up. Found with libtpu 0.0.42, on 2026-11-24.
"""

import collections
import re
from collections.abc import Iterator

from flax_layoutmap.pod._hlo_text import Instruction, Line, Module, read_line, split

_BODY = re.compile(r"\bbody=%([\w.\-]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_APPLIED = re.compile(r"to_apply=%([\w.\-]+)")
_METADATA = re.compile(r", metadata=\{[^{}]*\}")
_TAKEN = "get-tuple-element"
# What may be between a sum and the addition.
_PASSED = frozenset(("convert", "reshape", "transpose", "copy", "bitcast"))


def sum_after_loops(text: str) -> str:
    """The program with such sums after their loops.

    Out of a loop in a loop they are moved once, as the compiler does it.

    Args:
        text: a program as the partitioner gives it.
    """
    module, lines = split(text), text.splitlines()
    for own in module.computations.values():
        for line in own:
            loop = read_line(line.text) if " while(" in line.text else None
            body = None if loop is None else _BODY.search(loop.attributes)
            if loop is None or body is None:
                continue
            takers = _takers(loop.name, own)
            for index, one in _added_up(module, body[1]):
                if takers is None or index not in takers:
                    continue
                inside = module.by_name[body[1], one.name]
                lines[inside.number] = _copied(inside.text, one)
                for taker in takers[index]:
                    lines[taker.number] = _summed(taker.text, one)
    return "\n".join((*lines, ""))


def _takers(loop: str, lines: list[Line]) -> dict[int, list[Line]] | None:
    """What takes each result of a loop; None where it is used in another way."""
    takers: dict[int, list[Line]] = collections.defaultdict(list)
    for line in lines:
        if f"%{loop})" in line.text or f"%{loop}," in line.text:
            index = _INDEX.search(line.text)
            if f" {_TAKEN}(" not in line.text or index is None:
                return None
            takers[int(index[1])].append(line)
    return takers


def _added_up(module: Module, body: str) -> Iterator[tuple[int, Instruction]]:
    """The sums of a turn that are only added up, and which result each makes."""
    lines = module.computations.get(body, [])
    if not any(" all-reduce(" in line.text for line in lines):
        return
    own = [read for line in lines if (read := read_line(line.text)) is not None]
    users: dict[str, list[Instruction]] = collections.defaultdict(list)
    taken: dict[int, list[Instruction]] = collections.defaultdict(list)
    given = {one.name for one in own if one.opcode == "parameter"}
    for one in own:
        for operand in one.operands:
            users[operand].append(one)
        index = _INDEX.search(one.attributes)
        if one.opcode == _TAKEN and one.operands[0] in given and index is not None:
            taken[int(index[1])].append(one)
    for one in own:
        applied = _APPLIED.search(one.attributes)
        if one.opcode != "all-reduce" or len(one.operands) != 1 or applied is None:
            continue
        root = module.instruction(applied[1], module.root(applied[1]) or "")
        name = one.name
        while len(users[name]) == 1 and users[name][0].opcode in _PASSED:
            name = users[name][0].name
        made = users[name][0] if len(users[name]) == 1 else one
        ends = users[made.name]
        if root is None or root.opcode != "add" or made.opcode != "add":
            continue
        if len(ends) != 1 or not ends[0].root or ends[0].opcode != "tuple":
            continue
        index = ends[0].operands.index(made.name)
        carried = [each.name for each in taken[index]]
        before = [each for each in made.operands if each != name]
        if carried == before and len(before) == 1 and users[before[0]] == [made]:
            yield index, one


def _copied(text: str, one: Instruction) -> str:
    """A line that moves nothing, in the place of the sum."""
    head, _, rest = text.partition(" all-reduce(")
    metadata = _METADATA.search(rest)
    return f"{head} copy(%{one.operands[0]}){metadata[0] if metadata else ''}"


def _summed(text: str, one: Instruction) -> str:
    """The result of a loop, and the sum of it under its name."""
    head, _, _ = text.partition(f" {_TAKEN}(")
    name = head.partition(" = ")[0].split("%")[-1]
    first = text.replace("ROOT ", "", 1).replace(f"%{name} ", f"%{name}.part ", 1)
    return f"{first}\n{head} all-reduce(%{name}.part){one.attributes}"
