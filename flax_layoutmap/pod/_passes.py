"""Shardy's passes over a lowered module, through jaxlib's public MLIR bindings.

Nothing is compiled, and no device is needed. The names of the passes are no stable
interface of jaxlib, so that they are looked for before they are used.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap.pod._mlir import Attributes, functions, mesh_of, mesh_sizes
from flax_layoutmap.pod._rewrite import inline_calls, replace_early

# Decides a sharding for every value.
_PROPAGATE = "sdy-propagation-pipeline"
# Says where a value must change it, then by which collectives.
_RESHARD = (
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true},"
    "sdy-reshard-to-collectives)"
)
# In that pipeline, the passes before this one see that an argument has a sharding, but
# not which.
_FIRST_OF_LAYOUT = "sdy-user-priority-propagate"
# Stands in the text of a pipeline, and is no pass that can be asked for.
_NO_PASS = re.compile(r"\bsdy-save-module,?")
# What these name is laid out as one before that.
_GROUP = "sdy.sharding_group"

# Position of an argument of a program → its spec.
Specs = Mapping[int, Sequence[Any]]
# Position of a result → that of an argument.
Pairs = Mapping[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A lowered program without its calls, as far as it is the same in every layout.

    Attributes:
        lowered: what `jax.jit(...).trace(...).lower(...)` gives.
        module: a copy of its module, on which the first passes have run.
        rest: the others that decide a layout.
        sizes: axis name → size, of the mesh that it was lowered for.
        has_groups: whether arguments may be laid out by what they are alike with.
        attributes: what was read of its operations, to be read once.
        changed: what was written on its arguments and results.
    """

    lowered: Any
    module: Any
    rest: str
    sizes: dict[str, int]
    has_groups: bool
    attributes: Attributes
    changed: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def spread(self, specs: Specs | None = None, pairs: Pairs | None = None) -> Any:
        """Lays a copy of the program out.

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
        specs = specs or {}
        texts = {at: _checked(spec, self.sizes) for at, spec in specs.items()}
        module, rest = self.module, self.rest
        if self.has_groups and specs or not _have_shardings(module, specs):
            module, rest = _without_calls(self.lowered)[0], _PROPAGATE
        module = module.clone()
        if specs:
            _rewrite(module, texts, pairs or {}, self.changed)
        _run(rest, module)
        _run(_RESHARD, module)
        return module


def prepare(lowered: Any) -> Prepared:
    """Runs the passes that do not depend on a layout, on a copy of a lowered module.

    Args:
        lowered: what `jax.jit(...).trace(...).lower(...)` gives.

    Raises:
        LayoutError: this jaxlib has no such passes, or they refuse the program.
    """
    module, names = _without_calls(lowered)
    sizes = mesh_sizes(module)
    with module.context:
        first, rest = _halves()
    _run(first, module)
    attributes = Attributes(sizes)
    return Prepared(lowered, module, rest, sizes, _GROUP in names, attributes)


def _without_calls(lowered: Any) -> tuple[Any, set[str]]:
    """A copy of a lowered module without its calls, and the operations in it."""
    ir, _ = _bindings()
    original = lowered.compiler_ir("stablehlo")
    with original.context:
        module = original.operation.clone()
        names = inline_calls(functions(module))
        replace_early(functions(module)["main"].regions[0].blocks[0])
        try:
            module.verify()
        except ir.MLIRError as error:
            raise _refusal(error) from error
    return module, names


def _halves() -> tuple[str, str]:
    """The passes up to the first that decides a layout, and the others that do."""
    _, passmanager = _bindings()
    try:
        text = str(passmanager.PassManager.parse(f"builtin.module({_PROPAGATE})"))
        passmanager.PassManager.parse(f"builtin.module({_RESHARD})")
    except ValueError as error:
        raise LayoutError(_NO_PASSES) from error
    text = _NO_PASS.sub("", text.removeprefix("builtin.module(").removesuffix(")"))
    first, found, rest = text.partition(_FIRST_OF_LAYOUT)
    halves = first.rstrip(","), found + rest
    if not found or not all(map(_is_known, halves)):
        return "", _PROPAGATE  # another jaxlib's pipeline, which is left whole
    return halves


def _is_known(passes: str) -> bool:
    _, passmanager = _bindings()
    try:
        passmanager.PassManager.parse(f"builtin.module({passes})")
    except ValueError:
        return False
    return True


def _run(passes: str, module: Any) -> None:
    ir, passmanager = _bindings()
    with module.context:
        manager = passmanager.PassManager.parse(f"builtin.module({passes})")
        # The program was verified; between all passes it takes two thirds of the time.
        manager.enable_verifier(False)
        try:
            manager.run(module)
        except ir.MLIRError as error:
            raise _refusal(error) from error


def _refusal(error: Exception) -> LayoutError:
    return LayoutError(f"Shardy does not lay this program out: {_reason(str(error))}")


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


def _have_shardings(module: Any, positions: Specs) -> bool:
    if not positions:
        return True
    main = functions(module)["main"]
    if "arg_attrs" not in main.attributes:
        return False
    attributes = main.attributes["arg_attrs"]
    return all("sdy.sharding" in attributes[at] for at in positions)


def _rewrite(module: Any, specs: Specs, pairs: Pairs, known: dict[Any, Any]) -> None:
    """Gives arguments, and the results that go with them, other shardings.

    Args:
        module: a module, which is changed.
        specs: position of an argument → its spec.
        pairs: position of a result → that of an argument.
        known: what was written before, in modules of this program.
    """
    ir, _ = _bindings()
    main, name = functions(module)["main"], mesh_of(module)[0]
    kinds = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value).inputs
    with module.context:
        before, after = _attributes(main, "arg_attrs"), _attributes(main, "res_attrs")
        before = before or [ir.DictAttr.get({}) for _ in kinds]
        new: dict[int, str] = {}
        own = {at: _sharding_in(before[at]) for at in specs}
        for at, spec in specs.items():
            new[at] = sharding_text(spec, len(kinds[at].shape), name)
            before[at] = _with_sharding(before[at], new[at], known)
        for result, at in pairs.items():
            if at in specs and after:
                given = _sharding_in(after[result])
                if given is not None and given == own[at]:
                    after[result] = _with_sharding(after[result], new[at], known)
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(before)
        if after:
            main.attributes["res_attrs"] = ir.ArrayAttr.get(after)


def _attributes(main: Any, where: str) -> list[Any]:
    """One dict of attributes for each argument, or result, of a function."""
    return list(main.attributes[where]) if where in main.attributes else []


def _sharding_in(attributes: Any) -> Any:
    return attributes["sdy.sharding"] if "sdy.sharding" in attributes else None


def _with_sharding(attributes: Any, sharding: str, known: dict[Any, Any]) -> Any:
    from jaxlib.mlir import ir

    found = known.get((attributes, sharding))
    if found is None:
        own = {named.name: named.attr for named in attributes}
        parsed = known.setdefault(sharding, ir.Attribute.parse(sharding))
        found = ir.DictAttr.get({**own, "sdy.sharding": parsed})
        known[attributes, sharding] = found
    return found


def _checked(spec: Sequence[Any], sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """A spec without axes of a single device, which the passes take out first."""
    for axis in {axis for entry in spec for axis in _axes(entry)} - set(sizes):
        raise LayoutError(
            f"the rules name the axis {axis!r}, and the step was traced for a mesh of "
            f"{', '.join(sizes) or 'no axes'}; plan again with these rules: "
            "flm.pod.plan(step, …, layout_map=layout_map)"
        )
    return [tuple(axis for axis in _axes(entry) if sizes[axis] > 1) for entry in spec]
