"""flm.checkpoint.save_safetensors: from the leaves of a tree to tensors in files.

At any time a folder has the old model or the new one. Files are written in a hidden
folder, and renamed at the end. Those of a model in several files have a random tag in
their names, and the index names them: renaming it replaces the model.
`model.safetensors` counts before an index, so it is renamed last, or removed last.
Writers that rename at the same time take turns, by a lock on the folder. Each has a
lock on its hidden folder, so that the next one removes what a killed one left.
"""

import contextlib
import functools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flax_layoutmap._core.checksums import on_host
from flax_layoutmap._core.processes import Agreement
from flax_layoutmap._rules.records import Shape, show_shape
from flax_layoutmap._show.terminal import shown_progress
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.paths import Flat, Leaf
from flax_layoutmap.checkpoint._leaves import (
    Selection,
    check_bytes,
    floating_dtype,
    grouped,
    is_floating,
    leaf_of,
    mesh_of,
    no_value,
    problem_list,
)
from flax_layoutmap.checkpoint._mapping import UNMATCHED, Draft, Made, NameMapping
from flax_layoutmap.checkpoint._places import on_first_process
from flax_layoutmap.checkpoint._safetensors import (
    INDEX,
    NAMES,
    SINGLE,
    WRITTEN,
    Box,
    Lazy,
    box_shape,
    full,
    local,
)
from flax_layoutmap.checkpoint._steps import Step


def save_safetensors(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    mapping: Sequence[Any] | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    dtype: Any = None,
    max_file_bytes: float = 5e9,
    overwrite: bool = False,
    metadata: Mapping[str, str] | None = None,
    progress: bool | None = None,
) -> None:
    """Save a tree as safetensors, with the names and layout of Hugging Face.

    Every process of a job calls it with the same arguments. Process 0 writes one tensor
    after another, and holds at most two copies of one. Whatever ends the program, the
    folder has the old model or the new one; of several programs that save to it at
    once, the model of one.

    Args:
        path: a directory, which is created if needed and may hold other files
            (`config.json`); or one file, `….safetensors`.
        tree: NNX modules, States, Linen variables or any tree of arrays.
        mapping: the mapping of `restore_safetensors`; each step is undone. Of several
            names the first is written. The leaves made of one tensor must cover it.
        include: as in `restore`: which leaves are saved.
        exclude: as in `restore`.
        dtype: a floating-point dtype for all floating-point arrays; None keeps theirs.
        max_file_bytes: the maximal size of a file in a directory, unless one tensor is
            larger. Several files have an index, and a random tag in their names.
        overwrite: replace the model in the directory, or the file, when the new one is
            complete beside it. Other files stay; `model….safetensors` with the names
            that this function or `transformers` gives them are the model.
        metadata: texts for the headers, beside `{"format": "pt"}` for `transformers`.
        progress: as in `restore`.

    Example:
        >>> import tempfile, jax.numpy as jnp, flax_layoutmap as flm
        >>> path = tempfile.mkdtemp()
        >>> flm.checkpoint.save_safetensors(path, {"up": {"kernel": jnp.ones((8, 4))}})

    Plain JAX: `safetensors.flax.save_file({name: array, …}, file)`, with the whole
    model on one host.
    """
    place = local(path)
    check_bytes("max_file_bytes", max_file_bytes)
    names = NameMapping(mapping)
    selection = Selection(include, exclude)
    wanted = None if dtype is None else floating_dtype(dtype)
    with Agreement(f"saving {place}", mesh_of(tree, None)) as agreement:
        flat = flatten(tree)
        tensors, problems = _plan(flat, names, selection, wanted)
        for name, text in (metadata or {}).items():
            if not (isinstance(name, str) and isinstance(text, str)):
                problems.append(f"metadata={{{name!r}: {text!r}}}: give texts alone")
        writer = Writer(place, tensors, max_file_bytes)
        if jax.process_index() == 0:
            problems += writer.cannot_write(overwrite)
        if problems:
            raise problem_list(f"cannot save to {place}", problems)
        agreement.add(lambda: {"leaves": [f"{tensor}" for tensor in tensors]})
    _write(place, writer, {"format": "pt", **(metadata or {})}, progress)


# ---------------------------------------------------------------------------- plan


def _plan(
    flat: Flat, names: NameMapping, selection: Selection, dtype: Any
) -> tuple[list[Made], list[str]]:
    problems = selection.useless(flat.full_paths())
    draft = Draft()
    for record, value in zip(flat.records, flat.leaves, strict=True):
        if record.full_path in selection:
            try:
                draft.add(*_made(record, value, names, dtype))
            except ValueError as error:
                shape = show_shape(np.shape(value))
                problems.append(f"{record.full_path} {shape}: {error}")
    if not problems:
        draft.assemble()
        problems += draft.problems
    if not draft.tensors and not problems:
        problems.append("the tree holds no array")
    return [*draft.tensors.values()], problems


def _made(
    record: Leaf, value: Any, names: NameMapping, dtype: Any
) -> tuple[Made, Sequence[Step]]:
    """A leaf and the steps to undo; ValueError if it cannot be saved."""
    path = record.full_path
    leaf = leaf_of(path, value)
    if leaf is None or leaf.kind != "array":
        raise ValueError(
            f"{type(value).__qualname__ if leaf is None else leaf} is not an array of "
            "numbers; save nnx.state(model, nnx.Param), or leave it out with exclude="
        )
    if not path:
        raise ValueError("the tree is a single leaf; save it under a key: {'w': …}")
    if missing := no_value(value, "save_safetensors"):
        raise ValueError(missing)
    recipe = names.recipe_of(record)
    if recipe is None:
        raise ValueError(UNMATCHED)
    if any(step.key[0] == "mxfp4" for step in recipe.steps):
        raise ValueError(
            "cannot be saved in MXFP4; save it by a mapping without "
            "dequantize('mxfp4'), such as mappings.gpt_oss(mxfp4=False)"
        )
    if dtype is None or not is_floating(leaf.dtype):
        dtype = leaf.dtype
    if dtype not in NAMES:
        raise ValueError(f"safetensors cannot hold {dtype}; pass dtype=, or convert it")
    name, recipe = recipe.names[0], recipe.without_scales()
    if name == "__metadata__":
        raise ValueError("'__metadata__' names the texts of the header; rename it")
    recipe.shapes(name, leaf.shape)
    is_jax = isinstance(value, jax.Array)
    fetched = functools.partial(_fetched, value)
    values = Lazy(leaf.shape, fetched) if is_jax else np.asarray(value)
    return Made(name, dtype, values, path), recipe.steps


# ----------------------------------------------------- tensors, one after another


def _write(
    place: str, writer: "Writer", texts: Mapping[str, str], progress: bool | None
) -> None:
    """Bring each tensor to process 0, which writes it."""
    done, total = 0, sum(t.nbytes for held in writer.files.values() for t in held)

    def on_first(action: Callable[..., None], *args: Any) -> None:
        on_first_process(
            lambda: action(*args),
            lambda why: f"cannot save to {place}: {why}; what was there is unchanged",
        )

    try:
        on_first(writer.start, texts)
        with shown_progress(f"saving {place}", total, progress, lambda: done):
            for file, tensors in writer.files.items():
                for tensor in tensors:
                    values = np.asarray(tensor.values[full(tensor.shape)])
                    on_first(writer.add, file, tensor, values)
                    done += tensor.nbytes
            on_first(writer.finish)
    finally:
        if jax.process_index() == 0:
            writer.clean_up()


def _fetched(leaf: jax.Array, box: Box) -> np.ndarray:
    """A box of an array; a collective if several processes have parts of it."""
    if leaf.is_fully_addressable and box == full(leaf.shape):
        made = np.empty(leaf.shape, leaf.dtype)
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                made[shard.index] = on_host(shard.data)
        return made
    if not isinstance(leaf.sharding, NamedSharding):
        return np.asarray(leaf[box])
    starts = tuple(part.start for part in box)
    return np.asarray(_slicer(box_shape(box), leaf.sharding.mesh)(leaf, starts))


@functools.lru_cache(maxsize=256)
def _slicer(sizes: Shape, mesh: Any) -> Callable[..., jax.Array]:
    def cut(x: jax.Array, starts: Any) -> jax.Array:
        return jax.lax.dynamic_slice(x, starts, sizes)

    everywhere = NamedSharding(mesh, PartitionSpec())
    # JAX cannot slice sharded dims on Explicit axes.
    on_auto_axes = jax.sharding.auto_axes(cut, out_sharding=everywhere)
    return jax.jit(on_auto_axes, out_shardings=everywhere)


# --------------------------------------------------------------------------- files

_HIDDEN = re.compile(r"\..+\.safetensors\.[0-9a-f]{8}\.unfinished")


class Writer:
    """Writes a model to a place; `files` are its tensors by the names of the files."""

    def __init__(self, place: str, tensors: Sequence[Made], max_file_bytes: float):
        self._is_file = place.endswith(".safetensors")
        path = place if self._is_file else os.path.join(place, SINGLE)
        self._folder, single = os.path.split(path)
        self._tag = os.urandom(4).hex()
        hidden = f".{single}.{self._tag}.unfinished"
        self._hidden = os.path.join(self._folder, hidden)
        self._lock = contextlib.ExitStack()
        limit = math.inf if self._is_file else max_file_bytes
        groups = grouped(tensors, lambda tensor: tensor.nbytes, limit)
        # Wide dtypes come first, which aligns all.
        groups = [sorted(group, key=lambda t: -t.dtype.itemsize) for group in groups]
        names = [single]
        if len(groups) > 1:
            of = f"of-{len(groups):05}.safetensors"
            numbers = range(1, len(groups) + 1)
            names = [f"model-{self._tag}-{number:05}-{of}" for number in numbers]
        self.files = dict(zip(names, groups, strict=True))

    def cannot_write(self, overwrite: bool) -> list[str]:
        if os.path.lexists(self._folder) and not os.path.isdir(self._folder):
            return [f"{self._folder} is a file, not a directory"]
        names = [*self.files] if self._is_file else self._written()
        for path in (os.path.join(self._folder, name) for name in names):
            if os.path.lexists(path) and not overwrite:
                return [f"{path} exists; save to another path, or pass overwrite=True"]
        return []

    def _written(self) -> list[str]:
        names = os.listdir(self._folder) if os.path.isdir(self._folder) else []
        return sorted(name for name in names if WRITTEN.fullmatch(name))

    def start(self, texts: Mapping[str, str]) -> None:
        os.makedirs(self._folder, exist_ok=True)
        with _turn(self._folder):
            for left in filter(_HIDDEN.fullmatch, os.listdir(self._folder)):
                with _turn(os.path.join(self._folder, left), wait=False) as is_free:
                    if is_free:  # its writer was killed
                        shutil.rmtree(os.path.join(self._folder, left), True)
            os.mkdir(self._hidden)
            self._lock.enter_context(_turn(self._hidden))
        for file, tensors in self.files.items():
            self._append(file, _header(tensors, texts))

    def add(self, file: str, tensor: Made, values: np.ndarray) -> None:
        values = np.ascontiguousarray(values, tensor.dtype)
        self._append(file, values.reshape(-1).view(np.uint8).data)

    def finish(self) -> None:
        """Rename all files to their places, and remove an older model there."""
        names = [*self.files]
        if len(names) > 1:
            names.append(INDEX)
            self._append(INDEX, _index(self.files))
        for name in names:
            with open(os.path.join(self._hidden, name), "rb") as stream:
                os.fsync(stream.fileno())
        with _turn(self._folder):
            for name in names:
                os.replace(
                    os.path.join(self._hidden, name), os.path.join(self._folder, name)
                )
            for name in [] if self._is_file else self._written():
                with contextlib.suppress(FileNotFoundError):
                    if name not in names:
                        os.remove(os.path.join(self._folder, name))

    def clean_up(self) -> None:
        shutil.rmtree(self._hidden, ignore_errors=True)
        self._lock.close()

    def _append(self, file: str, content: Any) -> None:
        with open(os.path.join(self._hidden, file), "ab") as stream:
            stream.write(content)


@contextlib.contextmanager
def _turn(folder: str, wait: bool = True) -> Iterator[bool]:
    """Lock a folder, if the system can; yield whether it is locked."""
    try:
        import fcntl

        lock = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        yield False
        return
    is_locked = False
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = True
        yield is_locked
    finally:
        os.close(lock)


def _index(files: Mapping[str, Sequence[Made]]) -> bytes:
    total = sum(t.nbytes for tensors in files.values() for t in tensors)
    names = {t.name: file for file, tensors in files.items() for t in tensors}
    data = {
        "metadata": {"total_size": total},
        "weight_map": dict(sorted(names.items())),
    }
    return json.dumps(data, indent=2).encode()


def _header(tensors: Sequence[Made], texts: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(texts)}
    at = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
