"""Process 0 has ended, and process 1 fails where it waits for it; then both end."""

from flax import nnx

import flax_layoutmap as flm
from multiprocess import launch

if __name__ == "__main__":
    if launch.join(shutdown=3) == 1:
        layout_map = flm.LayoutMap("data=2")
        layout_map["kernel"] = (None, "data")
        flm.create(lambda: nnx.Linear(8, 9, rngs=nnx.Rngs(0)), layout_map)
