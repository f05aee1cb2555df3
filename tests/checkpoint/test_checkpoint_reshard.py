"""reshard: the same values in other chunks, and the recorded metadata."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from same import refused

import flax_layoutmap as flm


class Net(nnx.Module):
    def __init__(self) -> None:
        self.up = nnx.Linear(8, 32, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.1, rngs=nnx.Rngs(1))


def rules(mesh: str, axes: tuple[str | None, ...] = (None, "model")) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["kernel"] = axes
    return layout_map


def state() -> dict[str, Any]:
    model = Net()
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=4)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    return {"model": model, "optimizer": optimizer, "step": 12, "flag": True}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layout_map = rules("data=2,model=4")
    path = tmp_path_factory.mktemp("saved") / "3"
    flm.checkpoint.save(path, layout_map.place(state()), layout_map=layout_map)
    return path


def values(tree: Any) -> list[np.ndarray]:
    leaves = jax.tree.leaves(nnx.pure(nnx.state(tree["model"])))
    leaves += jax.tree.leaves(nnx.pure(nnx.state(tree["optimizer"])))
    return [
        np.asarray(
            jax.random.key_data(x)
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            else x
        )
        for x in leaves
    ]


def test_its_own_rules_on_another_mesh(saved: Path, tmp_path: Path) -> None:
    flm.checkpoint.reshard(
        saved, tmp_path / "new", mesh=flm.DeviceMesh("data=1,model=8")
    )
    before, after = (flm.checkpoint.inspect(path) for path in (saved, tmp_path / "new"))
    chunks = {leaf.path: leaf.chunk for leaf in after.leaves}
    assert chunks["model/up/kernel"] == (8, 4)
    assert [
        (leaf.path, leaf.shape, leaf.dtype, leaf.role) for leaf in before.leaves
    ] == [(leaf.path, leaf.shape, leaf.dtype, leaf.role) for leaf in after.leaves]
    assert after.mesh is not None and after.mesh.axis_sizes == {"data": 1, "model": 8}
    assert flm.checkpoint.verify(tmp_path / "new").leaves == len(before.leaves)
    layout_map = rules("data=4,model=2")
    restored, expected = (
        flm.checkpoint.restore(path, state, layout_map=layout_map)
        for path in (tmp_path / "new", saved)
    )
    assert (restored["step"], restored["flag"]) == (12, True)
    for one, other in zip(values(restored), values(expected), strict=True):
        np.testing.assert_array_equal(one, other)
    # Without a target, the new one knows the factored moments as the old one did.
    specs = {
        path: flm.checkpoint.resolve(path, layout_map=layout_map).specs
        for path in (saved, tmp_path / "new")
    }
    assert specs[saved] == specs[tmp_path / "new"]


def test_other_rules(saved: Path, tmp_path: Path) -> None:
    other = rules("data=2,model=4", ("data", None))
    flm.checkpoint.reshard(
        saved.parent, tmp_path / "new", layout_map=other, step="latest"
    )
    info = flm.checkpoint.inspect(tmp_path / "new")
    leaf = next(leaf for leaf in info.leaves if leaf.path == "model/up/kernel")
    assert (leaf.chunk, tuple(leaf.spec or ())) == ((4, 32), ("data",))


def test_a_part(saved: Path, tmp_path: Path) -> None:
    mesh = flm.DeviceMesh("data=2,model=4")
    flm.checkpoint.reshard(saved, tmp_path / "new", mesh=mesh, include="^model/up")
    info = flm.checkpoint.inspect(tmp_path / "new")
    assert [leaf.path for leaf in info.leaves] == ["model/up/bias", "model/up/kernel"]


def test_of_plain_orbax(tmp_path: Path) -> None:
    v1: Any = ocp.v1
    v1.save(tmp_path / "plain", {"kernel": np.ones((4, 8), np.float32)})
    layout_map = rules("data=2,model=4")
    flm.checkpoint.reshard(tmp_path / "plain", tmp_path / "new", layout_map=layout_map)
    assert flm.checkpoint.inspect(tmp_path / "new").leaves[0].chunk == (4, 2)


def test_what_the_user_noted_is_kept(tmp_path: Path) -> None:
    layout_map = rules("data=2,model=4")
    with flm.checkpoint.Checkpointer(tmp_path / "runs", layout_map=layout_map) as runs:
        runs.save(1, {"kernel": jnp.ones((4, 8))}, metadata={"loss": 0.5})
    flm.checkpoint.reshard(
        tmp_path / "runs", tmp_path / "new", layout_map=layout_map, step=1
    )
    old, new = (
        flm.checkpoint.inspect(path).metadata
        for path in (tmp_path / "runs", tmp_path / "new")
    )
    assert new == old and "0.5" in str(new)


def test_nothing_is_written_where_something_is_wrong(
    saved: Path, tmp_path: Path
) -> None:
    mesh = flm.DeviceMesh("data=2,model=4")
    with refused("the path exists"):
        flm.checkpoint.reshard(saved, tmp_path, mesh=mesh)
    with pytest.raises(flm.errors.MeshError, match="needs a mesh of devices"):
        abstract = flm.DeviceMesh.abstract("data=2,model=4")
        flm.checkpoint.reshard(saved, tmp_path / "new", mesh=abstract)
    import shutil

    shutil.copytree(saved, tmp_path / "damaged")
    file = tmp_path / "damaged" / "_CHECKPOINT_METADATA"
    data = json.loads(file.read_text())
    record = data["custom_metadata"]["flax_layoutmap"]
    del record["digest"]  # which older versions did not write
    sums = record["checksums"]
    sums["model/up/kernel"] = "0" * len(sums["model/up/kernel"])
    file.write_text(json.dumps(data))
    with refused("model/up/kernel"):
        flm.checkpoint.reshard(tmp_path / "damaged", tmp_path / "new", mesh=mesh)
    assert not (tmp_path / "new").exists()
