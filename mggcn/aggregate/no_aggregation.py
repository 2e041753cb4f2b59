"""The aggregation of a model without a graph: there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from mggcn.aggregate.base import Aggregation
from mggcn.aggregate.edge_op import SUM, EdgeOp
from mggcn.backend.base import Epilogue
from mggcn.errors import PlanError

if TYPE_CHECKING:
    from torch import Tensor


class NoAggregation(Aggregation):
    """Keeps nothing and sends nothing; calling it means that the plan is wrong."""

    exact = True

    def forward(
        self,
        h: Tensor,
        out: Tensor,
        buffers: Sequence[Tensor],
        layer: int,
        epilogue: Epilogue | None,
        op: EdgeOp = SUM,
        local: Sequence[Tensor] = (),
    ) -> NoReturn:
        raise PlanError(f"layer {layer} aggregates, but the model has no graph")

    def backward(
        self,
        g: Tensor,
        out: Tensor,
        buffers: Sequence[Tensor],
        layer: int,
        epilogue: Epilogue | None,
        op: EdgeOp = SUM,
        local: Sequence[Tensor] = (),
    ) -> NoReturn:
        self.forward(g, out, buffers, layer, epilogue)
