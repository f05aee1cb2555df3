"""What would otherwise be silent, told once."""

from collections.abc import Sequence

import jax

from flax_layoutmap._errors import ResolveError, bullet_list, warn
from flax_layoutmap._mesh import DeviceMesh
from flax_layoutmap._rules import RuleSet


def announce(rules: RuleSet, remarks: Sequence[str]) -> None:
    """Warns of remarks, once for a rule set, and in one process of a job.

    Args:
        rules: whose `strict` says whether they are errors, or nothing.
        remarks: one text each.

    Raises:
        ResolveError: the rule set is strict, and there are some.
    """
    if rules.strict is False or not remarks:
        return
    if rules.strict:
        count = "1 finding" if len(remarks) == 1 else f"{len(remarks)} findings"
        raise ResolveError(f"strict: {count}\n{bullet_list(remarks)}", list(remarks))
    key = tuple(remarks)
    if key in rules._warned:
        return
    rules._warned.add(key)
    if _speaks(rules.mesh):
        warn(
            f"{bullet_list(remarks, limit=10)}\n  (a rule None says that a leaf is "
            "to be replicated; strict=False is quiet, strict=True raises)"
        )


def _speaks(mesh: DeviceMesh | None) -> bool:
    """Whether this process is the first of those that the mesh lies on."""
    if mesh is None or mesh.is_abstract:
        return True
    return mesh.devices.flat[0].process_index == jax.process_index()
