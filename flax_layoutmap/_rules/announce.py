"""Emit each warning once per rule set and set of leaves."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax

from flax_layoutmap._core.errors import ResolveError, bullet_list, warn
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._rules.rules import RuleSet


class Remark(NamedTuple):
    """A warning to emit once for the same leaves.

    Attributes:
        text: the text of the warning.
        about: its kind, or the rule that it is about: two with one are the same.
        paths: the leaves, by their paths within their sections: `down/kernel` for
            `model/down/kernel`, as another function may call the model otherwise.
    """

    text: str
    about: str
    paths: frozenset[str]


def announce(rules: RuleSet, remarks: Sequence[Remark]) -> None:
    """Emit warnings, each once for a rule set, and in one process of a job.

    Args:
        rules: whose `strict` says whether they are errors, or nothing.
        remarks: the warnings.

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
    if found and _is_first(rules.mesh):
        warn(
            f"{bullet_list(found, limit=10)}\n  (a rule None says that a leaf is "
            "to be replicated; strict=False is quiet, strict=True raises)"
        )


def news(rules: RuleSet, remarks: Sequence[Remark]) -> list[str]:
    """The texts of new remarks: not emitted yet for these leaves or a superset.

    They are remembered, by the rule set and the same rules on other meshes.
    """
    announced = rules._caches.announced
    before = tuple(announced.items())

    @functools.cache
    def known(paths: frozenset[str]) -> set[str]:
        return set().union(*(about for some, about in before if paths <= some))

    found = [one for one in remarks if one.about not in known(one.paths)]
    for one in found:
        announced.setdefault(one.paths, set()).add(one.about)
    return [one.text for one in found]


def _is_first(mesh: DeviceMesh | None) -> bool:
    """Whether this process has the first device of the mesh."""
    if mesh is None or mesh.is_abstract:
        return True
    return mesh.devices.flat[0].process_index == jax.process_index()
