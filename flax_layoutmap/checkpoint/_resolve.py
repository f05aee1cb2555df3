"""flm.checkpoint.resolve: what rules say of the leaves that a checkpoint holds."""

import os
from collections.abc import Sequence
from typing import Any

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap._core.mesh import as_mesh
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap.checkpoint._leaves import problem_list
from flax_layoutmap.checkpoint._options import checked_options
from flax_layoutmap.checkpoint._places import absolute, find
from flax_layoutmap.checkpoint._restore import rules_on
from flax_layoutmap.checkpoint._stored import Stored, open_checkpoint


def resolve(
    path: str | os.PathLike[str],
    *,
    layout_map: Any = None,
    mesh: Any = None,
    step: int | str | None = None,
    item: str | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    rename: Any = None,
) -> Resolution:
    """Decides the layout of every leaf of a checkpoint, without the model's code.

    Reads no array, and needs no devices: the mesh may be abstract.

    Args:
        path: a checkpoint, or a directory of steps (then its latest, unless `step`).
        layout_map: the rules; None takes those that the checkpoint was saved with.
        mesh: the mesh for the rules; None takes theirs, or the one that the checkpoint
            was saved on, abstract.
        step: which step of a directory of some.
        item: which of several trees.
        include: regular expressions; only leaves that one of them finds, and the
            parameters that their optimizer state follows.
        exclude: likewise; leaves that none of them finds.
        rename: other names for the leaves, as in `restore`.

    Returns:
        The Resolution: read it with `.report()`, `.explain(path)`.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or it was saved
            without rules (or mesh) and none are given.
        ResolveError: its leaves do not fit the rules; all of them are listed.

    Example:
        >>> import tempfile, jax.numpy as jnp, flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap("data=-1")
        >>> layout_map["w"] = ("data", None)
        >>> path = tempfile.mkdtemp() + "/weights"
        >>> flm.checkpoint.save(path, {"w": jnp.ones((64, 8))}, layout_map=layout_map)
        >>> mesh = flm.DeviceMesh.abstract("data=16")
        >>> found = flm.checkpoint.resolve(path, mesh=mesh)
        >>> found["w"].shard_shape
        (4, 8)
    """
    rules = rules_on(layout_map, mesh)
    options = checked_options(None, include, exclude, rename, None, "error", "error")
    place = find(absolute(path), step, newest=True)
    stored = open_checkpoint(place, item, options.rename)
    selection = options.selection.among(stored.record.flat)
    problems = selection.useless(stored.leaves)
    if problems:
        raise problem_list(f"cannot lay out {stored.where}", problems)
    rules = _rules(stored, rules, mesh)
    selected = None
    if not selection.is_everything:
        selected = [path for path in stored.leaves if path in selection]
    return stored.record.resolve(stored.leaves, rules, selected)


def _rules(stored: Stored, rules: RuleSet | None, mesh: Any) -> RuleSet:
    """The rules on a mesh: what is not given comes from the checkpoint."""
    mesh = stored.record.mesh if mesh is None else as_mesh(mesh)
    if rules is not None and rules.mesh is not None:
        return rules
    lacks = "rules; pass layout_map=" if stored.record.rules is None else ""
    if rules is not None:
        lacks = "" if mesh is not None else "a mesh; pass mesh="
    if lacks:
        raise CheckpointError(f"{stored.where} was saved without {lacks}")
    found = stored.record.rule_set(mesh) if rules is None else rules.on(mesh)
    if found is None or found.mesh is None:
        raise CheckpointError(f"{stored.where} was saved without a mesh; pass mesh=")
    return found
