"""Few patterns for many paths: each path is matched by those of its value alone."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_layoutmap.convert._compress import compress


def values_of(patterns: dict[str, str], path: str) -> set[str]:
    return {value for pattern, value in patterns.items() if re.search(pattern, path)}


@pytest.mark.parametrize(
    ("values", "patterns"),
    [
        # Indices, names that differ in one part, and a catch for the others.
        (
            {
                "layers/0/mlp/up/kernel": "column",
                "layers/1/mlp/up/kernel": "column",
                "layers/0/mlp/gate/kernel": "column",
                "layers/0/mlp/down/kernel": "row",
            },
            {"(up|gate)/kernel": "column", "down/kernel": "row"},
        ),
        # A pattern begins where a part does.
        (
            {"a/up/kernel": "column", "a/group/kernel": "none"},
            {"(^|/)up/kernel": "column", "group/kernel": "none"},
        ),
        # The end of a path tells it from a longer one.
        (
            {"a/kernel": "x", "a/kernel/scale": "y"},
            {"a/kernel$": "x", "kernel/scale": "y"},
        ),
        # A whole path that is the end of another.
        (
            {"embed/w": "x", "decoder/embed/w": "y"},
            {"^embed/w": "x", "decoder/embed/w": "y"},
        ),
        # Layers that differ.
        (
            {f"h/{n}/w": "first" if n < 2 else "last" for n in range(4)},
            {"(0|1)/w": "first", "(2|3)/w": "last"},
        ),
        ({"w.a": "x", "w+a": "y"}, {r"w\.a": "x", r"w\+a": "y"}),
        ({"u": "x", "w": "x", "v": "y"}, {"(^|/)(u|w)$": "x", "v": "y"}),
        ({}, {}),
    ],
)
def test_patterns_are_those_that_a_user_would_write(
    values: dict[str, str], patterns: dict[str, str]
) -> None:
    assert compress(values) == patterns


def test_layers_add_no_patterns() -> None:
    names = ["q/kernel", "k/kernel", "o/kernel", "norm/scale"]
    values = {f"layers/{n}/{own}": own[0] for n in range(80) for own in names}
    assert len(compress(values)) == len(names)


PARTS = st.sampled_from(["a", "b", "ab", "up", "group", "0", "1", "12", "x_1", "k.e"])
PATHS = st.lists(PARTS, min_size=1, max_size=4).map("/".join)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(PATHS, st.sampled_from("xyz"), max_size=15))
def test_each_path_gets_its_value_alone(values: dict[str, str]) -> None:
    patterns = compress(values)
    assert len(patterns) <= len(values)
    for path, value in values.items():
        assert values_of(patterns, path) == {value}, (path, patterns)
