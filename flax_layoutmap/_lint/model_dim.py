"""Checks of the kernels of layers by their model dim, that of the residual stream.

A check takes a `Model` and yields findings; the table in `lint` has their texts.
"""

import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from flax_layoutmap._core.axes import dim_axes
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._lint.matches import Group, Model, divides, groups, swapped
from flax_layoutmap._lint.rules import Finding, axis_users, nth
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._rules.matching import Rule, is_for_outputs
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._show.remarks import LARGE_SHARE

# Kernels without a model dim, and those beside the layers.
_CONVOLUTION, _BESIDE = re.compile("conv", re.I), re.compile("embed|vocab", re.I)
# Kernels of Hugging Face and of PyTorch are (out, in).
_OUT_IN = re.compile(r"(?:^|[/.])weight$")
# The share of the bytes of kernels with one size that may lack the model dim, such as
# those of LoRA; and the share of all that have to have it.
_FEW, _MOST = 0.1, 0.5

_OF_ACTIVATIONS = ("activations", "names")


class Kernel(NamedTuple):
    """A kernel of repeated layers, with the mesh axes on its model dim and others."""

    leaf: Group
    at: int  # the position of the model dim
    others: tuple[int, ...]  # those of other dims, but stacked layers and experts
    inner: tuple[str, ...]
    outer: tuple[str, ...]

    @property
    def pairs(self) -> set[tuple[str, str]]:
        """Axes on the model dim, each with one on the others."""
        return {(x, y) for x in self.inner for y in self.outer}

    @property
    def features(self) -> tuple[int, ...]:
        """The sizes of the other dims."""
        return tuple(self.leaf.shape[dim] for dim in self.others)


class Swapped(NamedTuple):
    """A rule whose axes are on other dims than those of other rules."""

    at: int  # the position of the rule
    odd: list[Kernel]  # its kernels
    others: list[Kernel]  # of other rules, as they should be
    to: Rule
    why: str


def kernels(resolution: Resolution) -> list[Kernel]:
    """The kernels of repeated layers in which the model dim is certain."""
    found, mesh = _in_layers(resolution), resolution.mesh
    assert mesh is not None
    # What a layer consumes beside the model dim, others produce: if none does, it is
    # an input, such as a text that attention goes to, and the model dim is features.
    made = {
        leaf.shape[dim]
        for leaf, at, others in found
        for dim in others
        if (dim < at) == bool(_OUT_IN.search(leaf.path))
    }
    sizes = mesh.axis_sizes
    return [
        Kernel(
            leaf,
            at,
            others,
            tuple(axis for axis in leaf.row.dims[at] if sizes[axis] > 1),
            tuple(a for dim in others for a in leaf.row.dims[dim] if sizes[a] > 1),
        )
        for leaf, at, others in found
        if made.issuperset(leaf.shape[dim] for dim in others)
    ]


def _in_layers(resolution: Resolution) -> list[tuple[Group, int, tuple[int, ...]]]:
    """The kernels with the model dim once, its position, and those of other dims.

    Stacked layers and experts, which are dims in front of a matrix, are no such dims.
    """
    every = groups(resolution, lambda row: len(row.dims) > 1, "parameter")
    every = [leaf for leaf in every if not _BESIDE.search(leaf.path)]
    size = _model_dim(every)
    known = [
        (leaf, leaf.shape.index(size))
        for leaf in every
        if leaf.shape.count(size) == 1 and not _CONVOLUTION.search(leaf.path)
    ]
    stacked = {
        other
        for leaf, at in known
        if at < len(leaf.shape) - 1
        for other in leaf.shape[:at]
    }
    found = []
    for leaf, at in known:
        ndim, first = len(leaf.shape), 0
        while first < at and (at < ndim - 1 or leaf.shape[first] in stacked):
            first += 1
        if leaf.leaves > 1 or first:  # of more than one layer
            found.append((leaf, at, (*range(first, at), *range(at + 1, ndim))))
    return found


def _model_dim(leaves: Sequence[Group]) -> int | None:
    """The size that nearly all kernels have which share another size with it.

    Of `(d, heads, head_dim)`, `(heads, head_dim, d)`, `(d, hidden)` and `(hidden, d)`
    it is `d`: the kernels with another size nearly all have `d`, and some have `d`
    alone. None where no size is that for most of the bytes.
    """
    held: collections.Counter[int] = collections.Counter()
    both: collections.Counter[tuple[int, int]] = collections.Counter()
    last, others = set(), set()
    for leaf in leaves:
        last.add(leaf.shape[-1])
        others.update(leaf.shape[:-1])
        for one in set(leaf.shape):
            held[one] += leaf.bytes
            for two in set(leaf.shape) - {one}:
                both[one, two] += leaf.bytes
    likely = last & others  # some layers produce it, others consume it

    def leads(one: int, two: int) -> bool:
        nearly_all = both[one, two] >= (1 - _FEW) * held[two]
        return nearly_all and held[one] > held[two]

    votes: collections.Counter[int] = collections.Counter()
    for leaf in leaves:
        own = likely.intersection(leaf.shape)
        for one in own:
            if leaf.shape.count(one) == 1 and all(
                leads(one, two) for two in own - {one}
            ):
                votes[one] += leaf.bytes
    most = _MOST * sum(leaf.bytes for leaf in leaves)
    ((size, bytes),) = votes.most_common(1) or [(None, 0)]
    return size if bytes > most else None


def by_model_dim(model: Model) -> Iterator[Finding]:
    """Swapped layouts, by sizes and then by names, and idle batch axes."""
    found = kernels(model.resolution)
    by_size = list(_exchanged(model.resolution, found))
    yield from by_size
    known = {finding.rule for finding in by_size}
    for finding in swapped(model):
        if not known.intersection((finding.rule, finding.words["theirs"])):
            yield finding
    yield from _idle(model.resolution, found)


# ------------------------------------------------------------------- exchanged axes


def _exchanged(resolution: Resolution, found: Sequence[Kernel]) -> Iterator[Finding]:
    """Rules with an axis on the model dim that others have on the other dims."""
    rules, mesh = resolution.rules, resolution.mesh
    by_rule: dict[int, list[Kernel]] = {}
    for kernel in found:
        row = kernel.leaf.row
        if row.rule is not None and row.reason in ("rule", "exact key"):
            by_rule.setdefault(row.rule, []).append(kernel)
    for one in (*_turned(by_rule, rules), *_without_features(by_rule, rules)):
        leaf, beside = _all_of(one.odd), _all_of(one.others)
        shapes = [kernel.leaf.shape for kernel in one.odd]
        # A layout with one entry per dim does not fit the biases of the same rule.
        ranks = {
            len(row.dims)
            for row in resolution._distinct.values()
            if row.rule == one.at and row.reason in ("rule", "exact key")
        }
        if one.to.layout.rank is not None and len(ranks) > 1:
            continue
        if leaf.bytes < LARGE_SHARE * resolution.total_bytes or not all(
            divides(shape, one.to.layout.dims(len(shape)), mesh) for shape in shapes
        ):
            continue
        assert beside.row.rule is not None
        yield Finding(
            "LM110",
            nth(rules, one.at),
            leaf,
            beside=beside.path,
            theirs=nth(rules, beside.row.rule),
            why=one.why,
            axes=str(one.to.layout),
            mended=_with_rule(rules, one.at, one.to),
        )


def _turned(by_rule: dict[int, list[Kernel]], rules: RuleSet) -> Iterator[Swapped]:
    """Rules with two axes the other way round than others."""
    every = [kernel for own in by_rule.values() for kernel in own]
    wrong = _wrong_pairs(every, rules.batch)
    kinds = {
        at: {pair for kernel in own for pair in kernel.pairs}
        for at, own in by_rule.items()
    }
    for at, own in by_rule.items():
        # A rule for kernels of both kinds says nothing about the roles of either.
        pairs = {(x, y) for x, y in kinds[at] & wrong if (y, x) not in kinds[at]}
        if not pairs:
            continue
        x, y = min(pairs)
        others = [
            kernel
            for rule, kernels in by_rule.items()
            if (y, x) in kinds[rule] and (x, y) not in kinds[rule]
            for kernel in kernels
            if (y, x) in kernel.pairs
        ]
        if others:
            odd = [kernel for kernel in own if (x, y) in kernel.pairs]
            why = f"here {x!r} shards the model dim, there {y!r}"
            yield Swapped(at, odd, others, _with_exchanged(rules.rules[at], x, y), why)


def _wrong_pairs(found: Sequence[Kernel], batch: Sequence[str]) -> set[tuple[str, str]]:
    """Pairs of axes that most kernels have the other way round.

    With an axis of the batch on the model dim weights are gathered, which is
    independent of the size of a batch, so that this one is right.
    """
    held: collections.Counter[tuple[str, str]] = collections.Counter()
    for kernel in found:
        for pair in kernel.pairs:
            held[pair] += kernel.leaf.bytes
    wrong = set()
    for x, y in held:
        if (y, x) in held:
            ranks = [(a in batch, held[a, b]) for a, b in ((x, y), (y, x))]
            if ranks[0] < ranks[1]:
                wrong.add((x, y))
    return wrong


def _without_features(
    by_rule: dict[int, list[Kernel]], rules: RuleSet
) -> Iterator[Swapped]:
    """Rules with an axis on the model dim alone, whose features have it elsewhere."""
    every = [kernel for own in by_rule.values() for kernel in own]
    for at, own in by_rule.items():
        first = own[0]
        if any(one.outer or one.inner != first.inner for one in own):
            continue
        if len(first.inner) != 1 or first.inner[0] in rules.batch:
            continue
        (axis,) = first.inner
        has = [kernel for kernel in every if axis in kernel.outer]
        on_model_dim = [kernel for kernel in every if axis in kernel.inner]
        others = [
            (one, kernel)
            for kernel in has
            if axis not in kernel.inner
            for one in own
            if one.features == kernel.features
        ]
        if not others or _all_of(has).bytes <= _all_of(on_model_dim).bytes:
            continue
        one, other = others[0]
        dim = next(
            mine
            for mine, theirs in zip(one.others, other.others, strict=True)
            if axis in other.leaf.row.dims[theirs]
        )
        alike = [kernel for kernel in own if _is_like(kernel, one)]
        if len(alike) == len(own):
            to = _with_exchanged_dims(rules.rules[at], one, dim)
            why = f"here {axis!r} shards the model dim, there one of the other dims"
            yield Swapped(at, own, [kernel for _, kernel in others], to, why)


def _is_like(one: Kernel, two: Kernel) -> bool:
    """Whether their dims have the same roles."""
    return one.at == two.at and len(one.leaf.shape) == len(two.leaf.shape)


def _all_of(found: Sequence[Kernel]) -> Group:
    """The largest of some kernels, with the number and bytes of all."""
    leaves = [kernel.leaf for kernel in found]
    return dataclasses.replace(
        max(leaves, key=lambda leaf: leaf.bytes),
        leaves=sum(leaf.leaves for leaf in leaves),
        bytes=sum(leaf.bytes for leaf in leaves),
    )


def _with_exchanged(rule: Rule, x: str, y: str) -> Rule:
    """The rule with what is on the dims of two axes exchanged."""
    first, second = (
        next(dim for dim in rule.layout.axes if axis in dim_axes(dim))
        for axis in (x, y)
    )
    to = {first: second, second: first}
    return _with_axes(rule, [to.get(one, one) for one in rule.layout.axes])


def _with_exchanged_dims(rule: Rule, kernel: Kernel, dim: int) -> Rule:
    """The rule with what is on the model dim of a kernel and on another exchanged."""
    axes = [names or None for names in rule.layout.dims(len(kernel.leaf.shape))]
    axes[kernel.at], axes[dim] = axes[dim], axes[kernel.at]
    return _with_axes(rule, axes)


def _with_axes(rule: Rule, axes: Sequence[Any]) -> Rule:
    own = rule.layout
    layout = TensorLayout(tuple(axes), own.device_mesh, memory_kind=own.memory_kind)
    return Rule(rule.pattern, layout, rank=rule.rank, optional=rule.optional)


def _with_rule(rules: RuleSet, at: int, rule: Rule) -> RuleSet:
    every = (*rules.rules[:at], rule, *rules.rules[at + 1 :])
    return dataclasses.replace(rules, rules=every)


# ------------------------------------------------------------------ idle batch axes


def _idle(resolution: Resolution, found: Sequence[Kernel]) -> Iterator[Finding]:
    """Axes that shard the model dim of parameters, but no batch."""
    rules, mesh = resolution.rules, resolution.mesh
    assert mesh is not None
    others = {axis for kernel in found for axis in kernel.outer}
    others |= _for_activations(rules)
    sharded: dict[str, list[Kernel]] = {}
    for kernel in found:
        for axis in kernel.inner:
            sharded.setdefault(axis, []).append(kernel)
    most = sum(kernel.leaf.bytes for kernel in found) / 2
    idle = {
        axis: _all_of(sharded[axis])
        for axis in mesh.axis_names
        if axis in sharded and axis not in others and axis not in rules.batch
        if sum(kernel.leaf.bytes for kernel in sharded[axis]) > most
    }
    if not idle or not rules.batch:
        return
    batch = (*rules.batch, *idle)
    mended, changed = _with_batch(rules, batch)
    for number, (axis, leaf) in enumerate(idle.items()):
        words = {"axis": axis, "size": mesh.axis_sizes[axis], "own": rules.batch}
        words |= {"batch": batch, "too": changed}
        if number == 0:  # one fix for all of them, whose cost is counted once
            words["mended"] = mended
        yield Finding("LM116", leaf=leaf, **words)


def _for_activations(rules: RuleSet) -> set[str]:
    """The axes that rules for activations name."""
    return {
        axis
        for axis, users in axis_users(rules).items()
        for one in users
        if one.section in _OF_ACTIVATIONS or is_for_outputs(one.rule)
    }


def _with_batch(rules: RuleSet, batch: tuple[str, ...]) -> tuple[RuleSet, str]:
    """The rules with another batch, and what to change beside it, as code."""
    changed: dict[str, Any] = {"batch": batch}
    code = ""
    for section in _OF_ACTIVATIONS:
        changed[section] = every = [*getattr(rules, section)]
        for at, rule in enumerate(every):
            first, *rest = rule.layout.axes
            if dim_axes(first) == rules.batch:
                every[at] = rule = _with_axes(rule, (batch, *rest))
                key = f"{rule.pattern!r}, {rule.layout}"
                code += f"; layout_map.{section}.replace({key})"
    return dataclasses.replace(rules, **changed), code
