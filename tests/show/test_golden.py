"""Golden files of layouts, and the pytest plug-in that writes them."""

import itertools
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flax_layoutmap as flm
from flax_layoutmap.testing import assert_golden, write_golden

# What is to be reviewed, as `write_golden` is to write it: read it when it changes.
LAYOUTS = Path(__file__).parents[1] / "layouts"


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def tree() -> dict[str, Any]:
    params = {
        f"layers_{at}": {"up": struct(8, 16), "b": struct(16)} for at in range(11)
    }
    state = jax.eval_shape(optax.adam(1.0).init, {"layers_0": params["layers_0"]})
    return {"params": params, "opt_state": state, "name": "text"}


def rules(up: Any = (None, "model"), mesh: str = "data=2,model=4") -> flm.LayoutMap:
    layout_map = flm.LayoutMap(flm.DeviceMesh.abstract(mesh), indivisible="replicate")
    layout_map["up"] = up
    layout_map["layers_3/b"] = None
    layout_map.activations["mlp"] = ("data", ...)
    return layout_map


def test_the_file_can_be_reviewed(tmp_path: Path) -> None:
    small = {"layers": {"10": {"up": struct(8, 16)}, "2": {"up": struct(8, 6)}}}
    path = tmp_path / "new" / "folder" / "layouts.json"
    write_golden(rules().resolve(small), path)
    assert path.read_text("utf-8") == (LAYOUTS / "small.json").read_text("utf-8")


KEYS = st.text(st.characters(), min_size=1, max_size=6)


@given(
    st.dictionaries(KEYS, st.dictionaries(KEYS, st.sampled_from([(8, 8), (4,), ()]))),
    st.sampled_from([None, ("data",), ("model", ...), (("model", "data"), ...)]),
)
def test_any_names_can_be_written_and_read(
    shapes: dict[str, dict[str, tuple[int, ...]]], layout: Any
) -> None:
    tree = {
        name: {key: struct(*shape) for key, shape in inner.items()}
        for name, inner in shapes.items()
    }
    layout_map = flm.LayoutMap(
        flm.DeviceMesh.abstract("data=2,model=2"), indivisible="replicate"
    )
    layout_map["."] = flm.Rule(".", layout, rank="skip") if layout else None
    resolution = layout_map.resolve(tree)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "layouts.json")
        write_golden(resolution, path)
        text = path.read_bytes().decode("utf-8", "surrogatepass")
        assert text.count('\n    {"path": ') == len(resolution)
        turned = layout_map.resolve(dict(reversed(tree.items())))
        write_golden(turned, path)
        assert path.read_bytes().decode("utf-8", "surrogatepass") == text
        # Read and compared leaf by leaf, and not as a text.
        path.write_bytes(path.read_bytes() + b" ")
        assert_golden(layout_map.resolve(tree), path)


def test_a_difference_is_reported_and_how_to_accept_it(tmp_path: Path) -> None:
    path = tmp_path / "layouts.json"
    write_golden(rules().resolve(tree()), path)
    with pytest.raises(AssertionError) as caught:
        assert_golden(rules(("model", None)).resolve(tree()), path)
    text = str(caught.value)
    assert text.startswith(f"the layouts differ from {str(path)!r}:\n\nrules:\n")
    assert "layers_{0..10}/up ×11" in text and "P(-, model) → P(model)" in text
    assert "to send: at most " in text
    assert "to accept this, run pytest with --update-layouts" in text
    assert max(map(len, text.split("\n\n")[2].splitlines())) <= 100


NOT_GOLDEN = {
    "{": "Expecting property name",
    "[" * 100_000: "of layouts: maximum recursion",
    '{"schema": 1}': "the layouts are damaged: KeyError('rules')",
}


@pytest.mark.parametrize("text", NOT_GOLDEN, ids=itertools.count())
def test_a_file_that_is_not_golden(tmp_path: Path, text: str) -> None:
    path = tmp_path / "layouts.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(flm.LayoutError, match=re.escape(repr(str(path)))) as caught:
        assert_golden(rules().resolve(tree()), path)
    assert NOT_GOLDEN[text] in str(caught.value)


def test_a_damaged_leaf_is_a_difference_or_an_error(tmp_path: Path) -> None:
    resolution, path = rules().resolve(tree()), tmp_path / "layouts.json"
    data = resolution.to_json()
    leaf = next(leaf for leaf in data["leaves"] if leaf["path"] == "params/layers_0/up")
    for key in ("path", "shape", "dtype", "spec", "shard_shape", "bytes_per_device"):
        for damage in (3, "x", ["x", "y"], [3], {}, None):
            damaged = {**data, "leaves": [{**leaf, key: damage}]}
            path.write_text(json.dumps(damaged), encoding="utf-8")
            with pytest.raises((AssertionError, flm.LayoutError)):
                assert_golden(resolution, path)
