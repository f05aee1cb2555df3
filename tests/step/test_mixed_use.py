"""Models used by other trainers between steps; long runs; frozen parts."""

import copy
import functools
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from shards import Dims, assert_lies, bare, leaves_of, lies, plain
from steps import DIMS, X, Y, counting, make, rules

import flax_layoutmap as flm

P = PartitionSpec
BATCHES = [(X * scale, Y) for scale in (1.0, 0.5, -0.8, 0.3, 0.9, -0.2, 0.7)]

# Its large epsilon keeps rounding errors small where gradients are.
TX = optax.adam(1e-2, eps=1e-2)

# Orbax's own annotations speak of no pathlib.Path and of any JSON value.
v1: Any = ocp.v1


def loss_of(model: Any, x: Any, y: Any) -> Any:
    return ((model(x) - y) ** 2).mean()


def train(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    loss, grads = nnx.value_and_grad(loss_of)(model, x, y)
    optimizer.update(model, grads)
    return loss


def pair(layout_map: Any = None) -> tuple[Any, Any]:
    """A model and its optimizer; sharded if there is a map."""
    if layout_map is None:
        model = make()
        return model, nnx.Optimizer(model, TX, wrt=nnx.Param)
    model = flm.create(make, layout_map)
    return model, flm.create_optimizer(model, TX, wrt=nnx.Param)


def named(model: Any, optimizer: Any) -> dict[str, Any]:
    """Path → array, as messages have it."""
    return leaves_of({"model": model, "optimizer": optimizer})


def dims_of(path: str, leaf: Any) -> Dims:
    """Where the rules want a leaf of a model, or of its optimizer."""
    found = [dims for key, dims in DIMS.items() if path.endswith(key)]
    return found[0] if found else ((),) * leaf.ndim


def assert_all_lies(nodes: Any, mesh: flm.DeviceMesh) -> None:
    sharded = 0
    for path, leaf in named(*nodes).items():
        sharded += path.endswith(tuple(DIMS))
        assert_lies(leaf, dims_of(path, leaf), mesh)
    assert sharded == 9


def elsewhere(nodes: Any, mesh: flm.DeviceMesh) -> list[str]:
    """The paths of what is committed to another place than the rules want."""
    return [
        path
        for path, leaf in named(*nodes).items()
        if isinstance(leaf, jax.Array) and leaf.committed
        if not lies(leaf, dims_of(path, leaf), mesh)
    ]


@pytest.fixture
def compilations() -> Iterator[list[float]]:
    """How long each compilation of XLA took so far."""
    seen: list[float] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


class Ours:
    """Our step, with one program for the models of all tests."""

    def __init__(self, mesh: flm.DeviceMesh) -> None:
        self.mesh = mesh
        self.layout_map = rules(mesh)
        self.step = flm.jit(
            train, layout_map=self.layout_map, donate_argnames=("model", "optimizer")
        )

    def pair(self) -> tuple[Any, Any]:
        return pair(self.layout_map)

    def refused(self, nodes: Any, at: int, why: str) -> list[str]:
        """The paths that a step refuses; it leaves everything as it was."""
        before = named(*nodes)
        with pytest.raises(flm.LayoutError) as told:
            self.step(*nodes, *BATCHES[at])
        assert all(leaf is before[path] for path, leaf in named(*nodes).items())
        return re.findall(why, str(told.value), re.M)

    def train(self, nodes: Any, at: int) -> float:
        """A step. What was moved it refuses by path; placed, it goes on."""
        moved = elsewhere(nodes, self.mesh)
        if moved:
            assert self.refused(nodes, at, r"^  - (\S+) \(.*: wanted ") == moved
            assert not any(leaf.is_deleted() for leaf in named(*nodes).values())
            model, optimizer = nodes
            self.layout_map.place({"model": model, "optimizer": optimizer})
        loss = float(self.step(*nodes, *BATCHES[at]))
        assert_all_lies(nodes, self.mesh)
        return loss


@pytest.fixture(scope="module")
def ours(mesh: flm.DeviceMesh) -> Ours:
    return Ours(mesh)


class Reference:
    """The same training on one device, by nnx.jit alone.

    Attributes:
        losses: of each step.
        values: path → value, after each step.
    """

    def __init__(self) -> None:
        nodes, step = pair(), nnx.jit(train)
        self.losses: list[float] = []
        self.values: list[dict[str, np.ndarray]] = []
        for batch in BATCHES:
            self.losses.append(float(step(*nodes, *batch)))
            self.values.append({k: plain(leaf) for k, leaf in named(*nodes).items()})

    def assert_after(self, at: int, nodes: Any, losses: list[float]) -> None:
        """The losses and values after step `at`."""
        np.testing.assert_allclose(losses, self.losses[: at + 1], rtol=1e-4)
        found, wanted = named(*nodes), self.values[at]
        assert found.keys() == wanted.keys()
        for path, value in wanted.items():
            np.testing.assert_allclose(
                plain(found[path]), value, rtol=2e-4, atol=2e-5, err_msg=path
            )


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


# ----------------------------------------------------------- other ways to train a step


def functional(graphdef: Any, state: Any, x: Any, y: Any) -> Any:
    model, optimizer = nnx.merge(graphdef, state)
    loss = train(model, optimizer, x, y)
    return nnx.state((model, optimizer)), loss


def by_split(**options: Any) -> Any:
    """Plain `jax.jit` on the split state."""
    step = jax.jit(functional, static_argnums=0, **options)

    def make(*nodes: Any) -> Any:
        def run(x: Any, y: Any) -> Any:
            graphdef, state = nnx.split(nodes)
            state, loss = step(graphdef, state, x, y)
            nnx.update(nodes, state)
            return loss

        return run

    return make


def by_nnx_jit(**options: Any) -> Any:
    return lambda *nodes: functools.partial(nnx.jit(train, **options), *nodes)


WAYS = ["model", "optimizer", "x", "y"]

# Each binds a model and its optimizer before the first of our steps.
OTHERS: dict[str, Any] = {
    "split": by_split(),
    "split, donated": by_split(donate_argnums=1),
    "nnx.jit": by_nnx_jit(),
    "nnx.jit, donated": by_nnx_jit(donate_argnums=(0, 1)),
    "cached_partial": lambda *nodes: nnx.cached_partial(nnx.jit(train), *nodes),
    "eager": lambda *nodes: functools.partial(train, *nodes),
    "jit_partial": lambda *nodes: nnx.jit_partial(train, *nodes, graph=False),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_ways_between_our_steps(
    kind: str,
    ours: Ours,
    reference: Reference,
    long_ways: list[str],
    compilations: list[float],
) -> None:
    nodes = ours.pair()
    other = OTHERS[kind](*nodes)
    losses = [ours.train(nodes, 0), ours.train(nodes, 1)]
    programs, sizes = len(ours.step._programs), ours.step._cache_size()
    for at in (2, 4):
        losses.append(float(other(*BATCHES[at])))
        del compilations[:], long_ways[:]
        losses.append(ours.train(nodes, at + 1))
        # Some of them rebuild parts of the objects, so that they are looked at again.
        assert long_ways in ([], WAYS) and compilations == []
        reference.assert_after(at + 1, nodes, losses)
    # One program, found fast. Of a key, JAX spells in two ways where its data lies.
    assert len(ours.step._programs) == programs
    assert ours.step._cache_size() <= sizes + 1
    del long_ways[:]
    losses.append(ours.train(nodes, 6))
    reference.assert_after(6, nodes, losses)
    assert long_ways == []


# ------------------------------------------------------------------ what others moved


def moved_to(sharding: Any) -> Any:
    return lambda state: jax.device_put(state, sharding)


def through_numpy(state: Any) -> Any:
    """Pickled without JAX; keys, which NumPy does not know, are wrapped again."""
    leaves, treedef = jax.tree.flatten(state)
    keys = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    loaded = pickle.loads(pickle.dumps([plain(leaf) for leaf in leaves]))
    back = [
        jax.random.wrap_key_data(leaf) if is_key else leaf
        for leaf, is_key in zip(loaded, keys, strict=True)
    ]
    return jax.tree.unflatten(treedef, back)


def through_jnp(state: Any) -> Any:
    return jax.tree.map(jnp.asarray, through_numpy(state))


def drift(mesh: Any) -> Any:
    """A jitted function that says nothing of layouts, and brings all to other ones."""
    spread = NamedSharding(mesh, P("data"))

    @jax.jit
    def run(state: Any) -> Any:
        def move(leaf: Any) -> Any:
            free = leaf.ndim == 0 or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            return leaf if free else jax.lax.with_sharding_constraint(leaf, spread)

        return jax.tree.map(move, state)

    return run


# What is done to the state → how many of its 24 arrays our step then refuses.
MOVES: dict[str, tuple[Callable[[Any], Any], int]] = {
    "replicated": (lambda mesh: moved_to(NamedSharding(mesh, P())), 9),
    "replicated on another mesh": (
        lambda mesh: moved_to(
            NamedSharding(Mesh(mesh.devices.reshape(4, 2), ("x", "y")), P())
        ),
        9,
    ),
    "one device": (lambda mesh: moved_to(mesh.devices.flat[1]), 24),
    "drifted": (drift, 20),
    "numpy": (lambda mesh: through_numpy, 0),
    "jnp": (lambda mesh: through_jnp, 0),
}


@pytest.mark.parametrize("kind", MOVES)
def test_state_that_others_have_moved(
    kind: str, ours: Ours, reference: Reference, long_ways: list[str]
) -> None:
    """Either accepted or refused by path, and never silently wrong."""
    make, count = MOVES[kind]
    move, nodes = make(bare(ours.mesh)), ours.pair()
    losses = [ours.train(nodes, 0), ours.train(nodes, 1)]
    programs = len(ours.step._programs)
    nnx.update(nodes, move(nnx.state(nodes)))
    assert len(elsewhere(nodes, ours.mesh)) == count
    losses.append(ours.train(nodes, 2))
    reference.assert_after(2, nodes, losses)
    assert len(ours.step._programs) == programs
    del long_ways[:]
    losses.append(ours.train(nodes, 3))
    reference.assert_after(3, nodes, losses)
    assert long_ways == []


def test_eager_gradients_and_our_update(
    ours: Ours, reference: Reference, long_ways: list[str]
) -> None:
    """A State of gradients is state too: made by others, it is accepted or refused."""

    def apply(model: Any, optimizer: Any, grads: Any) -> None:
        optimizer.update(model, grads)

    update = flm.jit(
        apply, layout_map=ours.layout_map, donate_argnames=("model", "optimizer")
    )
    nodes, losses = ours.pair(), []
    gradients = nnx.jit(nnx.value_and_grad(loss_of))
    for at in range(3):
        loss, grads = gradients(nodes[0], *BATCHES[at])
        if at == 1:
            everywhere = NamedSharding(bare(ours.mesh), P())
            grads = jax.device_put(grads, everywhere)
            with pytest.raises(flm.LayoutError, match="grads/up/kernel .*: wanted P"):
                update(*nodes, grads)
            grads = ours.layout_map.place(grads)
        update(*nodes, grads)
        losses.append(float(loss))
        reference.assert_after(at, nodes, losses)
        assert_all_lies(nodes, ours.mesh)
    assert len(update._programs) == 1


# -------------------------------------------------------------------------- checkpoints


def numeric(nodes: Any) -> Any:
    """All but the keys, which Orbax does not know."""
    return nnx.to_pure_dict(nnx.state(nodes, nnx.Not(nnx.RngKey)))


def orbax_v1(nodes: Any, path: Path, ours: Ours) -> Callable[[], None]:
    state = numeric(nodes)
    v1.save(path, state)
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )

    def restore() -> None:
        own = nnx.state(nodes, nnx.Not(nnx.RngKey))
        nnx.replace_by_pure_dict(own, v1.load(path, target))
        nnx.update(nodes, own)

    return restore


def standard_checkpointer(nodes: Any, path: Path, ours: Ours) -> Callable[[], None]:
    """As NumPy arrays, without any layout."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, numeric(nodes))

    def restore() -> None:
        own = nnx.state(nodes, nnx.Not(nnx.RngKey))
        host = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), numeric(nodes))
        with ocp.StandardCheckpointer() as checkpointer:
            nnx.replace_by_pure_dict(own, checkpointer.restore(path, host))
        nnx.update(nodes, own)

    return restore


def our_checkpoint(nodes: Any, path: Path, ours: Ours) -> Callable[[], None]:
    tree = dict(zip(("model", "optimizer"), nodes, strict=True))
    flm.checkpoint.save(path, tree, layout_map=ours.layout_map)

    def restore() -> None:
        restored = flm.checkpoint.restore(path, tree, layout_map=ours.layout_map)
        assert restored["model"] is nodes[0] and restored["optimizer"] is nodes[1]

    return restore


@pytest.mark.parametrize("save", [orbax_v1, standard_checkpointer, our_checkpoint])
def test_going_back_to_a_checkpoint(
    save: Callable[[Any, Path, Ours], Callable[[], None]],
    ours: Ours,
    reference: Reference,
    long_ways: list[str],
    tmp_path: Path,
) -> None:
    nodes = ours.pair()
    losses = [ours.train(nodes, 0), ours.train(nodes, 1)]
    restore = save(nodes, tmp_path / "state", ours)
    for at in (5, 6):
        ours.train(nodes, at)
    restore()
    losses.append(ours.train(nodes, 2))
    reference.assert_after(2, nodes, losses)
    del long_ways[:]
    losses.append(ours.train(nodes, 3))
    reference.assert_after(3, nodes, losses)
    assert long_ways == []


# ------------------------------------------------------------------ copies and trainers


@pytest.mark.parametrize("kind", ["deepcopy", "clone"])
def test_copies_train_apart(
    kind: str, ours: Ours, reference: Reference, long_ways: list[str]
) -> None:
    nodes = ours.pair()
    losses = [ours.train(nodes, 0), ours.train(nodes, 1)]
    if kind == "deepcopy":
        twins = copy.deepcopy(nodes)
    else:
        twins = nnx.clone(nodes)
        nnx.update(twins, jax.tree.map(jnp.copy, nnx.state(nodes)))
    assert_all_lies(twins, ours.mesh)
    programs, others = len(ours.step._programs), list(losses)
    for at in (2, 3, 4):
        others.append(ours.train(twins, at))
        if at == 2:
            reference.assert_after(1, nodes, losses)
        losses.append(ours.train(nodes, at))
        reference.assert_after(at, twins, others)
        reference.assert_after(at, nodes, losses)
    assert len(ours.step._programs) == programs
    del long_ways[:]
    ours.train(twins, 5)
    ours.train(nodes, 5)
    assert long_ways == []


@pytest.mark.usefixtures("donation_after_reads")
def test_a_clone_that_shares_its_arrays(ours: Ours, reference: Reference) -> None:
    """`nnx.clone` copies no array: what one of the two gives away is gone for both."""
    nodes = ours.pair()
    losses = [ours.train(nodes, 0), ours.train(nodes, 1)]
    twins = nnx.clone(nodes)
    losses.append(ours.train(twins, 2))
    assert ours.refused(nodes, 2, "^model/[^:]*: deleted, as an earlier call donated")
    nnx.update(nodes, jax.tree.map(jnp.copy, nnx.state(twins)))
    for each in (twins, nodes):
        reference.assert_after(3, each, [*losses, ours.train(each, 3)])


class Trainer:
    """Somebody else's: owns the split state, and writes it back at the end."""

    def __init__(self, *nodes: Any) -> None:
        self._nodes = nodes
        self._graphdef, self._state = nnx.split(nodes)
        self._step = jax.jit(functional, static_argnums=0, donate_argnums=1)

    def fit(self, batches: Any) -> list[float]:
        losses = []
        for x, y in batches:
            self._state, loss = self._step(self._graphdef, self._state, x, y)
            losses.append(float(loss))
        return losses

    def finish(self) -> None:
        nnx.update(self._nodes, self._state)


@pytest.mark.usefixtures("donation_after_reads")
def test_a_trainer_of_others(
    ours: Ours, reference: Reference, long_ways: list[str]
) -> None:
    nodes = ours.pair()
    losses = [ours.train(nodes, 0), ours.train(nodes, 1)]
    trainer = Trainer(*nodes)
    losses += trainer.fit(BATCHES[2:4])
    # Until it gives them back, the arrays are the trainer's: ours were donated.
    assert ours.refused(nodes, 4, "^model/[^:]*: deleted, as an earlier call donated")
    trainer.finish()
    losses.append(ours.train(nodes, 4))
    reference.assert_after(4, nodes, losses)
    del long_ways[:]
    losses.append(ours.train(nodes, 5))
    reference.assert_after(5, nodes, losses)
    assert long_ways == []


def test_a_train_state_in_turns(mesh: flm.DeviceMesh, long_ways: list[str]) -> None:
    net = linen.Dense(16, kernel_init=counting)
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["kernel"] = (None, "model")

    def build() -> Any:
        params = net.init(jax.random.key(0), jnp.ones((1, 8)))["params"]
        return TrainState.create(apply_fn=net.apply, params=params, tx=TX)

    def update(state: Any, x: Any) -> Any:
        def loss_of(params: Any) -> Any:
            return (state.apply_fn({"params": params}, x) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), loss

    step = flm.jit(update, layout_map=layout_map, donate_argnames="state")
    other = jax.jit(update, donate_argnums=0)
    state, wanted = flm.create(build, layout_map), build()
    plan = jax.tree.leaves(layout_map.shardings(state))
    for at, (x, _) in enumerate(BATCHES):
        if at % 3 == 2:
            state, loss = other(state, x)
        else:
            state, loss = step(state, x)
            assert [leaf.sharding for leaf in jax.tree.leaves(state)] == plan
        wanted, expected = other(wanted, x)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        moved = [
            leaf.sharding
            for leaf, sharding in zip(jax.tree.leaves(state), plan, strict=True)
            if not leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        ]
        if moved:
            with pytest.raises(flm.LayoutError, match=f"^{len(moved)} arrays are not"):
                step(state, x)
            state = layout_map.place(state)
        if at == 2:
            del long_ways[:]
    for leaf, value in zip(*map(jax.tree.leaves, (state, wanted)), strict=True):
        np.testing.assert_allclose(leaf, value, rtol=1e-4, atol=1e-6)
    assert_lies(state.params["kernel"], ((), ("model",)), mesh)
    assert_lies(state.opt_state[0].nu["kernel"], ((), ("model",)), mesh)
    assert_lies(state.step, (), mesh, np.int32(len(BATCHES)))
    assert len(step._programs) == 1
    # Only what is refused is taken apart.
    assert len(long_ways) in (0, 2)


# ----------------------------------------------------------------------- nothing drifts


HYPERPARAMETERS = ["b1", "b2", "eps", "eps_root", "learning_rate"]


def scaled(model: Any, optimizer: Any, x: Any, y: Any, rate: Any) -> Any:
    loss, grads = nnx.value_and_grad(loss_of)(model, x, y)
    optimizer.update(model, jax.tree.map(lambda grad: grad * (rate / 4), grads))
    return loss


def test_compilations_are_seen(compilations: list[float]) -> None:
    """The control: what is counted below can be seen."""
    function = jax.jit(lambda x: x + 1)
    function(np.ones(3))
    function(np.ones(3))
    assert len(compilations) == 1
    function(np.ones(4))
    assert len(compilations) == 2


@pytest.mark.slow
def test_nothing_drifts_in_a_hundred_steps(
    mesh: flm.DeviceMesh, compilations: list[float], long_ways: list[str]
) -> None:
    layout_map = rules(mesh)
    schedule = optax.linear_schedule(1e-2, 1e-3, 100)
    tx = optax.inject_hyperparams(optax.adam)(learning_rate=schedule)
    model = flm.create(make, layout_map)
    optimizer = flm.create_optimizer(model, tx, wrt=nnx.Param)
    step = flm.jit(
        scaled, layout_map=layout_map, donate_argnames=("model", "optimizer")
    )
    spellings: list[Callable[[Any], Any]] = [
        np.asarray,
        jnp.asarray,
        lambda x: jax.device_put(x, NamedSharding(bare(mesh), P("data"))),
        lambda x: jax.device_put(x, NamedSharding(bare(mesh), P("data", None))),
    ]
    rates = [(2, 3), (np.float32(2.5), jnp.float32(1.5))]
    # Two shapes, two modes, and numbers or arrays: eight programs. All else is one.
    lap = [
        (spell(X[:rows]), spell(Y[:rows]), mode, pair[number % 2])
        for number, spell in enumerate(spellings)
        for rows in (8, 4)
        for mode in ("train", "eval")
        for pair in rates
    ]
    assert len(lap) == 32
    shardings: dict[str, Any] = {}
    del compilations[:]
    for count in range(100):
        x, y, mode, rate = lap[count % len(lap)]
        getattr(model, mode)()
        loss = step(model, optimizer, x, y, rate)
        assert loss.sharding.device_set == set(mesh.devices.flat)
        if not shardings:
            leaves = named(model, optimizer)
            shardings = {path: leaf.sharding for path, leaf in leaves.items()}
        if count == 7:
            assert len(compilations) == step._cache_size() == len(step._programs) == 8
        if count == len(lap) - 1:
            # To spread an array of one device, JAX itself compiles a slice per shape.
            assert len(compilations) <= 8 + 4
            del compilations[:], long_ways[:]
    assert step._cache_size() == len(step._programs) == 8
    assert compilations == [] and long_ways == []
    leaves = named(model, optimizer)
    assert {path: leaf.sharding for path, leaf in leaves.items()} == shardings
    assert_all_lies((model, optimizer), mesh)
    scalars = {path: leaf for path, leaf in leaves.items() if leaf.ndim == 0}
    assert sorted(scalars) == [
        "model/drop/rngs/count",
        "model/drop/rngs/key",
        "optimizer/opt_state/count",
        *(f"optimizer/opt_state/hyperparams/{name}" for name in HYPERPARAMETERS),
        "optimizer/opt_state/hyperparams_states/learning_rate/count",
        "optimizer/opt_state/inner_state/0/count",
        "optimizer/step",
    ]
    for leaf in scalars.values():
        assert leaf.committed and isinstance(leaf.sharding, NamedSharding)
        assert leaf.sharding.device_set == set(mesh.devices.flat)
        assert not getattr(leaf, "weak_type", False)
    assert int(optimizer.step[...]) == 100
    rate = optimizer.opt_state.hyperparams["learning_rate"][...]
    np.testing.assert_allclose(rate, schedule(99), rtol=1e-5)


# ----------------------------------------------------------------------- what is frozen


class Tuned(nnx.Module):
    """Frozen kernels of a shape that nothing else has, with LoRA on top."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.up = nnx.LoRALinear(
            8, 24, lora_rank=2, kernel_init=counting, b_initializer=counting, rngs=rngs
        )
        self.norm = nnx.BatchNorm(24, use_running_average=True, rngs=rngs)
        self.down = nnx.Linear(24, 8, kernel_init=counting, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(jnp.tanh(self.norm(self.up(x))))


def tune(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    wrt = nnx.DiffState(0, nnx.LoRAParam)
    loss, grads = nnx.value_and_grad(loss_of, argnums=wrt)(model, x, y)
    optimizer.update(model, grads)
    return loss


LORA = ["up/lora/lora_a", "up/lora/lora_b"]


@pytest.mark.parametrize("donate", [("model", "optimizer"), ()], ids=["donated", "not"])
def test_what_is_frozen_is_not_touched(
    donate: Any, mesh: flm.DeviceMesh, long_ways: list[str]
) -> None:
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["kernel|lora_b"] = (None, "model")
    model = flm.create(Tuned, layout_map)
    optimizer = flm.create_optimizer(model, TX, wrt=nnx.LoRAParam)
    plain_model = Tuned()
    reference = plain_model, nnx.Optimizer(plain_model, TX, wrt=nnx.LoRAParam)
    step = flm.jit(tune, layout_map=layout_map, donate_argnames=donate)
    other = nnx.jit(tune)
    lowered = step.lower(model, optimizer, X, Y)
    del long_ways[:]
    for at in range(5):
        if at == 3:
            # It makes every array anew; what is frozen then stays that one.
            np.testing.assert_allclose(
                other(model, optimizer, X, Y), other(*reference, X, Y), rtol=1e-5
            )
            layout_map.place({"model": model, "optimizer": optimizer})
        before = named(model, optimizer)
        loss = step(model, optimizer, X, Y)
        np.testing.assert_allclose(loss, other(*reference, X, Y), rtol=1e-5)
        after = named(model, optimizer)
        changed = [path for path, leaf in after.items() if leaf is not before[path]]
        assert changed == [
            *(f"model/{path}" for path in LORA),
            "optimizer/opt_state/0/count",
            *(f"optimizer/opt_state/0/mu/{path}" for path in LORA),
            *(f"optimizer/opt_state/0/nu/{path}" for path in LORA),
            "optimizer/step",
        ]
        assert not any(leaf.is_deleted() for leaf in after.values())
        for path, leaf in before.items():
            assert leaf.is_deleted() == (path in changed and bool(donate)), path
        # The program has these as outputs, and the loss, and nothing else.
        assert len(jax.tree.leaves(lowered.out_info)) == len(changed) + 1
        given = [info.donated for info in jax.tree.leaves(lowered.args_info)]
        assert sum(given) == (len(changed) if donate else 0)
        assert at in (0, 3) or long_ways == []
        del long_ways[:]
    kernels = {(8, 24), (24, 8)}
    assert not kernels & {info.shape for info in jax.tree.leaves(lowered.out_info)}
    assert len(step._programs) == step._cache_size() == 1
    for path, leaf in named(*reference).items():
        np.testing.assert_allclose(
            plain(named(model, optimizer)[path]), plain(leaf), rtol=1e-4, atol=1e-6
        )


def test_evaluation_touches_nothing(ours: Ours, long_ways: list[str]) -> None:
    model, optimizer = ours.pair()
    ours.train((model, optimizer), 0)
    model.eval()
    evaluate = flm.jit(loss_of, layout_map=ours.layout_map, donate_argnames="model")
    lowered = evaluate.lower(model, X, Y)
    assert len(jax.tree.leaves(lowered.out_info)) == 1
    assert not any(info.donated for info in jax.tree.leaves(lowered.args_info))
    del long_ways[:]
    before = named(model, optimizer)
    losses = [float(evaluate(model, X, Y)) for _ in range(3)]
    assert len(set(losses)) == 1
    for path, leaf in named(model, optimizer).items():
        assert leaf is before[path] and not leaf.is_deleted()
    assert long_ways == ["model", "x", "y"]
    model.train()
    ours.train((model, optimizer), 1)
    assert long_ways == ["model", "x", "y"]
