"""resolve(tree, rules) → Resolution: the one place where rules meet leaves."""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding

from flax_layoutmap._core.errors import (
    ResolveError,
    RuleError,
    StructureError,
    bullet_list,
)
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import same_grid
from flax_layoutmap._resolve.decide import Decider, OwnerLayout
from flax_layoutmap._resolve.metadata import mark_of
from flax_layoutmap._resolve.optimizer_state import Origin, origins, tagged_dims
from flax_layoutmap._resolve.ownership import find_origins
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.roles import (
    ask_without_lora,
    find_adapters,
    follow_kernels,
)
from flax_layoutmap._rules.records import Shape, show_shape
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.flatten import flatten, plain_tree
from flax_layoutmap._tree.flax_internals import (
    is_nnx_object,
    nnx_state,
)
from flax_layoutmap._tree.fold import fold
from flax_layoutmap._tree.paths import (
    Block,
    Flat,
    Section,
    is_train_state,
    parameter_keys,
)
from flax_layoutmap._tree.structure import structure_of
from flax_layoutmap._tree.trace import trace

_CACHED_TREES = 4


# Layouts of parameters that are not in the tree, under a rule set.
_OwnersUnder = Callable[[RuleSet], Mapping[str, OwnerLayout]]


def resolve(
    tree: Any,
    rules: Any,
    *,
    params: Any = None,
    tx: Any = None,
    strict: bool | None = None,
) -> Resolution:
    """Decides the layout of every leaf of a tree. No device is touched.

    Args:
        tree: a module, a function that makes one (it is only traced), an `nnx.State`,
            Linen variables, an optax state, a TrainState, a tree of arrays or
            `jax.ShapeDtypeStruct`s, or any tree of these.
        rules: a `LayoutMap` or a `RuleSet`.
        params: where `tree` is optimizer state alone: its parameters.
        tx: where the tree does not hold it: the optax transformation that made the
            optimizer state; needed for states with factored moments.
        strict: True makes unused rules and large unmatched leaves an error.

    Returns:
        The Resolution: read it with `.report()`, `.explain(path)`, `.shardings`.

    Raises:
        ResolveError: leaves do not fit the rules; one error lists all of them.
        StructureError: the tree cannot be given unique paths.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("data=2,model=4"))
        >>> layout_map["up/kernel"] = (None, "model")
        >>> tree = {"up": {"kernel": jax.ShapeDtypeStruct((8, 16), "float32")}}
        >>> flm.resolve(tree, layout_map)["up/kernel"].shard_shape
        (8, 4)
    """
    rule_set = rule_set_of(rules, "resolve(tree, rules)")
    tree, params = abstract_tree(tree), abstract_tree(params)
    if strict is not None and strict != rule_set.strict:
        rule_set = rule_set.with_changes(strict=strict)
    if params is None and tx is None:
        resolution = _resolve_cached(tree, rule_set)
    else:
        resolution = _resolve(tree, rule_set, params, tx)
    if strict:
        resolution.announce()
    return resolution


def resolve_with_origins(
    tree: Any, rule_set: RuleSet, known: Mapping[str, Origin]
) -> Resolution:
    """Resolves a tree whose optimizer leaves have known origins (a checkpoint's)."""
    flat = flatten(tree, rule_set.matcher.fold_part)
    shapes, dtypes, others = _columns(flat.leaves)
    at_each = [known.get(path) for path in flat.full_paths()]
    treedef = jax.tree.structure(plain_tree(tree))
    return decide_all(flat, rule_set, shapes, dtypes, treedef, at_each, others=others)


def resolve_state(
    tree: Any,
    rule_set: RuleSet,
    owners: Mapping[str, "OwnerLayout"],
    tx: Any,
    params: Any,
) -> Resolution:
    """Resolves optimizer state whose parameters already have layouts of their own."""
    flat = _one_section(flatten(tree))
    shapes, dtypes, others = _columns(flat.leaves)
    treedef = jax.tree.structure(plain_tree(tree))
    tags = tagged_dims(tx.init, params)
    found = origins(flat.paths, shapes, {p: o.shape for p, o in owners.items()}, tags)

    def owners_on(rules: RuleSet) -> Mapping[str, OwnerLayout]:
        if rules.mesh == rule_set.mesh:
            return owners
        return {
            path: dataclasses.replace(owner, mesh=rules.mesh)
            for path, owner in owners.items()
        }

    return decide_all(flat, rule_set, shapes, dtypes, treedef, found, owners_on, others)


def rule_set_of(rules: Any, what: str) -> RuleSet:
    """The frozen rules of a `LayoutMap`; a `RuleSet` as it is.

    Args:
        rules: one of these.
        what: the call, for the message.

    Raises:
        RuleError: it is none of these.
    """
    if isinstance(rules, RuleSet):
        return rules
    # Asked of the type: an nnx.Rngs has a stream for any attribute.
    if isinstance(rules, type) or not hasattr(type(rules), "freeze"):
        shown = repr(rules)
        if len(shown) > 200:
            shown = f"a {type(rules).__name__}"
        raise RuleError(
            f"{what} needs a LayoutMap or a RuleSet, got {shown}; make one of a list "
            "of pairs with flm.LayoutMap.from_rules(pairs, mesh)"
        )
    return rules.freeze()


def abstract_tree(tree: Any) -> Any:
    """The tree, or the abstract result of the function that makes it."""
    if not callable(tree) or is_nnx_object(tree) or is_train_state(tree):
        return tree
    if isinstance(tree, nnx.Variable):  # which passes calls on to its value
        return tree
    if hasattr(tree, "init") and hasattr(tree, "apply"):
        raise StructureError(
            f"a Linen module ({type(tree).__name__}) holds no variables; pass a "
            "function that makes them, lambda: module.init(key, x), or the variables"
        )
    return trace(tree).abstract


# ------------------------------------------------------------------ resolving


def _resolve_cached(tree: Any, rule_set: RuleSet) -> Resolution:
    """Looks the tree up by structure, shapes and dtypes before anything is matched."""
    if is_nnx_object(tree):
        if hasattr(tree, "opt_state"):
            return _resolve(tree, rule_set, None, None)
        tree = nnx_state(tree)  # what its Resolution is a tree of
    for known, resolution in rule_set._resolved:
        if known.fits(tree):
            return resolution
    flat = flatten(tree, rule_set.matcher.fold_part)
    resolution = _resolve(tree, rule_set, None, None, flat)
    if flat.has_objects or flat.annotations or _depends_on_live(resolution, flat):
        # Annotations depend on Flax's logical rules in context, and state of an unknown
        # kind on the layouts that the arrays have: no structure tells these.
        return resolution
    structure = flat.structure or structure_of(tree)
    if structure is not None:
        rule_set._resolved.insert(0, (structure, resolution))
        del rule_set._resolved[_CACHED_TREES:]
    return resolution


_SHAPE, _DTYPE = operator.attrgetter("shape"), operator.attrgetter("dtype")


def _resolve(
    tree: Any,
    rule_set: RuleSet,
    params: Any,
    tx: Any,
    flat: Flat | None = None,
) -> Resolution:
    flat = flatten(tree, rule_set.matcher.fold_part) if flat is None else flat
    treedef = flat.treedef
    if treedef is None:
        treedef = jax.tree.structure(plain_tree(tree) if flat.has_objects else tree)
    shapes, dtypes, others = _columns(flat.leaves)
    if params is None:
        found = find_origins(tree, flat, shapes, dtypes, tx)
        return decide_all(flat, rule_set, shapes, dtypes, treedef, found, others=others)
    flat = _one_section(flat)
    own = _resolve(params, rule_set, None, None)
    count, both = len(own), _beside(own._flat, flat)
    columns = [*own.shapes, *shapes], [*own.dtypes, *dtypes]
    found = find_origins(params, both, *columns, tx, _given(params))
    found = None if found is None else found[count:]

    def owners_under(rules: RuleSet) -> Mapping[str, OwnerLayout]:
        return _owner_layouts(own if rules is rule_set else own._again(rules))

    return decide_all(
        flat, rule_set, shapes, dtypes, treedef, found, owners_under, others
    )


def _one_section(flat: Flat) -> Flat:
    """The whole tree as one optimizer state."""
    section = Section(0, len(flat.paths), "", "optimizer")
    return dataclasses.replace(flat, sections=[section], paths=flat.full_paths())


def _given(params: Any) -> list[Any]:
    """What `tx.init` may have been given, of what the user calls the parameters."""
    if is_nnx_object(params):
        return [nnx_state(params, nnx.Param)]
    if isinstance(params, Mapping) and not isinstance(params, nnx.State):
        return [params["params"], params] if "params" in params else [params]
    return [params]


def _beside(params: Flat, state: Flat) -> Flat:
    """The paths of parameters and of their optimizer state, as of one tree."""
    count = len(params.paths)
    moved = [
        dataclasses.replace(part, start=part.start + count, stop=part.stop + count)
        for part in state.sections
    ]
    return Flat(
        paths=params.paths + state.paths,
        sections=[*params.sections, *moved],
        fixed=params.fixed,
    )


def _columns(leaves: Sequence[Any]) -> tuple[list[Shape], list[Any], dict[int, Any]]:
    """Shape and dtype of each leaf, and the leaves that are no arrays."""
    try:
        columns = list(map(_SHAPE, leaves)), list(map(_DTYPE, leaves)), {}
        if set(map(type, columns[0])) <= {tuple}:
            return columns
    except AttributeError:
        pass  # one of them is no array
    shapes: list[Shape] = []
    dtypes: list[Any] = []
    others: dict[int, Any] = {}
    for leaf in leaves:
        shape = getattr(leaf, "shape", None)
        if isinstance(shape, tuple) and hasattr(leaf, "dtype"):
            shapes.append(shape)
            dtypes.append(leaf.dtype)
        else:
            dtype = _python_dtype(leaf)
            if dtype is None:
                others[len(shapes)] = leaf
            shapes.append(())
            dtypes.append(dtype)
    return shapes, dtypes, others


def _python_dtype(leaf: Any) -> Any:
    if isinstance(leaf, bool | int | float | complex):
        return jax.dtypes.result_type(leaf)
    return None


def _owner_layouts(resolution: Resolution) -> dict[str, OwnerLayout]:
    flat, rows, shapes = resolution._flat, resolution._rows, resolution.shapes
    return {
        key: OwnerLayout(
            shapes[at],
            rows[at].dims,
            rows[at].mesh,
            rows[at].memory_kind,
            flat.forms(at),
            key,
        )
        for at, key in parameter_keys(flat).items()
    }


def decide_all(
    flat: Flat,
    rule_set: RuleSet,
    shapes: Sequence[Shape],
    dtypes: Sequence[Any],
    treedef: Any,
    found: Sequence[Origin | None] | None = None,
    owners: _OwnersUnder | None = None,
    others: Mapping[int, Any] | None = None,
) -> Resolution:
    """Decides every leaf; keeps what is needed to do so again, but no arrays.

    Args:
        flat: the tree, flattened.
        rule_set: the rules.
        shapes: shape of each leaf.
        dtypes: dtype of each leaf; None for what is no array.
        treedef: the structure of the tree.
        found: origin of each leaf of optimizer state.
        owners: layouts of the parameters under a rule set, where they are not in the
            tree.
        others: position → leaf, for what is no array.
    """
    live = {} if found is None else _live_layouts(flat, found)
    blocks = flat.blocks
    if len(flat.paths) and not blocks:  # not made by `flatten`
        names = list(map(rule_set.matcher.fold_path, flat.paths))
        blocks = [
            Block(part.start, "", tuple(names[part.start : part.stop]))
            for part in flat.sections
        ]
    flat = dataclasses.replace(
        flat,
        blocks=blocks,
        leaves=[],
        annotations={at: mark_of(box) for at, box in flat.annotations.items()},
        sections=[dataclasses.replace(part, node=None) for part in flat.sections],
    )

    adapters = find_adapters(flat, shapes)

    def under(rules: RuleSet) -> Resolution:
        here = {
            at: layout.on(None)
            for at, layout in live.items()
            if rules.mesh and layout.device_mesh
            if same_grid(rules.mesh, layout.device_mesh)
        }
        decider = Decider(rules, rules.matcher, flat, shapes, here)
        rows = decider.by_rules(skip=found)
        ask_without_lora(decider, rows, adapters.plain)
        decider.annotate(rows)  # state follows what its parameter has in the end
        follow_kernels(decider, rows, dtypes, adapters)
        if found is not None:
            known = None if owners is None else owners(rules)
            decider.by_origins(rows, found, known, adapters.plain)
            decider.annotate(rows)
        decider.override(rows, dtypes)
        resolution = Resolution(
            rules, flat, shapes, dtypes, rows, treedef, under, others or {}
        )
        if decider.troubled:
            _raise_problems(resolution)
        return resolution

    return under(rule_set)


def _depends_on_live(resolution: Resolution, flat: Flat) -> bool:
    """Whether layouts that arrays have already did, or could, decide anything."""
    states = [section for section in flat.sections if section.role == "optimizer"]
    return any(
        row.reason in ("unknown optimizer state", "own layout")
        for section in states
        for row in resolution._rows[section.start : section.stop]
    ) or any(
        isinstance(getattr(leaf, "sharding", None), NamedSharding)
        for section in states
        for leaf in flat.leaves[section.start : section.stop]
    )


def _live_layouts(
    flat: Flat, found: Sequence[Origin | None]
) -> dict[int, TensorLayout]:
    """The layouts that arrays of optimizer state have already, by position."""
    return {
        at: TensorLayout(leaf.sharding)
        for at, (leaf, origin) in enumerate(zip(flat.leaves, found, strict=False))
        if origin is not None
        and isinstance(getattr(leaf, "sharding", None), NamedSharding)
    }


def _raise_problems(resolution: Resolution) -> None:
    found = {
        path or "the leaf": f"{show_shape(shape)}: {row.problem}"
        for path, shape, row in zip(
            resolution.paths, resolution.shapes, resolution._rows, strict=True
        )
        if row.problem
    }
    if found:
        count = f"{len(found)} leaves do" if len(found) > 1 else "1 leaf does"
        mesh = "" if resolution.mesh is None else f" on mesh {resolution.mesh}"
        texts = list(found.values())
        # The same in every layer is told once.
        lines = []
        for some in fold(list(found), texts):
            first, count_alike = some.members[0], len(some.members)
            times = f" ×{count_alike}" if count_alike > 1 else ""
            lines.append(f"{some.text}{times} {texts[first]}")
        raise ResolveError(
            f"{count} not fit the rules{mesh}:\n{bullet_list(lines)}",
            [f"{path} {text}" for path, text in found.items()],
            resolution,
        )
