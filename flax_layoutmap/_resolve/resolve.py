"""resolve(tree, rules) → Resolution: the only place where rules are applied to leaves.

Each stage is a function from one frozen value to the next:

    tree → flatten → leaves_of → find_origins → decide → Resolution
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from flax_layoutmap._core.errors import RuleError, StructureError
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._resolve.leaves import Leaves, columns_of, leaves_beside, leaves_of
from flax_layoutmap._resolve.optimizer_state import find_origins, models_in
from flax_layoutmap._resolve.resolution import Resolution, decided
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.flax_internals import is_nnx_object, nnx_state
from flax_layoutmap._tree.graph import Names, names_of_shared
from flax_layoutmap._tree.paths import is_train_state
from flax_layoutmap._tree.trace import Traced, trace


def resolve(
    tree: Any,
    rules: Any,
    *,
    params: Any = None,
    tx: Any = None,
    strict: bool | None = None,
) -> Resolution:
    """Resolve the layout of every leaf of a tree, without using devices.

    Args:
        tree: a module, a function that makes one (it is only traced), an `nnx.State`,
            Linen variables, an optax state, a TrainState, a tree of arrays or
            `jax.ShapeDtypeStruct`s, or any tree of these.
        rules: a `LayoutMap` or a `RuleSet`.
        params: the parameters, if `tree` is only their optimizer state.
        tx: the optax transformation that made the optimizer state, if the tree does not
            hold it; needed for states with factored moments.
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
    made = _traced(tree)
    tree, names = (tree, None) if made is None else (made.abstract, made.names)
    params = abstract_tree(params)
    if strict is not None and strict != rule_set.strict:
        rule_set = rule_set.with_changes(strict=strict)
    if params is not None or tx is not None:
        resolution = resolve_tree(tree, rule_set, params, tx)
    else:
        resolution = resolve_or_recall(tree, rule_set, names)
    if strict:
        resolution.announce()
    return resolution


def resolve_tree(
    tree: Any,
    rules: RuleSet,
    params: Any = None,
    tx: Any = None,
    *,
    layouts: Sequence[TensorLayout] = (),
    names: Names | None = None,
) -> Resolution:
    """Resolve a tree, or optimizer state whose parameters are not in it.

    `layouts` has the current layout of each parameter; without them the rules decide.
    `names` is as for `flatten`.
    """
    flat = flatten(tree, names)
    if params is None:
        leaves = leaves_of(flat, tree)
        nodes, trees = flat.nodes, models_in(flat, tree)
    else:
        leaves = leaves_beside(leaves_of(flatten(params), params), flat, tree)
        leaves = dataclasses.replace(leaves, given=dict(enumerate(layouts)))
        nodes, trees = {}, [params] if layouts else _given(params)
    return decided(find_origins(leaves, nodes, trees, tx), rules)


def _given(params: Any) -> list[Any]:
    """The trees that `tx.init` may have been given, among what the user passes."""
    if is_nnx_object(params):
        return [nnx_state(params, nnx.Param)]
    if isinstance(params, Mapping) and not isinstance(params, nnx.State):
        return [params["params"], params] if "params" in params else [params]
    return [params]


# Trees that a rule set remembers, newest first.
_MOST_TREES = 4


def resolve_or_recall(tree: Any, rules: RuleSet, names: Names | None) -> Resolution:
    """Look the tree up by structure, shapes and dtypes before anything is matched.

    `names` has the paths of shared Variables, if the tree does not show them.
    """
    if is_nnx_object(tree) and not hasattr(tree, "opt_state"):
        # Its Resolution has the structure of its State.
        names, tree = names_of_shared(tree), nnx_state(tree)
    trees = rules._resolved
    for known_names, resolution in tuple(trees):
        if known_names == (names or None) and _is_alike(tree, resolution._leaves):
            return resolution
    resolution = resolve_tree(tree, rules, names=names)
    # Annotations depend on Flax's logical rules in context, and state of an unknown
    # kind on the current layouts of arrays; the columns have neither, and do not tell
    # which Variables of an NNX object are shared.
    leaves, rows = resolution._leaves, resolution._distinct.values()
    is_known = not (leaves.live or leaves.others or leaves.flat.annotations)
    is_known &= all(row.reason != "unknown optimizer state" for row in rows)
    if is_known and not leaves.flat.has_objects:
        trees.insert(0, (names or None, resolution))
        del trees[_MOST_TREES:]
    return resolution


def _is_alike(tree: Any, known: Leaves) -> bool:
    """Whether a tree has this structure, and leaves of these shapes and dtypes."""
    try:
        leaves = known.treedef.flatten_up_to(tree)
    except (TypeError, ValueError):  # another structure; metadata without equality
        return False
    shapes, dtypes, others = columns_of(leaves)
    is_alike = shapes == known.shapes and dtypes == known.dtypes and not others
    return is_alike and jax.tree_util.all_leaves(leaves)


def rule_set_of(rules: Any, what: str) -> RuleSet:
    """The frozen rules of a `LayoutMap`; a `RuleSet` is returned unchanged.

    `what` names the call in the error for anything else.
    """
    if isinstance(rules, RuleSet):
        return rules
    # Looked up on the type: an nnx.Rngs has a stream for any attribute.
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
    made = _traced(tree)
    return tree if made is None else made.abstract


def _traced(tree: Any) -> Traced | None:
    """The trace of a function that makes a tree; None for a tree."""
    if isinstance(tree, Traced):
        return tree
    # A Variable passes calls on to its value.
    is_tree = is_nnx_object(tree) or isinstance(tree, nnx.Variable)
    if is_tree or is_train_state(tree) or not callable(tree):
        return None
    if hasattr(tree, "init") and hasattr(tree, "apply"):
        raise StructureError(
            f"a Linen module ({type(tree).__name__}) holds no variables; pass a "
            "function that makes them, lambda: module.init(key, x), or the variables"
        )
    return trace(tree)
