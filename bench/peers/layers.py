"""Networks of other libraries' layers with the initial weights of mggcn's, and the step of an epoch.

A network is hidden layers of one kind, each with batch norm if the case has it and ReLU, and an output layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MakeLayer = Callable[[int, int, bool], Any]
"""Takes the widths of a layer's input and output, and whether it is the last; returns a module called with (graph, x)."""


def linear(weights: Mapping[str, Any], number: int, into: Any, *, bias: bool = False) -> None:
    """Set a torch.nn.Linear to mggcn's layers.<number>.weight; its bias, if it has one, to zero."""
    import torch

    into.weight.copy_(torch.from_numpy(weights[f"layers.{number}.weight"]).t())
    if bias:
        into.bias.zero_()


def heads(weights: Mapping[str, Any], name: str, into: Any) -> None:
    """Set a layer's parameter (1, H, C) to mggcn's (H, C)."""
    import torch

    into[0].copy_(torch.from_numpy(weights[name]))


def two_dense(d: int, width: int) -> Any:
    """GIN's function of a sum: two dense layers."""
    import torch

    return torch.nn.Sequential(torch.nn.Linear(d, width), torch.nn.ReLU(), torch.nn.Linear(width, width))


def make_net(widths: Sequence[int], make_layer: MakeLayer, batch_norm: bool) -> Any:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            pairs = list(itertools.pairwise(widths))
            self.layers = torch.nn.ModuleList(make_layer(d, e, i == len(pairs)) for i, (d, e) in enumerate(pairs, 1))
            norms = map(torch.nn.BatchNorm1d, widths[1:-1] if batch_norm else ())
            self.norms = torch.nn.ModuleList(norms)

        def forward(self, graph: Any, x: Any) -> Any:
            for number, layer in enumerate(self.layers, start=1):
                x = layer(graph, x)
                if number <= len(self.norms):
                    x = self.norms[number - 1](x)
                if number < len(self.layers):
                    x = x.relu_()
            return x

    return Net()


def epoch_of(net: Any, graph: Any, x: Any, train: Any, target: Any) -> Callable[[], float]:
    """Return the step of an epoch, which returns the loss."""
    import torch

    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, fused=True)

    def epoch() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(graph, x)[train], target)
        loss.backward()
        optimizer.step()
        return loss.item()

    return epoch
