"""The child process of flm.pod: requests, results, and how it may end."""

import ast
import glob
import importlib.metadata
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pods import SQUARE, X, plan, rules

import flax_layoutmap as flm
from flax_layoutmap._core.topologies import topology
from flax_layoutmap.pod import _aot, _plan
from flax_layoutmap.pod._aot import (
    Code,
    Compiled,
    check_libtpu,
    compile_for,
    only_one,
    partition_for,
    split_over_slices,
    wanted_libtpu,
)

Put = Callable[[str], None]
V5E = topology("v5e:2x2")
SIZES = {"x": 2, "y": 2}
CODE = Code(b"code", [True], [False])
ROOM = "make room, or set TMPDIR to a folder with more"
# The program of the child itself, before a test puts another one there.
CHILD = _aot._CHILD


@pytest.fixture(autouse=True)
def libtpu_seems_to_be_there(
    monkeypatch: pytest.MonkeyPatch, own_temporary_folder: Path
) -> None:
    pretend_libtpu(monkeypatch, f"{wanted_libtpu()}.1")


def pretend_libtpu(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    real = importlib.metadata.version

    def found(name: str) -> str:
        if name != "libtpu":
            return real(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(importlib.metadata, "version", found)


def compiled(timeout: float = 60.0, **options: Any) -> Compiled:
    return compile_for(CODE, V5E, SIZES, timeout=timeout, **options)


def partitioned(timeout: float = 60.0) -> Compiled:
    with partition_for(CODE, 4, timeout=timeout) as answer:
        return answer()


def refused(ask: Callable[..., Any] = compiled, **options: Any) -> str:
    with pytest.raises(flm.LayoutError) as caught:
        ask(**options)
    return str(caught.value)


def left() -> list[str]:
    """What is in the temporary folder, but for the lock of a compile."""
    names = [path.name for path in Path(tempfile.gettempdir()).iterdir()]
    return [name for name in names if not name.endswith(".lock")]


# ------------------------------------------------------------- what it is told


def test_what_the_child_is_told_and_says(
    child: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--x")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.delenv("ALLOW_MULTIPLE_LIBTPU_LOAD", raising=False)
    monkeypatch.setattr(glob, "glob", lambda pattern: [])
    child("""
        assert (folder / "module.mlirbc").read_bytes() == b"code"
        assert os.environ["TMPDIR"] == str(folder)
        written(json.dumps([request, dict(os.environ)]))
        answer(memory={"peak": 7}, slice_of=[0, 0, 0, 0])
    """)
    found = compiled(options={"xla_option": True})
    request, environment = json.loads(found.text or "")
    assert request == {
        "topology": "v5e:2x2",
        "options": {"chips_per_host_bounds": [2, 2, 1], "wrap": [False, False, False]},
        "within": [2, 2],
        "between": [1, 1],
        "compiler_options": {"xla_option": True},
        "exact_memory": False,
        "free_arguments": [True],
        "free_results": [False],
    }
    assert found.memory == {"peak": 7}
    assert (found.slice_of, found.warnings, found.too_large) == ((0, 0, 0, 0), (), None)
    assert found.rematerialised == () and not left()
    assert environment["HOME"] == "/somewhere"
    assert environment["JAX_PLATFORMS"] == "cpu"
    assert environment["TPU_SKIP_MDS_QUERY"] == "1"
    assert not {"LIBTPU_INIT_ARGS", "XLA_FLAGS"} & set(environment)
    assert environment["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"
    # Never where there are chips: the library's lock guards them.
    monkeypatch.setattr(glob, "glob", lambda pattern: ["/dev/accel0"])
    _, environment = json.loads(compiled().text or "")
    assert "ALLOW_MULTIPLE_LIBTPU_LOAD" not in environment


def test_a_dump_of_the_users_own_is_refused(child: Put) -> None:
    child("raise AssertionError('started')")
    assert refused(options={"xla_dump_to": "/tmp/mine"}) == (
        "compiler_options cannot set xla_dump_to: flm.pod.compile has the compiler "
        "write its program to a folder of its own, and reads it there"
    )


def test_the_child_imports_nothing_of_the_package() -> None:
    imported = [
        getattr(node, "module", None) or node.names[0].name
        for node in ast.walk(ast.parse(CHILD.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert "jaxlib" in imported and not [
        name for name in imported if name.startswith("flax_layoutmap")
    ]


# ---------------------------------------------------------------- how it may end



@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "print('F1122 Check failed: x <= 16', *'abcdef', sep='\\n', flush=True)\n"
            "os.abort()",
            "WHO died for WHERE, by SIGABRT. Its last output:\n"
            "  F1122 Check failed: x <= 16",
        ),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "WHO died for WHERE, by SIGSEGV"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            "WHO died for WHERE, by SIGKILL (out of memory, if nobody killed it)",
        ),
        (
            "print('ImportError: no jax', file=sys.stderr); sys.exit(3)",
            "WHO ended for WHERE, with exit code 3. Its last output:\n"
            "  ImportError: no jax",
        ),
        (
            f"print('{NO_SPACE}'); sys.exit(1)",
            f"WHO found no space on the disk; {ROOM}. Its last output:\n  {NO_SPACE}",
        ),
        (
            f"answer(stage='text', error='{NO_SPACE}')",
            f"WHO found no space on the disk; {ROOM}",
        ),
        (
            "answer(stage='compile', error='RuntimeError: INVALID_ARGUMENT: no')",
            "the compiler refuses the program for WHERE: RuntimeError: "
            "INVALID_ARGUMENT: no",
        ),
        (
            "answer(stage='partition', error='XlaRuntimeError: INTERNAL: no')",
            "XLA's partitioner refuses the program for WHERE: XlaRuntimeError: "
            "INTERNAL: no",
        ),
        (
            "answer(stage='topology', error='ValueError: no')",
            "the TPU library does not make WHERE: ValueError: no",
        ),
    ],
)
@pytest.mark.parametrize(
    ("ask", "who", "where"),
    [
        (compiled, "the compiler", "v5e:2x2"),
        (partitioned, "XLA's partitioner", "4 devices"),
    ],
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
    assert refused(timeout=8.0) == (
        "the compiler did not finish for v5e:2x2 in 8 seconds, and was ended; pass a "
        "larger timeout. A model whose layers are unrolled takes 2 to 4 times as long "
        "as a scan over them. Its last output:\n  waiting for metadata"
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


ORPHAN = """
import runpy, sys, threading, time
from pathlib import Path
folder = Path(sys.argv[2])
ends = runpy.run_path(sys.argv[1])["_end_with_the_parent"]
threading.Thread(target=ends, args=[folder], daemon=True).start()
time.sleep(0.2)
(folder / "started").touch()
time.sleep(600)
"""
PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]])
print(child.pid, flush=True)
while not os.path.exists(sys.argv[3] + "/started"):
    time.sleep(0.02)
os.kill(os.getpid(), 9)
"""


def test_a_child_whose_parent_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    command = [sys.executable, "-c", PARENT, ORPHAN, str(CHILD), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        if not ends(child):
            os.kill(child, signal.SIGKILL)
            raise AssertionError("it goes on without its parent")
    assert parent.wait() == -signal.SIGKILL
    assert not folder.exists()






def test_no_temporary_folder(child: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    child("answer()")
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere/at/all")
    text = refused()
    assert text.startswith("the compiler cannot work in the temporary folder: ")
    assert text.endswith(f"; {ROOM}")




def planned(**options: Any) -> flm.pod.PodReport:
    layouts = rules(w=(None, "model"))
    return plan(
        lambda p, x: (x @ p["w"]).sum(), SQUARE, X, layout_map=layouts, **options
    )


def test_a_plan_whose_child_hangs(child: Put) -> None:
    child("time.sleep(600)")
    said = refused(planned, timeout=1.0)
    assert said.startswith("XLA's partitioner did not finish for 8 devices in 1 sec")
    assert not left()




def test_no_dump_is_left() -> None:
    assert planned().collectives
    assert not left()




# -------------------------------------------------------------- what it says

OUT_OF_MEMORY = (
    "JaxRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory "
    "required for HLO temporaries (49.73G) exceeds available HBM (15.75G)."
)


def test_what_does_not_fit(child: Put) -> None:
    child(f"answer(stage='compile', error={OUT_OF_MEMORY!r}, slice_of=[0] * 4)")
    found = compiled()
    assert found.text is None and found.warnings == ()
    assert found.too_large == (round(49.73 * 2**30), round(15.75 * 2**30))


INVOLUNTARY = (
    "W0822 10:11:12.1 1 spmd_partitioner.cc:656] [SPMD] Involuntary full "
    "rematerialization. The compiler cannot go from sharding {devices=[2,1,2]0,1,2,3} "
    "to {devices=[1,4,1]0,1,2,3} efficiently for HLO operation %add.2 = f32[8,16,4]"
    "{2,1,0} add(%a, %b), sharding={devices=[2,1,2]0,1,2,3}, "
    'metadata={op_name="jit(f1)/add" stack_frame_id=2}. As the last resort …'
)


def test_notes_and_warnings(child: Put) -> None:
    child(f"""
        print("noise", {INVOLUNTARY!r}, {INVOLUNTARY!r}, "noise", sep="\\n")
        written("HloModule m")
        answer(mesh_note="NotImplementedError: no")
    """)
    found = compiled()
    assert found.rematerialised == (("jit(f1)/add", "f32[8,16,4]"),)
    assert found.warnings == (
        "the devices are in the order of their numbers, because JAX finds no order "
        "along the links: NotImplementedError: no",
    )


# Of libtpu 0.0.42.1, shortened; the colors are other memories of the chip.
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


def test_memory_from_the_buffer_assignment() -> None:
    assert runpy.run_path(str(CHILD))["allocated"](BUFFERS) == {
        "arguments": 33554432,
        "temporary": 2657567232,
        "allocated": 33554432 + 2657567232,
    }


# ---------------------------------------------------------------- libtpu, or none


def test_no_libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = wanted_libtpu()
    assert pinned is not None and pinned.startswith("0.0.")
    pretend_libtpu(monkeypatch, None)
    assert refused() == (
        "flm.pod.compile needs libtpu, and it is not installed: pip install "
        "'flax-layoutmap[tpu-aot]', which takes the one that this JAX pins, "
        f"{pinned}.* (Linux on x86-64, 200 MB; no TPU is needed); flm.pod.plan needs "
        "none"
    )


def test_another_libtpu(child: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_libtpu(monkeypatch, "0.0.10")
    pinned = wanted_libtpu()
    said = (
        f"libtpu 0.0.10 is not the one that this JAX pins, {pinned}.*; another may "
        f"fail or die: pip install 'libtpu=={pinned}.*'"
    )
    child("written('HloModule m'); answer()")
    assert compiled().warnings == (said,)
    child("os.kill(os.getpid(), signal.SIGSEGV)")
    assert refused() == f"the compiler died for v5e:2x2, by SIGSEGV. {said}"
    child("answer(stage='mesh', error='ValueError: no')")
    assert refused() == f"no mesh on v5e:2x2: ValueError: no\n  {said}"


def test_a_library_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_libtpu(monkeypatch, None)
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/nowhere/libtpu.so")
    assert refused() == (
        "TPU_LIBRARY_PATH is '/nowhere/libtpu.so', and there is no such file; unset it "
        "to use the installed libtpu"
    )
    (tmp_path / "libtpu.so").write_bytes(b"")
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / "libtpu.so"))
    assert check_libtpu() is None


# ------------------------------------------------------------- meshes over slices


@pytest.mark.parametrize(
    ("sizes", "slices", "within", "between"),
    [
        ((2, 2), 1, [2, 2], [1, 1]),
        ((2, 2, 2), 2, [1, 2, 2], [2, 1, 1]),
        ((8,), 2, [4], [2]),
        ((1, 2, 4), 2, [1, 1, 4], [1, 2, 1]),
        ((4, 2), 2, [2, 2], [2, 1]),
        ((2, 2, 4), 4, [1, 1, 4], [2, 2, 1]),
    ],
)
def test_the_first_axes_go_over_the_slices(
    sizes: tuple[int, ...], slices: int, within: list[int], between: list[int]
) -> None:
    where = topology("v5e:2x2", slices=slices)
    named = dict(zip("abc", sizes, strict=False))
    assert split_over_slices(named, where) == (within, between)


@pytest.mark.parametrize(
    ("sizes", "slices", "said"),
    [
        (
            {"x": 2, "y": 4},
            1,
            "the mesh x=2,y=4 has 8 devices, and v5e:2x2 has 4; change a size, or "
            "write -1 for one of them",
        ),
        (
            {"x": 4, "y": 6},
            6,
            "the mesh x=4,y=6 does not lie on 6 × v5e:2x2: the first axes go over the "
            "6 slices; put an axis of size 6 first",
        ),
    ],
)
def test_meshes_that_do_not_lie_on_the_slices(
    sizes: dict[str, int], slices: int, said: str
) -> None:
    with pytest.raises(flm.errors.MeshError) as caught:
        split_over_slices(sizes, topology("v5e:2x2", slices=slices))
    assert str(caught.value) == said
