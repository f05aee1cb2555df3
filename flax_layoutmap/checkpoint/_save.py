"""flm.checkpoint.save."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flax_layoutmap._core.checksums import checksums as checksums_of
from flax_layoutmap._core.processes import Agreement
from flax_layoutmap._resolve.resolve import resolve
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap.checkpoint import _metadata, _orbax
from flax_layoutmap.checkpoint._leaves import (
    Leaf,
    is_storable,
    leaf_of,
    mesh_of,
    nested,
    no_value,
    problem_list,
    rules_of,
)
from flax_layoutmap.checkpoint._places import absolute, check_shared


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
    NNX objects is saved, including PRNG counters and batch statistics. Process 0 writes
    its own values of Python numbers, strings and NumPy arrays.

    Args:
        path: a directory that does not exist yet, without `*`, `?` and `[` in its path.
        tree: NNX modules, an `nnx.Optimizer`, `nnx.State`s, Linen variables,
            TrainStates, optax states, arrays, Python numbers and strings, in any tree.
        layout_map: the rules to write into the metadata; the tree must fit them.
        overwrite: replace the checkpoint at `path`, the whole directory, when the new
            one is complete beside it. At a URL (`gs://…`) Orbax deletes the old one
            first.
        checksums: whether to record a checksum of each leaf, with which `restore` and
            `verify` detect damage.

    Example:
        >>> import tempfile, jax.numpy as jnp, flax_layoutmap as flm
        >>> path = tempfile.mkdtemp() + "/weights"
        >>> flm.checkpoint.save(path, {"w": jnp.ones((8, 4)), "step": 3})
        >>> [leaf.path for leaf in flm.checkpoint.inspect(path).leaves]
        ['step', 'w']

    Plain JAX: `orbax.checkpoint.v1.save(path, tree)`.
    """
    place, rules = absolute(path), rules_of(layout_map)
    with _orbax.TURN:
        values, record = prepare(
            place, tree, rules, checksums, lambda: _orbax.cannot_write(place, overwrite)
        )
        check_shared(place)
        custom = _metadata.sealed({_metadata.KEY: record})
        _orbax.write(place, values, custom, overwrite)


def prepare(
    place: str,
    tree: Any,
    rules: RuleSet | None,
    checksums: bool,
    obstacle: Callable[[], str | None],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values for Orbax and our record, checked on all processes.

    `obstacle` returns the reason why nothing can be written there, or None.
    """
    with Agreement(f"saving {place}", mesh_of(tree, rules)) as agreement:
        resolution = resolve(tree, RuleSet(strict=False) if rules is None else rules)
        flat = flatten(tree)
        paths = flat.full_paths()
        leaves, problems = _described(paths, flat.leaves)
        problems += _dotted_twice(paths)
        reason = obstacle()
        problems += [] if reason is None else [reason]
        if not problems and all(leaf.is_empty for leaf in leaves):
            problems.append("the tree holds no value")
        if problems:
            raise problem_list(f"cannot save to {place}", problems)
        resolution.announce()
        agreement.add(resolution.fingerprint_lines)
    values = {
        leaf.path: _storable(leaf, value)
        for leaf, value in zip(leaves, flat.leaves, strict=True)
        if not leaf.is_empty
    }
    record = _metadata.to_json(flat, leaves, resolution.owners(), rules)
    if checksums:
        record["checksums"] = checksums_of(values)
    return nested(values), record


def _described(
    paths: Sequence[str], values: Sequence[Any]
) -> tuple[list[Leaf], list[str]]:
    leaves: list[Leaf] = []
    problems: list[str] = []
    for path, value in zip(paths, values, strict=True):
        leaf = leaf_of(path, value)
        if not path:
            problems.append("the tree is a single leaf; save it under a key: {'w': …}")
        elif leaf is None:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            problems.append(
                f"{path}: {kind} cannot be saved; keep to arrays, PRNG keys, numbers "
                "and strings"
            )
        elif problem := _problem(leaf, value):
            problems.append(f"{leaf.name}: {problem}")
        else:
            leaves.append(leaf)
    return leaves, problems


def _problem(leaf: Leaf, value: Any) -> str | None:
    if missing := no_value(value, "save"):
        return missing
    if leaf.kind == "array" and not is_storable(leaf.dtype):
        return f"Orbax cannot store {leaf.dtype}; convert it first"
    if leaf.kind == "int" and not -(2**63) <= value < 2**63:
        return f"the int {value} needs more than 64 bits"
    return None


def _dotted_twice(paths: Sequence[str]) -> list[str]:
    """Problems of paths that Orbax, which joins keys by `.`, stores under one name."""
    first: dict[str, str] = {}
    return [
        f"{other} and {path}: both would be stored as {path.replace('/', '.')!r}, so "
        "that one is lost; rename one"
        for path in paths
        if (other := first.setdefault(path.replace("/", "."), path)) != path
    ]


def _storable(leaf: Leaf, value: Any) -> Any:
    if leaf.kind in ("bool", "complex"):
        # Orbax cannot read a Python bool's metadata, nor write a complex.
        return np.asarray(value)
    if leaf.is_numpy:
        return np.asarray(value, dtype=leaf.dtype)
    if leaf.is_python:
        # Subclasses (an IntEnum) are stored as the built-in type.
        return {"int": int, "float": float, "string": str}[leaf.kind](value)
    return value
