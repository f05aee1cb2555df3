"""Train in four processes, one of which is killed in a phase.

`python -m multiprocess.phases FOLDER PHASE`: process 2 ends itself at the start of the
phase, as a machine that is taken away does. The others answer with how they ended.
"""

import os
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
from flax import nnx

import flax_layoutmap as flm
from multiprocess import launch

PROCESS = launch.join()
FOLDER, DIES_IN = Path(sys.argv[1]), sys.argv[2]
VICTIM = 2

layout_map = flm.LayoutMap("data=2,model=4")
layout_map["kernel"] = (None, "model")
layout_map["bias"] = None


@flm.jit(layout_map=layout_map, donate_argnames=("model",))
def step(model: nnx.Linear, x: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    nnx.update(model, jax.tree.map(lambda p, g: p - g, nnx.state(model), gradients))
    return loss


def phase(name: str) -> None:
    """Begins a phase; the victim waits until nobody needs it for the one before."""
    (FOLDER / f"{name}-{PROCESS}").touch()
    if name == DIES_IN and PROCESS == VICTIM:
        while len(list(FOLDER.glob(f"{name}-*"))) < jax.process_count():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    model = flm.create(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), layout_map)
    x = np.ones((8, 8), np.float32)
    float(step(model, x))
    with flm.checkpoint.Checkpointer(FOLDER, layout_map=layout_map) as run:
        run.save(1, {"model": model})
        run.wait()
        phase("step")
        float(step(model, x))
        phase("save")
        run.save(2, {"model": model})


if __name__ == "__main__":
    try:
        main()
        text = "nothing"
    except Exception as error:  # broad: JAX's own errors have no common kind
        notes = getattr(error, "__notes__", ())
        text = "\n".join([f"{type(error).__name__}: {error}", *notes])
    launch.answer(text)
    # Without a farewell to the one that is gone, which JAX would wait for.
    os._exit(1)
