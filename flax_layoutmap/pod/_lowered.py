"""A step lowered without devices, its arguments, and their layouts under any rules."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._core.jax_internals import opened
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._resolve.lay import fits
from flax_layoutmap._resolve.leaves import leaves_of as state_leaves_of
from flax_layoutmap._resolve.origins import find_origins
from flax_layoutmap._resolve.resolve import resolve_origins
from flax_layoutmap._rules.records import show_shape, show_spec
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._step.arguments import Argument
from flax_layoutmap._step.inputs import holds_parameters, split_leaf
from flax_layoutmap._step.memory import is_on_host
from flax_layoutmap._step.shardings import abstract
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.jaxprs import every
from flax_layoutmap._tree.paths import Roots
from flax_layoutmap.pod._mlir import functions


class Layouts:
    """The shardings of the leaves of all arguments, under any rules.

    What does not depend on the rules (paths, shapes, which parameter a moment belongs
    to) is found once.
    """

    def __init__(
        self, arguments: Sequence[Argument], fixed: Sequence[str] = ()
    ) -> None:
        """Flatten the state; `fixed` names arguments with in_shardings of their own."""
        self.parts = [_without_values(one) for one in arguments]
        self.fixed = set(fixed)
        own = [one for one in arguments if one.is_state and one.name not in fixed]
        self.names = {one.name for one in own}
        tree = Roots({one.name: one.value for one in own})
        leaves = [leaf for one in own for leaf in one.leaves]
        flat = flatten(tree)
        read = state_leaves_of(flat, tree)
        read = dataclasses.replace(
            read,
            flat=dataclasses.replace(read.flat, blocks=[]),  # folded for no rules yet
            shapes=[tuple(leaf.shape) for leaf in leaves],
            dtypes=[leaf.dtype for leaf in leaves],
        )
        self.origins = find_origins(read)

    def under(self, rules: RuleSet) -> list[NamedSharding | None]:
        """One sharding per leaf; None where the rules do not apply."""
        state = resolve_origins(self.origins, rules)
        if self.names:
            state.announce()
        shardings = iter(state.sharding_list())
        found: list[NamedSharding | None] = []
        for one in self.parts:
            if one.name in self.names:
                found += [next(shardings) for _ in one.leaves]
            elif one.name in self.fixed:
                found += [None] * len(one.leaves)
            else:
                _check_still_data(one, rules)
                found += [leaf.sharding for leaf in _with_shardings(one, rules)]
        return found

    def are_kept(self, mesh: DeviceMesh) -> list[bool]:
        """Whether each leaf is of no state and came with a sharding, which it keeps."""
        return [
            one.name in self.fixed
            or (one.name not in self.names and _given(leaf, mesh) is not None)
            for one in self.parts
            for leaf in one.raw
        ]


def _without_values(argument: Argument) -> Argument:
    """The argument without its arrays, which a report would keep alive."""
    raw = [abstract(one, getattr(one, "sharding", None)) for one in argument.raw]
    value = None if argument.is_state else jax.tree.unflatten(argument.treedef, raw)
    return dataclasses.replace(argument, value=value, nodes=[], raw=raw, leaves=raw)


def split_data(argument: Argument, rules: RuleSet | None) -> Sequence[Any]:
    """The leaves of an argument that is data, split over the batch axes.

    A leaf that came with a sharding over axes of the mesh keeps its spec.
    """
    if rules is None or rules.mesh is None:
        return argument.leaves
    leaves = zip(argument.leaves, _with_shardings(argument, rules), strict=True)
    return [
        leaf if isinstance(leaf, bool | int | float | complex) else made
        for leaf, made in leaves
    ]


def _with_shardings(argument: Argument, rules: RuleSet) -> list[jax.ShapeDtypeStruct]:
    mesh = rules.mesh
    assert mesh is not None
    found = []
    for at, leaf in enumerate(argument.raw):
        if isinstance(leaf, bool | int | float | complex):
            found.append(jax.ShapeDtypeStruct((), jax.dtypes.result_type(leaf)))
            continue
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
        plain = jax.ShapeDtypeStruct(leaf.shape, dtype)
        if (own := _given(leaf, mesh)) is not None:
            _check_divides(argument, at, own)
            found.append(jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=own))
        else:
            found.append(split_leaf(argument, at, plain, rules))
    return found


def _given(leaf: Any, mesh: DeviceMesh) -> NamedSharding | None:
    """The sharding that a leaf came with, if the mesh has its axes."""
    sharding, jax_mesh = getattr(leaf, "sharding", None), mesh.jax_mesh
    if not isinstance(sharding, NamedSharding):
        return None
    has_axes = set(sharding.mesh.axis_names) <= set(mesh.axis_names)
    return NamedSharding(jax_mesh, sharding.spec) if has_axes else None  # type: ignore[arg-type]


def _check_divides(argument: Argument, at: int, own: NamedSharding) -> None:
    layout, shape = TensorLayout(own), argument.raw[at].shape
    try:
        layout.shard_shape(shape)
    except LayoutError as error:
        raise LayoutError(
            f"{argument.path(at)} {show_shape(shape)} has the sharding "
            f"{show_spec(own.spec)} of its own, which does not fit the mesh "
            f"{DeviceMesh(own.mesh)}: {error}; pass its shape alone, "
            "jax.ShapeDtypeStruct(x.shape, x.dtype)"
        ) from error


def _check_still_data(argument: Argument, rules: RuleSet) -> None:
    if holds_parameters(argument, rules):
        raise LayoutError(
            f"these rules shard leaves of {argument.name!r}, which the plan took for "
            "data, as its own rules shard none of them: plan again with these rules, "
            f"or say that it is state, donate_argnames={argument.name!r}"
        )


# A collection of Linen, an argument or an entry of that name, and what is in them.
_CACHE = re.compile(r"(?:^|/)(?:(?:kv_)?caches?|cached_(?:key|value))(?:/|$)")


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """An argument of the lowered program."""

    path: str  # starts with the name of the argument
    role: str  # "parameter", "optimizer", "data" or "other"
    is_donated: bool
    is_on_host: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Lowered:
    """A step, lowered for a mesh without devices."""

    name: str
    # The `jax.stages.Lowered`.
    lowered: Any
    # One for each argument of the program, in order: JAX drops what is unused.
    leaves: list[Leaf]
    # Position of a result → that of the argument that it updates, or is the gradient
    # of.
    pairs: dict[int, int]
    # Position of each argument of the program among the leaves of the step's arguments.
    kept: list[int]
    layouts: Layouts
    # Shape and bytes of each array that the step closes over.
    constants: list[tuple[tuple[int, ...], int]]
    # Position of an argument → its spec by the rules, where jit's in_shardings may have
    # overridden it.
    wanted: dict[int, Any] = dataclasses.field(default_factory=dict)
    # Warnings about the arguments.
    notes: tuple[str, ...] = ()
    # The results in `pairs` that are gradients.
    gradients: frozenset[int] = frozenset()

    @property
    def updates(self) -> dict[int, int]:
        """The pairs without the gradients."""
        return {r: at for r, at in self.pairs.items() if r not in self.gradients}

    def state(self) -> list[tuple[int, int]]:
        """The pairs of parameters, then those of optimizer state.

        In this order a sum that both are computed from counts as the parameter's.
        """
        return [
            (result, at)
            for role in ("parameter", "optimizer")
            for result, at in self.pairs.items()
            if self.leaves[at].role == role
        ]

    def specs_under(self, rules: RuleSet) -> dict[int, Any]:
        """Position → spec of the arguments that the rules decide."""
        every = self.layouts.under(rules)
        found = {at: every[leaf] for at, leaf in enumerate(self.kept)}
        return {at: one.spec for at, one in found.items() if one is not None}


def lower(traced: Any, platform: str, name: str) -> Any:
    """Lower a trace for a platform; callbacks into Python are refused."""
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
    arguments: Sequence[Argument],
    kept: Sequence[int],
    donated: Sequence[bool],
    avals: Sequence[Any],
) -> list[Leaf]:
    """Path, role and memory of each argument of a program, whose leaves are `kept`.

    `avals` are the leaves of all arguments with the program's shardings.
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
    on_host = [is_on_host(getattr(leaf, "sharding", None)) for leaf in avals]
    return [
        Leaf(*every[at], gone, on_host[at])
        for at, gone in zip(kept, donated, strict=True)
    ]


def _caches(argument: Argument, paths: Sequence[str]) -> set[int]:
    """Positions of key-value caches, by type or by name."""
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
    """The arguments that a lowered program uses: JAX drops the others.

    `names` are its parameters; with `variadic` the first of them is `*args`.
    """
    entries, _ = jax.tree_util.tree_flatten_with_path(lowered.args_info)
    spelled = []
    for keys, _ in entries:
        rest = keys[1:] if variadic else keys[2:]
        at = getattr(keys[1], "idx", None)
        name = names[0] if variadic else keys[1].key if at is None else names[at]
        spelled.append(f"{name}{jax.tree_util.keystr(rest)}")
    main = functions(lowered.compiler_ir("stablehlo").operation)["main"]
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


def constants_of(traced: Any) -> list[tuple[tuple[int, ...], int]]:
    """Shape and bytes of what a trace, or a function that it calls, closes over."""
    found = {id(one): one for one in traced.jaxpr.consts}
    for eqn in every(traced.jaxpr.eqns):
        for value in eqn.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                _, consts = opened(part) or (None, ())
                found |= {id(one): one for one in consts}
    return [(tuple(np.shape(one)), int(one.nbytes)) for one in found.values()]


def notes_of(arguments: Sequence[Argument], rules: RuleSet) -> tuple[str, ...]:
    """Warnings about arguments that seem to be state and were taken for data."""
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
    """The first rule that matches only the name of an argument that is one array."""
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
