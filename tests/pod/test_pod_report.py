"""PodReport: its texts, and its assertions."""

import io
import json
import pickle
from typing import Any

import pytest
from pods import MEGATRON, PARAMS, X, plan, rules, sgd, struct
from rich.console import Console

import flax_layoutmap as flm
from flax_layoutmap._core.topologies import topology as topology_of
from flax_layoutmap.pod._records import Kind

KIB, MIB = 1 << 10, 1 << 20


def sends(kind: Kind, *axes: str, **more: Any) -> flm.pod.Collective:
    given: dict[str, Any] = {"bytes": 4 * MIB, "wire_bytes": 3 * MIB, "executions": 2}
    return flm.pod.Collective(
        kind=kind, axes=axes, dtype="bfloat16", shape=(2048, 1024), **{**given, **more}
    )


def once(kind: Kind, *axes: str, size: int = 32 * KIB) -> flm.pod.Collective:
    return sends(kind, *axes, bytes=size, wire_bytes=size, executions=1)


UP = {"source": "model.py:36 Mlp.__call__"}
DOWN = {"source": "model.py:40 Mlp.__call__"}
COLLECTIVES = (
    sends("all-gather", "fsdp", path="model/layers/0/up/kernel", **UP),
    sends("all-gather", "fsdp", path="model/layers/1/up/kernel", **UP),
    sends("all-reduce", "tensor", **DOWN),
    sends("all-reduce", "tensor", wire_bytes=64, executions=1),
)


def report(*collectives: flm.pod.Collective, **more: Any) -> flm.pod.PodReport:
    given: dict[str, Any] = {
        "engine": "plan",
        "step": "train_step",
        "mesh": flm.DeviceMesh.abstract("fsdp=4,tensor=4"),
        "memory": flm.pod.Memory(at_rest={"parameter": 3 * MIB, "data": MIB}),
        "collectives": collectives or COLLECTIVES,
        "flops_per_device": 32_000,
        "flops_total": 512_000,
        "took_seconds": 0.51,
    }
    return flm.pod.PodReport(**{**given, **more})


# ---------------------------------------------------------------- what it shows

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


def test_long_tables_are_cut() -> None:
    many = [sends("all-gather", "fsdp", source=f"model.py:{at}") for at in range(40)]
    text = report(*many).report()
    (more,) = [line for line in text.splitlines() if "more" in line]
    shown = text.count("model.py:")
    assert 0 < shown < 40
    assert more.split() == f"… and {40 - shown} more, {6 * (40 - shown)}.0 MiB".split()


def test_narrow_text_keeps_the_ends_of_paths() -> None:
    lines = report().report(width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert any("…" in line and "kernel" in line for line in lines)


def test_colours_and_text_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it
    printed = io.StringIO()
    Console(file=printed, width=200, color_system=None).print(report())
    assert printed.getvalue().split() == report().report(width=200).split()
    shown = io.StringIO()
    report().show(shown)
    assert shown.getvalue().split() == TEXT.split()


def test_markdown() -> None:
    lines = report().report("markdown").splitlines()
    assert lines[0] == f"**{TEXT.splitlines()[0]}**"
    assert "| fsdp | all-gather | 4 | 16.0 MiB | 12.0 MiB |" in lines
    assert "- took 0.5 s" in lines
    # Of lambdas, as a page shows them.
    step = lambda params, x: (x @ params["down_"]).sum()  # noqa: E731
    found = plan(
        step, {"down_": struct(16, 4)}, X, layout_map=rules(down_=("model", None))
    )
    title, *lines = found.report("markdown").splitlines()
    assert title.startswith(r"**plan of \<lambda> on mesh")
    rows = [line for line in lines if "lambda" in line]
    assert rows and all("<lambda>` |" in row or r"\<lambda>" in row for row in rows)


def test_json() -> None:
    given = report(topology=topology_of("v5e:4x4"))
    data = json.loads(given.report("json"))
    assert data == json.loads(json.dumps(given.to_json()))
    assert (data["schema"], data["engine"], data["topology"]) == (1, "plan", "v5e:4x4")
    assert data["platform"] == "tpu"
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


def test_compare() -> None:
    other = report(sends("all-reduce", "tensor"), flops_per_device=64_000)
    lines = report().compare(other).splitlines()
    cells = {line.split("  ")[0]: line.split()[-1] for line in lines[3:]}
    assert cells["at rest"] == "same"
    assert cells["operations"] == "+100.0%"
    assert cells["fsdp all-gather"] == "gone"
    assert cells["all collectives"] == "-66.7%"
    back = other.compare(report()).splitlines()
    assert [line.split()[-1] for line in back if "all-gather" in line] == ["new"]


def test_reports_are_kept_and_compared() -> None:
    """In a cache, or sent to another process: without the program."""
    found = plan(sgd, PARAMS, X, layout_map=rules(**MEGATRON))
    kept = pickle.loads(pickle.dumps(found))
    assert kept == found == plan(sgd, PARAMS, X, layout_map=rules(**MEGATRON))
    assert kept.report() == found.report()
    assert repr(found).startswith("<PodReport of plan: sgd on data=2,model=4, 4 coll")
    with pytest.raises(flm.LayoutError, match="has no program to lay out again"):
        kept.with_layout(rules())


# ---------------------------------------------------- what a test may ask of it


def test_wire_bytes() -> None:
    assert report().wire_bytes() == 18 * MIB + 64
    assert report().wire_bytes("fsdp") == 12 * MIB
    assert report().wire_bytes("tensor", "all-gather") == 0


def test_expect_and_forbid_pass() -> None:
    given = report()
    given.expect(axis="tensor", kinds={"all-reduce"})
    given.expect(axis="fsdp", kinds="all-gather")
    given.forbid(path="embed", kind="all-gather")
    given.forbid(axis="tensor", kind="all-gather")
    given.forbid(axis="tensor", kind="all-reduce", small_bytes=7 * MIB)
    idle = report(once("all-reduce", "fsdp", size=64))
    idle.expect(axis="fsdp", kinds=set())
    idle.expect(axis="fsdp", kinds={"all-reduce"}, small_bytes=0)


def test_small_collectives_count_together() -> None:
    """Layers one by one send as much as a scan over them."""
    layers = report(*(once("all-reduce", "tensor"),) * 3)
    layers.expect(axis="tensor", kinds={"all-reduce"})
    with pytest.raises(AssertionError, match="3 times, 96.0 KiB"):
        layers.expect(axis="tensor", kinds=set())
    with pytest.raises(AssertionError, match="3 times, 96.0 KiB"):
        layers.forbid(axis="tensor", small_bytes=90 * KIB)
    layers.forbid(axis="tensor", small_bytes=100 * KIB)
    # Not with others: of another kind, or over other axes.
    report(
        once("all-reduce", "tensor"),
        once("all-gather", "tensor"),
        once("all-reduce", "fsdp", "tensor"),
    ).expect(axis="tensor", kinds=set())


@pytest.mark.parametrize("axis", ["fsdp", "tensor"])
def test_axes_that_are_not_known_may_be_any(axis: str) -> None:
    unknown = report(once("all-gather", size=MIB))
    with pytest.raises(AssertionError, match=r"all-gather over \? of -: 1 times"):
        unknown.expect(axis=axis, kinds=set())
    with pytest.raises(AssertionError, match=r"all-gather over \? of -: 1 times"):
        unknown.forbid(axis=axis, kind="all-gather")
    # That it runs over this one is not known either.
    with pytest.raises(AssertionError, match="all-gather: expected, and none"):
        unknown.expect(axis=axis, kinds={"all-gather"})
    assert unknown.wire_bytes(axis) == 0


def test_what_was_not_read_may_be_anything() -> None:
    given = report(
        once("all-reduce", "tensor", size=MIB),
        unrecognised={"a kernel": 2},
        unrecognised_at={"a kernel": ("model.py:7 f",)},
    )
    message = (
        "the plan found nothing against it, but did not read all of train_step on mesh "
        "fsdp=4,tensor=4:\n"
        "  - a kernel (2); at model.py:7 f\n"
        "pass unrecognised=True where these may do what they like"
    )
    expected: Any = {"axis": "tensor", "kinds": {"all-reduce"}}
    with pytest.raises(AssertionError) as caught:
        given.expect(**expected)
    assert str(caught.value) == message
    with pytest.raises(AssertionError) as caught:
        given.forbid(kind="all-gather")
    assert str(caught.value) == message
    given.expect(**expected, unrecognised=True)
    given.forbid(kind="all-gather", unrecognised=True)
    # What was found is said first.
    with pytest.raises(AssertionError, match="was to have no collective"):
        given.forbid(kind="all-reduce", unrecognised=True)


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
        (
            lambda r: r.compare(3),
            flm.LayoutError,
            "compare needs another report, got 3; make one with "
            "report.with_layout(layout_map) or flm.pod.plan(step, …)",
        ),
    ],
)
def test_messages(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        call(report())
    assert str(caught.value) == message


def test_patterns_of_a_plan_that_fit_nothing_are_refused() -> None:
    """It knows all paths and lines, so that these are mistakes."""

    def product(params: Any, x: Any) -> Any:
        return x @ params["down"]

    found = plan(
        lambda params, x: (product(params, x) * 2).sum(),
        {"down": struct(16, 16)},
        X,
        layout_map=rules(down=("data", "model")),
    )
    nothing = ", so that nothing would be forbidden"
    refused: list[tuple[Any, str]] = [
        (
            {"path": "embedding"},
            f"no leaf of the arguments of <lambda> is like 'embedding'{nothing}",
        ),
        (
            {"path": "dwn", "kind": "all-gather"},
            "no leaf of the arguments of <lambda> is like 'dwn'; did you mean 'down'?"
            + nothing,
        ),
        ({"source": "("}, "source='(' is no regular expression: "),
        ({"source": "model.py:36"}, "no operation of <lambda> comes from a line like"),
        ({"source": "prodct"}, "no operation of <lambda> comes from a line like"),
    ]
    for asked, said in refused:
        with pytest.raises(flm.LayoutError) as caught:
            found.forbid(**asked)
        assert str(caught.value).startswith(said)
    with pytest.raises(flm.LayoutError, match="pattern='\\[' is no regular expression"):
        found.shardings("[")
    with pytest.raises(AssertionError, match="all-gather over data of params/down"):
        found.forbid(source="product$")
    # A line of the step without collectives.
    found.forbid(source=r"^test_pod_report.py:\d+ .*<lambda>", kind="all-gather")
