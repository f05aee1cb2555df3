"""`flm.jit` against the same functions called eagerly, over random histories.

A machine of hypothesis has a model with its optimizer, laid out by rules, and a twin of
both that no rules and no `jit` ever see. It calls steps, and does between them what
programs do: mutate, replace, clone, move. After all of these both must be alike.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from shards import plain
from steps import counting

import flax_layoutmap as flm

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
TX = optax.sgd(0.05, momentum=0.5)


class Net(nnx.Module):
    """Statistics, random numbers, a counter, static attributes, two equal layers."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.one, self.two = layer(rngs), layer(rngs)
        self.two.kernel[...] *= 0.5
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.scale, self.settings = 1, {"sign": 1}

    def __call__(self, x: Any) -> Any:
        hidden = self.drop(jnp.tanh(self.one(self.norm(x))))
        return self.two(hidden) * self.scale * self.settings["sign"]


def layer(rngs: nnx.Rngs) -> Any:
    return nnx.Linear(4, 4, kernel_init=counting, rngs=rngs)


def make() -> tuple[Any, Any]:
    model = Net()
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


# --------------------------------------------------------------------------- steps


def train(model: Any, optimizer: Any, x: Any) -> Any:
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def count(model: Any, optimizer: Any, x: Any) -> Any:
    model.calls[...] += 1
    return {"calls": model.calls[...], "x": x * model.scale}


def cache(model: Any, optimizer: Any, x: Any) -> Any:
    """Make a cache in the first call, and use it in later ones, as decoders do."""
    if not hasattr(model, "cache"):
        model.cache = nnx.Cache(jnp.zeros_like(x))
    model.cache[...] = model.cache[...] * 0.5 + x
    return model.cache[...].sum()


def forget(model: Any, optimizer: Any, x: Any) -> None:
    if hasattr(model, "cache"):
        del model.cache


def swap(model: Any, optimizer: Any, x: Any) -> Any:
    model.one, model.two = model.two, model.one
    return model.one(x)


def edit(model: Any, optimizer: Any, x: Any) -> Any:
    model.scale = 3 - model.scale
    return model.two(x)


def renew(model: Any, optimizer: Any, x: Any) -> Any:
    model.two = layer(nnx.Rngs(1))
    return model.two(x)


STEPS: dict[str, Callable[..., Any]] = {
    step.__name__: step for step in (train, count, cache, forget, swap, edit, renew)
}


TRAIN = nnx.jit(train)


def fail(model: Any, optimizer: Any, x: Any) -> None:
    for step in (train, cache, swap, edit):
        step(model, optimizer, x)
    raise ZeroDivisionError


def rules_for(**layouts: Any) -> flm.LayoutMap:
    layout_map = flm.LayoutMap("data=2,model=4", strict=False)
    for pattern, layout in layouts.items():
        layout_map[pattern] = layout
    return layout_map


MAPS = {
    "columns": rules_for(kernel=(None, "model"), bias=("model",)),
    "rows": rules_for(kernel=("model", None), mean=("model",)),
}
DONATED = ("model", "optimizer")
# One function for all histories, so that few programs are compiled.
JITTED: Any = {
    (name, key, donates): flm.jit(
        step, layout_map=layout_map, donate_argnames=DONATED if donates else ()
    )
    for name, step in {**STEPS, "fail": fail}.items()
    for key, layout_map in MAPS.items()
    for donates in (False, True)
}


# ------------------------------------------------------------------------ comparing


def parts_of(nodes: Any) -> list[tuple[Any, Any]]:
    """The objects and Variables in them, each with its path."""
    kinds = nnx.Variable, nnx.Pytree
    graph = nnx.iter_graph(nodes, graph=True)
    return [(path, part) for path, part in graph if isinstance(part, kinds)]


def described(nodes: Any) -> Any:
    """Paths, types and static attributes; with the values of Variables."""
    structure, values = [], []
    for path, part in parts_of(nodes):
        if isinstance(part, nnx.Variable):
            values.append(("/".join(map(str, path)), part.get_raw_value()))
        attributes = vars(part) if isinstance(part, nnx.Module) else {}
        static = {
            name: str(value)
            for name, value in attributes.items()
            if isinstance(value, bool | int | float | dict)
        }
        structure.append((path, type(part), static))
    return structure, values


def assert_alike(found: Any, expected: Any) -> None:
    (structure, values), (wanted, others) = described(found), described(expected)
    assert structure == wanted
    for (path, value), (_, other) in zip(values, others, strict=True):
        assert value.dtype == other.dtype, path
        np.testing.assert_allclose(
            plain(value), plain(other), rtol=1e-4, atol=1e-5, err_msg=path
        )


class Histories(RuleBasedStateMachine):
    """The nodes of `flm.jit`, and their eager twins."""

    def __init__(self) -> None:
        super().__init__()
        self.key = "columns"
        self.nodes, self.twins = make(), make()
        self.place()

    def place(self) -> None:
        model, optimizer = self.nodes
        MAPS[self.key].place({"model": model, "optimizer": optimizer})

    @rule(
        name=st.sampled_from(list(STEPS)), donates=st.booleans(), on_mesh=st.booleans()
    )
    def step(self, name: str, donates: bool, on_mesh: bool) -> None:
        before = [id(part) for _, part in parts_of(self.nodes)]
        x = flm.distribute_batch(X, MAPS[self.key]) if on_mesh else X
        found = JITTED[name, self.key, donates](*self.nodes, x)
        expected = STEPS[name](*self.twins, X)
        for value, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            np.testing.assert_allclose(value, other, rtol=1e-4, atol=1e-5)
        if name in ("train", "count", "edit"):  # the objects are the caller's own
            assert [id(part) for _, part in parts_of(self.nodes)] == before
        model, optimizer = self.nodes
        # No rule names the cache: it lies where XLA has put it.
        named = nnx.Not(nnx.Cache)
        tree = nnx.state({"model": model, "optimizer": optimizer}, named)
        for leaf, sharding in zip(
            jax.tree.leaves(tree),
            jax.tree.leaves(MAPS[self.key].shardings(tree)),
            strict=True,
        ):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)

    @rule(name=st.sampled_from(["fail", "moved"]), donates=st.booleans())
    def refused(self, name: str, donates: bool) -> None:
        """A step that fails leaves all objects and arrays as they were."""
        structure, values = described(self.nodes)
        if name == "fail":
            with pytest.raises(ZeroDivisionError):
                JITTED["fail", self.key, donates](*self.nodes, X)
        else:
            (other,) = MAPS.keys() - {self.key}
            with pytest.raises(flm.LayoutError, match="arrays are not where"):
                JITTED["train", other, donates](*self.nodes, X)
        now, after = described(self.nodes)
        assert now == structure
        assert [id(value) for _, value in after] == [id(value) for _, value in values]

    @rule(is_eager=st.booleans())
    def other_ways(self, is_eager: bool) -> None:
        """A step that is not ours, on the same objects."""
        (train if is_eager else TRAIN)(*self.nodes, X)
        train(*self.twins, X)
        self.place()

    @rule(on_host=st.booleans())
    def mutate(self, on_host: bool) -> None:
        for model, _ in (self.nodes, self.twins):
            kernel = model.one.kernel
            new = kernel[...] * 0.75
            kernel.set_value(np.asarray(new) if on_host else new)

    @rule(name=st.sampled_from(["train", "eval"]))
    def mode(self, name: str) -> None:
        for model, _ in (self.nodes, self.twins):
            getattr(model, name)()

    @rule(name=st.sampled_from(["scale", "settings"]))
    def attribute(self, name: str) -> None:
        for model, _ in (self.nodes, self.twins):
            if name == "scale":
                model.scale = 3 - model.scale
            else:
                model.settings["sign"] *= -1

    @rule(whole=st.booleans())
    def replace(self, whole: bool) -> None:
        """A module, or a Variable, by one that is nowhere yet."""
        for model, _ in (self.nodes, self.twins):
            new = layer(nnx.Rngs(2))
            if whole:
                model.two = new
            else:
                model.two.bias = nnx.Param(new.bias[...] + 1)

    @rule()
    def clone(self) -> None:
        self.nodes, self.twins = nnx.clone(self.nodes), nnx.clone(self.twins)

    @rule()
    def move(self) -> None:
        (self.key,) = MAPS.keys() - {self.key}
        self.place()

    @invariant()
    def alike(self) -> None:
        assert_alike(self.nodes, self.twins)


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=30, stateful_step_count=20, deadline=None, derandomize=True
)
