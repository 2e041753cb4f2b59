"""The kernel backend: what a device must compute, at the level of kernels, on torch tensors of that device.

Shapes: V rows of this rank, N rows of the dense operand, D input width, E output width, C classes.
Dense tensors are (rows, cols) with unit column stride; their row stride is the leading dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt

if TYPE_CHECKING:  # `mggcn plan` lowers models without loading torch
    import torch
    from torch import Tensor

PARTIALS = 64
"""Row chunks whose column sums are added in a fixed order (cpu/common.h)."""


class Event(Protocol):
    """A point in a rank's work that other work waits for."""

    def wait(self) -> None:
        """Return when the work is done (CPU) or ordered before what follows (GPU).

        Raises: CommError if it is a message and another rank failed or the transport's timeout passed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Done:
    """The event of work that is already done."""

    def wait(self) -> None:
        return


DONE = Done()


@dataclass(frozen=True, slots=True)
class Dropout:
    """One dropout mask: Philox4x32-10 keyed by (seed, epoch), counted by column, original id and layer."""

    probability: float
    seed: int
    epoch: int
    layer: int

    @property
    def threshold(self) -> int:
        """A 16-bit word below this drops its activation; the highest word is always kept."""
        return min(round(65536 * self.probability), 65535)

    @property
    def keep_scale(self) -> float:
        """Factor of what is kept, the inverse of the exact probability of keeping."""
        return 65536 / (65536 - self.threshold)


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What happens to a row after its product: out_scale * drop(relu(row_scale * z + bias)); None switches a part off."""

    row_scale: Tensor | None = None
    bias: Tensor | None = None
    relu: bool = False
    dropout: Dropout | None = None
    row_ids: Tensor | None = None
    out_scale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Sparse:
    """A CSR matrix on the device: indptr int64 (V + 1,), indices int32 (nnz,), values (nnz,) or None for ones.

    chunks: int64 row ranges of about equal work, handed to the threads of a device that has them.
    """

    indptr: Tensor
    indices: Tensor
    values: Tensor | None
    chunks: Tensor

    @property
    def num_rows(self) -> int:
        return self.indptr.shape[0] - 1

    @property
    def nnz(self) -> int:
        return self.indices.shape[0]


class KernelBackend(Protocol):
    """Kernels of one device. Outputs are written in place; nothing of note is allocated. All sums repeat bit for bit."""

    @property
    def dtype(self) -> torch.dtype:
        """Storage type of activations."""
        ...

    def allocate(self, nbytes: int) -> Tensor:
        """Return `nbytes` of zeroed device memory as uint8, aligned to 64 bytes."""
        ...

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """Return a host array as a device tensor; on the CPU it shares the memory."""
        ...

    def sparse(self, indptr: npt.NDArray[Any], indices: npt.NDArray[Any], values: npt.NDArray[Any] | None) -> Sparse:
        """Return a CSR matrix on the device, its rows cut into chunks of about equal work."""
        ...

    def spmm(self, adj: Sparse, h: Tensor, out: Tensor, *, accumulate: bool, epilogue: Epilogue | None) -> None:
        """Out (V, D) = or += adj (V, N) @ h (N, D), then the epilogue."""
        ...

    def matmul(self, a: Tensor, b: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
        """Out = or += a @ b; a and b may be transposed views."""
        ...

    def finish(self, z: Tensor, out: Tensor, epilogue: Epilogue, first_row: int = 0) -> None:
        """Out = epilogue(z); z may be out. Rows of z are rows first_row, ... of the epilogue's vectors."""
        ...

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
        """H = out_scale * dZ with dZ = (h != 0) * keep_scale * h_scale * g; partials (64, D) += columns of dZ.

        The mask of ReLU and dropout is read from the zeros that the forward pass stored in h.
        """
        ...

    def sum_partials(self, partials: Tensor, out: Tensor) -> None:
        """Out (D,) = the 64 partial sums, added in order."""
        ...

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
        """Masked cross-entropy: loss (1,) += its sum times inv_count, z becomes row_scale times its gradient.

        Rows count where bit 0 of mask (uint8) is set; partials (64, C) += columns of the unscaled gradient.
        """
        ...

    def confusion(self, z: Tensor, labels: Tensor, mask: Tensor, counts: Tensor) -> None:
        """Counts int64 (3, 3, C) += per split (bit of mask): right predictions, predictions and vertices of a class."""
        ...

    def dropout_values(self, matrix: Sparse, out: Tensor, row_ids: Tensor, dropout: Dropout) -> None:
        """Out (nnz,) = the values of sparse features under input dropout: the mask of the dense row."""
        ...

    def gather_rows(self, source: Tensor, index: Tensor, out: Tensor) -> None:
        """out[i] = source[index[i]]; index int32."""
        ...

    def scatter_add_rows(self, source: Tensor, index: Tensor, out: Tensor) -> None:
        """out[index[i]] += source[i]; index int32 without repeats."""
        ...

    def record(self) -> Event:
        """Return an event that is done when everything started so far is done."""
        ...

    def synchronize(self) -> None:
        """Return when the device is idle."""
        ...

    def peak_bytes(self) -> int:
        """Return the peak memory of this process on the device, in bytes (CPU: VmHWM)."""
        ...
