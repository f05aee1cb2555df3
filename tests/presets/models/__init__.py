"""Paths and shapes of small models of each family, in each spelling.

Each module has `SPELLINGS`: name of the spelling → (path → shape), by functions of our
own that follow the published definitions. `tests/third_party/test_presets.py` compares
them with the libraries, where these are installed.
"""

from collections.abc import Mapping


class Dim(int):
    """The size of a dim, which knows its name."""

    name: str


Shapes = dict[str, tuple[int, ...]]


def written_out(table: Mapping[str, str], sizes: Mapping[str, int]) -> Shapes:
    """Path → shape of each layer.

    Args:
        table: path, `{n}` for the number of a layer → the names of its dims.
        sizes: name of a dim → its size; `L` is the number of layers.
    """
    return {
        path.replace("{n}", str(n)): tuple(
            _dim(name, sizes[name]) for name in dims.split()
        )
        for path, dims in table.items()
        for n in range(sizes["L"])
    }


def _dim(name: str, size: int) -> Dim:
    dim = Dim(size)
    dim.name = name
    return dim
