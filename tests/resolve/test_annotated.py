"""Annotated models: created sharded without a context, with consistent metadata.

Every spelling of Flax's sharding metadata, with and without a rule of ours, against
each of those that read metadata: `nnx.Optimizer`, `nnx.get_partition_spec`,
`nnx.get_named_sharding`, Linen's `unbox`, `apply` and specs, and a checkpoint.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from shards import assert_lies, bare

import flax_layoutmap as flm

P = PartitionSpec
MESH = ((2, 4), ("data", "model"))
LOGICAL = (("embed", "data"), ("mlp", "model"))
INIT = nnx.initializers.lecun_normal()
Dims = tuple[tuple[str, ...], ...]

ANNOTATED: Dims = (("data",), ("model",))
RULED: Dims = ((), ("data",))


class Layer(nnx.Module):
    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __call__(self, x: Any) -> Any:
        return x @ self.kernel[...]


def param(**metadata: Any) -> Callable[[], nnx.Module]:
    def make() -> nnx.Module:
        value = INIT(jax.random.key(0), (8, 16), jnp.float32)
        return Layer(nnx.Param(value, **metadata))

    return make


def linear(**options: Any) -> Callable[[], nnx.Module]:
    return lambda: nnx.Linear(8, 16, use_bias=False, rngs=nnx.Rngs(0), **options)


NAMES = ("data", "model")
WITH = nnx.with_partitioning
# How a kernel is annotated → its model, by the mesh.
SPELLINGS: dict[str, Callable[[Any], Callable[[], nnx.Module]]] = {
    "out_sharding": lambda _: param(out_sharding=NAMES),
    "P": lambda _: param(out_sharding=P(*NAMES)),
    "sharding": lambda _: param(sharding=NAMES),
    "sharding_names": lambda _: param(sharding_names=NAMES),
    "mesh": lambda mesh: param(out_sharding=NAMES, mesh=mesh),
    "rules": lambda _: param(out_sharding=("embed", "mlp"), sharding_rules=LOGICAL),
    "with_partitioning": lambda _: linear(kernel_init=WITH(INIT, NAMES)),
    "with_partitioning, mesh": lambda mesh: linear(kernel_init=WITH(INIT, NAMES, mesh)),
    "with_metadata": lambda _: linear(
        kernel_init=nnx.with_metadata(INIT, out_sharding=NAMES)
    ),
    "kernel_metadata": lambda _: linear(kernel_metadata={"out_sharding": NAMES}),
    "NamedSharding": lambda mesh: param(out_sharding=NamedSharding(mesh, P(*NAMES))),
}


def spelled(name: str) -> Callable[[], nnx.Module]:
    return SPELLINGS[name](bare(flm.DeviceMesh(*MESH)))


def spec_of(dims: Dims) -> PartitionSpec:
    return P(*(dim[0] if len(dim) == 1 else dim or None for dim in dims))


def same(spec: Any, dims: Dims) -> bool:
    """Whether a spec says the same, with or without None at the end."""
    padded = tuple(spec) + (None,) * (len(dims) - len(tuple(spec)))
    return padded == tuple(spec_of(dims))


def moments_of(optimizer: Any) -> Any:
    """The layouts of the first moments, in order."""
    return [leaf.sharding.spec for leaf in jax.tree.leaves(optimizer.opt_state[0].mu)]


def check_nnx(
    model: Any, dims: Dims, mesh: flm.DeviceMesh, in_jit: bool = False
) -> None:
    """Whoever reads the metadata of a kernel is told where it lies."""
    state = nnx.state(model, nnx.Param)
    for variable in jax.tree.leaves(state):
        assert_lies(variable, dims, mesh)
    specs = jax.tree.leaves(
        nnx.get_partition_spec(state), is_leaf=lambda node: isinstance(node, P)
    )
    assert specs and all(same(spec, dims) for spec in specs)
    for sharding in jax.tree.leaves(nnx.get_named_sharding(state, bare(mesh))):
        assert sharding.mesh == bare(mesh) and same(sharding.spec, dims)
    tx = optax.adam(1e-3)
    with jax.set_mesh(bare(mesh)):

        def make(model: Any) -> Any:
            return nnx.Optimizer(model, tx, wrt=nnx.Param)

        optimizer = (nnx.jit(make) if in_jit else make)(model)
    assert all(same(spec, dims) for spec in moments_of(optimizer))
    # Without rules for moments, which the model's own map may have.
    ours = flm.create_optimizer(model, tx, layout_map=flm.LayoutMap(mesh))
    assert all(same(spec, dims) for spec in moments_of(ours))


@pytest.fixture
def quiet_flax() -> Any:
    """Flax's own warnings about old spellings do not count."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("error", flm.LayoutWarning)
        yield


def born(how: str, make: Callable[[], Any], layout_map: flm.LayoutMap) -> Any:
    if how == "create":
        return flm.create(make, layout_map)
    if how == "scope":
        with flm.layout_map_scope(layout_map):
            return make()
    with nnx.use_eager_sharding(False):
        model = make()
    if isinstance(model, nnx.Module):
        for _, variable in nnx.to_flat_state(nnx.state(model)):
            variable.set_metadata("eager_sharding", True)
    return layout_map.place(model)


def mapped(mesh: flm.DeviceMesh, rule: Any, **options: Any) -> flm.LayoutMap:
    """The map with this rule for kernels, or none."""
    layout_map = flm.LayoutMap(mesh, **options)
    if rule is not None:
        layout_map["kernel"] = rule
    return layout_map


# ------------------------------------------------------------------------- NNX


@pytest.mark.parametrize("rule", [None, (None, "data")])
@pytest.mark.parametrize(
    ("how", "spelling"),
    [
        *(("create", spelling) for spelling in SPELLINGS),
        ("scope", "with_partitioning"),
        ("place", "with_partitioning"),
    ],
)
def test_spellings(
    how: str, spelling: str, rule: Any, mesh: flm.DeviceMesh, quiet_flax: Any
) -> None:
    layout_map = mapped(mesh, rule, unmatched="error")
    model = born(how, spelled(spelling), layout_map)
    check_nnx(model, RULED if rule else ANNOTATED, mesh, in_jit=how != "create")


def test_metadata_that_is_right_is_left_alone(
    mesh: flm.DeviceMesh, quiet_flax: Any
) -> None:
    """So that trees of shardings made before fit the model."""
    make = spelled("rules")
    layout_map = flm.LayoutMap(mesh)
    shardings = layout_map.shardings(make)
    state = nnx.state(flm.create(make, layout_map))
    jax.jit(lambda s: s, in_shardings=(shardings,))(state)


@pytest.mark.parametrize("rule", [None, (None, "data")])
def test_what_the_metadata_needs_from_elsewhere(
    rule: Any, mesh: flm.DeviceMesh, quiet_flax: Any
) -> None:
    """Logical rules in context; and another mesh, which is replaced."""
    layout_map = mapped(mesh, rule)
    other = flm.DeviceMesh((4, 2), ("data", "model"))
    elsewhere = param(out_sharding=NAMES, mesh=bare(other))
    dims = RULED if rule else ANNOTATED
    check_nnx(flm.create(elsewhere, layout_map), dims, mesh)
    with nnx.logical_axis_rules(LOGICAL):
        model = flm.create(param(out_sharding=("embed", "mlp")), layout_map)
        check_nnx(model, dims, mesh)


def test_names_of_another_mesh_are_told_and_mended(mesh: flm.DeviceMesh) -> None:
    make = param(out_sharding=("data", "heads"))
    with pytest.warns(flm.LayoutWarning) as caught:
        model = flm.create(make, flm.LayoutMap(mesh))
    assert str(caught[0].message).startswith(
        "1 finding\n"
        "  - annotation: kernel (8,16): Flax metadata ('data', 'heads'): no mesh axis "
        "for 'heads'; map the names by Flax's logical_axis_rules, or add a rule for it"
    )
    check_nnx(model, (("data",), ()), mesh)
    with pytest.raises(flm.errors.ResolveError, match="no mesh axis for 'heads'"):
        flm.create(make, flm.LayoutMap(mesh, strict=True))
    with warnings.catch_warnings(), nnx.logical_axis_rules([("heads", "model")]):
        warnings.simplefilter("error", flm.LayoutWarning)  # as the warning says
        check_nnx(flm.create(make, flm.LayoutMap(mesh)), ANNOTATED, mesh)


@pytest.mark.parametrize("moments", [None, ("model", None)])
def test_the_metadata_of_moments_follows(
    moments: Any, mesh: flm.DeviceMesh, quiet_flax: Any
) -> None:
    """Where an optimizer is placed together with its model."""
    layout_map = mapped(mesh, (None, "data"))
    if moments is not None:
        layout_map.optimizer["kernel"] = moments
    make = spelled("with_partitioning")
    with jax.set_mesh(bare(mesh)):
        model: Any = make()
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    layout_map.place({"model": model, "optimizer": optimizer})
    check_nnx(model, RULED, mesh)
    dims = (("model",), ()) if moments else RULED
    for moment in (optimizer.opt_state[0].mu, optimizer.opt_state[0].nu):
        assert_lies(moment.kernel[...], dims, mesh)
        assert same(moment.kernel.get_metadata()["out_sharding"], dims)
    with jax.set_mesh(bare(mesh)):
        gradients = nnx.grad(lambda m: (m(X) ** 2).sum())(model)
        optimizer.update(model, gradients)


def stacked(partition: Any, layers: int = 4) -> Callable[[], nnx.Module]:
    """Layers made by `nnx.vmap` and run by `nnx.scan`."""
    options: dict[str, Any] = {}
    if partition != "none given":
        options["transform_metadata"] = {nnx.PARTITION_NAME: partition}

    class Stack(nnx.Module):
        def __init__(self) -> None:
            init = nnx.with_partitioning(INIT, ("data", "model"))

            @nnx.vmap(in_axes=0, out_axes=0, **options)
            def make(rngs: nnx.Rngs) -> nnx.Module:
                return nnx.Linear(8, 8, use_bias=False, kernel_init=init, rngs=rngs)

            self.layers = make(nnx.Rngs(0).fork(split=layers))

        def __call__(self, x: Any) -> Any:
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, **options)
            def step(layer: Any, x: Any) -> Any:
                return layer(x)

            return step(self.layers, x)

    return Stack


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("rule", [None, (None, "data", None)])
@pytest.mark.parametrize("partition", [None, "layers"])
def test_stacked_layers(partition: Any, rule: Any, mesh: flm.DeviceMesh) -> None:
    layout_map = mapped(mesh, rule, strict=False)
    model: Any = flm.create(stacked(partition), layout_map)
    check_nnx(model, ((), *(RULED[::-1] if rule else ANNOTATED)), mesh)
    assert model(jnp.ones((2, 8))).shape == (2, 8)
    with jax.set_mesh(bare(mesh)):
        jitted: Any = nnx.jit(lambda m, x: m(x))
        assert jitted(model, jnp.ones((2, 8))).shape == (2, 8)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_stacked_layers_whose_metadata_does_not_know(mesh: flm.DeviceMesh) -> None:
    make = stacked("none given", layers=3)
    with pytest.raises(
        flm.errors.ResolveError, match=r"nnx.PARTITION_NAME: None\} adds the"
    ):
        flm.create(make, flm.LayoutMap(mesh))
    resolution = flm.LayoutMap(mesh).resolve(stacked("none given"))
    assert "names 2 of 3 dims, the first ones" in resolution.explain("layers/kernel")
    ruled = mapped(mesh, (None, "data", None))
    check_nnx(flm.create(make, ruled), ((), ("data",), ()), mesh)


def test_saved_and_restored(mesh: flm.DeviceMesh, tmp_path: Any) -> None:
    make = spelled("with_partitioning")
    path = str(tmp_path / "checkpoint")
    flm.checkpoint.save(path, flm.create(make, flm.LayoutMap(mesh)))
    other = flm.DeviceMesh((4, 2), ("data", "model"))
    for rule, dims in ((None, ANNOTATED), ((None, "data"), RULED)):
        layout_map = mapped(other, rule)
        with nnx.use_eager_sharding(False):
            target = nnx.eval_shape(make)
        restored: Any = flm.checkpoint.restore(path, target, layout_map=layout_map)
        assert_lies(restored.kernel[...], dims, other)
        specs: Any = nnx.get_partition_spec(nnx.state(restored))
        assert same(specs["kernel"].get_raw_value(), dims)


# ----------------------------------------------------------------------- Linen


class Net(nn.Module):
    init_of: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(16, use_bias=False, kernel_init=self.init_of, name="d")(x)


class Block(nn.Module):
    init_of: Any

    @nn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        dense = nn.Dense(8, use_bias=False, kernel_init=self.init_of, name="d")
        return dense(x), None


class Scanned(nn.Module):
    init_of: Any
    partition: Any = None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        block: Any = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=4,
            metadata_params={nn.PARTITION_NAME: self.partition},
        )
        return block(self.init_of, name="d")(x, None)[0]


X = np.ones((8, 8), np.float32)


def boxed(init: Any, *rest: Any) -> Any:
    return nn.with_partitioning(init, ("data", "model"), *rest)


LOGICALLY = nn.with_logical_partitioning
STACK: Dims = ((), *ANNOTATED)
# How a kernel is annotated → its module, by the mesh, and its layout.
NETS: dict[str, tuple[Callable[[Any], Any], Dims]] = {
    "Partitioned": (lambda _: Net(boxed(INIT)), ANNOTATED),
    "Partitioned, mesh": (lambda mesh: Net(boxed(INIT, mesh)), ANNOTATED),
    "logical": (lambda _: Net(LOGICALLY(INIT, ("embed", "mlp"))), ANNOTATED),
    "logical, rules": (
        lambda _: Net(LOGICALLY(INIT, ("embed", "mlp"), None, LOGICAL)),
        ANNOTATED,
    ),
    "scan": (lambda _: Scanned(boxed(INIT)), STACK),
    "scan, layers": (lambda _: Scanned(boxed(INIT), "layers"), STACK),
    "scan, logical": (
        lambda _: Scanned(LOGICALLY(INIT, ("embed", "mlp")), "layers"),
        STACK,
    ),
}


def check_linen(net: Any, variables: Any, dims: Dims, mesh: flm.DeviceMesh) -> None:
    """Whoever reads the boxes is told where the kernel lies."""
    (box,) = jax.tree.leaves(
        variables, is_leaf=lambda node: isinstance(node, nn.Partitioned)
    )
    assert_lies(box.value, dims, mesh)
    specs = nn.get_partition_spec(variables)
    if not isinstance(box, nn.LogicallyPartitioned):
        (spec,) = jax.tree.leaves(specs, is_leaf=lambda node: isinstance(node, P))
        assert same(spec, dims)
        (sharding,) = jax.tree.leaves(nn.get_sharding(variables, bare(mesh)))
        assert same(sharding.spec, dims)
    expected = net.apply(variables, X)
    with jax.set_mesh(bare(mesh)):
        (unboxed,) = jax.tree.leaves(nn.meta.unbox(variables))
        assert_lies(unboxed, dims, mesh)
        jitted = jax.jit(net.apply)
        np.testing.assert_allclose(jitted(variables, X), expected, rtol=1e-5)
    state = flm.create_optimizer(
        variables["params"], optax.adam(1e-3), flm.LayoutMap(mesh)
    )
    _, *moments = jax.tree.leaves(state)
    assert len(moments) == 2
    for moment in moments:
        assert_lies(moment, dims, mesh)


@pytest.mark.parametrize("rule", [None, (..., "data")])
@pytest.mark.parametrize(
    ("how", "name"),
    [
        *(("create", name) for name in NETS),
        ("scope", "Partitioned"),
        ("place", "Partitioned"),
    ],
)
def test_linen_spellings(how: str, name: str, rule: Any, mesh: flm.DeviceMesh) -> None:
    make, dims = NETS[name]
    net = make(bare(mesh))
    layout_map = mapped(mesh, rule, strict=name != "scan, layers")
    if rule is not None:
        dims = (*((),) * (len(dims) - 1), ("data",))
    with nn.logical_axis_rules(LOGICAL):
        variables = born(how, lambda: net.init(jax.random.key(0), X), layout_map)
        check_linen(net, variables, dims, mesh)


def test_logical_names_without_any_rule_are_told(mesh: flm.DeviceMesh) -> None:
    net = Net(nn.with_logical_partitioning(INIT, ("embed", "mlp")))
    with pytest.warns(flm.LayoutWarning, match="no mesh axis for 'embed', 'mlp'; map"):
        flm.create(net.init, flm.LayoutMap(mesh), jax.random.key(0), X)
