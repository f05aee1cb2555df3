"""Progress is shown on request, or where somebody sees it and the work is long."""

import itertools
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from flax_layoutmap._show import progress


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """The bars that are shown: each is told what to do and how much is done."""
    made: list[SimpleNamespace] = []

    class Bar:
        tasks = [SimpleNamespace()]

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *error: object) -> None:
            made[-1].is_ended = True

        def add_task(self, what: str, total: int | None) -> int:
            made.append(SimpleNamespace(what=what, total=total, seen=[], texts=[]))
            return 0

        def refresh(self) -> None:
            pass

        def update(self, task: int, **changes: Any) -> None:
            made[-1].seen += [changes[key] for key in changes if key == "completed"]
            made[-1].texts += [changes[key] for key in changes if key == "description"]

    monkeypatch.setattr(progress, "_bar", lambda is_counted: Bar())
    monkeypatch.setattr(progress, "_EVERY_SECONDS", 0.001)
    return made


def until(holds: object) -> None:
    end = time.monotonic() + 30
    while not holds():  # pyright: ignore[reportCallIssue]
        assert time.monotonic() < end
        time.sleep(0.001)


def test_counts_bytes_since_the_begin(bars: list[SimpleNamespace]) -> None:
    count = iter(range(500, 10**9, 10))
    with progress.shown_progress("x", 1000, True, lambda: next(count)):
        until(lambda: bars and len(bars[0].seen) >= 3)
    assert bars[0].seen[:3] == [10, 20, 30] and bars[0].seen[-1] == 1000
    assert bars[0].total == 1000 and bars[0].is_ended


def test_a_failure_is_not_shown_as_complete(bars: list[SimpleNamespace]) -> None:
    with pytest.raises(ZeroDivisionError):
        with progress.shown_progress("x", 1000, True, lambda: 0):
            until(lambda: bars and bars[0].seen)
            raise ZeroDivisionError
    assert set(bars[0].seen) == {0} and bars[0].is_ended


def test_nothing_to_do_shows_nothing(bars: list[SimpleNamespace]) -> None:
    with progress.shown_progress("x", 0, True):
        pass
    assert not bars


def test_on_a_terminal_from_two_seconds_on(
    bars: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert progress._FROM_SECONDS == 2.0
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress.shown_progress("short"):
        pass
    assert not bars
    monkeypatch.setattr(progress, "_FROM_SECONDS", 0.01)
    with progress.shown_progress("long"):
        until(lambda: bars)
    assert [(bar.what, bar.total, bar.seen) for bar in bars] == [("long", None, [])]


def test_a_text_that_changes(bars: list[SimpleNamespace]) -> None:
    numbers = itertools.count()
    with progress.shown_progress(lambda: f"\x1b{next(numbers)} tried", shown=True):
        until(lambda: bars and len(bars[0].texts) >= 2)
    assert [bars[0].what, *bars[0].texts[:2]] == [f"\\x1b{n} tried" for n in range(3)]


def test_nothing_without_a_terminal(
    bars: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_FROM_SECONDS", 0.001)
    before = threading.active_count()
    with progress.shown_progress("x"):
        assert threading.active_count() == before
    assert not progress.is_shown(None) and not bars


def test_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """As rich recognises one."""
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert progress.is_shown(None)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: False)
    assert not progress.is_shown(None)


def test_on_process_0_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert progress.is_shown(True)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert not progress.is_shown(True)


def test_what_the_bar_shows(capfd: pytest.CaptureFixture[str]) -> None:
    with progress.shown_progress("reading", 3 << 20, True):
        pass
    counted = capfd.readouterr().err
    with progress.shown_progress("compiling", shown=True):
        pass
    timed = capfd.readouterr().err
    assert "reading" in counted and "3.0/3.0 MiB" in counted
    assert "compiling" in timed and "0:00:00" in timed and "iB" not in timed
