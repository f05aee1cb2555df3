"""Context managers that type checkers read right."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


class Block:
    """A context manager that hides no error, and can be entered again.

    Of one made by `contextlib.contextmanager` a type checker must assume that it may
    hide errors, so that what is set in the `with` block counts as possibly unbound
    after it.

    Args:
        open_: makes the manager of one entry.
    """

    def __init__(self, open_: Callable[[], AbstractContextManager[Any]]) -> None:
        self._open = open_
        self._managers: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> Any:
        manager = self._open()
        entered = manager.__enter__()
        self._managers.append(manager)
        return entered

    def __exit__(self, *error: Any) -> None:
        self._managers.pop().__exit__(*error)
