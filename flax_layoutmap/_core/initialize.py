"""Join a job of several processes: Keras's `initialize`.

The coordinator's address is tested before JAX uses it: where JAX's runtime cannot
listen or connect, it ends the process without naming the address.
"""

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from flax_layoutmap._core.errors import ProcessError, warn

_ADDRESSES = "KERAS_DISTRIBUTION_JOB_ADDRESSES"
_PROCESSES = "KERAS_DISTRIBUTION_NUM_PROCESSES"
_PROCESS = "KERAS_DISTRIBUTION_PROCESS_ID"
_ADDRESS_OF_JAX = "JAX_COORDINATOR_ADDRESS"

# JAX's own default.
_TIMEOUT_SECONDS = 300

# Seconds after which a process warns that it waits.
_PATIENCE_SECONDS = 60.0


class Address(NamedTuple):
    """An address `"host:port"`, and the argument or variable that it comes from."""

    text: str
    source: str

    def __str__(self) -> str:
        return f"{self.text} (from {self.source})"


def initialize(
    job_addresses: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    **options: Any,
) -> None:
    """Join a job of several processes; call it before any other use of JAX.

    Keras's `initialize`, over `jax.distributed`. What is None is read from
    `KERAS_DISTRIBUTION_JOB_ADDRESSES`, `KERAS_DISTRIBUTION_NUM_PROCESSES` and
    `KERAS_DISTRIBUTION_PROCESS_ID`, then from JAX's own variables
    (`JAX_COORDINATOR_ADDRESS` and others), then from the cluster that JAX detects:
    Cloud TPU, Slurm, Open MPI, Kubernetes. A second call without arguments does
    nothing.

    Unlike Keras's it sets no seed: Flax models are made from an explicit one, and
    `flm.create` raises where that differs between processes.

    If address, count and number are known here, process 0 tests that it can listen, and
    every process that it can connect to process 0, for at most `initialization_timeout`
    seconds (300 by default). After that, JAX waits for all processes; where one is
    missing, it ends the others 5 s after the timeout, with `DEADLINE_EXCEEDED`, which
    no program can catch. A `LayoutWarning` announces that after a minute.

    A process that ends, even with an error, waits for the others. JAX ends the others
    after `shutdown_timeout_seconds` (300 by default): for that time they may go on, as
    process 0 does with an export. Pass less to notice errors sooner.

    Args:
        job_addresses: `"host:port"` of process 0, or of all processes, separated by
            commas, that of process 0 first.
        num_processes: the number of processes.
        process_id: the number of this process, from 0.
        **options: further arguments of `jax.distributed.initialize`, such as
            `initialization_timeout` and `shutdown_timeout_seconds`.

    Raises:
        ProcessError: the arguments contradict each other, no cluster was found, JAX has
            been used already, or process 0 cannot listen or be reached in time.

    Example:
        On a TPU slice, Slurm or GKE: `flm.keras.initialize()`. Elsewhere:

        >>> import flax_layoutmap as flm
        >>> flm.keras.initialize("10.0.0.1:1234,10.0.0.2:1234", process_id=2)
        Traceback (most recent call last):
        ...
        flax_layoutmap.errors.ProcessError: ...

    Plain JAX: `jax.distributed.initialize(coordinator, num_processes, process_id)`.
    """
    given = (job_addresses, num_processes, process_id)
    if jax.distributed.is_initialized():
        if given == (None, None, None) and not options:
            return
        raise ProcessError(
            "this process is part of a job already: call flm.keras.initialize once, "
            "before all else"
        )
    from_variable = job_addresses is None and _ADDRESSES in os.environ
    source = f"the variable {_ADDRESSES}" if from_variable else "job_addresses"
    known = _addresses(
        os.environ[_ADDRESSES] if from_variable else job_addresses, source
    )
    count = _number(num_processes, "num_processes", _PROCESSES)
    number = _number(process_id, "process_id", _PROCESS)
    if count is None and len(known) > 1:
        count = len(known)
    _check_numbers(known, source, count, number)
    coordinator = known[0] if known else None
    seconds = options.get("initialization_timeout", _TIMEOUT_SECONDS)
    if not isinstance(seconds, int) or seconds < 1:
        raise ProcessError(
            f"initialization_timeout is a whole number of seconds, got {seconds!r}"
        )
    address = None
    if coordinator is not None:
        address = Address(coordinator, source)
    elif _ADDRESS_OF_JAX in os.environ:
        address = Address(
            os.environ[_ADDRESS_OF_JAX], f"the variable {_ADDRESS_OF_JAX}"
        )
    with _warn_of_a_long_wait(address, seconds):
        if address is not None:
            host_and_port(address)
            if count is not None and number is not None:
                _refuse_if_too_late()
                bind = options.get("coordinator_bind_address")
                try_address(address, number, seconds, bind)
        _join(coordinator, count, number, options)


def _addresses(text: Any, source: str) -> list[str]:
    if not isinstance(text, str | None):
        raise ProcessError(
            f'{source} must be a string, "host:port", with commas between several, got '
            f"{text!r}"
        )
    known = [part.strip() for part in text.split(",")] if text else []
    if not all(known):
        raise ProcessError(
            f'{source} has an empty part: {text!r}; write "host:port", or '
            "one for each process with commas between them"
        )
    return known


def _check_numbers(
    known: list[str], source: str, count: int | None, number: int | None
) -> None:
    if len(known) > 1 and count != len(known):
        raise ProcessError(
            f"{source} has {len(known)} addresses, but num_processes is {count}: "
            "give one for each process, or that of process 0 alone"
        )
    if count is not None and count < 1:
        raise ProcessError(f"num_processes is 1 or more, got {count}")
    if number is not None and number < 0:
        raise ProcessError(f"process_id is 0 or more, got {number}")
    if number is not None and count is not None and number >= count:
        raise ProcessError(
            f"process_id is {number}, but of {count} processes the numbers are 0 to "
            f"{count - 1}"
        )


@contextlib.contextmanager
def _warn_of_a_long_wait(address: Address | None, seconds: int) -> Iterator[None]:
    """Warn if the block takes long; JAX itself waits silently."""
    where = f" at {address}" if address else ""
    patience = min(_PATIENCE_SECONDS, seconds / 2)
    text = (
        f"this process has waited {patience:.0f} s for the others of the job{where}: "
        "at least one has not called flm.keras.initialize. JAX ends this process if "
        f"they do not connect in {seconds} s"
    )
    timer = threading.Timer(patience, warn, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _refuse_if_too_late() -> None:
    """Raise if JAX was used before: it checks this first, then its arguments."""
    try:
        jax.distributed.initialize(
            "localhost:1", 1, -1, cluster_detection_method="deactivate"
        )
    except ValueError:
        return
    except RuntimeError as error:
        raise _not_joined(error) from error


def _join(
    coordinator: str | None, count: int | None, number: int | None, options: Any
) -> None:
    try:
        jax.distributed.initialize(coordinator, count, number, **options)
    except ValueError as error:
        raise ProcessError(
            "no cluster was found, and not everything is given: "
            f"job_addresses={coordinator!r}, num_processes={count}, "
            f"process_id={number} ({error}); give all three, "
            'flm.keras.initialize("host:1234", 2, 0), or leave the call out for one '
            "process"
        ) from error
    except RuntimeError as error:
        raise _not_joined(error) from error


def _not_joined(error: RuntimeError) -> ProcessError:
    return ProcessError(
        f"this process could not join the job: {error}; call flm.keras.initialize "
        "before anything else of JAX (jax.devices() is too late), in every process, "
        "with an address that all of them reach"
    )


def _number(given: int | None, name: str, variable: str) -> int | None:
    """The number that is given, or that the environment has."""
    text = os.environ.get(variable)
    if given is None and text is None:
        return None
    value: Any = text if given is None else given
    try:
        if isinstance(value, bool | float):
            raise TypeError
        return int(value)
    except (TypeError, ValueError) as error:
        where = f"the variable {variable}" if given is None else name
        raise ProcessError(f"{where} is no whole number: {value!r}") from error


# ------------------------------------------------------------ the coordinator's address


# The longest attempt to connect: process 0 may start later.
_TRY_SECONDS = 10.0
# The shortest one, where looking up the name took all the time.
_SHORTEST_TRY_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 1.0

_EVERYWHERE = ("::", "0.0.0.0")

_BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"

# In a large job, this many processes may connect before process 0 does.
_BACKLOG = 4096


def host_and_port(address: Address) -> tuple[str, int]:
    """Split `"host:port"`; an IPv6 host is in brackets.

    >>> host_and_port(Address("[::1]:1234", "job_addresses"))
    ('::1', 1234)
    """
    host, _, text = address.text.rpartition(":")
    port = int(text) if text.isascii() and text.isdigit() else 0
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or not 0 < port < 2**16 or (":" in host and bare == host):
        raise ProcessError(
            'an address is "host:port", with a port from 1 to 65535 and an IPv6 host '
            f'in brackets, such as "10.0.0.1:1234" or "[::1]:1234", got '
            f"{address.text!r} (from {address.source})"
        )
    return bare, port


def try_address(
    address: Address, process_id: int, seconds: float, bind: str | None = None
) -> None:
    """Try to listen (in process 0) and to connect (in every process).

    Connecting is retried for `seconds`, over all addresses of the name together, as the
    name may be unknown at first. `bind` is where process 0 listens; None, as for JAX:
    all addresses of the host.
    """
    host, port = host_and_port(address)
    if process_id:
        error = _connect(host, port, seconds)
        if error is not None:
            raise ProcessError(
                f"process {process_id} could not reach process 0 at {address} in "
                f"{seconds:.0f} s: {error}; see whether process 0 runs and has called "
                "flm.keras.initialize, whether a firewall is between them, and "
                "whether all processes were given this address"
            ) from error
        return
    with contextlib.ExitStack() as stack:
        for server in _listen(_where_to_listen(bind, port), address):
            stack.enter_context(server)
        error = _connect(host, port, seconds)
    if error is not None:
        raise ProcessError(
            f"process 0 could not reach itself at {address} in {seconds:.0f} s: "
            f"{error}; the address is to be that of the host on which process 0 runs"
        ) from error


def _where_to_listen(bind: str | None, port: int) -> Address:
    """What JAX takes: its argument, its variable, or all addresses."""
    if bind:
        return Address(bind, "coordinator_bind_address")
    found = os.environ.get(_BIND_VARIABLE)
    if found is not None:
        return Address(found, f"the variable {_BIND_VARIABLE}")
    return Address(f"[::]:{port}", "JAX's default, all addresses of the host")


def _listen(bind: Address, address: Address) -> list[socket.socket]:
    """Listen as JAX's runtime does: at all local addresses of a name."""
    host, port = host_and_port(bind)
    servers: list[socket.socket] = []
    errors: dict[str, OSError] = {}
    try:
        everywhere = [(socket.AF_INET6, (host, port))]
        places = everywhere if host in _EVERYWHERE else _places(host, port)
        for family, place in places:
            try:
                servers.append(_server(family, place))
            except OSError as error:
                errors[place[0]] = error
        if not servers:
            raise _one_of(host, errors)
    except (OSError, UnicodeError) as error:
        held = any(one.errno == errno.EADDRINUSE for one in errors.values())
        advice = (
            "the last job may still hold the port: end it, or choose another port, the "
            "same one in all processes"
            if held
            else "see whether it is an address of the host on which process 0 runs"
        )
        raise ProcessError(
            f"process 0 cannot listen at {bind}, for the others to find it at "
            f"{address}: {error}; {advice}"
        ) from error
    return servers


def _places(host: str, port: int) -> list[tuple[socket.AddressFamily, Any]]:
    """(family, address) of each address of a host, in the system's order."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((family, place) for family, *_, place in found))


def _server(family: socket.AddressFamily, place: Any) -> socket.socket:
    if place[0] in _EVERYWHERE:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(
            ("", place[1]), family=family, dualstack_ipv6=both, backlog=_BACKLOG
        )
    return socket.create_server(place, family=family, backlog=_BACKLOG)


def _connect(host: str, port: int, seconds: float) -> Exception | None:
    """Connects, and ends the connection; returns why it could not."""
    end = time.monotonic() + seconds
    pause = 0.05
    while True:
        try:
            _connect_once(host, port, end)
            return None
        except UnicodeError as error:  # not a valid host name
            return error
        except OSError as error:
            if time.monotonic() + pause > end:
                return error
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _connect_once(host: str, port: int, end: float) -> None:
    """Try the addresses of the host in turn, each with its share of the time."""
    places = _places(host, port)
    errors: dict[str, OSError] = {}
    for at, (family, place) in enumerate(places):
        part = (end - time.monotonic()) / (len(places) - at)
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.settimeout(min(max(part, _SHORTEST_TRY_SECONDS), _TRY_SECONDS))
                probe.connect(place)
            return
        except OSError as error:
            errors[place[0]] = error
    raise _one_of(host, errors)


def _one_of(host: str, errors: dict[str, OSError]) -> OSError:
    """One error for several addresses, each with its own text."""
    if errors.keys() == {host}:
        return errors[host]
    return OSError(", ".join(f"{place}: {error}" for place, error in errors.items()))
