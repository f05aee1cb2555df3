"""flm.checkpoint.restore."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from flax_layoutmap._core.errors import CheckpointError, MeshError
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh
from flax_layoutmap._core.processes import Agreement
from flax_layoutmap._place.place import settle_metadata
from flax_layoutmap._rules.records import show_shape, show_spec
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.paths import unescape
from flax_layoutmap.checkpoint import _orbax
from flax_layoutmap.checkpoint._leaves import mesh_of, problem_list
from flax_layoutmap.checkpoint._options import (
    Missing,
    Options,
    Unexpected,
    checked_options,
)
from flax_layoutmap.checkpoint._places import absolute, find
from flax_layoutmap.checkpoint._plan import (
    Plan,
    Read,
    plan_for_target,
    plan_without_target,
)
from flax_layoutmap.checkpoint._progress import is_shown, shown_progress
from flax_layoutmap.checkpoint._read import portions, read_leaves
from flax_layoutmap.checkpoint._record import check_intact, rules_of
from flax_layoutmap.checkpoint._selection import Selection
from flax_layoutmap.checkpoint._stored import Stored, open_checkpoint
from flax_layoutmap.checkpoint._strategy import Chooser, Way, check_host_memory
from flax_layoutmap.checkpoint._target import Opened, opened
from flax_layoutmap.checkpoint._verify import no_checksums


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
    r"""Restores a checkpoint, each leaf straight into its shards.

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
            in one whose shards are whole chunks, and lays it out anew on the devices;
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
    where, rules = absolute(path), rules_on(layout_map, mesh)
    options = checked_options(
        target, include, exclude, rename, dtype, missing, unexpected
    )
    _check_mesh(rules)
    own = mesh_of(target, rules) or as_mesh(mesh)
    check_processes(own)
    with Agreement(f"restoring {where}", own) as agreement:
        stored = open_checkpoint(find(where, step), item, options.rename)
        if verify is not False:
            check_intact(stored.custom, stored.where)
        ready = prepared(stored, target, rules, mesh, options)
        _check_mesh(ready.rules)
        chooser = Chooser(stored, strategy, exact=is_shown(progress))
        ways = ready.ways(chooser)
        problems = list(ready.plan.problems)
        if host_memory is not None:
            problems += check_host_memory(ways, host_memory)
        recorded = None if verify is False else stored.record.checksums
        if verify and recorded is None:
            problems.append(no_checksums(stored))
        if problems:
            raise problem_list(f"cannot restore {stored.where}", problems)
        if ready.plan.resolution is not None:
            ready.plan.resolution.announce()
        agreement.add(
            lambda: {"leaves": [_line(*item) for item in ready.plan.reads.items()]}
        )
        agreement.add(lambda: {"checkpoint": same_checkpoint(stored)})
        agreement.add(
            lambda: {
                "strategy, host_memory or verify": str(
                    [portions(ready.plan, ways, host_memory), recorded is None]
                    + [(path, way.strategy) for path, (_, way) in ways.items()]
                )
            }
        )
    total = sum(way.read.get(jax.process_index(), 0) for _, way in ways.values())
    with shown_progress(f"restoring {stored.where}", int(total), progress):
        values = read_leaves(stored, ready.plan, ways, host_memory, recorded, own)
    return ready.filled(values)


def _line(path: str, read: Read) -> str:
    """What is to come of a leaf, in a line that must be equal in all processes."""
    where = read.sharding
    if isinstance(where, NamedSharding):
        where = f"{show_spec(where.spec)} {where.memory_kind or ''}"
    stored, result = read.stored, read.result
    kinds = f"{stored.path} {stored.kind} {stored.dtype} → {result.kind} {result.dtype}"
    return f"{path} {show_shape(result.shape)}, {where}, {kinds} {read.exactly}"


@dataclasses.dataclass
class Ready:
    """A restore, checked.

    Attributes:
        plan: what to read, and what is wrong.
        rules: the rules, those of the checkpoint perhaps; None goes by the target.
        target: the opened target; None without one.
        leaves: path → leaf of the target.
    """

    plan: Plan
    rules: RuleSet | None
    target: Opened | None
    leaves: dict[str, Any]

    def ways(self, chooser: Chooser) -> dict[str, tuple[Read, Way]]:
        """Path → how it is read, for what has to be."""
        found = {path: chooser.way(read) for path, read in self.plan.reads.items()}
        return {
            path: (self.plan.reads[path], way)
            for path, way in found.items()
            if way is not None
        }

    def filled(self, values: dict[str, Any]) -> Any:
        """The result, of the values that were read."""
        if self.target is None:
            return _orbax.nested(values, unescape)
        if self.plan.made and self.target.made is not None:
            values |= self.target.made(self.plan.made)
        result = self.target.rebuild([*(self.leaves | values).values()])
        if self.plan.resolution is not None:
            result = settle_metadata(result, self.plan.resolution)
        return result


def same_checkpoint(stored: Stored) -> str:
    """A text that differs where another checkpoint was found."""
    return str((stored.where, stored.item, list(stored.leaves.items()), stored.custom))


def prepared(
    stored: Stored, target: Any, rules: RuleSet | None, mesh: Any, options: Options
) -> Ready:
    """Joins a checkpoint with what is wanted of it.

    Raises:
        CheckpointError, ResolveError: nothing can be said of single leaves.
    """
    if rules is None and mesh is not None:
        rules = stored.record.rule_set(mesh)
        if rules is None:
            raise CheckpointError(
                f"{stored.where} was saved without rules, so mesh= is not enough; pass "
                "layout_map="
            )
    options = options.among(stored.record.flat)
    if target is None:
        return Ready(plan_without_target(stored, rules, options), rules, None, {})
    tree = opened(target)
    flat = flatten(tree.tree)
    options = options.among(flat)
    leaves = dict(zip(flat.full_paths(), flat.leaves, strict=True))
    _check_functions(leaves, stored.where, options.selection)
    plan = plan_for_target(
        stored, leaves, tree.tree, rules, options, tree.made is not None
    )
    return Ready(plan, rules, tree, leaves)


# --------------------------------------------------------------------- checks


def rules_on(layout_map: Any, mesh: Any) -> RuleSet | None:
    """The rules, on the mesh where one is given."""
    rules = rules_of(layout_map)
    return rules if rules is None or mesh is None else rules.on(as_mesh(mesh))


def _check_mesh(rules: RuleSet | None) -> None:
    if rules is None or (rules.mesh is not None and not rules.mesh.is_abstract):
        return
    have = "no mesh" if rules.mesh is None else repr(rules.mesh)
    raise MeshError(
        f"restore needs a mesh of devices, the rules have {have}; pass "
        "mesh=flm.DeviceMesh(...)"
    )


def check_processes(mesh: DeviceMesh | None) -> None:
    """Raises MeshError where a process of the job has no device of the mesh.

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


def _check_functions(
    leaves: Mapping[str, Any], place: object, selection: Selection
) -> None:
    """Raises CheckpointError for functions that stand for a part of the target."""
    problems = [
        f"{path}: a function must be the whole target (it returns the tree)"
        for path, leaf in leaves.items()
        if callable(leaf) and path in selection
    ]
    if problems:
        raise problem_list(f"cannot restore {place}", problems)
