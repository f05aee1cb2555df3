"""The optimizers of the installed optax, and how every leaf of their states must lie.

Neither is written down. Constructors are those that optax exports, and `expected_axes`
makes the state of parameters whose sizes all differ, where each size tells which dim of
which parameter it is.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
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
RATE = 1e-2


@dataclasses.dataclass(frozen=True)
class Case:
    """One optimizer.

    Attributes:
        make: makes it.
        params: the parameters as it wants them.
        lists: whether it makes state that belongs to parameters from bare shapes, so
            that no trace tells of it: this is replicated, and listed as unmatched.
    """

    make: Callable[[], Any]
    params: Callable[[Any], Any] = lambda params: params
    lists: bool = False


def adam() -> Any:
    return optax.adam(RATE)


def momentum() -> Any:
    return optax.sgd(RATE, momentum=0.9)


def is_kernel(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def by_part(params: Any) -> Any:
    return jax.tree.map(lambda leaf: "kernel" if leaf.ndim > 1 else "rest", params)


# What constructors require, by the names of their parameters.
REQUIRED: dict[str, Any] = {
    **{"learning_rate": RATE, "decay": 0.9, "step_size": 0.1, "eta": 0.1},
    **{"gamma": 0.1, "clipping": 0.1, "max_delta": 1.0, "max_norm": 1.0},
    **{"threshold": 1.0, "l2_norm_clip": 1.0, "noise_multiplier": 0.1, "seed": 0},
    **{"max_consecutive_errors": 3, "max_linesearch_steps": 3, "sync_period": 2},
    **{"max_backtracking_steps": 3, "slow_step_size": 0.5, "measure_name": "seen"},
    **dict.fromkeys(("inner", "tx", "optimizer", "fast_optimizer"), adam()),
    **{"adv_optimizer": adam(), "base_optimizer": momentum()},
    **dict.fromkeys(("mask", "freeze_mask"), is_kernel),
    **{"transforms": {"kernel": adam(), "rest": momentum()}, "param_labels": by_part},
    "measure": lambda updates: updates,
    "f": lambda updates, params: updates,
    "step_size_fn": lambda count: 0.1,
    "should_transform_fn": lambda step: step < 2,
}
# Arguments that have a default: what makes a state of another kind, or small shapes.
MORE: dict[str, dict[str, Any]] = {
    "adafactor": {"min_dim_size_to_factor": 2, "momentum": 0.9},
    "add_noise": {"key": 0},
    "contrib.dpsgd": {"momentum": 0.9},
    "contrib.galore": {"rank": 4},
    "contrib.scale_by_galore": {"rank": 4},
    "contrib.scale_by_muon": {
        "weight_dimension_numbers": lambda params: jax.tree.map(
            lambda _: contrib.MuonDimensionNumbers(), params
        )
    },
    "lbfgs": {"memory_size": 2},
    "noisy_sgd": {"key": 0},
    "rmsprop": {"centered": True, "momentum": 0.9},
    "scale_by_backtracking_linesearch": {"store_grad": True},
    "sgd": {"momentum": 0.9},
}
# They make no transformation, but a function that makes one.
FACTORIES = ("inject_hyperparams", "inject_stateful_hyperparams", "measure_with_ema")


def constructors() -> dict[str, Callable[..., Any]]:
    """The functions of optax that say that they return a transformation, by name."""
    return {
        prefix + name: make
        for prefix, module in (("", optax), ("contrib.", contrib))
        for name, make in vars(module).items()
        if inspect.isfunction(make)
        and "GradientTransformation" in str(inspect.signature(make).return_annotation)
        and not name.startswith("_")
        and name not in FACTORIES
    }


def call(make: Callable[..., Any], **more: Any) -> Any:
    """The result of a constructor with what it requires."""
    required = [
        name
        for name, each in inspect.signature(make).parameters.items()
        if each.default is each.empty and not each.kind.name.startswith("VAR")
    ]
    return make(**{name: REQUIRED[name] for name in required}, **more)


def matrices_only(params: Any) -> Any:
    return {name: params[name] for name in params if name in ("gate", "square", "up")}


def complex_numbers(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf * (1 + 1j), params)


def pair(params: Any) -> Any:
    return optax.LookaheadParams(fast=params, slow=params)


PARAMS = {
    "contrib.scale_by_muon": matrices_only,
    "contrib.split_real_and_imaginary": complex_numbers,
    "lookahead": pair,
}
TABLE = {
    name: Case(
        functools.partial(call, make, **MORE.get(name, {})),
        PARAMS.get(name, lambda params: params),
        lists="galore" in name,
    )
    for name, make in constructors().items()
}
# State of other kinds, and what says nothing of what it returns.
for name, make in {
    "adafactor unfactored": lambda: optax.adafactor(RATE),
    "adam bfloat16": lambda: optax.adam(RATE, mu_dtype=jnp.bfloat16),
    "adamw masked": lambda: optax.adamw(RATE, mask=is_kernel),
    "adam schedule": lambda: optax.adam(optax.linear_schedule(1, 0, 9)),
    "chain": lambda: optax.chain(optax.clip(1.0), adam(), optax.ema(0.9)),
    "contrib.dog": lambda: contrib.dog(RATE),
    "contrib.dowg": lambda: contrib.dowg(RATE),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        RATE, b1=lambda count: 0.9
    ),
    "lbfgs without line search": lambda: optax.lbfgs(
        RATE, memory_size=2, linesearch=None
    ),
    "MultiSteps": lambda: optax.MultiSteps(adam(), every_k_schedule=2),
    "named_chain": lambda: optax.named_chain(
        ("clip", optax.clip(1.0)), ("adam", adam())
    ),
    "scale_by_factored_rms": lambda: optax.scale_by_factored_rms(
        min_dim_size_to_factor=2
    ),
}.items():
    TABLE[name] = Case(make)


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


def expected_axes(case: Case) -> dict[str, Axes]:
    """Path → axes of every leaf of the state, by its sizes."""
    params = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in SIZES.items()}
    init = case.make().init
    state = jax.eval_shape(lambda params: init(case.params(params)), nested(params))
    paths = flm.LayoutMap(strict=False).resolve(state).paths
    return {
        path: tuple(AXIS_OF_SIZE.get(size) for size in leaf.shape)
        for path, leaf in zip(paths, jax.tree.leaves(state), strict=True)
    }


def check(resolution: flm.Resolution, prefix: str, case: Case) -> None:
    """Check every leaf of the optimizer state below a prefix."""
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
