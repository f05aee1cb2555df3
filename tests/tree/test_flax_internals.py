"""Private or moved names of Flax: each still behaves as expected."""

import types
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from flax_layoutmap._core.jax_internals import patched
from flax_layoutmap._tree import flax_internals as internals


class Tied(nnx.Module):
    def __init__(self) -> None:
        self.a = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
        self.b = self.a
        self.c = nnx.Param(jnp.ones(3))


def test_metadata_is_read_without_a_copy() -> None:
    variable = nnx.Param(jnp.ones(2), note="x")
    metadata = internals.metadata_of(variable)
    assert metadata == variable.get_metadata() and metadata["note"] == "x"
    assert metadata is internals.metadata_of(variable)


def test_shared_variables_once() -> None:
    model = Tied()
    assert len(jax.tree.leaves(internals.nnx_state(model))) == 2
    assert len(jax.tree.leaves(internals.nnx_split(model)[1])) == 2
    variables = internals.variables_of(model)
    assert len(variables) == len({id(v) for v in variables}) == 2
    again = nnx.merge(*internals.nnx_split(model))
    assert again.b is again.a


def test_modules_and_optimizers_are_nnx_objects() -> None:
    import optax

    model = Tied()
    assert internals.is_nnx_object(model)
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    assert internals.is_nnx_object(optimizer)
    for name in ("opt_state", "tx", "wrt", "step"):  # how it is recognised
        assert hasattr(optimizer, name)
    assert isinstance(optimizer.step, nnx.OptState)


def test_the_eager_flag_is_restored_and_forgotten() -> None:
    with nnx.use_eager_sharding(False):
        model = Tied()
    flags = [internals.metadata_of(v) for v in internals.variables_of(model)]
    assert [flag["eager_sharding"] for flag in flags] == [False] * 2
    internals.restore_eager_flag(model, nnx.using_eager_sharding())
    assert nnx.split(model)[0] == nnx.split(Tied())[0]
    internals.restore_eager_flag(model, False)
    flags = [internals.metadata_of(v) for v in internals.variables_of(model)]
    assert [flag["eager_sharding"] for flag in flags] == [False] * 2


def test_no_mesh_inside_of_any_context() -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def names() -> tuple[str, ...]:
        return tuple(jax.sharding.get_abstract_mesh().axis_names)

    with jax.set_mesh(mesh):
        assert names() == ("x",)
        with internals.no_mesh():
            assert names() == ()
        assert names() == ("x",)

        def traced(x: jax.Array) -> jax.Array:
            with internals.no_mesh():
                assert names() == ()
            return x

        jax.jit(traced)(jnp.ones(2))
    assert names() == ()


def test_the_private_names_that_jit_needs_are_there() -> None:
    variable = nnx.Param(jnp.ones(2), note="x")
    for slot in ("_raw_value", "_var_metadata"):
        assert isinstance(vars(nnx.Variable)[slot], types.MemberDescriptorType)
    assert internals.read_value(variable) is variable.get_raw_value()

    class Module(nnx.Module):
        def __init__(self) -> None:
            self.w, self.size = variable, 3

    assert internals.attributes_of(Module()) == ({"w": variable}, {"size": 3})


def test_every_object_is_made_by_the_metaclass() -> None:
    made: list[str] = []

    def wrap(plain: Any) -> Any:
        def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
            made.append(cls.__name__)
            return plain(cls, *args, **kwargs)

        return call

    meta = internals.METACLASS
    before = vars(meta)["__call__"]
    with patched(meta, "__call__", wrap):
        with patched(meta, "__call__", wrap):
            Tied()
        nnx.Rngs(0)
    assert vars(meta)["__call__"] is before
    assert made == ["Tied", "Rngs", "RngStream", "Linear", "Rngs", "RngStream"]


def test_post_init_runs_for_every_linen_module() -> None:
    made: list[str] = []

    def wrap(plain: Any) -> Any:
        def post_init(self: Any) -> None:
            plain(self)
            made.append(type(self).__name__)

        return post_init

    with patched(linen.Module, "__post_init__", wrap):
        linen.Dense(3)
    linen.Dense(3)
    assert made == ["Dense"]


def test_at_which_level_an_object_was_made() -> None:
    outer = nnx.Dict(a=1)
    found: list[bool] = []

    def traced(x: jax.Array) -> jax.Array:
        found.extend(map(internals.was_made_here, (nnx.Dict(a=1), outer)))
        return x

    jax.make_jaxpr(traced)(1.0)
    assert found == [True, False] and internals.was_made_here(outer)


def test_what_a_variable_holds() -> None:
    slots = {
        name for kind in nnx.Param.__mro__ for name in vars(kind).get("__slots__", ())
    }
    assert slots == set(internals._SLOTS)
    kept, new = nnx.Param(1, note="kept"), nnx.BatchStat(2, note="new")
    internals.replace_content(kept, new)
    assert kept.get_value() == 2 and kept.get_metadata()["note"] == "new"


class Heads(nnx.Dict):
    def __call__(self, x: Any) -> Any:
        return [head(x) for head in self.values()]


def test_notes_go_with_modules_and_are_not_seen() -> None:
    """With a prefix of Flax's that loops leave out; it fails when that moves."""
    assert internals._NOTE.startswith("_pytree__")
    heads = Heads(a=nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    layers = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0))])
    before = str(nnx.graphdef(heads))
    for module in (heads, layers):
        internals.set_note(module, "x")
        copy = nnx.merge(*internals.nnx_split(module))
        assert internals.note_of(copy) == "x"
        assert len(copy) == len(list(copy)) == 1
        internals.set_note(module, None)
        assert internals.note_of(module) is None
    assert str(nnx.graphdef(heads)) == before


def test_calls_are_intercepted_in_the_block_alone() -> None:
    seen: list[type] = []

    def wrap(owner: type, plain: Any) -> Any:
        def call(self: Any, *args: Any) -> Any:
            seen.append(owner)
            return plain(self, *args)

        return call

    heads = Heads(a=nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with internals.intercept_calls(wrap):
        heads(jnp.ones((1, 2)))
    assert seen == [Heads, nnx.Linear]
    heads(jnp.ones((1, 2)))
    assert seen == [Heads, nnx.Linear]
