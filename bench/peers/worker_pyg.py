"""The process of PyTorch Geometric in a comparison: a GCN of GCNConv layers, in the ways that PyG has for a whole graph.

fused    GCNConv whose aggregation is EdgeIndex.matmul on the cached normalised values. Faster than what PyG ships: its own
         GCNConv writes out all messages when it is given an EdgeIndex.
scaled   the same, unweighted between two row scalings, so that the symmetric graph serves both directions.
csr      GCNConv as it is on the normalised torch.sparse CSR matrix: PyG's documented memory-efficient way.
scatter  GCNConv as it is on a plain edge_index, cached.
sparse   GCNConv as it is on torch_sparse's SparseTensor, cached; needs torch-sparse.
precomputed  (job) A X is computed once: the first layer is a dense product. Nothing of PyG's does that by itself.
"""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

from bench.process import Contender, memory, serve


def load(store: Path) -> tuple[Any, ...]:
    """The arrays of a store as tensors: indptr, indices, features, ids of the training vertices and their labels."""
    import numpy as np
    import torch

    from bench.arrays import dense_features, targets

    arrays = (np.load(store / "indptr.npy"), np.load(store / "indices.npy"), dense_features(store), *targets(store))
    return tuple(torch.from_numpy(array) for array in arrays)


def with_loops(indptr: Any, indices: Any) -> tuple[Any, Any]:
    """CSR with a self-loop at the end of every row; the stored graphs have none."""
    import torch

    counts = indptr.diff()
    n = counts.numel()
    pointers = indptr + torch.arange(n + 1)
    columns = torch.empty(indices.numel() + n, dtype=indices.dtype)
    place = torch.arange(indices.numel()) + torch.repeat_interleave(torch.arange(n), counts)
    columns[place] = indices
    columns[pointers[1:] - 1] = torch.arange(n, dtype=indices.dtype)
    return pointers, columns


def make_conv(kind: str) -> Any:
    """The layer's class for a kind."""
    from torch_geometric.nn import GCNConv

    class Fused(GCNConv):  # type: ignore[misc]
        def forward(self, x: Any, graph: Any) -> Any:
            adj, values, _ = graph
            return adj.matmul(self.lin(x), input_value=values, transpose=True) + self.bias

    class Scaled(GCNConv):  # type: ignore[misc]
        def forward(self, x: Any, graph: Any) -> Any:
            adj, _, scale = graph
            return adj.matmul(self.lin(x) * scale, transpose=True) * scale + self.bias

    plain = {"cached": True} if kind in ("scatter", "sparse") else {"normalize": False}
    classes = {"fused": Fused, "scaled": Scaled}
    return lambda d, e: classes.get(kind, GCNConv)(d, e, **plain)


def make_graph(kind: str, indptr: Any, indices: Any) -> Any:
    """The graph as a kind of layer takes it."""
    import torch
    from torch_geometric import EdgeIndex

    n = indptr.numel() - 1
    if kind == "scatter":
        rows = torch.repeat_interleave(torch.arange(n), indptr.diff())
        return torch.stack([indices.long(), rows])
    if kind == "sparse":
        from torch_sparse import SparseTensor

        return SparseTensor(rowptr=indptr, col=indices.long(), sparse_sizes=(n, n))
    pointers, columns = with_loops(indptr, indices)
    scale = pointers.diff().float().pow(-0.5)
    rows = torch.repeat_interleave(torch.arange(n, dtype=torch.int32), pointers.diff())
    values = scale[rows] * scale[columns]
    if kind == "csr":
        return torch.sparse_csr_tensor(pointers.int(), columns, values, (n, n))
    pair = torch.stack([columns, rows])
    del columns, rows
    adj = EdgeIndex(pair, sparse_size=(n, n), sort_order="col", is_undirected=True)
    if kind == "scaled":
        return adj, None, scale.view(-1, 1)
    adj.fill_cache_()
    return adj, values, None


def make_net(kind: str, widths: list[int]) -> Any:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            conv = make_conv(kind)
            self.convs = torch.nn.ModuleList(conv(d, e) for d, e in itertools.pairwise(widths))

        def forward(self, x: Any, graph: Any, aggregated: bool = False) -> Any:
            for number, conv in enumerate(self.convs):
                if number:
                    x = x.relu_()
                x = conv.lin(x) + conv.bias if aggregated and not number else conv(x, graph)
            return x

    return Net()


def aggregate(kind: str, graph: Any, x: Any) -> Any:
    """A X by a layer whose weight is the identity."""
    import torch

    conv = make_conv(kind)(x.shape[1], x.shape[1])
    with torch.no_grad():
        conv.lin.weight.copy_(torch.eye(x.shape[1]))
        conv.bias.zero_()
        return conv(x, graph)


def prepare(job: dict[str, Any]) -> Contender:
    """Load the graph, build the network with mggcn's initial weights, and the step of an epoch."""
    import numpy as np
    import torch

    warnings.filterwarnings("ignore", "Sparse")
    import torch_geometric  # noqa: F401

    torch.set_num_threads(job["threads"])
    imported, aggregated = memory(), bool(job.get("precomputed"))
    indptr, indices, x, train, target = load(Path(job["store"]))
    graph = make_graph(job["kind"], indptr, indices)
    del indptr, indices
    net = make_net(job["kind"], [x.shape[1], *job["hidden"], job["classes"]])
    if aggregated:
        x = aggregate(job["kind"], graph, x)
    with np.load(job["weights"]) as weights, torch.no_grad():
        for layer, conv in enumerate(net.convs, start=1):
            conv.lin.weight.copy_(torch.from_numpy(weights[f"layers.{layer}.weight"]).t())
            conv.bias.zero_()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, fused=True)

    def epoch() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x, graph, aggregated)[train], target)
        loss.backward()
        optimizer.step()
        return loss.item()

    return Contender(epoch, {"imported": imported["VmRSS"]})


if __name__ == "__main__":
    serve(prepare)
