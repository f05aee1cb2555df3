"""flm.checkpoint.restore, plan, inspect, resolve and verify."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from flax_layoutmap._core.checksums import checksums
from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap._core.layout import is_offloaded, own_memory_kind
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._core.processes import Agreement
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._rules.records import because
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._show.terminal import shown_progress
from flax_layoutmap.checkpoint import _join, _orbax
from flax_layoutmap.checkpoint._join import Missing, Options, Unexpected
from flax_layoutmap.checkpoint._leaves import Leaf, grouped, problem_list
from flax_layoutmap.checkpoint._metadata import CheckpointInfo, LeafInfo
from flax_layoutmap.checkpoint._places import is_safetensors, is_url
from flax_layoutmap.checkpoint._safetensors import read_headers
from flax_layoutmap.checkpoint._stored import open_checkpoint

# Bytes of arrays that `verify` reads at a time; a larger one is read alone.
_PORTION_BYTES = 1 << 29


def restore(
    path: str | os.PathLike[str],
    target: Any = None,
    *,
    layout_map: Any = None,
    mesh: Any = None,
    step: int | str | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    rename: Any = None,
    dtype: Any = None,
    missing: Missing = "error",
    unexpected: Unexpected = "error",
    host_memory: int | None = None,
    broadcast: str | None = None,
    verify: bool | None = None,
    progress: bool | None = None,
) -> Any:
    r"""Restore a checkpoint of `save` or of Orbax, each leaf directly into its shards.

    Leaves are joined with those of the target by path. Everything is checked before any
    array is read; one `CheckpointError` lists every problem.

    Args:
        path: the checkpoint, a directory of steps, or one of several trees in a
            checkpoint (`runs/100/params`).
        target: any tree, concrete or abstract, or a function that returns one, which is
            only traced. None restores every leaf as a nested dict.
        layout_map: the rules. None keeps the shardings of the target's leaves.
        mesh: a mesh for these rules, or for those that the checkpoint was saved with.
        step: a number, or `"latest"` as None, if `path` is a directory of steps.
        include: regular expressions; only leaves in whose full path (`model/decoder/…`)
            one of them is found are restored. The others keep the target's values.
        exclude: the opposite.
        rename: pairs of a regular expression and its replacement, or a dict of them.
            The first one found in a path of the checkpoint renames it, before all else.
        dtype: a floating-point dtype for all floating-point arrays, `"target"` for the
            target's, or pairs of a regular expression and one of these.
        missing: for leaves that only the target has: `"error"`, `"keep"` them, or
            `"init"`ialize them with the function that is the target.
        unexpected: for leaves that only the checkpoint has: `"error"` or `"ignore"`.
        host_memory: bytes that Orbax may be reading at a time on each host, more than
            the largest leaf takes.
        broadcast: a mesh axis. Arrays that are replicated along it over processes are
            read by the first replica, which sends them (Orbax's load-and-broadcast).
        verify: whether to compare with checksums: None if there are any, True always.
        progress: whether process 0 shows the time on stderr; None: on a terminal.

    Returns:
        A tree of the target's type. Concrete NNX objects are updated in place once all
        leaves have been read. Numbers have the target's kind.

    Example:
        >>> import tempfile, jax.numpy as jnp, flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap("data=-1", strict=False)
        >>> path = tempfile.mkdtemp() + "/weights"
        >>> flm.checkpoint.save(path, {"w": jnp.ones((8, 4)), "step": 3})
        >>> flm.checkpoint.restore(path, layout_map=layout_map)["step"]
        3

    Plain JAX: `orbax.checkpoint.v1.load(path, layout_map.abstract(tree))`.
    """
    return _join.restored("restore", open_checkpoint, Options(**locals()))


def plan(
    path: str | os.PathLike[str], target: Any = None, **options: Any
) -> CheckpointInfo:
    """Plan what `restore` with the same arguments reads; raise the same errors.

    No array is read, and the mesh may be abstract. `options` are those of `restore`,
    without `verify` and `progress`.

    Returns:
        The leaves to read, as they will be in the result; print it.

    Example:
        >>> import tempfile, jax.numpy as jnp, flax_layoutmap as flm
        >>> path = tempfile.mkdtemp() + "/weights"
        >>> flm.checkpoint.save(path, {"w": jnp.ones((64, 8))})
        >>> layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("data=16"))
        >>> layout_map["w"] = ("data", None)
        >>> plan = flm.checkpoint.plan(path, layout_map=layout_map)
        >>> plan.leaves[0].rule, plan.bytes_per_device
        ('1 w', 128)
    """
    checked = Options(path, target, **options)
    stored, _, joined = _join.planned("planning to restore", open_checkpoint, checked)
    rules, resolution = dict[str, str](), joined.resolution
    if resolution is not None:
        rows = zip(resolution.paths, resolution._rows, strict=True)
        rules = {p: because(row, resolution.rules, short=True) for p, row in rows}
    leaves = []
    for name, read in joined.reads.items():
        leaf, sharding, size = read.result, read.sharding, 0
        if sharding is not None and not is_offloaded(own_memory_kind(sharding)):
            size = leaf.bytes(sharding.shard_shape(leaf.shape))
        known = {"rule": rules.get(name, ""), "bytes_per_device": size}
        spec = getattr(sharding, "spec", None)
        leaves.append(_info(name, leaf, read.stored.path, spec, **known))
    return dataclasses.replace(stored.info, leaves=tuple(leaves))


def inspect(
    path: str | os.PathLike[str], *, step: int | str | None = None
) -> CheckpointInfo:
    """Describe a checkpoint without devices and without reading an array.

    Args:
        path: a checkpoint of `save` or of Orbax, one of several trees in it, a
            directory of steps, or safetensors (a file, their folder, or index).
        step: as in `restore`.

    Example:
        >>> import tempfile, jax.numpy as jnp, flax_layoutmap as flm
        >>> path = tempfile.mkdtemp() + "/weights"
        >>> flm.checkpoint.save(path, {"w": jnp.ones((8, 4)), "step": 3})
        >>> info = flm.checkpoint.inspect(path)
        >>> [(leaf.path, leaf.shape, leaf.dtype) for leaf in info.leaves]
        [('step', (), 'int'), ('w', (8, 4), 'float32')]

    Plain JAX: `orbax.checkpoint.v1.metadata(path)`.
    """
    options = Options(path, step=step)
    where = options.path
    if not is_url(where) and is_safetensors(where):
        tensors = read_headers(where).values()
        held = [Leaf(x.name, "array", x.shape, x.dtype) for x in tensors]
        leaves = [_info(x.path, x, x.path, None, role="parameter") for x in held]
        return CheckpointInfo(path=where, kind="safetensors", leaves=tuple(leaves))
    stored = open_checkpoint(options)
    rules = None if stored.info.mesh is None else stored.rule_set(None)
    resolution = stored.own.resolve(rules or RuleSet(strict=False), stored.origins)
    specs = resolution.specs if rules else [None] * len(resolution.paths)
    leaves = []
    for leaf, resolved, spec in zip(
        stored.record.leaves.values(), resolution, specs, strict=True
    ):
        role = "other" if leaf.is_python else resolved.role
        spec = _orbax.spec_of(stored.held.get(leaf.path)) or spec
        leaves.append(_info(resolved.path, leaf, leaf.path, spec, role=role))
    return dataclasses.replace(stored.info, leaves=tuple(leaves))


def _info(path: str, leaf: Leaf, source: str, spec: Any, **known: Any) -> LeafInfo:
    known |= {"source": source, "spec": spec, "bytes": leaf.bytes()}
    dtype = leaf.kind if leaf.is_python else str(leaf.dtype)
    return LeafInfo(path=path, shape=leaf.shape, dtype=dtype, **known)


def resolve(
    path: str | os.PathLike[str],
    *,
    layout_map: Any = None,
    mesh: Any = None,
    step: int | str | None = None,
    rename: Any = None,
) -> Resolution:
    """Resolve the layout of every leaf of a checkpoint, without the model's code.

    Reads no array, and needs no devices: the mesh may be abstract.

    Args:
        path: a checkpoint, or a directory of steps.
        layout_map: the rules; None: those that the checkpoint was saved with.
        mesh: the mesh for them; None: their own, or that of the save, abstract.
        step: as in `restore`.
        rename: as in `restore`.

    Example:
        >>> import tempfile, jax.numpy as jnp, flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap("data=-1")
        >>> layout_map["w"] = ("data", None)
        >>> path = tempfile.mkdtemp() + "/weights"
        >>> flm.checkpoint.save(path, {"w": jnp.ones((64, 8))}, layout_map=layout_map)
        >>> mesh = flm.DeviceMesh.abstract("data=16")
        >>> flm.checkpoint.resolve(path, mesh=mesh)["w"].shard_shape
        (4, 8)
    """
    options = Options(path, layout_map=layout_map, mesh=mesh, step=step, rename=rename)
    stored = open_checkpoint(options)
    rules = options.rules or stored.rule_set(options.mesh)
    if rules is not None and rules.mesh is None and stored.info.mesh is not None:
        rules = rules.on(stored.info.mesh)
    if rules is None or rules.mesh is None:
        lacking = "rules; pass layout_map=" if rules is None else "a mesh; pass mesh="
        raise CheckpointError(f"{stored.where} was saved without {lacking}")
    return stored.own.resolve(rules, stored.origins)


def verify(
    path: str | os.PathLike[str],
    *,
    step: int | str | None = None,
    progress: bool | None = None,
) -> int:
    """Read a checkpoint and compare it with the checksums in its metadata.

    Needs no mesh, no rules and no accelerator. In a job of several processes all of
    them call it, each reads a share of the leaves, and all raise if one does.

    Args:
        path: a checkpoint of `save` or `Checkpointer`, or a directory of steps.
        step: as in `restore`.
        progress: as in `restore`.

    Returns:
        The number of leaves, which are as they were saved.

    Example:
        >>> import tempfile, jax.numpy as jnp, flax_layoutmap as flm
        >>> path = tempfile.mkdtemp() + "/weights"
        >>> flm.checkpoint.save(path, {"w": jnp.ones((8, 4)), "step": 3})
        >>> flm.checkpoint.verify(path)
        2
    """
    options = Options(path, step=step)
    every = DeviceMesh((jax.device_count(),), ("all",))
    with Agreement(f"verifying {options.path}", every):
        stored = open_checkpoint(options)
        if stored.record.checksums is None:
            raise CheckpointError(stored.no_checksums())
        leaves = [leaf for leaf in stored.record.leaves.values() if not leaf.is_empty]
        share = leaves[jax.process_index() :: jax.process_count()]
        problems: list[str] = []
        with shown_progress(f"verifying {stored.where}", None, progress):
            for part in grouped(share, Leaf.bytes, _PORTION_BYTES):
                wanted = {x.path: x.abstract if x.is_text else np.ndarray for x in part}
                sums = checksums(stored.arrays(wanted), alone=True)
                problems += stored.changed(part, sums)
        if problems:
            raise problem_list(f"the checkpoint {stored.where} is damaged", problems)
    return len(leaves)
