"""The child process of flm.pod: how it may end, and which one is asked."""

import ast
import glob
import importlib.metadata
import json
import os
import runpy
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pods import SQUARE, X, plan, rules

import flax_layoutmap as flm
from flax_layoutmap.pod import _ask

Put = Callable[[str], None]
V5E: dict[str, Any] = {"topology": "v5e:2x2", "mesh": "data=2,model=2"}
# The program of the child itself, before a test puts another one there.
CHILD = _ask._CHILD


@pytest.fixture(autouse=True)
def libtpu_seems_to_be_there(
    monkeypatch: pytest.MonkeyPatch, own_temporary_folder: Path
) -> None:
    pretend_libtpu(monkeypatch, f"{_ask.wanted_libtpu()}.1")


def pretend_libtpu(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    real = importlib.metadata.version

    def version_of(name: str) -> str:
        if name != "libtpu":
            return real(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(importlib.metadata, "version", version_of)


def product(p: Any, x: Any) -> Any:
    return (x @ p["w"]).sum()


def planned(**options: Any) -> flm.pod.PodReport:
    return plan(product, SQUARE, X, layout_map=rules(w=(None, "model")), **options)


def compiled(**options: Any) -> flm.pod.PodReport:
    given = {**V5E, "layout_map": rules(w=(None, "model")), **options}
    return flm.pod.compile(product, SQUARE, X, **given)


def refused(ask: Callable[..., Any] = compiled, **options: Any) -> str:
    with pytest.raises(flm.LayoutError) as caught:
        ask(**options)
    return str(caught.value)


def left() -> list[str]:
    return os.listdir(tempfile.gettempdir())


PROGRAM = """\
HloModule jit_step, num_partitions=4

ENTRY %main (p: f32[16,8], q: f32[256,16]) -> f32[] {
  %p = f32[16,8]{1,0} parameter(0)
  %q = f32[256,16]{1,0} parameter(1)
  %c = f32[] constant(0)
  %r = f32[] all-reduce(%c), replica_groups=[2,2]<=[4]
  ROOT %n = f32[] brand-new(%r), replica_groups=[2,2]<=[4]
}
"""
ANSWER = f"written({PROGRAM!r})\nanswer(memory={{'temporary': 3, 'allocated': 7}})\n"
OUT_OF_MEMORY = (
    "JaxRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory "
    "required for HLO temporaries (49.73G) exceeds available HBM (15.75G)."
)


def test_what_the_child_is_told_and_says(
    child: Put, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--x")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    monkeypatch.delenv("ALLOW_MULTIPLE_LIBTPU_LOAD", raising=False)
    said = tmp_path / "said.json"
    child(f"""
        assert (folder / "module.mlirbc").stat().st_size > 500
        told = json.dumps([request, dict(os.environ)])
        open({str(said)!r}, "w").write(told)
    """)
    for chips, allowed in (([], "1"), (["/dev/accel0"], None)):
        monkeypatch.setattr(glob, "glob", lambda pattern, chips=chips: chips)
        refused(compiler_options={"xla_option": True})
        request, environment = json.loads(said.read_text())
        assert environment.get("ALLOW_MULTIPLE_LIBTPU_LOAD") == allowed
    assert request["compiler_options"] == {"xla_option": True}
    assert (request["topology"], request["within"]) == ("v5e:2x2", [2, 2])
    assert request["free_results"] == [True]
    assert environment["JAX_PLATFORMS"] == "cpu"
    assert not {"LIBTPU_INIT_ARGS", "XLA_FLAGS"} & set(environment)


def test_a_report_by_libtpu(child: Put) -> None:
    child(ANSWER)
    for report in (compiled(), planned(**V5E), planned(**V5E, engine="libtpu")):
        assert (report.engine, report.fits) == ("libtpu", True)
        assert report.memory.peak_bytes == 7
        assert report.memory.at_rest == {"parameter": 512, "data": 16384}
        assert [each.axes for each in report.collectives] == [("model",)]
        assert sum(report.unread.values()) == 1
    assert not left()


def test_what_does_not_fit_is_planned_by_the_partitioner(child: Put) -> None:
    child(f"""
        if request["topology"] is None:
            real()
        answer(error={OUT_OF_MEMORY!r})
    """)
    report = compiled()
    assert (report.engine, report.fits) == ("partitioner", False)
    assert report.warnings[0] == (
        "does not fit: the step needs 49.7 GiB on a device, and libtpu allows 15.8 GiB "
        "(34.0 GiB too much); shard more, take a smaller batch per device, or "
        "rematerialise. The collectives are those of XLA's partitioner"
    )
    assert report.collectives and (report.memory.headroom_bytes or 0) < 0


def test_a_libtpu_that_fails_is_not_insisted_on(child: Put) -> None:
    child("""
        if request["topology"] is None:
            real()
        os.kill(os.getpid(), signal.SIGSEGV)
    """)
    report = planned(**V5E)
    assert report.engine == "partitioner" and report.warnings[0] == (
        "libtpu failed, and XLA's partitioner was asked instead: libtpu died for "
        "v5e:2x2, by SIGSEGV"
    )
    assert refused(planned, **V5E, engine="libtpu").startswith("libtpu died for v5e")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "print('F1122 Check failed: x <= 16', *'abcdef', sep='\\n', flush=True)\n"
            "os.abort()",
            "WHO died for WHERE, by SIGABRT. Its last output:\n"
            "  F1122 Check failed: x <= 16",
        ),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            "WHO died for WHERE, by SIGKILL (probably out of memory)",
        ),
        (
            "print('ImportError: no jax', file=sys.stderr); sys.exit(3)",
            "WHO ended for WHERE, with exit code 3. Its last output:\n"
            "  ImportError: no jax",
        ),
        (
            "answer(error='RuntimeError: INVALID_ARGUMENT: no')",
            "WHO refuses the program for WHERE: RuntimeError: INVALID_ARGUMENT: no",
        ),
    ],
)
@pytest.mark.parametrize(
    ("ask", "who", "where"),
    [(compiled, "libtpu", "v5e:2x2"), (planned, "XLA's partitioner", "8 devices")],
)
def test_a_child_that_ends(
    ask: Any, who: str, where: str, body: str, said: str, child: Put
) -> None:
    child(body)
    assert refused(ask) == said.replace("WHO", who).replace("WHERE", where)
    assert not left()


def test_a_child_that_hangs(child: Put, tmp_path: Path) -> None:
    child("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("waiting for metadata", flush=True)  # before there are two that print
        os.fork()  # a process of its own must not be left behind
        (Path(sys.argv[0]).parent / f"pid{os.getpid()}").write_text("")
        time.sleep(600)
    """)
    assert refused(timeout=5.0) == (
        "libtpu did not finish for v5e:2x2 in 5 seconds, and was ended; pass a larger "
        "timeout. A model whose layers are unrolled takes 2 to 4 times as long as a "
        "scan over them. Its last output:\n  waiting for metadata"
    )
    started = [int(path.name[3:]) for path in tmp_path.glob("pid*")]
    assert len(started) == 2 and not left()
    for process in started:
        assert ends(process), f"{process} is still running"


def ends(process: int) -> bool:
    """Whether a process ends; the system may take a moment."""
    status = Path(f"/proc/{process}/status")
    for _ in range(600):
        try:
            if "zombie" in status.read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_the_child_imports_nothing_of_the_package() -> None:
    imported = [
        getattr(node, "module", None) or node.names[0].name
        for node in ast.walk(ast.parse(CHILD.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert "jaxlib" in imported and not [
        name for name in imported if name.startswith("flax_layoutmap")
    ]


# Of libtpu 0.0.42 and 0.0.50, shortened; the colors are other memories of the chip.
BUFFERS = """\
BufferAssignment:
allocation 0: size 512, thread-local:
 value: <77 add.534 @0> (size=512,offset=0): bf16[]{:T(256)}
allocation 1: size 33554432, parameter 7, shape |bf16[16]| at ShapeIndex {}, maybe-live:
allocation 176: size 2657567232, preallocated-temp:
allocation 177: size 128, color 2, preallocated-temp:
allocation 178: size 8388608, thread-local:
allocation 179: size 4096, color 5, parameter 3, shape |f32[8,128]| at ShapeIndex {}:
"""


@pytest.mark.parametrize("page", ["", "page 0, "])
def test_memory_from_the_buffer_assignment(page: str) -> None:
    text = BUFFERS
    for kind in ("thread-local", "parameter", "preallocated"):
        text = text.replace(f" {kind}", f" {page}{kind}")
    assert runpy.run_path(str(CHILD))["allocated"](text) == {
        "temporary": 2657567232,
        "allocated": 33554432 + 2657567232,
    }


# ---------------------------------------------------------------- libtpu, or none


def test_no_libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = _ask.wanted_libtpu()
    assert pinned is not None and pinned.startswith("0.0.")
    pretend_libtpu(monkeypatch, None)
    message = (
        "libtpu is not installed: pip install 'flax-layoutmap[tpu-aot]', which takes "
        f"the one of this JAX, {pinned}.* (Linux on x86-64, 200 MB, no TPU needed); "
        'flm.pod.plan(…, engine="partitioner") does without it'
    )
    assert refused() == refused(planned, **V5E, engine="libtpu") == message
    assert planned(**V5E).engine == "partitioner"


def test_another_libtpu(child: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_libtpu(monkeypatch, "0.0.7")
    pinned = _ask.wanted_libtpu()
    said = (
        f"libtpu 0.0.7 is not the one that this JAX pins, {pinned}.*; another may fail "
        f"or die: pip install 'libtpu=={pinned}.*'"
    )
    child(ANSWER)
    assert compiled().warnings[-1] == said
    child("os.kill(os.getpid(), signal.SIGSEGV)")
    assert refused() == f"libtpu died for v5e:2x2, by SIGSEGV. {said}"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mesh": "data=2,model=4"}, "the mesh data=2,model=4 has 8 devices, and v5e"),
        (
            {"mesh": "data=4,model=6", "slices": 6},
            "the mesh data=4,model=6 does not lie on 6 × v5e:2x2: the first axes go",
        ),
    ],
)
def test_refused_before_anything_starts(
    options: Any, said: str, child: Put, tmp_path: Path
) -> None:
    child(f"open({str(tmp_path / 'started')!r}, 'w')")
    assert refused(**options).startswith(said)
    assert not (tmp_path / "started").exists()
