"""resolve(tree, rules) → Resolution: the one place where rules meet leaves."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from flax_layoutmap._decide import Decider, OwnerLayout
from flax_layoutmap._errors import ResolveError, bullet_list
from flax_layoutmap._flax_internals import (
    is_nnx_object,
    metadata_of,
    nnx_state,
    raw_values,
)
from flax_layoutmap._optimizer_state import Origin, origins, tagged_dims
from flax_layoutmap._paths import Flat, Section, flatten, is_train_state, plain_tree
from flax_layoutmap._records import Shape, show_shape
from flax_layoutmap._resolution import Resolution
from flax_layoutmap._rules import RuleSet
from flax_layoutmap._trace import trace

_CACHED_TREES = 4


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
    rule_set: RuleSet = rules if isinstance(rules, RuleSet) else rules.freeze()
    if callable(tree) and not is_nnx_object(tree) and not is_train_state(tree):
        tree = trace(tree).abstract
    if strict is not None and strict != rule_set.strict:
        rule_set = dataclasses.replace(rule_set, strict=strict)
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
    flat = flatten(tree)
    shapes, dtypes = _columns(flat.leaves)
    at_each = [known.get(path) for path in flat.full_paths()]
    treedef = jax.tree.structure(plain_tree(tree))
    return _decide_all(flat, rule_set, shapes, dtypes, treedef, at_each)


def resolve_state(
    tree: Any,
    rule_set: RuleSet,
    owners: Mapping[str, "OwnerLayout"],
    tx: Any,
    params: Any,
) -> Resolution:
    """Resolves optimizer state whose parameters already have layouts of their own."""
    flat = flatten(tree)
    flat = dataclasses.replace(
        flat, sections=[Section(0, len(flat.paths), "", "optimizer")]
    )
    shapes, dtypes = _columns(flat.leaves)
    treedef = jax.tree.structure(plain_tree(tree))
    tags = tagged_dims(tx.init, params)
    found = origins(flat.paths, shapes, {p: o.shape for p, o in owners.items()}, tags)
    return _decide_all(flat, rule_set, shapes, dtypes, treedef, found, owners)


# ------------------------------------------------------------------ resolving


def _resolve_cached(tree: Any, rule_set: RuleSet) -> Resolution:
    """Looks the tree up by structure, shapes and dtypes before anything is matched."""
    if is_nnx_object(tree):
        return _resolve(tree, rule_set, None, None)
    is_state = isinstance(tree, nnx.State)
    try:
        signature = _state_signature(tree) if is_state else _tree_signature(tree)
        for known, resolution in rule_set._resolved:
            if known == signature:
                return resolution
    except (AttributeError, TypeError, ValueError):
        # A leaf that is no array, metadata that cannot be compared, or a node that JAX
        # cannot flatten: the long way knows the first two and explains the third.
        return _resolve(tree, rule_set, None, None)
    flat = flatten(tree, rule_set.matcher.fold_part)
    if flat.has_objects:
        return _resolve(tree, rule_set, None, None, flat)
    columns = None if is_state else (signature[2], signature[3], signature[1])
    resolution = _resolve(tree, rule_set, None, None, flat, columns)
    if not flat.annotations:
        # Annotations depend on Flax's logical rules in context; not cached.
        if is_state:
            signature = (*signature[:-1], [dict(entry) for entry in signature[-1]])
        rule_set._resolved.insert(0, (signature, resolution))
        del rule_set._resolved[_CACHED_TREES:]
    return resolution


def _tree_signature(tree: Any) -> tuple[Any, ...]:
    leaves, treedef = jax.tree.flatten(tree)
    shapes = [leaf.shape for leaf in leaves]
    return "tree", treedef, shapes, [leaf.dtype for leaf in leaves]


def _state_signature(state: nnx.State) -> tuple[Any, ...]:
    """The same for a State, where `jax.tree.flatten` alone would take half the time.

    Keys, sizes and types in the order of a walk say the structure; the metadata of the
    Variables is last.
    """
    keys: list[Any] = []
    sizes: list[int] = []
    types: list[type] = []
    variables: list[Any] = []
    nodes = [state.raw_mapping]
    for node in nodes:  # grows while it is walked
        keys.extend(node)
        sizes.append(len(node))
        for child in node.values():
            kind = type(child)
            types.append(kind)
            (nodes if kind is dict else variables).append(child)
    values = raw_values(variables)
    shapes = [value.shape for value in values]
    dtypes = [value.dtype for value in values]
    metadata = [metadata_of(variable) for variable in variables]
    return "state", sizes, keys, types, shapes, dtypes, metadata


def _resolve(
    tree: Any,
    rule_set: RuleSet,
    params: Any,
    tx: Any,
    flat: Flat | None = None,
    columns: tuple[Any, Any, Any] | None = None,
) -> Resolution:
    flat = flatten(tree, rule_set.matcher.fold_part) if flat is None else flat
    if columns is None:
        shapes, dtypes = _columns(flat.leaves)
        plain = plain_tree(tree) if flat.has_objects else tree
        treedef = jax.tree.structure(plain)
    else:
        shapes, dtypes, treedef = columns
    if params is not None:
        stop = len(flat.paths)
        paths = flat.full_paths()
        flat = dataclasses.replace(
            flat, sections=[Section(0, stop, "", "optimizer")], paths=paths
        )
        own = _resolve(params, rule_set, None, None)
        owners = _owner_layouts(own)
        tags = {} if tx is None else tagged_dims(tx.init, _pure(params))
        found = origins(paths, shapes, {p: o.shape for p, o in owners.items()}, tags)
        return _decide_all(flat, rule_set, shapes, dtypes, treedef, found, owners)
    found = _find_origins(tree, flat, shapes, dtypes, tx)
    return _decide_all(flat, rule_set, shapes, dtypes, treedef, found)


def _find_origins(
    tree: Any, flat: Flat, shapes: Sequence[Shape], dtypes: Sequence[Any], tx: Any
) -> list[Origin | None] | None:
    """Origin of each leaf in the optimizer sections; None where there are none."""
    if all(section.role != "optimizer" for section in flat.sections):
        return None
    owners: dict[str, Shape] = {}
    abstract: dict[str, Any] = {}
    for section in flat.sections:
        if section.role == "parameter":
            for at in range(section.start, section.stop):
                if flat.paths[at] and at not in flat.fixed:
                    owners.setdefault(flat.paths[at], shapes[at])
                    abstract.setdefault(flat.paths[at], (shapes[at], dtypes[at]))
    result: list[Origin | None] = [None] * len(flat.paths)
    for section in flat.sections:
        if section.role != "optimizer":
            continue
        span = slice(section.start, section.stop)
        tags = _section_tags(tree, section, flat, abstract, tx)
        result[span] = origins(flat.paths[span], shapes[span], owners, tags)
    return result


def _section_tags(
    tree: Any, section: Section, flat: Flat, abstract: Mapping[str, Any], tx: Any
) -> Mapping[str, Any]:
    """Traces the optimizer of one section over the parameters of the tree, if known."""
    node = section.node
    tx = tx if tx is not None else getattr(node, "tx", None)
    if tx is None:
        return {}
    if is_train_state(node):
        return tagged_dims(tx.init, node.params)
    candidates = [nnx_state(m, node.wrt) for m in _modules(tree)] if node else []
    if not candidates and abstract:
        candidates = [_nest({p: jax.ShapeDtypeStruct(*a) for p, a in abstract.items()})]
    wanted = set(flat.paths[section.start : section.stop])
    for params in candidates:
        tags = tagged_dims(tx.init, params)
        if {f"opt_state/{path}" for path in tags} <= wanted or set(tags) <= wanted:
            return tags
    return {}


def _modules(tree: Any) -> list[Any]:
    nodes = jax.tree.leaves(tree, is_leaf=_is_module_or_state)
    return [
        node
        for node in nodes
        if _is_module_or_state(node) and not hasattr(node, "opt_state")
    ]


def _is_module_or_state(node: Any) -> bool:
    return is_nnx_object(node) or isinstance(node, nnx.State)


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        node = root
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = leaf
    return root


def _pure(params: Any) -> Any:
    if callable(params) and not is_nnx_object(params):
        params = trace(params).abstract
    if is_nnx_object(params):
        return nnx_state(params, nnx.Param)
    if isinstance(params, Mapping) and not isinstance(params, nnx.State):
        return params.get("params", params)
    return params


def _columns(leaves: Sequence[Any]) -> tuple[list[Shape], list[Any]]:
    shapes: list[Shape] = []
    dtypes: list[Any] = []
    for leaf in leaves:
        shape = getattr(leaf, "shape", None)
        if isinstance(shape, tuple) and hasattr(leaf, "dtype"):
            shapes.append(shape)
            dtypes.append(leaf.dtype)
        else:
            shapes.append(())
            dtypes.append(_python_dtype(leaf))
    return shapes, dtypes


def _python_dtype(leaf: Any) -> Any:
    if isinstance(leaf, bool | int | float | complex):
        return jax.dtypes.result_type(leaf)
    return None


def _owner_layouts(resolution: Resolution) -> dict[str, OwnerLayout]:
    flat, rows = resolution._flat, resolution._rows
    return {
        flat.paths[at]: OwnerLayout(
            resolution.shapes[at], rows[at].dims, rows[at].mesh, rows[at].memory_kind
        )
        for section in flat.sections
        if section.role == "parameter"
        for at in range(section.stop - 1, section.start - 1, -1)
    }


def _decide_all(
    flat: Flat,
    rule_set: RuleSet,
    shapes: Sequence[Shape],
    dtypes: Sequence[Any],
    treedef: Any,
    found: Sequence[Origin | None] | None = None,
    owners: Mapping[str, OwnerLayout] | None = None,
) -> Resolution:
    decider = Decider(rule_set, rule_set.matcher, flat, shapes)
    if found is None:
        rows = decider.by_rules()
    else:
        rows = decider.by_rules_and_origins(found, owners)
    decider.override(rows, dtypes)

    def again(other: RuleSet) -> Resolution:
        return _decide_all(flat, other, shapes, dtypes, treedef, found, owners)

    resolution = Resolution(rule_set, flat, shapes, dtypes, rows, treedef, again)
    if decider.troubled:
        _raise_problems(resolution)
    return resolution


def _raise_problems(resolution: Resolution) -> None:
    problems = [
        f"{path or 'the leaf'} {show_shape(shape)}: {row.problem}"
        for path, shape, row in zip(
            resolution.paths, resolution.shapes, resolution._rows, strict=True
        )
        if row.problem
    ]
    if problems:
        count = f"{len(problems)} leaves do" if len(problems) > 1 else "1 leaf does"
        mesh = "" if resolution.mesh is None else f" on mesh {resolution.mesh}"
        raise ResolveError(
            f"{count} not fit the rules{mesh}:\n{bullet_list(problems)}", problems
        )
