"""Models of two layers with published sizes, and the published tables for them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

Table = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and the tables that its preset is compared with.

    Attributes:
        family: the preset.
        model: what the model is.
        make: makes it: a function of `nnx.Rngs`, called with shapes only.
        mesh: axes and sizes.
        tables: source → its table, and where its code puts the residual stream (None:
            it leaves that to XLA).
        variant: the variant of the preset that `flm.presets.detect` takes for it.
        length: positions of a sequence.
        tokens: source → where it puts the tokens of experts, `(experts, batch, …)`.
        inputs: size of the batch → shapes of what the model is called with, for a model
            that does not predict the next token.
    """

    family: str
    model: str
    make: Callable[..., Any]
    mesh: str
    tables: Mapping[str, tuple[Table, Any]]
    variant: str | None = None
    length: int = 2048
    tokens: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inputs: Callable[[int], tuple[Any, ...]] | None = None
