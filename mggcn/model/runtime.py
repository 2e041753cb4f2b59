"""The data that ops work on: sizes, parameters, constant inputs, and the runtime of one rank.

Shapes: V rows of this rank, D input width, E output width. A_hat = S_r A^T S_c; activations are stored scaled, H' = S_c H.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from mggcn.aggregate.base import Aggregation
from mggcn.backend.base import KernelBackend, Sparse
from mggcn.blocks.block import OWNED, Block, RowSet
from mggcn.errors import ConfigError
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
    """The sizes and types that determine a rank's buffers.

    rows: of each row set, or the most that a step has. dtype: type of activations. operand: type of the rows that sparse
    products read, which is also the type of messages.
    """

    rows: Mapping[RowSet, int]
    dtype: str
    operand: str
    device: DeviceModel = DEVICES["cpu"]

    @property
    def owned(self) -> int:
        """The number of the rank's vertices."""
        return self.rows[OWNED]

    def block_rows(self, cols: int, rows: RowSet = OWNED) -> int:
        """Return how many rows of `cols` columns kernels take at once."""
        return max(1, min(self.rows[rows], self.device.block_rows(BufferSpec("", 1, cols, self.dtype).nbytes)))

    @property
    def rounds(self) -> bool:
        """Whether operands of the graph are rounded to a type of their own."""
        return self.operand != self.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The device tensors of a row set of V rows that ops read besides buffers and weights.

    ids int64 (V,): original ids. row_scale, col_scale (V,) or None: S_r, S_c. owned int64: rows that are no copies of
    another rank's, None if all. counted uint8: 1 for rows that a step has, 0 for those that fill up its memory; None: a
    step has all. dense (V, D): X or A_hat X; sums (V, D): A_hat X, of a batch that may read both; gradient (V, D): memory
    for that of X, where X is learned. everyone (N, D): X of all vertices, of which this set has the rows `ids`, instead of
    dense rows. sparse: X or A_hat X instead of dense rows. target: of the set whose rows the loss compares.
    """

    ids: Tensor
    row_scale: Tensor | None = None
    col_scale: Tensor | None = None
    owned: Tensor | None = None
    counted: Tensor | None = None
    dense: Tensor | None = None
    sums: Tensor | None = None
    gradient: Tensor | None = None
    everyone: Tensor | None = None
    sparse: SparseInput | None = None
    target: Target | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseInput:
    """The sparse input of a row set: X, S_c X or A_hat X as CSR (V, D), and its transpose, None where nothing reads it.

    dropped, dropped_t: share their structure with values of their own, rewritten each epoch under input dropout; position
    int32 (nnz,): entry of `rows` for each entry of the transpose.
    """

    rows: Sparse
    rows_t: Sparse | None = None
    dropped: Sparse | None = None
    dropped_t: Sparse | None = None
    position: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRows:
    """The pairs of a step on the device: M pairs of rows of a set of S rows.

    heads, tails int32 (M,): the rows of each. matrix: with an entry of row v for each end of a pair that v is. Where scores
    are dot products, its column is the row at the other end, and values are room for the gradients of pairs; else it has no
    values, and the column is the place of the end among heads and then tails. pair int32 (2 M,): the pair of each entry.
    """

    heads: Tensor
    tails: Tensor
    matrix: Sparse
    pair: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The constant inputs of a rank, by row set, and the pairs of a step."""

    rows: Mapping[RowSet, Rows]
    pairs: PairRows | None = None

    @property
    def owned(self) -> Rows:
        """The inputs of all rows of the rank."""
        return self.rows[OWNED]

    @property
    def target(self) -> Target:
        """The target of the owned rows."""
        return require(self.owned.target)


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

    def rows(self, index: Tensor | slice) -> Target:
        """Return the target of some rows, by number; of a slice it shares memory."""
        ...


class HostRows(Protocol):
    """Slots in the host's memory for rows of a rank, and the copies on their way, one at a time for each slot."""

    def send(self, slot: int, rows: Tensor) -> None:
        """Begin to copy rows to a slot, behind all that the rank has queued and beside what it queues from here on."""
        ...

    def fetch(self, slot: int, out: Tensor) -> None:
        """Begin to copy a slot back, likewise: what was sent to it last."""
        ...

    def wait(self, slot: int) -> None:
        """Order what the rank queues from here on behind the slot's last copy."""
        ...


class Runtime(Protocol):
    """The data that ops work on: the named buffers of one rank and its constant tensors."""

    @property
    def backend(self) -> KernelBackend: ...

    @property
    def host(self) -> HostRows | None:
        """Where rows lie that a program keeps on the host; None if it keeps none there."""
        ...

    @property
    def clock(self) -> Tensor:
        """Seed and step, int64 (2,) on the device."""
        ...

    @property
    def continues(self) -> bool:
        """Whether an op has run over the rows before already: what it sums over rows goes on."""
        ...

    @property
    def first_column(self) -> int:
        """The first of an op's columns, where it runs over some of them; else 0."""
        ...

    def apart(self) -> AbstractContextManager[None]:
        """Return a context whose sums over rows are complete: they run over blocks that end where an op's rows end."""
        ...

    @property
    def inputs(self) -> Inputs: ...

    def aggregation(self, block: Block) -> Aggregation:
        """Return the aggregation over a block of the program that runs."""
        ...

    def buffer(self, name: str) -> Tensor: ...

    def num_rows(self, rows: RowSet) -> int:
        """Return how many rows a set has in the step that runs."""
        ...

    def parameter(self, name: str) -> Tensor:
        """Return a parameter in the type of sums."""
        ...

    def operand(self, name: str) -> Tensor:
        """Return a weight matrix in the type that products read."""
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


def check_state(state: Mapping[str, Tensor]) -> None:
    """Raise ConfigError unless weights are a mapping from names to torch tensors."""
    import torch

    if not isinstance(state, Mapping):
        raise ConfigError(f"expected weights as a mapping from names to tensors, got {type(state).__name__}")
    for name, value in state.items():
        if not torch.is_tensor(value):
            raise ConfigError(f"{name} must be a torch tensor, got {type(value).__name__}; torch.as_tensor makes one")
