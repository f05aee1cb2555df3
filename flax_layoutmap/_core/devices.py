"""Devices by name: Keras's `cpu:0` and DTensor's long names."""

import contextlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from flax_layoutmap._core.errors import MeshError

# "TPU:0", "/device:TPU:0" and "/job:localhost/replica:0/task:0/device:TPU:0".
_NAME = re.compile(r"(?:/(?:job|replica|task):[^/]+)*/?(?:device:)?([A-Za-z]\w*):(\d+)")
Key = tuple[str, int]


def list_devices(device_type: str | None = None) -> list[str]:
    """Return the devices of all processes, as `"platform:id"`: Keras's `list_devices`.

    `device_type` is `"cpu"`, `"gpu"`, `"tpu"`, or None for what JAX uses by default.
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


def key_of(device: Any) -> Key:
    """Platform and id of a device, or of its name; they identify it in the job."""
    if isinstance(device, str):
        match = _NAME.fullmatch(device)
        if match is None:
            raise MeshError(
                f'cannot read the device {device!r}; write its platform and id, "cpu:0"'
            )
        return match[1].lower(), int(match[2])
    if not hasattr(device, "device_kind"):
        raise MeshError(
            "devices must be JAX devices, such as jax.devices()[:4], or names like "
            f'"cpu:0", got {device!r}'
        )
    return device.platform, device.id


def long_name(device: Any) -> str:
    """DTensor's name of a device; the number is JAX's id, which is global."""
    return (
        f"/job:localhost/replica:0/task:{device.process_index}/device:"
        f"{device.platform.upper()}:{device.id}"
    )


def devices_here(given: Sequence[Any]) -> list[Any | None]:
    """The devices, given as such or by name; None where there is no such device."""
    keys = [key_of(device) for device in given]
    if len(set(keys)) != len(keys):
        raise MeshError(f"devices holds one device twice: {list(given)}")
    known = {}
    for platform in {key_of(name)[0] for name in given if isinstance(name, str)}:
        with contextlib.suppress(RuntimeError):  # it is unknown, or without devices
            known |= {(platform, d.id): d for d in jax.devices(platform)}
    pairs = zip(keys, given, strict=True)
    return [known.get(key) if isinstance(d, str) else d for key, d in pairs]


def require_here(given: Sequence[Any]) -> list[Any]:
    """The same devices; raises if some are missing."""
    devices = devices_here(given)
    pairs = zip(given, devices, strict=True)
    if missing := [key_of(name) for name, device in pairs if device is None]:
        raise MeshError(
            f"there are no devices {_listed(missing)}; this job has "
            f"{_listed(map(key_of, jax.devices()))}"
        )
    return devices


def _listed(keys: Iterable[Key]) -> str:
    names = [f"{platform}:{number}" for platform, number in keys]
    return ", ".join(names if len(names) < 9 else [*names[:7], "…", names[-1]])


def memory_kinds(device: Any) -> list[str]:
    """The kinds of memory that a device has; empty if it does not say."""
    try:
        return [memory.kind for memory in device.addressable_memories()]
    except jax.errors.JaxRuntimeError:  # that of a topology without devices
        return []
