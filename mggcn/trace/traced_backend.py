"""A backend whose kernel calls leave marks: wraps any KernelBackend, which does the work.

Shapes as in backend/base.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy.typing as npt
import torch
from torch import Tensor

from mggcn.backend.base import Dropout, EntryLoss, Epilogue, Gradient, KernelBackend, LossTarget, Sparse
from mggcn.backend.blocked import product_grad_by_blocks
from mggcn.backend.edges import EdgeKernels
from mggcn.backend.epoch_end import Books, Step
from mggcn.backend.events import Agree, CommStream, Eager, Event, Timestamp, alone
from mggcn.backend.neighbours import NeighbourKernels
from mggcn.backend.norms import NormKernels
from mggcn.backend.team import Team
from mggcn.trace.recorder import Recorder
from mggcn.trace.work import Work, matmul_work, spmm_work, streamed


class TracedBackend:
    """Forwards every call; those that compute are marked with their kind, bytes and FLOP."""

    def __init__(self, inner: KernelBackend, recorder: Recorder) -> None:
        self._inner = inner
        self._recorder = recorder

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def dtype(self) -> torch.dtype:
        return self._inner.dtype

    @property
    def partials(self) -> int:
        return self._inner.partials

    @property
    def team(self) -> Team:
        return self._inner.team

    @property
    def queue_s(self) -> float:
        return self._inner.queue_s

    @property
    def comm_stream(self) -> CommStream:
        return self._inner.comm_stream

    def activate(self) -> None:
        self._inner.activate()

    def allocate(self, nbytes: int) -> Tensor:
        return self._inner.allocate(nbytes)

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        return self._inner.upload(array)

    def write(self, array: npt.NDArray[Any], out: Tensor) -> None:
        self._inner.write(array, out)

    def sparse(self, indptr: npt.NDArray[Any], indices: npt.NDArray[Any], values: npt.NDArray[Any] | None) -> Sparse:
        return self._inner.sparse(indptr, indices, values)

    def spmm(self, adj: Sparse, h: Tensor, out: Tensor, *, accumulate: bool, epilogue: Epilogue | None) -> None:
        work = spmm_work(adj, h, out, accumulate=accumulate)
        with self._recorder.kernel("spmm", work, self._recorder.stage_of(adj)):
            self._inner.spmm(adj, h, out, accumulate=accumulate, epilogue=epilogue)

    @property
    def fuses_products(self) -> bool:
        return self._inner.fuses_products

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
        with self._recorder.kernel("gemm", matmul_work(a, b, out, accumulate=accumulate)):
            self._inner.matmul(a, b, out, accumulate=accumulate, epilogue=fused, first_row=first_row)
        if epilogue is not None and fused is None:
            self.finish(out, out, epilogue, first_row)

    def finish(self, z: Tensor, out: Tensor, epilogue: Epilogue, first_row: int = 0) -> None:
        with self._recorder.kernel("epilogue", streamed(z, out)):
            self._inner.finish(z, out, epilogue, first_row)

    def activation_grad(
        self,
        g: Tensor,
        h: Tensor,
        gradient: Gradient,
        first_row: int = 0,
        out: Tensor | None = None,
    ) -> None:
        with self._recorder.kernel("activation-grad", streamed(g, h, h if out is None else out)):
            self._inner.activation_grad(g, h, gradient, first_row, out)

    def product_grad(
        self, a: Tensor, b: Tensor, h: Tensor, block: Tensor, gradient: Gradient, out: Tensor | None = None
    ) -> None:
        if not self.fuses_products:
            product_grad_by_blocks(self, a, b, h, block, gradient, out)
            return
        with self._recorder.kernel("gemm", matmul_work(a, b, h, accumulate=True)):
            self._inner.product_grad(a, b, h, block, gradient, out)

    def sum_partials(self, partials: Tensor, out: Tensor) -> None:
        with self._recorder.kernel("bias-grad", streamed(partials, out)):
            self._inner.sum_partials(partials, out)

    def softmax_xent(
        self,
        z: Tensor,
        target: LossTarget,
        row_scale: Tensor | None,
        loss: Tensor,
        partials: Tensor | None,
    ) -> None:
        with self._recorder.kernel("loss", streamed(z, z, target.labels, target.mask)):
            self._inner.softmax_xent(z, target, row_scale, loss, partials)

    def entry_loss(
        self,
        kind: EntryLoss,
        z: Tensor,
        target: LossTarget,
        row_scale: Tensor | None,
        loss: Tensor,
        partials: Tensor | None,
    ) -> None:
        with self._recorder.kernel("loss", streamed(z, z, target.labels, target.mask)):
            self._inner.entry_loss(kind, z, target, row_scale, loss, partials)

    def confusion(self, z: Tensor, labels: Tensor, mask: Tensor, counts: Tensor) -> None:
        with self._recorder.kernel("score", streamed(z, labels, mask)):
            self._inner.confusion(z, labels, mask, counts)

    def entry_counts(self, z: Tensor, labels: Tensor, mask: Tensor, counts: Tensor) -> None:
        with self._recorder.kernel("score", streamed(z, labels, mask)):
            self._inner.entry_counts(z, labels, mask, counts)

    def dropout_values(self, matrix: Sparse, out: Tensor, row_ids: Tensor, dropout: Dropout) -> None:
        kept = streamed(matrix.indptr, matrix.indices, out, out, row_ids)
        with self._recorder.kernel("input-dropout", kept):
            self._inner.dropout_values(matrix, out, row_ids, dropout)

    def gather_rows(self, source: Tensor, index: Tensor, out: Tensor) -> None:
        with self._recorder.kernel("gather", streamed(out, out, index)):
            self._inner.gather_rows(source, index, out)

    def scatter_rows(self, source: Tensor, index: Tensor, out: Tensor) -> None:
        with self._recorder.kernel("scatter", streamed(source, source, index)):
            self._inner.scatter_rows(source, index, out)

    def scatter_add_rows(self, source: Tensor, index: Tensor, out: Tensor) -> None:
        with self._recorder.kernel("scatter", streamed(source, source, source, index)):
            self._inner.scatter_add_rows(source, index, out)

    def epoch_end(self, step: Step, books: Books) -> Callable[[], None]:
        # The epoch loop marks it as the optimiser's.
        return self._inner.epoch_end(step, books)

    def record(self) -> Event:
        return self._inner.record()

    def timestamp(self) -> Timestamp:
        return self._inner.timestamp()

    def repeatable(self, function: Callable[[], None], agree: Agree = alone) -> Eager:
        # Work that a device repeats by itself is launched whole: there would be no calls to mark.
        return Eager(function)

    def synchronize(self) -> None:
        self._inner.synchronize()

    def peak_bytes(self) -> int:
        return self._inner.peak_bytes()

    @property
    def edges(self) -> EdgeKernels:
        return self._inner.edges  # no run that is traced has messages of edges

    @property
    def neighbours(self) -> NeighbourKernels:
        return cast(NeighbourKernels, _Traced(self._inner.neighbours, self._recorder))

    @property
    def norms(self) -> NormKernels:
        return cast(NormKernels, _Traced(self._inner.norms, self._recorder))


class _Traced:
    """Marks each call by the kernel's name; its tensors are counted as read once, and a row for each entry of a tile."""

    def __init__(self, inner: NeighbourKernels | NormKernels, recorder: Recorder) -> None:
        self._inner, self._recorder = inner, recorder

    def __getattr__(self, name: str) -> Callable[..., None]:
        kernel = getattr(self._inner, name)

        def marked(*args: Any, **how: Any) -> None:
            matrix = next((arg for arg in args if isinstance(arg, Sparse)), None)
            tensors = [arg for arg in args if isinstance(arg, Tensor)]
            nbytes, stage = sum(tensor.nbytes for tensor in tensors), None
            if matrix is not None:
                nbytes += matrix.nnz * (4 + tensors[0].shape[1] * tensors[0].itemsize)
                stage = self._recorder.stage_of(matrix)
            with self._recorder.kernel(name.replace("_", "-"), Work(nbytes), stage):
                kernel(*args, **how)

        return marked
