"""Parameters that the TPU compiler gathers again, as their uses are far apart."""

import collections
import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import flax_layoutmap as flm

EXAMPLE = Path(__file__).parents[1] / "examples" / "pod_plan.py"
TWICE = {"query": 2, "key": 2, "value": 2, "out": 2}


@pytest.fixture
def example() -> Any:
    spec = importlib.util.spec_from_file_location("pod_plan_again", EXAMPLE)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def gathers(example: Any, **options: Any) -> dict[str, int]:
    """Kernel → how often it is gathered in a layer, of a small decoder."""
    sizes = {"dim": 1024, "layers": 4, "heads": 8, "kv_heads": 4, "hidden": 2048}
    model, optimizer = example.abstract_state(example.Config(**sizes, vocab=4096))
    tokens = jax.ShapeDtypeStruct((8, 513), jnp.int32)
    report = flm.pod.plan(
        example.train_step,
        model,
        optimizer,
        tokens,
        mesh="data=1,fsdp=2,tensor=2",
        **options,
    )
    found: collections.Counter[str] = collections.Counter()
    for one in report.collectives:
        if one.kind == "all-gather" and one.path and "attention" in one.path:
            found[one.path.split("/")[-2]] += one.executions // 4
    return dict(found)


def test_far_from_the_first(example: Any) -> None:
    # As libtpu 0.0.42 compiles it for v5e:2x2.
    assert gathers(example) == {**TWICE, "query": 3, "key": 3}


def test_near_enough(example: Any) -> None:
    # As it compiles the same without rotations: there is less between.
    example.rotate = lambda x: x
    assert gathers(example) == TWICE


def test_one_operation_decides(example: Any) -> None:
    example.rotate = lambda x: jnp.sin(x.astype(jnp.float32)).astype(x.dtype)
    assert gathers(example) == {**TWICE, "query": 3, "key": 3}


def test_on_gpus_once_for_all_uses(example: Any) -> None:
    # There the partitioner gathers once for all uses.
    assert gathers(example, platform="cuda") == TWICE
