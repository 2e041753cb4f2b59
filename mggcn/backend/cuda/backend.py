"""The CUDA backend: torch (cuBLAS) for dense products, the kernels of cuda/ for the rest.

Shapes as in base.py. Every method queues its work on the rank's stream and returns; device.py says what a device is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy.typing as npt
import torch
from torch import Tensor

from mggcn.backend.base import Dropout, EntryLoss, Epilogue, Gradient, LossTarget, Sparse
from mggcn.backend.blocked import product_grad_by_blocks
from mggcn.backend.cuda import rows
from mggcn.backend.cuda.base import Device
from mggcn.backend.cuda.dense_products import DenseProducts
from mggcn.backend.cuda.edges import CudaEdges
from mggcn.backend.cuda.epoch_end import epoch_end
from mggcn.backend.cuda.kernels import Kernels
from mggcn.backend.cuda.neighbours import CudaNeighbours
from mggcn.backend.cuda.norms import CudaNorms
from mggcn.backend.cuda.relations import CudaRelations
from mggcn.backend.cuda.spmm import OwnSpmm, even_schedule, make_schedule
from mggcn.backend.cuda.upload import empty_like
from mggcn.backend.epoch_end import Books, Step
from mggcn.backend.events import Agree, CommStream, Event, Repeatable, UploadStream, alone
from mggcn.backend.sparse_products import Spmm, WrapSpmm
from mggcn.backend.spmm_choice import NO_CHOICES, Choices
from mggcn.backend.team import Team
from mggcn.errors import BackendError

QUEUE_S = 1.0
"""The host looks at results about once in this many seconds: it sees signals and losses this late."""


class CudaBackend:
    """Kernels of one GPU for one rank.

    workspace_bytes: memory that split hub rows may take (cuda.sizes.workspace_bytes of the largest matrix and width).
    choices: measured slices of our own sparse products, which override the cost model's. wrap_spmm: wraps them.
    parts: of float32 in dense products of the device's block kernels, if it has them: 2, or 1 for TF32; 0: all by cuBLAS.
    """

    partials: int = rows.PARTIALS
    queue_s: float = QUEUE_S

    def __init__(
        self,
        dtype: torch.dtype,
        device: Device,
        workspace_bytes: int = 0,
        spmm: Literal["own", "cusparse"] = "own",
        choices: Choices = NO_CHOICES,
        wrap_spmm: WrapSpmm | None = None,
        parts: int = 0,
    ) -> None:
        self.dtype: torch.dtype = dtype
        self._real = torch.float64 if dtype == torch.float64 else torch.float32
        self._device = device
        types = {dtype} if dtype == torch.float64 else {torch.float32, torch.bfloat16}
        self._kernels = {d: Kernels(device.compile, d) for d in types}
        self._losses = self.allocate(8 * rows.PARTIALS).view(torch.float64)
        self._arrived = self.allocate(4).view(torch.int32)
        self.team: Team = Team(1)
        self._rewrites = spmm == "own"
        workspace, blocks = self.allocate(workspace_bytes), device.block_kernels
        self._dense = DenseProducts(blocks, workspace, parts) if blocks is not None and parts else None
        self._spmm: Mapping[torch.dtype, Spmm] = (
            self._own_spmm(workspace.view(self._real), choices, wrap_spmm)
            if spmm == "own"
            else dict.fromkeys(types, self._cusparse())
        )

    def _own_spmm(self, workspace: Tensor, choices: Choices, wrap_spmm: WrapSpmm | None) -> Mapping[torch.dtype, Spmm]:
        traits = self._device.traits
        own = {dtype: OwnSpmm(kernels, traits, workspace, choices) for dtype, kernels in self._kernels.items()}
        return own if wrap_spmm is None else {dtype: wrap_spmm(products) for dtype, products in own.items()}

    def _cusparse(self) -> Spmm:
        from mggcn.backend.cuda.cusparse import CusparseSpmm

        return CusparseSpmm(self._device.cusparse, self.allocate, self.finish)

    @property
    def name(self) -> str:
        traits = self._device.traits
        dense = "" if self._dense is None else f" (dense products: {self._dense.name})"
        return f"{traits.name}, sm_{traits.capability[0]}{traits.capability[1]}{dense}"

    @property
    def comm_stream(self) -> CommStream:
        return self._device.comm_stream

    @property
    def upload_stream(self) -> UploadStream:
        return self._device.upload_stream

    def pinned(self, nbytes: int, *, required: bool = False) -> Tensor:
        return self._device.pinned(nbytes, required=required)

    def activate(self) -> None:
        self._device.activate()

    def allocate(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._device.torch_device)

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        out = empty_like(array, self._device.torch_device)
        self._device.write(array, out)
        return out

    def write(self, array: npt.NDArray[Any], out: Tensor) -> None:
        self._device.write(array, out)

    def sparse(
        self,
        indptr: npt.NDArray[Any],
        indices: npt.NDArray[Any],
        values: npt.NDArray[Any] | None,
        like: Sparse | None = None,
    ) -> Sparse:
        return Sparse(
            self.upload(indptr),
            self.upload(indices),
            None if values is None else self.upload(values),
            make_schedule(indptr, self.upload),
        )

    def sparse_in_place(self, indptr: Tensor, indices: Tensor, values: Tensor | None, columns: int) -> Sparse:
        if not self._rewrites:
            raise BackendError("cuSPARSE prepares a product for one matrix, and this one is rewritten; use own kernels")
        return Sparse(indptr, indices, values, even_schedule(indptr.shape[0] - 1, self.upload))

    def spmm(self, adj: Sparse, h: Tensor, out: Tensor, *, accumulate: bool, epilogue: Epilogue | None) -> None:
        self._spmm[h.dtype].multiply(adj, h, out, accumulate=accumulate, epilogue=epilogue)

    @property
    def fuses_products(self) -> bool:
        return self._dense is not None

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
        if self._dense is not None and self._dense.take(a, b):
            self._dense.rows(a, b, out, accumulate=accumulate, epilogue=epilogue, first_row=first_row)
            return
        if out.dtype != a.dtype:
            self._device.mixed_matmul(a, b, out, accumulate=accumulate)
        elif accumulate:
            out.addmm_(a, b)
        else:
            torch.mm(a, b, out=out)
        if epilogue is not None:
            self.finish(out, out, epilogue, first_row)

    def finish(self, z: Tensor, out: Tensor, epilogue: Epilogue, first_row: int = 0) -> None:
        rows.finish(self._kernels[z.dtype], z, out, epilogue, first_row)

    def activation_grad(
        self, g: Tensor, h: Tensor, gradient: Gradient, first_row: int = 0, out: Tensor | None = None
    ) -> None:
        rows.activation_grad(self._kernels[self.dtype], g, h, gradient, first_row, out)

    def product_grad(
        self, a: Tensor, b: Tensor, h: Tensor, block: Tensor, gradient: Gradient, out: Tensor | None = None
    ) -> None:
        if self._dense is not None and self._dense.take(a, b):
            self._dense.rows_grad(a, b, h, gradient, out)
        else:
            product_grad_by_blocks(self, a, b, h, block, gradient, out)

    def sum_partials(self, partials: Tensor, out: Tensor) -> None:
        rows.sum_partials(self._kernels[self._real], partials, out)

    def softmax_xent(
        self, z: Tensor, target: LossTarget, row_scale: Tensor | None, loss: Tensor, partials: Tensor | None
    ) -> None:
        sums = rows.LossSums(loss, partials, self._losses, self._arrived)
        rows.softmax_xent(self._kernels[self.dtype], z, target, row_scale, sums)

    def entry_loss(
        self,
        kind: EntryLoss,
        z: Tensor,
        target: LossTarget,
        row_scale: Tensor | None,
        loss: Tensor,
        partials: Tensor | None,
    ) -> None:
        sums = rows.LossSums(loss, partials, self._losses, self._arrived)
        rows.entry_loss(self._kernels[self.dtype], kind, z, target, row_scale, sums)

    def confusion(self, z: Tensor, labels: Tensor, mask: Tensor, counts: Tensor) -> None:
        rows.confusion(self._kernels[self.dtype], z, labels, mask, counts)

    def entry_counts(self, z: Tensor, labels: Tensor, mask: Tensor, counts: Tensor) -> None:
        rows.entry_counts(self._kernels[self.dtype], z, labels, mask, counts)

    def dropout_values(self, matrix: Sparse, out: Tensor, row_ids: Tensor, dropout: Dropout) -> None:
        rows.dropout_values(self._kernels[self._real], matrix, out, row_ids, dropout)

    def gather_rows(self, source: Tensor, index: Tensor, out: Tensor) -> None:
        rows.move_rows(self._kernels[source.dtype], "gather_rows", source, index, out)

    def scatter_rows(self, source: Tensor, index: Tensor, out: Tensor) -> None:
        rows.move_rows(self._kernels[source.dtype], "scatter_rows", source, index, out)

    def scatter_add_rows(self, source: Tensor, index: Tensor, out: Tensor) -> None:
        rows.move_rows(self._kernels[source.dtype], "scatter_add_rows", source, index, out)

    def epoch_end(self, step: Step, books: Books) -> Callable[[], None]:
        return epoch_end(self._kernels[self.dtype], self.upload, step, books)

    def record(self) -> Event:
        return self._device.record()

    def repeatable(self, function: Callable[[], None], agree: Agree = alone) -> Repeatable:
        return self._device.repeatable(function, agree)

    def synchronize(self) -> None:
        self._device.synchronize()

    def peak_bytes(self) -> int:
        return self._device.peak_bytes()

    @property
    def edges(self) -> CudaEdges:
        return CudaEdges(self._kernels[self.dtype])

    @property
    def neighbours(self) -> CudaNeighbours:
        return CudaNeighbours(self._kernels[self.dtype])

    @property
    def norms(self) -> CudaNorms:
        return CudaNorms(self._kernels[self.dtype])

    @property
    def relations(self) -> CudaRelations:
        return CudaRelations(self._kernels[self.dtype])
