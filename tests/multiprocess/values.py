"""Values that every process holds become global arrays; each device gets its shard.

A part (see `launch`): each process answers with check → whether it holds; a check
raises where that is unknown.
"""

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import flax_layoutmap as flm
from multiprocess.launch import holds, said

MESH = flm.DeviceMesh("data=2,model=4")
EXPLICIT = flm.DeviceMesh("data=2,model=4", axis_types="explicit")
OTHER = flm.DeviceMesh("data=4,model=2")
REVERSED = flm.DeviceMesh((2, 4), ("data", "model"), devices=jax.devices()[::-1])
OWN = flm.DeviceMesh("data=2,model=-1", devices=jax.local_devices())
HOST = np.arange(64, dtype=np.float32).reshape(8, 8)


def key_holds(array: Any, keys: jax.Array, layout: flm.TensorLayout) -> bool:
    """The same for typed keys."""
    host = np.asarray(jax.random.key_data(keys))
    of_data = flm.TensorLayout((*layout.spec(keys.ndim), ...), layout.device_mesh)
    return (
        array.sharding == layout.sharding(keys.ndim)
        and array.dtype == keys.dtype
        and holds(jax.random.key_data(array), host, of_data)
    )


def rules(mesh: flm.DeviceMesh) -> flm.LayoutMap:
    """Rules for linear layers."""
    layout_map = flm.LayoutMap(mesh)
    layout_map["kernel"] = ("data", "model")
    layout_map["bias"] = ("model",)
    return layout_map


def distributed() -> dict[str, bool]:
    """`distribute_tensor` of host values, and of its results, on all kinds of mesh."""
    checks = {}
    for name, mesh, other in (
        ("auto", MESH, OTHER),
        ("explicit", EXPLICIT, MESH),
        ("turned", REVERSED, OTHER),
    ):
        layout = flm.TensorLayout(("data", "model"), mesh)
        array = flm.distribute_tensor(HOST, layout)
        checks[f"host to {name}"] = holds(array, HOST, layout)
        checks[f"{name} stays"] = flm.distribute_tensor(array, layout) is array
        target = flm.TensorLayout((None, ("model", "data")), other)
        moved = flm.distribute_tensor(array, target)
        checks[f"from {name}"] = holds(moved, HOST, target)
        keys = jax.random.split(jax.random.key(7, impl="rbg"), 8)
        placed = flm.distribute_tensor(keys, flm.TensorLayout(("data",), mesh))
        turned = flm.TensorLayout(("model",), REVERSED)
        moved = flm.distribute_tensor(placed, turned)
        checks[f"keys by {name}"] = key_holds(moved, keys, turned)
    rows = flm.TensorLayout(("data", ...), MESH)
    tree = {"a": jnp.asarray(HOST), "b": None, "c": HOST.astype(jnp.bfloat16)}
    placed = flm.distribute_tensor(tree, rows)
    checks["an array of this process"] = holds(placed["a"], HOST, rows)
    checks["None"] = placed["b"] is None
    checks["bfloat16"] = holds(placed["c"], tree["c"], rows)
    number = flm.distribute_tensor(3, flm.TensorLayout(None, MESH))
    checks["a Python number"] = int(number) == 3 and not number.is_fully_addressable
    array = flm.distribute_tensor(HOST, flm.TensorLayout(("data", "model"), MESH))
    own = flm.TensorLayout(("data", None), OWN)
    text = said(lambda: flm.distribute_tensor(array, own))
    checks["to the devices of one process"] = "other processes" in text
    return checks


def placed() -> dict[str, bool]:
    """`place` of a tree and of a module that was made eagerly, and again elsewhere."""
    layout_map = rules(MESH)
    kernel, bias = layout_map["kernel"], layout_map["bias"]
    assert kernel is not None and bias is not None
    tree = {"kernel": HOST, "bias": HOST[0], "key": jax.random.key(3), "step": 3}
    there = layout_map.place(tree)
    everywhere = flm.TensorLayout(None, MESH)
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    values = np.asarray(model.kernel[...])
    layout_map.place(model)
    at_first = holds(model.kernel[...], values, kernel)
    rules(REVERSED).place(model)
    elsewhere = flm.TensorLayout(("data", "model"), REVERSED)
    number = there["step"]
    return {
        "kernel": holds(there["kernel"], HOST, kernel),
        "bias": holds(there["bias"], HOST[0], bias),
        "key": key_holds(there["key"], tree["key"], everywhere),
        "step": int(number) == 3 and number.sharding.mesh == MESH.jax_mesh,
        "module": at_first,
        "module, again": holds(model.kernel[...], values, elsewhere),
    }


def resharded() -> dict[str, bool]:
    """`reshard` in chunks and in slices, between meshes of the same devices."""
    before, checks = rules(MESH), {}
    host = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)
    for name, mesh in {"other": OTHER, "turned": REVERSED, "kinds": EXPLICIT}.items():
        tree = before.place({"kernel": host, "bias": host[0], "step": 3})
        moved = flm.reshard(tree, rules(mesh), max_bytes=100, donate=True)
        layout = flm.TensorLayout(("data", "model"), mesh)
        checks[f"reshard, {name}"] = holds(moved["kernel"], host, layout)
    kernel = before["kernel"]
    assert kernel is not None
    alone = {"kernel": jax.device_put(host, jax.local_devices()[0])}
    moved = flm.reshard(alone, before, max_bytes=100, donate=True)
    checks["reshard from one device"] = holds(moved["kernel"], host, kernel)
    tree = before.place({"kernel": host, "bias": host[0]})
    text = said(lambda: flm.reshard(tree, rules(OWN), donate=True))
    checks["reshard to other devices"] = "other processes" in text
    checks["nothing lost"] = holds(tree["kernel"], host, kernel)
    return checks


def alone() -> dict[str, bool]:
    """What one process may do while the others do something else."""
    process = jax.process_index()
    width = 4 + 4 * process
    mine = flm.create(lambda: nnx.Linear(width, 8, rngs=nnx.Rngs(0)), rules(OWN))
    other = rules(OWN).place({"kernel": HOST + process, "bias": HOST[0]})
    model = flm.create(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), rules(MESH))
    step = flm.jit(lambda model, x: model(x).sum(), layout_map=rules(MESH))
    text = ""
    if process == 0:
        x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        text = step.lower(model, x).compile().as_text()
    return {
        "own model": mine.kernel.shape == (width, 8),
        "own values": np.array_equal(other["kernel"], HOST + process),
        "lowered by process 0 only": ("all-reduce" in text) == (process == 0),
        "then called by all": bool(np.isfinite(step(model, HOST))),
    }


def hybrid() -> dict[str, bool]:
    """A mesh with its slow axis over the processes."""
    mesh = flm.DeviceMesh.hybrid(ici={"model": -1}, dcn={"data": -1})
    rows = [{device.process_index for device in row} for row in mesh.devices]
    layout = flm.TensorLayout(("data", "model"), mesh)
    return {
        "a row for each process": rows == [{at} for at in range(jax.process_count())],
        "values on it": holds(flm.distribute_tensor(HOST, layout), HOST, layout),
    }


def reported() -> dict[str, bool]:
    """Process 0 prints a report and warns, every process writes its file."""
    layout_map = rules(MESH)
    resolution = layout_map.resolve({"kernel": HOST})
    printed, written = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        resolution.show()
    resolution.show(written)
    layout_map["renamed/kernel_of_old"] = ("data", None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layout_map.place({"kernel": HOST, "bias": HOST[0]})
    first = jax.process_index() == 0
    return {
        "printed by process 0": bool(printed.getvalue()) == first,
        "process 0 warns of an unused rule": bool(caught) == first,
        "written by all": "kernel" in written.getvalue(),
    }


def main(folder: Path) -> dict[str, Any]:
    """The checks; files are written into the folder."""
    checks: dict[str, bool] = {}
    for group in (distributed, placed, resharded, alone, hybrid, reported):
        checks |= group()
    rules(MESH).to_file(folder / "rules.toml")  # by all processes at the same path
    return {"checks": {name: bool(holds) for name, holds in checks.items()}}
