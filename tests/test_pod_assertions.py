"""PodReport.expect and .forbid: they may not pass where they do not know."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import flax_layoutmap as flm
from flax_layoutmap.pod._records import Kind

KIB = 1 << 10


def sends(kind: Kind, *axes: str, bytes: int = 32 * KIB) -> flm.pod.Collective:
    return flm.pod.Collective(
        kind=kind,
        axes=axes,
        bytes=bytes,
        wire_bytes=bytes,
        executions=1,
        dtype="float32",
        shape=(8,),
    )


def report(*collectives: flm.pod.Collective, **more: Any) -> flm.pod.PodReport:
    return flm.pod.PodReport(
        engine="plan",
        step="step",
        mesh=flm.DeviceMesh.abstract("data=4,model=2"),
        collectives=collectives,
        **more,
    )


def test_small_collectives_count_together() -> None:
    """Layers one by one send as much as a scan over them."""
    layers = report(*(sends("all-reduce", "model"),) * 3)
    layers.expect(axis="model", kinds={"all-reduce"})
    with pytest.raises(AssertionError, match="3 times, 96.0 KiB"):
        layers.expect(axis="model", kinds=set())
    with pytest.raises(AssertionError, match="3 times, 96.0 KiB"):
        layers.forbid(axis="model", small_bytes=90 * KIB)
    layers.forbid(axis="model", small_bytes=100 * KIB)
    # Not with others: of another kind, or over other axes.
    report(
        sends("all-reduce", "model"),
        sends("all-gather", "model"),
        sends("all-reduce", "data", "model"),
    ).expect(axis="model", kinds=set())


def test_axes_that_are_not_known_may_be_any() -> None:
    unknown = report(sends("all-gather", bytes=1 << 20))
    for axis in ("data", "model"):
        with pytest.raises(AssertionError, match=r"all-gather over \? of -: 1 times"):
            unknown.expect(axis=axis, kinds=set())
        with pytest.raises(AssertionError, match=r"all-gather over \? of -: 1 times"):
            unknown.forbid(axis=axis, kind="all-gather")
        # That it runs over this one is not known either.
        with pytest.raises(AssertionError, match="all-gather: expected, and none"):
            unknown.expect(axis=axis, kinds={"all-gather"})
        assert unknown.wire_bytes(axis) == 0


def test_what_was_not_read_may_be_anything() -> None:
    given = report(
        sends("all-reduce", "model", bytes=1 << 20),
        unrecognised={"cumsum along a sharded dim": 2},
        unrecognised_at={"cumsum along a sharded dim": ("model.py:7 f",)},
    )
    message = (
        "the plan found nothing against it, but did not read all of step on mesh "
        "data=4,model=2:\n"
        "  - cumsum along a sharded dim (2); at model.py:7 f\n"
        "pass unrecognised=True where these may do what they like"
    )
    with pytest.raises(AssertionError) as caught:
        given.expect(axis="model", kinds={"all-reduce"})
    assert str(caught.value) == message
    with pytest.raises(AssertionError) as caught:
        given.forbid(kind="all-gather")
    assert str(caught.value) == message
    given.expect(axis="model", kinds={"all-reduce"}, unrecognised=True)
    given.forbid(kind="all-gather", unrecognised=True)
    # What was found is said first.
    with pytest.raises(AssertionError, match="was to have no collective"):
        given.forbid(kind="all-reduce", unrecognised=True)


def test_a_line_that_nothing_comes_from() -> None:
    layout_map = flm.LayoutMap(batch="data")
    layout_map["w"] = ("data", "model")

    def product(params: Any, x: Any) -> Any:
        return x @ params["w"]

    found = flm.pod.plan(
        lambda params, x: jnp.tanh(product(params, x)),
        {"w": jax.ShapeDtypeStruct((16, 16), jnp.float32)},
        jax.ShapeDtypeStruct((512, 16), jnp.float32),
        mesh="data=4,model=2",
        layout_map=layout_map,
    )
    with pytest.raises(AssertionError, match="all-gather over data of params/w"):
        found.forbid(source="product$")
    # A line of the step without collectives; lines that are none of it.
    found.forbid(source=r"^test_pod_assertions.py:\d+ .*<lambda>")
    with pytest.raises(flm.LayoutError) as caught:
        found.forbid(source="prodct")
    assert str(caught.value).startswith("no operation of <lambda> comes from a line")
    assert str(caught.value).endswith(", so that nothing would be forbidden")
    with pytest.raises(flm.LayoutError, match="no operation of"):
        found.forbid(source="model.py:36")
