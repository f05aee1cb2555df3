"""The result of flm.suggest does not depend on names, nor on their order."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import flax_layoutmap as flm

# The parts of a layer of attention, whose kernels have one shape, and of an MLP.
SHAPES = {
    **dict.fromkeys(("query", "key", "value", "out"), (1024, 1024)),
    **dict.fromkeys(("gate", "up"), (1024, 4096)),
    "down": (4096, 1024),
}
NAMES = ("g", "7", "up", "query", "b_c", "Z", "a")


def found_with(names: dict[str, str]) -> tuple[Any, ...]:
    """Cost and layouts, with other names of the parts in the order of the names."""

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            own = {part: params[name] for part, name in names.items()}
            query, key, value = (x @ own[part] for part in ("query", "key", "value"))
            mixed = x + jnp.tanh(query * key + value) @ own["out"]
            wide = jnp.tanh(mixed @ own["gate"]) * (mixed @ own["up"])
            return ((mixed + wide @ own["down"]) ** 2).mean()

        return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params))

    params = {
        names[part]: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for part, shape in SHAPES.items()
    }
    x = jax.ShapeDtypeStruct((1 << 14, 1024), jnp.bfloat16)
    options: Any = {"mesh": "data=4,tensor=4", "hbm": 1 << 28, "check": False}
    found = flm.suggest(step, params, x, donate_argnames="params", **options)
    layouts = {part: found.layout_map[name] for part, name in names.items()}
    return found.cost, layouts, [step.seconds for step in found.trail]


@pytest.fixture(scope="module")
def first() -> tuple[Any, ...]:
    return found_with({part: part for part in SHAPES})


@settings(max_examples=4, deadline=None, phases=[Phase.generate])
@given(names=st.permutations(NAMES))
def test_names_do_not_count(names: list[str], first: tuple[Any, ...]) -> None:
    assert found_with(dict(zip(SHAPES, names, strict=True))) == first
