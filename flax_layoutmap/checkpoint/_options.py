"""The options of a restore, checked."""

import dataclasses
import functools
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from flax_layoutmap._core.errors import CheckpointError, MeshError, closest
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh
from flax_layoutmap._resolve.resolve import rule_set_of
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap.checkpoint._leaves import fits_jax, is_floating, mesh_of
from flax_layoutmap.checkpoint._places import absolute

Missing = Literal["error", "keep", "init"]
Unexpected = Literal["error", "ignore"]
Rename = Sequence[tuple[re.Pattern[str], str]]


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which leaves to restore: those that `include` finds and `exclude` does not.

    `include=None` includes every path.
    """

    include: tuple[re.Pattern[str], ...] | None = None
    exclude: tuple[re.Pattern[str], ...] = ()

    def __contains__(self, path: str) -> bool:
        included = self.include is None or any(p.search(path) for p in self.include)
        return included and not any(p.search(path) for p in self.exclude)

    def useless(self, paths: Iterable[str]) -> list[str]:
        """A problem for each pattern of `include` that finds none of the paths."""
        paths = list(paths)
        return [
            f"include={_without_leaf(pattern, paths)}"
            for pattern in self.include or ()
            if not any(map(pattern.search, paths))
        ]


class Options:
    """The checked options of a function that restores.

    The first pattern of `dtypes` that is found in a path sets the dtype of its array.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        target: Any = None,
        *,
        layout_map: Any = None,
        mesh: Any = None,
        include: Any = None,
        exclude: Any = None,
        rename: Any = None,
        dtype: Any = None,
        missing: Missing = "error",
        unexpected: Unexpected = "error",
        host_memory: Any = None,
        broadcast: str | None = None,
        verify: bool | None = None,
    ) -> None:
        _check_choice("missing", missing, ("error", "keep", "init"))
        _check_choice("unexpected", unexpected, ("error", "ignore"))
        check_bytes("host_memory", 1 if host_memory is None else host_memory)
        self.path, self.target, self.verify = absolute(path), target, verify
        self.missing, self.unexpected = missing, unexpected
        self.host_memory, self.mesh = host_memory, as_mesh(mesh)
        self.rules = rules_of(layout_map)
        if self.rules is not None and self.mesh is not None:
            self.rules = self.rules.on(self.mesh)
        self.broadcast, mesh = broadcast, self.job_mesh
        if broadcast and mesh and broadcast not in mesh.axis_names:
            raise CheckpointError(
                f"broadcast={broadcast!r} is not an axis of the mesh {str(mesh)!r}"
            )
        self.selection = checked_selection(include, exclude)
        self.rename: Rename = _pairs("rename", rename)
        if dtype is not None and not isinstance(dtype, Mapping | list | tuple):
            dtype = [("", dtype)]
        self.dtypes = [(p, _dtype(wanted)) for p, wanted in _pairs("dtype", dtype)]

    @functools.cached_property
    def job_mesh(self) -> DeviceMesh | None:
        return mesh_of(self.target, self.rules) or self.mesh

    def dtype_of(self, path: str) -> Any:
        """The requested dtype of a leaf, `"target"`, or None for the stored dtype."""
        wanted = (dtype for pattern, dtype in self.dtypes if pattern.search(path))
        return next(wanted, None)


def _check_choice(option: str, given: Any, choices: Sequence[str]) -> None:
    if given not in choices:
        raise CheckpointError(
            f"{option}={given!r}: use {' or '.join(map(repr, choices))}"
        )


def check_bytes(option: str, given: Any) -> None:
    if not isinstance(given, int | float) or given <= 0:
        raise CheckpointError(
            f"{option}={given!r} is not a number of bytes, such as {8 << 30}"
        )


def check_processes(mesh: DeviceMesh | None) -> None:
    """Raise MeshError if a mesh lacks devices of some processes."""
    if mesh is None or mesh.is_abstract or jax.process_count() == 1:
        return
    there = {device.process_index for device in mesh.devices.flat}
    if absent := set(range(jax.process_count())) - there:
        raise MeshError(
            f"{mesh!r} has no device of the processes {sorted(absent)}, and all "
            f"{jax.process_count()} processes of a job restore together; use a mesh of "
            "all of them, and relayout the result"
        )


def rules_of(layout_map: Any) -> RuleSet | None:
    """The frozen rules of a `LayoutMap`; a `RuleSet` or None is returned unchanged."""
    return None if layout_map is None else rule_set_of(layout_map, "layout_map=")


def checked_selection(include: Any, exclude: Any) -> Selection:
    return Selection(_patterns("include", include), _patterns("exclude", exclude) or ())


def _patterns(option: str, given: Any) -> tuple[re.Pattern[str], ...] | None:
    if given is None:
        return None
    is_one = isinstance(given, str) or not isinstance(given, Iterable)
    several = [given] if is_one else given
    return tuple(_compiled(option, pattern) for pattern in several)


def _compiled(option: str, pattern: Any) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise CheckpointError(
            f"{option}=: {pattern!r} is not a regular expression: {error}"
        ) from error


def _pairs(option: str, given: Any) -> tuple[tuple[re.Pattern[str], Any], ...]:
    pairs = given.items() if isinstance(given, Mapping) else given or ()
    if any(not isinstance(pair, tuple | list) or len(pair) != 2 for pair in pairs):
        raise CheckpointError(
            f"{option}={given!r}: give a dict, or a list of pairs (pattern, value)"
        )
    return tuple((_compiled(option, pattern), value) for pattern, value in pairs)


def _dtype(dtype: Any) -> Any:
    if dtype is None or (isinstance(dtype, str) and dtype == "target"):
        return dtype
    wanted = floating_dtype(dtype)
    if not fits_jax(wanted):
        raise CheckpointError(f"dtype={wanted} needs jax_enable_x64")
    return wanted


def floating_dtype(dtype: Any) -> np.dtype[Any]:
    try:
        wanted = np.dtype(dtype)
    except TypeError as error:
        raise CheckpointError(f"dtype={dtype!r} is not a dtype: {error}") from error
    if not is_floating(wanted):
        raise CheckpointError(
            f"dtype={wanted} is not floating-point; only floating-point arrays are "
            "converted, and only to floating-point"
        )
    return wanted


# ------------------------------------------------------------------------- rename


def renamed(paths: Sequence[str], rules: Rename) -> list[str]:
    """The new name of each path: the first pattern found in it is replaced."""
    new, used = dict[str, str](), set[int]()
    for path in paths:
        finds = (at for at, rule in enumerate(rules) if rule[0].search(path))
        if (at := next(finds, None)) is None:
            new[path] = path
            continue
        used.add(at)
        pattern, by = rules[at]
        try:
            new[path] = pattern.sub(by, path, count=1)
        except (re.error, IndexError, TypeError) as error:
            raise CheckpointError(
                f"rename={pattern.pattern!r}: {by!r} cannot replace what it finds in "
                f"{path}: {error}"
            ) from error
    for at in set(range(len(rules))) - used:
        raise CheckpointError(f"rename={_without_leaf(rules[at][0], paths)}")
    names = Counter(new.values())
    above = {name[: end.start()] for name in names for end in re.finditer("/", name)}
    for path, name in new.items():
        if names[name] > 1 or name in above or "" in name.split("/"):
            raise CheckpointError(
                f"rename maps {path} to {name!r}, which is not a path of its own"
            )
    return list(new.values())


def _without_leaf(pattern: re.Pattern[str], paths: Sequence[str]) -> str:
    near = closest(pattern.pattern, paths[:2000], count=3) or list(paths[:3])
    return f"{pattern.pattern!r} finds no leaf; the closest paths are {near}"
