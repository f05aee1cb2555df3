"""What a search decides: the layouts of groups of parameters, and of outputs.

A decision is about all parameters of equal layers: one pattern of paths and one shape.
"""

import dataclasses
from collections.abc import Iterable

# The axes of each dim of an array.
Spec = tuple[tuple[str, ...], ...]
# A dim of a group (`"parameter"`), of an output (`"output"`) or of data (`"data"`).
Node = tuple[str, int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Parameters of equal layers, and their optimizer state.

    Attributes:
        path: the path of the first, with `0` for each index.
        paths: of all.
        shape: of each.
        bytes: of all, on all devices.
        arguments: positions in the program.
        state: position of each leaf of optimizer state, with the dim of the parameter
            that each of its dims came from.
        dims: those that may be sharded; none of a small one, and not that of layers
            which a loop takes one by one.
    """

    path: str
    paths: tuple[str, ...]
    shape: tuple[int, ...]
    bytes: int
    arguments: tuple[int, ...]
    state: tuple[tuple[int, tuple[int | None, ...]], ...]
    dims: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """The output of equal modules, or a layout that the model asks for by name.

    Attributes:
        section: `"activations"` or `"names"`.
        paths: of the modules, or the name.
        shape: of the output; of several shapes the greatest common divisors, which
            layouts have to divide.
        constraints: positions in the program.
        has_one_rank: whether all are of one rank; else `shape` is of the first dim.
    """

    section: str
    paths: tuple[str, ...]
    shape: tuple[int, ...]
    constraints: tuple[int, ...]
    has_one_rank: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """One layout of everything.

    Attributes:
        batch: the axes that shard the batch.
        specs: of each group.
        placed: pairs of a mesh axis and the number of the class that it shards.
        turned: points where an axis that the batch and a class have is that of the
            class.
        fixed: the points with a rule; None: all are on the batch axes, and their other
            dims are open, which no rules can say.
    """

    batch: tuple[str, ...]
    specs: tuple[Spec, ...]
    placed: frozenset[tuple[str, int]] = frozenset()
    turned: frozenset[int] = frozenset()
    fixed: frozenset[int] | None = None


def groups_of(nodes: Iterable[Node]) -> set[int]:
    """The groups of parameters in a class."""
    return {number for kind, number, _ in nodes if kind == "parameter"}
