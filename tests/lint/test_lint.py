"""Lint: each code is raised by a mistake, and not raised without one."""

import dataclasses
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax
import pytest
from flax import nnx

import flax_layoutmap as flm

PAGE = (Path(__file__).parents[2] / "docs/lint.md").read_text("utf-8")
# Code → its severities.
CODES = dict(re.findall(r"^\| \[(LM\d+)\]\(#lm\d+\) \| ([\w, ]+) \|", PAGE, re.M))
MESH = flm.DeviceMesh.abstract("data=2,model=4")
Report = Any


def struct(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def mapped(rules: Any = (), mesh: Any = MESH, **options: Any) -> flm.LayoutMap:
    mesh = flm.DeviceMesh.abstract(mesh) if isinstance(mesh, str) else mesh
    options = {"overlap": "first", **options}
    return flm.LayoutMap.from_rules(rules, mesh, **options)


def on(tree: Any, rules: Any, **options: Any) -> Report:
    return flm.lint(mapped(rules, **options).resolve(tree))


def unfit(tree: Any, rules: Any, mesh: str, **options: Any) -> Report:
    """What lint says of what resolving refuses."""
    with pytest.raises(flm.errors.ResolveError) as caught:
        mapped(rules, mesh, **options).resolve(tree)
    return flm.lint(caught.value.resolution)


def kernel(*shape: int) -> dict[str, Any]:
    return {"kernel": struct(*shape)}


MLP = {"up": kernel(64, 256), "down": kernel(256, 64)}
MLP_RULES = [("up/kernel", (None, "model")), ("down/kernel", ("model", None))]
LAYERS = {f"layers_{number}": MLP for number in range(3)}


def odd_mesh(axis: str, batch: str) -> Report:
    rule = flm.Rule("up/kernel", (None, axis))
    return flm.lint(flm.RuleSet((rule,), mesh=MESH, batch=(batch,)))


def training(state: Any, optimizer: Any = ()) -> Report:
    layout_map = mapped(MLP_RULES)
    layout_map.optimizer.update(optimizer)
    return flm.lint(layout_map.resolve({"params": MLP, "opt_state": state}))


def adam() -> Any:
    return jax.eval_shape(optax.adam(1.0).init, MLP)


def unknown_state() -> Any:
    return (optax.EmptyState(), {"odd": {"table": struct(64, 512)}})


def attention(heads: int) -> dict[str, Any]:
    projections = {name: kernel(64, heads, 16) for name in ("key", "value")}
    return {"attention": {"query": kernel(64, 8, 16), **projections}}


HEADS = [("(query|key|value)/kernel", (None, "model", None))]


def lenient(tree: Any, *rules: Any) -> Report:
    return on(tree, rules, indivisible="replicate")


def replicated_share(tree: Any, most: float) -> Report:
    resolution = mapped([("down", ("model", None))]).resolve(tree)
    return flm.lint(resolution, max_replicated=most)


class Case(NamedTuple):
    """What provokes a finding, and the finding; docs/lint.md has what is quiet."""

    provoke: Callable[[], Report]
    text: str


CASES: dict[str, Case] = {
    "LM001": Case(
        lambda: flm.lint([("up/(kernel", None), *MLP_RULES]),
        "LM001 error: rule 1: the pattern 'up/(kernel' is not a regular expression: "
        "missing ), unterminated subpattern at position 3; escape special characters "
        "with re.escape(...)\n  fix: escape it: 'up/\\\\(kernel'",
    ),
    "LM002": Case(
        lambda: flm.lint({"up": ("model", "model"), "down": None}),
        "LM002 error: rule 1: rule 'up': the layout ('model', 'model') uses the mesh "
        "axis 'model' twice; each axis may shard one dim only\n  fix: write (pattern, "
        'axes), such as ("up/kernel", (None, "model")): one entry per dim',
    ),
    "LM003": Case(
        lambda: odd_mesh("modle", "data"),
        "LM003 error: rule 1 'up/kernel' → (None, 'modle'): the mesh 'data=2,model=4' "
        "has no axis 'modle'\n  fix: layout_map[\"up/kernel\"] = (None, 'model')",
    ),
    "LM003, batch": Case(
        lambda: odd_mesh("model", "date"),
        "LM003 error: batch: the mesh 'data=2,model=4' has no axis 'date'\n"
        '  fix: batch="data"',
    ),
    "LM101": Case(
        lambda: on(MLP, [("up/kernal", None), *MLP_RULES]),
        "LM101 warning: rule 1 'up/kernal' → replicated matches no leaf; the closest "
        "path ends in 'up/kernel'\n"
        '  fix: layout_map["up/kernel"] = None  # not layout_map["up/kernal"]',
    ),
    "LM101, most is replicated": Case(
        lambda: on(MLP, [("up/kernle", (None, "model")), ("down/kernle", None)]),
        "LM101 error: rule 1 'up/kernle' → (None, 'model') matches no leaf, and 100.0% "
        "of the bytes are replicated; the closest path ends in 'up/kernel'\n"
        "  fix: layout_map[\"up/kernel\"] = (None, 'model')  # not "
        'layout_map["up/kernle"]',
    ),
    "LM102": Case(
        lambda: on(LAYERS, [("down", ("model", None))]),
        "LM102 warning: layers_0/up/kernel (64,256) and 2 more alike: matched by no "
        "rule, so that every device holds all 3 in full (50.0% of the bytes)\n"
        "  fix: layout_map[\"up/kernel\"] = (None, 'model')  # or None: replicated, on "
        "purpose",
    ),
    "LM102, no rules": Case(
        lambda: on(LAYERS, []),
        "LM102 info: layers_0/down/kernel (256,64) and 2 more alike: matched by no "
        "rule, so that every device holds all 3 in full (50.0% of the bytes)\n"
        "  fix: layout_map[\"down/kernel\"] = ('model', None)  # or None: replicated, "
        "on purpose",
    ),
    "LM103": Case(
        lambda: lenient({"up": kernel(64, 102)}, ("up/kernel", ("data", "model"))),
        "LM103 warning: up/kernel (64,102): rule 1 'up/kernel' → ('data', 'model'): "
        "dim 1 of size 102 is not divisible by 'model' (4), so it is replicated\n"
        "  fix: layout_map[\"up/kernel\"] = ('data', None), or a size of 104",
    ),
    "LM104": Case(
        lambda: lenient({"embed": kernel(50257, 8)}, ("embed", ("model", None))),
        "LM104 warning: embed/kernel (50257,8): rule 1 'embed' → ('model', None): dim "
        "0 of size 50257 is not divisible by 'model' (4), so it is replicated; 3 more "
        "rows would do, 50260\n  fix: pad the vocabulary from 50257 to 50260, or to "
        "50688 for tiles of 128 on each device",
    ),
    "LM105": Case(
        lambda: on(LAYERS, [("up/kernel", (None, "model")), (".*", None)]),
        "LM105 warning: layers_0/down/kernel (256,64) and 2 more alike: replicated by "
        "the catch-all rule 2 '.*' → replicated; every device holds all 3 in full "
        "(50.0% of the bytes)\n  fix: layout_map[\"down/kernel\"] = ('model', None)  "
        "# or None: replicated, on purpose",
    ),
    "LM105, on purpose": Case(
        lambda: on(MLP, [("up/kernel", (None, "model")), ("down", None)]),
        "LM105 info: down/kernel (256,64): replicated by rule 2 'down' → replicated; "
        "every device holds it in full (50.0% of the bytes)\n"
        "  fix: layout_map[\"down/kernel\"] = ('model', None)  # or None: replicated, "
        "on purpose",
    ),
    "LM106": Case(
        lambda: training(adam(), {"up": None}),
        "LM106 warning: opt_state/0/mu/up/kernel (64,256) of the sharded parameter "
        "'up/kernel': optimizer rule 1 'up' → replicated replicates it; every device "
        "holds it in full (16.7% of the bytes)\n"
        '  fix: del layout_map.optimizer["up"]  # it follows the parameter',
    ),
    "LM106, unknown": Case(
        lambda: training(unknown_state()),
        "LM106 warning: opt_state/1/odd/table (64,512): optimizer state of an unknown "
        "kind (belongs to no parameter); every device holds it in full (50.0% of the "
        "bytes)\n  fix: flm.resolve(state, layout_map, params=params, tx=tx)",
    ),
    "LM108": Case(
        lambda: lenient(attention(2), *HEADS),
        "LM108 warning: attention/key/kernel (64,2,16): rule 1 "
        "'(query|key|value)/kernel' → (None, 'model', None): dim 1 of size 2 is not "
        "divisible by 'model' (4), so it is replicated; 2 heads cannot be split over 4 "
        'devices\n  fix: layout_map["key/kernel"] = None  # in a rule in front of '
        "'(query|key|value)/kernel', or a smaller axis",
    ),
    "LM110": Case(
        lambda: on(
            {"gate": kernel(64, 256), **MLP},
            [
                ("(gate|up|down)$|down/", (None, "model")),
                ("(gate|up)/k", (None, "model")),
            ],
        ),
        "LM110 warning: down/kernel (256,64): rule 1 '(gate|up|down)$|down/' → (None, "
        "'model') looks swapped: it has 'model' on dim 1, the model dim, where rule 2 "
        "'(gate|up)/k' → (None, 'model') has it on features, those of 'gate/kernel'\n"
        "  fix: layout_map.replace('(gate|up|down)$|down/', ('model', None))",
    ),
    "LM111": Case(
        lambda: on(LAYERS, [*MLP_RULES, ("up", ("model", None))]),
        "LM111 warning: rule 3 'up' → ('model', None) never takes effect: every leaf "
        "that it matches is decided by another rule, such as rule 1 'up/kernel' → "
        "(None, 'model') (overlap='first')\n  fix: put 'up' before 'up/kernel', or del "
        'layout_map["up"]',
    ),
    "LM112": Case(
        lambda: on(MLP, [("kernel", ("data", None))]),
        "LM112 warning: mesh axis 'model' of size 4 is used by neither a rule nor the "
        "batch: its 4 devices do the same work on the same 64.0 KiB\n"
        "  fix: name 'model' in a rule, or in LayoutMap(mesh, batch=('data', 'model'))",
    ),
    "LM113": Case(
        lambda: on(
            {f"layers_{n}": {"w": struct(8, 8)} for n in (1, 10)},
            [("layers_1", ("model", None))],
        ),
        "LM113 warning: rule 1 'layers_1' → ('model', None) matches 'layers_1/w', and "
        "'layers_10/w' too, inside a number\n"
        "  fix: layout_map[\"layers_1(/|$)\"] = ('model', None)",
    ),
    "LM113, names": Case(
        lambda: on(
            {"attention": {"out": kernel(8, 8)}, "layout": kernel(8, 8)},
            [("out/kernel", ("model", None))],
        ),
        "LM113 info: rule 1 'out/kernel' → ('model', None) matches "
        "'attention/out/kernel', and 'layout/kernel' too, inside a name\n"
        "  fix: layout_map[\"(^|/)out/kernel\"] = ('model', None)",
    ),
    "LM114": Case(
        lambda: unfit(LAYERS, MLP_RULES, "data=2,model=3"),
        "LM114 error: layers_0/up/kernel (64,256) and 2 more alike: rule 1 'up/kernel' "
        "→ (None, 'model'): dim 1 of size 256 is not divisible by mesh axis 'model' of "
        "size 3\n  fix: change the size, use another layout (None for this dim), or "
        'indivisible="replicate"',
    ),
    "LM115": Case(
        lambda: replicated_share(LAYERS, 0.02),
        "LM115 error: every device of mesh data=2,model=4 holds 50.0% of the bytes in "
        "full, more than max_replicated=2.0%; the largest:\n"
        "    layers_0/up/kernel (64,256) and 2 more alike: 50.0%, no rule\n"
        "  fix: layout_map[\"up/kernel\"] = (None, 'model')  # or None: replicated, on "
        "purpose",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_reported(name: str) -> None:
    code = name.partition(",")[0]
    issues = CASES[name].provoke()
    assert CASES[name].text in [str(issue) for issue in issues if issue.code == code]
    for issue in issues:
        assert issue.message and issue.fix
        assert issue.severity in CODES[issue.code].split(", "), "as documented"
        assert (issue.pattern is None) == (issue.rule_number is None)
        if issue.path is not None:
            assert issue.leaves > 0
        assert json.loads(json.dumps(dataclasses.asdict(issue)))["code"] == issue.code


def test_every_documented_code_has_a_case() -> None:
    assert sorted({name.partition(",")[0] for name in CASES}) == [*CODES]


# A fix that is a rule: applied, it is gone.
FIXED = re.compile(r"layout_map\[(r?\".*?\")\] = (.*?)(?:  #.*|, or .*)?$")


@pytest.mark.parametrize("name", ["LM102", "LM105", "LM103", "LM108"])
def test_the_fix_is_code_that_mends_it(name: str) -> None:
    trees: dict[str, Any] = {
        "LM102": (LAYERS, [("down", ("model", None))]),
        "LM105": (LAYERS, [("up/kernel", (None, "model")), (".*", None)]),
        "LM103": ({"up": kernel(64, 102)}, [("up/kernel$", ("data", "model"))]),
        "LM108": (attention(2), HEADS),
    }
    tree, rules = trees[name]
    (issue, *_) = [issue for issue in lenient(tree, *rules) if issue.code == name]
    written = FIXED.search(issue.fix)
    assert written is not None
    pattern, axes = eval(written[1]), eval(written[2])
    after = lenient(tree, (pattern, axes), *rules)
    assert issue.path not in [other.path for other in after if other.code == name]


# --------------------------------------------------------------------- unused rules


@pytest.mark.parametrize(
    ("pattern", "options", "hint", "fix"),
    [
        ("up/kernel", {"match": "fullmatch"},
         "with match='fullmatch'; with match='search' it would match 'layers_0/up/kern",
         "match='search', or write '.*' for"),
        ("params/layers_0/up", {}, ": paths have no 'params/'",
         'layout_map["layers_0/up"] = None'),
        ("up/kernel/value", {}, "a Variable's own 'value' is in no path",
         'layout_map["up/kernel"] = None'),
        (r"up\.kernel", {}, "the parts of a path are joined by '/'",
         'layout_map["up/kernel"] = None'),
        (r"\['up'\]\['kernel'\]", {}, "paths are not bracketed",
         'layout_map["up/kernel"] = None'),
        ("^/layers_0/up", {}, ": paths neither begin nor end with '/', nor have two",
         'layout_map["layers_0/up"] = None'),
        ("up//kernel", {}, ": paths neither begin nor end with '/', nor have two",
         'layout_map["up/kernel"] = None'),
        ("xyz", {}, " matches no leaf", 'del layout_map["xyz"]'),
    ],
)  # fmt: skip
def test_what_an_unused_rule_may_have_meant(
    pattern: str, options: Any, hint: str, fix: str
) -> None:
    tree_rules = [(pattern, None), (".*(up|down)/kernel.*", ("data", "model"))]
    (issue,) = [i for i in on(LAYERS, tree_rules, **options) if i.code == "LM101"]
    assert hint in issue.message and issue.fix.startswith(fix)


def test_a_rule_that_does_not_name_its_section() -> None:
    state = nnx.State({"up": {"w": nnx.Param(struct(8, 8))}})
    rules = [("^[^/]+/up/w", None), ("w", ("model", None))]
    (issue,) = [i for i in on({"net": state}, rules) if i.code == "LM101"]
    assert "only a pattern that names what leads to the model sees 'net/up/w'" in (
        issue.message
    )


def test_unused_optimizer_rules() -> None:
    (issue,) = training(adam(), {"upp": ("data", "model")})
    assert (issue.code, issue.section, issue.rule_number) == ("LM101", "optimizer", 1)


def test_rules_for_more_than_one_model() -> None:
    """Unused ones are for information, and optional ones are not mentioned."""
    rules = [("up", (None, "model")), ("down", None), ("embedding", ("model", None))]
    unused = [issue for issue in on(MLP, rules, strict=False) if issue.code == "LM101"]
    assert [issue.severity for issue in unused] == ["info"]
    patterns = {"p/kernel": (None, "model"), "kernel": None, "zzz": None}
    optional = [flm.Rule(*rule, optional=True) for rule in patterns.items()]
    tree = {"p": kernel(64, 64), **MLP}
    codes = {issue.code for issue in on(tree, [("p", ("model", None)), *optional])}
    assert not codes & {"LM101", "LM111", "LM113"}
    codes = {issue.code for issue in on(tree, patterns.items())}
    assert {"LM101", "LM113"} <= codes


@pytest.mark.parametrize("rules", [[("zzz", None), *MLP_RULES], [("zzz", None)]])
def test_an_unused_rule_is_an_error_where_most_is_replicated(rules: Any) -> None:
    resolution = mapped(rules).resolve(MLP)
    problems = flm.lint(resolution).problems()
    assert [text[:5] for text in problems] == (["LM101"] if len(rules) == 1 else [])
    allowed = flm.lint(resolution, max_replicated=1.0)
    single = flm.lint(resolution.on(flm.DeviceMesh.abstract("data=1,model=1")))
    for report in (allowed, single):
        assert [i.severity for i in report if i.code == "LM101"] == ["warning"]


# -------------------------------------------------------------------- swapped axes

# KerasHub's tables for Llama and Qwen (71453d0): the kernels of queries, keys and
# values are (d, heads, head_dim); the axes are those of Gemma's, (heads, d, head_dim).
QUERY = "transformer_layer.*self_attention.*(query|key|value).kernel"
KERAS_HUB: dict[str, Any] = {
    QUERY: ("model", "batch", None),
    "transformer_layer.*attention_output.kernel": ("model", None, "batch"),
    "transformer_layer.*feedforward_intermediate_dense.kernel": ("batch", "model"),
    "transformer_layer.*feedforward_gate_dense.kernel": ("batch", "model"),
    "transformer_layer.*feedforward_output_dense.kernel": ("model", "batch"),
}


def decoder(d: int, heads: int, keys: int, size: int, f: int) -> dict[str, Any]:
    """Two layers of KerasHub's Llama."""
    layer = {
        "self_attention": {
            "query": kernel(d, heads, size) | {"bias": struct(heads, size)},
            "key": kernel(d, keys, size),
            "value": kernel(d, keys, size),
            "attention_output": kernel(heads, size, d),
        },
        "feedforward_gate_dense": kernel(d, f),
        "feedforward_intermediate_dense": kernel(d, f),
        "feedforward_output_dense": kernel(f, d),
    }
    return {f"transformer_layer_{number}": layer for number in range(2)}


def swapped(tree: Any, rules: Any, mesh: str, **options: Any) -> list[tuple[str, str]]:
    """Patterns and fixes of LM110."""
    report = on(tree, list(dict(rules).items()), mesh=mesh, **options)
    return [(issue.pattern, issue.fix) for issue in report if issue.code == "LM110"]


@pytest.mark.parametrize(
    ("sizes", "mesh"),
    [
        pytest.param((4096, 32, 8, 128, 14336), "batch=8,model=8", id="Llama"),
        pytest.param((4096, 32, 32, 128, 14336), "batch=8,model=8", id="no groups"),
        pytest.param((3584, 28, 4, 128, 18944), "batch=4,model=4", id="Qwen 2"),
        pytest.param((4096, 32, 8, 128, 14336), "batch=1,model=8", id="no batch"),
    ],
)
def test_the_tables_of_keras_hub(sizes: Any, mesh: str) -> None:
    tree = decoder(*sizes)
    corrected = ("batch", "model", None)
    fix = f"layout_map.replace({QUERY!r}, {corrected})"
    assert swapped(tree, KERAS_HUB, mesh) == [(QUERY, fix)]
    assert swapped(tree, KERAS_HUB | {QUERY: corrected}, mesh) == []


def test_what_a_fix_would_not_divide() -> None:
    """Eight heads of keys and values cannot be split over sixteen devices."""
    tree = decoder(4096, 32, 8, 128, 14336)
    ((_, fix),) = swapped(tree, KERAS_HUB, "batch=1,model=16")
    assert fix.startswith("layout_map[\"query/kernel\"] = ('batch', 'model', None)")
    assert fix.endswith(f"  # in front of {QUERY!r}")


@pytest.mark.parametrize("lead", [(), (3,), (3, 4)], ids=["", "stacked", "experts"])
@pytest.mark.parametrize(
    ("wrong", "fix"),
    [
        ({"(query|key|value)": (..., "model", "data", None)}, "'data', 'model', None)"),
        ({"/out": (..., "data", None, "model")}, "'model', None, 'data')"),
        ({"up": (..., "model", "data")}, "'data', 'model')"),
        ({"down": (..., "data", "model")}, "'model', 'data')"),
    ],
)
def test_axes_the_other_way_round(lead: Any, wrong: Any, fix: str) -> None:
    """In layers that are stacked, too; the batch belongs on the model dim."""
    right: dict[str, Any] = {
        "(query|key|value)": (..., "data", "model", None),
        "/out": (..., "model", None, "data"),
        "up": (..., "data", "model"),
        "down": (..., "model", "data"),
    }
    tree = {
        "attention": {
            **{name: kernel(*lead, 64, 8, 16) for name in ("query", "key", "value")},
            "out": kernel(*lead, 8, 16, 64),
        },
        "mlp": {"up": kernel(*lead, 64, 256), "down": kernel(*lead, 256, 64)},
    }
    assert swapped(tree, right, "data=2,model=4") == []
    ((pattern, code),) = swapped(tree, right | wrong, "data=2,model=4")
    layout_map = mapped(list((right | wrong).items()))
    assert pattern in wrong and fix in code
    exec(code, {"layout_map": layout_map})
    assert not [i for i in flm.lint(layout_map.resolve(tree)) if i.code == "LM110"]
    if not lead:  # without a batch on the mesh, what most bytes have is right
        assert [p for p, _ in swapped(tree, right | wrong, "data=1,model=4")] == [
            pattern
        ]


def test_a_rule_for_biases_too_stays_and_another_comes_in_front() -> None:
    tree = {"up": kernel(64, 256) | {"bias": struct(256)}, "gate": kernel(64, 256)}
    tree |= {"down": kernel(256, 64)}
    rules = {"up": ("model", ...), "gate": (None, "model"), "down": ("model", None)}
    ((pattern, fix),) = swapped(tree, rules, "data=1,model=4")
    assert pattern == "up"
    assert fix == "layout_map[\"up/kernel\"] = (None, 'model')  # in front of 'up'"


@pytest.mark.parametrize(
    "rules",
    [
        [("kernel", ("model", None))],
        [("(up|gate|q)/kernel", ("data", "model")), ("kernel", ("model", "data"))],
        [("(up|gate|q)/kernel", ("model", None)), ("(down|o)/kernel", ("model", None))],
        [("(up|gate|q)/kernel", (None, "data")), ("(down|o)/kernel", (None, "data"))],
    ],
)
def test_sharding_for_memory_does_not_look_swapped(rules: Any) -> None:
    tree = {"gate": kernel(64, 256), "o": kernel(64, 64), "q": kernel(64, 64), **MLP}
    assert swapped(tree, rules, "data=2,model=4") == []
    unrelated = {"w1": struct(8, 16), "w2": struct(8, 16)}  # w2 does not follow w1
    both = [("w1", ("data", "model")), ("w2", ("data", "model"))]
    assert swapped(unrelated, both, "data=2,model=4") == []


# ---------------------------------------------------------------- what is not reported


def test_a_model_in_good_order_has_no_findings() -> None:
    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.attention = nnx.MultiHeadAttention(
                4, 64, use_bias=False, decode=False, rngs=rngs
            )
            self.up = nnx.Linear(64, 256, rngs=rngs)
            self.down = nnx.Linear(256, 64, rngs=rngs)
            self.norm = nnx.RMSNorm(64, rngs=rngs)

    def training() -> Any:
        model = nnx.List([Block(nnx.Rngs(0)) for _ in range(2)])
        return {"model": model, "optimizer": nnx.Optimizer(model, tx, wrt=nnx.Param)}

    tx = optax.adafactor(1e-3, min_dim_size_to_factor=8)
    rules = [
        *MLP_RULES,
        ("up/bias", ("model",)),
        ("attention/(query|key|value)/kernel", (None, "model", None)),
        ("attention/out/kernel", ("model", None, None)),
        ("norm/scale|down/bias", None),
    ]
    for mesh in ("data=2,model=4", "data=8,model=4", "data=1,model=1"):
        report = on(training, rules, mesh=mesh, overlap="error")
        assert [str(issue) for issue in report] == []
    resolution = mapped(rules).resolve(training)
    assert not flm.lint(resolution, max_replicated=0.02) and not resolution.unmatched


def test_trees_of_nothing_and_of_one_leaf() -> None:
    assert flm.lint(mapped([])) == flm.lint([]) == flm.lint({}) == on({}, []) == ()
    assert on({"step": 3.0, "name": "text"}, [(".*", None)], strict=False) == ()
    _, issue, _ = on(struct(8), [("a", ("data",))])
    assert issue.message.startswith("the leaf (8,): matched by no rule")
    assert issue.fix.startswith("layout_map[\".*\"] = ('model',)")


def on_a_pod(**more: Any) -> flm.Resolution:
    """120 layers, each less than 1 % of the bytes, on 512 devices."""
    layer = {"gate": kernel(4096, 8192), "up": kernel(4096, 8192), **more}
    tree = {"layers": {str(number): layer for number in range(120)}}
    layout_map = mapped([("(gate|up)/kernel", ("data", "model"))], "data=64,model=8")
    return layout_map.resolve(tree)


def test_what_fills_each_of_many_devices_is_large() -> None:
    """A device's warning says the same; little of both is quiet."""
    resolution = on_a_pod(adapter=kernel(256, 64))
    with pytest.warns(flm.LayoutWarning, match="<0.1%|< 0.1%|0.1% of the bytes") as w:
        resolution.announce()
    assert "% of what each device holds)" in str(w[0].message)
    (issue,) = [issue for issue in flm.lint(resolution) if issue.code == "LM102"]
    assert "% of what each device holds" in issue.message
    assert flm.lint(on_a_pod(norm={"scale": struct(4096)})) == ()


# ---------------------------------------------------------------- what is reported too


def test_what_does_not_fit_hides_nothing_else() -> None:
    """It is reported once, and so is everything else."""
    tree = {**MLP, "odd": kernel(64, 99), "gate": kernel(64, 512)}
    rules = [("odd|up", (None, "model")), ("nothing", None)]
    report = unfit(tree, rules, "data=2,model=4")
    assert [(i.code, i.path) for i in report] == [
        ("LM114", "odd/kernel"),
        ("LM101", None),
        ("LM102", "gate/kernel"),
        ("LM102", "down/kernel"),
    ]


def test_annotations_that_shard_nothing() -> None:
    with nnx.use_eager_sharding(False):
        tree = nnx.State({"w": nnx.Param(struct(64, 64), out_sharding=("odd", None))})
    issues = [i for i in flm.lint(mapped(MLP_RULES).resolve(tree)) if i.code == "LM105"]
    assert len(issues) == 1 and "its annotation shards nothing" in issues[0].message


def test_what_pairs_may_hold() -> None:
    rule = flm.Rule("up", ("model",), rank="skip")
    report = flm.lint([rule, ("up", None), 7, ("down",)])
    assert [issue.code for issue in report] == ["LM002"] * 3
    assert "the pattern 'up' has a rule already" in report[0].message
    assert "rule 3: not a (pattern, layout) pair or a Rule: 7" in report[1].message


# ------------------------------------------------------------------------ the report


def two_issues() -> Report:
    return on(LAYERS, [("zzz", None), ("down/", ("model", None))])


def test_what_counts_stops_a_program() -> None:
    flm.lint(mapped(MLP_RULES).resolve(MLP), max_replicated=0.02).raise_if_any("info")
    report = flm.lint(mapped(MLP_RULES[:1]).resolve(MLP), max_replicated=0.02)
    with pytest.raises(flm.errors.ResolveError) as caught:
        report.raise_if_any()
    (problem,) = caught.value.problems
    assert problem.startswith("LM115 error: every device")
    with pytest.raises(flm.errors.ResolveError) as caught:
        report.raise_if_any("warning")
    assert [text[:5] for text in caught.value.problems] == ["LM115", "LM102"]
    assert list(caught.value.problems) == report.problems("warning")
    assert str(caught.value).startswith("2 problems in the layout:\n  - LM115 error: ")


def test_codes_and_leaves_that_are_ignored() -> None:
    resolution = mapped([("zz", None), *MLP_RULES]).resolve({**LAYERS, "t": MLP["up"]})
    assert [i.code for i in flm.lint(resolution)] == ["LM101", "LM102"]
    assert [i.code for i in flm.lint(resolution, ignore="LM101")] == ["LM102"]
    assert flm.lint(resolution, ignore=["LM101", "^t/"]) == ()
    replicated = mapped([("down", ("model", None))]).resolve(LAYERS)
    for ignore in ("up/", "LM115"):
        flm.lint(replicated, max_replicated=0.02, ignore=ignore).raise_if_any()
    on_one = replicated.on(flm.DeviceMesh.abstract("model=1"))
    assert not flm.lint(on_one, max_replicated=0.02)


def test_a_report_is_a_tuple_that_prints() -> None:
    report = two_issues()
    first, second = report
    assert report == (first, second) == two_issues() and hash(report) == hash(
        (*report,)
    )
    assert report[1:] == (second,) and first in report and report.index(second) == 1
    copied = pickle.loads(pickle.dumps(report))
    assert copied == report and str(copied) == str(report) == repr(report)
    assert len({first, *copied}) == 2, "issues are values"
    assert str(report).splitlines()[-1] == "2 warnings"
    assert str(flm.lint([])) == "no findings" and not flm.lint([])
