"""flm.convert.from_shardings: rules that give each leaf the sharding that it has."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding

from flax_layoutmap._core.errors import RuleError, bullet_list
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import resolve
from flax_layoutmap._rules.records import ResolvedLeaf, show_shape
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap.convert._compress import compress

# Leaves that no rule is tried on: they are replicated.
NEVER_ASKED = ("scalar", "random state", "not an array")
# So many leaves are named in an error.
_LISTED = 10


def from_shardings(
    tree: Any, mesh: Any = None, *, tx: Any = None, batch: Any = None
) -> LayoutMap:
    r"""Make the rules that give each leaf of a tree the sharding that it has.

    The rules are few: leaves with equal layouts share patterns, whatever their layer.
    Optimizer state follows its parameters; what does not (ZeRO-1) gets rules in the
    section `optimizer`. Before the rules are returned they are resolved on the tree,
    and the layout of each leaf is compared with its sharding.

    Args:
        tree: arrays or sharded `jax.ShapeDtypeStruct`s, in any tree that `flm.resolve`
            takes: a module, a State, an optimizer, a TrainState, a dict. Or the path of
            a checkpoint, of which only the metadata is read.
        mesh: the mesh to put the rules on; None takes that of the leaves.
        tx: as for `flm.resolve`.
        batch: mesh axes for the first dim of a batch, as for `LayoutMap`.

    Raises:
        RuleError: leaves have no `NamedSharding`, or are on several meshes, or no rules
            can give them what they have (the leaves are listed); or the tree is
            optimizer state alone.
        CheckpointError: there is no such checkpoint.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap(flm.DeviceMesh("data=2,model=4"))
        >>> layout_map["kernel"] = (None, "model")
        >>> kernel = {"kernel": jax.ShapeDtypeStruct((8, 8), "float32")}
        >>> layers = {"up": [kernel] * 4, "gate": [kernel] * 4}
        >>> print(*flm.convert.from_shardings(layout_map.abstract(layers)))
        (gate|up)/\d+/kernel
    """
    if isinstance(tree, str | os.PathLike):
        made = _of_checkpoint(tree, batch)
    else:

        def resolved(rules: RuleSet) -> Resolution:
            return resolve(tree, rules, tx=tx)

        leaves = list(resolved(RuleSet(strict=False)))
        shardings = [getattr(leaf, "sharding", None) for leaf in flatten(tree).leaves]
        wanted, own_mesh = _layouts(leaves, shardings)
        made = rules_for(leaves, wanted, own_mesh, resolved, batch)
    return made if mesh is None else made.on(mesh)


def _of_checkpoint(path: str | os.PathLike[str], batch: Any) -> LayoutMap:
    """The rules for the specs that a checkpoint was saved with."""
    from flax_layoutmap import checkpoint

    infos = {leaf.path: leaf for leaf in checkpoint.inspect(path).leaves}
    meshes = {tuple(info.mesh.items()) for info in infos.values() if info.mesh}
    if len(meshes) != 1:
        sizes = " and ".join(str(dict(mesh)) for mesh in sorted(meshes))
        raise RuleError(
            f"the checkpoint {os.fspath(path)} was saved on several meshes, {sizes}"
            if meshes
            else f"the checkpoint {os.fspath(path)} does not say how its leaves were "
            "sharded: it was saved on one device, or without layout_map="
        )
    mesh = DeviceMesh.abstract(dict(*meshes))

    def resolved(rules: RuleSet) -> Resolution:
        return checkpoint.resolve(path, layout_map=rules)

    leaves = list(resolved(RuleSet(mesh=mesh, strict=False)))
    wanted = {
        leaf.path: TensorLayout(infos[leaf.path].spec or (), mesh) for leaf in leaves
    }
    return rules_for(leaves, wanted, mesh, resolved, batch)


def rules_for(
    leaves: Sequence[ResolvedLeaf],
    wanted: Mapping[str, TensorLayout],
    mesh: DeviceMesh,
    resolved: Callable[[RuleSet], Iterable[ResolvedLeaf]],
    batch: Any = None,
) -> LayoutMap:
    """Few rules by which each leaf gets the layout that is wanted for it.

    Args:
        leaves: the leaves, as they are resolved without rules.
        wanted: path → layout, one entry per dim; any other leaf may get any.
        mesh: the mesh of the rules.
        resolved: resolves the tree under given rules.
        batch: as for `LayoutMap`.

    Raises:
        RuleError: no rules give the leaves these layouts.
    """
    asked = {
        leaf.path: wanted[leaf.path]
        for leaf in leaves
        if leaf.role != "optimizer" and leaf.reason not in NEVER_ASKED
    }
    if not asked:
        raise RuleError(
            "the tree has no parameters, and rules are about these: convert optimizer "
            'state together with its model, {"model": model, "optimizer": optimizer}'
        )
    made = LayoutMap(mesh, batch=batch, strict=False)
    made.update(compress(asked))
    wrong = _different(resolved(made.freeze()), wanted)
    # Exact keys for paths whose patterns matched another form of some path.
    made.update({leaf.path: asked[leaf.path] for leaf in wrong if leaf.path in asked})
    owners = {leaf.owner for leaf in wrong if leaf.role == "optimizer"} - {None}
    if owners:
        # The layout of a parameter's state is that of the part with the most dims.
        by_owner: dict[str, tuple[TensorLayout, bool]] = {}
        for leaf in sorted(leaves, key=lambda leaf: len(leaf.shape)):
            if leaf.role == "optimizer" and leaf.owner and leaf.path in wanted:
                by_owner[leaf.owner] = wanted[leaf.path], leaf.owner in owners
        for pattern, (layout, is_needed) in compress(by_owner).items():
            if is_needed:
                made.optimizer[pattern] = layout
    wrong = _different(resolved(made.freeze()), wanted)
    if wrong:
        lines = [
            f"{leaf.path} {show_shape(leaf.shape)}: it has {wanted[leaf.path]}, rules "
            f"give {leaf.layout} ({leaf.reason})"
            for leaf in wrong
        ]
        raise RuleError(
            "These leaves cannot be expressed as rules (optimizer state of one "
            f"parameter can only have one layout per rank):\n{_listed(lines)}"
        )
    return LayoutMap.from_rule_set(made.freeze().with_changes(strict=None))


def _listed(lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    return bullet_list([*lines[:_LISTED], *more])


def _layouts(
    leaves: Sequence[ResolvedLeaf], shardings: Sequence[Any]
) -> tuple[dict[str, TensorLayout], DeviceMesh]:
    """Path → the layout of its sharding, one entry per dim; and the mesh of all."""
    layouts, missing = dict[str, TensorLayout](), list[str]()
    meshes: dict[DeviceMesh, str] = {}
    for leaf, sharding in zip(leaves, shardings, strict=True):
        if isinstance(sharding, NamedSharding):
            meshes.setdefault(DeviceMesh(sharding.mesh), leaf.path)
            layout = TensorLayout(sharding)
            dims, kind = layout.dims(len(leaf.shape)), layout.memory_kind
            layouts[leaf.path] = TensorLayout(
                dims if any(dims) else None, layout.device_mesh, memory_kind=kind
            )
        elif leaf.reason in NEVER_ASKED:
            layouts[leaf.path] = leaf.layout
        else:
            has = "no sharding" if sharding is None else f"a {type(sharding).__name__}"
            missing.append(f"{leaf.path} {show_shape(leaf.shape)} has {has}")
    if missing or not meshes:
        raise RuleError(
            "leaves without a NamedSharding; place them first, such as by "
            "layout_map.place(tree), or pass the tree that resolution.abstract() "
            f"returns:\n{_listed(missing)}"
        )
    if len(meshes) > 1:
        lines = [f"{path} is on {mesh!r}" for mesh, path in meshes.items()]
        raise RuleError(
            "the leaves are on several meshes; convert the trees of each mesh by "
            f"themselves:\n{_listed(lines)}"
        )
    return layouts, next(iter(meshes))


def _different(
    leaves: Iterable[ResolvedLeaf], wanted: Mapping[str, TensorLayout]
) -> list[ResolvedLeaf]:
    """The leaves that have another layout than the wanted one."""

    def parts(layout: TensorLayout, leaf: ResolvedLeaf) -> tuple[Any, ...]:
        return layout.memory_kind, layout.dims(len(leaf.shape))

    return [
        leaf
        for leaf in leaves
        if parts(wanted.get(leaf.path, leaf.layout), leaf) != parts(leaf.layout, leaf)
    ]
