"""Each warning is emitted once, whichever consumer meets it, and how often."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import flax_layoutmap as flm


class Model(nnx.Module):
    """Two layers; the rules of these tests know the first one."""

    def __init__(self, *, head: bool = False) -> None:
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)
        if head:
            self.head = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.up(x))


def rules(mesh: Any = "data=2,model=4") -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh)
    layout_map["up/kernel"] = (None, "model")
    layout_map["typo/kernel"] = (None, "model")
    return layout_map


@contextmanager
def told() -> Iterator[list[str]]:
    """The texts of the LayoutWarnings of a block."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [str(w.message) for w in caught if w.category is flm.LayoutWarning]


def train(layout_map: flm.LayoutMap) -> Any:
    @flm.jit(layout_map=layout_map)
    def step(model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> None:
        gradients = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, gradients)

    return step


def test_a_whole_program_is_told_once(tmp_path: Path) -> None:
    layout_map = rules()
    with told() as at_birth:
        model = flm.create(Model, layout_map)
    assert at_birth == [
        "4 findings\n"
        "  - unused: rule 2 'typo/kernel' matches no leaf; the closest path ends in "
        "'down/kernel'\n"
        "  - unmatched: down/bias (8,) is matched by no rule, so every device holds it "
        "in full (2.9% of the bytes)\n"
        "  - unmatched: down/kernel (16,8) is matched by no rule, so every device "
        "holds it in full (45.7% of the bytes)\n"
        "  - unmatched: up/bias (16,) is matched by no rule, so every device holds it "
        "in full (5.7% of the bytes)\n"
        "  (a rule None says that a leaf is to be replicated; strict=False is quiet, "
        "strict=True raises)"
    ]
    predict = flm.jit(lambda model, x: model(x), layout_map=layout_map)
    with told() as afterwards:
        optimizer = flm.create_optimizer(model, optax.adam(1e-3), layout_map=layout_map)
        train(layout_map)(model, optimizer, jnp.ones((8, 8)))
        predict(model, jnp.ones((8, 8)))
        tree = {"net": model, "tx": optimizer, "step": 3, "key": jax.random.key(0)}
        flm.checkpoint.save(tmp_path / "both", tree, layout_map=layout_map)
        flm.checkpoint.save(tmp_path / "model", model, layout_map=layout_map)
        flm.checkpoint.restore(tmp_path / "both", tree, layout_map=layout_map)
        flm.checkpoint.restore(tmp_path / "model", layout_map=layout_map)
        layout_map.place(nnx.state(model, nnx.Param))
        layout_map.place({"model": model})
        layout_map.shardings({"params": nnx.to_pure_dict(nnx.state(model))})
        layout_map.on("data=4,model=2").place(model)
        layout_map.copy().abstract(model)
        with flm.layout_map_scope(layout_map):
            Model()
    assert afterwards == []


def test_what_is_new_is_told_of(mesh: flm.DeviceMesh) -> None:
    layout_map = rules(mesh)
    with told() as first:
        flm.create(Model, layout_map)
    with told() as second:
        flm.create(lambda: Model(head=True), layout_map)
        flm.create(lambda: Model(head=True), layout_map)
        flm.create(Model, layout_map)  # less than was told of
    assert len(first) == 1
    (text,) = second
    assert "head/kernel" in text
    assert "typo/kernel" not in text and "unmatched: down" not in text
    del layout_map["typo/kernel"]
    layout_map["bias"] = None
    with told() as edited:
        flm.create(Model, layout_map)
        flm.create(Model, layout_map)
    (text,) = edited
    assert "unmatched: down/kernel" in text and "unused" not in text
    with told() as another:
        flm.create(Model, rules())  # another map that says the same
    assert another == first


def test_members_of_a_tree_with_equal_paths_are_told_apart() -> None:
    layout_map = rules()
    tree = {"policy": Model(), "reference": Model()}
    with told() as first:
        layout_map.place(tree)
        layout_map.place({"reference": tree["reference"], "policy": tree["policy"]})
    (text,) = first
    assert "policy/down/kernel" in text and "reference/down/kernel" in text


def test_rules_that_a_checkpoint_holds_are_told_of_once(tmp_path: Path) -> None:
    mesh = flm.DeviceMesh("data=2,model=4")
    with told():
        model = flm.create(Model, rules(mesh))
        flm.checkpoint.save(tmp_path / "a", model, layout_map=rules(mesh))
        flm.checkpoint.save(tmp_path / "b", model, layout_map=rules(mesh))
    with told() as found:
        for name in ("a", "b", "a"):
            flm.checkpoint.restore(tmp_path / name, mesh=mesh)
    assert len(found) == 1 and "'typo/kernel' matches no leaf" in found[0]


def test_activation_rules_without_a_module_are_told_of_once() -> None:
    layout_map = flm.LayoutMap("data=2,model=4")
    layout_map["kernel|bias"] = None
    layout_map.activations["upp"] = ("data", None)
    model = flm.create(Model, layout_map)
    with told() as found:
        for method in (Model.__call__, lambda net, x: net.up(x)):
            flm.jit(method, layout_map=layout_map)(model, jnp.ones((8, 8)))
        with flm.activation_scope(layout_map.on("data=4,model=2"), model):
            model(jnp.ones((8, 8)))
    assert found == [
        "activation rules that match the output of no module: 'upp'; did you mean 'up'?"
    ]


@pytest.mark.parametrize("strict", [True, False])
def test_strict_rules_raise_every_time_and_quiet_ones_say_nothing(strict: bool) -> None:
    layout_map = flm.LayoutMap("data=2,model=4", strict=strict)
    layout_map["typo/kernel"] = (None, "model")
    for _ in range(2):
        with told() as found:
            if strict:
                with pytest.raises(flm.errors.ResolveError, match="strict: 5 findings"):
                    layout_map.place(Model())
            else:
                layout_map.place(Model())
        assert found == []


def test_an_optional_rule_may_match_nothing() -> None:
    layout_map = flm.LayoutMap("data=2,model=4")
    layout_map.add(flm.Rule("up", (None, "model"), rank="skip", optional=True))
    layout_map.add(flm.Rule("other", (None, "model"), optional=True))
    layout_map["."] = None
    layout_map = flm.LayoutMap.from_rules(layout_map, layout_map.device_mesh)
    with told() as found:
        model = layout_map.place(Model())
    assert found == [] and not layout_map.resolve(model).unused_rules
    assert model.up.kernel.sharding.spec == jax.P(None, "model")
