"""A checkpoint that an older version of the library saved restores as it was."""

import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from golden import make_checkpoint as then
from same import assert_placed, bits, by_path

import flax_layoutmap as flm


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("then") / "saved"
    zipfile.ZipFile(then.FILE).extractall(folder)
    return folder


def check_values(restored: dict[str, Any]) -> None:
    values = dict(restored)
    host = values.pop("numbers")
    assert {name: bits(value) for name, value in host.items()} == {
        name: bits(value) for name, value in then.numbers().items()
    }
    leaves = by_path(values)
    assert len(leaves) > 40
    for path, leaf in leaves.items():
        wanted = then.value_of(path, leaf)
        assert bits(leaf) == bits(wanted), path


def make_all() -> dict[str, Any]:
    return then.make() | {"numbers": then.numbers()}


@pytest.mark.parametrize("mesh", ["data=2,model=4", "data=4,model=2"])
def test_into_the_tree_of_today(saved: Path, mesh: str) -> None:
    layout_map = then.rules().on(flm.DeviceMesh(mesh))
    restored = flm.checkpoint.restore(saved, make_all(), layout_map=layout_map)
    check_values(restored)
    assert restored["model"].up.kernel.dtype == jnp.bfloat16
    assert_placed(restored, flm.resolve(restored, layout_map))


def test_by_its_own_rules_without_its_code(saved: Path) -> None:
    mesh = flm.DeviceMesh("data=4,model=2")
    restored = flm.checkpoint.restore(saved, mesh=mesh)
    check_values(restored)
    resolution = flm.checkpoint.resolve(saved, mesh=mesh)
    assert_placed(restored, resolution)
    live = flm.resolve(make_all(), then.rules().on(mesh))
    wanted = {leaf.path: (leaf.layout, leaf.reason) for leaf in live}
    assert {leaf.path: (leaf.layout, leaf.reason) for leaf in resolution} == wanted


def test_what_is_told_of_it(saved: Path) -> None:
    info = flm.checkpoint.inspect(saved)
    assert info.kind == "flax_layoutmap"
    assert info.mesh is not None
    assert info.mesh.axis_sizes == {"data": 2, "model": 4}
    leaves = {leaf.path: leaf for leaf in info.leaves}
    assert leaves["keys/three"].shape == (3,)
    assert leaves["arrays/empty"].shape == (0, 4)
    assert leaves["arrays/w"].spec == jax.sharding.PartitionSpec("data")
    assert leaves["optimizer/opt_state/0/mu/up/kernel"].role == "optimizer"
    verified = flm.checkpoint.verify(saved)
    assert verified == len(info.leaves) - 1  # the empty one is not stored
