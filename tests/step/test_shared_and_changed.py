"""Objects that arguments share, changes between equal calls, and donated state."""

import gc
import sys
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.errors import TraceContextError

import flax_layoutmap as flm


class Part(nnx.Module):
    """A layer that may share a module without Variables with others."""

    cache: Any

    def __init__(self, shared: Any = None, value: float = 1.0) -> None:
        self.shared = shared
        self.w = nnx.Param(jnp.full(8, value))
        self.count = nnx.Variable(jnp.zeros(()))
        self.on: dict[str, bool] = {}
        self.off = {"negative": True}

    def __call__(self) -> jax.Array:
        return -self.w[...] if self.on.get("negative") else self.w[...]


class Frozen(nnx.Param[Any]):
    pass


class Negative(Part):
    def __call__(self) -> jax.Array:
        return -self.w[...]


def three_parts() -> list[Part]:
    dropout = nnx.Dropout(0.5)
    return [Part(dropout, value) for value in (1.0, 2.0, 3.0)]


def test_results_are_the_callers_own_objects_where_arguments_share_one() -> None:
    a, b, c = three_parts()
    result = flm.jit(lambda a, b, c: {"b": b, "w": b.w})(a, b, c)
    assert result["b"] is b and result["w"] is b.w


def test_a_change_of_structure_where_arguments_share_an_object() -> None:
    a, b, c = three_parts()

    def step(a: Part, b: Part, c: Part) -> None:
        c.cache = nnx.Cache(c.w[...] * 10)
        b.shared, c.shared = nnx.Dropout(0.1), c

    dropout = a.shared
    flm.jit(step)(a, b, c)
    assert a.shared is dropout and b.shared is not dropout and c.shared is c
    np.testing.assert_array_equal(c.cache[...], np.full(8, 30))


def test_the_order_of_keys_and_the_class_of_a_variable() -> None:
    def step(part: Part) -> Any:
        return jnp.array([[*part.on] == ["b", "a"], type(part.w) is Frozen])

    part, jitted = Part(), flm.jit(step)
    part.on = {"a": True, "b": True}
    for _ in range(4):
        jitted(part)
    part.on["a"] = part.on.pop("a")
    assert jitted(part).tolist() == [True, False]
    for _ in range(4):
        jitted(part)
    object.__setattr__(part.w, "__class__", Frozen)
    assert jitted(part).tolist() == [True, True]


def test_a_key_that_moves_to_another_dict_and_another_class() -> None:
    part = Part()
    step = flm.jit(lambda part: part())
    for _ in range(4):
        step(part)
    part.on["negative"] = part.off.pop("negative")
    np.testing.assert_array_equal(step(part), -np.ones(8))
    part = Part()
    for _ in range(4):
        step(part)
    part.__class__ = Negative
    np.testing.assert_array_equal(step(part), -np.ones(8))


@pytest.mark.parametrize("calls", [0, 4], ids=["new", "recognised"])
def test_state_is_kept_where_it_cannot_be_written(calls: int) -> None:
    """The program would donate it, and then fail to write."""

    def step(part: Part, x: jax.Array) -> jax.Array:
        part.count[...] += 1
        return (part.w[...] * x).sum()

    part, x = Part(), jnp.ones(8)
    jitted = flm.jit(step, donate_argnames="part")
    for _ in range(calls):
        jitted(part, x)
    with pytest.raises(TraceContextError):
        jax.grad(lambda x: jitted(part, x))(x)
    assert part.count[...] == calls


def test_replaced_variables_are_not_kept_alive() -> None:
    step = flm.jit(lambda part: part.w[...] + part.cache[...])
    part, caches = Part(), []
    for _ in range(20):
        part.cache = nnx.Cache(jnp.zeros(8))
        caches.append(weakref.ref(part.cache[...]))
        for _ in range(3):
            step(part)
    gc.collect()
    assert sum(cache() is not None for cache in caches) <= 2


@pytest.mark.parametrize("calls", [0, 4], ids=["new", "recognised"])
def test_donated_state_that_shares_memory_with_data(calls: int) -> None:
    """Also state that a step has written."""

    def grow(part: Part, state: Any, x: Any) -> Any:
        part.w[...] += 1
        return {"key": state["key"] + 1}, jax.tree.map(lambda x: x * 2, x)

    layout_map = flm.LayoutMap("data=2,model=4", strict=False)
    other = flm.DeviceMesh("a=2,b=4")  # the same devices, so the same memory
    key = jax.random.PRNGKey(0)
    part, state = layout_map.place((Part(), {"key": jnp.copy(key)}))
    names = "part", "state"
    step = flm.jit(grow, layout_map=layout_map, donate_argnames=names)
    for _ in range(calls):
        state, _ = step(part, state, {"w": jnp.ones(8), "key": jnp.copy(key)})
    for count in range(calls, calls + 3):
        given = {"w": part.w[...], "key": state["key"]}
        data = flm.distribute_tensor(given, flm.TensorLayout((), other))
        state, twice = step(part, state, data)
        np.testing.assert_array_equal(state["key"], np.asarray(key) + count + 1)
        np.testing.assert_array_equal(twice["key"], (np.asarray(key) + count) * 2)
        np.testing.assert_array_equal(twice["w"], np.full(8, 2.0 * (count + 1)))
        np.testing.assert_array_equal(part.w[...], np.full(8, count + 2.0))


def test_state_that_shares_memory_and_is_donated_later() -> None:
    """In a step that changes neither part of it, it is not donated."""

    def both(part: Part, other: Part) -> None:
        part.w[...] += 1
        other.w[...] += 2

    def neither(part: Part, other: Part) -> None:
        part.count[...] += 1

    layout_map = flm.LayoutMap("data=2,model=4", strict=False)
    part, other = layout_map.place((Part(), Part()))
    whole = flm.TensorLayout((), flm.DeviceMesh("a=2,b=4"))
    other.w.set_raw_value(flm.distribute_tensor(part.w[...], whole))
    for step in (neither, neither, both):
        flm.jit(step, layout_map=layout_map, donate_argnames=("part", "other"))(
            part, other
        )
    np.testing.assert_array_equal(part.w[...], np.full(8, 2.0))
    np.testing.assert_array_equal(other.w[...], np.full(8, 3.0))


@pytest.mark.parametrize("is_known", [False, True], ids=["new", "recognised"])
def test_ctrl_c_at_any_line(is_known: bool) -> None:
    """A step has changed all of its state, or nothing, also where it is donated."""

    def step(part: Part, x: Any) -> None:
        part.w[...] += x
        part.count[...] += 1

    part, jitted, lines = Part(), flm.jit(step, donate_argnames="part"), iter(())

    def trace(frame: Any, event: str, _: Any) -> Any:
        if "flax_layoutmap/_step" not in frame.f_code.co_filename:
            return None
        if event == "line" and next(lines, None) is None:
            raise KeyboardInterrupt
        return trace

    for _ in range(4):
        jitted(part, 1.0)
    number = 0
    for number in range(1, 1000, 1 if is_known else 5):
        if not is_known:
            part.off = {"negative": True}
        lines = iter(range(number))
        try:
            sys.settrace(trace)
            jitted(part, 1.0)
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        np.testing.assert_array_equal(part.w[...], np.full(8, 1.0 + part.count[...]))
    assert 20 < number < 999


def test_deleted_data_is_named_in_every_call() -> None:
    step = flm.jit(lambda part, x: part.w[...] * x)
    part, x = Part(), jnp.ones(8)
    for _ in range(4):
        step(part, x)
    x.delete()
    with pytest.raises(flm.LayoutError, match=r"^.*x"):
        step(part, x)


def test_a_second_trace_that_does_something_else() -> None:
    makes = [True]

    def step(part: Part) -> None:
        part.cache = nnx.Cache(part.w[...]) if makes else None

    jitted = flm.jit(step)
    jitted(Part())
    makes.clear()
    jitted(Part())
    jax.clear_caches()
    with pytest.raises(flm.LayoutError, match="^step was traced again, and changed"):
        jitted(Part())


def test_arrays_in_a_tuple_that_were_never_placed() -> None:
    def step(part: Any) -> Any:
        part.cache = nnx.Cache(part.w[...] * part.pair[0] + part.pair[1][...])
        part.count[...] += 1
        return part.cache[...].sum()

    part: Any = Part()
    part.pair = nnx.data((jnp.full(8, 2.0), nnx.Param(jnp.ones(8))))
    layout_map = flm.LayoutMap("data=8", strict=False)
    jitted = flm.jit(step, layout_map=layout_map, donate_argnames="part")
    assert [float(jitted(part)) for _ in range(4)] == [24.0] * 4
    assert part.count[...] == 4
