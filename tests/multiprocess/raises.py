"""A job in which process 1 raises while process 0 waits in a collective.

`python -m multiprocess.raises SECONDS`: of `shutdown_timeout_seconds`.
"""

import sys

from jax.experimental import multihost_utils

from multiprocess import launch

if __name__ == "__main__":
    process = launch.join(shutdown=int(sys.argv[1]))
    multihost_utils.sync_global_devices("both are here")
    if process == 1:
        raise KeyError("no such file in the data of this process")
    multihost_utils.sync_global_devices("never")
