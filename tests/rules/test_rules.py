"""Rule and RuleSet: frozen rules, matching policies, the forms of a path."""

import pickle
from typing import Any

import pytest

import flax_layoutmap as flm
from flax_layoutmap._rules.matching import Matcher
from flax_layoutmap._rules.patterns import Folding, view_of
from flax_layoutmap._rules.rules import make_rules


def rules(*patterns: str) -> tuple[flm.Rule, ...]:
    return tuple(flm.Rule(pattern, None) for pattern in patterns)


# ------------------------------------------------------------------ Rule


def test_a_rule_is_a_pattern_and_a_layout(mesh: flm.DeviceMesh) -> None:
    rule = flm.Rule("up/kernel", (None, "model"))
    assert rule.pattern == "up/kernel"
    assert rule.layout == flm.TensorLayout((None, "model"))
    assert rule.rank == "error"
    assert rule == flm.Rule("up/kernel", [None, ("model",)])
    assert hash(rule) == hash(flm.Rule("up/kernel", [None, "model"]))
    assert rule != flm.Rule("up/kernel", (None, "model"), rank="skip")
    assert rule.on(mesh).layout == flm.TensorLayout((None, "model"), mesh)
    assert rule.layout.device_mesh is None
    assert rule.on(mesh).on(mesh) == rule.on(mesh)


def test_a_rule_is_immutable() -> None:
    with pytest.raises(AttributeError, match="cannot assign to field 'pattern'"):
        flm.Rule("a", None).pattern = "b"  # type: ignore[misc]


def test_repr_of_a_rule() -> None:
    assert repr(flm.Rule("up", (None, "model"))) == "Rule('up', (None, 'model'))"
    assert repr(flm.Rule("up", None, rank="skip")) == (
        "Rule('up', replicated, rank='skip')"
    )


@pytest.mark.parametrize("pattern", ["(", "*", "a{9999999999999}", "(" * 5000])
def test_a_bad_regex_is_told_with_its_text(pattern: str) -> None:
    with pytest.raises(
        flm.errors.RuleError, match="is not a regular expression"
    ) as caught:
        flm.Rule(pattern, None)
    assert repr(pattern)[:20] in str(caught.value)
    assert caught.value.__cause__ is not None


def test_make_rules_takes_pairs_and_rules() -> None:
    rule = flm.Rule("a", None)
    assert make_rules([rule, ("b", ("x",)), ["c", None]]) == (
        rule,
        flm.Rule("b", ("x",)),
        flm.Rule("c", None),
    )
    with pytest.raises(flm.errors.RuleError, match="rule 2 is neither a"):
        make_rules([rule, "b"])


# --------------------------------------------------------------- RuleSet


def test_a_rule_set_is_frozen_and_hashable(mesh: flm.DeviceMesh) -> None:
    first = flm.RuleSet(rules("a"), mesh)
    again = flm.RuleSet(rules("a"), mesh)
    assert first == again and hash(first) == hash(again)
    assert first != flm.RuleSet(rules("a"), mesh, strict=False)
    assert first != flm.RuleSet(rules("a"), mesh, optimizer=rules("a"))
    assert first != "a"
    with pytest.raises(AttributeError):
        first.match = "match"  # type: ignore[misc]


def test_a_rule_set_takes_lists_and_any_mesh(mesh: flm.DeviceMesh) -> None:
    listed: Any = [("a", ("data",))]
    wanted = flm.RuleSet((flm.Rule("a", ("data",)),), mesh, batch=("data",))
    batches: list[Any] = [["data"], "data"]
    for batch in batches:
        axes: Any = mesh.jax_mesh
        assert flm.RuleSet(listed, axes, batch=batch) == wanted


@pytest.mark.parametrize(
    ("option", "value", "hint"),
    [
        ("match", "searching", "did you mean 'search'?"),
        ("overlap", "frist", "did you mean 'first'?"),
        ("unmatched", None, ""),
        ("indivisible", "pad", ""),
        ("strict", 0, ""),
        ("strict", "yes", ""),
    ],
)
def test_options_are_checked(option: str, value: Any, hint: str) -> None:
    with pytest.raises(flm.errors.RuleError) as caught:
        flm.RuleSet(**{option: value})
    assert str(caught.value).startswith(f"{option} must be one of (")
    assert f"got {value!r}{'; ' + hint if hint else ''}" in str(caught.value)


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


def test_batch_axes_follow_the_mesh() -> None:
    assert flm.RuleSet().on("x=8").batch == ("x",)
    assert flm.RuleSet(mesh=flm.DeviceMesh("y=8"), batch=()).on("x=8").batch == ()


def test_rule_sets_pickle(abstract_mesh: flm.DeviceMesh) -> None:
    made = flm.RuleSet(
        (flm.Rule("a", ("data",), rank="skip").on(abstract_mesh),),
        abstract_mesh,
        overlap="last",
    )
    again = pickle.loads(pickle.dumps(made))
    assert again == made and again.matching("xay") == (0,)


# -------------------------------------------------------------- matching

KERAS_DOC = ("conv2d.*kernel", "my_model/conv2d_123/kernel")


@pytest.mark.parametrize(
    ("match", "pattern", "path", "found"),
    [
        ("search", *KERAS_DOC, True),
        ("match", *KERAS_DOC, False),
        ("match", "my_model/conv", "my_model/conv2d_123/kernel", True),
        ("fullmatch", *KERAS_DOC, False),
        ("fullmatch", ".*conv2d.*kernel", "my_model/conv2d_123/kernel", True),
        ("search", "^kernel", "a/kernel", False),
        ("search", "kernel$", "a/kernel_scale", False),
        ("search", "Kernel", "a/kernel", False),
        ("search", "(?i)Kernel", "a/kernel", True),
    ],
)
def test_match_modes(match: Any, pattern: str, path: str, found: bool) -> None:
    made = flm.RuleSet((flm.Rule(pattern, None),), match=match)
    assert made.matching(path) == ((0,) if found else ())


def test_an_exact_key_wins_alone() -> None:
    made = flm.RuleSet(rules("kernel", "a/kernel", "a/.*"))
    assert made.matching("a/kernel") == (1,)
    assert made.matching("b/a/kernel") == (0, 1, 2)
    assert made.matching("kernel") == (0,)
    assert made.matching("c/kernel") == (0,)
    assert made.matching("bias") == ()


def test_an_exact_key_that_may_be_skipped_hides_no_pattern() -> None:
    key = flm.Rule("a/kernel1", ("x",), rank="skip")
    odd = flm.Rule("(?i)a/kernel[12]", ("x",), rank="skip")
    for own in (key, odd):
        made = flm.RuleSet((*rules("kernel", "b"), own, *rules("a/")))
        assert made.matching(own.pattern) == (0, 2, 3)
        matcher = made.matcher
        folded = "/".join(map(matcher.fold_part, own.pattern.split("/")))
        sure, maybe = matcher.fold_forms((folded,))
        assert matcher.refine_forms((own.pattern,), sure, maybe) == (0, 2, 3)


def test_an_exact_key_may_hold_special_characters() -> None:
    made = flm.RuleSet(rules(r"a\+b", "a.b"))
    assert made.matching("a+b") == (0, 1)
    assert made.matching("a.b") == (1,)
    assert made.matching(r"a\+b") == (0,)


def test_matching_several_in_order() -> None:
    made = flm.RuleSet(rules("kernel", "up", "mlp/(gate|up)", "bias"))
    assert made.matching("layers/3/mlp/up/kernel") == (0, 1, 2)


# ---------------------------------------------------- what a pattern can see


@pytest.mark.parametrize(
    "pattern",
    [
        "kernel",
        r"layers/\d+/kernel",
        "layers/[0-9]+/kernel",
        "[a-z]+/[^/]+$",
        r"a{2,3}b{,4}c{5}",
        r"\bkernel\B",
        "(?:a|b)(?P<name>c)(?=d)(?!e)(?<=f)(?<!g)(?>h)",
        r"w\.b\/c",
        "[]0-9-]",
        "[0-9-5]",
        r"[\x30-9]",
    ],
)
def test_patterns_that_see_no_digits(pattern: str) -> None:
    view = view_of(pattern)
    assert view.understood and not view.chunks


@pytest.mark.parametrize(
    ("pattern", "chunks"),
    [
        ("layers/7/kernel", {"7"}),
        ("layer_12/kernel", {"layer_12"}),
        ("conv2d.*kernel", {"conv2d"}),
        ("a1b2?c", {"a1b", "2"}),
        ("x1|y2", {"x1", "y2"}),
    ],
)
def test_digits_that_matter(pattern: str, chunks: set[str]) -> None:
    view = view_of(pattern)
    assert view.understood and view.chunks == chunks


@pytest.mark.parametrize(
    "pattern",
    [
        "[1-3]",
        "[a5]",
        "[!-5]",
        r"(a)\1",
        r"(?P<n>a)(?P=n)",
        "(a)?(?(1)b|c)",
        "(?i)kernel",
        "(?x) kernel  # 1",
        "(?#1)a",
        r"\x31",
        r"\061",
        "\\u0031",
        r"\N{DIGIT ONE}",
        "a{b}",
        "a{,}",
        "a}",
    ],
)
def test_patterns_that_are_tried_path_by_path(pattern: str) -> None:
    assert not view_of(pattern).understood


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("mlp/up/kernel", {"mlp/up/kernel"}),
        ("mlp/(gate|up)/kernel", {"/kernel", "mlp/"}),
        ("ab*c", {"a", "c"}),
        ("ab+c", {"a", "b", "c"}),
        ("(?:up/)?(mlp/)x", {"mlp/x"}),
        ("(?!a)b(?=c)", {"b"}),
        ("a|b", set()),
        ("(a|b)c", {"c"}),
        ("^a$", {"a"}),
    ],
)
def test_texts_that_every_match_holds(pattern: str, texts: set[str]) -> None:
    assert set(view_of(pattern).texts) == texts


def test_folding_keeps_the_parts_that_matter() -> None:
    fold = Folding({"7", "layer_12"})
    assert fold("kernel") == "kernel"
    assert fold("3") == fold("4") == fold("0")
    assert fold("7") == "7" != fold("8")
    assert fold("17") == "17"
    assert fold("layer_12") == "layer_12"
    assert fold("layer_13") == fold("layer_45")
    assert Folding(())("w12") == Folding(())("w99")


class Counted(str):
    """A path that counts how often it is asked for a text."""

    asked = 0

    def __contains__(self, text: str) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        Counted.asked += 1
        return super().__contains__(text)


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("layers/{}/mlp/up/kernel", "model/layers/123/mlp/up/kernel"),
        ("layers_{}/kernel", "x/layers_123/kernel"),
        (r"experts/{}/(gate|up)/\w+$", "experts/123/up/kernel"),
    ],
)
def test_a_path_is_asked_by_the_rules_of_its_own_layer(pattern: str, path: str) -> None:
    matcher = Matcher(rules(*(pattern.format(at) for at in range(1000))), "search")
    Counted.asked = 0
    folded = "/".join(matcher.fold_part(Counted(part)) for part in path.split("/"))
    assert matcher.fold_forms((Counted(folded),)) == ((123,), ())
    assert folded == path and 0 < Counted.asked < 10


def test_folding_never_makes_what_matters() -> None:
    assert Folding({"00"})("12") == "11"
    every = Folding({digit * 2 for digit in "0123456789"})
    assert every("12") == "12"
