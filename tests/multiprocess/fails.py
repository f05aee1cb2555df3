"""A part that fails in the last process, for the launcher's own tests."""

from pathlib import Path

import jax


def main(folder: Path) -> str:
    (folder / "was here").touch()
    if jax.process_index() == jax.process_count() - 1:
        raise ValueError("no such value")
    return "well"
