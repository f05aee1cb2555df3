"""Stage "match": which rules match which leaf; the only stage that uses patterns."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flax_layoutmap._resolve.origins import Origins
from flax_layoutmap._rules.matching import Matcher
from flax_layoutmap._rules.rules import RuleSet


class MatchedRules(NamedTuple):
    """The positions of all rules that match a path, and of its exact key."""

    rules: tuple[int, ...] = ()
    key: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Matches:
    """Which rules match which leaf; patterns are not used afterwards.

    Attributes:
        parameters: the parameter rules of each leaf, in order; optimizer state has
            none, as it follows its parameters.
        plain: position → parameter rules by the path without the LoRA module, where
            these apply.
        adapters: position of a LoRA matrix → parameter rules that match it and not its
            kernel.
        state: key of a parameter → the optimizer rules that match it.
    """

    origins: Origins
    parameters: Sequence[MatchedRules]
    plain: Mapping[int, MatchedRules]
    adapters: Mapping[int, MatchedRules]
    state: Mapping[str, MatchedRules]


_NO_MATCH = MatchedRules()


def match(origins: Origins, rules: RuleSet) -> Matches:
    """Find the rules of every leaf, by the paths of its origin."""
    flat, state = origins.leaves.flat, origins.state
    parameters = [
        _match(rules.matcher, section.forms(flat.paths[at]))
        if state is None or not state[at]
        else _NO_MATCH
        for section in flat.sections
        for at in range(section.start, section.stop)
    ]
    return Matches(
        origins,
        parameters,
        plain=_without_lora(origins, rules),
        adapters=_beside_kernels(origins, rules),
        state=_by_owner(origins, rules) if rules.optimizer else {},
    )


def _match(matcher: Matcher, forms: tuple[str, ...]) -> MatchedRules:
    positions = matcher.matching_forms(forms)
    if not positions:
        return _NO_MATCH
    keys = (at for at in matcher.keys(forms) if at in positions)
    return MatchedRules(positions, next(keys, None))


def _without_lora(origins: Origins, rules: RuleSet) -> dict[int, MatchedRules]:
    """MatchedRules a leaf in a LoRA module by its path without the module.

    Unless a rule matches only the path with the module.
    """
    flat, matcher = origins.leaves.flat, rules.matcher
    matches: dict[int, MatchedRules] = {}
    for at, path in origins.plain.items():
        inside, plain = flat.forms(at), flat.forms(at, path)
        positions = matcher.matching_forms(inside)
        unwrapped = _match(matcher, plain)
        if unwrapped.rules and unwrapped.rules != positions:
            if {*positions} <= {*matcher.matching_patterns(plain)}:
                matches[at] = unwrapped
    return matches


def _beside_kernels(origins: Origins, rules: RuleSet) -> dict[int, MatchedRules]:
    """Of the rules that match a LoRA matrix, those that do not match its kernel."""
    flat, matcher = origins.leaves.flat, rules.matcher
    matches: dict[int, MatchedRules] = {}
    for at, adapter in origins.adapters.items():
        if adapter.kernels:
            kernel = adapter.kernels[0][0]
            about = {
                *matcher.matching_patterns(flat.forms(kernel)),
                *matcher.matching_patterns(
                    flat.forms(kernel, origins.plain.get(kernel))
                ),
            }
            positions, key = _match(matcher, flat.forms(at))
            kept = tuple(at for at in positions if at not in about)
            matches[at] = MatchedRules(kept, key if key in kept else None)
    return matches


def _by_owner(origins: Origins, rules: RuleSet) -> dict[str, MatchedRules]:
    """The optimizer rules of each parameter, by its path, else by that without LoRA."""
    flat, matcher = origins.leaves.flat, rules.matcher_of("optimizer")
    matches: dict[str, MatchedRules] = {}
    for key, at in origins.owners.items():
        matches[key] = _match(matcher, flat.forms(at))
        if not matches[key].rules and at in origins.plain:
            plain = flat.forms(at, origins.plain[at])
            matches[key] = _match(matcher, plain)
    return matches
