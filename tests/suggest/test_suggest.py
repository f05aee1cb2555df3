"""flm.suggest: rules that are found by search."""

import contextlib
import copy
import dataclasses
import io
import itertools
import json
import pickle
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import needs_libtpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pods import needs_the_estimate
from suggest.steps_of_decoders import TOKENS, large, make, train_step

import flax_layoutmap as flm
from flax_layoutmap._suggest import compare, price, report_text, search, suggest
from flax_layoutmap._suggest import problem as problem_module
from flax_layoutmap._suggest.moves import fully_sharded
from flax_layoutmap._suggest.problem import Problem, seed_rules
from flax_layoutmap._suggest.rules import as_code, rules_of
from flax_layoutmap.pod._lower import lower_step
from flax_layoutmap.pod._mlir import Attributes
from flax_layoutmap.pod._report_text import seconds_text

MESH = "data=4,tensor=2"
WIDE = "data=16,tensor=4"
# Less than full sharding over both axes needs.
LITTLE: Any = {"mesh": WIDE, "hbm": 6 << 30}


@pytest.fixture(scope="module")
def problem() -> Problem:
    return problem_of(train_step, *nnx.eval_shape(make), TOKENS, mesh=MESH)


def problem_of(step: Any, *arguments: Any, mesh: str, donated: Any = ()) -> Problem:
    own = flm.DeviceMesh.abstract(mesh)
    rules = seed_rules(own).freeze()
    return Problem(lower_step(step, arguments, {}, rules, donated, "tpu", own), own)


@pytest.fixture(scope="module")
def wide() -> flm.Suggestion:
    return flm.suggest(*large(), **LITTLE)


# ------------------------------------------------------------------ the rules


@pytest.mark.parametrize("given", [{}, {"check": False}, {"limit_seconds": 0.001}])
def test_a_batch_that_does_not_divide_by_all_axes(given: Any) -> None:
    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return (jnp.tanh(x @ params["up"]) @ params["down"]).sum()

        return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params))

    params = {"up": jnp.ones((16, 64)), "down": jnp.ones((64, 16))}
    x = jnp.ones((4, 16))
    found = flm.suggest(
        step, params, x, mesh="data=4,tensor=2", donate_argnames="params", **given
    )
    for choice in found.choices.values():
        assert "tensor" not in choice.layout_map.freeze().batch
        flm.jit(step, layout_map=choice.layout_map.on("data=4,tensor=2"))(params, x)


def test_rules_of_today_that_do_not_fit_are_a_note() -> None:
    today = flm.LayoutMap(MESH)
    today["kernel"] = ("tensor",)
    model, optimizer = nnx.eval_shape(make)
    given = model, optimizer, TOKENS
    found = flm.suggest(
        train_step, *given, layout_map=today, check=False, limit_seconds=0.001
    )
    assert "today" not in found.choices
    text = " ".join(str(found).split())
    assert "the current rules do not fit this step: model/g/a/kernel (2," in text
    assert "(and 5 more) taken for state: model, optimizer; " in text


def test_no_rule_is_for_a_key() -> None:
    def step(model: nnx.Sequential, x: Any) -> Any:
        return nnx.grad(lambda model: jnp.square(model(x)).sum())(model)

    def layers() -> nnx.Sequential:
        rngs = nnx.Rngs(0)
        dropout = nnx.Dropout(0.5, rngs=rngs)
        return nnx.Sequential(nnx.Linear(4, 8, rngs=rngs), dropout)

    x = jax.ShapeDtypeStruct((16, 4), jnp.float32)
    options: Any = {"mesh": "data=2", "check": False, "hbm": 100}
    found = flm.suggest(step, nnx.eval_shape(layers), x, **options)
    bias = found.layout_map.resolve(nnx.eval_shape(layers))["layers/0/bias"]
    assert bias.layout.axes == ("data",)
    with pytest.raises(KeyError, match="no parameter has the path 'key'"):
        found.explain("key")


@pytest.mark.parametrize(
    ("part", "axes"), [(0, ("data", ...)), (slice(32), ("data", None, None))]
)
def test_outputs_of_several_shapes(part: Any, axes: Any) -> None:
    """One rule is for all of them, and is priced for all."""

    def step(model: nnx.Sequential, x: Any) -> Any:
        def loss(model: nnx.Sequential) -> Any:
            found = [model(x), model(x[:, part])]
            named = [flm.distribute_tensor(one, "hidden") for one in found]
            return jnp.square(named[0]).sum() + jnp.square(named[1]).sum()

        return nnx.grad(loss)(model)

    model = nnx.eval_shape(lambda: nnx.Sequential(nnx.Linear(64, 32, rngs=nnx.Rngs(0))))
    x = jax.ShapeDtypeStruct((64, 64, 64), jnp.float32)
    mesh = flm.DeviceMesh.abstract("data=2")
    lowered = lower_step(
        step, (model, x), {}, seed_rules(mesh).freeze(), (), "tpu", mesh
    )
    problem = Problem(lowered, mesh)
    every = frozenset(range(len(problem.points)))
    one = dataclasses.replace(fully_sharded(problem), fixed=every)
    rules = rules_of(problem, one)
    for own in rules.names["hidden"], rules.activations["layers/0"]:
        assert own is not None and own.axes == axes
    options: Any = {"check": False, "limit_seconds": 0}
    found = flm.suggest(step, model, x, layout_map=rules, **options)
    cost = price.Pricer(problem, None).with_peak(one)
    assert found.choices["today"].estimate == cost


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"hbm": "16GB"}, "hbm='16GB' is no number of bytes"),
        ({"hbm": True}, "hbm=True is no number of bytes"),
        ({"hbm": float("nan")}, "hbm=nan is no number of bytes"),
        ({"check": "nonsense"}, "check must be True, False or .*, got 'nonsense'"),
        ({"slices": 2}, "slices of which topology"),
    ],
)
def test_options_that_are_refused(options: Any, error: str) -> None:
    with pytest.raises((flm.LayoutError, flm.errors.MeshError), match=error):
        flm.suggest(jnp.sin, jnp.ones(8), mesh="data=8", **options)


def test_a_step_runs_with_the_rules() -> None:
    model, optimizer = nnx.eval_shape(make)
    found = flm.suggest(train_step, model, optimizer, TOKENS, mesh=MESH, check=False)
    layout_map = found.layout_map.on(flm.DeviceMesh(MESH))
    model, optimizer = flm.create(make, layout_map=layout_map)
    tokens = jax.random.randint(jax.random.key(0), TOKENS.shape, 0, 512)
    step = flm.jit(train_step, layout_map=layout_map)
    loss = step(model, optimizer, tokens)
    assert 0 < loss < 2 * np.log(512)
    assert found.layout_map.resolve(model).diff(layout_map.resolve(model)).is_empty


def test_classes_of_dims_are_found_without_names(wide: flm.Suggestion) -> None:
    assert wide.layout_map.freeze().batch == ("data",)
    dims = [
        wide.layout_map[f"g/{name}/kernel"].dims(ndim)  # type: ignore[union-attr]
        for name, ndim in zip("abcde", (5, 4, 3, 3, 3), strict=True)
    ]
    # Megatron's: heads, and hidden units.
    assert [spec.index(("tensor",)) for spec in dims] == [3, 1, 2, 2, 1]
    assert len(wide.layout_map) <= 7 and len(wide.layout_map.activations) <= 2


def test_classes_of_dims_that_the_smallest_axis_does_not_divide() -> None:
    params = {"up": jnp.ones((27, 81)), "down": jnp.ones((81, 27))}
    given = mlp_step, params, jnp.ones((9, 27))
    two, one = (
        problem_of(*given, mesh=mesh, donated="params")
        for mesh in ("data=2,model=3", "model=3")
    )
    assert two.batch_class == one.batch_class and one.batch_class
    assert two.classes == one.classes and one.classes


def test_the_cost_is_the_estimate_of_a_plan(wide: flm.Suggestion) -> None:
    step, *given = large()
    step = flm.jit(step, layout_map=wide.layout_map)
    estimate = flm.pod.plan(step, *given, mesh=WIDE).with_layout(wide.layout_map)
    cost = wide.choices["suggested"].estimate
    assert estimate.wire_bytes() == cost.total_sent_bytes
    assert estimate.memory.at_rest == cost.at_rest
    assert not estimate.drift


def test_names_and_their_order_do_not_matter(wide: flm.Suggestion) -> None:
    other = flm.suggest(*large("hgfedcba"), **LITTLE, check=False)
    assert other.cost == wide.choices["suggested"].estimate
    assert other.trail == wide.trail


def test_micro_batches_first() -> None:
    def step(params: Any, parts: Any) -> Any:
        def one(params: Any, x: Any) -> Any:
            def loss(params: Any) -> Any:
                hidden = flm.distribute_tensor(x @ params["up"], "hidden")
                return (jnp.tanh(hidden) @ params["down"]).sum()

            return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params)), None

        return jax.lax.scan(one, params, parts)[0]

    parts = jax.ShapeDtypeStruct((3, 1 << 14, 1024), jnp.float32)
    found = flm.suggest(step, GIVEN[1], parts, **OPTIONS)
    # Three micro-batches do not divide: the batch is in the layout of an output.
    assert found.layout_map.freeze().batch == ()
    hidden = found.layout_map.names["hidden"]
    assert hidden is not None and hidden.axes[0] is not None
    params = {"up": jnp.ones((16, 64)), "down": jnp.ones((64, 16))}
    run = flm.jit(step, layout_map=found.layout_map.on(SMALL), donate_argnames="params")
    run(params, jnp.ones((3, 32, 16)))


def test_decoding_reads_its_parameters_from_memory() -> None:
    def step(params: Any, cache: Any, token: Any) -> Any:
        x = params["embed"][token]
        new = (x @ params["key"])[:, None]
        keys = jax.lax.dynamic_update_slice_in_dim(cache["keys"], new, 7, 1)
        scores = jnp.einsum("bd,btd->bt", x @ params["query"], keys)
        y = jnp.einsum("bt,btd->bd", jax.nn.softmax(scores), keys)
        return {"keys": keys}, jax.nn.relu(y @ params["up"]) @ params["down"]

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    params = {name: array(4096, 4096) for name in ("key", "query")}
    params |= {"up": array(4096, 16384), "down": array(16384, 4096)}
    given = params | {"embed": array(512, 4096)}, {"keys": array(16, 1024, 4096)}
    token = jax.ShapeDtypeStruct((16,), jnp.int32)
    options = OPTIONS | {"donate_argnames": ("params", "cache")}
    found = flm.suggest(step, *given, token, **options)
    axes = [found.layout_map[name].axis_names for name in params]  # type: ignore[union-attr]
    assert all(set(own) == {"data", "tensor"} for own in axes)
    parameters = found.cost.at_rest["parameter"]
    assert found.cost.total_sent_bytes < parameters / 20  # none is gathered
    assert "or reading memory" in str(found)


def test_an_axis_of_the_batch_for_the_experts() -> None:
    """Tokens go to the devices of their experts, and back."""

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            mixed = x + jax.nn.relu(x @ params["in"]) @ params["out"]
            rows = mixed.reshape(x.shape[0], 8, -1, x.shape[-1]).swapaxes(0, 1)
            sent = flm.distribute_tensor(rows, "sent")
            wide = jax.nn.relu(jnp.einsum("ebtd,edf->ebtf", sent, params["up"]))
            done = jnp.einsum("ebtf,efd->ebtd", wide, params["down"])
            back = flm.distribute_tensor(done, "done").swapaxes(0, 1)
            return jnp.square(mixed + back.reshape(x.shape)).mean()

        return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params))

    shapes = {"in": (512, 2048), "out": (2048, 512)}
    shapes |= {"up": (8, 512, 2048), "down": (8, 2048, 512)}
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for name, shape in shapes.items()
    }
    x = jax.ShapeDtypeStruct((64, 128, 512), jnp.bfloat16)
    found = flm.suggest(step, params, x, **(OPTIONS | {"mesh": "all=8"}))
    rules = found.layout_map
    assert rules.freeze().batch == ("all",)
    by_expert = rules["up"], rules["down"], rules.names["sent"], rules.names["done"]
    assert all(one and one.axes[0] == "all" for one in by_expert)
    assert all(one and one.is_replicated for one in (rules["in"], rules["out"]))
    assert found.cost.seconds < found.choices["full sharding"].cost.seconds / 2


def test_adapters_are_trained_alone() -> None:
    def made() -> Any:
        kinds: Any = {"lora_rank": 8, "use_bias": False, "rngs": nnx.Rngs(0)}
        model = nnx.LoRALinear(1024, 4096, **kinds)
        return model, nnx.Optimizer(model, optax.sgd(1.0, 0.9), wrt=nnx.LoRAParam)

    def step(model: nnx.LoRALinear, optimizer: Any, x: Any) -> Any:
        def loss_of(model: nnx.LoRALinear) -> Any:
            return jnp.square(model(x)).mean()

        adapters = nnx.DiffState(0, nnx.LoRAParam)
        optimizer.update(model, nnx.grad(loss_of, argnums=adapters)(model))

    given = step, *nnx.eval_shape(made), GIVEN[2]
    options: Any = {"mesh": SMALL, "check": False}
    found = flm.suggest(*given, **options)
    base, adapters = 1024 * 4096 * 4, 5120 * 8 * 4
    # The base is everywhere, and only the gradients of adapters are summed.
    assert found.cost.at_rest["parameter"] == base + adapters
    assert adapters < found.cost.total_sent_bytes < 2 * adapters
    # With less memory it is split, and adapters with it, and their moments.
    split = flm.suggest(*given, **options, hbm=(found.cost.peak_bytes or 0) - base // 4)
    assert split.fits and split.cost.at_rest["parameter"] <= (base + adapters) // 2
    assert split.cost.at_rest["optimizer"] < adapters


# --------------------------------------------------------------------- limits


def mlp_step(params: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        return (jnp.tanh(x @ params["up"]) @ params["down"]).sum()

    return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params))


SMALL = "data=4,tensor=2"
OPTIONS: Any = {"mesh": SMALL, "donate_argnames": "params", "check": False}
GIVEN = (
    mlp_step,
    {
        "up": jax.ShapeDtypeStruct((1024, 4096), jnp.float32),
        "down": jax.ShapeDtypeStruct((4096, 1024), jnp.float32),
    },
    jax.ShapeDtypeStruct((1 << 14, 1024), jnp.float32),
)


@pytest.fixture(scope="module")
def small() -> flm.Suggestion:
    return flm.suggest(*GIVEN, **OPTIONS)


def test_a_limit_of_memory(small: flm.Suggestion) -> None:
    none = flm.suggest(*GIVEN, **OPTIONS, hbm=1000)
    least, most = none.cost.peak_bytes, small.cost.peak_bytes
    assert least is not None and most is not None and least < most
    assert small.fits and not none.fits
    lines = str(none).splitlines()[1:4]
    assert lines[0].startswith("does not fit: ") and "1000 B" in lines[1]
    limit = (least + most) // 2
    between = flm.suggest(*GIVEN, **OPTIONS, hbm=limit)
    assert between.fits and (between.cost.peak_bytes or most) <= limit
    assert between.cost.seconds >= small.cost.seconds


# ------------------------------------------------------- what it is told, and tells


def told(found: flm.Suggestion, at: int) -> str:
    """One part of the text, in one line: heading, code, table or notes."""
    return " ".join(str(found).split("\n\n")[at].split())


def test_the_code_runs_as_it_stands_and_everywhere(wide: flm.Suggestion) -> None:
    space: dict[str, Any] = {}
    exec(str(wide).split("\n\n")[1], {"flm": flm}, space)
    assert space["layout_map"] == wide.layout_map
    assert wide.mesh.size > jax.device_count()


@pytest.mark.parametrize("pattern", ['a"b', "a'b", r"layers/\d+/kernel", "a\nb", "é"])
def test_code_of_any_pattern(pattern: str) -> None:
    layout_map = flm.LayoutMap(flm.DeviceMesh.abstract(MESH), batch=("data", "tensor"))
    layout_map[pattern] = (("data", "tensor"), None)
    layout_map[f"{pattern}/{'x' * 80}"] = None
    layout_map.activations[pattern] = ("data", ...)
    layout_map.names[pattern] = (...,)
    layout_map.optimizer[pattern] = None
    space: dict[str, Any] = {}
    exec(as_code(layout_map.freeze()), {"flm": flm}, space)
    assert space["layout_map"] == layout_map


def test_the_text(wide: flm.Suggestion) -> None:
    assert all(len(line) <= 80 for line in str(wide).splitlines())
    heading, notes = told(wide, 0), told(wide, 3)
    assert heading.startswith(f"suggestion for train_step on mesh {WIDE}: 64 devices")
    assert "estimated time: " in heading and " with full sharding (-" in heading
    assert "GiB per device instead of 2.2 GiB (limit 6.0 GiB)" in heading
    assert "taken for state: model, optimizer; for data: tokens" in notes
    assert "that XLA's partitioner makes" in notes and "not counted: " in notes
    assert "assumed: speed and memory of v5p" in notes and "full sharding: " in notes
    assert "unused: " not in notes


def test_other_formats(small: flm.Suggestion) -> None:
    title, verdict, code, table, notes = small.report("markdown").split("\n\n")
    assert title == f"**suggestion for mlp_step on mesh {SMALL}: 8 devices**"
    assert code.startswith("```python\n") and code.endswith("\n```")
    assert table.startswith("| per device | suggested |")
    assert verdict.startswith("- estimated time") and "\n  - full sharding" in notes
    data = json.loads(small.report("json"))
    assert data["choices"]["suggested"]["rules"] == small.layout_map.to_json()
    assert data["choices"]["suggested"]["seconds"] == small.cost.seconds
    with pytest.raises(flm.LayoutError, match="format must be"):
        small.report("html")  # pyright: ignore[reportArgumentType]
    file = io.StringIO()
    small.show(file)
    assert file.getvalue() == f"{small}\n"
    assert repr(small).startswith(f"<Suggestion for mlp_step on {SMALL}: ")


def test_the_verdict(small: flm.Suggestion) -> None:
    own = small.cost
    slow = dataclasses.replace(own, link_seconds=own.seconds + own.link_seconds)
    large = dataclasses.replace(own, peak_bytes=1 << 40)
    smaller = dataclasses.replace(own, peak_bytes=1 << 20)

    def verdict(is_complete: bool = True, **costs: Any) -> str:
        named = {name.replace("_", " "): cost for name, cost in costs.items()}
        return "; ".join(report_text.verdict(named, small.limit_bytes, is_complete))

    a, b = seconds_text(own.seconds), seconds_text(slow.seconds)
    assert verdict(suggested=own, full_sharding=smaller, today=slow) == (
        f"estimated time: {a} a step instead of {b} with the current rules (-50.0%); "
        "estimated memory: 140.0 MiB per device instead of 140.0 MiB (limit 95.7 GiB)"
    )
    same = verdict(suggested=own, full_sharding=smaller)
    assert f"{a} a step, the same as full sharding; " in same
    assert "140.0 MiB per device instead of 1.0 MiB (limit" in same
    assert "a step; this is full sharding; estimated" in verdict(suggested=own)
    assert "a step; estimated" in verdict(is_complete=False, suggested=own)
    for suggested, today in (slow, own), (own, own), (own, smaller), (large, slow):
        assert verdict(suggested=suggested, today=today).startswith("keep the current")
    for suggested, today in (own, slow), (slow, large), (smaller, own), (large, large):
        assert "keep" not in verdict(suggested=suggested, today=today)
    none = verdict(suggested=large)
    assert none.startswith("does not fit: 1.0 TiB per device is the least memory that ")
    assert "it holds: gradients and activations 1024.0 GiB, " in none
    less = "for less: more devices, fewer rows in a batch, or, in training, jax."
    assert less in none
    held = dataclasses.replace(large, at_rest={"parameter": 1 << 40})
    assert "for less: more devices; estimated" in verdict(suggested=held)
    held = dataclasses.replace(large, at_rest={"optimizer": 1 << 40})
    assert "or optimizer state in the memory of" in verdict(suggested=held)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (1 << 14, "the first dim of x (16384,1024) does not divide by 3; pad or"),
        (12, "nothing that was tried with it gains"),
    ],
)
def test_axes_that_are_not_used(rows: int, why: str) -> None:
    x = jax.ShapeDtypeStruct((rows, 1024), jnp.float32)
    options = OPTIONS | {"mesh": "data=4,idle=3"}
    found = flm.suggest(*GIVEN[:2], x, **options)
    assert f"axis idle of the mesh, so that its 3 devices do the same work; {why}" in (
        told(found, 3)
    )


@pytest.mark.parametrize(
    ("dim", "before"),
    [
        (1024, "no data is split over the batch: "),
        (
            1023,
            "unused: axis data of the mesh, so that its 8 devices do the same work; ",
        ),
    ],
)
def test_data_that_does_not_divide(dim: int, before: str) -> None:
    def step(params: Any, batch: Any) -> Any:
        return mlp_step(params, batch["x"] * batch["scale"])

    shapes = {"up": (dim, dim), "down": (dim, dim), "x": (4096, dim), "scale": (1, dim)}
    given = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()
    }
    params = {name: given.pop(name) for name in ("up", "down")}
    found = flm.suggest(step, params, given, **(OPTIONS | {"mesh": "data=8"}))
    assert found.layout_map.freeze().batch == ()
    assert (
        f"{before}the first dim of batch/scale (1,{dim}) does not divide by 8; pad or "
        "broadcast it, or give it a sharding, so that rules can split the rest"
    ) in told(found, 3)


@pytest.mark.parametrize("how", ["shape", "array", "flm.jit", "jax.jit"])
def test_data_with_a_sharding_keeps_it(how: str) -> None:
    mesh = flm.DeviceMesh(SMALL)
    own = NamedSharding(mesh.jax_mesh, P("data"))
    step: Any = mlp_step
    params = {"up": jnp.ones((16, 64)), "down": jnp.ones((64, 16))}
    x: Any = jnp.ones((32, 16))
    if how == "shape":
        x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own)
    elif how == "array":
        x = jax.device_put(x, own)
    elif how == "flm.jit":
        step = flm.jit(step, in_shardings={"x": P("data")})
    else:
        own = NamedSharding(mesh.jax_mesh.abstract_mesh, P("data"))
        step = jax.jit(step, in_shardings=(None, own))
    found = flm.suggest(step, params, x, **OPTIONS)
    for choice in found.choices.values():
        assert choice.layout_map.freeze().batch == ("data",)
        # Four parts; with another batch the search would make two or eight.
        assert choice.cost.at_rest["data"] == x.size * x.dtype.itemsize // 4
    assert 'kept: the shardings that data came with, x ("data", None)' in told(found, 3)
    assert "unused: " not in told(found, 3)


def test_data_that_is_given_replicated_stops_no_batch() -> None:
    """As for `flm.jit`, which splits the rest."""

    def step(params: Any, batch: Any) -> Any:
        return mlp_step(params, batch["x"] * batch["scale"])

    replicated = NamedSharding(flm.DeviceMesh(SMALL).jax_mesh, P())
    scale = jax.device_put(jnp.ones((1, 16)), replicated)
    params = {"up": jnp.ones((16, 64)), "down": jnp.ones((64, 16))}
    batch = {"x": jnp.ones((32, 16)), "scale": scale}
    found = flm.suggest(step, params, batch, **OPTIONS)
    assert found.layout_map.freeze().batch
    layout_map = found.layout_map.on(SMALL)
    flm.jit(step, layout_map=layout_map, donate_argnames="params")(params, batch)


def test_explain_prices_the_next_best(
    wide: flm.Suggestion, small: flm.Suggestion
) -> None:
    first, second = wide.explain("g/c/kernel").split("\n", 1)
    assert first == 'g/c/kernel: (None, None, "tensor")'
    assert second.startswith('best other layout: (None, "tensor", None): ')
    assert all(len(line) <= 80 for line in second.splitlines())
    with pytest.raises(KeyError, match="no parameter has the path 'x'"):
        wide.explain("x")
    with pytest.raises(KeyError, match="'kernel' is the end of several paths: model/g"):
        wide.explain("kernel")
    assert small.explain("params/up").startswith("params/up: ")


def test_a_suggestion_is_kept_without_the_program(small: flm.Suggestion) -> None:
    """In a cache, or sent to another process."""
    for kept in (pickle.loads(pickle.dumps(small)), copy.deepcopy(small)):
        assert kept == small and str(kept) == str(small)
        with pytest.raises(flm.LayoutError, match="explain has no program"):
            kept.explain("up")


def test_explain_after_an_interrupt() -> None:
    """What the search has not come to may be better, and is no next best."""

    def step(params: Any, x: Any) -> Any:
        return jnp.tanh(x @ params["up"]) @ params["down"]

    found = flm.suggest(step, *GIVEN[1:], **OPTIONS, limit_seconds=0)
    text = " ".join(found.explain("up").split())
    assert text.startswith('up: (None, ("data", "tensor")) best other layout: (None, ')
    assert re.search(r"an estimated \S+ µs a step instead of \S+ µs \(-\d", text)


def test_an_equal_time_is_called_equal(small: flm.Suggestion) -> None:
    texts = [
        report_text.next_best(
            "None",
            dataclasses.replace(small.cost, link_seconds=seconds),
            small.cost,
            False,
        )
        for seconds in (small.cost.link_seconds, 2 * small.cost.link_seconds)
    ]
    time = seconds_text(small.cost.seconds)
    assert texts[0].startswith(
        f"best other layout: None: the same time, {time} a step; "
    )
    assert f" a step instead of {time} (+" in texts[1]


@needs_the_estimate
def test_another_order_of_axes_is_no_other_layout() -> None:
    found = flm.suggest(*GIVEN, **OPTIONS, hbm=1000)
    first, second = found.explain("up").split("\n", 1)
    assert first == 'up: (None, ("data", "tensor"))'
    assert '("tensor", "data")' not in second and "best other layout: " in second


def test_a_small_parameter_is_not_explained_by_prices() -> None:
    step, params, x = GIVEN
    params = params | {"bias": jax.ShapeDtypeStruct((8,), jnp.float32)}
    found = flm.suggest(step, params, x, **OPTIONS, limit_seconds=0.0)
    assert "too small to be sharded" in found.explain("bias")


def test_the_rules_of_today_are_priced_beside() -> None:
    today = flm.LayoutMap(batch="data")
    today["up"] = (None, "tensor")
    today["down"] = ("tensor", None)
    found = flm.suggest(*GIVEN, **OPTIONS, layout_map=today)
    assert list(found.choices)[0] == "suggested" and list(found.choices)[-1] == "today"
    costs = [one.cost.seconds for one in found.choices.values()]
    assert costs[0] == min(costs)
    assert not found.is_today_better
    assert found.choices["today"].layout_map == today.on(found.mesh)
    assert " with the current rules (-" in told(found, 0)


def test_rules_of_today_for_another_mesh() -> None:
    today = flm.LayoutMap(batch="data")
    today["up"] = (None, "model")
    found = flm.suggest(*GIVEN, **OPTIONS, layout_map=today, limit_seconds=0.0)
    assert "today" not in found.choices
    assert "the current rules do not fit this mesh" in told(found, 3)
    with pytest.raises(flm.errors.RuleError, match="layout_map= needs a LayoutMap"):
        flm.suggest(*GIVEN, **OPTIONS, layout_map=[("up", None)])


def test_the_order_of_the_partitioner_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the current rules are checked, too."""
    plan, plans = suggest.planned, []

    def dear_at_first(*args: Any) -> Any:
        plans.append(plan(*args))
        flops = plans[-1].flops_per_device * (100 if len(plans) == 1 else 1)
        return dataclasses.replace(plans[-1], flops_per_device=flops)

    monkeypatch.setattr(suggest, "planned", dear_at_first)
    options = OPTIONS | {"check": True}
    found = flm.suggest(*GIVEN, **options, layout_map=flm.LayoutMap(strict=False))
    assert len(plans) == len(found.choices)
    assert all(one.plan is not None for one in found.choices.values())
    costs = [one.cost.seconds for one in found.choices.values()]
    assert costs[0] == min(costs[:-1])
    assert "overruled: by XLA's partitioner a step takes " in told(found, 3)
    assert f"; what is suggested takes {seconds_text(costs[0])}, est" in told(found, 3)


def test_what_is_cheaper_by_both_overrules_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, cheap = search.Search.run, []

    def ends_with_full_sharding(self: search.Search) -> None:
        run(self)
        cheap.append(dataclasses.replace(self.best, fixed=None))
        self.best = self.with_rules(fully_sharded(self.problem))

    monkeypatch.setattr(search.Search, "run", ends_with_full_sharding)
    monkeypatch.setattr(search.Search, "second", lambda _: cheap)
    monkeypatch.setattr(suggest, "planned", lambda planner, *_: planner.estimate(0.0))
    found = flm.suggest(*GIVEN, **(OPTIONS | {"check": True}))
    assert found.plan is not None and "full sharding" in found.choices
    assert "overruled: " not in told(found, 3)


def test_progress_says_what_was_found_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []

    def remembered(what: Any, *_: Any) -> Any:
        shown.append(what)
        return contextlib.nullcontext()

    monkeypatch.setattr(suggest, "shown_progress", remembered)
    found = flm.suggest(*GIVEN, **OPTIONS)
    assert shown[::2] == ["lowering mlp_step", "comparing rules for mlp_step"]
    best = seconds_text(found.cost.seconds)
    assert re.fullmatch(
        rf"suggesting rules for mlp_step: {best} a step, \d+ layouts tried", shown[1]()
    )


@pytest.mark.parametrize("calls", [1, 2])
def test_an_interrupt_in_rules_for_activations(
    calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, numbers = search.Search._key, itertools.count(1)

    def interrupted(*args: Any) -> Any:
        if next(numbers) == calls:
            raise KeyboardInterrupt
        return key(*args)

    monkeypatch.setattr(search.Search, "_key", interrupted)
    found = flm.suggest(*GIVEN, **OPTIONS)
    assert not found.is_complete and found.cost.seconds > 0


def test_a_limit_of_time_gives_the_best_so_far() -> None:
    ended = flm.suggest(*GIVEN, **(OPTIONS | {"check": True}), limit_seconds=0.0)
    assert not ended.is_complete and ended.plan is None
    assert "interrupted: this is the best so far" in told(ended, 0)


@pytest.mark.parametrize("at", [0, 2, 11, -1])
def test_an_interrupt_at_any_price(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    priced, calls = price.Pricer._of, list[int]()
    ends: list[int] = []

    def interrupted(*args: Any) -> Any:
        calls.append(len(calls))
        if calls[-1:] == ends:
            raise KeyboardInterrupt
        return priced(*args)

    monkeypatch.setattr(price.Pricer, "_of", interrupted)
    assert flm.suggest(*GIVEN, **OPTIONS).is_complete
    ends = [calls[at]]
    calls.clear()
    found = flm.suggest(*GIVEN, **OPTIONS)
    assert not found.is_complete
    assert found.cost == min(
        (one.cost for one in found.choices.values()), key=lambda cost: cost.seconds
    )


def test_an_interrupt_while_operations_are_walked(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Attributes, "per_value", interrupted)
    with pytest.raises(KeyboardInterrupt):
        problem.prepared.spread({})


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (flm.LayoutError("no answer\nof it"), "not checked: no answer how sure"),
        (KeyboardInterrupt(), "not checked: the check was interrupted how sure"),
    ],
)
def test_a_check_that_fails_is_a_note(
    error: BaseException, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, numbers = suggest.planned, itertools.count()

    def fails(*args: Any) -> Any:
        if next(numbers):
            raise error
        return plan(*args)

    monkeypatch.setattr(suggest, "planned", fails)
    found = flm.suggest(*GIVEN, **(OPTIONS | {"check": True}))
    assert all(one.plan is None for one in found.choices.values())
    assert found.is_complete and note in told(found, 3)


@pytest.mark.parametrize("at", [0, 1])
def test_an_interrupt_of_what_is_compared(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules_of, numbers = compare.rules_of, itertools.count()

    def interrupted(*args: Any) -> Any:
        if next(numbers) == at:
            raise KeyboardInterrupt
        return rules_of(*args)

    monkeypatch.setattr(compare, "rules_of", interrupted)
    found = flm.suggest(*GIVEN, **OPTIONS)
    assert list(found.choices) == ["suggested"] and not found.is_complete
    assert "full sharding" not in told(found, 0)


def test_the_least_memory_is_found_from_the_start_too() -> None:
    mesh: Any = {"mesh": "data=4,tensor=2"}
    least = flm.suggest(*GIVEN, **(OPTIONS | mesh), hbm=1000)
    limit = least.cost.peak_bytes
    assert not least.fits and limit is not None
    assert flm.suggest(*GIVEN, **(OPTIONS | mesh), hbm=limit).fits


def test_the_least_memory_is_that_of_the_peak() -> None:
    """Full sharding holds the least at rest, and more at the peak."""
    shapes = {"up": (4096, 16384), "down": (16384, 4096)}
    params = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}
    x = jax.ShapeDtypeStruct((8192, 4096), jnp.float32)
    options = OPTIONS | {"mesh": "data=8,model=4"}
    least = flm.suggest(mlp_step, params, x, **options, hbm=10 * 2**20)
    full = least.choices["full sharding"].cost
    assert least.cost.at_rest_bytes > full.at_rest_bytes
    assert not least.fits and (least.cost.peak_bytes or 0) < (full.peak_bytes or 0)


def test_of_equal_times_the_least_memory_is_suggested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = OPTIONS | {"mesh": "data=8"}
    before = flm.suggest(*GIVEN, **options)
    monkeypatch.setattr(compare, "_SAME", 100.0)
    found = flm.suggest(*GIVEN, **options)
    peaks = [one.cost.peak_bytes or 0 for one in found.choices.values()]
    assert found.cost.peak_bytes == min(peaks) < (before.cost.peak_bytes or 0)
    assert "overruled: " not in told(found, 3)


def test_experts_beside_a_tied_table() -> None:
    """Three large parameters, of which two make up most classes."""
    struct = jax.ShapeDtypeStruct
    shapes = {"table": (32000, 2048), "router": (2048, 8)}
    shapes |= {"up": (8, 2048, 8192), "down": (8, 8192, 2048)}
    params = {name: struct(shape, jnp.float32) for name, shape in shapes.items()}
    tokens = struct((64, 512), jnp.int32)

    def step(params: Any, tokens: Any) -> Any:
        def loss(params: Any) -> Any:
            x = params["table"][tokens]
            chosen, places = jax.lax.top_k(jax.nn.softmax(x @ params["router"]), 2)
            shares = (jax.nn.one_hot(places, 8) * chosen[..., None]).sum(-2)
            up = jax.nn.silu(jnp.einsum("bsd,edf->ebsf", x, params["up"]))
            down = jnp.einsum("ebsf,efd->ebsd", up, params["down"])
            x += jnp.einsum("ebsd,bse->bsd", down, shares)
            logits = x @ params["table"].T
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
            return losses.mean()

        return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params))

    mesh = "data=4,expert=8"
    found = flm.suggest(step, params, tokens, mesh=mesh, check=False)
    layouts = {name: own.axes for name, own in found.layout_map.items()}
    assert layouts["(^|/)(down|up)$"] == ("expert", None, None)
    assert layouts["table"] == ("expert", None)


class Flat(nnx.Module):
    def __init__(self, dim: int) -> None:
        self.up = nnx.Param(jnp.ones((dim, 4 * dim)))
        self.down = nnx.Param(jnp.ones((4 * dim, dim)))

    def __call__(self, x: Any) -> Any:
        return jnp.tanh(x @ self.up[...]) @ self.down[...]


def test_rules_without_the_names_of_arguments() -> None:
    """As `flm.create` sees the paths."""

    def step(model: Any, x: Any) -> Any:
        return nnx.grad(lambda model: model(x).sum())(model)

    model, x = nnx.eval_shape(lambda: Flat(1024)), GIVEN[2]
    found = flm.suggest(step, model, x, mesh="data=4,tensor=2", check=False)
    assert {*found.layout_map} == {"up", "down"}
    layout_map = found.layout_map.on(flm.DeviceMesh("data=4,tensor=2"))
    made = flm.create(lambda: Flat(16), layout_map)
    up = layout_map["up"]
    assert up is not None and (*made.up.get_value().sharding.spec,) == up.axes

    def both(first: Any, second: Any, x: Any) -> Any:
        return step(first, x[:, :1024]), step(second, x)

    models = model, nnx.eval_shape(lambda: Flat(2048))
    x = jax.ShapeDtypeStruct((1 << 14, 2048), jnp.float32)
    options: Any = {"mesh": "data=8", "check": False, "limit_seconds": 0}
    found = flm.suggest(both, *models, x, **options)
    resolution = found.layout_map.resolve({"first": models[0], "second": models[1]})
    assert all(any(leaf.layout.axes) for leaf in resolution)


def test_state_that_is_told_by_shape_alone() -> None:
    note = "state by shape alone: params; flm.jit and flm.pod.plan take what no rule"
    assert note not in told(flm.suggest(*GIVEN, **OPTIONS), 3)
    unnamed = OPTIONS | {"donate_argnames": ()}
    params = {**GIVEN[1], "bias": jax.ShapeDtypeStruct((8,), jnp.float32)}
    assert note in told(flm.suggest(GIVEN[0], params, GIVEN[2], **unnamed), 3)


def test_rows_that_divide_by_no_axis() -> None:
    x = jax.ShapeDtypeStruct((30, 1024), jnp.float32)
    found = flm.suggest(*GIVEN[:2], x, **(OPTIONS | {"mesh": "data=8,model=4"}))
    assert found.layout_map.freeze().batch == ()
    note = "no data is split over the batch: the first dim of x (30,1024) does not "
    assert f"{note}divide by 4; pad or broadcast it" in told(found, 3)


def test_what_a_search_drops_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    given = train_step, *nnx.eval_shape(make), TOKENS
    short = problem_of(*given, mesh=MESH)
    monkeypatch.setattr(problem_module, "shorten", lambda _: None)
    whole = problem_of(*given, mesh=MESH)
    counts = [str(one.prepared.module).count("stablehlo.") for one in (short, whole)]
    assert counts[0] < 0.9 * counts[1]
    for batch in short.batches:
        start = fully_sharded(short, batch)
        assert start == fully_sharded(whole, batch)
        costs = [price.Pricer(one, None).with_peak(start) for one in (short, whole)]
        assert costs[0] == costs[1]


def test_names_of_layers_have_rules() -> None:
    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            y = x
            for layer in range(2):
                y = jnp.tanh(y @ params["up"]) @ params["down"]
                y = flm.distribute_tensor(y, f"layers/{layer}/mid/(out")
            return y.sum()

        return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params))

    found = flm.suggest(step, *GIVEN[1:], **OPTIONS)
    names = found.layout_map.names
    assert len(names) == 1
    flm.pod.plan(flm.jit(step, layout_map=found.layout_map), *GIVEN[1:])


def test_few_rules_for_activations(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = {*range(len(problem.points))}
    needed = {2, len(every) - 1}  # as if rules for these two gave what is wanted

    def key(_: Any, candidate: Any) -> tuple[int, float]:
        return 0, 0.0 if candidate.fixed >= needed else 1e3

    monkeypatch.setattr(search.Search, "_key", key)
    start = fully_sharded(problem)
    whole = search.Search(problem, price.Pricer(problem, None), 1 << 40)
    assert whole.with_rules(start).fixed == needed
    for ending in (search.Stopped, KeyboardInterrupt):

        def end(ending: type[BaseException] = ending) -> bool:
            raise ending

        priced = price.Pricer(problem, None)
        ended = search.Search(problem, priced, 1 << 40, is_over=end)
        assert ended.with_rules(start).fixed == every
        assert not ended.is_complete


# --------------------------------------------------------------------- errors


def test_arguments_without_state() -> None:
    def step(params: Any, x: Any) -> Any:
        return x @ params["up"]

    # A single array may be data.
    given = {"up": GIVEN[1]["up"]}, GIVEN[2]
    with pytest.raises(
        flm.LayoutError,
        match="step has no state to lay out: each of params, x is taken for data; "
        "say what is state: donate_argnames=",
    ):
        flm.suggest(step, *given, mesh=SMALL)
    named = OPTIONS | {"donate_argnames": "params"}
    assert "state: params" in str(flm.suggest(flm.jit(step), *given, **named))


def test_containers_of_state() -> None:
    def step(params: Any, batch: Any) -> Any:
        return mlp_step(params, batch["x"] * batch["scale"])

    batch = {"x": GIVEN[2], "scale": jax.ShapeDtypeStruct((1, 1024), jnp.float32)}
    options: Any = {"mesh": SMALL, "check": False, "limit_seconds": 0}
    found = flm.suggest(step, GIVEN[1], batch, **options)
    assert "state: params; for data: batch" in told(found, 3)
    # Or for state, as no rows are common, and then JAX has no use for them.
    batch["scale"] = jax.ShapeDtypeStruct((1024,), jnp.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = flm.suggest(step, GIVEN[1], batch, **options)
    assert "state: params, batch; for data: none" in told(found, 3)


@pytest.mark.parametrize("of_jax", [False, True])
def test_frozen_parameters_beside_those_that_are_named(of_jax: bool) -> None:
    def step(adapters: Any, frozen: Any, x: Any) -> Any:
        def loss(adapters: Any) -> Any:
            both = jax.tree.map(jnp.add, frozen, adapters)
            return (jnp.tanh(x @ both["up"]) @ both["down"]).sum()

        return jax.grad(loss)(adapters)

    options: Any = {"mesh": SMALL, "check": False, "limit_seconds": 0}
    given = GIVEN[1], GIVEN[1], GIVEN[2]
    made: Any = jax.jit(step) if of_jax else step
    found = flm.suggest(made, *given, **options, donate_argnames="adapters")
    assert "state: adapters, frozen; for data: x" in told(found, 3)


@pytest.mark.parametrize("donated", [(), (0, 1)])
def test_state_of_a_function_of_jax_jit(donated: tuple[int, ...]) -> None:
    """Beside an optimizer state, which is known by its type."""
    tx = optax.sgd(1.0, momentum=0.9)

    def step(variables: Any, state: Any, x: Any) -> Any:
        up = variables["params"]["up"]
        gradients = jax.grad(lambda up: jnp.square(x @ up).sum())(up)
        changes, state = tx.update({"params": {"up": gradients}}, state)
        return optax.apply_updates(variables, changes), state

    variables = {"params": {"up": GIVEN[1]["up"]}}
    given = variables, jax.eval_shape(tx.init, variables), GIVEN[2]
    options: Any = {"mesh": SMALL, "check": False, "limit_seconds": 0}
    step = jax.jit(step, donate_argnums=donated)
    if not donated:
        with pytest.raises(
            flm.LayoutError,
            match='each of variables, x is taken for data; .*argnames="variables"',
        ):
            flm.suggest(step, *given, **options)
        options["donate_argnames"] = "variables"
    found = flm.suggest(step, *given, **options)
    assert "state: variables, state; for data: x" in told(found, 3)


@needs_libtpu
def test_the_compiler_checks_the_best_two() -> None:
    where: Any = {"mesh": "data=4", "topology": "v5e:2x2"}
    found = flm.suggest(*GIVEN, **where, check="compile")
    assert found.plan is not None and found.plan.engine == "compile"
    assert found.cost.peak_bytes == found.plan.memory.peak_bytes
    assert found.fits and "that the compiler for TPUs makes" in told(found, 3)


def test_the_compiler_needs_a_topology() -> None:
    with pytest.raises(flm.errors.MeshError, match="needs a topology: topology="):
        flm.suggest(*GIVEN, mesh=SMALL, check="compile")


def test_arguments_that_are_missing() -> None:
    with pytest.raises(flm.LayoutError, match="cannot be called with"):
        flm.suggest(mlp_step, GIVEN[1], mesh=SMALL)


def test_meshes_that_are_refused() -> None:
    explicit = jax.sharding.AbstractMesh(
        (2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
    )
    with pytest.raises(flm.LayoutError, match="suggest rules for a mesh of auto axes"):
        flm.suggest(*GIVEN, mesh=explicit, donate_argnames="params")
    with pytest.raises(flm.errors.MeshError, match="has one device"):
        flm.suggest(*GIVEN, mesh="data=1", donate_argnames="params")
    with pytest.raises(flm.errors.MeshError, match="a mesh is missing: pass mesh="):
        flm.suggest(*GIVEN, donate_argnames="params")
