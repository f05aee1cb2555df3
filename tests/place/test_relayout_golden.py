"""Relayouts compared with those of TensorFlow's own DTensor: `golden/relayout.json`.

`golden/make_relayout.py` wrote the file; TensorFlow is not needed here.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_layoutmap as flm

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "golden/relayout.json").read_text("utf-8")
)
MESH = flm.DeviceMesh((4, 2), ("x", "y"), jax.devices())
X = np.arange(64, dtype=np.float32).reshape(8, 8)
WAYS = pytest.mark.parametrize("way", [lambda f: f, jax.jit], ids=["eagerly", "jit"])


def lay(spec: list[str], value: Any = X) -> jax.Array:
    return flm.relayout(value, flm.TensorLayout(spec, MESH))


def parts(x: Any) -> list[Any]:
    """Shape, first and last value of each device's part, as the file has them."""
    arrays = [np.asarray(part) for part in flm.dtensor.unpack(x)]
    return [[list(a.shape), float(a.flat[0]), float(a.flat[-1])] for a in arrays]


def specs(x: Any) -> list[str]:
    layout = flm.dtensor.fetch_layout(x)
    assert layout is not None
    return layout.sharding_specs


def test_the_file_has_every_transition() -> None:
    assert len(GOLDEN["transitions"]) == 49
    assert len({json.dumps(found) for _, _, found in GOLDEN["transitions"]}) == 7


@WAYS
def test_every_transition(way: Any) -> None:
    starts = {json.dumps(old): lay(old) for old, _, _ in GOLDEN["transitions"]}

    def every(starts: dict[str, Any]) -> list[Any]:
        return [lay(new, starts[json.dumps(o)]) for o, new, _ in GOLDEN["transitions"]]

    moved = way(every)(starts)
    for y, (old, new, found) in zip(moved, GOLDEN["transitions"], strict=True):
        assert parts(y) == found, (old, new)


def test_match() -> None:
    for old, new, found in GOLDEN["match"]:
        # DTensor refuses a layout of MATCH alone; here it keeps everything.
        assert (found is None) == (new == ["match", "match"])
        assert specs(lay(new, lay(old))) == (found or old), (old, new)


@WAYS
def test_like(way: Any) -> None:
    follow = way(flm.relayout_like)
    for old, other, found in GOLDEN["like"]:
        assert parts(follow(lay(old), lay(other, 0 * X))) == found, (old, other)


@pytest.mark.slow
@WAYS
def test_gradients(way: Any) -> None:
    for old, new, found in GOLDEN["gradients"][:: 1 if way is jax.jit else 2]:

        def first(x: Any, new: Any = new) -> Any:
            return jax.grad(lambda x: jnp.sum(lay(new, x) ** 2))(x)

        def both(x: Any, first: Any = first) -> Any:
            return first(x), jax.grad(lambda x: jnp.sum(first(x)))(x)

        one, two = way(both)(lay(old))
        assert specs(one) == found["first"], (old, new)
        assert specs(two) == found["second"], (old, new)
        assert parts(one) == found["parts"]
        assert parts(two) == found["second_parts"]


@WAYS
def test_gradients_of_like(way: Any) -> None:
    for old, other, found in GOLDEN["like_gradients"]:
        loss = jax.grad(lambda x, like: jnp.sum(flm.relayout_like(x, like)), (0, 1))
        first, to_like = way(loss)(lay(old), lay(other))
        assert specs(first) == found["x"]
        # DTensor's None is JAX's zeros.
        assert found["like"] is None and not np.any(to_like)


def test_pack_and_unpack() -> None:
    pieces = [np.full((2, 4), n, np.float32) for n in range(8)]
    for spec, (shape, found) in GOLDEN["pack"]:
        layout = flm.TensorLayout(spec, MESH)
        # DTensor takes replicas that differ; here that has to be asked for.
        whole = flm.dtensor.pack(pieces, layout, check=False)
        assert (list(whole.shape), parts(whole)) == (shape, found), spec
