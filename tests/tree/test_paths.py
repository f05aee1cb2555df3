"""Paths: one canonical string for each leaf of any tree, and its sections."""

import collections
import enum
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict, freeze
from flax.training.train_state import TrainState

import flax_layoutmap as flm
from flax_layoutmap._tree.flatten import flatten, plain_tree
from flax_layoutmap._tree.paths import (
    Roots,
    escape,
    is_optax_state,
    is_train_state,
    parameter_keys,
    unescape,
)

X = np.zeros((2, 3), np.float32)


def paths(tree: Any) -> list[str]:
    return flatten(tree).full_paths()


def sections(tree: Any) -> list[tuple[str, str, list[str]]]:
    flat = flatten(tree)
    return [(s.prefix, s.role, [*flat.paths[s.start : s.stop]]) for s in flat.sections]


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(2, 3, rngs=rngs)
        self.value = nnx.Param(jnp.ones(3))  # a user's attribute of that name


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(5, 3, rngs=rngs)
        self.layers = nnx.List([Block(rngs), Block(rngs)])
        self.head = self.embed  # tied
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


MODEL_PATHS = [
    "dropout/rngs/count",
    "dropout/rngs/key",
    "embed/embedding",
    "layers/0/linear/bias",
    "layers/0/linear/kernel",
    "layers/0/value",
    "layers/1/linear/bias",
    "layers/1/linear/kernel",
    "layers/1/value",
]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(nnx.Rngs(0))


# ---------------------------------------------------- one string for one leaf


def test_a_module_its_state_and_its_pure_dict(model: Model) -> None:
    state = nnx.state(model)
    assert paths(model) == MODEL_PATHS
    assert paths(state) == MODEL_PATHS
    assert paths(nnx.to_pure_dict(state)) == MODEL_PATHS
    assert paths(nnx.eval_shape(lambda: Model(nnx.Rngs(0)))) == MODEL_PATHS


def test_a_box_key_never_appears_and_a_users_value_stays(model: Model) -> None:
    assert all(not path.endswith("kernel/value") for path in paths(model))
    assert "layers/0/value" in paths(model)
    assert paths({"value": {"value": X}}) == ["value/value"]


def test_linen_boxed_and_unboxed() -> None:
    class Net(nn.Module):
        boxed: bool

        @nn.compact
        def __call__(self, x: Any) -> Any:
            init: Any = nn.initializers.lecun_normal()
            if self.boxed:
                init = nn.with_partitioning(init, ("data", "model"))
            x = nn.Dense(4, kernel_init=init)(x)
            return nn.BatchNorm(use_running_average=True)(x)

    boxed = jax.eval_shape(Net(True).init, jax.random.key(0), X)
    plain = jax.eval_shape(Net(False).init, jax.random.key(0), X)
    expected = [
        "batch_stats/BatchNorm_0/mean",
        "batch_stats/BatchNorm_0/var",
        "params/BatchNorm_0/bias",
        "params/BatchNorm_0/scale",
        "params/Dense_0/bias",
        "params/Dense_0/kernel",
    ]
    assert paths(boxed) == paths(plain) == paths(freeze(plain)) == expected
    assert sections(boxed) == sections(plain)
    assert sections(plain)[1] == (
        "params/",
        "parameter",
        [path.removeprefix("params/") for path in expected[2:]],
    )


class Pair(NamedTuple):
    first: Any
    second: Any


@flax.struct.dataclass
class Record:
    weight: Any
    note: str = flax.struct.field(pytree_node=False, default="x")


@jax.tree_util.register_pytree_node_class
class Legacy:
    def __init__(self, parts: Any) -> None:
        self.parts = parts

    def tree_flatten(self) -> tuple[Any, None]:
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, aux: None, parts: Any) -> "Legacy":
        return cls(parts)


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"b": X, "a": X}, ["a", "b"]),
        (collections.OrderedDict([("b", X), ("a", X)]), ["b", "a"]),
        (collections.defaultdict(None, {"b": X, "a": X}), ["a", "b"]),
        (FrozenDict({"a": {"b": X}}), ["a/b"]),
        ({"a": [X, (X, {"c": X})]}, ["a/0", "a/1/0", "a/1/1/c"]),
        ({"a": Pair(X, X)}, ["a/first", "a/second"]),
        ({"a": Record(X)}, ["a/weight"]),
        ({"a": Legacy((X, {"z": X}))}, ["a/0", "a/1/z"]),
        ({"a": None, "b": {}, "c": [], "d": X}, ["d"]),
        ({10: X, 9: X}, ["9", "10"]),
        ({"a": {"": X}, "": [X]}, ["/0", "a/"]),
        ({(1, 2): X}, ["(1, 2)"]),
        (X, [""]),
        ({}, []),
        (None, []),
        ({"step": 3, "name": "run", "scale": 2.5}, ["name", "scale", "step"]),
        (nnx.State({"a": nnx.Param(X), "b": X}), ["a", "b"]),
        (nnx.Param(X), [""]),
        ({"w": nnx.Param(X)}, ["w"]),
    ],
)
def test_containers(tree: Any, expected: list[str]) -> None:
    flat = flatten(tree)
    assert list(flat.full_paths()) == expected
    assert len(flat.leaves) == len(expected)
    assert all(
        mine is theirs
        for mine, theirs in zip(
            flat.leaves, jax.tree.leaves(plain_tree(tree)), strict=True
        )
    )


# ------------------------------------------------------------ escaped, unique


class Key(str, enum.Enum):  # noqa: UP042 (str() of it is not its value)
    B = "b"


def test_keys_that_are_strings_of_another_kind() -> None:
    assert paths({"s": {Key.B: X}}) == ["s/b"]
    assert paths({"s": {Key.B: {"c": X}}, "t": (X,)}) == ["s/b/c", "t/0"]


def test_a_slash_in_a_key_is_escaped() -> None:
    tree = {"a/b": X, "a": {"b": X}, "a%2Fb": X}
    assert sorted(paths(tree)) == ["a%252Fb", "a%2Fb", "a/b"]
    for key in ("a/b", "a%2Fb", "%", "/", "%25", "plain"):
        assert unescape(escape(key)) == key
        assert "/" not in escape(key)


@pytest.mark.parametrize(
    "tree",
    [
        {"x": {0: X, "0": X}},
        nnx.State({"x": {0: nnx.Param(X), "a": nnx.Param(X)}}),
        FrozenDict({"x": {0: X, "b": X}}),
    ],
)
def test_int_and_string_siblings_are_refused(tree: Any) -> None:
    with pytest.raises(flm.errors.StructureError) as caught:
        flatten(tree)
    assert str(caught.value).startswith(
        "x has keys of types that cannot be sorted together (int, str:"
    )


def test_keys_that_read_the_same_are_refused() -> None:
    class Text:
        def __init__(self, text: str) -> None:
            self.text = text

        def __str__(self) -> str:
            return self.text

    tree = {"x": collections.OrderedDict([(0, X), ("0", X)])}
    with pytest.raises(flm.errors.StructureError) as caught:
        flatten(tree)
    assert str(caught.value) == (
        "two different keys both have the path 'x/0' (an int and a string, for "
        "example): rename one, so that rules can distinguish them"
    )
    with pytest.raises(flm.errors.StructureError, match="both have the path 'a'"):
        flatten(collections.OrderedDict([(Text("a"), X), ("a", X)]))


# --------------------------------------------------------------- NNX objects


def test_objects_inside_of_trees(model: Model) -> None:
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    tree = {"model": model, "optimizer": optimizer, "step": 3}
    found = sections(tree)
    assert [(prefix, role) for prefix, role, _ in found] == [
        ("model/", "parameter"),
        ("optimizer/", "optimizer"),
        ("", "parameter"),
    ]
    assert found[0][2] == MODEL_PATHS
    assert "opt_state/0/mu/layers/0/linear/kernel" in found[1][2]
    assert "step" in found[1][2] and found[2][2] == ["step"]
    assert paths(tree)[-1] == "step"
    assert "optimizer/opt_state/0/mu/embed/embedding" in paths(tree)


def test_state_of_a_model_and_its_optimizer(model: Model) -> None:
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    for tree in [
        nnx.state((model, optimizer)),
        nnx.to_pure_dict(nnx.state((model, optimizer))),
    ]:
        found = sections(tree)
        assert found[0] == ("0/", "parameter", MODEL_PATHS)
        assert found[1][:2] == ("1/opt_state/", "optimizer")
        assert "0/mu/layers/0/linear/kernel" in found[1][2]
    state = nnx.state({"model": model, "optimizer": optimizer})
    live = {"model": model, "optimizer": optimizer}
    assert paths(state) == paths(live)
    assert sections(state)[0] == sections(live)[0]


def test_a_model_in_its_optimizer() -> None:
    both = nnx.ModelAndOptimizer(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), optax.sgd(1.0))
    parameters = ("model/", "parameter", ["bias", "kernel"])
    assert sections(both) == [parameters, ("", "optimizer", ["step"])]
    assert sections(nnx.state(both)) == sections(both)
    assert sections({"train": both, "x": X}) == [
        ("train/model/", "parameter", ["bias", "kernel"]),
        ("train/", "optimizer", ["step"]),
        ("", "parameter", ["x"]),
    ]
    for tree in (both, [both], nnx.state(both)):
        assert flatten(tree).leaves == jax.tree.leaves(plain_tree(tree))


def test_random_state_is_fixed(model: Model) -> None:
    flat = flatten(model)
    assert [flat.paths[at] for at in sorted(flat.fixed)] == MODEL_PATHS[:2]


def test_annotations_are_found() -> None:
    class Annotated(nnx.Module):
        def __init__(self) -> None:
            self.a = nnx.Param(X)
            with nnx.use_eager_sharding(False):
                self.b = nnx.Param(X, out_sharding=("data", None))
            self.c = nnx.Param(X, layout=flm.TensorLayout(("data", None)))

    flat = flatten(Annotated())
    assert [flat.paths[at] for at in flat.annotations] == ["b", "c"]
    boxes = {"w": nn.Partitioned(X, names=("data", None)), "x": X}  # type: ignore[arg-type]
    assert list(flatten(boxes).annotations) == [0]


# ------------------------------------------------------------------ sections


def test_linen_variables_below_the_root() -> None:
    variables = {"batch_stats": {"mean": X}, "params": {"dense": {"kernel": X}}}
    for model in (variables, freeze(variables)):
        assert sections({"model": model, "step": 3}) == [
            ("model/", "parameter", ["batch_stats/mean"]),
            ("model/params/", "parameter", ["dense/kernel"]),
            ("", "parameter", ["step"]),
        ]
    assert paths({"model": variables, "step": 3}) == [
        "model/batch_stats/mean",
        "model/params/dense/kernel",
        "step",
    ]
    # As an argument of a function; with optimizer state; two models.
    roots = Roots({"state": {"model": variables}, "x": X})
    assert [prefix for prefix, _, _ in sections(roots)] == [
        "state/model/",
        "state/model/params/",
        "x/",
    ]
    state = optax.sgd(1.0, momentum=0.9).init(variables["params"])
    assert [s[:2] for s in sections({"a": variables, "b": variables, "c": state})] == [
        ("a/", "parameter"),
        ("a/params/", "parameter"),
        ("b/", "parameter"),
        ("b/params/", "parameter"),
        ("c/", "optimizer"),
    ]
    # Further down, and in parameters, the name means nothing.
    for tree in (
        {"a": {"b": {"params": {"w": X}}}},
        {"params": {"layer": {"params": {"w": X}}}},
        {"layer": {"params": X}},
    ):
        assert len(sections(tree)) == 1


def test_train_states() -> None:
    params = {"dense": {"kernel": X}}
    linen = TrainState.create(
        apply_fn=lambda *_: None, params=params, tx=optax.adam(1e-3)
    )
    assert is_train_state(linen)
    assert paths(linen) == [
        "step",
        "params/dense/kernel",
        "opt_state/0/count",
        "opt_state/0/mu/dense/kernel",
        "opt_state/0/nu/dense/kernel",
    ]
    assert [(prefix, role) for prefix, role, _ in sections(linen)] == [
        ("", "parameter"),
        ("params/", "parameter"),
        ("opt_state/", "optimizer"),
    ]
    inside = {"state": linen, "epoch": 1}
    assert "state/opt_state/0/mu/dense/kernel" in paths(inside)
    assert [prefix for prefix, _, _ in sections(inside)] == [
        "",
        "state/",
        "state/params/",
        "state/opt_state/",
    ]


def test_optax_states() -> None:
    tx = optax.chain(optax.clip(1.0), optax.adam(1e-3))
    state = tx.init({"w": X})
    assert (
        is_optax_state(state) and not is_optax_state((X, X)) and not is_optax_state([])
    )
    assert paths(state) == ["1/0/count", "1/0/mu/w", "1/0/nu/w"]
    assert sections(state)[0][1] == "optimizer"
    assert sections({"params": {"w": X}, "opt_state": state}) == [
        ("opt_state/", "optimizer", paths(state)),
        ("params/", "parameter", ["w"]),
    ]
    assert sections(({"w": X}, state)) == [
        ("", "parameter", ["0/w"]),
        ("1/", "optimizer", paths(state)),
    ]


def test_roots_are_trees_of_their_own(model: Model) -> None:
    optimizer = nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)
    tree = Roots({"optimizer": optimizer, "model": model, "opt_state": {"a": X}})
    assert [(prefix, role) for prefix, role, _ in sections(tree)] == [
        ("optimizer/", "optimizer"),
        ("model/", "parameter"),
        ("opt_state/", "optimizer"),
    ]
    assert len(jax.tree.leaves(plain_tree(tree))) == len(paths(tree))


def test_keys_of_parameters_are_unique() -> None:
    tree = Roots({"one": {"w": X, "b": X}, "two": {"w": X}, "opt_state": {"w": X}})
    assert parameter_keys(flatten(tree)) == {0: "b", 1: "w", 2: "two/w"}
    # A path within a section may be the path of another leaf.
    odd: Any = {"model": nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "z": X, "bias": X}
    keys = parameter_keys(flatten(odd))
    assert sorted(keys.values()) == ["bias", "kernel", "model/bias", "z"]
    odd = {"a": nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "bias": X}
    assert sorted(parameter_keys(flatten(odd)).values()) == ["./bias", "bias", "kernel"]


def test_a_module_attribute_called_params_is_no_linen_collection() -> None:
    class Odd(nnx.Module):
        def __init__(self) -> None:
            self.params = nnx.Linear(2, 3, rngs=nnx.Rngs(0))

    assert sections(Odd()) == [
        ("", "parameter", ["params/bias", "params/kernel"]),
    ]
    for tx in (optax.sgd(1.0), optax.adam(1.0)):
        both = nnx.state((Odd(), nnx.Optimizer(Odd(), tx, wrt=nnx.Param)))
        assert sections(both)[0][2] == ["params/bias", "params/kernel"]


def test_two_copies_of_parameters_are_no_optimizer_state() -> None:
    copies = optax.LookaheadParams({"w": X}, {"w": X})  # type: ignore[arg-type]
    assert flatten(copies).roles() == ["parameter"] * 2
    assert paths(copies) == ["fast/w", "slow/w"]
