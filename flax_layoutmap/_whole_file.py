"""Files that are written as a whole, so that nobody ever reads half of one."""

import os
import tempfile


def write_whole(path: str | os.PathLike[str], raw: bytes) -> None:
    """Writes beside the file first, and then in its place.

    Several processes that write one file at once leave what one of them wrote.

    Args:
        path: the file; where it is a link, what that points to.
        raw: its content.

    Raises:
        OSError: it cannot be written.
    """
    path = os.path.realpath(path)
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as file:  # a pipe, say; nothing can stand in its place
            file.write(raw)
        return
    folder, name = os.path.split(path)
    try:
        handle, beside = tempfile.mkstemp(prefix=f".{name[:100]}.", dir=folder)
    except OSError as error:  # it names a file that nobody asked for
        raise type(error)(error.errno, error.strerror, path) from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
        os.chmod(beside, _mode_of(path))
        os.replace(beside, path)
    except BaseException:  # an interrupt too leaves nothing beside the file
        os.unlink(beside)
        raise


def _mode_of(path: str) -> int:
    if os.path.exists(path):
        return os.stat(path).st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
