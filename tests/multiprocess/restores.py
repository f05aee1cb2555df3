"""Restore a tree onto other meshes, also by broadcast, and save it.

A part (see `launch`): four processes restore what one saved, and two or four save.
`python -m multiprocess.restores PATH` restores.
"""

import functools
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

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
WANTED: dict[str, dict[str, Any]] = {
    "rows": {"mesh": "x=8", "rules": SAVED},
    "columns": {
        "mesh": "x=8",
        "rules": {"big/rows": (None, "x"), "big/half": (None, "x")},
    },
    "grid": {
        "mesh": "a=2,b=4",
        "rules": {"big/rows": ("b", "a"), "big/half": (None, "b")},
    },
    "explicit": {
        "mesh": "a=2,b=4",
        "explicit": True,
        "rules": {"big/rows": (None, "b"), "big/half": (None, "a")},
    },
    "replicated": {"mesh": "a=2,b=4", "rules": {}},
}


@functools.cache
def expected(path: str) -> np.ndarray:
    """The values of a leaf."""
    shape, dtype = LEAVES[path]
    count = int(np.prod(shape, dtype=np.int64))
    random = np.random.default_rng(len(path)).random(count, np.float32)
    whole = (random if "float" in dtype else np.full(count, 7)).reshape(shape)
    return whole.astype(np.dtype(dtype))


def tree_of(leaves: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree


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

    tree = tree_of({name: leaf(name) for name in LEAVES})
    flm.checkpoint.save(path, tree, layout_map=layout_map)


def restore(path: Path) -> dict[str, list[str]]:
    """Target, and the axis to broadcast along → what is wrong."""
    wrong: dict[str, list[str]] = {}
    for name, wanted in WANTED.items():
        mesh = flm.DeviceMesh(wanted["mesh"])
        if wanted.get("explicit"):
            kinds = ("explicit",) * len(mesh.shape)
            mesh = flm.DeviceMesh(wanted["mesh"], axis_types=kinds)
        layout_map = flm.LayoutMap(mesh, strict=False)
        layout_map.update(wanted["rules"])
        for axis in (None, mesh.axis_names[0]):
            tree = flm.checkpoint.restore(path, layout_map=layout_map, broadcast=axis)
            problems = wrong.setdefault(f"{name} {axis}", [])
            for leaf in LEAVES:
                array = tree
                for part in leaf.split("/"):
                    array = array[part]
                spec = jax.P(*wanted["rules"].get(leaf, ()))
                sharding = NamedSharding(mesh.jax_mesh, spec)
                if not array.sharding.is_equivalent_to(sharding, array.ndim):
                    problems.append(f"{leaf}: {array.sharding}")
                if array.sharding.mesh != mesh.jax_mesh:
                    problems.append(f"{leaf}: {array.sharding.mesh}")
                for shard in array.addressable_shards:
                    if not np.array_equal(shard.data, expected(leaf)[shard.index]):
                        problems.append(f"{leaf}: {shard.index}")
    return wrong


def prepare(folder: Path) -> None:
    save(folder / "of one")


def main(folder: Path) -> dict[str, list[str]]:
    """Four restore what one saved; what these save is restored by others."""
    wrong = restore(folder / "of one") if jax.process_count() > 2 else {}
    save(folder / "of these")
    return wrong


if __name__ == "__main__":
    launch.join()
    launch.answer(restore(Path(sys.argv[1])))
