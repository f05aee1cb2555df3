"""Unhashable constants: models that have them run, and are never stale."""

import array
import collections
import copy
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import flax_layoutmap as flm
from flax_layoutmap._tree.jaxprs import with_own_arrays
from flax_layoutmap._tree.watch import contents, is_hashable

pytestmark = pytest.mark.filterwarnings("ignore:.*has no rules")

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)


@dataclasses.dataclass
class Config:
    """As in published models: with `eq`, so that it cannot be hashed."""

    scale: float = 2.0
    sizes: list[int] = dataclasses.field(default_factory=lambda: [8, 8])
    table: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    scales: list[float]


class Slots:
    __slots__ = ("scale",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slots) and other.scale == self.scale


class Model(nnx.Module):
    """One constant, and what makes a factor of it."""

    def __init__(self, constant: Any, factor: Callable[[Any], Any]) -> None:
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(8, 8, rngs=rngs)
        self.down = nnx.Linear(8, 8, rngs=rngs)
        self.constant, self.factor = constant, factor

    def __call__(self, x: Any) -> Any:
        x = nnx.relu(self.up(x)) * self.factor(self.constant)
        return self.down(x)


def scaled(self: Any) -> Any:
    return self.scale


def tabled(dtype: Any) -> Config:
    return Config(table=np.arange(8, dtype=dtype))


def set_scale(constant: Any) -> None:
    constant.scale = 3.0


def set_entry(constant: Any) -> None:
    constant.table[0] = 5


def loop() -> list[Any]:
    found: list[Any] = [2.0]
    found.append(found)
    return found


def enlarge(entries: Any) -> None:
    """Adds one to the number that comes first."""
    entries[0] = entries[0] + 1


def enlarge_nested(constant: Any) -> None:
    constant["a"]["b"] = 3.0


Case = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], None]]
# What makes the constant, the factor that it is, and a change of it in place.
CASES: dict[str, Case] = {
    "dataclass": (Config, scaled, set_scale),
    "list in it": (Config, lambda c: c.sizes[0], lambda c: enlarge(c.sizes)),
    "another type": (
        Config,
        lambda c: 1 + isinstance(c.scale, int),
        lambda c: setattr(c, "scale", 2),
    ),
    "float32": (lambda: tabled(np.float32), lambda c: c.table, set_entry),
    "float64": (lambda: tabled(np.float64), lambda c: c.table, set_entry),
    "int64 in an inner jit": (
        lambda: tabled(np.int64),
        lambda c: jax.jit(lambda one: one * c.table)(jnp.ones(8)),
        set_entry,
    ),
    "array of JAX": (
        lambda: Config(table=jnp.arange(8.0)),
        lambda c: c.table,
        lambda c: setattr(c, "table", c.table + 1),
    ),
    "frozen": (
        lambda: Frozen([2.0]),
        lambda c: c.scales[0],
        lambda c: enlarge(c.scales),
    ),
    "list": (lambda: [2.0, 1], lambda c: c[0], enlarge),
    "dict": (lambda: {"a": {"b": 2.0}}, lambda c: c["a"]["b"], enlarge_nested),
    "set": (lambda: {2.0, 3.0}, sum, lambda c: c.add(7.0)),
    "list in a tuple": (
        lambda: (1, [2.0]),
        lambda c: c[1][0],
        lambda c: enlarge(c[1]),
    ),
    "namespace": (lambda: types.SimpleNamespace(scale=2.0), scaled, set_scale),
    "namespace behind a method": (
        lambda: types.MethodType(scaled, types.SimpleNamespace(scale=2.0)),
        lambda c: c(),
        lambda c: set_scale(c.__self__),
    ),
    "slots": (lambda: Slots(2.0), scaled, set_scale),
    "deque": (lambda: collections.deque([2.0]), lambda c: c[0], enlarge),
}


def rules(mesh: Any) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["kernel"] = (None, "model")
    return layout_map


def call(model: Any, x: Any) -> Any:
    return model(x)


def as_flax(model: Model) -> Any:
    """What `nnx.jit` makes of the model as it is now.

    Of a copy, as JAX may take an array for what it was at an earlier trace.
    """
    graphdef, state = nnx.split(Model(copy.deepcopy(model.constant), model.factor))
    return nnx.jit(lambda state, x: nnx.merge(graphdef, state)(x))(state, X)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("with_rules", [True, False])
def test_changed_in_place(case: str, with_rules: bool, mesh: flm.DeviceMesh) -> None:
    make, factor, change = CASES[case]
    layout_map = rules(mesh) if with_rules else None
    model = Model(make(), factor)
    other, same = Model(make(), factor), Model(make(), factor)
    for each in (model, other, same):
        rules(mesh).place(each)
    step = flm.jit(call, layout_map=layout_map)
    # A program on a mesh rounds otherwise; the changes are by factors of 2 and more.
    for _ in range(3):
        np.testing.assert_allclose(step(model, X), as_flax(model), atol=1e-4)
    before = step._cache_size()
    step(same, X)
    is_by_identity = case == "array of JAX"
    assert step._cache_size() - before == is_by_identity
    change(model.constant)
    for _ in range(3):
        np.testing.assert_allclose(step(model, X), as_flax(model), atol=1e-4)
        np.testing.assert_allclose(step(other, X), as_flax(other), atol=1e-4)
    assert not np.array_equal(step(model, X), step(other, X))
    change(other.constant)
    np.testing.assert_array_equal(step(other, X), step(model, X))


@pytest.mark.parametrize("with_rules", [True, False])
def test_metadata_changed_in_place(with_rules: bool, mesh: flm.DeviceMesh) -> None:
    class Tagged(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones(8), tags=["a"], mask=np.ones(8))

        def __call__(self, x: Any) -> Any:
            return self.w[...] * len(self.w.tags) * self.w.mask

    model, layout_map = Tagged(), rules(mesh)
    layout_map["w"] = ("model",)
    layout_map.place(model)
    step = flm.jit(call, layout_map=layout_map if with_rules else None)
    assert [float(step(model, X)[0]) for _ in range(3)] == [1] * 3
    model.w.tags.append("b")
    assert [float(step(model, X)[0]) for _ in range(3)] == [2] * 3
    model.w.mask[0] = 4
    assert [float(step(model, X)[0]) for _ in range(3)] == [8] * 3


@pytest.mark.parametrize("with_rules", [True, False])
def test_a_variable_of_another_class(with_rules: bool, mesh: flm.DeviceMesh) -> None:
    class Frozen(nnx.Param[Any]):
        pass

    class Holder(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones(8))

        def __call__(self, x: Any) -> Any:
            return self.w[...] * (2 + isinstance(self.w, Frozen))

    model, layout_map = Holder(), rules(mesh)
    layout_map["w"] = ("model",)
    layout_map.place(model)
    step = flm.jit(call, layout_map=layout_map if with_rules else None)
    assert [float(step(model, X)[0]) for _ in range(3)] == [2] * 3
    model.w.__class__ = Frozen
    assert [float(step(model, X)[0]) for _ in range(3)] == [3] * 3


def test_nothing_is_taken_apart_twice(
    mesh: flm.DeviceMesh, long_ways: list[str]
) -> None:
    model = rules(mesh).place(Model(tabled(np.float32), lambda c: c.table))
    step = flm.jit(call, layout_map=rules(mesh))
    for _ in range(4):
        step(model, X)
    assert long_ways == ["model", "x"]


def grows(model: Any, x: Any) -> Any:
    model.extra = nnx.Param(x * model.constant.scale)
    return x


@pytest.mark.parametrize("with_rules", [True, False])
def test_a_step_that_changes_the_structure(
    with_rules: bool, mesh: flm.DeviceMesh
) -> None:
    """Each model keeps a config of its own, also from a program that was there."""
    one: Any = Model(Config(), scaled)
    two: Any = Model(Config(), scaled)
    own = one.constant, two.constant
    step = flm.jit(grows, layout_map=rules(mesh) if with_rules else None)
    step(one, X)
    one.constant.scale = 5.0
    step(two, X)
    assert (one.constant, two.constant) == own
    assert one.constant is own[0] and two.constant is own[1]
    assert (one.constant.scale, two.constant.scale) == (5.0, 2.0)
    np.testing.assert_array_equal(two.extra[...], X * 2)
    step(one, X)
    np.testing.assert_array_equal(one.extra[...], X * 5)


def test_a_step_that_edits_a_constant(mesh: flm.DeviceMesh) -> None:
    """As without jit: in each call."""

    def edits(model: Any) -> Any:
        model.constant.sizes.append(len(model.constant.sizes))
        return model.up.bias[...] + len(model.constant.sizes)

    def sets(model: Any) -> Any:
        model.constant = Config(scale=model.constant.scale + 1)
        return model.up.bias[...] + model.constant.scale

    for layout_map in (rules(mesh), None):
        model = rules(mesh).place(Model(Config(), scaled))
        step = flm.jit(edits, layout_map=layout_map)
        assert [float(step(model)[0]) for _ in range(3)] == [3, 4, 5]
        assert model.constant.sizes == [8, 8, 2, 3, 4]
        other = rules(mesh).place(Model(Config(), scaled))
        step = flm.jit(sets, layout_map=layout_map)
        assert [float(step(model)[0]) for _ in range(3)] == [3, 4, 5]
        assert float(step(other)[0]) == 3
        assert other.constant is not model.constant
        assert (model.constant.scale, other.constant.scale) == (5, 3)


def test_what_cannot_be_compared(mesh: flm.DeviceMesh) -> None:
    model = Model(Config(table={}.keys()), scaled)
    for layout_map in (None, rules(mesh)):
        with pytest.raises(flm.errors.StructureError) as caught:
            flm.jit(call, layout_map=layout_map)(model, X)
        assert str(caught.value) == (
            "model/constant is or holds a dict_keys, which Python can neither hash nor "
            "copy, so no call could tell whether it changed: give dict_keys a "
            "__hash__, or keep it outside of the model"
        )


# ----------------------------------------------------------- as models are published


@dataclasses.dataclass
class GPTConfig:
    """With what such configs hold; every layer has the same one."""

    width: int = 8
    kinds: list[str] = dataclasses.field(default_factory=lambda: ["global", "local"])
    rope: dict[str, float] = dataclasses.field(default_factory=lambda: {"theta": 10.0})
    stops: set[int] = dataclasses.field(default_factory=lambda: {1, 2})
    window: slice = dataclasses.field(default_factory=lambda: slice(0, 4))


class Block(nnx.Module):
    def __init__(self, config: GPTConfig, at: int, rngs: nnx.Rngs) -> None:
        self.config, self.kind = config, config.kinds[at]
        self.up = nnx.Linear(config.width, config.width, rngs=rngs)
        self.act = types.SimpleNamespace(fn=nnx.gelu, scale=0.5)

    def __call__(self, x: Any) -> Any:
        if self.kind == "local":
            x = x.at[self.config.window].multiply(self.act.scale)
        return self.act.fn(self.up(x)) / self.config.rope["theta"]


class GPT(nnx.Module):
    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        self.blocks = nnx.List([Block(config, at, rngs) for at in range(2)])

    def __call__(self, x: Any) -> Any:
        for block in self.blocks:
            x = x + nnx.remat(lambda block, x: block(x))(block, x)
        return x * len(self.config.stops)


def train(model: Any, optimizer: Any, x: Any) -> Any:
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def sharpen(model: Any) -> None:
    model.config.rope["theta"] = 2.0


def narrow(model: Any) -> None:
    model.config.window = slice(0, 2)


@pytest.mark.parametrize("with_rules", [True, False])
def test_training_a_model_with_a_config(with_rules: bool, mesh: flm.DeviceMesh) -> None:
    def make() -> Any:
        model = GPT(GPTConfig(), nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    layout_map = rules(mesh)
    layout_map["bias"] = None
    ours, theirs = make(), make()
    if with_rules:
        model = flm.create(lambda: GPT(GPTConfig(), nnx.Rngs(0)), layout_map)
        ours = model, flm.create_optimizer(model, optax.adam(0.1), layout_map)
    given = layout_map if with_rules else None
    step = flm.jit(train, layout_map=given, donate_argnames=("model", "optimizer"))
    for change in (lambda model: None, sharpen, narrow):
        for model, _ in (ours, theirs):
            change(model)
        # A new one, as it sees no change in place.
        again: Any = nnx.jit(lambda model, optimizer, x: train(model, optimizer, x))
        for _ in range(3):
            loss, expected = step(*ours, X), again(*theirs, X)
            if with_rules:
                np.testing.assert_allclose(loss, expected, rtol=1e-5)
            else:
                assert float(loss) == float(expected)
    assert step._cache_size() == 3


# ------------------------------------------------------------------------- contents


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1], [1.0]),
        ([True], [1]),
        ([0.0], [-0.0]),
        ([(1, 0.0)], [(1, -0.0)]),
        ([1], collections.deque([1])),
        ({1: 2}, {1: 3}),
        ([np.zeros(2)], [np.zeros((2, 1))]),
        (np.zeros(1, np.float32), np.zeros(1, np.int32)),
        (array.array("i", [1]), array.array("i", [2])),
        (bytearray(b"a"), bytearray(b"b")),
        ([slice(1)], [slice(2)]),
        (types.MappingProxyType({1: 2}), types.MappingProxyType({1: 3})),
    ],
)
def test_contents_differ(one: Any, other: Any) -> None:
    assert not is_hashable(one)
    assert contents(one) == contents(one) != contents(other)
    assert len({contents(one), contents(one), contents(other)}) == 2


def test_contents_are_equal() -> None:
    nan = [float("nan"), np.array([[], 1], object), {"a": Config()}]
    again = [float("nan"), np.array([[], 1], object), {"a": Config()}]
    assert contents(nan) == contents(again)
    again[1][0].append(1)
    assert contents(nan) != contents(again)
    one, other = loop(), loop()
    assert contents(one) == contents(other)
    enlarge(one)
    assert contents(one) != contents(other)


def test_inner_jaxprs_stay_shared() -> None:
    """What is called twice is lowered once."""
    table, inner = np.ones(3), jax.jit(jnp.sin)
    closed = jax.make_jaxpr(lambda x: inner(inner(x)))(X)
    assert with_own_arrays(closed) is closed
    closed = jax.make_jaxpr(lambda x: inner(inner(x)) + table)(jnp.ones(3))
    first, second = with_own_arrays(closed).jaxpr.eqns[:2]
    assert first.params["jaxpr"] is second.params["jaxpr"]
