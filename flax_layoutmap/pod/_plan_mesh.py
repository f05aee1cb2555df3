"""The mesh of a plan: without devices, as the user, the rules or the arguments say."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from flax_layoutmap._errors import MeshError
from flax_layoutmap._jit import Jitted
from flax_layoutmap._mesh import DeviceMesh, as_mesh
from flax_layoutmap._resolve import rule_set_of
from flax_layoutmap._rules import RuleSet
from flax_layoutmap._topologies import Topology
from flax_layoutmap.pod._aot import split_over_slices


def rules_and_mesh(
    step: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mesh: Any,
    layout_map: Any,
    topology: Topology | None,
) -> tuple[RuleSet | None, DeviceMesh]:
    """The rules on an abstract mesh, and that mesh.

    Args:
        step: the step, which may bring rules.
        args: its arguments, which may be on a mesh.
        kwargs: those by name.
        mesh: what the user says.
        layout_map: what the user says.
        topology: where the mesh is to be; None where that is not known.

    Raises:
        MeshError: there is none, or it does not fill the topology.
        RuleError: a rule names an axis that the mesh does not have.
    """
    if layout_map is None and isinstance(step, Jitted):
        layout_map = step.layout_map
    rules = None if layout_map is None else rule_set_of(layout_map, "plan(layout_map=)")
    own = _abstract_mesh(mesh, topology)
    if own is None and rules is not None and rules.mesh is not None:
        own = _abstract_mesh(rules.mesh, topology)
    if own is None and rules is None:
        own = _mesh_of_arguments(args, kwargs)
    if own is None:
        raise MeshError(
            'plan needs a mesh: pass mesh="fsdp=16,tensor=4", or rules that have one'
        )
    if topology is not None and own.size != topology.devices:
        raise MeshError(
            f"the mesh {own} has {own.size} devices, and {topology} has "
            f"{topology.devices}; change a size, or write -1 for one of them"
        )
    if topology is not None:
        split_over_slices(own.shape, topology)
    return None if rules is None else rules.on(own), own


def _abstract_mesh(mesh: Any, topology: Topology | None) -> DeviceMesh | None:
    """A mesh without devices; a size of -1 takes what the topology has left."""
    if mesh is None:
        return None
    if isinstance(mesh, str | Mapping):
        sizes = dict(mesh) if isinstance(mesh, Mapping) else _sizes_of(mesh)
        if topology is not None and list(sizes.values()).count(-1) == 1:
            rest, left = divmod(
                topology.devices,
                math.prod(size for size in sizes.values() if size != -1) or 1,
            )
            if left:
                raise MeshError(
                    f"the mesh {_line(sizes)} does not fill {topology}, which has "
                    f"{topology.devices} devices; change a size"
                )
            sizes = {name: rest if n == -1 else n for name, n in sizes.items()}
        return DeviceMesh.abstract(sizes)
    given = as_mesh(mesh)
    assert given is not None
    jax_mesh: Any = given.jax_mesh
    # That of devices, as a shard_map over them compares the kind of device, too.
    return given if given.is_abstract else as_mesh(jax_mesh.abstract_mesh)


def _sizes_of(line: str) -> dict[str, int]:
    """`"fsdp=16,tensor=-1"` as a mapping; DeviceMesh refuses what is no such line."""
    found = re.findall(r"([^,=\s]+)\s*=\s*(-?\d+)", line)
    if not found or line.count("=") != len(found) or len(dict(found)) != len(found):
        return DeviceMesh.abstract(line).axis_sizes
    return {name: int(size) for name, size in found}


def _line(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def _mesh_of_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> DeviceMesh | None:
    """The mesh that shardings of the arguments are on."""
    for leaf in jax.tree.leaves((args, kwargs)):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return _abstract_mesh(sharding.mesh, None)
    return None
