"""LayoutMap: the mutable mapping of rules."""

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import flax_layoutmap as flm

P = PartitionSpec
ABSTRACT = flm.DeviceMesh.abstract((2, 4), ("data", "model"))


@pytest.fixture
def layout_map() -> flm.LayoutMap:
    made = flm.LayoutMap(ABSTRACT)
    made["up/kernel"] = (None, "model")
    made["down/.*"] = ("model", None)
    return made


# -------------------------------------------------------------- as a mapping


def test_reading_matches(layout_map: flm.LayoutMap) -> None:
    up = flm.TensorLayout((None, "model"), ABSTRACT)
    assert layout_map["layers/3/up/kernel"] == up
    assert layout_map["down/kernel"] == flm.TensorLayout(("model", None), ABSTRACT)
    assert layout_map["bias"] is None
    assert layout_map.get("bias") is None
    assert layout_map.get("bias", 3) == 3
    assert layout_map.get("x/up/kernel", 3) == up
    layout_map["layers/3/up/kernel"] = None  # an exact key
    assert layout_map["layers/3/up/kernel"] == flm.TensorLayout(None, ABSTRACT)


def test_reading_where_rules_differ() -> None:
    rules = [("kernel", ("data",)), ("up", ("model",))]
    layout_map = flm.LayoutMap.from_rules(rules, overlap="error")
    with pytest.raises(flm.errors.RuleError) as caught:
        layout_map["x/up/kernel"]
    assert str(caught.value) == (
        "'x/up/kernel' is matched by rules with different layouts: 'kernel', 'up'; "
        'make one narrower, or use overlap="first" or "last"'
    )
    first = flm.LayoutMap.from_rules(rules, overlap="first")
    assert first["x/up/kernel"] == flm.TensorLayout(("data",))
    last = flm.LayoutMap.from_rules(rules, overlap="last")
    assert last["x/up/kernel"] == flm.TensorLayout(("model",))
    del layout_map["up"]
    layout_map["^x"] = ("data",)  # agrees
    assert layout_map["x/up/kernel"] == flm.TensorLayout(("data",))


def test_setdefault_pop_and_del_are_literal(layout_map: flm.LayoutMap) -> None:
    up = flm.TensorLayout((None, "model"), ABSTRACT)
    assert layout_map.setdefault("up/kernel", ("data",)) == up
    new = layout_map.setdefault("x/up/kernel", ("data", None))
    assert new == flm.TensorLayout(("data", None), ABSTRACT)
    assert layout_map.setdefault("norm").is_replicated
    assert layout_map.pop("up/kernel") == up
    assert layout_map.pop("layers/up/kernel", 7) == 7
    with pytest.raises(KeyError, match="no rule 'down/kernel'"):
        layout_map.pop("down/kernel")
    with pytest.raises(KeyError, match=r"did you mean 'down/\.\*'"):
        del layout_map["down/*"]
    del layout_map["down/.*"]
    assert list(layout_map) == ["x/up/kernel", "norm"]
    assert layout_map.popitem()[0] == "norm"
    layout_map.clear()
    assert not layout_map
    with pytest.raises(KeyError, match="empty"):
        layout_map.popitem()


def test_setting_an_existing_key_raises(layout_map: flm.LayoutMap) -> None:
    with pytest.raises(flm.errors.RuleError) as caught:
        layout_map["up/kernel"] = ("data", None)
    assert str(caught.value) == (
        "the key 'up/kernel' is already set to (None, 'model'); to change it use "
        ".replace('up/kernel', …), or del it first"
    )
    layout_map.replace("up/kernel", ("data", None))
    assert layout_map["up/kernel"] == flm.TensorLayout(("data", None), ABSTRACT)
    assert list(layout_map) == ["up/kernel", "down/.*"]
    with pytest.raises(KeyError, match="no rule 'up/kernal'; did you mean 'up/kernel'"):
        layout_map.replace("up/kernal", None)


def test_a_failed_edit_changes_nothing(layout_map: flm.LayoutMap) -> None:
    before = layout_map.freeze()
    for key, value in [("(", None), ("new", "model"), ("new", ("tensor",))]:
        with pytest.raises(flm.errors.RuleError):
            layout_map[key] = value
    with pytest.raises(flm.errors.RuleError):
        layout_map.replace("up/kernel", ("tensor",))
    assert layout_map.freeze() is before


def test_the_callers_layout_is_not_changed(mesh: flm.DeviceMesh) -> None:
    layout = flm.TensorLayout(("data",))
    flm.LayoutMap(mesh)["w"] = layout
    assert layout.device_mesh is None
    axes = ["data", ["model"]]
    flm.LayoutMap(mesh)["w"] = axes
    assert axes == ["data", ["model"]]


def test_a_layout_with_a_mesh_keeps_it(mesh: flm.DeviceMesh) -> None:
    part = flm.DeviceMesh("data=2", devices=jax.devices()[:2])
    layout_map = flm.LayoutMap(mesh)
    layout_map["w"] = flm.TensorLayout(("data",), part)
    layout_map["v"] = NamedSharding(part.jax_mesh, P("data"))  # type: ignore[arg-type]
    for key in ("w", "v"):
        layout = layout_map[key]
        assert layout is not None and layout.device_mesh == part


def test_rules_with_options(layout_map: flm.LayoutMap) -> None:
    layout_map.add(flm.Rule("bias", ("model",), rank="skip"))
    layout_map["scale"] = flm.Rule("scale", None, rank="skip")
    ranks = [rule.rank for rule in layout_map.freeze().rules]
    assert ranks == ["error", "error", "skip", "skip"]
    for change in (layout_map.__setitem__, layout_map.replace):
        with pytest.raises(flm.errors.RuleError, match="for another pattern, 'y'"):
            change("scale", flm.Rule("y", None))
    other = flm.LayoutMap()
    other.update(layout_map)
    assert [rule.rank for rule in other.freeze().rules] == ranks
    other.update({"a": None}, b=("data",))
    assert list(other)[-2:] == ["a", "b"]


# ------------------------------------------------------------------- sections


def test_sections_have_the_same_behaviour(layout_map: flm.LayoutMap) -> None:
    for name in ("activations", "names", "optimizer"):
        section = getattr(layout_map, name)
        section[".*mlp"] = ("data", ..., None)
        wanted = flm.TensorLayout(("data", ..., None), ABSTRACT)
        assert section["decoder/mlp"] == wanted and section["norm"] is None
        assert (section["decoder/mlp/up"] is None) == (name == "names")
        assert list(section) == [".*mlp"] and "decoder/mlp" not in section
        with pytest.raises(flm.errors.RuleError, match="already set"):
            section[".*mlp"] = None
        section.replace(".*mlp", None)
        section["x"] = None
        assert section.pop("x").is_replicated
        del section[".*mlp"]
        assert len(section) == 0
    assert list(layout_map) == ["up/kernel", "down/.*"]


# --------------------------------------------------------- options and meshes


def test_batch_axes(mesh: flm.DeviceMesh) -> None:
    given: Any
    for given, batch in [
        (None, ("data",)),
        ("model", ("model",)),
        (("data", "model"), ("data", "model")),
        ([], ()),
    ]:
        layout_map = flm.LayoutMap(mesh, batch=given)
        for made in (layout_map, layout_map.copy(), layout_map.on(ABSTRACT)):
            assert made.freeze().batch == batch


def test_a_map_without_a_mesh_is_given_one_later(mesh: flm.DeviceMesh) -> None:
    planned = flm.LayoutMap(match="fullmatch", strict=True)
    planned[".*kernel"] = (None, "model")
    planned.optimizer["kernel"] = ("data", "model")
    placed = planned.on(mesh)
    layout = placed["up/kernel"]
    assert layout == flm.TensorLayout((None, "model"), mesh)
    rules = placed.freeze()
    assert (rules.match, rules.strict, rules.batch) == ("fullmatch", True, ("data",))
    assert rules.optimizer[0].layout.device_mesh == mesh
    assert planned.device_mesh is None
    with pytest.raises(flm.errors.RuleError, match="rule '.*kernel'"):
        planned.on("data=8")


# ---------------------------------------------------------------- constructors


def test_from_rules_takes_a_mapping(layout_map: flm.LayoutMap) -> None:
    rules = {"up/kernel": (None, "model"), "down/.*": ("model", None)}
    assert flm.LayoutMap.from_rules(rules, ABSTRACT, overlap="error") == layout_map
    layout_map.add(flm.Rule("bias", ("model",), rank="skip"))
    again = flm.LayoutMap.from_rules(layout_map, ABSTRACT, overlap="error")
    assert again == layout_map


def test_from_rules_takes_ordered_lists() -> None:
    rules = [
        ("embedding", P("model", None)),
        ["kernel", (None, "model")],
        flm.Rule("bias", None, rank="skip"),
        (".*", None),
    ]
    layout_map = flm.LayoutMap.from_rules(rules, ABSTRACT, indivisible="replicate")
    assert list(layout_map) == ["embedding", "kernel", "bias", ".*"]
    assert layout_map.freeze().overlap == "first"
    assert layout_map.freeze().indivisible == "replicate"
    assert layout_map["a/kernel"] == flm.TensorLayout((None, "model"), ABSTRACT)
    assert flm.LayoutMap.from_rules([], overlap="last").freeze().overlap == "last"
    with pytest.raises(flm.errors.RuleError, match="already set"):
        flm.LayoutMap.from_rules([("a", None), ("a", None)])
    with pytest.raises(flm.errors.RuleError, match="rule 1 is neither"):
        flm.LayoutMap.from_rules(["a"])


def test_freeze_is_the_same_until_an_edit(layout_map: flm.LayoutMap) -> None:
    rules = layout_map.freeze()
    assert layout_map.freeze() is rules
    edits: list[Any] = [
        lambda: layout_map.update({"new": None}),
        lambda: layout_map.replace("new", ("data",)),
        lambda: layout_map.pop("new"),
        lambda: layout_map.optimizer.update({"x": None}),
        lambda: layout_map.names.update({"x": None}),
        lambda: layout_map.optimizer.clear(),
    ]
    for edit in edits:
        edit()
        assert layout_map.freeze() is not rules
        rules = layout_map.freeze()


def test_a_rule_added_later_takes_effect(layout_map: flm.LayoutMap) -> None:
    tree = {"norm": jax.ShapeDtypeStruct((8,), jnp.float32)}
    assert layout_map.resolve(tree)["norm"].reason == "no rule"
    layout_map["norm"] = ("data",)
    assert layout_map.resolve(tree)["norm"].shard_shape == (4,)


@pytest.mark.parametrize(
    "copier",
    [
        flm.LayoutMap.copy,
        copy.copy,
        copy.deepcopy,
        lambda given: pickle.loads(pickle.dumps(given)),
    ],
)
def test_copies_are_independent(copier: Any, mesh: flm.DeviceMesh) -> None:
    layout_map = flm.LayoutMap(mesh)
    layout_map["a"] = None
    layout_map.optimizer["b"] = ("data",)
    other = copier(layout_map)
    assert other == layout_map != {"a": None}
    other["c"] = None
    del other.optimizer["b"]
    assert list(layout_map) == ["a"] and list(layout_map.optimizer) == ["b"]
    assert list(other) == ["a", "c"] and not other.optimizer
    with pytest.raises(TypeError, match="unhashable"):
        hash(other)


def test_repr(layout_map: flm.LayoutMap) -> None:
    layout_map.optimizer["kernel"] = None
    assert repr(layout_map) == "\n".join(
        [
            "LayoutMap(DeviceMesh('data=2,model=4', abstract)) {",
            "  'up/kernel': (None, 'model'),",
            "  'down/.*': ('model', None),",
            "  optimizer['kernel']: replicated,",
            "}",
        ]
    )
    assert repr(layout_map.optimizer) == "{\n  'kernel': replicated,\n}"
    assert repr(flm.LayoutMap()) == "LayoutMap() {}"
