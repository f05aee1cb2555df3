"""Lay out the arguments of a step under different rule sets.

What does not depend on the rules (paths, shapes, which parameter a moment belongs to)
is found once.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._resolve.leaves import leaves_of
from flax_layoutmap._resolve.origins import find_origins
from flax_layoutmap._resolve.resolve import resolve_origins
from flax_layoutmap._rules.records import show_shape, show_spec
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._step.arguments import Argument
from flax_layoutmap._step.inputs import holds_parameters, split_leaf
from flax_layoutmap._step.shardings import abstract
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.paths import Roots


class Layouts:
    """The shardings of the leaves of all arguments, under any rules."""

    def __init__(
        self, arguments: Sequence[Argument], fixed: Sequence[str] = ()
    ) -> None:
        """Flatten the state.

        Args:
            arguments: the arguments.
            fixed: names of those that the user lays out.
        """
        self.parts = [_without_values(one) for one in arguments]
        self.fixed = set(fixed)
        own = [one for one in arguments if one.is_state and one.name not in fixed]
        self.names = {one.name for one in own}
        tree = Roots({one.name: one.value for one in own})
        leaves = [leaf for one in own for leaf in one.leaves]
        flat = flatten(tree)
        read = leaves_of(flat, tree)
        read = dataclasses.replace(
            read,
            flat=dataclasses.replace(read.flat, blocks=[]),  # folded for no rules yet
            shapes=[tuple(leaf.shape) for leaf in leaves],
            dtypes=[leaf.dtype for leaf in leaves],
        )
        self.origins = find_origins(read)

    def under(self, rules: RuleSet) -> list[NamedSharding | None]:
        """One sharding per leaf; None where the rules do not apply.

        Raises:
            LayoutError: a batch does not divide, or the rules shard what was data.
            ResolveError: the state does not fit the rules.
        """
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


def _without_values(argument: Argument) -> Argument:
    """The argument without its arrays, which a report would keep alive."""
    raw = list(map(_struct, argument.raw))
    value = None if argument.is_state else jax.tree.unflatten(argument.treedef, raw)
    return dataclasses.replace(argument, value=value, nodes=[], raw=raw, leaves=raw)


def _struct(leaf: Any) -> Any:
    """A leaf without its values; where it lies is kept."""
    return abstract(leaf, getattr(leaf, "sharding", None))


def split_data(argument: Argument, rules: RuleSet | None) -> Sequence[Any]:
    """The leaves of an argument that is data, split over the batch axes.

    What has a sharding on axes of the mesh keeps its spec.
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
    jax_mesh: Any = mesh.jax_mesh
    found = []
    for at, leaf in enumerate(argument.raw):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(leaf, bool | int | float | complex):
            found.append(jax.ShapeDtypeStruct((), jax.dtypes.result_type(leaf)))
            continue
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
        plain = jax.ShapeDtypeStruct(leaf.shape, dtype)
        if isinstance(sharding, NamedSharding) and set(sharding.mesh.axis_names) <= set(
            mesh.axis_names
        ):
            own = NamedSharding(jax_mesh, sharding.spec)
            _check_divides(argument, at, own)
            found.append(jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=own))
        else:
            found.append(split_leaf(argument, at, plain, rules))
    return found


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
