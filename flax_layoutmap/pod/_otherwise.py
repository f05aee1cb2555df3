"""Operations of which the compiler moves other things than Shardy says.

Shardy has a rule for each: a dim stays sharded, or something is moved before or after
it. XLA's partitioner has its own way with them, or none, and then gathers everything.
Seen with the compilers for TPUs and CPUs of jax 0.10.2, over eight devices, on
2026-11-22.
"""

from collections.abc import Container, Iterable, Iterator
from typing import Any

from flax_layoutmap.pod._attributes import Dims
from flax_layoutmap.pod._dataflow import Dataflow
from flax_layoutmap.pod._lookup_ops import GATHER, SCATTER
from flax_layoutmap.pod._manual import target_of
from flax_layoutmap.pod._operations import MOVING, is_asked, maker_of
from flax_layoutmap.pod._shifts import shifts
from flax_layoutmap.pod._slices import TOP_K
from flax_layoutmap.pod._values import parts

JOIN = "stablehlo.concatenate"
GATHERED, PERMUTE = "sdy.all_gather", "sdy.collective_permute"
POOL_GRADIENT = "stablehlo.select_and_scatter"
# Of a lookup, of what is joined, and of a custom call something else is read first.
OTHERWISE = (
    "stablehlo.fft",
    "stablehlo.cholesky",
    "stablehlo.triangular_solve",
    "stablehlo.reshape",
)

_MOVES = (*MOVING, "sdy.all_slice")
_CALL = "stablehlo.custom_call"
# Of matrices, in the last two dims.
_SOLVERS = (
    "stablehlo.cholesky",
    "stablehlo.triangular_solve",
    "Qr",
    "ProductOfElementaryHouseholderReflectors",
    "CompactWyHelper",
)
# The compiler for TPUs gathers a batch of matrices, too.
_WHOLE_BATCHES = ("Eigh", "LuDecomposition")
_LARGEST = ("ApproxTopK", "PartialReduce")
# Custom calls that change nothing, or are counted elsewhere.
_PLAIN = (
    "Sharding",
    "annotate_device_placement",
    "xla.sdy",
    "LayoutConstraint",
    "MoveTo",
    "X64",
)


class Otherwise:
    """Says what a compiler does otherwise.

    Args:
        values: the values of a program that Shardy has laid out.
        for_tpus: whether the compiler is that for TPUs.
    """

    def __init__(self, values: Dataflow, *, for_tpus: bool) -> None:
        self._values = values
        self._attributes = values.attributes
        self._for_tpus = for_tpus

    def says(self, op: Any) -> str | None:
        """What an operation is called that is not counted as it is done; or None."""
        name = target_of(op)
        if name == TOP_K:
            # The others gather a batch, too.
            is_moved = not self._for_tpus and self._is_sharded(op, None)
        else:
            is_moved = not name.startswith(_PLAIN) and self._is_moved(op, name)
        if not is_moved:
            return None
        short = "top_k" if name == TOP_K else name.removeprefix("stablehlo.")
        return f"{short} along a sharded dim, not counted as XLA moves it"

    def _is_moved(self, op: Any, name: str) -> bool:
        if name in (GATHER, SCATTER):
            return self._looks_up(op) or self._writes_over_borders(op)
        if name == JOIN:
            return self._joins_unevenly(op)
        if name == "stablehlo.reshape":
            return self._is_cut_anew(op)
        if name in _LARGEST:
            dim = _reduced(op)
            found = self._before(op.operands)
            return any(dims and parts(dims[dim]) > 1 for dims in found)
        if name == "stablehlo.fft":
            over = len(list(op.attributes["fft_length"]))
            return self._is_sharded(op, over if self._for_tpus else None)
        if name in (*_SOLVERS, *_WHOLE_BATCHES):
            return self._is_sharded(op, None if name in _WHOLE_BATCHES else 2)
        if op.name != _CALL:
            return False
        batch, layouts = _batch_dims(op), self._before(op.operands)
        return any(parts(axes) > 1 for dims in layouts for axes in dims[batch:])

    def leaves_out(self, op: Any) -> bool:
        """Whether a gather is not done: every device adds, or writes, what is its own.

        So it is with what windows that do not overlap chose (the gradient of a pool),
        and with places that each row has for itself, one element each (a cache).
        """
        uses = list(op.results[0].uses)
        if len(uses) != 1 or is_asked(op, self._attributes):
            return False
        user, at = uses[0].owner.operation, uses[0].operand_number
        if user.name == POOL_GRADIENT and at == 1:
            chosen = self._values.of(op.operands[0]).dims
            layout = self._attributes.per_value(user)
            return (
                bool(layout)
                and layout[0] == chosen
                and not shifts(user, chosen, self._attributes)
            )
        return user.name == SCATTER and at == 0 and self._writes_its_own(op, user)

    def _writes_its_own(self, op: Any, user: Any) -> bool:
        """Whether the gather before a scatter makes whole what it is cut into again."""
        before = self._values.of(op.operands[0]).dims
        own, _, _ = _dims_of_lookup(user)
        if len(user.operands) != 3 or not own:
            return False
        after = self._attributes.per_value(user)
        gone = [dim for dim, axes in enumerate(before) if axes and not after[0][dim]]
        backs = [use.owner.operation for use in user.results[0].uses]
        if not all(
            one.name == "sdy.all_slice"
            and self._attributes.of(one.attributes["out_sharding"]) == before
            for one in backs
        ):
            return False
        sizes = _window_sizes(user, self._attributes.type_of(user.operands[2])[0])
        given = (self._before([one]) for one in user.operands[1:])
        moved = {name for dim in gone for name, _ in before[dim]}
        return (
            bool(backs)
            and all(dim not in own and sizes.get(dim, 1) == 1 for dim in gone)
            and not any(_axes(layouts, ()) & moved for layouts in given)
        )

    # ----------------------------------------------------------------- of layouts

    def _is_sharded(self, op: Any, last: int | None) -> bool:
        """Whether an operand or a result is sharded along one of some last dims.

        Args:
            op: the operation.
            last: how many dims of its first operand that are; None for all.
        """
        ndim = len(self._attributes.type_of(op.operands[0])[0])
        batch = 0 if last is None else ndim - last
        layouts = (*self._before(op.operands), *self._after(op))
        return any(parts(axes) > 1 for dims in layouts for axes in dims[batch:])

    def _before(self, values: Iterable[Any]) -> Iterator[Dims]:
        """How values lie, here and before Shardy moves them."""
        for value in values:
            yield self._values.of(value).dims
            maker = maker_of(value)
            while maker is not None and self._moves(maker):
                value = maker.operands[0]
                yield self._values.of(value).dims
                maker = maker_of(value)

    def _after(self, op: Any) -> Iterator[Dims]:
        """How results lie, here and where Shardy moves them."""
        yield from self._attributes.per_value(op)
        todo = list(op.results)
        for value in todo:
            for use in value.uses:
                user = use.owner.operation
                if self._moves(user):
                    yield self._attributes.of(user.attributes["out_sharding"])
                    todo.append(user.results[0])

    def _moves(self, op: Any) -> bool:
        return op.name in _MOVES and not is_asked(op, self._attributes)

    # -------------------------------------------------------------- one by one

    def _joins_unevenly(self, op: Any) -> bool:
        """Whether arrays are joined along a sharded dim that is not cut evenly."""
        from jaxlib.mlir import ir

        dim = ir.IntegerAttr(op.attributes["dimension"]).value
        sizes = [self._attributes.type_of(one)[0][dim] for one in op.operands]
        layouts = (*self._before(op.operands), *self._after(op))
        cuts = max((parts(dims[dim]) for dims in layouts), default=1)
        return any(size % cuts for size in sizes)

    def _is_cut_anew(self, op: Any) -> bool:
        """Whether a reshape is in more parts than its result, as on jax 0.8."""
        per_value = self._attributes.per_value(op)
        if not per_value:
            return False
        before = self._values.of(op.operands[0]).dims
        return _count(before) != _count(per_value[0])

    def _writes_over_borders(self, op: Any) -> bool:
        """Whether what is written is longer than an element along a sharded dim.

        On jax 0.8 Shardy leaves that as it is.
        """
        if op.name != SCATTER:
            return False
        shape = self._attributes.type_of(op.operands[0])[0]
        sizes = _window_sizes(op, self._attributes.type_of(op.operands[-1])[0])
        dims = self._values.of(op.operands[0]).dims
        return any(
            parts(dims[dim]) > 1 and 1 < size < shape[dim]
            for dim, size in sizes.items()
        )

    def _looks_up(self, op: Any) -> bool:
        """Whether places are sharded over an axis that cuts what they are places in.

        Where each row has its own places, both are cut alike, and nothing is moved.
        """
        count = (len(op.operands) - 1) // 2 if op.name == SCATTER else 1
        tables, places = op.operands[:count], op.operands[count]
        own, at, window = _dims_of_lookup(op)
        table = [*self._before(tables)]
        rows = [*self._before(op.operands[count + 1 :])]
        (table if op.name == SCATTER else rows).extend(self._after(op))
        cut = _axes(table, own)
        return bool(cut & (_axes(self._before([places]), {at}) | _axes(rows, window)))


def adds_places(op: Any, values: Dataflow) -> bool:
    """Whether the TPU compiler sorts the places of elements with them.

    It does so where equal elements are to keep their order, and no places are there.
    """
    from jaxlib.mlir import ir

    is_stable = "is_stable" in op.attributes
    if not is_stable or not ir.BoolAttr(op.attributes["is_stable"]).value:
        return False
    return not any(values.of(one).is_uniform for one in _first(op))


def _first(op: Any) -> Iterator[Any]:
    """What an operation works on, before it is moved."""
    for value in op.operands:
        maker = maker_of(value)
        while maker is not None and maker.name in _MOVES:
            value = maker.operands[0]
            maker = maker_of(value)
        yield value


def _count(dims: Dims) -> int:
    """Into how many parts an array is cut."""
    return parts([axis for axes in dims for axis in axes])


def moves_parts(op: Any, values: Dataflow) -> bool:
    """Whether Shardy moves a value between layouts with parts of an axis.

    So it does where a dim is taken apart that is cut into more parts than come out: six
    heads over four devices. The partitioner gathers.
    """
    sizes, layouts = values.attributes.sizes, (op.operands[0], op.results[0])
    return not is_asked(op, values.attributes) and any(
        sizes.get(name) != size
        for value in layouts
        for axes in values.of(value).dims
        for name, size in axes
    )


def _axes(layouts: Iterable[Dims], leaves_out: Container[int]) -> set[str]:
    """The axes of the other dims."""
    return {
        name
        for dims in layouts
        for dim, axes in enumerate(dims)
        if dim not in leaves_out
        for name, size in axes
        if size > 1
    }


def _dims_of_lookup(op: Any) -> tuple[set[int], int, set[int]]:
    """Which dims say nothing of where something is looked up.

    Returns:
        Of the table, those in which each row has its own places; of the places, the one
        along which one place is written; of what is taken or added, those within it.
    """
    from jaxlib.mlir.dialects import stablehlo

    if op.name == GATHER:
        takes = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
        own, window = takes.operand_batching_dims, takes.offset_dims
        return {*own}, takes.index_vector_dim, {*window}
    adds = stablehlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    own, window = adds.input_batching_dims, adds.update_window_dims
    return {*own}, adds.index_vector_dim, {*window}


def _window_sizes(op: Any, shape: tuple[int, ...]) -> dict[int, int]:
    """How much a scatter writes at once along each dim of a table, but those of one.

    Args:
        op: the scatter.
        shape: of what is written.
    """
    from jaxlib.mlir.dialects import stablehlo

    adds = stablehlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    gone = {*adds.inserted_window_dims, *adds.input_batching_dims}
    left = [dim for dim in range(len(op.operands[0].type.shape)) if dim not in gone]
    return dict(zip(left, (shape[dim] for dim in adds.update_window_dims), strict=True))


def _reduced(op: Any) -> int:
    """The dim of which the largest elements are looked for."""
    from jaxlib.mlir import ir

    given = ir.DictAttr(op.attributes["mhlo.backend_config"])
    return ir.IntegerAttr(given["reduction_dim"]).value


def _batch_dims(op: Any) -> int:
    """How many first dims of its operands a custom call goes through one by one."""
    from jaxlib.mlir import ir

    if "mhlo.frontend_attributes" not in op.attributes:
        return 0
    given = ir.DictAttr(op.attributes["mhlo.frontend_attributes"])
    if "num_batch_dims" not in given:
        return 0
    return int(ir.StringAttr(given["num_batch_dims"]).value)
