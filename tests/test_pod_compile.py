"""The compiler's word: the child process and its deaths; libtpu where it is."""

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
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import needs_libtpu
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flax_layoutmap as flm
from flax_layoutmap._topologies import topology
from flax_layoutmap.pod import _aot
from flax_layoutmap.pod._aot import (
    Compiled,
    check_libtpu,
    compile_for,
    only_one,
    rematerialised,
    split_over_slices,
    wanted_libtpu,
)

V5E = topology("v5e:2x2")
ROOM = "make room, or set TMPDIR to a folder with more"


# ------------------------------------------------------- a child that is not libtpu's


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no test waits for a compile of somebody else's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts another program in the place of the child; libtpu seems to be there."""

    def put(body: str) -> None:
        path = tmp_path / "child.py"
        head = """\
            import json, os, signal, sys, time
            from pathlib import Path
            folder = Path(sys.argv[1])
            request = json.loads((folder / "request.json").read_text())
            def answer(**values):
                (folder / "result.json").write_text(json.dumps(values))
            """
        path.write_text(textwrap.dedent(head) + textwrap.dedent(body))
        monkeypatch.setattr(_aot, "_CHILD", path)

    pretend_libtpu(monkeypatch, f"{wanted_libtpu()}.1")
    return put


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


def run(timeout: float = 60.0, **options: Any) -> Compiled:
    return compile_for(b"code", V5E, (2, 2), timeout=timeout, **options)


def refused(timeout: float = 60.0) -> str:
    with pytest.raises(flm.LayoutError) as caught:
        run(timeout)
    return str(caught.value)


def test_what_the_child_is_told_and_says(child: Callable[[str], None]) -> None:
    child("""
        assert (folder / "module.mlirbc").read_bytes() == b"code"
        assert os.environ["JAX_PLATFORMS"] == "cpu"
        assert os.environ["TMPDIR"] == str(folder)
        (folder / "program.txt").write_text(json.dumps(request))
        answer(memory={"peak": 7}, slice_of=[0, 0, 0, 0], seconds=1.5)
    """)
    found = run(options={"xla_option": True})
    assert json.loads(found.text or "") == {
        "topology": "v5e:2x2",
        "options": {"chips_per_host_bounds": [2, 2, 1], "wrap": [False, False, False]},
        "within": [2, 2],
        "between": [1, 1],
        "compiler_options": {"xla_option": True},
        "exact_memory": False,
    }
    assert (found.memory, found.seconds) == ({"peak": 7}, 1.5)
    assert (found.slice_of, found.warnings, found.too_large) == ((0, 0, 0, 0), (), None)
    assert found.rematerialised == ()
    left = [path.name for path in Path(tempfile.gettempdir()).iterdir()]
    assert not [name for name in left if not name.endswith((".lock", ".py"))]


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ("print('F1122 Check failed: x <= 16', flush=True); os.abort()", "SIGABRT"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
    ],
)
def test_a_child_that_dies(child: Callable[[str], None], body: str, name: str) -> None:
    child(body)
    text = refused()
    assert text.startswith(f"the compiler died for v5e:2x2, by {name}")
    assert ("F1122 Check failed: x <= 16" in text) == (name == "SIGABRT")


def test_a_child_that_is_killed(child: Callable[[str], None]) -> None:
    child("os.kill(os.getpid(), signal.SIGKILL)")
    assert refused() == (
        "the compiler died for v5e:2x2, by SIGKILL (out of memory, if nobody killed it)"
    )


def test_a_child_that_hangs(child: Callable[[str], None]) -> None:
    child("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("waiting for metadata", flush=True)  # before there are two that print
        os.fork()  # a process of its own must not be left behind
        (Path(sys.argv[0]).parent / f"pid{os.getpid()}").write_text("")
        time.sleep(600)
    """)
    text = refused(timeout=8.0)
    assert text == (
        "the compiler did not finish for v5e:2x2 in 8 seconds, and was ended; pass a "
        "larger timeout. A model whose layers are unrolled takes 2 to 4 times as long "
        "as a scan over them. Its last words:\n  waiting for metadata"
    )
    started = glob.glob(f"{tempfile.gettempdir()}/pid*")
    assert len(started) == 2
    for path in started:
        # It was killed; the system may take a moment.
        for _ in range(200):
            if not runs(int(path.rpartition("pid")[2])):
                break
            time.sleep(0.05)
        else:
            raise AssertionError(f"{path} is still running")


CHILD = """
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
    code = Path(_aot.__file__).with_name("_child.py")
    command = [sys.executable, "-c", PARENT, CHILD, str(code), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        for _ in range(600):
            if not runs(child):
                break
            time.sleep(0.05)
        else:
            os.kill(child, signal.SIGKILL)
            raise AssertionError("it goes on without its parent")
    assert parent.wait() == -signal.SIGKILL
    assert not folder.exists()


def runs(process: int) -> bool:
    status = Path(f"/proc/{process}/status")
    return status.exists() and "zombie" not in status.read_text()


def test_a_child_that_gives_up(child: Callable[[str], None]) -> None:
    child("print('ImportError: no jax', file=sys.stderr); sys.exit(3)")
    assert refused() == (
        "the compiler ended for v5e:2x2, with exit code 3. Its last words:\n"
        "  ImportError: no jax"
    )


def test_a_refusal(child: Callable[[str], None]) -> None:
    child("answer(stage='compile', error='RuntimeError: INVALID_ARGUMENT: no')")
    assert refused() == (
        "the compiler refuses the program for v5e:2x2: RuntimeError: "
        "INVALID_ARGUMENT: no"
    )


@pytest.mark.parametrize(
    "body",
    [
        "answer(stage='text', error='OSError: [Errno 28] No space left on device')",
        "print('OSError: [Errno 28] No space left on device'); sys.exit(1)",
    ],
)
def test_no_space_for_the_child(child: Callable[[str], None], body: str) -> None:
    child(body)
    text = refused()
    assert text.startswith(f"the compiler found no space on the disk; {ROOM}")


def test_a_full_disk(child: Callable[[str], None]) -> None:
    # The device that is always full, in the place of the text of the program.
    code = Path(_aot.__file__).with_name("_child.py")
    child(f"""
        import runpy
        write = runpy.run_path({str(code)!r})["_write"]
        (folder / "program.part").symlink_to("/dev/full")
        write(folder / "program.txt", "HloModule m")
    """)
    text = refused()
    assert text.startswith(f"the compiler found no space on the disk; {ROOM}. Its last")
    assert "[Errno 28] No space left on device" in text


def test_a_disk_too_full_for_last_words(
    child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    child("sys.exit(1)")
    full = shutil.disk_usage("/")._replace(free=4096)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    assert refused().startswith(f"the compiler found no space on the disk; {ROOM}")


def test_no_temporary_folder(
    child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    child("answer()")
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere/at/all")
    text = refused()
    assert text.startswith("flm.pod.compile cannot work in the temporary folder: ")
    assert text.endswith(f"; {ROOM}")


OUT_OF_MEMORY = (
    "JaxRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory "
    "required for HLO temporaries (49.73G) exceeds available HBM (15.75G)."
)


def test_what_does_not_fit(child: Callable[[str], None]) -> None:
    child(f"answer(stage='compile', error={OUT_OF_MEMORY!r}, slice_of=[0] * 4)")
    found = run()
    assert found.text is None
    assert found.too_large == (round(49.73 * 2**30), round(15.75 * 2**30))


# As libtpu 0.0.30 says it.
LISTED = """JaxRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran \
out of memory in memory space hbm. Used 32.00G of 15.75G hbm. Exceeded hbm capacity by \
16.25G.

  Largest program allocations in hbm:

  1. Size: 16.00G
     Operator: op_name="jit(step)/dot_general" source_file="a/train.py" source_line=37 x
     Shape: bf16[33554432,256]{1,0:T(8,128)(2,1)}
     Unpadded size: 16.00G
     ==========================

  2. Size: 512B
     Shape: s32[16]{0:T(128)}
"""


def test_what_does_not_fit_and_why(child: Callable[[str], None]) -> None:
    child(f"answer(stage='compile', error={LISTED!r}, slice_of=[0] * 4)")
    found = run()
    assert found.too_large == (32 * 2**30, round(15.75 * 2**30))
    assert found.warnings == (
        "large: bf16[33554432,256], 16.00 GiB, made by jit(step)/dot_general at "
        "train.py:37",
    )


def test_notes_of_the_child(child: Callable[[str], None]) -> None:
    child("""
        (folder / "program.txt").write_text("HloModule m")
        answer(mesh_note="NotImplementedError: no")
    """)
    assert run().warnings == (
        "the devices are in the order of their numbers, because JAX finds no order "
        "along the links: NotImplementedError: no",
    )


def test_a_dump_of_the_users_own_is_refused(child: Callable[[str], None]) -> None:
    child("raise AssertionError('started')")
    with pytest.raises(flm.LayoutError) as caught:
        run(options={"xla_dump_to": "/tmp/mine"})
    assert str(caught.value) == (
        "compiler_options cannot set xla_dump_to: flm.pod.compile has the compiler "
        "write its program to a folder of its own, and reads it there"
    )


# Of libtpu 0.0.42.1, shortened; the colors are other memories of the chip.
BUFFERS = """\
BufferAssignment:
allocation 0: size 512, thread-local:
 value: <77 add.534 @0> (size=512,offset=0): bf16[]{:T(256)}
allocation 1: size 33554432, parameter 7, shape |bf16[16,512,2048]| at ShapeIndex {}, \
maybe-live-out:
allocation 2: size 4096, parameter 1, shape |f32[1024]| at ShapeIndex {}:
allocation 50: size 512, constant:
allocation 176: size 2657567232, preallocated-temp:
allocation 177: size 128, color 2, preallocated-temp:
allocation 180: size 117440512, color 1, preallocated-temp:
"""


def test_memory_from_the_buffer_assignment() -> None:
    code = Path(_aot.__file__).with_name("_child.py")
    assert runpy.run_path(str(code))["allocated"](BUFFERS) == {
        "arguments": 33554432 + 4096,
        "temporary": 2657567232,
        "allocated": 512 + 33554432 + 4096 + 512 + 2657567232,
    }


def test_one_at_a_time(child: Callable[[str], None]) -> None:
    child("answer(seconds=1.0); (folder / 'program.txt').write_text('HloModule m')")
    with only_one(0.0, 1.0):
        assert refused(timeout=0.2) == (
            "another flm.pod.compile was still running after 0.2 seconds; one runs at "
            "a time on a machine: wait for it, or pass a larger timeout"
        )
    assert run().text == "HloModule m"


def test_the_childs_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--x")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.delenv("ALLOW_MULTIPLE_LIBTPU_LOAD", raising=False)
    monkeypatch.setattr(glob, "glob", lambda pattern: [])
    found = _aot._environment()
    assert found["HOME"] == "/somewhere" and found["TPU_SKIP_MDS_QUERY"] == "1"
    assert not {"LIBTPU_INIT_ARGS", "XLA_FLAGS"} & set(found)
    assert found["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"
    # Never where there are chips: the library's lock guards them.
    monkeypatch.setattr(glob, "glob", lambda pattern: ["/dev/accel0"])
    assert "ALLOW_MULTIPLE_LIBTPU_LOAD" not in _aot._environment()


# ---------------------------------------------------------------------------- libtpu


def test_the_pin_is_that_of_the_installed_jax() -> None:
    wanted = wanted_libtpu()
    assert wanted is not None and wanted.startswith("0.0.")


def test_no_libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_libtpu(monkeypatch, None)
    assert refused() == (
        "flm.pod.compile needs libtpu, and it is not installed: pip install "
        "'flax-layoutmap[tpu-aot]', which takes the one that this JAX pins, "
        f"{wanted_libtpu()}.* (Linux on x86-64, 200 MB; no TPU is needed); "
        "flm.pod.plan needs none"
    )


def test_another_libtpu(
    child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_libtpu(monkeypatch, "0.0.10")
    said = (
        f"libtpu 0.0.10 is not the one that this JAX pins, {wanted_libtpu()}.*; "
        f"another may fail or die: pip install 'libtpu=={wanted_libtpu()}.*'"
    )
    assert check_libtpu() == said
    child("(folder / 'program.txt').write_text('HloModule m'); answer()")
    assert run().warnings == (said,)
    child("os.kill(os.getpid(), signal.SIGSEGV)")
    assert refused() == f"the compiler died for v5e:2x2, by SIGSEGV. {said}"


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


# ------------------------------------------------------------------- mesh and messages


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
    assert split_over_slices(sizes, where) == (within, between)


def test_a_mesh_that_does_not_fill_the_slices() -> None:
    with pytest.raises(flm.MeshError) as caught:
        split_over_slices((2, 4), V5E)
    assert str(caught.value) == (
        "the mesh 2×4 has 8 devices, and v5e:2x2 has 4; change a size, let one be -1, "
        "or take another topology"
    )


def test_a_mesh_that_does_not_go_over_whole_slices() -> None:
    with pytest.raises(flm.MeshError) as caught:
        split_over_slices((4, 6), topology("v5e:2x2", slices=6))
    assert str(caught.value) == (
        "the mesh 4×6 does not lie on 6 × v5e:2x2: the first axes go over the 6 "
        "slices; put an axis of size 6 first"
    )


INVOLUNTARY = (
    "W0822 10:11:12.1 1 spmd_partitioner.cc:656] [SPMD] Involuntary full "
    "rematerialization. The compiler cannot go from sharding {devices=[2,1,2]0,1,2,3} "
    "to {devices=[1,4,1]0,1,2,3} efficiently for HLO operation %add.2 = f32[8,16,4]"
    "{2,1,0} add(%a, %b), sharding={devices=[2,1,2]0,1,2,3}, "
    'metadata={op_name="jit(f1)/add" stack_frame_id=2}. As the last resort …'
)


def test_involuntary_rematerialisation_is_found() -> None:
    said = f"noise\n{INVOLUNTARY}\n{INVOLUNTARY}\nmore noise"
    assert rematerialised(said) == [("jit(f1)/add", "f32[8,16,4]")]
    assert rematerialised("nothing of the kind") == []


def test_every_message_has_a_case() -> None:
    source = Path(_aot.__file__).read_text(encoding="utf-8")
    raised = [node for node in ast.walk(ast.parse(source)) if type(node) is ast.Raise]
    # Each has a test of its text above; a new one changes this count.
    assert len(raised) == 10


# --------------------------------------------------------------------- the whole of it

LAYERS = flm.LayoutMap(batch="data")
LAYERS["up"] = (None, "model")
LAYERS["down"] = ("model", None)


def step(params: Any, x: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        return ((x @ params["up"]) @ params["down"]).astype(jnp.float32).sum()

    gradients = jax.grad(loss)(params)
    return jax.tree.map(lambda w, g: w - g, params, gradients)


def arguments(width: int = 512) -> tuple[Any, Any]:
    struct = jax.ShapeDtypeStruct
    params = {
        "up": struct((256, width), jnp.bfloat16),
        "down": struct((width, 256), jnp.bfloat16),
    }
    return params, struct((64, 256), jnp.bfloat16)


def compiled(topology: str, mesh: str, width: int = 512, **options: Any) -> Any:
    return flm.pod.compile(
        step,
        *arguments(width),
        topology=topology,
        mesh=mesh,
        layout_map=LAYERS,
        donate_argnames="params",
        **options,
    )


PROGRAM = """\
HloModule jit_step, num_partitions=4

ENTRY %main (p: bf16[256,256]) -> bf16[256,256] {
  %p = bf16[256,256]{1,0} parameter(0), metadata={op_name="inputs[0]"}
  %r = bf16[32,256]{1,0} all-reduce(%p), replica_groups=[2,2]<=[4]
  ROOT %g = bf16[256,256]{1,0} brand-new(%r), replica_groups=[2,2]<=[4]
}
"""


def rolled(params: Any, x: jax.Array) -> Any:
    return jax.tree.map(lambda w: jnp.roll(w, 1, (0, 1)), params), x


def test_what_a_plan_could_not_count_is_none_of_a_compiled_program(
    child: Callable[[str], None],
) -> None:
    program = PROGRAM.replace("brand-new(%r), replica_groups=[2,2]<=[4]", "copy(%p)")
    child(f"""
        (folder / "program.txt").write_text({program!r})
        answer(memory={{}}, slice_of=[0] * 4, seconds=1.0)
    """)
    given: Any = {
        "topology": "v5e:2x2",
        "mesh": "data=2,model=2",
        "layout_map": LAYERS,
        "donate_argnames": "params",
    }
    assert flm.pod.plan(rolled, *arguments(), **given).unrecognised_at
    report = flm.pod.compile(rolled, *arguments(), **given)
    assert report.unrecognised == report.unrecognised_at == {}


def test_a_report(child: Callable[[str], None]) -> None:
    figures = {"arguments": 300_000, "temporary": 1000, "peak": 400_000}
    child(f"""
        assert (folder / "module.mlirbc").stat().st_size > 500
        (folder / "program.txt").write_text({PROGRAM!r})
        answer(memory={figures!r}, slice_of=[0] * 4, seconds=1.0)
    """)
    report = compiled("v5e:2x2", "data=2,model=-1")
    assert (report.engine, report.fits) == ("compile", True)
    assert str(report.topology) == "v5e:2x2"
    assert report.memory.peak_bytes == 400_000
    assert report.memory.temporary_bytes == 1000
    at_rest = 2 * 256 * 256 * 2 + 32 * 256 * 2
    assert report.memory.at_rest_bytes == at_rest
    assert report.memory.padding_bytes == 300_000 - at_rest
    assert [(one.kind, one.axes) for one in report.collectives] == [
        ("all-reduce", ("model",))
    ]
    assert sum(report.unrecognised.values()) == 1
    asked: Any = {"axis": "model", "kinds": {"all-reduce"}, "small_bytes": 0}
    report.expect(**asked, unrecognised=True)
    with pytest.raises(AssertionError, match="the compile found nothing against it"):
        report.expect(**asked)
    assert report.flops_per_device > 0 and len(report.hosts) == 1
    assert "compile of step" in report.report()
    assert report.memory.note.startswith("the peak is that of the executable; ")


def test_a_report_before_the_compile_ends(child: Callable[[str], None]) -> None:
    figures = {"arguments": 300_000, "temporary": 1000, "allocated": 310_000}
    child(f"""
        (folder / "program.txt").write_text({PROGRAM!r})
        answer(memory={figures!r}, slice_of=[0] * 4, seconds=1.0)
    """)
    memory = compiled("v5e:2x2", "data=2,model=2").memory
    assert (memory.peak_bytes, memory.temporary_bytes) == (310_000, 1000)
    assert memory.note.startswith("the peak is what the compiler allocates, gaps")


SUMMED = """\
HloModule jit_step, num_partitions=4

ENTRY %main (p: bf16[256,256], q: bf16[256,256]) -> (bf16[256,256], bf16[256,256]) {
  %p = bf16[256,256]{1,0} parameter(0)
  %q = bf16[256,256]{1,0} parameter(1)
  %g = bf16[256,256]{1,0} all-reduce(%p), replica_groups=[2,2]<=[4]
  %h = bf16[256,256]{1,0} negate(%g)
  %r = bf16[256,256]{1,0} all-reduce(%h), replica_groups=[2,2]<=[4]
  %s = bf16[256,256]{1,0} subtract(%q, %r)
  ROOT %o = (bf16[256,256], bf16[256,256]) tuple(%p, %s)
}
"""


def test_a_sum_has_the_path_of_its_parameter(child: Callable[[str], None]) -> None:
    child(f"""
        (folder / "program.txt").write_text({SUMMED!r})
        answer(memory={{}}, slice_of=[0] * 4, seconds=1.0)
    """)
    report = compiled("v5e:2x2", "data=2,model=2")
    # The results are the parameters in the order of their names.
    assert [one.path for one in report.collectives] == ["params/down", "params/up"]
    # A step that gives back no state has sums, and none is a parameter's.
    report = flm.pod.compile(
        lambda params, x: (x @ params["up"]).sum(),
        *arguments(),
        topology="v5e:2x2",
        mesh="data=2,model=2",
        layout_map=LAYERS,
    )
    assert [one.path for one in report.collectives][1:] == [None]


def test_a_report_of_what_does_not_fit(child: Callable[[str], None]) -> None:
    child(f"answer(stage='compile', error={OUT_OF_MEMORY!r}, slice_of=[0] * 4)")
    report = compiled("v5e:2x2", "data=2,model=2")
    assert report.fits is False
    assert report.memory.headroom_bytes is not None
    assert report.memory.headroom_bytes < 0
    assert report.warnings[0] == (
        "does not fit: the step needs 49.7 GiB on a device, and the compiler allows "
        "15.8 GiB (34.0 GiB too much); shard more, take a smaller batch per device, or "
        "rematerialise. The collectives are the plan's"
    )
    assert report.collectives


def test_bad_input_is_refused_before_the_compiler_starts(
    child: Callable[[str], None],
) -> None:
    child("raise SystemExit('started')")
    with pytest.raises(flm.MeshError, match="there is no slice v5e:3x3"):
        compiled("v5e:3x3", "data=2,model=2")
    with pytest.raises(flm.MeshError, match="has 8 devices, and v5e:2x2 has 4"):
        compiled("v5e:2x2", "data=2,model=4")
    with pytest.raises(flm.RuleError, match="model"):
        compiled("v5e:2x2", "data=4")


# -------------------------------------------------------------------- the real library


# So that gathers stay gathers, as a plan has them.
PLAIN = {
    "xla_tpu_enable_windowed_einsum_for_all_gather": False,
    "xla_tpu_enable_windowed_einsum_for_reduce_scatter": False,
    "xla_tpu_enable_async_collective_fusion": False,
}
GATED = flm.LayoutMap(batch="data")
GATED["gate|up"] = (None, "data", "model")
GATED["down"] = (None, "model", "data")


def gated_layers(params: Any, x: jax.Array) -> Any:
    """Layers in which the compiler has something to merge.

    Going back, the sums of gate and up are added, and each kernel is gathered for the
    forward pass that is done again and for the gradient.
    """

    def layer(x: jax.Array, one: Any) -> tuple[jax.Array, None]:
        mean = (x.astype(jnp.float32) ** 2).mean(-1, keepdims=True)
        y = x * jax.lax.rsqrt(mean).astype(x.dtype)
        hidden = jax.nn.silu(y @ one["gate"]) * (y @ one["up"])
        return x + hidden @ one["down"], None

    def loss(params: Any) -> jax.Array:
        y, _ = jax.lax.scan(jax.checkpoint(layer), x, params)
        return (y.astype(jnp.float32) ** 2).mean()

    return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))


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
    struct = jax.ShapeDtypeStruct
    params = {
        "gate": struct((4, dim, 2048), jnp.bfloat16),
        "up": struct((4, dim, 2048), jnp.bfloat16),
        "down": struct((4, 2048, dim), jnp.bfloat16),
    }
    step = (gated_layers, params, struct((4096 * 1024 // dim, dim), jnp.bfloat16))
    where: dict[str, Any] = {"topology": name, "slices": slices, "mesh": mesh}
    where |= {"layout_map": GATED, "donate_argnames": "params"}
    planned = flm.pod.plan(*step, **where)
    report = flm.pod.compile(*step, **where, compiler_options=PLAIN)
    assert report.fits is True and not report.unrecognised
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


def block(x: jax.Array, layer: Any) -> jax.Array:
    return x + jnp.tanh(x @ layer["up"]) @ layer["down"]


def deep(scanned: bool) -> Callable[..., Any]:
    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any, x: jax.Array) -> jax.Array:
            if scanned:
                x, _ = jax.lax.scan(lambda x, layer: (block(x, layer), None), x, params)
            else:
                for at in range(4):
                    x = block(x, jax.tree.map(lambda leaf, at=at: leaf[at], params))
            return (x.astype(jnp.float32) ** 2).mean()

        gradients = jax.grad(loss, argnums=(0, 1))(params, x)
        return jax.tree.map(lambda w, g: w - g, params, gradients[0]), gradients[1]

    return step


@needs_libtpu
def test_a_scan_counts_as_its_layers() -> None:
    layout_map = flm.LayoutMap(batch="data")
    layout_map["up"] = (None, None, "model")
    layout_map["down"] = (None, "model", None)
    struct = jax.ShapeDtypeStruct
    params = {
        "up": struct((4, 256, 512), jnp.bfloat16),
        "down": struct((4, 512, 256), jnp.bfloat16),
    }
    reports = [
        flm.pod.compile(
            deep(scanned),
            params,
            struct((64, 256), jnp.bfloat16),
            topology="v5e:2x2",
            mesh="data=2,model=2",
            layout_map=layout_map,
        )
        for scanned in (True, False)
    ]
    for axis in ("data", "model"):
        scan, unrolled = (report.wire_bytes(axis=axis) for report in reports)
        assert scan == unrolled > 0
    counts = [
        sum(one.executions for one in report.collectives if one.axes == ("model",))
        for report in reports
    ]
    # One forward and one backward in each layer; the compiler merges none of them.
    assert counts == [8, 8]
    assert reports[0].flops_per_device == reports[1].flops_per_device


@needs_libtpu
def test_the_answer_before_code_generation_is_that_of_the_executable() -> None:
    early, whole = (
        compiled("v5e:2x2", "data=2,model=2", 4096, exact_memory=exact)
        for exact in (False, True)
    )
    assert early.collectives == whole.collectives and early.collectives
    assert early.fits is whole.fits is True
    assert early.unrecognised == whole.unrecognised == {}
    first, second = early.memory, whole.memory
    assert first.padding_bytes == second.padding_bytes
    assert first.peak_bytes and second.peak_bytes
    assert "exact_memory=True" in first.note and "exact_memory" not in second.note


@needs_libtpu
def test_compiled_does_not_fit() -> None:
    report = compiled("v5e:2x2", "data=2,model=2", 2**26)
    assert report.fits is False
    assert report.memory.limit_bytes == round(15.75 * 2**30)
    assert report.memory.peak_bytes > report.memory.limit_bytes


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


@needs_libtpu
def test_a_smaller_budget_of_memory() -> None:
    report = compiled(
        "v5e:2x2",
        "data=2,model=2",
        2**20,
        compiler_options={"xla_tpu_max_hbm_size_mib": 500},
    )
    assert report.fits is False and report.memory.limit_bytes == 500 * 2**20


@needs_libtpu
def test_an_option_that_does_not_exist() -> None:
    with pytest.raises(flm.LayoutError, match="the compiler refuses the program"):
        compiled("v5e:2x2", "data=2,model=2", compiler_options={"xla_nonsense": 1})


@pytest.fixture
def around_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """Runs something before the real child does what it does."""

    def put(before: str) -> None:
        path = tmp_path / "around.py"
        code = str(Path(_aot.__file__).with_name("_child.py"))
        lines = ("import os, resource, runpy, signal, sys, threading, time", before)
        path.write_text(
            "\n".join((*lines, f"runpy.run_path({code!r}, None, '__main__')"))
        )
        monkeypatch.setattr(_aot, "_CHILD", path)

    return put


@needs_libtpu
def test_the_compiler_runs_out_of_disk(around_the_child: Callable[[str], None]) -> None:
    around_the_child("resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))")
    with pytest.raises(flm.LayoutError) as caught:
        compiled("v5e:2x2", "data=2,model=2")
    assert str(caught.value) == f"the compiler found no space on the disk; {ROOM}"


@needs_libtpu
def test_the_compiler_is_killed_and_hangs(
    around_the_child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # While it loads libtpu, or makes the topology.
    around_the_child(
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()"
    )
    with pytest.raises(flm.LayoutError, match="^the compiler died for .*, by SIGKILL"):
        compiled("v5e:2x2", "data=2,model=2")
    around_the_child("signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)")
    with pytest.raises(flm.LayoutError, match="did not finish for v5e:2x2 in 3 sec"):
        compiled("v5e:2x2", "data=2,model=2", timeout=3.0)
    # Nothing is left behind, and nothing that keeps the next one waiting.
    around_the_child("")
    assert compiled("v5e:2x2", "data=2,model=2").fits is True
    left = {path.suffix for path in Path(tempfile.gettempdir()).iterdir()}
    assert left == {".lock", ".py"}


def test_the_child_imports_nothing_of_the_package() -> None:
    source = Path(_aot.__file__).with_name("_child.py").read_text(encoding="utf-8")
    imported = [
        getattr(node, "module", None) or node.names[0].name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert "jaxlib" in imported and not [
        name for name in imported if name.startswith("flax_layoutmap")
    ]
