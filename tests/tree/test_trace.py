"""Traced constructors: abstract results, programs, and contexts."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AbstractMesh, AxisType

import flax_layoutmap as flm
from flax_layoutmap._tree.trace import Traced, trace


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, size: int = 4) -> None:
        self.embed = nnx.Embed(3, size, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(size, size, rngs=rngs) for _ in range(2)])
        self.head = self.embed  # tied
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


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


def leaves(tree: Any) -> list[np.ndarray]:
    return [
        np.asarray(
            jax.random.key_data(leaf)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf
        )
        for leaf in jax.tree.leaves(tree)
    ]


def same_values(first: Any, second: Any) -> None:
    for one, other in zip(leaves(first), leaves(second), strict=True):
        np.testing.assert_array_equal(one, other)


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


def test_a_table_that_is_closed_over_is_an_input_of_the_program() -> None:
    table = jnp.arange(1000.0)
    traced = trace(lambda: {"w": table * 2})
    assert any(const is table for const in traced.closed.consts)
    np.testing.assert_array_equal(born(traced)["w"], np.arange(1000.0) * 2)


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


@dataclasses.dataclass
class Config:
    value: Any


class Plain:
    """Of no kind that JAX or Flax knows."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Slots:
    __slots__ = ("empty", "value")

    def __init__(self, value: Any) -> None:
        self.value = value


def nested(x: Any) -> Any:
    def inner() -> Any:
        return x

    return lambda: inner()


def looped(x: Any) -> Any:
    first, second = Plain(x), Plain(x)
    first.value = second, x
    second.value = first
    return first


@pytest.mark.parametrize("graph", [nnx.List, lambda x: nnx.Dict(a=x[0])])
def test_arrays_as_attributes_are_leaves(graph: Any) -> None:
    def make() -> Any:
        return Kept(lambda module, x: graph([x]))

    eager, traced = make(), trace(make)
    model = born(traced)
    assert nnx.graphdef(model) == nnx.graphdef(eager)
    same_values(nnx.state(model), nnx.state(eager))
    assert len(jax.tree.leaves(traced.abstract)) == 3


LEAKS: dict[str, Any] = {
    "dict": lambda module, x: {"a": [x]},
    "tuple": lambda module, x: (x, 1),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_a_static_attribute_with_a_value_of_the_trace(leak: str) -> None:
    with pytest.raises(
        flm.errors.StructureError, match=r"Kept\.attribute is a static .* with an array"
    ):
        trace(lambda: Kept(LEAKS[leak]))


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


def is_variable(part: Any) -> bool:
    return isinstance(part, nnx.Variable)


def parts_of(value: Any) -> list[Any]:
    """What a function, or a plain object, holds; and what that holds."""
    cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    own = [*cells, *getattr(value, "__dict__", {}).values()]
    return own + [part for function in cells for part in parts_of(function)]


OF_THE_MODULE: dict[str, Any] = {
    "method": lambda module, x: module.method,
    "closure": lambda module, x: lambda: module.linear,
    "jit": lambda module, x: jax.jit(nested(module)),
    "config": lambda module, x: Config(lambda: module),
    "object": lambda module, x: Plain(module),
    "variable": lambda module, x: nested(module.linear.kernel),
    "variable in an object": lambda module, x: Plain(module.linear.kernel),
}


@pytest.mark.parametrize("kind", OF_THE_MODULE)
def test_what_holds_the_module_holds_what_is_made(kind: str) -> None:
    kept: list[Any] = []

    def keep(module: Any, x: Any) -> Any:
        kept.append(module)
        return OF_THE_MODULE[kind](module, x)

    model = born(trace(lambda: Kept(keep)))
    assert kept[0] is model
    variables = list(filter(is_variable, parts_of(model.attribute)))
    assert all(variable is model.linear.kernel for variable in variables)
    assert len(variables) == kind.startswith("variable")
    assert not isinstance(model.linear.kernel[...], Tracer)


OUTSIDE = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
TABLE = jnp.ones(2)
HARMLESS: dict[str, Any] = {
    "function": nnx.relu,
    "class": Kept,
    "outside": OUTSIDE.__call__,
    "outside, in a closure": nested((OUTSIDE, OUTSIDE.kernel, TABLE)),
    "config": Config(print),
    "object": looped(TABLE),
    "slots": Slots(np.ones(2)),
    "optax": optax.chain(optax.clip(1.0), optax.adam(optax.constant_schedule(1.0))),
    "linen": nn.Dense(2),
}


@pytest.mark.parametrize("kind", HARMLESS)
def test_what_does_not(kind: str) -> None:
    model = born(trace(lambda: Kept(lambda module, x: HARMLESS[kind])))
    assert model.attribute == HARMLESS[kind]


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


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_mesh_in_context_is_not_seen(kind: AxisType) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        traced = trace(annotated)
        assert jax.sharding.get_abstract_mesh().axis_names == ("data", "model")
    kernel = traced.abstract["linear"]["kernel"].get_value()
    assert kernel.shape == (4, 4)


def test_inside_of_jit_and_eval_shape() -> None:
    seen: list[Any] = []

    def inside(x: jax.Array) -> jax.Array:
        traced = trace(annotated)
        seen.append(traced.abstract["linear"]["kernel"].get_value().shape)
        made = run(traced)
        return x + sum(leaf.sum() for leaf in made if leaf.dtype == jnp.float32)

    jax.eval_shape(inside, jnp.ones(()))
    total = jax.jit(inside)(jnp.zeros(()))
    assert set(seen) == {(4, 4)}
    model = born(trace(annotated))
    np.testing.assert_allclose(total, model.linear.kernel[...].sum(), rtol=1e-5)


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
