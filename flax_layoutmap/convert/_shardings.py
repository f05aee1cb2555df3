"""Rules that give each leaf the layout of its sharding or its annotations."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from flax import linen
from jax.sharding import NamedSharding

from flax_layoutmap._core.errors import MeshError, RuleError, bullet_list, warn
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import resolve
from flax_layoutmap._rules.records import ResolvedLeaf, show_shape
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap.convert._compress import compress

# Reasons of leaves to which no rule applies: they are replicated.
NEVER_ASKED = ("scalar", "random state", "not an array")


def from_shardings(
    tree: Any, mesh: Any = None, *, tx: Any = None, batch: Any = None
) -> LayoutMap:
    r"""Make rules that give each leaf of a tree its current sharding.

    Leaves with equal layouts share patterns, across layers, so there are few rules.
    Optimizer state follows its parameters; state that does not (ZeRO-1) gets rules in
    the section `optimizer`. The rules are resolved on the tree, and every layout is
    compared with the sharding of the leaf, before they are returned.

    Args:
        tree: arrays or sharded `jax.ShapeDtypeStruct`s, in any tree that `flm.resolve`
            takes; or the path of a checkpoint, of which only the metadata is read.
        mesh: the mesh of the rules; None takes the mesh of the leaves.
        tx: as for `flm.resolve`.
        batch: as for `LayoutMap`.

    Raises:
        RuleError: rules cannot express the shardings; or leaves have no
            `NamedSharding`, or are on several meshes; or the tree has only optimizer
            state.
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
        wanted, own_mesh = _layouts(leaves, flatten(tree).leaves)
        made = rules_for(leaves, wanted, own_mesh, resolved, batch)
    return made if mesh is None else made.on(mesh)


def from_logical(
    rules: Iterable[tuple[str, Any]],
    model: Any,
    mesh: Any = None,
    *,
    batch: Any = None,
) -> LayoutMap:
    """Make rules over paths from the logical axis rules of a model.

    The annotations of the model are read as Flax reads them: for Linen, the first row
    of a name whose mesh axes are free; for NNX, the last row. Dims whose names have no
    rule are replicated, with a `LayoutWarning`; a rule `(name, None)` avoids it.

    Args:
        rules: pairs of a logical axis and a mesh axis, several, or None.
        model: a model whose parameters name their logical axes: boxed Linen variables,
            an NNX module, or a function that makes either.
        mesh: the mesh of the rules; None takes the mesh of `jax.set_mesh`.
        batch: as for `LayoutMap`.

    Raises:
        RuleError: a logical rule names an axis that the mesh does not have, or rules
            over paths cannot express these layouts.
        ResolveError: dims are not divisible by their axes.

    Example:
        >>> import flax_layoutmap as flm
        >>> from flax import nnx
        >>> init = nnx.with_metadata(
        ...     nnx.initializers.normal(), out_sharding=("embed", "mlp"))
        >>> def model():
        ...     return nnx.Linear(8, 16, kernel_init=init, rngs=nnx.Rngs(0))
        >>> rules = [("embed", None), ("mlp", "model")]
        >>> flm.convert.from_logical(rules, model, "data=2,model=4")["kernel"].axes
        (None, 'model')
    """
    context = jax.sharding.get_abstract_mesh()
    target = as_mesh(context if mesh is None and context.axis_names else mesh)
    if target is None:
        raise MeshError("from_logical(rules, model, mesh) needs a mesh")
    rules = tuple(rules)
    for number, entry in enumerate(rules, start=1):
        try:
            _, row = entry
            TensorLayout((row,), target)
        except (TypeError, ValueError) as error:
            raise RuleError(
                f"logical rule {number} is not a (name, axes of the mesh) pair, "
                f"{entry!r}: {error}"
            ) from error
    with linen.logical_axis_rules(rules):
        resolution = resolve(model, RuleSet(mesh=target, strict=False))
    leaves = list(resolution)
    if not any(leaf.reason == "flax metadata" for leaf in leaves):
        raise RuleError(
            "no parameter of the model names its logical axes: pass the model with its "
            "annotations (Linen's boxes, NNX's out_sharding)"
        )
    unknown = set[str]()
    for mark in resolution._flat.annotations.values():
        known = {name for name, _ in (*rules, *mark.rules)}
        if mark.kind != "linen":  # Flax reads other names as mesh axes
            known |= set(target.axis_names)
        unknown |= {name for dim in mark.names or () for name in dim} - known
    if unknown:
        warn(
            f"no logical rule has these names of axes: {sorted(unknown)}; their dims "
            f"are replicated; add a rule for each, such as ({min(unknown)!r}, None)"
        )
    wanted = {leaf.path: leaf.layout for leaf in leaves}
    return rules_for(leaves, wanted, target, lambda made: resolve(model, made), batch)


def rules_for(
    leaves: Sequence[ResolvedLeaf],
    wanted: Mapping[str, TensorLayout],
    mesh: DeviceMesh | None,
    resolved: Callable[[RuleSet], Iterable[ResolvedLeaf]],
    batch: Any = None,
) -> LayoutMap:
    """Make a few rules that give each leaf its layout in `wanted`.

    `leaves` are the leaves as resolved without rules, and `resolved` resolves them with
    the given rules. A leaf that is not in `wanted` may get any layout.
    """
    asked = {
        leaf.path: wanted[leaf.path]
        for leaf in leaves
        if leaf.role != "optimizer" and leaf.reason not in NEVER_ASKED
    }
    if not leaves:
        raise RuleError("the tree is empty: there is nothing to make rules for")
    if not asked:
        raise RuleError(
            "the tree has no parameters, and rules are about these: convert optimizer "
            'state together with its model, {"model": model, "optimizer": optimizer}'
        )
    made = LayoutMap(mesh, batch=batch, strict=False)
    made.update(compress(asked))

    def different() -> list[ResolvedLeaf]:
        return [
            leaf
            for leaf in resolved(made.freeze())
            if leaf.path in wanted
            and not leaf.layout.equivalent(wanted[leaf.path], len(leaf.shape))
        ]

    wrong = different()
    # Use exact keys where a pattern matched another form of some path.
    made.update({leaf.path: asked[leaf.path] for leaf in wrong if leaf.path in asked})
    owners = {leaf.owner for leaf in wrong if leaf.role == "optimizer"} - {None}
    if owners:
        # A parameter's state has the layout of its leaf with the most dims.
        by_owner = {
            leaf.owner: (wanted[leaf.path], leaf.owner in owners)
            for leaf in sorted(leaves, key=lambda leaf: len(leaf.shape))
            if leaf.role == "optimizer" and leaf.owner and leaf.path in wanted
        }
        for pattern, (layout, is_needed) in compress(by_owner).items():
            if is_needed:
                made.optimizer[pattern] = layout
    wrong = different()
    if wrong:
        lines = [
            f"{leaf.path} {show_shape(leaf.shape)}: it has {wanted[leaf.path]}, rules "
            f"give {leaf.layout} ({leaf.reason})"
            for leaf in wrong[:10]
        ]
        raise RuleError(
            f"{len(wrong)} leaves cannot be expressed as rules (optimizer state of one "
            f"parameter can only have one layout per rank):\n{bullet_list(lines)}"
        )
    return LayoutMap.from_rule_set(made.freeze().with_changes(strict=None))


def _of_checkpoint(path: str | os.PathLike[str], batch: Any) -> LayoutMap:
    """Make rules for the specs that a checkpoint was saved with."""
    from flax_layoutmap import checkpoint

    info = checkpoint.inspect(path)
    specs, mesh = {leaf.path: leaf.spec for leaf in info.leaves}, info.mesh
    if mesh is None:
        raise RuleError(
            f"the checkpoint {os.fspath(path)} does not say how its leaves were "
            "sharded on one mesh: it was saved on one device, on several meshes, or "
            "without layout_map="
        )

    def resolved(rules: RuleSet) -> Resolution:
        return checkpoint.resolve(path, layout_map=rules)

    leaves = list(resolved(RuleSet(mesh=mesh, strict=False)))
    wanted = {leaf.path: TensorLayout(specs[leaf.path] or (), mesh) for leaf in leaves}
    return rules_for(leaves, wanted, mesh, resolved, batch)


def _layouts(
    leaves: Sequence[ResolvedLeaf], arrays: Sequence[Any]
) -> tuple[dict[str, TensorLayout], DeviceMesh | None]:
    """Path → the layout of its sharding, with an entry per dim; and their mesh."""
    layouts, missing = dict[str, TensorLayout](), list[str]()
    meshes: dict[DeviceMesh, str] = {}
    for leaf, array in zip(leaves, arrays, strict=True):
        sharding = getattr(array, "sharding", None)
        if isinstance(sharding, NamedSharding):
            mesh, layout = DeviceMesh(sharding.mesh), TensorLayout(sharding)
            meshes.setdefault(mesh, leaf.path)
            dims = layout.dims(len(leaf.shape))
            layouts[leaf.path] = TensorLayout(
                dims if any(dims) else None, mesh, memory_kind=layout.memory_kind
            )
        elif leaf.reason not in NEVER_ASKED:
            has = "no sharding" if sharding is None else f"a {type(sharding).__name__}"
            missing.append(f"{leaf.path} {show_shape(leaf.shape)} has {has}")
    if missing:
        raise RuleError(
            f"{len(missing)} leaves without a NamedSharding; place them first, for "
            "example by layout_map.place(tree), or pass the tree that "
            f"resolution.abstract() returns:\n{bullet_list(missing[:10])}"
        )
    if len(meshes) > 1:
        lines = [f"{path} is on {mesh!r}" for mesh, path in meshes.items()]
        raise RuleError(
            f"leaves are on several meshes; convert each tree:\n{bullet_list(lines)}"
        )
    return layouts, next(iter(meshes), None)
