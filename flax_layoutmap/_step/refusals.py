"""Checks of what `flm.jit` does not accept; each error names the Variable or constant.

`named` are pairs: the name of an argument, and an outermost NNX object in it.
"""

import dis
import functools
import inspect
import itertools
import re
import types
from collections.abc import (
    Callable,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from flax_layoutmap._core.errors import StructureError
from flax_layoutmap._step.arguments import first_four
from flax_layoutmap._tree.flax_internals import (
    constants_of,
    is_plain_variable,
    named_objects_of,
    nnx_state,
)
from flax_layoutmap._tree.watch import Uncomparable, comparable

Named = Iterable[tuple[str, Any]]


def named_parts(named: Named) -> Iterator[tuple[str, Any]]:
    """The objects and Variables in NNX objects with names, each with its path."""
    for name, node in named:
        for path, part in named_objects_of(node):
            yield "/".join((name, *map(str, path))), part


def check_apart(named: Named, kinds: Any = nnx.Variable) -> None:
    """Raise StructureError where two NNX objects share a part of these kinds."""
    owners: dict[int, tuple[int, str]] = {}
    for number, pair in enumerate(named):
        for path, part in named_parts([pair]):
            if not isinstance(part, kinds):
                continue
            first, other = owners.setdefault(id(part), (number, path))
            if first != number:
                raise StructureError(
                    f"{other} and {path} are one {type(part).__name__}: pass one "
                    "object that holds both, so that they stay shared"
                )


def check_plain(named: Named) -> None:
    """Raise StructureError where a Variable holds a reference instead of a value."""
    for path, part in named_parts(named):
        if isinstance(part, nnx.Variable) and not is_plain_variable(part):
            raise StructureError(
                f"{path} is a {type(part).__name__} with ref or hijax, which is a "
                "reference to its value and has no layout: make it without these"
            )


def refuse_integers(candidates: Named, name: str, cause: Exception) -> None:
    """Raise StructureError for gradients of integers, if JAX has refused them.

    `candidates` are leaves that may be differentiated, with their paths.
    """
    if "requires real- or complex-valued inputs" not in str(cause):
        return
    integers = [
        f"{path} {tuple(np.shape(leaf))} {leaf.dtype}"
        for path, leaf in candidates
        if not jax.numpy.issubdtype(leaf.dtype, np.inexact)
    ]
    if integers:
        raise StructureError(
            f"{name} differentiates integers or booleans: {first_four(integers)}; keep "
            "them in an nnx.Variable that is not an nnx.Param, or outside of the tree "
            "that is differentiated"
        ) from cause


def refuse_constants(named: Named, cause: Exception) -> None:
    """Raise StructureError for a constant in NNX objects that cannot be compared."""
    for path, part in named_parts(named):
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


def refuse_closures(fun: Callable[..., Any], name: str, given: Container[str]) -> None:
    """Raise StructureError for NNX objects that a function uses without being given.

    Their values would be constants of the program. It looks at what the code of the
    function, and of those it names, loads from closures, globals, `self` and defaults
    (unless these are `given`), and at one attribute or entry below.
    """
    parameters = inspect.signature(fun).parameters.values()
    used = [(parameter.name, parameter.default) for parameter in parameters]
    used = [(path, default) for path, default in used if path not in given]
    paths = [path for path, value in (*used, *_used(fun)) if _holds_values(value)]
    _raise_for(list(dict.fromkeys(paths)), name)


def refuse_captured(constants: Iterable[Any], named: Named, name: str) -> None:
    """Raise StructureError where constants of a program are arrays of arguments."""
    paths = {
        id(leaf): path
        for path, part in named_parts(named)
        if isinstance(part, nnx.Variable)
        for leaf in jax.tree.leaves(part.get_raw_value())
        if not isinstance(leaf, Tracer)
    }
    _raise_for([paths[id(x)] for x in constants if id(x) in paths], name)


def _raise_for(used: Sequence[str], name: str) -> None:
    if not used:
        return
    owners = first_four(list(dict.fromkeys(re.split(r"[./[]", x)[0] for x in used)))
    what = "is not an argument. Its current value would be compiled in as a constant"
    if len(used) > 1:
        what = "are not arguments. Their values would be compiled in as constants"
    raise StructureError(
        f"{name} uses {first_four(used)}, which {what}. Pass {owners} to {name}."
    )


def _holds_values(value: Any) -> bool:
    """Whether it is or holds a Variable of no surrounding trace."""
    if isinstance(value, nnx.Pytree | nnx.Variable):
        value = nnx_state(value) if isinstance(value, nnx.Pytree) else value
    elif not isinstance(value, nnx.State):
        return False
    return not all(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value))


def _used(fun: Any) -> Iterator[tuple[str, Any]]:
    """What a function, and the functions that it uses, use besides arguments."""
    queue, seen = [fun], set[int]()
    while queue:
        for path, value in _used_by(queue.pop()):
            if id(value) in seen:
                continue
            seen.add(id(value))
            yield path, value
            if isinstance(value, nnx.State | type):
                continue
            if isinstance(value, Mapping):
                yield from ((f"{path}[{key!r}]", part) for key, part in value.items())
            elif isinstance(value, list | tuple):
                yield from ((f"{path}[{at}]", part) for at, part in enumerate(value))
            elif callable(value):
                queue.append(value)


def _used_by(fun: Any) -> Iterator[tuple[str, Any]]:
    bound: dict[str, Any] = {}
    if isinstance(fun, functools.partial):
        yield from (("func", fun.func), ("args", fun.args), ("keywords", fun.keywords))
    if isinstance(fun, types.MethodType):
        fun, owner = fun.__func__, fun.__self__
        if isinstance(owner, nnx.Pytree):
            yield "self", owner
            return
        code = getattr(fun, "__code__", None)
        bound = dict.fromkeys(code.co_varnames[:1], owner) if code else {}
    if not isinstance(fun, types.FunctionType):
        yield "", getattr(fun, "__wrapped__", None)
        return
    cells = zip(fun.__code__.co_freevars, fun.__closure__ or (), strict=True)
    closure = {name: x.cell_contents for name, x in cells if x != types.CellType()}
    if "site-packages" in fun.__code__.co_filename:  # a decorator of a library
        yield from closure.items()
        return
    scopes = {"GLOBAL": fun.__globals__, "DEREF": closure | bound, "FAST": bound}
    for kind, name, attribute in _loads(fun.__code__):
        value = scopes[kind].get(name)
        below = getattr(value, "__dict__", {})
        if attribute in below:
            yield f"{name}.{attribute}", below[attribute]
        else:
            yield name, value


def _loads(code: types.CodeType) -> Iterator[tuple[str, str, str | None]]:
    """The names that a code loads, and the attribute of each that it loads next."""
    steps = list(dis.get_instructions(code))
    for one, after in itertools.zip_longest(steps, steps[1:]):
        kind = re.match("LOAD_(GLOBAL|DEREF|FAST)", one.opname)
        if kind:
            name = one.argval[-1] if isinstance(one.argval, tuple) else one.argval
            is_before = after and after.opname in ("LOAD_ATTR", "LOAD_METHOD")
            yield kind[1], name, after.argval if is_before else None
    for part in filter(inspect.iscode, code.co_consts):
        yield from _loads(part)
