"""Resolution: the layout of every leaf of a tree, which every consumer reads."""

import dataclasses
import functools
import html
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding

from flax_layoutmap._core.errors import (
    LayoutError,
    MeshError,
    ResolveError,
    bullet_list,
    closest,
)
from flax_layoutmap._core.layout import named_sharding
from flax_layoutmap._resolve.decide import decide
from flax_layoutmap._resolve.leaves import Leaves
from flax_layoutmap._rules.records import (
    Decision,
    ResolvedLeaf,
    announce,
    layout_of,
    show_shape,
)
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._show import report as _report
from flax_layoutmap._show.diff import (
    ResolutionDiff,
    difference,
    rule_lines,
    snapshot_of,
)
from flax_layoutmap._show.resolved_table import ResolvedTable
from flax_layoutmap._show.table import fold, human_bytes
from flax_layoutmap._show.terminal import Shown

if TYPE_CHECKING:
    from rich.text import Text


@dataclasses.dataclass(frozen=True, init=False, eq=False, repr=False)
class Resolution(ResolvedTable, Shown):
    """Every leaf of a tree, its layout, the rule that chose it, and why.

    Made by `resolve`. Immutable; holds shapes and no arrays. An abstract mesh is enough
    for all but `shardings` and `abstract()`.

    Attributes:
        rules: the rule set.
        shapes: global shape of each leaf.
        dtypes: dtype of each leaf; None for a leaf that is not an array.
    """

    __module__ = "flax_layoutmap"
    _leaves: Leaves
    _announced: bool

    def __init__(self, rules: RuleSet, leaves: Leaves, rows: list[Decision]) -> None:
        tree = slice(leaves.start, None)  # without separately given parameters
        shapes, dtypes = tuple(leaves.shapes[tree]), tuple(leaves.dtypes[tree])
        super().__init__(rules, shapes, dtypes, leaves.state or leaves.flat, rows[tree])
        object.__setattr__(self, "_leaves", leaves)
        object.__setattr__(self, "_announced", False)

    # ---------------------------------------------------------- leaves by path

    def __getitem__(self, path: str) -> ResolvedLeaf:
        return self.leaf(self._position(path))

    def __contains__(self, path: object) -> bool:
        return path in self._positions

    @functools.cached_property
    def _positions(self) -> dict[str, int]:
        positions = {path: at for at, path in enumerate(self.paths)}
        for at in self._flat.others:
            positions |= dict.fromkeys(self._flat.records[at].names(), at)
        return positions

    def _position(self, path: str) -> int:
        if path in self._positions:
            return self._positions[path]
        inner = [
            at
            for at in range(len(self))
            if any(path in forms for forms in self._flat.forms_of_names(at))
        ]
        if len(inner) == 1:
            return inner[0]
        near = ", ".join(closest(path, self.paths, count=3))
        hint = f"; the closest are {near}" if near else ""
        raise KeyError(f"no leaf has the path {path!r}{hint}")

    # ------------------------------------------------------------------- trees

    @property
    def shardings(self) -> Any:
        """The tree with a `NamedSharding` for each leaf.

        For `jit`, Orbax and `device_put`. For a module it has the structure of
        `nnx.state(module)`.
        """
        self._need_devices("shardings")
        return self._tree(self.sharding_list())

    @property
    def specs(self) -> Any:
        """The tree with a `PartitionSpec` in normal form for each leaf."""
        return self._tree([row.spec for row in self._rows])

    @property
    def layouts(self) -> Any:
        """The tree with a `TensorLayout` for each leaf."""
        made = {key: layout_of(row) for key, row in self._distinct.items()}
        return self._tree([made[id(row)] for row in self._rows])

    def abstract(self) -> Any:
        """Return the tree with a sharded `jax.ShapeDtypeStruct` for each array.

        Usable as the target of any Orbax restore. Python numbers (an int `step`) become
        what JAX makes of them; leaves that are not arrays (a string) stay as they are.
        """
        self._need_devices("abstract()")
        struct, others = jax.ShapeDtypeStruct, self._leaves.others
        columns = zip(self.shapes, self.dtypes, self.sharding_list(), strict=True)
        leaves = [
            others[at] if dtype is None else struct(shape, dtype, sharding=sharding)
            for at, (shape, dtype, sharding) in enumerate(columns)
        ]
        return self._tree(leaves)

    def sharding_list(self) -> tuple[NamedSharding, ...]:
        """Return one `NamedSharding` per leaf, in order; equal ones are one object."""
        return self._shardings

    @functools.cached_property
    def _shardings(self) -> tuple[NamedSharding, ...]:
        equal: dict[Any, NamedSharding] = {}
        shardings: dict[int, NamedSharding] = {}
        for at, row in self._distinct.items():
            if row.mesh is None:
                raise MeshError(_NO_MESH)
            key = (row.mesh, row.spec, row.memory_kind)
            shardings[at] = equal.get(key) or equal.setdefault(
                key, named_sharding(*key)
            )
        return tuple(map(shardings.__getitem__, map(id, self._rows)))

    def _tree(self, leaves: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self._leaves.treedef, leaves)

    def _need_devices(self, what: str) -> None:
        if self.mesh is None:
            raise MeshError(_NO_MESH)
        if self.mesh.is_abstract:
            raise MeshError(
                f"{what} needs devices, but {self.mesh!r} is abstract; make the "
                "Resolution concrete first: resolution.on(flm.DeviceMesh(...))"
            )

    def on(self, mesh: Any) -> "Resolution":
        """Resolve the same tree and rules on another mesh, such as a concrete one."""
        rules = self.rules.on(mesh)
        return self if rules is self.rules else decided(self._leaves, rules)

    # --------------------------------------------------------------- questions

    @property
    def unmatched(self) -> tuple[str, ...]:
        """Paths of the leaves without a rule or metadata (except scalars)."""
        rows = zip(self.paths, self._rows, strict=True)
        return tuple(path for path, row in rows if row.reason in _report.UNMATCHED)

    @property
    def fallbacks(self) -> tuple[ResolvedLeaf, ...]:
        """The leaves for which a rule or metadata could not be applied in full."""
        return tuple(
            self.leaf(at)
            for at, row in enumerate(self._rows)
            if row.fallback and row.reason not in _report.UNMATCHED
        )

    def fingerprint_lines(self) -> dict[str, list[str]]:
        """One line for each rule, option and leaf: equal on all processes of a job."""
        types = "" if self.mesh is None else f" {self.mesh.axis_types}"
        return {
            "rules": rule_lines(self.rules),
            "mesh": [f"{self.mesh or 'no mesh'}{types}"],
            "table": [
                f"{path} {show_shape(shape)} {dtype}, {_report.placed(row, self.mesh)}"
                for path, shape, dtype, row in zip(
                    self.paths, self.shapes, self.dtypes, self._rows, strict=True
                )
            ],
        }

    def explain(self, path: str) -> str:
        """Explain in a few lines why a leaf got its layout, or none.

        Args:
            path: path of the leaf, within the tree or within its module.
        """
        at = self._position(path)
        return _report.explain(self.leaf(at), self._rows[at], self.rules)

    # ------------------------------------------------------------------ output

    def diff(self, other: "Resolution") -> ResolutionDiff:
        """Compare with another Resolution: the changes, and their cost.

        Args:
            other: the later Resolution; rules, mesh and tree may differ. Leaves are
                identified by their paths.
        """
        if not isinstance(other, Resolution):
            raise LayoutError(
                f"diff compares two Resolutions, got {type(other).__name__}; resolve "
                "it first: before.diff(layout_map.resolve(model))"
            )
        before, after = snapshot_of(self.to_json()), snapshot_of(other.to_json())
        return difference(before, after, on=(self.mesh, other.mesh))

    def _lines(self, width: int | None) -> "Iterator[Text]":
        return _report.report_lines(self, width)

    def remarks(self) -> list[str]:
        """Return unused rules, unmatched leaves and fallbacks, a line for each kind."""
        return _report.remarks(self)

    def to_json(self) -> dict[str, Any]:
        """Return the table as plain JSON values, schema 1."""
        return _report.to_json(self)

    def announce(self, besides: "Sequence[Resolution]" = ()) -> None:
        """Warn about unused rules and large unmatched leaves; for consumers.

        Each warning is given once per rule set. Rules that the Resolutions in `besides`
        use do not count as unused.
        """
        if self.rules.strict is False or self._announced:
            return
        announce(self.rules, _report.warnings(self, besides))
        object.__setattr__(self, "_announced", True)

    def _repr_html_(self) -> str:
        # Imported here, as only a notebook needs it.
        from flax_layoutmap import draw

        if not len(self):
            return f"<p>{html.escape(repr(self))}</p>"
        return draw.model(self)._repr_html_()

    def __repr__(self) -> str:
        mesh = "no mesh" if self.mesh is None else f"mesh {self.mesh}"
        count = "1 leaf" if len(self) == 1 else f"{len(self)} leaves"
        on_host = self.host_bytes_per_device
        more = f" and {human_bytes(on_host)} in host memory" if on_host else ""
        on_device = f"{human_bytes(self.bytes_per_device)}{more}"
        total = human_bytes(self.total_bytes)
        return f"Resolution({count}, {mesh}, {on_device} of {total} per device)"


def decided(leaves: Leaves, rules: RuleSet) -> Resolution:
    """Decide every leaf; one ResolveError lists all that do not fit the rules."""
    rows = decide(leaves, rules)
    wrong = {at: row.problem for at, row in enumerate(rows) if row.problem}
    if wrong and leaves.state is not None:  # a parameter may be wrong: list all leaves
        treedef = jax.tree.structure([0] * len(rows))
        leaves = dataclasses.replace(leaves, state=None, treedef=treedef)
    resolution = Resolution(rules, leaves, rows)
    if not wrong:
        return resolution
    names = [leaves.flat.records[at].label() or "the leaf" for at in wrong]
    texts = [f"{show_shape(leaves.shapes[at])}: {text}" for at, text in wrong.items()]
    listed = [f"{name} {text}" for name, text in zip(names, texts, strict=True)]
    raise ResolveError(_problems_text(names, texts, rules.mesh), listed, resolution)


def _problems_text(names: Sequence[str], texts: Sequence[str], mesh: Any) -> str:
    """One line for each problem; equal ones of repeated layers share a line."""
    count = f"{len(names)} leaves do" if len(names) > 1 else "1 leaf does"
    on_mesh, lines = "" if mesh is None else f" on mesh {mesh}", []
    for alike in fold(names, texts):
        first, count_alike = alike.members[0], len(alike.members)
        times = f" ×{count_alike}" if count_alike > 1 else ""
        lines.append(f"{alike.text}{times} {texts[first]}")
    return f"{count} not fit the rules{on_mesh}:\n{bullet_list(lines)}"


_NO_MESH = (
    "the rules have no mesh; give one: LayoutMap(mesh), layout_map.on(mesh) or "
    "resolution.on(mesh)"
)
