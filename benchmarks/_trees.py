"""The inputs of the benchmarks: Llama-like trees and rules for them.

A training state is ``params``, ``mu`` and ``nu`` (nine tensors per layer, plus the
embedding, the last norm and the head) and ``step``: with 11 layers 307 leaves, with
11,111 layers 300,007. Every leaf is its own `jax.ShapeDtypeStruct`, so the largest
tree needs no array memory.

The rules are those of one model family (nine patterns), those of other families that
match nothing here, and a catch-all. The family that matches stands in the middle, so
a matcher that tries rules in order goes through half of the list.
"""

import itertools
import string
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

Pairs = list[tuple[str, PartitionSpec]]
MakeLeaf = Callable[["Tensor"], Any]

_DATA_MODEL = PartitionSpec("data", "model")
_MODEL_DATA = PartitionSpec("model", "data")
_REPLICATED = PartitionSpec()


class Tensor(NamedTuple):
    """One tensor of a model: where it is, its shape and its logical axes."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    logical: tuple[str, ...]


_LAYER = (
    Tensor(("self_attn", "q_proj", "kernel"), (4096, 4096), ("embed", "heads")),
    Tensor(("self_attn", "k_proj", "kernel"), (4096, 1024), ("embed", "heads")),
    Tensor(("self_attn", "v_proj", "kernel"), (4096, 1024), ("embed", "heads")),
    Tensor(("self_attn", "o_proj", "kernel"), (4096, 4096), ("heads", "embed")),
    Tensor(("mlp", "gate_proj", "kernel"), (4096, 14336), ("embed", "mlp")),
    Tensor(("mlp", "up_proj", "kernel"), (4096, 14336), ("embed", "mlp")),
    Tensor(("mlp", "down_proj", "kernel"), (14336, 4096), ("mlp", "embed")),
    Tensor(("input_layernorm", "scale"), (4096,), ("norm",)),
    Tensor(("post_attention_layernorm", "scale"), (4096,), ("norm",)),
)
_EMBEDDING = Tensor(("embed_tokens", "embedding"), (32000, 4096), ("vocab", "embed"))
_LAST_NORM = Tensor(("norm", "scale"), (4096,), ("norm",))
_HEAD = Tensor(("lm_head", "kernel"), (4096, 32000), ("embed", "vocab"))

_FAMILY: Pairs = [
    ("model/embed_tokens/embedding", _MODEL_DATA),
    ("self_attn/(q|k|v)_proj/kernel", _DATA_MODEL),
    ("self_attn/o_proj/kernel", _MODEL_DATA),
    (r"layers/\d+/mlp/(gate|up)_proj/kernel", _DATA_MODEL),
    ("layers/[0-9]+/mlp/down_proj/kernel", _MODEL_DATA),
    ("input_layernorm/scale", _REPLICATED),
    ("post_attention_layernorm/scale", _REPLICATED),
    ("model/norm/scale", _REPLICATED),
    ("lm_head/kernel", _DATA_MODEL),
]

_LOGICAL_RULES: list[tuple[str, str | None]] = [
    ("vocab", "model"),
    ("embed", "data"),
    ("heads", "model"),
    ("mlp", "model"),
    ("norm", None),
]


def names() -> Iterator[str]:
    """Names made of letters only: a, b, ..., z, aa, ab, ..."""
    for length in itertools.count(1):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            yield "".join(letters)


def _other_family(name: str, digits: bool) -> Pairs:
    """Nine rules of a family that matches nothing in the trees here."""
    up, down = ("fc1", "fc2") if digits else ("fc_in", "fc_out")
    return [
        (f"{name}/wte/embedding", _MODEL_DATA),
        (f"attn_{name}/(query|key|value)/kernel", _DATA_MODEL),
        (f"attn_{name}/out/kernel", _MODEL_DATA),
        (rf"block/\d+/ffn_{name}/{up}/kernel", _DATA_MODEL),
        (f"block/[0-9]+/ffn_{name}/{down}/kernel", _MODEL_DATA),
        (f"ln_attn_{name}/scale", _REPLICATED),
        (f"ln_ffn_{name}/scale", _REPLICATED),
        (f"{name}/ln_f/scale", _REPLICATED),
        (f"score_{name}/kernel", _DATA_MODEL),
    ]


def regex_rules(count: int, *, digits: bool = False) -> Pairs:
    """Ordered (pattern, spec) pairs, the last one a catch-all.

    Args:
        count: How many rules: 9 per family and the catch-all, so 10, 100 or 1,000.
        digits: Whether the families that match nothing name tensors ``fc1`` and
            ``fc2``, so that a fifth of the patterns can tell digits apart.
    """
    families, rest = divmod(count - 1, len(_FAMILY))
    if rest or not families:
        raise ValueError(f"{count} rules: use 9 per family and one more, as 10 or 100")
    others = [
        _other_family(name, digits)
        for name in itertools.islice((f"m{name}" for name in names()), families - 1)
    ]
    middle = len(others) // 2
    chosen = [*others[:middle], _FAMILY, *others[middle:]]
    return [*itertools.chain.from_iterable(chosen), (".*", _REPLICATED)]


def layer_rules(count: int) -> Pairs:
    """Rules that each name one tensor of one layer, and a catch-all."""
    specs = {1: _REPLICATED, 2: _DATA_MODEL}
    single = (
        (f"layers/{layer}/{'/'.join(tensor.path)}", specs[len(tensor.shape)])
        for layer in itertools.count()
        for tensor in _LAYER
    )
    return [*itertools.islice(single, count - 1), (".*", _REPLICATED)]


def logical_rules(count: int) -> list[tuple[str, str | None]]:
    """(logical axis, mesh axis) pairs; those that the trees use are in the middle."""
    fill = [
        (f"unused_{name}", None)
        for name in itertools.islice(names(), count - len(_LOGICAL_RULES))
    ]
    middle = len(fill) // 2
    return [*fill[:middle], *_LOGICAL_RULES, *fill[middle:]]


def abstract(tensor: Tensor) -> jax.ShapeDtypeStruct:
    """The tensor as a leaf that holds no data."""
    return jax.ShapeDtypeStruct(tensor.shape, jnp.float32)


def _parameters(layers: int, leaf: MakeLeaf, key: Callable[[int], Any]) -> dict:
    def layer() -> dict[str, Any]:
        branch: dict[str, Any] = {}
        for tensor in _LAYER:
            node = branch
            for part in tensor.path[:-1]:
                node = node.setdefault(part, {})
            node[tensor.path[-1]] = leaf(tensor)
        return branch

    return {
        "model": {
            "embed_tokens": {"embedding": leaf(_EMBEDDING)},
            "layers": {key(index): layer() for index in range(layers)},
            "norm": {"scale": leaf(_LAST_NORM)},
        },
        "lm_head": {"kernel": leaf(_HEAD)},
    }


def _training_state(layers: int, leaf: MakeLeaf, key: Callable[[int], Any]) -> dict:
    step = leaf(Tensor(("step",), (), ()))
    moments = {name: _parameters(layers, leaf, key) for name in ("mu", "nu")}
    return {"params": _parameters(layers, leaf, key), **moments, "step": step}


def dict_tree(size: int, leaf: MakeLeaf = abstract) -> dict[str, Any]:
    """Nested plain dicts with about `size` leaves."""
    return _training_state(training_layers(size), leaf, str)


def state_tree(size: int, *, annotated: bool = False) -> nnx.State:
    """The same tree as an `nnx.State` of `nnx.Param`, layers keyed by int.

    Args:
        size: About how many leaves.
        annotated: Whether the variables name their logical axes (``out_sharding``).
    """

    def leaf(tensor: Tensor) -> nnx.Param:
        if annotated and tensor.logical:
            return nnx.Param(abstract(tensor), out_sharding=tensor.logical)
        return nnx.Param(abstract(tensor))

    # Eager sharding would try to place the annotated leaves, which hold no data.
    with nnx.use_eager_sharding(False):
        return nnx.State(_training_state(training_layers(size), leaf, int))


def training_layers(size: int) -> int:
    """Layers for which a training state has about `size` leaves."""
    return max(1, round(((size - 1) / 3 - 3) / len(_LAYER)))


class _Node(nnx.Module):
    """A module with one attribute per key of a dict, which may nest."""

    def __init__(self, children: dict[str, Any]) -> None:
        for name, child in children.items():
            setattr(self, name, _Node(child) if isinstance(child, dict) else child)


def module_tree(size: int) -> nnx.Module:
    """An NNX model with about `size` parameters, its layers in an `nnx.List`."""
    layers = max(1, round((size - 3) / len(_LAYER)))
    tree = _parameters(layers, lambda tensor: nnx.Param(abstract(tensor)), str)
    blocks = nnx.List(_Node(layer) for layer in tree["model"].pop("layers").values())
    return _Node({**tree, "model": _Node({**tree["model"], "layers": blocks})})


class Trees:
    """One kind of tree at one size, with the forms of it that peers need.

    Each is made when first asked for.

    Attributes:
        kind: ``dict``, ``state``, ``module``; or plain dicts again, with rules of
            which some (``digits``) or all (``layers``) can tell digits apart.
        size: About how many leaves.
    """

    def __init__(self, kind: str, size: int) -> None:
        self.kind, self.size = kind, size

    def rules(self, count: int) -> Pairs:
        """The rules for this kind of tree."""
        if self.kind == "layers":
            return layer_rules(count)
        return regex_rules(count, digits=self.kind == "digits")

    def _make(self) -> Any:
        if self.kind == "state":
            return state_tree(self.size)
        if self.kind == "module":
            return module_tree(self.size)
        return dict_tree(self.size)

    @cached_property
    def tree(self) -> Any:
        """The tree to resolve."""
        return self._make()

    @cached_property
    def twin(self) -> Any:
        """Another tree with the same structure and shapes, and no common leaf."""
        return self._make()

    @cached_property
    def logical_specs(self) -> Any:
        """The tree with a `PartitionSpec` of logical axes at each leaf."""
        return dict_tree(self.size, lambda tensor: PartitionSpec(*tensor.logical))

    @cached_property
    def annotated(self) -> nnx.State:
        """The tree as a State whose variables name their logical axes."""
        return state_tree(self.size, annotated=True)
