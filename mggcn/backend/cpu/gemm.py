"""Dense products on the CPU: by our kernels or by torch, as cpu.variants says."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from mggcn import native
from mggcn.backend.base import Epilogue, Gradient
from mggcn.backend.cpu.args import address, epilogue_args
from mggcn.backend.cpu.memory import Workspace
from mggcn.backend.cpu.sizes import (
    GEMM_ROWS,
    GemmSizes,
    aligned,
    carry_bytes,
    converted_shapes,
    copied_shape,
    gemm_sizes,
)
from mggcn.backend.cpu.structs import GemmArgs
from mggcn.backend.cpu.variants import GemmVariant
from mggcn.backend.cpu.windows import Windows
from mggcn.backend.team import Team
from mggcn.errors import BackendError

_KINDS = {
    (torch.float32, torch.float32): "f32",
    (torch.float64, torch.float64): "f64",
    (torch.bfloat16, torch.bfloat16): "bf16",
    (torch.bfloat16, torch.float32): "bf16_f32",
    (torch.float32, torch.bfloat16): "f32_bf16",
}
"""Kernels by types of the operands and of the result."""


def _gradient_args(gradient: Gradient) -> native.ActivationArgs:
    return native.ActivationArgs(
        address(gradient.h_scale), address(gradient.out_scale), gradient.keep_scale, int(gradient.masked)
    )


class CpuGemm:
    """Products of matrices of one storage type, by mggcn's kernels or by torch, as `variant` says.

    isa: instruction set of the kernels of products with a result for each row; sums: of those over the rows, by default
    the same. windows: those that products with sums over rows are on.
    """

    def __init__(
        self,
        variant: GemmVariant,
        team: Team,
        isa: str,
        workspace: Workspace,
        sums: str = "",
        windows: Windows | None = None,
    ) -> None:
        self.variant = variant
        self._team = team
        self._isa = isa
        self._sums = sums or isa
        self._workspace = workspace
        self._windows = Windows() if windows is None else windows

    @property
    def name(self) -> str:
        """What multiplies: the instruction set of mggcn's kernel, or torch."""
        if self.variant == "torch":
            return "torch"
        return self._isa if self._isa == self._sums else f"{self._isa}, sums {self._sums}"

    def multiply(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        *,
        accumulate: bool,
        epilogue: Epilogue | None = None,
        first_row: int = 0,
        gradient: Gradient | None = None,
        activation: Tensor | None = None,
    ) -> None:
        """Implement KernelBackend.matmul; with bfloat16 operands out may be float32, which is then summed in float32.

        gradient: if given, the product is the gradient after an activation, and out becomes the gradient before it.
        This, an epilogue and results of bfloat16 beside operands of float32 need the variant "own".
        """
        if not out.numel():
            return
        if self.variant == "own":
            self._multiply(a, b, out, accumulate, epilogue, first_row, gradient, activation)
        elif a.dtype == torch.bfloat16:
            self._by_conversion(a, b, out, accumulate)
        elif a.stride(1) == 1 and a.stride(0) != a.shape[1]:
            self._without_padding(a, b, out, accumulate)
        else:
            _by_torch(a, b, out, accumulate)

    def _by_conversion(self, a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> None:
        """Have torch multiply bfloat16 in float32, block after block."""
        shapes = converted_shapes(a.shape[0], a.shape[1], b.shape[1], summed=out.dtype == torch.float32)
        with self._workspace.lock:
            floats = self._matrices(shapes, torch.float32)
            if a.shape[1] > a.shape[0]:
                _sum_of_blocks(a, b, out, accumulate, *floats)
            else:
                _blocks_of_rows(a, b, out, accumulate, *floats)

    def _without_padding(self, a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> None:
        """Have torch multiply copies of blocks of rows: the padding of a row may hold NaN, and a library may read it."""
        with self._workspace.lock:
            (left,) = self._matrices((copied_shape(*a.shape),), a.dtype)
            for first in range(0, a.shape[0], GEMM_ROWS):
                rows = a[first : first + GEMM_ROWS]
                _by_torch(left[: rows.shape[0]].copy_(rows), b, out[first : first + GEMM_ROWS], accumulate)

    def _multiply(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        accumulate: bool,
        epilogue: Epilogue | None,
        first_row: int,
        gradient: Gradient | None,
        activation: Tensor | None,
    ) -> None:
        (rows, inner), cols = a.shape, b.shape[1]
        transposed = a.stride(1) != 1
        if transposed and (a.stride(0) != 1 or gradient is not None):
            raise BackendError(
                f"a left operand needs contiguous rows, or contiguous columns if no activation follows; got strides "
                f"{a.stride()}; pass a contiguous copy"
            )
        real = 8 if a.dtype == torch.float64 else 4
        isa = self._sums if transposed else self._isa
        summed = transposed or (gradient is not None and gradient.partials is not None)
        window = self._windows.of(inner if transposed else rows, summed=summed)
        long = window.total if transposed else inner
        sizes = gemm_sizes(rows, long, cols, a.itemsize, real, transposed=transposed, tiles=isa.startswith("amx"))
        kept = self._kept(a, cols, out, sizes) if transposed and self._windows.in_use else None
        packed = sizes.packed if kept is None else 0
        finish = None if epilogue is None else epilogue_args(epilogue)
        back = None if gradient is None else _gradient_args(gradient)
        with self._workspace.lock:
            start = self._workspace.take(packed + self._team.planned * sizes.own).data_ptr()
            args = GemmArgs(
                address(a),
                address(b),
                address(out),
                address(activation),
                None if finish is None else ctypes.addressof(finish),
                None if back is None else ctypes.addressof(back),
                None if gradient is None else address(gradient.partials),
                start if kept is None else kept,
                start + packed,
                None if kept is None else kept + sizes.packed,
                rows,
                inner,
                cols,
                a.stride(1) if transposed else a.stride(0),
                b.stride(0),
                b.stride(1),
                out.stride(0),
                0 if activation is None else activation.stride(0),
                sizes.own // real,
                sizes.segments,
                first_row,
                window.first,
                window.total,
                int(transposed),
                int(accumulate),
                self._team.running,
            )
            native.kernel("mggcn_gemm_", _KINDS[a.dtype, out.dtype], isa)(ctypes.byref(args))

    def _kept(self, a: Tensor, cols: int, out: Tensor, sizes: GemmSizes) -> int | None:
        """Address of the sums of segments, and of a pair's rows, that a product over rows keeps between windows."""
        rows = a.shape[0]
        call = ("a^T b", rows, cols, a.dtype, out.dtype, out.data_ptr())
        return self._windows.keep(call, sizes.packed + carry_bytes(rows, cols, a.itemsize))

    def _matrices(self, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> list[Tensor]:
        """Matrices in the work space, each aligned to a cache line."""
        item = dtype.itemsize
        sizes = [aligned(item * shape[0] * shape[1]) // item for shape in shapes]
        flat = self._workspace.take(item * sum(sizes)).view(dtype)
        return [part[: s[0] * s[1]].view(s) for part, s in zip(flat.split(sizes), shapes, strict=True)]


def _by_torch(a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> None:
    if accumulate:
        out.addmm_(a, b)
    else:
        torch.mm(a, b, out=out)


def _blocks_of_rows(
    a: Tensor, b: Tensor, out: Tensor, accumulate: bool, left: Tensor, right: Tensor, sums: Tensor
) -> None:
    """Rows of out one block after the other."""
    right.copy_(b)
    for first in range(0, a.shape[0], GEMM_ROWS):
        some = a[first : first + GEMM_ROWS]
        part, result = out[first : first + GEMM_ROWS], sums[: some.shape[0]]
        torch.mm(left[: some.shape[0]].copy_(some), right, out=result)
        part.copy_(result.add_(part) if accumulate else result)


def _sum_of_blocks(
    a: Tensor, b: Tensor, out: Tensor, accumulate: bool, left: Tensor, right: Tensor, sums: Tensor | None = None
) -> None:
    """The whole of out, summed over blocks of columns of a in their order; sums: unless out is float32."""
    total = out if sums is None else sums.copy_(out)
    if not accumulate:
        total.zero_()
    for first in range(0, a.shape[1], GEMM_ROWS):
        rows = b[first : first + GEMM_ROWS]
        count = rows.shape[0]
        # For gradients of weights, a is transposed: its rows are then copied as they lie in memory.
        total.addmm_(left[:count].copy_(a[:, first : first + GEMM_ROWS].t()).t(), right[:count].copy_(rows))
    if total is not out:
        out.copy_(total)
