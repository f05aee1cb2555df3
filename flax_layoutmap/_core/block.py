"""A reusable context manager that, for type checkers, suppresses no errors."""

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Block:
    """A context manager that hides no error, and can be entered again.

    As a decorator it is a block around each call of the function.

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

    def __call__(self, function: Callable[_P, _T]) -> Callable[_P, _T]:
        """The function with a separate block around each call."""
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def later(*args: _P.args, **kwargs: _P.kwargs) -> Any:
                with self._open():
                    return await function(*args, **kwargs)

            return later  # type: ignore[return-value]

        @functools.wraps(function)
        def inside(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            with self._open():
                return function(*args, **kwargs)

        return inside
