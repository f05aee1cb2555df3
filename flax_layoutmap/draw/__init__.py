"""Pictures of meshes, of arrays on them, and of whole models.

Each function returns a `Drawing`, which shows a scene of plain numbers: as text, in
colours in a terminal, as one HTML file, as PNG, in a notebook. Abstract meshes are
enough: a picture of 4,096 chips needs no devices.

Example:
    >>> import flax_layoutmap as flm
    >>> mesh = flm.DeviceMesh.abstract("data=2,model=2")
    >>> layout = flm.TensorLayout((None, "model"), mesh)
    >>> drawing = flm.draw.array(layout, (64, 256))
    >>> drawing
    Drawing('array (64,256) as P(-, model) on data=2,model=2')
    >>> print(drawing.text().splitlines()[1])
    2 slices, 2 devices each, copied along data
"""

import dataclasses
import html
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flax_layoutmap._core import whole_file
from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._show.resolved_table import ResolvedTable
from flax_layoutmap.draw import _arrays, _html, _model, _png, _scene, _terminal

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

# A notebook stores its output, so larger models are shown with folded layers only.
_IN_NOTEBOOK = 5000


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Drawing:
    """A picture: as text, in a terminal, as HTML or PNG, in a notebook.

    `print(drawing)` and `rich.print(drawing)` show it in a terminal, a notebook shows
    it by itself.

    Attributes:
        scene: what it shows, as plain numbers and words.

    Example:
        >>> import flax_layoutmap as flm
        >>> print(flm.draw.mesh("model=2").text(width=40))
        mesh model=2
        2 devices, abstract
        <BLANKLINE>
        devices
          model
          0   1
        ┌───┬───┐
        │ 0 │ 1 │
        └───┴───┘
    """

    scene: _scene.Scene

    def text(self, width: int | None = None) -> str:
        """Return the picture as plain text, without colours.

        Args:
            width: longest line, in characters; None for 80.
        """
        return _terminal.plain(self.scene, width or _terminal.WIDTH)

    def html(self) -> str:
        """Return the picture as one self-contained page."""
        if isinstance(self.scene, _scene.ModelScene):
            return _html.model_page(self.scene)
        return _html.grid_page(self.scene.title, self._fragment())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to a file, in the format of its suffix.

        In a job of several processes, each that calls it writes; they may share a path.

        Args:
            path: ends in `.html`, `.png` (by matplotlib, the extra `plot`), `.txt` or
                `.json` (the scene: plain numbers and words).

        Raises:
            LayoutError: another suffix, or matplotlib is missing.
        """
        suffix = Path(path).suffix
        content: dict[str, Callable[[], str | bytes]] = {
            ".html": self.html,
            ".png": lambda: _png.png(self.scene),
            ".txt": lambda: self.text() + "\n",
            ".json": lambda: json.dumps(dataclasses.asdict(self.scene)) + "\n",
        }
        if suffix not in content:
            raise LayoutError(
                f"a picture is saved as .html, .png, .txt or .json, got {str(path)!r}"
            )
        made = content[suffix]()
        whole_file.write_whole(path, made.encode() if isinstance(made, str) else made)

    def _fragment(self) -> str:
        if isinstance(self.scene, _scene.GridScene):
            return _html.fragment(self.scene)
        return f"<pre>{html.escape(self.text(100))}</pre>"

    def _repr_html_(self) -> str:
        scene = self.scene
        if not isinstance(scene, _scene.ModelScene):
            return self._fragment()
        if sum(view.leaves for view in scene.views) > _IN_NOTEBOOK:
            views = tuple(dataclasses.replace(view, flat=None) for view in scene.views)
            scene = dataclasses.replace(scene, views=views)
        return _html.framed(_html.model_page(scene))

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"Drawing({self.scene.title!r})"

    def __rich_console__(
        self, console: "Console", options: "ConsoleOptions"
    ) -> "Iterator[Text]":
        for line in _terminal.lines(self.scene, options.max_width):
            line.no_wrap, line.overflow = True, "crop"
            yield line


def mesh(mesh: Any) -> Drawing:
    """Draw the devices of a mesh.

    Args:
        mesh: anything that `DeviceMesh` accepts. A line or a mapping without -1 is
            drawn as an abstract mesh, whatever devices there are.

    Raises:
        MeshError: it is no mesh.

    Example:
        >>> import flax_layoutmap as flm
        >>> flm.draw.mesh("data=2,model=4")
        Drawing('mesh data=2,model=4')
    """
    return Drawing(_arrays.mesh_scene(mesh))


def array(x: Any, shape: Sequence[int] | None = None) -> Drawing:
    """Draw which device holds which slice of an array.

    The last two dims of the array, and the last two axes of the mesh, are rows and
    columns; the others are drawn side by side. Equal slices have equal letters and
    colours. More than 16 rows or columns are cut short.

    Args:
        x: a `jax.Array`, a `jax.ShapeDtypeStruct` with a sharding, an `nnx.Variable`
            or a Linen box that holds one; a leaf of a Resolution, `resolution[path]`;
            or a `TensorLayout` or `NamedSharding` and a shape.
        shape: global shape, for a layout or a sharding.

    Raises:
        LayoutError: it is on no mesh, or the shape is missing, or does not divide.
        MeshError: a layout without a mesh.

    Example:
        >>> import flax_layoutmap as flm
        >>> mesh = flm.DeviceMesh.abstract("data=2,model=4")
        >>> drawing = flm.draw.array(flm.TensorLayout(("model", None), mesh), (8, 4))
        >>> print(drawing.text().splitlines()[1])
        4 slices, 2 devices each, copied along data

    Plain JAX: `jax.debug.visualize_array_sharding(x)`, of 1-D and 2-D arrays.
    """
    return Drawing(_arrays.array_scene(x, shape))


def model(resolution: ResolvedTable, optimizer: ResolvedTable | None = None) -> Drawing:
    """Draw a whole model: the bytes per device of each leaf, and why.

    As HTML it is a tree-map by bytes per device, coloured by spec, with a table that
    can be searched, and what `Resolution.explain` says of each leaf. As text and as PNG
    it is bytes per device by module.

    Args:
        resolution: a `Resolution` of a model; of a train state or of `{"model": …,
            "optimizer": …}` it has the optimizer's state too.
        optimizer: a `Resolution` of the optimizer's state, if it was resolved alone.

    Raises:
        LayoutError: the Resolution has no leaves.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("data=2,model=4"))
        >>> layout_map["kernel"] = (None, "model")
        >>> tree = {"kernel": jax.ShapeDtypeStruct((8, 16), "float32")}
        >>> drawing = flm.draw.model(layout_map.resolve(tree))
        >>> drawing.html().startswith("<!doctype html>")
        True
    """
    return Drawing(_model.scene(resolution, optimizer))


def compare(
    before: ResolvedTable,
    after: ResolvedTable,
    names: tuple[str, str] = ("before", "after"),
) -> Drawing:
    """Draw bytes per device by module of two Resolutions.

    Args:
        before: the one to compare with.
        after: the other: of other rules, another mesh, or another model.
        names: what they are called.

    Raises:
        LayoutError: neither has leaves.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("data=2,model=4"))
        >>> layout_map["kernel"] = (None, "model")
        >>> tree = {"kernel": jax.ShapeDtypeStruct((8, 16), "float32")}
        >>> before = layout_map.resolve(tree)
        >>> after = before.on(flm.DeviceMesh.abstract("data=4,model=2"))
        >>> print(flm.draw.compare(before, after).text().splitlines()[0])
        Bytes per device by module, before and after
    """
    return Drawing(_model.compared(before, after, names))
