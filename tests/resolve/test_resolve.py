"""resolve: from rules and a tree to one Resolution."""

import copy
import gc
import json
import math
import pickle
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from shapes import ABSTRACT, all_axes, mapped, nested, struct

import flax_layoutmap as flm

P = PartitionSpec


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


def make_mlp() -> Mlp:
    return Mlp(nnx.Rngs(0))


MLP_RULES = {"up/kernel": (None, "model"), "down/kernel": ("model", None), "bias": None}
MLP_AXES = {
    "down/bias": (None,),
    "down/kernel": ("model", None),
    "dropout/rngs/count": (),
    "dropout/rngs/key": (),
    "up/bias": (None,),
    "up/kernel": (None, "model"),
}


# ----------------------------------------------------------- kinds of trees


def test_a_function_a_module_a_state_and_structs_resolve_alike() -> None:
    layout_map = mapped(MLP_RULES)
    model = make_mlp()
    for tree in [
        make_mlp,
        model,
        nnx.state(model),
        nnx.to_pure_dict(nnx.state(model)),
        nnx.eval_shape(make_mlp),
        jax.eval_shape(lambda: nnx.state(make_mlp())),
    ]:
        resolution = layout_map.resolve(tree)
        assert all_axes(resolution) == MLP_AXES
        assert resolution["up/kernel"].shard_shape == (8, 4)


def test_a_function_is_only_traced() -> None:
    allocated = []

    def make() -> Mlp:
        model = make_mlp()
        allocated.append(isinstance(model.up.kernel[...], jax.core.Tracer))  # type: ignore[attr-defined]
        return model

    gc.collect()
    before = len(jax.live_arrays())
    mapped(MLP_RULES).resolve(make)
    assert allocated == [True]
    assert len(jax.live_arrays()) == before


def test_linen_variables_resolve_by_the_path_within_params() -> None:
    model = nn.Sequential([nn.Dense(16), nn.BatchNorm(use_running_average=True)])
    x = jnp.ones((2, 8))
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    layout_map = mapped({"^layers_0/kernel": (None, "model")}, match="match")
    for tree in (variables, lambda: model.init(jax.random.key(0), x)):
        resolution = layout_map.resolve(tree)
        assert all_axes(resolution)["params/layers_0/kernel"] == (None, "model")
        assert resolution["layers_0/kernel"].path == "params/layers_0/kernel"
        assert "batch_stats/layers_1/mean" in resolution


def test_a_linen_module_itself_has_no_variables() -> None:
    with pytest.raises(flm.errors.StructureError, match="lambda: module.init"):
        mapped().resolve(nn.Dense(3))


def test_empty_trees_and_empty_maps() -> None:
    assert len(mapped().resolve({})) == 0
    assert mapped().resolve({}).report().splitlines()[-1] == (
        "mesh data=2,model=4: 0 B per device of 0 B; 0.0% of the bytes replicated"
    )
    resolution = mapped().resolve({"w": struct(4)})
    assert all_axes(resolution) == {"w": (None,)} and resolution.unmatched == ("w",)
    assert "there are no rules" in resolution.explain("w")


def test_rules_must_be_rules() -> None:
    rules: Any = [("w", None)]
    with pytest.raises(flm.errors.RuleError, match="LayoutMap.from_rules"):
        flm.resolve({"w": struct(4)}, rules)


# --------------------------------------------- replicated before any rule


def test_scalars_counters_and_random_state_are_replicated() -> None:
    class Stateful(nnx.Module):
        def __init__(self) -> None:
            self.scale = nnx.Param(jnp.float32(1.0))
            self.rngs = nnx.Rngs(0)
            self.norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))

    tree = {
        "model": Stateful(),
        "step": 3,
        "rate": 0.1,
        "flag": True,
        "key": jax.random.key(0),
        "keys": jax.random.split(jax.random.key(0), 4),
        "name": "run 7",
        "zero": np.float32(1.0),
    }
    resolution = mapped({".*": ("model",)}, unmatched="error").resolve(tree)
    found = {leaf.path: leaf.reason for leaf in resolution if leaf.layout.is_replicated}
    assert found == {
        "flag": "scalar",
        "key": "random state",
        "keys": "random state",
        "model/rngs/default/count": "random state",
        "model/rngs/default/key": "random state",
        "model/scale": "scalar",
        "name": "not an array",
        "rate": "scalar",
        "step": "scalar",
        "zero": "scalar",
    }
    roles = {leaf.path: leaf.role for leaf in resolution}
    assert roles["model/scale"] == roles["rate"] == "parameter"
    assert {roles[p] for p in ("step", "flag", "key", "name")} == {"other"}
    assert resolution.unused_rules == ()


def test_old_style_keys_in_a_variable_are_random_state() -> None:
    class Old(nnx.Module):
        def __init__(self) -> None:
            self.key = nnx.RngKey(jax.random.PRNGKey(0), tag="default")

    leaf = mapped({".*": ("model",)}).resolve(Old())["key"]
    assert leaf.shape == (2,) and leaf.layout.is_replicated


def test_leaves_that_are_no_arrays_stay_as_they_are(mesh: flm.DeviceMesh) -> None:
    tree = {"name": "run", "step": 3, "w": np.ones((2, 4), np.float32)}
    abstract = mapped({"w": None}, mesh=mesh).abstract(tree)
    assert abstract["name"] == "run"
    assert (abstract["step"].shape, abstract["step"].dtype) == ((), jnp.int32)
    assert abstract["w"].sharding == NamedSharding(mesh.jax_mesh, P())


# ------------------------------------------------------------ matching rules


PATTERNS = ["kernel", "up/kernel", "^up", "k.*l$", "down/.*", "bias", "up", "never"]
LAYOUTS: list[Any] = [
    None, ("data",), ("data", "model"), (None, "model"), (..., "model"),
    ("data", ..., "model"), (("data", "model"), None), P("model"),
]  # fmt: skip
SIZES = {"data": 2, "model": 4, None: 1}


def parts_of(layout: Any, ndim: int) -> list[int] | None:
    """Into how many parts a layout divides each dim; None where the rank differs."""
    entries = [] if layout is None else [*layout]
    if layout is None or isinstance(layout, P):
        entries.append(...)
    if ... in entries:
        at, more = entries.index(...), ndim - len(entries) + 1
        entries[at : at + 1] = [None] * more if more >= 0 else [None] * 9
    if len(entries) != ndim:
        return None
    axes = [entry if isinstance(entry, tuple) else (entry,) for entry in entries]
    return [math.prod(SIZES[name] for name in names) for names in axes]


def expected(path: str, shape: Any, rules: Any, options: Any) -> Any:
    """Number of the rule and shape of a shard, by the plain rules; None: an error."""
    matched = {}
    for number, (pattern, layout, rank) in enumerate(rules, 1):
        parts = parts_of(layout, len(shape))
        is_match = getattr(re, options["match"])(pattern, path) or pattern == path
        if is_match and (rank == "error" or parts is not None):
            if pattern == path:
                matched = {number: (layout, parts)}
                break
            matched[number] = layout, parts
    if not shape:
        return None, ()
    if not matched:
        return None if options["unmatched"] == "error" else (None, shape)
    layouts = {flm.TensorLayout(layout) for layout, _ in matched.values()}
    if options["overlap"] == "error" and len(layouts) > 1:
        return None
    number = [*matched][-1 if options["overlap"] == "last" else 0]
    parts = matched[number][1]
    if parts is None:
        return None
    sizes = [*zip(shape, parts, strict=True)]
    if options["indivisible"] == "error" and any(size % n for size, n in sizes):
        return None
    return number, tuple(size if size % n else size // n for size, n in sizes)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(PATTERNS),
            st.sampled_from(LAYOUTS),
            st.sampled_from(["error", "error", "skip"]),
        ),
        unique_by=lambda rule: rule[0],
        max_size=4,
    ),
    st.fixed_dictionaries(
        {
            "match": st.sampled_from(["search", "match", "fullmatch"]),
            "overlap": st.sampled_from(["error", "first", "last"]),
            "unmatched": st.sampled_from(["replicate", "replicate", "error"]),
            "indivisible": st.sampled_from(["replicate", "error"]),
        }
    ),
    st.lists(st.sampled_from([0, 2, 3, 8, 16]), max_size=3).map(tuple),
)
def test_any_rules_are_applied_as_the_plain_rules_say(
    rules: Any, options: Any, shape: Any
) -> None:
    shapes = {"up/kernel": shape, "down/kernel": (8, 16), "bias": (8,)}
    wanted = {path: expected(path, of, rules, options) for path, of in shapes.items()}
    wrong = {path for path, result in wanted.items() if result is None}
    made = [flm.Rule(pattern, layout, rank=rank) for pattern, layout, rank in rules]
    layout_map = flm.LayoutMap.from_rules(made, ABSTRACT, **options)
    tree = nested({path: struct(*of) for path, of in shapes.items()})
    if wrong:
        with pytest.raises(flm.errors.ResolveError) as caught:
            layout_map.resolve(tree)
        assert {text.split(" (")[0] for text in caught.value.problems} == wrong
        return
    resolution = layout_map.resolve(tree)
    assert {x.path: (x.rule_number, x.shard_shape) for x in resolution} == wanted


def test_rules_that_differ() -> None:
    rules = {"kernel": ("data", None), "up": (None, "model"), "k": (None, "data")}
    with pytest.raises(flm.errors.ResolveError) as caught:
        mapped(rules).resolve({"up": {"kernel": struct(8, 16)}})
    for part in (
        "up/kernel (8,16): rules with different layouts match it: ",
        "rule 1 'kernel' → ('data', None), ",
        "rule 2 'up' → (None, 'model'), ",
        "rule 3 'k' → (None, 'data')",
    ):
        assert part in str(caught.value)


def test_unmatched_leaves() -> None:
    tree = {"w": struct(8, 8), "step": 3, "key": jax.random.key(0)}
    assert mapped().resolve(tree)["w"].reason == "no rule"
    with pytest.raises(flm.errors.ResolveError) as caught:
        mapped(unmatched="error").resolve(tree)
    assert caught.value.problems == (
        "w (8,8): no rule matches it; add one (None replicates it), or use "
        'unmatched="replicate"',
    )
    resolution = mapped({"w": None}, unmatched="error").resolve(tree)
    assert resolution["w"].reason == "exact key" and resolution.unmatched == ()


# ------------------------------------------------------ rank, divisibility


@pytest.mark.parametrize(
    ("layout", "shape", "text"),
    [
        (
            (None, "model"),
            (3, 8, 16),
            "has 2 dims, the leaf has 3; for leading dims that are not sharded (a "
            "stacked layer) write (..., None, 'model')",
        ),
        ((None, "model"), (16,), "has 2 dims, the leaf has 1; narrow the pattern"),
        (("data", ..., "model"), (8,), "has 2 or more dims, the leaf has 1; narrow"),
        (P("data", "model"), (8,), "has 2 or more dims, the leaf has 1; narrow"),
    ],
)
def test_a_layout_of_another_rank(layout: Any, shape: Any, text: str) -> None:
    with pytest.raises(flm.errors.ResolveError) as caught:
        mapped({"w": layout}).resolve({"w": struct(*shape)})
    assert text in str(caught.value)


def test_indivisible_dims() -> None:
    tree = {"w": struct(3, 10, 8)}
    layout = ("data", "model", None)
    with pytest.raises(flm.errors.ResolveError) as caught:
        mapped({"w": layout}).resolve(tree)
    assert (
        "dim 0 of size 3 is not divisible by mesh axis 'data' of size 2; dim 1 of "
        in (str(caught.value))
    )
    resolution = mapped({"w": layout}, indivisible="replicate").resolve(tree)
    leaf = resolution["w"]
    assert leaf.layout.is_replicated and leaf.shard_shape == (3, 10, 8)
    assert leaf.reason == "exact key" and resolution.fallbacks == (leaf,)
    assert leaf.fallback is not None and leaf.fallback.count("replicated") == 2
    assert f"fallback: w: {leaf.fallback}" in resolution.report()


def test_one_error_lists_every_problem() -> None:
    layout_map = mapped({"a": (None, "model"), "b": ("data",), "c": None, "x/": None})
    layout_map["/d"] = (None, "model")
    tree = {"a": struct(3, 3), "b": struct(2, 2), "c": struct(4), "step": 1}
    with pytest.raises(flm.errors.ResolveError) as caught:
        layout_map.resolve({**tree, "x": {"d": struct(4, 4)}})
    problems = caught.value.problems
    assert [problem.split(" (")[0] for problem in problems] == ["a", "b", "x/d"]
    text = str(caught.value)
    assert text.startswith("3 leaves do not fit the rules on mesh data=2,model=4:\n")
    assert all(problem in text for problem in problems)


def test_a_rule_without_a_mesh_keeps_its_axes_unchecked() -> None:
    layout_map = flm.LayoutMap()
    layout_map["w"] = (None, "anything")
    resolution = layout_map.resolve({"w": struct(8, 3)})
    leaf = resolution["w"]
    assert resolution.specs == {"w": P(None, "anything")}
    assert leaf.shard_shape is None and leaf.bytes_per_device == 96
    assert resolution.mesh is None and "no mesh: 96 B" in resolution.report()
    for ask in (lambda: resolution.shardings, resolution.abstract):
        with pytest.raises(
            flm.errors.MeshError, match="the rules have no mesh; give one"
        ):
            ask()
    assert resolution.on(flm.DeviceMesh.abstract("anything=3"))["w"].shard_shape == (
        8,
        1,
    )
    with pytest.raises(flm.errors.RuleError, match="has no such axis"):
        resolution.on(ABSTRACT)


def test_a_mesh_of_one_device() -> None:
    mesh = flm.DeviceMesh((1, 1), ("data", "model"), devices=jax.devices()[:1])
    layout_map = mapped({"w": ("data", "model")}, mesh=mesh)
    resolution = layout_map.resolve({"w": struct(3, 5)})
    assert resolution["w"].shard_shape == (3, 5)
    assert resolution.replicated_share == 0.0
    assert resolution.specs == {"w": P("data", "model")}
    placed = layout_map.place({"w": np.ones((3, 5), np.float32)})
    assert placed["w"].sharding == NamedSharding(mesh.jax_mesh, P("data", "model"))


# ------------------------------------------------------------ precedence


def annotated(metadata: dict[str, Any], shape: tuple[int, ...] = (8, 8)) -> nnx.Module:
    class One(nnx.Module):
        def __init__(self) -> None:
            with nnx.use_eager_sharding(False):
                self.w = nnx.Param(jnp.zeros(shape), **metadata)

    return One()


EXPLICIT = flm.TensorLayout(("model", None))
PRECEDENCE: list[tuple[dict[str, Any], dict[str, Any], Any, str]] = [
    ({"layout": EXPLICIT, "out_sharding": (None, "data")}, {"w": ("data", None)},
     ("model", None), "explicit layout"),
    ({"layout": EXPLICIT}, {}, ("model", None), "explicit layout"),
    ({"layout": [None, "data"]}, {}, (None, "data"), "explicit layout"),
    ({"layout": P("data")}, {}, ("data", None), "explicit layout"),
    ({"out_sharding": (None, "data")}, {"w": ("data", None)},
     ("data", None), "exact key"),
    ({"out_sharding": (None, "data")}, {"w": None}, (None, None), "exact key"),
    ({"out_sharding": (None, "data")}, {}, (None, "data"), "flax metadata"),
    ({"out_sharding": P("data")}, {}, ("data", None), "flax metadata"),
    ({"out_sharding": P(P.UNCONSTRAINED, "data")}, {}, (None, "data"), "flax metadata"),
    ({"out_sharding": ["data", None]}, {}, ("data", None), "flax metadata"),
    ({"out_sharding": (("data", "model"), None)}, {},
     (("data", "model"), None), "flax metadata"),
    ({"out_sharding": ("embed", "mlp"), "sharding_rules":
      (("embed", None), ("mlp", "model"))}, {}, (None, "model"), "flax metadata"),
    ({}, {}, (None, None), "no rule"),
]  # fmt: skip


@pytest.mark.parametrize(("metadata", "rules", "axes", "reason"), PRECEDENCE)
def test_explicit_layout_rule_metadata_replicated(
    metadata: Any, rules: Any, axes: Any, reason: str
) -> None:
    resolution = mapped(rules).resolve(annotated(metadata))
    assert all_axes(resolution) == {"w": axes}
    assert resolution["w"].reason == reason
    assert resolution.unused_rules == ()


def test_logical_rules_in_context() -> None:
    model = annotated({"out_sharding": ("embed", "mlp")})
    layout_map = mapped()
    with nnx.logical_axis_rules([("embed", "data"), ("mlp", "model")]):
        assert all_axes(layout_map.resolve(nnx.state(model))) == {
            "w": ("data", "model")
        }
    resolution = layout_map.resolve(nnx.state(model))
    leaf = resolution["w"]
    assert leaf.layout.is_replicated and leaf.reason == "flax metadata"
    assert leaf.fallback == (
        "Flax metadata ('embed', 'mlp'): no mesh axis for 'embed', 'mlp'"
    )
    assert resolution.fallbacks == (leaf,)


def test_unmatched_error_is_no_error_where_metadata_places_a_leaf() -> None:
    model = annotated({"out_sharding": (None, "data")})
    resolution = mapped(unmatched="error").resolve(model)
    assert all_axes(resolution) == {"w": (None, "data")}


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({"layout": ("data",)}, "the explicit layout ('data',) has 1 dims"),
        ({"layout": ("tensor", None)}, "has no axis 'tensor'"),
        (
            {"layout": ("data", "data")},
            "its metadata: the layout ('data', 'data') uses",
        ),
        (
            {
                "out_sharding": ("a", "b"),
                "sharding_rules": (("a", "data"), ("b", "data")),
            },
            "metadata ('a', 'b'): the layout ('data', 'data', ...) uses the mesh axis",
        ),
        ({"out_sharding": ("data", None, None)}, "names 3 dims, the leaf has 2"),
    ],
)
def test_metadata_that_does_not_fit(metadata: Any, text: str) -> None:
    with pytest.raises(flm.errors.ResolveError) as caught:
        mapped().resolve(annotated(metadata))
    assert str(caught.value).startswith("1 leaf does not fit the rules")
    assert "w (8,8): " in str(caught.value) and text in str(caught.value)


# -------------------------------------------------------------- the Resolution


def test_trees_have_the_structure_of_the_tree(mesh: flm.DeviceMesh) -> None:
    model = make_mlp()
    layout_map = mapped(MLP_RULES, mesh=mesh)
    resolution = layout_map.resolve(model)
    state = nnx.state(model)
    for tree in (
        resolution.shardings,
        resolution.specs,
        resolution.layouts,
        resolution.abstract(),
    ):
        assert jax.tree.structure(tree) == jax.tree.structure(state)
    kernel = resolution.abstract()["up"]["kernel"].get_value()
    assert kernel.sharding == NamedSharding(mesh.jax_mesh, P(None, "model"))
    assert resolution.specs["up"]["kernel"].get_value() == P(None, "model")
    assert layout_map.shardings(model) == resolution.shardings


def test_equal_shardings_are_one_object(mesh: flm.DeviceMesh) -> None:
    layout_map = mapped({"w": ("data",)}, mesh=mesh)
    listed = layout_map.resolve({"w1": struct(8), "w2": struct(4)}).sharding_list()
    assert listed[0] is listed[1]


def test_an_abstract_resolution_becomes_concrete(mesh: flm.DeviceMesh) -> None:
    model = make_mlp()
    tree = {"model": model, "opt": nnx.Optimizer(model, optax.adam(1.0), wrt=nnx.Param)}
    planned = mapped(MLP_RULES).resolve(tree)
    for ask in (lambda: planned.shardings, planned.abstract):
        with pytest.raises(
            flm.errors.MeshError, match=r"resolution.on\(flm.DeviceMesh"
        ):
            ask()
    real = planned.on(mesh)
    assert real.mesh == mesh and planned.mesh == ABSTRACT
    assert all_axes(real) == all_axes(planned)
    for sharding in real.sharding_list():
        assert sharding.mesh is mesh.jax_mesh
    assert real.on(mesh) is real
    assert planned.on(mesh.jax_mesh).specs == real.specs


def test_on_a_mesh_of_another_shape() -> None:
    planned = mapped({"w": ("data", "model")}).resolve({"w": struct(8, 8)})
    other = planned.on(flm.DeviceMesh.abstract("data=4,model=2"))
    assert (planned["w"].shard_shape, other["w"].shard_shape) == ((4, 2), (2, 4))
    with pytest.raises(
        flm.errors.ResolveError, match="is not divisible by mesh axis 'data'"
    ):
        planned.on(flm.DeviceMesh.abstract("data=3,model=1"))
    with pytest.raises(flm.errors.MeshError, match="needs a mesh"):
        planned.on(None)


def test_optimizer_state_given_with_its_parameters_moves_too(
    mesh: flm.DeviceMesh,
) -> None:
    params = {"w": struct(8, 8)}
    tx = optax.adam(1e-3)
    state = jax.eval_shape(tx.init, params)
    planned = mapped({"w": ("data", "model")}).resolve(state, params=params, tx=tx)
    for sharding in planned.on(mesh).sharding_list():
        assert sharding.mesh is mesh.jax_mesh
    turned = planned.on(flm.DeviceMesh.abstract("data=4,model=2"))
    assert turned["0/mu/w"].shard_shape == (2, 4)


def test_the_error_has_parameters_that_were_given_beside_their_state() -> None:
    params, tx = {"w": struct(10, 8)}, optax.adam(1e-3)
    state = jax.eval_shape(tx.init, params)
    layout_map = mapped({"w": ("model", None)})  # 10 is not divisible by 4
    with pytest.raises(flm.errors.ResolveError, match=r"w \(10,8\)") as caught:
        layout_map.resolve(state, params=params, tx=tx)
    resolution = caught.value.resolution
    assert resolution.paths == ("w", "0/count", "0/mu/w", "0/nu/w")
    assert resolution.layouts[0] == resolution["w"].layout
    issues = flm.lint(resolution)
    assert {(issue.code, issue.path) for issue in issues} >= {("LM114", "w")}


def test_annotations_are_read_again_on_another_mesh() -> None:
    planned = mapped().resolve(annotated({"out_sharding": ("data", "expert")}))
    assert planned["w"].layout.axes == ("data", None)
    other = planned.on(flm.DeviceMesh.abstract("expert=4"))
    assert other["w"].layout.axes == (None, "expert")


def test_leaves_by_path_and_in_order() -> None:
    resolution = mapped(MLP_RULES).resolve({"model": make_mlp(), "step": 1})
    assert len(resolution) == 7
    assert [leaf.path for leaf in resolution] == list(resolution.paths)
    assert "model/up/kernel" in resolution and "up/kernel" not in resolution
    assert resolution["up/kernel"] == resolution["model/up/kernel"]
    with pytest.raises(KeyError, match="the closest are model/up/kernel"):
        resolution["model/up/kernal"]
    twice = mapped({".*": None}).resolve({"a": make_mlp(), "b": make_mlp()})
    with pytest.raises(KeyError, match="no leaf has the path 'up/kernel'"):
        twice["up/kernel"]


def test_totals_by_role() -> None:
    params = {"w": struct(8, 8), "b": struct(8)}
    tx = optax.adam(1e-3)
    state = jax.eval_shape(tx.init, params)
    tree = {"params": params, "opt_state": state, "step": 3}
    resolution = mapped({"w": ("data", "model"), "b": None}).resolve(tree)
    assert resolution.total_bytes == 3 * (256 + 32) + 4 + 4
    assert resolution.bytes_per_device == 3 * (32 + 32) + 4 + 4
    totals = resolution.totals("parameter")
    assert (totals.leaves, totals.total_bytes) == (2, 288)
    assert (totals.bytes_per_device, totals.replicated_bytes) == (64, 32)
    assert resolution.totals("optimizer").leaves == 5
    assert resolution.totals("other").total_bytes == 4
    assert resolution.replicated_share == (3 * 32 + 8) / resolution.total_bytes
    assert resolution["w"].bytes_per_device == 32


def test_bytes_per_device_are_those_of_real_arrays(mesh: flm.DeviceMesh) -> None:
    layout_map = mapped(MLP_RULES, mesh=mesh, strict=False)
    resolution = layout_map.resolve(make_mlp())
    held = 0
    for leaf in jax.tree.leaves(nnx.state(layout_map.place(make_mlp()))):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        data = jax.random.key_data(leaf) if is_key else leaf
        (shard,) = [s for s in data.addressable_shards if s.device.id == 3]
        held += shard.data.nbytes
    assert held == resolution.bytes_per_device


def test_fingerprints_tell_what_differs(mesh: flm.DeviceMesh) -> None:
    def lines(layout: Any, shape: Any = (8, 8), **options: Any) -> Any:
        resolution = mapped({"w": layout}, **options).resolve({"w": struct(*shape)})
        return resolution.fingerprint_lines()

    first = lines(("data", None), mesh=mesh)
    assert lines(["data", None], mesh=mesh) == first
    for name, other in {
        "rules": lines(("data", None), mesh=mesh, match="match"),
        "table": lines(("data", None), (4, 8), mesh=mesh),
        "mesh": lines(("data", None), mesh=flm.DeviceMesh((8,), ("data",))),
    }.items():
        assert [part for part in first if first[part] != other[part]] == [name]


# --------------------------------------------------- caches keep nothing alive


def test_an_equal_tree_is_resolved_once() -> None:
    layout_map = mapped({"w": ("data", None)}, strict=False)
    tree = {"w": struct(8, 8), "n": [struct(2), struct(3)], "step": 1}
    first = layout_map.resolve(tree)
    assert layout_map.resolve({**tree, "w": struct(8, 8), "step": 2}) is first
    assert layout_map.resolve(nnx.State({"w": struct(8, 8)})) is not first

    @jax.tree_util.register_pytree_node_class
    class Wide:
        shape, dtype = (8, 8), jnp.dtype("float32")

        def tree_flatten(self) -> Any:
            return (struct(8, 8),), None

        @classmethod
        def tree_unflatten(cls, _: Any, __: Any) -> Any:
            return cls()

    for change in (
        {"w": struct(4, 8)},
        {"w": struct(8, 8, dtype=jnp.int32)},
        {"w": [struct(8, 8)]},
        {"w": Wide()},
        {"n": (struct(2), struct(3))},
        {"n": [struct(2)]},
        {"step": 1.0},
        {"step": "1"},
        {"step": None},
        {"more": 1},
    ):
        other = layout_map.resolve({**tree, **change})
        assert other is not first
        fresh = layout_map.copy().resolve({**tree, **change})
        assert jax.tree.structure(other.specs) == jax.tree.structure(fresh.specs)
    layout_map["never"] = None
    assert layout_map.resolve(tree) is not first


def test_a_state_with_other_metadata_is_another_tree() -> None:
    layout_map = mapped()
    for _ in range(2):
        plain = layout_map.resolve(nnx.state(annotated({})))
        marked = layout_map.resolve(nnx.state(annotated({"out_sharding": ("data",)})))
        assert all_axes(plain) == {"w": (None, None)}
        assert all_axes(marked) == {"w": ("data", None)}


def test_a_resolution_keeps_no_arrays_alive(mesh: flm.DeviceMesh) -> None:
    layout_map = mapped(
        {"kernel": (None, "model"), ".*": None}, mesh=mesh, overlap="first"
    )
    model = make_mlp()
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    marked: Any = annotated({"out_sharding": ("data", None)})
    watched = [
        weakref.ref(model.up.kernel[...]),  # type: ignore[index]
        weakref.ref(marked.w[...]),
    ]
    kept = [
        layout_map.resolve({"model": model, "optimizer": optimizer}),
        layout_map.resolve(nnx.state(model)),
        layout_map.resolve(nnx.to_pure_dict(nnx.state(model))),
        layout_map.resolve(marked),
    ]
    del model, optimizer, marked
    gc.collect()
    assert [ref() for ref in watched] == [None, None]
    assert kept[0].on(ABSTRACT)["model/up/kernel"].shard_shape == (8, 4)


# ---------------------------------------------------- explain, report, JSON


def test_explain_a_matched_leaf() -> None:
    layout_map = mapped(
        {"kernel": ("data", None), "up": (None, "model"), "k": ("data", None)},
        overlap="first",
    )
    tree = {"up": {"kernel": struct(8, 16)}}
    assert layout_map.explain(tree, "up/kernel") == "\n".join(
        [
            "up/kernel (8,16) float32: ('data', None)",
            "  because: it is matched by rule 1 'kernel' → ('data', None)",
            "  also matched by rule 2 'up' → (None, 'model'), overridden",
            "  also matched by rule 3 'k' → ('data', None), which agrees",
            "  each device holds (4,16), 256 B",
        ]
    )


def test_explain_an_exact_key_a_fallback_and_a_scalar() -> None:
    layout_map = mapped({"up": (None, "model")}, indivisible="replicate")
    resolution = layout_map.resolve({"up": struct(8, 6), "up/scale": 1.0})
    assert resolution.explain("up").splitlines()[1:3] == [
        "  because: its path is the key of rule 1 'up' → (None, 'model')",
        "  fallback: rule 1 'up' → (None, 'model'): dim 1 of size 6 is not divisible "
        "by mesh axis 'model' of size 4, so that dim is replicated",
    ]
    assert resolution.explain("up%2Fscale").splitlines()[1:] == [
        "  because: scalar",
        "  rule 1 'up' → (None, 'model') matches its path, but does not apply",
        "  each device holds (), 4 B",
    ]


def test_explain_a_near_miss() -> None:
    layout_map = mapped(
        {"mlp/up/kernel": None, "embed": None, "attn/query/kernel": None}
    )
    tree = {"layers": {"0": {"attn": {"q_proj": {"kernel": struct(8, 8)}}}}}
    assert layout_map.explain(tree, "layers/0/attn/q_proj/kernel").splitlines()[2] == (
        "  'layers/0/attn/q_proj/kernel' is matched by no rule; rule 3 "
        "'attn/query/kernel' is closest"
    )


def test_the_report_as_json() -> None:
    layout_map = mapped({"w": (("data", "model"), None), "x": None})
    resolution = layout_map.resolve({"w": struct(8, 3), "y": struct(2), "n": "text"})
    data = json.loads(resolution.report("json"))
    assert data == resolution.to_json()
    assert data["schema"] == 1
    assert data["rules"] == layout_map.to_json()
    assert data["leaves"][1] == {
        "path": "w",
        "shape": [8, 3],
        "dtype": "float32",
        "spec": [["data", "model"], None],
        "rule": 1,
        "pattern": "w",
        "reason": "exact key",
        "role": "parameter",
        "shard_shape": [1, 3],
        "bytes_per_device": 12,
        "fallback": None,
        "owner": None,
        "note": None,
        "memory_kind": None,
        "mesh": None,
    }
    assert data["leaves"][0]["dtype"] is None
    assert data["unused_rules"] == ["x"] and data["unmatched"] == ["y"]
    assert (data["total_bytes"], data["bytes_per_device"]) == (104, 20)
    assert data["totals"]["parameter"]["leaves"] == 2
    assert data["totals"]["other"]["leaves"] == 1
    assert data["fallbacks"] == {}


def test_a_renamed_module_is_offered() -> None:
    tree = {name: {"kernel": struct(8, 8)} for name in ("down", "up_proj")}
    rules: Any = {"down/kernel": ("data", None), "up/kernel": (None, "model")}
    resolution = mapped(rules).resolve(tree)
    hint = "; the closest path ends in 'up_proj/kernel'"
    told = f"rule 2 'up/kernel' matches no leaf{hint}"
    assert resolution.remarks()[0] == f"unused: {told}"
    (found,) = [issue for issue in flm.lint(resolution) if issue.code == "LM101"]
    assert found.message.endswith(hint)
    assert found.fix.startswith("layout_map[\"up_proj/kernel\"] = (None, 'model')")
    with pytest.warns(flm.LayoutWarning, match=told):
        resolution.announce()


def test_repr() -> None:
    resolution = mapped({"w": ("data",)}).resolve({"w": struct(1024)})
    assert repr(resolution) == (
        "Resolution(1 leaf, mesh data=2,model=4, 2.0 KiB of 4.0 KiB per device)"
    )


# ------------------------------------------------------------- no silence

SILENT = {"used": struct(100, 100), "large": struct(64, 64), "small": struct(2)}


def test_resolving_alone_is_quiet() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mapped({"never": None}).resolve(SILENT)


def test_strict_makes_it_an_error(mesh: flm.DeviceMesh) -> None:
    layout_map = mapped({"used": ("data", None)}, mesh=mesh, strict=True)
    with pytest.raises(flm.errors.ResolveError) as caught:
        layout_map.shardings(SILENT)
    assert str(caught.value).startswith("strict: 1 finding\n")
    assert caught.value.problems[0].startswith("unmatched: large (64,64)")
    quiet = mapped({"used": ("data", None)}, mesh=mesh)
    with pytest.raises(flm.errors.ResolveError, match="strict: 1 finding"):
        quiet.resolve(SILENT, strict=True)
    assert quiet.resolve(SILENT, strict=False).rules.strict is False


def test_keras_spelling_of_an_output_rule_is_no_unused_rule() -> None:
    layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("data=2,model=4"))
    layout_map["kernel"] = None
    layout_map["dense/output"] = ("data", None)
    layout_map["dense/outputs"] = ("data", None)
    tree = {"dense": {"kernel": jax.ShapeDtypeStruct((4, 4), "float32")}}
    remarks = layout_map.resolve(tree).remarks()
    (remark,) = remarks
    assert remark.startswith("unused: rule 3 'dense/outputs' matches no leaf")
    # A parameter that is called so is matched as any other.
    tree = {"dense": {"output": jax.ShapeDtypeStruct((4, 4), "float32")}}
    assert layout_map.resolve(tree)["dense/output"].rule_number == 2


def test_equal_problems_of_layers_are_told_once(mesh: flm.DeviceMesh) -> None:
    layout_map = flm.LayoutMap(mesh)
    layout_map["kernel"] = (None, "model")
    kernel = jax.ShapeDtypeStruct((8, 10), jnp.float32)
    tree = {"layers": {str(at): {"kernel": kernel} for at in range(24)}}
    with pytest.raises(flm.errors.ResolveError) as caught:
        layout_map.resolve(tree)
    text = str(caught.value)
    assert text.startswith("24 leaves do not fit the rules on mesh data=2,model=4:\n")
    assert text.count("\n") == 1
    assert "  - layers/{0..23}/kernel ×24 (8,10): rule 1 'kernel'" in text
    assert len(caught.value.problems) == 24
    assert caught.value.problems[7].startswith("layers/15/kernel (8,10): rule 1")


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies_say_the_same(copied: Callable[[Any], Any]) -> None:
    layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("data=2,model=4"))
    layout_map["kernel"] = (None, "model")
    tree = {"up": {"kernel": jax.ShapeDtypeStruct((8, 16), "float32")}}
    resolution = layout_map.resolve(tree)
    before = resolution.report(), resolution.specs
    other = copied(resolution)
    assert (other.report(), other.specs) == before
    assert other["up/kernel"] == resolution["up/kernel"]
