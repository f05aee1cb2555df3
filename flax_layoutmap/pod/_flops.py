"""Count how often loops run, and the operations of matrix products."""

import functools
import math
import re

import numpy as np

from flax_layoutmap.pod._hlo_text import (
    Instruction,
    Module,
    called_by,
    operand_names,
)

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_COPIES = frozenset("bitcast convert copy copy-done copy-start reshape".split())

_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_GROUPS = re.compile(r"batch_group_count=(\d+)")
_WORK = re.compile(r" (?:dot|convolution|while|fusion|call|conditional|async-start)\(")


def trips(module: Module, where: str, loop: Instruction) -> int | None:
    """The trip count of a loop; None if unknown.

    The CPU compiler writes it down, but the TPU compiler does not. Then it is computed
    from the start (a constant in the initial tuple), the bound (the only constant of
    the condition) and the step (which the body adds). The step is 2 in loops of
    collective matrix products; the start is 1 if the first iteration was peeled off.
    """
    known = _KNOWN.search(loop.attributes)
    if known:
        return int(known[1])
    condition, body = called_by(loop.attributes)[:2]
    lines = module.computations[condition]
    used = {name for line in lines for name in operand_names(line.text)}
    ops = [module.instruction(condition, name) for name in used]
    elements = [op for op in ops if op is not None and op.opcode == "get-tuple-element"]
    compared = {op.number or 0 for op in elements}
    bounds = {bound for bound in _constants(module, condition) if bound > 0}
    below = any("direction=LT" in line.text for line in lines)
    if len(bounds) != 1 or len(compared) != 1 or not below:
        return None
    (at,), (end,) = compared, bounds
    initial = module.instruction(where, loop.operands[0])
    start = _constant(_operand(module, where, initial, at))
    added = _operand(module, body, module.root(body), at)
    if start is None or added is None or added.opcode != "add":
        return None
    sides = [_constant(_operand(module, body, added, side)) or 0 for side in (0, 1)]
    steps = [step for step in sides if step > 0]
    return max(0, -(-(end - start) // steps[0])) if len(steps) == 1 else None


def _constants(module: Module, computation: str) -> set[int]:
    """The integer constants of a computation and of the computations it calls."""
    constants: set[int] = set()
    for line in module.computations.get(computation, []):
        number = _constant(line.instruction)
        constants |= set() if number is None else {number}
        for name in called_by(line.text):
            constants |= _constants(module, name)
    return constants


def _constant(op: Instruction | None) -> int | None:
    return op.number if op is not None and op.opcode == "constant" else None


def _operand(
    module: Module, where: str, op: Instruction | None, at: int
) -> Instruction | None:
    """An operand of an instruction, or the value that it is a copy of."""
    while op is not None and at < len(op.operands):
        op, at = module.instruction(where, op.operands[at]), 0
        if op is None or op.opcode not in _COPIES:
            return op
    return None


def flops_of(module: Module) -> int:
    """Operations of a step: two for each multiplication in matrix products.

    Loop bodies count as often as they run, and all branches count.
    """

    @functools.cache
    def total(computation: str) -> int:
        count = 0
        for line in module.computations.get(computation, []):
            if not _WORK.search(line.text) or line.instruction is None:
                continue
            op = line.instruction
            if op.opcode in ("dot", "convolution"):
                count += _product(module, computation, op)
                continue
            times = trips(module, computation, op) if op.opcode == "while" else 1
            count += (times or 1) * sum(map(total, called_by(op.attributes)))
        return count

    return total(module.entry)


def _product(module: Module, computation: str, op: Instruction) -> int:
    given = [module.instruction(computation, name) for name in op.operands]
    left, right = [(each and each.shape) or () for each in given]
    if op.shape is None:
        return 0
    if op.opcode == "convolution":
        return 2 * _convolution(op, op.shape, left, right)
    dims = _CONTRACTED.search(op.attributes)
    summed = re.findall(r"\d+", dims[1]) if dims else []
    return 2 * math.prod(op.shape) * math.prod(left[int(dim)] for dim in summed)


def _convolution(
    op: Instruction,
    result: tuple[int, ...],
    given: tuple[int, ...],
    kernel: tuple[int, ...],
) -> int:
    """Multiplications of a convolution, excluding padding and holes.

    libtpu writes matrix products as convolutions, and their batch dims as spatial dims
    with holes.
    """
    labels = _LABELS.search(op.attributes)
    if labels is None or not given or not kernel:
        return 0
    left, right, out = labels.groups()
    window = _WINDOW.search(op.attributes)
    fields = dict(part.split("=") for part in window[1].split()) if window else {}
    count = kernel[right.index("i")]
    spatial = sorted(label for label in out if label.isdigit())
    for label, size in zip(out, result, strict=True):
        if label.isdigit():
            ends = given[left.index(label)], kernel[right.index(label)]
            size = _hits(fields, spatial.index(label), *ends, size)
        count *= size
    groups = _GROUPS.search(op.attributes)
    return count // (int(groups[1]) if groups else 1)


def _hits(fields: dict[str, str], at: int, given: int, kernel: int, places: int) -> int:
    """Pairs of output and kernel positions that read an element of the operand."""

    def number(name: str, default: int) -> int:
        return int(fields[name].split("x")[at]) if name in fields else default

    low = int(fields["pad"].split("x")[at].split("_")[0]) if "pad" in fields else 0
    stride, holes = number("stride", 1), number("lhs_dilate", 1)
    spread, end = number("rhs_dilate", 1), (given - 1) * holes
    if (stride, holes, spread, low) == (1, 1, 1, 0) and end >= places + kernel - 2:
        return places * kernel
    read = np.add.outer(np.arange(places) * stride, np.arange(kernel) * spread) - low
    return int(((read >= 0) & (read <= end) & (read % holes == 0)).sum())
