"""Any slice of any mapping steps: NumPy's values, and the planned bytes."""

import itertools
import math
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import flax_layoutmap as flm
from flax_layoutmap.checkpoint import _safetensors_read, mappings
from flax_layoutmap.checkpoint._mapping import Source
from flax_layoutmap.checkpoint._mapping_blocks import pieces_of, range_boxes
from flax_layoutmap.checkpoint._mapping_steps import Merge, Regroup, Split, Stack
from flax_layoutmap.checkpoint._safetensors_header import read_header
from flax_layoutmap.checkpoint._safetensors_read import Files, Piece, bytes_to_read

Shape = tuple[int, ...]


# ------------------------------------------------------------- what NumPy makes of it


def inner_shapes(step: Any, shape: Shape) -> Shape:
    """Shape of the first input of a step, whose others have the same."""
    return step.inputs(shape)[0].shape


class Regrouped(Regroup):
    """A step that knows what NumPy does in its place."""

    by_numpy: Callable[[np.ndarray], np.ndarray]


def regrouped(step: Regroup, by_numpy: Callable[[np.ndarray], np.ndarray]) -> Regrouped:
    new = Regrouped(step.axes)
    object.__setattr__(new, "by_numpy", by_numpy)
    return new


def evaluate(name: str, steps: tuple[Any, ...], tensors: dict[str, np.ndarray]) -> Any:
    """The whole leaf, by NumPy."""
    if not steps:
        return tensors[name]
    *before, last = steps

    def inner(fields: dict[str, str]) -> np.ndarray:
        filled = name
        for field, value in fields.items():
            filled = filled.replace(f"{{{field}}}", value)
        return evaluate(filled, tuple(before), tensors)

    if isinstance(last, Stack):
        parts = [inner({last.field: name}) for name in last.over or ()]
        return np.stack(parts, last.axis)
    if isinstance(last, Merge):
        return np.concatenate([inner({last.field: n}) for n in last.over], last.axis)
    value = inner({})
    if isinstance(last, Regrouped):
        return last.by_numpy(value)
    assert isinstance(last, Split)
    cuts = np.cumsum(last.of)[:-1]
    return np.split(value, cuts, last.axis)[last.index]


# -------------------------------------------------------------------- random pipelines


@st.composite
def rearrangements(draw: st.DrawFn, shape: Shape) -> tuple[Regrouped, Shape]:
    """Splits dims, puts the axes into another order, joins some; the new shape."""
    letters = iter("abcdefghijkl")
    left, sizes = [], {}
    for size in shape:
        factor = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        parts = [factor, size // factor] if draw(st.booleans()) else [size]
        names = [next(letters) for _ in parts]
        sizes.update(zip(names, parts, strict=True))
        left.append(names)
    order = draw(st.permutations([n for names in left for n in names]))
    right: list[list[str]] = []
    for name in order:
        if right and draw(st.integers(0, 3)) == 0:
            right[-1].append(name)
        else:
            right.append([name])
    sides = [" ".join(f"({' '.join(g)})" for g in side) for side in (left, right)]
    made = tuple(math.prod(sizes[n] for n in group) for group in right)
    flat = [n for group in left for n in group]

    def by_numpy(value: np.ndarray) -> np.ndarray:
        value = value.reshape([sizes[n] for n in flat])
        return value.transpose([flat.index(n) for n in order]).reshape(made)

    return regrouped(mappings.rearrange(" -> ".join(sides), **sizes), by_numpy), made


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[str, tuple[Any, ...], Shape, Shape]:
    """The name, the steps, the shape of each tensor, and that of the leaf."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    first, name, steps = shape, "t", []
    for number in range(draw(st.integers(0, 4))):
        kind = draw(
            st.sampled_from(["transpose", "split", "stack", "merge", "split_up"])
        )
        axis = draw(st.integers(0, len(shape) - 1))
        if kind == "transpose":
            axes = tuple(draw(st.permutations(range(len(shape)))))
            steps.append(
                regrouped(mappings.transpose(*axes), lambda v, a=axes: v.transpose(a))
            )
            shape = tuple(shape[at] for at in axes)
        elif kind == "split":
            cuts = draw(st.lists(st.integers(0, shape[axis]), max_size=2).map(sorted))
            edges = [0, *cuts, shape[axis]]
            of = [b - a for a, b in itertools.pairwise(edges)]
            index = draw(st.integers(0, len(of) - 1))
            steps.append(mappings.split(axis, index, of))
            shape = (*shape[:axis], of[index], *shape[axis + 1 :])
        elif kind == "stack" and len(shape) < 5:
            over = [f"s{number}{at}" for at in range(draw(st.integers(1, 3)))]
            steps.append(mappings.stack(axis, over, field=f"f{number}"))
            shape = (*shape[:axis], len(over), *shape[axis:])
            name += f".{{f{number}}}"
        elif kind == "merge" and math.prod(shape) < 500:
            over = [f"m{number}{at}" for at in range(draw(st.integers(1, 3)))]
            steps.append(mappings.merge(axis, over, field=f"f{number}"))
            shape = (*shape[:axis], shape[axis] * len(over), *shape[axis + 1 :])
            name += f".{{f{number}}}"
        elif kind == "split_up" and 0 not in shape and len(shape) < 5:
            step, shape = draw(rearrangements(shape))
            steps.append(step)
    return name, tuple(steps), first, shape


@st.composite
def boxes(draw: st.DrawFn, shape: Shape) -> tuple[tuple[int, int], ...]:
    """A box of an array."""
    ends = [sorted(draw(st.tuples(*[st.integers(0, n)] * 2))) for n in shape]
    return tuple((low, high) for low, high in ends)


@pytest.mark.slow
@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), gap=st.sampled_from([0, 8, 64, 32 << 10]))
def test_a_slice_of_any_steps_is_numpys(
    data: st.DataObject, gap: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_safetensors_read, "GAP_BYTES", gap)
    monkeypatch.setattr(_safetensors_read, "BLOCK_BYTES", data.draw(st.integers(4, 99)))
    name, steps, first, shape = data.draw(pipelines())
    try:
        recipe = Source((name,), steps).recipes(shape)[0]
    except ValueError as error:
        assert "rearrange it before" in str(error) or "earlier step" in str(error)
        return
    rng = np.random.default_rng(0)
    arrays = {
        held: rng.integers(0, 60_000, size).astype(np.uint16)
        for held, size in recipe.shapes.items()
    }
    assert set(recipe.shapes.values()) == {first}
    whole = evaluate(name, steps, arrays)
    assert whole.shape == shape
    file = str(tmp_path / "model.safetensors")
    save_file(arrays, file)
    tensors = read_header(file)
    wanted = [data.draw(boxes(shape)) for _ in range(data.draw(st.integers(1, 3)))]
    pieces: dict[str, list[Piece]] = {}
    planned: dict[str, list[Piece]] = {}
    outs = []
    dtype = data.draw(st.sampled_from([np.uint16, np.int64]))
    for box in wanted:
        size = tuple(stop - start for start, stop in box)
        outs.append(np.full(size, 7, dtype))
        for held, piece in pieces_of(recipe.blocks, box, outs[-1]):
            assert np.shares_memory(piece.out, outs[-1]) or piece.out.size == 0
            pieces.setdefault(held, []).append(piece)
        for held, piece in pieces_of(recipe.blocks, box, np.empty(size, dtype)):
            planned.setdefault(held, []).append(piece)
    with Files() as files:
        for held, parts in pieces.items():
            files.read(tensors[held], parts)
        # What goes through a buffer fits into it.
        block = max(_safetensors_read.BLOCK_BYTES, 2)
        for parts in planned.values() if dtype is np.int64 else ():
            fetches = _safetensors_read._fetches(parts, np.dtype(np.uint16))
            assert all(fetch.count * 2 <= block for fetch in fetches)
        expected = sum(bytes_to_read(tensors[n], parts) for n, parts in planned.items())
        assert files.bytes_read == expected
        if gap == 0 and len(wanted) == 1:
            assert files.bytes_read == outs[0].size * 2
    for box, out in zip(wanted, outs, strict=True):
        np.testing.assert_array_equal(out, whole[tuple(slice(*b) for b in box)])


@given(sizes=st.lists(st.integers(1, 4), max_size=4), data=st.data())
def test_boxes_of_a_range_are_the_range(sizes: list[int], data: st.DataObject) -> None:
    total = math.prod(sizes)
    low, high = sorted(data.draw(st.tuples(*[st.integers(0, total)] * 2)))
    grid = np.arange(total).reshape(sizes)
    found = [
        grid[tuple(slice(*part) for part in box)].reshape(-1)
        for box in range_boxes(low, high, sizes)
    ]
    np.testing.assert_array_equal(np.concatenate([[], *found]), np.arange(low, high))


# ------------------------------------------------------------------- which bytes


def reads(
    file: str, pieces: list[Piece], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, int]]:
    """First byte and length of each read of the one tensor of a file."""
    seen: list[tuple[int, int]] = []

    class Noting(FileIO):
        def readinto(self, buffer: Any, /) -> int:
            seen.append((self.tell(), len(buffer)))
            return super().readinto(buffer)

    monkeypatch.setattr(_safetensors_read, "FileIO", Noting)
    [tensor] = read_header(file).values()
    with Files() as files:
        files.read(tensor, pieces)
    return [(at - tensor.offset, count) for at, count in seen]


def quarters(dtype: str) -> list[tuple[Any, ...]]:
    """The columns of a matrix (64,32) in four pieces."""
    return [(8 * at, (32, 1), (64, 8), dtype) for at in range(4)]


# Name → sizes, pieces (first element, strides, shape, dtype), the reads of a matrix
# (64,32) of float32, first byte and length each, and what the pieces are.
READS: dict[str, tuple[dict[str, int], list[Any], list[Any], Callable[..., Any]]] = {
    "rows are one read": (
        {},
        [(16 * 32, (32, 1), (16, 32), "f4")],
        [(2048, 2048)],
        lambda values: values[16:32],
    ),
    "narrow columns are cut from whole rows": (
        {},
        [(8, (32, 1), (64, 8), "f4")],
        [(32, 64 * 128 - 96)],  # from the first number to the last
        lambda values: values[:, 8:16],
    ),
    "all columns come from one read of each block": (
        {"BLOCK_BYTES": 16 * 128},
        quarters("f4"),
        [(at * 2048, 2048) for at in range(4)],
        lambda values: values,
    ),
    "a row that is longer than the buffer is read in parts": (
        {"BLOCK_BYTES": 64},
        quarters("f8"),
        [(at * 64, 64) for at in range(128)],
        lambda values: values,
    ),
    "wide gaps are skipped": (
        {"GAP_BYTES": 96},
        [(0, (32, 1), (64, 8), "f4")],
        [(row * 128, 32) for row in range(64)],
        lambda values: values[:, :8],
    ),
    "transposed and cast on the way": (
        {},
        [(0, (1, 32), (32, 64), "f8")],
        [(0, 8192)],
        lambda values: values.T,
    ),
}


@pytest.mark.parametrize("name", READS)
def test_which_bytes_are_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, pieces, expected, part = READS[name]
    for size, value in sizes.items():
        monkeypatch.setattr(_safetensors_read, size, value)
    values = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    file = str(tmp_path / "model.safetensors")
    save_file({"w": values}, file)
    made = [Piece(at, strides, np.empty(*out)) for at, strides, *out in pieces]
    assert reads(file, made, monkeypatch) == expected
    found = np.concatenate([piece.out for piece in made], 1)
    np.testing.assert_array_equal(found, part(values))


def test_few_files_are_open_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_safetensors_read, "MOST_OPEN", 3)
    opened: list[str] = []
    closed: list[str] = []

    class Noting(FileIO):
        def __init__(self, file: str) -> None:
            super().__init__(file)
            opened.append(file)
            assert len(opened) - len(closed) <= 3

        def close(self) -> None:
            if not self.closed:
                closed.append(str(self.name))
            super().close()

    files = [str(tmp_path / f"{at}.safetensors") for at in range(5)]
    for at, file in enumerate(files):
        save_file({"w": np.full(4, at, np.int32)}, file)
    tensors = [read_header(file)["w"] for file in files]
    monkeypatch.setattr(_safetensors_read, "FileIO", Noting)
    with Files() as reader:
        for at in (0, 1, 0, 2, 0, 3, 0, 4, 0):
            out = np.empty(4, np.int32)
            reader.read(tensors[at], [Piece(0, (1,), out)])
            assert (out == at).all()
    assert len(opened) == 5  # the first one stayed open
    assert sorted(closed) == sorted(opened)


def test_replicas_that_share_memory_survive_donation(tmp_path: Path) -> None:
    """JAX takes over the memory of NumPy on CPUs, here for eight devices at once."""
    value = np.arange(1 << 12, dtype=np.float32).reshape(64, 64)
    flm.checkpoint.save_safetensors(tmp_path, {"w": value})
    rules = flm.LayoutMap("data=8", strict=False)
    rules["w"] = None
    w = flm.checkpoint.restore_safetensors(tmp_path, layout_map=rules)["w"]
    add = jax.jit(lambda x: x + 1, donate_argnums=0, out_shardings=w.sharding)
    found = add(w)
    for shard in found.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), value + 1)
