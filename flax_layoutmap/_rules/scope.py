"""The ambient rule set and the default mesh, and blocks that set such values."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax

from flax_layoutmap._core.errors import MeshError
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh
from flax_layoutmap._rules.rules import RuleSet

_T = TypeVar("_T")


class Block(contextlib.ContextDecorator):
    """A context manager that can be entered again, and decorates functions.

    A type checker assumes that one made by `contextlib.contextmanager` may suppress
    errors, so that a name bound in the `with` block is possibly unbound after it.
    """

    def __init__(self, open_: Callable[[], AbstractContextManager[Any]]) -> None:
        self._open = open_
        self._managers: list[AbstractContextManager[Any]] = []

    def _recreate_cm(self) -> "Block":  # for each call of a decorated function
        return Block(self._open)

    def __enter__(self) -> Any:
        manager = self._open()
        entered = manager.__enter__()
        self._managers.append(manager)
        return entered

    def __exit__(self, *error: Any) -> None:
        self._managers.pop().__exit__(*error)


_CURRENT: contextvars.ContextVar[RuleSet | None] = contextvars.ContextVar(
    "flax_layoutmap_rules", default=None
)

_DEFAULT_MESH: contextvars.ContextVar[DeviceMesh | None] = contextvars.ContextVar(
    "flax_layoutmap_default_mesh", default=None
)


@contextlib.contextmanager
def default_mesh(mesh: Any) -> Iterator[DeviceMesh]:
    """Set the mesh of layouts without one, in a block or a decorated function.

    A layout's own mesh and that of the surrounding `flm.jit(layout_map=…)` take
    precedence over it, and it over `jax.set_mesh`. It applies to this library only, in
    the same thread or task; unlike `jax.set_mesh` it works inside of `jit` and with an
    abstract mesh. A function under `jax.jit` reads it when it is traced: called with
    another default mesh, it may reuse what was compiled for the first.

    Args:
        mesh: anything that `DeviceMesh` accepts.

    Returns:
        A context manager (and decorator) that gives the `DeviceMesh`.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> with flm.dtensor.default_mesh("data=8"):
        ...     x = flm.relayout(jax.numpy.ones(8), ("data",))
        >>> flm.dtensor.fetch_layout(x)
        TensorLayout(('data',), DeviceMesh('data=8'))

    Plain JAX: `with jax.set_mesh(mesh):`, which also moves what JAX makes, and
    compiles functions again.
    """
    made = as_mesh(mesh)
    if made is None:
        raise MeshError("default_mesh takes a mesh, got None; use flm.DeviceMesh(...)")
    token = _DEFAULT_MESH.set(made)
    try:
        yield made
    finally:
        _DEFAULT_MESH.reset(token)


def get_default_mesh() -> DeviceMesh | None:
    """Return the mesh of the innermost `default_mesh`, or None.

    Example:
        >>> import flax_layoutmap as flm
        >>> flm.dtensor.get_default_mesh() is None
        True

    Plain JAX: `jax.sharding.get_mesh()`.
    """
    return _DEFAULT_MESH.get()


def current_rules() -> RuleSet | None:
    return _CURRENT.get()


# Part of the key of JAX's own caches: a function under `jax.jit` that is called in a
# scope is traced again for other rules.
_TRACE_KEY: Any = jax.make_user_context(None)


def trace_key() -> Any:
    """What the surrounding scopes add to the keys of JAX's caches, or None."""
    return _TRACE_KEY.value


def keyed(value: Any) -> contextlib.AbstractContextManager[Any]:
    """In the block, this hashable value is part of the keys of JAX's caches."""
    return _TRACE_KEY(value)


@contextlib.contextmanager
def using_rules(rules: RuleSet | None) -> Iterator[None]:
    """Make a rule set the ambient one inside the block; None leaves it as it is."""
    if rules is None:
        yield
        return
    token = _CURRENT.set(rules)
    # A trace depends on the rules only through their names.
    names = keyed(("names", rules)) if rules.names else contextlib.nullcontext()
    try:
        with names:
            yield
    finally:
        _CURRENT.reset(token)


# The axes over which the surrounding `flm.accumulate` has split the batch.
_SPLIT: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar(
    "flax_layoutmap_split", default=()
)


def split_axes() -> tuple[str, ...]:
    return _SPLIT.get()


def call_split_over(axes: tuple[str, ...], call: Callable[..., _T], *args: Any) -> _T:
    """Call where each device has its own rows along these axes: layouts omit them."""
    token = _SPLIT.set(axes)
    try:
        return call(*args)
    finally:
        _SPLIT.reset(token)
