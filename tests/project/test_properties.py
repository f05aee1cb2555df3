"""Properties of the core, on generated patterns, trees and layouts."""

import json
import re
import string
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.core import freeze
from flax.training.train_state import TrainState
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import flax_layoutmap as flm
from flax_layoutmap._rules.matching import Matcher
from flax_layoutmap._tree.flatten import flatten, plain_tree
from flax_layoutmap._tree.paths import escape, unescape

MATCHES = ["search", "match", "fullmatch"]
# Few characters, so that patterns meet paths often.
PARTS = st.text(st.sampled_from("ab01."), min_size=1, max_size=3)
PATHS = st.lists(PARTS, min_size=1, max_size=4).map("/".join)
PIECES = ["a", "b", "0", "/", ".*", "[^/]+", r"\d+", "(a|b0)", "b?", "(?!a)", "^", "$"]
PATTERNS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join)

# ----------------------------------------------------- patterns against paths


def by_the_plain_loop(patterns: list[str], match: str, path: str) -> tuple[int, ...]:
    if path in patterns:
        return (patterns.index(path),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tuple(
            at for at, text in enumerate(patterns) if getattr(re, match)(text, path)
        )


@settings(max_examples=200)
@given(
    st.lists(PATTERNS, min_size=1, max_size=4, unique=True),
    st.lists(PATHS, min_size=1, max_size=6),
    st.sampled_from(MATCHES),
)
def test_matching_is_the_plain_loop(
    patterns: list[str], paths: list[str], match: Any
) -> None:
    matcher = Matcher([flm.Rule(text, None) for text in patterns], match)
    for path in [*paths, *patterns, *paths]:
        assert matcher.matching(path) == by_the_plain_loop(patterns, match, path)


@settings(max_examples=200)
@given(
    st.lists(PATTERNS, min_size=1, max_size=4, unique=True),
    PATHS,
    st.sampled_from(MATCHES),
)
def test_the_whole_path_is_for_patterns_that_name_the_section(
    patterns: list[str], path: str, match: Any
) -> None:
    forms = f"agents/net/{path}", f"net/{path}", path
    assume(path not in patterns)
    within = by_the_plain_loop(patterns, match, path)
    matcher = Matcher([flm.Rule(text, None) for text in patterns], match)
    assert matcher.match(forms).rules == within
    naming = [f"net/{text}|{text}" for text in patterns]
    each = {at for form in forms for at in by_the_plain_loop(naming, match, form)}
    matcher = Matcher([flm.Rule(text, None) for text in naming], match)
    assert matcher.match(forms).rules == tuple(sorted(each))


@settings(max_examples=200)
@given(
    st.lists(PATTERNS, min_size=1, max_size=3, unique=True),
    st.lists(st.lists(PARTS, min_size=1, max_size=3), min_size=1, max_size=8),
    st.sampled_from(MATCHES),
)
def test_resolving_asks_what_the_plain_loop_asks(
    patterns: list[str], keys: list[list[str]], match: Any
) -> None:
    tree: dict[str, Any] = {}
    for parts in keys:
        node = tree
        for part in parts[:-1]:
            child = node.setdefault(part, {})
            node = child if isinstance(child, dict) else {}
        node.setdefault(parts[-1], jax.ShapeDtypeStruct((4,), jnp.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rules = flm.LayoutMap.from_rules([(p, None) for p in patterns], match=match)
        resolution = rules.resolve(tree)
        for leaf in resolution:
            expected = by_the_plain_loop(patterns, match, leaf.path)
            number = None if leaf.rule_number is None else leaf.rule_number - 1
            assert number == (expected[0] if expected else None), leaf
        by_hand = {
            at
            for path in resolution.paths
            for at in by_the_plain_loop(patterns, match, path)
        }
    assert [rule.pattern for rule in resolution.unused_rules] == [
        pattern for at, pattern in enumerate(patterns) if at not in by_hand
    ]


# --------------------------------------------------------------------- paths

KEYS = st.one_of(
    st.text(st.sampled_from(list("ab/%25F")), max_size=4), st.integers(0, 3).map(str)
)
TREES = st.recursive(
    st.just(0),
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=12,
)


@given(st.text(max_size=8))
def test_escaping_there_and_back(key: str) -> None:
    part = escape(key)
    assert unescape(part) == key and "/" not in part


@given(st.text(max_size=5), st.text(max_size=5))
def test_escaping_keeps_keys_apart(first: str, second: str) -> None:
    assert (escape(first) == escape(second)) == (first == second)


@settings(max_examples=150)
@given(st.dictionaries(KEYS, TREES, min_size=1, max_size=3))
def test_paths_are_injective_and_in_leaf_order(tree: dict[str, Any]) -> None:
    assume("params" not in tree)
    flat = flatten(tree)
    paths = list(flat.full_paths())
    assert len(set(paths)) == len(paths)
    assert len(flat.leaves) == len(jax.tree.leaves(plain_tree(tree)))
    keys = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    assert [tuple(map(unescape, path.split("/"))) for path in paths] == [
        tuple(str(getattr(k, "key", getattr(k, "idx", None))) for k in path)
        for path in keys
    ]


X = np.zeros((2, 3), np.float32)
ODD_LEAVES = st.one_of(
    st.sampled_from([X, 3, "text", None, (X, X), freeze({"a": X})]),
    st.builds(nnx.Param, st.just({"a": X})),
    st.builds(lambda: nnx.Param(X, layout=(None, "x"))),
    st.builds(nnx.OptState, st.just(X)),
    st.builds(nnx.RngCount, st.just(np.uint32(0))),
    st.just(optax.ScaleByAdamState(X, {"a": X}, {"a": X})),  # type: ignore[arg-type]
    st.just(nnx.State({"a": nnx.Param(X)})),
    st.builds(lambda: nnx.Linear(1, 1, rngs=nnx.Rngs(0))),
)
ODD_TREES = st.recursive(
    ODD_LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(
            st.sampled_from(["params", "opt_state", "step", "a", "b1"]),
            inner,
            max_size=3,
        ),
        st.lists(inner, max_size=2),
    ),
    max_leaves=8,
)


@settings(max_examples=150)
@given(ODD_TREES)
def test_leaves_of_any_tree_are_those_of_jax_in_order(tree: Any) -> None:
    flat, leaves = flatten(tree), jax.tree.leaves(plain_tree(tree))
    assert list(map(id, flat.leaves)) == list(map(id, leaves))
    assert len({*flat.full_paths()}) == len(leaves)


# ------------------------------------------- one canonical path for a leaf

NAMES = st.text(string.ascii_lowercase[:4], min_size=1, max_size=2)
MODELS = st.recursive(
    st.sampled_from([(2,), (4, 2), (2, 2, 4)]),
    lambda inner: st.one_of(
        st.dictionaries(NAMES, inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=8,
)


class Node(nnx.Module):
    def __init__(self, children: Mapping[str, Any]) -> None:
        for name, child in children.items():
            setattr(self, name, module_of(child))


def module_of(tree: Any) -> Any:
    if isinstance(tree, dict):
        return Node(tree)
    if isinstance(tree, list):
        return nnx.List([module_of(child) for child in tree])
    return nnx.Param(jnp.zeros(tree))


def dict_of(tree: Any, leaf: Any) -> Any:
    if isinstance(tree, dict):
        return {name: dict_of(child, leaf) for name, child in tree.items()}
    if isinstance(tree, list):
        return {str(at): dict_of(child, leaf) for at, child in enumerate(tree)}
    return leaf(jax.ShapeDtypeStruct(tree, jnp.float32))


def boxed(struct: Any) -> Any:
    box: Any = nn.Partitioned
    return box(struct, names=(None,) * len(struct.shape))


@settings(max_examples=60)
@given(st.dictionaries(NAMES, MODELS, min_size=1, max_size=3), PATTERNS)
def test_every_form_of_a_model_resolves_alike(model: Any, pattern: str) -> None:
    module = module_of(model)
    state = nnx.state(module)
    plain = dict_of(model, lambda struct: struct)
    forms = [
        module,
        state,
        nnx.to_pure_dict(state),
        plain,
        freeze(plain),
        dict_of(model, boxed),
    ]
    wrapped = {"model/": {"model": module}, "params/": {"params": plain}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layout_map = flm.LayoutMap(
            flm.DeviceMesh.abstract("x=2"), match="match", overlap="first"
        )
        layout_map[pattern] = flm.TensorLayout(("x", ...))

        def table(tree: Any) -> dict[str, Any]:
            return {
                leaf.path: (leaf.shape, leaf.shard_shape, leaf.rule_number)
                for leaf in layout_map.resolve(tree)
            }

        tables = [table(form) for form in forms]
        assert all(found == tables[0] for found in tables)
        # No pattern names the section, so that rules hold as they do alone.
        for prefix, tree in wrapped.items():
            found = table(tree)
            assert {path.removeprefix(prefix): found[path] for path in found} == {
                path: tables[0][path] for path in tables[0]
            }


# ------------------------------------------------------ trees of every kind

ARRAYS = st.sampled_from([(2,), (4, 8), (8, 4), (2, 4, 8)]).map(jnp.zeros)
PARAMETERS = st.recursive(
    ARRAYS, lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=3)
)
SOME_PARAMETERS = st.dictionaries(NAMES, PARAMETERS, min_size=1, max_size=2)
OPTIMIZERS = st.sampled_from(
    [
        optax.adam(1e-3),
        optax.sgd(1e-3, momentum=0.9),
        optax.adafactor(1e-3, min_dim_size_to_factor=2),
        optax.chain(optax.clip(1.0), optax.lion(1e-3)),
        optax.sm3(1e-3),
        optax.sgd(1e-3),
    ]
)
LEAVES: list[Any] = [None, 3, 2.5, True, "text", np.float32(1), np.zeros((0, 3))]
LEAVES += [jax.random.key(0), jax.random.split(jax.random.key(0), 2), jnp.ones(8)]
LEAVES += [jax.ShapeDtypeStruct((3, 5), jnp.bfloat16), jax.random.PRNGKey(0)]


def model_with_state(parameters: Any, tx: Any, form: int) -> Any:
    """Parameters with their optimizer state, in one of several forms."""
    state = tx.init(parameters)
    model = module_of(jax.tree.map(jnp.shape, parameters))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    return [
        state,
        {"params": parameters, "opt_state": state},
        {"m": parameters, "o": state},
        TrainState.create(apply_fn=print, params=parameters, tx=tx),
        (model, optimizer),
        {"model": model, "optimizer": optimizer, "step": 3},
        nnx.state((model, optimizer)),
        nnx.state(optimizer),
    ][form]


EVERYTHING = st.recursive(
    st.one_of(
        st.sampled_from(LEAVES),
        st.builds(model_with_state, SOME_PARAMETERS, OPTIMIZERS, st.integers(0, 7)),
        SOME_PARAMETERS,
        SOME_PARAMETERS.map(lambda tree: jax.tree.map(boxed, tree)),
    ),
    lambda inner: st.one_of(
        st.dictionaries(st.one_of(NAMES, st.just("value")), inner, max_size=3),
        st.lists(inner, max_size=2),
        st.tuples(inner, inner),
    ),
    max_leaves=3,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(EVERYTHING, st.sampled_from(["first", "last"]), st.booleans())
def test_every_question_about_every_tree_has_an_answer(
    tree: Any, overlap: Any, zero: bool
) -> None:
    planned = flm.DeviceMesh.abstract((2, 4), ("data", "model"))
    layout_map = flm.LayoutMap(planned, overlap=overlap, indivisible="replicate")
    layout_map["a"] = ("data", ...)
    layout_map.add(flm.Rule("[bc]", (None, "model"), rank="skip"))
    layout_map[".*d"] = None
    if zero:
        layout_map.optimizer[".*"] = (..., "data")
    resolution = layout_map.resolve(tree)
    plain = plain_tree(tree)
    leaves = jax.tree.leaves(plain)
    assert len(resolution) == len(leaves) == len(set(resolution.paths))
    assert jax.tree.structure(resolution.specs) == jax.tree.structure(plain)
    for leaf, array in zip(resolution, leaves, strict=True):
        assert leaf.shape == np.shape(array)
        assert resolution[leaf.path] == leaf
        assert resolution.explain(leaf.path).startswith(leaf.path)
        assert leaf.shard_shape == leaf.layout.shard_shape(leaf.shape)
    assert json.loads(resolution.report("json"))["schema"] == 1
    assert resolution.report()
    mesh = flm.DeviceMesh((2, 4), ("data", "model"))
    real = resolution.on(mesh)
    assert {sharding.mesh for sharding in real.sharding_list()} <= {mesh.jax_mesh}
    again = layout_map.on(mesh).resolve(tree)
    for other in (real, again):
        assert [(leaf.shard_shape, leaf.reason, leaf.owner) for leaf in other] == [
            (leaf.shard_shape, leaf.reason, leaf.owner) for leaf in resolution
        ]
    for struct, array in zip(jax.tree.leaves(real.abstract()), leaves, strict=True):
        assert np.shape(struct) == np.shape(array)


# ------------------------------------------------------------------- layouts

AXES = ("a", "b", "c")
SIZES = (2, 1, 3)


@st.composite
def layouts(draw: st.DrawFn, *, open_rank: bool = True) -> tuple[Any, ...]:
    """Axes that name each mesh axis at most once."""
    free = draw(st.permutations(AXES))
    dims: list[Any] = []
    for _ in range(draw(st.integers(0, 3))):
        count = draw(st.integers(0, len(free)))
        names, free = free[:count], free[count:]
        dims.append(tuple(names) if count > 1 else names[0] if names else None)
    if open_rank and draw(st.booleans()):
        dims.insert(draw(st.integers(0, len(dims))), ...)
    return tuple(dims)


@given(layouts(), st.lists(st.integers(0, 2), max_size=4))
def test_shard_shapes_are_those_of_jax(
    axes: tuple[Any, ...], factors: list[int]
) -> None:
    mesh = flm.DeviceMesh.abstract(SIZES, AXES)
    layout = flm.TensorLayout(axes, mesh)
    rank = layout.rank
    assume(len(factors) == rank if rank is not None else len(factors) >= len(axes) - 1)
    dims = layout.dims(len(factors))
    shape = tuple(
        factor * int(np.prod([mesh.axis_sizes[name] for name in names], initial=1))
        for factor, names in zip(factors, dims, strict=True)
    )
    sharding = NamedSharding(mesh.jax_mesh, layout.spec(len(shape)))
    assert layout.shard_shape(shape) == sharding.shard_shape(shape)
    as_spec = PartitionSpec(*[names or None for names in dims])
    assert NamedSharding(mesh.jax_mesh, as_spec).shard_shape(shape) == (
        sharding.shard_shape(shape)
    )
    spec = tuple(layout.spec(len(shape)))
    assert not spec or spec[-1] is not None


@given(layouts(), layouts())
def test_equal_layouts_have_equal_hashes_and_specs(
    first: tuple[Any, ...], second: tuple[Any, ...]
) -> None:
    one, other = flm.TensorLayout(first), flm.TensorLayout(list(second))
    if one == other:
        assert hash(one) == hash(other) and one.rank == other.rank
    assert flm.TensorLayout(one) == one
    assert eval(repr(one), {"TensorLayout": flm.TensorLayout}) == one
