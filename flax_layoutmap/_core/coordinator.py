"""Test the coordinator's address before JAX uses it.

Where JAX's runtime cannot listen or connect, it ends the process without naming the
address.
"""

import contextlib
import errno
import os
import socket
import time
from typing import Any, NamedTuple

from flax_layoutmap._core.errors import ProcessError

# One try to connect takes at most so long: who answers may come only later.
_TRY_SECONDS = 10.0
# And at least so long, where a slow look-up of the name has taken all the time.
_SHORTEST_TRY_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 1.0

_EVERYWHERE = ("::", "0.0.0.0")

_BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"

# Of a large job, that many others may connect before process 0 does so itself; the
# kernel has a limit of its own.
_BACKLOG = 4096


class Address(NamedTuple):
    """An address as it was given.

    Attributes:
        text: `"host:port"`.
        source: the argument or variable that has it, for messages.
    """

    text: str
    source: str

    def __str__(self) -> str:
        return f"{self.text} (from {self.source})"


def host_and_port(address: Address) -> tuple[str, int]:
    """Take `"host:port"` apart; an IPv6 host is in brackets.

    Raises:
        ProcessError: it is something else.

    Example:
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
    """Try to listen, in process 0, and to connect, in every process.

    Args:
        address: of process 0.
        process_id: the number of this process.
        seconds: how long to go on trying to connect, at all addresses of the name
            together; the name may be unknown at first. Looking it up is not cut off.
        bind: where process 0 listens, as JAX is told; None: as JAX does by itself, at
            all addresses of the host.

    Raises:
        ProcessError: one of them failed.
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
    """Listen as JAX's runtime does: at all addresses of a name that are of this host.

    That others of them are not is no error to it.
    """
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
    """(family, address) of each address of a host, in the order of the system.

    Raises:
        OSError, UnicodeError: it has none.
    """
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
        except UnicodeError as error:  # no name of a host, now and later
            return error
        except OSError as error:
            if time.monotonic() + pause > end:
                return error
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _connect_once(host: str, port: int, end: float) -> None:
    """Try one address of the host after another; each has its part of the time.

    Raises:
        OSError: none answered.
        UnicodeError: no host has such a name.
    """
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
