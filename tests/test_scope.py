"""The ambient rule set: nests, is restored on exit, and is one per context."""

import contextvars
import threading

import pytest

import flax_layoutmap as flm
from flax_layoutmap._scope import current_rules, using_rules

FIRST = flm.LayoutMap("data=8", strict=False).freeze()
SECOND = flm.LayoutMap("data=2,model=4", strict=False).freeze()


def test_there_is_none_outside() -> None:
    assert current_rules() is None


def test_scopes_nest_and_are_restored() -> None:
    with using_rules(FIRST):
        assert current_rules() is FIRST
        with using_rules(SECOND):
            assert current_rules() is SECOND
        assert current_rules() is FIRST
    assert current_rules() is None


def test_none_leaves_the_scope_as_it_is() -> None:
    with using_rules(FIRST), using_rules(None):
        assert current_rules() is FIRST


def test_an_error_restores_the_scope() -> None:
    with pytest.raises(RuntimeError, match="inside"), using_rules(FIRST):
        raise RuntimeError("inside")
    assert current_rules() is None


def test_another_thread_has_its_own() -> None:
    seen = []
    with using_rules(FIRST):
        thread = threading.Thread(target=lambda: seen.append(current_rules()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_a_copied_context_takes_the_scope_along() -> None:
    with using_rules(FIRST):
        context = contextvars.copy_context()
    assert current_rules() is None
    assert context.run(current_rules) is FIRST
