"""Warnings of a plan: not donated, closed over, or not sharded."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from pods import MEGATRON, PARAMS, ROWS, SQUARE, X, plan, rules, sgd, struct


def test_state_that_is_not_donated() -> None:
    given = {"up": struct(1024, 4096), "down": struct(4096, 1024)}, struct(8, 1024)
    layout = rules(**MEGATRON)
    (warning,) = plan(sgd, *given, layout_map=layout).warnings
    assert warning == (
        "state that is not donated, such as params/down: where the results are its new "
        "values, old and new are held at the same time, 8.0 MiB more per device; use "
        "donate_argnames"
    )
    donated = plan(sgd, *given, layout_map=layout, donate_argnames="params")
    assert donated.warnings == ()


TABLE = jnp.ones((1024, 512))


@pytest.mark.parametrize("wrap", [lambda step: step, jax.jit])
def test_a_step_that_closes_over_arrays(wrap: Any) -> None:
    def closes_over(params: Any, x: Any) -> Any:
        return x @ params["up"] + TABLE[:8, :32].sum()

    (warning,) = plan(
        wrap(closes_over), PARAMS, X, layout_map=rules(**MEGATRON)
    ).warnings
    assert warning == (
        "closes_over closes over arrays ((1024,512); 2.0 MiB): constants of the "
        "program, which every device holds in full; pass them as arguments"
    )


def test_rules_that_shard_nothing_make_everything_data() -> None:
    report = plan(sgd, PARAMS, X, layout_map=rules(upp=(None, "model")))
    assert report.warnings == (
        "no rule shards a leaf of params, so every argument is taken for data and "
        'split over the batch axes; name the state: donate_argnames="params"; a bare '
        'array has no path, so wrap it: {"w": w}',
    )


@pytest.mark.parametrize("wrap", [lambda step: step, jax.jit])
def test_a_rule_for_a_bare_array(wrap: Any) -> None:
    step = wrap(lambda w, x: x @ w)
    (warning,) = plan(step, SQUARE["w"], X, layout_map=rules(**ROWS)).warnings
    assert warning == (
        "no rule shards a leaf of w, x, so every argument is taken for data and split "
        'over the batch axes; name the state: donate_argnames="w"; a bare array has no '
        'path, so wrap it: {"w": w}'
    )
