"""The ambient rule set and the default mesh: nested, restored, one per context."""

import contextvars
import threading
from typing import Any

import jax
import numpy as np
import pytest

import flax_layoutmap as flm
from flax_layoutmap._rules.rules import current_rules, using_rules

FIRST = flm.LayoutMap("data=8", strict=False).freeze()
SECOND = flm.LayoutMap("data=2,model=4", strict=False).freeze()
ONE = flm.DeviceMesh((2, 4), ("data", "model"))
TWO = flm.DeviceMesh((8,), ("data",))


def mesh_of_ones() -> flm.DeviceMesh | None:
    layout = flm.dtensor.fetch_layout(flm.distribute_tensor(np.ones(8), ("data",)))
    return layout and layout.device_mesh


@pytest.mark.parametrize(
    ("block", "current", "first", "second"),
    [
        (using_rules, current_rules, FIRST, SECOND),
        (flm.dtensor.default_mesh, flm.dtensor.get_default_mesh, ONE, TWO),
    ],
    ids=["rules", "mesh"],
)
def test_blocks(block: Any, current: Any, first: Any, second: Any) -> None:
    """They nest, are restored, after an error too, and are those of one context."""
    assert current() is None
    seen = []
    with block(first):
        assert current() is first
        with block(second):
            assert current() is second
        assert current() is first
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
        context = contextvars.copy_context()
    assert current() is None and seen == [None]
    assert context.run(current) is first
    with pytest.raises(RuntimeError, match="inside"), block(first):
        raise RuntimeError("inside")
    assert current() is None


def test_none_leaves_the_rules_as_they_are() -> None:
    with using_rules(FIRST), using_rules(None):
        assert current_rules() is FIRST


def test_default_meshes() -> None:
    with pytest.raises(flm.errors.MeshError, match="flm.dtensor.default_mesh"):
        mesh_of_ones()
    with flm.dtensor.default_mesh(ONE) as made:
        assert made is ONE
        with flm.dtensor.default_mesh(TWO.jax_mesh):
            assert flm.dtensor.get_default_mesh() == mesh_of_ones() == TWO
        assert mesh_of_ones() == ONE


def test_what_wins_over_what() -> None:
    """An own mesh, then the rules of flm.jit, then the default, then JAX's."""
    x = np.ones(8)
    bare: Any = TWO.jax_mesh
    with jax.set_mesh(bare):
        assert mesh_of_ones() == TWO
        with flm.dtensor.default_mesh(ONE):
            assert mesh_of_ones() == ONE
            with using_rules(FIRST):
                assert mesh_of_ones() == FIRST.mesh
                own = flm.distribute_tensor(x, flm.TensorLayout(("data",), ONE))
                assert own.sharding.mesh == ONE.jax_mesh


def test_a_default_mesh_inside_jit() -> None:
    @jax.jit
    @flm.dtensor.default_mesh(ONE)
    def inside(x: Any) -> Any:
        return flm.distribute_tensor(x, ("model",))

    assert inside(np.ones(8)).sharding.shard_shape((8,)) == (2,)


@pytest.mark.parametrize("mesh", [None, 3, ("data",)])
def test_what_is_no_mesh(mesh: Any) -> None:
    with pytest.raises(flm.errors.MeshError), flm.dtensor.default_mesh(mesh):
        raise AssertionError("not reached")
    assert flm.dtensor.get_default_mesh() is None
