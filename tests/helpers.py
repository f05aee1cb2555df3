"""Helpers for tests: subprocesses, bytes sent by collectives, libtpu."""

import collections
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import quick

ROOT = Path(__file__).parents[1]
_without_libtpu = pytest.mark.skipif(
    "libtpu" not in {one.name for one in importlib.metadata.distributions()},
    reason="libtpu is not installed, and only it compiles for TPUs; pip install "
    "'flax-layoutmap[tpu-aot]' (200 MB, Linux on x86-64) to run this test",
)


def needs_libtpu(test: Any) -> Any:
    """Marks a test that runs the TPU compiler; skipped where there is none."""
    return pytest.mark.libtpu(_without_libtpu(test))


def run_python(code: str, *, timeout: float = 300) -> str:
    """Runs code in a fresh interpreter on CPU, compiled as for users.

    Returns:
        What it printed.

    Raises:
        AssertionError: it exited with an error; the message holds its output.
    """
    environment = quick.as_for_users(os.environ)
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def sent_as_on_cpus(collectives: Any) -> dict[tuple[str, str], int]:
    """Axes and kind → bytes; on CPUs a scattered sum is a whole one."""
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    for one in collectives:
        scatters = one.kind == "reduce-scatter"
        kind = "all-reduce" if scatters else one.kind
        size = one.wire_bytes_per_step * (1 + scatters)
        found["+".join(sorted(one.axes)), kind] += size
    return dict(found)
