"""A training loop with known values at each step.

A part (see `launch`), and a program of which the test asks a process to end; imported
by the test too, which restores in a process of its own.
"""

import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import flax_layoutmap as flm
from multiprocess import launch

SHAPE = (8, 512)


def rules() -> flm.LayoutMap:
    """The rules on a mesh over the devices of all processes."""
    layout_map = flm.LayoutMap(flm.DeviceMesh("data=-1"))
    layout_map["w"] = ("data", None)
    layout_map["v"] = (None, "data")
    return layout_map


def create_fn() -> dict[str, Any]:
    """The state before the first step."""
    table = jnp.arange(SHAPE[0] * SHAPE[1], dtype=jnp.float32).reshape(SHAPE)
    return {"w": table, "v": jnp.zeros(SHAPE), "count": jnp.zeros((), jnp.int32)}


def expected(step: int) -> dict[str, Any]:
    """The state after a step; all numbers are exact in float32."""
    table = np.arange(SHAPE[0] * SHAPE[1], dtype=np.float32).reshape(SHAPE)
    done = step + 1
    total = np.float32(done * (done - 1) / 2)
    return {"w": table + done, "v": np.full(SHAPE, total), "count": np.int32(done)}


class Position:
    """Data that each process has its own part of."""

    def __init__(self) -> None:
        self.state = {"process": jax.process_index(), "batches": 0}

    def get_state(self) -> dict[str, Any]:
        return dict(self.state)

    def set_state(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


def main(folder: Path) -> list[dict[str, Any]]:
    """What two runs answer, of which the second one goes on."""
    return [train(folder, steps) for steps in (3, 5)]


def train(folder: Path, steps: int, *words: str) -> dict[str, Any]:
    """Trains up to a number of steps; where it began, what it saved."""
    slow, every = "slow" in words, 10**6 if "rarely" in words else 1
    layout_map, position, saved = rules(), Position(), []

    @flm.jit(layout_map=layout_map, donate_argnames=("state",))
    def train_step(state: Any) -> Any:
        count = state["count"]
        return {"w": state["w"] + 1, "v": state["v"] + count, "count": count + 1}

    with flm.checkpoint.Checkpointer(
        folder / "run", layout_map=layout_map, every=every, keep=3
    ) as checkpointer:
        data = None if "no-data" in words else position
        state, start = checkpointer.restore_or_init(create_fn, data=data)
        for step in range(start, steps):
            state = train_step(state)
            position.state["batches"] += 1
            last = step == steps - 1
            if checkpointer.save(step, state, data=data, force=last):
                saved.append(step)
            if slow:
                (folder / f"at_{step}").touch()
                time.sleep(0.05)
            if checkpointer.reached_preemption:
                break
        checkpointer.wait()
    return {
        "start": start,
        "saved": saved,
        "steps": checkpointer.steps,
        "data": position.state,
        "preempted": checkpointer.reached_preemption,
    }


if __name__ == "__main__":
    launch.join()
    launch.answer(train(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
