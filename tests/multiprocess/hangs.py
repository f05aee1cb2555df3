"""A part that never ends, for the launcher's own tests."""

import threading
from pathlib import Path


def main(folder: Path) -> None:
    print("waits for ever", flush=True)
    threading.Event().wait()
