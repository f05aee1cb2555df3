"""Logical axis rules: what Flax makes of an annotated model, as rules by paths."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import flax_layoutmap as flm
from flax_layoutmap.errors import LayoutWarning, MeshError, RuleError

MESH = flm.DeviceMesh((2, 4), ("data", "model"))
JAX_MESH = jax.sharding.Mesh(MESH.devices, MESH.axis_names)
# A second row of a name: the fallback of Linen, and what counts for NNX.
RULES = [("vocab", "model"), ("embed", "model"), ("embed", "data"), ("mlp", "model")]
INIT = nn.initializers.normal()


class Linen(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        def logical(*names: str) -> Any:
            return nn.with_logical_partitioning(INIT, names)

        x = nn.Embed(16, 8, embedding_init=logical("vocab", "embed"))(tokens)
        x = nn.Dense(16, kernel_init=logical("embed", "mlp"), use_bias=False)(x)
        x = nn.Dense(8, kernel_init=logical("mlp", "embed"), use_bias=False)(x)
        return nn.LayerNorm(scale_init=logical("embed"))(x)


def linen_variables() -> Any:
    return Linen().init(jax.random.key(0), jnp.zeros((2, 4), jnp.int32))


def nnx_linear(*names: str, **options: Any) -> nnx.Linear:
    init = nnx.with_metadata(INIT, out_sharding=names, **options)
    return nnx.Linear(8, 16, kernel_init=init, use_bias=False, rngs=nnx.Rngs(0))


def test_linen_takes_the_first_row_whose_axes_are_free() -> None:
    layout_map = flm.convert.from_logical(RULES, linen_variables, MESH, batch="data")
    boxed = jax.eval_shape(linen_variables)
    wanted = jax.tree.leaves(
        nn.spmd.logical_to_mesh_sharding(nn.get_partition_spec(boxed), JAX_MESH, RULES)
    )
    found = list(layout_map.resolve(nn.meta.unbox(boxed)))
    assert len(found) == len(wanted) == 5
    for leaf, sharding in zip(found, wanted, strict=True):
        ndim = len(leaf.shape)
        assert leaf.layout.sharding(ndim).is_equivalent_to(sharding, ndim), leaf.path
    assert any(leaf.layout.axis_names == ("model", "data") for leaf in found)


def test_nnx_takes_the_last_row() -> None:
    for names in (("embed", "mlp"), ("mlp", "embed")):
        model = functools.partial(nnx_linear, *names)
        layout = flm.convert.from_logical(RULES, model, MESH)["kernel"]
        with jax.set_mesh(JAX_MESH), nnx.logical_axis_rules(RULES):
            kernel = model().kernel  # Flax shards it
        assert layout is not None and len(layout.axis_names) == 2
        assert kernel.get_value().sharding.is_equivalent_to(layout.sharding(2), 2)


def test_names_that_no_rule_has_are_told() -> None:
    rules = [("vocab", "model"), ("embd", "data"), ("mlp", None)]
    with pytest.warns(LayoutWarning, match=r"names of axes: \['embed'\]; .*\('embed'"):
        layout_map = flm.convert.from_logical(rules, linen_variables, MESH)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LayoutWarning)
        rules.append(("embed", None))
        assert flm.convert.from_logical(rules, linen_variables, MESH) == layout_map


def test_the_own_rules_of_a_variable_and_axes_of_the_mesh_are_known() -> None:
    rules = (("embed", "data"),)
    model = functools.partial(nnx_linear, "embed", "model", sharding_rules=rules)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LayoutWarning)
        layout = flm.convert.from_logical([], model, MESH)["kernel"]
    assert layout is not None and layout.axes == ("data", "model")


def test_the_mesh_of_the_context() -> None:
    with jax.set_mesh(JAX_MESH):
        layout_map = flm.convert.from_logical(RULES, linen_variables)
    assert str(layout_map.device_mesh) == "data=2,model=4"


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ([("embed",)], r"logical rule 1 is not a \(name, axes of the mesh\) pair"),
        ([("embed", "data"), ("mlp", 3)], r"logical rule 2 .* \('mlp', 3\): "),
        ([("embed", "modle")], "logical rule 1 .*'embed', 'modle'.*mean 'model'"),
    ],
)
def test_an_entry_that_is_not_a_rule_is_named(rules: Any, text: str) -> None:
    with pytest.raises(RuleError, match=text):
        flm.convert.from_logical(rules, linen_variables, MESH)


def test_what_it_needs() -> None:
    with pytest.raises(MeshError, match="needs a mesh"):
        flm.convert.from_logical(RULES, linen_variables, None)
    plain = jax.eval_shape(lambda: nn.meta.unbox(linen_variables()))
    with pytest.raises(RuleError, match="no parameter of the model names its logical"):
        flm.convert.from_logical(RULES, plain, MESH)
