"""`flm.jit` compiles the same program as a handwritten `jax.jit`.

Both programs have the same function name, the same layouts, and the same order of
leaves: that of the arguments, and within NNX objects that of `nnx.split`. Out come
first the Variables that the step changes, which alone are donated, then its result.

Equal means: the same optimized HLO, shardings, donated buffers and layout of the
results included. Only what says where a line came from is dropped (metadata, tables of
files and frames), and names of instructions are numbered in the order in which they
come, since parameters are named after the arguments in Python.
"""

import dataclasses
import difflib
import itertools
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec
from shards import bare

import flax_layoutmap as flm

pytestmark = pytest.mark.optimised

P = PartitionSpec
# End of a path → axes. The rules are made of these, and so are the layouts by hand.
Layouts = Mapping[str, tuple[str | None, ...]]


def floats(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def integers(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


class Table(nnx.Variable):
    """What no step changes."""


# ------------------------------------------------------------------------- models


class MLP(nnx.Module):
    """With statistics and a count of random numbers; a key stays."""

    layouts: Layouts = {
        "up/kernel": (None, "model"),
        "up/bias|norm/(scale|bias|mean|var)": ("model",),
        "down/kernel": ("model", None),
    }

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(self.drop(self.norm(nnx.relu(self.up(x)))))

    def loss(self, batch: Any) -> Any:
        return ((self(batch["x"]) - batch["y"]) ** 2).mean()


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.gain = Table(jnp.ones(8))
        self.norm = nnx.RMSNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            4, 8, use_bias=False, decode=False, rngs=rngs
        )
        self.up = nnx.Linear(8, 16, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(16, 8, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm(x) * self.gain[...], mask=mask)
        return x + self.down(nnx.relu(self.up(x)))


class Decoder(nnx.Module):
    """Three layers stacked in one; a table in it stays."""

    layouts: Layouts = {
        "embedding": ("model", None),
        "(query|key|value)/kernel": (None, None, "model", None),
        "out/kernel": (None, "model", None, None),
        "up/kernel": (None, None, "model"),
        "down/kernel": (None, "model", None),
    }

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.layers = nnx.split_rngs(splits=3)(nnx.vmap(Layer))(rngs)

    def __call__(self, tokens: Any) -> Any:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x: Any, layer: Any) -> Any:
            return layer(x)

        return self.embed.attend(forward(self.embed(tokens), self.layers))

    def loss(self, batch: Any) -> Any:
        logits = self(batch["tokens"][:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["tokens"][:, 1:]
        )
        return losses.mean()


class LinenMLP(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(8, name="down")(linen.relu(linen.Dense(16, name="up")(x)))


# --------------------------------------------------------------- programs, both ways


@dataclasses.dataclass(frozen=True)
class Nnx:
    """A step of a model in NNX.

    Attributes:
        model: its class.
        batch: abstract.
        stay: how many of its Variables no step changes.
    """

    model: Any
    batch: Mapping[str, Any]
    stay: int = 0

    @property
    def layouts(self) -> Layouts:
        return self.model.layouts

    def state(self) -> tuple[Any, Any]:
        """Model and optimizer, abstract."""

        def make() -> tuple[Any, Any]:
            model = self.model(nnx.Rngs(0))
            return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

        return nnx.eval_shape(make)

    def by_rules(self, layout_map: flm.LayoutMap) -> Any:
        def train(model: Any, optimizer: Any, batch: Any) -> Any:
            loss, grads = nnx.value_and_grad(lambda model: model.loss(batch))(model)
            optimizer.update(model, grads)
            return loss

        donated = ("model", "optimizer")
        step = flm.jit(train, layout_map=layout_map, donate_argnames=donated)
        return step.lower(*self.state(), self.batch).compile()

    def by_hand(self, mesh: Any, donates: bool = True) -> Any:
        graphdef, state = nnx.split(self.state())
        leaves, treedef = jax.tree.flatten((state, self.batch))
        count = len(jax.tree.leaves(state))
        variables = jax.tree.leaves(
            state, is_leaf=lambda x: isinstance(x, nnx.Variable)
        )
        changing = [
            at
            for at, variable in enumerate(variables)
            if not isinstance(variable, nnx.RngKey | Table)
        ]

        def train(*leaves: Any) -> Any:
            state, batch = treedef.unflatten(leaves)
            model, optimizer = nnx.merge(graphdef, state)
            loss, grads = nnx.value_and_grad(lambda model: model.loss(batch))(model)
            optimizer.update(model, grads)
            after = jax.tree.leaves(nnx.state((model, optimizer)))
            return [after[at] for at in changing], loss

        before = jax.tree.leaves(shardings(state, self.layouts, mesh))
        rows = [NamedSharding(mesh, P("data"))] * (len(leaves) - count)
        step = jax.jit(
            train,
            in_shardings=(*before, *rows),
            out_shardings=([before[at] for at in changing], None),
            donate_argnums=changing if donates else (),
        )
        return step.lower(*leaves).compile()


@dataclasses.dataclass(frozen=True)
class Linen:
    """A step of a TrainState; the function is the same by both ways."""

    batch: Mapping[str, Any]
    layouts: Layouts
    stay: int = 0

    def state(self) -> Any:
        def make() -> Any:
            model = LinenMLP()
            params = model.init(jax.random.key(0), jnp.zeros((1, 8)))["params"]
            return TrainState.create(
                apply_fn=model.apply, params=params, tx=optax.adamw(1e-2)
            )

        return jax.eval_shape(make)

    @staticmethod
    def train(state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            out = state.apply_fn({"params": params}, batch["x"])
            return ((out - batch["y"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), loss

    def by_rules(self, layout_map: flm.LayoutMap) -> Any:
        step = flm.jit(self.train, layout_map=layout_map, donate_argnames="state")
        return step.lower(self.state(), self.batch).compile()

    def by_hand(self, mesh: Any) -> Any:
        state = self.state()
        before = shardings(state, self.layouts, mesh)
        step = jax.jit(
            self.train,
            in_shardings=(before, NamedSharding(mesh, P("data"))),
            out_shardings=(before, None),
            donate_argnums=0,
        )
        return step.lower(state, self.batch).compile()


def shardings(tree: Any, layouts: Layouts, mesh: Any) -> Any:
    """The layouts of a tree, without the package: by the end of each path."""

    def one(path: Any, leaf: Any) -> NamedSharding:
        del leaf
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        for end, axes in layouts.items():
            if re.search(f"{end}(/value)?$", name):
                return NamedSharding(mesh, P(*axes))
        return NamedSharding(mesh, P())

    return jax.tree_util.tree_map_with_path(one, tree)


ROWS = {"x": floats(8, 8), "y": floats(8, 8)}
CASES: dict[str, Any] = {
    "mlp": Nnx(MLP, ROWS, stay=1),
    "decoder": Nnx(Decoder, {"tokens": integers(4, 5)}, stay=1),
    "train_state": Linen(ROWS, MLP.layouts),
}


# --------------------------------------------------------------------- what is equal


def program_of(text: str) -> list[str]:
    """The lines of an HLO text without where they came from; names are numbers."""
    text = re.sub(r', metadata=\{(?:"[^"]*"|[^"}])*\}', "", text)
    tables = "FileNames|FunctionNames|FileLocations|StackFrames"
    text = re.sub(rf"(?m)^(?:{tables})\n(?:.+\n)*", "", text)
    numbers: dict[str, str] = {}

    def number(found: re.Match[str]) -> str:
        return numbers.setdefault(found[0].lstrip("%"), f"%{len(numbers)}")

    # In the head of a computation its parameters stand without the sign: (x: f32[]).
    text = re.sub(r"%[\w.\-]+|[\w.\-]+(?=: )", number, text)
    return [line for line in text.splitlines() if line]


def differences(ours: list[str], by_hand: list[str]) -> list[str]:
    """The first lines that differ; pytest itself is slow on lists of this length."""
    if ours == by_hand:
        return []
    found = difflib.unified_diff(by_hand, ours, "by hand", "ours", lineterm="", n=1)
    return list(itertools.islice(found, 40))


def memory_of(compiled: Any) -> dict[str, int]:
    """Bytes by what they are for; the peak is one, where JAX tells it."""
    found = compiled.memory_analysis()
    names = [name for name in dir(found) if name.endswith("_in_bytes")]
    return {name: getattr(found, name) for name in names}


def aliases(lines: list[str]) -> int:
    """How many inputs give their buffers to results."""
    return len(re.findall("(?:may|must)-alias", lines[0]))


# ------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("name", CASES)
def test_the_program_is_the_one_written_by_hand(
    name: str, mesh: flm.DeviceMesh
) -> None:
    case = CASES[name]
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map.update({f"{end}$": axes for end, axes in case.layouts.items()})
    ours, by_hand = case.by_rules(layout_map), case.by_hand(bare(mesh))
    lines = program_of(by_hand.as_text())
    assert differences(program_of(ours.as_text()), lines) == []
    # And it is what was asked for: sharded, and the state in place.
    assert (
        lines[0].startswith("HloModule jit_train,") and "num_partitions=8" in lines[0]
    )
    assert any(" all-reduce(" in line for line in lines)
    assert aliases(lines) == len(jax.tree.leaves(case.state())) - case.stay
    if name == "decoder":
        assert any(" while(" in line for line in lines)

    memory = memory_of(by_hand)
    assert memory_of(ours) == memory
    for kind in ("argument", "output", "alias", "temp"):
        assert memory[f"{kind}_size_in_bytes"] > 0


class OneMoreOperation(MLP):
    def loss(self, batch: Any) -> Any:
        return jnp.sqrt(super().loss(batch))


class AnotherLayout(MLP):
    layouts: Layouts = {"up/bias": (None,), **MLP.layouts}


def test_other_programs_are_told_apart(mesh: flm.DeviceMesh) -> None:
    case = CASES["mlp"]
    compiled = [
        case.by_hand(bare(mesh)),
        case.by_hand(bare(mesh), donates=False),
        Nnx(OneMoreOperation, ROWS).by_hand(bare(mesh)),
        Nnx(AnotherLayout, ROWS).by_hand(bare(mesh)),
    ]
    lines = [program_of(program.as_text()) for program in compiled]
    for one, two in itertools.combinations(lines, 2):
        assert differences(one, two)
    text = compiled[0].as_text()
    assert ".py" in text and program_of(text.replace(".py", ".q")) == lines[0]
