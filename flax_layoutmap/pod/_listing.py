"""Every array of a laid-out module, for `report.shardings`."""

import collections
import re
from collections.abc import Iterator
from typing import Any

from flax_layoutmap.pod._attributes import Attributes, Dims, functions, mesh_sizes
from flax_layoutmap.pod._sources import operation_name, source_line
from flax_layoutmap.pod._values import dtype_name, spec_text


def listing(module: Any, pattern: str) -> list[tuple[str, str, str]]:
    """Operations, their types, and how they are laid out; equal ones once.

    Args:
        module: a module that was laid out.
        pattern: regex, searched in `"dot_general model.py:36 Attention.__call__"`.
    """
    found: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for name, location, type_text, dims in _arrays(module):
        source = source_line(location)
        text = f"{operation_name(location) or name} {source or ''}".strip()
        if re.search(pattern, text):
            found[text, type_text, spec_text(dims)] += 1
    return list(found)


def _arrays(module: Any) -> Iterator[tuple[str, str, str, Dims]]:
    """Every array in a module: its operation, its place, its type, its axes."""
    attributes = Attributes(mesh_sizes(module))

    def walk(block: Any) -> Iterator[tuple[str, str, str, Dims]]:
        for op in block.operations:
            operation = op.operation
            for result, dims in zip(
                operation.results, attributes.per_value(operation), strict=False
            ):
                shape, element = attributes.type_of(result)
                sizes = ",".join(map(str, shape))
                kind = f"{dtype_name(element)}[{sizes}]"
                name = operation.name.rpartition(".")[2]
                yield name, attributes.location(operation), kind, dims
            for region in operation.regions:
                for inner in region.blocks:
                    yield from walk(inner)

    for function in functions(module).values():
        for block in function.regions[0].blocks:
            yield from walk(block)
