"""PodReport: its texts, and its assertions."""

import json
from typing import Any

import pytest

import flax_layoutmap as flm
from flax_layoutmap.pod._report_text import Kind

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
        "engine": "libtpu",
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
plan of train_step on mesh fsdp=4,tensor=4: 16 devices, by libtpu

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


def test_compare() -> None:
    other = report(sends("all-reduce", "tensor"), flops_per_device=64_000)
    lines = report().compare(other).splitlines()
    cells = {line.split("  ")[0]: line.split()[-1] for line in lines[3:]}
    assert cells["at rest"] == "same"
    assert cells["operations"] == "2×"
    assert cells["fsdp all-gather"] == "0×"
    assert cells["all collectives"] == "0.333×"
    back = other.compare(report()).splitlines()
    assert [line.split()[-1] for line in back if "all-gather" in line] == ["new"]


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
    given = report(once("all-reduce", "tensor", size=MIB), unread={"a kernel": 2})
    message = (
        "no violation found in train_step on mesh fsdp=4,tensor=4, but parts of the "
        "program could not be read:\n"
        "  - a kernel (2)\n"
        "pass allow_unread=True to ignore them"
    )
    expected: Any = {"axis": "tensor", "kinds": {"all-reduce"}}
    with pytest.raises(AssertionError) as caught:
        given.expect(**expected)
    assert str(caught.value) == message
    with pytest.raises(AssertionError) as caught:
        given.forbid(kind="all-gather")
    assert str(caught.value) == message
    given.expect(**expected, allow_unread=True)
    given.forbid(kind="all-gather", allow_unread=True)
    # What was found is said first.
    with pytest.raises(AssertionError, match="was to have no collective"):
        given.forbid(kind="all-reduce", allow_unread=True)


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
            lambda r: r.forbid(),
            flm.LayoutError,
            'forbid what? pass path="embed", kind="all-gather" or axis="tensor"',
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
    ],
)
def test_messages(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        call(report())
    assert str(caught.value) == message


def test_a_path_that_no_argument_has_is_refused() -> None:
    found = report(paths=("params/down",))
    with pytest.raises(flm.LayoutError) as caught:
        found.forbid(path="dwn", kind="all-gather")
    assert str(caught.value) == (
        "no argument of train_step matches path='dwn'; did you mean 'down'?; the check "
        "would always pass"
    )


def test_the_remarks() -> None:
    text = report(
        engine="partitioner",
        topology=flm.pod.topology("v5e:4x4"),
        fits=False,
        memory=flm.pod.Memory(
            at_rest={"parameter": 20 << 30}, limit_bytes=16 << 30, note="a note"
        ),
        compute_seconds=0.25,
        flops_per_device=64_000,
        seconds_bound={"fsdp": 0.0012, "tensor": 3.0},
        unread={"a loop": 2},
        warnings=("look here",),
    ).report()
    for line in (
        "plan of train_step on mesh fsdp=4,tensor=4 (v5e:4x4): 16 devices, by "
        "partitioner",
        "at rest: 20.0 GiB per device",
        "limit: 16.0 GiB per device, 4.0 GiB short; it does not fit",
        "memory: a note",
        "matrix products: 6.4e+04 operations per device, at least 250 ms; 2.00 times "
        "an even share: devices duplicate work",
        "at least: by bandwidth alone; no latency, no overlap",
        "accuracy: by XLA's partitioner, within 25 % of libtpu for most axes; libtpu, "
        "where it is installed and has a topology, gives exact figures",
        "unread: a loop (2)",
        "warning: look here",
    ):
        assert line in text.splitlines()
    assert "1.2 ms" in text and "3 s" in text


def test_json_has_every_field() -> None:
    given = report(topology=flm.pod.topology("v5e:4x4"))
    data = json.loads(json.dumps(given.to_json()))
    assert (data["schema"], data["engine"], data["topology"]) == (
        2,
        "libtpu",
        "v5e:4x4",
    )
    assert data["memory"]["at_rest_bytes"] == 4 * MIB
    first = flm.pod.Collective(**data["collectives"][0])
    assert (first.path, first.wire_bytes_per_step) == (
        "model/layers/0/up/kernel",
        6 * MIB,
    )
