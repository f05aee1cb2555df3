"""Collectives that sum gradients, tied to the parameters by the results they become."""

import collections
import functools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pod_hlo import (
    EVERY_FORM,
    NAMES,
    SLICES,
    SUM,
    WHOLE,
    accounted,
    arguments_of,
    chained,
    entry,
    lines_that_communicate,
    looped,
    program,
    read,
    sample,
    sent,
)

from flax_layoutmap.pod._hlo import Program, read_program

LAYERS = "state[0]['layers/"
KERNELS = ("attn/wk", "attn/wo", "attn/wq", "attn/wv")
KERNELS = (*KERNELS, "mlp/down", "mlp/gate", "mlp/up")
NORMS = {"layers/n1/scale", "layers/n2/scale", "norm/scale"}


@functools.cache
def with_results(name: str, sizes: tuple[int, int, int]) -> Program:
    # The state leaves as it came in, and the loss after it.
    paths = arguments_of("1b_cpu")
    per_slice = sizes[1] * sizes[2]
    slices = [place // per_slice for place in range(2 * per_slice)]
    return read_program(
        sample(name),
        NAMES,
        sizes,
        slice_of=slices if sizes[0] == 2 else [],
        paths=paths,
        results=dict(enumerate(paths[:-1])),
    )


def summed(found: Program, *kinds: str) -> collections.Counter[str]:
    return collections.Counter(
        one.path.removeprefix("state[0]['")
        for one in found.collectives
        if one.kind in kinds and one.axes != ("tensor",) and one.path
    )


def test_gradients_of_a_scanned_model() -> None:
    found = with_results("1b_v5e_plain", (1, 4, 4))
    # Each kernel once: in the loop over the layers, and the head after it.
    once = dict.fromkeys((*(f"layers/{name}" for name in KERNELS), "head"), 1)
    assert summed(found, "reduce-scatter") == once
    # Two all-reduces, of the layers' norms together, and of the last one and the loss.
    assert summed(found, "all-reduce") == dict.fromkeys(NORMS, 1)


def test_gradients_that_the_compiler_sums_in_permutes() -> None:
    for name, sizes in (("1b_v5e", (1, 4, 4)), ("70b_tpu7x", (1, 16, 8))):
        found = with_results(name, sizes)
        moved = summed(found, "collective-permute")
        assert {f"layers/{kernel}" for kernel in KERNELS} <= set(moved)
        assert summed(found, "all-reduce") == dict.fromkeys(NORMS, 1)


def test_gradients_of_a_program_for_cpus() -> None:
    found = with_results("1b_cpu", (1, 4, 4))
    names = (*(f"layers/{name}" for name in KERNELS), "head", *NORMS)
    assert summed(found, "all-reduce") == dict.fromkeys(names, 1)


def test_gradients_between_slices() -> None:
    found = with_results("8b_two_v5e", (2, 32, 8))
    over = [one for one in found.collectives if one.over_dcn]
    reduced = {one.path for one in over if one.kind == "all-reduce"}
    kernels = {f"{LAYERS}{name}" for name in KERNELS}
    assert kernels | {"state[0]['head", "state[0]['embed"} <= reduced


@pytest.mark.parametrize(
    ("name", "sizes"), [("1b_v5e_plain", (1, 4, 4)), ("8b_two_v5e", (2, 32, 8))]
)
def test_nothing_else_changes(name: str, sizes: tuple[int, int, int]) -> None:
    found, plain = with_results(name, sizes), program(name)
    assert found.unrecognised == plain.unrecognised == ()
    for axes in {one.axes for one in plain.collectives}:
        # What was made of several leaves is split; a rest of a division may go.
        sums = [
            sum(
                one.wire_bytes_per_step for one in these.collectives if one.axes == axes
            )
            for these in (found, plain)
        ]
        assert abs(sums[0] - sums[1]) <= 100
    # No activation is taken for a gradient; looked up rows are of their table.
    sums = [
        one
        for one in found.collectives
        if one.axes == ("tensor",) and one.kind != "all-gather"
    ]
    assert {one.path for one in sums if len(one.shape) == 3} == {None}


# ------------------------------------------------------------------ one form each

REDUCED = f"all-reduce(%p), channel_id=1, {WHOLE}, to_apply=%add"


def path_of(*lines: str, before: str = "", **options: object) -> list[str | None]:
    text = entry(*lines, before=before)
    found = read(text, results={0: "w", 1: "v"}, **options)
    assert found.unrecognised == ()
    return [one.path for one in found.collectives]


FUSED = """\
%fused (a: f32[8,4], b: f32[8,4]) -> f32[8,4] {
  %a = f32[8,4] parameter(0)
  %b = f32[8,4] parameter(1)
  %c = f32[8,4] multiply(%a, %b)
  ROOT %d = f32[8,4] sqrt(%c)
}
"""


@pytest.mark.parametrize(
    "lines",
    [
        ("%x = f32[8,4] add(%p, %r)",),
        ("%y = f32[8,4] convert(%r)", "%x = f32[8,4] subtract(%p, %y)"),
        ("%x = f32[8,4] select(%p, %p, %r)",),
        ("%x = f32[8,4] fusion(%p, %r), calls=%fused",),
        ("%y = f32[8,4] copy(%r)", "%x = f32[8,4] dynamic-update-slice(%p, %y, %i)"),
        ("%x = f32[8,4] opt-barrier(%r)",),
    ],
)
def test_what_an_optimizer_does_is_followed(lines: tuple[str, ...]) -> None:
    given = (f"%r = f32[8,4] {REDUCED}", *lines)
    ends = "ROOT %o = (f32[8,4], f32[8,4]) tuple(%x, %p)"
    assert path_of(*given, ends, before=FUSED) == ["w"]
    assert path_of(*given, ends.replace("%x, %p", "%p, %x"), before=FUSED) == ["v"]


@pytest.mark.parametrize(
    "line",
    [
        "%x = f32[8,4] dot(%r, %p)",
        "%x = f32[8,4] broadcast(%r)",
        "%x = f32[8,4] reduce(%r, %p)",
        "%x = f32[8,4] select(%r, %p, %p)",
        "%x = f32[8,4] dynamic-update-slice(%p, %p, %r)",
        "%x = f32[8,4] negate(%p)",
    ],
)
def test_other_uses_are_not(line: str) -> None:
    ends = "ROOT %o = (f32[8,4], f32[8,4]) tuple(%x, %p)"
    assert path_of(f"%r = f32[8,4] {REDUCED}", line, ends) == [None]


def test_the_first_result_has_it() -> None:
    ends = "ROOT %o = (f32[8,4], f32[8,4]) tuple(%x, %y)"
    lines = ("%x = f32[8,4] add(%p, %r)", "%y = f32[8,4] multiply(%r, %r)", ends)
    assert path_of(f"%r = f32[8,4] {REDUCED}", *lines) == ["w"]


def test_parameters_that_are_packed_into_one_sum_are_both_named() -> None:
    text = entry(
        f"%r = f32[8,4] {REDUCED}",
        "%a = f32[4,4] slice(%r), slice={[0:4], [0:4]}",
        "%b = f32[4,4] slice(%r), slice={[4:8], [0:4]}",
        "%m = f32[4,4] multiply(%b, %b)",
        "ROOT %o = (f32[4,4], f32[4,4], f32[4,4]) tuple(%a, %b, %m)",
    )
    names = {0: "w", 1: "v", 2: "v's moment"}
    (one,) = read(text, results=names, parameters=(0, 1)).collectives
    assert (one.path, one.joined) == ("w", ("v",))
    # What is not a parameter follows the first.
    (one,) = read(text, results=names).collectives
    assert (one.path, one.joined) == ("w", ())


def test_gradients_that_are_summed_together_are_told_apart() -> None:
    found = read(
        entry(
            "%q = f32[8,8] negate(%p)",
            f"%r = (f32[8,4], f32[8,8]) all-reduce(%p, %q), {WHOLE}, to_apply=%add",
            "%a = f32[8,4] get-tuple-element(%r), index=0",
            "%b = f32[8,8] get-tuple-element(%r), index=1",
            "ROOT %o = (f32[8,4], f32[8,8]) tuple(%a, %b)",
        ),
        results={0: "w", 1: "v"},
    )
    kinds = [(one.path, one.bytes, one.shape) for one in found.collectives]
    assert kinds == [("w", 128, (8, 4)), ("v", 256, (8, 8))]
    # Of one leaf, they stay one.
    both = "ROOT %o = (f32[8,4], f32[8,8]) tuple(%a, %a)"
    assert path_of(
        f"%r = (f32[8,4], f32[8,4]) all-reduce(%p, %p), {WHOLE}, to_apply=%add",
        "%a = f32[8,4] get-tuple-element(%r), index=0",
        "%b = f32[8,4] get-tuple-element(%r), index=1",
        "%s = f32[8,4] add(%a, %b)",
        both.replace("%a, %a", "%s, %a"),
    ) == ["w"]


def test_through_a_loop() -> None:
    lines = looped("constant(3)", "constant(1)", "constant(0)").partition("ENTRY")
    loop = (
        "%zero = s32[] constant(0)",
        "%in = (s32[], f32[8,4]) tuple(%zero, %p)",
        "%w = (s32[], f32[8,4]) while(%in), condition=%condition, body=%body",
        "%g = f32[8,4] get-tuple-element(%w), index=1",
        "ROOT %o = (f32[8,4], f32[8,4]) tuple(%p, %g)",
    )
    before = lines[0].partition(SUM)[2]
    assert path_of(*loop, before=before) == ["v"]
    # What one round has summed, the next one gives back.
    late = before.replace("tuple(%next, %red)", "tuple(%next, %red, %bx)")
    third = [line.replace("index=1", "index=2") for line in loop]
    third[1] = third[1].replace("%p)", "%p, %p)")
    assert path_of(*third, before=late) == ["v"]


def test_through_a_branch() -> None:
    def branch(name: str, line: str) -> str:
        return (
            f"%{name} (q: f32[8,4]) -> f32[8,4] {{\n"
            f"  %q = f32[8,4] parameter(0)\n  ROOT %s{name} = f32[8,4] {line}\n}}\n"
        )

    before = branch("one", f"all-reduce(%q), {WHOLE}, to_apply=%add")
    before += branch("two", "copy(%q)")
    lines = (
        f"%r = f32[8,4] {REDUCED}",
        "%x = f32[8,4] conditional(%i, %p, %r), branch_computations={%one, %two}",
        "ROOT %o = (f32[8,4], f32[8,4]) tuple(%p, %x)",
    )
    assert path_of(*lines, before=before) == ["v", "v"]


def test_through_another_slice() -> None:
    lines = (
        sent("ALL_REDUCE"),
        "%d = (f32[8,4], token[]) recv-done(%v)",
        "%x = f32[8,4] get-tuple-element(%d), index=0",
        "ROOT %o = (f32[8,4], f32[8,4]) tuple(%x, %p)",
    )
    text = entry(*lines, devices=4)
    found = read(text, slice_of=SLICES, results={0: "w", 1: "v"})
    assert [(one.path, one.over_dcn) for one in found.collectives] == [("w", True)]


# --------------------------------------------------------------------------- damage

WHOLE_TEXT = EVERY_FORM.replace(
    "  %w = (s32[]", "  ROOT %w = (s32[]"
)  # so that there is a result to follow


def check(text: str) -> None:
    found = read(text, slice_of=SLICES, paths=["p"], results={1: "w", 0: "v"})
    assert accounted(found) >= lines_that_communicate(text)


def test_the_text_that_is_damaged_is_whole() -> None:
    found = read(WHOLE_TEXT, slice_of=SLICES, results={1: "w"})
    assert "w" in {one.path for one in found.collectives}
    assert chained(1) in WHOLE_TEXT


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(0, len(WHOLE_TEXT)))
def test_damage(order: random.Random, end: int) -> None:
    lines = WHOLE_TEXT.splitlines()
    order.shuffle(lines)
    check("\n".join(lines))
    check(WHOLE_TEXT[:end])
    check(WHOLE_TEXT[:end] + order.choice("%(){}[],=") + WHOLE_TEXT[end + 3 :])


def test_what_is_looked_up_in_a_table() -> None:
    def path(kept: str, other: str) -> str | None:
        text = entry(
            "%g = f32[8,4] gather(%p, %i), offset_dims={1}",
            "%n = f32[8,4] negate(%p)",
            "%b = f32[8,4] broadcast(%zero)",
            f"%x = f32[8,4] select(%mask, {kept}, {other})",
            f"%r = f32[8,4] {REDUCED.replace('%p', '%x')}",
        )
        (one,) = read(text, paths=["table"]).collectives
        return one.path

    assert path("%g", "%b") == path("%b", "%g") == "table"
    assert path("%g", "%g") == path("%g", "%p") == "table"
    assert path("%g", "%n") == path("%n", "%g") == path("%b", "%b") is None


def test_what_comes_from_another_slice_or_a_branch_is_still_the_table() -> None:
    def branch(name: str) -> str:
        return (
            f"%{name} (q: f32[8,4]) -> f32[8,4] {{\n"
            f"  %q = f32[8,4] parameter(0)\n  ROOT %s{name} = f32[8,4] copy(%q)\n}}\n"
        )

    def path(*operands: str) -> str | None:
        names = ", ".join(operands)
        branches = "branch_computations={%one, %two}"
        text = entry(
            sent("ONE_TO_ONE"),
            "%d = (f32[8,4], token[]) recv-done(%v)",
            "%e = f32[8,4] get-tuple-element(%d), index=0",
            "%n = f32[8,4] negate(%p)",
            f"%c = f32[8,4] conditional(%i, {names}), {branches}",
            "%x = f32[8,4] select(%mask, %c, %e)",
            "%r = f32[8,4] all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add",
            before=branch("one") + branch("two"),
            devices=4,
        )
        found = read(text, slice_of=SLICES, paths=["table"]).collectives
        return next(one.path for one in found if one.kind == "all-reduce")

    assert path("%p", "%p") == "table"
    assert path("%p", "%n") is None


def test_names_that_go_round_in_circles() -> None:
    text = entry(
        "%a = f32[8,4] add(%b, %c)",
        "%b = f32[8,4] add(%a, %r)",
        "%c = (f32[8,4]) get-tuple-element(%c), index=0",
        f"%r = f32[8,4] {REDUCED}",
        "ROOT %o = (f32[8,4]) tuple(%a)",
    )
    assert [one.path for one in read(text, results={0: "w"}).collectives] == ["w"]
