"""Leaves that follow a kernel: LoRA matrices, and scales of quantised kernels.

A LoRA adapter adds `A @ B` to a kernel: A has the kernel's in-dims and a rank, B the
rank and the kernel's out-dims. A scale has its kernel's shape with some dims of size 1,
divided into blocks, or missing. Names tell which leaves these are, shapes tell which
dims they have.

A rule that matches both a LoRA matrix and its kernel is meant for the kernel, and the
matrix follows it, dim by dim; a rule that matches only the matrix wins.
"""

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from flax_layoutmap._core.axes import divides
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._resolve.lay import Decisions, fits, picked
from flax_layoutmap._resolve.leaves import Dims, Kernels, Leaves
from flax_layoutmap._rules.matching import MatchedRules
from flax_layoutmap._rules.records import Decision, Shape, show_shape
from flax_layoutmap._tree.paths import Section

# Path of a module → the rest of the path, and the position, of each leaf below it.
Below = Mapping[str, Sequence[tuple[str, int]]]


def _paths_below(positions: Mapping[str, int], depth: int) -> Below:
    """The leaves below each module, at most `depth` modules deeper."""
    below: dict[str, list[tuple[str, int]]] = collections.defaultdict(list)
    for path, at in positions.items():
        below[path].append(("", at))
        end = len(path)
        for _ in range(depth + 1):
            end = max(path.rfind("/", 0, end), 0)
            below[path[:end]].append((path[end + 1 if end else 0 :], at))
            if not end:
                break
    return below


# ------------------------------------------------------------------ names of matrices
# `lora_a`, `lora_b` (Flax's `nn.LoRA`, below `lora/` in `LoRALinear`), `lora_A`,
# `lora_down`; `kernel_lora_a` (qwix, tunix, openpi) and `lora_kernel_a` (Keras), which
# name the kernel; `lora/a` (gemma); all of them also as modules, `lora_a/kernel`.

_MATRIX = re.compile(
    r"(?:(?P<before>.+)_)?lora_(?:(?P<within>.+)_)?(?P<side>[abAB]|down|up)"
)
_MODULE = re.compile(r"(?:(?P<before>.+)_)?lora(?:_(?P<after>.+))?", re.IGNORECASE)
_PARTNER = {"a": "b", "b": "a", "A": "B", "B": "A", "down": "up", "up": "down"}
# Names of the matrix if it is in a Dense module.
_WEIGHTS = ("kernel", "weight", "w")
# Names of kernels, which are preferred if several arrays have a fitting shape.
_KERNELS = ("kernel", "embedding", "weight", "w", "qvalue")
# How far below a module its kernel may be: `base_module/kernel/array/qvalue`.
_DEPTH = 3
# The attribute of `nnx.LoRA` for the module that it wraps.
_BASE = "base_module"


def _read_matrix(path: str) -> tuple[bool, str, list[str]] | None:
    """Read the path of a LoRA matrix; None for any other path.

    Returns:
        Whether it is the matrix A; the path of the other matrix; and where the kernel
        may be, most likely first: a leaf, or the module that holds it.
    """
    *holder, name = path.split("/")
    weight = []
    if holder and name in _WEIGHTS:
        name, weight = holder.pop(), [name]
    parent, module = holder[:-1], _MODULE.fullmatch(holder[-1]) if holder else None
    match, side, kernel = _MATRIX.fullmatch(name), name, None
    if match is not None:
        side, kernel = match["side"], match["before"] or match["within"]
    elif module is None or name not in _PARTNER:
        return None
    places = [[*holder, kernel]] if kernel else [holder]
    if module is not None and not kernel:
        sibling = module["before"] or module["after"]
        places += [[*parent, sibling], parent] if sibling else [parent]
    partner = [*holder, name.removesuffix(side) + _PARTNER[side], *weight]
    is_a = side in ("a", "A", "down")
    return is_a, "/".join(partner), list(map("/".join, places))


def find_adapters(leaves: Leaves) -> tuple[dict[int, Kernels], dict[int, str]]:
    """Find LoRA matrices by paths and shapes; see `Leaves.adapters` and `.plain`."""
    adapters: dict[int, Kernels] = {}
    plain: dict[int, str] = {}
    text = "\n".join(leaves.flat.paths)
    if "lora" in text or "LoRA" in text or _BASE in text:
        for section in leaves.flat.sections:
            if section.role == "parameter":
                adapters |= _matrices_in(section, leaves)
                plain |= _unwrapped(section, leaves, adapters)
    return adapters, plain


def _matrices_in(section: Section, leaves: Leaves) -> dict[int, Kernels]:
    """The LoRA matrices of a section with the kernels that they fit."""
    flat, shapes = leaves.flat, leaves.shapes
    paths = {flat.paths[at]: at for at in range(section.start, section.stop)}
    read = {at: _read_matrix(path) for path, at in paths.items() if len(shapes[at]) > 1}
    matrices = {at: matrix for at, matrix in read.items() if matrix is not None}
    skipped = matrices.keys() | flat.fixed
    others = {path: at for path, at in paths.items() if at not in skipped}
    below = _paths_below(others, _DEPTH)
    adapters: dict[int, Kernels] = {}
    for at, (is_a, partner, places) in matrices.items():
        pair = shapes[at], shapes[paths[partner]] if partner in paths else None
        fitting = (_kernels_at(below[place], shapes, *pair, is_a) for place in places)
        adapters[at] = next(filter(None, fitting), ())
    return adapters


def _unwrapped(
    section: Section, leaves: Leaves, adapters: Mapping[int, Kernels]
) -> dict[int, str]:
    """The paths that leaves had before LoRA modules were put around them."""
    paths = leaves.flat.paths[section.start : section.stop]
    known = set(paths)
    plain: dict[int, str] = {}
    for at, path in enumerate(paths, section.start):
        *modules, name = path.split("/")
        if _BASE in modules and at not in adapters:
            shorter = "/".join([*(part for part in modules if part != _BASE), name])
            if shorter not in known:
                plain[at] = shorter
    return plain


def _kernels_at(
    candidates: Sequence[tuple[str, int]],
    shapes: Sequence[Shape],
    shape: Shape,
    partner: Shape | None,
    is_a: bool,
) -> Kernels:
    """The nearest of the candidates that a matrix fits by its shape."""
    fitting = [
        (rest, at, dims)
        for rest, at in candidates
        for dims in _dims_of_matrix(shapes[at], shape, partner, is_a)
    ]
    depth = min((rest.count("/") for rest, _, _ in fitting), default=0)
    nearest = [entry for entry in fitting if entry[0].count("/") == depth]
    named = [entry for entry in nearest if entry[0].rpartition("/")[2] in _KERNELS]
    return [(at, dims) for _, at, dims in named or nearest]


# ----------------------------------------------------------------- shapes of matrices


@functools.lru_cache(maxsize=1024)
def _dims_of_matrix(
    kernel: Shape, matrix: Shape, partner: Shape | None, is_a: bool
) -> tuple[Dims, ...]:
    """The dims of a kernel that a LoRA matrix may have, by the shapes.

    Leading dims of the kernel and both matrices are stacked layers; leading dims of the
    matrices only are not sharded. Several in-dims or out-dims may be flattened into
    one, which has the layout of the first. If sizes are equal, the in-dims come first,
    as in the layers of Flax.
    """
    a, b = (matrix, partner) if is_a else (partner, matrix)
    in_order: dict[Dims, None] = {}
    others: dict[Dims, None] = {}
    for lead, into, out in _splits(len(kernel)):
        of_a = a and _dims_under(kernel, lead, into, a, len(a) - 1)
        of_b = b and _dims_under(kernel, lead, out, b, lead)
        if (a and not of_a) or (b and not of_b) or (a and b and a[-1] != b[lead]):
            continue
        if dims := of_a if is_a else of_b:
            (in_order if into[-1] < out[0] else others)[dims] = None
    if in_order or others or len(matrix) < 3:
        return tuple(in_order or others)
    inner = _dims_of_matrix(kernel, matrix[1:], partner and partner[1:], is_a)
    return tuple((None, *dims) for dims in inner)


def _splits(ndim: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Ways to split a kernel's dims: number of stacked dims, in-dims, out-dims."""
    for lead in range(max(0, ndim - 1)):
        rest = range(lead, ndim)
        for count in range(1, len(rest)):
            for into in itertools.combinations(rest, count):
                yield lead, into, tuple(dim for dim in rest if dim not in into)


def _dims_under(
    kernel: Shape, lead: int, dims: tuple[int, ...], matrix: Shape, rank: int
) -> Dims | None:
    """The dims of a matrix with its rank at a position; None if they do not fit."""
    sizes = tuple(kernel[dim] for dim in dims)
    shape = matrix[:rank] + matrix[rank + 1 :]
    for merged, inner in ((dims, sizes), (dims[:1], (math.prod(sizes),))):
        if shape == kernel[:lead] + inner:
            whole = (*range(lead), *merged)
            return (*whole[:rank], None, *whole[rank:])
    return None


# ------------------------------------------------------------------------- decisions

_NO_KERNEL = (
    "it is a LoRA matrix whose kernel is not in the tree: resolve the whole model, or "
    "add a rule for it"
)


def lay_adapter(made: Decisions, at: int, kernels: Kernels) -> Decision:
    """The decision for a LoRA matrix, after those for the kernels."""
    row, shape, why = made.rows[at], made.leaves.shapes[at], _NO_KERNEL
    if row.reason not in ("rule", "no rule"):  # an exact key, or metadata
        return row
    if kernels:
        kernel, dims = kernels[0]
        base = made.rows[kernel]
        by_match = made.by_match(_match_alone(made, at, kernel), shape)
        if by_match.matched:
            return by_match
        if base.reason == "no rule" and not base.problem:
            return row
        if len({picked(of, made.rows[other].dims) for other, of in kernels}) == 1:
            side = "A has its in-dim" if dims[-1] is None else "B has its out-dim"
            plural = "s" * (len(dims) - dims.count(None) > 1)
            return _follow(made, at, kernel, dims, f"LoRA {side}{plural}")
        listed = dict.fromkeys(_label(made, other) for other, _ in kernels)
        why = (
            "it is a LoRA matrix, and its shape does not tell which dims of "
            f"{' or '.join(listed)} it has: add a rule for it"
        )
    if row.problem:
        return dataclasses.replace(row, problem=f"{row.problem}; {why}")
    if row.reason == "no rule":
        return dataclasses.replace(row, fallback=why)
    return made.trouble(why, shape, row.matched) if kernels else row


def _match_alone(made: Decisions, at: int, kernel: int) -> MatchedRules:
    """Of the rules that match a LoRA matrix, those that do not match its kernel."""
    flat, matcher = made.leaves.flat, made.rules.matcher
    positions, key = matcher.match(flat.forms(at))
    for path in (None, made.leaves.plain.get(kernel)):
        of_kernel = matcher.matching_patterns(flat.forms(kernel, path))
        positions = tuple(rule for rule in positions if rule not in of_kernel)
    return MatchedRules(positions, key if key in positions else None)


def _label(made: Decisions, at: int) -> str:
    return f"{made.leaves.flat.paths[at]} {show_shape(made.leaves.shapes[at])}"


def _follow(
    made: Decisions,
    at: int,
    kernel: int,
    dims: Dims,
    note: str,
    rule: int | None = None,
) -> Decision:
    """The decision for a leaf with these dims of a kernel; `rule` is its rule."""
    path, base = made.leaves.flat.paths[kernel], made.rows[kernel]
    axes = picked(dims, base.dims)
    return made.lay(
        TensorLayout(axes, base.mesh, memory_kind=base.memory_kind),
        made.leaves.shapes[at],
        f"the layout of its kernel {path!r}",
        "follows kernel" if rule is None else "rule",
        rule=rule,
        owner=path if rule is None else None,
        matched=made.rows[at].matched,
        note=note,
    )


_SCALE = re.compile(r"scale|zero|offset|absmax|step_size", re.IGNORECASE)


def lay_scales(made: Decisions) -> None:
    """Lay out quantisation scales, among the leaves that do not fit their rule.

    A leaf is the scale of another leaf beside it, or beside the module that holds it,
    if the same rule matches both, its shape fits, and its name says so or the other has
    8 bits or fewer. In any other leaf an indivisible dim is an error.
    """
    rows, flat, dtypes = made.rows, made.leaves.flat, made.leaves.dtypes
    unfit = [at for at, row in enumerate(rows) if row.problem or row.fallback]
    if not any(rows[at].matched for at in unfit):
        return
    full, roles = flat.full_paths(), enumerate(flat.roles())
    below = _paths_below({full[x]: x for x, role in roles if role == "parameter"}, 1)
    for at in unfit:
        matched = rows[at].matched
        winner = made.rules.winner(made.rules.rules, matched) if matched else None
        if winner is None or rows[at].reason not in ("rule", "exact key", "no rule"):
            continue
        parts = full[at].split("/")
        is_named = any(map(_SCALE.search, parts[-2:]))
        modules = "/".join(parts[:-1]), "/".join(parts[:-2])
        for _, kernel in itertools.chain(*map(below.__getitem__, modules)):
            base, is_small = rows[kernel], getattr(dtypes[kernel], "itemsize", 8) == 1
            is_alike = kernel != at and base.rule == winner and not base.problem
            if is_alike and (is_named or is_small):
                if scale := _as_scale(made, at, kernel, winner):
                    rows[at] = scale
                    break


def _as_scale(made: Decisions, at: int, kernel: int, winner: int) -> Decision | None:
    """The decision for the scale of a kernel; None where the shapes do not fit."""
    shape, of = made.leaves.shapes[at], made.leaves.shapes[kernel]
    base = made.rows[kernel]
    if len(shape) == len(of):
        if base.mesh is None or not all(map(_is_in_blocks, of, shape)):
            return None
        sizes = base.mesh.axis_sizes
        whole = [
            dim
            for dim, axes in enumerate(base.dims)
            if divides(shape[dim : dim + 1], (axes,), sizes)
        ]
        dims = tuple(None if dim in whole else dim for dim in range(len(shape)))
        ones = [dim for dim in whole if shape[dim] == 1]
        texts = [f"{_dims(ones)} of size 1"] if ones else []
        texts += [f"dim {d} of {shape[d]} blocks" for d in whole if d not in ones]
        note = f"{' and '.join(texts)} replicated: it is the scale of "
        note += _label(made, kernel)
        return _follow(made, at, kernel, dims, note, winner) if whole else None
    if fits(made.rules.rules[winner].layout, len(shape)):
        return None
    choices = {
        picked(dims, base.dims): dims
        for dims in itertools.combinations(range(len(of)), len(shape))
        if tuple(of[dim] for dim in dims) == shape
    }
    if not choices:
        return None
    dims = max(choices.values())
    note = f"as its scale, it has its {_dims(dims)}"
    if len(choices) > 1:
        fitting = sorted({*itertools.chain(*choices.values())})
        note += f" ({_dims(fitting)} fit: the last, as the output dims)"
    return _follow(made, at, kernel, dims, note)


def _is_in_blocks(size: int, blocks: int) -> bool:
    """Whether a dim divides into this many blocks, equal except maybe the last."""
    return blocks > 0 and -(-size // -(-size // blocks)) == blocks


def _dims(dims: Sequence[int]) -> str:
    return f"dim{'s' * (len(dims) > 1)} {' and '.join(map(str, dims))}"
