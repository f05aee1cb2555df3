"""`flm.accumulate`: values, gradients, what changes, and the collectives of a step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import needs_libtpu

import flax_layoutmap as flm

ROWS = 64


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, between: Callable[[nnx.Rngs], Any]) -> None:
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.between = between(rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(self.between(nnx.relu(self.up(x))))


def plain(rngs: nnx.Rngs) -> Any:
    return nnx.Sequential()


def dropout(rngs: nnx.Rngs) -> Any:
    return nnx.Dropout(0.5, rngs=rngs)


def loss_of(model: Any, batch: Any) -> Any:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def batch_of(rows: int = ROWS) -> Any:
    numbers = np.random.default_rng(0)
    return {name: numbers.normal(size=(rows, 8)).astype(np.float32) for name in "xy"}


def rules(mesh: Any, **layouts: Any) -> flm.LayoutMap:
    """Rules for the model; the batch is over `data` and `fsdp`."""
    mesh = flm.DeviceMesh(mesh) if isinstance(mesh, str) else mesh
    axes = [axis for axis in ("data", "fsdp") if axis in mesh.axis_names]
    layout_map = flm.LayoutMap(mesh, batch=axes, strict=False)
    for pattern, layout in layouts.items():
        layout_map[pattern] = layout
    return layout_map


def trained(
    layout_map: Any, between: Any = plain, steps: int = 0, **options: Any
) -> Any:
    """A model after two steps, and their losses; without accumulation for 0."""
    model = flm.create(lambda: Mlp(nnx.Rngs(0), between), layout_map)
    optimizer = flm.create_optimizer(model, optax.adam(1e-2), layout_map, wrt=nnx.Param)

    @flm.jit(layout_map=layout_map, donate_argnames=("model", "optimizer"))
    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        gradient = nnx.value_and_grad(loss_of)
        if steps:
            gradient = flm.accumulate(loss_of, steps=steps, **options)
        loss, gradients = gradient(model, batch)
        optimizer.update(model, gradients)
        return loss

    losses = [float(train_step(model, optimizer, batch_of())) for _ in range(2)]
    assert train_step._cache_size() == 1
    return model, losses


ONE = rules(flm.DeviceMesh((1,), ("data",), devices=jax.devices()[:1]))
LAYOUTS: dict[str, Any] = {
    "one device": ONE,
    "replicated": rules("data=8"),
    "fsdp over data": rules("data=8", kernel=(None, "data")),
    "fsdp": rules("data=4,fsdp=2", kernel=(None, "fsdp")),
    "tensor": rules("data=2,fsdp=2,tensor=2", **{"up/kernel": ("fsdp", "tensor")}),
    "explicit": rules(
        flm.DeviceMesh("data=4,fsdp=2", axis_types="explicit"), kernel=(None, "fsdp")
    ),
}


@pytest.fixture(scope="module")
def without_it() -> tuple[Any, list[float]]:
    """The parameters after two steps without accumulation, and the losses."""
    model, losses = trained(ONE)
    return jax.tree.map(np.asarray, nnx.state(model)), losses


@pytest.mark.parametrize(
    ("name", "steps", "reduce"),
    [
        ("one device", 4, "once"),
        ("replicated", 0, "once"),
        ("replicated", 1, "once"),
        ("replicated", 4, "each"),
        ("fsdp over data", 4, "once"),
        ("fsdp", 4, "once"),
        ("tensor", 4, "once"),
        ("tensor", 4, "each"),
        ("explicit", 4, "once"),
        ("explicit", 4, "each"),
    ],
)
def test_equals_the_step_without_it(
    name: str, steps: int, reduce: Any, without_it: Any
) -> None:
    expected, losses = without_it
    layout_map = LAYOUTS[name]
    model, found = trained(layout_map, steps=steps, reduce=reduce)
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    state = nnx.state(model)
    for one, other, sharding in zip(
        *map(jax.tree.leaves, (state, expected, layout_map.shardings(state))),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, atol=1e-6)
        assert one.sharding == sharding


# --------------------------------------------------------- arguments of every kind


def gradients(layout_map: Any, loss_fn: Any, *args: Any, **options: Any) -> Any:
    """Value and gradients with `flm.accumulate`, in `flm.jit`."""
    return flm.jit(
        lambda *args: flm.accumulate(loss_fn, **options)(*args), layout_map=layout_map
    )(*args)


def linear(params: Any, batch: Any) -> Any:
    return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean()


def close(found: Any, expected: Any) -> None:
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


PARAMS = {"w": np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)}


def of_several_arguments() -> Any:
    def loss_fn(one: Any, batch: Any, *others: Any) -> Any:
        return linear(one, batch) + linear(others[0], batch)

    return loss_fn, (PARAMS, batch_of(), {"w": PARAMS["w"] * 2}), {"argnums": (2, 0)}


def of_a_filter_and_a_teacher() -> Any:
    def loss_fn(student: Any, teacher: Any, batch: Any) -> Any:
        return ((student(batch["x"]) - teacher(batch["x"])) ** 2).mean()

    wrt = nnx.DiffState(0, nnx.All(nnx.Param, nnx.PathContains("down")))
    models = Mlp(nnx.Rngs(0), plain), Mlp(nnx.Rngs(1), plain)
    return loss_fn, (*models, batch_of()), {"argnums": wrt}


def of_settings() -> Any:
    def loss_fn(params: Any, batch: Any, scale: Any, kind: str, double: bool) -> Any:
        assert (kind, double) == ("squares", True)
        return linear(params, batch) * scale * 2

    return loss_fn, (PARAMS, batch_of(), jnp.float32(3), "squares", True), {}


@pytest.mark.parametrize("mesh", ["data=8", "data=2,fsdp=2,tensor=2"])
@pytest.mark.parametrize(
    "make",
    [
        of_several_arguments,
        of_a_filter_and_a_teacher,
        of_settings,
    ],
)
def test_arguments_of_every_kind(make: Any, mesh: str) -> None:
    """As for `value_and_grad` of the whole batch; in jax.jit, and eagerly."""
    loss_fn, args, options = make()
    layouts = {"w$|kernel": ("fsdp", "tensor")} if "fsdp" in mesh else {}
    layout_map = rules(mesh, **layouts)

    def gradient(*args: Any) -> Any:
        with flm.activation_scope(layout_map):
            return flm.accumulate(loss_fn, steps=4, **options)(*args)

    expected = nnx.value_and_grad(loss_fn, **options)(*args)
    close(gradient(*args), expected)
    static = tuple(at for at, x in enumerate(args) if isinstance(x, str | bool))
    step = flm.jit(lambda *args: gradient(*args), static_argnums=static)
    close(step(*args), expected)


def test_several_arguments_with_rows_are_named() -> None:
    """Others are passed whole, even with as many rows, and parameters of any name."""

    def loss_fn(w: Any, frozen: Any, batch: Any, weights: Any) -> Any:
        assert frozen.shape == (ROWS, 8)
        errors = ((batch["w"] @ w - frozen.mean(0)) ** 2).mean(-1)
        return (errors * weights).mean()

    layout_map = rules("data=4,tensor=2", w=(None, "tensor"))
    batch = {"w": batch_of()["x"], "none": np.zeros((ROWS, 0), np.float32)}
    weights = np.linspace(0, 2, ROWS, dtype=np.float32)
    args = PARAMS["w"], batch_of()["y"], batch, weights
    named = {"steps": 2, "batch_argnames": ("batch", "weights")}
    found = gradients(layout_map, loss_fn, *args, **named)
    close(found, jax.value_and_grad(loss_fn)(*args))
    with pytest.raises(flm.LayoutError, match=r"\['batch', 'frozen', 'weights'\]"):
        gradients(layout_map, loss_fn, *args, steps=2)


def test_rules_for_activations_and_names_leave_the_axis_out() -> None:
    layout_map = rules("data=4,fsdp=2", kernel=(None, "fsdp"))
    layout_map.activations["up"] = (("data", "fsdp"), None)
    layout_map.names["hidden"] = ("data", "fsdp")
    seen = []

    def loss_fn(model: Any, batch: Any) -> Any:
        hidden = flm.distribute_tensor(model.up(batch["x"]), "hidden")
        seen.append(hidden.shape)
        return (model.down(nnx.relu(hidden)) ** 2).mean()

    model = layout_map.place(Mlp(nnx.Rngs(0), plain))
    found = gradients(layout_map, loss_fn, model, batch_of(), steps=2)
    whole = flm.jit(
        lambda model, batch: nnx.value_and_grad(loss_fn)(model, batch),
        layout_map=layout_map,
    )
    close(found, whole(model, batch_of()))
    assert seen == [(8, 16), (64, 16)]


# --------------------------------------------------------------- random numbers


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_keys_are_folded(make: Any) -> None:
    """Each micro-batch of each device has its own; those in NNX objects, too."""

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        drawn = jax.random.uniform(key), jax.random.uniform(model.rngs.noise())
        return model.weight[...], drawn

    model = nnx.Dict(weight=nnx.Param(jnp.ones(())), rngs=nnx.Rngs(noise=0))
    args = model, batch_of(), make(0)
    found = gradients(rules("data=2,fsdp=4"), loss_fn, *args, steps=4, has_aux=True)
    folded = [jax.random.uniform(jax.random.fold_in(make(0), n)) for n in range(32)]
    np.testing.assert_array_equal(found[0][1][0], folded)
    assert len(set(found[0][1][1].tolist())) == 32
    assert model.rngs.noise.count[...] == 4
    assert model.rngs.noise.key[...] == jax.random.key(0)


def count_and_loss(model: Any, batch: Any) -> Any:
    model.calls[...] += 1
    return loss_of(model, batch)


class Rematerialized(Mlp):
    def __call__(self, x: Any) -> Any:
        return nnx.remat(Mlp.__call__)(self, x)


@pytest.mark.parametrize("reduce", ["once", "each"])
def test_dropout_in_a_transformation_of_flax(reduce: Any) -> None:
    """It returns all Variables as new values; keys stay, counts go on."""
    found = []
    for kind in (Mlp, Rematerialized):
        model: Any = kind(nnx.Rngs(0), dropout)
        model.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        gradient = flm.accumulate(count_and_loss, steps=2, reduce=reduce)
        step = flm.jit(gradient, layout_map=rules("data=8"))
        losses = [step(model, batch_of())[0] for _ in range(2)]
        assert float(losses[0]) != float(losses[1])
        assert model.between.rngs.count[...] == model.calls[...] == 4
        assert model.between.rngs.key[...] == Mlp(nnx.Rngs(0), dropout).between.rngs.key
        found.append(losses)
    close(*found)


def test_sums_are_in_float32() -> None:
    params = {"w": jnp.ones((), jnp.bfloat16)}

    def loss_fn(params: Any, batch: Any) -> Any:
        return (params["w"] * batch).mean()

    batch = np.full(2048, 1 + 2**-7, jnp.bfloat16)
    loss, grads = gradients(ONE, loss_fn, params, batch, steps=256)
    assert grads["w"].dtype == loss.dtype == jnp.bfloat16
    assert float(grads["w"]) == 1 + 2**-7  # sums of bfloat16 stop at 256


@pytest.mark.parametrize("reduce", ["once", "each"])
@pytest.mark.parametrize("own", [("data", "fsdp"), ("fsdp", None)])
def test_gradients_have_the_layout_of_optimizer_state(own: Any, reduce: Any) -> None:
    """Finer than that of parameters, or another; but on the device."""
    layout_map = rules("data=4,fsdp=2", w=(None, "fsdp"))
    layout = flm.TensorLayout(own, layout_map.device_mesh)
    layout_map.optimizer["w"] = flm.TensorLayout(own, memory_kind="pinned_host")
    gradient = flm.accumulate(linear, steps=4, reduce=reduce)
    step = flm.jit(lambda *args: gradient(*args)[1]["w"], layout_map=layout_map)
    found = step(layout_map.place(PARAMS), batch_of())
    close(found, jax.grad(linear)(PARAMS, batch_of())["w"])
    assert found.sharding == layout.sharding(2)


# ---------------------------------------------------------------------- collectives


def planned(layout_map: Any, plan: Any = flm.pod.plan, **options: Any) -> Any:
    """The plan of a step of four micro-batches."""
    where = options.pop("where", {})

    def make() -> Any:
        model = Mlp(nnx.Rngs(0), plain)
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def train_step(model: Any, optimizer: Any, batch: Any) -> None:
        _, grads = flm.accumulate(loss_of, steps=4, **options)(model, batch)
        optimizer.update(model, grads)

    nodes = [nnx.eval_shape(lambda at=at: make()[at]) for at in (0, 1)]
    batch = jax.eval_shape(lambda: batch_of(4096))
    report = plan(train_step, *nodes, batch, layout_map=layout_map, **where)
    assert not report.unread
    return report


def traffic(report: Any) -> Any:
    """The collectives of a step: (kind, axes) → (times, payload)."""
    found: dict[Any, Any] = {}
    for one in report.collectives:
        times, payload = found.get((one.kind, one.axes), (0, 0))
        found[one.kind, one.axes] = (
            times + one.executions,
            payload + one.bytes_per_step,
        )
    return found


# Bytes of the gradients of 128 + 128 weights, and of 16 + 8 biases.
KERNELS, BIASES = 1024, 96


def test_over_fsdp_parameters_move_in_each_micro_batch() -> None:
    layout_map = rules(flm.DeviceMesh.abstract("data=4,fsdp=2"), kernel=(None, "fsdp"))
    layout_map.activations[".*"] = (("data", "fsdp"), None)
    assert traffic(planned(layout_map)) == {
        ("all-gather", ("fsdp",)): (4 * 2, 4 * KERNELS),
        ("reduce-scatter", ("fsdp",)): (4 * 2, 4 * KERNELS),
        ("all-reduce", ("fsdp",)): (4 * 2, 4 * BIASES),
        ("all-reduce", ("data",)): (4, KERNELS // 2 + BIASES),
    }


def test_zero() -> None:
    """The table of the documentation: what is sent and how often."""
    mesh = flm.DeviceMesh.abstract("data=8")
    replicated = rules(mesh, kernel=(None, None))
    zero1 = flm.presets.zero1(replicated)
    zero3 = rules(mesh, kernel=(None, "data"))
    scatter, gather = ("reduce-scatter", ("data",)), ("all-gather", ("data",))
    small = ("all-reduce", ("data",))
    once, each = (2, KERNELS), (4 * 2, 4 * KERNELS)
    biases = {small: (4 * 2, 4 * BIASES)}
    assert traffic(planned(zero1)) == {scatter: once, gather: once, small: (2, BIASES)}
    assert traffic(planned(zero1, reduce="each")) == {
        scatter: each,
        gather: once,
        **biases,
    }
    assert traffic(planned(zero3)) == {scatter: each, gather: each, **biases}


@needs_libtpu
@pytest.mark.usefixtures("own_temporary_folder")
def test_the_compiler_for_tpus_scatters_once() -> None:
    mesh = flm.DeviceMesh.abstract("data=4")
    layout_map = flm.presets.zero1(rules(mesh, kernel=(None, None)))
    where = {"topology": "v5e:2x2", "mesh": "data=4"}
    report = planned(layout_map, flm.pod.compile, where=where)
    assert report.collectives
    assert all(one.executions == 1 for one in report.collectives)


# ------------------------------------------------------------------------- bad input


def refused(
    loss_fn: Any = linear, batch: Any = None, *, steps: Any = 4, **more: Any
) -> str:
    with pytest.raises(flm.LayoutError) as error:
        batch = batch_of() if batch is None else batch
        gradients(rules("data=8"), loss_fn, PARAMS, batch, steps=steps, **more)
    return str(error.value)


def test_rows_that_do_not_divide_or_differ() -> None:
    assert refused(steps=3) == (
        "accumulate(steps=3) splits rows (dim 0) into 3 × 8 parts, the steps and the "
        "devices along ('data',); these differ, or do not divide:\n  - batch/x (64,8)\n"
        "  - batch/y (64,8)\nPad the batch with flm.pad_batch and weight the loss by "
        "its mask; see docs/training.md#padding."
    )
    batch = {**batch_of(), "weights": np.ones(8, np.float32)}
    assert "batch/weights (8,)" in refused(batch=batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "takes 1 or more, got 0"),
        ({"steps": 1.5}, "takes 1 or more, got 1.5"),
        ({"reduce": "data"}, "is 'once' or 'each', got 'data'"),
        ({"argnums": 4}, "argnums names argument number 4"),
        ({"batch_argnames": "x"}, "batch_argnames names the argument 'x', but"),
        ({"batch_argnames": "params"}, "name its arguments, batch_argnames=…, of"),
        ({"batch": jnp.float32(1)}, "nor in an NNX object: []"),
    ],
)
def test_options(options: Any, message: str) -> None:
    assert message in refused(**options)


def test_in_its_own_loss_and_without_rules() -> None:
    def nested(params: Any, batch: Any) -> Any:
        return flm.accumulate(linear, steps=2)(params, batch)[0]

    found = gradients(rules("data=8"), nested, PARAMS, batch_of(), steps=4)
    close(found, jax.value_and_grad(linear)(PARAMS, batch_of()))
    with pytest.raises(flm.LayoutError, match=r"activation_scope\(layout_map\)"):
        flm.accumulate(linear, steps=2)(PARAMS, batch_of())


def grows(model: Any, batch: Any) -> None:
    model.seen = nnx.Variable(batch["x"].sum())


def edits(model: Any, batch: Any) -> None:
    model.note = 3


def changes_a_dtype(model: Any, batch: Any) -> None:
    model.up.bias.set_value(model.up.bias[...].astype("bfloat16"))


def counts_rows(model: Any, batch: Any) -> None:
    model.calls[...] += (batch["x"] > 0).sum()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (grows, "changes the structure, shapes or static attributes"),
        (edits, "changes the structure, shapes or static attributes"),
        (changes_a_dtype, r"model/up/bias'\] has type float32\[16\]"),  # JAX's own
        (counts_rows, r"\['model/calls'\], got axis spec None"),  # JAX's own
    ],
)
def test_a_loss_with_changes_that_no_loop_can_keep(change: Any, message: str) -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        change(model, batch)
        return loss_of(model, batch)

    model: Any = Mlp(nnx.Rngs(0), plain)
    model.calls = nnx.Variable(jnp.zeros((), jnp.int32))
    with pytest.raises((TypeError, ValueError), match=message):
        gradients(rules("data=8"), loss_fn, model, batch_of(), steps=2)


def test_the_loss_is_traced_once() -> None:
    seen = []

    def loss_fn(params: Any, batch: Any) -> Any:
        seen.append(batch["x"].shape)
        return linear(params, batch)

    for _ in range(2):
        gradients(rules("data=8"), loss_fn, PARAMS, batch_of(), steps=4)
        assert seen.pop() == (2, 8) and not seen


def test_on_explicit_axes_of_the_user() -> None:
    """With `jax.sharding.auto_axes`, as for other functions without types."""
    mesh = flm.DeviceMesh("data=4,fsdp=2", axis_types="explicit")
    layout_map = rules(mesh, w=(None, "fsdp"))
    specs: Any = (jax.P(), {"w": jax.P(None, "fsdp")})
    gradient: Any = flm.accumulate(linear, steps=4)
    auto = jax.sharding.auto_axes(gradient, out_sharding=specs)
    step = flm.jit(auto, layout_map=layout_map, explicit=True)
    found = step(layout_map.place(PARAMS), batch_of())
    close(found, jax.value_and_grad(linear)(PARAMS, batch_of()))
    assert tuple(found[1]["w"].sharding.spec) == (None, "fsdp")


@pytest.mark.parametrize("rows", [2, 4])
def test_rows_are_not_taken_for_old_style_keys(rows: int) -> None:
    layout_map = rules("data=2,tensor=4")
    batch = {"x": batch_of(rows)["x"], "label": np.arange(rows, dtype=np.uint32)}

    def loss_fn(w: Any, batch: Any) -> Any:
        return ((batch["x"] @ w) * batch["label"]).mean()

    args = PARAMS["w"][0], batch
    found = gradients(layout_map, loss_fn, *args, steps=rows // 2)
    close(found, jax.value_and_grad(loss_fn)(*args))
