"""Train in four processes, one of which is killed in a phase.

`python -m multiprocess.phases FOLDER PHASE`: process 2 ends itself at the start of the
phase, as a machine that is taken away does. The others answer with how they ended.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import flax_layoutmap as flm
from multiprocess import launch

PROCESS = launch.join()
FOLDER, DIES_IN = Path(sys.argv[1]), sys.argv[2]
VICTIM = 2

layout_map = flm.LayoutMap("data=2,model=4")
layout_map["kernel"] = (None, "model")
layout_map["bias"] = None


@flm.jit(layout_map=layout_map, donate_argnames=("model", "optimizer"))
def step(model: nnx.Linear, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    def loss_of(model: nnx.Linear) -> jax.Array:
        return (model(x) ** 2).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def phase(name: str) -> None:
    """Begins a phase; the victim waits until nobody needs it for the one before."""
    (FOLDER / f"{name}-{PROCESS}").touch()
    if name == DIES_IN and PROCESS == VICTIM:
        while len(list(FOLDER.glob(f"{name}-*"))) < jax.process_count():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def training() -> dict[str, Any]:
    model = flm.create(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), layout_map)
    optimizer = flm.create_optimizer(model, optax.adam(1e-2), layout_map, wrt=nnx.Param)
    return {"model": model, "optimizer": optimizer}


def main() -> None:
    state = training()
    x = np.ones((8, 8), np.float32)
    float(step(state["model"], state["optimizer"], x))
    flm.checkpoint.save(FOLDER / "1", state, layout_map=layout_map)
    phase("creation")
    training()
    with flm.checkpoint.Checkpointer(FOLDER / "run", layout_map=layout_map) as run:
        run.save(7, state)
        run.wait()
        phase("step")
        float(step(state["model"], state["optimizer"], x))
    phase("save")
    flm.checkpoint.save(FOLDER / "2", state, layout_map=layout_map)
    phase("restore")
    flm.checkpoint.restore(FOLDER / "2", state, layout_map=layout_map)


if __name__ == "__main__":
    start = time.monotonic()
    try:
        main()
        text = "nothing"
    except Exception as error:  # broad: JAX's own errors have no common kind
        notes = getattr(error, "__notes__", ())
        text = "\n".join([f"{type(error).__name__}: {error}", *notes])
    launch.answer({"seconds": time.monotonic() - start, "text": text})
    # Without a farewell to the one that is gone, which JAX would wait for.
    os._exit(1)
