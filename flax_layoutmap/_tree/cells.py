"""The places where NNX objects hold arrays, to exchange the arrays during a call."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx

from flax_layoutmap._tree.flax_internals import (
    attributes_of,
    is_plain_variable,
    objects_of,
    read_value,
    write_value,
)
from flax_layoutmap._tree.objects import is_object


class Cell(NamedTuple):
    """Where an NNX object holds a value: a Variable, or an attribute of a module."""

    owner: Any
    name: str | None = None

    def __hash__(self) -> int:
        return hash((id(self.owner), self.name))

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Cell)
        return self.owner is other.owner and self.name == other.name

    def read(self) -> Any:
        return (
            read_value(self.owner) if self.name is None else vars(self.owner)[self.name]
        )

    def write(self, value: Any) -> None:
        """At any level of tracing, as the usual value comes back after the call."""
        if self.name is None:
            write_value(self.owner, value)
        else:
            vars(self.owner)[self.name] = value


def cells_of(nodes: Iterable[Any]) -> list[Cell]:
    """Where some NNX objects hold arrays."""
    found: list[Cell] = []
    for owner in objects_of(list(nodes)):
        if isinstance(owner, nnx.Variable):
            found += [Cell(owner)] if is_plain_variable(owner) else []
            continue
        attributes = attributes_of(owner)
        for name, value in attributes[0].items() if attributes else ():
            leaves = jax.tree.leaves(value, is_leaf=is_object)
            if any(isinstance(leaf, jax.Array) for leaf in leaves):
                found.append(Cell(owner, name))
    return found


def write_cells(values: Mapping[Cell, Any]) -> None:
    """Give cells new values."""
    for cell, value in values.items():
        if cell.read() is not value:
            cell.write(value)
