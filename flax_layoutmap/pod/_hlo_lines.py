"""The lines of a compiled program that communicate, and those that lead to them."""

import collections
import re

from flax_layoutmap.pod._hlo_text import Instruction, Line, Module, read_line

_COMMUNICATES = re.compile(
    r"[\s)}](?:(?:all|collective|reduce-scatter|ragged)(?:-[a-z]+)*|send|recv)\("
)
# Kernels that are called by name and, by that name, communicate.
_CALLS_OUT = re.compile(
    r'custom_call_target="[^"]*(?:all_?reduce|all_?gather|all_?to_?all|'
    r'reduce_?scatter|collective_?permute|ragged|remote)[^"]*"',
    re.IGNORECASE,
)
# Whatever its name, what has groups or pairs of devices communicates.
_GROUPED = re.compile(r"\b(?:replica_groups|source_target_pairs)=")
# What a line calls: `calls=%one`, `branch_computations={%one, %two}`.
REFERENCE = re.compile(r"(\w+)=(%[\w.\-]+|\{%[^{}]*\})")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')


def active(module: Module) -> dict[str, list[Line]]:
    """Computations that communicate or call one that does → the lines that matter."""
    names = set(module.computations)
    calls: dict[str, dict[int, set[str]]] = {}
    own: dict[str, set[int]] = {}
    callers: dict[str, set[str]] = collections.defaultdict(set)
    for name, lines in module.computations.items():
        own[name] = {line.number for line in lines if may_communicate(line.text)}
        calls[name] = {}
        for line in lines:
            if "=%" in line.text or "={%" in line.text:
                targets = {
                    target
                    for _, written in REFERENCE.findall(line.text)
                    for target in re.findall(r"%([\w.\-]+)", written)
                } & names
                if targets:
                    calls[name][line.number] = targets
                for target in targets:
                    callers[target].add(name)
    active: set[str] = set()
    waiting = [name for name, numbers in own.items() if numbers]
    while waiting:
        name = waiting.pop()
        if name not in active:
            active.add(name)
            waiting += callers[name]
    if module.entry is not None:
        active.add(module.entry)
    return {
        name: [
            line
            for line in module.computations[name]
            if line.number in own[name] or calls[name].get(line.number, set()) & active
        ]
        for name in active
    }


def read_alone(text: str) -> Instruction | None:
    """Reads a line; None where another operation that communicates is on it too."""
    instruction = read_line(text)
    if instruction is None:
        return None
    # A quote that does not end may hide anything.
    whole = text.count('"') % 2 == 0
    named = _COMMUNICATES.findall(_QUOTED.sub('""', text) if whole else text)
    own = _COMMUNICATES.match(f" {instruction.opcode}(") is not None
    return instruction if len(named) <= own else None


def may_communicate(text: str) -> bool:
    patterns = (_COMMUNICATES, _CALLS_OUT, _GROUPED)
    return any(pattern.search(text) for pattern in patterns)


def communicates(text: str, instruction: Instruction) -> bool:
    """Whether a line that was read is one that moves data between devices."""
    opcode = instruction.opcode
    if opcode == "custom-call":
        return bool(_CALLS_OUT.search(text))
    named = _COMMUNICATES.match(f" {opcode}(")
    return bool(named or _GROUPED.search(instruction.attributes))
