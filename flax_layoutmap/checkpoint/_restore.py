"""flm.checkpoint.restore and flm.checkpoint.plan: the stages of a restore.

path → metadata → plan → read → tree
"""

import dataclasses
import functools
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flax_layoutmap._core.errors import CheckpointError, meant
from flax_layoutmap._core.processes import Agreement
from flax_layoutmap._show.progress import shown_progress
from flax_layoutmap.checkpoint._inspect import RestorePlan, described
from flax_layoutmap.checkpoint._join import Plan, Target, join, opened
from flax_layoutmap.checkpoint._leaves import (
    Leaf,
    key_data_shape,
    key_leaf,
    leaf_of,
    problem_list,
)
from flax_layoutmap.checkpoint._metadata import Stored, check_intact, open_checkpoint
from flax_layoutmap.checkpoint._options import (
    Missing,
    Options,
    Unexpected,
    check_devices,
    check_processes,
    checked_options,
)
from flax_layoutmap.checkpoint._places import find
from flax_layoutmap.checkpoint._read import read_leaves


def restore(
    path: str | os.PathLike[str],
    target: Any = None,
    *,
    layout_map: Any = None,
    mesh: Any = None,
    step: int | str | None = None,
    item: str | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    rename: Any = None,
    dtype: Any = None,
    missing: Missing = "error",
    unexpected: Unexpected = "error",
    broadcast: str | None = None,
    host_memory: int | None = None,
    verify: bool | None = None,
    progress: bool | None = None,
) -> Any:
    r"""Restore a checkpoint, each leaf directly into its shards.

    Everything is checked before any array is read; one error lists every problem. The
    mesh may differ from that of the save. Checkpoints of `save`, and those that Orbax
    wrote alone (also MaxText's and T5X's), are joined with the target by path, whatever
    kind of tree was saved.

    Args:
        path: the checkpoint, or a directory of steps.
        target: the tree to restore into: modules, States, optimizers, TrainStates or
            any other, concrete or abstract (of `jax.ShapeDtypeStruct`s), or a function
            that returns one, which is only traced. None restores every leaf of the
            checkpoint, as a nested dict.
        layout_map: the rules, on a mesh of devices. None keeps the shardings of the
            target's leaves.
        mesh: a mesh of devices for the rules of `layout_map`; without `layout_map`,
            for the rules that the checkpoint was saved with.
        step: the step, a number or `"latest"`, if `path` is a directory of steps.
        item: the name of the tree, if the checkpoint holds several.
        include: one or several regular expressions; only leaves in whose full path
            (`model/decoder/…`) one of them is found are restored.
        exclude: the opposite. What is left out keeps the target's values, which
            therefore must be concrete.
        rename: pairs of a regular expression and its replacement, such as
            `(r"^params/(.*)", r"\1")`, or a dict of them; renames the leaves of the
            checkpoint before anything else. The first expression that is found in a
            path is applied.
        dtype: a floating-point dtype for all floating-point arrays that are read,
            `"target"` for the target's dtypes, or pairs of a regular expression
            (searched as `include`) and one of these. Other numbers are never converted.
        missing: for leaves that only the target has: `"error"`, `"keep"` the target's
            values, or `"init"`ialize them with the function that is the target.
        unexpected: for leaves that only the checkpoint has: `"error"` or `"ignore"`.
        broadcast: a mesh axis. Leaves that are replicated along it, with the replicas
            on different processes, are read by the first replica and sent to the others
            (Orbax's load-and-broadcast). None lets every process read its own shards.
        host_memory: bytes that Orbax may be reading at a time on each host (its
            `read_concurrent_bytes`), more than the largest leaf takes. A small limit
            may read the same bytes several times.
        verify: whether to compare the arrays and the metadata with their checksums
            before anything is returned. None compares if there are any, True requires
            them, False skips them.
        progress: whether process 0 shows the time on stderr; None: on a terminal, once
            the restore has taken 2 seconds.

    Returns:
        A tree of the target's type. Concrete NNX objects are updated in place once all
        leaves have been read; other trees are rebuilt. Numbers have the target's kind:
        an `int` for an `int`, an array for an array without dims. Without a target, a
        nested dict.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or it does not fit
            the target or the rules.
        MeshError: the rules have no mesh of devices, or some process has no device in
            it.
        ProcessError: the arguments differ between processes, or another process cannot
            read. (With `broadcast`, the other processes wait in Orbax until the process
            that cannot read ends.)

    Example:
        >>> import tempfile, jax.numpy as jnp, flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap("data=-1")
        >>> layout_map["w"] = ("data", None)
        >>> path = tempfile.mkdtemp() + "/weights"
        >>> tree = layout_map.place({"w": jnp.ones((8, 4)), "step": 3})
        >>> flm.checkpoint.save(path, tree, layout_map=layout_map)
        >>> restored = flm.checkpoint.restore(path, layout_map=layout_map)
        >>> int(restored["step"]), tuple(restored["w"].sharding.spec)
        (3, ('data',))

    Plain JAX: `orbax.checkpoint.v1.load(path, layout_map.abstract(tree))`.
    """
    options = checked_options(
        path,
        target,
        layout_map=layout_map,
        mesh=mesh,
        step=step,
        item=item,
        include=include,
        exclude=exclude,
        rename=rename,
        dtype=dtype,
        missing=missing,
        unexpected=unexpected,
        broadcast=broadcast,
        host_memory=host_memory,
        verify=verify,
    )
    check_devices("restore", options)
    stored, planned = _planned(options, "restoring")
    if planned.resolution is not None:
        planned.resolution.announce()
    with shown_progress(f"restoring {stored.where}", None, progress):
        values = read_leaves(stored, planned, options)
    return planned.tree(values)


def plan(
    path: str | os.PathLike[str],
    target: Any = None,
    **options: Any,
) -> RestorePlan:
    """Plan what `restore` with the same arguments reads; raise the same errors.

    No array byte is read. The mesh may be abstract: a plan for a pod slice needs none.

    Args:
        path: as in `restore`.
        target: as in `restore`.
        **options: the options of `restore`, without `verify` and `progress`.

    Returns:
        The plan, a table of leaves; print it.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or it does not fit.

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
    checked = checked_options(path, target, verify=False, **options)
    stored, planned = _planned(checked, "planning to restore")
    return described(stored.where, planned)


# ----------------------------------------------------------------------- plan

# Similar names are searched for this many leaves; beyond that it would take too long.
_HINTS = 50

# Of the PRNGs that JAX has.
_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")


def _planned(options: Options, doing: str) -> tuple[Stored, Plan]:
    """Path → metadata → plan: all of a restore that reads no array."""
    mesh = options.job_mesh
    check_processes(mesh)
    with Agreement(f"{doing} {options.path}", mesh) as agreement:
        place = find(options.path, options.step)
        stored = open_checkpoint(place, options.item, options.rename)
        if options.verify is not False:
            check_intact(stored.custom, stored.where)
        planned = _plan(stored, options)
        problems = list(planned.problems)
        if options.broadcast and mesh and options.broadcast not in mesh.axis_names:
            problems.append(
                f"broadcast={options.broadcast!r} is not an axis of the mesh"
            )
        if options.verify and stored.checksums is None:
            problems.append(stored.no_checksums())
        if problems:
            raise problem_list(f"cannot restore {stored.where}", problems)
        agreement.add(functools.partial(_parts, stored, planned, options))
    return stored, planned


def _parts(stored: Stored, planned: Plan, options: Options) -> dict[str, Any]:
    """Texts that differ if another process reads other leaves, or in another way."""
    found = (stored.where, stored.item, list(stored.leaves.items()), stored.custom)
    leaves = [
        f"{path}: {read.stored} → {read.result}, "
        f"{getattr(read.sharding, 'spec', read.sharding)}"
        for path, read in planned.reads.items()
    ]
    how = f"{options.broadcast} {options.verify}"
    return {"checkpoint": str(found), "leaves": leaves, "broadcast or verify": how}


def _plan(stored: Stored, options: Options) -> Plan:
    """Join the leaves of a checkpoint with those of the target, by path."""
    rules = options.rules
    if rules is None and options.mesh is not None:
        rules = stored.rule_set(options.mesh)
        if rules is None:
            raise CheckpointError(
                f"{stored.where} was saved without rules, so mesh= is not enough; pass "
                "layout_map="
            )
    options = dataclasses.replace(options, rules=rules)
    if options.target is not None:
        return _with_target(stored, opened(options.target), options)
    if rules is None:
        ways = "pass layout_map="
        if stored.rules is not None:
            ways = "pass mesh= for the rules that it was saved with, or layout_map="
        saved = f" (it was saved on {stored.mesh!r})" if stored.mesh else ""
        raise CheckpointError(
            f"cannot restore {stored.where} without layouts: {ways}, on the mesh to "
            f"restore to{saved}, or a target that has shardings"
        )
    ignored = [path for path in stored.leaves if path not in options.selection]
    resolve = functools.partial(stored.resolve, rules)
    return join(stored.leaves, None, options, resolve, absent={}, ignored=ignored)


def _with_target(stored: Stored, target: Target, options: Options) -> Plan:
    """Plan to restore the leaves of a target."""
    wanted, leaves = target.leaves, stored.leaves
    if not stored.is_ours:
        leaves = {path: _as_keys(x, wanted.get(path)) for path, x in leaves.items()}
    extra = [path for path in leaves if path not in wanted]
    is_error = options.unexpected == "error"
    unexpected = [path for path in extra if is_error and path in options.selection]
    ignored = [] if unexpected else extra
    absent: dict[str, str] = {}
    for path, value in wanted.items():
        if path not in leaves:
            absent[path] = "is in the target, not in the checkpoint"
            if callable(value):
                absent[path] += "; a function must be the whole target"
            elif options.missing == "error" and len(absent) < _HINTS:
                near = meant(path, unexpected)
                hint = f"; did you mean {near!r}? then pass rename="
                absent[path] += hint if near else ""
    resolve = functools.partial(target.resolve, options.rules, stored.origins)
    problems = _unexpected(unexpected, leaves)
    return join(
        leaves,
        target,
        options,
        resolve,
        absent=absent,
        ignored=ignored,
        problems=problems,
    )


def _as_keys(stored: Leaf, value: Any) -> Leaf:
    """The uint32 data of PRNG keys as keys, if the target has keys."""
    target = leaf_of("", value)
    if target is not None and target.kind == "key" and stored.dtype == np.uint32:
        for name in _IMPLEMENTATIONS:
            keys = key_leaf(stored.path, target.shape, name)
            shape = (*target.shape, *key_data_shape(name))
            if (keys.dtype, shape) == (target.dtype, stored.shape):
                return keys
    return stored


def _unexpected(paths: Sequence[str], leaves: Mapping[str, Leaf]) -> list[str]:
    """Problems for leaves that only the checkpoint has; one for a whole folder."""
    tops = Counter(path.split("/")[0] for path in leaves)
    lacking = Counter(path.split("/")[0] for path in paths)
    whole = {top for top, count in lacking.items() if tops[top] == count > 1}
    text = "is in the checkpoint, not in the target; to leave it out, pass exclude="
    return [
        f"{top}/ ({tops[top]} leaves): {text}{f'^{re.escape(top)}/'!r}"
        for top in lacking
        if top in whole
    ] + [
        f"{leaves[path].name}: {text}"
        for path in paths
        if path.split("/")[0] not in whole
    ]
