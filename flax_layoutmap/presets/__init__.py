"""Rules for known model families, and for any model.

`flm.presets.llama(mesh)` is `flm.presets.load("llama", mesh)`; the same works for every
name in `flm.presets.names()`.
"""

import functools
from typing import Any

from flax_layoutmap._core.errors import did_you_mean
from flax_layoutmap.presets._families import detect, family_of, load, names
from flax_layoutmap.presets._fsdp import fsdp, zero1

__all__ = ["detect", "family_of", "fsdp", "load", "names", "zero1"]


def __getattr__(name: str) -> Any:
    """The preset of a family, as a function of the mesh."""
    if name in names():
        return functools.partial(load, name)
    raise AttributeError(
        f"flm.presets has no {name!r}{did_you_mean(name, [*names(), *__all__])}"
    )


def __dir__() -> list[str]:
    return [*__all__, *names()]
