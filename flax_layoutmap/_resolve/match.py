"""Stage "match": which rules match which leaf; the only stage that uses patterns."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._resolve.origins import Origins
from flax_layoutmap._rules.matching import Matcher, Rule
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.paths import Block, forms


class Match(NamedTuple):
    """The positions of all rules that match a path, and of its exact key."""

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
        runs: parameter rules, for all leaves in order.
        plain: position → parameter rules by the path without the LoRA module, where
            these apply.
        adapters: position of a LoRA matrix → parameter rules that match it and not its
            kernel.
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


_NO_MATCH = Match()


def match(origins: Origins, rules: RuleSet) -> Matches:
    """Find the rules of every leaf, by the paths of its origin."""
    origins = _with_blocks(origins, rules.matcher)
    return Matches(
        origins,
        runs=_runs(origins, rules),
        plain=_without_lora(origins, rules),
        adapters=_beside_kernels(origins, rules),
        state=_by_owner(origins, rules),
        alone=_by_endings(origins, rules),
    )


def _with_blocks(origins: Origins, matcher: Matcher) -> Origins:
    """Add the folded paths, where the tree was not flattened for these rules."""
    leaves = origins.leaves
    flat = leaves.flat
    if flat.blocks or not flat.paths:
        return origins
    names = list(map(matcher.fold_path, flat.paths))
    blocks = [
        Block(part.start, "", tuple(names[part.start : part.stop]))
        for part in flat.sections
    ]
    flat = dataclasses.replace(flat, blocks=blocks)
    return dataclasses.replace(origins, leaves=dataclasses.replace(leaves, flat=flat))


def _runs(origins: Origins, rules: RuleSet) -> list[Run]:
    """Match the parameter rules with each block of leaves, equal blocks once.

    Optimizer state is skipped: it follows its parameters.
    """
    flat, state, matcher = origins.leaves.flat, origins.state, rules.matcher
    known: dict[tuple[str, str], Match] = {}
    blocks: dict[object, tuple[Match, ...]] = {}
    runs: list[Run] = []
    stop, prefix, folded_prefix = 0, "", ""
    for start, folded, names in flat.blocks:
        if start >= stop:  # a new section
            section = flat.section(start)
            stop, prefix = section.stop, section.seen
            folded_prefix = matcher.fold_path(prefix)
        block = folded_prefix, folded, names
        found = blocks.get(block)
        if state is not None and all(state[start : start + len(names)]):
            found = (_NO_MATCH,) * len(names)
        elif found is None:
            made: list[Match] = []
            is_sure = True
            for at, name in enumerate(names, start):
                question = folded_prefix, folded + name
                one = known.get(question)
                if one is None:
                    asked = forms(*question)
                    positions, maybe = matcher.fold_forms(asked)
                    if maybe:  # paths that fold to this have answers of their own
                        asked = forms(prefix, flat.paths[at])
                        positions = matcher.refine_forms(asked, positions, maybe)
                        is_sure = False
                    one = _match(rules.rules, positions, asked)
                    if not maybe:
                        known[question] = one
                made.append(one)
            found = tuple(made)
            if is_sure:
                blocks[block] = found
        runs.append(Run(start, found))
    return runs


def _match(
    rules: Sequence[Rule], positions: tuple[int, ...], own: Sequence[str]
) -> Match:
    """The rules, and the one whose pattern is one of the forms of a path."""
    if not positions:
        return _NO_MATCH
    keys = {rules[at].pattern: at for at in positions}
    return Match(positions, next((keys[form] for form in own if form in keys), None))


def _without_lora(origins: Origins, rules: RuleSet) -> dict[int, Match]:
    """Match a leaf in a LoRA module by its path without the module.

    Unless a rule matches only the path with the module.
    """
    flat, matcher = origins.leaves.flat, rules.matcher
    found: dict[int, Match] = {}
    for at, path in origins.plain.items():
        own, plain = matcher.matching_forms(flat.forms(at)), flat.forms(at, path)
        positions = matcher.matching_forms(plain)
        if positions and positions != own and not _others(rules, own, [plain]):
            found[at] = _match(rules.rules, positions, plain)
    return found


def _beside_kernels(origins: Origins, rules: RuleSet) -> dict[int, Match]:
    """Of the rules that match a LoRA matrix, those that do not match its kernel."""
    flat = origins.leaves.flat
    found: dict[int, Match] = {}
    for at, adapter in origins.adapters.items():
        if adapter.kernels:
            kernel = adapter.kernels[0][0]
            paths = {flat.forms(kernel), flat.forms(kernel, origins.plain.get(kernel))}
            own = flat.forms(at)
            positions = _others(rules, rules.matcher.matching_forms(own), paths)
            found[at] = _match(rules.rules, positions, own)
    return found


def _others(
    rules: RuleSet, positions: tuple[int, ...], paths: Iterable[tuple[str, ...]]
) -> tuple[int, ...]:
    """The rules that match none of these paths, not even behind an exact key."""
    matcher = rules.matcher
    about = {
        at
        for own in paths
        for at in (
            *matcher.matching_forms(own),
            *matcher.refine_forms(own, (), positions),
        )
    }
    return tuple(at for at in positions if at not in about)


def _by_owner(origins: Origins, rules: RuleSet) -> Mapping[str, Match]:
    """The optimizer rules of each parameter, by its path, else by that without LoRA."""
    if not rules.optimizer:
        return {}
    flat, matcher = origins.leaves.flat, Matcher(rules.optimizer, rules.match)
    found: dict[str, Match] = {}
    for key, at in origins.owners.items():
        own = flat.forms(at)
        positions = matcher.matching_forms(own)
        if not positions and at in origins.plain:
            own = flat.forms(at, origins.plain[at])
            positions = matcher.matching_forms(own)
        found[key] = _match(rules.optimizer, positions, own)
    return found


def _by_endings(
    origins: Origins, rules: RuleSet
) -> dict[int, tuple[bool, tuple[int, ...]]]:
    """Match state without its parameters by the endings of its path.

    Only a rule that names every dim of the leaf applies: the leaf may lack some dims of
    its parameter, and it is unknown which.
    """
    state, leaves = origins.state, origins.leaves
    if state is None or origins.owners:
        return {}
    sections = (
        (True, rules.optimizer, Matcher(rules.optimizer, rules.match)),
        (False, rules.rules, rules.matcher),
    )

    def fitting(path: str, ndim: int) -> Iterator[tuple[bool, tuple[int, ...]]]:
        parts = path.split("/")
        for is_optimizer, section, matcher in sections:
            for start in range(len(parts)):
                matched = matcher.matching("/".join(parts[start:]))
                exact = tuple(
                    at for at in matched if _names_every_dim(section[at].layout, ndim)
                )
                is_clear = len({section[at].layout for at in exact}) == 1
                if exact and (is_clear or rules.overlap != "error"):
                    yield is_optimizer, exact

    found: dict[int, tuple[bool, tuple[int, ...]]] = {}
    for at, origin in enumerate(state):
        shape = leaves.shapes[at]
        if origin is not None and origin.owner is None and math.prod(shape) > 1:
            for first in fitting(leaves.flat.forms(at)[0], len(shape)):
                found[at] = first
                break
    return found


def _names_every_dim(layout: TensorLayout, ndim: int) -> bool:
    """Whether a layout determines the sharding of each of `ndim` dims.

    A spec such as `P(None, "model")` does so for a matrix, but not for a vector, which
    may have been either dim of one.
    """
    if layout.rank is not None or layout.is_replicated:
        return layout.is_replicated or layout.rank == ndim
    return layout.axes[-1] is ... and len(layout.axes) - 1 == ndim > 1
