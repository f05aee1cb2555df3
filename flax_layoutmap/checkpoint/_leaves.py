"""Leaves of checkpoints and trees, and checks that they are compatible."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from flax_layoutmap._core.errors import CheckpointError, bullet_list
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._rules.records import Shape, show_shape
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._show.table import path_cell
from flax_layoutmap._tree.flatten import plain_tree
from flax_layoutmap._tree.paths import fold, relation

T = TypeVar("T")

Kind = Literal["array", "key", "int", "float", "bool", "complex", "string"]

# bool comes before int, which it is a subclass of.
_PYTHON: tuple[tuple[type, Kind], ...] = (
    (bool, "bool"),
    (int, "int"),
    (float, "float"),
    (complex, "complex"),
    (str, "string"),
)
TYPES: dict[Kind, type] = {kind: python for python, kind in _PYTHON}
_NUMBERS: tuple[tuple[Any, Kind], ...] = (
    (np.bool_, "bool"),
    (np.integer, "int"),
    (np.floating, "float"),
    (np.complexfloating, "complex"),
)

# What TensorStore's zarr3 driver takes (0.1.86; each tried in both directions).
_STORABLE = {
    *("bool", "int2", "int4", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64"),
    *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
    *("float4_e2m1fn", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of a tree or checkpoint, without its value.

    `kind` is an array, an array of PRNG keys, or the kind of a Python value (shape `()`
    and dtype None). `shape` is that of the keys, not of their data.
    """

    path: str
    kind: Kind
    shape: Shape = ()
    dtype: Any = None
    implementation: str | None = None
    is_numpy: bool = False

    @property
    def is_empty(self) -> bool:
        return 0 in self.shape

    @property
    def is_python(self) -> bool:
        return self.dtype is None

    @property
    def name(self) -> str:
        """Path and shape: the beginning of a message."""
        return f"{self.path} {show_shape(self.shape)}"

    def __str__(self) -> str:
        if self.kind == "array":
            return f"{self.dtype} {show_shape(self.shape)}"
        if self.kind == "key":
            return f"{self.dtype} {show_shape(self.shape)} (PRNG keys)"
        return f"a Python {TYPES[self.kind].__name__}"


def leaf_of(path: str, value: Any) -> Leaf | None:
    """Describe a concrete or abstract value; None for what a checkpoint cannot hold."""
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic):
        dtype = value.dtype
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return Leaf(path, "key", value.shape, dtype)
        is_numpy = isinstance(value, np.ndarray | np.generic)
        # The byte order of a host array is no part of its value.
        native = dtype.newbyteorder("=") if is_numpy else dtype
        return Leaf(path, "array", value.shape, native, is_numpy=is_numpy)
    for python, kind in _PYTHON:
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


def key_leaf(path: str, shape: Shape, implementation: str) -> Leaf:
    """The leaf of PRNG keys of an implementation, by its name."""
    dtype = jax.eval_shape(lambda: jax.random.key(0, impl=implementation)).dtype
    return Leaf(path, "key", shape, dtype, implementation)


def key_data_shape(implementation: str) -> Shape:
    """Shape of the uint32 data of one key."""
    make = jax.random.key
    return jax.eval_shape(
        lambda: jax.random.key_data(make(0, impl=implementation))
    ).shape


def is_storable(dtype: Any) -> bool:
    """Whether Orbax can write arrays of a dtype."""
    return dtype.name in _STORABLE


def is_floating(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, np.floating))


def fits_jax(dtype: Any) -> bool:
    """Whether JAX supports a dtype; 64 bits need `jax_enable_x64`."""
    return jax.dtypes.canonicalize_dtype(dtype) == dtype


def result_of(stored: Leaf, target: Leaf | None, dtype: Any) -> Leaf | str:
    """The leaf that a restore makes of a stored one, or why it cannot.

    `dtype` is None, `"target"`, or the dtype for floating-point arrays.
    """
    if target is None:
        return _cast(stored, stored, dtype)
    if stored.is_python and target.is_python:
        if stored.kind == target.kind:
            return stored
        return f"it is {stored} in the checkpoint, {target} in the target"
    if "key" in (stored.kind, target.kind):
        if (stored.kind, stored.dtype) != (target.kind, target.dtype):
            return (
                f"it is {stored} in the checkpoint, {target} in the target; convert "
                "with jax.random.key_data or jax.random.wrap_key_data"
            )
        return stored if stored.shape == target.shape else _other_shape(stored, target)
    if stored.is_python or target.is_python:
        return _scalar(stored, target)
    if stored.shape != target.shape:
        return _other_shape(stored, target)
    return _cast(stored, target, dtype)


def _other_shape(stored: Leaf, target: Leaf) -> str:
    return (
        f"shape mismatch: checkpoint {stored.shape}, target {target.shape}. Build the "
        "target with the saved sizes, or pass exclude="
    )


def _scalar(stored: Leaf, target: Leaf) -> Leaf | str:
    """Convert between a Python number and an array without dims."""
    python, array = (stored, target) if stored.is_python else (target, stored)
    kind = next((k for of, k in _NUMBERS if jnp.issubdtype(array.dtype, of)), None)
    if array.shape == () and python.kind == kind:
        return target if target.is_python else _held(target)
    return f"it is {stored} in the checkpoint, {target} in the target"


def _cast(stored: Leaf, target: Leaf, dtype: Any) -> Leaf | str:
    """The result of an array with the target's shape, where only dtypes may differ."""
    if stored.kind != "array":
        return stored
    result = target.dtype
    if dtype is not None and dtype != "target" and is_floating(stored.dtype):
        result = dtype
    same_kind = is_floating(stored.dtype) and is_floating(target.dtype)
    if stored.dtype != target.dtype and not (dtype is not None and same_kind):
        fix = (
            'pass dtype="target", or the dtype wanted'
            if same_kind
            else "restore it as it is and convert it after"
        )
        return (
            f"another dtype: the checkpoint has {stored.dtype}, the target "
            f"{target.dtype}; {fix}"
        )
    return _held(dataclasses.replace(target, dtype=result))


def _held(result: Leaf) -> Leaf | str:
    """A JAX array wherever JAX can hold the dtype; else NumPy's, if it is one."""
    if fits_jax(result.dtype):
        return dataclasses.replace(result, is_numpy=False)
    if result.is_numpy:
        return result
    return (
        f"JAX would cut {result.dtype} to {jax.dtypes.canonicalize_dtype(result.dtype)}"
        "; set jax_enable_x64, give a NumPy array as target, or exclude it"
    )


def mesh_of(tree: Any, rules: RuleSet | None) -> DeviceMesh | None:
    """The mesh whose processes work together: that of the rules, or of an array."""
    if rules is not None and rules.mesh is not None and not rules.mesh.is_abstract:
        return rules.mesh
    for leaf in jax.tree.leaves(plain_tree(tree)):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return DeviceMesh(sharding.mesh)
    return None


def in_portions(
    items: Iterable[T], bytes_of: Callable[[T], float], limit: float
) -> Iterator[list[T]]:
    """Items in groups of at most `limit` bytes, in order; a larger one is alone."""
    portion: list[T] = []
    used = 0.0
    for item in items:
        size = bytes_of(item)
        if portion and used + size > limit:
            yield portion
            portion, used = [], 0.0
        portion.append(item)
        used += size
    if portion:
        yield portion


def nested(leaves: Mapping[str, Any], key: Callable[[str], str] = str) -> Any:
    """Path → leaf, as a nested dict with one level for each part of the paths."""
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = (key(part) for part in path.split("/"))
        node = root
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = leaf
    return root


def problem_list(failing: str, problems: Sequence[str]) -> CheckpointError:
    """An error with all problems, in which layers with the same problem share a line.

    A problem begins with the path of its leaf and a space or colon.
    """
    count = f"{len(problems)} problems" if len(problems) > 1 else "1 problem"
    return CheckpointError(
        f"{failing}: {count}\n{bullet_list(_fold(problems))}", problems
    )


def _fold(problems: Sequence[str]) -> list[str]:
    """The problems, folded over the indices of paths, as a report folds leaves."""
    paths, rests = [], []
    for problem in problems:
        path = re.match(r"[^\s:]*", problem)[0]  # pyright: ignore[reportOptionalSubscript]
        paths.append(path)
        rests.append(problem[len(path) :].split(" "))
    # Other names with the same indices, such as that of a tensor, fold with the path.
    alike = [
        tuple(relation(path, word.replace(".", "/")) for word in words)
        for path, words in zip(paths, rests, strict=True)
    ]
    lines = []
    for group in fold(paths, alike):
        first = group.members[0]
        words = rests[first]
        if len(group.members) > 1:
            words = map(_spelled, words, map(group.spell, alike[first]))
        lines.append(path_cell(group) + " ".join(words))
    return lines


def _spelled(word: str, folded: str) -> str:
    """A folded word, with the dots that it had for slashes."""
    if folded == word.replace(".", "/"):
        return word
    return folded if "/" in word else folded.replace("/", ".")
