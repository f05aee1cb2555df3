"""Process 1 gets different inputs, case by case; nothing may hang.

A part (see `launch`), and a program that goes on after its answer: each process answers
with case → how it ended: type and message of the error.
"""

import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
from flax import nnx

import flax_layoutmap as flm
from flax_layoutmap._core import processes as _processes
from multiprocess import launch

if __name__ == "__main__":
    launch.join()
DIFFERS = jax.process_index() == 1


def rules(mesh: Any = "data=2,model=4", width_axis: str = "model") -> flm.LayoutMap:
    """Rules for one linear layer."""
    layout_map = flm.LayoutMap(flm.DeviceMesh(mesh))
    layout_map["kernel"] = (None, width_axis)
    layout_map["bias"] = None
    return layout_map


def linear(width: int = 8) -> Callable[[], nnx.Linear]:
    """A function that makes one linear layer."""
    return lambda: nnx.Linear(8, width, rngs=nnx.Rngs(0))


def another_rule() -> None:
    flm.create(linear(), rules(width_axis="data" if DIFFERS else "model"))


def another_mesh_shape() -> None:
    flm.create(linear(), rules("data=4,model=2" if DIFFERS else "data=2,model=4"))


def another_device_order() -> None:
    devices = jax.devices()[:: -1 if DIFFERS else 1]
    mesh = flm.DeviceMesh((2, 4), ("data", "model"), devices=devices)
    flm.create(linear(), rules(mesh))


def another_width() -> None:
    flm.create(linear(16 if DIFFERS else 8), rules())


def a_width_that_does_not_divide() -> None:
    flm.create(linear(9 if DIFFERS else 8), rules())


def a_constructor_that_raises() -> None:
    def make() -> nnx.Linear:
        if DIFFERS:
            raise FileNotFoundError("no vocabulary here")
        return linear()()

    flm.create(make, rules())


def another_optimizer() -> None:
    model = flm.create(linear(), rules())
    flm.create_optimizer(
        model, optax.adam(0.1) if DIFFERS else optax.sgd(0.1, 0.9), rules()
    )


def another_point() -> None:
    model = flm.create(linear(), rules())
    if DIFFERS:
        flm.create_optimizer(model, optax.sgd(0.1), rules())
    else:
        flm.create(linear(), rules())


def step_with(layout_map: flm.LayoutMap) -> tuple[Any, nnx.Linear]:
    """A jitted function and its model."""
    model = flm.create(linear(), rules())

    @flm.jit(layout_map=layout_map)
    def step(model: nnx.Linear, x: jax.Array) -> jax.Array:
        return model(x).sum()

    return step, model


def another_rule_in_jit() -> None:
    layout_map = rules()
    step, model = step_with(layout_map)
    if DIFFERS:
        layout_map["scale"] = None
    step(model, np.ones((8, 8), np.float32))


def another_batch_shape() -> None:
    step, model = step_with(rules())
    step(model, np.ones((4 if DIFFERS else 8, 8), np.float32))


def another_batch() -> None:
    step, model = step_with(rules())
    step(model, np.full((8, 8), DIFFERS, np.float32))


def other_values() -> None:
    rules().place({"kernel": np.full((8, 8), DIFFERS, np.float32)})


def seeded() -> nnx.Rngs:
    return nnx.Rngs(int(DIFFERS))


def another_seed() -> None:
    flm.create(lambda: nnx.Linear(8, 8, rngs=seeded()), rules())


def another_seed_as_argument() -> None:
    flm.create(lambda rngs: nnx.Linear(8, 8, rngs=rngs), rules(), seeded())


def another_key_of_one_of_many() -> None:
    """Of a plain function, under `jax.jit`; the others are the same."""
    keys = {"kernel": jax.random.key(0), "scale": jax.random.key(int(DIFFERS))}

    def make(keys: Any) -> Any:
        return {name: jax.jit(jax.random.normal)(key) for name, key in keys.items()}

    layout_map = flm.LayoutMap(flm.DeviceMesh("data=2,model=4"))
    flm.create(make, layout_map, keys)


def another_constant() -> None:
    """An array that a constructor closes over."""
    table = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    table[7, 7] += DIFFERS
    flm.create(lambda: {"kernel": jax.numpy.asarray(table) * 2}, rules())


def another_seed_in_a_scope() -> None:
    with flm.layout_map_scope(rules()):
        model = nnx.Linear(8, 8, rngs=seeded())
    del model


def another_number_in_an_optimizer() -> None:
    model = flm.create(linear(), rules())
    tx = optax.inject_hyperparams(optax.sgd)(0.2 if DIFFERS else 0.1)
    flm.create_optimizer(model, tx, rules())


def another_number_in_an_optimizer_of_a_scope() -> None:
    with flm.layout_map_scope(rules()):
        model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        tx = optax.inject_hyperparams(optax.sgd)(0.2 if DIFFERS else 0.1)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    del optimizer


def another_key_to_place() -> None:
    rules().place({"key": jax.random.key(int(DIFFERS))})


def another_setting_of_jax() -> None:
    jax.config.update("jax_enable_x64", DIFFERS)
    try:
        flm.create(linear(), rules())
    finally:
        jax.config.update("jax_enable_x64", False)


def another_path_to_save_to(folder: Path) -> None:
    model = flm.create(linear(), rules())
    flm.checkpoint.save(folder / str(int(DIFFERS)), model, layout_map=rules())


def another_mesh_to_restore_on(folder: Path) -> None:
    model = flm.create(linear(), rules())
    flm.checkpoint.save(folder / "saved", model, layout_map=rules())
    mesh = "data=4,model=2" if DIFFERS else "data=2,model=4"
    flm.checkpoint.restore(folder / "saved", layout_map=rules(mesh))


def no_checkpoint_to_restore(folder: Path) -> None:
    path = folder / ("nothing" if DIFFERS else "saved")
    flm.checkpoint.restore(path, layout_map=rules())


def one_comes_late() -> None:
    """Not a disagreement: the others say what they wait for, and all go on."""
    if DIFFERS:
        time.sleep(2 * _processes.PATIENCE_SECONDS)
    flm.create(linear(), rules())


def all_the_same() -> None:
    """After all that, the processes still work together."""
    step, model = step_with(rules())
    assert np.isfinite(float(step(model, np.ones((8, 8), np.float32))))


CASES: tuple[Callable[..., None], ...] = (
    another_rule,
    another_mesh_shape,
    another_device_order,
    another_width,
    a_width_that_does_not_divide,
    a_constructor_that_raises,
    another_optimizer,
    another_point,
    another_rule_in_jit,
    another_batch_shape,
    another_batch,
    other_values,
    another_seed,
    another_seed_as_argument,
    another_key_of_one_of_many,
    another_constant,
    another_seed_in_a_scope,
    another_number_in_an_optimizer,
    another_number_in_an_optimizer_of_a_scope,
    another_key_to_place,
    another_setting_of_jax,
    another_path_to_save_to,
    another_mesh_to_restore_on,
    no_checkpoint_to_restore,
    one_comes_late,
    all_the_same,
)


WITH_FOLDER = (
    another_path_to_save_to,
    another_mesh_to_restore_on,
    no_checkpoint_to_restore,
)


def outcome(case: Callable[..., None], folder: Path) -> list[str]:
    """Type and message of the case's error, or of its warnings."""
    arguments = (folder,) if case in WITH_FOLDER else ()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", flm.LayoutWarning)
        try:
            case(*arguments)
        except (flm.LayoutError, FileNotFoundError) as error:
            return [type(error).__name__, str(error)]
    said = [str(w.message) for w in caught if w.category is flm.LayoutWarning]
    return ["fine", " ".join(text for text in said if "waited" in text)]


def main(folder: Path) -> dict[str, list[str]]:
    with mock.patch.object(_processes, "PATIENCE_SECONDS", 1.0):
        return {case.__name__: outcome(case, folder) for case in CASES}


if __name__ == "__main__":
    launch.answer(main(Path(sys.argv[1])))
    _processes.PATIENCE_SECONDS = 1.0
    if DIFFERS:  # fails where no other process comes
        flm.create(linear(9), rules())
