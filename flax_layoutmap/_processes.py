"""Running across processes: do all of them mean the same?"""

import hashlib
from collections.abc import Mapping

import jax
import numpy as np

from flax_layoutmap._errors import ProcessError

_AGREED: set[bytes] = set()


def agree(parts: Mapping[str, str], what: str) -> None:
    """Compares texts between all processes; returns at once where there is only one.

    Must be called by all processes at the same point, as every collective. What was
    agreed on once is not compared again.

    Args:
        parts: name → text (a hash, say) that must be equal everywhere.
        what: what is about to happen, for the message.

    Raises:
        ProcessError: on every process, naming the processes that differ from process 0
            and the parts in which they do.
    """
    if jax.process_count() == 1:
        return
    digests = [hashlib.sha256(text.encode()).digest() for text in parts.values()]
    key = b"".join(digests)
    if key in _AGREED:
        return
    from jax.experimental import multihost_utils

    own = np.frombuffer(key, np.uint8).reshape(len(digests), -1)
    everyone = np.asarray(multihost_utils.process_allgather(own))
    names = list(parts)
    problems = []
    for process, theirs in enumerate(everyone):
        differing = [
            name
            for name, mine, reference in zip(names, theirs, everyone[0], strict=True)
            if not np.array_equal(mine, reference)
        ]
        if differing:
            problems.append(f"process {process} differs in its {', '.join(differing)}")
    if problems:
        raise ProcessError(
            f"the processes disagree before {what}: {'; '.join(problems)} (compared "
            "with process 0). Build mesh, rules and model from the same values in "
            "every process"
        )
    _AGREED.add(key)
