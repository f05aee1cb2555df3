"""Emit each warning once for a rule set and the leaves that it is about."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax

from flax_layoutmap._core.errors import ResolveError, bullet_list, warn
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._rules.rules import RuleSet


class Remark(NamedTuple):
    """Something to be told once of the same leaves.

    Attributes:
        text: what is told.
        about: what it says of them, or of which rule.
        paths: the leaves, by their paths within their sections: `down/kernel` for
            `model/down/kernel`, as another function may call the model otherwise.
    """

    text: str
    about: str
    paths: frozenset[str]


def announce(rules: RuleSet, remarks: Sequence[Remark]) -> None:
    """Warns of remarks, of each once for a rule set, and in one process of a job.

    Args:
        rules: whose `strict` says whether they are errors, or nothing.
        remarks: what there is to say.

    Raises:
        ResolveError: the rule set is strict, and there are some.
    """
    if rules.strict is False or not remarks:
        return
    if rules.strict:
        count = "1 finding" if len(remarks) == 1 else f"{len(remarks)} findings"
        texts = [one.text for one in remarks]
        raise ResolveError(f"strict: {count}\n{bullet_list(texts)}", texts)
    found = news(rules, remarks)
    if found and _speaks(rules.mesh):
        warn(
            f"{bullet_list(found, limit=10)}\n  (a rule None says that a leaf is "
            "to be replicated; strict=False is quiet, strict=True raises)"
        )


def news(rules: RuleSet, remarks: Sequence[Remark]) -> list[str]:
    """The texts of what has not been told yet, neither of these leaves nor of more.

    Asked again, there are none: a rule set, and the same rules on another mesh, keep
    what was told.
    """
    told = rules._caches.told
    before = tuple(told.items())

    @functools.cache
    def known(paths: frozenset[str]) -> set[str]:
        return set().union(*(about for some, about in before if paths <= some))

    found = [one for one in remarks if one.about not in known(one.paths)]
    for one in found:
        told.setdefault(one.paths, set()).add(one.about)
    return [one.text for one in found]


def _speaks(mesh: DeviceMesh | None) -> bool:
    """Whether this process is the first of those that the mesh lies on."""
    if mesh is None or mesh.is_abstract:
        return True
    return mesh.devices.flat[0].process_index == jax.process_index()
