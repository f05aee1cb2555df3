"""flm.pod.plan: what Shardy's passes say of a step, against what the compiler does."""

import dataclasses
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import flax_layoutmap as flm
from flax_layoutmap.pod import _passes
from flax_layoutmap.pod._hlo import read_program

P = PartitionSpec
MESH = "data=2,model=4"


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def rules(**layouts: Any) -> flm.LayoutMap:
    made = flm.LayoutMap(batch="data")
    made.update(layouts)
    return made


MEGATRON = {"up": (None, "model"), "down": ("model", None)}
FULLY = {"up": ("data", "model"), "down": ("model", "data")}
PARAMS = {"up": struct(16, 32), "down": struct(32, 16)}
X = struct(8, 16)
# More than the parameters, so that these are moved and not the data.
LARGE = struct(512, 16)


def loss_of(params: Any, x: Any) -> Any:
    return ((jax.nn.relu(x @ params["up"]) @ params["down"]) ** 2).mean()


def sgd(params: Any, x: Any) -> Any:
    loss, gradients = jax.value_and_grad(loss_of)(params, x)
    new = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
    return new, loss


def kinds(report: flm.pod.PodReport) -> Counter[tuple[Any, ...]]:
    found: Counter[tuple[Any, ...]] = Counter()
    for one in report.collectives:
        found[one.kind, one.axes, one.path] += one.executions
    return found


def sent(report: flm.pod.PodReport) -> dict[tuple[str, ...], int]:
    found: dict[tuple[str, ...], int] = {}
    for one in report.collectives:
        found[one.axes] = found.get(one.axes, 0) + one.wire_bytes_per_step
    return found


def plan(step: Any, *args: Any, **options: Any) -> flm.pod.PodReport:
    return flm.pod.plan(step, *args, **{"mesh": MESH, **options})


# -------------------------------------------------------------------- collectives


def test_tensor_parallel_and_data_parallel() -> None:
    report = plan(sgd, PARAMS, X, layout_map=rules(**MEGATRON))
    assert kinds(report) == {
        ("all-reduce", ("model",), None): 1,
        ("all-reduce", ("data",), "params/up"): 1,
        ("all-reduce", ("data",), "params/down"): 1,
        ("all-reduce", ("data",), None): 1,  # the mean of the loss
    }
    (forward,) = (one for one in report.collectives if one.axes == ("model",))
    assert (forward.shape, forward.dtype, forward.bytes) == ((4, 16), "float32", 256)
    assert forward.wire_bytes == 2 * 256 * 3 // 4
    assert forward.source is not None
    assert forward.source.startswith("test_pod_plan.py:")
    assert forward.source.endswith(" loss_of")
    assert report.flops_per_device * 8 == report.flops_total == 5 * 2 * 8 * 16 * 32


def test_fully_sharded_parameters_are_gathered_and_their_gradients_scattered() -> None:
    layout = rules(**FULLY)
    report = plan(sgd, PARAMS, LARGE, layout_map=layout)
    found = kinds(report)
    for path in ("params/up", "params/down"):
        assert found["all-gather", ("data",), path] == 1
        assert found["reduce-scatter", ("data",), path] == 1
    (gather,) = (
        one
        for one in report.collectives
        if one.kind == "all-gather" and one.path == "params/up"
    )
    # Of 16 × 8 floats on each device half is there already.
    assert (gather.shape, gather.bytes, gather.wire_bytes) == ((16, 8), 512, 256)
    assert report.reshards == ()


def payload(collectives: Any) -> Counter[Any]:
    """Bytes in a step by kind and axes, as XLA for CPUs does it.

    It sums all of a gradient and takes its slice.
    """
    found: Counter[Any] = Counter()
    for one in collectives:
        kind = "all-reduce" if one.kind == "reduce-scatter" else one.kind
        found[kind, one.axes] += one.bytes_per_step
    return found


def compiled(step: Any, params: Any, layout_map: Any, mesh: flm.DeviceMesh) -> Any:
    """The collectives in the program for 8 CPU devices."""
    on_mesh = layout_map.on(mesh)
    arrays = on_mesh.place(jax.tree.map(lambda s: jnp.ones(s.shape), params))
    jitted = flm.jit(step, layout_map=on_mesh, donate_argnames="params")
    program = jitted.lower(arrays, jnp.ones(LARGE.shape)).compile()
    found = read_program(program.as_text(), mesh.axis_names, mesh.shape)
    assert not found.unrecognised
    return found.collectives


@pytest.mark.parametrize(
    "layouts",
    [MEGATRON, FULLY, {"up": None, "down": None}],
    ids=["megatron", "fully sharded", "replicated"],
)
def test_the_compiler_agrees(layouts: dict[str, Any], mesh: flm.DeviceMesh) -> None:
    """Same axes, kinds and payloads as in the program for 8 CPU devices."""
    layout_map = rules(**layouts)
    # Donated, so that it is state, also where no rule shards it.
    report = plan(sgd, PARAMS, LARGE, layout_map=layout_map, donate_argnames="params")
    wanted = payload(compiled(sgd, PARAMS, layout_map, mesh))
    assert wanted and payload(report.collectives) == wanted


@pytest.mark.parametrize("scanned", [True, False])
def test_the_compiler_agrees_on_layers(scanned: bool, mesh: flm.DeviceMesh) -> None:
    step, params = layered(scanned)
    layout_map = rules(w=(None, "data", "model"), v=(None, "model", "data"))
    report = plan(step, params, LARGE, layout_map=layout_map, donate_argnames="params")
    wanted = payload(compiled(step, params, layout_map, mesh))
    assert wanted["all-gather", ("data",)]
    assert payload(report.collectives) == wanted


def layered(scanned: bool, count: int = 6) -> tuple[Any, Any]:
    params = {"w": struct(count, 16, 32), "v": struct(count, 32, 16)}

    def loss(params: Any, x: Any) -> Any:
        def layer(x: Any, one: Any) -> Any:
            return x + jnp.tanh(x @ one["w"]) @ one["v"], None

        if scanned:
            x, _ = jax.lax.scan(jax.checkpoint(layer), x, params)
        else:
            for at in range(count):
                one = jax.tree.map(lambda p, at=at: p[at], params)
                x, _ = jax.checkpoint(layer)(x, one)
        return (x**2).mean()

    return lambda params, x: jax.grad(loss, argnums=(0, 1))(params, x), params


def test_scanned_and_unrolled_layers_agree() -> None:
    layout = rules(w=(None, "data", "model"), v=(None, "model", "data"))
    reports = []
    for scanned in (True, False):
        step, params = layered(scanned)
        reports.append(plan(step, params, LARGE, layout_map=layout))
    scan, unrolled = reports
    assert len(scan.collectives) < len(unrolled.collectives)
    assert scan.flops_per_device == unrolled.flops_per_device
    for kind in ("all-gather", "all-reduce"):
        assert scan.wire_bytes("model", kind) == unrolled.wire_bytes("model", kind)
    assert scan.wire_bytes("data", "all-gather") == unrolled.wire_bytes(
        "data", "all-gather"
    )
    assert max(one.executions for one in scan.collectives) == 6


def test_a_chain_of_additions_is_one_all_reduce() -> None:
    def step(params: Any, x: Any) -> Any:
        return x @ params["a"] + x @ params["b"] + x @ params["c"]

    params = {name: struct(16, 8) for name in "abc"}
    layout = rules(**{"[abc]": ("model", None)})
    report = plan(step, params, X, layout_map=layout)
    assert kinds(report) == {("all-reduce", ("model",), None): 1}


def test_sums_that_are_used_apart_are_not_one() -> None:
    def step(params: Any, x: Any) -> Any:
        first, second = x @ params["a"], x @ params["b"]
        return first + second, jnp.tanh(first), jnp.tanh(second)

    params = {name: struct(16, 8) for name in "ab"}
    report = plan(step, params, X, layout_map=rules(**{"[ab]": ("model", None)}))
    assert kinds(report) == {("all-reduce", ("model",), None): 2}


def test_sums_with_something_else_between_them_are_not_one() -> None:
    """As libtpu 0.0.42 compiles a residual that is added before the second sum."""

    def step(params: Any, x: Any) -> Any:
        return (x @ params["a"] + 1) + x @ params["b"]

    params = {name: struct(16, 8) for name in "ab"}
    report = plan(step, params, X, layout_map=rules(**{"[ab]": ("model", None)}))
    assert kinds(report) == {("all-reduce", ("model",), None): 2}


def test_equal_gathers_are_one_and_others_are_not() -> None:
    def step(params: Any, x: Any) -> Any:
        y = x @ params["w"]
        return y @ params["w"].T, x @ (2 * params["w"])

    layout = rules(w=("data", None))
    report = plan(step, {"w": struct(16, 8)}, LARGE, layout_map=layout)
    # Once for w and its transpose, once for what is made from it, and is still its own.
    gathers = [one for one in report.collectives if one.kind == "all-gather"]
    assert sorted(str(one.path) for one in gathers) == ["params/w"] * 2


def test_nothing_is_counted_for_what_every_device_makes_itself() -> None:
    def step(params: Any) -> Any:
        zeros = jax.lax.with_sharding_constraint(jnp.zeros((8, 16)), P("data"))
        return jax.lax.with_sharding_constraint(zeros, P()), params["w"] * 1

    mesh: Any = flm.DeviceMesh.abstract(MESH).jax_mesh
    with jax.sharding.use_abstract_mesh(mesh):
        report = plan(step, {"w": struct(8)}, layout_map=rules(w=("data",)))
    assert report.collectives == ()


def test_work_that_an_axis_does_not_share_shows_as_more_compute() -> None:
    shared = plan(sgd, PARAMS, X, layout_map=rules(**MEGATRON))
    whole = plan(sgd, PARAMS, X, layout_map=rules())
    assert whole.flops_total == shared.flops_total
    assert whole.flops_per_device == 4 * shared.flops_per_device
    assert "4.00 times an even share" in whole.report()
    assert "even share" not in shared.report()


def test_a_shard_map_says_its_collectives_itself() -> None:
    mesh = flm.DeviceMesh.abstract(MESH)
    jax_mesh: Any = mesh.jax_mesh

    def inside(x: Any) -> Any:
        x = jax.lax.ppermute(x, "model", [(at, (at + 1) % 4) for at in range(4)])
        return jax.lax.psum(jax.lax.all_gather(x, "model"), "data")

    step = jax.jit(
        jax.shard_map(
            inside,
            mesh=jax_mesh,
            in_specs=P("data", "model"),
            out_specs=P(),
            check_vma=False,
        )
    )
    sharding = NamedSharding(jax_mesh, P("data", "model"))
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=sharding)
    report = flm.pod.plan(step, x)
    assert kinds(report) == {
        ("collective-permute", ("model",), "x"): 1,
        ("all-gather", ("model",), None): 1,
        ("all-reduce", ("data",), None): 1,
    }


def test_what_cannot_be_counted_is_said() -> None:
    @jax.jit
    def step(x: Any, n: Any) -> Any:
        return jax.lax.fori_loop(0, n, lambda _, y: y @ y, x)

    mesh = flm.DeviceMesh.abstract(MESH)
    jax_mesh: Any = mesh.jax_mesh
    sharding = NamedSharding(jax_mesh, P("data", None))
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)
    report = flm.pod.plan(step, x, struct(dtype=jnp.int32))
    what = "loop of unknown length, counted as one round"
    assert report.unrecognised == {what: 1}
    assert f"unrecognised: {what} (1)" in report.report()


# --------------------------------------------------------- modules, jits, and rules


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(16, 32, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(32, 16, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(nnx.relu(self.up(x)))


def abstract_net() -> Any:
    def make() -> Any:
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    return nnx.eval_shape(make)


def net_step(model: Any, optimizer: Any, x: Any) -> Any:
    loss, gradients = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
    optimizer.update(model, gradients)
    return loss


NET = {"up/kernel": ("data", "model"), "down/kernel": ("model", "data")}


def test_modules_as_with_jit() -> None:
    model, optimizer = abstract_net()
    layout_map = rules(**NET)
    report = plan(net_step, model, optimizer, LARGE, layout_map=layout_map)
    resolved = layout_map.on(flm.DeviceMesh.abstract(MESH)).resolve(model)
    # Two moments of each parameter, and two counters.
    assert report.memory.at_rest["parameter"] == resolved.bytes_per_device
    assert report.memory.at_rest["optimizer"] == 2 * resolved.bytes_per_device + 8
    assert report.memory.at_rest["data"] == 512 * 16 * 4 // 2
    found = kinds(report)
    assert found["all-gather", ("data",), "model/up/kernel"] == 1
    assert found["reduce-scatter", ("data",), "model/up/kernel"] == 1
    assert report.drift == ()


def test_every_kind_of_function_gives_the_same_plan() -> None:
    layout_map = rules(**NET)
    steps = {
        "function": net_step,
        "flm.jit": flm.jit(net_step, layout_map=layout_map),
        "nnx.jit": nnx.jit(net_step),
    }
    found = {
        name: kinds(plan(step, *abstract_net(), X, layout_map=layout_map))
        for name, step in steps.items()
    }
    assert found["function"] == found["flm.jit"] == found["nnx.jit"]
    layout = rules(**MEGATRON)
    pure = plan(sgd, PARAMS, X, layout_map=layout)
    jitted = plan(jax.jit(sgd), PARAMS, X, layout_map=layout)
    assert kinds(pure) == kinds(jitted)
    assert pure.memory == jitted.memory


def test_a_step_of_flm_jit_brings_its_rules_and_donation() -> None:
    layout_map = rules(**NET).on(flm.DeviceMesh.abstract(MESH))
    step = flm.jit(
        net_step, layout_map=layout_map, donate_argnames=("model", "optimizer")
    )
    report = flm.pod.plan(step, *abstract_net(), X)
    assert (report.step, str(report.mesh)) == ("net_step", MESH)
    assert report.warnings == ()


def test_real_arrays_are_taken_for_their_shapes(mesh: flm.DeviceMesh) -> None:
    layout_map = rules(**MEGATRON)
    abstract = plan(sgd, PARAMS, X, layout_map=layout_map)
    arrays = jax.tree.map(lambda s: np.ones(s.shape, s.dtype), PARAMS)
    there = layout_map.on(mesh).place(arrays)
    for params in (arrays, there):
        report = plan(sgd, params, np.ones((8, 16), np.float32), layout_map=layout_map)
        assert kinds(report) == kinds(abstract)


def test_arguments_that_a_step_does_not_use() -> None:
    @jax.jit
    def step(params: Any, unused: Any, x: Any) -> Any:
        return x @ params["up"]

    report = plan(step, PARAMS, struct(8, 5), X, layout_map=rules(**MEGATRON))
    assert report.memory.at_rest == {"parameter": 16 * 8 * 4, "data": 4 * 16 * 4}


def test_a_mesh_of_any_size() -> None:
    model, optimizer = abstract_net()
    report = plan(
        net_step,
        model,
        optimizer,
        struct(4608, 16),
        mesh={"data": 2304, "tensor": 8},
        layout_map=rules(**{"up/kernel": (None, "tensor")}, down=("tensor", None)),
    )
    assert report.mesh.size == 18432
    assert report.memory.at_rest["parameter"] == 2 * 16 * 32 * 4 // 8


def test_other_rules_without_lowering_again(monkeypatch: pytest.MonkeyPatch) -> None:
    other = rules(**FULLY)
    first = plan(sgd, PARAMS, X, layout_map=rules(**MEGATRON))
    wanted = plan(sgd, PARAMS, X, layout_map=other)

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("traced again")

    monkeypatch.setattr("flax_layoutmap.pod._plan.lower_step", fail)
    again = first.with_layout(other)
    assert again.collectives == wanted.collectives
    assert again.memory == wanted.memory
    assert again.drift == ()
    assert kinds(again.with_layout(rules(**MEGATRON))) == kinds(first)


def test_other_rules_for_modules() -> None:
    model, optimizer = abstract_net()
    first = plan(net_step, model, optimizer, X, layout_map=rules(kernel=None))
    wanted = plan(net_step, model, optimizer, X, layout_map=rules(**NET))
    again = first.with_layout(rules(**NET))
    assert kinds(again) == kinds(wanted)
    assert again.memory == wanted.memory


def test_shardings_of_values() -> None:
    report = plan(sgd, PARAMS, X, layout_map=rules(**MEGATRON))
    found = report.shardings("dot_general .*loss_of")
    specs = {(kind, spec) for _, kind, spec in found}
    assert ("float32[8,32]", "P(data, model)") in specs
    assert ("float32[16,32]", "P(-, model)") in specs
    assert report.shardings("no such thing") == []


# ---------------------------------------------------------- drift, reshards, warnings


def test_state_that_leaves_in_another_layout() -> None:
    @jax.jit
    def step(params: Any, x: Any) -> Any:
        moved = jax.lax.with_sharding_constraint(params["up"] * 2, P("model", None))
        return {"up": moved, "down": params["down"] + x.sum()}

    mesh: Any = flm.DeviceMesh.abstract(MESH).jax_mesh
    with jax.sharding.use_abstract_mesh(mesh):
        report = plan(step, PARAMS, X, layout_map=rules(**MEGATRON))
    (drift,) = report.drift
    assert drift == flm.pod.Drift(
        path="params/up", before="P(-, model)", after="P(model)"
    )
    (reshard,) = report.reshards
    assert (reshard.before, reshard.after) == ("P(-, model)", "P(model)")
    assert reshard.source is not None and "test_pod_plan.py" in reshard.source
    assert "drift: params/up came as P(-, model), left as P(model)" in report.report()


def test_a_constraint_that_forces_an_activation_elsewhere() -> None:
    def step(params: Any, x: Any) -> Any:
        x = flm.distribute_tensor(x @ params["up"], (None, "data"))
        return x.sum()

    layout = rules(**MEGATRON)
    report = plan(step, PARAMS, X, layout_map=layout)
    (reshard,) = report.reshards
    assert reshard.after == "P(-, data)"
    assert reshard.path is None and reshard.bytes == 8 * 16 * 4


def test_state_that_is_not_donated() -> None:
    params = {"up": struct(1024, 4096), "down": struct(4096, 1024)}
    x = struct(8, 1024)
    layout = rules(**MEGATRON)
    (warning,) = plan(sgd, params, x, layout_map=layout).warnings
    assert warning == (
        "2 leaves of state, such as params/down, are not donated: old and new are held "
        "at the same time, 8.0 MiB more per device; use donate_argnames"
    )
    donated = plan(sgd, params, x, layout_map=layout, donate_argnames="params")
    assert donated.warnings == ()
    jitted = plan(jax.jit(sgd, donate_argnums=0), params, x, layout_map=layout)
    assert jitted.warnings == ()


def test_a_step_that_closes_over_arrays() -> None:
    table = jnp.ones((1024, 512))

    def step(params: Any, x: Any) -> Any:
        return x @ params["up"] + table[:8, :32]

    (warning,) = plan(step, PARAMS, X, layout_map=rules(**MEGATRON)).warnings
    assert warning == (
        "step closes over 1 array ((1024,512); 2.0 MiB): constants of the program, "
        "which every device holds in full; pass them as arguments"
    )


def test_a_function_that_it_calls_closes_over_arrays() -> None:
    """Each array counts once, wherever it is used."""
    table, other = jnp.ones((1024, 512)), np.ones((1024, 512), np.float32)

    @jax.jit
    def inner(x: Any) -> Any:
        return x + table[:8, :32]

    def step(params: Any, x: Any) -> Any:
        x = inner(inner(x @ params["up"])) + table[0, :32]
        return jax.lax.cond(
            x.sum() > 0, lambda x: x + jax.jit(jnp.sum)(other), inner, x
        )

    (warning,) = [
        text
        for text in plan(step, PARAMS, X, layout_map=rules(**MEGATRON)).warnings
        if "closes over" in text
    ]
    assert warning.startswith(
        "step closes over 2 arrays ((1024,512), (1024,512); 4.0 MiB): "
    )


def test_many_layers_without_a_scan() -> None:
    def step(params: Any, x: Any) -> Any:
        for layer in params["layers"]:
            x = jnp.tanh(x @ layer["w"])
        return x.sum()

    params = {"layers": [{"w": struct(16, 16)} for _ in range(13)]}
    (warning,) = plan(step, params, X, layout_map=rules(w=(None, "model"))).warnings
    assert warning.startswith("13 layers stand one after the other in the program, ")
    assert "nnx.scan" in warning
    few = {"layers": params["layers"][:12]}
    assert plan(step, few, X, layout_map=rules(w=(None, "model"))).warnings == ()


@pytest.mark.parametrize("name", ["layers_{}", "Dense_{}", "block{}", "h.{}"])
def test_many_layers_by_the_names_of_others(name: str) -> None:
    """Linen numbers its modules, others their blocks."""

    def step(params: Any, x: Any) -> Any:
        for layer in params.values():
            x = jnp.tanh(x @ layer["w"])
        return x.sum()

    params = {name.format(at): {"w": struct(16, 16)} for at in range(13)}
    (warning,) = plan(step, params, X, layout_map=rules(w=(None, "model"))).warnings
    assert warning.startswith("13 layers stand one after the other in the program, ")


def test_many_layers_in_a_list_of_arrays_and_layers_that_are_not_equal() -> None:
    def step(params: Any, x: Any) -> Any:
        for one in params["w"]:
            x = jnp.tanh(x @ one) @ one.T
        return x.sum()

    layout = rules(**{"w/": (None, "model")})
    params = {"w": [struct(16, 16)] * 13}
    (warning,) = plan(step, params, X, layout_map=layout).warnings
    assert warning.startswith("13 layers stand one after the other in the program, ")
    others = {"w": [struct(16, 16 + 4 * at) for at in range(13)]}
    assert plan(step, others, X, layout_map=layout).warnings == ()


# ------------------------------------------------------------------- bad arguments


def heads() -> Any:
    return {"key": struct(16, 3, 4)}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: flm.pod.plan(sgd, PARAMS, X, layout_map=rules(**MEGATRON)),
            flm.MeshError,
            'plan needs a mesh: pass mesh="fsdp=16,tensor=4", or rules that have one',
        ),
        (
            lambda: plan(sgd, PARAMS, X),
            flm.LayoutError,
            "plan needs rules for a step that is no function of jax.jit; pass "
            "layout_map=layout_map",
        ),
        (
            lambda: plan(sgd, PARAMS, X, layout_map=rules(), slices=2),
            flm.MeshError,
            'slices of which topology? pass topology="v5p:4x4x4" too',
        ),
        (
            lambda: plan(sgd, PARAMS, X, layout_map=rules(), topology="v5e:4x4"),
            flm.MeshError,
            "the mesh data=2,model=4 has 8 devices, and v5e:4x4 has 16; change a size, "
            "or write -1 for one of them",
        ),
        (
            lambda: plan(sgd, PARAMS, X, layout_map=rules(**MEGATRON), mesh="data=8"),
            flm.RuleError,
            "rule 'up': the layout (None, 'model') names the axis 'model', but the "
            "mesh 'data=8' has no such axis",
        ),
        (
            lambda: plan(
                lambda params, x: x @ params["key"][:, 0],
                heads(),
                X,
                layout_map=rules(key=(None, "model", None)),
            ),
            flm.ResolveError,
            "1 leaf does not fit the rules on mesh data=2,model=4:\n"
            "  - params/key (16,3,4): rule 1 'key' → (None, 'model', None): dim 1 of "
            "size 3 does not divide by mesh axis 'model' of size 4; change the size, "
            'use another layout (None for this dim), or indivisible="replicate"',
        ),
        (
            lambda: plan(sgd, PARAMS, struct(7, 16), layout_map=rules(**MEGATRON)),
            flm.LayoutError,
            "the batch does not divide over the batch axes ('data',):\n"
            "  - x (7,16): dim 0 of size 7 does not divide by mesh axis 'data' of size "
            "2\npad it, batch, mask = flm.pad_batch(batch, layout_map), drop the rest, "
            "or place it yourself with flm.distribute_tensor",
        ),
        (
            lambda: plan(sgd, PARAMS, X, layout_map=rules(**MEGATRON)).with_layout(
                rules().on(flm.DeviceMesh.abstract("data=8"))
            ),
            flm.LayoutError,
            "the plan is for the mesh data=2,model=4, and these rules are for data=8; "
            "plan again for another mesh: flm.pod.plan(step, …)",
        ),
    ],
)
def test_messages(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message


def test_a_step_that_needs_values() -> None:
    def step(params: Any, x: Any) -> Any:
        return x if x.sum() > 0 else -x

    for one in (step, jax.jit(step), flm.jit(step)):
        with pytest.raises(flm.LayoutError) as caught:
            plan(one, PARAMS, X, layout_map=rules(**MEGATRON))
        assert str(caught.value).startswith(
            "step needs the values of its arguments, and a plan has none: Attempted"
        )
        assert "use jax.lax.cond, jnp.where" in str(caught.value)


def test_a_jaxlib_without_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_passes, "_PROPAGATE", "no-such-pass")
    with pytest.raises(flm.LayoutError) as caught:
        plan(sgd, PARAMS, X, layout_map=rules(**MEGATRON))
    assert str(caught.value) == (
        "flm.pod.plan needs Shardy's passes in jaxlib, and this jaxlib does not have "
        "them; use jax 0.8.1 or later, or flm.pod.compile, which needs none"
    )


def test_a_pipeline_of_another_order_gives_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step, params = layered(True)
    layout = rules(w=(None, "data", "model"), v=(None, "model", "data"))
    other = rules(w=(None, None, "model"), v=(None, "model", None))
    first = plan(step, params, X, layout_map=layout)
    wanted = [timeless(first), timeless(first.with_layout(other))]
    monkeypatch.setattr(_passes, "_FIRST_OF_LAYOUT", "no-such-pass")
    report = plan(step, params, X, layout_map=layout)
    assert [timeless(report), timeless(report.with_layout(other))] == wanted


def timeless(report: flm.pod.PodReport) -> flm.pod.PodReport:
    return dataclasses.replace(report, took_seconds=0.0)


def test_a_function_that_is_called_twice() -> None:
    @jax.jit
    def product(x: Any, w: Any) -> Any:
        return jax.lax.with_sharding_constraint(x @ w, P("data", None))

    def step(params: Any, x: Any) -> Any:
        def both(x: Any, _: Any) -> Any:
            first = jnp.tanh(product(x, params["w"]))
            return jnp.tanh(product(first, params["v"])), None

        return jax.lax.scan(both, x, None, length=3)[0]

    params = {"w": struct(16, 16), "v": struct(16, 16)}
    mesh: Any = flm.DeviceMesh.abstract(MESH).jax_mesh
    with jax.sharding.use_abstract_mesh(mesh):
        report = plan(step, params, X, layout_map=rules(**{"[wv]": ("model", None)}))
    assert kinds(report) == {("reduce-scatter", ("model",), None): 6}


def test_lowered_modules_are_not_changed() -> None:
    report = plan(sgd, PARAMS, X, layout_map=rules(**MEGATRON))
    other = rules(**FULLY)
    first = report.with_layout(other)
    assert report.with_layout(other).collectives == first.collectives
    assert dataclasses.replace(first, took_seconds=0.0) == dataclasses.replace(
        report.with_layout(other), took_seconds=0.0
    )


@pytest.mark.parametrize("static", [True, False])
def test_numbers_among_the_arguments_of_jax_jit(static: bool) -> None:
    def step(params: Any, rate: Any, x: Any) -> Any:
        return (x @ params["up"]) * rate

    jitted = jax.jit(step, static_argnums=(1,) if static else ())
    report = plan(jitted, PARAMS, 3, X, layout_map=rules(**MEGATRON))
    wanted = {"parameter": 16 * 8 * 4, "data": 4 * 16 * 4 + (0 if static else 4)}
    assert report.memory.at_rest == wanted


def test_arguments_by_name_and_both_branches_of_a_cond() -> None:
    def step(params: Any, *, x: Any) -> Any:
        def both() -> Any:
            return (x @ params["up"]) @ params["down"]

        return jax.lax.cond(x.sum() > 0, both, lambda: x)

    report = plan(step, PARAMS, x=X, layout_map=rules(**MEGATRON))
    assert kinds(report) == {
        ("all-reduce", ("data",), None): 1,
        ("all-reduce", ("model",), None): 1,
    }


def test_explicit_axes_and_another_platform() -> None:
    wanted = kinds(plan(sgd, PARAMS, X, layout_map=rules(**MEGATRON)))
    cuda = plan(sgd, PARAMS, X, layout_map=rules(**MEGATRON), platform="cuda")
    assert kinds(cuda) == wanted
    mesh = flm.DeviceMesh.abstract(MESH, axis_types="explicit")

    def step(params: Any, x: Any) -> Any:
        return jax.nn.relu(x @ params["up"]).sum()

    explicit = plan(step, PARAMS, X, layout_map=rules(**MEGATRON), mesh=mesh)
    assert kinds(explicit) == {("all-reduce", ("data", "model"), None): 1}


def test_what_shardy_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(functions: Any) -> set[str]:
        from jaxlib.mlir import ir

        kind = ir.FunctionType.get([], [])
        functions["main"].attributes["function_type"] = ir.TypeAttr.get(kind)
        return set()

    monkeypatch.setattr(_passes, "inline_calls", spoil)
    with pytest.raises(flm.LayoutError) as caught:
        plan(sgd, PARAMS, X, layout_map=rules(**MEGATRON))
    said = str(caught.value)
    assert said.startswith("Shardy does not lay this program out: ")
    assert "arguments" in said
