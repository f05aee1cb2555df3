"""relayout and relayout_like: the shards of each device, forward and backward.

Values are compared with those of the same function without the relayout, layouts with
those that the arguments name.
"""

import contextlib
import functools
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

P = PartitionSpec
MATCH = flm.TensorLayout.MATCH
X = np.arange(64, dtype=np.float32).reshape(8, 8)
WHOLE: Dims = ((), ())
ROWS: Dims = (("x",), ())
COLUMNS: Dims = ((), ("y",))
BOTH: Dims = (("x",), ("y",))
TURNED: Dims = (("y",), ("x",))
PLACES: tuple[Dims, ...] = (
    *(WHOLE, ROWS, COLUMNS, BOTH, TURNED),
    *(((), ("x",)), (("y",), ()), (("x", "y"), ())),
)
SOME = [
    *((ROWS, COLUMNS), (COLUMNS, ROWS), (WHOLE, BOTH), (BOTH, WHOLE)),
    *((BOTH, TURNED), (ROWS, PLACES[5]), (PLACES[7], PLACES[6])),
]


def grid(kind: Any = "auto") -> flm.DeviceMesh:
    return flm.DeviceMesh((4, 2), ("x", "y"), axis_types=kind)


MESH = grid()
# The same devices in another order and another grid; and half of them.
OTHER = flm.DeviceMesh((2, 4), ("x", "y"), jax.devices()[::-1])
HALF = flm.DeviceMesh((2, 2), ("x", "y"), jax.devices()[4:])
KINDS = pytest.mark.parametrize("kind", ["auto", "explicit"])


def lay(dims: Dims, mesh: flm.DeviceMesh = MESH) -> flm.TensorLayout:
    return flm.TensorLayout(dims, mesh)


def put(dims: Dims, mesh: flm.DeviceMesh = MESH, value: Any = X) -> Any:
    """By JAX's own function."""
    spec = P(*(axes or None for axes in dims))
    return jax.device_put(value, NamedSharding(bare(mesh), spec))


def eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


BOTH_WAYS = pytest.mark.parametrize("way", [eagerly, jax.jit])


# --------------------------------------------------------------------------- there


@BOTH_WAYS
def test_from_one_layout_to_another_on_explicit_axes(way: Any) -> None:
    """On Auto axes `test_relayout_golden` has every pair."""
    mesh = grid("explicit")
    xs = [put(old, mesh) for old, _ in SOME]
    likes = [put(new, mesh, np.ones((16, 8), np.int8)) for _, new in SOME]

    def move(xs: Any) -> Any:
        triples = zip(xs, likes, SOME, strict=True)
        return [
            (flm.relayout(x, lay(new, mesh)), flm.relayout_like(x, like))
            for x, like, (_, new) in triples
        ]

    with jax.set_mesh(bare(mesh)):
        for pair, (_, new) in zip(way(move)(xs), SOME, strict=True):
            for y in pair:
                assert_lies(y, new, mesh, X)


@pytest.mark.parametrize("mesh", [OTHER, HALF, bare(OTHER)], ids=str)
def test_a_mesh_keeps_the_dims(mesh: Any) -> None:
    there = flm.DeviceMesh(mesh)
    for dtype in ("float32", "bool", "bfloat16", "complex64"):
        value = X.astype(dtype)
        moved = flm.dtensor.copy_to_mesh({"a": put(BOTH, value=value)}, mesh)
        assert_lies(moved["a"], BOTH, there, value)
    for value in (X, jnp.asarray(X)):
        assert_lies(flm.relayout(value, mesh), WHOLE, there, X)


MATCHES: list[tuple[Dims, Any, Dims]] = [
    (ROWS, (MATCH, "y"), BOTH),
    (BOTH, (None, MATCH), COLUMNS),
    (((), ("x",)), ("y", MATCH), TURNED),
    (WHOLE, (MATCH, MATCH), WHOLE),
    (BOTH, (MATCH, ...), ROWS),
]


@KINDS
@pytest.mark.parametrize("move", [flm.relayout, flm.distribute_tensor])
def test_match_keeps_what_a_dim_has(kind: str, move: Any) -> None:
    mesh = grid(kind)
    arrays = [put(old, mesh) for old, _, _ in MATCHES]
    layouts = [flm.TensorLayout(axes, mesh) for _, axes, _ in MATCHES]

    def move_all(xs: Any) -> Any:
        return [move(x, to) for x, to in zip(xs, layouts, strict=True)]

    with jax.set_mesh(bare(mesh)):
        for moved in (move_all(arrays), jax.jit(move_all)(arrays)):
            for y, (_, _, dims) in zip(moved, MATCHES, strict=True):
                assert_lies(y, dims, mesh, X)
    assert_lies(move(X, flm.TensorLayout((MATCH, "y"), mesh)), COLUMNS, mesh, X)


# ----------------------------------------------------------------------- and back


def squares(move: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function whose gradient is 2 x, its second derivative 2."""
    return lambda x: jnp.sum(move(x) ** 2)


def twice(loss: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The gradient of the squared gradient: 8 x."""
    return jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2))


TRANSFORMS: dict[str, Callable[[Callable[[Any], Any]], Callable[[Any], Any]]] = {
    "itself": lambda move: move,
    "jvp": lambda move: lambda x: jax.jvp(move, (x,), (2 * x,))[1],
    "grad": lambda move: jax.grad(squares(move)),
    "hvp": lambda move: lambda x: jax.jvp(jax.grad(squares(move)), (x,), (x,))[1],
    "vmap": lambda move: jax.vmap(move),
    "vmap of grad": lambda move: jax.vmap(jax.grad(squares(move)), 1, 1),
    "grad of vmap": lambda move: jax.grad(squares(jax.vmap(move, 1, 1))),
    "remat": lambda move: jax.grad(jax.checkpoint(squares(move))),
    "hessian": lambda move: jax.hessian(squares(move)),
    "scan": lambda move: jax.grad(
        lambda x: jax.lax.scan(lambda c, _: (move(c) * 2, None), x, length=2)[0].sum()
    ),
    "cond": lambda move: lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, move, x),
    "transpose": lambda move: lambda x: jax.linear_transpose(move, x)(x)[0],
}


@pytest.mark.slow
@pytest.mark.parametrize("by", ["input", "layout", "like", "array"])
def test_every_transformation_gives_the_values_without_it(by: str) -> None:
    x, likes = put(ROWS), {2: put(COLUMNS, value=X + 1), 1: put((("y",),), value=X[0])}
    rules: dict[int, Any] = {2: (None, "y"), 1: ("y",)}
    own: dict[int, Any] = {2: ("x", None), 1: ("x",)}

    def moved(x: Any, likes: Any) -> Any:
        if by in ("like", "array"):
            return flm.relayout_like(x, likes[x.ndim])
        gradient = own[x.ndim] if by == "layout" else by
        return flm.relayout(x, flm.TensorLayout(rules[x.ndim], MESH), gradient=gradient)

    for name, transform in TRANSFORMS.items():
        if by == "like" and name in ("transpose", "scan"):
            continue  # `like` is an input too, in which it is not linear; see LOOPS

        def program(x: Any, likes: Any, transform: Any = transform) -> Any:
            return transform(functools.partial(moved, likes=likes))(x)

        wanted = transform(lambda x: x)(jnp.asarray(X))
        closed = functools.partial(program, likes=likes)
        np.testing.assert_array_equal(closed(x), wanted, name)
        made = jax.jit(program)(x, likes) if by == "like" else jax.jit(closed)(x)
        np.testing.assert_array_equal(made, wanted, name)


# From ROWS to COLUMNS, by transformation: the dims of the result.
LAYOUTS: dict[str, Dims] = {
    "itself": COLUMNS,
    "grad": ROWS,
    "hvp": ROWS,
    "hessian": (("x",), (), (), ()),
}


@KINDS
@pytest.mark.parametrize("by", ["input", "layout", "argument"])
def test_the_layouts_of_transformations(kind: str, by: str) -> None:
    mesh = grid(kind)

    def move(x: Any, like: Any) -> Any:
        if by == "argument":
            return flm.relayout_like(x, like)
        gradient = by if by == "input" else lay(ROWS, mesh)
        return flm.relayout(x, lay(COLUMNS, mesh), gradient=gradient)

    def every(x: Any, like: Any) -> Any:
        return {
            name: TRANSFORMS[name](functools.partial(move, like=like))(x)
            for name in LAYOUTS
        }

    with jax.set_mesh(bare(mesh)):
        made = jax.jit(every)(put(ROWS, mesh), put(COLUMNS, mesh, X + 1))
    for name, dims in LAYOUTS.items():
        assert lies(made[name], dims, mesh), (name, made[name].sharding)


def test_a_given_layout_is_exact_for_values_in_between() -> None:
    """Where nothing else fixes the layout of the relayout's input."""
    for old, new in SOME:

        @jax.jit
        def cotangent(x: Any, old: Dims = old, new: Dims = new) -> Any:
            move = functools.partial(flm.relayout, layout=lay(new), gradient=lay(old))
            middle, back = jax.vjp(move, jnp.sin(x))
            return back(jnp.cos(middle))[0]

        assert lies(cotangent(put(WHOLE)), old, MESH), (old, new)


def test_control_jax_alone_sends_the_layout_of_the_result() -> None:
    plain = squares(lambda x: flm.distribute_tensor(x, lay(COLUMNS)))
    assert_lies(jax.jit(jax.grad(plain))(put(ROWS)), COLUMNS, MESH, 2 * X)


def test_gradients_through_relayouts_one_after_another() -> None:
    """Each follows its own input, also where all have one shape."""

    def chained(x: Any) -> Any:
        for dims in (ROWS, PLACES[5], BOTH):
            x = flm.relayout(x, lay(dims))
        return jnp.sum(x**2)

    both = jax.jit(jax.grad(lambda x, y: chained(x) + chained(y), argnums=(0, 1)))
    for pair in [(WHOLE, TURNED), (TURNED, ROWS), (COLUMNS, WHOLE)]:
        for gradient, dims in zip(both(*map(put, pair)), pair, strict=True):
            assert_lies(gradient, dims, MESH, 2 * X)


def test_gradients_come_back_to_the_mesh_of_the_input() -> None:
    loss = squares(lambda x: flm.relayout(x, OTHER))
    assert_lies(jax.grad(loss)(put(ROWS)), ROWS, MESH, 2 * X)
    assert_lies(twice(loss)(put(ROWS)), ROWS, MESH, 8 * X)
    half = squares(lambda x: flm.distribute_tensor(x, lay(COLUMNS, HALF)))
    assert_lies(jax.grad(half)(put(ROWS)), ROWS, MESH, 2 * X)


def test_gradients_come_back_to_one_device() -> None:
    device = jax.devices()[3]
    loss = squares(lambda x: flm.relayout(x, lay(BOTH)))
    gradient = jax.grad(loss)(jax.device_put(X, device))
    assert gradient.devices() == {device}
    np.testing.assert_array_equal(gradient, 2 * X)
    # What is on no certain device has no layout to come back to.
    for plain in (X, jnp.asarray(X)):
        assert_lies(jax.grad(loss)(plain), BOTH, MESH, 2 * X)


@BOTH_WAYS
@pytest.mark.parametrize("gradient", ["input", (None,)], ids=str)
def test_vmap_keeps_its_spmd_axis(way: Any, gradient: Any) -> None:
    row = functools.partial(flm.relayout, layout=lay((("y",),)), gradient=gradient)
    moved = way(jax.vmap(row, spmd_axis_name="x"))(put(WHOLE))
    assert_lies(moved, BOTH, MESH, X)


def test_inside_shard_map_axes_that_are_left_are_constrained() -> None:
    def inside(x: Any) -> Any:
        return flm.relayout(x * 2, flm.TensorLayout((None, "y"), MESH))

    mapped = jax.shard_map(
        inside, mesh=bare(MESH), in_specs=P("x"), out_specs=P("x"), axis_names={"x"}
    )
    assert_lies(jax.jit(mapped)(put(ROWS)), BOTH, MESH, 2 * X)


# ------------------------------------------------------------------- relayout_like


@BOTH_WAYS
def test_like_what_lies_on_no_mesh_replicates(way: Any) -> None:
    for like in (X, jnp.asarray(X), np.ones((2, 3))):
        follow = way(lambda x, like=like: flm.relayout_like(x, like))
        assert_lies(follow(put(BOTH)), WHOLE, MESH, X)


@BOTH_WAYS
def test_like_of_another_dtype(way: Any) -> None:
    for x, like in ((X, X.astype("int8")), (X.astype("int32"), X)):
        moved = way(flm.relayout_like)(put(ROWS, value=x), put(COLUMNS, value=like))
        assert_lies(moved, COLUMNS, MESH, x)


@pytest.mark.parametrize("way", [eagerly, jax.jit, jax.vmap])
def test_like_keys(way: Any) -> None:
    keys = jax.random.split(jax.random.key(0), 64).reshape(8, 8)
    moved = way(flm.relayout_like)(put(ROWS, value=keys), put(COLUMNS, value=keys))
    np.testing.assert_array_equal(jax.random.key_data(moved), jax.random.key_data(keys))
    assert way is jax.vmap or lies(moved, COLUMNS, MESH)


LOOPS: dict[str, Any] = {
    "scan": lambda x, step: jax.lax.scan(lambda c, _: (step(c), None), x, length=2)[0],
    "while_loop": lambda x, step: jax.lax.while_loop(lambda c: c.sum() < 0, step, x),
    "jit in a loop": lambda x, step: jax.lax.fori_loop(
        0, 2, lambda _, c: jax.jit(step)(c), x
    ),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_like_in_a_loop_is_refused(loop: str) -> None:
    """The layout of the carry would be mixed in. A known layout is followed there."""

    def run(x: Any, like: Any) -> Any:
        return LOOPS[loop](x, lambda c: flm.relayout_like(c, like))

    with pytest.raises(flm.LayoutError, match="outside of loops"):
        jax.jit(run)(put(ROWS), put(COLUMNS))


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "rank": (lambda x: flm.relayout_like(x, x[0]), "different numbers of dims"),
    "shape": (lambda x: flm.relayout_like(x[:4], x), "by an array of its shape"),
    "keys": (
        lambda x: flm.relayout_like(x[0], jax.random.split(jax.random.key(0), 8)),
        r"by an array of its shape \(keys by keys\)",
    ),
    "shard_map": (
        lambda x: jax.shard_map(
            lambda x: flm.relayout_like(x, x),
            **{"mesh": bare(MESH), "in_specs": P("x"), "out_specs": P("x")},
            axis_names={"x"},
        )(x),
        "outside of loops and shard_map",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_unknown_is_refused(case: str) -> None:
    function, text = REFUSED[case]
    with pytest.raises(flm.LayoutError, match=text):
        jax.jit(function)(put(ROWS))


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
    assert_lies(hidden, ROWS, MESH, kernel)
    assert_lies(columns, COLUMNS, MESH, kernel)
    assert_lies(followed, COLUMNS, MESH, kernel)
    assert_lies(gradient(model)["kernel"][...], COLUMNS, MESH, 2 * kernel)


def test_without_a_gradient_nothing_is_added_to_the_program() -> None:
    def operations(function: Callable[[Any], Any]) -> list[str]:
        text = jax.jit(function).lower(put(ROWS)).compile().as_text()
        return re.findall(r" = \S+ ([\w-]+)\(", text or "")

    sharding = lay(COLUMNS).sharding(2)
    plain = operations(lambda x: jax.lax.with_sharding_constraint(x * 2, sharding))
    assert operations(lambda x: flm.relayout(x * 2, lay(COLUMNS))) == plain
    assert "all-gather" in plain or "all-to-all" in plain


def test_a_name_shows_in_the_program() -> None:
    def moved(x: Any) -> Any:
        y = flm.relayout(x, lay(COLUMNS), name="to_columns")
        return flm.relayout_like(y, x, name="back_again")

    lowered = jax.jit(moved).lower(put(ROWS))
    for name in ("to_columns", "back_again"):
        assert name in lowered.as_text(debug_info=True)
        assert name not in lowered.as_text()


# --------------------------------------------------------------------- other devices


def test_a_mesh_keeps_what_is_unknown() -> None:
    assert_lies(jax.jit(lambda x: flm.relayout(x, MESH))(put(BOTH)), BOTH, MESH, X)


@pytest.mark.parametrize("way", [jax.jit, jax.vmap])
def test_a_trace_goes_to_no_other_devices(way: Any) -> None:
    move = way(lambda x: flm.relayout(x, lay(ROWS[-x.ndim :], HALF)))
    with pytest.raises(ValueError, match="incompatible devices"):
        move(put(ROWS))


def test_as_many_other_devices_are_no_silent_permutation() -> None:
    """JAX tells, once it compiles."""
    with pytest.raises(ValueError, match="incompatible devices"):
        jax.jit(lambda x: flm.relayout(x, lay(COLUMNS, OTHER)))(put(ROWS))
    for value in (X, jnp.asarray(X)):  # on no certain device
        moved = jax.jit(lambda x: flm.relayout(x, lay(COLUMNS, HALF)))(value)
        assert_lies(moved, COLUMNS, HALF, X)


@pytest.mark.parametrize("where", [jax.set_mesh, flm.dtensor.default_mesh, None])
@pytest.mark.parametrize("move", [flm.relayout, flm.distribute_tensor])
def test_bare_axes_under_eager_grad_and_vmap(where: Any, move: Any) -> None:
    """There JAX gives nobody the mesh of `jax.set_mesh` with its devices."""
    x = put(ROWS)
    with contextlib.nullcontext() if where is None else where(bare(MESH)):
        gradient = jax.grad(squares(lambda x: move(x, (None, "y"))))(x)
        rows = jax.vmap(lambda row: move(row, ("y",)), spmd_axis_name="x")(x)
    np.testing.assert_array_equal(gradient, 2 * X)
    assert move is flm.distribute_tensor or lies(gradient, ROWS, MESH)
    assert_lies(rows, BOTH, MESH, X)


@pytest.mark.parametrize(
    ("gradient", "text"),
    [
        ("inputs", "gradient='inputs'"),
        (("nope", None), "no such axis"),
        (("x",), "gradient= of relayout of .* has 1 dims"),
    ],
)
def test_a_gradient_that_is_no_layout(gradient: Any, text: str) -> None:
    with pytest.raises(flm.LayoutError, match=text):
        flm.relayout(put(ROWS), lay(COLUMNS), gradient=gradient)


def test_variables_and_boxes_stay_what_they_are() -> None:
    """And stand for what they hold, where they are followed."""
    box: Any = linen.Partitioned
    x, like = put(ROWS), put(COLUMNS)
    for made, wanted in (
        (flm.relayout(nnx.Param(x), lay(COLUMNS)), nnx.Param),
        (flm.relayout_like(nnx.Param(x), like), nnx.Param),
        (flm.relayout_like(box(x, names=("a", "b")), nnx.Param(like)), box),
        (flm.relayout_like(x, box(like, names=("a", "b"))), jax.Array),
    ):
        assert isinstance(made, wanted)
        (array,) = jax.tree.leaves(made)
        assert_lies(array, COLUMNS, MESH, X)
