"""Which dims of the operands and the result of a product go together."""

from typing import Any, NamedTuple

from flax_layoutmap.pod._operations import groups_of

PRODUCT, CONVOLUTION = "stablehlo.dot_general", "stablehlo.convolution"


class ProductDims(NamedTuple):
    """Dims of a matrix product, or of a convolution without those of its window.

    Attributes:
        own: for each of both operands, its dims that the other one does not have, and
            the dims of the result that are these.
        summed: the dims of both that are summed.
    """

    own: tuple[list[tuple[int, int]], list[tuple[int, int]]]
    summed: list[tuple[int, int]]


def product_dims(op: Any) -> ProductDims:
    """The dims of a product; none of a convolution in groups."""
    from jaxlib.mlir.dialects import stablehlo

    if op.name == CONVOLUTION:
        return _of_convolution(op)
    numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    left = list(numbers.lhs_contracting_dimensions)
    right = list(numbers.rhs_contracting_dimensions)
    shared = (
        {*numbers.lhs_batching_dimensions, *left},
        {*numbers.rhs_batching_dimensions, *right},
    )
    # A result has the dims of the batch, then those of each operand.
    at, own = len(numbers.lhs_batching_dimensions), []
    for operand, others in zip(op.operands, shared, strict=True):
        dims = [dim for dim in range(len(operand.type.shape)) if dim not in others]
        own.append([(dim, at + place) for place, dim in enumerate(dims)])
        at += len(dims)
    return ProductDims((own[0], own[1]), list(zip(left, right, strict=True)))


def _of_convolution(op: Any) -> ProductDims:
    from jaxlib.mlir.dialects import stablehlo

    if groups_of(op) != (1, 1):
        return ProductDims(([], []), [])
    numbers = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    rows = numbers.input_batch_dimension, numbers.output_batch_dimension
    columns = (
        numbers.kernel_output_feature_dimension,
        numbers.output_feature_dimension,
    )
    summed = (
        numbers.input_feature_dimension,
        numbers.kernel_input_feature_dimension,
    )
    return ProductDims(([rows], [columns]), [summed])


def summed_dims(op: Any) -> set[int]:
    """The dims of a value that the products it is used in sum over."""
    found: set[int] = set()
    for use in op.results[0].uses:
        user = use.owner.operation
        if user.name in (PRODUCT, CONVOLUTION):
            summed = product_dims(user).summed
            found.update(pair[use.operand_number] for pair in summed)
    return found
