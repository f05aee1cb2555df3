"""Plans by XLA's partitioner: what is merged after it, and rewritten before."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P
from pods import (
    MESH,
    ROWS,
    SQUARE,
    WHOLE,
    X,
    entry,
    kinds,
    plan,
    rules,
    struct,
)

import flax_layoutmap as flm
from flax_layoutmap.pod._partitioner import code_to_partition, merge

# ---------------------------------------------------------------- what is merged

SUM = ("all-reduce", ("model",), None)


def equal(p: Any, x: Any) -> Any:
    """Gathers w once for itself and its transpose, and once for what is made of it."""
    return (x @ p["w"]) @ p["w"].T, x @ (2 * p["w"])


def apart(p: Any, x: Any) -> Any:
    first, second = x @ p["a"], x @ p["b"]
    return first + second, jnp.tanh(first), jnp.tanh(second)


@pytest.mark.parametrize(
    ("step", "count"),
    [
        (lambda p, x: x @ p["a"] + x @ p["b"] + x @ p["c"], 1),
        (lambda p, x: x @ p["a"] - x @ p["b"], 1),
        (lambda p, x: (x @ p["a"]) * (x @ p["b"]), 2),
        (apart, 2),
        # As libtpu 0.0.42 compiles a residual that is added before the second sum.
        (lambda p, x: (x @ p["a"] + 1) + x @ p["b"], 2),
        # Of which no sum is a maximum.
        (lambda p, x: p["a"].max(0) + p["b"].max(0), 2),
        (lambda p, x: p["a"].max(0) - p["a"].min(0), 2),
    ],
    ids=["a chain", "a difference", "a product", "used apart", "something between"]
    + ["maxima", "a range"],
)
def test_sums_that_are_one(step: Any, count: int) -> None:
    params = {name: struct(16, 16) for name in "abc"}
    layouts = rules(**{"[abc]": ("model", None)})
    jax_mesh: Any = flm.DeviceMesh.abstract(MESH).jax_mesh
    with jax.sharding.use_abstract_mesh(jax_mesh):
        report = plan(step, params, struct(8, 16), layout_map=layouts)
    assert kinds(report) == {SUM: count}


def test_reductions_that_end_alike_are_no_equal_operations() -> None:
    def step(params: Any, x: Any) -> Any:
        made = (jnp.sin, jnp.cos, jnp.sin)
        return [
            jax.lax.reduce(params["w"], 0.0, lambda a, b, f=f: a + f(b), (0,))
            for f in made
        ]

    report = plan(step, SQUARE, X, layout_map=rules(**ROWS))
    assert kinds(report) == {SUM: 2}


def made_of_parameters(p: Any, x: Any) -> Any:
    """With data in it, as in the second, it is an activation."""
    return x @ (p["w"] * p["s"] + p["a"] @ p["b"]), x @ (p["w"] * x.sum())


@pytest.mark.parametrize(
    ("step", "wanted"), [(equal, ["p/w"] * 2), (made_of_parameters, ["p/w", None])]
)
def test_gathers_that_are_one_and_of_what(step: Any, wanted: list[Any]) -> None:
    """What is computed from parameters alone has the path of the largest."""
    params = {"w": struct(16, 8), "s": struct(8)}
    params |= {"a": struct(16, 2), "b": struct(2, 8)}
    layouts = rules(**{"[wa]": ("data", None), "[sb]": None})
    report = plan(step, params, X, layout_map=layouts, mesh="data=8")
    gathers = [one for one in report.collectives if one.kind == "all-gather"]
    assert [one.path for one in gathers if 8 in one.shape] == wanted
    joined = [one.joined for one in gathers if one.path and step is made_of_parameters]
    assert [sorted(paths) for paths in joined] == [["p/a", "p/b", "p/s"]] * len(joined)


BOTH = ("data", "model")


@pytest.mark.parametrize(
    ("batch", "spec", "wanted"),
    [
        (BOTH, P(BOTH), {("reduce-scatter", BOTH)}),
        (BOTH, P("data"), {("reduce-scatter", ("data",)), ("all-reduce", ("model",))}),
        (BOTH, P(), {("all-reduce", BOTH)}),
        ("model", P(None, "model"), {("reduce-scatter", ("model",))}),
        # Cut into more parts than there are that sum.
        ("model", P(BOTH), {("all-reduce", ("model",))}),
    ],
)
def test_a_sum_that_is_sliced_is_scattered(batch: Any, spec: P, wanted: Any) -> None:
    def step(params: Any, x: Any) -> Any:
        gradient = jax.grad(lambda w: ((x @ w) ** 2).sum())(params["w"])
        return jax.lax.with_sharding_constraint(gradient, spec)

    jax_mesh: Any = flm.DeviceMesh.abstract(MESH).jax_mesh
    with jax.sharding.use_abstract_mesh(jax_mesh):
        report = plan(
            step,
            {"w": struct(16, 16)},
            X,
            layout_map=rules(batch, w=None),
            donate_argnames="params",
        )
    assert {(kind, axes) for kind, axes, _ in kinds(report)} == wanted


SCATTER = "all-reduce-scatter"


@pytest.mark.parametrize(("at", "opcodes"), [("%i", [SCATTER]), ("%j", [SCATTER] * 2)])
def test_sums_are_one_when_each_is_sliced(at: str, opcodes: list[str]) -> None:
    """In the same place, as libtpu 0.0.42 compiles a ResNet."""
    sums = f"channel_id=1, {WHOLE}, to_apply=%add"
    text = entry(
        "%i = s32[] parameter(1)",
        "%j = s32[] parameter(2)",
        f"%x = f32[8,4] all-reduce(%p), {sums}",
        "%q = f32[8,4] sine(%p)",
        f"%y = f32[8,4] all-reduce(%q), {sums}",
        "%a = f32[8,1] dynamic-slice(%x, %i, %i), dynamic_slice_sizes={8,1}",
        f"%b = f32[8,1] dynamic-slice(%y, {at}, {at}), dynamic_slice_sizes={{8,1}}",
        "ROOT %o = f32[8,1] add(%a, %b)",
    )
    made = [line.instruction for line in merge(text).computations["main"]]
    assert [one.opcode for one in made if one and "reduce" in one.opcode] == opcodes


# ------------------------------------------------------------- what is rewritten


def gradient(x: Any, labels: Any) -> Any:
    """Of the elements at some places, one for each row."""

    def loss(x: Any) -> Any:
        return jnp.take_along_axis(x, labels[..., None], -1).sum()

    return jax.grad(loss)(x)


def in_a_loop(x: Any, labels: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda _, x: x - gradient(x, labels), x)


def add_elements(x: Any, places: Any) -> Any:
    return jax.vmap(lambda one, at: one.at[at[0], at[1]].add(1.0))(x, places)


def write_slices(x: Any, places: Any) -> Any:
    return jax.vmap(lambda one, at: one.at[at].set(one[0]))(x, places)


@pytest.mark.parametrize(
    ("step", "shape", "places", "moves"),
    [
        (gradient, (64, 32), (64,), True),
        (gradient, (64, 8, 32), (64, 8), True),
        (in_a_loop, (64, 32), (64,), True),
        (add_elements, (64, 8, 32), (64, 2), True),
        (write_slices, (64, 8, 32), (64,), False),
    ],
)
def test_rows_that_have_a_place_each(
    step: Any, shape: Any, places: Any, moves: bool
) -> None:
    """The compiler for TPUs counts the rows of a scatter of single elements."""
    given = struct(*shape), struct(*places, dtype=jnp.int32)
    found = plan(step, *given, layout_map=rules())
    assert bool(found.collectives) == moves


def turned(x: Any, y: Any) -> Any:
    """Summed over the middle dim of what is computed from a broadcast."""
    hot = jnp.where(y[None, :, None] > 0, y[None, :, None] * 2.0, x.shape[0])
    hot = jnp.broadcast_to(hot, x.shape) + (hot + hot)
    return jnp.einsum("bk,bkc->bc", hot[:, :, 0], hot)


@pytest.mark.parametrize(
    ("step", "shapes", "products"),
    [
        (lambda x, y: jnp.einsum("bi,bj->bij", x, y), [(2, 3), (2, 4)], 0),
        (lambda x, y: jnp.einsum("bij,bj->bi", x, y), [(2, 3, 4), (2, 4)], 0),
        (lambda x, y: jnp.einsum("jb,jbi->bi", x, y), [(4, 2), (4, 2, 3)], 0),
        (jnp.vdot, [(5,), (5,)], 0),
        (turned, [(2, 3, 4), (3,)], 0),
        (jnp.matmul, [(2, 3), (3, 4)], 1),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_products_of_few_dims_are_written_out(
    step: Any, shapes: Any, products: int, dtype: Any
) -> None:
    """The program for the partitioner computes the same."""
    numbers = np.random.default_rng(0)
    args = [numbers.integers(-9, 9, shape).astype(dtype) for shape in shapes]
    lowered = jax.jit(step, keep_unused=True).lower(*args)
    code = code_to_partition(lowered)
    with mlir.make_ir_context():
        module = ir.Module.parse(code.bytecode)
        given = [ir.DenseElementsAttr.get(one) for one in args]
        (found,) = stablehlo.eval_module(module, given)
        text = str(module)
        np.testing.assert_array_equal(np.array(found), step(*args))
    assert text.count("stablehlo.dot_general") == products
    assert step is not turned or "transpose" not in text
