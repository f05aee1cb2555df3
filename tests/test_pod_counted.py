"""flm.pod.plan: rows that are counted, as in `logits[jnp.arange(n), labels]`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import needs_libtpu
from jax.sharding import PartitionSpec

import flax_layoutmap as flm

TOPOLOGY = "v5e:2x4"
ROWS, WIDTH, VOCABULARY = 256, 64, 512
HEAD = {"head": jax.ShapeDtypeStruct((WIDTH, VOCABULARY), jnp.float32)}
INPUTS = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
LABELS = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
TOKENS = jax.ShapeDtypeStruct((ROWS, 8, WIDTH), jnp.float32)
TOKEN_LABELS = jax.ShapeDtypeStruct((ROWS, 8), jnp.int32)
CACHE = {"cache": jax.ShapeDtypeStruct((ROWS, 4, 32, 8), jnp.float32)}
KEYS = jax.ShapeDtypeStruct((ROWS, 4, 8), jnp.float32)
SPLITS = {"vocabulary": (None, "t"), "fsdp": ("f", "t"), "none": None}


def along_axis(x: Any, labels: Any) -> Any:
    return jnp.take_along_axis(x, labels[..., None], -1)[..., 0]


def counted(x: Any, labels: Any) -> Any:
    return x[jnp.arange(len(labels)), labels]


def counted_in_numpy(x: Any, labels: Any) -> Any:
    return x[np.arange(len(labels)), labels]


def counted_twice(x: Any, labels: Any) -> Any:
    rows, columns = labels.shape
    return x[jnp.arange(rows)[:, None], jnp.arange(columns)[None], labels]


def flat(x: Any, labels: Any) -> Any:
    return counted(x.reshape(-1, x.shape[-1]), labels.ravel())


def backwards(x: Any, labels: Any) -> Any:
    return x[len(labels) - 1 - jnp.arange(len(labels)), labels]


def behind_one(x: Any, labels: Any) -> Any:
    return x[jnp.maximum(jnp.arange(len(labels)) - 1, 0), labels]


def loss(pick: Any, params: Any, x: Any, labels: Any) -> Any:
    return -pick(jax.nn.log_softmax(x @ params["head"]), labels).mean()


def forward(pick: Any) -> Any:
    return lambda params, x, labels: loss(pick, params, x, labels)


def training(pick: Any) -> Any:
    def step(params: Any, x: Any, labels: Any) -> Any:
        gradients = jax.grad(lambda params: loss(pick, params, x, labels))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    return step


def write(params: Any, keys: Any, at: Any) -> Any:
    return {"cache": params["cache"].at[jnp.arange(len(at)), :, at].set(keys)}


def jitted(step: Any, spec: Any) -> Any:
    layout_map = flm.LayoutMap(None, batch="f")
    layout_map[".*"] = None if spec is None else PartitionSpec(*spec)
    return flm.jit(step, layout_map=layout_map)


def planned(step: Any, *args: Any, spec: Any, platform: str = "tpu") -> Any:
    layout = jitted(step, spec)
    return flm.pod.plan(layout, *args, mesh="f=4,t=2", platform=platform)


def moved(report: flm.pod.PodReport) -> list[Any]:
    return sorted((one.kind, one.axes, one.bytes) for one in report.collectives)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", [forward, training])
def test_counted_rows_are_as_rows_along_an_axis(kind: Any, split: str) -> None:
    given = SPLITS[split]
    args = HEAD, INPUTS, LABELS
    expected = planned(kind(along_axis), *args, spec=given)
    for pick in (counted, counted_in_numpy):
        report = planned(kind(pick), *args, spec=given)
        assert not report.unrecognised
        assert moved(report) == moved(expected)
        if split == "vocabulary":
            report.forbid(kind="all-gather")
            again = report.with_layout(jitted(kind(pick), SPLITS["fsdp"]).layout_map)
            other = planned(kind(along_axis), *args, spec=SPLITS["fsdp"])
            assert not again.unrecognised and moved(again) == moved(other)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("pick", [counted_twice, flat])
def test_of_each_token(pick: Any, split: str) -> None:
    args: Any = HEAD, TOKENS, TOKEN_LABELS
    report = planned(training(pick), *args, spec=SPLITS[split])
    expected = planned(training(along_axis), *args, spec=SPLITS[split])
    assert not report.unrecognised
    assert moved(report) == moved(expected)


@pytest.mark.parametrize("pick", [backwards, behind_one])
def test_what_is_not_counted_from_zero_is_said(pick: Any) -> None:
    report = planned(forward(pick), HEAD, INPUTS, LABELS, spec=None)
    (what,) = report.unrecognised
    assert what.startswith("gather along a sharded dim")


def diagonal(x: Any, labels: Any) -> Any:
    return x[jnp.arange(len(labels)), jnp.arange(len(labels))] + labels


def test_a_diagonal_is_said() -> None:
    report = planned(forward(diagonal), HEAD, INPUTS, LABELS, spec=None)
    assert report.unrecognised


def test_places_that_every_device_has() -> None:
    """Each looks among its own rows, and what all have found is added up."""
    first = forward(lambda x, labels: x[jnp.arange(len(labels)), 0])
    report = planned(first, HEAD, INPUTS, LABELS, spec=(None, "t"))
    assert not report.unrecognised
    assert ("all-reduce", ("f", "t"), ROWS * 4) in moved(report)


def test_places_that_are_joined_otherwise() -> None:
    """Two lists of rows, one after the other."""

    def rows(params: Any, first: Any, second: Any) -> Any:
        at = jnp.concatenate([first[:, None], second[:, None]])
        numbers = jax.lax.GatherDimensionNumbers((1,), (0,), (0,))
        return jax.lax.gather(params["head"], at, numbers, (1, VOCABULARY))

    report = planned(rows, HEAD, LABELS, LABELS, spec=None)
    assert not report.unrecognised


def test_other_compilers_do_not_see_it() -> None:
    """That for CPUs gathers what it does not see as counted."""
    args: Any = HEAD, INPUTS, LABELS
    for platform in ("cpu", "cuda"):
        report = planned(forward(counted), *args, spec=None, platform=platform)
        assert report.unrecognised


def test_what_each_sequence_writes_into_its_own_cache() -> None:
    args: Any = CACHE, KEYS, LABELS
    own = planned(write, *args, spec=("f", "t"))
    assert not own.unrecognised and not own.collectives


def test_a_cache_that_no_rule_shards_is_gathered() -> None:
    """Every device writes its own part of it, and then needs the whole."""
    report = planned(write, CACHE, KEYS, LABELS, spec=(None, "t"))
    assert not report.unrecognised
    (one,) = report.collectives
    assert one.kind == "all-gather" and one.axes == ("f",)
    assert one.shape == (ROWS, 2, 32, 8)


@needs_libtpu
@pytest.mark.parametrize(
    "step, args, spec",
    [
        (forward(counted), (HEAD, INPUTS, LABELS), ("f", "t")),
        (training(counted), (HEAD, INPUTS, LABELS), ("f", "t")),
        (training(counted_in_numpy), (HEAD, INPUTS, LABELS), (None, "t")),
        (training(counted_twice), (HEAD, TOKENS, TOKEN_LABELS), (None, "t")),
        (training(flat), (HEAD, TOKENS, TOKEN_LABELS), (None, "t")),
        (write, (CACHE, KEYS, LABELS), ("f", "t")),
        (write, (CACHE, KEYS, LABELS), (None, "t")),
    ],
    ids=["forward", "step", "numpy", "tokens", "flat", "own cache", "whole cache"],
)
def test_the_compiler_for_tpus(step: Any, args: Any, spec: Any) -> None:
    layout = jitted(step, spec)
    with jax.default_matmul_precision("highest"):
        report = flm.pod.plan(layout, *args, mesh="f=4,t=2", topology=TOPOLOGY)
        compiled = flm.pod.compile(layout, *args, mesh="f=4,t=2", topology=TOPOLOGY)
    assert not report.unrecognised
    assert sent(report) == sent(compiled)


def sent(report: flm.pod.PodReport) -> dict[Any, int]:
    """Bytes of each kind over each set of axes."""
    found: dict[Any, int] = {}
    for one in report.collectives:
        key = one.kind, frozenset(one.axes)
        found[key] = found.get(key, 0) + one.wire_bytes_per_step
    return found


@pytest.mark.parametrize("spec", [("f", "t"), (None, "t")])
def test_both_ways_to_take_labels_are_planned_alike(spec: Any) -> None:
    """The compiler for TPUs writes the scatters of both as counted places."""
    reports = [
        flm.pod.plan(jitted(training(pick), spec), HEAD, INPUTS, LABELS, mesh="f=4,t=2")
        for pick in (along_axis, counted)
    ]
    assert not any(report.unrecognised for report in reports)
    assert sent(reports[0]) == sent(reports[1])
