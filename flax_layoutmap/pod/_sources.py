"""Where in the user's code an operation comes from."""

import functools
import os
import re
import sysconfig

# `"Attention.__call__"("/home/me/model.py":36:8 to :20)`, the innermost frame first.
_FRAME = re.compile(r'"([^"]*)"\("([^"]+)":(\d+):\d+')
_NAME = re.compile(r'loc\("([^"]*)"')


@functools.cache
def _others() -> tuple[str, ...]:
    """Folders of code that is not the user's."""
    import flax
    import jax
    import jaxlib
    import optax

    modules = (flax, jax, jaxlib, optax)
    files = [module.__file__ or "" for module in modules]
    own = os.path.dirname(os.path.dirname(__file__))
    folders = [os.path.dirname(file) for file in files]
    return tuple(f"{folder}{os.sep}" for folder in (*folders, own)) + (
        sysconfig.get_paths()["stdlib"] + os.sep,
    )


@functools.lru_cache(maxsize=4096)
def source_line(location: str) -> str | None:
    """The user's line in a location of MLIR; the innermost one where none is his.

    >>> source_line('loc("jit(f)/dot"("Up.__call__"("/home/me/model.py":36:8 to :20)))')
    'model.py:36 Up.__call__'
    """
    frames = _FRAME.findall(location)
    if not frames:
        return None
    folders = _others()
    own = (frame for frame in frames if not frame[1].startswith(folders))
    name, file, line = next(own, frames[0])
    short = name.replace(".<locals>", "")
    return f"{os.path.basename(file)}:{line} {short}"


def operation_name(location: str) -> str:
    """The last part of the name that JAX gave an operation; `""` without one.

    >>> operation_name('loc("jit(step)/jvp()/dot_general"(...))')
    'dot_general'
    """
    found = _NAME.match(location)
    return found[1].rstrip(":").rpartition("/")[2] if found else ""
