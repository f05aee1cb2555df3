"""Constructors that do what they should not: an error with a way out, or the model.

Each case runs in a `layout_map_scope` and by `flm.create`. Afterwards nothing is left
of it: the hooks are those of Flax, no context is changed, and the next model is right.
"""

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from shards import assert_lies

import flax_layoutmap as flm
from flax_layoutmap._scope import current_rules
from flax_layoutmap._trace import is_tracing_constructor

COLUMN = ((), ("model",))


def rules(mesh: flm.DeviceMesh) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["kernel"] = (None, "model")
    return layout_map


def in_scope(make: Callable[[], Any], layout_map: flm.LayoutMap) -> Any:
    with flm.layout_map_scope(layout_map):
        model = make()
    return model


WAYS: dict[str, Any] = {"scope": in_scope, "create": flm.create}


def hooks() -> list[Any]:
    names = ("__post_init__", "init", "init_with_output", "lazy_init")
    own = [vars(linen.Module)[name] for name in names]
    return [
        type(nnx.Pytree).__call__,
        vars(type(nnx.Variable)).get("__call__"),
        vars(Tracer).get("sharding"),
        *own,
    ]


@pytest.fixture(autouse=True)
def usable_afterwards(mesh: flm.DeviceMesh) -> Iterator[None]:
    before = hooks()
    yield
    assert hooks() == before
    assert current_rules() is None and not is_tracing_constructor()
    assert nnx.using_eager_sharding()
    assert jax.sharding.get_abstract_mesh().empty
    for way in WAYS.values():
        model = way(lambda: layer(nnx.Rngs(0)), rules(mesh))
        assert_lies(model.kernel[...], COLUMN, mesh)
    assert len(layer(nnx.Rngs(0)).kernel[...].sharding.device_set) == 1


def layer(rngs: nnx.Rngs) -> Any:
    return nnx.Linear(8, 8, kernel_init=nnx.initializers.ones, rngs=rngs)


class _Model(nnx.Module):
    """One layer, and whatever else the test does in the constructor."""

    def __init__(self, also: Callable[[Any, Any], Any] | None = None) -> None:
        rngs = nnx.Rngs(0)
        self.layer = layer(rngs)
        if also is not None:
            also(self, rngs)


Model: Any = _Model  # typed as Any: the tests set attributes on it


# ---------------------------------------------------------------------- what raises


class Stop(BaseException):
    """As a KeyboardInterrupt: no Exception."""


@pytest.mark.parametrize("error", [ZeroDivisionError, flm.StructureError, Stop])
@pytest.mark.parametrize("way", WAYS)
def test_a_constructor_that_raises_half_way(
    mesh: flm.DeviceMesh, way: str, error: Any
) -> None:
    seen: list[Any] = []

    def also(model: Any, rngs: Any) -> None:
        seen.append(weakref.ref(model))
        raise error("no")

    with pytest.raises(error, match="no"):
        WAYS[way](lambda: Model(also), rules(mesh))
    gc.collect()
    assert seen and all(ref() is None for ref in seen)  # nothing half-built is kept


def test_an_error_that_is_caught_in_the_block(mesh: flm.DeviceMesh) -> None:
    def also(model: Any, rngs: Any) -> None:
        raise KeyError

    with flm.layout_map_scope(rules(mesh)):
        with pytest.raises(KeyError):
            Model(also)
        model = Model()
    assert_lies(model.layer.kernel[...], COLUMN, mesh)


def test_a_scope_left_by_an_exception(mesh: flm.DeviceMesh) -> None:
    kept: list[Any] = []
    with pytest.raises(Stop):
        with flm.layout_map_scope(rules(mesh)):
            kept.append(Model())
            raise Stop
    with pytest.raises(flm.StructureError, match="block failed: make the model again"):
        kept[0].layer(jnp.ones((1, 8)))


def test_a_module_that_is_never_used(mesh: flm.DeviceMesh) -> None:
    """Neither made, nor kept, nor asked whether it fits."""
    seen: list[Any] = []
    with flm.layout_map_scope(rules(mesh)):
        seen.append(weakref.ref(Model()))
        nnx.Linear(8, 6, rngs=nnx.Rngs(0))  # its kernel does not divide
        model = Model()
    gc.collect()
    assert seen[0]() is None
    assert_lies(model.layer.kernel[...], COLUMN, mesh)


# ---------------------------------------------------------------------- what is refused


class Refused(NamedTuple):
    also: Callable[[Any, Any], Any]
    text: str


def _reference(model: Any, rngs: Any) -> None:
    model.reference = nnx.Param(jnp.ones(3), ref=True)


def _indivisible(model: Any, rngs: Any) -> None:
    model.other = nnx.Linear(8, 6, rngs=rngs)


def _rank(model: Any, rngs: Any) -> None:
    model.other = nnx.Conv(8, 8, (3,), rngs=rngs)


REFUSED = {
    "a rule that does not divide": Refused(
        _indivisible, r"other/kernel \(8,6\): rule 1 'kernel' .* dim 1 of size 6 does"
    ),
    "a rule of another rank": Refused(
        _rank, r"other/kernel \(3,8,8\): rule 1 'kernel'"
    ),
    "a reference": Refused(
        _reference, r"ref=True is a reference.*: nnx\.\w+\(model, r"
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_refused(mesh: flm.DeviceMesh, way: str, case: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", flm.LayoutWarning)
        with pytest.raises(flm.LayoutError, match=REFUSED[case].text):
            WAYS[way](lambda: Model(REFUSED[case].also), rules(mesh))


# ---------------------------------------------------- what reads values of parameters


def _device_get(model: Any, rngs: Any) -> None:
    model.total = nnx.Param(jax.device_get(model.layer.kernel[...]).sum(0))


def _asarray(model: Any, rngs: Any) -> None:
    model.total = nnx.Param(np.asarray(model.layer.kernel[...]).sum(0))


def _number(model: Any, rngs: Any) -> None:
    model.total = nnx.Param(jnp.full(8, float(model.layer.kernel[...].sum()) / 8))


def _branch(model: Any, rngs: Any) -> None:
    if model.layer.kernel[0, 0] > 0:
        model.total = nnx.Param(jnp.full(8, 8.0))


def _mask(model: Any, rngs: Any) -> None:
    kernel = model.layer.kernel[...]
    model.total = nnx.Param(jnp.full(8, kernel[kernel > 0].size / 8))


def _index(model: Any, rngs: Any) -> None:
    model.total = nnx.Param(
        jnp.full(8, range(9)[model.layer.kernel[...].astype(int).sum(0)[0]])
    )


READS = [_asarray, _number, _branch, _mask, _index]


@pytest.mark.parametrize("also", READS)
def test_what_reads_values(mesh: flm.DeviceMesh, also: Any) -> None:
    with pytest.raises(flm.StructureError, match="(?s)reads the value .*layout_map_sc"):
        flm.create(lambda: Model(also), rules(mesh))
    with pytest.warns(flm.LayoutWarning, match="the constructor of _Model ran at once"):
        model: Any = in_scope(lambda: Model(also), rules(mesh))
    assert nnx.graphdef(model) == nnx.graphdef(Model(also))
    assert_lies(model.layer.kernel[...], COLUMN, mesh)
    assert_lies(model.total[...], ((),), mesh, np.full(8, 8.0, np.float32))


@pytest.mark.parametrize("way", WAYS)
def test_device_get_alone_reads_nothing(mesh: flm.DeviceMesh, way: str) -> None:
    """JAX gives a traced value back as it is."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", flm.LayoutWarning)
        model = WAYS[way](lambda: Model(_device_get), rules(mesh))
    assert_lies(model.layer.kernel[...], COLUMN, mesh)
    assert_lies(model.total[...], ((),), mesh, np.full(8, 8.0, np.float32))


def test_a_part_of_what_reads_is_never_whole(mesh: flm.DeviceMesh) -> None:
    """Its layers are made in shards, and what it makes itself is spread one by one."""
    seen: dict[str, Any] = {}

    class Outer(nnx.Module):
        def __init__(self) -> None:
            self.inner = Model(_number)
            self.layer = layer(nnx.Rngs(0))
            self.param = nnx.Param(jnp.ones((8, 4)))
            seen["param"] = self.param[...]
            seen["outer"] = self.layer.kernel[...]
            seen["inner"] = self.inner.layer.kernel[...]
            seen["own"] = self.inner.total[...]
            float(self.layer.kernel[0, 0])

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", flm.LayoutWarning)
        model = in_scope(Outer, rules(mesh))
    names = ["_Model", "Outer"]  # the inner one is done first
    assert [n in str(w.message) for n, w in zip(names, told, strict=True)] == [True] * 2
    for array in seen.values():
        assert {shard.data.size for shard in array.addressable_shards} == {
            array.size // 8
        }
    assert_lies(model.inner.layer.kernel[...], COLUMN, mesh)
    assert_lies(model.layer.kernel[...], COLUMN, mesh)
    assert_lies(model.inner.total[...], ((),), mesh)


# ----------------------------------------------------------- what has effects outside


KEPT: list[Any] = []


@pytest.fixture
def kept() -> Iterator[list[Any]]:
    KEPT.clear()
    yield KEPT
    KEPT.clear()


@pytest.mark.parametrize("way", WAYS)
def test_a_registry_of_modules(mesh: flm.DeviceMesh, way: str, kept: Any) -> None:
    """What is in it is the model that is made."""

    def also(model: Any, rngs: Any) -> None:
        kept.extend([model, model.layer])

    model = WAYS[way](lambda: Model(also), rules(mesh))
    assert kept[0] is model and kept[1] is model.layer and len(kept) == 2
    assert_lies(kept[1].kernel[...], COLUMN, mesh)


@pytest.mark.parametrize("way", WAYS)
def test_values_that_are_kept_elsewhere(
    mesh: flm.DeviceMesh, way: str, kept: Any
) -> None:
    """The model is right; JAX says what is wrong with the values."""

    def also(model: Any, rngs: Any) -> None:
        kept.append(model.layer.kernel[...])

    model = WAYS[way](lambda: Model(also), rules(mesh))
    assert_lies(model.layer.kernel[...], COLUMN, mesh)
    with pytest.raises(jax.errors.UnexpectedTracerError, match="side effect"):
        print(kept[0] + 1)


@pytest.mark.parametrize("way", WAYS)
def test_an_object_of_outside_that_changes(mesh: flm.DeviceMesh, way: str) -> None:
    rngs, other = nnx.Rngs(0), nnx.Rngs(0)

    def also(model: Any, _: Any) -> None:
        model.total = nnx.Param(rngs.params.uniform((8,)))

    if way == "create":
        with pytest.raises(flm.StructureError, match="pass it as an argument"):
            flm.create(lambda: Model(also), rules(mesh))
        assert rngs.default.count[...] == 0
        return
    with pytest.warns(flm.LayoutWarning, match="from outside of it"):
        model = in_scope(lambda: Model(also), rules(mesh))
    np.testing.assert_array_equal(model.total[...], other.params.uniform((8,)))
    assert rngs.default.count[...] == 1


# ------------------------------------------------------------------ odd results


@pytest.mark.parametrize("way", WAYS)
def test_nothing_at_all(mesh: flm.DeviceMesh, way: str) -> None:
    class Empty(nnx.Module):
        pass

    if way == "create":
        with pytest.raises(flm.StructureError, match="gives None: let it return the"):
            flm.create(lambda: None, rules(mesh))
    assert nnx.graphdef(WAYS[way](Empty, rules(mesh))) == nnx.graphdef(Empty())


@pytest.mark.parametrize("way", WAYS)
def test_arrays_of_every_kind(mesh: flm.DeviceMesh, way: str) -> None:
    """NumPy's, those without elements, whole numbers, numbers of Python, text."""

    class Odd(nnx.Module):
        def __init__(self) -> None:
            self.kernel = nnx.Param(np.arange(64.0).reshape(8, 8))
            self.empty = nnx.Dict(kernel=nnx.Param(jnp.zeros((0, 8))))
            self.none = nnx.Param(jnp.zeros((8, 0)))
            self.whole = nnx.Param(jnp.arange(8))
            self.flags = nnx.Param(jnp.ones(8, bool))
            self.small = nnx.Param(np.uint8(3))
            self.table = np.arange(3.0)
            self.number = nnx.Variable(3)
            self.text = nnx.Variable("text")
            self.size = 2.5

    model, plain = WAYS[way](Odd, rules(mesh)), Odd()
    assert nnx.graphdef(model) == nnx.graphdef(plain)
    assert_lies(
        model.kernel[...], COLUMN, mesh, np.arange(64, dtype=np.float32).reshape(8, 8)
    )
    assert_lies(model.empty["kernel"][...], COLUMN, mesh)
    for name in ("whole", "flags", "small", "number"):
        one, other = getattr(model, name)[...], getattr(plain, name).get_value()
        assert one.dtype == jnp.asarray(other).dtype
        assert_lies(one, ((),) * one.ndim, mesh, np.asarray(jnp.asarray(other)))
    assert model.none.shape == (8, 0) and model.text.get_value() == "text"
    np.testing.assert_array_equal(model.table, plain.table)


# -------------------------------------------------------- inside of transformations


def _scaled(x: Any) -> Callable[[Any, Any], Any]:
    def also(model: Any, rngs: Any) -> None:
        model.total = nnx.Param(x * jnp.ones(8))

    return also


def test_create_of_a_traced_argument(mesh: flm.DeviceMesh) -> None:
    layout_map = rules(mesh)

    @jax.jit
    def made(x: Any) -> Any:
        return nnx.state(flm.create(lambda x: Model(_scaled(x)), layout_map, x))

    state = made(jnp.float32(3))
    assert_lies(state["layer"]["kernel"].get_value(), COLUMN, mesh)
    assert_lies(state["total"].get_value(), ((),), mesh, np.full(8, 3.0, np.float32))

    def total(x: Any) -> Any:
        return flm.create(lambda: Model(_scaled(x)), layout_map).total[...].sum()

    np.testing.assert_allclose(jax.grad(total)(jnp.float32(3)), 8.0)


def test_a_scope_in_a_transformation_says_that_it_cannot(mesh: flm.DeviceMesh) -> None:
    layout_map = rules(mesh)

    def total(x: Any) -> Any:
        model: Any = in_scope(lambda: Model(_scaled(x)), layout_map)
        return model.total[...].sum() + model.layer.kernel[...].sum()

    with pytest.warns(flm.LayoutWarning, match=r"_Model.* was made inside of a"):
        np.testing.assert_allclose(jax.jit(total)(jnp.float32(3)), 24.0 + 64)
    with pytest.warns(flm.LayoutWarning, match=r"_Model.* was made inside of a"):
        np.testing.assert_allclose(jax.grad(total)(jnp.float32(3)), 8.0)


@pytest.mark.parametrize("way", WAYS)
def test_ours_inside_of_a_constructor(mesh: flm.DeviceMesh, way: str) -> None:
    layout_map = rules(mesh)

    def also(model: Any, rngs: Any) -> None:
        model.made = flm.create(lambda: layer(nnx.Rngs(0)), layout_map)
        with flm.layout_map_scope(layout_map):
            model.scoped = layer(rngs)
        where = NamedSharding(mesh.jax_mesh, PartitionSpec("data"))  # type: ignore[arg-type]
        model.fixed = nnx.Param(jax.lax.with_sharding_constraint(jnp.ones(8), where))
        model.put = nnx.Param(jax.device_put(jnp.ones(8), jax.devices()[3]))
        model.jitted = nnx.jit(layer)(rngs)

    model = WAYS[way](lambda: Model(also), layout_map)
    for part in (model.layer, model.made, model.scoped, model.jitted):
        assert_lies(part.kernel[...], COLUMN, mesh)
    for part in (model.fixed, model.put):
        assert_lies(part[...], ((),), mesh, np.ones(8, np.float32))
