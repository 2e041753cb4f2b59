"""The process of PyTorch Geometric in a comparison of attention: GATConv or GATv2Conv layers on a plain edge_index.

kind    (job) gat or gatv2. heads  (job) of every layer; the last one averages them.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from bench.process import Contender, memory, serve


def make_net(kind: str, widths: list[int], heads: int) -> Any:
    import torch
    from torch_geometric.nn import GATConv, GATv2Conv

    conv = {"gat": GATConv, "gatv2": GATv2Conv}[kind]

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            hidden = [conv(d, e // heads, heads=heads) for d, e in itertools.pairwise(widths[:-1])]
            self.convs = torch.nn.ModuleList([*hidden, conv(widths[-2], widths[-1], heads=heads, concat=False)])

        def forward(self, x: Any, edges: Any) -> Any:
            for number, layer in enumerate(self.convs):
                x = layer(x.relu_() if number else x, edges)
            return x

    return Net()


def set_weights(kind: str, net: Any, weights: Any) -> None:
    """Start from mggcn's weights, whose biases are zero."""
    import torch

    def tensor(name: str) -> Any:
        return torch.from_numpy(weights[name])

    for number, conv in enumerate(net.convs, start=1):
        conv.bias.zero_()
        if kind == "gat":
            conv.lin.weight.copy_(tensor(f"layers.{number}.weight").t())
            conv.att_src[0].copy_(tensor(f"layers.{number}.source"))
            conv.att_dst[0].copy_(tensor(f"layers.{number}.destination"))
            continue
        for side, linear in ((2 * number - 1, conv.lin_l), (2 * number, conv.lin_r)):
            linear.weight.copy_(tensor(f"layers.{side}.weight").t())
            linear.bias.zero_()
        conv.att[0].copy_(tensor(f"layers.{2 * number}.attention"))


def prepare(job: dict[str, Any]) -> Contender:
    """Load the graph, build the network with mggcn's initial weights, and the step of an epoch."""
    import numpy as np
    import torch
    import torch_geometric  # noqa: F401

    from bench.peers.worker_pyg import load, make_graph

    torch.set_num_threads(job["threads"])
    imported = memory()
    indptr, indices, x, train, target = load(Path(job["store"]))
    edges = make_graph("scatter", indptr, indices)
    del indptr, indices
    net = make_net(job["kind"], [x.shape[1], *job["hidden"], job["classes"]], job["heads"])
    with np.load(job["weights"]) as weights, torch.no_grad():
        set_weights(job["kind"], net, weights)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, fused=True)

    def epoch() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x, edges)[train], target)
        loss.backward()
        optimizer.step()
        return loss.item()

    return Contender(epoch, {"imported": imported["VmRSS"]})


if __name__ == "__main__":
    serve(prepare)
