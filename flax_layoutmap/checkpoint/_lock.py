"""One program at a time writes below a directory."""

import os
import socket
import sys

if sys.platform != "win32":
    import fcntl

_NAME = ".flax_layoutmap.lock"

# What this program itself has locked: the system's locks do not count within one.
_HELD: set[str] = set()


class WriteLock:
    """The right to write below a local directory.

    The system takes it back when the process ends, however it ends. (A lock of
    `fcntl.lockf` belongs to the process, so workers that were forked from it do not
    keep it.) Where the file system knows no locks, everybody gets it.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._key = os.path.realpath(directory)
        self._file: int | None = None
        self.is_held = False

    def take(self) -> str | None:
        """Takes it; says who has it if that is somebody else."""
        if self.is_held:
            return None
        if self._key in _HELD:
            return "another Checkpointer of this program; close it first"
        os.makedirs(self._directory, exist_ok=True)
        owner = self._locked()
        if owner is None:
            self.is_held = True
            _HELD.add(self._key)
        return owner

    def release(self) -> None:
        """Gives it back."""
        if not self.is_held:
            return
        self.is_held = False
        _HELD.discard(self._key)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _locked(self) -> str | None:
        if sys.platform == "win32":
            return None
        # The file stays: whoever removed it might remove a newer one of another.
        file = os.open(os.path.join(self._directory, _NAME), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            owner = os.read(file, 1000).decode(errors="replace")
            os.close(file)
            return f"{owner or 'another process'}; use another directory, or end it"
        except OSError:
            os.close(file)
            return None
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
        self._file = file
        return None
