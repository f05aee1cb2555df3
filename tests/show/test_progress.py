"""Progress is shown on request, or where somebody sees it and the work is long."""

import itertools
import sys
import threading
import time

import jax
import pytest

from flax_layoutmap._show.terminal import shown_progress


def test_bytes_are_counted_from_the_begin(capfd: pytest.CaptureFixture[str]) -> None:
    counts = itertools.chain([500], itertools.repeat(500 + (2 << 20)))
    with pytest.raises(ZeroDivisionError):
        with shown_progress("reading", 3 << 20, True, lambda: next(counts)):
            raise ZeroDivisionError
    # What fails is not shown as complete.
    assert "2.0/3.0 MiB" in capfd.readouterr().err


def test_what_succeeds_is_shown_as_complete(capfd: pytest.CaptureFixture[str]) -> None:
    with shown_progress("reading", 3 << 20, True):
        pass
    shown = capfd.readouterr().err
    assert "reading" in shown and "3.0/3.0 MiB" in shown


def test_seconds_alone(capfd: pytest.CaptureFixture[str]) -> None:
    with shown_progress("\x1b[2Jtrying", shown=True):
        time.sleep(1.1)
    shown = capfd.readouterr().err
    assert r"\x1b[2Jtrying" in shown and "0:00:01" in shown and "iB" not in shown


def test_on_a_terminal_from_two_seconds_on(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with shown_progress("short"):
        time.sleep(0.3)
    assert capfd.readouterr().err == ""
    with shown_progress("long"):
        time.sleep(2.5)
    assert "long" in capfd.readouterr().err


def test_nothing_without_a_terminal_or_bytes(capfd: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    with shown_progress("x"), shown_progress("y", 0, True):
        assert threading.active_count() == before
    assert capfd.readouterr().err == ""


def test_on_process_0_alone(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    for process in (1, 0):
        monkeypatch.setattr(jax, "process_index", lambda: process)  # noqa: B023
        with shown_progress("reading", shown=True):
            pass
        assert ("reading" in capfd.readouterr().err) is (process == 0)
