"""The options of a restore: one frozen, validated value."""

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np

from flax_layoutmap._core.errors import CheckpointError, closest, did_you_mean
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh
from flax_layoutmap._resolve.resolve import rule_set_of
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.paths import Flat
from flax_layoutmap.checkpoint._leaves import fits_jax, is_floating, mesh_of
from flax_layoutmap.checkpoint._places import absolute
from flax_layoutmap.checkpoint._rename import Rename, checked_rename

Missing = Literal["error", "keep", "init"]
Unexpected = Literal["error", "ignore"]

_CHOICES = {
    "missing": ("error", "keep", "init"),
    "unexpected": ("error", "ignore"),
    "strategy": ("auto", "direct", "aligned", "broadcast"),
}


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which leaves to restore: those that `include` finds and `exclude` does not.

    A pattern finds a parameter, as a rule does, if it is in one of the forms of its
    path; anything else by its whole path, so that `^step$` is no step of an optimizer.

    Attributes:
        include: patterns of which one must be found; None: every path is included.
        exclude: patterns of which none may be found.
        forms: path of a parameter below a prefix → its forms.
    """

    include: tuple[re.Pattern[str], ...] | None = None
    exclude: tuple[re.Pattern[str], ...] = ()
    forms: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def among(self, flat: Flat) -> "Selection":
        """The same, with the forms of the paths of a tree."""
        full = flat.full_paths()
        new = {
            full[at]: section.forms(flat.paths[at])
            for section in flat.sections
            if section.role == "parameter" and section.prefix
            for at in range(section.start, section.stop)
        }
        return dataclasses.replace(self, forms={**self.forms, **new})

    @property
    def is_everything(self) -> bool:
        """Whether nothing is left out."""
        return self.include is None and not self.exclude

    def __contains__(self, path: str) -> bool:
        included = self.include is None or self.finds_any(self.include, path)
        return included and not self.finds_any(self.exclude, path)

    def finds_any(self, patterns: Iterable[re.Pattern[str]], path: str) -> bool:
        """Whether one of the patterns is found in one of the forms of a path."""
        forms = self.forms.get(path, (path,))
        return any(pattern.search(form) for pattern in patterns for form in forms)

    def useless(self, paths: Iterable[str]) -> list[str]:
        """A problem for each pattern of `include` that finds none of the paths."""
        paths = list(paths)
        return [
            f"include={pattern.pattern!r} finds no leaf; the closest paths are "
            f"{closest(pattern.pattern, paths[:2000], count=3) or paths[:3]}"
            for pattern in self.include or ()
            if not any(self.finds_any([pattern], path) for path in paths)
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `restore`, `plan`, `resolve` or `restore_safetensors`.

    Attributes:
        path: the checkpoint, absolute.
        target: what to restore into; None: a nested dict.
        rules: the rules, on `mesh` where one is given; None without `layout_map`.
        mesh: the mesh for the rules; None: theirs.
        step: which step of a directory of steps.
        item: which of several trees.
        selection: which leaves to restore.
        dtypes: pairs of a pattern and the dtype of the floating-point arrays that it
            finds, `"target"` or None for the stored one; the first that is found
            counts.
        rename: other names for the leaves of the checkpoint.
        missing: what to do about leaves that only the target has.
        unexpected: what to do about leaves that only the checkpoint has.
        strategy: how to read, or `"auto"`.
        host_memory: bytes that the arrays being read may take on the host.
        devices_per_process: how many devices of an abstract mesh each process has.
        verify: whether checksums are compared; None: where there are any.
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
    strategy: str = "auto"
    host_memory: int | None = None
    devices_per_process: int | None = None
    verify: bool | None = None

    @property
    def job_mesh(self) -> DeviceMesh | None:
        """The mesh whose processes restore together."""
        return mesh_of(self.target, self.rules) or self.mesh

    def among(self, flat: Flat) -> "Options":
        """The same, for the leaves of a tree."""
        return dataclasses.replace(self, selection=self.selection.among(flat))

    def dtype_of(self, path: str) -> Any:
        """The dtype wanted for a leaf, `"target"`, or None: as it is stored."""
        for pattern, dtype in self.dtypes:
            if self.selection.finds_any([pattern], path):
                return dtype
        return None


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
    """Check the arguments of a function that restores; the rest are `Options`' own.

    Raises:
        CheckpointError: one of them is not valid.
        RuleError: `layout_map` is none.
    """
    for name, choices in _CHOICES.items():
        if others.get(name, choices[0]) not in choices:
            raise CheckpointError(_no_choice(name, others[name], choices))
    missing = others.get("missing", "error")
    if missing != "error" and target is None:
        raise CheckpointError(
            f"missing={missing!r} needs a target, which says what could be missing"
        )
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
        dtypes=_dtypes(dtype, target),
        rename=checked_rename(rename),
        **others,
    )


def rules_of(layout_map: Any) -> RuleSet | None:
    """The frozen rules of a `LayoutMap`; a `RuleSet` or None as it is.

    Raises:
        RuleError: it is none of these.
    """
    return None if layout_map is None else rule_set_of(layout_map, "layout_map=")


def checked_selection(include: Any, exclude: Any) -> Selection:
    """Compile the patterns of `include=` and `exclude=`.

    Raises:
        CheckpointError: a pattern is no regular expression.
    """
    return Selection(_patterns("include", include), _patterns("exclude", exclude) or ())


def _patterns(name: str, given: Any) -> tuple[re.Pattern[str], ...] | None:
    if given is None:
        return None
    several = [given] if isinstance(given, str | re.Pattern) else list(given)
    try:
        return tuple(re.compile(pattern) for pattern in several)
    except (re.error, TypeError) as error:
        raise CheckpointError(
            f"{name}={given!r} is neither a regular expression nor a list of some: "
            f"{error}"
        ) from error


def _no_choice(name: str, given: Any, choices: tuple[str, ...]) -> str:
    known = " or ".join(f"{name}={choice!r}" for choice in choices)
    return (
        f"{name}={given!r} is none of the choices{did_you_mean(str(given), choices)}; "
        f"use {known}"
    )


def _dtypes(given: Any, target: Any) -> tuple[tuple[re.Pattern[str], Any], ...]:
    if given is None:
        return ()
    several = isinstance(given, Mapping) or (
        isinstance(given, list | tuple)
        and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in given)
    )
    if not several:
        return ((re.compile(""), _dtype(given, target)),)
    pairs = given.items() if isinstance(given, Mapping) else given
    found = []
    for pattern, dtype in pairs:
        try:
            compiled = re.compile(pattern)
        except (re.error, TypeError) as error:
            raise CheckpointError(
                f"dtype={{{pattern!r}: …}}: not a regular expression: {error}"
            ) from error
        found.append((compiled, None if dtype is None else _dtype(dtype, target)))
    return tuple(found)


def _dtype(dtype: Any, target: Any) -> Any:
    if isinstance(dtype, str) and dtype == "target":
        if target is None:
            raise CheckpointError(
                'dtype="target" needs a target; without one name the dtype itself'
            )
        return dtype
    wanted = floating_dtype(dtype, f"dtype={dtype!r}")
    if not fits_jax(wanted):
        raise CheckpointError(f"dtype={wanted} needs jax_enable_x64")
    return wanted


def floating_dtype(dtype: Any, what: str) -> np.dtype[Any]:
    """A floating-point dtype.

    Args:
        dtype: what a user gave for one.
        what: what it is called in messages.

    Raises:
        CheckpointError: it is none.
    """
    try:
        found = np.dtype(dtype)
    except TypeError as error:
        raise CheckpointError(f"{what} is no dtype: {error}") from error
    if not is_floating(found):
        raise CheckpointError(
            f"dtype={found} is not floating-point; only floating-point arrays are "
            "converted, and only to floating-point"
        )
    return found
