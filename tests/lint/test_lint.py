"""Lint: each code is raised by a mistake, and not raised without one."""

import copy
import dataclasses
import importlib
import json
import pickle
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax
import pytest
from flax import nnx

import flax_layoutmap as flm
from flax_layoutmap._lint.lint import CODES, LintReport

MESH = flm.DeviceMesh.abstract("data=2,model=4")


def struct(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def mapped(rules: Any = (), mesh: Any = MESH, **options: Any) -> flm.LayoutMap:
    mesh = flm.DeviceMesh.abstract(mesh) if isinstance(mesh, str) else mesh
    options = {"overlap": "first", **options}
    return flm.LayoutMap.from_rules(rules, mesh, **options)


def alone(rules: Any, **options: Any) -> LintReport:
    return flm.lint(mapped(rules, **options))


def on(tree: Any, rules: Any, *, tile: Any = None, **options: Any) -> LintReport:
    return flm.lint(mapped(rules, **options).resolve(tree), tile=tile)


def unfit(tree: Any, rules: Any, mesh: str, **options: Any) -> LintReport:
    """What lint says of what resolving refuses."""
    with pytest.raises(flm.errors.ResolveError) as caught:
        mapped(rules, mesh, **options).resolve(tree)
    return flm.lint(caught.value.resolution)


def kernel(*shape: int) -> dict[str, Any]:
    return {"kernel": struct(*shape)}


MLP = {"up": kernel(64, 256), "down": kernel(256, 64)}
MLP_RULES = [("up/kernel", (None, "model")), ("down/kernel", ("model", None))]
LAYERS = {f"layers_{number}": MLP for number in range(3)}


def wrong_mesh() -> LintReport:
    rule = flm.Rule("up/kernel", (None, "modle"))
    return flm.lint(flm.RuleSet((rule,), mesh=MESH, batch=("data",)))


def wrong_batch() -> LintReport:
    return flm.lint(flm.RuleSet((), mesh=MESH, batch=("date",)))


def training(state: Any, optimizer: Any = ()) -> LintReport:
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


def decoder(
    rules: dict[str, tuple[Any, ...]], mesh: str = "data=2,model=4", **options: Any
) -> LintReport:
    """What lint finds in two layers of attention and feed-forward."""
    layer = {
        **{name: kernel(64, 8, 16) for name in ("query", "key", "value")},
        "out": kernel(8, 16, 64),
        **MLP,
    }
    return on({"layers": [layer, layer]}, list(rules.items()), mesh=mesh, **options)


ATTENTION = {
    "(query|key|value)/kernel": ("data", "model", None),
    "out/kernel": ("model", None, "data"),
}
FEED_FORWARD = {"up/kernel": ("data", "model"), "down/kernel": ("model", "data")}
FSDP: dict[str, tuple[Any, ...]] = {
    "(query|key|value|up)/kernel": ("fsdp", ...),
    "(out|down)/kernel": (..., "fsdp"),
}
SKIP = flm.Rule("kernel", ("model", None), rank="skip")


def ranks_of_state(axes: tuple[Any, ...]) -> LintReport:
    layout_map = mapped([("kernel", ("model", None))])
    layout_map.optimizer["kernel"] = axes
    return flm.lint(layout_map)


def replicated_share(tree: Any, most: float, **options: Any) -> LintReport:
    resolution = mapped([("down", ("model", None))], **options).resolve(tree)
    return flm.lint(resolution, max_replicated=most)


class Case(NamedTuple):
    """What provokes a finding, the finding, and what is much like it and quiet."""

    provoke: Callable[[], LintReport]
    text: str
    quiet: Callable[[], LintReport]


CASES: dict[str, Case] = {
    "LM001": Case(
        lambda: flm.lint([("up/(kernel", None), *MLP_RULES]),
        "LM001 error: rule 1: the pattern 'up/(kernel' is not a regular expression: "
        "missing ), unterminated subpattern at position 3; escape special characters "
        "with re.escape(...)\n  fix: escape it: 'up/\\\\(kernel'",
        lambda: flm.lint(MLP_RULES),
    ),
    "LM002": Case(
        lambda: flm.lint({"up": ("model", "model"), "down": None}),
        "LM002 error: rule 1: rule 'up': the layout ('model', 'model') uses the mesh "
        "axis 'model' twice; each axis may shard one dim only\n"
        '  fix: write (pattern, axes) with one entry per dim, such as (None, "model")',
        lambda: flm.lint({"up": ("model", None), "down": None}),
    ),
    "LM003": Case(
        wrong_mesh,
        "LM003 error: rule 1 'up/kernel' → (None, 'modle'): the mesh 'data=2,model=4' "
        "has no axis 'modle'\n  fix: layout_map[\"up/kernel\"] = (None, 'model')",
        lambda: alone(MLP_RULES),
    ),
    "LM003, batch": Case(
        wrong_batch,
        "LM003 error: batch: the mesh 'data=2,model=4' has no axis 'date'\n"
        '  fix: batch="data"',
        lambda: alone(MLP_RULES),
    ),
    "LM004": Case(
        lambda: alone([*MLP_RULES, ("out/kernel", ("modle", None))], mesh=None),
        "LM004 warning: rule 3 'out/kernel' → ('modle', None) is the only one with the "
        "axis 'modle'; 2 others have 'model'\n"
        "  fix: layout_map[\"out/kernel\"] = ('model', None)",
        lambda: alone([*MLP_RULES, ("out/kernel", ("model2", None))], mesh=None),
    ),
    "LM005": Case(
        lambda: alone([("up//kernel", (None, "model"))]),
        "LM005 error: rule 1 'up//kernel' → (None, 'model') can match no path "
        "(match='search'): the parts of a path are not empty\n"
        "  fix: layout_map[\"up/kernel\"] = (None, 'model')",
        lambda: alone([("/up/kernel", (None, "model"))]),  # not at the beginning
    ),
    "LM006": Case(
        lambda: alone([("^/up/kernel", (None, "model"))]),
        "LM006 error: rule 1 '^/up/kernel' → (None, 'model') can match no path "
        "(match='search'): no path begins with '/'\n"
        "  fix: layout_map[\"up/kernel\"] = (None, 'model')",
        lambda: alone([("(^|/)up/kernel$", (None, "model"))]),
    ),
    "LM006, the end": Case(
        lambda: alone([("up/kernel$/", (None, "model"))]),
        "LM006 error: rule 1 'up/kernel$/' → (None, 'model') can match no path "
        "(match='search'): no path ends with '/'\n"
        "  fix: layout_map[\"up/kernel\"] = (None, 'model')",
        lambda: alone([("up/kernel(/|$)", (None, "model"))]),
    ),
    "LM006, fullmatch": Case(
        lambda: alone([("/up/kernel", (None, "model"))], match="fullmatch"),
        "LM006 error: rule 1 '/up/kernel' → (None, 'model') can match no path "
        "(match='fullmatch'): no path begins with '/'\n"
        "  fix: layout_map[\".*/up/kernel\"] = (None, 'model')",
        lambda: alone([(".*/up/kernel", (None, "model"))], match="fullmatch"),
    ),
    "LM007": Case(
        lambda: alone([(".*kernel", None), ("up/.*kernel", (None, "model"))]),
        "LM007 warning: rule 2 'up/.*kernel' → (None, 'model') decides nothing: rule 1 "
        "'.*kernel' → replicated matches every path that it matches, and wins "
        "(overlap='first')\n  fix: put 'up/.*kernel' in front of '.*kernel'",
        lambda: alone([("up/.*kernel", (None, "model")), (".*kernel", None)]),
    ),
    "LM007, last": Case(
        lambda: alone(
            [("up/.*kernel", (None, "model")), (".*kernel", None)], overlap="last"
        ),
        "LM007 warning: rule 1 'up/.*kernel' → (None, 'model') decides nothing: rule 2 "
        "'.*kernel' → replicated matches every path that it matches, and wins "
        "(overlap='last')\n  fix: put 'up/.*kernel' behind '.*kernel'",
        lambda: alone(
            [(".*kernel", None), ("up/.*kernel", (None, "model"))], overlap="last"
        ),
    ),
    "LM007, a path": Case(
        lambda: alone([("kernel", None), ("up/kernel", (None, "model"))]),
        "LM007 info: rule 2 'up/kernel' → (None, 'model') decides nothing, but for a "
        "leaf whose whole path is 'up/kernel': rule 1 'kernel' → replicated matches "
        "every path that it matches, and wins (overlap='first')\n"
        "  fix: put 'up/kernel' in front of 'kernel'",
        lambda: on(MLP, [("kernel$", None), ("up/kernel", (None, "model"))]),
    ),
    "LM008": Case(
        lambda: alone(
            [("kernel", None), ("up/.*kernel", (None, "model"))], overlap="error"
        ),
        "LM008 error: rule 2 'up/.*kernel' → (None, 'model') clashes with rule 1 "
        "'kernel' → replicated, which matches every path that it matches\n"
        "  fix: make 'kernel' narrower, or use overlap=\"first\" with the narrow rule "
        "in front",
        # The key of one leaf wins over patterns.
        lambda: alone(
            [("kernel", None), ("up/kernel", (None, "model"))], overlap="error"
        ),
    ),
    "LM009": Case(
        lambda: alone(
            [("kernel", ("model", None)), ("out/.*kernel", ("model", None, None))]
        ),
        "LM009 error: rule 2 'out/.*kernel' → ('model', None, None) is for arrays of 3 "
        "dims, but rule 1 'kernel' → ('model', None), which matches every path that it "
        'matches, is for 2\n  fix: del layout_map["kernel"]; '
        "layout_map.add(flm.Rule('kernel', ('model', None), rank=\"skip\"))",
        lambda: alone([SKIP, ("out/.*kernel", ("model", None, None))]),
    ),
    "LM009, state": Case(
        lambda: ranks_of_state(("data",)),
        "LM009 error: optimizer rule 1 'kernel' → ('data',) is for parameters of 1 "
        "dims, and matches all of rule 1 'kernel' → ('model', None), of 2\n"
        "  fix: layout_map.optimizer.add(flm.Rule('kernel', ('data',), rank=\"skip\"))",
        lambda: ranks_of_state(("data", "model")),
    ),
    "LM010": Case(
        lambda: on(
            {"up": {"kernel": struct(8, 8), "kernel_scale": struct(8, 8)}},
            [(".*kernel", (None, "model"))],
        ),
        "LM010 info: rule 1 '.*kernel' → (None, 'model') begins with '.*', as for "
        "match='fullmatch', but with match='search' it also matches 'up/kernel_scale'\n"
        "  fix: layout_map[\".*kernel$\"] = (None, 'model')  # if paths are to end "
        "there",
        lambda: on({"up": kernel(8, 8)}, [(".*kernel", (None, "model"))]),
    ),
    "LM010, no model": Case(
        lambda: alone([(".*kernel", (None, "model"))]),
        "LM010 info: rule 1 '.*kernel' → (None, 'model') begins with '.*', as for "
        "match='fullmatch', but with match='search' it also matches 'kernelx'\n"
        "  fix: layout_map[\".*kernel$\"] = (None, 'model')  # if paths are to end "
        "there",
        lambda: alone([(".*kernel$", (None, "model")), (".*", None)]),
    ),
    "LM010, fullmatch": Case(
        lambda: alone([("(^|/)up/.*", (None, "model"))], match="fullmatch"),
        "LM010 warning: rule 1 '(^|/)up/.*' → (None, 'model') is written for "
        "match='search': with match='fullmatch' it begins where the path begins, and "
        "no path begins with '/'\n  fix: layout_map[\"(.*/)?up/.*\"] = "
        "(None, 'model')  # in place of layout_map[\"(^|/)up/.*\"]",
        lambda: alone([("(.*/)?up/.*", (None, "model"))], match="fullmatch"),
    ),
    "LM011": Case(
        lambda: alone([(r"(\w+_?)+/kernel", (None, "model"))]),
        "LM011 warning: rule 1 '(\\\\w+_?)+/kernel' → (None, 'model') may take very "
        "long to try: a repetition in it can read one text in several ways, so that "
        "each further character doubles the time\n"
        "  fix: write it so that the next character tells how it goes on: ([^/]+/)* in "
        "place of (.*/)*, a{0,9} in place of (a?){9}, [^/]+ in place of .*; drop .* at "
        "the ends",
        lambda: alone([(r"(\w+/)+kernel", (None, "model"))]),
    ),
    "LM101": Case(
        lambda: on(MLP, [("up/kernal", None), *MLP_RULES]),
        "LM101 warning: rule 1 'up/kernal' → replicated matches no leaf; the closest "
        "path ends in 'up/kernel'\n"
        '  fix: layout_map["up/kernel"] = None  # not layout_map["up/kernal"]',
        lambda: on(MLP, MLP_RULES),
    ),
    "LM102": Case(
        lambda: on(LAYERS, [("down", ("model", None))]),
        "LM102 warning: layers_0/up/kernel (64,256) and 2 more alike: matched by no "
        "rule, so that every device holds all 3 in full (50.0% of the bytes)\n"
        "  fix: layout_map[\"up/kernel\"] = (None, 'model')  # or None: replicated, on "
        "purpose",
        lambda: on({**LAYERS, "scale": struct(64)}, MLP_RULES),
    ),
    "LM102, no rules": Case(
        lambda: on(LAYERS, []),
        "LM102 info: there are no rules: 6 leaves are replicated, 100.0% of the bytes\n"
        "  fix: layout_map[\"down/kernel\"] = ('model', None)  # or None: replicated, "
        "on purpose",
        lambda: on(LAYERS, [(".*", None)]),
    ),
    "LM103": Case(
        lambda: on(
            {"up": kernel(64, 102)},
            [("up/kernel", ("data", "model"))],
            indivisible="replicate",
        ),
        "LM103 warning: up/kernel (64,102): rule 1 'up/kernel' → ('data', 'model'): "
        "dim 1 of size 102 does not divide by 'model' (4), so it is replicated\n"
        "  fix: layout_map[\"up/kernel\"] = ('data', None), or a size of 104",
        lambda: on(
            {"up": kernel(64, 104)},
            [("up/kernel", ("data", "model"))],
            indivisible="replicate",
        ),
    ),
    "LM104": Case(
        lambda: on(
            {"embed": {"embedding": struct(50257, 8)}},
            [("embedding", ("model", None))],
            indivisible="replicate",
        ),
        "LM104 warning: embed/embedding (50257,8): rule 1 'embedding' → ('model', "
        "None): dim 0 of size 50257 does not divide by 'model' (4), so it is "
        "replicated; 3 more rows would do, 50260\n"
        "  fix: pad the vocabulary from 50257 to 50260, or to 50688 for tiles of 128 "
        "on each device",
        lambda: on(
            {"embed": {"embedding": struct(50260, 8)}},
            [("embedding", ("model", None))],
            indivisible="replicate",
        ),
    ),
    "LM105": Case(
        lambda: on(LAYERS, [("up/kernel", (None, "model")), (".*", None)]),
        "LM105 warning: layers_0/down/kernel (256,64) and 2 more alike: replicated by "
        "the catch-all rule 2 '.*' → replicated; every device holds all 3 in full "
        "(50.0% of the bytes)\n  fix: layout_map[\"down/kernel\"] = ('model', None)  "
        "# or None: replicated, on purpose",
        lambda: on({**LAYERS, "scale": struct(64)}, [*MLP_RULES, (".*", None)]),
    ),
    "LM105, on purpose": Case(
        lambda: on(MLP, [("up/kernel", (None, "model")), ("down", None)]),
        "LM105 info: down/kernel (256,64): replicated by rule 2 'down' → replicated; "
        "every device holds it in full (50.0% of the bytes)\n"
        "  fix: layout_map[\"down/kernel\"] = ('model', None)  # or None: replicated, "
        "on purpose",
        lambda: on({**MLP, "bias": struct(2048)}, [*MLP_RULES, ("bias", None)]),
    ),
    "LM106": Case(
        lambda: training(adam(), {"up": None}),
        "LM106 warning: opt_state/0/mu/up/kernel (64,256) of the sharded parameter "
        "'up/kernel': optimizer rule 1 'up' → replicated replicates it; every device "
        "holds it in full (16.7% of the bytes)\n"
        '  fix: del layout_map.optimizer["up"]  # it follows the parameter',
        lambda: training(adam()),
    ),
    "LM106, unknown": Case(
        lambda: training(unknown_state()),
        "LM106 warning: opt_state/1/odd/table (64,512): optimizer state of an unknown "
        "kind (belongs to no parameter); every device holds it in full (50.0% of the "
        "bytes)\n  fix: flm.resolve(state, layout_map, params=params, tx=tx)",
        lambda: training(adam(), {"up": ("data", "model")}),
    ),
    "LM107": Case(
        lambda: on(MLP, MLP_RULES, mesh="data=8,model=1"),
        "LM107 info: mesh axis 'model' has size 1, so that rule 1 'up/kernel' → (None, "
        "'model') and 1 more shard nothing over it\n"
        "  fix: layout_map.on(mesh), with a mesh whose 'model' is larger",
        lambda: on(MLP, MLP_RULES, mesh="data=1,model=1"),
    ),
    "LM108": Case(
        lambda: on(attention(2), HEADS, indivisible="replicate"),
        "LM108 warning: attention/key/kernel (64,2,16): rule 1 "
        "'(query|key|value)/kernel' → (None, 'model', None): dim 1 of size 2 does not "
        "divide by 'model' (4), so it is replicated; there are fewer heads (2) than "
        "devices on it, so they cannot be split\n"
        '  fix: layout_map["key/kernel"] = None  # in a rule in front of '
        "'(query|key|value)/kernel', or a smaller axis",
        lambda: on(attention(4), HEADS, indivisible="replicate"),
    ),
    "LM109": Case(
        lambda: on(MLP, MLP_RULES, tile="tpu"),
        "LM109 warning: down/kernel (256,64): each shard (64,64) (rule 2 'down/kernel')"
        " is padded to tiles of 8 × 128, 2.0 times its size: 16.0 KiB of padding per "
        "device\n  fix: shard another dim, or over fewer devices, so that two dims of "
        "a shard are multiples of 8 and 128",
        # Three dims, of which the compiler can lay two in tiles.
        lambda: on(
            {"query": kernel(256, 4, 128)},
            [("query", (None, "model", None))],
            tile="tpu",
        ),
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
        "'model') looks swapped beside 'gate/kernel', rule 2 '(gate|up)/k' → (None, "
        "'model'): both on their out-dims, so that the features are gathered in between"
        "\n  fix: layout_map.replace(\"(gate|up|down)$|down/\", ('model', None))",
        lambda: on(
            {"gate": kernel(64, 256), **MLP}, [*MLP_RULES, ("g", (None, "model"))]
        ),
    ),
    "LM110, siblings": Case(
        lambda: on(
            {name: kernel(64, 64) for name in "qkv"},
            [("(q|k)/", (None, "model")), ("v/", ("model", None))],
        ),
        "LM110 warning: v/kernel (64,64): rule 2 'v/' → ('model', None) looks swapped "
        "beside 'k/kernel', rule 1 '(q|k)/' → (None, 'model'): the same axes on other "
        "dims\n  fix: layout_map.replace(\"v/\", (None, 'model'))",
        # What o takes apart lies on its in-dims.
        lambda: on(
            {name: kernel(64, 64) for name in "qkvo"},
            [("(q|k|v)/", (None, "model")), ("o/", ("model", None))],
        ),
    ),
    "LM110, of stacked layers": Case(
        lambda: on(
            {"up": kernel(3, 8, 64, 256), "down": kernel(3, 8, 256, 64)},
            [("kernel", (..., "model")), ("up", (..., "model"))],
            overlap="last",
        ),
        "LM110 warning: down/kernel (3,8,256,64): rule 1 'kernel' → (..., 'model') "
        "looks swapped beside 'up/kernel', rule 2 'up' → (..., 'model'): both on their "
        "out-dims, so that the features are gathered in between\n"
        "  fix: layout_map.replace(\"kernel\", (None, None, 'model', None))",
        lambda: on(
            {"up": kernel(3, 8, 64, 256), "down": kernel(3, 8, 256, 64)},
            [("up", (..., "model")), ("down", (..., "model", None))],
        ),
    ),
    "LM110, the model dim": Case(
        lambda: decoder(
            FEED_FORWARD
            | ATTENTION
            | {"(query|key|value)/kernel": ("model", "data", None)}
        ),
        "LM110 warning: layers/0/key/kernel (64,8,16) and 5 more alike: rule 3 "
        "'(query|key|value)/kernel' → ('model', 'data', None) looks swapped beside "
        "'layers/0/down/kernel', rule 2 'down/kernel' → ('model', 'data'): here "
        "'model' shards the model dim, there 'data'\n  fix: layout_map.replace("
        "\"(query|key|value)/kernel\", ('data', 'model', None))",
        lambda: decoder(ATTENTION | FEED_FORWARD),
    ),
    "LM111": Case(
        lambda: on(LAYERS, [*MLP_RULES, ("up", ("model", None))]),
        "LM111 warning: rule 3 'up' → ('model', None) decides no leaf: all that it "
        "matches are decided by others, such as rule 1 'up/kernel' → (None, 'model') "
        "(overlap='first')\n  fix: put 'up' before 'up/kernel', or del "
        'layout_map["up"]',
        lambda: on(
            {**LAYERS, "up": {"bias": struct(64, 4)}},
            [*MLP_RULES, ("up", ("model", None))],
        ),
    ),
    "LM112": Case(
        lambda: on(MLP, [("kernel", ("data", None))]),
        "LM112 warning: mesh axis 'model' of size 4 shards nothing and is no batch "
        "axis, so that 4 devices do the same work on the same 64.0 KiB\n"
        "  fix: name 'model' in a rule, or in LayoutMap(mesh, batch=('data', 'model'))",
        lambda: on(MLP, [("kernel", ("data", None))], batch=("data", "model")),
    ),
    "LM113": Case(
        lambda: on(
            {f"layers_{n}": {"w": struct(8, 8)} for n in (1, 10)},
            [("layers_1", ("model", None))],
        ),
        "LM113 warning: rule 1 'layers_1' → ('model', None) matches 'layers_1/w', and "
        "'layers_10/w' too, in the middle of a number\n"
        "  fix: layout_map[\"layers_1(/|$)\"] = ('model', None)",
        lambda: on(
            {f"layers_{n}": {"w": struct(8, 8)} for n in (1, 2)},
            [("layers_1", ("model", None)), ("layers_2", None)],
        ),
    ),
    "LM113, names": Case(
        lambda: on(
            {"attention": {"out": kernel(8, 8)}, "layout": kernel(8, 8)},
            [("out/kernel", ("model", None))],
        ),
        "LM113 info: rule 1 'out/kernel' → ('model', None) matches "
        "'attention/out/kernel', and 'layout/kernel' too, in the middle of a name\n"
        "  fix: layout_map[\"(^|/)out/kernel\"] = ('model', None)",
        # `norm` is a word of `attention_norm`.
        lambda: on(
            {"norm": {"scale": struct(8)}, "attention_norm": {"scale": struct(8)}},
            [("norm/scale", ("model",))],
        ),
    ),
    "LM114": Case(
        lambda: unfit(LAYERS, MLP_RULES, "data=2,model=3"),
        "LM114 error: layers_0/up/kernel (64,256) and 2 more alike: rule 1 'up/kernel' "
        "→ (None, 'model'): dim 1 of size 256 does not divide by mesh axis 'model' of "
        "size 3\n  fix: change the size, use another layout (None for this dim), or "
        'indivisible="replicate"',
        lambda: on(LAYERS, MLP_RULES, mesh="data=2,model=4"),
    ),
    "LM114, rank": Case(
        lambda: unfit(MLP, [("kernel", ("data", "model", None))], "data=2,model=4"),
        "LM114 error: up/kernel (64,256): rule 1 'kernel' → ('data', 'model', None) "
        "has 3 dims, the leaf has 2\n  fix: narrow the pattern, or Rule(pattern, "
        'layout, rank="skip")',
        lambda: on(MLP, [SKIP]),
    ),
    "LM115": Case(
        lambda: replicated_share(LAYERS, 0.02),
        "LM115 error: every device of mesh data=2,model=4 holds 50.0% of the bytes in "
        "full, more than max_replicated=2.0%; the largest:\n"
        "    layers_0/up/kernel (64,256) and 2 more alike: 50.0%, no rule\n"
        "  fix: layout_map[\"up/kernel\"] = (None, 'model')  # or None: replicated, on "
        "purpose",
        lambda: replicated_share(LAYERS, 0.5),
    ),
    "LM116": Case(
        lambda: decoder(FSDP, "data=2,fsdp=4", batch=("data",)),
        "LM116 warning: mesh axis 'fsdp' of size 4 shards the model dim of "
        "layers/0/down/kernel (256,64) and 11 more alike, as for FSDP, but neither the "
        "batch, ('data',), nor activations, so that its 4 devices get the same part of "
        "each batch\n  fix: LayoutMap(mesh, batch=('data', 'fsdp'))",
        lambda: decoder(FSDP, "data=2,fsdp=4", batch=("data", "fsdp")),
    ),
    "LM114, two rules": Case(
        lambda: unfit(
            MLP, [("up", (None, "model")), ("kernel", None)], "model=2", overlap="error"
        ),
        "LM114 error: up/kernel (64,256): rules with different layouts match it: rule "
        "1 'up' → (None, 'model'), rule 2 'kernel' → replicated\n  fix: make one "
        'pattern narrower, use the path itself as key, or overlap="first" or "last"',
        lambda: on(MLP, [("up", (None, "model")), ("kernel", None)]),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_found(name: str) -> None:
    code = name.partition(",")[0]
    found = CASES[name].provoke()
    assert CASES[name].text in [str(issue) for issue in found if issue.code == code]
    for issue in found:
        assert issue.message and issue.fix and issue.code in CODES
        assert issue.url == f"docs/lint.md#{issue.code.lower()}"
        assert (issue.pattern is None) == (issue.rule_number is None)
        if issue.path is not None:
            assert issue.leaves > 0
        assert json.loads(json.dumps(dataclasses.asdict(issue)))["code"] == issue.code


@pytest.mark.parametrize("name", CASES)
def test_it_stays_quiet(name: str) -> None:
    code = name.partition(",")[0]
    found = [str(issue) for issue in CASES[name].quiet() if issue.code == code]
    assert found == []


def test_every_code_has_a_case() -> None:
    assert sorted({name.partition(",")[0] for name in CASES}) == sorted(CODES)


def test_what_does_not_fit_hides_nothing_else() -> None:
    """It is reported once, and so is everything else."""
    tree = {**MLP, "odd": kernel(64, 99), "gate": kernel(64, 512)}
    rules = [("odd|up", (None, "model")), ("nothing", None)]
    found = unfit(tree, rules, "data=2,model=4")
    assert [(i.code, i.path) for i in found] == [
        ("LM114", "odd/kernel"),
        ("LM101", None),
        ("LM102", "gate/kernel"),
        ("LM102", "down/kernel"),
    ]


def test_a_tree_that_does_not_fit_is_lost_in_a_pickle() -> None:
    with pytest.raises(flm.errors.ResolveError) as caught:
        mapped(MLP_RULES, "model=3").resolve(MLP)
    error = pickle.loads(pickle.dumps(caught.value))
    assert str(error) == str(caught.value) and error.problems == caught.value.problems
    assert caught.value.resolution is not None and error.resolution is None


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
    (issue, *_) = [
        issue
        for issue in on(tree, rules, indivisible="replicate")
        if issue.code == name
    ]
    written = FIXED.search(issue.fix)
    assert written is not None
    pattern, axes = eval(written[1]), eval(written[2])
    after = on(tree, [(pattern, axes), *rules], indivisible="replicate")
    assert issue.path not in [other.path for other in after if other.code == name]


# ---------------------------------------------------------------- what is not reported


def test_good_layouts_have_no_findings() -> None:
    """Common ways to write rules, in each mode, are left in peace."""
    attention_rules = [
        ("attention/(query|key|value)/kernel", (None, "model", None)),
        ("attention/out/kernel", ("model", None, None)),
    ]
    fsdp = [(".*", ("data", "model"))]
    stages = [(r"layers/\d+/up/kernel", (None, "model")), ("layers_1/", None)]
    for rules, options in (
        ([*MLP_RULES, *attention_rules, ("norm/scale|bias", None)], {}),
        ([("conv2d.*kernel", (..., "model")), ("d1.kernel", ("data", "model"))], {}),
        (
            [(".*(gate|up)/kernel", (None, "model")), (".*", None)],
            {"match": "fullmatch"},
        ),
        ([("(?i)KERNEL", ("model", None)), (r"\bbias\b", None)], {}),
        ([("(^|/)mlp(/|$)", ("model", None)), ("mlp/output", ("data", None))], {}),
        (fsdp, {}),
        (stages, {}),
    ):
        assert [str(issue) for issue in alone(rules, **options)] == []


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
        found = on(training, rules, mesh=mesh, overlap="error")
        assert [str(issue) for issue in found] == []
    resolution = mapped(rules).resolve(training)
    assert not flm.lint(resolution, max_replicated=0.02) and not resolution.unmatched


def test_a_fully_sharded_model_does_not_look_swapped() -> None:
    tree = {"gate": kernel(64, 256), "o": kernel(64, 64), "q": kernel(64, 64), **MLP}
    alike = {"w1": struct(8, 16), "w2": struct(8, 16)}  # w2 is not what follows w1
    both = [("w1", ("data", "model")), ("w2", ("data", "model"))]
    assert "LM110" not in [issue.code for issue in on(alike, both)]
    for rules in (
        [("kernel", ("model", None))],
        [("(up|gate|q)/kernel", ("data", "model")), ("kernel", ("model", "data"))],
        [("(up|gate|q)/kernel", ("model", None)), ("(down|o)/kernel", ("model", None))],
        [("(up|gate|q)/kernel", (None, "data")), ("(down|o)/kernel", (None, "data"))],
    ):
        assert "LM110" not in [issue.code for issue in on(tree, rules)]


def test_heads_are_no_stacked_layers() -> None:
    query = {name: kernel(64, 4, 16) for name in ("query", "key", "value")}
    alike = ("(query|key|value)", ("data", "model", None))
    assert "LM110" not in [issue.code for issue in on(query, [alike])]
    last = ("value", ("data", None, "model"))
    (issue,) = [issue for issue in on(query, [last, alike]) if issue.code == "LM110"]
    assert issue.path == "value/kernel", "what fewer have"


def test_rules_for_a_part_are_no_warning() -> None:
    rules = [*MLP_RULES, ("embedding", ("model", None))]
    (unused,) = on(MLP, rules, strict=False)
    assert (unused.code, unused.severity) == ("LM101", "info")


@pytest.mark.parametrize(
    ("pattern", "options", "hint", "fix"),
    [
        ("up/kernel", {"match": "fullmatch"},
         "with match='fullmatch'; with match='search' it would match 'layers_0/up/kern",
         'layout_map[".*up/kernel"] = None'),
        ("params/layers_0/up", {}, "paths have no 'params/'",
         'layout_map["layers_0/up"] = None'),
        ("up/kernel/value", {}, "a Variable's own 'value' is in no path",
         'layout_map["up/kernel"] = None'),
        (r"up\.kernel", {}, "the parts of a path are joined by '/'",
         'layout_map["up/kernel"] = None'),
        (r"\['up'\]\['kernel'\]", {}, "paths are not bracketed",
         'layout_map["up/kernel"] = None'),
        ("(?i)UP/|zz", {"match": "fullmatch"}, "with match='search' it would match",
         'layout_map["(?i).*(UP/|zz).*"] = None'),
        ("xyz", {}, " matches no leaf", 'del layout_map["xyz"]'),
    ],
)  # fmt: skip
def test_what_an_unused_rule_may_have_meant(
    pattern: str, options: Any, hint: str, fix: str
) -> None:
    found = on(LAYERS, [(pattern, None)], **options)
    (issue,) = [issue for issue in found if issue.code == "LM101"]
    assert hint in issue.message and issue.fix.startswith(fix)


@pytest.mark.parametrize("optional", [True, False])
def test_optional_rules_may_decide_nothing(optional: bool) -> None:
    """They are for the names of other models, and other rules come before them."""
    rules = [
        flm.Rule(pattern, (None, "model"), optional=optional)
        for pattern in ("up/k.*", "down/k.*", "p/k.*")
    ]
    rules.insert(0, flm.Rule("/k", ("model", None), optional=optional))
    codes = [issue.code for issue in alone(rules)]
    assert codes == ([] if optional else ["LM007"] * 3)
    codes = [issue.code for issue in on(MLP, rules)]
    assert codes.count("LM111") == (0 if optional else 3)
    inside = flm.Rule("p/kernel", (None, "model"), optional=optional)
    tree = {"p": kernel(64, 64), **MLP}
    codes = [issue.code for issue in on(tree, [inside, ("kernel", None)])]
    assert ("LM113" in codes) is not optional


def test_a_dead_rule_is_reported_once() -> None:
    found = on(MLP, [("^/up", None), *MLP_RULES])
    assert [issue.code for issue in found] == ["LM006"]


def test_trees_of_nothing_and_of_one_leaf() -> None:
    assert alone([]) == flm.lint([]) == flm.lint({}) == on({}, []) == ()
    assert on({"step": 3.0, "name": "text"}, [(".*", None)], strict=False) == ()
    _, issue, _ = on(struct(8), [("a", ("data",))])
    assert issue.message.startswith("the leaf (8,): matched by no rule")
    assert issue.fix.startswith("layout_map[\".*\"] = ('model',)")


def test_unused_optimizer_rules() -> None:
    (issue,) = training(adam(), {"upp": ("data", "model")})
    assert (issue.code, issue.section, issue.rule_number) == ("LM101", "optimizer", 1)


def test_annotations_that_shard_nothing() -> None:
    with nnx.use_eager_sharding(False):
        tree = nnx.State({"w": nnx.Param(struct(64, 64), out_sharding=("odd", None))})
    found = [i for i in flm.lint(mapped(MLP_RULES).resolve(tree)) if i.code == "LM105"]
    assert len(found) == 1 and "its annotation shards nothing" in found[0].message


def test_the_order_and_the_text() -> None:
    found = on(LAYERS, [("^/", None), ("down", ("model", None))])
    assert [issue.code for issue in found] == ["LM006", "LM102"]
    text = str(found)
    assert text.splitlines()[-1] == "1 error, 1 warning"
    assert "\n  see: docs/lint.md#lm102\n" in text
    assert str(LintReport()) == "no findings"
    assert str(LintReport([*wrong_mesh()] * 2)).endswith("2 errors")


def test_what_pairs_may_hold() -> None:
    rule = flm.Rule("up", ("model",), rank="skip")
    found = flm.lint([rule, ("up", None), 7, ("down",)])
    assert [issue.code for issue in found] == ["LM002"] * 3
    assert "the pattern 'up' has a rule already" in found[0].message
    assert "neither a (pattern, layout) pair nor a Rule: 7" in found[1].message


def test_tiles_of_other_hardware() -> None:
    resolution = mapped(MLP_RULES).resolve(MLP)
    assert flm.lint(resolution, tile=(8, 64)) == ()
    assert [issue.code for issue in flm.lint(resolution, tile=(128, 128))]
    halves = {"up": {"kernel": struct(8, 512, dtype="bfloat16")}}
    on_one = mapped([("up", ("model", None))], batch=("data",)).resolve(halves)
    assert [issue.code for issue in flm.lint(on_one, tile="tpu")] == ["LM109"]


def test_padding_by_an_optimizer_rule() -> None:
    layout_map = mapped([("kernel", None)])
    layout_map.optimizer["kernel"] = (None, "model")
    state = {"params": {"kernel": struct(8, 64)}}
    state["opt_state"] = jax.eval_shape(optax.adam(1e-3).init, state["params"])
    found = [
        issue
        for issue in flm.lint(layout_map.resolve(state), tile=(8, 128))
        if issue.code == "LM109"
    ]
    assert {issue.section for issue in found} == {"optimizer"}
    assert all("(optimizer rule 1 'kernel')" in issue.message for issue in found)


# ------------------------------------------------------------------------ reports


def test_what_counts_stops_a_program() -> None:
    flm.lint(mapped(MLP_RULES).resolve(MLP), max_replicated=0.02).raise_if_any("info")
    report = on(MLP, [("^/", None), ("zzz", None), *MLP_RULES])
    with pytest.raises(flm.errors.ResolveError) as caught:
        report.raise_if_any()
    (problem,) = caught.value.problems
    assert problem.startswith("LM006 error: rule 1 '^/'")
    with pytest.raises(flm.errors.ResolveError) as caught:
        report.raise_if_any("warning")
    assert [text[:5] for text in caught.value.problems] == ["LM006", "LM101"]
    assert list(caught.value.problems) == report.problems("warning")
    assert str(caught.value).startswith("2 problems in the layout:\n  - LM006 error: ")
    with pytest.raises(flm.errors.ResolveError, match="LM006"):
        alone([("^/", None)]).raise_if_any()


def test_codes_and_leaves_that_are_ignored() -> None:
    resolution = mapped([("^/", None), *MLP_RULES]).resolve({**LAYERS, "t": MLP["up"]})
    assert [i.code for i in flm.lint(resolution)] == ["LM006", "LM102"]
    assert [i.code for i in flm.lint(resolution, ignore="LM006")] == ["LM102"]
    assert flm.lint(resolution, ignore=["LM006", "^t/"]) == []
    assert not flm.lint(resolution.rules, ignore=["LM006"])
    replicated = mapped([("down", ("model", None))]).resolve(LAYERS)
    for ignore in ("up/", "LM115"):
        flm.lint(replicated, max_replicated=0.02, ignore=ignore).raise_if_any()
    on_one = replicated.on(flm.DeviceMesh.abstract("model=1"))
    assert not flm.lint(on_one, max_replicated=0.02)


def test_a_report_is_a_sequence() -> None:
    report = on(LAYERS, [("^/", None), ("down", ("model", None))])
    first, second = report
    assert (len(report), report[0], report[-1]) == (2, first, second)
    assert report == [first, second] and report == (first, second)
    assert report[1:] == [second] and report != [second, first] and report != "LM006"
    assert first in report and report.index(second) == 1
    assert hash(report) == hash(on(LAYERS, [("^/", None), ("down", ("model", None))]))
    assert pickle.loads(pickle.dumps(report)) == report
    assert repr(report) == str(report) and not LintReport() and LintReport() == []
    assert LintReport([second, first]) == report  # errors come first


# ----------------------------------------------------------------- assert_covers


def covers(tree: Any, rules: Any, *meshes: Any, **options: Any) -> str:
    layout_map = mapped(rules, mesh=None, overlap="error", **options)
    with pytest.raises(AssertionError) as caught:
        flm.testing.assert_covers(tree, layout_map, meshes)
    return str(caught.value)


def test_a_layout_that_covers_its_model(mesh: flm.DeviceMesh) -> None:
    def make() -> nnx.Module:
        return nnx.List([nnx.Linear(64, 256, use_bias=False, rngs=nnx.Rngs(0))])

    layout_map = mapped([("kernel", (None, "model"))], mesh=None)
    meshes = ["data=16,model=16", {"data": 2, "model": 4}, mesh, mesh.jax_mesh]
    assert flm.testing.assert_covers(make, layout_map, meshes) is None
    flm.testing.assert_covers(make, layout_map, "data=1,model=2")


def test_all_that_is_wrong_on_every_mesh() -> None:
    tree = {**LAYERS, "embed": {"embedding": struct(250, 64)}}
    rules = [*MLP_RULES, ("embedding", ("model", None)), ("zzz", None)]
    text = covers(tree, rules, "data=2,model=2", "data=2,model=4", "data=2,tensor=4")
    assert text.splitlines() == [
        "the layout does not cover the model",
        "on mesh data=2,model=2:",
        "  - LM101 warning: rule 4 'zzz' → replicated matches no leaf",
        '    fix: del layout_map["zzz"]',
        "on mesh data=2,model=4:",
        "  - embed/embedding (250,64): rule 3 'embedding' → ('model', None): dim 0 of "
        "size 250 does not divide by mesh axis 'model' of size 4; change the size, use "
        'another layout (None for this dim), or indivisible="replicate"',
        "  - embed/embedding: pad the vocabulary from 250 to 252, or to 512 for tiles "
        "of 128 on each device  (LM104)",
        "on mesh data=2,tensor=4:",
        "  - rule 'up/kernel': the layout (None, 'model') names the axis 'model', but "
        "the mesh 'data=2,tensor=4' has no such axis",
    ]


def test_alike_leaves_are_one_problem() -> None:
    text = covers(LAYERS, MLP_RULES, "model=3")
    assert text.count("layers_0/up/kernel (64,256)") == 1
    assert text.count("; and 2 more alike") == 2


def test_small_matrices_need_a_rule_too() -> None:
    tree = {"up": kernel(512, 2048), "small": kernel(4, 4), "scale": struct(64)}
    rules = [("up/kernel", (None, "model"))]
    text = covers(tree, rules, "data=2,model=4", "data=4,model=4")
    assert text.splitlines() == [
        "the layout does not cover the model",
        "on every mesh (data=2,model=4, data=4,model=4):",
        "  - small/kernel (4,4): matched by no rule",
        "    fix: layout_map[\"small/kernel\"] = (None, 'model')  # or None: "
        "replicated, on purpose",
    ]
    for rules_, ignore in (([*rules, ("small", None)], ()), (rules, ["small"])):
        layout_map = mapped(rules_, mesh=None)
        flm.testing.assert_covers(tree, layout_map, ["data=2,model=4"], ignore=ignore)


@pytest.mark.parametrize(
    ("meshes", "kind", "message"),
    [
        ([], flm.LayoutError, "assert_covers needs meshes, such as"),
        ([None], flm.LayoutError, "assert_covers: None is no mesh"),
        (
            ["data=-1"],
            flm.errors.MeshError,
            "an abstract mesh has no devices to compute -1",
        ),
    ],
)
def test_meshes_that_are_none(meshes: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind) as caught:
        flm.testing.assert_covers(MLP, mapped(MLP_RULES), meshes)
    assert message in str(caught.value)


# -------------------------------------------------------------- our own examples


@pytest.fixture
def load_example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a script of `examples/`; some import another."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    return importlib.import_module


@pytest.mark.parametrize(
    "name", ["train_lm", "train_linen", "load_hugging_face", "port_from_keras"]
)
def test_the_examples_have_no_findings(
    name: str, load_example: Callable[[str], Any]
) -> None:
    module = load_example(name)
    for mesh in ("data=2,model=4", "data=8,model=1"):
        layout_map = module.layout_map_for(flm.DeviceMesh.abstract(mesh))
        assert [str(issue) for issue in flm.lint(layout_map)] == []


def test_the_language_model_is_covered(load_example: Callable[[str], Any]) -> None:
    module = load_example("train_lm")

    def make() -> nnx.Module:
        return module.LanguageModel(64, 2, 4, rngs=nnx.Rngs(0))

    layout_map = module.layout_map_for(None)
    assert flm.lint(layout_map.on(MESH).resolve(make)) == ()
    flm.testing.assert_covers(make, layout_map, ["data=2,model=4", "data=8,model=2"])


# ------------------------------------------------------------ many rules at once


def test_findings_of_a_rule_set_are_kept_with_it() -> None:
    rules = mapped([("^/up/kernel", (None, "model"))]).freeze()
    assert flm.lint(rules)[0] is flm.lint(rules)[0]
    assert flm.lint(dataclasses.replace(rules, match="match")) != ()


def test_many_rules_have_the_findings_of_few() -> None:
    """Rules are found by their texts once they are many; the findings are the same."""
    fill = [(f"other_{n}/layers/[0-9]+/kernel", (None, "model")) for n in range(60)]
    some = [("mlp/.*", None), ("mlp/up/kernel_.*", (None, "model")), ("/x$", None)]
    few = [issue.message for issue in alone(some)]
    many = [issue.message for issue in alone([*some, *fill])]
    assert few and few == many


def test_rules_in_another_ones_shadow_by_its_text_alone() -> None:
    for narrow in ("mlp/up/kernel/x.*", r"\d+/mlp/up/kernel", "a?/up/kernel(_.*)?"):
        found = alone([(".*up/kernel.*", None), (narrow, (None, "model"))])
        assert "LM007" in [issue.code for issue in found], narrow


def test_the_rank_of_a_rule_that_matches_nothing_is_no_clash() -> None:
    rules = flm.RuleSet(
        (flm.Rule("^/up/kernel", (None, "model")),),
        optimizer=(flm.Rule("down/kernel", (None, None, "model")),),
    )
    assert [issue.code for issue in flm.lint(rules)] == ["LM006"]


def test_a_rule_that_another_ones_key_answers_for_is_overridden() -> None:
    """The one path that comes to mind of `^up` is the other rule itself."""
    (issue,) = alone([("up", ("model",)), ("^up", None)])
    assert (issue.code, issue.pattern) == ("LM007", "^up")


def test_issues_are_values() -> None:
    (issue,) = on(MLP, [*MLP_RULES, ("wide/kernel", None)])
    assert pickle.loads(pickle.dumps(issue)) == issue == dataclasses.replace(issue)
    assert len({issue, copy.copy(issue)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        issue.message = ""  # pyright: ignore[reportAttributeAccessIssue]


# ------------------------------------- much on each device, little of all the bytes


def on_a_pod(**more: Any) -> flm.Resolution:
    """120 layers, each less than 1 % of the bytes, on 512 devices."""
    layer = {"gate": kernel(4096, 8192), "up": kernel(4096, 8192), **more}
    tree = {"layers": {str(number): layer for number in range(120)}}
    layout_map = mapped([("(gate|up)/kernel", ("data", "model"))], "data=64,model=8")
    return layout_map.resolve(tree)


def test_many_small_leaves_that_no_rule_matches_are_warned_of() -> None:
    """As where one of several names in a pattern was changed."""
    resolution = on_a_pod(wide=kernel(4096, 8192))
    with pytest.warns(flm.LayoutWarning) as caught:
        resolution.announce()
    (warning,) = caught
    assert str(warning.message).startswith(
        "1 finding\n"
        "  - unmatched: layers/{0..119}/wide/kernel ×120 (4096,8192) is matched by no "
        "rule, so every device holds each in full (33.3% of the bytes)\n"
    )


def test_what_fills_each_of_many_devices_is_warned_of() -> None:
    resolution = on_a_pod(adapter=kernel(256, 64))
    with pytest.warns(flm.LayoutWarning, match="<0.1%|< 0.1%|0.1% of the bytes") as w:
        resolution.announce()
    assert "% of what each device holds)" in str(w[0].message)
    (issue,) = [issue for issue in flm.lint(resolution) if issue.code == "LM102"]
    assert "% of what each device holds)" in issue.message


@pytest.mark.filterwarnings("error::flax_layoutmap.LayoutWarning")
def test_little_of_both_is_not() -> None:
    resolution = on_a_pod(norm={"scale": struct(4096)})
    resolution.announce()
    assert flm.lint(resolution) == ()


def test_memory_does_not_grow_with_what_rules_share() -> None:
    """Many rules of the same few bytes, and a text that would be far too long."""
    layout_map = flm.LayoutMap(overlap="last")
    for at in range(200):
        layout_map["a" * (200 - at)] = ("data",) if at % 2 else ("model",)
    for pattern in ("b{1000000000}", "(b{1,9999}c){99999}"):
        layout_map[pattern] = ("data",)
    tracemalloc.start()
    try:
        found = flm.lint(layout_map)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found) >= 199 and peak < 20e6
