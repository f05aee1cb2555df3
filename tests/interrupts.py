"""Interrupts at any moment, as from Ctrl-C."""

import signal
import sys
import types
from collections.abc import Callable, Set
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


def interrupted_at(call: Callable[[], Any], codes: Set[types.CodeType], at: int) -> int:
    """Calls once, with an interrupt before one instruction of some functions.

    Args:
        call: what to call.
        codes: the functions, by their code.
        at: which of the instructions that they run; 0 for no interrupt.

    Returns:
        How many of them have begun.
    """
    begun = 0

    def local(frame: types.FrameType, event: str, arg: Any) -> Any:
        nonlocal begun
        if event == "opcode":
            begun += 1
            if begun == at:
                raise KeyboardInterrupt
        return local

    def trace(frame: types.FrameType, event: str, arg: Any) -> Any:
        if frame.f_code not in codes:
            return None
        frame.f_trace_opcodes = True
        return local

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return begun
