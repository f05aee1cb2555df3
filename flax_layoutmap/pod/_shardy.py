"""Reads a module that Shardy has laid out: collectives, reshards, matrix products.

Calls are followed and loops multiplied. Two things are counted as the compiler does
them, not as they are written: a chain of additions of all-reduces is one all-reduce,
and equal gathers of one value are one gather.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from flax_layoutmap.pod._loops import trip_count
from flax_layoutmap.pod._manual import manual_collective
from flax_layoutmap.pod._operations import (
    ENDS,
    MOVING,
    changed_axes,
    contracted,
    feature_size,
    is_shared,
    location_of,
    shape_of,
)
from flax_layoutmap.pod._passes import AxisRef, Dims, Shardings, functions, mesh_sizes
from flax_layoutmap.pod._records import Kind
from flax_layoutmap.pod._values import MOVES, UNIFORM, Value, dtype_name, parts

Scope = tuple[int, ...]  # the loops around an operation, by number

_BRANCHES = ("stablehlo.case", "stablehlo.if")
# In these a computation of its own stands in the place of a call.
_INLINE = ("sdy.named_computation", "stablehlo.composite")
# What an operation inside of shard_map says for itself.
_MANUAL = (
    "stablehlo.all_reduce",
    "stablehlo.all_gather",
    "stablehlo.reduce_scatter",
    "stablehlo.all_to_all",
    "stablehlo.collective_permute",
    "stablehlo.collective_broadcast",
)
# Attributes that tell two operations of one name apart.
_ATTRIBUTES = ("permutation", "start_indices", "limit_indices", "strides")


@dataclasses.dataclass(slots=True)
class Found:
    """A collective as it stands in the program.

    Attributes:
        kind: what it does.
        axes: the axes it runs over.
        shape: payload on one device.
        element: MLIR's name of its element type.
        executions: how often it runs in a step.
        location: where it comes from, as MLIR writes it.
        scope: the loops around it.
        leaf: the argument that it moves, or whose gradient it sums.
        into: the collective that it is one with, or None.
    """

    kind: Kind
    axes: tuple[AxisRef, ...]
    shape: tuple[int, ...]
    element: str
    executions: int
    location: str
    scope: Scope = ()
    leaf: int | None = None
    into: int | None = None


@dataclasses.dataclass(slots=True)
class Move:
    """A value that changes its sharding, by one collective or several."""

    before: Value
    after: Value
    executions: int
    location: str
    gathers_only: bool


@dataclasses.dataclass(slots=True)
class Spread:
    """What was read from a module.

    Attributes:
        sizes: axis name → size.
        arguments: the arguments of the step.
        results: its results.
        collectives: in the order of the program.
        moves: values that change their sharding.
        flops: of matrix products and convolutions, on one device.
        flops_whole: the same on all devices if none did another's work.
        unrecognised: what could not be counted → how often it stands in the program.
        operations: how many operations there are, calls followed.
    """

    sizes: dict[str, int]
    arguments: list[Value]
    results: list[Value] = dataclasses.field(default_factory=list)
    collectives: list[Found] = dataclasses.field(default_factory=list)
    moves: dict[int, Move] = dataclasses.field(default_factory=dict)
    flops: int = 0
    flops_whole: int = 0
    unrecognised: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    operations: int = 0


def read(module: Any) -> Spread:
    """Walks through a module that `spread` made."""
    return _Walk(module).run()


@dataclasses.dataclass(slots=True)
class _Place:
    """Where in the program the walk is."""

    env: dict[Any, Value]
    times: int
    scope: Scope


class _Walk:
    """One walk through a module, along its calls."""

    def __init__(self, module: Any) -> None:
        self.functions = functions(module)
        sizes = mesh_sizes(module)
        self.shardings = Shardings(sizes)
        self.found = Spread(sizes, [])
        self.loops = 0
        self.gathered: dict[Any, Value] = {}
        self.copies: dict[Any, Value] = {}
        self.types: dict[Any, tuple[tuple[int, ...], str]] = {}

    def run(self) -> Spread:
        main = self.functions["main"]
        block = main.regions[0].blocks[0]
        attributes: Sequence[Any] = ()
        if "arg_attrs" in main.attributes:
            attributes = list(main.attributes["arg_attrs"])
        env: dict[Any, Value] = {}
        for at, argument in enumerate(block.arguments):
            own = attributes[at] if at < len(attributes) else {}
            dims = None
            if "sdy.sharding" in own:
                dims = self.shardings.of(own["sdy.sharding"])
            value = self._value("argument", argument, dims)
            value.leaf = at
            env[argument] = value
            self.found.arguments.append(value)
        place = _Place(env, 1, ())
        self.found.results = self._block(block, place)
        return self.found

    # ------------------------------------------------------------------- blocks

    def _block(self, block: Any, place: _Place) -> list[Value]:
        """Walks through a block; what it returns."""
        for op in block.operations:
            operation = op.operation
            name = operation.name
            self.found.operations += 1
            operands = tuple(place.env[one] for one in operation.operands)
            if name in ENDS:
                return list(operands)
            values = self._operation(name, operation, operands, place)
            for result, value in zip(operation.results, values, strict=True):
                if value.sums and not value.shared and is_shared(result):
                    value.shared = True
                place.env[result] = value
        return []

    def _operation(
        self, name: str, op: Any, operands: tuple[Value, ...], place: _Place
    ) -> Sequence[Value]:
        if name == "sdy.all_reduce":
            return [self._all_reduce(op, operands[0], place)]
        if name in MOVING or name == "sdy.all_slice":
            return [self._move(name, op, operands[0], place)]
        if name == "func.call":
            callee = self.functions[str(op.attributes["callee"]).lstrip("@").strip('"')]
            return self._inside(callee.regions[0].blocks[0], operands, place)
        if name == "stablehlo.while":
            return self._loop(op, operands, place)
        if name in _BRANCHES:
            return self._branches(name, op, place)
        if name == "sdy.manual_computation":
            return self._manual(op, operands, place)
        if name in _INLINE and len(op.regions) and len(op.regions[0].blocks):
            return self._inside(op.regions[0].blocks[0], operands, place)
        if name in _MANUAL:
            return self._own_collective(name, op, operands, place)
        dims = self.shardings.per_value(op)
        values = [
            self._value(name, result, dims[at] if at < len(dims) else None, operands)
            for at, result in enumerate(op.results)
        ]
        if name in ("stablehlo.dot_general", "stablehlo.convolution"):
            self._product(name, op, operands, values[0], place)
        elif name == "stablehlo.add":
            values[0].sums = self._added(operands)
        elif name in UNIFORM or name == "stablehlo.broadcast_in_dim":
            whole = operands[:1] and operands[0].shape and not operands[0].is_uniform
            values[0].is_uniform = not whole
        elif name in MOVES:
            for at, value in enumerate(values):
                self._copy(name, op, operands, value, at)
        return values

    def _inside(
        self, block: Any, operands: Sequence[Value], place: _Place
    ) -> list[Value]:
        env = dict(zip(block.arguments, operands, strict=True))
        return self._block(block, _Place(env, place.times, place.scope))

    def _loop(self, op: Any, operands: tuple[Value, ...], place: _Place) -> list[Value]:
        condition, body = op.regions[0].blocks[0], op.regions[1].blocks[0]
        count = trip_count(condition, body, op.operands)
        if count is None:
            self.found.unrecognised["loop of unknown length, counted as one round"] += 1
        self.loops += 1
        dims = self.shardings.per_value(op)
        ends = list(body.operations)[-1].operation.operands
        env = dict(place.env)
        for at, argument in enumerate(body.arguments):
            if ends[at] == argument:  # the same in every round
                env[argument] = operands[at]
            else:
                own = dims[at] if at < len(dims) else None
                env[argument] = self._value("loop", argument, own)
        inner = _Place(env, place.times * (count or 1), (*place.scope, self.loops))
        after = self._block(body, inner)
        values = []
        for at, result in enumerate(op.results):
            if ends[at] == body.arguments[at]:
                values.append(operands[at])
            else:
                own = dims[at] if at < len(dims) else None
                parents = (after[at], operands[at])
                values.append(self._value("stablehlo.while", result, own, parents))
        return values

    def _branches(self, name: str, op: Any, place: _Place) -> list[Value]:
        """Every branch is counted: which one runs is not in the program."""
        dims = self.shardings.per_value(op)
        every = [
            self._block(region.blocks[0], _Place(dict(place.env), *_rest(place)))
            for region in op.regions
        ]
        return [
            self._value(
                name,
                result,
                dims[at] if at < len(dims) else None,
                tuple(values[at] for values in every),
            )
            for at, result in enumerate(op.results)
        ]

    def _manual(
        self, op: Any, operands: tuple[Value, ...], place: _Place
    ) -> list[Value]:
        """The body of a shard_map: its shapes are those of single devices."""
        block = op.regions[0].blocks[0]
        env = dict(place.env)
        for argument, operand in zip(block.arguments, operands, strict=True):
            value = self._value("manual", argument, None, (operand,))
            value.leaf = operand.leaf
            env[argument] = value
        inside = self._block(block, _Place(env, *_rest(place)))
        return [
            self._value("manual", result, None, (value,))
            for result, value in zip(op.results, inside, strict=True)
        ]

    # -------------------------------------------------------------- collectives

    def _all_reduce(self, op: Any, operand: Value, place: _Place) -> Value:
        axes = self.shardings.axes_in(op.attributes["reduction_axes"])
        dims = self.shardings.of(op.attributes["out_sharding"])
        value = self._value("sdy.all_reduce", op.results[0], dims, (operand,))
        if parts(axes) == 1:
            return value
        leaf = operand.operands[0].leaf if operand.name == "stablehlo.gather" else None
        scatters = self._scattered(op, axes)
        rest = tuple(axis for axis in axes if axis not in scatters)
        shape = value.local_shape
        if scatters:
            self._add("reduce-scatter", scatters, shape, value, op, place, leaf)
            value.sums = (len(self.found.collectives) - 1,)
            shape = (-(-math.prod(shape) // parts(scatters)),)
        if rest and parts(rest) > 1:
            self._add("all-reduce", rest, shape, value, op, place, leaf)
            value.sums = (*value.sums, len(self.found.collectives) - 1)
        value.index = value.sums[0] if value.sums else None
        value.shared = not scatters and is_shared(op.results[0])
        return value

    def _scattered(self, op: Any, axes: Sequence[AxisRef]) -> tuple[AxisRef, ...]:
        """The axes over which every user takes its own slice of the sum."""
        users = [use.owner for use in op.results[0].uses]
        if not users or any(user.operation.name != "sdy.all_slice" for user in users):
            return ()
        sliced = self.shardings.axes_in(users[0].operation.attributes["slicing_axes"])
        return tuple(axis for axis in axes if axis in sliced)

    def _added(self, operands: tuple[Value, ...]) -> tuple[int, ...]:
        """A sum of all-reduces is one all-reduce of a sum."""
        first, second = (() if one.shared else one.sums for one in operands)
        if not first or not second:
            return first or second
        if first == second or len(first) != len(second):
            return first
        found = self.found.collectives
        pairs = [(found[a], found[b]) for a, b in zip(first, second, strict=True)]
        if any(
            (a.kind, a.axes, a.scope) != (b.kind, b.axes, b.scope) for a, b in pairs
        ):
            return first
        for at, (_, other) in zip(first, pairs, strict=True):
            other.into = at
        return first

    def _move(self, name: str, op: Any, operand: Value, place: _Place) -> Value:
        dims = self.shardings.of(op.attributes["out_sharding"])
        value = self._value(name, op.results[0], dims, (operand,))
        value.leaf, value.base, value.order = operand.leaf, operand.root, operand.order
        value.is_uniform = operand.is_uniform
        if name == "sdy.all_slice" or value.is_uniform:
            value.sums, value.shared = operand.sums, operand.shared
            return value
        key = (place.scope, id(value.root), value.root_dims(), value.element)
        known = self.gathered.get(key) if name == "sdy.all_gather" else None
        if known is not None:
            value.index = known.index
            return value
        axes = changed_axes(name, operand.dims, dims)
        if parts(axes) > 1:
            kind = MOVING[name]
            self._add(kind, axes, value.local_shape, value, op, place, value.leaf)
            value.index = len(self.found.collectives) - 1
            self._note_move(name, op, operand, value, place)
        self.gathered[key] = value
        return value

    def _note_move(
        self, name: str, op: Any, operand: Value, value: Value, place: _Place
    ) -> None:
        earlier = self.found.moves.pop(id(operand), None)
        only = name == "sdy.all_gather"
        before = operand
        if earlier is not None:
            before, only = earlier.before, only and earlier.gathers_only
        location = location_of(op)
        move = Move(before, value, place.times, location, only)
        self.found.moves[id(value)] = move

    def _own_collective(
        self, name: str, op: Any, operands: tuple[Value, ...], place: _Place
    ) -> list[Value]:
        """A collective that the program itself asks for, inside of a shard_map."""
        values = [self._value(name, result, None, operands) for result in op.results]
        kind, axes = manual_collective(name, op, self.found.sizes)
        if kind is None:
            what = f"{name} over devices that are no mesh axes, not counted"
            self.found.unrecognised[what] += 1
            return values
        for operand, value in zip(operands, values, strict=True):
            whole = value if kind in ("all-gather", "all-to-all") else operand
            if parts(axes) > 1:
                self._add(kind, axes, whole.shape, value, op, place, operand.leaf)
        return values

    def _add(
        self,
        kind: Kind,
        axes: tuple[AxisRef, ...],
        shape: tuple[int, ...],
        value: Value,
        op: Any,
        place: _Place,
        leaf: int | None,
    ) -> None:
        found = Found(
            kind,
            axes,
            shape,
            value.element,
            place.times,
            location_of(op),
            place.scope,
            leaf,
        )
        self.found.collectives.append(found)

    # ------------------------------------------------------------------- values

    def _value(
        self,
        name: str,
        result: Any,
        dims: Dims | None,
        operands: tuple[Value, ...] = (),
    ) -> Value:
        kind = result.type
        known = self.types.get(kind)
        if known is None:
            known = self.types[kind] = shape_of(kind)
        shape, element = known
        if dims is None or len(dims) != len(shape):
            dims = ((),) * len(shape)
        return Value(name, operands, shape, element, dims)

    def _copy(
        self, name: str, op: Any, operands: tuple[Value, ...], value: Value, at: int
    ) -> None:
        """What of its operand a copy still is."""
        source = operands[at] if name == "stablehlo.optimization_barrier" else None
        source = operands[0] if source is None else source
        value.leaf, value.is_uniform = source.leaf, source.is_uniform
        if source.sums and "slice" not in name:
            value.sums, value.shared = source.sums, source.shared
        if name == "stablehlo.optimization_barrier":
            return  # nothing is shared across: so jax.checkpoint does not keep it
        order = source.order or tuple(range(len(source.shape)))
        if name == "stablehlo.transpose":
            moved = [int(dim) for dim in op.attributes["permutation"]]
            order = tuple(order[dim] for dim in moved)
        elif name in (
            "stablehlo.reshape",
            "stablehlo.slice",
            "stablehlo.dynamic_slice",
        ):
            given = tuple(
                str(op.attributes[key]) for key in _ATTRIBUTES if key in op.attributes
            )
            roots = tuple((id(one.root), one.order) for one in operands)
            key = (name, value.shape, value.dims, roots, given)
            first = self.copies.setdefault(key, value)
            value.base = None if first is value else first
            return
        value.base, value.order = source.root, order

    def _product(
        self,
        name: str,
        op: Any,
        operands: tuple[Value, ...],
        value: Value,
        place: _Place,
    ) -> None:
        """Adds the operations of a matrix product, or of a convolution."""
        if name == "stablehlo.convolution":
            kernel = operands[1]
            out = feature_size(op, kernel)
            local = math.prod(kernel.local_shape) // max(1, out)
            whole = math.prod(kernel.shape) // max(1, out)
        else:
            left = operands[0]
            dims = contracted(op)
            local = math.prod(left.local_shape[dim] for dim in dims)
            whole = math.prod(left.shape[dim] for dim in dims)
        self.found.flops += 2 * place.times * math.prod(value.local_shape) * local
        self.found.flops_whole += 2 * place.times * math.prod(value.shape) * whole


def _rest(place: _Place) -> tuple[int, Scope]:
    return place.times, place.scope


def listing(module: Any) -> Iterator[tuple[str, str, str, Dims]]:
    """Every array in a module: its operation, its place, its type, its axes."""
    shardings = Shardings(mesh_sizes(module))

    def walk(block: Any) -> Iterator[tuple[str, str, str, Dims]]:
        for op in block.operations:
            operation = op.operation
            for result, dims in zip(
                operation.results, shardings.per_value(operation), strict=False
            ):
                shape, element = shape_of(result.type)
                sizes = ",".join(map(str, shape))
                kind = f"{dtype_name(element)}[{sizes}]"
                name = operation.name.rpartition(".")[2]
                yield name, str(operation.location), kind, dims
            for region in operation.regions:
                for inner in region.blocks:
                    yield from walk(inner)

    for function in functions(module).values():
        for block in function.regions[0].blocks:
            yield from walk(block)
