"""The examples of DTensor's documentation, written with flax_layoutmap.

    python examples/dtensor_tour.py

Runs on eight virtual CPU devices, whatever the machine has; a few seconds. The pages
are those of `tf.experimental.dtensor` (`Layout`, `Mesh`, `relayout_like`) and of
tf-keras's `layout_map_scope`. `docs/coming_from.md` has the names one by one.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

import flax_layoutmap as flm
from flax_layoutmap import dtensor

console = Console(highlight=False)


def heading(text: str) -> None:
    """Print the title of a stop."""
    console.rule(f"[bold]{text}")


def components_of_layouts() -> None:
    """The pages' mesh of 3 × 2, and which component of a (6, 2) array is where.

    The page's devices are TPUs that are not here: an abstract mesh does, as all of this
    is arithmetic.
    """
    heading("Layout: which device holds what")
    mesh = flm.DeviceMesh.abstract("x=3,y=2")
    print(mesh, "strides", mesh.strides)
    layouts = {
        "x, unsharded": flm.TensorLayout(["x", "unsharded"], mesh),
        "unsharded, y": flm.TensorLayout(["unsharded", "y"], mesh),
        "x, y": flm.TensorLayout(["x", "y"], mesh),
        "y, x": flm.TensorLayout(["y", "x"], mesh),
    }
    table = Table("device", "x", "y", *layouts, title="which component")
    places = mesh.unravel_index()
    offsets = [layout.offset_to_shard() for layout in layouts.values()]
    for number in range(mesh.size):
        own = [str(offset[number]) for offset in offsets]
        table.add_row(
            f"TPU:{number}", str(places[number]["x"]), str(places[number]["y"]), *own
        )
    console.print(table)
    layout = layouts["x, unsharded"]
    print("shards per dim:", [layout.num_shards(dim) for dim in range(2)])
    part = layout.local_shape_from_global_shape((6, 2))
    print("a (6, 2) array on each device:", part)
    print("fully replicated:", layout.is_fully_replicated())
    print("batch parallel:  ", layout.is_batch_parallel())
    print("without dim 0:   ", layout.delete([0]).sharding_specs)


def text_and_bytes() -> None:
    """Layouts as DTensor writes them; TensorFlow reads both."""
    heading("Layout: text and bytes")
    mesh = flm.DeviceMesh((4, 2), ("x", "y"))
    layout = flm.TensorLayout.batch_sharded(mesh, "x", rank=2)
    text, data = layout.to_string(), layout.serialized_string()
    print(text[:72], "…")
    print(f"{len(data)} bytes:", data[:24].hex(" "), "…")
    assert flm.TensorLayout.from_string(text) == layout
    assert flm.TensorLayout.from_str(data) == layout
    print("both read back as", layout)


def following_another_tensor() -> None:
    """The page of `relayout_like`: the result follows x, from one mesh to another."""
    heading("relayout_like: from one mesh to another")
    first = flm.DeviceMesh((4, 2), ("x", "y"))
    second = flm.DeviceMesh((8,), ("batch",))
    with dtensor.default_mesh(first):
        values = flm.relayout(jnp.arange(16.0).reshape(8, 2), ("x", "y"))
    with dtensor.default_mesh(second):
        x = flm.relayout(jnp.zeros((8, 5)), ("batch", None))
    result = flm.relayout_like(values, x, name="follow_x")
    for name, array in (("values", values), ("x", x), ("result", result)):
        print(f"{name:7}", dtensor.fetch_layout(array))

    def loss(values: jax.Array) -> jax.Array:
        return (flm.relayout_like(values, x) ** 2).sum()

    gradient = jax.grad(loss)(values)
    print("its gradient returns to", dtensor.fetch_layout(gradient))


def packing() -> None:
    """One array of the parts of single devices, and back."""
    heading("pack and unpack")
    mesh = flm.DeviceMesh((4, 2), ("x", "y"))
    layout = flm.TensorLayout(["x", "unsharded"], mesh)
    parts = [np.full((1, 2), number // 2) for number in range(mesh.size)]
    packed = dtensor.pack(parts, layout)
    print("packed:", np.asarray(packed).tolist())
    print(
        "unpacked again:", [part.tolist() for part in dtensor.unpack(packed)][:3], "…"
    )
    parts[1] = parts[1] + 100
    try:
        dtensor.pack(parts, layout)
    except flm.LayoutError as error:
        print("replicas that differ:", error)


def models_in_a_block() -> None:
    """The page of `layout_map_scope`."""
    heading("layout_map_scope: layouts by object path")
    layout_map = flm.LayoutMap(flm.DeviceMesh((4, 2), ("x", "y")))
    layout_map["d1.kernel"] = ("x", "y")
    layout_map["d1.bias"] = ("y",)
    layout_map["d2.kernel"] = ("y", "x")
    layout_map["d2.bias"] = ("x",)

    class SubclassModel(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.d1 = nnx.Linear(8, 16, rngs=rngs)
            self.d2 = nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.d2(self.d1(x))

    with flm.layout_map_scope(layout_map):
        model = SubclassModel(nnx.Rngs(0))
        print("in the block: ", model.d1.kernel.get_raw_value())
    for name in ("d1", "d2"):
        layer = getattr(model, name)
        print(f"{name}.kernel has", dtensor.fetch_layout(layer.kernel))
        print(f"{name}.bias   has", dtensor.fetch_layout(layer.bias))
    print("an output:", model(jnp.ones((2, 8))).shape)


def main() -> None:
    """All stops."""
    components_of_layouts()
    text_and_bytes()
    following_another_tensor()
    packing()
    models_in_a_block()


if __name__ == "__main__":
    main()
