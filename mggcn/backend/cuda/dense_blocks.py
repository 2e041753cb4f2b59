"""Blocks of the dense products on tensor cores, and the bytes that they need beside their operands; loads no torch.

Pure functions of shapes and types, so that bits repeat and a plan knows the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

COLUMNS = (16, 32, 64, 128)
"""Widths of blocks: powers of two from the least that tensor cores multiply."""
LINE = 64
"""Bytes to which sizes are rounded up."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a kernel is compiled: warps of a block, stages of its loads, most registers of a thread (0: no limit)."""

    warps: int = 4
    stages: int = 2
    registers: int = 0


@dataclass(frozen=True, slots=True)
class Blocks:
    """A block of a product: rows and columns of the result, and how much of the inner dimension is loaded at a time."""

    rows: int
    cols: int
    inner: int
    options: Options


NARROW = Blocks(64, 128, 64, Options(stages=3))
"""Of bfloat16. 256 x 256 on an H200: 0.116 ms with an epilogue, 0.149 as a gradient; six others 0.118 to 0.190."""
WIDE = Blocks(64, 128, 16, Options(stages=3, registers=168))
"""Of float32: three blocks on a multiprocessor. 256 x 256 on an H200, all of K in one sum: 0.261 ms, twelve others 0.268 to
0.410. With sums of 16 of K no other was tried (docs/notes/0038)."""
WIDE_GRAD = Blocks(64, 64, 16, Options(stages=3, registers=128))
"""Of gradients in float32, whose column sums take registers: four blocks. Chosen so: 0.346 ms, twelve others to 0.620."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def row_blocks(cols: int, item: int, *, gradient: bool = False) -> Blocks:
    """Return the blocks of h W, or of the gradient g W^T, for a result of so many columns of operands of `item` bytes."""
    blocks = NARROW if item == 2 else WIDE_GRAD if gradient else WIDE
    width = next((width for width in COLUMNS if cols <= width), COLUMNS[-1])
    return Blocks(blocks.rows, min(width, blocks.cols), blocks.inner, blocks.options)


def packed_shape(inner: int, cols: int, blocks: Blocks) -> tuple[int, int]:
    """Return the inner width and the columns of W as it is packed: whole blocks."""
    return ceil_div(inner, blocks.inner) * blocks.inner, ceil_div(cols, blocks.cols) * blocks.cols


def packed_bytes(inner: int, cols: int, item: int, blocks: Blocks) -> int:
    """Return the bytes of W (inner, cols) as it is packed, float32 in two parts."""
    rows, wide = packed_shape(inner, cols, blocks)
    return ceil_div((8 if item == 4 else item) * rows * wide, LINE) * LINE


def dense_bytes(d_in: int, d_out: int, item: int) -> int:
    """Return the most bytes of a layer's W, packed for its products and for those of its gradients."""
    back = (row_blocks(d_in, item, gradient=gradient) for gradient in (False, True))
    sizes = (packed_bytes(d_out, d_in, item, blocks) for blocks in back)
    return max(packed_bytes(d_in, d_out, item, row_blocks(d_out, item)), *sizes)
