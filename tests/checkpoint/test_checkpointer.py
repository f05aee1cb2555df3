"""Training loops: saves during training, resumed runs, data, policies."""

import ast
import asyncio
import contextlib
import json
import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import same
from flax import nnx
from helpers import run_python
from jax.core import Tracer
from same import refused

import flax_layoutmap as flm

v1: Any = ocp.v1
policies = v1.training.save_decision_policies
Checkpointer = flm.checkpoint.Checkpointer


class Model(nnx.Module):
    """Two kernels, random state, statistics."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.dropout(self.norm(nnx.relu(self.up(x)))))


def rules(mesh: str = "data=2,model=4") -> flm.LayoutMap:
    layout_map = flm.LayoutMap(flm.DeviceMesh(mesh), strict=False)
    layout_map["up/kernel"] = ("data", "model")
    layout_map["down/kernel"] = ("model", "data")
    layout_map[r"(^|/)w$"] = ("data", ...)
    return layout_map


def create_fn() -> tuple[Model, Any]:
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


def make_step(layout_map: flm.LayoutMap) -> Callable[..., Any]:
    @flm.jit(layout_map=layout_map, donate_argnames=("model", "optimizer"))
    def train_step(model: Any, optimizer: Any, batch: jax.Array) -> jax.Array:
        def loss_of(model: Any) -> jax.Array:
            return jnp.mean((model(batch) - batch) ** 2)

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return loss

    return train_step


class Batches:
    """An iterator with a state that is no number: what Grain's looks like."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = np.random.default_rng(seed)
        self.count = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        self.count += 1
        return self.generator.normal(size=(8, 8)).astype(np.float32)

    def get_state(self) -> dict[str, Any]:
        return {"count": self.count, "generator": self.generator.bit_generator.state}

    def set_state(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.generator.bit_generator.state = state["generator"]


class Loader:
    """What PyTorch's stateful loaders look like; its state has all kinds of values."""

    def __init__(self) -> None:
        self.state: Any = None

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def train(
    directory: Path,
    steps: int,
    *,
    mesh: str = "data=2,model=4",
    every: Any = 2,
) -> tuple[Any, list[float], Batches]:
    """The user's loop."""
    layout_map = rules(mesh)
    train_step = make_step(layout_map)
    data, losses = Batches(), []
    with Checkpointer(directory, layout_map=layout_map, every=every) as checkpointer:
        state, start = checkpointer.restore_or_init(create_fn, data=data)
        for step in range(start, steps):
            loss = train_step(*state, next(data))
            losses.append(float(loss))
            checkpointer.save(
                step,
                state,
                data=data,
                metadata={"loss": loss},
                force=step == steps - 1,
            )
    return state, losses, data


def bits(tree: Any) -> dict[str, Any]:
    """Path → dtype, shape and bytes of each leaf."""
    return {path: same.bits(leaf) for path, leaf in same.by_path(tree).items()}


def plain_load(path: Path) -> Any:
    """A step as plain Orbax reads it, with targets from its own metadata."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def target_of(leaf: Any) -> Any:
        if not hasattr(leaf, "shape"):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)

    return v1.load(str(path), jax.tree.map(target_of, v1.metadata(str(path)).metadata))


def open_at(directory: Path, **options: Any) -> Any:
    return Checkpointer(directory, layout_map=rules(), **options)


def weights(value: float) -> dict[str, Any]:
    """A tree whose one array lies on the mesh."""
    return rules().place({"w": jnp.full((8, 4), value, jnp.float32)})


# ------------------------------------------------------------------ the loop


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Six steps in one run."""
    return train(tmp_path_factory.mktemp("whole") / "run", 6)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Where another process has done the first three, and its losses."""
    directory = tmp_path_factory.mktemp("three") / "run"
    told = run_python(
        f"import sys; sys.path[:0] = {[str(p) for p in Path(__file__).parents[:2]]!r}\n"
        "import conftest, pathlib, test_checkpointer\n"
        f"place = pathlib.Path({str(directory)!r})\n"
        "print('losses', test_checkpointer.train(place, 3)[1])"
    )
    return directory, ast.literal_eval(told.rpartition("losses ")[2])


def test_resumed_training_has_the_same_bits(
    tmp_path: Path, whole: Any, three: tuple[Path, list[float]]
) -> None:
    shutil.copytree(three[0], tmp_path / "run")
    resumed, losses, data = train(tmp_path / "run", 6)
    assert len(losses) == len(three[1]) == 3
    assert three[1] + losses == whole[1]
    assert bits(resumed) == bits(whole[0])
    assert data.get_state() == whole[2].get_state() and data.count == 6
    # What was restored lies as the rules say, without a full copy on a device.
    kernel = resumed[0].up.kernel[...]
    assert kernel.sharding.spec == jax.sharding.PartitionSpec("data", "model")
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(4, 4)}


def test_resumed_on_another_mesh(
    tmp_path: Path, whole: Any, three: tuple[Path, list[float]]
) -> None:
    shutil.copytree(three[0], tmp_path / "run")
    resumed, losses, _ = train(tmp_path / "run", 6, mesh="data=4,model=2")
    assert resumed[0].up.kernel[...].addressable_shards[0].data.shape == (2, 8)
    np.testing.assert_allclose(losses, whole[1][3:], rtol=1e-4)
    np.testing.assert_allclose(
        resumed[0].up.kernel[...], whole[0][0].up.kernel[...], rtol=1e-3, atol=1e-5
    )


def test_create_fn_is_only_traced(tmp_path: Path) -> None:
    seen: list[bool] = []

    def make() -> dict[str, Any]:
        w = jnp.arange(8.0)
        seen.append(isinstance(w, Tracer))
        return {"w": w, "key": jax.random.key(3)}

    for start in range(2):
        with open_at(tmp_path) as checkpointer:
            state, found = checkpointer.restore_or_init(make)
            assert found == start and (np.asarray(state["w"]) == np.arange(8)).all()
            checkpointer.save(start, state)
    assert seen and all(seen)


def test_what_is_born_lies_in_shards(tmp_path: Path) -> None:
    with open_at(tmp_path / "run") as checkpointer:
        (model, optimizer), start = checkpointer.restore_or_init(create_fn)
    assert start == 0 and not (tmp_path / "run").exists()
    moment = optimizer.opt_state[0].mu["up"]["kernel"][...]
    for array in (model.up.kernel[...], moment):
        assert {shard.data.shape for shard in array.addressable_shards} == {(4, 4)}


def test_without_rules_the_state_is_restored_where_it_is_made(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        return {"w": jnp.arange(4.0), "n": 1}

    for value in (1, 2):
        with Checkpointer(tmp_path) as checkpointer:
            state, start = checkpointer.restore_or_init(make)
            assert (start, state["n"]) == (value - 1, value)
            checkpointer.save(start, {"w": state["w"] + 1, "n": value + 1})
    assert flm.checkpoint.restore(tmp_path / "1", make())["w"][0] == 2


# ------------------------------------------------------- what a save writes


def test_values_are_those_at_the_call(tmp_path: Path) -> None:
    """Donated by the next step, and overwritten on the host, while it is written."""
    layout_map = rules()
    size = 1 << 20
    host = {"n": np.zeros(size, np.int32), "list": [np.zeros(3)]}
    device = layout_map.place({"w": jnp.zeros((8, size // 8))})

    @flm.jit(layout_map=layout_map, donate_argnames=("tree",))
    def step_of(tree: Any) -> Any:
        return {"w": tree["w"] + 1}

    with Checkpointer(tmp_path, layout_map=layout_map) as checkpointer:
        for step in range(4):
            before = device
            checkpointer.save(step, {"device": device, "host": host})
            device = step_of(device)
            # JAX keeps a buffer that somebody reads; its owner may drop it even so.
            before["w"].delete()
            host["n"] += 1
            host["list"][0][:] += 1
    for step in range(4):
        found: Any = plain_load(tmp_path / str(step))
        assert (np.asarray(found["device"]["w"]) == step).all()
        assert (np.asarray(found["host"]["n"]) == step).all()
        assert (np.asarray(found["host"]["list"]["0"]) == step).all()


def test_save_returns_before_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    hold_back(monkeypatch, go_on)
    with open_at(tmp_path) as checkpointer:
        assert checkpointer.save(0, weights(0))
        assert checkpointer.steps == [] and checkpointer.latest is None
        assert "still being saved" in str(Checkpointer.steps.__doc__)
        go_on.set()
        checkpointer.wait()
        assert checkpointer.steps == [0]


def hold_back(monkeypatch: pytest.MonkeyPatch, event: threading.Event) -> None:
    """Lets no save be complete before an event: the last thing is the renaming."""
    rename = os.rename

    def late(source: Any, target: Any, **options: Any) -> None:
        if os.path.basename(os.fspath(target)).isdecimal():
            assert event.wait(60)
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", late)
    monkeypatch.setattr(os, "replace", late)


def test_without_a_with_block_a_save_is_complete_when_it_returns(
    tmp_path: Path,
) -> None:
    first, second = open_at(tmp_path), open_at(tmp_path)
    assert first.save(0, weights(0)) and first.steps == [0]
    # It holds nothing that another one would have to wait for.
    assert second.save(1, weights(1)) and second.steps == [0, 1]
    with refused("step 1 in", "is saved already"):
        second.save(1, weights(1))
    with refused("step 1 was saved there by another program meanwhile"):
        first.save(1, weights(1))


def test_other_programs_read_a_step(tmp_path: Path) -> None:
    layout_map = rules()
    with open_at(tmp_path) as checkpointer:
        checkpointer.save(7, weights(3.0), data=[1], metadata={"loss": 0.5})
    place = tmp_path / "7"
    assert (np.asarray(plain_load(place)["w"]) == 3).all()
    for path in (place, tmp_path):
        step = None if path == place else 7
        ours = flm.checkpoint.restore(path, layout_map=layout_map, step=step)
        assert (np.asarray(ours["w"]) == 3).all()
    with contextlib.closing(ocp.CheckpointManager(tmp_path)) as manager:
        assert manager.latest_step() == 7
        args = ocp.args.Composite(state=ocp.args.StandardRestore())  # pyright: ignore
        found: Any = manager.restore(7, args=args)
    assert (np.asarray(found["state"]["w"]) == 3).all()
    metadata = json.loads((place / "_CHECKPOINT_METADATA").read_text())
    assert metadata["custom_metadata"]["metadata"] == {"loss": 0.5}
    assert metadata["custom_metadata"]["flax_layoutmap"]["schema"] == 1


def test_a_step_has_checksums(tmp_path: Path) -> None:
    for checksums in (True, False):
        place = tmp_path / str(checksums)
        open_at(place, checksums=checksums).save(0, weights(1))
        text = (place / "0/_CHECKPOINT_METADATA").read_text()
        record = json.loads(text)["custom_metadata"]["flax_layoutmap"]
        assert ("checksums" in record) is checksums
    flm.checkpoint.verify(tmp_path / "True/0")
    found = open_at(tmp_path / "True").restore(verify=True)
    assert (np.asarray(found["w"]) == 1).all()


def test_metadata(tmp_path: Path) -> None:
    given = {"loss": jnp.float32(0.5), "n": np.int64(3), "t": (1, "a"), "no": None}
    with open_at(tmp_path) as checkpointer:
        checkpointer.save(0, weights(0), metadata=given)
        checkpointer.save(1, weights(0))
        assert checkpointer.metadata(0) == {
            "loss": 0.5,
            "n": 3,
            "t": [1, "a"],
            "no": None,
        }
        assert checkpointer.metadata() == {}
        with refused("metadata['w'] is a numpy.ndarray", "arrays belong in the tree"):
            checkpointer.save(2, weights(0), metadata={"w": np.ones(2)})
        with refused("metadata['a'] is a dict with other keys than strings"):
            checkpointer.save(2, weights(0), metadata={"a": {1: 2}})
        assert checkpointer.save(2, weights(0))


# ---------------------------------------------------------------------- data

STATES = [
    3,
    "position",
    None,
    [1, 2.5, float("inf"), True],
    {"epoch": 2, "parts": {"a": [1], "b": None}},
    b"\x00\xff",
    (1, (2, [b"x"])),
    {"mt": np.arange(5, dtype=np.uint32), "e": np.zeros((0, 2)), "s": np.float32(1.5)},
]


@pytest.mark.parametrize("state", STATES, ids=str)
def test_states_of_data_come_back(tmp_path: Path, state: Any) -> None:
    before, after = Loader(), Loader()
    before.state = state
    checkpointer = open_at(tmp_path)
    checkpointer.save(0, weights(0), data={"loader": before, "plain": 7})
    checkpointer.restore(data={"loader": after, "plain": 0})
    np.testing.assert_equal(after.state, state)
    assert type(after.state) is type(state) or isinstance(state, np.generic)
    (both,) = checkpointer.data_states()
    np.testing.assert_equal(both["loader"], state)
    assert both["plain"] == 7


def test_data_that_cannot_be_saved(tmp_path: Path) -> None:
    checkpointer = open_at(tmp_path)
    loader = Loader()
    for state, phrase in (
        (object(), "data is a builtins.object"),
        ({"a": [set()]}, "data['a'][0] is a builtins.set"),
        ({1: 2}, "data is a dict with other keys than strings"),
        ({"__tuple__": 2}, "with a key of ours"),
        (jnp.ones(2), "data is a jaxlib"),
        (np.array([None]), "data is a numpy.ndarray"),
    ):
        loader.state = state
        with refused(phrase, "get_state", "load_state_dict"):
            checkpointer.save(0, weights(0), data=loader)
    with refused("data is a builtins.range_iterator"):
        checkpointer.save(0, weights(0), data=iter(range(3)))
    assert checkpointer.steps == [] and checkpointer.save(0, weights(0))


def test_data_is_set_only_where_the_step_could_be_restored(tmp_path: Path) -> None:
    checkpointer, loader = open_at(tmp_path), Loader()
    loader.state = 5
    checkpointer.save(0, weights(0), data=loader)
    loader.state = 6
    with refused("another shape"):
        checkpointer.restore({"w": jnp.ones((4, 4))}, data=loader)
    with refused("data was saved as int, and is to be restored into ['train']"):
        checkpointer.restore(data={"train": loader})
    checkpointer.save(1, weights(1), data={"a": {"b": loader}})
    with refused("data['a'] was saved as ['b'], and is to be restored into ['c']"):
        checkpointer.restore(data={"a": {"c": loader}})
    assert loader.state == 6


def test_data_is_missing_or_left(tmp_path: Path) -> None:
    checkpointer, loader = open_at(tmp_path), Loader()
    checkpointer.save(0, weights(0))
    with refused("has no state of data", "restore without data="):
        checkpointer.restore(data=loader)
    with refused("step 0 in", "has no state of data"):
        checkpointer.data_states()
    checkpointer.save(1, weights(0), data=loader)
    with pytest.warns(flm.LayoutWarning, match="step 1 holds the state of data"):
        checkpointer.restore()


def as_two_processes(place: Path, other: Any) -> None:
    """Makes a step of one process look as if there had been another one."""
    own = json.loads((place / "data/process_0.json").read_text())
    own["processes"] = 2
    del own["digest"]  # which older versions did not write
    (place / "data/process_0.json").write_text(json.dumps(own))
    text = json.dumps({"processes": 2, "state": other})
    (place / "data/process_1.json").write_text(text)


def test_data_of_another_number_of_processes(tmp_path: Path) -> None:
    checkpointer, loader = open_at(tmp_path), Loader()
    loader.state = 5
    for step in range(3):
        checkpointer.save(step, weights(0), data=loader)
    as_two_processes(tmp_path / "0", 5)
    as_two_processes(tmp_path / "1", 6)
    loader.state = None
    checkpointer.restore(step=0, data=loader)
    assert loader.state == 5
    with refused(
        "are those of 2 processes, each of which was somewhere else",
        "checkpointer.data_states(step)",
    ):
        checkpointer.restore(step=1, data=loader)
    assert checkpointer.data_states(1) == [5, 6]
    (tmp_path / "1/data/process_1.json").unlink()
    with refused("are damaged: there are files of the processes [0], written by [2]"):
        checkpointer.restore(step=1, data=loader)
    (tmp_path / "2/data/process_0.json").write_text("{")
    with refused("the states of data in", "are damaged: JSONDecodeError"):
        checkpointer.restore(step=2, data=loader)
    assert loader.state == 5


# ------------------------------------------------------------------ policies


def saved(directory: Path, steps: int, **options: Any) -> list[int]:
    """The steps that are there after a run."""
    with open_at(directory, **options) as checkpointer:
        for step in range(steps):
            last = step == steps - 1
            assert checkpointer.save(step, weights(step), force=last) in (True, False)
    return checkpointer.steps


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"every": 3}, [0, 3, 6, 7]),
        ({"keep": 2}, [6, 7]),
        ({"keep": 1}, [7]),
        ({"every": 2, "keep": 2, "keep_every": 4}, [0, 4, 6, 7]),
        ({"every": policies.FixedIntervalPolicy(5)}, [0, 5, 7]),
        ({"every": policies.SpecificStepsPolicy([2, 3])}, [2, 3, 7]),
        (
            {"keep": v1.training.preservation_policies.EveryNSteps(3), "every": 1},
            [0, 3, 6],
        ),
    ],
    ids=str,
)
def test_which_steps_are_saved_and_kept(
    tmp_path: Path, options: Any, expected: list[int]
) -> None:
    assert saved(tmp_path, 8, **options) == expected


def test_the_best_steps_are_kept_by_their_metadata(tmp_path: Path) -> None:
    best = v1.training.preservation_policies.BestN(
        get_metric_fn=lambda metrics: -metrics["loss"], n=2
    )
    losses = [0.5, 0.1, 0.9, 0.2, 0.8]
    for first, last in ((0, 3), (3, 5)):  # in two runs
        with open_at(tmp_path, keep=best) as checkpointer:
            for step in range(first, last):
                loss = {"loss": losses[step]}
                checkpointer.save(step, weights(0), metadata=loss)
    assert checkpointer.steps == [1, 3]


def test_kept_steps_of_an_earlier_run_count(tmp_path: Path) -> None:
    assert saved(tmp_path, 3) == [0, 1, 2]
    with open_at(tmp_path, keep=2) as checkpointer:
        assert checkpointer.save(3, weights(0))
    assert checkpointer.steps == [2, 3]


def test_the_last_step_that_is_not_saved_is_told(tmp_path: Path) -> None:
    with pytest.warns(
        flm.LayoutWarning, match="step 4 was the last one, and it is not"
    ):
        with open_at(tmp_path, every=3) as checkpointer:
            saves = [checkpointer.save(step, weights(0)) for step in range(5)]
    assert saves == [True, False, False, True, False]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with open_at(tmp_path, every=3) as checkpointer:
            checkpointer.save(5, weights(0), force=True)


# ------------------------------------------------------------------- SIGTERM


def test_sigterm_saves_the_step(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    done = []
    with open_at(tmp_path, every=100) as checkpointer:
        for step in range(50, 60):
            if step == 53:
                os.kill(os.getpid(), signal.SIGTERM)
            done.append(checkpointer.save(step, weights(step)))
            if checkpointer.reached_preemption:
                # It is complete already.
                assert checkpointer.steps == [53]
                break
    assert done == [False, False, False, True]
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_that_no_step_is_saved_for_is_not_lost(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with open_at(tmp_path, every=100) as checkpointer:
            checkpointer.save(100, weights(0))
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard == [signal.SIGTERM]  # the program's own handler is called
            # A second one is no longer ours.
            os.kill(os.getpid(), signal.SIGTERM)
            assert len(heard) == 2
            checkpointer.wait()
        assert len(heard) == 3 and not checkpointer.reached_preemption
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sigterm_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with open_at(tmp_path, every=100) as checkpointer:
            os.kill(os.getpid(), signal.SIGTERM)
            assert not checkpointer.save(99, weights(0))
            assert checkpointer.save(100, weights(0))
            assert not checkpointer.reached_preemption
    finally:
        signal.signal(signal.SIGTERM, before)


def test_in_another_thread_sigterm_is_left_alone(tmp_path: Path) -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def run() -> None:
        with open_at(tmp_path) as checkpointer:
            checkpointer.save(0, weights(0))
            seen.append(signal.getsignal(signal.SIGTERM))
        seen.append(checkpointer.steps)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before, [0]]


# ------------------------------------------------------------ ends of a block


class Stop(Exception):
    """What a user's loop raises."""


@pytest.mark.parametrize("kind", [Stop, KeyboardInterrupt, SystemExit])
def test_an_exception_in_the_block_goes_on_after_the_save(
    tmp_path: Path, kind: type[BaseException]
) -> None:
    checkpointer = open_at(tmp_path)
    with pytest.raises(kind):
        with checkpointer:
            checkpointer.save(0, weights(0))
            raise kind()
    assert checkpointer.steps == [0]
    with refused("is closed; make a new one"):
        checkpointer.save(1, weights(0))


def failing(monkeypatch: pytest.MonkeyPatch, text: str = "no space left") -> None:
    """Lets every save fail in the background, at its end."""

    def rename(source: Any, target: Any, **options: Any) -> None:
        raise OSError(28, text)

    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "replace", rename)


def test_a_failed_save_is_raised_at_the_end_of_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch)
    with refused("the save of step 0 to", "failed, and nothing was kept: ", "no space"):
        with open_at(tmp_path) as checkpointer:
            checkpointer.save(0, weights(0))
    assert checkpointer.steps == []


@pytest.mark.parametrize("kind", [Stop, KeyboardInterrupt, SystemExit])
def test_a_failed_save_and_an_exception_are_both_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    """An end of the data that the user catches must not hide it, nor `exit(0)`."""
    failing(monkeypatch)
    with pytest.raises(flm.errors.CheckpointError, match="no space left") as caught:
        with open_at(tmp_path) as checkpointer:
            checkpointer.save(0, weights(0))
            raise kind(0)
    error: BaseException | None = caught.value
    chain = []
    while error is not None:
        chain.append(type(error))
        error = error.__cause__ or error.__context__
    assert kind in chain and OSError in chain


def test_a_failed_save_is_raised_by_the_next_one_and_the_run_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = open_at(tmp_path, keep=2)
    with checkpointer:
        checkpointer.save(0, weights(0))
        checkpointer.wait()
        with monkeypatch.context() as patch:
            failing(patch)
            assert checkpointer.save(1, weights(1))
            with refused("the save of step 1 to", "no space left"):
                checkpointer.wait()
            checkpointer.save(2, weights(2))
            with refused("the save of step 2 to", "no space left"):
                checkpointer.save(3, weights(3))
        assert checkpointer.latest == 0
        for step in (2, 5):  # the same step may be tried again
            assert checkpointer.save(step, weights(step))
    assert checkpointer.steps == [2, 5]
    assert not list(tmp_path.glob("*tmp*"))


def test_a_step_that_is_not_due_tells_of_a_failed_save_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch)
    with refused("the save of step 0 to", "no space left"):
        with open_at(tmp_path, every=10**6) as checkpointer:
            checkpointer.save(0, weights(0))
            for step in range(1, 600):
                time.sleep(0.05)
                assert not checkpointer.save(step, weights(0))
            pytest.fail("nobody was told")


def test_a_generator_that_is_closed_finishes_its_save(tmp_path: Path) -> None:
    def loop() -> Iterator[int]:
        with open_at(tmp_path) as checkpointer:
            for step in range(9):
                checkpointer.save(step, weights(step))
                yield step

    running = loop()
    assert next(running) == 0 and next(running) == 1
    running.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert open_at(tmp_path).steps == [0, 1]


def test_it_works_in_a_running_event_loop(tmp_path: Path) -> None:
    async def main() -> int:
        with open_at(tmp_path) as checkpointer:
            for step in range(3):
                checkpointer.save(step, weights(step))
                await asyncio.sleep(0)
        with open_at(tmp_path) as checkpointer:
            tree, start = checkpointer.restore_or_init(lambda: {"w": jnp.ones((8, 4))})
        assert (np.asarray(tree["w"]) == 2).all()
        return start

    assert asyncio.run(main()) == 3


# --------------------------------------------------------------------- errors


def test_steps_that_cannot_come_next(tmp_path: Path) -> None:
    with open_at(tmp_path, every=2) as checkpointer:
        checkpointer.save(4, weights(0))
        with refused("step 4 in", "is saved already; call save once in a step"):
            checkpointer.save(4, weights(0), force=True)
        with refused("step 3 comes before 4", "restore_or_init says where to go on"):
            checkpointer.save(3, weights(0))
        with refused("a step is not negative, and -1 is"):
            checkpointer.save(-1, weights(0))
        with refused("a step is a whole number, not 1.5"):
            checkpointer.save(1.5, weights(0))
        assert checkpointer.save(np.int64(6), weights(0))
    with refused("was used already; make a new one for each `with` block"):
        with checkpointer:
            pass
    # A new run that does not ask where to go on.
    with open_at(tmp_path, every=100) as checkpointer:
        with refused("step 0 comes before 6"):
            checkpointer.save(0, weights(0))


def test_directories_that_hold_no_steps(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused("file is a file; the steps need a directory"):
        Checkpointer(tmp_path / "file")
    with refused("cannot save to", "file is a file, so no directory can be made in it"):
        open_at(tmp_path / "file" / "below").save(0, weights(0))
    flm.checkpoint.save(tmp_path / "one", {"w": jnp.ones(2)})
    with refused("is a checkpoint itself", "the one above it, or a new one"):
        Checkpointer(tmp_path / "one")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with refused("is a link to what does not exist"):
        Checkpointer(tmp_path / "link")
    with refused("there is no step in"):
        Checkpointer(tmp_path / "new").restore()


@pytest.mark.skipif(
    os.geteuid() == 0,
    reason="Root may write everywhere, so no directory is read-only for this test.",
)
def test_a_read_only_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with refused("cannot be written to"):
        open_at(tmp_path).save(0, weights(0))


@pytest.mark.parametrize(
    ("options", "phrase"),
    [
        ({"every": 0}, "every=0: give a number of steps"),
        ({"every": True}, "every=True"),
        ({"every": None}, "every=None"),
        ({"keep": 0}, "keep=0: give how many steps to keep"),
        ({"keep": "3"}, "keep='3'"),
        ({"keep_every": 5}, "keep=3, keep_every=10_000"),
        ({"keep": 2, "keep_every": -5}, "keep_every=-5, keep=2"),
    ],
    ids=str,
)
def test_policies_that_make_no_sense(tmp_path: Path, options: Any, phrase: str) -> None:
    with refused(phrase):
        Checkpointer(tmp_path, **options)


def test_what_cannot_be_saved_is_told_before_anything_is_written(
    tmp_path: Path,
) -> None:
    with open_at(tmp_path / "run") as checkpointer:
        with refused("2 problems", "fn", "bad"):
            checkpointer.save(0, {"fn": print, "bad": {1, 2}, **weights(0)})
        odd = flm.LayoutMap(flm.DeviceMesh("data=8"))
        odd["w"] = ("data",)
        with Checkpointer(tmp_path / "run", layout_map=odd) as other:
            with pytest.raises(flm.errors.ResolveError, match="does not divide"):
                other.save(0, {"w": jnp.ones(9)})
        assert not list(tmp_path.glob("run/[0-9]*"))
        assert checkpointer.save(0, weights(0))


def test_the_tree_must_stay_what_it_is(tmp_path: Path) -> None:
    with open_at(tmp_path) as checkpointer:
        checkpointer.save(0, {"w": jnp.ones((8, 2)), "gone": 1})
        with refused(
            "the tree is not the one that was created, restored or saved before",
            "w was float32 (8,2), and is bfloat16 (8,2); gone is missing; new is new",
        ):
            checkpointer.save(1, {"w": jnp.ones((8, 2), jnp.bfloat16), "new": 1})
    with open_at(tmp_path / "other") as checkpointer:
        state, _ = checkpointer.restore_or_init(create_fn)
        with refused(
            "let create_fn return what save gets",
            "0/down/bias is missing",
            "and 43 more",
        ):
            checkpointer.save(0, {"model": state[0], "optimizer": state[1]})
        assert checkpointer.save(0, state)


def test_two_of_them_on_one_directory(tmp_path: Path) -> None:
    with open_at(tmp_path) as first, open_at(tmp_path) as second:
        first.save(0, weights(0))
        with refused("is being saved to by another Checkpointer of this program"):
            second.save(1, weights(0))
        first.wait()
        assert second.latest == 0  # reading is for everybody
    with open_at(tmp_path) as third:
        assert third.save(1, weights(0))


def test_an_unfinished_step_is_ignored_and_removed_by_the_next_save(
    tmp_path: Path,
) -> None:
    saved(tmp_path, 2)
    left = tmp_path / "2.orbax-checkpoint-tmp"
    (left / "state").mkdir(parents=True)
    (left / "state" / "rest").write_text("of a save that was killed")
    with open_at(tmp_path) as checkpointer:
        tree, start = checkpointer.restore_or_init(lambda: {"w": jnp.ones((8, 4))})
        assert start == 2 and left.exists()  # whoever only reads removes nothing
        assert checkpointer.save(2, tree)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "0",
        "1",
        "2",
    ]


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "an empty directory": lambda place: [
        path.unlink() for path in sorted(place.rglob("*")) if path.is_file()
    ],
    "no metadata": lambda place: (place / "_CHECKPOINT_METADATA").unlink(),
    "cut tree": lambda place: (place / "state/_METADATA").write_text("{"),
    "no manifest": lambda place: (place / "state/manifest.ocdbt").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE, ids=str)
def test_a_damaged_latest_step_is_told_and_not_passed_over(
    tmp_path: Path, damage: str
) -> None:
    saved(tmp_path, 3)
    DAMAGE[damage](tmp_path / "2")
    with open_at(tmp_path) as checkpointer:
        with refused(
            f"{tmp_path}/2",
            "earlier steps in",
            "0, 1; nothing falls back to one of them",
            "remove",
            "to go on from step 1",
        ):
            checkpointer.restore_or_init(lambda: {"w": jnp.ones((8, 4))})
        tree = checkpointer.restore(step=1)
    assert (np.asarray(tree["w"]) == 1).all()


def test_steps_that_are_not_there(tmp_path: Path) -> None:
    saved(tmp_path, 7)
    checkpointer = open_at(tmp_path)
    with refused("there is no step 9 in", "which has 7 steps, the last ones 2, 3, 4"):
        checkpointer.restore(step=9)
    with refused("there is no step 8"):
        checkpointer.metadata(8)


def test_many_steps_are_listed_by_their_names(tmp_path: Path) -> None:
    for step in range(500):
        (tmp_path / str(step)).mkdir()
    for name in ("007", "12.orbax-checkpoint-tmp-3", "step_900", "notes", "1e9"):
        (tmp_path / name).mkdir()
    (tmp_path / "800").write_text("a file")
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.steps == list(range(500)) and checkpointer.latest == 499
    assert Checkpointer(tmp_path / "none").steps == []


def test_numbers_and_arrays_without_dims_are_the_same(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        return {"w": jnp.ones((8, 4)), "n": 0}

    for value in range(3):
        with open_at(tmp_path) as checkpointer:
            state, start = checkpointer.restore_or_init(make)
            assert int(state["n"]) == start == value
            n = value + 1 if value % 2 else state["n"] + 1
            assert checkpointer.save(start, {**state, "n": n})


def test_a_save_that_is_refused_holds_nothing(tmp_path: Path) -> None:
    first = open_at(tmp_path)
    with refused("fn: "):
        first.save(0, {"fn": print, **weights(0)})
    assert open_at(tmp_path).save(0, weights(0))


def test_a_policy_removes_nothing_before_a_save(tmp_path: Path) -> None:
    left = tmp_path / "2.orbax-checkpoint-tmp"
    left.mkdir()
    with open_at(tmp_path, every=policies.SpecificStepsPolicy([3])) as checkpointer:
        assert not checkpointer.save(2, weights(0)) and left.exists()
        assert checkpointer.save(3, weights(0))
    assert checkpointer.steps == [3] and not left.exists()
