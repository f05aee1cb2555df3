"""flm.pod.compile: how compiler results are reported; with libtpu if installed."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import needs_libtpu
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pods import rules, struct, tied

import flax_layoutmap as flm
from flax_layoutmap.pod import _aot

pytestmark = pytest.mark.usefixtures("own_temporary_folder")

Put = Callable[[str], None]
LAYERS = rules(up=(None, "model"), down=("model", None))
ROOM = "make room, or set TMPDIR to a folder with more"


def bfloat(*shape: int) -> jax.ShapeDtypeStruct:
    return struct(*shape, dtype=jnp.bfloat16)


def descends(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A step that takes the gradient of a loss from the parameters."""
    return lambda params, x: jax.tree.map(
        lambda w, g: w - g, params, jax.grad(loss)(params, x)
    )


@descends
def step(params: Any, x: jax.Array) -> jax.Array:
    return ((x @ params["up"]) @ params["down"]).astype(jnp.float32).sum()


def compiled(
    topology: str = "v5e:2x2",
    mesh: str = "data=2,model=2",
    width: int = 512,
    step: Any = step,
    **options: Any,
) -> flm.pod.PodReport:
    return flm.pod.compile(
        step,
        {"up": bfloat(256, width), "down": bfloat(width, 256)},
        bfloat(64, 256),
        topology=topology,
        mesh=mesh,
        layout_map=LAYERS,
        **{"donate_argnames": "params", **options},
    )


# -------------------------------------------------- a compiler that is not there


@pytest.fixture
def says(child: Put, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the child answer with a program, and with figures of memory."""
    monkeypatch.setattr("flax_layoutmap.pod._plan.check_libtpu", lambda: None)
    monkeypatch.setattr(_aot, "check_libtpu", lambda: None)

    def put(program: str, **memory: int) -> None:
        child(f"""
            assert (folder / "module.mlirbc").stat().st_size > 500
            written({program!r})
            answer(memory={memory!r}, slice_of=[0] * 4, seconds=1.0)
        """)

    return put


PROGRAM = """\
HloModule jit_step, num_partitions=4

ENTRY %main (p: bf16[256,256], q: bf16[256,256]) -> (bf16[256,256], bf16[256,256]) {
  %p = bf16[256,256]{1,0} parameter(0)
  %q = bf16[256,256]{1,0} parameter(1)
  %g = bf16[256,256]{1,0} all-reduce(%p), replica_groups=[2,2]<=[4]
  %h = bf16[256,256]{1,0} negate(%g)
  %r = bf16[256,256]{1,0} all-reduce(%h), replica_groups=[2,2]<=[4]
  %s = bf16[256,256]{1,0} subtract(%q, %r)
  %n = bf16[256,256]{1,0} brand-new(%r), replica_groups=[2,2]<=[4]
  ROOT %o = (bf16[256,256], bf16[256,256]) tuple(%p, %s)
}
"""
AT_REST = 2 * 256 * 256 * 2 + 32 * 256 * 2


@pytest.mark.parametrize(
    ("peak", "note"),
    [
        ("peak", "the peak is that of the executable; "),
        ("allocated", "the peak is what the compiler allocates, gaps"),
    ],
)
def test_a_report(peak: str, note: str, says: Callable[..., None]) -> None:
    says(PROGRAM, arguments=300_000, temporary=1000, **{peak: 400_000})
    report = compiled(mesh="data=2,model=-1")
    assert (report.engine, report.fits) == ("compile", True)
    assert str(report.topology) == "v5e:2x2"
    memory = report.memory
    assert (memory.peak_bytes, memory.temporary_bytes) == (400_000, 1000)
    assert memory.at_rest_bytes == AT_REST
    assert memory.padding_bytes == 300_000 - AT_REST
    assert memory.note.startswith(note)
    # The results are the parameters in the order of their names.
    assert [(one.kind, one.axes, one.path) for one in report.collectives] == [
        ("all-reduce", ("model",), "params/down"),
        ("all-reduce", ("model",), "params/up"),
    ]
    assert sum(report.unread.values()) == 1
    asked: Any = {"axis": "model", "kinds": {"all-reduce"}, "small_bytes": 0}
    report.expect(**asked, unread=True)
    with pytest.raises(AssertionError, match="the compile found nothing against it"):
        report.expect(**asked)
    assert report.flops_per_device > 0 and len(report.hosts) == 1
    assert "compile of <lambda>" in report.report()


def test_sums_of_a_step_that_gives_back_no_state(says: Callable[..., None]) -> None:
    says(PROGRAM)
    report = compiled(step=lambda params, x: (x @ params["up"]).sum())
    assert [one.path for one in report.collectives][1:] == [None]


OUT_OF_MEMORY = (
    "JaxRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory "
    "required for HLO temporaries (49.73G) exceeds available HBM (15.75G)."
)


def test_a_report_of_what_does_not_fit(says: Callable[..., None], child: Put) -> None:
    child(f"""
        if request["topology"] is None:  # the partitioner
            real()
        answer(stage='compile', error={OUT_OF_MEMORY!r}, slice_of=[0] * 4)
    """)
    report = compiled()
    assert report.fits is False
    assert report.memory.headroom_bytes is not None
    assert report.memory.headroom_bytes < 0
    assert report.warnings[0] == (
        "does not fit: the step needs 49.7 GiB on a device, and the compiler allows "
        "15.8 GiB (34.0 GiB too much); shard more, take a smaller batch per device, or "
        "rematerialise. The collectives are the plan's"
    )
    assert report.collectives


@pytest.mark.parametrize(
    ("topology", "mesh", "error", "said"),
    [
        (
            "v5e:3x3",
            "data=2,model=2",
            flm.errors.MeshError,
            "there is no slice v5e:3x3",
        ),
        (
            "v5e:2x2",
            "data=2,model=4",
            flm.errors.MeshError,
            "has 8 devices, and v5e:2x2 has",
        ),
        ("v5e:2x2", "data=4", flm.errors.RuleError, "model"),
    ],
)
def test_bad_input_is_refused_before_the_compiler_starts(
    topology: str, mesh: str, error: Any, said: str, child: Put, says: Any
) -> None:
    child("raise SystemExit('started')")
    with pytest.raises(error, match=said):
        compiled(topology, mesh)




# -------------------------------------------------------------------- the real library

# So that gathers stay gathers, as a plan has them.
PLAIN = {
    "xla_tpu_enable_windowed_einsum_for_all_gather": False,
    "xla_tpu_enable_windowed_einsum_for_reduce_scatter": False,
    "xla_tpu_enable_async_collective_fusion": False,
}
GATED = rules(**{"gate|up": (None, "data", "model")}, down=(None, "model", "data"))


@descends
def gated_layers(params: Any, x: jax.Array) -> jax.Array:
    """Layers in which the compiler has something to merge.

    Going back, the sums of gate and up are added, and each kernel is gathered for the
    forward pass that is done again and for the gradient.
    """

    def layer(x: jax.Array, one: Any) -> tuple[jax.Array, None]:
        mean = (x.astype(jnp.float32) ** 2).mean(-1, keepdims=True)
        y = x * jax.lax.rsqrt(mean).astype(x.dtype)
        hidden = jax.nn.silu(y @ one["gate"]) * (y @ one["up"])
        return x + hidden @ one["down"], None

    y, _ = jax.lax.scan(jax.checkpoint(layer), x, params)
    return (y.astype(jnp.float32) ** 2).mean()


def sent_for(report: Any) -> dict[Any, int]:
    """Bytes in a step by parameter, axes and kind; not those of the loss."""
    found: dict[Any, int] = {}
    for one in report.collectives:
        key = one.path, one.axes, one.kind
        found[key] = found.get(key, 0) + one.wire_bytes_per_step
    return {key: sent for key, sent in found.items() if sent > 1024}


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "slices", "mesh", "dim"),
    [
        ("v5e:2x2", 1, "data=2,model=2", 1024),
        ("v5p:2x2x1", 1, "data=2,model=2", 1024),
        ("v5p:2x2x1", 2, "data=2,model=4", 1024),
        ("tpu7x:2x2x1", 1, "data=2,model=4", 1024),
        # Parts of 128 lanes, which are not scattered on all generations.
        ("v5e:2x2", 1, "data=2,model=2", 256),
        ("tpu7x:2x2x1", 1, "data=2,model=4", 256),
    ],
)
def test_compiled_as_planned(name: str, slices: int, mesh: str, dim: int) -> None:
    params = {
        "gate": bfloat(4, dim, 2048),
        "up": bfloat(4, dim, 2048),
        "down": bfloat(4, 2048, dim),
    }
    step = (gated_layers, params, bfloat(4096 * 1024 // dim, dim))
    where: dict[str, Any] = {"topology": name, "slices": slices, "mesh": mesh}
    where |= {"layout_map": GATED, "donate_argnames": "params"}
    planned = flm.pod.plan(*step, **where)
    report = flm.pod.compile(*step, **where, compiler_options=PLAIN)
    assert report.fits is True and not report.unread
    assert report.memory.peak_bytes is not None
    assert report.memory.at_rest_bytes <= report.memory.peak_bytes
    # The arguments are what the plan says, tiles included.
    added = report.memory.padding_bytes - planned.memory.padding_bytes
    assert abs(added) <= 0.02 * planned.memory.at_rest_bytes
    ours, theirs = sent_for(planned), sent_for(report)
    assert ours.keys() == theirs.keys() and len(ours) == 7
    scattered = dim > 256 or name.startswith("tpu7x")
    kind = "reduce-scatter" if scattered else "all-reduce"
    assert ours["params/down", ("data",), kind]
    for key, sent in theirs.items():
        assert ours[key] == pytest.approx(sent, rel=0.05), key
    for axis in ("data", "model"):
        sent = report.wire_bytes(axis=axis)
        assert planned.wire_bytes(axis=axis) == pytest.approx(sent, rel=0.05)
    assert any(one.over_dcn for one in report.collectives) == (slices > 1)




def block(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
    return x + jnp.tanh(x @ layer["up"]) @ layer["down"], None


def in_a_scan(params: Any, x: jax.Array) -> jax.Array:
    x, _ = jax.lax.scan(block, x, params)
    return (x.astype(jnp.float32) ** 2).mean()


def one_by_one(params: Any, x: jax.Array) -> jax.Array:
    for at in range(4):
        x, _ = block(x, jax.tree.map(lambda leaf, at=at: leaf[at], params))
    return (x.astype(jnp.float32) ** 2).mean()


@needs_libtpu
def test_a_scan_counts_as_its_layers() -> None:
    layout_map = rules(up=(None, None, "model"), down=(None, "model", None))
    scan, unrolled = (
        flm.pod.compile(
            jax.grad(loss, argnums=(0, 1)),
            {"up": bfloat(4, 256, 512), "down": bfloat(4, 512, 256)},
            bfloat(64, 256),
            topology="v5e:2x2",
            mesh="data=2,model=2",
            layout_map=layout_map,
        )
        for loss in (in_a_scan, one_by_one)
    )
    for axis in ("data", "model"):
        assert scan.wire_bytes(axis=axis) == unrolled.wire_bytes(axis=axis) > 0
    for report in (scan, unrolled):
        # One forward and one backward in each layer; the compiler merges none of them.
        over = [one for one in report.collectives if one.axes == ("model",)]
        assert sum(one.executions for one in over) == 8
    assert scan.flops_per_device == unrolled.flops_per_device


@needs_libtpu
def test_the_answer_before_code_generation_is_that_of_the_executable() -> None:
    early, whole = (compiled(width=4096, exact_memory=exact) for exact in (False, True))
    assert early.collectives == whole.collectives and early.collectives
    assert early.fits is whole.fits is True
    assert early.unread == whole.unread == {}
    first, second = early.memory, whole.memory
    assert first.padding_bytes == second.padding_bytes
    assert first.peak_bytes and second.peak_bytes
    assert "exact_memory=True" in first.note and "exact_memory" not in second.note


@needs_libtpu
@pytest.mark.parametrize(
    ("width", "options", "limit"),
    [
        (2**26, {}, round(15.75 * 2**30)),
        (2**20, {"xla_tpu_max_hbm_size_mib": 500}, 500 * 2**20),
    ],
)
def test_compiled_does_not_fit(width: int, options: Any, limit: int) -> None:
    report = compiled(width=width, compiler_options=options)
    assert report.fits is False and report.memory.limit_bytes == limit
    assert report.memory.peak_bytes is not None
    assert report.memory.peak_bytes > limit


@needs_libtpu
def test_involuntary_rematerialisation_and_its_line() -> None:
    mesh = AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    before, after = P("y", None, "x"), P(None, ("x", "y"), None)

    def turned(a: jax.Array) -> jax.Array:
        made = jnp.sin(a)
        return jax.lax.with_sharding_constraint(made + 1, NamedSharding(mesh, after))

    given = NamedSharding(mesh, before)
    a = jax.ShapeDtypeStruct((8, 16, 4), jnp.float32, sharding=given)
    report = flm.pod.compile(jax.jit(turned), a, topology="v5e:2x4", mesh=mesh)
    warned = [text for text in report.warnings if text.startswith("involuntary")]
    assert len(warned) == 1 and "test_pod_compile.py:" in warned[0]
    assert [one.kind for one in report.collectives] == ["all-gather"]
    assert report.reshards


KILLED = "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
HANGS = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


@needs_libtpu
@pytest.mark.parametrize(
    ("body", "options", "said"),
    [
        # While it loads libtpu, or makes the topology.
        (KILLED + "real()", {}, "^the compiler died for v5e:2x2, by SIGKILL"),
        (HANGS, {"timeout": 3.0}, "^the compiler did not finish for v5e:2x2 in 3 sec"),
        (
            "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); real()",
            {},
            f"(?m)^the compiler found no space on the disk; {ROOM}$",
        ),
        (
            "real()",
            {"compiler_options": {"xla_nonsense": 1}},
            "^the compiler refuses the program for v5e:2x2: ",
        ),
    ],
    ids=["killed", "hangs", "disk", "options"],
)
def test_the_compiler_that_ends(
    body: str, options: Any, said: str, child: Put, own_temporary_folder: Any
) -> None:
    child(body)
    with pytest.raises(flm.LayoutError, match=said):
        compiled(**options)
    # Nothing is left behind, and nothing that keeps the next one waiting.
    child("real()")
    assert compiled().fits is True
    left = {os.path.splitext(name)[1] for name in os.listdir(own_temporary_folder)}
    assert left == {".lock"}
