"""The process of DGL in a comparison: a GCN of GraphConv layers, normalised on both sides, on a graph with self-loops.

GraphConv is as it is: DGL's kernel for sums (libxsmm) between two row scalings.
precomputed  (job) A X is computed once: the first layer is a dense product. Nothing of DGL's does that by itself.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from bench.process import Contender, memory, serve

COLUMNS = 128
"""Of A X at a time: DGL 2.1.0 crashes in libxsmm at 602; at 128, and the 90 that are left, it does not."""


def make_graph(store: Path) -> Any:
    """The graph with self-loops in the formats of both directions."""
    import dgl
    import torch

    from bench.arrays import with_loops

    indptr, indices = with_loops(store)
    csc = ("csc", (torch.from_numpy(indptr), torch.from_numpy(indices).long(), []))
    graph = dgl.graph(csc, num_nodes=indptr.size - 1).int().formats(["csc", "csr"])
    graph.create_formats_()
    return graph


def make_net(widths: list[int]) -> Any:
    import torch
    from dgl.nn import GraphConv

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            pairs = itertools.pairwise(widths)
            self.convs = torch.nn.ModuleList(GraphConv(d, e, norm="both", allow_zero_in_degree=True) for d, e in pairs)

        def forward(self, graph: Any, x: Any, aggregated: bool) -> Any:
            for number, conv in enumerate(self.convs):
                if number:
                    x = x.relu_()
                x = x @ conv.weight + conv.bias if aggregated and not number else conv(graph, x)
            return x

    return Net()


def aggregate(graph: Any, x: Any) -> Any:
    """A X by GraphConv without a weight, some columns at a time."""
    import torch
    from dgl.nn import GraphConv

    parts = []
    with torch.no_grad():
        for part in x.split(COLUMNS, dim=1):
            width = part.shape[1]
            conv = GraphConv(width, width, norm="both", weight=False, bias=False, allow_zero_in_degree=True)
            parts.append(conv(graph, part.contiguous()))
    return torch.cat(parts, dim=1)


def prepare(job: dict[str, Any]) -> Contender:
    """Load the graph, build the network with mggcn's initial weights, and the step of an epoch."""
    import dgl  # noqa: F401
    import numpy as np
    import torch

    from bench.arrays import dense_features, targets

    torch.set_num_threads(job["threads"])
    imported, store, aggregated = memory(), Path(job["store"]), bool(job.get("precomputed"))
    graph = make_graph(store)
    x = torch.from_numpy(dense_features(store))
    train, target = (torch.from_numpy(array) for array in targets(store))
    net = make_net([x.shape[1], *job["hidden"], job["classes"]])
    if aggregated:
        x = aggregate(graph, x)
    with np.load(job["weights"]) as weights, torch.no_grad():
        for layer, conv in enumerate(net.convs, start=1):
            conv.weight.copy_(torch.from_numpy(weights[f"layers.{layer}.weight"]))
            conv.bias.zero_()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, fused=True)

    def epoch() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(graph, x, aggregated)[train], target)
        loss.backward()
        optimizer.step()
        return loss.item()

    return Contender(epoch, {"imported": imported["VmRSS"]})


if __name__ == "__main__":
    serve(prepare)
