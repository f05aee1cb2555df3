"""distribute_tensor and place: the shards of each device, and errors."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from shards import KINDS, Dims, assert_lies, bare, grid, lies

import flax_layoutmap as flm
from flax_layoutmap._place.place import put
from flax_layoutmap._rules.rules import using_rules

P = PartitionSpec
NAMES = ("data", "model")
X = np.arange(64, dtype=np.float32).reshape(8, 8)
BOTH: Dims = (("data",), ("model",))
COLUMNS: Dims = ((), ("model",))
WAYS = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])


@pytest.fixture(params=KINDS)
def any_mesh(request: pytest.FixtureRequest) -> flm.DeviceMesh:
    """The same grid with axes of each type."""
    return grid(request.param)


def test_control_another_layout_is_noticed(mesh: flm.DeviceMesh) -> None:
    array = jax.device_put(X, NamedSharding(bare(mesh), P("data", "model")))
    assert_lies(array, BOTH, mesh, X)
    for dims in ((("model",), ("data",)), (("data",), ())):
        assert not lies(array, dims, mesh)
    assert not lies(jnp.asarray(X), BOTH, mesh)


# --------------------------------------------------------- what has a layout, and where


@pytest.mark.parametrize(
    ("axes", "dims"),
    [
        (("data", "model"), BOTH),
        ((("data", "model"), None), (("data", "model"), ())),
        ((("model", "data"), None), (("model", "data"), ())),
        ((..., "model"), COLUMNS),
        (["data", None], (("data",), ())),
        (None, ((), ())),
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
        moved = flm.distribute_tensor(x, layout)
        assert_lies(moved, dims, any_mesh, X)
        assert moved.sharding == layout.sharding(2)
        assert flm.distribute_tensor(moved, layout.sharding(2)) is moved


@pytest.mark.parametrize("devices", [slice(0, 1), slice(3, 4), slice(4, 8)])
def test_to_other_devices(mesh: flm.DeviceMesh, devices: slice) -> None:
    other = flm.DeviceMesh("data=-1,model=1", devices=jax.devices()[devices])
    x = flm.distribute_tensor(X, flm.TensorLayout(("data", "model"), mesh))
    for value in (x, jnp.asarray(X)):
        moved = flm.distribute_tensor(value, flm.TensorLayout((None, "data"), other))
        assert moved.committed and isinstance(moved.sharding, NamedSharding)
        assert_lies(moved, ((), ("data",)), other, X)


@WAYS
def test_trees_keys_scalars_and_none(any_mesh: flm.DeviceMesh, wrap: Any) -> None:
    keys = jax.random.split(jax.random.key(0), (8, 4))
    empty = X if wrap is jax.jit else X[:0]  # XLA does not split what is empty
    tree = {"a": X, "b": None, "c": [keys, (None, empty)]}
    layout = flm.TensorLayout(("data", "model"), any_mesh)
    with jax.set_mesh(bare(any_mesh)):
        moved = wrap(lambda tree: flm.distribute_tensor(tree, layout))(tree)
        assert jax.tree.structure(moved) == jax.tree.structure(tree)
        assert_lies(moved["a"], BOTH, any_mesh, X)
        assert_lies(moved["c"][0], BOTH, any_mesh, jax.random.key_data(keys))
        assert_lies(moved["c"][1][1], BOTH, any_mesh)
        for number in (3, 2.5, True, np.float32(4), jnp.int32(5)):
            scalar = flm.TensorLayout((), any_mesh)
            whole = wrap(lambda n, to=scalar: flm.distribute_tensor(n, to))(number)
            assert_lies(whole, (), any_mesh, np.asarray(number, whole.dtype))


@WAYS
def test_memory_kinds(any_mesh: flm.DeviceMesh, wrap: Any) -> None:
    kind = "pinned_host" if wrap is jax.jit else "unpinned_host"
    layout = flm.TensorLayout(("data", "model"), any_mesh, memory_kind=kind)
    with jax.set_mesh(bare(any_mesh)):
        moved = wrap(lambda x: flm.distribute_tensor(x * 2, layout))(X)
    assert moved.sharding.memory_kind == kind
    assert_lies(moved, BOTH, any_mesh, X * 2)
    back = flm.distribute_tensor(moved, flm.TensorLayout(("data", "model"), any_mesh))
    assert back.sharding.memory_kind == jax.devices()[0].default_memory().kind


# ------------------------------------------------------------------------ traced


def test_inside_jit(any_mesh: flm.DeviceMesh) -> None:
    layout = flm.TensorLayout(("data", "model"), any_mesh)
    whole = flm.distribute_tensor(X, flm.TensorLayout(None, any_mesh))

    @jax.jit
    def run(x: Any) -> Any:
        # Constants are not tracers; device_put would add nothing to the program.
        return flm.distribute_tensor((x * 2, X, jnp.zeros((8, 8))), layout)

    with jax.set_mesh(bare(any_mesh)):
        for x in (X, whole):
            for made, wanted in zip(run(x), (X * 2, X, 0 * X), strict=True):
                assert_lies(made, BOTH, any_mesh, wanted)


def squares(d: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: (d(x) ** 2).sum()


# A function of an array, and of another function.
TRANSFORMS: dict[str, Callable[[Callable[[Any], Any], Any], Any]] = {
    "itself": lambda f, x: f(x),
    "grad": lambda f, x: jax.grad(squares(f))(x),
    "vmap": lambda f, x: jax.vmap(f)(x[None])[0],
    "scan": lambda f, x: jax.lax.scan(lambda c, _: (f(c + 1), None), f(x), length=2)[0],
    "remat": lambda f, x: jax.grad(jax.checkpoint(squares(f)))(x),
}


@pytest.mark.parametrize("kind", KINDS)
@WAYS
def test_transformations_give_the_values_without_it(kind: str, wrap: Any) -> None:
    mesh = grid(kind)
    layout = flm.TensorLayout(("data", "model"), mesh)
    x = flm.distribute_tensor(X, flm.TensorLayout(None, mesh))
    for name, transform in TRANSFORMS.items():

        def program(x: Any, transform: Any = transform) -> Any:
            return transform(lambda x: flm.distribute_tensor(x, layout), x)

        with jax.set_mesh(bare(mesh)):
            made = wrap(program)(x)
        wanted = transform(lambda x: x, jnp.asarray(X))
        np.testing.assert_array_equal(made, wanted, name)
        assert name in ("grad", "remat") or lies(made, BOTH, mesh), name


@pytest.mark.parametrize("way", TRANSFORMS)
@WAYS
def test_rank_and_divisibility_are_always_checked(way: str, wrap: Any) -> None:
    for kind, axes, text in (
        (
            "auto",
            ("model", None),
            "dim 0 of size 6 is not divisible by mesh axis",
        ),
        ("explicit", ("model", None), "dim 0 of size 6 is not divisible by mesh axis"),
        ("auto", ("data",), "the layout ('data',) has 1 dims, the array has 2"),
    ):
        layout = flm.TensorLayout(axes, grid(kind))

        def move(x: Any, layout: flm.TensorLayout = layout) -> Any:
            return flm.distribute_tensor(x, layout)

        with pytest.raises(flm.LayoutError) as caught:
            wrap(lambda x: TRANSFORMS[way](move, x))(jnp.ones((6, 8)))  # noqa: B023
        assert str(caught.value).startswith("distribute_tensor of an array (6, 8)")
        assert text in str(caught.value)


def test_control_jax_drops_an_indivisible_constraint(mesh: flm.DeviceMesh) -> None:
    sharding = NamedSharding(bare(mesh), P("model"))
    dropped = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, sharding))
    assert not dropped(jnp.ones((6, 8))).sharding.is_equivalent_to(sharding, 2)


# ------------------------------------------------------------- finding the mesh


@WAYS
def test_the_mesh_of_set_mesh(any_mesh: flm.DeviceMesh, wrap: Any) -> None:
    with jax.set_mesh(bare(any_mesh)):
        for axes in (("data", "model"), P("data", "model")):
            moved = wrap(lambda x, to=axes: flm.distribute_tensor(x, to))(X)
            assert_lies(moved, BOTH, any_mesh, X)


@WAYS
def test_the_mesh_of_the_array_or_none(mesh: flm.DeviceMesh, wrap: Any) -> None:
    on_mesh = flm.distribute_tensor(X, flm.TensorLayout(("data", None), mesh))
    move = wrap(lambda x: flm.distribute_tensor(x, ("data", None)))
    if wrap is not jax.jit:  # there it has none, on Auto axes
        assert flm.distribute_tensor(on_mesh, ("data", None)) is on_mesh
    with pytest.raises(flm.errors.MeshError) as caught:
        move(X)
    assert str(caught.value) == (
        "no mesh for the layout ('data', None): give it one, flm.TensorLayout(axes, "
        "mesh); or call inside a flm.jit(layout_map=…), flm.dtensor.default_mesh(mesh) "
        "or jax.set_mesh(mesh)"
    )


def test_an_abstract_mesh(abstract_mesh: flm.DeviceMesh, mesh: flm.DeviceMesh) -> None:
    layout = flm.TensorLayout(("data", None), abstract_mesh)
    with pytest.raises(flm.errors.MeshError, match="abstract. has no devices"):
        flm.distribute_tensor(X, layout)
    # Traced, it is as good as a concrete one: the program's own devices decide.
    x = flm.distribute_tensor(X, flm.TensorLayout(None, mesh))
    moved = jax.jit(lambda v: flm.distribute_tensor(v * 1, layout))(x)
    assert_lies(moved, (("data",), ()), mesh, X)


# ---------------------------------------------------------------- names of layouts


def named(mesh: flm.DeviceMesh, **options: Any) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh, strict=False, **options)
    layout_map.names["hid.*"] = (None, "model")
    layout_map.names["block_[0-9]+"] = ("model", None)
    return layout_map


@pytest.mark.parametrize("move", [flm.distribute_tensor, flm.relayout])
def test_indivisible_dims_of_a_layout_by_name(mesh: flm.DeviceMesh, move: Any) -> None:
    """Follow the rules; those of a layout that is written out are an error."""
    odd = X[:6]

    def run(to: Any, **options: Any) -> Any:
        step = flm.jit(lambda x: move(x + 0, to), layout_map=named(mesh, **options))
        return step(odd)

    assert_lies(run("block_1", indivisible="replicate"), ((), ()), mesh, odd)
    text = " of an array (6, 8) to ('model', None): dim 0 of size 6 is not divisible by"
    for to, shown, options in (
        ("block_1", "(x, 'block_1')", {}),
        (("model", None), "", {"indivisible": "replicate"}),
    ):
        with pytest.raises(flm.LayoutError) as caught:
            run(to, **options)
        assert str(caught.value).startswith(f"{move.__name__}{shown}{text}")


def test_names_that_are_not_there(mesh: flm.DeviceMesh) -> None:
    with pytest.raises(flm.errors.RuleError) as caught:
        flm.distribute_tensor(X, "hidden")
    assert str(caught.value) == (
        "'hidden' is the name of a layout only inside a flm.jit(layout_map=…) whose "
        "layout_map.names['hidden'] is set; elsewhere pass the layout itself"
    )
    with (
        using_rules(named(mesh).freeze()),
        pytest.raises(flm.errors.RuleError, match="has no 'block'; it has"),
    ):
        flm.distribute_tensor(X, "block")


# ---------------------------------------------------------------------- shard_map


def mapped(
    function: Callable[[Any], Any], mesh: flm.DeviceMesh, manual: set[str]
) -> Callable[[Any], Any]:
    spec = P(*(name if name in manual else None for name in NAMES))
    options: Any = {"mesh": bare(mesh), "in_specs": spec, "out_specs": spec}
    return jax.shard_map(function, axis_names=manual, **options)


@pytest.mark.parametrize("manual", [{"data", "model"}, {"data"}])
def test_manual_axes_are_refused(mesh: flm.DeviceMesh, manual: set[str]) -> None:
    """By JAX."""
    layout = flm.TensorLayout(("data", None), mesh)
    f = mapped(lambda x: flm.distribute_tensor(x, layout), mesh, manual)
    with pytest.raises(ValueError, match="Manual"):
        f(X)


@WAYS
def test_other_axes_work_inside_shard_map(mesh: flm.DeviceMesh, wrap: Any) -> None:
    layout = flm.TensorLayout((None, "model"), mesh)
    f = wrap(mapped(lambda x: flm.distribute_tensor(x * 2, layout), mesh, {"data"}))
    assert_lies(f(X), BOTH, mesh, X * 2)
    whole = flm.TensorLayout(None, mesh)
    g = wrap(mapped(lambda x: flm.distribute_tensor(x, whole), mesh, set(NAMES)))
    assert_lies(g(X), BOTH, mesh, X)


# ---------------------------------------------------------------------- bad input


def test_what_cannot_be_moved(mesh: flm.DeviceMesh) -> None:
    layout_map = flm.LayoutMap(mesh, strict=False)
    whole = flm.TensorLayout(None, mesh)
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    module: Any = nnx.eval_shape(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    texts = np.array(["x", "y"])
    moved_by = {
        layout_map.place: [
            (
                {"a": X, "b": [shape]},
                "but b/0 is the abstract .*: make the values",
            ),
            ({"m": module}, "but m/bias is the abstract"),
            ({"a": X, "b": [texts]}, "but b/0 is a NumPy array of <U1"),
        ],
        lambda tree: flm.distribute_tensor(tree, whole): [
            (shape, "distribute_tensor takes arrays and numbers, got the abstract"),
            ({"a": "text"}, "takes arrays and numbers, but a is the str 'text'"),
            (module, "not a Linear: move a module by rules, layout_map.place"),
        ],
    }
    for move, cases in moved_by.items():
        for tree, text in cases:
            with pytest.raises(flm.LayoutError, match=text):
                move(tree)
    # A single text is kept as it is.
    assert layout_map.place({"a": X, "name": "x"})["name"] == "x"


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


def test_place_updates_modules_in_place(any_mesh: flm.DeviceMesh) -> None:
    model: Any = Tied(nnx.Rngs(0))
    optimizer: Any = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    kernel, values = model.embed.kernel, np.asarray(model.embed.kernel[...])
    assert rules(any_mesh).place(model) is model
    assert model.embed.kernel is kernel and model.head is model.embed
    assert_lies(kernel[...], BOTH, any_mesh, values)
    assert_lies(model.norm.scale[...], (("model",),), any_mesh)
    assert_lies(model.norm.mean[...], ((),), any_mesh)
    assert_lies(model.drop.rngs.count[...], (), any_mesh)
    assert_lies(model.drop.rngs.key[...], (), any_mesh)
    assert_lies(model.steps.get_value(), (), any_mesh, np.int32(3))
    assert model.name == "tied"
    moved = rules(any_mesh).place({"model": model, "optimizer": optimizer, "step": 1})
    assert moved["model"] is model and moved["optimizer"] is optimizer
    moments = optimizer.opt_state[0]
    assert_lies(moments.mu["embed"]["kernel"][...], BOTH, any_mesh)
    assert_lies(moments.count[...], (), any_mesh)
    assert_lies(moved["step"], (), any_mesh, np.int32(1))


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
    again = rules(any_mesh).place(moved)
    pairs = zip(*map(jax.tree.leaves, (moved, again)), strict=True)
    assert all(a is b for a, b in pairs)


def test_a_failure_leaves_a_module_as_it_was(
    mesh: flm.DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, moved = Tied(nnx.Rngs(0)), []

    def failing(x: Any, sharding: Any) -> Any:
        if moved:
            raise MemoryError("no room for the second array")
        moved.append(x)
        return put(x, sharding)

    before = jax.tree.leaves(nnx.state(model))
    monkeypatch.setattr("flax_layoutmap._place.place.put", failing)
    with pytest.raises(MemoryError):
        rules(mesh).place(model)
    after = jax.tree.leaves(nnx.state(model))
    assert moved and all(a is b for a, b in zip(before, after, strict=True))
