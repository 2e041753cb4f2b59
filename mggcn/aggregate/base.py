"""The contract of an aggregation strategy: how neighbours' rows reach a rank, forwards and backwards.

V rows of this rank, D width; Aggregation moves rows, the sparse product itself is the backend's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mggcn.backend.base import Epilogue
from mggcn.plan.memory import BufferSpec

if TYPE_CHECKING:
    from torch import Tensor


class AggregationPlan(Protocol):
    """What a strategy needs and sends, known before it runs; needs no torch."""

    def buffers(self, op: str, cols: int, dtype: str) -> tuple[BufferSpec, ...]:
        """Return the buffers of one aggregation of width `cols`, their names starting with `op`."""
        ...

    @property
    def num_spmm(self) -> int:
        """Sparse products of one aggregation on this rank."""
        ...

    @property
    def messages(self) -> int:
        """Messages of one aggregation that this rank takes part in."""
        ...

    def bytes_sent(self, spec: BufferSpec) -> int:
        """Bytes that leave this rank when it aggregates the rows of buffer `spec`."""
        ...


class Aggregation(Protocol):
    """Sums over neighbours across ranks.

    `exact` says that backward is the adjoint of forward, and forward the product with A^T, in every epoch.
    """

    @property
    def exact(self) -> bool: ...

    def begin_epoch(self, epoch: int) -> None:
        """Called on every rank before the first op of an epoch."""
        ...

    def forward(self, h: Tensor, out: Tensor, buffers: Sequence[Tensor], layer: int, epilogue: Epilogue | None) -> None:
        """Out (V, D) = epilogue(A^T h) for this rank's rows; `buffers` as its plan declared them. Collective."""
        ...

    def backward(
        self, g: Tensor, out: Tensor, buffers: Sequence[Tensor], layer: int, epilogue: Epilogue | None
    ) -> None:
        """Out (V, D) = epilogue(A g) for this rank's rows. Collective."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Return the tensors that survive an epoch; they are checkpointed per rank."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` gave."""
        ...
