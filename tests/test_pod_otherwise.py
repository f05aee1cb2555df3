"""flm.pod.plan: operations of which XLA moves other things than Shardy says."""

import os
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import needs_libtpu
from jax.sharding import NamedSharding, PartitionSpec

import flax_layoutmap as flm
from flax_layoutmap.pod._hlo import read_program

P = PartitionSpec
ROWS, COLUMNS, BOTH = P("data"), P(None, "model"), P("data", "model")
OVER_MODEL = P("model")


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


TABLE, SQUARE, BATCH = struct(64, 32), struct(32, 32), struct(8, 32, 32)
PLACES, FEW = struct(64, dtype=jnp.int32), struct(8, dtype=jnp.int32)


def jitted(function: Any, mesh: flm.DeviceMesh, specs: Any, out: Any, args: Any) -> Any:
    """A function of `jax.jit`, and arguments with their layouts."""
    jax_mesh: Any = mesh.jax_mesh
    shardings = [NamedSharding(jax_mesh, spec) for spec in specs]
    given = [
        jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=sharding)
        for one, sharding in zip(args, shardings, strict=True)
    ]
    options: dict[str, Any] = {}
    if out is not None:
        options["out_shardings"] = NamedSharding(jax_mesh, out)
    return jax.jit(function, **options), given


def planned(
    function: Any,
    *args: Any,
    specs: Any,
    out: Any = None,
    platform: str = "tpu",
) -> flm.pod.PodReport:
    mesh = flm.DeviceMesh.abstract((2, 4), ("data", "model"))
    step, given = jitted(function, mesh, specs, out, args)
    return flm.pod.plan(step, *given, mesh=mesh, platform=platform)


def sent(collectives: Any) -> Counter[Any]:
    """Bytes of each kind over each set of axes; on CPUs no sum is scattered."""
    found: Counter[Any] = Counter()
    for one in collectives:
        is_sum = one.kind == "reduce-scatter"
        kind = "all-reduce" if is_sum else one.kind
        size = one.wire_bytes * one.executions * (1 + is_sum)
        found[kind, frozenset(one.axes)] += size
    return found


def planned_and_compiled(
    function: Any, mesh: flm.DeviceMesh, *args: Any, specs: Any, out: Any
) -> tuple[flm.pod.PodReport, Counter[Any]]:
    """A plan for CPUs, and what the program for 8 of them sends."""
    report = planned(function, *args, specs=specs, out=out, platform="cpu")
    step, given = jitted(function, mesh, specs, out, args)
    text: Any = step.lower(*given).compile().as_text()
    program = read_program(text, mesh.axis_names, mesh.shape)
    assert not program.unrecognised
    return report, sent(program.collectives)


def approximately(x: Any) -> Any:
    return jax.lax.approx_max_k(x, 4)[0]


# The function, its arguments, their layouts, that of the result, and what is said.
OTHERWISE: dict[str, tuple[Any, tuple[Any, ...], tuple[Any, ...], Any, str]] = {
    "fft": (lambda x: jnp.fft.fft(x).real, (TABLE,), (COLUMNS,), COLUMNS, "fft"),
    # Along another dim: it is gathered on CPUs and GPUs alone.
    "fft of a batch": (
        lambda x: jnp.fft.fft(x).real,
        (TABLE,),
        (ROWS,),
        ROWS,
        "fft",
    ),
    "approx_max_k": (approximately, (TABLE,), (BOTH,), ROWS, "ApproxTopK"),
    "rows of itself": (
        lambda x, at: x[at],
        (struct(64), PLACES),
        (OVER_MODEL, OVER_MODEL),
        OVER_MODEL,
        "gather",
    ),
    "matrices of itself": (
        lambda x, at: x[at],
        (struct(64, 8, 16), PLACES),
        (OVER_MODEL, OVER_MODEL),
        OVER_MODEL,
        "gather",
    ),
    "columns of itself": (
        lambda x, at: x[:, at],
        (TABLE, FEW),
        (COLUMNS, OVER_MODEL),
        COLUMNS,
        "gather",
    ),
    "columns in another order": (
        lambda x: jax.random.permutation(jax.random.key(0), x, axis=1),
        (TABLE,),
        (COLUMNS,),
        COLUMNS,
        "gather",
    ),
    "rows that are written": (
        lambda x, rows, at: x.at[at].set(rows),
        (TABLE, TABLE, PLACES),
        (ROWS, ROWS, ROWS),
        ROWS,
        "scatter",
    ),
    "columns that are added to": (
        lambda x, at: x.at[:, at].add(1.0),
        (TABLE, FEW),
        (COLUMNS, OVER_MODEL),
        COLUMNS,
        "scatter",
    ),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_xla_moves_otherwise_is_said(name: str, mesh: flm.DeviceMesh) -> None:
    function, args, specs, out, what = OTHERWISE[name]
    report, compiled = planned_and_compiled(function, mesh, *args, specs=specs, out=out)
    (said,) = report.unrecognised
    assert said.startswith(what) and "not counted as XLA" in said
    assert sent(report.collectives) != compiled
    with pytest.raises(AssertionError, match="did not read all of"):
        report.forbid(axis="data", kind="collective-permute")


SOLVERS: dict[str, Any] = {
    "qr": lambda x: jnp.linalg.qr(x)[0],
    "eigh": lambda x: jnp.linalg.eigh(x)[1],
    "svd": lambda x: jnp.linalg.svd(x, full_matrices=False)[0],
    "lu": lambda x: jax.scipy.linalg.lu_factor(x)[0],
    "cholesky": jnp.linalg.cholesky,
    "triangular_solve": lambda x: jax.scipy.linalg.solve_triangular(x, 2 * x),
}
IN_BATCHES = P("data", None, "model")


@pytest.mark.parametrize("name", SOLVERS)
def test_matrices_of_which_each_device_has_a_part(
    name: str, mesh: flm.DeviceMesh
) -> None:
    """What solves them has them whole; of a batch of them each device has some."""
    function = SOLVERS[name]
    report, compiled = planned_and_compiled(
        function, mesh, BATCH, specs=[IN_BATCHES], out=IN_BATCHES
    )
    assert report.unrecognised and sent(report.collectives) != compiled
    report, compiled = planned_and_compiled(
        function, mesh, BATCH, specs=[ROWS], out=ROWS
    )
    assert not report.unrecognised and not report.collectives and not compiled


@pytest.mark.parametrize("name", SOLVERS)
def test_what_solves_them_for_tpus(name: str) -> None:
    """That compiler gathers batches, too, for two of them, and loops over a third."""
    function = SOLVERS[name]
    report = planned(function, BATCH, specs=[IN_BATCHES], out=IN_BATCHES)
    assert report.unrecognised
    report = planned(function, BATCH, specs=[ROWS], out=ROWS)
    assert bool(report.unrecognised) == (name in ("eigh", "lu", "svd"))
    # What every device has whole, and needs whole, is not moved.
    report = planned(function, SQUARE, specs=[P()], out=P())
    assert not [what for what in report.unrecognised if not what.startswith("loop")]


def write_each(x: Any, rows: Any, at: Any) -> Any:
    """A cache to which every sequence writes at a place of its own."""

    def write(x: Any, rows: Any, at: Any) -> Any:
        return jax.lax.dynamic_update_slice(x, rows, (at, 0))

    return jax.vmap(write)(x, rows, at)


@jax.grad
def pool_gradient(x: Any) -> Any:
    window = (1, 2, 2, 1)
    pooled = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")
    return (pooled**2).sum()


ROW, IMAGE = struct(8, 1, 32), struct(4, 16, 16, 2)
AGREED: dict[str, tuple[Any, tuple[Any, ...], tuple[Any, ...], Any]] = {
    "joined": (lambda x: jnp.concatenate([x, 2 * x], 1), (TABLE,), (COLUMNS,), COLUMNS),
    "joined along another dim": (
        lambda x: jnp.concatenate([x, 2 * x]),
        (TABLE,),
        (COLUMNS,),
        COLUMNS,
    ),
    "sorted": (lambda x: jnp.sort(x), (TABLE,), (COLUMNS,), COLUMNS),
    "sorted along another dim": (
        lambda x: jnp.sort(x),
        (TABLE,),
        (ROWS,),
        ROWS,
    ),
    "argmax": (lambda x: jnp.argmax(x, 1), (TABLE,), (COLUMNS,), None),
    "approx_max_k of rows": (approximately, (TABLE,), (ROWS,), ROWS),
    "repeated": (lambda x: jnp.repeat(x, 2, 1), (TABLE,), (COLUMNS,), COLUMNS),
    "heads that divide": (
        lambda x: x.reshape(64, 8, 4) * 2,
        (TABLE,),
        (COLUMNS,),
        None,
    ),
    "flat": (lambda x: x.reshape(-1), (TABLE,), (BOTH,), P(("data", "model"))),
    "a label of each row": (
        lambda x, at: jnp.take_along_axis(x, at[:, None], 1),
        (TABLE, PLACES),
        (BOTH, ROWS),
        ROWS,
    ),
    "columns for other rows": (
        lambda x, at: x[:, at],
        (TABLE, FEW),
        (COLUMNS, ROWS),
        P(None, "data"),
    ),
    "rows into another array": (
        lambda x, at: jnp.zeros((16, 4, 32)).at[at, at % 4].add(x),
        (TABLE, PLACES),
        (ROWS, ROWS),
        OVER_MODEL,
    ),
    "rows for each": (write_each, (BATCH, ROW, FEW), (ROWS, ROWS, ROWS), ROWS),
    # Each device writes what is its own.
    "a row for each": (write_each, (BATCH, ROW, FEW), (BOTH, ROWS, ROWS), BOTH),
    "a row that is added for each": (
        lambda x, u, at: jax.vmap(lambda x, u, at: x.at[at].add(u))(x, u, at),
        (BATCH, struct(8, 32), FEW),
        (BOTH, ROWS, ROWS),
        BOTH,
    ),
    # Of windows that do not overlap.
    "max-pool": (pool_gradient, (IMAGE,), (COLUMNS,), COLUMNS),
    "max-pool, both dims": (
        pool_gradient,
        (IMAGE,),
        (P(None, "data", "model"),),
        P(None, "data", "model"),
    ),
}


@pytest.mark.parametrize("name", AGREED)
def test_where_both_move_the_same(name: str, mesh: flm.DeviceMesh) -> None:
    function, args, specs, out = AGREED[name]
    report, compiled = planned_and_compiled(function, mesh, *args, specs=specs, out=out)
    assert not report.unrecognised
    assert sent(report.collectives) == compiled


def test_what_is_not_sharded_along_the_dim_is_not_said_for_tpus() -> None:
    """Compiled for v5e:2x4 on 2026-11-22, none of them moves anything."""
    transforms = (jnp.fft.fft, jnp.fft.fft2, lambda x: jnp.fft.fft(x, axis=1))
    for transform in transforms:
        report = planned(lambda x, f=transform: f(x).real, BATCH, specs=[ROWS])
        assert not report.unrecognised and not report.collectives
    report = planned(lambda x: jnp.fft.fft(x).real, TABLE, specs=[COLUMNS])
    assert report.unrecognised == {
        "fft along a sharded dim, not counted as XLA moves it": 1
    }


def test_what_is_sorted_on_tpus() -> None:
    """That compiler sorts the places of equal elements, too: as for v5e:2x4."""
    options: Any = {"specs": [COLUMNS], "out": COLUMNS}
    report = planned(jnp.sort, TABLE, **options)
    found = [(one.kind, one.dtype, one.bytes) for one in report.collectives]
    moved = ("all-to-all", "float32", 2048)
    assert found == [moved, ("all-to-all", "int32", 2048), moved]
    assert report.collectives[1].path is None
    unstable = planned(lambda x: jax.lax.sort(x, is_stable=False), TABLE, **options)
    assert len(unstable.collectives) == 2
    # There the places are sorted anyway.
    assert len(planned(jnp.argsort, TABLE, **options).collectives) == 3
    assert not planned(jnp.sort, TABLE, specs=[ROWS], out=ROWS).collectives


def test_what_may_lie_over_a_border(mesh: flm.DeviceMesh) -> None:
    """XLA gathers what several rows are written to; Shardy of jax 0.8 does not."""
    args: Any = BATCH, struct(8, 4, 32), FEW
    specs = (BOTH, ROWS, ROWS)
    report, compiled = planned_and_compiled(
        write_each, mesh, *args, specs=specs, out=BOTH
    )
    assert {*compiled} == {("all-gather", frozenset({"model"}))}
    if sent(report.collectives) != compiled:
        what = "scatter along a sharded dim, not counted as XLA moves it"
        assert report.unrecognised == {what: 1}


@needs_libtpu
@pytest.mark.parametrize(
    "function, x, spec, same",
    [
        (jnp.sort, TABLE, COLUMNS, True),
        (pool_gradient, IMAGE, COLUMNS, True),
        (lambda x: jnp.fft.fft(x).real, BATCH, ROWS, True),
        (SOLVERS["qr"], BATCH, ROWS, True),
        (SOLVERS["eigh"], BATCH, ROWS, False),
        (lambda x: jnp.fft.fft(x).real, TABLE, COLUMNS, False),
    ],
    ids=["sort", "max-pool", "fft of a batch", "qr", "eigh", "fft"],
)
def test_the_compiler_for_tpus(function: Any, x: Any, spec: Any, same: bool) -> None:
    mesh = flm.DeviceMesh.abstract((2, 4), ("data", "model"))
    step, given = jitted(function, mesh, [spec], spec, [x])
    report = flm.pod.plan(step, *given, mesh=mesh)
    compiled = flm.pod.compile(step, *given, mesh=mesh, topology="v5e:2x4")
    is_same = sent(report.collectives) == sent(compiled.collectives)
    assert is_same is same and bool(report.unrecognised) is not same


def test_unevenly_joined(mesh: flm.DeviceMesh) -> None:
    """The TPU compiler sends what lies over a border, and adds it up."""
    token, x = struct(8, 1, 16), struct(8, 32, 16)
    specs = (ROWS, BOTH)

    def joined(token: Any, x: Any) -> Any:
        return jnp.concatenate([token, x], 1)

    what = "concatenate along a sharded dim, not counted as XLA moves it"
    assert planned(joined, token, x, specs=specs).unrecognised == {what: 1}
    even = planned(joined, struct(8, 4, 16), x, specs=specs)
    assert not even.unrecognised
    assert not planned(joined, token, x, specs=(ROWS, ROWS)).unrecognised


def test_heads_that_do_not_divide(mesh: flm.DeviceMesh) -> None:
    """Shardy lays six out in two parts of three; the partitioner gathers halves."""

    def scores(x: Any, w: Any) -> Any:
        y = (x @ w).reshape(8, 16, 6, 8)
        return jnp.einsum("bqnh,bknh->bnqk", y, y)

    args: Any = struct(8, 16, 32), struct(32, 48)
    specs = (ROWS, COLUMNS)
    report, compiled = planned_and_compiled(scores, mesh, *args, specs=specs, out=ROWS)
    assert sent(report.collectives) != compiled
    (what,) = report.unrecognised
    assert what.startswith(("move between parts of an axis", "reshape along a sharded"))


def test_custom_calls_of_others() -> None:
    """Shardy may take the layout of a result from what asks for it."""

    def called(x: Any) -> Any:
        result = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.ffi.ffi_call("a_kernel", result)(x)

    report = planned(called, TABLE, specs=[COLUMNS], out=COLUMNS)
    (what,) = report.unrecognised
    assert what.startswith("a_kernel along a sharded dim")
    assert not planned(called, TABLE, specs=[P()], out=P()).unrecognised


@pytest.mark.parametrize(
    ("groups", "channels", "gradient", "said"),
    [(1, 16, False, 0), (1, 16, True, 0), (16, 1, False, 0), (16, 1, True, 1)],
)
def test_convolutions_in_groups(
    groups: int, channels: int, gradient: bool, said: int
) -> None:
    def convolved(params: Any, x: Any) -> Any:
        y = jax.lax.conv_general_dilated(
            x,
            params["kernel"],
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )
        return (y**2).mean()

    step = jax.grad(convolved) if gradient else convolved
    params = {"kernel": jax.ShapeDtypeStruct((3, 3, channels, 16), jnp.float32)}
    x = jax.ShapeDtypeStruct((32, 8, 8, 16), jnp.float32)
    rules = flm.LayoutMap(batch="data")
    rules["kernel"] = None
    given = {"mesh": "data=8", "layout_map": rules, "donate_argnames": "params"}
    report = flm.pod.plan(step, params, x, **given)
    assert sum(report.unrecognised.values()) == said


def test_lines_of_the_step_are_named() -> None:
    def cut(x: Any) -> Any:
        y = x[:, 1:9] + x[:, 2:10]  # one line, two slices
        return y + x[:, 3:11]

    report = planned(cut, TABLE, specs=[COLUMNS], out=COLUMNS)
    ((what, times),) = report.unrecognised.items()
    assert times == 3
    line = cut.__code__.co_firstlineno
    name = f"{os.path.basename(__file__)}:%d test_lines_of_the_step_are_named.cut"
    lines = name % (line + 1), name % (line + 2)
    assert report.unrecognised_at == {what: lines}
    text = f"unrecognised: {what} (3); at {', '.join(lines)}"
    assert text in report.report().splitlines()
    assert report.to_json()["unrecognised_at"] == {what: [*lines]}
