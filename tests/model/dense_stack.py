"""The models of all kinds as papers write them, on dense float64 matrices for autograd: without builder or rewrites."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch.nn import functional

from mggcn.config import ModelConfig
from mggcn.graph.csr import Graph
from tests.model.test_neighbours import dense_attention
from tests.reference import dense_csr, dense_features, dropout_mask
from tests.train.test_exact import SEED

EPOCH = 3
MOMENTUM = 0.1
ACTIVATIONS = {
    "relu": torch.relu,
    "elu": functional.elu,
    "leaky_relu": functional.leaky_relu,
    "gelu": functional.gelu,
}


class DenseStack:
    """One pass of a model. weights: by mggcn's names; running: statistics of batch norms, which training writes."""

    def __init__(
        self,
        graph: Graph,
        model: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        running: dict[str, torch.Tensor],
        *,
        training: bool,
    ) -> None:
        self.model, self.p, self.running, self.training = model, weights, running, training
        adj = dense_csr(graph.adj)
        if model.self_loops:
            np.fill_diagonal(adj, np.where(np.diagonal(adj) == 0, 1.0, np.diagonal(adj)))
        self.a_t, self.x = torch.from_numpy(adj.T.copy()), torch.from_numpy(dense_features(graph))
        degree = self.a_t.sum(1, keepdim=True)
        scale = torch.where(degree > 0, degree ** (-0.5 if model.norm == "symmetric" else -1), torch.zeros(1).double())
        self.a_hat = scale * self.a_t * (scale.t() if model.norm == "symmetric" else 1)
        self.ids = np.arange(graph.num_vertices)
        self.layers = self.norms = self.masks = self.aggregates = 0

    def matrix(self, x: torch.Tensor) -> torch.Tensor:
        self.layers += 1
        return x @ self.p[f"layers.{self.layers}.weight"]

    def bias(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.p[f"layers.{self.layers}.bias"] if self.model.bias else x

    def dense(self, x: torch.Tensor) -> torch.Tensor:
        return self.bias(self.matrix(x))

    def around(self, x: torch.Tensor) -> torch.Tensor:
        """A dense layer around convolutions."""
        x = self.matrix(x)
        return x + self.p[f"layers.{self.layers}.bias"]

    def dropped(self, x: torch.Tensor, p: float, site: int) -> torch.Tensor:
        return x * torch.from_numpy(dropout_mask(self.ids, x.shape[1], p, SEED, EPOCH, site)) if self.training else x

    def end(self, x: torch.Tensor) -> torch.Tensor:
        """Norm, activation, dropout."""
        x = ACTIVATIONS[self.model.activation](self.norm(x))
        self.masks += 1
        return self.dropped(x, self.model.dropout, self.masks)

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        if self.model.norm_layer == "none":
            return x
        self.norms += 1
        name = f"norms.{self.norms}"
        both = self.p[f"{name}.weight"], self.p[f"{name}.bias"]
        if self.model.norm_layer == "layer":
            return functional.layer_norm(x, both[0].shape, *both)
        mean, variance = f"{name}.running_mean", f"{name}.running_var"
        if not self.training:
            return functional.batch_norm(x, self.running[mean], self.running[variance], *both)
        centre, spread = x.mean(0), x.var(0, unbiased=False)
        self.running[mean] = MOMENTUM * centre.detach()
        self.running[variance] = 1 - MOMENTUM + MOMENTUM * x.var(0, unbiased=True).detach()
        return (x - centre) / (spread + 1e-5).sqrt() * both[0] + both[1]

    def conv(self, x: torch.Tensor) -> torch.Tensor:
        kind = self.model.kind
        if kind == "mlp":
            return self.dense(x)
        if kind == "gin":
            h = (1 + self.p[f"layers.{self.layers + 1}.eps"]) * x + self.a_t @ x
            return self.dense(ACTIVATIONS[self.model.activation](self.dense(h)))
        if kind == "sage" and self.model.aggregator == "mean":
            neighbours = self.matrix(self.a_hat @ x)
            return self.bias(neighbours + self.matrix(x))
        if kind == "sage" and self.model.aggregator == "max":
            pooled, linked = torch.relu(self.dense(x)), (self.a_t != 0)[:, :, None]
            best = torch.where(linked, pooled[None], -torch.inf).max(1).values
            own = self.matrix(x)
            return self.bias(own + self.matrix(torch.where(best.isinf(), 0.0, best)))
        if kind == "gat":
            return self.attention(self.matrix(x)[:, None])
        return self.bias(self.matrix(self.a_hat @ x))

    def attention(self, h: torch.Tensor) -> torch.Tensor:
        """GAT with one head of h (V, 1, C)."""
        self.aggregates += 1
        s, t = ((h * self.p[f"layers.{self.layers}.{end}"]).sum(2) for end in ("source", "destination"))
        scores = functional.leaky_relu(s[:, None] + t[None], 0.2)
        z = dense_attention(self.a_t.t() != 0, scores, h, torch.ones(1).double())
        return z + self.p[f"attention.{self.aggregates}.bias"] if self.model.bias else z

    def logits(self) -> torch.Tensor:
        model, x = self.model, self.dropped(self.x, self.model.input_dropout, 0)
        if model.kind == "sgc":
            return self.dense(torch.linalg.matrix_power(self.a_hat, model.hops) @ x)
        for _ in model.dense_before:
            x = self.end(self.dense(x) if model.kind == "appnp" else self.around(x))
        if model.kind == "appnp":
            for _ in model.hidden:
                x = self.end(self.dense(x))
            z = first = self.dense(x)
            for _ in range(model.hops):
                z = (1 - model.teleport) * self.a_hat @ z + model.teleport * first
            return z
        layers = []
        for width in model.hidden:
            h = self.conv(x)
            if model.residual == "linear":
                h = h + self.around(x)
            elif model.residual == "identity" and x.shape[1] == width:
                h = h + x
            x = self.end(h)
            x = self.end(self.around(x)) if model.dense_between else x
            layers.append(x)
        if model.head == "convolution":
            return self.conv(x)
        if model.jumping == "concat":
            x = torch.cat(layers, 1)
        for other in reversed(layers[:-1] if model.jumping == "max" else []):
            x = torch.where(other >= x, other, x)
        for _ in model.dense_after:
            x = self.end(self.around(x))
        return self.around(x)


def expected(
    graph: Graph, model: ModelConfig, weights: Mapping[str, torch.Tensor]
) -> tuple[float, dict[str, np.ndarray], np.ndarray, dict[str, torch.Tensor]]:
    """Loss and gradients of a training epoch; then logits of an evaluation, and the running statistics that it reads."""
    running: dict[str, torch.Tensor] = {}
    p = {name: w.double().clone().requires_grad_() for name, w in weights.items() if "running" not in name}
    with torch.enable_grad():
        z = DenseStack(graph, model, p, running, training=True).logits()
        train = torch.from_numpy(graph.splits["train"].array()[0])
        labels = torch.from_numpy(graph.labels.array().astype(np.int64))  # type: ignore[union-attr]
        loss = functional.cross_entropy(z[train], labels[train])
        loss.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        logits = DenseStack(graph, model, p, running, training=False).logits().numpy()
    gradients = {name: np.zeros(v.shape) if v.grad is None else v.grad.numpy() for name, v in p.items()}
    return float(loss.detach()), gradients, logits, running
