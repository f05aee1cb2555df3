"""`flm.testing.assert_covers`: rules fit a model on every mesh, and cover it."""

from typing import Any

import jax
import pytest
from flax import nnx

import flax_layoutmap as flm

RULES = {"up/kernel": (None, "model"), "down/kernel": ("model", None)}


def kernel(*shape: int) -> dict[str, Any]:
    return {"kernel": jax.ShapeDtypeStruct(shape, "float32")}


def layers(count: int = 3) -> dict[str, Any]:
    layer = {"up": kernel(64, 256), "down": kernel(256, 64)}
    return {f"layers_{at}": layer for at in range(count)}


def problems(tree: Any, rules: Any, *meshes: str) -> list[str]:
    """The lines of the error."""
    with pytest.raises(AssertionError) as caught:
        flm.testing.assert_covers(tree, flm.LayoutMap.from_rules(rules), meshes)
    return str(caught.value).splitlines()


def test_rules_that_cover_a_model(mesh: flm.DeviceMesh) -> None:
    def make() -> nnx.Module:
        return nnx.List([nnx.Linear(64, 256, use_bias=False, rngs=nnx.Rngs(0))])

    layout_map = flm.LayoutMap.from_rules({"kernel": (None, "model")})
    meshes = ["data=16,model=16", {"data": 2, "model": 4}, mesh, mesh.jax_mesh]
    flm.testing.assert_covers(make, layout_map, meshes)
    flm.testing.assert_covers(make, layout_map, "data=1,model=2")


def test_all_that_is_wrong_is_listed_by_mesh() -> None:
    rules = RULES | {"zzz": None}
    meshes = ("data=2,model=4", "data=2,model=3", "data=2,tensor=4")
    first, *lines = problems(layers(), rules, *meshes)
    assert first == "the layout does not cover the model"
    heads = [at for at, line in enumerate(lines) if line.startswith("on mesh ")]
    assert [lines[at] for at in heads] == [f"on mesh {mesh}:" for mesh in meshes]
    fits, divides, names = (
        "\n".join(lines[start:end])
        for start, end in zip(heads, [*heads[1:], None], strict=True)
    )
    assert fits.count("LM") == 1 and "LM101 warning: rule 3 'zzz'" in fits
    assert "LM114 error: layers_0/up/kernel (64,256)" in divides
    assert divides.count("LM114") == 2 and "of size 3" in divides
    assert "by no rule" not in divides
    assert "the mesh 'data=2,tensor=4' has no such axis" in names


def test_small_matrices_need_a_rule_too() -> None:
    tree = {"up": kernel(512, 2048), "small_0": kernel(4, 4), "small_1": kernel(4, 4)}
    rules = {"up/kernel": (None, "model")}
    assert problems(tree, rules, "data=2,model=4")[2:] == [
        "  - small_{0,1}/kernel (4,4): matched by no rule (None: replicated)",
    ]
    covers = flm.testing.assert_covers
    covers(tree, flm.LayoutMap.from_rules(rules | {"small": None}), ["data=2,model=4"])
    layout_map = flm.LayoutMap.from_rules(rules)
    for ignore in ("small", "LM102"):
        covers(tree, layout_map, ["data=2,model=4"], ignore=ignore)


def test_too_much_that_is_replicated() -> None:
    tree = layers() | {"norm": {"scale": jax.ShapeDtypeStruct((4096,), "float32")}}
    layout_map = flm.LayoutMap.from_rules(RULES | {"scale": None})
    flm.testing.assert_covers(tree, layout_map, "model=4", max_replicated=0.1)
    with pytest.raises(AssertionError, match="LM115"):
        flm.testing.assert_covers(tree, layout_map, "model=4", max_replicated=0.01)


@pytest.mark.parametrize("meshes", [[], [None], ["data=-1"]])
def test_what_is_not_a_mesh(meshes: Any) -> None:
    layout_map = flm.LayoutMap.from_rules(RULES)
    with pytest.raises(flm.LayoutError, match="needs meshes, such as|needs every size"):
        flm.testing.assert_covers(layers(), layout_map, meshes)
