"""Records of a Resolution: decisions, leaves, totals, warnings; their texts."""

import dataclasses
import difflib
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import PartitionSpec

from flax_layoutmap._core.errors import ResolveError, bullet_list, visible, warn
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._rules.files import mesh_to_json
from flax_layoutmap._rules.matching import Rule
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.paths import Role

Shape = tuple[int, ...]
Reason = Literal[
    "rule",
    "exact key",
    "explicit layout",
    "flax metadata",
    "follows kernel",
    "no rule",
    "scalar",
    "random state",
    "not an array",
    "follows parameter",
    "optimizer rule",
    "unknown optimizer state",
    "own layout",
]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """The decision for all leaves of one shape that the rules treat alike."""

    dims: tuple[tuple[str, ...], ...]
    spec: PartitionSpec
    mesh: DeviceMesh | None
    shard_shape: Shape | None
    reason: Reason
    rule: int | None = None  # position from 0
    matched: tuple[int, ...] = ()  # all rules that match, the winner among them
    memory_kind: str | None = None
    fallback: str | None = None
    problem: str | None = None  # text of a ResolveError after path and shape
    owner: str | None = None  # parameter that an optimizer-state leaf belongs to
    owner_dims: tuple[int | None, ...] | None = None
    note: str | None = None  # more about the reason
    warns: bool = False  # whether the fallback is worth a warning


@dataclasses.dataclass(frozen=True, slots=True)
class ResolvedLeaf:
    """One leaf of a Resolution.

    Attributes:
        path: path of the leaf within the whole tree.
        shape: global shape.
        dtype: dtype, or None for a leaf that is not an array.
        layout: the layout decided for it, one entry per dim.
        rule: the rule that decided, or None.
        rule_number: its number, counting from 1, or None.
        reason: why, in a few words: `"rule"`, `"exact key"`, `"scalar"`, …
        role: `"parameter"`, `"optimizer"` or `"other"`.
        shard_shape: shape of one device's part, or None without a mesh.
        bytes_per_device: bytes of one device's part.
        fallback: what happened instead, where a rule matched but could not apply.
        owner: the path of the parameter that optimizer state belongs to, or of the
            kernel that a LoRA matrix or a scale follows.
        note: more about the reason.
        others: the other paths of a shared NNX Variable.
    """

    path: str
    shape: Shape
    dtype: Any
    layout: TensorLayout
    rule: Rule | None
    rule_number: int | None
    reason: Reason
    role: Role
    shard_shape: Shape | None
    bytes_per_device: int
    fallback: str | None = None
    owner: str | None = None
    note: str | None = None
    others: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the leaves of one role, in bytes.

    `bytes_per_device` counts device memory; `host_bytes_per_device` counts the parts
    that rules with a `memory_kind` keep in host memory.
    """

    leaves: int
    total_bytes: int
    bytes_per_device: int
    replicated_bytes: int
    host_bytes_per_device: int = 0


def layout_of(row: Decision) -> TensorLayout:
    dims = row.dims if any(row.dims) else ()
    return TensorLayout(dims, row.mesh, memory_kind=row.memory_kind)


def section_of(row: Decision, rules: RuleSet) -> tuple[Rule, ...]:
    """The rules that the numbers in a decision refer to."""
    return rules.optimizer if row.reason == "optimizer rule" else rules.rules


def because(row: Decision, rules: RuleSet, *, short: bool = False) -> str:
    """The reason for a decision, in words; `short` for a table cell."""
    if row.rule is not None:
        rule = section_of(row, rules)[row.rule]
        if row.reason == "optimizer rule":
            return f"optimizer {row.rule + 1} {rule.pattern}"
        if short:
            return f"{row.rule + 1} {rule.pattern}"
        is_key = row.reason == "exact key"
        how = "its path is the key of" if is_key else "it is matched by"
        return f"{how} rule {row.rule + 1} {rule.pattern!r} → {rule.layout}"
    if row.reason == "follows parameter":
        return f"follows {row.owner}"
    if row.reason == "follows kernel":
        return f"- as {row.owner}" if short else f"from the layout of {row.owner}"
    if row.reason == "no rule":
        return "- no rule" if short else "no rule matches it"
    return f"- {row.reason}" if short else row.reason


def closest_rule(path: str, rules: Sequence[Rule]) -> tuple[int, Rule] | None:
    """Number and rule whose pattern is most like the end of a path, if any."""
    best, closest = 0.6, None
    for number, rule in enumerate(rules, start=1):
        ending = "/".join(path.split("/")[-rule.pattern.count("/") - 1 :])
        likeness = difflib.SequenceMatcher(None, ending, rule.pattern).ratio()
        if likeness > best:
            best, closest = likeness, (number, rule)
    return closest


def leaf_bytes(shape: Shape, dtype: Any) -> int:
    """Bytes of an array; 0 for other leaves."""
    return math.prod(shape) * int(getattr(dtype, "itemsize", 0) or 0)


@functools.lru_cache(maxsize=4096)
def show_shape(shape: Shape) -> str:
    """`(64, 128)` → `'(64,128)'`."""
    return f"({','.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


@functools.lru_cache(maxsize=4096)
def show_spec(spec: PartitionSpec, memory_kind: str | None = None) -> str:
    """`P(None, "model")` → `'P(-, model)'`, and the kind of memory."""
    entries = [
        "-" if entry is None else entry if isinstance(entry, str) else "+".join(entry)
        for entry in spec
    ]
    text = f"P({', '.join(entries)})" if entries else "replicated"
    return visible(f"{text} {memory_kind}" if memory_kind else text)


def leaf_json(leaf: ResolvedLeaf, mesh: DeviceMesh | None) -> dict[str, Any]:
    leaf_mesh = leaf.layout.device_mesh
    return {
        "path": leaf.path,
        "shape": list(leaf.shape),
        "dtype": None if leaf.dtype is None else str(leaf.dtype),
        "spec": [
            list(axes) if len(axes) > 1 else axes[0] if axes else None
            for axes in leaf.layout.dims(len(leaf.shape))
        ],
        "rule": leaf.rule_number,
        "pattern": None if leaf.rule is None else leaf.rule.pattern,
        "reason": leaf.reason,
        "role": leaf.role,
        "shard_shape": None if leaf.shard_shape is None else list(leaf.shard_shape),
        "bytes_per_device": leaf.bytes_per_device,
        "fallback": leaf.fallback,
        "owner": leaf.owner,
        "note": leaf.note,
        "memory_kind": leaf.layout.memory_kind,
        "mesh": None if leaf_mesh in (None, mesh) else mesh_to_json(leaf_mesh),
    }


# ------------------------------------------------------------------- warnings


class Remark(NamedTuple):
    """A warning, with keys of its subjects: path within the section, and reason."""

    text: str
    keys: frozenset[str]


def announce(rules: RuleSet, remarks: Sequence[Remark]) -> None:
    """Emit each warning once per rule set, in one process of a job.

    A strict rule set raises ResolveError instead; `strict=False` emits none.
    """
    if rules.strict is False or not remarks:
        return
    texts = (
        [remark.text for remark in remarks] if rules.strict else news(rules, remarks)
    )
    count = "1 finding" if len(texts) == 1 else f"{len(texts)} findings"
    if rules.strict:
        raise ResolveError(f"strict: {count}\n{bullet_list(texts)}", texts)
    if texts and _is_first(rules.mesh):
        warn(
            f"{count}\n{bullet_list(texts, limit=10)}\n  (a rule None says that a leaf "
            "is to be replicated; strict=False is quiet, strict=True raises)"
        )


def news(rules: RuleSet, remarks: Sequence[Remark]) -> list[str]:
    """The texts of the remarks with a subject that was not announced before."""
    announced = rules._announced
    new = [remark for remark in remarks if not remark.keys <= announced]
    announced.update(*(remark.keys for remark in new))
    return [remark.text for remark in new]


def _is_first(mesh: DeviceMesh | None) -> bool:
    if mesh is None or mesh.is_abstract:
        return True
    return mesh.devices.flat[0].process_index == jax.process_index()
