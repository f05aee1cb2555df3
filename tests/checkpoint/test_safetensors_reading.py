"""Any steps on any mesh: NumPy's numbers, and the same tensors when saved again."""

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import shards
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import flax_layoutmap as flm
from flax_layoutmap.checkpoint import mappings

Shape = tuple[int, ...]
Arrays = list[np.ndarray]

# A step, the names that it fills in, and what NumPy makes of the arrays of its inputs.
Drawn = tuple[Any, Sequence[str], Callable[[Arrays], np.ndarray]]


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[str, list[Drawn], Shape, Shape]:
    """The name of the tensors, steps, the shape of a tensor, and that of the leaf."""
    shape = draw(st.lists(st.sampled_from([1, 2, 4, 6]), min_size=1, max_size=3))
    first = shape = tuple(shape)
    name, drawn = "t", []
    for number in range(draw(st.integers(0, 4))):
        kinds = ["transpose", "linear", "split", "alternating", "stack", "merge"]
        kind = draw(st.sampled_from(kinds))
        axis = draw(st.integers(0, len(shape) - 1))
        before, after = shape[:axis], shape[axis + 1 :]
        names = [f"{kind}{number}{at}" for at in range(draw(st.integers(1, 3)))]
        field = f"f{number}"
        if kind == "transpose":
            axes = tuple(draw(st.permutations(range(len(shape)))))
            step = mappings.transpose(*axes)
            drawn.append((step, ("",), lambda v, axes=axes: v[0].transpose(axes)))
            shape = tuple(shape[at] for at in axes)
        elif kind == "split":
            cuts = draw(st.lists(st.integers(0, shape[axis]), max_size=2).map(sorted))
            of = [b - a for a, b in itertools.pairwise([0, *cuts, shape[axis]])]
            index = draw(st.integers(0, len(of) - 1))

            def part(v: Arrays, cuts: Any = cuts, axis: int = axis, i: int = index):
                return np.split(v[0], cuts, axis)[i]

            drawn.append((mappings.split(axis, index, of), ("",), part))
            shape = (*before, of[index], *after)
        elif kind == "stack" and len(shape) < 4:
            step = mappings.stack(axis, names, field=field)
            drawn.append((step, names, lambda v, axis=axis: np.stack(v, axis)))
            shape = (*before, len(names), shape[axis], *after)
            name += f".{{{field}}}"
        elif kind == "merge" and math.prod(shape) < 500:
            step = mappings.merge(axis, names, field=field)
            drawn.append((step, names, lambda v, axis=axis: np.concatenate(v, axis)))
            shape = (*before, shape[axis] * len(names), *after)
            name += f".{{{field}}}"
        elif kind == "linear" and len(shape) == 2 and 0 not in shape:
            halves = (2, shape[0] // 2) if shape[0] % 2 == 0 else shape[:1]
            shape = (shape[1], *halves)

            def kernel(v: Arrays, shape: Shape = shape) -> np.ndarray:
                return v[0].T.reshape(shape)

            drawn.append((mappings.linear(), ("",), kernel))
        elif kind == "alternating" and shape[axis] % 2 == 0:
            half = (slice(None),) * axis
            step = mappings.split(axis, 1, 2, alternating=True)
            drawn.append((step, ("",), lambda v, half=half: v[0][*half, 1::2]))
            shape = (*before, shape[axis] // 2, *after)
    return name, drawn, first, shape


def evaluate(name: str, drawn: list[Drawn], make: Callable[[str], np.ndarray]) -> Any:
    """The leaf, by NumPy; `make` makes a tensor of a name."""
    if not drawn:
        return make(name)
    *before, (_, names, by_numpy) = drawn
    fields = [part for part in name.split(".") if part.startswith("{")]
    # The last step with names fills in the last field.
    filled = [name.replace(fields[-1], n) if n else name for n in names]
    return by_numpy([evaluate(text, before, make) for text in filled])


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_steps_on_any_mesh(
    data: st.DataObject, tmp_path: Path, mesh: flm.DeviceMesh
) -> None:
    name, drawn, first, shape = data.draw(pipelines())
    tensors: dict[str, np.ndarray] = {}

    def make(name: str) -> np.ndarray:
        rng = np.random.default_rng(len(tensors))
        return tensors.setdefault(
            name, rng.integers(0, 60_000, first).astype(np.uint16)
        )

    expected = evaluate(name, drawn, make)
    save_file(tensors, tmp_path / "model.safetensors")
    axes = data.draw(
        st.permutations(["data", "model"] + [None] * 6).filter(
            lambda axes: all(
                axis is None or size % {"data": 2, "model": 4}[axis] == 0
                for axis, size in zip(axes, shape, strict=False)
            )
        )
    )
    rules = flm.LayoutMap(mesh)
    rules["w"] = tuple(axes[: len(shape)])
    mapping = [("w", name, tuple(step for step, *_ in drawn))]
    target = {"w": jax.ShapeDtypeStruct(shape, np.uint16)}
    found = flm.checkpoint.restore_safetensors(
        tmp_path, target, layout_map=rules, mapping=mapping
    )
    lies = tuple((axis,) if axis else () for axis in axes[: len(shape)])
    if 0 not in shape:
        shards.assert_lies(found["w"], lies, mesh, expected)
    assert found["w"].shape == shape
    if any("split" in str(step) or "Split" in str(step) for step, *_ in drawn):
        return  # of which one leaf alone makes no whole tensor
    out = tmp_path / "again.safetensors"
    flm.checkpoint.save_safetensors(out, found, mapping=mapping, overwrite=True)
    again = load_file(out)
    assert again.keys() == tensors.keys()
    for held, value in tensors.items():
        np.testing.assert_array_equal(again[held], value, strict=True)


def test_parts_that_are_joined_again(tmp_path: Path) -> None:
    """Leaves that are parts of parts, before and after other steps."""
    value = np.arange(8 * 12, dtype=np.float32).reshape(8, 12)
    save_file({"w": value}, tmp_path / "model.safetensors")
    turn, odd = mappings.transpose(), mappings.split(1, 1, 2, alternating=True)
    mapping = [
        ("a", "w", (turn, mappings.split(1, 0, 2, alternating=True))),
        ("b", "w", (turn, odd, mappings.split(0, 0, (5, 7)))),
        ("c", "w", (turn, odd, mappings.split(0, 1, (5, 7)))),
    ]
    turned = value.T
    expected = {"a": turned[:, ::2], "b": turned[:5, 1::2], "c": turned[5:, 1::2]}
    target = {name: np.zeros_like(part) for name, part in expected.items()}
    found = flm.checkpoint.restore_safetensors(tmp_path, target, mapping=mapping)
    for name, part in expected.items():
        np.testing.assert_array_equal(found[name], part)
    flm.checkpoint.save_safetensors(tmp_path, found, mapping=mapping, overwrite=True)
    again = load_file(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(again["w"], value)


def test_replicas_that_share_memory_survive_donation(tmp_path: Path) -> None:
    """JAX takes over the memory of NumPy on CPUs, here for eight devices at once."""
    value = np.arange(1 << 12, dtype=np.float32).reshape(64, 64)
    file = tmp_path / "model.safetensors"
    flm.checkpoint.save_safetensors(file, {"w": value})
    before = file.read_bytes()
    rules = flm.LayoutMap("data=8", strict=False)
    rules["w"] = None
    w = flm.checkpoint.restore_safetensors(tmp_path, layout_map=rules)["w"]
    add = jax.jit(lambda x: x + 1, donate_argnums=0, out_shardings=w.sharding)
    found = add(w)
    for shard in found.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), value + 1)
    assert file.read_bytes() == before


def test_a_restored_array_does_not_change_with_the_file(tmp_path: Path) -> None:
    value = np.arange(1 << 12, dtype=np.float32)
    file = tmp_path / "model.safetensors"
    save_file({"w": value}, file)
    rules = flm.LayoutMap("data=8", strict=False)
    options: Any = {"layout_map": rules}
    found = flm.checkpoint.restore_safetensors(file, **options)
    host = flm.checkpoint.restore_safetensors(file, {"w": np.zeros_like(value)})
    with file.open("r+b") as stream:
        stream.seek(-value.nbytes, 2)
        stream.write(bytes(value.nbytes))
    np.testing.assert_array_equal(found["w"], value)
    np.testing.assert_array_equal(host["w"], value)
