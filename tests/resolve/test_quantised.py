"""Quantised trees: scales beside their kernels, under one rule."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from shapes import axes_of, mapped, nested, struct
from shards import assert_lies

import flax_layoutmap as flm

NAMES = [
    ("kernel/array/qvalue", "kernel/array/scale"),  # qwix
    ("qrhs/qvalue", "qrhs/scale/0"),  # AQT
    ("kernel", "kernel_scale"),
]
LAYOUTS = st.sampled_from([("data", "model"), ("model", None), (None, "model")])


def int8(*shape: int) -> jax.ShapeDtypeStruct:
    return struct(*shape, dtype=jnp.int8)


def resolved(names: Any, kernel: Any, scale: Any, layout: Any, **options: Any) -> Any:
    """The Resolution of a kernel and its scale, and the leaves."""
    tree = nested({f"up/{names[0]}": int8(*kernel), f"up/{names[1]}": struct(*scale)})
    resolution = mapped({"up": layout}, **options).resolve(tree, strict=True)
    return resolution, *(resolution[f"up/{name}"] for name in names)


@given(
    st.sampled_from(NAMES),
    st.tuples(*[st.sampled_from([16, 24])] * 2),
    st.tuples(*[st.sampled_from([1, 2, 5, 6, 24])] * 2),
    LAYOUTS,
    st.sampled_from(["error", "replicate"]),
)
def test_scales_have_the_shards_of_their_kernel(
    names: Any, kernel: Any, block: Any, layout: Any, indivisible: Any
) -> None:
    """Dim by dim; a dim that does not divide (1, or few blocks) is whole."""
    scale = tuple(-(-size // each) for size, each in zip(kernel, block, strict=True))
    resolution, base, leaf = resolved(
        names, kernel, scale, layout, indivisible=indivisible
    )
    parts = [size // of for size, of in zip(kernel, base.shard_shape, strict=True)]
    whole = [dim for dim, size in enumerate(scale) if size % parts[dim]]
    assert leaf.shard_shape == tuple(
        size if dim in whole else size // parts[dim] for dim, size in enumerate(scale)
    )
    assert resolution.fallbacks == () and leaf.rule_number == 1
    text = f"replicated: it is the scale of {base.path} ({kernel[0]},{kernel[1]})"
    assert (text in resolution.explain(leaf.path)) is bool(whole)
    for dim in whole:
        what = "of size 1" if scale[dim] == 1 else f"of {scale[dim]} blocks"
        assert what in (leaf.note or "")


@given(
    st.sampled_from(NAMES),
    st.tuples(*[st.sampled_from([8, 16])] * 2),
    LAYOUTS,
    st.data(),
)
def test_vectors_have_the_dim_of_their_size(
    names: Any, kernel: Any, layout: Any, data: Any
) -> None:
    """Of two such dims the output dim, and the explanation says so."""
    size = data.draw(st.sampled_from(kernel))
    resolution, base, leaf = resolved(names, kernel, (size,), layout)
    dim = max(dim for dim in (0, 1) if kernel[dim] == size)
    assert leaf.shard_shape == (base.shard_shape[dim],)
    assert (leaf.reason, leaf.owner) == ("follows kernel", base.path)
    text = resolution.explain(leaf.path)
    assert f"from the layout of {base.path}: as its scale, it has its dim {dim}" in text
    is_square = kernel[0] == kernel[1]
    assert ("(dims 0 and 1 fit: the last, as the output dims)" in text) is is_square


def test_kernels_of_heads() -> None:
    tree = {
        "query": {"kernel": {"qvalue": int8(8, 4, 2), "scale": struct(1, 4, 2)}},
        "out": {"kernel": {"qvalue": int8(4, 2, 8), "scale": struct(1, 1, 8)}},
    }
    rules = {"query": ("data", "model", None), "out": ("model", None, "data")}
    resolution = mapped(rules).resolve(tree, strict=True)
    assert axes_of(resolution["query/kernel/scale"]) == (None, "model", None)
    assert axes_of(resolution["out/kernel/scale"]) == (None, None, "data")


def test_dims_that_do_not_divide_elsewhere_are_errors() -> None:
    """The rule is not meant for such a leaf, as the head of a critic."""
    of_8_bits = nested({"up/kernel": int8(24, 24), "up/scale": struct(15, 24)})
    trees = {
        "critic/kernel": {"a": struct(8, 16), "critic": {"kernel": struct(8, 1)}},
        "head/value": {"head": {"kernel": struct(8, 16), "value": struct(8, 1)}},
        "up/scale": of_8_bits,  # 24 are not 15 blocks
    }
    for path, tree in trees.items():
        with pytest.raises(flm.errors.ResolveError, match=path):
            mapped({path.split("/")[0]: ("data", "model")}).resolve(tree)
    tree = nested(
        {f"up/{NAMES[0][0]}": int8(8, 16), f"up/{NAMES[0][1]}": struct(1, 16)}
    )
    rules = {"qvalue": ("data", "model"), "scale": ("data", "model")}
    with pytest.raises(flm.errors.ResolveError, match="dim 0 of size 1 is not div"):
        mapped(rules).resolve(tree)


class Quantised(nnx.Module):
    """Weights of 8 bits, with a scale for each column."""

    def __init__(self) -> None:
        self.kernel = nnx.Param(jnp.ones((8, 16), jnp.int8))
        self.kernel_scale = nnx.Param(jnp.ones((1, 16)))


@pytest.mark.parametrize("how", ["create", "place"])
def test_made_in_shards_without_a_warning(how: str, mesh: flm.DeviceMesh) -> None:
    layout_map = mapped({"kernel": ("data", "model")}, mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error", flm.LayoutWarning)
        if how == "create":
            model = flm.create(Quantised, layout_map)
        else:
            model = layout_map.place(Quantised())
    assert_lies(model.kernel[...], (("data",), ("model",)), mesh)
    assert_lies(model.kernel_scale[...], ((), ("model",)), mesh)
