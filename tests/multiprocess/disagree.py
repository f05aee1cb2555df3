"""Process 1 gets different inputs, case by case; nothing may hang.

A part (see `launch`), and a program that goes on after its answer: each process answers
with case → type and message of its error.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import flax_layoutmap as flm
from flax_layoutmap._core.processes import Agreement
from multiprocess import launch

if __name__ == "__main__":
    launch.join(shutdown=3)
DIFFERS = jax.process_index() == 1
MESH, OTHER = "data=2,model=4", "data=4,model=2"
FOLDER = Path()


def rules(mesh: Any = MESH, width_axis: str = "model") -> flm.LayoutMap:
    """Rules for one linear layer."""
    layout_map = flm.LayoutMap(flm.DeviceMesh(mesh))
    layout_map["kernel"] = (None, width_axis)
    layout_map["bias"] = None
    return layout_map


def linear(width: int = 8, seed: int = 0) -> Callable[[], nnx.Linear]:
    """A function that makes one linear layer."""
    return lambda: nnx.Linear(8, width, rngs=nnx.Rngs(seed))


def another_device_order() -> None:
    devices = jax.devices()[:: -1 if DIFFERS else 1]
    mesh = flm.DeviceMesh((2, 4), ("data", "model"), devices=devices)
    flm.create(linear(), rules(mesh))


def a_constructor_that_raises() -> None:
    def make() -> nnx.Linear:
        if DIFFERS:
            raise FileNotFoundError("no vocabulary here")
        return linear()()

    flm.create(make, rules())


def a_part_that_raises() -> None:
    def parts() -> dict[str, str]:
        return {"file": of("", "x") and Path("/nothing here").read_text()}

    with Agreement("a step", flm.DeviceMesh(MESH)) as agreement:
        agreement.add(parts)


def optimizer_of(tx: Any) -> None:
    flm.create_optimizer(flm.create(linear(), rules()), tx, rules())


def step_of(x: np.ndarray, more_rules: bool = False) -> None:
    """Create a model, and call a step with other rules for the first time."""
    layout_map = rules()
    if more_rules:
        layout_map["scale"] = None
    step = flm.jit(lambda model, x: model(x).sum(), layout_map=layout_map)
    assert np.isfinite(float(step(flm.create(linear(), rules()), x)))


def another_key_of_one_of_many() -> None:
    """Of a plain function, under `jax.jit`; the other key is the same."""
    keys = {"kernel": jax.random.key(0), "scale": jax.random.key(int(DIFFERS))}

    def make(keys: Any) -> Any:
        return {name: jax.jit(jax.random.normal)(key) for name, key in keys.items()}

    flm.create(make, flm.LayoutMap(flm.DeviceMesh(MESH)), keys)


def another_constant() -> None:
    """An array that a constructor closes over."""
    table = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    table[7, 7] += DIFFERS
    flm.create(lambda: {"kernel": jax.numpy.asarray(table) * 2}, rules())


def another_number_in_a_scope() -> None:
    with flm.layout_map_scope(rules()):
        model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        tx = optax.inject_hyperparams(optax.sgd)(0.2 if DIFFERS else 0.1)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    del optimizer


def another_setting_of_jax() -> None:
    jax.config.update("jax_enable_x64", DIFFERS)
    try:
        flm.create(linear(), rules())
    finally:
        jax.config.update("jax_enable_x64", False)


def another_step() -> None:
    model = flm.create(linear(), rules())
    if DIFFERS:
        flm.create_optimizer(model, optax.sgd(0.1), rules())
    else:
        flm.create(linear(), rules())


def save(path: Path) -> None:
    flm.checkpoint.save(path, flm.create(linear(), rules()), layout_map=rules())


def another_mesh_to_restore_on() -> None:
    save(FOLDER / "saved")
    mesh = OTHER if DIFFERS else MESH
    flm.checkpoint.restore(FOLDER / "saved", layout_map=rules(mesh))


def restore(name: str) -> None:
    flm.checkpoint.restore(FOLDER / name, layout_map=rules())


def of(one: Any, other: Any) -> Any:
    return other if DIFFERS else one


X = np.ones((8, 8), np.float32)
CREATE, MOVE = "creating the model", "moving a tree"
OPTIMIZER, STEP = "creating the optimizer", "the first call of <lambda>"
KEYS = "keys and constants"
# Case → what it does, the step that comes next, and the parts that differ.
DIFFERENT: dict[str, tuple[Callable[[], Any], str, str]] = {
    "rule": (
        lambda: flm.create(linear(), rules(width_axis=of("model", "data"))),
        CREATE,
        "rules, table",
    ),
    "mesh shape": (
        lambda: flm.create(linear(), rules(of(MESH, OTHER))),
        CREATE,
        "mesh",
    ),
    "device order": (another_device_order, CREATE, "mesh"),
    "width": (
        lambda: flm.create(linear(of(8, 16)), rules()),
        CREATE,
        f"{KEYS}, table",
    ),
    "seed": (lambda: flm.create(linear(8, of(0, 1)), rules()), CREATE, KEYS),
    "seed as argument": (
        lambda: flm.create(
            lambda rngs: nnx.Linear(8, 8, rngs=rngs), rules(), nnx.Rngs(of(0, 1))
        ),
        CREATE,
        KEYS,
    ),
    "one key of many": (another_key_of_one_of_many, CREATE, KEYS),
    "constant": (another_constant, CREATE, KEYS),
    "setting of JAX": (another_setting_of_jax, CREATE, f"{KEYS}, settings of JAX"),
    "scope": (another_number_in_a_scope, "creating the models of a scope", KEYS),
    "optimizer": (
        lambda: optimizer_of(of(optax.sgd(0.1, 0.9), optax.adam(0.1))),
        OPTIMIZER,
        f"{KEYS}, table",
    ),
    "number in an optimizer": (
        lambda: optimizer_of(optax.inject_hyperparams(optax.sgd)(of(0.1, 0.2))),
        OPTIMIZER,
        KEYS,
    ),
    "rule in jit": (lambda: step_of(X, of(False, True)), STEP, "rules"),
    "batch shape": (
        lambda: step_of(of(X, X[:4])),
        STEP,
        "batch shapes, batch values",
    ),
    "batch": (lambda: step_of(of(X, 2 * X)), STEP, "batch values"),
    "values": (lambda: rules().place({"kernel": of(X, 2 * X)}), MOVE, "values"),
    "key": (
        lambda: rules().place({"key": jax.random.key(of(0, 1))}),
        MOVE,
        "values",
    ),
    "mesh to restore on": (
        another_mesh_to_restore_on,
        "restoring {folder}/saved",
        "mesh",
    ),
}
# Case → what it does, and what the error of process 1 says.
FAILING: dict[str, tuple[Callable[[], Any], str]] = {
    "a width": (
        lambda: flm.create(linear(of(8, 9)), rules()),
        "ResolveError: .*dim 1 of size 9 does not",
    ),
    "a constructor": (
        a_constructor_that_raises,
        "FileNotFoundError: no vocabulary here",
    ),
    "a part": (a_part_that_raises, "FileNotFoundError: .*nothing here"),
    "no checkpoint": (
        lambda: restore(of("saved", "nothing")),
        "CheckpointError: .*{folder}/nothing",
    ),
}
# Case → what it does, and the next step in process 0 and in process 1.
ELSEWHERE: dict[str, tuple[Callable[[], Any], str, str]] = {
    "another step": (another_step, CREATE, OPTIMIZER),
    "another path": (
        lambda: save(FOLDER / of("0", "1")),
        "saving {folder}/0",
        "saving {folder}/1",
    ),
}


def error_of(case: Callable[[], Any]) -> str:
    try:
        case()
    except (flm.LayoutError, FileNotFoundError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def main(folder: Path) -> dict[str, str]:
    global FOLDER
    FOLDER = folder
    cases = {**DIFFERENT, **FAILING, **ELSEWHERE}
    answers = {name: error_of(case[0]) for name, case in cases.items()}
    # After all that, the processes still work together.
    return answers | {"the same": error_of(lambda: step_of(X))}


if __name__ == "__main__":
    launch.answer(main(Path(sys.argv[1])))
    if DIFFERS:  # fails where no other process comes
        flm.create(linear(9), rules())
