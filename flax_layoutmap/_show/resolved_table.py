"""The leaves of a Resolution by position, with their decisions and totals."""

import dataclasses
import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from flax_layoutmap._core.layout import is_offloaded
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._rules.matching import Rule, is_for_outputs
from flax_layoutmap._rules.records import (
    Decision,
    ResolvedLeaf,
    Shape,
    Totals,
    layout_of,
    leaf_bytes,
    section_of,
)
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._show.table import Fold, fold
from flax_layoutmap._tree.paths import Flat, Role

# Random state, strings and integer scalars (a `step`) are not parameters.
_OTHER = ("random state", "not an array", "scalar")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ResolvedTable:
    """The leaves of a Resolution, one column per attribute."""

    rules: RuleSet
    shapes: tuple[Shape, ...]
    dtypes: tuple[Any, ...]
    _flat: Flat
    _rows: list[Decision]

    # ------------------------------------------------------------------ leaves

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        """Path of each leaf in the whole tree, in JAX's leaf order."""
        return tuple(self._flat.full_paths())

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of the rule set."""
        return self.rules.mesh

    def __len__(self) -> int:
        return len(self._rows)

    def __getstate__(self) -> dict[str, Any]:
        """For copies: without cached properties, which know rows by their ids."""
        return {
            field.name: vars(self)[field.name] for field in dataclasses.fields(self)
        }

    def __iter__(self) -> Iterator[ResolvedLeaf]:
        return (self.leaf(at) for at in range(len(self)))

    def leaf(self, at: int) -> ResolvedLeaf:
        """The leaf at a position (from 0) in leaf order."""
        row = self._rows[at]
        return ResolvedLeaf(
            path=self.paths[at],
            shape=self.shapes[at],
            dtype=self.dtypes[at],
            layout=layout_of(row),
            rule=None if row.rule is None else section_of(row, self.rules)[row.rule],
            rule_number=None if row.rule is None else row.rule + 1,
            reason=row.reason,
            role=self._roles[at],
            shard_shape=row.shard_shape,
            bytes_per_device=leaf_bytes(
                row.shard_shape or self.shapes[at], self.dtypes[at]
            ),
            fallback=row.fallback,
            owner=row.owner,
            note=row.note,
            others=self._flat.records[at].names()[1:],
        )

    @functools.cached_property
    def _distinct(self) -> dict[int, Decision]:
        return dict(zip(map(id, self._rows), self._rows, strict=True))

    @functools.cached_property
    def _roles(self) -> list[Role]:
        roles = self._flat.roles()
        for at in [at for at, row in enumerate(self._rows) if row.reason in _OTHER]:
            if roles[at] == "parameter":
                if self._rows[at].reason != "scalar" or self.dtypes[at].kind in "iub":
                    roles[at] = "other"
        return roles

    def positions(self, wanted: Callable[[Decision], bool]) -> Sequence[int]:
        """Positions of the leaves whose decisions are wanted."""
        kept = {key for key, row in self._distinct.items() if wanted(row)}
        chosen = (id(row) in kept for row in self._rows)
        return list(itertools.compress(itertools.count(), chosen)) if kept else ()

    def folds(self, wanted: Callable[[Decision], bool] | None = None) -> list[Fold]:
        """The leaves as rows; leaves whose paths differ only in indices share a row."""
        chosen = range(len(self)) if wanted is None else self.positions(wanted)
        names = [self._flat.records[at].label() for at in chosen]
        numbers: dict[Hashable, int] = {}  # a number for each kind of decision
        alike = {
            key: numbers.setdefault(_shown(row), len(numbers))
            for key, row in self._distinct.items()
        }
        keys = [
            (self.shapes[at], self.dtypes[at], self._roles[at], alike[id(row)])
            for at, row in ((at, self._rows[at]) for at in chosen)
        ]
        return [
            Fold(text, tuple([chosen[member] for member in members]))
            for text, members in fold(names, keys)
        ]

    @functools.cached_property
    def parameter_paths(self) -> list[tuple[str, bool]]:
        """Paths that a rule may have been meant for, and whether no rule matches them.

        Of paths that differ only in indices, a single path is listed.
        """
        roles, rows = self._roles, self._rows
        wanted = "parameter" if "parameter" in roles else "optimizer"
        return [
            (self.paths[at], rows[at].reason == "no rule")
            for at in self._flat.representatives()
            if roles[at] == wanted
        ]

    def owners(self) -> dict[str, tuple[str | None, tuple[int | None, ...] | None]]:
        """Optimizer-state path → its parameter, and the parameter's dims."""
        return {
            path: (row.owner, row.owner_dims)
            for path, row, role in zip(self.paths, self._rows, self._roles, strict=True)
            if role == "optimizer"
        }

    # --------------------------------------------------------------- questions

    @property
    def unused_rules(self) -> tuple[Rule, ...]:
        """Rules that match no leaf, except optional rules and rules for outputs.

        Rules for optimizer state are only listed if the tree has such state, and
        parameter rules only if it has parameters.
        """
        unused: list[Rule] = []
        rules = self.rules
        for role, section in ("parameter", rules.rules), ("optimizer", rules.optimizer):
            if role in self._roles:
                used = {
                    at
                    for row in self._distinct.values()
                    if (row.reason == "optimizer rule") is (role == "optimizer")
                    for at in row.matched
                }
                unused += [rule for at, rule in enumerate(section) if at not in used]
        return tuple(
            rule for rule in unused if not rule.optional and not is_for_outputs(rule)
        )

    def totals(self, role: Role | None = None) -> Totals:
        """Sums in bytes over all leaves, or over the leaves of a role."""
        leaves = total = replicated = 0
        held = {False: 0, True: 0}  # on the device, and on its host
        for (of, shape, dtype, shard, kind), count in self._alike.items():
            if role in (None, of):
                leaves += count
                whole = count * leaf_bytes(shape, dtype)
                total += whole
                held[is_offloaded(kind)] += count * leaf_bytes(shard or shape, dtype)
                if shard in (None, shape):
                    replicated += whole
        return Totals(leaves, total, held[False], replicated, held[True])

    @functools.cached_property
    def _alike(self) -> Counter[tuple[Role, Shape, Any, Shape | None, str | None]]:
        shards = map(operator.attrgetter("shard_shape"), self._rows)
        kinds = map(operator.attrgetter("memory_kind"), self._rows)
        return Counter(
            zip(self._roles, self.shapes, self.dtypes, shards, kinds, strict=True)
        )

    @property
    def total_bytes(self) -> int:
        """Bytes of all arrays, as global arrays."""
        return self.totals().total_bytes

    @property
    def bytes_per_device(self) -> int:
        """Bytes that each device holds in its own memory."""
        return self.totals().bytes_per_device

    @property
    def host_bytes_per_device(self) -> int:
        """Bytes per device that rules with a `memory_kind` keep in host memory."""
        return self.totals().host_bytes_per_device

    @property
    def replicated_share(self) -> float:
        """Share (0 to 1) of all bytes that every device holds in full."""
        totals = self.totals()
        if not totals.total_bytes or (self.mesh is not None and self.mesh.size == 1):
            return 0.0
        return totals.replicated_bytes / totals.total_bytes


def _shown(row: Decision) -> Hashable:
    """The parts of a decision that a report shows."""
    why = (row.reason, row.rule, row.fallback, row.note)
    return row.spec, row.mesh, row.memory_kind, row.shard_shape, why
