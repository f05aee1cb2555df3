"""Save, and restore onto other meshes, targets and dtypes; the text of every error."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from same import assert_placed, assert_same, bits, by_path, refused

import flax_layoutmap as flm

# Orbax's own annotations speak of no pathlib.Path and of any JSON value.
v1: Any = ocp.v1

# Mesh → the names that the rules below use for its first and its last axis.
MESHES = {
    "as saved": lambda: flm.DeviceMesh("data=2,model=4"),
    "another shape": lambda: flm.DeviceMesh("data=4,model=2"),
    "other names": lambda: flm.DeviceMesh("x=2,y=4"),
    "one axis": lambda: flm.DeviceMesh("model=8"),
    "half of the devices": lambda: flm.DeviceMesh(
        (2, 2), ("data", "model"), jax.devices()[4:]
    ),
    "one device": lambda: flm.DeviceMesh((1, 1), ("data", "model"), jax.devices()[5:6]),
    "explicit": lambda: flm.DeviceMesh("data=4,model=2", axis_types="explicit"),
}


class Mlp(nnx.Module):
    """Square and other kernels, a list, batch statistics and random state."""

    def __init__(self, rngs: nnx.Rngs, width: int = 16) -> None:
        self.up = nnx.Linear(8, width, rngs=rngs)
        self.down = nnx.Linear(width, 8, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


def make() -> Mlp:
    return Mlp(nnx.Rngs(0))


def make_optimizer() -> nnx.Optimizer[Mlp]:
    return nnx.Optimizer(make(), optax.adamw(1e-2), wrt=nnx.Param)


def rules(mesh: flm.DeviceMesh | None, **options: Any) -> flm.LayoutMap:
    """Rules for `Mlp`, on any of the meshes."""
    layout_map = flm.LayoutMap(mesh, strict=False, **options)
    first, last = (mesh.axis_names[0], mesh.axis_names[-1]) if mesh else ("data", "m")
    layout_map["up/kernel"] = (None, last)
    layout_map["down/kernel"] = (last, None)
    layout_map["layers/./kernel"] = (None if first == last else first, last)
    return layout_map


def plain_rules(spec: str = "data=8", **options: Any) -> flm.LayoutMap:
    """Rules for trees with a leaf `w` whose first dim lies on `data`."""
    layout_map = flm.LayoutMap(flm.DeviceMesh(spec), strict=False, **options)
    layout_map[r"(^|/)w$"] = ("data", ...)
    return layout_map


def restore(path: Path, target: Any = None, **options: Any) -> Any:
    """By `plain_rules`, unless others are given."""
    options.setdefault("layout_map", plain_rules())
    return flm.checkpoint.restore(path, target, **options)


def trained() -> dict[str, Any]:
    """A model, its optimizer after one update, and a step, on the mesh as saved."""
    layout_map = rules(MESHES["as saved"]())
    model = flm.create(make, layout_map)
    optimizer = flm.create_optimizer(model, optax.adamw(1e-2), layout_map)
    optimizer.update(model, nnx.state(model, nnx.Param))
    return {"model": model, "optimizer": optimizer, "step": 3}


@pytest.fixture(scope="module")
def training() -> dict[str, Any]:
    return trained()


@pytest.fixture(scope="module")
def saved(training: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of `trained()`."""
    path = tmp_path_factory.mktemp("trained") / "checkpoint"
    flm.checkpoint.save(path, training, layout_map=rules(MESHES["as saved"]()))
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a small dict."""
    path = tmp_path_factory.mktemp("small") / "checkpoint"
    flm.checkpoint.save(path, small_tree())
    return path


def small_tree() -> dict[str, Any]:
    w = jnp.arange(32, dtype=jnp.float32).reshape(8, 4) / 7
    return {"w": w, "b": {"bias": jnp.ones(4), "count": jnp.int32(5)}, "step": 3}


# ------------------------------------------------------------------ other meshes


@pytest.mark.parametrize("name", MESHES)
def test_onto_other_meshes(name: str, saved: Path, training: dict[str, Any]) -> None:
    layout_map = rules(MESHES[name]())
    target = {"model": make(), "optimizer": make_optimizer(), "step": 0}
    variable = target["model"].up.kernel
    restored = restore(saved, target, layout_map=layout_map)
    assert restored["model"] is target["model"]
    assert restored["optimizer"] is target["optimizer"]
    assert restored["model"].up.kernel is variable
    assert target["step"] == 0, "a dict is no object to be updated"
    alone = restore(saved, layout_map=layout_map)
    assert type(alone) is dict
    for tree in (restored, alone):
        assert_same(tree, training)
        assert_placed(tree, layout_map.resolve(training))


# --------------------------------------------------------------------- targets


def test_an_abstract_target_stays_abstract(
    saved: Path, training: dict[str, Any]
) -> None:
    layout_map = rules(MESHES["another shape"]())
    for target in (nnx.eval_shape(make), nnx.state(nnx.eval_shape(make))):
        before = jax.tree.leaves(target)
        restored = restore(
            saved, {"model": target}, layout_map=layout_map, include="^model/"
        )
        assert type(restored["model"]) is type(target)
        assert restored["model"] is not target
        assert_same(restored["model"], training["model"])
        assert_placed(restored["model"], layout_map.resolve(training["model"]))
        assert jax.tree.leaves(target) == before


class Dense(nn.Module):
    """A Linen layer whose kernel is boxed with axis names."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.lecun_normal()
        x = nn.Dense(8, kernel_init=nn.with_partitioning(init, (None, "model")))(x)
        return nn.Dense(8, name="last")(x)


def linen_state(**more: Any) -> TrainState:
    module = Dense()
    variables = nn.unbox(module.init(jax.random.key(0), jnp.ones((1, 8))))
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=4)
    state = TrainState.create(
        apply_fn=module.apply, params=variables["params"], tx=tx, **more
    )
    return state.apply_gradients(grads=state.params)


def test_own_shardings_of_other_targets(small: Path) -> None:
    device = jax.devices()[3]
    mesh: Any = flm.DeviceMesh("data=8").jax_mesh
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    bias = jax.device_put(np.zeros(4, np.float32), device)
    target = {
        "w": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding),
        "b": {"bias": bias, "count": np.zeros((), np.int32)},
        "step": 0,
    }
    restored = flm.checkpoint.restore(small, target)
    assert_same(restored, small_tree())
    assert restored["w"].sharding == sharding
    assert restored["b"]["bias"].sharding == SingleDeviceSharding(device)
    assert type(restored["b"]["count"]) is np.ndarray
    assert type(restored["step"]) is int


# ------------------------------------ resolving a checkpoint as the live tree


class Marked(nnx.Module):
    """Layouts on the Variables themselves."""

    def __init__(self) -> None:
        zeros, logical = jnp.zeros((8, 8)), (("rows", "model"),)
        self.explicit = nnx.Param(zeros, layout=flm.TensorLayout((..., "model")))
        self.named = nnx.Param(zeros, out_sharding=("data", None))
        self.logical = nnx.Param(
            zeros, out_sharding=("rows", None), sharding_rules=logical
        )
        self.kernel = nnx.Param(zeros)


def marked() -> Marked:
    with nnx.use_eager_sharding(False):
        return Marked()


def chain() -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.9),
    )


def with_optimizer(tx: optax.GradientTransformation) -> dict[str, Any]:
    model = make()
    return {"model": model, "optimizer": nnx.Optimizer(model, tx, wrt=nnx.Param)}


def logical_linen() -> Any:
    init = nn.with_logical_partitioning(nn.initializers.zeros_init(), ("rows", None))
    return nn.Dense(8, kernel_init=init).init(jax.random.key(0), jnp.ones((1, 8)))


def factored_alone() -> dict[str, Any]:
    params = {"params": {"square": {"kernel": jnp.ones((8, 8))}}}
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=4)
    return {**params, "opt_state": tx.init(params["params"])}


TREES: dict[str, Callable[[], Any]] = {
    "adafactor": lambda: with_optimizer(chain()),
    "optimizer alone": lambda: make_optimizer(),
    "State": lambda: {"weights": nnx.state(make())},
    "two models": lambda: {"a": make(), "b": make(), "c": make_optimizer()},
    "TrainState": linen_state,
    "TrainState in a dict": lambda: {"state": linen_state(), "epoch": 1},
    "params and opt_state": factored_alone,
    "layouts on Variables": lambda: {"model": marked()},
    "logical Linen": logical_linen,
}


@pytest.mark.parametrize("name", TREES)
def test_rules_meet_a_checkpoint_as_they_meet_the_live_tree(
    name: str, tmp_path: Path
) -> None:
    tree = TREES[name]()
    flm.checkpoint.save(tmp_path / "a", tree)
    mesh = MESHES["another shape"]()
    layout_map = flm.LayoutMap(mesh, match="fullmatch", strict=False)
    layout_map["(.*/)?(up|square|Dense_0)/kernel"] = (None, "model")
    layout_map["down/kernel"] = ("model", "data")
    layout_map["layers/0/kernel"] = ("data", "model")
    layout_map.optimizer["layers/1/kernel"] = ("model", None)
    with nn.logical_axis_rules([("rows", "data")]):
        live = layout_map.resolve(tree)
        restored = restore(tmp_path / "a", layout_map=layout_map)
    if name != "optimizer alone":
        assert_placed(restored, live)
    expected = dict(zip(live.paths, live.sharding_list(), strict=True))
    for path, leaf in by_path(restored).items():
        if isinstance(leaf, jax.Array):
            assert leaf.sharding == expected[path], path


def test_a_state_without_tx_asks_the_checkpoint_for_its_dims(tmp_path: Path) -> None:
    tree = with_optimizer(chain())
    flm.checkpoint.save(tmp_path / "a", tree)
    layout_map = rules(MESHES["as saved"]())
    target = {
        "model": nnx.state(nnx.eval_shape(make)),
        "optimizer": jax.eval_shape(lambda: nnx.state(tree["optimizer"])),
    }
    restored = restore(tmp_path / "a", target, layout_map=layout_map)
    assert_placed(restored, layout_map.resolve(tree))


# ------------------------------------------------------------- kinds of leaves


def other_leaves() -> dict[str, Any]:
    return {
        "int": -(2**62),
        "float": 0.1,
        "nan": float("inf"),
        "string": "é/%\n",
        "numpy": np.arange(6, dtype=np.int32)[::2],
        "wide": np.array([0.1, np.nan]),
        "big end": np.arange(3, dtype=">i8"),
        "zero": jnp.zeros((0, 4), jnp.bfloat16),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), (2, 3)),
        "no keys": jax.random.split(jax.random.key(1, impl="rbg"), 0),
        "none": None,
        "tuple": (jnp.ones(1), {"a/b": jnp.ones(2), "50%": jnp.zeros(2)}),
        "": {"": jnp.ones(3), ".": jnp.ones(2)},
    }


def test_other_leaves_come_back_as_they_were(tmp_path: Path) -> None:
    tree = other_leaves()
    flm.checkpoint.save(tmp_path / "a", tree)
    restored = restore(tmp_path / "a")
    # A number of another byte order is the same number.
    expected = {**tree, "big end": tree["big end"].astype("i8")}
    assert_same(restored, expected)
    assert restored["tuple"]["1"].keys() == {"a/b", "50%"}
    for name in ("wide", "big end"):  # JAX would cut these to 32 bits
        assert type(restored[name]) is np.ndarray, name
    for name in ("numpy", "zero", "keys", "no keys"):
        assert isinstance(restored[name], jax.Array), name
        assert len(restored[name].sharding.device_set) == 8, name

    again = restore(tmp_path / "a", tree)
    assert_same(again, expected)
    assert jax.tree.structure(again) == jax.tree.structure(tree)


VALUES: dict[str, Any] = {
    **{"int": 3, "float": 0.5, "bool": True, "complex": 1j, "str": "a"},
    **{"int32": jnp.int32(3), "float32": jnp.float32(0.5), "bool_": jnp.bool_(True)},
    **{"half": jnp.bfloat16(0.5), "halves": jnp.ones(2, jnp.bfloat16)},
    **{"vector": jnp.ones(2), "column": jnp.ones((2, 1)), "empty": jnp.zeros((0, 3))},
    **{"ints": jnp.ones(2, jnp.int8), "bytes": jnp.ones(2, jnp.uint8)},
    **{"key": jax.random.key(0), "data": jnp.ones(2, jnp.uint32)},
}


def stands_for(saved: Any, target: Any) -> bool:
    """Equal shapes and dtypes; Python numbers as NumPy's numbers of their type."""
    if isinstance(saved, jax.Array) and isinstance(target, jax.Array):
        return (saved.shape, saved.dtype) == (target.shape, target.dtype)
    if "key" in f"{getattr(saved, 'dtype', '')}{getattr(target, 'dtype', '')}":
        return False
    types = {type(np.asarray(value).tolist()) for value in (saved, target)}
    return len(types) == 1 and list not in types


def test_kinds_of_leaves_that_stand_for_each_other(tmp_path: Path) -> None:
    flm.checkpoint.save(
        tmp_path / "a", {a: dict.fromkeys(VALUES, VALUES[a]) for a in VALUES}
    )
    target = dict.fromkeys(VALUES, VALUES)
    fit = {(a, b) for a in VALUES for b in VALUES if stands_for(VALUES[a], VALUES[b])}
    with pytest.raises(flm.errors.CheckpointError) as caught:
        restore(tmp_path / "a", target)
    refused = {text.split(" ")[0] for text in caught.value.problems}
    assert refused == {f"{a}/{b}" for a in VALUES for b in VALUES if (a, b) not in fit}
    restored = restore(
        tmp_path / "a", target, exclude=[f"^{path}$" for path in refused]
    )
    for a, b in fit:
        found = restored[a][b]
        assert type(found) is type(VALUES[b]), (a, b)
        assert stands_for(found, VALUES[b])
        same = bits(found) == bits(VALUES[a])
        assert same if a == b else np.array_equal(found, VALUES[a]), (a, b)


def test_a_number_that_does_not_fit_exactly(tmp_path: Path) -> None:
    flm.checkpoint.save(tmp_path / "a", {"x": 0.1, "n": 2**40, "w": jnp.ones(8)})
    target = {"x": jnp.float32(0), "n": jnp.int32(0), "w": jnp.zeros(8)}
    with refused(
        "1 problem", "n (): the number 1099511627776 of the checkpoint is not"
    ):
        restore(tmp_path / "a", target)
    restored = restore(tmp_path / "a", target | {"n": 0})
    assert restored["x"] == jnp.float32(0.1) and restored["n"] == 2**40


# ------------------------------------------------------ a part, another dtype


def test_leaves_that_are_left_out_keep_the_values_of_the_target(
    saved: Path, training: dict[str, Any]
) -> None:
    layout_map = rules(MESHES["another shape"]())
    target = {"model": make(), "optimizer": make_optimizer(), "step": 7}
    bias = target["model"].up.bias.get_value()
    restored = restore(saved, target, layout_map=layout_map, include="kernel")
    assert restored["step"] == 7
    assert restored["model"].up.bias.get_value() is bias
    kernel = training["model"].up.kernel
    assert bits(restored["model"].up.kernel.get_value()) == bits(kernel.get_value())


def test_the_rules_need_to_fit_only_what_is_restored(tmp_path: Path) -> None:
    params = {"w": jnp.ones((8, 8)), "odd": {"w": jnp.ones((6, 8))}}
    tx = optax.adam(1e-2)
    tree = {"params": params, "opt_state": tx.init(params)}
    flm.checkpoint.save(tmp_path / "a", tree)
    with refused("odd/w (6,8): rule 1", "dim 0 of size 6", "1 problem"):
        restore(tmp_path / "a")
    restored = restore(tmp_path / "a", exclude="odd")
    mu = restored["opt_state"]["0"]["mu"]["w"]
    assert mu.sharding.spec == PartitionSpec("data")


# ------------------------------------------------------- what does not fit


class Deep(nnx.Module):
    """Eighty layers, as large language models have them."""

    def __init__(self, width: int) -> None:
        rngs = nnx.Rngs(0)
        layers = [nnx.Linear(4, width, rngs=rngs) for _ in range(80)]
        self.layers = nnx.List(layers)


def test_one_error_lists_every_problem_and_folds_layers(tmp_path: Path) -> None:
    flm.checkpoint.save(tmp_path / "a", {"net": Deep(8), "gone": jnp.ones(3)})
    layout_map = flm.LayoutMap(flm.DeviceMesh("data=8"), strict=False)
    layout_map["new"] = (None, "data")
    target = {"net": Deep(6), "new": jnp.ones(3)}
    before = by_path(target)
    with pytest.raises(flm.errors.CheckpointError) as caught:
        restore(tmp_path / "a", target, layout_map=layout_map)
    first, *lines = str(caught.value).splitlines()
    assert first == f"cannot restore {tmp_path / 'a'}: 163 problems"
    starts = [
        "  - new (3,): rule 1 'new' → (None, 'data') has 2 dims",
        "  - gone (3,): is in the checkpoint, not in the target; to leave it out, pass",
        "  - net/layers/{0..79}/bias ×80 (8,): shape mismatch: checkpoint (8,), target",
        "  - net/layers/{0..79}/kernel ×80 (4,8): shape mismatch: checkpoint (4, 8),",
        "  - new (3,): is in the target, not in the checkpoint",
    ]
    assert [line[: len(s)] for line, s in zip(lines, starts, strict=True)] == starts
    assert len(caught.value.problems) == 163
    after = by_path(target)
    assert all(after[path] is before[path] for path in before), "it was touched"


def test_no_layouts_and_no_devices(small: Path, saved: Path) -> None:
    with refused("without layouts: pass layout_map=, on the mesh to restore to"):
        flm.checkpoint.restore(small)
    with refused("(or mesh= for its own rules), or a target"):
        flm.checkpoint.restore(saved)
    with refused("without layouts: pass layout_map="):
        flm.checkpoint.restore(small, mesh="data=8")
    abstract = flm.LayoutMap(flm.DeviceMesh.abstract("data=8"))
    for layout_map, have in ((rules(None), "no mesh"), (abstract, "abstract")):
        with pytest.raises(flm.errors.MeshError, match=f"restore needs .*{have}"):
            restore(small, layout_map=layout_map)


def test_64_bits_are_never_cut(tmp_path: Path) -> None:
    flm.checkpoint.save(tmp_path / "a", {"w": np.arange(8) + 2**40})
    with (
        jax.enable_x64(True),
        refused("w (8,): Orbax read ", "int32", "asked for int64"),
    ):
        restore(tmp_path / "a")


def test_64_bits_are_compared_with_the_checksum_before_they_are_rounded(
    tmp_path: Path,
) -> None:
    thirds = np.arange(8) / 3
    flm.checkpoint.save(tmp_path / "a", {"w": thirds})
    target = {"w": jax.ShapeDtypeStruct((8,), jnp.float32)}
    assert_same(restore(tmp_path / "a", target, dtype="target")["w"], jnp.array(thirds))


def test_shardings_that_are_not_there(small: Path) -> None:
    text = "the target has no sharding on devices for it; pass layout_map="
    with refused("4 problems", f"w (8,4): {text}"):
        flm.checkpoint.restore(small, jax.eval_shape(small_tree))
    for mesh, said in (
        (flm.DeviceMesh.abstract("data=3"), text),
        (flm.DeviceMesh("data=3", devices=jax.devices()[:3]), "divi"),
    ):
        sharding: Any = NamedSharding(mesh.jax_mesh, PartitionSpec("data"))  # pyright: ignore
        w = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding)
        with refused("1 problem", "w (8,4): ", said):
            flm.checkpoint.restore(small, small_tree() | {"w": w})


# ----------------------------------------------------------------------- saving


def test_trees_that_cannot_be_saved(tmp_path: Path) -> None:
    several = {
        "a": object(),
        "b": {"c": jax.ShapeDtypeStruct((2,), "f4")},
        "d": 2**63,
        "e": jnp.ones(2, "uint4"),
        "f.g": jnp.ones(2),
        "f": {"g": jnp.zeros(2)},
    }
    problems = (
        "a: builtins.object cannot be saved; keep to arrays",
        "b/c (2,): it is abstract",
        "d (): the int 9223372036854775808 needs more than 64 bits",
        "e (2,): Orbax cannot store uint4",
        "f/g and f.g: both would be stored as 'f.g', so that one is lost",
    )
    for tree, texts in (
        (several, problems),
        (jnp.ones(2), ["the tree is a single leaf; save it under a key"]),
        ({}, ["the tree holds no value"]),
    ):
        with refused(f"{tmp_path / 'a'}: {len(texts)} problem", *texts):
            flm.checkpoint.save(tmp_path / "a", tree)
    assert os.listdir(tmp_path) == []


def test_rules_are_checked_against_the_tree_before_saving(tmp_path: Path) -> None:
    with pytest.raises(
        flm.errors.ResolveError, match=r"w \(6,\): rule 1 .*dim 0 of size 6"
    ):
        flm.checkpoint.save(
            tmp_path / "a", {"w": jnp.ones(6)}, layout_map=plain_rules()
        )
    assert os.listdir(tmp_path) == []


def test_what_is_written(saved: Path, training: dict[str, Any]) -> None:
    """An ordinary Orbax checkpoint, with the rules and the mesh in its metadata."""
    metadata = v1.metadata(saved)
    custom = metadata.custom_metadata["flax_layoutmap"]
    assert custom["schema"] == 1
    assert custom["mesh"]["shape"] == [2, 4]
    assert custom["versions"]["jax"] == jax.__version__
    layout_map = rules(MESHES["as saved"]())
    assert flm.LayoutMap.from_json(custom["rules"], mesh="data=2,model=4") == layout_map
    # No chunk is smaller than a shard: a bias is one chunk, not one per device.
    bias = metadata.metadata["model"]["up"]["bias"]
    assert bias.storage_metadata.chunk_shape == (16,)
    target = jax.tree.map(lambda leaf: np.ndarray, metadata.metadata)
    plain = v1.load(saved, target | {"step": 0})
    kernel = training["model"].layers[1].kernel.get_value()
    assert bits(plain["model"]["layers"]["1"]["kernel"]) == bits(kernel)
    assert plain["step"] == 3


def test_overwrite(tmp_path: Path) -> None:
    path = tmp_path / "a"
    flm.checkpoint.save(path, {"w": jnp.zeros(8)}, overwrite=True)
    for step in range(1, 4):
        with refused("the path exists; save to another one, or pass overwrite=True"):
            flm.checkpoint.save(path, {"w": jnp.zeros(8)})
        flm.checkpoint.save(path, {"w": jnp.full(8, step)}, overwrite=True)
        # Nothing of the old one is left in any cache.
        restored = restore(path)
        assert restored["w"].tolist() == [step] * 8
    assert os.listdir(tmp_path) == ["a"]


WRONG: list[Callable[[jax.Array], Any]] = [
    lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype),
    lambda w: w[:4],
    lambda w: w.astype(jnp.float16),
    lambda w: jax.device_put(w, jax.devices()[0]),
    lambda w: "w",
    lambda w: 1 / 0,
]


@pytest.mark.parametrize("wrong", WRONG)
def test_orbax_is_not_trusted(
    wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but what was asked for gets through, and a failure changes no object."""
    target = {"net": nnx.Dict(w=nnx.Param(jnp.ones((8, 4))))}
    flm.checkpoint.save(tmp_path / "a", target)
    before, load = by_path(target)["net/w"], v1.load

    def other(path: Any, target: Any, **options: Any) -> Any:
        return {"net": {"w": wrong(load(path, target, **options)["net"]["w"])}}

    monkeypatch.setattr(v1, "load", other)
    said = "ZeroDivisionError" if wrong is WRONG[-1] else "net/w (8,4): Orbax read"
    with refused(str(tmp_path / "a"), said):
        restore(tmp_path / "a", target, verify=False)
    assert by_path(target)["net/w"] is before


def test_arrays_are_not_opened_for_their_shapes(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `v1.metadata` opens them, before the read opens them once more."""
    monkeypatch.delattr(v1, "metadata")
    assert_same(restore(small), small_tree())


def test_orbaxs_own_context_does_not_leak_in(small: Path, tmp_path: Path) -> None:
    context = v1.Context()
    context.pytree.loading.partial_load = True
    context.array.loading.enable_padding_and_truncation = True
    with context:
        restored = restore(small)
        flm.checkpoint.save(tmp_path / "a", restored)
    assert_same(restored, small_tree())


def test_a_place_where_no_directory_can_be_made(tmp_path: Path) -> None:
    # Where Orbax fails instead, its threads keep the program from ending.
    tree, near = {"w": jnp.ones(8)}, tmp_path / ("z" * 225)
    flm.checkpoint.save(near, tree)  # itself short enough, not with the suffixes
    for path, text in (
        (tmp_path / ("x" * 240), "File name too long"),
        (tmp_path / "missing" / ("y" * 300) / "new", "File name too long"),
        (near, "File name too long"),
        (f"{tmp_path}/a\0b", "embedded null"),
        (near / "_CHECKPOINT_METADATA" / "new", "File exists"),
    ):
        with refused("cannot be made: ", text):
            flm.checkpoint.save(path, tree, overwrite=True)
    assert list(tmp_path.iterdir()) == [near]
