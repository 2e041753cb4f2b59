"""PyTorch Geometric's GCN on a GPU, launched or captured; bench/peers/worker_pyg.py describes its ways.

Also its GAT and its maximum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.gpu.lab import Lab
from bench.peers.attention import EDGE_ROWS, HEADS, SCATTER
from bench.peers.layers import make_net as make_layers
from bench.peers.worker_pyg import make_graph, make_net
from bench.peers.worker_pyg_layers import make_layer, set_weights
from mggcn.backend.events import Eager
from mggcn.graph.csr import CSR, Graph
from mggcn.model.runtime import require

KINDS = ("fused", "csr", "scatter", "scaled")
GAT, MAX = "gat", "sage-max"
"""Layers of GATConv and of SAGEConv's maximum as they are, on a plain edge_index."""
SHIPPED = ("csr", "scatter", GAT, MAX)
"""Kinds that are PyG's as it ships; the others are improved for this comparison."""
WARM_UP = 3
SCATTERING = ("scatter_add", "scatter_add_", "index_add", "index_add_", "index_select_backward")


class Products(TorchDispatchMode):
    """Counts products with the graph: calls with a sparse operand, and sums of messages into rows."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own, without annotations
        self.count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        name = func.overloadpacket.__name__
        multiplies = "mm" in name and any(t.layout != torch.strided for t in tensors)
        self.count += multiplies or (name in SCATTERING and tensors[0].dim() == 2)
        return func(*args, **(kwargs or {}))


class Peer:
    """PyG's network on a graph, from given weights, with fused Adam."""

    MODES: ClassVar = ("launched", "captured")

    def __init__(
        self,
        lab: Lab,
        graph: Graph,
        hidden: tuple[int, ...],
        weights: dict[str, torch.Tensor],
        kind: str,
        lr: float,
        wrap: Callable[[Any], Any] = lambda net: net,
    ) -> None:
        device = lab.device.torch_device
        # autograd keeps about eight times the widest messages (bench/peers/epochs.py).
        messages = 8.0 if kind == "scatter" else EDGE_ROWS.get((kind, SCATTER), 0.0)
        need = messages * 4 * (graph.num_edges + graph.num_vertices) * max(hidden)
        if need > lab.free_bytes():
            raise ValueError(f"its messages need about {need / 2**30:.0f} GiB")
        x = features(graph).to(device)
        labels = torch.from_numpy(require(graph.labels).array().copy()).to(device)
        train = torch.from_numpy(graph.splits["train"].read(0, 1)[0]).nonzero().view(-1).to(device)
        indptr = torch.from_numpy(graph.adj_t.indptr.array().copy()).to(device)
        indices = torch.from_numpy(graph.adj_t.indices.array().copy()).to(device)
        with torch.device(device):
            edges = make_graph("scatter" if kind in (GAT, MAX) else kind, indptr, indices)
            net = network(kind, [x.shape[1], *hidden, graph.num_classes], weights)
        gpu = device.type == "cuda"
        self._device = lab.device
        self._optimizer = torch.optim.Adam(net.parameters(), lr=lr, fused=True, capturable=gpu)
        self._net, self._x, self._edges, self._train, self._target = wrap(net), x, edges, train, labels[train]
        self._loss = torch.zeros((), device=device)

    def _epoch(self) -> None:
        self._optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self._net(self._x, self._edges)[self._train], self._target)
        loss.backward()
        self._optimizer.step()
        self._loss.copy_(loss.detach())

    def step(self) -> float:
        """Train one epoch and look at its loss."""
        self._epoch()
        return float(self._loss)

    def count_products(self) -> int:
        """Train one epoch; return its products with the graph."""
        with Products() as counting:
            self._epoch()
        return int(counting.count)

    def epochs(self, mode: str) -> tuple[Callable[[int], None], str]:
        """Return what trains so many epochs without a look, and how the device gets them: Repeatable.state."""
        one = self._device.repeatable(self._epoch) if mode == "captured" else Eager(self._epoch)
        for _ in range(WARM_UP):
            one()
        self._device.synchronize()

        def run(count: int) -> None:
            for _ in itertools.repeat(None, count):
                one()

        return run, one.state


def network(kind: str, widths: list[int], weights: dict[str, torch.Tensor]) -> Any:
    """PyG's network from given weights, called with features and a graph."""
    if kind in (GAT, MAX):
        layers = make_layers(widths, lambda *size: make_layer(kind, HEADS, *size), batch_norm=False)
        with torch.no_grad():
            set_weights(kind, layers, {name: weight.cpu().numpy() for name, weight in weights.items()})
        return Turned(layers)
    net = make_net(kind, widths)
    with torch.no_grad():
        for layer, conv in enumerate(net.convs, start=1):
            conv.lin.weight.copy_(weights[f"layers.{layer}.weight"].t())
            conv.bias.zero_()
    return net


class Turned(torch.nn.Module):
    """A network that takes the graph first, called the other way round."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net: Any = net

    def forward(self, x: Any, graph: Any) -> Any:
        return self.net(graph, x)


def features(graph: Graph) -> torch.Tensor:
    """The features as a dense matrix."""
    found = graph.features
    if not isinstance(found, CSR):
        return torch.from_numpy(require(found).array().copy())
    values = torch.from_numpy(require(found.values).array().copy())
    pointers, columns = (torch.from_numpy(rows.array().copy()) for rows in (found.indptr, found.indices))
    shape = (found.num_rows, found.num_cols)
    return torch.sparse_csr_tensor(pointers, columns.long(), values, shape, check_invariants=False).to_dense()
