"""flm.checkpoint.restore and flm.checkpoint.plan: the stages of a restore.

path → metadata → plan → read → tree

`restore_safetensors` has the same stages, and another source.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from flax_layoutmap._core.axes import dim_axes
from flax_layoutmap._core.checksums import checksums
from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap._core.processes import Agreement
from flax_layoutmap._place.place import put
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._show.terminal import shown_progress
from flax_layoutmap._tree.flax_internals import no_mesh
from flax_layoutmap._tree.paths import unescape
from flax_layoutmap.checkpoint._inspect import RestorePlan, described
from flax_layoutmap.checkpoint._join import Offer, Plan, Read, Target, join, opened
from flax_layoutmap.checkpoint._leaves import (
    TYPES,
    Leaf,
    fits_jax,
    is_floating,
    key_data,
    leaf_of,
    nested,
    problem_list,
)
from flax_layoutmap.checkpoint._metadata import open_checkpoint
from flax_layoutmap.checkpoint._options import (
    Missing,
    Options,
    Unexpected,
    check_devices,
)
from flax_layoutmap.checkpoint._places import find


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
        step: a number or `"latest"`, if `path` is a directory of steps.
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
    options = Options(
        path,
        target,
        layout_map=layout_map,
        mesh=mesh,
        include=include,
        exclude=exclude,
        rename=rename,
        dtype=dtype,
        missing=missing,
        unexpected=unexpected,
        host_memory=host_memory,
        broadcast=broadcast,
        verify=verify,
    )
    open_source = functools.partial(_Checkpoint, options, step)
    return restored("restore", open_source, options, progress)


def plan(
    path: str | os.PathLike[str],
    target: Any = None,
    *,
    step: int | str | None = None,
    **options: Any,
) -> RestorePlan:
    """Plan what `restore` with the same arguments reads; raise the same errors.

    No array byte is read. The mesh may be abstract: a plan for a pod slice needs none.
    `options` are those of `restore`, without `verify` and `progress`.

    Returns:
        The plan, a table of leaves; print it.

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
    open_source = functools.partial(_Checkpoint, checked, step)
    source, _, planned = _planned("planning to restore", open_source, checked)
    return described(source.where, planned)


# ---------------------------------------------------------------------- the stages


class Source(Protocol):
    """A checkpoint whose metadata has been read.

    `leaves` are its own, by path, and `rule_set` the rules that it was saved with, on a
    mesh. `resolve` is for the tree of a target, or its own. `read` returns path → value
    of each leaf of a plan. `lines` differ if another process finds another checkpoint.
    """

    where: str
    leaves: dict[str, Leaf]

    def rule_set(self, mesh: Any) -> RuleSet | None: ...
    def offer(self, target: Target, options: Options) -> Offer: ...
    def resolve(self, target: Any, options: Any, rules: Any) -> Resolution: ...
    def read(self, plan: Plan, options: Options) -> dict[str, Any]: ...
    def lines(self) -> Sequence[str]: ...


def restored(
    function: str,
    open_source: Callable[[], Source],
    options: Options,
    progress: bool | None,
) -> Any:
    """Go through all stages; `function` names the caller in messages."""
    check_devices(function, options)
    source, target, planned = _planned("restoring", open_source, options)
    if planned.resolution is not None:
        planned.resolution.announce()
    with shown_progress(f"restoring {source.where}", None, progress):
        values = source.read(planned, options)
    return target.filled(planned, values)


def _planned(
    doing: str, open_source: Callable[[], Source], options: Options
) -> tuple[Source, Target, Plan]:
    """Path → metadata → plan: all of a restore that reads no array."""
    with Agreement(f"{doing} {options.path}", options.job_mesh) as agreement:
        source, rules = open_source(), options.rules
        if rules is None and options.mesh is not None:
            rules = source.rule_set(options.mesh)
        if rules is None and (options.mesh is not None or options.target is None):
            own = " (or mesh= for its own rules)" if source.rule_set(None) else ""
            raise CheckpointError(
                f"cannot restore {source.where} without layouts: pass layout_map=, on "
                f"the mesh to restore to{own}, or a target that has shardings"
            )
        given = options.target
        target = opened(_own_tree(source, options) if given is None else given)
        resolve = None
        if rules is not None:
            resolve = functools.partial(source.resolve, target, options, rules)
        planned = join(source.offer(target, options), target, options, resolve)
        if planned.problems:
            raise problem_list(f"cannot restore {source.where}", planned.problems)
        agreement.add(
            lambda: {
                "checkpoint": source.lines(),
                "broadcast or verify": f"{options.broadcast} {options.verify}",
                "leaves": [f"{path}: {read}" for path, read in planned.reads.items()],
            }
        )
    return source, target, planned


def _own_tree(source: Source, options: Options) -> Any:
    tree = {
        path: leaf.abstract
        for path, leaf in source.leaves.items()
        if path in options.selection
    }
    return nested(tree, unescape)


# ----------------------------------------------------------- a checkpoint of Orbax


class _Checkpoint:
    def __init__(self, options: Options, step: int | str | None) -> None:
        place, self._verify = find(options.path, step), options.verify
        self._stored = open_checkpoint(place, options.rename, verify=self._verify)
        self.where, self.rule_set = self._stored.where, self._stored.rule_set
        self.leaves = self._stored.leaves

    def lines(self) -> Sequence[str]:
        return [f"{self._stored.place} {self._stored.custom}", *map(str, self.leaves)]

    def offer(self, target: Target, options: Options) -> Offer:
        wanted, problems = target.leaves, list[str]()
        leaves = {
            # A dict in the target may have `value` as an ordinary key.
            leaf.path if leaf.path == f"{path}/value" in wanted else path: leaf
            for path, leaf in target.by_first_name(self.leaves).items()
        }
        if self._verify and self._stored.checksums is None:
            problems.append(self._stored.no_checksums())
        if self._stored.flat is None:
            leaves = {p: _as_keys(leaf, wanted.get(p)) for p, leaf in leaves.items()}
        if options.unexpected == "error":
            problems += [
                f"{leaf.name}: is in the checkpoint, not in the target; to leave it "
                "out, pass include=, exclude= or unexpected='ignore'"
                for path, leaf in leaves.items()
                if path not in wanted and path in options.selection
            ]
        return Offer(leaves, problems=problems)

    def resolve(self, target: Target, options: Options, rules: RuleSet) -> Resolution:
        if options.target is None:
            return self._stored.resolve(rules)
        return target.resolve(rules, self._stored.origins)

    def read(self, plan: Plan, options: Options) -> dict[str, Any]:
        stored = self._stored
        reads = [read for read in plan.reads.values() if not read.stored.is_empty]
        groups: dict[int | None, dict[str, Any]] = {None: {}}
        for read in reads:
            path, axis = read.stored.path, _replica_axis(read, options.broadcast)
            target = _orbax_target(read, stored.held[path])
            groups.setdefault(axis, {})[path] = target
        values: dict[str, Any] = {}
        for axis, wanted in groups.items():
            # Each process reads on its own, then all agree that every read succeeded.
            after = f"using what was read of {self.where}"
            with Agreement(after, options.job_mesh):
                values |= stored.read(wanted, options.host_memory, axis)
        problems = []
        if self._verify is not False and stored.checksums is not None:
            leaves = [read.stored for read in reads]
            problems = stored.changed(leaves, checksums(values))
        result = {}
        for path, read in plan.reads.items():
            source = read.stored
            value = _empty(source) if source.is_empty else values.pop(source.path)
            try:
                result[path] = _as_wanted(read, value)
            except CheckpointError as error:
                problems.append(f"{source.name}: {error}")
        if problems:
            raise problem_list(f"cannot restore {self.where}", problems)
        return result


def _as_keys(stored: Leaf, value: Any) -> Leaf:
    """The uint32 data of PRNG keys as keys, if the target has keys."""
    target = leaf_of(stored.path, value)
    if target is not None and target.kind == "key" and stored.dtype == np.uint32:
        if stored.shape == (*target.shape, *key_data(target.dtype)[1]):
            return target
    return stored


def _replica_axis(read: Read, name: str | None) -> int | None:
    """The number of a mesh axis along which Orbax can broadcast a leaf, or None."""
    where = read.sharding
    # uint32 may be the data of PRNG keys, which come back with a dim less.
    is_data = read.stored.kind == "key" or read.stored.dtype == np.uint32
    if name is None or not isinstance(where, NamedSharding) or is_data:
        return None
    if name in {axis for dim in where.spec for axis in dim_axes(dim)}:
        return None
    number = where.mesh.axis_names.index(name)
    replicas = np.moveaxis(np.asarray(where.mesh.devices), number, 0)
    rows = replicas.reshape(len(replicas), -1)
    processes = [{device.process_index for device in row} for row in rows]
    is_apart = sum(map(len, processes)) == len(set().union(*processes))
    return number if is_apart and len(processes) > 1 else None


def _orbax_target(read: Read, held: Any) -> Any:
    """The target of a leaf for Orbax: in its stored dtype, and in its sharding."""
    if read.stored.is_text:
        return held
    # Orbax would cut 64 bits to what JAX holds, before the checksum.
    if read.sharding is None or not fits_jax(read.stored.numpy_dtype):
        return np.ndarray
    return jax.ShapeDtypeStruct(held.shape, held.dtype, sharding=read.sharding)


def _empty(leaf: Leaf) -> Any:
    if leaf.kind != "key":
        return np.zeros(leaf.shape, leaf.dtype)
    return np.zeros((*leaf.shape, *key_data(leaf.dtype)[1]), np.uint32)


def _as_wanted(read: Read, value: Any) -> Any:
    """Convert what Orbax returned to the requested leaf, and check it."""
    stored, result, sharding = read.stored, read.result, read.sharding
    if result.is_python:
        value = value.item() if isinstance(value, np.ndarray) else value
        if not isinstance(value, TYPES[result.kind]):
            raise CheckpointError(f"Orbax read the {type(value).__name__} {value!r}")
        return value
    if stored.kind == "key" and getattr(value, "dtype", None) != stored.dtype:
        # Orbax returns the data of keys if it has lost the implementation.
        name, _ = key_data(stored.dtype)
        wrap = functools.partial(jax.random.wrap_key_data, impl=name)
        value = jax.jit(wrap, out_shardings=sharding)(value)
    elif isinstance(value, jax.Array):
        # An array that Orbax has cut to 32 bits must not be cast further.
        if value.dtype == stored.dtype != result.dtype:
            with no_mesh():
                cast = _caster(sharding, result.dtype)(value)
            value.delete()
            value = cast
    elif isinstance(value, np.ndarray | bool | int | float | complex):
        value = _converted(np.asarray(value), result)
        value = value if sharding is None else put(value, sharding)
    leaf, where = leaf_of(stored.path, value), getattr(value, "sharding", None)
    # Keys that Orbax has written alone are unknown to its metadata.
    is_key = leaf is not None and leaf.kind == "key" and stored.dtype == np.uint32
    if not is_key and not (
        isinstance(value, np.ndarray if sharding is None else jax.Array)
        and (value.shape, value.dtype) == (result.shape, result.dtype)
        and (where is None or where.is_equivalent_to(sharding, value.ndim))
    ):
        raise CheckpointError(
            f"Orbax read {leaf} with {where}, asked for {result} with {sharding}"
        )
    return value


@functools.lru_cache(maxsize=256)
def _caster(sharding: Any, dtype: Any) -> Callable[[Any], Any]:
    return jax.jit(lambda x: x.astype(dtype), out_shardings=sharding)


def _converted(value: np.ndarray, result: Leaf) -> np.ndarray:
    """Convert a host array to the result's dtype; floats are rounded."""
    new = value.astype(result.dtype)
    if not is_floating(result.dtype) and not np.array_equal(new, value):
        raise CheckpointError(
            f"the number {value} of the checkpoint is not exact in {result.dtype}"
        )
    return new
