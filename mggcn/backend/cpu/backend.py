"""The CPU backend: the C++ kernels of cpu/, and torch for dense products where there are none.

Shapes as in base.py. Every method runs to its end before it returns, so every event is done.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mggcn import native
from mggcn.backend.base import ENTRY_LOSSES, Dropout, EntryLoss, Epilogue, Gradient, LossTarget, Sparse
from mggcn.backend.blocked import product_grad_by_blocks
from mggcn.backend.cpu.args import NAMES, address, dropout_args, epilogue_args, kind_of, strided
from mggcn.backend.cpu.edges import CpuEdges
from mggcn.backend.cpu.epoch_end import CpuEpochEnd
from mggcn.backend.cpu.figures import ASSUMED, DenseShape, Figures
from mggcn.backend.cpu.gemm import CpuGemm
from mggcn.backend.cpu.machine import dense_kernels
from mggcn.backend.cpu.memory import Workspace, allocate
from mggcn.backend.cpu.neighbours import CpuNeighbours
from mggcn.backend.cpu.norms import CpuNorms
from mggcn.backend.cpu.sizes import LOSS_BYTES
from mggcn.backend.cpu.spmm import CpuSpmm, even_schedule, make_schedule
from mggcn.backend.cpu.variants import gemm_kernel, gemm_variant
from mggcn.backend.cpu.windows import Windows
from mggcn.backend.epoch_end import Books, Step
from mggcn.backend.events import DONE, Agree, Done, Eager, alone
from mggcn.backend.host import HostStream
from mggcn.backend.sparse_products import Spmm, WrapSpmm
from mggcn.backend.spmm_choice import NO_CHOICES, Choices
from mggcn.backend.team import Team
from mggcn.backend.window import Window
from mggcn.errors import BackendError
from mggcn.host import PeakMemory

PARTIALS = 64
"""Row chunks whose column sums are added in order (cpu/common.h)."""


class CpuBackend:
    """Kernels of the host on a team of threads.

    choices: measured variants of sparse products, which override the model's. wrap_spmm: wraps sparse products.
    figures: what the model knows of this machine; isa: forces an instruction set.
    """

    queue_s: float = 0.0
    partials: int = PARTIALS

    def __init__(
        self,
        dtype: torch.dtype,
        threads: int,
        isa: str = "",
        choices: Choices = NO_CHOICES,
        wrap_spmm: WrapSpmm | None = None,
        figures: Figures = ASSUMED,
    ) -> None:
        self.dtype: torch.dtype = dtype
        self._real = torch.float64 if dtype == torch.float64 else torch.float32
        self.team: Team = Team(threads)
        self._isa = isa or native.isa()
        self._workspace = Workspace()
        self.windows: Windows = Windows()
        self._memory = PeakMemory()
        self.sparse_products: CpuSpmm = CpuSpmm(dtype, self.team, self._isa, figures, self._workspace, choices)
        self._spmm: Spmm = self.sparse_products if wrap_spmm is None else wrap_spmm(self.sparse_products)
        usable = (isa,) if isa else dense_kernels()
        rows, sums = (gemm_kernel(figures, dtype.itemsize, shape, usable) for shape in get_args(DenseShape))
        variant = gemm_variant(usable[-1])
        self.dense_products: CpuGemm = CpuGemm(variant, self.team, rows, self._workspace, sums, self.windows)

    @property
    def name(self) -> str:
        dense = self.dense_products.name
        apart = f" (dense products: {dense})" * (dense != self._isa)
        return f"cpu {self._isa}{apart}, {self.team.planned} thread{'s' * (self.team.planned > 1)}"

    @property
    def work_space_bytes(self) -> int:
        """Largest work space that products have used, in bytes."""
        return self._workspace.nbytes

    def _run(self, name: str, dtype: torch.dtype, *args: Any, result: torch.dtype | None = None) -> None:
        native.kernel(name, kind_of(dtype, result or dtype), self._isa)(*args, self.team.running)

    def activate(self) -> None:
        return

    def allocate(self, nbytes: int) -> Tensor:
        return allocate(nbytes)

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array))

    def write(self, array: npt.NDArray[Any], out: Tensor) -> None:
        out.copy_(torch.from_numpy(array))

    def sparse(
        self,
        indptr: npt.NDArray[Any],
        indices: npt.NDArray[Any],
        values: npt.NDArray[Any] | None,
        like: Sparse | None = None,
    ) -> Sparse:
        indptr, indices = np.ascontiguousarray(indptr), np.ascontiguousarray(indices)
        return Sparse(
            self.upload(indptr),
            self.upload(indices),
            None if values is None else self.upload(values),
            make_schedule(indptr, indices, self.team.planned, self._isa, like=None if like is None else like.schedule),
        )

    def sparse_in_place(self, indptr: Tensor, indices: Tensor, values: Tensor | None, columns: int) -> Sparse:
        return Sparse(indptr, indices, values, even_schedule(indptr.shape[0] - 1, columns, indices.shape[0]))

    def pinned(self, nbytes: int, *, required: bool = False) -> Tensor:
        return allocate(nbytes)

    def spmm(self, adj: Sparse, h: Tensor, out: Tensor, *, accumulate: bool, epilogue: Epilogue | None) -> None:
        self._spmm.multiply(adj, h, out, accumulate=accumulate, epilogue=epilogue)

    @property
    def fuses_products(self) -> bool:
        return self.dense_products.variant == "own"

    def matmul(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        *,
        accumulate: bool = False,
        epilogue: Epilogue | None = None,
        first_row: int = 0,
    ) -> None:
        fused = epilogue if self.fuses_products else None
        self.dense_products.multiply(a, b, out, accumulate=accumulate, epilogue=fused, first_row=first_row)
        if epilogue is not None and fused is None:
            self.finish(out, out, epilogue, first_row)

    def finish(self, z: Tensor, out: Tensor, epilogue: Epilogue, first_row: int = 0) -> None:
        args = (*strided(z), *strided(out), *out.shape, first_row, ctypes.byref(epilogue_args(epilogue)))
        self._run("mggcn_finish_", z.dtype, *args, result=out.dtype)

    def activation_grad(
        self, g: Tensor, h: Tensor, gradient: Gradient, first_row: int = 0, out: Tensor | None = None
    ) -> None:
        to = h if out is None else out
        window = self.windows.of(h.shape[0], summed=gradient.partials is not None)
        if first_row == 0:
            _begin(gradient.partials, window)
        self._run(
            "mggcn_activation_grad_",
            self.dtype,
            *strided(g),
            *strided(h),
            *strided(to),
            *h.shape,
            first_row,
            int(gradient.masked),
            gradient.keep_scale,
            address(gradient.h_scale),
            address(gradient.out_scale),
            address(gradient.partials),
            window.first,
            window.total,
            result=to.dtype,
        )

    def product_grad(
        self, a: Tensor, b: Tensor, h: Tensor, block: Tensor, gradient: Gradient, out: Tensor | None = None
    ) -> None:
        if self.fuses_products:
            _begin(gradient.partials, self.windows.of(h.shape[0], summed=gradient.partials is not None))
            to = h if out is None else out
            self.dense_products.multiply(a, b, to, accumulate=False, gradient=gradient, activation=h)
        else:
            product_grad_by_blocks(self, a, b, h, block, gradient, out)

    def sum_partials(self, partials: Tensor, out: Tensor) -> None:
        run = native.kernel("mggcn_sum_partials_", NAMES[self._real], self._isa)
        run(address(partials), address(out), out.shape[0])

    def softmax_xent(
        self, z: Tensor, target: LossTarget, row_scale: Tensor | None, loss: Tensor, partials: Tensor | None
    ) -> None:
        options = (address(target.weights), target.smoothing)
        self._loss("mggcn_softmax_xent_", z, target, options, row_scale, loss, partials)

    def entry_loss(
        self,
        kind: EntryLoss,
        z: Tensor,
        target: LossTarget,
        row_scale: Tensor | None,
        loss: Tensor,
        partials: Tensor | None,
    ) -> None:
        self._loss("mggcn_entry_loss_", z, target, (ENTRY_LOSSES.index(kind),), row_scale, loss, partials)

    def _loss(
        self,
        name: str,
        z: Tensor,
        target: LossTarget,
        options: tuple[float | None, ...],
        row_scale: Tensor | None,
        loss: Tensor,
        partials: Tensor | None,
    ) -> None:
        window = self.windows.of(z.shape[0])
        kept = self.windows.keep((name, z.shape[1], loss.data_ptr()), LOSS_BYTES)
        _begin(partials, window)
        count = target.inv_count if target.changing is None else float(target.changing)
        of_rows = (*strided(z), *z.shape, address(target.labels), address(target.mask), count)
        sums = (address(row_scale), address(loss), address(partials), window.first, window.total, kept)
        self._run(name, self.dtype, *of_rows, *options, *sums)

    def confusion(self, z: Tensor, labels: Tensor, mask: Tensor, counts: Tensor) -> None:
        self._count("mggcn_confusion_", z, labels, mask, counts)

    def entry_counts(self, z: Tensor, labels: Tensor, mask: Tensor, counts: Tensor) -> None:
        self._count("mggcn_entry_counts_", z, labels, mask, counts)

    def _count(self, kernel: str, z: Tensor, labels: Tensor, mask: Tensor, counts: Tensor) -> None:
        self._run(kernel, self.dtype, *strided(z), *z.shape, address(labels), address(mask), address(counts))

    def dropout_values(self, matrix: Sparse, out: Tensor, row_ids: Tensor, dropout: Dropout) -> None:
        args = ctypes.byref(dropout_args(dropout))
        self._run(
            "mggcn_dropout_values_",
            self._real,
            address(matrix.indptr),
            address(matrix.indices),
            address(matrix.values),
            address(out),
            matrix.num_rows,
            address(row_ids),
            args,
        )

    def gather_rows(self, source: Tensor, index: Tensor, out: Tensor) -> None:
        self._move_rows("mggcn_gather_rows_", source, index, out)

    def scatter_rows(self, source: Tensor, index: Tensor, out: Tensor) -> None:
        self._move_rows("mggcn_scatter_rows_", source, index, out)

    def scatter_add_rows(self, source: Tensor, index: Tensor, out: Tensor) -> None:
        self._move_rows("mggcn_scatter_add_rows_", source, index, out)

    def _move_rows(self, name: str, source: Tensor, index: Tensor, out: Tensor) -> None:
        args = (*strided(source), address(index), *strided(out), index.shape[0], out.shape[1])
        self._run(name, source.dtype, *args, result=out.dtype)

    def epoch_end(self, step: Step, books: Books) -> Callable[[], None]:
        return CpuEpochEnd(step, books)

    def record(self) -> Done:
        return DONE

    @property
    def comm_stream(self) -> HostStream:
        return HostStream()

    @property
    def upload_stream(self) -> HostStream:
        return HostStream()

    def repeatable(self, function: Callable[[], None], agree: Agree = alone) -> Eager:
        return Eager(function)

    def synchronize(self) -> None:
        return

    def peak_bytes(self) -> int:
        return self._memory.look()

    def glance_at_memory(self) -> None:
        self._memory.glance()

    @property
    def edges(self) -> CpuEdges:
        return CpuEdges(self.dtype, self.team, self._isa)

    @property
    def neighbours(self) -> CpuNeighbours:
        return CpuNeighbours(self.dtype, self.team, self._isa)

    @property
    def norms(self) -> CpuNorms:
        return CpuNorms(self.dtype, self.team, self._isa, self.windows)

    @property
    def relations(self) -> None:
        return None

    def begin_windows(self, total: int, memory: Tensor) -> None:
        if not self.fuses_products:
            raise BackendError(
                f"windows of rows have the bits of all rows where mggcn's own kernels multiply; here ({self.name}) torch "
                "does, whose sums depend on the number of rows; keep all rows in memory"
            )
        self.windows.begin(total, memory)

    def window(self, first: int, count: int) -> None:
        self.windows.move(first, count)

    def end_windows(self, *, complete: bool = True) -> None:
        self.windows.end(complete=complete)

    def apart(self) -> AbstractContextManager[None]:
        return self.windows.apart()


def _begin(partials: Tensor | None, window: Window) -> None:
    """Zero the partial sums, to which the kernels add, before the first window."""
    if partials is not None and window.is_first:
        partials.zero_()
