"""Training loops: saves during training, resumed runs, data, policies."""

import asyncio
import contextlib
import json
import os
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import forks
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import same
from flax import nnx
from helpers import run_python
from same import refused

import flax_layoutmap as flm

v1: Any = ocp.v1
policies = v1.training.save_decision_policies
kept = v1.training.preservation_policies
Checkpointer = flm.checkpoint.Checkpointer


def rules(mesh: str = "data=2,model=4") -> flm.LayoutMap:
    layout_map = flm.LayoutMap(flm.DeviceMesh(mesh), strict=False)
    layout_map["kernel"] = ("data", "model")
    layout_map[r"(^|/)w$"] = ("data", ...)
    return layout_map


def weights(value: float) -> dict[str, Any]:
    """A tree whose one array lies on the mesh."""
    return rules().place({"w": jnp.full((8, 4), value, jnp.float32)})


def open_at(directory: Path, **options: Any) -> Any:
    return Checkpointer(directory, layout_map=rules(), **options)


class Batches:
    """An iterator with a state that is not a number: what Grain's looks like."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def batch(self) -> np.ndarray:
        return self.generator.normal(size=(8, 8)).astype(np.float32)

    def get_state(self) -> dict[str, Any]:
        return {"generator": self.generator.bit_generator.state}

    def set_state(self, state: dict[str, Any]) -> None:
        self.generator.bit_generator.state = state["generator"]


def create_fn() -> tuple[Any, Any]:
    rngs = nnx.Rngs(0)
    layers = nnx.Linear(8, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
    model = nnx.Sequential(
        *layers, nnx.Dropout(0.3, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
    )
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


def train(directory: Path, steps: int, mesh: str = "data=2,model=4") -> Any:
    """The user's loop: the state at its end, the losses, where it began."""
    layout_map, data, losses = rules(mesh), Batches(), []

    @flm.jit(layout_map=layout_map, donate_argnames=("model", "optimizer"))
    def train_step(model: Any, optimizer: Any, batch: jax.Array) -> jax.Array:
        def loss_of(model: Any) -> jax.Array:
            return jnp.mean((model(batch) - batch) ** 2)

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return loss

    with Checkpointer(directory, layout_map=layout_map, every=2) as checkpointer:
        state, start = checkpointer.restore_or_init(create_fn, data=data)
        for step in range(start, steps):
            losses.append(float(train_step(*state, data.batch())))
            checkpointer.save(step, state, data=data, force=step == steps - 1)
    return state, losses, start


# ------------------------------------------------------------------ the loop


@pytest.mark.parametrize(
    ("mesh", "shard"), [("data=2,model=4", (4, 4)), ("data=4,model=2", (2, 8))]
)
def test_resumed_training_is_that_of_one_run(
    tmp_path: Path, mesh: str, shard: tuple[int, int]
) -> None:
    """Bit by bit on the same mesh; what was restored lies as the rules say."""
    whole, losses, _ = train(tmp_path / "whole", 4)
    _, first, start = train(tmp_path / "run", 3)
    resumed, rest, again = train(tmp_path / "run", 4, mesh)
    assert (start, again) == (0, 3)
    kernel = resumed[0].layers[0].kernel[...]
    assert {part.data.shape for part in kernel.addressable_shards} == {shard}
    np.testing.assert_allclose(first + rest, losses, rtol=1e-4)
    if mesh == "data=2,model=4":
        assert first + rest == losses
        same.assert_same(resumed, whole)


# ------------------------------------------------------- what a save writes


def test_values_are_those_at_the_call(tmp_path: Path) -> None:
    """Donated by the next step, and overwritten on the host, while it is written."""
    layout_map = rules()
    size = 1 << 20
    host = np.zeros(size, np.int32)
    device = layout_map.place({"w": jnp.zeros((8, size // 8))})

    @flm.jit(layout_map=layout_map, donate_argnames=("tree",))
    def step_of(tree: Any) -> Any:
        return {"w": tree["w"] + 1}

    with Checkpointer(tmp_path, layout_map=layout_map) as checkpointer:
        for step in range(3):
            before = device
            checkpointer.save(step, {"device": device, "host": host})
            device = step_of(device)
            # JAX keeps a buffer that somebody reads; its owner may drop it even so.
            before["w"].delete()
            host += 1
    for step in range(3):
        saved = checkpointer.restore(step=step)
        assert (np.asarray(saved["device"]["w"]) == step).all()
        assert (np.asarray(saved["host"]) == step).all()


def test_without_a_with_block_a_save_is_complete_when_it_returns(
    tmp_path: Path,
) -> None:
    first, second = open_at(tmp_path), open_at(tmp_path)
    assert first.save(0, weights(0)) and first.steps == [0]
    assert second.save(1, weights(1)) and second.steps == [0, 1]
    with second:
        second.save(2, weights(2))
    assert second.save(3, weights(3)) and second.steps == [0, 1, 2, 3]


def test_other_programs_read_a_step(tmp_path: Path) -> None:
    with open_at(tmp_path) as checkpointer:
        checkpointer.save(7, weights(3.0), data=Batches(), metadata={"loss": 0.5})
    ours = flm.checkpoint.restore(tmp_path, layout_map=rules(), step=7, verify=True)
    assert (np.asarray(ours["w"]) == 3).all()
    with contextlib.closing(ocp.CheckpointManager(tmp_path)) as manager:
        assert manager.latest_step() == 7
        args = ocp.args.Composite(state=ocp.args.StandardRestore())  # pyright: ignore
        theirs: Any = manager.restore(7, args=args)
    assert (np.asarray(theirs["state"]["w"]) == 3).all()


def test_metadata(tmp_path: Path) -> None:
    given = {"loss": jnp.float32(0.5), "n": np.int64(3), "t": (1, "a"), "no": None}
    checkpointer = open_at(tmp_path)
    checkpointer.save(0, weights(0), metadata=given)
    checkpointer.save(1, weights(0))
    expected = {"loss": 0.5, "n": 3, "t": [1, "a"], "no": None}
    assert checkpointer.metadata(0) == expected and checkpointer.metadata() == {}
    for bad in (np.ones(2), {1, 2}, print):
        with refused("metadata= cannot be written as JSON", "belong in the state"):
            checkpointer.save(2, weights(0), metadata={"w": bad})
    with refused("has no step 9, the last are [0, 1]"):
        checkpointer.metadata(9)


# ---------------------------------------------------------------------- data


class Holder:
    """An iterator whose state is given."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


STATE = {
    "json": [1, 2.5, float("inf"), True, {"parts": {"a": "position", "b": None}}],
    "tuples": (1, (2, [b"\x00\xff"])),
    "arrays": [np.arange(5, dtype=np.uint32), np.zeros((0, 2)), np.float32(1.5)],
}


def test_states_of_data_come_back(tmp_path: Path) -> None:
    checkpointer, after = open_at(tmp_path), Holder()
    checkpointer.save(0, weights(0), data={"train": Holder(STATE)})
    with pytest.warns(flm.LayoutWarning, match="step 0 holds the state of data"):
        checkpointer.restore()
    with refused("was not saved with data= of one iterator"):
        checkpointer.restore(data=after)
    checkpointer.restore(data={"train": after})
    np.testing.assert_equal(after.state, STATE)
    assert type(after.state["tuples"][1]) is tuple
    np.testing.assert_equal(checkpointer.data_states(), [{"train": STATE}])


def test_data_that_cannot_be_saved(tmp_path: Path) -> None:
    checkpointer = open_at(tmp_path)
    for state, phrase in (
        ({"a": [set()]}, "the state of data['a'][0] is a set"),
        ({1: 2}, "the state of data is a dict"),
        (np.array([None]), "the state of data is a ndarray"),
    ):
        with refused(phrase, "NumPy arrays and dicts with strings"):
            checkpointer.save(0, weights(0), data=Holder(state))
    with refused("data is a range_iterator", "get_state"):
        checkpointer.save(0, weights(0), data=iter(range(3)))
    assert checkpointer.steps == []


def test_data_is_set_only_where_the_step_could_be_restored(tmp_path: Path) -> None:
    checkpointer, holder = open_at(tmp_path), Holder(5)
    checkpointer.save(0, weights(0), data=holder)
    holder.state = 6
    with refused("shape mismatch"):
        checkpointer.restore({"w": jnp.ones((4, 4))}, data=holder)
    with refused("was not saved with data= of a dict of ['train']"):
        checkpointer.restore(data={"train": holder})
    checkpointer.save(1, weights(1))
    with refused("has no state of data", "restore it without data="):
        checkpointer.restore(data=holder)
    assert holder.state == 6


def test_data_of_several_processes_by_an_older_version(tmp_path: Path) -> None:
    checkpointer, holder = open_at(tmp_path), Holder()
    for step, states in enumerate(([5, 5], [5, 6], [5])):
        checkpointer.save(step, weights(0))
        (tmp_path / f"{step}/data").mkdir()
        for process, state in enumerate(states):
            text = json.dumps({"processes": 2, "state": state})
            (tmp_path / f"{step}/data/process_{process}.json").write_text(text)
    checkpointer.restore(step=0, data=holder)
    assert holder.state == 5
    with refused("2 processes saved different states", "checkpointer.data_states"):
        checkpointer.restore(step=1, data=holder)
    assert checkpointer.data_states(1) == [5, 6]
    with refused("are damaged", "there are 1 of 2 files"):
        checkpointer.restore(step=2, data=holder)


# ------------------------------------------------------------------ policies


two_and_fourths = kept.AnyPreservationPolicy([kept.LatestN(2), kept.EveryNSteps(4)])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"every": 3}, [0, 3, 6, 7]),
        ({"every": 2, "keep": two_and_fourths}, [0, 4, 6, 7]),
        ({"every": policies.SpecificStepsPolicy([2, 3])}, [2, 3, 7]),
        ({"keep": kept.BestN(get_metric_fn=lambda x: -abs(x["at"] - 4), n=2)}, [4, 5]),
    ],
    ids=["every", "keep", "specific", "best"],
)
def test_which_steps_are_saved_and_kept(
    tmp_path: Path, options: Any, expected: list[int]
) -> None:
    with open_at(tmp_path, **options) as checkpointer:
        for step in range(8):
            metadata, force = {"at": step}, step == 7
            checkpointer.save(step, weights(step), metadata=metadata, force=force)
    assert checkpointer.steps == expected


# ------------------------------------------------------------ ends of a block


def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every save fail in the background, at its end."""
    failure = mock.Mock(side_effect=OSError(28, "no space left"))
    monkeypatch.setattr(os, "rename", failure)
    monkeypatch.setattr(os, "replace", failure)


def test_a_failed_save_is_raised_at_the_end_of_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the exception that the user's loop raised in its chain."""
    failing(monkeypatch)
    checkpointer = open_at(tmp_path)
    with pytest.raises(flm.errors.CheckpointError, match="no space left") as caught:
        with checkpointer:
            checkpointer.save(1, weights(0))
            raise ZeroDivisionError
    assert "ZeroDivisionError" in "".join(traceback.format_exception(caught.value))
    assert checkpointer.steps == []


def test_a_failed_save_is_raised_by_the_next_one_and_the_run_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_at(tmp_path, keep=2) as checkpointer:
        checkpointer.save(0, weights(0))
        checkpointer.wait()
        with monkeypatch.context() as patch:
            failing(patch)
            assert checkpointer.save(1, weights(1))
            with refused("cannot save step 1 to", "no space left"):
                checkpointer.wait()
            checkpointer.save(2, weights(2))
            with refused("cannot save step 2 to", "no space left"):
                checkpointer.save(3, weights(3))
        assert checkpointer.latest == 0
        for step in (2, 5):  # the same step may be tried again
            assert checkpointer.save(step, weights(step))
    assert checkpointer.steps == [2, 5]
    assert not list(tmp_path.glob("*tmp*"))


def test_it_works_in_a_running_event_loop(tmp_path: Path) -> None:
    async def main() -> Any:
        with open_at(tmp_path) as checkpointer:
            for step in range(3):
                checkpointer.save(step, weights(step))
                await asyncio.sleep(0)
        return open_at(tmp_path).restore_or_init(lambda: {"w": jnp.ones((8, 4))})

    tree, start = asyncio.run(main())
    assert start == 3 and (np.asarray(tree["w"]) == 2).all()


# --------------------------------------------------------------------- errors


def test_what_cannot_be_saved_is_told_before_anything_is_written(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    checkpointer = open_at(run)
    with refused("2 problems", "fn", "bad"):
        checkpointer.save(0, {"fn": print, "bad": {1, 2}, **weights(0)})
    with pytest.raises(flm.errors.ResolveError, match="is not divisible"):
        checkpointer.save(0, {"w": jnp.ones(9)})
    assert not run.exists()
    assert checkpointer.save(4, weights(0))
    for step in (-1, 3, 4):
        with refused(f"step {step} does not come after step 4"):
            checkpointer.save(step, weights(0), force=True)
    with refused("is a checkpoint itself; give the one above it"):
        Checkpointer(run / "4")
    with refused("cannot save to", "cannot be made: [Errno 17] File exists"):
        open_at(run / "4/_CHECKPOINT_METADATA").save(0, weights(0))
    with refused("new has no step"):
        Checkpointer(tmp_path / "new").restore()
    bad: list[dict[str, Any]] = [{"every": 2.5}, {"every": "1"}, {"keep": 0}]
    for options in bad:
        with refused(str(*options), "give positive whole numbers of steps"):
            Checkpointer(tmp_path, **options)


def test_an_unfinished_step_is_ignored_and_removed_by_the_next_save(
    tmp_path: Path,
) -> None:
    for step in range(2):
        open_at(tmp_path).save(step, weights(step))
    left = tmp_path / "2.orbax-checkpoint-tmp"
    (left / "state").mkdir(parents=True)
    (left / "state" / "rest").write_text("of a save that was killed")
    for name in ("007", "step_900", "notes", "1000"):
        (tmp_path / name).mkdir()
    with open_at(tmp_path) as checkpointer:
        tree, start = checkpointer.restore_or_init(lambda: {"w": jnp.ones((8, 4))})
        assert start == 2 and left.exists()  # whoever only reads removes nothing
        assert checkpointer.save(2, tree)
    assert checkpointer.steps == [0, 1, 2] and not left.exists()
    with refused("keep= would remove", "/1000, which is not a checkpoint"):
        open_at(tmp_path, keep=1).save(3, tree)
    assert (tmp_path / "1000").exists()


# ------------------------------------------------------------------ overwriting


def below(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("ends_at", [None, "replacement", "replaced", "swapped"])
def test_overwriting_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_at: str | None
) -> None:
    """Whichever rename is interrupted; what the user has beside it stays."""
    users = {".replacement", ".replaced", ".replacement.orbax-checkpoint-tmp"}
    path = tmp_path / "a"
    flm.checkpoint.save(path, weights(1))
    for name in users:
        Path(f"{path}{name}").mkdir()
    rename = os.rename

    def interrupted(source: Any, target: Any, **options: Any) -> None:
        is_new = ".replacement-" in str(source) and str(target) == str(path)
        if ends_at == "replacement" and is_new:
            raise KeyboardInterrupt
        if ends_at == "replaced" and ".replaced-" in str(target):
            raise KeyboardInterrupt
        rename(source, target, **options)
        if ends_at == "swapped" and is_new:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt) if ends_at else contextlib.nullcontext():
            flm.checkpoint.save(path, weights(2), overwrite=True)
    assert below(tmp_path) == sorted(["a", *(f"a{name}" for name in users)])
    value = np.asarray(flm.checkpoint.restore(path, layout_map=rules())["w"])
    assert (value == (1 if ends_at in ("replacement", "replaced") else 2)).all()


HOPELESS = """
import jax, sys, flax_layoutmap as flm
jax.config.update("jax_platforms", "cpu")
for save in (
    lambda: flm.checkpoint.save("/proc/flm/a", {"w": jax.numpy.ones(2)}),
    lambda: flm.checkpoint.Checkpointer("/proc/flm").save(0, {"w": jax.numpy.ones(2)}),
):
    try:
        save()
    except flm.errors.CheckpointError as error:
        print(error)
"""


@pytest.mark.skipif(
    not Path("/proc/self").exists(),
    reason="Only Linux has a directory in which root cannot make another one.",
)
def test_a_save_that_cannot_be_done_ends_the_program_at_once() -> None:
    """Orbax alone blocks its exit for five minutes."""
    told = run_python(HOPELESS)
    assert told.count("cannot be made: [Errno 2]") == 2


# -------------------------------------------------------- ends of programs

PROGRAM = """
import resource, signal, sys
import jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 2)
import flax_layoutmap as flm

layout_map = flm.LayoutMap("data=2")
layout_map["w"] = ("data",)
# Large enough to be still under way when the next line runs.
noise = jax.random.normal(jax.random.key(0), 1 << 22)
with flm.checkpoint.Checkpointer(sys.argv[1], layout_map=layout_map) as checkpointer:
    checkpointer.save(0, layout_map.place({"w": noise}))
    if sys.argv[2] == "full disk":
        checkpointer.wait()
        # What is left of the disk: no file may become larger.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    checkpointer.save(1, layout_map.place({"w": noise + 1}))
    if sys.argv[2] == "sys.exit":
        sys.exit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code", "text", "steps"),
    [
        ("sys.exit", 3, "", [0, 1]),
        ("full disk", 1, "CheckpointError: cannot save step 1 to", [0]),
    ],
)
def test_the_program_ends(
    tmp_path: Path, end: str, code: int, text: str, steps: list[int]
) -> None:
    done = forks.run(["-c", PROGRAM, str(tmp_path / "run"), end], {}, timeout=60)
    assert (done.code, text in done.err) == (code, True), done.err
    layout_map = flm.LayoutMap("data=8")
    layout_map["w"] = ("data",)
    checkpointer = flm.checkpoint.Checkpointer(tmp_path / "run", layout_map=layout_map)
    assert checkpointer.steps == steps
    first, last = (checkpointer.restore(step=s)["w"] for s in (0, steps[-1]))
    np.testing.assert_array_equal(last, first + np.float32(steps[-1]))
