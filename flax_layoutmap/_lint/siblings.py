"""Find layouts that look swapped compared with those of their siblings.

By the names of layers, `gate`, `up`, `query` produce the features that `down` and
`out` consume. So an axis should shard the out-dims of the first and the in-dims
of the second; with the out-dims of both, the features are gathered in between.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

from flax_layoutmap._lint.findings import Finding, Model, Numbered
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._rules.records import show_shape

Dims = tuple[tuple[str, ...], ...]

# What a module calls its one matrix.
_WEIGHTS = {"kernel", "weight", "w", "value", "w_kernel"}
_COLUMN = re.compile(
    r"(?:w_?)?(?:q|k|v|query|key|value|gate|up|q_proj|k_proj|v_proj|gate_proj|up_proj|"
    r"i|i_[01]|1|3|fc_?1|fc_in|c_fc|c_attn|in_proj|qkv|qkv_proj|gate_up_proj)(?:_\d+)?"
)
_ROW = re.compile(
    r"(?:w_?)?(?:o|out|output|down|o_proj|out_proj|down_proj|2|fc_?2|fc_out|c_proj)"
    r"(?:_\d+)?"
)


@dataclasses.dataclass(slots=True)
class _Leaf:
    at: int
    parent: str
    module: str
    name: str
    shape: tuple[int, ...]
    dims: Dims
    rule: int
    stacked: int = 0  # leading dims that were left out


def swapped(model: Model) -> Iterator[Finding]:
    """Leaves whose axes shard other dims than those of their siblings."""
    resolution = model.resolution
    leaves = list(_leaves(resolution))
    parents: dict[str, list[_Leaf]] = {}
    for leaf in leaves:
        parents.setdefault(leaf.parent, []).append(leaf)
    reported: set[int] = set()
    for together in parents.values():
        siblings = _of_one_layer(together)
        column = [leaf for leaf in siblings if _COLUMN.fullmatch(leaf.module)]
        odd = _odd_one(column, resolution.rules.batch)
        if odd is not None and odd[0].rule not in reported:
            reported.add(odd[0].rule)
            yield _found(resolution, *odd)
        for leaf in siblings:
            if leaf.rule not in reported and _ROW.fullmatch(leaf.module):
                other = _column_beside(resolution, leaf, column)
                if other is not None:
                    reported.add(leaf.rule)
                    yield _found(resolution, leaf, other, row=True)


def _leaves(resolution: Resolution) -> Iterator[_Leaf]:
    """The sharded matrices of a model, those of equal layers once."""
    roles, paths = resolution._roles(), resolution.paths
    for at in resolution._flat.representatives():
        row = resolution._rows[at]
        if row.rule is None or row.reason not in ("rule", "exact key"):
            continue
        if len(row.dims) < 2 or not any(row.dims) or roles[at] != "parameter":
            continue
        *parents, name = paths[at].split("/")
        module = parents.pop() if name in _WEIGHTS and parents else name
        shape, where = resolution.shapes[at], "/".join(parents)
        yield _Leaf(at, where, module, name, shape, row.dims, row.rule)


def _of_one_layer(siblings: Sequence[_Leaf]) -> list[_Leaf]:
    """Columns and rows, without leading dims that all have: layers, or experts."""
    found = [
        leaf
        for leaf in siblings
        if _COLUMN.fullmatch(leaf.module) or _ROW.fullmatch(leaf.module)
    ]
    # The in-dim of all columns is as long too, so a row has to have it as well.
    while any(_ROW.fullmatch(leaf.module) for leaf in found) and len(found) > 1:
        first = {(leaf.shape[0], leaf.dims[0]) for leaf in found}
        if len(first) > 1 or min(len(leaf.shape) for leaf in found) < 3:
            break
        found = [
            dataclasses.replace(
                leaf,
                shape=leaf.shape[1:],
                dims=leaf.dims[1:],
                stacked=leaf.stacked + 1,
            )
            for leaf in found
        ]
    return found


def _odd_one(
    column: Sequence[_Leaf], batch: Sequence[str]
) -> tuple[_Leaf, _Leaf] | None:
    """The leaf whose layout differs from its siblings', and one of these."""
    kinds: dict[Dims, list[_Leaf]] = {}
    for leaf in column:
        kinds.setdefault(leaf.dims, []).append(leaf)
    if len(kinds) != 2:
        return None

    def likely(dims: Dims) -> tuple[bool, int]:
        """Features on the in-dims are odd; else what fewer have, and the later."""
        return any(axis not in batch for axis in dims[0]), -len(kinds[dims])

    odd, other = (kinds[dims][0] for dims in sorted(reversed(kinds), key=likely)[::-1])
    permuted = sorted(odd.dims) == sorted(other.dims)
    if not permuted or odd.rule == other.rule or odd.name != other.name:
        return None
    return odd, other


def _column_beside(
    resolution: Resolution, leaf: _Leaf, column: Sequence[_Leaf]
) -> _Leaf | None:
    """A sibling that shards its out-dims by an axis that this has on its own, too."""
    mesh, batch = resolution.mesh, resolution.rules.batch
    assert mesh is not None
    for axis in leaf.dims[-1]:
        if axis in batch or mesh.axis_sizes[axis] == 1:
            continue
        have = [
            other
            for other in column
            if any(axis in dim for dim in other.dims) and _fit(other.shape, leaf.shape)
        ]
        # On the in-dims of all: sharded for memory, not for the features.
        if have and all(axis not in other.dims[0] for other in have):
            apart = [other for other in have if other.rule != leaf.rule]
            if apart:
                return apart[0]
    return None


def _fit(one: tuple[int, ...], two: tuple[int, ...]) -> bool:
    """Whether a matrix may take apart the features that another one makes."""
    # Gate and up may be one matrix, and keys and values have fewer heads.
    features, taken = math.prod(one[1:]), math.prod(two[:-1])
    if not features or not taken or one[0] != two[-1]:
        return False
    return features % taken == 0 or taken % features == 0


def _found(
    resolution: Resolution, leaf: _Leaf, other: _Leaf, *, row: bool = False
) -> Finding:
    paths, rules = resolution.paths, resolution.rules.rules
    dims, why = other.dims, "the same axes on other dims"
    if row:
        dims = (leaf.dims[-1], *leaf.dims[1:-1], leaf.dims[0])
        why = "both on their out-dims, so that the features are gathered in between"
    dims = (*resolution._rows[leaf.at].dims[: leaf.stacked], *dims)
    axes = tuple(names[0] if len(names) == 1 else names or None for names in dims)
    path, shape = paths[leaf.at], show_shape(resolution.shapes[leaf.at])
    return Finding(
        "LM110",
        Numbered("rules", leaf.rule + 1, rules[leaf.rule]),
        path=path,
        leaves=1,
        shape=shape,
        beside=paths[other.at],
        theirs=Numbered("rules", other.rule + 1, rules[other.rule]),
        why=why,
        axes=axes,
    )
