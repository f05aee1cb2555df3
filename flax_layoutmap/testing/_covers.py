"""`assert_covers`: assert that rules fit a model on every mesh."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from flax_layoutmap._core.errors import LayoutError, ResolveError, bullet_list
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh
from flax_layoutmap._lint.leaves import suggested
from flax_layoutmap._lint.lint import Ignored, lint
from flax_layoutmap._lint.matches import NUMBER, groups
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import abstract_tree, resolve, rule_set_of
from flax_layoutmap._rules.rules import RuleSet

# Codes of lint that name the sizes that would fit, for leaves of a ResolveError.
_HINTS = ("LM103", "LM104", "LM108")


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
        MeshError: one of `meshes` is none, or there are none.

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
    tree = abstract_tree(model)
    wrong: dict[str, list[str]] = {}
    for mesh in map(_abstract, given):
        found = list(_wrong_on(mesh, tree, rules, max_replicated, ignored))
        for text in found:
            wrong.setdefault(text, []).append(str(mesh))
    if wrong:
        raise AssertionError(_listed(wrong, len(given)))


def _abstract(mesh: Any) -> DeviceMesh:
    if isinstance(mesh, str | dict):
        return DeviceMesh.abstract(mesh)
    made = as_mesh(mesh)
    if made is None:
        raise LayoutError("assert_covers: None is no mesh")
    return made


def _wrong_on(
    mesh: DeviceMesh, tree: Any, rules: RuleSet, most: float, ignore: list[str]
) -> Iterator[str]:
    try:
        rules = rules.on(mesh)
        resolution = resolve(tree, rules)
    except ResolveError as error:
        yield from _alike(error.problems or [str(error)])
        yield from _sizes_that_fit(tree, rules)
        return
    except LayoutError as error:
        yield str(error)
        return
    found = lint(resolution, max_replicated=most, ignore=ignore)
    yield from found.problems("warning")
    told = {issue.path for issue in found if issue.code == "LM102"}
    yield from _left_to_chance(resolution, told, Ignored(ignore))


def _alike(problems: Iterable[str]) -> Iterator[str]:
    """Problems that differ in the numbers of a path only, once."""
    counts: dict[tuple[str, str], list[str]] = {}
    for text in problems:
        path, gap, rest = text.partition(" (")
        counts.setdefault((NUMBER.sub("0", path), gap + rest), []).append(text)
    for texts in counts.values():
        more = f"; and {len(texts) - 1} more alike" if len(texts) > 1 else ""
        yield texts[0] + more


def _sizes_that_fit(tree: Any, rules: RuleSet) -> Iterator[str]:
    """What the leaves that do not divide would need."""
    if rules.indivisible == "replicate":
        return
    try:
        kinder = resolve(tree, dataclasses.replace(rules, indivisible="replicate"))
    except ResolveError:
        return  # there is more that is wrong
    for issue in lint(kinder):
        if issue.code in _HINTS:
            yield f"{issue.path}: {issue.fix}  ({issue.code})"


def _left_to_chance(
    resolution: Resolution, told: set[str | None], ignored: Ignored
) -> Iterator[str]:
    """Matrices that no rule matches, however small, except those reported already."""
    if not resolution.rules.rules or "LM102" in ignored.codes:
        return
    for group in groups(resolution, lambda row: row.reason == "no rule", "parameter"):
        if len(group.shape) < 2 or group.path in told:
            continue
        if not ignored.is_about(resolution, group.path):
            fix = suggested(resolution, group.path, group.shape)
            yield f"{group}: matched by no rule\n    fix: {fix}"


def _listed(wrong: dict[str, list[str]], meshes: int) -> str:
    """Everything wrong, each once, with the meshes where it is."""
    by_meshes: dict[tuple[str, ...], list[str]] = {}
    for text, where in wrong.items():
        by_meshes.setdefault(tuple(dict.fromkeys(where)), []).append(text)
    parts = []
    for where, texts in by_meshes.items():
        every = len(where) == meshes and meshes > 1
        head = f"on every mesh ({', '.join(where)})" if every else "on mesh "
        parts.append(f"{head if every else head + ', '.join(where)}:")
        parts.append(bullet_list(texts))
    return "the layout does not cover the model\n" + "\n".join(parts)
