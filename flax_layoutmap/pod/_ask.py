"""Ask XLA's partitioner or libtpu about a lowered step, in a child process.

libtpu ends its process on some shapes, crashes with other versions of JAX, and may hang
when it queries the cloud's metadata server. So it is never loaded in this process.
"""

import contextlib
import dataclasses
import glob
import importlib.metadata
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flax_layoutmap._core.errors import LayoutError, MeshError
from flax_layoutmap.pod._topologies import Topology, split_over_slices

# The most devices that jaxlib's CPU client supports; it rejects 4,096.
MOST_DEVICES = 2048
_CHILD = Path(__file__).with_name("_child.py")
_PIN = re.compile(r"libtpu\s*==\s*([\d.]+)\.\*")
# Without these, libtpu queries the cloud for metadata and logs to files.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "1",
}
_SIZE = r"([\d.]+)([KMGT]?)"
_TOO_LARGE = re.compile(rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_FATAL = re.compile(r"(F\d{4} |.*Error\b|.*Check fail)")


@dataclasses.dataclass(frozen=True, slots=True)
class Code:
    """A lowered program, for another process with the same jaxlib."""

    bytecode: bytes
    free_results: list[bool]  # for each result, whether XLA chooses its sharding


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The answer of the child."""

    program: str | None  # partitioned or final; None if it does not fit
    given: str  # the program before XLA changed it
    # Bytes on one device that libtpu allocates: "temporary", and "allocated" for all.
    memory: Mapping[str, int]
    too_large: tuple[int, int] | None  # bytes needed and available, if it does not fit
    warnings: tuple[str, ...]


def ask(
    code: Code,
    sizes: Mapping[str, int],
    topology: Topology | None,
    *,
    timeout: float,
    options: Mapping[str, Any],
) -> Answer:
    """Ask libtpu, or XLA's partitioner without a topology, about a program.

    `sizes` has the sizes of the mesh axes. Raises LayoutError after `timeout` seconds.
    """
    request: dict[str, Any] = {
        "topology": None,
        "compiler_options": dict(options),
        "free_results": code.free_results,
    }
    devices = math.prod(sizes.values())
    if topology is not None:
        request["within"], request["between"] = split_over_slices(sizes, topology)
        request["topology"], request["options"] = topology.compiler_arguments()
        asked = _Asked("libtpu", str(topology), timeout, check_libtpu())
    elif devices > MOST_DEVICES:
        raise MeshError(
            f"XLA's partitioner takes at most {MOST_DEVICES:,} devices, and the mesh "
            f"has {devices:,}: plan on a mesh with a shorter batch axis, where a "
            "device sends nearly the same, or install libtpu and pass a "
            'topology: pip install "flax-layoutmap[tpu-aot]"'
        )
    else:
        request["devices"] = devices
        asked = _Asked("XLA's partitioner", f"{devices:,} devices", timeout, None)
    with tempfile.TemporaryDirectory(
        prefix="flax_layoutmap_", ignore_cleanup_errors=True
    ) as folder:
        path = Path(folder)
        (path / "module.mlirbc").write_bytes(code.bytecode)
        (path / "request.json").write_text(json.dumps(request), encoding="utf-8")
        return asked.answer_of(path, *_run(path, timeout))


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """The program that is asked, for messages."""

    who: str
    where: str  # the topology, or the number of devices
    timeout: float  # seconds
    warning: str | None  # if libtpu is not the pinned version

    def answer_of(self, folder: Path, code: int | None, log: str) -> Answer:
        """The answer of a child, from its exit code and its output."""
        result = folder / "result.json"
        if not result.is_file():
            raise LayoutError(self.how_it_ended(code, log))
        answer = json.loads(result.read_text(encoding="utf-8"))
        warnings = [text for text in (self.warning, answer.get("note")) if text]
        if "error" not in answer:
            program, given = (
                (folder / f"{name}.txt").read_text(encoding="utf-8")
                for name in ("program", "given")
            )
            memory = answer.get("memory", {})
            return Answer(program, given, memory, None, tuple(warnings))
        if sizes := _TOO_LARGE.search(answer["error"]):
            needed, there = (
                round(float(sizes[at]) * _UNITS[sizes[at + 1]]) for at in (1, 3)
            )
            return Answer(None, "", {}, (needed, there), tuple(warnings))
        text = f"{self.who} refuses the program for {self.where}: {answer['error']}"
        raise LayoutError("\n  ".join([text.strip(), *warnings]))

    def how_it_ended(self, code: int | None, log: str) -> str:
        if code is None:
            text = (
                f"{self.who} did not finish for {self.where} in {self.timeout:g} "
                "seconds, and was ended; pass a larger timeout. A model whose layers "
                "are unrolled takes 2 to 4 times as long as a scan over them"
            )
        elif code < 0:
            name = signal.Signals(-code).name
            text = f"{self.who} died for {self.where}, by {name}"
            text += " (probably out of memory)" * (name == "SIGKILL")
        else:
            text = f"{self.who} ended for {self.where}, with exit code {code}"
        lines = [line for line in log.splitlines() if line.strip()]
        last = ([line for line in lines if _FATAL.match(line)] or lines)[-3:]
        if self.warning:
            text += f". {self.warning}"
        return "\n  ".join([f"{text}. Its last output:" if last else text, *last])


# -------------------------------------------------------------------------- libtpu


def has_libtpu() -> bool:
    """Whether libtpu is installed, or TPU_LIBRARY_PATH is set."""
    return bool(os.environ.get("TPU_LIBRARY_PATH")) or _version() is not None


def _version() -> str | None:
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_libtpu() -> str | None:
    """Require libtpu; return a warning if it is not the version that JAX pins."""
    pinned, version = wanted_libtpu(), _version()
    if not has_libtpu():
        raise LayoutError(
            "libtpu is not installed: pip install 'flax-layoutmap[tpu-aot]', which "
            f"takes the one of this JAX, {pinned}.* (Linux on x86-64, 200 MB, no TPU "
            'needed); flm.pod.plan(…, engine="partitioner") does without it'
        )
    is_given = "TPU_LIBRARY_PATH" in os.environ
    if is_given or pinned is None or f"{version}.".startswith(f"{pinned}."):
        return None
    return (
        f"libtpu {version} is not the one that this JAX pins, {pinned}.*; another may "
        f"fail or die: pip install 'libtpu=={pinned}.*'"
    )


def wanted_libtpu() -> str | None:
    """The version of libtpu that the installed JAX pins, such as `"0.0.42"`."""
    pins = map(_PIN.match, importlib.metadata.requires("jax") or [])
    return next((pin[1] for pin in pins if pin), None)


# ------------------------------------------------------------------------- process


def _environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        # Settings of the user's job do not apply to the child.
        if name not in ("LIBTPU_INIT_ARGS", "TPU_PROCESS_BOUNDS", "XLA_FLAGS")
    }
    if not (glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")):
        # The lock of libtpu is only needed where there are chips.
        kept["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    return kept | _ENVIRONMENT


def _run(folder: Path, timeout: float) -> tuple[int | None, str]:
    """Run the child; return its exit code (None after a timeout) and its stderr."""
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
        code = child.wait(timeout)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return code, (folder / "stderr.txt").read_text(encoding="utf-8", errors="replace")
