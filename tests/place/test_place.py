"""distribute_tensor and place: the shards of each device, and errors."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding, PartitionSpec
from shards import Dims, assert_lies, bare, lies

import flax_layoutmap as flm
from flax_layoutmap._place.annotations import settle_metadata
from flax_layoutmap._place.place import put
from flax_layoutmap._rules.scope import using_rules

P = PartitionSpec
NAMES = ("data", "model")
KINDS: dict[str, Any] = {
    "auto": "auto",
    "explicit": "explicit",
    "explicit data": ("explicit", "auto"),
    "explicit model": ("auto", "explicit"),
}
X = np.arange(64, dtype=np.float32).reshape(8, 8)
BOTH: Dims = (("data",), ("model",))


def grid(kind: str) -> flm.DeviceMesh:
    return flm.DeviceMesh((2, 4), NAMES, axis_types=KINDS[kind])


@pytest.fixture(params=KINDS)
def any_mesh(request: pytest.FixtureRequest) -> flm.DeviceMesh:
    """The same grid with axes of each type, and of two types."""
    return grid(request.param)


@pytest.fixture(params=KINDS)
def mesh_in_context(request: pytest.FixtureRequest) -> Iterator[flm.DeviceMesh]:
    """The same, entered: JAX's own functions on Explicit axes need that."""
    found = grid(request.param)
    with jax.set_mesh(bare(found)):
        yield found


def test_control_another_layout_is_noticed(mesh: flm.DeviceMesh) -> None:
    array = jax.device_put(X, NamedSharding(bare(mesh), P("data", "model")))
    assert_lies(array, BOTH, mesh, X)
    assert not lies(array, (("model",), ("data",)), mesh)
    assert not lies(array, (("data",), ()), mesh)
    assert not lies(jnp.asarray(X), BOTH, mesh)


# ------------------------------------------------------------------------- eager


@pytest.mark.parametrize(
    ("axes", "dims"),
    [
        (("data", "model"), BOTH),
        (("model", "data"), (("model",), ("data",))),
        ((("data", "model"), None), (("data", "model"), ())),
        ((("model", "data"), None), (("model", "data"), ())),
        ((None, ...), ((), ())),
        ((..., "model"), ((), ("model",))),
        (["data", None], (("data",), ())),
        (None, ((), ())),
        ((), ((), ())),
        (P("data"), (("data",), ())),
    ],
)
def test_eager(any_mesh: flm.DeviceMesh, axes: Any, dims: Dims) -> None:
    """From the host, one device, another layout, and the same one spelled otherwise."""
    layout = flm.TensorLayout(axes, any_mesh)
    columns = NamedSharding(bare(any_mesh), P(None, "data"))
    spelled = NamedSharding(bare(any_mesh), P("data", None))
    on_mesh = (jax.device_put(X, sharding) for sharding in (columns, spelled))
    for x in (X, jnp.asarray(X), *on_mesh):
        for given in (layout, layout.sharding(2)):
            moved = flm.distribute_tensor(x, given)
            assert_lies(moved, dims, any_mesh, X)
            assert moved.sharding == layout.sharding(2)


def test_what_is_there_already_is_the_same_object(any_mesh: flm.DeviceMesh) -> None:
    layout = flm.TensorLayout(("data", None), any_mesh)
    x = flm.distribute_tensor(X, layout)
    assert flm.distribute_tensor(x, layout) is x
    assert flm.distribute_tensor({"a": [x]}, layout)["a"][0] is x
    assert flm.distribute_tensor(x, flm.TensorLayout(P("data"), any_mesh)) is x


def test_an_uncommitted_array_is_committed() -> None:
    one = flm.DeviceMesh((1,), ("data",), devices=jax.devices()[:1])
    x = jnp.asarray(X)
    assert not x.committed
    moved = flm.distribute_tensor(x, flm.TensorLayout(("data", None), one))
    assert moved.committed
    assert isinstance(moved.sharding, NamedSharding)
    assert_lies(moved, (("data",), ()), one, X)


def test_to_other_devices(mesh: flm.DeviceMesh) -> None:
    half = flm.DeviceMesh((4,), ("data",), devices=jax.devices()[4:])
    x = flm.distribute_tensor(X, flm.TensorLayout(("data", "model"), mesh))
    moved = flm.distribute_tensor(x, flm.TensorLayout((None, "data"), half))
    assert_lies(moved, ((), ("data",)), half, X)


def test_a_mesh_of_one_device() -> None:
    one = flm.DeviceMesh((1, 1), NAMES, devices=jax.devices()[3:4])
    moved = flm.distribute_tensor(X, flm.TensorLayout(("data", "model"), one))
    assert_lies(moved, BOTH, one, X)


def test_trees_keep_none(mesh: flm.DeviceMesh) -> None:
    layout = flm.TensorLayout(("data", ...), mesh)
    tree = {"a": X, "b": None, "c": [X[:, 0], (None, X)]}
    moved = flm.distribute_tensor(tree, layout)
    assert jax.tree.structure(moved) == jax.tree.structure(tree)
    assert moved["b"] is None and moved["c"][1][0] is None
    assert_lies(moved["a"], (("data",), ()), mesh, X)
    assert_lies(moved["c"][0], (("data",),), mesh, X[:, 0])
    assert_lies(moved["c"][1][1], (("data",), ()), mesh, X)
    assert flm.distribute_tensor(None, layout) is None


def test_zero_size_and_scalars(any_mesh: flm.DeviceMesh) -> None:
    empty = flm.distribute_tensor(
        np.zeros((0, 8), np.float32), flm.TensorLayout(("data", "model"), any_mesh)
    )
    assert_lies(empty, BOTH, any_mesh)
    for number in (3, 2.5, True, np.float32(4), jnp.int32(5)):
        replicated = flm.distribute_tensor(number, flm.TensorLayout((), any_mesh))
        assert_lies(replicated, (), any_mesh, np.asarray(number, replicated.dtype))


def test_prng_keys(any_mesh: flm.DeviceMesh) -> None:
    keys = jax.random.split(jax.random.key(0), (8, 4))
    layout = flm.TensorLayout(("data", "model"), any_mesh)
    moved = flm.distribute_tensor(keys, layout)
    assert moved.dtype == keys.dtype
    assert_lies(moved, BOTH, any_mesh, jax.random.key_data(keys))
    with jax.set_mesh(bare(any_mesh)):
        traced = jax.jit(lambda k: flm.distribute_tensor(k, layout))(keys)
    assert_lies(traced, BOTH, any_mesh, jax.random.key_data(keys))


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host"])
def test_memory_kind_eagerly(any_mesh: flm.DeviceMesh, kind: str) -> None:
    layout = flm.TensorLayout(("data", "model"), any_mesh, memory_kind=kind)
    moved = flm.distribute_tensor(X, layout)
    assert moved.sharding.memory_kind == kind
    assert_lies(moved, BOTH, any_mesh, X)
    back = flm.distribute_tensor(moved, flm.TensorLayout(("data", "model"), any_mesh))
    assert back.sharding.memory_kind == jax.devices()[0].default_memory().kind


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_memory_that_the_devices_lack(wrap: Any) -> None:
    mesh = flm.DeviceMesh("data=8")
    layout = flm.TensorLayout(("data",), mesh, memory_kind="pinned_hots")
    with pytest.raises(flm.LayoutError) as error:
        wrap(lambda x: flm.distribute_tensor(x, layout))(np.ones(8, np.float32))
    assert str(error.value) == (
        "distribute_tensor of an array (8,) to ('data',) in pinned_hots: devices of "
        "'cpu' have no memory 'pinned_hots'; did you mean 'pinned_host'?; they have "
        "'device', 'pinned_host', 'unpinned_host'"
    )


def test_memory_kind_inside_jit(mesh_in_context: flm.DeviceMesh) -> None:
    mesh = mesh_in_context
    layout = flm.TensorLayout(("data", "model"), mesh, memory_kind="pinned_host")
    moved = jax.jit(lambda x: flm.distribute_tensor(x * 2, layout))(X)
    assert moved.sharding.memory_kind == "pinned_host"
    assert_lies(moved, BOTH, mesh, X * 2)


# ------------------------------------------------------------------------ traced


def sum_of_squares(d: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: (d(x) ** 2).sum()


def test_inside_jit(mesh_in_context: flm.DeviceMesh) -> None:
    mesh = mesh_in_context
    layout = flm.TensorLayout(("data", "model"), mesh)

    def d(x: Any) -> Any:
        return flm.distribute_tensor(x, layout)

    on_mesh = flm.distribute_tensor(X, flm.TensorLayout(None, mesh))
    assert_lies(jax.jit(lambda x: d(x * 2))(on_mesh), BOTH, mesh, X * 2)
    assert_lies(jax.jit(lambda x: d(x * 2))(X), BOTH, mesh, X * 2)
    # Constants are no tracers; device_put would add nothing to the program.
    assert_lies(jax.jit(lambda: d(X) + 1)(), BOTH, mesh, X + 1)
    ones = np.ones((8, 8), np.float32)
    assert_lies(jax.jit(lambda: d(jnp.ones((8, 8))))(), BOTH, mesh, ones)
    assert_lies(jax.jit(lambda: d(on_mesh) + 1)(), BOTH, mesh, X + 1)
    tree = jax.jit(lambda x: d({"a": x, "b": None}))(X)
    assert_lies(tree["a"], BOTH, mesh, X)
    assert tree["b"] is None


def test_inside_transformations(mesh_in_context: flm.DeviceMesh) -> None:
    mesh = mesh_in_context
    layout = flm.TensorLayout(("data", "model"), mesh)
    row = flm.TensorLayout(("model",), mesh)

    def d(x: Any) -> Any:
        return flm.distribute_tensor(x, layout)

    def loop(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (d(c + 1), None), d(x), None, length=2)[0]

    def loss(x: Any) -> Any:
        return (jnp.sin(d(x)) ** 2).sum()

    x = flm.distribute_tensor(X, flm.TensorLayout(None, mesh))
    wanted = np.asarray(jax.grad(sum_of_squares(lambda v: v))(jnp.asarray(X)))
    for wrap in (lambda f: f, jax.jit):
        np.testing.assert_array_equal(wrap(jax.grad(sum_of_squares(d)))(x), wanted)
        assert_lies(wrap(loop)(x), BOTH, mesh, X + 2)
        rows = wrap(jax.vmap(lambda v: flm.distribute_tensor(v, row)))(x)
        assert_lies(rows, ((), ("model",)), mesh, X)
        remat = wrap(jax.grad(jax.checkpoint(loss)))(x)
        np.testing.assert_allclose(remat, jax.grad(loss)(x), rtol=1e-6)


def test_the_constraint_is_in_the_program(mesh: flm.DeviceMesh) -> None:
    layout = flm.TensorLayout((None, "model"), mesh)
    text = jax.jit(lambda x: flm.distribute_tensor(x, layout)).lower(X).as_text()
    assert "sharding_constraint" in text or "@Sharding" in text
    plain = jax.jit(lambda x: jax.device_put(x, layout.sharding())).lower(X).as_text()
    assert "sharding_constraint" not in plain and "@Sharding" not in plain


def test_eval_shape_moves_nothing(any_mesh: flm.DeviceMesh) -> None:
    layout = flm.TensorLayout(("data", "model"), any_mesh)
    found = jax.eval_shape(lambda x: flm.distribute_tensor(x, layout), X)
    assert found.shape == (8, 8) and found.dtype == np.float32


def test_one_dim_on_axes_of_both_types() -> None:
    mesh = grid("explicit data")
    layout = flm.TensorLayout((("data", "model"), None), mesh)
    assert_lies(flm.distribute_tensor(X, layout), (("data", "model"), ()), mesh, X)
    with jax.set_mesh(bare(mesh)), pytest.raises(flm.LayoutError) as caught:
        jax.jit(lambda x: flm.distribute_tensor(x, layout))(X)
    assert str(caught.value) == (
        "distribute_tensor of a traced array (8, 8) to (('data', 'model'), None): on a "
        "mesh with Explicit and Auto axes, DeviceMesh('data=2,model=4', "
        "axis_types=explicit/auto), name for each dim axes of one type"
    )


# --------------------------------------------------------- rank and divisibility


# A function, and what it is called with.
WAYS: dict[str, Callable[[Callable[[Any], Any], Any], Any]] = {
    "eagerly": lambda f, x: f(x),
    "jit": lambda f, x: jax.jit(f)(x),
    "grad": lambda f, x: jax.grad(sum_of_squares(f))(x),
    "jit and grad": lambda f, x: jax.jit(jax.grad(sum_of_squares(f)))(x),
    "vmap": lambda f, x: jax.vmap(f)(x[None]),
    "scan": lambda f, x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2),
    "remat": lambda f, x: jax.grad(jax.checkpoint(sum_of_squares(f)))(x),
    "eval_shape": lambda f, x: jax.eval_shape(f, x),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_rank_and_divisibility_are_always_checked(way: str, kind: str) -> None:
    mesh = grid(kind)
    odd = jnp.ones((6, 8))

    def call(axes: Any) -> str:
        layout = flm.TensorLayout(axes, mesh)
        with pytest.raises(flm.LayoutError) as caught:
            WAYS[way](lambda x: flm.distribute_tensor(x, layout), odd)
        return str(caught.value)

    assert call(("model", None)) == (
        "distribute_tensor of an array (6, 8) to ('model', None): dim 0 of size 6 does "
        "not divide by mesh axis 'model' of size 4"
    )
    assert call((None, ("data", "model"), None)) == (
        "distribute_tensor of an array (6, 8): the layout (None, ('data', 'model'), "
        "None) has 3 dims, the array has 2"
    )
    assert call(("data",)) == (
        "distribute_tensor of an array (6, 8): the layout ('data',) has 1 dims, the "
        "array has 2"
    )
    assert call((("data", "model"), None)).endswith(
        "dim 0 of size 6 does not divide by mesh axes 'data' (2) × 'model' (4), 8 "
        "together"
    )


def test_control_jax_drops_an_indivisible_constraint(mesh: flm.DeviceMesh) -> None:
    sharding = NamedSharding(bare(mesh), P("model"))
    dropped = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, sharding))
    found = dropped(jnp.ones((6, 8))).sharding
    assert not found.is_equivalent_to(sharding, 2)


# ------------------------------------------------------------- finding the mesh


def test_the_mesh_of_set_mesh() -> None:
    for kind in KINDS:
        mesh = grid(kind)
        with jax.set_mesh(bare(mesh)):
            for axes in (("data", "model"), P("data", "model")):
                assert_lies(flm.distribute_tensor(X, axes), BOTH, mesh, X)
                traced = jax.jit(lambda x, axes=axes: flm.distribute_tensor(x, axes))
                assert_lies(traced(X), BOTH, mesh, X)


def test_the_mesh_of_the_surrounding_jit(mesh: flm.DeviceMesh) -> None:
    layout_map = flm.LayoutMap(mesh, strict=False)

    @flm.jit(layout_map=layout_map)
    def f(x: Any) -> Any:
        return flm.distribute_tensor(x, (None, "model"))

    assert_lies(f(X), ((), ("model",)), mesh, X)


def test_an_own_mesh_wins(mesh: flm.DeviceMesh) -> None:
    other = flm.DeviceMesh((8,), ("data",))
    layout = flm.TensorLayout(("data", None), other)
    with jax.set_mesh(bare(mesh)):
        assert_lies(flm.distribute_tensor(X, layout), (("data",), ()), other, X)
    with using_rules(flm.LayoutMap(mesh, strict=False).freeze()):
        assert_lies(flm.distribute_tensor(X, layout), (("data",), ()), other, X)


@pytest.mark.parametrize("axes", [("data", None), P("data"), None, ()])
def test_no_mesh_anywhere(axes: Any) -> None:
    shown = {("data", None): "('data', None)", P("data"): "('data', ...)"}
    text = (
        f"no mesh for the layout {shown.get(axes, 'replicated')}: give it one, "
        "flm.TensorLayout(axes, mesh); or call inside a flm.jit(layout_map=…), "
        "flm.dtensor.default_mesh(mesh) or jax.set_mesh(mesh)"
    )
    for call in (
        flm.distribute_tensor,
        jax.jit(flm.distribute_tensor, static_argnums=1),
    ):
        with pytest.raises(flm.errors.MeshError) as caught:
            call(X, axes)
        assert str(caught.value) == text


def test_an_abstract_mesh(abstract_mesh: flm.DeviceMesh) -> None:
    layout = flm.TensorLayout(("data", None), abstract_mesh)
    text = (
        "DeviceMesh('data=2,model=4', abstract) has no devices to move an array to; "
        "use a concrete mesh"
    )
    with pytest.raises(flm.errors.MeshError) as caught:
        flm.distribute_tensor(X, layout)
    assert str(caught.value) == text
    with jax.sharding.use_abstract_mesh(bare(abstract_mesh)):
        with pytest.raises(flm.errors.MeshError, match="has no devices"):
            flm.distribute_tensor(X, ("data", None))
    # Traced, it is as good as a concrete one: the program's own devices decide.
    concrete = flm.DeviceMesh((2, 4), NAMES)
    x = flm.distribute_tensor(X, flm.TensorLayout(None, concrete))
    found = jax.jit(lambda v: flm.distribute_tensor(v * 1, layout))(x)
    assert_lies(found, (("data",), ()), concrete, X)


# ---------------------------------------------------------------- names of layouts


def test_names_inside_jit(mesh: flm.DeviceMesh) -> None:
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map.names["hidden"] = (None, "model")
    layout_map.names["block_[0-9]+"] = ("model", None)

    @flm.jit(layout_map=layout_map)
    def f(x: Any) -> Any:
        return flm.distribute_tensor(x, "hidden"), flm.distribute_tensor(x, "block_12")

    hidden, block = f(X)
    assert_lies(hidden, ((), ("model",)), mesh, X)
    assert_lies(block, (("model",), ()), mesh, X)


def test_names_that_are_not_there(mesh: flm.DeviceMesh) -> None:
    with pytest.raises(flm.errors.RuleError) as caught:
        flm.distribute_tensor(X, "hidden")
    assert str(caught.value) == (
        "'hidden' is the name of a layout only inside a flm.jit(layout_map=…) whose "
        "layout_map.names['hidden'] is set; elsewhere pass the layout itself"
    )
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map.names["hidden"] = (None, "model")
    with (
        using_rules(layout_map.freeze()),
        pytest.raises(flm.errors.RuleError) as caught,
    ):
        flm.distribute_tensor(X, "hiden")
    assert str(caught.value) == (
        "layout_map.names has no 'hiden'; did you mean 'hidden'?; it has ['hidden']"
    )


def test_names_that_clash(mesh: flm.DeviceMesh) -> None:
    def call(overlap: Any) -> Any:
        layout_map = flm.LayoutMap(mesh, strict=False, overlap=overlap)
        layout_map.names["hid.*"] = (None, "model")
        layout_map.names[".*den"] = ("model", None)
        with using_rules(layout_map.freeze()):
            return flm.distribute_tensor(X, "hidden")

    with pytest.raises(flm.errors.RuleError) as caught:
        call("error")
    assert str(caught.value) == (
        "several names with different layouts match 'hidden': 'hid.*', '.*den'; make "
        'one narrower, or use overlap="first" or "last"'
    )
    assert_lies(call("first"), ((), ("model",)), mesh, X)
    assert_lies(call("last"), (("model",), ()), mesh, X)


# ---------------------------------------------------------------------- shard_map


def mapped(
    function: Callable[[Any], Any], mesh: flm.DeviceMesh, manual: set[str]
) -> Callable[[Any], Any]:
    spec = P(*(name if name in manual else None for name in NAMES))
    return jax.shard_map(
        function,
        mesh=bare(mesh),
        in_specs=spec,
        out_specs=spec,
        axis_names=manual,
    )


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_manual_axes_are_refused(
    mesh: flm.DeviceMesh, wrap: Callable[[Any], Any]
) -> None:
    text = (
        "distribute_tensor names the mesh axis 'data', which is manual here: inside "
        "shard_map each device already holds its part, so drop the call or name other "
        "axes only"
    )
    for manual in ({"data", "model"}, {"data"}):
        layout = flm.TensorLayout(("data", None), mesh)
        f = wrap(mapped(lambda x: flm.distribute_tensor(x, layout), mesh, manual))  # noqa: B023
        for x in (
            X,
            X[:2],
        ):  # before the shape of a part, in which 1 row would not divide
            with pytest.raises(flm.errors.MeshError) as caught:
                f(x)
            assert str(caught.value) == text


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_other_axes_work_inside_shard_map(
    mesh: flm.DeviceMesh, wrap: Callable[[Any], Any]
) -> None:
    layout = flm.TensorLayout((None, "model"), mesh)
    f = wrap(mapped(lambda x: flm.distribute_tensor(x * 2, layout), mesh, {"data"}))
    assert_lies(f(X), BOTH, mesh, X * 2)
    everywhere = flm.TensorLayout(None, mesh)
    g = wrap(mapped(lambda x: flm.distribute_tensor(x, everywhere), mesh, set(NAMES)))
    assert_lies(g(X), BOTH, mesh, X)


# ---------------------------------------------------------------------- bad input


def test_what_is_no_array(mesh: flm.DeviceMesh) -> None:
    layout = flm.TensorLayout(None, mesh)
    with pytest.raises(flm.LayoutError) as caught:
        flm.distribute_tensor({"a": "text"}, layout)
    assert str(caught.value) == (
        "distribute_tensor takes arrays and numbers, got the str 'text'"
    )
    with pytest.raises(flm.LayoutError, match="got the object"):
        flm.distribute_tensor(object(), layout)


def test_a_module_is_refused(mesh: flm.DeviceMesh) -> None:
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    with pytest.raises(flm.errors.StructureError) as caught:
        flm.distribute_tensor(model, flm.TensorLayout(None, mesh))
    assert str(caught.value) == (
        "distribute_tensor takes arrays, not a Linear: move a module by rules, "
        "layout_map.place(module), or its arrays one by one"
    )


def test_a_bad_layout(mesh: flm.DeviceMesh) -> None:
    with pytest.raises(flm.errors.RuleError, match="not a layout: 3"):
        flm.distribute_tensor(X, 3)
    with jax.set_mesh(bare(mesh)):
        with pytest.raises(
            flm.errors.RuleError, match="no such axis; did you mean 'data'"
        ):
            flm.distribute_tensor(X, ("dat", None))
        with pytest.raises(flm.errors.RuleError, match="axis 'data' twice"):
            flm.distribute_tensor(X, ("data", "data"))


# -------------------------------------------------------------------------- place


class Tied(nnx.Module):
    """A Variable under two names, an int, a key, and BatchNorm statistics."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.head = self.embed
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.steps = nnx.Variable(3)
        self.name = "tied"


def rules(mesh: flm.DeviceMesh) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["kernel"] = ("data", "model")
    layout_map["bias|scale"] = ("model",)
    return layout_map


def test_place_updates_a_module_in_place(any_mesh: flm.DeviceMesh) -> None:
    model: Any = Tied(nnx.Rngs(0))
    kernel, values = (
        model.embed.kernel,
        jax.tree.map(np.asarray, nnx.state(model, nnx.Param)),
    )
    assert rules(any_mesh).place(model) is model
    assert model.embed.kernel is kernel and model.head is model.embed
    assert_lies(kernel[...], BOTH, any_mesh, values["embed"]["kernel"][...])
    assert_lies(model.norm.scale[...], (("model",),), any_mesh)
    assert_lies(model.norm.mean[...], ((),), any_mesh)
    assert_lies(model.drop.rngs.count[...], (), any_mesh)
    assert_lies(model.drop.rngs.key[...], (), any_mesh)
    assert_lies(model.steps.get_value(), (), any_mesh, np.int32(3))
    assert model.name == "tied"


def test_place_moves_a_tree(any_mesh: flm.DeviceMesh) -> None:
    tree = {
        "params": {"kernel": X, "bias": X[0]},
        "step": 7,
        "none": None,
        "key": jax.random.key(1),
        "empty": np.zeros((0, 8), np.float32),
    }
    moved = rules(any_mesh).place(tree)
    assert isinstance(tree["params"]["kernel"], np.ndarray)
    assert_lies(moved["params"]["kernel"], BOTH, any_mesh, X)
    assert_lies(moved["params"]["bias"], (("model",),), any_mesh, X[0])
    assert_lies(moved["step"], (), any_mesh, np.int32(7))
    assert moved["none"] is None
    assert_lies(moved["key"], (), any_mesh)
    assert_lies(moved["empty"], ((), ()), any_mesh)


def test_place_keeps_what_is_in_place(mesh: flm.DeviceMesh) -> None:
    layout_map = rules(mesh)
    first = layout_map.place({"kernel": X, "bias": X[0]})
    again = layout_map.place(first)
    assert all(again[name] is first[name] for name in first)


def test_place_takes_modules_inside_a_tree(mesh: flm.DeviceMesh) -> None:
    model: Any = Tied(nnx.Rngs(0))
    optimizer: Any = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    tree = {"model": model, "optimizer": optimizer, "step": 1}
    moved = rules(mesh).place(tree)
    assert moved["model"] is model and moved["optimizer"] is optimizer
    assert_lies(model.embed.kernel[...], BOTH, mesh)
    moments = optimizer.opt_state[0]
    assert_lies(moments.mu["embed"]["kernel"][...], BOTH, mesh)
    assert_lies(moments.count[...], (), mesh)
    assert_lies(moved["step"], (), mesh, np.int32(1))


@pytest.mark.parametrize(
    "tree",
    [
        pytest.param(lambda: Tied(nnx.Rngs(0)), id="module"),
        pytest.param(
            lambda: {"kernel": np.ones((8, 8)), "bias": np.ones(8)}, id="dict"
        ),
    ],
)
def test_a_failure_leaves_the_tree_as_it_was(
    mesh: flm.DeviceMesh, tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tree()
    before = jax.tree.leaves(nnx.state(tree) if isinstance(tree, nnx.Module) else tree)
    moved: list[Any] = []

    def failing(x: Any, sharding: Any) -> Any:
        if moved:
            raise MemoryError("no room for the second array")
        moved.append(x)
        return put(x, sharding)

    monkeypatch.setattr("flax_layoutmap._place.place.put", failing)
    with pytest.raises(MemoryError):
        rules(mesh).place(tree)
    after = jax.tree.leaves(nnx.state(tree) if isinstance(tree, nnx.Module) else tree)
    assert moved and all(a is b for a, b in zip(before, after, strict=True))


def test_an_indivisible_leaf_moves_nothing(mesh: flm.DeviceMesh) -> None:
    model: Any = nnx.Linear(6, 8, rngs=nnx.Rngs(0))
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["bias"] = ("model",)
    layout_map["kernel"] = ("model", None)
    before = model.bias[...]
    with pytest.raises(
        flm.errors.ResolveError, match="dim 0 of size 6 does not divide"
    ):
        layout_map.place(model)
    assert (
        model.bias.get_value() is before or model.bias[...].sharding == before.sharding
    )
    assert not isinstance(model.bias[...].sharding, NamedSharding)


def test_put_makes_no_copy_where_there_is_nothing_to_do(mesh: flm.DeviceMesh) -> None:
    sharding = NamedSharding(bare(mesh), P("data"))
    x = jax.device_put(X, sharding)
    assert put(x, NamedSharding(bare(mesh), P("data"))) is x
    for other in ("text", None, print):
        assert put(other, sharding) is other


def test_metadata_that_loses_is_rewritten(mesh: flm.DeviceMesh) -> None:
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["kernel"] = (None, "model")
    variables = {
        "params": {
            "kernel": linen.Partitioned(jnp.asarray(X), ("data", None)),
            "other": linen.Partitioned(jnp.asarray(X), ("data", None)),
        }
    }
    settled = settle_metadata(variables, layout_map.resolve(variables))
    assert settled["params"]["kernel"].names == (None, "model")
    assert settled["params"]["other"].names == ("data", None)
    assert variables["params"]["kernel"].names == ("data", None)


def test_contexts_are_left_as_they_were(mesh: flm.DeviceMesh) -> None:
    with contextlib.suppress(flm.LayoutError):
        flm.distribute_tensor(np.ones((6,)), flm.TensorLayout(("model",), mesh))
    assert jax.sharding.get_mesh().empty
    assert not jax.sharding.get_abstract_mesh().axis_names


# -------------------------------------------------------------------- no arrays


def test_what_is_abstract_cannot_be_moved(mesh: flm.DeviceMesh) -> None:
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout = flm.TensorLayout(("data", None), mesh)
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    module = nnx.eval_shape(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    for tree, path in (
        ({"a": X, "b": [shape]}, "b/0"),
        (module, "bias"),
        ({"m": module}, "m/bias"),
        (shape, "the leaf"),
    ):
        with pytest.raises(flm.LayoutError) as caught:
            layout_map.place(tree)
        assert f"but {path} is abstract, a jax.ShapeDtypeStruct" in str(caught.value)
    for tree, path in (({"a": X, "b": [shape]}, " at b/0;"), (shape, "float32);")):
        with pytest.raises(flm.LayoutError, match="got the abstract Shape") as caught:
            flm.distribute_tensor(tree, layout)
        assert path in str(caught.value)


def test_arrays_of_text_cannot_be_moved(mesh: flm.DeviceMesh) -> None:
    layout_map = flm.LayoutMap(mesh, strict=False)
    before = {"a": X, "names": [np.array(["x", "y"])]}
    with pytest.raises(flm.LayoutError, match="but names/0 is a NumPy array of <U1"):
        layout_map.place(before)
    with pytest.raises(flm.LayoutError, match="takes arrays and numbers, got the nda"):
        flm.distribute_tensor(before["names"][0], flm.TensorLayout(None, mesh))
    # A single text is kept as it is.
    assert layout_map.place({"a": X, "name": "x"})["name"] == "x"
