"""Drawing: a scene, and the formats that it can be shown in."""

import dataclasses
import html
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._core.whole_file import write_whole
from flax_layoutmap.draw import _html, _png, _terminal
from flax_layoutmap.draw._scene import GridScene, ModelScene, Scene

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

# A notebook keeps what it shows; of larger models it shows the folded layers only.
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

    scene: Scene

    def text(self, width: int | None = None) -> str:
        """Return the picture as plain text, without colours.

        Args:
            width: longest line, in characters; None for 80.
        """
        return _terminal.plain(self.scene, width or _terminal.WIDTH)

    def html(self) -> str:
        """Return the picture as one self-contained page."""
        if isinstance(self.scene, ModelScene):
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
        write_whole(path, made.encode() if isinstance(made, str) else made)

    def _fragment(self) -> str:
        if isinstance(self.scene, GridScene):
            return _html.fragment(self.scene)
        return f"<pre>{html.escape(self.text(100))}</pre>"

    def _repr_html_(self) -> str:
        scene = self.scene
        if not isinstance(scene, ModelScene):
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
