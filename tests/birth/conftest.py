"""The two ways to make a model in its shards."""

from collections.abc import Callable
from typing import Any

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
