"""A recipe of bench/recipes.py trained with PyTorch Geometric's layers and their own initial weights: the settings,
splits, features and protocol are the same, so a score that both miss is not mggcn's.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from bench.arrays import dense_features, edge_values, with_loops
from mggcn.config import Config, ModelConfig
from mggcn.train.metrics import gathered_score

SPARSE = 0.05
"""Features with a smaller share of non-zeros are a sparse matrix for GCNConv, which multiplies them with weights alone: the
same product in less time."""


def make_conv(model: ModelConfig, d: int, e: int) -> Any:
    """A convolution, on graphs whose self-loops and norm are there already."""
    from torch_geometric.nn import GATConv, GCNConv, SAGEConv

    if model.kind == "gat":
        return GATConv(d, e, add_self_loops=False, bias=model.bias)
    return SAGEConv(d, e) if model.kind == "sage" else GCNConv(d, e, normalize=False)


def make_graph(kind: str, store: Path) -> Any:
    """With a self-loop at every vertex: a sparse matrix, normalised for gcn; edges alone for gat."""
    indptr, indices = with_loops(store)
    if kind == "gat":
        rows = np.repeat(np.arange(indptr.size - 1), np.diff(indptr))
        return torch.from_numpy(np.stack([indices.astype(np.int64), rows]))
    values = edge_values(indptr, indices) if kind == "gcn" else np.ones(indices.size, np.float32)
    size = (indptr.size - 1, indptr.size - 1)
    return torch.sparse_csr_tensor(
        torch.from_numpy(indptr), torch.from_numpy(indices.astype(np.int64)), torch.from_numpy(values), size
    )


class Network(torch.nn.Module):
    """Hidden layers relu(norm(conv(x) + linear(x))) and a linear head, with dropout behind each ReLU."""

    def __init__(self, model: ModelConfig, features: int, classes: int) -> None:
        super().__init__()
        widths = (features, *model.hidden)
        norm = {"layer": torch.nn.LayerNorm, "batch": torch.nn.BatchNorm1d, "none": lambda _: torch.nn.Identity()}
        self.convs, self.linears, self.norms = (torch.nn.ModuleList() for _ in range(3))
        for d, e in itertools.pairwise(widths):
            self.convs.append(make_conv(model, d, e))
            self.linears.append(torch.nn.Linear(d, e) if model.residual == "linear" else torch.nn.Identity())
            self.norms.append(norm[model.norm_layer](e))
        self.head, self.model = torch.nn.Linear(widths[-1], classes), model

    def forward(self, x: Any, graph: Any) -> Any:
        for conv, linear, norm in zip(self.convs, self.linears, self.norms, strict=True):
            added = linear(x) if self.model.residual == "linear" else 0
            x = functional.relu(norm(conv(x, graph) + added))
            x = functional.dropout(x, self.model.dropout, self.training)
        return self.head(x)


def score(metric: str, logits: Any, labels: Any, rows: Any) -> float:
    if metric == "roc_auc":
        return gathered_score("roc_auc", logits[rows].double().numpy(), labels[rows].numpy()) or 0.0
    return float((logits[rows].argmax(1) == labels[rows]).float().mean())


def masks(store: Path, split: int) -> dict[str, Any]:
    found = {name: np.load(store / f"{name}.npy") for name in ("train", "val", "test")}
    return {name: torch.from_numpy(mask if mask.ndim == 1 else mask[split]) for name, mask in found.items()}


def trained(config: Config, store: Path) -> dict[str, Any]:
    """Train one run; return the scores of the best validation epoch, the first of equal ones."""
    began = time.perf_counter()
    torch.manual_seed(config.train.seed)
    torch.set_num_threads(config.run.threads)
    x, labels = torch.from_numpy(dense_features(store)), torch.from_numpy(np.load(store / "labels.npy"))
    if config.data.row_normalize:
        x = x / x.sum(1, keepdim=True).clamp(min=1)
    if config.model.kind == "gcn" and (x != 0).sum() < SPARSE * x.numel():
        x = x.to_sparse_csr()
    graph, parts = make_graph(config.model.kind, store), masks(store, config.data.split)
    net = Network(config.model, x.shape[1], int(labels.max()) + 1)
    optimizer = torch.optim.Adam(net.parameters(), config.train.lr, weight_decay=config.train.weight_decay)
    metric = "roc_auc" if config.train.metric == "roc_auc" else "accuracy"
    best: dict[str, Any] = {"val": -1.0}
    for epoch in range(1, config.train.epochs + 1):
        net.train()
        optimizer.zero_grad()
        functional.cross_entropy(net(x, graph)[parts["train"]], labels[parts["train"]]).backward()
        optimizer.step()
        net.eval()
        with torch.no_grad():
            logits = net(x, graph)
        found = {name: score(metric, logits, labels, rows) for name, rows in parts.items()}
        if found["val"] > best["val"]:
            best = {"epoch": epoch, **found}
    seconds = time.perf_counter() - began
    last = {"last": found["test"], "metric": metric, "epochs": config.train.epochs}
    return best | last | {"seconds": seconds, "seconds_per_epoch": seconds / config.train.epochs}
