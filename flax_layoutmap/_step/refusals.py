"""Checks of what `flm.jit` does not accept; errors name the Variable or constant.

Variables that two arguments share, or that are references; constants that cannot be
compared; gradients of integers; and Variables that a function reads though no argument
holds them. The values of these would be constants of the program, and stale once the
Variables change. So, while a function is traced, reading one returns a stand-in of the
same shape; where it is computed with, an error names the module to pass.
"""

import collections
import contextlib
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.errors import TraceContextError
from jax.core import Tracer

from flax_layoutmap._core.errors import StructureError
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._step.arguments import Argument, first_four
from flax_layoutmap._tree.flax_internals import (
    call_reading_as,
    constants_of,
    is_nnx_object,
    is_plain_variable,
    named_objects_of,
    read_value,
    reader,
    were_made_alike,
)
from flax_layoutmap._tree.jaxprs import results_read
from flax_layoutmap._tree.watch import Uncomparable, comparable

# Names of the functions that make the stand-ins.
_STAND_IN = "value_of_variable_"

# Part of the key of JAX's own caches: a function of `jax.jit` that is called in the
# trace has read stand-ins, so its trace must not be used elsewhere, nor the reverse.
_TRACED: Any = jax.make_user_context(None)

# A Variable that was made outside every trace.
_EAGER = nnx.Variable(0)

_NUMBERS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)

# The errors of JAX where Python reads the values of a traced array.
_ASKS_FOR_NUMBERS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)

# How many objects are searched for a Variable at most, to name its path.
_LOOKED_AT = 10_000


# -------------------------------------------------------------------- arguments


def named_parts(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The objects and Variables in NNX objects with names, each with its path."""
    for name, node in named:
        for path, part in named_objects_of(node):
            yield "/".join((name, *map(str, path))), part


def named_objects(arguments: Iterable[Argument]) -> list[tuple[str, Any]]:
    """The outermost NNX objects in arguments, each with the argument's name."""
    return [
        (argument.name, node) for argument in arguments for node in argument.objects
    ]


def check_not_shared(arguments: Sequence[Argument]) -> None:
    """Raise StructureError where two NNX objects share a Variable.

    Each is rebuilt on its own, so it would not stay shared.
    """
    leaves = [leaf for a in arguments if a.has_objects for leaf in a.raw]
    # A shared Variable is a leaf that occurs twice; this check is much faster.
    if len(set(map(id, leaves))) < len(leaves):
        check_apart(arguments, [a.objects for a in arguments], nnx.Variable)


def check_apart(
    arguments: Sequence[Argument], nodes: Sequence[Sequence[Any]], kinds: Any
) -> None:
    """Raise StructureError where NNX objects share a part of these kinds.

    `nodes` are those of each argument, before or after the function has changed them.
    """
    named = [
        (argument.name + (f" (object {at})" if len(own) > 1 else ""), node)
        for argument, own in zip(arguments, nodes, strict=True)
        for at, node in enumerate(own, 1)
    ]
    owners: dict[int, tuple[int, str]] = {}
    for number, one in enumerate(named):
        for path, part in named_parts([one]):
            if not isinstance(part, kinds):
                continue
            first, other = owners.setdefault(id(part), (number, path))
            if first != number:
                raise StructureError(
                    f"{other} and {path} are one {type(part).__name__}: pass one "
                    "object that holds both, so that they stay shared"
                )


def check_plain(arguments: Sequence[Argument]) -> None:
    """Raise StructureError where a Variable holds a reference instead of a value."""
    for path, part in named_parts(named_objects(arguments)):
        if isinstance(part, nnx.Variable) and not is_plain_variable(part):
            raise StructureError(
                f"{path} is a {type(part).__name__} with ref or hijax, which "
                "changes in place by itself: make it without, or use nnx.jit"
            )


def refuse_integers(arguments: Sequence[Argument], name: str, cause: Exception) -> None:
    """Raise StructureError for gradients of integers, if JAX has refused them.

    It names the integer Params, and leaves of other states.
    """
    if "requires real- or complex-valued inputs" not in str(cause):
        return
    found = [
        f"{argument.path(at)} {tuple(np.shape(leaf))} {leaf.dtype}"
        for argument in arguments
        if argument.is_state
        for at, (leaf, holder) in enumerate(
            zip(argument.leaves, argument.holders(), strict=True)
        )
        if (holder is None or isinstance(holder[0], nnx.Param))
        and not jax.numpy.issubdtype(leaf.dtype, np.inexact)
    ]
    if found:
        raise StructureError(
            f"{name} differentiates what is no real or complex number: "
            f"{first_four(found)}; keep it in an nnx.Variable that is no "
            "nnx.Param, or out of the tree that is differentiated"
        ) from cause


def refuse_constants(arguments: Sequence[Argument], cause: Exception) -> None:
    """Raise StructureError for a constant in NNX objects that cannot be compared."""
    for path, part in named_parts(named_objects(arguments)):
        for name, value in constants_of(part).items():
            try:
                comparable(value)
            except Uncomparable as error:
                kind = type(error.args[0]).__name__
                raise StructureError(
                    f"{path}/{name} is or holds a {kind}, which Python can neither "
                    "hash nor copy, so no call could tell whether it changed: "
                    f"give {kind} a __hash__, or keep it outside of the model"
                ) from cause


# -------------------------------------------------------------------- closures


class Closures:
    """The Variables that a function reads, and that none of its arguments holds.

    To be made right before the trace; `given` are the arguments, with names.
    """

    def __init__(self, fun: Any, name: str, given: Sequence[tuple[str, Any]]):
        """Start empty."""
        self._fun, self._name, self._given = fun, name, given
        outer = reader()
        around = outer if isinstance(outer, Closures) else None
        self._levels: list[Any] = [_EAGER] if around is None else around._levels
        self._levels = [*self._levels, nnx.Variable(0)]
        # Shared with outer traces: a Variable that is read is read in all of them.
        self._read: dict[int, Any] = {} if around is None else around._read

    def call(self, call: Callable[[], Any]) -> Any:
        """Call the function in the trace.

        Raises:
            StructureError: the call reads the values of such a Variable,
                differentiates it, or changes it.
        """
        try:
            with _TRACED(True):
                return call_reading_as(self, call)
        except TraceContextError as error:
            changed = _self_of(error)
            if not self._is_outside(changed):
                raise
            raise self._error("changes", {id(changed): changed}) from error
        except _ASKS_FOR_NUMBERS as error:
            if not self._read:
                raise
            call()  # raises if what has no numbers is not the stand-ins
            raise self._error("reads", self._read) from error
        except ValueError as error:
            if not self._read or "different trace level" not in str(error):
                raise
            # Flax's own message prints all values of the Variable.
            last = dict([list(self._read.items())[-1]])
            raise self._error("differentiates", last) from None

    def check(self, jaxpr: Any) -> None:
        """Raise StructureError where the traced function uses a stand-in."""
        names = results_read(jaxpr, _STAND_IN)
        used = [int(name.removeprefix(_STAND_IN)) for name in names]
        if used:
            raise self._error("reads", {at: self._read.get(at) for at in used})

    def _is_outside(self, variable: Any) -> bool:
        return isinstance(variable, nnx.Variable) and any(
            were_made_alike(variable, level) for level in self._levels
        )

    def __call__(self, variable: Any, value: Any) -> Any:
        """What reading a Variable returns: its value, or a stand-in."""
        if isinstance(value, Tracer) or not self._is_outside(variable):
            return value
        self._read[id(variable)] = variable

        def stand_in(leaf: Any) -> Any:
            if isinstance(leaf, Tracer) or not isinstance(leaf, _NUMBERS):
                return leaf
            kind: Any = jax.typeof(leaf)

            def make() -> Any:
                return jax.lax.full(kind.shape, 0, kind.dtype)

            make.__name__ = f"{_STAND_IN}{id(variable)}"
            return jax.jit(make)()

        return jax.tree.map(stand_in, value)

    def _error(self, verb: str, wanted: Mapping[int, Any]) -> StructureError:
        objects = itertools.chain(
            _objects_within([("", self._fun)]), _objects_within(self._given)
        )
        found = _paths(objects, dict(wanted))
        paths = first_four(sorted(path for path, _ in found))
        owners = first_four(sorted({owner for _, owner in found if owner}))
        return StructureError(
            f"{self._name} {verb} {paths} outside of its arguments: compiled, it would "
            f"go on with the values that are there now; pass {owners or 'the module'} "
            f"as an argument of {self._name} and use that"
        )


def _self_of(error: Exception) -> Any:
    """The object whose method has raised an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return None if trace is None else trace.tb_frame.f_locals.get("self")


# ---------------------------------------------------------------------------- paths


def _paths(
    objects: Iterable[tuple[str, Any]], wanted: dict[int, Any]
) -> list[tuple[str, str]]:
    """The path and shape of each Variable, and the name of the object that holds it.

    Names are those that the function itself uses: of its closure, of globals. If none
    leads to the Variable, its type replaces its path. In `wanted`, None is a Variable
    that a function of `jax.jit` has read in an earlier trace.
    """
    found: list[tuple[str, str]] = []
    for name, node in objects:
        for path, part in named_objects_of(node):
            if id(part) in wanted:
                del wanted[id(part)]
                found.append((_shown("/".join((name, *map(str, path))), part), name))
        if not wanted:
            break
    others = (_shown(f"a {type(v).__name__}", v) for v in wanted.values())
    return [*found, *((text, "") for text in others)]


def _shown(name: str, variable: Any) -> str:
    if variable is None:
        return "a Variable"
    leaves = jax.tree.leaves(read_value(variable))
    return f"{name} {show_shape(np.shape(leaves[0]))}" if len(leaves) == 1 else name


def _objects_within(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Reachable NNX objects, Variables and States, with names; nearest first."""
    queue, seen = collections.deque(named), set[int]()
    while queue and len(seen) < _LOOKED_AT:
        name, value = queue.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if is_nnx_object(value) or isinstance(value, nnx.Variable | nnx.State):
            yield name, value
            for path, part in named_objects_of(value):
                where = ".".join((name, *map(str, path)))
                queue += [(f"{where}.{k}", v) for k, v in constants_of(part).items()]
        else:
            queue += _named_parts(name, value)


def _named_parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The references of a function, entries of a container, attributes of an object."""
    if isinstance(value, types.FunctionType):
        yield from _used_by(value)
    elif isinstance(value, types.MethodType):
        yield "self", value.__self__
        yield name, value.__func__
    elif isinstance(value, functools.partial):
        yield name, value.func
        yield from ((f"args[{at}]", part) for at, part in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{name}[{at}]", part) for at, part in enumerate(value))
    elif not isinstance(value, type | types.ModuleType):
        attributes = getattr(value, "__dict__", {})
        yield from ((f"{name}.{key}", part) for key, part in attributes.items())


def _used_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The closure, defaults and globals of a function."""
    for name, cell in zip(
        function.__code__.co_freevars, function.__closure__ or (), strict=True
    ):
        with contextlib.suppress(ValueError):  # not set yet
            yield name, cell.cell_contents
    parameters = inspect.signature(function, follow_wrapped=False).parameters
    yield from ((name, one.default) for name, one in parameters.items())
    names = list(dict.fromkeys(_names_in(function.__code__)))
    for name in filter(function.__globals__.__contains__, names):
        value = function.__globals__[name]
        yield name, value
        if isinstance(value, type | types.ModuleType):
            # Only the attributes that the function names.
            for other in filter(vars(value).__contains__, names):
                yield f"{name}.{other}", vars(value)[other]


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _names_in(part)
