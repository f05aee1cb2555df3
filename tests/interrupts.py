"""Raise interrupts at any moment, as from Ctrl-C."""

import dis
import itertools
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

    def loop() -> None:  # its own function: `try` does not cover the jump in 3.13
        while armed:
            call()

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            loop()
        finally:
            armed = False
    except KeyboardInterrupt:
        return True
    except ValueError as error:  # JAX's caches, which compare keys in Python
        if "KeyboardInterrupt" not in str(error):
            raise
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return False


def interrupted_at(call: Callable[[], Any], codes: Set[types.CodeType], at: int) -> int:
    """Calls once, with an interrupt where Python looks for signals in some functions.

    That is where a function of Python's begins, and behind each call.

    Args:
        call: what to call.
        codes: the functions, by their code.
        at: which of these places, in the order in which they are come to; 0 for none.

    Returns:
        How many of them were come to.
    """
    places = {code: _places(code) for code in codes}
    seen = 0

    def local(frame: types.FrameType, event: str, arg: Any) -> Any:
        nonlocal seen
        if event == "opcode" and frame.f_lasti in places[frame.f_code]:
            seen += 1
            if seen == at:
                raise KeyboardInterrupt
        return local

    def trace(frame: types.FrameType, event: str, arg: Any) -> Any:
        if frame.f_code not in codes:
            return None
        frame.f_trace_opcodes = True
        sys.settrace(trace)  # Python 3.12.1 takes notice of it only then
        return local

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return seen


def _places(code: types.CodeType) -> set[int]:
    """Offsets of the instructions before which Python looks for signals."""
    steps = list(dis.get_instructions(code))
    return {
        after.offset
        for step, after in itertools.pairwise(steps)
        if step.opname.startswith(("RESUME", "CALL", "JUMP_BACKWARD"))
    }
