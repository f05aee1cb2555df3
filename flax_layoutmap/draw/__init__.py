"""Pictures of meshes, sharded arrays and whole models.

Each function returns a `Drawing`. Abstract meshes are enough: a picture of 4,096 chips
needs no devices.
"""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console, ConsoleOptions
from rich.text import Text

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._rules import files
from flax_layoutmap._show import terminal
from flax_layoutmap._show.resolved_table import ResolvedTable
from flax_layoutmap.draw import _arrays, _model, _svg, _text


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Drawing:
    """A picture; `print(drawing)` prints it as text, and a notebook shows the SVG."""

    _picture: _arrays.Grids | _model.Tree

    def text(self, width: int | None = None) -> str:
        """Return the picture as plain text.

        Args:
            width: longest line, in characters; None for 80.
        """
        return terminal.plain(_text.lines(self._picture, width or 80))

    def svg(self) -> str:
        """Return the picture as SVG, readable on light and dark pages."""
        return _svg.svg(self._picture)

    def html(self) -> str:
        """Return a self-contained HTML page without scripts.

        Below the tree-map of a model it contains the table of the report, collapsed.
        """
        return _svg.page(self._picture)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to a file.

        Args:
            path: ends in `.svg` or `.html`; several processes may share it.
        """
        make = {".svg": self.svg, ".html": self.html}.get(Path(path).suffix)
        if make is None:
            raise LayoutError(f"a picture is saved as .svg or .html, got {str(path)!r}")
        files.write_whole(path, make().encode())

    def show(self, file: IO[str] | None = None) -> None:
        """Print the picture; without a `file`, only process 0 prints."""
        terminal.show(lambda width: _text.lines(self._picture, width or 80), file)

    def _repr_html_(self) -> str:
        return _svg.fragment(self._picture)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"Drawing({self._picture.title!r})"

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield from _text.lines(self._picture, options.max_width)


def mesh(mesh: Any) -> Drawing:
    """Draw the devices of a mesh.

    Args:
        mesh: anything that `DeviceMesh` accepts. A string or a mapping without -1 is
            drawn as an abstract mesh, whatever devices there are.

    Example:
        >>> import flax_layoutmap as flm
        >>> flm.draw.mesh("data=2,model=4")
        Drawing('mesh data=2,model=4')
    """
    return Drawing(_arrays.mesh_grids(mesh))


def array(x: Any, shape: Sequence[int] | None = None) -> Drawing:
    """Draw which device holds which slice of an array.

    The last two dims of the array, and the last two axes of the mesh, are rows and
    columns; the others are drawn side by side. Equal slices have equal letters and
    colours. At most the first 16 rows, 16 columns and 8 grids are drawn.

    Args:
        x: a `jax.Array`, a `jax.ShapeDtypeStruct` with a sharding, an `nnx.Variable`
            or a Linen box that holds one; a leaf of a Resolution, `resolution[path]`;
            or a `TensorLayout` or `NamedSharding` and a shape.
        shape: the global shape; None takes the shape of `x`.

    Example:
        >>> import flax_layoutmap as flm
        >>> mesh = flm.DeviceMesh.abstract("data=2,model=4")
        >>> drawing = flm.draw.array(flm.TensorLayout(("model", None), mesh), (8, 4))
        >>> print(drawing.text().splitlines()[1])
        4 slices, 2 devices each, copied along data

    Plain JAX: `jax.debug.visualize_array_sharding(x)`, for 1-D and 2-D arrays.
    """
    return Drawing(_arrays.array_grids(x, shape))


def model(resolution: ResolvedTable) -> Drawing:
    """Draw a whole model by the bytes per device of its leaves.

    As SVG and HTML it is a tree-map: areas are bytes per device, colours are layouts,
    and tooltips explain the layouts; leaves that no rule matches have a dashed red
    outline. As text it is a bar for each large module. Repeated layers are joined.

    Args:
        resolution: a `Resolution` of a model; or of a train state or `{"model": …,
            "optimizer": …}`, to include the optimizer state.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("data=2,model=4"))
        >>> layout_map["kernel"] = (None, "model")
        >>> tree = {"kernel": jax.ShapeDtypeStruct((8, 16), "float32")}
        >>> flm.draw.model(layout_map.resolve(tree))
        Drawing('Layouts on mesh data=2,model=4')
    """
    return Drawing(_model.tree(resolution))
