"""`layout_map_scope` for Linen modules, which hold no variables.

`init` of a module that is made in the block returns sharded variables, also later.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from flax import linen

from flax_layoutmap._birth.create import create, refuse_unfit
from flax_layoutmap._core.errors import warn
from flax_layoutmap._core.patches import patched
from flax_layoutmap._place.annotations import settle_metadata
from flax_layoutmap._place.place import distribute, is_eager, place, with_leaves
from flax_layoutmap._resolve.resolve import resolve
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.flax_internals import no_mesh, without_eager_sharding
from flax_layoutmap._tree.trace import (
    ReadsValues,
    in_constructor,
    is_tracing_constructor,
)

_INITS = ("init", "init_with_output", "lazy_init")
_PLAIN = {name: getattr(linen.Module, name) for name in _INITS}
_OUTPUT = "output of init_with_output"


@contextlib.contextmanager
def sharded_inits(rules_here: Callable[[], RuleSet | None]) -> Iterator[None]:
    """Inside, Linen modules are created with sharded `init`s, and older ones have them.

    `rules_here` returns the rules of the caller's scope, or None.
    """
    binding = functools.partial(_binding, rules_here)
    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(linen.Module, "__post_init__", binding))
        for name in _INITS:
            wrap = functools.partial(_scoped_init, rules_here, name)
            stack.enter_context(patched(linen.Module, name, wrap))
        yield


def _binding(
    rules_here: Callable[[], RuleSet | None], plain: Callable[..., Any]
) -> Callable[..., Any]:
    """`__post_init__` that binds a sharded `init` to the module itself."""

    @functools.wraps(plain)
    def post_init(self: Any) -> None:
        plain(self)
        rules = rules_here()
        if rules is not None and is_eager():
            for name in _INITS:
                if _is_linens(self, name):
                    own = functools.partial(_init, self, name, rules)
                    object.__setattr__(self, name, own)

    return post_init


def _scoped_init(
    rules_here: Callable[[], RuleSet | None], name: str, plain: Callable[..., Any]
) -> Callable[..., Any]:
    """An `init` of a class, sharded in the block, for modules made before it."""

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> Any:
        rules = rules_here()
        if rules is None:
            return plain(self, *args, **kwargs)
        return _init(self, name, rules, *args, **kwargs)

    return init


def _is_linens(module: Any, name: str) -> bool:
    """Whether a name is Linen's own method: no field, no method of a subclass."""
    own = getattr(type(module), name, None) is getattr(linen.Module, name)
    return own and name not in vars(module)


def _init(self: Any, name: str, rules: RuleSet, /, *args: Any, **kwargs: Any) -> Any:
    plain = _PLAIN[name]
    if is_tracing_constructor():
        return plain(self, *args, **kwargs)
    if not is_eager():
        made = plain(self, *args, **kwargs)
        # The other methods call this one.
        if name == "init_with_output":
            return made[0], _constrained(made[1], rules)
        return made
    plain = functools.partial(plain, self)
    if name != "init_with_output":
        return _made(self, plain, rules, *args, **kwargs)

    def both(*args: Any, **kwargs: Any) -> Any:
        output, variables = plain(*args, **kwargs)
        return {**variables, _OUTPUT: output}  # so that paths are those of `init`

    variables = _made(self, both, rules, *args, **kwargs)
    return variables.pop(_OUTPUT), variables


def _made(
    self: Any, make: Callable[..., Any], rules: RuleSet, /, *args: Any, **kwargs: Any
) -> Any:
    """The sharded variables of a module's `init`; one that reads values runs at once.

    Its variables are then on one device first.
    """
    try:
        return create(make, rules, *args, **kwargs)
    except ReadsValues as error:
        why = str(error).splitlines()[0]
    with no_mesh(), without_eager_sharding(), in_constructor():
        variables = make(*args, **kwargs)
    resolution = resolve(variables, rules)
    refuse_unfit(resolution.paths, flatten(variables).leaves, "init")
    resolution.announce()
    warn(
        f"layout_map_scope: the init of {type(self).__name__} ran at once on one "
        f"device, and its variables were moved then: {why}"
    )
    return settle_metadata(place(variables, resolution), resolution)


def _constrained(variables: Any, rules: RuleSet) -> Any:
    """Variables of an `init` under `jax.jit`, constrained to their layouts."""
    resolution = resolve(variables, rules)
    resolution.announce()
    leaves = [
        distribute(leaf, wanted.layout)
        for leaf, wanted in zip(flatten(variables).leaves, resolution, strict=True)
    ]
    return settle_metadata(with_leaves(variables, leaves), resolution)
