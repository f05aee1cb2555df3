"""Optimizers of the installed optax, and the shardings of their states.

One table: constructor → the axes that every leaf of its state must have, written down
by hand, dim by dim.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import optax.transforms
from optax import contrib
from shapes import axes_of, nested

import flax_layoutmap as flm

Axes = tuple[Any, ...]

SHAPES: dict[str, tuple[int, ...]] = {
    "bias": (16,),
    "gate/kernel": (8, 16),
    "scale": (),
    "square": (8, 8),
    "stack/kernel": (2, 8, 8),
    "up/kernel": (8, 16),
}
# Two kernels of one shape with different layouts, and squares, of which one is stacked,
# so that shapes alone cannot tell.
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


def low_rank(prefix: str) -> tuple[dict[str, Axes], tuple[str, ...]]:
    """GaLore projects matrices to a rank: it makes their state from bare shapes."""
    inner = f"{prefix}base_optimizer_state"
    places = (f"{inner}/mu", f"{inner}/nu", f"{prefix}projector")
    listed = tuple(f"{place}/{name}" for place in places for name in sorted(MATRICES))
    return same(f"{inner}/mu {inner}/nu", OTHERS), listed


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
STATE, LISTED = low_rank("0/")
row(
    "contrib.galore",
    lambda: named("contrib.galore")(RATE, rank=4),
    STATE,
    listed=LISTED,
)

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
STATE, LISTED = low_rank("")
row(
    "contrib.scale_by_galore",
    lambda: named("contrib.scale_by_galore")(rank=4),
    STATE,
    listed=LISTED,
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


# ------------------------------------------------------------ what it is tested with


def rules(mesh: flm.DeviceMesh | str = "data=2,model=4") -> flm.LayoutMap:
    """A rule for each parameter."""
    made = flm.LayoutMap(
        flm.DeviceMesh.abstract(mesh) if isinstance(mesh, str) else mesh, strict=False
    )
    for name, axes in AXES.items():
        made[f"{name}$"] = axes
    return made


@functools.cache
def arrays() -> Any:
    """The parameters."""
    rng = np.random.default_rng(0)
    return nested(
        {name: rng.normal(size=s).astype(np.float32) for name, s in SHAPES.items()}
    )


def check(resolution: flm.Resolution, prefix: str, case: Case) -> None:
    """Checks every leaf of the optimizer state below a prefix.

    Args:
        resolution: of a tree that holds the state.
        prefix: what leads to the state.
        case: the optimizer.
    """
    seen = set()
    for leaf in resolution:
        if leaf.role != "optimizer" or not leaf.path.startswith(prefix):
            continue
        path = leaf.path.removeprefix(prefix)
        if math.prod(leaf.shape) <= 1:  # a counter or a placeholder
            assert not any(axes_of(leaf)), leaf
        elif path in case.listed:
            assert not any(axes_of(leaf)), leaf
            assert leaf.reason == "unknown optimizer state", leaf
        else:
            assert axes_of(leaf) == case.state.get(path), leaf
            assert leaf.reason == "follows parameter", leaf
            seen.add(path)
    assert seen == set(case.state)
    unmatched = [path for path in resolution.unmatched if path.startswith(prefix)]
    assert unmatched == [prefix + path for path in case.listed]
