"""The address at which the processes of a job meet, tried before JAX uses it.

What JAX's runtime cannot listen at, or reach, ends the process with no word of the
address.
"""

import errno
import os
import socket
import time

from flax_layoutmap._errors import ProcessError

# One try to connect takes at most so long: who answers may come only later.
_TRY_SECONDS = 10.0
_LONGEST_PAUSE_SECONDS = 1.0

_EVERYWHERE = ("::", "0.0.0.0")

# Of a large job, that many others may connect before process 0 does so itself; the
# kernel has a limit of its own.
_BACKLOG = 4096


def host_and_port(address: str) -> tuple[str, int]:
    """Takes `"host:port"` apart; an IPv6 host is in brackets.

    Raises:
        ProcessError: it is something else.

    Example:
        >>> host_and_port("[::1]:1234")
        ('::1', 1234)
    """
    host, _, text = address.rpartition(":")
    port = int(text) if text.isascii() and text.isdigit() else 0
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or not 0 < port < 2**16 or (":" in host and bare == host):
        raise ProcessError(
            'an address is "host:port", with a port from 1 to 65535 and an IPv6 host '
            f'in brackets, such as "10.0.0.1:1234" or "[::1]:1234", got {address!r}'
        )
    return bare, port


def try_address(
    address: str, process_id: int, seconds: float, bind: str | None = None
) -> None:
    """Tries to listen, in process 0, and to connect, in every process.

    Args:
        address: of process 0.
        process_id: the number of this process.
        seconds: how long to go on trying to connect; the name may be unknown at first.
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
                "flm.initialize, whether a firewall is between them, and whether all "
                "processes were given this address"
            ) from error
        return
    bind = bind or os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or f"[::]:{port}"
    with _listen(bind, address):
        error = _connect(host, port, seconds)
    if error is not None:
        raise ProcessError(
            f"process 0 could not reach itself at {address} in {seconds:.0f} s: "
            f"{error}; the address is to be that of the host on which process 0 runs"
        ) from error


def _listen(bind: str, address: str) -> socket.socket:
    host, port = host_and_port(bind)
    try:
        if host in _EVERYWHERE:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            return socket.create_server(
                ("", port), family=family, dualstack_ipv6=both, backlog=_BACKLOG
            )
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, *_, place = found[0]
        return socket.create_server(place[:2], family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:
        held = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
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


def _connect(host: str, port: int, seconds: float) -> Exception | None:
    """Connects, and ends the connection; returns why it could not."""
    end = time.monotonic() + seconds
    pause = 0.05
    while True:
        left = end - time.monotonic()
        try:
            limit = min(max(left, 1.0), _TRY_SECONDS)
            socket.create_connection((host, port), timeout=limit).close()
            return None
        except UnicodeError as error:  # no name of a host, now and later
            return error
        except OSError as error:
            if left < pause:
                return error
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
