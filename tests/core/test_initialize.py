"""list_devices, get_device_count and initialize: Keras's arguments and defaults."""

from typing import Any

import jax
import pytest
from helpers import run_python

import flax_layoutmap as flm

VARIABLES = {
    "KERAS_DISTRIBUTION_JOB_ADDRESSES": "10.0.0.1:1234,10.0.0.2:2345",
    "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
    "KERAS_DISTRIBUTION_PROCESS_ID": "1",
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What `jax.distributed.initialize` was called with."""
    seen: list[tuple[Any, ...]] = []

    def initialize(*args: Any, **options: Any) -> None:
        seen.append((*args, options))

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return seen


def test_devices() -> None:
    assert flm.keras.list_devices() == [f"cpu:{number}" for number in range(8)]
    assert flm.keras.list_devices("CPU") == flm.keras.list_devices()
    assert flm.keras.get_device_count() == flm.keras.get_device_count("cpu") == 8
    for function in (flm.keras.list_devices, flm.keras.get_device_count):
        with pytest.raises(flm.errors.MeshError, match="type 'npu'.*uses 'cpu'"):
            function("npu")


def test_what_jax_is_given(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    at = "10.0.0.1:1234"
    flm.keras.initialize()
    flm.keras.initialize(at, 4, 3, initialization_timeout=5)
    flm.keras.initialize(f"{at}, 10.0.0.2:2345", process_id=0)
    flm.keras.initialize(at, 2)  # only JAX finds out whether this is process 0
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    flm.keras.initialize()
    flm.keras.initialize(process_id=0)  # an argument counts more
    assert calls == [
        (None, None, None, {}),
        (at, 4, 3, {"initialization_timeout": 5}),
        (at, 2, 0, {}),
        (at, 2, None, {}),
        (at, 2, 1, {}),
        (at, 2, 0, {}),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a:1,b:2", 3, 0), "a:1: 2 addresses for 3 processes"),
        (("a:1", 2, 2), "process_id is 2, not one of 0 to 1"),
        (("localhost:http", 2, 0), "an address is .*, got 'localhost:http'"),
        (("a:1", 2), "at a:1: invalid literal for int.*'first'"),
    ],
)
def test_what_does_not_fit(
    calls: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    arguments: Any,
    message: str,
) -> None:
    monkeypatch.setenv("KERAS_DISTRIBUTION_PROCESS_ID", "first")
    with pytest.raises(flm.errors.ProcessError, match=message):
        flm.keras.initialize(*arguments)
    assert not calls


def test_without_a_cluster() -> None:
    """JAX's own words, with what to do."""
    code = """
import flax_layoutmap as flm
flm.keras.initialize(cluster_detection_method="deactivate")
"""
    with pytest.raises(AssertionError, match="coordinator_address should be defined"):
        run_python(code)


def test_too_late_and_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    jax.devices()
    with pytest.raises(flm.errors.ProcessError, match=r"devices\(\) is too late"):
        flm.keras.initialize("127.0.0.1:1", 1, 0)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    flm.keras.initialize()
