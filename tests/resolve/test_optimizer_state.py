"""Optimizer state follows parameters, dim by dim: one table of optimizers."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from optimizers import AXES, TABLE, Case, adam, arrays, check, expected_axes, rules
from shapes import axes_of, mapped, struct

import flax_layoutmap as flm

# What optax is about to drop must work for as long as it is there.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:optax")

Axes = tuple[Any, ...]


class Wrapped(NamedTuple):
    """The state of somebody's own wrapper around an optimizer."""

    copy: Any
    inner: Any


def wrapped(inner: Any) -> Any:
    def init(params: Any) -> Wrapped:
        return Wrapped(jax.tree.map(jnp.copy, params), inner.init(params))

    return optax.GradientTransformation(init, inner.update)


# One of each kind of state: moments, factors, a tree for each parameter, new dims,
# masked parts, dicts, hyperparameters, and an object that is no GradientTransformation.
KINDS = (
    *("adam", "adafactor", "sm3", "lbfgs without line search", "partition", "masked"),
    *("named_chain", "inject_hyperparams", "MultiSteps"),
)
SOME = {name: TABLE[name] for name in KINDS}
SOME["wrapper of one's own"] = Case(lambda: wrapped(adam()))


class Node(nnx.Module):
    """A module with the parameters of a nested dict."""

    def __init__(self, tree: dict[str, Any]) -> None:
        for name, value in tree.items():
            is_node = isinstance(value, dict)
            setattr(self, name, Node(value) if is_node else nnx.Param(value))


def structs() -> dict[str, Any]:
    return jax.eval_shape(arrays)


@pytest.fixture(scope="module")
def layout_map() -> flm.LayoutMap:
    return rules()


# -------------------------------------------------------- the trees it is in


Host = tuple[Any, dict[str, Any], str]


def alone(tx: Any, params: Any) -> Host:
    return jax.eval_shape(tx.init, params), {"params": params, "tx": tx}, ""


def below_a_prefix(tx: Any, params: Any) -> Host:
    state = jax.eval_shape(tx.init, params)
    variables = {"params": params, "batch_stats": {"mean": struct(8, 8)}}
    return {"model": variables, "opt_state": state}, {"tx": tx}, "opt_state/"


def linen_train_state(tx: Any, params: Any) -> Host:
    make = functools.partial(TrainState.create, apply_fn=print, tx=tx)
    return jax.eval_shape(lambda p: make(params=p), params), {}, "opt_state/"


def nnx_train_state(tx: Any, params: Any) -> Host:
    graphdef, state = nnx.split(Node(params))
    make = functools.partial(nnx.TrainState.create, graphdef, tx=tx)
    return jax.eval_shape(lambda p: make(params=p), state), {}, "opt_state/"


def nnx_optimizer(tx: Any, params: Any) -> Host:
    model = Node(params)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    return {"model": model, "optimizer": optimizer}, {}, "optimizer/opt_state/"


def nnx_optimizer_alone(tx: Any, params: Any) -> Host:
    model = Node(params)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    return nnx.state(optimizer), {"params": model, "tx": tx}, "opt_state/"


def nnx_state_of_both(tx: Any, params: Any) -> Host:
    model = Node(params)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    return nnx.state((model, optimizer)), {"tx": tx}, "1/opt_state/"


def nnx_model_and_optimizer(tx: Any, params: Any) -> Host:
    return nnx.ModelAndOptimizer(Node(params), tx), {}, "opt_state/"


# Beside the parameters, in one dict, they all are in `test_optimizers`.
HOSTS: list[Callable[[Any, Any], Host]] = [
    alone,
    below_a_prefix,
    linen_train_state,
    nnx_train_state,
    nnx_optimizer,
    nnx_optimizer_alone,
    nnx_state_of_both,
    nnx_model_and_optimizer,
]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", SOME)
def test_every_dim_follows(name: str, host: Any, layout_map: flm.LayoutMap) -> None:
    case = SOME[name]
    params = case.params(jax.tree.map(jnp.asarray, arrays()))
    tree, options, prefix = host(case.make(), params)
    resolution = layout_map.resolve(tree, **options)
    check(resolution, prefix, case)


@pytest.mark.parametrize("name", SOME)
def test_moments_are_known_without_the_optimizer(
    name: str, layout_map: flm.LayoutMap
) -> None:
    """Paths and shapes alone; what they leave open is replicated and listed."""
    case = SOME[name]
    params = case.params(structs())
    state = jax.eval_shape(case.make().init, params)
    resolution = layout_map.resolve({"params": params, "opt_state": state})
    unknown = {path.removeprefix("opt_state/") for path in resolution.unmatched}
    for path, axes in expected_axes(case).items():
        if path not in unknown:
            assert axes_of(resolution[f"opt_state/{path}"]) == axes, path
    # Dims of one size, which shapes do not tell apart.
    squares = ("square", "stack/kernel")
    factors = [f"{part}/{name}" for part in ("v_row", "v_col") for name in squares]
    per_dim = ("mu/square/0", "mu/square/1", "mu/stack/kernel/1", "mu/stack/kernel/2")
    assert unknown <= {f"0/{path}" for path in (*factors, *per_dim, "weights_memory")}


# ------------------------------------------------------- state without params


def test_state_without_its_parameters_is_replicated_and_listed(
    layout_map: flm.LayoutMap,
) -> None:
    state = jax.eval_shape(adam().init, structs())
    optimizer = nnx.Optimizer(Node(arrays()), adam(), wrt=nnx.Param)
    layout_map = layout_map.copy()
    layout_map.optimizer["kernel"] = ("data", ...)
    for tree in (state, {"opt_state": state}, nnx.state(optimizer)):
        resolution = layout_map.resolve(tree)
        for leaf in resolution:
            if leaf.shape:
                assert leaf.layout.is_replicated and leaf.role == "optimizer"
                assert "pass params= and tx=" in str(leaf.fallback)
                assert leaf.path in resolution.unmatched


# -------------------------------------------------------------- several models


def test_two_models_with_the_same_paths_keep_their_own_state() -> None:
    models = {name: Node({"k": jnp.zeros((2, n))}) for name, n in (("a", 8), ("b", 16))}
    tx = optax.adam(1e-3)
    one, two = (nnx.Optimizer(models[name], tx, wrt=nnx.Param) for name in "ba")
    tree = {**models, "one": one, "two": two}
    resolution = mapped({"k": (None, "model")}).resolve(tree)
    for name, shard, owner in (("one", (2, 4), "b/k"), ("two", (2, 2), "k")):
        leaf = resolution[f"{name}/opt_state/0/mu/k"]
        assert leaf.reason == "follows parameter"
        assert (leaf.shard_shape, leaf.owner) == (shard, owner)


@pytest.mark.parametrize("abstract", [False, True])
def test_an_optimizer_is_for_the_model_that_it_is_named_after(abstract: bool) -> None:
    """Paths and shapes do not tell, and nothing has a layout yet."""
    layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("data=2,model=4"))
    layout_map["actor/"] = (None, "model")
    layout_map["critic/"] = ("model", None)
    models = {name: Node({"kernel": jnp.zeros((8, 8))}) for name in ("actor", "critic")}
    state = {
        name: nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        for name, model in models.items()
    }
    beside = {name: {"net": models[name], "tx": state[name]} for name in models}
    named = {**models, **{f"{name}_optimizer": state[name] for name in models}}
    for tree, below in ((beside, "/tx"), (named, "_optimizer")):
        make: Any = (lambda tree=tree: tree) if abstract else tree
        resolution = layout_map.resolve(make)
        for name, dims in (("actor", ((), ("model",))), ("critic", (("model",), ()))):
            leaf = resolution[f"{name}{below}/opt_state/0/mu/kernel"]
            assert leaf.reason == "follows parameter"
            assert leaf.layout.dims(2) == dims


def test_a_model_in_its_optimizer() -> None:
    class Own(nnx.Module):
        def __init__(self, axes: Any) -> None:
            self.kernel = nnx.Param(jnp.zeros((8, 8)), layout=axes)

    tx = optax.adafactor(1e-3, min_dim_size_to_factor=2)
    layouts: dict[str, Any] = {"a": ("data", "model"), "b": ("model", "data")}
    tree = {key: nnx.ModelAndOptimizer(Own(axes), tx) for key, axes in layouts.items()}
    layout_map = flm.LayoutMap(flm.DeviceMesh("data=2,model=4"), match="fullmatch")
    states = {key: nnx.state(node) for key, node in tree.items()}
    parameters = {
        leaf.path
        for leaf in layout_map.resolve(states, tx=tx)
        if leaf.role == "parameter"
    }
    assert parameters == {"a/model/kernel", "b/model/kernel"}
    resolution = layout_map.resolve(tree)
    for key, (row, column) in layouts.items():
        assert resolution[f"{key}/model/kernel"].layout.axes == (row, column)
        state = f"{key}/opt_state/0"
        assert resolution[f"{state}/v_row/kernel"].layout.axes == (row,)
        assert resolution[f"{state}/v_col/kernel"].layout.axes == (column,)
    # Rules of both kinds see the path within the model.
    layout_map["kernel"] = ("data", "model")
    layout_map.optimizer["kernel"] = (None, "model")
    node = nnx.ModelAndOptimizer(Own(None), tx)
    resolution = layout_map.resolve(node)
    assert resolution["model/kernel"].layout.axes == ("data", "model")
    assert resolution["opt_state/0/v_row/kernel"].layout.is_replicated
    assert resolution["opt_state/0/v_col/kernel"].layout.axes == ("model",)
    assert layout_map.place(node) is node
    assert node.model.kernel.sharding == resolution["model/kernel"].layout.sharding(2)


def test_only_some_parameters_are_trained(layout_map: flm.LayoutMap) -> None:
    class Part(nnx.Param):
        pass

    class Half(nnx.Module):
        def __init__(self) -> None:
            self.square = Part(jnp.zeros((8, 8)))
            self.frozen = nnx.Variable(jnp.zeros((8, 8)))

    half = Half()
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=2)
    tree = (half, nnx.Optimizer(half, tx, wrt=Part))
    leaf = layout_map.resolve(tree)["1/opt_state/0/v_col/square"]
    assert leaf.layout.axes == ("model",) and leaf.owner == "square"


@pytest.mark.parametrize("key", ["opt_state", "mine"])
def test_the_state_of_a_wrapper_that_is_not_of_optax(
    key: str, layout_map: flm.LayoutMap
) -> None:
    """`test_every_dim_follows` has it too, under the name `opt_state`."""
    inner = wrapped(optax.adafactor(1e-3, min_dim_size_to_factor=2))
    tx = optax.chain(optax.clip(1.0), inner)
    state = jax.eval_shape(tx.init, structs())
    resolution = layout_map.resolve({"params": structs(), key: state}, tx=tx)
    for row, axes in (("v_row", ("data",)), ("v_col", ("model",))):
        leaf = resolution[f"{key}/1/inner/0/{row}/square"]
        assert (leaf.reason, leaf.layout.axes) == ("follows parameter", axes)
    for name, axes in AXES.items():
        assert axes_of(resolution[f"{key}/1/copy/{name}"]) == axes


@pytest.mark.parametrize("made_of", ["params", "variables"])
@pytest.mark.parametrize("rest", [{}, {"batch_stats": {"mean": jnp.zeros(8)}}])
def test_ambiguous_factors_of_linen_variables(made_of: str, rest: Any) -> None:
    """Factors (4, 64) of a (4, 64, 64) kernel are its rows as well as its columns."""
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=2)
    params = {"k": jnp.zeros((4, 64, 64))}
    variables = {"params": params, **rest}
    state = tx.init({"params": params, "variables": variables}[made_of])
    # optax makes trees of their parameters: a dict with the same keys in it.
    below = "/params" if made_of == "variables" else ""
    layout_map = mapped({"k": (None, "data", "model"), "mean": None})
    trees: list[tuple[str, Any, dict[str, Any]]] = [
        ("", state, {"params": variables}),
        ("opt_state/", {"params": variables, "opt_state": state}, {}),
        ("opt_state/", {"model": variables, "opt_state": state}, {}),
        ("opt_state/", {**variables, "opt_state": state}, {}),
        ("s/opt_state/", {"s": {**variables, "opt_state": state}}, {}),
        *([("", state, {"params": params})] if made_of == "params" else []),
    ]
    for prefix, tree, options in trees:
        resolution = layout_map.resolve(tree, **options, tx=tx)
        for name, axis in (("v_row", "data"), ("v_col", "model")):
            leaf = resolution[f"{prefix}0/{name}{below}/k"]
            assert (leaf.reason, leaf.owner) == ("follows parameter", "k")
            assert leaf.layout.dims(2) == ((), (axis,)), prefix


def test_a_transformation_that_knows_the_type_of_its_tree() -> None:
    """A mask has the structure of the parameters, here lists: they are given as is."""
    params = {"params": [jnp.zeros((4, 64, 64)), jnp.zeros(4)]}
    inner = optax.adafactor(1e-3, min_dim_size_to_factor=2)
    tx = optax.masked(inner, [True, False])
    layout_map = flm.LayoutMap(flm.DeviceMesh("data=2,model=4"), strict=False)
    layout_map["0"] = (None, "data", "model")
    state = tx.init(params["params"])
    resolution = layout_map.resolve(state, params=params, tx=tx)
    (row,) = [leaf for leaf in resolution if "v_row/0" in leaf.path]
    assert row.layout.dims(2) == ((), ("data",))


@pytest.mark.parametrize("error", [KeyError, ValueError, RuntimeError])
def test_the_error_of_an_init_is_raised(error: type[Exception]) -> None:
    """Not hidden behind "unknown optimizer state": the mistake is the user's."""

    def init(params: Any) -> Any:
        raise error("no head")

    tx = optax.GradientTransformation(init, optax.identity().update)
    layout_map = flm.LayoutMap(flm.DeviceMesh("data=2,model=4"), strict=False)
    params = {"w": jnp.zeros((8, 8))}
    state = optax.adam(1e-3).init(params)
    for given in (params, {"params": params}):
        with pytest.raises(error, match="no head"):
            layout_map.resolve(state, params=given, tx=tx)


# ------------------------------------------------------------- rules for state


def zero_map(**options: Any) -> flm.LayoutMap:
    made = flm.LayoutMap(flm.DeviceMesh.abstract("data=2,model=4"), **options)
    made["kernel"] = (None, "model")
    return made


def both(shape: tuple[int, ...] = (8, 16), tx: Any = None) -> dict[str, Any]:
    params = {"up": {"kernel": struct(*shape)}}
    tx = tx or optax.adam(1e-3)
    return {"params": params, "opt_state": jax.eval_shape(tx.init, params)}


def test_optimizer_rules_name_dims_of_the_parameter() -> None:
    layout_map = zero_map()
    layout_map.optimizer["kernel"] = ("data", "model")
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=2)
    resolution = layout_map.resolve(both(tx=tx), tx=tx)
    assert resolution["opt_state/0/v_row/up/kernel"].layout.axes == ("data",)
    assert resolution["opt_state/0/v_col/up/kernel"].layout.axes == ("model",)


def test_sections_are_never_tried_on_each_other() -> None:
    layout_map = zero_map()
    layout_map.optimizer["mu"] = ("data", None)
    layout_map.activations["up"] = ("data",)
    layout_map.names["kernel"] = ("model",)
    resolution = layout_map.resolve(both())
    # The optimizer's rules see the path of the parameter, so "mu" is in none.
    assert resolution["opt_state/0/mu/up/kernel"].layout.axes == (None, "model")
    assert [rule.pattern for rule in resolution.unused_rules] == ["mu"]
    assert "optimizer rule 'mu' matches no leaf" in resolution.report()
    # Nor are any counted where they were not asked.
    params = layout_map.resolve({"params": both()["params"]})
    assert params.unused_rules == ()
    tx = optax.adam(1e-3)
    layout_map["never"] = None
    state = layout_map.resolve(both()["opt_state"], params=both()["params"], tx=tx)
    assert [rule.pattern for rule in state.unused_rules] == ["mu"]


def test_an_optimizer_rule_of_another_rank() -> None:
    layout_map = zero_map()
    layout_map.optimizer["kernel"] = ("data",)
    with pytest.raises(flm.errors.ResolveError) as caught:
        layout_map.resolve(both())
    assert "optimizer rule 1 'kernel' → ('data',) has 1 dims" in str(caught.value)
    assert "its parameter 'up/kernel' has 2" in str(caught.value)
    layout_map.optimizer.replace("kernel", flm.Rule("kernel", ("data",), rank="skip"))
    leaf = layout_map.resolve(both())["opt_state/0/mu/up/kernel"]
    assert leaf.reason == "follows parameter"


RULES_OF_BOTH: list[dict[str, Any]] = [
    {"up/kernel": ("data", "model")},
    {"kernel": ("data", None), "up": (None, "data")},
    {"kernel": (..., "model"), "up/kernel": ("data", None)},
    {"kernel": flm.TensorLayout(("data", None), memory_kind="pinned_host")},
    {"up": flm.Rule("up", ("data",), rank="skip"), "kernel": ("data", "model")},
    {"up": flm.Rule("up/kernel", (None, "data"), rank="skip"), "k": ("data", None)},
    {"k": flm.Rule("up/kernel", ("data",), rank="skip"), "up": (None, "data")},
]


@pytest.mark.parametrize("rules", RULES_OF_BOTH)
@pytest.mark.parametrize("overlap", ["error", "first", "last"])
@pytest.mark.parametrize("shape", [(8, 16), (8, 7)])
def test_optimizer_rules_lay_state_as_rules_lay_parameters(
    rules: Any, overlap: Any, shape: Any
) -> None:
    options: Any = {"overlap": overlap, "indivisible": "replicate"}
    if overlap == "error":
        options["indivisible"] = "error"
    plain = mapped(rules, **options)
    layout_map = mapped({"kernel": None}, **options)
    for rule in plain.freeze().rules:
        layout_map.optimizer.add(rule)
    try:
        expected = plain.resolve(both(shape)["params"])["up/kernel"]
    except flm.errors.ResolveError as error:
        with pytest.raises(flm.errors.ResolveError, match="optimizer rule") as caught:
            layout_map.resolve(both(shape))
        assert len(caught.value.problems) == 2 * len(error.problems)
        return
    resolution = layout_map.resolve(both(shape))
    leaf = resolution["opt_state/0/mu/up/kernel"]
    assert (leaf.reason, leaf.layout) == ("optimizer rule", expected.layout)
    assert (leaf.rule_number, leaf.rule) == (expected.rule_number, expected.rule)
    assert bool(leaf.fallback) is bool(expected.fallback)
    assert resolution["params/up/kernel"].layout.is_replicated


# ------------------------------------------------------------------ the traces


def test_state_of_a_square_kernel() -> None:
    def init(params: Any) -> dict[str, Any]:
        p = params["w"]
        return {
            "row": {"w": jnp.sum(p, 1)},
            "column": {"w": jnp.sum(p, 0)},
            "bare": {"w": jnp.zeros(p.shape[1:])},
            "both": {"w": jnp.zeros_like(p)},
            "turned": {"w": p.T},
            "more": {"w": jnp.stack([p] * 3)},
            "size_1": {"w": jnp.zeros((1,))},
            "history": jnp.zeros(5),
        }

    layout_map = flm.LayoutMap("data=2,model=4", strict=False)
    layout_map["w"] = ("data", "model")
    tx = optax.GradientTransformation(init, optax.identity().update)
    params = {"w": struct(8, 8)}
    state = jax.eval_shape(init, params)
    resolution = layout_map.resolve(state, params=params, tx=tx)
    assert {leaf.path: axes_of(leaf) for leaf in resolution} == {
        "bare/w": (None,),
        "both/w": ("data", "model"),
        "column/w": ("model",),
        "history": (None,),
        "more/w": (None, "data", "model"),
        "row/w": ("data",),
        "size_1/w": (None,),
        "turned/w": ("model", "data"),
    }
    assert resolution.unmatched == ("bare/w", "history")
    assert "no known relation to the parameter's shape (8, 8)" in str(
        resolution["bare/w"].fallback
    )
    assert "belongs to no parameter" in str(resolution["history"].fallback)


def test_the_optimizer_of_a_part_of_a_model_and_of_one_parameter() -> None:
    rules = {"encoder": ("data", "model"), "decoder": ("model", None)}
    layout_map = mapped(rules, strict=False)
    params = {name: {"w": struct(8, 8)} for name in rules}
    state = jax.eval_shape(adam().init, params["encoder"])
    tree = {"params": params, "encoder_optimizer": state}
    moment = layout_map.resolve(tree)["encoder_optimizer/0/mu/w"]
    assert (moment.owner, axes_of(moment)) == ("encoder/w", ("data", "model"))
    param = struct(8, 8)
    state = jax.eval_shape(adam().init, param)
    resolution = mapped({".*": ("data", "model")}).resolve(state, params=param)
    assert resolution["0/mu"].layout.axes == ("data", "model")


def test_an_init_that_sharding_cannot_follow() -> None:
    """A product of parameters has no sharding; shapes still tell of the others."""

    def init(params: Any) -> Any:
        gram = params["w"] @ params["w"].T
        return {"gram": {"w": gram}, "mu": {"w": jnp.zeros(params["w"].shape)}}

    params = {"w": struct(8, 4)}
    layout_map = flm.LayoutMap("data=2,model=4", strict=False)
    layout_map["w"] = ("data", "model")
    tx = optax.GradientTransformation(init, optax.identity().update)
    state = jax.eval_shape(init, params)
    resolution = layout_map.resolve(state, params=params, tx=tx)
    assert axes_of(resolution["mu/w"]) == ("data", "model")
    assert axes_of(resolution["gram/w"]) == (None, None)


# ------------------------------------------ parameters that are several or not there


def twins() -> tuple[flm.LayoutMap, dict[str, Any]]:
    """Two models with the same paths and shapes, and different layouts."""
    layout_map = flm.LayoutMap(flm.DeviceMesh((2, 4), ("data", "model")))
    layout_map["actor/dense/kernel"] = (None, "model")
    layout_map["critic/dense/kernel"] = ("model", None)
    params = {"dense": {"kernel": jnp.ones((8, 8))}}
    return layout_map, {"actor": params, "critic": params}


def test_state_that_may_belong_to_either_of_two_models_is_not_guessed() -> None:
    layout_map, models = twins()
    state = optax.adam(1e-3).init(models["critic"])
    resolution = layout_map.resolve({**models, "optimizer": state})
    leaf = resolution["optimizer/0/mu/dense/kernel"]
    assert leaf.reason == "unknown optimizer state" and leaf.layout.is_replicated
    assert leaf.fallback == (
        "may belong to 'actor/dense/kernel' or 'critic/dense/kernel', which have "
        "different layouts; name the optimizer after its model, as in "
        "'policy_optimizer'"
    )
    assert leaf.path in resolution.unmatched
    # Arrays that lie on the mesh already stay as they are.
    placed = layout_map.place(models)
    live = flm.create_optimizer(placed["critic"], optax.adam(1e-3), layout_map)
    leaf = layout_map.resolve({**placed, "optimizer": live})[leaf.path]
    assert (leaf.reason, leaf.layout.axes) == ("own layout", ("model", None))
    # Where both have one layout there is nothing to guess.
    del layout_map["critic/dense/kernel"]
    layout_map["critic/dense/kernel"] = (None, "model")
    resolution = layout_map.resolve({**models, "optimizer": state})
    leaf = resolution["optimizer/0/mu/dense/kernel"]
    assert leaf.reason == "follows parameter"
    assert leaf.layout.axes == (None, "model")


def test_state_of_an_unknown_kind_keeps_the_layout_that_it_has() -> None:
    layout_map = flm.LayoutMap(flm.DeviceMesh((2, 4), ("data", "model")))
    layout_map["kernel"] = (None, "model")
    params = layout_map.place({"dense": {"kernel": jnp.ones((128, 128))}})
    state = flm.create_optimizer(params, optax.adafactor(1e-3), layout_map)
    # Nothing in this tree tells rows from columns, but the arrays lie right already.
    resolution = layout_map.resolve({"params": params, "opt_state": state})
    column = resolution["opt_state/0/v_col/dense/kernel"]
    assert (column.reason, column.layout.axes) == ("own layout", ("model",))
    assert column.path not in resolution.unmatched
    row = resolution["opt_state/0/v_row/dense/kernel"]
    assert row.layout.is_replicated
    # A later state elsewhere is not answered from the cache of the first.
    moved = jax.device_put(state, jax.devices()[0])
    again = layout_map.resolve({"params": params, "opt_state": moved})
    assert again["opt_state/0/v_col/dense/kernel"].layout.is_replicated


def test_rules_pass_over_the_state_of_scalars() -> None:
    """As they pass over scalars; lbfgs remembers several of each."""
    layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("data=2,model=4"), strict=False)
    layout_map.optimizer[".*"] = flm.TensorLayout((..., "data"))
    params = {"scale": jnp.zeros(()), "w": jnp.zeros((4, 4))}
    state = optax.lbfgs(1e-3, memory_size=2, linesearch=None).init(params)
    resolution = layout_map.resolve({"params": params, "opt_state": state})
    memory = "opt_state/0/diff_params_memory"
    assert resolution[f"{memory}/scale"].shard_shape == (2,)
    assert resolution[f"{memory}/w"].shard_shape == (2, 4, 2)
