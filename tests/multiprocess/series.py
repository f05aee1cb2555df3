"""Run several parts in one start of processes, which costs more than most parts.

`python -m multiprocess.series FOLDER SECONDS PART …`: each part is a module of this
folder, imported in each process once it has joined; its `main(FOLDER/PART)` returns the
answer.
"""

import faulthandler
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from multiprocess import launch


def run_part(name: str, folder: Path, process: int, seconds: float) -> None:
    """Runs one part, whose output goes into files of its own from now on.

    After so many seconds it is ended, with the stacks of its threads in the output.
    """
    for stream, kind in ((sys.stdout, "out"), (sys.stderr, "err")):
        stream.flush()
        with launch.output(folder, name, process, kind).open("wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    faulthandler.dump_traceback_later(seconds, exit=True)
    answer = importlib.import_module(f"multiprocess.{name}").main(folder / name)
    faulthandler.cancel_dump_traceback_later()
    path = launch.output(folder, name, process, "answer")
    path.write_text(json.dumps(answer))


def end_at_once(*error: Any) -> None:
    """Without waiting for the others, which will not come to the end."""
    sys.__excepthook__(*error)
    sys.stderr.flush()
    os._exit(1)


def main(folder: Path, seconds: float, *names: str) -> None:
    process = launch.join()
    sys.excepthook = end_at_once
    for name in names:
        run_part(name, folder, process, seconds)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:])
