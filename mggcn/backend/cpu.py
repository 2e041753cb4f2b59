"""The CPU backend: torch for dense products, the C++ kernels of cpu/ for the rest.

Shapes as in base.py. Every method runs to its end before it returns, so every event is done.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mggcn import native
from mggcn.backend.base import DONE, Done, Dropout, Epilogue, Sparse
from mggcn.backend.edge_reduce_cpu import CpuEdges
from mggcn.backend.host import HostLane, HostTime

PARTIALS = 64
"""Row chunks whose column sums are added in order (cpu/common.h)."""
CHUNKS = 512
"""Row chunks of a sparse matrix: enough for 64 threads to balance, few enough to cost nothing."""


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _dropout_args(dropout: Dropout | None) -> native.DropoutArgs:
    if dropout is None:
        return native.DropoutArgs(0, 0, 0, 0, 1.0)
    seed, epoch = dropout.clock.tolist()
    return native.DropoutArgs(seed, epoch, dropout.layer, dropout.threshold, dropout.keep_scale)


def _epilogue_args(epilogue: Epilogue) -> native.EpilogueArgs:
    return native.EpilogueArgs(
        _address(epilogue.row_scale),
        _address(epilogue.bias),
        _address(epilogue.out_scale),
        _address(epilogue.row_ids),
        _dropout_args(epilogue.dropout),
        int(epilogue.relu),
    )


class CpuBackend:
    """Kernels of the host with a fixed number of threads."""

    def __init__(self, dtype: torch.dtype, threads: int, isa: str = "") -> None:
        self._dtype = dtype
        self._kind = {torch.float32: "f32", torch.float64: "f64"}[dtype]
        self._threads = threads
        self._isa = isa or native.isa()

    @property
    def name(self) -> str:
        return f"cpu {self._isa}, {self._threads} thread{'s' * (self._threads > 1)}"

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def partials(self) -> int:
        return PARTIALS

    @property
    def rate_dtype(self) -> torch.dtype:
        return torch.float64

    @property
    def queue_s(self) -> float:
        return 0.0

    def _run(self, name: str, *args: Any) -> None:
        native.kernel(name, self._kind if name.endswith("_") else "", self._isa)(*args)

    def activate(self) -> None:
        return

    def allocate(self, nbytes: int) -> Tensor:
        # Pages come straight from the kernel: no allocator keeps, splits or copies them, and untouched ones cost nothing.
        return torch.frombuffer(
            mmap.mmap(-1, max(nbytes, 64), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8
        )[:nbytes]

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array))

    def sparse(self, indptr: npt.NDArray[Any], indices: npt.NDArray[Any], values: npt.NDArray[Any] | None) -> Sparse:
        rows = indptr.shape[0] - 1
        chunks = np.empty(max(1, min(rows, CHUNKS)) + 1, np.int64)
        self._run("mggcn_balance", indptr.ctypes.data, rows, chunks.shape[0] - 1, chunks.ctypes.data)
        return Sparse(
            self.upload(indptr),
            self.upload(indices),
            None if values is None else self.upload(values),
            torch.from_numpy(chunks),
        )

    def spmm(self, adj: Sparse, h: Tensor, out: Tensor, *, accumulate: bool, epilogue: Epilogue | None) -> None:
        args = None if epilogue is None else ctypes.byref(_epilogue_args(epilogue))
        self._run(
            "mggcn_spmm_",
            adj.schedule.shape[0] - 1,
            _address(adj.schedule),
            _address(adj.indptr),
            _address(adj.indices),
            _address(adj.values),
            _address(h),
            h.stride(0),
            _address(out),
            out.stride(0),
            out.shape[1],
            int(accumulate),
            args,
            self._threads,
        )

    def matmul(self, a: Tensor, b: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
        if accumulate:
            out.addmm_(a, b)
        else:
            torch.mm(a, b, out=out)

    def finish(self, z: Tensor, out: Tensor, epilogue: Epilogue, first_row: int = 0) -> None:
        args = ctypes.byref(_epilogue_args(epilogue))
        rows, cols = out.shape
        self._run(
            "mggcn_finish_",
            _address(z),
            z.stride(0),
            _address(out),
            out.stride(0),
            rows,
            cols,
            first_row,
            args,
            self._threads,
        )

    def activation_grad(
        self,
        g: Tensor,
        h: Tensor,
        *,
        masked: bool,
        keep_scale: float,
        h_scale: Tensor | None,
        out_scale: Tensor | None,
        partials: Tensor | None,
        first_row: int = 0,
    ) -> None:
        self._run(
            "mggcn_activation_grad_",
            _address(g),
            g.stride(0),
            _address(h),
            h.stride(0),
            h.shape[0],
            h.shape[1],
            first_row,
            int(masked),
            keep_scale,
            _address(h_scale),
            _address(out_scale),
            _address(partials),
            self._threads,
        )

    def sum_partials(self, partials: Tensor, out: Tensor) -> None:
        self._run("mggcn_sum_partials_", _address(partials), _address(out), out.shape[0])

    def softmax_xent(
        self,
        z: Tensor,
        labels: Tensor,
        mask: Tensor,
        inv_count: float,
        row_scale: Tensor | None,
        loss: Tensor,
        partials: Tensor | None,
    ) -> None:
        self._run(
            "mggcn_softmax_xent_",
            _address(z),
            z.stride(0),
            z.shape[0],
            z.shape[1],
            _address(labels),
            _address(mask),
            inv_count,
            _address(row_scale),
            _address(loss),
            _address(partials),
            self._threads,
        )

    def confusion(self, z: Tensor, labels: Tensor, mask: Tensor, counts: Tensor) -> None:
        rows, cols = z.shape
        self._run(
            "mggcn_confusion_",
            _address(z),
            z.stride(0),
            rows,
            cols,
            _address(labels),
            _address(mask),
            _address(counts),
            self._threads,
        )

    def dropout_values(self, matrix: Sparse, out: Tensor, row_ids: Tensor, dropout: Dropout) -> None:
        args = ctypes.byref(_dropout_args(dropout))
        self._run(
            "mggcn_dropout_values_",
            _address(matrix.indptr),
            _address(matrix.indices),
            _address(matrix.values),
            _address(out),
            matrix.num_rows,
            _address(row_ids),
            args,
            self._threads,
        )

    def gather_rows(self, source: Tensor, index: Tensor, out: Tensor) -> None:
        self._move_rows("mggcn_gather_rows_", source, index, out, out.shape)

    def scatter_rows(self, source: Tensor, index: Tensor, out: Tensor) -> None:
        self._move_rows("mggcn_scatter_rows_", source, index, out, source.shape)

    def scatter_add_rows(self, source: Tensor, index: Tensor, out: Tensor) -> None:
        self._move_rows("mggcn_scatter_add_rows_", source, index, out, source.shape)

    def _move_rows(self, name: str, source: Tensor, index: Tensor, out: Tensor, shape: torch.Size) -> None:
        self._run(
            name,
            _address(source),
            source.stride(0),
            _address(index),
            _address(out),
            out.stride(0),
            *shape,
            self._threads,
        )

    def record(self) -> Done:
        return DONE

    @property
    def lane(self) -> HostLane:
        return HostLane()

    def timestamp(self) -> HostTime:
        return HostTime(time.perf_counter())

    def repeatable(self, function: Callable[[], None]) -> Callable[[], None]:
        return function

    def synchronize(self) -> None:
        return

    def peak_bytes(self) -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

    @property
    def edges(self) -> CpuEdges:
        return CpuEdges(self._dtype, self._threads, self._isa)
