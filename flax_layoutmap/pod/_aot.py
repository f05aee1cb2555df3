"""Run XLA's partitioner and compiler in a child process.

The TPU compiler ends its process on some shapes, crashes with another JAX, and hangs
where it queries the cloud's metadata server. It is therefore never loaded here.
"""

import contextlib
import dataclasses
import glob
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flax_layoutmap._core.errors import LayoutError, MeshError
from flax_layoutmap._core.mesh_shape import over_slices
from flax_layoutmap._core.topologies import Topology

_CHILD = Path(__file__).with_name("_child.py")
_PIN = re.compile(r"libtpu\s*==\s*([\d.]+)\.\*")
# Without these libtpu queries the cloud for metadata, logs to files, and does not
# report reshards that go through the whole array.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "TPU_STDERR_LOG_LEVEL": "1",
    "TPU_MIN_LOG_LEVEL": "1",
}
_SIZE = r"([\d.]+)([KMGT]?)"
_TOO_LARGE = re.compile(rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)")
_ROOM = "make room, or set TMPDIR to a folder with more"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_REMATERIALISED = re.compile(
    r"Involuntary full rematerialization\. .*? for HLO operation (.*)"
)
_NO_SPACE = re.compile(
    "no space left on device|disk quota exceeded|file too large", re.IGNORECASE
)
# A folder with less free space is full; it cannot hold the last output either.
_LEAST_SPACE = 64 * 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """The answer of the child."""

    # The partitioned or final program; None if it does not fit.
    text: str | None
    # Bytes on one device: "arguments", "temporary", and "peak" of a finished executable
    # or "allocated" if the compiler was ended early.
    memory: Mapping[str, int]
    # Bytes needed and available, if the program does not fit.
    too_large: tuple[int, int] | None
    # The slice of each place of the mesh, row by row.
    slice_of: tuple[int, ...]
    # Name and type of each array that is gathered in full to change its sharding.
    rematerialised: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]


# Waits for a child and returns its answer.
Answer = Callable[[], Compiled]


@dataclasses.dataclass(frozen=True, slots=True)
class Code:
    """A lowered program, for another process with the same jaxlib.

    `free_arguments` and `free_results` are those without a sharding, which XLA chooses;
    `has_manual` says whether there is a shard_map.
    """

    bytecode: bytes
    free_arguments: list[bool]
    free_results: list[bool]
    has_manual: bool = False


def compile_for(
    code: Code,
    topology: Topology,
    sizes: Mapping[str, int],
    *,
    timeout: float,
    options: Mapping[str, Any] | None = None,
    exact_memory: bool = False,
) -> Compiled:
    """Compile a module, lowered for a mesh of these sizes, in a child process.

    The timeout, in seconds, includes waiting for another compile on this machine.
    """
    if "xla_dump_to" in (options or {}):
        raise LayoutError(
            "compiler_options cannot set xla_dump_to: flm.pod.compile has the compiler "
            "write its program to a folder of its own, and reads it there"
        )
    within, between = split_over_slices(sizes, topology)
    warning = check_libtpu()
    name, arguments = topology.compiler_arguments()
    request = {
        "topology": name,
        "options": arguments,
        "within": within,
        "between": between,
        "compiler_options": dict(options or {}),
        "exact_memory": exact_memory,
    }
    ends = time.monotonic() + timeout
    compiler = _Child("the compiler", str(topology), timeout, warning, alone=True)
    with compiler.run(request, code, ends) as answer:
        return answer()


def partition_for(
    code: Code, devices: int, *, timeout: float
) -> contextlib.AbstractContextManager[Answer]:
    """Partition a module by the CPU client of jaxlib, in a child process.

    The child runs while the context is open.
    """
    partitioner = _Child("XLA's partitioner", f"{devices:,} devices", timeout)
    request = {"topology": None, "devices": devices}
    return partitioner.run(request, code, time.monotonic() + timeout)


@dataclasses.dataclass(frozen=True, slots=True)
class _Child:
    """A child process for one program."""

    who: str  # "the compiler" or "XLA's partitioner"
    where: str  # the topology, or the number of devices
    timeout: float  # seconds
    warning: str | None = None  # of another libtpu than the pinned one
    alone: bool = False  # whether one runs at a time on this machine

    @contextlib.contextmanager
    def run(
        self, request: Mapping[str, Any], code: Code, ends: float
    ) -> Iterator[Answer]:
        """Run the process while the context is open, until `ends`, a monotonic time."""
        own = {
            "free_arguments": code.free_arguments,
            "free_results": code.free_results,
        }
        wait = only_one(ends, self.timeout) if self.alone else contextlib.nullcontext()
        try:
            with (
                tempfile.TemporaryDirectory(
                    prefix="flax_layoutmap_", ignore_cleanup_errors=True
                ) as folder,
                wait,
            ):
                path = Path(folder)
                (path / "module.mlirbc").write_bytes(code.bytecode)
                written = json.dumps({**request, **own})
                (path / "request.json").write_text(written, encoding="utf-8")
                with _running(path) as child:
                    yield lambda: self.answer_of(path, *_end_of(child, path, ends))
        except OSError as error:
            raise LayoutError(
                f"{self.who} cannot work in the temporary folder: {error}; {_ROOM}"
            ) from error

    def answer_of(self, folder: Path, code: int | None, log: str) -> Compiled:
        """The answer of a child that ended."""
        result = folder / "result.json"
        if not result.is_file():
            if shutil.disk_usage(folder).free < _LEAST_SPACE:
                log += "\nNo space left on device"
            raise LayoutError(self.how_it_ended(code, log))
        answer = json.loads(result.read_text(encoding="utf-8"))
        error = answer.get("error")
        too_large = _too_large(error or "")
        if error is not None and _NO_SPACE.search(error):
            raise LayoutError(f"{self.who} found no space on the disk; {_ROOM}")
        if error is not None and too_large is None:
            raise LayoutError(self.why_it_failed(error, answer["stage"]))
        text = folder / "program.txt"
        notes = [self.warning] if self.warning else []
        if "mesh_note" in answer:
            notes.append(
                "the devices are in the order of their numbers, because JAX finds no "
                f"order along the links: {answer['mesh_note']}"
            )
        return Compiled(
            text=text.read_text(encoding="utf-8") if error is None else None,
            memory=answer.get("memory", {}),
            too_large=too_large,
            slice_of=tuple(answer.get("slice_of", ())),
            rematerialised=tuple(rematerialised(log)),
            warnings=tuple(notes),
        )

    def how_it_ended(self, code: int | None, log: str) -> str:
        who, where = self.who, self.where
        if code is None:
            text = (
                f"{who} did not finish for {where} in {self.timeout:g} seconds, and "
                "was ended; pass a larger timeout. A model whose layers are unrolled "
                "takes 2 to 4 times as long as a scan over them"
            )
        elif _NO_SPACE.search(log):
            text = f"{who} found no space on the disk; {_ROOM}"
        elif code < 0:
            name = signal.Signals(-code).name
            text = f"{who} died for {where}, by {name}"
            if name == "SIGKILL":
                text += " (out of memory, if nobody killed it)"
        else:
            text = f"{who} ended for {where}, with exit code {code}"
        return _with_last_lines(text, log, self.warning)

    def why_it_failed(self, error: str, stage: str) -> str:
        texts = {
            "topology": "the TPU library does not make",
            "mesh": "no mesh on",
            "compile": "the compiler refuses the program for",
            "memory": "no memory figures of the program for",
            "partition": "XLA's partitioner refuses the program for",
            "text": "no text of the program for",
        }
        text = f"{texts.get(stage, stage)} {self.where}: {error.strip()}"
        return f"{text}\n  {self.warning}" if self.warning else text


def split_over_slices(
    sizes: Mapping[str, int], topology: Topology
) -> tuple[list[int], list[int]]:
    """Sizes of the mesh axes inside one slice, and over the slices."""
    count = math.prod(sizes.values())
    line = ",".join(f"{name}={size}" for name, size in sizes.items())
    if count != topology.devices:
        raise MeshError(
            f"the mesh {line} has {count:,} devices, and {topology} has "
            f"{topology.devices:,}; change a size, or write -1 for one of them"
        )
    between = over_slices(tuple(sizes.values()), topology.slices)
    if between is None:
        raise MeshError(
            f"the mesh {line} does not lie on {topology}: the first axes go over the "
            f"{topology.slices} slices; put an axis of size {topology.slices} first"
        )
    within = [size // part for size, part in zip(sizes.values(), between, strict=True)]
    return within, between


def check_libtpu() -> str | None:
    """Require a TPU library; return a warning if it is not the one that JAX pins."""
    pinned = wanted_libtpu()
    if os.environ.get("TPU_LIBRARY_PATH"):
        if not Path(os.environ["TPU_LIBRARY_PATH"]).is_file():
            raise LayoutError(
                f"TPU_LIBRARY_PATH is {os.environ['TPU_LIBRARY_PATH']!r}, and there is "
                "no such file; unset it to use the installed libtpu"
            )
        return None
    try:
        found = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        raise LayoutError(
            "flm.pod.compile needs libtpu, and it is not installed: pip install "
            "'flax-layoutmap[tpu-aot]', which takes the one that this JAX pins, "
            f"{pinned}.* (Linux on x86-64, 200 MB; no TPU is needed); flm.pod.plan "
            "needs none"
        ) from None
    if pinned and found != pinned and not found.startswith(f"{pinned}."):
        return (
            f"libtpu {found} is not the one that this JAX pins, {pinned}.*; another "
            f"may fail or die: pip install 'libtpu=={pinned}.*'"
        )
    return None


def wanted_libtpu() -> str | None:
    """The libtpu that the installed JAX pins, such as `"0.0.42"`."""
    for line in importlib.metadata.requires("jax") or []:
        found = _PIN.match(line)
        if found:
            return found[1]
    return None


@contextlib.contextmanager
def only_one(ends: float, timeout: float) -> Iterator[None]:
    """Hold the lock for compiles of this user on this machine.

    A compile takes 1 to 11 GB and all cores. The system releases the lock when a
    process ends, however it ends.
    """
    import fcntl

    user = os.getuid()
    path = Path(tempfile.gettempdir()) / f"flax_layoutmap_compile_{user}.lock"
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    handle = os.open(path, flags, 0o600)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= ends:
                    raise LayoutError(
                        f"another flm.pod.compile was still running after {timeout:g} "
                        "seconds; one runs at a time on a machine: wait for it, or "
                        "pass a larger timeout"
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(handle)


def _environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        # A job's own cluster and flags are not the child's.
        if name not in ("LIBTPU_INIT_ARGS", "TPU_PROCESS_BOUNDS", "XLA_FLAGS")
    }
    if not (glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")):
        # On a TPU VM the library's lock guards the chips; elsewhere there are none.
        kept["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    return kept | _ENVIRONMENT


@contextlib.contextmanager
def _running(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the child while the context is open."""
    with (folder / "stderr.txt").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-P", str(_CHILD), str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # libtpu writes logs even if disabled: they are removed with the folder.
            env=_environment() | {"TMPDIR": str(folder)},
            start_new_session=True,
        )
    try:
        yield child
    finally:
        _kill(child)


def _end_of(
    child: "subprocess.Popen[bytes]", folder: Path, ends: float
) -> tuple[int | None, str]:
    """The exit code of the child (None if it was killed here) and its stderr."""
    try:
        code = child.wait(max(0.0, ends - time.monotonic()))
    except subprocess.TimeoutExpired:
        code = None
        _kill(child)
    return code, (folder / "stderr.txt").read_text(encoding="utf-8", errors="replace")


def _kill(child: "subprocess.Popen[bytes]") -> None:
    """Kill a child that still runs, and the processes that it started."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def rematerialised(log: str) -> list[tuple[str, str]]:
    """Name and type of the arrays that are gathered in full, by the compiler's log."""
    found: dict[tuple[str, str], None] = {}
    for line in log.splitlines():
        warned = _REMATERIALISED.search(line)
        if warned:
            name = re.search(r'op_name="([^"]*)"', warned[1])
            kind = re.search(r"= ([a-z]\w*\[[\d,]*\])", warned[1])
            called = name[1] if name else warned[1].split(" ")[0]
            found[called, kind[1] if kind else ""] = None
    return list(found)


def _too_large(error: str) -> tuple[int, int] | None:
    found = _TOO_LARGE.search(error)
    if found is None:
        return None
    needed = float(found[1]) * _UNITS[found[2]]
    there = float(found[3]) * _UNITS[found[4]]
    return round(needed), round(there)


def _with_last_lines(text: str, log: str, warning: str | None) -> str:
    lines = [line for line in log.splitlines() if line.strip()]
    fatal = [
        line for line in lines if re.match(r"(F\d{4} |.*Error\b|.*Check fail)", line)
    ]
    last = (fatal or lines)[-3:]
    if warning:
        text += f". {warning}"
    return "\n  ".join([f"{text}. Its last output:" if last else text, *last])
