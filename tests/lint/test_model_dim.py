"""Lint by the model dim: exchanged axes, idle batch axes, and what they cost."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from convert.tables import KERAS_LLAMA
from shapes import nested, struct

import flax_layoutmap as flm
from flax_layoutmap._lint.lint import LintReport

Shapes = dict[str, tuple[int, ...]]
Rules = dict[str, tuple[Any, ...]]

# KerasHub's `llama_backbone.py` (71453d0); its Qwen, Qwen MoE and Qwen 3 MoE have the
# same. The kernels of queries, keys and values are (d, heads, head_dim); the axes are
# those of Gemma's, (heads, d, head_dim).
KERAS_HUB: Rules = KERAS_LLAMA
QUERY = "transformer_layer.*self_attention.*(query|key|value).kernel"
CORRECTED = KERAS_HUB | {QUERY: ("batch", "model", None)}

LLAMA = {"d": 4096, "H": 32, "K": 8, "s": 128, "f": 14336, "V": 128256}
QWEN3 = LLAMA | {"f": 12288, "V": 151936}
QWEN2 = {"d": 3584, "H": 28, "K": 4, "s": 128, "f": 18944, "V": 152064}
SMALL = {"d": 64, "H": 8, "K": 4, "s": 16, "f": 256, "V": 512}

# Of KerasHub's Llama and Qwen.
LAYER = {
    "self_attention/query/kernel": "d H s",
    "self_attention/key/kernel": "d K s",
    "self_attention/value/kernel": "d K s",
    "self_attention/attention_output/kernel": "H s d",
    "feedforward_gate_dense/kernel": "d f",
    "feedforward_intermediate_dense/kernel": "d f",
    "feedforward_output_dense/kernel": "f d",
    "self_attention_layernorm/scale": "d",
    "feedforward_layernorm/scale": "d",
}
BIASES = {
    "self_attention/query/bias": "H s",
    "self_attention/key/bias": "K s",
    "self_attention/value/bias": "K s",
}
NORMS = {"self_attention/query_norm/scale": "s", "self_attention/key_norm/scale": "s"}


def keras_hub(sizes: dict[str, int], layer: dict[str, str] = LAYER) -> Shapes:
    """Two layers between the embedding and its transpose."""
    named = {
        "token_embedding/embeddings": "V d",
        "token_embedding/reverse_embeddings": "d V",
        "sequence_output_layernorm/scale": "d",
    }
    for number in range(2):
        own = {
            f"transformer_layer_{number}/{name}": dims for name, dims in layer.items()
        }
        named.update(own)
    return {
        path: tuple(sizes[dim] for dim in dims.split()) for path, dims in named.items()
    }


def mapped(rules: Rules, mesh: str, **options: Any) -> flm.LayoutMap:
    options = {"overlap": "first", "strict": False} | options
    on = flm.DeviceMesh.abstract(mesh)
    return flm.LayoutMap.from_rules(rules.items(), on, **options)


def found(
    shapes: Shapes, rules: Rules, mesh: str = "batch=8,model=8", **options: Any
) -> LintReport:
    """The findings of these checks."""
    tree = nested({path: struct(*shape) for path, shape in shapes.items()})
    every = flm.lint(mapped(rules, mesh, **options).resolve(tree))
    return LintReport(issue for issue in every if issue.code in ("LM110", "LM116"))


# ------------------------------------------------------------------- exchanged axes


@pytest.mark.parametrize(
    ("sizes", "layer", "mesh"),
    [
        pytest.param(LLAMA, LAYER, "batch=8,model=8", id="Llama"),
        pytest.param(SMALL, LAYER, "batch=2,model=4", id="a small Llama"),
        pytest.param(LLAMA | {"K": 32}, LAYER, "batch=8,model=8", id="without groups"),
        pytest.param(QWEN2, LAYER | BIASES, "batch=4,model=4", id="Qwen 2"),
        pytest.param(QWEN3, LAYER | NORMS, "batch=8,model=8", id="Qwen 3"),
    ],
)
def test_the_tables_of_keras_hub(
    sizes: dict[str, int], layer: dict[str, str], mesh: str
) -> None:
    shapes = keras_hub(sizes, layer)
    (issue,) = found(shapes, KERAS_HUB, mesh)
    assert (issue.code, issue.pattern, issue.leaves) == ("LM110", QUERY, 6)
    assert issue.fix == f"layout_map.replace(\"{QUERY}\", ('batch', 'model', None))"
    assert not found(shapes, CORRECTED, mesh)


def test_the_tables_of_keras_hub_without_a_batch() -> None:
    """As its guides have them: one axis of devices, for tensors."""
    shapes, mesh = keras_hub(LLAMA), "batch=1,model=8"
    (issue,) = found(shapes, KERAS_HUB, mesh)
    assert (issue.code, issue.pattern, issue.leaves) == ("LM110", QUERY, 6)
    assert issue.fix == f"layout_map.replace(\"{QUERY}\", ('batch', 'model', None))"
    assert "attention_output/kernel'" in issue.message
    assert not found(shapes, CORRECTED, mesh)
    # Eight heads of keys and values cannot be split over sixteen devices.
    assert not found(shapes, KERAS_HUB, "batch=1,model=16")


def test_the_largest_dim_of_each_kernel() -> None:
    """Sharded for memory alone: nothing is said of the features."""
    rules: Rules = {
        "query|key|value|output/kernel": ("data", ...),
        "attention_output": (..., "data"),
        "gate|intermediate": (None, "data"),
        "output_dense": ("data", None),
    }
    assert not found(keras_hub(LLAMA), rules, "model=1,data=8", batch="data")
    assert not found(keras_hub(LLAMA), rules, "model=1,data=8", batch="model")


def test_the_table_of_keras_hub_for_gemma() -> None:
    """There the heads come first, and all is well."""
    layer = LAYER | {"self_attention/query/kernel": "H d s"}
    shapes = keras_hub(LLAMA, {k: v for k, v in layer.items() if "K" not in v.split()})
    assert not found(shapes, KERAS_HUB)


STACKED = {
    **{
        f"layers/attention/{name}/kernel": (3, 64, 8, 16)
        for name in ("query", "key", "value")
    },
    "layers/attention/out/kernel": (3, 8, 16, 64),
    "layers/mlp/up/kernel": (3, 64, 256),
    "layers/mlp/down/kernel": (3, 256, 64),
}
EXPERTS = STACKED | {
    "layers/mlp/up/kernel": (3, 4, 64, 256),
    "layers/mlp/down/kernel": (3, 4, 256, 64),
    "layers/mlp/router/kernel": (3, 64, 4),
}
TABLE: Rules = {
    "(query|key|value)": (None, "data", "model", None),
    "/out": (None, "model", None, "data"),
    "up": (..., "data", "model"),
    "down": (..., "model", "data"),
}


@pytest.mark.parametrize("shapes", [STACKED, EXPERTS], ids=["stacked", "experts"])
@pytest.mark.parametrize(
    ("wrong", "fix"),
    [
        (
            ("(query|key|value)", (None, "model", "data", None)),
            "(None, 'data', 'model'",
        ),
        (("/out", (None, "data", None, "model")), "(None, 'model', None, 'data')"),
        (("up", (..., "model", "data")), "(..., 'data', 'model')"),
        (("down", (..., "data", "model")), "(..., 'model', 'data')"),
    ],
)
def test_layers_that_are_stacked(shapes: Shapes, wrong: Any, fix: str) -> None:
    mesh = "data=2,model=4"
    assert not found(shapes, TABLE, mesh)
    (issue,) = found(shapes, TABLE | dict([wrong]), mesh)
    assert issue.pattern == wrong[0] and fix in issue.fix


def test_the_fix_is_code_that_mends_it() -> None:
    """Patterns with a backslash, too, which are a literal of Python in the fix."""
    mesh, wrong = "data=2,model=4", {r"\bup\b": (..., "model", "data")}
    tree = nested({path: struct(*shape) for path, shape in STACKED.items()})
    layout_map = mapped(wrong | TABLE, mesh)
    (issue,) = flm.lint(layout_map.resolve(tree), ignore="LM111")
    exec(issue.fix, {"layout_map": layout_map})
    assert not flm.lint(layout_map.resolve(tree))
    layout_map = mapped(FSDP, "data=2,fsdp=4")
    layout_map.names["residual"] = ("data", None, None)
    (issue,) = flm.lint(layout_map.resolve(tree))
    change = issue.fix.removeprefix("LayoutMap(mesh, batch=('data', 'fsdp')); ")
    layout_map = mapped(FSDP, "data=2,fsdp=4", batch=("data", "fsdp"))
    layout_map.names["residual"] = ("data", None, None)
    exec(change, {"layout_map": layout_map})
    residual = layout_map.names["residual"]
    assert residual is not None and residual.dims(3)[0] == ("data", "fsdp")


def test_experts_over_the_axis_of_the_batch() -> None:
    """Of experts, the leading dim has no role in their matrices."""
    rules = TABLE | {
        "up": (None, "data", "model", None),
        "down": (None, "data", None, "model"),
    }
    assert not found(EXPERTS, rules, "data=2,model=4")


def test_what_most_bytes_have_where_no_axis_is_of_the_batch() -> None:
    rules = TABLE | {"(query|key|value)": (None, "model", "data", None)}
    mesh = "other=1,data=2,model=4"
    (issue,) = found(STACKED, rules, mesh, batch="other")
    assert issue.pattern == "(query|key|value)"
    swap: dict[Any, str] = {"data": "model", "model": "data"}
    turned = {
        key: tuple(swap.get(axis, axis) for axis in axes) for key, axes in rules.items()
    }
    (issue,) = found(STACKED, turned, mesh, batch="other")
    assert issue.pattern == "(query|key|value)"


def test_a_rule_for_kernels_of_both_kinds() -> None:
    shapes = {
        f"layers/{number}/{name}": shape
        for number in range(2)
        for name, shape in {"a": (64, 8, 16), "b": (8, 16, 64), "c": (64, 256)}.items()
    }
    shapes |= {path.replace("c", "d"): (256, 64) for path in shapes if "/c" in path}
    assert not found(
        shapes,
        {"a$": ("data", "model", None), ".": ("data", ..., "model")},
        "data=2,model=4",
    )


def test_what_a_fix_would_not_divide() -> None:
    """Fewer heads than the axis has devices: `model` may be on the model dim for it."""
    shapes = {
        path: (3, 64, 2, 16) if "key" in path else shape
        for path, shape in STACKED.items()
    }
    rules = {"key": (None, "model", "data", None)} | TABLE
    assert not found(shapes, rules, "data=2,model=4")


def test_features_that_are_as_large_as_the_model_dim() -> None:
    """A text encoder's states come in by another dim: here the model dim is out."""
    shapes = {
        f"layers/{number}/{name}/kernel": shape
        for number in range(2)
        for name, shape in {
            "own/query": (64, 64),
            "own/out": (64, 64),
            "cross/key": (96, 64),
            "cross/value": (96, 64),
            "up": (64, 256),
            "down": (256, 64),
        }.items()
    }
    rules: Rules = {
        "query|key|value|up": ("data", "model"),
        "out|down": ("model", "data"),
    }
    assert not found(shapes, rules, "data=2,model=4")


@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param({"up": (64, 256), "down": (256, 64)}, id="two sizes alike"),
        pytest.param({"query": (64, 64), "out": (64, 64)}, id="square"),
        pytest.param(
            {"up1": (32, 64), "up2": (64, 128), "down1": (128, 64), "down2": (64, 32)},
            id="several widths",
        ),
        pytest.param(
            {"conv1": (3, 3, 64, 128), "conv2": (3, 3, 128, 64)}, id="windows"
        ),
    ],
)
def test_nothing_is_said_where_the_model_dim_is_uncertain(shapes: Shapes) -> None:
    layers = {f"{n}/{path}": shape for n in range(2) for path, shape in shapes.items()}
    for first in shapes:
        rules = {first: (..., "data", "model"), ".": (..., "model", "data")}
        by_shape = found(layers, rules, "data=2,model=4")
        assert not [issue for issue in by_shape if "the model dim" in issue.message]


# ------------------------------------------------------------------ idle batch axes


FSDP: Rules = {
    "(query|key|value)": (None, "fsdp", None, None),
    "/out": (..., "fsdp"),
    "up": (..., "fsdp", None),
    "down": (..., "fsdp"),
}


def test_the_fix_names_every_idle_axis() -> None:
    rules = {
        key: tuple(("fsdp", "zero") if axis == "fsdp" else axis for axis in axes)
        for key, axes in FSDP.items()
    }
    issues = found(STACKED, rules, "data=2,fsdp=2,zero=2")
    assert [issue.code for issue in issues] == ["LM116", "LM116"]
    fix = "LayoutMap(mesh, batch=('data', 'fsdp', 'zero'))"
    assert {issue.fix for issue in issues} == {fix}
    assert not found(STACKED, rules, "data=2,fsdp=2,zero=1", batch=("data", "fsdp"))


@pytest.mark.parametrize("mesh", ["data=2,model=4", "data=8,model=8"])
def test_tensor_axes_need_no_batch(mesh: str) -> None:
    without = {
        key: tuple(None if axis == "data" else axis for axis in axes)
        for key, axes in TABLE.items()
    }
    for shapes in (STACKED, EXPERTS):
        assert not found(shapes, TABLE, mesh)
        assert not found(shapes, without, mesh)


def test_axes_of_activations_are_not_idle() -> None:
    """Such as those that the positions of a sequence lie on."""
    tree = nested({path: struct(*shape) for path, shape in STACKED.items()})
    layout_map = mapped(FSDP, "data=2,fsdp=4")
    (issue,) = flm.lint(layout_map.resolve(tree), ignore="LM101")
    assert issue.code == "LM116"
    layout_map.activations["layers"] = ("data", "fsdp", None)
    assert not flm.lint(layout_map.resolve(tree))


def test_activations_on_the_batch_change_with_it() -> None:
    tree = nested({path: struct(*shape) for path, shape in STACKED.items()})
    layout_map = mapped(FSDP, "data=2,fsdp=4")
    layout_map.activations["layers"] = ("data", None, None)
    layout_map.names["hidden"] = (None, "data")
    (issue,) = flm.lint(layout_map.resolve(tree))
    assert issue.fix == (
        "LayoutMap(mesh, batch=('data', 'fsdp')); layout_map.activations.replace("
        "'layers', (('data', 'fsdp'), None, None))"
    )


# ------------------------------------------------------------------- what they cost


def attended(layer: Any, x: jax.Array) -> jax.Array:
    own = layer["self_attention"]
    x = flm.distribute_tensor(x, "residual")
    query, key, value = (
        jnp.einsum("btd,dhk->bthk", x, own[name]["kernel"])
        for name in ("query", "key", "value")
    )
    mixed = jax.nn.dot_product_attention(query, key, value)
    x = x + jnp.einsum("bthk,hkd->btd", mixed, own["attention_output"]["kernel"])
    gate = jax.nn.silu(x @ layer["feedforward_gate_dense"]["kernel"])
    hidden = gate * (x @ layer["feedforward_intermediate_dense"]["kernel"])
    return x + hidden @ layer["feedforward_output_dense"]["kernel"]


def loss(params: Any, x: jax.Array) -> jax.Array:
    for number in range(2):
        x = attended(params[f"transformer_layer_{number}"], x)
    return (x.astype(jnp.float32) ** 2).mean()


TREE = nested({path: struct(*shape) for path, shape in keras_hub(SMALL).items()})
PLANNED: list[Any] = []


def planned(rules: Any) -> Any:
    PLANNED.append(rules)
    x = struct(32, 64, SMALL["d"])
    return flm.pod.plan(jax.grad(loss), TREE, x, layout_map=rules)


def with_residual(rules: Rules, mesh: str, *batch: str) -> flm.LayoutMap:
    layout_map = mapped(rules, mesh, batch=batch)
    layout_map.names["residual"] = (batch, None, None)
    return layout_map


def test_the_cost_of_exchanged_axes() -> None:
    PLANNED.clear()
    mesh = "batch=2,model=4"
    wrong = with_residual(KERAS_HUB, mesh, "batch")
    (issue,) = flm.lint(wrong.resolve(TREE), ignore="LM102", step=planned)
    right = with_residual(CORRECTED, mesh, "batch").freeze()
    assert PLANNED == [wrong.freeze(), right]
    more = planned(wrong).wire_bytes() - planned(right).wire_bytes()
    assert issue.step_bytes == more > 0
    assert issue.message.endswith(f"; costs {more / 2**10:.1f} KiB per device and step")
    assert json.loads(json.dumps(dataclasses.asdict(issue)))["step_bytes"] == more


def test_the_cost_of_an_idle_batch_axis() -> None:
    rules: Rules = {
        "(query|key|value|gate_dense|intermediate_dense)/kernel": ("fsdp", ...),
        "output(_dense)?/kernel": (..., "fsdp"),
    }
    mesh = "data=2,fsdp=4"
    idle = with_residual(rules, mesh, "data")
    (issue,) = flm.lint(idle.resolve(TREE), ignore="LM102", step=planned)
    right = with_residual(rules, mesh, "data", "fsdp")
    more = planned(idle).wire_bytes() - planned(right).wire_bytes()
    assert issue.code == "LM116" and issue.step_bytes == more > 0


class Plan:
    def __init__(self, size: int) -> None:
        self.size = size

    def wire_bytes(self) -> int:
        return self.size


def test_no_cost_where_the_fix_sends_more() -> None:
    wrong = mapped(KERAS_HUB, "batch=2,model=4")
    resolution = wrong.resolve(TREE)
    before = wrong.freeze()
    (issue,) = flm.lint(
        resolution, ignore="LM102", step=lambda rules: Plan(1 if rules == before else 2)
    )
    (plain,) = flm.lint(resolution, ignore="LM102")
    assert issue == plain and issue.step_bytes is None


def test_nothing_is_planned_without_need() -> None:
    def step(rules: Any) -> Plan:
        raise AssertionError(rules)

    right = mapped(CORRECTED, "batch=2,model=4").resolve(TREE)
    assert not flm.lint(right, ignore="LM102", step=step)
    wrong = mapped(KERAS_HUB, "batch=2,model=4").resolve(TREE)
    assert not flm.lint(wrong, ignore=("LM102", "LM110"), step=step)


def test_errors_of_a_step() -> None:
    wrong = mapped(KERAS_HUB, "batch=2,model=4")

    def step(rules: Any) -> Plan:
        raise ZeroDivisionError("the user's")

    with pytest.raises(ZeroDivisionError, match="^the user's$"):
        flm.lint(wrong.resolve(TREE), step=step)
    text = "step must return a plan, but returned a NoneType: step=lambda rules: flm"
    with pytest.raises(flm.errors.RuleError, match=text):
        flm.lint(wrong.resolve(TREE), step=lambda rules: None)  # pyright: ignore
    with pytest.raises(flm.errors.RuleError, match="step needs a Resolution, got a La"):
        flm.lint(wrong, step=step)


@pytest.mark.parametrize("bias", [False, True])
def test_no_fix_that_the_biases_of_the_same_rule_do_not_fit(bias: bool) -> None:
    leaves = {"norm/scale": struct(64)}
    for n in range(2):
        leaves[f"layers/{n}/query/kernel"] = struct(64, 4, 16)
        leaves[f"layers/{n}/out/kernel"] = struct(4, 16, 64)
        leaves[f"layers/{n}/up/kernel"] = struct(64, 256)
        leaves[f"layers/{n}/down/kernel"] = struct(256, 64)
        leaves[f"layers/{n}/key/kernel"] = struct(64, 4, 16)
        if bias:
            leaves[f"layers/{n}/query/bias"] = struct(64)
    layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("batch=1,tensor=4"))
    layout_map["query"] = ("tensor", ...)
    layout_map["key"] = (None, "tensor", None)
    layout_map["out"] = ("tensor", ...)
    layout_map["up"] = (None, "tensor")
    layout_map["down"] = ("tensor", None)
    layout_map["norm"] = None
    report = flm.lint(layout_map.resolve(nested(leaves)))
    found = [issue.pattern for issue in report if issue.code == "LM110"]
    assert found == ([] if bias else ["query"])
