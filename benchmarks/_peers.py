"""Other libraries for the same task, each called as its documentation shows.

Every entry of `PEERS` imports its package when it is asked for a call, so a package
that is missing or cannot be imported costs one row of the table and nothing else.
What a library builds once per job (its map, its rule object) is built outside the
clock; what it does per tree is inside.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from _trees import Pairs, Trees, logical_rules
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Call = Callable[[], Any]

MESH_SHAPE, MESH_AXES = (2, 4), ("data", "model")


@dataclass(frozen=True)
class Peer:
    """One row of the table.

    Attributes:
        name: As the table prints it.
        package: The distribution, for its version.
        regex: Whether it matches regex rules on paths (else logical axis names).
        kinds: The kinds of tree that it takes.
        prepare: Builds what is built once per job; returns the call to time.
    """

    name: str
    package: str
    regex: bool
    kinds: tuple[str, ...]
    prepare: Callable[[Trees, int, Mesh], Call]


def _keras(trees: Trees, count: int, mesh: Mesh) -> Call:
    os.environ.setdefault("KERAS_BACKEND", "jax")
    distribution = importlib.import_module("keras").distribution
    device_mesh = distribution.DeviceMesh(
        MESH_SHAPE, MESH_AXES, devices=[str(device) for device in mesh.devices.flat]
    )
    layout_map = distribution.LayoutMap(device_mesh)
    for pattern, axes in _keras_rules(trees, count):
        layout_map[pattern] = distribution.TensorLayout(axes, device_mesh)
    replicated = NamedSharding(mesh, PartitionSpec())

    def sharding(key_path: tuple[Any, ...], _: Any) -> NamedSharding:
        layout = layout_map[joined(key_path)]
        return replicated if layout is None else layout.backend_layout

    return lambda: jax.tree_util.tree_map_with_path(sharding, trees.tree)


def _keras_rules(trees: Trees, count: int) -> list[tuple[str, tuple[str, ...]]]:
    """The same rules for full matches, with no path matched by two of them."""
    tail = "(/value)?" if trees.kind == "state" else ""
    *families, _ = trees.rules(count)
    pairs = [(f".*{pattern}{tail}", tuple(spec)) for pattern, spec in families]
    return [*pairs, (f".*step{tail}", ())]


def joined(key_path: tuple[Any, ...]) -> str:
    """A key path as the path string that Keras gives its variables."""
    return "/".join(
        str(key.key if hasattr(key, "key") else getattr(key, "name", key))
        for key in key_path
    )


def _eformer(trees: Trees, count: int, mesh: Mesh) -> Call:
    escale = importlib.import_module("eformer.escale")
    rules: Pairs = trees.rules(count)
    return lambda: escale.match_partition_rules(rules, trees.tree)


def _scalax(trees: Trees, count: int, mesh: Mesh) -> Call:
    sharding = importlib.import_module("scalax.sharding")
    helper = sharding.MeshShardingHelper(MESH_SHAPE, MESH_AXES)
    rule = sharding.TreePathShardingRule(*trees.rules(count))
    return lambda: helper.match_sharding_rule(rule, trees.tree)


def _linen(trees: Trees, count: int, mesh: Mesh) -> Call:
    linen = importlib.import_module("flax.linen")
    rules, specs = logical_rules(count), trees.logical_specs
    return lambda: linen.logical_to_mesh_sharding(specs, mesh, rules)


def _nnx(trees: Trees, count: int, mesh: Mesh) -> Call:
    rules, state = logical_rules(count), trees.annotated

    def call() -> Any:
        with nnx.logical_axis_rules(rules):
            return nnx.get_named_sharding(state, mesh)

    return call


_ANY = ("dict", "digits", "state")
PEERS = (
    Peer("Keras `LayoutMap`", "keras", True, _ANY, _keras),
    Peer("eformer `match_partition_rules`", "eformer", True, _ANY, _eformer),
    Peer("scalax `TreePathShardingRule`", "scalax", True, _ANY, _scalax),
    Peer("Linen `logical_to_mesh_sharding`", "flax", False, ("dict",), _linen),
    Peer("NNX `get_named_sharding`", "flax", False, ("state",), _nnx),
)
