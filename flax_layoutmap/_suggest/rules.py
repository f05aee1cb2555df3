"""The rules of a layout."""

import collections
import re
from collections.abc import Mapping
from typing import Any

from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._suggest.candidates import Axes, Candidate, Spec
from flax_layoutmap._suggest.classes import StepDims
from flax_layoutmap.convert._compress import compress


def rules_of(dims: StepDims, candidate: Candidate, mesh: DeviceMesh) -> LayoutMap:
    """Few rules for a layout."""
    rules = LayoutMap(mesh, batch=candidate.batch)
    if not any(map(any, candidate.specs)):
        rules[".*"] = None
    else:
        patterns = compress(_specs_of_paths(dims, candidate))
        rules.update({p: _entries(spec) for p, spec in patterns.items() if spec != ()})
    modules: dict[str, Spec] = {}
    for output, spec in zip(dims.outputs, candidate.outputs, strict=True):
        if output.section == "names":
            rules.names[re.escape(output.paths[0])] = _entries(spec) or (...,)
        else:
            modules[output.paths[0]] = spec
    rules.activations.update(_activations(modules, candidate.batch))
    return rules


def _specs_of_paths(dims: StepDims, candidate: Candidate) -> dict[str, Spec]:
    """Path → spec; `()` for what is small, so that it needs no rule.

    Without the name of the argument, which neither `flm.create` nor optimizer state
    knows, unless two parameters with the same path within theirs differ.
    """
    specs: dict[str, Spec] = {
        path: () if arrays.is_small else spec
        for arrays, spec in zip(dims.parameters, candidate.specs, strict=True)
        for path in arrays.paths
    }
    inner = collections.defaultdict(set)
    for path, spec in specs.items():
        inner[path.partition("/")[2]].add(spec)
    inner[""] = set()  # of an argument that is an array
    return {
        end if len(inner[end := path.partition("/")[2]]) == 1 else path: spec
        for path, spec in specs.items()
    }


def _activations(modules: Mapping[str, Spec], batch: Axes) -> dict[str, Any]:
    """Pattern → layout of outputs: one where rows alone are split, else for layers."""
    if not modules or not batch:
        return {}
    if all(spec and spec[0] and not any(spec[1:]) for spec in modules.values()):
        return {".*": (batch, ...)}
    entries = {p: _entries(s) if _is_layer(p) else None for p, s in modules.items()}
    return {p: value for p, value in compress(entries).items() if value is not None}


def _is_layer(path: str) -> bool:
    is_inside = re.search(r"\d/", path) is not None
    return bool(path) and not is_inside and (path.count("/") < 2 or path[-1].isdigit())


def _entries(spec: Spec) -> Any:
    """The entries of a layout; None: replicated."""
    if not any(spec):
        return None
    return tuple(axes[0] if len(axes) == 1 else axes or None for axes in spec)
