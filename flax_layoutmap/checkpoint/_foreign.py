"""Checkpoints that Orbax wrote without us: what their paths say of the tree.

The canonical path of a leaf is the one it has in a live tree: without the `value` that
NNX Variables and Linen boxes add. Sections are known by the names that Flax, optax,
T5X and MaxText give them: `params` and `model` hold parameters, `opt_state` and
`optimizer` the state of an optimizer, whose leaves belong to the parameters that their
paths end with.
"""

from collections.abc import Container, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from flax_layoutmap._resolve.origins import find_origins
from flax_layoutmap._resolve.stages import Leaves
from flax_layoutmap._tree.paths import Flat, Role, Section
from flax_layoutmap.checkpoint._leaves import Leaf

_OPTIMIZER = ("optimizer", "optimizer_state", "opt")
# What the random state of an NNX stream is called, and where.
_STREAM, _RANDOM = "rngs", ("count", "key")


def canonical_names(paths: Sequence[str]) -> list[str]:
    """The path of each leaf in a live tree."""
    parents = [path.rpartition("/")[0] for path in paths]
    # A Variable holds nothing else; siblings make `value` an ordinary name.
    children: dict[str, int] = {}
    for path in paths:
        parent = ""
        for part in path.split("/"):
            here = f"{parent}/{part}"
            if here not in children:
                children[here] = 0
                children[parent] = children.get(parent, 0) + 1
            parent = here
    return [
        parent if path.endswith("/value") and children[f"/{parent}"] == 1 else path
        for path, parent in zip(paths, parents, strict=True)
    ]


def leaf_of_held(path: str, held: Any) -> Leaf | None:
    """The leaf that Orbax's metadata describes; None if it is of no known kind."""
    if hasattr(held, "shape"):
        dtype = np.dtype(held.dtype)
        # Only arrays of JAX have a sharding to note.
        is_numpy = not hasattr(held, "sharding_metadata")
        return Leaf(path, "array", tuple(held.shape), dtype, is_numpy=is_numpy)
    if isinstance(held, bool):
        return None
    if isinstance(held, int):
        return Leaf(path, "int")
    if isinstance(held, float):
        return Leaf(path, "float")
    return Leaf(path, "string") if isinstance(held, str) else None


def flat_of(names: Sequence[str]) -> Flat:
    """The tree that has these paths, cut into sections by their names."""
    flat = Flat()
    optimizers = _nnx_optimizers(names)
    ends = [_section(name, optimizers) for name in names]
    for (prefix, role), run in groupby(ends):
        start = len(flat.paths)
        for _ in run:
            at = len(flat.paths)
            flat.paths.append(names[at].removeprefix(prefix))
            parts = names[at].split("/")
            if _STREAM in parts[:-1] and parts[-1] in _RANDOM:
                flat.fixed.add(at)
        flat.sections.append(Section(start, len(flat.paths), prefix, role))
    return flat


def origins_of(flat: Flat, leaves: Mapping[str, Leaf]) -> dict[str, Any]:
    """Path of each leaf of optimizer state → where it came from, by path and shape."""
    paths = flat.full_paths()
    shapes = [leaves[path].shape for path in paths]
    dtypes = [leaves[path].dtype for path in paths]
    found = find_origins(Leaves(flat, shapes, dtypes)).state or []
    return {
        path: origin
        for path, origin in zip(paths, found, strict=False)
        if origin is not None
    }


def _nnx_optimizers(names: Sequence[str]) -> set[str]:
    """The folders that hold `opt_state` and `step` alone, as an `nnx.Optimizer` does.

    A TrainState has parameters beside them.
    """
    parts = [name.split("/") for name in names]
    inside: dict[str, set[str]] = {
        "/".join(own[: own.index("opt_state")]): set()
        for own in parts
        if "opt_state" in own[:-1]
    }
    for own in parts:
        for at, part in enumerate(own):
            folder = "/".join(own[:at])
            if folder in inside:
                inside[folder].add(part)
    return {folder for folder, held in inside.items() if held == {"opt_state", "step"}}


def _section(name: str, optimizers: Container[str]) -> tuple[str, Role]:
    """The section that a leaf is in: how its path begins, and its role."""
    parts = name.split("/")
    own = parts[:-1]
    if parts[-1] == "step" and "/".join(own) in optimizers:
        return name.removesuffix("step"), "optimizer"
    if "opt_state" in own:
        return "/".join(parts[: own.index("opt_state") + 1]) + "/", "optimizer"
    if own and own[0] in _OPTIMIZER:
        return own[0] + "/", "optimizer"
    if "params" in own:
        last = len(own) - own[::-1].index("params")
        return "/".join(parts[:last]) + "/", "parameter"
    if own and own[0] == "model":
        return "model/", "parameter"
    return "", "parameter"
