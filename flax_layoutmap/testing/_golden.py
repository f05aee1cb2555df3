"""Write layouts to golden files, and compare with them."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._core.whole_file import write_whole
from flax_layoutmap._show.diff import difference
from flax_layoutmap._show.snapshot import Snapshot, golden_text, snapshot_of

if TYPE_CHECKING:
    from flax_layoutmap._resolve.resolution import Resolution

# Of the text of a failure, which is read in logs too.
_WIDTH = 100


def dump(resolution: "Resolution", path: str | os.PathLike[str]) -> None:
    """Write a Resolution to a golden file, kept beside the code for review.

    The file is JSON: the mesh and the rules, totals, and then one line per leaf, sorted
    by path. Nothing in it depends on the machine, the time or the order of the tree.
    Folders that are missing are made. In a job of several processes, each that calls it
    writes; they may share a path.

    Args:
        resolution: what to write; an abstract mesh is enough.
        path: the file.

    Example:
        >>> import tempfile, pathlib, jax
        >>> import flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("data=2,model=4"))
        >>> layout_map["kernel"] = (None, "model")
        >>> tree = {"kernel": jax.ShapeDtypeStruct((8, 8), "float32")}
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "layouts.json"
        >>> flm.testing.dump(layout_map.resolve(tree), path)
        >>> flm.testing.compare(layout_map.resolve(tree), path)
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, _encoded(golden_text(resolution.to_json())))


def compare(resolution: "Resolution", path: str | os.PathLike[str]) -> None:
    """Raise if a Resolution differs from the file that `dump` wrote.

    Compared are the mesh, the rules, and of each leaf shape, dtype, layout, the rule or
    reason that decided, and fallbacks.

    Args:
        resolution: what there is now.
        path: the file.

    Raises:
        AssertionError: something differs, or there is no such file: the text has what
            moved, what that costs, and how to accept it.
        LayoutError: the file is none of `dump`'s.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("data=2,model=4"))
        >>> layout_map["kernel"] = (None, "model")
        >>> tree = {"kernel": jax.ShapeDtypeStruct((8, 16), "float32")}
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/layouts.json"
        >>> flm.testing.dump(layout_map.resolve(tree), path)
        >>> flm.testing.compare(layout_map.resolve(tree), path)
    """
    path = Path(path)
    how = (
        "to accept this, run pytest with --update-layouts (fixture layout_golden), or "
        f"call flm.testing.dump(resolution, {str(path)!r})"
    )
    try:
        written = path.read_bytes()
    except FileNotFoundError:
        raise AssertionError(
            f"there is no file of layouts {str(path)!r}; {how}"
        ) from None
    except OSError as error:
        raise LayoutError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    now = resolution.to_json()
    if written == _encoded(golden_text(now)):
        return
    found = difference(_read(written, path), snapshot_of(now))
    if not found.is_empty:
        raise AssertionError(
            f"the layouts are not those in {str(path)!r}:\n\n"
            f"{found.report(width=_WIDTH)}\n\n{how}"
        )


def _encoded(text: str) -> bytes:
    # A key of a tree may be any str, also one that is no text.
    return text.encode("utf-8", "surrogatepass")


def _read(written: bytes, path: Path) -> Snapshot:
    try:
        return snapshot_of(json.loads(written.decode("utf-8", "surrogatepass")))
    except (ValueError, RecursionError) as error:  # a LayoutError too
        raise LayoutError(f"{str(path)!r} is no file of layouts: {error}") from error
