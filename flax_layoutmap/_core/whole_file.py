"""Write files atomically, and JSON with its invisible characters escaped."""

import json
import os
import re
import tempfile
from typing import Any

# Control characters that JSON leaves, and zero-width marks, some of which reverse text.
_HIDDEN = re.compile(r"[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")


def readable_json(value: Any, *, indent: int | None = None) -> str:
    """JSON for review: letters of all languages stay, invisible ones are escaped."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def write_whole(path: str | os.PathLike[str], raw: bytes) -> None:
    """Write a file atomically, by moving a temporary file; links are followed."""
    path = os.path.realpath(path)
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as file:  # a pipe, say, cannot be replaced
            file.write(raw)
        return
    folder, name = os.path.split(path)
    try:
        handle, beside = tempfile.mkstemp(prefix=f".{name[:100]}.", dir=folder)
    except OSError as error:  # it names the temporary file
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
