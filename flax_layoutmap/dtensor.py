"""DTensor's functions on single arrays, by their names in `tf.experimental.dtensor`.

`Layout` is `flm.TensorLayout`, `Mesh` is `flm.DeviceMesh`, and `relayout` and
`relayout_like` are `flm.relayout` and `flm.relayout_like`. `docs/coming_from.md` lists
every name of DTensor's pages.

Example:
    >>> import numpy as np, flax_layoutmap as flm
    >>> from flax_layoutmap import dtensor
    >>> layout = flm.TensorLayout(("x",), flm.DeviceMesh("x=8"))
    >>> packed = dtensor.pack([np.ones(2)] * 8, layout)
    >>> dtensor.fetch_layout(packed) == layout, len(dtensor.unpack(packed))
    (True, 8)
"""

from flax_layoutmap._core.fetch import check_layout as check_layout
from flax_layoutmap._core.fetch import fetch_layout as fetch_layout
from flax_layoutmap._core.fetch import is_distributed as is_distributed
from flax_layoutmap._place.dtensor import call_with_layout as call_with_layout
from flax_layoutmap._place.dtensor import copy_to_mesh as copy_to_mesh
from flax_layoutmap._place.dtensor import pack as pack
from flax_layoutmap._place.dtensor import unpack as unpack
from flax_layoutmap._rules.rules import default_mesh as default_mesh
from flax_layoutmap._rules.rules import get_default_mesh as get_default_mesh
