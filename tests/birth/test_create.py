"""create: values, objects, memory and contexts."""

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from shards import KINDS, assert_as_eager, assert_lies, bare, grid, leaves_of
from shards import plain as bits

import flax_layoutmap as flm

pytestmark = pytest.mark.optimised

P = PartitionSpec
NAMES = ("data", "model")
ROW, COLUMN, BOTH = (("model",), ()), ((), ("model",)), (("data",), ("model",))


@pytest.fixture(params=KINDS)
def any_mesh(request: pytest.FixtureRequest) -> flm.DeviceMesh:
    return grid(request.param)


def counting(key: Any, shape: Any, dtype: Any = jnp.float32, *_: Any) -> Any:
    """An initialiser that tells shards apart and compiles in no time."""
    del key
    return jnp.arange(np.prod(shape), dtype=dtype).reshape(shape)


normal = nnx.initializers.normal(0.02)


def linear(inputs: int, outputs: int) -> Any:
    return nnx.Linear(inputs, outputs, kernel_init=counting, rngs=nnx.Rngs(0))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, initialise: Any = counting) -> None:
        self.up = nnx.Linear(8, 16, kernel_init=initialise, rngs=rngs)
        self.down = nnx.Linear(16, 8, use_bias=False, kernel_init=initialise, rngs=rngs)


class Model(nnx.Module):
    """Blocks, tied weights, statistics, counters, an int, a key, nothing at all."""

    def __init__(self, rngs: nnx.Rngs, initialise: Any = counting) -> None:
        self.embed = nnx.Embed(16, 8, embedding_init=initialise, rngs=rngs)
        self.blocks = nnx.List([Block(rngs, initialise) for _ in range(2)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.head = self.embed
        self.empty = nnx.Param(jnp.zeros((0, 8)))
        self.steps = nnx.Variable(3)
        self.key = nnx.Variable(jax.random.key(7))
        self.name = "model"


def rules(mesh: flm.DeviceMesh | None, **options: Any) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh, strict=False, **options)
    layout_map["embedding"] = ("data", "model")
    layout_map["up/kernel|empty"] = (None, "model")
    layout_map["down/kernel"] = ("model", "data")
    layout_map["up/bias"] = ("model",)
    layout_map["norm/scale"] = ("data",)
    return layout_map


def make() -> Any:
    return Model(nnx.Rngs(0))


def assert_same_bits(tree: Any, other: Any) -> None:
    found, wanted = leaves_of(tree), leaves_of(other)
    assert found.keys() == wanted.keys()
    for path, leaf in found.items():
        assert leaf.dtype == wanted[path].dtype, path
        np.testing.assert_array_equal(bits(leaf), bits(wanted[path]), err_msg=path)


# ------------------------------------------------------------------------ values


def test_every_leaf_is_born_in_its_shards(born: Any, any_mesh: flm.DeviceMesh) -> None:
    model = born(make, rules(any_mesh))
    assert type(model) is Model and model.name == "model"
    assert_as_eager(model, make(), rules(any_mesh))
    assert_same_bits(nnx.state(model), jax.jit(lambda: nnx.split(make())[1])())
    kernel = model.blocks[0].up.kernel
    assert kernel.sharding.mesh.axis_types == any_mesh.axis_types


# ------------------------------------------------------------------ objects of NNX


def grow(block: Any, rngs: nnx.Rngs) -> Any:
    rngs()
    block.extra = nnx.Param(jnp.ones(3))
    return {"w": jnp.ones(8)}


def broken(block: Any, rngs: nnx.Rngs) -> Any:
    block.extra = nnx.Param(jnp.ones(rngs().shape))
    raise RuntimeError("no such weights")


@pytest.mark.parametrize(
    ("function", "error"), [(grow, flm.errors.StructureError), (broken, RuntimeError)]
)
def test_what_fails_leaves_its_arguments_as_they_were(
    function: Any, error: Any, mesh: flm.DeviceMesh
) -> None:
    block, rngs = Block(nnx.Rngs(0)), nnx.Rngs(0)
    with pytest.raises(error, match="structure of its argument|no such weights"):
        flm.create(function, rules(mesh), block, rngs)
    assert not hasattr(block, "extra") and rngs.default.count[...] == 0


# ------------------------------------------------------------------- plain trees


def test_numbers_text_none_and_what_has_no_elements(mesh: flm.DeviceMesh) -> None:
    def values() -> Any:
        host = np.arange(8.0, dtype=np.float32)
        return {"step": 3, "rate": 0.5, "flag": True, "host": host, "none": None}

    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["host"] = ("model",)
    text: Any = {"text": "kept", "empty": jnp.zeros((0, 4))}
    made = flm.create(lambda: text | values(), layout_map)
    assert made.pop("text") == "kept" and made["none"] is None
    assert made.pop("empty").shape == (0, 4)
    wanted = jax.tree.map(jnp.asarray, values())
    assert jax.tree.structure(made) == jax.tree.structure(wanted)
    assert_as_eager(made, wanted, layout_map)


def test_arguments_are_inputs(mesh: flm.DeviceMesh) -> None:
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["w"] = ("model", None)
    table = jnp.arange(32.0).reshape(8, 4)
    on_mesh = jax.device_put(table, NamedSharding(bare(mesh), P("data")))
    single = jax.device_put(table, jax.devices()[3])
    half = flm.DeviceMesh((4,), ("rows",), devices=jax.devices()[4:])
    elsewhere = jax.device_put(table, NamedSharding(bare(half), P("rows")))
    explicit = jax.device_put(table, NamedSharding(bare(grid("explicit")), P("data")))
    for value in (table, np.asarray(table), on_mesh, single, elsewhere, explicit):
        made = flm.create(lambda x, scale: {"w": x * scale}, layout_map, value, 2)
        assert_lies(made["w"], ROW, mesh, np.asarray(table) * 2)
        # As an output it is an array of its own.
        same = flm.create(lambda x: {"w": x, "again": x}, layout_map, value)
        jax.jit(lambda tree: tree, donate_argnums=0)(same)
        np.testing.assert_array_equal(value, table)


def test_rngs_go_on_to_another_mesh_of_the_same_devices() -> None:
    def make(rngs: nnx.Rngs) -> Any:
        return nnx.Param(normal(rngs.params(), (8, 8)))

    rngs, plain = nnx.Rngs(0), nnx.Rngs(0)
    for shape in ("data=2,model=4", "data=4,model=2"):
        layout_map = flm.LayoutMap(shape, strict=False)
        layout_map[""] = NAMES
        made = flm.create(make, layout_map, rngs)
        expected = jax.jit(normal, static_argnums=1)(plain.params(), (8, 8))
        assert_lies(made[...], BOTH, flm.DeviceMesh(shape), expected)
    assert int(rngs.default.count[...]) == int(plain.default.count[...]) == 2


@pytest.mark.parametrize("large", [False, True])
def test_arguments_on_other_meshes(mesh: flm.DeviceMesh, large: bool) -> None:
    """JAX folds no number of one mesh into a key of another one."""
    x = jnp.arange(1600).reshape(40, 40) if large else jnp.arange(4).reshape(2, 2)
    key = jax.random.key(3)

    def make(key: Any, x: Any) -> Any:
        folded = jax.random.fold_in(key, x[1, 1])
        return {"kernel": jax.random.normal(folded, (8, 8)) + x[:1, :1], "x": x}

    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["kernel"] = NAMES
    placed = flm.LayoutMap("x=8", strict=False)
    placed["x"] = ("x", None) if large else None
    other = NamedSharding(bare(flm.DeviceMesh("x=8")), P())
    arguments = jax.device_put(key, other), placed.place({"x": x})["x"]
    expected = jax.jit(make)(key, x)
    for given in (arguments, (key, arguments[1]), (arguments[0], x)):
        made = flm.create(make, layout_map, *given)
        assert_lies(made["kernel"], BOTH, mesh, np.asarray(expected["kernel"]))
        assert_lies(made["x"], ((), ()), mesh, np.asarray(expected["x"]))
    closed = flm.create(lambda: make(*arguments), layout_map)
    np.testing.assert_array_equal(closed["kernel"], expected["kernel"])


# ----------------------------------------------------------------------- contexts


@contextlib.contextmanager
def nothing(_: Any) -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    ("kind", "around"),
    [
        ("auto", nothing),
        ("auto", jax.set_mesh),
        ("explicit", nothing),
        ("explicit", jax.set_mesh),
    ],
)
def test_inside_and_outside_of_contexts(kind: str, around: Any) -> None:
    mesh = grid(kind)
    wanted = jax.jit(lambda: nnx.split(make())[1])()
    with around(bare(mesh)):
        model = flm.create(make, rules(mesh))
        assert_as_eager(model, make(), rules(mesh))
        assert_same_bits(nnx.state(model), wanted)
        optimizer = flm.create_optimizer(model, optax.adam(1e-3), rules(mesh))
        assert_lies(optimizer.opt_state[0].mu["embed"]["embedding"][...], BOTH, mesh)

        def inside() -> Any:
            model = flm.create(make, rules(mesh))
            return nnx.state(model)

        traced, state = jax.jit(inside)(), nnx.state(model)
        assert_same_bits(traced, wanted)
        del traced["empty"], wanted["empty"]  # which the outer jit lays out
        assert_as_eager(traced, wanted, rules(mesh))
        abstract = jax.eval_shape(inside)
        for shape, leaf in zip(*map(jax.tree.leaves, (abstract, state)), strict=True):
            assert (shape.shape, shape.dtype) == (leaf.shape, leaf.dtype)
        abstract_model = nnx.eval_shape(lambda: flm.create(make, rules(mesh)))
        assert nnx.graphdef(abstract_model) == nnx.graphdef(make())


# ------------------------------------------------------------------------- memory


WIDE = 512


class Wide(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, width: int = WIDE) -> None:
        self.layers = nnx.List(
            [nnx.Linear(width, width, use_bias=False, rngs=rngs) for _ in range(3)]
        )


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Each new program that is run, lowered for its inputs."""
    seen: list[Any] = []
    plain = jax.jit

    def jit(function: Any, **options: Any) -> Any:
        jitted = plain(function, **options)

        class Recorded:
            lower = staticmethod(jitted.lower)

            def __call__(self, *inputs: Any) -> Any:
                seen.append(jitted.lower(*inputs))
                return jitted(*inputs)

        return Recorded() if "out_shardings" in options else jitted

    monkeypatch.setattr(jax, "jit", jit)
    return seen


WIDTHS = iter(range(WIDE, 10 * WIDE, 16))  # programs are kept: new ones in each test


@pytest.mark.parametrize("kind", KINDS)
def test_no_device_holds_a_whole_parameter(
    born: Any, kind: str, programs: list[Any]
) -> None:
    """Neither while it is computed, nor afterwards."""
    mesh, width = grid(kind), next(WIDTHS)
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["kernel"] = ("data", "model")
    model = born(lambda: Wide(nnx.Rngs(0), width), layout_map)
    shard = width * width * 4 // 8
    for layer in model.layers:
        assert_lies(layer.kernel[...], BOTH, mesh)
    memory: Any = [lowered.compile().memory_analysis() for lowered in programs]
    large = [one for one in memory if one.output_size_in_bytes > shard // 2]
    assert len(large) == 3
    for one in large:
        assert shard <= one.output_size_in_bytes < shard + 1024
        assert one.temp_size_in_bytes < 4 * shard
    # The control: without shardings a device has it all.
    plain = jax.jit(lambda: nnx.split(Wide(nnx.Rngs(0), width))[1]).lower().compile()
    control: Any = plain.memory_analysis()
    assert control.output_size_in_bytes >= 3 * 8 * shard


@pytest.mark.parametrize("kind", ["numpy", "jax", "one device"])
def test_large_constants_go_to_their_shards(
    mesh: flm.DeviceMesh, kind: str, programs: list[Any]
) -> None:
    """Neither are they in the text of the program, nor is any device given all."""
    width = {"numpy": 520, "jax": 528, "one device": 536}[kind]
    table = np.arange(1.0 * width**2, dtype=np.float32).reshape(width, width)
    given = table if kind == "numpy" else jnp.asarray(table)
    if kind == "one device":
        given = jax.device_put(table, jax.devices()[3])
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["kernel"] = ("data", "model")

    def make() -> dict[str, Any]:
        return {"kernel": jnp.asarray(given) * 2, "turned": jnp.asarray(given).T[:8]}

    made = flm.create(make, layout_map)
    assert len(programs) == 2
    for lowered in programs:
        assert len(lowered.as_text()) < 20_000
    sizes = [x.compile().memory_analysis().argument_size_in_bytes for x in programs]
    assert sizes[0] == table.nbytes // 8 and sizes[1] <= table.nbytes
    assert_lies(made["kernel"], BOTH, mesh, table * 2)
    np.testing.assert_array_equal(made["turned"], table.T[:8])


def test_what_was_made_can_be_collected(mesh: flm.DeviceMesh) -> None:
    table = jnp.arange(64.0).reshape(8, 8)
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["w"] = ("data", "model")
    rngs = nnx.Rngs(0)
    made = flm.create(lambda r, x: {"w": x * 2, "m": Model(r)}, layout_map, rngs, table)
    model = made["m"]
    optimizer = flm.create_optimizer(model, optax.adam(1e-3), layout_map)
    watched = [
        weakref.ref(thing)
        for thing in (table, rngs, made["w"], model, optimizer, model.embed)
    ]
    del table, rngs, made, model, optimizer
    gc.collect()
    assert [ref() is None for ref in watched] == [True] * len(watched)


# ----------------------------------------------------------------------- bad input


def test_what_does_not_fit_is_an_error_before_compilation(
    abstract_mesh: flm.DeviceMesh, compilations: list[str]
) -> None:
    layout_map = flm.LayoutMap("data=2,model=4", strict=False)
    layout_map["kernel"] = ("model", None)
    with pytest.raises(flm.errors.ResolveError, match=r"(?s)kernel \(6,10\): rule 1"):
        flm.create(lambda: linear(6, 10), layout_map)
    for mesh, text in ((None, "no mesh"), (abstract_mesh, "DeviceMesh.*, abstract")):
        with pytest.raises(
            flm.errors.MeshError, match=rf"create needs a mesh of .* have {text}.*; use"
        ):
            flm.create(make, rules(mesh))
    assert not compilations


def test_fewer_devices_than_there_are() -> None:
    half = flm.DeviceMesh((2, 2), NAMES, devices=jax.devices()[4:])
    assert_as_eager(flm.create(make, rules(half)), make(), rules(half))
    one = flm.DeviceMesh((1, 1), NAMES, devices=jax.devices()[5:6])
    model = flm.create(make, rules(one))
    assert_as_eager(model, make(), rules(one))
    assert isinstance(model.embed.embedding.sharding, NamedSharding)
    assert_same_bits(nnx.state(model), nnx.state(flm.create(make, rules(grid("auto")))))
