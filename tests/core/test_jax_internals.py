"""Private or moved names of JAX: each still behaves as expected."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_layoutmap._core import jax_internals as internals


def test_jaxprs_are_opened_with_their_constants() -> None:
    table = jnp.arange(8.0)

    @jax.jit
    def inner(x: Any) -> Any:
        return x + table

    jaxpr = jax.make_jaxpr(lambda x: jax.checkpoint(inner)(x))(table)
    (outer,) = jaxpr.eqns
    found = internals.opened(outer.params["jaxpr"])
    assert found is not None and len(found[0].constvars) == len(found[1])
    opened = internals.opened(jaxpr)
    assert opened is not None and opened[0].eqns == jaxpr.eqns
    assert len(opened[0].constvars) == len(opened[1]) == len(jaxpr.consts)
    assert internals.opened(outer) is None


def test_tracers_of_differentiation_hold_an_array() -> None:
    seen: list[Any] = []

    def loss(x: Any) -> Any:
        seen.append(internals.concrete_value(x))
        return x * 2

    jax.grad(loss)(3.0)
    jax.jit(loss)(3.0)
    assert float(seen[0]) == 3 and seen[1] is None


def test_executables_are_counted() -> None:
    double = jax.jit(lambda x: x * 2)
    for x in (np.ones(2), np.zeros(2), np.ones(3)):
        double(x)
    assert internals.executables_of(double) == 2


def test_arrays_that_share_memory_are_told() -> None:
    x = jax.device_put(np.ones(8), jax.devices()[0])
    same = jax.device_put(x, jax.devices()[0], may_alias=True)
    assert internals.memory_of(x) == internals.memory_of(same) is not None
    assert internals.memory_of(x) != internals.memory_of(x + 1)


def test_the_error_of_ambiguous_layouts_has_its_name() -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = jax.device_put(jnp.ones((8, 8)), jax.NamedSharding(mesh, jax.P(None, "x")))
    with jax.set_mesh(mesh), pytest.raises(Exception, match="out_sharding") as caught:
        jax.jit(lambda x: x @ x.T)(x)
    assert internals.is_sharding_type_error(caught.value)
    assert not internals.is_sharding_type_error(ValueError())


def test_values_of_a_loop_are_told() -> None:
    found: list[bool] = []

    def body(carry: Any, _: Any = None) -> Any:
        found.append(internals.is_in_a_loop(carry))
        return carry

    def in_loops(x: Any) -> Any:
        found.append(internals.is_in_a_loop(x))
        x = jax.lax.scan(lambda c, _: (body(c), None), x, None, length=2)[0]
        x = jax.lax.fori_loop(0, 2, lambda _, c: body(c), x)
        return jax.lax.while_loop(lambda c: body(c) < 3, jax.jit(body), x)

    jax.make_jaxpr(in_loops)(1.0)
    assert found[0] is False and len(found) >= 5 and all(found[1:])
    assert not internals.is_in_a_loop(jnp.ones(2))


@pytest.mark.parametrize("name", ["run", "stop"])
def test_a_patch_may_end_while_another_begins_or_ends(name: str) -> None:
    """As the garbage collector ends blocks that an interrupt abandoned."""

    class Restores(type):
        def __setattr__(cls, key: str, value: Any) -> None:
            while abandoned:
                abandoned.pop().close()
            super().__setattr__(key, value)

    class Owner(metaclass=Restores):
        def run(self) -> str:
            return "run"

        def stop(self) -> str:
            return "stop"

    def block() -> Iterator[None]:
        with internals.patched(Owner, name, lambda plain: lambda self: "abandoned"):
            yield

    abandoned: list[Any] = []
    plain, first = dict(vars(Owner)), block()
    next(first)
    abandoned.append(first)
    with internals.patched(Owner, "run", lambda plain: lambda self: "wrapped"):
        assert Owner().run() == "wrapped" and Owner().stop() == "stop"
    assert dict(vars(Owner)) == plain and not internals._PATCHED
