"""Count the operations of matrix products and convolutions in a program of XLA."""

import functools
import math
import re

from flax_layoutmap.pod._hlo_text import Array, Instruction, Module, called_by
from flax_layoutmap.pod._hlo_values import trips

_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_GROUPS = re.compile(r"batch_group_count=(\d+)")
_WORK = re.compile(r" (?:dot|convolution|while|fusion|call|conditional|async-start)\(")


def flops_of(module: Module) -> int:
    """Operations of a step: two for each multiplication of a product.

    The bodies of loops count as often as they run, and all branches count.
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
            inner = (name for name in called_by(op.attributes))
            count += (times or 1) * sum(map(total, inner))
        return count

    return total(module.entry or "")


def _product(module: Module, computation: str, op: Instruction) -> int:
    shapes = [_shape(module, computation, name) for name in op.operands[:2]]
    if len(shapes) < 2 or not isinstance(op.type, Array):
        return 0
    size = math.prod(op.type.shape)
    if op.opcode == "dot":
        dims = _CONTRACTED.search(op.attributes)
        numbers = [int(dim) for dim in dims[1].split(",") if dim] if dims else []
        return 2 * size * math.prod(shapes[0][dim] for dim in numbers)
    return 2 * _convolution(op, size, *shapes)


def _shape(module: Module, computation: str, name: str) -> tuple[int, ...]:
    op = module.instruction(computation, name)
    return op.type.shape if op is not None and isinstance(op.type, Array) else ()


def _convolution(
    op: Instruction, size: int, given: tuple[int, ...], kernel: tuple[int, ...]
) -> int:
    """Multiplications of a convolution, without those with padding or holes.

    libtpu writes matrix products as convolutions, and their batch dims as spatial dims
    with holes.
    """
    labels = _LABELS.search(op.attributes)
    if labels is None or not given or not kernel:
        return 0
    assert isinstance(op.type, Array)
    left, right, out = labels.groups()
    window = _WINDOW.search(op.attributes)
    fields = dict(part.split("=") for part in window[1].split()) if window else {}
    features = kernel[right.index("i")]
    spatial = sorted(label for label in out if label.isdigit())
    used = 1
    for at, label in enumerate(spatial):
        ends = given[left.index(label)], kernel[right.index(label)]
        places = op.type.shape[out.index(label)]
        size //= max(places, 1)
        used *= _hits(fields, at, *ends, places)
    groups = _GROUPS.search(op.attributes)
    return size * features * used // (int(groups[1]) if groups else 1)


def _hits(fields: dict[str, str], at: int, given: int, kernel: int, places: int) -> int:
    """Pairs of an output's and a kernel's place that read an element of the operand."""

    def number(name: str, default: int) -> int:
        return int(fields[name].split("x")[at]) if name in fields else default

    low = int(fields["pad"].split("x")[at].split("_")[0]) if "pad" in fields else 0
    stride, holes = number("stride", 1), number("lhs_dilate", 1)
    spread, end = number("rhs_dilate", 1), (given - 1) * holes
    if (stride, holes, spread, low) == (1, 1, 1, 0) and end >= places + kernel - 2:
        return places * kernel
    count = 0
    for place in range(places):
        for tap in range(kernel):
            read = place * stride + tap * spread - low
            count += 0 <= read <= end and read % holes == 0
    return count
