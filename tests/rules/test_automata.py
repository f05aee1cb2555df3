"""Patterns as automata, compared with `re` itself."""

import re

import pytest
from hypothesis import example, given, settings
from patterns import PATTERNS, compiles

from flax_layoutmap._rules.automata import (
    Mode,
    automaton,
    difference,
    is_literal,
    sample,
    witness,
)

MODES: list[Mode] = ["search", "match", "fullmatch"]


def matches(pattern: str, mode: Mode, path: str) -> bool:
    return getattr(re.compile(pattern), mode)(path) is not None


def is_path(text: str) -> bool:
    return bool(text) and all(text.split("/"))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@settings(max_examples=200)
@given(PATTERNS)
def test_witnesses_match(pattern: str) -> None:
    if not compiles(pattern):
        return
    for mode in MODES:
        found = witness(pattern, mode)
        if found:
            assert is_path(found) and matches(pattern, mode, found)
        elif found == "":
            for path in PATHS:
                assert not matches(pattern, mode, path)


# What the generated patterns may meet.
PATHS = [
    *("a", "b", "0", "7", "9", "ab", "ba", "a0", "_", ".", "-", "a/b", "b/a", "0/a"),
    *("aa", "a/a", "b/0", "ab/01", "a/b/a", "1/2/7", "a_b", "7.9", "ab01279_/a", "01"),
]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@settings(max_examples=200)
@given(PATTERNS, PATTERNS)
def test_differences_differ(one: str, other: str) -> None:
    if not compiles(one) or not compiles(other):
        return
    for mode in MODES:
        found = difference(one, mode, other, mode)
        if found:
            assert is_path(found)
            assert matches(one, mode, found) and not matches(other, mode, found)
        elif found == "":
            for path in PATHS:
                assert not matches(one, mode, path) or matches(other, mode, path)


def test_the_properties_are_about_something() -> None:
    """Control: most of what is written by hand is understood."""
    for pattern in (
        r"layers/\d+/(gate|up)/kernel",
        "(^|/)mlp(/|$)",
        "[^/]+/(?:a|b)?x{2}",
    ):
        assert automaton(pattern, "search") is not None
    for pattern in (
        "(?!a)b",
        r"\bword",
        "(?i)a",
        r"(a)\1",
        "a*+",
        "é",
        "a{,}",
        "(?>a)",
    ):
        assert automaton(pattern, "search") is None
        assert witness(pattern, "search") is None
        assert difference(pattern, "search", "a", "search") is None


@pytest.mark.parametrize(
    ("pattern", "mode", "expected"),
    [
        ("kernel", "search", "kernel"),
        ("^/kernel", "search", ""),
        ("/kernel", "search", "x/kernel"),
        ("/kernel", "match", ""),
        ("kernel/", "fullmatch", ""),
        ("a^b", "search", ""),
        ("$a", "search", ""),
        ("a//b", "search", ""),
        (r"layers/\d+/up", "fullmatch", "layers/0/up"),
    ],
)
def test_witnesses(pattern: str, mode: Mode, expected: str) -> None:
    found = witness(pattern, mode)
    assert found is not None and (found == expected or expected and is_path(found))


@pytest.mark.parametrize(
    ("one", "other", "is_within"),
    [
        ("mlp/up/kernel", "kernel", True),
        ("kernel", "mlp/up/kernel", False),
        ("(gate|up)/kernel", "(up|gate|down)/kernel", True),
        (r"layers/\d+/kernel", "layers/.*/kernel", True),
        (r"layers/\d+/kernel", "layers/[0-4]/kernel", False),
        ("^up$", "up", True),
        ("up", "^up$", False),
        ("x?up", "up", True),
    ],
)
def test_what_is_within_what(one: str, other: str, is_within: bool) -> None:
    assert (difference(one, "search", other, "search") == "") is is_within


def test_samples() -> None:
    assert sample("kernel", "search") == "x/kernel"
    assert sample("up/", "match") == "up/x"
    assert sample("kernel", "fullmatch") == "kernel"
    assert sample("(gate|up)/[{]~/c$", "search") == "gate/{~/c"
    for pattern in ("(a|b)/{2}c", "a//b", "(?!a)b", "b{1000000000}"):
        assert sample(pattern, "search") is None
    assert is_literal("self_attn/q-1") and not is_literal("a.b")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@settings(max_examples=300)
@example(r"[^\d\D]")
@given(PATTERNS)
def test_samples_are_paths_that_match(pattern: str) -> None:
    """But for anchors in the middle of a pattern: what asks for a sample tries it."""
    for mode in MODES if compiles(pattern) else ():
        path = sample(pattern, mode)
        assert path is None or is_path(path)
        if path and not re.search(r"[$^]|\\[AZ]", pattern):
            assert matches(pattern, mode, path)
