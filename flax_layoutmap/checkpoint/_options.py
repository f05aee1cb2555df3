"""The options of a restore, checked."""

import dataclasses
import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from flax_layoutmap._core.errors import (
    CheckpointError,
    MeshError,
    closest,
    did_you_mean,
)
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh
from flax_layoutmap._resolve.resolve import rule_set_of
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap.checkpoint._leaves import fits_jax, is_floating, mesh_of
from flax_layoutmap.checkpoint._places import absolute

Missing = Literal["error", "keep", "init"]
Unexpected = Literal["error", "ignore"]
Rename = Sequence[tuple[re.Pattern[str], str]]

_CHOICES = {"missing": ("error", "keep", "init"), "unexpected": ("error", "ignore")}


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
            f"include={pattern.pattern!r} finds no leaf; "
            f"{_closest_paths(pattern, paths)}"
            for pattern in self.include or ()
            if not any(map(pattern.search, paths))
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The checked options of a function that restores.

    `path` is absolute, `rules` are on `mesh` if one is given, and the first pattern of
    `dtypes` that is found in a path sets the dtype of a floating-point array.
    """

    path: str
    target: Any = None
    rules: RuleSet | None = None
    mesh: DeviceMesh | None = None
    step: int | str | None = None
    item: str | None = None
    selection: Selection = Selection()
    dtypes: tuple[tuple[re.Pattern[str], Any], ...] = ()
    rename: Rename = ()
    missing: Missing = "error"
    unexpected: Unexpected = "error"
    broadcast: str | None = None
    host_memory: int | None = None
    verify: bool | None = None

    @functools.cached_property
    def job_mesh(self) -> DeviceMesh | None:
        """The mesh whose processes restore together."""
        return mesh_of(self.target, self.rules) or self.mesh

    def dtype_of(self, path: str) -> Any:
        """The requested dtype of a leaf, `"target"`, or None for the stored dtype."""
        wanted = (dtype for pattern, dtype in self.dtypes if pattern.search(path))
        return next(wanted, None)


def checked_options(
    path: str | os.PathLike[str],
    target: Any = None,
    *,
    layout_map: Any = None,
    mesh: Any = None,
    include: Any = None,
    exclude: Any = None,
    rename: Any = None,
    dtype: Any = None,
    **others: Any,
) -> Options:
    """Check the arguments of a function that restores."""
    for name, choices in _CHOICES.items():
        given = others.get(name, "error")
        if given not in choices:
            raise CheckpointError(
                f"{name}={given!r} is not a choice{did_you_mean(str(given), choices)}; "
                f"use {' or '.join(f'{name}={choice!r}' for choice in choices)}"
            )
    dtypes = tuple(
        (p, None if d is None else _dtype(d)) for p, d in _pairs("dtype", dtype)
    )
    missing = others.get("missing", "error")
    for option, is_given in (
        (f"missing={missing!r}", missing != "error"),
        ('dtype="target"', any(isinstance(wanted, str) for _, wanted in dtypes)),
    ):
        if is_given and target is None:
            raise CheckpointError(f"{option} needs a target")
    given_mesh = as_mesh(mesh)
    rules = rules_of(layout_map)
    if rules is not None and given_mesh is not None:
        rules = rules.on(given_mesh)
    return Options(
        path=absolute(path),
        target=target,
        rules=rules,
        mesh=given_mesh,
        selection=checked_selection(include, exclude),
        dtypes=dtypes,
        rename=_pairs("rename", rename),
        **others,
    )


def check_devices(function: str, options: Options) -> None:
    """Raise MeshError if there are rules or a mesh, and no devices."""
    rules = options.rules
    where = options.mesh if rules is None else rules.mesh
    if where is None and rules is None:
        return
    if where is None or where.is_abstract:
        have = "no mesh" if where is None else repr(where)
        raise MeshError(
            f"{function} needs a mesh of devices, the rules have {have}; pass "
            "mesh=flm.DeviceMesh(...)"
        )


def check_processes(mesh: DeviceMesh | None) -> None:
    """Raise MeshError if a process of the job, for which Orbax waits, has no device."""
    if mesh is None or mesh.is_abstract or jax.process_count() == 1:
        return
    there = {device.process_index for device in mesh.devices.flat}
    absent = sorted(set(range(jax.process_count())) - there)
    if absent:
        raise MeshError(
            f"{mesh!r} has no device of the processes {absent}, and all "
            f"{jax.process_count()} processes of a job restore together; use a mesh of "
            "all of them, and relayout the result"
        )


def rules_of(layout_map: Any) -> RuleSet | None:
    """The frozen rules of a `LayoutMap`; a `RuleSet` or None is returned unchanged."""
    return None if layout_map is None else rule_set_of(layout_map, "layout_map=")


def checked_selection(include: Any, exclude: Any) -> Selection:
    """Compile the patterns of `include=` and `exclude=`."""
    return Selection(_patterns("include", include), _patterns("exclude", exclude) or ())


def _patterns(option: str, given: Any) -> tuple[re.Pattern[str], ...] | None:
    if given is None:
        return None
    several = [given] if isinstance(given, str | re.Pattern) else given
    return tuple(_compiled(option, pattern) for pattern in several)


def _compiled(option: str, pattern: Any) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise CheckpointError(
            f"{option}=: {pattern!r} is not a regular expression: {error}"
        ) from error


def _pairs(option: str, given: Any) -> tuple[tuple[re.Pattern[str], Any], ...]:
    """Pairs of a pattern and a value, from such pairs, a dict, or one value for all."""
    pairs = given.items() if isinstance(given, Mapping) else given
    if pairs is None:
        return ()
    if option == "dtype" and not isinstance(given, Mapping | list | tuple):
        pairs = [("", given)]
    return tuple((_compiled(option, pattern), value) for pattern, value in pairs)


def _dtype(dtype: Any) -> Any:
    if isinstance(dtype, str) and dtype == "target":
        return dtype
    wanted = floating_dtype(dtype, f"dtype={dtype!r}")
    if not fits_jax(wanted):
        raise CheckpointError(f"dtype={wanted} needs jax_enable_x64")
    return wanted


def floating_dtype(dtype: Any, what: str) -> np.dtype[Any]:
    """Check a floating-point dtype; `what` names it in messages."""
    try:
        wanted = np.dtype(dtype)
    except TypeError as error:
        raise CheckpointError(f"{what} is not a dtype: {error}") from error
    if not is_floating(wanted):
        raise CheckpointError(
            f"dtype={wanted} is not floating-point; only floating-point arrays are "
            "converted, and only to floating-point"
        )
    return wanted


def renamed(paths: Sequence[str], rules: Rename) -> list[str]:
    """The new name of each path: the first pattern found in it is replaced.

    The new names must be distinct paths, none below another, and every pattern has to
    be found in some path.
    """
    first = {
        path: next((rule for rule in rules if rule[0].search(path)), None)
        for path in paths
    }
    for rule in rules:
        if rule not in first.values():
            raise CheckpointError(
                f"rename={rule[0].pattern!r} finds no leaf that an earlier pattern "
                f"left; {_closest_paths(rule[0], paths)}"
            )
    names: dict[str, str] = {}  # new name → path
    for path, rule in first.items():
        new = path if rule is None else _replaced(path, *rule)
        if new in names:
            raise CheckpointError(
                f"rename maps both {names[new]} and {path} to {new!r}"
            )
        if "" in new.split("/"):
            raise CheckpointError(f"rename maps {path} to {new!r}, which is not a path")
        names[new] = path
    folders = {new[: end.start()] for new in names for end in re.finditer("/", new)}
    for new in sorted(folders & names.keys()):
        raise CheckpointError(
            f"rename maps {names[new]} to {new!r}, and other leaves to paths below it, "
            f"but {new!r} is a leaf"
        )
    return list(names)


def _replaced(path: str, pattern: re.Pattern[str], by: str) -> str:
    try:
        return pattern.sub(by, path, count=1)
    except (re.error, IndexError, TypeError) as error:
        raise CheckpointError(
            f"rename={pattern.pattern!r}: {by!r} cannot replace what it finds in "
            f"{path}: {error}"
        ) from error


def _closest_paths(pattern: re.Pattern[str], paths: Sequence[str]) -> str:
    near = closest(pattern.pattern, paths[:2000], count=3) or list(paths[:3])
    return f"the closest paths are {near}"
