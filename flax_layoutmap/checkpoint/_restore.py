"""flm.checkpoint.restore and flm.checkpoint.plan: the stages of a restore.

path → metadata → plan → reads → tree
"""

import os
from collections.abc import Sequence
from typing import Any

import jax

from flax_layoutmap._core.errors import MeshError
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._core.processes import Agreement
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap.checkpoint._leaves import problem_list
from flax_layoutmap.checkpoint._options import (
    Missing,
    Options,
    Unexpected,
    checked_options,
)
from flax_layoutmap.checkpoint._places import find
from flax_layoutmap.checkpoint._plan import plan_restore
from flax_layoutmap.checkpoint._preview import RestorePlan, described
from flax_layoutmap.checkpoint._progress import is_shown, shown_progress
from flax_layoutmap.checkpoint._read import read_leaves
from flax_layoutmap.checkpoint._record import check_intact
from flax_layoutmap.checkpoint._stored import open_checkpoint
from flax_layoutmap.checkpoint._strategy import Reads, choose_reads


def _reads(options: Options, *, measure: bool) -> Reads:
    """Path → metadata → plan → reads: all of a restore that reads no array."""
    place = find(options.path, options.step)
    stored = open_checkpoint(place, options.item, options.rename)
    if options.verify is not False:
        check_intact(stored.custom, stored.where)
    plan = plan_restore(stored, options)
    reads = choose_reads(stored, plan, options, measure=measure)
    if reads.problems:
        raise problem_list(f"cannot restore {stored.where}", reads.problems)
    return reads


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
    strategy: str = "auto",
    host_memory: int | None = None,
    verify: bool | None = None,
    progress: bool | None = None,
) -> Any:
    r"""Restore a checkpoint, each leaf directly into its shards.

    All is checked before an array byte is read; one error lists every problem. The
    mesh may have another shape, other axis names and another number of devices than
    the one it was saved on. Checkpoints of `save`, and those that Orbax wrote without
    us (`orbax.checkpoint.v1`, `CheckpointManager`, MaxText, T5X), are joined with the
    target by path: whether the saved tree was a State, a pure dict, a TrainState, boxed
    or not, and whether keys were numbers, does not matter.

    Args:
        path: the checkpoint, or a directory of steps.
        target: what to restore into: modules, States, optimizers, TrainStates or any
            tree, concrete or abstract (holding `jax.ShapeDtypeStruct`s), or a function
            that makes one, which is only traced. None: everything in the checkpoint,
            as a nested dict.
        layout_map: the rules, on a mesh of devices. None: the shardings that the
            leaves of the target have.
        mesh: a mesh of devices for the rules of `layout_map`; without `layout_map`,
            for the rules that the checkpoint was saved with.
        step: which step, a number or `"latest"`, if `path` is a directory of steps.
        item: which tree, if the checkpoint holds several.
        include: a regular expression, or several, searched in the full paths
            (`model/decoder/…`), of parameters also within their model; only leaves that
            one of them finds are restored.
        exclude: likewise; leaves that one of them finds are not restored. Leaves of
            the target that are not restored keep their values; it must have some.
        rename: pairs of a regular expression and what takes its place, as in
            `(r"^params/(.*)", r"\1")`, or a dict of them: other names for the leaves of
            the checkpoint, before anything else. Of each path, the first expression
            that is found in it counts.
        dtype: a floating-point dtype for all floating-point arrays that are read, or
            `"target"` for the target's, or pairs of a regular expression, searched as
            `include` is, and one of these. No other numbers are ever converted.
        missing: what to do about leaves that only the target has: `"error"`, `"keep"`
            its values, where they are, or `"init"`: make them, with the function that
            the target is.
        unexpected: what to do about leaves that only the checkpoint has: `"error"` or
            `"ignore"`.
        strategy: `"direct"` reads each leaf in the sharding it is to have; `"aligned"`
            in one whose shards are whole chunks, and reshards it on the devices;
            `"broadcast"` reads one replica and sends it to the others. `"auto"` takes,
            for each leaf, the one that reads least. Leaves for which a strategy is not
            possible are read directly. See `plan`.
        host_memory: bytes that the arrays being read may take on the host of each
            process; they are read in as many portions as that takes. None: all at once.
        verify: whether to compare what is read, and the metadata, with the checksums
            of the save, before anything is given back. None: where there are any; True:
            it is an error if there are none; False: take what is there. Arrays that are
            to have another dtype are read in their own one first, some at a time.
        progress: whether process 0 shows on stderr how much has been read; None: if
            that is a terminal.

    Returns:
        The target's own type. Concrete NNX objects are updated in place, once all has
        been read; abstract ones come back as new objects; other trees are rebuilt.
        Python numbers come back as the target's kind: `3` for an `int`, an array for
        an array without dims. Without a target, a nested dict of arrays; Python numbers
        and strings as they were saved.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or it does not fit
            the target or the rules.
        MeshError: the rules have no mesh of devices, or one without devices of some of
            the processes.
        ProcessError: the processes ask for different things, or another one cannot
            read. (Where arrays are read by one replica and sent, the others wait in
            Orbax for a process that cannot read, until it ends.)

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
        strategy=strategy,
        host_memory=host_memory,
        verify=verify,
    )
    check_devices("restore", options.rules, options.mesh)
    job_mesh = options.job_mesh
    _check_processes(job_mesh)
    with Agreement(f"restoring {options.path}", job_mesh) as agreement:
        reads = _reads(options, measure=is_shown(progress))
        if reads.plan.resolution is not None:
            reads.plan.resolution.announce()
        agreement.add(reads.same_checkpoint)
        agreement.add(reads.same_reads)
    doing = f"restoring {reads.stored.where}"
    with shown_progress(doing, reads.own_bytes, progress):
        values = read_leaves(reads, job_mesh)
    return reads.plan.tree(values)


def plan(
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
    strategy: str = "auto",
    host_memory: int | None = None,
    devices_per_process: int | None = None,
) -> RestorePlan:
    """Plan what `restore` with the same arguments reads; raise the same errors.

    No array byte is read. The mesh may be abstract: a plan for a pod slice needs none.

    Args:
        path: as in `restore`, like all that follow.
        target: what to restore into.
        layout_map: the rules.
        mesh: a mesh for the rules, or for those of the checkpoint.
        step: which step of a directory of some.
        item: which of several trees.
        include: which leaves.
        exclude: which leaves not.
        rename: other names for the leaves of the checkpoint.
        dtype: the dtypes wanted.
        missing: what to do about leaves that only the target has.
        unexpected: what to do about leaves that only the checkpoint has.
        strategy: how to read.
        host_memory: bytes for what is being read, per process.
        devices_per_process: for an abstract mesh, how many devices each process has,
            in the order of the mesh; None: one process has all.

    Returns:
        The plan; print it.

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
        strategy=strategy,
        host_memory=host_memory,
        devices_per_process=devices_per_process,
        verify=False,
    )
    job_mesh = options.job_mesh
    _check_processes(job_mesh)
    doing = f"planning to restore {options.path}"
    with Agreement(doing, job_mesh) as agreement:
        reads = _reads(options, measure=True)
        agreement.add(reads.same_checkpoint)
    return described(reads, options)


# --------------------------------------------------------------------- checks


def check_devices(
    function: str, rules: RuleSet | None, mesh: DeviceMesh | None
) -> None:
    """Raise MeshError where the mesh to restore to has no devices.

    Args:
        function: the name of the public function, for the message.
        rules: the rules; None: they come from the checkpoint, or are not needed.
        mesh: the mesh for the rules of a checkpoint.
    """
    where = mesh if rules is None else rules.mesh
    if (rules is None and mesh is None) or (
        where is not None and not where.is_abstract
    ):
        return
    have = "no mesh" if where is None else repr(where)
    raise MeshError(
        f"{function} needs a mesh of devices, the rules have {have}; pass "
        "mesh=flm.DeviceMesh(...)"
    )


def _check_processes(mesh: DeviceMesh | None) -> None:
    """Raise MeshError where a process of the job has no device of the mesh.

    Orbax waits for all processes of a job.
    """
    if mesh is None or mesh.is_abstract or jax.process_count() == 1:
        return
    there = {device.process_index for device in mesh.devices.flat}
    absent = sorted(set(range(jax.process_count())) - there)
    if absent:
        raise MeshError(
            f"{mesh!r} has no device of the processes {absent}, and all "
            f"{jax.process_count()} processes of a job restore together; use a mesh of "
            "all of them, and relayout the result"
        )
