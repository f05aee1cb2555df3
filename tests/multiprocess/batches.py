"""Each process passes its rows of a batch; every device gets its shard.

A part (see `launch`), of any number of processes with eight devices; it answers with
check → whether it holds, and case → how it ended.
"""

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


def layout_of(layout_map: flm.LayoutMap) -> flm.TensorLayout:
    axes = (layout_map.freeze().batch, ...)
    return flm.TensorLayout(axes, layout_map.device_mesh)


def rows_of(array: np.ndarray, layout_map: flm.LayoutMap) -> np.ndarray:
    """The rows of the devices of this process."""
    sharding = layout_of(layout_map).sharding(array.ndim)
    parts = sharding.addressable_devices_indices_map(array.shape).values()
    held = sorted({part[0].indices(len(array)) for part in parts if part})
    return np.concatenate([array[slice(*rows)] for rows in held])


def holds(array: Any, whole: np.ndarray, layout_map: flm.LayoutMap) -> bool:
    """Whether each shard here is the right part of the whole, and no more."""
    return launch.holds(array, whole, layout_of(layout_map))


def grids() -> Iterator[tuple[str, flm.LayoutMap]]:
    """Meshes of eight devices, with the batch over all kinds of their axes."""
    turned = flm.DeviceMesh((2, 4), ("data", "model"), devices=jax.devices()[::-1])
    yield "turned", rules(turned)
    yield "second axis", rules("data=2,model=4", "model")
    if PROCESSES == 2:
        yield "data=8", rules("data=8")
        yield "explicit", rules(flm.DeviceMesh("data=2,model=4", axis_types="explicit"))
        yield "crossed", rules("data=2,model=4", ("model", "data"))
        yield "no axis", rules("data=2,model=4", ())


def placed() -> dict[str, bool]:
    """Every grid, with the rows passed in every way that it allows.

    Of two processes on `turned`, each fills a part; of four, two have the same one.
    """
    checks = {}
    for name, layout_map in grids():
        everywhere = flm.TensorLayout((), layout_map.device_mesh).sharding()
        for rows in ("local", "global"):
            batch = dict(WHOLE)
            if rows == "local":
                batch = {key: rows_of(x, layout_map) for key, x in WHOLE.items()}
            made = flm.distribute_batch(batch | EVERYWHERE, layout_map, rows=rows)
            data = jax.random.key_data(made["key"])
            again = flm.distribute_batch(made, layout_map, rows=rows)
            checks[f"{name}, {rows}"] = (
                all(holds(made[key], x, layout_map) for key, x in WHOLE.items())
                and float(made["rate"]) == 0.5
                and int(made["step"]) == 3
                and made["none"] is None
                and all(
                    made[key].sharding == everywhere for key in ("rate", "step", "key")
                )
                and np.array_equal(data, jax.random.key_data(EVERYWHERE["key"]))
                and all(again[key] is made[key] for key in made)
            )
    return checks


def moved() -> dict[str, bool]:
    """Arrays that are global already go along with those of the host."""
    layout_map = rules("data=2,model=4")
    host = rows_of(WHOLE["tokens"], layout_map)
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
    own = rows_of(numbers, uneven)
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
    x, mask = flm.pad_batch(x, layout_map, size=32 // PROCESSES)
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
    loss = float(loss_of(model, *batch))
    own = flm.pad_batch(np.ones((1, 8)), layout_map)[0]
    whole = flm.pad_batch(np.ones((1, 8)), layout_map, rows="global")[0]
    return {
        "the shape of all batches": batch[0].shape == (32, 8),
        "the masked mean": np.allclose(loss, np.concatenate(every).mean()),
        "the multiple of its own": own.shape == (8 // PROCESSES, 8),
        "the multiple of all": whole.shape == (8, 8),
    }


def global_rows(batch: Any) -> Any:
    return flm.distribute_batch(batch, rules("data=8"), rows="global")


def overlapping() -> None:
    order = jax.devices()[-1:] + jax.devices()[:-1]
    mesh = flm.DeviceMesh((4, 2), ("data", "model"), devices=order)
    flm.distribute_batch(np.ones((4, 3)), rules(mesh))


def without_a_device() -> None:
    devices = [d for d in jax.devices() if d.process_index != PROCESSES - 1]
    flm.distribute_batch(np.ones(8), rules(flm.DeviceMesh("data=-1", devices=devices)))


# What `disagree` does not show; there are the batches that differ.
CASES: dict[str, Callable[[], Any]] = {
    "rows that do not divide": lambda: flm.distribute_batch(
        {"x": np.ones((7 if DIFFERS else 8, 2))}, rules("data=8")
    ),
    "all rows": lambda: global_rows({"x": np.ones((5, 2))}),
    "a global array of other rows": lambda: flm.distribute_batch(
        {"a": global_rows(WHOLE)["flags"], "b": np.ones(16)}, rules("data=8")
    ),
    "padding a global array": lambda: flm.pad_batch(
        global_rows(WHOLE), rules("data=8")
    ),
    "overlapping": overlapping,
    "without a device": without_a_device,
}


def main(folder: Path) -> dict[str, Any]:
    """All of it with two processes; with more, what only they can show."""
    checks, cases = {**placed(), **moved()}, {}
    if PROCESSES == 2:
        cases = {name: launch.said(case) for name, case in CASES.items()}
        checks |= stepped()  # after all that, the processes still work together
    return {"checks": {name: bool(so) for name, so in checks.items()}, "cases": cases}
