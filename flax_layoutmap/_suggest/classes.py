"""Which dims of a step's parameters and outputs are sharded together.

The step is lowered once, replicated. Then one dim is sharded at a time, with all others
open, and Shardy propagates it: the dims that follow are a class, such as the hidden
units of `up` and `down`, the heads, or the model dim. Names do not matter.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._resolve.resolve import resolve
from flax_layoutmap._rules.matching import Rule
from flax_layoutmap.pod._lower import lower_step

# A dim of a group of parameters (`"group"`) or of an output (`"output"`).
Node = tuple[str, int, int]
# The class of dims that follow the first dims of the data, and that of dims alone.
ROWS, ALONE = -1, -2

_NEVER_ASKED = ("scalar", "random state", "not an array")
# Parameters of a smaller share of the bytes stay replicated.
_LITTLE = 1e-3
# The index of a layer that has parts: `layers/3/up/kernel`, not `layers/3/kernel`.
_LAYER = re.compile(r"\d+(?=/[^/]+/)")
_OUTPUT = re.compile(r"(activations|names)\[([^\]]*)\]")
_OLD_KEYS = ("tensor<2xui32>", "tensor<4xui32>")


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """What modules return, or what the model names."""

    section: str  # "activations" or "names"
    path: str
    shape: tuple[int, ...]  # always the same
    classes: tuple[int, ...] = ()  # of each dim


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Parameters of equal layers, in all arguments, which get one layout."""

    paths: tuple[str, ...]  # with the name of the argument first
    shape: tuple[int, ...]  # of each
    bytes: int  # of all
    state_bytes: int  # of their optimizer state
    is_small: bool  # whether they stay replicated
    classes: tuple[int, ...] = ()  # of each dim


@dataclasses.dataclass(frozen=True, slots=True)
class StepDims:
    """The arrays of a step, with the classes of their dims."""

    name: str
    state: tuple[str, ...]  # names of the arguments that rules are for
    data: Mapping[str, int]  # path → first dim of what is split over the batch axes
    groups: tuple[Group, ...]  # those of the most bytes first
    outputs: tuple[Output, ...]
    other_bytes: int  # of state that is always replicated
    is_training: bool  # whether the step computes gradients


def dims_of(
    step: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    state: Mapping[str, Any],
    mesh: DeviceMesh,
) -> StepDims:
    """Lower a step, of which some arguments are `state`, and find classes of dims."""
    rules = LayoutMap(mesh, batch=(), strict=False, indivisible="replicate")
    rules[".*"] = None
    rules.names[".*"] = (...,)  # marks each output in the program
    rules.activations.add(Rule(".*", (...,), rank="skip"))
    lowered = lower_step(step, args, kwargs, rules.freeze(), [*state], "tpu", mesh)
    module = lowered.program.compiler_ir("stablehlo").operation
    kinds = [value.type for value in _main(module).regions[0].blocks[0].arguments]
    data = {
        leaf.path: kind.shape[0]
        for leaf, kind in zip(lowered.leaves, kinds, strict=True)
        if leaf.role == "data" and len(kind.shape) and str(kind) not in _OLD_KEYS
    }
    groups, other_bytes = _groups_of(state, rules)
    outputs = _outputs_of(module)
    positions = {leaf.path: at for at, leaf in enumerate(lowered.leaves)}
    axes = sorted((size, axis) for axis, size in mesh.axis_sizes.items() if size > 1)
    try:
        classes = _classes_of(_Spread(module, axes, positions, groups, outputs), data)
    except (ImportError, LayoutError):  # without Shardy, what has as many rows
        rows = {*data.values()}
        shapes = enumerate(output.shape for output in outputs)
        classes = {("output", n, 0): ROWS for n, s in shapes if s and s[0] in rows}

    def of(kind: str, arrays: Sequence[Any]) -> Iterator[Any]:
        for number, array in enumerate(arrays):
            nodes = [(kind, number, dim) for dim in range(len(array.shape))]
            found = tuple(classes.get(node, ALONE) for node in nodes)
            yield dataclasses.replace(array, classes=found)

    return StepDims(
        name=lowered.name,
        state=tuple(state),
        data=data,
        groups=tuple(of("group", groups)),
        outputs=tuple(of("output", outputs)),
        other_bytes=other_bytes,
        is_training=any("transpose(" in str(op.location) for op in _inside(module)),
    )


def _outputs_of(module: Any) -> list[Output]:
    """Outputs that are constrained in the program, if always of one shape."""
    shapes = defaultdict(set)
    for op in _inside(module):
        if any(key := _output(op)):
            shapes[key].add(tuple(op.results[0].type.shape))
    return [Output(*key, *some) for key, some in shapes.items() if len(some) == 1]


def _groups_of(state: Mapping[str, Any], rules: LayoutMap) -> tuple[list[Group], int]:
    """The groups of parameters, and the bytes of all other state."""
    leaves = list(resolve(dict(state), rules.freeze()))
    alike, moments = defaultdict(list), defaultdict(int)
    for leaf in leaves:
        if leaf.role == "optimizer":
            moments[leaf.owner] += leaf.bytes_per_device
        elif leaf.shape and leaf.reason not in _NEVER_ASKED:
            inner = leaf.path.partition("/")[2] or leaf.path
            alike[_LAYER.sub("0", inner), leaf.shape].append(leaf)
    total = sum(leaf.bytes_per_device for leaf in leaves)
    groups = []
    for (_, shape), members in alike.items():
        paths = tuple(leaf.path for leaf in members)
        size = sum(leaf.bytes_per_device for leaf in members)
        more = sum(moments.pop(end, 0) for path in paths for end in _ends(path))
        groups.append(Group(paths, shape, size, more, size + more < _LITTLE * total))
    groups.sort(key=lambda group: (-group.bytes, group.shape))
    return groups, total - sum(one.bytes + one.state_bytes for one in groups)


def _ends(path: str) -> Iterator[str]:
    """A path and all its ends: its optimizer state names one of them."""
    while path:
        yield path
        path = path.partition("/")[2]


def _classes_of(spread: "_Spread", data: Mapping[str, int]) -> dict[Node, int]:
    """The class of each dim, as a number."""
    classes = dict.fromkeys(spread(dict.fromkeys(data, 0), data.values()), ROWS)
    seeds = 0
    for number, group in enumerate(spread.groups):
        for dim, length in enumerate(group.shape):
            if group.is_small or ("group", number, dim) in classes:
                continue
            seeds += 1
            for node in spread(dict.fromkeys(group.paths, dim), [length]):
                classes.setdefault(node, seeds)
    return classes


# ------------------------------------------------------------------------- Shardy

_NAME = "sdy.sharding"


@dataclasses.dataclass(frozen=True, slots=True)
class _Spread:
    """Shards dims of arguments, and returns the dims that follow."""

    module: Any
    axes: list[tuple[int, str]]  # size and name
    positions: Mapping[str, int]  # path → position among the arguments
    groups: Sequence[Group]
    outputs: Sequence[Output]

    def __call__(self, dims: Mapping[str, int], lengths: Any) -> set[Node]:
        """The dims that follow these dims, path → dim, of some lengths."""
        from jax.extend.mlir.ir import ArrayAttr, Attribute, DictAttr, MLIRError
        from jax.extend.mlir.passmanager import PassManager

        fits = [axis for n, axis in self.axes if not any(size % n for size in lengths)]
        if not fits or not dims:
            return set()
        seeds = {self.positions[p]: d for p, d in dims.items() if p in self.positions}

        def sharding(value: Any, sharded: int | None = None) -> Any:
            dims = range(len(value.type.shape))
            texts = [f'{{"{fits[0]}"}}' if d == sharded else "{?}" for d in dims]
            return Attribute.parse(f"#sdy.sharding<@mesh, [{', '.join(texts)}]>")

        module = self.module.clone()
        with module.context:
            main = _main(module)
            main.attributes["arg_attrs"] = ArrayAttr.get(
                [
                    DictAttr.get({_NAME: sharding(value, seeds.get(at))})
                    for at, value in enumerate(main.regions[0].blocks[0].arguments)
                ]
            )
            if "res_attrs" in main.attributes:
                del main.attributes["res_attrs"]
            for op in _inside(module):
                if op.name == "sdy.sharding_constraint":
                    op.attributes["sharding"] = sharding(op.results[0])
            try:
                passes = PassManager.parse("builtin.module(sdy-propagation-pipeline)")
                passes.enable_verifier(False)
                passes.run(module)
            except (MLIRError, ValueError) as error:
                raise LayoutError(f"Shardy does not propagate: {error}") from error
            return set(self._read(module, f'"{fits[0]}"'))

    def _read(self, module: Any, axis: str) -> Iterator[Node]:
        """The dims of parameters and outputs that an axis shards."""
        attributes = list(_main(module).attributes["arg_attrs"])
        numbers = {(o.section, o.path): at for at, o in enumerate(self.outputs)}
        found = [
            ("group", number, attributes[self.positions[group.paths[0]]][_NAME])
            for number, group in enumerate(self.groups)
            if group.paths[0] in self.positions
        ]
        found += [
            ("output", numbers[key], op.attributes["sharding"])
            for op in _inside(module)
            if (key := _output(op)) in numbers
        ]
        for kind, number, sharding in found:
            for dim, axes in enumerate(re.findall(r"\{([^}]*)\}", str(sharding))):
                if axis in axes:
                    yield kind, number, dim


def _output(op: Any) -> tuple[str, str]:
    """Section and path of the output that an operation constrains; else empty."""
    if op.name not in ("sdy.sharding_constraint", "sdy.reshard"):
        return ("", "")
    name = str(op.location).partition('"')[2].partition('"')[0]
    return next(reversed(_OUTPUT.findall(name)), ("", ""))


def _main(module: Any) -> Any:
    """The function of a module that is the step."""
    functions = module.regions[0].blocks[0].operations
    return next(op for op in functions if str(op.attributes["sym_name"]) == '"main"')


def _inside(above: Any) -> Iterator[Any]:
    """All operations inside of one."""
    for region in above.regions:
        for block in region.blocks:
            for op in block.operations:
                yield op.operation
                yield from _inside(op.operation)
