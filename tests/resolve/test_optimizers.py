"""Every optimizer of the installed optax: its state lies right, and stays there.

One table: constructor → the axes that every leaf of its state must have, written down
by hand, dim by dim. A name that optax exports and that is neither in the table nor
among those that make no optimizer fails a test, so that a new release is noticed.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, get_origin

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import optax.transforms
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from optax import contrib

import flax_layoutmap as flm

# What optax is about to drop must work for as long as it is there.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:optax")

Axes = tuple[Any, ...]

SHAPES: dict[str, tuple[int, ...]] = {
    "bias": (16,),
    "gate/kernel": (8, 16),
    "scale": (),
    "square": (8, 8),
    "stack/kernel": (2, 8, 16),
    "up/kernel": (8, 16),
}
# Two kernels of one shape with different layouts, so that shapes alone cannot tell.
AXES: dict[str, Axes] = {
    "bias": ("model",),
    "gate/kernel": ("model", "data"),
    "scale": (),
    "square": ("data", "model"),
    "stack/kernel": (None, "data", "model"),
    "up/kernel": (None, "model"),
}
ALL = [name for name in AXES if AXES[name]]
MATRICES = [name for name in ALL if len(AXES[name]) == 2]
KERNELS = [name for name in ALL if len(AXES[name]) > 1]
OTHERS = [name for name in ALL if name not in MATRICES]


def same(prefixes: str, names: Any = ALL) -> dict[str, Axes]:
    """Leaves below each prefix that have the shape and layout of their parameter."""
    return {f"{p}/{name}": AXES[name] for p in prefixes.split() for name in names}


def stacked(prefixes: str) -> dict[str, Axes]:
    """Several copies of each parameter, in a new first dim."""
    return {
        f"{p}/{name}": (None, *AXES[name]) for p in prefixes.split() for name in AXES
    }


def picked(prefix: str, dims: dict[str, tuple[int | None, ...]]) -> dict[str, Axes]:
    """Leaves made of some dims of their parameter, and of others (None)."""
    return {
        f"{prefix}/{name}": tuple(None if d is None else AXES[name][d] for d in own)
        for name, own in dims.items()
    }


def factored(prefix: str) -> dict[str, Axes]:
    """Adafactor: without the largest dim, without the second largest; biases whole."""
    rows = {"square": (0,), "gate/kernel": (0,), "up/kernel": (0,)}
    columns = {"square": (1,), "gate/kernel": (1,), "up/kernel": (1,)}
    return (
        picked(f"{prefix}v_row", {**rows, "stack/kernel": (0, 1)})
        | picked(f"{prefix}v_col", {**columns, "stack/kernel": (0, 2)})
        | same(f"{prefix}v", ["bias"])
    )


def per_dim(prefix: str) -> dict[str, Axes]:
    """SM3: a vector for each dim."""
    return {
        f"{prefix}/{name}/{dim}": (axis,)
        for name in ALL
        for dim, axis in enumerate(AXES[name])
    }


def low_rank(prefix: str) -> dict[str, Axes]:
    """GaLore with rank 4: matrices are projected along their longer dim (or dim 0)."""
    long = {"square": (0, None), "gate/kernel": (1, None), "up/kernel": (1, None)}
    short = {"square": (None, 1), "gate/kernel": (0, None), "up/kernel": (0, None)}
    moments: dict[str, Axes] = {}
    for moment in ("mu", "nu"):
        inner = f"{prefix}base_optimizer_state/{moment}"
        moments |= picked(inner, short) | same(inner, OTHERS)
    return picked(f"{prefix}projector", long) | moments


@dataclasses.dataclass(frozen=True)
class Case:
    """One optimizer of the table.

    Attributes:
        make: makes it.
        state: path → axes, for every leaf of its state that has more than one element
            and belongs to a parameter.
        listed: leaves that belong to none: replicated, and listed as unmatched.
        extra: what else its update takes: the loss, its gradient, functions.
        grads: its gradients, of those of the parameters.
        grows: whether its state gets leaves in the first update only.
        params: the parameters as its update wants them.
    """

    make: Callable[[], Any]
    state: dict[str, Axes]
    listed: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    grads: Callable[[Any], Any] = lambda grads: grads
    grows: bool = False
    params: Callable[[Any], Any] = lambda params: params


RATE = 1e-2
TABLE: dict[str, Case] = {}


def named(name: str) -> Any:
    """What optax exports under a name such as "contrib.muon"; None for nothing."""
    found: Any = optax
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def row(name: str, make: Callable[[], Any], *state: Any, **more: Any) -> None:
    """Adds an optimizer to the table, if the installed optax has it.

    Args:
        name: the name of its constructor, and what is special, after a blank.
        make: makes it.
        *state: prefixes of leaves that are like the parameters, and other leaves.
        **more: other fields of the Case.
    """
    if named(name.split(" ")[0]) is not None:
        leaves: dict[str, Axes] = {}
        for part in state:
            leaves |= same(part) if isinstance(part, str) else part
        TABLE[name] = Case(make, leaves, **more)


def rows(names: str, arguments: tuple[Any, ...], *state: Any, **more: Any) -> None:
    """Adds optimizers that take the same arguments and have the same state."""
    for name in names.split():
        row(name, lambda name=name: named(name)(*arguments), *state, **more)


def adam() -> Any:
    return optax.adam(RATE)


def momentum() -> Any:
    return optax.sgd(RATE, momentum=0.9)


def is_kernel(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def by_part(params: Any) -> Any:
    return jax.tree.map(
        lambda inside: "kernel" if inside else "rest", is_kernel(params)
    )


def by_parts() -> dict[str, Any]:
    return {"kernel": adam(), "rest": momentum()}


def two_examples(grads: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.stack([leaf, leaf / 2]), grads)


def no_scalars(params: Any) -> Any:
    """For optimizers of optax whose update fails on scalars, or changes their shape."""
    return {name: leaf for name, leaf in params.items() if name != "scale"}


def matrices_only(params: Any) -> Any:
    return {name: params[name] for name in params if name in ("gate", "square", "up")}


def lookahead() -> Any:
    """`optax.lookahead` over a dict of the two copies of the parameters."""
    inner: Any = optax.lookahead(adam(), 2, 0.5)

    def pair(params: Any) -> Any:
        return optax.LookaheadParams(**params)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        updates, state = inner.update(updates, state, pair(params))
        return updates._asdict(), state

    def init(params: Any) -> Any:
        return inner.init(pair(params))

    return optax.GradientTransformation(init, update)


# ------------------------------------------------------------------- the aliases

MOMENTS = "0/mu 0/nu"

rows(
    "adabelief adam adamax adamaxw adamw lamb nadam nadamw radam yogi "
    "contrib.acprop contrib.adopt",
    (RATE,),
    MOMENTS,
)
rows("adadelta", (RATE,), "1/e_g 1/e_x")
rows("adagrad", (RATE,), "0/sum_of_squares")
rows("adan", (RATE,), "0/m 0/v 0/n 0/g")
rows("amsgrad", (RATE,), MOMENTS, "0/nu_max")
rows("fromage sgd sign_sgd", (RATE,))
rows("lars", (RATE,), "3/trace")
rows("lion novograd", (RATE,), "0/mu")
rows("optimistic_adam optimistic_adam_v2", (RATE,), MOMENTS, "1/previous_gradient")
rows("optimistic_gradient_descent", (RATE,), "0/previous_gradient")
rows("rmsprop", (RATE,), "0/nu")
rows("rprop", (RATE,), "0/step_sizes 0/prev_updates")
rows("signum", (RATE,), "0/ema")
rows("sm3", (RATE,), per_dim("0/mu"), "0/nu", params=no_scalars)
rows("polyak_sgd", (), extra=("value",))
row("sgd momentum", momentum, "0/trace")
row("noisy_sgd", lambda: optax.noisy_sgd(RATE, key=0))
row("adam bfloat16", lambda: optax.adam(RATE, mu_dtype=jnp.bfloat16), MOMENTS)
row("adamw masked", lambda: optax.adamw(RATE, mask=is_kernel), MOMENTS)
row("adam schedule", lambda: optax.adam(optax.linear_schedule(1, 0, 9)), MOMENTS)
row(
    "rmsprop centered",
    lambda: optax.rmsprop(RATE, centered=True, momentum=0.9),
    "0/mu 0/nu 2/trace",
)
row(
    "adafactor",
    lambda: optax.adafactor(RATE, min_dim_size_to_factor=2, momentum=0.9),
    factored("0/"),
    "4/ema",
)
row("adafactor unfactored", lambda: optax.adafactor(RATE), "0/v")
LBFGS = stacked("0/diff_params_memory 0/diff_updates_memory")
row(
    "lbfgs",
    lambda: optax.lbfgs(RATE, memory_size=2),
    "0/params 0/updates 2/grad",
    LBFGS,
    listed=("0/weights_memory",),
    extra=("value", "grad", "value_fn"),
)
row(
    "lbfgs without line search",
    lambda: optax.lbfgs(RATE, memory_size=2, linesearch=None),
    "0/params 0/updates",
    LBFGS,
    listed=("0/weights_memory",),
)

rows("contrib.ademamix", (RATE,), "0/m1 0/m2 0/nu")
rows("contrib.simplified_ademamix", (RATE,), "0/m 0/n")
rows(
    "contrib.cocob",
    (RATE,),
    "2/init_particles 2/cumulative_gradients 2/scale 2/subgradients 2/reward",
)
rows("contrib.dadapt_adamw", (RATE,), "exp_avg exp_avg_sq grad_sum")
rows("contrib.dog contrib.dowg", (RATE,), "1/init_params")
rows("contrib.madgrad", (RATE,), "1/grad_sum_sq 1/s 1/x0")
rows("contrib.momo", (RATE,), "exp_avg", extra=("value",))
rows("contrib.momo_adam", (RATE,), "exp_avg exp_avg_sq", extra=("value",))
rows("contrib.prodigy", (RATE,), "exp_avg exp_avg_sq grad_sum params0")
rows("contrib.schedule_free_sgd", (RATE,), "z")
rows("contrib.schedule_free_adamw", (RATE,), "base_optimizer_state/0/nu z")
rows(
    "contrib.sophia",
    (RATE,),
    MOMENTS,
    listed=("0/hessian_fn_state/key",),
    extra=("obj_fn",),
)
rows(
    "contrib.muon",
    (RATE,),
    same("inner_states/muon/inner_state/0/mu", MATRICES),
    same("inner_states/adam/inner_state/0/mu", OTHERS),
    same("inner_states/adam/inner_state/0/nu", OTHERS),
    listed=("inner_states/muon/inner_state/0/ns_coeffs",),
)
row(
    "contrib.dpsgd",
    lambda: contrib.dpsgd(RATE, 1.0, 0.1, 0, momentum=0.9),
    "1/trace",
    grads=two_examples,
)
row("contrib.galore", lambda: named("contrib.galore")(RATE, rank=4), low_rank("0/"))

# -------------------------------------------------------------------- the parts

PLAIN = """
    centralize identity keep_params_nonnegative scale_by_learning_rate
    scale_by_param_block_norm scale_by_param_block_rms scale_by_sign
    scale_by_trust_ratio set_to_zero zero_nans normalize_by_update_norm
    add_decayed_weights contrib.normalize
"""
rows(PLAIN, ())
rows("adaptive_grad_clip clip clip_by_block_rms clip_by_global_norm scale", (0.5,))
rows(
    "scale_by_adam scale_by_adamax scale_by_belief scale_by_radam scale_by_stddev "
    "scale_by_yogi contrib.scale_by_acprop contrib.scale_by_adopt",
    (),
    "mu nu",
)
rows("scale_by_adadelta", (), "e_g e_x")
rows("scale_by_adan", (), "m v n g")
rows("scale_by_amsgrad", (), "mu nu nu_max")
rows("scale_by_distance_over_gradients", (), "init_params", params=no_scalars)
rows("scale_by_lion scale_by_novograd", (), "mu")
rows("scale_by_optimistic_gradient", (), "previous_gradient")
rows("scale_by_rms", (), "nu")
rows("scale_by_rprop", (RATE,), "step_sizes prev_updates")
rows("scale_by_rss", (), "sum_of_squares")
rows("scale_by_sm3", (), per_dim("mu"), "nu", params=no_scalars)
rows("scale_by_polyak", (), extra=("value",))
rows("contrib.reduce_on_plateau", (), extra=("value",))
rows("contrib.scale_by_ademamix", (), "m1 m2 nu")
rows("contrib.scale_by_simplified_ademamix", (), "m n")
rows(
    "contrib.scale_by_cocob",
    (),
    "init_particles cumulative_gradients scale subgradients reward",
)
rows("contrib.scale_by_madgrad", (RATE,), "grad_sum_sq s x0")
rows(
    "contrib.hutchinson_estimator_diag_hessian",
    (),
    listed=("key",),
    extra=("obj_fn",),
)
rows("ema", (0.9,), "ema")
rows("trace", (0.9,), "trace")
rows("apply_every", (2,), "grad_acc")
row("add_noise", lambda: optax.add_noise(0.1, 0.1, key=0))
row("scale_by_schedule", lambda: optax.scale_by_schedule(lambda count: 0.1))
row(
    "scale_by_factored_rms",
    lambda: optax.scale_by_factored_rms(min_dim_size_to_factor=2),
    factored(""),
)
row(
    "scale_by_lbfgs",
    lambda: optax.scale_by_lbfgs(2),
    "params updates",
    stacked("diff_params_memory diff_updates_memory"),
    listed=("weights_memory",),
)
row(
    "scale_by_backtracking_linesearch",
    lambda: optax.scale_by_backtracking_linesearch(3, store_grad=True),
    "grad",
    extra=("value", "grad", "value_fn"),
)
rows("scale_by_zoom_linesearch", (3,), "grad", extra=("value", "grad", "value_fn"))
row(
    "contrib.scale_by_galore",
    lambda: named("contrib.scale_by_galore")(rank=4),
    low_rank(""),
)
row(
    "contrib.scale_by_muon",
    lambda: contrib.scale_by_muon(
        weight_dimension_numbers=lambda params: jax.tree.map(
            lambda _: contrib.MuonDimensionNumbers(), params
        )
    ),
    same("mu", MATRICES),
    listed=("ns_coeffs",),
    params=matrices_only,
)
row(
    "contrib.differentially_private_aggregate",
    lambda: contrib.differentially_private_aggregate(1.0, 0.1, key=0),
    grads=two_examples,
)

# ----------------------------------------------------------------- the wrappers

row(
    "chain",
    lambda: optax.chain(optax.clip_by_global_norm(1.0), adam(), optax.ema(0.9)),
    "1/0/mu 1/0/nu 2/ema",
)
row(
    "named_chain",
    lambda: optax.named_chain(("clip", optax.clip(1.0)), ("adam", adam())),
    "adam/0/mu adam/0/nu",
)
row(
    "masked",
    lambda: optax.masked(adam(), is_kernel),
    same("inner_state/0/mu inner_state/0/nu", KERNELS),
)
for name in ("partition", "multi_transform"):
    row(
        name,
        lambda name=name: named(name)(by_parts(), by_part),
        same("inner_states/kernel/inner_state/0/mu", KERNELS),
        same("inner_states/kernel/inner_state/0/nu", KERNELS),
        same("inner_states/rest/inner_state/0/trace", ["bias"]),
    )
row("freeze", lambda: named("freeze")(is_kernel))
row(
    "selective_transform",
    lambda: named("selective_transform")(adam(), freeze_mask=is_kernel),
)
row(
    "MultiSteps",
    lambda: optax.MultiSteps(adam(), every_k_schedule=2),
    "acc_grads inner_opt_state/0/mu inner_opt_state/0/nu",
)
row(
    "apply_if_finite",
    lambda: optax.apply_if_finite(adam(), 3),
    "inner_state/0/mu inner_state/0/nu",
)
for name in ("conditionally_mask", "conditionally_transform"):
    row(
        name,
        lambda name=name: named(name)(adam(), lambda step: step < 2),
        "inner_state/0/mu inner_state/0/nu",
    )
for name in ("inject_hyperparams", "inject_stateful_hyperparams"):
    row(
        name,
        lambda name=name: named(name)(optax.adam)(RATE, b1=lambda count: 0.9),
        "inner_state/0/mu inner_state/0/nu",
    )
row("flatten", lambda: optax.flatten(adam()), listed=("0/mu", "0/nu"))
row(
    "lookahead",
    lookahead,
    "fast_state/0/mu fast_state/0/nu",
    params=lambda params: {"fast": params, "slow": params},
    grads=lambda grads: grads["fast"],
)
row("with_extra_args_support", lambda: optax.with_extra_args_support(adam()), MOMENTS)
row("stateless", lambda: optax.stateless(lambda updates, params: updates))
row("stateless_with_tree_map", lambda: optax.stateless_with_tree_map(lambda g, p: g))
row(
    "snapshot",
    lambda: optax.chain(optax.snapshot("seen", lambda updates: updates), adam()),
    "0/measurement/seen 1/0/mu 1/0/nu",
)
row(
    "monitor",
    lambda: named("monitor")(
        {"seen": lambda updates: updates, "norm": optax.global_norm}
    ),
    "measurements/seen",
    grows=True,
)
row(
    "measure_with_ema",
    lambda: named("monitor")(
        {"seen": named("measure_with_ema")(lambda updates: updates, 0.9)}
    ),
    "measurements/seen measure_states/0/1/ema",
    grows=True,
)
row(
    "contrib.mechanize",
    lambda: contrib.mechanize(adam()),
    "base_optimizer_state/0/mu base_optimizer_state/0/nu x0",
    listed=("r", "m", "v", "s"),
)
row(
    "contrib.sam",
    lambda: contrib.sam(momentum(), optax.chain(contrib.normalize(), momentum())),
    "opt_state/0/trace adv_state/1/0/trace cache",
)
row(
    "contrib.sam opaque",
    lambda: contrib.sam(adam(), momentum(), opaque_mode=True),
    "opt_state/0/mu opt_state/0/nu adv_state/0/trace",
    extra=("grad_fn",),
)
row(
    "contrib.schedule_free",
    lambda: contrib.schedule_free(momentum(), RATE),
    "base_optimizer_state/0/trace z",
)
row(
    "contrib.split_real_and_imaginary",
    lambda: contrib.split_real_and_imaginary(adam()),
    {
        f"inner_state/0/{moment}/{name}/{part}": AXES[name]
        for moment in ("mu", "nu")
        for name in ALL
        for part in ("real", "imaginary")
    },
    params=lambda params: jax.tree.map(lambda leaf: leaf * (1 + 1j), params),
)

AGGREGATING = "experimental.aggregating"


def aggregated(aggregator: str, *arguments: Any) -> Callable[[], Any]:
    """Adam behind an aggregator of optax's."""
    return lambda: named(f"{AGGREGATING}.process")(
        optax.identity(), named(f"{AGGREGATING}.{aggregator}")(*arguments), adam()
    )


for name in ("process", "accumulate_avg_updates"):
    row(
        f"{AGGREGATING}.{name}",
        aggregated("accumulate_avg_updates", 2),
        "1/avg_grad 2/0/mu 2/0/nu",
    )
row(
    f"{AGGREGATING}.average_per_element_updates",
    aggregated("average_per_element_updates"),
    "2/0/mu 2/0/nu",
    grads=two_examples,
)
row(
    f"{AGGREGATING}.average_incrementally_updates",
    aggregated("average_incrementally_updates", 0, 2),
    "1/1/avg_grad 2/0/mu 2/0/nu",
    grads=two_examples,
)
for name in (
    "add_mean_variance_to_opt",
    "get_per_element_mean_and_sum_sq_diff_grads",
    "track_per_element_mean_and_variance_with_ema",
):
    row(
        f"{AGGREGATING}.{name}",
        lambda: named(f"{AGGREGATING}.add_mean_variance_to_opt")(
            adam(), accumulation_steps=2
        ),
        "1/mean_grads 1/sum_sq_diff_grads 2/0/mean_grads_ema 2/0/variance_grads_ema",
        "2/1/0/mu 2/1/0/nu",
        grads=two_examples,
    )

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


def rules(mesh: flm.DeviceMesh | str = "data=2,model=4") -> flm.LayoutMap:
    """A rule for each parameter."""
    made = flm.LayoutMap(
        flm.DeviceMesh.abstract(mesh) if isinstance(mesh, str) else mesh, strict=False
    )
    for name, axes in AXES.items():
        made[f"{name}$"] = axes
    return made


def nested(leaves: dict[str, Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        node = root
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = leaf
    return root


@functools.cache
def arrays() -> Any:
    """The parameters."""
    rng = np.random.default_rng(0)
    return nested(
        {name: rng.normal(size=s).astype(np.float32) for name, s in SHAPES.items()}
    )


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
    seen = set()
    for leaf in resolution:
        if leaf.role != "optimizer":
            continue
        path = leaf.path.removeprefix("opt_state/")
        axes = tuple(
            dim[0] if dim else None for dim in leaf.layout.dims(len(leaf.shape))
        )
        if math.prod(leaf.shape) <= 1:  # a counter or a placeholder
            assert not any(axes), leaf
        elif path in case.listed:
            assert not any(axes) and leaf.reason == "unknown optimizer state", leaf
        else:
            assert axes == case.state.get(path), leaf
            assert leaf.reason == "follows parameter", leaf
            seen.add(path)
    assert seen == set(case.state)
    assert resolution.unmatched == tuple(f"opt_state/{path}" for path in case.listed)
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

    # The table's own test has both kernels of one shape; here one is enough.
    given = {name: leaf for name, leaf in arrays().items() if name != "up"}
    abstract = jax.eval_shape(begin, given)
    shardings = {}
    for name, tx in optimizers.items():
        params, state = abstract[name]
        tree = {"params": params, "opt_state": state}
        both = rules(mesh).shardings(tree, tx=tx)
        shardings[name] = both["params"], both["opt_state"]
    alone = jax.jit(begin)(given)
    sharded = jax.jit(begin, out_shardings=shardings)(given)
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
    assert program._cache_size() <= 1 + any(is_key(leaf) for _, leaf in found)
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


def axes_of(array: jax.Array) -> set[str]:
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
    assert all(axes_of(p) <= {"model"} for p in jax.tree.leaves(sharded.params))
    arrays_of_state = [x for x in jax.tree.leaves(sharded.opt_state) if x.size > 1]
    assert any("data" in axes_of(leaf) for leaf in arrays_of_state)
    whole = [x for x in arrays_of_state if "data" not in axes_of(x)]
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


@pytest.mark.parametrize("name", SHARDED_STATE)
def test_the_report_says_how_many_bytes_sharded_state_takes(
    name: str, mesh: flm.DeviceMesh
) -> None:
    make, wanted = SHARDED_STATE[name]

    def begin() -> TrainState:
        params = {
            key: jnp.asarray(arrays()[key]) for key in ("bias", "scale", "square")
        }
        params = wanted(params)
        return TrainState.create(apply_fn=print, params=params, tx=make())

    layout_map = zero_rules(mesh)
    planned = layout_map.resolve(begin)
    state = layout_map.place(begin()).opt_state
    held = dict.fromkeys(mesh.devices.flat, 0)
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    said = planned.totals("optimizer").bytes_per_device
    assert set(held.values()) == {said}
    rows_said = [r for r in planned.to_json()["leaves"] if r["role"] == "optimizer"]
    assert sum(r["bytes_per_device"] for r in rows_said) == said
    (line,) = [
        line
        for line in planned.report().splitlines()
        if line.startswith(f"optimizer state: {len(rows_said)} leaves, ")
    ]
    assert f" {said} B per device; " in line
    layout_map.optimizer.clear()
    follow = layout_map.resolve(begin).totals("optimizer").bytes_per_device
    # Half of it, but for counters, placeholders and Adafactor's own columns.
    assert said < (0.85 if name == "adafactor" else 0.55) * follow


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
