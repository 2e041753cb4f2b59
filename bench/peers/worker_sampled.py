"""The process of DGL or PyG in the contest of sampled training. Answers `epoch` with seconds, `result` with facts.

part  (job) sampler: seconds of a batch's blocks, with both orders of DGL's; feed: of drawing and gathering; train: of an
      epoch, from its first batches; losses: trains whole epochs, and returns their mean losses and the test accuracy then,
      of the whole graph.
package  (job) dgl: dgl.dataloading with int64 ids, since blocks of int32 ids may be broken (DGL 2.1.0, two threads); pyg:
      NeighborLoader on torch-sparse's sampling operator, which setup.sh compiles alone. A batch of each is checked first.
again  (job, pyg) draw in every hop of all vertices that the hop has, as DGL and mggcn do, by PyG's sampler of one hop.
      NeighborLoader draws of a vertex once, where it is first reached, and every layer reads these edges.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.peers.layers import Sampled, linear, paced, trained
from bench.process import Contender, held, serve

NAMES = {"sage": "sage-mean", "gat": "gat"}
"""Of layers, in the workers for the whole graph."""


def dgl_library(job: dict[str, Any]) -> Contender:
    """Return what DGL does in a part: dgl.dataloading with int64 ids, whose fused sampler is right with two threads."""
    import dgl
    import numpy as np
    import torch
    from dgl.dataloading import DataLoader, NeighborSampler
    from dgl.nn import GraphConv

    from bench.arrays import dense_features, targets, with_loops
    from bench.peers import worker_dgl_layers

    warnings.filterwarnings("ignore", "Dataloader CPU affinity")
    dgl.utils.set_num_threads(job["threads"])
    dgl.seed(job.get("seed", 1))
    imported, store = held(), Path(job["store"])
    has_loops = job["kind"] != "sage"

    def graph_of(looped: bool) -> Any:
        indptr, indices = with_loops(store) if looped else (np.load(store / f"{n}.npy") for n in ("indptr", "indices"))
        csc = (torch.from_numpy(indptr), torch.from_numpy(indices).long(), torch.empty(0, dtype=torch.int64))
        return dgl.graph(("csc", csc), num_nodes=indptr.size - 1).formats("csc")

    # Timed as its users have it, a loop being an edge that may be drawn. Of losses every row has its own, as in mggcn.
    graph = graph_of(has_loops and job["part"] == "train")
    train, labels = (torch.from_numpy(array) for array in targets(store))
    known = torch.empty(graph.num_nodes(), dtype=torch.int64)
    known[train] = labels
    sampler = NeighborSampler(job["fanouts"][::-1])
    extents = {"batch_size": job["batch"], "shuffle": True, "num_workers": job.get("workers", 0)}
    loader = DataLoader(graph, train, sampler, **extents)
    check_dgl(next(iter(loader)), job["fanouts"])
    sizes: list[float] = []

    def both_orders(batch: Any) -> None:
        for block in batch[2]:
            block.adj_tensors("csc"), block.adj_tensors("csr")
        sizes[:] = [float(sum(block.num_edges() for block in batch[2])), float(len(batch[0]))]

    if job["part"] == "sampler":
        drawn = Drawn(lambda seeds: sampler.sample_blocks(graph, seeds), train, job["batch"])
        return Contender(lambda: paced(drawn, both_orders, job["batches"]), {"imported": imported}, lambda: sizes)
    x = torch.from_numpy(dense_features(store))
    if job["part"] == "feed":
        return Contender(
            lambda: paced(loader, lambda b: x.index_select(0, b[0]), job["batches"]), {"imported": imported}
        )

    def layer(d: int, e: int, last: bool) -> Any:
        if job["kind"] == "gcn":
            return GraphConv(d, e, norm="both", allow_zero_in_degree=True)
        return worker_dgl_layers.make_layer(NAMES[job["kind"]], job["heads"], d, e, last)

    def start(net: Any, weights: Any) -> None:
        if job["kind"] != "gcn":
            worker_dgl_layers.set_weights(NAMES[job["kind"]], net, weights)
            return
        for number, conv in enumerate(net.layers, start=1):
            conv.weight.copy_(torch.from_numpy(weights[f"layers.{number}.weight"]))

    def with_own(block: Any) -> Any:
        own, (sources, destinations) = torch.arange(block.num_dst_nodes()), block.edges()
        edges = torch.cat([sources, own]), torch.cat([destinations, own])
        return dgl.create_block(edges, block.num_src_nodes(), block.num_dst_nodes())

    def step(net: Any, batch: Any) -> Any:
        blocks = [with_own(block) for block in batch[2]] if has_loops and job["part"] == "losses" else batch[2]
        return net(blocks, x.index_select(0, batch[0])), known[batch[1]]

    # GraphConv counts the edges that leave a vertex, and attention wants pairs.
    whole = graph_of(has_loops).formats(["coo", "csr", "csc"]) if job["part"] == "losses" else None
    sampled = Sampled(loader, train.numel(), x, layer, step, start, whole)
    return trained(job, sampled, {"imported": imported})


def check_dgl(batch: Any, fanouts: list[int]) -> None:
    """Raises: ValueError unless sources lie within their block, destinations come first, and fan-outs are kept."""
    for block, fanout in zip(batch[2], reversed(fanouts), strict=True):
        sources, destinations = block.edges()
        check(sources, destinations, block.num_src_nodes(), block.num_dst_nodes(), fanout)
        if (block.srcdata["_ID"][: block.num_dst_nodes()] != block.dstdata["_ID"]).any():
            raise ValueError("a block's destinations are not the first of its sources")


def check(sources: Any, destinations: Any, num_sources: int, num_destinations: int, fanout: int) -> None:
    """Raises: ValueError unless edges lie within their block, and no vertex has more than the fan-out."""
    inside = (sources < num_sources).all() and (destinations < num_destinations).all()
    if not inside or min(int(sources.min()), int(destinations.min())) < 0:
        raise ValueError("a block has an edge from or to a vertex that it has not")
    if int(destinations.bincount().max()) > fanout:
        raise ValueError(f"a block has more than {fanout} edges of a vertex")


class Drawn:
    """The batches of an epoch of shuffled seeds, drawn in the thread that asks."""

    def __init__(self, draw: Callable[[Any], Any], train: Any, batch: int) -> None:
        self.draw, self.train, self.batch = draw, train, batch

    def __iter__(self) -> Iterator[Any]:
        import torch

        order = self.train[torch.randperm(self.train.numel())]
        return (self.draw(seeds) for seeds in order.split(self.batch))


def pyg(job: dict[str, Any]) -> Contender:
    """Return what PyG does in a part: NeighborLoader; layers read the rows and edges of their hops alone."""
    import torch
    import torch_geometric
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader
    from torch_geometric.nn import GCNConv

    from bench.peers import worker_pyg_layers
    from bench.peers.worker_pyg import load

    warnings.filterwarnings("ignore")
    if not torch_geometric.typing.WITH_PYG_LIB and not torch_geometric.typing.WITH_TORCH_SPARSE:
        torch.ops.load_library(str(Path(sys.prefix) / "neighbor_sample.so"))
        torch_geometric.typing.WITH_TORCH_SPARSE = True
    imported = held()
    indptr, indices, x, train, labels = load(Path(job["store"]))
    known = torch.empty(indptr.numel() - 1, dtype=torch.int64)
    known[train] = labels
    rows, csr = torch.repeat_interleave(torch.arange(indptr.numel() - 1), indptr.diff()), job["kind"] == "sage"
    data = Data(edge_index=torch.stack([indices.long(), rows]), num_nodes=indptr.numel() - 1)
    whole = None
    if job["part"] == "losses":
        whole = block_of(data.edge_index, data.num_nodes, data.num_nodes, indices.numel(), csr)
    del indptr, indices, rows
    if job["part"] != "sampler":
        data.x, data.y = x, known
    extents = {"batch_size": job["batch"], "shuffle": True, "num_workers": job.get("workers", 0), "is_sorted": True}
    loader: Any = NeighborLoader(data, job["fanouts"], input_nodes=train, **extents)
    check_pyg(next(iter(loader)), job["fanouts"])
    if job.get("again"):
        loader = Drawn(drawn_again(data, job["fanouts"], csr), train, job["batch"])
    del data
    facts: dict[str, Any] = {"imported": imported}
    if job["part"] in ("sampler", "feed"):
        sizes: list[float] = []

        def measure(batch: Any) -> None:
            sizes[:] = [float(batch.edge_index.shape[1]), float(batch.n_id.numel())]

        return Contender(lambda: paced(loader, measure, job["batches"]), facts, lambda: sizes)

    def layer(d: int, e: int, last: bool) -> Any:
        if job["kind"] == "gcn":
            return Whole(GCNConv(d, e))
        return Cut(worker_pyg_layers.make_layer(NAMES[job["kind"]], job["heads"], d, e, last))

    def start(net: Any, weights: Any) -> None:
        convs = [layer.conv for layer in net.layers]
        if job["kind"] != "gcn":
            worker_pyg_layers.set_weights(NAMES[job["kind"]], SimpleNamespace(layers=convs), weights)
            return
        for number, conv in enumerate(convs, start=1):
            linear(weights, number, conv.lin)

    class Whole(torch.nn.Module):
        """A layer that has as many results as sources."""

        def __init__(self, conv: Any) -> None:
            super().__init__()
            self.conv = conv

        def forward(self, block: Any, h: Any) -> Any:
            return self.conv(h, block[0])[: block[1]]

    class Cut(Whole):
        def forward(self, block: Any, h: Any) -> Any:
            return self.conv(block[0], (h, h[: block[1]]))

    def step(net: Any, batch: Any) -> Any:
        if job.get("again"):
            blocks, ids, seeds = batch
            return net(blocks, x.index_select(0, ids)), known[seeds]
        blocks = [block_of(batch.edge_index, *hop, csr) for hop in reversed(hops_of(batch, len(job["fanouts"])))]
        return net(blocks, batch.x), batch.y[: batch.batch_size]

    return trained(job, Sampled(loader, train.numel(), x, layer, step, start, whole), facts)


def drawn_again(data: Any, fanouts: list[int], csr: bool) -> Callable[[Any], Any]:
    """Return what draws the blocks of seeds, the input's first, and their rows, hop by hop of all vertices so far."""
    import torch
    from torch_geometric.sampler import NeighborSampler, NodeSamplerInput

    samplers = [NeighborSampler(data, [fanout], is_sorted=True) for fanout in fanouts]

    def draw(seeds: Any) -> Any:
        ids, blocks = seeds, []
        for sampler, fanout in zip(samplers, fanouts, strict=True):
            hop = sampler.sample_from_nodes(NodeSamplerInput(None, ids))
            check(hop.row, hop.col, hop.node.numel(), ids.numel(), fanout)
            edges = torch.stack([hop.row, hop.col])
            blocks.insert(0, block_of(edges, ids.numel(), hop.node.numel(), hop.row.numel(), csr))
            ids = hop.node
        return blocks, ids, seeds

    return draw


def hops_of(batch: Any, count: int) -> list[tuple[int, int, int]]:
    """Return targets, sources and edges of every hop, from the seeds on: vertices and edges are in the order of drawing."""
    import torch

    sources, destinations = batch.edge_index
    hops, targets = [], batch.batch_size
    for _ in range(count):
        edges = int(torch.searchsorted(destinations, targets))
        num_sources = max(targets, int(sources[:edges].max()) + 1 if edges else 0)
        hops.append((targets, num_sources, edges))
        targets = num_sources
    return hops


def block_of(edge_index: Any, targets: int, num_sources: int, edges: int, csr: bool) -> tuple[Any, int]:
    """Return a hop's edges, as pairs or as a CSR matrix of ones, and its number of targets."""
    import torch

    if not csr:
        return edge_index[:, :edges], targets
    sources, destinations = edge_index[0, :edges], edge_index[1, :edges]
    pointers = torch.searchsorted(destinations, torch.arange(targets + 1))
    return torch.sparse_csr_tensor(pointers, sources, torch.ones(edges), (targets, num_sources)), targets


def check_pyg(batch: Any, fanouts: list[int]) -> None:
    """Raises: ValueError unless hops nest, edges ascend by their target and lie within the batch, and fan-outs are kept."""
    sources, destinations = batch.edge_index
    check(sources, destinations, batch.n_id.numel(), batch.n_id.numel(), max(fanouts))
    if (destinations.diff() < 0).any():
        raise ValueError("a batch's edges are not in the order of drawing")
    if hops_of(batch, len(fanouts))[-1][1:] != (batch.n_id.numel(), sources.numel()):
        raise ValueError("the hops of a batch are not all of it")


def prepare(job: dict[str, Any]) -> Contender:
    """Return what a library does in a part."""
    return {"dgl": dgl_library, "pyg": pyg}[job["package"]](job)


if __name__ == "__main__":
    serve(prepare)
