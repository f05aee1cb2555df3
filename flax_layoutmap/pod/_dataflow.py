"""Where the values of a laid-out module come from, and which all-reduces are one.

Values are made when something asks for them: collectives, matrix products and their
operands are a small part of a program.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from flax_layoutmap.pod._mlir import Attributes, AxisRef, Dims
from flax_layoutmap.pod._shardy_ops import is_shared, maker_of
from flax_layoutmap.pod._values import Found, Value

_BARRIER = "stablehlo.optimization_barrier"
_MOVED = ("sdy.all_gather", "sdy.all_slice", "sdy.all_to_all", "sdy.collective_permute")

# What copies or converts elements, or takes some, and changes none of them.
_COPIES = frozenset(
    {
        "stablehlo.transpose",
        "stablehlo.reshape",
        "stablehlo.convert",
        "stablehlo.slice",
        "stablehlo.dynamic_slice",
        _BARRIER,
    }
)
# Attributes that tell two of these apart.
_ATTRIBUTES = ("permutation", "start_indices", "limit_indices", "strides")

# Through these an update reaches a parameter, and from them a gradient is found.
_UPDATES = frozenset(
    {
        *_COPIES,
        *_MOVED,
        "sdy.sharding_constraint",
        "sdy.reshard",
        "stablehlo.add",
        "stablehlo.subtract",
        "stablehlo.multiply",
        "stablehlo.divide",
        "stablehlo.negate",
        "stablehlo.select",
        "stablehlo.sqrt",
        "stablehlo.rsqrt",
        "stablehlo.power",
        "stablehlo.maximum",
        "stablehlo.minimum",
        "stablehlo.clamp",
        "stablehlo.abs",
        "stablehlo.sign",
        "stablehlo.concatenate",
        "stablehlo.dynamic_update_slice",
        "stablehlo.while",
        "stablehlo.custom_call",
    }
)


class Dataflow:
    """The values of one module.

    Args:
        attributes: reads its operations.

    Attributes:
        attributes: reads its operations.
    """

    def __init__(self, attributes: Attributes) -> None:
        self.attributes = attributes
        self._known: dict[Any, Value] = {}
        self._sources: dict[Any, Sequence[Any]] = {}
        self._copies: dict[Any, Value] = {}

    def of(self, value: Any) -> Value:
        """The value that an operation makes, or that a block was said to begin with."""
        found = self._known.get(value)
        if found is not None:
            return found
        # As a loop: a chain of copies may be longer than Python's stack.
        chain, one = [], value
        while one not in self._known:
            op = maker_of(one)
            if op is None:  # of a block that nothing is read of
                self.say(one, self.new("unknown", one))
                break
            chain.append(op)
            if op.name not in _COPIES:
                break
            one = op.operands[_place_of(one, op)]
        for op in reversed(chain):
            for at, made in enumerate(self.results(op)):
                if op.name in _COPIES:
                    self._copy(op, at, made)
        return self._known[value]

    def say(self, value: Any, made: Value, sources: Sequence[Any] = ()) -> Value:
        """Says what a value is, and what it is made from where no operands tell."""
        self._known[value] = made
        if sources:
            self._sources[value] = sources
        return made

    def new(self, name: str, result: Any, dims: Dims | None = None) -> Value:
        """A value of the type of a result, laid out so; None is replicated."""
        shape, element = self.attributes.type_of(result)
        if dims is None or len(dims) != len(shape):
            dims = ((),) * len(shape)
        return Value(name, shape, element, dims)

    def results(self, op: Any) -> list[Value]:
        """A new value for each result of an operation, as its sharding says."""
        dims = self.attributes.per_value(op)
        return [
            self.say(
                result, self.new(op.name, result, dims[at] if at < len(dims) else None)
            )
            for at, result in enumerate(op.results)
        ]

    def gradients_of(self, value: Any, seen: set[Any]) -> Iterator[Value]:
        """The sums from which a new value of a parameter is made.

        Args:
            value: the new value, a result of the step.
            seen: values that were looked at, which are not looked at again.
        """
        todo = [value]
        while todo:
            one = todo.pop()
            if one in seen:
                continue
            seen.add(one)
            known, op = self._known.get(one), maker_of(one)
            if known is not None and known.index is not None:
                if known.name in ("sdy.all_reduce", "sdy.all_gather"):
                    yield known
                if known.name == "sdy.all_reduce":
                    continue
            if one in self._sources:
                todo += self._sources[one]
            elif op is not None and (op.name in _UPDATES or self._is_reshape(op)):
                todo += op.operands

    def _copy(self, op: Any, at: int, value: Value) -> None:
        """What of its operand a copy still is; equal copies are one value."""
        result, name = op.results[at], op.name
        source = self.of(op.operands[at if name == _BARRIER else 0])
        value.leaf = source.leaf
        if source.sums and "slice" not in name:
            value.sums = source.sums
            value.shared = source.shared or is_shared(result)
        if name == _BARRIER:
            return  # nothing is shared across: so jax.checkpoint does not keep it
        given = tuple(op.attributes[key] for key in _ATTRIBUTES if key in op.attributes)
        sources = tuple(id(self.of(one)) for one in op.operands)
        key = name, value.shape, value.element, value.dims, sources, given
        self.say(result, self._copies.setdefault(key, value))

    def _is_reshape(self, op: Any) -> bool:
        """Whether a broadcast only adds dims of size 1."""
        if op.name != "stablehlo.broadcast_in_dim":
            return False
        ends = (op.operands[0], op.results[0])
        before, after = (self.attributes.type_of(value)[0] for value in ends)
        return math.prod(before) == math.prod(after)


def _place_of(value: Any, op: Any) -> int:
    """Which operand of an operation that copies a result is a copy of."""
    return list(op.results).index(value) if op.name == _BARRIER else 0


# Between a sum and the slices that are taken of it, the compiler moves these behind.
_LOOKED_THROUGH = ("stablehlo.transpose", "stablehlo.convert", "stablehlo.reshape")


def scattered(
    op: Any, axes: Sequence[AxisRef], attributes: Attributes
) -> tuple[AxisRef, ...]:
    """The axes over which every user takes its own slice of the sum."""
    left = tuple(axes)
    todo = [op.results[0]]
    for value in todo:
        users = [use.owner.operation for use in value.uses]
        for user in users:
            if user.name == "sdy.all_slice":
                sliced = attributes.axes_in(user.attributes["slicing_axes"])
                left = tuple(axis for axis in left if axis in sliced)
            elif user.name in _LOOKED_THROUGH and _keeps_dims(user, left, attributes):
                todo.append(user.results[0])
            else:
                return ()
        if not users:
            return ()
    return left


def _keeps_dims(op: Any, axes: Sequence[AxisRef], attributes: Attributes) -> bool:
    """Whether the dims that are sliced after an operation are dims before it, too."""
    if op.name != "stablehlo.reshape":
        return True
    ends = op.operands[0], op.results[0]
    before, after = (attributes.type_of(one)[0] for one in ends)
    same = {(math.prod(before[:dim]), size) for dim, size in enumerate(before)}
    for use in op.results[0].uses:
        user = use.owner.operation
        if user.name != "sdy.all_slice":
            return False
        for dim, own in enumerate(attributes.of(user.attributes["out_sharding"])):
            if not set(axes).isdisjoint(own):
                if (math.prod(after[:dim]), after[dim]) not in same:
                    return False
    return True


def added(
    found: Sequence[Found], first: tuple[int, ...], second: tuple[int, ...]
) -> tuple[int, ...]:
    """The sums in a sum; those of the second become one with those of the first.

    Args:
        found: all collectives.
        first: positions of the sums in one value.
        second: of those in the value that is added.
    """
    if not first or not second:
        return ()  # with something else between them, the compiler adds them apart
    if first == second or len(first) != len(second):
        return first
    pairs = [(found[a], found[b]) for a, b in zip(first, second, strict=True)]
    if any((a.kind, a.axes, a.scope) != (b.kind, b.axes, b.scope) for a, b in pairs):
        return first
    for at, (_, other) in zip(first, pairs, strict=True):
        other.into = at
    return first


def gathered_from(op: Any, values: Dataflow) -> int | None:
    """The argument from which a `gather` took what is summed here: an embedding."""
    maker = maker_of(op.operands[0])
    if maker is None or maker.name != "stablehlo.gather":
        return None
    return values.of(maker.operands[0]).leaf
