"""Lists of (pattern, PartitionSpec), as EasyLM, EasyDeL and scalax have them."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jax.sharding import PartitionSpec

from flax_layoutmap._core.errors import RuleError
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._rules.matching import Rule
from flax_layoutmap._rules.rules import Unmatched

# A pattern with none of these characters is a text, and may be a whole path.
SPECIAL = re.compile(r"[\\.^$*+?{}\[\]|()]")
# Parts of a path in a tuple: names, digits and groups of names.
_PART = re.compile(r"(\w|\\d|[-+|()])*")


def from_partition_rules(
    rules: Iterable[tuple[Any, Any]],
    mesh: Any = None,
    *,
    axes: Mapping[str, str] | None = None,
    unmatched: Unmatched = "error",
    batch: Any = None,
) -> LayoutMap:
    """Make a map of a list of partition rules.

    A pattern is searched in the path of a parameter, and the first that matches wins,
    as in EasyLM, EasyDeL, eformer and scalax. A tuple of patterns is one for successive
    parts of a path, as in the Flax examples of Hugging Face. A `PartitionSpec` may name
    fewer dims than a parameter has. Optimizer state is not matched: it follows its
    parameters.

    Args:
        rules: (pattern, `PartitionSpec`) pairs; a spec may be a tuple or None.
        mesh: the mesh of the rules.
        axes: the names of the table → those of the mesh, `{"mp": "tensor"}`.
        unmatched: for parameters that no rule matches: `"error"`, as in EasyLM, or
            `"replicate"`.
        batch: as for `LayoutMap`.

    Raises:
        RuleError: an entry is not a rule; it is named by its number.

    Example:
        >>> import flax_layoutmap as flm
        >>> from jax.sharding import PartitionSpec as P
        >>> table = [("attention/(wq|wk|wv)/kernel", P("fsdp", "mp")), (".*", P())]
        >>> mesh = flm.DeviceMesh.abstract("fsdp=4,tensor=2")
        >>> flm.convert.from_partition_rules(table, mesh, axes={"mp": "tensor"})
        LayoutMap(DeviceMesh('fsdp=4,tensor=2', abstract)) {
          'attention/(wq|wk|wv)/kernel': ('fsdp', 'tensor', ...),
          '.*': replicated,
        }
    """
    made: list[Rule] = []
    for number, entry in enumerate(rules, start=1):
        if not isinstance(entry, tuple | list) or len(entry) != 2:
            raise RuleError(
                f"partition rule {number} is not a (pattern, PartitionSpec) pair: "
                f"{entry!r}"
            )
        try:
            pattern = _pattern_of(entry[0])
            if any(re.search(rule.pattern, pattern) for rule in made):
                # An earlier rule wins there, also over a key that is a whole path.
                pattern = pattern if SPECIAL.search(pattern) else f"(?:{pattern})"
            made.append(Rule(pattern, _renamed(entry[1], axes or {})))
        except RuleError as error:
            raise RuleError(f"partition rule {number}: {error}") from error
    return LayoutMap.from_rules(
        made, mesh, overlap="first", unmatched=unmatched, batch=batch
    )


def _pattern_of(key: Any) -> str:
    """A pattern for paths; of a tuple, one for parts of a path that follow another."""
    if isinstance(key, str):
        return key
    if not isinstance(key, tuple | list) or not all(isinstance(x, str) for x in key):
        raise RuleError(f"a pattern is a string or a tuple of strings, got {key!r}")
    for part in key:
        if not _PART.fullmatch(part):
            raise RuleError(
                f"in a tuple a part is names and groups of names, got {part!r}: write "
                "the tuple as one pattern, such as 'mlp/[^/]*/kernel'"
            )
    parts = (part if part.isidentifier() else f"(?:{part})" for part in key)
    return f"(?:^|/){'/'.join(parts)}(?:/|$)"


def _renamed(spec: Any, axes: Mapping[str, str]) -> Any:
    """A spec with the names of the mesh; of other types, as it is."""

    def renamed(dim: Any) -> Any:
        if isinstance(dim, str):
            return axes.get(dim, dim)
        return tuple(map(renamed, dim)) if isinstance(dim, tuple | list) else dim

    if not isinstance(spec, PartitionSpec | tuple | list):
        return spec
    dims = tuple(map(renamed, spec))
    return dims if ... in dims else PartitionSpec(*dims)
