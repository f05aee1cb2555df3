"""`assert_covers`: assert that rules fit a model on every mesh."""

from collections.abc import Iterable, Iterator
from typing import Any

from flax_layoutmap._core.errors import LayoutError, ResolveError, bullet_list
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh
from flax_layoutmap._lint.lint import Ignored, lint
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import abstract_tree, resolve, rule_set_of
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.paths import fold


def assert_covers(
    model: Any,
    layout_map: Any,
    meshes: Iterable[Any],
    *,
    max_replicated: float = 0.02,
    ignore: str | Iterable[str] = (),
) -> None:
    """Assert that rules fit a model on every mesh, and cover every matrix.

    On each mesh: all leaves fit; `flm.lint` finds no error and no warning, so that each
    rule matches something; each parameter of two dims or more is matched by a rule (a
    rule None says: replicated, on purpose) or annotated; and no more than
    `max_replicated` of the bytes are held in full by every device. No device is needed.

    Args:
        model: a module, a function that makes one (it is only traced), or any tree
            that `flm.resolve` takes.
        layout_map: a `LayoutMap` or a `RuleSet`.
        meshes: what `DeviceMesh.abstract` takes (`"data=16,model=16"`), or meshes.
        max_replicated: share (0 to 1) of the bytes.
        ignore: as for `flm.lint`: codes, and patterns of paths.

    Raises:
        AssertionError: something is wrong; the message lists all of it, by mesh.
        LayoutError: an entry of `meshes` is not a mesh, or the list is empty.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap()
        >>> layout_map["up/kernel"] = (None, "model")
        >>> tree = {"up": {"kernel": jax.ShapeDtypeStruct((64, 256), "float32")}}
        >>> meshes = ["data=4,model=2", "data=16,model=16"]
        >>> flm.testing.assert_covers(tree, layout_map, meshes)
    """
    rules = rule_set_of(layout_map, "assert_covers(model, layout_map, meshes)")
    given = [meshes] if isinstance(meshes, str | dict) else list(meshes)
    if not given:
        raise LayoutError('assert_covers needs meshes, such as ["data=16,model=16"]')
    ignored = [ignore] if isinstance(ignore, str) else list(ignore)
    tree, wrong = abstract_tree(model), list[str]()
    for mesh in map(_mesh, given):
        problems = list(_problems_on(mesh, tree, rules, max_replicated, ignored))
        if problems:
            wrong.append(f"on mesh {mesh}:\n{bullet_list(problems)}")
    if wrong:
        text = "\n".join(wrong)
        raise AssertionError(f"the layout does not cover the model\n{text}")


def _mesh(given: Any) -> DeviceMesh:
    if isinstance(given, str | dict):
        return DeviceMesh.abstract(given)
    mesh = as_mesh(given)
    if mesh is None:
        raise LayoutError("assert_covers got None in meshes")
    return mesh


def _problems_on(
    mesh: DeviceMesh, tree: Any, rules: RuleSet, most: float, ignore: list[str]
) -> Iterator[str]:
    try:
        resolution = resolve(tree, rules.on(mesh))
    except ResolveError as error:
        if error.resolution is None:
            yield str(error)
        else:  # the share that is replicated of the leaves that fit says little
            yield from lint(error.resolution, ignore=ignore).problems("warning")
        return
    except LayoutError as error:
        yield str(error)
        return
    issues = lint(resolution, max_replicated=most, ignore=ignore)
    yield from issues.problems("warning")
    if "LM102" not in ignore:
        ignored = Ignored(ignore)
        large = {issue.path for issue in issues if issue.code == "LM102"}
        yield from _unmatched(resolution, large, ignored)


def _unmatched(
    resolution: Resolution, large: set[str | None], ignored: Ignored
) -> Iterator[str]:
    """The matrices that no rule matches, besides the large ones."""
    leaves = [
        leaf
        for leaf in resolution
        if leaf.reason == "no rule" and leaf.role == "parameter" and len(leaf.shape) > 1
        if not ignored.is_about(resolution, leaf.path)
    ]
    for row in fold([leaf.path for leaf in leaves], [leaf.shape for leaf in leaves]):
        leaf = leaves[row.members[0]]
        if leaf.path not in large:
            yield (
                f"{row.text} {show_shape(leaf.shape)}: matched by no rule\n"
                f"    fix: layout_map[{leaf.path!r}] = …  # None: replicated"
            )
