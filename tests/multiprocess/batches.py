"""Each process passes its rows of a batch; every device gets its shard.

A part (see `launch`), of any number of processes with eight devices; it answers with
check → whether it holds, and case → how it ended.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx

import flax_layoutmap as flm
from multiprocess import launch

PROCESS = jax.process_index()
PROCESSES = jax.process_count()
DIFFERS = PROCESS == PROCESSES - 1
ROWS = 16
WHOLE = {
    "tokens": np.arange(ROWS * 3, dtype=np.int32).reshape(ROWS, 3),
    "half": np.arange(ROWS, dtype=np.float32).astype(ml_dtypes.bfloat16),
    "wide": np.arange(ROWS * 2, dtype=np.float64).reshape(ROWS, 2, 1),
    "flags": np.arange(ROWS) % 3 == 0,
}
EVERYWHERE = {"rate": 0.5, "step": np.int32(3), "key": jax.random.key(7), "none": None}


def rules(mesh: Any, batch: Any = "data") -> flm.LayoutMap:
    """No rules, but a mesh and batch axes."""
    return flm.LayoutMap(flm.DeviceMesh(mesh), batch=batch, strict=False)


def parts_of(layout_map: flm.LayoutMap) -> dict[int, list[int]]:
    """Process → the parts of the batch that its devices hold, worked out by hand."""
    mesh, batch = layout_map.device_mesh, layout_map.freeze().batch
    assert mesh is not None
    held: dict[int, set[int]] = {}
    for at in itertools.product(*map(range, mesh.shape)):
        position, part = dict(zip(mesh.axis_names, at, strict=True)), 0
        for axis in batch:
            part = part * mesh.axis_sizes[axis] + position[axis]
        held.setdefault(mesh.devices[at].process_index, set()).add(part)
    return {process: sorted(parts) for process, parts in sorted(held.items())}


def rows_of(array: np.ndarray, layout_map: flm.LayoutMap, rows: str) -> np.ndarray:
    """What this process passes of a whole array."""
    held = parts_of(layout_map)
    if rows == "global":
        return array
    parts = max(map(max, held.values())) + 1
    return np.concatenate([np.split(array, parts)[part] for part in held[PROCESS]])


def holds(array: Any, whole: np.ndarray, layout_map: flm.LayoutMap) -> bool:
    """Whether each shard here is the right part of the whole, and no more."""
    axes = (layout_map.freeze().batch, ...)
    layout = flm.TensorLayout(axes, layout_map.device_mesh)
    return launch.holds(array, whole, layout)


def grids() -> Iterator[tuple[str, flm.LayoutMap]]:
    """Meshes of eight devices, with the batch over all kinds of their axes."""
    turned = flm.DeviceMesh((2, 4), ("data", "model"), devices=jax.devices()[::-1])
    yield "turned", rules(turned)
    yield "second axis", rules("data=2,model=4", "model")
    if PROCESSES > 2:
        return
    for line in ("data=8", "data=2,model=4"):
        yield line, rules(line)
    yield "explicit", rules(flm.DeviceMesh("data=2,model=4", axis_types="explicit"))
    yield "two axes", rules("data=2,model=4", ("data", "model"))
    yield "crossed", rules("data=2,model=4", ("model", "data"))
    yield "no axis", rules("data=2,model=4", ())


def placed() -> dict[str, bool]:
    """Every grid, with the rows passed in every way that it allows.

    Of two processes on `turned`, each fills a part; of four, two have the same one.
    """
    checks = {}
    for name, layout_map in grids():
        for rows in ("local", "global"):
            batch = {k: rows_of(v, layout_map, rows) for k, v in WHOLE.items()}
            made = flm.distribute_batch(batch | EVERYWHERE, layout_map, rows=rows)
            for key, whole in WHOLE.items():
                checks[f"{name}, {rows}: {key}"] = holds(made[key], whole, layout_map)
            data = jax.random.key_data(made["key"])
            everywhere = flm.TensorLayout((), layout_map.device_mesh).sharding()
            checks[f"{name}, {rows}: same everywhere"] = (
                float(made["rate"]) == 0.5
                and int(made["step"]) == 3
                and made["none"] is None
                and all(
                    made[key].sharding == everywhere for key in ("rate", "step", "key")
                )
                and np.array_equal(data, jax.random.key_data(EVERYWHERE["key"]))
            )
            again = flm.distribute_batch(made, layout_map, rows=rows)
            checks[f"{name}, {rows}: stays"] = all(
                again[key] is made[key] for key in made
            )
    return checks


def moved() -> dict[str, bool]:
    """Arrays that are global already go along with those of the host."""
    layout_map = rules("data=2,model=4")
    host = rows_of(WHOLE["tokens"], layout_map, "local")
    alone = []
    if PROCESS == 0:  # without the check, no other process is waited for
        alone = [flm.distribute_batch(host, layout_map, check=False)]
    columns = flm.distribute_tensor(
        WHOLE["tokens"], flm.TensorLayout((("model", "data"), None), "data=2,model=4")
    )
    local = jax.device_put(host, jax.local_devices()[0])
    made = flm.distribute_batch((columns, host, local), layout_map)
    # Two devices of the first process, and one of each other.
    devices = jax.local_devices(process_index=0)[:1]
    for process in range(PROCESSES):
        devices.append(jax.local_devices(process_index=process)[-1])
    uneven = rules(flm.DeviceMesh("data=-1", devices=devices))
    numbers = np.arange(2 * len(devices))
    own = rows_of(numbers, uneven, "local")
    return {
        "uneven": holds(flm.distribute_batch(own, uneven), numbers, uneven),
        "a global array": holds(made[0], WHOLE["tokens"], layout_map),
        "a host array": holds(made[1], WHOLE["tokens"], layout_map),
        "an array of one device": holds(made[2], WHOLE["tokens"], layout_map),
        "unchecked": all(holds(a, WHOLE["tokens"], layout_map) for a in alone),
    }


def stepped() -> dict[str, bool]:
    """The last batch: each process has another number of rows left, the last none."""
    layout_map = rules("data=8")
    layout_map["kernel"] = ("data", None)
    left = PROCESSES - 1 - PROCESS
    x = np.arange(left * 8, dtype=np.float32).reshape(left, 8) + PROCESS
    size = 32 // PROCESSES
    x, mask = flm.pad_batch(x, layout_map, size=size)
    ones = nnx.initializers.ones
    model = flm.create(
        lambda: nnx.Linear(8, 8, kernel_init=ones, rngs=nnx.Rngs(0)), layout_map
    )

    @flm.jit(layout_map=layout_map)
    def loss_of(model: nnx.Linear, x: jax.Array, mask: jax.Array) -> jax.Array:
        return model(x).mean(axis=1).mean(where=mask)

    batch = flm.distribute_batch((x, mask), layout_map)
    every = [
        (np.arange((PROCESSES - 1 - process) * 8) + process).reshape(-1, 8).sum(1)
        for process in range(PROCESSES)
    ]
    expected = np.concatenate(every).mean()
    own = flm.pad_batch(np.ones((1, 8)), layout_map)[0]
    whole = flm.pad_batch(np.ones((1, 8)), layout_map, rows="global")[0]
    return {
        "the shape of all batches": batch[0].shape == (32, 8),
        "the masked mean": np.allclose(float(loss_of(model, *batch)), expected),
        "the multiple of its own": own.shape == (8 // PROCESSES, 8),
        "the multiple of all": whole.shape == (8, 8),
    }


def another_shape() -> None:
    flm.distribute_batch(np.ones((8, 2 if DIFFERS else 3)), rules("data=8"))


def other_rows() -> None:
    flm.distribute_batch(np.ones((16 if DIFFERS else 8, 2)), rules("data=8"))


def another_structure() -> None:
    batch = {"y" if DIFFERS else "x": np.ones((8, 2))}
    flm.distribute_batch(batch, rules("data=8"))


def another_scalar() -> None:
    flm.distribute_batch({"x": np.ones((8, 2)), "step": PROCESS}, rules("data=8"))


def another_key() -> None:
    flm.distribute_batch(jax.random.key(DIFFERS), rules("data=8"))


def own_rows_as_global() -> None:
    batch = np.full((8, 2), float(DIFFERS))
    flm.distribute_batch(batch, rules("data=8"), rows="global")


def rows_that_do_not_divide() -> None:
    count = 7 if DIFFERS else 8
    flm.distribute_batch({"x": np.ones((count, 2))}, rules("data=8"))


def all_that_do_not_divide() -> None:
    batch = {"x": np.ones((5, 2))}
    flm.distribute_batch(batch, rules("data=8"), rows="global")


def a_global_array_of_other_rows() -> None:
    whole = flm.distribute_batch(WHOLE, rules("data=8"), rows="global")
    flm.distribute_batch({"a": whole["flags"], "b": np.ones(16)}, rules("data=8"))


def padding_a_global_array() -> None:
    whole = flm.distribute_batch(WHOLE, rules("data=8"), rows="global")
    flm.pad_batch(whole, rules("data=8"))


def overlapping() -> None:
    devices = jax.devices()
    order = devices[-1:] + devices[:-1]
    mesh = flm.DeviceMesh((4, 2), ("data", "model"), devices=order)
    flm.distribute_batch(np.ones((4, 3)), rules(mesh))


def without_a_device() -> None:
    devices = [d for d in jax.devices() if d.process_index != PROCESSES - 1]
    flm.distribute_batch(np.ones(8), rules(flm.DeviceMesh("data=-1", devices=devices)))


def all_the_same() -> None:
    """After all that, the processes still work together."""
    flm.distribute_batch(np.ones((8, 3)), rules("data=8"))


CASES = (
    another_shape,
    other_rows,
    another_structure,
    another_scalar,
    another_key,
    own_rows_as_global,
    rows_that_do_not_divide,
    all_that_do_not_divide,
    a_global_array_of_other_rows,
    padding_a_global_array,
    overlapping,
    without_a_device,
    all_the_same,
)


def outcome(case: Callable[[], None]) -> list[str]:
    """Type and message of the case's error."""
    try:
        case()
    except flm.LayoutError as error:
        return [type(error).__name__, str(error)]
    return ["fine", ""]


def main(folder: Path) -> dict[str, Any]:
    """All of it with two processes; with more, what only they can show."""
    checks, cases = {**placed(), **moved()}, {}
    if PROCESSES == 2:
        checks |= stepped()
        cases = {case.__name__: outcome(case) for case in CASES}
    checks = {name: bool(so) for name, so in checks.items()}
    return {"checks": checks, "cases": cases}
