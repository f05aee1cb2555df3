"""The generations of TPU as plain data, each figure with its source.

What the compiler tells nobody (memory, links, the sizes that can be had) is here.
"""

import dataclasses

Shape = tuple[int, ...]
_GIB = 2**30
_GIGABIT = 10**9 / 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One generation of TPU.

    Attributes:
        name: `"v5p"`.
        device_kind: what `jax.Device.device_kind` says.
        dims: dims of the network between the chips: 2 or 3.
        devices_per_chip: JAX devices on one chip.
        megacore: whether the two cores of a chip are one device.
        counts_cores: whether an accelerator type counts TensorCores, two to a chip;
            otherwise it counts chips.
        max_chips: chips of the largest slice.
        small_shapes: the shapes below those of the general rule.
        max_dim: for two dims, the length of a side of a whole pod, on which the
            network closes to a ring.
        hbm_bytes: memory of one device, as built.
        hbm_limit_bytes: what the compiler lets a program use of it.
        flops: peak of one device in bfloat16, in floating-point operations per second.
        link_bytes_per_second: one link between chips, in one direction; None where
            it is not known.
        dcn_bytes_per_second: share of one chip in the network between slices; None
            where it is not known.
    """

    __module__ = "flax_layoutmap.pod"
    name: str
    device_kind: str
    dims: int
    devices_per_chip: int
    megacore: bool
    counts_cores: bool
    max_chips: int
    small_shapes: tuple[Shape, ...]
    max_dim: int | None
    hbm_bytes: int
    hbm_limit_bytes: int
    flops: float
    link_bytes_per_second: float | None
    dcn_bytes_per_second: float | None


_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_FLAT_V2 = ((2, 2), (4, 4), (8, 8), (8, 16), (16, 16))
_FLAT_V3 = ((2, 2), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32))
_BELOW_A_CUBE = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))

GENERATIONS = {
    entry.name: entry
    for entry in (
        Generation(
            name="v2",
            device_kind="TPU v2",
            dims=2,
            devices_per_chip=2,
            megacore=False,
            counts_cores=True,
            max_chips=256,
            small_shapes=_FLAT_V2,
            max_dim=16,
            hbm_bytes=8 * _GIB,
            hbm_limit_bytes=round(7.48 * _GIB),
            flops=22.5e12,
            link_bytes_per_second=None,
            dcn_bytes_per_second=None,
        ),
        Generation(
            name="v3",
            device_kind="TPU v3",
            dims=2,
            devices_per_chip=2,
            megacore=False,
            counts_cores=True,
            max_chips=1024,
            small_shapes=_FLAT_V3,
            max_dim=32,
            hbm_bytes=16 * _GIB,
            hbm_limit_bytes=round(15.48 * _GIB),
            flops=61.5e12,
            link_bytes_per_second=1e11,
            dcn_bytes_per_second=None,
        ),
        Generation(
            name="v4",
            device_kind="TPU v4",
            dims=3,
            devices_per_chip=1,
            megacore=True,
            counts_cores=True,
            max_chips=4096,
            small_shapes=_BELOW_A_CUBE,
            max_dim=None,
            hbm_bytes=32 * _GIB,
            hbm_limit_bytes=round(30.75 * _GIB),
            flops=275e12,
            link_bytes_per_second=4.5e10,
            dcn_bytes_per_second=2.5e10 / 4,
        ),
        Generation(
            name="v5e",
            device_kind="TPU v5 lite",
            dims=2,
            devices_per_chip=1,
            megacore=False,
            counts_cores=False,
            max_chips=256,
            small_shapes=_FLAT,
            max_dim=16,
            hbm_bytes=16 * _GIB,
            hbm_limit_bytes=round(15.75 * _GIB),
            flops=197e12,
            link_bytes_per_second=4.5e10,
            dcn_bytes_per_second=25 * _GIGABIT,
        ),
        Generation(
            name="v5p",
            device_kind="TPU v5",
            dims=3,
            devices_per_chip=1,
            megacore=True,
            counts_cores=True,
            max_chips=6144,
            small_shapes=_BELOW_A_CUBE,
            max_dim=None,
            hbm_bytes=96 * _GIB,
            hbm_limit_bytes=round(95.74 * _GIB),
            flops=459e12,
            link_bytes_per_second=9e10,
            dcn_bytes_per_second=50 * _GIGABIT,
        ),
        Generation(
            name="v6e",
            device_kind="TPU v6 lite",
            dims=2,
            devices_per_chip=1,
            megacore=False,
            counts_cores=False,
            max_chips=256,
            small_shapes=_FLAT,
            max_dim=16,
            hbm_bytes=32 * _GIB,
            hbm_limit_bytes=round(31.25 * _GIB),
            flops=918e12,
            link_bytes_per_second=9e10,
            dcn_bytes_per_second=100 * _GIGABIT,
        ),
        Generation(
            name="tpu7x",
            device_kind="TPU7x",
            dims=3,
            devices_per_chip=2,
            megacore=False,
            counts_cores=True,
            max_chips=9216,
            small_shapes=((1, 1, 1), *_BELOW_A_CUBE),
            max_dim=None,
            hbm_bytes=96 * _GIB,
            hbm_limit_bytes=round(94.75 * _GIB),
            flops=2307e12 / 2,
            link_bytes_per_second=1e11,
            dcn_bytes_per_second=100 * _GIGABIT,
        ),
    )
}

# Field of a Generation → where its figures are from, and when they were read.
SOURCES = {
    "devices_per_chip": "measured with libtpu 0.0.42, 2026-11",
    "hbm_limit_bytes": "measured with libtpu 0.0.42 (the limit in its error), 2026-11",
    "max_chips": "Google Cloud TPU documentation, pages v2 to tpu7x, 2026-11",
    "small_shapes": "Google Cloud TPU documentation, MaxText's table, 2026-11",
    "hbm_bytes": (
        "Google Cloud TPU documentation, 2026-11; v5e and v6e say GB there; v5p: "
        "jax-ml/scaling-book, 2025-02, as the documentation has 95 GiB, which are "
        "less than the compiler lets a program use"
    ),
    "flops": "Google Cloud TPU documentation, pages v2 to tpu7x, 2026-11",
    "wrap": "MaxText's table of slices, 2026-11; v2 and v3 inferred from their pods",
    "link_bytes_per_second": (
        "jax-ml/scaling-book, 2025-02; tpu7x: 1200 GB/s both ways over 6 links, from "
        "the Google Cloud TPU documentation, 2026-11"
    ),
    "dcn_bytes_per_second": (
        "Google Cloud TPU documentation, 2026-11; v4: 25 GB/s for each host of 4 "
        "chips, from jax-ml/scaling-book, 2025-02"
    ),
}

ALIASES = {
    "v5": "v5p",
    "v5litepod": "v5e",
    "v5lite": "v5e",
    "v5 lite": "v5e",
    "v6 lite": "v6e",
    "trillium": "v6e",
    "7x": "tpu7x",
    "v7x": "tpu7x",
    "tpu7": "tpu7x",
    "ironwood": "tpu7x",
}
