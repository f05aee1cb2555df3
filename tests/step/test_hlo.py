"""`flm.jit` compiles the same program as a handwritten `jax.jit`.

Both programs have the same function name, the same layouts, and the same order of
leaves: that of the arguments, and within NNX objects that of `nnx.split`. Out come
first the Variables that the step changes, which alone are donated, then its result.

Equal means: the same optimized HLO, shardings, donated buffers and layout of the
results included. Only what says where a line came from is dropped (metadata, tables of
files and frames), and names of instructions are numbered in the order in which they
come, since parameters are named after the arguments in Python.
"""

import difflib
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from shards import bare

import flax_layoutmap as flm

pytestmark = pytest.mark.optimised

P = PartitionSpec
# End of a path → axes. The rules are made of these, and so are the layouts by hand.
LAYOUTS: dict[str, tuple[str | None, ...]] = {
    "up/kernel": (None, "model"),
    "up/bias|norm/(scale|bias|mean|var)": ("model",),
    "down/kernel": ("model", None),
}
ROWS = {name: jax.ShapeDtypeStruct((8, 8), jnp.float32) for name in ("x", "y")}


class MLP(nnx.Module):
    """With statistics and a count of random numbers; a key stays."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def loss(self, batch: Any) -> Any:
        hidden = self.drop(self.norm(nnx.relu(self.up(batch["x"]))))
        return ((self.down(hidden) - batch["y"]) ** 2).mean()


class OneMoreOperation(MLP):
    def loss(self, batch: Any) -> Any:
        return jnp.sqrt(super().loss(batch))


def train(model: Any, optimizer: Any, batch: Any) -> Any:
    loss, grads = nnx.value_and_grad(lambda model: model.loss(batch))(model)
    optimizer.update(model, grads)
    return loss


def state_of(kind: type[MLP]) -> tuple[Any, Any]:
    """Model and optimizer, abstract."""

    def make() -> tuple[Any, Any]:
        model = kind(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    return nnx.eval_shape(make)


def by_rules(layout_map: flm.LayoutMap) -> Any:
    step = flm.jit(train, layout_map=layout_map, donate_argnums=(0, 1))
    return step.lower(*state_of(MLP), ROWS).compile()


def by_hand(
    mesh: Any, kind: type[MLP] = MLP, layouts: Any = LAYOUTS, donates: bool = True
) -> Any:
    graphdef, state = nnx.split(state_of(kind))
    leaves, treedef = jax.tree.flatten((state, ROWS))
    variables = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    kept = [isinstance(variable, nnx.RngKey) for variable in variables]
    changing = [at for at, stays in enumerate(kept) if not stays]

    def by_leaves(*leaves: Any) -> Any:
        state, batch = treedef.unflatten(leaves)
        nodes = nnx.merge(graphdef, state)
        loss = train(*nodes, batch)
        after = jax.tree.leaves(nnx.state(nodes))
        return [after[at] for at in changing], loss

    by_leaves.__name__ = "train"
    before = shardings(state, layouts, mesh)
    rows = [NamedSharding(mesh, P("data"))] * len(ROWS)
    step = jax.jit(
        by_leaves,
        in_shardings=(*before, *rows),
        out_shardings=([before[at] for at in changing], None),
        donate_argnums=changing if donates else (),
    )
    return step.lower(*leaves).compile()


def shardings(tree: Any, layouts: Any, mesh: Any) -> list[NamedSharding]:
    """The layouts of a tree, without the package: by the end of each path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(x, simple=True, separator="/") for x, _ in leaves]
    every = {**layouts, "": ()}  # the first that matches
    axes = [
        next(every[end] for end in every if re.search(f"{end}(/value)?$", name))
        for name in names
    ]
    return [NamedSharding(mesh, P(*some)) for some in axes]


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


def test_the_program_is_the_one_written_by_hand(mesh: flm.DeviceMesh) -> None:
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map.update({f"{end}$": axes for end, axes in LAYOUTS.items()})
    ours, expected = by_rules(layout_map), by_hand(bare(mesh))
    lines = program_of(expected.as_text())
    assert differences(program_of(ours.as_text()), lines) == []
    # And it is what was asked for: sharded, and the state in place, but for the key.
    assert "HloModule jit_train," in lines[0] and "num_partitions=8" in lines[0]
    assert any(" all-reduce(" in line for line in lines)
    aliases = re.findall("(?:may|must)-alias", lines[0])
    assert len(aliases) == len(jax.tree.leaves(state_of(MLP))) - 1
    for name in ("argument", "output", "alias", "temp"):
        size = f"{name}_size_in_bytes"
        found, wanted = (getattr(x.memory_analysis(), size) for x in (ours, expected))
        assert found == wanted > 0


def test_other_programs_are_told_apart(mesh: flm.DeviceMesh) -> None:
    compiled = [
        by_hand(bare(mesh)),
        by_hand(bare(mesh), donates=False),
        by_hand(bare(mesh), OneMoreOperation),
        by_hand(bare(mesh), layouts={"up/bias": (None,), **LAYOUTS}),
    ]
    lines = [program_of(program.as_text()) for program in compiled]
    for one, two in itertools.combinations(lines, 2):
        assert differences(one, two)
    text = compiled[0].as_text()
    assert ".py" in text and program_of(text.replace(".py", ".q")) == lines[0]
