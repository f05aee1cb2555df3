"""Devices by name: Keras's `cpu:0` and DTensor's long names."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from flax_layoutmap._core.errors import MeshError

# "TPU:0", "/device:TPU:0" and "/job:localhost/replica:0/task:0/device:TPU:0".
_NAME = re.compile(r"(?:/(?:job|replica|task):[^/]+)*/?(?:device:)?([A-Za-z]\w*):(\d+)")


def list_devices(device_type: str | None = None) -> list[str]:
    """Return the devices of all processes, as `"platform:id"`.

    Keras's `list_devices`. `flm.DeviceMesh(..., devices=)` takes these names.

    Args:
        device_type: `"cpu"`, `"gpu"`, `"tpu"`; None for what JAX uses by default.

    Raises:
        MeshError: there are no such devices.

    Example:
        >>> import flax_layoutmap as flm
        >>> flm.keras.list_devices("cpu")[0]
        'cpu:0'

    Plain JAX: `jax.devices(device_type)`.
    """
    return [f"{device.platform}:{device.id}" for device in _devices(device_type)]


def get_device_count(device_type: str | None = None) -> int:
    """Return the number of devices of all processes.

    Keras's `get_device_count`.

    Args:
        device_type: as for `list_devices`.

    Raises:
        MeshError: there are no such devices.

    Example:
        >>> import flax_layoutmap as flm
        >>> flm.keras.get_device_count() == len(flm.keras.list_devices())
        True

    Plain JAX: `jax.device_count(device_type)`.
    """
    return len(_devices(device_type))


def _devices(device_type: str | None) -> list[Any]:
    if not isinstance(device_type, str | None):
        raise MeshError(
            'device_type must be a string such as "cpu", "gpu" or "tpu", got '
            f"{device_type!r}"
        )
    kind = device_type if device_type is None else device_type.lower()
    try:
        return jax.devices(kind)
    except RuntimeError as error:
        raise MeshError(
            f"there are no devices of type {device_type!r}; by default JAX uses "
            f"{jax.default_backend()!r} here"
        ) from error


def key_of(device: Any) -> tuple[str, int]:
    """Platform and id, which identify a device in the job."""
    return device.platform, device.id


def key_in(name: str) -> tuple[str, int]:
    """Platform and id in a name such as `"cpu:0"`."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise MeshError(
            f'cannot read the device {name!r}; write its platform and id, "cpu:0"'
        )
    return found[1].lower(), int(found[2])


def key_given(device: Any) -> tuple[str, int]:
    """Platform and id of a device, or of its name."""
    if isinstance(device, str):
        return key_in(device)
    if not hasattr(device, "device_kind"):
        raise MeshError(
            "devices must be JAX devices, such as jax.devices()[:4], or names like "
            f'"cpu:0", got {device!r}'
        )
    return key_of(device)


def long_name(device: Any) -> str:
    """DTensor's name of a device; the number is JAX's id, which is global."""
    return (
        f"/job:localhost/replica:0/task:{device.process_index}/device:"
        f"{device.platform.upper()}:{device.id}"
    )


def devices_here(keys: Sequence[tuple[str, int]]) -> list[Any | None]:
    """The devices with these platforms and ids; None where there is no such device."""
    known = {
        (platform, device.id): device
        for platform in {platform for platform, _ in keys}
        for device in _on_platform(platform)
    }
    return [known.get(key) for key in keys]


def require_here(keys: Sequence[tuple[str, int]]) -> list[Any]:
    """The devices with these platforms and ids; raises if some are missing."""
    found = devices_here(keys)
    missing = [key for key, device in zip(keys, found, strict=True) if device is None]
    if missing:
        raise MeshError(
            f"there are no devices {_listed(missing)}; this job has "
            f"{_listed(map(key_of, jax.devices()))}"
        )
    return found


def _on_platform(platform: str) -> list[Any]:
    try:
        return jax.devices(platform)
    except RuntimeError:  # an unknown platform, or one without devices
        return []


def _listed(keys: Iterable[tuple[str, int]]) -> str:
    names = [f"{platform}:{number}" for platform, number in keys]
    return ", ".join(names if len(names) < 9 else [*names[:7], "…", names[-1]])


def cpu_devices_beside(devices: Iterable[Any]) -> list[Any] | None:
    """For each device a CPU device of its process, or None if there are too few."""
    spare: dict[int, list[Any]] = {}
    for cpu in reversed(_on_platform("cpu")):
        spare.setdefault(cpu.process_index, []).append(cpu)
    beside = []
    for device in devices:
        if not spare.get(device.process_index):
            return None
        beside.append(spare[device.process_index].pop())
    return beside


def memory_kinds(device: Any) -> list[str]:
    """The kinds of memory that a device has; empty if it does not say."""
    try:
        return [memory.kind for memory in device.addressable_memories()]
    except jax.errors.JaxRuntimeError:  # that of a topology without devices
        return []
