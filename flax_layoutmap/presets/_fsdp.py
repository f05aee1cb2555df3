"""Presets for any model: FSDP by shapes, and ZeRO-1 for the rules of a map."""

import math
from typing import Any

from flax_layoutmap._core.errors import MeshError, RuleError, did_you_mean
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._resolve.resolve import resolve
from flax_layoutmap._rules.matching import Rule
from flax_layoutmap._rules.records import Shape
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap.convert._shardings import NEVER_ASKED, rules_for


def fsdp(
    model: Any,
    mesh: Any,
    *,
    min_size: int = 2**16,
    axis: str | None = None,
    batch: Any = None,
) -> LayoutMap:
    r"""Return rules that shard each parameter along its largest dim that divides.

    Among dims of equal size the last is chosen, as leading dims may be stacked layers
    or heads. Small parameters and parameters without such a dim are replicated.

    Args:
        model: anything that `flm.resolve` takes.
        mesh: anything that `DeviceMesh` accepts.
        min_size: parameters with fewer elements are replicated.
        axis: the mesh axis; None takes `fsdp`, or the only axis of the mesh.
        batch: mesh axes for the first dim of a batch; None takes `data`, if the mesh
            has it, and the axis of the parameters.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> model = {"up": {"kernel": jax.ShapeDtypeStruct((512, 2048), "float32")}}
        >>> flm.presets.fsdp(model, flm.DeviceMesh.abstract("data=2,fsdp=8"))
        LayoutMap(DeviceMesh('data=2,fsdp=8', abstract)) {
          'up/kernel': (None, 'fsdp'),
        }
    """
    target = as_mesh(mesh)
    if target is None:
        raise MeshError('presets.fsdp(model, mesh) needs a mesh, such as "fsdp=8"')
    axis = axis or (target.axis_names[0] if len(target.axis_names) == 1 else "fsdp")
    _check_axis(target, axis)
    leaves = list(resolve(model, RuleSet(mesh=target, strict=False)))
    wanted = {
        leaf.path: TensorLayout(
            _largest(leaf.shape, axis, target.axis_sizes[axis], min_size), target
        )
        for leaf in leaves  # optimizer state follows its parameters
        if leaf.role != "optimizer" and leaf.reason not in NEVER_ASKED
    }
    if batch is None:
        batch = [n for n in dict.fromkeys(("data", axis)) if n in target.axis_names]
    return rules_for(leaves, wanted, target, lambda rules: resolve(model, rules), batch)


def _check_axis(mesh: DeviceMesh, axis: str) -> None:
    if axis not in mesh.axis_names:
        raise RuleError(
            f"the mesh {str(mesh)!r} has no axis {axis!r}"
            f"{did_you_mean(axis, mesh.axis_names)}; name the axis to shard over, such "
            f"as axis={mesh.axis_names[0]!r}"
        )


def _largest(
    shape: Shape, axis: str, count: int, min_size: int
) -> tuple[str | None, ...] | None:
    """The axis on the largest dim that it divides; None: replicated."""
    fitting = [(size, dim) for dim, size in enumerate(shape) if size % count == 0]
    if math.prod(shape) < min_size or not fitting:
        return None
    _, best = max(fitting)
    return tuple(axis if dim == best else None for dim in range(len(shape)))


def zero1(layout_map: LayoutMap, *, axis: str = "data") -> LayoutMap:
    """Return the map with optimizer state sharded over an additional axis (ZeRO-1).

    For each rule, the state of its parameters gets the axis on the dim that is sharded
    over `fsdp`, or else on the first unsharded dim, or else on the first dim. The
    layouts of the parameters, and so the forward and backward passes, do not change.

    Args:
        layout_map: the rules of the parameters.
        axis: the mesh axis.

    Raises:
        MeshError: the map has no mesh.
        RuleError: the mesh does not have the axis; or there are rules for optimizer
            state already, or a rule shards parameters over the axis.

    Example:
        >>> import flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("data=4,tensor=2"))
        >>> layout_map["up/kernel"] = (None, "tensor")
        >>> flm.presets.zero1(layout_map).optimizer["up/kernel"].axes
        ('data', 'tensor')
    """
    rules = layout_map.freeze()
    if rules.mesh is None:
        raise MeshError("zero1: the map has no mesh; give it one with .on(mesh)")
    _check_axis(rules.mesh, axis)
    if rules.optimizer:
        raise RuleError(
            f"zero1: the map has rules for optimizer state already, such as "
            f"{rules.optimizer[0].pattern!r}"
        )
    for rule in rules.rules:
        if axis in rule.layout.axis_names:
            raise RuleError(
                f"zero1: rule {rule.pattern!r} → {rule.layout} shards parameters over "
                f"{axis!r} already, and their optimizer state with them"
            )
    state = tuple(_with_axis(rule, axis) for rule in rules.rules if rule.layout.axes)
    return LayoutMap.from_rule_set(rules.with_changes(optimizer=state))


def _with_axis(rule: Rule, axis: str) -> Rule:
    layout = rule.layout
    dims: list[Any] = [(dim,) if isinstance(dim, str) else dim for dim in layout.axes]
    named = [at for at, dim in enumerate(dims) if isinstance(dim, tuple)]
    beside = [at for at in named if "fsdp" in dims[at]]
    free = [at for at, dim in enumerate(dims) if dim is None]
    for at in (*beside, *free, *named)[:1]:
        dims[at] = (*(dims[at] or ()), axis)
    mesh, kind = layout.device_mesh, layout.memory_kind
    return rule.with_layout(TensorLayout(dims, mesh, memory_kind=kind))
