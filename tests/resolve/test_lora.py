"""LoRA matrices follow their kernel, in every spelling of the libraries."""

import contextlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from shapes import ABSTRACT, all_axes, nested, struct
from shapes import mapped as map_of
from shards import assert_lies

import flax_layoutmap as flm
from flax_layoutmap._core.jax_internals import memory_of
from flax_layoutmap._resolve.lora import kernel_dims, matrix_of, places_of

RULES = {"up/kernel": ("data", "model"), "down/kernel": ("model", None), "bias": None}


def mapped(
    rules: dict[str, Any] | None = None, mesh: Any = ABSTRACT, **options: Any
) -> flm.LayoutMap:
    return map_of(RULES if rules is None else rules, mesh, **options)


def check_shards(array: Any, layout: flm.TensorLayout) -> None:
    """Every device holds its part."""
    assert layout.device_mesh is not None
    assert_lies(array, layout.dims(array.ndim), layout.device_mesh)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, with_lora: bool = False) -> None:
        self.up = nnx.Linear(8, 16, rngs=rngs)
        if with_lora:
            self.up = nnx.LoRA(8, 2, 16, base_module=self.up, rngs=rngs)
        self.down = nnx.LoRALinear(16, 8, lora_rank=2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(self.up(x))


def make_model() -> Model:
    return Model(nnx.Rngs(0))


def make_adapted() -> Model:
    return Model(nnx.Rngs(0), with_lora=True)


def add_lora(model: Any) -> None:
    model.up = nnx.LoRA(8, 2, 16, base_module=model.up, rngs=nnx.Rngs(1))


ADAPTED = {
    "down/bias": (None,),
    "down/kernel": ("model", None),
    "down/lora/lora_a": ("model", None),
    "down/lora/lora_b": (None, None),
    "up/base_module/bias": (None,),
    "up/base_module/kernel": ("data", "model"),
    "up/lora_a": ("data", None),
    "up/lora_b": (None, "model"),
}


def check_adapted(model: Any, mesh: flm.DeviceMesh) -> None:
    """Every array is in its shards, on the devices where they belong."""
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        axes = ADAPTED["/".join(map(str, path))]
        check_shards(variable[...], flm.TensorLayout(axes, mesh))


# -------------------------------------------------------------- names and shapes


@pytest.mark.parametrize(
    ("path", "role", "partner", "places"),
    [
        ("up/lora_a", "A", "up/lora_b", ["up"]),
        ("up/lora_B", "B", "up/lora_A", ["up"]),
        ("up/lora/lora_b", "B", "up/lora/lora_a", ["up/lora", "up"]),
        ("q/lora/a", "A", "q/lora/b", ["q/lora", "q"]),
        ("q/kernel_lora_a", "A", "q/kernel_lora_b", ["q/kernel"]),
        ("q/lora_kernel_b", "B", "q/lora_kernel_a", ["q/kernel"]),
        ("q/lora_A/kernel", "A", "q/lora_B/kernel", ["q"]),
        ("q/lora_down/kernel", "A", "q/lora_up/kernel", ["q"]),
        ("b/q_lora/lora_a", "A", "b/q_lora/lora_b", ["b/q_lora", "b/q", "b"]),
        ("b/lora_q/a", "A", "b/lora_q/b", ["b/lora_q", "b/q", "b"]),
        ("lora_a", "A", "lora_b", [""]),
    ],
)
def test_what_a_path_says(
    path: str, role: str, partner: str, places: list[str]
) -> None:
    matrix = matrix_of(path)
    assert matrix is not None
    assert (matrix.role, matrix.partner, places_of(matrix)) == (role, partner, places)


@pytest.mark.parametrize(
    "path", ["up/kernel", "a", "flora/c", "lora/alpha", "explora/a", "lora_alpha/x"]
)
def test_paths_of_other_things(path: str) -> None:
    assert matrix_of(path) is None


N = None


@pytest.mark.parametrize(
    ("kernel", "a", "b", "dims_of_a", "dims_of_b"),
    [
        ((8, 16), (8, 2), (2, 16), (0, N), (N, 1)),
        ((8, 8), (8, 2), (2, 8), (0, N), (N, 1)),  # in before out
        ((2, 2), (2, 2), (2, 2), (0, N), (N, 1)),
        ((16, 8), (8, 2), (2, 16), (1, N), (N, 0)),  # a kernel (out, in)
        ((3, 8, 16), (3, 8, 2), (3, 2, 16), (0, 1, N), (0, N, 2)),  # stacked
        ((3, 8, 8), (3, 8, 2), (3, 2, 8), (0, 1, N), (0, N, 2)),
        ((8, 4, 2), (8, 2), (2, 4, 2), (0, N), (N, 1, 2)),  # heads
        ((4, 2, 8), (4, 2, 3), (3, 8), (0, 1, N), (N, 2)),
        ((8, 4, 2), (8, 2), (2, 8), (0, N), (N, 1)),  # heads in one dim
        ((4, 2, 8), (8, 2), (2, 8), (0, N), (N, 2)),
        ((4, 16, 2), (16, 3), (3, 4, 2), (1, N), (N, 0, 2)),  # gemma's NDH
        ((2, 4, 16, 3), (16, 2), (2, 2, 4, 3), (2, N), (N, 0, 1, 3)),
        ((3, 3, 8, 16), (3, 3, 8, 2), (2, 16), (0, 1, 2, N), (N, 3)),  # conv
    ],
)
def test_dims_of_matrices(
    kernel: Any, a: Any, b: Any, dims_of_a: Any, dims_of_b: Any
) -> None:
    assert kernel_dims(kernel, a, b, "A") == (dims_of_a,)
    assert kernel_dims(kernel, b, a, "B") == (dims_of_b,)
    for dims, shape in ((dims_of_a, a), (dims_of_b, b)):
        assert len(dims) == len(shape)


@pytest.mark.parametrize(
    ("kernel", "a", "b"),
    [
        ((8,), (8, 2), (2, 8)),
        ((8, 16), (4, 2), (2, 16)),
        ((8, 16), (8, 2), (3, 16)),  # two ranks
        ((8, 16), (8,), (16,)),
        ((8, 16), (), ()),
    ],
)
def test_matrices_of_another_kernel(kernel: Any, a: Any, b: Any) -> None:
    assert kernel_dims(kernel, a, b, "A") == kernel_dims(kernel, b, a, "B") == ()


# ---------------------------------------------------------------------- spellings


@pytest.mark.parametrize(
    ("kernel", "a", "b"),
    [
        ("up/kernel", "up/lora_a", "up/lora_b"),
        ("up/kernel", "up/lora_A", "up/lora_B"),
        ("up/kernel", "up/lora/lora_a", "up/lora/lora_b"),
        ("up/kernel", "up/lora/a", "up/lora/b"),
        ("up/kernel", "up/kernel_lora_a", "up/kernel_lora_b"),
        ("up/kernel", "up/lora_kernel_a", "up/lora_kernel_b"),
        ("up/kernel", "up/lora_a/kernel", "up/lora_b/kernel"),
        ("up/kernel", "up/lora_down/kernel", "up/lora_up/kernel"),
        ("up/kernel", "up_lora/lora_a", "up_lora/lora_b"),
        ("up/kernel", "lora_up/a", "lora_up/b"),
        ("up/kernel/array/qvalue", "up/kernel_lora_a", "up/kernel_lora_b"),
        ("up/base_module/kernel", "up/lora_a", "up/lora_b"),
        ("up/Dense_0/kernel", "up/lora_a", "up/lora_b"),
        ("up/linear/kernel", "up/lora/lora_a", "up/lora/lora_b"),
    ],
)
@pytest.mark.parametrize("match", ["search", "match", "fullmatch"])
def test_spellings(kernel: str, a: str, b: str, match: Any) -> None:
    tree = nested(
        {
            "emb/embedding": struct(24, 8),
            kernel: struct(8, 16),
            a: struct(8, 2),
            b: struct(2, 16),
        }
    )
    rules = {"up/kernel": ("data", "model"), "emb/embedding": ("model", None)}
    if "array" in kernel and match == "fullmatch":
        rules = {"up/kernel/array/qvalue": ("data", "model"), "emb.*": None}
    resolution = mapped(rules, match=match, strict=True).resolve(tree, strict=True)
    found = all_axes(resolution)
    assert found[kernel] == ("data", "model")
    assert (found[a], found[b]) == (("data", None), (None, "model"))
    assert resolution[a].reason == "follows kernel" and resolution[a].owner == kernel


def test_heads_stacks_and_convolutions() -> None:
    tree = nested(
        {
            "q/kernel": struct(8, 4, 2),
            "q/lora_a": struct(8, 2),
            "q/lora_b": struct(2, 4, 2),
            "out/kernel": struct(4, 2, 8),
            "out/kernel_lora_a": struct(8, 3),  # the heads as one dim
            "out/kernel_lora_b": struct(3, 8),
            "layers/kernel": struct(4, 8, 16),
            "layers/lora/lora_a": struct(4, 8, 2),
            "layers/lora/lora_b": struct(4, 2, 16),
            "q_einsum/w": struct(4, 8, 2),  # gemma: heads, in, head size
            "q_einsum/lora/a": struct(8, 3),
            "q_einsum/lora/b": struct(3, 4, 2),
            "conv/kernel": struct(3, 3, 8, 16),
            "conv/kernel_lora_a": struct(3, 3, 8, 2),
            "conv/kernel_lora_b": struct(2, 16),
        }
    )
    rules = {
        "q/kernel": ("data", "model", None),
        "out/kernel": ("model", None, "data"),
        "layers/kernel": ("model", None, "data"),
        "q_einsum/w": ("model", "data", None),
        "conv/kernel": (None, None, "data", "model"),
    }
    found = all_axes(mapped(rules).resolve(tree, strict=True))
    assert {path: axes for path, axes in found.items() if path not in rules} == {
        "q/lora_a": ("data", None),
        "q/lora_b": (None, "model", None),
        "out/kernel_lora_a": ("model", None),
        "out/kernel_lora_b": (None, "data"),
        "layers/lora/lora_a": ("model", None, None),
        "layers/lora/lora_b": ("model", None, "data"),
        "q_einsum/lora/a": ("data", None),
        "q_einsum/lora/b": (None, "model", None),
        "conv/kernel_lora_a": (None, None, "data", None),
        "conv/kernel_lora_b": (None, "model"),
    }


# --------------------------------------------------------------------- precedence


def one(kernel: Any = (8, 16), **names: str) -> dict[str, Any]:
    a, b = names.get("a", "lora_a"), names.get("b", "lora_b")
    tree = {"kernel": struct(*kernel), a: struct(8, 2), b: struct(2, 16)}
    return {"up": tree}


QWIX = {"a": "kernel_lora_a", "b": "kernel_lora_b"}


@pytest.mark.parametrize("kernel", ["kernel", ".*kernel.*", "up", "up/.*"])
def test_a_rule_that_matches_the_kernel_too_is_about_the_kernel(kernel: str) -> None:
    resolution = mapped({kernel: (None, "model")}).resolve(one(**QWIX), strict=True)
    found = all_axes(resolution)
    assert found["up/kernel"] == found["up/kernel_lora_b"] == (None, "model")
    assert found["up/kernel_lora_a"] == (None, None)
    assert resolution.explain("up/kernel_lora_b") == (
        "up/kernel_lora_b (2,16) float32: (None, 'model')\n"
        "  because: from the layout of up/kernel: LoRA B has its out-dim\n"
        f"  rule 1 {kernel!r} → (None, 'model') matches its path, but does not apply\n"
        "  each device holds (2,4), 32 B"
    )
    assert "- as up/kernel" in resolution.report()


def test_a_rule_for_the_matrix_wins() -> None:
    rules = {"kernel$": (None, "model"), "lora_b": ("data", None)}
    resolution = mapped(rules).resolve(one(), strict=True)
    assert all_axes(resolution)["up/lora_b"] == ("data", None)
    assert all_axes(resolution)["up/lora_a"] == (None, None)
    assert resolution["up/lora_b"].reason == "rule"
    # That the rule for the kernel matches it too is no conflict.
    for overlap in ("error", "first", "last"):
        both = {"kernel": (None, "model"), "lora_b": ("data", None)}
        found = all_axes(
            mapped(both, overlap=overlap).resolve(one(**QWIX), strict=True)
        )
        assert found["up/kernel_lora_b"] == ("data", None)
        assert found["up/kernel_lora_a"] == (None, None)
    exact = {"kernel": (None, "model"), "up/kernel_lora_b": None}
    found = all_axes(mapped(exact).resolve(one(**QWIX)))
    assert found["up/kernel_lora_b"] == (None, None)


def test_a_rule_for_everything_else_is_none_for_the_matrix() -> None:
    layout_map = flm.LayoutMap.from_rules(
        [("up/kernel", ("data", "model")), (".*", None)], ABSTRACT
    )
    found = all_axes(layout_map.resolve(make_adapted))
    assert found["up/lora_a"] == ("data", None)
    assert found["up/base_module/kernel"] == ("data", "model")
    assert found["up/base_module/bias"] == (None,)


def test_a_rule_for_the_module_inside_wins() -> None:
    rules = {**RULES, "base_module/kernel": ("model", None)}
    found = all_axes(mapped(rules, overlap="first").resolve(make_adapted))
    assert found["up/base_module/kernel"] == ("model", None)
    assert found["up/lora_a"] == ("model", None)


def test_an_exact_key_reaches_into_the_lora_module() -> None:
    rules = {"kernel": ("model", None), "up/kernel": ("data", "model")}
    resolution = mapped(rules).resolve(make_adapted)
    assert resolution["up/base_module/kernel"].reason == "exact key"
    assert all_axes(resolution)["up/lora_b"] == (None, "model")
    assert "its path is 'up/kernel'" in resolution.explain("up/base_module/kernel")


def test_lora_around_lora() -> None:
    def make() -> nnx.Module:
        model = make_adapted()
        model.up = nnx.LoRA(8, 3, 16, base_module=model.up, rngs=nnx.Rngs(2))
        return model

    found = all_axes(mapped(match="fullmatch").resolve(make))
    assert found["up/base_module/base_module/kernel"] == ("data", "model")
    assert found["up/lora_a"] == found["up/base_module/lora_a"] == ("data", None)
    assert found["up/lora_b"] == found["up/base_module/lora_b"] == (None, "model")


def test_other_ranks_are_no_error_for_a_rule_about_the_kernel() -> None:
    tree = {
        "q": {
            "kernel": struct(8, 4, 2),
            "kernel_lora_a": struct(8, 2),
            "kernel_lora_b": struct(2, 4, 2),
        }
    }
    found = all_axes(mapped({"q/kernel": ("data", "model", None)}).resolve(tree))
    assert found["q/kernel_lora_a"] == ("data", None)
    skip = mapped({"q": flm.Rule("q", ("data", "model", None), rank="skip")})
    assert all_axes(skip.resolve(tree)) == found


def test_metadata_on_a_matrix_wins_over_its_kernel() -> None:
    def make() -> nnx.Module:
        return nnx.LoRALinear(
            8,
            16,
            lora_rank=4,
            rngs=nnx.Rngs(0),
            b_metadata={"out_sharding": ("model", None)},
        )

    resolution = mapped({"^kernel": ("data", "model")}).resolve(make)
    found = all_axes(resolution)
    assert found["lora/lora_b"] == ("model", None)
    assert found["lora/lora_a"] == ("data", None)
    assert resolution["lora/lora_b"].reason == "flax metadata"


def test_a_kernel_with_metadata_is_followed() -> None:
    init = nnx.with_partitioning(nnx.initializers.ones, ("data", "model"))
    with nnx.use_eager_sharding(False):
        layer = nnx.LoRALinear(
            8, 16, lora_rank=2, kernel_init=init, rngs=nnx.Rngs(0), use_bias=False
        )
    found = all_axes(mapped({}).resolve(layer))
    assert found["lora/lora_a"] == ("data", None)
    assert found["lora/lora_b"] == (None, "model")


# -------------------------------------------------------------- where it is unclear


def test_without_a_kernel_the_report_says_what_to_do() -> None:
    alone = nnx.state(nnx.eval_shape(make_adapted), nnx.LoRAParam)
    resolution = mapped(strict=False).resolve(alone)
    assert len(resolution.unmatched) == 4
    assert "kernel is not in the tree: resolve the whole model" in resolution.explain(
        "up/lora_a"
    )
    with pytest.raises(
        flm.errors.ResolveError, match="a LoRA matrix whose kernel is not in"
    ):
        mapped(unmatched="error").resolve(alone)
    with pytest.raises(
        flm.errors.ResolveError, match="a LoRA matrix whose kernel is not in"
    ):
        mapped({"kernel": (None, "model")}).resolve(
            {"up": {"kernel_lora_a": struct(8, 2)}}
        )
    ruled = {"lora_a": (None, None), "lora_b": (None, "model")}  # the fix
    found = all_axes(mapped(ruled, unmatched="error").resolve(alone))
    assert found["up/lora_b"] == (None, "model")


def test_a_kernel_without_a_rule_leaves_its_matrices_without_one() -> None:
    resolution = mapped({"other": None}, strict=False).resolve(one())
    assert resolution.unmatched == ("up/kernel", "up/lora_a", "up/lora_b")


def test_a_replicated_kernel_has_replicated_matrices() -> None:
    resolution = mapped({"kernel": None}).resolve(one(), strict=True)
    assert resolution.unmatched == () and resolution["up/lora_a"].owner == "up/kernel"


def test_shapes_that_do_not_tell() -> None:
    tree = {"m": {"w1": struct(8, 16), "w2": struct(8, 16), **one()["up"]}}
    del tree["m"]["kernel"]
    rules = {"w1": ("data", "model"), "w2": ("model", "data")}
    resolution = mapped(rules, strict=False).resolve(tree)
    assert resolution.unmatched == ("m/lora_a", "m/lora_b")
    assert (
        "its shape does not tell which dims of m/w1 (8,16) or m/w2 (8,16) it has"
        in resolution.explain("m/lora_a")
    )
    agreeing = {"w1": ("data", "model"), "w2": ("data", "model")}
    assert all_axes(mapped(agreeing).resolve(tree))["m/lora_a"] == ("data", None)
    with pytest.raises(
        flm.errors.ResolveError, match="does not tell which dims of m/w1"
    ):
        mapped(rules, unmatched="error").resolve(tree)


def test_a_rule_for_all_where_shapes_do_not_tell_is_an_error() -> None:
    tree = {"m": {"w1": struct(8, 16), "w2": struct(16, 8), "lora_a": struct(8, 4)}}
    with pytest.raises(flm.errors.ResolveError) as caught:
        mapped({"m": ("data", "model")}).resolve(tree)
    assert "m/lora_a (8,4): it is a LoRA matrix, and its shape does not tell" in str(
        caught.value
    )


def test_a_problem_of_the_kernel_is_told_once() -> None:
    with pytest.raises(flm.errors.ResolveError) as caught:
        mapped({"kernel": ("model", None, None)}).resolve(one(**QWIX))
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith("up/kernel (8,16): rule 1")


# --------------------------------------------------------------- how models are made


def test_created_with_lora(mesh: flm.DeviceMesh) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", flm.LayoutWarning)
        check_adapted(flm.create(make_adapted, mapped(mesh=mesh)), mesh)


def test_made_in_a_scope_with_lora(mesh: flm.DeviceMesh) -> None:
    with flm.layout_map_scope(mapped(mesh=mesh)):
        model = make_adapted()
    check_adapted(model, mesh)


def test_added_to_a_born_model_and_placed(mesh: flm.DeviceMesh) -> None:
    layout_map = mapped(mesh=mesh)
    model = flm.create(make_model, layout_map)
    kernel = model.up.kernel[...]
    pointers = [memory_of(s.data) for s in kernel.addressable_shards]
    add_lora(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", flm.LayoutWarning)
        assert layout_map.place(model) is model
    check_adapted(model, mesh)
    assert pointers == [  # the kernel was not moved
        memory_of(shard.data)
        for shard in model.up.base_module.kernel[...].addressable_shards
    ]


def test_added_in_jit_and_trained(mesh: flm.DeviceMesh) -> None:
    layout_map = mapped(mesh=mesh)
    model = flm.create(make_model, layout_map)
    x = np.ones((8, 8), np.float32)

    @flm.jit(layout_map=layout_map)
    def add(model: Any, x: Any) -> Any:
        add_lora(model)
        return model(x)

    add(model, x)
    check_adapted(model, mesh)
    optimizer = flm.create_optimizer(
        model, optax.adam(1e-2), layout_map, wrt=nnx.LoRAParam
    )
    moments = optimizer.opt_state[0].mu
    for state in (moments.up.lora_a, moments.down.lora.lora_a):
        assert state[...].sharding.spec[0] in ("data", "model")

    @flm.jit(layout_map=layout_map, donate_argnames=("model", "optimizer"))
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        def loss_of(model: Any) -> Any:
            return (model(x) ** 2).mean()

        which = nnx.DiffState(0, nnx.LoRAParam)
        loss, gradients = nnx.value_and_grad(loss_of, argnums=which)(model)
        optimizer.update(model, gradients)
        return loss

    losses = [float(step(model, optimizer, x)) for _ in range(3)]
    assert losses[2] < losses[0]
    check_adapted(model, mesh)


def test_saved_and_restored(mesh: flm.DeviceMesh, tmp_path: Any) -> None:
    layout_map = mapped(mesh=mesh)
    model = flm.create(make_adapted, layout_map)
    path = str(tmp_path / "checkpoint")
    flm.checkpoint.save(path, model, layout_map=layout_map)
    other = flm.DeviceMesh((4, 2), ("data", "model"))
    restored = flm.checkpoint.restore(
        path, nnx.eval_shape(make_adapted), layout_map=layout_map.on(other)
    )
    check_adapted(restored, other)
    without_code = flm.checkpoint.restore(path, layout_map=layout_map.on(other))
    check_shards(without_code["up"]["lora_a"], flm.TensorLayout(("data", N), other))


def test_optimizer_rules_reach_into_the_lora_module(mesh: flm.DeviceMesh) -> None:
    layout_map = mapped(match="fullmatch", strict=False)
    layout_map.optimizer["up/kernel"] = ("model", None)
    model = nnx.eval_shape(make_adapted)
    optimizer = nnx.eval_shape(
        lambda: nnx.Optimizer(make_adapted(), optax.adam(1.0), wrt=nnx.Param)
    )
    resolution = layout_map.resolve({"model": model, "optimizer": optimizer})
    found = all_axes(resolution)
    assert found["optimizer/opt_state/0/mu/up/base_module/kernel"] == ("model", None)
    assert found["optimizer/opt_state/0/mu/up/lora_b"] == (None, "model")
    assert resolution["optimizer/opt_state/0/mu/up/lora_b"].owner == "up/lora_b"


class LoRADense(nn.Module):
    """A user's own, with the two matrices beside a Dense layer."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        a = self.param("lora_a", nn.initializers.he_uniform(), (x.shape[-1], 2))
        b = self.param("lora_b", nn.initializers.zeros, (2, 16))
        return nn.Dense(16, name="base", use_bias=False)(x) + x @ a @ b


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return LoRADense(name="up")(x)


@pytest.mark.parametrize("how", ["create", "scope", "place"])
def test_linen(how: str, mesh: flm.DeviceMesh) -> None:
    layout_map = mapped({"up/kernel": ("data", "model")}, mesh, match="fullmatch")
    key, x = jax.random.key(0), jnp.ones((2, 8))
    block = flm.layout_map_scope(layout_map) if how == "scope" else None
    with block or contextlib.nullcontext():
        model = LinenModel()
        if how == "create":
            variables = flm.create(model.init, layout_map, key, x)
        else:
            variables = model.init(key, x)
    if how == "place":
        variables = layout_map.place(variables)
    up = variables["params"]["up"]
    check_shards(up["base"]["kernel"], flm.TensorLayout(("data", "model"), mesh))
    check_shards(up["lora_a"], flm.TensorLayout(("data", None), mesh))
    check_shards(up["lora_b"], flm.TensorLayout((None, "model"), mesh))


# -------------------------------------------------------------------- partial trees


def test_parts_of_a_model_have_the_layouts_of_the_whole() -> None:
    layout_map = mapped(strict=False)
    whole = layout_map.resolve(make_adapted)
    state = nnx.state(nnx.eval_shape(make_adapted))
    up, _ = nnx.split_state(state, lambda path, _: path[0] == "up", ...)
    base, rest = nnx.split_state(state, lambda path, _: "lora_a" not in path, ...)
    for part in (up, nnx.to_pure_dict(up), base):
        for leaf in layout_map.resolve(part):
            assert leaf.layout == whole[leaf.path].layout, leaf.path
    assert layout_map.resolve(rest).unmatched == ("down/lora/lora_a", "up/lora_a")


def test_unused_rules_of_a_partial_tree_are_told_once_or_not_at_all(
    mesh: flm.DeviceMesh,
) -> None:
    part = {"up": {"kernel": np.ones((8, 16), np.float32)}}
    layout_map = mapped(mesh=mesh)
    with pytest.warns(flm.LayoutWarning, match="rule 2 'down/kernel' matches no leaf"):
        layout_map.place(part)
    quiet = mapped(mesh=mesh, strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", flm.LayoutWarning)
        layout_map.place(part)  # not again
        placed = quiet.place(part)
    check_shards(placed["up"]["kernel"], flm.TensorLayout(("data", "model"), mesh))
