"""Traced constructors: abstract results, attributes, and contexts.

What is made of a trace is in tests/birth.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AbstractMesh, AxisType

import flax_layoutmap as flm
from flax_layoutmap._tree.trace import Traced, trace


def born(traced: Traced) -> Any:
    """Runs the program as a consumer does."""
    values = run(traced)
    made = len(traced.values_of(jax.tree.leaves(traced.abstract)))
    result = traced.rebuild(traced.leaves_of(values[:made]))
    traced.update_inputs(values[made:])
    return result


def run(traced: Traced) -> list[Any]:
    closed = traced.closed
    return jax.jit(partial(eval_jaxpr, closed.jaxpr, closed.consts))(*traced.inputs)


def test_one_object_given_twice_stays_one() -> None:
    def make(first: nnx.Rngs, options: dict[str, nnx.Rngs]) -> Any:
        assert first is options["again"]
        return nnx.Linear(2, 2, rngs=first), nnx.Linear(2, 2, rngs=options["again"])

    rngs = nnx.Rngs(0)
    first, second = born(trace(make, (rngs, {"again": rngs})))
    assert (np.asarray(first.kernel[...]) != np.asarray(second.kernel[...])).any()
    assert int(rngs.params.count[...] if "params" in rngs else rngs.default.count[...])


def test_inputs_may_be_left_as_they_are() -> None:
    rngs = nnx.Rngs(0)
    traced = trace(lambda r: nnx.Linear(2, 2, rngs=r), (rngs,), keep_inputs=False)
    born(traced)
    assert int(rngs.default.count[...]) == 0


def test_entries_for_the_computed_leaves() -> None:
    traced = trace(lambda: {"a": jnp.ones(1), "b": "text", "c": jnp.zeros(1)})
    assert traced.values_of(["first", "second", "third"]) == ["first", "third"]
    assert traced.leaves_of([1, 2]) == [1, "text", 2]


def test_an_abstract_result_stays_abstract() -> None:
    traced = trace(lambda: jax.eval_shape(lambda: {"w": jnp.ones(3)}))
    assert traced.abstract == {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}


# ------------------------------------------------------------------ attributes


class Kept(nnx.Module):
    """An attribute, made by a function of the module and one of its arrays."""

    def __init__(self, keep: Any) -> None:
        self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.attribute = keep(self, jnp.arange(3.0))

    def method(self) -> None: ...


@pytest.mark.parametrize("leak", [lambda x: {"a": [x]}, lambda x: (x, 1)])
def test_a_static_attribute_with_a_value_of_the_trace(leak: Any) -> None:
    with pytest.raises(
        flm.errors.StructureError, match=r"Kept\.attribute is a static .* with an array"
    ):
        trace(lambda: Kept(lambda module, x: leak(x)))


def test_a_live_value_of_a_surrounding_transformation() -> None:
    """It is no left-over: a constructor may close over it."""

    def loss(x: Any) -> Any:
        return born(trace(lambda: {"w": x * 3}))["w"].sum()

    np.testing.assert_array_equal(jax.grad(loss)(jnp.ones(3)), [3, 3, 3])
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(jnp.ones(3)), [3, 3, 3])
    np.testing.assert_array_equal(jax.vmap(loss)(jnp.ones((2, 3))), [9, 9])
    keys = jax.random.split(jax.random.key(0), 2)
    found = jax.vmap(lambda key: born(trace(lambda: jax.random.normal(key))))(keys)
    np.testing.assert_array_equal(found, jax.vmap(jax.random.normal)(keys))


OUTSIDE = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
HELD: dict[str, Any] = {
    "method": lambda module: (module.method, lambda held: held.__self__),
    "jit": lambda module: (jax.jit(lambda: module), lambda held: held.__wrapped__()),
    "variable": lambda module: (lambda: module.linear.kernel, lambda held: held()),
    "outside": lambda module: (OUTSIDE.__call__, lambda held: held.__self__),
}


@pytest.mark.parametrize("kind", HELD)
def test_what_holds_the_module_holds_what_is_made(kind: str) -> None:
    model = born(trace(lambda: Kept(lambda module, x: HELD[kind](module)[0])))
    _, open_ = HELD[kind](model)
    wanted = {"variable": model.linear.kernel, "outside": OUTSIDE}.get(kind, model)
    assert open_(model.attribute) is wanted
    assert not isinstance(model.linear.kernel[...], Tracer)


# ----------------------------------------------------------------- contexts


class Annotated(nnx.Module):
    """Written for a mesh whose axes nobody has."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        initializer = nnx.with_partitioning(
            nnx.initializers.lecun_normal(), ("nowhere", "never")
        )
        self.linear = nnx.Linear(4, 4, kernel_init=initializer, rngs=rngs)
        assert not jax.sharding.get_abstract_mesh().axis_names


def annotated() -> Annotated:
    return Annotated(nnx.Rngs(0))


def test_annotations_need_no_mesh() -> None:
    model = born(trace(annotated))
    metadata = model.linear.kernel.get_metadata()
    assert metadata["out_sharding"] == ("nowhere", "never")
    with nnx.use_eager_sharding(False):
        flag = annotated().linear.kernel.get_metadata()["eager_sharding"]
    assert flag is False and metadata["eager_sharding"] is True


def contexts() -> tuple[Any, bool]:
    return jax.sharding.get_abstract_mesh(), nnx.using_eager_sharding()


def test_a_constructor_that_raises_leaves_every_context_as_it_was() -> None:
    def broken() -> Any:
        nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        raise RuntimeError("out of ideas")

    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
    for context in (None, mesh):
        before = contexts()
        with jax.sharding.use_abstract_mesh(context or AbstractMesh((), ())):
            inside = contexts()
            with pytest.raises(RuntimeError, match="out of ideas"):
                trace(broken)
            assert contexts() == inside
        assert contexts() == before
    with nnx.use_eager_sharding(False):
        with pytest.raises(RuntimeError):
            trace(broken)
        assert not nnx.using_eager_sharding()
    assert nnx.using_eager_sharding()
    assert isinstance(born(trace(annotated)), Annotated)


# -------------------------------------------------------------------- refused


def test_an_object_from_outside_that_is_changed() -> None:
    rngs = nnx.Rngs(0)
    with pytest.raises(
        flm.errors.StructureError, match="pass it as an argument"
    ) as caught:
        trace(lambda: nnx.Linear(2, 2, rngs=rngs))
    assert caught.value.__cause__ is not None
    assert int(rngs.default.count[...]) == 0


@pytest.mark.skipif(
    ClosedJaxpr is Jaxpr,
    reason="From jax 0.11 on Flax asks tracers for their sharding at no cost.",
)
def test_tracers_have_no_sharding_while_a_constructor_is_traced() -> None:
    """Flax asks each of them; the answer is made short, and is the same otherwise."""
    before = vars(Tracer)["sharding"]

    def make() -> Any:
        x = jnp.ones(2)
        assert vars(Tracer)["sharding"] is not before
        with pytest.raises(AttributeError):
            _ = x.sharding
        return {"w": x, "none": jnp.full(1, getattr(x, "sharding", None) is None)}

    traced = trace(make)
    assert vars(Tracer)["sharding"] is before
    assert bool(born(traced)["none"])
