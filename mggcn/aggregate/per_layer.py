"""One aggregation for every layer of a training epoch, where some layers compute fewer rows than others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mggcn.aggregate.base import Aggregation
from mggcn.aggregate.edge_op import SUM, EdgeOp
from mggcn.backend.base import Epilogue

if TYPE_CHECKING:
    from torch import Tensor


class PerLayer:
    """Forwards each layer's calls to that layer's own aggregation, or else to the one of all rows.

    Aggregations of single layers are exact for the rows that they compute, so they keep nothing from epoch to epoch. A
    row that they leave out is zero before the epilogue.
    """

    def __init__(self, every: Aggregation, of_layer: Mapping[int, Aggregation]) -> None:
        self._every = every
        self._of_layer = dict(of_layer)

    @property
    def exact(self) -> bool:
        return self._every.exact

    def begin_epoch(self, epoch: int) -> None:
        for aggregation in (self._every, *self._of_layer.values()):
            aggregation.begin_epoch(epoch)

    def forward(
        self,
        h: Tensor,
        out: Tensor,
        buffers: Sequence[Tensor],
        layer: int,
        epilogue: Epilogue | None,
        op: EdgeOp = SUM,
        local: Sequence[Tensor] = (),
    ) -> None:
        self._of_layer.get(layer, self._every).forward(h, out, buffers, layer, epilogue, op, local)

    def backward(
        self,
        g: Tensor,
        out: Tensor,
        buffers: Sequence[Tensor],
        layer: int,
        epilogue: Epilogue | None,
        op: EdgeOp = SUM,
        local: Sequence[Tensor] = (),
    ) -> None:
        self._of_layer.get(layer, self._every).backward(g, out, buffers, layer, epilogue, op, local)

    def state(self) -> Mapping[str, Tensor]:
        return self._every.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self._every.load_state(state)
