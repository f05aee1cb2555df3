"""The texts of errors: in full where they have several parts, else how they begin."""

import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import flax_layoutmap as flm
from flax_layoutmap._core import errors as _errors
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._resolve.resolve import resolve
from flax_layoutmap._tree.trace import trace

P = PartitionSpec
ABSTRACT = flm.DeviceMesh.abstract((2, 4), ("data", "model"))
NAMES = ("data", "model")
REDUCED = P(None, unreduced=frozenset({"x"}))
PINNED = TensorLayout(("data",), memory_kind="pinned_host")


def placed(**options: Any) -> flm.LayoutMap:
    return flm.LayoutMap(flm.DeviceMesh((2, 4), NAMES), **options)


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def mapped(rules: dict[str, Any] | None = None, **options: Any) -> flm.LayoutMap:
    made = flm.LayoutMap(ABSTRACT, **options)
    made.update(rules or {})
    return made


def fit(rules: dict[str, Any], tree: Any, **options: Any) -> Any:
    return mapped(rules, **options).resolve(tree)


def placed_with(layout: TensorLayout) -> Any:
    layout_map = placed()
    layout_map["w"] = layout
    return layout_map.place({"w": jnp.zeros(8)})


def stacked() -> Any:
    with nnx.use_eager_sharding(False):
        return nnx.Param(jnp.zeros((3, 8, 8)), out_sharding=("data", "model"))


def zero(rules: dict[str, Any]) -> Any:
    params = {"up": struct(8, 16)}
    layout_map = mapped({"up": (None, "model")})
    layout_map.optimizer.update(rules)
    state = jax.eval_shape(optax.adam(1.0).init, params)
    return layout_map.resolve({"params": params, "opt_state": state})


def shared_results() -> Any:
    linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    return trace(lambda a: [a, nnx.List([a])], (linear,))


def keeps_another() -> Any:
    linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    return trace(lambda: nnx.List([linear]), own_objects=True)


def grow(module: Any) -> Any:
    module.extra = nnx.Param(jnp.ones(1))
    return {"w": jnp.ones(1)}


@jax.tree_util.register_pytree_node_class
class Broken:
    """A node whose flattening fails."""

    def tree_flatten(self) -> Any:
        raise ValueError("not today")

    @classmethod
    def tree_unflatten(cls, aux: Any, parts: Any) -> "Broken":
        return cls()


def moved(axes: Any, *, kinds: Any = "auto") -> Any:
    """An array of (8, 8) on a mesh."""
    mesh = flm.DeviceMesh((2, 4), NAMES, axis_types=kinds)
    return flm.relayout(np.ones((8, 8)), flm.TensorLayout(axes, mesh))


def packed(*parts: Any, axes: Any = None, mesh: Any = None) -> Any:
    mesh = mesh or flm.DeviceMesh((2,), ("data",), jax.devices()[:2])
    return flm.dtensor.pack(parts, flm.TensorLayout(axes, mesh))


TRACED = (
    "a traced value (8, 8): on Auto axes the compiler chooses its layout later; fix "
    "it, x = flm.relayout(x, layout), and use that layout; or read it outside of jit; "
    'or use Explicit axes, flm.DeviceMesh(..., axis_types="explicit"), and '
    "flm.jit(..., explicit=True)"
)


class Case(NamedTuple):
    run: Callable[[], Any]
    kind: type[Exception]
    text: str


ON_MESH = " on mesh data=2,model=4:\n  - "
TWO_WAYS = (
    'make one pattern narrower, use the path itself as key, or overlap="first" or '
    '"last"'
)
CASES: dict[str, Case] = {
    "mesh: too few devices": Case(
        lambda: flm.DeviceMesh((4, 4), NAMES),
        flm.errors.MeshError,
        "the mesh data=4,model=4 needs 16 devices, but there are 8; change a size, "
        "plan with flm.DeviceMesh.abstract(...), or for virtual CPU devices call "
        'jax.config.update("jax_num_cpu_devices", 16) before any other use of JAX',
    ),
    "mesh: devices that are not here": Case(
        lambda: flm.DeviceMesh((3,), ("x",), devices=["gpu:0", "cpu:0", "cpu:8"]),
        flm.errors.MeshError,
        "there are no devices gpu:0, cpu:8; this job has cpu:0, cpu:1, cpu:2, cpu:3, "
        "cpu:4, cpu:5, cpu:6, cpu:7",
    ),
    "rule: a memory that the devices lack": Case(
        lambda: placed_with(TensorLayout(("data",), memory_kind="pinned_hots")),
        flm.errors.ResolveError,
        f"1 leaf does not fit the rules{ON_MESH}w (8,): rule 1 'w' → "
        "('data',) in pinned_hots: devices of 'cpu' have no memory 'pinned_hots'; did "
        "you mean 'pinned_host'?; they have 'device', 'pinned_host', 'unpinned_host'",
    ),
    "rule: layouts that differ in memory": Case(
        lambda: fit({"w$": ("data",), ".*": PINNED}, {"w": struct(8)}),
        flm.errors.ResolveError,
        f"1 leaf does not fit the rules{ON_MESH}w (8,): rules with different "
        "layouts match it: rule 1 'w$' → ('data',), rule 2 '.*' → ('data',) in "
        f"pinned_host; {TWO_WAYS}",
    ),
    "layout: unknown axis": Case(
        lambda: TensorLayout((None, "modle"), ABSTRACT),
        flm.errors.RuleError,
        "the layout (None, 'modle') names the axis 'modle', but the mesh "
        "'data=2,model=4' has no such axis; did you mean 'model'?",
    ),
    "rule: regex": Case(
        lambda: flm.Rule("a(b", None),
        flm.errors.RuleError,
        "the pattern 'a(b' is not a regular expression: missing ), unterminated "
        "subpattern at position 1; escape special characters with re.escape(...)",
    ),
    "leaf: indivisible": Case(
        lambda: fit({"w": ("data", "model")}, {"w": struct(10, 10)}),
        flm.errors.ResolveError,
        f"1 leaf does not fit the rules{ON_MESH}w (10,10): rule 1 'w' → ('data', "
        "'model'): dim 1 of size 10 is not divisible by mesh axis 'model' of size 4; "
        "change the size, use another layout (None for this dim), or "
        'indivisible="replicate"',
    ),
    "leaf: another mesh": Case(
        lambda: fit({"w": flm.TensorLayout(("x",), "x=8")}, {"w": struct(8)}),
        flm.errors.ResolveError,
        f"1 leaf does not fit the rules{ON_MESH}w (8,): rule 1 'w' → ('x',) is on "
        "another mesh, DeviceMesh('x=8'), than the rules, DeviceMesh('data=2,model=4', "
        "abstract); a tree has one mesh: leave out the mesh of the layout",
    ),
    "leaf: Flax metadata that does not divide": Case(
        lambda: fit({}, nnx.State({"w": stacked()})),
        flm.errors.ResolveError,
        f"1 leaf does not fit the rules{ON_MESH}w (3,8,8): Flax metadata ('data', "
        "'model'): dim 0 of size 3 is not divisible by mesh axis 'data' of size 2; "
        "change the size, use another layout (None for this dim), or "
        'indivisible="replicate"; a rule for it wins over the metadata; for '
        "layers stacked by nnx.vmap, transform_metadata={nnx.PARTITION_NAME: None} "
        "adds the new dim to it",
    ),
    "leaf: LoRA of an unclear kernel": Case(
        lambda: fit(
            {"m": ("data", "model")},
            {"m": {"u": struct(8, 16), "v": struct(16, 8), "lora_a": struct(8, 4)}},
        ),
        flm.errors.ResolveError,
        f"1 leaf does not fit the rules{ON_MESH}m/lora_a (8,4): it is a LoRA matrix, "
        "and its shape does not tell which dims of m/u (8,16) or m/v (16,8) it has: "
        "add a rule for it",
    ),
    "leaf: several": Case(
        lambda: resolve(
            {"a": struct(3), "b": struct(5)},
            mapped({".": ("data",)}).on(flm.DeviceMesh.abstract("data=2,model=1")),
        ),
        flm.errors.ResolveError,
        "2 leaves do not fit the rules on mesh data=2,model=1:\n"
        "  - a (3,): rule 1 '.' → ('data',): dim 0 of size 3 is not divisible by mesh "
        "axis 'data' of size 2; change the size, use another layout (None for this "
        'dim), or indivisible="replicate"\n'
        "  - b (5,): rule 1 '.' → ('data',): dim 0 of size 5 is not divisible by mesh "
        "axis 'data' of size 2; change the size, use another layout (None for this "
        'dim), or indivisible="replicate"',
    ),
    "state: rules that differ": Case(
        lambda: zero({"p": ("data", None), "u": (None, "data")}),
        flm.errors.ResolveError,
        f"2 leaves do not fit the rules{ON_MESH}"
        + "\n  - ".join(
            f"opt_state/0/{moment}/up (8,16): optimizer rules with different layouts "
            "match its parameter 'up': rule 1 'p' → ('data', None), rule 2 'u' → "
            f"(None, 'data'); {TWO_WAYS}"
            for moment in ("mu", "nu")
        ),
    ),
    "trace: a value that is read": Case(
        lambda: trace(lambda: {"w": jnp.ones(2) * bool(jnp.ones(()))}),
        flm.errors.StructureError,
        "the function reads the value of an array, and there is none while it is "
        "traced: Attempted boolean conversion of traced array with shape float32[].\n"
        "flm.create(make, layout_map) and layout_map_scope trace what makes a model: "
        "make it outside of them, and move it: layout_map.place(make())",
    ),
    "batch: no data": Case(
        lambda: flm.pad_batch(
            {"x": np.ones(3), "y": ["a", struct(3)], "z": nnx.Rngs(0)}
        ),
        flm.LayoutError,
        "pad_batch takes arrays and numbers on the host, but got\n"
        "  - y/0: a str\n  - y/1: a ShapeDtypeStruct\n  - z: a Rngs\n"
        "take these out of the batch; inside jit, use flm.distribute_tensor",
    ),
    "batch: indivisible": Case(
        lambda: flm.distribute_batch({"x": np.ones((5, 2)), "y": np.ones(5)}, placed()),
        flm.LayoutError,
        "the batch does not divide over the batch axes ('data',): dim 0 of size 5 is "
        "not divisible by mesh axis 'data' of size 2; pad it, batch, mask = "
        "flm.pad_batch(batch, layout_map), or drop the rest",
    ),
    "fetch_layout: a traced value": Case(
        lambda: jax.jit(flm.dtensor.fetch_layout)(moved(())),
        flm.LayoutError,
        f"fetch_layout of {TRACED}",
    ),
    "pack: replicas that differ": Case(
        lambda: packed(np.ones((2, 2)), np.zeros((2, 2))),
        flm.LayoutError,
        f"pack: the devices {jax.devices()[0]} and {jax.devices()[1]} hold the same "
        "part of an array (2, 2), but were given different values; make them equal, "
        "or use check=False",
    ),
}
# By kind of error; after "… " that of its first leaf.
BEGINNINGS: dict[type[Exception], dict[str, Callable[[], Any]]] = {
    flm.errors.MeshError: {
        "the mesh data=2,model=2 needs 4 devices, but there are 8": lambda: (
            flm.DeviceMesh((2, 2), NAMES)
        ),
        "an abstract mesh needs every": lambda: flm.DeviceMesh.abstract((-1, 4), NAMES),
        "devices is empty; leave it": lambda: flm.DeviceMesh((1,), ("x",), devices=[]),
        "TensorLayout was given device_mesh= and mesh=": lambda: flm.TensorLayout(
            ("data",), ABSTRACT, mesh=ABSTRACT
        ),
    },
    flm.LayoutError: {
        "DTensor has no word for the memory kind 'pinned_host' of the": lambda: (
            TensorLayout(("data",), ABSTRACT).on_host().to_string()
        ),
        "diff compares two Resolutions": lambda: fit({}, {}).diff(mapped()),
        "the arrays of a batch must have equally many rows": lambda: (
            flm.distribute_batch({"x": np.ones((4, 2)), "y": np.ones(6)}, placed())
        ),
        "rows must be one of": lambda: flm.distribute_batch(
            np.ones(8), placed(), rows=cast(Any, "locale")
        ),
        "multiple must be 1 or more": lambda: flm.pad_batch(np.ones(3), 0),
        "pad_batch found": lambda: flm.pad_batch({"n": 3, "key": jax.random.key(0)}, 4),
        "pad_batch cannot reach size=8": lambda: flm.pad_batch(np.ones(9), 4, size=8),
        "relayout_like of an array": lambda: flm.relayout_like(np.ones(8), np.ones(4)),
        "check_layout takes an array": lambda: flm.dtensor.check_layout(1, ()),
        "pack takes a part for each device of": lambda: packed(1, 2, 3),
        "unpack takes an array on a mesh,": lambda: flm.dtensor.unpack(np.ones(2)),
    },
    flm.errors.RuleError: {
        "a layout cannot be a string": lambda: TensorLayout("model"),
        "a layout cannot be an array": lambda: TensorLayout(jnp.ones(2)),
        f"{REDUCED!r} has reduced or unreduced axes": lambda: TensorLayout(REDUCED),
        "(UNCONSTRAINED,) leaves a dim": lambda: TensorLayout((P.UNCONSTRAINED,)),
        "rules 1 and 2 have the same pattern 'a'": lambda: flm.RuleSet(
            (flm.Rule("a", None), flm.Rule("a", None))
        ),
        "max_replicated needs a Resolution": lambda: flm.lint(
            mapped(), max_replicated=0.02
        ),
        "max_replicated needs a Resolution on a mesh": lambda: flm.lint(
            flm.LayoutMap().resolve({"w": struct(8)}), max_replicated=0.02
        ),
        "level must be one": lambda: flm.lint(mapped()).raise_if_any(cast(Any, "warn")),
        "there is no code LM999": lambda: flm.lint(mapped(), ignore=["LM999"]),
        "max_replicated is a share, 0 to 1": lambda: flm.lint(
            fit({}, {"w": struct(8)}), max_replicated=-1
        ),
        "ignore takes codes and": lambda: flm.lint(mapped(), ignore=cast(Any, [3])),
    },
    flm.errors.StructureError: {
        "a/0 cannot be flattened": lambda: fit({}, {"a": [Broken()]}),
        "the function changes the structure of its argument, a Linear,": lambda: trace(
            grow, (nnx.Linear(2, 2, rngs=nnx.Rngs(0)),)
        ),
        "the constructor keeps a Param that was made outside of it": keeps_another,
        "two objects of the result, a Linear and a List, share a Param": shared_results,
        "a Variable with ref=True is a reference": lambda: trace(
            lambda: nnx.Dict(w=nnx.Param(jnp.ones(2), ref=True))
        ),
    },
}


def text_of(run: Callable[[], Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        run()
    assert type(caught.value) is kind
    # A KeyError shows its message in quotes.
    return caught.value.args[0] if kind is KeyError else str(caught.value)


@pytest.mark.parametrize("name", CASES)
def test_text(name: str) -> None:
    run, kind, text = CASES[name]
    assert text_of(run, kind) == text


@pytest.mark.parametrize(
    ("kind", "beginning"),
    [(kind, text) for kind in BEGINNINGS for text in BEGINNINGS[kind]],
)
def test_beginning(kind: type[Exception], beginning: str) -> None:
    text = text_of(BEGINNINGS[kind][beginning], kind)
    if beginning.startswith("… "):
        text = "… " + text.split("\n  - ")[1]
    assert text.startswith(beginning)


# ---------------------------------------------------------------- the errors


def test_one_tree_of_errors() -> None:
    for name in ("Rule", "Mesh", "Resolve", "Structure", "Checkpoint", "Process"):
        error = getattr(flm.errors, f"{name}Error")
        assert issubclass(error, flm.LayoutError) and issubclass(error, ValueError)
        assert repr(error) == f"<class 'flax_layoutmap.errors.{name}Error'>"
    assert issubclass(flm.LayoutWarning, UserWarning)


def test_problems_are_kept() -> None:
    for kind in (flm.errors.ResolveError, flm.errors.CheckpointError):
        assert kind("text", ["a", "b"]).problems == ("a", "b")
        assert kind("text").problems == ()


def test_did_you_mean() -> None:
    assert _errors.did_you_mean("modle", NAMES) == "; did you mean 'model'?"
    assert _errors.did_you_mean("xyz", NAMES) == ""
    assert _errors.did_you_mean("nope", ["jnp", "opt", "np"]) == ""
    assert _errors.closest("mode", ["model", "mod", "data"], count=2) == [
        "model",
        "mod",
    ]


def test_long_lists_are_cut() -> None:
    text = _errors.bullet_list([f"p{number}" for number in range(60)])
    assert text.count("\n") == 50
    assert text.endswith("  … and 10 more (see .problems)")
    assert _errors.bullet_list(["a", "b"]) == "  - a\n  - b"


def test_warnings_point_at_the_users_line(mesh: flm.DeviceMesh) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = sys._getframe().f_lineno + 1
        flm.LayoutMap(mesh).shardings({"w": struct(8)})
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, line)]
    assert str(caught[0].message) == (
        "1 finding\n"
        "  - unmatched: w (8,) is matched by no rule, so every device holds it in full "
        "(100.0% of the bytes)\n"
        "  (a rule None says that a leaf is to be replicated; strict=False is quiet, "
        "strict=True raises)"
    )
