"""Patterns as automata, against `re` itself; how long patterns may take."""

import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_properties import PATTERNS, compiles

from flax_layoutmap import Rule, _pattern_cost
from flax_layoutmap._languages import (
    Mode,
    automaton,
    difference,
    is_literal,
    other_sample,
    sample,
    witness,
)
from flax_layoutmap._lint_examples import _FEW, Examples
from flax_layoutmap._lint_patterns import _ends_in_a_word
from flax_layoutmap._pattern_cost import slow_because, steps_of
from flax_layoutmap._pattern_tree import WORD, shape_of

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
        ("(?:gate|up)-1", "(?:gate|up)-1"),
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


# ------------------------------------------------------------------------- cost

QUICK = [
    "kernel",
    ".*",
    r"layers/\d+/(gate|up)/kernel",
    "([^/]+/)+kernel",
    "(?:.*/)?(attn|mlp)/(?:.*/)?kernel",
    r"(layers|blocks)(/|_)\d+/.*(q|k|v|o)(_proj)?/(kernel|bias)$",
    r"(\d+/)*\w+/(\d+/)*x",
    ".*a.*b.*c.*d",
    "(a+b+)+x",
    r"\w+/\w+/\w+/\w+/\w+/\w+/kernel",
    "a{3}b{2,5}",
    "^(?!.*norm).*kernel$",
    r"(?i)(layers|blocks)/\d+/KERNEL",
    r"(?P<x>\d+)/(?P=x)/kernel",
    "(?<!pre)norm/scale",
]
SLOW = {
    "(a+)+x": "each further character doubles",
    "(a|a)*x": "each further character doubles",
    "(a|ab|b)*x": "each further character doubles",
    "(a*)*x": "each further character doubles",
    r"(\w+_?)+x": "each further character doubles",
    "(a{1,20}){1,20}x": "each further character doubles",
    "((a+)b?)*x": "each further character doubles",
    ".*.*.*.*.*x": "it has 5 repetitions in a row that can read the same text",
    "a?" * 30 + "a" * 30: "many optional parts",
    "(a|aa)" * 30 + "x": "many optional parts",
    "(?i)(a+)+x": "repeats a group, beside look-around",
    r"(?=x)a*b*c*d*e*": "more than 4 quantifiers",
    "a" * 3000: "it is 3000 characters long",
    "(a*b*c*d*e*f*g*h*i*j*k*l*m*n*o*p*q*r*s*t*u*v*w*x*y*z*)*": "",
}


@pytest.mark.parametrize("pattern", QUICK)
def test_quick_patterns(pattern: str) -> None:
    assert slow_because(pattern) is None


@pytest.mark.parametrize("pattern", SLOW, ids=[p[:20] for p in SLOW])
def test_slow_patterns(pattern: str) -> None:
    because = slow_because(pattern)
    assert because is not None and SLOW[pattern] in because


@pytest.mark.parametrize("pattern", QUICK)
def test_what_is_called_quick_is_quick(pattern: str) -> None:
    """Not a measurement: what is exponential would not come back at all."""
    compiled = re.compile(pattern)
    for text in ("a" * 60, "a/" * 30 + "!", "0" * 60 + "!", "layers/1/" * 8, "ab" * 30):
        began = time.monotonic()
        compiled.search(text + "!")
        assert time.monotonic() - began < 20


@settings(max_examples=100)
@given(PATTERNS)
def test_any_pattern_is_judged(pattern: str) -> None:
    if compiles(pattern):
        assert slow_because(pattern) is None or isinstance(slow_because(pattern), str)


def test_steps() -> None:
    found = [
        steps_of(p) for p in ("up/kernel", "up/.*", "(up|u)/.*", ".*a.*", ".*a.*b.*")
    ]
    assert found == sorted(found) and len(set(found)) == len(found)
    assert steps_of("up/kernel") == 100
    assert steps_of("(?i)a*b*c*") == steps_of(".*a.*b.*")


def test_what_is_too_complicated_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = "(ab?c?d?e?f?)*(gh?)*zz"
    _pattern_cost._judged.cache_clear()
    monkeypatch.setattr(_pattern_cost, "_MOST_EDGES", 1)
    assert slow_because(pattern) == "it is too complicated to tell"
    _pattern_cost._judged.cache_clear()


# ------------------------------------------------------- what saves lint the automata


@pytest.mark.filterwarnings("ignore::FutureWarning")
@settings(max_examples=300)
@given(PATTERNS)
def test_what_is_quick_at_a_glance_is_quick(pattern: str) -> None:
    if compiles(pattern) and _pattern_cost._is_quick(pattern):
        assert _pattern_cost._judged(pattern)[0] is None


def test_most_patterns_are_quick_at_a_glance() -> None:
    """Control: and those that are not are looked at."""
    for pattern in (r"layers/\d+/(gate|up)/kernel", ".*/mlp/.*", "a/b", "[^/]+/x$"):
        assert _pattern_cost._is_quick(pattern)
    for pattern in ("(a+)+b", "(a|a)*", ".*.*.*.*.*.*x", "(?=a)(b+)+"):
        assert not _pattern_cost._is_quick(pattern) and slow_because(pattern)


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
