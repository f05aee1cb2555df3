"""Optimizers of the installed optax, and how every leaf of their states must lie.

No state is written down: `expected_axes` makes it of parameters whose sizes all differ,
where each size tells which dim of which parameter it is.
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
# Dims grow within each parameter, as Adafactor leaves out the largest ones.
SIZES: dict[str, tuple[int, ...]] = {
    "bias": (11,),
    "gate/kernel": (13, 17),
    "scale": (),
    "square": (19, 23),
    "stack/kernel": (29, 31, 37),
    "up/kernel": (41, 43),
}
AXIS_OF_SIZE = {
    size: axis
    for name, sizes in SIZES.items()
    for size, axis in zip(sizes, AXES[name], strict=True)
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One optimizer of the table.

    Attributes:
        make: makes it.
        grows: whether its state gets leaves in the first update only.
        params: the parameters as its update wants them.
        lists: whether it makes state that belongs to parameters from bare shapes, so
            that no trace tells of it: this is replicated, and listed as unmatched.
    """

    make: Callable[[], Any]
    grows: bool = False
    params: Callable[[Any], Any] = lambda params: params
    lists: bool = False


RATE = 1e-2
TABLE: dict[str, Case] = {}


def named(name: str) -> Any:
    """What optax exports under a name such as "contrib.muon"; None for nothing."""
    found: Any = optax
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def row(name: str, make: Callable[[], Any], **more: Any) -> None:
    """Adds an optimizer to the table, if the installed optax has it.

    Args:
        name: the name of its constructor, and what is special, after a blank.
        make: makes it.
        **more: other fields of the Case.
    """
    if named(name.split(" ")[0]) is not None:
        TABLE[name] = Case(make, **more)


def rows(names: str, *arguments: Any, **more: Any) -> None:
    """Adds optimizers that take the same arguments."""
    for name in names.split():
        row(name, lambda name=name: named(name)(*arguments), **more)


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

rows(
    "adabelief adadelta adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb "
    "lars lion nadam nadamw novograd optimistic_adam optimistic_adam_v2 "
    "optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd signum sm3 yogi",
    RATE,
)
rows(
    "contrib.acprop contrib.ademamix contrib.adopt contrib.cocob contrib.dadapt_adamw "
    "contrib.dog contrib.dowg contrib.madgrad contrib.momo contrib.momo_adam "
    "contrib.muon contrib.prodigy contrib.schedule_free_adamw "
    "contrib.schedule_free_sgd contrib.simplified_ademamix contrib.sophia",
    RATE,
)
rows("polyak_sgd")
row("sgd momentum", momentum)
row("noisy_sgd", lambda: optax.noisy_sgd(RATE, key=0))
row("adam bfloat16", lambda: optax.adam(RATE, mu_dtype=jnp.bfloat16))
row("adamw masked", lambda: optax.adamw(RATE, mask=is_kernel))
row("adam schedule", lambda: optax.adam(optax.linear_schedule(1, 0, 9)))
row("rmsprop centered", lambda: optax.rmsprop(RATE, centered=True, momentum=0.9))
row(
    "adafactor",
    lambda: optax.adafactor(RATE, min_dim_size_to_factor=2, momentum=0.9),
)
row("adafactor unfactored", lambda: optax.adafactor(RATE))
row("lbfgs", lambda: optax.lbfgs(RATE, memory_size=2))
row(
    "lbfgs without line search",
    lambda: optax.lbfgs(RATE, memory_size=2, linesearch=None),
)
row("contrib.dpsgd", lambda: contrib.dpsgd(RATE, 1.0, 0.1, 0, momentum=0.9))
row("contrib.galore", lambda: named("contrib.galore")(RATE, rank=4), lists=True)

# -------------------------------------------------------------------- the parts

rows(
    "scale_by_adadelta scale_by_adam scale_by_adamax scale_by_adan scale_by_amsgrad "
    "scale_by_belief scale_by_distance_over_gradients scale_by_lion scale_by_novograd "
    "scale_by_optimistic_gradient scale_by_radam scale_by_rms scale_by_rss "
    "scale_by_sm3 scale_by_stddev scale_by_yogi scale_by_polyak identity zero_nans"
)
rows(
    "contrib.scale_by_acprop contrib.scale_by_ademamix contrib.scale_by_adopt "
    "contrib.scale_by_cocob contrib.scale_by_simplified_ademamix "
    "contrib.hutchinson_estimator_diag_hessian contrib.reduce_on_plateau"
)
rows("scale_by_rprop contrib.scale_by_madgrad", RATE)
rows("ema trace", 0.9)
rows("apply_every scale_by_lbfgs", 2)
rows("scale_by_zoom_linesearch", 3)
row("add_noise", lambda: optax.add_noise(0.1, 0.1, key=0))
row(
    "scale_by_factored_rms",
    lambda: optax.scale_by_factored_rms(min_dim_size_to_factor=2),
)
row(
    "scale_by_backtracking_linesearch",
    lambda: optax.scale_by_backtracking_linesearch(3, store_grad=True),
)
row(
    "contrib.scale_by_muon",
    lambda: contrib.scale_by_muon(
        weight_dimension_numbers=lambda params: jax.tree.map(
            lambda _: contrib.MuonDimensionNumbers(), params
        )
    ),
    params=matrices_only,
)

# ----------------------------------------------------------------- the wrappers

row(
    "chain",
    lambda: optax.chain(optax.clip_by_global_norm(1.0), adam(), optax.ema(0.9)),
)
row(
    "named_chain",
    lambda: optax.named_chain(("clip", optax.clip(1.0)), ("adam", adam())),
)
row("masked", lambda: optax.masked(adam(), is_kernel))
for name in ("partition", "multi_transform"):
    row(name, lambda name=name: named(name)(by_parts(), by_part))
row("freeze", lambda: named("freeze")(is_kernel))
row(
    "selective_transform",
    lambda: named("selective_transform")(adam(), freeze_mask=is_kernel),
)
row("MultiSteps", lambda: optax.MultiSteps(adam(), every_k_schedule=2))
row("apply_if_finite", lambda: optax.apply_if_finite(adam(), 3))
for name in ("conditionally_mask", "conditionally_transform"):
    row(name, lambda name=name: named(name)(adam(), lambda step: step < 2))
for name in ("inject_hyperparams", "inject_stateful_hyperparams"):
    row(name, lambda name=name: named(name)(optax.adam)(RATE, b1=lambda count: 0.9))
row("flatten", lambda: optax.flatten(adam()))
row("lookahead", lookahead, params=lambda params: {"fast": params, "slow": params})
row("with_extra_args_support", lambda: optax.with_extra_args_support(adam()))
row(
    "snapshot",
    lambda: optax.chain(optax.snapshot("seen", lambda updates: updates), adam()),
)
row(
    "monitor",
    lambda: named("monitor")(
        {"seen": lambda updates: updates, "norm": optax.global_norm}
    ),
    grows=True,
)
row(
    "measure_with_ema",
    lambda: named("monitor")(
        {"seen": named("measure_with_ema")(lambda updates: updates, 0.9)}
    ),
    grows=True,
)
row("contrib.mechanize", lambda: contrib.mechanize(adam()))
row("contrib.sam", lambda: contrib.sam(momentum(), adam()))
row("contrib.schedule_free", lambda: contrib.schedule_free(momentum(), RATE))
row(
    "contrib.split_real_and_imaginary",
    lambda: contrib.split_real_and_imaginary(adam()),
    params=lambda params: jax.tree.map(lambda leaf: leaf * (1 + 1j), params),
)

AGGREGATING = "experimental.aggregating"
row(
    f"{AGGREGATING}.process",
    lambda: named(f"{AGGREGATING}.process")(
        optax.identity(), named(f"{AGGREGATING}.accumulate_avg_updates")(2), adam()
    ),
)
row(
    f"{AGGREGATING}.add_mean_variance_to_opt",
    lambda: named(f"{AGGREGATING}.add_mean_variance_to_opt")(
        adam(), accumulation_steps=2
    ),
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


def slope(params: Any) -> Any:
    """The gradient of some loss."""
    return jax.tree.map(lambda leaf: leaf + leaf**3 - 1, params)


def update(tx: Any, params: Any, state: Any) -> tuple[Any, Any]:
    """One step of one optimizer."""
    updates, state = tx.update(slope(params), state, params)
    return optax.apply_updates(params, updates), state


def start(case: Case, tx: Any, params: Any) -> tuple[Any, Any]:
    """Parameters and state in the structure that they have from then on."""
    params = case.params(params)
    state = tx.init(params)
    return update(tx, params, state) if case.grows else (params, state)


def expected_axes(case: Case) -> dict[str, Axes]:
    """Path → axes of every leaf of the state, by its sizes."""
    params = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in SIZES.items()}
    _, state = jax.eval_shape(
        functools.partial(start, case, case.make()), nested(params)
    )
    paths = flm.LayoutMap(strict=False).resolve(state).paths
    return {
        path: tuple(AXIS_OF_SIZE.get(size) for size in leaf.shape)
        for path, leaf in zip(paths, jax.tree.leaves(state), strict=True)
    }


def check(resolution: flm.Resolution, prefix: str, case: Case) -> None:
    """Checks every leaf of the optimizer state below a prefix.

    Args:
        resolution: of a tree that holds the state.
        prefix: what leads to the state.
        case: the optimizer.
    """
    expected = expected_axes(case)
    for leaf in resolution:
        if leaf.role != "optimizer" or not leaf.path.startswith(prefix):
            continue
        axes = expected.pop(leaf.path.removeprefix(prefix))
        if leaf.path in resolution.unmatched:
            assert case.lists or not any(axes), leaf
            assert leaf.layout.is_replicated, leaf
        else:
            assert axes_of(leaf) == axes, leaf
            assert math.prod(leaf.shape) <= 1 or leaf.reason == "follows parameter"
    assert not expected
