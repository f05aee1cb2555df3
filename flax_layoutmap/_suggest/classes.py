"""Which dims of a step's parameters and outputs are sharded together.

The step is lowered once, replicated. Then a single dim is sharded at a time, with all
other dims open, and Shardy propagates the sharding: the dims that follow are a class,
such as the hidden units of `up` and `down`, the heads, or the model dim. Names of
parameters are not used.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._resolve.resolve import resolve
from flax_layoutmap._rules.matching import Rule
from flax_layoutmap.convert._shardings import NEVER_ASKED
from flax_layoutmap.pod._lower import functions_of, lower_step, operations_in

Node = tuple[str, str, int]  # section and path of an array, and a dim
# The class of dims that follow dim 0 of the data, and of dims without a class.
ROWS, ALONE = -1, -2

_LITTLE = 1e-3  # parameters with a smaller share of the bytes stay replicated
# The index of a layer with submodules: `layers/3/up/kernel`, not `layers/3/kernel`.
_LAYER = re.compile(r"\d+(?=/[^/]+/)")
_OUTPUT = re.compile(r"(activations|names)\[([^\]]*)\]")
_OLD_KEYS = ("tensor<2xui32>", "tensor<4xui32>")


@dataclasses.dataclass(slots=True)
class Arrays:
    """An output, or the same parameter of equal layers; all have the same layout."""

    section: str  # "rules"; for outputs "activations" or "names"
    paths: tuple[str, ...]  # for parameters starting with the argument's name
    shape: tuple[int, ...]  # of each array
    bytes: int = 0  # of all parameters
    state_bytes: int = 0  # of their optimizer state
    is_small: bool = False  # whether they stay replicated
    classes: tuple[int, ...] = ()  # of each dim


@dataclasses.dataclass(frozen=True, slots=True)
class StepDims:
    """The arrays of a step, with the classes of their dims."""

    data: Mapping[str, int]  # path → dim 0 of arrays split over the batch axes
    parameters: list[Arrays]  # sorted by bytes, largest first
    outputs: list[Arrays]
    is_training: bool  # whether the step computes gradients
    notes: list[str]


def dims_of(
    step: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    state: Mapping[str, Any],
    mesh: DeviceMesh,
) -> StepDims:
    """Lower a step with the arguments `state`, and find its classes of dims."""
    from jax.extend.mlir.ir import MLIRError

    rules = LayoutMap(mesh, batch=(), strict=False, indivisible="replicate")
    rules[".*"] = None
    rules.names[".*"] = (...,)  # marks each output in the program
    rules.activations.add(Rule(".*", (...,), rank="skip"))
    lowered = lower_step(step, args, kwargs, rules.freeze(), [*state])
    module = lowered.program.compiler_ir("stablehlo").operation
    kinds = [
        value.type
        for value in functions_of(module)["main"].regions[0].blocks[0].arguments
    ]
    data = {
        leaf.path: kind.shape[0]
        for leaf, kind in zip(lowered.leaves, kinds, strict=True)
        if leaf.role == "data" and len(kind.shape) and str(kind) not in _OLD_KEYS
    }
    parameters = _parameters_of(state, rules)
    outputs = _outputs_of(module)
    paths = [leaf.path for leaf in lowered.leaves]
    notes, classes = [], {}
    try:
        classes = _classes_of(module, mesh, paths, parameters, data)
    except MLIRError as error:
        notes.append(f"no dims go together, as Shardy does not propagate: {error}")
    for arrays in (*parameters, *outputs):
        nodes = [(arrays.section, arrays.paths[0], n) for n in range(len(arrays.shape))]
        arrays.classes = tuple(classes.get(node, ALONE) for node in nodes)
    is_training = any("transpose(" in str(op.location) for op in operations_in(module))
    return StepDims(data, parameters, outputs, is_training, notes)


def _outputs_of(module: Any) -> list[Arrays]:
    """Outputs that the program constrains, if they always have the same shape."""
    shapes = defaultdict(set)
    for section, path, op in _constraints(module):
        shapes[section, path].add(tuple(op.results[0].type.shape))
    return [
        Arrays(section, (path,), *different)
        for (section, path), different in shapes.items()
        if len(different) == 1
    ]


def _parameters_of(state: Mapping[str, Any], rules: LayoutMap) -> list[Arrays]:
    leaves = list(resolve(dict(state), rules.freeze()))
    alike, moments = defaultdict(list), defaultdict(int)
    for leaf in leaves:
        if leaf.role == "optimizer":
            moments[leaf.owner] += leaf.bytes_per_device
        elif leaf.shape and leaf.reason not in NEVER_ASKED:
            inner = leaf.path.partition("/")[2] or leaf.path
            alike[_LAYER.sub("0", inner), leaf.shape].append(leaf)
    total = sum(leaf.bytes_per_device for leaf in leaves)
    parameters = []
    for (_, shape), members in alike.items():
        paths = tuple(leaf.path for leaf in members)
        size = sum(leaf.bytes_per_device for leaf in members)
        # Optimizer state names its parameter by its path or an end of the path.
        ends = [p.split("/", n)[-1] for p in paths for n in range(p.count("/") + 1)]
        more = sum(moments.pop(end, 0) for end in ends)
        is_small = size + more < _LITTLE * total
        parameters.append(Arrays("rules", paths, shape, size, more, is_small))
    return sorted(parameters, key=lambda p: (-p.bytes, p.shape))


def _classes_of(
    module: Any,
    mesh: DeviceMesh,
    paths: Sequence[str],
    parameters: Sequence[Arrays],
    data: Mapping[str, int],
) -> dict[Node, int]:
    """The class of each dim; `paths` are the paths of the arguments, in order."""
    sizes = sorted((size, axis) for axis, size in mesh.axis_sizes.items() if size > 1)
    classes: dict[Node, int] = {}

    def spread(number: int, dims: Mapping[str, int], lengths: Iterable[int]) -> None:
        """Give a class to dims (path → dim) of these lengths and to following dims."""
        fits = [axis for n, axis in sizes if not any(length % n for length in lengths)]
        if fits and dims:
            for node in _following(module, fits[0], paths, dims):
                classes.setdefault(node, number)

    spread(ROWS, dict.fromkeys(data, 0), data.values())
    for arrays in parameters:
        for dim, length in enumerate(arrays.shape):
            is_known = ("rules", arrays.paths[0], dim) in classes
            if not is_known and not arrays.is_small:
                spread(len(classes), dict.fromkeys(arrays.paths, dim), [length])
    return classes


def _following(
    module: Any, axis: str, paths: Sequence[str], seeds: Mapping[str, int]
) -> Iterator[Node]:
    """The dims that an axis shards if it shards the `seeds` and others are open."""
    from jax.extend.mlir.ir import ArrayAttr, Attribute, DictAttr
    from jax.extend.mlir.passmanager import PassManager

    def sharding(value: Any, sharded: int | None = None) -> Any:
        dims = range(len(value.type.shape))
        texts = [f'{{"{axis}"}}' if dim == sharded else "{?}" for dim in dims]
        return Attribute.parse(f"#sdy.sharding<@mesh, [{', '.join(texts)}]>")

    module = module.clone()
    with module.context:
        main = functions_of(module)["main"]
        arguments = zip(paths, main.regions[0].blocks[0].arguments, strict=True)
        given = [{"sdy.sharding": sharding(v, seeds.get(p))} for p, v in arguments]
        main.attributes["arg_attrs"] = ArrayAttr.get([*map(DictAttr.get, given)])
        if "res_attrs" in main.attributes:
            del main.attributes["res_attrs"]
        for op in operations_in(module):
            if op.name == "sdy.sharding_constraint":
                op.attributes["sharding"] = sharding(op.results[0])
        passes = PassManager.parse("builtin.module(sdy-propagation-pipeline)")
        passes.enable_verifier(False)
        passes.run(module)
        arguments = zip(
            paths, functions_of(module)["main"].attributes["arg_attrs"], strict=True
        )
        shardings = [("rules", path, a["sdy.sharding"]) for path, a in arguments]
        for section, path, op in _constraints(module):
            shardings.append((section, path, op.attributes["sharding"]))
        for section, path, text in shardings:
            for dim, axes in enumerate(re.findall(r"\{([^}]*)\}", str(text))):
                if f'"{axis}"' in axes:
                    yield section, path, dim


def _constraints(module: Any) -> Iterator[tuple[str, str, Any]]:
    """Section, path and operation of each output that a program constrains."""
    for op in operations_in(module):
        if op.name in ("sdy.sharding_constraint", "sdy.reshard"):
            name = str(op.location).partition('"')[2].partition('"')[0]
            for section, path in _OUTPUT.findall(name)[-1:]:
                yield section, path, op
