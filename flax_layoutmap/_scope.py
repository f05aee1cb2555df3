"""The ambient rule set: one context variable."""

import contextlib
import contextvars
from collections.abc import Iterator

from flax_layoutmap._rules import RuleSet

_CURRENT: contextvars.ContextVar[RuleSet | None] = contextvars.ContextVar(
    "flax_layoutmap_rules", default=None
)


def current_rules() -> RuleSet | None:
    """The rule set of the innermost scope, or None outside of all."""
    return _CURRENT.get()


@contextlib.contextmanager
def using_rules(rules: RuleSet | None) -> Iterator[None]:
    """Makes a rule set the ambient one inside the block; None leaves it as it is."""
    if rules is None:
        yield
        return
    token = _CURRENT.set(rules)
    try:
        yield
    finally:
        _CURRENT.reset(token)
