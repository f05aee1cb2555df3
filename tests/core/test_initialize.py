"""list_devices, get_device_count and initialize: Keras's arguments and defaults."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

import flax_layoutmap as flm
from flax_layoutmap._core import initialize as _initialize

ADDRESSES = "KERAS_DISTRIBUTION_JOB_ADDRESSES"
VARIABLES = {
    ADDRESSES: "10.0.0.1:1234,10.0.0.2:2345",
    "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
    "KERAS_DISTRIBUTION_PROCESS_ID": "1",
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What `jax.distributed.initialize` was called with."""
    seen: list[tuple[Any, ...]] = []

    def initialize(*args: Any, **options: Any) -> None:
        if args[1:] == (1, -1):  # asked whether it is too late
            raise ValueError("process_id must be nonnegative")
        seen.append((*args, options))

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(_initialize, "try_address", lambda *_: None)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
    for name in (*VARIABLES, "JAX_COORDINATOR_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    return seen


def test_devices() -> None:
    assert flm.keras.list_devices() == [f"cpu:{number}" for number in range(8)]
    assert flm.keras.list_devices("CPU") == flm.keras.list_devices()
    assert flm.keras.get_device_count() == flm.keras.get_device_count("cpu") == 8
    mesh = flm.DeviceMesh((2, 4), ("data", "model"), flm.keras.list_devices())
    assert list(mesh.devices.flat) == jax.devices()


@pytest.mark.parametrize(
    "function", [flm.keras.list_devices, flm.keras.get_device_count]
)
def test_devices_that_are_not_here(function: Any) -> None:
    with pytest.raises(
        flm.errors.MeshError, match="no devices of type 'npu'.*uses 'cpu'"
    ):
        function("npu")
    with pytest.raises(flm.errors.MeshError, match="device_type must be a string"):
        function(8)


def test_what_jax_is_given(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    at = "10.0.0.1:1234"
    flm.keras.initialize()
    flm.keras.initialize(at, 4, 3, initialization_timeout=5)
    flm.keras.initialize(at, 4, 3, shutdown_timeout_seconds=600)
    flm.keras.initialize(f"{at}, 10.0.0.2:2345", process_id=0)
    flm.keras.initialize(at, 2)  # only JAX finds out whether this is process 0
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    flm.keras.initialize()
    flm.keras.initialize(process_id=0)  # an argument counts more
    assert calls == [
        (None, None, None, {}),
        (at, 4, 3, {"initialization_timeout": 5}),
        (at, 4, 3, {"shutdown_timeout_seconds": 600}),
        (at, 2, 0, {}),
        (at, 2, None, {}),
        (at, 2, 1, {}),
        (at, 2, 0, {}),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a:1,b:2", 3, 0), "has 2 addresses, but num_processes is 3"),
        (("a:1,,b:2", 3, 0), "job_addresses has an empty part: 'a:1,,b:2'"),
        (("a:1", 2, 2), "process_id is 2, but of 2 processes the numbers are 0 to 1"),
        (("a:1", 2, -1), "process_id is 0 or more, got -1"),
        (("a:1", None, -1), "process_id is 0 or more, got -1"),
        ((5, 2, 0), "job_addresses must be a string, .*got 5"),
        ((["a:1", "b:2"], 2, 0), r"must be a string.*got \['a:1', 'b:2'\]"),
        (("a:1", 0, 0), "num_processes is 1 or more, got 0"),
        (("a:1", "two", 0), "num_processes is no whole number: 'two'"),
        (("a:1", 2.0, 0), "num_processes is no whole number: 2.0"),
        (("localhost", 2, 0), "an address is .*or .*, got 'localhost'"),
        (("localhost", 2, None), "an address is .*or .*, got 'localhost'"),
        (("localhost:http", 2, 0), "an address is .*, got 'localhost:http'"),
        (("localhost:0", 2, 0), "port from 1 to 65535"),
        (("localhost:65536", 2, 0), "port from 1 to 65535"),
        ((":1234", 2, 0), "an address is .*, got ':1234'"),
        (("::1:1234", 2, 0), r"IPv6 host in brackets, .*\[::1\]:1234"),
    ],
)
def test_what_does_not_fit(calls: list[Any], arguments: Any, message: str) -> None:
    with pytest.raises(flm.errors.ProcessError, match=message):
        flm.keras.initialize(*arguments)
    assert not calls


def run(statement: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Runs a call in a process that has not used JAX yet; and how long that took."""
    program = (
        "import flax_layoutmap as flm\n"
        "try:\n"
        f"    {statement}\n"
        "except flm.errors.ProcessError as error:\n"
        "    print(error)\n"
    )
    variables = {"PATH": os.environ["PATH"], "JAX_PLATFORMS": "cpu"}
    root = str(Path(flm.__file__).parents[1])
    begin = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**variables, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return ended, time.monotonic() - begin


def test_without_a_cluster() -> None:
    """JAX's own words, with what to do."""
    ended, _ = run("flm.keras.initialize(cluster_detection_method='deactivate')")
    assert ended.returncode == 0, ended.stderr
    assert "no cluster was found" in ended.stdout
    assert "leave the call out for one process" in ended.stdout


@pytest.mark.parametrize("seconds", ["5", 2.5, 0, -1])
def test_a_timeout_that_is_none(calls: list[Any], seconds: Any) -> None:
    with pytest.raises(flm.errors.ProcessError, match="whole number of seconds, got"):
        flm.keras.initialize("127.0.0.1:1", 2, 1, initialization_timeout=seconds)
    assert not calls


def test_jax_is_asked_before_the_address_is_tried(
    monkeypatch: pytest.MonkeyPatch, calls: list[Any]
) -> None:
    """With what it refuses, so that its `initialize` is called twice."""
    seen: list[Any] = []

    def initialize(*args: Any, **options: Any) -> None:
        seen.append(args)
        if args[2] < 0:
            raise ValueError("process_id must be nonnegative")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(_initialize, "try_address", lambda *_: seen.append("tried"))
    flm.keras.initialize("10.0.0.1:1234", 2, 1)
    assert seen == [("localhost:1", 1, -1), "tried", ("10.0.0.1:1234", 2, 1)]


def test_twice(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    flm.keras.initialize()
    with pytest.raises(flm.errors.ProcessError, match="part of a job already"):
        flm.keras.initialize("10.0.0.1:1234", 2, 0)
    assert not calls


# ------------------------------------------- the address, before JAX uses it


def given(text: str) -> _initialize.Address:
    """As the argument has it."""
    return _initialize.Address(text, "job_addresses")


@pytest.fixture
def held() -> Iterator[str]:
    """An address of this host at which something listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def free() -> str:
    """One at which nothing does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_a_port_that_is_taken(held: str) -> None:
    port = held.split(":")[1]
    text = (
        rf"process 0 cannot listen at \[::\]:{port} \(from JAX's default, all "
        rf"addresses of the host\), .*{held} \(from job_addresses\): "
        ".*Address already in use.*"
        "last job may still hold"
    )
    with pytest.raises(flm.errors.ProcessError, match=text):
        _initialize.try_address(given(held), 0, 5)


@pytest.mark.parametrize("bind", [None, "0.0.0.0", "127.0.0.1", "localhost"])
def test_process_0_listens_and_reaches_itself(free: str, bind: str | None) -> None:
    where = bind and f"{bind}:{free.split(':')[1]}"
    _initialize.try_address(given(free), 0, 1, where)
    _initialize.try_address(given(free), 0, 1, where)  # nothing is left of the first


def test_the_variable_of_where_to_listen(
    free: str, held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", held)
    variable = "from the variable JAX_COORDINATOR_BIND_ADDRESS"
    text = rf"cannot listen at {held} \({variable}\), .*{free}"
    with pytest.raises(flm.errors.ProcessError, match=text):
        _initialize.try_address(given(free), 0, 5)


def test_an_address_of_another_host(free: str) -> None:
    elsewhere = free.replace("127.0.0.1", "127.0.0.2")
    with pytest.raises(
        flm.errors.ProcessError, match=f"could not reach itself at {elsewhere}"
    ):
        _initialize.try_address(given(elsewhere), 0, 0.1, free)


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("127.0.0.1", "refused"),
        ("no.such.host.invalid", "Name or service|name resolution|not known"),
        ("a" * 70, "idna|label too long"),
    ],
)
def test_process_0_that_is_not_there(free: str, host: str, reason: str) -> None:
    address = free.replace("127.0.0.1", host)
    begin = time.monotonic()
    with pytest.raises(flm.errors.ProcessError, match=reason) as caught:
        _initialize.try_address(given(address), 3, 0.1)
    assert time.monotonic() - begin < 30  # a name may take a while to be looked up
    found = f"process 3 could not reach process 0 at {address} (from job_addresses) in"
    assert found in str(caught.value)


def test_process_0_that_comes_late(free: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: later.append(listen()))
    later: list[socket.socket] = []

    def listen() -> socket.socket:
        return socket.create_server(("127.0.0.1", int(free.split(":")[1])))

    _initialize.try_address(given(free), 1, 30)
    assert len(later) == 1
    later[0].close()


@pytest.mark.multiprocess
def test_a_port_that_is_taken_in_a_real_process(held: str) -> None:
    """Where JAX's runtime would end the process by a segmentation fault."""
    ended, _ = run(f"flm.keras.initialize({held!r}, 2, 0)")
    assert ended.returncode == 0, ended.stderr
    assert "process 0 cannot listen at" in ended.stdout


@pytest.mark.multiprocess
def test_nobody_to_meet_in_a_real_process(free: str) -> None:
    """Where JAX's runtime would end the process by a signal."""
    ended, _ = run(f"flm.keras.initialize({free!r}, 2, 1, initialization_timeout=1)")
    assert ended.returncode == 0, ended.stderr
    assert (
        f"could not reach process 0 at {free} (from job_addresses) in 1 s"
        in ended.stdout
    )


@pytest.mark.multiprocess
@pytest.mark.slow
def test_one_that_never_comes(free: str) -> None:
    """JAX ends process 0, in the time and after the warning that the docstring says."""
    ended, seconds = run(
        f"flm.keras.initialize({free!r}, 2, 0, initialization_timeout=2)"
    )
    assert ended.returncode != 0 and not ended.stdout
    assert f"waited 1 s for the others of the job at {free}" in ended.stderr
    assert "DEADLINE_EXCEEDED" in ended.stderr
    assert 5 < seconds < 60


def test_one_that_waits_says_so(free: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address is tried before JAX is asked, and a warning comes before the end."""
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(_initialize, "_refuse_if_too_late", lambda: None)
    monkeypatch.setattr(_initialize, "_PATIENCE_SECONDS", 0.01)
    where = rf"{free} \(from job_addresses\)"
    text = f"for the others of the job at {where}: .*do not connect in 1 s"
    with pytest.warns(flm.LayoutWarning, match=text):
        text = f"reach process 0 at {where} in 1 s"
        with pytest.raises(flm.errors.ProcessError, match=text):
            flm.keras.initialize(free, 2, 1, initialization_timeout=1)


def test_too_late(free: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the address is tried, and of one process too."""
    jax.devices()
    tried: list[Any] = []
    monkeypatch.setattr(_initialize, "try_address", lambda *args: tried.append(args))
    for count, number in ((2, 1), (1, 0)):
        with pytest.raises(flm.errors.ProcessError, match=r"devices\(\) is too late"):
            flm.keras.initialize(free, count, number)
    assert not tried


def test_the_address_that_jax_reads(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Any] = []
    monkeypatch.setattr(_initialize, "try_address", lambda *args: tried.append(args))
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "10.0.0.1:1234")
    flm.keras.initialize(None, 2, 1, coordinator_bind_address="10.0.0.1:5")
    where = ("10.0.0.1:1234", "the variable JAX_COORDINATOR_ADDRESS")
    assert tried == [(where, 1, 300, "10.0.0.1:5")]
    assert calls[0][:3] == (None, 2, 1)


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("JAX_COORDINATOR_ADDRESS", "a", r"address is .*, got 'a' \(from the {}"),
        ("JAX_COORDINATOR_ADDRESS", "", r"address is .*, got '' \(from the {}"),
        (ADDRESSES, "a", r"an address is .*, got 'a' \(from the {}"),
        (ADDRESSES, "a:1,,b:2", "^the {} has an empty part: 'a:1,,b:2'"),
        (ADDRESSES, "a:1,b:2,c:3", "^the {} has 3 addresses, but num_.* is 2"),
        ("KERAS_DISTRIBUTION_PROCESS_ID", "first", "^the {} is no whole number: 'f"),
    ],
)
def test_variables_that_do_not_fit(
    calls: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    text: str,
) -> None:
    monkeypatch.setenv(variable, value)
    number = None if variable.endswith("PROCESS_ID") else 1
    message = text.format(f"variable {variable}")
    with pytest.raises(flm.errors.ProcessError, match=message):
        flm.keras.initialize(None, 2, number)
    assert not calls


def test_a_place_to_listen_that_is_no_address(
    free: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("nowhere", ""):  # JAX takes a text without characters too
        monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", value)
        text = rf"got '{value}' \(from the variable JAX_COORDINATOR_BIND_ADDRESS\)"
        with pytest.raises(flm.errors.ProcessError, match=text):
            _initialize.try_address(given(free), 0, 0.1)
    text = r"got 'here' \(from coordinator_bind_address\)"
    with pytest.raises(flm.errors.ProcessError, match=text):
        _initialize.try_address(given(free), 0, 0.1, "here")


def test_many_others_may_connect_first(free: str) -> None:
    """They wait at a port of which process 0 still tries whether it can be reached."""
    host, port = _initialize.host_and_port(given(free))
    with contextlib.ExitStack() as stack:
        (server,) = _initialize._listen(given(free), given(free))
        stack.enter_context(server)
        for _ in range(200):  # more than Python lets wait by itself
            stack.enter_context(socket.create_connection((host, port), timeout=5))
        assert _initialize._connect(host, port, 0.5) is None


def test_where_it_cannot_listen() -> None:
    text = "cannot listen at 192.0.2.1:1234.*see whether it is an address of the host"
    with pytest.raises(flm.errors.ProcessError, match=text):
        _initialize.try_address(given("192.0.2.1:1234"), 0, 0.1, "192.0.2.1:1234")


# ----------------------------------------------------- names of several addresses

NAME = "several.invalid"


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those of the name; to be filled by the test."""
    found: list[str] = []
    plain = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        hosts = found if host == NAME else [host]
        return sum((plain(one, port, *args, **options) for one in hosts), [])

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return found


def reached(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def test_it_listens_at_every_address_of_a_name(free: str, addresses: list[str]) -> None:
    """As JAX's runtime does, to which one that is of another host is no error."""
    addresses += ["192.0.2.1", "127.0.0.1", "127.0.0.3", "127.0.0.1"]
    port = int(free.split(":")[1])
    name = given(f"{NAME}:{port}")
    with contextlib.ExitStack() as stack:
        for server in _initialize._listen(name, name):
            stack.enter_context(server)
        hosts = [f"127.0.0.{number}" for number in (1, 2, 3)]
        assert [reached(host, port) for host in hosts] == [True, False, True]
    assert not reached("127.0.0.1", port)


def test_no_address_of_a_name_can_be_had(held: str, addresses: list[str]) -> None:
    addresses += ["192.0.2.1", "127.0.0.1"]
    name = f"{NAME}:{held.split(':')[1]}"
    text = (
        rf"listen at {name} \(from coordinator_bind_address\), .*"
        "192.0.2.1: .*assign requested address.*, "
        "127.0.0.1: .*Address already in use.*; the last job may still hold the port"
    )
    with pytest.raises(flm.errors.ProcessError, match=text):
        _initialize.try_address(given(held), 0, 0.1, name)


def test_the_second_address_of_a_name_answers(held: str, addresses: list[str]) -> None:
    addresses += ["127.0.0.2", "127.0.0.1"]
    _initialize.try_address(given(f"{NAME}:{held.split(':')[1]}"), 1, 0.5)


@pytest.mark.parametrize("count", [1, 2, 50])
@pytest.mark.parametrize("seconds", [1, 5, 300])
def test_the_time_is_for_all_addresses_together(
    addresses: list[str], monkeypatch: pytest.MonkeyPatch, seconds: int, count: int
) -> None:
    """None of them answers; each is tried nevertheless."""
    addresses += [f"192.0.2.{number + 1}" for number in range(count)]
    now = 0.0
    tried, limits = [], []

    class Silent(socket.socket):
        def connect(self, address: Any) -> None:
            limit = self.gettimeout()
            assert limit is not None and 0 < limit <= 10
            tried.append(address[0])
            limits.append(limit)
            pass_time(limit)
            raise TimeoutError("timed out")

    def pass_time(seconds: float) -> None:
        nonlocal now
        now += seconds

    clock = types.SimpleNamespace(monotonic=lambda: now, sleep=pass_time)
    monkeypatch.setattr(_initialize, "time", clock)
    monkeypatch.setattr(socket, "socket", Silent)
    text = f"in {seconds} s: .*192.0.2.{count}: timed out;"
    with pytest.raises(flm.errors.ProcessError, match=text):
        _initialize.try_address(given(f"{NAME}:1234"), 1, seconds)
    assert set(tried) == set(addresses)
    # The first of them leaves the others their parts.
    assert min(limits[:count]) > 0.99 * min(seconds / count, 10)
    # The shortest try of each address is all that may come on top.
    assert 0.7 * seconds < now <= seconds + 0.2 * count
