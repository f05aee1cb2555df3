"""jit: layouts of state and data, objects in place, caches, donation, and bad input."""

import contextlib
import functools
import gc
import inspect
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from shards import KINDS, assert_lies, bare, grid, leaves_of
from steps import BATCH, COLUMN, DIMS, ROW, X, Y, make, rules

import flax_layoutmap as flm

P = PartitionSpec


def train(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    loss, grads = nnx.value_and_grad(lambda m: ((m(x) - y) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def predict(model: Any, x: Any) -> Any:
    return model(x)


def nudge(model: Any, x: Any) -> Any:
    """Changes one kernel, and reads the other."""
    model.up.kernel[...] = model.up.kernel[...] + x.sum()
    return model.down.kernel[...].sum()


def assert_model_lies(model: Any, mesh: flm.DeviceMesh) -> None:
    for path, leaf in leaves_of(model).items():
        assert_lies(leaf, DIMS[path] if path in DIMS else ((),) * leaf.ndim, mesh)


def counted(function: Callable[..., Any]) -> Any:
    """The function, which counts how often it is traced."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        call.count += 1  # type: ignore[attr-defined]
        return function(*args, **kwargs)

    call.count = 0  # type: ignore[attr-defined]
    return call


@contextlib.contextmanager
def refuses(error: type[Exception], text: str) -> Iterator[None]:
    """The block raises this error with this very text."""
    with pytest.raises(error) as caught:
        yield
    assert str(caught.value) == text


# ------------------------------------------------------------------------ training


def test_a_loop_with_placed_batches_compiles_once(mesh: flm.DeviceMesh) -> None:
    layout_map = rules(mesh)
    function = counted(predict)
    step = flm.jit(function, layout_map=layout_map)
    model = flm.create(make, layout_map)
    model.eval()
    data = bare(mesh)
    batches = [
        X,
        jnp.asarray(X),
        jax.device_put(X, NamedSharding(data, P("data"))),
        jax.device_put(X, NamedSharding(data, P("data", None))),
        jax.device_put(X, NamedSharding(data, P(("data",), None))),
    ]
    results = [np.asarray(step(model, batch)) for batch in batches]
    assert function.count == 1 and step._cache_size() == 1
    for result in results:
        np.testing.assert_array_equal(result, results[0])


def test_a_rule_added_later_takes_effect(mesh: flm.DeviceMesh) -> None:
    layout_map = rules(mesh)
    layout_map.names["out"] = (None, "model")
    step = flm.jit(
        lambda tree, x: ({"w": tree["w"] * 2}, flm.distribute_tensor(x, "out")),
        layout_map=layout_map,
        donate_argnames="tree",
    )
    new, out = step({"w": X}, X)
    assert_lies(new["w"], ((), ()), mesh, X * 2)
    assert_lies(out, COLUMN, mesh, X)
    layout_map["w"] = ("model", None)
    layout_map.names.replace("out", ("model", None))
    new, out = step({"w": X}, X)
    assert_lies(new["w"], ROW, mesh, X * 2)
    assert_lies(out, ROW, mesh, X)


def test_a_python_int_step(mesh: flm.DeviceMesh) -> None:
    function = counted(lambda state: {**state, "step": state["step"] + 1})
    step = flm.jit(function, layout_map=rules(mesh), donate_argnames="state")
    state = {"step": 0, "rate": 0.5, "up": {"kernel": X}}
    for _ in range(3):
        state = step(state)
    assert function.count == 1 and step._cache_size() == 1
    assert_lies(state["step"], (), mesh, np.int32(3))
    assert_lies(state["rate"], (), mesh, np.float32(0.5))
    assert_lies(state["up"]["kernel"], COLUMN, mesh, X)


# --------------------------------------------------------------------------- data


def test_host_arrays_are_split_over_the_batch_axes() -> None:
    layout_map = rules(batch=("data", "model"))
    mesh = grid()
    step = flm.jit(lambda b: b, layout_map=layout_map)
    batch = {
        "x": X,
        "y": jnp.asarray(Y),
        "mask": np.ones(8, bool),
        "empty": np.zeros((0, 4), np.float32),
        "scale": np.float32(2),
        "number": 3,
        "key": jax.random.key(0),
        "keys": jax.random.split(jax.random.key(0), 3),
        "none": None,
    }
    out = step(batch)
    every = ("data", "model")
    assert_lies(out["x"], (every, ()), mesh, X)
    assert_lies(out["y"], (every, ()), mesh, Y)
    assert_lies(out["mask"], (every,), mesh)
    assert out["empty"].shape == (0, 4)
    for name in ("scale", "key"):
        assert_lies(out[name], (), mesh)
    assert_lies(out["keys"], ((),), mesh)
    assert int(out["number"]) == 3 and out["none"] is None


def test_arrays_on_the_mesh_keep_their_layout(mesh: flm.DeviceMesh) -> None:
    layout_map = rules(mesh)
    step = flm.jit(lambda x: x, layout_map=layout_map)
    for spec in (P(None, "model"), P("model", "data"), P()):
        x = jax.device_put(X, NamedSharding(bare(mesh), spec))
        assert step(x).sharding.is_equivalent_to(x.sharding, 2)
    # The same devices under other names, or with axes of another type.
    other = flm.DeviceMesh((4, 2), ("a", "b"))
    x = jax.device_put(X, NamedSharding(bare(other), P("a", "b")))
    assert_lies(step(x), (("a",), ("b",)), other, X)
    x = jax.device_put(X, NamedSharding(bare(grid("explicit")), P("data")))
    assert_lies(step(x), BATCH, mesh, X)


def test_data_on_other_devices(mesh: flm.DeviceMesh) -> None:
    step = flm.jit(lambda batch: batch, layout_map=rules(mesh))
    with refuses(
        flm.LayoutError,
        "1 arrays are not on the mesh of the rules, data=2,model=4:\n"
        "  - batch/x (8,8) is "
        f"{jax.sharding.SingleDeviceSharding(jax.devices()[3])}\nplace them with "
        "flm.distribute_tensor, or pass them as NumPy arrays, which are split over the "
        "batch axes",
    ):
        step({"x": jax.device_put(X, jax.devices()[3])})
    half = flm.DeviceMesh((4,), ("data",), devices=jax.devices()[:4])
    with pytest.raises(flm.LayoutError, match=re.escape("P(data) on mesh data=4")):
        step(jax.device_put(X, NamedSharding(bare(half), P("data"))))


@pytest.mark.parametrize(
    ("leaf", "what"),
    [
        ("text", "the str 'text'"),
        (np.array([object()]), "the array of object"),
    ],
)
@pytest.mark.parametrize("donate", [(), "batch"])
def test_leaves_that_are_no_arrays(leaf: Any, what: str, donate: Any) -> None:
    step = flm.jit(lambda batch: 0, layout_map=rules(), donate_argnames=donate)
    with refuses(
        flm.LayoutError,
        f"batch/name is neither an array nor a number, but {what}: take it out of the "
        "argument, or name a whole (hashable) argument in static_argnames",
    ):
        step({"name": leaf})


# ------------------------------------------------------------------ where state must be


def test_state_that_is_elsewhere(mesh: flm.DeviceMesh) -> None:
    layout_map = rules(mesh)
    function = counted(predict)
    step = flm.jit(function, layout_map=layout_map)
    model = make()
    device = jax.devices()[3]
    nnx.update(model, jax.device_put(nnx.state(model), device))
    with pytest.raises(flm.LayoutError) as caught:
        step(model, X)
    text = str(caught.value)
    assert text.startswith("10 arrays are not where this jit wants them:\n")
    assert (
        "  - model/up/kernel (8,16): wanted P(-, model) on mesh data=2,model=4, it is "
        f"{jax.sharding.SingleDeviceSharding(device)}\n" in text
    )
    assert text.endswith(
        "\nmake state with flm.create and flm.create_optimizer, or place all of it "
        "first, under these names: layout_map.place({'model': model})"
    )
    layout_map.place(model)
    step(model, X)


def test_state_that_was_never_placed_is_placed_once(mesh: flm.DeviceMesh) -> None:
    model = make()
    step = flm.jit(predict, layout_map=rules(mesh))
    step(model, X)
    assert_model_lies(model, mesh)
    kernel = model.up.kernel.get_value()
    step(model, X)
    assert model.up.kernel.get_value() is kernel
    assert step._cache_size() == 1


def test_other_spellings_of_a_layout_are_no_error(mesh: flm.DeviceMesh) -> None:
    layout_map = rules(mesh)
    model = flm.create(make, layout_map)
    step = flm.jit(predict, layout_map=layout_map)
    step(model, X)
    spelled = NamedSharding(bare(mesh), P(("model",), None))
    model.down.kernel.set_value(jax.device_put(model.down.kernel[...], spelled))
    twin = NamedSharding(bare(grid("explicit")), P(None, "model"))
    model.up.kernel.set_value(jax.device_put(model.up.kernel[...], twin))
    step(model, X)
    assert step._cache_size() == 1
    assert_model_lies(model, mesh)
    assert model.up.kernel[...].sharding.mesh == mesh.jax_mesh


# ------------------------------------------------------------------------- donation


@pytest.mark.usefixtures("donation_after_reads")
def test_donation(mesh: flm.DeviceMesh) -> None:
    layout_map = rules(mesh)
    one, two = (flm.create(make, layout_map) for _ in range(2))

    def both(one: Any, two: Any, tree: Any) -> Any:
        nudge(one, X)
        nudge(two, X)
        return {"w": tree["w"] + 1}

    def deleted(**options: Any) -> list[bool]:
        step = flm.jit(both, layout_map=layout_map, **options)
        tree = {"w": flm.distribute_tensor(X, flm.TensorLayout(None, mesh))}
        old = one.up.kernel.get_value(), two.up.kernel.get_value(), tree["w"]
        step(one, two, tree)
        for model in (one, two):
            assert_model_lies(model, mesh)
            assert not any(model.up.kernel.get_value() is leaf for leaf in old)
        return [leaf.is_deleted() for leaf in old]

    assert deleted() == [False, False, False]
    assert deleted(donate_argnames="one", donate_argnums=2) == [True, False, True]
    assert deleted(donate_argnums=(1,)) == [False, True, False]
    assert deleted(donate_argnums=(0, -2), donate_argnames=["tree"]) == [True] * 3


def test_what_is_donated_but_not_changed_stays(mesh: flm.DeviceMesh) -> None:
    class Square(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.asarray(X))
            self.count = nnx.Variable(jnp.zeros((8, 8)))

    def run(model: Any, x: Any) -> Any:
        model.count[...] = model.count[...] + 1
        return model.w[...] @ x  # of the shape and layout of w

    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["w|count"] = ("data", None)
    model = flm.create(Square, layout_map)
    count = model.count.get_value()
    step = flm.jit(run, layout_map=layout_map, donate_argnames="model")
    for _ in range(2):
        step(model, X)
    assert count.is_deleted()
    assert_lies(model.w.get_value(), BATCH, mesh, X)


def test_one_array_donated_twice(mesh: flm.DeviceMesh) -> None:
    layout_map = flm.LayoutMap(mesh, strict=False)
    x = flm.distribute_tensor(X, flm.TensorLayout(None, mesh))
    with refuses(
        flm.LayoutError,
        "a/w and b/w are one array, which is donated: it cannot be used twice; copy it "
        "first, jax.numpy.copy(x), or do not donate it",
    ):
        flm.jit(lambda a, b: (a, b), layout_map=layout_map, donate_argnums=(0, 1))(
            {"w": x}, {"w": x}
        )
    y = flm.distribute_tensor(X, flm.TensorLayout(None, mesh))
    trees = flm.jit(lambda a, b: (a, b), layout_map=layout_map, donate_argnums=(0, 1))
    with pytest.raises(flm.LayoutError, match="^a/v and b/z are one array, which"):
        trees({"v": y, "w": x}, {"w": x, "z": y})  # not all four as one
    one = flm.jit(lambda a, b: (a * 2, b * 2), layout_map=layout_map, donate_argnums=0)
    with pytest.raises(flm.LayoutError, match="a and b are one array, which is"):
        one(x, x)
    one(x, jnp.copy(x))
    assert x.is_deleted()


# --------------------------------------------------------------- options and signatures


def test_static_arguments(mesh: flm.DeviceMesh) -> None:
    def scale(x: Any, by: Any, *, how: str = "times") -> Any:
        assert isinstance(by, int | float) and isinstance(how, str)
        return x * by if how == "times" else x + by

    function = counted(scale)
    several: list[dict[str, Any]] = [
        {"static_argnames": ("by", "how")},
        {"static_argnames": ["how"], "static_argnums": (-1,)},
    ]
    for options in several:
        step = flm.jit(function, layout_map=rules(mesh), **options)
        for found in (step(X, 2), step(x=X, by=2), step(X, by=2)):
            np.testing.assert_array_equal(found, X * 2)
        np.testing.assert_array_equal(step(X, 3, how="plus"), X + 3)
        assert len(step._programs) == 2
    # Equal values of other types are other programs.
    step = flm.jit(function, layout_map=rules(mesh), static_argnames=("by", "how"))
    assert step(np.ones(8, np.int32), 1).dtype == jnp.int32
    assert step(np.ones(8, np.int32), 1.0).dtype == jnp.float32
    with refuses(
        flm.LayoutError,
        "the static argument 'by' cannot be hashed: [2]; make it a tuple or a frozen "
        "dataclass, or take it out of static_argnames",
    ):
        step(X, [2])


def test_signatures(mesh: flm.DeviceMesh) -> None:
    layout_map = rules(mesh)
    model = flm.create(make, layout_map)
    model.eval()

    def function(first: Any, /, *args: Any, scale: Any = 2, **kwargs: Any) -> Any:
        (inner,) = args
        return inner(first) * scale + kwargs["first"]["offset"] - kwargs["args"]

    step = flm.jit(function, layout_map=layout_map)
    wanted = function(X, model, scale=3, first={"offset": Y}, args=1)
    found = step(X, model, scale=3, first={"offset": Y}, args=1)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    # In *args, state and data each are what they are.
    kinds = flm.jit(lambda *args: args[1], layout_map=layout_map)
    assert_lies(kinds(model, X), BATCH, mesh, X)


def test_unknown_arguments() -> None:
    def function(model: Any, x: Any) -> Any:
        del model, x

    for option in ("static_argnames", "donate_argnames"):
        with refuses(
            flm.LayoutError,
            f"{option} names the argument 'modle', but the function has "
            "['model', 'x']; did you mean 'model'?",
        ):
            options: dict[str, Any] = {option: "modle"}
            flm.jit(function, **options)
    with pytest.raises(flm.LayoutError, match="in_shardings names the argument 'y'"):
        flm.jit(function, in_shardings={"y": None})
    with refuses(
        flm.LayoutError,
        "donate_argnums names argument number 2, but the function has ['model', 'x']",
    ):
        flm.jit(function, donate_argnums=2)
    with refuses(
        flm.LayoutError, "static arguments have no buffers or shardings: ['x']"
    ):
        flm.jit(function, static_argnames="x", donate_argnums=1)
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        flm.jit(function)(1)


def test_out_shardings(mesh: flm.DeviceMesh) -> None:
    layout_map = rules(mesh)
    row = NamedSharding(bare(mesh), P("model"))
    step = flm.jit(
        lambda state, x: (state, {"x": x, "y": [x]}, x),
        layout_map=layout_map,
        donate_argnames="state",
        out_shardings=(None, row, flm.TensorLayout((None, "model"))),
    )
    state, both, last = step({"up": {"kernel": X}}, X)
    # None leaves a state to the rules.
    assert_lies(state["up"]["kernel"], COLUMN, mesh, X)
    assert_lies(both["x"], ROW, mesh, X)
    assert_lies(both["y"][0], ROW, mesh, X)
    assert_lies(last, COLUMN, mesh, X)
    with pytest.raises(flm.LayoutError, match="out_shardings must be one sharding"):
        flm.jit(lambda x: x, layout_map=layout_map, out_shardings=(row, row))(X)


def test_trace_lower_and_eval_shape(mesh: flm.DeviceMesh) -> None:
    layout_map = rules(mesh)
    function = counted(predict)
    step = flm.jit(function, layout_map=layout_map)
    model = flm.create(make, layout_map)
    before = {path: leaf for path, leaf in leaves_of(model).items()}
    shape = step.eval_shape(model, X)
    assert (shape.shape, shape.dtype) == ((8, 8), jnp.float32)
    assert "dot_general" in str(step.trace(model, X).jaxpr)
    lowered = step.lower(model, X)
    text = lowered.as_text()
    assert (
        "jit_predict" in text
        and text.count("sdy.sharding") + text.count("mhlo.sharding") >= 10
    )
    compiled = lowered.compile()
    assert compiled.memory_analysis() is not None
    # Abstract arguments give the same program, batch axes included.
    abstract = nnx.eval_shape(make), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert step.lower(*abstract).as_text() == text
    placed = jax.device_put(X, NamedSharding(bare(mesh), P("data", None)))
    assert step.lower(model, placed).as_text() == text
    # Nothing ran, and one trace was enough.
    assert all(leaf is before[path] for path, leaf in leaves_of(model).items())
    assert function.count == 1


# -------------------------------------------------------------- contexts and settings


def test_settings_of_jax_are_part_of_the_key(mesh: flm.DeviceMesh) -> None:
    function = counted(lambda x: x @ x)
    step = flm.jit(function, layout_map=rules(mesh))
    first = step(X)
    with jax.default_matmul_precision("highest"):
        step(X)
    assert function.count == 2
    np.testing.assert_array_equal(step(X), first)
    assert function.count == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_of_no_arrays(kind: str) -> None:
    mesh = grid(kind)
    step = flm.jit(
        lambda: flm.distribute_tensor(jnp.ones((8, 8)), (None, "model")),
        layout_map=rules(mesh),
    )
    assert_lies(step(), COLUMN, mesh, np.ones((8, 8), np.float32))
    assert step.eval_shape().shape == (8, 8)
    step.lower()


@pytest.mark.parametrize("kind", KINDS)
def test_another_mesh_in_context(kind: str) -> None:
    mesh = grid(kind)
    layout_map = rules(mesh)
    model = flm.create(make, layout_map)
    function = counted(nudge)
    step = flm.jit(function, layout_map=layout_map)
    step(model, X)
    for types in ("explicit", "auto"):
        other = flm.DeviceMesh((8,), ("replica",), axis_types=types)
        with jax.set_mesh(bare(other)):
            for _ in range(2):
                step(model, X)
            step.lower(model, X)
    assert_model_lies(model, mesh)
    assert function.count == 3  # once for each context


# ----------------------------------------------------------------------- what is kept


def test_the_model_can_be_collected(mesh: flm.DeviceMesh) -> None:
    layout_map = rules(mesh)
    model = flm.create(make, layout_map)
    optimizer = flm.create_optimizer(model, optax.adam(1e-2), layout_map)
    step = flm.jit(train, layout_map=layout_map, donate_argnames=("model", "optimizer"))
    show = flm.jit(predict, layout_map=layout_map)
    x = jnp.asarray(X)
    for _ in range(2):
        step(model, optimizer, x, Y)
        show(model, x)
    watched = [
        weakref.ref(thing)
        for thing in (
            model,
            optimizer,
            model.up,
            model.up.kernel.get_value(),
            optimizer.opt_state[0].mu["up"]["kernel"].get_value(),
            x,
        )
    ]
    del model, optimizer, x
    gc.collect()
    assert [ref() is None for ref in watched] == [True] * len(watched)
    assert len(step._programs) == 1


# ---------------------------------------------------------------------------- errors


def test_a_map_without_devices(abstract_mesh: flm.DeviceMesh) -> None:
    for layout_map, have in (
        (flm.LayoutMap(), "no mesh"),
        (rules(abstract_mesh), "DeviceMesh('data=2,model=4', abstract)"),
    ):
        with refuses(
            flm.errors.MeshError,
            f"jit needs a mesh of devices, the rules have {have}; use "
            "layout_map.on(flm.DeviceMesh(...))",
        ):
            flm.jit(predict, layout_map=layout_map)(make(), X)


def test_abstract_arguments(mesh: flm.DeviceMesh) -> None:
    step = flm.jit(predict, layout_map=rules(mesh))
    tail = (
        " is abstract: a call needs arrays; make the model with flm.create(make, "
        "layout_map), or use .lower or .eval_shape"
    )
    model, x = nnx.eval_shape(make), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert step.eval_shape(model, x).shape == (8, 8)
    with refuses(flm.LayoutError, f"model/down/bias (8,){tail}"):
        step(model, X)
    with refuses(flm.LayoutError, f"x (8,8){tail}"):
        step(make(), x)


def test_shared_variables_are_refused(mesh: flm.DeviceMesh) -> None:
    layout_map = rules(mesh)
    model, other = (flm.create(make, layout_map) for _ in range(2))
    step = flm.jit(lambda a, b: (a(X) + b(X)).sum(), layout_map=layout_map)
    step(model, other)
    text = (
        "a/up/kernel and b/up/kernel are one Param: pass one object that holds both, "
        "so that they stay shared"
    )
    other.up.kernel = model.up.kernel  # a program is there already
    with refuses(flm.errors.StructureError, text):
        step(model, other)
    with pytest.raises(
        flm.errors.StructureError,
        match=r"p \(object 1\)/up/kernel and p \(object 2\)/up/kernel are one Param",
    ):
        flm.jit(lambda p: 0, layout_map=layout_map)([model, other])


# -------------------------------------------------------------------------- warnings


def test_warnings_come_once_and_point_at_the_caller(mesh: flm.DeviceMesh) -> None:
    layout_map = flm.LayoutMap(mesh)
    layout_map["kernle"] = ("model", None)
    layout_map.activations["upp"] = ("data", None)
    model = make()
    model.eval()
    step = flm.jit(predict, layout_map=layout_map)
    with pytest.warns(flm.LayoutWarning) as caught:
        step(model, X)
        line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    found = [w for w in caught if w.category is flm.LayoutWarning]
    assert {(w.filename, w.lineno) for w in found} == {(__file__, line)}
    texts = [str(w.message) for w in found]
    assert len(texts) == 2 and "kernle" in texts[1]
    assert texts[0] == (
        "activation rules that match the output of no module: 'upp'; did you mean 'up'?"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, X)
        step(model, X[:4])
        flm.jit(predict, layout_map=layout_map)(model, X)
