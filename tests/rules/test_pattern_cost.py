"""Bounds of matching time, compared with a count of the steps tried."""

import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from patterns import PATTERNS, compiles

from flax_layoutmap._rules.pattern_cost import (
    USUAL_PATH,
    _at_most,
    _counted,
    _dotted,
    _Tries,
    slow_because,
    slow_together,
)
from flax_layoutmap._rules.patterns import (
    ALL_CHARACTERS,
    ANY,
    Node,
    NotUnderstood,
    read,
)

# What people write: of published tables of rules, and of each construct.
USUAL = [
    "kernel",
    ".*transformer.*decoder.*layers.*attention.*query.*kernel",
    ".*(encoder|decoder).*(attn|attention).*(q|k|v|query)(_proj)?.*(kernel|weight)",
    "(.*)/(.*)/(.*)/(.*)/kernel",
    ".*",
    r"layers/\d+/(gate|up)/kernel",
    "([^/]+/)+kernel",
    "(.*/)?mlp/.*",
    ".*(gate|up)_proj/kernel",
    "(?:.*/)?(attn|mlp)/(?:.*/)?kernel",
    r"(layers|blocks)(/|_)\d+/.*(q|k|v|o)(_proj)?/(kernel|bias)$",
    r"(\d+/)*\w+/(\d+/)*x",
    ".*a.*b.*c.*d",
    ".*encoder.*layers.*attention.*kernel",
    "(a+b+)+x",
    r"\w+/\w+/\w+/\w+/\w+/\w+/kernel",
    "a{3}b{2,5}",
    "^(?!.*norm).*kernel$",
    "^(?:(?!bias).)*$",
    r"(?i)(layers|blocks)/\d+/KERNEL",
    r"(?P<x>\d+)/(?P=x)/kernel",
    "(?<!pre)norm/scale",
    r"\bnorm\d*\b",
    r"layers/[0-9]{1,3}/(?>attn|mlp)/\w++/kernel",
    "decoder_block.*attention.*(query|key|value)/kernel",
    "decoder_block.*ffw_gating.*/kernel",
    "attention/(wq|wk|wv)/kernel",
    "self_attn/(q_proj|k_proj|v_proj)/kernel",
    r"model/layers/.+/mlp/experts/(gate_up|down)_proj",
    r"(encoder|decoder)/layers_\d+/(mlp/(wi|wi_0|wi_1)|attention/out)/kernel",
    "(^|/)embed(_tokens|ding|dings)?(/|$)",
]  # fmt: skip

DOUBLES = "each further character doubles"
STEPS = "more than 3e+08 steps on a path of 100 characters"
EMPTY = "it repeats what may be empty"
SLOW = {
    # Repetitions inside of repetitions.
    "(a+)+x": DOUBLES,
    "(.*/)*x": DOUBLES,
    "(x+x+)+y": DOUBLES,
    r"(\w+_?)+x": DOUBLES,
    "((a+)b?)*x": DOUBLES,
    "([a-z]+)*=": DOUBLES,
    "(?:(?:a+)+)+b": DOUBLES,
    "(a*)*b": EMPTY,
    "((a?){3})*b": EMPTY,
    "(a*b*c*d*e*f*g*h*i*j*k*l*m*n*o*p*q*r*s*t*u*v*w*x*y*z*)*": EMPTY,
    # Alternatives that begin alike.
    "(a|a)*x": DOUBLES,
    "(a|aa)+b": DOUBLES,
    "(a|ab|b)*x": DOUBLES,
    "(?:layers|layer|s)*x": DOUBLES,
    "(a|aa)" * 60 + "x": STEPS,
    "(a|a)" * 40 + "x": STEPS,
    # Repetitions in a row.
    ".*.*.*.*.*x": STEPS,
    "(.*){20}x": STEPS,
    "(.*)(.*)(.*)(.*)(.*)(.*)x": STEPS,
    # Optional parts, and empty alternatives.
    "(?:a?){60}[b]": STEPS,
    "(a?){30}[b]": STEPS,
    "(?:|a){30}[b]": STEPS,
    "(?:a|){30}[b]": STEPS,
    "(?:||){60}b": STEPS,
    "(a??){60}[b]": STEPS,
    "a?" * 30 + "a" * 30: STEPS,
    "((a?){9}){9}": STEPS,
    "(a{0,1}b?){40}c": STEPS,
    # Counts.
    "(a{1,20}){1,20}x": STEPS,
    "(?:(a|b|ab){2}){30}c": STEPS,
    "(?:){4000000000}": "too complicated",
    "((a{99}){99}){99}": "too complicated",
    "(a?){5000}b": "too complicated",
    # The same within look-around and other groups, and under flags.
    "(?=(a?){30}[b])": STEPS,
    "(?!(a+)+b)": DOUBLES,
    r"(?=x)(a?){30}\b[b]": STEPS,
    "(?<=(a|a)(a|a))b": "too complicated",
    "(?>(a?){60}[b])": STEPS,
    "(?>(a+)+)b": DOUBLES,
    "(a?){60}+[b]": STEPS,
    "(?i)(a+)+x": DOUBLES,
    "(?i:(a|A)*)x": DOUBLES,
    "(?i:k|\u212a)*x": DOUBLES,
    "(é|é)*x": DOUBLES,
    r"(\w|é)*x": DOUBLES,
    r"([^\S ]|\t)*x": DOUBLES,
    r"(a+)+\1": DOUBLES,
    r"(a)(\1?){60}x": STEPS,
    r"(\x61|a)*b": DOUBLES,
    # What is not read.
    "(?x) a b": "too complicated",
    "(a)?(?(1)b|c)": "too complicated",
    "(" * 900 + "a?" + ")" * 900: "nested too deeply",
    "a" * 3000: "it is 3000 characters long",
}  # fmt: skip


@pytest.mark.parametrize("pattern", USUAL)
def test_usual_patterns(pattern: str) -> None:
    assert slow_because(pattern) is None


@pytest.mark.parametrize("pattern", SLOW, ids=[p[:20] for p in SLOW])
def test_slow_patterns(pattern: str) -> None:
    because = slow_because(pattern)
    assert because is not None and SLOW[pattern] in because


ASK = """
import json, sys, warnings, flax_layoutmap as flm
warnings.simplefilter("ignore")
accepted = 0
for pattern in sys.stdin.read().split("\\n"):
    with open("rules.json", "w", encoding="utf-8") as file:
        json.dump({"schema": 1, "rules": {pattern: []}}, file)
    try:
        layout_map = flm.LayoutMap.from_file("rules.json")
    except flm.errors.RuleError:
        continue
    accepted += 1
    for unit in ("a", "ab", "a/", "A", "é", "x", "0", " ", "k"):
        layout_map.get(unit * (100 // len(unit)))
        layout_map.get(unit * (99 // len(unit)) + "!")
print(accepted)
"""


def test_no_pattern_of_a_file_hangs(tmp_path: object) -> None:
    """Not a measurement: what is exponential would not come back at all."""
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        input="\n".join([*SLOW, *USUAL]),
        cwd=str(tmp_path),
        capture_output=True,
        encoding="utf-8",
        timeout=240,
        check=True,
    )
    assert int(done.stdout) == len(USUAL)


# ------------------------------------------------------- what is counted, and tried


class _Enough(Exception):
    pass


def tried(node: Node, text: str) -> int:
    """How many characters `re` tries to read from the start of a text, at most.

    As it does, but for what it knows to leave out, and as if nothing matched.
    """
    count = 0

    def one() -> None:
        nonlocal count
        count += 1
        if count > 20_000:
            raise _Enough

    def go(node: Node, at: int, then: Callable[[int], object]) -> None:
        kind = node[0]
        if kind == "set":
            one()
            if at < len(text) and node[1] >> ALL_CHARACTERS.index(text[at]) & 1:
                then(at + 1)
        elif kind == "text":
            sets = [
                ("set", 1 << ALL_CHARACTERS.index(char))
                if char <= "~"
                else ("set", ANY)
                for char in node[1]
            ]
            go(("cat", sets), at, then)
        elif kind == "cat":
            first, *rest = node[1] or [("start",)]
            go(first, at, (lambda a: go(("cat", rest), a, then)) if rest else then)
        elif kind == "alt":
            for branch in node[1]:
                go(branch, at, then)
        elif kind == "rep":
            _, inner, least, most = node
            fewer = (
                "rep",
                inner,
                max(least - 1, 0),
                None if most is None else most - 1,
            )
            if most is None or most:
                go(inner, at, lambda a: go(fewer, a, then))
            if not least:
                then(at)
        elif kind == "ahead":
            go(node[1], at, lambda _: one())
            then(at)
        else:
            then(at)

    go(node, 0, lambda _: one())
    return count


@pytest.mark.filterwarnings("ignore::FutureWarning")
@settings(max_examples=300)
@given(PATTERNS, st.text(st.sampled_from(list("ab/01_")), max_size=7))
@example("(?:a?){9}[b]", "aaaaaaa")
@example("(a|ab|b)(a|ab|b)x", "abab")
@example("(?:|a|)(?=a*a*x)a{2,3}", "aaaaaa")
@example("(a|ab){1,3}(?:a??b?)?", "ababab")
@example(".*a.*ab.*a/.*b", "aabaabb")
@example(r"(?=\b)", "")
def test_no_more_is_tried_than_is_counted(pattern: str, text: str) -> None:
    assume(compiles(pattern))
    try:
        node = read(pattern).root
        tries = _Tries(node)
    except NotUnderstood:
        return
    if tries.turns:
        return
    try:
        counts = [tried(node, text[at:]) for at in range(len(text) + 1)]
    except _Enough:
        return
    assert sum(counts) <= tries.most_steps(len(text))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@settings(max_examples=300)
@given(PATTERNS, st.text(st.sampled_from(list("abB/01_é\n\t –")), max_size=6))
@example("(?i)b", "B")
@example(r"(?:a|[^\S ])\x31", "\t1")
@example("(?s:.)a{,}", "\naa")
def test_the_tree_reads_what_re_reads(pattern: str, text: str) -> None:
    """It may read more: what is looked at ahead or behind, and what stood before."""
    if not compiles(pattern) or not re.fullmatch(pattern, text):
        return
    try:
        tries = _Tries(read(pattern).root)
    except NotUnderstood:
        return
    states = opened(tries, {tries.first}, "start")
    for char in text:
        steps = [tries.steps[state] for state in opened(tries, states)]
        mask = 1 << ALL_CHARACTERS.index(char)
        states = {step[1] for step in steps if step is not None and step[0] & mask}
    back_reference = re.search(r"\\[1-9]|\(\?P=", pattern)
    assert back_reference or tries.last in opened(tries, states, "end")


def opened(tries: _Tries, states: set[int], *where: str) -> set[int]:
    """The states that some lead to without reading a character."""
    reached, waiting = set(states), [*states]
    for state in waiting:
        for after, place in tries.free[state]:
            if place in ("", *where) and after not in reached:
                reached.add(after)
                waiting.append(after)
    return reached


def test_what_is_counted() -> None:
    """By hand: at each place, the characters that are tried."""
    for pattern, length, count in (
        ("ab", 1, 1 + 2),
        ("a*b", 0, 2),
        ("a*b", 2, 2 + 4 + 6),
        ("(?:a?){2}b", 1, 3 + (3 + 2 + 1)),
        (r"\d+/", 2, 1 + 3 + 5),
    ):
        tries = _Tries(read(pattern).root)
        assert tries.most_steps(length) == count, pattern


def test_what_is_slow_together() -> None:
    patterns = [f".*a.*b.*c.*{number}" for number in range(8)]
    assert slow_together(patterns, 60) is None
    text = slow_together([*patterns, ".*a.*b.*c.*d"], 60)
    assert text is not None and "may take 2.0e+09 steps on a path of 100" in text
    assert "more than -1 s" in str(slow_together([*patterns, ".*a.*b.*c.*d"], -1))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@settings(max_examples=300)
@given(PATTERNS)
@example("(?:a?){2}[b]+(?:|a|ab)(?!a)$")
@example("a*/[^/]+")
@example(".*abc/(de|f)?[^/]+/ghijk")
def test_quick_bounds_are_never_less(pattern: str) -> None:
    assume(compiles(pattern))
    try:
        root = read(pattern).root
    except NotUnderstood:
        return
    why, steps = _counted(root, USUAL_PATH)
    bound, (why_dotted, dotted) = (
        _at_most(root, USUAL_PATH),
        _counted(_dotted(root), USUAL_PATH),
    )
    assert bound is None or why == EMPTY or steps <= bound
    assert why is not None or why_dotted is not None or steps <= 2 * dotted
