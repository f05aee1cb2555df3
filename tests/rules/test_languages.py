"""Patterns as automata, against `re` itself."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from patterns import PATTERNS, compiles

from flax_layoutmap import Rule
from flax_layoutmap._lint.examples import _FEW, Examples
from flax_layoutmap._lint.patterns import _ends_in_a_word
from flax_layoutmap._rules.languages import (
    Mode,
    automaton,
    difference,
    is_literal,
    other_sample,
    sample,
    witness,
)
from flax_layoutmap._rules.pattern_tree import WORD, shape_of

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
    assert sample("kernel", "search") == ("x/kernel", True)
    assert sample("up/", "match") == ("up/x", True)
    assert sample("kernel", "fullmatch") == ("kernel", True)
    assert sample("(a|b)/{2}c", "search") == (None, False)
    assert sample("(gate|up)/[{]~/c$", "search") == ("gate/{~/c", False)
    assert sample("a//b", "search") == (None, False)
    assert sample("(?!a)b", "search") == (None, False)
    assert is_literal("self_attn/q-1") and not is_literal("a.b")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@settings(max_examples=300)
@example(r"[^\d\D]")
@given(PATTERNS)
def test_samples_that_are_sure_match(pattern: str) -> None:
    for mode in MODES if compiles(pattern) else ():
        path, is_sure = sample(pattern, mode)
        assert path is None or is_path(path)
        assert not is_sure or (path and matches(pattern, mode, path))


@pytest.mark.parametrize(
    ("pattern", "shape"),
    [
        ("layers/12/kernel", "~/~/~"),
        (r"block/\d+/(query|key)_1/x*", r"~/\d+/(~|~)~/x*"),
        ("^up/[0-9]+/[^/]+/norms?", "^up/[0-9]+/[^/]+/norms?"),
        ("(?:gate|up)-1", "(?:~|~)-1"),
        (r"a/[.x]b", r"a/[.x]b"),  # a class holds what looks like a word
        (r"a/[]x]b", r"a/[]x]b"),
        ("a{2}/b", "a{2}/b"),
        ("a~b", "a~b"),
    ],
)
def test_the_shapes_of_patterns(pattern: str, shape: str) -> None:
    found, words = shape_of(pattern)
    assert found == shape and found.count(WORD) == len(words)
    told = iter(words)
    assert re.sub(WORD, lambda _: next(told), found) == pattern


def test_patterns_that_end_in_a_word() -> None:
    for pattern in (".*/mlp/kernel", r".*(a|b)/\d+/up", ".*~"):
        assert _ends_in_a_word(shape_of(pattern)[0])
    for pattern in (".*/a|b/up", ".*/kernels?", "^.*up", ".*/(a|b)", ".*up$", ".*é"):
        assert not _ends_in_a_word(shape_of(pattern)[0])


# ------------------------------------------------------- what saves lint the automata


@pytest.mark.filterwarnings("ignore::FutureWarning")
@settings(max_examples=50)
@given(st.lists(PATTERNS.filter(compiles), max_size=30, unique=True))
def test_examples_find_the_rules_that_match(patterns: list[str]) -> None:
    """By texts that each rule must hold, once there are many."""
    many = [f"layers/{number}/kernel" for number in range(_FEW)]
    rules = [Rule(pattern, None) for pattern in dict.fromkeys([*patterns, *many])]
    for mode in MODES:
        examples = Examples(rules, mode)
        for path in [*PATHS, "model/layers/7/kernel", "layers/12/kernel", "kernel"]:
            expected = [
                at for at, r in enumerate(rules) if matches(r.pattern, mode, path)
            ]
            assert list(examples.matching(path)) == expected


def test_an_exact_key_decides_alone() -> None:
    rules = [Rule("a/.*", None), Rule("a/b", None), Rule("c/d", None, rank="skip")]
    examples = Examples(rules, "search")

    def asked(path: str) -> list[int]:
        return [at for at in examples.likely(path) if examples.is_asked(at, path)]

    assert asked("a/b") == [1]
    assert asked("c/d") == [2]
    assert asked("a/bb") == [0, 1]
    key = Rule("a+", None, rank="skip")  # no text that the path would have to hold
    many = [Rule(f"layers/{number}/kernel", None) for number in range(_FEW)]
    examples = Examples([key, *many], "search")
    assert list(examples.likely("a+")) == [0] and examples.is_asked(0, "a+")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@settings(max_examples=200)
@given(PATTERNS)
def test_another_sample_is_a_path(pattern: str) -> None:
    for mode in MODES:
        found = other_sample(pattern, mode) if compiles(pattern) else None
        assert found is None or is_path(found)


def test_alternatives_are_found_by_the_texts_of_each() -> None:
    patterns = [f"attn_{n}a/query|attn_{n}a/key" for n in range(_FEW)]
    patterns += [f"(wide_{n}b|deep_{n}b)(/|$)" for n in range(_FEW)]
    patterns += ["attn_3a/query|up", "x|y", ".*"]  # of a short text, or none
    examples = Examples([Rule(pattern, None) for pattern in patterns], "search")
    always = [2 * _FEW, 2 * _FEW + 1, 2 * _FEW + 2]
    for path, own in (
        ("x/attn_3a/query", 3),
        ("x/attn_3a/key", 3),
        ("a/deep_5b/kernel", _FEW + 5),
        ("a/wide_5b", _FEW + 5),
    ):
        likely = list(examples.likely(path))
        assert own in likely and set(always) <= set(likely) and len(likely) < 8
        expected = [at for at, p in enumerate(patterns) if matches(p, "search", path)]
        assert list(examples.matching(path)) == expected
