"""PodReport: what it shows, and what a test may ask of it."""

import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import flax_layoutmap as flm
from flax_layoutmap._topologies import topology as topology_of
from flax_layoutmap.pod._links import dcn_axes, seconds_bound
from flax_layoutmap.pod._memory import tiled_bytes
from flax_layoutmap.pod._records import Kind
from flax_layoutmap.pod._report_text import axes_text, seconds_text
from flax_layoutmap.pod._sources import operation_name, source_line
from flax_layoutmap.pod._values import Value

EXAMPLE = Path(__file__).parents[1] / "examples" / "pod_plan.py"
MIB = 1 << 20


def collective(kind: Kind, axes: tuple[str, ...], **more: Any) -> flm.pod.Collective:
    given: dict[str, Any] = {"bytes": 4 * MIB, "wire_bytes": 3 * MIB, "executions": 2}
    return flm.pod.Collective(
        kind=kind, axes=axes, dtype="bfloat16", shape=(2048, 1024), **{**given, **more}
    )


def report(**more: Any) -> flm.pod.PodReport:
    given: dict[str, Any] = {
        "engine": "plan",
        "step": "train_step",
        "mesh": flm.DeviceMesh.abstract("fsdp=4,tensor=4"),
        "memory": flm.pod.Memory(at_rest={"parameter": 3 * MIB, "data": MIB}),
        "collectives": (
            collective(
                "all-gather",
                ("fsdp",),
                path="model/layers/0/up/kernel",
                source="model.py:36 Mlp.__call__",
            ),
            collective(
                "all-gather",
                ("fsdp",),
                path="model/layers/1/up/kernel",
                source="model.py:36 Mlp.__call__",
            ),
            collective("all-reduce", ("tensor",), source="model.py:40 Mlp.__call__"),
            collective("all-reduce", ("tensor",), wire_bytes=64, executions=1),
        ),
        "flops_per_device": 32_000,
        "flops_total": 512_000,
        "took_seconds": 0.51,
    }
    return flm.pod.PodReport(**{**given, **more})


TEXT = """\
plan of train_step on mesh fsdp=4,tensor=4: 16 devices

axes    kind        times   payload  sent/device
──────  ──────────  ─────  ────────  ───────────
fsdp    all-gather      4  16.0 MiB     12.0 MiB
tensor  all-reduce      3  12.0 MiB      6.0 MiB

path                             axes    kind        source                    times  sent/device
───────────────────────────────  ──────  ──────────  ────────────────────────  ─────  ───────────
model/layers/{0,1}/up/kernel ×2  fsdp    all-gather  model.py:36 Mlp.__call__      4     12.0 MiB
-                                tensor  all-reduce  model.py:40 Mlp.__call__      2      6.0 MiB
-                                tensor  all-reduce                                1         64 B

at rest: 4.0 MiB per device (parameter 3.0 MiB, data 1.0 MiB)
matrix products: 3.2e+04 operations per device
took 0.5 s"""  # noqa: E501


def test_text() -> None:
    assert report().report() == str(report()) == TEXT


def test_text_says_the_rest() -> None:
    text = report(
        topology=topology_of("v5e:4x4"),
        fits=False,
        memory=flm.pod.Memory(
            at_rest={"parameter": 20 << 30},
            padding_bytes=512,
            limit_bytes=16 << 30,
            note="a note",
        ),
        compute_seconds=0.25,
        seconds_bound={"fsdp": 0.0012, "tensor": 3.0},
        reshards=(
            flm.pod.Reshard(
                value="dot_general",
                before="P(fsdp)",
                after="replicated",
                shape=(8, 16),
                dtype="float32",
                bytes=512,
                executions=3,
                source="model.py:50 loss",
            ),
        ),
        drift=tuple(
            flm.pod.Drift(path=f"layers/{at}/w", before="P(fsdp)", after="replicated")
            for at in range(3)
        ),
        unrecognised={"a loop": 2, "a cut": 1, "a kernel": 9},
        unrecognised_at={
            "a cut": ("model.py:7 f",),
            "a kernel": tuple(f"model.py:{line} g" for line in range(1, 6)),
        },
        warnings=("look here",),
        hosts=tuple(
            flm.pod.Host(
                index=at,
                slice_index=0,
                devices=(2 * at, 2 * at + 1),
                holds_bytes=2048,
                reads_bytes=1024 * (at + 1),
            )
            for at in range(2)
        ),
    ).report()
    for line in (
        "plan of train_step on mesh fsdp=4,tensor=4 (v5e:4x4): 16 devices",
        "at rest: 20.0 GiB per device; tiles of a TPU add 512 B",
        "limit: 16.0 GiB per device, 4.0 GiB short; it does not fit",
        "memory: a note",
        "matrix products: 3.2e+04 operations per device, at least 250 ms",
        "at least: by bandwidth alone; no latency, no overlap",
        "reshard: dot_general [8,16] at model.py:50 loss: P(fsdp) → replicated, 3 "
        "times, 512 B per device each",
        "drift: layers/{0..2}/w came as P(fsdp), left as replicated",
        "unrecognised: a loop (2)",
        "unrecognised: a cut (1); at model.py:7 f",
        "unrecognised: a kernel (9); at model.py:1 g, model.py:2 g, model.py:3 g, "
        "2 more",
        "warning: look here",
        "hosts: 2 with 2 devices each; a host holds 2.0 KiB of state, reads 1.0 KiB to "
        "2.0 KiB of it in a restore and 0 B of data in a step (devices as "
        "DeviceMesh orders them)",
    ):
        assert line in text.splitlines()
    assert "1.2 ms" in text and "3 s" in text


def test_narrow_text_keeps_the_ends_of_paths() -> None:
    lines = report().report(width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert any("…" in line and "kernel" in line for line in lines)


def test_colours_and_text_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(report())
    printed = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert printed.split() == report().report(width=200).split()
    shown = io.StringIO()
    report().show(shown)
    assert shown.getvalue().split() == TEXT.split()


def test_markdown() -> None:
    lines = report().report("markdown").splitlines()
    assert lines[0] == f"**{TEXT.splitlines()[0]}**"
    assert "| fsdp | all-gather | 4 | 16.0 MiB | 12.0 MiB |" in lines
    assert "- took 0.5 s" in lines


def test_json() -> None:
    given = report(topology=topology_of("v5e:4x4"))
    data = json.loads(given.report("json"))
    assert data == json.loads(json.dumps(given.to_json()))
    assert (data["schema"], data["engine"], data["topology"]) == (1, "plan", "v5e:4x4")
    assert data["memory"]["at_rest"] == {"parameter": 3 * MIB, "data": MIB}
    assert data["collectives"][0] == {
        "kind": "all-gather",
        "axes": ["fsdp"],
        "bytes": 4 * MIB,
        "wire_bytes": 3 * MIB,
        "executions": 2,
        "dtype": "bfloat16",
        "shape": [2048, 1024],
        "path": "model/layers/0/up/kernel",
        "joined": [],
        "source": "model.py:36 Mlp.__call__",
        "over_dcn": False,
    }


def test_wire_bytes() -> None:
    assert report().wire_bytes() == 18 * MIB + 64
    assert report().wire_bytes("fsdp") == 12 * MIB
    assert report().wire_bytes("tensor", "all-gather") == 0


def test_expect_and_forbid_pass() -> None:
    given = report()
    given.expect(axis="tensor", kinds={"all-reduce"})
    given.expect(axis="fsdp", kinds={"all-gather"})
    given.forbid(path="embed", kind="all-gather")
    given.forbid(axis="tensor", kind="all-gather")
    given.forbid(axis="tensor", kind="all-reduce", small_bytes=7 * MIB)
    idle = report(collectives=(collective("all-reduce", ("fsdp",), wire_bytes=64),))
    idle.expect(axis="fsdp", kinds=set())
    idle.expect(axis="fsdp", kinds={"all-reduce"}, small_bytes=0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda r: r.expect(axis="fsdp", kinds={"all-reduce"}),
            AssertionError,
            "over axis 'fsdp' of mesh fsdp=4,tensor=4 train_step was expected to run "
            "all-reduce:\n"
            "  - all-gather over fsdp of model/layers/{0,1}/up/kernel ×2 at "
            "model.py:36 Mlp.__call__: 4 times, 12.0 MiB sent per device in a step\n"
            "  - all-reduce: expected, and none runs over it",
        ),
        (
            lambda r: r.expect(axis="tensor", kinds=set()),
            AssertionError,
            "over axis 'tensor' of mesh fsdp=4,tensor=4 train_step was expected to run "
            "no collectives:\n"
            "  - all-reduce over tensor of - at model.py:40 Mlp.__call__: 2 times, 6.0 "
            "MiB sent per device in a step\n"
            "  - all-reduce over tensor of -: 1 times, 64 B sent per device in a step",
        ),
        (
            lambda r: r.forbid(path=r"up/kernel$", kind="all-gather"),
            AssertionError,
            "train_step on mesh fsdp=4,tensor=4 was to have no collective with "
            "path='up/kernel$', kind='all-gather':\n"
            "  - all-gather over fsdp of model/layers/{0,1}/up/kernel ×2 at "
            "model.py:36 Mlp.__call__: 4 times, 12.0 MiB sent per device in a step",
        ),
        (
            lambda r: r.forbid(),
            flm.LayoutError,
            'forbid what? pass path="embed", kind="all-gather", axis="tensor" or '
            'source="model.py:36"',
        ),
        (
            lambda r: r.forbid(kind="allgather"),
            flm.LayoutError,
            "there is no collective 'allgather'; did you mean 'all-gather'?; the "
            "kinds are all-reduce, all-gather, reduce-scatter, all-to-all, "
            "collective-permute",
        ),
        (
            lambda r: r.expect(axis="tenor", kinds={"all-reduce"}),
            flm.LayoutError,
            "the mesh fsdp=4,tensor=4 has no axis 'tenor'; did you mean 'tensor'?",
        ),
        (
            lambda r: r.report("html"),
            flm.LayoutError,
            'format must be "text", "markdown" or "json", got \'html\'',
        ),
        (
            lambda r: r.with_layout(flm.LayoutMap()),
            flm.LayoutError,
            "a report of 'plan' has no program to lay out again; use "
            "flm.pod.plan(step, …).with_layout(layout_map)",
        ),
        (
            lambda r: r.shardings(),
            flm.LayoutError,
            "a report of 'plan' has no shardings of values; use "
            "flm.pod.plan(step, …).shardings()",
        ),
    ],
)
def test_messages(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        call(report())
    assert str(caught.value) == message


def test_compare() -> None:
    other = report(
        collectives=(collective("all-reduce", ("tensor",)),), flops_per_device=64_000
    )
    lines = report().compare(other).splitlines()
    cells = {line.split("  ")[0]: line.split()[-1] for line in lines[3:]}
    assert cells["at rest"] == "same"
    assert cells["operations"] == "+100.0%"
    assert cells["fsdp all-gather"] == "gone"
    assert cells["all collectives"] == "-66.7%"


# ----------------------------------------------------------- topologies and figures


def test_what_a_topology_adds() -> None:
    layout_map = flm.LayoutMap(batch=("data", "fsdp"))
    layout_map["w"] = ("fsdp", "tensor")

    def step(params: Any, x: Any) -> Any:
        return {"w": params["w"] - 0.1 * jax.grad(loss)(params["w"], x)}

    def loss(w: Any, x: Any) -> Any:
        return ((x @ w) ** 2).mean()

    found = flm.pod.plan(
        step,
        {"w": jax.ShapeDtypeStruct((2048, 4096), jnp.bfloat16)},
        jax.ShapeDtypeStruct((65536, 2048), jnp.bfloat16),
        mesh={"data": -1, "fsdp": 16, "tensor": 16},
        layout_map=layout_map,
        topology="v6e:16x16",
        slices=2,
        donate_argnames="params",
    )
    assert found.mesh.axis_sizes == {"data": 2, "fsdp": 16, "tensor": 16}
    v6e = topology_of("v6e:16x16").generation
    assert found.memory.limit_bytes == v6e.hbm_limit_bytes
    assert found.fits is None
    crossing = {one.axes for one in found.collectives if one.over_dcn}
    assert ("data",) in crossing and ("fsdp",) not in crossing
    assert all("data" in axes for axes in crossing)
    assert set(found.seconds_bound) == {axes_text(c) for c in found.collectives}
    part = 2048 * 4096 * 2 // 256
    batch = 65536 * 2048 * 2 // 32
    assert len(found.hosts) == 128
    assert [host.slice_index for host in found.hosts] == [0] * 64 + [1] * 64
    # Two by two along the axes fsdp and tensor: four parts of w, two of the batch.
    assert {(h.holds_bytes, h.reads_bytes, h.data_bytes) for h in found.hosts} == {
        (4 * part, 4 * part, 2 * batch)
    }


def test_what_is_at_rest_alone_may_be_too_much() -> None:
    layout_map = flm.LayoutMap(batch="data")
    layout_map["w"] = ("data", None)
    found = flm.pod.plan(
        lambda params: {"w": params["w"] * 2},
        {"w": jax.ShapeDtypeStruct((1 << 20, 1 << 18), jnp.float32)},
        mesh="data=16",
        layout_map=layout_map,
        topology="v5e:4x4",
        donate_argnames="params",
    )
    assert found.fits is False
    assert "short; it does not fit" in found.report()


def test_axes_between_slices() -> None:
    two = topology_of("v5e:4x4", slices=2)
    assert dcn_axes({"data": 2, "fsdp": 16}, two) == {"data": 2}
    assert dcn_axes({"fsdp": 32}, two) == {"fsdp": 2}
    assert dcn_axes({"data": 2, "fsdp": 8}, topology_of("v5e:4x4")) == {}


def test_least_time_on_the_links() -> None:
    v5p = topology_of("v5p:4x4x4")
    sent = {"wire_bytes": 9 * 10**9, "executions": 1}
    found = seconds_bound(
        [collective("all-gather", ("fsdp",), **sent)]
        + [collective("all-reduce", ("tensor",), **sent)],
        {"fsdp": 16, "tensor": 4},
        v5p,
    )
    # Rings of 9e10 bytes/s each way: fsdp on two dims of the slice, tensor on one.
    assert found == pytest.approx({"fsdp": 0.025, "tensor": 0.05})


@pytest.mark.parametrize(
    ("shape", "element", "factor"),
    [
        ((3, 3, 64, 64), "f32", 2.0),
        ((7, 7, 3, 64), "bf16", 16 / 7),
        ((4096, 3), "f32", 4 / 3),
        ((4096, 14336), "bf16", 1.0),
    ],
)
def test_tiles_as_the_compiler_pads(
    shape: tuple[int, ...], element: str, factor: float
) -> None:
    """Argument bytes of libtpu 0.0.42 for arrays of these shapes, as measured."""
    value = Value("argument", shape, element, ((),) * len(shape))
    assert tiled_bytes(value) / value.local_bytes == pytest.approx(factor, rel=1e-3)


def test_a_scalar_takes_512_bytes() -> None:
    assert tiled_bytes(Value("argument", (), "f32", ())) == 512


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4e-5, "40 µs")]
)
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_lines_of_the_user() -> None:
    flax = jax.__file__.replace("jax/__init__.py", "flax/nnx/nn/linear.py")
    location = (
        'loc("jit(f)/jvp()/dot_general"(callsite("Linear.__call__"("'
        f'{flax}":422:8 to 428:5) at callsite("Net.<locals>.f"("/home/me/net.py":10:4 '
        'to :20) at "main"("/home/me/run.py":3:1 to :9)))))'
    )
    assert source_line(location) == "net.py:10 Net.f"
    assert operation_name(location) == "dot_general"
    assert source_line("loc(unknown)") is None
    assert operation_name("loc(unknown)") == ""


def test_as_the_tpu_compiler_counts() -> None:
    """The 1B decoder of the example beside libtpu's program for these shapes.

    Measured with libtpu 0.0.42 on v5e:4x4, fsdp=4, tensor=4, 16 sequences of 2048
    tokens, the compiler's matrix-product loops turned off: 3936.2 MiB sent over tensor
    and 1322.1 MiB over fsdp.
    """
    spec = importlib.util.spec_from_file_location("pod_plan", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model, optimizer = example.abstract_state(example.CONFIGS["1B"])
    topology, slices, mesh, batch, length = example.PLANS[0]
    tokens = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
    found = flm.pod.plan(
        example.train_step,
        model,
        optimizer,
        tokens,
        mesh=mesh,
        topology=topology,
        slices=slices,
    )
    assert found.wire_bytes("tensor") == pytest.approx(3936.2 * MIB, rel=0.05)
    assert found.wire_bytes("fsdp") == pytest.approx(1322.1 * MIB, rel=0.05)
    assert not found.unrecognised and not found.warnings and not found.drift
    # Tokens are gathered to be looked up.
    found.expect(axis="tensor", kinds={"all-reduce"}, small_bytes=2**20)
    assert found.memory.at_rest["optimizer"] == pytest.approx(
        2 * found.memory.at_rest["parameter"], rel=1e-3
    )


@pytest.mark.slow
def test_the_example_runs() -> None:
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1])}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--model=1B"],
        env={**environment, "JAX_PLATFORMS": "cpu", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for where in ("v5e:4x4", "v5p:4x4x4", "2 × v6e:16x16"):
        assert f"({where})" in done.stdout
    assert "data (DCN)" in done.stdout
    # The third mesh is made only where DeviceMesh is told to split a dim; on the second
    # and third, parts of gradients are too narrow to be scattered.
    assert done.stdout.count("warning: the TPU compiler sums ") == 2
    assert done.stdout.count("warning: ") == 3 and "warning" not in done.stderr.lower()
    assert "allow_split_physical_axes=True" in done.stdout
