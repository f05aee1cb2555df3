"""Logical axis rules: what Flax makes of an annotated model, as rules by paths."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from flax.core.spmd import from_sharding_rules
from jax.sharding import PartitionSpec as P

import flax_layoutmap as flm
from flax_layoutmap.errors import MeshError, RuleError

MESH = flm.DeviceMesh((2, 4), ("data", "model"))
# A second row of a name: the fallback of Linen, and what counts for NNX.
RULES = [
    ("vocab", "model"),
    ("embed", "model"),
    ("embed", "data"),
    ("mlp", "model"),
    ("layers", None),
]
INIT = nn.initializers.normal()


class Linen(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        def logical(*names: str) -> Any:
            return nn.with_logical_partitioning(INIT, names)

        x = nn.Embed(16, 8, embedding_init=logical("vocab", "embed"))(tokens)
        for _ in range(2):
            x = nn.Dense(16, kernel_init=logical("embed", "mlp"), use_bias=False)(x)
            x = nn.Dense(8, kernel_init=logical("mlp", "embed"), use_bias=False)(x)
        return nn.LayerNorm(scale_init=logical("embed"))(x)


def linen_variables() -> Any:
    return Linen().init(jax.random.key(0), jnp.zeros((2, 4), jnp.int32))


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        def logical(*names: str) -> Any:
            return nnx.with_metadata(INIT, out_sharding=names)

        self.up = nnx.Linear(
            8, 16, kernel_init=logical("embed", "mlp"), use_bias=False, rngs=rngs
        )
        self.down = nnx.Linear(
            16, 8, kernel_init=logical("mlp", "embed"), use_bias=False, rngs=rngs
        )


def dims(spec: Any, ndim: int) -> list[tuple[str, ...]]:
    found = [(dim,) if isinstance(dim, str) else tuple(dim or ()) for dim in spec]
    return found + [()] * (ndim - len(found))


def test_linen_takes_the_first_row_whose_axes_are_free() -> None:
    layout_map = flm.convert.from_logical(RULES, linen_variables, MESH, batch="data")
    boxed = jax.eval_shape(linen_variables)
    specs = nn.spmd.logical_to_mesh(nn.get_partition_spec(boxed), RULES)
    wanted = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
    unboxed = nn.meta.unbox(boxed)
    found = list(layout_map.resolve(unboxed))
    assert len(found) == len(wanted) == 7
    for leaf, spec in zip(found, wanted, strict=True):
        assert list(leaf.layout.dims(len(leaf.shape))) == dims(spec, len(leaf.shape))
    assert any(leaf.layout.axis_names == ("model", "data") for leaf in found)


def test_nnx_takes_the_last_row() -> None:
    layout_map = flm.convert.from_logical(RULES, lambda: Nnx(nnx.Rngs(0)), MESH)
    up = from_sharding_rules(("embed", "mlp"), RULES)
    down = from_sharding_rules(("mlp", "embed"), RULES)
    for name, spec in (("up", up), ("down", down)):
        layout = layout_map[f"{name}/kernel"]
        assert layout is not None and list(layout.dims(2)) == dims(spec, 2)
    assert (up, down) == (("data", "model"), ("model", "data"))


def test_the_rules_are_needed_no_more() -> None:
    """The map says it of a model without annotations, too."""
    layout_map = flm.convert.from_logical(RULES, linen_variables, MESH)
    plain = flm.create(lambda: nn.meta.unbox(linen_variables()), layout_map)
    kernel = plain["params"]["Dense_0"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (2, 16)


def test_a_row_with_an_axis_that_the_mesh_does_not_have() -> None:
    with pytest.raises(RuleError, match="logical rule 1, 'embed' → 'modle': .*'model'"):
        flm.convert.from_logical([("embed", "modle")], linen_variables, MESH)


def test_it_needs_a_mesh() -> None:
    with pytest.raises(MeshError, match="needs a mesh"):
        flm.convert.from_logical(RULES, linen_variables, None)


def test_the_mesh_of_the_context() -> None:
    jax_mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(jax_mesh):
        layout_map = flm.convert.from_logical([("mlp", "model")], linen_variables)
    assert str(layout_map.device_mesh) == "model=8"


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ([("embed",)], r"logical rule 1 is no \(name, mesh axes\) pair"),
        (
            [("embed", "data"), ("mlp", 3)],
            "logical rule 2, 'mlp': mesh axes are a name",
        ),
    ],
)
def test_an_entry_that_is_no_rule_is_named(rules: Any, text: str) -> None:
    with pytest.raises(RuleError, match=text):
        flm.convert.from_logical(rules, linen_variables, MESH)


def test_a_model_without_annotations() -> None:
    plain = jax.eval_shape(lambda: nn.meta.unbox(linen_variables()))
    with pytest.raises(RuleError, match="no parameter of the model names its logical"):
        flm.convert.from_logical(RULES, plain, MESH)
