"""Do all processes see the same storage?"""

import contextlib
import os
from pathlib import Path

import jax
import numpy as np

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap.checkpoint._places import is_url


def check_shared(path: str) -> None:
    """Writes a file beside a path on process 0, and looks for it on all others.

    All processes have to call it. One process, and URLs, are passed over.

    Args:
        path: where a checkpoint is to be written.

    Raises:
        CheckpointError: some processes do not see the file; names them.
    """
    if jax.process_count() == 1 or is_url(path):
        return
    from jax.experimental import multihost_utils

    folder = Path(path).parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    own = np.frombuffer(os.urandom(16), np.uint8)
    # A name that nobody has asked for yet, so that no cache says that it is not there.
    name = bytes(multihost_utils.broadcast_one_to_all(own)).hex()
    file = folder / f".flax_layoutmap-{name}"
    first = jax.process_index() == 0
    try:
        if first:
            with contextlib.suppress(OSError):  # seen by nobody, then
                file.touch()
        multihost_utils.sync_global_devices(f"flax_layoutmap {name} written")
        seen = multihost_utils.process_allgather(np.bool_(file.exists()))
    finally:
        if first:
            file.unlink(missing_ok=True)
    blind = [number for number, sees in enumerate(np.ravel(seen)) if not sees]
    if blind:
        which = "processes" if len(blind) > 1 else "process"
        raise CheckpointError(
            f"cannot save to {path}: {which} {', '.join(map(str, blind))} of "
            f"{jax.process_count()} do not see what process 0 writes to {folder}; a "
            "checkpoint needs storage that all processes share, at one path"
        )
