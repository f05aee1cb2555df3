"""list_devices, get_device_count and initialize: Keras's arguments and defaults."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

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
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return seen


def test_devices() -> None:
    assert flm.list_devices() == [f"cpu:{number}" for number in range(8)]
    assert flm.list_devices("CPU") == flm.list_devices()
    assert flm.get_device_count() == flm.get_device_count("cpu") == 8
    mesh = flm.DeviceMesh((2, 4), ("data", "model"), flm.list_devices())
    assert list(mesh.devices.flat) == jax.devices()


@pytest.mark.parametrize("function", [flm.list_devices, flm.get_device_count])
def test_devices_that_are_not_here(function: Any) -> None:
    with pytest.raises(flm.MeshError, match="no devices of type 'npu'.*uses 'cpu'"):
        function("npu")
    with pytest.raises(flm.MeshError, match="device_type is a text"):
        function(8)


def test_nothing_given_is_left_to_jax(calls: list[Any]) -> None:
    flm.initialize()
    assert calls == [(None, None, None, {})]


def test_arguments_are_passed_on(calls: list[Any]) -> None:
    flm.initialize("10.0.0.1:1234", 4, 3, initialization_timeout=5)
    assert calls == [("10.0.0.1:1234", 4, 3, {"initialization_timeout": 5})]


def test_the_first_of_several_addresses(calls: list[Any]) -> None:
    flm.initialize("10.0.0.1:1234, 10.0.0.2:2345", process_id=0)
    assert calls == [("10.0.0.1:1234", 2, 0, {})]


def test_variables(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    flm.initialize()
    flm.initialize(process_id=0)  # an argument counts more
    assert calls == [("10.0.0.1:1234", 2, 1, {}), ("10.0.0.1:1234", 2, 0, {})]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a:1,b:2", 3, 0), "has 2 addresses, but num_processes is 3"),
        (("a:1,,b:2", 3, 0), "job_addresses has an empty part: 'a:1,,b:2'"),
        (("a:1", 2, 2), "process_id is 2, but of 2 processes the numbers are 0 to 1"),
        (("a:1", 2, -1), "process_id is 0 or more, got -1"),
        (("a:1", None, -1), "process_id is 0 or more, got -1"),
        ((5, 2, 0), "job_addresses is a text, .*got 5"),
        ((["a:1", "b:2"], 2, 0), r"job_addresses is a text, .*got \['a:1', 'b:2'\]"),
        (("a:1", 0, 0), "num_processes is 1 or more, got 0"),
        (("a:1", "two", 0), "num_processes is no whole number: 'two'"),
        (("a:1", 2.0, 0), "num_processes is no whole number: 2.0"),
    ],
)
def test_what_does_not_fit(calls: list[Any], arguments: Any, message: str) -> None:
    with pytest.raises(flm.ProcessError, match=message):
        flm.initialize(*arguments)
    assert not calls


def test_a_variable_that_is_no_number(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERAS_DISTRIBUTION_PROCESS_ID", "first")
    with pytest.raises(flm.ProcessError, match="variable KERAS_DISTRIBUTION_PROCESS"):
        flm.initialize()
    assert not calls


def test_without_a_cluster() -> None:
    """JAX's own words, with what to do; in a process that has not used JAX yet."""
    program = (
        "import flax_layoutmap as flm\n"
        "try:\n"
        "    flm.initialize(cluster_detection_method='deactivate')\n"
        "except flm.ProcessError as error:\n"
        "    print(error)\n"
    )
    variables = {"PATH": os.environ["PATH"], "JAX_PLATFORMS": "cpu"}
    root = str(Path(flm.__file__).parents[1])
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**variables, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "no cluster was found" in ended.stdout
    assert "leave the call out for one process" in ended.stdout


def test_too_late() -> None:
    jax.devices()
    with pytest.raises(flm.ProcessError, match=r"jax.devices\(\) is too late"):
        flm.initialize("127.0.0.1:1", 1, 0)


def test_twice(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    flm.initialize()
    with pytest.raises(flm.ProcessError, match="part of a job already"):
        flm.initialize("10.0.0.1:1234", 2, 0)
    assert not calls
