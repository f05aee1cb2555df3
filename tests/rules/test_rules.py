"""Rule and RuleSet: frozen rules, matching policies, the forms of a path."""

import pickle
import re
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from shards import bare

import flax_layoutmap as flm


def rules(*patterns: str) -> tuple[flm.Rule, ...]:
    return tuple(flm.Rule(pattern, None) for pattern in patterns)


# ------------------------------------------------------------------ Rule


def test_a_rule_is_a_pattern_and_a_layout(mesh: flm.DeviceMesh) -> None:
    rule = flm.Rule("up/kernel", (None, "model"))
    assert (rule.pattern, rule.rank) == ("up/kernel", "error")
    assert rule.layout == flm.TensorLayout((None, "model"))
    assert len({rule, flm.Rule("up/kernel", [None, ("model",)])}) == 1
    assert rule.on(mesh).layout == flm.TensorLayout((None, "model"), mesh)
    assert rule.on(mesh).on(mesh) == rule.on(mesh) != rule


def test_a_rule_is_frozen_and_pickles() -> None:
    rule = flm.Rule("up", (None, "model"), rank="skip", optional=True)
    with pytest.raises(AttributeError, match="cannot assign to field 'pattern'"):
        rule.pattern = "b"  # type: ignore[misc]
    assert repr(rule) == "Rule('up', (None, 'model'), rank='skip', optional=True)"
    assert repr(flm.Rule("up", None)) == "Rule('up', replicated)"
    assert rule != flm.Rule("up", (None, "model"), rank="skip")
    assert pickle.loads(pickle.dumps(rule)) == rule
    assert rule.on("model=8").optional
    with pytest.raises(flm.errors.RuleError, match="optional must be True or False"):
        flm.Rule("up", (None, "model"), optional=1)  # pyright: ignore


@pytest.mark.parametrize("pattern", ["(", "*", "a{9999999999999}", "(" * 5000])
def test_a_bad_regex_is_told_with_its_text(pattern: str) -> None:
    with pytest.raises(
        flm.errors.RuleError, match="is not a regular expression"
    ) as caught:
        flm.Rule(pattern, None)
    assert repr(pattern)[:20] in str(caught.value)
    assert caught.value.__cause__ is not None


# --------------------------------------------------------------- RuleSet


def test_a_rule_set_is_frozen_and_hashable(mesh: flm.DeviceMesh) -> None:
    listed: Any = [("a", None)]
    first, again = flm.RuleSet(rules("a"), mesh), flm.RuleSet(listed, bare(mesh))
    assert first == again and hash(first) == hash(again)
    assert first == pickle.loads(pickle.dumps(first))
    assert first != flm.RuleSet(rules("a"), mesh, strict=False)
    assert first != flm.RuleSet(rules("a"), mesh, optimizer=rules("a"))
    batches: list[Any] = [["data"], "data"]
    assert len({flm.RuleSet(batch=batch) for batch in batches}) == 1
    with pytest.raises(AttributeError):
        first.match = "match"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("option", "value", "hint"),
    [
        ("match", "searching", "; did you mean 'search'?"),
        ("unmatched", None, ""),
        ("strict", 0, ""),
        ("strict", "yes", ""),
    ],
)
def test_options_are_checked(option: str, value: Any, hint: str) -> None:
    with pytest.raises(flm.errors.RuleError) as caught:
        flm.RuleSet(**{option: value})
    assert str(caught.value).startswith(f"{option} must be one of (")
    assert str(caught.value).endswith(f"got {value!r}{hint}")


def test_on_another_mesh_moves_every_section(mesh: flm.DeviceMesh) -> None:
    planned = flm.DeviceMesh.abstract("data=4,model=2")
    rule = flm.Rule("a", ("model",)).on(planned)
    made = flm.RuleSet(
        (rule,), planned, batch=("data",), names=(rule,), optimizer=(rule,)
    )
    moved = made.on(mesh)
    assert moved.mesh == mesh
    for section in (moved.rules, moved.names, moved.optimizer):
        assert section[0].layout.device_mesh == mesh
    assert moved.batch == ("data",)
    assert made.mesh == planned and made.on(planned) is made
    assert made.on("model=8").batch == ("model",)
    with pytest.raises(flm.errors.RuleError, match="rule 'a'"):
        made.on("data=8")
    with pytest.raises(flm.errors.MeshError, match="needs a mesh, got None"):
        made.on(None)
    assert flm.RuleSet().on("x=8").batch == ("x",)
    assert flm.RuleSet(mesh=flm.DeviceMesh("y=8"), batch=()).on("x=8").batch == ()


# -------------------------------------------------------------- matching


def test_an_exact_key_that_may_be_skipped_hides_no_pattern() -> None:
    key = flm.Rule("a/kernel1", ("x",), rank="skip")
    odd = flm.Rule("(?i)a/kernel[12]", ("x",), rank="skip")
    for own in (key, odd):
        made = flm.RuleSet((*rules("kernel", "b"), own, *rules("a/")))
        assert made.matching(own.pattern) == (0, 2, 3)


# ------------------------------------------- the section, and the whole path


def matched(pattern: str, tree: Any, **options: Any) -> set[str]:
    """The paths that a rule is for."""
    layout_map = flm.LayoutMap(strict=False, **options)
    layout_map[pattern] = None
    return {leaf.path for leaf in layout_map.resolve(tree) if leaf.rule}


def member() -> nnx.State:
    leaf = jax.ShapeDtypeStruct((4,), np.float32)
    return nnx.State({"head": {"w": nnx.Param(leaf)}, "up": {"w": nnx.Param(leaf)}})


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("up/w", "actor/up/w critic/up/w"),
        ("^up/w$", "actor/up/w critic/up/w"),
        ("actor/up", "actor/up/w"),
        (r"^(actor|value)\/.*w", "actor/head/w actor/up/w"),
        (r"\bcritic/", "critic/head/w critic/up/w"),
        ("^(?!head).*w", "actor/up/w critic/up/w"),
        ("^(?!(head|other)).*w", "actor/up/w critic/up/w"),
        ("^[^/]+/up", ""),
        ("fac|critical/up", ""),
    ],
)
def test_a_pattern_sees_the_whole_path_where_it_names_the_section(
    pattern: str, paths: str
) -> None:
    tree = {"actor": member(), "critic": member()}
    assert matched(pattern, tree) == set(paths.split())


def test_a_negative_lookahead_holds_for_any_wrapping() -> None:
    for tree in (member(), {"model": member()}, {"agents": {"model": member()}}):
        (path,) = matched("^(?!head).*w", tree)
        assert path.endswith("up/w")


def test_members_with_numbers() -> None:
    tree = {f"block_{at}": member() for at in range(3)}
    assert matched("^block_1/up", tree) == {"block_1/up/w"}
    assert matched(r"^block_\d+/up", tree) == {f"{name}/up/w" for name in tree}
    assert matched("^block_[01]/up", tree) == {"block_0/up/w", "block_1/up/w"}
    for pattern in (r"^\d/up", "^[0-9]/up"):
        assert matched(pattern, [member(), member()]) == {"0/up/w", "1/up/w"}


def test_numbers_in_patterns_and_paths() -> None:
    """Layers that no pattern tells apart are tried once."""
    patterns = [r"a\d/", r"a\d\d/", "a1/", r"(?P<n>\d)(?P=n)", r"(\d)\1", "[1-3]/"]
    patterns += [r"[^\W\d]\d+/", "[!-5]/", r"[\x32]", "[/-:]x", r"\N{DIGIT ONE}/"]
    patterns += ["a[0-9]/", "a[^0-9]", "[30]/", "a[2[0-9]/", r"a3|[0-9]{2}/"]
    numbers = (1, 2, 3, 7, 11, 12, 21, 33, 100, 210)
    tree = {f"a{number}": {"x": np.zeros(1)} for number in numbers}
    paths = flm.resolve(tree, flm.RuleSet()).paths
    for pattern in patterns:
        expected = {path for path in paths if re.search(pattern, path)}
        assert matched(pattern, tree) == expected, pattern
    tree = {f"a[0-{number}]": np.zeros(1) for number in (8, 9)}
    assert matched("a[0-9]", tree) == {"a[0-9]"}  # an exact key


def test_ten_thousand_exact_rules_are_looked_up() -> None:
    """Not one pattern is tried: in each of them it would take very long."""
    slow = [f"a{at}/(x+x+)+y" for at in range(5)]
    made = flm.RuleSet(rules(*slow, *(f"layers/{at}/w" for at in range(10_000))))
    path = "a1/" + "x" * 40 + "/w"
    made = flm.RuleSet((*made.rules, *rules(path)))
    assert made.matching("layers/777/w") == (782,)
    assert made.matching(path) == (10_005,)
