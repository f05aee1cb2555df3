"""flm.pod.plan: operations in the order in which XLA hands them to Shardy."""

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from helpers import needs_libtpu, sent_as_on_cpus
from jax.experimental.shard_alike import shard_alike
from jaxlib.mlir import ir

import flax_layoutmap as flm
from flax_layoutmap.pod._attributes import functions
from flax_layoutmap.pod._hlo import read_program
from flax_layoutmap.pod._order import order_as_xla

KEY = jax.ShapeDtypeStruct((2,), jnp.uint32)
TOKENS = jax.ShapeDtypeStruct((32, 17), jnp.int32)


def order_of(function: Callable[..., Any], *args: Any) -> list[str]:
    """The names of the operations of a function, as they are ordered."""
    given: Any = jax.jit(function).lower(*args).compiler_ir("stablehlo")
    module = given.operation
    block = functions(module)["main"].regions[0].blocks[0]
    with module.context:
        order_as_xla(block)
    module.verify()
    return list(names_of(block))


def names_of(block: Any) -> Iterator[str]:
    for op in block.operations:
        for region in op.regions:
            for inner in region.blocks:
                yield from names_of(inner)
        name = op.operation.name.rpartition(".")[2]
        if name not in ("constant", "return"):
            yield name


def test_each_operation_is_behind_its_operands() -> None:
    def function(x: Any) -> Any:
        last, first = jnp.sin(x), jnp.exp(x)
        return first * last + jnp.log(last)

    assert order_of(function, 1.0) == "exponential sine multiply log add".split()


def test_of_what_uses_one_value_the_first_operand_is_first() -> None:
    def function(x: Any) -> Any:
        first, second, third = jnp.sin(x), jnp.exp(x), jnp.log(x)
        return third / second, second + first

    assert order_of(function, 1.0) == "log exponential divide sine add".split()


def test_what_has_an_effect_is_first() -> None:
    def function(x: Any) -> Any:
        value = jnp.exp(x)
        alike, other = shard_alike(jnp.sin(x), jnp.cos(x))
        return value, other, alike

    names = order_of(function, 1.0)
    assert names == "sine sharding_group cosine sharding_group exponential".split()


EFFECT = """
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %unused = stablehlo.log %x : tensor<4xf32>
  %first = stablehlo.sine %x : tensor<4xf32>
  %pure = stablehlo.custom_call @pure(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %second = stablehlo.cosine %x : tensor<4xf32>
  %said = stablehlo.custom_call @say(%second) {has_side_effect = true}
    : (tensor<4xf32>) -> tensor<4xf32>
  return %first : tensor<4xf32>
}
"""


def test_so_is_a_call_with_an_effect_and_what_nothing_needs_is_last() -> None:
    known: Any = jax.jit(jnp.sin).lower(1.0).compiler_ir("stablehlo")
    with known.context, ir.Location.unknown():
        module = ir.Module.parse(EFFECT)
        block = functions(module.operation)["main"].regions[0].blocks[0]
        order_as_xla(block)
        module.operation.verify()
        names = list(names_of(block))
        targets = re.findall(r"@(pure|say)", str(module))
    assert names == "cosine custom_call sine log custom_call".split()
    assert targets == ["say", "pure"]


def test_loops_are_behind_what_they_use_and_ordered_within() -> None:
    def function(x: Any, y: Any) -> Any:
        used = jnp.cos(y)

        def body(x: Any) -> Any:
            last, first = jnp.sin(x), jnp.exp(x)
            return first * last * used

        return jax.lax.while_loop(jnp.isfinite, body, x) - jnp.tanh(y)

    inside = "exponential sine multiply multiply"
    assert order_of(function, 1.0, 2.0) == (
        f"cosine is_finite {inside} while tanh subtract".split()
    )


class Generator(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(32, 1024, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(1024, 96, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return jnp.tanh(self.out(nnx.relu(self.up(x))))


class Judge(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(96, 256, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(256, 1, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(nnx.relu(self.up(x)))


class Tokens(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(256, 64, rngs=rngs)
        self.up = nnx.Linear(64, 256, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(256, 64, use_bias=False, rngs=rngs)
        self.head = nnx.Linear(64, 256, use_bias=False, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        return self.head(x + self.down(nnx.gelu(self.up(x))))


def with_optimizer(kind: type[nnx.Module]) -> tuple[Any, Any]:
    def make() -> tuple[Any, Any]:
        model = kind(nnx.Rngs(0))  # pyright: ignore[reportCallIssue]
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    return nnx.eval_shape(make)


def judge_what_is_made(
    judge: Any, optimizer: Any, generator: Any, batch: Any, key: Any
) -> Any:
    made = generator(jax.random.normal(key, (32, 32)))

    def loss(judge: Any) -> Any:
        return (nnx.softplus(-judge(batch)) + nnx.softplus(judge(made))).mean()

    value, gradients = nnx.value_and_grad(loss)(judge)
    optimizer.update(judge, gradients)
    return value


def cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def taken(logits: Any, labels: Any) -> Any:
    return jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)


def of_what_is_taken(logits: Any, labels: Any) -> Any:
    """Not linear in it, so that its gradient needs it: of DPO, GRPO and PPO."""
    return jnp.exp(taken(logits, labels)).mean()


def mean_of_what_is_taken(logits: Any, labels: Any) -> Any:
    return taken(logits, labels).mean()


def train_on_tokens(loss: Any, model: Any, optimizer: Any, tokens: Any) -> Any:
    def loss_of(model: Any) -> Any:
        return loss(model(tokens[:, :-1]), tokens[:, 1:])

    value, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return value


@pytest.mark.optimised
def test_two_models_in_one_step_as_the_compiler_has_them() -> None:
    """In JAX's order, the plan had 200,704 bytes of gathers, and 173,831 of sums."""
    layout_map = flm.LayoutMap(flm.DeviceMesh({"f": 8}), batch="f")
    layout_map["up/kernel"] = "f", None
    layout_map["out/kernel"] = None, None
    batch = jax.ShapeDtypeStruct((32, 96), jnp.float32)
    generator = nnx.eval_shape(lambda: Generator(nnx.Rngs(0)))
    args = (*with_optimizer(Judge), generator, batch, KEY)
    step = flm.jit(judge_what_is_made, layout_map=layout_map)
    text = step.lower(*args).compile().as_text() or ""
    program = read_program(text, {"f": 8}, [8])
    report = flm.pod.plan(judge_what_is_made, *args, layout_map=layout_map)
    assert not report.unrecognised and not program.unrecognised
    planned, compiled = map(sent_as_on_cpus, (report.collectives, program.collectives))
    # The compiler for CPUs sums the gradients of both calls of `out` for themselves.
    compiled["f", "all-reduce"] -= 2 * 256 * 4 * 7 // 8
    assert planned == compiled


@needs_libtpu
@pytest.mark.parametrize(
    "loss", [cross_entropy, of_what_is_taken, mean_of_what_is_taken]
)
def test_losses_of_labels_as_the_compiler_for_tpus_has_them(loss: Any) -> None:
    """In JAX's order, the first had three times the gathers, and an all-to-all.

    The second had less of both, and more sums, while gathers from logits were written
    as counted places before they were laid out: the compiler does so of scatters alone.
    """
    layout_map = flm.LayoutMap(flm.DeviceMesh({"f": 8}), batch="f")
    layout_map["embed/embedding"] = None, "f"
    layout_map["(up|head)/kernel"] = "f", None
    layout_map["down/kernel"] = None, "f"
    train = functools.partial(train_on_tokens, loss)
    step = flm.jit(train, layout_map=layout_map)
    args = (*with_optimizer(Tokens), TOKENS)
    report = flm.pod.plan(step, *args, topology="v5e:2x4")
    compiled = flm.pod.compile(step, *args, topology="v5e:2x4")
    assert not report.unrecognised
    assert sent_as_on_cpus(report.collectives) == sent_as_on_cpus(compiled.collectives)
