"""The values of a laid-out program, each made when something asks for it.

What a plan reads is a small part of a program: collectives, matrix products, and where
their operands come from. The rest is not looked at.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from flax_layoutmap.pod._attributes import Attributes, Dims
from flax_layoutmap.pod._operations import MOVING, is_shared, maker_of, users_of
from flax_layoutmap.pod._product_dims import CONVOLUTION
from flax_layoutmap.pod._values import MOVES, UNIFORM, UPDATES, Value

# Attributes that tell two operations of one name apart.
_ATTRIBUTES = ("permutation", "start_indices", "limit_indices", "strides")
_BROADCAST, _REVERSE = "stablehlo.broadcast_in_dim", "stablehlo.reverse"
# What is read of these may depend on their first operand.
_FOLLOWED = MOVES | {_BROADCAST, _REVERSE}
_CUTS = frozenset({"stablehlo.reshape", "stablehlo.slice", "stablehlo.dynamic_slice"})
# A cache that is written to is still that cache.
_WRITES = ("stablehlo.dynamic_update_slice", "stablehlo.scatter")
_BARRIER = "stablehlo.optimization_barrier"
# Their regions use no values from outside.
_PURE = frozenset(
    {
        "stablehlo.reduce",
        "stablehlo.reduce_window",
        "stablehlo.scatter",
        "stablehlo.select_and_scatter",
        "stablehlo.sort",
    }
)
_SUMS = ("sdy.all_reduce", "stablehlo.scatter")


class Dataflow:
    """The values of one module.

    Args:
        attributes: reads its operations.
        for_tpus: whether the kernel of a convolution that is transposed, which JAX
            reverses, counts as what it was: the compiler for TPUs gathers both once.

    Attributes:
        attributes: reads its operations.
    """

    def __init__(self, attributes: Attributes, *, for_tpus: bool) -> None:
        self.attributes = attributes
        self._for_tpus = for_tpus
        self._known: dict[Any, Value] = {}
        self._sources: dict[Any, Sequence[Any]] = {}
        self._copies: dict[Any, Value] = {}
        self._entered: dict[Any, Any] = {}

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
            if op.name not in _FOLLOWED or not len(op.operands):
                break
            one = op.operands[0]
        for op in reversed(chain):
            self._make(op)
        return self._known[value]

    def every(self, values: Iterable[Any]) -> tuple[Value, ...]:
        """The same for several."""
        return tuple(map(self.of, values))

    def with_sums(self, value: Any) -> Value | None:
        """The same where it may be a sum of all-reduces; else it is not made."""
        found = self._known.get(value)
        if found is None:
            op = maker_of(value)
            if op is not None and op.name in MOVES:
                found = self.of(value)
        return found if found is not None and found.sums else None

    def say(self, value: Any, made: Value, sources: Sequence[Any] = ()) -> Value:
        """Says what a value is, and what it is made from where no operands tell."""
        self._known[value] = made
        if sources:
            self._sources[value] = sources
        return made

    def enter(self, argument: Any, operand: Any, made: Value | None = None) -> Value:
        """Says that an argument of a block is a value from outside of it.

        Args:
            argument: the argument.
            operand: the value.
            made: what it is inside; None for the same.
        """
        self._entered[argument] = operand
        return self.say(argument, self.of(operand) if made is None else made)

    def is_from_outside(self, value: Any, op: Any) -> bool:
        """Whether a value that an operation uses is from outside of its block."""
        maker = maker_of(value)
        home = value.owner if maker is None else maker.block
        return value in self._entered or home != op.block

    def leaf_of(self, value: Any) -> int | None:
        """The argument that a value was found to be, or a part of."""
        found = self._known.get(value)
        return None if found is None else found.leaf

    def ingredients(self, value: Any) -> tuple[Sequence[Any] | None, bool]:
        """What a value is made from, and whether it is but a part or a copy of that.

        Returns:
            None where that is not known: of what changes from round to round.
        """
        if value in self._entered:
            return (self._entered[value],), True
        if value in self._sources:
            return self._sources[value], True
        op = maker_of(value)
        if op is None or len(op.regions) and op.name not in _PURE:
            return None, False
        if op.name == _BARRIER:
            return (op.operands[list(op.results).index(value)],), True
        if op.name in MOVES or op.name in _WRITES:
            return (op.operands[0],), True
        return tuple(op.operands), False

    def new(self, name: str, result: Any, dims: Dims | None = None) -> Value:
        """A value of the type of a result, laid out so; None is replicated."""
        shape, element = self.attributes.type_of(result)
        if dims is None or len(dims) != len(shape):
            dims = ((),) * len(shape)
        return Value(name, shape, element, dims)

    def results(self, op: Any) -> list[Value]:
        """A new value for each result of an operation, as its sharding says."""
        dims, name = self.attributes.per_value(op), op.name
        values = []
        for at, result in enumerate(op.results):
            made = self.new(name, result, dims[at] if at < len(dims) else None)
            values.append(made)
            self._known[result] = made
        return values

    def gradients_of(
        self, value: Any, seen: dict[Any, int], at: int = 0
    ) -> Iterator[Value]:
        """The sums from which a new value of a parameter is made.

        Args:
            value: the new value, a result of the step.
            seen: values that were looked at, which are not looked at again, and for
                which result.
            at: the position of this one.
        """
        todo = [value]
        while todo:
            one = todo.pop()
            if one in seen:
                continue
            seen[one] = at
            known, op = self._known.get(one), maker_of(one)
            if known is not None and known.index is not None:
                if known.name in _SUMS or known.name == "sdy.all_gather":
                    yield known
                if known.name in _SUMS:
                    continue
            if one in self._sources:
                todo += self._sources[one]
            elif op is not None and (op.name in UPDATES or self._is_reshape(op)):
                todo += op.operands

    def _make(self, op: Any) -> None:
        name = op.name
        values = self.results(op)
        if name in UNIFORM:
            values[0].is_uniform = True
        elif name == _BROADCAST:
            source = self.of(op.operands[0])
            values[0].is_uniform = not source.shape or source.is_uniform
        elif name in MOVES or self._for_tpus and _is_transposed_kernel(op):
            for at, value in enumerate(values):
                source = self.of(op.operands[at if name == _BARRIER else 0])
                self._copy(name, op, source, value)
                if value.sums and not value.shared:
                    value.shared = is_shared(op.results[at])

    def _copy(self, name: str, op: Any, source: Value, value: Value) -> None:
        """What of its operand a copy still is."""
        value.leaf, value.is_uniform = source.leaf, source.is_uniform
        if source.sums and "slice" not in name:
            value.sums, value.shared = source.sums, source.shared
        if name == _BARRIER:
            return  # nothing is shared across: so jax.checkpoint does not keep it
        if name in _CUTS:
            given = tuple(
                str(op.attributes[key]) for key in _ATTRIBUTES if key in op.attributes
            )
            operands = self.every(op.operands)
            roots = tuple((id(one.root), one.order) for one in operands)
            key = (name, value.shape, value.dims, roots, given)
            first = self._copies.setdefault(key, value)
            value.base = None if first is value else first
            return
        order = source.order or tuple(range(len(source.shape)))
        if name == "stablehlo.transpose":
            moved = [int(dim) for dim in op.attributes["permutation"]]
            order = tuple(order[dim] for dim in moved)
        value.base, value.order = source.root, order

    def _is_reshape(self, op: Any) -> bool:
        """Whether a broadcast only adds dims of size 1."""
        if op.name != _BROADCAST:
            return False
        ends = (op.operands[0], op.results[0])
        before, after = (self.attributes.type_of(value)[0] for value in ends)
        return math.prod(before) == math.prod(after)


def _is_transposed_kernel(op: Any) -> bool:
    """Whether an operation reverses what convolutions alone use, moved or not."""
    return op.name == _REVERSE and all(map(_is_for_convolutions, users_of(op)))


def _is_for_convolutions(user: Any) -> bool:
    if user.name in MOVING:
        return all(map(_is_for_convolutions, users_of(user)))
    return user.name == CONVOLUTION


def decided(value: Any, known: dict[Any, Any], look: Callable[[Any], Any]) -> Any:
    """What is decided of a value, and first of those that it depends on.

    Args:
        value: the value.
        known: what was decided before; it grows.
        look: decides of a value, or says of which one to decide before.
    """
    todo = [value]
    while todo:  # as a loop: a chain may be longer than Python's stack
        one = todo[-1]
        if one not in known:
            after = look(one)
            if after is not None:
                todo.append(after)
                continue
        todo.pop()
    return known[value]
