"""Interrupts at any moment, as from Ctrl-C."""

import signal
from collections.abc import Callable
from typing import Any


def interrupted(call: Callable[[], Any], seconds: float) -> bool:
    """Calls again and again, until an interrupt comes after this time.

    Returns:
        Whether it came through: Python ignores one in a callback of its own.
    """
    armed = True

    def interrupt(*_: Any) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            while armed:
                call()
        finally:
            armed = False
    except KeyboardInterrupt:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return False
