"""flm.pod with libtpu, where it is installed."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import needs_libtpu
from pods import rules, struct

import flax_layoutmap as flm

pytestmark = pytest.mark.usefixtures("own_temporary_folder")

LAYERS = rules(up=(None, "model"), down=("model", None))
GATED = rules(**{"gate|up": (None, "data", "model")}, down=(None, "model", "data"))
# So that gathers stay gathers, as the partitioner makes them.
PLAIN = {
    "xla_tpu_enable_windowed_einsum_for_all_gather": False,
    "xla_tpu_enable_windowed_einsum_for_reduce_scatter": False,
    "xla_tpu_enable_async_collective_fusion": False,
}


def bfloat(*shape: int) -> jax.ShapeDtypeStruct:
    return struct(*shape, dtype=jnp.bfloat16)


def descends(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A step that takes the gradient of a loss from the parameters."""
    return lambda params, x: jax.tree.map(
        lambda w, g: w - g, params, jax.grad(loss)(params, x)
    )


@descends
def step(params: Any, x: jax.Array) -> jax.Array:
    return ((x @ params["up"]) @ params["down"]).astype(jnp.float32).sum()


def compiled(width: int = 512, **options: Any) -> flm.pod.PodReport:
    return flm.pod.compile(
        step,
        {"up": bfloat(256, width), "down": bfloat(width, 256)},
        bfloat(64, 256),
        topology="v5e:2x2",
        mesh="data=2,model=2",
        layout_map=LAYERS,
        **{"donate_argnames": "params", **options},
    )


@descends
def gated_layers(params: Any, x: jax.Array) -> jax.Array:
    """Layers in which the compiler has something to merge.

    Going back, the sums of gate and up are added, and each kernel is gathered for the
    forward pass that is done again and for the gradient.
    """

    def layer(x: jax.Array, one: Any) -> tuple[jax.Array, None]:
        mean = (x.astype(jnp.float32) ** 2).mean(-1, keepdims=True)
        y = x * jax.lax.rsqrt(mean).astype(x.dtype)
        hidden = jax.nn.silu(y @ one["gate"]) * (y @ one["up"])
        return x + hidden @ one["down"], None

    y, _ = jax.lax.scan(jax.checkpoint(layer), x, params)
    return (y.astype(jnp.float32) ** 2).mean()


@pytest.mark.parametrize(
    ("name", "slices", "mesh"),
    [("v5e:2x2", 1, "data=2,model=2"), ("v5p:2x2x1", 2, "data=2,model=4")],
)
@needs_libtpu
def test_the_partitioner_agrees(name: str, slices: int, mesh: str) -> None:
    params = {
        "gate": bfloat(4, 1024, 2048),
        "up": bfloat(4, 1024, 2048),
        "down": bfloat(4, 2048, 1024),
    }
    given = (gated_layers, params, bfloat(4096, 1024))
    where: dict[str, Any] = {"topology": name, "slices": slices, "mesh": mesh}
    where |= {"layout_map": GATED, "donate_argnames": "params"}
    ours = flm.pod.plan(*given, **where, engine="partitioner")
    theirs = flm.pod.compile(*given, **where, compiler_options=PLAIN)
    assert theirs.fits is True and not theirs.unread and not theirs.warnings
    assert theirs.memory.at_rest == ours.memory.at_rest
    assert theirs.memory.temporary_bytes and theirs.memory.peak_bytes
    assert theirs.memory.at_rest_bytes <= theirs.memory.peak_bytes
    assert theirs.flops_per_device == pytest.approx(ours.flops_per_device, rel=0.01)
    paths = {each.path for each in theirs.collectives if each.axes == ("data",)}
    assert paths >= {"params/gate", "params/up", "params/down"}
    assert any(each.over_dcn for each in ours.collectives) == (slices > 1)
    assert any(each.over_dcn for each in theirs.collectives) == (slices > 1)
    sent = theirs.wire_bytes(axis="model")
    assert ours.wire_bytes(axis="model") == pytest.approx(sent, rel=0.05)
    if slices == 1:
        sent = theirs.wire_bytes(axis="data")
        assert ours.wire_bytes(axis="data") == pytest.approx(sent, rel=0.05)


@needs_libtpu
def test_what_stays_inside_of_a_slice_is_not_over_dcn() -> None:
    report = flm.pod.compile(
        step,
        {"up": bfloat(1024, 2048), "down": bfloat(2048, 1024)},
        bfloat(512, 1024),
        topology="v5e:2x2",
        slices=2,
        mesh="data=4,model=2",
        layout_map=rules(up=("data", "model"), down=("model", "data")),
        donate_argnames="params",
    )
    over = {each.over_dcn for each in report.collectives if "data" in each.axes}
    assert over == {False, True}
    assert {"data", "data (DCN)"} <= report.seconds_bound.keys()


@needs_libtpu
def test_a_step_that_does_not_fit() -> None:
    options = {"xla_tpu_max_hbm_size_mib": 500}
    report = compiled(width=2**20, compiler_options=options)
    assert report.fits is False and report.memory.limit_bytes == 500 * 2**20
    assert (report.memory.peak_bytes or 0) > 500 * 2**20


@needs_libtpu
def test_options_that_libtpu_does_not_know() -> None:
    with pytest.raises(flm.LayoutError, match=r"^libtpu refuses the program for v5e"):
        compiled(compiler_options={"xla_nonsense": 1})
