"""Context managers that type checkers read right."""

import contextlib
from typing import Any


class Block:
    """A context manager that hides no error.

    Of one made by `contextlib.contextmanager` a type checker must assume that it may,
    so that what is set in the `with` block counts as possibly unbound after it.
    """

    def __init__(self, manager: contextlib.AbstractContextManager[Any]) -> None:
        self._manager = manager

    def __enter__(self) -> Any:
        return self._manager.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._manager.__exit__(*error)
