"""What a restore was asked for, besides the target and the rules."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from flax_layoutmap._core.errors import CheckpointError, did_you_mean
from flax_layoutmap._tree.paths import Flat
from flax_layoutmap.checkpoint._leaves import fits_jax, is_floating
from flax_layoutmap.checkpoint._rename import Rename, checked_rename
from flax_layoutmap.checkpoint._selection import Selection, forms_of_parameters

Missing = Literal["error", "keep", "init"]
Unexpected = Literal["error", "ignore"]


@dataclasses.dataclass(frozen=True)
class Dtypes:
    """The dtype that each floating-point array is to have.

    Attributes:
        rules: pairs of a pattern, searched in the path, and a dtype, `"target"` or
            None for the stored one; the first that is found counts.
        forms: of parameters, the forms of the path: it is searched in each.
    """

    rules: tuple[tuple[re.Pattern[str], Any], ...]
    forms: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def of(self, path: str) -> Any:
        """A dtype, `"target"`, or None: as it is stored."""
        for pattern, dtype in self.rules:
            if any(map(pattern.search, self.forms.get(path, (path,)))):
                return dtype
        return None


@dataclasses.dataclass(frozen=True)
class Options:
    """The checked options.

    Attributes:
        selection: which leaves to restore.
        dtypes: their dtypes.
        rename: other names for the leaves of the checkpoint.
        missing: what to do about leaves that only the target has.
        unexpected: what to do about leaves that only the checkpoint has.
    """

    selection: Selection
    dtypes: Dtypes
    rename: Rename
    missing: Missing
    unexpected: Unexpected

    def among(self, flat: Flat) -> "Options":
        """The same, for the leaves of a tree."""
        forms = {**self.dtypes.forms, **forms_of_parameters(flat)}
        return dataclasses.replace(
            self,
            selection=self.selection.among(flat),
            dtypes=dataclasses.replace(self.dtypes, forms=forms),
        )


def checked_options(
    target: Any,
    include: Any,
    exclude: Any,
    rename: Any,
    dtype: Any,
    missing: Any,
    unexpected: Any,
) -> Options:
    """Checks what `restore` and `plan` are given.

    Raises:
        CheckpointError: one of them cannot be.
    """
    _one_of("missing", missing, ("error", "keep", "init"))
    _one_of("unexpected", unexpected, ("error", "ignore"))
    if missing != "error" and target is None:
        raise CheckpointError(
            f"missing={missing!r} needs a target, which says what could be missing"
        )
    return Options(
        Selection(include, exclude),
        _dtypes(dtype, target),
        checked_rename(rename),
        missing,
        unexpected,
    )


def _one_of(name: str, given: Any, choices: tuple[str, ...]) -> None:
    if given not in choices:
        known = " or ".join(f"{name}={choice!r}" for choice in choices)
        raise CheckpointError(
            f"{name}={given!r} is none of the choices"
            f"{did_you_mean(str(given), choices)}; use {known}"
        )


def _dtypes(given: Any, target: Any) -> Dtypes:
    if given is None:
        return Dtypes(())
    several = isinstance(given, Mapping) or (
        isinstance(given, list | tuple)
        and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in given)
    )
    if not several:
        return Dtypes(((re.compile(""), _dtype(given, target)),))
    pairs = given.items() if isinstance(given, Mapping) else given
    rules = []
    for pattern, dtype in pairs:
        try:
            compiled = re.compile(pattern)
        except (re.error, TypeError) as error:
            raise CheckpointError(
                f"dtype={{{pattern!r}: …}}: not a regular expression: {error}"
            ) from error
        rules.append((compiled, None if dtype is None else _dtype(dtype, target)))
    return Dtypes(tuple(rules))


def _dtype(dtype: Any, target: Any) -> Any:
    if isinstance(dtype, str) and dtype == "target":
        if target is None:
            raise CheckpointError(
                'dtype="target" needs a target; without one name the dtype itself'
            )
        return dtype
    try:
        wanted = np.dtype(dtype)
    except TypeError as error:
        raise CheckpointError(f"dtype={dtype!r} is no dtype: {error}") from error
    if not is_floating(wanted):
        raise CheckpointError(
            f"dtype={wanted} is not floating-point; only floating-point arrays are "
            "converted, and only to floating-point"
        )
    if not fits_jax(wanted):
        raise CheckpointError(f"dtype={wanted} needs jax_enable_x64")
    return wanted
