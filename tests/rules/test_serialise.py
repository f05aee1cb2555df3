"""Rule sets to JSON (schema 1) and back."""

from typing import Any

import pytest
from jax.sharding import PartitionSpec

import flax_layoutmap as flm
from flax_layoutmap._rules.files import (
    rules_from_json,
)

MESH = flm.DeviceMesh.abstract((2, 4), ("data", "model"))


def full_map() -> flm.LayoutMap:
    """One of everything that a rule set can hold."""
    layout_map = flm.LayoutMap(
        MESH,
        match="fullmatch",
        overlap="last",
        unmatched="error",
        indivisible="replicate",
        batch=("data", "model"),
        strict=True,
    )
    layout_map["a"] = (None, "model")
    layout_map["b"] = ((("data", "model")), ..., None)
    layout_map["c"] = None
    layout_map["d"] = PartitionSpec("data")
    layout_map.add(flm.Rule("e", ("data",), rank="skip"))
    layout_map["f"] = flm.TensorLayout(("data",), memory_kind="pinned_host")
    layout_map["g"] = flm.TensorLayout(("x",), flm.DeviceMesh.abstract("x=3"))
    layout_map.activations["mlp"] = ("data", ..., None)
    layout_map.names["hidden"] = ("data", None)
    layout_map.optimizer["kernel"] = ("data", "model")
    return layout_map


def test_what_is_written() -> None:
    layout_map = flm.LayoutMap(MESH)
    layout_map["(gate|up)/kernel"] = (None, ("data", "model"))
    layout_map["bias"] = None
    assert layout_map.to_json() == {
        "schema": 1,
        "mesh": {
            "axis_names": ["data", "model"],
            "shape": [2, 4],
            "axis_types": ["auto", "auto"],
        },
        "batch": ["data"],
        "match": "search",
        "overlap": "error",
        "unmatched": "replicate",
        "indivisible": "error",
        "strict": None,
        "rules": [
            {"pattern": "(gate|up)/kernel", "axes": [None, ["data", "model"]]},
            {"pattern": "bias", "axes": ["..."]},
        ],
        "activations": [],
        "names": [],
        "optimizer": [],
    }


def test_onto_another_mesh() -> None:
    data = full_map().to_json()
    with pytest.raises(flm.errors.RuleError, match="rule 'g': .* names the axis 'x'"):
        flm.LayoutMap.from_json(data, mesh="data=4,model=2")
    data["rules"] = [entry for entry in data["rules"] if entry["pattern"] != "g"]
    read = flm.LayoutMap.from_json(data, mesh="data=4,model=2")
    assert read.device_mesh == flm.DeviceMesh("data=4,model=2")
    assert read["a"] == flm.TensorLayout((None, "model"), read.device_mesh)


def changed(**entries: Any) -> dict[str, Any]:
    return {**full_map().to_json(), **entries}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "the rules: expected a table, got None"),
        ({}, "the rules: schema must be 1, got None"),
        (changed(schema=2), "the rules: schema must be 1, got 2"),
        (changed(extra=1), "the rules: unknown key 'extra'"),
        (changed(extends="a.toml"), "the rules: unknown key 'extends'"),
        (changed(match="find"), "the rules: match must be one of"),
        (changed(batch=[3]), "the rules: batch: batch names the axis 3"),
        (changed(mesh={"shape": [2]}), "the rules: mesh: write it as"),
        (changed(mesh={"shape": [0], "axis_names": ["a"]}), "the rules: mesh: "),
        (changed(rules=None), "the rules: rules: expected a table of patterns"),
        (changed(rules=[{"axes": []}]), "the rules: rules: an entry has no pattern"),
        (changed(rules=[{"pattern": "a"}]), "rules, 'a': it has no axes"),
        (changed(rules=[{"pattern": "(", "axes": []}]), "is not a regular expression"),
        (changed(rules=[{"pattern": "a", "axes": ["tensor"]}]), "names the axis"),
        (changed(rules=[{"pattern": "a", "axes": [], "rank": 3}]), "rank must be"),
        (changed(names=[{"pattern": "a", "axes": []}] * 2), "'a' is there twice"),
    ],
)  # fmt: skip
def test_damaged_rules(data: Any, message: str) -> None:
    with pytest.raises(flm.errors.RuleError) as caught:
        rules_from_json(data)
    assert message in str(caught.value)
