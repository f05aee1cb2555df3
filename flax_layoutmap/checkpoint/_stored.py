"""A checkpoint of Orbax as a source of a restore.

One that Orbax wrote without us is resolved as the nested dict that it is; paths lose
the `value` that NNX Variables and Linen boxes add.
"""

import dataclasses
import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from flax_layoutmap._core.axes import dim_axes
from flax_layoutmap._core.checksums import checksums
from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap._core.processes import Agreement
from flax_layoutmap._place.place import put
from flax_layoutmap._resolve.leaves import Origin
from flax_layoutmap._rules.files import rules_from_json
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.flax_internals import no_mesh
from flax_layoutmap._tree.paths import unescape
from flax_layoutmap.checkpoint import _orbax
from flax_layoutmap.checkpoint._join import Options, Read, Target, opened
from flax_layoutmap.checkpoint._leaves import (
    Leaf,
    fits_jax,
    is_floating,
    key_data,
    leaf_of,
    nested,
    problem_list,
    useless,
)
from flax_layoutmap.checkpoint._metadata import (
    KEY,
    CheckpointInfo,
    Record,
    check_intact,
    read_record,
    recorded_tree,
)
from flax_layoutmap.checkpoint._places import find


@dataclasses.dataclass(frozen=True)
class Stored:
    """A checkpoint of Orbax whose metadata has been read."""

    info: CheckpointInfo  # without leaves
    metadata: _orbax.Metadata
    held: dict[str, Any]  # path in the checkpoint → Orbax's metadata
    record: Record

    @property
    def where(self) -> str:
        return self.info.path

    @property
    def origins(self) -> Mapping[str, Origin]:
        return self.record.origins

    @functools.cached_property
    def own(self) -> Target:
        flat, leaves = self.record.flat, self.record.leaves
        if flat is not None:
            return Target(flat.leaves, flat, is_own=True)
        abstract = {path: leaf.abstract for path, leaf in leaves.items()}
        return opened(nested(abstract, unescape), is_own=True)

    def rule_set(self, mesh: Any) -> RuleSet | None:
        if self.info.rules is None:
            return None
        rules = _rules(json.dumps(self.info.rules))
        return rules if mesh is None else rules.on(mesh)

    def lines(self) -> Sequence[str]:
        return [f"{self.info!r} {self.metadata.custom}", *self.record.leaves]

    def offer(
        self, target: Target, options: Options
    ) -> tuple[dict[str, Leaf], list[str]]:
        wanted, problems, leaves = target.leaves, list[str](), dict[str, Leaf]()
        # The name in the target of a shared Variable that was saved by another one.
        first = {
            other: leaf.full_path
            for leaf in target.flat.records
            for other in leaf.names()[1:]
            if leaf.full_path not in self.record.leaves
        }
        for name, leaf in self.record.leaves.items():
            path = first.get(name, name)
            # A dict in the target may have `value` as an ordinary key.
            leaves[leaf.path if leaf.path == f"{path}/value" in wanted else path] = leaf
        if options.verify and self.record.checksums is None:
            problems.append(self.no_checksums())
        if self.info.kind != KEY:
            leaves = {p: _as_keys(leaf, wanted.get(p)) for p, leaf in leaves.items()}
        if options.unexpected == "error":
            problems += [
                f"{leaf.name}: is in the checkpoint, not in the target; to leave it "
                "out, pass include=, exclude= or unexpected='ignore'"
                for path, leaf in leaves.items()
                if path not in wanted and path in options.selection
            ]
        return leaves, problems

    def read(self, reads: Mapping[str, Read], options: Options) -> dict[str, Any]:
        stored = [x for x in reads.values() if not x.stored.is_empty]
        groups: dict[int | None, dict[str, Any]] = {None: {}}
        for read in stored:
            path, axis = read.stored.path, _replica_axis(read, options.broadcast)
            target = _orbax_target(read, self.held[path])
            groups.setdefault(axis, {})[path] = target
        values: dict[str, Any] = {}
        for axis, wanted in groups.items():
            # Each process reads on its own, then all agree that every read succeeded.
            after = f"using what was read of {self.where}"
            with Agreement(after, options.job_mesh):
                values |= self.arrays(wanted, options.host_memory, axis)
        problems = []
        if options.verify is not False and self.record.checksums is not None:
            problems = self.changed([x.stored for x in stored], checksums(values))
        result = {}
        for path, read in reads.items():
            source = read.stored
            empty = source.is_empty
            value = np.zeros(*source.data) if empty else values.pop(source.path)
            try:
                result[path] = _as_wanted(read, value)
            except CheckpointError as error:
                problems.append(f"{source.name}: {error}")
        if problems:
            raise problem_list(f"cannot restore {self.where}", problems)
        return result

    def arrays(
        self,
        wanted: Mapping[str, Any],
        host_memory: int | None = None,
        replica_axis: int | None = None,
    ) -> dict[str, Any]:
        """Read leaves: path in the checkpoint → target of Orbax, to path → value."""
        every = [wanted.get(path, ...) for path in self.held]
        target = jax.tree.unflatten(jax.tree.structure(self.metadata.tree), every)
        values = _orbax.read_arrays(
            self.where, target, self.metadata.item, host_memory, replica_axis
        )
        pairs = zip(self.held, values, strict=True)
        return {path: value for path, value in pairs if path in wanted}

    def changed(self, leaves: Sequence[Leaf], sums: Mapping[str, str]) -> list[str]:
        recorded = self.record.checksums or {}
        return [
            f"{leaf.name}: its data are not those that were saved; restore another "
            "checkpoint, or the rest of this one with exclude="
            for leaf in leaves
            if sums[leaf.path] != recorded.get(leaf.path)
        ]

    def no_checksums(self) -> str:
        return (
            f"cannot verify {self.where}: it was saved without checksums; restore it "
            "and save it again with flm.checkpoint.save"
        )


def open_checkpoint(options: Options) -> Stored:
    """Read the metadata of a checkpoint; compare them with their digest."""
    path, step, steps, item = find(options.path, options.step)
    read = _orbax.read_metadata(path, item, recorded_tree)
    if options.verify is not False:
        check_intact(read.custom, path)
    is_ours = KEY in read.custom
    held = _orbax.leaves_of(read.tree, escaped=is_ours)
    if is_ours:
        record = read_record(read.custom[KEY], held, path)
    else:
        record = Record(_named(held, path))
    if options.rename:
        leaves = _renamed(record.leaves, options.rename)
        record = dataclasses.replace(record, leaves=leaves, flat=None, origins={})
    info = CheckpointInfo(
        path=path,
        kind=KEY if is_ours else "orbax",
        step=step,
        steps=steps,
        leaves=(),
        metadata={key: value for key, value in read.custom.items() if key != KEY},
        **record.about,
    )
    return Stored(info, read, held, record)


def _renamed(
    leaves: Mapping[str, Leaf], rules: Sequence[tuple[re.Pattern[str], Any]]
) -> dict[str, Leaf]:
    """The leaves by new names: the first pattern found in one is replaced."""
    for problem in useless("rename", [pattern for pattern, _ in rules], list(leaves)):
        raise CheckpointError(problem)
    new = {path: path for path in leaves}
    for path in leaves:
        for pattern, by in (rule for rule in rules if rule[0].search(path)):
            try:
                new[path] = pattern.sub(by, path, count=1)
            except (re.error, IndexError, TypeError) as error:
                raise CheckpointError(
                    f"rename={pattern.pattern!r}: {by!r} cannot replace what it "
                    f"finds in {path}: {error}"
                ) from error
            break
    names = Counter(new.values())
    above = {name[: end.start()] for name in names for end in re.finditer("/", name)}
    for path, name in new.items():
        if names[name] > 1 or name in above or "" in name.split("/"):
            raise CheckpointError(
                f"rename maps {path} to {name!r}, which is not a path of its own"
            )
    return {new[path]: leaf for path, leaf in leaves.items()}


@functools.lru_cache(maxsize=4)
def _rules(text: str) -> RuleSet:
    """The rules of a record, cached by its text, so that warnings are emitted once."""
    return rules_from_json(json.loads(text))


# -------------------------------------------- checkpoints that Orbax wrote without us


def _named(held: Mapping[str, Any], where: str) -> dict[str, Leaf]:
    """The leaves by the path that each has in a live tree."""
    folders = (p[: end.start()] for p in held for end in re.finditer("/", p))
    leaves_below, leaves = Counter(folders), {}
    for path, array in held.items():
        leaf = leaf_of(path, array)
        if hasattr(array, "shape"):
            # Only arrays of JAX have a recorded sharding.
            is_numpy = not hasattr(array, "sharding_metadata")
            dtype = np.dtype(array.dtype)
            leaf = Leaf(path, "array", tuple(array.shape), dtype, is_numpy=is_numpy)
        if leaf is None:
            raise CheckpointError(
                f"the checkpoint {where}: leaf {path!r} is of a kind that cannot be "
                f"restored: {array!r}"
            )
        parent, _, last = path.rpartition("/")
        # A Variable holds nothing else; siblings make `value` an ordinary name.
        is_variable = last == "value" and leaves_below[parent] == 1
        leaves[parent if is_variable else path] = leaf
    return leaves


def _as_keys(stored: Leaf, value: Any) -> Leaf:
    """The uint32 data of PRNG keys as keys, if the target has keys."""
    target = leaf_of(stored.path, value)
    if target is not None and target.kind == "key" and stored.dtype == np.uint32:
        if stored.shape == target.data[0]:
            return target
    return stored


# -------------------------------------------------------------- for Orbax, and back


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
    rows = replicas.reshape(len(replicas), -1)  # of a mesh of one axis, too
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


def _as_wanted(read: Read, value: Any) -> Any:
    """Convert what Orbax returned to the requested leaf, and check it."""
    stored, result, sharding = read.stored, read.result, read.sharding
    if result.is_python:
        value = value.item() if isinstance(value, np.ndarray) else value
    elif stored.kind == "key" and getattr(value, "dtype", None) != stored.dtype:
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
    got = leaf_of(result.path, value)
    where: Any = getattr(value, "sharding", None)
    # Keys that Orbax has written alone are unknown to its metadata.
    is_key = got is not None and got.kind == "key" and stored.dtype == np.uint32
    is_there = where is sharding or (
        None not in (where, sharding) and where.is_equivalent_to(sharding, value.ndim)
    )
    if is_key or (got == result and is_there):
        return value
    raise CheckpointError(
        f"Orbax read {got} with {where}, asked for {result} with {sharding}"
    )


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
