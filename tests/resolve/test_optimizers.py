"""Every optimizer of the installed optax: its state has the right, stable sharding.

A name that optax exports and that is neither in the table of `optimizers` nor among
those that make no optimizer fails a test, so that a new release is noticed.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, get_origin

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from optax import contrib
from optimizers import (
    AGGREGATING,
    ALL,
    AXES,
    TABLE,
    Case,
    adam,
    arrays,
    check,
    momentum,
    named,
    rules,
)

import flax_layoutmap as flm
from flax_layoutmap._core.jax_internals import executables_of
from flax_layoutmap._show.table import human_bytes

# What optax is about to drop must work for as long as it is there.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:optax")

# Names that optax exports and that make no optimizer, and why they do not.
NO_OPTIMIZERS: dict[str, str] = {
    "a function of the step": """
        constant_schedule cosine_decay_schedule cosine_onecycle_schedule
        exponential_decay join_schedules linear_onecycle_schedule linear_schedule
        piecewise_constant_schedule piecewise_interpolate_schedule polynomial_schedule
        sgdr_schedule warmup_constant_schedule warmup_cosine_decay_schedule
        warmup_exponential_decay_schedule WrappedSchedule
    """,
    "arithmetic on updates, parameters or counters": """
        apply_updates bias_correction global_norm incremental_update periodic_update
        safe_increment safe_int32_increment safe_norm safe_root_mean_squares
        scale_gradient update_infinity_moment update_moment update_moment_per_elem_norm
        per_example_global_norm_clip per_example_layer_norm_clip tree_map_params
        transforms.unitwise_clip transforms.unitwise_norm
        contrib.schedule_free_eval_params
        experimental.aggregating.get_batch_size_from_per_elt_updates
        experimental.aggregating.get_unbiased_mean_and_variance_ema
    """,
    "linear algebra and distributions": """
        matrix_inverse_pth_root multi_normal nnls power_iteration
    """,
    "changes how gradients are computed": "microbatch value_and_grad_from_state",
    "a condition that wrappers take": "skip_large_updates skip_not_finite",
    "a part of every optimizer without state": "init_empty_state",
    "a type for annotations": """
        ShouldSkipUpdateFunction TransformInitFn TransformUpdateExtraArgsFn
        TransformUpdateFn transforms.ConditionFn
        experimental.aggregating.AggregatorUpdateFn
    """,
    "imported from typing": """
        experimental.aggregating.Any experimental.aggregating.NamedTuple
        experimental.aggregating.Protocol experimental.aggregating.Sequence
    """,
}


def exported(namespace: str) -> list[str]:
    """Names below `optax.<namespace>` that may be constructors of optimizers.

    Not these: modules, records (the states), types, what `optax.losses` exports.
    """
    module = named(namespace) if namespace else optax
    found = []
    for name in dir(module):
        value = getattr(module, name)
        if (
            name.startswith("_")
            or not callable(value)
            or get_origin(value) is not None
            or (isinstance(value, type) and issubclass(value, tuple))
            or hasattr(optax.losses, name)
        ):
            continue
        found.append(f"{namespace}.{name}" if namespace else name)
    return found


def not_in_the_table(names: Iterable[str]) -> list[str]:
    """Those of some names that neither the table nor the list has."""
    known = {name.split(" ")[0] for name in TABLE}
    known |= {name for names in NO_OPTIMIZERS.values() for name in names.split()}
    # `optax.transforms` exports again what `optax` does.
    return [n for n in names if not {n, n.removeprefix("transforms.")} & known]


@pytest.mark.parametrize("namespace", ["", "contrib", "transforms", AGGREGATING])
def test_every_optimizer_is_in_the_table(namespace: str) -> None:
    if named(namespace) is not None or not namespace:
        names = exported(namespace)
        assert len(names) > 5
        assert not not_in_the_table(names)


def test_a_new_optimizer_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contrib, "shampoo", lambda rate: adam(), raising=False)
    assert not_in_the_table(exported("contrib")) == ["contrib.shampoo"]
    monkeypatch.delitem(TABLE, "scale_by_adam")
    assert not_in_the_table(exported("")) == ["scale_by_adam"]


# ------------------------------------------------------------ where the state lies


def loss(params: Any) -> jax.Array:
    leaves = jax.tree.leaves(params)
    return jnp.sum(jnp.stack([jnp.sum(x**2 / 2 + x**4 / 4 - x) for x in leaves]))


def slope(params: Any) -> Any:
    """The gradient of the loss, written out: tracing it for every optimizer is slow."""
    return jax.tree.map(lambda leaf: leaf + leaf**3 - 1, params)


def update(case: Case, tx: Any, params: Any, state: Any) -> tuple[Any, Any]:
    """One step of one optimizer."""
    grads = slope(params)
    functions = {"value_fn": loss, "obj_fn": loss, "grad_fn": lambda p, step: slope(p)}
    extra = {name: functions[name] for name in case.extra if name in functions}
    if "value" in case.extra:
        extra["value"] = loss(params)
    if "grad" in case.extra:
        extra["grad"] = grads
    updates, state = tx.update(case.grads(grads), state, params, **extra)
    return optax.apply_updates(params, updates), state


def start(case: Case, tx: Any, params: Any) -> tuple[Any, Any]:
    """Parameters and state in the structure that they have from then on."""
    params = case.params(params)
    state = tx.init(params)
    if case.grows:
        params, state = update(case, tx, params, state)
    # optax's line searches start with Python numbers: the first update changes their
    # (weak) types, and any jit compiles twice.
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype), (params, state))


@pytest.mark.parametrize("name", TABLE)
def test_every_dim_of_the_state_follows(name: str) -> None:
    case = TABLE[name]
    tx = case.make()
    params, state = jax.eval_shape(functools.partial(start, case, tx), arrays())
    resolution = rules().resolve({"params": params, "opt_state": state}, tx=tx)
    check(resolution, "opt_state/", case)
    report = resolution.report(fold=False)
    assert all(path in report for path in resolution.unmatched)


# ------------------------------------------------------------------- three updates


def is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


@functools.cache
def quick() -> dict[str, Any]:
    """Options with which XLA compiles several times faster, of those that it knows."""
    known: dict[str, Any] = {}
    for option in [
        {"xla_backend_optimization_level": 0},
        {"xla_cpu_use_fusion_emitters": False},
        {"xla_cpu_parallel_codegen_split_count": 1},
    ]:
        try:
            jax.jit(lambda: 1, compiler_options=option)()
        except jax.errors.JaxRuntimeError:
            continue  # another version of XLA
        known |= option
    return known


GROUP = 12
GROUPS = [list(TABLE)[at : at + GROUP] for at in range(0, len(TABLE), GROUP)]
# On the lowest versions, the groups of these will do.
COMMON = {"adamw", "adafactor", "sgd"}


def _group(names: list[str]) -> Any:
    """A group; slow where none of its optimizers is among the common ones."""
    marks = () if COMMON & {*names} else (pytest.mark.slow,)
    return pytest.param(names, id=names[0], marks=marks)


@pytest.mark.parametrize("names", [_group(names) for names in GROUPS])
def test_three_updates_agree_and_nothing_moves(
    names: list[str], mesh: flm.DeviceMesh
) -> None:
    """Sharded against one device; several optimizers in one program: it is cheaper."""
    optimizers = {name: TABLE[name].make() for name in names}

    def begin(params: Any) -> Any:
        return {n: start(TABLE[n], tx, params) for n, tx in optimizers.items()}

    def step(trees: Any) -> Any:
        traces.append(trees)
        return {n: update(TABLE[n], tx, *trees[n]) for n, tx in optimizers.items()}

    traces: list[Any] = []

    # The table's own test has kernels that only their layouts tell apart; here one with
    # two dims and a stack of square ones are enough.
    given = {name: x for name, x in arrays().items() if name not in ("up", "square")}
    abstract = jax.eval_shape(begin, given)
    shardings = {}
    for name, tx in optimizers.items():
        params, state = abstract[name]
        tree = {"params": params, "opt_state": state}
        both = rules(mesh).shardings(tree, tx=tx)
        shardings[name] = both["params"], both["opt_state"]
    alone = jax.jit(begin)(given)
    sharded = jax.device_put(alone, shardings)
    reference = jax.jit(step, compiler_options=quick())
    program: Any = jax.jit(
        step,
        in_shardings=(shardings,),
        out_shardings=shardings,
        compiler_options=quick(),
    )
    for _ in range(3):
        alone, sharded = reference(alone), program(sharded)
    found = jax.tree_util.tree_leaves_with_path(sharded)
    # With typed keys, JAX counts a second entry without compiling anything.
    assert len(traces) == 2
    assert executables_of(program) <= 1 + any(is_key(leaf) for _, leaf in found)
    for (path, leaf), expected, sharding in zip(
        found, jax.tree.leaves(alone), jax.tree.leaves(shardings), strict=True
    ):
        where = jax.tree_util.keystr(path)
        assert leaf.sharding == sharding, where
        if is_key(leaf):
            leaf, expected = jax.random.key_data(leaf), jax.random.key_data(expected)
        np.testing.assert_allclose(
            np.asarray(leaf, np.complex64),
            np.asarray(expected, np.complex64),
            rtol=1e-4,
            atol=1e-5,
            err_msg=where,
        )


# ------------------------------------------- rules for the state; copies in the state


class Copied(NamedTuple):
    """A copy of the parameters, beside the state of an optimizer."""

    copy: Any
    inner: Any


def master_copy(inner: Any) -> Any:
    """Mixed precision: the optimizer sees a float32 copy of bfloat16 parameters."""

    def wide(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)

    def init(params: Any) -> Any:
        return Copied(wide(params), inner.init(wide(params)))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        updates, rest = inner.update(wide(updates), state.inner, state.copy)
        copy = optax.apply_updates(state.copy, updates)
        updates = jax.tree.map(
            lambda new, old: new.astype(old.dtype) - old, copy, params
        )
        return updates, Copied(copy, rest)

    return optax.GradientTransformation(init, update)


def average(inner: Any) -> Any:
    """A moving average of the parameters, for evaluation."""

    def init(params: Any) -> Any:
        return Copied(params, inner.init(params))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        updates, rest = inner.update(updates, state.inner, params)
        new = optax.apply_updates(params, updates)
        return updates, Copied(optax.incremental_update(new, state.copy, 0.1), rest)

    return optax.GradientTransformation(init, update)


def narrow(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)


# Name → the optimizer, and the parameters as it wants them.
SHARDED_STATE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "adam": (adam, lambda params: params),
    "momentum": (momentum, lambda params: params),
    "adafactor": (TABLE["adafactor"].make, lambda params: params),
    "accumulation": (TABLE["MultiSteps"].make, lambda params: params),
    "master copy": (lambda: master_copy(adam()), narrow),
    "average": (lambda: average(momentum()), lambda params: params),
}


def zero_rules(mesh: flm.DeviceMesh) -> flm.LayoutMap:
    """Parameters over `model` alone; their state over `data` too."""
    made = flm.LayoutMap(mesh, strict=False)
    made["stack"] = (None, None, "model")
    made["bias"] = ("model",)
    made["square|gate"] = (None, "model")
    made.optimizer["stack"] = (None, "data", "model")
    made.optimizer["bias"] = (("model", "data"),)
    made.optimizer["square|gate"] = ("data", "model")
    return made


def check_bytes(layout_map: flm.LayoutMap, state: TrainState, most: float) -> None:
    """The report says what the devices hold of the state, and what that saves.

    Half of what it was, but for counters, placeholders and Adafactor's own columns.
    """
    planned = layout_map.resolve(state)
    said = planned.totals("optimizer").bytes_per_device
    held: dict[Any, int] = {}
    for leaf in jax.tree.leaves(state.opt_state):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    assert set(held.values()) == {said}
    rows = [row for row in planned.to_json()["leaves"] if row["role"] == "optimizer"]
    assert sum(row["bytes_per_device"] for row in rows) == said
    (line,) = [
        line
        for line in planned.report().splitlines()
        if line.startswith(f"optimizer state: {len(rows)} leaves, ")
    ]
    assert f", {human_bytes(said)} per device; " in line
    bare = layout_map.copy()
    bare.optimizer.clear()
    assert said < most * bare.resolve(state).totals("optimizer").bytes_per_device


def axes_in(array: jax.Array) -> set[str]:
    spec = array.sharding.spec  # pyright: ignore[reportAttributeAccessIssue]
    return {axis for entry in spec if entry for axis in np.atleast_1d(entry).tolist()}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED_STATE)
def test_state_sharded_over_data_while_parameters_are_not(
    name: str, mesh: flm.DeviceMesh
) -> None:
    make, wanted = SHARDED_STATE[name]
    given = {key: leaf for key, leaf in arrays().items() if key != "up"}

    def begin(params: Any) -> TrainState:
        return TrainState.create(apply_fn=print, params=wanted(params), tx=make())

    def step(state: Any) -> Any:
        return state.apply_gradients(grads=slope(state.params))

    layout_map = zero_rules(mesh)
    alone, sharded = jax.jit(begin)(given), flm.create(begin, layout_map, given)
    check_bytes(layout_map, sharded, most=0.85 if name == "adafactor" else 0.55)
    reference = jax.jit(step, compiler_options=quick())
    program = flm.jit(step, layout_map=layout_map)
    resolution = layout_map.resolve(sharded)
    for _ in range(3):
        alone, sharded = reference(alone), program(sharded)
        # Nothing drifts: neither do parameters move to the axes of their state.
        for leaf, sharding in zip(
            jax.tree.leaves(sharded), resolution.sharding_list(), strict=True
        ):
            assert leaf.sharding == sharding
    assert program._cache_size() == 1
    assert all(axes_in(p) <= {"model"} for p in jax.tree.leaves(sharded.params))
    arrays_of_state = [x for x in jax.tree.leaves(sharded.opt_state) if x.size > 1]
    assert any("data" in axes_in(leaf) for leaf in arrays_of_state)
    whole = [x for x in arrays_of_state if "data" not in axes_in(x)]
    assert not whole or name == "adafactor"
    if name == "master copy":
        assert {x.dtype for x in jax.tree.leaves(sharded.params)} == {
            np.dtype(jnp.bfloat16)
        }
        assert {x.dtype for x in arrays_of_state} == {np.dtype(np.float32)}
    for leaf, expected in zip(
        jax.tree.leaves(sharded), jax.tree.leaves(alone), strict=True
    ):
        np.testing.assert_allclose(
            np.asarray(leaf, np.float32),
            np.asarray(expected, np.float32),
            rtol=1e-2 if leaf.dtype == jnp.bfloat16 else 1e-4,
            atol=1e-5,
        )


def test_state_of_an_nnx_model_over_data(mesh: flm.DeviceMesh) -> None:
    layout_map = flm.LayoutMap(mesh)
    layout_map["kernel"] = (None, "model")
    layout_map["bias"] = ("model",)
    layout_map.optimizer["kernel"] = ("data", "model")
    model = flm.create(lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0)), layout_map)
    optimizer = flm.create_optimizer(model, adam(), layout_map=layout_map)

    @flm.jit(layout_map=layout_map)
    def step(model: nnx.Linear, optimizer: Any) -> None:
        optimizer.update(model, nnx.state(model, nnx.Param))

    for _ in range(3):
        step(model, optimizer)
        assert model.kernel.sharding.spec == jax.P(None, "model")
        mu = optimizer.opt_state[0].mu
        assert mu["kernel"].sharding.spec == jax.P("data", "model")
        assert mu["bias"].sharding.spec == jax.P("model")
    assert step._cache_size() == 1


class WithAverage(TrainState):
    """A TrainState that keeps an average of its parameters beside them."""

    ema_params: Any = None


def test_an_average_beside_the_parameters_lies_as_they_do() -> None:
    def begin(params: Any) -> WithAverage:
        return WithAverage.create(
            apply_fn=print, params=params, tx=adam(), ema_params=params
        )

    resolution = rules().resolve(jax.eval_shape(begin, arrays()))
    for name in ALL:
        average = resolution[f"ema_params/{name}"]
        assert average.layout == resolution[f"params/{name}"].layout
        moment = resolution[f"opt_state/0/mu/{name}"]
        assert moment.owner == name and moment.layout.axes == AXES[name]
