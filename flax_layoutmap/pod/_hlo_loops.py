"""Trip counts of the loops of a compiled program."""

import re

from flax_layoutmap.pod._hlo_text import Instruction, Module

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(r"\b(body|condition|calls)=%?([\w.\-]+)")
_CONSTANT = re.compile(r"[su](?:8|16|32|64)\[\]\S* constant\((-?\d+)\)")
_INDEX = re.compile(r"\bindex=(\d+)")
# Nothing but moves of a value, so that a constant can be seen through them.
_MOVES = ("copy", "bitcast", "convert", "reshape", "copy-done", "copy-start")


def trips(module: Module, where: str, loop: Instruction) -> int | None:
    """The trip count of a loop; None if unknown.

    The CPU compiler writes it down. The TPU's does not: it is found from the start
    (a constant in the tuple that goes in), the bound (the one constant of the
    condition), and the step (what the body adds), which is 2 for the loops of
    collective matrix products, and the start 1 where a first turn was taken out.
    """
    known = _KNOWN.search(loop.attributes)
    if known:
        return int(known[1])
    called = dict(_CALLED.findall(loop.attributes))
    condition, body = called.get("condition", ""), called.get("body", "")
    lines = module.computations.get(condition, [])
    bounds = _constants(module, condition, set())
    at = {
        int(found[1])
        for line in lines
        if " get-tuple-element(" in line.text and (found := _INDEX.search(line.text))
    }
    below = any("direction=LT" in line.text for line in lines)
    bounds = {bound for bound in bounds if bound > 0}
    if len(bounds) != 1 or len(at) != 1 or not below:
        return None
    index = at.pop()
    start = _start(module, where, loop, index)
    step = _step(module, body, index)
    if start is None or step is None:
        return None
    return max(0, -(-(bounds.pop() - start) // step))


def _constants(module: Module, computation: str, seen: set[str]) -> set[int]:
    if computation in seen:
        return set()
    seen.add(computation)
    found: set[int] = set()
    for line in module.computations.get(computation, []):
        constant = _CONSTANT.search(line.text)
        if constant:
            found.add(int(constant[1]))
        for _, name in _CALLED.findall(line.text):
            found |= _constants(module, name, seen)
    return found


def _start(module: Module, where: str, loop: Instruction, index: int) -> int | None:
    if len(loop.operands) != 1:
        return None
    going_in = module.instruction(where, loop.operands[0])
    if going_in is None or going_in.opcode != "tuple":
        return None
    if index >= len(going_in.operands):
        return None
    return _value(module, where, going_in.operands[index])


def _value(module: Module, where: str, name: str) -> int | None:
    """The constant that an instruction is, seen through moves."""
    for _ in range(32):
        line = module.by_name.get((where, name))
        if line is None:
            return None
        constant = _CONSTANT.search(line.text)
        if constant:
            return int(constant[1])
        read = line.instruction
        if read is None or read.opcode not in _MOVES or len(read.operands) != 1:
            return None
        name = read.operands[0]
    return None


def _step(module: Module, body: str, index: int) -> int | None:
    root = module.root(body)
    if root is None or root.opcode != "tuple" or index >= len(root.operands):
        return None
    name = root.operands[index]
    for _ in range(32):
        added = module.instruction(body, name)
        if added is None:
            return None
        if added.opcode == "add" and len(added.operands) == 2:
            steps = [_value(module, body, operand) for operand in added.operands]
            known = [step for step in steps if step is not None and step > 0]
            return known[0] if len(known) == 1 else None
        if added.opcode not in _MOVES or len(added.operands) != 1:
            return None
        name = added.operands[0]
    return None
