"""Collectives of XLA's partitioner: merged, rewritten, and scaled to large meshes."""

import dataclasses
import functools
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
    compiled,
    entry,
    kinds,
    payload,
    plan,
    rules,
    struct,
)

import flax_layoutmap as flm
from flax_layoutmap.pod import _partition
from flax_layoutmap.pod._hlo import Program, wire_bytes
from flax_layoutmap.pod._merge import merge
from flax_layoutmap.pod._partition import (
    NotScaled,
    Shortened,
    code_to_partition,
    scaled,
    shortened,
)
from flax_layoutmap.pod._records import Collective, Kind

# ---------------------------------------------------------------- what is merged

SUM = ("all-reduce", ("model",), None)


def equal(p: Any, x: Any) -> Any:
    """Gathers w once for itself and its transpose, and once for what is made of it."""
    return (x @ p["w"]) @ p["w"].T, x @ (2 * p["w"])


def apart(p: Any, x: Any) -> Any:
    first, second = x @ p["a"], x @ p["b"]
    return first + second, jnp.tanh(first), jnp.tanh(second)


def same_everywhere(p: Any, x: Any) -> Any:
    zeros = jax.lax.with_sharding_constraint(jnp.zeros((16, 16)), P("model"))
    return jax.lax.with_sharding_constraint(zeros, P()), p["a"] * 1


@pytest.mark.parametrize(
    ("step", "count"),
    [
        (lambda p, x: x @ p["a"] + x @ p["b"] + x @ p["c"], 1),
        (lambda p, x: x @ p["a"] - x @ p["b"], 1),
        (lambda p, x: (x @ p["a"]) * (x @ p["b"]), 2),
        (apart, 2),
        # As libtpu 0.0.42 compiles a residual that is added before the second sum.
        (lambda p, x: (x @ p["a"] + 1) + x @ p["b"], 2),
        (same_everywhere, 0),
        # Of which no sum is a maximum.
        (lambda p, x: p["a"].max(0) + p["b"].max(0), 2),
        (lambda p, x: p["a"].max(0) - p["a"].min(0), 2),
    ],
    ids=["a chain", "a difference", "a product", "used apart", "something between"]
    + ["the same everywhere", "maxima", "a range"],
)
def test_sums_that_are_one(step: Any, count: int) -> None:
    params = {name: struct(16, 16) for name in "abc"}
    layouts = rules(**{"[abc]": ("model", None)})
    jax_mesh: Any = flm.DeviceMesh.abstract(MESH).jax_mesh
    with jax.sharding.use_abstract_mesh(jax_mesh):
        report = plan(step, params, struct(8, 16), layout_map=layouts)
    assert kinds(report) == ({("all-reduce", ("model",), None): count} if count else {})


def test_reductions_that_end_alike_are_no_equal_operations() -> None:
    def step(params: Any, x: Any) -> Any:
        made = (jnp.sin, jnp.cos, jnp.sin)
        return [
            jax.lax.reduce(params["w"], 0.0, lambda a, b, f=f: a + f(b), (0,))
            for f in made
        ]

    report = plan(step, SQUARE, X, layout_map=rules(**ROWS))
    assert kinds(report) == {SUM: 2}


def own_number(x: Any) -> Any:
    number = jax.lax.axis_index("data").astype(x.dtype)
    return jax.lax.all_gather(jnp.full((1024,), number), "data")


def own_sum(x: Any) -> Any:
    return jax.lax.all_gather(jnp.full((1024,), x.sum()), "data")


@pytest.mark.parametrize("local", [own_number, own_sum])
def test_what_differs_in_a_shard_map_is_gathered(local: Any) -> None:
    def step(x: Any) -> Any:
        specs: Any = {"in_specs": P("data"), "out_specs": P(), "check_vma": False}
        return jax.shard_map(local, **specs)(x)

    report = plan(step, X, layout_map=rules())
    assert kinds(report) == {("all-gather", ("data",), None): 1}


def doubled(x: Any) -> Any:
    for _ in range(40):
        x = x + x.astype(jnp.bfloat16).astype(x.dtype)
    return x


def added_to(x: Any) -> Any:
    for at in range(1200):
        x = x + float(at)
    return x


@pytest.mark.parametrize("follow", [doubled, added_to])
def test_long_sums_behind_a_sum(follow: Any) -> None:
    report = plan(
        lambda p, x: follow(x @ p["w"]), SQUARE, struct(8, 16), layout_map=rules(**ROWS)
    )
    assert kinds(report) == {SUM: 1}


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


ON_TPUS: dict[str, Any] = {"topology": "v5e:2x4"}


@pytest.mark.parametrize(
    ("apart", "precision", "where", "dtypes"),
    [
        (0, None, {}, ["float32"]),
        (0, None, ON_TPUS, ["bfloat16"]),
        (0, "highest", ON_TPUS, ["float32"]),
        # A gather is made again for a use that is far.
        (90, None, ON_TPUS, ["bfloat16"]),
        (120, None, ON_TPUS, ["bfloat16"] * 2),
        (120, None, {}, ["float32"]),
    ],
)
def test_what_tpus_gather(
    apart: int, precision: Any, where: Any, dtypes: list[str]
) -> None:
    """In the precision of matrix products, and near to each use."""

    def step(params: Any, x: Any) -> Any:
        y = jnp.dot(x, params["w"], precision=precision)
        for _ in range(apart):
            y = jnp.sin(y)
        return jnp.dot(y, params["w"].T, precision=precision)

    layouts = rules(("data", "model"), w=("data", None))
    report = plan(step, {"w": struct(16, 16)}, X, layout_map=layouts, **where)
    assert [one.dtype for one in report.collectives] == dtypes


@pytest.mark.parametrize(
    ("step", "dtype"),
    [
        (lambda y, p, x: y @ p["b"], "bfloat16"),
        (lambda y, p, x: jnp.tanh(y.astype(jnp.bfloat16)), "bfloat16"),
        (lambda y, p, x: jnp.pad(y, ((0, 8), (0, 0))) @ p["b"], "bfloat16"),
        (lambda y, p, x: jax.nn.relu(y) @ p["b"], "bfloat16"),
        (lambda y, p, x: jnp.where(x[:, :1] > 0, y, 0) @ p["b"], "bfloat16"),
        (lambda y, p, x: jnp.concatenate([y, x]) @ p["b"], "bfloat16"),
        (lambda y, p, x: -y @ p["b"], "float32"),
        (lambda y, p, x: (y @ p["b"], jnp.tanh(y)), "float32"),
        (lambda y, p, x: y.astype(jnp.int32), "float32"),
        (lambda y, p, x: jnp.dot(y, p["b"], precision="highest"), "float32"),
    ],
    ids=["multiplied", "converted", "padded", "relu", "selected", "concatenated"]
    + ["negated", "used elsewhere", "to integers", "highest precision"],
)
def test_what_tpus_sum(step: Any, dtype: str) -> None:
    """In the precision of matrix products, as libtpu 0.0.42 compiles these."""
    params = {"a": struct(16, 16), "b": struct(16, 16)}
    layouts = rules(None, a=("model", None), b=None)
    report = plan(
        lambda p, x: step(x @ p["a"], p, x),
        params,
        struct(8, 16),
        layout_map=layouts,
        topology="v5e:2x4",
    )
    sums = [one for one in report.collectives if one.kind == "all-reduce"]
    assert [one.dtype for one in sums] == [dtype]


def step_of_parts(kind: str, params: Any, x: Any) -> Any:
    """Updates parameters by gradients for four parts of a batch, which a loop adds."""
    w = params["w"]
    xs = flm.distribute_tensor(x.reshape(4, -1, 256), (None, "data", None))

    def loss(w: Any, x: Any) -> Any:
        return (jnp.tanh(x @ w) ** 2).astype(jnp.float32).mean()

    def one(total: Any, x: Any) -> Any:
        gradient = jax.grad(loss)(w, x)
        if kind == "each is scaled":
            gradient = gradient / 4
        used = gradient.max() if kind == "used elsewhere" else None
        return total + gradient.astype(jnp.float32), used

    def of_all(w: Any) -> Any:
        return jax.lax.scan(lambda c, x: (c + loss(w, x), None), 0.0, xs)[0]

    used, start = None, jnp.zeros(w.shape)
    if kind == "gradient of a loop":
        total = jax.grad(of_all)(w)
    elif kind == "in a loop":
        total, _ = jax.lax.scan(
            lambda c, _: jax.lax.scan(one, c, xs), start, None, length=3
        )
    else:
        total, used = jax.lax.scan(one, start, xs)
    return {"w": w - total.astype(w.dtype)}, used


@pytest.mark.parametrize(
    ("kind", "where", "wanted"),
    [
        ("added up", {}, {("bfloat16", 4)}),
        # Rounded for the update, it is summed in this precision, too.
        ("added up", ON_TPUS, {("bfloat16", 1)}),
        ("gradient of a loop", ON_TPUS, {("bfloat16", 1)}),
        ("in a loop", ON_TPUS, {("float32", 3)}),
        ("each is scaled", ON_TPUS, {("bfloat16", 4)}),
        # The compiler sums once more after the loop, which is not done here.
        ("used elsewhere", ON_TPUS, {("bfloat16", 4)}),
    ],
)
def test_tpus_sum_after_a_loop(kind: str, where: Any, wanted: Any) -> None:
    """What the loop only adds up, as libtpu 0.0.42 compiles gradients of parts."""
    report = plan(
        functools.partial(step_of_parts, kind),
        {"w": struct(256, 256, dtype=jnp.bfloat16)},
        struct(8192, 256, dtype=jnp.bfloat16),
        layout_map=rules("data", w=None),
        mesh="data=8",
        donate_argnames="params",
        **where,
    )
    sums = [one for one in report.collectives if one.shape == (256, 256)]
    assert {(one.dtype, one.executions) for one in sums} == wanted
    assert {(one.kind, one.path) for one in sums} == {("all-reduce", "params/w")}


@pytest.mark.parametrize(
    ("layout", "where", "wanted"),
    [
        (None, {}, {(("model",), "all-reduce"), (("data",), "all-reduce")}),
        (None, ON_TPUS, {(BOTH, "all-reduce")}),
        # One sum over both axes, though over one of them it could be scattered.
        ((None, "data"), ON_TPUS, {(BOTH, "all-reduce")}),
    ],
)
def test_tpus_sum_over_all_axes_at_once(layout: Any, where: Any, wanted: Any) -> None:
    """The gradient of rows that are taken by tokens with two dims laid out.

    As libtpu 0.0.42 compiles it.
    """

    def step(params: Any, tokens: Any) -> Any:
        tokens = flm.distribute_tensor(tokens, ("data", "model"))
        gradient = jax.grad(lambda w: (w[tokens] ** 2).sum())(params["w"])
        return {"w": params["w"] - gradient}

    report = plan(
        step,
        {"w": struct(64, 16)},
        struct(32, 64, dtype=jnp.int32),
        layout_map=rules("data", w=layout),
        donate_argnames="params",
        **where,
    )
    sums = {(one.axes, one.kind) for one in report.collectives}
    assert {one for one in sums if one[1] != "all-gather"} == wanted


def far_from_each_other(p: Any, x: Any) -> Any:
    """One use at the beginning and two at the end."""
    y = first = x @ p["w"]
    for _ in range(120):
        y = jnp.sin(y)
    return first, y @ p["w"].T, jnp.cos(y) @ p["w"].T


@pytest.mark.parametrize(("where", "count"), [({}, 1), (ON_TPUS, 3)])
def test_what_is_far_is_near_to_nothing_else(where: Any, count: int) -> None:
    """As compiled with libtpu 0.0.42: of far gathers no two are one."""
    layouts = rules(("data", "model"), w=("data", None))
    report = plan(
        far_from_each_other, {"w": struct(16, 16)}, X, layout_map=layouts, **where
    )
    assert len(report.collectives) == count


@pytest.mark.parametrize(
    ("where", "axes"),
    [({}, [("model",), ("data",)]), (ON_TPUS, [("data", "model")])],
)
def test_tpus_gather_all_dims_at_once(where: Any, axes: Any) -> None:
    layouts = rules(("data", "model"), w=("data", "model"))
    params, x = {"w": struct(16, 512)}, struct(4096, 16)
    report = plan(lambda p, x: x @ p["w"], params, x, layout_map=layouts, **where)
    assert [one.axes for one in report.collectives] == axes
    last = report.collectives[-1]
    assert last.wire_bytes == last.bytes * (7 if where else 4) // 8


def test_gathers_over_the_same_axis_are_two() -> None:
    def twice(x: Any) -> Any:
        once = jax.lax.all_gather(x, "data", tiled=True)
        return jax.lax.all_gather(once, "data", tiled=True)

    def step(x: Any) -> Any:
        specs: Any = {"in_specs": P("data"), "out_specs": P(), "check_vma": False}
        return jax.shard_map(twice, **specs)(x)

    report = plan(step, X, layout_map=rules(), topology="v5e:2x4")
    assert [one.shape for one in report.collectives] == [(512, 16), (1024, 16)]


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


# ------------------------------------------------------ what is rewritten for TPUs


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
    assert not plan(step, *given, layout_map=rules(), platform="cpu").collectives


@pytest.mark.parametrize(
    ("spec", "on_tpus"), [(P("data", "model"), {("model",)}), (P("data"), set())]
)
def test_the_largest_few(spec: P, on_tpus: Any, mesh: flm.DeviceMesh) -> None:
    """The compiler for CPUs gathers the batch; that for TPUs moves nothing of it."""
    jitted = jax.jit(lambda x: jax.lax.top_k(x, 2)[0])
    jax_mesh: Any = mesh.jax_mesh
    sharding = jax.sharding.NamedSharding(jax_mesh, spec)
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=sharding)
    assert {one.axes for one in flm.pod.plan(jitted, x).collectives} == on_tpus
    wanted = payload(compiled(jitted, x, mesh=mesh))
    assert wanted and payload(flm.pod.plan(jitted, x, platform="cpu").collectives) == (
        wanted
    )


def turned(x: Any, y: Any) -> Any:
    """Summed over the middle dim of what is computed from a broadcast."""
    hot = jnp.where(y[None, :, None] > 0, y[None, :, None] * 2.0, x.shape[0])
    hot = jnp.broadcast_to(hot, x.shape) + (hot + hot)
    return jnp.einsum("bk,bkc->bc", hot[:, :, 0], hot)


def far_back(x: Any, y: Any) -> Any:
    for at in range(1200):
        x = x + at
    return jnp.einsum("bji,bj->bi", x, y)


def swapped(x: Any, y: Any) -> Any:
    return jnp.einsum("bij,bjk->bki", x, y)


@pytest.mark.parametrize(
    ("step", "shapes", "products"),
    [
        (lambda x, y: jnp.einsum("bi,bj->bij", x, y), [(2, 3), (2, 4)], 0),
        (lambda x, y: jnp.einsum("bij,bj->bi", x, y), [(2, 3, 4), (2, 4)], 0),
        (lambda x, y: jnp.einsum("jb,jbi->bi", x, y), [(4, 2), (4, 2, 3)], 0),
        (jnp.vdot, [(5,), (5,)], 0),
        (turned, [(2, 3, 4), (3,)], 0),
        (far_back, [(2, 3, 4), (2, 3)], 0),
        (jnp.matmul, [(2, 3), (3, 4)], 1),
        (swapped, [(2, 3, 4), (2, 4, 5)], 1),
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
    code = code_to_partition(lowered, as_tpus=True)
    with mlir.make_ir_context():
        module = ir.Module.parse(code.bytecode)
        given = [ir.DenseElementsAttr.get(one) for one in args]
        (found,) = stablehlo.eval_module(module, given)
        text = str(module)
        np.testing.assert_array_equal(np.array(found), step(*args))
    assert text.count("stablehlo.dot_general") == products
    assert step not in (swapped, turned) or "transpose" not in text


# ------------------------------------------------- more devices than it takes


def layer(params: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        y = jax.nn.relu(x @ params["up"]) @ params["down"]
        return (y.astype(jnp.float32) ** 2).mean()

    return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))


def planned(mesh: str, step: Any = layer, **options: Any) -> flm.pod.PodReport:
    layout_map = rules("fsdp", up=("fsdp", "tensor"), down=("tensor", "fsdp"))
    params = {
        "up": struct(4096, 16384, dtype=jnp.bfloat16),
        "down": struct(16384, 4096, dtype=jnp.bfloat16),
    }
    x = struct(65536, 4096, dtype=jnp.bfloat16)
    given: Any = {"layout_map": layout_map, "donate_argnames": "params", **options}
    return flm.pod.plan(step, params, x, mesh=mesh, **given)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("fsdp=64,tensor=4", {}),
        ("fsdp=64,tensor=4", {"topology": "v5e:16x16"}),
        ("fsdp=128,tensor=2", {"topology": "v6e:16x16"}),
        ("fsdp=16,tensor=16", {"topology": "v5e:16x16"}),
    ],
)
def test_scaled_as_on_the_mesh_itself(
    mesh: str, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = planned(mesh, **options)
    monkeypatch.setattr(_partition, "MOST_DEVICES", 128)
    found = planned(mesh, **options)
    assert found.engine == wanted.engine == "plan"
    assert found.collectives == wanted.collectives and not found.unrecognised


def test_more_devices_than_the_partitioner_takes() -> None:
    report = planned("fsdp=1024,tensor=4")
    assert report.engine == "plan" and report.mesh.size == 4096
    gathers = [one for one in report.collectives if one.kind == "all-gather"]
    whole = 2 * 4096 * 16384 // 4
    assert {(one.bytes, one.wire_bytes) for one in gathers} == {
        (whole, whole * 1023 // 1024)
    }


def test_one_device_needs_no_estimate() -> None:
    report = planned("fsdp=1,tensor=1")
    assert (report.engine, report.collectives, report.unrecognised) == ("plan", (), {})


@pytest.mark.parametrize(("members", "is_read"), [(24, True), (6, True), (4, False)])
def test_groups_over_parts_of_axes_that_cross_slices(
    members: int, is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four of three slices: how many of them are in one is not known."""
    sent = wire_bytes("all-gather", 2**20, members)
    axes = ("data", "fsdp")
    one = dataclasses.replace(
        sends("all-gather", 2**10, 2**10, sent=sent), axes=axes, path="p/w"
    )
    monkeypatch.setattr(_partition, "_read", lambda *_: program(one))
    layouts = rules("data", w=None)
    where = {"mesh": "data=3,fsdp=8", "topology": "v5e:2x4", "slices": 3}
    x = struct(24, 16)
    given: Any = {"layout_map": layouts, "donate_argnames": "p", **where}
    report = plan(lambda p, x: (x @ p["w"], p), SQUARE, x, **given)
    assert bool(report.unrecognised) != is_read
    assert {one.over_dcn for one in report.collectives} == {True, not is_read}


def in_a_shard_map(params: Any, x: Any) -> Any:
    mapped = jax.shard_map(jnp.sin, in_specs=P("fsdp"), out_specs=P("fsdp"))
    return layer(params, mapped(x))


def test_a_shard_map_on_more_devices_is_an_estimate() -> None:
    report = planned("fsdp=1024,tensor=4", in_a_shard_map)
    assert report.engine == "estimate" and report.collectives
    (what,) = report.unrecognised
    assert what == (
        "the collectives are an estimate: in a shard_map, sizes are those of single "
        "devices"
    )
    with pytest.raises(AssertionError, match="did not read all"):
        report.forbid(kind="all-to-all")


def sends(kind: Kind, *shape: int, sent: int | None = None) -> Collective:
    """What runs over `fsdp`, of bytes."""
    size = shape[0] * shape[1]
    return Collective(
        kind=kind,
        axes=("fsdp",),
        bytes=size,
        wire_bytes=size if sent is None else sent,
        executions=1,
        dtype="int8",
        shape=shape,
    )


def program(*collectives: Collective) -> Program:
    return Program(collectives, (), 0, 0, ())


# On 8 and 4 devices of an axis that has 32.
AXIS = Shortened({"fsdp": 32, "tensor": 2}, "fsdp", 8, 4)
MOVE: Kind = "collective-permute"


@pytest.mark.parametrize(
    ("large", "small", "wanted"),
    [
        (sends(MOVE, 8, 3), sends(MOVE, 8, 3), sends(MOVE, 8, 3)),
        (sends(MOVE, 8, 3), sends(MOVE, 16, 3), sends(MOVE, 2, 3)),
        (sends(MOVE, 8, 3), sends(MOVE, 4, 3), sends(MOVE, 32, 3)),
        # Over the whole axis: 7, 3 and 31 of 8, 4 and 32 parts.
        (
            sends("all-gather", 8, 3, sent=21),
            sends("all-gather", 8, 3, sent=18),
            sends("all-gather", 8, 3, sent=23),
        ),
        # Over a part of the axis: of two devices, each sends its half.
        (
            sends("all-gather", 8, 3, sent=12),
            sends("all-gather", 16, 3, sent=24),
            sends("all-gather", 2, 3, sent=3),
        ),
        # Over half of it: of four and two devices, on the whole axis of sixteen.
        (
            sends("all-gather", 16, 3, sent=36),
            sends("all-gather", 16, 3, sent=24),
            sends("all-gather", 16, 3, sent=45),
        ),
        # Neither constant, nor as the axis is; no part of a size is left.
        (sends(MOVE, 8, 3), sends(MOVE, 9, 3), None),
        (sends(MOVE, 6, 3), sends(MOVE, 12, 3), None),
        (sends("all-gather", 8, 3, sent=7), sends("all-gather", 8, 3, sent=9), None),
    ],
)
def test_sizes_on_a_longer_axis(
    large: Collective, small: Collective, wanted: Collective | None
) -> None:
    found = scaled(program(large), program(small), AXIS)
    assert found.collectives == (() if wanted is None else (wanted,))
    assert len(found.unrecognised) == (wanted is None)


@pytest.mark.parametrize(
    "small", [program(), program(sends("all-gather", 8, 3))], ids=["less", "other"]
)
def test_a_program_that_is_another_on_smaller_meshes(small: Program) -> None:
    with pytest.raises(NotScaled, match="the program is another on smaller meshes"):
        scaled(program(sends(MOVE, 8, 3)), small, AXIS)


def test_the_axis_that_is_shortened() -> None:
    mesh = shortened({"data": 17, "fsdp": 16, "tensor": 16}, 2048)
    assert (mesh.axis, mesh.short, mesh.shorter) == ("fsdp", 4, 2)
    with pytest.raises(NotScaled, match="no axis has two smaller sizes"):
        shortened({"data": 2053}, 2048)
