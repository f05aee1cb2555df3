"""Shardy's passes over a lowered module, through jaxlib's public MLIR bindings.

Nothing is compiled, and no device is needed. The names of the passes are no stable
interface of jaxlib, so that they are looked for before they are used.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from flax_layoutmap._errors import LayoutError
from flax_layoutmap.pod._inline import inline_calls

# Decides a sharding for every value.
_PROPAGATE = "sdy-propagation-pipeline"
# Says where a value must change it, then by which collectives.
_RESHARD = (
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true},"
    "sdy-reshard-to-collectives)"
)

# Where there is this pass, propagation goes through calls (jax 0.8.1 has none).
_THROUGH_CALLS = "sdy-flatten-call-graph"

# Axis names in an attribute; `"x":(2)4` is the part of size 4 of an axis.
_AXIS = re.compile(r'"([^"]+)"(?::\((\d+)\)(\d+))?')

# An axis of the mesh, or a part of one, with its size in devices.
AxisRef = tuple[str, int]
# The axes of each dim of an array.
Dims = tuple[tuple[AxisRef, ...], ...]


def spread(
    lowered: Any,
    arguments: Mapping[int, str] | None = None,
    results: Mapping[int, str] | None = None,
) -> Any:
    """Runs the passes on a copy of a lowered module.

    Args:
        lowered: what `jax.jit(...).trace(...).lower(...)` gives.
        arguments: position of an argument → its sharding as `sharding_text` writes it,
            instead of the one it was lowered with.
        results: the same for results.

    Returns:
        The module: every value with its sharding, and `sdy` collectives between them.

    Raises:
        LayoutError: this jaxlib has no such passes, or they refuse the program.
    """
    ir, passmanager = _bindings()
    original = lowered.compiler_ir("stablehlo")
    with original.context:
        module = original.operation.clone()
        _rewrite(module, ir, arguments or {}, results or {})
        if not _is_known(passmanager, _THROUGH_CALLS):
            inline_calls(module, functions(module))
        try:
            manager = passmanager.PassManager.parse(
                f"builtin.module({_PROPAGATE},{_RESHARD})"
            )
        except ValueError as error:
            raise LayoutError(_NO_PASSES) from error
        # Once is enough; between all passes it takes two thirds of the time.
        manager.enable_verifier(False)
        try:
            module.verify()
            manager.run(module)
        except ir.MLIRError as error:
            raise LayoutError(
                f"Shardy does not lay this program out: {_reason(str(error))}"
            ) from error
    return module


_NO_PASSES = (
    "flm.pod.plan needs Shardy's passes in jaxlib, and this jaxlib does not have them; "
    "use jax 0.8.1 or later, or flm.pod.compile, which needs none"
)


def _bindings() -> tuple[Any, Any]:
    try:
        from jaxlib.mlir import ir, passmanager
        from jaxlib.mlir.dialects import sdy as sdy
    except ImportError as error:
        raise LayoutError(_NO_PASSES) from error
    return ir, passmanager


def _reason(text: str) -> str:
    """What of a failure of MLIR says something."""
    for line in text.splitlines():
        if "error:" in line and not line.rstrip().endswith(":"):
            return line.partition("error:")[2].strip()[:200]
    return text.partition("\n")[0]


def _is_known(passmanager: Any, name: str) -> bool:
    try:
        passmanager.PassManager.parse(f"builtin.module({name})")
    except ValueError:
        return False
    return True


def functions(module: Any) -> dict[str, Any]:
    """The functions of a module by name; the step itself is `main`."""
    found = {}
    for op in module.regions[0].blocks[0].operations:
        if op.operation.name == "func.func":
            found[str(op.attributes["sym_name"]).strip('"')] = op
    return found


def mesh_sizes(module: Any) -> dict[str, int]:
    """Axis name → size, of the mesh that the program was lowered for."""
    from jaxlib.mlir.dialects import sdy

    for op in module.regions[0].blocks[0].operations:
        if op.operation.name == "sdy.mesh":
            axes = sdy.MeshAttr(op.attributes["mesh"]).axes
            found = {}
            for axis in map(sdy.MeshAxisAttr, axes):
                found[axis.name] = axis.size
            if found:
                return found
    return {}


class Shardings:
    """Reads the sharding attributes of one module; equal ones once."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        self._known: dict[Any, Any] = {}

    def of(self, attribute: Any) -> Dims:
        """The axes of each dim, from one sharding."""
        found = self._known.get(attribute)
        if found is None:
            from jaxlib.mlir.dialects import sdy

            dims = sdy.TensorShardingAttr(attribute).dimension_shardings
            found = tuple(
                tuple(self._axis(axis) for axis in sdy.DimensionShardingAttr(dim).axes)
                for dim in dims
            )
            self._known[attribute] = found
        return found

    def per_value(self, op: Any) -> Sequence[Dims]:
        """The axes of each dim, of each result of an operation; none if not said."""
        if "sdy.sharding" not in op.attributes:
            return ()
        attribute = op.attributes["sdy.sharding"]
        found = self._known.get(attribute)
        if found is None:
            from jaxlib.mlir.dialects import sdy

            per_value = sdy.TensorShardingPerValueAttr(attribute).shardings
            found = [self.of(sharding) for sharding in per_value]
            self._known[attribute] = found
        return found

    def axes_in(self, attribute: Any) -> tuple[AxisRef, ...]:
        """The axes that an attribute names, in its order."""
        found = self._known.get(attribute)
        if found is None:
            named = _AXIS.findall(str(attribute))
            found = tuple(
                (name, int(size) if size else self.sizes.get(name, 1))
                for name, _, size in named
            )
            self._known[attribute] = found
        return found

    def _axis(self, attribute: Any) -> AxisRef:
        from jaxlib.mlir.dialects import sdy

        axis = sdy.AxisRefAttr(attribute)
        part = axis.sub_axis_info
        if part is None:
            return axis.name, self.sizes.get(axis.name, 1)
        return axis.name, sdy.SubAxisInfoAttr(part).size


def sharding_text(spec: Sequence[Any], ndim: int) -> str:
    """A PartitionSpec as the attribute of an argument.

    >>> sharding_text(("data", None, ("x", "y")), 3)
    '#sdy.sharding<@mesh, [{"data"}, {}, {"x", "y"}]>'
    """
    entries = [*spec, *[None] * (ndim - len(spec))]
    dims = []
    for entry in entries:
        axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
        dims.append("{" + ", ".join(f'"{axis}"' for axis in axes) + "}")
    return f"#sdy.sharding<@mesh, [{', '.join(dims)}]>"


def _rewrite(
    module: Any, ir: Any, arguments: Mapping[int, str], results: Mapping[int, str]
) -> None:
    if not arguments and not results:
        return
    main = functions(module)["main"]
    for name, changes in (("arg_attrs", arguments), ("res_attrs", results)):
        if not changes or name not in main.attributes:
            continue
        entries = []
        for at, entry in enumerate(main.attributes[name]):
            own = {named.name: named.attr for named in entry}
            if at in changes:
                own["sdy.sharding"] = ir.Attribute.parse(changes[at])
            entries.append(ir.DictAttr.get(own))
        main.attributes[name] = ir.ArrayAttr.get(entries)
