"""TensorLayout as DTensor's `Layout`: its words, members, text and bytes."""

from typing import Any

import pytest

import flax_layoutmap as flm

# ------------------------------------------------------------ UNSHARDED and MATCH

MATCH, UNSHARDED = flm.TensorLayout.MATCH, flm.TensorLayout.UNSHARDED


def test_the_words_of_dtensor() -> None:
    assert (UNSHARDED, MATCH) == ("unsharded", "match")


def test_unsharded_is_none(mesh: flm.DeviceMesh) -> None:
    layout = flm.TensorLayout((UNSHARDED, "model"), mesh)
    assert layout == flm.TensorLayout((None, "model"), mesh)
    assert flm.TensorLayout([UNSHARDED]) == flm.TensorLayout([None])


def test_an_axis_of_that_name_is_the_axis() -> None:
    mesh = flm.DeviceMesh.abstract("unsharded=2,match=4")
    layout = flm.TensorLayout((UNSHARDED, MATCH), mesh)
    assert layout.axis_names == ("unsharded", "match")
    assert not layout.has_match
    assert layout.shard_shape((8, 8)) == (4, 2)
    flm.Rule("a", layout)  # Not refused.


def test_match_is_no_axis(mesh: flm.DeviceMesh) -> None:
    layout = flm.TensorLayout((MATCH, "model", MATCH), mesh)
    assert layout.axes == ("match", "model", "match")
    assert layout.axis_names == ("model",)
    assert layout.has_match and not flm.TensorLayout(("model",), mesh).has_match
    assert not flm.TensorLayout((MATCH, None), mesh).is_replicated
    assert layout.on(None).on(mesh) == layout


@pytest.mark.parametrize(
    ("axes", "dims", "expected"),
    [
        ((MATCH, "model"), [("data",), ()], ("data", "model")),
        ((MATCH, "model"), [(), ("data",)], (None, "model")),
        ((MATCH, None), [("data", "model"), ()], (("data", "model"), None)),
        ((..., MATCH), [(), ("data",), ("model",)], (None, None, "model")),
        ((MATCH, ...), [("data",)], ("data",)),
        ((MATCH, MATCH), [("model",), ("data",)], ("model", "data")),
    ],
)
def test_matched(axes: Any, dims: Any, expected: Any, mesh: flm.DeviceMesh) -> None:
    layout = flm.TensorLayout(axes, mesh, memory_kind="pinned_host")
    matched = layout.matched(dims)
    assert matched == flm.TensorLayout(expected, mesh, memory_kind="pinned_host")
    assert matched.matched([]) is matched  # Nothing is left to match.


def test_matched_needs_the_rank_and_the_axes(mesh: flm.DeviceMesh) -> None:
    layout = flm.TensorLayout((MATCH, "model"), mesh)
    with pytest.raises(flm.LayoutError, match="2 dims, the array has 1"):
        layout.matched([()])
    with pytest.raises(flm.LayoutError, match="names the axis 'x'"):
        layout.matched([("x",), ()])
    with pytest.raises(flm.LayoutError, match="'model' twice"):
        layout.matched([("model",), ()])


@pytest.mark.parametrize(
    "use",
    [
        lambda layout: layout.dims(2),
        lambda layout: layout.spec(),
        lambda layout: layout.spec(2),
        lambda layout: layout.sharding(2),
        lambda layout: layout.backend_layout,
        lambda layout: layout.shard_shape((8, 8)),
        lambda layout: layout.equivalent(layout, 2),
    ],
)
def test_match_is_known_to_an_array_only(use: Any, mesh: flm.DeviceMesh) -> None:
    with pytest.raises(flm.LayoutError, match=r"keeps what a dim has \(MATCH\)"):
        use(flm.TensorLayout((MATCH, "model"), mesh))


def test_rules_do_not_match(mesh: flm.DeviceMesh) -> None:
    layout_map = flm.LayoutMap(mesh)
    for section in (layout_map, layout_map.names, layout_map.optimizer):
        with pytest.raises(flm.RuleError, match=r"\(MATCH\), which only relayout"):
            section["kernel"] = (MATCH, "model")
        assert "kernel" not in section
