"""Write layouts to golden files, and compare with them."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._core.whole_file import write_whole
from flax_layoutmap._show.diff import difference
from flax_layoutmap._show.snapshot import golden_text, snapshot_of

if TYPE_CHECKING:
    from flax_layoutmap._resolve.resolution import Resolution

_WIDTH = 100  # of the report of a failure, which is read in logs too


def write_golden(resolution: "Resolution", path: str | os.PathLike[str]) -> None:
    """Write a Resolution to a golden file, kept beside the code for review.

    The file is JSON: the mesh and the rules, totals, and then one line per leaf, sorted
    by path. Nothing in it depends on the machine, the time or the order of the tree.
    Folders that are missing are made. Processes of one job may write the same path.

    Args:
        resolution: what to write; an abstract mesh is enough.
        path: the file.

    Example:
        >>> import tempfile, flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("data=2"))
        >>> resolution = layout_map.resolve({"step": 3})
        >>> flm.testing.write_golden(resolution, tempfile.mkdtemp() + "/layouts.json")
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, _encoded(resolution))


def assert_golden(resolution: "Resolution", path: str | os.PathLike[str]) -> None:
    """Assert that a Resolution equals the file that `write_golden` wrote.

    Compared are the mesh, the rules, and of each leaf shape, dtype, layout, the rule or
    reason that decided, and fallbacks.

    Args:
        resolution: the layouts now.
        path: the file.

    Raises:
        AssertionError: something differs, or there is no such file: the text has what
            moved, what that costs, and how to accept it.
        LayoutError: the file was not written by `write_golden`.

    Example:
        >>> import tempfile, flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("data=2"))
        >>> resolution = layout_map.resolve({"step": 3})
        >>> path = tempfile.mkdtemp() + "/layouts.json"
        >>> flm.testing.write_golden(resolution, path)
        >>> flm.testing.assert_golden(resolution, path)
    """
    path = Path(path)
    how = (
        "to accept this, run pytest with --update-layouts (fixture layout_golden), or "
        f"call flm.testing.write_golden(resolution, {str(path)!r})"
    )
    try:
        written = path.read_bytes()
    except FileNotFoundError:
        text = f"there is no file of layouts {str(path)!r}; {how}"
        raise AssertionError(text) from None
    except OSError as error:
        raise LayoutError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    if written == _encoded(resolution):
        return
    try:
        before = snapshot_of(json.loads(written.decode("utf-8", "surrogatepass")))
    except (ValueError, RecursionError) as error:  # a LayoutError too
        text = f"{str(path)!r} is not a file of layouts: {error}"
        raise LayoutError(text) from error
    changes = difference(before, snapshot_of(resolution.to_json()))
    if not changes.is_empty:
        raise AssertionError(
            f"the layouts are not those in {str(path)!r}:\n\n"
            f"{changes.report(width=_WIDTH)}\n\n{how}"
        )


def _encoded(resolution: "Resolution") -> bytes:
    # A key of a tree may be any str, also one that is not text.
    return golden_text(resolution.to_json()).encode("utf-8", "surrogatepass")
