"""Modules that a step reads but does not take as arguments."""

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_layoutmap as flm

pytestmark = pytest.mark.filterwarnings("ignore:.*has no rules")

X = np.ones((8, 8), np.float32)


def make() -> Any:
    return nnx.Linear(8, 8, rngs=nnx.Rngs(0))


REF = make()
DROPOUT = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
AVERAGE = nnx.metrics.Average()
SETTINGS = types.SimpleNamespace(refs=[make()], by_name={"a": make()})
PACKAGE = types.ModuleType("package")
PACKAGE.net = make()  # type: ignore[attr-defined]


def rules(mesh: Any) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["kernel"] = (None, "model")
    return layout_map


@pytest.fixture(params=[True, False], ids=["rules", "no rules"])
def layout_map(request: pytest.FixtureRequest, mesh: flm.DeviceMesh) -> Any:
    return rules(mesh) if request.param else None


class Trainer:
    """An object of Python whose step uses a module that it has."""

    def __init__(self) -> None:
        self.model = make()

    @property
    def hidden(self) -> Any:
        return self.model

    def step(self, model: Any, x: Any) -> Any:
        return model(x) + self.model(x)


TRAINER = Trainer()


def through_a_helper(model: Any, x: Any) -> Any:
    return helper(x)


def helper(x: Any) -> Any:
    return REF(x)


@jax.jit
def compiled_before(x: Any) -> Any:
    return REF(x)


KERNEL_AND_BIAS = ("bias (8,)", "kernel (8,8)")


def in_a_closure(ref: Any) -> Any:
    return lambda model, x: ref(x)


def by_default(model: Any, x: Any, ref: Any = REF) -> Any:
    return model(x)


READS: dict[str, tuple[Callable[..., Any], str]] = {
    "closure": (in_a_closure(make()), "ref"),
    "global": (lambda model, x: REF(x), "REF"),
    "helper": (through_a_helper, "REF"),
    "compiled before": (lambda model, x: compiled_before(x), "REF"),
    "list": (lambda model, x: SETTINGS.refs[0](x), "SETTINGS.refs[0]"),
    "dict": (lambda model, x: SETTINGS.by_name["a"](x), "SETTINGS.by_name['a']"),
    "a module of Python": (lambda model, x: PACKAGE.net(x), "PACKAGE.net"),
    "method": (TRAINER.step, "self.model"),
    "property": (lambda model, x: TRAINER.hidden(x), "TRAINER.model"),
    "partial": (functools.partial(lambda ref, model, x: ref(x), make()), "args[0]"),
    "in grad": (lambda model, x: jax.grad(lambda x: REF(x).sum())(x), "REF"),
    "in vmap": (lambda model, x: jax.vmap(lambda x: REF(x))(x), "REF"),
    "in jit": (lambda model, x: jax.jit(lambda x: REF(x))(x), "REF"),
    "in scan": (
        lambda model, x: jax.lax.scan(lambda x, _: (REF(x), 0), x, length=2)[0],
        "REF",
    ),
    "in remat": (lambda model, x: nnx.remat(lambda x: REF(x))(x), "REF"),
    "returned": (lambda model, x: nnx.state(REF), "REF"),
}


def message(name: str, verb: str, what: str, owner: str) -> str:
    return (
        f"{name} {verb} {what} outside of its arguments: compiled, it would go on with "
        f"the values that are there now; pass {owner} as an argument of {name} and use "
        "that"
    )


@pytest.mark.parametrize("case", READS)
def test_what_is_read_is_told_by_path(case: str, layout_map: Any) -> None:
    fun, owner = READS[case]
    before = compiled_before(X)
    step = flm.jit(fun, layout_map=layout_map)
    for call in (step, step.lower, step.eval_shape):
        with pytest.raises(flm.errors.StructureError) as caught:
            call(make(), X)
        name = getattr(fun, "__name__", "a_function")
        both = f"{owner}/bias (8,), {owner}/kernel (8,8)"
        assert str(caught.value) == message(name, "reads", both, owner)
    # Nothing of the trace stays in what JAX keeps.
    np.testing.assert_array_equal(compiled_before(X), before)
    np.testing.assert_array_equal(compiled_before(X + 0), REF(X))


def test_the_argument_itself_in_a_closure(layout_map: Any) -> None:
    """As after a typing error: the step would not see its own updates."""
    model = make()
    with pytest.raises(
        flm.errors.StructureError, match=r"reads model/bias \(8,\), model/ker"
    ):
        flm.jit(lambda m, x: model(x), layout_map=layout_map)(model, X)


def differentiates(model: Any, x: Any) -> Any:
    return nnx.grad(lambda ref: ref(x).sum())(REF)


def test_a_gradient(layout_map: Any) -> None:
    """Flax's own error has all the values of the Param."""
    with pytest.raises(flm.errors.StructureError) as caught:
        flm.jit(differentiates, layout_map=layout_map)(make(), X)
    assert str(caught.value) == message(
        "differentiates", "differentiates", "REF/bias (8,)", "REF"
    )
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def averages(model: Any, x: Any) -> None:
    AVERAGE.update(values=x)


def drops(model: Any, x: Any) -> Any:
    return DROPOUT(x)


def writes(model: Any, x: Any) -> None:
    REF.bias.set_value(x[0])


@pytest.mark.parametrize(
    ("fun", "what", "owner"),
    [
        (averages, "AVERAGE/total ()", "AVERAGE"),
        (drops, "DROPOUT/rngs/count ()", "DROPOUT"),
        (writes, "REF/bias (8,)", "REF"),
    ],
)
def test_what_is_changed(fun: Any, what: str, owner: str, layout_map: Any) -> None:
    with pytest.raises(flm.errors.StructureError) as caught:
        flm.jit(fun, layout_map=layout_map)(make(), X)
    assert str(caught.value) == message(fun.__name__, "changes", what, owner)


def test_numbers_of_numpy(layout_map: Any) -> None:
    """They would be constants too, and no trace would show it."""
    factor = nnx.Variable(np.float32(2))
    for fun in (
        lambda model, x: x * np.asarray(factor[...]),
        lambda model, x: x * float(factor[...]),
        lambda model, x: x if factor[...] > 1 else -x,
    ):
        with pytest.raises(
            flm.errors.StructureError, match=r"reads factor \(\) outside"
        ):
            flm.jit(fun, layout_map=layout_map)(make(), X)


def test_behind_a_constant_of_an_argument(layout_map: Any) -> None:
    class Holder(nnx.Module):
        def __init__(self) -> None:
            self.settings = types.SimpleNamespace(ref=make())

    step = flm.jit(lambda model, x: model.settings.ref(x), layout_map=layout_map)
    with pytest.raises(flm.errors.StructureError, match="model.settings.ref/bias"):
        step(Holder(), X)


def test_a_state_in_a_closure(layout_map: Any) -> None:
    state: Any = nnx.state(make())
    step = flm.jit(lambda x: x @ state["kernel"][...], layout_map=layout_map)
    with pytest.raises(flm.errors.StructureError) as caught:
        step(X)
    assert str(caught.value) == message(
        "<lambda>", "reads", "state/kernel (8,8)", "state"
    )


def test_many_modules_in_a_closure(layout_map: Any) -> None:
    """The text stays short."""
    nets = [make() for _ in range(6)]
    step = flm.jit(lambda x: sum(net(x) for net in nets), layout_map=layout_map)
    with pytest.raises(flm.errors.StructureError) as caught:
        step(X)
    four = ", ".join(f"nets[{at}]/{name}" for at in (0, 1) for name in KERNEL_AND_BIAS)
    owners = "nets[0], nets[1], nets[2], nets[3] and 2 more"
    assert str(caught.value) == message(
        "<lambda>", "reads", f"{four} and 8 more", owners
    )


def test_one_that_no_name_leads_to(layout_map: Any) -> None:
    kept = iter([make()])
    with pytest.raises(
        flm.errors.StructureError, match=r"reads a Param \(8,\), a Param \(8,"
    ):
        flm.jit(lambda model, x: next(kept)(x), layout_map=layout_map)(make(), X)


def test_a_jit_in_another_one(mesh: flm.DeviceMesh) -> None:
    inner = flm.jit(lambda x: REF(x), layout_map=rules(mesh))
    for outer in (flm.jit(lambda x: inner(x)), jax.jit(lambda x: inner(x))):
        with pytest.raises(flm.errors.StructureError, match="REF/kernel"):
            outer(X)
    np.testing.assert_array_equal(flm.jit(lambda m, x: inner_ok(m, x))(REF, X), REF(X))


def inner_ok(model: Any, x: Any) -> Any:
    return flm.jit(lambda model, x: model(x))(model, x)


SHAPES: dict[str, Callable[..., Any]] = {
    "shape": lambda model, x: model(x) * REF.kernel.shape[0] * REF.in_features,
    "dtype": lambda model, x: model(x).astype(REF.kernel.dtype),
    "type": lambda model, x: model(x) * isinstance(REF.kernel, nnx.Param),
    "text": lambda model, x: model(x) * bool(str(REF)),
    "split": lambda model, x: model(x) * len(nnx.split(REF)),
    "default": by_default,
    "made in the step": lambda model, x: make()(x) + nnx.Param(np.ones(8))[...],
    "closed over in the step": lambda model, x: jax.grad(lambda x: model(x).sum())(x),
}


@pytest.mark.parametrize("case", SHAPES)
def test_what_is_mentioned_is_not_refused(case: str, layout_map: Any) -> None:
    step, model = flm.jit(SHAPES[case], layout_map=layout_map), make()
    rules(flm.DeviceMesh("data=2,model=4")).place(model)
    expected = nnx.jit(SHAPES[case])(model, X)
    for _ in range(3):
        np.testing.assert_allclose(step(model, X), expected, rtol=1e-6)
    # What is not computed with is not in the program.
    assert "constant dense" not in step.lower(model, X).as_text().split("@main")[0]


def test_arrays_in_a_closure_are_constants(layout_map: Any) -> None:
    """An array does not change: also one that the model holds."""
    model = make()
    start = model.kernel[...]
    step = flm.jit(lambda model, x: x @ (model.kernel - start), layout_map=layout_map)
    assert float(jnp.abs(step(model, X)).sum()) == 0
    model.kernel.set_value(start + 1)
    np.testing.assert_allclose(step(model, X), 8, rtol=1e-6)


def test_an_error_of_the_step_stays_what_it_is(layout_map: Any) -> None:
    def branches(model: Any, x: Any) -> Any:
        return x if x.sum() > REF.kernel.shape[0] else -x

    with pytest.raises(jax.errors.TracerBoolConversionError):
        flm.jit(branches, layout_map=layout_map)(make(), X)


def test_without_jit_it_runs(layout_map: Any) -> None:
    with jax.disable_jit():
        result = flm.jit(lambda model, x: REF(x), layout_map=layout_map)(make(), X)
    np.testing.assert_array_equal(result, REF(X))


def test_other_threads_read_values(layout_map: Any) -> None:
    found: list[Any] = []

    def step(model: Any, x: Any) -> Any:
        thread = threading.Thread(target=lambda: found.append(REF.kernel[...]))
        thread.start()
        thread.join()
        return model(x)

    flm.jit(step, layout_map=layout_map)(make(), X)
    assert found[0] is REF.kernel.get_raw_value()
    assert isinstance(vars(nnx.Variable)["_raw_value"], types.MemberDescriptorType)
