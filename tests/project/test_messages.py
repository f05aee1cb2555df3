"""The exact texts of errors: one table of cases."""

import collections
import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import flax_layoutmap as flm
from flax_layoutmap._core import errors as _errors
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import as_mesh
from flax_layoutmap._resolve.leaves import mark_of, mesh_axes
from flax_layoutmap._resolve.resolve import resolve
from flax_layoutmap._show.snapshot import snapshot_of
from flax_layoutmap._tree.trace import trace

P = PartitionSpec
ABSTRACT = flm.DeviceMesh.abstract((2, 4), ("data", "model"))
NAMES = ("data", "model")
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


def annotated(**metadata: Any) -> Any:
    with nnx.use_eager_sharding(False):
        return nnx.State({"w": nnx.Param(jnp.zeros((8, 8)), **metadata)})


def stacked() -> Any:
    with nnx.use_eager_sharding(False):
        return nnx.Param(jnp.zeros((3, 8, 8)), out_sharding=("data", "model"))


def logical(*names: str) -> Any:
    box: Any = nn.LogicallyPartitioned
    return box(struct(8, 8), names=names)


def zero(rules: dict[str, Any]) -> Any:
    params = {"up": struct(8, 16)}
    layout_map = mapped({"up": (None, "model")})
    layout_map.optimizer.update(rules)
    state = jax.eval_shape(optax.adam(1.0).init, params)
    return layout_map.resolve({"params": params, "opt_state": state})


def with_spec(spec: list[Any]) -> Any:
    data = fit({"w": None}, {"w": struct(8)}).to_json()
    data["leaves"][0]["spec"] = spec
    return data


def closing_over() -> Any:
    rngs = nnx.Rngs(0)
    return trace(lambda: nnx.Linear(2, 2, rngs=rngs))


def shared_results() -> Any:
    linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    return trace(lambda a: [a, nnx.List([a])], (linear,))


def keeps_another() -> Any:
    linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    return trace(lambda: nnx.List([linear]), own_objects=True)


class Keeps(nnx.Module):
    def __init__(self, kept: Any) -> None:
        self.kept = kept


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


def same_path() -> Any:
    return collections.OrderedDict([(0, struct(1)), ("0", struct(1))])


def overlapping() -> flm.LayoutMap:
    rules = [("kernel", ("data",)), ("up", ("model",))]
    return flm.LayoutMap.from_rules(rules, overlap="error")


def with_words(words: str) -> TensorLayout:
    """Reads a layout with these words, on a mesh `x=2`."""
    return TensorLayout.from_string(f"sharding_specs:{words} mesh:|x=2|0,1||")


def changed(**fields: Any) -> TensorLayout:
    """Reads a layout's proto after these fields were set, or cleared (None)."""
    proto = TensorLayout(("data",), ABSTRACT).as_proto()
    for name, value in fields.items():
        setattr(proto, name, value) if value is not None else proto.ClearField(name)
    return TensorLayout.from_proto(proto)


def single_device() -> flm.DeviceMesh:
    proto = ABSTRACT.as_proto()
    proto.single_device = "TPU:0"
    return flm.DeviceMesh.from_proto(proto)


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
ON_A_MESH = "; flm.relayout(x, layout) puts an array on a mesh"


class Case(NamedTuple):
    run: Callable[[], Any]
    kind: type[Exception]
    text: str


ON_MESH = " on mesh data=2,model=4:\n  - "
TWO_WAYS = (
    'make one pattern narrower, use the path itself as key, or overlap="first" or '
    '"last"'
)
NO_LAYOUT = (
    "use a tuple such as (None, 'model'), None for replicated, a PartitionSpec, a "
    "NamedSharding or a flm.TensorLayout"
)
CASES: dict[str, Case] = {
    # ------------------------------------------------------------- meshes
    "mesh: more than a mesh": Case(
        lambda: flm.DeviceMesh(ABSTRACT, NAMES),
        flm.errors.MeshError,
        "DeviceMesh(mesh) takes an existing mesh as it is; leave out axis_names, "
        "devices and axis_types",
    ),
    "mesh: too few devices": Case(
        lambda: flm.DeviceMesh((4, 4), NAMES),
        flm.errors.MeshError,
        "the mesh data=4,model=4 needs 16 devices, but there are 8; change a size, "
        "plan with flm.DeviceMesh.abstract(...), or for virtual CPU devices call "
        'jax.config.update("jax_num_cpu_devices", 16) before any other use of JAX',
    ),
    "mesh: too many devices": Case(
        lambda: flm.DeviceMesh((2, 2), NAMES),
        flm.errors.MeshError,
        "the mesh data=2,model=2 needs 4 devices, but there are 8; to use only some, "
        "pass devices=jax.devices()[:4]",
    ),
    "mesh: another number of given devices": Case(
        lambda: flm.DeviceMesh((2, 2), NAMES, devices=jax.devices()[:3]),
        flm.errors.MeshError,
        "the mesh data=2,model=2 needs 4 devices, but there are 3; change a size, plan "
        "with flm.DeviceMesh.abstract(...), or for virtual CPU devices call "
        'jax.config.update("jax_num_cpu_devices", 4) before any other use of JAX',
    ),
    "mesh: abstract -1": Case(
        lambda: flm.DeviceMesh.abstract((-1, 4), NAMES),
        flm.errors.MeshError,
        "an abstract mesh needs every size, got (-1, 4)",
    ),
    "mesh: devices of an abstract one": Case(
        lambda: ABSTRACT.devices,
        flm.errors.MeshError,
        "DeviceMesh('data=2,model=4', abstract) has no devices; use a concrete mesh, "
        'flm.DeviceMesh("data=2,model=4")',
    ),
    "mesh: not one": Case(
        lambda: as_mesh(3),
        flm.errors.MeshError,
        "not a mesh: 3; use flm.DeviceMesh((2, 4), ('data', 'model')), a "
        'jax.sharding.Mesh or AbstractMesh, or a line like "data=2,model=-1"',
    ),
    "mesh: no names": Case(
        lambda: flm.DeviceMesh((8,)),
        flm.errors.MeshError,
        "DeviceMesh needs a size and a name for each axis, got shape=(8,) and "
        "axis_names=None; for example ((2, 4), ('data', 'model')), or the one line "
        '"data=2,model=4"',
    ),
    "mesh: equal names": Case(
        lambda: flm.DeviceMesh((2, 4), ("x", "x")),
        flm.errors.MeshError,
        "axis names must differ, got ('x', 'x')",
    ),
    "mesh: devices": Case(
        lambda: flm.DeviceMesh((1,), ("x",), devices=[7]),
        flm.errors.MeshError,
        "devices must be JAX devices, such as jax.devices()[:4], or names like "
        '"cpu:0", got 7',
    ),
    "mesh: no devices": Case(
        lambda: flm.DeviceMesh((1,), ("x",), devices=[]),
        flm.errors.MeshError,
        "devices is empty; leave it out to use all devices",
    ),
    "mesh: a device twice": Case(
        lambda: flm.DeviceMesh((2,), ("x",), devices=jax.devices()[:1] * 2),
        flm.errors.MeshError,
        "devices holds one device twice: [CpuDevice(id=0), CpuDevice(id=0)]",
    ),
    "mesh: open size": Case(
        lambda: flm.DeviceMesh((-1, 3), NAMES),
        flm.errors.MeshError,
        "cannot compute axis 'data' (-1): 8 devices do not divide by the other axes, 3",
    ),
    "mesh: kind": Case(
        lambda: flm.DeviceMesh((8,), ("x",), axis_types=7),
        flm.errors.MeshError,
        'an axis type must be "auto" or "explicit" (or jax.sharding.AxisType.Auto or '
        ".Explicit), got 7",
    ),
    "mesh: kind of one axis": Case(
        lambda: flm.DeviceMesh((8,), ("x",), axis_types=("manual",)),
        flm.errors.MeshError,
        'an axis type must be "auto" or "explicit" (or jax.sharding.AxisType.Auto or '
        ".Explicit), got 'manual'",
    ),
    "mesh: kinds": Case(
        lambda: flm.DeviceMesh((8,), ("x",), axis_types=("auto", AxisType.Auto)),
        flm.errors.MeshError,
        "2 axis types for 1 axes: ('auto', Auto)",
    ),
    "mesh: name of a device": Case(
        lambda: flm.DeviceMesh((1,), ("x",), devices=["cpu"]),
        flm.errors.MeshError,
        "cannot read the device 'cpu'; write its platform and id, \"cpu:0\"",
    ),
    "mesh: devices that are not here": Case(
        lambda: flm.DeviceMesh((3,), ("x",), devices=["gpu:0", "cpu:0", "cpu:8"]),
        flm.errors.MeshError,
        "there are no devices gpu:0, cpu:8; this job has cpu:0, cpu:1, cpu:2, cpu:3, "
        "cpu:4, cpu:5, cpu:6, cpu:7",
    ),
    "mesh: DTensor's, number of devices": Case(
        lambda: flm.DeviceMesh.from_dtensor(["TPU:0"], [("x", 2)]),
        flm.errors.MeshError,
        "the mesh x=2 needs 2 devices, but there are 1; change a size, plan "
        "with flm.DeviceMesh.abstract(...), or for virtual CPU devices call "
        'jax.config.update("jax_num_cpu_devices", 2) before any other use of JAX',
    ),
    "mesh: DTensor's, equal names": Case(
        lambda: flm.DeviceMesh.from_dtensor(["TPU:0"], [("x", 1), ("x", 1)]),
        flm.errors.MeshError,
        "axis names must differ, got ('x', 'x')",
    ),
    "mesh: DTensor's, a device twice": Case(
        lambda: flm.DeviceMesh.from_dtensor(["TPU:0", "TPU:0"], [("x", 2)]),
        flm.errors.MeshError,
        "devices holds one device twice: ['TPU:0', 'TPU:0']",
    ),
    "mesh: of a layout, by two names": Case(
        lambda: flm.TensorLayout(("data",), ABSTRACT, mesh=ABSTRACT),
        flm.errors.MeshError,
        "TensorLayout was given device_mesh= and mesh=, which are the same: leave one "
        "out",
    ),
    "mesh: unknown axis": Case(
        lambda: ABSTRACT.dim_size("modle"),
        flm.errors.MeshError,
        "the mesh 'data=2,model=4' has no axis 'modle'; did you mean 'model'?",
    ),
    "mesh: an axis that is no text": Case(
        lambda: ABSTRACT.dim_size(3),  # pyright: ignore[reportArgumentType]
        flm.errors.MeshError,
        "the mesh 'data=2,model=4' has no axis 3",
    ),
    "mesh: no such place": Case(
        lambda: ABSTRACT.coords(8),
        flm.errors.MeshError,
        "the mesh 'data=2,model=4' has the device ids 0 to 7, got 8",
    ),
    "mesh: a name that DTensor's text cannot hold": Case(
        lambda: flm.DeviceMesh.abstract((2,), ("a b",)).to_string(),
        flm.errors.MeshError,
        "DTensor's text cannot hold the name 'a b' (one of '|', ',', '=' or a space is "
        "in it); use as_proto()",
    ),
    "mesh: parts of DTensor's text": Case(
        lambda: flm.DeviceMesh.from_string("|x=2|0,1"),
        flm.errors.MeshError,
        "cannot read the mesh '|x=2|0,1': it has 3 parts between bars, not "
        "name|x=3,y=2|global ids|local ids|local devices[|global devices]",
    ),
    "mesh: number in DTensor's text": Case(
        lambda: flm.DeviceMesh.from_string("|x=two|0,1||"),
        flm.errors.MeshError,
        "cannot read the mesh '|x=two|0,1||': 'two' is not a whole number",
    ),
    "mesh: DTensor's parts clash": Case(
        lambda: flm.DeviceMesh.from_string("|x=2|0,1,2||"),
        flm.errors.MeshError,
        "cannot read the mesh 'x=2': there are 3 global ids for 2 places",
    ),
    "mesh: a single device": Case(
        single_device,
        flm.errors.MeshError,
        "the mesh is the single device 'TPU:0', without axes; use "
        'flm.DeviceMesh.from_dtensor([device], [("x", 1)])',
    ),
    "mesh: proto without axes": Case(
        lambda: flm.DeviceMesh.from_proto(b""),
        flm.errors.MeshError,
        "the proto is damaged: its mesh has no axes",
    ),
    "mesh: not a proto": Case(
        lambda: flm.DeviceMesh.from_proto(3),
        flm.errors.MeshError,
        "not a MeshProto: 3",
    ),
    # ------------------------------------------------------------ layouts
    "layout: open rank where a dim is asked": Case(
        lambda: TensorLayout((..., "data"), ABSTRACT).sharding_specs,
        flm.LayoutError,
        "the layout (..., 'data') leaves the rank open, and this needs it; write every "
        "dim, or use flm.TensorLayout.replicated(mesh, rank)",
    ),
    "layout: no such dim": Case(
        lambda: TensorLayout(("data", None), ABSTRACT).num_shards(2),
        flm.LayoutError,
        "the layout ('data', None) has dims -2 to 1, got dim 2",
    ),
    "layout: a dim that is no number": Case(
        lambda: TensorLayout(("data", None), ABSTRACT).num_shards("x"),  # pyright: ignore[reportArgumentType]
        flm.LayoutError,
        "the layout ('data', None) has dims -2 to 1, got dim 'x'",
    ),
    "layout: no such shard": Case(
        lambda: TensorLayout(("data",), ABSTRACT).offset_tuple_to_global_index((2,)),
        flm.LayoutError,
        "the layout ('data',) has (2,) shards along its dims, so none at (2,)",
    ),
    "layout: negative rank": Case(
        lambda: TensorLayout.replicated(ABSTRACT, -1),
        flm.LayoutError,
        "the rank must be 0 or more, got -1",
    ),
    "layout: memory in DTensor's text": Case(
        lambda: TensorLayout(("data",), ABSTRACT).on_host().to_string(),
        flm.LayoutError,
        "DTensor has no word for the memory kind 'pinned_host' of the layout "
        "('data',); pickle it, or write it without",
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
    "layout: DTensor's text": Case(
        lambda: TensorLayout.from_string("x,y"),
        flm.LayoutError,
        "cannot read the layout 'x,y'; it must be "
        '"sharding_specs:x,unsharded, mesh:" and the text of a mesh',
    ),
    "layout: comma in DTensor's text": Case(
        lambda: with_words("x,unsharded"),
        flm.LayoutError,
        "cannot read the layout 'sharding_specs:x,unsharded mesh:|x=2|0,1||': there is "
        "no comma after its last dim, 'unsharded'; write 'x,unsharded,'",
    ),
    "layout: empty word in DTensor's text": Case(
        lambda: with_words("x,,"),
        flm.LayoutError,
        "cannot read the layout 'sharding_specs:x,, mesh:|x=2|0,1||': the word of dim "
        "1 is empty; write 'unsharded'",
    ),
    "layout: strict": Case(
        lambda: TensorLayout.from_string(
            TensorLayout((NAMES,), ABSTRACT).to_string(), strict=True
        ),
        flm.LayoutError,
        "the dim 'data+model' is on several mesh axes, which DTensor cannot read; "
        "leave out strict=True",
    ),
    "layout: kind of proto": Case(
        lambda: changed(type=2),
        flm.LayoutError,
        "a layout of type PARTED has no meaning here; only STATIC ones are read",
    ),
    "layout: proto without a mesh": Case(
        lambda: changed(mesh_config=None),
        flm.LayoutError,
        "the layout's proto is damaged: it has no mesh",
    ),
    "layout: bytes": Case(
        lambda: TensorLayout.from_proto(b"\xff"),
        flm.LayoutError,
        "these 1 bytes are not a LayoutProto, or not all of it",
    ),
    "layout: a string": Case(
        lambda: TensorLayout("model"),
        flm.errors.RuleError,
        "a layout cannot be a string, got 'model'; write a tuple with one entry per "
        "dim, such as ('model',) for a 1-D array or (None, 'model')",
    ),
    "layout: an array": Case(
        lambda: TensorLayout(jnp.ones(2)),
        flm.errors.RuleError,
        "a layout cannot be an array; pass array.sharding",
    ),
    "layout: a dim": Case(
        lambda: TensorLayout((3,)),
        flm.errors.RuleError,
        f"not a layout: (3,); {NO_LAYOUT}",
    ),
    "layout: something else": Case(
        lambda: TensorLayout(3), flm.errors.RuleError, f"not a layout: 3; {NO_LAYOUT}"
    ),
    "layout: an axis twice": Case(
        lambda: TensorLayout(("data", "data")),
        flm.errors.RuleError,
        "the layout ('data', 'data') uses the mesh axis 'data' twice; each axis may "
        "shard one dim only",
    ),
    "layout: unknown axis": Case(
        lambda: TensorLayout((None, "modle"), ABSTRACT),
        flm.errors.RuleError,
        "the layout (None, 'modle') names the axis 'modle', but the mesh "
        "'data=2,model=4' has no such axis; did you mean 'model'?",
    ),
    "layout: longer": Case(
        lambda: TensorLayout(P("data", "model")).dims(1),
        flm.LayoutError,
        "the layout ('data', 'model', ...) has 2 dims, the array has 1",
    ),
    "layout: another rank": Case(
        lambda: TensorLayout(("data",)).dims(2),
        flm.LayoutError,
        "the layout ('data',) has 1 dims, the array has 2",
    ),
    "layout: open rank": Case(
        lambda: TensorLayout((..., "data")).spec(),
        flm.LayoutError,
        "the layout (..., 'data') holds a '...' before a sharded dim; pass the rank, "
        ".spec(ndim)",
    ),
    "layout: no mesh": Case(
        lambda: TensorLayout(("data",)).sharding(),
        flm.errors.MeshError,
        "the layout ('data',) has no mesh, which this needs; give one, "
        "layout.on(mesh) or flm.TensorLayout(axes, mesh)",
    ),
    "layout: indivisible": Case(
        lambda: TensorLayout((("data", "model"),), ABSTRACT).shard_shape((12,)),
        flm.LayoutError,
        "shape (12,): dim 0 of size 12 does not divide by mesh axes 'data' (2) × "
        "'model' (4), 8 together",
    ),
    "layout: unreduced": Case(
        lambda: TensorLayout(P(None, unreduced=frozenset({"x"}))),
        flm.errors.RuleError,
        f"{P(None, unreduced=frozenset({'x'}))!r} has reduced or unreduced "
        "axes, which a layout cannot have: give only the axes of the dims",
    ),
    "layout: two ellipses": Case(
        lambda: TensorLayout((..., ...)),
        flm.errors.RuleError,
        "a layout may hold one '...', got (Ellipsis, Ellipsis)",
    ),
    "layout: unconstrained": Case(
        lambda: TensorLayout((P.UNCONSTRAINED,)),
        flm.errors.RuleError,
        f"({P.UNCONSTRAINED!r},) leaves a dim unconstrained, which a layout cannot "
        "do: use None for a dim that is not sharded",
    ),
    "layout: match": Case(
        lambda: TensorLayout(("match", "data"), ABSTRACT).spec(),
        flm.LayoutError,
        "the layout ('match', 'data') has a MATCH dim, which only relayout and "
        "distribute_tensor support; name the mesh axes, or None, instead",
    ),
    # -------------------------------------------------------------- rules
    "rule: match": Case(
        lambda: flm.Rule("a", (None, TensorLayout.MATCH)),
        flm.errors.RuleError,
        "rule 'a': the layout (None, 'match') keeps what a dim has (MATCH), which only "
        "relayout and distribute_tensor can; name the axes, or None",
    ),
    "rule: pattern": Case(
        lambda: flm.Rule(3, None),  # type: ignore[arg-type]
        flm.errors.RuleError,
        "a pattern must be a string, got 3 of type int",
    ),
    "rule: regex": Case(
        lambda: flm.Rule("a(b", None),
        flm.errors.RuleError,
        "the pattern 'a(b' is not a regular expression: missing ), unterminated "
        "subpattern at position 1; escape special characters with re.escape(...)",
    ),
    "rule: rank": Case(
        lambda: flm.Rule("a", None, rank="pass"),  # type: ignore[arg-type]
        flm.errors.RuleError,
        'rank must be "error" or "skip", got \'pass\'',
    ),
    "rule: layout": Case(
        lambda: flm.Rule("a", 3),
        flm.errors.RuleError,
        f"rule 'a': not a layout: 3; {NO_LAYOUT}",
    ),
    "rule: mesh": Case(
        lambda: flm.Rule("a", ("x",)).on(ABSTRACT),
        flm.errors.RuleError,
        "rule 'a': the layout ('x',) names the axis 'x', but the mesh 'data=2,model=4' "
        "has no such axis",
    ),
    "rules: no mesh to be on": Case(
        lambda: flm.RuleSet().on(None),
        flm.errors.MeshError,
        "on(mesh) needs a mesh, got None",
    ),
    "rules: option": Case(
        lambda: flm.RuleSet(overlap="frist"),  # type: ignore[arg-type]
        flm.errors.RuleError,
        "overlap must be one of ('error', 'first', 'last'), got 'frist'; did you mean "
        "'first'?",
    ),
    "rules: entry": Case(
        lambda: flm.RuleSet((("a",),)),  # type: ignore[arg-type]
        flm.errors.RuleError,
        "rule 1 is neither a (pattern, layout) pair nor a flm.Rule: ('a',)",
    ),
    "rules: twice": Case(
        lambda: flm.RuleSet((flm.Rule("a", None), flm.Rule("a", None))),
        flm.errors.RuleError,
        "rules 1 and 2 have the same pattern 'a': keep one",
    ),
    # --------------------------------------------------------------- map
    "map: reading": Case(
        lambda: overlapping()["up/kernel"],
        flm.errors.RuleError,
        "'up/kernel' is matched by rules with different layouts: 'kernel', 'up'; make "
        'one narrower, or use overlap="first" or "last"',
    ),
    "map: taken": Case(
        lambda: mapped({"a": ("data",)}).add(flm.Rule("a", None)),
        flm.errors.RuleError,
        "the key 'a' is already set to ('data',); to change it use .replace('a', …), "
        "or del it first",
    ),
    "map: replace": Case(
        lambda: mapped({"kernel": None}).replace("kernal", None),
        KeyError,
        "no rule 'kernal'; did you mean 'kernel'?",
    ),
    "map: del": Case(
        lambda: mapped({"kernel": None}).__delitem__("x"), KeyError, "no rule 'x'"
    ),
    "map: pop": Case(
        lambda: mapped({"kernel": None}).pop("kernels"),
        KeyError,
        "no rule 'kernels'; did you mean 'kernel'?",
    ),
    "map: popitem": Case(lambda: mapped().popitem(), KeyError, "there are no rules"),
    "map: rule of another key": Case(
        lambda: mapped().update({"a": flm.Rule("b", None)}),
        flm.errors.RuleError,
        "the key 'a' was given a rule for another pattern, 'b'; use .add(rule)",
    ),
    "map: batch": Case(
        lambda: flm.LayoutMap(ABSTRACT, batch="date"),
        flm.errors.RuleError,
        "batch names the axis 'date', but the mesh 'data=2,model=4' has no such axis; "
        "did you mean 'data'?",
    ),
    # -------------------------------------------------------------- paths
    "paths: mixed keys": Case(
        lambda: fit({}, {"a": {0: struct(1), "b": struct(1)}}),
        flm.errors.StructureError,
        "a has keys of types that cannot be sorted together (int, str: [0, 'b']), so "
        "JAX cannot flatten it: use keys of one type",
    ),
    "paths: twice": Case(
        lambda: fit({}, same_path()),
        flm.errors.StructureError,
        "two different keys both have the path '0' (an int and a string, for example): "
        "rename one, so that rules can distinguish them",
    ),
    "paths: node": Case(
        lambda: fit({}, {"a": [Broken()]}),
        flm.errors.StructureError,
        "a/0 cannot be flattened: not today",
    ),
    # ------------------------------------------------------------ resolve
    "resolve: rules": Case(
        lambda: resolve({}, 3),
        flm.errors.RuleError,
        "resolve(tree, rules) needs a LayoutMap or a RuleSet, got 3; make one of a "
        "list of pairs with flm.LayoutMap.from_rules(pairs, mesh)",
    ),
    "resolve: a Linen module": Case(
        lambda: fit({}, nn.Dense(3)),
        flm.errors.StructureError,
        "a Linen module (Dense) holds no variables; pass a function that makes them, "
        "lambda: module.init(key, x), or the variables",
    ),
    "leaf: unmatched": Case(
        lambda: fit({}, {"w": struct(8)}, unmatched="error"),
        flm.errors.ResolveError,
        f"1 leaf does not fit the rules{ON_MESH}w (8,): no rule matches it; add one "
        '(None replicates it), or use unmatched="replicate"',
    ),
    "leaf: overlap": Case(
        lambda: fit({"up": ("data",), "k": ("model",)}, {"up": {"k": struct(8)}}),
        flm.errors.ResolveError,
        f"1 leaf does not fit the rules{ON_MESH}up/k (8,): rules with different "
        "layouts match it: rule 1 'up' → ('data',), rule 2 'k' → ('model',); "
        + TWO_WAYS,
    ),
    "leaf: shorter layout": Case(
        lambda: fit({"w": (None, "model")}, {"w": struct(3, 8, 16)}),
        flm.errors.ResolveError,
        f"1 leaf does not fit the rules{ON_MESH}w (3,8,16): rule 1 'w' → (None, "
        "'model') has 2 dims, the leaf has 3; for leading dims that are not sharded (a "
        "stacked layer) write (..., None, 'model'), or pass over leaves of another "
        'rank with Rule(pattern, layout, rank="skip")',
    ),
    "leaf: longer layout": Case(
        lambda: fit({"w": (None, "model")}, {"w": struct(8)}),
        flm.errors.ResolveError,
        f"1 leaf does not fit the rules{ON_MESH}w (8,): rule 1 'w' → (None, 'model') "
        "has 2 dims, the leaf has 1; narrow the pattern, or Rule(pattern, layout, "
        'rank="skip")',
    ),
    "leaf: indivisible": Case(
        lambda: fit({"w": ("data", "model")}, {"w": struct(10, 10)}),
        flm.errors.ResolveError,
        f"1 leaf does not fit the rules{ON_MESH}w (10,10): rule 1 'w' → ('data', "
        "'model'): dim 1 of size 10 does not divide by mesh axis 'model' of size 4; "
        "change the size, use another layout (None for this dim), or "
        'indivisible="replicate"',
    ),
    "leaf: unknown axis": Case(
        lambda: resolve(
            {"w": struct(8)}, flm.RuleSet((flm.Rule("w", ("x",)),), ABSTRACT)
        ),
        flm.errors.ResolveError,
        f"1 leaf does not fit the rules{ON_MESH}w (8,): rule 1 'w' → ('x',): the mesh "
        "'data=2,model=4' has no axis 'x'",
    ),
    "leaf: another mesh": Case(
        lambda: fit({"w": flm.TensorLayout(("x",), "x=8")}, {"w": struct(8)}),
        flm.errors.ResolveError,
        f"1 leaf does not fit the rules{ON_MESH}w (8,): rule 1 'w' → ('x',) is on "
        "another mesh, DeviceMesh('x=8'), than the rules, DeviceMesh('data=2,model=4', "
        "abstract); a tree has one mesh: leave out the mesh of the layout",
    ),
    "leaf: explicit layout": Case(
        lambda: fit({}, annotated(layout=("data", "data"))),
        flm.errors.ResolveError,
        f"1 leaf does not fit the rules{ON_MESH}w (8,8): its metadata: the layout "
        "('data', 'data') uses the mesh axis 'data' twice; each axis may shard one dim "
        "only",
    ),
    "leaf: Flax metadata": Case(
        lambda: fit({}, annotated(out_sharding=("data", "data"))),
        flm.errors.ResolveError,
        f"1 leaf does not fit the rules{ON_MESH}w (8,8): Flax metadata ('data', "
        "'data'): the layout ('data', 'data', ...) uses the mesh axis 'data' twice; "
        "each axis may shard one dim only",
    ),
    "leaf: logical names": Case(
        lambda: fit({}, {"w": logical("a", "a")}),
        flm.errors.ResolveError,
        f"1 leaf does not fit the rules{ON_MESH}w (8,8): Flax metadata ('a', 'a'): "
        "Unsupported: Dimensions ('a',) occur more than once in array names.",
    ),
    "leaf: Flax metadata of another rank": Case(
        lambda: fit({}, annotated(out_sharding=("data", None, None))),
        flm.errors.ResolveError,
        f"1 leaf does not fit the rules{ON_MESH}w (8,8): Flax metadata ('data', None, "
        "None) names 3 dims, the leaf has 2; name one axis or None for each dim; a "
        "rule for it wins over the metadata",
    ),
    "leaf: Flax metadata that does not divide": Case(
        lambda: fit({}, nnx.State({"w": stacked()})),
        flm.errors.ResolveError,
        f"1 leaf does not fit the rules{ON_MESH}w (3,8,8): Flax metadata ('data', "
        "'model'): dim 0 of size 3 does not divide by mesh axis 'data' of size 2; "
        "change the size, use another layout (None for this dim), or "
        'indivisible="replicate"; a rule for it wins over the metadata; for '
        "layers stacked by nnx.vmap, transform_metadata={nnx.PARTITION_NAME: None} "
        "adds the new dim to it",
    ),
    "leaf: LoRA without its kernel": Case(
        lambda: fit({}, {"up": {"lora_a": struct(8, 2)}}, unmatched="error"),
        flm.errors.ResolveError,
        f"1 leaf does not fit the rules{ON_MESH}up/lora_a (8,2): no rule matches it; "
        'add one (None replicates it), or use unmatched="replicate"; it is a LoRA '
        "matrix whose kernel is not in the tree: resolve the whole model, or add a "
        "rule for it",
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
    "metadata: logical names": Case(
        lambda: mesh_axes(mark_of(logical("a", "a"))),
        flm.errors.RuleError,
        "Unsupported: Dimensions ('a',) occur more than once in array names.",
    ),
    "leaf: several": Case(
        lambda: resolve(
            {"a": struct(3), "b": struct(5)},
            mapped({".": ("data",)}).on(flm.DeviceMesh.abstract("data=2,model=1")),
        ),
        flm.errors.ResolveError,
        "2 leaves do not fit the rules on mesh data=2,model=1:\n"
        "  - a (3,): rule 1 '.' → ('data',): dim 0 of size 3 does not divide by mesh "
        "axis 'data' of size 2; change the size, use another layout (None for this "
        'dim), or indivisible="replicate"\n'
        "  - b (5,): rule 1 '.' → ('data',): dim 0 of size 5 does not divide by mesh "
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
    "state: rank": Case(
        lambda: zero({"up": ("data",)}),
        flm.errors.ResolveError,
        f"2 leaves do not fit the rules{ON_MESH}"
        + "\n  - ".join(
            f"opt_state/0/{moment}/up (8,16): optimizer rule 1 'up' → ('data',) has 1 "
            "dims, its parameter 'up' has 2; for leading dims that are not sharded (a "
            "stacked layer) write (..., 'data'), or pass over leaves of another rank "
            'with Rule(pattern, layout, rank="skip")'
            for moment in ("mu", "nu")
        ),
    ),
    # --------------------------------------------------------- Resolution
    "resolution: path": Case(
        lambda: fit({}, {"kernel": struct(2)})["kernal"],
        KeyError,
        "no leaf has the path 'kernal'; the closest are kernel",
    ),
    "resolution: unknown path": Case(
        lambda: fit({}, {"kernel": struct(2)})["x"],
        KeyError,
        "no leaf has the path 'x'",
    ),
    "resolution: no mesh": Case(
        lambda: resolve({"w": struct(2)}, flm.LayoutMap()).shardings,
        flm.errors.MeshError,
        "the rules have no mesh; give one: LayoutMap(mesh), layout_map.on(mesh) or "
        "resolution.on(mesh)",
    ),
    "resolution: no mesh for a list": Case(
        lambda: resolve({"w": struct(2)}, flm.LayoutMap()).sharding_list(),
        flm.errors.MeshError,
        "the rules have no mesh; give one: LayoutMap(mesh), layout_map.on(mesh) or "
        "resolution.on(mesh)",
    ),
    "resolution: abstract": Case(
        lambda: fit({}, {"w": struct(2)}).abstract(),
        flm.errors.MeshError,
        "abstract() needs devices, but DeviceMesh('data=2,model=4', abstract) is "
        "abstract; make the Resolution concrete first: "
        "resolution.on(flm.DeviceMesh(...))",
    ),
    "resolution: strict": Case(
        lambda: mapped({"x": None}).resolve({"w": struct(2)}, strict=True),
        flm.errors.ResolveError,
        "strict: 2 findings\n"
        "  - unused: rule 1 'x' matches no leaf\n"
        "  - unmatched: w (2,) is matched by no rule, so every device holds it in full "
        "(100.0% of the bytes)",
    ),
    "resolution: format": Case(
        lambda: fit({}, {}).report("html"),
        flm.LayoutError,
        'format must be "text", "markdown" or "json", got \'html\'',
    ),
    "diff: of what": Case(
        lambda: fit({}, {}).diff(mapped()),
        flm.LayoutError,
        "diff compares two Resolutions, got LayoutMap; resolve it first: "
        "before.diff(layout_map.resolve(model))",
    ),
    "diff: format": Case(
        lambda: fit({}, {}).diff(fit({}, {})).report("html"),
        flm.LayoutError,
        'format must be "text" or "json", got \'html\'',
    ),
    # ---------------------------------------------------- what others decided
    "snapshot: schema": Case(
        lambda: snapshot_of({"schema": 2}),
        flm.LayoutError,
        "layouts of schema 2 cannot be read; this is schema 1, what "
        'resolution.report("json") and flm.testing.write_golden write',
    ),
    "snapshot: dims": Case(
        lambda: snapshot_of(with_spec([])),
        flm.LayoutError,
        "the layouts are damaged: "
        "ValueError(\"'w' of shape (8,) has a spec of 0 dims\")",
    ),
    # -------------------------------------------------------------- tracing
    "trace: an object from outside": Case(
        closing_over,
        flm.errors.StructureError,
        "the function changes an NNX object from outside of it, such as an nnx.Rngs "
        "that counts: make that object inside, or pass it as an argument (Cannot "
        "mutate RngCount from a different trace level (https://flax.readthedocs.io/en/"
        "latest/api_reference/flax.errors.html#flax.errors.TraceContextError))",
    ),
    "trace: another structure": Case(
        lambda: trace(grow, (nnx.Linear(2, 2, rngs=nnx.Rngs(0)),)),
        flm.errors.StructureError,
        "the function changes the structure of its argument, a Linear, not only its "
        "values: change it outside, or return it",
    ),
    "trace: from elsewhere": Case(
        keeps_another,
        flm.errors.StructureError,
        "the constructor keeps a Param that was there before: pass it as an argument, "
        "or make the whole model with flm.create(make, layout_map)",
    ),
    "trace: shared": Case(
        shared_results,
        flm.errors.StructureError,
        "two objects of the result, a Linear and a List, share a Param: return one "
        "object that holds both, so that they stay shared",
    ),
    "trace: a value that is read": Case(
        lambda: trace(lambda: {"w": jnp.ones(2) * bool(jnp.ones(()))}),
        flm.errors.StructureError,
        "the function reads the value of an array, and there is none while it is "
        "traced: Attempted boolean conversion of traced array with shape float32[].\n"
        "flm.create(make, layout_map) and layout_map_scope trace what makes a model: "
        "make it outside of them, and move it: layout_map.place(make())",
    ),
    "trace: a reference": Case(
        lambda: trace(lambda: nnx.Dict(w=nnx.Param(jnp.ones(2), ref=True))),
        flm.errors.StructureError,
        "a Variable with ref=True is a reference, which cannot be made in shards: make "
        "the model and its optimizer without it, and convert both then: "
        "nnx.with_vars((model, optimizer), ref=True)",
    ),
    "trace: a tuple of values": Case(
        lambda: trace(lambda: Keeps((functools.partial(jnp.add, jnp.ones(2)),))),
        flm.errors.StructureError,
        "Keeps.kept is a static tuple with an array in it: set it as nnx.data(...), or "
        "keep the array in an nnx.Variable of the module",
    ),
    # -------------------------------------------------------------- batches
    "batch: no data": Case(
        lambda: flm.pad_batch(
            {"x": np.ones(3), "y": ["a", struct(3)], "z": nnx.Rngs(0)}
        ),
        flm.LayoutError,
        "pad_batch takes arrays and numbers on the host, but got\n"
        "  - y/0: a str\n  - y/1: a ShapeDtypeStruct\n  - z: a Rngs\n"
        "take these out of the batch; inside jit, use flm.distribute_tensor",
    ),
    "batch: other rows": Case(
        lambda: flm.distribute_batch({"x": np.ones((4, 2)), "y": np.ones(6)}, placed()),
        flm.LayoutError,
        "the arrays of a batch must have equally many rows (dim 0):\n"
        "  - x (4,2)\n  - y (6,)\ndistribute arrays with other rows separately, "
        "or place them with flm.distribute_tensor",
    ),
    "batch: indivisible": Case(
        lambda: flm.distribute_batch({"x": np.ones((5, 2)), "y": np.ones(5)}, placed()),
        flm.LayoutError,
        "the batch does not divide over the batch axes ('data',):\n"
        "  - x (5,2): dim 0 of size 5 does not divide by mesh axis 'data' of size 2\n"
        "  - y (5,): dim 0 of size 5 does not divide by mesh axis 'data' of size 2\n"
        "pad it, batch, mask = flm.pad_batch(batch, layout_map), or drop the rest",
    ),
    "batch: option": Case(
        lambda: flm.distribute_batch(np.ones(8), placed(), rows="locale"),  # type: ignore[arg-type]
        flm.LayoutError,
        "rows must be one of ('local', 'global'), got 'locale'; did you mean 'local'?",
    ),
    "batch: axis": Case(
        lambda: flm.distribute_batch(
            np.ones(8), flm.RuleSet(mesh=placed().device_mesh, batch=("modle",))
        ),
        flm.errors.RuleError,
        "the layout ('modle', ...) names the axis 'modle', but the mesh "
        "'data=2,model=4' has no such axis; did you mean 'model'?",
    ),
    "batch: no mesh": Case(
        lambda: flm.distribute_batch(np.ones(8), flm.LayoutMap()),
        flm.errors.MeshError,
        "distribute_batch needs a mesh of devices, the rules have no mesh; use "
        "layout_map.on(flm.DeviceMesh(...))",
    ),
    "pad: multiple": Case(
        lambda: flm.pad_batch(np.ones(3), 0),
        flm.LayoutError,
        "multiple must be 1 or more, got 0",
    ),
    "pad: neither number nor map": Case(
        lambda: flm.pad_batch(np.ones(3), "data"),
        flm.errors.RuleError,
        "pad_batch(batch, multiple), without a number, needs a LayoutMap or a RuleSet, "
        "got 'data'; make one of a list of pairs with "
        "flm.LayoutMap.from_rules(pairs, mesh)",
    ),
    "pad: no rows": Case(
        lambda: flm.pad_batch({"n": 3, "key": jax.random.key(0)}, 4),
        flm.LayoutError,
        "pad_batch found no rows: the batch has no array with a dim, except for PRNG "
        "keys",
    ),
    "pad: size too small": Case(
        lambda: flm.pad_batch(np.ones(9), 4, size=8),
        flm.LayoutError,
        "pad_batch cannot reach size=8: it must be a multiple of 4 and at least 9, the "
        "rows of the batch; for example size=12",
    ),
    "pad: nothing to repeat": Case(
        lambda: flm.pad_batch(np.ones((0, 2)), size=4),
        flm.LayoutError,
        "pad_batch has no last row to repeat, as the batch has 0 rows; use "
        'fill="zeros"',
    ),
    # ------------------------------------------------- relayout and its kin
    "relayout: to other devices": Case(
        lambda: jax.jit(
            lambda x: flm.relayout(
                x, flm.TensorLayout((), flm.DeviceMesh.abstract("data=4"))
            )
        )(moved(())),
        flm.errors.MeshError,
        "relayout of a traced array (8, 8) to DeviceMesh('data=4', abstract): inside "
        "jit and vmap an array stays on its devices, here 8; call relayout outside, or "
        "pass axes without a mesh",
    ),
    "relayout: a traced array to a mesh": Case(
        lambda: jax.jit(lambda x: flm.relayout(x, ABSTRACT))(moved(("data", None))),
        flm.LayoutError,
        "relayout of a traced array (8, 8) to the mesh "
        "DeviceMesh('data=2,model=4', abstract) keeps its layout, but on Auto axes the "
        "compiler chooses that later; pass the layout, flm.TensorLayout(axes, mesh)",
    ),
    "relayout_like: no mesh": Case(
        lambda: flm.relayout_like(np.ones(8), np.ones(4)),
        flm.LayoutError,
        "relayout_like of an array (8,) to one (4,): neither is on a mesh; pass a "
        "layout, flm.relayout(x, flm.TensorLayout(axes, mesh))",
    ),
    "relayout_like: in a loop": Case(
        lambda: jax.jit(
            lambda x, like: jax.lax.fori_loop(
                0, 2, lambda _, c: flm.relayout_like(c, like), x
            )
        )(moved(()), moved(())),
        flm.LayoutError,
        "relayout_like of an array (8, 8) to one (8, 8), which is traced on Auto axes, "
        "cannot be followed in the body of a loop; pass its layout, "
        "flm.relayout(x, layout); or read it outside of jit, "
        "flm.dtensor.fetch_layout(like); or use Explicit axes",
    ),
    "fetch_layout: a traced value": Case(
        lambda: jax.jit(flm.dtensor.fetch_layout)(moved(())),
        flm.LayoutError,
        f"fetch_layout of {TRACED}",
    ),
    "fetch_layout: a NumPy array": Case(
        lambda: flm.dtensor.fetch_layout(np.ones((8, 8))),
        flm.LayoutError,
        "fetch_layout of a ndarray, which is not an array on a mesh" + ON_A_MESH,
    ),
    "is_distributed: a traced value": Case(
        lambda: jax.jit(flm.dtensor.is_distributed)(moved(())),
        flm.LayoutError,
        f"is_distributed of {TRACED}",
    ),
    "check_layout: no array": Case(
        lambda: flm.dtensor.check_layout(1, ()),
        flm.LayoutError,
        "check_layout takes an array, got 1",
    ),
    "check_layout: another layout": Case(
        lambda: flm.dtensor.check_layout(moved(("data", None)), (None, "data")),
        flm.LayoutError,
        "an array (8, 8) has the layout TensorLayout(('data', None), "
        "DeviceMesh('data=2,model=4')), not TensorLayout((None, 'data')); "
        "flm.relayout(x, layout) moves it",
    ),
    "pack: no devices": Case(
        lambda: packed(1, mesh=ABSTRACT),
        flm.errors.MeshError,
        "pack needs devices, DeviceMesh('data=2,model=4', abstract) has none; use a "
        "concrete mesh",
    ),
    "pack: traced": Case(
        lambda: jax.jit(lambda x: packed(x, x))(1.0),
        flm.LayoutError,
        "pack takes arrays, not values that jit or grad traces",
    ),
    "pack: another number": Case(
        lambda: packed(1, 2, 3),
        flm.LayoutError,
        "pack takes one part per device of DeviceMesh('data=2') in this process, 2, "
        "got 3",
    ),
    "pack: another shape": Case(
        lambda: packed(np.ones(2), np.ones((2, 1))),
        flm.LayoutError,
        "pack takes parts of one shape and dtype: part 0 is float64 (2,), part 1 is "
        "float64 (2, 1)",
    ),
    "pack: another rank": Case(
        lambda: packed(np.ones(2), np.ones(2), axes=("data", None)),
        flm.LayoutError,
        "pack of parts (2,): the layout ('data', None) has 2 dims, the array has 1",
    ),
    "pack: replicas that differ": Case(
        lambda: packed(np.ones((2, 2)), np.zeros((2, 2))),
        flm.LayoutError,
        f"pack: the devices {jax.devices()[0]} and {jax.devices()[1]} hold the same "
        "part of an array (2, 2), but were given different values; make them equal, "
        "or use check=False",
    ),
    "unpack: no mesh": Case(
        lambda: flm.dtensor.unpack(np.ones(2)),
        flm.LayoutError,
        "unpack takes an array on a mesh, outside of jit, got a ndarray" + ON_A_MESH,
    ),
    "default_mesh: None": Case(
        lambda: flm.dtensor.default_mesh(None).__enter__(),
        flm.errors.MeshError,
        "default_mesh takes a mesh, got None; use flm.DeviceMesh(...)",
    ),
    "lint: neither rules nor a Resolution": Case(
        lambda: flm.lint(3),
        flm.errors.RuleError,
        "lint(x) needs a LayoutMap or a RuleSet, got 3; make one of a list of pairs "
        "with flm.LayoutMap.from_rules(pairs, mesh)",
    ),
    "lint: no Resolution": Case(
        lambda: flm.lint(mapped(), max_replicated=0.02),
        flm.errors.RuleError,
        "max_replicated needs a Resolution, got a LayoutMap; make one: "
        "layout_map.resolve(model)",
    ),
    "lint: no mesh": Case(
        lambda: flm.lint(
            flm.LayoutMap().resolve({"w": struct(8)}), max_replicated=0.02
        ),
        flm.errors.RuleError,
        "max_replicated needs a mesh; give one: resolution.on(mesh)",
    ),
    "lint: no level": Case(
        lambda: flm.lint(mapped()).raise_if_any(cast(Any, "warn")),
        flm.errors.RuleError,
        "level must be one of ('error', 'warning', 'info'), got 'warn'; did you mean "
        "'warning'?",
    ),
    "lint: no code": Case(
        lambda: flm.lint(mapped(), ignore=["LM999"]),
        flm.errors.RuleError,
        "there is no code LM999",
    ),
    "lint: no share": Case(
        lambda: flm.lint(fit({}, {"w": struct(8)}), max_replicated=-1),
        flm.errors.RuleError,
        "max_replicated is a share, 0 to 1; got -1",
    ),
    "lint: ignore is no text": Case(
        lambda: flm.lint(mapped(), ignore=cast(Any, [3])),
        flm.errors.RuleError,
        "ignore takes codes and patterns of paths, got 3",
    ),
    "lint: too much is replicated": Case(
        lambda: flm.lint(
            fit({"w": (None, "model")}, {"w": struct(8, 8), "v": struct(8, 8)}),
            max_replicated=0.02,
        ).raise_if_any(),
        flm.errors.ResolveError,
        "1 problem in the layout:\n  - LM115 error: every device of mesh "
        "data=2,model=4 holds 50.0% of the bytes in full, more than "
        "max_replicated=2.0%; the largest:\n      v (8,8): 50.0%, no rule\n"
        "    fix: layout_map[\"v\"] = (None, 'model')"
        "  # or None: replicated, on purpose",
    ),
}


def error_of(case: Case) -> Exception:
    with pytest.raises(case.kind) as caught:
        case.run()
    return caught.value


def text_of(error: Exception) -> str:
    # A KeyError shows its message in quotes.
    return error.args[0] if isinstance(error, KeyError) else str(error)


@pytest.mark.parametrize("name", CASES)
def test_text(name: str) -> None:
    error = error_of(CASES[name])
    assert type(error) is CASES[name].kind
    assert text_of(error) == CASES[name].text


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
