"""Keras's functions for devices and processes, by their names in `keras.distribution`.

Its `DeviceMesh`, `LayoutMap`, `TensorLayout` and `distribute_tensor` are
`flm.DeviceMesh` and so on. `docs/coming_from.md` lists every name of Keras's page.

Example:
    >>> import flax_layoutmap as flm
    >>> flm.keras.get_device_count(), flm.keras.list_devices()[-1]
    (8, 'cpu:7')
"""

import os
from typing import Any

import jax

from flax_layoutmap._core.errors import MeshError, ProcessError

_VARIABLES = "KERAS_DISTRIBUTION_"


def list_devices(device_type: str | None = None) -> list[str]:
    """Return the devices of all processes, as `"platform:id"`: Keras's `list_devices`.

    `device_type` is `"cpu"`, `"gpu"`, `"tpu"`, or None for JAX's default.
    `flm.DeviceMesh(..., devices=)` takes these names.

    Example:
        >>> import flax_layoutmap as flm
        >>> flm.keras.list_devices("cpu")[0]
        'cpu:0'

    Plain JAX: `jax.devices(device_type)`.
    """
    kind = device_type if device_type is None else device_type.lower()
    try:
        return [f"{device.platform}:{device.id}" for device in jax.devices(kind)]
    except RuntimeError as error:
        raise MeshError(
            f"there are no devices of type {device_type!r}; by default JAX uses "
            f"{jax.default_backend()!r} here"
        ) from error


def get_device_count(device_type: str | None = None) -> int:
    """Return the number of devices of all processes: Keras's `get_device_count`.

    >>> import flax_layoutmap as flm
    >>> flm.keras.get_device_count("cpu")
    8
    """
    return len(list_devices(device_type))


def initialize(
    job_addresses: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    **options: Any,
) -> None:
    """Join a job of several processes; call it before any other use of JAX.

    Keras's `initialize`, over `jax.distributed`. Arguments left as None are read from
    `KERAS_DISTRIBUTION_JOB_ADDRESSES`, `…_NUM_PROCESSES` and `…_PROCESS_ID`, then by
    JAX from its own variables or the cluster that it detects (Cloud TPU, Slurm, Open
    MPI, Kubernetes). A second call without arguments does nothing. Unlike Keras's, it
    does not set a seed.

    Args:
        job_addresses: `"host:port"` of process 0, or of all processes in order,
            separated by commas.
        num_processes: the number of processes.
        process_id: the number of this process, from 0.
        **options: further arguments of `jax.distributed.initialize`, such as
            `initialization_timeout`: how many seconds (300 by default) processes wait
            for the others before JAX ends them.

    Example:
        On a TPU slice, Slurm or GKE: `flm.keras.initialize()`. Elsewhere:

        >>> import flax_layoutmap as flm
        >>> flm.keras.initialize("10.0.0.1:1234,10.0.0.2:1234", process_id=2)
        Traceback (most recent call last):
        ...
        flax_layoutmap.errors.ProcessError: ...

    Plain JAX: `jax.distributed.initialize(coordinator, num_processes, process_id)`.
    """
    given = (job_addresses, num_processes, process_id)
    if jax.distributed.is_initialized() and given == (None, None, None) and not options:
        return
    listed = job_addresses or os.environ.get(f"{_VARIABLES}JOB_ADDRESSES", "")
    addresses = [address.strip() for address in listed.split(",") if address.strip()]
    coordinator = addresses[0] if addresses else None
    try:
        count = _number(num_processes, "NUM_PROCESSES")
        number = _number(process_id, "PROCESS_ID")
        if count is None and len(addresses) > 1:
            count = len(addresses)
        # JAX would only notice these after a wait, or not at all.
        if coordinator and not coordinator.rpartition(":")[2].isdigit():
            raise ValueError(f'an address is "host:port", got {coordinator!r}')
        if len(addresses) > 1 and count != len(addresses):
            raise ValueError(f"{len(addresses)} addresses for {count} processes")
        if count is not None and number is not None and not 0 <= number < count:
            raise ValueError(f"process_id is {number}, not one of 0 to {count - 1}")
        jax.distributed.initialize(coordinator, count, number, **options)
    except (ValueError, RuntimeError) as error:
        raise ProcessError(
            f"this process could not join the job at {coordinator or 'no address'}: "
            f"{error}; call flm.keras.initialize once, before any other use of JAX "
            "(jax.devices() is too late), in every process, with an address that all "
            'of them reach, flm.keras.initialize("host:1234", 2, 0); leave the call '
            "out for one process"
        ) from error


def _number(given: int | None, variable: str) -> int | None:
    text = os.environ.get(_VARIABLES + variable)
    return int(text) if given is None and text is not None else given
