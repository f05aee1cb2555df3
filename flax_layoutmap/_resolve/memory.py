"""Caches between calls: resolved trees, and the rules of a model.

The first is bounded and ends with its rule set, the second holds weak references;
neither keeps arrays alive.
"""

import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from flax_layoutmap._core.errors import RuleError
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.flax_internals import objects_of
from flax_layoutmap._tree.objects import objects_in
from flax_layoutmap._tree.structure import Structure

# ------------------------------------------------------------------ resolved trees

_MOST_TREES = 4


def recall(tree: Any, rules: RuleSet) -> Resolution | None:
    """The Resolution of a tree with the same structure under these rules."""
    for structure, resolution in tuple(rules._caches.resolved):
        if structure.fits(tree):
            return resolution
    return None


def remember(structure: Structure, resolution: Resolution) -> None:
    """Note a Resolution for `recall`, as long as its rule set lives."""
    trees = resolution.rules._caches.resolved
    trees.insert(0, (structure, resolution))
    del trees[_MOST_TREES:]


# ---------------------------------------------------------------- rules of a model

# By the id of an NNX object, which stays when a step gives it other arrays, or of an
# array, since trees are values. Only what was laid out by optimizer rules is here.
_KNOWN: dict[int, tuple[weakref.ref[Any], RuleSet]] = {}


def remember_rules(tree: Any, rules: RuleSet) -> None:
    """Note the rules that a tree was laid out by, if they have optimizer rules."""
    if not rules.optimizer and not _KNOWN:
        return
    own = dataclasses.replace(rules, rules=(), names=(), activations=())
    for part in _parts(tree):
        key = id(part)
        _KNOWN.pop(key, None)
        if own.optimizer:
            gone = weakref.ref(part, lambda _, key=key: _KNOWN.pop(key, None))
            _KNOWN[key] = gone, own


def known_rules(tree: Any) -> RuleSet | None:
    """The rules with an optimizer section that a tree was laid out by; None: none.

    Raises:
        RuleError: its parts were laid out by several such rule sets.
    """
    if not _KNOWN:
        return None
    entries = [_KNOWN.get(id(part)) for part in _parts(tree)]
    found = {entry[1] for entry in entries if entry is not None}
    if len(found) > 1:
        raise RuleError(
            f"parts of the model were laid out by {len(found)} maps with different "
            "rules for optimizer state: pass the one that counts, "
            "flm.create_optimizer(model, tx, layout_map=layout_map)"
        )
    return next(iter(found), None)


def _parts(tree: Any) -> Iterator[Any]:
    """The arrays of a tree, and its NNX objects."""
    for node in objects_in(tree):
        # A Variable cannot be referred to weakly.
        yield from (n for n in objects_of(node) if not isinstance(n, nnx.Variable))
    yield from (leaf for leaf in flatten(tree).leaves if isinstance(leaf, jax.Array))
