"""A Variable that is shared counts under every name."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_layoutmap as flm


class Tied(nnx.Module):
    """The embedding is also the output layer, under a name that comes first."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.decoder = nnx.Dict(w=self.embed.embedding)
        self.mlp = nnx.Linear(8, 8, rngs=rngs)


def mapped(rules: dict[str, Any], **options: Any) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(flm.DeviceMesh("data=2,model=4"), **options)
    for pattern, layout in rules.items():
        layout_map[pattern] = layout
    return layout_map


@pytest.mark.parametrize("name", ["embed/embedding", "decoder/w", "^embed", "r/w$"])
def test_a_rule_for_any_name_applies(name: str) -> None:
    layout_map = mapped({name: ("model", None), "mlp": None})
    for tree in (Tied(nnx.Rngs(0)), lambda: Tied(nnx.Rngs(0))):
        resolution = layout_map.resolve(tree)
        assert resolution["decoder/w"].shard_shape == (4, 8)
        assert resolution["embed/embedding"] == resolution["decoder/w"]
        assert not resolution.unused_rules and len(resolution) == 3
        for path in ("decoder/w", "embed/embedding"):
            assert "= embed/embedding" in resolution.explain(path)
        assert "decoder/w = embed/embedding" in resolution.report()


def test_lint_knows_all_names() -> None:
    layout_map = mapped({"embed/embedding": None, "mlp": None})
    issues = flm.lint(layout_map.resolve(Tied(nnx.Rngs(0))))
    assert "LM101" not in {issue.code for issue in issues}
    unmatched = mapped({"mlp": None}).resolve(Tied(nnx.Rngs(0)))
    for name in ("^embed/", "^decoder/"):
        assert "decoder/w" not in {x.path for x in flm.lint(unmatched, ignore=[name])}
    assert "decoder/w" in {issue.path for issue in flm.lint(unmatched)}


def test_two_rules_that_disagree_are_an_error_that_names_both() -> None:
    layout_map = mapped({"embed": ("model", None), "decoder": (None, "model")})
    with pytest.raises(flm.errors.ResolveError) as caught:
        layout_map.resolve(Tied(nnx.Rngs(0)))
    text = str(caught.value)
    assert "decoder/w = embed/embedding (16,8)" in text
    assert "'embed'" in text and "'decoder'" in text
    first = mapped(
        {"embed": ("model", None), "decoder": (None, "model")}, overlap="first"
    )
    assert first.resolve(Tied(nnx.Rngs(0)))["decoder/w"].rule_number == 1


def test_a_shared_module_has_all_names_of_its_variables() -> None:
    class Shared(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.a = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
            self.b = nnx.List([self.a, nnx.Linear(8, 8, use_bias=False, rngs=rngs)])
            self.me = nnx.Dict(a=self.a)

    layout_map = mapped({"b/0/kernel": ("model", None), "b/1": None})
    resolution = layout_map.resolve({"model": Shared(nnx.Rngs(0))})
    assert resolution["model/a/kernel"].shard_shape == (2, 8)
    assert resolution["me/a/kernel"] == resolution["model/b/0/kernel"]
    assert len(resolution) == 2


def test_optimizer_state_and_creation_follow() -> None:
    import optax

    layout_map = mapped({"embed/embedding": ("model", None), "mlp": None})
    model = flm.create(lambda: Tied(nnx.Rngs(0)), layout_map)
    assert model.decoder.w is model.embed.embedding
    assert model.embed.embedding.sharding.shard_shape((16, 8)) == (4, 8)
    optimizer = flm.create_optimizer(model, optax.adam(1e-3), layout_map)
    mu = jax.tree.leaves(nnx.state(optimizer, nnx.OptState))
    shapes = {x.sharding.shard_shape(x.shape) for x in mu if x.shape == (16, 8)}
    assert shapes == {(4, 8)}


def test_a_checkpoint_with_the_other_name_is_restored(tmp_path: Path) -> None:
    layout_map = mapped({"embed/embedding": ("model", None), "mlp": None})
    pure = {
        "embed": {"embedding": jnp.arange(128.0).reshape(16, 8)},
        "mlp": {"bias": jnp.ones(8), "kernel": jnp.ones((8, 8))},
    }
    flm.checkpoint.save(tmp_path / "a", pure)
    restored = flm.checkpoint.restore(
        tmp_path / "a", lambda: Tied(nnx.Rngs(0)), layout_map=layout_map
    )
    assert np.array_equal(restored.decoder.w[...], pure["embed"]["embedding"])
    assert restored.decoder.w is restored.embed.embedding


@pytest.mark.parametrize("name", ["embed/embedding", "decoder/w"])
def test_safetensors_know_any_name(name: str, tmp_path: Path) -> None:
    mapping = [(name, "wte.weight"), ("mlp/(.*)", r"mlp.\1")]
    model = Tied(nnx.Rngs(0))
    flm.checkpoint.save_safetensors(tmp_path / "a.safetensors", model, mapping=mapping)
    restored = flm.checkpoint.restore_safetensors(
        tmp_path / "a.safetensors",
        lambda: Tied(nnx.Rngs(1)),
        mapping=mapping,
        layout_map=mapped({name: ("model", None), "mlp": None}),
    )
    table = restored.embed.embedding
    assert restored.decoder.w is table and np.array_equal(
        table[...], model.embed.embedding[...]
    )
    assert table[...].sharding.shard_shape((16, 8)) == (4, 8)


def test_a_scope_knows_all_names() -> None:
    layout_map = mapped({"embed/embedding": ("model", None), "mlp": None})
    with flm.layout_map_scope(layout_map):
        model = Tied(nnx.Rngs(0))
    assert model.decoder.w.sharding.shard_shape((16, 8)) == (4, 8)
