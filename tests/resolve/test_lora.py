"""LoRA matrices follow their kernel, in every spelling of the libraries."""

import math
import warnings
from typing import Any

import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from shapes import ABSTRACT, all_axes, nested, struct
from shapes import mapped as map_of
from shards import assert_lies

import flax_layoutmap as flm
from flax_layoutmap._core.jax_internals import memory_of

RULES = {"up/kernel": ("data", "model"), "down/kernel": ("model", None), "bias": None}


def mapped(
    rules: dict[str, Any] | None = None, mesh: Any = ABSTRACT, **options: Any
) -> flm.LayoutMap:
    return map_of(RULES if rules is None else rules, mesh, **options)


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


# ------------------------------------------------------------------ names and shapes

# Where the libraries have a kernel and the matrices A and B.
SPELLINGS = [
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
]


@pytest.mark.parametrize(("kernel", "a", "b"), SPELLINGS)
@pytest.mark.parametrize("match", ["search", "fullmatch"])
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
    if kernel.startswith(("up/Dense_0", "up/linear")):  # as no LoRA of a library
        rules = {"up/.*kernel": ("data", "model"), "emb.*": None}
    resolution = mapped(rules, match=match, strict=True).resolve(tree, strict=True)
    axes = all_axes(resolution)
    assert axes[kernel] == ("data", "model")
    assert (axes[a], axes[b]) == (("data", None), (None, "model"))
    assert resolution[a].reason == "follows kernel" and resolution[a].owner == kernel


@pytest.mark.parametrize("name", ["a", "flora_a", "lora/alpha", "lora_alpha"])
def test_other_things_are_not_lora_matrices(name: str) -> None:
    tree = nested({"up/kernel": struct(8, 16), f"up/{name}": struct(8, 2)})
    resolution = mapped(strict=False).resolve(tree)
    assert resolution.unmatched == (f"up/{name}",)
    assert "LoRA" not in resolution.explain(f"up/{name}")


PARTS = {"data": 2, "model": 4, None: 1}


@st.composite
def adapted_kernels(draw: Any) -> Any:
    """The shape and axes of a kernel; which dims are stacked, in-dims, out-dims."""
    ndim = draw(st.integers(2, 4))
    shape = draw(st.permutations([8, 16, 24, 40]))[:ndim]
    axes = draw(st.permutations(["data", "model", None, None]))[:ndim]
    lead = draw(st.integers(0, ndim - 2))
    order = draw(st.permutations(range(lead, ndim)))
    count = draw(st.integers(1, ndim - lead - 1))
    return shape, axes, [*range(lead)], sorted(order[:count]), sorted(order[count:])


@given(adapted_kernels(), st.booleans(), st.sampled_from([[], [(3, 1)]]))
def test_matrices_have_the_shards_of_their_kernel(
    kernel: Any, is_merged: bool, adapters: list[tuple[int, int]]
) -> None:
    """Also of a stack, of heads (in one dim too), and of several adapters."""
    shape, axes, stacked, *sides = kernel
    # Per dim: its size, and into how many parts it is divided.
    dims = [(size, PARTS[axis]) for size, axis in zip(shape, axes, strict=True)]
    stack, into, out = ([dims[dim] for dim in some] for some in (stacked, *sides))
    if is_merged:
        into, out = (
            [(math.prod(size for size, _ in side), side[0][1])] for side in (into, out)
        )
    rank = (3, 1)
    leaves = {
        "up/kernel": dims,
        "up/lora_a": [*adapters, *stack, *into, rank],
        "up/lora_b": [*adapters, *stack, rank, *out],
    }
    tree = nested(
        {path: struct(*(size for size, _ in dims)) for path, dims in leaves.items()}
    )
    resolution = mapped({"up/kernel": tuple(axes)}).resolve(tree, strict=True)
    for path, dims in leaves.items():
        shard = tuple(size // parts for size, parts in dims)
        assert resolution[path].shard_shape == shard, path


@pytest.mark.parametrize(
    ("kernel", "a", "b", "axes", "axes_of_b"),
    [
        ((8, 8), (8, 2), (2, 8), ("data", None), (None, "model")),  # in before out
        ((4, 4), (4, 4), (4, 4), ("data", None), (None, "model")),
        ((8, 16), (8, 2), (3, 16), None, None),  # two ranks
        ((8, 16), (4, 2), (2, 16), None, None),
    ],
)
def test_equal_sizes_and_other_kernels(
    kernel: Any, a: Any, b: Any, axes: Any, axes_of_b: Any
) -> None:
    tree = {"kernel": struct(*kernel), "lora_a": struct(*a), "lora_b": struct(*b)}
    resolution = mapped({"^kernel": ("data", "model")}, strict=False).resolve(tree)
    if axes is None:
        assert resolution.unmatched == ("lora_a", "lora_b")
    else:
        decided = all_axes(resolution)
        assert (decided["lora_a"], decided["lora_b"]) == (axes, axes_of_b)


# --------------------------------------------------------------------- precedence


def up(a: str = "kernel_lora_a", b: str = "kernel_lora_b") -> dict[str, Any]:
    """A kernel and its matrices, called as by qwix."""
    return {"up": {"kernel": struct(8, 16), a: struct(8, 2), b: struct(2, 16)}}


@pytest.mark.parametrize("kernel", ["kernel", ".*kernel.*", "up", "up/.*"])
def test_a_rule_that_matches_the_kernel_too_is_about_the_kernel(kernel: str) -> None:
    resolution = mapped({kernel: (None, "model")}).resolve(up(), strict=True)
    axes = all_axes(resolution)
    assert axes["up/kernel"] == axes["up/kernel_lora_b"] == (None, "model")
    assert axes["up/kernel_lora_a"] == (None, None)
    assert resolution.explain("up/kernel_lora_b") == (
        "up/kernel_lora_b (2,16) float32: (None, 'model')\n"
        "  because: from the layout of up/kernel: LoRA B has its out-dim\n"
        f"  rule 1 {kernel!r} → (None, 'model') matches its path, but does not apply\n"
        "  each device holds (2,4), 32 B"
    )
    assert " P(-, model)  follows " in resolution.report()


@pytest.mark.parametrize("overlap", ["error", "first", "last"])
@pytest.mark.parametrize("b", ["lora_b", "up/kernel_lora_b"])
def test_a_rule_for_the_matrix_wins(b: str, overlap: Any) -> None:
    """That the rule for the kernel matches it too is not a conflict."""
    rules = {"kernel": (None, "model"), b: ("data", None)}
    resolution = mapped(rules, overlap=overlap).resolve(up(), strict=True)
    axes = all_axes(resolution)
    assert axes["up/kernel_lora_b"] == ("data", None)
    assert axes["up/kernel_lora_a"] == (None, None)
    assert resolution["up/kernel_lora_b"].rule_number == 2


def test_rules_reach_into_lora_modules() -> None:
    inner = {**RULES, "base_module/kernel": ("model", None)}
    axes = all_axes(mapped(inner, overlap="first").resolve(make_adapted))
    assert axes["up/base_module/kernel"] == axes["up/lora_a"] == ("model", None)
    exact = mapped({"kernel": ("model", None), "up/kernel": ("data", "model")})
    resolution = exact.resolve(make_adapted)
    assert resolution["up/base_module/kernel"].reason == "exact key"
    assert "its path is 'up/kernel'" in resolution.explain("up/base_module/kernel")

    def around_lora() -> nnx.Module:
        model = make_adapted()
        model.up = nnx.LoRA(8, 3, 16, base_module=model.up, rngs=nnx.Rngs(2))
        return model

    axes = all_axes(mapped(match="fullmatch").resolve(around_lora))
    assert axes["up/base_module/base_module/kernel"] == ("data", "model")
    assert axes["up/lora_a"] == axes["up/base_module/lora_a"] == ("data", None)
    assert axes["up/lora_b"] == axes["up/base_module/lora_b"] == (None, "model")


def test_metadata_on_a_matrix_wins_over_its_kernel() -> None:
    metadata = {"out_sharding": ("model", None)}
    resolution = mapped({"^kernel": ("data", "model")}).resolve(
        lambda: nnx.LoRALinear(
            8, 16, lora_rank=4, rngs=nnx.Rngs(0), b_metadata=metadata
        )
    )
    axes = all_axes(resolution)
    assert axes["lora/lora_b"] == ("model", None)
    assert axes["lora/lora_a"] == ("data", None)
    assert resolution["lora/lora_b"].reason == "flax metadata"


# -------------------------------------------------------------- where it is unclear


def test_without_a_kernel_the_report_says_what_to_do() -> None:
    alone = nnx.state(nnx.eval_shape(make_adapted), nnx.LoRAParam)
    resolution = mapped(strict=False).resolve(alone)
    assert len(resolution.unmatched) == 4
    text = "a LoRA matrix whose kernel is not in the tree: resolve the whole model"
    assert text in resolution.explain("up/lora_a")
    with pytest.raises(flm.errors.ResolveError, match=text):
        mapped(unmatched="error").resolve(alone)
    with pytest.raises(flm.errors.ResolveError, match=text):
        mapped({"q": (None, "model", None)}).resolve({"q": {"lora_a": struct(8, 2)}})
    ruled = {"lora_a": (None, None), "lora_b": (None, "model")}  # the fix
    axes = all_axes(mapped(ruled, unmatched="error").resolve(alone))
    assert axes["up/lora_b"] == (None, "model")


def test_a_kernel_without_a_rule_leaves_its_matrices_without_one() -> None:
    resolution = mapped({"other": None}, strict=False).resolve(up())
    assert len(resolution.unmatched) == 3


def test_shapes_that_do_not_tell() -> None:
    tree = {"m": {"w1": struct(8, 16), "w2": struct(8, 16), "lora_a": struct(8, 2)}}
    rules = {"w1": ("data", "model"), "w2": ("model", "data")}
    resolution = mapped(rules, strict=False).resolve(tree)
    assert resolution.unmatched == ("m/lora_a",)
    text = "does not tell which dims of m/w1 (8,16) or m/w2 (8,16) it has"
    assert text in resolution.explain("m/lora_a")
    with pytest.raises(flm.errors.ResolveError, match="which dims of m/w1"):
        mapped(rules, unmatched="error").resolve(tree)
    agreeing = {"w1": ("data", "model"), "w2": ("data", "model")}
    assert all_axes(mapped(agreeing).resolve(tree))["m/lora_a"] == ("data", None)


def test_a_problem_of_the_kernel_is_told_once() -> None:
    with pytest.raises(flm.errors.ResolveError) as caught:
        mapped({"kernel": ("model", None, None)}).resolve(up())
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith("up/kernel (8,16): rule 1")


# --------------------------------------------------------------- how models are made


def test_added_to_a_born_model_and_placed(mesh: flm.DeviceMesh) -> None:
    layout_map = mapped(mesh=mesh)
    model: Any = flm.create(make_model, layout_map)
    kernel = model.up.kernel[...]
    pointers = [memory_of(s.data) for s in kernel.addressable_shards]
    model.up = nnx.LoRA(8, 2, 16, base_module=model.up, rngs=nnx.Rngs(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", flm.LayoutWarning)
        assert layout_map.place(model) is model
    axes = {
        "down/bias": (None,),
        "down/kernel": ("model", None),
        "down/lora/lora_a": ("model", None),
        "down/lora/lora_b": (None, None),
        "up/base_module/bias": (None,),
        "up/base_module/kernel": ("data", "model"),
        "up/lora_a": ("data", None),
        "up/lora_b": (None, "model"),
    }
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        dims = flm.TensorLayout(axes["/".join(map(str, path))]).dims(variable.ndim)
        assert_lies(variable[...], dims, mesh)
    base: Any = model.up.base_module
    shards = base.kernel[...].addressable_shards
    assert pointers == [memory_of(shard.data) for shard in shards]  # not moved


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
