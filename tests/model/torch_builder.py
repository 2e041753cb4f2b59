"""The builder's twin on dense torch matrices in float64: the same model function, differentiated by torch.autograd."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mggcn.config import ModelConfig
from mggcn.graph.csr import Graph
from tests.reference import dense_csr, dense_features, dropout_mask
from tests.train.test_exact import SEED

EPOCH = 3


@dataclass(frozen=True)
class Dense:
    """A value of the twin."""

    t: torch.Tensor

    @property
    def cols(self) -> int:
        return self.t.shape[1]


class TorchBuilder:
    """As model/builder.py's, for parameters that are there."""

    def __init__(self, graph: Graph, config: ModelConfig, p: Mapping[str, torch.Tensor], *, training: bool) -> None:
        self.config, self.num_classes, self.training, self._graph, self._p = (
            config,
            graph.num_classes,
            training,
            graph,
            p,
        )
        adj = dense_csr(graph.adj)
        if config.self_loops:
            np.fill_diagonal(adj, np.where(np.diagonal(adj) == 0, 1.0, np.diagonal(adj)))
        self._a_t = torch.from_numpy(adj.T.copy())
        degree = self._a_t.sum(1, keepdim=True)
        row = degree**-0.5 if config.norm == "symmetric" else 1 / degree
        self._row = torch.where(degree > 0, row, torch.zeros_like(row))
        self._col = self._row if config.norm == "symmetric" else torch.ones_like(row)
        self._layers = self._masks = 0

    def input(self) -> Dense:
        return self._dropped(Dense(torch.from_numpy(dense_features(self._graph))), self.config.input_dropout, 0)

    def _dropped(self, x: Dense, p: float, site: int) -> Dense:
        if not self.training or not p:
            return x
        return Dense(x.t * torch.from_numpy(dropout_mask(np.arange(x.t.shape[0]), x.cols, p, SEED, EPOCH, site)))

    def linear(self, x: Dense, cols: int) -> Dense:
        self._layers += 1
        return Dense(x.t @ self._p[f"layers.{self._layers}.weight"])

    def bias(self, x: Dense, name: str = "") -> Dense:
        return Dense(x.t + self._p[name or f"layers.{self._layers}.bias"]) if self.config.bias else x

    def neighbours(self, x: Dense) -> Dense:
        return Dense(self._a_t @ x.t)

    def aggregate(self, x: Dense) -> Dense:
        return Dense(self._row * (self._a_t @ (self._col * x.t)))

    def scale(self, x: Dense, by: str) -> Dense:
        return Dense(x.t * (self._row if by == "row" else self._col))

    def relu(self, x: Dense) -> Dense:
        return Dense(torch.relu(x.t))

    def dropout(self, x: Dense) -> Dense:
        self._masks += 1
        return self._dropped(x, self.config.dropout, self._masks)

    def add(self, a: Dense, b: Dense) -> Dense:
        return Dense(a.t + b.t)


def expected(
    network: Any, graph: Graph, config: ModelConfig, weights: Mapping[str, torch.Tensor]
) -> tuple[float, dict[str, np.ndarray], np.ndarray]:
    """Loss and gradients of a training epoch, logits of an evaluation."""
    p = {name: w.double().clone().requires_grad_() for name, w in weights.items()}
    with torch.enable_grad():
        builder = TorchBuilder(graph, config, p, training=True)
        z = network(builder, builder.input(), config).t
        train = torch.from_numpy(graph.splits["train"].array()[0])
        labels = torch.from_numpy(graph.labels.array().astype(np.int64))  # type: ignore[union-attr]
        loss = torch.nn.functional.cross_entropy(z[train], labels[train])
        loss.backward()  # type: ignore[no-untyped-call]
    still = TorchBuilder(graph, config, p, training=False)
    logits = network(still, still.input(), config).t.detach().numpy()
    gradients = {n: np.zeros(v.shape) if v.grad is None else v.grad.numpy() for n, v in p.items()}
    return float(loss.detach()), gradients, logits
