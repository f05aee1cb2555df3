"""Operations and reshards read from Shardy's passes, also under other rules."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from pods import (
    FULLY,
    MEGATRON,
    MESH,
    PARAMS,
    ROWS,
    SQUARE,
    X,
    compiled,
    kinds,
    loss_of,
    needs_the_estimate,
    payload,
    plan,
    rules,
    sgd,
    struct,
    tied,
)

import flax_layoutmap as flm
from flax_layoutmap.pod import _passes
from flax_layoutmap.pod._early import inline_calls, rewrite_for_tpus
from flax_layoutmap.pod._mlir import functions

JAX_MESH: Any = flm.DeviceMesh.abstract(MESH).jax_mesh
ASKED = jax.lax.with_sharding_constraint
BOTH = ("data", "fsdp")
COLUMNS = {"w": (None, "model")}
# Operations of x @ w, for all of them.
PRODUCT = 2 * 512 * 16 * 16


@pytest.fixture(autouse=True)
def axes_by_name() -> Any:
    """So that constraints and shard_map need not name the mesh."""
    with jax.sharding.use_abstract_mesh(JAX_MESH):
        yield


def mapped(inside: Any, in_specs: Any, out_specs: Any, **more: Any) -> Any:
    more = {"check_vma": False, **more}
    return jax.shard_map(inside, in_specs=in_specs, out_specs=out_specs, **more)


# ------------------------------------------------------------------- operations


def ragged(params: Any, x: Any) -> Any:
    """Rows of each device with the matrices of each device."""
    product = mapped(jax.lax.ragged_dot, (P("data"),) * 3, P("data"))
    return product(x, params["w"], jnp.full((8,), 64))


def ragged_gradient(params: Any, x: Any) -> Any:
    return jax.grad(lambda params: (ragged(params, x) ** 2).sum())(params)


def shared_out(params: Any, x: Any) -> Any:
    def inside(x: Any, w: Any) -> Any:
        return jax.lax.psum((x @ w).sum(), ("data", "model"))

    return mapped(inside, (P("data"), P(None, "model")), P())(x, params["w"])


def sharded_results(params: Any, x: Any) -> Any:
    spec = P("data", "model")
    return ASKED(mapped(jnp.tanh, spec, spec)(x) @ params["w"], P("data"))


def convolved(params: Any, x: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, params["w"], (1, 1), "SAME", dimension_numbers=numbers
    )


def in_a_condition(params: Any, x: Any) -> Any:
    return jax.lax.while_loop(
        lambda x: (jnp.sin(x) @ params["w"]).sum() < 1, lambda x: x + 1, x
    )


EXPERTS = {"w": struct(8, 16, 4)}
KERNEL, IMAGE = {"w": struct(3, 3, 2, 8)}, struct(4, 16, 4, 2)


@pytest.mark.parametrize(
    ("step", "params", "x", "layout", "device", "total"),
    [
        (lambda p, x: x @ p["w"], SQUARE, X, ("model", None), 8, PRODUCT),
        # Over "model" every device does the same.
        (lambda p, x: x @ p["w"], SQUARE, X, ("data", None), 2, PRODUCT),
        (ragged, EXPERTS, X, ("data", None, None), 2, PRODUCT // 4),
        # Of the second, of rows with rows, each row is in one of the results, too.
        (ragged_gradient, EXPERTS, X, ("data", None, None), 2, PRODUCT // 2),
        (shared_out, SQUARE, X, (None, "model"), 8, PRODUCT),
        (sharded_results, SQUARE, X, ("model", None), 8, PRODUCT),
        (
            convolved,
            KERNEL,
            IMAGE,
            (None, None, None, "model"),
            8,
            2 * (4 * 16 * 4 * 8) * (3 * 3 * 2),
        ),
        (in_a_condition, SQUARE, X, (None, "model"), 8, PRODUCT),
    ],
)
def test_operations(
    step: Any, params: Any, x: Any, layout: Any, device: int, total: int
) -> None:
    with warnings.catch_warnings(action="ignore", category=flm.LayoutWarning):
        report = plan(step, params, x, layout_map=rules(w=layout))
    assert (report.flops_per_device, report.flops_total) == (total // device, total)
    text = f"{8 / device:.2f} times an even share"
    assert (text in report.report()) == (device < 8)


def test_a_product_with_a_vector_counts() -> None:
    given = {"w": struct(32, 64)}, struct(32)
    report = plan(lambda p, x: x @ p["w"], *given, layout_map=rules(w=None))
    assert report.flops_per_device == 2 * 32 * 64 // 2  # the vector is the data


def test_rows_of_groups_without_a_shard_map() -> None:
    plain = jax.jit(lambda w, x: jax.lax.ragged_dot(x, w, jnp.full((2,), 256)))
    report = plan(plain, struct(2, 16, 4), X)
    assert report.flops_per_device == 2 * 512 * 16 * 4
    sharded = plan(plain, struct(2, 16, 4), X, layout_map=rules())
    assert sharded.flops_per_device == 0
    assert sharded.warnings[-1] == (
        "matrix products that are not all counted: chlo.ragged_dot of sharded arrays, "
        "not counted"
    )


def test_branches_that_differ_are_both_counted_and_it_is_said() -> None:
    def plain(params: Any, x: Any, flag: Any) -> Any:
        return jax.lax.cond(flag, jnp.tanh, lambda x: x, x @ params["up"]).sum()

    def differ(params: Any, x: Any, flag: Any) -> Any:
        def wide(x: Any) -> Any:
            return ((x @ params["up"]) @ params["down"]).sum()

        return jax.lax.cond(flag, wide, lambda x: (x @ params["up"]).sum(), x)

    both_branches = "each device takes one branch of a conditional; all branches are"
    for step, products, warned in ((plain, 1, ()), (differ, 3, (both_branches,))):
        given = PARAMS, X, struct(dtype=jnp.bool_)
        report = plan(step, *given, layout_map=rules(**MEGATRON))
        assert report.flops_per_device == products * 2 * 256 * 16 * 8
        assert [text.rpartition(" ")[0] for text in report.warnings] == [*warned]


# ------------------------------------------------------------ collectives, estimated


def both(step: Any, *args: Any, layout_map: Any, **options: Any) -> Any:
    """The plan and the estimate of it."""
    report = plan(step, *args, layout_map=layout_map, **options)
    return report, report.with_layout(layout_map)


@needs_the_estimate
def test_a_shard_map_says_its_collectives_itself() -> None:
    def inside(x: Any) -> Any:
        x = jax.lax.ppermute(x, "model", [(at, (at + 1) % 4) for at in range(4)])
        x = jax.lax.all_to_all(x, "model", 0, 1, tiled=True)
        x = jax.lax.psum_scatter(x, "model", tiled=True)
        return jax.lax.psum(jax.lax.all_gather(x, "model"), "data")

    step = mapped(inside, P("data", "model"), P())
    for report in both(step, X, layout_map=rules()):
        found = {
            (kind, axes): count for (kind, axes, _), count in kinds(report).items()
        }
        assert found == {
            ("collective-permute", ("model",)): 1,
            ("all-to-all", ("model",)): 1,
            ("reduce-scatter", ("model",)): 1,
            ("all-gather", ("model",)): 1,
            ("all-reduce", ("data",)): 1,
        }


def test_groups_that_are_a_part_of_an_axis() -> None:
    def inside(x: Any) -> Any:
        return jax.lax.psum(x, "model", axis_index_groups=[[0, 1], [2, 3]])

    step = mapped(inside, P("data", "model"), P("data"))
    report, estimate = both(step, X, layout_map=rules())
    assert kinds(report) == {("all-reduce", ("model",), "x"): 1}
    what = "stablehlo.all_reduce over devices that are no mesh axes, not counted"
    assert (estimate.collectives, estimate.unrecognised) == ((), {what: 1})


def test_rows_that_a_shard_map_sends() -> None:
    def inside(x: Any, at: Any) -> Any:
        sizes = jnp.ones((4,), jnp.int32)
        return jax.lax.ragged_all_to_all(
            x, jnp.zeros_like(x), at, sizes, at, sizes, axis_name="model"
        )

    def step(x: Any) -> Any:
        return mapped(inside, (P("model"), P()), P("model"))(x, jnp.arange(4))

    for report in both(step, struct(64, 8), layout_map=rules("model")):
        (one,) = report.collectives
        assert (one.kind, one.axes, one.shape) == ("all-to-all", ("model",), (16, 8))
        assert (one.bytes, one.wire_bytes, one.path) == (512, 384, "x")
        assert report.unrecognised == {
            "ragged_all_to_all with data-dependent sizes, counted as if all rows were "
            "sent": 1
        }


def test_axes_that_a_shard_map_leaves_to_the_compiler(mesh: flm.DeviceMesh) -> None:
    def step(state: Any, x: Any) -> Any:
        def inside(x: Any, w: Any) -> Any:
            return jax.lax.psum(x @ w, "data")

        names = {"axis_names": {"data"}}
        return mapped(inside, (P("data"), P()), P(), **names)(x, state["w"])

    layout_map = rules(w=(None, "model"))
    report = plan(step, SQUARE, X, mesh=mesh, layout_map=layout_map)
    # 256 rows on a device, and 4 of 16 columns: the sum is of those.
    (one,) = report.collectives[:1]
    assert (one.kind, one.axes, one.shape) == ("all-reduce", ("data",), (256, 4))
    assert (report.flops_per_device, report.flops_total) == (PRODUCT // 8, PRODUCT)
    jitted = flm.jit(step, layout_map=layout_map.on(mesh))
    jax_mesh: Any = mesh.jax_mesh
    with jax.set_mesh(jax_mesh):
        wanted = payload(compiled(jitted, SQUARE, X, mesh=mesh))
    assert wanted["all-reduce", ("data",)] == one.bytes == 256 * 4 * 4


@pytest.mark.parametrize(
    ("before", "after", "kind", "axes"),
    [
        ("fsdp", P("tensor"), "collective-permute", ("fsdp", "tensor")),
        ("fsdp", P("data"), "collective-permute", BOTH),
        (BOTH, P(("data", "tensor")), "collective-permute", ("fsdp", "tensor")),
        (BOTH, P(("fsdp", "data")), "collective-permute", BOTH),
        (("fsdp", "data"), P(), "all-gather", BOTH),
        ("fsdp", P(None, "fsdp"), "all-to-all", ("fsdp",)),
    ],
)
def test_moves_are_over_all_axes_that_tell_their_devices_apart(
    before: Any, after: P, kind: str, axes: tuple[str, ...]
) -> None:
    """In the order of the mesh."""
    given: Any = {
        "mesh": "data=2,fsdp=2,tensor=2",
        "layout_map": rules(w=(before, None)),
    }
    for report in both(lambda p: ASKED(p["w"], after), {"w": struct(64, 64)}, **given):
        found = {(one.kind, one.axes) for one in report.collectives}
        assert found == {(kind, axes)}


@needs_the_estimate
def test_a_move_of_a_part_of_an_axis() -> None:
    """After the reshape the axis is split, 4 by 2, and the 2 move to the first dim."""
    layout_map = rules(w=("data", None))
    _, estimate = both(
        lambda p: ASKED(p["w"].reshape(4, 2, 16), P("data")),
        {"w": struct(8, 16)},
        mesh="data=8",
        layout_map=layout_map,
    )
    one = estimate.collectives[0]
    assert (one.kind, one.axes, one.shape) == ("all-to-all", ("data",), (1, 2, 16))
    assert (one.bytes, one.wire_bytes) == (128, 64)


def test_gathers_in_branches_are_not_merged() -> None:
    def step(p: Any, x: Any, flag: Any) -> Any:
        def branch(function: Any) -> Any:
            return lambda x: function(x @ p["w"])

        x = jax.lax.cond(flag, branch(jnp.tanh), branch(jnp.sin), x)
        return (x @ p["w"]).sum()

    given = SQUARE, struct(8192, 16), struct(dtype=jnp.bool_)
    layouts = rules(("data", "model"), w=("data", None))
    for report in both(step, *given, layout_map=layouts):
        assert kinds(report)["all-gather", ("data",), "p/w"] == 3


@pytest.mark.parametrize(
    "mesh, batch", [("data=8,model=1", "data"), (MESH, ("data", "model"))]
)
def test_parts_of_the_rows_of_a_large_table_are_moved(mesh: str, batch: Any) -> None:
    def step(p: Any, tokens: Any) -> Any:
        def loss(p: Any) -> Any:
            return (flm.distribute_tensor(p["w"][tokens], (batch, None)) ** 2).sum()

        return {"w": p["w"] - jax.grad(loss)(p)["w"]}

    table, tokens = {"w": struct(8192, 128)}, struct(64, dtype=jnp.int32)
    layouts = rules(batch, w=(None, batch))
    planned, estimate = both(step, table, tokens, layout_map=layouts, mesh=mesh)
    large = [
        {
            (one.kind, one.axes, one.bytes)
            for one in report.collectives
            if one.bytes >= 4096
        }
        for report in (planned, estimate)
    ]
    assert large[0] == large[1]


@pytest.mark.parametrize(
    "turns, topology, count", [(100, "v5e:2x4", 1), (300, "v5e:2x4", 2), (300, None, 1)]
)
def test_a_use_far_from_the_first_gathers_again(
    turns: int, topology: str | None, count: int
) -> None:
    def step(p: Any, x: Any) -> Any:
        y = x @ p["w"]
        for _ in range(turns):
            y = jnp.sin(y)
        return (y @ p["w"]).sum()

    layouts = rules(("data", "model"), w=("data", None))
    for report in both(step, SQUARE, X, layout_map=layouts, topology=topology):
        assert kinds(report)["all-gather", ("data",), "p/w"] == count


def test_the_two_gradients_of_a_tied_embedding_are_summed_apart() -> None:
    table, tokens = {"w": struct(1024, 256)}, struct(64, 16, dtype=jnp.int32)
    options: dict[str, Any] = {"layout_map": rules(w=None), "donate_argnames": "p"}
    for report in both(tied, table, tokens, **options):
        assert kinds(report) == {("all-reduce", ("data",), "p/w"): 2}


def rows_of(x: Any, places: Any, more: Any) -> Any:
    return x + jnp.zeros_like(x).at[places].add(more)


def rows_first(x: Any, places: Any, more: Any) -> Any:
    return jnp.zeros_like(x).at[places].add(more) + x


def elements(x: Any, places: Any, more: Any) -> Any:
    """As a gradient of `jnp.take_along_axis`."""
    taken = jnp.zeros_like(x).at[jnp.arange(8), places].add(more[:, 0])
    return x + taken


def used_twice(x: Any, places: Any, more: Any) -> Any:
    rows = jnp.zeros_like(x).at[places].add(more)
    return x + rows, rows


def largest(x: Any, places: Any, more: Any) -> Any:
    return x + jnp.zeros_like(x).at[places].max(more)


@pytest.mark.parametrize(
    ("step", "in_place"),
    [
        (rows_of, True),
        (rows_first, True),
        (elements, False),
        (used_twice, False),
        (largest, False),
    ],
)
def test_rows_are_added_in_place(step: Any, in_place: bool) -> None:
    given = struct(64, 16), struct(8, dtype=jnp.int32), struct(8, 16)
    lowered: Any = jax.jit(step).lower(*given).compiler_ir("stablehlo")
    module = lowered.operation
    with module.context:
        inline_calls(functions(module))
        block = functions(module)["main"].regions[0].blocks[0]
        rewrite_for_tpus(block, products=False)
        names = [op.operation.name for op in block.operations]
    last = max(at for at, name in enumerate(names) if name == "stablehlo.add")
    assert (last < names.index("stablehlo.scatter")) == in_place
    assert module.verify()


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_gradients_of_elements_are_laid_out_as_logits_on_tpus(platform: str) -> None:
    def step(p: Any, x: Any, labels: Any) -> Any:
        def loss(p: Any) -> Any:
            logits = jax.nn.log_softmax(x @ p["w"])
            return -jnp.take_along_axis(logits, labels[..., None], -1).mean()

        return {"w": p["w"] - jax.grad(loss)(p)["w"]}

    given = {"w": struct(64, 4096)}, struct(8, 32, 64), struct(8, 32, dtype=jnp.int32)
    layouts = rules("data", w=(None, "data"))
    options: Any = {"layout_map": layouts, "mesh": "data=8", "platform": platform}
    for report in both(step, *given, **options):
        found = {one.kind for one in report.collectives}
        assert ("all-to-all" in found) == (platform == "gpu")


def test_sums_over_different_axes_are_not_merged() -> None:
    def step(p: Any, x: Any) -> Any:
        other = ASKED(p["d"] @ p["b"], P())
        return ASKED((x @ p["a"] + other) + x @ p["c"], P())

    params = {name: struct(16, 16) for name in "abcd"}
    layouts = {"[ac]": ("model", None), "b": ("data", None), "d": (None, "data")}
    for report in both(step, params, SQUARE["w"], layout_map=rules(None, **layouts)):
        assert kinds(report)["all-reduce", ("model",), None] == 2


def test_a_function_that_is_called_twice() -> None:
    @jax.jit
    def product(x: Any, w: Any) -> Any:
        return ASKED(x @ w, P("data", None))

    def step(params: Any, x: Any) -> Any:
        def twice(x: Any, _: Any) -> Any:
            first = jnp.tanh(product(x, params["up"]))
            return jnp.tanh(product(first, params["down"])), None

        return jax.lax.scan(twice, x, None, length=3)[0]

    params = {"up": struct(16, 16), "down": struct(16, 16)}
    layout = rules(**{"up|down": ("model", None)})
    report, estimate = both(step, params, X, layout_map=layout)
    assert kinds(estimate) == {("reduce-scatter", ("model",), None): 6}
    assert {one.axes for one in report.collectives} == {("model",)}


def cast(x: Any, w: Any) -> Any:
    return x @ ASKED(w.astype(jnp.bfloat16), P(None, "model"))


def heads(x: Any, w: Any) -> Any:
    return jnp.einsum("bd,dhk->bhk", x, ASKED(w, P(None, "model")))


def flattened(x: Any, w: Any) -> Any:
    return x @ ASKED(w, P(None, "model")).reshape(16, -1)


@pytest.mark.parametrize(
    ("product", "shape", "layout"),
    [
        (cast, (16, 32), ("data", "model")),
        (heads, (16, 8, 4), ("data", "model", None)),
        (flattened, (16, 8, 4), ("data", "model", None)),
    ],
)
def test_sums_that_are_sliced_behind_a_transpose_are_scattered(
    product: Any, shape: Any, layout: Any
) -> None:
    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return (product(x, params["w"]).astype(jnp.float32) ** 2).mean()

        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))

    layouts = rules(w=layout)
    _, report = both(step, {"w": struct(*shape)}, X, layout_map=layouts)
    found = [one for one in report.collectives if "data" in one.axes and one.shape]
    assert [(one.kind, one.path) for one in found] == [
        ("all-gather", "params/w"),
        ("reduce-scatter", "params/w"),
    ]


def test_sums_that_are_needed_whole_are_not_scattered() -> None:
    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return ((x @ ASKED(params["w"], P(None, "model"))) ** 2).mean()

        gradients = jax.grad(loss)(params)
        whole = ASKED(gradients["w"] * 2, P(None, "model"))
        return jax.tree.map(lambda w, g: w - g, params, gradients), whole

    layouts = rules(w=("data", "model"))
    for report in both(step, SQUARE, X, layout_map=layouts):
        found = {one.kind for one in report.collectives if one.path == "params/w"}
        assert found == {"all-gather", "all-reduce"}


# ------------------------------------------------------------- what is not known


def counted(params: Any, x: Any, n: Any) -> Any:
    return jax.lax.fori_loop(0, n, lambda _, y: jnp.tanh(y @ params["w"]), x)


def carried(params: Any, x: Any, n: Any) -> Any:
    def body(carry: Any) -> Any:
        y = jnp.tanh(carry[1] @ params["w"])
        return y.sum() > 0, y

    return jax.lax.while_loop(lambda carry: carry[0], body, (True, x))[1]


def shrinking(params: Any, x: Any, n: Any) -> Any:
    """A loop with another bound in each iteration."""

    def body(carry: Any) -> Any:
        at, end, y = carry
        return at + 1, end - 1, jnp.tanh(y @ params["w"])

    return jax.lax.while_loop(lambda carry: carry[0] < carry[1], body, (0, 8, x))[2]


@pytest.mark.parametrize("step", [counted, carried, shrinking])
def test_loops_of_unknown_length(step: Any) -> None:
    n = struct(dtype=jnp.int32)
    report, estimate = both(step, SQUARE, X, n, layout_map=rules(**ROWS))
    (what,) = report.unrecognised
    assert what.endswith("how often it runs is not in the program; counted once")
    assert f"unrecognised: {what} (1)" in report.report()
    assert estimate.unrecognised == {"loop of unknown length, counted as one round": 1}
    assert report.flops_per_device == PRODUCT // 8
    assert report.warnings[-1] == (
        "matrix products that are not all counted: loop of unknown length, counted as "
        "one round"
    )


def test_kernels_in_a_shard_map_are_said() -> None:
    def inside(x: Any) -> Any:
        y = jax.ffi.ffi_call("a_kernel", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
        return jax.lax.top_k(jax.scipy.special.erf(y), 2)[0]

    report = plan(mapped(inside, P("data"), P("data")), X, layout_map=rules())
    assert report.unrecognised == {"a_kernel in a shard_map, not counted": 1}
    # Without a shard_map, the compiler makes the array whole for it.
    kernel = jax.ffi.ffi_call("a_kernel", struct(512, 16))
    _, estimate = both(kernel, X, layout_map=rules())
    assert estimate.unrecognised == {"a_kernel of sharded arrays, not counted": 1}


def test_operations_that_shardy_has_no_rule_for() -> None:
    """CHLO is lowered before XLA lays a program out, and not before a plan does."""

    def step(params: Any, x: Any) -> Any:
        hidden = jax.nn.gelu(x @ params["up"], approximate=False)  # chlo.erfc
        squares = jnp.square(hidden @ params["down"])  # chlo.square
        return jax.lax.top_k(squares, 2)[0].sum()

    for report in both(step, PARAMS, X, layout_map=rules(**MEGATRON)):
        assert kinds(report) == {
            ("all-reduce", ("model",), None): 1,
            ("all-reduce", ("data",), None): 1,
        }
        assert not report.unrecognised and report.reshards == ()


# -------------------------------------------------------------- drift and reshards


def test_state_that_leaves_in_another_layout() -> None:
    def step(params: Any, x: Any) -> Any:
        moved = ASKED(params["up"] * 2, P("model", None))
        return {"up": moved, "down": params["down"] + x.sum()}

    report = plan(jax.jit(step), PARAMS, X, layout_map=rules(**MEGATRON))
    (drift,) = report.drift
    before, after = "P(-, model)", "P(model)"
    assert drift == flm.pod.Drift(path="params/up", before=before, after=after)
    (reshard,) = report.reshards
    assert (reshard.before, reshard.after) == (before, after)
    assert reshard.source is not None and "test_pod_shardy.py" in reshard.source
    assert "drift: params/up came as P(-, model), left as P(model)" in report.report()


def test_a_constraint_that_forces_an_activation_elsewhere() -> None:
    report = plan(
        lambda p, x: flm.distribute_tensor(x @ p["up"], (None, "data")).sum(),
        PARAMS,
        struct(8, 16),
        layout_map=rules(**MEGATRON),
    )
    (reshard,) = report.reshards
    assert (reshard.after, reshard.path) == ("P(-, data)", None)
    assert reshard.bytes == 8 * 16 * 4


def test_there_and_back_are_two_reshards() -> None:
    def step(params: Any, x: Any) -> Any:
        return {"w": ASKED(params["w"], P("model", None))}, (x @ params["w"]).sum()

    report = plan(step, SQUARE, X, layout_map=rules(**COLUMNS))
    moves = [(one.before, one.after) for one in report.reshards]
    assert sorted(moves) == [("P(-, model)", "P(model)"), ("P(model)", "P(-, model)")]


def test_the_same_reshard_in_every_layer_is_one_line() -> None:
    def step(params: Any, x: Any) -> Any:
        for layer in params["layers"]:
            x = jnp.tanh(x @ layer["w"])
        return x.sum()

    params = {"layers": [SQUARE] * 30}
    report = plan(step, params, X, layout_map=rules(w=("data", "model")))
    assert len(report.reshards) == 29
    lines = [one for one in report.report().splitlines() if one.startswith("reshard")]
    assert len(lines) == 1 and "dot_general ×29 [512,16]" in lines[0]


def test_shardings_of_values() -> None:
    report = plan(sgd, PARAMS, X, layout_map=rules(**MEGATRON))
    found = report.shardings("dot_general .*loss_of")
    specs = {(kind, spec) for _, kind, spec in found}
    assert ("float32[512,32]", "P(data, model)") in specs
    assert ("float32[16,32]", "P(-, model)") in specs
    assert report.shardings("no such thing") == []


# ------------------------------------------------------------------- other rules

SENT = ("collectives", "seconds_bound", "unrecognised", "unrecognised_at")


def timeless(report: flm.pod.PodReport) -> dict[str, Any]:
    """Without what an estimate has from another engine, and the time."""
    data = report.to_json()
    return {key: data[key] for key in data.keys() - {"engine", "took_seconds", *SENT}}


@pytest.mark.parametrize("mesh", [MESH, "data=1,model=8", "data=8,model=1"])
def test_other_rules_are_as_a_plan_of_them(mesh: str) -> None:
    every = [
        rules(**MEGATRON),
        rules(**FULLY),
        rules(up=None, down=None),
        rules(batch=("data", "model"), **FULLY),
    ]
    options: Any = {"mesh": mesh, "donate_argnames": "params"}
    first = plan(sgd, PARAMS, X, layout_map=every[0], **options)
    for other in every:
        wanted = plan(sgd, PARAMS, X, layout_map=other, **options)
        again = first.with_layout(other)
        assert timeless(again) == timeless(wanted) and again.engine == "estimate"
        assert again.collectives == wanted.with_layout(other).collectives
        assert again.collectives == first.with_layout(other).collectives


def test_other_rules_without_lowering_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = plan(sgd, PARAMS, X, layout_map=rules(**MEGATRON))

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("traced again")

    monkeypatch.setattr("flax_layoutmap.pod._plan.lower_step", fail)
    monkeypatch.setattr("flax_layoutmap.pod._plan.partitioning", fail)
    again = first.with_layout(rules(**FULLY)).with_layout(rules(**MEGATRON))
    assert kinds(again) == kinds(first) and again.drift == ()


def test_other_rules_for_modules() -> None:
    model = nnx.eval_shape(lambda: nnx.Linear(16, 16, rngs=nnx.Rngs(0)))
    layouts = rules(kernel=("data", "model"), bias=("model",))
    first, wanted = (
        plan(lambda model, x: model(x).sum(), model, X, layout_map=layout_map)
        for layout_map in (rules(kernel=("model", None), bias=None), layouts)
    )
    again = first.with_layout(layouts)
    assert timeless(again) == timeless(wanted)
    assert kinds(again) == kinds(wanted.with_layout(layouts))


def test_other_rules_leave_what_jit_was_told() -> None:
    """in_shardings, out_shardings, and results that nobody lays out."""
    jitted = jax.jit(sgd)
    first = plan(jitted, PARAMS, X, layout_map=rules(**MEGATRON))
    wanted = plan(jitted, PARAMS, X, layout_map=rules(**FULLY))
    assert timeless(first.with_layout(rules(**FULLY))) == timeless(wanted)
    fixed = flm.jit(
        lambda params, x: loss_of(params, x),
        layout_map=rules(**MEGATRON),
        in_shardings={"params": {"up": (None, "model"), "down": P()}},
    )
    report = plan(fixed, PARAMS, X)
    same = report.with_layout(rules(**FULLY))
    assert same.memory == report.memory and kinds(same) == kinds(report)


def test_other_rules_that_match_nothing_or_come_too_late_are_told() -> None:
    def layout(**activations: Any) -> flm.LayoutMap:
        made = rules(**MEGATRON)
        made.activations.update(activations)
        return made

    first_layout = layout(mlp=("data", "model"))
    first = plan(sgd, PARAMS, X, layout_map=first_layout)
    with pytest.warns(flm.LayoutWarning, match="unused: rule 1 'upp' matches no leaf"):
        first.with_layout(rules(upp=(None, "model")))
    assert first.with_layout(first_layout).warnings == first.warnings
    for other in (layout(), layout(mlp=("model", "data"))):
        assert first.with_layout(other).warnings[0] == (
            "these rules have other activations, which are in the program as it was "
            "traced, and have no effect here; plan again with these rules: "
            "flm.pod.plan(step, …, layout_map=layout_map)"
        )
    there_and_back = first.with_layout(other).with_layout(first_layout)
    assert there_and_back.warnings == first.warnings
    named = layout(mlp=("data", "model"))
    named.names["hidden"] = ("data", None)
    assert first.with_layout(named).warnings[0].startswith("these rules have other nam")


# ------------------------------------------------------------------------ the passes


def test_a_jaxlib_without_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_passes, "_PASSES", "builtin.module(no-such-pass)")
    with pytest.raises(flm.LayoutError) as caught:
        plan(sgd, PARAMS, X, layout_map=rules(**MEGATRON))
    assert str(caught.value) == (
        "flm.pod.plan needs Shardy's passes in jaxlib, and this jaxlib does not have "
        "them; use flm.pod.compile, which needs none"
    )


def test_what_shardy_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(functions: Any) -> set[str]:
        from jax.extend.mlir import ir

        kind = ir.FunctionType.get([], [])
        functions["main"].attributes["function_type"] = ir.TypeAttr.get(kind)
        return set()

    monkeypatch.setattr(_passes, "inline_calls", spoil)
    with pytest.raises(flm.LayoutError) as caught:
        plan(sgd, PARAMS, X, layout_map=rules(**MEGATRON))
    said = str(caught.value)
    assert said.startswith("Shardy does not lay this program out: ")
    assert "arguments" in said
