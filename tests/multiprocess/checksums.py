"""Checksums of arrays that several processes hold, in memory and of a checkpoint.

Its argument is a folder that all processes see.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import flax_layoutmap as flm
from flax_layoutmap.checkpoint import _checksums
from flax_layoutmap.checkpoint._verify import verify
from multiprocess import launch

MESH = "data=2,model=4"


def tree(spec: str) -> dict[str, Any]:
    """Arrays of some dtypes in different layouts, and values of the host."""
    mesh = flm.DeviceMesh(spec)
    rules = flm.LayoutMap(mesh, strict=False)
    first, last = mesh.axis_names[0], mesh.axis_names[-1]
    rules["rows"] = (first, None)
    rules["columns"] = (None, last)
    rules["both"] = (first, last) if first != last else (None, first)
    rng = np.random.default_rng(0)
    arrays = {
        "rows": rng.normal(size=(64, 24)).astype(np.float32),
        "columns": rng.normal(size=(24, 72)).astype(jnp.bfloat16),
        "both": rng.integers(-99, 99, size=(16, 40)).astype(np.int8),
        "everywhere": rng.normal(size=(3, 5)).astype(np.float16),
        "key": jax.random.split(jax.random.key(3), 4),
    }
    return {**rules.place(arrays), "host": np.arange(5.0), "step": 7, "name": "a"}


def found(spec: str) -> dict[str, str]:
    """The checksums, from the host and from the devices, which must be the same."""
    values = tree(spec)
    on_host = _checksums.checksums(values)
    _checksums._HOST_PLATFORMS = ()
    on_devices = _checksums.checksums(values)
    _checksums._HOST_PLATFORMS = ("cpu",)
    assert on_host == on_devices
    return on_host


def damage(path: Path) -> None:
    """Cuts the files of the largest arrays that process 1 wrote."""
    for file in path.glob("state/ocdbt.process_1/d/*"):
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])


def main() -> None:
    number = launch.join()
    path = Path(sys.argv[1], "a")
    flm.checkpoint.save(path, tree(MESH))
    verified = verify(path)
    wait = jax.experimental.multihost_utils.sync_global_devices
    wait("verified")
    if number == 0:
        damage(path)
    wait("damaged")
    try:
        verify(path)
        error = ""
    except flm.CheckpointError as caught:
        error = str(caught)
    launch.answer(
        {
            "checksums": found(MESH),
            "other mesh": found("x=8"),
            "verified": str(verified),
            "error": error,
        }
    )


if __name__ == "__main__":
    import jax.experimental.multihost_utils

    main()
