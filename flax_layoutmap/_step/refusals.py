"""Checks of what `flm.jit` does not accept; each error names the Variable or constant.

`named` are pairs: the name of an argument, and an outermost NNX object in it.
"""

import dis
import functools
import inspect
import re
import types
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import jax
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
from flax_layoutmap._tree.graph import Uncomparable, contents

Named = Iterable[tuple[str, Any]]


def named_parts(named: Named) -> Iterator[tuple[str, Any]]:
    """The objects and Variables in NNX objects with names, each with its path."""
    for name, node in named:
        for path, part in named_objects_of(node):
            yield "/".join((name, *map(str, path))), part


def check_parts(named: Named) -> None:
    """Raise StructureError for Variables that are shared, or have `ref` or `hijax`."""
    owners: dict[int, tuple[int, str]] = {}
    for number, pair in enumerate(named):
        for path, part in named_parts([pair]):
            if not isinstance(part, nnx.Variable):
                continue
            kind = type(part).__name__
            first, other = owners.setdefault(id(part), (number, path))
            if first != number:
                raise StructureError(
                    f"{other} and {path} are one {kind}: pass one object that holds "
                    "both, so that they stay shared"
                )
            if not is_plain_variable(part):
                raise StructureError(
                    f"{path} is a {kind} with ref or hijax, which is a reference to "
                    "its value and has no layout: make it without these"
                )


def refuse_constants(named: Named, cause: Exception) -> None:
    """Raise StructureError for a constant in NNX objects that cannot be compared."""
    for path, part in named_parts(named):
        for name, value in constants_of(part).items():
            try:
                contents(value)
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
    defaults = [(p.name, p.default) for p in parameters if p.name not in given]
    used = (*defaults, *_used(fun, set()))
    _raise_for([path for path, value in used if _holds_values(value)], name)


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


def _raise_for(used: Iterable[str], name: str) -> None:
    paths = list(dict.fromkeys(used))
    owners = [re.split(r"[/[]|(?<!^self)\.", path)[0] for path in paths]
    if paths:
        raise StructureError(
            f"{name} uses {first_four(paths)}, but not as an argument: the current "
            "value would be compiled in as a constant. "
            f"Pass {first_four(list(dict.fromkeys(owners)))} to {name}."
        )


def _holds_values(value: Any) -> bool:
    """Whether it is or holds a Variable of no surrounding trace."""
    value = nnx_state(value) if isinstance(value, nnx.Pytree) else value
    is_state = isinstance(value, nnx.Variable | nnx.State)
    return is_state and not all(isinstance(x, Tracer) for x in jax.tree.leaves(value))


def _used(fun: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """What a function, and the functions that it uses, use besides arguments."""
    for path, value in _loaded_by(fun):
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield path, value
        if isinstance(value, list | tuple):
            value = dict(enumerate(value))
        if isinstance(value, Mapping) and not isinstance(value, nnx.State):
            yield from ((f"{path}[{key!r}]", part) for key, part in value.items())
        elif callable(value):
            yield from _used(value, seen)


def _loaded_by(fun: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(fun, functools.partial):
        yield from (("func", fun.func), ("args", fun.args), ("keywords", fun.keywords))
    owner, fun = getattr(fun, "__self__", None), getattr(fun, "__func__", fun)
    code = fun.__code__ if isinstance(fun, types.FunctionType) else None
    if isinstance(owner, nnx.Pytree):
        yield "self", owner
    elif code is None:
        yield "", getattr(fun, "__wrapped__", None)
    else:
        cells = zip(code.co_freevars, fun.__closure__ or (), strict=True)
        closure = {name: x.cell_contents for name, x in cells if x != types.CellType()}
        if "site-packages" in code.co_filename:  # a decorator of a library
            yield from closure.items()
            return
        bound = {} if owner is None else dict.fromkeys(code.co_varnames[:1], owner)
        scopes = {"GLOBAL": fun.__globals__, "DEREF": closure | bound, "FAST": bound}
        yield from _loads(code, scopes)


def _loads(
    code: types.CodeType, scopes: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, Any]]:
    """What a code loads from scopes: values, or the attribute that it loads next."""
    steps = [*dis.get_instructions(code)]
    for step, after in zip(steps, steps[1:], strict=False):
        if kind := re.match("LOAD_(GLOBAL|DEREF|FAST)", step.opname):
            name = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
            value, part = scopes[kind[1]].get(name), after.argval
            is_part = after.opname in ("LOAD_ATTR", "LOAD_METHOD")
            below = getattr(value, "__dict__", {}) if is_part else {}
            yield (f"{name}.{part}", below[part]) if part in below else (name, value)
    for inner in filter(inspect.iscode, code.co_consts):
        yield from _loads(inner, scopes)
