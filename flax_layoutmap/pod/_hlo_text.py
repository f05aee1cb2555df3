"""Parse the text of a compiled program: computations, instructions, types.

Instructions that cannot be read are None, so that callers can count them.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping

# Text between parentheses, with up to four nested levels.
_INSIDE = r"[^()]*"
for _ in range(4):
    _INSIDE = rf"[^()]*(?:\({_INSIDE}\)[^()]*)*"
_LINE = re.compile(
    rf"\s*(ROOT )?%?([\w.\-]+) = (\({_INSIDE}\)|[^\s(]\S*) +"
    rf"([a-z][\w\-]*)\(({_INSIDE})\)(.*)",
    re.DOTALL,
)
_COMPUTATION = re.compile(
    r"^(ENTRY )?%?([\w.\-]+) .*->.*\{\s*\n((?:[^}].*\n)*)", re.MULTILINE
)
_RESULT = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = ")
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="?([^",}]+)')
# jaxlib 0.12 writes `%name#1` for an element of a tuple as an operand.
_NAME = re.compile(r"%([\w.\-#]+)")
_NUMBER = re.compile(r"-?\d+")
_INDEX = re.compile(r", index=(\d+)")
_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")
# `bf16[4,8]{1,0:T(8,128)}`, and the punctuation and comments of tuples.
_TYPE = re.compile(
    r"([a-z]\w*)\[((?:<?=?\d+,?)*)\](?:\{[^{}]*\})?|[()]|/\*.*?\*/|[,\s]"
)

# Called computations: `calls=%one`, `branch_computations={%one, %two}`.
_REFERENCE = re.compile(r"([\w\-]+)=(%[\w.\-]+|\{%[^{}]*\})")
_COMMUNICATES = re.compile(
    r"[\s)}](?:(?:all|collective|reduce-scatter|ragged-all)(?:-[a-z]+)*|send|recv)\("
)
# Custom calls that communicate, judging by their names.
_CALLS_OUT = re.compile(
    r'custom_call_target="[^"]*(?:all_?reduce|all_?gather|all_?to_?all|'
    r'reduce_?scatter|collective_?permute|ragged|remote)[^"]*"',
    re.IGNORECASE,
)
# An operation with groups or pairs of devices communicates, whatever its name.
_GROUPED = re.compile(r"\b(?:replica_groups|source_target_pairs)=")

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
    """NumPy's name of an element type, and its number of bits.

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
    """The type of an array: NumPy's name of its dtype, and its shape."""

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
    # Position of a parameter, index of a tuple element, or an integer constant.
    number: int | None = None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of its result; None for a tuple."""
        return self.type.shape if isinstance(self.type, Array) else None


@dataclasses.dataclass(eq=False)
class Line:
    """A line of a program, parsed on first use."""

    text: str

    @functools.cached_property
    def name(self) -> str:
        """Name of the instruction; empty if the line is not an instruction."""
        result = _RESULT.match(self.text)
        return result[1] if result else ""

    @functools.cached_property
    def instruction(self) -> Instruction | None:
        """The instruction; None if it cannot be read."""
        return _read_line(self.text)

    @functools.cached_property
    def communicates(self) -> bool:
        """Whether the line moves data between devices, or may and cannot be read."""
        patterns = (_COMMUNICATES, _CALLS_OUT, _GROUPED)
        if not any(pattern.search(self.text) for pattern in patterns):
            return False
        op = self.instruction
        if op is None or op.opcode == "custom-call":
            return op is None or bool(_CALLS_OUT.search(self.text))
        named = _COMMUNICATES.match(f" {op.opcode}(")
        return bool(named or _GROUPED.search(op.attributes))


@dataclasses.dataclass(frozen=True)
class Module:
    """A program: its computations by name."""

    computations: Mapping[str, list[Line]]
    entry: str
    text: str

    @property
    def partitions(self) -> int | None:
        """The number of devices of the program; None if unknown."""
        written = _PARTITIONS.search(self.text[: self.text.find("\n")])
        return int(written[1]) if written else None

    @functools.cached_property
    def by_name(self) -> dict[tuple[str, str], Line]:
        """Computation and name of an instruction → its line."""
        return {
            (computation, line.name): line
            for computation, lines in self.computations.items()
            for line in lines
        }

    def instruction(self, computation: str, name: str) -> Instruction | None:
        """The instruction of this name; `name#1` is an element of its tuple."""
        name, *indices = name.split("#")
        line = self.by_name.get((computation, name))
        op = None if line is None else line.instruction
        for index in map(int, indices):
            if op is None:
                return None
            parts = () if isinstance(op.type, Array) else op.type
            kind = parts[index] if index < len(parts) else ()
            element = f"{name}#{index}"
            opcode = "get-tuple-element"
            op = Instruction(element, kind, opcode, (name,), "", False, index)
            name = element
        return op

    def changed(self, made: Mapping[Line, Instruction]) -> "Module":
        """The program with some lines replaced by new instructions."""
        computations = {
            name: [_written(made[line]) if line in made else line for line in lines]
            for name, lines in self.computations.items()
        }
        return dataclasses.replace(self, computations=computations)

    @functools.cached_property
    def sends(self) -> dict[tuple[str, str], Instruction]:
        """Computation and rendezvous → the `send` to another slice."""
        return {
            (computation, name): line.instruction
            for computation, lines in self.computations.items()
            for line in lines
            if " send(" in line.text and line.instruction is not None
            if (name := rendezvous(line.text))
        }

    def parameters(self) -> list[Array]:
        """The arguments of the program in order; their shards, if it is partitioned."""
        lines = self.computations.get(self.entry, ())
        ops = [line.instruction for line in lines if " parameter(" in line.text]
        ops = [op for op in ops if op is not None and op.opcode == "parameter"]
        types = {op.number or 0: op.type for op in ops}
        return arrays_of(tuple(types[at] for at in sorted(types)))

    def root(self, computation: str) -> Instruction | None:
        """The result of a computation."""
        for line in reversed(self.computations.get(computation, [])):
            if line.text.lstrip().startswith("ROOT "):
                return line.instruction
        return None


def rendezvous(attributes: str) -> str:
    """The name that a `send` to another slice and its `recv` share, or `""`."""
    name = _RENDEZVOUS.search(attributes)
    return name[1] if name else ""


def split(text: str) -> Module:
    """Split a program into its computations."""
    computations: dict[str, list[Line]] = {}
    entry = ""
    for is_entry, name, body in _COMPUTATION.findall(text):
        lines = [line for line in body.splitlines() if " = " in line]
        computations[name] = list(map(Line, lines))
        entry = name if is_entry else entry
    return Module(computations, entry, text)


def _written(op: Instruction) -> Line:
    """A line for an instruction, without its type."""
    root, operands = "ROOT " * op.root, ", ".join(f"%{name}" for name in op.operands)
    line = Line(f"{root}%{op.name} = {op.opcode}({operands}){op.attributes}")
    line.__dict__["instruction"] = op
    return line


def _read_line(text: str) -> Instruction | None:
    parts = _LINE.fullmatch(text)
    kind = _read_type(parts[3]) if parts else None
    if parts is None or kind is None:
        return None
    root, name, _, opcode, operands, attributes = parts.groups()
    number = _INDEX.match(attributes) or _NUMBER.fullmatch(operands)
    place = int(number[number.lastindex or 0]) if number else None
    names = tuple(_NAME.findall(operands))
    return Instruction(name, kind, opcode, names, attributes, bool(root), place)


def _read_type(written: str) -> Type | None:
    """Read `bf16[4,8]{1,0}` or a tuple of types; None for other forms."""
    open_tuples: list[list[Type]] = [[]]
    for token in _TYPE.finditer(written):
        if token[0] == "(":
            open_tuples.append([])
        elif token[0] == ")":
            parts = tuple(open_tuples.pop())
            open_tuples[-1].append(parts)
        elif token[1] in ("token", "opaque"):
            open_tuples[-1].append(())
        elif token[1]:
            known = _element_type(token[1])
            if known is None:
                return None
            shape = tuple(map(int, re.findall(r"\d+", token[2])))
            size = math.ceil(math.prod(shape) * known[1] / 8)
            open_tuples[-1].append(Array(known[0], shape, size))
    types = open_tuples[0]
    return types[0] if types and not _TYPE.sub("", written) else None


def arrays_of(kind: Type) -> list[Array]:
    """The arrays of a type, in order."""
    if isinstance(kind, Array):
        return [kind]
    return [array for part in kind for array in arrays_of(part)]


def called_by(text: str) -> list[str]:
    """The names that an instruction refers to, other than its operands."""
    if "=%" not in text and "={%" not in text:
        return []
    return [
        name
        for key, written in _REFERENCE.findall(text)
        if key != "control-predecessors"
        for name in _NAME.findall(written)
    ]


def operand_names(text: str) -> list[str]:
    """Names of the operands on a line, and of the computations that it calls."""
    return _NAME.findall(text.partition(" = ")[2])
