"""Processes that fail, for the launcher's own tests; JAX is not started."""

import os
import sys
import threading


def main(how: str) -> None:
    """Process 1 dies, or never ends; process 0 waits for ever, or ends well."""
    process = int(os.environ["FLM_PROCESS"])
    print(f"process {process} was here", flush=True)
    if how == "dies" and process == 1:
        sys.exit("it could not be done")
    if (how == "dies") == (process == 0):
        threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1])
