"""flm.checkpoint.save and .reshard."""

import dataclasses
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import numpy as np

from flax_layoutmap._core.checksums import checksums as checksums_of
from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap._core.processes import Agreement
from flax_layoutmap._resolve.resolve import resolve
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap.checkpoint import _orbax, _record
from flax_layoutmap.checkpoint._leaves import (
    Leaf,
    is_storable,
    key_leaf,
    leaf_of,
    mesh_of,
    nested,
    no_value,
    problem_list,
)
from flax_layoutmap.checkpoint._options import (
    LayoutOptions,
    check_names,
    checked_options,
    rules_of,
)
from flax_layoutmap.checkpoint._places import absolute, check_shared, find
from flax_layoutmap.checkpoint._restore import restore
from flax_layoutmap.checkpoint._stored import Stored, open_checkpoint


def save(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    layout_map: Any = None,
    overwrite: bool = False,
    checksums: bool = True,
) -> None:
    """Save a tree; return when the checkpoint is complete.

    Every process of a job calls it with the same path, on shared storage. The state of
    NNX objects is saved, including PRNG counters and batch statistics. Python numbers
    and strings are restored as such; process 0 writes its own values of these and of
    NumPy arrays. Threads of a process take turns.

    Args:
        path: a directory that does not exist yet, without `*`, `?` and `[` in its path;
            a relative one is made absolute.
        tree: NNX modules, an `nnx.Optimizer`, `nnx.State`s, Linen variables,
            TrainStates, optax states, arrays, Python numbers and strings, in any tree.
        layout_map: the rules to write into the metadata, after they have been resolved
            against the tree.
        overwrite: replace the checkpoint at `path`. The new one is written beside it
            (`path` + `.replacement`) and replaces it when complete, so that a failed
            save loses nothing. At a URL (`gs://…`) Orbax deletes the old one first.
        checksums: whether to record a checksum of each leaf, with which `restore` and
            `verify` detect damage.

    Raises:
        CheckpointError: leaves cannot be saved (one error lists all), `path` exists, or
            writing failed.
        ResolveError: leaves do not fit the rules; nothing was written.

    Example:
        >>> import tempfile, jax.numpy as jnp, flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap("data=-1")
        >>> layout_map["w"] = ("data", None)
        >>> path = tempfile.mkdtemp() + "/weights"
        >>> tree = layout_map.place({"w": jnp.ones((8, 4)), "step": 3})
        >>> flm.checkpoint.save(path, tree, layout_map=layout_map)
        >>> [leaf.path for leaf in flm.checkpoint.inspect(path).leaves]
        ['step', 'w']

    Plain JAX: `orbax.checkpoint.v1.save(path, tree)`.
    """
    place = absolute(path)
    with _orbax.TURN:
        ready = prepare(
            place,
            tree,
            layout_map,
            lambda: _orbax.cannot_write(place, overwrite),
            checksums,
        )
        custom = _record.sealed({_record.KEY: ready.record})
        _orbax.write(place, ready.values, custom, overwrite)


@dataclasses.dataclass(frozen=True)
class Ready:
    """A tree ready to be written: nested values for Orbax, and our record."""

    values: dict[str, Any]
    record: dict[str, Any]


def prepare(
    place: str,
    tree: Any,
    layout_map: Any,
    cannot_write: Callable[[], str | None],
    checksums: bool = True,
) -> Ready:
    """Check on all processes that a tree can be written, before anything is.

    `cannot_write` returns the reason why nothing can be written there, or None.
    """
    rules = rules_of(layout_map)
    with Agreement(f"saving {place}", mesh_of(tree, rules)) as agreement:
        resolution = resolve(tree, RuleSet(strict=False) if rules is None else rules)
        flat = flatten(tree)
        leaves, problems = _described(flat.full_paths(), flat.leaves)
        problems += _dotted_twice(flat.full_paths())
        occupied = cannot_write()
        problems += [] if occupied is None else [occupied]
        if not problems and all(leaf.is_empty for leaf in leaves):
            problems.append("the tree holds no value")
        if problems:
            raise problem_list(f"cannot save to {place}", problems)
        resolution.announce()
        agreement.add(resolution.fingerprint_lines)
    check_shared(place)
    values = {
        leaf.path: _storable(leaf, value)
        for leaf, value in zip(leaves, flat.leaves, strict=True)
        if not leaf.is_empty
    }
    record = _record.to_json(flat, leaves, resolution.owners(), rules)
    if checksums:
        record["checksums"] = checksums_of(values)
    return Ready(nested(values), record)


def _described(
    paths: Sequence[str], values: Sequence[Any]
) -> tuple[list[Leaf], list[str]]:
    """Describe all leaves; list those that cannot be saved."""
    leaves, problems = [], []
    for path, value in zip(paths, values, strict=True):
        leaf = leaf_of(path, value)
        problem = "the tree is a single leaf; save it under a key: {'name': leaf}"
        if path and leaf is None:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            problem = (
                f"{path}: {kind} cannot be saved; keep to arrays, PRNG keys, Python "
                "numbers and strings"
            )
        elif path and leaf is not None:
            text = _problem(leaf, value)
            problem = None if text is None else f"{leaf.name}: {text}"
        if problem is not None:
            problems.append(problem)
        elif leaf is not None and leaf.kind == "key" and isinstance(value, jax.Array):
            leaves.append(key_leaf(path, leaf.shape, str(jax.random.key_impl(value))))
        elif leaf is not None:
            leaves.append(leaf)
    return leaves, problems


def _problem(leaf: Leaf, value: Any) -> str | None:
    """The reason why a leaf cannot be saved, or None."""
    problem = no_value(value, "save")
    if problem is not None:
        return problem
    if leaf.kind == "key" and not isinstance(jax.random.key_impl(value), str):
        return "its PRNG implementation has no name to restore it by"
    if leaf.kind == "array" and not is_storable(leaf.dtype):
        return f"Orbax cannot store {leaf.dtype}; convert it first"
    if leaf.kind == "int" and not -(2**63) <= value < 2**63:
        return f"the int {value} needs more than 64 bits"
    return None


def _dotted_twice(paths: Sequence[str]) -> list[str]:
    """Problems of paths that Orbax, which joins keys by `.`, stores under one name."""
    by_name: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        by_name[path.replace("/", ".")].append(path)
    return [
        f"{' and '.join(same)}: both would be stored as {name!r}, so that one is lost; "
        "rename one"
        for name, same in by_name.items()
        if len(same) > 1
    ]


def _storable(leaf: Leaf, value: Any) -> Any:
    """Convert a value to a form that Orbax restores unchanged."""
    if leaf.kind in ("bool", "complex"):
        # Orbax cannot read a Python bool's metadata, nor write a complex.
        return np.asarray(value)
    if leaf.is_numpy:
        return np.asarray(value, dtype=leaf.dtype)
    if leaf.is_python:
        # Subclasses (an IntEnum) are stored as the built-in type.
        return {"int": int, "float": float, "string": str}[leaf.kind](value)
    return value


# -------------------------------------------------------------------- reshard

# The entries of a record that describe the live tree, not its layouts.
_OF_THE_TREE = ("sections", "leaves", "random", "layouts")


def reshard(
    path: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    progress: bool | None = None,
    **options: Unpack[LayoutOptions],
) -> None:
    """Rewrite a checkpoint in the chunks that other layouts need.

    A restore onto these layouts then reads each byte once. Metadata is kept; of a
    selection (`include`, `exclude`), and of a checkpoint without our metadata, only the
    arrays and their paths are. All leaves are on the devices at once.

    Args:
        path: the checkpoint to read, or a directory of steps.
        to: the directory to write, which does not exist yet.
        progress: as in `restore`.
        **options: `layout_map`, `mesh`, `step`, `item`, `include` and `exclude` of
            `restore`. Without `layout_map` the rules are those that the checkpoint was
            saved with; a mesh of CPU devices will do.

    Raises:
        CheckpointError: the checkpoint cannot be read or differs from its checksums, or
            `to` cannot be written; `path` is unchanged.
        MeshError: there is no mesh of devices.

    Example:
        >>> import tempfile, jax.numpy as jnp, flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap("data=-1")
        >>> layout_map["w"] = ("data", None)
        >>> path = tempfile.mkdtemp() + "/weights"
        >>> tree = layout_map.place({"w": jnp.ones((8, 4)), "step": 3})
        >>> flm.checkpoint.save(path, tree, layout_map=layout_map)
        >>> flm.checkpoint.reshard(path, path + "_new", mesh=flm.DeviceMesh("data=-1"))
        >>> flm.checkpoint.inspect(path + "_new").leaves[1].path
        'w'

    Plain JAX: `v1.save(to, v1.load(path, target))`, which loses what `save` noted.
    """
    check_names("reshard", options, LayoutOptions)
    goal = absolute(to)
    problem = _orbax.cannot_write(goal, False)
    if problem is not None:
        raise CheckpointError(f"cannot write to {goal}: {problem}")
    checked = checked_options(path, **options)
    stored = open_checkpoint(find(checked.path, checked.step), checked.item)
    rules = checked.rules
    if rules is None:
        rules = stored.record.rule_set(checked.mesh)
    tree = restore(path, progress=progress, **{**options, "layout_map": rules})
    with _orbax.TURN:
        ready = prepare(goal, tree, rules, lambda: _orbax.cannot_write(goal, False))
        custom = {_record.KEY: ready.record}
        if checked.selection.is_everything:
            custom = {**stored.custom, _record.KEY: _kept(stored, ready.record)}
        _orbax.write(goal, ready.values, _record.sealed(custom), overwrite=False)


def _kept(stored: Stored, record: dict[str, Any]) -> dict[str, Any]:
    """The new record, with the old one's description of the live tree."""
    old = stored.custom.get(_record.KEY)
    if old is None:
        return record
    return {**record, **{name: old[name] for name in _OF_THE_TREE if name in old}}
