"""Rules distinguish the members of a dict of models, with any wrapping."""

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import flax_layoutmap as flm
from flax_layoutmap import testing
from flax_layoutmap._rules.records import ResolvedLeaf

X = np.ones((4, 8), np.float32)


class Net(nnx.Module):
    """Two layers, so that each member has `up/kernel` and `down/kernel`."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(8, 16, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(16, 8, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.relu(self.up(x)))


NAMES = ("policy", "reference")


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """The rules below are for every leaf, so nothing has to be told."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", flm.LayoutWarning)
        yield


def rules(**options: Any) -> flm.LayoutMap:
    """The first is split over the model axis, the second over the data axis."""
    first, second = NAMES
    layout_map = flm.LayoutMap(flm.DeviceMesh("data=2,model=4"), **options)
    layout_map[f"{first}/up/kernel"] = (None, "model")
    layout_map[f"^{first}/down/kernel$"] = ("model", None)
    layout_map[f"{second}/.*kernel"] = ("data", None)
    return layout_map


WANTED: dict[str, tuple[Any, ...]] = {
    "policy/up/kernel": (None, "model"),
    "policy/down/kernel": ("model",),
    "reference/up/kernel": ("data",),
    "reference/down/kernel": ("data",),
}


def make() -> dict[str, Net]:
    return {name: Net(nnx.Rngs(at)) for at, name in enumerate(NAMES)}


def specs(resolution: flm.Resolution, below: str = "") -> dict[str, tuple[Any, ...]]:
    """Path → spec of the matrices, without what leads to the members."""
    return {
        leaf.path.removeprefix(below): spec_of(leaf)
        for leaf in resolution
        if leaf.role == "parameter" and len(leaf.shape) == 2
    }


def spec_of(leaf: ResolvedLeaf) -> tuple[Any, ...]:
    return tuple(leaf.layout.spec(len(leaf.shape)))


def lies(tree: Any) -> dict[str, tuple[Any, ...]]:
    """Path → spec of the arrays themselves."""
    states = {
        name: nnx.state(part) if isinstance(part, nnx.Module) else part
        for name, part in tree.items()
    }
    flat, _ = jax.tree_util.tree_flatten_with_path(states)
    return {
        "/".join(str(entry.key) for entry in keys if hasattr(entry, "key")): tuple(
            leaf.sharding.spec
        )
        for keys, leaf in flat
    }


def wrapped() -> dict[str, Any]:
    """The same members in other containers."""
    models = make()
    states = {name: nnx.state(model) for name, model in models.items()}
    pure = {name: nnx.to_pure_dict(state) for name, state in states.items()}
    return {
        "modules": models,
        "nnx.Dict": nnx.Dict(**models),
        "states": states,
        "arrays": pure,
        "shapes": jax.eval_shape(lambda: pure),
        "state of nnx.Dict": nnx.state(nnx.Dict(**models)),
    }


def test_every_wrapping_gets_the_same_layouts() -> None:
    for kind, tree in wrapped().items():
        for match in ("search", "match"):
            layout_map = rules(match=match)
            assert specs(layout_map.resolve(tree)) == WANTED, kind
            if kind in ("modules", "nnx.Dict", "states"):
                deeper = layout_map.resolve({"agents": tree})
                assert specs(deeper, "agents/") == WANTED, kind


def test_fullmatch_and_exact_keys() -> None:
    layout_map = flm.LayoutMap(flm.DeviceMesh("data=2,model=4"), match="fullmatch")
    layout_map["policy/up/kernel"] = ("data", "model")
    layout_map["up/kernel"] = (None, "model")
    layout_map["reference/down/.*"] = ("data", None)
    layout_map[".*/down/kernel|down/kernel"] = ("data", None)
    leaves = layout_map.resolve(make())
    # Of two exact keys the one of the whole path wins alone.
    assert {leaf.path: (leaf.rule_number, leaf.reason) for leaf in leaves} == {
        "policy/up/kernel": (1, "exact key"),
        "reference/up/kernel": (2, "exact key"),
        "policy/down/kernel": (4, "rule"),
        "reference/down/kernel": (3, "rule"),
    }


@pytest.mark.parametrize("match", ["search", "match", "fullmatch"])
def test_what_holds_within_a_section_still_does(match: Any) -> None:
    layout_map = flm.LayoutMap("data=2,model=4", match=match)
    layout_map["up/kernel"] = (None, "model")
    layout_map["down/.*"] = ("model", None)
    variables = {"params": nnx.to_pure_dict(nnx.state(Net(nnx.Rngs(0))))}
    for tree in (
        Net(nnx.Rngs(0)),
        variables,
        {"model": variables},
        {"a": Net(nnx.Rngs(0))},
    ):
        assert layout_map.resolve(tree).unmatched == ()
    anchored = flm.LayoutMap("data=2,model=4", match=match)
    anchored["params/up/.*|^params/up/kernel$"] = (None, "model")
    anchored["down/kernel"] = None
    for tree in (variables, {"model": variables}):
        assert anchored.resolve(tree).unmatched == ()


def test_leaves_to_ignore_are_named_in_any_form() -> None:
    layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("data=2,model=4"))
    layout_map["down/kernel"] = (None, "model")
    resolution = layout_map.resolve(make())
    with pytest.raises(flm.errors.ResolveError):
        flm.lint(resolution).raise_if_any("warning")
    for ignore in (["^up/kernel"], [f"^{name}/up/kernel" for name in NAMES]):
        report = flm.lint(resolution, max_replicated=0.02, ignore=ignore)
        report.raise_if_any("warning")
        flm.testing.assert_covers(make(), layout_map, ["data=2,model=4"], ignore=ignore)


def test_members_and_their_optimizers_from_birth_to_a_checkpoint(
    tmp_path: Path,
) -> None:
    layout_map = rules()
    layout_map.optimizer["^policy/up/kernel"] = ("data", "model")
    moved = WANTED | {"policy/up/kernel": ("data", "model")}

    def whole() -> dict[str, Any]:
        models = make()
        return models | {
            f"{name}_opt": nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
            for name, model in models.items()
        }

    def check(tree: Any) -> None:
        assert lies({name: tree[name] for name in NAMES}) == WANTED
        for name in NAMES:
            mu = nnx.state(tree[f"{name}_opt"], nnx.optimizer.OptState)["opt_state"][0]
            assert lies({name: mu["mu"]}) == {
                path: spec for path, spec in moved.items() if path.startswith(name)
            }

    tree = flm.create(whole, layout_map)
    check(tree)

    @flm.jit(layout_map=layout_map)
    def step(tree: Any, x: Any) -> None:
        for name in NAMES:
            grads = nnx.grad(lambda net: (net(x) ** 2).mean())(tree[name])
            tree[f"{name}_opt"].update(tree[name], grads)

    before = np.asarray(tree["policy"].up.kernel)
    step(tree, X)
    check(tree)
    assert np.any(np.asarray(tree["policy"].up.kernel) != before)
    report = layout_map.resolve(tree).report()
    assert "unused" not in report and "unmatched" not in report
    flm.checkpoint.save(tmp_path / "whole", tree, layout_map=layout_map)
    mesh = flm.DeviceMesh("data=4,model=2")  # with the rules that it was saved with
    check(flm.checkpoint.restore(tmp_path / "whole", whole, mesh=mesh))
    for include in ("^policy/", "^policy/(up|down)/kernel$", "/up/kernel"):
        part = flm.checkpoint.restore(
            tmp_path / "whole", layout_map=layout_map, include=include
        )
        some = {path for path in WANTED if re.search(include, path)}
        assert {path for path in lies(part) if path in WANTED} == some


def test_what_plain_orbax_wrote(tmp_path: Path) -> None:
    models = make()
    states = {name: nnx.state(model) for name, model in models.items()}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "plain", states)
    layout_map = rules()
    metadata = ocp.StandardCheckpointer().metadata(tmp_path / "plain")
    tree = metadata.item_metadata.tree  # type: ignore[union-attr]
    assert specs(layout_map.resolve(tree)) == WANTED
    found = flm.checkpoint.restore(tmp_path / "plain", layout_map=layout_map)
    assert lies(found) == WANTED
    found = flm.checkpoint.restore(tmp_path / "plain", models, layout_map=layout_map)
    assert lies(found) == WANTED


def test_lint_and_explain_speak_of_members() -> None:
    layout_map = rules()
    first, second = NAMES
    resolution = layout_map.resolve(make())
    assert not [i for i in flm.lint(resolution) if i.code in ("LM101", "LM102")]
    testing.assert_covers(make(), layout_map, ["data=2,model=4"])
    told = resolution.explain(f"{first}/up/kernel")
    assert f"its path is the key of rule 1 '{first}/up/kernel'" in told
    del layout_map[f"{second}/.*kernel"]
    layout_map[f"{second}/up/kernle"] = ("data", None)
    found = {issue.code: str(issue) for issue in flm.lint(layout_map.resolve(make()))}
    assert f"the closest path ends in '{second}/up/kernel'" in found["LM101"]
    told = layout_map.resolve(make()).explain(f"{second}/up/kernel")
    assert f"rule 3 '{second}/up/kernle' is closest" in told


def test_layers_of_members_are_siblings_of_their_own() -> None:
    """Lint compares a layer with its neighbours, not with those of another member."""
    layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("data=2,model=4"))
    layout_map["actor/up_proj"] = (None, "model")
    layout_map["critic/up_proj"] = ("model", None)
    leaf = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    names = ("up_proj", "gate_proj", "q_proj")
    state = {name: {"kernel": nnx.Param(leaf)} for name in names}
    tree = {"actor": nnx.State(state), "critic": nnx.State(state)}
    layout_map["(gate|q)_proj"] = (None, "model")
    found = [
        issue for issue in flm.lint(layout_map.resolve(tree)) if issue.code == "LM110"
    ]
    assert [issue.path for issue in found] == ["critic/up_proj/kernel"]


def test_names_of_arguments_count_for_objects_of_flax() -> None:
    layout_map = flm.LayoutMap("data=2,model=4", strict=False)
    layout_map["^policy/up/kernel"] = (None, "model")
    layout_map["batch"] = ("model", None)
    step = flm.jit(lambda policy, batch: policy(batch["x"]), layout_map=layout_map)
    models = flm.create(lambda: {"policy": Net(nnx.Rngs(0))}, layout_map)
    # A batch is data, whatever the rules call so.
    assert step(models["policy"], {"x": X}).shape == (4, 8)
    alone = flm.create(lambda: Net(nnx.Rngs(0)), layout_map)
    with pytest.raises(flm.LayoutError) as caught:
        step(alone, {"x": X})
    text = str(caught.value)
    assert "policy/up/kernel (8,16): wanted P(-, model) on mesh" in text
    assert "layout_map.place({'policy': policy})" in text
    alone = layout_map.place({"policy": alone})["policy"]
    assert step(alone, {"x": X}).shape == (4, 8)


@pytest.mark.parametrize("pattern", ["policy/up", "^policy/up$"])
def test_outputs_of_members(pattern: str) -> None:
    layout_map = flm.LayoutMap("data=2,model=4", strict=False)
    layout_map.activations[pattern] = (None, "model")
    layout_map.activations["^down"] = ("model", None)

    @flm.jit(layout_map=layout_map)
    def forward(models: Any, x: Any) -> Any:
        return {name: (net.up(x), net.down(net.up(x))) for name, net in models.items()}

    models = flm.create(lambda: make(), layout_map)
    found = forward(models, jnp.asarray(X))
    assert tuple(found["policy"][0].sharding.spec) == (None, "model")
    # Within its own module, a path begins with the name of the layer.
    assert tuple(found["policy"][1].sharding.spec) == ("model",)
    assert tuple(found["reference"][1].sharding.spec) == ("model",)
