"""The data that ops work on: sizes, parameters, constant inputs, and the runtime of one rank.

Shapes: V rows of this rank, D input width, E output width. A_hat = S_r A^T S_c; activations are stored scaled, H' = S_c H.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from mggcn.aggregate.base import Aggregation
from mggcn.backend.base import KernelBackend, Sparse
from mggcn.memory.arena import BufferSpec
from mggcn.memory.device import DEVICES, DeviceModel

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

T = TypeVar("T")


Start = Literal["glorot", "uniform", "zeros", "ones"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A weight matrix or vector, and how it starts: Glorot-uniform, uniform in +-1 / sqrt(inputs), or all zeros or ones.

    trained: whether it has a gradient; statistics that evaluation reads have none, but are saved like weights. inputs: of
    the layer, for uniform ones.
    """

    shape: tuple[int, ...]
    start: Start
    trained: bool = True
    inputs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What determines the sizes of a rank's buffers.

    rows: number of the rank's vertices. dtype: type of activations. operand: type of the rows that sparse products read,
    which is also the type of messages.
    """

    rows: int
    dtype: str
    operand: str
    device: DeviceModel = DEVICES["cpu"]

    def block_rows(self, cols: int) -> int:
        """Return the rows of a block of `cols` columns."""
        return max(1, min(self.rows, self.device.block_rows(BufferSpec("", 1, cols, self.dtype).nbytes)))

    @property
    def rounds(self) -> bool:
        """Whether operands of the graph are rounded to a type of their own."""
        return self.operand != self.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The device tensors that a rank's ops read besides buffers and weights.

    row_scale, col_scale (V,) or None: S_r, S_c; row_ids int64 (V,): original ids; labels int32, mask uint8 (V,);
    owned int64: rows that are no copies of another rank's, None if all.
    dense (V, D): X or A_hat X; sparse, sparse_t: the same as CSR and its transpose; dropped and dropped_t share their
    structure with values of their own, rewritten each epoch under input dropout; position int32 (nnz,): entry of
    `sparse` for each entry of `sparse_t`.
    """

    row_scale: Tensor | None
    col_scale: Tensor | None
    row_ids: Tensor
    target: Target
    owned: Tensor | None = None
    dense: Tensor | None = None
    sparse: Sparse | None = None
    sparse_t: Sparse | None = None
    dropped: Sparse | None = None
    dropped_t: Sparse | None = None
    position: Tensor | None = None


class Target(Protocol):
    """The targets of scores: the labels of a task.

    labels (V,) or (V, T) and mask uint8 (V,) on the device; known int64 (3, T): entries that are known on all ranks, by
    split, None for classes.
    """

    @property
    def labels(self) -> Tensor: ...

    @property
    def mask(self) -> Tensor: ...

    @property
    def known(self) -> npt.NDArray[np.int64] | None: ...

    def loss(
        self, backend: KernelBackend, z: Tensor, row_scale: Tensor | None, loss: Tensor, partials: Tensor | None
    ) -> None:
        """Implement KernelBackend.softmax_xent."""
        ...

    def count(self, backend: KernelBackend, z: Tensor, counts: Tensor) -> None:
        """Implement KernelBackend.confusion."""
        ...


class Runtime(Protocol):
    """The data that ops work on: the named buffers of one rank and its constant tensors."""

    backend: KernelBackend
    inputs: Inputs
    clock: Tensor
    """Seed and epoch, int64 (2,) on the device."""

    @property
    def aggregation(self) -> Aggregation: ...

    def buffer(self, name: str) -> Tensor: ...

    def parameter(self, name: str) -> Tensor:
        """Return a parameter in the type of sums."""
        ...

    def operand(self, name: str) -> Tensor:
        """Return a matrix of weights as products read it."""
        ...

    def gradient(self, name: str) -> Tensor: ...

    @property
    def loss(self) -> Tensor: ...

    @property
    def counts(self) -> Tensor: ...

    def sum_over_ranks(self, values: Tensor) -> None:
        """Replace a vector by its sum over ranks before the next call starts; every rank gets the same bits."""
        ...


def require(value: T | None) -> T:
    """Return an input that the lowering promised; raises KeyError if it was never loaded."""
    if value is None:
        raise KeyError("an op reads an input that was never loaded")
    return value
