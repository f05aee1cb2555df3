"""Products and slices that XLA's partitioner lays out otherwise than Shardy.

Shardy moves what is smallest: a few tokens to the rows of a kernel that a device has.
The partitioner goes by the layouts. An operand that is laid out as the result stays,
and the other one is gathered; and where both are sharded alike along a dim that is
summed, each device sums what it has, and the results are added up. For many tokens both
do the same. Convolutions are products of their batches and features. And that of which
a loop takes slices along a sharded dim, such as parts of a batch, is laid out as they
are; before the loop, if no more lies on a device then. Seen with the compilers for TPUs
and CPUs of jax 0.10, on 2026-11-22 and 2026-11-23.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from flax_layoutmap.pod._attributes import functions
from flax_layoutmap.pod._operations import maker_of
from flax_layoutmap.pod._product_dims import CONVOLUTION, PRODUCT, product_dims

_SLICE = "stablehlo.dynamic_slice"
_SAY_IT = ("sdy.sharding_constraint", "sdy.reshard")
# The axes of each dim, as jaxlib's attributes.
_Dims = list[list[Any]]


def lay_out_as_partitioner(module: Any) -> None:
    """Says where operands and results of products are moved, and what is sliced.

    Args:
        module: a module in which every value has its sharding, and none is moved yet;
            it is changed.
    """
    main = functions(module)["main"]
    given = main.attributes["arg_attrs"] if "arg_attrs" in main.attributes else ()
    block = main.regions[0].blocks[0]
    known = {
        argument: own["sdy.sharding"]
        for argument, own in zip(block.arguments, given, strict=False)
        if "sdy.sharding" in own
    }
    with module.context:
        for op in list(_concerned(block, known)):
            if op.name == _SLICE:
                _lay_out_whole(op, known)
            else:
                _lay_out(op, known)


def _concerned(block: Any, known: dict[Any, Any]) -> Iterator[Any]:
    """Products and slices in a block; what the loops in it begin with becomes known."""
    for op in block.operations:
        own = op.operation
        if own.name in (PRODUCT, CONVOLUTION, _SLICE):
            yield own
        # A shard_map says itself what is moved in it.
        if own.name == "sdy.manual_computation":
            continue
        for region in own.regions:
            for inner in region.blocks:
                if own.name == "stablehlo.while":
                    known.update(zip(inner.arguments, _shardings(own), strict=False))
                yield from _concerned(inner, known)


def _shardings(op: Any) -> Sequence[Any]:
    """Of each result of an operation; none where they are not said."""
    from jaxlib.mlir.dialects import sdy

    if "sdy.sharding" not in op.attributes:
        return ()
    return sdy.TensorShardingPerValueAttr(op.attributes["sdy.sharding"]).shardings


def _sharding_of(value: Any, known: dict[Any, Any]) -> Any:
    if value in known:
        return known[value]
    op = maker_of(value)
    if op is None:
        return None
    if op.name in _SAY_IT:
        return op.attributes["sharding"]
    found = _shardings(op)
    return found[list(op.results).index(value)] if found else None


def _lay_out(op: Any, known: dict[Any, Any]) -> None:
    """Adds what moves the operands of a product, and its result."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    shardings = [_sharding_of(operand, known) for operand in op.operands]
    wanted = _shardings(op)
    if not wanted or any(one is None for one in shardings):
        return
    operands, result = [_dims(one) for one in shardings], _dims(wanted[0])
    dims = product_dims(op)
    for at, pairs in enumerate(dims.own):
        other, before = 1 - at, operands[at]
        # The axes that an operand has where the result has them.
        stays = [x for dim, own in pairs for x in before[dim] if x in result[own]]
        gathered = _without(operands[other], stays)
        if gathered != operands[other]:
            sharding = _with_dims(shardings[other], gathered)
            with ir.InsertionPoint(op), op.location:
                moved = sdy.ReshardOp(op.operands[other], sharding).result
            op.operands[other], operands[other] = moved, gathered
    left, right = operands
    summed = [x for one, two in dims.summed for x in left[one] if x in right[two]]
    added = _without(result, summed)
    if added != result:
        own = [_with_dims(wanted[0], added)]
        op.attributes["sdy.sharding"] = sdy.TensorShardingPerValueAttr.get(own)
        with ir.InsertionPoint.after(op), op.location:
            moved = sdy.ReshardOp(op.results[0], wanted[0])
        op.results[0].replace_all_uses_except(moved.result, moved.operation)


def _lay_out_whole(op: Any, known: dict[Any, Any]) -> None:
    """Adds what moves an array from outside of a loop that a slice is taken of."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    array, wanted = op.operands[0], _shardings(op)
    sharding = _sharding_of(array, known)
    if sharding is None or op.block == _home_of(array):
        return
    before = _dims(sharding)
    sliced = _dims(wanted[0]) if wanted else [[] for _ in before]
    pairs = list(zip(array.type.shape, op.results[0].type.shape, strict=True))
    if not any(axes and a != b for axes, (a, b) in zip(before, pairs, strict=True)):
        return
    after = [axes if a == b else [] for axes, (a, b) in zip(sliced, pairs, strict=True)]
    grows = set(map(str, sum(before, []))) - set(map(str, sum(after, [])))
    anchor = op
    while not grows and anchor.block != _home_of(array):
        anchor = anchor.parent
    with ir.InsertionPoint(anchor), op.location:
        op.operands[0] = sdy.ReshardOp(array, _with_dims(sharding, after)).result


def _home_of(value: Any) -> Any:
    """The block in which a value is made, or that begins with it."""
    maker = maker_of(value)
    return value.owner if maker is None else maker.block


def _without(dims: _Dims, gone: Iterable[Any]) -> _Dims:
    gone = list(gone)
    return [[axis for axis in axes if axis not in gone] for axes in dims]


def _dims(sharding: Any) -> _Dims:
    from jaxlib.mlir.dialects import sdy

    dims = sdy.TensorShardingAttr(sharding).dimension_shardings
    return [list(sdy.DimensionShardingAttr(dim).axes) for dim in dims]


def _with_dims(sharding: Any, dims: _Dims) -> Any:
    from jaxlib.mlir.dialects import sdy

    made = [sdy.DimensionShardingAttr.get(axes, True) for axes in dims]
    mesh = sdy.TensorShardingAttr(sharding).mesh_or_ref
    return sdy.TensorShardingAttr.get(mesh, made)
