"""A step lowered without devices, and its arguments."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.extend.core import ClosedJaxpr

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._resolve.lay import fits
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._step.arguments import Argument
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.jaxprs import every
from flax_layoutmap._tree.paths import Roots
from flax_layoutmap.pod._layouts import Layouts

# A collection of Linen, an argument or an entry of that name, and what is in them.
_CACHE = re.compile(r"(?:^|/)(?:(?:kv_)?caches?|cached_(?:key|value))(?:/|$)")


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """An argument of the lowered program.

    Attributes:
        path: path of the leaf, with the name of the argument first.
        role: `"parameter"`, `"optimizer"`, `"data"` or `"other"`.
        is_donated: whether its buffer is given away.
    """

    path: str
    role: str
    is_donated: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Lowered:
    """A step, lowered for a mesh without devices.

    Attributes:
        name: the step's name.
        lowered: as `jax.jit(...).lower` gives it.
        leaves: one per argument of the program that is used, in order.
        pairs: position of a result → that of the argument that it is the new value of,
            or the gradient.
        kept: position of each argument over the leaves of the step's arguments.
        layouts: where these lie under other rules.
        constants: shape and bytes of each array that the step closes over.
        wanted: position of each argument → the spec that the rules gave it, where the
            step may have said another.
        notes: what of its arguments is worth a look.
        gradients: those of the results in `pairs` that are no new values.
    """

    name: str
    lowered: Any
    leaves: list[Leaf]
    pairs: dict[int, int]
    kept: list[int]
    layouts: Layouts
    constants: list[tuple[tuple[int, ...], int]]
    wanted: dict[int, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    gradients: frozenset[int] = frozenset()

    @property
    def updates(self) -> dict[int, int]:
        """The pairs of new and old values."""
        return {r: at for r, at in self.pairs.items() if r not in self.gradients}

    def state(self) -> list[tuple[int, int]]:
        """The results that are new state and their arguments, the parameters first.

        What an optimizer sums for its own state it sums for a parameter.
        """
        roles = {result: self.leaves[at].role for result, at in self.pairs.items()}
        order = ("parameter", "optimizer")
        return [
            (result, self.pairs[result])
            for wanted in order
            for result, role in roles.items()
            if role == wanted
        ]

    def specs_under(self, rules: RuleSet) -> dict[int, Any]:
        """Position → spec of the arguments that the rules decide."""
        every = self.layouts.under(rules)
        found = {at: every[leaf] for at, leaf in enumerate(self.kept)}
        return {at: one.spec for at, one in found.items() if one is not None}


def lower(traced: Any, platform: str, name: str) -> Any:
    """Lower for a platform.

    Raises:
        LayoutError: the step calls back into Python.
    """
    try:
        return traced.lower(lowering_platforms=(platform,))
    except ValueError as error:
        names = {eqn.primitive.name for eqn in every(traced.jaxpr.eqns)}
        calls = sorted(one for one in names if "callback" in one or "debug" in one)
        if not calls or not re.search("AbstractMesh|backend", str(error)):
            raise
        raise LayoutError(
            f"{name} calls back into Python ({', '.join(calls)}: jax.debug.print, "
            "jax.pure_callback and the like), which JAX lowers only where the devices "
            "are; leave it out of what is planned"
        ) from error


def leaves_of(
    arguments: Sequence[Argument], kept: Sequence[int], donated: Sequence[bool]
) -> list[Leaf]:
    """What the arguments of a program are.

    Args:
        arguments: the arguments of the step.
        kept: positions, over their leaves, of those of the program.
        donated: of each of these, whether it is given away.
    """
    every: list[tuple[str, str]] = []
    for one in arguments:
        flat = flatten(Roots({one.name: one.value}))
        paths = flat.full_paths()
        roles = ["data"] * len(paths)
        if one.is_state:
            caches = _caches(one, paths)
            for section in flat.sections:
                for at in range(section.start, section.stop):
                    role = "other" if at in caches else section.role
                    roles[at] = _role(role, one.leaves[at])
        every += zip(paths, roles, strict=True)
    return [Leaf(*every[at], gone) for at, gone in zip(kept, donated, strict=True)]


def _caches(argument: Argument, paths: Sequence[str]) -> set[int]:
    """Leaves that are keys and values of earlier tokens, by type or by name."""
    held = enumerate(argument.holders())
    found = {at for at, holder in held if holder and isinstance(holder[0], nnx.Cache)}
    return found | {at for at, path in enumerate(paths) if _CACHE.search(path)}


def _role(role: str, leaf: Any) -> str:
    """Counters and random state are no parameters; quantised matrices are."""
    dtype = getattr(leaf, "dtype", np.int32)
    is_key = jax.numpy.issubdtype(dtype, jax.dtypes.extended)
    if role != "parameter" or jax.numpy.issubdtype(dtype, np.inexact):
        return role
    return "other" if is_key or np.ndim(leaf) < 2 else role


def kept_by(lowered: Any, names: Sequence[str], *, variadic: bool = False) -> list[int]:
    """Which of its arguments a lowered program uses: JAX drops the others.

    Args:
        lowered: the program.
        names: its parameters.
        variadic: whether the first of them is `*args`.
    """
    entries, _ = jax.tree_util.tree_flatten_with_path(lowered.args_info)
    spelled = []
    for keys, _ in entries:
        rest = keys[1:] if variadic else keys[2:]
        at = getattr(keys[1], "idx", None)
        name = names[0] if variadic else keys[1].key if at is None else names[at]
        spelled.append(f"{name}{jax.tree_util.keystr(rest)}")
    block = lowered.compiler_ir("stablehlo").operation.regions[0].blocks[0]
    main = next(op for op in block.operations if _is_main(op))
    arguments = list(main.regions[0].blocks[0].arguments)
    if len(arguments) == len(spelled):
        return list(range(len(spelled)))
    texts = [str(argument.location) for argument in arguments]
    found = [text[5:-2].replace('\\"', '"') for text in texts]
    place = {name: at for at, name in enumerate(spelled)}
    if all(name in place for name in found):
        return [place[name] for name in found]
    raise LayoutError(
        f"the step leaves {len(spelled) - len(arguments)} of its arguments unused, and "
        "this version of JAX does not tell which; take them out of its arguments"
    )


def _is_main(op: Any) -> bool:
    return op.operation.name == "func.func" and "main" in str(op.attributes["sym_name"])


def constants_of(traced: Any) -> list[tuple[tuple[int, ...], int]]:
    """Shape and bytes of what a trace, or a function that it calls, closes over."""
    found = {id(one): one for one in traced.jaxpr.consts}
    for eqn in every(traced.jaxpr.eqns):
        for value in eqn.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if isinstance(part, ClosedJaxpr):
                    found |= {id(one): one for one in part.consts}
    return [(tuple(np.shape(one)), _bytes(one)) for one in found.values()]


def _bytes(array: Any) -> int:
    """What jax 0.8 makes of an array of NumPy does not know its `nbytes`."""
    return int(np.prod(np.shape(array), dtype=int)) * int(array.dtype.itemsize)


def notes_of(arguments: Sequence[Argument], rules: RuleSet) -> tuple[str, ...]:
    """Whether what is meant as state was taken for data."""
    notes = [
        f"{one.name} is an array alone, which has no path for rules, so that rule "
        f"{pattern!r} has no effect; pass it in a container, "
        f'{{"{one.name}": {one.name}}}'
        for one in arguments
        for pattern in _meant(one, arguments, rules)
    ]
    containers = [one.name for one in arguments if one.is_container and one.leaves]
    if notes or any(one.is_state for one in arguments):
        return tuple(notes)
    if len(arguments) < 2 or not containers:
        return ()
    return (
        f"no rule shards a leaf of {', '.join(containers)}, so that every argument is "
        "data, split over the batch axes; say what is state: "
        f'donate_argnames="{containers[0]}"',
    )


def _meant(
    argument: Argument, arguments: Sequence[Argument], rules: RuleSet
) -> list[str]:
    """The first rule that shards what is called as an array alone, and nothing else."""
    if argument.is_container or not argument.leaves:
        return []
    ndim = np.ndim(argument.leaves[0])
    named = [
        at
        for at in rules.matching(argument.name)
        if not rules.rules[at].layout.is_replicated
        and fits(rules.rules[at].layout, ndim)
    ]
    others = {one.name: one.value for one in arguments if one.is_container}
    used = {
        at
        for path in (flatten(Roots(others)).every_form() if named else ())
        for at in rules.matching(path)
    }
    return [rules.rules[at].pattern for at in named if at not in used][:1]
