"""Stage "match": which rules match which leaf; the only stage that uses patterns."""

import dataclasses
from collections.abc import Mapping, Sequence

from flax_layoutmap._resolve.optimizer_state import Origins
from flax_layoutmap._rules.matching import MatchedRules, Matcher
from flax_layoutmap._rules.rules import RuleSet


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


def match(origins: Origins, rules: RuleSet) -> Matches:
    """Find the rules of every leaf, by the paths of its origin."""
    matcher = rules.matcher
    return Matches(
        origins,
        _by_path(origins, matcher),
        plain=_without_lora(origins, matcher),
        adapters=_beside_kernels(origins, matcher),
        state=_by_owner(origins, rules) if rules.optimizer else {},
    )


def _by_path(origins: Origins, matcher: Matcher) -> list[MatchedRules]:
    """The parameter rules of each leaf; of similar paths in a section, one is tried."""
    flat, none = origins.leaves.flat, MatchedRules()
    state = origins.state or [None] * len(flat.paths)
    matched: list[MatchedRules] = []
    for start, stop, *_ in flat.sections:
        if all(state[start:stop]):
            matched += [none] * (stop - start)
            continue
        similar = matcher.similar(flat.paths[start:stop])
        tried = dict(zip(similar, range(start, stop), strict=True))
        known = {path: matcher.match(flat.forms(at)) for path, at in tried.items()}
        matched += map(known.__getitem__, similar)
    for at in flat.others:
        matched[at] = _match(matcher, flat.forms_of_names(at))
    for at, origin in enumerate(origins.state or ()):
        if origin is not None:
            matched[at] = none
    return matched


def _match(matcher: Matcher, names: Sequence[tuple[str, ...]]) -> MatchedRules:
    """The rules of a leaf by all its names; two keys of a shared Variable conflict."""
    matches = list(map(matcher.match, names))
    keys = {match.key for match in matches if match.key is not None}
    if len(keys) > 1:
        return MatchedRules(tuple(sorted(keys)))
    matched = {at for match in matches for at in match.rules}
    return MatchedRules(tuple(sorted(matched)), next(iter(keys), None))


def _without_lora(origins: Origins, matcher: Matcher) -> dict[int, MatchedRules]:
    """Match a leaf in a LoRA module by its path without the module.

    Unless a rule matches only the path with the module.
    """
    flat = origins.leaves.flat
    matches: dict[int, MatchedRules] = {}
    for at, path in origins.plain.items():
        plain = flat.forms(at, path)
        inside, unwrapped = matcher.match(flat.forms(at)).rules, matcher.match(plain)
        if unwrapped.rules not in ((), inside):
            if {*inside} <= {*matcher.matching_patterns(plain)}:
                matches[at] = unwrapped
    return matches


def _beside_kernels(origins: Origins, matcher: Matcher) -> dict[int, MatchedRules]:
    """Of the rules that match a LoRA matrix, those that do not match its kernel."""
    flat = origins.leaves.flat
    matches: dict[int, MatchedRules] = {}
    for at, kernels in origins.adapters.items():
        if kernels:
            kernel = kernels[0][0]
            about = {
                position
                for path in (None, origins.plain.get(kernel))
                for position in matcher.matching_patterns(flat.forms(kernel, path))
            }
            positions, key = matcher.match(flat.forms(at))
            kept = tuple(position for position in positions if position not in about)
            matches[at] = MatchedRules(kept, key if key in kept else None)
    return matches


def _by_owner(origins: Origins, rules: RuleSet) -> dict[str, MatchedRules]:
    """The optimizer rules of each parameter, by its path, else by that without LoRA."""
    flat, matcher = origins.leaves.flat, rules.matcher_of("optimizer")
    matches: dict[str, MatchedRules] = {}
    for key, at in origins.owners.items():
        matches[key] = _match(matcher, flat.forms_of_names(at))
        if not matches[key].rules and at in origins.plain:
            matches[key] = matcher.match(flat.forms(at, origins.plain[at]))
    return matches
