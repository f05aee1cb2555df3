"""Shardy's passes over a lowered module, through jaxlib's public MLIR bindings.

Nothing is compiled, and no device is needed. The names of the passes are no stable
interface of jaxlib, so that `prepare` checks for them. Calls are inlined before: a
program without calls is laid out faster, and in the same way.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap.pod._early import (
    inline_calls,
    replace_early,
    rewrite_for_tpus,
)
from flax_layoutmap.pod._mlir import (
    Attributes,
    Dims,
    functions,
    maker_of,
    mesh_of,
)

UNCONSTRAINED = PartitionSpec.UNCONSTRAINED

_PROPAGATION = "builtin.module(sdy-propagation-pipeline)"
# Propagate shardings to every value, then insert collectives where one must change.
_PASSES = (
    "builtin.module(sdy-propagation-pipeline,"
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true},"
    "sdy-reshard-to-collectives))"
)
_NO_PASSES = (
    "flm.pod.plan needs Shardy's passes in jaxlib, and this jaxlib does not have them; "
    "use flm.pod.compile, which needs none"
)

# Position of an argument of a program → its spec, which may have open dims
# (`PartitionSpec.UNCONSTRAINED`).
Specs = Mapping[int, Sequence[Any]]
# Position of a result → that of an argument.
Pairs = Mapping[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A lowered program without calls, to be laid out under any specs."""

    module: Any
    sizes: dict[str, int]  # axis name → size, of its mesh
    attributes: Attributes  # kept, as most attributes are the same in every layout

    def lay_out(
        self,
        specs: Specs | None = None,
        pairs: Pairs | None = None,
        constraints: Mapping[int, Sequence[Any] | None] | None = None,
    ) -> Any:
        """Return a copy in which every value has a sharding, and `sdy` collectives.

        The specs replace the shardings of arguments. A result of `pairs` that was
        lowered with the sharding of its argument follows it. `constraints` has new
        specs of sharding constraints, by their position; None drops one.
        """
        texts = {at: _checked(spec, self.sizes) for at, spec in (specs or {}).items()}
        module = self.module.clone()
        with module.context:
            if texts:
                _rewrite(module, texts, pairs or {})
            if constraints:
                self._constrain(module, constraints)
            _run(_PASSES, module)
        return module

    def _constrain(
        self, module: Any, specs: Mapping[int, Sequence[Any] | None]
    ) -> None:
        """Change, or drop, sharding constraints."""
        ir, _ = _bindings()
        mesh = mesh_of(module)[0]
        for at, op in enumerate(constraints_in(module)):
            spec = specs.get(at, ())
            if spec is None:
                op.results[0].replace_all_uses_with(op.operands[0])
                op.erase()
            elif at in specs:
                ndim = len(op.results[0].type.shape)
                text = sharding_text(_checked(spec, self.sizes), ndim, mesh)
                op.attributes["sharding"] = ir.Attribute.parse(text)

    def spread(self, specs: Specs) -> tuple[list[Dims], dict[int, Dims]]:
        """Propagate the shardings of some arguments, with all others open.

        Returns:
            The axes of each dim of each argument, and of each operand of a sharding
            constraint, by the position of the constraint; no constraint counts.
        """
        ir, _ = _bindings()
        module = self.module.clone()
        with module.context:
            main, name = functions(module)["main"], mesh_of(module)[0]
            kinds = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
            for where, own in (
                ("arg_attrs", kinds.inputs),
                ("res_attrs", kinds.results),
            ):
                given = specs if where == "arg_attrs" else {}
                main.attributes[where] = ir.ArrayAttr.get(
                    [
                        ir.DictAttr.get({_SHARDING: ir.Attribute.parse(text)})
                        for text in _open_texts(own, given, name)
                    ]
                )
            marked = _mark_operands(module, ir)
            _run(_PROPAGATION, module)
            return self.arguments(module), self._read_marked(module, marked)

    def arguments(self, module: Any) -> list[Dims]:
        """The axes of each dim of each argument of a module."""
        main = functions(module)["main"]
        given = [
            self.attributes.of(one[_SHARDING]) if _SHARDING in one else None
            for one in main.attributes["arg_attrs"]
        ]
        values = main.regions[0].blocks[0].arguments
        return [
            self.attributes.array(value, dims).dims
            for value, dims in zip(values, given, strict=True)
        ]

    def _read_marked(
        self, module: Any, marked: Mapping[int, tuple[int, int]]
    ) -> dict[int, Dims]:
        """The axes of marked operands: position → number of the mark, and result."""
        found = {
            op.attributes[_MARK].value: self.attributes.per_value(op)
            for op in _operations(module)
            if _MARK in op.attributes
        }
        return {
            at: found[mark][result]
            for at, (mark, result) in marked.items()
            if found.get(mark)
        }


def prepare(lowered: Any, *, as_tpus: bool = True) -> Prepared:
    """Inline the calls in a copy of a lowered module, and verify it.

    With `as_tpus` it is changed as the TPU compiler does before it runs Shardy, but
    for matrix products.
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
        block = functions(module)["main"].regions[0].blocks[0]
        if as_tpus:
            rewrite_for_tpus(block, products=False)
        replace_early(block)
        try:
            module.verify()
        except ir.MLIRError as error:
            raise _refusal(error) from error
    sizes = mesh_of(module)[1]
    return Prepared(module, sizes, Attributes(sizes))


def _run(passes: str, module: Any) -> None:
    ir, passmanager = _bindings()
    manager = passmanager.PassManager.parse(passes)
    # The program was verified; to verify it after each pass takes two thirds of the
    # time.
    manager.enable_verifier(False)
    try:
        manager.run(module)
    except ir.MLIRError as error:
        raise _refusal(error) from error


def constraints_in(module: Any) -> list[Any]:
    """The sharding constraints of a module, in order."""
    return [op for op in _operations(module) if op.name == "sdy.sharding_constraint"]


def _operations(above: Any) -> Iterator[Any]:
    """All operations inside of one.

    MLIR's own walk would turn Ctrl-C into another error.
    """
    for region in above.regions:
        for block in region.blocks:
            for op in block.operations:
                yield op.operation
                yield from _operations(op.operation)


def _open_texts(kinds: Sequence[Any], specs: Specs, mesh: str) -> list[str]:
    """The sharding of each argument or result; open where there is no spec."""
    found = []
    for at, kind in enumerate(kinds):
        ndim = len(kind.shape)
        spec = specs.get(at, [UNCONSTRAINED] * ndim)
        found.append(sharding_text(spec, ndim, mesh))
    return found


# On operations, while passes run: its number, of those that are marked.
_MARK = "flm.mark"


def _mark_operands(module: Any, ir: Any) -> dict[int, tuple[int, int]]:
    """Drop all constraints, and mark the operations that they were for.

    Returns the mark and the number of the result, by the position of the constraint.
    """
    marked: dict[int, tuple[int, int]] = {}
    number = ir.IntegerType.get_signless(64)
    for at, op in enumerate(constraints_in(module)):
        value = op.operands[0]
        op.results[0].replace_all_uses_with(value)
        op.erase()
        maker = maker_of(value)
        if maker is None:  # an argument of a function or a loop
            continue
        if _MARK not in maker.attributes:
            maker.attributes[_MARK] = ir.IntegerAttr.get(number, at)
        mark = maker.attributes[_MARK].value
        marked[at] = mark, list(maker.results).index(value)
    return marked


def _bindings() -> tuple[Any, Any]:
    try:
        from jax.extend.mlir import ir, passmanager
        from jax.extend.mlir.dialects import sdy as sdy
    except ImportError as error:
        raise LayoutError(_NO_PASSES) from error
    return ir, passmanager


def _refusal(error: Exception) -> LayoutError:
    """An error with the relevant part of an MLIR failure."""
    lines = [line.rstrip() for line in str(error).splitlines()]
    errors = (one for one in lines if "error:" in one and not one.endswith(":"))
    reason = next((one.partition("error:")[2].strip() for one in errors), lines[0])
    return LayoutError(f"Shardy does not lay this program out: {reason[:200]}")


def sharding_text(spec: Sequence[Any], ndim: int, mesh: str = "mesh") -> str:
    """A PartitionSpec as the attribute of an argument.

    >>> sharding_text(("data", None, ("x", "y")), 4)
    '#sdy.sharding<@mesh, [{"data"}, {}, {"x", "y"}, {}]>'
    """
    entries = [*spec, *[None] * (ndim - len(spec))]
    dims = [
        "{?}"
        if entry is UNCONSTRAINED
        else "{" + ", ".join(f'"{axis}"' for axis in _axes(entry)) + "}"
        for entry in entries
    ]
    return f"#sdy.sharding<@{mesh}, [{', '.join(dims)}]>"


def _axes(entry: Any) -> tuple[str, ...]:
    """The axes of one entry of a PartitionSpec."""
    if entry is None or entry is UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else entry


def _rewrite(module: Any, specs: Specs, pairs: Pairs) -> None:
    """Change the shardings of arguments, and of the results that follow them."""
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


def _checked(spec: Sequence[Any], sizes: Mapping[str, int]) -> list[Any]:
    """A spec without axes of a single device, which the passes remove first."""
    for axis in {axis for entry in spec for axis in _axes(entry)} - set(sizes):
        raise LayoutError(
            f"the rules name the axis {axis!r}, and the step was traced for a mesh of "
            f"{', '.join(sizes) or 'no axes'}; plan again with these rules: "
            "flm.pod.plan(step, …, layout_map=layout_map)"
        )
    return [
        entry
        if entry is UNCONSTRAINED
        else tuple(axis for axis in _axes(entry) if sizes[axis] > 1)
        for entry in spec
    ]
