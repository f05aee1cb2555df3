"""flm.checkpoint.restore and flm.checkpoint.plan: the stages of a restore.

path → metadata → plan → reads → tree
"""

import functools
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import numpy as np

from flax_layoutmap._core.errors import CheckpointError, ResolveError, meant
from flax_layoutmap._core.processes import Agreement
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import resolve, resolve_with_origins
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._show.progress import is_shown, shown_progress
from flax_layoutmap.checkpoint._descriptions import RestorePlan, described
from flax_layoutmap.checkpoint._join import Held, Plan, Target, join, opened
from flax_layoutmap.checkpoint._leaves import (
    Leaf,
    key_data_shape,
    key_leaf,
    leaf_of,
    problem_list,
)
from flax_layoutmap.checkpoint._options import (
    Missing,
    Options,
    RestoreOptions,
    Unexpected,
    check_devices,
    check_names,
    check_processes,
    checked_options,
)
from flax_layoutmap.checkpoint._orbax import bytes_read
from flax_layoutmap.checkpoint._places import absolute, find, is_safetensors
from flax_layoutmap.checkpoint._read import read_leaves
from flax_layoutmap.checkpoint._record import check_intact
from flax_layoutmap.checkpoint._stored import Stored, open_checkpoint
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

    Everything is checked before any array is read; one error lists every problem. The
    mesh may have another shape, other axis names and another number of devices than
    the mesh of the save. Checkpoints of `save`, and those that Orbax wrote alone
    (`orbax.checkpoint.v1`, `CheckpointManager`, MaxText, T5X), are joined with the
    target by path: it does not matter whether the saved tree was a State, a pure dict
    or a TrainState, boxed or not, and whether its keys were numbers.

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
            (`model/decoder/…`) one of them is found are restored. A parameter's path
            within its model is searched as well.
        exclude: likewise; leaves in whose path one is found are not restored. They keep
            the target's values, which therefore must be concrete.
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
        strategy: `"direct"` reads each leaf in its final sharding; `"aligned"` reads
            whole chunks and reshards on the devices; `"broadcast"` reads one replica
            and sends it to the others. `"auto"` chooses, for each leaf, the one that
            reads the fewest bytes. A strategy that is impossible for a leaf falls back
            to `"direct"`. See `plan`.
        host_memory: a limit in bytes for the arrays being read, on the host of each
            process; they are read in portions. None reads all at once.
        verify: whether to compare the arrays and the metadata with their checksums
            before anything is returned. None compares if there are any, True requires
            them, False skips them. Arrays to be converted are first read in the stored
            dtype, some at a time.
        progress: whether process 0 shows on stderr how much has been read; None:
            once it has taken 2 seconds, on a terminal.

    Returns:
        A tree of the target's type. Concrete NNX objects are updated in place once all
        leaves have been read; abstract ones are returned as new objects; other trees
        are rebuilt. Numbers have the target's kind: an `int` for an `int`, an array for
        an array without dims. Without a target, a nested dict of arrays, and of Python
        numbers and strings as saved.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or it does not fit
            the target or the rules.
        MeshError: the rules have no mesh of devices, or some process has no device in
            it.
        ProcessError: the arguments differ between processes, or another process cannot
            read. (With `"broadcast"`, the other processes wait in Orbax until the
            process that cannot read ends.)

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
    check_processes(job_mesh)
    with Agreement(f"restoring {options.path}", job_mesh) as agreement:
        reads = _reads(options, measure=is_shown(progress))
        if reads.plan.resolution is not None:
            reads.plan.resolution.announce()
        agreement.add(reads.same_checkpoint)
        agreement.add(reads.same_reads)
    doing = f"restoring {reads.stored.where}"
    with shown_progress(doing, reads.own_bytes, progress, bytes_read):
        values = read_leaves(reads, job_mesh)
    return reads.plan.tree(values)


def plan(
    path: str | os.PathLike[str],
    target: Any = None,
    *,
    devices_per_process: int | None = None,
    **options: Unpack[RestoreOptions],
) -> RestorePlan:
    """Plan what `restore` with the same arguments reads; raise the same errors.

    No array byte is read. The mesh may be abstract: a plan for a pod slice needs none.

    Args:
        path: as in `restore`.
        target: as in `restore`.
        devices_per_process: for an abstract mesh, how many devices each process has,
            in the order of the mesh; None: one process has all.
        **options: the options of `restore`, without `verify` and `progress`.

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
    check_names("plan", options, RestoreOptions)
    _check_orbax(absolute(path))
    checked = checked_options(
        path,
        target,
        devices_per_process=devices_per_process,
        verify=False,
        **options,
    )
    job_mesh = checked.job_mesh
    check_processes(job_mesh)
    doing = f"planning to restore {checked.path}"
    with Agreement(doing, job_mesh) as agreement:
        reads = _reads(checked, measure=True)
        agreement.add(reads.same_checkpoint)
    return described(reads, checked)


# ----------------------------------------------------------------------- plan


def _check_orbax(path: str) -> None:
    """Raise CheckpointError for safetensors, with what answers instead of a plan."""
    if os.path.exists(path) and is_safetensors(path):
        raise CheckpointError(
            f"{path} holds safetensors, and plan is for checkpoints of Orbax; "
            "flm.checkpoint.inspect(path) lists the tensors, "
            "layout_map.resolve(target).show() the bytes per device; "
            "flm.checkpoint.restore_safetensors(path, target, ...) checks everything "
            "before it reads, and passes the bytes that this process will read to a "
            "function given as progress="
        )


# Similar names are searched for this many leaves; beyond that it would take too long.
_HINTS = 50

# Of the PRNGs that JAX has.
_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")


def plan_restore(stored: Stored, options: Options) -> Plan:
    """Join the leaves of a checkpoint with those of the target, by path."""
    rules = options.rules
    if rules is None and options.mesh is not None:
        rules = stored.record.rule_set(options.mesh)
        if rules is None:
            raise CheckpointError(
                f"{stored.where} was saved without rules, so mesh= is not enough; pass "
                "layout_map="
            )
    options = options.among(stored.record.flat)
    if options.target is None:
        return _without_target(stored, rules, options)
    target = opened(options.target)
    return _with_target(stored, target, rules, options.among(target.flat))


def _without_target(stored: Stored, rules: RuleSet | None, options: Options) -> Plan:
    """Plan to restore what the checkpoint holds, laid out by the rules."""
    if rules is None:
        raise CheckpointError(
            f"cannot restore {stored.where} without layouts: {_layouts_of(stored)}"
        )
    selection, leaves = options.selection, stored.leaves
    ignored = tuple(path for path in leaves if path not in selection)

    def resolve_saved() -> Resolution:
        try:
            return stored.record.resolve(leaves, rules)
        except ResolveError:
            if selection.is_everything:
                raise
        # Rules may fail to fit just the leaves that are left out.
        selected = [path for path in leaves if path in selection]
        return stored.record.resolve(leaves, rules, selected)

    held = Held(leaves, ignored=ignored)
    return join(held, None, rules, resolve_saved, options)


def _layouts_of(stored: Stored) -> str:
    """The ways to place leaves without a target, for the message."""
    record, saved = stored.record, ""
    if record.mesh:
        sizes = ",".join(f"{name}={n}" for name, n in record.mesh.axis_sizes.items())
        saved = f" (it was saved on a mesh {sizes})"
    if record.rules is not None:
        return (
            f"pass mesh= for the rules that it was saved with{saved}, or layout_map= "
            "with others, or a target that has shardings"
        )
    return (
        f"pass layout_map=, on the mesh to restore to{saved}, or a target that has "
        "shardings"
    )


def _with_target(
    stored: Stored, target: Target, rules: RuleSet | None, options: Options
) -> Plan:
    """Plan to restore the leaves of a target."""
    wanted, selection = target.leaves, options.selection
    functions = [
        f"{path}: a function must be the whole target (it returns the tree)"
        for path, leaf in wanted.items()
        if callable(leaf) and path in selection
    ]
    if functions:
        raise problem_list(f"cannot restore {stored.where}", functions)
    leaves = _as_in_target(stored, wanted)
    missing = [path for path in wanted if path in selection and path not in leaves]
    extra = [path for path in leaves if path not in wanted]
    is_ignored = options.unexpected == "ignore"
    unexpected = [path for path in extra if path in selection and not is_ignored]
    ignored = [path for path in extra if path not in selection or is_ignored]
    absent: dict[str, str] = {}
    if options.missing != "error":
        absent = dict.fromkeys(missing, "it is not in the checkpoint")
        missing = []
    problems = _one_sided(missing, unexpected, wanted, leaves)
    held = Held(leaves, absent, ignored=tuple(ignored), problems=tuple(problems))
    resolve_target = functools.partial(_resolved, stored, target.tree, rules)
    return join(held, target, rules, resolve_target, options)


def _resolved(stored: Stored, tree: Any, rules: Any) -> Resolution:
    """Resolve the target, with the checkpoint's origins for unknown optimizer state.

    (A State of an optimizer, or one that a traced function makes.)
    """
    resolution = resolve(tree, rules)
    if any(leaf.reason == "unknown optimizer state" for leaf in resolution):
        origins = stored.record.origins
        other = resolve_with_origins(tree, resolution.rules, origins)
        if len(other.unmatched) < len(resolution.unmatched):
            return other
    return resolution


def _as_in_target(stored: Stored, target: Mapping[str, Any]) -> dict[str, Leaf]:
    """The leaves of the checkpoint, by their names in the target.

    Without a record, a parameter called `value` looks like the content of a Variable.
    """
    if stored.is_ours:
        return stored.leaves
    found: dict[str, Leaf] = {}
    for path, leaf in stored.leaves.items():
        is_value = leaf.path == f"{path}/value"
        is_free = leaf.path in target and leaf.path not in stored.leaves
        name = leaf.path if is_value and is_free and path not in target else path
        found[name] = _as_keys(leaf, target[name]) if name in target else leaf
    return found


def _as_keys(stored: Leaf, value: Any) -> Leaf:
    """The uint32 data of PRNG keys as keys, if the target has keys."""
    target = leaf_of("", value)
    if target is None or target.kind != "key" or stored.dtype != np.uint32:
        return stored
    for name in _IMPLEMENTATIONS:
        keys = key_leaf(stored.path, target.shape, name)
        if keys.dtype == target.dtype:
            data = key_data_shape(name)
            return keys if stored.shape == (*target.shape, *data) else stored
    return stored


# ------------------------------------------------- leaves that only one side has


def _one_sided(
    missing: Sequence[str],
    extra: Sequence[str],
    target: Mapping[str, Any],
    leaves: Mapping[str, Leaf],
) -> list[str]:
    """Problems for the leaves that only one side has."""
    moved = _moved(list(target), list(leaves)) if missing else None
    if moved is not None:
        return [moved]
    problems = []
    for number, path in enumerate(missing):
        near = meant(path, extra) if number < _HINTS else None
        hint = ""
        if near is not None:
            rename = {f"^{re.escape(near)}$": path}
            hint = f"; did you mean {near!r}? then pass rename={rename}"
        name = f"{path} {show_shape(np.shape(target[path]))}"
        problems.append(f"{name}: is in the target, not in the checkpoint{hint}")
    tops = Counter(path.split("/")[0] for path in leaves)
    groups: dict[str, list[str]] = {}
    for path in extra:
        groups.setdefault(path.split("/")[0], []).append(path)
    for top, paths in groups.items():
        if len(paths) == tops[top] > 1:
            names = {f"{top}/ ({tops[top]} leaves)": f"^{re.escape(top)}/"}
        else:
            names = {
                f"{path} {show_shape(leaves[path].shape)}": f"^{re.escape(path)}$"
                for path in paths
            }
        problems += [
            f"{name}: is in the checkpoint, not in the target; to leave it out: "
            f"exclude={pattern!r}"
            for name, pattern in names.items()
        ]
    return problems


def _moved(target: list[str], stored: list[str]) -> str | None:
    """The problem that one tree lies below a key of the other, a common mistake."""
    prefix = _prefix(target, stored)
    if prefix is not None:
        key = prefix.removesuffix("/")
        return (
            f"the checkpoint has the target's paths below {prefix!r}: pass "
            f"target={{{key!r}: target}}, include={f'^{re.escape(prefix)}'!r}"
        )
    prefix = _prefix(stored, target)
    if prefix is not None:
        key = prefix.removesuffix("/")
        return (
            f"the target has the checkpoint's paths below {prefix!r}: pass "
            f"target=target[{key!r}]"
        )
    return None


def _prefix(inner: list[str], outer: list[str]) -> str | None:
    """The key (no path of several) below which `outer` has all of `inner`."""
    known = set(outer)
    for path in outer:
        prefix = path.removesuffix(inner[0]) if inner else ""
        if prefix != path and prefix.count("/") == 1 and prefix.endswith("/"):
            if all(f"{prefix}{other}" in known for other in inner):
                return prefix
    return None
