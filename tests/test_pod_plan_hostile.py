"""flm.pod.plan with what users bring: other libraries, other shapes, and mistakes."""

import pickle
import threading
import warnings
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import flax_layoutmap as flm
from flax_layoutmap.pod._hlo import read_program
from flax_layoutmap.pod._values import dtype_name

P = PartitionSpec
MESH = "data=2,model=4"


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def rules(batch: Any = "data", **layouts: Any) -> flm.LayoutMap:
    made = flm.LayoutMap(batch=batch)
    made.update(layouts)
    return made


MEGATRON = {"up": (None, "model"), "down": ("model", None)}
FULLY = {"up": ("data", "model"), "down": ("model", "data")}
PARAMS = {"up": struct(16, 32), "down": struct(32, 16)}
X = struct(512, 16)
SQUARE = {"w": struct(16, 16)}
ROWS = {"w": ("model", None)}


def loss_of(params: Any, x: Any) -> Any:
    return ((jax.nn.relu(x @ params["up"]) @ params["down"]) ** 2).mean()


def sgd(params: Any, x: Any) -> Any:
    loss, gradients = jax.value_and_grad(loss_of)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def plan(step: Any, *args: Any, **options: Any) -> flm.pod.PodReport:
    return flm.pod.plan(step, *args, **{"mesh": MESH, **options})


def kinds(report: flm.pod.PodReport) -> Counter[tuple[Any, ...]]:
    found: Counter[tuple[Any, ...]] = Counter()
    for one in report.collectives:
        found[one.kind, one.axes, one.path] += one.executions
    return found


# --------------------------------------------------------- steps of many kinds


def linen_step() -> tuple[Any, tuple[Any, ...], Any]:
    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.relu(nn.Dense(32, use_bias=False, name="up")(x))
            return nn.Dense(16, use_bias=False, name="down")(x)

    def make() -> Any:
        model: Any = Mlp()
        params = model.init(jax.random.key(0), jnp.ones((8, 16)))["params"]
        return TrainState.create(
            apply_fn=model.apply, params=params, tx=optax.adamw(1e-3)
        )

    def step(state: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return (state.apply_fn({"params": params}, x) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    return step, (jax.eval_shape(make), X), FULLY


def accumulating_step() -> tuple[Any, tuple[Any, ...], Any]:
    tx = optax.MultiSteps(optax.adam(1e-3), 4)

    def step(state: Any, x: Any) -> Any:
        params, opt_state = state["params"], state["opt_state"]
        loss, gradients = jax.value_and_grad(loss_of)(params, x)
        updates, opt_state = tx.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        return {"params": params, "opt_state": opt_state}, loss

    state = {"params": PARAMS, "opt_state": jax.eval_shape(tx.init, PARAMS)}
    return step, (state, X), FULLY


def custom_vjp_step() -> tuple[Any, tuple[Any, ...], Any]:
    @jax.custom_vjp
    def product(x: Any, w: Any) -> Any:
        return x @ w

    product.defvjp(
        lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g)
    )

    def step(state: Any, x: Any) -> Any:
        def loss(state: Any) -> Any:
            hidden = jax.nn.relu(product(x, state["up"]))
            return (product(hidden, state["down"]) ** 2).mean()

        gradients = jax.grad(loss)(state)
        return jax.tree.map(lambda p, g: p - g, state, gradients)

    return step, (PARAMS, X), MEGATRON


def shard_map_step(mesh: Any) -> tuple[Any, tuple[Any, ...], Any]:
    def inside(x: Any, w: Any) -> Any:
        return jax.lax.psum(x @ w, "model")

    def step(state: Any, x: Any) -> Any:
        product = jax.shard_map(
            inside,
            mesh=mesh,
            in_specs=(P("data", "model"), P("model", None)),
            out_specs=P("data", None),
        )

        def loss(state: Any) -> Any:
            return (product(x, state["w"]) ** 2).mean()

        return jax.tree.map(lambda p, g: p - g, state, jax.grad(loss)(state))

    return step, (SQUARE, X), ROWS


def for_step() -> tuple[Any, tuple[Any, ...], Any]:
    def step(state: Any, x: Any) -> Any:
        return jax.lax.fori_loop(0, 7, lambda _, y: jnp.tanh(y @ state["w"]), x)

    return step, (SQUARE, X), ROWS


def while_step() -> tuple[Any, tuple[Any, ...], Any]:
    def step(state: Any, x: Any) -> Any:
        def body(carry: Any) -> Any:
            return jnp.tanh(carry[0] @ state["w"]), carry[1] + 1

        return jax.lax.while_loop(lambda carry: carry[1] < 5, body, (x, 0))[0]

    return step, (SQUARE, X), ROWS


STEPS = {
    "a Linen TrainState": linen_step,
    "optax.MultiSteps": accumulating_step,
    "custom_vjp": custom_vjp_step,
    "shard_map": shard_map_step,
    "fori_loop": for_step,
    "while_loop": while_step,
}


def payload(collectives: Any) -> Counter[Any]:
    """Bytes in a step by kind and axes, as XLA for CPUs does it.

    It sums all of a gradient and takes its slice.
    """
    found: Counter[Any] = Counter()
    for one in collectives:
        kind = "all-reduce" if one.kind == "reduce-scatter" else one.kind
        found[kind, one.axes] += one.bytes_per_step
    return found


@pytest.mark.parametrize("name", STEPS)
def test_the_compiler_agrees(name: str, mesh: flm.DeviceMesh) -> None:
    """Same axes, kinds and payloads as in the program for 8 CPU devices."""
    make: Any = STEPS[name]
    jax_mesh: Any = mesh.jax_mesh
    step, args, layouts = make(jax_mesh) if name == "shard_map" else make()
    layout_map = rules(**layouts)
    report = flm.pod.plan(
        step, *args, mesh=mesh, layout_map=layout_map, donate_argnames="state"
    )
    assert not report.unrecognised and report.drift == ()
    jitted = flm.jit(step, layout_map=layout_map.on(mesh), donate_argnames="state")
    text = jitted.lower(*args).compile().as_text()
    found = read_program(text, mesh.axis_names, mesh.shape)
    assert not found.unrecognised
    wanted = payload(found.collectives)
    assert wanted and payload(report.collectives) == wanted


def test_paths_of_gradients_that_are_summed_in_a_branch() -> None:
    step, args, _ = accumulating_step()
    report = plan(step, *args, layout_map=rules(**MEGATRON), donate_argnames="state")
    found = kinds(report)
    for path in ("state/params/up", "state/params/down"):
        assert found["all-reduce", ("data",), path] == 1


def test_operations_that_shardy_has_no_rule_for() -> None:
    """CHLO is lowered before XLA lays a program out, and not before a plan does."""

    def step(params: Any, x: Any) -> Any:
        hidden = jax.nn.gelu(x @ params["up"], approximate=False)  # chlo.erfc
        squares = jnp.square(hidden @ params["down"])  # chlo.square
        return jax.lax.top_k(squares, 2)[0].sum()

    report = plan(step, PARAMS, X, layout_map=rules(**MEGATRON))
    assert kinds(report) == {
        ("all-reduce", ("model",), None): 1,
        ("all-reduce", ("data",), None): 1,
    }
    assert not report.unrecognised and report.reshards == ()


def test_operations_of_others_are_said() -> None:
    def step(params: Any, x: Any) -> Any:
        sizes = jnp.full((4,), 128)
        return jax.lax.ragged_dot(x, params["experts"], sizes).sum()

    layout = rules(experts=("model", None, None))
    report = plan(step, {"experts": struct(4, 16, 8)}, X, layout_map=layout)
    (what,) = report.unrecognised
    assert what.endswith("of sharded arrays, not counted") and "ragged" in what


# ---------------------------------------------------------- inside of a shard_map


def shard_mapped(inside: Any, in_specs: Any, out_specs: Any, **more: Any) -> Any:
    jax_mesh: Any = flm.DeviceMesh.abstract(MESH).jax_mesh
    return jax.shard_map(
        inside,
        mesh=jax_mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
        **more,
    )


def test_rows_that_a_shard_map_sends() -> None:
    def inside(x: Any, at: Any) -> Any:
        sizes = jnp.ones((4,), jnp.int32)
        return jax.lax.ragged_all_to_all(
            x, jnp.zeros_like(x), at, sizes, at, sizes, axis_name="model"
        )

    def step(x: Any) -> Any:
        mapped = shard_mapped(inside, (P("model"), P()), P("model"))
        return mapped(x, jnp.arange(4, dtype=jnp.int32))

    jax_mesh: Any = flm.DeviceMesh.abstract(MESH).jax_mesh
    sharding = NamedSharding(jax_mesh, P("model"))
    x = jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=sharding)
    report = flm.pod.plan(jax.jit(step), x)
    (one,) = report.collectives
    assert (one.kind, one.axes, one.shape) == ("all-to-all", ("model",), (16, 8))
    assert (one.bytes, one.wire_bytes, one.path) == (512, 384, "x")
    what = "ragged_all_to_all of rows that the data says, counted as if all were sent"
    assert report.unrecognised == {what: 1}


def test_products_with_a_matrix_for_each_group_of_rows() -> None:
    def step(params: Any, x: Any) -> Any:
        sizes = jnp.full((8,), 64)
        mapped = shard_mapped(
            jax.lax.ragged_dot, (P("data"), P("data"), P("data")), P("data")
        )
        return mapped(x, params["experts"], sizes)

    def gradient(params: Any, x: Any) -> Any:
        return jax.grad(lambda params: (step(params, x) ** 2).sum())(params)

    layout = rules(experts=("data", None, None))
    params = {"experts": struct(8, 16, 4)}
    report = plan(step, params, X, layout_map=layout)
    assert not report.unrecognised
    assert report.flops_per_device == 2 * 256 * 16 * 4
    # Over "model" every device does the same.
    assert report.flops_total == 2 * 512 * 16 * 4
    assert "4.00 times an even share" in report.report()
    # Of the second, of rows with rows, each row is in one of the results, too.
    gradients = plan(gradient, params, X, layout_map=layout)
    assert gradients.flops_per_device == 2 * report.flops_per_device
    plain = jax.jit(lambda w, x: jax.lax.ragged_dot(x, w, jnp.full((2,), 256)))
    replicated = flm.pod.plan(plain, struct(2, 16, 4), X, mesh=MESH)
    assert replicated.flops_per_device == 2 * 512 * 16 * 4


def test_kernels_in_a_shard_map_are_said() -> None:
    def inside(x: Any) -> Any:
        y = jax.ffi.ffi_call("a_kernel", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
        return jax.lax.top_k(jax.scipy.special.erf(y), 2)[0]

    def step(x: Any) -> Any:
        return shard_mapped(inside, P("data"), P("data"))(x)

    report = plan(step, X, layout_map=rules())
    assert report.unrecognised == {"a_kernel in a shard_map, not counted": 1}


def test_work_that_a_shard_map_shares_out() -> None:
    def inside(x: Any, w: Any) -> Any:
        return jax.lax.psum((x @ w).sum(), ("data", "model"))

    def step(params: Any, x: Any) -> Any:
        specs = P("data"), P(None, "model")
        return shard_mapped(inside, specs, P())(x, params["w"])

    report = plan(step, SQUARE, X, layout_map=rules(w=(None, "model")))
    assert report.flops_total == 2 * 512 * 16 * 16
    assert report.flops_per_device == report.flops_total // 8
    assert "even share" not in report.report()


def test_axes_that_a_shard_map_leaves_to_the_compiler(mesh: flm.DeviceMesh) -> None:
    jax_mesh: Any = mesh.jax_mesh

    def inside(x: Any, w: Any) -> Any:
        return jax.lax.psum(x @ w, "data")

    def step(state: Any, x: Any) -> Any:
        mapped = jax.shard_map(
            inside,
            mesh=jax_mesh,
            in_specs=(P("data"), P()),
            out_specs=P(),
            axis_names={"data"},
            check_vma=False,
        )
        return mapped(x, state["w"])

    layout_map = rules(w=(None, "model"))
    report = plan(step, SQUARE, X, mesh=mesh, layout_map=layout_map)
    # 256 rows on a device, and 4 of 16 columns: the sum is of those.
    (one,) = report.collectives[:1]
    assert (one.kind, one.axes, one.shape) == ("all-reduce", ("data",), (256, 4))
    assert report.flops_per_device == 2 * 256 * 16 * 4
    assert report.flops_total == 2 * 512 * 16 * 16
    jitted = flm.jit(step, layout_map=layout_map.on(mesh))
    text = jitted.lower(SQUARE, X).compile().as_text()
    wanted = payload(read_program(text, mesh.axis_names, mesh.shape).collectives)
    assert wanted["all-reduce", ("data",)] == one.bytes == 256 * 4 * 4


def test_results_of_a_shard_map_are_sharded() -> None:
    def step(params: Any, x: Any) -> Any:
        spec = P("data", "model")
        y = shard_mapped(jnp.tanh, spec, spec)(x)
        return jax.lax.with_sharding_constraint(y @ params["w"], P("data"))

    report = plan(step, SQUARE, X, layout_map=rules(w=("model", None)))
    assert report.flops_per_device == 2 * 256 * 16 * 16 // 4
    assert report.flops_total == 2 * 512 * 16 * 16


# --------------------------------------------------------------- what is not known


def test_a_loop_whose_condition_is_carried() -> None:
    def step(params: Any, x: Any) -> Any:
        def body(carry: Any) -> Any:
            y = jnp.tanh(carry[1] @ params["w"])
            return y.sum() > 0, y

        return jax.lax.while_loop(lambda carry: carry[0], body, (True, x))[1]

    report = plan(step, SQUARE, X, layout_map=rules(**ROWS))
    assert report.unrecognised == {"loop of unknown length, counted as one round": 1}


def test_parameters_and_state_of_an_optimizer_apart_in_jax_jit() -> None:
    tx = optax.adafactor(1e-3)

    def step(params: Any, opt_state: Any, x: Any) -> Any:
        gradients = jax.grad(loss_of)(params, x)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    args = (PARAMS, jax.eval_shape(tx.init, PARAMS), X)
    options = {"layout_map": rules(**MEGATRON)}
    names = ("params", "opt_state")
    plain = plan(step, *args, donate_argnames=names, **options)
    jitted = plan(jax.jit(step, donate_argnums=(0, 1)), *args, **options)
    assert jitted.memory == plain.memory
    assert kinds(jitted) == kinds(plain)


def test_constraints_that_name_axes_alone() -> None:
    """As under jax.set_mesh, which needs devices."""

    def step(params: Any, x: Any) -> Any:
        hidden = jax.lax.with_sharding_constraint(x @ params["up"], P("data", None))
        return (hidden @ params["down"]).sum()

    for one in (step, jax.jit(step)):
        report = plan(one, PARAMS, X, layout_map=rules(**MEGATRON))
        assert {one.kind for one in report.collectives} == {"all-gather", "all-reduce"}


def test_another_mesh_in_context() -> None:
    other = flm.DeviceMesh.abstract("rows=8")
    wanted = kinds(plan(sgd, PARAMS, X, layout_map=rules(**MEGATRON)))
    other_mesh: Any = other.jax_mesh
    with jax.sharding.use_abstract_mesh(other_mesh):
        for step in (sgd, jax.jit(sgd)):
            found = plan(step, PARAMS, X, layout_map=rules(**MEGATRON))
            assert kinds(found) == wanted


def test_a_step_that_is_running(mesh: flm.DeviceMesh) -> None:
    layout_map = rules(**MEGATRON).on(mesh)
    step = flm.jit(sgd, layout_map=layout_map, donate_argnames="params")
    arrays = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), PARAMS)
    x = np.ones((512, 16), np.float32)
    params, _ = step(layout_map.place(arrays), x)
    before = flm.pod.plan(step, params, x)
    assert kinds(before) == kinds(plan(sgd, PARAMS, X, layout_map=rules(**MEGATRON)))
    params, _ = step(params, x)
    assert step._cache_size() == 1
    larger = flm.pod.plan(step, params, x, mesh="data=16,model=2")
    assert larger.memory.at_rest["data"] == 512 * 16 * 4 // 16


def test_quantised_matrices_are_parameters_and_keys_are_not() -> None:
    def step(state: Any, x: Any) -> Any:
        return (x @ state["w"].astype(x.dtype)).sum()

    key = jax.eval_shape(lambda: jax.random.key(0))
    for dtype in (jnp.int8, jnp.int4, jnp.float8_e4m3fn):
        state = {
            "w": struct(16, 32, dtype=dtype),
            "key": key,
            "step": struct(dtype=int),
        }
        report = plan(step, state, X, layout_map=rules(w=("data", "model")))
        size = 16 * 32 // 8 // (2 if dtype == jnp.int4 else 1)
        assert report.memory.at_rest["parameter"] == size
        assert report.reshards == ()


def test_caches_are_no_parameters() -> None:
    class Block(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones((16, 16)))
            self.keys = nnx.Cache(jnp.zeros((8, 32, 16)))

    def decode(model: Any, x: Any) -> Any:
        model.keys[...] = model.keys[...] + 1
        return x @ model.w

    layout = rules(w=("model", None), keys=("data", None, None))
    report = plan(decode, nnx.eval_shape(Block), X, layout_map=layout)
    part, cache = 16 * 16 * 4 // 4, 8 * 32 * 16 * 4 // 2
    assert report.memory.at_rest["parameter"] == part
    assert report.memory.at_rest["other"] == cache

    def linen(variables: Any, x: Any) -> Any:
        cache = jax.tree.map(lambda a: a + 1, variables["cache"])
        return {**variables, "cache": cache}, x @ variables["params"]["w"]

    keys = {"attention": {"keys": struct(8, 32, 16)}}
    given = {"params": SQUARE, "cache": keys}
    report = plan(linen, given, X, layout_map=layout, donate_argnames="variables")
    assert report.memory.at_rest["parameter"] == part
    assert report.memory.at_rest["other"] == cache


def test_in_several_threads() -> None:
    layout_map, other = rules(**MEGATRON), rules(**FULLY)
    first = plan(sgd, PARAMS, X, layout_map=layout_map)
    wanted = [first.collectives, first.with_layout(other).collectives]
    found: list[Any] = []

    def work() -> None:
        report = plan(sgd, PARAMS, X, layout_map=layout_map)
        found.append([report.collectives, first.with_layout(other).collectives])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted] * 4


@pytest.mark.parametrize("made", ["a function", "flm.jit", "jax.jit", "nnx.jit"])
def test_arguments_that_the_step_does_not_take(made: str) -> None:
    layout_map = rules(**MEGATRON)
    step: Any = {
        "a function": loss_of,
        "flm.jit": flm.jit(loss_of, layout_map=layout_map),
        "jax.jit": jax.jit(loss_of),
        "nnx.jit": nnx.jit(loss_of),
    }[made]
    tree = {"params": PARAMS}
    for args, kwargs, text in (
        ((PARAMS, X, 3), {}, "(dict, float32[512,16], int): too many positional arg"),
        ((tree,), {}, "(dict): missing a required argument: 'x'"),
        ((PARAMS,), {"y": X}, "(dict, y=float32[512,16]): missing a required argument"),
    ):
        with pytest.raises(flm.LayoutError) as caught:
            plan(step, *args, layout_map=layout_map, **kwargs)
        assert text in str(caught.value)
        assert str(caught.value).startswith("loss_of(params, x) cannot be")


def test_a_type_error_of_the_step_itself_stays() -> None:
    def step(params: Any) -> Any:
        return len(3)  # pyright: ignore[reportArgumentType]

    with pytest.raises(TypeError, match="object of type 'int' has no len"):
        plan(step, PARAMS, layout_map=rules(**MEGATRON))


def test_a_step_that_returns_nothing_and_one_without_arguments() -> None:
    def nothing(params: Any, x: Any) -> None:
        jnp.sin(x @ params["up"])

    for step in (nothing, jax.jit(nothing)):
        report = plan(step, PARAMS, X, layout_map=rules(**MEGATRON))
        assert report.collectives == () and report.memory.at_rest == {}
    assert plan(lambda: jnp.ones(8).sum(), layout_map=rules()).flops_total == 0


def test_what_the_step_itself_raises_is_raised() -> None:
    with pytest.raises(KeyError, match="upp"):
        plan(lambda params, x: x @ params["upp"], PARAMS, X, layout_map=rules())


# -------------------------------------------------------------- other rules


def timeless(report: flm.pod.PodReport) -> dict[str, Any]:
    data = report.to_json()
    del data["took_seconds"]
    return data


@pytest.mark.parametrize("mesh", [MESH, "data=1,model=4", "data=8,model=1"])
def test_other_rules_are_as_a_plan_of_them(mesh: str) -> None:
    step, args, _ = linen_step()
    options = {"mesh": mesh, "donate_argnames": "state"}
    every = [
        rules(**MEGATRON),
        rules(**FULLY),
        rules(up=None, down=None),
        rules(batch=("data", "model"), **FULLY),
    ]
    first = plan(step, *args, layout_map=every[0], **options)
    for other in every:
        wanted = plan(step, *args, layout_map=other, **options)
        assert timeless(first.with_layout(other)) == timeless(wanted)


def test_other_rules_leave_what_jit_was_told() -> None:
    """in_shardings, out_shardings, and results that nobody lays out."""
    jitted = jax.jit(sgd)
    first = plan(jitted, PARAMS, X, layout_map=rules(**MEGATRON))
    again = first.with_layout(rules(**FULLY))
    wanted = plan(jitted, PARAMS, X, layout_map=rules(**FULLY))
    assert timeless(again) == timeless(wanted)
    fixed = flm.jit(
        lambda params, x: loss_of(params, x),
        layout_map=rules(**MEGATRON),
        in_shardings={"params": {"up": (None, "model"), "down": P()}},
    )
    report = plan(fixed, PARAMS, X)
    same = report.with_layout(rules(**FULLY))
    assert same.memory == report.memory and kinds(same) == kinds(report)


def test_other_rules_that_match_nothing_are_told() -> None:
    report = plan(sgd, PARAMS, X, layout_map=rules(**MEGATRON))
    with pytest.warns(flm.LayoutWarning, match="unused: rule 1 'upp' matches no leaf"):
        report.with_layout(rules(upp=(None, "model")))


def test_other_rules_for_what_was_traced_are_told() -> None:
    def layout(**activations: Any) -> flm.LayoutMap:
        made = rules(**MEGATRON)
        made.activations.update(activations)
        return made

    first_layout = layout(mlp=("data", "model"))
    first = plan(sgd, PARAMS, X, layout_map=first_layout)
    assert first.with_layout(first_layout).warnings == first.warnings
    for other in (layout(), layout(mlp=("model", "data"))):
        warning = first.with_layout(other).warnings[0]
        assert warning == (
            "these rules have other activations, which are in the program as it was "
            "traced, and have no effect here; plan again with these rules: "
            "flm.pod.plan(step, …, layout_map=layout_map)"
        )
    there_and_back = first.with_layout(other).with_layout(first_layout)
    assert there_and_back.warnings == first.warnings
    named = layout(mlp=("data", "model"))
    named.names["hidden"] = ("data", None)
    assert first.with_layout(named).warnings[0].startswith("these rules have other nam")


def test_layouts_that_are_alike_by_order() -> None:
    """Arguments that the program says are alike are laid out as one."""

    def step(params: Any, x: Any) -> Any:
        from jax.experimental.shard_alike import shard_alike

        up, down = shard_alike(params["up"], params["down"].T)
        return ((x @ up) @ down.T).sum()

    first = plan(step, PARAMS, X, layout_map=rules(**MEGATRON))
    for other in (rules(**FULLY), rules(up=("model", None))):
        with warnings.catch_warnings(action="ignore", category=flm.LayoutWarning):
            wanted = plan(step, PARAMS, X, layout_map=other)
            assert timeless(first.with_layout(other)) == timeless(wanted)


# ------------------------------------------------------------------ warnings


def test_rules_that_shard_nothing_make_everything_data() -> None:
    report = plan(sgd, PARAMS, X, layout_map=rules(upp=(None, "model")))
    assert report.warnings == (
        "no rule shards a leaf of params, so that every argument is data, split over "
        'the batch axes; say what is state: donate_argnames="params"',
    )
    none = rules(up=None, down=None)
    told = plan(sgd, PARAMS, X, layout_map=none, donate_argnames="params")
    assert told.warnings == ()
    jitted = plan(jax.jit(sgd, donate_argnums=0), PARAMS, X, layout_map=none)
    assert jitted.warnings == () and jitted.memory == told.memory
    assert kinds(jitted) == kinds(told)


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
        "a call would refuse arrays that lie by the rules"
    )
    good = rules(up=("model", None), down=("model", None))
    assert plan(jitted, PARAMS, X, layout_map=good).warnings == ()


def test_the_same_reshard_in_every_layer_is_one_line() -> None:
    def step(params: Any, x: Any) -> Any:
        for layer in params["layers"]:
            x = jnp.tanh(x @ layer["w"])
        return x.sum()

    params = {"layers": [{"w": struct(16, 16)} for _ in range(30)]}
    report = plan(step, params, X, layout_map=rules(w=("data", "model")))
    assert len(report.reshards) == 29
    lines = [one for one in report.report().splitlines() if one.startswith("reshard")]
    assert len(lines) == 1 and "dot_general ×29 [512,16]" in lines[0]


# --------------------------------------------- moves that Shardy leaves to the compiler


def convolved(x: Any, kernel: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=numbers
    )


def pooled(size: int) -> Any:
    window, strides = (1, size, 1, 1), (1, 2, 1, 1)
    return lambda x: jax.lax.reduce_window(
        x, -jnp.inf, jax.lax.max, window, strides, "SAME"
    )


TABLE, IMAGE = struct(4, 32), struct(4, 16, 4, 2)
KERNEL, POINT = jnp.ones((3, 3, 2, 2)), jnp.ones((1, 1, 2, 2))


@pytest.mark.parametrize(
    "function, x, wanted",
    [
        (lambda x: jnp.cumsum(x, 1), TABLE, {"reduce_window"}),
        (lambda x: jnp.roll(x, 1, 1), TABLE, {"slice", "concatenate"}),
        (lambda x: jnp.flip(x, 1), TABLE, {"reverse"}),
        (lambda x: x + jnp.pad(x, ((0, 0), (1, 0)))[:, :-1], TABLE, {"pad", "slice"}),
        (lambda x: convolved(x, KERNEL), IMAGE, {"convolution"}),
        (
            jax.grad(lambda x: pooled(3)(x).sum()),
            IMAGE,
            {"select_and_scatter"},
        ),
        # Of these nothing crosses a border.
        (lambda x: jnp.flip(x, 0) + jnp.pad(x[:2], ((0, 2), (0, 0))), TABLE, set()),
        (pooled(2), IMAGE, set()),
        (lambda x: convolved(x, POINT), IMAGE, set()),
    ],
    ids=["cumsum", "roll", "flip", "pad", "convolution", "max-pool gradient"]
    + ["other dims", "pool", "convolution 1x1"],
)
def test_moves_along_sharded_dims_are_said(
    function: Any, x: Any, wanted: set[str], mesh: flm.DeviceMesh
) -> None:
    """Where the program for 8 CPU devices moves something, and only there."""
    jax_mesh: Any = mesh.jax_mesh
    sharding = NamedSharding(jax_mesh, P(None, "model"))
    given = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    jitted = jax.jit(function, out_shardings=sharding)
    report = flm.pod.plan(jitted, given)
    text: Any = jitted.lower(given).compile().as_text()
    assert {what.partition(" ")[0] for what in report.unrecognised} == wanted
    for what in report.unrecognised:
        assert what.endswith("along a sharded dim, which moves elements, not counted")
    assert not report.collectives
    moved = read_program(text, mesh.axis_names, mesh.shape).collectives
    assert {one.axes for one in moved} == ({("model",)} if wanted else set())


def test_a_kernel_of_which_each_device_has_some_features() -> None:
    layout = rules(kernel=(None, None, None, "model"))
    params = {"kernel": struct(3, 3, 2, 8)}
    report = plan(
        lambda params, x: convolved(x, params["kernel"]),
        params,
        IMAGE,
        layout_map=layout,
    )
    assert not report.unrecognised
    assert report.flops_total == 2 * (4 * 16 * 4 * 8) * (3 * 3 * 2)
    assert report.flops_per_device == report.flops_total // 8


def test_the_gradient_of_a_kernel_needs_the_border() -> None:
    def loss(kernel: Any, x: Any) -> Any:
        return (convolved(x, kernel) ** 2).sum()

    jax_mesh: Any = flm.DeviceMesh.abstract(MESH).jax_mesh
    sharding = NamedSharding(jax_mesh, P(None, "model"))
    x = jax.ShapeDtypeStruct(IMAGE.shape, IMAGE.dtype, sharding=sharding)
    what = "convolution along a sharded dim, which moves elements, not counted"
    forward = flm.pod.plan(jax.jit(loss), struct(3, 3, 2, 2), x)
    assert forward.unrecognised == {what: 1}
    gradient = flm.pod.plan(jax.jit(jax.grad(loss)), struct(3, 3, 2, 2), x)
    assert gradient.unrecognised == {what: 2}
    assert forward.flops_total == 2 * (4 * 16 * 4 * 2) * (3 * 3 * 2)
    assert forward.flops_per_device == forward.flops_total // 4
    # Every pixel is multiplied with what stands at its own place.
    point = flm.pod.plan(jax.jit(jax.grad(loss)), struct(1, 1, 2, 2), x)
    assert not point.unrecognised


# ------------------------------------------------------- what a report says of them


def test_lines_of_functions_of_jax_that_are_jitted(mesh: flm.DeviceMesh) -> None:
    """JAX lowers them once for all their calls, with no line; `sort` has a region."""

    def step(state: Any, x: Any) -> Any:
        return jnp.sort(jax.nn.log_softmax(x @ state["w"]), 1).sum()

    layout_map = rules(w=(None, "model"))
    report = plan(step, SQUARE, X, layout_map=layout_map)
    sources = {one.source for one in (*report.collectives, *report.reshards)}
    line = step.__code__.co_firstlineno + 1
    name = "test_lines_of_functions_of_jax_that_are_jitted.step"
    assert sources == {f"test_pod_plan_hostile.py:{line} {name}"}
    assert {one.value for one in report.reshards} >= {"sort"}
    # The compiler's word names the line in the same way, with jax 0.8.1 without a name.
    jitted = flm.jit(step, layout_map=layout_map.on(mesh))
    text = jitted.lower(SQUARE, X).compile().as_text()
    found = read_program(text, mesh.axis_names, mesh.shape).collectives
    named = {one.source for one in found} & {*sources, f"{__name__}.py:{line}"}
    assert named, [one.source for one in found]


def test_there_and_back_are_two_reshards() -> None:
    def step(params: Any, x: Any) -> Any:
        moved = jax.lax.with_sharding_constraint(params["w"], P("model", None))
        return {"w": moved}, (x @ params["w"]).sum()

    report = plan(step, SQUARE, X, layout_map=rules(w=(None, "model")))
    moves = [(one.before, one.after) for one in report.reshards]
    assert sorted(moves) == [("P(-, model)", "P(model)"), ("P(model)", "P(-, model)")]


def test_branches_that_differ_are_both_counted_and_it_is_said() -> None:
    def step(params: Any, x: Any, flag: Any) -> Any:
        def wide(x: Any) -> Any:
            return ((x @ params["up"]) @ params["down"]).sum()

        def narrow(x: Any) -> Any:
            return (x @ params["small"]).sum()

        return jax.lax.cond(flag, wide, narrow, x)

    params = {**PARAMS, "small": struct(16, 4)}
    layout = rules(**MEGATRON, small=None)
    flag = struct(dtype=jnp.bool_)
    report = plan(step, params, X, flag, layout_map=layout)
    wide, narrow = 2 * 256 * 16 * 8 * 2, 2 * 256 * 16 * 4
    assert report.flops_per_device == wide + narrow
    assert report.warnings == (
        "each device takes one branch of a conditional; all branches are counted",
    )

    def plain(params: Any, x: Any, flag: Any) -> Any:
        return jax.lax.cond(flag, jnp.tanh, lambda x: x, x @ params["small"])

    assert plan(plain, params, X, flag, layout_map=layout).warnings == ()


def test_tiles_of_a_tpu_where_a_tpu_is_named() -> None:
    def text(**more: Any) -> str:
        return plan(sgd, PARAMS, X, layout_map=rules(**MEGATRON), **more).report()

    assert "tiles of a TPU" not in text(platform="gpu")
    assert "tiles of a TPU add" in text(topology="v5e:2x4")


def test_markdown_of_lambdas() -> None:
    step = lambda params, x: (x @ params["down_"]).sum()  # noqa: E731
    report = plan(step, {"down_": struct(16, 4)}, X, layout_map=rules(down_=("model",)))
    title, *lines = report.report("markdown").splitlines()
    assert title.startswith(r"**plan of \<lambda> on mesh")
    rows = [line for line in lines if "lambda" in line]
    assert rows and all("<lambda>` |" in row or r"\<lambda>" in row for row in rows)


# ------------------------------------------------------------------ bad input


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(16, 32, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.up(x)


def calls_back(params: Any, x: Any) -> Any:
    jax.debug.print("loss {}", x.sum())
    return x @ params["up"]


def planned(**options: Any) -> Any:
    return lambda: plan(sgd, PARAMS, X, **{"layout_map": rules(**MEGATRON), **options})


def asked(question: Any) -> Any:
    return lambda: question(planned()())


NET: Any = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
BAD: list[tuple[Any, type[Exception], str]] = [
    (
        planned(platform="nonsense"),
        flm.LayoutError,
        "there is no platform 'nonsense'; they are tpu, cuda, rocm, cpu",
    ),
    (
        planned(platform="cud"),
        flm.LayoutError,
        "there is no platform 'cud'; did you mean 'cuda'?; they are tpu, cuda, rocm, "
        "cpu",
    ),
    (
        planned(mesh="data=2,data=4"),
        flm.MeshError,
        "axis names must differ, got ('data', 'data')",
    ),
    (
        planned(mesh="data=3,model=-1", topology="v5e:2x4"),
        flm.MeshError,
        "the mesh data=3,model=-1 does not fill v5e:2x4, which has 8 devices; change a "
        "size",
    ),
    (
        planned(mesh={"data": -1, "model": -1}, topology="v5e:2x4"),
        flm.MeshError,
        "only one axis may have size -1, got (-1, -1)",
    ),
    (
        planned(mesh="data=2,fsdp=-1,model=-1", topology="v5e:2x4"),
        flm.MeshError,
        "only one axis may have size -1, got (2, -1, -1)",
    ),
    (
        planned(topology="v5p:3x3x3"),
        flm.MeshError,
        "there is no slice v5p:3x3x3: each dim is a multiple of 4, unless the slice is "
        "smaller than 4x4x4. The nearest: v5p:2x4x4, v5p:2x2x4, v5p:4x4x4",
    ),
    (
        lambda: plan(calls_back, PARAMS, X, layout_map=rules(**MEGATRON)),
        flm.LayoutError,
        "calls_back calls back into Python (",
    ),
    (
        lambda: plan(NET, X, layout_map=rules(up=(None, "model"))),
        flm.LayoutError,
        "the step is a module (Net), whose arrays would be constants of the program; "
        "pass it as an argument: flm.pod.plan(lambda model, x: model(x), model, x, …)",
    ),
    (
        lambda: plan(lambda x: NET(x), X, layout_map=rules(up=(None, "model"))),
        flm.LayoutError,
        "<lambda> uses a jax.ShapeDtypeStruct that is none of its arguments (",
    ),
    (
        lambda: plan(
            sgd,
            PARAMS,
            jax.ShapeDtypeStruct(
                (6, 16), jnp.float32, sharding=NamedSharding(SMALL, P("data"))
            ),
            layout_map=rules(**MEGATRON),
            mesh="data=4,model=4",
        ),
        flm.LayoutError,
        "x (6,16) has the sharding P(data) of its own, which does not fit the mesh "
        "data=4,model=4: shape (6, 16): dim 0 of size 6 does not divide by mesh axis "
        "'data' of size 4; pass its shape alone, jax.ShapeDtypeStruct(x.shape, "
        "x.dtype)",
    ),
    (
        lambda: plan(sgd, PARAMS, X, layout_map=rules()).with_layout(rules(**MEGATRON)),
        flm.LayoutError,
        "these rules shard leaves of 'params', which the plan took for data, as its "
        "own rules shard none of them: plan again with these rules, or say that it is "
        "state, donate_argnames='params'",
    ),
    (
        lambda: plan(
            lambda params, x: (x @ params["up"]).sum(),
            PARAMS,
            X,
            layout_map=rules(**MEGATRON),
            mesh=flm.DeviceMesh.abstract(MESH, axis_types="explicit"),
        ).with_layout(rules()),
        flm.LayoutError,
        "the axes of data=2,model=4 are explicit: layouts are part of the types that "
        "the step was traced with; plan again with these rules: flm.pod.plan(step, …, "
        "layout_map=layout_map)",
    ),
    (
        asked(lambda report: report.forbid(path="embedding")),
        flm.LayoutError,
        "no leaf of the arguments of sgd is like 'embedding', so that nothing would be "
        "forbidden",
    ),
    (
        asked(lambda report: report.forbid(path="dwn", kind="all-gather")),
        flm.LayoutError,
        "no leaf of the arguments of sgd is like 'dwn'; did you mean 'down'?, so that "
        "nothing would be forbidden",
    ),
    (
        asked(lambda report: report.forbid(source="(")),
        flm.LayoutError,
        "source='(' is no regular expression: ",
    ),
    (
        asked(lambda report: report.shardings("[")),
        flm.LayoutError,
        "pattern='[' is no regular expression: ",
    ),
    (
        asked(lambda report: report.compare(3)),
        flm.LayoutError,
        "compare needs another report, got 3; make one with "
        "report.with_layout(layout_map) or flm.pod.plan(step, …)",
    ),
]
SMALL: Any = flm.DeviceMesh.abstract(MESH).jax_mesh


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_messages(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        call()
    said = str(caught.value)
    assert said.startswith(message) if message[-1] in "( " else said == message


def test_one_kind_may_be_written_without_a_set() -> None:
    report = planned()()
    report.expect(axis="model", kinds="all-reduce", small_bytes=0)
    assert kinds(planned(platform="gpu")()) == kinds(report)


def test_reports_are_kept_and_compared() -> None:
    """In a cache, or sent to another process: without the program."""
    report = planned()()
    kept = pickle.loads(pickle.dumps(report))
    assert kept == report == planned()()
    assert kept.report() == report.report()
    with pytest.raises(flm.LayoutError, match="has no program to lay out again"):
        kept.with_layout(rules())


@pytest.mark.parametrize(
    "name",
    [
        *("float4_e2m1fn", "int2", "uint2", "int4", "uint4", "bool_", "bfloat16"),
        *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
        *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        *("float16", "int8", "uint16", "complex64"),
    ],
)
def test_bytes_of_dtypes_as_the_compiler_counts(name: str) -> None:
    x = struct(6, 5, dtype=getattr(jnp, name))
    jitted = jax.jit(lambda x: x)
    analysis: Any = jitted.lower(x).compile().memory_analysis()
    report = flm.pod.plan(jitted, x, mesh="data=1")
    assert sum(report.memory.at_rest.values()) == analysis.argument_size_in_bytes
    assert dtype_name(element_of(x)) == name.rstrip("_")


def element_of(x: Any) -> str:
    """How MLIR calls the type of an element."""
    module: Any = jax.jit(lambda x: x).lower(x).compiler_ir()
    return str(module.body.operations[0].type.inputs[0].element_type)


def test_names_of_dtypes() -> None:
    def step(params: Any, x: Any) -> Any:
        return jnp.abs(x.astype(jnp.complex64) @ params["w"]).sum()

    params = {"w": struct(16, 32, dtype=jnp.complex64)}
    report = plan(step, params, X, layout_map=rules(w=("data", "model")))
    assert [one.dtype for one in report.collectives] == ["complex64", "float32"]
    assert report.memory.at_rest["parameter"] == 16 * 32 * 8 // 8
