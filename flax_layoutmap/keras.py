"""Keras's functions for devices and processes, by their names in `keras.distribution`.

Its `DeviceMesh`, `LayoutMap`, `TensorLayout` and `distribute_tensor` are those of the
package itself, `flm.DeviceMesh` and so on. `docs/coming_from.md` has every name of
Keras's page.

Example:
    >>> import flax_layoutmap as flm
    >>> flm.keras.get_device_count(), flm.keras.list_devices()[-1]
    (8, 'cpu:7')
"""

from flax_layoutmap._core.devices import get_device_count as get_device_count
from flax_layoutmap._core.devices import list_devices as list_devices
from flax_layoutmap._core.initialize import initialize as initialize
