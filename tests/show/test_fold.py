"""Folding of paths that differ only in indices."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flax_layoutmap._show.table import fold, natural_key, spell_indices


def texts(paths: list[str], alike: list[int] | None = None) -> list[str]:
    return [row.text for row in fold(paths, alike or [0] * len(paths))]


def expand(text: str) -> list[str]:
    """What a folded path stands for, as a shell would expand it."""
    pieces = re.split(r"\{([^}]*)\}", text)
    choices: list[list[str]] = []
    for at, piece in enumerate(pieces):
        if at % 2 == 0:
            choices.append([piece])
            continue
        found: list[str] = []
        for run in piece.split(","):
            first, *rest = map(int, run.split(".."))
            last, step = (rest + [first, 1][len(rest) :])[:2] if rest else (first, 1)
            found += map(str, range(first, last + 1, step))
        choices.append(found)
    return ["".join(parts) for parts in itertools.product(*choices)]


def test_several_indices_and_linens_names() -> None:
    nested = [f"s/{i}/blocks/{j}/w" for i in range(4) for j in range(6)]
    assert texts(nested) == ["s/{0..3}/blocks/{0..5}/w"]
    assert texts([f"layers_{at}/w" for at in (0, 1, 10, 11, 2)]) == [
        "layers_{0..2,10,11}/w"
    ]
    assert texts(["stage_1_block_0", "stage_1_block_1", "stage_2_block_0"]) == [
        "stage_1_block_{0,1}",
        "stage_2_block_0",
    ]
    assert texts([f"0/nu/h/{at}/w" for at in range(3)]) == ["0/nu/h/{0..2}/w"]


def test_indices_that_are_no_product_are_several_rows() -> None:
    paths = ["s/0/b/0", "s/0/b/1", "s/1/b/0", "s/1/b/1", "s/1/b/2", "s/2/b/0"]
    assert texts(paths) == ["s/0/b/{0,1}", "s/1/b/{0..2}", "s/2/b/0"]
    assert texts(["a/0/0", "a/1/1"]) == ["a/0/0", "a/1/1"]


@pytest.mark.parametrize(
    "paths",
    [
        ["a%251", "a%252"],  # a percent sign, and a digit
        ["mlp/w1", "mlp/w2", "mlp/w3", "mlp/w4"],
        ["x/007", "x/008"],  # no numbers that a list would have
        ["conv3x3/w", "conv5x5/w"],
    ],
)
def test_digits_that_are_no_index(paths: list[str]) -> None:
    assert texts(paths) == paths


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([0, 1, 2], "{0..2}"),
        ([0, 2, 4], "{0,2,4}"),
        ([1, 3, 5, 7], "{1..7..2}"),
        ([0, 2, 5, 7, 10, 13], "{0,2,5,7,10,13}"),
        ([0, 2, 5, 7, 10, 13, 17, 18, 19], "{0,2,5,…,17..19}"),
    ],
)
def test_spelling(indices: list[int], text: str) -> None:
    assert spell_indices(indices) == text


def test_sorted_as_people_count() -> None:
    paths = ["layers/10/w", "layers/2/w", "b", "layers_10", "layers_9", "layers/2"]
    assert sorted(paths, key=natural_key) == [
        "b",
        "layers/2",
        "layers/2/w",
        "layers/10/w",
        "layers_9",
        "layers_10",
    ]


PARTS = st.sampled_from(["a", "b_0", "b_1", "b_2", "0", "1", "2", "3", "w1", "w2", "x"])


@given(
    st.lists(st.lists(PARTS, min_size=1, max_size=4).map("/".join), unique=True),
    st.data(),
)
def test_every_path_is_in_one_row(paths: list[str], data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.sampled_from("pq"), min_size=len(paths)))
    rows = fold(paths, keys[: len(paths)])
    assert sorted(at for row in rows for at in row.members) == list(range(len(paths)))
    for row in rows:
        assert sorted(expand(row.text)) == sorted(paths[at] for at in row.members)
        assert len({keys[at] for at in row.members}) == 1
