"""Each file of a checkpoint removed, cut, zeroed and with bits flipped; other places.

A damaged checkpoint raises a CheckpointError that names it, or, where the file is not
needed, restores the right values; never wrong ones.
"""

import contextlib
import functools
import gc
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from same import bits, by_path, refused

import flax_layoutmap as flm

# Orbax abandons its other reads when one fails, and Python says so.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]

ERROR, VALUES = "an error", "the values"

DAMAGES: dict[str, Callable[[Path], object]] = {
    "removed": Path.unlink,
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "zeroed": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "emptied": lambda file: file.write_bytes(b""),
    "flipped": lambda file: flip(file, 1),
    "flipped in places": lambda file: flip(file, 9),
}

# Without these files there is nothing to restore.
NEEDED = {
    *("_CHECKPOINT_METADATA", "state/_METADATA", "state/manifest.ocdbt"),
    "state/_strings.json",
}


def flip(file: Path, count: int) -> None:
    """Flip bits of a file, evenly spread; a single one in the middle."""
    content = bytearray(file.read_bytes())
    for number in range(count if content else 0):
        content[len(content) * (2 * number + 1) // (2 * count)] ^= 1 << (number % 8)
    file.write_bytes(content)


def tree() -> dict[str, Any]:
    """All kinds of leaves; arrays in the index (small) and in files of their own."""
    numbers = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    return {
        "large": {"w": jnp.asarray(numbers)},
        "small": jnp.arange(3),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 2),
        "empty": jnp.zeros((0, 2)),
        "step": 12345678901,
        "flag": True,
        "text": "hello",
    }


def layout_map() -> flm.LayoutMap:
    rules = flm.LayoutMap(flm.DeviceMesh("data=2,model=4"), strict=False)
    rules["large/w"] = ("model", "data")
    return rules


@pytest.fixture(scope="module", autouse=True)
def abandoned_reads_end_here() -> Iterator[None]:
    """So that Python does not speak of them in the next file of tests."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("intact") / "checkpoint"
    placed = layout_map().place({"large": tree()["large"]})
    flm.checkpoint.save(path, {**tree(), **placed}, layout_map=layout_map())
    return path


# A way to restore, which says nothing of checking → its options.
WAYS: dict[str, dict[str, Any]] = {
    "no target": {},
    "a part": {"include": ["large", "keys", "empty", "text"]},
    "another dtype": {"dtype": {"large": jnp.bfloat16}},
    "another mesh": {"mesh": "data=4,model=2"},
}


def values(checkpoint: Path, **options: Any) -> Any:
    """What a restore gives, with all that may be wrong of it."""
    restored = flm.checkpoint.restore(checkpoint, layout_map=layout_map(), **options)
    return {
        path: (bits(leaf), str(getattr(leaf, "sharding", "host")))
        for path, leaf in by_path(restored).items()
    }


@pytest.mark.parametrize("damage", DAMAGES)
def test_no_damage_restores_in_silence(
    damage: str, intact: Path, tmp_path: Path
) -> None:
    expected = {way: values(intact, **options) for way, options in WAYS.items()}
    files = sorted(p.relative_to(intact) for p in intact.rglob("*") if p.is_file())
    outcomes: dict[str, set[str]] = {}
    changed = 0
    for number, name in enumerate(files):
        copy = tmp_path / str(number)
        shutil.copytree(intact, copy)
        DAMAGES[damage](copy / name)
        for way in ("no target", list(WAYS)[number % len(WAYS)]):
            try:
                assert values(copy, **WAYS[way]) == expected[way], (name, way)
            except flm.errors.CheckpointError as error:
                assert str(copy) in str(error)
                outcomes.setdefault(str(name), set()).add(ERROR)
            else:
                outcomes.setdefault(str(name), set()).add(VALUES)
        # The control: some of it changes values that nobody compares.
        with contextlib.suppress(flm.errors.CheckpointError):
            changed += values(copy, verify=False) != expected["no target"]
    assert {ERROR} in outcomes.values() and {VALUES} in outcomes.values()
    if not damage.startswith("flipped"):
        needed = [outcomes[name] for name in sorted(NEEDED)]
        assert all(ERROR in found for found in needed), outcomes
    if damage == "flipped":
        assert changed


def test_checkpoints_of_versions_without_digests(intact: Path, tmp_path: Path) -> None:
    def changed(record: Any) -> Any:
        del record["digest"]
        return record

    copy = with_record(intact, tmp_path / "a", changed)
    assert values(copy) == values(intact)
    assert flm.checkpoint.verify(copy) == 6


def test_a_python_bool_of_plain_orbax(tmp_path: Path) -> None:
    v1: Any = ocp.v1
    v1.save(tmp_path / "plain", {"w": np.ones(8, np.float32), "flag": True})
    with refused("Python bool, which Orbax writes and cannot read"):
        flm.checkpoint.inspect(tmp_path / "plain")


# -------------------------------------------------------------- our own metadata


def with_record(intact: Path, copy: Path, change: Callable[[Any], Any]) -> Path:
    """A copy of the checkpoint with another record of ours."""
    shutil.copytree(intact, copy)
    file = copy / "_CHECKPOINT_METADATA"
    data = json.loads(file.read_text("utf-8"))
    custom = data["custom_metadata"]
    custom["flax_layoutmap"] = change(custom["flax_layoutmap"])
    file.write_text(json.dumps(data), "utf-8")
    return copy


def places(node: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys to every value in JSON."""
    entries = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in entries:
        yield (*above, key)
        if isinstance(value, dict | list):
            yield from places(value, (*above, key))


def test_any_damage_of_the_record_is_an_error(intact: Path, tmp_path: Path) -> None:
    copy = with_record(intact, tmp_path / "copy", lambda record: record)
    file = copy / "_CHECKPOINT_METADATA"
    text = file.read_text("utf-8")
    record = json.loads(text)["custom_metadata"]["flax_layoutmap"]
    for keys in places(record):
        for by in ("gone", None, 3, "x", [], {}, {"kind": "lock"}):
            data = json.loads(text)
            *above, last = "custom_metadata", "flax_layoutmap", *keys
            node = functools.reduce(lambda node, key: node[key], above, data)
            if by == node[last] or (keys == ("digest",) and by == "gone"):
                continue
            if by == "gone":
                del node[last]
            else:
                node[last] = by
            file.write_text(json.dumps(data), "utf-8")
            with refused(str(copy)):
                flm.checkpoint.inspect(copy)


# ------------------------------------------------------------- places that are none


def test_missing(intact: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    none = "there is no checkpoint at"
    for place, text in (
        (tmp_path / "step_10", f"{none} {tmp_path / 'step_10'}"),
        (tmp_path / "no" / "a", none),
        (tmp_path / "file", "has no file _CHECKPOINT_METADATA"),
        (intact / "state" / "d", "has no file _CHECKPOINT_METADATA"),
    ):
        with refused(text):
            values(place)


def test_unfinished(intact: Path, tmp_path: Path) -> None:
    unfinished = tmp_path / "a.orbax-checkpoint-tmp"
    shutil.copytree(intact, unfinished)
    with refused(f"{unfinished} is not a checkpoint: its save did not end"):
        values(unfinished)
    with refused(f"an interrupted save left {unfinished}"):
        values(tmp_path / "a")
