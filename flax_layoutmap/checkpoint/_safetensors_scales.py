"""Multiply the numbers of float8 and MXFP4 tensors by the scales of their blocks."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from flax_layoutmap.checkpoint._mapping_blocks import Piece

# Elements that are multiplied at once, in float32.
_PRODUCTS = 1 << 20


@dataclasses.dataclass(frozen=True)
class Scales:
    """The scale of each block of a tensor with so many columns."""

    values: np.ndarray
    block: int
    columns: int

    def multiply(self, piece: Piece, found: np.ndarray) -> None:
        """Fill a piece with the products of its elements and their scales.

        `found` has the elements, in the shape of the piece.
        """
        if found.size > _PRODUCTS and found.ndim:
            rows = max(1, _PRODUCTS * len(found) // found.size)
            if rows < len(found):
                for start in range(0, len(found), rows):
                    stop = min(start + rows, len(found))
                    self.multiply(piece.rows(start, stop), found[start:stop])
                return
        scale = self.values[self._blocks(piece)]
        product = np.multiply(found.astype(np.float32), scale)
        np.copyto(piece.out, product, casting="unsafe")

    def _blocks(self, piece: Piece) -> tuple[np.ndarray, np.ndarray]:
        """Row and column of the scale of each element."""
        row, column = map(np.asarray, divmod(piece.offset, self.columns))
        for dim, (size, stride) in enumerate(
            zip(piece.out.shape, piece.strides, strict=True)
        ):
            along = np.arange(size).reshape(-1, *[1] * (piece.out.ndim - dim - 1))
            if stride % self.columns == 0:
                row = row + along * (stride // self.columns)
            else:
                column = column + along * stride
        return row // self.block, column // self.block


# Each byte of MXFP4 as its two numbers: the low four bits come first.
_BYTES = np.arange(256, dtype=np.uint8)
_NUMBERS = np.stack([_BYTES & 15, _BYTES >> 4], axis=-1).view(jnp.float4_e2m1fn)
_PAIRS = _NUMBERS.astype(np.float32)


def from_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The numbers of some blocks, (n, 16) of uint8, in float32: (32 n,).

    A scale is a power of two, and its byte the exponent plus 127 (float8_e8m0fnu):
    https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
    """
    numbers = _PAIRS[blocks]
    numbers *= scales.view(jnp.float8_e8m0fnu).astype(np.float32)[:, None, None]
    return numbers.reshape(-1)
