"""Process 1 gets different inputs, case by case; nothing may hang.

A part (see `launch`): each process answers with case → type and message of its error.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import flax_layoutmap as flm
from flax_layoutmap._core.processes import Agreement
from multiprocess.launch import said

DIFFERS = jax.process_index() == 1
MESH, OTHER = "data=2,model=4", "data=4,model=2"
FOLDER = Path()


def of(one: Any, other: Any) -> Any:
    return other if DIFFERS else one


def rules(mesh: Any = MESH, width_axis: str = "model") -> flm.LayoutMap:
    """Rules for one linear layer."""
    layout_map = flm.LayoutMap(flm.DeviceMesh(mesh), strict=False)
    layout_map["kernel"] = (None, width_axis)
    layout_map["bias"] = None
    return layout_map


def create(width: int = 8, seed: int = 0, layout_map: Any = None) -> nnx.Linear:
    make = lambda: nnx.Linear(8, width, rngs=nnx.Rngs(seed))  # noqa: E731
    return flm.create(make, layout_map or rules())


def another_device_order() -> None:
    devices = jax.devices()[:: of(1, -1)]
    mesh = flm.DeviceMesh((2, 4), ("data", "model"), devices=devices)
    create(layout_map=rules(mesh))


def a_constructor_that_raises() -> None:
    def make() -> nnx.Linear:
        if DIFFERS:
            raise FileNotFoundError("no vocabulary here")
        return nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    flm.create(make, rules())


def a_part_that_raises() -> None:
    def parts() -> dict[str, str]:
        return {"file": of("", "x") and Path("/nothing here").read_text()}

    with Agreement("a step", flm.DeviceMesh(MESH)) as agreement:
        agreement.add(parts)


def step_of(x: np.ndarray, more_rules: bool = False) -> None:
    """Create a model, and call a step with other rules for the first time."""
    layout_map = rules()
    if more_rules:
        layout_map["scale"] = None
    step = flm.jit(lambda model, x: model(x).sum(), layout_map=layout_map)
    assert np.isfinite(float(step(create(), x)))


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
        tx = optax.inject_hyperparams(optax.sgd)(of(0.1, 0.2))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    del optimizer


def another_setting_of_jax() -> None:
    with jax.enable_x64(DIFFERS):
        create()


def another_step() -> None:
    model = create()
    if DIFFERS:
        flm.create_optimizer(model, optax.sgd(0.1), rules())
    else:
        create()


def restore(name: str, mesh: str = MESH) -> None:
    flm.checkpoint.restore(FOLDER / name, layout_map=rules(mesh))


def distribute(batch: Any, **options: Any) -> None:
    flm.distribute_batch(batch, rules(), **options)


X = np.ones((8, 8), np.float32)
CREATE, MOVE, BATCH = "creating the model", "moving a tree", "distributing a batch"
OPTIMIZER, STEP = "creating the optimizer", "the first call of <lambda>"
KEYS = "keys and constants"
# Case → what it does, the step that comes next, and the parts that differ.
DIFFERENT: dict[str, tuple[Callable[[], Any], str, str]] = {
    "rule": (
        lambda: create(layout_map=rules(width_axis=of("model", "data"))),
        *(CREATE, "rules, table"),
    ),
    "device order": (another_device_order, CREATE, "mesh"),
    "width": (lambda: create(of(8, 16)), CREATE, f"{KEYS}, table"),
    "seed": (lambda: create(8, of(0, 1)), CREATE, KEYS),
    "one key of many": (another_key_of_one_of_many, CREATE, KEYS),
    "constant": (another_constant, CREATE, KEYS),
    "setting of JAX": (another_setting_of_jax, CREATE, f"{KEYS}, settings of JAX"),
    "scope": (another_number_in_a_scope, "creating the models of a scope", KEYS),
    "optimizer": (
        lambda: flm.create_optimizer(
            create(), of(optax.sgd(0.1, 0.9), optax.adam(0.1)), rules()
        ),
        *(OPTIMIZER, f"{KEYS}, table"),
    ),
    "rule in jit": (lambda: step_of(X, of(False, True)), STEP, "rules"),
    "batch shape": (
        lambda: step_of(of(X, X[:4])),
        *(STEP, "batch shapes, batch values"),
    ),
    "values": (lambda: rules().place({"kernel": of(X, 2 * X)}), MOVE, "values"),
    "key": (lambda: rules().place({"key": jax.random.key(of(0, 1))}), MOVE, "values"),
    "rows": (lambda: distribute(of(X, X[:, :2])), BATCH, "global batch shapes"),
    "name": (
        lambda: distribute({of("x", "y"): X}),
        *(BATCH, "batch structure, global batch shapes"),
    ),
    "scalar": (lambda: distribute({"x": X, "n": of(0, 1)}), BATCH, "batch values"),
    "key of a batch": (
        lambda: distribute(jax.random.key(of(0, 1))),
        *(BATCH, "batch values"),
    ),
    "rows of all": (
        lambda: distribute(of(X, 2 * X), rows="global"),
        *(BATCH, "batch values"),
    ),
    "mesh to restore on": (
        lambda: restore("saved", of(MESH, OTHER)),
        *("restoring {folder}/saved", "mesh"),
    ),
}
# Case → what it does, and what the error of process 1 says.
FAILING: dict[str, tuple[Callable[[], Any], str]] = {
    "a width": (
        lambda: create(of(8, 9)),
        "ResolveError: .*dim 1 of size 9 is not",
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
        lambda: flm.checkpoint.save(FOLDER / of("0", "1"), create()),
        *("saving {folder}/0", "saving {folder}/1"),
    ),
}


def main(folder: Path) -> dict[str, str]:
    global FOLDER
    FOLDER = folder
    flm.checkpoint.save(FOLDER / "saved", create(), layout_map=rules())
    cases = {**DIFFERENT, **FAILING, **ELSEWHERE}
    answers = {name: said(case[0]) for name, case in cases.items()}
    # After all that, the processes still work together.
    return answers | {"the same": said(lambda: step_of(X))}
