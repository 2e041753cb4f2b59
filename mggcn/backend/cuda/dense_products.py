"""Dense products on tensor cores, and what follows them in the same kernel: launches of cuda/dense.py.

V rows, D input width, E output width. Arguments are those of KernelBackend; dense_blocks.py has the blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mggcn.backend.base import Epilogue, Gradient
from mggcn.backend.cuda.dense_blocks import (
    Blocks,
    Options,
    ceil_div,
    packed_bytes,
    packed_shape,
    row_blocks,
)
from mggcn.backend.cuda.triton_kernels import Args, BlockKernels

PACK_BLOCK = 1024
PRODUCTS = {1: "one product", 2: "three products"}
"""Of numbers in so many parts, of which the product of both lower ones is left out."""
NO_EPILOGUE = Epilogue()


class DenseProducts:
    """Products of one rank, in float32 of so many parts or in bfloat16.

    workspace: uint8, dense_bytes of the largest product. parts: 2, or 1 for products of TF32.
    """

    def __init__(self, kernels: BlockKernels, workspace: Tensor, parts: int) -> None:
        self._kernels, self._workspace, self._parts = kernels, workspace, parts

    @property
    def name(self) -> str:
        """How float32 is multiplied, for the record of a run."""
        return f"Triton, float32 as {PRODUCTS[self._parts]} of TF32"

    def take(self, a: Tensor, b: Tensor) -> bool:
        """Return whether these kernels multiply a and b: rows of float32 or bfloat16, and room for b, as for layers.

        h^T g is cuBLAS's: split into TF32 here, 256 x 256 took an H200 0.58 ms instead of 0.42. Weights that are no
        layer's, such as those of all relations together, may find no room.
        """
        if a.dtype != b.dtype or a.dtype == torch.float64 or a.stride(1) != 1 or a.stride(0) < a.shape[1]:
            return False
        (inner, cols), item = b.shape, a.itemsize
        blocks = (row_blocks(cols, item, gradient=gradient) for gradient in (False, True))
        return max(packed_bytes(inner, cols, item, each) for each in blocks) <= self._workspace.numel()

    def rows(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        *,
        accumulate: bool = False,
        epilogue: Epilogue | None = None,
        first_row: int = 0,
    ) -> None:
        """Implement KernelBackend.matmul for operands that it takes."""
        if not out.numel():
            return
        blocks = row_blocks(b.shape[1], a.itemsize)
        args, constants = self._operands(a, b, out, blocks)
        constants |= {"accumulate": int(accumulate), "relu": int(epilogue is not None and epilogue.relu)}
        args |= {"first_row": first_row, **_epilogue_args(epilogue or NO_EPILOGUE)}
        grid = ceil_div(out.shape[0], blocks.rows) * (constants["cols"] // blocks.cols)
        self._kernels.launch("product_rows", grid, args, constants, blocks.options)

    def rows_grad(self, a: Tensor, b: Tensor, h: Tensor, gradient: Gradient, out: Tensor | None = None) -> None:
        """Implement KernelBackend.product_grad for operands that it takes."""
        partials = gradient.partials
        if not h.numel():
            if partials is not None:
                partials.zero_()
            return
        blocks = row_blocks(b.shape[1], a.itemsize, gradient=True)
        args, constants = self._operands(a, b, h if out is None else out, blocks)
        constants |= {"masked": int(gradient.masked)}
        args |= {
            "h": h,
            "ld_h": h.stride(0),
            "keep_scale": float(gradient.keep_scale),
            "h_scale": gradient.h_scale,
            "out_scale": gradient.out_scale,
            "partials": partials,
            "num_partials": 0 if partials is None else partials.shape[0],
        }
        chunks = ceil_div(h.shape[0], blocks.rows)
        chunks = chunks if partials is None else min(chunks, partials.shape[0])
        grid = chunks * (constants["cols"] // blocks.cols)
        self._kernels.launch("product_rows_grad", grid, args, constants, blocks.options)

    def _parts_of(self, operand: Tensor) -> int:
        return 0 if operand.dtype == torch.bfloat16 else self._parts

    def _operands(
        self, a: Tensor, b: Tensor, out: Tensor, blocks: Blocks
    ) -> tuple[dict[str, Tensor | int | float | None], dict[str, int]]:
        """Pack b (K, N), and return what all products of rows are given: operands, and the constants of their shapes."""
        (inner, cols), parts = b.shape, self._parts_of(b)
        rows, wide = packed_shape(inner, cols, blocks)
        packed = self._workspace[: max(parts, 1) * rows * wide * b.itemsize].view(b.dtype)
        shape = {"K": inner, "N": cols, "rows": rows, "cols": wide, "parts": parts}
        split: Args = {"b": b, "step_k": b.stride(0), "step_n": b.stride(1), "packed": packed}
        self._kernels.launch("pack", ceil_div(rows * wide, PACK_BLOCK), split, shape | {"block": PACK_BLOCK}, Options())
        given: dict[str, Tensor | int | float | None]
        given = {"a": a, "ld_a": a.stride(0), "packed": packed, "out": out, "ld_out": out.stride(0), "M": out.shape[0]}
        return given, shape | {"BM": blocks.rows, "BN": blocks.cols, "BK": blocks.inner}


def _epilogue_args(epilogue: Epilogue) -> dict[str, Tensor | int | float | None]:
    drop = epilogue.dropout
    dropped = drop is not None and drop.threshold > 0
    return {
        "row_scale": epilogue.row_scale,
        "bias": epilogue.bias,
        "out_scale": epilogue.out_scale,
        "row_ids": epilogue.row_ids if dropped else None,
        "clock": drop.clock if drop is not None and dropped else None,
        "layer": 0 if drop is None else drop.layer,
        "threshold": 0 if drop is None else drop.threshold,
        "keep_scale": 1.0 if drop is None else drop.keep_scale,
    }
