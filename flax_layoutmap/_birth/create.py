"""create and create_optimizer: models and optimizers initialized in their shards.

The constructor is traced once, abstractly; then every leaf is computed in its shards.
No device holds a full copy of a parameter that a rule shards, except while one is made
by what XLA does not partition (QR, a sort): these are logged by name, at INFO.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from flax_layoutmap._birth.arrays import arrays_of
from flax_layoutmap._core.errors import MeshError, StructureError, bullet_list
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._core.processes import Agreement, Parts, digest_of_value
from flax_layoutmap._place.annotations import settle_metadata
from flax_layoutmap._place.place import manual_axes, need_devices
from flax_layoutmap._resolve.resolve import (
    known_rules,
    resolve,
    resolve_tree,
    rule_set_of,
)
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.flax_internals import (
    is_nnx_object,
    nnx_state,
    variables_of,
)
from flax_layoutmap._tree.jaxprs import hashes_of_outputs, needed_inputs
from flax_layoutmap._tree.objects import leaves_in, unfit
from flax_layoutmap._tree.trace import Traced, trace


def create(
    make: Callable[..., Any],
    layout_map: Any,
    *args: Any,
    exact: bool = False,
    **kwargs: Any,
) -> Any:
    """Create a model directly in its shards.

    Args:
        make: a function that makes what is wanted: an NNX constructor, Linen's
            `model.init`, a function that makes a TrainState, or any function that
            returns a tree of arrays or NNX objects.
        layout_map: a `LayoutMap` (or `RuleSet`) with a mesh of devices.
        *args: arguments of `make`. Arrays and NNX objects (an `nnx.Rngs`, which counts
            as usual) are inputs of the program; everything else is static. An array of
            which only the shape matters may be a `jax.ShapeDtypeStruct`, if `make`
            does not read it.
        exact: whether the values must not depend on the layout, to the bit. In shards,
            XLA rounds differently what is computed from many elements (a norm, a
            product of matrices: 1e-5, relative), and the last bit of some others (a
            table of sines; with jax 0.12 on CPUs, normally distributed numbers where
            the rows of a shard have fewer than 8 elements). With `exact`, what is
            computed from floats is initialized replicated, one array at a time, then
            sliced.
        **kwargs: keyword arguments of `make`, likewise.

    Returns:
        What `make` returns, its arrays laid out by the rules. The values are those of
        `jax.jit(make)` with the same shardings, to the bit where each element is
        computed by itself. What is computed from arrays that `make` closes over, which
        XLA would fold, may be rounded otherwise in the last bit. Python numbers become
        arrays. Objects that were there before and are no arguments come back as copies.

    Raises:
        ResolveError: leaves do not fit the rules; nothing was compiled or allocated.
        MeshError: the rules have no mesh, or one without devices; or this is inside
            of `jax.shard_map`.
        RuleError: `layout_map` is none.
        StructureError: `make` is no function, or an async one, gives None or what no
            array can hold, or reads values of arrays.
        ProcessError: the processes were given different rules, meshes or models; or
            a leaf is made from other keys or constants, say another seed. (What a
            callback of the host gives is not compared.)

    Example:
        >>> import flax_layoutmap as flm
        >>> from flax import nnx
        >>> layout_map = flm.LayoutMap("data=-1")
        >>> layout_map["kernel"] = (None, "data")
        >>> layout_map["bias"] = None
        >>> linear = flm.create(lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0)), layout_map)
        >>> tuple(linear.kernel.sharding.spec)
        (None, 'data')

    Plain JAX, for a tree: `jax.jit(make, out_shardings=shardings)(*args)`.
    """
    rules = rule_set_of(layout_map, "create(make, layout_map)")
    need_devices(rules, "create")
    _check_function(make)
    varying = (axis for leaf in leaves_in((args, kwargs)) for axis in _varying(leaf))
    _refuse_manual(varying, "an argument differs along")
    with Agreement("creating the model", rules.mesh) as agreement:
        traced = trace(make, args, kwargs)
        _check_result(traced.abstract, make)
        _refuse_abstract(traced, args, kwargs)
        resolution = resolve(traced.abstract, rules)
        refuse_unfit(resolution.paths, jax.tree.leaves(traced.abstract), "create")
        axes = (a for leaf in resolution for a in leaf.layout.axis_names)
        _refuse_manual(axes, "the rules lay arrays out along")
        resolution.announce()
        names = traced.values_of(resolution.paths)
        agreement.add(lambda: made_from(names, hashes_of(traced)))
        agreement.add(resolution.fingerprint_lines)
    made, inputs = arrays_of(
        traced,
        traced.values_of(resolution.sharding_list()),
        names=names,
        exact=exact,
    )
    result = traced.rebuild(traced.leaves_of(made))
    traced.update_inputs(inputs)
    return settle_metadata(result, resolution)


def create_optimizer(
    model: Any,
    tx: optax.GradientTransformation,
    *,
    wrt: Any = nnx.Param,
    layout_map: Any = None,
) -> Any:
    """Create the optimizer of a sharded model; its state follows the layouts.

    Each dim of the state is sharded as the dim of the parameter that it was made from:
    moments as the parameter, Adafactor's row and column statistics as its rows and
    columns. Counters are replicated on the mesh.

    Args:
        model: an NNX module whose arrays are on a mesh (from `create`, `place`, or a
            restore), or a tree of parameters.
        tx: the optax transformation.
        wrt: for a module, which Variables are trained.
        layout_map: a map whose `optimizer` section has rules for the state (ZeRO-1).
            None: the map that laid the model out (`create`, `place`, a restore, a
            `layout_map_scope`), if that had such rules then. Pass it where that cannot
            be known: for what a jitted function has returned, a deep copy, a tree or
            another model.

    Returns:
        An `nnx.Optimizer` for a module; the state of `tx` for a tree.

    Raises:
        MeshError: arrays of the model are on no mesh.
        ResolveError: the state does not fit the optimizer rules.
        RuleError: an optimizer rule names an axis that the model's mesh lacks; or parts
            of the model are of several maps with such rules.
        StructureError: `tx` is no optax transformation, `model` holds something else
            than arrays, or `wrt` selects nothing.
        ProcessError: the processes were given different models or transformations.

    Example:
        >>> import optax, flax_layoutmap as flm
        >>> from flax import nnx
        >>> layout_map = flm.LayoutMap("model=-1", strict=False)
        >>> layout_map["kernel"] = (None, "model")
        >>> model = flm.create(lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0)), layout_map)
        >>> optimizer = flm.create_optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        >>> tuple(optimizer.opt_state[0].mu["kernel"].sharding.spec)
        (None, 'model')

    Plain JAX: `jax.jit(tx.init, out_shardings=…)`; without `out_shardings` the moments
    end on one device.
    """
    if not hasattr(tx, "init") or not hasattr(tx, "update"):
        raise StructureError(
            "create_optimizer(model, tx) needs an optax transformation, such as "
            f"optax.adamw(3e-4), as tx; got {tx!r}"
        )
    is_module = is_nnx_object(model)
    params = nnx_state(model, wrt) if is_module else model
    if is_module and not jax.tree.leaves(params):
        kinds = sorted({type(v).__name__ for v in variables_of(model)})
        raise StructureError(
            f"create_optimizer: wrt={_name_of(wrt)} selects no Variables of the "
            f"{type(model).__name__}, which has {', '.join(kinds) or 'none at all'}"
        )
    layouts, mesh = layouts_of(params)
    rules = RuleSet(mesh=mesh)
    if layout_map is None:
        layout_map = known_rules(model)
    if layout_map is not None:
        given = rule_set_of(layout_map, "create_optimizer(..., layout_map=)")
        # Only the optimizer section of the map applies.
        own = given.with_changes(rules=(), names=(), activations=())
        rules = own.on(mesh)
    with Agreement("creating the optimizer", mesh) as agreement:
        if is_module:
            traced = trace(
                lambda m: nnx.Optimizer(m, tx, wrt=wrt), (model,), keep_inputs=False
            )
        else:
            traced = trace(tx.init, (params,), keep_inputs=False)
        resolution = resolve_tree(traced.abstract, rules, params, tx, layouts)
        resolution.announce()
        names = traced.values_of(resolution.paths)
        agreement.add(lambda: made_from(names, hashes_of(traced)))
        agreement.add(resolution.fingerprint_lines)
    made, _ = arrays_of(
        traced,
        traced.values_of(resolution.sharding_list()),
        names=names,
    )
    return traced.rebuild(traced.leaves_of(made))


def _check_function(make: Any) -> None:
    """Raise StructureError where `create` was given no function."""
    if is_nnx_object(make):
        raise StructureError(
            f"create was given a {type(make).__name__} that exists already; pass a "
            f"function that makes it: lambda: {type(make).__name__}(...); or move what "
            "exists with layout_map.place(module)"
        )
    if not isinstance(make, type) and hasattr(make, "init") and hasattr(make, "apply"):
        raise StructureError(
            f"create was given a Linen module ({type(make).__name__}), which holds no "
            "variables; pass a function: lambda: module.init(key, x)"
        )
    if not callable(make):
        raise StructureError(
            "create(make, layout_map) needs a function that makes the model, got "
            f"a {type(make).__name__}; to move what exists use layout_map.place(tree)"
        )


def _refuse_manual(axes: Iterable[str], what: str) -> None:
    """Raise MeshError where `jax.shard_map` around us has taken over an axis."""
    manual = manual_axes(jax.sharding.get_abstract_mesh()).intersection(axes)
    if manual:
        raise MeshError(
            f"create inside of shard_map: {what} the mesh axis {min(manual)!r}, which "
            "is manual here, so that each device works on a part of its own: make the "
            "model outside of shard_map, and pass its arrays in"
        )


def _varying(value: Any) -> Iterable[str]:
    """The axes of a surrounding `jax.shard_map` along which a traced value varies."""
    if not isinstance(value, Tracer):
        return ()
    kind: Any = getattr(jax.typeof(value), "manual_axis_type", None)
    return getattr(kind, "varying", ())


def _check_result(result: Any, make: Any) -> None:
    """Raise StructureError where a constructor has made no model."""
    name = getattr(make, "__name__", make)
    if result is None:
        raise StructureError(
            f"create(make, layout_map): {name} gives None: let it return the model "
            "that it makes"
        )
    if inspect.iscoroutine(result):
        result.close()
        raise StructureError(
            f"create(make, layout_map): {name} is an async function, which gives a "
            "coroutine and no model: pass a plain function; what is to be awaited can "
            "be awaited before, and passed as an argument"
        )


def _refuse_abstract(
    traced: Traced, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raise StructureError where `make` reads an argument that has no values."""
    needed = needed_inputs(traced.closed.jaxpr)
    pairs = zip(traced.inputs, traced.closed.jaxpr.invars, strict=True)
    read = [x for x, v in pairs if type(x) is jax.ShapeDtypeStruct and v in needed]
    if not read:
        return
    named = jax.tree_util.tree_leaves_with_path((tuple(args), dict(kwargs)))
    for keys, leaf in named:
        if leaf is read[0]:
            rest = jax.tree_util.keystr(keys[2:])
            first: Any = keys[1]
            name = f"argument {first.idx}" if hasattr(first, "idx") else first.key
            break
    else:
        name, rest = "an argument", ""
    raise StructureError(
        f"create(make, layout_map, ...): {name}{rest} is abstract, a "
        f"jax.ShapeDtypeStruct {show_shape(read[0].shape)}, but what make returns is "
        "computed from its values: pass an array"
    )


def refuse_unfit(paths: Sequence[str], leaves: Sequence[Any], what: str) -> None:
    """Raise StructureError for the first leaf that cannot become an array as it is."""
    for path, leaf in zip(paths, leaves, strict=True):
        kind = unfit(leaf)
        if kind is None:
            continue
        if isinstance(leaf, np.ma.MaskedArray):
            way = "make it a plain one, with array.filled(number)"
        elif "does not hold" in kind:
            way = (
                "jax.config.update('jax_enable_x64', True) keeps 64 bits, or set it "
                "after the model is made"
            )
        else:
            way = "set it after the model is made"
        where = f"{path} is" if path else "it is"
        raise StructureError(
            f"{what} makes arrays of numbers, but {where} {kind}: {way}"
        )


def _name_of(wrt: Any) -> str:
    return wrt.__name__ if isinstance(wrt, type) else repr(wrt)


def hashes_of(traced: Traced) -> list[str]:
    """A hash of what each computed leaf is made from: keys, constants, equations."""
    every = hashes_of_outputs(traced.closed, traced.inputs, digest_of_value)
    return every[: traced.made]


def made_from(paths: Sequence[str], hashes: Sequence[str]) -> Parts:
    """Lines for an `Agreement`: processes that differ in them make different values."""
    lines = [
        f"{path}: made from {own}" for path, own in zip(paths, hashes, strict=True)
    ]
    return {"keys and constants": lines}


def layouts_of(params: Any) -> tuple[list[TensorLayout], DeviceMesh]:
    """The current layout of each parameter, and their mesh."""
    flat = flatten(params)
    layouts: list[TensorLayout] = []
    problems: list[str] = []
    mesh: DeviceMesh | None = None
    for at, leaf in enumerate(flat.leaves):
        path = flat.forms(at)[0]  # as the state of optax has it
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            where = f"{path} is" if path else "got"
            raise StructureError(
                "create_optimizer(model, tx) needs an NNX module or a tree of arrays "
                f"as model; {where} the {type(leaf).__name__} {leaf!r}"
            )
        sharding = getattr(leaf, "sharding", None)
        shape = tuple(leaf.shape)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            own = DeviceMesh(sharding.mesh)
            mesh = mesh or own
            kind = sharding.memory_kind
            layouts.append(TensorLayout(sharding.spec, own, memory_kind=kind))
        else:
            problems.append(f"{path} {show_shape(shape)}: {sharding}")
    if problems or mesh is None:
        listed = bullet_list(problems or ["(there are no parameters)"])
        raise MeshError(
            "create_optimizer follows the layouts of the model, but these parameters "
            f"are on no mesh:\n{listed}\nmake the model with flm.create(make, "
            "layout_map), or move it with layout_map.place(model)"
        )
    return layouts, mesh
