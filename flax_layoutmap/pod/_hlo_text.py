"""Parse the text of a compiled program: computations, instructions, types.

What cannot be read returns None, so that the caller can count it.
"""

import collections
import dataclasses
import functools
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

_ARRAY = re.compile(
    r"([a-z]\w*)\[((?:<?=?[0-9]{1,18}(?:,<?=?[0-9]{1,18})*)?)\](?:\{[^{}]*\})?"
)
_COMMENT = re.compile(r"/\*.*?\*/")
_LINE = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = (.*)", re.DOTALL)
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) .*->.*\{\s*")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_PARAMETER = re.compile(r" parameter\((\d+)\)")
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="?([^",}]+)')
_NAME = re.compile(r"%([\w.\-]+)")
_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")
# An element of a tuple as an operand, which jaxlib 0.12 writes for get-tuple-element.
_ELEMENT = re.compile(r"%([\w.\-]+)#(\d+)")

# `bf16`, `u4`, `f8e4m3fn`.
_ELEMENT_TYPE = re.compile(r"(bf|f|u|s)(\d+)(e\w+)?")
_KINDS = {"bf": "bfloat", "f": "float", "u": "uint", "s": "int"}
_OTHER_TYPES = {
    "pred": ("bool", 8),
    "c64": ("complex64", 64),
    "c128": ("complex128", 128),
}


@functools.cache
def _element_type(name: str) -> tuple[str, int] | None:
    """NumPy's name and the bits of an element type.

    >>> _element_type("f8e4m3fn"), _element_type("s4"), _element_type("token")
    (('float8_e4m3fn', 8), ('int4', 4), None)
    """
    parts = _ELEMENT_TYPE.fullmatch(name)
    if parts is None:
        return _OTHER_TYPES.get(name)
    kind, bits, form = parts.groups()
    return f"{_KINDS[kind]}{bits}{'_' * bool(form)}{form or ''}", int(bits)


@dataclasses.dataclass(frozen=True, slots=True)
class Array:
    """The type of one array: NumPy's name of its dtype, and its shape."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int


# A tuple's type is a tuple of types; tokens and contexts are empty tuples.
Type = Array | tuple["Type", ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation."""

    name: str
    type: Type
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    root: bool


@dataclasses.dataclass(eq=False)
class Line:
    """A line of a program, parsed on first use."""

    number: int
    text: str

    @functools.cached_property
    def name(self) -> str | None:
        """Name of the instruction; None for what is not one."""
        found = _LINE.match(self.text)
        return found[2] if found else None

    @functools.cached_property
    def instruction(self) -> Instruction | None:
        """The instruction; None where it has another form."""
        return read_line(self.text)


@dataclasses.dataclass(frozen=True)
class Module:
    """A program: its computations by name."""

    computations: dict[str, list[Line]]
    entry: str | None
    text: str

    @property
    def partitions(self) -> int | None:
        """The number of devices of the program; None if unknown."""
        found = _PARTITIONS.search(self.text[: self.text.find("\n")])
        return int(found[1]) if found else None

    @functools.cached_property
    def by_name(self) -> dict[tuple[str, str], Line]:
        """Computation and name of an instruction → its line."""
        return {
            (computation, line.name): line
            for computation, lines in self.computations.items()
            for line in lines
            if line.name is not None
        }

    def instruction(self, computation: str, name: str | None) -> Instruction | None:
        """One instruction by its name; None where it is not there."""
        line = self.by_name.get((computation, name or ""))
        return None if line is None else line.instruction

    def changed(self, made: Mapping[Line, Instruction]) -> "Module":
        """The program with other instructions in the place of some lines."""
        computations = {
            name: [
                _written(made[line], line) if line in made else line for line in lines
            ]
            for name, lines in self.computations.items()
        }
        return dataclasses.replace(self, computations=computations)

    @functools.cached_property
    def sends(self) -> dict[tuple[str, str | None], Instruction]:
        """Computation and rendezvous → the `send` to another slice."""
        found = {}
        for computation, lines in self.computations.items():
            for line in lines:
                if " send(" in line.text and line.instruction is not None:
                    name = rendezvous(line.text)
                    if name is not None:
                        found[computation, name] = line.instruction
        return found

    def parameters(self) -> list["Array"]:
        """The arguments of the program, in order; of a partitioned one their shards."""
        found: dict[int, Array] = {}
        for line in self.computations.get(self.entry or "", []):
            number = _PARAMETER.search(line.text)
            if number and line.instruction and isinstance(line.instruction.type, Array):
                found[int(number[1])] = line.instruction.type
        return [found[at] for at in sorted(found)]

    def results(self) -> list["Array"]:
        """The results of the program, in order; of a partitioned one their shards."""
        root = self.root(self.entry or "")
        return [] if root is None else arrays_of(root.type)

    def root(self, computation: str) -> Instruction | None:
        """The result of a computation."""
        for line in reversed(self.computations.get(computation, [])):
            if line.text.lstrip().startswith("ROOT "):
                return line.instruction
        return None

    def parameter_number(self, computation: str, name: str) -> int | None:
        """The number of a parameter of a computation; None for other instructions."""
        line = self.by_name.get((computation, name))
        found = None if line is None else _PARAMETER.search(line.text)
        return int(found[1]) if found else None


def _written(op: Instruction, old: Line) -> Line:
    """A line for an instruction, without its type."""
    root, operands = "ROOT " * op.root, ", ".join(f"%{name}" for name in op.operands)
    text = f"{root}%{op.name} = {op.opcode}({operands}){op.attributes}"
    line = Line(old.number, text)
    line.__dict__["instruction"] = op
    return line


def rendezvous(attributes: str) -> str | None:
    """The name that a `send` to another slice and its `recv` share."""
    found = _RENDEZVOUS.search(attributes)
    return found[1] if found else None


def split(text: str) -> Module:
    """Take a program apart into its computations."""
    computations: dict[str, list[Line]] = {}
    entry: str | None = None
    current: list[Line] | None = None
    tuples: dict[str, str] = {}
    for number, line in enumerate(text.splitlines()):
        header = None if line[:1].isspace() else _HEADER.fullmatch(line)
        if header:
            current, tuples = computations.setdefault(header[2], []), {}
            entry = header[2] if header[1] else entry
        elif line[:1] == "}":
            current = None
        elif current is not None and " = " in line:
            current += _with_elements(number, line, tuples)
    return Module(computations, entry, text)


def _with_elements(number: int, text: str, tuples: dict[str, str]) -> list[Line]:
    """A line, after one of get-tuple-element for each `%name#1` among its operands.

    `tuples` are the lines of the computation that define tuples, by name; new elements
    are added.
    """
    made: list[Line] = []

    def named(found: re.Match[str]) -> str:
        name, index = found[1], int(found[2])
        element = f"{name}.element.{index}"
        if element not in tuples:
            kind = _type_of_element(tuples.get(name, ""), index)
            line = f"%{element} = {kind} get-tuple-element(%{name}), index={index}"
            tuples[element] = line
            made.append(Line(number, line))
        return f"%{element}"

    while _ELEMENT.search(text):  # `%name#1#0` in two turns
        text = _ELEMENT.sub(named, text)
    if (at := text.find(" = (")) > 0:
        tuples[text[:at].split()[-1].lstrip("%")] = text
    return [*made, Line(number, text)]


def _type_of_element(text: str, index: int) -> str:
    """The type of an element of the tuple that a line defines."""
    found = _LINE.fullmatch(text)
    end = None if found is None else _closing(found[3], 0)
    parts = [] if found is None or end is None else _parts(found[3][1:end])
    return parts[index].strip() if index < len(parts) else "()"


def read_line(text: str) -> Instruction | None:
    """Read one instruction; None where it has another form."""
    found = _LINE.fullmatch(text)
    if found is None:
        return None
    rest = found[3]
    if rest.startswith("("):
        end = _closing(rest, 0)
        if end is None:
            return None
        written, rest = rest[: end + 1], rest[end + 1 :]
    else:
        written, space, rest = rest.partition(" ")
        if not space:
            return None
    kind = read_type(written)
    opcode = _OPCODE.match(rest)
    if kind is None or opcode is None:
        return None
    end = _closing(rest, opcode.end() - 1)
    if end is None:
        return None
    operands = tuple(_NAME.findall(rest[opcode.end() : end]))
    attributes = rest[end + 1 :]
    return Instruction(
        found[2], kind, opcode[1], operands, attributes, found[1] is not None
    )


def read_type(written: str) -> Type | None:
    """Read `bf16[4,8]{1,0}` or a tuple of such; None where it has another form."""
    written = _COMMENT.sub("", written).strip()
    if written.startswith("("):
        if not written.endswith(")"):
            return None
        parts = [read_type(part) for part in _parts(written[1:-1])]
        kept = [part for part in parts if part is not None]
        return tuple(kept) if len(kept) == len(parts) else None
    found = _ARRAY.fullmatch(written)
    if found is None:
        return None
    if found[1] in ("token", "opaque"):
        return ()
    known = _element_type(found[1])
    if known is None:
        return None
    shape = tuple(int(size.lstrip("<=")) for size in found[2].split(",") if size)
    return Array(known[0], shape, math.ceil(math.prod(shape) * known[1] / 8))


def arrays_of(kind: Type) -> list[Array]:
    """The arrays of a type, in order."""
    if isinstance(kind, Array):
        return [kind]
    return [array for part in kind for array in arrays_of(part)]


def _closing(text: str, start: int) -> int | None:
    """Where the parenthesis that opens at `start` closes."""
    depth = 0
    for at in range(start, len(text)):
        if text[at] == "(":
            depth += 1
        elif text[at] == ")":
            depth -= 1
            if depth == 0:
                return at
    return None


def _parts(text: str) -> list[str]:
    """Split at the commas that are in no bracket."""
    parts, depth, start = [], 0, 0
    for at, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    return [part for part in (*parts, text[start:]) if part.strip()]


_COMMUNICATES = re.compile(
    r"[\s)}](?:(?:all|collective|reduce-scatter|ragged-all)(?:-[a-z]+)*|send|recv)\("
)
# Kernels that are called by name and, by that name, communicate.
_CALLS_OUT = re.compile(
    r'custom_call_target="[^"]*(?:all_?reduce|all_?gather|all_?to_?all|'
    r'reduce_?scatter|collective_?permute|ragged|remote)[^"]*"',
    re.IGNORECASE,
)
# An operation with groups or pairs of devices communicates, whatever its name.
_GROUPED = re.compile(r"\b(?:replica_groups|source_target_pairs)=")
# What a line calls: `calls=%one`, `branch_computations={%one, %two}`.
_REFERENCE = re.compile(r"(\w+)=(%[\w.\-]+|\{%[^{}]*\})")


def active(module: Module) -> dict[str, list[Line]]:
    """Computations that communicate or call one that does → the lines that matter."""
    matter: dict[str, set[Line]] = collections.defaultdict(set)
    callers: dict[str, list[tuple[str, Line]]] = collections.defaultdict(list)
    for name, lines in module.computations.items():
        matter[name].update(line for line in lines if may_communicate(line.text))
        for line in lines:
            for called in called_by(line.text):
                callers[called].append((name, line))
    found: set[str] = set()
    waiting = [name for name, lines in matter.items() if lines]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            for caller, line in callers[name]:
                matter[caller].add(line)
                waiting.append(caller)
    if module.entry is not None:
        found.add(module.entry)
    return {
        name: [line for line in module.computations[name] if line in matter[name]]
        for name in found
    }


def called_by(text: str) -> list[str]:
    """The names that an instruction refers to, other than its operands."""
    if "=%" not in text and "={%" not in text:
        return []
    return [
        name
        for key, written in _REFERENCE.findall(text)
        if key != "control_predecessors"
        for name in _NAME.findall(written)
    ]


def operand_names(text: str) -> list[str]:
    """The names on a line but for its own: operands, and computations it calls."""
    return _NAME.findall(text.partition(" = ")[2])


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


# ------------------------------------------------------------------ source lines

_ENTRY = re.compile(r"(\w+)=(\d+)")
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_ESCAPED = re.compile(rb"\\([\\'\"]|[0-3][0-7]{2})")
# Frames of these libraries are skipped; a model may be installed with pip, too.
_LIBRARIES = re.compile(
    r"[/\\](?:jax|jaxlib|flax|optax|chex|contextlib\.py)(?:[/\\]|$)"
)
_OURS = f"{Path(__file__).parents[1]}{os.sep}"


def has_source(text: str) -> bool:
    """Whether a line, or its attributes, says which line of Python it is from."""
    return _FRAME.search(text) is not None


class Frames:
    """The tables at the head of a program: files, functions, lines, stacks."""

    def __init__(self, text: str) -> None:
        self._files = _texts(text, "FileNames")
        self._functions = _texts(text, "FunctionNames")
        self._places = _fields(text, "FileLocations")
        self._frames = _fields(text, "StackFrames")

    def source(self, attributes: str) -> str | None:
        """`"model.py:36 Attention.__call__"`: the innermost frame of the user."""
        found = _FRAME.search(attributes)
        at = int(found[1]) if found else 0
        innermost: str | None = None
        seen: set[int] = set()
        while at in self._frames and at not in seen:
            seen.add(at)
            frame = self._frames[at]
            place = self._places.get(frame.get("file_location_id", 0), {})
            file = self._files.get(place.get("file_name_id", 0))
            if file is not None:
                function = self._functions.get(place.get("function_name_id", 0), "")
                function = function.replace(".<locals>", "")  # as in a plan
                written = (
                    f"{_file_name(file)}:{place.get('line', 0)} {function}".rstrip()
                )
                innermost = innermost or written
                if not _LIBRARIES.search(file) and not file.startswith(_OURS):
                    return written
            # Printed one too high: 1 means no parent.
            at = frame.get("parent_frame_id", 1) - 1
        return innermost


def _file_name(path: str) -> str:
    return re.split(r"[/\\]", path)[-1]


def _rows(text: str, table: str) -> list[tuple[int, str]]:
    found = re.search(rf"^{table}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
    rows = found[1].splitlines() if found else []
    split = [row.split(" ", 1) for row in rows]
    return [(int(number), rest) for number, rest in split]


def _texts(text: str, table: str) -> Mapping[int, str]:
    return {number: _plain(rest.strip('"')) for number, rest in _rows(text, table)}


def _plain(text: str) -> str:
    """A text of XLA with its octal escapes decoded."""

    def byte(found: re.Match[bytes]) -> bytes:
        one = found[1]
        return bytes([int(one, 8)]) if len(one) == 3 else one

    return _ESCAPED.sub(byte, text.encode()).decode("utf-8", "replace")


def _fields(text: str, table: str) -> Mapping[int, Mapping[str, int]]:
    return {
        number: {name: int(value) for name, value in _ENTRY.findall(rest)}
        for number, rest in _rows(text, table)
    }
