"""Checkpoints written by plain Orbax, and options that join any two trees."""

import gc
import warnings
from collections.abc import Callable, Sequence
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
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from same import assert_same, bits, by_path, refused
from shards import assert_lies

import flax_layoutmap as flm

v1: Any = ocp.v1
inspect = flm.checkpoint.inspect
MESH = flm.DeviceMesh((2, 4), ("data", "model"))


def restore(path: Path | str, target: Any = None, **options: Any) -> Any:
    """By the rules below, unless others or a mesh are given."""
    if "mesh" not in options:
        options.setdefault("layout_map", rules(MESH))
    return flm.checkpoint.restore(path, target, **options)


def plan(
    path: Path, target: Any = None, **options: Any
) -> flm.checkpoint.CheckpointInfo:
    options.setdefault("layout_map", rules(MESH))
    return flm.checkpoint.plan(path, target, **options)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(2)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        x = nn.Dense(16, kernel_init=init, name="up")(x)
        return nn.BatchNorm(use_running_average=True)(x)


def make() -> Net:
    return Net(nnx.Rngs(0))


def rules(mesh: Any) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["kernel"] = (None, "model")
    return layout_map


@pytest.fixture(scope="module")
def training() -> dict[str, Any]:
    model = make()
    return {"model": model, "optimizer": nnx.Optimizer(model, adam(), wrt=nnx.Param)}


def adam() -> optax.GradientTransformation:
    return optax.adam(1e-3)


def train_state() -> TrainState:
    variables = LinenNet().init(jax.random.key(0), jnp.ones((1, 8)))
    return TrainState.create(
        apply_fn=LinenNet().apply, params=variables["params"], tx=adam()
    )


def written(path: Path, tree: Any) -> Path:
    v1.save(path, tree)
    return path


# ---------------------------------------------------------------------- grafting


def pure(node: Any) -> Any:
    return nnx.to_pure_dict(nnx.state(node))


def states() -> dict[str, Any]:
    model = make()
    optimizer = nnx.Optimizer(model, adam(), wrt=nnx.Param)
    return {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}


def pure_states() -> dict[str, Any]:
    return {name: nnx.to_pure_dict(state) for name, state in states().items()}


# What a script saves with Orbax → a function that makes it, and other targets for it.
TREES: dict[str, tuple[Callable[[], Any], Sequence[Callable[[], Any]]]] = {
    "NNX states": (states, [pure_states]),
    "TrainState": (train_state, [lambda: nn.meta.unbox(train_state())]),
    "unboxed": (lambda: nn.meta.unbox(train_state()), [train_state]),
    "params": (lambda: {"params": nn.meta.unbox(train_state()).params}, []),
}


@pytest.mark.parametrize("name", TREES)
def test_trees_that_orbax_saved(name: str, tmp_path: Path) -> None:
    make_tree, others = TREES[name]
    tree = make_tree()
    path = written(tmp_path / "a", tree)
    layout_map = flm.LayoutMap(MESH, match="fullmatch", strict=False)
    layout_map["up/kernel"] = (None, "model")
    wanted = layout_map.resolve(tree)
    for make_target in (make_tree, *others):
        target = make_target()
        result = restore(path, target, layout_map=layout_map)
        assert type(result) is type(target)
        assert_same(result, tree)
    # Without a target, rules see the paths that the live tree has.
    result = restore(path, layout_map=layout_map)
    leaves = by_path(result)
    for leaf in wanted:
        assert bits(leaves[leaf.path])[1:] == bits(by_path(tree)[leaf.path])[1:]
        if leaf.path.endswith("up/kernel"):
            assert leaves[leaf.path].sharding.spec == PartitionSpec(None, "model")


def test_lists_tuples_numbers_and_holes(tmp_path: Path) -> None:
    a, b = jnp.arange(8.0), jnp.arange(4)
    path = written(tmp_path / "a", {"t": (a, [b, None]), "e": {}, "n": 3, "s": "x"})
    for target in (
        {"t": (a, [b, None]), "e": {}, "n": 0, "s": ""},
        {"t": [a, (b,)], "n": 0, "s": ""},
        {"t": {0: a, 1: {"0": b}}, "n": 0, "s": ""},
    ):
        result = restore(path, target)
        assert jax.tree.structure(result) == jax.tree.structure(target)
        assert_same(
            jax.tree.leaves(result), jax.tree.leaves({**target, "n": 3, "s": "x"})
        )


def test_value_as_an_ordinary_key(tmp_path: Path) -> None:
    tree = {"w": {"value": jnp.arange(8.0)}}
    path = written(tmp_path / "a", tree)
    assert_same(restore(path, jax.tree.map(jnp.zeros_like, tree)), tree)


def test_numbers_of_keys_become_the_keys_of_the_target(tmp_path: Path) -> None:
    keys = jax.random.split(jax.random.key(3), 4)
    path = written(tmp_path / "a", {"keys": keys, "raw": jax.random.key_data(keys)})
    result = restore(path, {"keys": keys, "raw": keys})
    for name in ("keys", "raw"):
        assert np.array_equal(
            jax.random.key_data(result[name]), jax.random.key_data(keys)
        )


# ------------------------------------------------------------------------ options


@pytest.fixture(scope="module")
def saved(training: dict[str, Any], tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("saved") / "a"
    flm.checkpoint.save(path, training, layout_map=rules(MESH))
    return path


def test_rename(saved: Path, training: dict[str, Any]) -> None:
    renamed = {"net": {"first": pure(training["model"])["up"]}}
    result = restore(
        saved,
        renamed,
        rename=[(r"^model/up/(.*)", r"net/first/\1"), ("^model/", "old/")],
        unexpected="ignore",
    )
    assert_same(result, renamed)
    assert_lies(result["net"]["first"]["kernel"], ((), ("model",)), MESH)
    whole = restore(saved, rename={"model/": "model/net/"})
    assert_same(whole["model"]["net"]["up"], pure(training["model"])["up"])
    mu = whole["optimizer"]["opt_state"]["0"]["mu"]["up"]["kernel"]
    assert_lies(mu, ((), ("model",)), MESH)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rename": {"^nothing/": "x/"}}, "rename='^nothing/' finds no leaf"),
        (
            {"rename": {"(kernel|bias)$": "x"}},
            "'model/layers/0/x', which is not a path",
        ),
        ({"rename": {"^model/up/kernel$": ""}}, "to '', which is not a path"),
        ({"rename": {"^model/up/bias$": "model/up"}}, "to 'model/up', which is not"),
        ({"rename": {"(": "x"}}, "'(' is not a regular expression"),
        ({"rename": {"^model": r"\9"}}, "cannot replace what it finds in model/"),
        ({"missing": "kep"}, "missing='kep': use 'error' or 'keep' or 'init'"),
        ({"rename": ("^up", "down")}, "give a dict, or a list of pairs"),
        ({"include": 3}, "3 is not a regular expression"),
        ({"host_memory": "8GB"}, "host_memory='8GB' is not a number of bytes"),
        ({"step": 3}, "is a checkpoint, not a directory of steps"),
        ({"include": "wieght"}, "include='wieght' finds no leaf; the closest paths"),
        ({"dtype": "int8"}, "dtype='int8' is not a floating"),
        ({"dtype": "flaot32"}, "dtype='flaot32' is not a floating"),
        ({"dtype": "float64"}, "JAX would cut float64 to float32; set jax_enable_x64"),
    ],
)
def test_options_that_cannot_be(options: Any, text: str, saved: Path) -> None:
    for function in (restore, plan):
        with refused(text):
            function(saved, **options)


# Orbax abandons its other reads when one fails, and Python says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_a_limit_of_host_memory(saved: Path, training: dict[str, Any]) -> None:
    assert_same(restore(saved, host_memory=1 << 20), training)
    with refused(f"cannot read the checkpoint {saved}", "more bytes than we reserved"):
        restore(saved, host_memory=100)
    gc.collect()


def test_two_directories_of_one_step(tmp_path: Path) -> None:
    for name in ("ema_100", "model_100", "model_7"):
        written(tmp_path / name, {"w": jnp.ones(2)})
    for step in (100, "latest"):
        with refused("ema_100 and model_100; pass"):
            restore(tmp_path, step=step)


def test_urls(saved: Path) -> None:
    with refused("is for a disk"):
        restore("gs://bucket/run", step="latest")
    assert inspect(f"file://{saved}").path == str(saved)


class Larger(Net):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.head = nnx.Linear(16, 8, rngs=rngs)


def test_missing_leaves(saved: Path) -> None:
    options: dict[str, Any] = {"include": "^model/", "unexpected": "ignore"}
    target = {"model": Larger(nnx.Rngs(7))}
    before = target["model"].head.kernel[...]
    with refused("head/kernel (16,8): is in the target, not in the checkpoint"):
        restore(saved, target, **options)
    assert target["model"].head.kernel[...] is before
    kept = restore(saved, target, missing="keep", **options)
    assert kept["model"].head.kernel[...] is before
    make_larger = lambda: {"model": Larger(nnx.Rngs(7))}  # noqa: E731
    made = restore(saved, make_larger, missing="init", **options)
    assert_same(made["model"].head, target["model"].head)
    assert_lies(made["model"].head.kernel[...], ((), ("model",)), MESH)
    for result in (kept, made):
        assert_same(result["model"].up, make().up)
    with refused("needs a function as target"):
        restore(saved, target, missing="init", **options)
    abstract = nnx.eval_shape(lambda: Larger(nnx.Rngs(7)))
    with refused("there is no value to keep"):
        restore(saved, {"model": abstract}, missing="keep", **options)


def test_unexpected_leaves(saved: Path) -> None:
    target = {"model": {"up": pure(make())["up"]}}
    with refused("is in the checkpoint, not in the"):
        restore(saved, target)
    result = restore(saved, target, unexpected="ignore")
    assert_same(result, target)
    found = plan(saved, target, unexpected="ignore")
    assert {leaf.path for leaf in found.leaves} == set(by_path(target))


def test_dtypes_by_rule(saved: Path) -> None:
    dtypes = [("^optimizer/", None), ("kernel$", jnp.bfloat16)]
    found = by_path(restore(saved, dtype=dtypes))
    assert found["model/up/kernel"].dtype == jnp.bfloat16
    assert found["model/up/bias"].dtype == jnp.float32
    assert found["optimizer/opt_state/0/mu/up/kernel"].dtype == jnp.float32
    assert found["optimizer/step"].dtype == jnp.uint32


# ------------------------------------------------------------------- inspect, plan


def test_inspect_orbax(tmp_path: Path) -> None:
    sharding = NamedSharding(MESH.jax_mesh, PartitionSpec("data", "model"))
    array = jax.device_put(jnp.ones((8, 16), jnp.bfloat16), sharding)
    tree = {"params": {"w": array}, "n": 3, "x/y": np.ones(2)}
    v1.save(tmp_path / "a", tree, custom_metadata={"note": "mine"})
    info = inspect(tmp_path / "a")
    assert info.kind == "orbax" and info.metadata == {"note": "mine"}
    found = {x.path: (x.dtype, x.bytes, x.role, x.spec) for x in info.leaves}
    assert found == {
        "params/w": ("bfloat16", 256, "parameter", PartitionSpec("data", "model")),
        "n": ("int", 0, "other", None),
        "x%2Fy": ("float64", 16, "parameter", None),
    }
    assert info.total_bytes == 272


def test_inspect_safetensors(tmp_path: Path) -> None:
    tree = {"up": {"kernel": jnp.ones((4, 8), jnp.bfloat16)}}
    flm.checkpoint.save_safetensors(tmp_path / "a", tree)
    info = inspect(tmp_path / "a")
    assert info.kind == "safetensors" and "safetensors" in str(info)
    found = [(leaf.shape, leaf.dtype, leaf.bytes) for leaf in info.leaves]
    assert found == [((4, 8), "bfloat16", 64)]
    with refused("use flm.checkpoint.restore_safetensors"):
        restore(tmp_path / "a")
    (file,) = (tmp_path / "a").glob("*.safetensors")
    assert inspect(file).leaves == info.leaves
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(flm.errors.CheckpointError, match=file.name):
        inspect(tmp_path / "a")


def test_steps_of_a_checkpoint_manager(tmp_path: Path) -> None:
    manager = ocp.CheckpointManager(tmp_path / "runs")
    for step in (1, 2, 10):
        value = {"params": {"kernel": jnp.full((2, 4), step)}}
        manager.save(step, args=ocp.args.StandardSave(value))
    manager.wait_until_finished()
    manager.close()
    (tmp_path / "runs" / "11.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "runs" / "12").mkdir()  # nothing in it
    info = inspect(tmp_path / "runs")
    assert (info.kind, info.step, info.steps) == ("orbax", 10, (1, 2, 10))
    assert "step 10 (3 of 3)" in str(info)
    assert inspect(tmp_path / "runs", step=2).step == 2
    options: dict[str, Any] = {"layout_map": rules(MESH)}
    for step, value in ((2, 2), ("latest", 10), (None, 10)):
        result = restore(tmp_path / "runs", step=step, **options)
        assert (np.asarray(result["params"]["kernel"]) == value).all()
    for step in (3, 1.7, "abc"):
        with refused(f"no step {step!r}; it has 1, 2, 10"):
            restore(tmp_path / "runs", step=step, **options)


def test_several_trees_in_one_checkpoint(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "runs") as manager:
        manager.save(
            1,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave({"w": jnp.ones(4)}),
                params=ocp.args.PyTreeSave({"w": jnp.zeros(4)}),
                data=ocp.args.JsonSave({"at": 3}),
            ),
        )
    step = tmp_path / "runs" / "1"
    with refused(f"give the path of one: {step}/params or {step}/state"):
        inspect(tmp_path / "runs")
    for item, value in (("params", 0), ("state", 1)):
        result = restore(step / item)
        assert (np.asarray(result["w"]) == value).all()
        (leaf,) = plan(step / item).leaves
        assert leaf.path == "w" and inspect(step / item).leaves[0].path == "w"


def test_a_plan_for_a_pod_that_is_not_there(saved: Path) -> None:
    layout_map = rules(flm.DeviceMesh.abstract("fsdp=16,model=16"))
    options: dict[str, Any] = {"layout_map": layout_map, "dtype": jnp.bfloat16}
    found = plan(saved, include="^net/", rename={"^model/": "net/"}, **options)
    kernel = {leaf.path: leaf for leaf in found.leaves}["net/up/kernel"]
    assert kernel.rule == "1 kernel" and kernel.spec == PartitionSpec(None, "model")
    assert (kernel.source, kernel.dtype) == ("model/up/kernel", "bfloat16")
    assert kernel.bytes_per_device == 8 * 16 * 2 // 16
    assert f"{len(found.leaves)} leaves, " in str(found)
    with pytest.raises(flm.errors.MeshError, match="restore needs a mesh of devices"):
        restore(saved, layout_map=layout_map)


# ------------------------------------------------------------------ resolve, verify


def test_resolve_on_the_mesh_of_the_save_and_without_one(
    saved: Path, tmp_path: Path
) -> None:
    found = flm.checkpoint.resolve(saved)
    assert found.mesh is not None and found.mesh.is_abstract
    assert found.mesh.axis_sizes == {"data": 2, "model": 4}
    assert found["optimizer/opt_state/0/mu/up/kernel"].shard_shape == (8, 4)
    path, w = written(tmp_path / "3", {"w": jnp.ones((4, 4))}), flm.LayoutMap()
    w["w"] = ("data", None)
    with refused("saved without rules; pass layout_map"):
        flm.checkpoint.resolve(path)
    with refused("saved without a mesh; pass mesh="):
        flm.checkpoint.resolve(path, layout_map=w)
    mesh = flm.DeviceMesh.abstract("data=4")
    for place in (path, tmp_path):  # or the latest step of a directory
        found = flm.checkpoint.resolve(place, layout_map=w, mesh=mesh)
        assert found["w"].shard_shape == (1, 4)


def test_the_mesh_in_context_does_not_matter(saved: Path) -> None:
    with jax.set_mesh(jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))):
        options: dict[str, Any] = {"dtype": {"kernel": jnp.bfloat16}}
        result = restore(saved, verify=True, **options)
    assert_lies(result["model"]["up"]["kernel"], ((), ("model",)), MESH)


def test_nothing_to_verify_with(tmp_path: Path) -> None:
    written(tmp_path / "a", {"w": jnp.ones(4)})
    flm.checkpoint.save(tmp_path / "b", {"w": jnp.ones(4)}, checksums=False)
    for place in (tmp_path / "a", tmp_path / "b"):
        with refused("saved without checksums"):
            restore(place, verify=True)
        with warnings.catch_warnings():  # by default nothing is said of it
            warnings.simplefilter("error")
            assert np.array_equal(restore(place, include="w")["w"], np.ones(4))
