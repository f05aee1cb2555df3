"""Resolution: the one value in the middle; everything else is a function of it."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, Literal

import jax
from jax.sharding import NamedSharding

from flax_layoutmap import _report
from flax_layoutmap._announce import announce
from flax_layoutmap._diff import ResolutionDiff, difference
from flax_layoutmap._errors import (
    LayoutError,
    MeshError,
    closest,
)
from flax_layoutmap._explain import explain, leaf_line, rule_lines
from flax_layoutmap._layout import TensorLayout, named_sharding
from flax_layoutmap._mesh import DeviceMesh
from flax_layoutmap._paths import Flat, Role
from flax_layoutmap._records import (
    Decision,
    ResolvedLeaf,
    Shape,
    Totals,
    layout_of,
    leaf_bytes,
    section_of,
)
from flax_layoutmap._rules import Rule, RuleSet, is_for_outputs
from flax_layoutmap._snapshot import Snapshot, snapshot_of
from flax_layoutmap._table import human_bytes
from flax_layoutmap._terminal import show

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text


class Resolution:
    """Every leaf of a tree, its layout, the rule that chose it, and why.

    Made by `resolve`. Immutable; holds shapes, never arrays, and needs no devices:
    an abstract mesh is enough for everything but `shardings` on devices.

    Attributes:
        rules: the rule set.
        shapes: global shape of each leaf.
        dtypes: dtype of each leaf; None for a leaf that is no array.
    """

    __module__ = "flax_layoutmap"
    __slots__ = (
        "rules",
        "_paths",
        "shapes",
        "dtypes",
        "_rows",
        "_flat",
        "_treedef",
        "_again",
        "_announced",
        "_others",
        "_at",
        "_roles_of",
        "_shardings",
        "_distinct",
        "_layouts",
        "_sums",
    )
    rules: RuleSet
    shapes: tuple[Shape, ...]
    dtypes: tuple[Any, ...]
    _paths: tuple[str, ...] | None
    _rows: list[Decision]
    _flat: Flat
    _treedef: Any
    _again: "Callable[[RuleSet], Resolution]"
    _announced: bool
    _others: Mapping[int, Any]
    _at: dict[str, int] | None
    _roles_of: list[Role] | None
    _shardings: tuple[NamedSharding, ...] | None
    _distinct: dict[int, Decision]  # by id
    _layouts: dict[Any, TensorLayout]
    _sums: dict[Role | None, Totals]

    def __init__(
        self,
        rules: RuleSet,
        flat: Flat,
        shapes: Sequence[Shape],
        dtypes: Sequence[Any],
        rows: list[Decision],
        treedef: Any,
        again: "Callable[[RuleSet], Resolution]",
        others: Mapping[int, Any],
    ) -> None:
        put = object.__setattr__
        put(self, "rules", rules)
        put(self, "_paths", None)
        put(self, "shapes", tuple(shapes))
        put(self, "dtypes", tuple(dtypes))
        put(self, "_rows", rows)
        put(self, "_flat", flat)
        put(self, "_treedef", treedef)
        put(self, "_again", again)
        put(self, "_announced", False)
        put(self, "_others", others)
        put(self, "_at", None)
        put(self, "_roles_of", None)
        put(self, "_shardings", None)
        put(self, "_distinct", dict(zip(map(id, rows), rows, strict=True)))
        put(self, "_layouts", {})
        put(self, "_sums", {})

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Resolution is immutable: cannot set {name!r}")

    # ------------------------------------------------------------------ leaves

    @property
    def paths(self) -> tuple[str, ...]:
        """Path of each leaf within the whole tree, in JAX's leaf order."""
        paths = self._paths
        if paths is None:
            paths = tuple(self._flat.full_paths())
            object.__setattr__(self, "_paths", paths)
        return paths

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of the rule set."""
        return self.rules.mesh

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[ResolvedLeaf]:
        return (self.leaf(at) for at in range(len(self)))

    def __getitem__(self, path: str) -> ResolvedLeaf:
        return self.leaf(self._position(path))

    def __contains__(self, path: object) -> bool:
        return path in self._positions()

    def _positions(self) -> dict[str, int]:
        positions = self._at
        if positions is None:
            positions = {path: at for at, path in enumerate(self.paths)}
            object.__setattr__(self, "_at", positions)
        return positions

    def _position(self, path: str) -> int:
        at = self._positions().get(path)
        if at is not None:
            return at
        inner = [at for at, name in enumerate(self._flat.paths) if name == path]
        if len(inner) == 1:
            return inner[0]
        near = closest(path, self.paths, count=3)
        hint = f"; the closest are {near}" if near else ""
        raise KeyError(f"no leaf has the path {path!r}{hint}")

    def leaf(self, at: int) -> ResolvedLeaf:
        """The leaf at a position (from 0) in leaf order."""
        row = self._rows[at]
        return ResolvedLeaf(
            path=self.paths[at],
            shape=self.shapes[at],
            dtype=self.dtypes[at],
            layout=self._layout(row),
            rule=None if row.rule is None else section_of(row, self.rules)[row.rule],
            rule_number=None if row.rule is None else row.rule + 1,
            reason=row.reason,
            role=self._roles()[at],
            shard_shape=row.shard_shape,
            bytes_per_device=leaf_bytes(
                row.shard_shape or self.shapes[at], self.dtypes[at]
            ),
            fallback=row.fallback,
            owner=row.owner,
            note=row.note,
        )

    def _layout(self, row: Decision) -> TensorLayout:
        """The layout of a decision; equal ones are one object."""
        key = (row.dims, id(row.mesh), row.memory_kind)
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = layout_of(row)
        return layout

    def _roles(self) -> list[Role]:
        roles = self._roles_of
        if roles is None:
            roles = []
            for section in self._flat.sections:
                roles += [section.role] * (section.stop - section.start)
            others = {key for key, row in self._distinct.items() if _may_be_other(row)}
            if others:
                for at, row in enumerate(self._rows):
                    if id(row) in others and roles[at] == "parameter":
                        if self._is_other(at, row):
                            roles[at] = "other"
            object.__setattr__(self, "_roles_of", roles)
        return roles

    def _is_other(self, at: int, row: Decision) -> bool:
        """Random state, strings, and whole numbers (a `step`): no parameters."""
        return row.reason != "scalar" or self.dtypes[at].kind in "iub"

    # ------------------------------------------------------------------- trees

    @property
    def shardings(self) -> Any:
        """The tree with a `NamedSharding` for each leaf.

        For `jit`, Orbax and `device_put`. For a module it has the structure of
        `nnx.state(module)`.

        Raises:
            MeshError: the rules have no mesh, or an abstract one.
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
        return self._tree(self._per_decision(layout_of))

    def abstract(self) -> Any:
        """The tree with a `jax.ShapeDtypeStruct` with sharding for each array.

        Usable as the target of any Orbax restore. Python numbers (an int `step`) become
        what JAX makes of them; leaves that are no arrays (a string) stay as they are.

        Raises:
            MeshError: the rules have no mesh, or an abstract one.
        """
        self._need_devices("abstract()")
        leaves = [
            self._others[at]
            if dtype is None
            else jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
            for at, (shape, dtype, sharding) in enumerate(
                zip(self.shapes, self.dtypes, self.sharding_list(), strict=True)
            )
        ]
        return self._tree(leaves)

    def sharding_list(self) -> tuple[NamedSharding, ...]:
        """One `NamedSharding` per leaf, in leaf order; equal ones are one object."""
        known = self._shardings
        if known is not None:
            return known
        made: dict[Any, NamedSharding] = {}

        def sharding(row: Decision) -> NamedSharding:
            key = (row.mesh, row.spec, row.memory_kind)
            if key not in made:
                if row.mesh is None:
                    raise MeshError(_NO_MESH)
                made[key] = named_sharding(row.mesh, row.spec, row.memory_kind)
            return made[key]

        shardings = tuple(self._per_decision(sharding))
        object.__setattr__(self, "_shardings", shardings)
        return shardings

    def _per_decision(self, function: Callable[[Decision], Any]) -> list[Any]:
        made = {key: function(row) for key, row in self._distinct.items()}
        return list(map(made.__getitem__, map(id, self._rows)))

    def _tree(self, leaves: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self._treedef, leaves)

    def _need_devices(self, what: str) -> None:
        if self.mesh is None:
            raise MeshError(_NO_MESH)
        if self.mesh.is_abstract:
            raise MeshError(
                f"{what} needs devices, but {self.mesh!r} is abstract; make the "
                "Resolution concrete first: resolution.on(flm.DeviceMesh(...))"
            )

    def on(self, mesh: Any) -> "Resolution":
        """The same tree under the same rules on another mesh, such as a concrete one.

        Raises:
            RuleError: a rule names an axis that the mesh does not have.
            ResolveError: the leaves do not fit on it.
        """
        rules = self.rules.on(mesh)
        return self if rules is self.rules else self._again(rules)

    # --------------------------------------------------------------- questions

    @property
    def unused_rules(self) -> tuple[Rule, ...]:
        """Rules that match no leaf.

        Parameter rules are asked of trees with parameters only, rules for optimizer
        state of trees with optimizer state. Those that match no parameter and end in
        `/output` are for the outputs of layers, and not listed.
        """
        unused: list[Rule] = []
        for role, reason_is, section in (
            ("parameter", False, self.rules.rules),
            ("optimizer", True, self.rules.optimizer),
        ):
            if section and role in self._roles():
                used = {
                    at
                    for row in self._distinct.values()
                    if (row.reason == "optimizer rule") is reason_is
                    for at in row.matched
                }
                unused.extend(r for at, r in enumerate(section) if at not in used)
        return tuple(
            rule
            for rule in unused
            if "output" not in rule.pattern or not is_for_outputs(rule)
        )

    @property
    def unmatched(self) -> tuple[str, ...]:
        """Paths of the leaves that no rule and no metadata places (not scalars)."""
        return tuple(
            path
            for path, row in zip(self.paths, self._rows, strict=True)
            if row.reason in _report.UNMATCHED
        )

    @property
    def fallbacks(self) -> tuple[ResolvedLeaf, ...]:
        """The leaves that a rule or metadata places, but not fully."""
        return tuple(
            self.leaf(at)
            for at, row in enumerate(self._rows)
            if row.fallback and row.reason not in _report.UNMATCHED
        )

    def totals(self, role: Role | None = None) -> Totals:
        """Sums in bytes, over all leaves or those of one role."""
        known = self._sums.get(role)
        if known is None:
            known = self._sums[role] = self._sum(role)
        return known

    def _sum(self, role: Role | None) -> Totals:
        roles = self._roles()
        leaves = total = per_device = replicated = 0
        for at, row in enumerate(self._rows):
            if role is not None and roles[at] != role:
                continue
            leaves += 1
            whole = leaf_bytes(self.shapes[at], self.dtypes[at])
            total += whole
            per_device += leaf_bytes(
                row.shard_shape or self.shapes[at], self.dtypes[at]
            )
            if row.shard_shape in (None, self.shapes[at]):
                replicated += whole
        return Totals(leaves, total, per_device, replicated)

    @property
    def total_bytes(self) -> int:
        """Bytes of all global arrays."""
        return self.totals().total_bytes

    @property
    def bytes_per_device(self) -> int:
        """Bytes that each device holds."""
        return self.totals().bytes_per_device

    @property
    def replicated_share(self) -> float:
        """Share (0 to 1) of all bytes that every device holds in full."""
        totals = self.totals()
        if not totals.total_bytes or (self.mesh is not None and self.mesh.size == 1):
            return 0.0
        return totals.replicated_bytes / totals.total_bytes

    @property
    def fingerprint(self) -> str:
        """A hash of rules, mesh and table; equal on all processes of a healthy job."""
        return hashlib.sha256(
            "".join(self.fingerprints().values()).encode()
        ).hexdigest()

    def fingerprints(self) -> dict[str, str]:
        """Hashes of the parts: `"rules"`, `"mesh"`, `"table"`."""
        return {
            name: hashlib.sha256("\n".join(lines).encode()).hexdigest()
            for name, lines in self.fingerprint_lines().items()
        }

    def fingerprint_lines(self) -> dict[str, list[str]]:
        """What the hashes are of: a line for each rule and option, and for each leaf.

        Processes that differ are told the first line in which they do.
        """
        return {
            **rule_lines(self.rules),
            "table": [
                leaf_line(path, shape, dtype, row)
                for path, shape, dtype, row in zip(
                    self.paths, self.shapes, self.dtypes, self._rows, strict=True
                )
            ],
        }

    def explain(self, path: str) -> str:
        """Tells in a few lines why a leaf got its layout, or why it got none.

        Args:
            path: path of the leaf, within the tree or within its module.

        Raises:
            KeyError: no leaf has this path; the closest are listed.
        """
        at = self._position(path)
        return explain(self.leaf(at), self._rows[at], self._flat.paths[at], self.rules)

    # ------------------------------------------------------------------ output

    def report(
        self,
        format: Literal["text", "markdown", "json"] = "text",
        *,
        fold: bool = True,
        width: int | None = None,
    ) -> str:
        """The whole table: path, shape, dtype, spec, rule, shard, bytes, and totals.

        Args:
            format: `"text"`, `"markdown"`, or `"json"` (schema 1, which
                docs/report.md describes).
            fold: whether leaves that differ in the indices of their paths alone share
                a row, `layers/{0..79}/mlp/up/kernel ×80`. JSON is never folded.
            width: at most so many characters in a line of text, by leaving out what
                can be told from the rest; None for everything.

        Raises:
            LayoutError: there is no such format.
        """
        return _report.report(self, format, folded=fold, width=width)

    def diff(self, other: "Resolution") -> ResolutionDiff:
        """What changes from this Resolution to another, and what the change costs.

        The other may be of other rules, on another mesh (with or without devices), of
        another tree. Leaves are told apart by their paths.

        Args:
            other: what it is to be compared with: the later one.

        Raises:
            LayoutError: it is no Resolution.

        Example:
            >>> import jax, flax_layoutmap as flm
            >>> layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("data=2,model=4"))
            >>> layout_map["kernel"] = (None, "model")
            >>> tree = {"kernel": jax.ShapeDtypeStruct((8, 8), "float32")}
            >>> now = layout_map.resolve(tree)
            >>> layout_map.replace("kernel", ("data", "model"))
            >>> now.diff(layout_map.resolve(tree))
            ResolutionDiff(1 moved)
        """
        if not isinstance(other, Resolution):
            raise LayoutError(
                f"diff compares two Resolutions, got {type(other).__name__}; resolve "
                "it first: before.diff(layout_map.resolve(model))"
            )
        return difference(_snapshot(self), _snapshot(other))

    def show(self, file: IO[str] | None = None, *, fold: bool = True) -> None:
        """Prints the report as wide as the terminal, with a colour per mesh axis.

        Where the output is no terminal (a pipe, a file), that is `report()`: no colours
        and nothing left out, or as wide as the environment variable COLUMNS says.
        `rich.print(resolution)` prints the same.

        Args:
            file: where to; None for standard output, and then process 0 alone prints.
            fold: as for `report`.
        """

        def lines(width: int) -> "Iterator[Text]":
            return _report.coloured(self, width, folded=fold)

        def text(width: int | None) -> str:
            return _report.report(self, "text", folded=fold, width=width)

        show(lines, text, file)

    def __rich_console__(
        self, console: "Console", options: "ConsoleOptions"
    ) -> "Iterator[Text]":
        return _report.coloured(self, options.max_width)

    def remarks(self, *, large_only: bool = False, fold: bool = False) -> list[str]:
        """Unused rules, unmatched leaves, fallbacks: one line each.

        Args:
            large_only: leave out fallbacks, and unmatched leaves that with those like
                them have less than 1 % of the bytes and 10 % of what a device holds.
            fold: whether leaves that are alike share a line, as in `report`.
        """
        return _report.remarks(self, large_only=large_only, folded=fold)

    def to_json(self) -> dict[str, Any]:
        """The table as plain JSON values, schema 1."""
        return _report.to_json(self)

    def rows(
        self, wanted: Callable[[Decision], bool] | None = None
    ) -> list[tuple[ResolvedLeaf, Decision]]:
        """Each leaf with the decision that it shares with others; for reports.

        Args:
            wanted: which decisions; None for all.
        """
        if wanted is None:
            return [(self.leaf(at), row) for at, row in enumerate(self._rows)]
        found = {key for key, row in self._distinct.items() if wanted(row)}
        if not found:
            return []
        return [
            (self.leaf(at), row)
            for at, row in enumerate(self._rows)
            if id(row) in found
        ]

    def columns(self) -> Iterator[tuple[str, Shape, Any, Decision, Role]]:
        """Path, shape, dtype, decision and role of each leaf; for pictures."""
        return zip(
            self.paths,
            self.shapes,
            self.dtypes,
            self._rows,
            self._roles(),
            strict=True,
        )

    def announce(self, besides: "Sequence[Resolution]" = ()) -> None:
        """Warns once about unused rules and large unmatched leaves; for consumers.

        Args:
            besides: others of the same rules: what they use is not unused.

        Raises:
            ResolveError: the rule set is strict.
        """
        if self.rules.strict is False or self._announced:
            return
        announce(self.rules, _report.remarks(self, large_only=True, besides=besides))
        object.__setattr__(self, "_announced", True)

    def owners(self) -> dict[str, tuple[str | None, tuple[int | None, ...] | None]]:
        """Optimizer-state path → the parameter and the dims it came from."""
        return {
            path: (row.owner, row.owner_dims)
            for path, row, role in zip(
                self.paths, self._rows, self._roles(), strict=True
            )
            if role == "optimizer"
        }

    def _repr_html_(self) -> str:
        # Its page is large; nothing but a notebook needs what makes it.
        from flax_layoutmap import draw

        return draw.model(self)._repr_html_() if len(self) else f"<p>{self!r}</p>"

    def __repr__(self) -> str:
        mesh = "no mesh" if self.mesh is None else f"mesh {self.mesh}"
        count = "1 leaf" if len(self) == 1 else f"{len(self)} leaves"
        return (
            f"Resolution({count}, {mesh}, "
            f"{human_bytes(self.bytes_per_device)} of "
            f"{human_bytes(self.total_bytes)} per device)"
        )


def _snapshot(resolution: Resolution) -> Snapshot:
    mesh = resolution.mesh
    known = mesh is not None and not mesh.is_abstract
    devices = tuple(mesh.devices.flat) if mesh is not None and known else None
    return snapshot_of(resolution.to_json(), devices)


def _may_be_other(row: Decision) -> bool:
    return row.reason in ("random state", "not an array", "scalar")


_NO_MESH = (
    "the rules have no mesh; give one: LayoutMap(mesh), layout_map.on(mesh) or "
    "resolution.on(mesh)"
)
