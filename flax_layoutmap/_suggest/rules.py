"""The rules of a layout, and their text as a user writes them."""

import collections
import re
from collections.abc import Mapping
from typing import Any

from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._suggest.candidates import Candidate, Spec
from flax_layoutmap._suggest.classes import StepDims
from flax_layoutmap.convert._compress import compress


def rules_of(dims: StepDims, candidate: Candidate, mesh: DeviceMesh) -> LayoutMap:
    """Few rules for a layout."""
    rules = LayoutMap(mesh, batch=candidate.batch)
    if not any(map(any, candidate.specs)):
        rules[".*"] = None
    for pattern, (spec, is_small) in compress(_parameters(dims, candidate)).items():
        if any(map(any, candidate.specs)) and not is_small:
            rules[pattern] = _entries(spec)
    modules: dict[str, Spec] = {}
    for output, spec in zip(dims.outputs, candidate.outputs, strict=True):
        if output.section == "names":
            rules.names[re.escape(output.path)] = _entries(spec) or (...,)
        else:
            modules[output.path] = spec
    rules.activations.update(_activations(modules, candidate.batch))
    return rules


def _parameters(dims: StepDims, candidate: Candidate) -> dict[str, tuple[Spec, bool]]:
    """Path → spec, and whether it is small, so that it needs no rule.

    Without the name of the argument, which neither `flm.create` nor optimizer state
    knows, unless two parameters with the same path within theirs differ.
    """
    full = {
        path: (spec, group.is_small)
        for group, spec in zip(dims.groups, candidate.specs, strict=True)
        for path in group.paths
    }
    inner = collections.defaultdict(set)
    for path, value in full.items():
        inner[path.partition("/")[2]].add(value)
    is_alike = {path: path and len(values) == 1 for path, values in inner.items()}
    return {
        end if is_alike[end := path.partition("/")[2]] else path: value
        for path, value in full.items()
    }


def _activations(modules: Mapping[str, Spec], batch: tuple[str, ...]) -> dict[str, Any]:
    """Pattern → layout for the outputs of modules.

    One rule for all where all are split by rows alone; else rules for those that are
    not inside of a layer.
    """
    if not modules or not batch:
        return {}
    if all(spec and spec[0] and not any(spec[1:]) for spec in modules.values()):
        return {".*": (batch, ...)}
    parts = {
        path: _entries(spec) if _is_part(path) else None
        for path, spec in modules.items()
    }
    patterns = compress(parts)
    return {text: entries for text, entries in patterns.items() if entries is not None}


def _is_part(path: str) -> bool:
    """Whether a module is a layer, or stands beside layers."""
    is_inside = re.search(r"\d/", path) is not None
    return bool(path) and not is_inside and (path.count("/") < 2 or path[-1].isdigit())


def _entries(spec: Spec) -> Any:
    """The entries of a layout; None: replicated."""
    if not any(spec):
        return None
    return tuple(axes[0] if len(axes) == 1 else axes or None for axes in spec)


def as_code(rules: RuleSet) -> list[str]:
    """The lines that make a map of these rules; they run without the devices."""
    batch = rules.batch[0] if len(rules.batch) == 1 else rules.batch
    mesh = _quoted(str(rules.mesh))
    lines = [
        f"# on the devices: mesh = flm.DeviceMesh({mesh})",
        f"mesh = flm.DeviceMesh.abstract({mesh})",
        f"layout_map = flm.LayoutMap(mesh, batch={_written(batch)})",
    ]
    sections = {
        "layout_map": rules.rules,
        "layout_map.activations": rules.activations,
        "layout_map.names": rules.names,
        "layout_map.optimizer": rules.optimizer,
    }
    for section, members in sections.items():
        for rule in members:
            axes = rule.layout.axes if rule.layout.axis_names else None
            lines.append(f"{section}[{_quoted(rule.pattern)}] = {_written(axes)}")
    return lines


def _quoted(text: str) -> str:
    if '"' in text or not text.isprintable():
        return repr(text)
    return f'r"{text}"' if "\\" in text else f'"{text}"'


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        inner = ", ".join(map(_written, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return "..." if value is ... else _quoted(value) if value else "None"
