"""Programs in processes of their own, forked from one that has imported JAX.

Importing takes longer than most programs. The process that forks touches no device and
starts no thread; each program is its `__main__`, and ends as Python ends.
"""

import contextlib
import faulthandler
import functools
import gc
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import quick

TESTS = Path(__file__).parent
# Before a test has changed it.
ENVIRONMENT = dict(os.environ)
IMPORTS = (
    *("jax", "jax.numpy", "flax.nnx", "flax.linen", "optax", "orbax.checkpoint"),
    *("flax_layoutmap", "flax_layoutmap.checkpoint", "flax_layoutmap.pod"),
)


class Process:
    """What tests use of `subprocess.Popen`.

    Args:
        args: as for `python`: a script, `-c` and code, or `-m` and a module.
        more: environment variables beside those of this process.
        out: where it prints.
        err: where its standard error goes.
        number: of the process in its job; those of a job have hashes of their own.
    """

    def __init__(
        self,
        args: Sequence[str],
        more: Mapping[str, str],
        out: Path,
        err: Path,
        number: int = 0,
    ) -> None:
        self._code = Path(tempfile.mktemp(dir=out.parent, prefix="code"))
        files = {"out": str(out), "err": str(err), "code": str(self._code)}
        server = _server(number)
        assert server.stdin is not None and server.stdout is not None
        request = {"args": args, "more": dict(more), "cwd": os.getcwd(), **files}
        server.stdin.write(json.dumps(request))
        server.stdin.write("\n")
        server.stdin.flush()
        self.pid = int(server.stdout.readline())

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return int(self._code.read_text()) if self._code.exists() else None

    def wait(self, timeout: float = 300) -> int:
        """Its exit code.

        Raises:
            TimeoutExpired: it still runs.
        """
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended just now
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Done(NamedTuple):
    """How a program ended: its exit code, what it printed, its standard error."""

    code: int
    out: str
    err: str


def run(args: Sequence[str], more: Mapping[str, str], timeout: float = 300) -> Done:
    """Runs a program; one that is late is ended, and says where it was."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = Process(args, more, out, err)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            code = process.wait()
        return Done(code, out.read_text(), err.read_text())


@functools.cache
def _server(_number: int) -> "subprocess.Popen[str]":
    """A process that forks; it ends when nobody can ask it any more."""
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    own = {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", __file__],
        env=quick.for_subprocess(ENVIRONMENT) | own,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _requests() -> Iterator[Any]:
    """In a process for each program: what was asked for. The server never ends it."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork():
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        request = json.loads(line)
        if not (pid := os.fork()):
            yield request
            return
        os.write(1, f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        code = Path(request["code"])
        code.with_suffix(".new").write_text(str(os.waitstatus_to_exitcode(status)))
        code.with_suffix(".new").rename(code)
        os._exit(0)
    os._exit(0)


def _become(
    args: Sequence[str], more: Mapping[str, str], cwd: str, out: str, err: str
) -> Any:
    """Makes this process that of a program; returns its code."""
    os.chdir(cwd)
    for number, (path, mode) in enumerate([("/dev/null", "r"), (out, "a"), (err, "a")]):
        with open(path, mode) as file:
            os.dup2(file.fileno(), number)
    os.environ.update(more)
    for name, value in more.items():
        if name.startswith("JAX_"):  # which JAX reads when it is imported
            jax.config.update(name.lower(), int(value) if value.isdigit() else value)
    kind, *rest = args
    if kind == "-c":
        code, *rest = rest
        sys.argv = ["-c", *rest]
        return compile(code, "<string>", "exec")
    if kind == "-m":
        module, *rest = rest
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        kind = spec.origin
    else:
        sys.path.insert(0, str(Path(kind).parent))
    sys.argv = [kind, *rest]
    vars(sys.modules["__main__"])["__file__"] = kind
    return compile(Path(kind).read_text("utf-8"), kind, "exec")


def _run(request: Mapping[str, Any]) -> None:
    """Runs a program as `__main__`, without the names of this file."""
    code, main = _become(**request), vars(sys.modules["__main__"])
    for name in {*main} - {"__builtins__", "__file__", "__name__"}:
        del main[name]
    exec(code, main)


if __name__ == "__main__":
    import jax

    faulthandler.enable()
    for name in IMPORTS:
        importlib.import_module(name)
    gc.freeze()  # so that a collection at the end of a program copies nothing
    for request in _requests():
        del request["code"]
        _run(request)
