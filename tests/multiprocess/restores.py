"""Saves a tree, or restores it onto other meshes with each strategy, and tells both.

`python -m multiprocess.restores save PATH` or `… restore PATH STRATEGY …`.
"""

import sys
from typing import Any

from multiprocess.launch import answer, join

# Path → shape and dtype; `big` is larger than what is always read directly.
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


def expected(path: str, index: Any) -> Any:
    """The values of a leaf, or of a part of it."""
    import numpy as np

    shape, dtype = LEAVES[path]
    count = int(np.prod(shape, dtype=np.int64))
    random = np.random.default_rng(len(path)).random(count, np.float32)
    whole = (random if "float" in dtype else np.full(count, 7)).reshape(shape)
    return whole.astype(np.dtype(dtype))[index]


def tree_of(leaves: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree


def save(path: str) -> None:
    import jax
    from jax.sharding import NamedSharding

    import flax_layoutmap as flm

    mesh = flm.DeviceMesh("x=-1")
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map.update(SAVED)

    def leaf(name: str) -> Any:
        spec = jax.P(*SAVED.get(name, ()))
        sharding = NamedSharding(mesh.jax_mesh, spec)
        return jax.make_array_from_callback(
            LEAVES[name][0], sharding, lambda index: expected(name, index)
        )

    tree = tree_of({name: leaf(name) for name in LEAVES})
    flm.checkpoint.save(path, tree, layout_map=layout_map)


def restore(path: str, strategies: list[str]) -> dict[str, Any]:
    """Target and strategy → bytes needed, planned and read, and what is wrong."""
    import jax
    import numpy as np

    import flax_layoutmap as flm
    from flax_layoutmap.checkpoint import _orbax

    found = {}
    for name, wanted in WANTED.items():
        mesh = flm.DeviceMesh(wanted["mesh"])
        if wanted.get("explicit"):
            kinds = ("explicit",) * len(mesh.shape)
            mesh = flm.DeviceMesh(wanted["mesh"], axis_types=kinds)
        layout_map = flm.LayoutMap(mesh, strict=False)
        layout_map.update(wanted["rules"])
        for strategy in strategies:
            plan = flm.checkpoint.plan(path, layout_map=layout_map, strategy=strategy)
            before = _orbax.bytes_read()
            tree = flm.checkpoint.restore(
                path, layout_map=layout_map, strategy=strategy
            )
            read = _orbax.bytes_read() - before
            wrong = []
            for leaf in LEAVES:
                array = tree
                for part in leaf.split("/"):
                    array = array[part]
                spec = jax.P(*wanted["rules"].get(leaf, ()))
                sharding = jax.sharding.NamedSharding(mesh.jax_mesh, spec)
                if not array.sharding.is_equivalent_to(sharding, array.ndim):
                    wrong.append(f"{leaf}: {array.sharding}")
                if array.sharding.mesh != mesh.jax_mesh:
                    wrong.append(f"{leaf}: {array.sharding.mesh}")
                for shard in array.addressable_shards:
                    if not np.array_equal(shard.data, expected(leaf, shard.index)):
                        wrong.append(f"{leaf}: {shard.index}")
            number = jax.process_index()
            found[f"{name} {strategy}"] = {
                "needed": plan.needed[number],
                "planned": plan.read[number],
                "read": read,
                "strategies": {leaf.path: leaf.strategy for leaf in plan.leaves},
                "wrong": wrong,
            }
    return found


if __name__ == "__main__":
    join()
    if sys.argv[1] == "save":
        save(sys.argv[2])
        answer("saved")
    else:
        answer(restore(sys.argv[2], sys.argv[3:]))
