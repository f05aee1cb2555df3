"""Checksums do not depend on sharding and detect changes; verify names the leaf."""

import contextlib
import gc
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from multiprocess import checksums as program
from multiprocess import launch

import flax_layoutmap as flm
from flax_layoutmap._core import checksums as _checksums
from flax_layoutmap._core.checksums import block_sum, checksums
from flax_layoutmap.checkpoint import _orbax
from flax_layoutmap.checkpoint._leaves import _STORABLE
from flax_layoutmap.checkpoint._verify import verify

# Orbax abandons its other reads when one fails, and Python says so.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]

P = PartitionSpec
DTYPES = sorted(_STORABLE)
SHAPES = [(), (1,), (7,), (8, 16), (1, 8, 1), (16, 8, 3), (8, 40), (2, 3, 4, 5)]
SPECS = [
    P(),
    P("data"),
    P(None, "model"),
    P("data", "model"),
    P(("data", "model")),
    P("model", None, None),
]
MASK = (1 << 64) - 1


@pytest.fixture(scope="module", autouse=True)
def abandoned_reads_end_here() -> Iterator[None]:
    """So that Python does not speak of them in the next file of tests."""
    yield
    gc.collect()


def random(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """An array of random bits."""
    kind = jnp.dtype(dtype)
    rng = np.random.default_rng(seed)
    if kind.name in ("bool", "int2", "int4", "float4_e2m1fn"):
        low, high = {"bool": (0, 2), "int2": (-2, 2)}.get(kind.name, (-6, 7))
        return np.asarray(rng.integers(low, high, shape)).astype(kind)
    size = int(np.prod(shape)) * kind.itemsize
    return np.frombuffer(rng.bytes(size), kind).reshape(shape)


def bits_of(value: np.ndarray) -> np.ndarray:
    """Its bytes along the last dim; of small elements only the bits that count."""
    value = np.ascontiguousarray(value)
    used = {"int4": 15, "float4_e2m1fn": 15, "int2": 3}.get(value.dtype.name, 255)
    return value.view(np.uint8).reshape(*value.shape[:-1], -1) & np.uint8(used)


def mixed(at: int, seed: int) -> int:
    """The multiplier of an index, in Python's own integers."""
    z = (at + seed) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return (z ^ (z >> 31)) | 1


def by_definition(value: np.ndarray, start: tuple[int, ...] | None = None) -> int:
    """The sum as the module's documentation has it, one word after the other."""
    content = bits_of(value)
    margins = [(0, 0)] * (content.ndim - 1) + [(0, -content.shape[-1] % 8)]
    words = np.pad(content, margins).view("<u8")
    total = 0
    for index, word in np.ndenumerate(words):
        at = [i + s for i, s in zip(index, start or (0,) * words.ndim, strict=True)]
        factor = 1
        for dim, i in enumerate(reversed(at)):
            factor *= mixed(i & (2**14 - 1), (2 * dim + 1) << 48)
            factor *= mixed(i >> 14, (2 * dim + 2) << 48)
        total += int(word) * factor
    return total & MASK


def of(value: Any) -> str:
    return checksums({"x": value})["x"]


def meshes() -> list[Mesh]:
    devices = np.array(jax.devices())
    grids = [
        devices.reshape(2, 4),
        devices[::-1].reshape(4, 2),
        devices.reshape(1, 8),
        devices[3:4].reshape(1, 1),
    ]
    return [Mesh(grid, ("data", "model")) for grid in grids]


def shardings(shape: tuple[int, ...]) -> Iterator[NamedSharding]:
    """Those that divide the shape."""
    for mesh, spec in itertools.product(meshes(), SPECS):
        if len(spec) <= len(shape):
            sharding = NamedSharding(mesh, spec)
            with contextlib.suppress(ValueError):
                sharding.shard_shape(shape)
                yield sharding


# ------------------------------------------------------------- one number for a value


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_sum_that_is_documented(dtype: str) -> None:
    for shape in SHAPES:
        value = random(dtype, shape)
        assert block_sum(value, (0,) * value.ndim) == by_definition(value), shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sharding_does_not_matter(dtype: str) -> None:
    seen = 0
    with jax.enable_x64(True):
        for shape in SHAPES[:6]:
            value = random(dtype, shape)
            expected = of(value)
            for sharding in shardings(shape):
                assert of(jax.device_put(value, sharding)) == expected, sharding
                seen += 1
            assert of(jnp.asarray(value)) == expected
    assert seen > 50


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bool", "int4", "bfloat16", "float32"])
def test_devices_give_the_number_of_the_host(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_checksums, "_HOST_PLATFORMS", ())
    monkeypatch.setattr(_checksums, "block_sum", None)  # the host must not be asked
    for shape in [(), (7,), (8, 24), (16, 4, 3)]:
        value = random(dtype, shape)
        every = list(shardings(shape))
        # Each is compiled: one of each kind will do.
        arrays = {str(s): jax.device_put(value, s) for s in every[:5] + every[-1:]}
        # What the caller has set must not reach the programs.
        with jax.set_mesh(meshes()[1]), jax.transfer_guard("disallow"):
            found = checksums(arrays)
        expected = _checksums.as_text(by_definition(value), value)
        assert set(found.values()) == {expected}, shape


def test_programs_serve_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checksums, "_HOST_PLATFORMS", ())
    sharding = NamedSharding(meshes()[0], P("data"))
    arrays = [
        jax.device_put(random("float32", (6, 11), seed), sharding) for seed in (0, 1)
    ]
    before = _checksums.program.cache_info()
    checksums({"a": arrays[0], "b": arrays[1]})
    checksums({"c": arrays[1]})
    after = _checksums.program.cache_info()
    assert after.misses == before.misses + 1
    assert after.maxsize == 512


@pytest.mark.parametrize("what", ["all dims", "large"])
@hypothesis.given(st.data())
@hypothesis.settings(max_examples=40)
def test_blocks_add_up(what: str, data: st.DataObject) -> None:
    if what == "large":
        # Across the ends of the tables of multipliers, in one dim or in two.
        shapes = [(70_001,), (40_000, 3), (5, 20_001), (3, 140_000), (3, 2, 70_001)]
        shape = data.draw(st.sampled_from([*shapes, (20_000, 40)]))
        dtype = "float32"
    else:
        shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
        dtype = data.draw(st.sampled_from(DTYPES))
    value = random(dtype, shape)
    cuts = [
        sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))})
        for n in shape
    ]
    total = 0
    for at in itertools.product(*(itertools.pairwise(cut) for cut in cuts)):
        block = value[tuple(slice(*pair) for pair in at)]
        total += block_sum(block, [first for first, _ in at])
    assert total & MASK == block_sum(value, [0] * len(shape))


@pytest.mark.parametrize("start", [2**14 - 1, 2**14, 2**32 - 1, 2**32, 2**33 + 5])
def test_indices_are_not_cut(start: int) -> None:
    value = random("uint64", (3,))
    assert block_sum(value, (start,)) == by_definition(value, (start,))
    assert block_sum(value, (start,)) != block_sum(value, (start % 2**32 + 1,))
    rows = random("uint64", (2, 3))
    assert block_sum(rows, (start, 1)) == by_definition(rows, (start, 1))


def test_strides_and_byte_order_do_not_matter() -> None:
    value = random("float32", (8, 12))
    assert of(value) == of(np.asfortranarray(value))
    assert of(value) == of(value.astype(">f4"))
    assert of(value[::2, ::3]) == of(value[::2, ::3].copy())


# ------------------------------------------------------------------- what it finds


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_single_bit_counts(dtype: str) -> None:
    value = random(dtype, (3, 5))
    intact = of(value)
    width = {"bool": 1, "int2": 2, "int4": 4, "float4_e2m1fn": 4}.get(dtype, 8)
    for at in range(value.nbytes):
        for bit in range(width):
            changed = value.copy()
            changed.view(np.uint8).reshape(-1)[at] ^= np.uint8(1 << bit)
            assert of(changed) != intact, (at, bit)


@hypothesis.given(
    st.integers(0, 95), st.binary(min_size=8, max_size=8), st.integers(0, 5)
)
def test_any_change_within_a_word_is_found(at: int, new: bytes, seed: int) -> None:
    value = random("uint64", (4, 8, 3), seed)
    changed = value.copy()
    changed.reshape(-1)[at : at + 1] = np.frombuffer(new, np.uint64)
    assert (of(changed) == of(value)) == np.array_equal(changed, value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_other_damage_is_found(dtype: str) -> None:
    value = random(dtype, (64, 64))
    ones = np.ones((64, 64), jnp.dtype(dtype))

    def damaged(change: Callable[[np.ndarray], object], value: Any = value) -> str:
        copy = value.copy()
        change(copy)
        return of(copy)

    def swap(x: np.ndarray, a: Any, b: Any) -> None:
        x[a], x[b] = x[b].copy(), x[a].copy()

    found = {
        "as it is": of(value),
        "zeroed": damaged(lambda x: x.fill(0)),
        "a block zeroed": damaged(lambda x: x[:8, :8].fill(0)),
        "rows swapped": damaged(lambda x: swap(x, 3, 7)),
        "columns swapped": damaged(lambda x: swap(x, np.s_[:, 8], np.s_[:, 40])),
        "blocks swapped": damaged(lambda x: swap(x, np.s_[:32], np.s_[32:])),
        "shifted": of(np.roll(value, 1, axis=0)),
        "transposed": of(value.T),
        "cut": of(value[:63]),
        "reshaped": of(value.reshape(32, 128)),
        "ones": of(ones),
        "ones, one block zeroed": damaged(lambda x: x[:8, :8].fill(0), ones),
        "ones, another block": damaged(lambda x: x[8:16, :8].fill(0), ones),
        "another dtype": of(value.view(f"u{value.dtype.itemsize}")),
    }
    if dtype == "int8":
        assert found.pop("another dtype") != found["as it is"]
    assert len(set(found.values())) == len(found), found


def test_bit_patterns_not_values() -> None:
    def pattern(bits: int) -> str:
        return of(np.array([bits], np.uint32).view(np.float32))

    patterns = [0, 0x8000_0000, 0x7FC0_0000, 0x7FC0_0001, 0xFFC0_0000, 0x7F80_0001]
    assert len({pattern(bits) for bits in patterns}) == len(patterns)
    signed = jnp.array([0.0, -0.0])
    assert of(signed[:1]) != of(signed[1:])


def test_keys_python_values_and_empty_arrays() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    assert of(keys) == of(jax.random.key_data(keys)) == of(keys.copy())
    assert of(keys) != of(jax.random.split(jax.random.key(1), 3))
    values = [0, 1, -1, True, False, 0.0, -0.0, 1.0, 1e300, "", "0", "a", "ä"]
    empty = [np.zeros((0,)), np.zeros((0, 2)), np.zeros((0, 2), np.float32)]
    found = [of(value) for value in [*values, *empty]]
    assert len(set(found)) == len(found)
    assert of(12345678901) == of(12345678901)
    assert checksums({}) == {}


# ------------------------------------------------------------------ in checkpoints


def tree() -> dict[str, Any]:
    """All kinds of leaves; `large` and `other` have files of their own."""
    rng = np.random.default_rng(0)
    return {
        "large": {"w": jnp.asarray(rng.normal(size=(64, 64)), jnp.float32)},
        "other": jnp.asarray(rng.normal(size=(64, 32)), jnp.bfloat16),
        "small": jnp.arange(3),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 2),
        "empty": jnp.zeros((0, 2)),
        "host": np.arange(4, dtype=np.int64),
        "step": 12345678901,
        "rate": 0.1,
        "flag": True,
        "number": 2j,
        "text": "hello",
    }


LEAVES = 10  # all but the empty one


def layout_map(spec: str, *axes: Any) -> flm.LayoutMap:
    rules = flm.LayoutMap(flm.DeviceMesh(spec), strict=False)
    rules["large/w"] = axes
    return rules


def saved(path: Path, **options: Any) -> Path:
    rules = layout_map("data=2,model=4", "model", "data")
    placed = rules.place({"large": tree()["large"]})
    flm.checkpoint.save(path, {**tree(), **placed}, layout_map=rules, **options)
    return path


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("intact") / "compressed")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose arrays lie in the files as they are in memory."""
    context = _orbax.saving_context

    def without_compression() -> Any:
        made = context()
        made.array.saving.use_compression = False
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_orbax, "saving_context", without_compression)
        return saved(tmp_path_factory.mktemp("intact") / "plain")


def recorded(checkpoint: Path) -> dict[str, str]:
    data = json.loads((checkpoint / "_CHECKPOINT_METADATA").read_text("utf-8"))
    return data["custom_metadata"]["flax_layoutmap"]["checksums"]


def flipped(checkpoint: Path, copy: Path, file: str, at: int, bit: int) -> Path:
    """A copy with one bit of one file flipped."""
    shutil.copytree(checkpoint, copy)
    content = bytearray((copy / file).read_bytes())
    content[at] ^= 1 << bit
    (copy / file).write_bytes(content)
    return copy


def place_of(checkpoint: Path, part: bytes) -> tuple[str, int]:
    """The file that holds some bytes, and where."""
    for file in sorted(checkpoint.rglob("state/**/d/*")):
        at = file.read_bytes().find(part)
        if at >= 0:
            return file.relative_to(checkpoint).as_posix(), at
    raise AssertionError("no file holds these bytes")


def text_of_error(path: Path, **options: Any) -> str:
    with pytest.raises(flm.errors.CheckpointError) as caught:
        verify(path, **options)
    return str(caught.value)


def test_an_intact_checkpoint(compressed: Path, plain: Path) -> None:
    for path in (compressed, plain):
        verified = verify(path)
        arrays = 64 * 64 * 4 + 64 * 32 * 2 + 3 * 4 + 2 * 4 * 4 + 4 * 8 + 1 + 16
        assert (verified.leaves, verified.bytes) == (LEAVES, arrays)
        assert verified.path == str(path)
        assert str(verified) == f"{path}: {LEAVES} leaves are as saved (20.1 KiB)"
    assert recorded(compressed) == recorded(plain)
    assert recorded(plain).keys() == {
        *("large/w", "other", "small", "keys", "host"),
        *("step", "rate", "flag", "number", "text"),
    }


@pytest.mark.parametrize("bit", [0, 3, 7])
@pytest.mark.parametrize("at", [0, 1, 1000, 2047])
def test_one_flipped_bit_in_the_data(
    at: int, bit: int, plain: Path, tmp_path: Path
) -> None:
    # The first shard is a chunk: rows 0 to 15, columns 0 to 31.
    w = np.asarray(tree()["large"]["w"])
    file, start = place_of(plain, w[:16, :32].tobytes())
    copy = flipped(plain, tmp_path / "copy", file, start + at, bit)
    assert text_of_error(copy) == (
        f"the checkpoint {copy} is damaged: 1 problem\n"
        "  - large/w (64,64): its data are not those that were saved; restore another "
        "checkpoint, or the rest of this one: exclude='^large/w$'"
    )
    # The control: Orbax does not notice, and the checksums of what it reads do.
    rules = layout_map("a=4,b=2", "a", "b")
    part: Any = {"include": "large|other|small", "verify": False}
    read = flm.checkpoint.restore(copy, layout_map=rules, **part)
    assert not np.array_equal(read["large"]["w"], w, equal_nan=True)
    flat = {"large/w": read["large"]["w"], "other": read["other"]}
    found = checksums(flat)
    saved = recorded(copy)
    assert [path for path in found if found[path] != saved[path]] == ["large/w"]


def test_flipped_bits_in_compressed_data(compressed: Path, tmp_path: Path) -> None:
    intact = verify(compressed)
    sizes = {
        file: file.stat().st_size
        for file in compressed.glob("state/ocdbt.process_0/d/*")
    }
    largest = max(sizes, key=lambda file: sizes[file])
    name = largest.relative_to(compressed).as_posix()
    named, unharmed = set(), 0
    for number, at in enumerate(range(100, sizes[largest], 1999)):
        copy = flipped(compressed, tmp_path / str(number), name, at, number % 8)
        try:
            # A frame may hold bits that nothing reads; then the values are intact.
            assert verify(copy) == type(intact)(str(copy), LEAVES, intact.bytes)
            unharmed += 1
        except flm.errors.CheckpointError as error:
            named |= {leaf for leaf in ("large/w", "other") if leaf in str(error)}
            assert "1 problem" in str(error)
    assert named == {"large/w", "other"}
    assert unharmed <= 1


def test_leaves_that_cannot_be_read(compressed: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(compressed, copy)
    for file in copy.glob("state/ocdbt.process_0/d/*"):
        file.write_bytes(b"")
    said = text_of_error(copy)
    # Small leaves lie in the index.
    assert f"the checkpoint {copy} is damaged: 2 problems" in said
    for leaf in ("large/w (64,64)", "other (64,32)"):
        assert f"  - {leaf}: cannot read the checkpoint {copy}: leaf" in said
    assert "tensorstore_spec" not in said


def test_all_damaged_leaves_are_named_at_once(plain: Path, tmp_path: Path) -> None:
    copy = plain
    for number, part in enumerate(
        (np.asarray(tree()["other"])[:8], np.asarray(tree()["large"]["w"])[:16, :32])
    ):
        file, at = place_of(plain, part.tobytes())
        copy = flipped(copy, tmp_path / str(number), file, at + 77, 5)
    said = text_of_error(copy)
    assert "2 problems" in said
    assert "  - large/w (64,64): its data" in said
    assert "  - other (64,32): its data" in said
    # Whatever is read at a time.
    assert said == text_of_error(copy, host_memory=1)
    assert said == text_of_error(copy, host_memory=5000)


@pytest.mark.parametrize("path", ["small", "keys", "step", "rate", "flag", "text"])
def test_another_number_in_the_record(path: str, plain: Path, tmp_path: Path) -> None:
    copy = with_record(plain, tmp_path / "a", path, "0123456789abcdef")
    assert f"  - {path} (" in text_of_error(copy)
    copy = with_record(plain, tmp_path / "b", path, None)
    said = text_of_error(copy)
    assert "1 problem" in said
    assert "there is no checksum of it in the metadata" in said


def with_record(intact: Path, copy: Path, path: str, text: str | None) -> Path:
    """A copy with another checksum, or none, for one leaf; `*` stands for all.

    As older versions wrote it, without a digest of the record.
    """
    shutil.copytree(intact, copy)
    file = copy / "_CHECKPOINT_METADATA"
    data = json.loads(file.read_text("utf-8"))
    record = data["custom_metadata"]["flax_layoutmap"]
    del record["digest"]
    if path == "*":
        del record["checksums"]
    elif text is None:
        del record["checksums"][path]
    else:
        record["checksums"][path] = text
    file.write_text(json.dumps(data), "utf-8")
    return copy


def test_a_damaged_record(plain: Path, tmp_path: Path) -> None:
    copy = with_record(plain, tmp_path / "a", "small", "no number")
    assert "the metadata of flax_layoutmap" in text_of_error(copy)


def test_checkpoints_without_checksums(plain: Path, tmp_path: Path) -> None:
    saved(tmp_path / "without", checksums=False)
    old = with_record(plain, tmp_path / "old", "*", None)
    for path in (tmp_path / "without", old):
        assert text_of_error(path) == (
            f"cannot verify {path}: it has no checksums, as it was saved with "
            "checksums=False, or by an older version; restore it and save it again "
            "with flm.checkpoint.save to have them"
        )
        rules = layout_map("a=4,b=2", "a", "b")
        assert flm.checkpoint.restore(path, layout_map=rules)["step"] == 12345678901
    v1: Any = ocp.v1
    v1.save(tmp_path / "orbax", {"w": jnp.ones(8)})
    assert "it was saved by Orbax alone" in text_of_error(tmp_path / "orbax")


# ------------------------------------------------------------- in several processes


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "job_part",
    ["checksums-2", pytest.param("checksums-4", marks=pytest.mark.slow)],
    indirect=True,
)
def test_several_processes_find_what_one_finds(job_part: launch.Part) -> None:
    first, *others = (one.answer for one in job_part.ended)
    assert all(other == first for other in others)
    alone = program.found(program.MESH)
    assert first["checksums"] == first["other mesh"] == alone
    # A restore on the same mesh, and on another one: all say which leaf it is.
    assert first["intact"] == ["", ""]
    for said in first["flipped"]:
        assert f"cannot restore {job_part.folder / 'b'}: 1 problem" in said
        assert "its data are not those that were saved" in said
    path = job_part.folder / "a"
    assert recorded(path) == alone
    assert "8 leaves are as saved" in first["verified"]
    assert f"the checkpoint {path} is damaged" in first["error"]
    # This one process says the same of the damage.
    assert text_of_error(path) == first["error"]
