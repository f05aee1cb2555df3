"""Test helpers: rules cover a model; golden files (fixture `layout_golden`)."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from flax_layoutmap._core.errors import LayoutError, bullet_list
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh
from flax_layoutmap._lint.lint import Ignored, lint
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import abstract_tree, resolve, rule_set_of
from flax_layoutmap._rules.files import write_whole
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._show.diff import difference, golden_text, snapshot_of
from flax_layoutmap._show.table import fold

__all__ = ("assert_covers", "assert_golden", "write_golden")


def assert_covers(
    model: Any,
    layout_map: Any,
    meshes: Iterable[Any],
    *,
    max_replicated: float = 0.02,
    ignore: str | Iterable[str] = (),
) -> None:
    """Assert that rules fit a model on every mesh, and cover every matrix.

    On each mesh, all leaves must fit, `flm.lint` must find no errors or warnings, and
    each parameter with two or more dims must be annotated or matched by a rule (a rule
    None replicates it on purpose). No devices are needed.

    Args:
        model: anything that `flm.resolve` takes, such as a function that makes a
            module.
        layout_map: a `LayoutMap` or a `RuleSet`.
        meshes: meshes, or arguments of `DeviceMesh.abstract` (`"data=16,model=16"`).
        max_replicated: share (0 to 1) of the bytes that every device may hold in full.
        ignore: codes and path patterns, as for `flm.lint`.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap.from_rules({"up/kernel": (None, "model")})
        >>> tree = {"up": {"kernel": jax.ShapeDtypeStruct((64, 256), "float32")}}
        >>> flm.testing.assert_covers(tree, layout_map, ["model=2", "data=4,model=8"])
    """
    rules = rule_set_of(layout_map, "assert_covers(model, layout_map, meshes)")
    given = [meshes] if isinstance(meshes, str | dict) else meshes
    grids = [
        DeviceMesh.abstract(mesh) if isinstance(mesh, str | dict) else as_mesh(mesh)
        for mesh in given
    ]
    if not grids or None in grids:
        raise LayoutError('assert_covers needs meshes, such as ["data=16,model=16"]')
    ignored = [ignore] if isinstance(ignore, str) else list(ignore)
    tree, wrong = abstract_tree(model), ""
    for mesh in grids:
        problems = list(_problems(tree, rules, mesh, max_replicated, ignored))
        if problems:
            wrong += f"\non mesh {mesh}:\n{bullet_list(problems)}"
    if wrong:
        raise AssertionError(f"the layout does not cover the model{wrong}")


def _problems(
    tree: Any, rules: RuleSet, mesh: Any, most: float, ignore: list[str]
) -> Iterator[str]:
    try:
        resolution = resolve(tree, rules.on(mesh))
    except LayoutError as error:
        partial = getattr(error, "resolution", None)
        if partial is None:
            yield str(error)
        else:  # without the leaves that do not fit, the replicated share misleads
            yield from lint(partial, ignore=ignore).problems("warning")
        return
    issues = lint(resolution, max_replicated=most, ignore=ignore)
    yield from issues.problems("warning")
    large = {issue.path for issue in issues if issue.code == "LM102"}
    ignored = Ignored(ignore)
    matrices = [
        leaf.path
        for leaf in resolution
        if leaf.reason == "no rule" and leaf.role == "parameter" and len(leaf.shape) > 1
        if "LM102" not in ignored.codes and not ignored.is_about(resolution, leaf.path)
    ]
    shapes = [show_shape(resolution[path].shape) for path in matrices]
    for row in fold(matrices, shapes):
        first = row.members[0]
        if matrices[first] not in large:
            yield f"{row.text} {shapes[first]}: matched by no rule (None: replicated)"


def write_golden(resolution: Resolution, path: str | os.PathLike[str]) -> None:
    """Write a Resolution to a golden file, to be committed and reviewed.

    The file is JSON: the mesh, the rules, totals, and a line per leaf, sorted by path.
    It is the same on every machine.

    Example:
        >>> import tempfile, flax_layoutmap as flm
        >>> resolution = flm.LayoutMap("data=-1").resolve({"step": 3})
        >>> flm.testing.write_golden(resolution, tempfile.mkdtemp() + "/layouts.json")
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, _encoded(resolution))


def assert_golden(resolution: Resolution, path: str | os.PathLike[str]) -> None:
    """Assert that a Resolution equals the file that `write_golden` wrote.

    The AssertionError shows the changes, their cost, and how to accept them.

    Example:
        >>> import tempfile, flax_layoutmap as flm
        >>> resolution = flm.LayoutMap("data=-1").resolve({"step": 3})
        >>> path = tempfile.mkdtemp() + "/layouts.json"
        >>> flm.testing.write_golden(resolution, path)
        >>> flm.testing.assert_golden(resolution, path)
    """
    path = Path(path)
    how = (
        "to accept this, run pytest with --update-layouts (fixture layout_golden), or "
        f"call flm.testing.write_golden(resolution, {str(path)!r})"
    )
    if not path.exists():
        raise AssertionError(f"there is no file of layouts {str(path)!r}; {how}")
    now = _encoded(resolution)
    try:
        written = path.read_bytes()
        if written == now:
            return
        before = snapshot_of(json.loads(written.decode("utf-8", "surrogatepass")))
    except (OSError, ValueError, RecursionError) as error:  # a LayoutError too
        text = f"{str(path)!r} cannot be read as a file of layouts: {error}"
        raise LayoutError(text) from error
    changes = difference(before, snapshot_of(resolution.to_json()))
    if not changes.is_empty:
        raise AssertionError(
            f"the layouts differ from {str(path)!r}:\n\n"
            f"{changes.report(width=100)}\n\n{how}"
        )


def _encoded(resolution: Resolution) -> bytes:
    # A key of a tree may be any str, even invalid Unicode.
    return golden_text(resolution.to_json()).encode("utf-8", "surrogatepass")
