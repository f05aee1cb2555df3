"""LM110: kernels with their axes on other dims than those of their siblings.

`query`, `gate`, `up` turn the model dim into features, which `out`, `down` turn back:
(d, heads, head_dim) and (heads, head_dim, d). An axis for tensors belongs on the
features of both; on the model dim of one of them, the features are gathered.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from operator import mod
from typing import Any, NamedTuple

from flax_layoutmap._lint.issue import NUMBER, Group, LintIssue, as_code, issue, key_for
from flax_layoutmap._lint.matches import DECIDED, Model

# What a module calls its one matrix, (in, out). A `weight` may be (out, in).
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
    features: Sequence[int]  # the other dims, without those of stacked layers, experts

    def shards(self, axis: str) -> tuple[bool, bool]:
        """Whether an axis shards the model dim, and features."""
        dims = self.leaf.row.dims
        return axis in dims[self.model_dim], any(axis in dims[d] for d in self.features)

    @property
    def exchanged(self) -> list[tuple[str, ...]]:
        """The dims, with those of the model dim on the first feature dim."""
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
    """Whether the axis is wrong here and not in siblings, and divides features.

    An axis of the batch belongs on the model dim. Else most bytes are right, and of
    `up` and `down` alone, `up`.
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
    """The kernels whose names tell what they do, by the rules that decided them."""
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
