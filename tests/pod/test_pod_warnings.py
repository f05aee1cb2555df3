"""Warnings of a plan: not donated, closed over, unrolled, or not sharded."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from pods import (
    MEGATRON,
    MESH,
    PARAMS,
    ROWS,
    SQUARE,
    X,
    kinds,
    plan,
    rules,
    sgd,
    struct,
)

import flax_layoutmap as flm

P = PartitionSpec


def test_state_that_is_not_donated() -> None:
    given = {"up": struct(1024, 4096), "down": struct(4096, 1024)}, struct(8, 1024)
    layout = rules(**MEGATRON)
    (warning,) = plan(sgd, *given, layout_map=layout).warnings
    assert warning == (
        "2 leaves of state, such as params/down, are not donated: old and new are held "
        "at the same time, 8.0 MiB more per device; use donate_argnames"
    )
    donated = plan(sgd, *given, layout_map=layout, donate_argnames="params")
    assert donated.warnings == ()
    jitted = plan(jax.jit(sgd, donate_argnums=0), *given, layout_map=layout)
    assert jitted.warnings == ()


TABLE, OTHER = jnp.ones((1024, 512)), np.ones((1024, 512), np.float32)


def closes_over(params: Any, x: Any) -> Any:
    return x @ params["up"] + TABLE[:8, :32].sum()


def calls_what_closes_over(params: Any, x: Any) -> Any:
    """Each array counts once, wherever it is used."""

    @jax.jit
    def inner(x: Any) -> Any:
        return x + TABLE[:1, :32]

    x = inner(inner(x @ params["up"])) + TABLE[0, :32]
    return jax.lax.cond(x.sum() > 0, lambda x: x + jax.jit(jnp.sum)(OTHER), inner, x)


@pytest.mark.parametrize(
    ("step", "what"),
    [
        (closes_over, "1 array ((1024,512); 2.0 MiB)"),
        (calls_what_closes_over, "2 arrays ((1024,512), (1024,512); 4.0 MiB)"),
    ],
)
def test_a_step_that_closes_over_arrays(step: Any, what: str) -> None:
    found = plan(step, PARAMS, X, layout_map=rules(**MEGATRON)).warnings
    assert [text for text in found if "closes over" in text] == [
        f"{step.__name__} closes over {what}: constants of the program, which every "
        "device holds in full; pass them as arguments"
    ]


def in_turn(params: Any, x: Any) -> Any:
    for one in jax.tree.leaves(params):
        x = jnp.tanh(x @ one) @ one.T
    return x.sum()


WARNING = "13 unrolled layers in the program, "


@pytest.mark.parametrize(
    ("params", "is_told"),
    [
        ({"layers": [SQUARE] * 13}, True),
        ({"layers": [SQUARE] * 12}, False),
        ({"w": [struct(16, 16)] * 13}, True),
        # Linen numbers its modules, others their blocks.
        *(
            ({name.format(at): SQUARE for at in range(13)}, True)
            for name in ("layers_{}", "Dense_{}", "block{}", "h.{}")
        ),
        # Layers that are not equal.
        ({"w": [struct(16, 16 + 4 * at) for at in range(13)]}, False),
    ],
)
def test_many_layers_without_a_scan(params: Any, is_told: bool) -> None:
    found = plan(in_turn, params, X, layout_map=rules(w=(None, "model"))).warnings
    assert len(found) == is_told
    assert all(text.startswith(WARNING) and "nnx.scan" in text for text in found)


def test_rules_that_shard_nothing_make_everything_data() -> None:
    report = plan(sgd, PARAMS, X, layout_map=rules(upp=(None, "model")))
    assert report.warnings == (
        "no rule shards a leaf of params, so that every argument is data, split over "
        'the batch axes; say what is state: donate_argnames="params"',
    )
    none = rules(up=None, down=None)
    told = plan(sgd, PARAMS, X, layout_map=none, donate_argnames="params")
    jitted = plan(jax.jit(sgd, donate_argnums=0), PARAMS, X, layout_map=none)
    assert told.warnings == jitted.warnings == ()
    assert jitted.memory == told.memory and kinds(jitted) == kinds(told)


@pytest.mark.parametrize("wrap", [lambda step: step, jax.jit])
def test_a_rule_for_an_array_alone(wrap: Any) -> None:
    step = wrap(lambda w, x: x @ w)
    (warning,) = plan(step, SQUARE["w"], X, layout_map=rules(**ROWS)).warnings
    assert warning == (
        "w is an array alone, which has no path for rules, so that rule 'w' has no "
        'effect; pass it in a container, {"w": w}'
    )
    # A rule for all is not about the data.
    layout = rules(**{".*": ("model", None)})
    told = plan(lambda p, x: x @ p["w"], SQUARE, X, layout_map=layout)
    assert told.warnings == ()


def test_nothing_is_sharded() -> None:
    (warning,) = plan(jax.jit(sgd), PARAMS, X).warnings
    assert warning == (
        "no argument is sharded over data=2,model=4, so that every device does the "
        "whole step; pass layout_map=layout_map, or arguments with shardings"
    )


def test_in_shardings_that_are_not_those_of_the_rules() -> None:
    jax_mesh: Any = flm.DeviceMesh.abstract(MESH).jax_mesh
    own = {name: NamedSharding(jax_mesh, P("model")) for name in PARAMS}
    jitted = jax.jit(sgd, in_shardings=(own, NamedSharding(jax_mesh, P("data"))))
    (warning,) = plan(jitted, PARAMS, X, layout_map=rules(**MEGATRON)).warnings
    assert warning == (
        "sgd has in_shardings of its own, which count here and not the rules: 1 "
        "leaf, such as params/up, which is P(model), and P(-, model) by the rules; "
        "a call would refuse arrays with the shardings of the rules"
    )
    good = rules(up=("model", None), down=("model", None))
    assert plan(jitted, PARAMS, X, layout_map=good).warnings == ()
