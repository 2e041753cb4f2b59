"""The process of PyTorch Geometric in a comparison of attention, GraphSAGE and GIN: its layers as they are.

kind  (job) gat, gatv2, sage-mean, sage-max or gin. heads  (job) of attention, averaged by the last layer.
way   (job) scatter: a plain edge_index, messages written out; csr: a torch.sparse CSR matrix, PyG's documented
      memory-efficient way, which its layers of attention do not have.
double (job) in float64, to tell rounding from a fault.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.peers.layers import epoch_of, heads, linear, make_net, two_dense
from bench.process import Contender, memory, serve


def make_layer(kind: str, count: int, d: int, e: int, last: bool) -> Any:
    import torch
    from torch_geometric.nn import GATConv, GATv2Conv, GINConv, SAGEConv

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if kind in ("gat", "gatv2"):
                conv = GATConv if kind == "gat" else GATv2Conv
                self.conv = conv(d, e if last else e // count, heads=count, concat=not last)
            elif kind == "gin":
                self.conv = GINConv(two_dense(d, e), train_eps=True)
            else:
                self.conv = SAGEConv(d, e, aggr=kind.removeprefix("sage-"), project=kind == "sage-max")

        def forward(self, graph: Any, x: Any) -> Any:
            return self.conv(x, graph)

    return Layer()


def set_weights(kind: str, net: Any, weights: Mapping[str, Any]) -> None:
    """Start from mggcn's weights, whose biases are zero."""
    for number, conv in enumerate((layer.conv for layer in net.layers), start=1):
        if kind == "gat":
            linear(weights, number, conv.lin)
            heads(weights, f"layers.{number}.source", conv.att_src)
            heads(weights, f"layers.{number}.destination", conv.att_dst)
            conv.bias.zero_()
        elif kind == "gatv2":
            linear(weights, 2 * number - 1, conv.lin_l, bias=True)
            linear(weights, 2 * number, conv.lin_r, bias=True)
            heads(weights, f"layers.{2 * number}.attention", conv.att)
            conv.bias.zero_()
        elif kind == "gin":
            linear(weights, 2 * number - 1, conv.nn[0], bias=True)
            linear(weights, 2 * number, conv.nn[2], bias=True)
        elif kind == "sage-mean":
            linear(weights, 2 * number - 1, conv.lin_l, bias=True)
            linear(weights, 2 * number, conv.lin_r)
        else:
            linear(weights, 3 * number - 2, conv.lin, bias=True)
            linear(weights, 3 * number - 1, conv.lin_r)
            linear(weights, 3 * number, conv.lin_l, bias=True)


def make_graph(way: str, indptr: Any, indices: Any) -> Any:
    import torch

    if way == "csr":
        n = indptr.numel() - 1
        return torch.sparse_csr_tensor(indptr, indices.long(), torch.ones(indices.numel()), (n, n))
    from bench.peers.worker_pyg import make_graph as plain

    return plain("scatter", indptr, indices)


def prepare(job: dict[str, Any]) -> Contender:
    """Load the graph, build the network with mggcn's initial weights, and the step of an epoch."""
    import numpy as np
    import torch

    warnings.filterwarnings("ignore", "Sparse")
    import torch_geometric  # noqa: F401

    from bench.peers.worker_pyg import load

    torch.set_num_threads(job["threads"])
    imported, kind = memory(), job["kind"]
    indptr, indices, x, train, target = load(Path(job["store"]))
    graph = make_graph(job["way"], indptr, indices)
    del indptr, indices
    widths = [x.shape[1], *job["hidden"], job["classes"]]
    net = make_net(widths, lambda *size: make_layer(kind, job["heads"], *size), job["batch_norm"])
    with np.load(job["weights"]) as weights, torch.no_grad():
        set_weights(kind, net, weights)
    if job.get("double"):
        net, x = net.double(), x.double()
    return Contender(epoch_of(net, graph, x, train, target), {"imported": imported["VmRSS"]})


if __name__ == "__main__":
    serve(prepare)
