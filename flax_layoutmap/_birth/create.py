"""create and create_optimizer: models and optimizers initialized in their shards.

The constructor is traced once; then every leaf is computed in its shards. No device
holds a full copy of a parameter that a rule shards, except during operations that XLA
does not partition (QR, a sort).
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from flax_layoutmap._birth.slices import arrays_of, trace_lines
from flax_layoutmap._core.errors import (
    MeshError,
    RuleError,
    StructureError,
    bullet_list,
)
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._core.processes import Agreement
from flax_layoutmap._place.annotations import settle_metadata
from flax_layoutmap._place.place import need_devices
from flax_layoutmap._resolve.leaves import mark_of, mesh_axes
from flax_layoutmap._resolve.resolve import resolve, resolve_tree, rule_set_of
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._rules.rules import current_rules
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.flax_internals import (
    is_nnx_object,
    metadata_of,
    nnx_state,
    variables_of,
)
from flax_layoutmap._tree.objects import unfit
from flax_layoutmap._tree.trace import trace


def create(
    make: Callable[..., Any],
    layout_map: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Create a model directly in its shards.

    Args:
        make: an NNX constructor, Linen's `model.init`, a function that makes a
            TrainState, or any function that returns a tree of arrays or NNX objects.
        layout_map: a `LayoutMap` or `RuleSet` with a mesh of devices.
        *args: arguments of `make`. Arrays and NNX objects are traced (the counters of
            an `nnx.Rngs` advance as usual); everything else is static. An array whose
            values are not used may be a `jax.ShapeDtypeStruct`.
        **kwargs: keyword arguments of `make`.

    Returns:
        The result of `make`, with its arrays laid out by the rules. The values are the
        same as with `jax.jit(make)`, up to rounding in reductions (a norm). Python
        numbers become arrays. The result does not share memory with the arguments, and
        objects that existed before are returned as copies.

    Raises:
        ResolveError: leaves do not fit the rules; nothing was compiled or allocated.
        MeshError: the rules have no mesh with devices.
        StructureError: `make` is not a function, reads values of arrays, or returns
            something that JAX cannot hold in an array.
        ProcessError: the processes have different rules, models, seeds or constants.

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
    with Agreement("creating the model", rules.mesh) as agreement:
        traced = trace(make, args, kwargs)
        if (made := traced.abstract) is None or inspect.iscoroutine(made):
            what = "None" if made is None else "a coroutine, as it is async"
            if made is not None:
                made.close()
            raise StructureError(
                f"create(make, layout_map): {getattr(make, '__name__', make)} gives "
                f"{what}: let it return the model that it makes"
            )
        resolution = resolve(traced, rules)
        refuse_unfit(resolution.paths, jax.tree.leaves(traced.abstract), "create")
        resolution.announce()
        agreement.add(lambda: {"keys and constants": trace_lines(traced)})
        agreement.add(resolution.fingerprint_lines)
    shardings = traced.values_of(resolution.sharding_list())
    made, inputs = arrays_of(traced, shardings)
    result = traced.rebuild(traced.leaves_of(made))
    traced.update_inputs(inputs)
    return settle_metadata(result, resolution)


def create_optimizer(
    model: Any,
    tx: optax.GradientTransformation,
    layout_map: Any = None,
    *,
    wrt: Any = nnx.Param,
) -> Any:
    """Create the optimizer of a sharded model; its state follows the layouts.

    Each dim of the state is sharded like the dim of the parameter that it comes from:
    moments like the parameter, Adafactor's row statistics like its rows. If a Variable
    has Flax's `optimizer_sharding`, its state follows that. Counters are replicated.

    Args:
        model: an NNX module whose arrays are on a mesh (from `create`, `place`, or a
            restore), or a tree of parameters.
        tx: the optax transformation.
        layout_map: the map of the model. Its `optimizer` section decides for the state
            of the parameters that it matches (ZeRO-1); its mesh is ignored. May be left
            out in a `layout_map_scope`.
        wrt: for a module, which Variables are trained.

    Returns:
        An `nnx.Optimizer` for a module; the state of `tx` for a tree. It does not share
        memory with the model or `tx`, so both can be donated.

    Raises:
        MeshError: arrays of the model are not on a mesh.
        ResolveError: the state does not fit the optimizer rules.
        RuleError: there is no layout map; or an optimizer rule names an axis that the
            model's mesh lacks.
        StructureError: `tx` is not an optax transformation, or `wrt` selects nothing.
        ProcessError: the processes were given different models or transformations.

    Example:
        >>> import optax, flax_layoutmap as flm
        >>> from flax import nnx
        >>> layout_map = flm.LayoutMap("model=-1", strict=False)
        >>> layout_map["kernel"] = (None, "model")
        >>> model = flm.create(lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0)), layout_map)
        >>> optimizer = flm.create_optimizer(model, optax.adam(1e-3), layout_map)
        >>> tuple(optimizer.opt_state[0].mu["kernel"].sharding.spec)
        (None, 'model')

    Plain JAX: `jax.jit(tx.init, out_shardings=…)`; without `out_shardings`, the moments
    are all on one device.
    """
    if not hasattr(tx, "init") or not hasattr(tx, "update"):
        raise StructureError(
            "create_optimizer(model, tx) needs an optax transformation, such as "
            f"optax.adamw(3e-4), as tx; got {tx!r}"
        )
    if layout_map is None:
        layout_map = current_rules()
    if layout_map is None:
        raise RuleError(
            "create_optimizer(model, tx, layout_map) needs the map that the model was "
            "created with, so that the rules of its optimizer section count: pass it, "
            "or call this in a flm.layout_map_scope(layout_map)"
        )
    rules = rule_set_of(layout_map, "create_optimizer(model, tx, layout_map)")
    is_module = is_nnx_object(model)
    params = nnx_state(model, wrt) if is_module else model
    if is_module and not jax.tree.leaves(params):
        name = wrt.__name__ if isinstance(wrt, type) else repr(wrt)
        kinds = sorted({type(v).__name__ for v in variables_of(model)})
        raise StructureError(
            f"create_optimizer: wrt={name} selects no Variables of the "
            f"{type(model).__name__}, which has {', '.join(kinds) or 'none at all'}"
        )
    leaves = jax.tree.leaves(params)
    if is_module and any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        if rules == current_rules():
            return nnx.Optimizer(model, tx, wrt=wrt)  # its layout_map_scope fills it
    layouts, mesh = layouts_of(params)
    # Only the optimizer section of the map applies.
    optimizer_rules = rules.with_changes(rules=(), names=(), activations=()).on(mesh)
    with Agreement("creating the optimizer", mesh) as agreement:
        if is_module:
            traced = trace(
                lambda m: nnx.Optimizer(m, tx, wrt=wrt), (model,), keep_inputs=False
            )
        else:
            traced = trace(tx.init, (params,), keep_inputs=False)
        resolution = resolve_tree(
            traced.abstract, optimizer_rules, params, tx, layouts=layouts
        )
        resolution.announce()
        agreement.add(lambda: {"keys and constants": trace_lines(traced)})
        agreement.add(resolution.fingerprint_lines)
    made, _ = arrays_of(traced, traced.values_of(resolution.sharding_list()))
    return traced.rebuild(traced.leaves_of(made))


def _check_function(make: Any) -> None:
    if is_nnx_object(make):
        raise StructureError(
            f"create was given a {type(make).__name__} that exists already; pass a "
            f"function that makes it: lambda: {type(make).__name__}(...); or move the "
            "module with layout_map.place(module)"
        )
    if not isinstance(make, type) and hasattr(make, "init") and hasattr(make, "apply"):
        raise StructureError(
            f"create was given a Linen module ({type(make).__name__}), which holds no "
            "variables; pass a function: lambda: module.init(key, x)"
        )
    if not callable(make):
        raise StructureError(
            "create(make, layout_map) needs a function that makes the model, got "
            f"a {type(make).__name__}; to move arrays, use layout_map.place(tree)"
        )


def refuse_unfit(paths: Sequence[str], leaves: Sequence[Any], what: str) -> None:
    """Raise StructureError for the first leaf that cannot become an array."""
    for path, leaf in zip(paths, leaves, strict=True):
        if kind := unfit(leaf):
            raise StructureError(
                f"{what} makes arrays of numbers, but {path or 'it'} is {kind}: set "
                "it after the model is made"
            )


def layouts_of(params: Any) -> tuple[list[TensorLayout], DeviceMesh]:
    """The layout that the state of each parameter follows, and their mesh."""
    flat = flatten(params)
    boxes = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, nnx.Variable))
    owners = [box for box in boxes for _ in jax.tree.leaves(box)]
    layouts: list[TensorLayout] = []
    problems: list[str] = []
    mesh: DeviceMesh | None = None
    for at, (leaf, owner) in enumerate(zip(flat.leaves, owners, strict=True)):
        path = flat.forms(at)[0]  # as in the state of optax
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            where = f"{path} is" if path else "got"
            raise StructureError(
                "create_optimizer(model, tx) needs an NNX module or a tree of arrays "
                f"as model; {where} the {type(leaf).__name__} {leaf!r}"
            )
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            leaf_mesh = DeviceMesh(sharding.mesh)
            mesh = mesh or leaf_mesh
            spec = _spec_of_state(owner, leaf_mesh, sharding)
            kind = sharding.memory_kind
            layouts.append(TensorLayout(spec, leaf_mesh, memory_kind=kind))
        else:
            problems.append(f"{path} {show_shape(leaf.shape)}: {sharding}")
    if problems or mesh is None:
        listed = bullet_list(problems or ["(there are no parameters)"])
        raise MeshError(
            "create_optimizer follows the layouts of the model, but these parameters "
            f"are not on a mesh:\n{listed}\nmake the model with flm.create(make, "
            "layout_map), or move it with layout_map.place(model)"
        )
    return layouts, mesh


def _spec_of_state(owner: Any, mesh: DeviceMesh, sharding: NamedSharding) -> Any:
    """The spec of a parameter, or of its metadata `optimizer_sharding`."""
    is_variable = isinstance(owner, nnx.Variable)
    if not is_variable or metadata_of(owner).get("optimizer_sharding") is None:
        return sharding.spec
    axes, _ = mesh_axes(mark_of(owner, "optimizer_sharding"))
    return [tuple(a for a in dim if a in mesh.axis_names) for dim in axes]
