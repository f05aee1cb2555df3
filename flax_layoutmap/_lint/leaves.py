"""Checks of leaves that do not fit or are replicated, and of unused mesh axes."""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from operator import mod
from typing import Any, NamedTuple

from flax_layoutmap._lint.issue import (
    NUMBER,
    Group,
    LintIssue,
    Numbered,
    Severity,
    as_code,
    issue,
    key_for,
    numbered,
)
from flax_layoutmap._lint.matches import DECIDED, Model
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._rules.matching import Matcher
from flax_layoutmap._rules.records import closest_rule
from flax_layoutmap._show.report import LARGE_SHARE, is_large
from flax_layoutmap._show.table import human_bytes
from flax_layoutmap._tree.paths import parameter_keys

# A rule None for less than this share of the bytes is considered intentional.
_LARGE_ON_PURPOSE = 0.1
# No model has this path: a rule that matches it is a catch-all.
_ANY_PATH = "~/~"

_VOCABULARY = re.compile(r"embed|vocab|wte|lm_head|unembed|logits|output_proj", re.I)
_HEADS = re.compile(r"(?:^|[/_.])(?:k|v|kv|key|value|key_value|wk|wv)(?:[/_.]|$)", re.I)


def unfit(model: Model) -> Iterator[LintIssue]:
    """LM114: leaves that do not fit their rules; see `ResolveError.resolution`."""
    for leaf in model.groups(lambda row: row.problem is not None):
        clash, _, fix = (leaf.row.problem or "").rpartition("; ")
        if not clash:
            clash, fix = fix, "change the rule, or the leaf"
        yield issue("LM114", "error", f"{leaf}: {clash}", fix, leaf)


def indivisible(model: Model) -> Iterator[LintIssue]:
    """LM103, LM104, LM108: dims that are not divisible by their axes."""
    for leaf in model.groups(lambda row: bool(row.fallback) and row.rule is not None):
        if leaf.row.reason == "optimizer rule":
            continue  # its dims are those of the parameter
        rule = leaf.rule
        assert rule is not None
        severity: Severity = "info" if leaf.share < LARGE_SHARE else "warning"
        for dim, axes in enumerate(rule.rule.layout.dims(len(leaf.shape))):
            if axes and not leaf.row.dims[dim]:
                code, text, fix = _clash(leaf, rule, dim, axes)
                yield issue(code, severity, text, fix, leaf)


def _clash(
    leaf: Group, rule: Numbered, dim: int, axes: tuple[str, ...]
) -> tuple[str, str, str]:
    assert leaf.row.mesh is not None
    shape, sizes = leaf.shape, leaf.row.mesh.axis_sizes
    size, ways = shape[dim], math.prod(sizes[axis] for axis in axes)
    padded, tiled = -(-size // ways) * ways, 128 * ways
    listed = " × ".join(f"{axis!r} ({sizes[axis]})" for axis in axes)
    text = (
        f"{leaf}: {rule}: dim {dim} of size {size} is not divisible by {listed}, so it "
        "is replicated"
    )
    dims = list(rule.rule.layout.dims(len(shape)))
    dims[dim] = ()
    narrower = f"{key_for(leaf.path)} = {as_code(dims)}"
    if size < ways and _HEADS.search(leaf.path):
        text += f"; {size} heads cannot be split over {ways} devices"
        where = f"in a rule in front of {rule.pattern!r}, or a smaller axis"
        return "LM108", text, f"{narrower}  # {where}"
    if size > ways and size == max(shape) and _VOCABULARY.search(leaf.path):
        text += f"; {padded - size} more rows would do, {padded}"
        wide = f"or to {-(-size // tiled) * tiled} for tiles of 128 on each device"
        return "LM104", text, f"pad the vocabulary from {size} to {padded}, {wide}"
    return "LM103", text, f"{narrower}, or a size of {padded}"


def unmatched(model: Model) -> Iterator[LintIssue]:
    """LM102: large parameters that no rule matches."""
    resolution = model.resolution
    rules, total = resolution.rules.rules, resolution.total_bytes
    held = resolution.bytes_per_device or 1
    for leaf in model.groups(
        lambda row: row.reason == "no rule" and row.problem is None, "parameter"
    ):
        if not is_large(leaf.bytes, total, held):
            continue
        text, near = f"{leaf}: matched by no rule", closest_rule(leaf.path, rules)
        text += f", so that {leaf.in_full}"
        if leaf.share <= LARGE_SHARE:  # small in total, but large on each device
            text += f", {leaf.bytes / held:.1%} of what each device holds"
        if near:
            text += f"; the closest is rule {near[0]} {near[1].pattern!r}"
        fix = suggested(resolution, leaf.path, leaf.shape)
        yield issue("LM102", "warning" if rules else "info", text, fix, leaf)


def replicated(model: Model) -> Iterator[LintIssue]:
    """LM105: large parameters that a rule or an annotation replicates."""
    resolution = model.resolution
    rules = resolution.rules
    shards = any(not rule.layout.is_replicated for rule in rules.rules)
    for leaf in model.groups(
        lambda row: row.reason in (*DECIDED, "flax metadata") and not any(row.dims),
        "parameter",
    ):
        rule, why, severity = leaf.rule, leaf.row.fallback, "warning"
        if leaf.share < LARGE_SHARE or (rule is None) != bool(why):
            continue  # LM103 if the rule does not divide, LM102 without a rule
        if rule is None:
            by = f"its annotation shards nothing: {why}"
        elif not rule.rule.layout.is_replicated or not shards:
            continue
        elif Matcher((rule.rule,), rules.match).matching(_ANY_PATH):
            by = f"replicated by the catch-all {rule}"
        elif leaf.share >= _LARGE_ON_PURPOSE:
            by, severity = f"replicated by {rule}", "info"
        else:
            continue
        text = f"{leaf}: {by}; {leaf.in_full}"
        fix = suggested(resolution, leaf.path, leaf.shape)
        yield issue("LM105", severity, text, fix, leaf)


def replicated_state(model: Model) -> Iterator[LintIssue]:
    """LM106: replicated optimizer state of sharded parameters."""
    resolution = model.resolution
    leaves = model.groups(
        lambda row: (
            row.reason in ("unknown optimizer state", "optimizer rule")
            and not any(row.dims)
            and not (row.fallback and row.rule is not None)
        ),
        "optimizer",
    )
    rows, keys = resolution._rows, parameter_keys(resolution._flat)
    sharded = {key for position, key in keys.items() if any(rows[position].dims)}
    for leaf in leaves:
        row, rule = leaf.row, leaf.rule
        owned = row.owner in sharded if row.owner else bool(sharded)
        if leaf.share < LARGE_SHARE or not owned:
            continue
        of = f" of the sharded parameter {row.owner!r}" if row.owner else ""
        if rule is None:
            why = f" ({row.fallback})" if row.fallback else ""
            by = f"optimizer state of an unknown kind{why}"
            fix = "flm.resolve(state, layout_map, params=params, tx=tx)"
        else:
            by = f"{rule} replicates it"
            fix = f"del {rule.key}  # it follows the parameter"
        text = f"{leaf}{of}: {by}; {leaf.in_full}"
        yield issue("LM106", "warning", text, fix, leaf)


def too_much_replicated(model: Model) -> Iterator[LintIssue]:
    """LM115: a larger share of replicated bytes than is allowed."""
    resolution, most = model.resolution, model.max_replicated
    if most is None:
        return
    leaves = [
        leaf
        for leaf in model.groups(lambda row: True)
        if leaf.row.shard_shape in (None, leaf.shape)
        if leaf.bytes and not model.is_ignored(leaf.path)
    ]
    share = sum(leaf.share for leaf in leaves)
    if share > most:
        most_bytes = sorted(leaves, key=lambda leaf: -leaf.bytes)[:5]
        lines = [f"\n    {g}: {g.share:.1%}, {g.row.reason}" for g in most_bytes]
        text = (
            f"every device of mesh {resolution.mesh} holds {share:.1%} of the bytes in "
            f"full, more than max_replicated={most:.1%}; the largest:{''.join(lines)}"
        )
        fix = suggested(resolution, most_bytes[0].path, most_bytes[0].shape)
        yield issue("LM115", "error", text, fix)


def suggested(resolution: Resolution, path: str, shape: tuple[int, ...]) -> str:
    """A rule that shards the largest divisible dim of a leaf, as code."""
    sizes = {} if resolution.mesh is None else resolution.mesh.axis_sizes
    names = [n for n in sizes if sizes[n] > 1 and n not in resolution.rules.batch]
    for axis in names or [n for n in sizes if sizes[n] > 1]:
        fitting = [dim for dim, size in enumerate(shape) if size % sizes[axis] == 0]
        if fitting:
            best = max(fitting, key=lambda dim: (shape[dim], dim))
            axes = tuple(axis if dim == best else None for dim in range(len(shape)))
            return f"{key_for(path)} = {axes}  # or None: replicated, on purpose"
    return f"{key_for(path)} = None  # replicated, on purpose"


def idle_axes(model: Model) -> Iterator[LintIssue]:
    """LM112: mesh axes that neither a rule nor the batch uses."""
    resolution, rules = model.resolution, model.resolution.rules
    if not rules.rules or rules.strict is False or "parameter" not in resolution._roles:
        return
    used = {a for row in resolution._distinct.values() for dim in row.dims for a in dim}
    used.update(rules.batch, *(r.rule.layout.axis_names for r in numbered(rules)))
    for axis in (name for name in model.sizes if name not in used):
        size, held = model.sizes[axis], human_bytes(resolution.bytes_per_device)
        text = (
            f"mesh axis {axis!r} of size {size} is used by neither a rule nor the "
            f"batch: its {size} devices do the same work on the same {held}"
        )
        batch = (*rules.batch, axis)
        fix = f"name {axis!r} in a rule, or in LayoutMap(mesh, batch={batch})"
        yield issue("LM112", "warning", text, fix)


# LM110: `query`, `gate`, `up` map the model dim to features, and `out`, `down` map them
# back: (d, heads, head_dim) and (heads, head_dim, d). A tensor axis belongs on the
# features of both; on the model dim of either, the features are gathered.

# Names of a module's matrix, (in, out). A `weight` may be (out, in).
_KERNELS = {"kernel", "w", "value", "w_kernel"}
# Words in the names of layers that produce features, and of those that consume them.
_PRODUCERS = set(
    "q k v query key value qkv gate up i in intermediate wq wk wv wi w1 w3 fc1 c_fc "
    "c_attn".split()
)
_CONSUMERS = set("o out output down wo w2 fc2 c_proj".split())


class _Kernel(NamedTuple):
    leaf: Group
    parent: str
    model_dim: int
    features: Sequence[int]  # the other dims, except of stacked layers and experts

    def shards(self, axis: str) -> tuple[bool, bool]:
        """Whether an axis shards the model dim, and features."""
        dims = self.leaf.row.dims
        return axis in dims[self.model_dim], any(axis in dims[d] for d in self.features)

    @property
    def exchanged(self) -> list[tuple[str, ...]]:
        """The axes of each dim, with model dim and first feature dim exchanged."""
        dims, feature = [*self.leaf.row.dims], self.features[0]
        dims[self.model_dim], dims[feature] = dims[feature], dims[self.model_dim]
        return dims

    def is_beside(self, other: "_Kernel") -> bool:
        return (
            self.parent == other.parent
            and self.leaf.row.rule != other.leaf.row.rule
            and self.leaf.shape[self.model_dim] == other.leaf.shape[other.model_dim]
        )


def swapped(model: Model) -> Iterator[LintIssue]:
    """LM110: rules with an axis on the model dim that siblings have on features."""
    kernels, swaps = _kernels(model), dict[Any, list[tuple[_Kernel, str, _Kernel]]]()
    for kernel in kernels:
        siblings = [*filter(kernel.is_beside, kernels)]
        for axis in kernel.leaf.row.dims[kernel.model_dim]:
            other = next((k for k in siblings if k.shards(axis)[1]), None)
            if other is not None and _is_odd(kernel, axis, kernels, model):
                key = kernel.leaf.row.rule, as_code(kernel.exchanged)
                swaps.setdefault(key, []).append((kernel, axis, other))
                break
    rows = [row for row in model.resolution._rows if row.reason in DECIDED]
    for (number, axes), same in swaps.items():
        (kernel, axis, other), leaves = same[0], [swap[0].leaf for swap in same]
        count, size = sum(g.leaves for g in leaves), sum(g.bytes for g in leaves)
        leaf = dataclasses.replace(kernel.leaf, leaves=count, bytes=size)
        assert leaf.rule is not None
        fix = f"layout_map.replace({leaf.rule.pattern!r}, {axes})"
        if sum(row.rule == number for row in rows) > count:
            fix = f"{key_for(leaf.path)} = {axes}  # in front of {leaf.rule.pattern!r}"
        text = (
            f"{leaf}: {leaf.rule} looks swapped: it has {axis!r} on dim "
            f"{kernel.model_dim}, the model dim, where {other.leaf.rule} has it on "
            f"features, those of {other.leaf.path!r}"
        )
        yield issue("LM110", "warning", text, fix, leaf)


def _is_odd(kernel: _Kernel, axis: str, kernels: list[_Kernel], model: Model) -> bool:
    """Whether the axis is wrong here, rather than in siblings, and divides features.

    A batch axis belongs on the model dim. Otherwise the majority of bytes is right; in
    a tie between `up` and `down`, `up` is right.
    """
    sizes, dims, batch = model.sizes, kernel.exchanged, model.resolution.rules.batch
    ways = [math.prod(sizes.get(name, 1) for name in names) for names in dims]
    if axis in batch or axis not in sizes or any(map(mod, kernel.leaf.shape, ways)):
        return False
    if any(name in sizes and kernel.shards(name)[1] for name in batch):
        return True
    shards = [(k.leaf.bytes, *k.shards(axis)) for k in kernels]
    votes = sum(size * (on_features - on_dim) for size, on_dim, on_features in shards)
    return votes > 0 or (votes == 0 and kernel.model_dim == len(dims) - 1)


def _kernels(model: Model) -> list[_Kernel]:
    """The kernels whose names say what they compute and that a rule decided."""
    blocks: dict[str, tuple[list[Group], list[Group]]] = {}
    for leaf in model.groups(lambda row: row.reason in DECIDED, "parameter"):
        *parents, name = leaf.path.split("/")
        layer = parents.pop() if name in _KERNELS and parents else name
        words = {layer, *layer.split("_")} if "." not in layer else set()
        if len(leaf.shape) > 1 and words & (_PRODUCERS | _CONSUMERS):
            parent = NUMBER.sub("0", "/".join(parents))
            blocks.setdefault(parent, ([], []))[bool(words & _CONSUMERS)].append(leaf)
    kernels = []
    for parent, (producers, consumers) in blocks.items():
        widths, leads = {leaf.shape[-1] for leaf in consumers}, dict[int, int]()
        for leaf in producers:
            ndim = len(leaf.shape)
            dim = next((i for i, n in enumerate(leaf.shape[:-1]) if n in widths), 0)
            kernels.append(_Kernel(leaf, parent, dim, range(dim + 1, ndim)))
            leads[ndim] = dim
        for leaf in consumers:
            features = range(leads.get(len(leaf.shape), 0), len(leaf.shape) - 1)
            kernels.append(_Kernel(leaf, parent, features.stop, features))
    return kernels
