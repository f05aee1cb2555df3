"""Generated patterns and paths that match each other often."""

import re
import warnings

from hypothesis import strategies as st

# Few different characters, so that generated patterns meet generated paths often.
CHARACTERS = st.sampled_from(list("ab/01279_.-"))
PARTS = st.text(st.sampled_from(list("ab01279_.")), min_size=1, max_size=4)
PATHS = st.lists(PARTS, min_size=1, max_size=4).map("/".join)


def character_class() -> st.SearchStrategy[str]:
    inside = st.sampled_from(
        [
            "a",
            "b",
            "0",
            "7",
            "9",
            "0-9",
            "1-3",
            "a-z",
            "!-5",
            "/-:",
            r"\d",
            r"\w",
            r"\D",
        ]
        + ["_", ".", "^", "-", r"\-", r"\]", "0-9a", "[", "(", "{", "|", "2-2"]
    )
    body = st.lists(inside, min_size=1, max_size=3).map("".join)
    return st.tuples(st.sampled_from(["", "^", "]", "^]"]), body).map(
        lambda parts: f"[{parts[0]}{parts[1]}]"
    )


def atoms() -> st.SearchStrategy[str]:
    return st.one_of(
        st.text(st.sampled_from(list("ab/01279_")), min_size=1, max_size=4),
        st.sampled_from(
            [".", r"\.", r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", r"\b", r"\B", r"\A"]
            + [r"\Z", "^", "$", r"\/", r"\-", r"\_", r"\x31", r"\061", "\\u0031", r"\1"]
            + [r"\N{DIGIT ONE}", "}", "{", "{,}", "]", "(?i)", "(?x) ", "(?#0)"]
        ),
        character_class(),
    )


QUANTIFIERS = ["*", "+", "?", "{2}", "{1,2}", "{,2}", "{0,}", "{,}", "*?", "??", "*+"]
QUANTIFIERS += ["?+", "++", "{1,2}+", "{0}"]
GROUPS = ["(", "(?:", "(?P<n>", "(?P<n1>", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:"]


def combined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, st.sampled_from(QUANTIFIERS)).map("".join),
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("|".join),
        st.tuples(st.sampled_from(GROUPS), inner).map(lambda two: f"{two[0]}{two[1]})"),
        st.tuples(inner, st.sampled_from([r"(.)\1", r"(?P<m>\d)(?P=m)"])).map("".join),
    )


PATTERNS = st.recursive(atoms(), combined, max_leaves=8)


def compiles(pattern: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(pattern)
    except (re.error, OverflowError):
        return False
    return True
