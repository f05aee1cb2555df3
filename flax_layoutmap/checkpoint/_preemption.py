"""SIGTERM: the step that it falls into is saved."""

import signal
import threading
from types import FrameType
from typing import Any

import jax


class Preemption:
    """Notices that the program is asked to end.

    Several processes agree on a step by JAX's own service, for which
    `jax.distributed.initialize` catches the signal. In a process of its own this
    catches it while it is watching, once: a second SIGTERM ends the program as usual.
    """

    def __init__(self) -> None:
        self._before: Any = None
        self._is_watching = False
        self._was_asked = False
        self.is_reached = False

    def watch(self) -> None:
        """Begins to catch SIGTERM, where nobody else does."""
        if jax.distributed.is_initialized():
            return
        # Python runs handlers in the main thread, and only there they can be set.
        if threading.current_thread() is not threading.main_thread():
            return
        self._before = signal.getsignal(signal.SIGTERM)
        # None: set by another language. Neither that nor "ignore" is ours to change.
        if self._before not in (None, signal.SIG_IGN):
            signal.signal(signal.SIGTERM, self._notice)
            self._is_watching = True

    def reached(self, step: int) -> bool:
        """Whether this step is the one to save and to end at."""
        if self._was_asked:
            self.is_reached = True
        elif jax.distributed.is_initialized():
            from jax.experimental import multihost_utils

            try:
                if multihost_utils.reached_preemption_sync_point(step):
                    self.is_reached = True
            except RuntimeError:
                return False  # jax_enable_preemption_service is off
        return self.is_reached

    def stop(self, *, deliver: bool) -> None:
        """Ends watching.

        Args:
            deliver: whether a signal that no step was saved for is sent once more.
        """
        self._give_back()
        if deliver and self._was_asked and not self.is_reached:
            self._was_asked = False
            signal.raise_signal(signal.SIGTERM)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self._was_asked = True
        before = self._before
        self._give_back()
        if callable(before):
            before(number, frame)

    def _give_back(self) -> None:
        if self._is_watching:
            self._is_watching = False
            signal.signal(signal.SIGTERM, self._before)
