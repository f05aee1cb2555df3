"""Restore a tree onto other meshes, also by broadcast, and save it.

A part (see `launch`): four processes restore what one saved, and two or four save.
`python -m multiprocess.restores PATH` restores.
"""

import functools
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from shapes import nested

import flax_layoutmap as flm
from multiprocess import launch

# Path → shape and dtype.
LEAVES = {
    "big/rows": ((1024, 1024), "float32"),
    "big/half": ((2048, 1024), "bfloat16"),
    "big/repeated": ((1024, 512), "float32"),
    "small/kernel": ((8, 16), "float32"),
    "small/bias": ((24,), "float32"),
    "count": ((), "int32"),
}
SAVED = {"big/rows": ("x", None), "big/half": ("x", None), "small/kernel": ("x", None)}
# Target → mesh, kind of its axes, rules.
WANTED: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "rows": ("x=8", "auto", SAVED),
    "columns": ("x=8", "auto", {"big/rows": (None, "x"), "big/half": (None, "x")}),
    "grid": ("a=2,b=4", "auto", {"big/rows": ("b", "a"), "big/half": (None, "b")}),
    "explicit": (
        *("a=2,b=4", "explicit"),
        {"big/rows": (None, "b"), "big/half": (None, "a")},
    ),
    "replicated": ("a=2,b=4", "auto", {}),
}


@functools.cache
def expected(path: str) -> np.ndarray:
    """The values of a leaf."""
    shape, dtype = LEAVES[path]
    count = int(np.prod(shape, dtype=np.int64))
    random = np.random.default_rng(len(path)).random(count, np.float32)
    whole = (random if "float" in dtype else np.full(count, 7)).reshape(shape)
    return whole.astype(np.dtype(dtype))


def save(path: Path) -> None:
    mesh = flm.DeviceMesh("x=-1")
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map.update(SAVED)

    def leaf(name: str) -> Any:
        spec = jax.P(*SAVED.get(name, ()))
        sharding = NamedSharding(mesh.jax_mesh, spec)
        return jax.make_array_from_callback(
            LEAVES[name][0], sharding, lambda index: expected(name)[index]
        )

    tree = nested({name: leaf(name) for name in LEAVES})
    flm.checkpoint.save(path, tree, layout_map=layout_map)


def restore(path: Path) -> dict[str, list[str]]:
    """Target, and the axis to broadcast along → what is wrong."""
    wrong: dict[str, list[str]] = {}
    for name, (spec, kind, rules) in WANTED.items():
        mesh = flm.DeviceMesh(spec, axis_types=kind)
        layout_map = flm.LayoutMap(mesh, strict=False)
        layout_map.update(rules)
        for axis in (None, mesh.axis_names[0]):
            tree = flm.checkpoint.restore(path, layout_map=layout_map, broadcast=axis)
            leaves = zip(sorted(LEAVES), jax.tree.leaves(tree), strict=True)
            wrong[f"{name} {axis}"] = [
                f"{leaf}: {array.sharding}"
                for leaf, array in leaves
                if not launch.holds(
                    array,
                    expected(leaf),
                    flm.TensorLayout(rules.get(leaf, (...,)), mesh),
                )
            ]
    return wrong


def prepare(folder: Path) -> None:
    save(folder / "of one")


def flipped(path: Path) -> str:
    """What a restore says after a bit of one array was flipped in a copy."""
    copy = path.with_name("flipped")
    if jax.process_index() == 0:
        shutil.copytree(path, copy)
        files = copy.glob("state/ocdbt.process_*/d/*")
        file = max(files, key=lambda file: file.stat().st_size)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    multihost_utils.sync_global_devices("flipped")
    rules = flm.LayoutMap("x=8", strict=False)
    return launch.said(lambda: flm.checkpoint.restore(copy, layout_map=rules))


def main(folder: Path) -> dict[str, Any]:
    """Four restore what one saved; what these save is restored by others."""
    wrong = restore(folder / "of one") if jax.process_count() > 2 else {}
    path = folder / "of these"
    save(path)
    verified = flm.checkpoint.verify(path)
    return {"wrong": wrong, "verified": verified, "flipped": flipped(path)}


if __name__ == "__main__":
    launch.join()
    launch.answer(restore(Path(sys.argv[1])))
