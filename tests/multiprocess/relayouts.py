"""relayout, pack, unpack and fetch_layout where no process holds all devices.

A part (see `launch`): each process answers with check → whether it holds.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import flax_layoutmap as flm
from multiprocess import launch

MESH = flm.DeviceMesh("x=4,y=2")
HOST = np.arange(64, dtype=np.float32).reshape(8, 8)
SPECS: list[Any] = [(None, None), ("x", None), (None, "y"), ("x", "y"), ("y", "x")]
if jax.process_count() > 2:  # every program is compiled in each of them
    SPECS = SPECS[1::3]


def lay(axes: Any) -> flm.TensorLayout:
    return flm.TensorLayout(axes, MESH)


def holds(array: Any, axes: Any, host: np.ndarray = HOST) -> bool:
    return launch.holds(array, host, lay(axes))


def moved() -> dict[str, bool]:
    checks = {}
    for old, new in zip(SPECS, [*SPECS[1:], SPECS[0]], strict=True):
        x, like = (flm.relayout(HOST, lay(axes)) for axes in (old, new))
        checks[f"{old} to {new}"] = holds(flm.relayout(x, lay(new)), new)
        checks[f"{old} like {new}"] = holds(flm.relayout_like(x, like), new)
        traced = jax.jit(flm.relayout_like)(x, like)
        checks[f"{old} like {new}, jit"] = holds(traced, new)

        def loss(x: Any, new: Any = new) -> Any:
            return jnp.sum(flm.relayout(x, lay(new)) ** 2)

        for name, way in {"eagerly": lambda f: f, "jit": jax.jit}.items():
            gradient = way(jax.grad(loss))(x)
            checks[f"{old} to {new}, gradient, {name}"] = holds(gradient, old, 2 * HOST)
    return checks


def parts() -> dict[str, bool]:
    checks = {}
    for axes in SPECS:
        x = flm.relayout(HOST, lay(axes))
        local = flm.dtensor.unpack(x)
        own = [{d} for d in MESH.devices.flat if d in jax.local_devices()]
        checks[f"{axes}: one part a device"] = [p.devices() for p in local] == own
        again = flm.dtensor.pack([np.asarray(part) for part in local], lay(axes))
        checks[f"{axes}: packed"] = holds(again, axes)
        checks[f"{axes}: fetched"] = flm.dtensor.fetch_layout(again) == lay(axes)
    made = flm.dtensor.call_with_layout(jnp.full, lay(("x", None)), (8, 8), 3.0)
    checks["call_with_layout"] = holds(made, ("x", None), np.full((8, 8), 3, "float32"))
    text = launch.said(lambda: flm.dtensor.pack([1.0] * 8, lay(())))
    own = f"in this process, {jax.local_device_count()}, got 8"
    checks["too many parts"] = own in text
    return checks


def main(folder: Path) -> dict[str, Any]:
    return {"checks": moved() | parts()}
