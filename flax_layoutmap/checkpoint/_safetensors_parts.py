"""What leaves give to the tensors that are saved, and all that is wrong with it."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from flax_layoutmap._rules.records import Shape, show_shape
from flax_layoutmap._tree.paths import Flat
from flax_layoutmap.checkpoint._leaves import is_floating, leaf_of
from flax_layoutmap.checkpoint._mapping import NameMapping, Recipe
from flax_layoutmap.checkpoint._mapping_blocks import Block, Range
from flax_layoutmap.checkpoint._options import Selection
from flax_layoutmap.checkpoint._safetensors_file import NAMES


@dataclasses.dataclass(frozen=True)
class Part:
    """What one leaf gives to a tensor.

    Attributes:
        leaf: position of the leaf.
        path: its path.
        index: the box of the leaf that is needed.
        blocks: which of its elements goes where.
    """

    leaf: int
    path: str
    index: tuple[Range, ...]
    blocks: tuple[Block, ...]


@dataclasses.dataclass
class Made:
    """A tensor to save.

    Attributes:
        name: its name.
        dtype: its dtype.
        shape: its shape.
        parts: what the leaves give to it.
    """

    name: str
    dtype: Any
    shape: Shape
    parts: list[Part] = dataclasses.field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass
class SavePlan:
    """What to save, and what is wrong.

    Attributes:
        tensors: the tensors, in the order of the tree.
        problems: one text each; nothing is written unless this is empty.
    """

    tensors: list[Made] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)


def plan_to_save(
    flat: Flat, names: NameMapping, selection: Selection, dtype: Any
) -> SavePlan:
    """Plans which tensors to make of the leaves of a tree.

    Args:
        flat: the flattened tree.
        names: what its leaves are made of.
        selection: which leaves to save.
        dtype: the dtype for floating-point arrays, or None.
    """
    plan = SavePlan(problems=selection.useless(flat.full_paths()))
    tensors: dict[str, Made] = {}
    columns = zip(flat.full_paths(), flat.paths, flat.leaves, strict=True)
    for at, (path, own_path, value) in enumerate(columns):
        if path not in selection:
            continue
        problem = _value_problem(path, value)
        if problem is not None:
            plan.problems.append(f"{path}: {problem}")
            continue
        source = names.source(own_path, path)
        if source is None:
            plan.problems.append(
                f"{path} {show_shape(value.shape)}: no entry of the mapping matches; "
                "add (path, name of the tensor), or leave it out with exclude="
            )
            continue
        try:
            recipe = source.recipes(tuple(value.shape))[0]
        except ValueError as error:
            plan.problems.append(
                f"{path} {show_shape(value.shape)}: the mapping's steps do not make "
                f"this shape: {error}"
            )
            continue
        own = np.dtype(value.dtype).newbyteorder("=")
        kind = dtype if dtype is not None and is_floating(own) else own
        if kind not in NAMES:
            plan.problems.append(
                f"{path}: safetensors cannot hold {kind}; pass dtype=, or convert it"
            )
            continue
        _add(plan, tensors, at, path, recipe, kind)
    if not tensors and not plan.problems:
        plan.problems.append("the tree holds no array")
    plan.tensors = list(tensors.values())
    if not plan.problems:
        plan.problems += [text for t in plan.tensors for text in _coverage(t)]
    return plan


def _value_problem(path: str, value: Any) -> str | None:
    """Why a leaf cannot be saved, or None."""
    leaf = leaf_of(path, value)
    if leaf is None or leaf.kind != "array":
        kind = type(value).__qualname__ if leaf is None else str(leaf)
        return (
            f"{kind} is no array of numbers; save nnx.state(model, nnx.Param), or "
            "leave it out with exclude="
        )
    if not path:
        return "the tree is a single leaf; save it under a key: {'name': leaf}"
    if isinstance(value, Tracer):
        return "it is traced; call save_safetensors outside of jit"
    if isinstance(value, jax.ShapeDtypeStruct):
        return "it is abstract and has no value; make it first, with flm.create"
    if isinstance(value, jax.Array) and value.is_deleted():
        return "it was deleted, as by donating it to jit; save what jit returned"
    if isinstance(value, jax.Array) and jax.process_count() > 1:
        if value.is_fully_addressable or not isinstance(value.sharding, NamedSharding):
            return (
                "only this process has it; place it on the mesh of all processes with "
                "layout_map.place(tree)"
            )
    return None


def _add(
    plan: SavePlan,
    tensors: dict[str, Made],
    at: int,
    path: str,
    recipe: Recipe,
    dtype: Any,
) -> None:
    """Notes what a leaf gives to its tensors."""
    blocks: dict[str, list[Block]] = {name: [] for name in recipe.shapes}
    for block in recipe.blocks:
        blocks[block.tensor].append(block)
    for name, own in blocks.items():
        shape = recipe.shapes[name]
        tensor = tensors.setdefault(name, Made(name, dtype, shape))
        if (tensor.dtype, tensor.shape) != (dtype, shape):
            plan.problems.append(
                f"{path}: would make the tensor {name!r} {dtype} {show_shape(shape)}, "
                f"and {tensor.parts[0].path} {tensor.dtype} {show_shape(tensor.shape)}"
            )
            continue
        low = [min(at) for at in zip(*(block.start for block in own), strict=True)]
        ends = [
            [s + n for s, n in zip(block.start, block.shape, strict=True)]
            for block in own
        ]
        high = [max(at) for at in zip(*ends, strict=True)]
        index = tuple(zip(low, high, strict=True))
        tensor.parts.append(Part(at, path, index, tuple(own)))


def _coverage(tensor: Made) -> list[str]:
    """A problem if some elements of a tensor come from no leaf, or from two."""
    blocks = [block for part in tensor.parts for block in part.blocks]
    total = math.prod(tensor.shape)
    whole = len(blocks) == 1 and math.prod(blocks[0].shape) == total
    if whole or total == 0:
        return []
    # Elements that always go together are counted as one.
    views, unit = [], total
    for block in blocks:
        factors = sorted(
            (f for dim in block.dims for f in dim if f[0] > 1), key=lambda f: -f[1]
        )
        while len(factors) > 1 and factors[-1][0] * factors[-1][1] == factors[-2][1]:
            (outer, _), (inner, stride) = factors[-2:]
            factors[-2:] = [(outer * inner, stride)]
        run = factors[-1][0] if factors and factors[-1][1] == 1 else 1
        unit = math.gcd(unit, run, block.offset, *(s for _, s in factors if s > 1))
        views.append((block.offset, factors))
    count: Any = np.zeros(total // unit, np.int32)
    for offset, factors in views:
        shape = [n // unit if s == 1 else n for n, s in factors] or [1]
        steps = [(1 if s == 1 else s // unit) * 4 for _, s in factors] or [4]
        view = np.ndarray(shape, np.int32, count, offset // unit * 4, steps)
        view += 1
    paths = ", ".join(dict.fromkeys(part.path for part in tensor.parts))
    if (count > 1).any():
        return [
            f"{paths}: some elements of the tensor {tensor.name!r} would be written "
            "twice; give one of the leaves another name, or leave it out with exclude="
        ]
    if (count == 0).any():
        return [
            f"{paths}: make only a part of the tensor {tensor.name!r} "
            f"{show_shape(tensor.shape)}; the mapping lacks leaves for the rest"
        ]
    return []
