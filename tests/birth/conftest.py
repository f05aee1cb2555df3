"""The two ways to make a model in its shards."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

import flax_layoutmap as flm

Born = Callable[..., Any]


@pytest.fixture(params=["create", "scope"])
def born(request: pytest.FixtureRequest) -> Born:
    """`born(make, layout_map, *args)` → what the constructor makes, laid out."""
    if request.param == "create":
        return flm.create

    def in_scope(make: Callable[..., Any], layout_map: Any, *args: Any) -> Any:
        with flm.layout_map_scope(layout_map):
            model = make(*args)
        return model

    return in_scope


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """One entry for each program that XLA has compiled."""
    seen: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)
