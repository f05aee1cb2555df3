"""A Resolution as plain records: from JSON schema 1, for review, for comparison."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from flax_layoutmap._core.errors import LayoutError, visible
from flax_layoutmap._core.whole_file import readable_json
from flax_layoutmap._rules.records import Decision, Shape, show_shape, show_spec
from flax_layoutmap._rules.rules import SECTIONS, RuleSet
from flax_layoutmap._rules.serialise import rules_to_json
from flax_layoutmap._tree.paths import natural_key

Change = Literal["added", "removed", "reshaped", "moved", "decided"]
CHANGES: tuple[Change, ...] = get_args(Change)

# Left out of a leaf in a file for review: the number of its rule changes with any rule
# before it, and the note follows from the rest.
_NUMBERED = ("rule", "note")
_TEXTS = ("path", "role", "reason")
_TEXTS_OR_NONE = ("dtype", "pattern", "owner", "fallback", "memory_kind")
_ALWAYS = ("path", "shape", "dtype", "spec", "shard_shape", "bytes_per_device")


@dataclasses.dataclass(frozen=True, slots=True)
class MeshShape:
    """A mesh without its devices: names, sizes and types of its axes."""

    axes: tuple[str, ...]
    shape: Shape
    types: tuple[str, ...]  # "auto", "explicit" or "manual"

    def __str__(self) -> str:
        pairs = zip(self.axes, self.shape, strict=True)
        return ",".join(f"{visible(name)}={size}" for name, size in pairs)


@dataclasses.dataclass(frozen=True, slots=True)
class LeafRecord:
    """One leaf of a Resolution, in plain values.

    Attributes:
        path: path of the leaf within the whole tree.
        shape: global shape.
        dtype: name of the dtype; None for a leaf that is no array.
        dims: per dim, the mesh axes that shard it.
        shard_shape: shape of one device's part; None without a mesh.
        bytes_per_device: bytes of one device's part.
        role: `"parameter"`, `"optimizer"` or `"other"`.
        reason: what decided its layout, in a few words.
        pattern: the pattern of the rule that decided; None where none did.
        owner: the parameter that it follows, if it does.
        fallback: what happened instead, where a rule matched but could not apply.
        memory_kind: the kind of memory; None for the device's default.
        mesh: its mesh; None without one.
    """

    path: str
    shape: Shape
    dtype: str | None
    dims: tuple[tuple[str, ...], ...]
    shard_shape: Shape | None
    bytes_per_device: int
    role: str
    reason: str
    pattern: str | None = None
    owner: str | None = None
    fallback: str | None = None
    memory_kind: str | None = None
    mesh: MeshShape | None = None

    @property
    def spec(self) -> str:
        """`P(-, model)`, or `replicated`."""
        entries = ["+".join(axes) or "-" for axes in self.dims]
        while entries and entries[-1] == "-":
            entries.pop()
        text = f"P({', '.join(entries)})" if entries else "replicated"
        return f"{text} {self.memory_kind}" if self.memory_kind else text

    @property
    def why(self) -> str:
        """The pattern of its rule, or the reason why there is none."""
        if self.pattern is not None:
            return repr(self.pattern)
        return f"follows {self.owner}" if self.owner else self.reason


@dataclasses.dataclass(frozen=True, slots=True)
class LeafChange:
    """One leaf that differs between two Resolutions.

    Attributes:
        path: path of the leaf.
        change: `"added"`; `"removed"`; `"reshaped"` (of another shape or dtype);
            `"moved"` (of another layout); `"decided"` (of the same layout, for another
            reason, such as another rule).
        before: the leaf before; None for one that was added. It has, in plain values,
            what `ResolvedLeaf` has, and `spec` as text.
        after: the leaf after; None for one that was removed.
        received_bytes: of a leaf that moved, the most bytes that one device receives;
            0 for others, None without a mesh.
        all_received_bytes: the sum over the devices.
    """

    path: str
    change: Change
    before: LeafRecord | None
    after: LeafRecord | None
    received_bytes: int | None = 0
    all_received_bytes: int | None = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that a Resolution decided."""

    rules: Mapping[str, Any]  # as JSON
    mesh: MeshShape | None  # of the rules or, where they have none, of the leaves
    leaves: Mapping[str, LeafRecord]  # by path
    # Ids of the devices, row by row; None for an abstract mesh or a file.
    devices: tuple[Any, ...] | None = None


def snapshot_of(data: Any, devices: tuple[Any, ...] | None = None) -> Snapshot:
    """Read what `Resolution.to_json` or `golden_text` wrote.

    Raises:
        LayoutError: it is of another schema, or damaged.
    """
    if not isinstance(data, dict) or data.get("schema") != 1:
        schema = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise LayoutError(
            f"layouts of schema {schema!r} cannot be read; this is schema 1, what "
            'resolution.report("json") and flm.testing.write_golden write'
        )
    try:
        rules = dict(data["rules"])
        mesh = _mesh(rules["mesh"])
        for section in SECTIONS:
            for entry in rules[section]:
                rule_text(entry)
        leaves = [_leaf(entry, mesh) for entry in data["leaves"]]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise LayoutError(f"the layouts are damaged: {error!r}") from error
    if mesh is None:  # the leaves may have one
        mesh = next((leaf.mesh for leaf in leaves if leaf.mesh is not None), None)
    return Snapshot(rules, mesh, {leaf.path: leaf for leaf in leaves}, devices)


def golden_text(data: Mapping[str, Any]) -> str:
    """What `Resolution.to_json` gives as JSON for review: sorted, one line per leaf."""
    leaves = [
        {
            key: value
            for key, value in leaf.items()
            if key not in _NUMBERED and (key in _ALWAYS or value is not None)
        }
        for leaf in sorted(data["leaves"], key=lambda leaf: natural_key(leaf["path"]))
    ]
    kept = {
        "schema": data["schema"],
        "rules": data["rules"],
        "totals": {role: _some(sums) for role, sums in data["totals"].items()},
        "leaves": leaves,
    }
    return f"{_lines(kept, 2)}\n"


def _some(sums: Mapping[str, int]) -> dict[str, int]:
    """The totals of a role; those in host memory only where there are some."""
    return {
        name: size
        for name, size in sums.items()
        if size or name != "host_bytes_per_device"
    }


def rule_lines(rules: RuleSet) -> dict[str, list[str]]:
    """The lines by which processes compare their rules, and their meshes."""
    values = rules_to_json(rules)
    # The mesh is a part of its own, so that a difference is reported once.
    del values["mesh"]
    mesh = "no mesh" if rules.mesh is None else f"{rules.mesh} {rules.mesh.axis_types}"
    lines = []
    for name, value in values.items():
        if isinstance(value, list):
            lines += [f"{name} {at}: {v}" for at, v in enumerate(value, start=1)]
        else:
            lines.append(f"{name}: {value}")
    return {"rules": lines, "mesh": [mesh]}


def leaf_line(path: str, shape: Shape, dtype: Any, row: Decision) -> str:
    """The line by which processes compare the decision about a leaf."""
    kind = f", {row.memory_kind}" if row.memory_kind else ""
    return f"{path} {show_shape(shape)} {dtype}, {show_spec(row.spec)}{kind}"


def record_json(leaf: LeafRecord) -> dict[str, Any]:
    """A leaf as in the report's JSON, but for the number of its rule and its mesh."""
    return {
        "path": leaf.path,
        "shape": list(leaf.shape),
        "dtype": leaf.dtype,
        "spec": [
            list(axes) if len(axes) > 1 else axes[0] if axes else None
            for axes in leaf.dims
        ],
        "pattern": leaf.pattern,
        "reason": leaf.reason,
        "role": leaf.role,
        "shard_shape": None if leaf.shard_shape is None else list(leaf.shard_shape),
        "bytes_per_device": leaf.bytes_per_device,
        "fallback": leaf.fallback,
        "owner": leaf.owner,
        "memory_kind": leaf.memory_kind,
    }


def rule_text(entry: Mapping[str, Any]) -> str:
    """`'up/kernel' → (None, 'model')`, from a rule as JSON."""
    dims = [_dim_text(dim) for dim in entry["axes"]]
    axes = f"({', '.join(dims)}{',' if len(dims) == 1 else ''})"
    text = f"{entry['pattern']!r} → {'None' if dims in ([], ['...']) else axes}"
    if entry.get("memory_kind"):
        text += f" in {entry['memory_kind']}"
    if entry.get("mesh"):
        text += f" on {_mesh(entry['mesh'])}"
    return text + (f", rank {entry['rank']!r}" if entry.get("rank") else "")


def mesh_text(mesh: MeshShape | None, other: MeshShape | None = None) -> str:
    """The mesh, with the types of its axes where the other differs in them alone."""
    if mesh is None:
        return "no mesh"
    if other is not None and str(mesh) == str(other) and mesh.types != other.types:
        return f"{mesh} ({', '.join(mesh.types)})"
    return str(mesh)


def _dim_text(dim: Any) -> str:
    if dim == "...":
        return "..."
    return repr(tuple(dim) if isinstance(dim, list) else dim)


def _mesh(data: Mapping[str, Any] | None) -> MeshShape | None:
    if data is None:
        return None
    shape = tuple(map(int, data["shape"]))
    return MeshShape(tuple(data["axis_names"]), shape, tuple(data["axis_types"]))


def _leaf(entry: Mapping[str, Any], mesh: MeshShape | None) -> LeafRecord:
    shard = entry["shard_shape"]
    own = entry.get("mesh")
    dims = tuple(
        () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
        for axes in entry["spec"]
    )
    texts = {name: entry[name] for name in (*_TEXTS, "dtype")}
    texts |= {name: entry.get(name) for name in _TEXTS_OR_NONE}
    for name, value in texts.items():
        if not isinstance(value, str) and (value is not None or name in _TEXTS):
            raise TypeError(f"{name} of {entry['path']!r} is {value!r}")
    known = mesh.axes if own is None and mesh is not None else None
    if known is not None and not set(itertools.chain(*dims)) <= set(known):
        raise ValueError(
            f"{entry['path']!r} is sharded over axes that the mesh does not have"
        )
    if len(dims) != len(entry["shape"]):
        raise ValueError(f"{entry['path']!r} has a spec of {len(dims)} dims")
    return LeafRecord(
        **texts,
        shape=tuple(entry["shape"]),
        dims=dims,
        shard_shape=None if shard is None else tuple(shard),
        bytes_per_device=int(entry["bytes_per_device"]),
        mesh=mesh if own is None else _mesh(own),
    )


def _lines(value: Any, depth: int, indent: str = "") -> str:
    """JSON with one entry of the outer objects and lists in a line."""
    below = indent + "  "
    if isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        rows = [readable_json(entry) for entry in value]
        return _block("[]", rows, indent)
    if isinstance(value, dict) and value and depth:
        rows = [
            f"{readable_json(key)}: {_lines(entry, depth - 1, below)}"
            for key, entry in value.items()
        ]
        return _block("{}", rows, indent)
    return readable_json(value)


def _block(brackets: str, rows: Sequence[str], indent: str) -> str:
    inner = f",\n{indent}  ".join(rows)
    return f"{brackets[0]}\n{indent}  {inner}\n{indent}{brackets[1]}"
