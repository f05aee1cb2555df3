"""What `flm.jit` does not accept: each error names the Variable, array or constant.

Also the memory of donated arrays. Two arrays share memory if they were put on a mesh
from one array. To donate one of them and use the other ends the process (jax 0.10.2),
or fails while it runs (jax 0.12.0).
"""

import collections
import contextlib
import dis
import functools
import inspect
import itertools
import re
import types
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer

from flax_layoutmap._core.errors import LayoutError, StructureError
from flax_layoutmap._core.jax_internals import memory_of
from flax_layoutmap._place.place import put
from flax_layoutmap._step.arguments import Call, first_four, is_array
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.flax_internals import (
    is_plain_variable,
    named_objects_of,
    nnx_state,
)
from flax_layoutmap._tree.paths import Roots

# What a class has for each name in `__slots__`.
_SLOT = types.MemberDescriptorType

# The name of an argument, and an outermost NNX object in it.
Named = Iterable[tuple[str, Any]]


def named_parts(named: Named) -> Iterator[tuple[str, Any]]:
    """The objects and Variables in NNX objects, each with its path."""
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
            is_slot = isinstance(getattr(type(value), str(part), None), _SLOT)
            if is_part and (is_slot or part in getattr(value, "__dict__", ())):
                name, value = f"{name}.{part}", getattr(value, part, None)
            yield name, value
    for inner in filter(inspect.iscode, code.co_consts):
        yield from _loads(inner, scopes)


# -------------------------------------------------------------------- donation


def are_deleted(leaves: Sequence[Any]) -> bool:
    """Whether one of these is a deleted array."""
    try:
        # The method of the type is much faster than an attribute of each array.
        return any(map(type(leaves[0]).is_deleted, leaves))
    except (AttributeError, IndexError, TypeError):  # none, or other things too
        return any(x.is_deleted() for x in leaves if is_array(x))


def deleted_paths(arguments: Mapping[str, Any]) -> list[str]:
    """Paths of the arrays that are deleted, in arguments by name."""
    flat = flatten(Roots(arguments))
    pairs = zip(flat.full_paths(), flat.leaves, strict=True)
    return [path for path, leaf in pairs if are_deleted([leaf])]


def separate(program: Any, call: Call, leaves: list[Any]) -> None:
    """Copy the leaves of state that share memory with other arrays of a call.

    Raises:
        LayoutError: an array is donated and used twice.
    """
    shared = sharing(program, leaves, program.state)
    count = collections.Counter(map(id, leaves if shared else ()))
    for at in {*shared} & {*program.donated}:
        if count[id(leaves[at])] > 1:
            pairs = zip(leaves, call.table, strict=True)
            paths = [a.path(n) for x, (a, n) in pairs if x is leaves[at]]
            raise LayoutError(
                f"{' and '.join(paths[:4])} are one array, which is donated: it cannot "
                "be used twice; copy it first, jax.numpy.copy(x), or do not donate it"
            )
    for at in shared:
        leaves[at] = put(jax.numpy.copy(leaves[at]), leaves[at].sharding)


def sharing(program: Any, leaves: Sequence[Any], state: Sequence[int]) -> list[int]:
    """Positions of leaves of state that are used twice, or share memory with others.

    `state` has the positions of what the last run of the program may not have written;
    of the rest only what looks like data is compared.
    """
    compared: Iterable[int] = program.alike
    is_double = bool(state) and len(set(map(id, leaves))) < len(leaves)
    if is_double or not _are_apart([leaves[at] for at in state]):
        compared = range(len(leaves))
    if not compared:
        return []
    # By array: one in two places is an error if it is donated, and else no matter.
    parts = {id(leaves[at]): _buffers_of(leaves[at]) for at in compared}
    uses = collections.Counter(itertools.chain.from_iterable(parts.values()))
    count = collections.Counter(id(leaves[at]) for at in compared)
    doubled = {at for at in program.donated if count[id(leaves[at])] > 1}
    return sorted(
        at
        for at in program.state
        if at in doubled or any(uses[x] > 1 for x in parts.get(id(leaves[at]), ()))
    )


def _buffers_of(leaf: Any) -> set[Any]:
    """The memory of an array in this process, to compare."""
    if not is_array(leaf) or not leaf.size:
        return {id(leaf)}
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    count = len(leaf.sharding.addressable_devices)
    parts = [leaf.addressable_data(at) for at in range(count)]
    return set(map(memory_of, parts)) - {None} or {id(leaf)}


# For the last few programs, references to arrays that share memory with no others, as
# the program has written them, or they were compared before.
_APART: dict[int, Sequence[Any]] = {}


def _are_apart(arrays: Iterable[Any]) -> bool:
    """Whether all of these are known to share memory with no others."""
    try:
        # An array has one reference while that lives.
        left = set(map(id, map(weakref.ref, arrays)))
    except TypeError:  # not arrays
        return False
    for known in reversed([*_APART.values()]):
        if not left:
            break
        left.difference_update(map(id, known))
    return not left


def note_apart(
    program: Any, refs: Sequence[Any], leaves: Sequence[Any], result: Any
) -> None:
    """Record arrays that share memory with no others after a run.

    They are what NNX objects hold (`refs`), and in trees, state and results.
    """
    if program.donated and program.loose:
        trees = [leaves[at] for at in program.kept], result
        with contextlib.suppress(TypeError):  # not only arrays: these are compared
            refs = [*refs, *map(weakref.ref, jax.tree.leaves(trees))]
    _APART.pop(id(program), None)
    _APART[id(program)] = refs
    for oldest in [*_APART][:-8]:
        _APART.pop(oldest, None)
