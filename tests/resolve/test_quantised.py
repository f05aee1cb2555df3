"""Quantised trees: scales beside their kernels, under one rule."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from shapes import ABSTRACT, axes_of, mapped, nested, struct
from shards import assert_lies

import flax_layoutmap as flm


def int8(*shape: int) -> jax.ShapeDtypeStruct:
    return struct(*shape, dtype=jnp.int8)


QWIX = "kernel/array/qvalue", "kernel/array/scale"
AQT = "qrhs/qvalue", "qrhs/scale/0"
OWN = "kernel", "kernel_scale"


def tree_of(names: tuple[str, str], kernel: Any, scale: Any) -> dict[str, Any]:
    leaves = zip(names, (kernel, scale), strict=True)
    return nested({f"up/{name}": leaf for name, leaf in leaves})


@pytest.mark.parametrize("names", [QWIX, AQT, OWN])
@pytest.mark.parametrize(
    ("scale", "axes", "has_note"),
    [
        ((1, 16), (None, "model"), True),
        ((1, 1), (None, None), True),
        ((8, 1), ("data", None), True),
        ((2, 16), ("data", "model"), False),  # blocks
        ((8, 16), ("data", "model"), False),
        ((16,), ("model",), False),
        ((8,), ("data",), False),
    ],
)
@pytest.mark.parametrize("indivisible", ["error", "replicate"])
def test_scales(
    names: tuple[str, str], scale: Any, axes: Any, has_note: bool, indivisible: Any
) -> None:
    layout_map = mapped({"up": ("data", "model")}, indivisible=indivisible)
    tree = tree_of(names, int8(8, 16), struct(*scale))
    resolution = layout_map.resolve(tree, strict=True)
    path = f"up/{names[1]}"
    assert axes_of(resolution[path]) == axes
    assert axes_of(resolution[f"up/{names[0]}"]) == ("data", "model")
    assert resolution.fallbacks == () and resolution.unmatched == ()
    leaf = resolution[path]
    if len(scale) == 1:
        assert (leaf.reason, leaf.owner) == ("follows kernel", f"up/{names[0]}")
        assert "from the layout of up/" in resolution.explain(path)
    else:
        assert (leaf.reason, leaf.rule_number) == ("rule", 1)
        assert (leaf.note is not None) is has_note
        assert ("of size 1 replicated" in resolution.explain(path)) is has_note


def test_the_note_says_whose_scale_it_is() -> None:
    resolution = mapped({"up": ("data", "model")}).resolve(
        tree_of(QWIX, int8(8, 16), struct(1, 16))
    )
    assert resolution.explain("up/kernel/array/scale") == (
        "up/kernel/array/scale (1,16) float32: (None, 'model')\n"
        "  because: it is matched by rule 1 'up' → ('data', 'model'): dim 0 of size 1 "
        "replicated: it is the scale of up/kernel/array/qvalue (8,16)\n"
        "  each device holds (1,4), 16 B"
    )


def test_a_dim_of_size_one_elsewhere_is_an_error() -> None:
    """The head of a critic, say: the rule is not meant for it."""
    tree = {"actor": {"kernel": struct(8, 16)}, "critic": {"kernel": struct(8, 1)}}
    with pytest.raises(flm.errors.ResolveError) as caught:
        mapped({"kernel": ("data", "model")}).resolve(tree)
    assert caught.value.problems == (
        "critic/kernel (8,1): rule 1 'kernel' → ('data', 'model'): dim 1 of size 1 "
        "does not divide by mesh axis 'model' of size 4; change the size, use another "
        'layout (None for this dim), or indivisible="replicate"',
    )
    beside = {"head": {"kernel": struct(8, 16), "value": struct(8, 1)}}
    with pytest.raises(flm.errors.ResolveError, match="head/value"):
        mapped({"head": ("data", "model")}).resolve(beside)
    fixed = {"actor/kernel": ("data", "model"), "critic/kernel": ("data", None)}
    assert axes_of(mapped(fixed).resolve(tree)["critic/kernel"]) == ("data", None)


def test_a_rule_for_the_scale_alone_is_not_softened() -> None:
    tree = tree_of(QWIX, int8(8, 16), struct(1, 16))
    rules = {"qvalue": ("data", "model"), "scale": ("data", "model")}
    with pytest.raises(
        flm.errors.ResolveError, match="dim 0 of size 1 does not divide"
    ):
        mapped(rules).resolve(tree)


@pytest.mark.parametrize("scale", [(3, 16), (8, 3)])
def test_blocks_that_do_not_divide_are_an_error(scale: Any) -> None:
    tree = tree_of(QWIX, int8(24, 24), struct(*scale))
    with pytest.raises(
        flm.errors.ResolveError, match="up/kernel/array/scale .* of size 3"
    ):
        mapped({"up": ("data", "model")}).resolve(tree)


def test_a_scale_that_its_shape_does_not_tell() -> None:
    """(8,) may be the rows or the columns of (8, 8)."""
    tree = tree_of(OWN, int8(8, 8), struct(8))
    with pytest.raises(flm.errors.ResolveError) as caught:
        mapped({"up": ("data", "model")}).resolve(tree)
    assert "up/kernel_scale (8,): rule 1 'up' → ('data', 'model') has 2 dims" in str(
        caught.value
    )
    assert axes_of(mapped({"up": None}).resolve(tree)["up/kernel_scale"]) == (None,)
    # The fixes that the message prints:
    narrower = mapped({"kernel$": ("data", "model"), "scale": ("model",)})
    assert axes_of(narrower.resolve(tree)["up/kernel_scale"]) == ("model",)
    skipping = flm.LayoutMap(ABSTRACT, strict=False)
    skipping.add(flm.Rule("up", ("data", "model"), rank="skip"))
    assert skipping.resolve(tree).unmatched == ("up/kernel_scale",)


def test_kernels_of_heads() -> None:
    tree = {
        "query": {"kernel": {"qvalue": int8(8, 4, 2), "scale": struct(1, 4, 2)}},
        "out": {"kernel": {"qvalue": int8(4, 2, 8), "scale": struct(1, 1, 8)}},
    }
    rules = {"query": ("data", "model", None), "out": ("model", None, "data")}
    resolution = mapped(rules).resolve(tree, strict=True)
    assert axes_of(resolution["query/kernel/scale"]) == (None, "model", None)
    assert axes_of(resolution["out/kernel/scale"]) == (None, None, "data")


class Quantised(nnx.Module):
    """Weights of 8 bits, with a scale for each column."""

    def __init__(self) -> None:
        self.kernel = nnx.Param(jnp.ones((8, 16), jnp.int8))
        self.kernel_scale = nnx.Param(jnp.ones((1, 16)))

    def __call__(self, x: Any) -> Any:
        return (x @ self.kernel[...]) * self.kernel_scale[...]


def make() -> nnx.Module:
    return nnx.Sequential(Quantised())


@pytest.mark.parametrize("how", ["create", "scope", "place", "jit"])
def test_made_in_shards_without_a_warning(how: str, mesh: flm.DeviceMesh) -> None:
    layout_map = mapped({"kernel": ("data", "model")}, mesh)
    model: Any
    with warnings.catch_warnings():
        warnings.simplefilter("error", flm.LayoutWarning)
        if how == "create":
            model = flm.create(make, layout_map)
        elif how == "place":
            model = layout_map.place(make())
        elif how == "jit":
            model = flm.jit(make, layout_map=layout_map)()
        else:
            with flm.layout_map_scope(layout_map):
                model = make()
    layer = model.layers[0]
    assert_lies(layer.kernel[...], (("data",), ("model",)), mesh)
    assert_lies(layer.kernel_scale[...], ((), ("model",)), mesh)
