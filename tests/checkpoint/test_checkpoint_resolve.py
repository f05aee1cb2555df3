"""Resolve the leaves of a checkpoint without the code of its model."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from same import refused

import flax_layoutmap as flm

ABSTRACT = flm.DeviceMesh.abstract("data=2,model=8")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layout_map = flm.LayoutMap("data=2,model=4", strict=False)
    layout_map["kernel"] = (None, "model")
    model = flm.create(lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0)), layout_map)
    optimizer = flm.create_optimizer(model, optax.adam(1e-3), layout_map, wrt=nnx.Param)
    path = tmp_path_factory.mktemp("saved") / "3"
    tree = {"model": model, "optimizer": optimizer}
    flm.checkpoint.save(path, tree, layout_map=layout_map)
    return path


def test_on_the_mesh_that_it_was_saved_on(saved: Path) -> None:
    found = flm.checkpoint.resolve(saved.parent)  # its latest step
    assert found.mesh is not None and found.mesh.is_abstract
    assert found.mesh.axis_sizes == {"data": 2, "model": 4}
    assert found["model/kernel"].shard_shape == (8, 4)
    rules = flm.LayoutMap(strict=False)
    rules["kernel"] = ("data", None)
    found = flm.checkpoint.resolve(saved, layout_map=rules)
    assert found["model/kernel"].shard_shape == (4, 16)


def test_what_does_not_fit_is_listed(saved: Path) -> None:
    rules = flm.LayoutMap(flm.DeviceMesh.abstract("data=3"))
    rules["kernel|bias"] = ("data",)
    with pytest.raises(flm.errors.ResolveError, match="2 leaves do not fit the rules"):
        flm.checkpoint.resolve(saved, layout_map=rules)


def test_without_rules(tmp_path: Path) -> None:
    v1: Any = ocp.v1
    v1.save(tmp_path / "plain", {"w": np.ones((4, 4), np.float32)})
    with refused("saved without rules; pass layout_map"):
        flm.checkpoint.resolve(tmp_path / "plain")
    rules = flm.LayoutMap()
    rules["w"] = ("data", None)
    with refused("saved without a mesh; pass mesh="):
        flm.checkpoint.resolve(tmp_path / "plain", layout_map=rules)
    found = flm.checkpoint.resolve(
        tmp_path / "plain", layout_map=rules, mesh=flm.DeviceMesh.abstract("data=4")
    )
    assert found["w"].shard_shape == (1, 4)
    assert jnp.dtype(found["w"].dtype) == jnp.float32


def test_under_other_names(saved: Path) -> None:
    found = flm.checkpoint.resolve(saved, mesh=ABSTRACT, rename={"^model/": "net/"})
    assert found["net/kernel"].shard_shape == (8, 2)
    assert found["optimizer/opt_state/0/mu/kernel"].shard_shape == (8, 2)


def test_arguments_that_do_not_exist() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'itme'"):
        flm.checkpoint.plan("a", itme="x")  # pyright: ignore
