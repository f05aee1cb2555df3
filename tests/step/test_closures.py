"""Modules and Variables that a step uses but does not take as arguments."""

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import flax_layoutmap as flm

pytestmark = pytest.mark.filterwarnings("ignore:.*has no rules")

X = np.ones((8, 8), np.float32)


def make() -> Any:
    return nnx.Linear(8, 8, rngs=nnx.Rngs(0))


REF, FACTOR, STATE = make(), nnx.Variable(np.float32(2)), nnx.state(make())
model = make()  # the name of many arguments, too
LISTED, BY_NAME = [make()], {"a": make()}
PACKAGE = types.ModuleType("package")
PACKAGE.net = make()  # type: ignore[attr-defined]


class Trainer:
    """An object of Python that has modules, and a step with another one."""

    __slots__ = ("__dict__", "teacher")

    def __init__(self) -> None:
        self.model, self.teacher, self.rate = make(), make(), 0.5

    def step(self, student: Any, x: Any) -> Any:
        return jax.vmap(lambda x: student(x) + self.teacher(x))(x)

    def train(self, model: Any, x: Any) -> Any:
        return model(x) * self.rate


def helper(x: Any) -> Any:
    return REF(x)


@jax.jit
def compiled(x: Any) -> Any:
    return REF(x)


def decorated(fun: Any) -> Any:
    @functools.wraps(fun)
    def call(*args: Any) -> Any:
        return fun(*args)

    return call


def in_a_closure(ref: Any) -> Any:
    return lambda model, x: ref(x)


def by_default(model: Any, x: Any, ref: Any = REF) -> Any:
    return ref(x)


def helped(model: Any, x: Any) -> Any:
    return helper(x)


USES: dict[str, tuple[Callable[..., Any], str]] = {
    "closure": (in_a_closure(make()), "ref"),
    "global": (lambda model, x: REF(x), "REF"),
    "part": (lambda model, x: x @ REF.kernel[...], "REF.kernel"),
    "default": (by_default, "ref"),
    "variable": (lambda model, x: x * float(FACTOR[...]), "FACTOR"),
    "state": (lambda model, x: x @ STATE["kernel"][...], "STATE"),
    "helper": (lambda model, x: helper(x), "REF"),
    "compiled": (lambda model, x: compiled(x), "REF"),
    "wrapped": (decorated(helped), "REF"),
    "list": (lambda model, x: LISTED[0](x), "LISTED[0]"),
    "dict": (lambda model, x: BY_NAME["a"](x), "BY_NAME['a']"),
    "a module of Python": (lambda model, x: PACKAGE.net(x), "PACKAGE.net"),
    "method": (Trainer().step, "self.teacher"),
    "method of a module": (make().__call__, "self"),
    "partial": (functools.partial(lambda ref, model, x: ref(x), make()), "args[0]"),
    "grad": (nnx.grad(lambda model, x: REF(x).sum()), "REF"),
    "nested": (lambda model, x: jax.vmap(lambda x: REF(x))(x), "REF"),
    "another jit": (flm.jit(lambda model, x: REF(x)), "REF"),
    "accumulate": (flm.accumulate(lambda model, x: REF(x).sum(), steps=1), "REF"),
}


@pytest.mark.parametrize("case", USES)
def test_what_is_used_is_named(case: str) -> None:
    fun, path = USES[case]
    step = flm.jit(fun)
    args = (X,) if case == "method of a module" else (make(), X)
    for call in (step, step.lower, step.eval_shape):
        with pytest.raises(flm.errors.StructureError) as caught:
            call(*args)
        assert f"uses {path}, but " in str(caught.value)
    if case == "part":
        assert str(caught.value) == (
            "<lambda> uses REF.kernel, but not as an argument: the current value would "
            "be compiled in as a constant. Pass REF to <lambda>."
        )
    if case == "method":
        assert str(caught.value).endswith("Pass self.teacher to step.")


def test_the_argument_itself_where_no_name_leads_to_it() -> None:
    """The arrays of arguments are recognised among the constants."""
    kept = make()
    hidden = types.SimpleNamespace(deep=types.SimpleNamespace(model=kept))
    step = flm.jit(lambda model, x: model(x) + hidden.deep.model(x))
    with pytest.raises(flm.errors.StructureError, match="model/kernel, model/bias, bu"):
        step(kept, X)


ALLOWED: dict[str, Callable[..., Any]] = {
    "settings": lambda model, x: model(x) * REF.in_features,
    "the same name": lambda state, x: types.SimpleNamespace(model=state).model(x),
    "of self": Trainer().train,
    "default, given": by_default,
    "made in the step": lambda model, x: make()(x) + nnx.Param(np.ones(8))[...],
    "closed over in the step": lambda model, x: jax.grad(lambda x: model(x).sum())(x),
    "a jit in it": lambda model, x: flm.jit(lambda x: model(x))(x),
    "no values": lambda model, x: nnx.Sequential()(model(x)),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_what_has_no_values_of_others_runs(case: str) -> None:
    args = (make(), X, make()) if case == "default, given" else (make(), X)
    expected = nnx.jit(ALLOWED[case])(*args)
    np.testing.assert_allclose(flm.jit(ALLOWED[case])(*args), expected, rtol=1e-6)
