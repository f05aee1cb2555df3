"""Devices by name: Keras's `cpu:0` and DTensor's long names."""

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

    `flm.DeviceMesh(..., devices=)` takes these names.

    Args:
        device_type: `"cpu"`, `"gpu"`, `"tpu"`; None for what JAX uses by default.

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

    Example:
        >>> import flax_layoutmap as flm
        >>> flm.keras.get_device_count() == len(flm.keras.list_devices())
        True

    Plain JAX: `jax.device_count(device_type)`.
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


def devices_here(keys: Sequence[Key]) -> list[Any | None]:
    """The devices with these platforms and ids; None where there is no such device."""
    known = {
        (platform, device.id): device
        for platform in {platform for platform, _ in keys}
        for device in _on_platform(platform)
    }
    return [known.get(key) for key in keys]


def require_here(keys: Sequence[Key]) -> list[Any]:
    """The devices with these platforms and ids; raises if some are missing."""
    devices = devices_here(keys)
    missing = [key for key, device in zip(keys, devices, strict=True) if device is None]
    if missing:
        raise MeshError(
            f"there are no devices {_listed(missing)}; this job has "
            f"{_listed(map(key_of, jax.devices()))}"
        )
    return devices


def _on_platform(platform: str) -> list[Any]:
    try:
        return jax.devices(platform)
    except RuntimeError:  # an unknown platform, or one without devices
        return []


def _listed(keys: Iterable[Key]) -> str:
    names = [f"{platform}:{number}" for platform, number in keys]
    return ", ".join(names if len(names) < 9 else [*names[:7], "…", names[-1]])


def memory_kinds(device: Any) -> list[str]:
    """The kinds of memory that a device has; empty if it does not say."""
    try:
        return [memory.kind for memory in device.addressable_memories()]
    except jax.errors.JaxRuntimeError:  # that of a topology without devices
        return []
