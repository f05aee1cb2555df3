"""Leaves of checkpoints and trees: described, chosen by path, and compared."""

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.core import Tracer

from flax_layoutmap._core.errors import CheckpointError, bullet_list, closest
from flax_layoutmap._core.fetch import own_sharding
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._resolve.resolve import rule_set_of
from flax_layoutmap._rules.records import Shape, show_shape
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._show.table import spell_indices
from flax_layoutmap._tree.flatten import plain_tree

T = TypeVar("T")
# Kinds of Python values. bool comes before int, which it is a subclass of.
TYPES = {"bool": bool, "int": int, "float": float, "complex": complex, "string": str}


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of a tree or checkpoint, without its value.

    `kind` is `"array"`, `"key"` (an array of PRNG keys, with the shape of the keys, not
    of their data), or that of a Python value (shape `()` and dtype None).
    """

    path: str
    kind: str
    shape: Shape = ()
    dtype: Any = None
    is_numpy: bool = False

    @property
    def is_empty(self) -> bool:
        return 0 in self.shape

    @property
    def is_python(self) -> bool:
        return self.dtype is None

    @property
    def numpy_dtype(self) -> Any:
        return np.dtype(TYPES[self.kind]) if self.dtype is None else self.dtype

    @property
    def data(self) -> tuple[Shape, Any]:
        """Shape and dtype of the array that is stored; of PRNG keys, of their data."""
        if self.kind == "key":
            return (*self.shape, *key_data(self.dtype)[1]), np.dtype(np.uint32)
        return self.shape, self.numpy_dtype

    def bytes(self, shape: Shape | None = None) -> int:
        """Bytes of a part of this shape; of a PRNG key, of the numbers behind it."""
        shape = self.shape if shape is None else shape
        if self.kind == "key":
            return 4 * math.prod((*shape, *key_data(self.dtype)[1]))
        return 0 if self.is_python else math.prod(shape) * self.dtype.itemsize

    @property
    def name(self) -> str:
        """Path and shape: the beginning of a message."""
        return f"{self.path} {show_shape(self.shape)}"

    @property
    def is_text(self) -> bool:
        """Whether Orbax stores it as JSON, not as an array."""
        return self.kind in ("int", "float", "string")

    @property
    def abstract(self) -> Any:
        """A value like the leaf, which takes no memory."""
        if self.is_python:
            return TYPES[self.kind]()
        if self.is_numpy:
            return np.broadcast_to(np.zeros((), self.dtype), self.shape)
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    def __str__(self) -> str:
        if self.is_python:
            return f"a Python {TYPES[self.kind].__name__}"
        keys = " (PRNG keys)" if self.kind == "key" else ""
        return f"{self.dtype} {show_shape(self.shape)}{keys}"


def leaf_of(path: str, value: Any) -> Leaf | None:
    """Describe a concrete or abstract value; None for what a checkpoint cannot hold."""
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic):
        dtype = value.dtype
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return Leaf(path, "key", value.shape, dtype)
        is_numpy = isinstance(value, np.ndarray | np.generic)
        # The byte order of a host array is not a part of its value.
        native = dtype.newbyteorder("=") if is_numpy else dtype
        return Leaf(path, "array", value.shape, native, is_numpy=is_numpy)
    for kind, python in TYPES.items():
        if isinstance(value, python):
            return Leaf(path, kind)
    return None


def no_value(value: Any, function: str) -> str | None:
    """The reason why a value cannot be saved by all processes, or None."""
    if isinstance(value, Tracer):
        return f"it is traced; call {function} outside of jit"
    if isinstance(value, jax.ShapeDtypeStruct):
        return "it is abstract and has no value; make it first, with flm.create"
    if isinstance(value, jax.Array) and value.is_deleted():
        return "it was deleted, as by donating it to jit; save what jit returned"
    if isinstance(value, jax.Array) and jax.process_count() > 1:
        if value.is_fully_addressable:
            return (
                "only this process has it; place it on the mesh of all processes with "
                "layout_map.place(tree)"
            )
    return None


@functools.lru_cache(maxsize=8)
def key_dtype(implementation: str) -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=implementation)).dtype


@functools.lru_cache(maxsize=8)
def key_data(dtype: Any) -> tuple[str, Shape]:
    """The implementation of PRNG keys, and the shape of the uint32 data of one."""
    names: list[str] = []

    def data(key: Any) -> Any:
        names.append(str(jax.random.key_impl(key)))
        return jax.random.key_data(key)

    shape = jax.eval_shape(data, jax.ShapeDtypeStruct((), dtype)).shape
    return names[0], shape


# ------------------------------------------------------- chosen by path and dtype


class Selection:
    """Which leaves to take: those that `include` finds and `exclude` does not."""

    def __init__(self, include: Any, exclude: Any) -> None:
        self._include = _patterns("include", "" if include is None else include)
        self._exclude = _patterns("exclude", () if exclude is None else exclude)

    def __contains__(self, path: str) -> bool:
        included = any(pattern.search(path) for pattern in self._include)
        return included and not any(p.search(path) for p in self._exclude)

    def useless(self, paths: Iterable[str]) -> list[str]:
        """A problem for each pattern of `include` that finds none of the paths."""
        return useless("include", self._include, list(paths))


def useless(
    option: str, patterns: Iterable[re.Pattern[str]], paths: Sequence[str]
) -> list[str]:
    return [
        f"{option}={pattern.pattern!r} finds no leaf; the closest paths are "
        f"{closest(pattern.pattern, paths[:2000], count=3) or list(paths[:3])}"
        for pattern in patterns
        if pattern.pattern and not any(map(pattern.search, paths))
    ]


def pattern_pairs(option: str, given: Any) -> list[tuple[re.Pattern[str], Any]]:
    pairs = given.items() if isinstance(given, Mapping) else given or ()
    if any(not isinstance(pair, tuple | list) or len(pair) != 2 for pair in pairs):
        raise CheckpointError(
            f"{option}={given!r}: give a dict, or a list of pairs (pattern, value)"
        )
    return [(compiled(f"{option}=", pattern), value) for pattern, value in pairs]


def _patterns(option: str, given: Any) -> list[re.Pattern[str]]:
    is_one = isinstance(given, str) or not isinstance(given, Iterable)
    return [compiled(f"{option}=", x) for x in ([given] if is_one else given)]


def compiled(where: str, pattern: Any) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise CheckpointError(
            f"{where}: {pattern!r} is not a regular expression: {error}"
        ) from error


def floating_dtype(dtype: Any) -> np.dtype[Any]:
    with contextlib.suppress(TypeError):
        if is_floating(wanted := np.dtype(dtype)):
            return wanted
    raise CheckpointError(
        f"dtype={dtype!r} is not a floating-point dtype; only floating-point arrays "
        "are converted, and only to floating-point"
    )


def check_bytes(option: str, given: Any) -> None:
    if not isinstance(given, int | float) or given <= 0:
        raise CheckpointError(
            f"{option}={given!r} is not a number of bytes, such as {8 << 30}"
        )


# -------------------------------------------------------------- stored and wanted


def is_storable(dtype: Any) -> bool:
    """Whether TensorStore, in which Orbax stores arrays, has this dtype."""
    import tensorstore

    try:
        return bool(tensorstore.dtype(dtype.name))
    except ValueError:
        return False


def is_floating(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, np.floating))


def fits_jax(dtype: Any) -> bool:
    """Whether JAX supports a dtype; 64 bits need `jax_enable_x64`."""
    return jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True) == dtype


def result_of(stored: Leaf, target: Leaf, dtype: Any) -> Leaf:
    """The leaf that a restore makes of a stored one; CheckpointError if it cannot.

    `dtype` is None, `"target"`, or the dtype for floating-point arrays.
    """
    is_key = "key" in (stored.kind, target.kind)
    is_python = stored.is_python or target.is_python
    if (is_key and stored.dtype != target.dtype) or (
        is_python and _number(stored) is not _number(target)
    ):
        advice = "; convert with jax.random.key_data or jax.random.wrap_key_data"
        raise CheckpointError(
            f"it is {stored} in the checkpoint, {target} in the target"
            f"{advice if is_key else ''}"
        )
    if is_python:
        return target if target.is_python else _held(target)
    if stored.shape != target.shape:
        raise CheckpointError(
            f"shape mismatch: checkpoint {stored.shape}, target {target.shape}. Build "
            "the target with the saved sizes, or pass exclude="
        )
    if is_key:
        return stored
    floating = is_floating(stored.dtype) and is_floating(target.dtype)
    if stored.dtype != target.dtype and not (floating and dtype is not None):
        raise CheckpointError(
            f"another dtype: the checkpoint has {stored.dtype}, the target "
            f'{target.dtype}; pass dtype="target" between floating-point dtypes, or '
            "convert it after the restore"
        )
    if floating and dtype is not None and dtype != "target":
        target = dataclasses.replace(target, dtype=dtype)
    return _held(target)


def _number(leaf: Leaf) -> type | None:
    if leaf.is_python:
        return TYPES[leaf.kind]
    return type(np.zeros((), leaf.dtype).item()) if leaf.shape == () else None


def _held(result: Leaf) -> Leaf:
    """A JAX array wherever JAX can hold the dtype; else NumPy's, if it is one."""
    if fits_jax(result.dtype):
        return dataclasses.replace(result, is_numpy=False)
    if result.is_numpy:
        return result
    raise CheckpointError(
        f"JAX would cut {result.dtype} to {jax.dtypes.canonicalize_dtype(result.dtype)}"
        "; set jax_enable_x64, give a NumPy array as target, or exclude it"
    )


def rules_of(layout_map: Any) -> RuleSet | None:
    return None if layout_map is None else rule_set_of(layout_map, "layout_map=")


def mesh_of(tree: Any, rules: RuleSet | None) -> DeviceMesh | None:
    """The mesh whose processes work together: that of the rules, or of an array."""
    if rules is not None and rules.mesh is not None and not rules.mesh.is_abstract:
        return rules.mesh
    for leaf in jax.tree.leaves(plain_tree(tree)):
        if (sharding := own_sharding(leaf)) is not None:
            return DeviceMesh(sharding.mesh)
    return None


def nested(leaves: Mapping[str, Any], key: Callable[[str], str] = str) -> Any:
    """Path → leaf, as a nested dict with one level for each part of the paths."""
    keys = {tuple(map(key, path.split("/"))): leaf for path, leaf in leaves.items()}
    return unflatten_dict(keys)


def grouped(
    items: Sequence[T], size: Callable[[T], int], limit: float
) -> list[list[T]]:
    """The items in groups of at most `limit` bytes; a larger one is alone."""
    groups: list[list[T]] = [[]]
    used = 0
    for item in items:
        if groups[-1] and used + size(item) > limit:
            groups.append([])
            used = 0
        groups[-1].append(item)
        used += size(item)
    return groups


# An index in a path, or in the name of a tensor.
_INDEX = re.compile(r"(?:^|(?<=[/_])|(?<=[A-Za-z]\.))\d+(?=[/._:' ]|$)")


def problem_list(failing: str, problems: Sequence[str]) -> CheckpointError:
    """An error with all problems, each of which begins with the path of its leaf.

    Problems that differ in indices alone are one line.
    """
    count = f"{len(problems)} problems" if len(problems) > 1 else "1 problem"
    alike: dict[tuple[str, ...], list[str]] = {}
    for problem in problems:
        alike.setdefault(tuple(_INDEX.split(problem)), []).append(problem)
    lines = [_folded(texts, group) for texts, group in alike.items()]
    return CheckpointError(f"{failing}: {count}\n{bullet_list(lines)}", problems)


def _folded(texts: Sequence[str], problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    columns = zip(*map(_INDEX.findall, problems), strict=True)
    slots = (spell_indices(sorted(set(map(int, column)))) for column in columns)
    line = "".join(map("".join, zip(texts, [*slots, ""], strict=True)))
    return re.sub(r"(?=[: ])", f" ×{len(problems)}", line, count=1)
