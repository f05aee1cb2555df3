"""The values of a file of rules: layouts, meshes, patterns."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from flax_layoutmap._core.errors import RuleError, did_you_mean
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._rules.pattern_cost import (
    MOST_STEPS_TOGETHER,
    QUICKER,
    USUAL_PATH,
    slow_because,
    steps_of,
)
from flax_layoutmap._rules.rules import RankPolicy, Rule
from flax_layoutmap._rules.serialise import mesh_from_json

# What stands for None, for any number of dims, and for a layout without axes.
NOTHING, ANY_DIMS, REPLICATED = "-", "...", "replicated"

_ENTRY_KEYS = {"axes", "rank", "memory_kind", "mesh"}


def mesh_of(value: Any) -> DeviceMesh | None:
    if value is None or isinstance(value, str):
        return None if value is None else DeviceMesh.abstract(value)
    if not isinstance(value, dict) or set(value) - {
        "axis_names",
        "shape",
        "axis_types",
    }:
        raise RuleError(f'write it as "data=2,model=4", got {short(value)}')
    if not {"axis_names", "shape"} <= set(value):
        raise RuleError(f"it needs axis_names and shape, got {short(value)}")
    return mesh_from_json({"axis_types": "auto", **value})


def slow_together(sections: Mapping[str, Sequence[Rule]]) -> str | None:
    """Says that all patterns together may take too long, and which take the most."""
    steps = {
        rule.pattern: steps_of(rule.pattern)
        for rules in sections.values()
        for rule in rules
    }
    if sum(steps.values()) <= MOST_STEPS_TOGETHER:
        return None
    worst = sorted(steps, key=lambda pattern: -steps[pattern])[:5]
    return (
        f"together the patterns may take {sum(steps.values()):.1e} steps on a path of "
        f"{USUAL_PATH} characters, more than {MOST_STEPS_TOGETHER:.0e}; the slowest "
        f'are {worst}: write [^/]+ in place of ".*", and drop ".*" at the ends'
    )


def rule_of(pattern: str, value: Any, mesh: DeviceMesh | None, moved: bool) -> Rule:
    given = value if isinstance(value, dict) else {"axes": value}
    for key in given:
        if key not in _ENTRY_KEYS:
            near = difflib.get_close_matches(key, sorted(_ENTRY_KEYS), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else _QUOTES
            raise RuleError(f"unknown key {key!r}{hint}")
    if "axes" not in given:
        raise RuleError('it has no axes; write axes = ["-", "model"]')
    rank = given.get("rank", "error")
    if rank not in get_args(RankPolicy):
        raise RuleError(
            f'rank must be "error" or "skip", got {short(rank)}'
            f"{did_you_mean(str(rank), get_args(RankPolicy))}"
        )
    kind = given.get("memory_kind")
    if not isinstance(kind, str | None):
        raise RuleError(f"memory_kind must be a name, got {short(kind)}")
    own = mesh_of(given["mesh"]) if "mesh" in given and not moved else mesh
    layout = TensorLayout(axes_of(given["axes"]), own, memory_kind=kind)
    rule = Rule(pattern, layout, rank=rank)
    slow = slow_because(pattern)
    if slow is not None:
        raise RuleError(f"the pattern may take very long to try: {slow}; {QUICKER}")
    return rule


# `up.kernel = …` is a table `up` to TOML.
_QUOTES = "; a pattern with a '.' in it needs quotes"


def axes_of(value: Any) -> Any:
    """The axes of a layout: `"-"` is None, `"..."` any number of dims."""
    if value == REPLICATED:
        return None
    if not isinstance(value, list):
        raise RuleError(
            f'axes must be a list such as ["-", "model"], or "replicated", got '
            f"{short(value)}"
        )
    dims: list[Any] = []
    for dim in value:
        if isinstance(dim, list) and all(isinstance(axis, str) for axis in dim):
            dims.append(tuple(dim))
        elif dim is None or dim == NOTHING:
            dims.append(None)
        elif isinstance(dim, str):
            dims.append(... if dim == ANY_DIMS else dim)
        else:
            raise RuleError(
                f"a dim is an axis, a list of axes, {NOTHING!r} (not sharded) or "
                f"{ANY_DIMS!r} (any number of dims), got {short(dim)}"
            )
    return tuple(dims)


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:76]} …"
