"""Helpers for tests that need a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import quick

ROOT = Path(__file__).parents[1]


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
