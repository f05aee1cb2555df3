"""flm.checkpoint.restore_safetensors: tensors and a mapping as a source of leaves."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap._rules.records import Shape, show_shape
from flax_layoutmap._tree.paths import Leaf as TreeLeaf
from flax_layoutmap.checkpoint._join import (
    Missing,
    Options,
    Read,
    Target,
    Unexpected,
    opened,
    restored,
)
from flax_layoutmap.checkpoint._leaves import TYPES, Leaf, is_floating
from flax_layoutmap.checkpoint._mapping import UNMATCHED, NameMapping, Recipe
from flax_layoutmap.checkpoint._safetensors import (
    Array,
    Box,
    Tensor,
    full,
    local,
    mapped,
    read_headers,
)
from flax_layoutmap.checkpoint._steps import is_scaled


def restore_safetensors(
    path: str | os.PathLike[str],
    target: Any = None,
    *,
    layout_map: Any = None,
    mesh: Any = None,
    mapping: Sequence[Any] | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    dtype: Any = None,
    missing: Missing = "error",
    unexpected: Unexpected = "error",
    progress: bool | None = None,
) -> Any:
    r"""Restore safetensors (such as Hugging Face's) directly into shards.

    All is checked before any data is read; one `CheckpointError` lists every problem.
    Then each process reads its own shards from files that are mapped into memory: of
    narrow columns, whole pages.

    Args:
        path: a `.safetensors` file, a `model.safetensors.index.json`, or a directory
            with either (the file counts before the index) or with several files.
        target: as in `restore`. None: a dict of all tensors by their names, which are
            the paths that rules see.
        mapping: entries `(path, name)` or `(path, name, steps)`; the first whose
            regular expression matches a whole path counts. The name is that of the
            tensor, with `\1` or `\g<name>` for groups of the path, or a tuple of names,
            of which the first that exists is used. The steps turn the tensor into the
            leaf: see `flm.checkpoint.mappings`, which also has ready mappings.
            `(None, name)`, with a regular expression, lists tensors that no leaf needs.
            None maps a leaf `a/b/c` to the tensor `a.b.c`.
        missing: as in `restore`, for leaves without a tensor or an entry.
        unexpected: as in `restore`, for tensors that no leaf uses.

    The other arguments are those of `restore`.

    Returns:
        A tree of the target's type; or a dict by names.

    Example:
        >>> import tempfile, jax.numpy as jnp, flax_layoutmap as flm
        >>> path, linear = tempfile.mkdtemp(), flm.checkpoint.mappings.linear()
        >>> flm.checkpoint.save_safetensors(path, {"up": {"weight": jnp.ones((4, 8))}})
        >>> options = {"mapping": [("kernel", "up.weight", linear)]}
        >>> target = {"kernel": jnp.zeros((8, 4))}
        >>> restored = flm.checkpoint.restore_safetensors(path, target, **options)
        >>> restored["kernel"].shape
        (8, 4)

    Plain JAX: `jax.make_array_from_callback(shape, sharding, lambda index: …)` for each
    leaf, with `safetensors.safe_open(file, "np").get_slice(name)[index]`.
    """
    if mapping is not None and target is None:
        raise CheckpointError(
            "a mapping says what the leaves of a target are made of; without a target, "
            "the tensors come back under their own names"
        )
    return restored("restore_safetensors", _Tensors, Options(**locals()))


class _Tensors:
    """Tensors and a mapping as a source of a restore."""

    def __init__(self, options: Options) -> None:
        self.where, self.origins = local(options.path), {}
        self._names = NameMapping(options.mapping)
        self._tensors = read_headers(self.where)
        self._makers: dict[str, _Maker] = {}
        abstract = jax.ShapeDtypeStruct
        own = {n: abstract(t.shape, t.dtype) for n, t in self._tensors.items()}
        self.own = opened(own, is_own=True)

    def rule_set(self, mesh: Any) -> None:
        return None

    def lines(self) -> Sequence[str]:
        return [f"{t} {t.dtype} {t.offset}" for t in self._tensors.values()]

    def offer(
        self, target: Target, options: Options
    ) -> tuple[dict[str, Leaf | Exception], list[str]]:
        leaves, flat = dict[str, Leaf | Exception](), target.flat
        for leaf, value in zip(flat.records, flat.leaves, strict=True):
            path, shape = leaf.full_path, np.shape(value)
            try:
                self._makers[path] = maker = self._maker_of(leaf, shape)
                maker.check(shape)
                leaves[path] = maker.leaf(path, value)
            except (LookupError, ValueError) as error:
                leaves[path] = error
        if options.unexpected == "ignore" or target.is_own:
            return leaves, []
        used = {name for maker in self._makers.values() for name in maker.tensors}
        tied = "; where the model ties its output to the embedding, pass tied=True"
        return leaves, [
            f"{name} {show_shape(tensor.shape)}: no leaf of the target is made of this "
            "tensor; to leave it out, add (None, its name) to the mapping, or pass "
            f"unexpected='ignore'{tied if 'lm_head' in name else ''}"
            for name, tensor in self._tensors.items()
            if name not in used and not self._names.ignores(name)
        ]

    def _maker_of(self, leaf: TreeLeaf, shape: Shape) -> "_Maker":
        """The maker by the first name, of the leaf and of its tensors, that exists."""
        absent, tensors = [], self._tensors
        for path, full_path in zip(
            (leaf.path, *leaf.others), leaf.names(), strict=True
        ):
            recipe = self._names.recipe(path, full_path)
            if recipe is None:
                absent.append(UNMATCHED)
                continue
            for name in recipe.names:
                used, plain = recipe, recipe.without_scales()
                held = map(tensors.get, plain.shapes(name, shape))
                if not any(tensor and tensor.is_float8 for tensor in held):
                    used = plain
                needed = used.shapes(name, shape)
                missing = [tensor for tensor in needed if tensor not in tensors]
                if not missing:
                    return _Maker(used, name, {n: tensors[n] for n in needed})
                absent.append(f"there is no tensor {missing[0]!r}")
        raise LookupError(absent[0])

    def read(self, reads: Mapping[str, Read], options: Options) -> dict[str, Any]:
        values: dict[str, Any] = {}
        before: Any = None
        for path, read in reads.items():
            try:
                values[path] = _value(self._makers[path], read)
            except CheckpointError as error:
                raise CheckpointError(f"{path}: {error}") from error
            # Transfers overlap with the reads of the next leaf.
            jax.block_until_ready(before)
            before = values[path]
        return values


@dataclasses.dataclass(frozen=True)
class _Maker:
    recipe: Recipe
    name: str
    tensors: Mapping[str, Tensor]

    def leaf(self, path: str, value: Any) -> Leaf:
        """Describe the leaf, by the dtype that fits the target least."""
        kinds = {tensor.dtype for tensor in self.tensors.values()}
        if any(map(is_scaled, self.recipe.steps)):
            kinds = {np.dtype(jnp.bfloat16)}
        wanted = getattr(value, "dtype", None)
        dtype = min(kinds, key=lambda kind: (kind == wanted, is_floating(kind)))
        return Leaf(path, "array", np.shape(value), dtype)

    def check(self, shape: Shape) -> None:
        for name, size in self.recipe.shapes(self.name, shape).items():
            if self.tensors[name].shape != size:
                raise CheckpointError(
                    f"needs {self.tensors[name]} to have the shape {show_shape(size)}; "
                    f"{self._other_linear(shape)}build the target with the sizes of "
                    "the checkpoint, or change the steps of the mapping"
                )

    def _other_linear(self, shape: Shape) -> str:
        """The arguments of `linear` with which the tensors have the right shapes."""
        for kind in ("outputs", "inputs"):
            for count in range(1, len(shape)):
                recipe = self.recipe.with_linear(**{kind: count})
                shapes = recipe.shapes(self.name, shape)
                if all(self.tensors[n].shape == size for n, size in shapes.items()):
                    return f"write linear({kind}={count}), which fits; or "
        return ""


def _value(maker: _Maker, read: Read) -> Any:
    """A leaf in memory: a sharded array, a NumPy array, or a Python number."""
    result, sharding = read.result, read.sharding
    dtype = read.stored.dtype if result.is_python else result.dtype
    leaf = maker.recipe.leaf(
        maker.name, result.shape, dtype, lambda name: mapped(maker.tensors[name])
    )
    if sharding is None:
        value = _in_memory(leaf, full(result.shape), dtype)
        return TYPES[result.kind](value.item()) if result.is_python else value
    made: dict[str, np.ndarray] = {}

    def shard(index: Any) -> np.ndarray:
        box = tuple(
            slice(*part.indices(size)[:2])
            for part, size in zip(index, result.shape, strict=True)
        )
        if str(box) not in made:  # copies are read once
            made[str(box)] = _in_memory(leaf, box, dtype)
        return made[str(box)]

    # A process without a device of this mesh has no arrays, so pass the dtype.
    return jax.make_array_from_callback(result.shape, sharding, shard, dtype=dtype)


def _in_memory(leaf: Array, box: Box, dtype: Any) -> np.ndarray:
    """A box of a leaf, not a view of a file, in the order of the file.

    JAX transposes on the way to the device, faster than NumPy.
    """
    value = np.asarray(leaf[box])
    if value.flags.writeable and value.dtype == dtype:
        return value
    return np.array(value, dtype, order="K")
