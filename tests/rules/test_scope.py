"""The ambient rule set and the default mesh: nested, restored, one per context."""

import contextvars
import threading
from typing import Any

import jax
import numpy as np
import pytest

import flax_layoutmap as flm
from flax_layoutmap._rules.scope import current_rules, using_rules

FIRST = flm.LayoutMap("data=8", strict=False).freeze()
SECOND = flm.LayoutMap("data=2,model=4", strict=False).freeze()


def test_there_is_none_outside() -> None:
    assert current_rules() is None


def test_scopes_nest_and_are_restored() -> None:
    with using_rules(FIRST):
        assert current_rules() is FIRST
        with using_rules(SECOND):
            assert current_rules() is SECOND
        assert current_rules() is FIRST
    assert current_rules() is None


def test_none_leaves_the_scope_as_it_is() -> None:
    with using_rules(FIRST), using_rules(None):
        assert current_rules() is FIRST


def test_an_error_restores_the_scope() -> None:
    with pytest.raises(RuntimeError, match="inside"), using_rules(FIRST):
        raise RuntimeError("inside")
    assert current_rules() is None


def test_another_thread_has_its_own() -> None:
    seen = []
    with using_rules(FIRST):
        thread = threading.Thread(target=lambda: seen.append(current_rules()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_a_copied_context_takes_the_scope_along() -> None:
    with using_rules(FIRST):
        context = contextvars.copy_context()
    assert current_rules() is None
    assert context.run(current_rules) is FIRST


# ----------------------------------------------------------------- the default mesh

ONE = flm.DeviceMesh((2, 4), ("data", "model"))
TWO = flm.DeviceMesh((8,), ("data",))


def mesh_of_ones() -> flm.DeviceMesh | None:
    layout = flm.dtensor.fetch_layout(flm.distribute_tensor(np.ones(8), ("data",)))
    return layout and layout.device_mesh


def test_there_is_no_default_mesh_outside() -> None:
    assert flm.dtensor.get_default_mesh() is None
    with pytest.raises(flm.errors.MeshError, match="flm.dtensor.default_mesh"):
        mesh_of_ones()


def test_default_meshes_nest_and_are_restored() -> None:
    with flm.dtensor.default_mesh(ONE) as made:
        assert made is ONE and flm.dtensor.get_default_mesh() is ONE
        with flm.dtensor.default_mesh(TWO.jax_mesh):
            assert flm.dtensor.get_default_mesh() == TWO
            assert mesh_of_ones() == TWO
        assert mesh_of_ones() == ONE
    assert flm.dtensor.get_default_mesh() is None


def test_a_default_mesh_is_restored_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="inside"), flm.dtensor.default_mesh(ONE):
        raise RuntimeError("inside")
    assert flm.dtensor.get_default_mesh() is None


def test_a_decorated_function() -> None:
    @flm.dtensor.default_mesh(ONE)
    def inside(depth: int) -> Any:
        assert flm.dtensor.get_default_mesh() is ONE
        return inside(depth - 1) if depth else mesh_of_ones()

    assert inside(2) == ONE and inside(0) == ONE
    assert flm.dtensor.get_default_mesh() is None


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
    def inside(x: Any) -> Any:
        with flm.dtensor.default_mesh(ONE):
            return flm.distribute_tensor(x, ("model",))

    assert inside(np.ones(8)).sharding.shard_shape((8,)) == (2,)


@pytest.mark.parametrize("mesh", [None, 3, ("data",)])
def test_what_is_no_mesh(mesh: Any) -> None:
    with pytest.raises(flm.errors.MeshError), flm.dtensor.default_mesh(mesh):
        raise AssertionError("not reached")
    assert flm.dtensor.get_default_mesh() is None
