"""The frozen values between the stages of resolving, in order.

`Leaves` (of a tree) → `Origins` (the parameter of each leaf) → `Matches` (which
rules match) → one `Decision` per leaf, in a Resolution.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._resolve.lora import KernelDims
from flax_layoutmap._rules.records import Shape
from flax_layoutmap._tree.paths import Flat

# Per dim of a state leaf: the dim of its parameter, or None.
Dims = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Leaves:
    """The leaves of a tree before matching; columns with one entry each.

    Attributes:
        flat: the tree, flattened, with a `Mark` for each annotation.
        shapes: shape of each leaf.
        dtypes: dtype of each leaf; None for what is no array.
        treedef: the structure of the tree.
        others: position → leaf, for what is no array.
        live: position → the layout that an array of optimizer state has already.
        layouts: position → the layout of a parameter that has one, whatever the rules.
        state: the optimizer state alone, where its parameters were given beside it:
            these are the first leaves, and not those of the tree itself.
        nodes: the object of each section, where it has one; and
        modules: the NNX modules of the tree; and
        given: trees of parameters that an optimizer may have been given. These three
            hold arrays, and go no further than to `find_origins`.
    """

    flat: Flat
    shapes: Sequence[Shape]
    dtypes: Sequence[Any]
    treedef: Any = None
    others: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    live: Mapping[int, TensorLayout] = dataclasses.field(default_factory=dict)
    layouts: Mapping[int, TensorLayout] = dataclasses.field(default_factory=dict)
    state: Flat | None = None
    nodes: Sequence[Any] = ()
    modules: Sequence[Any] = ()
    given: Sequence[Any] = ()

    @property
    def own(self) -> Flat:
        """The tree itself, without parameters that were given beside it."""
        return self.flat if self.state is None else self.state

    @property
    def start(self) -> int:
        """Position of the first leaf of the tree itself."""
        return len(self.flat.paths) - len(self.own.paths)


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Where one leaf of an optimizer state came from.

    Attributes:
        owner: key of the parameter (see `parameter_keys`), or None.
        dims: per dim of the leaf, the dim of the parameter it came from, or None;
            None where that could not be found out.
        how: in words, for reports.
        others: other parameters that it may as well belong to.
    """

    owner: str | None
    dims: Dims | None
    how: str
    others: tuple[str, ...] = ()


class Adapter(NamedTuple):
    """A LoRA matrix.

    Attributes:
        role: `"A"` (in-dims and rank) or `"B"` (rank and out-dims).
        kernels: positions of kernels that it may belong to, and the dims that it has
            of each; the first one is the nearest. Empty where there is none.
    """

    role: Literal["A", "B"]
    kernels: Sequence[tuple[int, KernelDims]]


@dataclasses.dataclass(frozen=True, slots=True)
class Origins:
    """The origin of each leaf, from paths, shapes and the optimizer alone.

    Attributes:
        leaves: the leaves.
        state: for each leaf its origin, None for what is no optimizer state; None where
            the tree has no optimizer state.
        owners: key → position of each parameter, where there is optimizer state.
        adapters: position → LoRA matrix.
        plain: position → path without the LoRA module around it, for what was at that
            path before LoRA was added.
    """

    leaves: Leaves
    state: Sequence[Origin | None] | None = None
    owners: Mapping[str, int] = dataclasses.field(default_factory=dict)
    adapters: Mapping[int, Adapter] = dataclasses.field(default_factory=dict)
    plain: Mapping[int, str] = dataclasses.field(default_factory=dict)


class Match(NamedTuple):
    """The rules that match a path, by their positions.

    Attributes:
        rules: all of them, in order.
        key: the one whose pattern is the path itself, if there is one.
    """

    rules: tuple[int, ...] = ()
    key: int | None = None


class Run(NamedTuple):
    """Consecutive leaves; equal runs, as layers have them, share their `matches`."""

    start: int
    matches: tuple[Match, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Matches:
    """Which rules match which leaf; patterns are not used afterwards.

    Attributes:
        origins: the origin of each leaf.
        runs: parameter rules, for all leaves in order.
        plain: position → parameter rules by the path without the LoRA module, where
            these count.
        adapters: position of a LoRA matrix → parameter rules about it and not about
            its kernel.
        state: key of a parameter → the optimizer rules that match it.
        alone: position of state without its parameters → whether the rules are
            optimizer rules, and those that match an ending of its path and name every
            dim of it.
    """

    origins: Origins
    runs: Sequence[Run]
    plain: Mapping[int, Match] = dataclasses.field(default_factory=dict)
    adapters: Mapping[int, Match] = dataclasses.field(default_factory=dict)
    state: Mapping[str, Match] = dataclasses.field(default_factory=dict)
    alone: Mapping[int, tuple[bool, tuple[int, ...]]] = dataclasses.field(
        default_factory=dict
    )
