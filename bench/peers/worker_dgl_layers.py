"""The process of DGL in a comparison of attention, GraphSAGE and GIN: its layers as they are.

kind  (job) gat, gatv2, sage-mean, sage-max or gin. heads  (job) of attention, averaged by the last layer. Attention is on
the graph with self-loops, the others on the graph as it is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.peers.layers import epoch_of, heads, linear, make_net, two_dense
from bench.process import Contender, memory, serve


def make_layer(kind: str, count: int, d: int, e: int, last: bool) -> Any:
    import torch
    from dgl.nn import GATConv, GATv2Conv, GINConv, SAGEConv

    attends = kind in ("gat", "gatv2")

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = e if last else e // count
            if kind == "gat":
                self.conv = GATConv(d, width, count, bias=False)
            elif kind == "gatv2":
                self.conv = GATv2Conv(d, width, count)
            elif kind == "gin":
                self.conv = GINConv(two_dense(d, e), "sum", learn_eps=True)
            else:
                self.conv = SAGEConv(d, e, "mean" if kind == "sage-mean" else "pool")
            # DGL's bias is one of each head even where heads are averaged (GAT), or before attention alone (GATv2).
            self.bias = torch.nn.Parameter(torch.zeros(e)) if attends else None

        def forward(self, graph: Any, x: Any) -> Any:
            h = self.conv(graph, x)
            if not attends:
                return h
            return (h.mean(1) if last else h.flatten(1)) + self.bias

    return Layer()


def set_weights(kind: str, net: Any, weights: Mapping[str, Any]) -> None:
    """Start from mggcn's weights, whose biases are zero."""
    for number, conv in enumerate((layer.conv for layer in net.layers), start=1):
        if kind == "gat":
            linear(weights, number, conv.fc)
            heads(weights, f"layers.{number}.source", conv.attn_l)
            heads(weights, f"layers.{number}.destination", conv.attn_r)
        elif kind == "gatv2":
            linear(weights, 2 * number - 1, conv.fc_src, bias=True)
            linear(weights, 2 * number, conv.fc_dst, bias=True)
            heads(weights, f"layers.{2 * number}.attention", conv.attn)
        elif kind == "gin":
            linear(weights, 2 * number - 1, conv.apply_func[0], bias=True)
            linear(weights, 2 * number, conv.apply_func[2], bias=True)
        elif kind == "sage-mean":
            linear(weights, 2 * number - 1, conv.fc_neigh)
            linear(weights, 2 * number, conv.fc_self, bias=True)
        else:
            linear(weights, 3 * number - 2, conv.fc_pool, bias=True)
            linear(weights, 3 * number - 1, conv.fc_self, bias=True)
            linear(weights, 3 * number, conv.fc_neigh)


def make_graph(store: Path, loops: bool) -> Any:
    """The graph in the formats of both directions, and as pairs, which products for each edge need."""
    import dgl
    import numpy as np
    import torch

    if loops:
        from bench.arrays import with_loops

        arrays = with_loops(store)
    else:
        arrays = np.load(store / "indptr.npy"), np.load(store / "indices.npy")
    indptr, indices = (torch.from_numpy(array).long() for array in arrays)
    # Without numbers of edges libxsmm refuses products with a number for each edge (DGL 2.1.0).
    edges = torch.arange(indices.numel())
    graph = dgl.graph(("csc", (indptr, indices, edges)), num_nodes=indptr.numel() - 1)
    graph = graph.int().formats(["coo", "csr", "csc"])
    graph.create_formats_()
    return graph


def prepare(job: dict[str, Any]) -> Contender:
    """Load the graph, build the network with mggcn's initial weights, and the step of an epoch."""
    import dgl  # noqa: F401
    import numpy as np
    import torch

    from bench.arrays import dense_features, targets

    torch.set_num_threads(job["threads"])
    imported, store, kind = memory(), Path(job["store"]), job["kind"]
    graph = make_graph(store, kind in ("gat", "gatv2"))
    x = torch.from_numpy(dense_features(store))
    train, target = (torch.from_numpy(array) for array in targets(store))
    widths = [x.shape[1], *job["hidden"], job["classes"]]
    net = make_net(widths, lambda *size: make_layer(kind, job["heads"], *size), job["batch_norm"])
    with np.load(job["weights"]) as weights, torch.no_grad():
        set_weights(kind, net, weights)
    return Contender(epoch_of(net, graph, x, train, target), {"imported": imported["VmRSS"]})


if __name__ == "__main__":
    serve(prepare)
