"""Write `relayout.json`: the results of TensorFlow's own DTensor, for the tests.

Run by hand, where TensorFlow is installed; the tests themselves need only the file:

    python tests/golden/make_relayout.py

The array is 0, 1, … of shape (8, 8) on a mesh x=4, y=2. Each device's part is written
as its shape and its first and last value, which in such an array say which part it is.
`null`: the original raised.
"""

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

# Not by `import`: the project is checked where there is no TensorFlow.
tf: Any = importlib.import_module("tensorflow")
dtensor: Any = tf.experimental.dtensor

U, MATCH = dtensor.UNSHARDED, dtensor.MATCH
SPECS = [(U, U), ("x", U), (U, "x"), ("x", "y"), ("y", "x"), (U, "y"), ("y", U)]
X = np.arange(64, dtype=np.float32).reshape(8, 8)
Spec = tuple[str, ...]


def attempt(call: Callable[[], Any]) -> Any:
    """The result, or None where the original raises."""
    try:
        return call()
    except (tf.errors.OpError, ValueError, TypeError):
        return None


def parts(tensor: Any) -> list[Any]:
    """Shape, first and last value of each device's part."""
    arrays = [np.asarray(part.numpy()) for part in dtensor.unpack(tensor)]
    return [[list(a.shape), float(a.flat[0]), float(a.flat[-1])] for a in arrays]


def clashes(old: Spec, new: Spec) -> bool:
    """Whether keeping the `MATCH` dims would use an axis twice."""
    axes = [a if b == MATCH else b for a, b in zip(old, new, strict=True)]
    return axes[0] == axes[1] != U


def specs(tensor: Any) -> list[str]:
    return list(dtensor.fetch_layout(tensor).sharding_specs)


def main() -> None:
    cpus = tf.config.list_physical_devices("CPU")
    config = tf.config.LogicalDeviceConfiguration
    tf.config.set_logical_device_configuration(cpus[0], [config()] * 8)
    devices = [f"CPU:{n}" for n in range(8)]
    mesh = dtensor.create_mesh([("x", 4), ("y", 2)], devices=devices)

    def lay(spec: Spec, value: Any = X) -> Any:
        return dtensor.relayout(value, dtensor.Layout(list(spec), mesh))

    def ones(spec: Spec) -> Any:
        return lay(spec, np.ones((8, 8), np.float32))

    def transition(old: Spec, new: Spec) -> Any:
        return attempt(lambda: parts(lay(new, lay(old))))

    def matched(old: Spec, new: Spec) -> Any:
        return attempt(lambda: specs(lay(new, lay(old))))

    def like(old: Spec, other: Spec) -> Any:
        return attempt(lambda: parts(dtensor.relayout_like(lay(old), ones(other))))

    def gradients(old: Spec, new: Spec) -> Any:
        x = lay(old)
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                moved = lay(new, x)
                y = moved * moved
            first = inner.gradient(y, x, output_gradients=ones(new))
        second = outer.gradient(first, x, output_gradients=ones(old))
        return {
            "first": specs(first),
            "second": specs(second),
            "parts": parts(first),
            "second_parts": parts(second),
        }

    def like_gradient(old: Spec, other: Spec) -> Any:
        x, leader = lay(old), ones(other)
        with tf.GradientTape() as tape:
            tape.watch([x, leader])
            y = dtensor.relayout_like(x, leader)
        found = tape.gradient(y, [x, leader], output_gradients=ones(other))
        return {"x": specs(found[0]), "like": found[1]}

    def packed(spec: Spec) -> Any:
        layout = dtensor.Layout(list(spec), mesh)
        pieces = [np.full((2, 4), n, np.float32) for n in range(8)]
        whole = attempt(lambda: dtensor.pack(pieces, layout))
        return None if whole is None else [list(whole.shape), parts(whole)]

    pairs = [(old, new) for old in SPECS for new in SPECS]
    some = [(SPECS[at], SPECS[(at + step) % 7]) for at in range(7) for step in (1, 3)]
    kept = [(old, new) for old in SPECS for new in ((MATCH, "y"), ("x", MATCH))]
    kept += [(old, (MATCH, MATCH)) for old in SPECS[:4]]
    # An axis that would be used twice ends the process in TensorFlow 2.21.
    kept = [pair for pair in kept if not clashes(*pair)]
    found = {
        "transitions": [[*pair, transition(*pair)] for pair in pairs],
        "match": [[*pair, matched(*pair)] for pair in kept],
        "like": [[*pair, like(*pair)] for pair in some],
        "gradients": [[*pair, gradients(*pair)] for pair in some],
        "like_gradients": [[*pair, like_gradient(*pair)] for pair in some[:4]],
        "pack": [[spec, packed(spec)] for spec in SPECS],
    }
    lines = [f'  "{key}": {json.dumps(value)}' for key, value in found.items()]
    path = Path(__file__).parent / "relayout.json"
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
