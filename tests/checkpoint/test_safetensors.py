"""restore_safetensors: targets, mappings, dtypes, placement and errors."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import shards
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import save_file
from same import refused

import flax_layoutmap as flm
from flax_layoutmap.checkpoint import mappings as m

RNG = np.random.default_rng(0)
UP = RNG.normal(size=(16, 8)).astype(np.float32)
DOWN = RNG.normal(size=(8, 16)).astype(np.float32)
NORM = np.arange(8, dtype=np.float32)
TENSORS = {"mlp.up.weight": UP, "mlp.down.weight": DOWN, "norm": NORM}
MAPPING = [
    (r"mlp/(up|down)/kernel", r"mlp.\1.weight", m.linear()),
    ("norm/scale", "norm"),
]


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(8, 16, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(16, 8, use_bias=False, rngs=rngs)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.mlp, self.norm = Mlp(rngs), nnx.RMSNorm(8, rngs=rngs)


def make() -> Model:
    return Model(nnx.Rngs(0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def rules(mesh: flm.DeviceMesh) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map[r"up[/.](kernel|weight)"] = ("data", "model")
    layout_map[r"down[/.](kernel|weight)"] = ("model", None)
    return layout_map


restore: Any = flm.checkpoint.restore_safetensors


# ------------------------------------------------------------------------ targets


def test_into_a_module(
    folder: Path, rules: flm.LayoutMap, mesh: flm.DeviceMesh
) -> None:
    model = make()
    assert restore(folder, model, layout_map=rules, mapping=MAPPING) is model
    for leaf, lies, value in (
        (model.mlp.up.kernel, (("data",), ("model",)), UP.T),
        (model.mlp.down.kernel, (("model",), ()), DOWN.T),
        (model.norm.scale, ((),), NORM),
    ):
        array: Any = leaf
        shards.assert_lies(array[...], lies, mesh, value)


def test_without_a_target_the_names_are_the_paths(
    folder: Path, rules: flm.LayoutMap, mesh: flm.DeviceMesh
) -> None:
    found = restore(folder, layout_map=rules, include="mlp")
    assert set(found) == {"mlp.up.weight", "mlp.down.weight"}
    up = found["mlp.up.weight"]
    shards.assert_lies(up, (("data",), ("model",)), mesh, UP)
    found = restore(folder, layout_map=rules, dtype={"norm": "float16"})
    assert found["norm"].dtype == jnp.float16
    assert found["mlp.up.weight"].dtype == jnp.float32


def test_without_a_mapping_dots_are_slashes(folder: Path, mesh: flm.DeviceMesh) -> None:
    sharding = NamedSharding(mesh.jax_mesh, PartitionSpec("model", "data"))
    up = jax.ShapeDtypeStruct((16, 8), "float32", sharding=sharding)
    down = np.zeros((8, 16), np.float32)
    target = {"mlp": {"up": {"weight": up}, "down": {"weight": down}}}
    found = restore(folder, target, unexpected="ignore")["mlp"]
    shards.assert_lies(found["up"]["weight"], (("model",), ("data",)), mesh, UP)
    assert isinstance(found["down"]["weight"], np.ndarray)
    np.testing.assert_array_equal(found["down"]["weight"], DOWN)


def test_values_without_dims_and_without_elements(
    tmp_path: Path, rules: flm.LayoutMap
) -> None:
    tensors = {"step": np.array(7, np.int32), "none": np.zeros((0, 4), np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    for target in (None, {"step": 0, "none": jnp.zeros((0, 4))}):
        found = restore(tmp_path, target, layout_map=rules)
        assert found["step"] == 7 and found["none"].shape == (0, 4)
        assert isinstance(found["step"], int if target else jax.Array)
        assert found["none"].sharding.is_fully_replicated


# ----------------------------------------------------------------- steps and placement


def test_the_first_name_that_is_there_and_the_first_entry_that_matches(
    tmp_path: Path, rules: flm.LayoutMap
) -> None:
    save_file({"wte": UP, "head": DOWN}, tmp_path / "model.safetensors")
    mapping = [
        ("embed", ("transformer.wte", "wte")),
        ("head/(?P<kind>kernel)", ("lm_head", r"\g<kind>"), m.linear()),
        ("head/.*", "head", m.linear()),
        (".*", "wte"),
    ]
    target = {"embed": jnp.zeros((16, 8)), "head": {"bias": jnp.zeros((16, 8))}}
    found = restore(tmp_path, target, layout_map=rules, mapping=mapping)
    np.testing.assert_array_equal(found["embed"], UP)
    np.testing.assert_array_equal(found["head"]["bias"], DOWN.T)


# ---------------------------------------------------------------------- unexpected


def test_tensors_that_no_leaf_needs(folder: Path, rules: flm.LayoutMap) -> None:
    target = {"mlp": {"up": {"kernel": jnp.zeros((8, 16))}}}
    options = {"layout_map": rules}
    with pytest.raises(flm.errors.CheckpointError) as caught:
        restore(folder, target, mapping=MAPPING, **options)
    text = str(caught.value)
    assert "mlp.down.weight (8,16): no leaf of the target is made of this" in text
    assert "(None, its name)" in text and "unexpected='ignore'" in text
    ignoring = [*MAPPING, (None, r"mlp\.down\.weight"), (None, ("norm", "other"))]
    for mapping, more in ((ignoring, {}), (MAPPING, {"unexpected": "ignore"})):
        found = restore(folder, target, mapping=mapping, **options, **more)
        np.testing.assert_array_equal(found["mlp"]["up"]["kernel"], UP.T)


def test_a_head_that_is_tied_to_the_embedding(
    tmp_path: Path, rules: flm.LayoutMap
) -> None:
    """As `transformers` saves a tied model: the embedding alone."""
    target = {"embed": {"embedding": jnp.zeros((16, 8))}}
    both = {**target, "lm_head": {"kernel": jnp.zeros((8, 16))}}
    tensors, file = {"model.embed_tokens.weight": UP}, tmp_path / "model.safetensors"
    save_file(tensors, file)
    found = restore(file, both, layout_map=rules, mapping=m.llama())
    np.testing.assert_array_equal(found["lm_head"]["kernel"], UP.T)
    save_file({**tensors, "lm_head.weight": UP}, file)
    with refused("pass tied=True"):
        restore(file, target, layout_map=rules, mapping=m.llama())
    restore(file, target, layout_map=rules, mapping=m.llama(tied=True))


# ---------------------------------------------------------------------- what is refused


def test_one_error_lists_all_problems_and_the_target_is_as_before(
    folder: Path, rules: flm.LayoutMap
) -> None:
    rules["odd"] = ("model",)
    model = {
        "mlp": {"up": {"kernel": jnp.zeros((8, 17))}, "down": {"kernel": jnp.zeros(3)}},
        "norm": {"scale": jnp.zeros(8, jnp.int32)},
        "odd": jnp.zeros(3),
        "key": jax.random.key(0),
    }
    before = dict(model)
    with refused(
        f"cannot restore {folder}: ",
        "odd (3,): rule 3 'odd' → ('model',): dim 0 of size 3 is not divisible",
        "mlp/up/kernel (8,17): needs tensor 'mlp.up.weight' (16,8) to have the shape "
        "(17,8)",
        "mlp/down/kernel (3,): it is not a kernel",
        "norm/scale (8,): another dtype: the checkpoint has float32, the target int32",
        "odd (3,): there is no tensor 'nor'",
    ):
        restore(folder, model, layout_map=rules, mapping=[*MAPPING, ("odd|key", "nor")])
    assert all(model[name] is before[name] for name in before)


ENTRIES: list[tuple[Any, str]] = [
    ({"norm": "norm"}, "mapping[0] is 'norm'; an entry is"),
    ([("norm", ())], "mapping[0] is ('norm', ()); an entry is"),
    ([("norm", 3)], "mapping[0] is ('norm', 3); an entry is"),
    ([("norm", "norm", "transpose")], "'transpose' is not a step; take"),
    ([("(", "norm")], "mapping[0]: '(' is not a regular expression"),
    ([("norm/(scale)", r"\2")], "the entry 'norm/(scale)' → "),
    ([("norm", "norm", m.stack())], "have no {layer} to fill in"),
]


@pytest.mark.parametrize(("mapping", "text"), ENTRIES)
def test_entries_that_are_refused(mapping: Any, text: str, folder: Path) -> None:
    with refused(text):
        restore(folder, make(), mapping=mapping)


STEPS: list[tuple[str, Any, str]] = [
    ("norm", m.transpose(0, 1), "transpose(0, 1) is not an order of 1 dims"),
    ("norm", m.split(0, 0, (3, 5)), "part 0 of (3, 5) has 3 entries, not 8"),
    ("n.{part}", m.merge(0, "abc"), "8 entries, which are not 3 parts of"),
    ("n.{layer}", m.stack(0, over="ab"), "8 entries in dim 0, and 2 tensors"),
    ("n.{layer}", (), "no step fills in the {layer} of 'n.{layer}'"),
]


@pytest.mark.parametrize(("name", "step", "text"), STEPS)
def test_steps_that_do_not_make_the_leaf(
    name: str, step: Any, text: str, folder: Path
) -> None:
    target, mapping = {"scale": np.zeros(8)}, [("scale", name, step)]
    with refused("scale (8,): ", text):
        restore(folder, target, mapping=mapping, unexpected="ignore")


def test_options_that_are_refused(folder: Path, rules: flm.LayoutMap) -> None:
    with refused("a mapping says what the leaves of a target are made of"):
        restore(folder, layout_map=rules, mapping=MAPPING)
    with refused("without layouts: pass layout_map="):
        restore(folder, mesh=rules.device_mesh)
    save: Any = flm.checkpoint.save_safetensors
    with refused("max_file_bytes='5GB' is not a number of bytes"):
        save(folder / "new", {"w": jnp.ones(8)}, max_file_bytes="5GB")


# -------------------------------------------------------------- errors of many layers


def layers(count: int, folder: Path) -> list[Any]:
    """Attention of so many layers in a file, and the leaves of its outputs."""
    weights = {
        f"model.layers.{at}.self_attn.o_proj.weight": np.zeros((6, 8), np.float32)
        for at in range(count)
    }
    save_file(weights, folder / "model.safetensors")
    kernel = jax.ShapeDtypeStruct((4, 2, 6), "float32")
    return [{"attention": {"out": {"kernel": kernel}}} for _ in range(count)]


def test_equal_problems_of_all_layers_are_one_line(
    tmp_path: Path, rules: flm.LayoutMap
) -> None:
    target = {"layers": layers(80, tmp_path)}
    entry = (r"layers/(\d+)/.*", r"model.layers.\1.self_attn.o_proj.weight", m.linear())
    path, name = "layers/{0..79}/attention/out/kernel", "self_attn.o_proj.weight"
    with pytest.raises(flm.errors.CheckpointError) as caught:
        restore(tmp_path, target, layout_map=rules, mapping=[entry])
    text = str(caught.value)
    assert text.count("\n") == 1 and len(caught.value.problems) == 80
    assert f"{path} ×80 (4,2,6): needs tensor 'model.layers.{{0..79}}.{name}'" in text
    assert "the shape (12,4); write linear(outputs=1), which fits; or build" in text
    misspelt = (r"layers/(\d+)/.*", r"model.layers.\1.self_attn.o_prj.weight")
    with pytest.raises(flm.errors.CheckpointError) as caught:
        restore(tmp_path, target, layout_map=rules, mapping=[misspelt])
    text = str(caught.value)
    assert text.count("\n") == 2
    assert (
        f"{path} ×80 (4,2,6): there is no tensor 'model.layers.{{0..79}}.self" in text
    )
    assert f"model.layers.{{0..79}}.{name} ×80 (6,8): no leaf of" in text
    steps = (m.linear(outputs=1),)
    found = restore(tmp_path, target, layout_map=rules, mapping=[(*entry[:2], steps)])
    assert found["layers"][79]["attention"]["out"]["kernel"].shape == (4, 2, 6)
    with refused(f"{path} ×80 (4,2,6): no entry of the mapping"):
        flm.checkpoint.save_safetensors(tmp_path / "x", found, mapping=[("x", "y")])
