"""Optional rules: those of a table for several models, which may match nothing."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
from shapes import ABSTRACT, mapped, nested, struct

import flax_layoutmap as flm

TREE = nested({"up/kernel": struct(8, 16)})
USED = flm.Rule("up/kernel", (None, "model"))


def announced(layout_map: flm.LayoutMap) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layout_map.resolve(TREE).announce()
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("optional", [True, False])
def test_only_other_rules_are_reported_as_unused(optional: bool) -> None:
    rule = flm.Rule("down/kernel", ("model", None), optional=optional)
    layout_map = mapped({"up/kernel": USED, "down/kernel": rule})
    resolution = layout_map.resolve(TREE)
    unused = [rule.pattern for rule in resolution.unused_rules]
    assert unused == ([] if optional else ["down/kernel"])
    assert bool(announced(layout_map)) is not optional


def test_an_optional_rule_applies_where_it_matches() -> None:
    layout_map = mapped({"up": flm.Rule("up", (None, "model"), optional=True)})
    leaf = layout_map.resolve(TREE)["up/kernel"]
    assert leaf.shard_shape == (8, 4) and leaf.rule_number == 1


def test_it_is_another_rule_and_survives_copies() -> None:
    rule = flm.Rule("up", (None, "model"), rank="skip", optional=True)
    assert repr(rule) == "Rule('up', (None, 'model'), rank='skip', optional=True)"
    assert rule != flm.Rule("up", (None, "model"), rank="skip")
    assert pickle.loads(pickle.dumps(rule)) == rule
    assert rule.on(ABSTRACT).optional
    with pytest.raises(flm.errors.RuleError, match="optional must be True or False"):
        flm.Rule("up", (None, "model"), optional=1)  # pyright: ignore


@pytest.mark.parametrize("suffix", ["toml", "json"])
@pytest.mark.parametrize("every", [True, False])
def test_files_keep_it(tmp_path: Path, suffix: str, every: bool) -> None:
    path = tmp_path / f"rules.{suffix}"
    rules: dict[str, Any] = {
        "up": flm.Rule("up", (None, "model"), optional=True),
        "down": flm.Rule("down", ("model", None), optional=every),
    }
    layout_map = mapped(rules)
    layout_map.to_file(path)
    assert flm.LayoutMap.from_file(path) == layout_map
    if suffix == "toml":
        assert ("\noptional = true\n" in path.read_text()) is every


def test_the_key_is_for_the_rules_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "table.toml").write_text(
        'schema = 1\noptional = true\n[rules]\n"up" = ["-", "model"]\n'
        '"down" = { axes = ["model", "-"], optional = false }\n'
    )
    (tmp_path / "mine.toml").write_text(
        'schema = 1\nextends = "table.toml"\n[rules]\n"gate" = ["-", "model"]\n'
    )
    rules = flm.LayoutMap.from_file(tmp_path / "mine.toml").freeze().rules
    assert {rule.pattern: rule.optional for rule in rules} == {
        "up": True,
        "down": False,
        "gate": False,
    }
