"""The rules of a candidate, and their text as a user writes them."""

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._resolve.resolve import resolve_origins
from flax_layoutmap._rules.records import ResolvedLeaf
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._suggest.problem import Candidate, Problem, Spec, seed_rules
from flax_layoutmap.convert._compress import compress, kinds_of
from flax_layoutmap.convert._shardings import rules_for

_WIDTH = 80


def rules_of(problem: Problem, candidate: Candidate) -> LayoutMap:
    """Few rules for a candidate."""
    made = _for_parameters(problem, candidate)
    outputs: dict[str, Any] = {}
    names: dict[str, Any] = {}
    for number, point in enumerate(problem.points):
        spec = None
        if number in (candidate.fixed or ()):
            spec = _entries(problem.point_spec(number, candidate)) or (...,)
            if spec != (...,) and not point.has_one_rank:
                spec = *spec, ...
        if point.section == "names":
            names |= dict.fromkeys(point.paths, spec or (...,))
        else:
            outputs |= dict.fromkeys(point.paths, spec)
    for kind in kinds_of(names):  # a name has to match from its start to its end
        made.names["/".join(kind.parts)] = kind.value
    for pattern, spec in compress(outputs).items():
        if spec is not None:
            made.activations[pattern] = spec
    return made


def _for_parameters(problem: Problem, candidate: Candidate) -> LayoutMap:
    mesh, batch = problem.mesh, problem.batch_of_data(candidate.batch)
    if not any(map(any, candidate.specs)):
        made = LayoutMap(mesh, batch=batch)
        made[".*"] = None
        return made
    leaves = _leaves(problem, seed_rules(mesh).freeze())
    specs = {
        path: spec
        for group, spec in zip(problem.groups, candidate.specs, strict=True)
        for path in group.paths
    }
    wanted = {
        leaf.path: TensorLayout(_entries(specs.get(full, ())), mesh)
        for full, leaf in leaves.items()
        if leaf.role != "optimizer"  # which follows its parameters
    }
    return rules_for(
        list(leaves.values()),
        wanted,
        mesh,
        lambda rules: _leaves(problem, rules).values(),
        batch,
    )


def _leaves(problem: Problem, rules: RuleSet) -> dict[str, ResolvedLeaf]:
    """Path → leaf of the state under some rules, with the path that rules see.

    Without the name of the argument, which `flm.create` does not know, unless two
    parameters have the same path within theirs.
    """
    origins = problem.lowered.layouts.origins
    flat, resolved = origins.leaves.flat, resolve_origins(origins, rules)
    own = [flat.forms(at) for at in range(len(resolved))]
    counts = collections.Counter(
        forms[-1]
        for forms, leaf in zip(own, resolved, strict=True)
        if leaf.role != "optimizer"  # which follows its parameters
    )
    return {
        leaf.path: dataclasses.replace(
            leaf, path=forms[-1] if counts[forms[-1]] == 1 else forms[0]
        )
        for forms, leaf in zip(own, resolved, strict=True)
    }


def _entries(spec: Spec) -> tuple[Any, ...] | None:
    """The entries of a layout; None: replicated."""
    if not any(spec):
        return None
    return tuple(axes[0] if len(axes) == 1 else axes or None for axes in spec)


def layout_text(spec: Spec) -> str:
    """A layout as a user writes it."""
    return _written(_entries(spec))


def as_code(rules: RuleSet) -> str:
    """The lines that make a map of these rules, of at most 80 columns if possible.

    They run where the devices of the mesh are not.
    """
    batch = rules.batch[0] if len(rules.batch) == 1 else rules.batch
    mesh = _quoted(str(rules.mesh))
    lines = [
        f"# on the devices: mesh = flm.DeviceMesh({mesh})",
        f"mesh = flm.DeviceMesh.abstract({mesh})",
        f"layout_map = flm.LayoutMap(mesh, batch={_written(batch)})",
    ]
    sections: Mapping[str, Any] = {
        "layout_map": rules.rules,
        "layout_map.activations": rules.activations,
        "layout_map.names": rules.names,
        "layout_map.optimizer": rules.optimizer,
    }
    for name, own in sections.items():
        for rule in own:
            axes = rule.layout.axes
            layout = _written(axes) if rule.layout.axis_names else "None"
            lines += _assigned(f"{name}[{_quoted(rule.pattern)}]", layout)
    return "\n".join(lines)


def _assigned(place: str, value: str) -> Iterator[str]:
    if len(place) + len(value) + 3 <= _WIDTH:
        yield f"{place} = {value}"
    else:
        yield f"{place} = \\"
        yield f"    {value}"


def _quoted(text: str) -> str:
    if '"' in text or not text.isprintable():
        return repr(text)
    return f'r"{text}"' if "\\" in text else f'"{text}"'


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        inner = ", ".join(map(_written, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return (
        "..." if value is ... else _quoted(value) if isinstance(value, str) else "None"
    )
