"""Shardy's passes over a lowered module, through jaxlib's public MLIR bindings.

Nothing is compiled, and no device is needed. The names of the passes are no stable
interface of jaxlib, so that they are looked for before they are used.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap.pod._mlir import Attributes, functions, mesh_of, mesh_sizes
from flax_layoutmap.pod._rewrite import inline_calls, replace_early

# Decides a sharding for every value; then says where a value must change it, and by
# which collectives.
_PASSES = (
    "builtin.module(sdy-propagation-pipeline,"
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true},"
    "sdy-reshard-to-collectives))"
)
_NO_PASSES = (
    "flm.pod.plan needs Shardy's passes in jaxlib, and this jaxlib does not have them; "
    "use jax 0.8.1 or later, or flm.pod.compile, which needs none"
)

# Position of an argument of a program → its spec.
Specs = Mapping[int, Sequence[Any]]
# Position of a result → that of an argument.
Pairs = Mapping[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A lowered program without its calls, to be laid out.

    Attributes:
        module: a copy of its module.
        sizes: axis name → size, of the mesh that it was lowered for.
        attributes: what was read of its operations, to be read once.
    """

    module: Any
    sizes: dict[str, int]
    attributes: Attributes

    def lay_out(self, specs: Specs | None = None, pairs: Pairs | None = None) -> Any:
        """Lay a copy of the program out.

        Args:
            specs: position of an argument → its spec, instead of the sharding that it
                was lowered with.
            pairs: position of a result → that of the argument that it is the new value
                of; where both were lowered with one sharding, it follows.

        Returns:
            The module: every value with its sharding, and `sdy` collectives between
            them.

        Raises:
            LayoutError: a spec names an axis that the program's mesh does not have, or
                the passes refuse the program.
        """
        texts = {at: _checked(spec, self.sizes) for at, spec in (specs or {}).items()}
        module = self.module.clone()
        ir, passmanager = _bindings()
        with module.context:
            if texts:
                _rewrite(module, texts, pairs or {})
            manager = passmanager.PassManager.parse(_PASSES)
            # The program was verified; between all passes it takes two thirds of the
            # time.
            manager.enable_verifier(False)
            try:
                manager.run(module)
            except ir.MLIRError as error:
                raise _refusal(error) from error
        return module


def prepare(lowered: Any) -> Prepared:
    """Take the calls out of a copy of a lowered module.

    Args:
        lowered: what `jax.jit(...).trace(...).lower(...)` gives.

    Raises:
        LayoutError: this jaxlib has no such passes, or they refuse the program.
    """
    ir, passmanager = _bindings()
    original = lowered.compiler_ir("stablehlo")
    with original.context:
        try:
            passmanager.PassManager.parse(_PASSES)
        except ValueError as error:
            raise LayoutError(_NO_PASSES) from error
        module = original.operation.clone()
        inline_calls(functions(module))
        replace_early(functions(module)["main"].regions[0].blocks[0])
        try:
            module.verify()
        except ir.MLIRError as error:
            raise _refusal(error) from error
    sizes = mesh_sizes(module)
    return Prepared(module, sizes, Attributes(sizes))


def _bindings() -> tuple[Any, Any]:
    try:
        from jaxlib.mlir import ir, passmanager
        from jaxlib.mlir.dialects import sdy as sdy
    except ImportError as error:
        raise LayoutError(_NO_PASSES) from error
    return ir, passmanager


def _refusal(error: Exception) -> LayoutError:
    """An error with the relevant part of an MLIR failure."""
    lines = [line.rstrip() for line in str(error).splitlines()]
    said = (one for one in lines if "error:" in one and not one.endswith(":"))
    reason = next((one.partition("error:")[2].strip() for one in said), lines[0])
    return LayoutError(f"Shardy does not lay this program out: {reason[:200]}")


def sharding_text(spec: Sequence[Any], ndim: int, mesh: str = "mesh") -> str:
    """A PartitionSpec as the attribute of an argument.

    >>> sharding_text(("data", None, ("x", "y")), 4)
    '#sdy.sharding<@mesh, [{"data"}, {}, {"x", "y"}, {}]>'
    """
    entries = [*spec, *[None] * (ndim - len(spec))]
    dims = ["{" + ", ".join(f'"{axis}"' for axis in _axes(e)) + "}" for e in entries]
    return f"#sdy.sharding<@{mesh}, [{', '.join(dims)}]>"


def _axes(entry: Any) -> tuple[str, ...]:
    """The axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def _rewrite(module: Any, specs: Specs, pairs: Pairs) -> None:
    """Give arguments, and the results that go with them, other shardings.

    Args:
        module: a module, which is changed.
        specs: position of an argument → its spec.
        pairs: position of a result → that of an argument.
    """
    ir, _ = _bindings()
    main, name = functions(module)["main"], mesh_of(module)[0]
    kinds = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value).inputs
    before, after = (
        [{one.name: one.attr for one in own} for own in main.attributes[where]]
        if where in main.attributes
        else []
        for where in ("arg_attrs", "res_attrs")
    )
    before = before or [{} for _ in kinds]
    old = {at: before[at].get(_SHARDING) for at in specs}
    for at, spec in specs.items():
        text = sharding_text(spec, len(kinds[at].shape), name)
        before[at][_SHARDING] = ir.Attribute.parse(text)
    for result, at in pairs.items():
        if at in specs and after:
            given = after[result].get(_SHARDING)
            if given is not None and given == old[at]:
                after[result][_SHARDING] = before[at][_SHARDING]
    for where, own in (("arg_attrs", before), ("res_attrs", after)):
        if own:
            main.attributes[where] = ir.ArrayAttr.get([*map(ir.DictAttr.get, own)])


_SHARDING = "sdy.sharding"


def _checked(spec: Sequence[Any], sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """A spec without axes of a single device, which the passes take out first."""
    for axis in {axis for entry in spec for axis in _axes(entry)} - set(sizes):
        raise LayoutError(
            f"the rules name the axis {axis!r}, and the step was traced for a mesh of "
            f"{', '.join(sizes) or 'no axes'}; plan again with these rules: "
            "flm.pod.plan(step, …, layout_map=layout_map)"
        )
    return [tuple(axis for axis in _axes(entry) if sizes[axis] > 1) for entry in spec]
