"""Write files atomically, and JSON with its invisible characters escaped."""

import contextlib
import json
import os
import re
import secrets
import shutil
from typing import Any

# Control characters that JSON leaves, and zero-width marks, some of which reverse text.
_HIDDEN = re.compile(r"[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")


def readable_json(value: Any, *, indent: int | None = None) -> str:
    """JSON for review: letters of all languages stay, invisible ones are escaped."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return _HIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def write_whole(path: str | os.PathLike[str], raw: bytes) -> None:
    """Write a file atomically: beside it, then renamed; links are followed."""
    path = os.path.realpath(path)
    beside = f"{path}.{secrets.token_hex(4)}.tmp"
    try:
        with open(beside, "xb") as file:
            file.write(raw)
        if os.path.exists(path):
            shutil.copymode(path, beside)
        os.replace(beside, path)
    except BaseException:  # an interrupt too leaves nothing beside the file
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
