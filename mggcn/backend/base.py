"""The kernel backend: the kernels that a device must offer, on torch tensors of that device.

Shapes: V rows of this rank, N rows of the dense operand, D input width, E output width, C classes.
Dense tensors are (rows, cols) with unit column stride; their row stride is the leading dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy.typing as npt

from mggcn.backend.dropout import Dropout as Dropout
from mggcn.backend.dropout import keep_scale as keep_scale
from mggcn.backend.events import Agree, CommStream, Event, Repeatable, UploadStream, alone
from mggcn.backend.sparse import Sparse as Sparse
from mggcn.backend.team import Team

if TYPE_CHECKING:  # `mggcn plan` lowers models without loading torch
    import torch
    from torch import Tensor

    from mggcn.backend.edges import EdgeKernels
    from mggcn.backend.epoch_end import Books, Step
    from mggcn.backend.neighbours import NeighbourKernels
    from mggcn.backend.norms import NormKernels
    from mggcn.backend.relations import RelationKernels


@dataclass(frozen=True, slots=True)
class Epilogue:
    """Steps after the product of a row: out_scale * drop(relu(row_scale * z + bias)); None turns a step off.

    Scales and bias are of the accumulation type; row_ids int64.
    """

    row_scale: Tensor | None = None
    bias: Tensor | None = None
    relu: bool = False
    dropout: Dropout | None = None
    row_ids: Tensor | None = None
    out_scale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Gradient:
    """How a gradient passes back through an activation: the arguments of `activation_grad` besides g and h.

    masked: whether zeros of h stop it; keep_scale: the factor of the elements that dropout kept. h_scale, out_scale (V,),
    or None for ones: factors before and after dZ. partials: float64 (partials, D), receives the column sums of dZ; None
    without a bias.
    """

    masked: bool = True
    keep_scale: float = 1.0
    h_scale: Tensor | None = None
    out_scale: Tensor | None = None
    partials: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossTarget:
    """The targets of logits: labels int32 (V,), or for losses of entries, real (V, T), NaN where unknown.

    Rows count where bit 0 of mask, uint8 (V,), is set. inv_count: one over the number of rows that count, the sum of
    their weights, or the number of known entries in them, on all ranks. changing: float64 (1,) on the device, takes its
    place where steps that a device repeats by itself have one each. For classes: weights (C,) or None, and smoothing in
    [0, 1).
    """

    labels: Tensor
    mask: Tensor
    inv_count: float
    weights: Tensor | None = None
    smoothing: float = 0.0
    changing: Tensor | None = None


EntryLoss = Literal["bce", "mse", "mae"]
"""Losses of entries: cross-entropy of a sigmoid, squared error, absolute error."""
ENTRY_LOSSES: tuple[EntryLoss, ...] = ("bce", "mse", "mae")
"""The losses of entries, ordered by the number that kernels use for them."""


class KernelBackend(Protocol):
    """Kernels of one device. Outputs are written in place; nothing of note is allocated. All sums repeat bit for bit.

    Work runs in the order of the calls, but a device may run it after the call has returned: reading a result on the host
    (.item(), .cpu()) waits for it.
    """

    @property
    def name(self) -> str:
        """The device for the record of a run, such as "cpu avx2, 2 threads" or "NVIDIA H100 80GB HBM3, sm_90"."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Storage type of activations; sums, scales and weights are float32, or float64 if this is float64.

        With float32, methods that say so may round results to bfloat16, and operands of sparse products and rows that are
        moved may be bfloat16.
        """
        ...

    @property
    def partials(self) -> int:
        """Number of row chunks whose column sums are added in a fixed order."""
        ...

    @property
    def team(self) -> Team:
        """The threads of its kernels; on a GPU always one."""
        ...

    @property
    def queue_s(self) -> float:
        """Seconds of work that the host should queue before it waits for a result; 0 if calls return when done."""
        ...

    def activate(self) -> None:
        """Make the calling thread's next work run on this rank's device, after all work that the thread queued before.

        Call this before working for a rank: the thread may have served another rank since.
        """
        ...

    def allocate(self, nbytes: int) -> Tensor:
        """Return `nbytes` of zeroed device memory as uint8, aligned to 64 bytes."""
        ...

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """Return a host array as a device tensor; on the CPU it shares the memory."""
        ...

    def write(self, array: npt.NDArray[Any], out: Tensor) -> None:
        """Write a host array into a device tensor of the same shape, which may be a view of rows or columns; convert
        its type.
        """
        ...

    def sparse(
        self,
        indptr: npt.NDArray[Any],
        indices: npt.NDArray[Any],
        values: npt.NDArray[Any] | None,
        like: Sparse | None = None,
    ) -> Sparse:
        """Return a CSR matrix on the device, its rows cut into chunks of about equal work.

        like: a matrix of the same kind, such as that of the batch before: what the choice of a kernel depends on is taken
        from it, not found in a pass over the entries. Results do not depend on it.
        """
        ...

    def sparse_in_place(self, indptr: Tensor, indices: Tensor, values: Tensor | None, columns: int) -> Sparse:
        """Return a CSR matrix over tensors of the device that later work rewrites, of so many columns: which thread sums
        which rows follows from their number alone. Entries from the last row pointer on are never read.

        Raises: BackendError where products are cuSPARSE's.
        """
        ...

    def pinned(self, nbytes: int, *, required: bool = False) -> Tensor:
        """Return zeroed host memory as uint8, aligned to a page, which the device reads and writes by itself while the host
        goes on; on the CPU any memory.

        required: whether memory that the system refuses to pin will not do. Raises: BackendError then.
        """
        ...

    def spmm(self, adj: Sparse, h: Tensor, out: Tensor, *, accumulate: bool, epilogue: Epilogue | None) -> None:
        """Compute out (V, D) = or += adj (V, N) @ h (N, D), then the epilogue; h and out are each bfloat16 or of the
        type of sums.
        """
        ...

    @property
    def fuses_products(self) -> bool:
        """Whether `matmul` applies an epilogue while rows are in the cache; if not, callers should multiply block by
        block of rows.
        """
        ...

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
        """Compute out = or += a @ b, then the epilogue; a and b may be transposed views.

        With bfloat16 operands, out may be of the type of sums; if `fuses_products`, out may be bfloat16 with float32
        operands. Rows of out are rows first_row, ... of the epilogue's vectors.
        """
        ...

    def finish(self, z: Tensor, out: Tensor, epilogue: Epilogue, first_row: int = 0) -> None:
        """Compute out = epilogue(z); z may be out, or one of them bfloat16 and the other of the type of sums.

        Rows of z are rows first_row, ... of the epilogue's vectors.
        """
        ...

    def activation_grad(
        self, g: Tensor, h: Tensor, gradient: Gradient, first_row: int = 0, out: Tensor | None = None
    ) -> None:
        """Overwrite h with out_scale * dZ, dZ = (h != 0) * keep_scale * h_scale * g, as `gradient` says.

        out: bfloat16 while h is float32; if given, it receives the rounded result instead of h.
        The mask of ReLU and dropout is read from the zeros that the forward pass stored in h. A call with first_row = 0
        overwrites partials; calls for later rows add to them.
        """
        ...

    def product_grad(
        self, a: Tensor, b: Tensor, h: Tensor, block: Tensor, gradient: Gradient, out: Tensor | None = None
    ) -> None:
        """Compute activation_grad for g = a @ b without storing all of g.

        block: (rows, D), room for the rows of g that are computed at a time.
        """
        ...

    def sum_partials(self, partials: Tensor, out: Tensor) -> None:
        """Add the partial sums of all chunks, in order of the chunks, into `out` (D,)."""
        ...

    def softmax_xent(
        self, z: Tensor, target: LossTarget, row_scale: Tensor | None, loss: Tensor, partials: Tensor | None
    ) -> None:
        """Add the masked cross-entropy of the logits `z` to `loss`, and overwrite `z` with its gradient.

        z: (rows, C); becomes the gradient times row_scale. loss: float64 (1,); the sum over the rows of `target` times its
        inv_count is added. partials: float64 (chunks, C); receives each chunk's column sums of the unscaled gradient.
        """
        ...

    def entry_loss(
        self,
        kind: EntryLoss,
        z: Tensor,
        target: LossTarget,
        row_scale: Tensor | None,
        loss: Tensor,
        partials: Tensor | None,
    ) -> None:
        """Do the same as `softmax_xent` for targets (V, T), which are compared entry by entry; unknown entries get the
        gradient 0.
        """
        ...

    def confusion(self, z: Tensor, labels: Tensor, mask: Tensor, counts: Tensor) -> None:
        """Add to counts int64 (3, 3, C), per split (bit of mask), each class's right predictions, predictions and
        vertices.
        """
        ...

    def entry_counts(self, z: Tensor, labels: Tensor, mask: Tensor, counts: Tensor) -> None:
        """Do the same as `confusion` for the known entries of labels (V, T).

        An entry is positive if its label is above 0.5, and predicted positive if its score is above 0.
        """
        ...

    def dropout_values(self, matrix: Sparse, out: Tensor, row_ids: Tensor, dropout: Dropout) -> None:
        """Write the values of sparse features under input dropout, with the mask of the dense rows, to out (nnz,)."""
        ...

    def gather_rows(self, source: Tensor, index: Tensor, out: Tensor) -> None:
        """Copy source[index[i]] to out[i]; index int32. Here and in the next two methods both may be columns of a wider
        tensor.

        One may be bfloat16 and the other one float32: rows are converted on the way.
        """
        ...

    def scatter_rows(self, source: Tensor, index: Tensor, out: Tensor) -> None:
        """out[index[i]] = source[i]; index int32 without repeats. Rows that it does not name stay."""
        ...

    def scatter_add_rows(self, source: Tensor, index: Tensor, out: Tensor) -> None:
        """out[index[i]] += source[i]; index int32 without repeats."""
        ...

    def epoch_end(self, step: Step, books: Books) -> Callable[[], None]:
        """Return the end of an epoch: it updates all weights, then writes the signals to the history and resets them.

        It reads the learning rate of the epoch on the clock and advances the clock; a call allocates nothing of note.
        """
        ...

    def record(self) -> Event:
        """Return an event that completes once all work started so far is done."""
        ...

    @property
    def comm_stream(self) -> CommStream:
        """The stream on which this rank's transport moves data."""
        ...

    @property
    def upload_stream(self) -> UploadStream:
        """The stream on which batches are uploaded."""
        ...

    def repeatable(self, function: Callable[[], None], agree: Agree = alone) -> Repeatable:
        """Return a callable that does the device work of `function` in every call, more cheaply for the host if possible.

        `function` must do the same work each time and read no results; its first calls run unchanged.
        agree: called once, by all ranks in the same call, if a device is about to change how work is launched.
        """
        ...

    def synchronize(self) -> None:
        """Return when the device is idle."""
        ...

    def peak_bytes(self) -> int:
        """Return the peak memory of this process on the device, in bytes; on a CPU without pages of files, libraries among
        them, which the system takes back as it needs. As exact as its looks are many: each that finds a higher peak of all
        pages subtracts what is mapped then. Runs from disk, whose edges are mapped, look every 20 ms.
        """
        ...

    @property
    def edges(self) -> EdgeKernels:
        """Kernels for messages along edges, reduced at their destinations, and for their gradients."""
        ...

    @property
    def neighbours(self) -> NeighbourKernels:
        """Kernels for the maximum of neighbours and attention over them; float32 or float64 storage only."""
        ...

    @property
    def norms(self) -> NormKernels:
        """Kernels for layer norm and batch norm of dense rows."""
        ...

    @property
    def relations(self) -> RelationKernels | None:
        """Kernels for small relations that share launches; None: each relation is a product of its own."""
        ...
