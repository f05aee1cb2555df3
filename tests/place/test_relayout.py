"""relayout and relayout_like: the shards of each device, forward and backward."""

import contextlib
import functools
import itertools
import logging
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding, PartitionSpec
from shards import Dims, assert_lies, bare, lies

import flax_layoutmap as flm
from flax_layoutmap._place import relayout as relayout_module

P = PartitionSpec
KINDS: dict[str, Any] = {
    "auto": "auto",
    "explicit": "explicit",
    "explicit x": ("explicit", "auto"),
    "explicit y": ("auto", "explicit"),
}
X = np.arange(64, dtype=np.float32).reshape(8, 8)
PLACES: tuple[Dims, ...] = (
    ((), ()),
    (("x",), ()),
    ((), ("x",)),
    (("y",), ()),
    ((), ("y",)),
    (("x",), ("y",)),
    (("y",), ("x",)),
    (("x", "y"), ()),
)
SOME = [
    (PLACES[old], PLACES[new])
    for old, new in [(1, 4), (4, 1), (0, 5), (5, 0), (5, 6), (1, 2), (7, 3)]
]


def grid(kind: str = "auto") -> flm.DeviceMesh:
    return flm.DeviceMesh((4, 2), ("x", "y"), axis_types=KINDS[kind])


MESH = grid()
# The same devices in another order and another grid; and half of them.
OTHER = flm.DeviceMesh((2, 4), ("x", "y"), jax.devices()[::-1])
HALF = flm.DeviceMesh((2, 2), ("x", "y"), jax.devices()[4:])


def lay(dims: Dims, mesh: flm.DeviceMesh = MESH) -> flm.TensorLayout:
    return flm.TensorLayout(dims, mesh)


def put(dims: Dims, mesh: flm.DeviceMesh = MESH, value: Any = X) -> jax.Array:
    """By JAX's own function."""
    spec = P(*(axes or None for axes in dims))
    return jax.device_put(value, NamedSharding(bare(mesh), spec))


def eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


BOTH_WAYS = pytest.mark.parametrize("way", [eagerly, jax.jit])


# --------------------------------------------------------------------------- there


@pytest.mark.parametrize("kind", KINDS)
def test_from_one_layout_to_another(kind: str) -> None:
    mesh = grid(kind)

    arrays = [put(old, mesh) for old, _ in SOME]
    with jax.set_mesh(bare(mesh)):
        traced = jax.jit(
            lambda xs: [
                flm.relayout(x, lay(new, mesh))
                for x, (_, new) in zip(xs, SOME, strict=True)
            ]
        )(arrays)
    for x, y, (old, new) in zip(arrays, traced, SOME, strict=True):
        assert_lies(x, old, mesh, X)
        assert_lies(flm.relayout(x, lay(new, mesh)), new, mesh, X)
        assert_lies(y, new, mesh, X)


@pytest.mark.parametrize(
    "layout",
    [
        lay((("x",), ())),
        P("x"),
        ("x", None),
        ["x", None],
        NamedSharding(bare(MESH), P("x")),
        flm.TensorLayout(("x", ...)),
    ],
    ids=str,
)
def test_anything_that_is_a_layout(layout: Any) -> None:
    x = put(PLACES[4])
    dims: Dims = (("x",), ())
    assert_lies(flm.relayout(x, layout), dims, MESH, X)
    assert_lies(jax.jit(lambda x: flm.relayout(x, layout))(x), dims, MESH, X)


@BOTH_WAYS
def test_trees_keys_numbers_and_none(way: Any) -> None:
    keys = jax.random.split(jax.random.key(0), 8)
    tree = {"a": [X[0], None], "keys": keys}
    moved = way(lambda tree: flm.relayout(tree, lay((("x",),))))(tree)
    assert moved["a"][1] is None
    assert_lies(moved["a"][0], (("x",),), MESH, X[0])
    assert_lies(moved["keys"], (("x",),), MESH, jax.random.key_data(keys))
    assert_lies(way(lambda: flm.relayout(1.5, lay(())))(), (), MESH, np.float32(1.5))


def test_what_is_there_already_is_the_same_object() -> None:
    x = flm.relayout(X, lay(PLACES[1]))
    assert flm.relayout(x, lay(PLACES[1])) is x
    assert flm.relayout(x, MESH) is x


@pytest.mark.parametrize("mesh", [OTHER, HALF, bare(OTHER)], ids=str)
def test_a_mesh_keeps_the_dims(mesh: Any) -> None:
    there = flm.DeviceMesh(mesh)
    for move in (flm.relayout, flm.dtensor.copy_to_mesh):
        moved = move({"a": put(PLACES[5])}, mesh)
        assert_lies(moved["a"], PLACES[5], there, X)
        assert_lies(move(jnp.asarray(X), mesh), PLACES[0], there, X)
        assert_lies(move(X, mesh), PLACES[0], there, X)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "bfloat16", "complex64"])
def test_copies_between_meshes_of_any_dtype(dtype: str) -> None:
    x = put(PLACES[5], value=X.astype(dtype))
    moved = flm.dtensor.copy_to_mesh(x, lay(PLACES[2], OTHER))
    assert moved.dtype == dtype
    assert_lies(moved, PLACES[2], OTHER, X.astype(dtype))


def test_to_memory_of_the_host_and_back() -> None:
    layout = flm.TensorLayout(("x", None), MESH, memory_kind="pinned_host")
    moved = flm.dtensor.copy_to_mesh(put(PLACES[1]), layout)
    assert moved.sharding.memory_kind == "pinned_host"
    back = flm.relayout(moved, lay(PLACES[1]))
    assert back.sharding.memory_kind == "device"
    assert_lies(back, PLACES[1], MESH, X)


def test_explicit_axes_keep_their_dims_on_another_mesh_when_traced() -> None:
    mesh = grid("explicit")
    with jax.set_mesh(bare(mesh)):
        moved = jax.jit(lambda x: flm.relayout(x, mesh))(put(PLACES[5], mesh))
    assert_lies(moved, PLACES[5], mesh, X)


# --------------------------------------------------------------------------- match

MATCH = flm.TensorLayout.MATCH
MATCHES: list[tuple[Dims, Any, Dims]] = [
    ((("x",), ()), (MATCH, "y"), (("x",), ("y",))),
    ((("x",), ("y",)), (None, MATCH), ((), ("y",))),
    (((), ("x",)), ("y", MATCH), (("y",), ("x",))),
    (((), ()), (MATCH, MATCH), ((), ())),
    ((("x",), ("y",)), (MATCH, ...), (("x",), ())),
]


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_match_keeps_what_a_dim_has(kind: str) -> None:
    mesh = grid(kind)
    arrays = [put(old, mesh) for old, _, _ in MATCHES]

    def move(xs: Any) -> Any:
        layouts = [flm.TensorLayout(axes, mesh) for _, axes, _ in MATCHES]
        return [flm.relayout(x, to) for x, to in zip(xs, layouts, strict=True)]

    with jax.set_mesh(bare(mesh)):
        for moved in (move(arrays), jax.jit(move)(arrays)):
            for y, (_, _, dims) in zip(moved, MATCHES, strict=True):
                assert_lies(y, dims, mesh, X)


def test_match_of_what_lies_on_no_mesh() -> None:
    moved = flm.relayout(X, flm.TensorLayout((MATCH, "y"), MESH))
    assert_lies(moved, ((), ("y",)), MESH, X)


@BOTH_WAYS
def test_gradients_through_match(way: Any) -> None:
    layout = flm.TensorLayout((MATCH, "y"), MESH)
    gradient = jax.grad(lambda x: jnp.sum(flm.relayout(x, layout) ** 2))
    assert_lies(way(gradient)(put(PLACES[1])), PLACES[1], MESH, 2 * X)


# ----------------------------------------------------------------------- and back


def squares(dims: Dims, mesh: flm.DeviceMesh, **options: Any) -> Callable[[Any], Any]:
    """A function whose gradient is 2 x, its second derivative 2."""
    return lambda x: jnp.sum(flm.relayout(x, lay(dims, mesh), **options) ** 2)


def twice(loss: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The gradient of the squared gradient: 8 x."""
    return jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_gradients_lie_as_the_input(kind: str) -> None:
    mesh = grid(kind)
    with jax.set_mesh(bare(mesh)):
        for old, new in SOME:
            x, loss = put(old, mesh), squares(new, mesh)

            def both(x: Any, loss: Any = loss) -> Any:
                return jax.grad(loss)(x), twice(loss)(x)

            for way in (eagerly, jax.jit):
                first, second = way(both)(x)
                assert_lies(first, old, mesh, 2 * X)
                assert_lies(second, old, mesh, 8 * X)


def test_gradients_lie_as_in_shardings_say() -> None:
    old, new = PLACES[1], PLACES[4]
    gradient = jax.grad(squares(new, MESH))
    compiled = jax.jit(gradient, in_shardings=NamedSharding(bare(MESH), P("x")))
    assert_lies(compiled(X), old, MESH, 2 * X)


def test_a_given_layout_is_exact_for_values_in_between() -> None:
    """Where nothing else fixes the layout of the relayout's input."""
    for old, new in SOME:
        seen: list[Any] = []

        def keep(x: Any, new: Dims = new, old: Dims = old) -> Any:
            return flm.relayout(x, lay(new), gradient=lay(old))

        @jax.jit
        def cotangent(x: Any, keep: Any = keep) -> Any:
            middle, back = jax.vjp(keep, jnp.sin(x))
            return back(jnp.cos(middle))[0]

        seen.append(cotangent(put(PLACES[0])))
        assert lies(seen[0], old, MESH), (old, new, seen[0].sharding)


def test_control_jax_alone_sends_the_layout_of_the_result() -> None:
    old, new = PLACES[1], PLACES[4]
    plain = squares(new, MESH, gradient="output")
    assert_lies(jax.jit(jax.grad(plain))(put(old)), new, MESH, 2 * X)


def test_gradients_through_relayouts_one_after_another() -> None:
    """Each follows its own input, also where all have one shape."""

    def chained(x: Any) -> Any:
        for dims in (PLACES[1], PLACES[2], PLACES[5]):
            x = flm.relayout(x, lay(dims))
        return jnp.sum(x**2)

    def both(x: Any, y: Any) -> Any:
        return chained(x) + chained(y)

    gradients = jax.jit(jax.grad(both, argnums=(0, 1)))
    for first, second in [(0, 3), (3, 1), (4, 0)]:
        made = gradients(put(PLACES[first]), put(PLACES[second]))
        assert_lies(made[0], PLACES[first], MESH, 2 * X)
        assert_lies(made[1], PLACES[second], MESH, 2 * X)


@pytest.mark.parametrize("kind", ["explicit x", "explicit y"])
@BOTH_WAYS
def test_gradients_on_mixed_meshes(kind: str, way: Any) -> None:
    mesh, old, new = grid(kind), PLACES[5], PLACES[0]
    with jax.set_mesh(bare(mesh)):
        gradient = way(jax.grad(squares(new, mesh)))(put(old, mesh))
    assert_lies(gradient, old, mesh, 2 * X)


def test_gradients_come_back_to_the_mesh_of_the_input() -> None:
    """DTensor's copy_to_mesh gradient, the second order too."""
    x = put(PLACES[1])

    def loss(x: Any) -> Any:
        return jnp.sum(flm.dtensor.copy_to_mesh(x, OTHER) ** 2)

    assert_lies(jax.grad(loss)(x), PLACES[1], MESH, 2 * X)
    assert_lies(twice(loss)(x), PLACES[1], MESH, 8 * X)


def test_gradients_come_back_to_one_device() -> None:
    device = jax.devices()[3]
    x = jax.device_put(X, device)
    gradient = jax.grad(squares(PLACES[5], MESH))(x)
    assert gradient.devices() == {device}
    np.testing.assert_array_equal(gradient, 2 * X)
    # What is on no certain device has no layout to come back to.
    for plain in (X, jnp.asarray(X)):
        gradient = jax.grad(squares(PLACES[5], MESH))(plain)
        assert_lies(gradient, PLACES[5], MESH, 2 * X)


@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["input", "output", lay(PLACES[1])], ids=str)
@BOTH_WAYS
def test_every_transformation(gradient: Any, way: Any) -> None:
    x = put(PLACES[1])
    loss = squares(PLACES[4], MESH, gradient=gradient)
    row = gradient if isinstance(gradient, str) else lay((("y",),))

    def all_of_them(x: Any) -> Any:
        by_row = squares((("y",),), MESH, gradient=row)
        return {
            "jvp": jax.jvp(loss, (x,), (x,))[1],
            "hvp": jax.jvp(jax.grad(loss), (x,), (x,))[1],
            "rows": jax.vmap(by_row)(x),
            "row gradients": jax.vmap(jax.grad(by_row))(x),
            "columns": jax.grad(lambda x: jnp.sum(jax.vmap(by_row, 1)(x)))(x),
            "remat": jax.grad(jax.checkpoint(loss))(x),
            "hessian": jnp.einsum("abab", jax.hessian(loss)(x)),
        }

    found = way(all_of_them)(x)
    for name, wanted in {
        "jvp": 2 * np.sum(X * X),
        "hvp": 2 * X,
        "rows": np.sum(X * X, axis=1),
        "row gradients": 2 * X,
        "columns": 2 * X,
        "remat": 2 * X,
        "hessian": 128,
    }.items():
        np.testing.assert_allclose(found[name], wanted, err_msg=name)


# From PLACES[1] to PLACES[4], by transformation: the dims of the result.
TABLE: dict[str, Dims] = {
    "jit": PLACES[4],
    "grad": PLACES[1],
    "hvp": PLACES[1],
    "vmap": PLACES[5],
    "vmap of grad": PLACES[1],
    "hessian": (("x",), (), (), ()),
}


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("by", ["layout", "array", "argument"])
def test_the_same_layouts_with_every_version_of_jax(kind: str, by: str) -> None:
    mesh = grid(kind)
    x, like = put(PLACES[1], mesh), put(PLACES[4], mesh, X + 1)
    row = put((("y",),), mesh, X[0])

    def transformed(x: Any, like_x: Any, like_row: Any) -> dict[str, Any]:
        def move(x: Any) -> Any:
            if by == "layout":
                dims = PLACES[4] if x.ndim == 2 else (("y",),)
                return flm.relayout(x, lay(dims, mesh))
            if by == "array":
                return flm.relayout_like(x, like if x.ndim == 2 else row)
            return flm.relayout_like(x, like_x if x.ndim == 2 else like_row)

        def loss(x: Any) -> Any:
            return jnp.sum(move(x) ** 2)

        return {
            "jit": move(x),
            "grad": jax.grad(loss)(x),
            "hvp": jax.jvp(jax.grad(loss), (x,), (x,))[1],
            "vmap": jax.vmap(move, spmd_axis_name="x" if kind == "auto" else None)(x),
            "vmap of grad": jax.vmap(jax.grad(loss))(x),
            "hessian": jax.hessian(loss)(x),
        }

    with jax.set_mesh(bare(mesh)):
        found = jax.jit(transformed)(x, like, row)
    eye = 2 * np.eye(64, dtype=np.float32).reshape(8, 8, 8, 8)
    values = {"jit": X, "vmap": X, "hessian": eye}
    # Mapped rows follow a traced row as if it were broadcast: dim 0 is replicated.
    other = {"vmap": PLACES[4]} if (kind, by) == ("auto", "argument") else {}
    for name, dims in (TABLE | other).items():
        np.testing.assert_array_equal(found[name], values.get(name, 2 * X), name)
        assert lies(found[name], dims, mesh), (name, found[name].sharding)


def test_the_transpose_of_a_relayout_alone() -> None:
    move = functools.partial(flm.relayout, layout=lay(PLACES[4]))
    back = jax.linear_transpose(move, put(PLACES[1]))(put(PLACES[4]))
    np.testing.assert_array_equal(back[0], X)


def test_integers_have_no_gradient_to_send() -> None:
    moved = jax.jit(lambda x: flm.relayout(x, lay(PLACES[4])))(
        put(PLACES[1], value=X.astype(np.int32))
    )
    assert_lies(moved, PLACES[4], MESH, X.astype(np.int32))


def test_inside_scan_the_values_are_right() -> None:
    def loss(x: Any) -> Any:
        def step(carry: Any, _: None) -> Any:
            return flm.relayout(carry, lay(PLACES[4])) * 2, None

        return jnp.sum(jax.lax.scan(step, x, None, length=3)[0])

    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(put(PLACES[1])), X * 0 + 8)


def test_inside_shard_map_axes_that_are_left_are_constrained() -> None:
    def inside(x: Any) -> Any:
        return flm.relayout(x * 2, flm.TensorLayout((None, "y"), MESH))

    mapped = jax.shard_map(
        inside, mesh=bare(MESH), in_specs=P("x"), out_specs=P("x"), axis_names={"x"}
    )
    assert_lies(jax.jit(mapped)(put(PLACES[1])), PLACES[5], MESH, 2 * X)


def test_a_name_shows_in_the_program() -> None:
    x = put(PLACES[1])

    def moved(x: Any) -> Any:
        y = flm.relayout(x, lay(PLACES[4]), name="to_columns")
        return flm.relayout_like(y, x, name="back_again")

    text = jax.jit(moved).lower(x).as_text(debug_info=True)
    assert "to_columns" in text and "back_again" in text
    assert "to_columns" not in jax.jit(moved).lower(x).as_text()


# ------------------------------------------------------------------- relayout_like


def test_like_on_all_pairs_of_layouts_under_jit() -> None:
    """64 pairs in eight programs; every one but for `x` and `like` themselves."""

    @jax.jit
    def follow(xs: Any, like: Any) -> Any:
        moved = [flm.relayout_like(x, like) for x in xs]
        return moved, like * 1

    for other in PLACES:
        like = put(other, value=X + 1)
        moved, kept = follow([put(old) for old in PLACES], like)
        assert_lies(kept, other, MESH, X + 1)
        for old, y in zip(PLACES, moved, strict=True):
            assert lies(y, other, MESH), (old, other, y.sharding)
            np.testing.assert_array_equal(y, X)


def test_like_of_several_arrays_of_one_shape_under_jit() -> None:
    others = [PLACES[1], PLACES[4], PLACES[5], PLACES[0]]

    @jax.jit
    def follow(likes: Any) -> Any:
        return [flm.relayout_like(x, y) for x, y in itertools.pairwise(likes)]

    for other, y in zip(others[1:], follow([put(o) for o in others]), strict=True):
        assert_lies(y, other, MESH, X)


def test_control_a_group_alone_takes_the_union() -> None:
    x, like = put(PLACES[1]), put(PLACES[4])
    y = jax.jit(lambda x, like: relayout_module._grouped.bind(x, like))(x, like)
    assert not lies(y, PLACES[4], MESH)


@pytest.mark.parametrize("dtype", ["int32", "bool", "key"])
def test_like_of_what_has_no_gradient(dtype: str) -> None:
    """A mask that is laid out like an activation, mapped and differentiated."""
    if dtype == "key":
        x = jax.random.split(jax.random.key(0), 64).reshape(8, 8)
        like = jax.random.split(jax.random.key(1), 64).reshape(8, 8)
        x, like = (
            jax.device_put(keys, NamedSharding(bare(MESH), P(*spec)))
            for keys, spec in ((x, ("x", None)), (like, (None, "y")))
        )
        wanted = jax.random.key_data(x)
    else:
        x, like = put(PLACES[1], value=X.astype(dtype)), put(PLACES[4])
        wanted = X.astype(dtype)
    rows = jax.jit(jax.vmap(flm.relayout_like))(x, like)
    np.testing.assert_array_equal(plain_of(rows), wanted)

    def loss(weight: Any) -> Any:
        other = like if dtype == "key" else weight
        mask = flm.relayout_like(x, other)
        return jnp.sum(weight * (1.0 if dtype == "key" else mask))

    gradient = jax.jit(jax.grad(loss))(put(PLACES[4]))
    np.testing.assert_array_equal(gradient, 1.0 if dtype == "key" else wanted)


def plain_of(x: Any) -> Any:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def test_like_of_computed_values_under_jit() -> None:
    for old, other in itertools.product(PLACES[:6], [PLACES[1], PLACES[4]]):

        @jax.jit
        def follow(x: Any, like: Any) -> Any:
            return flm.relayout_like(x + 1, like)

        y = follow(put(old), put(other))
        assert lies(y, other, MESH), (old, other, y.sharding)


@pytest.mark.parametrize("kind", KINDS)
def test_like_an_array(kind: str) -> None:
    """Of another shape and dtype, on any kind of mesh, inside jit too."""
    mesh, other = grid(kind), PLACES[6]
    like = put(other, mesh, np.ones((4, 16), np.int8))
    with jax.set_mesh(bare(mesh)):
        for x in (X, jnp.asarray(X), put(PLACES[1], mesh)):
            assert_lies(flm.relayout_like(x, like), other, mesh, X)
            traced = jax.jit(lambda x: flm.relayout_like(x, like))(x)
            assert_lies(traced, other, mesh, X)


def test_like_a_value_on_explicit_axes() -> None:
    mesh = grid("explicit")
    with jax.set_mesh(bare(mesh)):
        for old, other in SOME:
            like = put(other, mesh, np.ones((16, 4), np.int8))
            y = jax.jit(flm.relayout_like)(put(old, mesh), like)
            assert_lies(y, other, mesh, X)


def test_like_goes_from_one_mesh_to_another() -> None:
    """The example of `tf.experimental.dtensor.relayout_like`."""
    values = flm.relayout(X, lay(PLACES[1], OTHER))
    with flm.dtensor.default_mesh(MESH):
        x = flm.relayout(X, ("x", None))
        y = flm.relayout_like(values, x, name="values_like_x")
        back = flm.relayout_like(x, values)
    assert_lies(y, PLACES[1], MESH, X)
    assert_lies(back, PLACES[1], OTHER, X)


def test_like_what_lies_on_no_mesh_replicates() -> None:
    for like in (X, jnp.asarray(X), np.ones((2, 3))):
        assert_lies(flm.relayout_like(put(PLACES[5]), like), PLACES[0], MESH, X)
        traced = jax.jit(lambda x, like=like: flm.relayout_like(x, like))
        assert_lies(traced(put(PLACES[5])), PLACES[0], MESH, X)


def test_like_of_another_dtype_under_jit() -> None:
    """DTensor's relayout_like with a different dtype in a graph."""
    like = put(PLACES[4], value=X.astype(np.int8))
    assert_lies(jax.jit(flm.relayout_like)(put(PLACES[1]), like), PLACES[4], MESH, X)
    numbers = put(PLACES[1], value=X.astype(np.int32))
    moved = jax.jit(flm.relayout_like)(numbers, put(PLACES[4]))
    assert_lies(moved, PLACES[4], MESH, X.astype(np.int32))


def test_like_keys() -> None:
    keys = jax.random.split(jax.random.key(0), 8)
    old, new = (flm.relayout(keys, lay((axes,))) for axes in (("x",), ("y",)))
    for way in (eagerly, jax.jit):
        moved = way(flm.relayout_like)(old, new)
        assert_lies(moved, (("y",),), MESH, jax.random.key_data(keys))


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_gradients_of_like(kind: str) -> None:
    """To x in its own layout, also at the second order; to the other one, nothing."""
    mesh = grid(kind)

    def loss(x: Any, like: Any) -> Any:
        return jnp.sum(flm.relayout_like(x, like) ** 2)

    with jax.set_mesh(bare(mesh)):
        for old, other in SOME:
            x, like = put(old, mesh), put(other, mesh, X + 1)
            first, to_like = jax.grad(loss, (0, 1))(x, like)
            assert_lies(first, old, mesh, 2 * X)
            assert not np.any(to_like)
            assert_lies(twice(lambda x: loss(x, like))(x), old, mesh, 8 * X)  # noqa: B023
            first, to_like = jax.jit(jax.grad(loss, (0, 1)))(x, like)
            np.testing.assert_array_equal(first, 2 * X)
            assert not np.any(to_like)
            closed = jax.jit(jax.grad(functools.partial(loss, like=like)))
            assert_lies(closed(x), old, mesh, 2 * X)


def test_like_under_vmap_and_forward_mode() -> None:
    x, like = put(PLACES[1]), put(PLACES[4])
    for way in (eagerly, jax.jit):
        y, tangent = way(
            lambda x, like: jax.jvp(lambda x: flm.relayout_like(x, like), (x,), (x,))
        )(x, like)
        np.testing.assert_array_equal(y, X)
        np.testing.assert_array_equal(tangent, X)
        for dims in ((0, 0), (0, None), (1, 0)):
            other = like if dims[1] == 0 else like[0]
            rows = way(jax.vmap(flm.relayout_like, dims, dims[0]))(x, other)
            np.testing.assert_array_equal(rows, X)


def test_like_in_control_flow() -> None:
    """Values are right everywhere; in a `cond` the layout is, too."""
    x, like = put(PLACES[1]), put(PLACES[4])

    @jax.jit
    def branches(flag: Any, x: Any, like: Any) -> Any:
        follow = functools.partial(flm.relayout_like, like=like)
        return jax.lax.cond(flag, follow, lambda x: follow(x) * 2, x)

    assert_lies(branches(True, x, like), PLACES[4], MESH, X)


def scanned(x: Any, step: Any) -> Any:
    return jax.lax.scan(lambda carry, _: (step(carry), None), x, None, length=2)[0]


LOOPS: dict[str, Any] = {
    "scan": scanned,
    "fori_loop": lambda x, step: jax.lax.fori_loop(0, 2, lambda _, c: step(c), x),
    "while_loop": lambda x, step: jax.lax.while_loop(lambda c: c.sum() < 0, step, x),
    "jit in a scan": lambda x, step: scanned(x, jax.jit(step)),
    "grad of a scan": lambda x, step: jax.grad(lambda x: scanned(x, step).sum())(x),
    "vmap of a scan": lambda x, step: jax.vmap(lambda x: scanned(x, step))(x[None])[0],
}


@pytest.mark.parametrize("loop", LOOPS)
def test_like_in_a_loop_is_refused(loop: str) -> None:
    """The layout of the carry would be mixed in. A known layout is followed there."""
    x, like = put(PLACES[1]), put(PLACES[4])

    def run(x: Any, like: Any) -> Any:
        return LOOPS[loop](x, lambda c: flm.relayout_like(c, like))

    with pytest.raises(flm.LayoutError, match="in the body of a loop"):
        jax.jit(run)(x, like)
    closed_over = jax.jit(lambda x: scanned(x, lambda c: flm.relayout_like(c, like)))
    np.testing.assert_array_equal(closed_over(x), X)


# ------------------------------------------------------------------ in a program


def test_inside_flm_jit() -> None:
    """Names, bare axes, the Variables of a model, and its gradient."""
    layout_map = flm.LayoutMap(MESH, strict=False)
    layout_map["kernel"] = (None, "y")
    layout_map.names["hidden"] = ("x", None)
    model = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))
    layout_map.place(model)
    kernel = np.asarray(model.kernel[...])

    @flm.jit(layout_map=layout_map)
    def run(model: nnx.Linear, x: Any) -> Any:
        hidden = flm.relayout(model(x), "hidden")
        columns = flm.relayout(hidden, (None, "y"))
        return hidden, columns, flm.relayout_like(hidden, model.kernel)

    @flm.jit(layout_map=layout_map)
    def gradient(model: nnx.Linear) -> Any:
        def loss(model: nnx.Linear) -> Any:
            return jnp.sum(flm.relayout(model.kernel[...], ("x", None)) ** 2)

        return nnx.grad(loss)(model)

    hidden, columns, followed = run(model, np.eye(8, dtype=np.float32))
    assert_lies(hidden, PLACES[1], MESH, kernel)
    assert_lies(columns, PLACES[4], MESH, kernel)
    assert_lies(followed, PLACES[4], MESH, kernel)
    assert_lies(gradient(model)["kernel"][...], PLACES[4], MESH, 2 * kernel)


def test_without_a_gradient_nothing_is_added_to_the_program() -> None:
    def operations(function: Callable[[Any], Any]) -> list[str]:
        text = jax.jit(function).lower(put(PLACES[1])).compile().as_text()
        return re.findall(r" = \S+ ([\w-]+)\(", text or "")

    sharding = lay(PLACES[4]).sharding(2)
    plain = operations(lambda x: jax.lax.with_sharding_constraint(x * 2, sharding))
    assert operations(lambda x: flm.relayout(x * 2, lay(PLACES[4]))) == plain
    assert "all-gather" in plain or "all-to-all" in plain


# ------------------------------------------------- axes of another type, other devices


@pytest.mark.parametrize("kind", ["explicit", "explicit x", "explicit y"])
@pytest.mark.parametrize("move", [flm.relayout, flm.distribute_tensor])
def test_from_explicit_to_auto_axes(kind: str, move: Any) -> None:
    """The same devices, in a trace; the gradient comes back to the Explicit axes."""
    mesh = grid(kind)
    old, new = PLACES[5], PLACES[4]
    x = put(old, mesh)

    def loss(x: Any) -> Any:
        return jnp.sum(move(x, lay(new)) ** 2)

    @jax.jit
    def all_of_them(x: Any) -> Any:
        tangent = jax.jvp(lambda x: move(x, lay(new)), (x,), (x,))[1]
        return move(x, lay(new)), tangent, jax.grad(loss)(x), twice(loss)(x)

    moved, tangent, first, second = all_of_them(x)
    assert flm.dtensor.fetch_layout(moved) == lay(new)
    assert_lies(moved, new, MESH, X)
    np.testing.assert_array_equal(tangent, X)
    np.testing.assert_array_equal(second, 8 * X)
    np.testing.assert_array_equal(first, 2 * X)
    if move is flm.relayout or kind == "explicit":
        assert flm.dtensor.fetch_layout(first) == lay(old, mesh)
        assert_lies(first, old, mesh, 2 * X)


@pytest.mark.parametrize("move", [flm.relayout, flm.distribute_tensor])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("context", [False, True])
def test_a_trace_goes_to_no_other_devices(move: Any, kind: str, context: bool) -> None:
    mesh = grid(kind)
    x = put(PLACES[1], mesh)
    wanted = [lay(PLACES[4], HALF), flm.TensorLayout((MATCH, "y"), HALF)]
    with jax.set_mesh(bare(mesh)) if context else contextlib.nullcontext():
        for layout in wanted[: 1 if move is flm.distribute_tensor else 2]:
            with pytest.raises(
                flm.errors.MeshError, match="is on 8 devices, .*outside of"
            ):
                jax.jit(lambda x: move(x, layout))(x)  # noqa: B023
        with pytest.raises(flm.errors.MeshError, match="is on 8 devices"):
            jax.vmap(lambda x: move(x, lay((("y",),), HALF)))(x)
        if context:
            with pytest.raises(flm.errors.MeshError, match="is on 8 devices"):
                jax.jit(lambda x: move(x, wanted[0]))(X)
        assert_lies(move(x, wanted[0]), PLACES[4], HALF, X)


def test_as_many_other_devices_are_no_silent_permutation() -> None:
    """JAX tells, once it compiles."""
    with pytest.raises(ValueError, match="incompatible devices"):
        jax.jit(lambda x: flm.relayout(x, lay(PLACES[4], OTHER)))(put(PLACES[1]))


def test_what_lies_nowhere_goes_to_the_devices_of_the_layout() -> None:
    """As the constraint of JAX itself does."""
    for value in (X, jnp.asarray(X)):
        moved = jax.jit(lambda x: flm.relayout(x, lay(PLACES[4], HALF)))(value)
        assert_lies(moved, PLACES[4], HALF, X)


def test_distribute_under_grad_goes_to_other_devices_and_back() -> None:
    x = put(PLACES[1])

    def loss(x: Any) -> Any:
        return jnp.sum(flm.distribute_tensor(x, lay(PLACES[4], HALF)) ** 2)

    assert_lies(jax.grad(loss)(x), PLACES[1], MESH, 2 * X)


# ------------------------------------------------------------------- vmap, gradient=


@BOTH_WAYS
@pytest.mark.parametrize("gradient", ["input", "output", (None,)], ids=str)
def test_vmap_keeps_its_spmd_axis(way: Any, gradient: Any) -> None:
    row = functools.partial(flm.relayout, layout=lay((("y",),)), gradient=gradient)
    moved = way(jax.vmap(row, spmd_axis_name="x"))(put(PLACES[0]))
    assert_lies(moved, PLACES[5], MESH, X)


@pytest.mark.parametrize("where", [jax.set_mesh, flm.dtensor.default_mesh, None])
@pytest.mark.parametrize("move", [flm.relayout, flm.distribute_tensor])
def test_bare_axes_under_eager_grad_and_vmap(where: Any, move: Any) -> None:
    """There JAX gives nobody the mesh of `jax.set_mesh` with its devices."""
    x = put(PLACES[1])
    if where is None and move is flm.distribute_tensor:
        with pytest.raises(flm.errors.MeshError, match="no mesh for the layout"):
            jax.grad(lambda x: jnp.sum(move(x, (None, "y"))))(x)
        return
    with contextlib.nullcontext() if where is None else where(bare(MESH)):
        seen: list[Any] = []

        def loss(x: Any) -> Any:
            moved = move(x, (None, "y"))
            seen.append(flm.dtensor.fetch_layout(moved))
            return jnp.sum(moved**2)

        gradient = jax.grad(loss)(x)
        rows = jax.vmap(lambda row: move(row, ("y",)), spmd_axis_name="x")(x)
    assert seen == [lay(PLACES[4])]
    np.testing.assert_array_equal(gradient, 2 * X)
    assert move is flm.distribute_tensor or lies(gradient, PLACES[1], MESH)
    assert_lies(rows, PLACES[5], MESH, X)


def test_eager_vmap_compiles_once() -> None:
    seen: list[str] = []
    row = functools.partial(flm.relayout, layout=lay((("y",),)))
    jax.vmap(row)(put(PLACES[1]))
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        logger = logging.getLogger("jax")
        patch.setattr(logger, "handle", lambda record: seen.append(record.getMessage()))
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("jax."):
                own = logging.getLogger(name)
                patch.setattr(own, "handle", lambda r: seen.append(r.getMessage()))
        jax.vmap(row)(put(PLACES[1], value=X + 1))
        assert [text for text in seen if "Compiling" in text] == []
        jax.vmap(lambda x: row(x) * 3.5)(put(PLACES[1]))
        assert [text for text in seen if "Compiling" in text] != []


@pytest.mark.parametrize(
    ("gradient", "kind", "text"),
    [
        ("inputs", flm.LayoutError, "gradient='inputs'"),
        (("nope", None), flm.errors.RuleError, "no such axis"),
        (("x",), flm.LayoutError, "has 1 dims"),
        (3, flm.errors.RuleError, "use a tuple"),
        (True, flm.errors.RuleError, "use a tuple"),
    ],
)
@BOTH_WAYS
def test_a_gradient_that_is_no_layout(
    way: Any, gradient: Any, kind: Any, text: str
) -> None:
    with pytest.raises(kind, match=text):
        way(lambda x: flm.relayout(x, lay(PLACES[4]), gradient=gradient))(
            put(PLACES[1])
        )
    if text == "use a tuple":
        with pytest.raises(kind, match=text):
            flm.relayout([], lay(PLACES[4]), gradient=gradient)


def test_variables_and_boxes_stay_what_they_are() -> None:
    """And stand for what they hold, where they are followed."""
    box: Any = linen.Partitioned
    x, like = put(PLACES[1]), put(PLACES[4])
    for made, wanted in (
        (flm.relayout(nnx.Param(x), lay(PLACES[4])), nnx.Param),
        (flm.relayout_like(nnx.Param(x), like), nnx.Param),
        (flm.relayout_like(box(x, names=("a", "b")), nnx.Param(like)), box),
        (flm.relayout_like(x, box(like, names=("a", "b"))), jax.Array),
    ):
        assert isinstance(made, wanted)
        (array,) = jax.tree.leaves(made)
        assert_lies(array, PLACES[4], MESH, X)
