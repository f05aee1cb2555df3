"""Collectives out of compiled programs: real ones, each form by itself, and damage.

The programs in `golden/hlo` are one training step of a Llama-like decoder, compiled for
TPU slices with libtpu 0.0.42 (and one for CPUs), without any of them being there:

    1b_v5e        16 layers as a scan, v5e:4x4, mesh data=1, fsdp=4, tensor=4
    1b_v5e_plain  the same without collective matrix products
    1b_cpu        the same on 16 CPU devices
    8b_v5e        32 layers, v5e:16x16, mesh data=1, fsdp=32, tensor=8
    8b_two_v5e    32 layers, two such slices, mesh data=2, fsdp=32, tensor=8
    70b_v5p       80 layers, v5p:4x4x4, mesh data=1, fsdp=16, tensor=4
    70b_tpu7x     80 layers, tpu7x:4x4x4, mesh data=1, fsdp=16, tensor=8
"""

import collections
import functools
import lzma
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flax_layoutmap.pod._hlo import Program, read_program, wire_bytes
from flax_layoutmap.pod._hlo_groups import Grid, groups_of, pairs_of
from flax_layoutmap.pod._hlo_text import Array, read_line, read_type, split
from flax_layoutmap.pod._records import Collective

SAMPLES = Path(__file__).parent / "golden" / "hlo"
NAMES = ("data", "fsdp", "tensor")
MIB = 2**20
FSDP, TENSOR, BOTH = ("fsdp",), ("tensor",), ("fsdp", "tensor")
DCN = ("data", "DCN")

# Sizes of the mesh; then kind, axes → operations, executions, MiB sent by a device.
Counts = dict[tuple[str, tuple[str, ...]], tuple[int, int, float]]
EXPECTED: dict[str, tuple[tuple[int, int, int], Counts]] = {
    "1b_cpu": (
        (1, 4, 4),
        {
            ("all-reduce", TENSOR): (9, 84, 12480.1),
            ("all-reduce", FSDP): (2, 17, 1768.1),
            ("all-gather", FSDP): (15, 225, 1579.9),
            ("all-to-all", FSDP): (2, 2, 96.0),
            ("all-gather", TENSOR): (1, 1, 0.1),
            ("collective-permute", BOTH): (1, 1, 0.0),
        },
    ),
    "1b_v5e_plain": (
        (1, 4, 4),
        {
            ("all-reduce", TENSOR): (9, 84, 3936.1),
            ("all-gather", FSDP): (17, 257, 819.9),
            ("reduce-scatter", FSDP): (8, 113, 447.9),
            ("all-to-all", FSDP): (2, 2, 48.0),
            ("collective-permute", FSDP): (2, 32, 6.0),
            ("all-reduce", FSDP): (2, 17, 0.2),
            ("all-gather", TENSOR): (1, 1, 0.1),
            ("collective-permute", BOTH): (1, 1, 0.0),
        },
    ),
    "1b_v5e": (
        (1, 4, 4),
        {
            ("all-reduce", TENSOR): (9, 84, 3936.1),
            ("collective-permute", FSDP): (54, 789, 992.6),
            ("all-gather", FSDP): (11, 161, 495.9),
            ("all-to-all", FSDP): (2, 2, 48.0),
            ("all-reduce", FSDP): (2, 17, 0.2),
            ("all-gather", TENSOR): (1, 1, 0.1),
            ("collective-permute", BOTH): (1, 1, 0.0),
        },
    ),
    "8b_v5e": (
        (1, 32, 8),
        {
            ("all-reduce", TENSOR): (9, 164, 72576.5),
            ("collective-permute", FSDP): (70, 13761, 3429.2),
            ("all-gather", FSDP): (12, 322, 2012.7),
            ("all-to-all", FSDP): (2, 2, 496.0),
            ("reduce-scatter", TENSOR): (1, 1, 27.6),
            ("all-gather", TENSOR): (1, 1, 3.5),
            ("all-reduce", FSDP): (2, 33, 1.0),
            ("collective-permute", TENSOR): (1, 1, 0.2),
            ("collective-permute", BOTH): (1, 1, 0.1),
        },
    ),
    "8b_two_v5e": (
        (2, 32, 8),
        {
            ("all-reduce", TENSOR): (11, 163, 72128.5),
            ("all-gather", FSDP): (28, 515, 3739.1),
            ("all-reduce", FSDP): (5, 65, 1484.6),
            ("reduce-scatter", FSDP): (7, 97, 1222.6),
            ("all-gather", TENSOR): (1, 1, 224.0),
            ("collective-permute", FSDP): (17, 257, 109.2),
            ("collective-permute", BOTH): (4, 4, 15.7),
            ("all-reduce", DCN): (18, 258, 60.8),
            ("collective-permute", DCN): (2, 2, 7.8),
            ("all-gather", DCN): (1, 1, 3.9),
        },
    ),
    "70b_v5p": (
        (1, 16, 4),
        {
            ("all-reduce", TENSOR): (9, 404, 154368.2),
            ("collective-permute", FSDP): (70, 17697, 67172.3),
            ("all-gather", FSDP): (12, 802, 36169.9),
            ("all-to-all", FSDP): (2, 2, 480.0),
            ("reduce-scatter", TENSOR): (1, 1, 94.5),
            ("all-gather", TENSOR): (1, 1, 0.8),
            ("all-reduce", FSDP): (2, 81, 4.7),
            ("collective-permute", TENSOR): (1, 1, 0.6),
            ("collective-permute", BOTH): (1, 1, 0.1),
        },
    ),
    "70b_tpu7x": (
        (1, 16, 8),
        {
            ("all-reduce", TENSOR): (9, 404, 360192.5),
            ("collective-permute", FSDP): (70, 17697, 33586.2),
            ("all-gather", FSDP): (12, 802, 18319.7),
            ("reduce-scatter", FSDP): (1, 1, 234.8),
            ("all-reduce", FSDP): (2, 81, 4.7),
        },
    ),
}


@functools.cache
def sample(name: str) -> str:
    return lzma.decompress((SAMPLES / f"{name}.hlo.xz").read_bytes()).decode()


@functools.cache
def program(name: str) -> Program:
    sizes, _ = EXPECTED[name]
    per_slice = sizes[1] * sizes[2]
    slices = [place // per_slice for place in range(2 * per_slice)]
    slice_of = slices if sizes[0] == 2 else []
    return read_program(sample(name), NAMES, sizes, slice_of=slice_of)


def counted(collectives: tuple[Collective, ...]) -> Counts:
    rows: dict[Any, list[float]] = collections.defaultdict(lambda: [0, 0, 0])
    for one in collectives:
        row = rows[one.kind, (*one.axes, *(["DCN"] if one.over_dcn else []))]
        row[0] += 1
        row[1] += one.executions
        row[2] += one.wire_bytes_per_step
    return {
        key: (int(row[0]), int(row[1]), round(row[2] / MIB, 1))
        for key, row in rows.items()
    }


# ------------------------------------------------------------------- real programs


@pytest.mark.parametrize("name", EXPECTED)
def test_a_real_program(name: str) -> None:
    found = program(name)
    assert counted(found.collectives) == EXPECTED[name][1]
    assert found.unrecognised == () and found.idle == 0


def test_every_sample_is_expected() -> None:
    assert {path.name for path in SAMPLES.iterdir()} == {
        f"{name}.hlo.xz" for name in EXPECTED
    }


def test_layers_are_counted_through_the_loops() -> None:
    # Forward 2, backward 3 in each layer; 3 outside; bfloat16.
    for name, layers in (("1b_v5e", 16), ("8b_v5e", 32), ("70b_v5p", 80)):
        reduced = [
            one.executions
            for one in program(name).collectives
            if (one.kind, one.axes, one.dtype) == ("all-reduce", TENSOR, "bfloat16")
        ]
        assert sum(reduced) == 5 * layers + 3


def test_a_gather_that_is_written_several_times_counts_once() -> None:
    assert program("1b_v5e").repeated == 47
    assert program("8b_v5e").repeated == 32
    assert program("8b_two_v5e").repeated == 52
    assert program("1b_v5e_plain").repeated == 0


def test_branches_are_noted() -> None:
    assert program("8b_two_v5e").notes == (
        "each device takes one branch of conditional, conditional.1; all branches are "
        "counted",
    )
    assert program("8b_v5e").notes == ()


def test_source_lines() -> None:
    sources = {
        one.source for one in program("1b_v5e").collectives if one.kind == "all-reduce"
    }
    assert "llama.py:36 Attn.__call__" in sources
    assert not any("site-packages" in source for source in sources if source)


def arguments_of(name: str) -> list[str]:
    """What a program calls its arguments, in order."""
    text = sample(name).partition("\nENTRY ")[2]
    called = dict(re.findall(r' parameter\((\d+)\).*?op_name="([^"]*)"', text))
    names = [called[str(at)] for at in range(len(called))]
    return [
        name.replace("\\'", "'").replace("']['", "/").removesuffix("'].value")
        for name in names
    ]


def test_source_lines_of_older_versions() -> None:
    metadata = 'metadata={op_name="x" source_file="/a/b/model.py" source_line=36}'
    assert only(entry(f"{REDUCED}{WHOLE}, {metadata}")).source == "model.py:36"
    # Where a collective has none, the nearest on the way back.
    line = f"%q = f32[8,4] negate(%p), {metadata}"
    below = f"{REDUCED}{WHOLE}".replace("%p", "%q")
    assert only(entry(line, below)).source == "model.py:36"


# Each kernel is gathered forward and backward; on the TPU two are once more. What is
# looked up in the table is summed.
KERNELS = ("attn/wq", "attn/wk", "attn/wv", "attn/wo", "mlp/gate", "mlp/up", "mlp/down")
TWICE = {f"state[0]['layers/{name}": 2 for name in KERNELS} | {
    "state[0]['head": 1,
    "state[0]['embed": 1,
}
MORE = {"state[0]['layers/attn/wq": 3, "state[0]['layers/attn/wk": 3}


@pytest.mark.parametrize(
    ("name", "gathers"), [("1b_cpu", TWICE), ("1b_v5e_plain", TWICE | MORE)]
)
def test_parameter_paths(name: str, gathers: dict[str, int]) -> None:
    # The TPU compiler renames some arguments; their order stays.
    names = arguments_of("1b_cpu")
    found = read_program(sample(name), NAMES, (1, 4, 4), paths=names)
    paths = [one.path for one in found.collectives if one.path]
    assert collections.Counter(paths) == gathers
    every = [one for one in found.collectives if one.kind == "all-gather"]
    assert [one.path for one in every if one.axes != FSDP] == [None]


def test_paths_through_collective_matrix_products() -> None:
    names = arguments_of("1b_cpu")
    found = read_program(sample("1b_v5e"), NAMES, (1, 4, 4), paths=names)
    moved = {one.path for one in found.collectives if one.kind == "collective-permute"}
    assert {f"state[0]['layers/{name}" for name in ("mlp/up", "mlp/gate")} <= moved


def test_a_mesh_of_another_size_is_said() -> None:
    found = read_program(sample("1b_v5e"), ("x",), (4,))
    assert found.collectives == ()
    assert len(found.unrecognised) + found.repeated == 80 + 47
    assert "its groups are not of this mesh: " in " ".join(found.unrecognised)


# ------------------------------------------------------------------ one form each

SUM = """\
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def entry(*lines: str, before: str = "", devices: int = 8) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return (
        f"HloModule m, num_partitions={devices}\n\n{SUM}\n{before}\n"
        f"ENTRY %main (p: f32[8,4]) -> f32[8,4] {{\n"
        f"  %p = f32[8,4]{{1,0}} parameter(0)\n{body}\n}}\n"
    )


def read(text: str, **options: Any) -> Program:
    return read_program(text, ("data", "model"), (2, 4), **options)


def only(text: str, **options: Any) -> Collective:
    found = read(text, **options)
    assert found.unrecognised == ()
    (one,) = found.collectives
    return one


REDUCED = "%r = f32[8,4]{1,0} all-reduce(%p), channel_id=1, "
GATHERED = "%g = f32[16,4]{1,0} all-gather(%p), channel_id=1, "


@pytest.mark.parametrize(
    ("groups", "axes", "members"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("model",), 4),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",), 2),
        ("{{0,1,2,3,4,5,6,7}}", ("data", "model"), 8),
        ("{}", ("data", "model"), 8),
        ("{{0,1},{2,3},{4,5},{6,7}}", ("model",), 2),
        ("[2,4]<=[8]", ("model",), 4),
        ("[4,2]<=[2,4]T(1,0)", ("data",), 2),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", ("model",), 4),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}", ("data", "model"), 8),
        ("mesh['a'=8] {'a':(1)2}", ("data",), 2),
        ("mesh['a'=8] {'a':(2)4}", ("model",), 4),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", ("model",), 4),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ("data",), 2),
    ],
)
def test_groups(groups: str, axes: tuple[str, ...], members: int) -> None:
    one = only(entry(f"{REDUCED}replica_groups={groups}, to_apply=%add"))
    assert (one.kind, one.axes) == ("all-reduce", axes)
    assert one.bytes == 128
    assert one.wire_bytes == 2 * 128 * (members - 1) // members


@pytest.mark.parametrize(
    "groups",
    [
        "{{0,1},{2,3,4}}",
        "{{0,1},{2,9}}",
        "{{0,1},{2,",
        "[2,4]<=[2,4]T(1,",
        "[2,4]<=[2,4]T(1,1)",
        "[3,4]<=[8]",
        "[2,4]<=[800000000000]",
        "mesh['a'=2,'b'=4] {'c'}",
        "mesh['a'=2,'b'=4",
        "mesh['a'=16] {'a'}",
        "mesh['a'=8] {'a':(3)2}",
        "spiral{7}",
    ],
)
def test_groups_that_cannot_be_read_are_listed(groups: str) -> None:
    found = read(entry(f"{REDUCED}replica_groups={groups}"))
    assert found.collectives == () and len(found.unrecognised) == 1
    assert "groups" in found.unrecognised[0]


WHOLE = "replica_groups=[2,4]<=[8]"


@pytest.mark.parametrize(
    ("line", "kind", "size", "sent"),
    [
        (f"%x = f32[32,4]{{1,0}} all-gather(%p), {WHOLE}", "all-gather", 512, 384),
        (
            f"%x = (f32[8,4]{{1,0}}, f32[32,4]{{1,0}}, u32[]) all-gather-start(%p), "
            f"{WHOLE}",
            "all-gather",
            512,
            384,
        ),
        (
            "%x = ((f32[8,4]{1,0}, s8[4]{0}), (f32[32,4]{1,0}, /*index=1*/s8[16]{0}), "
            f"u32[]) all-gather-start(%p, %p), {WHOLE}",
            "all-gather",
            528,
            396,
        ),
        (
            f"%x = bf16[8,4]{{1,0:T(8,128)(2,1)S(1)}} all-reduce-start(%p), {WHOLE}",
            "all-reduce",
            64,
            96,
        ),
        (
            f"%x = f32[2,4]{{1,0}} reduce-scatter(%p), {WHOLE}",
            "reduce-scatter",
            128,
            96,
        ),
        (
            f"%x = (f32[2,4], f32[2,4], f32[2,4], f32[2,4]) all-to-all(%p), {WHOLE}",
            "all-to-all",
            128,
            96,
        ),
        (f"%x = f32[8,4] ragged-all-to-all(%p), {WHOLE}", "all-to-all", 128, 96),
        (
            "%x = (f32[8,4], f32[8,4], u32[], u32[]) collective-permute-start(%p), "
            "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}",
            "collective-permute",
            128,
            128,
        ),
        (f"%x = s4[9]{{0}} all-gather(%p), {WHOLE}", "all-gather", 5, 3),
        (f"%x = f8e4m3fn[8,4]{{1,0}} all-gather(%p), {WHOLE}", "all-gather", 32, 24),
    ],
)
def test_kinds_and_bytes(line: str, kind: str, size: int, sent: int) -> None:
    one = only(entry(line))
    assert (one.kind, one.axes, one.bytes) == (kind, ("model",), size)
    assert one.wire_bytes == sent


def test_the_ends_of_what_was_started_are_not_counted_again() -> None:
    found = read(
        entry(
            f"%s = (f32[8,4], f32[32,4]) all-gather-start(%p), {WHOLE}",
            "%d = f32[32,4]{1,0} all-gather-done(%s)",
        )
    )
    assert len(found.collectives) == 1 and found.unrecognised == ()


def test_an_end_without_a_start_is_listed() -> None:
    found = read(entry("%d = f32[32,4]{1,0} all-gather-done(%s)"))
    assert found.unrecognised == (
        "its start is not there: %d = f32[32,4]{1,0} all-gather-done(%s)",
    )


def test_groups_of_one_move_nothing() -> None:
    found = read(entry(f"{REDUCED}replica_groups=[8,1]<=[8]"))
    assert (found.collectives, found.idle, found.unrecognised) == ((), 1, ())
    line = "%x = f32[8,4] collective-permute(%p), source_target_pairs={{0,0},{1,1}}"
    assert read(entry(line)).idle == 1


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
    inner = (
        "%inner (q: f32[8,4]) -> f32[8,4] {\n  %q = f32[8,4] parameter(0)\n"
        f"  ROOT %r = f32[8,4] all-reduce(%q), {WHOLE}\n}}\n"
    )
    assert only(entry(line, before=inner)).kind == "all-reduce"
    twice = entry(line, line.replace("%x", "%y"), before=inner)
    assert len(read(twice).collectives) == 2
    done = "%z = f32[8,4] async-done(%x), calls=%inner"
    assert len(read(entry(line, done, before=inner)).collectives) == 1


def test_what_nothing_calls_is_listed() -> None:
    line = f"%r = f32[8,4] all-reduce(%q), {WHOLE}"
    inner = f"%inner (q: f32[8,4]) -> f32[8,4] {{\n  {line}\n}}\n"
    found = read(entry("%x = f32[8,4] copy(%p)", before=inner))
    assert found.collectives == ()
    assert found.unrecognised == (f"not reached: {line}",)


def test_a_reduce_scatter_that_is_a_fusion() -> None:
    inner = (
        "%all-reduce-scatter.1 (q: f32[8,4]) -> f32[2,4] {\n"
        f"  %r = f32[8,4]{{1,0}} all-reduce(%q), {WHOLE}\n"
        "  ROOT %s = f32[2,4]{1,0} dynamic-slice(%r, %i, %j)\n}\n"
    )
    line = "%x = f32[2,4] fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1"
    one = only(entry(line, before=inner))
    assert (one.kind, one.bytes, one.wire_bytes) == ("reduce-scatter", 128, 96)
    # Without the slice it is an all-reduce, whatever it is called.
    plain = inner.replace("dynamic-slice(", "negate(")
    assert only(entry(line, before=plain)).kind == "all-reduce"


def looped(bound: str, step: str, start: str, compared: str = "direction=LT") -> str:
    before = f"""\
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
    return entry(
        f"%zero = s32[] {start}",
        "%moved = s32[] copy(%zero)",
        "%in = (s32[], f32[8,4]) tuple(%moved, %p)",
        "%w = (s32[], f32[8,4]) while(%in), condition=%condition, body=%body",
        before=before,
    )


@pytest.mark.parametrize(
    ("bound", "step", "start", "times"),
    [(16, 1, 0, 16), (16, 2, 0, 8), (17, 2, 0, 9), (32, 1, 1, 31), (4, 1, 4, 0)],
)
def test_loops(bound: int, step: int, start: int, times: int) -> None:
    text = looped(f"constant({bound})", f"constant({step})", f"constant({start})")
    assert only(text).executions == times


def test_loops_inside_loops() -> None:
    inner = looped("constant(3)", "constant(1)", "constant(0)")
    known = 'backend_config={"known_trip_count":{"n":"5"}}'
    text = inner.replace("body=%body", f"body=%body, {known}")
    assert only(text).executions == 5


@pytest.mark.parametrize(
    "text",
    [
        looped("parameter(1)", "constant(1)", "constant(0)"),
        looped("constant(8)", "parameter(1)", "constant(0)"),
        looped("constant(8)", "constant(1)", "parameter(1)"),
        looped("constant(8)", "constant(1)", "constant(0)", "direction=NE"),
    ],
)
def test_a_loop_of_unknown_length_is_listed(text: str) -> None:
    found = read(text)
    assert [one.executions for one in found.collectives] == [1]
    assert found.unrecognised == (
        "loop w: how often it runs is not in the program; counted once",
    )


def chained(chain: int) -> str:
    return (
        f"%g{chain} (q: f32[8,4]) -> f32[32,4] {{\n"
        f"  ROOT %r{chain} = f32[32,4] all-gather(%q), channel_id=7, {WHOLE}, "
        f'frontend_attributes={{chain_id="{chain}"}}\n}}\n'
    )


def test_one_chain_is_one_operation() -> None:
    def calls(*chains: int) -> str:
        lines = [
            f"%x{at} = f32[32,4] fusion(%p), calls=%g{chain}"
            for at, chain in enumerate(chains)
        ]
        return entry(*lines, before="".join(chained(chain) for chain in set(chains)))

    assert len(read(calls(1, 1)).collectives) == 1
    # Another chain is another gather, on the same channel though it be.
    assert len(read(calls(1, 2)).collectives) == 2
    # The same channel without a chain: two permutes of two things.
    pairs = "channel_id=1, source_target_pairs={{0,1},{1,0}}"
    two = [f"%x{n} = f32[8,4] collective-permute(%p), {pairs}" for n in (1, 2)]
    assert len(read(entry(*two)).collectives) == 2


SLICES = (0, 0, 0, 0, 1, 1, 1, 1)


def sent(transfer: str, name: str = "t") -> str:
    attributes = (
        "is_host_transfer=true, frontend_attributes={"
        f'_xla_host_transfer_rendezvous="{name}",'
        f'_xla_megascale_target="{{1,2}}x{{0:3}}",'
        f'_xla_megascale_transfer_type="{transfer}"}}'
    )
    return (
        f"%s = (f32[8,4]{{1,0}}, u32[], token[]) send(%p, %t), {attributes}\n"
        f"  %v = (f32[8,4]{{1,0}}, u32[], token[]) recv(%t), {attributes}"
    )


@pytest.mark.parametrize(
    ("transfer", "kind", "size", "wire"),
    [
        ("ALL_REDUCE", "all-reduce", 128, 128),
        ("ALL_GATHER", "all-gather", 256, 128),
        ("ONE_TO_ONE", "collective-permute", 128, 128),
    ],
)
def test_between_slices(transfer: str, kind: str, size: int, wire: int) -> None:
    one = only(entry(sent(transfer), devices=4), slice_of=SLICES)
    assert (one.kind, one.axes, one.over_dcn) == (kind, ("data",), True)
    assert (one.bytes, one.wire_bytes) == (size, wire)


def test_unknown_transfers_are_listed() -> None:
    found = read(entry(sent("TELEPATHY"), devices=4), slice_of=SLICES)
    assert len(found.unrecognised) == 1 and "'TELEPATHY'" in found.unrecognised[0]
    lost = "\n".join(sent("ALL_REDUCE").splitlines()[1:]).strip()
    found = read(entry(lost, devices=4), slice_of=SLICES)
    assert [text.partition(":")[0] for text in found.unrecognised] == [
        "its send is not there"
    ]
    plain = read(entry("%s = (f32[8,4], u32[], token[]) send(%p, %t), channel_id=1"))
    assert len(plain.unrecognised) == 1


def test_ids_of_one_slice_are_places_of_the_mesh() -> None:
    line = f"{REDUCED}replica_groups={{{{0,1}},{{2,3}}}}, to_apply=%add"
    one = only(entry(line, devices=4), slice_of=SLICES)
    assert (one.axes, one.over_dcn) == (("model",), False)
    # A program that counts the devices of all slices can say it in its groups.
    one = only(entry(f"{REDUCED}replica_groups=[4,2]<=[2,4]T(1,0)"), slice_of=SLICES)
    assert (one.axes, one.over_dcn) == (("data",), True)


@pytest.mark.parametrize(
    "line",
    [
        f"%x = f32[8,4] all-fancy-gather(%p), {WHOLE}",
        f"%x = f32[8,4] brand-new(%p), {WHOLE}",
        f"%x = f32[8,4] collective-broadcast(%p), {WHOLE}",
        "%x = f32[8,4] recv(%t), channel_id=1",
        '%x = f32[8,4] custom-call(%p), custom_call_target="my_all_reduce_kernel"',
        f"%x = quaternion[8,4] all-reduce(%p), {WHOLE}",
        f"%x = f32[8,4 all-reduce(%p), {WHOLE}",
        f"%x = f32[8,4] all-reduce(%p, {WHOLE}",
        f"%x = f32[8,4] negate(%p)  %y = f32[8,4] all-reduce(%x), {WHOLE}",
    ],
)
def test_unknown_forms_are_listed(line: str) -> None:
    found = read(entry(line))
    assert found.collectives == () and len(found.unrecognised) == 1


def test_names_are_not_mistaken_for_operations() -> None:
    found = read(
        entry(
            '%x = f32[8,4] add(%p, %p), metadata={op_name="jit(f)/ all-reduce(x)"}',
            '%y = f32[8,4] add(%p, %p), metadata={op_name="y = all-reduce(x)"}',
            '%all-reduce.1 = f32[8,4] custom-call(%p), custom_call_target="Sharding"',
        )
    )
    assert (found.collectives, found.unrecognised) == ((), ())


def test_types() -> None:
    assert read_type("bf16[2,3]{1,0:T(8,128)}") == Array("bfloat16", (2, 3), 12)
    assert read_type("pred[]") == Array("bool", (), 1)
    assert read_type("(f32[2], token[])") == (Array("float32", (2,), 8), ())
    assert read_type("f32[<=8]") == Array("float32", (8,), 32)
    assert read_type("f8e4m3fn[8]") == Array("float8_e4m3fn", (8,), 8)
    assert read_type("f4e2m1fn[8]") == Array("float4_e2m1fn", (8,), 4)
    assert read_type("f32") is None and read_type("(f32[2]") is None


def test_wire_bytes() -> None:
    assert wire_bytes("all-reduce", 800, 4) == 1200
    assert wire_bytes("all-gather", 800, 4) == 600
    assert wire_bytes("collective-permute", 800, 4) == 800
    assert wire_bytes("reduce-scatter", 800, 1) == 0


# --------------------------------------------------------------------------- damage

EVERY_FORM = entry(
    f"%g = f32[32,4]{{1,0}} all-gather(%p), channel_id=2, {WHOLE}, dimensions={{0}}",
    "%m = f32[8,4] all-to-all(%p), replica_groups=mesh['a'=2,'b'=4] {'b'}",
    f"%a = (f32[8,4], f32[32,4]) all-gather-start(%p), {WHOLE}",
    "%e = f32[32,4] all-gather-done(%a)",
    "%c = f32[8,4] collective-permute(%p), source_target_pairs={{0,1},{1,0}}",
    "%f = f32[32,4] fusion(%p), calls=%g1",
    "%h = f32[32,4] fusion(%p), calls=%g1",
    sent("ALL_REDUCE"),
    "%zero = s32[] constant(0)",
    "%in = (s32[], f32[8,4]) tuple(%zero, %p)",
    "%w = (s32[], f32[8,4]) while(%in), condition=%condition, body=%body",
    before=chained(1)
    + looped("constant(5)", "constant(1)", "constant(0)").partition("ENTRY")[0],
)
# Written apart from the reader: what a line that communicates looks like.
SEEN = re.compile(
    r" = .*? (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)"
    r"(-start)?\(| = .*? send\("
)


def lines_that_communicate(text: str) -> int:
    return sum(bool(SEEN.search(line)) for line in text.splitlines())


def accounted(found: Program) -> int:
    parts = (found.collectives, found.unrecognised)
    return sum(map(len, parts)) + found.repeated + found.idle


def check(text: str) -> None:
    found = read(text, slice_of=SLICES)
    assert accounted(found) >= lines_that_communicate(text)
    for one in found.collectives:
        assert one.axes and one.executions >= 0 and one.wire_bytes >= 0


def test_the_text_that_is_damaged_is_whole() -> None:
    found = read(EVERY_FORM, slice_of=SLICES)
    assert found.unrecognised == ()
    assert lines_that_communicate(EVERY_FORM) == 7
    assert accounted(found) == 7


@settings(max_examples=120, deadline=None)
@given(st.integers(0, len(EVERY_FORM)))
@example(0)
def test_truncated(end: int) -> None:
    check(EVERY_FORM[:end])


@settings(max_examples=80, deadline=None)
@given(st.randoms(use_true_random=False))
def test_shuffled_lines(order: random.Random) -> None:
    lines = EVERY_FORM.splitlines()
    order.shuffle(lines)
    check("\n".join(lines))


@settings(max_examples=80, deadline=None)
@given(st.sets(st.integers(0, EVERY_FORM.count("\n")), max_size=12))
def test_missing_lines(gone: set[int]) -> None:
    lines = EVERY_FORM.splitlines()
    check("\n".join(line for at, line in enumerate(lines) if at not in gone))


JUNK = st.text("%(){}[],=<>x19afT'\"\\ \n-", max_size=6)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(EVERY_FORM)), st.integers(0, 12), JUNK)
def test_characters_replaced(start: int, length: int, junk: str) -> None:
    check(EVERY_FORM[:start] + junk + EVERY_FORM[start + length :])


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=400))
def test_any_text(text: str) -> None:
    check(text)
    assert read_line(text) is None or " = " in text


@settings(max_examples=100, deadline=None)
@given(st.text("{}[]()<=,0123456789'abT: -mesh", max_size=40))
def test_any_groups(text: str) -> None:
    groups = groups_of(f"replica_groups={text}", 8)
    assert groups is None or groups.ndim == 2
    pairs = pairs_of(f"source_target_pairs={text}")
    assert pairs is None or pairs.shape[1] == 2


@pytest.mark.parametrize("seed", range(4))
def test_a_real_program_that_is_damaged(seed: int) -> None:
    order = random.Random(seed)
    lines = sample("1b_v5e_plain").splitlines()
    for _ in range(40):
        at = order.randrange(len(lines))
        lines[at] = lines[at][: order.randrange(len(lines[at]) + 1)]
    for _ in range(400):
        first, second = order.randrange(len(lines)), order.randrange(len(lines))
        lines[first], lines[second] = lines[second], lines[first]
    text = "\n".join(lines)
    found = read_program(text, NAMES, (1, 4, 4))
    assert accounted(found) >= lines_that_communicate(text) > 20


def test_the_grid_of_two_slices() -> None:
    grid = Grid(("data", "model"), (2, 4), SLICES, 4)
    assert grid.axes_between_slices() == ("data",)
    assert grid.places().tolist() == [0, 1, 2, 3]
    assert grid.axes(np.array([[0, 4]])) is None
    inner = Grid(("model", "data"), (4, 2), (0, 1) * 4, 4)
    assert inner.places().tolist() == [0, 2, 4, 6]
    assert inner.axes_between_slices() == ("data",)


def test_modules_are_split() -> None:
    module = split(EVERY_FORM)
    assert module.entry == "main"
    assert {"add", "g1", "condition", "body", "main"} <= set(module.computations)
    assert module.loose == []
