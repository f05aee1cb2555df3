"""Collectives of compiled programs: real programs, and each form.

The programs in `golden/hlo` are one training step of a Llama-like decoder, compiled for
TPU slices with libtpu 0.0.42 (and one for CPUs), without devices, and a smaller one
with libtpu 0.0.50 (jax 0.12):

    1b_v5e        16 layers as a scan, v5e:4x4, mesh data=1, fsdp=4, tensor=4
    1b_v5e_plain  the same without collective matrix products
    1b_cpu        the same on 16 CPU devices
    8b_two_v5e    32 layers, two such slices, mesh data=2, fsdp=32, tensor=8
    70b_tpu7x     80 layers, tpu7x:4x4x4, mesh data=1, fsdp=16, tensor=8
    decoder_v5e_0050  4 layers as a scan, v5e:4x4, mesh fsdp=4, tensor=4
"""

import collections
import functools
import json
import lzma
import math
import re
from pathlib import Path
from typing import Any

import pytest
from pods import WHOLE, computation, entry, read

from flax_layoutmap.pod._hlo import Program, read_program
from flax_layoutmap.pod._hlo_text import split
from flax_layoutmap.pod._report_text import Collective

SAMPLES = Path(__file__).parents[1] / "golden" / "hlo"
NAMES = ("data", "fsdp", "tensor")
MIB = 2**20
FSDP, TENSOR = ("fsdp",), ("tensor",)
# By kind and axes: operations, executions, MiB sent by a device.
EXPECTED = json.loads((SAMPLES / "expected.json").read_text("utf-8"))


@functools.cache
def sample(name: str) -> str:
    return lzma.decompress((SAMPLES / f"{name}.hlo.xz").read_bytes()).decode()


@functools.cache
def program(name: str, named_by: str = "") -> Program:
    """A sample, read, with the arguments of another or itself as names of leaves.

    The state leaves as it came in, and the loss after it.
    """
    sizes: dict[str, int] = dict(zip(NAMES, EXPECTED[name]["mesh"], strict=True))
    paths = arguments_of(named_by) if named_by else []
    return read_program(
        sample(name),
        sizes,
        slices=sizes["data"],
        paths=paths,
        results=dict(enumerate(paths[:-1])),
    )


def arguments_of(name: str) -> list[str]:
    """What a program calls its arguments, in order, such as `layers/attn/wq`.

    The TPU compiler renames some arguments; their order stays.
    """
    text = sample(name).partition("\nENTRY ")[2]
    called = dict(re.findall(r' parameter\((\d+)\).*?op_name="([^"]*)"', text))
    names = [called[str(at)].replace("\\'", "'") for at in range(len(called))]
    ends = ("state[0]['", "'].value")
    return [
        name.replace("']['", "/").removeprefix(ends[0]).removesuffix(ends[1])
        for name in names
    ]


def counted(collectives: tuple[Collective, ...]) -> dict[str, list[float]]:
    rows: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0, 0])
    for one in collectives:
        axes = (*one.axes, *(["DCN"] if one.over_dcn else []))
        row = rows[f"{one.kind} over {'+'.join(axes)}"]
        row[0] += 1
        row[1] += one.executions
        row[2] += one.wire_bytes_per_step / MIB
    return {key: [row[0], row[1], round(row[2], 1)] for key, row in rows.items()}


# ------------------------------------------------------------------- real programs


@pytest.mark.parametrize("name", EXPECTED)
def test_a_real_program(name: str) -> None:
    found, wanted = program(name), EXPECTED[name]
    assert counted(found.collectives) == wanted["counts"]
    assert found.unread == ()


def test_elements_of_tuples_as_operands() -> None:
    """As jaxlib 0.12 writes them, `%w#1` for get-tuple-element; nested ones too."""
    kinds = ", ".join(f"f32[{size}]{{0}}" for size in range(1, 13))
    made = split(
        f"ENTRY %main (w: ({kinds})) -> f32[2] {{\n"
        f"  %w.2 = ({kinds}) parameter(0)\n"
        f"  %n = (({kinds}), s32[]) custom-call(%w.2#1, %w.2#10)\n"
        "  ROOT %r = f32[2]{0} add(%n#0#1, %w.2#1)\n}\n"
    )
    root = made.root("main")
    assert root is not None and root.operands == ("n#0#1", "w.2#1")
    for name, shape in {"n#0#1": (2,), "w.2#10": (11,), "n#0": None}.items():
        op = made.instruction("main", name)
        assert op is not None and op.opcode == "get-tuple-element"
        assert (op.shape, *op.operands) == (shape, name.rpartition("#")[0])
    assert made.instruction("main", "x#1") is None


def test_source_lines() -> None:
    sources = {
        one.source for one in program("1b_v5e").collectives if one.kind == "all-reduce"
    }
    assert "llama.py:36 Attn.__call__" in sources
    assert not any("site-packages" in source for source in sources if source)
    lines = 'FileNames\n1 "/a/b/mod\\303\\250le.py"\n\nFileLocations\n'
    lines += "1 {file_name_id=1 line=36}\n\nStackFrames\n1 {file_location_id=1}\n"
    metadata = 'metadata={op_name="x" stack_frame_id=1}'
    copied = ("%c = f32[8,4] copy(%r)", f"%s = f32[8,4] negate(%c), {metadata}")
    for given in (
        # What is not ASCII stands there byte by byte.
        (f"{REDUCED}{WHOLE}, {metadata}",),
        # Where a collective has none, the nearest on the way back.
        (f"%q = f32[8,4] negate(%p), {metadata}", f"{MOVED}{WHOLE}"),
        # Before that, what reads it first, through copies.
        (f"{REDUCED}{WHOLE}", *copied),
    ):
        assert only(entry(*given, before=lines)).source == "mod\u00e8le.py:36"


@pytest.mark.parametrize("model", ["/usr/lib/python3/site-packages/tunix", "/me/flax"])
def test_source_lines_of_any_model(model: str) -> None:
    """Of one that is installed with pip, and of one in a folder called as a library."""
    folder = "/usr/lib/python3/site-packages"
    lines = (
        f'FileNames\n1 "{folder}/flax/nnx/nn/linear.py"\n'
        f'2 "{model}/llama3/model.py"\n3 "/home/me/train.py"\n\n'
        "FileLocations\n"
        + "".join(f"{at} {{file_name_id={at} line={at}}}\n" for at in (1, 2, 3))
        + "\nStackFrames\n1 {file_location_id=3}\n"
        "2 {file_location_id=2 parent_frame_id=2}\n"
        "3 {file_location_id=1 parent_frame_id=3}\n"
    )
    text = entry(f"{REDUCED}{WHOLE}, metadata={{stack_frame_id=3}}", before=lines)
    assert only(text).source == "model.py:2"


KERNELS = {f"layers/attn/w{name}" for name in "qkvo"}
KERNELS |= {f"layers/mlp/{name}" for name in ("gate", "up", "down")}
NORMS = {"layers/n1/scale", "layers/n2/scale", "norm/scale"}
# On the TPU these are gathered once more.
MORE = {"layers/attn/wq": 3, "layers/attn/wk": 3}


def paths_of(name: str, kind: str) -> collections.Counter[str]:
    """How many operations of a kind there are for a leaf, not over "tensor"."""
    return collections.Counter(
        one.path
        for one in program(name, "1b_cpu").collectives
        if one.kind == kind and one.axes != TENSOR and one.path
    )


def test_permutes_of_libtpu_0_0_50_are_of_parameters() -> None:
    """Gathers and sums that run beside a matrix product."""
    found = program("decoder_v5e_0050", "decoder_v5e_0050").collectives
    over_fsdp = [each for each in found if each.axes == FSDP]
    permutes = [each.path for each in over_fsdp if each.kind == "collective-permute"]
    assert None not in permutes
    assert (len(permutes), len(set(permutes))) == (54, 8)


@pytest.mark.parametrize(("name", "more"), [("1b_cpu", {}), ("1b_v5e_plain", MORE)])
def test_each_kernel_is_gathered_forward_and_backward(
    name: str, more: dict[str, int]
) -> None:
    wanted = {**dict.fromkeys(KERNELS, 2), "head": 1, **more}
    assert paths_of(name, "all-gather") == wanted
    found = program(name, "1b_cpu").collectives
    gathers = [one for one in found if one.kind == "all-gather"]
    assert [one.path for one in gathers if one.axes != FSDP] == [None]


def test_each_gradient_is_summed_once() -> None:
    # In the loop over the layers, and the head after it.
    once = dict.fromkeys((*KERNELS, "head"), 1)
    assert paths_of("1b_v5e_plain", "reduce-scatter") == once
    # Two all-reduces, of the layers' norms together, and of the last one and the loss.
    norms = dict.fromkeys(NORMS, 1)
    assert paths_of("1b_v5e_plain", "all-reduce") == norms
    assert paths_of("1b_cpu", "all-reduce") == once | norms


# ------------------------------------------------------------------ one form each


def only(text: str, **options: Any) -> Collective:
    found = read(text, **options)
    assert found.unread == ()
    (one,) = found.collectives
    return one


REDUCED = "%r = f32[8,4]{1,0} all-reduce(%p), channel_id=1, "
MOVED = REDUCED.replace("%p", "%q")


SIZES = {"data": 2, "model": 4}
GROUPS = {
    ("model",): ["{{0,1,2,3},{4,5,6,7}}", "[2,4]<=[8]", "mesh['a'=8] {'a':(2)4}"]
    + ["mesh['axis_0'=2,'axis_1'=4] {'axis_1'}"]
    + ["mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}"],
    ("data",): ["{{0,4},{1,5},{2,6},{3,7}}", "[4,2]<=[2,4]T(1,0)"]
    + ["mesh['a'=8] {'a':(1)2}", "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}"],
    ("data", "model"): ["{{0,1,2,3,4,5,6,7}}", "{}", "mesh['a'=2,'b'=4] {'a','b'}"],
}


@pytest.mark.parametrize(
    ("groups", "axes", "members"),
    [
        (groups, axes, math.prod(SIZES[axis] for axis in axes))
        for axes, written in GROUPS.items()
        for groups in written
    ]
    # Some of the devices along an axis.
    + [("{{0,1},{2,3},{4,5},{6,7}}", ("model",), 2)]
    + [("mesh['a'=8] {'a':(1)2,'a':(4)2}", ("data", "model"), 4)],
)
def test_groups(groups: str, axes: tuple[str, ...], members: int) -> None:
    one = only(entry(f"{REDUCED}replica_groups={groups}, to_apply=%add"))
    assert (one.kind, one.axes, one.bytes) == ("all-reduce", axes, 128)
    assert one.wire_bytes == 2 * 128 * (members - 1) // members


# What the compiler started is what its result says, without its context.
STARTED = "(f32[8,4]{1,0}, f32[32,4]{1,0}, u32[]) all-gather-start(%p)"
PACKED = (
    "((f32[8,4]{1,0}, s8[4]{0}), (f32[32,4]{1,0}, /*index=1*/s8[16]{0}), u32[]) "
    "all-gather-start(%p, %p)"
)
TILED = "bf16[8,4]{1,0:T(8,128)(2,1)S(1)} all-reduce-start(%p)"
PERMUTED = "(f32[8,4], f32[8,4], u32[], u32[]) collective-permute-start(%p)"
RING = "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"


@pytest.mark.parametrize(
    ("operation", "size", "sent"),
    [
        ("f32[32,4]{1,0} all-gather(%p)", 512, 384),
        (STARTED, 512, 384),
        (PACKED, 528, 396),
        (TILED, 64, 96),
        ("f32[2,4]{1,0} reduce-scatter(%p)", 128, 96),
        ("(f32[2,4], f32[6,4]) all-to-all(%p)", 128, 96),
        ("f32[8,4] ragged-all-to-all(%p)", 128, 96),
        ("f32[8,4] collective-permute(%p)", 128, 128),
        (PERMUTED, 128, 128),
        ("s4[9]{0} all-gather(%p)", 5, 3),
        ("pred[<=8] all-gather(%p)", 8, 6),
        ("f8e4m3fn[8,4]{1,0} all-gather(%p)", 32, 24),
        ("f4e2m1fn[8,4]{1,0} all-gather(%p)", 16, 12),
        ("(f32[32,4], token[]) all-gather(%p)", 512, 384),
    ],
)
def test_kinds_and_bytes(operation: str, size: int, sent: int) -> None:
    groups = RING if "permute" in operation else WHOLE
    one = only(entry(f"%x = {operation}, {groups}"))
    assert one.kind in operation
    assert (one.axes, one.bytes, one.wire_bytes) == (("model",), size, sent)


# Called from everywhere: fusions, calls, asynchronous threads, unknown forms.
@pytest.mark.parametrize(
    "line",
    [
        "%x = f32[8,4] fusion(%p), kind=kCustom, calls=%inner",
        "%x = f32[8,4] call(%p), to_apply=%inner",
        "%x = ((f32[8,4]), f32[8,4], u32[]) call-start(%p), "
        'async_execution_thread="sparsecore", to_apply=%inner',
        "%x = ((f32[8,4]), f32[8,4], u32[]) async-start(%p), calls=%inner",
        "%x = f32[8,4] brand-new-form(%p), some_computation=%inner",
        "%x = f32[8,4] conditional(%p, %p), branch_computations={%inner}",
    ],
)
def test_called_computations_are_followed(line: str) -> None:
    inner = computation("inner", f"%r = f32[8,4] all-reduce(%q), {WHOLE}")
    assert only(entry(line, before=inner)).kind == "all-reduce"
    twice = entry(line, line.replace("%x", "%y"), before=inner)
    assert len(read(twice).collectives) == 2
    # The end of what was started is not counted again.
    done = "%z = f32[8,4] async-done(%x), calls=%inner"
    assert len(read(entry(line, done, before=inner)).collectives) == 1


def test_a_reduce_scatter_that_is_a_fusion() -> None:
    inner = computation(
        "all-reduce-scatter.1",
        f"%r = f32[8,4]{{1,0}} all-reduce(%q), {WHOLE}",
        "%s = f32[2,4]{1,0} dynamic-slice(%r, %i, %j)",
    )
    line = "%x = f32[2,4] fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1"
    one = only(entry(line, before=inner))
    assert (one.kind, one.bytes, one.wire_bytes) == ("reduce-scatter", 128, 96)
    # Without the slice it is an all-reduce, whatever it is called.
    plain = inner.replace("dynamic-slice(", "negate(")
    assert only(entry(line, before=plain)).kind == "all-reduce"


LOOP = (
    "%moved = s32[] copy(%zero)",
    "%in = (s32[], f32[8,4]) tuple(%moved, %p)",
    "%w = (s32[], f32[8,4]) while(%in), condition=%condition, body=%body",
)


def looped(bound: str, step: str, compared: str = "direction=LT") -> str:
    """The computations of a loop that sums in each round."""
    return f"""\
%condition (c: (s32[], f32[8,4])) -> pred[] {{
  %c = (s32[], f32[8,4]) parameter(0)
  %ci = s32[] get-tuple-element(%c), index=0
  %bound = s32[] {bound}
  ROOT %lt = pred[] compare(%ci, %bound), {compared}
}}
%body (b: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {{
  %b = (s32[], f32[8,4]) parameter(0)
  %bi = s32[] get-tuple-element(%b), index=0
  %bx = f32[8,4] get-tuple-element(%b), index=1
  %one = s32[] {step}
  %next = s32[] add(%bi, %one)
  %red = f32[8,4] all-reduce(%bx), {WHOLE}
  ROOT %out = (s32[], f32[8,4]) tuple(%next, %red)
}}
"""


def in_a_loop(bound: Any, step: Any, start: Any, *compared: str) -> str:
    written = [
        f"constant({value})" if isinstance(value, int) else value
        for value in (bound, step, start)
    ]
    before = looped(written[0], written[1], *compared)
    return entry(f"%zero = s32[] {written[2]}", *LOOP, before=before)


@pytest.mark.parametrize(
    ("bound", "step", "start", "times"),
    [(16, 1, 0, 16), (16, 2, 0, 8), (17, 2, 0, 9), (32, 1, 1, 31), (4, 1, 4, 0)],
)
def test_loops(bound: int, step: int, start: int, times: int) -> None:
    text = in_a_loop(bound, step, start)
    assert only(text).executions == times
    known = 'backend_config={"known_trip_count":{"n":"5"}}'
    assert only(text.replace("=%body", f"=%body, {known}")).executions == 5


@pytest.mark.parametrize(
    "given",
    [("parameter(1)", 1, 0), (8, "parameter(1)", 0), (8, 1, "parameter(1)")]
    + [(8, 1, 0, "direction=NE")],
)
def test_a_loop_of_unknown_length_is_listed(given: Any) -> None:
    found = read(in_a_loop(*given))
    assert [one.executions for one in found.collectives] == [1]
    assert found.unread == (
        "loop w: how often it runs is not in the program; counted once",
    )


def sent(transfer: str) -> str:
    """What is sent to another slice, and received from it."""
    attributes = (
        "is_host_transfer=true, frontend_attributes={"
        '_xla_host_transfer_rendezvous="t",_xla_megascale_target="{1,2}x{0:3}",'
        f'_xla_megascale_transfer_type="{transfer}"}}'
    )
    return (
        f"%s = (f32[8,4]{{1,0}}, u32[], token[]) send(%p, %t), {attributes}\n"
        f"  %v = (f32[8,4]{{1,0}}, u32[], token[]) recv(%t), {attributes}"
    )


@pytest.mark.parametrize(
    ("transfer", "kind", "size"),
    [
        ("ALL_REDUCE", "all-reduce", 128),
        ("ALL_GATHER", "all-gather", 256),
        ("ONE_TO_ONE", "collective-permute", 128),
    ],
)
def test_between_slices(transfer: str, kind: str, size: int) -> None:
    one = only(entry(sent(transfer), devices=4), slices=2)
    assert (one.kind, one.axes, one.over_dcn) == (kind, ("data",), True)
    assert (one.bytes, one.wire_bytes) == (size, 128)
    # Over axes that are not known.
    assert only(entry(sent(transfer), devices=4)).axes == ()


def test_ids_of_one_slice_are_places_of_the_mesh() -> None:
    line = f"{REDUCED}replica_groups={{{{0,1}},{{2,3}}}}, to_apply=%add"
    one = only(entry(line, devices=4), slices=2)
    assert (one.axes, one.over_dcn) == (("model",), False)
    # A program that counts the devices of all slices can say it in its groups.
    one = only(entry(f"{REDUCED}replica_groups=[4,2]<=[2,4]T(1,0)"), slices=2)
    assert (one.axes, one.over_dcn) == (("data",), True)
    # A part of an axis that goes over the slices, within them.
    one = only(entry(f"{REDUCED}replica_groups={{{{0,1}},{{2,3}}}}"), slices=4)
    assert (one.axes, one.over_dcn) == (("model",), False)


REDUCE = "%x = f32[8,4] all-reduce(%p)"
UNKNOWN = ("all-fancy-gather", "brand-new", "collective-broadcast")
UNREAD = {
    "its groups cannot be read": [
        f"{REDUCE}, replica_groups={groups}"
        for groups in ("{{0,1},{2,3,4}}", "[2,4]<=[2,4]T(1,1)", "[3,4]<=[8]")
        + ("mesh['a'=2,'b'=4] {'c'}", "mesh['a'=8] {'a':(3)2}", "spiral{7}")
    ],
    "its groups are not of this mesh": [
        f"{REDUCE}, replica_groups={groups}"
        for groups in ("{{0,1},{2,9}}", "mesh['a'=16] {'a'}")
    ],
    "its type cannot be read": [f"%x = token[] all-reduce(%p), {WHOLE}"],
    "cannot be read": [
        f"%x = {kind} all-reduce(%p), {WHOLE}"
        for kind in ("quaternion[8,4]", "(f32[8,4], quaternion)", "f32[8,four]")
    ],
    "unknown form": [
        *(f"%x = f32[8,4] {name}(%p), {WHOLE}" for name in UNKNOWN),
        "%x = f32[8,4] recv(%t), channel_id=1",
        '%x = f32[8,4] custom-call(%p), custom_call_target="my_all_reduce_kernel"',
        "%s = (f32[8,4], u32[], token[]) send(%p, %t), channel_id=1",
    ],
    "unknown transfer 'TELEPATHY'": [sent("TELEPATHY")],
}


@pytest.mark.parametrize(
    ("why", "line"), [(why, line) for why, lines in UNREAD.items() for line in lines]
)
def test_what_cannot_be_read_is_listed(why: str, line: str) -> None:
    found = read(entry(line))
    assert found.collectives == ()
    (said,) = found.unread
    assert said.startswith(f"{why}: %")


# --------------------------------------------- what is summed, by its result

PLAIN = f"all-reduce(%p), channel_id=1, {WHOLE}, to_apply=%add"
FUSED = """\
%fused (a: f32[8,4], b: f32[8,4]) -> f32[8,4] {
  %a = f32[8,4] parameter(0)
  %b = f32[8,4] parameter(1)
  %c = f32[8,4] multiply(%a, %b)
  ROOT %d = f32[8,4] sqrt(%c)
}
"""


def paths(*lines: str, before: str = "", **options: Any) -> list[str | None]:
    """The paths of all collectives where the results are called w and v."""
    text = entry(*lines, before=before)
    found = read(text, results={0: "w", 1: "v"}, **options)
    assert found.unread == ()
    return [one.path for one in found.collectives]


@pytest.mark.parametrize(
    ("operation", "is_followed"),
    [
        ("add(%p, %r)", True),
        ("subtract(%p, %converted)", True),
        ("select(%p, %p, %r)", True),
        ("fusion(%p, %r), calls=%fused", True),
        ("dynamic-update-slice(%p, %r, %i)", True),
        ("opt-barrier(%r)", True),
        ("dot(%r, %p)", False),
        ("broadcast(%r)", False),
        ("reduce(%r, %p)", False),
        ("select(%r, %p, %p)", False),
        ("dynamic-update-slice(%p, %p, %r)", False),
        ("negate(%p)", False),
    ],
)
def test_what_an_optimizer_does_is_followed(operation: str, is_followed: bool) -> None:
    given = [f"%r = f32[8,4] {PLAIN}", "%converted = f32[8,4] convert(%r)"]
    given.append(f"%x = f32[8,4] {operation}")
    for path, ends in (("w", "%x, %p"), ("v", "%p, %x"), ("w", "%x, %x")):
        end = f"ROOT %o = (f32[8,4], f32[8,4]) tuple({ends})"
        assert paths(*given, end, before=FUSED) == [path if is_followed else None]


def test_parameters_that_are_packed_into_one_sum_are_both_named() -> None:
    text = entry(
        f"%r = f32[8,4] {PLAIN}",
        "%a = f32[4,4] slice(%r), slice={[0:4], [0:4]}",
        "%b = f32[4,4] slice(%r), slice={[4:8], [0:4]}",
        "%m = f32[4,4] multiply(%b, %b)",
        "ROOT %o = (f32[4,4], f32[4,4], f32[4,4]) tuple(%a, %b, %m)",
    )
    names = {0: "w", 1: "v", 2: "v's moment"}
    (one,) = read(text, results=names, new_parameters=(0, 1)).collectives
    assert (one.path, one.joined) == ("w", ("v",))
    # What is not a parameter follows the first.
    (one,) = read(text, results=names).collectives
    assert (one.path, one.joined) == ("w", ())


@pytest.mark.parametrize(
    ("ends", "wanted"),
    [("%a, %b", [("w", 128), ("v", 128)]), ("%s, %a", [("w", 256)])],
)
def test_gradients_that_are_summed_together_are_told_apart(
    ends: str, wanted: list[Any]
) -> None:
    text = entry(
        f"%r = (f32[8,4], f32[8,4]) all-reduce(%p, %p), {WHOLE}, to_apply=%add",
        "%a = f32[8,4] get-tuple-element(%r), index=0",
        "%b = f32[8,4] get-tuple-element(%r), index=1",
        "%s = f32[8,4] add(%a, %b)",
        f"ROOT %o = (f32[8,4], f32[8,4]) tuple({ends})",
    )
    found = read(text, results={0: "w", 1: "v"}).collectives
    assert [(one.path, one.bytes) for one in found] == wanted


def test_through_a_loop() -> None:
    before = looped("constant(3)", "constant(1)")
    lines = (
        "%zero = s32[] constant(0)",
        *LOOP,
        "%g = f32[8,4] get-tuple-element(%w), index=1",
        "ROOT %o = (f32[8,4], f32[8,4]) tuple(%p, %g)",
    )
    assert paths(*lines, before=before) == ["v"]
    # What one round has summed, the next one gives back.
    late = before.replace("tuple(%next, %red)", "tuple(%next, %red, %bx)")
    third = [line.replace("index=1", "index=2") for line in lines]
    third[2] = third[2].replace("%p)", "%p, %p)")
    assert paths(*third, before=late) == ["v"]
