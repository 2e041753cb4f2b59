"""Which aggregation a layer gets. What pruned ones compute is held by test_contract.py and planning/test_pruning.py."""

from __future__ import annotations

from typing import Any

import torch

from mggcn.aggregate.edge_op import SUM
from mggcn.aggregate.per_layer import PerLayer


class Noted:
    """An aggregation that notes its calls."""

    exact = True

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def begin_epoch(self, epoch: int) -> None:
        self.calls.append(("epoch", epoch))

    def forward(self, h: Any, out: Any, buffers: Any, layer: int, epilogue: Any, op: Any, local: Any) -> None:
        self.calls.append(("forward", layer, op, local))

    def backward(self, g: Any, out: Any, buffers: Any, layer: int, epilogue: Any, op: Any, local: Any) -> None:
        self.calls.append(("backward", layer, op, local))

    def state(self) -> dict[str, torch.Tensor]:
        return {"kept": torch.ones(1)}

    def load_state(self, state: Any) -> None:
        self.calls.append(("load", list(state)))


def test_each_layer_has_its_own() -> None:
    """Fails if a layer takes another's rows, one direction other rows than the other, or an op or a state goes astray."""
    every, third = Noted(), Noted()
    both, t = PerLayer(every, {3: third}), torch.zeros(1, 1)
    both.begin_epoch(5)
    for layer in (1, 2, 3):
        both.forward(t, t, (), layer, None, "own", [t])
    for layer in (3, 2):
        both.backward(t, t, (), layer, None)
    both.load_state(both.state())
    forward, backward = (
        [("forward", layer, "own", [t]) for layer in (1, 2, 3)],
        [("backward", n, SUM, ()) for n in (2, 3)],
    )
    assert third.calls == [("epoch", 5), forward[2], backward[1]]
    assert every.calls == [("epoch", 5), *forward[:2], backward[0], ("load", ["kept"])]
    assert both.exact
