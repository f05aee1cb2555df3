"""flm.checkpoint.reshard: a checkpoint written anew, in the pieces of other layouts."""

import os
from collections.abc import Sequence
from typing import Any

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap._core.mesh import as_mesh
from flax_layoutmap.checkpoint import _orbax, _record
from flax_layoutmap.checkpoint._options import rules_of
from flax_layoutmap.checkpoint._places import absolute, find
from flax_layoutmap.checkpoint._restore import restore
from flax_layoutmap.checkpoint._save import prepare
from flax_layoutmap.checkpoint._stored import Stored, open_checkpoint

# What of a record tells of the live tree, whatever its layouts.
_OF_THE_TREE = ("sections", "leaves", "random", "layouts")


def reshard(
    path: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    layout_map: Any = None,
    mesh: Any = None,
    step: int | str | None = None,
    item: str | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    progress: bool | None = None,
) -> None:
    """Writes a checkpoint anew, cut into the pieces that other layouts need.

    A restore onto these layouts then reads each byte once, and whole files where the
    shards are large. What was saved beside the arrays is kept; of a part (`include`,
    `exclude`), and of a checkpoint without our metadata, only the arrays and their
    paths are. The whole of it is in the memory of the devices for a while.

    Args:
        path: the checkpoint to read, or a directory of steps.
        to: the directory to write, which does not exist yet.
        layout_map: the rules; None takes those that it was saved with.
        mesh: a mesh of devices for the rules (CPU devices will do).
        step: which step of a directory of some.
        item: which of several trees.
        include: regular expressions; only leaves that one of them finds.
        exclude: likewise; no leaf that one of them finds.
        progress: as in `restore`.

    Raises:
        CheckpointError: it cannot be read, is not as it was saved (where it has
            checksums), or `to` cannot be written; what is at `path` is not touched.
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
    goal = absolute(to)
    problem = _orbax.cannot_write(goal, False)
    if problem is not None:
        raise CheckpointError(f"cannot write to {goal}: {problem}")
    stored = open_checkpoint(find(absolute(path), step), item)
    rules = rules_of(layout_map)
    if rules is None:
        rules = stored.record.rule_set(None)
    if rules is not None and mesh is not None:
        rules = rules.on(as_mesh(mesh))
    tree = restore(
        path,
        layout_map=rules,
        mesh=mesh,
        step=step,
        item=item,
        include=include,
        exclude=exclude,
        progress=progress,
    )
    with _orbax.TURN:
        ready = prepare(goal, tree, rules, lambda: _orbax.cannot_write(goal, False))
        custom = {_record.KEY: ready.record}
        if include is None and exclude is None:
            custom = {**stored.custom, _record.KEY: _kept(stored, ready.record)}
        _orbax.write(goal, ready.values, _record.sealed(custom), overwrite=False)


def _kept(stored: Stored, record: dict[str, Any]) -> dict[str, Any]:
    """The new record, which tells of the live tree what the old one told."""
    old = stored.custom.get(_record.KEY)
    if old is None:
        return record
    return {**record, **{name: old[name] for name in _OF_THE_TREE if name in old}}
